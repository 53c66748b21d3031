"""Continuations drawn from a model under a sampling law.

Of the checkpoint's generation_config only the end-of-sequence ids are read. A continuation does not depend on the batch
size, but for rounding: logits move with the shape of the batch and with the processor (by about 1e-7 in float32, 1e-2
in half precision), and a draw that lies so near to the boundary between two tokens can fall on the other side.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from transformers.cache_utils import Cache

from Gradient_evaluation.forward import padding_position, position_ids, takes_positions
from Gradient_evaluation.sampling.cache import choose_rows, let_grow
from Gradient_evaluation.sampling.law import (  # noqa: F401 (some are imported from here)
    SamplingLaw,
    at_least_float32,
    draw,
    draw_tokens,
    kept_tokens,
    uniforms,
)
from Gradient_evaluation.sampling.log_probs import log_probs  # noqa: F401
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
    None where something else made the tokens. Two continuations of the same tokens are equal, whatever rounding made of
    these numbers.
    """

    tokens: tuple[int, ...]
    ended: bool
    text: str
    log_probs: np.ndarray | None = field(default=None, compare=False, repr=False)
    log_kept: np.ndarray | None = field(default=None, compare=False, repr=False)


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
    """
    prompt = _Prompt(model, prompt_ids)
    eos = (*eos_token_ids(model, tokenizer), *stop_token_ids(tokenizer, law.stop))
    drawn = []
    with thin_products(model):
        for start in range(0, len(u), batch_size):
            drawn += _decode(prompt, tokenizer, torch.from_numpy(u[start : start + batch_size]).to(model.device), law, eos)
    return drawn


class _Prompt:
    """A prompt that the model has read once. ``logits`` (1, vocabulary): those after it.

    The model counts the prompt's positions itself; those of decoded tokens are handed to it (``position_ids``), because
    some models (Bamba, RoBERTa after a padding token) lose count when they see one token and a cache.
    """

    def __init__(self, model, prompt_ids: Sequence[int]):
        self.model = model
        self.counted = partial(position_ids, padding_position(model)) if takes_positions(model) else None
        self.tokens = torch.tensor([list(prompt_ids)], device=model.device)
        seen = torch.ones_like(self.tokens)
        output = model(input_ids=self.tokens, attention_mask=seen, use_cache=True, logits_to_keep=1)
        self.logits = output.logits[:, -1]
        cache = getattr(output, "past_key_values", None)
        self.cache = cache if isinstance(cache, Cache) else None

    def cache_for(self, n: int, limit: int) -> Cache | None:
        """A copy of the cache for n rows, with room for ``limit`` more tokens; None where the model makes none."""
        cache = copy.deepcopy(self.cache)
        if cache is not None:
            choose_rows(cache, torch.zeros(n, dtype=torch.int64, device=self.tokens.device))
            let_grow(cache, self.tokens.shape[1] + limit)
        return cache

    def next_logits(self, so_far: torch.Tensor, cache: Cache | None) -> tuple[torch.Tensor, Cache | None]:
        """Logits (rows, vocabulary) after ``so_far`` (rows, t), and the grown cache; without one, the model reads all again."""
        whole = torch.cat([self.tokens.expand(len(so_far), -1), so_far], dim=1)
        seen, counted = torch.ones_like(whole), self.counted
        if cache is None:
            output = self.model(input_ids=whole, attention_mask=seen, use_cache=False, logits_to_keep=1)
            return output.logits[:, -1], None
        positions = {} if counted is None else {"position_ids": counted(whole)[:, -1:]}
        output = self.model(
            input_ids=so_far[:, -1:], attention_mask=seen, past_key_values=cache, use_cache=True, logits_to_keep=1, **positions
        )
        return output.logits[:, -1], output.past_key_values


def _decode(prompt: _Prompt, tokenizer, u: torch.Tensor, law: SamplingLaw, eos: Sequence[int]) -> list[Continuation]:
    """One batch of ``sample_continuations``: decode until every row has ended or reached the limit. u: (n, limit)."""
    n, limit = u.shape
    eos_tensor = torch.tensor(eos, dtype=torch.int64, device=u.device)
    tokens = torch.zeros(n, limit, dtype=torch.int64, device=u.device)
    values = torch.zeros(2, n, limit, dtype=at_least_float32(prompt.logits[:0]).dtype, device=u.device)
    ended = torch.zeros(n, dtype=torch.bool, device=u.device)
    finite = torch.ones((), dtype=torch.bool, device=u.device)
    rows = torch.arange(n, device=u.device)
    logits, cache = prompt.logits.expand(n, -1), prompt.cache_for(n, limit)
    # Looking at ``ended`` makes the host wait for a GPU; a few decoded tokens too many cost less.
    check_every = 1 if u.device.type == "cpu" else 4
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
                rows = rows[going]
                if cache is not None:
                    choose_rows(cache, going.nonzero().squeeze(-1))
        logits, cache = prompt.next_logits(tokens[rows, : position + 1], cache)
    if not finite:
        raise FloatingPointError("the model's logits are not finite")
    tokens, values = tokens[:, : position + 1], values[:, :, : position + 1].cpu().numpy()
    stops.look(tokens, ended)
    drawn = [_continuation(tokenizer, row, eos, stops.found.get(i)) for i, row in enumerate(tokens.tolist())]
    return [
        replace(each, log_probs=value[: len(each.tokens)].copy(), log_kept=kept[: len(each.tokens)].copy())
        for each, value, kept in zip(drawn, *values)
    ]


def _continuation(tokenizer, row: list[int], eos: Sequence[int], stopped: tuple[int, str] | None) -> Continuation:
    """Cut a decoded row where a stop string ended it, (tokens, text before it), or after its first end-of-sequence token."""
    if stopped is not None:
        length, text = stopped
        return Continuation(tuple(row[:length]), False, text)
    end = next((i + 1 for i, token in enumerate(row) if token in eos), None)
    tokens = row if end is None else row[:end]
    return Continuation(tuple(tokens), end is not None, decode_text(tokenizer, tokens if end is None else tokens[:-1]))
