"""The score Gram equals per-sample autograd, whatever the family, the padding, the chunking and the ties."""

import numpy as np
import pytest
import torch
from grams import LAW, LENGTHS, PROMPT, audit_of, block_of, relative_error, score_gram, tokens
from tiny_models import (
    FAMILIES,
    enumerable_policy,
    enumerate_outcomes,
    float_means_double,
    per_sample_scores,
    random_continuations,
    tiny_model,
)
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.gram import layers
from Gradient_evaluation.runs.measure import scored
from Gradient_evaluation.sampling.generate import Continuation
from Gradient_evaluation.sampling.law import SamplingLaw

TIES = [(family, tied) for family in FAMILIES for tied in (False, True)]


@pytest.mark.parametrize("family,tied", TIES)
def test_gram_equals_per_sample_autograd_in_float64(family, tied):
    model = tiny_model(family, tie_word_embeddings=tied)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tied
    assert relative_error(model, random_continuations(0, LENGTHS)) < 1e-9


@pytest.mark.parametrize("family,tied", TIES)
def test_audit_finds_every_parameter_right_in_float64(family, tied):
    with float_means_double():
        model = tiny_model(family, tie_word_embeddings=tied)
        audit = audit_of(model, random_continuations(0, LENGTHS))
    assert audit["parameters"] == len(list(model.parameters()))
    assert audit["max_relative_error"] < 1e-9


def test_a_model_with_biases_everywhere_is_measured_exactly():
    model = tiny_model("llama", attention_bias=True, mlp_bias=True)
    model.lm_head.bias = nn.Parameter(torch.randn(40, dtype=torch.float64))
    assert relative_error(model, random_continuations(0, LENGTHS)) < 1e-9


def test_under_lora_only_the_adapters_are_measured():
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(
        tiny_model("qwen2"),
        peft.LoraConfig(r=3, lora_alpha=8, lora_dropout=0.1, bias="lora_only", target_modules=["q_proj", "down_proj"]),
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn_like(p))
    model = model.double().eval()
    adapters = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all("lora_" in name or "bias" in name for name in adapters)
    continuations = random_continuations(0, LENGTHS)
    assert relative_error(model, continuations) < 1e-9
    with float_means_double(), score_gram(model) as gram:
        assert set(gram.names.values()) == set(adapters)
        assert gram.audit(PROMPT, tokens(continuations))["max_relative_error"] < 1e-9


@pytest.mark.parametrize("dtype,error", [(torch.bfloat16, 0.05), (torch.float16, 0.02)])
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "gpt2"])
def test_half_precision_is_summed_in_float32_and_stays_close(family, dtype, error):
    half, exact = tiny_model(family, dtype=dtype), tiny_model(family)
    exact.load_state_dict(half.state_dict())
    continuations = random_continuations(0, LENGTHS)
    truth = block_of(exact, continuations).gram
    assert np.abs(block_of(half, continuations).gram - truth).max() < error * np.abs(truth).max()
    audit_of(half, continuations)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_bfloat16_products_move_the_gram_as_the_audit_allows(family):
    continuations, model = random_continuations(0, LENGTHS), tiny_model(family, dtype=torch.float32)
    plain = block_of(model, continuations).gram
    half = block_of(model, continuations, gram_dtype="bfloat16").gram
    assert 1e-6 * np.abs(plain).max() < np.abs(half - plain).max() < 0.02 * np.abs(plain).max()
    assert audit_of(model, continuations, gram_dtype="bfloat16")["tolerance"] == 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_gram_equals_per_sample_autograd_in_float32_to_1e_4(family):
    exact, single = tiny_model(family), tiny_model(family, dtype=torch.float32)
    single.load_state_dict(exact.state_dict())
    continuations = random_continuations(0, LENGTHS)
    scores = per_sample_scores(exact, PROMPT, continuations, LAW)
    truth = (scores @ scores.T).numpy()
    assert np.abs(block_of(single, continuations).gram - truth).max() < 1e-4 * np.abs(truth).max()


def test_experts_and_routers_are_measured_by_the_exact_fallback(capsys):
    model = tiny_model("mixtral", num_local_experts=3, num_experts_per_tok=2)
    assert relative_error(model, random_continuations(0, LENGTHS), budget=20_000) < 1e-9
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "backward" in said and "model.layers.0.mlp.gate.weight" in said


def test_a_weight_used_outside_its_module_is_never_left_out():
    class Borrowed(nn.Module):  # uses the weight of a module that is never called
        def __init__(self, owner):
            super().__init__()
            self.owner = owner

        def forward(self, x):
            return nn.functional.linear(x, self.owner.weight)

    model = tiny_model("qwen2")
    model.model.layers[0].mlp.up_proj = Borrowed(model.model.layers[0].mlp.up_proj)
    assert relative_error(model, random_continuations(0, LENGTHS)) < 1e-9


def test_a_layer_called_twice_has_the_sum_of_its_gradients():
    model = tiny_model("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm
    assert relative_error(model, random_continuations(0, LENGTHS)) < 1e-9


def test_only_parameters_that_require_grad_are_measured():
    model = tiny_model("qwen2", tie_word_embeddings=True)
    for name, p in model.named_parameters():
        p.requires_grad_("layers.1.self_attn" in name or name.endswith("norm.weight"))
    assert relative_error(model, random_continuations(0, LENGTHS)) < 1e-9


def test_a_padding_row_of_the_embedding_has_no_gradient():
    model = tiny_model("llama", pad_token_id=5)  # 5 is in the prompt twice
    assert model.get_input_embeddings().padding_idx == 5
    assert relative_error(model, random_continuations(0, LENGTHS)) < 1e-9


def test_an_input_changed_in_place_is_measured_by_the_fallback(capsys):
    class Shift(nn.Module):  # needs nothing of its input for its gradient, so autograd does not mind
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.full((48,), 0.1, dtype=torch.float64))

        def forward(self, x):
            return x + self.shift

    class Careless(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.shift = layer, Shift()

        def forward(self, x):
            x = self.layer(x)
            out = self.shift(x)
            x.mul_(2.0)
            return out

    for prompt, said in ((PROMPT, False), (PROMPT[:1], True)):  # of the longer one the copy kept has the old value
        model = tiny_model("qwen2")
        model.model.layers[0].mlp.up_proj = Careless(model.model.layers[0].mlp.up_proj)
        assert relative_error(model, random_continuations(0, LENGTHS), prompt=prompt) < 1e-9
        assert ("shift.shift" in capsys.readouterr().err) == said


@pytest.mark.parametrize("budget", [1, 3000])
@float_means_double()
def test_chunks_of_any_size_give_the_same_gram(budget):
    model, continuations = tiny_model("qwen2", tie_word_embeddings=True), random_continuations(0, LENGTHS)
    whole, parts = block_of(model, continuations, budget=2**26), block_of(model, continuations, budget=budget)
    np.testing.assert_allclose(parts.gram, whole.gram, rtol=1e-12)


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
@pytest.mark.parametrize("prompt", [[3], [4] * 40])
def test_prompts_short_and_long_are_shared_with_the_same_gram(family, prompt):
    assert relative_error(tiny_model(family), random_continuations(0, LENGTHS), prompt=prompt) < 1e-9


def test_the_audit_shares_nothing_and_so_finds_a_look_ahead():
    class LooksAhead(nn.Module):  # every position sees the mean of all
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x + x.mean(1, keepdim=True))

    model = tiny_model("qwen2")
    model.model.layers[0].mlp = LooksAhead(model.model.layers[0].mlp)
    with pytest.raises(UserError, match="is off by"):
        audit_of(model, random_continuations(0, LENGTHS))


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
@float_means_double()
def test_log_probs_of_a_padded_batch_are_those_of_one_by_one(family):
    model, continuations = tiny_model(family), random_continuations(0, LENGTHS)
    alone = [block_of(model, [each]).log_probs[0] for each in continuations]
    np.testing.assert_allclose(block_of(model, continuations).log_probs, alone, rtol=1e-12)


def as_continuations(outcomes):
    return [Continuation(o.tokens, o.ended, "") for o in outcomes]


LAWS = [SamplingLaw(max_new_tokens=3), SamplingLaw(temperature=1.4, top_k=4, top_p=0.9, max_new_tokens=3)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("law", LAWS, ids=["neutral", "temperature, top_k and top_p"])
def test_exact_scoring_is_the_probability_with_score_mean_0(law, tied):
    model = enumerable_policy(tied=tied)
    outcomes = enumerate_outcomes(model, [1, 3, 2], law)
    p = np.array([o.probability for o in outcomes])
    scores = torch.stack([o.score for o in outcomes])
    block = block_of(model, as_continuations(outcomes), law, [1, 3, 2])
    np.testing.assert_allclose(np.exp(block.log_probs), p, rtol=1e-10)
    truth = (scores @ scores.T).numpy()
    assert np.abs(block.gram - truth).max() < 1e-9 * np.abs(truth).max()
    assert abs(p @ block.gram @ p) < 1e-12 * (p @ np.diag(block.gram))


@pytest.mark.parametrize("law", LAWS, ids=["neutral", "temperature, top_k and top_p"])
def test_published_scoring_has_another_mean_also_at_top_p_1(law):
    model = enumerable_policy()
    outcomes = enumerate_outcomes(model, [1, 3, 2], law)
    p = np.array([o.probability for o in outcomes])
    continuations = as_continuations(outcomes)
    with score_gram(model, SamplingLaw()) as published:
        gram = published.block([1, 3, 2], *scored(continuations, "published")).gram
    assert p @ gram @ p > 1e-6 * (p @ np.diag(gram))  # exact scoring: below 1e-12 (the test above)
    # The truth of what it scores: the full softmax at temperature 1 of the tokens before the end of sequence.
    plain = [Continuation(c.tokens[:-1] if c.ended else c.tokens, False, "") for c in continuations]
    some = [i for i, c in enumerate(plain) if c.tokens][:6]
    scores = per_sample_scores(model, [1, 3, 2], [plain[i] for i in some], SamplingLaw())
    np.testing.assert_allclose(gram[np.ix_(some, some)], (scores @ scores.T).numpy(), rtol=1e-9)


@float_means_double()
def test_masked_tokens_are_read_and_have_no_share_in_the_score():
    model, continuations = tiny_model("qwen2"), random_continuations(0, LENGTHS)
    masks = [[i % 2 == 1 for i in range(length)] for length in LENGTHS]  # nothing counts of the one of a single token
    with score_gram(model) as gram:
        block = gram.block(PROMPT, tokens(continuations), masks)
    scores = []
    for each, mask in zip(continuations, masks):
        cut = [Continuation(each.tokens[:i], False, "") for i in range(1, len(mask) + 1)]
        cumulated = torch.cat([per_sample_scores(model, PROMPT, [shorter], LAW) for shorter in cut])
        of_tokens = cumulated.diff(dim=0, prepend=torch.zeros_like(cumulated[:1]))
        scores.append(of_tokens[torch.tensor(mask)].sum(0))
    truth = (torch.stack(scores) @ torch.stack(scores).T).numpy()
    assert np.abs(block.gram - truth).max() < 1e-9 * np.abs(truth).max()
    assert block.log_probs[2] == 0 and not block.gram[2].any()


@pytest.mark.parametrize("rule,module", [(nn.Linear, "proj"), (nn.Embedding, "embed_tokens")])
def test_audit_stops_at_a_wrong_rule_and_names_the_module(monkeypatch, rule, module):
    right = layers.RULES[rule]
    monkeypatch.setitem(layers.RULES, rule, lambda layer, a, b: right(layer, a, b * 1.01))
    with pytest.raises(UserError, match=module):
        audit_of(tiny_model("llama"), random_continuations(0, LENGTHS))


def test_audit_stops_when_a_norm_layer_is_left_out(monkeypatch):
    right = layers.uses_by_vjp

    def zero(module, a, b, names):
        return {name: layers.DenseGradient(use.g * 0) for name, use in right(module, a, b, names).items()}

    monkeypatch.setattr(layers, "uses_by_vjp", zero)
    with pytest.raises(UserError, match="norm"):
        audit_of(tiny_model("llama"), random_continuations(0, LENGTHS))


def test_scores_that_are_not_finite_stop_the_run():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.inf
    with pytest.raises(FloatingPointError):
        block_of(model, random_continuations(0, LENGTHS))


class LargestTensor(TorchDispatchMode):
    """Counts, while it is entered, the elements of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        storages = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in storages:
                self.elements = max(self.elements, x.numel())
        return out


def test_nothing_of_a_parameters_size_is_made_during_a_block():
    model = tiny_model(
        "qwen2",
        dtype=torch.float32,
        vocab_size=3000,
        hidden_size=96,
        intermediate_size=512,
        num_attention_heads=4,
        head_dim=24,
        tie_word_embeddings=True,
    )
    with score_gram(model, SamplingLaw(max_new_tokens=6), budget=20_000) as gram, LargestTensor() as largest:
        gram.block(PROMPT, tokens(random_continuations(0, LENGTHS)))
    logits = len(LENGTHS) * max(LENGTHS) * 3000
    assert 0 < largest.elements <= logits < model.get_input_embeddings().weight.numel()
