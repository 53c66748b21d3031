"""Files of rollouts that cannot be measured are one line each; those that only look odd are taken."""

import json
import math
import re

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from readme_commands import code_blocks
from rollouts_runs import measure, rows_in, written
from scripts import RESULTS, ROOT, one_line_error, read, tracecov

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import make_row
from Gradient_evaluation.runs.inputs.rollouts import own_format, read_rollouts, vllm
from Gradient_evaluation.runs.inputs.rollouts.context import Context
from Gradient_evaluation.runs.inputs.rollouts.from_text import number_of
from Gradient_evaluation.runs.inputs.rollouts.save import RolloutsFolder
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.sampling.generate import Continuation
from Gradient_evaluation.sampling.rollouts import check_rollouts

SIZE = ("--K_list", 4)


@pytest.fixture(scope="module")
def rows(policy, table, tmp_path_factory):
    """Eight rollouts of each of two prompts."""
    out = tmp_path_factory.mktemp("rows")
    assert tracecov(policy, table, out, "--K_list", 4, "--M", 2, "--T", 2, "--save_rollouts", out / "rollouts")[0] == 0
    return rows_in(out / "rollouts")


def with_row(rows, number, **changed):
    """The rows, one of them changed; a column given as None is left out."""
    new = {name: value for name, value in {**rows[number - 1], **changed}.items() if value is not None}
    return [*rows[: number - 1], new, *rows[number:]]


WRONG = {
    "a token beyond the vocabulary": (dict(response_ids=[1, 700], log_probs=None), ("token 700", "knows 4", "another model")),
    "a negative token": (dict(response_ids=[-1], log_probs=None, log_kept=None), ("token -1",)),
    "tokens that are text": (dict(response_ids="1 2"), ("response_ids is '1 2'", "docs/rollouts.md")),
    "an empty response": (dict(response_ids=[], log_probs=None, log_kept=None), ("response_ids are empty",)),
    "log_probs of another length": (dict(response_ids=[1, 2], log_probs=[0.5]), ("1 log_probs of 2 response_ids",)),
    "a mask of another length": (dict(mask=[True] * 7), ("7 mask of",)),
    "a mask of numbers": (dict(mask=[0.5, 2]), ("mask is [0.5, 2]", "true and false")),
    "a mask without a token": (dict(response_ids=[1, 2], log_probs=None, log_kept=None, mask=[0, 0]), ("no token count",)),
    "log_probs that are no numbers": (dict(log_probs=["a"]), ("log_probs is ['a']",)),
    "a reward that is text": (dict(reward="good"), ("reward is 'good'",)),
    "an infinite reward": (dict(reward=float("inf")), ("reward is inf",)),
    "a reward that statistics cannot square": (dict(reward=1e200), ("reward is 1e+200",)),
    "a reward beyond floats": (dict(reward=10**400), ("its reward is 1000", "not a number")),
    "log_probs beyond floats": (dict(log_probs=[10**400]), ("its log_probs is [1000", "not a list of numbers")),
    "columns that are too deep": (dict(columns='{"a":' * 5000 + "1" + "}" * 5000, prompt_id="0" * 16), ("nested too deeply",)),
    "another model": (dict(law={"model": "other"}), ("model = 'other'", "line 1 with 'four tokens'")),
    "a law that is no JSON": (dict(law="greedy"), ("law is text, but no JSON",)),
    "two prompts with one id": (dict(prompt="1"), ("prompt_id of", "line 1, but another prompt")),
    "an id that is none": (dict(prompt_id="7"), ("prompt_id is '7'", "16 hex digits")),
    "ended as text": (dict(ended="stop"), ("ended is 'stop'", "true or false")),
    "no response": (dict(response_ids=None), ("response_ids",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_row_is_named_with_its_line(policy, rows, tmp_path, capsys, case):
    changed, parts = WRONG[case]
    if isinstance(changed.get("law"), dict):
        changed = {"law": json.dumps({**json.loads(rows[0]["law"]), **changed["law"]})}
    path = written(with_row(rows, 3, **changed), tmp_path / "r.jsonl")
    one_line_error(measure(policy, [path], tmp_path / "out", *SIZE, capsys=capsys), "r.jsonl, line 3", *parts)
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_given_twice_is_refused(policy, rows, tmp_path, capsys):
    path = written(rows, tmp_path / "r.jsonl")
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    for twice in ([path, path], [tmp_path, path], [path, tmp_path / "link"]):
        one_line_error(measure(policy, twice, tmp_path / "out", *SIZE, capsys=capsys), "r.jsonl is given twice")


def test_two_models_in_one_folder_are_refused_by_file(policy, rows, tmp_path, capsys):
    other = [{**row, "law": json.dumps({**json.loads(row["law"]), "model_fingerprint": "0" * 16})} for row in rows]
    written(rows[:8], tmp_path / "a.jsonl"), written(other[8:], tmp_path / "b.jsonl")
    outcome = measure(policy, [tmp_path], tmp_path / "out", *SIZE, capsys=capsys)
    one_line_error(outcome, "b.jsonl, line 1: sampled with model_fingerprint", "a.jsonl, line 1", "one model under one law")


def test_rewards_missing_ask_for_a_reward(policy, rows, tmp_path, capsys):
    bare = written([{name: row[name] for name in row if name != "reward"} for row in rows], tmp_path / "r.jsonl")
    one_line_error(measure(policy, [bare], tmp_path / "out", *SIZE, capsys=capsys), "line 1: has no reward; give --reward")
    assert measure(policy, [bare], tmp_path / "out", *SIZE, "--reward", "integer")[0] == 0
    truthless = written([{name: row[name] for name in row if name != "ground_truth"} for row in rows], tmp_path / "t.jsonl")
    outcome = measure(policy, [truthless], tmp_path / "no", *SIZE, "--reward", "integer", capsys=capsys)
    one_line_error(outcome, "t.jsonl, line 1", "ground_truth")
    assert measure(policy, [truthless], tmp_path / "own rewards", *SIZE)[0] == 0


def test_rollouts_without_a_reward_of_their_own_are_left_out(policy, rows, tmp_path, capsys):
    some = written(with_row(with_row(rows, 2, reward=None), 12, reward=None), tmp_path / "r.jsonl")
    code, out, err = measure(policy, [some], tmp_path / "out", *SIZE, capsys=capsys)
    assert code == 0 and "left out 2 rollouts without a reward\n" in out, err
    assert [len(record.rewards) for record in gram_store.load_all(tmp_path / "out" / "grams")] == [7, 7]


def test_truncated_rollouts_are_fine(policy, rows, tmp_path):
    path = written([{**row, "ended": False} for row in rows], tmp_path / "r.jsonl")
    assert measure(policy, [path], tmp_path / "out", *SIZE)[0] == 0
    assert read(tmp_path / "out" / RESULTS)["n_continuations"] == 16


@pytest.mark.parametrize(
    "name, content, parts",
    [
        ("r.jsonl", '{"prompt": "1", "ground_truth": 1}\n', ("line 1: no rollouts of a known format", "prompt, ground_truth")),
        ("r.jsonl", "", ("r.jsonl: holds no rollouts",)),
        ("r.jsonl", "plain text\n", ("line 1", "not JSON")),
        ("r.parquet", "PAR1", ("cannot be read as parquet",)),
        ("notes.txt", "a", ("holds no rollouts (.jsonl",)),
    ],
)
def test_what_is_no_file_of_rollouts_is_one_line(policy, tmp_path, capsys, name, content, parts):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / name).write_text(content)
    one_line_error(measure(policy, [tmp_path / "in"], tmp_path / "out", *SIZE, capsys=capsys), *parts)
    missing = measure(policy, [tmp_path / "none.jsonl"], tmp_path / "out", *SIZE, capsys=capsys)
    one_line_error(missing, "none.jsonl: no such file or folder")


def test_two_formats_in_one_folder_are_refused(policy, rows, tmp_path, capsys):
    written(rows, tmp_path / "1.jsonl"), written([{"input": "1", "output": "2"}], tmp_path / "2.jsonl")
    one_line_error(measure(policy, [tmp_path], tmp_path / "out", *SIZE, capsys=capsys), "2.jsonl, line 1: not of the format")


def test_too_few_rollouts_of_every_prompt_are_one_line(policy, rows, tmp_path, capsys):
    few = written([*rows[:3], *rows[8:10]], tmp_path / "r.jsonl")
    outcome = measure(policy, [few], tmp_path / "out", *SIZE, capsys=capsys)
    one_line_error(outcome, "r.jsonl, line 1", "none of the 2 prompts has 4 usable rollouts (this one has 3)")


def test_a_prompt_that_the_data_set_lacks_is_named(policy, rows, tmp_path, capsys):
    data = written([{"prompt": rows[0]["prompt"], "ground_truth": 1}], tmp_path / "data.jsonl")
    path = written([{name: row[name] for name in row if name != "prompt_id"} for row in rows], tmp_path / "r.jsonl")
    outcome = measure(policy, [path], tmp_path / "out", *SIZE, "--dataset", data, capsys=capsys)
    one_line_error(outcome, "r.jsonl, line 9: its prompt is not in --dataset")


def test_rollouts_longer_than_the_context_are_refused(policy, rows, tmp_path, capsys):
    long = written(with_row(rows, 3, response_ids=[1] * 64, log_probs=None, log_kept=None), tmp_path / "r.jsonl")
    outcome = measure(policy, [long], tmp_path / "out", *SIZE, capsys=capsys)
    one_line_error(outcome, "its longest continuation 64", "--skip_long")
    code, out, err = measure(policy, [long], tmp_path / "out", *SIZE, "--skip_long", capsys=capsys)
    assert code == 0 and "left out 1 prompts that are too long" in out, err


def test_the_page_of_the_format_has_its_columns_and_examples(rows):
    page = (ROOT / "docs" / "rollouts.md").read_text()
    known = {
        name for line in page.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert known >= {*rows[0], "mask", "rewards", "messages", "step"} and known <= {*own_format.COLUMNS}
    examples = [json.loads(line) for block in code_blocks(page, "json") for line in block.splitlines()]
    assert len(examples) == 4 and {name for row in examples for name in row} <= known
    data = make_row("data", {"prompt": "1", "ground_truth": 1})
    for context, some in ((Context(None, None, None), examples[:3]), (Context(None, [data], None), examples[3:])):
        some = [{"text": "", **row, **({"prompt_id": f"{data.prompt_id:016x}"} if context.rows else {})} for row in some]
        check_rollouts(own_format.read([(f"line {i}", row) for i, row in enumerate(some)], context))


# ------------------------------------------------------------------------------------------------ what is written is read again

CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
ROWS = {
    "text": {"prompt": "13", "ground_truth": 33},
    "a number of many digits": {"prompt": "13", "ground_truth": 10**30},
    "no number": {"prompt": "13", "ground_truth": "\u00e9t\u00e9"},
    "a list": {"prompt": "13", "ground_truth": [1, {"a": None}]},
    "messages, tools and columns": {
        "prompt": [{"role": "user", "content": "13"}, CALL, {"role": "tool", "content": "2"}],
        "ground_truth": 1.0,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "kind": "x",
        "level": 3,
        "nested": {"a": []},
    },
}


@pytest.mark.parametrize("case", ROWS)
def test_a_saved_prompt_is_read_as_it_was(policy, tmp_path, case):
    from types import SimpleNamespace

    row = make_row("data.jsonl, line 1", ROWS[case])
    drawn = [
        Continuation((1, 2), False, "12", np.array([-0.5, -1.25], np.float32), np.zeros(2, np.float32), (True, False)),
        Continuation((0,), True, "", np.array([-2.0], np.float32), np.array([-0.5], np.float32)),
    ]
    parts = {"format.py:score": np.array([0.25, np.nan]), "right": np.array([1.0, 0.0])}
    RolloutsFolder(tmp_path, {"model": "m", "top_p": 0.9}).save(row, [1, 3], drawn, np.array([0.5, np.nan]), parts)
    settings = SimpleNamespace(model=str(policy), revision=None, trust_remote_code=False)
    (found,) = read_rollouts([str(tmp_path)], None, None, settings)
    assert (found.row.prompt, found.row.ground_truth, found.row.prompt_id) == (row.prompt, row.ground_truth, row.prompt_id)
    assert found.row.columns == row.columns and found.row.tools == row.tools and found.prompt_ids == (1, 3)
    assert list(found.continuations) == drawn and found.law == {"model": "m", "top_p": 0.9}
    for one, other in zip(found.continuations, drawn):
        np.testing.assert_array_equal(one.log_probs, other.log_probs)
        np.testing.assert_array_equal(one.log_kept, other.log_kept)
        assert (one.text, one.ended) == (other.text, other.ended)
    np.testing.assert_array_equal(found.rewards, [0.5, np.nan])
    assert found.components.keys() == parts.keys()
    for name, values in parts.items():
        np.testing.assert_array_equal(found.components[name], values)


def test_parquet_and_jsonl_are_one_format(policy, rows, tmp_path):
    written(rows, tmp_path / "r.jsonl")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "r.parquet")
    for name in ("jsonl", "parquet"):
        assert measure(policy, [tmp_path / f"r.{name}"], tmp_path / name, *SIZE)[0] == 0
    one, other = (read(tmp_path / name / RESULTS) for name in ("jsonl", "parquet"))
    assert one["estimators"] == other["estimators"] and one["law"] == other["law"]


def test_numbers_beyond_floats_are_one_line_in_every_importer():
    with pytest.raises(UserError, match="d.jsonl, line 1: its score is a whole number beyond 1e308"):
        number_of("d.jsonl, line 1", "score", 10**400)
    for value in (-math.inf, math.nan, -(10**400)):
        with pytest.raises(UserError, match="v.jsonl, line 1: no finite logprob"):
            vllm._log_probs("v.jsonl, line 1", [value], [1])
