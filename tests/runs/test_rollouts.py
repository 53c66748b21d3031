"""Rollouts as data: saved by both scripts, measured without sampling, rewarded again without a model."""

import json
import shutil
import signal

import numpy as np
import pytest
import torch
from rollouts_runs import measure, rows_in, written
from scripts import (
    FLAGS,
    PROMPTS,
    RESULTS,
    TRACECOV,
    call,
    detailed_rows,
    ended,
    files_of,
    one_line_error,
    oracle,
    oracle_flags,
    read,
    rows_of,
    start,
    torchrun,
    tracecov,
    tracecov_flags,
    wait_for,
)
from tiny_models import enumerable_policy, law_log_probs, tiny_tokenizer

from Gradient_evaluation import run_tracecov
from Gradient_evaluation.runs.inputs import prompts
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.sampling.law import SamplingLaw

BLOCKS = ("--K_list", 4, 8, "--block_size", 8)
LAW = SamplingLaw(temperature=1.3, top_p=0.9, max_new_tokens=2)


@pytest.fixture(scope="module")
def in_place(policy, table, tmp_path_factory):
    """A run that sampled, with its rollouts in ``rollouts`` and its Grams in ``grams``."""
    out = tmp_path_factory.mktemp("in place")
    assert tracecov(policy, table, out, *BLOCKS, "--M", 3, "--save_rollouts", out / "rollouts")[0] == 0
    return out


@pytest.fixture(scope="module")
def rows(in_place):
    return rows_in(in_place / "rollouts")


def records_of(out):
    return {record.prompt: record for record in gram_store.load_all(out / "grams")}


def agree(found, wanted):
    """Two results agree in all numbers, to rounding."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name in wanted:
            agree(found[name], wanted[name])
    elif isinstance(wanted, list):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted):
            agree(one, other)
    elif isinstance(wanted, float):
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    else:
        assert found == wanted


NUMBERS = "K_list n_prompts n_continuations conditional_on_x conditional_on_x_ci95 estimators group_size_law".split()

# ------------------------------------------------------------------------------------------------ measured


def test_imported_rollouts_give_the_grams_of_the_run(policy, table, in_place, tmp_path, monkeypatch):
    monkeypatch.setattr("Gradient_evaluation.runs.source.sample_continuations", None)  # nothing is sampled
    assert measure(policy, [in_place / "rollouts"], tmp_path, *BLOCKS, "--dataset", table)[0] == 0
    found, wanted = records_of(tmp_path), records_of(in_place)
    assert found.keys() == wanted.keys() == set(PROMPTS)
    for prompt, record in wanted.items():
        np.testing.assert_array_equal(found[prompt].rewards, record.rewards)
        np.testing.assert_array_equal(found[prompt].lengths, record.lengths)
        np.testing.assert_allclose(found[prompt].log_probs, record.log_probs, rtol=1e-9)
        np.testing.assert_allclose(found[prompt].grams, record.grams, rtol=1e-9)
        np.testing.assert_allclose(found[prompt].sketch, record.sketch, rtol=1e-5, atol=1e-6)
    results, sampled = read(tmp_path / RESULTS), read(in_place / RESULTS)
    agree({name: results[name] for name in NUMBERS}, {name: sampled[name] for name in NUMBERS})
    assert results["law"]["rollouts"] and sampled["law"]["rollouts"] is None
    assert results["checks"].keys() == {"self_audit"} and results["batches"]["gen_bs"] is None


def test_unequal_numbers_come_as_they_are_in_even_blocks(policy, in_place, rows, tmp_path, capsys):
    keep, seen, some = dict(zip(PROMPTS, (24, 9, 4, 3, 17))), dict.fromkeys(PROMPTS, 0), []
    for row in rows:
        seen[row["prompt"]] += 1
        if seen[row["prompt"]] <= keep[row["prompt"]]:
            some.append(row)
    code, out, err = measure(policy, [written(some, tmp_path / "r.jsonl")], tmp_path, "--K_list", 4, 5, capsys=capsys)
    assert code == 0 and "left out 1 prompt with fewer than 4 rollouts\n" in out, err
    whole, found = records_of(in_place), records_of(tmp_path)
    sizes = {prompt: [len(gram) for gram in record.grams] for prompt, record in found.items()}
    assert sizes == {"13": [8, 8, 8], "2": [9], "321": [4], "122": [9, 8]}  # at most twice the largest K
    for prompt, record in found.items():
        n = keep[prompt]
        np.testing.assert_array_equal(record.rewards, whole[prompt].rewards[:n])
        norms = np.concatenate([np.diag(gram) for gram in whole[prompt].grams])[:n]
        np.testing.assert_allclose(np.concatenate([np.diag(gram) for gram in record.grams]), norms, rtol=1e-9)
    results = read(tmp_path / RESULTS)
    assert results["n_prompts"] == 4 and results["n_continuations"] == 24 + 9 + 4 + 17
    assert all(value is not None for value in results["conditional_on_x"]["grpo"])
    assert results["group_size_law"]["c2"] is not None


def test_masked_tokens_change_nothing_but_their_own_part(policy, rows, tmp_path):
    """Against one autograd pass per sample of the log-prob of the tokens that count."""
    same = [row for row in rows if row["prompt"] == "13"][:8]
    long = [i for i, row in enumerate(same) if len(row["response_ids"]) == 2][:2]
    masks = {long[0]: [False, True], long[1]: [1, 0]}
    masked = [{**row, **({"mask": masks[i]} if i in masks else {})} for i, row in enumerate(same)]
    for name, some in (("all", same), ("masked", masked)):
        assert measure(policy, [written(some, tmp_path / f"{name}.jsonl")], tmp_path / name, "--K_list", 4)[0] == 0
    (plain,), (found,) = (records_of(tmp_path / name).values() for name in ("all", "masked"))
    model, scores, values = enumerable_policy(vocabulary=4, seed=6), [], []
    for i, row in enumerate(same):
        ids, mask = row["response_ids"], masks.get(i, [True] * len(row["response_ids"]))
        logits = model(input_ids=torch.tensor([[*row["prompt_ids"], *ids]])).logits[0, len(row["prompt_ids"]) - 1 :]
        counting = [law_log_probs(logits[None, t], LAW)[0, token] for t, token in enumerate(ids) if mask[t]]
        values.append(sum(counting).item())
        parts = torch.autograd.grad(sum(counting), list(model.parameters()), allow_unused=True, materialize_grads=True)
        scores.append(torch.cat([part.flatten() for part in parts]))
    scores = torch.stack(scores).numpy()
    np.testing.assert_allclose(found.grams[0], scores @ scores.T, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(found.log_probs, values, rtol=1e-9)
    assert found.lengths.tolist() == [sum(masks[i]) if i in masks else len(row["response_ids"]) for i, row in enumerate(same)]
    others = np.array([i for i in range(8) if i not in masks])
    np.testing.assert_allclose(found.grams[0][np.ix_(others, others)], plain.grams[0][np.ix_(others, others)], rtol=1e-9)
    assert not np.isclose(found.grams[0][long[0], long[0]], plain.grams[0][long[0], long[0]])


def test_rollouts_of_the_oracle_script_are_measured(policy, problems, tmp_path):
    assert oracle(policy, problems, tmp_path, "--n_oracle", 20, "--save_rollouts", tmp_path / "r")[0] == 0
    assert measure(policy, [tmp_path / "r"], tmp_path / "t", "--K_list", 4)[0] == 0
    (table,) = tmp_path.glob("oracle_v*.jsonl")
    means = {row["prompt"]: row["V_oracle"] for row in rows_of(table)}
    assert {prompt: record.rewards.mean() for prompt, record in records_of(tmp_path / "t").items()} == pytest.approx(means)
    assert {record.columns["kind"] for record in records_of(tmp_path / "t").values()} == {"x"}


def test_a_data_set_gives_ground_truths_and_order(policy, problems, rows, tmp_path):
    """Rollouts without a reward, an id or a ground truth: judged by --reward with those of the data set."""
    bare = [{name: row[name] for name in ("prompt", "response_ids", "text", "ended")} for row in rows]
    path = written(bare, tmp_path / "r.jsonl")
    flags = ("--K_list", 4, "--dataset", problems, "--reward", "integer", "--T", 3)
    assert measure(policy, [path], tmp_path / "a", *flags)[0] == 0
    for record in records_of(tmp_path / "a").values():
        assert record.rewards.tolist() == [row["reward"] for row in rows if row["prompt"] == record.prompt]
        assert record.index == PROMPTS.index(record.prompt) and record.columns == {"kind": "x"}
    ids = [{**row, "prompt_id": wanted["prompt_id"]} for row, wanted in zip(bare, rows)]
    only_ids = written([{name: row[name] for name in row if name != "prompt"} for row in ids], tmp_path / "ids.jsonl")
    assert measure(policy, [only_ids], tmp_path / "b", *flags)[0] == 0
    agree(read(tmp_path / "b" / RESULTS)["estimators"], read(tmp_path / "a" / RESULTS)["estimators"])


def test_a_stopped_run_of_rollouts_goes_on_to_the_same(policy, in_place, rows, tmp_path, capsys):
    flags = ("--K_list", 4)
    assert measure(policy, [in_place / "rollouts"], tmp_path, *flags)[0] == 0
    whole = files_of(tmp_path)
    for path in sorted((tmp_path / "grams").glob("*.npz"))[1:4]:
        path.unlink()
    assert measure(policy, [in_place / "rollouts"], tmp_path, *flags)[0] == 0
    assert files_of(tmp_path) == whole
    again = measure(policy, [in_place / "rollouts"], tmp_path, *flags, capsys=capsys)
    assert again[0] == 0 and again[1].count("finished before, nothing left to do") == 1
    first = {**rows[0], "response_ids": [3 - rows[0]["response_ids"][0], *rows[0]["response_ids"][1:]]}
    for other in (rows[:-1], [first, *rows[1:]]):
        path = written(other, tmp_path / "other.jsonl")
        one_line_error(measure(policy, [path], tmp_path, *flags, capsys=capsys), "run.json", "the tokens of --rollouts")
    better = written([{**rows[0], "reward": 0.5}, *rows[1:]], tmp_path / "better.jsonl")
    assert measure(policy, [better], tmp_path, *flags)[0] == 0  # the same tokens, so that their Grams serve
    law = read(tmp_path / RESULTS)["group_size_law"]
    assert law["c1"] is None and "under other rewards, not under the rewards that the files have now" in law["reasons"]["c1"]


def test_two_processes_share_rollouts(policy, in_place, tmp_path):
    flags = [TRACECOV, "--model", policy, "--rollouts", in_place / "rollouts", "--skip_plot", "--K_list", 4, *FLAGS]
    assert ended(start([*flags, "--save_json", tmp_path / "one"]))[0] == 0
    code, out, err = torchrun([*flags, "--save_json", tmp_path / "two"])
    assert code == 0 and out.count("MSE of the gradient estimate") == 1, err
    assert files_of(tmp_path / "two") == files_of(tmp_path / "one")


# ------------------------------------------------------------------------------------------------ another law, other rewards


def test_rollouts_of_another_law_are_refused_by_name(policy, in_place, tmp_path, capsys):
    flags = ("--K_list", 4, "--temperature", 0.7, "--top_p", 1)
    outcome = measure(policy, [in_place / "rollouts"], tmp_path / "a", *flags, capsys=capsys)
    one_line_error(outcome, "temperature 1.3", "0.7", "top_p 0.9", "--allow_mismatch", ".parquet: ")
    assert not (tmp_path / "a").exists()
    code, _, err = measure(policy, [in_place / "rollouts"], tmp_path / "a", *flags, "--allow_mismatch", capsys=capsys)
    assert code == 0 and "warning" in err and "temperature 1.3" in err
    other = tmp_path / "four tokens"
    enumerable_policy(vocabulary=4, seed=7).save_pretrained(other)
    tiny_tokenizer(("<eos>", "1", "2", "3")).save_pretrained(other)
    outcome = measure(other, [in_place / "rollouts"], tmp_path / "b", "--K_list", 4, capsys=capsys)
    one_line_error(outcome, "other weights", "checkpoint that sampled")


def test_files_that_do_not_say_their_law_are_taken_with_a_warning(policy, rows, tmp_path, capsys):
    silent = written([{**row, "law": None} for row in rows], tmp_path / "r.jsonl")
    code, _, err = measure(policy, [silent], tmp_path, "--K_list", 4, capsys=capsys)
    assert code == 0 and err.count("warning") == 1 and "does not say how it was sampled" in err


@pytest.fixture
def backwards(tmp_path):
    """The problems with ground truths by which right and wrong change places."""
    return written([{"prompt": p, "ground_truth": 13} for p in PROMPTS], tmp_path / "backwards.jsonl")


def test_another_reward_needs_no_model_where_the_grams_are(policy, in_place, backwards, tmp_path, capsys, monkeypatch):
    """The traces are those that a measurement under the new reward has; c1 and G* say why they are not there."""
    rollouts, new = in_place / "rollouts", ("--dataset", backwards, "--reward", "last_integer")
    assert measure(policy, [rollouts], tmp_path / "old", *BLOCKS)[0] == 0
    assert measure(policy, [rollouts], tmp_path / "new", *BLOCKS, *new)[0] == 0
    measured = read(tmp_path / "new" / RESULTS)
    grams = {path: path.read_bytes() for path in (tmp_path / "old" / "grams").iterdir()}
    monkeypatch.setattr(prompts, "load_model", None)
    shown = ("--from_grams", in_place / "grams", "--model", policy, "--rollouts", rollouts, "--K_list", 4, 8, "--skip_plot")
    for name, run in (
        ("old", lambda: measure(policy, [rollouts], tmp_path / "old", *BLOCKS, *new, capsys=capsys)),
        ("shown", lambda: call(run_tracecov, *shown, *new, "--save_json", tmp_path / "shown", capsys=capsys)),
    ):
        code, out, err = run()
        assert code == 0, err
        found = read(tmp_path / name / RESULTS)
        agree(found["conditional_on_x"]["grpo"], measured["conditional_on_x"]["grpo"])
        agree(found["estimators"]["naive"]["mse"], measured["estimators"]["naive"]["mse"])
        law = found["group_size_law"]
        assert law["c1"] is None and law["G_star"] is None and law["c3"] == pytest.approx(measured["group_size_law"]["c3"])
        for key in ("c1", "G_star"):
            why = law["reasons"][key]
            assert "made under --reward integer, not under --reward last_integer" in why
            assert f"run_tracecov.py --rollouts {rollouts} --model {policy} --reward last_integer" in why
        assert found["law"]["reward"] == "last_integer"
        assert found["V_source"] == "cross-fitted"  # V(x) of the table belongs to its own reward
        agree(found["conditional_on_x"]["oracleV"], measured["conditional_on_x"]["oracleV"])
    assert {path: path.read_bytes() for path in (tmp_path / "old" / "grams").iterdir()} == grams
    assert measure(policy, [rollouts], tmp_path / "old", *BLOCKS)[0] == 0  # the old rewards again
    assert read(tmp_path / "old" / RESULTS)["group_size_law"]["c1"] is not None


def test_grams_of_other_continuations_are_not_rewarded(policy, table, in_place, tmp_path, capsys):
    assert tracecov(policy, table, tmp_path / "s", *BLOCKS, "--M", 3, "--seed", 5)[0] == 0
    flags = ("--from_grams", tmp_path / "s" / "grams", "--model", policy, "--rollouts", in_place / "rollouts", "--skip_plot")
    outcome = call(run_tracecov, *flags, "--reward", "integer", "--save_json", tmp_path / "a", capsys=capsys)
    one_line_error(outcome, "of other continuations", "row 1")


# ------------------------------------------------------------------------------------------------ saved


def test_saving_rollouts_changes_no_result(policy, problems, table, in_place, tmp_path):
    assert tracecov(policy, table, tmp_path / "t", *BLOCKS, "--M", 3)[0] == 0
    assert oracle(policy, problems, tmp_path / "o", "--save_rollouts", tmp_path / "r")[0] == 0
    assert (tmp_path / "o" / table.name).read_bytes() == table.read_bytes()
    found, saved = files_of(tmp_path / "t"), files_of(in_place)
    saved = {name: content for name, content in saved.items() if not name.startswith("rollouts/")}
    for results in (found[RESULTS], saved[RESULTS]):
        results["config"].pop("save_rollouts")
    assert found == saved
    assert len(list((tmp_path / "r").glob("*.parquet"))) == len(PROMPTS)


def test_what_is_saved_is_what_was_drawn(policy, in_place, rows):
    law = read(in_place / "rollouts" / "run.json")
    for record in records_of(in_place).values():
        mine = [row for row in rows if row["prompt"] == record.prompt]
        assert [row["reward"] for row in mine] == record.rewards.tolist()
        assert [len(row["response_ids"]) for row in mine] == record.lengths.tolist()
        assert [row["ended"] for row in mine] == [row["response_ids"][-1] == 0 for row in mine]
        np.testing.assert_allclose([sum(row["log_probs"]) for row in mine], record.log_probs, rtol=1e-9)
        said = json.loads(mine[0]["law"])
        assert said["model_fingerprint"] == law["model_fingerprint"] and said["temperature"] == 1.3
        assert int(mine[0]["prompt_id"], 16) == record.prompt_id and mine[0]["ground_truth"] == record.ground_truth


@pytest.mark.parametrize("script", ["oracle", "tracecov"])
def test_a_killed_run_that_saves_goes_on_to_the_same_files(policy, problems, table, tmp_path, script):
    def flags(out):
        more = ("--save_rollouts", out / "rollouts")
        if script == "oracle":
            return oracle_flags(policy, problems, out, "--n_oracle", 800, *more)
        return tracecov_flags(policy, table, out, *more)

    assert ended(start(flags(tmp_path / "whole")))[0] == 0
    process = start(flags(tmp_path / "killed"))
    wait_for(lambda: list((tmp_path / "killed").glob("rollouts/*.parquet")), process)
    process.kill()
    assert ended(process)[0] in (0, -signal.SIGKILL)
    code, _, err = ended(start(flags(tmp_path / "killed")))
    assert code == 0 and "note" not in err, err
    found, whole = files_of(tmp_path / "killed"), files_of(tmp_path / "whole")
    if script == "tracecov":
        for results in (found[RESULTS], whole[RESULTS]):
            results["config"].pop("save_rollouts")
    assert {name for name in found if ".lock" not in name} == set(whole)
    assert {name: found[name] for name in whole} == whole


def test_rollouts_of_another_run_are_refused_by_name(policy, problems, table, in_place, tmp_path, capsys):
    folder = shutil.copytree(in_place / "rollouts", tmp_path / "r")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for changed, parts in (
        ((*BLOCKS, "--M", 3, "--seed", 1), ("seed = 0", "1")),
        ((*BLOCKS, "--M", 2), ("continuations = 24", "16")),
    ):
        outcome = tracecov(policy, table, tmp_path / "t", *changed, "--save_rollouts", folder, capsys=capsys)
        one_line_error(outcome, "run.json", *parts)
    one_line_error(oracle(policy, problems, tmp_path / "o", "--save_rollouts", folder, capsys=capsys), "script = ")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "run.json").unlink()
    outcome = tracecov(policy, table, tmp_path / "t", *BLOCKS, "--M", 3, "--save_rollouts", folder, capsys=capsys)
    one_line_error(outcome, "holds rollouts but no run.json", "--overwrite")
    again = ("--M", 3, "--T", 2, "--save_rollouts", folder, "--overwrite")
    assert tracecov(policy, table, tmp_path / "t", *BLOCKS, *again)[0] == 0
    assert len(list(folder.glob("*.parquet"))) == 2


def test_a_prompt_finished_before_without_rollouts_is_said(policy, table, tmp_path, capsys):
    flags = (*BLOCKS, "--M", 3, "--save_rollouts", tmp_path / "r")
    assert tracecov(policy, table, tmp_path, *BLOCKS, "--M", 3, "--T", 2)[0] == 0
    code, _, err = tracecov(policy, table, tmp_path, *flags, "--T", 3, capsys=capsys)
    assert code == 0 and "without the rollouts of 2 prompts, finished before without --save_rollouts" in err
    assert len(list((tmp_path / "r").glob("*.parquet"))) == 1
    code, _, err = tracecov(policy, table, tmp_path, *flags, "--T", 3, capsys=capsys)
    assert code == 0 and "of 2 prompts" in err


# ------------------------------------------------------------------------------------------------ prompts of a data set


def test_a_data_set_gives_every_curve(policy, problems, table, in_place, tmp_path, capsys):
    model = ("--model", policy, "--dataset", problems, "--save_json", tmp_path, "--skip_plot", "--by_layer")
    code, out, _ = call(run_tracecov, *model, *FLAGS, *BLOCKS, "--M", 3, capsys=capsys)
    assert code == 0 and "oracle V(x), cross-fitted" in out
    found, wanted = read(tmp_path / RESULTS), read(in_place / RESULTS)
    for name in ("naive", "grpo"):
        agree(found["estimators"][name], wanted["estimators"][name])
    agree(found["group_size_law"], wanted["group_size_law"])
    assert found["V_source"] == "cross-fitted" and wanted["V_source"] == "table"
    agree(np.sum(found["by_layer"]["trace_cov"]["oracleV"], axis=1), found["conditional_on_x"]["oracleV"])
    assert [row["V_oracle"] for row in detailed_rows(tmp_path / "tracecov_four tokens_K4_detailed.json")] == [None] * 5
    code, out, _ = call(run_tracecov, *model, *FLAGS, *BLOCKS, "--M", 3, capsys=capsys)
    assert code == 0 and "finished before, nothing left to do" in out
    # A table that comes later adds its values: nothing is sampled again.
    grams = ("--model", policy, "--oracle_table", table, "--save_json", tmp_path, "--skip_plot", "--by_layer")
    assert call(run_tracecov, *grams, *FLAGS, *BLOCKS, "--M", 3)[0] == 0
    agree(read(tmp_path / RESULTS)["estimators"], wanted["estimators"])


@pytest.mark.parametrize(
    "flags, parts",
    [
        ("", ("--oracle_table", "--dataset", "--rollouts", "--from_grams")),
        ("--oracle_table a --dataset b", ("one of", "--oracle_table", "--dataset")),
        ("--oracle_table a --rollouts b", ("one of", "--oracle_table", "--rollouts")),
        ("--dataset a --from_grams b", ("--dataset", "--from_grams")),
        ("--from_grams a --rollouts b", ("--from_grams", "--reward")),
        ("--oracle_table a --split test", ("--split", "--dataset")),
        ("--rollouts a --M 3", ("--M", "--rollouts")),
        ("--rollouts a --gen_bs 3 --save_rollouts b", ("--save_rollouts, --gen_bs", "--rollouts")),
    ],
)
def test_there_is_one_source_of_prompts(tmp_path, capsys, flags, parts):
    one_line_error(call(run_tracecov, *flags.split(), "--save_json", tmp_path / "a", capsys=capsys), *parts)
    assert not (tmp_path / "a").exists()
