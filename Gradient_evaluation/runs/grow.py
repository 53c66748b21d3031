"""More continuations for Grams that are there: a larger --per_prompt, --M or largest of --K_list continues a folder.

    todo = still_needed(grams, chosen, settings)                    prompts without a Gram, or with too few continuations
    record = whole_record(measurement, grams, row, prompt_ids, index)   a prompt's old and new continuations together

Seed, prompt and number decide a continuation. So those that are there stay, only further ones are drawn, and they are measured
in blocks of their own. A prompt's file is then replaced at once; until then it holds the earlier record.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.oracle_table import OracleRow
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.runs.measure import SMALLEST_BLOCK, Measurement
from Gradient_evaluation.settings import TracecovSettings, continuations_of
from Gradient_evaluation.stats.modules import mean_moments


def counts_of(grams: Path, prompt_ids: Sequence[int]) -> dict[int, int]:
    """{prompt id: how many continuations were drawn for its Gram}, of those prompts that have one."""
    paths = {each: gram_store.path_of(grams, each) for each in prompt_ids}
    return {each: gram_store.n_drawn(path) for each, path in paths.items() if path.exists()}


def still_needed(grams: Path, chosen: Sequence, settings: TracecovSettings) -> list:
    """Those of the ``chosen`` prompts (plan.Chosen) that have no Gram, or one of fewer continuations than are asked for.

    Raises UserError where a prompt cannot get the rest: too few for a block, or with --by_layer and no V(x), whose stand-in
    takes the moments of every block.
    """
    wanted, counts = continuations_of(settings), counts_of(grams, [each.row.prompt_id for each in chosen])
    todo = [each for each in chosen if counts.get(each.row.prompt_id, 0) < wanted]
    asked = as_typed(settings)
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
    return todo


def as_typed(settings: TracecovSettings) -> str:
    """How many continuations a prompt should have, and by which flags."""
    flags = f"--M {settings.M} times {settings.K_list[-1]}, the largest of --K_list"
    if settings.per_prompt:
        flags = f"--per_prompt {settings.per_prompt}"
    return f"{flags}: {continuations_of(settings)} continuations of each prompt"


def have_more(grams: Path, chosen: Sequence, settings: TracecovSettings) -> bool:
    """Whether prompts have more continuations than are asked for; a note on stderr says that all are used."""
    counts = counts_of(grams, [each.row.prompt_id for each in chosen]).values()
    more = [count for count in counts if count > continuations_of(settings)]
    if more:
        some = f"{len(more)} prompt{'s have' if len(more) > 1 else ' has'} up to {max(more)}"
        print(f"note: {as_typed(settings)}; in {grams} {some}, and all are used", file=sys.stderr)
    return bool(more)


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

    Means over blocks count each as in one run. Neither record has a ``module_oracle``, ``log_weights`` or ``rollouts_check``.
    """
    sizes = [len(earlier.rewards), len(more.rewards)]

    def joined(names: Sequence[str], join: Callable[[list[np.ndarray]], np.ndarray]) -> dict[str, np.ndarray | None]:
        pairs = {name: [getattr(earlier, name), getattr(more, name)] for name in names}
        return {name: None if pair[0] is None or pair[1] is None else join(pair) for name, pair in pairs.items()}

    def mean(pair: list[np.ndarray]) -> np.ndarray:
        return np.average(pair, axis=0, weights=sizes).astype(np.result_type(*pair))

    return replace(
        more,
        **joined(("rewards", "lengths", "log_probs", "components", "kl"), partial(np.concatenate, axis=-1)),
        **joined(("sketch", "component_sketch", "metric_sketch", "kl_sketch"), mean),
        **joined(("metric_grams", "kl_grams"), lambda pair: [*pair[0], *pair[1]]),
        **joined(("module_moments",), partial(mean_moments, sizes=[earlier.sizes, more.sizes])),
        grams=[*earlier.grams, *more.grams],
        n_left_out=(earlier.n_left_out or 0) + (more.n_left_out or 0) or None,
        greedy_reward=earlier.greedy_reward,
        greedy_components=earlier.greedy_components,
    )
