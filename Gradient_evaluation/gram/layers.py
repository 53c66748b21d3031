"""How one layer's input and output gradient give its share of the score Gram.

The gradient of sample i with respect to a parameter is a sum over the uses of that parameter in the forward
pass. A use is held in factored form, never as a gradient of the parameter's size per sample:

* Outer (outer_gram.py): a Linear layer, gradient_i = sum_t b_it a_it^T with input a and output gradient b;
* Rows: an embedding, gradient_i[v] = sum over positions t whose id is v of b_it;
* Dense: anything small (biases, norms), the per-sample gradient itself.

``RULES`` maps an exact module class to the function that turns (module, input, output gradient) into uses; to
teach this file a new layer, add one entry. ``uses_by_vjp`` serves every other module that maps a batch to a
batch. ``gram`` contracts the uses of one parameter to Q[i, j] = <gradient_i, gradient_j>. Notation: B samples,
T positions, d_in and d_out features. Products run in float32 or better and are summed in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from Gradient_evaluation.gram.linear import Outer, SymmetricSum, outer_gram, widen


class Rows(NamedTuple):
    """gradient_i[v] = sum_{t: ids_it = v} b_it, ids: (B, T) int64 (negative: no gradient), b: (B, T, d)."""

    ids: torch.Tensor
    b: torch.Tensor


class Dense(NamedTuple):
    """The per-sample gradient g: (B, number of elements of the parameter)."""

    g: torch.Tensor


class UnsupportedUse(Exception):
    """A parameter is used in a way these rules cannot contract; the exact fallback measures it."""


def _flat3(x: torch.Tensor) -> torch.Tensor:
    """(B, ..., d) → (B, T, d)."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def linear_uses(module: nn.Linear, a: torch.Tensor, b: torch.Tensor) -> dict[str, Outer | Dense]:
    a, b = _flat3(a), _flat3(b)
    return {"weight": Outer(a, b), "bias": Dense(widen(b).sum(1))}


def conv1d_uses(module: Conv1D, a: torch.Tensor, b: torch.Tensor) -> dict[str, Outer | Dense]:
    """GPT-2's Conv1D is a Linear whose weight is stored (d_in, d_out)."""
    a, b = _flat3(a), _flat3(b)
    return {"weight": Outer(a, b, transposed=True), "bias": Dense(widen(b).sum(1))}


def embedding_uses(module: nn.Embedding, ids: torch.Tensor, b: torch.Tensor) -> dict[str, Rows]:
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise UnsupportedUse("an embedding with max_norm, scale_grad_by_freq or sparse gradients")
    if module.padding_idx is not None:
        ids = ids.masked_fill(ids == module.padding_idx, -1)
    return {"weight": Rows(ids.reshape(len(ids), -1), _flat3(b))}


RULES = {nn.Linear: linear_uses, Conv1D: conv1d_uses, nn.Embedding: embedding_uses}


def scaled_embedding_uses(module: nn.Embedding, ids: torch.Tensor, b: torch.Tensor) -> dict[str, Rows]:
    """An embedding times the constant ``embed_scale`` (Gemma and others)."""
    return embedding_uses(module, ids, b * _embed_scale(module))


def _embed_scale(module: nn.Embedding) -> torch.Tensor | float:
    """What the module multiplies by: a tensor is rounded to the weight's dtype first, a plain number is not."""
    scale = module.embed_scale
    return scale.to(module.weight) if isinstance(scale, torch.Tensor) else scale


def is_scaled_embedding(module: nn.Module, ids: torch.Tensor, output: torch.Tensor) -> bool:
    """Whether a subclass of Embedding did nothing but look up and multiply by its ``embed_scale``."""
    if not isinstance(module, nn.Embedding) or not isinstance(getattr(module, "embed_scale", None), (torch.Tensor, float, int)):
        return False
    scale = _embed_scale(module)
    if isinstance(scale, torch.Tensor) and scale.numel() != 1:
        return False
    with torch.no_grad():
        expected = nn.functional.embedding(ids, module.weight) * scale
    return expected.shape == output.shape and torch.equal(expected, output.detach())


def uses_by_vjp(module: nn.Module, a: torch.Tensor, b: torch.Tensor, names: list[str]) -> dict[str, Dense]:
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
    return {name: Dense(g.reshape(len(a), -1)) for name, g in per_sample.items()}


def gram(uses: list[Outer | Rows | Dense], budget: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Q (B, B) float64 of one parameter from all its uses. ``budget``: bytes for a temporary; dtype: that of the
    products of a Linear weight, float32 or better when None.
    """
    kinds = {type(use) for use in uses}
    if kinds == {Outer}:
        if len({use.transposed for use in uses}) > 1:
            raise UnsupportedUse("one weight used as it is and transposed")
        whole = uses[0] if len(uses) == 1 else Outer(*(torch.cat([use[i] for use in uses], 1) for i in (0, 1)))
        return outer_gram(whole, budget, dtype)
    if kinds == {Rows}:
        return rows_gram(_join_rows(uses), budget)
    if kinds == {Dense}:
        return dense_gram(sum(use.g for use in uses), budget)
    raise UnsupportedUse("one parameter used by layers of different kinds")


def _join_rows(uses: list[Rows]) -> Rows:
    return uses[0] if len(uses) == 1 else Rows(*(torch.cat(parts, 1) for parts in zip(*uses)))


def dense_gram(g: torch.Tensor, budget: int) -> torch.Tensor:
    """G G^T in float64, over chunks of columns of g (B, n)."""
    total = SymmetricSum(len(g), g.device)
    for part in g.split(max(1, budget // (len(g) * 4)), dim=1):
        total.add(widen(part))
    return total.total()


class _RowSums:
    """Per-sample sums of a Rows use over equal ids: ``ids`` (U,) distinct, ``chunk`` → (B, U, d_chunk)."""

    def __init__(self, use: Rows):
        self.ids, place = torch.unique(use.ids, return_inverse=True)
        self.batch, self.b, self.known = len(use.ids), use.b, self.ids >= 0
        samples = torch.arange(self.batch, device=place.device).unsqueeze(1)
        self.flat = (samples * len(self.ids) + place).flatten()

    def chunk(self, columns: slice) -> torch.Tensor:
        b = widen(self.b[..., columns])
        sums = torch.zeros(self.batch * len(self.ids), b.shape[-1], dtype=b.dtype, device=b.device)
        sums.index_add_(0, self.flat, b.flatten(0, 1))
        return sums.view(self.batch, len(self.ids), -1) * self.known.view(1, -1, 1)


def _column_chunks(width: int, bytes_per_column: int, budget: int) -> list[slice]:
    step = max(1, budget // bytes_per_column)
    return [slice(start, start + step) for start in range(0, width, step)]


def rows_gram(use: Rows, budget: int) -> torch.Tensor:
    """sum over ids v of (sum_{t: id_it = v} b_it) . (sum_{s: id_js = v} b_js)."""
    sums = _RowSums(use)
    total = SymmetricSum(sums.batch, use.b.device)
    for columns in _column_chunks(use.b.shape[-1], sums.batch * len(sums.ids) * 4, budget):
        total.add(sums.chunk(columns).flatten(1))
    return total.total()


class TiedHead(NamedTuple):
    """What the cross terms need of a Linear head that shares its weight with an embedding.

    a: (B, R, d) its input; b: (B, R, U) its output gradient at the ids (U,) the embedding looked up.
    """

    ids: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


def tie(head: Outer, looked_up: list[torch.Tensor]) -> TiedHead:
    """Keep of a head only the columns whose ids the embedding looked up (the rest cannot coincide)."""
    ids = torch.unique(torch.cat([ids.flatten() for ids in looked_up]))
    return TiedHead(ids, head.a, head.b[..., ids])


def tied_cross_gram(embedding: list[Rows], head: TiedHead, budget: int) -> torch.Tensor:
    """C + C^T with C[i, j] = sum_{t,s} b_js[id_it] (e_it . a_js): one weight, used as embedding and as head."""
    if not all(isinstance(use, Rows) for use in embedding):
        raise UnsupportedUse("a head tied to an embedding that does more than look up")
    use = _join_rows(embedding)
    sums = _RowSums(use)
    b = widen(head.b)[..., torch.searchsorted(head.ids, sums.ids.clamp(min=0)).clamp(max=len(head.ids) - 1)]
    cross = torch.zeros(sums.batch, sums.batch, dtype=torch.float64, device=b.device)
    for columns in _column_chunks(use.b.shape[-1], 2 * sums.batch * len(sums.ids) * 4, budget):
        of_head = torch.bmm(b.transpose(1, 2), widen(head.a[..., columns]))
        cross += (sums.chunk(columns).flatten(1) @ of_head.flatten(1).T).double()
    return cross + cross.T
