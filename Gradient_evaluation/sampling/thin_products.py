"""Decoding multiplies a few rows by a whole vocabulary; on a CPU that is faster with the weight on the left.

x @ W^T with some tens of rows packs all of W before it multiplies, and its threads share badly. (W x^T)^T, a few
thousand outputs at a time, does neither, and each part is transposed while it is in cache: 1.4 to 1.7 times as fast
for 16 to 128 rows and 49,152 outputs on two threads. Narrow layers gain nothing once their result is transposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from Gradient_evaluation.forward import replaced_forward

MOST_ROWS = 160  # of x
OUTPUTS = 2048  # at a time
WIDE = 8192  # outputs of a layer from which it pays


def thin_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x (n, d_in), weight (d_out, d_in) → x @ weight^T (n, d_out)."""
    out = x.new_empty(len(x), len(weight))
    for rows, columns in zip(weight.split(OUTPUTS), out.split(OUTPUTS, dim=1)):
        columns.copy_((rows @ x.T).T)
    return out


def _forward(layer: nn.Linear, plain, x: torch.Tensor) -> torch.Tensor:
    rows = x.numel() // x.shape[-1]
    if not 1 < rows <= MOST_ROWS or x.dtype != torch.float32 or layer.weight.dtype != torch.float32:
        return plain(x)
    out = thin_product(x.reshape(rows, -1), layer.weight)
    if layer.bias is not None:
        out += layer.bias
    return out.view(*x.shape[:-1], -1)


@contextmanager
def thin_products(model: nn.Module) -> Iterator[None]:
    """While inside, and without gradients, the widest Linear layers (the head) of a model on a CPU multiply that way."""
    layers = []
    if next(model.parameters()).device.type == "cpu":
        layers = [module for module in model.modules() if type(module) is nn.Linear and module.out_features >= WIDE]
    with replaced_forward(layers, lambda layer, plain: partial(_forward, layer, plain)):
        yield
