"""The numbers of a run, from its Gram records: of all its prompts, and of those with one value of a column (--by).

notes = Notes()
prompts = reduce_prompts(notes.passing(records), K_list, names)      one pass; no Gram stays in memory
summary_of(settings, prompts, notes.sketched, about, bootstrap)      as results have them
rewards_alone(settings, records, notes, about)                       once more for each of several rewards
by_group(settings, prompts, notes, about)                            once more for each value of settings.by
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.rewards.integer_answer import check_integer_ground_truth
from Gradient_evaluation.runs.inputs.domains import column_values, positions_of
from Gradient_evaluation.runs.results.by_reward import OTHER_SKETCHES, by_reward, mean_given
from Gradient_evaluation.settings import TracecovSettings
from Gradient_evaluation.stats import summary as estimators
from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.clip import Clip, clipped_names, clipping, group_squares
from Gradient_evaluation.stats.group_size.allocation import LEAST
from Gradient_evaluation.stats.group_size.law import group_size_law
from Gradient_evaluation.stats.group_size.sketch_pairs import Sketches, SketchPart, prompt_averaged_cosines
from Gradient_evaluation.stats.kl import reduce_with_kl, summary_with_kl
from Gradient_evaluation.stats.missing import Missing, with_reasons
from Gradient_evaluation.stats.modules import by_layer, oracle_traces
from Gradient_evaluation.stats.prompts import PromptMoments


class Sketched(NamedTuple):
    """The sketches of some prompts, and how they were made."""

    sketches: list[np.ndarray | None]
    names: list[str] | None
    layout: np.ndarray | None
    smallest_block: int

    def select(self, positions: Sequence[int]) -> Sketched:
        """Those of the prompts at these positions."""
        return self._replace(sketches=[self.sketches[position] for position in positions])


@dataclass
class Notes:
    """What stays of each Gram record after it has passed: its table row, layers and sketches."""

    prompt_ids: list[int] = field(default_factory=list)
    table: list[dict] = field(default_factory=list)
    block_sizes: Counter[int] = field(default_factory=Counter)
    columns: list[dict | None] = field(default_factory=list)
    layers: list[tuple] = field(default_factory=list)
    sketches: list[np.ndarray | None] = field(default_factory=list)
    sketch_names: list[str] | None = None
    sketch_layout: np.ndarray | None = None
    n_left_out: int = 0
    component_names: list[str] | None = None
    component_weights: list[float] | None = None
    compared: list[dict | None] = field(default_factory=list)  # of rollouts, by prompt
    weighted: bool = False
    has_metric: bool = True

    def passing(self, records: Iterable) -> Iterable:
        """Yield each record, after its notes are taken."""
        for record in records:
            self.prompt_ids.append(record.prompt_id)
            self.table.append(
                {
                    "prompt_index": record.order,
                    "table_row": record.index,
                    "prompt": record.prompt,
                    "gold": gold_of(record.ground_truth),
                    "ground_truth": record.ground_truth,
                    "V_oracle": record.oracle_value,
                    "n_oracle": record.n_oracle,
                    "mean_reward": record.mean_reward,
                }
            )
            if record.component_names:
                self.table[-1]["mean_rewards"] = dict(zip(record.component_names, map(mean_given, record.components)))
            self.component_names, self.component_weights = record.component_names, record.component_weights
            self.n_left_out += record.n_left_out or 0
            self.columns.append(record.columns)
            self.compared.append(record.rollouts_check)
            self.weighted |= record.log_weights is not None
            self.has_metric &= record.metric_grams is not None
            self.block_sizes.update(len(gram) for gram in record.grams)
            if record.modules is not None:
                self.layers.append((record.modules, record.module_moments, record.module_oracle))
            self.sketches.append(record.sketch)
            self.sketch_names, self.sketch_layout = record.sketch_names, record.sketch_layout
            yield record

    @property
    def sketched(self) -> Sketched:
        """The sketches of all prompts."""
        return Sketched(self.sketches, self.sketch_names, self.sketch_layout, min(self.block_sizes))


def gold_of(ground_truth):
    """The integer that a ground truth stands for, as in the released detailed files; any other truth unchanged."""
    try:
        return check_integer_ground_truth(ground_truth)
    except UserError:
        return ground_truth


PUBLISHED_SCORES = (
    "--scoring published: the scores are not those of the law that was sampled (full softmax at temperature 1, without the end "
    "of sequence), so their mean is not 0, whatever the on-policy check says; no estimator is unbiased, and the group size "
    "leans on all of them. Use it to compare with the paper's released numbers only"
)


def summary_of(
    settings: TracecovSettings, prompts: PromptMoments, sketched: Sketched, about: dict, bootstrap: PromptBootstrap
) -> dict:
    """The numbers of these prompts, as results have them.

    about: its ``law`` is what the run that made the Grams stored of itself, its ``no_sketch`` why they have no sketch.
    """
    summary = estimators.summarise(prompts, settings.K_list, bootstrap, settings.estimators)
    if about["law"].get("scoring") == "published":
        summary["on_policy_check"]["warning"] = PUBLISHED_SCORES
        summary["reasons"].pop("on_policy_check.warning", None)
    summary["group_size_law"] = group_size_law_of(prompts, sketched, about, bootstrap)
    return summary


def summary_of_some(
    settings: TracecovSettings, prompts: PromptMoments, notes: Notes, about: dict, positions: list[int]
) -> dict:
    """``summary_of`` of the prompts at these positions, with resamples of their own, and their mean reward."""
    some, bootstrap = prompts.select(positions), PromptBootstrap(len(positions), seed=settings.seed)
    summary = summary_of(settings, some, notes.sketched.select(positions), about, bootstrap)
    value, interval, reason = bootstrap.mean(some.mean_reward)
    if interval is None:
        summary["reasons"]["mean_reward_ci95"] = reason
    elif some.zero_one:
        interval = [max(0.0, interval[0]), min(1.0, interval[1])]
    return {**summary, "mean_reward": value, "mean_reward_ci95": interval}


def by_group(settings: TracecovSettings, prompts: PromptMoments, notes: Notes, about: dict) -> dict:
    """The entry ``by_group``: {column, values: {value: the numbers of its prompts}}. UserError as ``column_values``."""
    values = column_values(settings.by, notes.columns, settings.from_grams or settings.save_json)
    groups = {value: summary_of_some(settings, prompts, notes, about, some) for value, some in positions_of(values).items()}
    return {"column": settings.by, "values": groups}


def group_size_law_of(prompts: PromptMoments, sketched: Sketched, about: dict, bootstrap: PromptBootstrap) -> dict:
    """The entry ``group_size_law``: constants, G*, and the cosine of each sketched estimator to the gradient.

    about: see ``summary_of``.
    """
    identity = about["law"]
    theta = theta_of(sketched, identity)
    no_sketch = Missing(about["no_sketch"]) if about.get("no_sketch") else None
    entry = group_size_law(prompts, theta or no_sketch, bootstrap)
    entry |= {"sketch_dim": identity.get("sketch_dim") or None, "cosine_to_gradient": {}}
    if theta is None or len(sketched.sketches[0]) == 1:
        if theta is not None and len(identity.get("sketched") or []) > 1:
            entry["reasons"]["cosine_to_gradient"] = OTHER_SKETCHES
        return entry
    smallest, largest = sketched.smallest_block, identity.get("sketched_at") or 0
    if smallest < largest:
        why = f"blocks of {smallest} continuations hold no group of {largest}; raise --block_size"
        entry["reasons"]["cosine_to_gradient"] = why
    else:
        others = np.stack(sketched.sketches)[:, 1:]
        entry["cosine_to_gradient"] = prompt_averaged_cosines(others, sketched.names[1:], theta, bootstrap)
    return entry


def theta_of(sketched: Sketched, identity: dict) -> Sketches | None:
    """The sketches of the prompts' mean gradients; None where a prompt has none. identity: of the run that made them."""
    if any(sketch is None for sketch in sketched.sketches):
        return None
    layout = [SketchPart(*map(int, part)) for part in sketched.layout]
    return Sketches(np.stack([sketch[0] for sketch in sketched.sketches]), layout, identity.get("sketch_dim") or None)


def rewards_alone(settings: TracecovSettings, records: Iterable, notes: Notes, about: dict) -> dict:
    """The entry ``by_reward``: the numbers of each of several rewards alone."""
    alone = replace(settings, estimators=())

    def summarise(records: Iterable) -> dict:
        notes = Notes()
        prompts = estimators.reduce_prompts(notes.passing(records), alone.K_list)
        return summary_of(alone, prompts, notes.sketched, about, PromptBootstrap(len(prompts), seed=alone.seed))

    return by_reward(records, notes.component_names, notes.component_weights, summarise)


def clipping_of(
    settings: TracecovSettings, prompts: PromptMoments, records: Iterable, summary: dict, bootstrap: PromptBootstrap
) -> dict:
    """The entry ``clip``: how many steps --clip cuts, at those of --K_list that --budget holds."""
    names, sizes = clipped_names(settings.estimators), [size for size in settings.K_list if size <= settings.budget]
    law = summary["group_size_law"]
    norm = law["mean_theta_norm_sq"]
    norm = Missing(law["reasons"]["mean_theta_norm_sq"]) if norm is None else norm
    squares = group_squares(records, names, sizes)
    return clipping(prompts, squares, names, sizes, Clip(settings.clip, settings.budget, norm), bootstrap)


def with_kl(
    settings: TracecovSettings, prompts: PromptMoments, records: Iterable, sketched: Sketched, about: dict, bootstrap
) -> dict:
    """The entry ``kl``: the losses with --kl_coef times the KL to the reference, and GRPO's group-size law with it.

    {coef, mean_kl_per_token, estimators: see stats/kl.py, group_size_law, reasons}
    """
    names, kl, sketches = clipped_names(settings.estimators), [], []

    def passing() -> Iterable:
        for record in records:
            if record.kl_grams is None:
                raise UserError("--kl_coef: these Grams were made without --ref_model; measure with it, in a new --save_json")
            kl.append(record.kl.sum() / record.lengths.sum())
            if record.kl_sketch is not None and record.sketch is not None:
                sketches.append((record.sketch[0] - settings.kl_coef * record.kl_sketch)[None])
            yield record

    moments, groups = reduce_with_kl(passing(), prompts, names, settings.K_list, settings.kl_coef)
    together = sketched._replace(sketches=sketches if len(sketches) == len(prompts) else [None], names=["grpo"])
    found = {
        "coef": settings.kl_coef,
        "mean_kl_per_token": float(np.mean(kl)),
        "estimators": summary_with_kl(groups, names, settings.K_list, bootstrap),
    }
    return {**with_reasons(found), "group_size_law": group_size_law_of(moments, together, about, bootstrap)}


def in_metric(settings: TracecovSettings, records: Iterable, about: dict) -> dict:
    """The entry ``optimizer_metric``: every number once more, in the metric of --optimizer_state."""
    notes = Notes()
    metric = (record.in_metric() for record in records)
    prompts = estimators.reduce_prompts(notes.passing(metric), settings.K_list, settings.estimators)
    return summary_of(settings, prompts, notes.sketched, about, PromptBootstrap(len(prompts), seed=settings.seed))


def check_allocation(total: int, n_prompts: int) -> None:
    """Raise UserError where --allocate has fewer than two continuations for each prompt."""
    if total < LEAST * n_prompts:
        raise UserError(
            f"--allocate {total}: each of the {n_prompts} prompts needs at least {LEAST} continuations; give at least "
            f"{LEAST * n_prompts}"
        )


def layers_of(notes: Notes, K_list: Sequence[int], bootstrap: PromptBootstrap) -> dict:
    """The entry ``by_layer``: traces of every module."""
    names, moments, cross_fitted = zip(*notes.layers)
    oracle = oracle_traces(np.stack(moments), [row["V_oracle"] for row in notes.table], cross_fitted)
    return by_layer(names[0], moments, oracle, K_list, bootstrap)
