"""Does the group-size law's prediction show in training? Plain policy gradient at every G, at equal sampling cost.

    python Policy_Optimization/train_group_sizes.py --model data/tiny_model \
        --results outputs/demo/tracecov_tiny_model.json --out outputs/demo/group_sizes.json

Every step draws B = N/G arithmetic problems (data/make_arithmetic.py) and G continuations of each, and follows the
leave-one-out policy gradient (policy_gradient.py), whose MSE the group-size law predicts. N, the continuations of a step, is
the same for all G, and so is the learning rate. A finished run (G, seed) is stored in --out; the same command continues
with the next one. At the end the script prints the mean reward on held-out problems for each G, beside the predicted MSE. The
21 runs of the defaults take about 35 s each on one core: 12 minutes.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.make_arithmetic import MAX_PROBLEMS, make_problems
from Gradient_evaluation.cli import Parser, group_sizes, importing, integer, number, run
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine.files import write_json

NOT_STORED = ("model", "group_sizes", "seeds", "results", "out", "threads", "overwrite", "quiet")


@dataclass(frozen=True)
class Settings:
    """The flags, by their names. --out stores all but ``NOT_STORED``, and its runs have the same."""

    model: str
    group_sizes: tuple[int, ...]
    budget: int
    steps: int
    seeds: int
    optimizer: str
    learning_rate: float
    n_train: int
    n_held_out: int
    eval_samples: int
    temperature: float
    top_p: float
    max_new_tokens: int
    results: str | None
    out: str
    threads: int
    overwrite: bool
    quiet: bool


def parse_args(arguments: Sequence[str] | None) -> Settings:
    parser = Parser(prog="train_group_sizes.py", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="data/tiny_model", help="where every run starts (%(default)s)")
    parser.add_argument("--group_sizes", nargs="+", default=["2 4 8 16 32 64 128"], help="G of the runs (%(default)s)")
    parser.add_argument("--budget", type=integer(2), default=128, help="N, continuations a step (%(default)s)")
    parser.add_argument("--steps", type=integer(1), default=100, help="(%(default)s)")
    parser.add_argument("--seeds", type=integer(1), default=3, help="runs per G (%(default)s)")
    parser.add_argument("--optimizer", choices=("adam", "sgd"), default="sgd", help="(%(default)s)")
    parser.add_argument("--learning_rate", type=number(0, low_included=False), default=0.05, help="(%(default)s)")
    parser.add_argument("--n_train", type=integer(1), default=300, help="problems to draw from (%(default)s)")
    parser.add_argument("--n_held_out", type=integer(1), default=100, help="other problems (%(default)s)")
    parser.add_argument("--eval_samples", type=integer(1), default=16, help="continuations of each (%(default)s)")
    parser.add_argument("--temperature", type=number(0, low_included=False), default=1.0, help="(%(default)s)")
    parser.add_argument("--top_p", type=number(0, 1, low_included=False), default=0.95, help="(%(default)s)")
    parser.add_argument("--max_new_tokens", type=integer(1), default=32, help="(%(default)s)")
    parser.add_argument("--results", help="JSON of run_tracecov.py, for the predicted curve")
    parser.add_argument("--out", default="outputs/group_sizes.json", help="JSON of the runs (%(default)s)")
    parser.add_argument("--threads", type=integer(1), default=2, help="CPU threads (%(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="start afresh instead of continuing")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    flags = parser.parse_args(arguments)
    settings = Settings(**{**vars(flags), "group_sizes": tuple(group_sizes(flags.group_sizes))})
    if any(settings.budget % size for size in settings.group_sizes):
        parser.error(f"--budget {settings.budget}: must be a multiple of every group size {list(settings.group_sizes)}")
    if settings.n_train + settings.n_held_out > MAX_PROBLEMS:
        parser.error(f"--n_train and --n_held_out: together at most {MAX_PROBLEMS} problems exist")
    return settings


def summarise(runs: dict, sizes: Sequence[int], budget: int, group_size_law: dict | None) -> list[dict]:
    """Rows {G, B, seeds, held_out_reward, standard_error, train_reward, silent_share, predicted_mse}, one per G."""
    import numpy as np

    from Gradient_evaluation.runs.results.report import budget_table

    predicted = {row["G"]: row["mse"] for row in budget_table(group_size_law, budget)} if group_size_law else {}
    rows = []
    for size in sizes:
        mine = [entry for entry in runs.values() if entry["G"] == size]
        row = {"G": size, "B": budget // size, "seeds": len(mine), "predicted_mse": predicted.get(size)}
        for name in ("held_out_reward", "train_reward", "silent_share"):
            row[name] = float(np.mean([entry[name] for entry in mine]))
        deviation = np.std([entry["held_out_reward"] for entry in mine], ddof=1) if len(mine) > 1 else None
        rows.append({**row, "standard_error": None if deviation is None else float(deviation / len(mine) ** 0.5)})
    return rows


def table(rows: list[dict], start: float) -> str:
    lines = [
        f"mean reward on held-out problems; {start:.4f} before training",
        f"{'G':>4} {'B':>4} {'predicted MSE':>14} {'silent':>7} {'reward in training':>19}   held-out reward",
    ]
    for row in rows:
        mse = "-" if row["predicted_mse"] is None else f"{row['predicted_mse']:.4g}"
        error = "" if row["standard_error"] is None else f" +- {row['standard_error']:.4f}"
        lines.append(
            f"{row['G']:>4} {row['B']:>4} {mse:>14} {row['silent_share']:>7.1%} {row['train_reward']:>19.4f}   "
            f"{row['held_out_reward']:.4f}{error} ({row['seeds']} seeds)"
        )
    return "\n".join(lines)


def load_group_size_law(path: str, settings: dict) -> dict:
    """The group_size_law of a results JSON; a note on stderr where its sampling law or its model is another one."""
    from Gradient_evaluation.runs.results.results_file import check_group_size_law, load_results

    results = load_results(path)
    check_group_size_law(results.get("group_size_law"), path)
    measured, names = results.get("law") or {}, ("temperature", "top_p", "max_new_tokens", "model_fingerprint")
    other = [name for name in names if name in measured and measured[name] != settings[name]]
    if other:
        print(f"note: {path} was measured with another {', '.join(other)} than these runs", file=sys.stderr)
    return results["group_size_law"]


def load_runs(path: Path, settings: dict, overwrite: bool) -> dict:
    """What ``--out`` holds already: {settings, start, runs}. Raises UserError where its settings are others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    empty = {"settings": settings, "start": None, "runs": {}}
    if overwrite or not path.exists():
        return empty
    try:
        saved = json.loads(path.read_text())
        other = [name for name, value in settings.items() if saved["settings"].get(name) != value]
        found = {"settings": settings, "start": saved["start"], "runs": dict(saved["runs"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: is not a file of train_group_sizes.py; give another --out, or --overwrite") from None
    if other:
        raise UserError(f"{path}: holds runs with another {', '.join(other)}; give another --out, or --overwrite")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    settings = parse_args(arguments)
    with importing():
        import numpy as np
        import torch

        from Gradient_evaluation.models import check_prompt_length, fingerprint, load_model, load_tokenizer, model_limits
        from Gradient_evaluation.sampling.law import SamplingLaw
        from Gradient_evaluation.utils import format_prompt
        from Policy_Optimization.policy_gradient import Task, held_out_reward, train
    torch.set_num_threads(settings.threads)
    law = SamplingLaw(settings.temperature, settings.top_p, 0, settings.max_new_tokens)
    tokenizer = load_tokenizer(settings.model, None)
    start = load_model(settings.model, None, torch.device("cpu"), torch.float32)
    problems = make_problems(settings.n_train + settings.n_held_out, seed=0)
    np.random.default_rng(0).shuffle(problems)  # the easy kinds run out first: both parts get as many of them
    for problem in problems:
        problem["ids"] = format_prompt(tokenizer, problem["prompt"])
    longest = max((problem["ids"] for problem in problems), key=len)
    check_prompt_length(model_limits(settings.model, None)[0], longest, settings.max_new_tokens)
    task = Task(problems, tokenizer, law)
    stored = {name: value for name, value in vars(settings).items() if name not in NOT_STORED}
    stored["model_fingerprint"] = fingerprint(start)
    predicted = load_group_size_law(settings.results, stored) if settings.results else None
    saved = load_runs(Path(settings.out), stored, settings.overwrite)
    if saved["start"] is None:
        saved["start"] = held_out_reward(start, task, settings)
    for seed in range(settings.seeds):
        for size in settings.group_sizes:
            if f"G{size}_seed{seed}" not in saved["runs"]:
                saved["runs"][f"G{size}_seed{seed}"] = train(copy.deepcopy(start), task, size, seed, settings)
                write_json(settings.out, saved)
    rows = summarise(saved["runs"], settings.group_sizes, settings.budget, predicted)
    write_json(settings.out, {**saved, "summary": rows})
    print(table(rows, saved["start"]))


if __name__ == "__main__":
    run(main)
