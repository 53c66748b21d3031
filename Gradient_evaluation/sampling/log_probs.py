"""The log-probs of the sampling law, differentiable in the logits. No model here."""

from __future__ import annotations

import torch

from Gradient_evaluation.sampling.law import SLICE, SamplingLaw, at_least_float32, divided, kept_tokens


def log_probs(logits: torch.Tensor, tokens: torch.Tensor, law: SamplingLaw) -> torch.Tensor:
    """log pi(token) under the law, float32 or better, differentiable in the logits.

    logits: (..., vocabulary) raw model outputs; tokens: (...) int64. The kept set is a constant to autograd
    (its score has mean 0 all the same), and a sampled token that rounding would push out of it stays in.
    """
    rows, chosen, removed = logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1), None
    if law.top_k or law.top_p < 1.0:
        with torch.no_grad():
            kept = kept_tokens(divided(rows, law), law)
            removed = None if kept is None else ~kept.scatter_(-1, chosen.unsqueeze(-1), True)
    return _TokenLogProb.apply(rows, chosen, removed, law.temperature).view(tokens.shape)


class _TokenLogProb(torch.autograd.Function):
    """(logits (n, vocabulary), tokens (n,), removed (n, vocabulary) or None, temperature) → log-probs (n,).

    The log-softmax of logits / temperature over what is not removed, at the tokens, in float32 or better. Nothing of
    the logits' size is kept for the backward pass but the logits, and its only new tensor is their gradient.
    """

    @staticmethod
    def forward(ctx, logits, tokens, removed, temperature: float):
        log_total = torch.empty(len(tokens), dtype=at_least_float32(logits[:0]).dtype, device=logits.device)
        chosen = at_least_float32(logits.gather(1, tokens.unsqueeze(1)).squeeze(1)) / temperature
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
    x = at_least_float32(logits[part])
    if temperature != 1.0:
        x = x / temperature
    return x if removed is None else x.masked_fill(removed[part], -torch.inf)
