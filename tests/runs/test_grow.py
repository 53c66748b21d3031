"""More continuations for a folder of Grams: a grown run against one that had its flags from the start."""

import json
import shutil
import signal
import subprocess
import time
from dataclasses import replace

import numpy as np
import pyarrow.parquet
import pytest
from scripts import (
    FLAGS,
    RESULTS,
    ROOT,
    call,
    ended,
    from_grams,
    held_by,
    one_line_error,
    read,
    rows_of,
    start,
    torchrun,
    tracecov,
    tracecov_flags,
)

from Gradient_evaluation import run_tracecov
from Gradient_evaluation.runs.grow import merged
from Gradient_evaluation.runs.inputs import prompts
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.stats.prompts import reduce_prompts

TWELVE = ("--K_list", 4, 8, "--per_prompt", 12)
SIXTEEN, FORTY = ("--K_list", 4, 8, "--M", 2), ("--K_list", 4, 8, "--M", 5)
EXACT, SINGLE = dict(rtol=1e-9, atol=1e-12), dict(rtol=1e-6, atol=1e-9)


def numbers(value, path=""):
    """{dotted path: leaf} of a JSON value, without times, paths and versions."""
    if isinstance(value, (dict, list)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        skipped = ("seconds", "config", "versions", "law", "checks")
        return {k: v for key, each in pairs if key not in skipped for k, v in numbers(each, f"{path}.{key}").items()}
    return {path: value}


def assert_same(left, right, tolerance=EXACT):
    """Two folders of results: the same numbers, per Gram and in the results."""
    for one, other in zip(gram_store.load_all(left / "grams"), gram_store.load_all(right / "grams"), strict=True):
        assert [len(gram) for gram in one.grams] == [len(gram) for gram in other.grams]
        for name in "rewards lengths log_probs grams sketch module_moments components component_sketch".split():
            a, b = getattr(one, name), getattr(other, name)
            assert (a is None) == (b is None), name
            if a is not None:
                scale = np.nanmax(np.abs(np.concatenate([np.ravel(each) for each in b])))
                for x, y in zip(a, b, strict=True):
                    np.testing.assert_allclose(x, y, rtol=tolerance["rtol"], atol=tolerance["rtol"] * scale, err_msg=name)
        about = (
            "index order prompt oracle_value n_left_out greedy_reward greedy_components columns sketch_names modules".split()
        )
        assert all(getattr(one, name) == getattr(other, name) for name in about)
    (path,) = (path.name for path in left.glob("tracecov_*.json") if "detailed" not in path.name)
    a, b = numbers(read(left / path)), numbers(read(right / path))
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, float):
            assert value == pytest.approx(b[key], rel=tolerance["rtol"], abs=tolerance["atol"]), key
        else:
            assert value == b[key], key


def old_form(out):
    """run.json as the version before wrote it: the sizes of the blocks, and no largest one."""
    path = out / "grams" / "run.json"
    identity = read(path)
    del identity["largest_block"], identity["flags"]["per_prompt"]
    sizes = [len(gram) for gram in next(gram_store.load_all(out / "grams")).grams]
    path.write_text(json.dumps({**identity, "block_sizes": sizes, "largest_block": None}))


# ------------------------------------------------------------------------------------------------ --per_prompt


def test_per_prompt_is_the_number_of_continuations_whatever_the_largest_group_size(policy, table, tmp_path):
    for name, more in (("a", ("--K_list", 4, "--M", 3)), ("b", ("--K_list", 4, 64, "--per_prompt", 12, "--block_size", 4))):
        assert tracecov(policy, table, tmp_path / name, *more)[0] == 0
    a, b = (list(gram_store.load_all(tmp_path / name / "grams")) for name in "ab")
    for one, other in zip(a, b, strict=True):
        assert len(other.rewards) == 12 and np.array_equal(np.stack(one.grams), np.stack(other.grams))
    a, b = (read(tmp_path / name / RESULTS)["conditional_on_x"] for name in "ab")
    assert b["grpo"][0] == a["grpo"][0] and 0 < b["grpo"][1] < b["grpo"][0]


@pytest.mark.parametrize("more, said", [(("--M", 2), "--M: no effect with --per_prompt"), (("--per_prompt", 3), "at least 4")])
def test_per_prompt_that_cannot_be_is_refused(policy, table, tmp_path, capsys, more, said):
    one_line_error(tracecov(policy, table, tmp_path, *TWELVE, *more, capsys=capsys), "--per_prompt", said)


# ------------------------------------------------------------------------------------------------ grown


@pytest.fixture(scope="module")
def sixteen(policy, table, tmp_path_factory):
    out = tmp_path_factory.mktemp("sixteen")
    assert tracecov(policy, table, out, *SIXTEEN)[0] == 0
    return out


@pytest.fixture(scope="module")
def forty(policy, table, tmp_path_factory):
    out = tmp_path_factory.mktemp("forty")
    assert tracecov(policy, table, out, *FORTY)[0] == 0
    return out


@pytest.mark.parametrize("form", ["new", "old"])
def test_a_grown_run_is_one_that_had_its_flags_from_the_start(
    policy, table, sixteen, forty, tmp_path, capsys, monkeypatch, form
):
    out = shutil.copytree(sixteen, tmp_path / "out")
    if form == "old":
        old_form(out)
    assert tracecov(policy, table, out, *FORTY)[0] == 0
    assert_same(out, forty)
    monkeypatch.setattr(prompts, "load_model", None)
    capsys.readouterr()
    assert tracecov(policy, table, out, *FORTY, capsys=capsys)[1].startswith("finished before")


def test_growing_in_three_steps_by_every_flag_is_the_same(policy, table, forty, tmp_path):
    """Fewer prompts and smaller group sizes first; --T, --per_prompt and the largest of --K_list grow."""
    for more in (
        ("--T", 2, "--K_list", 2, 4, "--per_prompt", 8, "--block_size", 8),
        ("--T", 4, "--K_list", 4, 8, "--M", 2),
        ("--T", 3, "--K_list", 4, 24, "--M", 1),
        ("--T", 5, "--K_list", 4, 8, "--M", 5),
    ):
        assert tracecov(policy, table, tmp_path, *more)[0] == 0
    assert_same(tmp_path, forty)


def test_a_larger_group_size_keeps_the_blocks_of_the_folder(policy, table, sixteen, tmp_path):
    out, whole = shutil.copytree(sixteen, tmp_path / "out"), tmp_path / "whole"
    sixteen_each = ("--K_list", 4, 8, 16, "--M", 2)
    assert tracecov(policy, table, out, *sixteen_each)[0] == 0
    assert tracecov(policy, table, whole, *sixteen_each, "--block_size", 8)[0] == 0
    assert_same(out, whole)
    assert read(out / RESULTS)["batches"]["blocks_by_size"] == {"8": 20}


def test_everything_that_is_stored_of_a_block_grows(policy, table, tmp_path):
    """Several rewards of which some are None, sketches of further estimators, moments of modules, a greedy continuation."""
    own = tmp_path / "own.py"
    own.write_text(
        "def score(completions, **row):\n"
        "    return [None if text in ('31', '32', '2', '12') else len(text) / 4 for text in completions]\n"
    )
    many = ("--estimators", "dapo", "greedy", "rloo", "--by_layer", "--block_size", 8)
    rewards = ("--reward", f"{own}:score", "--reward_weights", 1.5)
    plain = tmp_path / "plain.jsonl"
    plain.write_text(
        "".join(json.dumps({name: row[name] for name in ("prompt", "ground_truth")}) + "\n" for row in rows_of(table))
    )
    for name, flags in (("modules", many), ("two", ("--reward", "integer", f"{own}:score")), ("left out", rewards)):
        model = ("--model", policy, *(("--oracle_table", table) if name == "modules" else ("--dataset", plain)))
        for folder, counts in (("out", (16, 40)), ("whole", (40,))):
            for count in counts:
                made = ("--K_list", 4, 8, "--per_prompt", count, *flags, "--save_json", tmp_path / name / folder, "--skip_plot")
                assert call(run_tracecov, *model, *made, *FLAGS)[0] == 0
        if name != "left out":
            assert_same(tmp_path / name / "out", tmp_path / name / "whole")
            continue
        for one, other in zip(*(gram_store.load_all(tmp_path / name / folder / "grams") for folder in ("out", "whole"))):
            assert np.array_equal(one.rewards, other.rewards) and one.n_left_out == other.n_left_out and one.n_drawn == 40
        a, b = (read(tmp_path / name / folder / RESULTS) for folder in ("out", "whole"))
        assert a["n_left_out"] == b["n_left_out"] > 0 and a["n_continuations"] == b["n_continuations"]


def test_a_grown_run_in_single_precision(small_run, tmp_path):
    table = small_run / "oracle_v_n50_tiny_model.jsonl"
    law = ("--model", ROOT / "data" / "tiny_model", *"--max_new_tokens 8 --device cpu --dtype float32 --T 4".split())
    for name, counts in (("out", (2, 4)), ("whole", (4,))):
        for M in counts:
            made = ("--oracle_table", table, "--K_list", 2, 8, "--M", M, "--skip_plot", "--save_json", tmp_path / name)
            assert call(run_tracecov, *law, *made)[0] == 0
    assert_same(tmp_path / "out", tmp_path / "whole", SINGLE)


def test_a_block_of_seven_and_one_of_six_are_those_of_a_run_of_thirteen(policy, table, tmp_path):
    for name, counts in (("out", (7, 13)), ("whole", (13,))):
        for count in counts:
            made = ("--K_list", 4, "--block_size", 7, "--by_layer", "--per_prompt", count)
            assert tracecov(policy, table, tmp_path / name, *made)[0] == 0
    assert_same(tmp_path / "out", tmp_path / "whole")
    assert read(tmp_path / "out" / RESULTS)["batches"]["blocks_by_size"] == {"6": 5, "7": 5}


def test_uneven_blocks_are_merged_by_their_size(policy, table, sixteen, tmp_path):
    """20 = 8 + 8 + 4: the numbers are those of the same blocks read at once, and the sketch is the mean over continuations."""
    out = shutil.copytree(sixteen, tmp_path / "out")
    assert tracecov(policy, table, out, "--K_list", 4, 8, "--per_prompt", 20)[0] == 0
    for part, more, whole in zip(
        gram_store.load_all(sixteen / "grams"), make_last_four(policy, table, tmp_path), gram_store.load_all(out / "grams")
    ):
        assert [len(gram) for gram in whole.grams] == [8, 8, 4]
        np.testing.assert_allclose(whole.sketch, (16 * part.sketch + 4 * more) / 20, rtol=1e-6, atol=1e-9)


def make_last_four(policy, table, tmp_path):
    """The sketches of continuations 16 to 19 alone: five times the mean of 5 blocks less four times that of 4."""
    sketches = []
    for count in (16, 20):
        out = tmp_path / f"fours {count}"
        assert tracecov(policy, table, out, "--K_list", 4, "--block_size", 4, "--per_prompt", count)[0] == 0
        sketches.append([record.sketch for record in gram_store.load_all(out / "grams")])
    return [5 * twenty - 4 * sixteen for sixteen, twenty in zip(*sketches)]


def test_merging_counts_each_record_by_its_continuations():
    generator = np.random.default_rng(0)

    def record(sizes, sketches):
        n, about = sum(sizes), dict(prompt_id=1, index=0, prompt="p", ground_truth=1, oracle_value=None, n_oracle=None)
        grams = [np.eye(size) for size in sizes]
        arrays = dict(rewards=generator.normal(size=n), lengths=np.ones(n), log_probs=generator.normal(size=n))
        mean = np.average(sketches, axis=0, weights=sizes)
        return gram_store.GramRecord(**about, **arrays, grams=grams, sketch=mean, n_left_out=n % 3 or None)

    parts = generator.normal(size=(5, 1, 6))
    first, second = record([4, 9], parts[:2]), record([5, 5, 7], parts[2:])
    found = merged(replace(first, greedy_reward=0.5), second)
    truth = np.average(parts, axis=0, weights=[4, 9, 5, 5, 7])
    assert found.sketch == pytest.approx(truth) and found.module_moments is None
    assert found.rewards.tolist() == [*first.rewards, *second.rewards] and found.n_drawn == 30 + 1 + 2
    assert found.greedy_reward == 0.5 and [len(gram) for gram in found.grams] == [4, 9, 5, 5, 7]


# ------------------------------------------------------------------------------------------------ fewer, too few, refused


def test_fewer_than_are_there_uses_all_and_says_so(policy, table, sixteen, forty, tmp_path, capsys):
    out = shutil.copytree(forty, tmp_path / "out")
    paths = sorted((out / "grams").glob("[0-9a-f]*.npz"))
    code, _, err = tracecov(policy, table, out, *SIXTEEN, capsys=capsys)
    note = "--M 2 times 8, the largest of --K_list: 16 continuations of each prompt; in"
    assert code == 0 and note in err and "5 prompts have up to 40, and all are used" in err
    assert read(out / RESULTS)["n_continuations"] == 200
    paths[0].unlink()  # a prompt that is new gets what is asked for
    assert tracecov(policy, table, out, *SIXTEEN)[0] == 0 and len(gram_store.load(paths[0]).rewards) == 16
    assert read(out / RESULTS)["n_continuations"] == 4 * 40 + 16
    code, _, err = from_grams(out / "grams", tmp_path / "again", "--K_list", 4, 8, capsys=capsys)
    assert code == 0 and "4 of its 5 prompts have 40 continuations, the others at least 16; all are used" in err
    for key in ("conditional_on_x", "n_continuations", "theta_norm_sq", "group_size_law"):
        assert read(tmp_path / "again" / RESULTS)[key] == read(out / RESULTS)[key]
    assert "continuations, the others" not in from_grams(forty / "grams", tmp_path / "even", capsys=capsys)[2]


def test_results_of_fewer_continuations_are_not_taken_for_those_that_are_there_now(policy, table, sixteen, tmp_path):
    out = shutil.copytree(sixteen, tmp_path / "out")
    earlier = (out / RESULTS).read_bytes()
    assert tracecov(policy, table, out, *FORTY)[0] == 0
    (out / RESULTS).write_bytes(earlier)
    assert tracecov(policy, table, out, *SIXTEEN)[0] == 0 and read(out / RESULTS)["n_continuations"] == 200


def test_what_cannot_grow_is_refused_before_a_model_is_loaded(policy, table, sixteen, tmp_path, capsys, monkeypatch):
    bare = tmp_path / "bare.jsonl"
    bare.write_text("".join(json.dumps({"prompt": row["prompt"], "ground_truth": 1}) + "\n" for row in rows_of(table)))
    made = ("--model", policy, "--dataset", bare, "--save_json", tmp_path / "out", "--skip_plot", "--by_layer", *FLAGS)
    assert call(run_tracecov, *made, *SIXTEEN)[0] == 0
    monkeypatch.setattr(prompts, "load_model", None)
    one_line_error(call(run_tracecov, *made, *FORTY, capsys=capsys), "--M 5", "--by_layer", "ask for 16")
    few = tracecov(policy, table, sixteen, "--K_list", 4, 8, "--per_prompt", 18, capsys=capsys)
    one_line_error(few, "--per_prompt 18", "has 16 of one", "at least 4: ask for 16 or for at least 20")


# ------------------------------------------------------------------------------------------------ saved rollouts


def test_saved_rollouts_grow_too(policy, table, tmp_path, capsys):
    saved, whole = tmp_path / "saved", tmp_path / "whole saved"
    assert tracecov(policy, table, tmp_path / "a", *SIXTEEN, "--save_rollouts", saved)[0] == 0
    shutil.copytree(saved, tmp_path / "sixteen saved")
    assert tracecov(policy, table, tmp_path / "a", *FORTY, "--save_rollouts", saved)[0] == 0
    assert tracecov(policy, table, tmp_path / "b", *FORTY, "--save_rollouts", whole)[0] == 0
    assert read(saved / "run.json") == read(whole / "run.json")

    def rows(path):
        return [{**row, "log_probs": None, "log_kept": None} for row in pyarrow.parquet.read_table(path).to_pylist()]

    for path in whole.glob("*.parquet"):
        assert rows(saved / path.name) == rows(path)
    outcome = tracecov(policy, table, tmp_path / "b", *SIXTEEN, "--save_rollouts", whole, capsys=capsys)
    one_line_error(outcome, "continuations = 40")  # its files are not cut
    ahead = shutil.copytree(tmp_path / "b", tmp_path / "c")  # killed after the rollouts, before the Gram
    for record in gram_store.load_all(ahead / "grams"):
        (ahead / "grams" / f"{record.prompt_id:016x}.npz").unlink()
    for record in gram_store.load_all(tmp_path / "a" / "grams"):
        half = {name: getattr(record, name)[:16] for name in ("rewards", "lengths", "log_probs")}
        replace(record, **half, grams=record.grams[:2]).save(ahead / "grams")
    assert tracecov(policy, table, ahead, *FORTY, "--save_rollouts", whole)[0] == 0
    for path in whole.glob("*.parquet"):
        assert rows(saved / path.name) == rows(path)
    shutil.rmtree(saved)
    outcome = tracecov(policy, table, tmp_path / "a", "--K_list", 8, "--M", 6, "--save_rollouts", saved, capsys=capsys)
    one_line_error(outcome, "lacks rollouts of 5 of the prompts that get more continuations")


# ------------------------------------------------------------------------------------------------ killed, shared


@pytest.mark.slow
def test_a_growing_run_killed_at_random_moments_ends_as_one_that_never_stopped(policy, table, sixteen, forty, tmp_path):
    """Every kill leaves whole records of 16 or of 40 continuations, and the same command goes on."""
    out = shutil.copytree(sixteen, tmp_path / "out")
    flags = [*tracecov_flags(policy, table, out), "--M", 5]
    lock, generator, kills, lasts = out / ".grams.lock", np.random.default_rng(0), 0, 5.0
    while kills < 4:
        process = start(flags)
        while process.poll() is None and not held_by(lock, process):
            time.sleep(0.01)
        began = time.monotonic()
        try:
            process.wait(timeout=lasts * generator.random())
        except subprocess.TimeoutExpired:
            process.kill()
        code = ended(process)[0]
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        assert {len(record.rewards) for record in gram_store.load_all(out / "grams")} <= {16, 40}
        if code == 0:  # it came through: put earlier records back, so that there is something left to be killed in
            lasts = max(1.0, time.monotonic() - began)
            for path in sorted((sixteen / "grams").glob("[0-9a-f]*.npz"))[1:]:
                shutil.copy(path, out / "grams")
    assert ended(start(flags))[0] == 0
    assert_same(out, forty)


def test_two_processes_grow_a_folder_that_was_grown_in_part(policy, table, sixteen, forty, tmp_path):
    out = shutil.copytree(sixteen, tmp_path / "out")
    assert tracecov(policy, table, out, *FORTY, "--T", 2)[0] == 0
    (out / "grams" / sorted(path.name for path in out.glob("grams/[0-9a-f]*.npz"))[-1]).unlink()
    code, _, err = torchrun([*tracecov_flags(policy, table, out), "--M", 5])
    assert code == 0, err
    assert_same(out, forty)


def test_memory_that_runs_short_while_growing_changes_blocks_alone(policy, table, sixteen, tmp_path, monkeypatch):
    """Blocks of 8 and then of 4: unequal, and weighted as one prompt's continuations."""
    out = shutil.copytree(sixteen, tmp_path / "out")
    monkeypatch.setattr("Gradient_evaluation.runs.plan.refuse_difference", lambda *args: None)
    monkeypatch.setattr("Gradient_evaluation.runs.machine.resume.refuse_difference", lambda *args: None)
    assert tracecov(policy, table, out, *FORTY, "--block_size", 4)[0] == 0
    for record in gram_store.load_all(out / "grams"):
        assert [len(gram) for gram in record.grams] == [8, 8, *[4] * 6]
        found = reduce_prompts([record])
        assert found.mean_reward[0] == pytest.approx(record.rewards.mean(), rel=1e-12)
