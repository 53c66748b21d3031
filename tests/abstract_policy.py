"""A policy of a few outcomes, all of whose moments are exact sums: the ground truth of the estimators' tests.

And short ways from records, or from moments per prompt, to results.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from Gradient_evaluation.stats.blocks import PairMoments
from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.group_size.law import group_size_law
from Gradient_evaluation.stats.group_size.sketch_pairs import Sketches
from Gradient_evaluation.stats.prompts import PromptMoments, reduce_prompts
from Gradient_evaluation.stats.silent_groups import RewardCounts
from Gradient_evaluation.stats.summary import summarise


class Policy(NamedTuple):
    """``probs`` (n,), ``scores`` (n, d), ``rewards`` (n,), ``lengths`` (n,) of the n possible continuations."""

    probs: np.ndarray
    scores: np.ndarray
    rewards: np.ndarray
    lengths: np.ndarray

    @property
    def value(self) -> float:
        return float(self.probs @ self.rewards)

    @property
    def theta(self) -> np.ndarray:
        return self.probs * self.rewards @ self.scores

    def tuples(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """All ordered draws of ``size`` outcomes: indices (n^size, size) and their probabilities (n^size,)."""
        index = np.array(list(product(range(len(self.probs)), repeat=size)))
        return index, self.probs[index].prod(-1)

    def blocks(self, size: int):
        """All blocks: gram (n^size, size, size), rewards and lengths (n^size, size), probabilities (n^size,)."""
        index, chance = self.tuples(size)
        gram = self.scores @ self.scores.T
        return gram[index[:, :, None], index[:, None, :]], self.rewards[index], self.lengths[index], chance

    def moments(self, estimator, size: int) -> tuple[np.ndarray, float]:
        """Exact mean (d,) and covariance trace of ``estimator(scores (.., K, d), rewards, lengths) -> (.., d)``."""
        index, chance = self.tuples(size)
        values = estimator(self.scores[index], self.rewards[index], self.lengths[index])
        mean = chance @ values
        return mean, float(chance @ ((values - mean) ** 2).sum(-1))


def random_policy(seed: int, n_outcomes: int = 6, centred: bool = True, binary: bool = True) -> Policy:
    """Random probabilities, scores (of mean 0 with ``centred``) and rewards that are not all the same."""
    generator = np.random.default_rng(seed)
    probs = generator.dirichlet(np.full(n_outcomes, 2.0))
    scores = generator.normal(size=(n_outcomes, generator.integers(3, 6))) * generator.uniform(0.2, 3, (n_outcomes, 1))
    if centred:
        scores = scores - probs @ scores
    else:
        scores = scores + 1.5
    rewards = generator.permutation(np.arange(n_outcomes) % 2).astype(float)
    if not binary:
        rewards = generator.normal(size=n_outcomes) * 2 - 0.7
    return Policy(probs, scores, rewards, generator.integers(1, 9, n_outcomes))


def sample_block(policy: Policy, size: int, generator: np.random.Generator):
    """One block as a record holds it: (gram (B, B), rewards (B,), lengths (B,) int)."""
    index = generator.choice(len(policy.probs), size=size, p=policy.probs)
    return policy.scores[index] @ policy.scores[index].T, policy.rewards[index], policy.lengths[index]


def summary_of(records, K_list, n_bootstrap=2000, names=()) -> dict:
    """``summarise`` of Gram records, or of PromptMoments."""
    prompts = records if isinstance(records, PromptMoments) else reduce_prompts(records, K_list, names)
    return summarise(prompts, K_list, PromptBootstrap(len(prompts), n_bootstrap), names)


def make_records(n_prompts=4, sizes=(5, 7), seed=0, **kinds):
    """Records of random policies with blocks of ``sizes``; ``kinds``: of random_policy."""
    generator = np.random.default_rng(seed)
    policies = [random_policy(seed + number, **kinds) for number in range(n_prompts)]
    return [
        SimpleNamespace(oracle_value=policy.value, blocks=[sample_block(policy, size, generator) for size in sizes])
        for policy in policies
    ]


def leave_one_out(scores, rewards, lengths):
    """GRPO's estimate: the mean score times the reward less the mean of the others' rewards."""
    size = rewards.shape[-1]
    others = (rewards.sum(-1, keepdims=True) - rewards) / (size - 1)
    return ((rewards - others)[..., None] * scores).mean(-2)


def exact_pair_moments(policy) -> PairMoments:
    """zeta's ingredients as sums over all pairs of outcomes, straight from the kernel's definition."""
    scores, rewards = policy.scores, policy.rewards
    kernel = (scores[:, None] - scores[None]) * (rewards[:, None] - rewards[None])[..., None] / 2
    chance = policy.probs[:, None] * policy.probs[None]
    given_first = np.einsum("j,ijd->id", policy.probs, kernel)
    mean = policy.probs @ given_first
    return PairMoments((chance * (kernel**2).sum(-1)).sum(), policy.probs @ (given_first**2).sum(-1), float(mean @ mean))


def coin(n: int) -> RewardCounts:
    """As many rewards of 0 as of 1 among n continuations."""
    return RewardCounts(np.array([0, 1]), np.array([n // 2, n // 2]), np.ones(2))


def prompts_with(theta_sq, zeta1, zeta2, outcomes=None, theta_sq_noise=np.nan):
    """What ``group_size_law`` reads of PromptMoments, from (n,) moments; by default no noise is known."""
    theta_sq, zeta1, zeta2 = (np.asarray(part, dtype=np.float64) for part in (theta_sq, zeta1, zeta2))
    n = len(theta_sq)
    return SimpleNamespace(
        pairs=PairMoments(zeta2 + theta_sq, zeta1 + theta_sq, theta_sq),
        outcomes=[coin(512)] * n if outcomes is None else outcomes,
        theta_sq_noise=np.full(n, theta_sq_noise),
    )


def group_size_law_of(case, n_bootstrap=50, seed=0, layout=None, dim=None) -> dict:
    """The group-size law of (theta_sq, zeta1, zeta2, gradients or None) per prompt, and perhaps its outcomes."""
    theta_sq, zeta1, zeta2, gradients, *outcomes = case
    sketches = None if gradients is None else Sketches(gradients, layout, dim)
    bootstrap = PromptBootstrap(len(theta_sq), n_bootstrap, seed)
    return group_size_law(prompts_with(theta_sq, zeta1, zeta2, *outcomes), sketches, bootstrap)


def plain_case(n=40, c1=1.0, c2=1.0, c3=9.0, spread=0.1, seed=0, mean=0.0):
    """Prompts with given constants and a spread between prompts; whole gradients in 3 dimensions."""
    generator = np.random.default_rng(seed)
    noise = spread * generator.normal(size=(4, n))
    gradients = mean + generator.normal(size=(n, 3)) * 0.05
    theta_sq = c1 + 3 * mean**2 + noise[0]
    return theta_sq, c2 / 4 + noise[1], (c3 + c2) / 2 + noise[2], gradients, [coin(512)] * n


def heavy_tailed(generator, kind: str, spread: float, n: int) -> np.ndarray:
    """(n,) positive values of mean 1 whose standard deviation is ``spread``."""
    if kind == "gamma":
        return generator.gamma(spread**-2, spread**2, n)
    width = np.sqrt(np.log1p(spread**2))
    return np.exp(width * generator.standard_normal(n) - width**2 / 2)


def two_levels(generator, n: int, spread=0.5, common=0.5, noise=2.0, c3=30.0, dim=40):
    """theta_sq, zeta1, zeta2, gradients of n prompts, and the true constants.

    theta(x) = s (common e + u) with a lognormal s and a random u of mean square 1; its estimate has noise of mean
    square s^2 noise^2; ||theta(x)||^2 is estimated from two halves, so without bias.
    """
    scale = heavy_tailed(generator, "lognormal", spread, n)
    shared = common * np.eye(dim)[0]
    theta = scale[:, None] * (shared + generator.standard_normal((n, dim)) / np.sqrt(dim))
    halves = theta + scale[:, None] * noise * np.sqrt(2 / dim) * generator.standard_normal((2, n, dim))
    c2_x, c3_x = (scale**2 * generator.gamma(4, 0.25 * mean, n) for mean in (1.0, c3))
    square = 1 + spread**2
    truth = {"c1": square * (common**2 + 1) - common**2, "c2": square, "c3": c3 * square}
    truth["G_star"] = 1 + np.sqrt(truth["c3"] / truth["c1"])
    return ((halves[0] * halves[1]).sum(-1), c2_x / 4, (c3_x + c2_x) / 2, halves.mean(0)), truth
