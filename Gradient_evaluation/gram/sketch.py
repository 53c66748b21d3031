"""Small random sketches of gradients, so that gradients of different prompts can be compared.

||mean over prompts of theta(x)||^2 needs inner products between the gradients of pairs of prompts, which no Gram of
one prompt holds. Each parameter, seen as a matrix (rows, columns), is sketched as P_rows^T gradient P_columns with
fixed matrices of entries +-1/sqrt(k): the inner product of two sketches is unbiased for that of the gradients over
the draw of the matrices. They depend on the parameter's name and shape alone, so they are the same for every prompt,
run, rank and device. Sketches are formed from the factored uses of gram_rules.py, never from the gradient; they are
linear, so a parameter's uses (a tied embedding and head) add up. A side with at most k entries stays as it is, so a
large enough k gives the exact gradient. Derived in the project's method notes, section 5.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from Gradient_evaluation.gram.layers import Dense, Outer, Rows, widen


class GradientSketch:
    """Sketches of dimension k of the gradients of ``parameters`` {key: (name, parameter)}.

    A sketch of one parameter has at most k*k entries; ``sizes`` {key: entries} in the order of concatenation. The
    matrices, k entries per row and column of a parameter, stay on the parameter's device. ``seed`` draws others.
    """

    def __init__(self, parameters: dict[int, tuple[str, nn.Parameter]], k: int, seed: int = 0):
        self.k, self.seed, self.parameters = k, seed, parameters
        self.matrices: dict[tuple[int, str], torch.Tensor | None] = {}
        self.sizes = {key: self._size(p) for key, (_, p) in parameters.items()}

    def per_sample(self, key: int, use: Outer | Rows | Dense) -> torch.Tensor:
        """Sketch of every sample's gradient through one use of a parameter → (B, sizes[key]) float32 or better."""
        if isinstance(use, Dense):
            return self._of_dense(key, widen(use.g))
        columns = self._matrix(key, "columns")
        if isinstance(use, Rows):
            known = (use.ids >= 0).unsqueeze(-1)
            left = self._rows_of(key, use.ids.clamp(min=0)) * known
            right = widen(use.b) if columns is None else widen(use.b) @ columns
        else:
            rows = self._matrix(key, "rows")
            of_inputs, of_gradients = (rows, columns) if use.transposed else (columns, rows)
            a = _project_inputs(use, of_inputs)
            b = widen(use.b) if of_gradients is None else widen(use.b) @ of_gradients
            left, right = (a, b) if use.transposed else (b, a)
        return torch.bmm(left.transpose(1, 2), right.to(left.dtype)).flatten(1)

    def of_gradient(self, key: int, gradient: torch.Tensor) -> torch.Tensor:
        """Sketch (sizes[key],) of a whole gradient of the parameter's shape."""
        return self._of_dense(key, widen(gradient).reshape(1, -1)).squeeze(0)

    def _of_dense(self, key: int, g: torch.Tensor) -> torch.Tensor:
        p = self.parameters[key][1]
        if p.dim() < 2:
            matrix = self._matrix(key, "vector")
            return g if matrix is None else g @ matrix
        g = g.reshape(len(g), -1, p.shape[-1])
        rows, columns = self._matrix(key, "rows"), self._matrix(key, "columns")
        g = g if rows is None else rows.T @ g
        return (g if columns is None else g @ columns).flatten(1)

    def _rows_of(self, key: int, ids: torch.Tensor) -> torch.Tensor:
        rows = self._matrix(key, "rows")
        if rows is not None:
            return rows[ids]
        return nn.functional.one_hot(ids, len(self.parameters[key][1])).to(torch.float32)

    def _extent(self, p: nn.Parameter, side: str) -> int:
        if side == "vector":
            return p.numel()
        return p.shape[-1] if side == "columns" else p.numel() // p.shape[-1]

    def _size(self, p: nn.Parameter) -> int:
        rows, columns, _, _ = self._shape(p)
        return rows * columns

    def _shape(self, p: nn.Parameter) -> tuple[int, int, bool, bool]:
        """(rows, columns of the sketch, whether the rows, the columns are random combinations)."""
        if p.dim() < 2:
            return 1, min(p.numel(), self.k**2), False, p.numel() > self.k**2
        rows, columns = self._extent(p, "rows"), self._extent(p, "columns")
        return min(rows, self.k), min(columns, self.k), rows > self.k, columns > self.k

    @property
    def layout(self) -> list[tuple[int, int, bool, bool]]:
        """``_shape`` of every parameter in the order of concatenation, for prompt_pairs.py's error of a sketch."""
        return [self._shape(p) for _, p in self.parameters.values()]

    def _matrix(self, key: int, side: str) -> torch.Tensor | None:
        """(extent, width) of entries +-1/sqrt(width) for one side of a parameter; None for the identity."""
        if (key, side) not in self.matrices:
            name, p = self.parameters[key]
            extent, width = self._extent(p, side), self.k**2 if side == "vector" else self.k
            matrix = None
            if extent > width:
                digest = hashlib.sha256(f"{self.seed}/{side}/{name}/{tuple(p.shape)}/{self.k}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                signs = torch.randint(0, 2, (extent, width), generator=generator, dtype=torch.int8)
                dtype = torch.promote_types(p.dtype, torch.float32)
                matrix = (2 * signs - 1).to(p.device, dtype) / width**0.5
            self.matrices[key, side] = matrix
        return self.matrices[key, side]


def _project_inputs(use: Outer, matrix: torch.Tensor | None) -> torch.Tensor:
    """The inputs of a Linear layer times a matrix (None: the identity), shared positions once for all samples."""
    if matrix is None:
        return widen(use.a)
    rest = widen(use.a[:, use.shared :]) @ matrix
    if not use.shared:
        return rest
    shared = widen(use.a[:1, : use.shared]) @ matrix
    return torch.cat([shared.expand(len(rest), -1, -1), rest], 1)
