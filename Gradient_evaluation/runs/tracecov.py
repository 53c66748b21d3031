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

import numpy as np
import torch

from Gradient_evaluation.chat_template import Chat
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.models import fingerprint, load_tokenizer, model_label, resolve_dtype, warn_of_risks, weights_digest
from Gradient_evaluation.runs import gram_store
from Gradient_evaluation.runs.by_reward import reweighted
from Gradient_evaluation.runs.files import write_json
from Gradient_evaluation.runs.measure import Measurement, block_sizes, planned_block_size, score_gram
from Gradient_evaluation.runs.memory import limited_memory
from Gradient_evaluation.runs.oracle_table import OracleRow, check_same_law, load_oracle_table, oracle_components
from Gradient_evaluation.runs.processes import Processes, Progress
from Gradient_evaluation.runs.prompts import chat_from, load_policy, run_identity, tokenised
from Gradient_evaluation.runs.report import group_size_report, report
from Gradient_evaluation.runs.results import finished_results, results_path, versions, write_results
from Gradient_evaluation.runs.resume import (
    CHECKS,
    IDENTITY,
    check_fingerprint,
    check_identity,
    check_same_weights,
    finite_at,
    only_writer,
    output_folder,
    read_checks,
    read_identity,
    refuse_difference,
    saved_on_interrupt,
)
from Gradient_evaluation.runs.rewards import RunRewards, check_ground_truths, check_weights, resolve_rewards
from Gradient_evaluation.settings import WITH_FROM_GRAMS, TracecovSettings
from Gradient_evaluation.stats.estimators import extra_rollouts, sketched_names

# Flags that decide the blocks and the prompts. run.json stores them beside the identity, for messages and --from_grams.
STORED_FLAGS = ("T", "M", "K_list", "block_size", "estimators", "subsample_prompts")

Draw = Callable[[dict, str], Path]  # (results, label) -> the file of the figure


def stored_flags(settings: TracecovSettings) -> dict:
    """The flags that run.json stores."""
    config = settings.config()
    return {name: config[name] for name in STORED_FLAGS}


class Chosen(NamedTuple):
    """A prompt that was drawn."""

    index: int  # of its row in the oracle table
    row: OracleRow
    prompt_ids: list[int]


class Plan(NamedTuple):
    """What a run does, the same for every process."""

    grams: Path  # folder of the Gram files
    identity: dict  # of the run, without the fingerprint of the weights
    chosen: list[Chosen]  # in the order in which they were drawn
    todo: list[Chosen]  # those without a Gram file
    n_long: int  # prompts that are too long and left out
    rewards: RunRewards


class Measured(NamedTuple):
    """What the results are made of."""

    records: Iterable[gram_store.GramRecord]  # in the order of the oracle table; gone through once for each reward
    config: dict  # the flags that made the records
    identity: dict  # of the run that made them
    checks: dict  # of that run


def drawn(n: int, T: int, subsample: int | None, seed: int) -> list[int]:
    """Indices of T rows of a table of n, in the order in which they are measured, as the paper's released script draws them.

    Of a table with more than ``subsample`` rows, that many are drawn first. The rows are shuffled, by a generator of the
    same seed, and the first T are taken. So the prompts of a smaller T are the first of a larger one, and the prompts of an
    interrupted run are a random sample.
    """
    order = list(range(n))
    if subsample is not None and subsample < n:
        order = np.random.default_rng(seed).choice(n, size=subsample, replace=False).tolist()
    np.random.default_rng(seed).shuffle(order)
    return order[:T]


def choose_rows(rows: list[OracleRow], settings: TracecovSettings, tokenizer, chat: Chat) -> tuple[list[Chosen], int]:
    """The drawn prompts, and how many rows of the oracle table were too long."""
    index, n_long = {row.prompt_id: i for i, row in enumerate(rows)}, 0
    if settings.skip_long:
        rows, prompts, n_long = tokenised(rows, settings, tokenizer, chat)
    picked = drawn(len(rows), settings.T, settings.subsample_prompts, settings.seed)
    rows = [rows[i] for i in picked]
    prompts = [prompts[i] for i in picked] if settings.skip_long else tokenised(rows, settings, tokenizer, chat)[1]
    return [Chosen(index[row.prompt_id], row, prompt_ids) for row, prompt_ids in zip(rows, prompts)], n_long


def prepare(settings: TracecovSettings, dtype: torch.dtype, locks: ExitStack) -> Plan:
    """Do everything that needs no model, above all the checks. ``locks`` takes the lock on the Gram files."""
    sizes = block_sizes(settings.M * settings.K_list[-1], planned_block_size(settings))
    rows = load_oracle_table(settings.oracle_table)
    rewards = resolve_rewards(settings.reward, settings.reward_weights, settings.reward_timeout)
    check_ground_truths(rows, rewards)
    warn_of_risks(settings.model, settings.trust_remote_code)
    tokenizer = load_tokenizer(settings.model, settings.revision, settings.trust_remote_code)
    path = Path(settings.save_json) / "grams" / IDENTITY
    earlier = [read_identity(path)] if path.exists() and not settings.overwrite else []
    chat = chat_from(settings, tokenizer, [*(row.columns for row in rows), *earlier])
    law = run_identity(settings, tokenizer, chat, rewards)
    check_same_law(rows, law, settings.oracle_table, settings.allow_mismatch)
    chosen, n_long = choose_rows(rows, settings, tokenizer, chat)
    identity = {**law, **identity_beside_the_law(settings, sizes), "dtype": str(dtype).split(".")[-1]}
    grams = output_folder(settings.save_json) / "grams"
    locks.enter_context(only_writer(grams))
    output_folder(grams)
    if not settings.skip_plot:
        output_folder(settings.plot_path)
    todo = [each for each in chosen if not gram_store.path_of(grams, each.row.prompt_id).exists()]
    if settings.overwrite:
        todo = chosen
    elif (grams / IDENTITY).exists():
        found = read_identity(grams / IDENTITY)
        refuse_difference(str(grams / IDENTITY), found, identity, stored_flags(settings))
        note_older_choice(grams, found, chosen)
    return Plan(grams, identity, chosen, todo, n_long, rewards)


def identity_beside_the_law(settings: TracecovSettings, sizes: list[int]) -> dict:
    """The entries of a run's identity that say how its Grams are made, in blocks of ``sizes``."""
    sketched = sketched_names(settings.estimators) if settings.sketch_dim else []
    return {
        "seed": settings.seed,
        "scoring": settings.scoring,
        "block_sizes": sizes,
        "params": settings.params,
        "by_layer": settings.by_layer,
        "sketch_dim": settings.sketch_dim,
        "greedy": "greedy" in extra_rollouts(settings.estimators),
        "gram_dtype": settings.gram_dtype,
        "sketched": sketched,
        "sketched_at": settings.K_list[-1] if len(sketched) > 1 else None,
    }


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


def is_measured(plan: Plan, settings: TracecovSettings) -> bool:
    """Whether every Gram and the checks are there, made with the weights that --model names now."""
    if plan.todo or not {"self_audit", "sampler_check"} <= set(read_checks(plan.grams)) or not (plan.grams / IDENTITY).exists():
        return False
    return read_identity(plan.grams / IDENTITY).get("weights_digest") == weights_digest(settings.model, settings.revision)


def begin(plan: Plan, settings: TracecovSettings, fingerprints: list[str]) -> None:
    """What the first process checks once the weights are known, before anything is measured or removed."""
    check_same_weights(fingerprints)
    model_fingerprint = fingerprints[0]
    if not settings.allow_mismatch:
        check_fingerprint(
            (each.row.columns for each in plan.chosen),
            model_fingerprint,
            settings.oracle_table,
            "make the table again, or pass --allow_mismatch",
        )
    stored = {
        **plan.identity,
        "model_fingerprint": model_fingerprint,
        "weights_digest": weights_digest(settings.model, settings.revision),
        "flags": stored_flags(settings),
    }
    check_identity(plan.grams / IDENTITY, stored, settings.overwrite)


def measure_all(plan: Plan, settings: TracecovSettings, dtype: torch.dtype, processes: Processes) -> None:
    """Measure this process's share of ``plan.todo``. Every Gram is on disk as soon as it is known."""
    model, tokenizer = load_policy(settings, dtype, processes)
    fingerprints = processes.gather(fingerprint(model))
    processes.from_first(begin, plan, settings, fingerprints)
    gram = score_gram(model, settings)
    measurement = Measurement(model, tokenizer, gram, settings, plan.rewards)
    done = len(plan.chosen) - len(plan.todo)
    checks = {"gen_bs": settings.gen_bs, **read_checks(plan.grams)}
    with (
        gram,
        limited_memory(settings.max_memory, processes.device),
        Progress(len(plan.chosen), done, "reward", settings.quiet, processes) as progress,
    ):
        if processes.is_first:
            row, prompt_ids = plan.chosen[0].row, plan.chosen[0].prompt_ids
            if "sampler_check" not in checks:  # the law of a run does not change
                checks["sampler_check"] = finite_at(row, measurement.check_sampler, row, prompt_ids)
            checks["self_audit"] = finite_at(row, measurement.audit, row, prompt_ids)
            write_json(plan.grams / CHECKS, checks)
        order = {each.row.prompt_id: position for position, each in enumerate(plan.chosen)}
        for index, row, prompt_ids in processes.share(plan.todo):
            record = finite_at(row, measurement.measure, row, prompt_ids, index)
            replace(record, order=order[row.prompt_id]).save(plan.grams)
            progress.done(float(record.rewards.mean()), len(record.rewards))
    smallest = min(processes.gather(measurement.generation.size))
    if processes.is_first and smallest < checks["gen_bs"]:
        write_json(plan.grams / CHECKS, {**checks, "gen_bs": smallest})


def records_of(plan: Plan) -> Iterator[gram_store.GramRecord]:
    """The Gram records of the chosen prompts in the order of the table, with its present oracle values."""
    for order, (index, row, _) in sorted(enumerate(plan.chosen), key=lambda each: each[1].index):
        record = gram_store.load(gram_store.path_of(plan.grams, row.prompt_id))
        now = {"index": index, "order": order, "oracle_value": row.oracle_value, "n_oracle": row.oracle_samples}
        if plan.rewards.are_several:
            now["oracle_components"] = oracle_components(row, plan.rewards.names)
        current = replace(record, **now)
        if any(getattr(record, name) != value for name, value in now.items()):
            current.save(plan.grams)
        yield current


def recompute(settings: TracecovSettings, draw: Draw) -> None:
    """--from_grams: results for any group sizes, without a model."""
    started, grams = time.monotonic(), Path(settings.from_grams)
    identity = read_identity(grams / IDENTITY, "give the grams folder of a finished run")
    folder = output_folder(settings.save_json)
    if not settings.skip_plot:
        output_folder(settings.plot_path)
    with only_writer(folder / "grams"):
        # The config names what made the Grams, with null where that is not known. The defaults of this call made nothing.
        made, heeded = {**identity.get("flags", {}), **identity}, {flag.lstrip("-") for flag in WITH_FROM_GRAMS}
        if settings.reward_weights is None:
            heeded.remove("reward_weights")
        config = {name: value if name in heeded else made.get(name) for name, value in settings.config().items()}
        settings = replace(settings, seed=made.get("seed", settings.seed))  # the resamples of the run that made the Grams
        note = gram_store.belonging(grams)[1]
        if note:
            print(f"note: {note}", file=sys.stderr)
        records, identity = with_weights(gram_store.Records(partial(gram_store.load_all, grams)), identity, settings)
        measured = Measured(records, config, identity, read_checks(grams))
        try:
            finish(settings, measured, started, draw)
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


def finish(settings: TracecovSettings, measured: Measured, started: float, draw: Draw) -> None:
    """Write and print the results, and draw the figure."""
    about = {
        "config": measured.config,
        "law": measured.identity,
        "checks": {name: value for name, value in measured.checks.items() if name != "gen_bs"},
        "versions": versions(),
        "seconds": round(time.monotonic() - started, 1),
    }
    label = model_label(measured.identity["model"])
    results = write_results(settings, measured.records, about, label, measured.checks.get("gen_bs"))
    print(report(results))
    print(f"results: {results_path(settings.save_json, label)}")
    if not settings.skip_plot:
        print(f"figure:  {draw(results, label)}")
    print(f"\n{group_size_report(results['group_size_law'], settings.budget)}")


def run(settings: TracecovSettings, draw: Draw) -> None:
    """Measure what is left to measure, then write, print and draw the results."""
    if settings.from_grams:
        recompute(settings, draw)
        return
    started = time.monotonic()
    with Processes(settings.device) as processes, ExitStack() as locks:
        dtype = resolve_dtype(settings.dtype, processes.device)
        plan = processes.from_first(prepare, settings, dtype, locks)
        with saved_on_interrupt(plan.grams, settings.overwrite, processes.is_first):
            finished = processes.from_first(is_measured, plan, settings)
            if not finished:
                measure_all(plan, settings, dtype, processes)
            if not processes.is_first:
                return
            if plan.n_long:
                print(f"left out {plan.n_long} prompts that are too long for the model's context")
            label, rows = model_label(settings.model), [each.row for each in plan.chosen]
            results = finished_results(settings, label, rows) if finished else None
            if results is not None:
                print(f"finished before, nothing left to do; --overwrite starts afresh\n{report(results)}")
                print(f"results: {results_path(settings.save_json, label)}")
                return
            identity, checks = read_identity(plan.grams / IDENTITY), read_checks(plan.grams)
            records = gram_store.Records(partial(records_of, plan))
            finish(settings, Measured(records, settings.config(), identity, checks), started, draw)
