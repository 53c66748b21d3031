"""The parquet files are what VERL reads; answers come from #### and the last balanced box; faults are one line."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from launches import prepare, save_chat_tokenizer, write_jsonl

from data.answers import answer_text
from data.make_arithmetic import make_problems
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import load_dataset_rows
from Gradient_evaluation.utils import REWARDS

SCRIPT = Path(__file__).resolve().parents[2] / "data" / "prepare_parquet.py"


def test_arithmetic_rows_have_the_schema_that_verl_reads(tmp_path):
    problems = make_problems(30, seed=1)
    sources = write_jsonl(tmp_path / "a.jsonl", problems[:20]), write_jsonl(tmp_path / "b.jsonl", problems[20:])
    train, val = prepare(tmp_path, "arithmetic", *sources)
    assert len(train) == 20 and len(val) == 10
    for split, rows, sources in (("train", train, problems[:20]), ("val", val, problems[20:])):
        for index, (row, source) in enumerate(zip(rows, sources)):
            assert row == {
                "data_source": "arithmetic",
                "prompt": source["prompt"],
                "ability": "arithmetic",
                "reward_model": {"style": "rule", "ground_truth": str(source["ground_truth"])},
                "extra_info": {
                    "split": split,
                    "index": index,
                    "reward": "integer",
                    "columns": json.dumps({"kind": source["kind"]}),
                },
                "ground_truth": str(source["ground_truth"]),
            }


def test_verls_own_dataset_loads_the_files(tmp_path):
    pytest.importorskip("verl", reason="verl is not installed")
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    problems = make_problems(12, seed=2)
    source = write_jsonl(tmp_path / "a.jsonl", problems)
    tokenizer = save_chat_tokenizer(tmp_path / "tokenizer")
    prepare(tmp_path, "arithmetic", source, None, "--val_size", "4", "--model", str(tmp_path / "tokenizer"))
    config = OmegaConf.create({"max_prompt_length": 512, "filter_overlong_prompts": True, "cache_dir": str(tmp_path)})
    data = RLHFDataset(data_files=str(tmp_path / "out" / "train.parquet"), tokenizer=tokenizer, config=config)
    assert len(data) == 8
    known = {json.dumps(row["prompt"]): str(row["ground_truth"]) for row in problems}
    for row in (data[index] for index in range(len(data))):
        assert known[json.dumps(row["raw_prompt"])] == row["reward_model"]["ground_truth"]
        assert isinstance(row["reward_model"]["ground_truth"], str) and row["data_source"] == "arithmetic"


def test_the_evaluation_reads_the_same_file(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", make_problems(10, seed=3))
    prepare(tmp_path, "arithmetic", source, None, "--val_size", "3")
    rows = load_dataset_rows(str(tmp_path / "out" / "val.parquet"), "train")
    assert len(rows) == 3 and all(isinstance(REWARDS["integer"].check(row.ground_truth), int) for row in rows)


@pytest.mark.parametrize(
    "kind, reward, value, expected",
    [
        ("gsm8k", "integer", "6 * 12 = <<6*12=72>>72\n#### 72", "72"),
        ("gsm8k", "integer", "a lot\n#### 1,234", "1234"),
        ("gsm8k", "integer", "#### 1 is not it\n#### -5", "-5"),
        ("math", "math", r"first \boxed{1}, then \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        ("math", "math", r"\boxed{3} and a torn \boxed{4", "3"),
        ("math", "math", r"so $\boxed 5$.", "5"),
        ("jsonl", "integer", 18.0, "18"),
        ("jsonl", "integer", "x\n#### 7", "7"),
        ("jsonl", "math", r"\boxed{x^2}", "x^2"),
        ("jsonl", "math", "0.5", "0.5"),
    ],
)
def test_answers_are_taken_from_their_marks(kind, reward, value, expected):
    assert answer_text(value, reward, kind) == expected


@pytest.mark.parametrize(
    "kind, reward, value, message",
    [
        ("gsm8k", "integer", "72", "no ####"),
        ("gsm8k", "integer", "#### many", "not an integer"),
        ("math", "math", "the answer is 5", "no balanced"),
        ("math", "math", None, "no balanced"),
        ("jsonl", "integer", 3.5, "not an integer"),
        ("jsonl", "math", True, "not a math answer"),
    ],
)
def test_answers_no_reward_can_use_are_refused(kind, reward, value, message):
    with pytest.raises(UserError, match=message):
        answer_text(value, reward, kind)


def test_gsm8k_and_math_ask_for_the_form_their_reward_reads(tmp_path):
    gsm8k = [{"question": f"{n} clips?", "answer": f"so\n#### {n}"} for n in (1, 2, 3)]
    train, _ = prepare(tmp_path, "gsm8k", write_jsonl(tmp_path / "g.jsonl", gsm8k), None, "--val_size", "1")
    assert train[0]["data_source"] == "openai/gsm8k" and "####" in train[0]["prompt"][0]["content"]
    math = [{"problem": f"Find {n}.", "solution": rf"\boxed{{{n}}}"} for n in (1, 2, 3)]
    train, _ = prepare(tmp_path, "math", write_jsonl(tmp_path / "m.jsonl", math), None, "--val_size", "1")
    assert train[0]["extra_info"]["reward"] == "math" and r"\boxed{}" in train[0]["prompt"][0]["content"]


def test_string_prompts_become_one_user_message(tmp_path):
    rows = [{"prompt": f"{n} + 1 =", "ground_truth": n + 1} for n in (1, 2)]
    train, val = prepare(tmp_path, "jsonl", write_jsonl(tmp_path / "s.jsonl", rows), None, "--val_size", "1")
    assert train[0]["prompt"][0]["role"] == "user" and train[0]["prompt"][0]["content"].endswith("+ 1 =")


def test_overlong_prompts_are_counted_and_refused_or_dropped(tmp_path, capsys):
    save_chat_tokenizer(tmp_path / "tokenizer")
    rows = [{"prompt": f"{n} " + "long " * (40 if n < 2 else 1), "ground_truth": n} for n in range(6)]
    train, val = write_jsonl(tmp_path / "t.jsonl", rows), write_jsonl(tmp_path / "v.jsonl", rows[3:4])
    flags = ["--model", str(tmp_path / "tokenizer"), "--max_prompt_length", "60"]
    with pytest.raises(UserError, match=r"t.jsonl, line 1: 2 of 6 train prompts.*60 tokens.*--overlong drop"):
        prepare(tmp_path, "jsonl", train, val, *flags)
    assert not (tmp_path / "out").exists()
    kept, _ = prepare(tmp_path, "jsonl", train, val, *flags, "--overlong", "drop")
    assert len(kept) == 4 and "dropped 2 train prompts of more than 60 tokens" in capsys.readouterr().err


def test_shared_prompts_are_reported_and_can_be_dropped(tmp_path, capsys):
    rows = [{"prompt": f"{n}?", "ground_truth": n} for n in range(5)]
    changed = [{"prompt": "3?", "ground_truth": 33}, {"prompt": "9?", "ground_truth": 9}]
    train, val = write_jsonl(tmp_path / "t.jsonl", rows), write_jsonl(tmp_path / "v.jsonl", changed)
    kept, _ = prepare(tmp_path, "jsonl", train, val)
    assert len(kept) == 5 and "1 training prompts are in validation too" in capsys.readouterr().err
    kept, asked = prepare(tmp_path, "jsonl", train, val, "--drop_shared")
    assert [row["ground_truth"] for row in kept] == ["0", "1", "2", "4"] and len(asked) == 2


def test_a_held_out_part_is_disjoint_and_fixed_by_its_seed(tmp_path):
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": f"{n}?", "ground_truth": n} for n in range(50)])
    splits = [prepare(tmp_path, "jsonl", source, None, "--val_size", "10", "--seed", seed) for seed in "112"]
    assert splits[0] == splits[1] != splits[2]
    answers = [row["ground_truth"] for part in splits[0] for row in part]
    assert sorted(map(int, answers)) == list(range(50)) and len(splits[0][1]) == 10


def test_unusable_answers_are_dropped_by_flag_and_counted(tmp_path, capsys):
    rows = [{"prompt": f"{n}?", "ground_truth": "n/a" if n == 2 else n} for n in range(5)]
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError, match="a.jsonl, line 3: .*not an integer.*--unusable drop"):
        prepare(tmp_path, "jsonl", source, None, "--val_size", "1")
    train, val = prepare(tmp_path, "jsonl", source, None, "--val_size", "1", "--unusable", "drop")
    assert len(train) + len(val) == 4 and "dropped 1 rows" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, message",
    [
        (["arithmetic"], "--train: arithmetic has no default source"),
        (["arithmetic", "--train", "absent.jsonl", "--val", "absent.jsonl"], "absent.jsonl: no such file"),
        (["gsm8k", "--train", "{rows}", "--val", "{rows}"], "no column 'question'"),
        (["jsonl", "--train", "{rows}", "--val", "{rows}", "--val_size", "1"], "give one of them"),
        (["jsonl", "--train", "{rows}", "--val_size", "2"], "has 2 rows"),
        (["jsonl", "--train", "{rows}", "--val", "{rows}", "--drop_shared"], "no rows are left for train"),
        (["jsonl", "--train", "{rows}", "--val_size", "1", "--model", "{tmp}"], "tokenizer|config"),
        (["jsonl", "--train", "{rows}", "--val_size", "1", "--out_dir", "{rows}/x"], "cannot write"),
        (["jsonl", "--train", "{rows}", "--val_size", "0"], "must be at least 1"),
        (["poetry"], "'poetry' is unknown; choose from arithmetic, gsm8k, jsonl, math"),
        (["mine.jsonl"], "first what the file holds, then the file: jsonl --train mine.jsonl --val_size"),
        (["jsonl", "--train", "{rows}"], "--val: jsonl has no default source; .*--val_size N"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, flags, message):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": f"{n}?", "ground_truth": n} for n in range(2)])
    flags = [flag.format(rows=rows, tmp=tmp_path) for flag in flags]
    if "--out_dir" not in flags:
        flags += ["--out_dir", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert re.search(message, done.stderr.splitlines()[-1])
    assert not (tmp_path / "out").exists()
