"""One product for the prompt of a whole block: what is the same in every row is multiplied once.

All rows of a block start with the same prompt, and a causal model's activations there depend on nothing else. While
``shared_prompt`` is on, every Linear (and GPT-2's Conv1D) that sees the whole sequence multiplies the prompt's
positions of the first row alone and copies the result to the others; output gradients stay one per sample, and so
does everything a hook sees. A model whose prompt positions look ahead would be measured wrongly: the self-audit
compares with a backward pass that shares nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from Gradient_evaluation.forward import replaced_forward


class _SharedLinear(torch.autograd.Function):
    """x (B, T, d_in), matrix (d_in, d_out), bias or None → x @ matrix + bias, the first positions from row 0."""

    @staticmethod
    def forward(ctx, x, matrix, bias, shared: int):
        ctx.save_for_backward(matrix)
        if shared == 0:
            return _affine(x.flatten(0, 1), matrix, bias).unflatten(0, x.shape[:2])
        out = x.new_empty(*x.shape[:2], matrix.shape[1])
        out[:, :shared] = _affine(x[0, :shared], matrix, bias)
        out[:, shared:] = _affine(x[:, shared:].flatten(0, 1), matrix, bias).unflatten(0, (len(x), -1))
        return out

    @staticmethod
    def backward(ctx, gradient):
        (matrix,) = ctx.saved_tensors
        return (gradient.flatten(0, 1) @ matrix.T).view(*gradient.shape[:2], -1), None, None, None


def _affine(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x @ matrix if bias is None else torch.addmm(bias, x, matrix)


def _forward(module: nn.Module, plain, shape: tuple[int, int], shared: int, x: torch.Tensor) -> torch.Tensor:
    matrix = module.weight.T if isinstance(module, nn.Linear) else module.weight
    if x.dim() != 3 or x.shape[0] != shape[0] or matrix.requires_grad or x.dtype != matrix.dtype:
        return plain(x)
    return _SharedLinear.apply(x, matrix, module.bias, shared if x.shape[1] == shape[1] else 0)


@contextmanager
def shared_prompt(modules: Iterable[nn.Module], batch: int, length: int, shared: int) -> Iterator[None]:
    """While inside, layers that see (batch, length, d) take the first ``shared`` positions from the first row.

    modules: those whose tensors lead with the batch (gram_capture.leading_with_batch); the Linear ones are meant.
    """
    layers = []
    if batch > 1 and shared > 0:
        layers = [m for m in modules if type(m) in (nn.Linear, Conv1D)]
    with replaced_forward(layers, lambda layer, plain: partial(_forward, layer, plain, (batch, length), shared)):
        yield
