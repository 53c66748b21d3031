"""Gradient checkpointing, ScoreGram's own and a trainer's: the same Gram, less memory, no layer counted twice."""

import weakref

import numpy as np
import pytest
from grams import LENGTHS, PROMPT, block_of, score_gram, tokens
from tiny_models import float_means_double, random_continuations, tiny_model
from torch import nn


class ForwardCalls:
    """Counts how often a module runs."""

    def __init__(self, module):
        self.count = 0
        module.register_forward_pre_hook(self)

    def __call__(self, *_):
        self.count += 1


FAMILIES = [("llama", True), ("qwen3", False), ("gpt2", True), ("gemma3_text", True), ("gpt_neox", False), ("phi3", False)]


@pytest.mark.parametrize("family,tied", [*FAMILIES, ("mixtral", False)])
@float_means_double()
def test_gradient_checkpointing_changes_no_gram(family, tied):
    continuations = random_continuations(0, LENGTHS)
    settings = dict(num_local_experts=3, num_experts_per_tok=2) if family == "mixtral" else {}
    model = tiny_model(family, tie_word_embeddings=tied, **settings)
    expected = block_of(model, continuations)
    with score_gram(model, gradient_checkpointing=True) as gram:
        gram.block(PROMPT, tokens(continuations))  # the first one looks at the model too
        calls = ForwardCalls((model.transformer.h if family == "gpt2" else model.base_model.layers)[0].mlp)
        block = gram.block(PROMPT, tokens(continuations))
        assert calls.count == 2 or family == "mixtral"  # it did run again
        gram.audit(PROMPT, tokens(continuations))
    np.testing.assert_allclose(block.gram, expected.gram, rtol=1e-12, atol=1e-12 * np.abs(expected.gram).max())
    np.testing.assert_allclose(block.log_probs, expected.log_probs, rtol=1e-12)
    assert not any("forward" in vars(module) for module in model.modules())  # the model is as it was


@pytest.mark.parametrize("own", [False, True])
@float_means_double()
def test_a_trainers_checkpointing_and_dropout_are_off_inside(own):
    dropout = dict(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    continuations = random_continuations(0, LENGTHS)
    expected = block_of(tiny_model("gpt2", **dropout), continuations)
    model = tiny_model("gpt2", **dropout)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    with score_gram(model, gradient_checkpointing=own) as gram:
        first = gram.block(PROMPT, tokens(continuations))
        calls = ForwardCalls(model.transformer.h[0].mlp)
        again = gram.block(PROMPT, tokens(continuations))
        gram.audit(PROMPT, tokens(continuations))
    assert calls.count == (6 if own else 3)  # of a block, the audit's block and its ordinary backward pass
    for block in (first, again):
        np.testing.assert_allclose(block.gram, expected.gram, rtol=1e-12, atol=1e-12 * np.abs(expected.gram).max())
        np.testing.assert_allclose(block.log_probs, expected.log_probs, rtol=1e-12)


@float_means_double()
def test_checkpointing_left_on_inside_counts_no_layer_twice():
    """Of a model that is switched to train mode inside; it has no dropout."""
    continuations = random_continuations(0, LENGTHS)
    model = tiny_model("qwen2", tie_word_embeddings=True)
    expected = block_of(model, continuations).gram
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with score_gram(model) as gram:
        gram.block(PROMPT, tokens(continuations))
        calls = ForwardCalls(model.model.layers[0].mlp.up_proj)
        model.train()
        np.testing.assert_allclose(gram.block(PROMPT, tokens(continuations)).gram, expected, rtol=1e-12)
    assert calls.count == 2


def test_checkpointing_frees_the_activations_of_the_layers():
    def most_alive(checkpointing):
        model, alive, most = tiny_model("llama", num_hidden_layers=6), weakref.WeakSet(), 0

        def count(module, args, output):
            nonlocal most
            alive.add(args[0].untyped_storage())
            most = max(most, len(alive))

        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_hook(count)
        # A longer prompt is kept apart: not this storage.
        block_of(model, random_continuations(0, LENGTHS), prompt=PROMPT[:1], gradient_checkpointing=checkpointing)
        return most

    assert most_alive(False) == 6 and most_alive(True) <= 2


def test_a_model_without_checkpointable_layers_is_refused():
    class Bare(nn.Linear):
        get_input_embeddings = None

    with pytest.raises(ValueError, match="gradient_checkpointing: Bare has no layer that transformers can checkpoint"):
        score_gram(Bare(2, 2), gradient_checkpointing=True)
