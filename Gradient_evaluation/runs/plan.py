"""What a run of run_tracecov.py does: its prompts, its identity, and what is left to measure. No model is loaded for it.

prepare(settings, dtype, locks)            the Plan; UserError for what the run cannot use
is_checked(plan, settings)                 whether the checks are there, made with these weights
begin(plan, settings, fingerprints)        what is checked once the weights are known
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from Gradient_evaluation.chat_template import Chat
from Gradient_evaluation.models import weights_digest
from Gradient_evaluation.runs.grow import counts_of, still_needed
from Gradient_evaluation.runs.inputs.dataset import Row
from Gradient_evaluation.runs.inputs.domains import column_values
from Gradient_evaluation.runs.inputs.of_run import identity_of_rollouts, inputs_of, law_of_run, other_rewards, path_for_messages
from Gradient_evaluation.runs.inputs.oracle_table import oracle_components
from Gradient_evaluation.runs.inputs.prompts import chat_from, tokenised
from Gradient_evaluation.runs.inputs.rewards import RunRewards
from Gradient_evaluation.runs.inputs.rollouts.save import begin_folder, check_first, check_folder, note_missing
from Gradient_evaluation.runs.kl import identity_of as identity_of_reference
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.runs.machine.resume import (
    IDENTITY,
    check_fingerprint,
    check_identity,
    check_same_weights,
    only_writer,
    output_folder,
    read_checks,
    read_identity,
    refuse_difference,
)
from Gradient_evaluation.runs.measure import block_sizes, planned_block_size
from Gradient_evaluation.runs.optimizer_state import digest_of
from Gradient_evaluation.runs.results.summaries import check_allocation
from Gradient_evaluation.sampling.rollouts import Rollouts
from Gradient_evaluation.settings import TracecovSettings, continuations_of
from Gradient_evaluation.stats.estimators import extra_rollouts, sketched_names

# Flags that decide the blocks and the prompts. run.json stores them beside the identity, for messages and --from_grams.
STORED_FLAGS = ("T", "M", "per_prompt", "K_list", "block_size", "estimators", "subsample_prompts")


def stored_flags(settings: TracecovSettings) -> dict:
    """The flags that run.json stores."""
    config = settings.config()
    return {name: config[name] for name in STORED_FLAGS}


PILOT_PROMPTS, PILOT_CONTINUATIONS = 8, 16  # those of the first prompts, where they decide on the further ones


class Chosen(NamedTuple):
    """A prompt that was drawn."""

    index: int  # of its row in the oracle table
    row: Row
    prompt_ids: list[int]


class Plan(NamedTuple):
    """What a run does, the same for every process."""

    grams: Path  # folder of the Gram files
    identity: dict  # of the run, without the fingerprint of the weights
    chosen: list[Chosen]  # in the order in which they were drawn
    todo: list[Chosen]  # those without a Gram file, or with one of too few continuations
    n_long: int  # prompts that are too long and left out
    law: dict  # of the continuations: run_identity
    rewards: RunRewards | None  # None where they stand in the files of rollouts
    stored: dict[int, Rollouts] | None  # those that are measured, by prompt id; None where the run samples
    left_out: str  # what of the rollouts is not used, or ""
    other_rewards: dict | None  # the identity of a run of the same rollouts under other rewards, which has made every Gram


def as_drawn(record: gram_store.GramRecord, plan: Plan, order: int) -> gram_store.GramRecord:
    """The record of the prompt at ``order`` of those drawn, with the present oracle value and columns of its source.

    It is the same object where nothing differs from what the file has.
    """
    index, row, _ = plan.chosen[order]
    now = {"index": index, "order": order, "oracle_value": row.oracle_value, "n_oracle": row.oracle_samples}
    now["columns"] = gram_store.scalar_columns(row.columns)
    if plan.rewards is not None and plan.rewards.are_several:
        now["oracle_components"] = oracle_components(row, plan.rewards.names)
    differs = any(getattr(record, name) != value for name, value in now.items())
    return replace(record, **now) if differs else record


def drawn(n: int, T: int | None, subsample: int | None, seed: int) -> list[int]:
    """Indices of T rows of a table of n, in the order in which they are measured, as the paper's released script draws them.

    Of a table with more than ``subsample`` rows, that many are drawn first. The rows are shuffled, by a generator of the
    same seed, and the first T are taken (None: all). So the prompts of a smaller T are the first of a larger one, and the
    prompts of an interrupted run are a random sample.
    """
    order = list(range(n))
    if subsample is not None and subsample < n:
        order = np.random.default_rng(seed).choice(n, size=subsample, replace=False).tolist()
    np.random.default_rng(seed).shuffle(order)
    return order[:T]


def choose_rows(
    rows: Sequence[Row], settings: TracecovSettings, tokenizer, chat: Chat, stored: dict[int, Rollouts] | None = None
) -> tuple[list[Chosen], int]:
    """The drawn prompts, and how many of ``rows`` were too long. stored: see ``tokenised``."""
    index, n_long = {row.prompt_id: i for i, row in enumerate(rows)}, 0
    if settings.skip_long:
        rows, prompts, n_long = tokenised(rows, settings, tokenizer, chat, stored)
    picked = drawn(len(rows), settings.T, settings.subsample_prompts, settings.seed)
    rows = [rows[i] for i in picked]
    prompts = [prompts[i] for i in picked] if settings.skip_long else tokenised(rows, settings, tokenizer, chat, stored)[1]
    return [Chosen(index[row.prompt_id], row, prompt_ids) for row, prompt_ids in zip(rows, prompts)], n_long


def prepare(settings: TracecovSettings, dtype: torch.dtype, locks: ExitStack) -> Plan:
    """Do everything that needs no model, above all the checks. ``locks`` takes the lock on the Gram files."""
    path = Path(settings.save_json) / "grams" / IDENTITY
    earlier = [read_identity(path)] if path.exists() and not settings.overwrite else []
    largest = planned_block_size(settings)
    if not settings.rollouts:  # a folder keeps the block size with which it was begun
        largest = settings.block_size or (earlier[0].get("largest_block") if earlier else None) or largest
        block_sizes(continuations_of(settings), largest)
    inputs = inputs_of(settings)
    tokenizer, stored = inputs.tokenizer, inputs.stored
    chat = chat_from(settings, tokenizer, [*(row.columns for row in inputs.rows), inputs.said, *earlier])
    law, rows = law_of_run(inputs, settings, chat)
    chosen, n_long = choose_rows(rows, settings, tokenizer, chat, stored)
    if settings.allocate:
        check_allocation(settings.allocate, len(chosen))
    if settings.by:
        columns = [gram_store.scalar_columns(each.row.columns) for each in chosen]
        column_values(settings.by, columns, path_for_messages(settings))
    beside = {**identity_beside_the_law(settings), **identity_of_rollouts(inputs, settings, largest)}
    identity = {**law, **beside, "dtype": str(dtype).split(".")[-1]}
    grams = output_folder(settings.save_json) / "grams"
    locks.enter_context(only_writer(grams))
    output_folder(grams)
    if not settings.skip_plot:
        output_folder(settings.plot_path)
    todo = [each for each in chosen if not gram_store.path_of(grams, each.row.prompt_id).exists()]
    made_under = None
    if settings.overwrite:
        todo = chosen
    elif (grams / IDENTITY).exists():
        found = read_identity(grams / IDENTITY)
        if not todo and other_rewards(found, identity):
            made_under = found
        else:
            refuse_difference(str(grams / IDENTITY), found, identity, stored_flags(settings))
        if not (settings.rollouts or settings.pilot):  # a pilot takes the Grams that are there as they are
            todo = still_needed(grams, chosen, settings)
        note_older_choice(grams, found, chosen)
    if stored is not None:
        stored = {each.row.prompt_id: stored[each.row.prompt_id] for each in chosen}
    if settings.save_rollouts:
        locks.enter_context(only_writer(output_folder(settings.save_rollouts)))
        check_folder(settings.save_rollouts, sampled_by(law, identity, settings), settings.overwrite)
        if not settings.overwrite:
            check_first(settings.save_rollouts, counts_of(grams, [each.row.prompt_id for each in todo]))
        note_missing(settings.save_rollouts, {each.row.prompt_id for each in chosen} - {each.row.prompt_id for each in todo})
    return Plan(grams, identity, chosen, todo, n_long, law, inputs.rewards, stored, inputs.left_out, made_under)


def sampled_by(law: dict, identity: dict, settings: TracecovSettings) -> dict:
    """The identity of a folder of --save_rollouts: all that decides what is sampled, and how much of it."""
    count = {
        "script": "run_tracecov.py",
        "continuations": PILOT_CONTINUATIONS if settings.pilot else continuations_of(settings),
    }
    return {**law, **count, "seed": identity["seed"], "dtype": identity["dtype"]}


def identity_beside_the_law(settings: TracecovSettings) -> dict:
    """The entries of a run's identity that say how its Grams are made, which rollouts do not fix."""
    sketched = sketched_names(settings.estimators, settings.importance_weights) if settings.sketch_dim else []
    return {
        "seed": settings.seed,
        "scoring": settings.scoring,
        "params": settings.params,
        "by_layer": settings.by_layer,
        "sketch_dim": settings.sketch_dim,
        "greedy": "greedy" in extra_rollouts(settings.estimators) and not settings.rollouts,
        "gram_dtype": settings.gram_dtype,
        "optimizer_state": digest_of(settings),
        **identity_of_reference(settings),
        "sketched": sketched,
        "sketched_at": settings.K_list[-1] if len(sketched) > 1 else None,
    }


def left(plan: Plan, first: int | None = None) -> list[Chosen]:
    """The prompts without a Gram, in seeded order; of the ``first`` ones alone."""
    return [each for each in plan.chosen[:first] if not gram_store.path_of(plan.grams, each.row.prompt_id).exists()]


def note_older_choice(grams: Path, found: dict, chosen: list[Chosen]) -> None:
    """Say when Grams of a folder go unused: a run of an earlier version took the first T rows, without a draw."""
    if "subsample_prompts" in (found.get("flags") or {}):
        return
    drawn_now = {gram_store.path_of(grams, each.row.prompt_id).name for each in chosen}
    others = sum(path.name not in drawn_now for path in grams.glob("*.npz"))
    if others:
        print(
            f"note: {grams}: an earlier version began this run and took the first T rows; now --seed draws them at random. "
            f"{others} of its Grams are of prompts that are not drawn; they stay, unused",
            file=sys.stderr,
        )


def is_checked(plan: Plan, settings: TracecovSettings) -> bool:
    """Whether the checks are there, made with the weights that --model names now."""
    checks = {"self_audit", "sampler_check"} if plan.stored is None else {"self_audit"}
    if not checks <= set(read_checks(plan.grams)) or not (plan.grams / IDENTITY).exists():
        return False
    return read_identity(plan.grams / IDENTITY).get("weights_digest") == weights_digest(settings.model, settings.revision)


def begin(plan: Plan, settings: TracecovSettings, fingerprints: list[str]) -> None:
    """What the first process checks once the weights are known, before anything is measured or removed."""
    check_same_weights(fingerprints)
    model_fingerprint = fingerprints[0]
    if not settings.allow_mismatch:
        said = [each.law for each in (plan.stored or {}).values()]
        fix = "give the checkpoint that sampled these rollouts, or pass --allow_mismatch"
        check_fingerprint(said, model_fingerprint, path_for_messages(settings), fix)
        made = [each.row.columns for each in plan.chosen if each.row.oracle_value is not None]
        check_fingerprint(
            made, model_fingerprint, path_for_messages(settings), "make the table again, or pass --allow_mismatch"
        )
    stored = {
        **plan.identity,
        "model_fingerprint": model_fingerprint,
        "weights_digest": weights_digest(settings.model, settings.revision),
        "flags": stored_flags(settings),
    }
    check_identity(plan.grams / IDENTITY, stored, settings.overwrite)
    if settings.save_rollouts:
        sampled = {**sampled_by(plan.law, plan.identity, settings), "model_fingerprint": model_fingerprint}
        begin_folder(settings.save_rollouts, sampled, settings.overwrite)
