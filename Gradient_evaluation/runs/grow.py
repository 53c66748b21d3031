"""More continuations for Grams that are there: a larger --per_prompt, --M or largest of --K_list continues a folder.

    todo = still_needed(grams, chosen, settings)                    prompts without a Gram, or with too few continuations
    record = whole_record(measurement, grams, row, prompt_ids, index)   a prompt's old and new continuations together

Seed, prompt and number decide a continuation. So those that are there stay, only further ones are drawn, and they are measured
in blocks of their own. A prompt's file is then replaced at once; until then it holds the earlier record.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs import gram_store
from Gradient_evaluation.runs.measure import SMALLEST_BLOCK, Measurement
from Gradient_evaluation.runs.oracle_table import OracleRow
from Gradient_evaluation.settings import TracecovSettings, continuations_of


def counts_of(grams: Path, prompt_ids: Sequence[int]) -> dict[int, int]:
    """{prompt id: how many continuations were drawn for its Gram}, of those prompts that have one."""
    paths = {each: gram_store.path_of(grams, each) for each in prompt_ids}
    return {each: gram_store.n_drawn(path) for each, path in paths.items() if path.exists()}


def still_needed(grams: Path, chosen: Sequence, settings: TracecovSettings) -> list:
    """Those of the ``chosen`` prompts (plan.Chosen) that have no Gram, or one of fewer continuations than are asked for.

    Notes on stderr where a Gram has more than that; all are used. Raises UserError where a prompt cannot get the rest: too
    few for a block, or with --by_layer and no V(x), whose stand-in takes the moments of every block.
    """
    wanted, counts = continuations_of(settings), counts_of(grams, [each.row.prompt_id for each in chosen])
    todo = [each for each in chosen if counts.get(each.row.prompt_id, 0) < wanted]
    asked = f"{as_typed(settings)}: {wanted} continuations of each prompt"
    for each in todo:
        there = counts.get(each.row.prompt_id)
        if there is None:
            continue
        if wanted - there < SMALLEST_BLOCK:
            raise UserError(
                f"{asked}, and {grams} has {there} of one; a further block needs at least {SMALLEST_BLOCK}: ask for {there} or "
                f"for at least {there + SMALLEST_BLOCK}"
            )
        if settings.by_layer and each.row.oracle_value is None:
            raise UserError(
                f"{asked}, and {grams} has {there} of one; --by_layer without oracle values cannot be continued with more, as "
                f"the stand-in for V(x) takes the moments of every block: ask for {there}, or choose another --save_json"
            )
    if more := [count for count in counts.values() if count > wanted]:
        some = f"{len(more)} prompt{'s have' if len(more) > 1 else ' has'} up to {max(more)}"
        print(f"note: {asked}; in {grams} {some}, and all are used", file=sys.stderr)
    return todo


def as_typed(settings: TracecovSettings) -> str:
    """The flags that say how many continuations a prompt has."""
    if settings.per_prompt:
        return f"--per_prompt {settings.per_prompt}"
    return f"--M {settings.M} times {settings.K_list[-1]}, the largest of --K_list"


def have_more(grams: Path, chosen: Sequence, settings: TracecovSettings) -> bool:
    """Whether a prompt has more continuations than are asked for: earlier results for these flags may have fewer."""
    counts = counts_of(grams, [each.row.prompt_id for each in chosen])
    return max(counts.values(), default=0) > continuations_of(settings)


def note_unequal(paths: Sequence[Path]) -> None:
    """Say on stderr where the prompts of these Gram files have unequal numbers of continuations: a run that is not through."""
    counts = [gram_store.n_drawn(path) for path in paths]
    if min(counts) < max(counts):
        most = sum(count == max(counts) for count in counts)
        print(
            f"note: {paths[0].parent}: {most} of its {len(counts)} prompts have {max(counts)} continuations, the others at "
            f"least {min(counts)}; all are used, and every prompt counts alike",
            file=sys.stderr,
        )


def whole_record(
    measurement: Measurement, grams: Path, row: OracleRow, prompt_ids: list[int], index: int
) -> gram_store.GramRecord:
    """``Measurement.measure``; where the prompt has a Gram already, of it and of the continuations that it lacks."""
    path = gram_store.path_of(grams, row.prompt_id)
    if not path.exists():
        return measurement.measure(row, prompt_ids, index)
    earlier = gram_store.load(path)
    return merged(earlier, measurement.measure(row, prompt_ids, index, first=earlier.n_drawn))


def merged(earlier: gram_store.GramRecord, more: gram_store.GramRecord) -> gram_store.GramRecord:
    """The record of a prompt's ``earlier`` continuations and ``more`` after them, as if one run had measured all these blocks.

    A mean over blocks counts each by its size. Neither record has a ``module_oracle``, ``log_weights`` or ``rollouts_check``.
    """
    sizes = [len(earlier.rewards), len(more.rewards)]

    def mean(name: str) -> np.ndarray | None:
        parts = [getattr(earlier, name), getattr(more, name)]
        if any(part is None for part in parts):
            return None
        return np.average(parts, axis=0, weights=sizes).astype(np.result_type(*parts))

    def together(name: str) -> np.ndarray | None:
        parts = [getattr(earlier, name), getattr(more, name)]
        return None if parts[0] is None else np.concatenate(parts, axis=-1)

    return replace(
        more,
        **{name: together(name) for name in ("rewards", "lengths", "log_probs", "components")},
        **{name: mean(name) for name in ("module_moments", "sketch", "component_sketch")},
        grams=[*earlier.grams, *more.grams],
        n_left_out=(earlier.n_left_out or 0) + (more.n_left_out or 0) or None,
        greedy_reward=earlier.greedy_reward,
        greedy_components=earlier.greedy_components,
    )
