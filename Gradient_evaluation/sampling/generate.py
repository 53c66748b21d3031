"""Continuations drawn from a model under a sampling law.

Of the checkpoint's generation_config only the end-of-sequence ids are read. A continuation does not depend on the batch
size, but for rounding: logits move with the shape of the batch and with the processor (by about 1e-7 in float32, 1e-2
in half precision), and a draw that lies so near to the boundary between two tokens can fall on the other side.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from transformers.cache_utils import Cache

from Gradient_evaluation.forward import padding_position, position_ids, takes_positions
from Gradient_evaluation.sampling.cache import choose_rows, let_grow
from Gradient_evaluation.sampling.law import SamplingLaw, at_least_float32, draw
from Gradient_evaluation.sampling.stop_strings import StopStrings, decode_text, stop_token_ids
from Gradient_evaluation.sampling.thin_products import thin_products

COMPACT_BELOW = 0.75  # finished rows leave the batch once fewer than this share of it is still going


@dataclass(frozen=True)
class Continuation:
    """One sampled continuation.

    tokens: its token ids, the first end-of-sequence token included when there is one; ended: whether the last
    token is that end-of-sequence token; text: the decoded text the reward reads (no special tokens, and only
    what precedes a stop string); log_probs: log pi of each token under the law as the draw saw it, (len(tokens),) in
    float32 or better; log_kept: at each token, the log of the share of probability that top_k and top_p left. Both are
    None where something else made the tokens. mask: of each token, whether it counts (True) or has no share in log pi
    (False: tool output, other turns); None: all count. Two continuations of the same tokens and mask are equal, whatever
    rounding made of the numbers.
    """

    tokens: tuple[int, ...]
    ended: bool
    text: str
    log_probs: np.ndarray | None = field(default=None, compare=False, repr=False)
    log_kept: np.ndarray | None = field(default=None, compare=False, repr=False)
    mask: tuple[bool, ...] | None = None

    @property
    def length(self) -> int:
        """The number of tokens that count."""
        return len(self.tokens) if self.mask is None else sum(self.mask)


def eos_token_ids(model, tokenizer) -> tuple[int, ...]:
    """All ids that end a continuation: those of the generation_config and the tokenizer's own, sorted."""
    ids = set()
    for named in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        if named is not None:
            ids.update(named if isinstance(named, (list, tuple)) else [named])
    return tuple(sorted(int(token) for token in ids))


@torch.inference_mode()
def sample_continuations(
    model, tokenizer, prompt_ids: Sequence[int], u: np.ndarray, law: SamplingLaw, batch_size: int
) -> list[Continuation]:
    """Draw one continuation per row of u, at most ``batch_size`` at a time.

    prompt_ids: token ids of the prompt; u: float64 (n, law.max_new_tokens) from ``uniforms``. The prompt is
    run once; its cache is copied to every batch. Raises FloatingPointError when a logit is not finite.

    The model counts the prompt's positions itself; those of decoded tokens are handed to it (``position_ids``), for
    some models (Bamba, RoBERTa after a padding token) lose count when they see one token and a cache.
    """
    device, padding = model.device, padding_position(model)
    counted = (lambda tokens, seen: position_ids(padding, tokens)) if takes_positions(model) else None
    prompt = torch.tensor([list(prompt_ids)], device=device)
    prefill = model(input_ids=prompt, attention_mask=torch.ones_like(prompt), use_cache=True, logits_to_keep=1)
    prompt_cache = getattr(prefill, "past_key_values", None)
    drawn = []
    with thin_products(model):
        for start in range(0, len(u), batch_size):
            rows_u = torch.from_numpy(u[start : start + batch_size]).to(device)
            cache, n = copy.deepcopy(prompt_cache) if isinstance(prompt_cache, Cache) else None, len(rows_u)
            if cache is not None:
                choose_rows(cache, torch.zeros(n, dtype=torch.int64, device=device))
            ids, logits = prompt.expand(n, -1), prefill.logits[:, -1].expand(n, -1)
            drawn += _decode(model, tokenizer, _Prompts(ids, torch.ones_like(ids), logits, cache, counted), rows_u, law)
    return drawn


@torch.inference_mode()
def sample_groups(
    model, tokenizer, prompts: Sequence[Sequence[int]], u: np.ndarray, law: SamplingLaw
) -> list[list[Continuation]]:
    """Draw a group for each of many prompts, in one batch: u (prompts, G, law.max_new_tokens) → G continuations of each.

    The same draws as ``sample_continuations`` makes one prompt at a time, up to rounding. Prompts are padded on the left,
    where attention does not look. For decoders with a cache and an attention mask. Many prompts with few continuations
    each are what a training step needs: with G = 2, one prompt at a time made a step of the tiny model take four times
    as long.
    """
    device, longest, size = model.device, max(map(len, prompts)), u.shape[1]
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)

    def counted(tokens, seen):
        return (seen.cumsum(1) - 1).clamp(min=0)

    prefill = model(input_ids=ids, attention_mask=seen, position_ids=counted(ids, seen), use_cache=True, logits_to_keep=1)
    rows = torch.arange(len(prompts), device=device).repeat_interleave(size)
    choose_rows(prefill.past_key_values, rows)
    started = _Prompts(ids[rows], seen[rows], prefill.logits[:, -1][rows], prefill.past_key_values, counted)
    with thin_products(model):
        drawn = _decode(model, tokenizer, started, torch.from_numpy(u.reshape(len(rows), -1)).to(device), law)
    return [drawn[start : start + size] for start in range(0, len(drawn), size)]


class _Prompts(NamedTuple):
    """The prompts of a batch after their forward pass, one row for each continuation to be drawn.

    ids, seen: (n, length) int64, ``seen`` 0 at padding; logits: (n, vocabulary) after the prompt; cache: of n rows, None for
    a model without one; counted: (tokens, seen) of whole sequences → their position ids, None for a model that takes none.
    """

    ids: torch.Tensor
    seen: torch.Tensor
    logits: torch.Tensor
    cache: Cache | None
    counted: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None


def _decode(model, tokenizer, prompts: _Prompts, u: torch.Tensor, law: SamplingLaw) -> list[Continuation]:
    """Decode one batch until every row has ended or reached the limit; u: (n, law.max_new_tokens)."""
    (n, limit), logits, cache = u.shape, prompts.logits, prompts.cache
    eos = (*eos_token_ids(model, tokenizer), *stop_token_ids(tokenizer, law.stop))
    eos_tensor = torch.tensor(eos, dtype=torch.int64, device=u.device)
    tokens = torch.zeros(n, limit, dtype=torch.int64, device=u.device)
    values = torch.zeros(2, n, limit, dtype=at_least_float32(logits[:0]).dtype, device=u.device)
    ended = torch.zeros(n, dtype=torch.bool, device=u.device)
    rows = torch.arange(n, device=u.device)
    if cache is not None:
        let_grow(cache, prompts.ids.shape[1] + limit)
    # Looking at ``ended`` makes the host wait for a GPU; a few decoded tokens too many cost less.
    check_every = 1 if u.device.type == "cpu" else 4
    finite = torch.ones((), dtype=torch.bool, device=u.device)
    stops = StopStrings(tokenizer, law.stop, eos, n)
    for position in range(limit):
        step, values[0, rows, position], values[1, rows, position], sound = draw(logits, u[rows, position], law)
        finite &= sound
        tokens[rows, position] = step
        ended[rows] |= torch.isin(step, eos_tensor)
        if position + 1 == limit:
            break
        if (position + 1) % check_every == 0:
            stops.look(tokens[:, : position + 1], ended)
            going = ~ended[rows]
            count = int(going.sum())
            if count == 0:
                break
            if count < COMPACT_BELOW * len(rows):
                rows, step = rows[going], step[going]
                if cache is not None:
                    choose_rows(cache, going.nonzero().squeeze(-1))
        logits, cache = _next_logits(model, prompts, rows, tokens[rows, : position + 1], cache)
    if not finite:
        raise FloatingPointError("the model's logits are not finite")
    stops.look(tokens[:, : position + 1], ended)
    drawn = [_continuation(tokenizer, row, eos, stops.found.get(i)) for i, row in enumerate(tokens[:, : position + 1].tolist())]
    return [
        replace(each, log_probs=value[: len(each.tokens)].copy(), log_kept=kept[: len(each.tokens)].copy())
        for each, value, kept in zip(drawn, *values[:, :, : position + 1].cpu().numpy())
    ]


def _next_logits(model, prompts: _Prompts, rows: torch.Tensor, so_far: torch.Tensor, cache: Cache | None):
    """Logits (len(rows), vocabulary) after ``so_far`` (len(rows), t) and the grown cache; without one, the whole again."""
    whole = torch.cat([prompts.ids[rows], so_far], dim=1)
    seen, counted = torch.cat([prompts.seen[rows], torch.ones_like(so_far)], dim=1), prompts.counted
    if cache is None:
        output = model(input_ids=whole, attention_mask=seen, use_cache=False, logits_to_keep=1)
        return output.logits[:, -1], None
    positions = {} if counted is None else {"position_ids": counted(whole, seen)[:, -1:]}
    output = model(
        input_ids=so_far[:, -1:], attention_mask=seen, past_key_values=cache, use_cache=True, logits_to_keep=1, **positions
    )
    return output.logits[:, -1], output.past_key_values


def _continuation(tokenizer, row: list[int], eos: Sequence[int], stopped: tuple[int, str] | None) -> Continuation:
    """Cut a decoded row where a stop string ended it, (tokens, text before it), or after its first end-of-sequence token."""
    if stopped is not None:
        length, text = stopped
        return Continuation(tuple(row[:length]), False, text)
    end = next((i + 1 for i, token in enumerate(row) if token in eos), None)
    tokens = row if end is None else row[:end]
    return Continuation(tuple(tokens), end is not None, decode_text(tokenizer, tokens if end is None else tokens[:-1]))
