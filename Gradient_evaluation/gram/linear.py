"""The Gram of a Linear weight, where nearly all of the arithmetic is.

gradient_i = sum_t b_it a_it^T with the layer's input a and its output gradient b. Three exact ways to
Q[i, j] = <gradient_i, gradient_j>, multiplications counted for B samples of T positions:

* per-sample gradients, a chunk that stays in cache at a time: B T d_in d_out + B^2 d_in d_out;
* "ghost" products, sum_{t,s} (a_it . a_js)(b_it . b_js): (B T)^2 (d_in + d_out);
* a shared prompt: where the first P inputs are the same in every sample, the prompt's share of gradient_i is
  b_i^T a with one matrix a, so <b_i^T a, gradient_j> = <b_i, (a a_j^T) b_j> needs no gradient of the prompt at all:
  B P T d_out + B^2 P d_out, beside one of the other ways for the remaining T - P positions.

Products run in float32 or better, or in ``dtype`` (bfloat16: summed in float32 by the hardware, rounded once), and
are summed in float64. Q is symmetric: only half of it is computed where that saves time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

CACHE = 2**22  # bytes of a chunk on a CPU: written and read again before it leaves the cache
ROWS = 32  # of a weight at a time at least, where the budget allows it: products of fewer are slow
HALVES_FROM = 48  # samples from which a product of two halves beats the whole on a CPU
WIDE = 8  # outputs per input from which columns without a gradient are looked for
GHOST_ROWS = 256  # positions at a time in a ghost product


class Outer(NamedTuple):
    """gradient_i = sum_t b_it a_it^T, a: (B, T, d_in), b: (B, T, d_out); a Linear weight is (d_out, d_in).

    transposed: the weight is stored (d_in, d_out); shared: the first so many positions have one input for all.
    """

    a: torch.Tensor
    b: torch.Tensor
    transposed: bool = False
    shared: int = 0


def widen(x: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """float32 or better, or the given dtype."""
    return x.to(dtype or torch.promote_types(x.dtype, torch.float32))


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x @ y of two matrices in float32 or better; of half-precision ones summed in float32."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, y, out_dtype=torch.float32)
    return widen(x @ y)


class SymmetricSum:
    """A sum of products x x^T (B, B) in float64, of which a CPU computes the upper half alone."""

    def __init__(self, batch: int, device: torch.device):
        self.q = torch.zeros(batch, batch, dtype=torch.float64, device=device)
        self.half = batch // 2 if device.type == "cpu" and batch >= HALVES_FROM else 0

    def add(self, x: torch.Tensor) -> None:
        """Add x x^T, x: (B, n)."""
        h = self.half
        if h:
            self.q[:h] += product(x[:h], x.T)
        self.q[h:, h:] += product(x[h:], x[h:].T)

    def total(self) -> torch.Tensor:
        self.q[self.half :, : self.half] = self.q[: self.half, self.half :].T
        return self.q


def _chunk(bytes_per_unit: int, budget: int, device: torch.device) -> int:
    return max(1, min(budget, CACHE if device.type == "cpu" else budget) // bytes_per_unit)


def outer_gram(use: Outer, budget: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Q (B, B) float64 by the cheapest of the ways above. ``budget``: bytes of a temporary."""
    batch, length, d_in = use.a.shape
    d_out, shared = use.b.shape[-1], use.shared
    apart = _cost(batch, length - shared, d_in, d_out) + batch * shared * ((length - shared) * d_in + (length + batch) * d_out)
    if shared and apart < _cost(batch, length, d_in, d_out):
        rest = Outer(use.a[:, shared:], use.b[:, shared:])
        q = shared_gram(use, budget, dtype)
        return q + outer_gram(rest, budget, dtype) if length > shared else q
    ghost, materialised = _costs(batch, length, d_in, d_out)
    return (ghost_gram if ghost < materialised else materialised_gram)(use, budget, dtype)


def _costs(batch: int, length: int, d_in: int, d_out: int) -> tuple[float, float]:
    """Multiplications of the ghost and of the per-sample way, with what symmetry saves."""
    half = 0.75 if batch >= HALVES_FROM else 1.0
    return (0.5 * (batch * length) ** 2 * (d_in + d_out), batch * length * d_in * d_out + half * batch**2 * d_in * d_out)


def _cost(*sizes: int) -> float:
    return min(_costs(*sizes))


def materialised_gram(use: Outer, budget: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``outer_gram`` through per-sample gradients, a chunk of rows of the weight at a time."""
    batch, _, d_in = use.a.shape
    a, total = widen(use.a, dtype), SymmetricSum(batch, use.a.device)
    unit = batch * d_in * a.element_size()
    rows = min(use.b.shape[-1], max(_chunk(unit, budget, a.device), min(ROWS, budget // unit)))
    buffer = a.new_empty(batch * rows * d_in)
    for b in use.b.split(rows, dim=-1):
        per_sample = buffer[: batch * b.shape[-1] * d_in].view(batch, -1, d_in)
        torch.bmm(widen(b, dtype).transpose(1, 2), a, out=per_sample)
        total.add(per_sample.flatten(1))
    return total.total()


def shared_gram(use: Outer, budget: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What the first ``use.shared`` positions add to ``outer_gram`` of the remaining ones.

    With G = P_i + R_i, the prompt's and the remaining share, <P_i, P_j> + <P_i, R_j> + <R_i, P_j> is Z + Z^T with
    Z_ij = <b_i, (a a^T / 2) b_j> + <b_i, (a r_j^T) s_j>, a the shared inputs, b_i the prompt's output gradients, r_j
    and s_j the inputs and output gradients of the remaining positions.
    """
    batch, length, _ = use.a.shape
    shared, d_out = use.shared, use.b.shape[-1]
    a = widen(use.a[0, :shared], dtype)
    mix = a.new_empty(batch, shared, length)
    mix[:, :, :shared] = (a @ a.T) / 2
    if length > shared:
        torch.matmul(a, widen(use.a[:, shared:], dtype).transpose(1, 2), out=mix[:, :, shared:])
    z = torch.zeros(batch, batch, dtype=torch.float64, device=a.device)
    for b in use.b.split(min(d_out, _chunk(batch * shared * a.element_size(), budget, a.device)), dim=-1):
        b = widen(b, dtype)
        z += product(b[:, :shared].flatten(1), torch.bmm(mix, b).flatten(1).T)
    return z + z.T


def ghost_gram(use: Outer, budget: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``outer_gram`` as sum_{t,s} (a_it . a_js)(b_it . b_js), over the positions whose gradient is not 0."""
    batch, length, _ = use.a.shape
    a, b = widen(use.a, dtype).flatten(0, 1), widen(use.b, dtype).flatten(0, 1)
    used = b != 0
    live = used.any(1).nonzero().squeeze(1)
    if b.shape[1] > WIDE * a.shape[1]:  # a head: top_p and top_k leave most of a vocabulary without a gradient
        columns = used.any(0).nonzero().squeeze(1)
        b = b[:, columns] if 2 * len(columns) < b.shape[1] else b
    if len(live) < len(b):
        a, b = a[live], b[live]
    to_sample = torch.zeros(len(live), batch, dtype=torch.promote_types(a.dtype, torch.float32), device=a.device)
    to_sample[torch.arange(len(live), device=a.device), live // length] = 1.0
    diagonal, upper = torch.zeros(2, batch, batch, dtype=torch.float64, device=a.device)
    rows = max(1, min(GHOST_ROWS, budget // (8 * max(1, len(live)))))
    for start in range(0, len(live), rows):
        part = slice(start, start + rows)
        products = product(a[part], a[start:].T) * product(b[part], b[start:].T)
        mine, width = to_sample[part], len(a[part])
        diagonal += (mine.T @ (products[:, :width] @ mine)).double()
        upper += (mine.T @ (products[:, width:] @ to_sample[start + width :])).double()
    return diagonal + upper + upper.T
