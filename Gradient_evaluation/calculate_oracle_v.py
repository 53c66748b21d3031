"""How good is the policy on each prompt? Monte-Carlo oracle values V(x) = E[reward | x] → a JSONL table.

    python Gradient_evaluation/calculate_oracle_v.py --model data/tiny_model \
        --dataset outputs/demo/problems.jsonl --n_oracle 256 --out_dir outputs/demo
    python Gradient_evaluation/calculate_oracle_v.py --model Qwen/Qwen2.5-0.5B-Instruct \
        --dataset Kyleyee/arithmetic-test --split test --out_dir outputs/qwen

For every prompt of the data set (columns ``prompt`` and ``ground_truth``) it samples n_oracle continuations from
exactly the law the flags describe, and writes one row to ``out_dir/oracle_v_n{n_oracle}_{model}.jsonl`` as soon as
the prompt is done: all input columns, V_oracle and its standard error (of which kind: ``oracle_columns``), and what
produced it. Run it again and it continues where it stopped. The tiny model takes about a second per prompt on two CPU cores.
"""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import MOST_CONTINUATIONS, Parser, integer, one_line_while_importing, run  # noqa: E402
from Gradient_evaluation.flags import add_shared_flags  # noqa: E402


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    add_shared_flags(parser)
    parser.add_argument("--dataset", default="Kyleyee/arithmetic-test", help="hub id, or a local file or folder")
    parser.add_argument("--split", default="train", help="split of a hub or saved data set (%(default)s)")
    parser.add_argument(
        "--n_oracle", type=integer(1, MOST_CONTINUATIONS), default=1000, help="continuations per prompt (%(default)s)"
    )
    parser.add_argument("--batch_size", type=integer(1), default=32, help="continuations at a time (%(default)s)")
    parser.add_argument("--out_dir", default="oracle_v_results", help="folder of the table (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    one_line_while_importing()
    parse_args()  # a wrong flag is refused now, before the libraries below, which take seconds to import

import numpy as np  # noqa: E402
import torch  # noqa: E402

from Gradient_evaluation.gram.score_gram import ScoreGram  # noqa: E402
from Gradient_evaluation.models import (
    device_line,
    fingerprint,
    load_model,
    load_tokenizer,
    model_label,  # noqa: E402
    resolve_dtype,
    warn_of_risks,
    weights_digest,
)
from Gradient_evaluation.runs.checks import check_sampler, in_float32  # noqa: E402
from Gradient_evaluation.runs.files import append_row  # noqa: E402
from Gradient_evaluation.runs.memory import Batch, limited_memory, tune_allocator  # noqa: E402
from Gradient_evaluation.runs.oracle_table import GRADED, ZERO_ONE, Row, check_ground_truths, load_dataset_rows, rewards_of  # noqa: E402
from Gradient_evaluation.runs.processes import Processes  # noqa: E402
from Gradient_evaluation.runs.progress import Progress  # noqa: E402
from Gradient_evaluation.runs.prompts import chat_from, law_of, law_record, tokenised  # noqa: E402
from Gradient_evaluation.runs.resume import (
    check_fingerprint,
    check_same_weights,
    continue_table,
    finite_at,  # noqa: E402
    left_rows,
    only_writer,
    output_folder,
    part_of,
    remove_table,
    saved_on_interrupt,
    write_table,
)
from Gradient_evaluation.sampling.generate import log_probs, sample_continuations, uniforms  # noqa: E402
from Gradient_evaluation.utils import REWARDS  # noqa: E402

CHECKED = 16  # continuations whose log-probs are compared with those of a forward pass


class Plan(NamedTuple):
    """What there is to do, the same for every process."""

    path: Path  # the table
    record: dict  # identity of the run, stored with every row
    rows: list[Row]  # the prompts of the table, in the order of the data set
    finished: dict[int, dict]  # rows of the table that an earlier run has left, by prompt id
    todo: list[tuple[Row, list[int]]]  # the others, with the token ids of their prompts
    n_long: int  # prompts left out as too long


def prepare(args, dtype: torch.dtype, held: ExitStack) -> Plan:
    """Everything that can be checked and done before the model is loaded; ``held`` takes the lock on the table."""
    rows = load_dataset_rows(args.dataset, args.split)
    check_ground_truths(rows, args.reward)
    warn_of_risks(args.model, args.trust_remote_code)
    tokenizer = load_tokenizer(args.model, args.revision, args.trust_remote_code)
    path = Path(args.out_dir) / f"oracle_v_n{args.n_oracle}_{model_label(args.model)}.jsonl"
    chat = chat_from(args, tokenizer, () if args.overwrite else left_rows(path))
    rows, prompts, n_long = tokenised(rows, args, tokenizer, chat)
    record = {
        **law_record(args, tokenizer, chat),
        "n_oracle": args.n_oracle,
        "seed": args.seed,
        "dtype": str(dtype).split(".")[-1],
    }
    output_folder(args.out_dir)
    held.enter_context(only_writer(path))
    finished = {} if args.overwrite else continue_table(path, record, rows)
    todo = [(row, prompt_ids) for row, prompt_ids in zip(rows, prompts) if row.prompt_id not in finished]
    return Plan(path, record, rows, finished, todo, n_long)


def measure(model, tokenizer, prompt_ids, row, args, batch: Batch) -> dict:
    """Sample one prompt → its columns of the table."""
    u = uniforms(args.seed, "oracle", row.prompt_id, 0, args.n_oracle, args.max_new_tokens)

    def sample(size: int):
        return sample_continuations(model, tokenizer, prompt_ids, u, law_of(args), size)

    drawn = finite_at(row, batch.run, sample, row.where)
    rewards = rewards_of((continuation.text for continuation in drawn), row, args.reward)
    return oracle_columns(rewards, REWARDS[args.reward].zero_one)


def oracle_columns(rewards: np.ndarray, zero_one: bool) -> dict:
    """What the table says of one prompt's rewards (n,).

    V_standard_error, by V_standard_error_kind:
    * jeffreys (rewards of 0 and 1): the standard deviation of V given c right of n under Jeffreys' prior, that of
      Beta(c + 1/2, n - c + 1/2): sqrt(m (1 - m) / (n + 2)) with m = (c + 1/2) / (n + 1). Never 0, also where V is 0 or 1.
    * sample (graded rewards): the rewards' standard deviation (ddof 1) over sqrt(n).
    * unknown: null, as all graded rewards are equal or there is only one.
    """
    n, V = len(rewards), float(rewards.mean())
    if zero_one:
        kind, mean = "jeffreys", (rewards.sum() + 0.5) / (n + 1)
        error = float(np.sqrt(mean * (1 - mean) / (n + 2)))
    elif (rewards == rewards[0]).all():
        kind, error, V = "unknown", None, float(rewards[0])
    else:
        kind, error = "sample", float(rewards.std(ddof=1) / np.sqrt(n))
    return {
        "V_oracle": V,
        "n_oracle": n,
        "correct_count": int(rewards.sum()) if zero_one else None,
        "V_standard_error": error,
        "V_standard_error_kind": kind,
        "reward_values": ZERO_ONE if zero_one else GRADED,
    }


def check_law(model, tokenizer, prompt_ids, row, args, batch: Batch) -> None:
    """Raise UserError where the sampler's law is not that of the model's forward pass (runs/checks.py)."""
    u = uniforms(args.seed, "audit", row.prompt_id, 0, min(CHECKED, args.n_oracle), args.max_new_tokens)
    law = law_of(args)

    def check(size: int) -> dict:
        drawn = sample_continuations(model, tokenizer, prompt_ids, u[:size], law, size)
        with ScoreGram(model, partial(log_probs, law=law)) as gram:
            return check_sampler(gram, law, prompt_ids, drawn, row.where)

    def in_batches() -> dict:
        return Batch(batch.flag, min(batch.size, len(u)), least=1).run(check, row.where)

    finite_at(row, in_float32, model, in_batches, "the comparison of sampler and scorer")


def begin(plan: Plan, args, fingerprints: list[str]) -> None:
    """The checks that need the model's weights, by the first process, before anything is measured or removed."""
    check_same_weights(fingerprints)
    check_fingerprint(plan.finished.values(), fingerprints[0], plan.path, "pass --overwrite")
    if args.overwrite:
        remove_table(plan.path)


def measure_all(plan: Plan, args, dtype: torch.dtype, processes: Processes) -> None:
    """Measure what the plan leaves to do, this process its share of it; every row is on disk once it is done."""
    tokenizer = load_tokenizer(args.model, args.revision, args.trust_remote_code)
    tune_allocator(processes.device)
    if args.device == "auto" and processes.is_first and not args.quiet:
        print(device_line(processes.device, dtype), file=sys.stderr)
    model = load_model(args.model, args.revision, processes.device, dtype, args.trust_remote_code)
    weights = {"model_fingerprint": fingerprint(model), "weights_digest": weights_digest(args.model, args.revision)}
    fingerprints = processes.gather(weights["model_fingerprint"])
    processes.from_first(begin, plan, args, fingerprints)
    path = plan.path if processes.size == 1 else part_of(plan.path, processes.rank)
    batch = Batch("--batch_size", args.batch_size, least=1)
    with (
        limited_memory(args.max_memory, processes.device),
        Progress(len(plan.rows), len(plan.finished), "V", args.quiet, processes) as progress,
    ):
        if plan.todo:  # the others wait, so that no row is written by a sampler that does not pass
            processes.from_first(check_law, model, tokenizer, plan.todo[0][1], plan.todo[0][0], args, batch)
        for row, prompt_ids in processes.share(plan.todo):
            measured = measure(model, tokenizer, prompt_ids, row, args, batch)
            append_row(path, {**row.columns, **measured, **plan.record, **weights})
            progress.done(measured["V_oracle"], args.n_oracle)
    processes.gather(None)


def is_finished(plan: Plan, args) -> bool:
    """Whether an earlier run has left every row, made with the weights that are there now."""
    made_with = {(row.get("model_fingerprint"), row.get("weights_digest")) for row in plan.finished.values()}
    return not plan.todo and len(made_with) == 1 and made_with.pop()[1] == weights_digest(args.model, args.revision)


def summarise(table: list[dict], plan: Plan, seconds: float) -> str:
    """The last line of a run."""
    values = np.array([row["V_oracle"] for row in table])
    left_out = f", {plan.n_long} left out as too long" if plan.n_long else ""
    spread = f"V = 0 for {np.mean(values == 0):.0%}, V = 1 for {np.mean(values == 1):.0%}"
    if any(row.get("reward_values") == GRADED for row in table):
        spread = f"from {values.min():.3g} to {values.max():.3g}"
    return f"{len(values)} prompts{left_out}, mean V {values.mean():.3f}, {spread}, {seconds:.0f} s -> {plan.path}"


def main() -> None:
    args = parse_args()
    started = time.monotonic()
    with Processes(args.device) as processes, ExitStack() as held:
        dtype = resolve_dtype(args.dtype, processes.device)
        plan = processes.from_first(prepare, args, dtype, held)
        finished = processes.from_first(is_finished, plan, args)
        if not finished:
            with saved_on_interrupt(plan.path, args.overwrite, processes.is_first):
                measure_all(plan, args, dtype, processes)
        if processes.is_first:
            table = continue_table(plan.path, plan.record, plan.rows)
            write_table(plan.path, table, plan.rows)
            print(
                "finished before, nothing left to do: " * finished
                + summarise([table[row.prompt_id] for row in plan.rows], plan, time.monotonic() - started)
            )


if __name__ == "__main__":
    run(main)
