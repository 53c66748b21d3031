"""The sampling law: what is drawn, what its log-probs are, and what may not change either."""

import numpy as np
import pytest
import torch
from tiny_models import (
    PROMPT,
    draw,
    enumerable_policy,
    enumerate_outcomes,
    float_means_double,
    frequencies_agree,
    law_log_probs,
    tiny_model,
    tiny_tokenizer,
)
from transformers import TopKLogitsWarper, TopPLogitsWarper

from Gradient_evaluation.forward import replaced_forward
from Gradient_evaluation.sampling import law as law_module
from Gradient_evaluation.sampling import log_probs as log_probs_module
from Gradient_evaluation.sampling import thin_products
from Gradient_evaluation.sampling.cache import GrowingLayer, let_grow
from Gradient_evaluation.sampling.generate import eos_token_ids
from Gradient_evaluation.sampling.law import SamplingLaw, kept_tokens, uniforms
from Gradient_evaluation.sampling.law import draw as draw_of_law
from Gradient_evaluation.sampling.log_probs import log_probs

LAWS = {
    "neutral": SamplingLaw(max_new_tokens=3),
    "temperature": SamplingLaw(temperature=0.6, max_new_tokens=3),
    "top_k": SamplingLaw(top_k=3, max_new_tokens=3),
    "top_p": SamplingLaw(top_p=0.8, max_new_tokens=3),
    "all": SamplingLaw(temperature=1.4, top_k=4, top_p=0.85, max_new_tokens=3),
}


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
def test_frequencies_are_those_of_the_law_by_enumeration(law):
    model = enumerable_policy()
    outcomes = enumerate_outcomes(model, PROMPT, law)
    assert sum(o.probability for o in outcomes) == pytest.approx(1.0, abs=1e-12)
    frequencies_agree(draw(model, law, 4000, batch_size=2000), outcomes)


def test_hidden_generation_defaults_change_nothing():
    law, model = LAWS["top_p"], enumerable_policy()
    plain = draw(model, law, 500)
    model.generation_config.update(top_k=1, repetition_penalty=1.7, temperature=0.2, top_p=0.1, do_sample=True)
    assert draw(model, law, 500) == plain
    frequencies_agree(draw(model, law, 4000, batch_size=2000), enumerate_outcomes(model, PROMPT, law))


WORDS = tiny_tokenizer(("<pad>", "<bos>", "<eos>", *map(str, range(37))))
# In float32 the logits move by about 1e-6 with the shape of the batch, and a draw that lies so near to the boundary between
# two tokens may fall on the other side. The tests below say that theirs lie ten times as far away, whatever the processor.
WIDE = 1e-5


@float_means_double()
def least_margin(model, continuations, law, seed=0):
    """The least distance of a random number to the boundary between two tokens, and of top_p to that of the nucleus.

    In float64, of the tokens that were drawn, one continuation at a time. The nucleus's own boundary counts: a token
    on it would move all the others.
    """
    model, least = model.double(), 1.0
    u = uniforms(seed, "oracle", 7, 0, len(continuations), law.max_new_tokens)
    for row, c in zip(u, continuations):
        logits = model(input_ids=torch.tensor([[*PROMPT, *c.tokens]]), use_cache=False).logits[0]
        for position, token in enumerate(c.tokens):
            at = logits[None, len(PROMPT) - 1 + position].detach() / law.temperature
            edges = at.softmax(-1).sort(descending=True).values.cumsum(-1)
            if law.top_p < 1:
                least = min(least, float((edges - law.top_p).abs().min()))
            cdf = law_log_probs(at * law.temperature, law)[0].exp().cumsum(-1)
            assert token == int((cdf <= row[position]).sum())
            least = min(least, float((cdf[:-1] - row[position]).abs().min()))
    return least


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma3_text"])
def test_continuations_do_not_depend_on_the_batch_size(family):
    model = tiny_model(family, dtype=torch.float32)
    law = SamplingLaw(top_p=0.9, max_new_tokens=12)
    one = draw(model, law, 33, seed=3, batch_size=1, tokenizer=WORDS)
    assert one == draw(model, law, 33, seed=3, batch_size=33, tokenizer=WORDS)
    assert one == draw(model, law, 33, seed=3, batch_size=7, tokenizer=WORDS)
    assert len({len(c.tokens) for c in one}) > 2  # rows did end at different times
    assert least_margin(model, one, law, seed=3) > WIDE


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
@float_means_double()
def test_a_growing_cache_holds_what_transformers_holds(family):
    model = tiny_model(family)
    caches = [model(input_ids=torch.tensor([PROMPT])).past_key_values for _ in range(2)]
    for cache in caches:
        cache.reorder_cache(torch.zeros(4, dtype=torch.int64))
    let_grow(caches[0], 6)
    for step in range(5):  # beyond the room of 6 too
        tokens = torch.arange(len(caches[0].layers[0].keys))[:, None] + step
        logits = [model(input_ids=tokens, past_key_values=cache).logits for cache in caches]
        torch.testing.assert_close(logits[0], logits[1], rtol=1e-12, atol=1e-12)
        if step == 1:
            for cache in caches:
                cache.reorder_cache(torch.tensor([3, 1]))
    for grown, plain in zip(caches[0].layers, caches[1].layers):
        assert isinstance(grown, GrowingLayer) and grown.get_seq_length() == plain.get_seq_length() == 8
        torch.testing.assert_close(grown.keys, plain.keys, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grown.values, plain.values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "family,settings",
    [("mamba", {}), ("jamba", dict(attn_layer_period=2, attn_layer_offset=1, num_experts=2, use_mamba_kernels=False))],
)
def test_models_with_recurrent_state_draw_what_one_by_one_draws(family, settings):
    model = tiny_model(family, dtype=torch.float32, **settings)
    law = SamplingLaw(max_new_tokens=8)
    one = draw(model, law, 12, batch_size=1, tokenizer=WORDS)
    assert one == draw(model, law, 12, batch_size=12, tokenizer=WORDS)
    assert least_margin(model, one, law) > WIDE


def test_a_random_number_depends_on_its_coordinates_alone():
    whole = uniforms(3, "oracle", 11, 0, 6, 5)
    assert (whole[2:5] == uniforms(3, "oracle", 11, 2, 3, 5)).all()
    assert (whole[:, :2] == uniforms(3, "oracle", 11, 0, 6, 2)).all()
    others = [uniforms(4, "oracle", 11, 0, 6, 5), uniforms(3, "tracecov", 11, 0, 6, 5), uniforms(3, "oracle", 12, 0, 6, 5)]
    values = np.concatenate([whole.ravel(), *(other.ravel() for other in others)])
    assert len(set(values)) == len(values)
    assert (uniforms(3, "oracle", 2**64 - 1, 0, 1, 1) < 1).all()  # prompt ids use all 64 bits


def test_random_numbers_are_uniform_and_uncorrelated():
    a, b = uniforms(0, "oracle", 5, 0, 400, 50), uniforms(0, "tracecov", 5, 0, 400, 50)
    assert abs(a.mean() - 0.5) < 5 * np.sqrt(1 / 12 / a.size)
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 5 / np.sqrt(a.size)
    assert abs(np.corrcoef(a[:-1].ravel(), a[1:].ravel())[0, 1]) < 5 / np.sqrt(a.size)


@pytest.mark.parametrize("top_k,top_p", [(0, 0.9), (5, 1.0), (5, 0.7), (1, 1.0), (0, 1e-6), (100, 0.999)])
@pytest.mark.parametrize("ties", [False, True])
def test_kept_set_is_that_of_transformers(top_k, top_p, ties):
    logits = 2 * torch.randn(200, 30, generator=torch.Generator().manual_seed(0))
    scores = logits = logits.round() if ties else logits
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    kept = kept_tokens(logits, SamplingLaw(top_k=top_k, top_p=top_p))
    kept = torch.ones_like(logits, dtype=torch.bool) if kept is None else kept
    if not ties:
        assert (kept == (scores > -torch.inf)).all()
    # Which of equally likely tokens top_p drops is left to an unstable sort there; how many it drops is not.
    ours, theirs = (logits.masked_fill(~mask, -torch.inf) for mask in (kept, scores > -torch.inf))
    assert (ours.sort().values == theirs.sort().values).all()
    if top_p == 1.0:
        assert (kept == (scores > -torch.inf)).all()


def test_the_kept_set_is_the_same_in_slices(monkeypatch):
    logits = torch.randn(5, 7, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    law = SamplingLaw(top_k=20, top_p=0.8)
    whole = kept_tokens(logits, law)
    for size in (1, 100, 700):
        monkeypatch.setattr(law_module, "SLICE", size)
        assert (kept_tokens(logits, law) == whole).all()


@pytest.mark.parametrize("first", [(1,), (2,), (3, 7), (7,)])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999999])
def test_the_likeliest_tokens_give_the_nucleus_of_a_sort(monkeypatch, first, top_p):
    logits = 3 * torch.randn(400, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[200:] = logits[200:].round()  # ties, at the edge too
    logits[::3, 5:20] = -torch.inf  # what top_k took out
    monkeypatch.setattr(law_module, "FIRST", ())
    by_sort = law_module.nucleus(logits, top_p)
    monkeypatch.setattr(law_module, "FIRST", first)
    assert (law_module.nucleus(logits, top_p) == by_sort).all()


@pytest.mark.parametrize("block", [1, 4, 7, 30, 256])
def test_a_draw_is_the_first_token_that_exceeds_u(monkeypatch, block):
    monkeypatch.setattr(law_module, "BLOCK", block)
    logits = 2 * torch.randn(500, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[::2, 3:17] = -torch.inf
    logits[1, 1:] = -torch.inf
    u = torch.rand(500, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u[0], u[1], u[2], u[3] = 0.0, 1 - 2.0**-53, 1 - 2.0**-53, 0.0
    drawn, _, _, sound = law_module.inverse_cdf(logits, u)
    cdf = logits.softmax(-1).cumsum(-1)
    assert sound and (drawn == (cdf <= u.unsqueeze(1) * cdf[:, -1:]).sum(-1).clamp(max=29))[4:].all()
    assert (logits[torch.arange(500), drawn] > -torch.inf).all() and drawn[0] == 0 and drawn[1] == 0


@pytest.mark.parametrize("first", [(3, 9), (9, 30), (30, 60)])
@pytest.mark.parametrize("top_p", [0.05, 0.6, 0.95, 0.9999])
def test_a_draw_among_the_likeliest_is_one_from_the_nucleus(monkeypatch, first, top_p):
    logits = 3 * torch.randn(900, 240, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[300:] = logits[300:].round()  # ties, at the edge of the nucleus too
    logits[::3, 5:230] = -torch.inf  # what top_k took out
    u = torch.rand(900, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    u[:300:2], u[1:300:2] = 0.0, 1 - 2.0**-53
    monkeypatch.setattr(law_module, "FIRST", first)
    drawn, _, _, sound = law_module.draw_from_nucleus(logits, u, top_p)
    kept = law_module._nucleus_by_sort(logits, top_p)
    assert sound and (drawn == law_module.inverse_cdf(logits.masked_fill(~kept, -torch.inf), u)[0]).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_nucleus_of_logits_that_are_not_sound_is_noticed(bad):
    logits, u = torch.randn(3, 600), torch.full((3,), 0.5, dtype=torch.float64)
    assert law_module.draw_from_nucleus(logits, u, 0.9).sound
    logits[1] = bad
    drawn, _, _, sound = law_module.draw_from_nucleus(logits, u, 0.9)
    assert not sound and ((0 <= drawn) & (drawn < 600)).all()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_a_thin_product_is_the_layer_and_leaves_no_trace(monkeypatch, bias, rows):
    monkeypatch.setattr(thin_products, "OUTPUTS", 7)
    monkeypatch.setattr(thin_products, "WIDE", 20)
    model = torch.nn.Sequential(torch.nn.Linear(5, 20, bias=bias), torch.nn.Linear(20, 19))
    x = torch.randn(rows, 1, 5)
    with torch.inference_mode():
        expected = model(x)
        with thin_products.thin_products(model):
            assert "forward" in vars(model[0]) and "forward" not in vars(model[1])
            found = model(x)
    torch.testing.assert_close(found, expected)
    assert "forward" not in vars(model[0])


def test_a_replaced_forward_gives_way_even_after_an_error():
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    wrapper = layers[1].forward = lambda x: 7 * x  # another library's
    x = torch.ones(1, 2)
    expected = [layer(x) for layer in layers]
    with pytest.raises(ZeroDivisionError), replaced_forward(layers, lambda layer, plain: lambda x: -plain(x)):
        assert all((layer(x) == -value).all() for layer, value in zip(layers, expected))
        raise ZeroDivisionError
    assert "forward" not in vars(layers[0]) and vars(layers[1])["forward"] is wrapper
    assert all((layer(x) == value).all() for layer, value in zip(layers, expected))


def test_no_rounding_draws_a_token_of_probability_zero():
    logits = torch.randn(2000, 700, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:, :3] = logits[:, 250:260] = logits[:, 500:] = -torch.inf
    for u in (0.0, 1 - 2.0**-53):
        drawn, *_ = law_module.inverse_cdf(logits, torch.full((2000,), u, dtype=torch.float64))
        assert (logits.gather(1, drawn.unsqueeze(1)) > -torch.inf).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_only_logits_that_are_not_sound_are_noticed(bad):
    logits, u = torch.zeros(3, 600), torch.full((3,), 0.5, dtype=torch.float64)
    logits[1, 7] = -torch.inf
    assert law_module.inverse_cdf(logits, u).sound
    logits[2, 300] = bad
    drawn, _, _, sound = law_module.inverse_cdf(logits, u)
    assert not sound and (drawn < 600).all()


@pytest.mark.parametrize("law", [SamplingLaw(), SamplingLaw(temperature=0.7), SamplingLaw(temperature=1.3, top_k=9, top_p=0.9)])
def test_log_probs_have_the_gradient_of_the_log_softmax(monkeypatch, law):
    logits = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    tokens = torch.arange(15).view(3, 5) % 12
    monkeypatch.setattr(log_probs_module, "SLICE", 8 * 12 * 4)  # four rows at a time
    torch.autograd.gradcheck(lambda x: log_probs(x, tokens, law), logits)


def test_log_probs_at_a_temperature_divide_the_logits():
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([0, 3, 8, 5])
    expected = (logits / 0.6).log_softmax(-1)[torch.arange(4), tokens]
    torch.testing.assert_close(log_probs(logits, tokens, SamplingLaw(temperature=0.6)), expected)


def test_probabilities_sum_to_one_over_the_nucleus():
    logits = torch.randn(9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    law = SamplingLaw(top_p=0.7, top_k=6)
    kept = kept_tokens(logits[None], law)[0].nonzero().squeeze(-1)
    values = log_probs(logits.expand(len(kept), -1), kept, law)
    assert float(values.exp().sum()) == pytest.approx(1.0, abs=1e-12)
    assert len(kept) < 9


def test_a_token_rounded_out_of_the_nucleus_stays_in():
    logits = torch.tensor([[4.0, 3.0, -2.0]])
    value = log_probs(logits, torch.tensor([2]), SamplingLaw(top_p=0.5))
    assert torch.isfinite(value).all()
    assert float(value) == pytest.approx(-2 - np.logaddexp(4.0, -2.0), abs=1e-6)


def test_either_of_two_end_ids_ends_a_continuation_once():
    model = enumerable_policy()
    model.generation_config.eos_token_id = [0, 3]
    law = SamplingLaw(max_new_tokens=4)
    assert eos_token_ids(model, tiny_tokenizer()) == (0, 3)
    drawn = draw(model, law, 400)
    assert {c.tokens[-1] for c in drawn if c.ended} == {0, 3}
    for c in drawn:
        assert c.ended == (c.tokens[-1] in (0, 3))
        assert not set(c.tokens[:-1]) & {0, 3}
        assert c.ended or len(c.tokens) == 4
    frequencies_agree(draw(model, law, 4000, batch_size=2000), enumerate_outcomes(model, PROMPT, law, eos=(0, 3)))


def test_a_stop_string_ends_at_the_token_that_completes_it():
    model, tokenizer = enumerable_policy(), tiny_tokenizer()
    free = draw(model, SamplingLaw(max_new_tokens=6), 300)
    stopped = draw(model, SamplingLaw(max_new_tokens=6, stop=("13", "2-")), 300)
    hits = 0
    for a, b in zip(free, stopped):
        ends = [a.text.find(s) + 2 for s in ("13", "2-") if s in a.text]
        if not ends:
            assert a == b
            continue
        hits += 1
        assert b.tokens == a.tokens[: min(ends)] and not b.ended
        assert b.text == a.text[: min(ends) - 2]
        assert tokenizer.decode(list(b.tokens)).endswith(("13", "2-"))
    assert hits > 20


def test_text_leaves_out_the_end_of_sequence():
    for c in draw(enumerable_policy(), SamplingLaw(max_new_tokens=3), 50):
        assert c.text == "".join("?123-"[t] for t in c.tokens if t)


def test_logits_that_are_not_finite_stop_the_run():
    model = enumerable_policy()
    with torch.no_grad():
        model.get_input_embeddings().weight[2].fill_(torch.nan)
    with pytest.raises(FloatingPointError):
        draw(model, SamplingLaw(max_new_tokens=3), 4)


@pytest.mark.parametrize("vocabulary_size", [30, 600])  # one looks at the likeliest tokens first, the other sorts
@pytest.mark.parametrize(
    "law",
    [
        SamplingLaw(),
        SamplingLaw(temperature=0.7),
        SamplingLaw(top_p=0.9),
        SamplingLaw(top_k=9),
        SamplingLaw(temperature=1.3, top_k=20, top_p=0.8),
    ],
    ids=str,
)
def test_a_draw_knows_its_log_prob_and_the_share_left(law, vocabulary_size):
    logits = torch.randn(400, vocabulary_size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits[:200] *= 4
    logits[100:300] = logits[100:300].round()  # ties, at the edge too
    u = torch.rand(400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    drawn = draw_of_law(logits, u, law)
    whole = (logits / law.temperature).log_softmax(-1).gather(1, drawn.tokens.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(drawn.log_probs, log_probs(logits, drawn.tokens, law))
    torch.testing.assert_close(drawn.log_probs + drawn.log_kept, whole)


def test_each_token_keeps_its_log_prob_when_rows_leave():
    model = enumerable_policy()
    for law in (SamplingLaw(max_new_tokens=6), SamplingLaw(max_new_tokens=6, top_p=0.9, stop=("13", "2-"))):
        drawn = draw(model, law, 200)
        assert len({len(c.tokens) for c in drawn}) > 3  # rows left the batch at different times
        for c in drawn:
            logits = model(input_ids=torch.tensor([[*PROMPT, *c.tokens]])).logits[0, len(PROMPT) - 1 : -1]
            expected = log_probs(logits, torch.tensor(c.tokens), law).detach().numpy()
            np.testing.assert_allclose(c.log_probs, expected, atol=1e-12)
