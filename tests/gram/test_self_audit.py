"""The self-audit passes every right model in every dtype, finds what is some percent off, and leaves the model alone."""

from argparse import Namespace

import numpy as np
import pytest
import torch
from test_score_gram import LAW, PROMPT, relative_error
from tiny_models import FAMILIES, random_continuations, tiny_model, tiny_tokenizer
from torch import nn

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.runs.measure import Measurement
from Gradient_evaluation.runs.dataset import Row
from Gradient_evaluation.sampling.generate import SamplingLaw

HALF = (torch.bfloat16, torch.float16)
BLOCK = random_continuations(0, (3, 6, 1, 5, 2, 4, 6, 6))


def looks_up_scaled(model, from_rows=0):
    """Make the embedding look rows up 1.02 times as large, so that its rule is 4% off; only in blocks from that size."""
    embedding = model.get_input_embeddings()

    def forward(ids):
        return nn.functional.embedding(ids, embedding.weight) * (1.02 if len(ids) >= from_rows else 1.0)

    embedding.forward = forward
    return model


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
    gram = ScoreGram(tiny_model(family, dtype=dtype), LAW)
    audit = gram.audit(PROMPT, BLOCK)
    assert (audit["dtype"], audit["block_size"]) == ("float32", len(BLOCK))
    assert audit["max_relative_error"] < 1e-5


@pytest.mark.parametrize(
    "family,dtype",
    [("qwen2", HALF[0]), ("gpt2", HALF[0]), ("gpt_neox", HALF[0]), ("gemma2", HALF[0]), ("gpt2", HALF[1]), ("phi3", HALF[1])],
)
def test_right_models_pass_in_half_precision_where_float32_does_not_fit(family, dtype, capsys):
    audit = ScoreGram(too_large_in_float32(tiny_model(family, dtype=dtype)), LAW).audit(PROMPT, BLOCK)
    assert audit["dtype"] == str(dtype).split(".")[1]
    assert "does not run in float32" in capsys.readouterr().err


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_a_rule_four_percent_off_is_found_in_every_dtype(dtype, fits):
    model = looks_up_scaled(tiny_model("qwen2", dtype=dtype))
    if not fits and dtype in HALF:
        too_large_in_float32(model)
    with pytest.raises(UserError, match="embed_tokens.weight is off"):
        ScoreGram(model, LAW).audit(PROMPT, BLOCK)


def test_a_rule_four_percent_off_is_found_under_bfloat16_products_and_checkpointing():
    model = looks_up_scaled(tiny_model("qwen2", dtype=torch.bfloat16))
    gram = ScoreGram(model, LAW, gram_dtype="bfloat16", gradient_checkpointing=True)
    with pytest.raises(UserError, match="embed_tokens.weight is off"):
        gram.audit(PROMPT, BLOCK)


@pytest.mark.parametrize("family,fails", [("qwen2", False), ("qwen2", True), ("gemma3_text", False), ("gpt_neox", True)])
@pytest.mark.parametrize("dtype", HALF)
def test_the_audit_leaves_every_parameter_and_buffer_as_it_was(family, fails, dtype):
    model = tiny_model(family, dtype=dtype)
    if fails:
        looks_up_scaled(model)
    state = {name: x.clone() for name, x in (*model.named_parameters(), *model.named_buffers())}
    logits = model(torch.tensor([PROMPT])).logits
    gram = ScoreGram(model, LAW)
    if fails:
        with pytest.raises(UserError):
            gram.audit(PROMPT, BLOCK)
    else:
        gram.audit(PROMPT, BLOCK)
    after = dict((*model.named_parameters(), *model.named_buffers()))
    assert after.keys() == state.keys()
    for name, x in state.items():
        assert after[name].dtype == x.dtype and torch.equal(after[name], x), name
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    assert torch.equal(model(torch.tensor([PROMPT])).logits, logits)


def measurement(model, block_size):
    args = Namespace(
        seed=0,
        max_new_tokens=4,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        stop=[],
        M=2,
        K_list=[4, block_size],
        gen_bs=64,
        block_size=block_size,
        estimators=[],
    )
    return Measurement(model, tiny_tokenizer(), ScoreGram(model, SamplingLaw(max_new_tokens=4)), args)


def test_the_audited_block_is_as_large_as_the_blocks_of_the_run():
    row, prompt = Row("p", "1", {}, "problems.jsonl, line 1", 0), [1, 2, 3]
    model = tiny_model("llama", vocab_size=5, eos_token_id=0, bos_token_id=None)
    assert measurement(model, 24).audit(row, prompt)["block_size"] == 24
    wrong = looks_up_scaled(tiny_model("llama", vocab_size=5, eos_token_id=0, bos_token_id=None), from_rows=24)
    with pytest.raises(UserError, match="embed_tokens.weight is off"):
        measurement(wrong, 24).audit(row, prompt)


class TimeFirst(nn.Module):
    """Runs a layer over (time, batch, d)."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.transpose(0, 1)).transpose(0, 1)


class Copies(nn.Module):
    """Runs a layer over (copies, batch, time, d)."""

    def __init__(self, layer, copies):
        super().__init__()
        self.layer, self.copies = layer, copies

    def forward(self, x):
        scales = torch.arange(1.0, self.copies + 1, dtype=x.dtype).view(-1, 1, 1, 1)
        return self.layer(scales * x).mean(0)


@pytest.mark.parametrize("wrap", [TimeFirst, lambda layer: Copies(layer, 12)], ids=["time", "copies"])
def test_a_layer_that_leads_with_another_dimension_as_long_as_the_batch_is_measured_right(wrap):
    continuations = random_continuations(1, (3, 6, 1, 5, 2, 4, 6, 6, 1, 2, 3, 4))  # 12 rows of 7 + 6 - 1 positions
    model = tiny_model("qwen2")
    model.model.layers[0].mlp.up_proj = wrap(model.model.layers[0].mlp.up_proj)
    assert relative_error(model, continuations) < 1e-9


def test_out_of_memory_inside_the_audit_leaves_no_gradient_for_the_next_one():
    model = tiny_model("qwen2", dtype=torch.float32)
    gram, left = ScoreGram(model, LAW), [1]
    p = model.model.norm.weight.requires_grad_(True)

    def refuse(gradient):
        if left:
            left.pop()
            raise torch.OutOfMemoryError("CUDA out of memory (made up)")

    p.register_post_accumulate_grad_hook(refuse)  # comes before the audit's own
    p.requires_grad_(False)
    with pytest.raises(torch.OutOfMemoryError):
        gram.audit(PROMPT, BLOCK)
    assert all(p.grad is None for p in model.parameters())
    assert gram.audit(PROMPT, BLOCK)["max_relative_error"] < 1e-5


def test_scores_that_are_not_finite_are_no_verdict_on_the_architecture():
    model = tiny_model("llama", dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight.fill_(np.inf)
    with pytest.raises(FloatingPointError, match="not finite"):
        ScoreGram(model, LAW).audit(PROMPT, BLOCK)
