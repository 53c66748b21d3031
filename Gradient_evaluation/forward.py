"""How a model of another library is called: position ids as it counts them, layers run another way, memory running out."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


def takes_positions(model) -> bool:
    """Whether the model's forward has ``position_ids``, also under a PEFT wrapper."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    return "position_ids" in inspect.signature(inner.forward).parameters


def padding_position(model) -> int | None:
    """The position id that the model keeps for padding tokens, None where it counts all tokens alike.

    RoBERTa and its kin do: token and position of padding have one id, and real tokens count from the next.
    """
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "position_embeddings" and getattr(module, "padding_idx", None) is not None:
            return module.padding_idx
    return None


def position_ids(padding: int | None, tokens: torch.Tensor) -> torch.Tensor:
    """The position ids (n, length) of whole sequences ``tokens`` (n, length), counted as the model itself counts them.

    Sampler and scorer both take them from here. padding: see ``padding_position``. Most models count from 0, also those
    whose table of positions has an offset, which they add to the ids themselves (OPT).
    """
    if padding is None:
        return torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    real = tokens != padding
    return padding + real.cumsum(1) * real


@contextmanager
def replaced_forward(layers: Iterable[nn.Module], make: Callable[[nn.Module, Callable], Callable]) -> Iterator[None]:
    """While inside, each layer's forward is ``make(layer, its forward so far)``; hooks run as they would."""
    before = [(layer, vars(layer).get("forward")) for layer in layers]  # an own one: another library's wrapper
    try:
        for layer, _ in before:
            layer.forward = make(layer, layer.forward)
        yield
    finally:
        for layer, own in before:
            vars(layer).pop("forward", None)
            if own is not None:
                layer.forward = own


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: on CUDA or another accelerator, in torch on the CPU, or in NumPy."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return re.search(r"out of memory|can't allocate memory|not enough memory|ALLOC_FAILED", str(error)) is not None
