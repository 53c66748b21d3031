"""--kl_coef and --ref_model: the Gram of a loss with a KL term against autograd of that loss, and a run with it."""

from functools import partial

import numpy as np
import pytest
import torch
from scripts import FLAGS, RESULTS, call, from_grams, one_line_error, read
from tiny_models import enumerable_policy, float_means_double, random_continuations, tiny_model, tiny_tokenizer

from Gradient_evaluation import run_tracecov
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.runs.kl import KL_TYPES, Reference
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.sampling.law import SamplingLaw
from Gradient_evaluation.sampling.log_probs import log_probs
from Gradient_evaluation.stats.advantages import group_advantages

PROMPT, BETA = [1, 5, 9, 5], 0.3
LAW = SamplingLaw(temperature=0.8)


def reference_of(model, other, kl_type):
    """A Reference without files."""
    made = Reference.__new__(Reference)
    made.weights_of = KL_TYPES[kl_type]
    made.model, made.log_prob = other, partial(log_probs, law=LAW)
    made.gram = ScoreGram(other, made.log_prob)
    return made


@pytest.mark.parametrize("masks", [None, [[1, 0, 1], [1] * 6, [1], [0, 1, 1, 1, 0]]])
@pytest.mark.parametrize("family,tied,kl_type", [("qwen2", True, "k3"), ("gpt2", False, "k3"), ("qwen2", True, "k2")])
def test_the_gram_is_that_of_autograd_of_the_loss_itself(family, tied, kl_type, masks):
    """loss = -(1/K) sum_i (A_i sum_t ratio_t - beta sum_t k3_t), differentiated as a trainer does; k2: TRL's ratio_t k3_t."""
    model, other = tiny_model(family, tie_word_embeddings=tied), tiny_model(family, seed=1, tie_word_embeddings=tied)
    tokens = [each.tokens for each in random_continuations(0, (3, 6, 1, 5))]
    combinations = np.array([[0.5, -1.0, 0.25, 2.0]])
    with float_means_double():
        with ScoreGram(model, partial(log_probs, law=LAW), sketch_dim=1000) as gram:
            block, kl = reference_of(model, other, kl_type).block(gram, PROMPT, tokens, masks, True, combinations)
            plain = gram.block(PROMPT, tokens, masks, True, combinations)

        def token_log_probs(which, row):
            logits = which(input_ids=torch.tensor([[*PROMPT, *row]])).logits[0, len(PROMPT) - 1 : -1] / LAW.temperature
            return logits.log_softmax(-1).gather(-1, torch.tensor(row).unsqueeze(-1)).squeeze(-1)

        rewards = np.array([1.0, 0.0, 0.5, 1.0])
        advantages, loss, values, means = group_advantages(rewards, "leave_one_out"), 0.0, [], 0.0
        parameters = [p for p in model.parameters() if p.requires_grad]
        for row, mask, advantage in zip(tokens, masks or [[1] * len(row) for row in tokens], advantages):
            own, ref = token_log_probs(model, row), token_log_probs(other, row).detach()
            k3 = ((ref - own).exp() - (ref - own) - 1) * torch.tensor(mask, dtype=own.dtype)
            ratio = (own - own.detach()).exp() * torch.tensor(mask, dtype=own.dtype)
            values.append(float(k3.sum()))
            k3 = k3 * ratio if kl_type == "k2" else k3
            loss = loss - (advantage * ratio.sum() - BETA * k3.sum()) / 4
            means = means + k3.sum() / 4
        mean_r = torch.cat([g.flatten() for g in torch.autograd.grad(means, parameters, retain_graph=True)]).numpy()
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    weights = np.concatenate([advantages, np.full(4, -BETA)]) / 4
    assert weights @ kl["gram"] @ weights == pytest.approx(float(gradient @ gradient), rel=1e-9)
    np.testing.assert_allclose(kl["values"], values, rtol=1e-9)
    np.testing.assert_allclose(kl["sketch"], mean_r, atol=1e-5 * np.abs(mean_r).max())
    assert np.abs(mean_r).max() > 1e-3
    scale = np.abs(plain.gram).max()
    for name in ("gram", "by_module", "log_probs"):
        np.testing.assert_allclose(getattr(block, name), getattr(plain, name), rtol=1e-9, atol=1e-10 * scale)
    np.testing.assert_allclose(block.sketch, plain.sketch, atol=1e-5 * np.abs(plain.sketch).max())


def test_token_weights_that_do_not_fit_are_a_value_error():
    with ScoreGram(tiny_model("llama"), partial(log_probs, law=LAW)) as gram:
        for weights in ([[1.0]], [[1.0, float("nan")]]):
            with pytest.raises(ValueError, match="token_weights"):
                gram.block(PROMPT, [[3, 4]], token_weights=weights)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Another policy over the same four tokens."""
    folder = tmp_path_factory.mktemp("reference") / "other"
    enumerable_policy(vocabulary=4, seed=7).save_pretrained(folder)
    tiny_tokenizer(("<eos>", "1", "2", "3")).save_pretrained(folder)
    return folder


def run(policy, problems, out, *more, capsys=None):
    flags = [*FLAGS[: FLAGS.index("--top_p")], *FLAGS[FLAGS.index("--top_p") + 2 :], "--top_p", 1]
    shared = ("--model", policy, "--dataset", problems, "--save_json", out, "--skip_plot", *flags)
    return call(run_tracecov, *shared, "--K_list", 4, "--M", 6, "--block_size", 8, *more, capsys=capsys)


def test_a_run_measures_its_losses_with_the_kl_term(policy, problems, reference, tmp_path, capsys):
    more = ("--estimators", "trl_grpo", "trl_dapo_none")
    with_kl = ("--ref_model", reference, "--kl_coef", 0.5)
    code, out, err = run(policy, problems, tmp_path / "kl", *more, *with_kl, capsys=capsys)
    assert code == 0, err
    assert "with 0.5 times the KL to the reference" in out
    assert run(policy, problems, tmp_path / "plain", *more)[0] == 0
    found, plain = (read(tmp_path / name / RESULTS) for name in ("kl", "plain"))
    for name, each in plain["estimators"].items():  # the KL term is beside the plain numbers, which stay
        assert found["estimators"][name]["trace_cov"] == pytest.approx(each["trace_cov"], rel=1e-9)
    kl = found["kl"]
    assert kl["coef"] == 0.5 and kl["mean_kl_per_token"] > 0 and list(kl["estimators"]) == ["grpo", "trl_grpo", "trl_dapo_none"]
    assert kl["estimators"]["grpo"]["trace_cov"][0] > 0
    assert kl["group_size_law"]["mean_theta_sq"] != found["group_size_law"]["mean_theta_sq"]
    # a coefficient that is nearly 0 is the loss without it, from the stored Grams
    assert from_grams(tmp_path / "kl" / "grams", tmp_path / "again", "--K_list", 4, *more, "--kl_coef", 1e-12)[0] == 0
    again = read(tmp_path / "again" / RESULTS)
    for key in ("c1", "c2", "c3", "mean_theta_norm_sq"):
        assert again["kl"]["group_size_law"][key] == pytest.approx(plain["group_size_law"][key], rel=1e-5)
    record = next(gram_store.load_all(tmp_path / "kl" / "grams"))
    assert record.kl_grams[0].shape == (16, 16) and (record.kl >= 0).all() and record.kl.any()
    np.testing.assert_array_equal(record.kl_grams[0][:8, :8], record.grams[0])
    outcome = from_grams(tmp_path / "plain" / "grams", tmp_path / "none", "--K_list", 4, "--kl_coef", 1, capsys=capsys)
    one_line_error(outcome, "--kl_coef: these Grams were made without --ref_model")


def test_a_policy_that_is_its_own_reference_has_no_kl(policy, problems, tmp_path):
    assert run(policy, problems, tmp_path, "--ref_model", policy, "--kl_coef", 0.5)[0] == 0
    found = read(tmp_path / RESULTS)
    assert found["kl"]["mean_kl_per_token"] == pytest.approx(0, abs=1e-12)
    assert found["kl"]["group_size_law"]["c2"] == pytest.approx(found["group_size_law"]["c2"], rel=1e-9)


@pytest.mark.parametrize(
    "flags, parts",
    [
        (["--kl_coef", 0.1], ["--kl_coef and --ref_model: give both"]),
        (["--kl_coef", 0.1, "--ref_model", "X", "--top_p", 0.9], ["whole softmax", "--top_p 1"]),
        (["--kl_coef", 0.1, "--ref_model", "X", "--scoring", "published"], ["--scoring published"]),
        (["--kl_coef", 0.1, "--ref_model", "/nowhere"], ["--ref_model /nowhere: there is no such folder"]),
    ],
)
def test_what_has_no_kl_is_one_line(flags, parts, policy, problems, tmp_path, capsys):
    one_line_error(run(policy, problems, tmp_path, *flags, capsys=capsys), *parts)


def test_a_reference_of_another_vocabulary_is_one_line(policy, problems, tmp_path, capsys):
    enumerable_policy(vocabulary=6).save_pretrained(tmp_path / "other")
    outcome = run(policy, problems, tmp_path / "out", "--kl_coef", 0.1, "--ref_model", tmp_path / "other", capsys=capsys)
    one_line_error(outcome, "--ref_model", "has 6 tokens, --model 4")
