"""The self-audit: does the score Gram agree, parameter by parameter, with one ordinary backward pass?

For random signs w, w^T Q_p w must equal ||grad_p sum_i w_i log pi_i||^2 for every parameter p. A half-precision model is
audited in float32, where right rules agree to 1e-6: bfloat16 rounding alone would hide a rule that is some percent off.
Its weights are widened in place and narrowed again afterwards, which gives the same values back. Where the wider model
does not fit or does not run, it is audited in its own dtype, with the tolerance that right rules need there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.forward import is_out_of_memory
from Gradient_evaluation.runs.memory import release_memory
from Gradient_evaluation.sampling.generate import Continuation

# Relative error allowed, for matrices and for vectors (biases, norms), by the dtype that rounds most. Right rules on tiny
# models of all families: 1e-6 in float32; 0.005 and 0.006 in float16; 0.006 and 0.05 in bfloat16, whose ordinary
# backward rounds the sums of a norm layer; 0.003 for bfloat16 products. (Some models compute their norms in float32
# whatever their dtype, so float64 is held to 1e-6 only.)
TOLERANCES = {
    torch.float64: (1e-6, 1e-6),
    torch.float32: (1e-3, 1e-3),
    torch.float16: (0.015, 0.03),
    torch.bfloat16: (0.02, 0.1),
}
HALF = (torch.float16, torch.bfloat16)
PIECE = 2**22  # elements of a gradient that are widened to float64 at a time


def audit(score_gram, prompt_ids: Sequence[int], continuations: Sequence[Continuation], seed: int = 0) -> dict:
    """Compare every parameter's Gram with one ordinary backward → the record of the audit.

    score_gram: a ScoreGram. The record holds "parameters" (their number), "max_relative_error", "worst_parameter",
    "tolerance", "dtype" and "block_size". An error is relative to the larger of the squared norm and tr Q_p, or to the
    dtype's rounding of the whole tr Q where both are below it (a key bias without rotary positions has gradient 0).
    Raises UserError naming the module when an error exceeds its tolerance; FloatingPointError when one is not finite.
    """
    return in_float32(score_gram.model, lambda: _compare(score_gram, prompt_ids, continuations, seed), "the self-audit")


def in_float32(model: nn.Module, check: Callable[[], dict], name: str) -> dict:
    """``check()`` with a half-precision model in float32; in its own dtype, and said so, where that does not fit or run.

    name: of the check, for the message.
    """
    own = {p.dtype for p in model.parameters() if p.is_floating_point()} & set(HALF)
    if own:
        try:
            with widened(model):
                return check()
        except (RuntimeError, MemoryError, TypeError) as error:
            why = "out of memory" if is_out_of_memory(error) else str(error).strip().split("\n")[0]
        # Outside the handler, whose traceback keeps the tensors of the attempt alive.
        release_memory()
        narrowest = max(own, key=lambda dtype: TOLERANCES[dtype])
        print(
            f"note: {name} does not run in float32 ({why}); it goes on in {_name(narrowest)}, whose rounding hides small "
            "faults",
            file=sys.stderr,
        )
    return check()


def _compare(score_gram, prompt_ids, continuations, seed: int) -> dict:
    by_parameter, _, _ = score_gram._grams(prompt_ids, continuations)
    signs = torch.from_numpy(np.random.default_rng(seed).choice([-1.0, 1.0], size=len(continuations)))
    norms = _ordinary_backward(score_gram, prompt_ids, continuations, signs)
    parameters = score_gram.parameters
    # Of the whole model: the gradient of a float32 adapter comes through layers in half precision.
    dtypes = {p.dtype for p in score_gram.model.parameters() if p.dtype in TOLERANCES}
    rounds_most = max(dtypes | {score_gram.gram_dtype or next(iter(dtypes))}, key=lambda dtype: TOLERANCES[dtype])
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    if score_gram.gram_dtype is not None:  # each product's own rounding, which is not in one direction
        eps = max(eps, torch.finfo(score_gram.gram_dtype).eps ** 2)
    grams = {key: by_parameter[key].cpu() for key in parameters}
    negligible = eps * sum(float(q.trace()) for q in grams.values())
    errors = {}
    for key, q in grams.items():
        measured, scale = float(signs @ q @ signs), max(norms[key], float(q.trace()), negligible)
        if not np.isfinite([measured, norms[key]]).all():
            raise FloatingPointError(f"the score products of {score_gram.names[key]} are not finite")
        errors[key] = abs(measured - norms[key]) / scale if scale > 0 else 0.0
    allowed = {key: TOLERANCES[rounds_most][parameters[key].dim() < 2] for key in errors}
    worst = max(errors, key=lambda key: errors[key] / allowed[key])
    name = score_gram.names[worst]
    if errors[worst] > allowed[worst]:
        raise UserError(
            f"self-audit of the score Gram: {name} is off by {errors[worst]:.1e} of its squared gradient norm "
            f"(allowed {allowed[worst]:.0e}); this architecture is not measured right, please report it"
        )
    return {
        "parameters": len(errors),
        "max_relative_error": errors[worst],
        "worst_parameter": name,
        "tolerance": allowed[worst],
        "dtype": ", ".join(sorted(map(_name, dtypes))),
        "block_size": len(continuations),
    }


def _ordinary_backward(score_gram, prompt_ids, continuations, signs: torch.Tensor) -> dict[int, float]:
    """{id of parameter: ||grad sum_i w_i log pi_i||^2}, each gradient freed once it is reduced."""
    parameters, norms = score_gram.parameters, {}

    def reduce(p: nn.Parameter) -> None:  # in pieces: the head of a 7B model would be 4 GB in float64
        pieces = p.grad.reshape(-1).split(PIECE)
        norms[id(p)] = norms.get(id(p), 0.0) + sum(piece.double().square().sum() for piece in pieces)
        p.grad = None

    with requires_grad(parameters.values()), torch.enable_grad():
        hooks = [p.register_post_accumulate_grad_hook(reduce) for p in parameters.values()]
        try:
            values = score_gram._log_probs(prompt_ids, continuations)
            (values * signs.to(values)).sum().backward()
        finally:
            for hook in hooks:
                hook.remove()
            for p in parameters.values():  # where the pass broke off, the next one would add to it
                p.grad = None
    return {key: float(norms.get(key, 0.0)) for key in parameters}


@contextmanager
def requires_grad(parameters) -> Iterator[None]:
    """Let the parameters collect gradients inside the block only."""
    parameters = list(parameters)
    for p in parameters:
        p.requires_grad_(True)
    try:
        yield
    finally:
        for p in parameters:
            p.requires_grad_(False)


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """While inside, the model's half-precision parameters and buffers are float32; afterwards they are as before.

    Parameters are widened in place, one at a time, so that there is never a second copy of the model. Every
    half-precision number is one of float32, so narrowing gives the same values back. Buffers are put back themselves.
    """
    parameters, buffers = [], []
    try:
        for module in model.modules():
            for name, x in module.named_buffers(recurse=False):
                if x.dtype in HALF:
                    buffers.append((module, name, x))
                    module._buffers[name] = x.float()
        for p in model.parameters():
            if p.dtype in HALF:
                parameters.append((p, p.dtype))
                p.data = p.data.float()
        yield
    finally:
        for p, dtype in parameters:
            p.data = p.data.to(dtype)
        for module, name, x in buffers:
            module._buffers[name] = x


def _name(dtype: torch.dtype) -> str:
    return str(dtype).split(".")[-1]
