"""The Gram of a Linear weight, where nearly all of the arithmetic is.

gradient_i = sum_t b_it a_it^T with the layer's input a and its output gradient b. Three exact ways to
Q[i, j] = <gradient_i, gradient_j>, multiplications counted for B samples of T positions:

* per-sample gradients, a chunk that stays in cache at a time: B T d_in d_out + B^2 d_in d_out;
* "ghost" products, sum_{t,s} (a_it . a_js)(b_it . b_js): (B T)^2 (d_in + d_out);
* a shared prefix: where the first P inputs are the same in every sample, the prefix's share of gradient_i is
  b_i^T a with one matrix a, so <b_i^T a, gradient_j> = <b_i, (a a_j^T) b_j> needs no gradient of the prefix at all:
  B P T d_out + B^2 P d_out, beside one of the other ways for the remaining T - P positions.

Products run in float32 or better, or in ``dtype`` (bfloat16: summed in float32 by the hardware, rounded once), and
are summed in float64. Q is symmetric: only half of it is computed where that saves time.
"""

from __future__ import annotations

import torch

CACHE = 2**22  # bytes of a chunk on a CPU: written and read again before it leaves the cache
ROWS = 32  # of a weight at a time at least, where the budget allows it: products of fewer are slow
HALVES_FROM = 48  # samples from which a product of two halves beats the whole on a CPU
WIDE = 8  # outputs per input from which columns without a gradient are looked for
GHOST_ROWS = 256  # positions at a time in a ghost product


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


def rows_at_a_time(batch: int, columns: int, element_size: int, budget: int, device: torch.device) -> int:
    """Rows of a weight whose per-sample gradients (batch, rows, columns) are formed at a time."""
    unit = batch * columns * element_size
    return max(_chunk(unit, budget, device), min(ROWS, budget // unit))


def linear_gram(a: torch.Tensor, b: torch.Tensor, shared: int, budget: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Q (B, B) float64 by the cheapest of the ways above.

    a: (B, T, d_in), b: (B, T, d_out); shared: the first so many positions of ``a`` are the same in all samples; budget:
    bytes of a temporary.
    """
    batch, length, d_in = a.shape
    d_out, rest = b.shape[-1], length - shared
    apart = _cost(batch, rest, d_in, d_out) + batch * shared * (rest * d_in + (length + batch) * d_out)
    if shared and apart < _cost(batch, length, d_in, d_out):
        q = shared_gram(a, b, shared, budget, dtype)
        return q + linear_gram(a[:, shared:], b[:, shared:], 0, budget, dtype) if rest else q
    ghost, materialised = _costs(batch, length, d_in, d_out)
    return (ghost_gram if ghost < materialised else materialised_gram)(a, b, budget, dtype)


def _costs(batch: int, length: int, d_in: int, d_out: int) -> tuple[float, float]:
    """Multiplications of the ghost and of the per-sample way, with what symmetry saves."""
    half = 0.75 if batch >= HALVES_FROM else 1.0
    return (0.5 * (batch * length) ** 2 * (d_in + d_out), batch * length * d_in * d_out + half * batch**2 * d_in * d_out)


def _cost(*sizes: int) -> float:
    return min(_costs(*sizes))


def materialised_gram(a: torch.Tensor, b: torch.Tensor, budget: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``linear_gram`` through per-sample gradients, a chunk of rows of the weight at a time."""
    batch, _, d_in = a.shape
    a, total = widen(a, dtype), SymmetricSum(batch, a.device)
    rows = min(b.shape[-1], rows_at_a_time(batch, d_in, a.element_size(), budget, a.device))
    buffer = a.new_empty(batch * rows * d_in)
    for part in b.split(rows, dim=-1):
        per_sample = buffer[: batch * part.shape[-1] * d_in].view(batch, -1, d_in)
        torch.bmm(widen(part, dtype).transpose(1, 2), a, out=per_sample)
        total.add(per_sample.flatten(1))
    return total.total()


def shared_gram(a: torch.Tensor, b: torch.Tensor, shared: int, budget: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """What the first ``shared`` positions add to ``linear_gram`` of the remaining ones.

    With gradient_i = P_i + R_i, the prefix's and the remaining share, <P_i, P_j> + <P_i, R_j> + <R_i, P_j> is Z + Z^T with
    Z_ij = <b_i, (c c^T / 2) b_j> + <b_i, (c r_j^T) s_j>, c the shared inputs, b_i the prefix's output gradients, r_j
    and s_j the inputs and output gradients of the remaining positions.
    """
    batch, length, _ = a.shape
    d_out, same = b.shape[-1], widen(a[0, :shared], dtype)
    mix = same.new_empty(batch, shared, length)
    mix[:, :, :shared] = (same @ same.T) / 2
    if length > shared:
        torch.matmul(same, widen(a[:, shared:], dtype).transpose(1, 2), out=mix[:, :, shared:])
    z = torch.zeros(batch, batch, dtype=torch.float64, device=same.device)
    for part in b.split(min(d_out, _chunk(batch * shared * same.element_size(), budget, same.device)), dim=-1):
        part = widen(part, dtype)
        z += product(part[:, :shared].flatten(1), torch.bmm(mix, part).flatten(1).T)
    return z + z.T


def ghost_gram(a: torch.Tensor, b: torch.Tensor, budget: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``linear_gram`` as sum_{t,s} (a_it . a_js)(b_it . b_js), over the positions whose gradient is not 0."""
    batch, length, _ = a.shape
    a, b = widen(a, dtype).flatten(0, 1), widen(b, dtype).flatten(0, 1)
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
