"""The forward pass that is scored: one prompt and its continuations as padded rows, through a model that stays as it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from Gradient_evaluation.forward import padding_position, position_ids, replaced_forward, takes_positions
from Gradient_evaluation.gram.shared_prefix import SharedPrefix

LogProb = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class TokenRows:
    """One prompt and its continuations as token ids. masks: of every token of a continuation, how much it counts."""

    prompt: list[int]
    continuations: list[list[int]]
    masks: list[list[float]]

    @property
    def longest(self) -> int:
        return max(len(tokens) for tokens in self.continuations)

    @property
    def prefix(self) -> SharedPrefix:
        """The shape of the model's inputs: the last token of a continuation is never read."""
        return SharedPrefix(len(self.continuations), len(self.prompt) + self.longest - 1, len(self.prompt))

    def weighted(self, weights: Sequence[Sequence[float]]) -> TokenRows:
        """With these weights of the tokens. Raises ValueError for a wrong number of them, and one that is not finite."""
        if [len(row) for row in weights] != [len(row) for row in self.continuations]:
            raise ValueError("token_weights: give one number for every token of every continuation")
        if not all(math.isfinite(weight) for row in weights for weight in row):
            raise ValueError("token_weights: one is not finite")
        return replace(self, masks=[[float(weight) for weight in row] for row in weights])

    def only(self, row: int, times: int = 1) -> TokenRows:
        """One of the rows, so many times."""
        return TokenRows(self.prompt, self.continuations[row : row + 1] * times, self.masks[row : row + 1] * times)


def token_rows(prompt_ids: Sequence[int], continuations: Sequence[Sequence[int]], masks, vocabulary: int) -> TokenRows:
    """The rows, checked. masks: None when every token counts. Raises ValueError naming what is wrong."""
    rows = [[int(token) for token in tokens] for tokens in (prompt_ids, *continuations)]
    names = ["the prompt", *(f"continuation {i}" for i in range(len(rows) - 1))]
    if len(rows) == 1:
        raise ValueError("there is no continuation; give at least one list of token ids")
    for name, tokens in zip(names, rows):
        if not tokens:
            raise ValueError(f"{name} has no token; give at least one token id")
        if min(tokens) < 0 or max(tokens) >= vocabulary:
            wrong = next(token for token in tokens if not 0 <= token < vocabulary)
            raise ValueError(f"{name} has token {wrong}, but the model's vocabulary has the tokens 0 to {vocabulary - 1}")
    prompt, *rows = rows
    if masks is None:
        masks = [[True] * len(tokens) for tokens in rows]
    if len(masks) != len(rows):
        raise ValueError(f"there are {len(masks)} masks for {len(rows)} continuations; give one for each")
    for i, (mask, tokens) in enumerate(zip(masks, rows)):
        if len(mask) != len(tokens):
            raise ValueError(f"mask {i} has {len(mask)} entries for the {len(tokens)} tokens of its continuation")
        if any(entry not in (0, 1) for entry in mask):
            raise ValueError(f"mask {i} has an entry that is neither 0 nor 1; a token counts or does not")
    return TokenRows(prompt, rows, [[bool(entry) for entry in mask] for mask in masks])


class Scorer:
    """Runs a model over rows of tokens.

    log_prob: (logits (..., vocabulary), tokens (...)) → log-probs (...), differentiable in the logits.
    gradient_checkpointing: see ``checkpointed``. Raises ValueError when the model has no layer that could be.
    """

    def __init__(self, model: nn.Module, log_prob: LogProb, gradient_checkpointing: bool):
        self.model, self.log_prob = model, log_prob
        self.takes_positions, self.padding_position = takes_positions(model), padding_position(model)
        self.layers = []
        if gradient_checkpointing:
            self.layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
            if not self.layers:
                raise ValueError(
                    f"gradient_checkpointing: {type(model).__name__} has no layer that transformers can checkpoint; "
                    "run without it"
                )

    def log_probs(self, rows: TokenRows) -> torch.Tensor:
        """log pi(Y_i | x) (B,), the sum over the tokens that count, with its graph."""
        logits, targets = self.logits(rows), self._targets(rows)
        values = self.log_prob(logits, targets)
        if values.shape != targets.shape:
            raise ValueError(
                f"log_prob gave shape {tuple(values.shape)} for tokens of shape {tuple(targets.shape)}; one log-prob per token"
            )
        counts = torch.zeros(targets.shape, dtype=values.dtype)
        for i, mask in enumerate(rows.masks):
            counts[i, : len(mask)] = torch.tensor(mask, dtype=values.dtype)
        counts = counts.to(values.device)
        return (values.masked_fill(counts == 0, 0.0) * counts).sum(dim=1)

    def logits(self, rows: TokenRows) -> torch.Tensor:
        """(B, longest, vocabulary): what predicts the continuations' tokens. Rows are padded on the right with token 0."""
        targets = self._targets(rows)
        prompt = torch.tensor([rows.prompt], device=targets.device).expand(len(targets), -1)
        inputs = torch.cat([prompt, targets[:, :-1]], dim=1)
        settings = {"use_cache": False, "logits_to_keep": targets.shape[1], "attention_mask": torch.ones_like(inputs)}
        if self.takes_positions:  # one row each, so that learned positions keep a gradient per sample
            settings["position_ids"] = position_ids(self.padding_position, inputs)
        with checkpointed(self.layers), without_accelerate(self.model):
            logits = self.model(input_ids=inputs, **settings).logits
        if logits.dim() != 3 or logits.shape[:2] != targets.shape:
            raise ValueError(
                f"{type(self.model).__name__} gave logits of shape {tuple(logits.shape)} that do not lead with the "
                f"{targets.shape[0]} continuations and their {targets.shape[1]} tokens"
            )
        return logits

    def _targets(self, rows: TokenRows) -> torch.Tensor:
        targets = torch.zeros(len(rows.continuations), rows.longest, dtype=torch.int64)
        for i, tokens in enumerate(rows.continuations):
            targets[i, : len(tokens)] = torch.tensor(tokens)
        return targets.to(self.model.device)


@contextmanager
def checkpointed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """While inside, each of the layers keeps its input alone and runs again in the backward pass.

    transformers checkpoints only in train mode, which would turn dropout on and change the law that is scored. Here the
    layers that it marks as checkpointable are wrapped for the length of one pass and nothing else is touched.
    """
    # No random state to restore: nothing is drawn in eval mode, and reading a GPU's state makes the host wait.
    with replaced_forward(
        layers, lambda layer, plain: partial(checkpoint, plain, use_reentrant=False, preserve_rng_state=False)
    ):
        yield


@contextmanager
def without_accelerate(model: nn.Module) -> Iterator[None]:
    """While inside, the autocast that accelerate puts into the forward of a model that it prepares is not there."""
    wrapped = [model] if "_original_forward" in vars(model) else []
    with replaced_forward(wrapped, lambda model, plain: model._original_forward):
        yield


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """While inside, every module is in eval mode and no parameter requires grad; afterwards each is as it was before."""
    modes = [(module, module.training) for module in model.modules()]
    wanted = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for module, _ in modes:  # one by one: a module's own train() may do more, merge weights say
            module.training = False
        for p, _ in wanted:
            p.requires_grad_(False)
        yield
    finally:
        for module, training in modes:
            module.training = training
        for p, required in wanted:
            p.requires_grad_(required)


@contextmanager
def differentiable(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """While inside, frozen parameters require grad, without the hooks that a trainer has put on their gradients.

    For torch.autograd.grad, which touches no .grad. Hooks that are registered inside are gone afterwards.
    """
    parameters = list(parameters)
    hooks = [p._backward_hooks for p in parameters]
    try:
        for p in parameters:
            p._backward_hooks = None
            p.requires_grad_(True)
        yield
    finally:
        for p, own in zip(parameters, hooks):
            p._backward_hooks = own
            p.requires_grad_(False)


@contextmanager
def own_modes(device: torch.device) -> Iterator[None]:
    """While inside, the caller's torch.autocast and torch.inference_mode are off, on the CPU and on ``device``."""
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False):
        yield
