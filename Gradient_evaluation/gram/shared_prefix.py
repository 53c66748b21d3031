"""The shared prefix of a block: what is the same in every row is computed once and kept once.

All rows of a block start with the same prompt. In a causal model the activations there depend on nothing else, so they
are the same in every row. Two things follow, both methods of ``SharedPrefix``:

* ``multiplied_once``: every Linear (and GPT-2's Conv1D) that sees the whole sequence multiplies the prompt's positions of
  the first row alone and copies the result to the others. Output gradients stay one per sample, and so does everything a
  hook sees.
* ``kept_once``: a tensor that autograd keeps for the backward pass, whose rows are found to be equal in the prefix
  element by element, is kept as one row of the prefix and B rows of the rest. It is put together again when the backward
  pass asks for it, so every element has its old value. The Gram is the same up to rounding: the new tensor may lie
  otherwise in memory, and the order of a sum may depend on that. Of 64 rows with 43 prompt tokens of 74 less than half
  is kept, with 164 of 195 a sixth.

A model whose prompt positions look ahead would be measured wrongly. The audit finds it: it compares with a backward pass
that shares nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from Gradient_evaluation.forward import replaced_forward

REMEMBERED = 4  # tensors last kept: the input of several layers is kept by each of them, and should be kept once


class SharedPrefix(NamedTuple):
    """A block of ``batch`` rows of ``length`` positions, the first ``shared`` of which are the same in every row."""

    batch: int
    length: int
    shared: int

    @contextmanager
    def multiplied_once(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """While inside, layers that see (batch, length, d) take the shared positions from the first row.

        modules: those whose tensors lead with the batch (capture.leading_with_batch); the Linear ones are meant.
        """
        layers = []
        if self.batch > 1 and self.shared > 0:
            layers = [m for m in modules if type(m) in (nn.Linear, Conv1D)]
        with replaced_forward(layers, lambda layer, plain: partial(_forward, layer, plain, self)):
            yield

    @contextmanager
    def kept_once(self) -> Iterator[None]:
        """While inside, what autograd keeps of a forward pass has the shared positions once; its backward may come later.

        A tensor stays as it is where its axis of positions is not clear, or where the rows differ in the shared positions.
        """
        # With a prompt of one token, the responses alone are as long as the whole.
        if self.batch < 2 or self.shared < 2:
            yield
            return
        last: deque[tuple[torch.Tensor, int, _Parts]] = deque(maxlen=REMEMBERED)
        try:
            with torch.autograd.graph.saved_tensors_hooks(partial(self._keep, last), lambda kept: kept.tensor()):
                yield
        finally:
            last.clear()  # whole tensors

    def _keep(self, last: deque, x: torch.Tensor) -> _Whole | _Parts:
        axis = self._axis_of_positions(x)
        if axis is None:
            return _Whole(x)
        for other, version, parts in last:
            if other._version == version and _is_same(other, x):
                return parts
        prompt = x.narrow(axis, 0, self.shared)
        if not torch.equal(prompt, prompt[:1].expand_as(prompt)):
            return _Whole(x)
        parts = _Parts(x, axis, self.shared)
        last.append((x, x._version, parts))
        return parts

    def _axis_of_positions(self, x: torch.Tensor) -> int | None:
        """The only axis of ``length`` behind the first, in a floating tensor of ``batch`` rows that lie apart in memory."""
        if not x.is_floating_point() or x.dim() < 2 or x.shape[0] != self.batch or 0 in x.stride():
            return None
        axes = [axis for axis in range(1, x.dim()) if x.shape[axis] == self.length]
        return axes[0] if len(axes) == 1 else None


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


def _forward(module: nn.Module, plain, prefix: SharedPrefix, x: torch.Tensor) -> torch.Tensor:
    matrix = module.weight.T if isinstance(module, nn.Linear) else module.weight
    if x.dim() != 3 or x.shape[0] != prefix.batch or matrix.requires_grad or x.dtype != matrix.dtype:
        return plain(x)
    return _SharedLinear.apply(x, matrix, module.bias, prefix.shared if x.shape[1] == prefix.length else 0)


class _Whole:
    """A tensor kept as it is. autograd leaves it to such a hook to see that it has not changed."""

    def __init__(self, x: torch.Tensor):
        self.x, self.version = x, x._version

    def tensor(self) -> torch.Tensor:
        if self.x._version != self.version:
            raise RuntimeError("a tensor that the backward pass needs was changed by an inplace operation")
        return self.x


class _Parts:
    """The first ``shared`` positions of row 0 along ``axis``, and all rows' other positions."""

    def __init__(self, x: torch.Tensor, axis: int, shared: int):
        self.axis, self.shared, self.shape = axis, shared, x.shape
        self.strides = x.stride() if _is_dense(x) else None
        self.prompt = x[:1].narrow(axis, 0, shared).clone()
        self.rest = x.narrow(axis, shared, x.shape[axis] - shared).clone()

    def tensor(self) -> torch.Tensor:
        if self.strides is None:
            x = self.rest.new_empty(self.shape)
        else:
            x = self.rest.new_empty_strided(self.shape, self.strides)
        x.narrow(self.axis, 0, self.shared).copy_(self.prompt)
        x.narrow(self.axis, self.shared, self.shape[self.axis] - self.shared).copy_(self.rest)
        return x


def _is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of the same memory."""
    return (x.data_ptr(), x.shape, x.stride(), x.dtype) == (y.data_ptr(), y.shape, y.stride(), y.dtype)


def _is_dense(x: torch.Tensor) -> bool:
    """Whether the elements lie next to each other, in whatever order of the axes."""
    expected = 1
    for stride, size in sorted(zip(x.stride(), x.shape)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
