"""Of which sampling law are these tokens? Log-probs, surprise and cut-off of tokens under one law, and the law they are of.

scorer(tokens, law)            log pi of every token under a law
surprise(tokens, law, ends)    -log pi less what the law expects of it
outside(tokens, law)           tokens that the law cannot have drawn
nearer(several, law)           another law that the sampler's log-probs are clearly nearer to
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from Gradient_evaluation.sampling.law import SLICE, SamplingLaw, divided, kept_tokens
from Gradient_evaluation.sampling.log_probs import log_probs

EDGE = 0.02  # probability by which rounding may move the edge of a nucleus
COMMON_TOP_P, COMMON_TOP_K = (0.99, 0.98, 0.95, 0.9, 0.8, 0.7, 0.5), (20, 40, 50, 100)
OTHER_TEMPERATURE = 1.05  # a fitted temperature is another one from this factor on
AS_NEAR = 1.2  # a simpler law is taken when it is off by at most so many times what the nearest is
CLEARLY, SHARE = 4.0, 0.7  # standard errors of a sign test, and the share of the difference that a nearer law may leave
SAME = 1e-5  # a difference per token that is none


class Tokens(NamedTuple):
    """The tokens of one continuation that count, in the scoring pass.

    logits (n, vocabulary): raw; tokens (n,) int64; log_probs (n,) float64 of the sampler, None without; ended: whether the
    last is an end of sequence.
    """

    logits: torch.Tensor
    tokens: torch.Tensor
    log_probs: np.ndarray | None
    ended: bool


def scorer(each: Tokens, law: SamplingLaw) -> np.ndarray:
    """log pi of every token under ``law`` (n,) float64."""
    return log_probs(each.logits, each.tokens, law).double().cpu().numpy()


def surprise(each: Tokens, law: SamplingLaw, ends: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(-log pi less the entropy, the variance of log pi, the probability of an end of sequence), each (n,) float64.

    ends: ids of the ends of sequence. By position, under what top_k and top_p leave and the token itself. Under the law
    that drew the tokens the first has mean 0 whatever came before, and the second is its variance.
    """
    found, step = [], max(1, SLICE // (16 * each.logits.shape[-1]))
    for logits, tokens in zip(each.logits.split(step), each.tokens.split(step)):
        logits = divided(logits, law)
        if (kept := kept_tokens(logits, law)) is not None:
            logits = logits.masked_fill(~kept.scatter_(-1, tokens.unsqueeze(-1), True), -torch.inf)
        log_p = logits.log_softmax(-1)
        p, chosen = log_p.exp(), log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        log_p = log_p.masked_fill(p == 0, 0.0)  # what is not left adds nothing
        mean = (p * log_p).sum(-1)
        variance = (p * (log_p - mean.unsqueeze(-1)) ** 2).sum(-1)
        found.append(torch.stack([mean - chosen, variance, p[:, list(ends)].sum(-1)]).double().cpu().numpy())
    return tuple(np.concatenate(found, axis=1))


def standardised(several: Sequence[Tokens], law: SamplingLaw) -> float:
    """The surprise of some tokens in its standard errors."""
    parts = [surprise(each, law) for each in several]
    total, variance = (sum(float(part[i].sum()) for part in parts) for i in (0, 1))
    return total / math.sqrt(max(variance, 1e-12))


def outside(each: Tokens, law: SamplingLaw) -> int:
    """How many tokens neither top_k nor top_p can have left, whatever rounding did to the edge."""
    loose = replace(law, top_p=min(1.0, law.top_p + EDGE), top_k=law.top_k + law.top_k // 4 + 2 if law.top_k else 0)
    kept = kept_tokens(divided(each.logits, loose), loose)
    return 0 if kept is None else int((~kept.gather(-1, each.tokens.unsqueeze(-1))).sum())


class Nearer(NamedTuple):
    """law: another one; left: the mean |difference| per token from it; clear: whether that is no accident."""

    law: SamplingLaw
    left: float
    clear: bool


def nearer(several: Sequence[Tokens], law: SamplingLaw) -> Nearer:
    """The law, other than ``law``, that the sampler's log-probs are nearest to.

    Tried are temperature 1 and this one without top_k and top_p, the temperature that fits, and common top_p and top_k. It is
    clear when it leaves less than SHARE of the difference from ``law``, and is nearer on so many more tokens than it is farther
    that a sign test gives CLEARLY standard errors: the edge of a nucleus that rounding moves is not taken for another law.
    """

    def sizes(other: SamplingLaw) -> np.ndarray:
        return np.concatenate([np.abs(scorer(each, other) - each.log_probs) for each in several])

    whole, here = replace(law, top_p=1.0, top_k=0), sizes(law)
    fits = [fitted(lambda other: float(sizes(other).mean()), each) for each in (whole, law)]
    fits = [each for each in fits if abs(math.log(each.temperature / law.temperature)) > math.log(OTHER_TEMPERATURE)]
    others = [replace(whole, temperature=1.0), whole, *fits]
    for temperature in dict.fromkeys((1.0, law.temperature, *(each.temperature for each in fits))):
        others += [replace(whole, temperature=temperature, top_p=top_p) for top_p in COMMON_TOP_P]
        others += [replace(whole, temperature=temperature, top_k=top_k) for top_k in COMMON_TOP_K]
    found = [(other, sizes(other)) for other in others if other != law]
    least = min(float(each.mean()) for _, each in found)
    other, left = next((other, each) for other, each in found if each.mean() <= AS_NEAR * least + 1e-6)
    gain = np.sign(np.where(np.abs(here - left) > SAME, here - left, 0.0))
    clear = gain.sum() > CLEARLY * math.sqrt(np.abs(gain).sum()) and left.mean() < SHARE * here.mean()
    return Nearer(other, float(left.mean()), bool(clear))


def likeliest(several: Sequence[Tokens], law: SamplingLaw) -> SamplingLaw:
    """The law with the temperature at which the tokens are likeliest."""
    return fitted(lambda other: -sum(float(scorer(each, other).sum()) for each in several), law)


def fitted(cost: Callable[[SamplingLaw], float], law: SamplingLaw) -> SamplingLaw:
    """``law`` at the temperature between 0.05 and 20 of the least cost: the best of a grid, then golden-section search."""

    def at(x: float) -> float:
        return cost(replace(law, temperature=math.exp(x)))

    grid = np.linspace(math.log(0.05), math.log(20), 25)
    middle = int(np.argmin([at(x) for x in grid]))
    low, high = grid[max(middle - 1, 0)], grid[min(middle + 1, len(grid) - 1)]
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = at(left), at(right)
    for _ in range(20):
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = at(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = at(right)
    return replace(law, temperature=math.exp((low + high) / 2))
