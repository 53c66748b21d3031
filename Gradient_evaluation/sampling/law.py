"""Arithmetic over a whole vocabulary that sampling.py needs: the nucleus, one token's log-prob, the inverse CDF.

A vocabulary has 50,000 to 250,000 entries and each is touched per token drawn or scored, so what counts here is how
often a row of logits is read: never sorted where a few of its largest entries decide, never copied in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

SLICE = 2**25  # logits worked on at a time
FIRST = (128, 2048)  # on a CPU the nucleus is looked for among so many of the likeliest tokens before a full sort
BLOCK = 256  # the inverse CDF finds a block of so many tokens first


def _float(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


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


class Draw(NamedTuple):
    """Tokens drawn from n rows of logits.

    tokens (n,) int64; log_probs (n,): of each in what was drawn from; log_kept (n,): log of the share of probability that
    a nucleus left, 0 where there is none; sound, a bool (): no logit is nan or +inf, and not all of a row are -inf.
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    log_kept: torch.Tensor
    sound: torch.Tensor


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
    place = torch.searchsorted(cumulated, _below(u * cumulated[:, -1], cumulated[:, -1]).unsqueeze(1), right=True)
    drawn, sound = ids.gather(-1, place.clamp(max=k - 1)).squeeze(1), torch.isfinite(log_total).all()
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


def _nucleus_by_sort(rows: torch.Tensor, top_p: float) -> torch.Tensor:
    ascending, order = torch.sort(rows, dim=-1, stable=True)
    dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
    dropped[..., -1] = False
    return torch.empty_like(dropped).scatter(-1, order, ~dropped)


class TokenLogProb(torch.autograd.Function):
    """(logits (n, vocabulary), tokens (n,), removed (n, vocabulary) or None, temperature) → log-probs (n,).

    The log-softmax of logits / temperature over what is not removed, at the tokens, in float32 or better. Nothing of
    the logits' size is kept for the backward pass but the logits, and its only new tensor is their gradient.
    """

    @staticmethod
    def forward(ctx, logits, tokens, removed, temperature: float):
        log_total = torch.empty(len(tokens), dtype=_float(logits[:0]).dtype, device=logits.device)
        chosen = _float(logits.gather(1, tokens.unsqueeze(1)).squeeze(1)) / temperature
        for part in _row_slices(logits):
            log_total[part] = _scaled(logits, removed, temperature, part).logsumexp(-1)
        ctx.save_for_backward(logits, tokens, removed, log_total)
        ctx.temperature = temperature
        return chosen - log_total

    @staticmethod
    def backward(ctx, gradient):
        logits, tokens, removed, log_total = ctx.saved_tensors
        by_logits = torch.empty_like(logits)
        scale = gradient.unsqueeze(1) / ctx.temperature
        for part in _row_slices(logits):
            p = (_scaled(logits, removed, ctx.temperature, part) - log_total[part].unsqueeze(1)).exp_()
            p.mul_(-scale[part]).scatter_add_(1, tokens[part].unsqueeze(1), scale[part])
            by_logits[part] = p
        return by_logits, None, None, None


def _row_slices(logits: torch.Tensor) -> list[slice]:
    step = max(1, SLICE // (16 * logits.shape[-1]))
    return [slice(start, start + step) for start in range(0, len(logits), step)]


def _scaled(logits, removed, temperature: float, part: slice) -> torch.Tensor:
    x = _float(logits[part])
    if temperature != 1.0:
        x = x / temperature
    return x if removed is None else x.masked_fill(removed[part], -torch.inf)


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
    place = torch.searchsorted(inside, _below(rest, inside[:, -1:]), right=True)
    drawn = (block * BLOCK + place).squeeze(1).clamp(max=vocabulary - 1)  # what is not sound is the caller's to report
    value = (logits.gather(1, drawn.unsqueeze(1)) - most).squeeze(1) - cumulated[:, -1].log().to(logits.dtype)
    return Draw(drawn, value, torch.zeros_like(value), torch.isfinite(cumulated[:, -1]).all())


def _below(x: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """x, or the number just below ``bound`` (> 0) where x is not below it."""
    return torch.minimum(x, torch.nextafter(bound, torch.zeros_like(bound)))
