"""How good is the policy on each prompt? Monte-Carlo oracle values V(x) = E[reward | x] → a JSONL table.

    python Gradient_evaluation/calculate_oracle_v.py --model data/tiny_model \
        --dataset outputs/demo/problems.jsonl --n_oracle 256 --out_dir outputs/demo
    python Gradient_evaluation/calculate_oracle_v.py --model Qwen/Qwen2.5-0.5B-Instruct \
        --dataset Kyleyee/arithmetic-test --split test --out_dir outputs/qwen

For every prompt of the data set (columns ``prompt`` and ``ground_truth``) it samples n_oracle continuations from
exactly the law the flags describe, and writes one row to ``out_dir/oracle_v_n{n_oracle}_{model}.jsonl`` as soon as
the prompt is done: all input columns, V_oracle and its standard error, and what produced it. Run it again and it
continues where it stopped. The tiny model takes about a second per prompt on two CPU cores.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import Parser, UserError, integer, run  # noqa: E402
from Gradient_evaluation.durable_files import append_row  # noqa: E402
from Gradient_evaluation.flags import add_shared_flags, law_of, law_record  # noqa: E402
from Gradient_evaluation.models import (check_prompt_length, fingerprint, load_model, load_tokenizer,  # noqa: E402
                                        model_label, resolve_device, resolve_dtype)
from Gradient_evaluation.run_files import at_row, check_fingerprint, continue_table, output_folder  # noqa: E402
from Gradient_evaluation.sampling import sample_continuations, uniforms  # noqa: E402
from Gradient_evaluation.tables import check_ground_truths, load_dataset_rows  # noqa: E402
from Gradient_evaluation.utils import REWARDS, format_prompt  # noqa: E402


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    add_shared_flags(parser)
    parser.add_argument("--dataset", default="Kyleyee/arithmetic-test", help="hub id, or a local file or folder")
    parser.add_argument("--split", default="train", help="split of a hub or saved data set (%(default)s)")
    parser.add_argument("--n_oracle", type=integer(1), default=1000, help="continuations per prompt (%(default)s)")
    parser.add_argument("--batch_size", type=integer(1), default=128, help="continuations at a time (%(default)s)")
    parser.add_argument("--out_dir", default="outputs/oracle", help="folder of the table (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="start afresh instead of continuing")
    return parser.parse_args()


def measure(model, tokenizer, prompt_ids, row, args) -> dict:
    """Sample one prompt → its row of the table."""
    u = uniforms(args.seed, "oracle", row.prompt_id, 0, args.n_oracle, args.max_new_tokens)
    try:
        drawn = sample_continuations(model, tokenizer, prompt_ids, u, law_of(args), args.batch_size)
    except FloatingPointError as error:
        raise UserError(f"{row.where}: {error} on this prompt; check the checkpoint, or try --dtype float32") from None
    score = REWARDS[args.reward].score
    rewards = np.array([score(continuation.text, row.ground_truth) for continuation in drawn])
    error = rewards.std(ddof=1) / np.sqrt(len(rewards)) if len(rewards) > 1 else None
    return {"V_oracle": float(rewards.mean()), "n_oracle": args.n_oracle, "correct_count": int((rewards > 0.5).sum()),
            "V_standard_error": None if error is None else float(error)}


def summarise(table: list[dict], path: Path, seconds: float) -> str:
    """The last line of a run."""
    values = np.array([row["V_oracle"] for row in table])
    return (f"{len(values)} prompts, mean V {values.mean():.3f}, V = 0 for {np.mean(values == 0):.0%}, "
            f"V = 1 for {np.mean(values == 1):.0%}, {seconds:.0f} s -> {path}")


def main() -> None:
    args = parse_args()
    started = time.monotonic()
    device = resolve_device(args.device)
    rows = load_dataset_rows(args.dataset, args.split)
    check_ground_truths(rows, args.reward)
    dtype = resolve_dtype(args.dtype, device)
    record = {**law_record(args), "n_oracle": args.n_oracle, "seed": args.seed, "dtype": str(dtype).split(".")[-1]}
    path = output_folder(args.out_dir) / f"oracle_v_n{args.n_oracle}_{model_label(args.model)}.jsonl"
    if args.overwrite:
        path.unlink(missing_ok=True)
    finished = continue_table(path, record)
    todo = [row for row in rows if row.prompt_id not in finished]

    tokenizer = load_tokenizer(args.model, args.revision)
    prompts = [at_row(row, format_prompt, tokenizer, row.prompt) for row in todo]
    if todo:
        model = load_model(args.model, args.revision, device, dtype)
        for row, prompt_ids in zip(todo, prompts):
            check_prompt_length(model, prompt_ids, args.max_new_tokens, row.where)
        record["model_fingerprint"] = fingerprint(model)
        check_fingerprint(finished.values(), record["model_fingerprint"], path, "pass --overwrite")
    progress = tqdm(todo, unit="prompt", disable=args.quiet or not sys.stderr.isatty())
    for row, prompt_ids in zip(progress, prompts):
        measured = {**row.columns, **measure(model, tokenizer, prompt_ids, row, args), **record}
        append_row(path, measured)
        finished[row.prompt_id] = measured
    print(summarise([finished[row.prompt_id] for row in rows], path, time.monotonic() - started))


if __name__ == "__main__":
    run(main)
