"""Estimators whose loss has a KL term: a penalty beta on the divergence from a reference policy.

Trainers add beta k3_t to the loss of each token, k3 = rho - log rho - 1 with rho = pi_ref / pi (Schulman 2020). Its gradient is
w_t grad log pi_t with w = 1 - rho. TRL by default multiplies k3 by the ratio pi / pi_old, which is 1 but has a gradient. Then
w = 1 - rho + k3 = -log rho, which is also the gradient of k2 = (log rho)^2 / 2 and of VERL's k3+. So a continuation adds
-beta r_i to the group's estimate, over the same lengths as its score, with r_i = sum_t w_t grad log pi_t. r is a token-weighted
score: a block has the Gram (2B, 2B) of g_1 ... g_B, r_1 ... r_B. Groups of equal rewards are not silent any more.

GRPO with a KL term, (1/K) sum_i (A_i g_i - beta r_i) with the leave-one-out A_i, is a U-statistic of order 2 like GRPO. Its
kernel is h_ij - beta (r_i + r_j) / 2, so its group-size law has the same form. Other losses are measured on resampled groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from Gradient_evaluation.stats.advantages import group_advantages
from Gradient_evaluation.stats.blocks import GROUPS_PER_BLOCK, PairMoments, pair_coefficients, partitions
from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.clip import kind_of
from Gradient_evaluation.stats.estimators import ESTIMATORS, batch_factor
from Gradient_evaluation.stats.missing import Missing
from Gradient_evaluation.stats.moments import batch_std
from Gradient_evaluation.stats.prompts import PromptMoments


def pair_moments_with_kl(gram: np.ndarray, rewards: np.ndarray, beta: float) -> PairMoments:
    """``blocks.pair_moments`` of the kernel h_ij - beta (r_i + r_j) / 2: gram (..., 2B, 2B) of g and r, rewards (..., B).

    theta_sq is then the squared norm of the whole mean gradient, E[g Z] - beta E[r].
    """
    size = rewards.shape[-1]
    rewards = rewards - rewards.mean(-1, keepdims=True)
    eye = np.eye(size)
    # H_i = sum over j != i of the kernel: its coefficients on the g and on the r
    on_scores = pair_coefficients(rewards, np.ones_like(rewards))
    on_kl = np.broadcast_to(-beta / 2 * (1 + (size - 2) * eye), on_scores.shape)
    both = np.concatenate([on_scores, on_kl], axis=-1)
    difference = rewards[..., :, None] - rewards[..., None, :]
    scores, cross, kl = gram[..., :size, :size], gram[..., :size, size:], gram[..., size:, size:]
    square, square_kl = (np.einsum("...ii->...i", part) for part in (scores, kl))
    apart = square[..., :, None] + square[..., None, :] - 2 * scores
    own = np.einsum("...ii->...i", cross)
    # <g_i - g_j, r_i + r_j>
    mixed = own[..., :, None] + cross - np.swapaxes(cross, -1, -2) - own[..., None, :]
    together = square_kl[..., :, None] + square_kl[..., None, :] + 2 * kl
    norms = (difference**2 * apart - 2 * beta * difference * mixed + beta**2 * together) / 4
    pairs = (norms * (1 - eye)).sum((-2, -1))
    chains = ((both @ gram) * both).sum((-2, -1)) - pairs
    total = both.sum(-2)
    disjoint = np.einsum("...i,...ij,...j->...", total, gram, total) - 4 * chains - 2 * pairs
    ordered = size * (size - 1)
    return PairMoments(pairs / ordered, chains / (ordered * (size - 2)), disjoint / (ordered * (size - 2) * (size - 3)))


def kl_weights(kind: str, lengths: np.ndarray) -> np.ndarray:
    """(..., K): the weights u of a kind of advantages in -(beta / K) sum_i u_i r_i; lengths (..., K)."""
    per = kind.partition("/")[2]
    if not per:
        return np.ones(np.shape(lengths))
    return 1 / (lengths if per == "length" else np.broadcast_to(np.mean(lengths, -1, keepdims=True), np.shape(lengths)))


def group_moments_with_kl(block: tuple, kind: str, group_size: int, beta: float, std: float = 1.0) -> tuple[float, float]:
    """(E||ghat||^2, ||E ghat||^2) of groups resampled from one block; NaN where it is too small.

    block: gram (2B, 2B), rewards and lengths (B,); std: what advantages are divided by, and the KL term is not.
    """
    gram, rewards, lengths = block
    size = len(rewards)
    if group_size > size:
        return np.nan, np.nan
    members = partitions(size, group_size, GROUPS_PER_BLOCK)
    values = group_advantages(rewards[members], kind, lengths[members]) / std
    weights = np.zeros((*members.shape[:2], 2 * size))
    np.put_along_axis(weights, members, values / group_size, axis=-1)
    np.put_along_axis(weights, members + size, -beta * kl_weights(kind, lengths[members]) / group_size, axis=-1)
    squares = ((weights @ gram) * weights).sum(-1)
    if (count := members.shape[1]) < 2:
        return float(squares.mean()), np.nan
    together = weights.sum(1)
    whole = ((together @ gram) * together).sum(-1)
    return float(squares.mean()), float(((whole - squares.sum(-1)) / (count * (count - 1))).mean())


def reduce_with_kl(
    records: Iterable, prompts: PromptMoments, names: Sequence[str], sizes: Sequence[int], beta: float
) -> tuple[PromptMoments, dict[tuple[str, int], np.ndarray]]:
    """One pass over records: the prompts with GRPO's pair moments with the KL term, and {(name, G): (n, 2) of E||ghat||^2 and
    ||E ghat||^2}, averaged over blocks, NaN where blocks are too small.

    A record has ``kl_blocks``: (gram (2B, 2B), rewards (B,), lengths (B,)) of each block.
    """
    std = batch_std(prompts)
    pairs, noise, found = [], [], {(name, size): [] for name in names for size in sizes}
    for record in records:
        blocks = record.kl_blocks
        each = np.array([pair_moments_with_kl(gram, rewards, beta) for gram, rewards, _ in blocks])
        pairs.append(each.mean(0))
        noise.append(np.var(each[:, 2], ddof=1) / len(each) if len(each) > 1 else np.nan)
        for (name, size), rows in found.items():
            divisor = std if ESTIMATORS[name].batch_std else 1.0
            rows.append(np.mean([group_moments_with_kl(block, kind_of(name), size, beta, divisor) for block in blocks], axis=0))
    factors = {name: batch_factor(prompts, name) * (std if ESTIMATORS[name].batch_std else 1.0) for name in names}
    moments = {(name, size): np.array(rows) * factors[name] ** 2 for (name, size), rows in found.items()}
    return replace(prompts, pairs=PairMoments(*np.array(pairs).T), theta_sq_noise=np.array(noise)), moments


def summary_with_kl(
    moments: Mapping[tuple[str, int], np.ndarray], names: Sequence[str], sizes: Sequence[int], bootstrap: PromptBootstrap
) -> dict:
    """{name: trace_cov, signal_to_noise and their _ci95, lists over ``sizes``}; see ``missing.with_reasons``."""
    result = {}
    for name in names:
        row: dict[str, list] = {key: [] for key in ("trace_cov", "trace_cov_ci95", "signal_to_noise", "signal_to_noise_ci95")}
        for size in sizes:
            square, disjoint = moments[name, size].T
            why = Missing(f"K={size} needs a block of at least {2 * size} continuations of every prompt")
            cells = (why,) * 4
            if np.isfinite(disjoint).all():
                trace = bootstrap.mean(square - disjoint)
                ratio = bootstrap.ratio(disjoint, square - disjoint, f"trace(Cov) at K={size}")
                cells = tuple(part() for each in (trace, ratio) for part in (each.value_or_missing, each.interval_or_missing))
            for key, cell in zip(row, cells):
                row[key].append(cell)
        result[name] = row
    return result
