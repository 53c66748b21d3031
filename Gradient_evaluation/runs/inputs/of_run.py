"""What a run of run_tracecov.py is given: prompts of an oracle table, of a data set, or of rollouts; and its law.

inputs_of(settings)                               rows, tokenizer, and the rollouts of --rollouts
law_of_run(inputs, settings, chat)                what decides a continuation and its reward, compared with what files say
identity_of_rollouts(inputs, settings, largest)   what the identity of a run holds of rollouts
other_rewards(found, identity)                    whether a run differs from an earlier one in its rewards alone
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from Gradient_evaluation.chat_template import Chat
from Gradient_evaluation.models import load_tokenizer, warn_of_risks
from Gradient_evaluation.runs.inputs.dataset import load_dataset_rows
from Gradient_evaluation.runs.inputs.oracle_table import OracleRow, check_same_law, load_oracle_table, without_oracle_value
from Gradient_evaluation.runs.inputs.prompts import run_identity
from Gradient_evaluation.runs.inputs.rewards import RunRewards, check_ground_truths, resolve_rewards
from Gradient_evaluation.runs.inputs.rollouts import read_rollouts
from Gradient_evaluation.runs.inputs.rollouts.context import DataSetRows
from Gradient_evaluation.runs.inputs.rollouts.stored import (
    check_law,
    digest,
    log_probs_digest,
    rewards_digest,
    usable,
    with_value_of_this_law,
)
from Gradient_evaluation.sampling.rollouts import Rollouts
from Gradient_evaluation.settings import TracecovSettings

REWARDS = ("reward", "reward_digest", "reward_weights", "file_rewards")  # entries of an identity that Grams do not depend on


class Inputs(NamedTuple):
    """rows: the prompts; tokenizer: of --model; rewards: of the run, None where they stand in the files of rollouts;
    stored: the rollouts by prompt id, None where the run samples; left_out: what of the rollouts is not used, or ""."""

    rows: list[OracleRow]
    tokenizer: Any
    rewards: RunRewards | None
    stored: dict[int, Rollouts] | None
    left_out: str = ""

    @property
    def said(self) -> dict[str, Any]:
        """What the rollouts say of model and law; {} without rollouts."""
        return next(iter(self.stored.values())).law if self.stored else {}


def inputs_of(settings: TracecovSettings) -> Inputs:
    """Read and check --oracle_table, --dataset or --rollouts."""
    rows = rewards = None
    if settings.reward is not None:
        rewards = resolve_rewards(settings.reward, settings.reward_weights, settings.reward_timeout)
    if settings.oracle_table:
        rows = load_oracle_table(settings.oracle_table)
    elif settings.dataset:
        rows = [without_oracle_value(row) for row in load_dataset_rows(settings.dataset, settings.split)]
    if not settings.rollouts:
        check_ground_truths(rows, rewards)
    warn_of_risks(settings.model, settings.trust_remote_code)
    tokenizer = load_tokenizer(settings.model, settings.revision, settings.trust_remote_code)
    if not settings.rollouts:
        return Inputs(rows, tokenizer, rewards, None)
    several = read_rollouts(settings.rollouts, tokenizer, rows, settings)
    if rows is not None:
        several = DataSetRows(rows).in_order(several)
    found = usable(several, settings)
    rows = [without_oracle_value(each.row) for each in found.rollouts]
    if rewards is not None:
        check_ground_truths(rows, rewards)
    return Inputs(rows, tokenizer, rewards, {each.row.prompt_id: each for each in found.rollouts}, str(found))


def law_of_run(inputs: Inputs, settings: TracecovSettings, chat: Chat) -> tuple[dict[str, Any], list[OracleRow]]:
    """(run_identity, the rows with their oracle values). Raises UserError where a table or rollouts are of another law."""
    law = run_identity(settings, inputs.tokenizer, chat, inputs.rewards)
    if settings.oracle_table:
        check_same_law(inputs.rows, law, settings.oracle_table, settings.allow_mismatch)
    if inputs.stored is None:
        return law, inputs.rows
    if inputs.rewards is None:
        law |= {name: inputs.said.get(name) for name in ("reward", "reward_weights", "reward_digest")}
    check_law(next(iter(inputs.stored.values())), law, settings.allow_mismatch)
    return law, [with_value_of_this_law(row, law) for row in inputs.rows]


def identity_of_rollouts(inputs: Inputs, settings: TracecovSettings, largest: int) -> dict[str, Any]:
    """Entries of a run's identity; all but the last None where the run samples.

    rollouts: a hash of the tokens and masks; file_rewards: of the rewards in the files, where these are taken;
    importance_weights: of the sampler's log-probs, under that flag;
    largest_block: how many continuations a block has at most.
    """
    several = None if inputs.stored is None else list(inputs.stored.values())
    return {
        "rollouts": several and digest(several),
        "file_rewards": rewards_digest(several) if several and settings.reward is None else None,
        "importance_weights": log_probs_digest(several) if settings.importance_weights else None,
        "largest_block": largest,
    }


def other_rewards(found: dict[str, Any], identity: dict[str, Any]) -> bool:
    """Whether Grams made under ``found`` are those of a run with ``identity``, of the same rollouts, under other rewards."""
    differing = {name for name, value in identity.items() if found.get(name) != value}
    return identity.get("rollouts") is not None and bool(differing) and differing <= set(REWARDS)


def path_for_messages(settings: TracecovSettings) -> str | Path:
    """The source of prompts that a message names."""
    return settings.oracle_table or (settings.rollouts[0] if settings.rollouts else settings.dataset)
