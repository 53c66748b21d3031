"""Grams of a run without an oracle table give every number but the table's V(x), and say where V(x) comes from."""

from dataclasses import replace

import numpy as np
import pytest
from scripts import RESULTS, from_grams, read

from Gradient_evaluation.runs.machine import gram_store

SIZES = ("--K_list", 4, 8)


def without_v(grams, out, change=lambda record: record):
    """The Gram folder of a run again, without its oracle values."""
    out.mkdir(parents=True)
    for path in grams.glob("*.json"):
        (out / path.name).write_bytes(path.read_bytes())
    for record in gram_store.load_all(grams):
        change(replace(record, oracle_value=None, n_oracle=None)).save(out)
    return out


def one_block(record):
    size = len(record.grams[0])
    return replace(
        record,
        grams=record.grams[:1],
        rewards=record.rewards[:size],
        lengths=record.lengths[:size],
        log_probs=record.log_probs[:size],
    )


def graded(record):
    return replace(record, rewards=record.rewards * 0.5 - 0.1 * (np.arange(len(record.rewards)) % 3))


def test_all_but_the_oracles_curve_is_as_with_a_table(undisturbed, tmp_path, capsys):
    assert from_grams(undisturbed / "grams", tmp_path / "table", *SIZES)[0] == 0
    grams = without_v(undisturbed / "grams", tmp_path / "grams")
    code, out, _ = from_grams(grams, tmp_path / "fitted", *SIZES, "--by", "kind", "--allocate", 64, capsys=capsys)
    assert code == 0 and "oracle V(x), cross-fitted" in out
    table, fitted = (read(tmp_path / name / RESULTS) for name in ("table", "fitted"))
    assert (table["V_source"], fitted["V_source"]) == ("table", "cross-fitted")
    for name in ("naive", "grpo"):
        assert table["conditional_on_x"][name] == fitted["conditional_on_x"][name]
    for name in ("group_size_law", "best_baseline", "theta_norm_sq", "score_norm_sq"):
        assert table[name] == fitted[name]
    assert None not in fitted["conditional_on_x"]["oracleV"]
    assert fitted["conditional_on_x"]["oracleV"] != table["conditional_on_x"]["oracleV"]
    rows = read(tmp_path / "fitted" / RESULTS.replace(".json", "_K4_detailed.json"))["prompt_results"]
    assert all(row["V_oracle"] is None and row["tr_cov"]["oracleV"] is not None for row in rows)
    assert np.mean([row["tr_cov"]["oracleV"] for row in rows]) == pytest.approx(fitted["conditional_on_x"]["oracleV"][0])


def test_one_block_has_no_oracle_and_says_what_to_do(undisturbed, tmp_path, capsys):
    grams = without_v(undisturbed / "grams", tmp_path / "grams", one_block)
    code, out, _ = from_grams(grams, tmp_path / "out", *SIZES, capsys=capsys)
    said = " ".join(out.split())
    assert code == 0 and "note: oracleV: without an oracle table V(x) comes from a prompt's other blocks" in said
    assert "raise --M, lower --block_size or give --oracle_table" in said
    results = read(tmp_path / "out" / RESULTS)
    assert results["V_source"] is None and results["conditional_on_x"]["oracleV"] == [None, None]
    assert None not in results["conditional_on_x"]["grpo"] and results["group_size_law"]["c2"] is not None


def test_graded_rewards_are_split_at_the_prompts_mean(undisturbed, tmp_path, capsys):
    grams = without_v(undisturbed / "grams", tmp_path / "grams", graded)
    code, out, _ = from_grams(grams, tmp_path / "out", *SIZES, capsys=capsys)
    assert code == 0 and "rewards above their prompt's mean" in " ".join(out.split())
    norms = read(tmp_path / "out" / RESULTS)["score_norm_sq"]
    assert "mean reward of its prompt" in norms["split"]
    above = sum(int((record.rewards > record.rewards.mean()).sum()) for record in gram_store.load_all(grams))
    assert norms["right"]["n_continuations"] == above
