"""The audit: does the score Gram agree, parameter by parameter, with one ordinary backward pass?

For random signs w, w^T Q_p w must equal ||grad_p sum_i w_i log pi_i||^2 for every parameter p. In float32 right rules
agree to 1e-6. Half precision needs a wider tolerance, and bfloat16 rounding alone would hide a rule that is some percent
off: audit such a model in float32 where that fits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.gram.scoring import Scorer, TokenRows, differentiable

if TYPE_CHECKING:
    from Gradient_evaluation.gram.metric import InMetric, ParameterMetric
    from Gradient_evaluation.gram.score_gram import ScoreGram

# Relative error allowed, for matrices and for vectors (biases, norms), by the dtype that rounds most. Right rules on tiny
# models of all families: 1e-6 in float32; 0.005 and 0.006 in float16; 0.006 and 0.05 in bfloat16, whose ordinary
# backward rounds the sums of a norm layer; 0.003 for bfloat16 products. (Some models compute their norms in float32
# whatever their dtype, so float64 is allowed 1e-6 only.)
TOLERANCES = {
    torch.float64: (1e-6, 1e-6),
    torch.float32: (1e-3, 1e-3),
    torch.float16: (0.015, 0.03),
    torch.bfloat16: (0.02, 0.1),
}
PIECE = 2**22  # elements of a gradient that are widened to float64 at a time


def compare(score_gram: ScoreGram, rows: TokenRows, by_parameter: dict[int, torch.Tensor]) -> dict:
    """Compare the Grams ``by_parameter`` of these rows with one ordinary backward; see ScoreGram.audit."""
    signs = torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], size=len(rows.continuations)))
    parameters, names = score_gram.parameters, score_gram.names
    norms = _squared_norms(score_gram.scorer, rows, parameters, signs)
    # Of the whole model: the gradient of a float32 adapter comes through layers in half precision.
    dtypes = {p.dtype for p in score_gram.model.parameters() if p.dtype in TOLERANCES}
    rounds_most = max(dtypes | {score_gram.gram_dtype or next(iter(dtypes))}, key=lambda dtype: TOLERANCES[dtype])
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    if score_gram.gram_dtype is not None:  # each product's own rounding, which is not in one direction
        eps = max(eps, torch.finfo(score_gram.gram_dtype).eps ** 2)
    grams = {key: by_parameter[key].cpu() for key in parameters}
    # Scores so small that their squares underflow (a temperature near 0) tell nothing of a rule.
    negligible = max(eps * sum(float(q.trace()) for q in grams.values()), torch.finfo(torch.float32).tiny)
    errors = {}
    for key, q in grams.items():
        measured, scale = float(signs @ q @ signs), max(norms[key], float(q.trace()), negligible)
        if not np.isfinite([measured, norms[key]]).all():
            raise FloatingPointError(f"the score products of {names[key]} are not finite")
        errors[key] = abs(measured - norms[key]) / scale if scale > 0 else 0.0
    allowed = {key: TOLERANCES[rounds_most][parameters[key].dim() < 2] for key in errors}
    worst = max(errors, key=lambda key: errors[key] / allowed[key])
    if errors[worst] > allowed[worst]:
        raise UserError(
            f"self-audit of the score Gram: {names[worst]} is off by {errors[worst]:.1e} of its squared gradient norm "
            f"(allowed {allowed[worst]:.0e}); this architecture is not measured right, please report it"
        )
    return {
        "parameters": len(errors),
        "max_relative_error": errors[worst],
        "worst_parameter": names[worst],
        "tolerance": allowed[worst],
        "dtype": ", ".join(sorted(str(dtype).split(".")[-1] for dtype in dtypes)),
        "block_size": len(rows.continuations),
    }


def compare_metric(score_gram: ScoreGram, rows: TokenRows, in_metric: InMetric) -> float:
    """The same of all parameters together in the optimiser's metric → the relative error; UserError beyond its tolerance."""
    signs = torch.from_numpy(np.random.default_rng(0).choice([-1.0, 1.0], size=len(rows.continuations)))
    norm = sum(_squared_norms(score_gram.scorer, rows, score_gram.parameters, signs, score_gram.metric).values())
    gram = sum(in_metric.grams.values()).cpu()
    measured, scale = float(signs @ gram @ signs), max(norm, float(gram.trace()))
    error = abs(measured - norm) / scale if scale > 0 else 0.0
    dtypes = {p.dtype for p in score_gram.model.parameters() if p.dtype in TOLERANCES}
    if not error <= (allowed := max(TOLERANCES[dtype][1] for dtype in dtypes)):
        raise UserError(
            f"self-audit of the optimiser's metric: the Gram is off by {error:.1e} of the squared gradient norm (allowed "
            f"{allowed:.0e}); this architecture is not measured right, please report it"
        )
    return error


def _squared_norms(
    scorer: Scorer,
    rows: TokenRows,
    parameters: dict[int, nn.Parameter],
    signs: torch.Tensor,
    metric: dict[int, ParameterMetric] | None = None,
) -> dict[int, float]:
    """{key of a parameter: ||grad sum_i w_i log pi_i||^2}, each gradient freed once it is reduced; metric: in that metric."""
    norms = {}

    def reduce(key: int, gradient: torch.Tensor) -> torch.Tensor:
        # In pieces: the head of a 7B model would be 4 GB in float64.
        pieces = enumerate(gradient.reshape(-1).split(PIECE))
        if metric is not None:
            own, dtype = metric[key], torch.promote_types(gradient.dtype, torch.float32)
            pieces = ((at, own.scale(piece.to(dtype, copy=True), at * PIECE)) for at, piece in pieces)
        norms[key] = sum(piece.double().square().sum() for _, piece in pieces)
        return gradient.new_zeros(()).expand_as(gradient)  # autograd keeps this one to the end, which takes no memory

    with differentiable(parameters.values()), torch.enable_grad():
        for key, p in parameters.items():
            p.register_hook(partial(reduce, key))
        values = scorer.log_probs(rows)
        if values.requires_grad:
            torch.autograd.grad((values * signs.to(values)).sum(), list(parameters.values()), allow_unused=True)
    return {key: float(norms.get(key, 0.0)) for key in parameters}
