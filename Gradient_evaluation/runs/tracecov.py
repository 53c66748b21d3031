"""The run of run_tracecov.py: it draws prompts, measures their Grams, and computes the results from these."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.models import fingerprint, model_label, resolve_dtype
from Gradient_evaluation.rewards.own_reward import check_weights
from Gradient_evaluation.runs.grow import have_more, note_unequal
from Gradient_evaluation.runs.inputs.dataset import finite_at
from Gradient_evaluation.runs.inputs.of_run import REWARDS, inputs_of
from Gradient_evaluation.runs.inputs.prompts import load_policy
from Gradient_evaluation.runs.inputs.rollouts.from_text import retokenised_share
from Gradient_evaluation.runs.inputs.rollouts.reward_again import rewarded_again, why_no_sketch
from Gradient_evaluation.runs.inputs.rollouts.save import RolloutsFolder
from Gradient_evaluation.runs.loop import Loop
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.runs.machine.files import write_json
from Gradient_evaluation.runs.machine.memory import limited_memory
from Gradient_evaluation.runs.machine.processes import Processes
from Gradient_evaluation.runs.machine.progress import Progress
from Gradient_evaluation.runs.machine.resume import (
    CHECKS,
    IDENTITY,
    only_writer,
    output_folder,
    read_checks,
    read_identity,
    saved_on_interrupt,
)
from Gradient_evaluation.runs.measure import Measurement, score_gram
from Gradient_evaluation.runs.outlook import outlook
from Gradient_evaluation.runs.pilot import with_choice, with_pilot
from Gradient_evaluation.runs.plan import PILOT_PROMPTS, Plan, as_drawn, begin, is_checked, left, prepare
from Gradient_evaluation.runs.results.by_reward import reweighted
from Gradient_evaluation.runs.results.report import group_size_report, report
from Gradient_evaluation.runs.results.results_file import finished_results, results_path, versions, write_results
from Gradient_evaluation.runs.source import Sampled, Stored
from Gradient_evaluation.runs.until import Until
from Gradient_evaluation.settings import WITH_FROM_GRAMS, WITH_FROM_GRAMS_AND_ROLLOUTS, TracecovSettings

NOT_WEIGHTED = "measured with --importance_weights and without gradient sketches; measure again"

Draw = Callable[[dict, str], Path]  # (results, label) -> the file of the figure


class Measured(NamedTuple):
    """What the results are made of."""

    records: Iterable[gram_store.GramRecord]  # in the order of the oracle table; gone through once for each reward
    config: dict  # the flags that made the records
    identity: dict  # of the run that made them
    checks: dict  # of that run
    stopping: dict | None = None  # why the run stopped, where it stops by itself


def source_of(plan: Plan, settings: TracecovSettings, model, tokenizer, model_fingerprint: str) -> Sampled | Stored:
    """Where the continuations come from."""
    if plan.stored is not None:
        return Stored(plan.stored, plan.rewards)
    law, folder = {**plan.law, "model_fingerprint": model_fingerprint}, settings.save_rollouts
    return Sampled(model, tokenizer, settings, plan.rewards, RolloutsFolder(folder, law) if folder else None)


def measure_all(
    plan: Plan, settings: TracecovSettings, dtype: torch.dtype, processes: Processes, until: Until | None
) -> TracecovSettings:
    """Measure this process's share of what is left. Every Gram is on disk as soon as it is known.

    until: when the run stops by itself. Returns the settings, with the --per_prompt that a pilot has chosen.
    """
    model, tokenizer = load_policy(settings, dtype, processes)
    fingerprints = processes.gather(fingerprint(model))
    processes.from_first(begin, plan, settings, fingerprints)
    gram = score_gram(model, settings)
    source = source_of(plan, settings, model, tokenizer, fingerprints[0])
    measurement = Measurement(model, gram, source, replace(settings, block_size=plan.identity["largest_block"]))
    checks = {**({"gen_bs": settings.gen_bs} if source.is_sampled else {}), **read_checks(plan.grams)}
    total, done = len(plan.chosen), len(plan.chosen) - len(plan.todo)
    with (
        gram,
        limited_memory(settings.max_memory, processes.device),
        Progress(total if until is None else None, done, "reward", settings.quiet, processes) as progress,
    ):
        if processes.is_first:
            row, prompt_ids = plan.chosen[0].row, plan.chosen[0].prompt_ids
            if source.is_sampled and "sampler_check" not in checks:  # the law of a run does not change
                checks["sampler_check"] = finite_at(row, measurement.check_sampler, row, prompt_ids)
            if not source.is_sampled and "retokenised" not in checks:
                first = [(each.row.prompt_id, each.prompt_ids) for each in plan.chosen]
                checks.update(retokenised_share(model, tokenizer, first, plan.stored, settings))
            checks["self_audit"] = finite_at(row, measurement.audit, row, prompt_ids)
            write_json(plan.grams / CHECKS, checks)
        loop = Loop(plan, measurement, processes, progress, until)
        if settings.pilot:
            settings = with_pilot(loop, settings)
        if not settings.plan:
            loop.measure(processes.from_first(left, plan) if settings.pilot else plan.todo)
    if not source.is_sampled:
        processes.gather(None)
        return settings
    smallest = min(processes.gather(source.generation.size))
    if processes.is_first and smallest < checks["gen_bs"]:
        write_json(plan.grams / CHECKS, {**checks, "gen_bs": smallest})
    return settings


def records_of(plan: Plan) -> Iterator[gram_store.GramRecord]:
    """The Gram records of the chosen prompts in the order of their source, with its present oracle values and columns."""
    for order in sorted(range(len(plan.chosen)), key=lambda order: plan.chosen[order].index):
        record = gram_store.load(gram_store.path_of(plan.grams, plan.chosen[order].row.prompt_id))
        current = as_drawn(record, plan, order)
        if current is not record:
            current.save(plan.grams)
        yield current


def rewarded_otherwise(plan: Plan, settings: TracecovSettings, started: float, draw: Draw) -> None:
    """Results under this run's rewards, from Grams that were made of the same rollouts under others; without a model."""
    rows = [each.row for each in sorted(plan.chosen, key=lambda each: each.index)]

    def records() -> Iterator[gram_store.GramRecord]:
        for row in rows:
            record = gram_store.load(gram_store.path_of(plan.grams, row.prompt_id))
            again = rewarded_again(record, plan.stored, plan.rewards)
            yield replace(again, oracle_value=row.oracle_value, n_oracle=row.oracle_samples)

    now = {name: plan.identity.get(name) for name in REWARDS}
    measured = Measured(gram_store.Records(records), settings.config(), {**plan.other_rewards, **now}, read_checks(plan.grams))
    finish(settings, measured, started, draw, why_no_sketch(plan.other_rewards.get("reward"), settings))


def recompute(settings: TracecovSettings, draw: Draw) -> None:
    """--from_grams: results for any group sizes, without a model."""
    started, grams = time.monotonic(), Path(settings.from_grams)
    identity = read_identity(grams / IDENTITY, "give the grams folder of a finished run")
    folder = output_folder(settings.save_json)
    if not settings.skip_plot:
        output_folder(settings.plot_path)
    with only_writer(folder / "grams"):
        # The config names what made the Grams, with null where that is not known. The defaults of this call made nothing.
        flags = WITH_FROM_GRAMS_AND_ROLLOUTS if settings.rollouts else WITH_FROM_GRAMS
        made, heeded = {**identity.get("flags", {}), **identity}, {flag.lstrip("-") for flag in flags}
        if settings.reward_weights is None and not settings.rollouts:
            heeded.remove("reward_weights")
        config = {name: value if name in heeded else made.get(name) for name, value in settings.config().items()}
        settings = replace(settings, seed=made.get("seed", settings.seed))  # the resamples of the run that made the Grams
        paths, note = gram_store.belonging(grams)
        if note:
            print(f"note: {note}", file=sys.stderr)
        if identity.get("rollouts") is None:
            note_unequal(paths)
        records, no_sketch = gram_store.Records(partial(gram_store.load_all, grams)), None
        if settings.rollouts:
            inputs, no_sketch, made_by = inputs_of(settings), why_no_sketch(identity.get("reward"), settings), records
            records = gram_store.Records(lambda: (rewarded_again(each, inputs.stored, inputs.rewards) for each in made_by))
            identity = {**identity, **dict.fromkeys(REWARDS), **inputs.rewards.identity}
        else:
            records, identity = with_weights(records, identity, settings)
        measured = Measured(records, config, identity, read_checks(grams))
        try:
            finish(settings, measured, started, draw, no_sketch)
        except ValueError as error:  # records of different runs in one folder do not fit each other
            raise UserError(f"{grams}: its files cannot be used together ({error}); give a folder of one run") from None


def with_weights(records: Iterable, identity: dict, settings: TracecovSettings) -> tuple[Iterable, dict]:
    """The records and the identity of a run, under --reward_weights where they are given and differ from the run's.

    Raises UserError where the run has another number of rewards.
    """
    names = identity.get("reward")
    if settings.reward_weights is None:
        return records, identity
    weights = list(check_weights(settings.reward_weights, [names] if isinstance(names, str) else names or []))
    if weights == (identity.get("reward_weights") or [1.0]):
        return records, identity
    return gram_store.Records(lambda: (reweighted(each, weights) for each in records)), {**identity, "reward_weights": weights}


def finish(settings: TracecovSettings, measured: Measured, started: float, draw: Draw, no_sketch: str | None = None) -> None:
    """Write and print the results, and draw the figure. no_sketch: why the records have no sketch, where that is known."""
    if measured.identity.get("importance_weights") and not no_sketch and measured.identity.get("sketch_dim"):
        no_sketch = NOT_WEIGHTED
    about = {
        "config": measured.config,
        "law": measured.identity,
        "checks": {name: value for name, value in measured.checks.items() if name != "gen_bs"},
        "versions": versions(),
        "seconds": round(time.monotonic() - started, 1),
        **({"no_sketch": no_sketch} if no_sketch else {}),
        **({"stopping": measured.stopping} if measured.stopping else {}),
    }
    label = model_label(measured.identity["model"])
    results = write_results(settings, measured.records, about, label, measured.checks.get("gen_bs"))
    print(report(results))
    print(f"results: {results_path(settings.save_json, label)}")
    if not settings.skip_plot:
        print(f"figure:  {draw(results, label)}")
    print(f"\n{group_size_report(results['group_size_law'], settings.budget)}")


def run(settings: TracecovSettings, draw: Draw, command: str = "") -> None:
    """Measure what is left to measure, then write, print and draw the results. command: that which was typed, for --plan."""
    started = time.monotonic()
    if settings.from_grams:
        recompute(settings, draw)
        return
    with Processes(settings.device) as processes, ExitStack() as locks:
        dtype = resolve_dtype(settings.dtype, processes.device)
        settings = processes.from_first(with_choice, settings)
        plan = processes.from_first(prepare, settings, dtype, locks)
        until = Until(settings, plan, started) if settings.stops_itself else None
        with saved_on_interrupt(plan.grams, settings.overwrite, processes.is_first):
            finished = processes.from_first(is_finished, plan, settings, until)
            if not finished and plan.other_rewards is None:
                settings = measure_all(plan, settings, dtype, processes, until)
            if processes.is_first and settings.plan:
                print(outlook(until, command))
            elif processes.is_first:
                conclude(plan, settings, finished, started, draw, until)


def is_finished(plan: Plan, settings: TracecovSettings, until: Until | None) -> bool:
    """Whether nothing is left to measure."""
    if plan.todo and (until is None or settings.overwrite):
        return False
    if settings.plan:
        until.advance()
        return until.n_ready >= min(PILOT_PROMPTS, len(plan.chosen))
    return is_checked(plan, settings) and (until is None or until.is_over)


def conclude(plan: Plan, settings: TracecovSettings, finished: bool, started: float, draw: Draw, until: Until | None) -> None:
    """Write, print and draw the results of what is measured. finished: nothing was left to measure."""
    stopping = None
    if until is not None:
        stopping = until.stopping()
        plan = plan._replace(chosen=plan.chosen[: stopping["n_prompts"]])
    if plan.left_out:
        print(plan.left_out)
    if plan.n_long:
        print(f"left out {plan.n_long} prompts that are too long for the model's context")
    if plan.other_rewards is not None:
        rewarded_otherwise(plan, settings, started, draw)
        return
    label, rows = model_label(settings.model), [each.row for each in plan.chosen]
    takes_all = plan.stored is not None or settings.pilot
    more = not takes_all and have_more(plan.grams, plan.chosen, settings)  # earlier results may be of fewer
    results = finished_results(settings, label, rows) if finished and not more else None
    if results is not None:
        print(f"finished before, nothing left to do; --overwrite starts afresh\n{report(results)}")
        print(f"results: {results_path(settings.save_json, label)}")
        return
    identity, checks = read_identity(plan.grams / IDENTITY), read_checks(plan.grams)
    records = gram_store.Records(partial(records_of, plan))
    finish(settings, Measured(records, settings.config(), identity, checks, stopping), started, draw)
