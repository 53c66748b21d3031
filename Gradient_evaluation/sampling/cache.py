"""A key-value cache that grows in place, and the choice of its rows.

The cache of transformers copies all its keys and values for every token decoded.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, DynamicLayer, EncoderDecoderCache


class GrowingLayer(DynamicLayer):
    """A DynamicLayer with room for more positions; only what is new is written. ``room``: positions in all."""

    def __init__(self, layer: DynamicLayer, room: int):
        self.__dict__.update(layer.__dict__)
        self.room, self.buffers = room, None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Append (n, heads, new, d) keys and values → all of them, (n, heads, positions, d) views of the buffers."""
        known = self.keys.shape[-2]
        total = known + key_states.shape[-2]
        if self.buffers is None or self.buffers[0].data_ptr() != self.keys.data_ptr() or total > self.room:
            self.room = max(self.room, total)  # rows were copied or chosen since: make room for them anew
            self.buffers = [_with_room(x, self.room) for x in (self.keys, self.values)]
        for buffer, new in zip(self.buffers, (key_states, value_states)):
            buffer[..., known:total, :] = new
        self.keys, self.values = (buffer[..., :total, :] for buffer in self.buffers)
        return self.keys, self.values


def _with_room(x: torch.Tensor, room: int) -> torch.Tensor:
    buffer = x.new_empty(*x.shape[:-2], room, x.shape[-1])
    buffer[..., : x.shape[-2], :] = x
    return buffer


def let_grow(cache: Cache, room: int) -> None:
    """Give every plain layer of the cache room for ``room`` positions; other kinds stay as they are."""
    if isinstance(cache, EncoderDecoderCache):  # of a decoder that could also read an encoder (MegatronBert)
        cache = cache.self_attention_cache
    for i, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer and layer.is_initialized and layer.keys.numel():
            cache.layers[i] = GrowingLayer(layer, room)


def choose_rows(cache: Cache, rows: torch.Tensor) -> None:
    """Keep these rows of the batch, ``rows`` (n,) int64, of everything the cache holds.

    ``Cache.reorder_cache`` chooses in the layers alone; MiniMax keeps the states of its linear attention beside them.
    """
    cache.reorder_cache(rows)
    for states in vars(cache).values():
        if isinstance(states, list):
            states[:] = [x.index_select(0, rows.to(x.device)) if isinstance(x, torch.Tensor) else x for x in states]
