"""What the comparison of rollouts with the model found, as results keep and print it. Without torch.

rollouts_check(found, weighted)     the entry of the results
check_lines(check)                  the two lines that a run prints
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

DOUBTFUL = 3.0  # standard errors of a surprise by which a run warns


def rollouts_check(found: Iterable[dict | None], weighted: bool) -> dict | None:
    """The entry ``rollouts_check`` of the results, from what the records keep; None where no prompt was compared.

    With log-probs: medians over prompts, the largest difference of all, mean and least effective sample size. Without:
    the surprise per token and its standard error.
    """
    found = [each for each in found if each]
    if not found:
        return None
    about = {"prompts": len(found), "tokens": sum(each["tokens"] for each in found), "importance_weights": weighted}
    if all("effective" in each for each in found):
        effective = [each["effective"] for each in found]
        return {
            **about,
            "median_difference": float(np.median([each["median_difference"] for each in found])),
            "mean_difference": sum(each["mean_difference"] * each["tokens"] for each in found) / about["tokens"],
            "largest_difference": max(each["largest_difference"] for each in found),
            "effective_sample_size": float(np.mean(effective)),
            "least_effective_sample_size": min(effective),
            "by_prompt": found,
        }
    known = [each for each in found if "surprise" in each]
    count = sum(each["tokens"] for each in known)
    return {
        **about,
        "surprise": sum(each["surprise"] for each in known) / count,
        "surprise_standard_error": math.sqrt(sum(each["variance"] for each in known)) / count,
        "by_prompt": found,
    }


def check_lines(check: dict) -> list[str]:
    """``rollouts_check`` as the two lines that a run prints."""
    head = f"rollouts of {check['prompts']} prompts, {check['tokens']} tokens"
    if "surprise" in check:
        error = check["surprise_standard_error"]
        means = "0 where they are of this model and law"
        if abs(check["surprise"]) > DOUBTFUL * error:
            means = f"warning: it is {means}"
        return [
            f"{head}: without the sampler's log-probs, so sampler and scorer cannot be compared token by token",
            f"  their surprise under --model is {check['surprise']:.2g} per token, standard error {error:.2g} ({means})",
        ]
    corrected = "corrected by importance weights" if check["importance_weights"] else "not corrected (--importance_weights)"
    return [
        f"{head}: log-probs of scorer and sampler differ by {check['mean_difference']:.2g} per token in the mean "
        f"(median {check['median_difference']:.2g}, largest {check['largest_difference']:.2g})",
        f"  effective sample size {check['effective_sample_size']:.3f} of a prompt's rollouts, least "
        f"{check['least_effective_sample_size']:.3f}; {corrected}",
    ]
