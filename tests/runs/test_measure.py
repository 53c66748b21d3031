"""What the flags make of a ScoreGram, and the block that a run audits."""

from argparse import Namespace

import numpy as np
import pytest
import torch
from grams import PROMPT, block_of, looks_up_scaled
from tiny_models import random_continuations, tiny_model, tiny_tokenizer

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.gram import ScoreGram
from Gradient_evaluation.gram import scoring as gram_scoring
from Gradient_evaluation.runs.inputs.dataset import Row
from Gradient_evaluation.runs.inputs.oracle_table import OracleRow
from Gradient_evaluation.runs.inputs.rewards import resolve_rewards
from Gradient_evaluation.runs.measure import Measurement, score_gram, scored
from Gradient_evaluation.runs.source import Sampled
from Gradient_evaluation.sampling.generate import Continuation
from Gradient_evaluation.sampling.law import SamplingLaw
from Gradient_evaluation.stats.prompts import reduce_prompts

MORE = dict(allow_mismatch=False, importance_weights=False, by_layer=False, optimizer_state=None, ref_model=None)


def flags(**changed):
    law = dict(temperature=0.8, top_p=1.0, top_k=0, max_new_tokens=4, stop=[], seed=0)
    gram = dict(scoring="exact", params=None, sketch_dim=0, gram_memory=64, gradient_checkpointing=False, gram_dtype="float32")
    return Namespace(**{**law, **gram, "M": 2, "per_prompt": None, "gen_bs": 64, "estimators": [], **MORE, **changed})


@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_each_scoring_has_its_law_and_its_tokens(top_p):
    drawn = [Continuation(c.tokens, i != 1, "") for i, c in enumerate(random_continuations(0, (3, 6, 2, 5)))]
    before_the_end = [Continuation(c.tokens[:-1] if c.ended else c.tokens, False, "") for c in drawn]
    expected = {
        "exact": (drawn, SamplingLaw(0.8, top_p)),
        "published": (before_the_end, SamplingLaw()),  # the full softmax at temperature 1, without the end of sequence
    }
    for scoring, (continuations, law) in expected.items():
        model = tiny_model("qwen2", dtype=torch.float64)
        with score_gram(model, flags(scoring=scoring, top_p=top_p)) as gram:
            block = gram.block(PROMPT, *scored(drawn, scoring))
        truth = block_of(model, continuations, law)
        np.testing.assert_allclose(block.log_probs, truth.log_probs, rtol=1e-6)
        np.testing.assert_allclose(block.gram, truth.gram, rtol=1e-5, atol=1e-6 * np.abs(truth.gram).max())


@pytest.mark.parametrize(
    "changed, said",
    [
        (dict(params="zzz"), "--params zzz: finds no parameter; names look like model.embed_tokens.weight"),
        (dict(gradient_checkpointing=True), "--gradient_checkpointing: Qwen2ForCausalLM has no layer that transformers"),
    ],
)
def test_what_a_flag_can_cause_is_an_error_of_the_user(changed, said, monkeypatch):
    monkeypatch.setattr(gram_scoring, "GradientCheckpointingLayer", ScoreGram)  # no layer of the model is one
    with pytest.raises(UserError, match=said):
        score_gram(tiny_model("qwen2"), flags(**changed))


def audit_of_a_run(model, block_size):
    args = flags(temperature=1.0, K_list=[4, block_size], block_size=block_size)
    row = Row("p", "1", {}, "problems.jsonl, line 1", 0)
    with score_gram(model, args) as gram:
        return Measurement(model, gram, Sampled(model, tiny_tokenizer(), args, resolve_rewards("integer")), args).audit(
            row, [1, 2, 3]
        )


def test_the_audited_block_is_as_large_as_the_blocks_of_the_run():
    model = tiny_model("llama", vocab_size=5, eos_token_id=0, bos_token_id=None)
    assert audit_of_a_run(model, 24)["block_size"] == 24
    wrong = looks_up_scaled(tiny_model("llama", vocab_size=5, eos_token_id=0, bos_token_id=None), from_rows=24)
    with pytest.raises(UserError, match="embed_tokens.weight is off"):
        audit_of_a_run(wrong, 24)


@pytest.mark.parametrize("value, M", [(None, 2), (None, 1), (0.5, 2)])
def test_modules_have_a_cross_fitted_trace_where_v_is_unknown(value, M):
    """They add up to the prompt's own; with a V(x), or one block, there is none."""
    model = tiny_model("llama", vocab_size=5, eos_token_id=0, bos_token_id=None)
    args = flags(temperature=1.0, K_list=[4, 8], block_size=8, by_layer=True, reward="integer", M=M)
    row = OracleRow("p", "1", {"kind": "sum", "tags": [1]}, "problems.jsonl, line 1", 0, value, None, None)
    with score_gram(model, args) as gram:
        source = Sampled(model, tiny_tokenizer(), args, resolve_rewards("integer"))
        record = Measurement(model, gram, source, args).measure(row, [1, 2, 3], 0)
    assert record.columns == {"kind": "sum"}
    if value is not None or M == 1:
        assert record.module_oracle is None
        return
    whole = reduce_prompts([record]).cross_fitted_trace
    assert whole[0] > 0 and record.module_oracle.sum() == pytest.approx(whole[0], rel=1e-4)
