"""The sampler check and the on-policy warning as a run makes and reports them."""

import itertools
import json

import pytest
from abstract_policy import make_records
from scripts import call, one_line_error, oracle, read, tracecov
from tiny_models import longrope_model, tiny_tokenizer

from Gradient_evaluation import calculate_oracle_v
from Gradient_evaluation.runs import measure as prompt_measurement
from Gradient_evaluation.sampling import generate as sampling
from Gradient_evaluation.stats.summary import _on_policy_warning, summarise

FEW = ("--K_list", 4, "--M", 4)


def test_a_run_reports_the_check_and_a_continued_one_keeps_it_byte_for_byte(policy, table, tmp_path, capsys, monkeypatch):
    code, out, _ = tracecov(policy, table, tmp_path, *FEW, capsys=capsys)
    results = tmp_path / "tracecov_four tokens.json"
    check, before = read(results)["checks"]["sampler_check"], (tmp_path / "grams" / "checks.json").read_bytes()
    assert code == 0 and f"log pi of {check['tokens']} tokens differs by" in out
    assert check["continuations"] == 4 and check["median_difference"] <= check["largest_difference"] < check["tolerance"]
    gram = sorted((tmp_path / "grams").glob("*.npz"))[1]
    gram.unlink()
    monkeypatch.setattr(prompt_measurement.Measurement, "check_sampler", None)  # not called again
    assert tracecov(policy, table, tmp_path, *FEW)[0] == 0
    assert (tmp_path / "grams" / "checks.json").read_bytes() == before and gram.exists()


@pytest.mark.parametrize("scoring", ["exact", "published"])
def test_a_run_whose_sampler_decodes_under_other_positions_stops_in_one_line_before_any_gram(
    policy, table, tmp_path, capsys, monkeypatch, scoring
):
    counted = sampling.position_ids
    monkeypatch.setattr(sampling, "position_ids", lambda padding, tokens: counted(padding, tokens) + 3)
    done = tracecov(policy, table, tmp_path, *FEW, "--scoring", scoring, capsys=capsys)
    one_line_error(done, "not one law", "continuation", "token 2", "try --dtype float32")
    assert not list((tmp_path / "grams").glob("*.npz"))


def test_the_on_policy_check_warns_in_words_where_scores_are_of_another_law_and_not_where_they_are_right():
    for seed in range(12):
        for n_prompts in (5, 12, 40):
            for centred in (True, False):
                records = make_records(n_prompts=n_prompts, sizes=(8, 8), seed=100 * seed, centred=centred)
                check = summarise(records, [2], n_bootstrap=10)["on_policy_check"]
                if centred:
                    assert check["warning"] is None
                elif n_prompts == 40:
                    assert "not those of the law that was sampled" in check["warning"]


def test_the_warning_needs_more_on_few_prompts_and_comes_on_the_positive_side_only():
    assert _on_policy_warning(3.5, 12) is None and _on_policy_warning(-50.0, 12) is None
    assert _on_policy_warning(5.9, 12) and _on_policy_warning(4.2, 500) and _on_policy_warning(4.2, 12) is None
    assert _on_policy_warning(50.0, 4) is None and _on_policy_warning(None, 40) is None


def test_a_warning_in_the_results_is_printed_and_exact_scoring_gives_none(policy, tmp_path, capsys):
    prompts = ["".join(p) for length in (1, 2, 3) for p in itertools.product("123", repeat=length)]
    rows = [{"prompt": p, "ground_truth": 3, "V_oracle": 0.5, "n_oracle": 10} for p in prompts]
    given = tmp_path / "table.jsonl"
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for scoring in ("exact", "published"):
        code, out, _ = tracecov(
            policy, given, tmp_path / scoring, "--K_list", 8, "--M", 8, "--scoring", scoring, "--allow_mismatch", capsys=capsys
        )
        check = read(tmp_path / scoring / "tracecov_four tokens.json")["on_policy_check"]
        assert code == 0 and ("warning: the mean of the scores is not 0" in out) == bool(check["warning"])
        assert scoring == "published" or check["warning"] is None


def test_a_longrope_prompt_that_crosses_the_original_length_is_refused_before_the_model_loads(tmp_path, capsys):
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


def test_an_oracle_table_is_not_begun_with_a_sampler_of_another_law(policy, problems, tmp_path, capsys, monkeypatch):
    counted = sampling.position_ids
    monkeypatch.setattr(sampling, "position_ids", lambda padding, tokens: counted(padding, tokens) + 3)
    one_line_error(oracle(policy, problems, tmp_path, capsys=capsys), "line 1", "not one law")
    assert not list(tmp_path.glob("oracle_v*.jsonl"))
