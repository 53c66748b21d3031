"""Sampler and scorer are one law: proved family by family, and a run in which they part is stopped."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from grams import score_gram, tokens
from tiny_models import FAMILIES, draw, longrope_model, tiny_model, tiny_tokenizer

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.models import crosses_rope_length, rope_length
from Gradient_evaluation.runs.checks import check_sampler, differences, in_float32, possible_log_kept, tolerance_of
from Gradient_evaluation.sampling import generate as sampling
from Gradient_evaluation.sampling.law import SamplingLaw, kept_tokens

PROMPT = [1, 3, 7, 9, 3]
WORDS = tiny_tokenizer(("<pad>", "<bos>", "<eos>", *map(str, range(37))))
LAW = SamplingLaw(top_p=0.95, max_new_tokens=12)
RIGHT = {family: {} for family in (*FAMILIES, "mamba", "stablelm", "cohere", "glm", "phi", "biogpt")} | {
    "opt": dict(ffn_dim=48, word_embed_proj_dim=32),
    "bloom": dict(n_layer=2, n_head=4),
    "gpt_neo": dict(num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]]),
    "mpt": dict(d_model=32, n_heads=4, n_layers=2),
    "gptj": dict(n_embd=32, n_layer=2, n_head=4, rotary_dim=4),
    "jamba": dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, use_mamba_kernels=False),
    "gpt_oss": dict(num_local_experts=2, num_experts_per_tok=2),
    # Positions counted by a layer that holds none: cached decoding was rotated as if every token were the first.
    "bamba": dict(attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=8),
    "minimax": dict(
        num_experts_per_tok=2, num_local_experts=2, layer_types=["linear_attention", "full_attention"], block_size=4
    ),
    # Positions from padding_idx + 1, and a padding token (id 1, in the prompt and among the draws) that does not count.
    "roberta": dict(is_decoder=True, pad_token_id=0),
    "xlm-roberta": dict(is_decoder=True, pad_token_id=1),
    "camembert": dict(is_decoder=True, pad_token_id=1),
    "roberta-prelayernorm": dict(is_decoder=True, pad_token_id=1),
    "data2vec-text": dict(is_decoder=True, pad_token_id=1),
    "bert": dict(is_decoder=True),
    "electra": dict(is_decoder=True, embedding_size=32),
}


def family_model(family, dtype=torch.float32):
    model = tiny_model(family, dtype=dtype, **RIGHT[family])
    model.generation_config.eos_token_id = 2
    return model


def drawn_by(model, law=LAW, n=16, prompt=PROMPT):
    return draw(model, law, n, prompt=prompt, tokenizer=WORDS)


def checked(model, drawn, law=LAW, prompt=PROMPT):
    with score_gram(model, law) as gram:
        return check_sampler(gram, law, prompt, drawn, "line 1")


def largest_difference(model, drawn, law=LAW, prompt=PROMPT):
    with score_gram(model, law) as gram:
        return max(np.abs(each).max() for each in differences(gram, law, prompt, drawn))


@pytest.mark.parametrize("family", RIGHT)
def test_sampler_and_scorer_are_one_law_in_every_family(family):
    model = family_model(family)
    drawn = drawn_by(model)
    assert len({len(c.tokens) for c in drawn}) > 1  # rows left the batch
    largest = largest_difference(model, drawn)
    print(f"| {family} | {type(model).__name__} | {largest:.1e} |")
    assert largest < 1e-5
    assert checked(model, drawn)["largest_difference"] == largest
    with score_gram(model, LAW) as gram:
        summed = gram.block(PROMPT, tokens(drawn[:4])).log_probs  # the pass that the run differentiates, its prompt shared
    np.testing.assert_allclose(summed, [c.log_probs.sum() for c in drawn[:4]], atol=1e-4)


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "bamba", "opt", "gpt2"])
def test_positions_are_those_the_model_itself_counts(family):
    model = family_model(family)
    ids = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    positions = sampling.position_ids(sampling.padding_position(model), ids)
    ours, own = model(input_ids=ids, position_ids=positions).logits, model(input_ids=ids).logits
    torch.testing.assert_close(ours, own, atol=1e-5, rtol=0)


@pytest.mark.parametrize("broken", ["bamba", "roberta"])
def test_other_positions_in_decoding_stop_and_name_the_token(monkeypatch, broken):
    model = family_model(broken)
    counted = sampling.position_ids
    monkeypatch.setattr(sampling, "position_ids", lambda padding, tokens: counted(padding, tokens).clamp(max=4))
    drawn = drawn_by(model)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"line 1: .*not one law.* continuation \d+ .* token \d+ .*try --dtype"):
        checked(model, drawn)


def test_a_model_decoded_wrongly_by_transformers_stops_the_run():
    model = tiny_model("megatron-bert", dtype=torch.float32, is_decoder=True)
    model.generation_config.eos_token_id = 2
    with pytest.raises(UserError, match="MegatronBertForCausalLM disagree"):
        checked(model, drawn_by(model))


@pytest.mark.parametrize("times", [1.5, 5.0])
def test_only_a_continuation_beyond_the_tolerance_stops(times):
    model = family_model("llama")
    drawn = drawn_by(model)
    longest = max(range(len(drawn)), key=lambda i: len(drawn[i].tokens))
    size = len(drawn[longest].tokens)

    def off(by):
        log_probs = drawn[longest].log_probs.copy()
        log_probs[size // 2] += by * size * 1e-5
        return [replace(c, log_probs=log_probs) if i == longest else c for i, c in enumerate(drawn)]

    checked(model, off(0.5))
    with pytest.raises(UserError, match=f"continuation {longest} .* token {size // 2 + 1} "):
        checked(model, off(times))


@pytest.mark.parametrize(
    "law", [SamplingLaw(max_new_tokens=8), SamplingLaw(temperature=0.6, top_k=5, max_new_tokens=8)], ids=str
)
@pytest.mark.parametrize("scoring", ["exact", "published"])
def test_the_sampled_law_is_compared_whatever_the_scoring(law, scoring):
    model = family_model("qwen2")
    drawn = drawn_by(model, law)
    with score_gram(model, law if scoring == "exact" else SamplingLaw()) as gram:
        assert check_sampler(gram, law, PROMPT, drawn, "line 1")["largest_difference"] < 1e-5
        with pytest.raises(UserError, match="not one law"):
            check_sampler(gram, replace(law, top_p=0.8), PROMPT, drawn, "line 1")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("top_p", [0.5, 0.95, 1.0])
def test_half_precision_may_err_by_its_rounding_and_no_more(dtype, top_p):
    law = SamplingLaw(top_p=top_p, max_new_tokens=12)
    model = tiny_model("llama", dtype=torch.float32)
    model.generation_config.eos_token_id = 2
    with torch.no_grad():
        model.lm_head.weight.mul_(4)  # logits up to 20, as trained models have
    model = model.to(dtype)
    drawn = drawn_by(model, law, n=48)
    assert checked(model, drawn, law)["largest_difference"] < tolerance_of(model).per_token
    shifted = drawn_by(model, law, n=48, prompt=[3, *PROMPT])  # as if decoded one position further
    with pytest.raises(UserError, match="not one law"):
        checked(model, shifted, law)


def checked_in_float32(model):
    """As both scripts check a half-precision model: drawn and scored in float32."""
    return in_float32(model, lambda: checked(model, drawn_by(model, n=16)), "the check")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_checked_in_float32_and_comes_back(monkeypatch, dtype):
    """Very wide logits are no false alarm, and decoding one position further, unseen in bfloat16, stops the run."""
    model = family_model("llama", dtype=dtype)
    with torch.no_grad():
        model.lm_head.weight.mul_(50)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    assert checked_in_float32(model)["largest_difference"] < 1e-4
    with torch.no_grad():
        model.lm_head.weight.div_(50)
    counted = sampling.position_ids
    monkeypatch.setattr(sampling, "position_ids", lambda padding, tokens: counted(padding, tokens) + 1)
    with pytest.raises(UserError, match="not one law"):
        checked_in_float32(model)
    with torch.no_grad():
        model.lm_head.weight.copy_(before["lm_head.weight"])
    assert all(x.dtype == dtype for x in model.parameters())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    "law", [SamplingLaw(top_p=0.95), SamplingLaw(top_p=0.5), SamplingLaw(top_k=5), SamplingLaw(top_k=9, top_p=0.8)], ids=str
)
@pytest.mark.parametrize("slack", [1e-5, 0.03])
def test_logits_off_by_the_slack_keep_a_share_within_bounds(law, slack):
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(300, 40, generator=generator, dtype=torch.float64)
    logits[100:] = logits[100:].round()  # ties; noise breaks them
    tokens = torch.randint(40, (300,), generator=generator)
    least, largest = possible_log_kept(logits, tokens, law, slack)
    different = 0
    for _ in range(20):
        noisy = logits + slack * (2 * torch.rand(logits.shape, generator=generator, dtype=torch.float64) - 1)
        kept = kept_tokens(noisy, law).scatter(1, tokens.unsqueeze(1), True)
        different += int((kept != kept_tokens(logits, law).scatter(1, tokens.unsqueeze(1), True)).any(1).sum())
        log_kept = logits.masked_fill(~kept, -torch.inf).logsumexp(1) - logits.logsumexp(1)
        assert (log_kept >= least - 1e-12).all() and (log_kept <= largest + 1e-12).all()
    assert different > 100  # the edge did move


def test_the_edge_of_a_nucleus_with_ties_is_no_false_alarm():
    """Tokens in exact ties everywhere, their order left to rounding: every row of the head twice."""
    model = family_model("gpt2")
    with torch.no_grad():
        head = model.lm_head.weight
        head[20:40] = head[:20] * (1 + 1e-7)
        head.mul_(2)
    for top_p in (0.3, 0.7, 0.95):
        law = SamplingLaw(top_p=top_p, max_new_tokens=12)
        checked(model, drawn_by(model, law, n=64), law)


@pytest.mark.parametrize("length,one_law", [(4, True), (5, True), (6, False), (16, False), (17, True), (40, True)])
def test_longrope_is_one_law_where_it_is_not_refused(length, one_law):
    model, law = longrope_model(), SamplingLaw(max_new_tokens=12)
    prompt = [3 + i % 30 for i in range(length)]
    refused = crosses_rope_length(rope_length(model.config), length, law.max_new_tokens)
    assert refused != one_law
    drawn = [c for c in drawn_by(model, law, prompt=prompt) if len(c.tokens) == 12]
    assert (largest_difference(model, drawn, law, prompt) < 1e-5) == one_law
