"""The run of calculate_oracle_v.py: every prompt's V(x), a row of the table as soon as it is known."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.models import fingerprint, load_tokenizer, model_label, resolve_dtype, warn_of_risks, weights_digest
from Gradient_evaluation.runs.checks import check_sampler, in_float32
from Gradient_evaluation.runs.inputs.begun_table import continue_table, left_rows, part_of, remove_table, write_table
from Gradient_evaluation.runs.inputs.dataset import Row, finite_at, load_dataset_rows
from Gradient_evaluation.runs.inputs.oracle_table import GRADED, N_LEFT_OUT, V_COMPONENTS, ZERO_ONE, jeffreys_columns
from Gradient_evaluation.runs.inputs.prompts import chat_from, load_policy, run_identity, sampling_law, tokenised
from Gradient_evaluation.runs.inputs.rewards import Rewards, RunRewards, check_ground_truths, judged, resolve_rewards
from Gradient_evaluation.runs.inputs.rollouts.save import RolloutsFolder, begin_folder, check_folder, note_missing
from Gradient_evaluation.runs.machine.files import append_row
from Gradient_evaluation.runs.machine.memory import Batch, limited_memory
from Gradient_evaluation.runs.machine.processes import Processes, Progress
from Gradient_evaluation.runs.machine.resume import (
    check_fingerprint,
    check_same_weights,
    only_writer,
    output_folder,
    saved_on_interrupt,
)
from Gradient_evaluation.sampling.generate import sample_continuations
from Gradient_evaluation.sampling.law import uniforms
from Gradient_evaluation.sampling.log_probs import log_probs
from Gradient_evaluation.settings import OracleSettings

CHECKED = 16  # continuations that the check of the sampler takes


class Plan(NamedTuple):
    """What a run does, the same for every process."""

    path: Path  # the table
    identity: dict  # of the run, stored in every row
    rows: list[Row]  # the prompts of the table, in the order of the data set
    finished: dict[int, dict]  # rows that the table already has, by prompt id
    todo: list[tuple[Row, list[int]]]  # the other prompts, with their token ids
    n_long: int  # prompts that are too long and left out
    rewards: RunRewards
    law: dict  # of the continuations: run_identity


def prepare(settings: OracleSettings, dtype: torch.dtype, locks: ExitStack) -> Plan:
    """Do everything that needs no model, above all the checks. ``locks`` takes the lock on the table."""
    rows = load_dataset_rows(settings.dataset, settings.split)
    rewards = resolve_rewards(settings.reward, settings.reward_weights, settings.reward_timeout)
    check_ground_truths(rows, rewards)
    warn_of_risks(settings.model, settings.trust_remote_code)
    tokenizer = load_tokenizer(settings.model, settings.revision, settings.trust_remote_code)
    path = Path(settings.out_dir) / f"oracle_v_n{settings.n_oracle}_{model_label(settings.model)}.jsonl"
    chat = chat_from(settings, tokenizer, () if settings.overwrite else left_rows(path))
    rows, prompts, n_long = tokenised(rows, settings, tokenizer, chat)
    law = run_identity(settings, tokenizer, chat, rewards)
    identity = {**law, "n_oracle": settings.n_oracle, "seed": settings.seed, "dtype": str(dtype).split(".")[-1]}
    output_folder(settings.out_dir)
    locks.enter_context(only_writer(path))
    finished = {} if settings.overwrite else continue_table(path, identity, rows)
    todo = [(row, prompt_ids) for row, prompt_ids in zip(rows, prompts) if row.prompt_id not in finished]
    if settings.save_rollouts:
        locks.enter_context(only_writer(output_folder(settings.save_rollouts)))
        check_folder(settings.save_rollouts, sampled_by(identity), settings.overwrite)
        note_missing(settings.save_rollouts, finished)
    return Plan(path, identity, rows, finished, todo, n_long, rewards, law)


def sampled_by(identity: dict) -> dict:
    """The identity of a folder of --save_rollouts: all that decides what is sampled, and how much of it."""
    return {"script": "calculate_oracle_v.py", **identity}


class Measurement:
    """Measures prompts with one model. The batch size halves, and stays so, when memory runs out."""

    def __init__(self, model, tokenizer, settings: OracleSettings, rewards: RunRewards, folder: RolloutsFolder | None = None):
        """folder: where the continuations are saved, None without --save_rollouts."""
        self.model, self.tokenizer, self.settings = model, tokenizer, settings
        self.rewards, self.folder = rewards, folder
        self.batch = Batch("--batch_size", settings.batch_size, least=1)

    def measure(self, row: Row, prompt_ids: list[int]) -> dict:
        """The columns of the table that one prompt's continuations give."""
        settings = self.settings
        u = uniforms(settings.seed, "oracle", row.prompt_id, 0, settings.n_oracle, settings.max_new_tokens)

        def sample(size: int):
            return sample_continuations(self.model, self.tokenizer, prompt_ids, u, sampling_law(settings), size)

        drawn = finite_at(row, self.batch.run, sample, row.where)
        rewards = judged(drawn, row, self.rewards)
        if self.folder is not None:
            self.folder.save(row, prompt_ids, drawn, rewards.total, self.rewards.by_name(rewards))
        return columns_of(rewards, self.rewards, row)

    def check_sampler_of_run(self, todo: list[tuple[Row, list[int]]]) -> None:
        """Raise UserError where the sampler's law is not that of the model's forward pass (runs/checks.py).

        Compared are draws of the first prompt, and of the longest: a model can be one law on the one and not on the other.
        """
        longest = max(todo, key=lambda each: len(each[1]))
        for row, prompt_ids in [todo[0]] if longest is todo[0] else [todo[0], longest]:
            finite_at(
                row, in_float32, self.model, partial(self._compare, row, prompt_ids), "the comparison of sampler and scorer"
            )

    def _compare(self, row: Row, prompt_ids: list[int]) -> dict:
        settings, law = self.settings, sampling_law(self.settings)
        count = min(CHECKED, settings.n_oracle)
        u = uniforms(settings.seed, "audit", row.prompt_id, 0, count, settings.max_new_tokens)

        def check(size: int) -> dict:
            drawn = sample_continuations(self.model, self.tokenizer, prompt_ids, u[:size], law, size)
            with ScoreGram(self.model, partial(log_probs, law=law)) as gram:
                return check_sampler(gram, law, prompt_ids, drawn, row.where)

        return Batch(self.batch.flag, min(self.batch.size, count), least=1).run(check, row.where)


def columns_of(found: Rewards, rewards: RunRewards, row: Row) -> dict:
    """The table's columns for the rewards of one prompt; continuations that are left out count nowhere.

    With several rewards also V_components {name: V}, of which V_oracle is the weighted sum: None counts as 0 there.
    Raises UserError naming the row where every continuation is left out.
    """
    if not found.kept.any():
        raise UserError(f"{row.where}: every reward of every continuation is None; remove the row, or let a reward take it")
    columns = oracle_columns(found.total[found.kept], rewards.zero_one)
    if rewards.are_several:
        values = np.nan_to_num(found.components[:, found.kept]).mean(1)
        columns[V_COMPONENTS] = dict(zip(rewards.names, values.tolist()))
    if not found.kept.all():
        columns[N_LEFT_OUT] = int((~found.kept).sum())
    return columns


def oracle_columns(rewards: np.ndarray, zero_one: bool) -> dict:
    """The table's columns for one prompt's rewards (n,).

    V_standard_error, by V_standard_error_kind:
    * jeffreys (rewards of 0 and 1): ``jeffreys_columns``.
    * sample (graded rewards): the rewards' standard deviation (ddof 1) over sqrt(n).
    * unknown: null, as all graded rewards are equal or there is only one.
    """
    n, V = len(rewards), float(rewards.mean())
    if zero_one:
        error = jeffreys_columns(int(rewards.sum()), n)
    elif (rewards == rewards[0]).all():
        V, error = float(rewards[0]), {"V_standard_error": None, "V_standard_error_kind": "unknown"}
    else:
        error = {"V_standard_error": float(rewards.std(ddof=1) / np.sqrt(n)), "V_standard_error_kind": "sample"}
    return {
        "V_oracle": V,
        "n_oracle": n,
        "correct_count": int(rewards.sum()) if zero_one else None,
        **error,
        "reward_values": ZERO_ONE if zero_one else GRADED,
    }


def begin(plan: Plan, settings: OracleSettings, fingerprints: list[str]) -> None:
    """What the first process checks once the weights are known, before anything is measured or removed."""
    check_same_weights(fingerprints)
    check_fingerprint(plan.finished.values(), fingerprints[0], plan.path, "pass --overwrite")
    if settings.overwrite:
        remove_table(plan.path)
    if settings.save_rollouts:
        sampled = {**sampled_by(plan.identity), "model_fingerprint": fingerprints[0]}
        begin_folder(settings.save_rollouts, sampled, settings.overwrite)


def measure_all(plan: Plan, settings: OracleSettings, dtype: torch.dtype, processes: Processes) -> None:
    """Measure this process's share of ``plan.todo``. Every row is on disk as soon as it is known."""
    model, tokenizer = load_policy(settings, dtype, processes)
    weights = {"model_fingerprint": fingerprint(model), "weights_digest": weights_digest(settings.model, settings.revision)}
    fingerprints = processes.gather(weights["model_fingerprint"])
    processes.from_first(begin, plan, settings, fingerprints)
    path = plan.path if processes.size == 1 else part_of(plan.path, processes.rank)
    folder = None
    if settings.save_rollouts:
        folder = RolloutsFolder(settings.save_rollouts, {**plan.law, "model_fingerprint": weights["model_fingerprint"]})
    measurement = Measurement(model, tokenizer, settings, plan.rewards, folder)
    with (
        limited_memory(settings.max_memory, processes.device),
        Progress(len(plan.rows), len(plan.finished), "V", settings.quiet, processes) as progress,
    ):
        if plan.todo:  # the other processes wait: a sampler that does not pass writes no row
            processes.from_first(measurement.check_sampler_of_run, plan.todo)
        for row, prompt_ids in processes.share(plan.todo):
            columns = measurement.measure(row, prompt_ids)
            append_row(path, table_row(row, columns, {**plan.identity, **weights}))
            progress.done(columns["V_oracle"], settings.n_oracle)
    processes.gather(None)


def table_row(row: Row, columns: dict, identity: dict) -> dict:
    """One row of the table: the columns of the data set, those of V(x), and what made them.

    n_oracle is that of the continuations that are not left out. A data set that is itself such a table has no V_components
    or n_left_out to add.
    """
    before = {name: value for name, value in row.columns.items() if name not in (V_COMPONENTS, N_LEFT_OUT)}
    return {**before, **columns, **identity, "n_oracle": columns["n_oracle"]}


def is_finished(plan: Plan, settings: OracleSettings) -> bool:
    """Whether the table has every row, made with the weights that --model names now."""
    made_with = {(row.get("model_fingerprint"), row.get("weights_digest")) for row in plan.finished.values()}
    return not plan.todo and len(made_with) == 1 and made_with.pop()[1] == weights_digest(settings.model, settings.revision)


def summarise(table: list[dict], plan: Plan, seconds: float) -> str:
    """The last line of a run."""
    values = np.array([row["V_oracle"] for row in table])
    left_out = f", {plan.n_long} left out as too long" if plan.n_long else ""
    if any(no_reward := [row.get(N_LEFT_OUT) or 0 for row in table]):
        left_out += f", {sum(no_reward)} continuations left out (no reward)"
    spread = f"V = 0 for {np.mean(values == 0):.0%}, V = 1 for {np.mean(values == 1):.0%}"
    if any(row.get("reward_values") == GRADED for row in table):
        spread = f"from {values.min():.3g} to {values.max():.3g}"
    alone = ""
    if plan.rewards.are_several:
        means = {name: np.mean([row[V_COMPONENTS][name] for row in table]) for name in plan.rewards.names}
        alone = f" ({', '.join(f'{name} {mean:.3f}' for name, mean in means.items())})"
    return f"{len(values)} prompts{left_out}, mean V {values.mean():.3f}{alone}, {spread}, {seconds:.0f} s -> {plan.path}"


def run(settings: OracleSettings) -> None:
    """Make the table, or continue it."""
    started = time.monotonic()
    with Processes(settings.device) as processes, ExitStack() as locks:
        dtype = resolve_dtype(settings.dtype, processes.device)
        plan = processes.from_first(prepare, settings, dtype, locks)
        finished = processes.from_first(is_finished, plan, settings)
        if not finished:
            with saved_on_interrupt(plan.path, settings.overwrite, processes.is_first):
                measure_all(plan, settings, dtype, processes)
        if processes.is_first:
            table = continue_table(plan.path, plan.identity, plan.rows)
            write_table(plan.path, table, plan.rows)
            text = summarise([table[row.prompt_id] for row in plan.rows], plan, time.monotonic() - started)
            print(f"finished before, nothing left to do: {text}" if finished else text)
