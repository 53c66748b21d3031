"""The sampler check and the on-policy warning as a run makes and reports them."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
from abstract_policy import make_records, random_policy
from scripts import call, one_line_error, oracle, read, tracecov
from tiny_models import longrope_model, tiny_tokenizer

from Gradient_evaluation import calculate_oracle_v
from Gradient_evaluation.runs import measure
from Gradient_evaluation.runs.plan import drawn
from Gradient_evaluation.sampling import generate as sampling
from Gradient_evaluation.stats.blocks import off_diagonal
from Gradient_evaluation.stats.missing import with_reasons
from Gradient_evaluation.stats.summary import SELF_NORMALISED_LIMIT as LIMIT
from Gradient_evaluation.stats.summary import _on_policy_check, reduce_prompts

FEW = ("--K_list", 4, "--M", 4)


def on_policy_check(records) -> dict:
    """The check of these records, None and a reason for what is missing."""
    return with_reasons(_on_policy_check(reduce_prompts(records)))


def test_a_run_reports_the_check_and_a_continued_one_keeps_it(policy, table, tmp_path, capsys, monkeypatch):
    code, out, _ = tracecov(policy, table, tmp_path, *FEW, capsys=capsys)
    results = tmp_path / "tracecov_four tokens.json"
    check, before = read(results)["checks"]["sampler_check"], (tmp_path / "grams" / "checks.json").read_bytes()
    assert code == 0 and f"log pi of {check['tokens']} tokens differs by" in out
    assert check["continuations"] == 4 and check["median_difference"] <= check["largest_difference"] < check["tolerance"]
    gram = sorted((tmp_path / "grams").glob("*.npz"))[1]
    gram.unlink()
    monkeypatch.setattr(measure.Measurement, "check_sampler", None)  # not called again
    assert tracecov(policy, table, tmp_path, *FEW)[0] == 0
    assert (tmp_path / "grams" / "checks.json").read_bytes() == before and gram.exists()


def test_a_half_precision_run_compares_its_sampler_in_float32(policy, table, tmp_path):
    assert tracecov(policy, table, tmp_path, *FEW, "--dtype", "bfloat16", "--allow_mismatch")[0] == 0
    check = read(tmp_path / "tracecov_four tokens.json")["checks"]["sampler_check"]
    assert check["largest_difference"] < 1e-5 and check["tolerance"] < 1e-3


@pytest.mark.parametrize("scoring", ["exact", "published"])
def test_a_run_decoding_at_other_positions_stops_before_a_gram(policy, table, tmp_path, capsys, monkeypatch, scoring):
    counted = sampling.position_ids
    monkeypatch.setattr(sampling, "position_ids", lambda padding, tokens: counted(padding, tokens) + 3)
    done = tracecov(policy, table, tmp_path, *FEW, "--scoring", scoring, capsys=capsys)
    one_line_error(done, "not one law", "continuation", "token 2", "try --dtype float32")
    assert not list((tmp_path / "grams").glob("*.npz"))


@pytest.mark.parametrize("script", ["oracle", "tracecov"])
def test_a_law_that_parts_only_on_longer_prompts_is_found(policy, tmp_path, capsys, monkeypatch, script):
    """The first prompt passes: models were found that are not causal, but only beyond some length."""
    counted, given = sampling.position_ids, tmp_path / "rows.jsonl"
    rows = [{"prompt": "2", "ground_truth": 1, "V_oracle": 0.5}, {"prompt": "321321", "ground_truth": 1, "V_oracle": 0.5}]
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(sampling, "position_ids", lambda padding, tokens: counted(padding, tokens) + 3 * (tokens.shape[1] > 4))
    if script == "oracle":
        one_line_error(oracle(policy, given, tmp_path, capsys=capsys), "line 2", "not one law")
        return
    seed = next(seed for seed in range(9) if drawn(2, 2, None, seed)[0] == 0)
    code, _, err = tracecov(policy, given, tmp_path, *FEW, "--seed", seed, capsys=capsys)
    assert code == 2 and "line 2: the sampler and the scoring pass are not one law" in err
    assert len(list((tmp_path / "grams").glob("*.npz"))) == 1  # that of the short prompt, which was right


def test_the_on_policy_check_warns_of_scores_of_another_law():
    for seed in range(12):
        for n_prompts in (5, 12, 40):
            for centred in (True, False):
                records = make_records(n_prompts=n_prompts, sizes=(8, 8), seed=100 * seed, centred=centred)
                check = on_policy_check(records)
                if centred:
                    assert check["warning"] is None
                elif n_prompts == 40:
                    assert "not those of the law that was sampled" in check["warning"]


def categorical_records(n_prompts, blocks, size, spread, rare, generator):
    """Right samples: exact scores of softmax policies over 8 outcomes, at unlike scales. Small ``rare``: nearly one outcome."""
    records = []
    for _ in range(n_prompts):
        probs = generator.dirichlet(np.full(8, rare))
        scores = (np.eye(8) - probs) * np.exp(spread * generator.normal())
        drawn = generator.choice(8, size=(blocks, size), p=probs)
        grams = [scores[index] @ scores[index].T for index in drawn]
        each = [(gram, np.arange(size) % 2.0, np.ones(size, dtype=int)) for gram in grams]
        records.append(SimpleNamespace(oracle_value=0.5, blocks=each))
    return records


@pytest.mark.parametrize("n_prompts, blocks", [(5, 4), (12, 1), (12, 4), (40, 1)])
def test_correct_scores_of_unlike_scales_and_of_rare_outcomes_give_no_warning(n_prompts, blocks):
    """The rate is below 1 in 1000; there is none among these. There are some where z decides."""
    generator = np.random.default_rng(n_prompts + blocks)
    for spread in (0.5, 1.5):
        for rare in (0.02, 0.1, 1.0):
            for _ in range(12):
                records = categorical_records(n_prompts, blocks, 8, spread, rare, generator)
                assert on_policy_check(records)["warning"] is None


@pytest.mark.slow
def test_the_warnings_false_alarms_are_fewer_than_one_in_a_thousand_and_the_negative_side_has_no_such_limit():
    """Correct sampling, 8 scores a block: gaussian scores of few and many dimensions, and outcomes that are rare."""
    generator, n, size = np.random.default_rng(0), 20_000, 8
    negative = []
    for n_prompts, blocks in ((5, 4), (12, 1), (12, 4), (40, 1)):
        shape = (n, n_prompts, blocks)
        for spread in (0.5, 1.5):
            scale = np.exp(2 * spread * generator.normal(size=(n, n_prompts, 1)))
            for dimensions in (1, 5, 50):
                mean = scale * (generator.chisquare(dimensions, shape) / dimensions - 1)
                self_normalised = mean.sum((1, 2)) / np.sqrt((mean**2).sum((1, 2)))
                assert (self_normalised > LIMIT).mean() < 1e-3
            for decades in (1, 4):
                p = 0.5 * 10 ** (-decades * generator.random((n, n_prompts, 1)))
                count = generator.binomial(size, p, shape)
                norm = count * (1 - p) ** 2 + (size - count) * p**2
                mean = scale * ((count - size * p) ** 2 - norm) * ((count > 0) & (count < size))
                with np.errstate(invalid="ignore"):
                    self_normalised = mean.sum((1, 2)) / np.sqrt((mean**2).sum((1, 2)))
                assert (self_normalised > LIMIT).mean() < 1e-3
                negative.append((self_normalised < -LIMIT).mean())
    assert max(negative) > 0.01


@pytest.mark.parametrize("n_prompts, sizes", [(40, (8,)), (12, (8,) * 3), (5, (8,) * 6)])
def test_scores_of_another_law_warn_on_few_prompts_too_and_right_ones_do_not(n_prompts, sizes):
    for centred in (True, False):
        records = make_records(n_prompts=n_prompts, sizes=sizes, seed=7, centred=centred)
        check = on_policy_check(records)
        assert (check["self_normalised"] > LIMIT) is not centred
        assert check["warning"] is None if centred else "not those of the law that was sampled" in check["warning"]


def test_draws_that_repeat_each_other_warn_too():
    records = make_records(n_prompts=40, sizes=(8,) * 6, seed=7)
    for record in records:  # every continuation twice, as from one seed for two processes
        record.blocks = [(np.tile(q, (2, 2)), np.tile(z, 2), np.tile(length, 2)) for q, z, length in record.blocks]
    assert "repeat each other" in on_policy_check(records)["warning"]


def test_scores_of_another_law_never_make_the_expected_ratio_negative_and_no_block_goes_below_its_bound():
    """E of the estimate is ||E g||^2 whatever the scores are; a block's own value is at least -||g||^2/(B - 1)."""
    for seed in range(20):
        policy = random_policy(seed, n_outcomes=3, centred=seed % 2 == 0)
        gram, _, _, chance = policy.blocks(4)
        ones = np.ones(gram.shape[:2])
        found, mean = off_diagonal(gram, ones, ones), policy.probs @ policy.scores
        assert chance @ found == pytest.approx(mean @ mean, abs=1e-9)
        assert (found >= -np.einsum("bii->bi", gram).mean(1) / 3 - 1e-9).all()


def test_rare_outcomes_make_z_far_below_zero_with_correct_scores_so_that_side_does_not_warn():
    """Outcome of probability 0.01, seen once in every block: what is common and right, and z is below -50."""
    scores = np.array([0.99] + [-0.01] * 15)
    blocks = [(np.outer(scores, scores) * scale, np.arange(16) % 2.0, np.ones(16)) for scale in np.linspace(1, 1.001, 20)]
    check = on_policy_check([SimpleNamespace(oracle_value=0.5, blocks=[each]) for each in blocks])
    assert check["z"] < -50 and check["self_normalised"] < -LIMIT and check["warning"] is None


def test_prompts_with_one_outcome_only_cannot_tell_and_give_no_warning():
    blocks = [(np.full((8, 8), scale), np.ones(8), np.ones(8)) for scale in np.linspace(0.1, 3, 60)]
    check = on_policy_check([SimpleNamespace(oracle_value=1.0, blocks=[each]) for each in blocks])
    assert check["warning"] is None and check["self_normalised"] is None
    assert "0 blocks" in check["reasons"]["warning"] and "self_normalised" in check["reasons"]


def test_a_warning_is_printed_and_exact_scoring_gives_none(policy, tmp_path, capsys):
    prompts = ["".join(p) for length in (1, 2, 3) for p in itertools.product("123", repeat=length)]
    rows = [{"prompt": p, "ground_truth": 3, "V_oracle": 0.5, "n_oracle": 10} for p in prompts]
    given = tmp_path / "table.jsonl"
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for scoring in ("exact", "published"):
        code, out, _ = tracecov(
            policy, given, tmp_path / scoring, "--K_list", 8, "--M", 8, "--scoring", scoring, "--allow_mismatch", capsys=capsys
        )
        check = read(tmp_path / scoring / "tracecov_four tokens.json")["on_policy_check"]
        said = " ".join(out.split())  # the report is wrapped
        assert code == 0 and "does not show that sampler and scorer agree; only their comparison does" in said
        assert check["warning"] is None if scoring == "exact" else f"warning: {check['warning']}" in said
        assert ("\nwarning: " in out) == (scoring == "published")


def test_a_longrope_prompt_across_the_first_length_is_refused(tmp_path, capsys):
    folder = tmp_path / "long"
    longrope_model().save_pretrained(folder)
    tiny_tokenizer(("<eos>", *map(str, range(1, 40)))).save_pretrained(folder)
    given = tmp_path / "problems.jsonl"
    given.write_text(json.dumps({"prompt": "123456", "ground_truth": 3}) + "\n")
    done = call(
        calculate_oracle_v,
        "--model",
        folder,
        "--dataset",
        given,
        "--out_dir",
        tmp_path / "out",
        "--max_new_tokens",
        12,
        "--device",
        "cpu",
        capsys=capsys,
    )
    one_line_error(done, "LongRoPE", "lower --max_new_tokens")


def test_an_oracle_table_needs_a_sampler_of_the_same_law(policy, problems, tmp_path, capsys, monkeypatch):
    counted = sampling.position_ids
    monkeypatch.setattr(sampling, "position_ids", lambda padding, tokens: counted(padding, tokens) + 3)
    one_line_error(oracle(policy, problems, tmp_path, capsys=capsys), "line 1", "not one law")
    assert not list(tmp_path.glob("oracle_v*.jsonl"))
