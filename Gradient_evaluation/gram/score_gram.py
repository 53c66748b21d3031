"""The score Gram of a block of continuations: one forward, one backward, nothing parameter-sized.

Every estimator of interest is linear in the scores g_i = grad log pi(Y_i | x), so all its second moments are
functions of the rewards and of Q[i, j] = <g_i, g_j>. ``ScoreGram.block`` builds Q (B, B) for B continuations
of one prompt from a single backward of sum_i log pi(Y_i | x): samples do not interact in a forward pass, so a
layer's output gradient carries each sample's own share, and a rule of layers.py contracts it with the layer's input
as soon as it arrives. Parameters are frozen; only activations carry gradients.

What no rule can read is measured exactly by one backward per sample for those parameters alone, in slices
(fallback.py); this is said once with its cost. ``ScoreGram.audit`` compares, parameter by parameter, with one ordinary
backward.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from Gradient_evaluation.gram import self_audit
from Gradient_evaluation.gram.capture import GramCapture, leading_with_batch
from Gradient_evaluation.gram.fallback import ExactFallback
from Gradient_evaluation.gram.metric import InMetric, SecondMoment, metric_of
from Gradient_evaluation.gram.scoring import LogProb, Scorer, TokenRows, frozen, own_modes, token_rows
from Gradient_evaluation.gram.sketch import CombinationSketches, GradientSketch

# None: float32, or the model's own dtype where it is wider. bfloat16: rounded once per product, summed in float32.
GRAM_DTYPES = {"float32": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Block:
    """What one block gives. gram: (B, B) float64; log_probs: (B,) float64; by_module: (modules, B, B) float64,
    in the order of ``ScoreGram.modules``, adding up to gram, None unless asked for; sketch: (E, S) float32 or float64, the
    sketches of sum_i weights_ei g_i, None without a sketch. metric_gram, metric_sketch: gram and sketch in the optimiser's
    metric, None without one.
    """

    gram: np.ndarray
    log_probs: np.ndarray
    by_module: np.ndarray | None = None
    sketch: np.ndarray | None = None
    metric_gram: np.ndarray | None = None
    metric_sketch: np.ndarray | None = None


class ScoreGram:
    """Builds score Grams of one causal language model, and leaves the model as it found it.

    A context manager. While it is entered the model is in eval mode and no parameter requires grad; afterwards every
    module's training mode and every parameter's requires_grad are what they were. No .grad is written, read or cleared,
    no hook stays, nothing random is drawn. A trainer's torch.autocast, dropout and gradient checkpointing are off inside.

    model: it has the inputs and logits of transformers, and is not inside a wrapper for several processes or a compiler.
    params: a regular expression; only parameters whose name it finds are measured. Without it, all that require grad when
    the ScoreGram is made (under LoRA the adapters alone).
    log_prob: (logits (..., vocabulary), token ids (...)) → log-probs (...); what is differentiated.
    sketch_dim: k of GradientSketch, 0 for none; sketch_seed draws other sketches.
    budget: bytes of a temporary while a layer is contracted.
    gradient_checkpointing: keep one activation per layer and run every layer again in the backward pass (the same Gram,
    less memory, more time).
    gram_dtype: of the products of a Linear layer's inputs and gradients, "float32" or "bfloat16".
    metric {name of a parameter: SecondMoment}: measure in the metric of an optimiser too (gram/metric.py).
    Raises ValueError when no parameter is left to measure, or a setting is not possible.

    >>> import torch
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from Gradient_evaluation.gram import ScoreGram
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2))
    >>> def log_prob(logits, tokens):
    ...     return logits.log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    >>> prompt, continuations, rewards = [1, 5, 9], [[7, 3, 2], [8, 2], [4, 4, 4, 2], [6, 2]], torch.tensor([1.0, 0, 0, 1])
    >>> with ScoreGram(model, log_prob) as gram:
    ...     block = gram.block(prompt, continuations)
    >>> block.gram.shape
    (4, 4)

    The squared norm of the gradient that GRPO would take, without its division by the standard deviation:

    >>> advantages = (rewards - rewards.mean()).double().numpy()
    >>> squared_norm = advantages @ block.gram @ advantages

    It is that of an ordinary backward pass:

    >>> loss = 0
    >>> for tokens, advantage in zip(continuations, advantages):
    ...     logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    ...     loss = loss + advantage * log_prob(logits, torch.tensor(tokens)).sum()
    >>> loss.backward()
    >>> gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    >>> print(f"{squared_norm / float(gradient @ gradient):.3f}")
    1.000
    """

    def __init__(
        self,
        model: nn.Module,
        log_prob: LogProb,
        *,
        params: str | None = None,
        sketch_dim: int = 0,
        sketch_seed: int = 0,
        budget: int = 64 * 2**20,
        gradient_checkpointing: bool = False,
        gram_dtype: str = "float32",
        metric: Mapping[str, SecondMoment] | None = None,
    ):
        if not hasattr(model, "get_input_embeddings") or hasattr(model, "_orig_mod"):
            raise ValueError(f"model: {type(model).__name__} is no model of transformers; give the model inside the wrapper")
        if gram_dtype not in GRAM_DTYPES:
            raise ValueError(f"gram_dtype: {gram_dtype!r} is none of {', '.join(GRAM_DTYPES)}")
        self.model, self.budget, self.gram_dtype = model, budget, GRAM_DTYPES[gram_dtype]
        chosen = _chosen_parameters(model, params)
        self.names = {id(p): name for name, p in chosen.items()}
        self.parameters = {id(p): p for p in chosen.values()}
        self.modules = sorted({_module_of(name) for name in chosen}, key=_natural_order)
        self.metric = None if metric is None else metric_of(metric, self.names, self.parameters)
        self.scorer = Scorer(model, log_prob, gradient_checkpointing)
        self.sketch = None
        if sketch_dim:
            self.sketch = GradientSketch(
                {key: (self.names[key], p) for key, p in self.parameters.items()}, sketch_dim, sketch_seed
            )
        self._fallback = ExactFallback(self.scorer, self.names, budget)
        self._entered: ExitStack | None = None
        self._leading: set[nn.Module] | None = None  # modules whose inputs and outputs lead with the batch

    def __enter__(self) -> ScoreGram:
        if self._entered is not None:
            raise ValueError("this ScoreGram is entered already")
        entered = ExitStack()
        entered.enter_context(frozen(self.model))
        self._entered = entered
        return self

    def __exit__(self, *error) -> None:
        entered, self._entered, self._leading = self._entered, None, None
        entered.close()

    def block(
        self,
        prompt_ids: Sequence[int],
        continuations: Sequence[Sequence[int]],
        masks: Sequence[Sequence[bool]] | None = None,
        by_module: bool = False,
        weights: np.ndarray | None = None,
        token_weights: Sequence[Sequence[float]] | None = None,
    ) -> Block:
        """Gram and log-probs of the B continuations (at least one) of one prompt, and the Gram of every module.

        prompt_ids, continuations: token ids. masks: of every token of every continuation whether it counts (True, 1) or
        has no share in log pi (False, 0); None: all count. weights (E, B): with a sketch_dim, the combinations of scores
        to sketch, from the same backward. token_weights: instead of masks, a number w_it for every token; then the
        scores are sum_t w_it grad log pi_t, and log_probs the sums of w_it log pi_t. Raises FloatingPointError when a
        log-prob or the Gram is not finite, and ValueError for arguments that do not fit.
        """
        with self._running():
            rows = self._rows(prompt_ids, continuations, masks)
            if token_weights is not None:
                rows = rows.weighted(token_weights)
            sketches = None if weights is None else self._sketches(weights, len(continuations))
            in_metric = self._in_metric(weights, len(continuations))
            by_parameter, log_probs = self._grams(rows, sketches, in_metric)
            gram, values = sum(by_parameter.values()).cpu().numpy(), log_probs.double().cpu().numpy()
            scaled = sum(in_metric.grams.values()).cpu().numpy() if in_metric is not None else None
            if not all(np.isfinite(part).all() for part in (gram, values, *([] if scaled is None else [scaled]))):
                raise FloatingPointError("a log-prob or a score product is not finite")
            return Block(
                gram,
                values,
                self._by_module(by_parameter) if by_module else None,
                self._sketch(sketches),
                scaled,
                None if in_metric is None else self._sketch(in_metric.sketches),
            )

    def audit(self, prompt_ids: Sequence[int], continuations: Sequence[Sequence[int]], masks=None) -> dict:
        """Compare every parameter's Gram with one ordinary backward pass in the model's own dtype → what was found.

        {"parameters" (their number), "max_relative_error", "worst_parameter", "tolerance", "dtype", "block_size"}. An error
        is relative to the larger of the squared norm and tr Q_p, or to the dtype's rounding of the whole tr Q where both
        are below it (a key bias without rotary positions has gradient 0). Raises UserError naming the module when an error
        exceeds its tolerance, and FloatingPointError when one is not finite.
        """
        with self._running():
            rows, in_metric = self._rows(prompt_ids, continuations, masks), self._in_metric(None, len(continuations))
            found = self_audit.compare(self, rows, self._grams(rows, None, in_metric)[0])
            if in_metric is not None:
                found["metric_error"] = self_audit.compare_metric(self, rows, in_metric)
            return found

    def logits(self, prompt_ids: Sequence[int], continuations: Sequence[Sequence[int]]) -> torch.Tensor:
        """The logits of the scoring pass (B, longest, vocabulary), those that predict the continuations' tokens."""
        with self._running(), torch.no_grad():
            rows = self._rows(prompt_ids, continuations)
            with rows.prefix.multiplied_once(self._leading_modules(rows)):
                return self.scorer.logits(rows)

    @contextmanager
    def _running(self) -> Iterator[None]:
        if self._entered is None:
            raise ValueError("this ScoreGram is not entered; write: with ScoreGram(...) as gram:")
        with own_modes(self.model.device):
            yield

    def _rows(self, prompt_ids, continuations, masks=None) -> TokenRows:
        return token_rows(prompt_ids, continuations, masks, len(self.model.get_input_embeddings().weight))

    def _sketches(self, weights: np.ndarray, size: int) -> CombinationSketches:
        if self.sketch is None:
            raise ValueError("weights: there is no sketch; give ScoreGram a sketch_dim")
        weights = torch.as_tensor(weights, dtype=torch.float64, device=self.model.device)
        if weights.dim() != 2 or weights.shape[1] != size:
            raise ValueError(f"weights: shape {tuple(weights.shape)} for {size} continuations; give (combinations, {size})")
        return CombinationSketches(self.sketch, weights)

    def _sketch(self, sketches: CombinationSketches | None) -> np.ndarray | None:
        if sketches is None:
            return None
        return torch.cat([sketches.sums[key] for key in self.parameters], dim=1).cpu().numpy()

    def _in_metric(self, weights: np.ndarray | None, size: int) -> InMetric | None:
        if self.metric is None:
            return None
        return InMetric(self.metric, self.budget, None if weights is None else self._sketches(weights, size))

    def _grams(
        self, rows: TokenRows, sketches: CombinationSketches | None = None, in_metric: InMetric | None = None
    ) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
        """({id of parameter: Q_p (B, B) float64}, log-probs (B,)); ``sketches`` and ``in_metric`` get their sums."""
        leading, prefix = self._leading_modules(rows), rows.prefix
        capture = GramCapture(self._owners(), leading, prefix, self.budget, self.gram_dtype, sketches, in_metric)
        with capture, prefix.multiplied_once(leading), torch.enable_grad():
            with prefix.kept_once():
                values = self.scorer.log_probs(rows)
            if values.requires_grad:
                capture.backward(values.sum())
        grams = capture.finish()
        missing = {key: p for key, p in self.parameters.items() if key not in grams}
        if missing:
            grams |= self._fallback.grams(rows, missing, in_metric)
            if sketches is not None:
                self._fallback.add_sketches(rows, missing, sketches, in_metric)
        return grams, values.detach()

    def _leading_modules(self, rows: TokenRows) -> set[nn.Module]:
        """The modules whose tensors lead with the batch, found once."""
        if self._leading is None:
            self._leading = leading_with_batch(self.model, lambda count: self.scorer.log_probs(rows.only(0, count)))
        return self._leading

    def _owners(self) -> dict[nn.Module, dict[str, int]]:
        """{module: {name in the module: id}} of the measured parameters that a module holds itself."""
        owners = {}
        for module in self.model.modules():
            own = {name: id(p) for name, p in module.named_parameters(recurse=False) if id(p) in self.parameters}
            if own:
                owners[module] = own
        return owners

    def _by_module(self, by_parameter: dict[int, torch.Tensor]) -> np.ndarray:
        first = next(iter(by_parameter.values()))
        grams = torch.zeros(len(self.modules), *first.shape, dtype=torch.float64, device=first.device)
        index = {module: i for i, module in enumerate(self.modules)}
        for key, gram in by_parameter.items():
            grams[index[_module_of(self.names[key])]] += gram
        return grams.cpu().numpy()


def _chosen_parameters(model: nn.Module, params: str | None) -> dict[str, nn.Parameter]:
    try:
        wanted = re.compile(params or "")
    except re.error as error:
        raise ValueError(f"params {params}: not a regular expression ({error})") from None
    chosen = {name: p for name, p in model.named_parameters() if p.requires_grad and wanted.search(name)}
    if not chosen and params is None:
        raise ValueError("params: the model has no parameter with requires_grad")
    if not chosen:
        first = next((name for name, _ in model.named_parameters()), "")
        raise ValueError(f"params {params}: finds no parameter; names look like {first}")
    return chosen


def _module_of(parameter: str) -> str:
    return parameter.rpartition(".")[0] or parameter


def _natural_order(name: str) -> list:
    """layers.2 before layers.10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
