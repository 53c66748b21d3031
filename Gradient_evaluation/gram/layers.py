"""How the input and the output gradient of one layer give its share of the score Gram.

The gradient of sample i with respect to a parameter is a sum over the uses of that parameter in the forward pass. A use
is kept in factored form, never as a gradient of the parameter's size per sample. There is one class per kind of gradient,
with ``gram`` (the inner products of all samples) and ``sketch`` (sketch.py):

* LinearGradient, a Linear layer: gradient_i = sum_t b_it a_it^T with input a and output gradient b;
* RowsGradient, an embedding: gradient_i[v] = sum over positions t whose id is v of b_it;
* DenseGradient, anything small (biases, norms): the per-sample gradient itself;
* TiedHead, what a head and an embedding with the same weight add to each other.

``RULES`` maps an exact module class to a rule: a function of (module, input, output gradient) that gives one gradient per
parameter of the module itself. ``register`` adds a rule. ``uses_by_vjp`` serves every other module that maps a batch to a
batch. Notation: B samples, T positions, d_in and d_out features. Products run in float32 or better; sums are float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from Gradient_evaluation.gram.linear import SymmetricSum, linear_gram, rows_at_a_time, widen

if TYPE_CHECKING:
    from Gradient_evaluation.gram.sketch import ParameterSketch


class UnsupportedUse(Exception):
    """A parameter is used in a way that no rule can contract. The exact fallback measures it."""


class Gradient:
    """What one use of a parameter adds to the gradient of every sample: the base of all kinds."""

    can_be_head = False  # of an embedding with the same weight

    @property
    def batch(self) -> int:
        """The number of samples B, with which the first tensor of every kind leads."""
        return len(next(iter(vars(self).values())))

    def gram(self, budget: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Q (B, B) float64, Q[i, j] = <gradient_i, gradient_j>.

        budget: bytes of a temporary. dtype: of the products of a Linear weight; None: float32 or better.
        """
        raise NotImplementedError

    def sketch(self, matrices: ParameterSketch) -> torch.Tensor:
        """Sketch of every sample's gradient → (B, matrices.size) float32 or better."""
        raise NotImplementedError

    def slices(self, budget: int, columns: int) -> Iterator[tuple[slice | torch.Tensor, slice, torch.Tensor]]:
        """Every sample's gradient in slices (rows, columns, (B, r, c)) of the parameter as a matrix with so many columns.

        rows: a slice, or the numbers (r,) of the rows; float32 or better. What is in no slice is 0.
        """
        raise UnsupportedUse(f"a {type(self).__name__} gives its gradient in no slices")

    def joined(self, others: list[Gradient]) -> Gradient:
        """The sum of this and other uses of the same parameter. Raises UnsupportedUse when they do not add up."""
        if any(type(other) is not type(self) for other in others):
            raise UnsupportedUse("one parameter used by layers of different kinds")
        return self._sum([self, *others]) if others else self

    def with_shared(self, shared: int) -> Gradient:
        """The same gradient, known to have the same input in its first ``shared`` positions in all samples."""
        return self

    def row_sums(self) -> _RowSums:
        raise UnsupportedUse("a head tied to an embedding that does more than look up")


@dataclass(frozen=True, eq=False)
class LinearGradient(Gradient):
    """gradient_i = sum_t b_it a_it^T, a: (B, T, d_in), b: (B, T, d_out); a Linear weight is (d_out, d_in).

    transposed: the weight is stored (d_in, d_out); shared: the first so many positions have the same input in all samples.
    """

    a: torch.Tensor
    b: torch.Tensor
    transposed: bool = False
    shared: int = 0
    can_be_head = True

    def gram(self, budget: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return linear_gram(self.a, self.b, self.shared, budget, dtype)

    def sketch(self, matrices: ParameterSketch) -> torch.Tensor:
        rows, columns = matrices.rows, matrices.columns
        of_inputs, of_gradients = (rows, columns) if self.transposed else (columns, rows)
        a = self._projected_inputs(of_inputs)
        b = widen(self.b) if of_gradients is None else widen(self.b) @ of_gradients
        left, right = (a, b) if self.transposed else (b, a)
        return torch.bmm(left.transpose(1, 2), right.to(left.dtype)).flatten(1)

    def slices(self, budget: int, columns: int) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        left, right = (self.a, self.b) if self.transposed else (self.b, self.a)
        right = widen(right)
        step = rows_at_a_time(len(right), columns, right.element_size(), budget, right.device)
        for start in range(0, left.shape[-1], step):
            rows = slice(start, min(start + step, left.shape[-1]))
            yield rows, slice(0, columns), torch.bmm(widen(left[..., rows]).transpose(1, 2), right)

    def _projected_inputs(self, matrix: torch.Tensor | None) -> torch.Tensor:
        """The inputs times a matrix (None: the identity), shared positions once for all samples."""
        if matrix is None:
            return widen(self.a)
        rest = widen(self.a[:, self.shared :]) @ matrix
        if not self.shared:
            return rest
        shared = widen(self.a[:1, : self.shared]) @ matrix
        return torch.cat([shared.expand(len(rest), -1, -1), rest], 1)

    def _sum(self, uses: list[LinearGradient]) -> LinearGradient:
        if len({use.transposed for use in uses}) > 1:
            raise UnsupportedUse("one weight used as it is and transposed")
        a, b = torch.cat([use.a for use in uses], 1), torch.cat([use.b for use in uses], 1)
        return LinearGradient(a, b, self.transposed)

    def with_shared(self, shared: int) -> LinearGradient:
        return replace(self, shared=shared)

    def tied_head(self, looked_up: list[torch.Tensor]) -> TiedHead:
        """What must be kept of a head for the embedding of the same weight that looked up these ids."""
        ids = torch.unique(torch.cat([ids.flatten() for ids in looked_up]))
        return TiedHead(ids, self.a, self.b[..., ids])


@dataclass(frozen=True, eq=False)
class RowsGradient(Gradient):
    """gradient_i[v] = sum_{t: ids_it = v} b_it, ids: (B, T) int64 (negative: no gradient), b: (B, T, d)."""

    ids: torch.Tensor
    b: torch.Tensor

    def gram(self, budget: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """sum over ids v of (sum_{t: id_it = v} b_it) . (sum_{s: id_js = v} b_js)."""
        sums = self.row_sums()
        total = SymmetricSum(sums.batch, self.b.device)
        for columns in _column_chunks(self.b.shape[-1], sums.batch * len(sums.ids) * 4, budget):
            total.add(sums.chunk(columns).flatten(1))
        return total.total()

    def sketch(self, matrices: ParameterSketch) -> torch.Tensor:
        known = (self.ids >= 0).unsqueeze(-1)
        left = matrices.of_rows(self.ids.clamp(min=0)) * known
        right = widen(self.b) if matrices.columns is None else widen(self.b) @ matrices.columns
        return torch.bmm(left.transpose(1, 2), right.to(left.dtype)).flatten(1)

    def slices(self, budget: int, columns: int) -> Iterator[tuple[torch.Tensor, slice, torch.Tensor]]:
        sums = self.row_sums()
        for part in _column_chunks(columns, sums.batch * len(sums.ids) * 4, budget):
            yield sums.ids.clamp(min=0), part, sums.chunk(part)

    def _sum(self, uses: list[RowsGradient]) -> RowsGradient:
        return RowsGradient(torch.cat([use.ids for use in uses], 1), torch.cat([use.b for use in uses], 1))

    def row_sums(self) -> _RowSums:
        return _RowSums(self.ids, self.b)


class _RowSums:
    """Per-sample sums over equal ids: ``ids`` (U,) distinct, ``chunk`` → (B, U, d_chunk)."""

    def __init__(self, ids: torch.Tensor, b: torch.Tensor):
        self.ids, index = torch.unique(ids, return_inverse=True)
        self.batch, self.b, self.known = len(ids), b, self.ids >= 0
        samples = torch.arange(self.batch, device=index.device).unsqueeze(1)
        self.flat = (samples * len(self.ids) + index).flatten()

    def chunk(self, columns: slice) -> torch.Tensor:
        b = widen(self.b[..., columns])
        sums = torch.zeros(self.batch * len(self.ids), b.shape[-1], dtype=b.dtype, device=b.device)
        sums.index_add_(0, self.flat, b.flatten(0, 1))
        return sums.view(self.batch, len(self.ids), -1) * self.known.view(1, -1, 1)


def _column_chunks(width: int, bytes_per_column: int, budget: int) -> list[slice]:
    step = max(1, budget // bytes_per_column)
    return [slice(start, min(start + step, width)) for start in range(0, width, step)]


@dataclass(frozen=True, eq=False)
class DenseGradient(Gradient):
    """The per-sample gradient g: (B, number of elements of the parameter)."""

    g: torch.Tensor

    def gram(self, budget: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """G G^T in float64, over chunks of columns."""
        total = SymmetricSum(len(self.g), self.g.device)
        for part in self.g.split(max(1, budget // (len(self.g) * 4)), dim=1):
            total.add(widen(part))
        return total.total()

    def sketch(self, matrices: ParameterSketch) -> torch.Tensor:
        g = widen(self.g)
        if matrices.is_vector:
            return g if matrices.vector is None else g @ matrices.vector
        g = g.reshape(len(g), -1, matrices.parameter.shape[-1])
        g = g if matrices.rows is None else matrices.rows.T @ g
        return (g if matrices.columns is None else g @ matrices.columns).flatten(1)

    def slices(self, budget: int, columns: int) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        g = self.g.reshape(len(self.g), -1, columns)
        step = rows_at_a_time(len(g), columns, 8, budget, g.device)
        for start in range(0, g.shape[1], max(1, step)):
            rows = slice(start, min(start + max(1, step), g.shape[1]))
            yield rows, slice(0, columns), widen(g[:, rows])

    def _sum(self, uses: list[DenseGradient]) -> DenseGradient:
        return DenseGradient(sum(use.g for use in uses))


@dataclass(frozen=True, eq=False)
class TiedHead:
    """What is kept of a Linear head for the embedding that has the same weight; ids that were not looked up cannot meet.

    a: (B, R, d) its input; b: (B, R, U) its output gradient at the ids (U,) that the embedding looked up.
    """

    ids: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor

    def gram(self, embedding: Gradient, budget: int, root: Callable | None = None) -> torch.Tensor:
        """The cross terms C + C^T with C[i, j] = sum_{t,s} b_js[id_it] (e_it . a_js), e the embedding's output gradient.

        root(rows, columns): what both gradients are multiplied by, element by element.
        """
        sums = embedding.row_sums()
        b = widen(self.b)[..., torch.searchsorted(self.ids, sums.ids.clamp(min=0)).clamp(max=len(self.ids) - 1)]
        cross = torch.zeros(sums.batch, sums.batch, dtype=torch.float64, device=b.device)
        for columns in _column_chunks(sums.b.shape[-1], 2 * sums.batch * len(sums.ids) * 4, budget):
            of_head = torch.bmm(b.transpose(1, 2), widen(self.a[..., columns]))
            if root is not None:
                of_head = of_head * root(sums.ids.clamp(min=0), columns).square()
            cross += (sums.chunk(columns).flatten(1) @ of_head.flatten(1).T).double()
        return cross + cross.T


# -- rules: from a layer's input and output gradient to its parameters' gradients ----------------------------

Rule = Callable[[nn.Module, torch.Tensor, torch.Tensor], dict[str, Gradient]]


def _flat3(x: torch.Tensor) -> torch.Tensor:
    """(B, ..., d) → (B, T, d)."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def linear_rule(module: nn.Linear | Conv1D, a: torch.Tensor, b: torch.Tensor) -> dict[str, Gradient]:
    """GPT-2's Conv1D is a Linear whose weight is stored (d_in, d_out)."""
    a, b = _flat3(a), _flat3(b)
    return {"weight": LinearGradient(a, b, isinstance(module, Conv1D)), "bias": DenseGradient(widen(b).sum(1))}


def embedding_rule(module: nn.Embedding, ids: torch.Tensor, b: torch.Tensor) -> dict[str, Gradient]:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise UnsupportedUse("an embedding with max_norm, scale_grad_by_freq or sparse gradients")
    if module.padding_idx is not None:
        ids = ids.masked_fill(ids == module.padding_idx, -1)
    return {"weight": RowsGradient(ids.reshape(len(ids), -1), _flat3(b))}


def scaled_embedding_rule(module: nn.Embedding, ids: torch.Tensor, b: torch.Tensor) -> dict[str, Gradient]:
    """An embedding times the constant ``embed_scale`` (Gemma and others)."""
    return embedding_rule(module, ids, b * _embed_scale(module))


def _unknown_embedding_rule(module: nn.Embedding, ids: torch.Tensor, b: torch.Tensor) -> dict[str, Gradient]:
    """``uses_by_vjp`` would make a gradient as large as the table for every sample."""
    raise UnsupportedUse("an embedding that does more than look up")


RULES: dict[type[nn.Module], Rule] = {nn.Linear: linear_rule, Conv1D: linear_rule, nn.Embedding: embedding_rule}


def register(module_class: type[nn.Module], rule: Rule) -> None:
    """Measure every module of exactly this class by ``rule``; what was registered for the class before is replaced.

    ``rule(module, a, b)`` gets the layer's only input a (B, ..., d_in) and the gradient b (B, ..., d_out) of the summed
    log-probs with respect to its only output. It returns {parameter name: gradient}, the gradient an object of one of the
    kinds above, for every parameter of the module itself. It may raise UnsupportedUse: then the exact fallback measures
    these parameters. The fallback also measures modules of the class that have submodules, take several inputs, or whose
    tensors do not lead with the batch. ScoreGram.audit finds a wrong rule. Raises ValueError for what is no class or rule.

    >>> from Gradient_evaluation.gram import DenseGradient, register
    >>> class Scale(nn.Module):
    ...     def __init__(self, width):
    ...         super().__init__()
    ...         self.scale = nn.Parameter(torch.ones(width))
    ...     def forward(self, x):
    ...         return self.scale * x
    >>> register(Scale, lambda module, a, b: {"scale": DenseGradient((a * b).sum(1))})
    """
    if not (isinstance(module_class, type) and issubclass(module_class, nn.Module)):
        raise ValueError(f"register needs a class of torch.nn.Module, got {module_class!r}")
    if not callable(rule):
        raise ValueError(f"register needs a function of (module, input, output gradient), got {rule!r}")
    RULES[module_class] = rule


def rule_of(module: nn.Module, a: torch.Tensor, output: torch.Tensor) -> Rule | None:
    """The rule for a module that made ``output`` of ``a``; None: ``uses_by_vjp`` serves it."""
    rule = RULES.get(type(module))
    if rule is None and isinstance(module, nn.Embedding):
        return scaled_embedding_rule if _is_scaled_embedding(module, a, output) else _unknown_embedding_rule
    return rule


def _embed_scale(module: nn.Embedding) -> torch.Tensor | float:
    """What the module multiplies by: a tensor is rounded to the weight's dtype first, a plain number is not."""
    scale = module.embed_scale
    return scale.to(module.weight) if isinstance(scale, torch.Tensor) else scale


def _is_scaled_embedding(module: nn.Embedding, ids: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether a subclass of Embedding did nothing but look up and multiply by its ``embed_scale``."""
    if not isinstance(getattr(module, "embed_scale", None), (torch.Tensor, float, int)):
        return False
    scale = _embed_scale(module)
    if isinstance(scale, torch.Tensor) and scale.numel() != 1:
        return False
    with torch.no_grad():
        expected = nn.functional.embedding(ids, module.weight) * scale
    return expected.shape == output.shape and torch.equal(expected, output.detach())


def uses_by_vjp(module: nn.Module, a: torch.Tensor, b: torch.Tensor, names: list[str]) -> dict[str, Gradient]:
    """Per-sample gradients of ``names`` by vmap over the vector-Jacobian product of this module alone.

    For any module whose input and single output lead with the batch dimension. The caller keeps its own hooks
    from firing inside. Memory: B times the module's parameters.
    """
    state = {name: widen(p.detach()) if p.is_floating_point() else p for name, p in module.named_parameters()}
    state |= dict(module.named_buffers())
    wanted = {name: state.pop(name) for name in names}
    if a.is_floating_point():
        a = widen(a)

    def gradient(a_i: torch.Tensor, b_i: torch.Tensor) -> dict[str, torch.Tensor]:
        def run(parameters):
            return torch.func.functional_call(module, {**state, **parameters}, (a_i.unsqueeze(0),)).squeeze(0)

        output, pull_back = torch.func.vjp(run, wanted)
        return pull_back(b_i.to(output.dtype))[0]

    per_sample = torch.func.vmap(gradient)(a, b)
    return {name: DenseGradient(g.reshape(len(a), -1)) for name, g in per_sample.items()}
