"""Small random sketches of gradients, so that gradients of different prompts can be compared.

||mean over prompts of theta(x)||^2 needs inner products between the gradients of pairs of prompts, which no Gram of
one prompt has. Each parameter, seen as a matrix (rows, columns), is sketched as P_rows^T gradient P_columns with
fixed matrices of entries +-1/sqrt(k): the inner product of two sketches is unbiased for that of the gradients over
the draw of the matrices. They depend on the parameter's name and shape alone, so they are the same for every prompt,
run, rank and device. Sketches are made from the factored gradients of layers.py, never from the whole gradient. They are
linear, so the uses of a parameter (a tied embedding and head) add up. A side with at most k entries stays as it is, so a
large enough k gives the exact gradient. Derived in docs/method.md, section 5.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from Gradient_evaluation.gram.layers import DenseGradient, Gradient


class ParameterSketch:
    """The random matrices of one parameter, made when they are first needed; None stands for the identity.

    parameter: a matrix (more dimensions than two: all but the last are rows) or a vector; k: see GradientSketch.
    """

    def __init__(self, name: str, parameter: nn.Parameter, k: int, seed: int):
        self.name, self.parameter, self.k, self.seed = name, parameter, k, seed
        self.is_vector = parameter.dim() < 2
        self.made: dict[str, torch.Tensor | None] = {}

    @property
    def shape(self) -> tuple[int, int, bool, bool]:
        """(rows, columns of the sketch, whether the rows, the columns are random combinations)."""
        if self.is_vector:
            count = self.parameter.numel()
            return 1, min(count, self.k**2), False, count > self.k**2
        columns = self.parameter.shape[-1]
        rows = self.parameter.numel() // columns
        return min(rows, self.k), min(columns, self.k), rows > self.k, columns > self.k

    @property
    def size(self) -> int:
        """Entries of the sketch."""
        return self.shape[0] * self.shape[1]

    @property
    def rows(self) -> torch.Tensor | None:
        return self._matrix("rows", self.parameter.numel() // self.parameter.shape[-1], self.k)

    @property
    def columns(self) -> torch.Tensor | None:
        return self._matrix("columns", self.parameter.shape[-1], self.k)

    @property
    def vector(self) -> torch.Tensor | None:
        """For a vector: (elements, k*k)."""
        return self._matrix("vector", self.parameter.numel(), self.k**2)

    def of_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of ``rows`` with these numbers: (..., entries), of the identity where there is no matrix."""
        if self.rows is not None:
            return self.rows[ids]
        return nn.functional.one_hot(ids, len(self.parameter)).to(torch.float32)

    def _matrix(self, side: str, extent: int, width: int) -> torch.Tensor | None:
        """(extent, width) of entries +-1/sqrt(width) for one side of the parameter; None where extent <= width."""
        if side not in self.made:
            matrix = None
            if extent > width:
                p = self.parameter
                digest = hashlib.sha256(f"{self.seed}/{side}/{self.name}/{tuple(p.shape)}/{self.k}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                signs = torch.randint(0, 2, (extent, width), generator=generator, dtype=torch.int8)
                matrix = (2 * signs - 1).to(p.device, torch.promote_types(p.dtype, torch.float32)) / width**0.5
            self.made[side] = matrix
        return self.made[side]


class GradientSketch:
    """Sketches of dimension k of the gradients of ``parameters`` {key: (name, parameter)}.

    A sketch of one parameter has at most k*k entries. ``of`` {key: ParameterSketch} is in the order of concatenation. The
    matrices, k entries per row and column of a parameter, stay on the parameter's device. ``seed`` draws others.
    """

    def __init__(self, parameters: dict[int, tuple[str, nn.Parameter]], k: int, seed: int = 0):
        self.of = {key: ParameterSketch(name, p, k, seed) for key, (name, p) in parameters.items()}

    def of_gradient(self, key: int, gradient: torch.Tensor) -> torch.Tensor:
        """Sketch (entries,) of a whole gradient of the parameter's shape."""
        return DenseGradient(gradient.reshape(1, -1)).sketch(self.of[key]).squeeze(0)

    @property
    def layout(self) -> list[tuple[int, int, bool, bool]]:
        """The shape of every parameter's sketch in the order of concatenation; stats needs it for a sketch's error."""
        return [sketch.shape for sketch in self.of.values()]


class CombinationSketches:
    """The sketches of E combinations sum_i weights_ei g_i of scores, added up use by use.

    weights: (E, B) float64; ``sums`` {key of a parameter: (E, entries)}.
    """

    def __init__(self, sketch: GradientSketch, weights: torch.Tensor):
        self.sketch, self.weights = sketch, weights
        self.sums: dict[int, torch.Tensor] = {}

    def add(self, key: int, use: Gradient) -> None:
        per_sample = use.sketch(self.sketch.of[key])
        self._put(key, self.weights.to(per_sample.dtype) @ per_sample)

    def add_slice(self, key: int, rows: slice | torch.Tensor, columns: slice, per_sample: torch.Tensor) -> None:
        """Add a slice (B, r, c) of every sample's gradient; see layers.Gradient.slices."""
        of = self.sketch.of[key]
        whole = (self.weights.to(per_sample.dtype) @ per_sample.flatten(1)).view(-1, *per_sample.shape[1:])
        if of.is_vector:
            share = whole.squeeze(1) @ _chosen(of.vector, of.parameter.numel(), columns, whole)
        else:
            right = whole @ _chosen(of.columns, of.parameter.shape[-1], columns, whole)
            share = (_chosen(of.rows, of.shape[0], rows, whole).T @ right).flatten(1)
        self._put(key, share)

    def _put(self, key: int, share: torch.Tensor) -> None:
        self.sums[key] = self.sums[key] + share if key in self.sums else share


def _chosen(matrix: torch.Tensor | None, extent: int, index: slice | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """These rows of a sketch's matrix; None stands for the identity of ``extent`` rows."""
    matrix = torch.eye(extent, dtype=like.dtype, device=like.device) if matrix is None else matrix
    return matrix[index].to(like.dtype)
