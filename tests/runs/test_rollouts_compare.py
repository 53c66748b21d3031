"""The comparison of rollouts with the model that scores them: what it reports, what it refuses, and the weights."""

import copy
import json
import math
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rollouts_runs import measure, rows_in, written
from scripts import ROOT, call, one_line_error, read, tracecov
from tiny_models import PROMPT, enumerable_policy, enumerate_outcomes

from data.make_arithmetic import make_problems
from Gradient_evaluation import run_tracecov
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.models import load_model, load_tokenizer
from Gradient_evaluation.runs.inputs.rewards import Rewards
from Gradient_evaluation.runs.inputs.rollouts import compare, laws
from Gradient_evaluation.runs.inputs.rollouts.compare import Comparison, effective_share, importance_weights, poisson_tail
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.runs.measure import Measurement
from Gradient_evaluation.sampling.generate import Continuation, sample_continuations
from Gradient_evaluation.sampling.law import SamplingLaw, uniforms
from Gradient_evaluation.sampling.log_probs import log_probs
from Gradient_evaluation.stats.weighted import self_normalised
from Gradient_evaluation.utils import format_prompt

MODEL, CASES = ROOT / "data" / "tiny_model", ROOT / "tests" / "cases" / "vllm"
PLAIN, NUCLEUS, HOT = SamplingLaw(1.0, 1.0, 0, 12), SamplingLaw(1.0, 0.9, 0, 12), SamplingLaw(1.6, 1.0, 0, 12)
COOL = SamplingLaw(0.6, 1.0, 0, 12)
PROMPTS = 4
RESULTS = "tracecov_four tokens.json"


@pytest.fixture(scope="module")
def model():
    return load_model(str(MODEL), None, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(MODEL), None)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [format_prompt(tokenizer, problem["prompt"]) for problem in make_problems(PROMPTS, seed=4)]


@pytest.fixture(scope="module")
def sampled(model, tokenizer, prompts):
    """sampled(law): 32 draws of each prompt."""
    found = {}

    def of(law):
        if law not in found:
            u = [uniforms(0, "x", number, 0, 32, law.max_new_tokens) for number in range(PROMPTS)]
            found[law] = [sample_continuations(model, tokenizer, ids, each, law, 32) for ids, each in zip(prompts, u)]
        return found[law]

    return of


@contextmanager
def comparison(model, law, **more):
    with ScoreGram(model, partial(log_probs, law=law)) as gram:
        yield Comparison(gram, law, **more)


def compared(model, law, prompts, several, size=8, **more):
    """What ``Comparison`` keeps of several prompts; the error's text where it refuses."""
    with comparison(model, law, **more) as found:
        try:
            return [found.of_prompt(ids, drawn, f"prompt {i}", size)[0] for i, (ids, drawn) in enumerate(zip(prompts, several))]
        except UserError as error:
            return str(error)


def bare(several):
    return [[replace(each, log_probs=None, log_kept=None) for each in drawn] for drawn in several]


def scored_under(model, law, prompts, several):
    """The draws with the log-probs that they have under another law."""
    with comparison(model, law) as found:
        return [
            [replace(one, log_probs=laws.scorer(each, law)) for each, one in zip(found._tokens(ids, drawn, 8), drawn)]
            for ids, drawn in zip(prompts, several)
        ]


def perturbed(model, scale):
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1 + scale * torch.randn_like(p))
    return other


# ------------------------------------------------------------------------------------------------ what is computed


@pytest.mark.parametrize("law", [SamplingLaw(1.0, 1.0, 0, 3), SamplingLaw(1.7, 0.8, 0, 3), SamplingLaw(0.7, 1.0, 2, 3)])
def test_surprise_has_mean_0_and_its_variance(law):
    """Over all outcomes of an enumerable policy, by their exact probabilities: E s = 0 and E s^2 = E (sum of variances)."""
    policy = enumerable_policy()
    outcomes = enumerate_outcomes(policy, PROMPT, law)
    drawn = [Continuation(each.tokens, each.ended, "") for each in outcomes]
    chance = np.array([each.probability for each in outcomes])
    with comparison(policy, law) as found:
        parts = [laws.surprise(each, law, [0]) for each in found._tokens(PROMPT, drawn, 16)]
    total, variance = (np.array([part[i].sum() for part in parts]) for i in (0, 1))
    assert abs(chance @ total) < 1e-10 and chance @ total**2 == pytest.approx(chance @ variance, rel=1e-9)
    ends = np.array([part[2].sum() for part in parts])  # as many ends as their probabilities add up to
    assert chance @ ends == pytest.approx(chance @ np.array([each.ended for each in outcomes]), rel=1e-9)


def test_surprise_is_not_0_under_another_law():
    law = SamplingLaw(1.0, 1.0, 0, 3)
    policy, other = enumerable_policy(), replace(law, temperature=1.5)
    outcomes = enumerate_outcomes(policy, PROMPT, law)
    with comparison(policy, other) as found:
        drawn = [Continuation(each.tokens, each.ended, "") for each in outcomes]
        total = [laws.surprise(each, other)[0].sum() for each in found._tokens(PROMPT, drawn, 16)]
    assert np.array([each.probability for each in outcomes]) @ np.array(total) < -0.05


def test_effective_sample_size():
    assert effective_share(np.zeros(5)) == 1.0
    assert effective_share(np.log([1.0, 1.0, 1e-300, 1e-300])) == pytest.approx(0.5)
    weights = np.array([0.5, 2.0, 1.0])
    assert effective_share(np.log(weights) + 700) == pytest.approx(weights.sum() ** 2 / (weights**2).sum() / 3)


@pytest.mark.parametrize("count, mean", [(1, 0.3), (4, 0.01), (7, 2.0), (3, 5.0)])
def test_the_poisson_bound_is_one(count, mean):
    exact = 1 - sum(math.exp(-mean) * mean**k / math.factorial(k) for k in range(count))
    assert exact <= poisson_tail(count, mean) <= 1


def test_a_fitted_temperature_is_the_least():
    best = laws.fitted(lambda law: (math.log(law.temperature) - math.log(1.37)) ** 2, SamplingLaw())
    assert best.temperature == pytest.approx(1.37, rel=1e-4)


def test_weights_that_leave_too_few_rollouts_are_refused():
    found = np.array([0.3, *[0.0] * 7])
    np.testing.assert_array_equal(importance_weights(found, "here"), found)
    with pytest.raises(UserError, match="here: importance weights leave 1 of its 8 rollouts"):
        importance_weights(np.array([30.0, *[0.0] * 7]), "here")
    with pytest.raises(UserError, match="leave 3 of its 3"):
        importance_weights(found[1:4], "here")
    with pytest.raises(UserError, match="needs the sampler's log-probs"):
        importance_weights(None, "here")


@pytest.mark.parametrize("law", [PLAIN, NUCLEUS, COOL])
def test_log_weights_are_sums_over_the_tokens_that_count(model, prompts, sampled, law):
    """A sampler of log pi = 0 at each token: the log weights are the scorer's log pi of the masked continuation."""
    drawn = sampled(law)[0][:6]
    masks = [[position % 3 != 1 or position == 0 for position in range(len(each.tokens))] for each in drawn]
    stored = [replace(each, log_probs=np.zeros(len(each.tokens)), mask=tuple(mask)) for each, mask in zip(drawn, masks)]
    with comparison(model, law, allow_mismatch=True) as found:
        block = found.gram.block(prompts[0], [each.tokens for each in drawn], masks)
        np.testing.assert_allclose(found.of_prompt(prompts[0], stored, "here", 4)[1], block.log_probs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("equal", [True, False])
def test_a_sketch_of_weighted_blocks_has_the_weights_of_their_pairs(equal):
    """Against the sum over pairs of w_i w_j h_ij, over the prompt's own mean of w_i w_j, as in the moments of the Gram."""
    generator = np.random.default_rng(3)
    rewards, components = generator.normal(size=12), generator.normal(size=(2, 12))
    w, lengths = np.ones(12) if equal else np.exp(generator.normal(size=12)), np.full(12, 3)
    scores = generator.normal(size=(12, 5))  # whole gradients in the place of sketches
    source = SimpleNamespace(settings=SimpleNamespace(K_list=(4,)), several=True)
    parts, mean = [slice(0, 6), slice(6, 12)], w.mean()
    found = [
        Measurement._sketch_weights(source, ["grpo"], Rewards(rewards, components), lengths, part, of_block) @ scores[part]
        for part, of_block in zip(parts, [None, None] if equal else self_normalised([w[part] for part in parts]))
    ]
    distinct = [[(i, j) for i in range(*part.indices(12)) for j in range(*part.indices(12)) if i != j] for part in parts]
    share = np.mean([w[i] * w[j] for pairs in distinct for i, j in pairs]) / mean**2
    for block, pairs in zip(found, distinct):
        for row, values in zip(block, [rewards, *components]):
            kernel = [w[i] * w[j] / mean**2 * (values[i] - values[j]) * (scores[i] - scores[j]) / 2 for i, j in pairs]
            np.testing.assert_allclose(row, np.mean(kernel, axis=0) / share, rtol=1e-12)


# ------------------------------------------------------------------------------------------------ the same law


@pytest.mark.parametrize("law", [PLAIN, NUCLEUS, HOT, COOL])
def test_rollouts_of_this_law_pass(law, model, prompts, sampled):
    for each in compared(model, law, prompts, sampled(law)):
        assert each["largest_difference"] < 1e-4 and each["effective"] > 0.9999
    for each, drawn in zip(compared(model, law, prompts, bare(sampled(law))), sampled(law)):
        assert each["tokens"] == sum(len(one.tokens) for one in drawn)


@pytest.mark.parametrize("law", [PLAIN, NUCLEUS, HOT, COOL])
def test_rounding_and_a_near_checkpoint_are_no_other_law(law, model, prompts, sampled):
    half = copy.deepcopy(model).to(torch.bfloat16)
    for other in (half, perturbed(model, 0.01), perturbed(model, 0.03)):
        found = compared(other, law, prompts, sampled(law))
        assert not isinstance(found, str), found
        assert max(each["median_difference"] for each in found) < 0.03
        assert min(each["effective"] for each in found) > 0.9


def test_masked_tokens_are_not_compared(model, prompts, sampled):
    drawn = [each for each in sampled(PLAIN)[0] if len(each.tokens) > 2]
    masked = []
    for each in drawn:
        mask = tuple(i != 1 for i in range(len(each.tokens)))
        values = np.where(mask, each.log_probs, np.nan)
        masked.append(replace(each, log_probs=values, mask=mask))
    (found,) = compared(model, PLAIN, prompts, [masked])
    assert found["tokens"] == sum(len(each.tokens) - 1 for each in drawn) and found["largest_difference"] < 1e-4


# ------------------------------------------------------------------------------------------------ another law


@pytest.mark.parametrize(
    "of, flags, said",
    [
        (HOT, PLAIN, "--temperature 1.6 --top_p 1 --top_k 0: they were sampled so, and these flags are to be passed"),
        (COOL, PLAIN, "--temperature 0.6 --top_p 1 --top_k 0: they were sampled so, and these flags are to be passed"),
        (PLAIN, HOT, "--temperature 1 --top_p 1 --top_k 0: they were sampled so, and these flags are to be passed"),
        (NUCLEUS, PLAIN, "--temperature 1 --top_p 0.9 --top_k 0: they were sampled so, and these flags are to be passed"),
        (HOT, NUCLEUS, "--temperature 1.6 --top_p 1 --top_k 0: they were sampled so, and these flags are to be passed"),
    ],
)
def test_log_probs_of_another_law_name_it(of, flags, said, model, prompts, sampled):
    error = compared(model, flags, prompts, sampled(of))
    assert isinstance(error, str) and said in error and "--allow_mismatch" in error, error


@pytest.mark.parametrize("law", [HOT, NUCLEUS, SamplingLaw(1.3, 0.9, 0, 12)])
def test_raw_log_probs_are_told_from_another_law(law, model, prompts, sampled):
    """The tokens are of the law that is stated; their log-probs are those at temperature 1 before top_p and top_k."""
    raw = scored_under(model, SamplingLaw(), prompts, sampled(law))
    error = compared(model, law, prompts, raw)
    assert isinstance(error, str) and "logprobs_mode raw_logprobs" in error and "processed_logprobs" in error, error


def test_log_probs_before_the_nucleus(model, prompts, sampled):
    law = SamplingLaw(1.3, 0.9, 0, 12)
    error = compared(model, law, prompts, scored_under(model, replace(law, top_p=1.0), prompts, sampled(law)))
    assert isinstance(error, str) and "--temperature 1.3 --top_p 1 --top_k 0: they were taken before the law" in error, error


def test_another_checkpoint(model, prompts, sampled):
    error = compared(perturbed(model, 0.4), PLAIN, prompts, sampled(PLAIN))
    assert isinstance(error, str) and "another checkpoint sampled them" in error, error
    error = compared(perturbed(model, 0.4), PLAIN, prompts, bare(sampled(PLAIN)))
    assert isinstance(error, str) and "likely than --model samples them" in error and "checkpoint" in error, error


@pytest.mark.parametrize(
    "of, flags, said",
    [
        (HOT, PLAIN, "less likely than --model samples them"),
        (COOL, HOT, "more likely than --model samples them"),
        (HOT, NUCLEUS, "cannot come from --temperature 1 --top_p 0.9 --top_k 0"),
        (PLAIN, SamplingLaw(1.0, 1.0, 2, 12), "cannot come from --temperature 1 --top_p 1 --top_k 2"),
    ],
)
def test_without_log_probs_the_tokens_speak(of, flags, said, model, prompts, sampled):
    error = compared(model, flags, prompts, bare(sampled(of)))
    assert isinstance(error, str) and said in error, error


def test_responses_that_were_cut_off(model, prompts, sampled, tokenizer):
    """Cut to 4 tokens, and an end of sequence put where the text ended, as an importer of text would."""
    eos, cut = tokenizer.eos_token_id, []
    for drawn in bare(sampled(PLAIN)):
        cut.append(
            [replace(each, tokens=(*each.tokens[:4], eos), ended=True) if len(each.tokens) > 5 else each for each in drawn]
        )
    error = compared(model, PLAIN, prompts, cut)
    assert isinstance(error, str) and "end where --model goes on" in error and "has 4 tokens" not in error.split("(")[0], error


def test_allow_mismatch_warns_once(model, prompts, sampled, capsys):
    found = compared(model, PLAIN, prompts, sampled(HOT), allow_mismatch=True)
    assert len(found) == PROMPTS and found[0]["mean_difference"] > 0.05
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: prompt 0: ") and line.endswith("going on as --allow_mismatch says")


def test_what_is_kept_does_not_depend_on_the_size(model, prompts, sampled):
    for several in (sampled(HOT), bare(sampled(HOT))):
        one, other = (compared(model, HOT, prompts, several, size=size) for size in (5, 32))
        for first, second in zip(one, other):
            assert first == pytest.approx(second, rel=1e-4, abs=1e-5)


# ------------------------------------------------------------------------------------------------ the run


def vllm_run(name, out, *more, capsys):
    law = "--temperature 1.3 --top_p 0.9 --max_new_tokens 8 --K_list 2 4 --skip_plot --device cpu --dtype float32".split()
    data = written([dict(each) for each in make_problems(40, seed=7)], out / "problems.jsonl")
    made = ("--rollouts", CASES / f"{name}.jsonl", "--dataset", data, "--reward", "integer", "--save_json", out)
    return call(run_tracecov, "--model", MODEL, *made, *law, *more, capsys=capsys)


def test_real_outputs_of_vllm_agree_to_rounding(tmp_path, capsys):
    """vLLM 0.27 on a CPU, logprobs_mode processed_logprobs, temperature 1.3, top_p 0.9."""
    code, out, err = vllm_run("processed_logprobs", tmp_path, capsys=capsys)
    assert code == 0, err
    check = read(tmp_path / "tracecov_tiny_model.json")["rollouts_check"]
    assert check["largest_difference"] < 1e-4 and check["effective_sample_size"] > 0.9999
    assert check["prompts"] == 4 and len(check["by_prompt"]) == 4 and check["importance_weights"] is False
    assert "not corrected (--importance_weights)" in out


def test_raw_log_probs_of_vllm_are_refused_by_name(tmp_path, capsys):
    code, out, err = vllm_run("raw_logprobs", tmp_path, capsys=capsys)
    one_line_error((code, out, err.splitlines(True)[-1]), "raw_logprobs.jsonl, line 1", "logprobs_mode raw_logprobs")
    code, out, err = vllm_run("raw_logprobs", tmp_path, "--allow_mismatch", capsys=capsys)
    assert code == 0 and "going on as --allow_mismatch says" in err, err


@pytest.fixture(scope="module")
def in_place(policy, table, tmp_path_factory):
    out = tmp_path_factory.mktemp("in place")
    run = tracecov(policy, table, out, "--K_list", 4, 8, "--M", 4, "--save_rollouts", out / "rollouts")
    assert run[0] == 0
    return out


def shifted(rows, by):
    """The rows with log-probs of a sampler that is off by a little more on some tokens than on others."""
    return [{**row, "log_probs": [x - by * token for x, token in zip(row["log_probs"], row["response_ids"])]} for row in rows]


def test_importance_weights_are_kept_with_the_grams(policy, in_place, tmp_path, capsys):
    rows = shifted(rows_in(in_place / "rollouts"), 0.01)
    path = written(rows, tmp_path / "rollouts.jsonl")
    flags = ("--K_list", 4, 8, "--block_size", 8, "--by_layer")
    assert measure(policy, [path], tmp_path / "plain", *flags)[0] == 0
    assert measure(policy, [path], tmp_path / "weighted", *flags, "--importance_weights")[0] == 0
    plain, weighted = (
        {record.prompt: record for record in gram_store.load_all(tmp_path / name / "grams")} for name in ("plain", "weighted")
    )
    for prompt, record in weighted.items():
        own = [row for row in rows if row["prompt"] == prompt]
        wanted = record.log_probs - np.array([sum(row["log_probs"]) for row in own])
        np.testing.assert_allclose(record.log_weights, wanted, atol=1e-9)
        np.testing.assert_allclose(record.log_weights, [0.01 * sum(row["response_ids"]) for row in own], atol=1e-9)
        assert plain[prompt].log_weights is None
        np.testing.assert_array_equal(record.grams, plain[prompt].grams)
    found = read(tmp_path / "weighted" / RESULTS)
    assert found["rollouts_check"]["importance_weights"] is True and found["law"]["importance_weights"]
    assert found["group_size_law"]["c1"] is not None
    assert "c1" not in found["group_size_law"]["reasons"]
    for name in ("naive", "grpo"):  # modules and the whole, both weighted
        by_module = np.sum(found["by_layer"]["trace_cov"][name], axis=-1)
        np.testing.assert_allclose(by_module, found["conditional_on_x"][name], rtol=1e-6)
    plain_sketch, sketch = next((plain[p].sketch, record.sketch) for p, record in weighted.items())
    assert np.isfinite(sketch).all() and not np.allclose(sketch, plain_sketch)
    assert found["theta_norm_sq"] != read(tmp_path / "plain" / RESULTS)["theta_norm_sq"]
    assert found["rollouts_check"]["effective_sample_size"] == pytest.approx(
        np.mean([effective_share(record.log_weights) for record in weighted.values()])
    )
    other = written(shifted(rows, 0.01), tmp_path / "other.jsonl")  # the same tokens, other log-probs
    wrong = measure(policy, [other], tmp_path / "weighted", *flags, "--importance_weights", capsys=capsys)
    one_line_error(wrong, "run.json", "importance_weights", "the log-probs of --rollouts")


def test_weights_without_log_probs_or_rollouts(policy, table, in_place, tmp_path, capsys):
    rows = [{**row, "log_probs": None, "log_kept": None} for row in rows_in(in_place / "rollouts")]
    path = written(rows, tmp_path / "rollouts.jsonl")
    flags = ("--K_list", 4, "--importance_weights")
    wrong = measure(policy, [path], tmp_path / "a", *flags, capsys=capsys)
    one_line_error(wrong, "rollouts.jsonl, line ", "--importance_weights needs the sampler's log-probs")
    one_line_error(tracecov(policy, table, tmp_path / "b", *flags, capsys=capsys), "no effect without --rollouts")
    wrong = measure(policy, [path], tmp_path / "c", *flags, "--scoring", "published", capsys=capsys)
    one_line_error(wrong, "--importance_weights", "--scoring published")


def test_every_threshold_is_said_in_the_docs():
    text = (ROOT / "docs" / "rollouts.md").read_text()
    for value in (compare.ROUNDING, compare.OTHER_MODEL, compare.LEAST_EFFECTIVE, compare.LEAST_SHARE):
        assert f"{value:g}" in text, value
    assert json.dumps("rollouts_check").strip('"') in text
