"""The score Gram of a block of continuations: one forward, one backward, nothing parameter-sized.

Every estimator of interest is linear in the scores g_i = grad log pi(Y_i | x), so all its second moments are
functions of the rewards and of Q[i, j] = <g_i, g_j>. ``ScoreGram.block`` builds Q (B, B) for B continuations
of one prompt from a single backward of sum_i log pi(Y_i | x): samples do not interact in a forward pass, so a
layer's output gradient carries each sample's own share, and gram_rules.py contracts it with the layer's input
as soon as it arrives. Parameters are frozen; only activations carry gradients.

What the rules cannot read (fused experts, a parameter used outside its module, ...) is measured exactly by
one backward per sample for those parameters alone, in slices; this is said once with its cost. ``audit``
compares, parameter by parameter, with one ordinary backward.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.forward import padding_position, position_ids, takes_positions
from Gradient_evaluation.gram import layers as gram_rules
from Gradient_evaluation.gram import self_audit
from Gradient_evaluation.gram.capture import GramCapture, leading_with_batch
from Gradient_evaluation.gram.checkpointing import check_checkpointable, checkpointed_layers
from Gradient_evaluation.gram.kept_prefix import prompt_kept_once
from Gradient_evaluation.gram.self_audit import requires_grad
from Gradient_evaluation.gram.shared_prefix import shared_prompt
from Gradient_evaluation.gram.sketch import GradientSketch
from Gradient_evaluation.sampling.generate import Continuation, SamplingLaw, log_probs


@dataclass(frozen=True)
class Block:
    """What one block gives. gram: (B, B) float64; log_probs: (B,) float64; by_module: (modules, B, B) float64,
    in the order of ``ScoreGram.modules``, adding up to gram, None unless asked for; sketch: (E, S) float32, the
    sketches of sum_i weights_ei g_i, None without a sketch.
    """

    gram: np.ndarray
    log_probs: np.ndarray
    by_module: np.ndarray | None = None
    sketch: np.ndarray | None = None


class ScoreGram:
    """Builds score Grams of one model. Freezes the model's parameters for good.

    model: a causal language model in eval mode; the parameters measured are those with requires_grad (under
    LoRA only the adapters), and with ``params`` only those whose name that regular expression finds. law: the
    sampling law whose log-probs are differentiated. scoring: "exact", or "published" for the paper's released
    evaluation (full softmax at temperature 1, end-of-sequence left out). budget: bytes of a temporary while a
    layer is contracted. sketch_dim: k of gradient_sketch.py, 0 for none. gradient_checkpointing: keep one
    activation per layer and run every layer again in the backward pass (the same Gram, less memory, more time).
    gram_dtype: of the products of a Linear layer's inputs and gradients, one of flags.GRAM_DTYPES.
    Raises UserError when no parameter is chosen or the model's layers cannot be checkpointed.
    """

    def __init__(
        self,
        model: nn.Module,
        law: SamplingLaw,
        scoring: str = "exact",
        budget: int = 64 * 2**20,
        params: str | None = None,
        sketch_dim: int = 0,
        sketch_seed: int = 0,
        gradient_checkpointing: bool = False,
        gram_dtype: str = "float32",
    ):
        self.model = model.eval()
        self.sampled_law = law
        self.law = law if scoring == "exact" else SamplingLaw()
        self.score_eos = scoring == "exact"
        self.budget = budget
        # None: float32, or the model's own dtype where it is wider; bfloat16: rounded once per product, summed in float32
        self.gram_dtype = None if gram_dtype == "float32" else getattr(torch, gram_dtype)
        self.gradient_checkpointing = gradient_checkpointing
        if gradient_checkpointing:
            check_checkpointable(model)
        chosen = {
            name: p for name, p in model.named_parameters() if p.requires_grad and (params is None or re.search(params, name))
        }
        if not chosen:
            raise UserError(
                "the model has no parameter with requires_grad"
                if params is None
                else f"--params {params}: finds no parameter; names look like {next(iter(model.named_parameters()))[0]}"
            )
        self.names = {id(p): name for name, p in chosen.items()}
        self.parameters = {id(p): p for p in chosen.values()}
        self.modules = sorted({_module_of(name) for name in chosen}, key=_natural_order)
        self.takes_positions, self.padding_position = takes_positions(model), padding_position(model)
        self.sketch = None
        if sketch_dim:
            named = {key: (self.names[key], p) for key, p in self.parameters.items()}
            self.sketch = GradientSketch(named, sketch_dim, sketch_seed)
        self._said: set[str] = set()
        self._leading: set[nn.Module] | None = None  # modules whose inputs and outputs lead with the batch
        for p in model.parameters():
            p.requires_grad_(False)

    def block(
        self,
        prompt_ids: Sequence[int],
        continuations: Sequence[Continuation],
        by_module: bool = False,
        weights: np.ndarray | None = None,
    ) -> Block:
        """Gram and log-probs of the B continuations (at least one) of one prompt, and the Gram of every module.

        weights (E, B): with a sketch_dim, the combinations of scores to sketch, from the same backward. Raises
        FloatingPointError when a log-prob or the Gram is not finite.
        """
        by_parameter, log_probs_of_rows, sketch = self._grams(prompt_ids, continuations, weights)
        gram = sum(by_parameter.values()).cpu().numpy()
        values = log_probs_of_rows.double().cpu().numpy()
        if not (np.isfinite(gram).all() and np.isfinite(values).all()):
            raise FloatingPointError("a log-prob or a score product is not finite")
        return Block(gram, values, self._by_module(by_parameter) if by_module else None, sketch)

    def _by_module(self, by_parameter: dict[int, torch.Tensor]) -> np.ndarray:
        first = next(iter(by_parameter.values()))
        grams = torch.zeros(len(self.modules), *first.shape, dtype=torch.float64, device=first.device)
        place = {module: i for i, module in enumerate(self.modules)}
        for key, gram in by_parameter.items():
            grams[place[_module_of(self.names[key])]] += gram
        return grams.cpu().numpy()

    def audit(self, prompt_ids: Sequence[int], continuations: Sequence[Continuation], seed: int = 0) -> dict:
        """Compare every parameter's Gram with one ordinary backward → the record of the audit (self_audit.py).

        Raises UserError naming the module when one is measured wrongly.
        """
        return self_audit.audit(self, prompt_ids, continuations, seed)

    # -- the forward pass --------------------------------------------------------------------------------

    def _scored_length(self, continuation: Continuation) -> int:
        return len(continuation.tokens) - (continuation.ended and not self.score_eos)

    def _log_probs(self, prompt_ids, continuations) -> torch.Tensor:
        """log pi(Y_i | x) (B,), with its graph. Rows are padded on the right and masked by position."""
        device = self.model.device
        logits, targets = self._logits(prompt_ids, continuations)
        scored = torch.zeros(targets.shape, dtype=torch.bool)
        for row, continuation in enumerate(continuations):
            scored[row, : self._scored_length(continuation)] = True
        return log_probs(logits, targets, self.law).masked_fill(~scored.to(device), 0.0).sum(dim=1)

    def _logits(self, prompt_ids, continuations) -> tuple[torch.Tensor, torch.Tensor]:
        """(logits (B, longest, vocabulary), the tokens they are to predict (B, longest), padded with 0)."""
        device = self.model.device
        longest = max(len(c.tokens) for c in continuations)
        targets = torch.zeros(len(continuations), longest, dtype=torch.int64)
        for row, continuation in enumerate(continuations):
            targets[row, : len(continuation.tokens)] = torch.tensor(continuation.tokens)
        targets = targets.to(device)
        prompt = torch.tensor([list(prompt_ids)], device=device).expand(len(continuations), -1)
        inputs = torch.cat([prompt, targets[:, :-1]], dim=1)
        settings = {"use_cache": False, "logits_to_keep": longest, "attention_mask": torch.ones_like(inputs)}
        if self.takes_positions:  # one row each, so that learned positions keep a gradient per sample
            settings["position_ids"] = position_ids(self.padding_position, inputs)
        with checkpointed_layers(self.model, self.gradient_checkpointing):
            return self.model(input_ids=inputs, **settings).logits, targets

    @torch.no_grad()
    def logits(self, prompt_ids, continuations) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits of the scoring pass (B, longest, vocabulary) and the tokens they are to predict (B, longest)."""
        size, longest = len(continuations), max(len(c.tokens) for c in continuations)
        leading = self._leading_modules(prompt_ids, continuations)
        with shared_prompt(leading, size, len(prompt_ids) + longest - 1, len(prompt_ids)):
            return self._logits(prompt_ids, continuations)

    def _leading_modules(self, prompt_ids, continuations) -> set[nn.Module]:
        """The modules whose tensors lead with the batch, found once."""
        if self._leading is None:
            self._leading = leading_with_batch(
                self.model, lambda rows: self._log_probs(prompt_ids, list(continuations[:1]) * rows)
            )
        return self._leading

    # -- the Gram ----------------------------------------------------------------------------------------

    def _grams(self, prompt_ids, continuations, weights=None):
        """({id of parameter: Q_p (B, B) float64}, log-probs (B,), sketch (E, S) or None)."""
        sketch = None if weights is None else self.sketch
        if sketch is not None:
            weights = torch.as_tensor(weights, dtype=torch.float64, device=self.model.device)
        leading = self._leading_modules(prompt_ids, continuations)
        longest = max(len(c.tokens) for c in continuations)
        size, prompt = len(continuations), len(prompt_ids)
        capture = GramCapture(
            self.model, self.parameters, size, prompt, longest, self.budget, sketch, weights, self.gram_dtype, leading
        )
        length = prompt + longest - 1
        with capture, shared_prompt(leading, size, length, prompt), torch.enable_grad():
            with prompt_kept_once(size, length, prompt):
                values = self._log_probs(prompt_ids, continuations)
            if values.requires_grad:
                capture.backward(values.sum())
        grams = capture.finish()
        missing = [key for key in self.parameters if key not in grams]
        if missing:
            grams |= self._fallback(prompt_ids, continuations, missing)
        if sketch is None:
            return grams, values.detach(), None
        sketches = capture.sketches | self._sketches_by_backward(prompt_ids, continuations, weights, missing)
        whole = torch.cat([sketches[key].float() for key in self.parameters], dim=1)
        return grams, values.detach(), whole.cpu().numpy()

    def _sketches_by_backward(self, prompt_ids, continuations, weights, keys) -> dict[int, torch.Tensor]:
        """Sketches of the parameters the rules cannot read, from one ordinary backward per combination."""
        wanted, rows = [self.parameters[key] for key in keys], []
        for combination in weights if keys else ():
            with requires_grad(wanted), torch.enable_grad():
                value = self._log_probs(prompt_ids, continuations)
                gradients = torch.autograd.grad(
                    (value * combination.to(value.dtype)).sum(), wanted, allow_unused=True, materialize_grads=True
                )
            rows.append([self.sketch.of_gradient(key, g) for key, g in zip(keys, gradients)])
        return {key: torch.stack(parts) for key, parts in zip(keys, zip(*rows))}

    def _fallback(self, prompt_ids, continuations, keys) -> dict[int, torch.Tensor]:
        """Exact Grams of the parameters the rules cannot read: one backward per sample, in slices."""
        n, device = len(continuations), self.model.device
        grams = {key: torch.zeros(n, n, dtype=torch.float64, device=device) for key in keys}
        used = self._used(prompt_ids, continuations, keys)
        size = sum(self.parameters[key].numel() for key in used)
        slices = list(_slices([(key, self.parameters[key].numel()) for key in used], self.budget // (4 * n)))
        self._say_fallback(used, size, len(slices))
        for parts in slices:
            rows = [
                torch.empty(
                    n, stop - start, device=device, dtype=torch.promote_types(self.parameters[key].dtype, torch.float32)
                )
                for key, start, stop in parts
            ]
            wanted = [self.parameters[key] for key, _, _ in parts]
            for i, continuation in enumerate(continuations):
                with requires_grad(wanted), torch.enable_grad():
                    value = self._log_probs(prompt_ids, [continuation]).sum()
                    gradients = torch.autograd.grad(value, wanted, allow_unused=True, materialize_grads=True)
                for row, gradient, (_, start, stop) in zip(rows, gradients, parts):
                    row[i] = gradient.flatten()[start:stop]
            for row, (key, _, _) in zip(rows, parts):
                grams[key] += gram_rules.dense_gram(row, self.budget)
        return grams

    def _used(self, prompt_ids, continuations, keys) -> list[int]:
        """Those of the parameters that the log-probs depend on at all (a vision tower, say, is not)."""
        wanted = [self.parameters[key] for key in keys]
        with requires_grad(wanted), torch.enable_grad():
            value = self._log_probs(prompt_ids, continuations).sum()
            if not value.requires_grad:
                return []
            gradients = torch.autograd.grad(value, wanted, allow_unused=True)
        return [key for key, gradient in zip(keys, gradients) if gradient is not None]

    def _say_fallback(self, keys: list[int], size: int, passes: int) -> None:
        new = [self.names[key] for key in keys if self.names[key] not in self._said]
        if new:
            self._said.update(new)
            print(
                f"note: {len(keys)} parameters ({size:,} elements; the first is {new[0]}) are of a kind the Gram "
                f"rules do not read; measured exactly at {passes} extra backward pass(es) per continuation",
                file=sys.stderr,
            )


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0] or parameter


def _natural_order(name: str) -> list:
    """layers.2 before layers.10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _slices(sizes: list[tuple[int, int]], most: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut parameters [(key, elements)] into lists of (key, start, stop) of at most ``most`` elements each."""
    most, parts, room = max(1, most), [], max(1, most)
    for key, size in sizes:
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
