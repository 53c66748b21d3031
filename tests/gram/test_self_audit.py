"""The self-audit passes every right model in every dtype, finds what is some percent off, and leaves the model alone."""

import weakref

import numpy as np
import pytest
import torch
from grams import PROMPT, audit_of, looks_up_scaled, score_gram, tokens
from tiny_models import FAMILIES, random_continuations, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from Gradient_evaluation.errors import UserError

HALF = (torch.bfloat16, torch.float16)
BLOCK = random_continuations(0, (3, 6, 1, 5, 2, 4, 6, 6))


def too_large_in_float32(model):
    """Let the model run out of memory when it is wider than half precision."""

    def check(module, args, output):
        if output.dtype == torch.float32:
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")

    model.get_input_embeddings().register_forward_hook(check)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("family", FAMILIES)
def test_right_models_of_every_family_pass_in_every_dtype(family, dtype):
    audit = audit_of(tiny_model(family, dtype=dtype), BLOCK)
    assert (audit["dtype"], audit["block_size"]) == ("float32", len(BLOCK))
    assert audit["max_relative_error"] < 1e-5


@pytest.mark.parametrize(
    "family,dtype",
    [("qwen2", HALF[0]), ("gpt2", HALF[0]), ("gpt_neox", HALF[0]), ("gemma2", HALF[0]), ("gpt2", HALF[1]), ("phi3", HALF[1])],
)
def test_right_models_pass_in_half_precision_without_float32(family, dtype, capsys):
    audit = audit_of(too_large_in_float32(tiny_model(family, dtype=dtype)), BLOCK)
    assert audit["dtype"] == str(dtype).split(".")[1]
    assert "does not run in float32" in capsys.readouterr().err


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_rule_four_percent_off_is_found_in_every_dtype(dtype, fits):
    model = looks_up_scaled(tiny_model("qwen2", dtype=dtype))
    if not fits and dtype in HALF:
        too_large_in_float32(model)
    with pytest.raises(UserError, match="embed_tokens.weight is off"):
        audit_of(model, BLOCK)


def test_four_percent_are_found_in_bfloat16_and_checkpointed():
    model = looks_up_scaled(tiny_model("qwen2", dtype=torch.bfloat16))
    with pytest.raises(UserError, match="embed_tokens.weight is off"):
        audit_of(model, BLOCK, gram_dtype="bfloat16", gradient_checkpointing=True)


@pytest.mark.parametrize("family,fails", [("qwen2", False), ("qwen2", True), ("gemma3_text", False), ("gpt_neox", True)])
@pytest.mark.parametrize("dtype", HALF)
def test_the_audit_leaves_every_parameter_and_buffer_as_it_was(family, fails, dtype):
    model = tiny_model(family, dtype=dtype)
    if fails:
        looks_up_scaled(model)
    state = {name: x.clone() for name, x in (*model.named_parameters(), *model.named_buffers())}
    logits = model(torch.tensor([PROMPT])).logits
    if fails:
        with pytest.raises(UserError):
            audit_of(model, BLOCK)
    else:
        audit_of(model, BLOCK)
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert after.keys() == state.keys()
    for name, x in state.items():
        assert after[name].dtype == x.dtype and torch.equal(after[name], x), name
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert torch.equal(model(torch.tensor([PROMPT])).logits, logits)


def test_out_of_memory_inside_the_audit_leaves_nothing_behind(monkeypatch):
    model = tiny_model("qwen2", dtype=torch.float32)

    def refuse(piece):  # of a gradient, to be reduced
        raise torch.OutOfMemoryError("CUDA out of memory (made up)")

    with score_gram(model) as gram:
        with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
            patch.setattr(torch.Tensor, "square", refuse)
            gram.audit(PROMPT, tokens(BLOCK))
        assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
        assert gram.audit(PROMPT, tokens(BLOCK))["max_relative_error"] < 1e-5


def test_scores_that_are_not_finite_are_no_verdict_on_the_model():
    model = tiny_model("llama", dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.fill_(np.inf)
    with pytest.raises(FloatingPointError, match="not finite"):
        audit_of(model, BLOCK)


class GradientsAlive(TorchDispatchMode):
    """Counts, while it is entered, how many matrices of one shape are in memory at a time beside the parameters."""

    def __init__(self, shape, parameters):
        super().__init__()
        self.shape, self.most, self.alive = shape, 0, weakref.WeakSet()
        self.parameters = {p.untyped_storage().data_ptr() for p in parameters}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and set(x.shape) == set(self.shape):
                storage = x.untyped_storage()
                if storage.data_ptr() not in self.parameters and storage.nbytes() >= x.numel() * x.element_size():
                    self.alive.add(storage)
        self.most = max(self.most, len(self.alive))
        return out


def test_the_audit_never_has_the_gradients_of_two_layers():
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=6, intermediate_size=500)
    shape = model.model.layers[0].mlp.up_proj.weight.shape
    with score_gram(model) as gram:
        with GradientsAlive(shape, model.parameters()) as gradients:
            gram.audit(PROMPT, tokens(BLOCK))
    assert 1 <= gradients.most <= 3  # of 18: a gradient, its rows in order, and a piece in float64
