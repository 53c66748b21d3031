"""--by: each value of a column has the numbers that a run of its prompts alone would have."""

import shutil
from dataclasses import replace

import pytest
from scripts import RESULTS, from_grams, one_line_error, read, tracecov

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.domains import column_values, positions_of
from Gradient_evaluation.runs.machine import gram_store

KINDS = ["sum", "sum", "sum", "product", "product"]
SIZES = ("--K_list", 4, 8)


def copied(grams, out, change, keep=lambda position: True):
    """The Gram folder of a run again, each record (in the order of the table) changed; and only those to keep."""
    out.mkdir(parents=True)
    for path in grams.glob("*.json"):
        shutil.copy(path, out)
    for position, record in enumerate(gram_store.load_all(grams)):
        if keep(position):
            change(record, position).save(out)
    return out


def with_kinds(record, position):
    return replace(record, columns={**record.columns, "kind": KINDS[position]})


@pytest.fixture(scope="module")
def by_kind(undisturbed, tmp_path_factory):
    """(folder of Grams of two kinds, results by kind)."""
    folder = tmp_path_factory.mktemp("kinds")
    grams = copied(undisturbed / "grams", folder / "grams", with_kinds)
    assert from_grams(grams, folder / "out", *SIZES, "--by", "kind")[0] == 0
    return grams, read(folder / "out" / RESULTS)


def test_a_value_has_the_numbers_of_its_prompts_alone(by_kind, tmp_path):
    grams, results = by_kind
    assert results["by_group"]["column"] == "kind" and list(results["by_group"]["values"]) == ["product", "sum"]
    for kind, found in results["by_group"]["values"].items():
        alone = copied(grams, tmp_path / kind / "grams", lambda record, at: record, lambda at, kind=kind: KINDS[at] == kind)
        assert from_grams(alone, tmp_path / kind / "out", *SIZES)[0] == 0
        expected = read(tmp_path / kind / "out" / RESULTS)
        assert set(found) - set(expected) == {"mean_reward", "mean_reward_ci95"}
        assert {name: found[name] for name in found if name in expected} == {
            name: expected[name] for name in found if name in expected
        }
        table = read(tmp_path / kind / "out" / RESULTS.replace(".json", "_K4_detailed.json"))["prompt_results"]
        rewards = [row["mean_reward"] for row in table]
        assert found["mean_reward"] == pytest.approx(sum(rewards) / len(rewards))
        assert 0 <= found["mean_reward_ci95"][0] <= found["mean_reward"] <= found["mean_reward_ci95"][1] <= 1


def test_the_whole_is_the_same_with_and_without_a_column(by_kind, tmp_path):
    grams, results = by_kind
    assert from_grams(grams, tmp_path, *SIZES)[0] == 0
    plain = read(tmp_path / RESULTS)
    for name in set(plain) - {"config", "seconds"}:
        assert results[name] == plain[name]
    assert results["config"]["by"] == "kind" and "by_group" not in plain


def test_few_prompts_say_why_there_is_no_interval(by_kind, undisturbed, tmp_path, capsys):
    values = by_kind[1]["by_group"]["values"]
    assert "fewer than 4 prompts" in values["product"]["group_size_law"]["reasons"]["G_star"]
    single = copied(
        undisturbed / "grams", tmp_path / "grams", lambda record, at: replace(record, columns={"level": min(at, 1)})
    )
    code, out, _ = from_grams(single, tmp_path / "out", *SIZES, "--by", "level", capsys=capsys)
    assert code == 0 and "note: 0: one prompt: there is no interval over prompts" in out
    found = read(tmp_path / "out" / RESULTS)["by_group"]["values"]["0"]
    assert found["mean_reward_ci95"] is None and "one prompt" in found["reasons"]["mean_reward_ci95"]


def test_a_row_for_each_value_is_printed(by_kind, tmp_path, capsys):
    grams, results = by_kind
    _, out, _ = from_grams(grams, tmp_path, *SIZES, "--by", "kind", capsys=capsys)
    lines = out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("by kind: "))
    for line, (kind, found) in zip(lines[head + 2 :], results["by_group"]["values"].items()):
        assert line.split()[:2] == [kind, str(found["n_prompts"])]
        for curve in found["conditional_on_x"]["grpo"]:
            assert f"{curve:.4g} [" in line


def test_a_wrong_column_is_one_line_before_anything_is_written(by_kind, undisturbed, policy, table, tmp_path, capsys):
    grams, _ = by_kind
    wrong = from_grams(grams, tmp_path, *SIZES, "--by", "levle", capsys=capsys)
    one_line_error(wrong, "--by levle", str(grams), "columns: ", "kind")
    old = copied(undisturbed / "grams", tmp_path / "old", lambda record, at: replace(record, columns=None))
    one_line_error(from_grams(old, tmp_path / "out", "--by", "kind", capsys=capsys), "--by kind", "earlier version", str(old))
    assert not list(tmp_path.glob("*.json")) and not list((tmp_path / "out").glob("*.json"))
    before = tracecov(policy, table, tmp_path / "new", "--by", "levle", *SIZES, capsys=capsys)
    one_line_error(before, "--by levle", "kind")
    assert not (tmp_path / "new").exists()


def test_older_grams_get_their_columns_without_a_model_pass(undisturbed, policy, table, tmp_path, capsys):
    grams = copied(undisturbed / "grams", tmp_path / "grams", lambda record, at: replace(record, columns=None))
    times = {path: path.stat().st_mtime_ns for path in grams.glob("*.json")}
    code, out, err = tracecov(policy, table, tmp_path, "--M", 3, *SIZES, "--by", "kind", capsys=capsys)
    assert code == 0 and "by kind: " in out, err
    assert all(record.columns["kind"] == "x" for record in gram_store.load_all(grams))
    assert times == {path: path.stat().st_mtime_ns for path in grams.glob("*.json")}  # nothing was measured
    assert "finished before" in tracecov(policy, table, tmp_path, "--M", 3, *SIZES, "--by", "kind", capsys=capsys)[1]


def test_columns_hold_short_values_only():
    row = {"level": 3, "kind": "x", "hard": True, "share": 0.5, "none": None, "list": [1], "long": "x" * 201, "edge": "x" * 200}
    assert list(gram_store.scalar_columns(row)) == ["level", "kind", "hard", "share", "edge"]


def test_values_are_in_order_and_a_missing_one_is_named():
    columns = [{"level": 10}, {"level": 9}, {}, {"level": "easy"}, {"level": 9}]
    assert positions_of(column_values("level", columns, "here")) == {"9": [1, 4], "10": [0], "easy": [3], "(none)": [2]}


def test_a_column_of_names_is_no_kind():
    columns = [{"id": number} for number in range(31)]
    with pytest.raises(UserError, match="--by id: here: 31 different values for 31 prompts"):
        column_values("id", columns, "here")
    assert len(column_values("id", columns[1:], "here")) == 30
