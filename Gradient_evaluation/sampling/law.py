"""The sampling law: what it keeps of a row of logits, and exact draws from it. No model here.

The score is unbiased only if log pi is the log-prob of the very distribution that produced the continuation. So one
``SamplingLaw`` serves both sides: ``draw`` draws from it, and ``log_probs.log_probs`` evaluates it. A hidden top_k,
repetition_penalty or temperature in the checkpoint's generation_config changes nothing.

Random numbers are counter-based (``uniforms``): continuation number i of a prompt does not depend on the order of
the prompts, nor on how often the run was stopped.

A vocabulary has 50,000 to 250,000 entries, and each is touched per token drawn or scored. So what counts is how often
a row of logits is read: it is not sorted where a few of its largest entries decide, and never copied in float64.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

SLICE = 2**25  # logits worked on at a time
FIRST = (128, 2048)  # on a CPU the nucleus is looked for among so many of the likeliest tokens before a full sort
BLOCK = 256  # the inverse CDF finds a block of so many tokens first


@dataclass(frozen=True)
class SamplingLaw:
    """The distribution of a continuation: temperature, then top_k, then top_p, until EOS, stop or the limit.

    temperature > 0; top_k = 0 keeps every token; top_p in (0, 1]; max_new_tokens >= 1; ``stop`` are strings
    whose completion ends the continuation; one that is a special token ends it as EOS does.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 32
    stop: tuple[str, ...] = ()


def uniforms(seed: int, script: str, prompt_id: int, first: int, count: int, length: int) -> np.ndarray:
    """Uniform numbers in [0, 1) for continuations first .. first+count-1 → float64 (count, length).

    One number per (seed, script, prompt id, continuation index, token position), from NumPy's Philox keyed by
    seed, script and prompt with the continuation index in its counter. Different ``script`` names give
    independent numbers, so an oracle value is never estimated from the continuations it is used on.
    """
    stream = int.from_bytes(hashlib.sha256(f"{seed}/{script}".encode()).digest()[:8], "little")
    key = np.array([stream, prompt_id], dtype=np.uint64)
    rows = []
    for index in range(first, first + count):
        counter = np.array([0, index, 0, 0], dtype=np.uint64)
        rows.append(np.random.Generator(np.random.Philox(counter=counter, key=key)).random(length))
    return np.stack(rows)


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or as it is where its dtype is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def divided(logits: torch.Tensor, law: SamplingLaw) -> torch.Tensor:
    """The logits by the temperature, in float32 or better."""
    logits = at_least_float32(logits)
    return logits if law.temperature == 1.0 else logits / law.temperature


def kept_tokens(logits: torch.Tensor, law: SamplingLaw) -> torch.Tensor | None:
    """The tokens that top_k and top_p leave in the law → bool (..., vocabulary), None when all of them.

    ``logits`` (..., vocabulary) are already divided by the temperature. The order (top_k, then top_p within
    what is left) and the rules are those of transformers: every token as likely as the k-th stays; for top_p
    the least likely tokens go as long as their summed probability is at most 1 - top_p, never the last one.
    Of equally likely tokens the lower id goes first (transformers leaves that to an unstable sort).
    """
    kept = None
    if 0 < law.top_k < logits.shape[-1]:
        kept = _top_k_tokens(logits, law.top_k)
        logits = logits.masked_fill(~kept, -torch.inf)
    if law.top_p < 1.0:
        in_nucleus = nucleus(logits, law.top_p)
        kept = in_nucleus if kept is None else kept & in_nucleus
    return kept


def _top_k_tokens(logits: torch.Tensor, k: int) -> torch.Tensor:
    return logits >= torch.topk(logits, k, dim=-1).values[..., -1:]


def nucleus(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """The tokens that top_p leaves → bool (..., vocabulary), of ``logits`` (..., vocabulary).

    The least likely tokens go as long as their summed probability is at most 1 - top_p, never the last one; of
    equally likely tokens the lower id goes first.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    parts = rows.split(max(1, SLICE // rows.shape[-1]))
    return torch.cat([_nucleus(part, top_p, FIRST) for part in parts]).view(logits.shape)


def _nucleus(rows: torch.Tensor, top_p: float, first: tuple[int, ...]) -> torch.Tensor:
    if rows.device.type != "cpu":  # a GPU sorts fast, and asking which rows are undecided would make the host wait
        return _nucleus_by_sort(rows, top_p)
    kept = torch.empty(rows.shape, dtype=torch.bool, device=rows.device)
    undecided = torch.arange(len(rows))
    log_total = rows.logsumexp(-1, keepdim=True)
    for k in first:
        if 4 * k > rows.shape[1] or len(undecided) == 0:
            break
        part = rows if len(undecided) == len(rows) else rows[undecided]
        found, decided = _nucleus_of_first(part, log_total[undecided], top_p, k)
        kept[undecided[decided]] = found[decided]
        undecided = undecided[~decided]
    if len(undecided):
        kept[undecided] = _nucleus_by_sort(rows[undecided], top_p)
    return kept


def _nucleus_of_first(rows, log_total, top_p: float, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens kept, rows in which the k likeliest tokens decide them)."""
    values, _, _, count, decided = _likeliest(rows, log_total, top_p, k)
    return rows >= values.gather(-1, count - 1), decided


def _likeliest(rows, log_total, top_p: float, k: int) -> tuple[torch.Tensor, ...]:
    """The k likeliest tokens, likeliest first: values, ids and probabilities (n, k); how many of them top_p leaves
    (n, 1); and the rows (n,) in which that is the whole nucleus.

    A token stays while those before it have less than top_p. Ties at the edge are left to the sort, and so are rows
    in which all k stay (the edge is then one of them).
    """
    values, ids = torch.topk(rows, k, dim=-1)
    p = (values - log_total).double().exp()
    count = ((p.cumsum(-1) - p) < top_p).sum(-1, keepdim=True).clamp(min=1)  # nan is below nothing
    edge = values.gather(-1, count.clamp(max=k - 1))
    return values, ids, p, count, (edge < values.gather(-1, count - 1)).squeeze(-1)


def _nucleus_by_sort(rows: torch.Tensor, top_p: float) -> torch.Tensor:
    ascending, order = torch.sort(rows, dim=-1, stable=True)
    dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
    dropped[..., -1] = False
    return torch.empty_like(dropped).scatter(-1, order, ~dropped)


class Draw(NamedTuple):
    """Tokens drawn from n rows of logits.

    tokens (n,) int64; log_probs (n,): of each in what was drawn from; log_kept (n,): log of the share of probability that
    a nucleus left, 0 where there is none; sound, a bool (): no logit is nan or +inf, and not all of a row are -inf.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    log_kept: torch.Tensor
    sound: torch.Tensor


def draw(logits: torch.Tensor, u: torch.Tensor, law: SamplingLaw) -> Draw:
    """Draw one token per row by the inverse CDF: logits (n, vocabulary) raw model outputs, u (n,) float64 in [0, 1).

    ``log_kept`` is the share that top_k and top_p leave together.
    """
    logits, log_kept = divided(logits, law), 0.0
    if 0 < law.top_k < logits.shape[-1]:
        whole = logits.logsumexp(-1)
        logits = logits.masked_fill(~_top_k_tokens(logits, law.top_k), -torch.inf)
        log_kept = logits.logsumexp(-1) - whole
    drawn = inverse_cdf(logits, u) if law.top_p == 1.0 else draw_from_nucleus(logits, u, law.top_p)
    return drawn._replace(log_kept=drawn.log_kept + log_kept)


def draw_tokens(logits: torch.Tensor, u: torch.Tensor, law: SamplingLaw) -> torch.Tensor:
    """Inverse-CDF draw: logits (n, vocabulary), u (n,) float64 in [0, 1) → token ids (n,) int64."""
    return draw(logits, u, law).tokens


def draw_from_nucleus(logits: torch.Tensor, u: torch.Tensor, top_p: float) -> Draw:
    """``inverse_cdf`` of what top_p < 1 leaves of ``logits`` (n, vocabulary).

    On a CPU, rows whose nucleus lies within a few of their likeliest tokens are drawn from these alone.
    """
    k = FIRST[0]
    log_total = logits.logsumexp(-1, keepdim=True)
    if logits.device.type != "cpu" or 4 * k > logits.shape[1]:
        return _draw_from_kept(logits, nucleus(logits, top_p), log_total, u)
    _, ids, p, count, decided = _likeliest(logits, log_total, top_p, k)
    ids, order = ids.masked_fill(torch.arange(k) >= count, logits.shape[1]).sort(dim=-1)  # what is cut off comes last
    cumulated = p.gather(-1, order).masked_fill_(ids == logits.shape[1], 0.0).cumsum(-1)
    index = torch.searchsorted(cumulated, _below(u * cumulated[:, -1], cumulated[:, -1]).unsqueeze(1), right=True)
    drawn, sound = ids.gather(-1, index.clamp(max=k - 1)).squeeze(1), torch.isfinite(log_total).all()
    drawn = drawn.clamp(max=logits.shape[1] - 1)
    log_kept = cumulated[:, -1].log().to(logits.dtype)
    value = (logits.gather(1, drawn.unsqueeze(1)) - log_total).squeeze(1) - log_kept
    if not decided.all():
        rest = logits[~decided]
        kept = _nucleus(rest, top_p, FIRST[1:])
        drawn[~decided], value[~decided], log_kept[~decided], _ = _draw_from_kept(rest, kept, log_total[~decided], u[~decided])
    return Draw(drawn, value, log_kept, sound)


def _draw_from_kept(logits, kept, log_total, u) -> Draw:
    drawn, value, _, sound = inverse_cdf(logits.masked_fill(~kept, -torch.inf), u)
    chosen = logits.gather(1, drawn.unsqueeze(1))
    return Draw(drawn, value, (chosen - log_total).squeeze(1) - value, sound)


def inverse_cdf(logits: torch.Tensor, u: torch.Tensor) -> Draw:
    """Draw from logits (n, vocabulary) with u (n,) float64 in [0, 1).

    The first token whose cumulated probability exceeds u, found by blocks of tokens and then inside one block;
    probabilities of exactly 0 are never drawn.
    """
    n, vocabulary = logits.shape
    most = logits.amax(-1, keepdim=True)
    weight = (logits - most).exp_()
    whole = vocabulary // BLOCK * BLOCK
    sums = [weight[:, :whole].view(n, -1, BLOCK).sum(-1)] if whole else []
    if whole < vocabulary:
        sums.append(weight[:, whole:].sum(-1, keepdim=True))
    sums = torch.cat(sums, 1).double()
    cumulated = sums.cumsum(-1)
    target = _below(u * cumulated[:, -1], cumulated[:, -1]).unsqueeze(1)
    block = torch.searchsorted(cumulated, target, right=True).clamp(max=sums.shape[1] - 1)
    tokens = block * BLOCK + torch.arange(min(BLOCK, vocabulary), device=logits.device)
    inside = weight.gather(1, tokens.clamp(max=vocabulary - 1)).double().masked_fill_(tokens >= vocabulary, 0.0)
    inside = inside.cumsum(-1)
    # Rounding must lead to no token of weight 0: below 0 the first, above the sum none.
    rest = (target - (cumulated.gather(1, block) - sums.gather(1, block))).clamp(min=0.0)
    index = torch.searchsorted(inside, _below(rest, inside[:, -1:]), right=True)
    drawn = (block * BLOCK + index).squeeze(1).clamp(max=vocabulary - 1)  # what is not sound is the caller's to report
    value = (logits.gather(1, drawn.unsqueeze(1)) - most).squeeze(1) - cumulated[:, -1].log().to(logits.dtype)
    return Draw(drawn, value, torch.zeros_like(value), torch.isfinite(cumulated[:, -1]).all())


def _below(x: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """x, or the number just below ``bound`` (> 0) where x is not below it."""
    return torch.minimum(x, torch.nextafter(bound, torch.zeros_like(bound)))
