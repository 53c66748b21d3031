"""What the tests of the score Gram share: a prompt, a law, and blocks of continuations with the truth beside them."""

from functools import partial

import numpy as np
import torch
from tiny_models import float_means_double, per_sample_scores, tiny_model
from torch import nn

from Gradient_evaluation.gram import DenseGradient, LinearGradient, layers, register
from Gradient_evaluation.gram.score_gram import Block, ScoreGram
from Gradient_evaluation.runs.checks import self_audit
from Gradient_evaluation.sampling.law import SamplingLaw
from Gradient_evaluation.sampling.log_probs import log_probs

PROMPT = [1, 5, 9, 5, 0, 2, 7]  # a repeated id, the pad id and the end-of-sequence id among them
LAW = SamplingLaw(temperature=0.8, max_new_tokens=6)  # random tokens are possible under it
LENGTHS = (3, 6, 1, 5)


def score_gram(model, law=LAW, **settings) -> ScoreGram:
    """The ScoreGram of the law's log-probs; still to be entered."""
    return ScoreGram(model, partial(log_probs, law=law), **settings)


def tokens(continuations) -> list[tuple[int, ...]]:
    return [each.tokens for each in continuations]


def block_of(model, continuations, law=LAW, prompt=PROMPT, weights=None, **settings) -> Block:
    """One block, with a Gram per module."""
    with score_gram(model, law, **settings) as gram:
        return gram.block(prompt, tokens(continuations), by_module=True, weights=weights)


def audit_of(model, continuations, **settings) -> dict:
    """The audit as a run makes it: of a half-precision model in float32, where that fits."""
    with score_gram(model, **settings) as gram:
        return self_audit(gram, PROMPT, tokens(continuations))


def relative_error(model, continuations, law=LAW, prompt=PROMPT, **settings) -> float:
    """Largest difference between the Gram and that of one autograd pass per sample, over its largest entry."""
    with float_means_double():
        scores = per_sample_scores(model, prompt, continuations, law)
        block = block_of(model, continuations, law, prompt, **settings)
    truth = (scores @ scores.T).numpy()
    return np.abs(block.gram - truth).max() / np.abs(truth).max()


def looks_up_scaled(model, from_rows=0):
    """Make the embedding look rows up 1.02 times as large, so that its rule is 4% off; only in blocks from that size."""
    embedding = model.get_input_embeddings()

    def forward(ids):
        return nn.functional.embedding(ids, embedding.weight) * (1.02 if len(ids) >= from_rows else 1.0)

    embedding.forward = forward
    return model


class LowRank(nn.Module):
    """x → x down^T up^T: two weights in a module that no rule knows."""

    def __init__(self, d_in, d_out, rank=3):
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, d_in, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(d_out, rank, dtype=torch.float64))
        self.shift = nn.Parameter(torch.randn(d_out, dtype=torch.float64))

    def forward(self, x):
        return x @ self.down.T @ self.up.T + self.shift


def low_rank_rule(module, a, b):
    down = LinearGradient(a, b @ module.up)
    return {"down": down, "up": LinearGradient(a @ module.down.T, b), "shift": DenseGradient(b.sum(1))}


def low_rank_model():
    model = tiny_model("qwen2")
    torch.manual_seed(1)
    model.model.layers[0].mlp.up_proj = LowRank(32, 48)
    return model


def registered(monkeypatch, rule):
    monkeypatch.setattr(layers, "RULES", dict(layers.RULES))  # this test's own
    register(LowRank, rule)
