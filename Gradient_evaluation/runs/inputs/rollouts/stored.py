"""The rollouts that --rollouts measures: which are usable, whether they are of this run's law, and their rewards.

usable(several, settings)                    the prompts with at least four rewarded continuations, and what is left out
check_law(rollouts, identity, ...)           they were sampled as this run's flags say
digest(several), rewards_digest(several)     what the identity of a run holds of them
rewards_of_rollouts(rollouts, rewards)       those of the file, or of --reward
with_value_of_this_law(row, identity)        the row with the V_oracle of its columns, where that is of this law and reward
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import Row, to_json, warn_on_stderr
from Gradient_evaluation.runs.inputs.oracle_table import OracleRow, with_oracle_value, without_oracle_value
from Gradient_evaluation.runs.inputs.rewards import OUT_OF_RANGE, RESCALE, Rewards, RunRewards, judged, squares_fit
from Gradient_evaluation.runs.machine.resume import ADDED_LATER
from Gradient_evaluation.sampling.rollouts import Rollouts
from Gradient_evaluation.settings import TracecovSettings
from Gradient_evaluation.stats.blocks import MIN_BLOCK


class Usable(NamedTuple):
    """rollouts: of the prompts that can be measured; n_few: prompts with fewer than 4 usable continuations, left out;
    n_unrewarded: continuations without a reward, left out."""

    rollouts: list[Rollouts]
    n_few: int
    n_unrewarded: int

    def __str__(self) -> str:
        """What is left out, as one line; "" where nothing is."""
        prompts = f"{self.n_few} prompt{'s' * (self.n_few > 1)} with fewer than {MIN_BLOCK} rollouts" if self.n_few else ""
        rest = f"{self.n_unrewarded} rollout{'s' * (self.n_unrewarded > 1)} without a reward" if self.n_unrewarded else ""
        named = " and ".join(part for part in (rest, prompts) if part)
        return f"left out {named}" if named else ""


def usable(several: Sequence[Rollouts], settings: TracecovSettings) -> Usable:
    """What can be measured. Raises UserError where nothing can, and without --reward where the files have no rewards."""
    rollouts, n_unrewarded = list(several), 0
    if settings.reward is None:
        if all(each.rewards is None for each in several):
            raise UserError(f"{several[0].where(0)}: has no reward; give --reward, which judges the texts")
        rewarded = [_rewarded(each) for each in several]
        n_unrewarded = sum(len(one.continuations) - len(other.continuations) for one, other in zip(several, rewarded))
        rollouts = rewarded
    large = [each for each in rollouts if len(each.continuations) >= MIN_BLOCK]
    if not large:
        first = several[0]
        raise UserError(
            f"{first.where(0)}: none of the {len(several)} prompts has {MIN_BLOCK} usable rollouts (this one has "
            f"{len(rollouts[0].continuations)}); give files with more rollouts of each prompt"
        )
    return Usable(large, len(rollouts) - len(large), n_unrewarded)


def _rewarded(rollouts: Rollouts) -> Rollouts:
    """The continuations that have a reward. UserError for a reward that statistics cannot use."""
    if rollouts.rewards is None:
        return rollouts.only([])
    for index, value in enumerate(rollouts.rewards):
        if not (np.isnan(value) or squares_fit(float(value))):
            raise UserError(f"{rollouts.where(index)}: its reward is {value:g}, {OUT_OF_RANGE}; {RESCALE}")
    return rollouts.only(np.flatnonzero(~np.isnan(rollouts.rewards)).tolist())


def rewards_of_rollouts(rollouts: Rollouts, rewards: RunRewards | None) -> Rewards:
    """What the rewards of the run say of the texts; without one, the rewards of the file."""
    if rewards is None:
        return Rewards(rollouts.rewards, rollouts.rewards[None])
    return judged(rollouts.continuations, rollouts.row, rewards)


def check_law(
    rollouts: Rollouts, identity: dict[str, Any], allow_mismatch: bool, warn: Callable[[str], None] = warn_on_stderr
) -> None:
    """Compare what the file says of model and law with this run's ``identity``; UserError naming each difference.

    Rewards are not of the law of continuations. Nor is the day on which a template prints the date, where the file has the
    tokens of the prompts. Under ``allow_mismatch`` a difference is a warning.
    """
    file = rollouts.where(0).partition(", ")[0]
    beside = {"reward", "reward_digest", "reward_weights"} | ({"template_date"} if rollouts.prompt_ids is not None else set())
    identity = {name: value for name, value in to_json(identity).items() if name not in beside}
    known = [name for name in identity if name in rollouts.law]
    if not known:
        warn(f"{file}: does not say how it was sampled (no law); taken as sampled under this run's settings")
        return
    if unknown := [name for name in identity if name not in rollouts.law and name not in ADDED_LATER]:
        warn(f"{file}: does not say its {', '.join(unknown)}; taken to be this run's")
    differences = [
        f"sampled with {name} {json.dumps(rollouts.law[name])}, this run uses {json.dumps(identity[name])}"
        for name in known
        if rollouts.law[name] != identity[name]
    ]
    if differences and not allow_mismatch:
        raise UserError(f"{file}: {'; '.join(differences)}; run with the settings of the rollouts, or pass --allow_mismatch")
    if differences:
        warn(f"{file}: {'; '.join(differences)}; going on as --allow_mismatch says")


def digest(several: Sequence[Rollouts]) -> str:
    """A short hash of all tokens and masks, the same in whatever order the prompts come."""
    found = hashlib.sha256()
    for rollouts in sorted(several, key=lambda each: each.row.prompt_id):
        found.update(f"{rollouts.row.prompt_id:016x} {rollouts.prompt_ids}".encode())
        for each in rollouts.continuations:
            found.update(f" {len(each.tokens)} ".encode() + np.array(each.tokens, dtype="<i8").tobytes())
            found.update(b"" if each.mask is None else bytes(each.mask))
    return found.hexdigest()[:16]


def rewards_digest(several: Sequence[Rollouts]) -> str:
    """A short hash of the rewards of the files."""
    found = hashlib.sha256()
    for rollouts in sorted(several, key=lambda each: each.row.prompt_id):
        found.update(np.asarray(rollouts.rewards, dtype="<f8").tobytes())
    return found.hexdigest()[:16]


def log_probs_digest(several: Sequence[Rollouts]) -> str:
    """A short hash of the sampler's log-probs."""
    found = hashlib.sha256()
    for rollouts in sorted(several, key=lambda each: each.row.prompt_id):
        for each in rollouts.continuations:
            found.update(b"none" if each.log_probs is None else np.asarray(each.log_probs, dtype="<f8").tobytes())
    return found.hexdigest()[:16]


def with_value_of_this_law(row: Row, identity: dict[str, Any]) -> OracleRow:
    """The row with the oracle value that its columns hold, where they are of this law and reward; else with None."""
    identity = to_json(identity)
    if "V_oracle" in row.columns and all(row.columns.get(name, value) == value for name, value in identity.items()):
        return with_oracle_value(row)
    return without_oracle_value(row)
