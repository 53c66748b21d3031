"""Does the group-size law's prediction show in training? Plain policy gradient at every G, at equal sampling cost.

    python Policy_Optimization/train_group_sizes.py --model data/tiny_model \
        --results outputs/demo/tracecov_tiny_model.json --out outputs/demo/group_sizes.json

Every step draws B = N/G arithmetic problems (data/make_arithmetic.py) and G continuations of each, and follows the
leave-one-out policy gradient (1/N) sum A_i grad log pi_i: the minibatch gradient whose MSE the law predicts. One
learning rate for all G. Only N, the continuations per step, is fixed. Each finished run (G, seed) is kept in --out:
the same command continues. At the end: mean reward on held-out problems against G, beside the predicted MSE.
No VERL, no KL term, no clipping of ratios (one update per sample). The 21 runs
of the defaults take about 35 s each on one core: 12 minutes.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import one_line_while_importing  # noqa: E402

if __name__ == "__main__":
    one_line_while_importing()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from data.make_arithmetic import MAX_PROBLEMS, make_problems  # noqa: E402
from Gradient_evaluation.cli import Parser, group_sizes, integer, number, run  # noqa: E402
from Gradient_evaluation.errors import UserError  # noqa: E402
from Gradient_evaluation.models import check_prompt_length, fingerprint, load_model, load_tokenizer, model_limits  # noqa: E402
from Gradient_evaluation.runs.files import write_json  # noqa: E402
from Gradient_evaluation.runs.group_size_report import budget_table  # noqa: E402
from Gradient_evaluation.sampling.generate import (
    Continuation,
    SamplingLaw,
    decode_text,
    draw_tokens,
    eos_token_ids,  # noqa: E402
    log_probs,
    uniforms,
)
from Gradient_evaluation.stats.advantages import group_advantages  # noqa: E402
from Gradient_evaluation.utils import REWARDS, format_prompt  # noqa: E402
from plots.plot_group_size import check_law  # noqa: E402
from plots.plot_tracecov import load_results  # noqa: E402

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


def parse_args(arguments: Sequence[str] | None):
    parser = Parser(prog="train_group_sizes.py", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="data/tiny_model", help="where every run starts (%(default)s)")
    parser.add_argument("--group_sizes", nargs="+", default=["2 4 8 16 32 64 128"], help="G of the runs (%(default)s)")
    parser.add_argument("--budget", type=integer(2), default=128, help="N, continuations a step (%(default)s)")
    parser.add_argument("--steps", type=integer(1), default=100, help="(%(default)s)")
    parser.add_argument("--seeds", type=integer(1), default=3, help="runs per G (%(default)s)")
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="sgd", help="(%(default)s)")
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
    args = parser.parse_args(arguments)
    args.group_sizes = group_sizes(args.group_sizes)
    if any(args.budget % size for size in args.group_sizes):
        parser.error(f"--budget {args.budget}: must be a multiple of every group size {args.group_sizes}")
    if args.n_train + args.n_held_out > MAX_PROBLEMS:
        parser.error(f"--n_train and --n_held_out: together at most {MAX_PROBLEMS} problems exist")
    return args


@torch.inference_mode()
def sample_groups(model, tokenizer, prompts: Sequence[list[int]], u: np.ndarray, law: SamplingLaw):
    """Continuations of many prompts in one batch: u (prompts, G, law.max_new_tokens) → a list of G per prompt.

    The same draws as sampling.sample_continuations one prompt at a time, up to float32 rounding: prompts are padded
    on the left, out of attention's sight.
    """
    size = u.shape[1]
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    output = model(
        input_ids=ids, attention_mask=seen, position_ids=(seen.cumsum(1) - 1).clamp(min=0), use_cache=True, logits_to_keep=1
    )
    cache, seen = output.past_key_values, seen.repeat_interleave(size, dim=0)
    cache.batch_repeat_interleave(size)
    logits = output.logits[:, -1].repeat_interleave(size, dim=0)
    rows, eos = torch.arange(len(logits)), eos_token_ids(model, tokenizer)
    numbers = torch.from_numpy(u.reshape(len(logits), -1))
    drawn = torch.zeros(len(logits), law.max_new_tokens, dtype=torch.int64)
    for position in range(law.max_new_tokens):
        drawn[rows, position] = step = draw_tokens(logits, numbers[rows, position], law)
        going = ~torch.isin(step, torch.tensor(eos))
        if not going.any() or position + 1 == law.max_new_tokens:
            break
        rows, step, seen = rows[going], step[going], seen[going]  # most answers are far shorter than the longest
        cache.reorder_cache(going.nonzero().squeeze(-1))
        seen = torch.cat([seen, torch.ones_like(seen[:, :1])], dim=1)
        logits = model(
            input_ids=step[:, None],
            attention_mask=seen,
            position_ids=seen.sum(1, keepdim=True) - 1,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
    made = [_continuation(tokenizer, row, eos) for row in drawn.tolist()]
    return [made[start : start + size] for start in range(0, len(made), size)]


def _continuation(tokenizer, tokens: list[int], eos: Sequence[int]) -> Continuation:
    end = next((place for place, token in enumerate(tokens) if token in eos), None)
    text = decode_text(tokenizer, tokens[:end])
    return Continuation(tuple(tokens if end is None else tokens[: end + 1]), end is not None, text)


def weighted_log_probs(model, prompts, continuations, weights: np.ndarray, law: SamplingLaw) -> torch.Tensor:
    """sum_i w_i log pi(Y_i | x_i), a scalar with its graph; prompts and continuations (n,), weights (n,).

    The longest beginning that all prompts share runs once. Rows are padded on the right, behind what is scored.
    """
    # at least one token of the prompt stays in the rows: it predicts the first of the continuation
    shared = min(len(os.path.commonprefix(list(prompts))), min(map(len, prompts)) - 1)
    length = max(len(p) + len(c.tokens) for p, c in zip(prompts, continuations)) - shared
    ids = torch.zeros(len(prompts), length, dtype=torch.int64)
    scored = torch.zeros(len(prompts), length, dtype=torch.bool)
    for row, (prompt, continuation) in enumerate(zip(prompts, continuations)):
        start, end = len(prompt) - shared, len(prompt) - shared + len(continuation.tokens)
        ids[row, :end] = torch.tensor([*prompt[shared:], *continuation.tokens])
        scored[row, start:end] = True
    cache = None
    if shared:
        cache = model(input_ids=torch.tensor([prompts[0][:shared]]), use_cache=True).past_key_values
        cache.batch_repeat_interleave(len(prompts))
    logits = model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=bool(shared)).logits
    scored = scored[:, 1:]
    values = log_probs(logits[scored], ids[:, 1:][scored], law)
    return (values * torch.from_numpy(weights).to(values)[scored.nonzero()[:, 0]]).sum()


def draw(model, tokenizer, problems, chosen, size: int, law, stream: str, seed: int, first: int):
    """Groups of ``size`` for the chosen problems → continuations [prompt][i], rewards (prompts, size)."""
    u = np.stack(
        [
            uniforms(seed, stream, int(problem), first + place * size, size, law.max_new_tokens)
            for place, problem in enumerate(chosen)
        ]
    )
    groups = sample_groups(model, tokenizer, [problems[i]["ids"] for i in chosen], u, law)
    score = REWARDS["integer"].score
    return groups, np.array([[score(c.text, problems[i]["ground_truth"]) for c in group] for i, group in zip(chosen, groups)])


def held_out_reward(model, tokenizer, problems, places, samples: int, law, chunk: int = 25) -> float:
    """Mean reward of ``samples`` continuations of each held-out problem; the same random numbers in every run."""
    parts = [
        draw(model, tokenizer, problems, places[start : start + chunk], samples, law, "held_out", 0, 0)[1]
        for start in range(0, len(places), chunk)
    ]
    return float(np.concatenate(parts).mean())


def train(model, tokenizer, problems, group_size: int, seed: int, law, args) -> dict:
    """One run, in place → {G, seed, train_reward per step, silent_share, held_out_reward, seconds}."""
    began, rng = time.perf_counter(), np.random.default_rng([seed, group_size])
    optimizer = OPTIMIZERS[args.optimizer](model.parameters(), lr=args.learning_rate)
    rewards_of_steps, silent = [], []
    for step in tqdm(range(args.steps), desc=f"G={group_size} seed {seed}", disable=args.quiet or not sys.stderr.isatty()):
        chosen = rng.integers(args.n_train, size=args.budget // group_size)
        groups, rewards = draw(
            model, tokenizer, problems, chosen, group_size, law, f"train/{group_size}", seed, step * args.budget
        )
        advantages = group_advantages(rewards, "leave_one_out")
        rewards_of_steps.append(float(rewards.mean()))
        silent.append(float((advantages == 0).all(1).mean()))
        rows = [
            (problems[i]["ids"], c, a)
            for i, group, weights in zip(chosen, groups, advantages)
            for c, a in zip(group, weights)
            if a != 0
        ]
        if rows:
            prompts, continuations, weights = zip(*rows)
            optimizer.zero_grad()
            (-weighted_log_probs(model, prompts, continuations, np.array(weights) / args.budget, law)).backward()
            optimizer.step()
    held_out = range(args.n_train, args.n_train + args.n_held_out)
    return {
        "G": group_size,
        "seed": seed,
        "train_reward": rewards_of_steps,
        "silent_share": float(np.mean(silent)),
        "held_out_reward": held_out_reward(model, tokenizer, problems, held_out, args.eval_samples, law),
        "seconds": round(time.perf_counter() - began, 1),
    }


def summarise(runs: dict, sizes: Sequence[int], budget: int, law: dict | None) -> list[dict]:
    """Rows {G, B, seeds, held_out_reward, standard_error, train_reward, silent_share, predicted_mse}, one per G."""
    predicted = {row["G"]: row["mse"] for row in budget_table(law, budget)} if law else {}
    rows = []
    for size in sizes:
        mine = [entry for entry in runs.values() if entry["G"] == size]
        rewards = np.array([entry["held_out_reward"] for entry in mine])
        rows.append(
            {
                "G": size,
                "B": budget // size,
                "seeds": len(mine),
                "held_out_reward": float(rewards.mean()),
                "standard_error": float(rewards.std(ddof=1) / len(mine) ** 0.5) if len(mine) > 1 else None,
                "train_reward": float(np.mean([entry["train_reward"] for entry in mine])),
                "silent_share": float(np.mean([entry["silent_share"] for entry in mine])),
                "predicted_mse": predicted.get(size),
            }
        )
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


def load_law(path: str, settings: dict) -> dict:
    """The group_size_law of a results JSON; says so where it was measured under another law or on another model."""
    results = load_results(path)
    check_law(results.get("group_size_law"), path)
    measured = results.get("law") or {}
    other = [
        name
        for name in ("temperature", "top_p", "max_new_tokens", "model_fingerprint")
        if name in measured and measured[name] != settings[name]
    ]
    if other:
        print(f"note: {path} was measured with another {', '.join(other)} than these runs", file=sys.stderr)
    return results["group_size_law"]


def load_runs(path: Path, settings: dict, overwrite: bool) -> dict:
    """What ``--out`` holds already: {settings, start, runs}. Raises UserError where it is of other settings."""
    path.parent.mkdir(parents=True, exist_ok=True)
    empty = {"settings": settings, "start": None, "runs": {}}
    if overwrite or not path.exists():
        return empty
    try:
        saved = json.loads(path.read_text())
        other = [name for name, value in settings.items() if saved["settings"].get(name) != value]
        kept = {"settings": settings, "start": saved["start"], "runs": dict(saved["runs"])}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"{path}: is not a file of train_group_sizes.py; give another --out, or --overwrite") from None
    if other:
        raise UserError(f"{path}: holds runs with another {', '.join(other)}; give another --out, or --overwrite")
    return kept


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_args(arguments)
    torch.set_num_threads(args.threads)
    law = SamplingLaw(args.temperature, args.top_p, 0, args.max_new_tokens)
    tokenizer = load_tokenizer(args.model, None)
    start = load_model(args.model, None, torch.device("cpu"), torch.float32)
    problems = make_problems(args.n_train + args.n_held_out, seed=0)
    np.random.default_rng(0).shuffle(problems)  # the easy kinds run out first: both parts get as many of them
    for problem in problems:
        problem["ids"] = format_prompt(tokenizer, problem["prompt"])
    longest = max((problem["ids"] for problem in problems), key=len)
    check_prompt_length(model_limits(args.model, None)[0], longest, args.max_new_tokens)
    same = (
        "budget",
        "steps",
        "optimizer",
        "learning_rate",
        "n_train",
        "n_held_out",
        "eval_samples",
        "temperature",
        "top_p",
        "max_new_tokens",
    )
    settings = {**{name: getattr(args, name) for name in same}, "model_fingerprint": fingerprint(start)}
    predicted = load_law(args.results, settings) if args.results else None
    saved = load_runs(Path(args.out), settings, args.overwrite)
    if saved["start"] is None:
        held_out = range(args.n_train, args.n_train + args.n_held_out)
        saved["start"] = held_out_reward(start, tokenizer, problems, held_out, args.eval_samples, law)
    for seed in range(args.seeds):
        for size in args.group_sizes:
            if f"G{size}_seed{seed}" not in saved["runs"]:
                entry = train(copy.deepcopy(start), tokenizer, problems, size, seed, law, args)
                saved["runs"][f"G{size}_seed{seed}"] = entry
                write_json(args.out, saved)
    rows = summarise(saved["runs"], args.group_sizes, args.budget, predicted)
    write_json(args.out, {**saved, "summary": rows})
    print(table(rows, saved["start"]))


if __name__ == "__main__":
    run(main)
