"""A block with the KL term to a reference: the Gram of its scores and of the scores weighted token by token (stats/kl.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.gram.score_gram import Block, ScoreGram
from Gradient_evaluation.models import load_model, weights_digest
from Gradient_evaluation.runs.inputs.prompts import sampling_law
from Gradient_evaluation.sampling.log_probs import log_probs
from Gradient_evaluation.settings import TracecovSettings

# The weight of grad log pi_t in the gradient of the KL term, on-policy, from rho_t = pi_ref / pi.
KL_TYPES = {"k3": lambda rho: 1 - rho, "k2": lambda rho: -np.log(rho)}


def identity_of(settings: TracecovSettings) -> dict:
    """What run.json stores of the reference. UserError where its folder is missing."""
    name = settings.ref_model
    if name is None:
        return {"ref_model": None}
    if name.startswith((".", "/", "~")) and not Path(name).is_dir():
        raise UserError(f"--ref_model {name}: there is no such folder")
    return {"ref_model": [name, weights_digest(name), settings.kl_type]}


class Reference:
    """The model of --ref_model, beside that of --model. UserError where it has another vocabulary."""

    def __init__(self, model, settings: TracecovSettings):
        self.log_prob = partial(log_probs, law=sampling_law(settings))
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        self.model = load_model(settings.ref_model, None, model.device, dtype, settings.trust_remote_code)
        own, other = (len(each.get_input_embeddings().weight) for each in (model, self.model))
        if own != other:
            raise UserError(
                f"--ref_model {settings.ref_model}: has {other} tokens, --model {own}; give the one it started from"
            )
        self.model.requires_grad_(True)  # a ScoreGram measures something; this one only gives logits
        self.gram, self.weights_of = ScoreGram(self.model, self.log_prob), KL_TYPES[settings.kl_type]

    def block(
        self, gram: ScoreGram, prompt_ids: Sequence[int], tokens: Sequence[Sequence[int]], masks, by_module: bool, weights
    ) -> tuple[Block, dict]:
        """``gram.block`` of B continuations, and {gram: (2B, 2B), sketch: of the mean r or None, values: k3 (B,)}.

        Every continuation is scored twice, once with the weights ``KL_TYPES`` of its tokens. weights: (E, B) or None.
        """
        size = len(tokens)
        masks = [[1.0] * len(row) for row in tokens] if masks is None else masks
        with self.gram:
            pairs = zip(self._values(self.gram, prompt_ids, tokens), self._values(gram, prompt_ids, tokens))
            ratios = [np.exp(other - own) for other, own in pairs]
        token_weights = [[*map(float, mask)] for mask in masks]
        token_weights += [(np.array(mask) * self.weights_of(ratio)).tolist() for mask, ratio in zip(masks, ratios)]
        if weights is not None:
            weights = np.block([[weights, np.zeros_like(weights)], [np.zeros((1, size)), np.full((1, size), 1 / size)]])
        found = gram.block(prompt_ids, [*tokens, *tokens], None, by_module, weights, token_weights)
        values = [float(np.array(mask) @ (ratio - 1 - np.log(ratio))) for mask, ratio in zip(masks, ratios)]
        kl = {"gram": found.gram, "sketch": None if weights is None else found.sketch[-1], "values": np.array(values)}
        return _of_scores(found, size), kl

    def _values(self, gram: ScoreGram, prompt_ids, tokens) -> list[np.ndarray]:
        """log pi of every token of every continuation, float64."""
        with torch.no_grad():
            rows = gram.logits(prompt_ids, tokens)
            own = [self.log_prob(row[: len(each)], torch.tensor(each, device=row.device)) for row, each in zip(rows, tokens)]
        return [each.double().cpu().numpy() for each in own]


def _of_scores(block: Block, size: int) -> Block:
    """The part of a doubled block that is of the scores alone."""

    def corner(gram: np.ndarray | None) -> np.ndarray | None:
        return None if gram is None else gram[..., :size, :size]

    return replace(
        block,
        gram=corner(block.gram),
        log_probs=block.log_probs[:size],
        by_module=corner(block.by_module),
        sketch=None if block.sketch is None else block.sketch[:-1],
        metric_gram=corner(block.metric_gram),
        metric_sketch=None if block.metric_sketch is None else block.metric_sketch[:-1],
    )
