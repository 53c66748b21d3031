"""Inner products in an optimiser's metric: <g, h>_D = sum_p g_p h_p / D_p with D_p = sqrt(v_p / c) + eps.

Under Adam a step is D^-1 m, where v is the running mean of squared gradients and c = 1 - beta2^steps corrects its start at
0. The noise of the step u = D^-1 ghat has the natural size u^T D u = <ghat, ghat>_D. With this Gram every formula of
docs/method.md holds as it stands.

Elementwise weights leave no factored product, so per-sample gradients are formed, a slice of a parameter at a time. v stays
where it is (on the CPU, or in a file that is mapped into memory): only the slice at hand is moved to the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from Gradient_evaluation.gram.layers import Gradient, TiedHead
from Gradient_evaluation.gram.linear import SymmetricSum
from Gradient_evaluation.gram.sketch import CombinationSketches

PIECE = 2**22  # elements of a whole gradient that are scaled at a time
Rows = slice | torch.Tensor  # or int64 numbers (r,)


@dataclass(frozen=True)
class SecondMoment:
    """Adam's v of one parameter, of its shape, on any device; correction c = 1 - beta2^steps, 1 where v is corrected; eps."""

    v: torch.Tensor
    correction: float = 1.0
    eps: float = 1e-8


class ParameterMetric:
    """1 / sqrt(D) of one parameter, in slices on the parameter's device and in its dtype, at least float32."""

    def __init__(self, parameter: nn.Parameter, moment: SecondMoment):
        self.parameter, self.moment = parameter, moment
        self.columns = parameter.shape[-1] if parameter.dim() > 1 else parameter.numel()
        self.flat = moment.v.reshape(-1)
        self.matrix = self.flat.view(-1, self.columns)

    def root(self, rows: Rows, columns: slice) -> torch.Tensor:
        """Of the parameter as a matrix (all dimensions but the last are rows; a vector is one row)."""
        return self._root(self.matrix[rows if isinstance(rows, slice) else rows.to(self.matrix.device), columns])

    def scale(self, gradients: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Multiply gradients (..., n), those of the flat parameter's elements from ``start`` on, in place."""
        for at in range(0, gradients.shape[-1], PIECE):
            part = gradients[..., at : at + PIECE]
            part *= self._root(self.flat[start + at : start + at + part.shape[-1]])
        return gradients

    def _root(self, v: torch.Tensor) -> torch.Tensor:
        v = v.to(self.parameter.device, torch.promote_types(self.parameter.dtype, torch.float32))
        return ((v / self.moment.correction).sqrt() + self.moment.eps).rsqrt()


def metric_of(
    moments: Mapping[str, SecondMoment], names: Mapping[int, str], parameters: Mapping[int, nn.Parameter]
) -> dict[int, ParameterMetric]:
    """{key: ParameterMetric} of the measured parameters. ValueError for one without a second moment of its shape."""
    missing = [name for name in names.values() if name not in moments]
    if missing:
        raise ValueError(
            f"metric: {len(missing)} of the {len(names)} measured parameters have no second moment, the first is {missing[0]}; "
            "were they frozen in that training? --params chooses what is measured"
        )
    for key, name in names.items():
        if moments[name].v.shape != parameters[key].shape:
            raise ValueError(
                f"metric: the second moment of {name} has the shape {tuple(moments[name].v.shape)}, the parameter "
                f"{tuple(parameters[key].shape)}; give the whole state of the model that is measured, not a shard"
            )
    return {key: ParameterMetric(parameters[key], moments[name]) for key, name in names.items()}


class InMetric:
    """The Grams and sketches of one block in the metric, added up as gradients arrive.

    metric {key: ParameterMetric}; budget: bytes of a temporary; sketches: of the scaled gradients, or None. ``grams`` {key:
    (B, B) float64}.
    """

    def __init__(self, metric: Mapping[int, ParameterMetric], budget: int, sketches: CombinationSketches | None):
        self.metric, self.budget, self.sketches = metric, budget, sketches
        self.grams: dict[int, torch.Tensor] = {}

    def add(self, key: int, use: Gradient) -> None:
        """Add the gradient of a parameter: all its uses together, or one that meets another in ``add_tied``."""
        of, total = self.metric[key], None
        for rows, columns, part in use.slices(self.budget, of.columns):
            part = part * of.root(rows, columns)
            total = total or SymmetricSum(len(part), part.device)
            total.add(part.flatten(1))
            if self.sketches is not None:
                self.sketches.add_slice(key, rows, columns, part)
        self.put(key, total.total())

    def add_tied(self, key: int, head: TiedHead, embedding: Gradient) -> None:
        """Add the products between a head and the embedding of the same weight."""
        self.put(key, head.gram(embedding, self.budget, self.metric[key].root))

    def put(self, key: int, gram: torch.Tensor) -> None:
        self.grams[key] = self.grams[key] + gram if key in self.grams else gram
