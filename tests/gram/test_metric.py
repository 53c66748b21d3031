"""The Gram in an optimiser's metric equals per-sample autograd with every element weighted, for every kind of layer."""

import numpy as np
import pytest
import torch
from grams import LAW, LENGTHS, PROMPT, block_of, low_rank_model, low_rank_rule, registered, score_gram, tokens
from tiny_models import FAMILIES, float_means_double, per_sample_scores, random_continuations, tiny_model

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.gram import layers
from Gradient_evaluation.gram.metric import SecondMoment

TIES = [(family, tied) for family in FAMILIES for tied in (False, True)]
WEIGHTS = np.array([[0.5, -1.0, 0.25, 2.0], [1.0, 1.0, 1.0, 1.0]])


def moments(model, seed=3):
    """A second moment of every trainable parameter, over six orders of magnitude, of different steps and eps."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: SecondMoment(
            10 ** (6 * torch.rand(p.shape, generator=generator, dtype=torch.float64) - 6), 1 - 0.999 ** (7 + at), 1e-4
        )
        for at, (name, p) in enumerate(model.named_parameters())
        if p.requires_grad
    }


def root_of(metric):
    """1 / sqrt(D) of all parameters in a row: D = sqrt(v / c) + eps."""
    return torch.cat([1 / ((m.v / m.correction).sqrt() + m.eps).sqrt().flatten() for m in metric.values()])


def metric_error(model, prompt=PROMPT, **settings):
    """Relative errors of the Gram in the metric and of its sketch, which is as wide as the parameters."""
    continuations, metric = random_continuations(0, LENGTHS), moments(model)
    with float_means_double():
        scores = per_sample_scores(model, prompt, continuations, LAW) * root_of(metric)
        block = block_of(model, continuations, LAW, prompt, WEIGHTS, metric=metric, sketch_dim=1000, **settings)
        plain = block_of(model, continuations, LAW, prompt, **settings)
    np.testing.assert_allclose(block.gram, plain.gram, rtol=0, atol=1e-12 * np.abs(plain.gram).max())
    truth = (scores @ scores.T).numpy()
    combined = WEIGHTS @ scores.numpy()
    assert block.metric_sketch.shape == combined.shape
    assert np.abs(block.metric_sketch - combined).max() < 1e-5 * np.abs(combined).max()
    return np.abs(block.metric_gram - truth).max() / np.abs(truth).max()


@pytest.mark.parametrize("family,tied", TIES)
def test_the_gram_in_the_metric_equals_per_sample_autograd_in_float64(family, tied):
    assert metric_error(tiny_model(family, tie_word_embeddings=tied)) < 1e-9


@pytest.mark.parametrize("budget", [1, 3000, 2**26])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_slices_of_any_size_give_the_same(family, budget, monkeypatch):
    monkeypatch.setattr("Gradient_evaluation.gram.linear.CACHE", budget)
    assert metric_error(tiny_model(family, tie_word_embeddings=True), budget=budget) < 1e-9


@pytest.mark.parametrize(
    "family,settings",
    [
        ("llama", dict(attention_bias=True, mlp_bias=True)),
        ("mixtral", dict(num_local_experts=3, num_experts_per_tok=2)),  # the exact fallback
        ("biogpt", dict(scale_embedding=True, tie_word_embeddings=True)),
        ("biogpt", dict(scale_embedding=True, tie_word_embeddings=False)),
    ],
)
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]])
def test_every_other_kind_of_layer_too(family, settings, prompt):
    assert metric_error(tiny_model(family, **settings), prompt, budget=20_000) < 1e-9


def test_a_layer_called_twice_has_its_gradients_added_before_they_are_weighted():
    model = tiny_model("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    model.model.layers[1].input_layernorm = model.model.layers[0].input_layernorm
    assert metric_error(model) < 1e-9


@pytest.mark.parametrize("rule", [low_rank_rule, None], ids=["registered", "fallback"])
def test_a_layer_of_ones_own_is_weighted(monkeypatch, rule):
    def refused(module, a, b):
        raise layers.UnsupportedUse("not today")

    registered(monkeypatch, rule or refused)
    assert metric_error(low_rank_model()) < 1e-9


def test_a_kind_of_gradient_without_slices_falls_back(monkeypatch, capsys):
    class Own(layers.DenseGradient):
        slices = layers.Gradient.slices

    registered(monkeypatch, lambda module, a, b: low_rank_rule(module, a, b) | {"shift": Own(b.sum(1))})
    assert metric_error(low_rank_model()) < 1e-9
    assert "up_proj" in capsys.readouterr().err


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_are_weighted(tied):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, bias="lora_only", target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("qwen2", tie_word_embeddings=tied), config).double().eval()
    assert 0 < len(moments(model)) < len(list(model.parameters()))
    assert metric_error(model) < 1e-9


def test_under_checkpointing_the_metric_is_the_same():
    model = tiny_model("llama")
    assert metric_error(model, gradient_checkpointing=True) < 1e-9


def test_a_weight_of_one_half_in_bfloat16_is_close():
    half, exact = tiny_model("qwen2", dtype=torch.bfloat16), tiny_model("qwen2")
    exact.load_state_dict(half.state_dict())
    continuations, metric = random_continuations(0, LENGTHS), moments(exact)
    truth = block_of(exact, continuations, metric=metric).metric_gram
    assert np.abs(block_of(half, continuations, metric=metric).metric_gram - truth).max() < 0.05 * np.abs(truth).max()


def test_a_smaller_sketch_in_the_metric_is_unbiased():
    model, continuations = tiny_model("gpt2"), random_continuations(0, LENGTHS)
    metric = moments(model)
    truth = WEIGHTS @ (per_sample_scores(model, PROMPT, continuations, LAW) * root_of(metric)).numpy()
    found = []
    for seed in range(60):
        sketch = block_of(
            model, continuations, weights=WEIGHTS, metric=metric, sketch_dim=4, sketch_seed=seed
        ).metric_sketch.astype(float)
        found.append((sketch[0] @ sketch[1], sketch[0] @ sketch[0]))
    error = np.std(found, axis=0, ddof=1) / np.sqrt(len(found))
    assert (np.abs(np.mean(found, axis=0) - [truth[0] @ truth[1], truth[0] @ truth[0]]) < 4 * error).all()


def test_the_audit_covers_the_metric(monkeypatch):
    model, continuations = tiny_model("llama", tie_word_embeddings=True), random_continuations(0, LENGTHS)
    with score_gram(model, metric=moments(model)) as gram, float_means_double():
        assert gram.audit(PROMPT, tokens(continuations))["metric_error"] < 1e-9
        monkeypatch.setattr("Gradient_evaluation.gram.metric.InMetric.add_tied", lambda *_: None)
        with pytest.raises(UserError, match="optimiser's metric"):
            gram.audit(PROMPT, tokens(continuations))


def test_a_second_moment_that_is_missing_or_of_another_shape_is_a_value_error():
    model = tiny_model("llama")
    metric = moments(model)
    norm = metric.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"metric: 1 of the \d+ measured parameters have no .*model\.norm\.weight"):
        score_gram(model, metric=metric)
    assert score_gram(model, metric=metric, params="layers").metric
    with pytest.raises(ValueError, match=r"metric: .*model\.norm\.weight has the shape \(31,\), the parameter \(32,\)"):
        score_gram(model, metric={**metric, "model.norm.weight": norm.__class__(norm.v[:-1])})


def test_no_state_is_copied_whole_to_the_device():
    """Of the state only slices are read: no temporary is as large as the largest parameter's."""
    model = tiny_model("llama", vocab_size=400, hidden_size=64)
    sizes, continuations = [], random_continuations(0, LENGTHS)
    with score_gram(model, metric=moments(model), budget=4096) as gram:
        for each in gram.metric.values():
            plain = each._root
            each._root = lambda v, plain=plain: sizes.append(v.numel()) or plain(v)
        gram.block(PROMPT, tokens(continuations))
    assert sizes and max(sizes) < max(p.numel() for p in model.parameters()) / 4
