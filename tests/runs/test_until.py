"""A run that stops by itself: at a precision, after some minutes, at --T; killed, continued and shared by two processes."""

import itertools
import json
import shutil
import signal
import sys
import time

import pytest
from scripts import FLAGS, RESULTS, TRACECOV, call, ended, files_of, one_line_error, read, start, torchrun, wait_for

from Gradient_evaluation import run_tracecov
from Gradient_evaluation.runs import tracecov, until
from Gradient_evaluation.runs.inputs import prompts as runs_prompts
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.runs.results.stopping import stopping_text
from Gradient_evaluation.stats.group_size.precision import may_stop

PROMPTS = ["".join(each) for n in (1, 2, 3, 4) for each in itertools.product("123", repeat=n)][:60]


@pytest.fixture(scope="session")
def many(tmp_path_factory):
    """60 prompts with answers that the four-token policy gives now and then."""
    path = tmp_path_factory.mktemp("many") / "many.jsonl"
    rows = [{"prompt": each, "ground_truth": [33, 22, 11, 3, 1][n % 5]} for n, each in enumerate(PROMPTS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def until_flags(policy, many, out, *more):
    return [TRACECOV, "--model", policy, "--dataset", many, "--save_json", out, "--skip_plot", *FLAGS, *more]


def run(policy, many, out, *more, capsys=None):
    return call(run_tracecov, *until_flags(policy, many, out, *more)[1:], capsys=capsys)


WIDE = ("--until", 0.5, "--until_quantity", "trace:naive:4", "--per_prompt", 16, "--K_list", 4)


@pytest.fixture(scope="session")
def stopped(policy, many, tmp_path_factory):
    out = tmp_path_factory.mktemp("stopped")
    assert ended(start(until_flags(policy, many, out, *WIDE)))[0] == 0
    return out


def grams(out):
    return list((out / "grams").glob("*.npz"))


def without_unused(files):
    """``files_of`` a folder without the Grams beyond the last prompt that is used, and without how many these are."""
    results = {**files[RESULTS], "stopping": {**files[RESULTS]["stopping"], "n_unused": 0}}
    return {**{name: content for name, content in files.items() if not name.endswith(".npz")}, RESULTS: results}


def test_a_run_stops_where_two_looks_in_a_row_are_precise_enough(stopped):
    results = read(stopped / RESULTS)
    found = results["stopping"]
    assert found["reached"] and 20 < found["n_prompts"] < len(PROMPTS) and found["n_unused"] == 0
    assert results["n_prompts"] == found["n_prompts"] == len(grams(stopped))
    assert [look["n_prompts"] for look in found["looks"]][:3] == [20, 22, 25]
    widths = [(look["interval"][1] - look["interval"][0]) / 2 / look["value"] for look in found["looks"]]
    assert [width <= 0.5 for width in widths[-3:]] == [False, True, True] and may_stop([width <= 0.5 for width in widths])
    assert not may_stop([width <= 0.5 for width in widths[:-1]])
    assert results["conditional_on_x"]["naive"] == pytest.approx([found["value"]])
    assert results["conditional_on_x_ci95"]["naive"][0] == pytest.approx(found["interval"])


def test_the_same_command_again_loads_no_model(policy, many, stopped, tmp_path, capsys, monkeypatch):
    out = shutil.copytree(stopped, tmp_path / "copy")
    monkeypatch.setattr(runs_prompts, "load_model", None)  # a call would be a TypeError
    code, printed, _ = run(policy, many, out, *WIDE, capsys=capsys)
    assert code == 0 and printed.startswith("finished before")
    assert f"stopped after {len(grams(out))} prompts: trace of naive at K = 4 " in printed
    (out / RESULTS).unlink()
    assert run(policy, many, out, *WIDE)[0] == 0 and files_of(out) == files_of(stopped)


def test_a_killed_run_stops_at_the_same_prompt(policy, many, stopped, tmp_path):
    for killed_at in (3, 21):
        process = start(until_flags(policy, many, tmp_path, *WIDE))
        wait_for(lambda least=killed_at: len(grams(tmp_path)) >= least, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert not (tmp_path / RESULTS).exists() and len(grams(tmp_path)) < len(grams(stopped))
    assert ended(start(until_flags(policy, many, tmp_path, *WIDE)))[0] == 0
    assert files_of(tmp_path) == files_of(stopped)


def test_two_processes_stop_at_the_same_prompt(policy, many, stopped, tmp_path):
    assert torchrun(until_flags(policy, many, tmp_path, *WIDE))[0] == 0
    found = read(tmp_path / RESULTS)["stopping"]
    assert len(grams(tmp_path)) == found["n_prompts"] + found["n_unused"]
    assert without_unused(files_of(tmp_path)) == without_unused(files_of(stopped))


def test_prompts_beyond_a_gap_are_not_used(policy, many, stopped, tmp_path):
    """A process may finish prompt 30 before prompt 5. The Gram of 30 counts from the moment when 5 is there."""
    out = shutil.copytree(stopped, tmp_path / "copy")
    (out / RESULTS).unlink()
    first = next(path for path in grams(out) if gram_store.load(path).order == 4)
    content = first.read_bytes()
    first.unlink()
    code = run(policy, many, out, *WIDE, "--minutes", 1e-9)[0]
    found = read(out / RESULTS)["stopping"]
    assert code == 0 and found["n_prompts"] == 4 and found["n_unused"] == len(grams(stopped)) - 5 and not found["reached"]
    assert run(policy, many, out, *WIDE)[0] == 0
    assert first.read_bytes() == content and files_of(out) == files_of(stopped)


def test_T_caps_a_run_that_would_go_on(policy, many, tmp_path, capsys):
    never = ("--until", 0.001, "--until_quantity", "trace:naive:4", "--per_prompt", 4, "--K_list", 4)
    code, printed, _ = run(policy, many, tmp_path, *never, "--T", 6, capsys=capsys)
    found = read(tmp_path / RESULTS)["stopping"]
    assert code == 0 and len(grams(tmp_path)) == found["n_prompts"] == 6 and found["stopped_by"] == "all prompts"
    assert "all 6 prompts are measured" in printed and "raise --T" in " ".join(printed.split())
    assert run(policy, many, tmp_path, *never, "--T", 8)[0] == 0 and len(grams(tmp_path)) == 8


class Clock:
    """Moves by a second whenever it is read."""

    def __init__(self):
        self.now = time.monotonic()

    def __call__(self):
        self.now += 1.0
        return self.now


def test_after_the_minutes_no_prompt_is_begun(policy, many, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tracecov, "Until", lambda *given: until.Until(*given, clock=Clock()))
    minutes = ("--minutes", 0.5, "--until", 0.01, "--until_quantity", "trace:naive:4", "--per_prompt", 4, "--K_list", 4)
    code, printed, _ = run(policy, many, tmp_path, *minutes, capsys=capsys)
    found = read(tmp_path / RESULTS)["stopping"]
    assert code == 0 and 0 < found["n_prompts"] < 60 and not found["reached"] and found["stopped_by"] == "0.5 minutes"
    assert "stopped after 0.5 minutes with trace of naive at K = 4" in printed and "the same command goes on" in printed
    before = found["n_prompts"]
    assert run(policy, many, tmp_path, *minutes)[0] == 0
    assert before < read(tmp_path / RESULTS)["stopping"]["n_prompts"] < len(PROMPTS)


def test_minutes_that_are_too_few_for_one_prompt_are_refused(policy, many, tmp_path, capsys):
    outcome = run(policy, many, tmp_path, "--minutes", 1e-9, capsys=capsys)
    one_line_error(outcome, "--minutes 1e-09: over before a prompt was measured; raise it")


@pytest.mark.parametrize(
    "flags, parts",
    [
        (("--until", 0), ["--until: must be in (0, 1], got 0"]),
        (("--until", 0.2, "--until_quantity", "trace:nobody:4"), ["--until_quantity trace:nobody:4", "nobody"]),
        (("--until_quantity", "G_star"), ["no effect without --until"]),
        (("--minutes", 0), ["--minutes"]),
        (("--until", 0.2, "--allocate", 1000), ["--allocate"]),
    ],
)
def test_wrong_flags_are_refused(policy, many, tmp_path, capsys, flags, parts):
    one_line_error(run(policy, many, tmp_path / "out", *flags, capsys=capsys), *parts)
    assert not (tmp_path / "out").exists()


def test_without_until_and_minutes_nothing_changes(policy, many):
    plain = parsed(until_flags(policy, many, "out"))
    assert (plain.T, plain.M, plain.K_list, plain.per_prompt, plain.pilot) == (500, 16, (4, 8, 16, 32, 64), None, False)
    assert not plain.stops_itself


def parsed(flags):
    argv, sys.argv = sys.argv, list(map(str, flags))
    try:
        return run_tracecov.parse_args()
    finally:
        sys.argv = argv


@pytest.mark.parametrize(
    "flags, T, pilot",
    [
        (("--until", 0.2), None, True),
        (("--minutes", 5), None, True),
        (("--until", 0.2, "--T", 30), 30, True),
        (("--until", 0.2, "--M", 4), None, False),
        (("--until", 0.2, "--K_list", 4), None, False),
        (("--until", 0.2, "--per_prompt", 8), None, False),
    ],
)
def test_what_is_not_typed_is_chosen(policy, many, flags, T, pilot):
    found = parsed(until_flags(policy, many, "out", *flags))
    assert (found.T, found.pilot) == (T, pilot)


STOPPED = dict(
    until=0.2, quantity="G*", reached=False, stopped_by="20 minutes", n_prompts=34, value=5.8, interval=[3.1, 12.0],
    reason=None, half_width=0.8, more_prompts=40, more_seconds=540.0, n_unused=0, looks=[],
)  # fmt: skip


@pytest.mark.parametrize(
    "changed, text",
    [
        (
            {},
            "stopped after 20 minutes with G* 5.8 [3.1, 12] from 34 prompts: about 40 more prompts (9 min) to +-20%; the same "
            "command goes on",
        ),
        (
            dict(reached=True, stopped_by="precision", n_unused=3),
            "stopped after 34 prompts: G* 5.8 [3.1, 12] is within +-20%; 3 more Grams in the folder are used when it goes on",
        ),
        (
            dict(value=None, interval=None, more_prompts=None, more_seconds=None, reason="c1 is noise"),
            "stopped after 20 minutes with no G* from 34 prompts (c1 is noise): not within +-20%; the same command goes on",
        ),
        (
            dict(stopped_by="all prompts", more_seconds=None),
            "all 34 prompts are measured, with G* 5.8 [3.1, 12]: about 40 more prompts to +-20%; raise --T, or give a larger "
            "table",
        ),
        (dict(until=None, more_prompts=None), "stopped after 20 minutes with G* 5.8 [3.1, 12] from 34 prompts"),
    ],
)
def test_the_last_line_says_what_is_missing(changed, text):
    assert stopping_text({**STOPPED, **changed}) == text
