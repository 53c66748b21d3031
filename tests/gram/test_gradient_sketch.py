"""Sketches of gradients: exact when they are large enough, unbiased when they are not, the same for every prompt."""

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, per_sample_scores, random_continuations, tiny_model

from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.sampling.generate import SamplingLaw

LAW = SamplingLaw(max_new_tokens=6)
PROMPTS = ([1, 5, 9, 5, 7], [4, 4, 30])
WEIGHTS = np.array([[0.5, -1.0, 0.25, 2.0], [1.0, 1.0, 1.0, 1.0]])


def sketch(model, prompt, k, seed=0, weights=WEIGHTS, continuations_seed=0):
    continuations = random_continuations(continuations_seed, (3, 6, 1, 5))
    return ScoreGram(model, LAW, sketch_dim=k, sketch_seed=seed).block(prompt, continuations, weights=weights).sketch


def gradients(model, prompt, continuations_seed=0):
    for p in model.parameters():
        p.requires_grad_(True)
    return WEIGHTS @ per_sample_scores(model, prompt, random_continuations(continuations_seed, (3, 6, 1, 5)), LAW).numpy()


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
    assert exact.shape == truth.shape and exact.dtype == np.float32
    np.testing.assert_allclose(exact, truth, rtol=1e-4, atol=1e-5 * np.abs(truth).max())


@pytest.mark.parametrize(
    "family,settings",
    [("qwen2", dict(tie_word_embeddings=True)), ("gpt2", {}), ("mixtral", dict(num_local_experts=2, num_experts_per_tok=1))],
)
def test_inner_products_of_sketches_are_unbiased_for_those_of_the_gradients(family, settings):
    model = tiny_model(family, **settings)
    a, b = gradients(model, PROMPTS[0])[0], gradients(model, PROMPTS[1], 1)[0]
    for p in model.parameters():
        p.requires_grad_(True)
    found = []
    for seed in range(60):
        grams = ScoreGram(model, LAW, sketch_dim=4, sketch_seed=seed)
        pair = [
            grams.block(prompt, random_continuations(s, (3, 6, 1, 5)), weights=WEIGHTS).sketch[0].astype(float)
            for s, prompt in enumerate(PROMPTS)
        ]
        found.append((pair[0] @ pair[1], pair[0] @ pair[0]))
        for p in model.parameters():
            p.requires_grad_(True)
    error = np.std(found, axis=0, ddof=1) / np.sqrt(len(found))
    assert (np.abs(np.mean(found, axis=0) - [a @ b, a @ a]) < 4 * error).all()
    assert len(set(found)) == len(found)


def test_a_sketch_does_not_depend_on_the_process_or_the_order_of_prompts():
    a = sketch(tiny_model("qwen2"), PROMPTS[0], 4)
    grams = ScoreGram(tiny_model("qwen2"), LAW, sketch_dim=4)
    grams.block(PROMPTS[1], random_continuations(1, (3, 6, 1, 5)), weights=WEIGHTS)
    b = grams.block(PROMPTS[0], random_continuations(0, (3, 6, 1, 5)), weights=WEIGHTS).sketch
    assert a.shape[1] == sum(grams.sketch.sizes.values())
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(a).max())  # sketches are float32


def test_sketching_leaves_the_gram_as_it_is():
    model = tiny_model("qwen2")
    continuations = random_continuations(0, (3, 6, 1, 5))
    plain = ScoreGram(model, LAW).block(PROMPTS[0], continuations)
    assert plain.sketch is None
    again = ScoreGram(tiny_model("qwen2"), LAW, sketch_dim=8).block(PROMPTS[0], continuations, weights=WEIGHTS)
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
    grams = ScoreGram(model, LAW, sketch_dim=8)
    grams.block(PROMPTS[0], random_continuations(0, (3, 6, 1, 5)), weights=WEIGHTS)
    held = sum(m.numel() for m in grams.sketch.matrices.values() if m is not None)
    assert 0 < held < 0.1 * sum(p.numel() for p in model.parameters())


def test_the_default_sketch_adds_less_than_10_percent_to_the_arithmetic_of_a_block():
    from pathlib import Path

    from torch.utils.flop_counter import FlopCounterMode

    from Gradient_evaluation.models import load_model

    folder = Path(__file__).resolve().parents[2] / "data" / "tiny_model"
    model = load_model(str(folder), None, torch.device("cpu"), torch.float32)
    grams, continuations = ScoreGram(model, LAW, sketch_dim=16), random_continuations(0, [12] * 16, 250)

    def operations(weights):
        with FlopCounterMode(display=False) as counter:
            grams.block(list(range(1, 61)), continuations, weights=weights)
        return counter.get_total_flops()

    operations(None)  # the first block looks at the model too
    plain, sketched = operations(None), operations(np.ones((1, 16)) / 16)
    print(f"sketch adds {sketched / plain - 1:.1%}")
    assert plain < sketched < 1.1 * plain
