"""The first prompts of a run choose how many continuations the further ones get; --plan says what a run takes and gives."""

import json
import re
import shutil

import pytest
from scripts import FLAGS, RESULTS, call, one_line_error, read

from Gradient_evaluation import run_tracecov
from Gradient_evaluation.runs.inputs import prompts
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.runs.pilot import Choice, Pair, costs

TRACE = ("--until_quantity", "trace:naive:4")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    path = tmp_path_factory.mktemp("many") / "many.jsonl"
    rows = [{"prompt": f"{i % 3 + 1}{j % 3 + 1}" * (1 + (i + j) % 4), "ground_truth": 3} for i in range(12) for j in range(i)]
    rows = {row["prompt"]: row for row in rows}
    for n in range(60):
        text = "".join(str(n // 3**k % 3 + 1) for k in range(4))
        rows[text] = {"prompt": text, "ground_truth": [33, 22, 11, 3][n % 4]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.values()))
    return path


def run(policy, many, out, *more, capsys=None):
    flags = ("--model", policy, "--dataset", many, "--save_json", out, "--skip_plot", *FLAGS, *TRACE, *more)
    return call(run_tracecov, *flags, capsys=capsys)


def counts(out):
    """{order: continuations} of the prompts of a folder."""
    records = [gram_store.load(path) for path in (out / "grams").glob("*.npz")]
    return {record.order: record.n_drawn for record in records}


@pytest.fixture(scope="module")
def piloted(policy, many, tmp_path_factory):
    out = tmp_path_factory.mktemp("piloted")
    assert run(policy, many, out, "--until", 1.0)[0] == 0
    return out


def test_the_first_eight_prompts_choose_for_the_further_ones(piloted):
    found, chosen = counts(piloted), read(piloted / "grams" / "run.json")["pilot"]
    assert {found.pop(order) for order in range(8)} == {16}
    assert set(found.values()) == {chosen["continuations"]} and len(found) >= 12
    results = read(piloted / RESULTS)
    assert results["n_prompts"] == len(found) + 8 and results["config"]["per_prompt"] == chosen["continuations"]
    assert chosen["seconds_per_prompt"] >= 0 < chosen["seconds_per_continuation"] and chosen["peak_memory"] > 2**20


def test_a_continued_run_does_not_choose_anew(policy, many, piloted, tmp_path, capsys):
    out = shutil.copytree(piloted, tmp_path / "copy")
    stored = read(out / "grams" / "run.json")
    (out / "grams" / "run.json").write_text(json.dumps({**stored, "pilot": {**stored["pilot"], "continuations": 5}}))
    code, printed, _ = run(policy, many, out, "--until", 0.001, "--T", len(counts(out)) + 3, capsys=capsys)
    assert code == 0 and "5 continuations of each prompt: on this machine a prompt costs" in printed
    assert list(counts(out).values()).count(5) == 3 + list(counts(piloted).values()).count(5)
    assert read(out / "grams" / "run.json")["pilot"]["continuations"] == 5


def test_explicit_numbers_leave_the_pilot_out(policy, many, tmp_path):
    assert run(policy, many, tmp_path, "--until", 1.0, "--per_prompt", 4, "--T", 10)[0] == 0
    assert set(counts(tmp_path).values()) == {4} and "pilot" not in read(tmp_path / "grams" / "run.json")


def test_costs_come_from_two_sizes_of_one_prompt():
    pairs = [Pair(0.8 + 16 * 0.05 + more, 0.8 + 4 * 0.05 + more, 0.01) for more in (0.0, 0.2, 5.0)]  # a longer prompt
    per_prompt, per_continuation = costs(pairs)
    assert per_continuation == pytest.approx(0.05) and per_prompt == pytest.approx(0.8 + 0.2 + 0.01)
    whole, each = costs([Pair(1.0, 1.01, 0.0)])  # lost in the noise of the clock
    assert each > 0 and whole + 16 * each == pytest.approx(1.0)


def test_the_choice_in_words():
    text = str(Choice(12, 0.8, 0.05, 10**9, "the narrowest interval for the time"))
    assert text.startswith("12 continuations of each prompt: on this machine a prompt costs 0.8 s and a continuation 0.05 s")


def test_a_plan_measures_the_pilot_and_the_run_uses_it(policy, many, tmp_path, capsys):
    code, printed, _ = run(policy, many, tmp_path, "--plan", "--until", 0.5, capsys=capsys)
    assert code == 0 and 8 <= len(counts(tmp_path)) <= 24 and not (tmp_path / RESULTS).exists()
    rows = re.findall(r"^ +(\d+) +(\d+) +[\d.]+ (?:s|min|h|days) +\+-(\d+)% +[\d.]+ [kMG]B$", printed, re.M)
    widths = {(int(T), int(n)): int(width) for T, n, width in rows}
    best = read(tmp_path / "grams" / "run.json")["pilot"]["continuations"]
    assert {T for T, n in widths if n == best} >= {20, 50} and {n for _, n in widths} == {best, 64, 1024}
    assert widths[20, best] > widths[50, best] and widths[20, 1024] <= widths[20, best]
    assert "memory at the peak" in printed and "--until 0.5" in printed.splitlines()[-1] and "--plan" not in printed
    before = {path.name: path.read_bytes() for path in (tmp_path / "grams").glob("*.npz")}
    assert run(policy, many, tmp_path, "--until", 1.0)[0] == 0
    assert all((tmp_path / "grams" / name).read_bytes() == content for name, content in before.items())


def test_a_plan_of_grams_that_are_there_loads_no_model(policy, many, piloted, tmp_path, capsys, monkeypatch):
    out = shutil.copytree(piloted, tmp_path / "copy")
    monkeypatch.setattr(prompts, "load_model", None)  # a call would be a TypeError
    code, printed, _ = run(policy, many, out, "--plan", capsys=capsys)
    assert code == 0 and f"from {len(counts(piloted))} prompts in" in printed and printed.rstrip().endswith("--until 0.2")
    assert (out / RESULTS).read_bytes() == (piloted / RESULTS).read_bytes()


def test_a_plan_has_no_effect_with_grams_or_rollouts_of_others(policy, many, piloted, tmp_path, capsys):
    outcome = call(run_tracecov, "--from_grams", piloted / "grams", "--save_json", tmp_path / "out", "--plan", capsys=capsys)
    one_line_error(outcome, "--plan: no effect with --from_grams")
