"""Kinds of gradients and rules: every way to contract agrees, unknown layers fall back, a layer of one's own is registered."""

import numpy as np
import pytest
import torch
from grams import LAW, LENGTHS, PROMPT, LowRank, audit_of, block_of, low_rank_model, low_rank_rule, registered, relative_error
from tiny_models import float_means_double, per_sample_scores, random_continuations, tiny_model
from torch import nn

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.gram import DenseGradient, LinearGradient, RowsGradient, layers, linear, register


def random_pair(batch, length, d_in, d_out):
    """An input (batch, length, d_in) and an output gradient (batch, length, d_out) in float64."""
    return tuple(
        torch.randn(batch, length, d, dtype=torch.float64, generator=torch.Generator().manual_seed(d)) for d in (d_in, d_out)
    )


@pytest.mark.parametrize("batch", [3, 50])  # 50: two halves
@pytest.mark.parametrize("budget", [1, 64, 2**20])
def test_the_three_ways_to_contract_a_linear_layer_agree(batch, budget):
    a, b = random_pair(batch, 6, 5, 7)
    b[1, 2:] = 0
    for shared in (0, 1, 4, 6):
        a[:, :shared] = a[:1, :shared]
        truth = torch.einsum("bto,bti->boi", b, a).flatten(1)
        truth = truth @ truth.T
        for contract in (linear.ghost_gram, linear.materialised_gram):
            torch.testing.assert_close(contract(a, b, budget), truth)
        torch.testing.assert_close(LinearGradient(a, b, shared=shared).gram(budget), truth)
        apart = linear.materialised_gram(a[:, shared:], b[:, shared:], budget)
        if shared:
            apart += linear.shared_gram(a, b, shared, budget)
        torch.testing.assert_close(apart, truth)


def test_a_vocabulary_mostly_without_a_gradient_changes_nothing():
    a, b = random_pair(3, 4, 5, 60)
    b[..., 10:55] = 0
    torch.testing.assert_close(linear.ghost_gram(a, b, 64), linear.materialised_gram(a, b, 64))


@pytest.mark.parametrize(
    "one, other",
    [
        (LinearGradient(torch.ones(2, 3, 4), torch.ones(2, 3, 5)), DenseGradient(torch.ones(2, 20))),
        (LinearGradient(torch.ones(2, 3, 4), torch.ones(2, 3, 4)), LinearGradient(*[torch.ones(2, 3, 4)] * 2, transposed=True)),
        (RowsGradient(torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3, 4)), DenseGradient(torch.ones(2, 8))),
    ],
    ids=["two kinds", "transposed", "rows"],
)
def test_uses_that_do_not_add_up_are_left_to_the_fallback(one, other):
    with pytest.raises(layers.UnsupportedUse):
        one.joined([other])


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1]])
def test_a_layer_of_ones_own_is_measured_by_its_rule(monkeypatch, prompt):
    seen = []

    def rule(module, a, b):
        seen.append((a.shape, b.shape))
        return low_rank_rule(module, a, b)

    registered(monkeypatch, rule)
    model, continuations = low_rank_model(), random_continuations(0, LENGTHS)
    assert relative_error(model, continuations, prompt=prompt) < 1e-9
    length = len(prompt) + max(LENGTHS) - 1
    assert seen == [((4, length, 32), (4, length, 48))]
    with float_means_double():
        assert audit_of(model, continuations)["max_relative_error"] < 1e-9
        exact = block_of(model, continuations, sketch_dim=1000, weights=np.eye(4)).sketch
    scores = per_sample_scores(model, PROMPT, continuations, LAW).numpy()
    np.testing.assert_allclose(exact, scores, rtol=1e-4, atol=1e-5 * np.abs(scores).max())


def test_a_wrong_rule_of_ones_own_is_found_by_the_audit(monkeypatch):
    registered(monkeypatch, lambda module, a, b: low_rank_rule(module, a, b) | {"shift": DenseGradient(b.sum(1) * 1.02)})
    with pytest.raises(UserError, match=r"up_proj\.shift is off"):
        audit_of(low_rank_model(), random_continuations(0, LENGTHS))


@pytest.mark.parametrize(
    "left_out_or_wrong",
    [{"up": None}, {"up": torch.zeros(4, 48, 3)}, {"shift": DenseGradient(torch.zeros(12, 48))}],
    ids=["left out", "no kind", "time first"],
)
def test_a_rule_not_led_by_the_batch_is_a_value_error(monkeypatch, left_out_or_wrong):
    registered(monkeypatch, lambda module, a, b: low_rank_rule(module, a, b) | left_out_or_wrong)
    with pytest.raises(
        ValueError, match="the rule for LowRank gives no gradient of its (up|shift) that leads with the batch of 4"
    ):
        block_of(low_rank_model(), random_continuations(0, LENGTHS))


def test_a_rule_may_leave_a_module_to_the_exact_fallback(monkeypatch, capsys):
    def rule(module, a, b):
        raise layers.UnsupportedUse("not today")

    registered(monkeypatch, rule)
    assert relative_error(low_rank_model(), random_continuations(0, LENGTHS)) < 1e-9
    assert "up_proj.down" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [(LowRank(2, 2), low_rank_rule), (int, low_rank_rule), (LowRank, "rule")])
def test_register_refuses_what_is_no_class_or_no_rule(arguments):
    with pytest.raises(ValueError, match="register needs"):
        register(*arguments)


class Squashed(nn.Embedding):
    """An embedding that does more than look up and multiply."""

    def forward(self, ids):
        return torch.tanh(super().forward(ids))


class HeadWithMore(nn.Linear):
    """A head that does more than multiply."""

    def forward(self, x):
        return torch.tanh(super().forward(x))


@pytest.mark.parametrize("which", ["embedding", "head", "both", "head alone has a gradient"])
def test_a_tied_weight_in_layers_of_unknown_kinds_falls_back(which):
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
def test_a_scaled_embedding_is_read_by_its_rule_in_every_dtype(tied, capsys):
    settings, continuations = dict(scale_embedding=True, tie_word_embeddings=tied), random_continuations(0, LENGTHS)
    assert relative_error(tiny_model("biogpt", **settings), continuations) < 1e-9
    said = capsys.readouterr().err  # of the position embedding, at most
    for dtype in (torch.bfloat16, torch.float16):
        block_of(tiny_model("biogpt", dtype=dtype, **settings), continuations)
    assert "embed_tokens" not in said + capsys.readouterr().err
    assert audit_of(tiny_model("biogpt", dtype=torch.bfloat16, **settings), continuations)["max_relative_error"] < 1e-5


def test_a_layer_that_reads_a_value_on_the_host_falls_back():
    class Careful(nn.Module):  # vmap cannot run it
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.full((48,), 0.1, dtype=torch.float64))

        def forward(self, x):
            return x + self.shift if float(x.abs().max()) < 1e9 else x

    model = tiny_model("qwen2")
    model.model.layers[0].mlp.up_proj = nn.Sequential(model.model.layers[0].mlp.up_proj, Careful())
    assert relative_error(model, random_continuations(0, LENGTHS)) < 1e-9


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
def test_a_layer_led_by_an_axis_as_long_as_the_batch_falls_back(wrap):
    continuations = random_continuations(1, (3, 6, 1, 5, 2, 4, 6, 6, 1, 2, 3, 4))  # 12 rows of 7 + 6 - 1 positions
    model = tiny_model("qwen2")
    model.model.layers[0].mlp.up_proj = wrap(model.model.layers[0].mlp.up_proj)
    assert relative_error(model, continuations) < 1e-9
