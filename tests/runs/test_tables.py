"""Data sets and oracle tables: every fault of a file is one line that names it, and nothing written is ever torn."""

import datetime
import hashlib
import json
import os

import datasets
import numpy as np
import pandas
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.begun_table import continue_table
from Gradient_evaluation.runs.inputs.dataset import load_dataset_rows, prompt_id
from Gradient_evaluation.runs.inputs.oracle_table import check_same_law, load_oracle_table
from Gradient_evaluation.runs.inputs.rewards import check_ground_truths, resolve_rewards, rewards_of
from Gradient_evaluation.runs.machine import files as durable_files
from Gradient_evaluation.runs.machine.files import append_row, read_finished_rows, truncate_file, write_bytes_atomic, write_json
from Gradient_evaluation.utils import REWARDS, Reward

USER = [{"role": "user", "content": "2+3?"}]
GOOD = {"prompt": USER, "ground_truth": 5, "V_oracle": 0.75, "n_oracle": 4, "correct_count": 3}
OTHER = {"prompt": "3+4=", "ground_truth": 7, "V_oracle": 0.5}


def line(row, **changes) -> bytes:
    row = {name: value for name, value in {**row, **changes}.items() if value is not ...}
    return (json.dumps(row) + "\n").encode()


def written(folder, data: bytes, name="table.jsonl"):
    path = folder / name
    path.write_bytes(data)
    return path


def one_line(caught) -> str:
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    return message


# ------------------------------------------------------------------------------------ what is taken


@pytest.mark.parametrize(
    "kind, data, numbers",
    [
        ("plain", line(GOOD) + line(OTHER), [1, 2]),
        ("UTF-8 byte order mark", b"\xef\xbb\xbf" + line(GOOD) + line(OTHER), [1, 2]),
        ("CRLF", line(GOOD).replace(b"\n", b"\r\n") + line(OTHER).replace(b"\n", b"\r\n"), [1, 2]),
        ("blank lines", b"\n \r\n" + line(GOOD) + b"\n\t\n" + line(OTHER) + b"\n\n", [3, 6]),
        ("no newline at the end", line(GOOD) + line(OTHER).rstrip(), [1, 2]),
        ("U+2028 inside a text", line(GOOD, note="a").replace(b'"a"', '"a\u2028b"'.encode()) + line(OTHER), [1, 2]),
    ],
)
def test_lines_are_read_and_counted_as_an_editor_shows_them(tmp_path, kind, data, numbers):
    path = written(tmp_path, data)
    rows = load_oracle_table(path)
    assert [(row.prompt, row.ground_truth, row.oracle_value) for row in rows] == [(USER, 5, 0.75), ("3+4=", 7, 0.5)]
    assert [row.where for row in rows] == [f"{path}, line {number}" for number in numbers]


def test_all_columns_are_kept_and_ready_for_json(tmp_path):
    data = b'{"prompt": "1+1=", "ground_truth": "2", "kind": {"a": [1, null]}, "x": NaN, "y": 1e999}\n'
    path = written(tmp_path, data)
    (row,) = load_dataset_rows(str(path), "train")
    assert row.columns == {"prompt": "1+1=", "ground_truth": "2", "kind": {"a": [1, None]}, "x": None, "y": None}


@pytest.mark.parametrize("name", ["t.json", "t.txt"])
@pytest.mark.parametrize("data", [b"[" + line(GOOD) + b"," + line(OTHER) + b"]", line(GOOD) + line(OTHER)])
def test_json_list_or_json_lines_are_told_apart_by_content(tmp_path, name, data):
    assert [row.ground_truth for row in load_oracle_table(written(tmp_path, data, name))] == [5, 7]


@pytest.mark.parametrize("row_group_size", [None, 1])
def test_parquet_gives_the_same_rows_and_ids_as_json_lines(tmp_path, row_group_size):
    few_shot = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}, *USER]
    rows = [{**GOOD, "tags": ["a", "b"]}, {**OTHER, "prompt": few_shot, "n_oracle": None, "correct_count": None}]
    pandas.DataFrame(rows).to_parquet(tmp_path / "t.parquet", row_group_size=row_group_size)
    expected = load_oracle_table(written(tmp_path, b"".join(line(row) for row in rows)))
    found = load_oracle_table(tmp_path / "t.parquet")
    assert [row.prompt_id for row in found] == [row.prompt_id for row in expected]
    assert [row.prompt for row in found] == [USER, few_shot]
    assert found[0].columns["tags"] == ["a", "b"] and found[1].columns["tags"] is None
    assert (found[0].oracle_samples, found[0].correct_count, found[1].oracle_samples) == (4, 3, None)
    assert found[1].where == f"{tmp_path / 't.parquet'}, row 2"


def test_dates_of_parquet_are_iso_text(tmp_path):
    made = [datetime.datetime(2026, 1, 2, 3, 4, 5), pandas.NaT]
    table = pandas.DataFrame({"prompt": ["a", "b"], "ground_truth": [1, 2], "made": made})
    table.to_parquet(tmp_path / "t.parquet")
    rows = load_dataset_rows(str(tmp_path / "t.parquet"), "train")
    assert [row.columns["made"] for row in rows] == ["2026-01-02T03:04:05", None]


def test_prompt_id_depends_on_prompt_and_ground_truth_alone(tmp_path):
    (row,) = load_dataset_rows(str(written(tmp_path, line(GOOD, note=1))), "train")
    assert row.prompt_id == prompt_id([{"content": "2+3?", "role": "user"}], 5)
    digest = hashlib.sha256(b'[[{"content":"2+3?","role":"user"}],5]').digest()
    assert row.prompt_id == int.from_bytes(digest[:8], "big")
    pairs = [("a", 1), ("a", "1"), ("b", 1), ([{"role": "user", "content": "a"}], 1)]
    assert len({prompt_id(*pair) for pair in pairs}) == 4


def test_repeated_rows_are_left_out_and_announced_once(tmp_path):
    again = line(GOOD, V_oracle=0.5, n_oracle=2, correct_count=1)
    path = written(tmp_path, line(GOOD) + line(OTHER) + again + line(OTHER))
    warnings = []
    rows = load_oracle_table(path, warn=warnings.append)
    assert [row.oracle_value for row in rows] == [0.75, 0.5]
    assert warnings == [f"{path}: left out 2 repeated rows: line 3 as line 1, line 4 as line 2"]


def test_same_prompt_with_another_ground_truth_is_another_row(tmp_path):
    assert len(load_oracle_table(written(tmp_path, line(GOOD) + line(GOOD, ground_truth=6)))) == 2


# ---------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "kind, bad, message",
    [
        ("torn last line", line(OTHER)[:-20], "ends in the middle of this line"),
        ("torn inside a character", '{"prompt": "\u2212'.encode()[:-1], "ends in the middle of this line"),
        ("lines that end in CR alone", (line(OTHER) * 2).replace(b"\n", b"\r"), "end in a carriage return alone"),
        ("a name twice", line(OTHER).replace(b"}", b', "V_oracle": 1}'), "the name 'V_oracle' stands twice"),
        ("a name twice inside", line(OTHER, x=1).replace(b"1}", b'{"a": 1, "a": 2}}'), "the name 'a' stands twice"),
        ("not JSON", b"hello\n", "not JSON"),
        ("binary", b"\x00\x01\x02\n", "not JSON"),
        ("not UTF-8", b'{"prompt": "\xff"}\n', "not UTF-8"),
        ("not an object", b"[1, 2]\n", "a JSON object"),
        ("number", b"3\n", "a JSON object"),
        ("nested too deeply", b"[" * 100_000 + b"\n", "not "),
        ("column nested too deeply", line(OTHER, x=1).replace(b"1}", b"[" * 200 + b"]" * 200 + b"}"), "levels deep"),
        ("number of 5000 digits", b'{"prompt": "a", "ground_truth": ' + b"1" * 5000 + b"}\n", "not JSON"),
        ("no prompt", line(OTHER, prompt=...), "no column 'prompt' (columns: ground_truth, V_oracle)"),
        ("no ground_truth", line(OTHER, ground_truth=...), "no column 'ground_truth' (columns: prompt, V_oracle)"),
        ("ground_truth null", line(OTHER, ground_truth=None), "ground_truth is null"),
        ("ground_truth NaN", line(OTHER, ground_truth=float("nan")), "ground_truth is null or NaN"),
        ("ground_truth infinite", line(OTHER, ground_truth=float("inf")), "ground_truth is null or NaN"),
        ("prompt null", line(OTHER, prompt=None), "prompt is null"),
        ("prompt empty", line(OTHER, prompt=""), "prompt is empty"),
        ("prompt a number", line(OTHER, prompt=3), "prompt is of type int"),
        ("no messages", line(OTHER, prompt=[]), "prompt is empty"),
        ("message without content", line(OTHER, prompt=[{"role": "user"}]), "without content"),
        ("half a character", line(OTHER, prompt="a\ud800"), "lone surrogate"),
        ("V missing", line(OTHER, V_oracle=...), "no V_oracle"),
        ("V null", line(OTHER, V_oracle=None), "V_oracle is null"),
        ("V NaN", line(OTHER, V_oracle=float("nan")), "V_oracle is null or NaN"),
        ("V infinite", line(OTHER, V_oracle=float("inf")), "V_oracle is null or NaN"),
        ("V negative", line(OTHER, V_oracle=-0.1), "outside [0, 1]"),
        ("V above 1", line(OTHER, V_oracle=1.5), "outside [0, 1]"),
        ("V in text", line(OTHER, V_oracle="0.5"), 'V_oracle is "0.5", not a number'),
        ("V true", line(OTHER, V_oracle=True), "V_oracle is true, not a number"),
        ("n_oracle in text", line(OTHER, n_oracle="4"), "n_oracle is"),
        ("n_oracle zero", line(OTHER, n_oracle=0), "n_oracle is 0"),
        ("n_oracle fractional", line(OTHER, n_oracle=1.5), "n_oracle is 1.5"),
        ("correct_count negative", line(OTHER, correct_count=-1), "correct_count is -1"),
        ("V against its counts", line(OTHER, n_oracle=4, correct_count=3), "V_oracle is 0.5, but"),
        ("more correct than sampled", line(OTHER, V_oracle=1, n_oracle=1, correct_count=10**400), "V_oracle is 1, but"),
    ],
)
def test_faulty_row_is_refused_naming_file_and_line(tmp_path, kind, bad, message):
    path = written(tmp_path, line(GOOD) + b"\n" + bad)
    with pytest.raises(UserError) as caught:
        load_oracle_table(path)
    assert one_line(caught).startswith(f"{path}, line 3: ") and message in one_line(caught)


@pytest.mark.parametrize(
    "kind, name, data, message",
    [
        ("empty", "t.jsonl", b"", "holds no rows"),
        ("only a byte order mark", "t.jsonl", b"\xef\xbb\xbf", "holds no rows"),
        ("only blank lines", "t.jsonl", b"\n\r\n \n", "holds no rows"),
        ("empty list", "t.json", b"[]", "holds no rows"),
        ("torn list", "t.json", b"[" + line(GOOD), "not JSON"),
        ("UTF-16", "t.jsonl", line(GOOD).decode().encode("utf-16"), "UTF-16"),
        ("no parquet", "t.parquet", line(GOOD), "cannot be read as parquet"),
        ("torn parquet", "t.parquet", b"PAR1" + b"\x00" * 50, "cannot be read as parquet"),
        ("parquet under another name", "t.jsonl", b"PAR1" + b"\x00" * 50, "cannot be read as parquet"),
    ],
)
def test_faulty_file_is_refused_by_name(tmp_path, kind, name, data, message):
    path = written(tmp_path, data, name)
    for load in (load_oracle_table, lambda path: load_dataset_rows(str(path), "train")):
        with pytest.raises(UserError) as caught:
            load(path)
        assert one_line(caught).startswith(f"{path}: ") and message in one_line(caught)


def test_column_that_json_cannot_hold_is_refused_by_row(tmp_path):
    pandas.DataFrame({"prompt": ["a"], "ground_truth": [1], "image": [b"\xff"]}).to_parquet(tmp_path / "t.parquet")
    with pytest.raises(UserError, match="row 1: a column holds bytes values"):
        load_dataset_rows(str(tmp_path / "t.parquet"), "train")


def test_missing_file_and_folder_for_a_file_are_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load_oracle_table(tmp_path / "none.jsonl")
    written(tmp_path, line(GOOD), "oracle.jsonl")
    with pytest.raises(UserError, match="is a folder, a file is expected; give one of the files in it: oracle.jsonl"):
        load_oracle_table(tmp_path)


NOWHERE = ["none.jsonl", "./none", "../none", "/none/at/all", "a/b/c", "data/none.parquet", "a b", "a\0"]


@pytest.mark.parametrize("source", NOWHERE)
def test_path_to_nothing_is_not_looked_up_on_the_hub(source):
    with pytest.raises(UserError, match="no such file or folder"):
        load_dataset_rows(source, "train")


def test_hub_name_that_cannot_be_reached_is_one_line():
    with pytest.raises(UserError, match="^nobody/nothing: no local file or folder .* the hub gave: ") as caught:
        load_dataset_rows("nobody/nothing", "train")
    one_line(caught)


def test_empty_name_of_a_data_set_is_refused():
    with pytest.raises(UserError, match="name of the data set is empty"):
        load_dataset_rows(" ", "train")


# ------------------------------------------------------------------------------- splits and folders


@pytest.mark.parametrize("files", [["train.jsonl", "test.jsonl"], ["data/train-00000-of-00001.jsonl", "data/test.jsonl"]])
def test_folder_of_files_named_after_splits(tmp_path, files):
    for number, name in enumerate(files):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        written(tmp_path, line(OTHER, ground_truth=number), name)
    written(tmp_path, b"{}", "dataset_infos.json")
    assert [row.ground_truth for row in load_dataset_rows(str(tmp_path), "train")] == [0]
    assert [row.ground_truth for row in load_dataset_rows(str(tmp_path), "test")] == [1]
    with pytest.raises(UserError, match="no split 'validation'; there is test, train"):
        load_dataset_rows(str(tmp_path), "validation")


def test_folder_of_files_without_split_names_is_read_whole(tmp_path):
    written(tmp_path, line(OTHER, ground_truth=1), "b.jsonl")
    written(tmp_path, line(OTHER, ground_truth=0), "a.jsonl")
    assert [row.ground_truth for row in load_dataset_rows(str(tmp_path), "train")] == [0, 1]


def test_folder_without_data_is_refused(tmp_path):
    written(tmp_path, b"x", "notes.txt")
    with pytest.raises(UserError, match="holds no data file"):
        load_dataset_rows(str(tmp_path), "train")


def test_saved_data_sets_with_and_without_splits(tmp_path):
    train = datasets.Dataset.from_list([{"prompt": USER, "ground_truth": 5}])
    test = datasets.Dataset.from_list([{"prompt": USER, "ground_truth": 6}])
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=train, test=test).save_to_disk(tmp_path / "two")
    assert [row.ground_truth for row in load_dataset_rows(str(tmp_path / "one"), "any")] == [5]
    (row,) = load_dataset_rows(str(tmp_path / "two"), "test")
    assert (row.prompt, row.ground_truth, row.where) == (USER, 6, f"{tmp_path / 'two'}, row 1")
    with pytest.raises(UserError, match="no split 'dev'; there is train, test"):
        load_dataset_rows(str(tmp_path / "two"), "dev")
    with pytest.raises(UserError, match="no column 'prompt'"):
        train.rename_column("prompt", "question").save_to_disk(tmp_path / "three")
        load_dataset_rows(str(tmp_path / "three"), "train")
    (tmp_path / "two" / "dataset_dict.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as a saved data set") as caught:
        load_dataset_rows(str(tmp_path / "two"), "test")
    one_line(caught)


# ------------------------------------------------------------------------------------ fuzz

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(st.fixed_dictionaries({}, optional={"role": JSON, "content": JSON}), max_size=3)
ROWS = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.one_of(JSON, MESSAGES, st.just("1+1=")),
        "ground_truth": JSON,
        "V_oracle": st.one_of(JSON, st.floats(0, 1)),
        "n_oracle": st.one_of(JSON, st.integers(0, 9)),
        "correct_count": st.one_of(JSON, st.integers(0, 9)),
        "other": JSON,
    },
)
FILES = st.one_of(
    st.binary(),
    st.text().map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.lists(st.one_of(ROWS, JSON), max_size=4).map(lambda rows: "\n".join(map(json.dumps, rows)).encode()),
    st.lists(ROWS, max_size=3).map(lambda rows: json.dumps(rows).encode()),
)


@settings(max_examples=400, deadline=None)
@given(data=FILES, name=st.sampled_from(["t.jsonl", "t.json", "t.txt", "t.parquet"]))
def test_any_file_gives_rows_or_the_documented_error(tmp_path_factory, data, name):
    path = tmp_path_factory.getbasetemp() / f"fuzz-{name}"
    path.write_bytes(data)
    try:
        rows = load_oracle_table(path, warn=lambda message: None)
    except UserError as error:
        assert "\n" not in str(error)
        return
    for row in rows:
        assert 0 <= row.oracle_value <= 1 and row.prompt and row.ground_truth is not None
        json.loads(durable_files.to_json_line(row.columns))
        try:
            check_ground_truths([row], resolve_rewards("integer"))
        except UserError as error:
            assert row.where in str(error)


# ------------------------------------------------------------------------- ground truths and the law


def test_ground_truth_the_reward_cannot_use_is_refused_by_row(tmp_path):
    rows = load_oracle_table(written(tmp_path, line(GOOD, ground_truth="1,234") + line(OTHER, ground_truth="x/y")))
    check_ground_truths(rows[:1], resolve_rewards("integer"))
    check_ground_truths(rows, resolve_rewards("math"))
    with pytest.raises(UserError, match="line 2: the ground_truth 'x/y' is not an integer"):
        check_ground_truths(rows, resolve_rewards("integer"))


@pytest.mark.parametrize("size", [1e150, -1.1e30, 1e-170, -9e-31])
def test_reward_whose_squares_do_not_fit_is_refused(tmp_path, monkeypatch, size):
    """Statistics multiply up to four rewards; 1e150 overflowed them with a traceback, and 1e-170 vanished."""
    (row,) = load_oracle_table(written(tmp_path, line(GOOD)))
    monkeypatch.setitem(REWARDS, "integer", Reward(lambda gold: gold, lambda text, gold: size))
    with pytest.raises(UserError, match="scale") as caught:
        rewards_of(["a"], row, resolve_rewards("integer"))
    assert all(part in one_line(caught) for part in ("line 1", "continuation 1", f"{size}", "1e-30 to 1e30"))


@pytest.mark.parametrize("size", [1e30, -1e-30, 0.0, -0.0, 70])
def test_reward_at_the_bounds_of_size_is_taken(tmp_path, monkeypatch, size):
    (row,) = load_oracle_table(written(tmp_path, line(GOOD, V_oracle=size, reward_values="graded")))
    monkeypatch.setitem(REWARDS, "integer", Reward(lambda gold: gold, lambda text, gold: size))
    assert rewards_of(["a"], row, resolve_rewards("integer")).total == [size]


@pytest.mark.parametrize("size", [1e150, -1e150, 1e-170, 10**400])
def test_oracle_value_whose_squares_do_not_fit_is_refused(tmp_path, size):
    path = written(tmp_path, line(GOOD, V_oracle=size, reward_values="graded"))
    with pytest.raises(UserError, match="line 1: V_oracle is .*1e-30 to 1e30.*another scale.*make the table again"):
        load_oracle_table(path)


def test_standard_errors_of_an_older_table_are_computed_again(tmp_path, capsys):
    """Older rows hold the plug-in sqrt(V (1 - V) / n), 0 at V = 0, and no kind; one table holds one kind."""
    old = [{**each, "V_oracle": 0.0, "n_oracle": 4, "correct_count": 0, "V_standard_error": 0.0} for each in (GOOD, OTHER)]
    new = {**old[1], "V_standard_error": 0.1, "V_standard_error_kind": "jeffreys"}
    path = written(tmp_path, line(old[0]) + line(new))
    rows = load_oracle_table(path)
    table = continue_table(path, {}, rows)
    error = (0.1 * 0.9 / 6) ** 0.5
    first, second = json.loads(path.read_bytes().splitlines()[0]), table[rows[1].prompt_id]
    assert first == {**old[0], "V_standard_error": pytest.approx(error), "V_standard_error_kind": "jeffreys"} and second == new
    assert table[rows[0].prompt_id] == first and list(first)[-2:] == ["V_standard_error", "V_standard_error_kind"]
    (said,) = capsys.readouterr().err.splitlines()
    assert "1 of its rows" in said and "V_standard_error" in said
    assert continue_table(path, {}, rows) == table and not capsys.readouterr().err


LAW = {"model": "m", "temperature": 1.0, "top_p": 0.95, "top_k": None, "max_new_tokens": 32, "stop": ["\n"]}
LAW["reward"] = "integer"


def law_check(folder, rows, law=LAW, allow_mismatch=False):
    warnings = []
    path = written(folder, b"".join(line(row) for row in rows))
    check_same_law(load_oracle_table(path), law, path, allow_mismatch, warnings.append)
    return warnings


def test_table_made_under_the_run_s_law_is_taken_in_silence(tmp_path):
    assert law_check(tmp_path, [{**GOOD, **LAW, "seed": 1}, {**OTHER, **LAW, "seed": 1}]) == []
    assert law_check(tmp_path, [{**GOOD, **LAW}], {**LAW, "temperature": 1, "stop": ("\n",)}) == []


@pytest.mark.parametrize(
    "name, value, shown",
    [
        ("model", "n", '"n"'),
        ("temperature", 0.7, "0.7"),
        ("top_p", 1.0, "1.0"),
        ("top_k", 20, "20"),
        ("max_new_tokens", 16, "16"),
        ("stop", [], "[]"),
        ("reward", "math", '"math"'),
    ],
)
def test_table_of_another_law_is_refused_by_both_values(tmp_path, name, value, shown):
    rows = [{**GOOD, **LAW, name: value}, {**OTHER, **LAW, name: value}]
    with pytest.raises(UserError, match="--allow_mismatch") as caught:
        law_check(tmp_path, rows)
    assert f"made with {name} {shown}, this run uses {json.dumps(LAW[name])}" in one_line(caught)
    (warning,) = law_check(tmp_path, rows, allow_mismatch=True)
    assert f"made with {name} {shown}, this run uses" in warning


def test_table_whose_rows_disagree_is_refused_naming_both_rows(tmp_path):
    with pytest.raises(UserError, match=r"rows disagree on top_p: 0.95 \(.*line 1\) and 0.5 \(.*line 2\)"):
        law_check(tmp_path, [{**GOOD, **LAW}, {**OTHER, **LAW, "top_p": 0.5}])
    without = {name: value for name, value in LAW.items() if name != "top_p"}
    with pytest.raises(UserError, match=r"rows disagree on top_p: missing \(.*line 1\) and 0.95 \(.*line 2\)"):
        law_check(tmp_path, [{**GOOD, **without}, {**OTHER, **LAW}])


def test_table_without_a_law_is_taken_with_a_warning(tmp_path):
    (warning,) = law_check(tmp_path, [GOOD, OTHER])
    assert "does not say how it was made" in warning
    without = {name: value for name, value in LAW.items() if name != "reward"}
    (warning,) = law_check(tmp_path, [{**GOOD, **without}])
    assert "does not say its reward" in warning


# ------------------------------------------------------------------------------------ durable files


def test_appended_rows_are_read_back(tmp_path):
    path = tmp_path / "out.jsonl"
    assert read_finished_rows(path) == ([], 0)
    append_row(path, {"text": "\u2212\u2028\n", "n": np.int64(3), "x": np.float64(0.1)})
    append_row(path, {"half": "\ud800", "list": np.arange(2)})
    expected = [{"text": "\u2212\u2028\n", "n": 3, "x": 0.1}, {"half": "\ud800", "list": [0, 1]}]
    assert read_finished_rows(path) == (expected, path.stat().st_size)
    assert "\u2212".encode() in path.read_bytes()


def test_output_cut_at_any_byte_loses_only_the_torn_row(tmp_path):
    path = tmp_path / "out.jsonl"
    for row in (GOOD, {"text": "\u2212{}"}, OTHER):
        append_row(path, row)
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        rows, complete = read_finished_rows(path)
        assert len(rows) == sum(end <= size for end in ends)
        assert complete == max([0, *(end for end in ends if end <= size)])
        truncate_file(path, complete)
        append_row(path, {"next": 1})
        assert read_finished_rows(path)[0] == [*rows, {"next": 1}]


@pytest.mark.parametrize("tail", [b'{"a": \n', b"\x00\x00\x00", b"\x00\x00\n", b"[1]\n", b'{"a": 1}'])
def test_last_line_that_is_no_complete_row_is_torn(tmp_path, tail):
    path = written(tmp_path, b'{"a": 1}\n' + tail)
    assert read_finished_rows(path) == ([{"a": 1}], 9)


def test_damage_before_the_last_line_is_refused_by_line(tmp_path):
    path = written(tmp_path, b'{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(UserError, match=", line 2: damaged"):
        read_finished_rows(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.nan, [np.float32("inf")]])
def test_what_is_not_finite_is_never_written(tmp_path, value):
    append_row(tmp_path / "rows", {"x": 1})
    write_json(tmp_path / "whole", {"x": 1})
    before = [(path, path.read_bytes()) for path in sorted(tmp_path.iterdir())]
    with pytest.raises(ValueError):
        append_row(tmp_path / "rows", {"x": value})
    with pytest.raises(ValueError):
        write_json(tmp_path / "whole", {"x": value})
    assert [(path, path.read_bytes()) for path in sorted(tmp_path.iterdir())] == before


def test_whole_files_are_replaced_and_leave_nothing_behind(tmp_path):
    path = tmp_path / "result.json"
    (tmp_path / ".result.json.tmp").write_bytes(b"left by a killed run, longer than the next")
    for value in ({"a": np.arange(3)}, {"b": "\ud800"}):
        write_json(path, value)
    assert json.loads(path.read_text()) == {"b": "\ud800"}
    write_bytes_atomic(path, b"x")
    assert path.read_bytes() == b"x"
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize(
    "write", [lambda path: append_row(path, {}), lambda path: write_json(path, {}), lambda path: write_bytes_atomic(path, b"x")]
)
def test_path_that_cannot_be_written_is_one_line(tmp_path, write):
    written(tmp_path, b"", "file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside").touch()
    for path in (tmp_path / "none" / "out", tmp_path / "file" / "out", tmp_path / "folder"):
        with pytest.raises(UserError, match="cannot write it: ") as caught:
            write(path)
        assert one_line(caught).startswith(str(path))


def test_full_disk_is_one_line_and_leaves_every_complete_row(small_disk):
    path, count = small_disk / "out.jsonl", 0
    write_json(small_disk / "whole.json", {"old": 1})
    with pytest.raises(UserError, match="cannot write it: No space left|cannot write it: the disk is full"):
        while True:
            append_row(path, {"row": count, "text": "x" * 3000})
            count += 1
    rows, complete = read_finished_rows(path)
    assert [row["row"] for row in rows] == list(range(count)) and complete == path.stat().st_size
    with pytest.raises(UserError, match="cannot write it: No space left"):
        write_json(small_disk / "whole.json", {"new": "x" * 70_000})
    assert json.loads((small_disk / "whole.json").read_text()) == {"old": 1}
    assert sorted(file.name for file in small_disk.iterdir()) == ["out.jsonl", "whole.json"]
