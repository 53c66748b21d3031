"""The score Gram equals per-sample autograd, whatever the family, the padding, the chunking and the ties."""

import weakref

import numpy as np
import pytest
import torch
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
from Gradient_evaluation.gram import layers as gram_rules
from Gradient_evaluation.gram import linear as outer_gram
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.sampling.generate import Continuation, SamplingLaw

PROMPT = [1, 5, 9, 5, 0, 2, 7]  # a repeated id, the pad id and the end-of-sequence id among them
LAW = SamplingLaw(temperature=0.8, max_new_tokens=6)  # random tokens are possible under it; top_k and top_p come below
LENGTHS = (3, 6, 1, 5)


def relative_error(model, continuations, law=LAW, prompt=PROMPT, **settings):
    with float_means_double():
        scores = per_sample_scores(model, prompt, continuations, law)
        block = ScoreGram(model, law, **settings).block(prompt, continuations)
    truth = (scores @ scores.T).numpy()
    return np.abs(block.gram - truth).max() / np.abs(truth).max()


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
        count = len(list(model.parameters()))
        audit = ScoreGram(model, LAW).audit(PROMPT, random_continuations(0, LENGTHS))
    assert audit["parameters"] == count
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
    assert relative_error(model, random_continuations(0, LENGTHS)) < 1e-9
    model.model.requires_grad_(False)
    for name, p in model.named_parameters():
        p.requires_grad_(name in adapters)
    gram = ScoreGram(model, LAW)
    assert set(gram.names.values()) == set(adapters) and all("lora_" in name or "bias" in name for name in adapters)
    with float_means_double():
        assert gram.audit(PROMPT, random_continuations(0, LENGTHS))["max_relative_error"] < 1e-9


@pytest.mark.parametrize("dtype,error", [(torch.bfloat16, 0.05), (torch.float16, 0.02)])
@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "gpt2"])
def test_half_precision_grams_are_summed_in_float32_and_stay_close(family, dtype, error):
    half, exact = tiny_model(family, dtype=dtype), tiny_model(family)
    exact.load_state_dict(half.state_dict())
    continuations = random_continuations(0, LENGTHS)
    truth = ScoreGram(exact, LAW).block(PROMPT, continuations).gram
    gram = ScoreGram(half, LAW)
    assert np.abs(gram.block(PROMPT, continuations).gram - truth).max() < error * np.abs(truth).max()
    gram.audit(PROMPT, continuations)


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_products_in_bfloat16_change_the_gram_a_little_and_the_audit_allows_for_it(family):
    continuations = random_continuations(0, LENGTHS)
    plain = ScoreGram(tiny_model(family, dtype=torch.float32), LAW).block(PROMPT, continuations).gram
    gram = ScoreGram(tiny_model(family, dtype=torch.float32), LAW, gram_dtype="bfloat16")
    half = gram.block(PROMPT, continuations).gram
    assert 1e-6 * np.abs(plain).max() < np.abs(half - plain).max() < 0.02 * np.abs(plain).max()
    assert gram.audit(PROMPT, continuations)["tolerance"] == 0.02


@pytest.mark.parametrize("family", FAMILIES)
def test_gram_equals_per_sample_autograd_in_float32_to_1e_4(family):
    exact, single = tiny_model(family), tiny_model(family, dtype=torch.float32)
    single.load_state_dict(exact.state_dict())
    continuations = random_continuations(0, LENGTHS)
    scores = per_sample_scores(exact, PROMPT, continuations, LAW)
    truth = (scores @ scores.T).numpy()
    gram = ScoreGram(single, LAW).block(PROMPT, continuations).gram
    assert np.abs(gram - truth).max() < 1e-4 * np.abs(truth).max()


def test_fused_experts_and_flattened_routers_are_measured_by_the_exact_fallback(capsys):
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


class ForwardCalls:
    """Counts how often a module runs."""

    def __init__(self, module):
        self.count = 0
        module.register_forward_pre_hook(self)

    def __call__(self, *_):
        self.count += 1


@pytest.mark.parametrize(
    "family,tied",
    [
        ("llama", True),
        ("qwen3", False),
        ("gpt2", True),
        ("gemma3_text", True),
        ("gpt_neox", False),
        ("phi3", False),
        ("mixtral", False),
    ],
)
@float_means_double()
def test_gradient_checkpointing_changes_no_gram(family, tied):
    continuations = random_continuations(0, LENGTHS)
    settings = dict(num_local_experts=3, num_experts_per_tok=2) if family == "mixtral" else {}
    plain = ScoreGram(tiny_model(family, tie_word_embeddings=tied, **settings), LAW)
    expected = plain.block(PROMPT, continuations)
    model = tiny_model(family, tie_word_embeddings=tied, **settings)
    gram = ScoreGram(model, LAW, gradient_checkpointing=True)
    gram.block(PROMPT, continuations)  # the first one looks at the model too
    calls = ForwardCalls((model.transformer.h if family == "gpt2" else model.base_model.layers)[0].mlp)
    block = gram.block(PROMPT, continuations)
    assert calls.count == 2 or family == "mixtral"  # it did run again
    np.testing.assert_allclose(block.gram, expected.gram, rtol=1e-12, atol=1e-12 * np.abs(expected.gram).max())
    np.testing.assert_allclose(block.log_probs, expected.log_probs, rtol=1e-12)
    gram.audit(PROMPT, continuations)
    assert not any("forward" in vars(module) for module in model.modules())  # the model is as it was


@float_means_double()
def test_the_checkpointing_of_transformers_in_train_mode_counts_no_layer_twice():
    continuations = random_continuations(0, LENGTHS)
    expected = ScoreGram(tiny_model("qwen2", tie_word_embeddings=True), LAW).block(PROMPT, continuations).gram
    model = tiny_model("qwen2", tie_word_embeddings=True)
    gram = ScoreGram(model, LAW)
    gram.block(PROMPT, continuations)  # the first one looks at the model too
    calls = ForwardCalls(model.model.layers[0].mlp.up_proj)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()  # this model has no dropout
    np.testing.assert_allclose(gram.block(PROMPT, continuations).gram, expected, rtol=1e-12)
    assert calls.count == 2


def test_checkpointing_turns_no_dropout_on():
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    continuations = random_continuations(0, LENGTHS)
    gram = ScoreGram(model, LAW, gradient_checkpointing=True)
    first = gram.block(PROMPT, continuations)
    np.testing.assert_allclose(first.gram, gram.block(PROMPT, continuations).gram, rtol=1e-12)
    np.testing.assert_allclose(
        first.log_probs, ScoreGram(model.requires_grad_(True), LAW).block(PROMPT, continuations).log_probs, rtol=1e-12
    )


def test_checkpointing_frees_the_activations_of_the_layers():
    def most_alive(checkpointing):
        model = tiny_model("llama", num_hidden_layers=6)
        gram, alive, most = ScoreGram(model, LAW, gradient_checkpointing=checkpointing), weakref.WeakSet(), 0

        def count(module, args, output):
            nonlocal most
            alive.add(args[0].untyped_storage())
            most = max(most, len(alive))

        for layer in model.model.layers:
            layer.mlp.down_proj.register_forward_hook(count)
        gram.block(PROMPT[:1], random_continuations(0, LENGTHS))  # a longer prompt is kept apart: not this storage
        return most

    assert most_alive(False) == 6 and most_alive(True) <= 2


def test_a_model_without_checkpointable_layers_is_refused_in_one_line():
    with pytest.raises(UserError, match="checkpoint"):
        ScoreGram(nn.Linear(2, 2), LAW, gradient_checkpointing=True)


def test_an_input_changed_in_place_after_it_was_read_is_measured_by_the_fallback(capsys):
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
    model = tiny_model("qwen2", tie_word_embeddings=True)
    continuations = random_continuations(0, LENGTHS)
    whole, parts = (
        ScoreGram(m, LAW, budget=b).block(PROMPT, continuations).gram
        for m, b in ((model, 2**26), (tiny_model("qwen2", tie_word_embeddings=True), budget))
    )
    np.testing.assert_allclose(parts, whole, rtol=1e-12)


@pytest.mark.parametrize("batch", [3, 50])  # 50: two halves
@pytest.mark.parametrize("budget", [1, 64, 2**20])
def test_the_three_ways_to_contract_a_linear_layer_agree(batch, budget):
    a, b = (torch.randn(batch, 6, d, dtype=torch.float64, generator=torch.Generator().manual_seed(d)) for d in (5, 7))
    b[1, 2:] = 0
    for shared in (0, 1, 4, 6):
        a[:, :shared] = a[:1, :shared]
        truth = torch.einsum("bto,bti->boi", b, a).flatten(1)
        truth = truth @ truth.T
        use = outer_gram.Outer(a, b, shared=shared)
        for contract in (outer_gram.ghost_gram, outer_gram.materialised_gram, outer_gram.outer_gram):
            torch.testing.assert_close(contract(use, budget), truth)
        rest = outer_gram.Outer(a[:, shared:], b[:, shared:])
        apart = outer_gram.materialised_gram(rest, budget) + (outer_gram.shared_gram(use, budget) if shared else 0)
        torch.testing.assert_close(apart, truth)


def test_a_vocabulary_most_of_which_has_no_gradient_changes_nothing():
    a, b = (torch.randn(3, 4, d, dtype=torch.float64, generator=torch.Generator().manual_seed(d)) for d in (5, 60))
    b[..., 10:55] = 0
    use = outer_gram.Outer(a, b)
    torch.testing.assert_close(outer_gram.ghost_gram(use, 64), outer_gram.materialised_gram(use, 64))


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
@pytest.mark.parametrize("prompt", [[3], [4] * 40])
def test_prompts_short_and_long_are_shared_without_changing_the_gram(family, prompt):
    assert relative_error(tiny_model(family), random_continuations(0, LENGTHS), prompt=prompt) < 1e-9


def test_the_audit_shares_nothing_and_so_finds_a_model_that_looks_ahead():
    class LooksAhead(nn.Module):  # every position sees the mean of all
        def __init__(self, layer):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return self.layer(x + x.mean(1, keepdim=True))

    model = tiny_model("qwen2")
    model.model.layers[0].mlp = LooksAhead(model.model.layers[0].mlp)
    with pytest.raises(UserError, match="is off by"):
        ScoreGram(model, LAW).audit(PROMPT, random_continuations(0, LENGTHS))


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
@float_means_double()
def test_log_probs_of_a_padded_batch_are_those_of_one_by_one(family):
    model = tiny_model(family)
    continuations = random_continuations(0, LENGTHS)
    gram = ScoreGram(model, LAW)
    together = gram.block(PROMPT, continuations).log_probs
    alone = [gram.block(PROMPT, [c]).log_probs[0] for c in continuations]
    np.testing.assert_allclose(together, alone, rtol=1e-12)


def as_continuations(outcomes):
    return [Continuation(o.tokens, o.ended, "") for o in outcomes]


LAWS = [SamplingLaw(max_new_tokens=3), SamplingLaw(temperature=1.4, top_k=4, top_p=0.9, max_new_tokens=3)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("law", LAWS, ids=["neutral", "temperature, top_k and top_p"])
def test_exact_scoring_scores_every_outcome_by_its_probability_and_has_score_mean_zero(law, tied):
    model = enumerable_policy(tied=tied)
    outcomes = enumerate_outcomes(model, [1, 3, 2], law)
    p = np.array([o.probability for o in outcomes])
    scores = torch.stack([o.score for o in outcomes])
    block = ScoreGram(model, law).block([1, 3, 2], as_continuations(outcomes))
    np.testing.assert_allclose(np.exp(block.log_probs), p, rtol=1e-10)
    truth = (scores @ scores.T).numpy()
    assert np.abs(block.gram - truth).max() < 1e-9 * np.abs(truth).max()
    assert abs(p @ block.gram @ p) < 1e-12 * (p @ np.diag(block.gram))


@pytest.mark.parametrize("law", LAWS, ids=["neutral", "temperature, top_k and top_p"])
def test_published_scoring_has_a_score_mean_that_is_not_zero_even_at_top_p_1(law):
    model = enumerable_policy()
    outcomes = enumerate_outcomes(model, [1, 3, 2], law)
    p = np.array([o.probability for o in outcomes])
    continuations = as_continuations(outcomes)
    gram = ScoreGram(model, law, scoring="published").block([1, 3, 2], continuations).gram
    assert p @ gram @ p > 1e-6 * (p @ np.diag(gram))  # exact scoring: below 1e-12 (the test above)
    # The truth of what it scores: the full softmax at temperature 1 of the tokens before the end of sequence.
    for q in model.parameters():
        q.requires_grad_(True)
    plain = [Continuation(c.tokens[:-1] if c.ended else c.tokens, False, "") for c in continuations]
    some = [i for i, c in enumerate(plain) if c.tokens][:6]
    scores = per_sample_scores(model, [1, 3, 2], [plain[i] for i in some], SamplingLaw())
    np.testing.assert_allclose(gram[np.ix_(some, some)], (scores @ scores.T).numpy(), rtol=1e-9)


@pytest.mark.parametrize("rule,module", [(nn.Linear, "proj"), (nn.Embedding, "embed_tokens")])
def test_audit_stops_at_a_wrong_rule_and_names_the_module(monkeypatch, rule, module):
    right = gram_rules.RULES[rule]

    def wrong(layer, a, b):
        return right(layer, a, b * 1.01)

    monkeypatch.setitem(gram_rules.RULES, rule, wrong)
    with pytest.raises(UserError, match=module):
        ScoreGram(tiny_model("llama"), LAW).audit(PROMPT, random_continuations(0, LENGTHS))


def test_audit_stops_when_a_norm_layer_is_left_out(monkeypatch):
    right = gram_rules.uses_by_vjp

    def zero(module, a, b, names):
        return {name: gram_rules.Dense(use.g * 0) for name, use in right(module, a, b, names).items()}

    monkeypatch.setattr(gram_rules, "uses_by_vjp", zero)
    with pytest.raises(UserError, match="norm"):
        ScoreGram(tiny_model("llama"), LAW).audit(PROMPT, random_continuations(0, LENGTHS))


def test_scores_that_are_not_finite_stop_the_run():
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.inf
    with pytest.raises(FloatingPointError):
        ScoreGram(model, LAW).block(PROMPT, random_continuations(0, LENGTHS))


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
    gram, continuations = ScoreGram(model, SamplingLaw(max_new_tokens=6), budget=20_000), random_continuations(0, LENGTHS)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            storages = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
            for x in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in storages:
                    largest = max(largest, x.numel())
            return out

    with Watch():
        gram.block(PROMPT, continuations)
    logits = len(LENGTHS) * max(LENGTHS) * 3000
    assert 0 < largest <= logits < model.get_input_embeddings().weight.numel()


class Squashed(nn.Embedding):
    """An embedding that does more than look up and multiply."""

    def forward(self, ids):
        return torch.tanh(super().forward(ids))


class HeadWithMore(nn.Linear):
    """A head that does more than multiply."""

    def forward(self, x):
        return torch.tanh(super().forward(x))


@pytest.mark.parametrize("which", ["embedding", "head", "both", "head alone has a gradient"])
def test_a_tied_weight_in_layers_of_unknown_kinds_is_measured_by_the_exact_fallback(which):
    model = tiny_model("llama", tie_word_embeddings=True)
    weight = model.get_input_embeddings().weight
    if which in ("embedding", "both"):
        model.model.embed_tokens = Squashed(40, 32, _weight=weight)
    if which in ("head", "both"):
        model.lm_head = HeadWithMore(32, 40, bias=False)
    if which == "head alone has a gradient":
        model.model.layers[0].register_forward_pre_hook(lambda layer, args: (args[0].detach(), *args[1:]))
    model.model.embed_tokens.weight = model.lm_head.weight = weight
    assert relative_error(model, random_continuations(0, LENGTHS)) < 1e-9


@pytest.mark.parametrize("tied", [True, False])
def test_a_scaled_embedding_is_read_by_the_rule_in_half_precision_too(tied, capsys):
    settings = dict(scale_embedding=True, tie_word_embeddings=tied)
    assert relative_error(tiny_model("biogpt", **settings), random_continuations(0, LENGTHS)) < 1e-9
    said = capsys.readouterr().err  # of the position embedding, at most
    for dtype in (torch.bfloat16, torch.float16):
        ScoreGram(tiny_model("biogpt", dtype=dtype, **settings), LAW).block(PROMPT, random_continuations(0, LENGTHS))
    assert "embed_tokens" not in said + capsys.readouterr().err
    audit = ScoreGram(tiny_model("biogpt", dtype=torch.bfloat16, **settings), LAW).audit(
        PROMPT, random_continuations(0, LENGTHS)
    )
    assert audit["max_relative_error"] < 1e-5


def test_a_layer_that_reads_a_value_on_the_host_is_measured_by_the_exact_fallback():
    class Careful(nn.Module):  # vmap cannot run it
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.full((48,), 0.1, dtype=torch.float64))

        def forward(self, x):
            return x + self.shift if float(x.abs().max()) < 1e9 else x

    model = tiny_model("qwen2")
    model.model.layers[0].mlp.up_proj = nn.Sequential(model.model.layers[0].mlp.up_proj, Careful())
    assert relative_error(model, random_continuations(0, LENGTHS)) < 1e-9
