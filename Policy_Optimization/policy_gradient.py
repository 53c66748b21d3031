"""One training run of train_group_sizes.py: plain policy gradient on groups of G continuations.

Every step draws B = N/G problems and G continuations of each, and follows the leave-one-out policy gradient
(1/N) sum A_i grad log pi_i. No KL term and no clipping of ratios: every sample is used for one update.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

from Gradient_evaluation.sampling.generate import sample_groups
from Gradient_evaluation.sampling.law import SamplingLaw, uniforms
from Gradient_evaluation.sampling.log_probs import log_probs
from Gradient_evaluation.stats.advantages import group_advantages
from Gradient_evaluation.utils import REWARDS

if TYPE_CHECKING:
    from Policy_Optimization.train_group_sizes import Settings

OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
HELD_OUT_AT_ONCE = 25  # problems


class Task(NamedTuple):
    """What is asked and how it is answered: problems {"ids", "ground_truth"}, their tokenizer and the sampling law."""

    problems: Sequence[dict[str, Any]]
    tokenizer: Any
    law: SamplingLaw


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


def draw(model, task: Task, chosen: Sequence[int], size: int, stream: tuple[int, str, int]):
    """Groups of ``size`` for the chosen problems → continuations [problem][i], rewards (problems, size).

    stream: seed and name of the random numbers (see ``uniforms``), and the index of the first continuation.
    """
    (seed, name, first), length = stream, task.law.max_new_tokens
    u = [uniforms(seed, name, int(number), first + index * size, size, length) for index, number in enumerate(chosen)]
    asked, score = [task.problems[number] for number in chosen], REWARDS["integer"].score
    groups = sample_groups(model, task.tokenizer, [problem["ids"] for problem in asked], np.stack(u), task.law)
    rewards = [[score(c.text, problem["ground_truth"]) for c in group] for problem, group in zip(asked, groups)]
    return groups, np.array(rewards)


def held_out_reward(model, task: Task, settings: Settings) -> float:
    """Mean reward of the continuations of the held-out problems; the same random numbers in every run."""
    numbers = range(settings.n_train, settings.n_train + settings.n_held_out)
    parts = [
        draw(model, task, numbers[start : start + HELD_OUT_AT_ONCE], settings.eval_samples, (0, "held_out", 0))[1]
        for start in range(0, len(numbers), HELD_OUT_AT_ONCE)
    ]
    return float(np.concatenate(parts).mean())


def train(model, task: Task, group_size: int, seed: int, settings: Settings) -> dict:
    """One run, in place → {G, seed, train_reward per step, silent_share, held_out_reward, seconds}."""
    began, rng, budget = time.perf_counter(), np.random.default_rng([seed, group_size]), settings.budget
    optimizer = OPTIMIZERS[settings.optimizer](model.parameters(), lr=settings.learning_rate)
    rewards_of_steps, silent = [], []
    hidden = settings.quiet or not sys.stderr.isatty()
    for step in tqdm(range(settings.steps), desc=f"G={group_size} seed {seed}", disable=hidden):
        chosen = rng.integers(settings.n_train, size=budget // group_size)
        groups, rewards = draw(model, task, chosen, group_size, (seed, f"train/{group_size}", step * budget))
        advantages = group_advantages(rewards, "leave_one_out")
        rewards_of_steps.append(float(rewards.mean()))
        silent.append(float((advantages == 0).all(1).mean()))
        rows = [
            (task.problems[number]["ids"], continuation, advantage)
            for number, group, weights in zip(chosen, groups, advantages)
            for continuation, advantage in zip(group, weights)
            if advantage != 0
        ]
        if rows:
            prompts, continuations, weights = zip(*rows)
            optimizer.zero_grad()
            (-weighted_log_probs(model, prompts, continuations, np.array(weights) / budget, task.law)).backward()
            optimizer.step()
    return {
        "G": group_size,
        "seed": seed,
        "train_reward": rewards_of_steps,
        "silent_share": float(np.mean(silent)),
        "held_out_reward": held_out_reward(model, task, settings),
        "seconds": round(time.perf_counter() - began, 1),
    }
