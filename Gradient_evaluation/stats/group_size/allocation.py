"""How many continuations should each prompt get? The allocation of N continuations of least variance, and what it gains.

    found, counts = allocation(prompts, total, bootstrap)     JSON-ready, and (n_prompts,) continuations or None

A prompt with n continuations has the conditional variance f(n) = a/n + c/(n (n-1)) of GRPO's gradient estimate, a = 4 zeta1
and c = 2 zeta2 - 4 zeta1 (``blocks.group_trace``). The mean of f over prompts is minimised over integers n >= 2 that sum to N.
This is Neyman's allocation (1934) for a U-statistic. Each f is convex, so the largest gain first is exact.

The moments of one prompt are noisy. An allocation that takes them as they are follows the noise, and judged by the same
moments it promises a gain that is not there. So they are pulled toward their mean over prompts (``shrunk``), and the gain is
that of an allocation from half of each prompt's blocks, judged on the other half, both ways.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.missing import Missing, with_reasons
from Gradient_evaluation.stats.prompts import PromptMoments

LEAST = 2  # continuations of a prompt: one has no leave-one-out baseline
NO_GAIN = "every prompt's variance is estimated as 0: no allocation is better than another"


def group_variance(terms: np.ndarray, sizes: np.ndarray | int) -> np.ndarray:
    """f(n) = a/n + c/(n (n-1)): terms (..., 2) a and c, sizes (...) n >= 2."""
    return terms[..., 0] / sizes + terms[..., 1] / (sizes * (np.asarray(sizes) - 1))


def equal_variance(terms: np.ndarray, total: int) -> np.ndarray:
    """(n_prompts,): the mean of f where ``total`` is shared equally and what is left over falls on prompts at random."""
    low, left = divmod(total, len(terms))
    share = left / len(terms)
    return (1 - share) * group_variance(terms, low) + share * group_variance(terms, low + 1)


def greedy(terms: np.ndarray, total: int) -> np.ndarray:
    """The integers n >= 2 with sum ``total`` of least mean f: terms (n_prompts, 2), none below 0. Returns (n_prompts,) int64.

    The gain f(n) - f(n+1) = a/(n (n+1)) + 2 c/((n-1) n (n+1)) falls with n, so it is best to take the largest gain each
    time. Of equal gains the prompt with fewer continuations comes first. ValueError where there are not two for each prompt.
    """
    if total < LEAST * len(terms):
        raise ValueError(f"{total} continuations are fewer than {LEAST} for each of {len(terms)} prompts")

    def next_gain(prompt: int, size: int) -> tuple[float, int, int]:
        a, c = pairs[prompt]
        return (-(a + 2 * c / (size - 1)) / (size * (size + 1)), size, prompt)

    pairs = terms.tolist()
    heap = [next_gain(prompt, LEAST) for prompt in range(len(pairs))]
    heapq.heapify(heap)
    for _ in range(total - LEAST * len(pairs)):
        _, size, prompt = heap[0]
        heapq.heapreplace(heap, next_gain(prompt, size + 1))
    counts = np.empty(len(pairs), dtype=np.int64)
    for _, size, prompt in heap:
        counts[prompt] = size
    return counts


def mean_terms(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """(n_prompts, 2): each prompt's a and c; blocks: of each prompt (m, 3), a, c and what the block counts."""
    return np.array([np.average(each[:, :2], axis=0, weights=each[:, 2]) for each in blocks])


def block_noise(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """(2,): the variance of a block's a and c about those of its prompt, times what it counts, over all prompts.

    blocks: see ``mean_terms``. One number for all blocks: exact where sizes are equal, or the variance falls as 1/count.
    """
    freedom = sum(len(each) - 1 for each in blocks)
    means = mean_terms(blocks)
    return sum((each[:, 2:] * (each[:, :2] - mean) ** 2).sum(0) for each, mean in zip(blocks, means)) / freedom


def shrunk(blocks: Sequence[np.ndarray], noise: np.ndarray) -> np.ndarray:
    """(n_prompts, 2): each prompt's a and c, pulled toward the mean over prompts as far as they are noise; none below 0.

    blocks: see ``mean_terms``; noise: ``block_noise``. Empirical Bayes: with noise s^2/n of the mean of a prompt whose
    blocks count n together and t^2 what the spread over prompts has beyond that, the mean is kept with the weight
    t^2 / (t^2 + s^2/n).
    """
    means = mean_terms(blocks)
    own = noise / np.array([each[:, 2].sum() for each in blocks])[:, None]
    between = np.maximum(0.0, means.var(0, ddof=1) - own.mean(0)) if len(means) > 1 else np.zeros(2)
    kept = np.divide(between, between + own, out=np.ones_like(own), where=between + own > 0)
    return np.maximum(0.0, means.mean(0) + kept * (means - means.mean(0)))


def crossed(blocks: Sequence[np.ndarray], total: int) -> tuple[np.ndarray, np.ndarray]:
    """(n_prompts,) each: the variance under an allocation from half of the blocks, judged on the other half; and under equal.

    Both are means over the two ways, unbiased for the allocations that were made: these know nothing of the blocks that
    judge them. Where a half is one block its noise is taken from both halves, a single number for all prompts.
    """
    halves = [[each[::2] for each in blocks], [each[1::2] for each in blocks]]
    repeated = min(len(each) for half in halves for each in half) > 1
    allocated, equal = np.zeros(len(blocks)), np.zeros(len(blocks))
    for made_from, judged_on in (halves, halves[::-1]):
        noise = block_noise(made_from if repeated else blocks)
        counts = greedy(shrunk(made_from, noise), total)
        terms = mean_terms(judged_on)
        allocated += group_variance(terms, counts) / 2
        equal += equal_variance(terms, total) / 2
    return allocated, equal


def allocation(prompts: PromptMoments, total: int, bootstrap: PromptBootstrap) -> tuple[dict, np.ndarray | None]:
    """The entry ``allocation`` of the results, and how many of ``total`` continuations each prompt should get, or None.

    {N, n_prompts, continuations {least, median, most} of a prompt; variance_equal, variance_allocated: mean over prompts
    of the variance, by ``crossed``; gain: 1 - variance_allocated / variance_equal, each with _ci95; reasons}. The counts
    are from all blocks, so they should do a little better than the gain says. Without two blocks of every prompt all are
    null: nothing tells noise from differences between prompts. ValueError as ``greedy``.
    """
    blocks = prompts.block_terms
    few = sum(len(each) < 2 for each in blocks)
    if total < LEAST * len(blocks):
        raise ValueError(f"{total} continuations are fewer than {LEAST} for each of {len(blocks)} prompts")
    found: dict = {"N": total, "n_prompts": len(blocks)}
    names = ("variance_equal", "variance_allocated", "gain")
    keys = ["continuations", *names, *(f"{name}_ci95" for name in names)]
    if few:
        why = f"{few} of {len(blocks)} prompts have one block only, which cannot tell noise from differences between prompts"
        return with_reasons(found | dict.fromkeys(keys, Missing(f"{why}; raise --M or lower --block_size"))), None
    terms = shrunk(blocks, block_noise(blocks))
    if not terms.any():
        return with_reasons(found | dict.fromkeys(keys, Missing(NO_GAIN))), None
    counts = greedy(terms, total)
    found["continuations"] = {"least": int(counts.min()), "median": float(np.median(counts)), "most": int(counts.max())}
    allocated, equal = crossed(blocks, total)
    share = bootstrap.ratio(allocated, equal, "variance of equal groups")
    for name, estimate in zip(names, (bootstrap.mean(equal), bootstrap.mean(allocated), share)):
        found[name], found[f"{name}_ci95"] = estimate.value_or_missing(), estimate.interval_or_missing()
    if share.value is not None:
        found["gain"] = 1 - share.value
    if share.interval is not None:
        found["gain_ci95"] = [1 - end for end in share.interval[::-1]]
    return with_reasons(found), counts
