"""What narrows an interval for its cost? Continuations per prompt, control variates, strata, common random numbers.

    make demo
    OMP_NUM_THREADS=1 .venv/bin/python tests/bench_precision.py --crn    # the tables of docs/precision.md; minutes

Designs with fewer continuations are parts of the demo's blocks of 64. --costs has the seconds of a prompt and of a
continuation, which a run with --until prints. Not collected by pytest.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.make_arithmetic import make_problems
from Gradient_evaluation.cli import Parser, integer, run
from Gradient_evaluation.gram import ScoreGram
from Gradient_evaluation.runs.inputs.dataset import make_row
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.sampling.generate import sample_continuations
from Gradient_evaluation.sampling.law import SamplingLaw, uniforms
from Gradient_evaluation.sampling.log_probs import log_probs
from Gradient_evaluation.stats.blocks import pair_moments
from Gradient_evaluation.stats.group_size.sketch_pairs import pair_mean, pair_products
from Gradient_evaluation.utils import format_prompt, integer_reward

ROOT = Path(__file__).resolve().parents[1]
LAW, K = SamplingLaw(top_p=0.95), 8
SIZES, PARTS = (4, 8, 16, 32, 64, 256), 24
PERTURBED = 0.02  # of the second checkpoint: each weight times 1 + this times a normal number


def moments(gram: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """(4,): ||theta||^2, 2 zeta2 - 4 zeta1, GRPO's trace at K, mean reward of some continuations of a prompt."""
    found = pair_moments(gram, rewards)
    c3 = 2 * found.zeta2 - 4 * found.zeta1
    return np.array([found.theta_sq, c3, 4 * found.zeta1 / K + c3 / (K * (K - 1)), rewards.mean()])


def parts_of(record, n: int, generator) -> np.ndarray:
    """(PARTS, 4) ``moments`` of n continuations of one block, drawn PARTS times; (1, 4) of all where no block has n."""
    if n > min(record.sizes):
        return np.mean([moments(gram, rewards) for gram, rewards, _ in record.blocks], axis=0)[None]
    found = []
    for number in range(PARTS):
        gram, rewards, _ = record.blocks[number % len(record.blocks)]
        kept = generator.permutation(len(rewards))[:n]
        found.append(moments(gram[np.ix_(kept, kept)], rewards[kept]))
    return np.array(found)


def shares(several: list[np.ndarray], common: np.ndarray, means: np.ndarray) -> dict[str, np.ndarray]:
    """{quantity: (prompts, parts) shares to first order, relative to it}; means: (4,) of c1, c3, the trace, the reward."""
    table = np.array(several)
    c1, c3 = (table[:, :, 0] - common[:, None]) / means[0], table[:, :, 1] / means[1]
    root = np.sqrt(means[1] / means[0])
    return {"c1": c1, "G*": root / (1 + root) / 2 * (c3 - c1), "GRPO's trace": table[:, :, 2] / means[2]}


def designs(records, common: np.ndarray, costs: tuple[float, float]) -> None:
    """Half widths at the cost of 100 prompts with 16 continuations each."""
    generator = np.random.default_rng(0)
    tables = {n: [parts_of(record, n, generator) for record in records] for n in SIZES}
    means = np.array(tables[SIZES[-1]])[:, 0].mean(0) - np.array([common.mean(), 0, 0, 0])
    budget = 100 * (costs[0] + 16 * costs[1])
    print(f"half width over the value, {budget:.0f} s at {costs[0]:g} s a prompt and {costs[1]:g} s a continuation")
    print("| continuations | prompts | c1 | G* | GRPO's trace |\n|---|---|---|---|---|")
    for n, table in tables.items():
        T = budget / (costs[0] + n * costs[1])
        widths = [1.96 * np.sqrt(each.var(axis=0, ddof=1).mean() / T) for each in shares(table, common, means).values()]
        print(f"| {n} | {T:.0f} | " + " | ".join(f"{width:.2f}" for width in widths) + " |")
    values = np.array([record.oracle_value for record in records])
    print(f"\nnarrowing, {len(records)} prompts: regression on V, V (1 - V); four strata of V; the reward's mean less V")
    print("| continuations | quantity | regression | strata | reward |\n|---|---|---|---|---|")
    for n in (16, 256):
        rewards = np.array(tables[n])[:, :, 3] - values[:, None]
        for name, each in shares(tables[n], common, means).items():
            found = [narrowing(column, design(values)) for column in each.T]
            strata = [narrowing(column, strata_of(values)) for column in each.T]
            own = [narrowing(column, np.stack([np.ones_like(z), z], 1)) for column, z in zip(each.T, rewards.T)]
            print(f"| {n} | {name} | {np.mean(found):.0%} | {np.mean(strata):.0%} | {np.mean(own):.0%} |")


def design(values: np.ndarray) -> np.ndarray:
    """(prompts, 3): 1, V and V (1 - V), whose means over the whole table are known."""
    return np.stack([np.ones_like(values), values, values * (1 - values)], axis=1)


def strata_of(values: np.ndarray) -> np.ndarray:
    """(prompts, 4): indicators of the quarters by V."""
    quarter = np.argsort(np.argsort(values)) * 4 // len(values)
    return np.eye(4)[quarter]


def narrowing(shares: np.ndarray, columns: np.ndarray) -> float:
    """1 - the root of the variance that is left over the variance, with the degrees of freedom of both. Below 0: wider."""
    rest = shares - columns @ np.linalg.lstsq(columns, shares, rcond=None)[0]
    left = (rest**2).sum() / (len(shares) - columns.shape[1])
    return 1 - float(np.sqrt(left / shares.var(ddof=1)))


def checkpoint(perturbed: float):
    """(the shipped model with each weight changed by so much, its tokenizer)."""
    folder = ROOT / "data" / "tiny_model"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + perturbed * torch.randn(parameter.shape, generator=generator)
    return model, AutoTokenizer.from_pretrained(folder)


def measured(policy, rows, n: int, seed: int) -> np.ndarray:
    """(rows, 4) ``moments`` of n continuations of each."""
    found = []
    with ScoreGram(policy[0], partial(log_probs, law=LAW)) as gram:
        for row in rows:
            ids = format_prompt(policy[1], row.prompt)
            u = uniforms(seed, "tracecov", row.prompt_id, 0, n, LAW.max_new_tokens)
            drawn = sample_continuations(*policy, ids, u, LAW, n)
            rewards = np.array([integer_reward(each.text, row.ground_truth) for each in drawn])
            found.append(moments(gram.block(ids, [each.tokens for each in drawn]).gram, rewards))
    return np.array(found)


def common_random_numbers(n_prompts: int, n: int) -> None:
    """The difference of two checkpoints: its standard deviation over prompts, in three designs."""
    rows = [make_row("problem", problem) for problem in make_problems(n_prompts, 0)]
    first = measured(checkpoint(0.0), rows, n, 0)
    same, new = (measured(checkpoint(PERTURBED), rows, n, seed) for seed in (0, 1))
    print(f"\ntwo checkpoints, {n_prompts} prompts of {n}: spread of a prompt's difference, over that of other prompts")
    print("| quantity | same prompts, same random numbers | same prompts, other random numbers |\n|---|---|---|")
    for index, name in enumerate(("the square of theta", "c3", "GRPO's trace", "mean reward")):
        apart = np.sqrt(first[:, index].var(ddof=1) + new[:, index].var(ddof=1))
        ratios = [np.std(other[:, index] - first[:, index], ddof=1) / apart for other in (same, new)]
        print(f"| {name} | {ratios[0]:.2f} | {ratios[1]:.2f} |", flush=True)


def main() -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--grams", type=Path, default=ROOT / "outputs" / "demo" / "grams")
    parser.add_argument("--costs", type=float, nargs=2, default=[0.24, 0.048], metavar="SECONDS")
    parser.add_argument("--crn", type=integer(4), nargs="?", const=40, help="also two checkpoints, with so many prompts (40)")
    args = parser.parse_args()
    records = list(gram_store.load_all(args.grams))
    products = pair_products(np.stack([record.sketch[0] for record in records]))
    common = 2 * products.sum(1) / (len(products) - 1) - pair_mean(products)  # of a prompt's share in c1
    designs(records, common, tuple(args.costs))
    if args.crn:
        common_random_numbers(args.crn, 16)


if __name__ == "__main__":
    run(main)
