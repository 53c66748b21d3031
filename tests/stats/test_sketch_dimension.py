"""At the default --sketch_dim the sketch alone moves c1 and G* by under 5%: over seeds, against exact gradients."""

from functools import partial

import numpy as np
import pytest
import torch
from scripts import ROOT

from data.make_arithmetic import make_problems
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.gram.sketch import GradientSketch
from Gradient_evaluation.models import load_model, load_tokenizer
from Gradient_evaluation.sampling.generate import sample_continuations
from Gradient_evaluation.sampling.law import SamplingLaw, uniforms
from Gradient_evaluation.sampling.log_probs import log_probs
from Gradient_evaluation.stats.blocks import pair_moments
from Gradient_evaluation.stats.estimators import sketch_weights
from Gradient_evaluation.utils import format_prompt, integer_reward

DEFAULT_DIM = 16


def across_pairs(rows):
    """Mean inner product over pairs of different rows."""
    n = len(rows)
    return float((rows.sum(0) @ rows.sum(0) - (rows**2).sum()) / (n * (n - 1)))


@pytest.mark.slow
def test_the_default_sketch_moves_c1_by_under_5_percent():
    folder, law = str(ROOT / "data" / "tiny_model"), SamplingLaw(top_p=0.95, max_new_tokens=32)
    tokenizer, model = load_tokenizer(folder, None), load_model(folder, None, torch.device("cpu"), torch.float32)
    exact = ScoreGram(
        model, partial(log_probs, law=law), sketch_dim=1000
    )  # wider than every parameter: the running sum of gradients itself
    gradients, moments = [], []
    for number, problem in enumerate(make_problems(40, 0)):
        prompt_ids = format_prompt(tokenizer, problem["prompt"])
        drawn = sample_continuations(model, tokenizer, prompt_ids, uniforms(0, "sketch", number, 0, 64, 32), law, 64)
        rewards = np.array([integer_reward(c.text, problem["ground_truth"]) for c in drawn])
        lengths = np.array([len(c.tokens) for c in drawn])
        with exact:
            tokens = [c.tokens for c in drawn]
            block = exact.block(prompt_ids, tokens, weights=sketch_weights(["grpo"], rewards, lengths, 64))
        gradients.append(torch.from_numpy(block.sketch[0]))
        moments.append(pair_moments(block.gram, rewards))
    same, shared, disjoint = np.mean(moments, axis=0)
    c3 = 2 * (same - disjoint) - 4 * (shared - disjoint)
    c1 = disjoint - across_pairs(torch.stack(gradients).double().numpy())

    named = {key: (exact.names[key], p) for key, p in exact.parameters.items()}
    shapes = [(key, p.numel(), p.shape) for key, (_, p) in named.items()]
    found = []
    for seed in range(16):
        sketch = GradientSketch(named, DEFAULT_DIM, seed)
        rows = [
            torch.cat(
                [
                    sketch.of_gradient(key, part.view(shape))
                    for (key, _, shape), part in zip(shapes, gradient.split([size for _, size, _ in shapes]))
                ]
            )
            for gradient in gradients
        ]
        found.append(disjoint - across_pairs(torch.stack(rows).double().numpy()))
    spread = np.std(np.array(found) / c1, ddof=1)
    best, exact_best = 1 + np.sqrt(c3 / np.array(found)), 1 + np.sqrt(c3 / c1)
    print(
        f"c1 {c1:.3f}: spread over sketch seeds {spread:.2%}, mean {np.mean(found) / c1 - 1:+.2%}; "
        f"G* {exact_best:.2f}: spread {np.std(best, ddof=1) / exact_best:.2%}"
    )
    assert spread < 0.05 and np.std(best, ddof=1) / exact_best < 0.05
    assert abs(np.mean(found) / c1 - 1) < 3 * spread / np.sqrt(len(found)) + 1e-3
