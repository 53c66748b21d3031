"""Parameters that no rule can read (fused experts, a parameter used outside its module, ...): ordinary backward passes."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch import nn

from Gradient_evaluation.gram.layers import DenseGradient
from Gradient_evaluation.gram.linear import widen
from Gradient_evaluation.gram.metric import InMetric
from Gradient_evaluation.gram.scoring import Scorer, TokenRows, differentiable
from Gradient_evaluation.gram.sketch import CombinationSketches


class ExactFallback:
    """Grams and sketches from ordinary backward passes, one per sample or combination.

    names: {key: name of a parameter}; budget: bytes of the per-sample gradients that are kept at a time. Every method
    takes ``parameters`` {key: parameter}, those to measure.
    """

    def __init__(self, scorer: Scorer, names: dict[int, str], budget: int):
        self.scorer, self.names, self.budget = scorer, names, budget
        self.said: set[str] = set()

    def grams(
        self, rows: TokenRows, parameters: dict[int, nn.Parameter], in_metric: InMetric | None = None
    ) -> dict[int, torch.Tensor]:
        """{key: Q (B, B) float64}, by one backward per sample and slice of the parameters; says their cost once.

        in_metric: its Grams of these parameters are made anew.
        """
        n, device = len(rows.continuations), self.scorer.model.device
        grams = {key: torch.zeros(n, n, dtype=torch.float64, device=device) for key in parameters}
        if in_metric is not None:
            in_metric.grams |= {key: torch.zeros_like(gram) for key, gram in grams.items()}
        sizes = {key: parameters[key].numel() for key in self._used(rows, parameters)}
        slices = list(_slices(sizes, self.budget // (4 * n)))
        self._say_cost(sizes, len(slices))
        for parts in slices:
            wanted = [parameters[key] for key, _, _ in parts]
            gradients = [
                torch.empty(n, stop - start, device=device, dtype=torch.promote_types(p.dtype, torch.float32))
                for p, (_, start, stop) in zip(wanted, parts)
            ]
            for i in range(n):
                with differentiable(wanted), torch.enable_grad():
                    value = self.scorer.log_probs(rows.only(i)).sum()
                    whole = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
                for kept, gradient, (_, start, stop) in zip(gradients, whole, parts):
                    kept[i] = gradient.flatten()[start:stop]
            for kept, (key, start, _) in zip(gradients, parts):
                grams[key] += DenseGradient(kept).gram(self.budget)
                if in_metric is not None:
                    in_metric.put(key, DenseGradient(in_metric.metric[key].scale(kept, start)).gram(self.budget))
        return grams

    def add_sketches(
        self,
        rows: TokenRows,
        parameters: dict[int, nn.Parameter],
        sketches: CombinationSketches,
        in_metric: InMetric | None = None,
    ) -> None:
        """Add the parameters' share to the sketches, from one backward per combination of scores."""
        found, scaled = [], []
        for combination in sketches.weights:
            with differentiable(parameters.values()), torch.enable_grad():
                value = self.scorer.log_probs(rows)
                gradients = torch.autograd.grad(
                    (value * combination.to(value.dtype)).sum(),
                    list(parameters.values()),
                    allow_unused=True,
                    materialize_grads=True,
                )
            found.append([sketches.sketch.of_gradient(key, g) for key, g in zip(parameters, gradients)])
            if in_metric is not None:
                gradients = [in_metric.metric[key].scale(widen(g).flatten().clone()) for key, g in zip(parameters, gradients)]
                scaled.append([sketches.sketch.of_gradient(key, g) for key, g in zip(parameters, gradients)])
        sketches.sums |= {key: torch.stack(parts) for key, parts in zip(parameters, zip(*found))}
        if in_metric is not None:
            in_metric.sketches.sums |= {key: torch.stack(parts) for key, parts in zip(parameters, zip(*scaled))}

    def _used(self, rows: TokenRows, parameters: dict[int, nn.Parameter]) -> list[int]:
        """Those of the parameters that the log-probs depend on at all (a vision tower, say, is not)."""
        with differentiable(parameters.values()), torch.enable_grad():
            value = self.scorer.log_probs(rows).sum()
            if not value.requires_grad:
                return []
            gradients = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
        return [key for key, gradient in zip(parameters, gradients) if gradient is not None]

    def _say_cost(self, sizes: dict[int, int], passes: int) -> None:
        new = [self.names[key] for key in sizes if self.names[key] not in self.said]
        if new:
            self.said.update(new)
            print(
                f"note: {len(sizes)} parameters ({sum(sizes.values()):,} elements; the first is {new[0]}) are of a kind the "
                f"Gram rules do not read; measured exactly at {passes} extra backward pass(es) per continuation",
                file=sys.stderr,
            )


def _slices(sizes: dict[int, int], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut parameters {key: elements} into lists of (key, start, stop) of at most ``most`` elements each."""
    most, parts, room = max(1, most), [], max(1, most)
    for key, size in sizes.items():
        start = 0
        while start < size:
            stop = min(size, start + room)
            parts.append((key, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield parts
                parts, room = [], most
    if parts:
        yield parts
