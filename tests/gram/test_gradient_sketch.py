"""Sketches of gradients: exact when they are large enough, unbiased when they are not, the same for every prompt."""

import numpy as np
import pytest
import torch
from grams import block_of, score_gram, tokens
from tiny_models import FAMILIES, per_sample_scores, random_continuations, tiny_model

from Gradient_evaluation.sampling.law import SamplingLaw

LAW = SamplingLaw(max_new_tokens=6)
PROMPTS = ([1, 5, 9, 5, 7], [4, 4, 30])
WEIGHTS = np.array([[0.5, -1.0, 0.25, 2.0], [1.0, 1.0, 1.0, 1.0]])


def continuations_of(seed=0):
    return random_continuations(seed, (3, 6, 1, 5))


def sketch(model, prompt, k, seed=0, continuations_seed=0):
    continuations = continuations_of(continuations_seed)
    return block_of(model, continuations, LAW, prompt, WEIGHTS, sketch_dim=k, sketch_seed=seed).sketch


def gradients(model, prompt, continuations_seed=0):
    return WEIGHTS @ per_sample_scores(model, prompt, continuations_of(continuations_seed), LAW).numpy()


@pytest.mark.parametrize(
    "family,settings",
    [
        *((f, {}) for f in FAMILIES),
        ("qwen2", dict(tie_word_embeddings=True)),
        ("mixtral", dict(num_local_experts=2, num_experts_per_tok=1)),
    ],
)
def test_a_sketch_as_wide_as_the_parameters_is_the_gradient(family, settings):
    model = tiny_model(family, **settings)
    exact = sketch(model, PROMPTS[0], 1000)
    truth = gradients(model, PROMPTS[0])
    assert exact.shape == truth.shape and exact.dtype == np.float64
    np.testing.assert_allclose(exact, truth, rtol=1e-4, atol=1e-5 * np.abs(truth).max())


@pytest.mark.parametrize(
    "family,settings",
    [("qwen2", dict(tie_word_embeddings=True)), ("gpt2", {}), ("mixtral", dict(num_local_experts=2, num_experts_per_tok=1))],
)
def test_inner_products_of_sketches_are_unbiased(family, settings):
    model = tiny_model(family, **settings)
    a, b = gradients(model, PROMPTS[0])[0], gradients(model, PROMPTS[1], 1)[0]
    found = []
    for seed in range(60):
        pair = [sketch(model, prompt, 4, seed, s)[0].astype(float) for s, prompt in enumerate(PROMPTS)]
        found.append((pair[0] @ pair[1], pair[0] @ pair[0]))
    error = np.std(found, axis=0, ddof=1) / np.sqrt(len(found))
    assert (np.abs(np.mean(found, axis=0) - [a @ b, a @ a]) < 4 * error).all()
    assert len(set(found)) == len(found)


def test_a_sketch_does_not_depend_on_the_order_of_prompts():
    a = sketch(tiny_model("qwen2"), PROMPTS[0], 4)
    with score_gram(tiny_model("qwen2"), LAW, sketch_dim=4) as gram:
        gram.block(PROMPTS[1], tokens(continuations_of(1)), weights=WEIGHTS)
        b = gram.block(PROMPTS[0], tokens(continuations_of()), weights=WEIGHTS).sketch
        assert a.shape[1] == sum(rows * columns for rows, columns, _, _ in gram.sketch.layout)
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(a).max())  # sketches are float32


def test_sketching_leaves_the_gram_as_it_is():
    model = tiny_model("qwen2")
    plain = block_of(model, continuations_of(), LAW, PROMPTS[0])
    assert plain.sketch is None
    again = block_of(model, continuations_of(), LAW, PROMPTS[0], WEIGHTS, sketch_dim=8)
    np.testing.assert_allclose(again.gram, plain.gram, rtol=0, atol=1e-12 * np.abs(plain.gram).max())


def test_matrices_stay_far_smaller_than_the_parameters():
    model = tiny_model(
        "llama",
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        head_dim=64,
        vocab_size=2000,
        dtype=torch.float32,
    )
    with score_gram(model, LAW, sketch_dim=8) as gram:
        gram.block(PROMPTS[0], tokens(continuations_of()), weights=WEIGHTS)
        matrices = [matrix for each in gram.sketch.of.values() for matrix in each.made.values() if matrix is not None]
    assert 0 < sum(m.numel() for m in matrices) < 0.1 * sum(p.numel() for p in model.parameters())


def test_the_default_sketch_adds_under_10_percent_to_a_block():
    from pathlib import Path

    from torch.utils.flop_counter import FlopCounterMode

    from Gradient_evaluation.models import load_model

    folder = Path(__file__).resolve().parents[2] / "data" / "tiny_model"
    model = load_model(str(folder), None, torch.device("cpu"), torch.float32)
    continuations = tokens(random_continuations(0, [12] * 16, 250))

    def operations(weights):
        with FlopCounterMode(display=False) as counter:
            gram.block(list(range(1, 61)), continuations, weights=weights)
        return counter.get_total_flops()

    with score_gram(model, LAW, sketch_dim=16) as gram:
        operations(None)  # the first block looks at the model too
        plain, sketched = operations(None), operations(np.ones((1, 16)) / 16)
    print(f"sketch adds {sketched / plain - 1:.1%}")
    assert plain < sketched < 1.1 * plain
