"""A person's own reward function in training is the very function of the evaluation, and sees what it sees there."""

import json
import re

import numpy as np
import pytest
from launches import checkpoint, dry_run, needs_verl, prepare, values, write_jsonl

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.rewards.own_reward import resolve_reward
from Gradient_evaluation.runs.inputs.dataset import load_dataset_rows
from Policy_Optimization import launch, run_folder
from Policy_Optimization.overrides import training_law, verl_overrides
from Policy_Optimization.reward_fn import compute_score
from Policy_Optimization.settings import read_settings

# each leaves what it was given in a file beside its own
WITNESS = """
import json, pathlib

def told(**given):
    with open(pathlib.Path(__file__).with_name("told.jsonl"), "a") as file:
        file.write(json.dumps(given, sort_keys=True) + "\\n")

def ours(text, ground_truth, level, tests, prompt, missing="not there"):
    told(text=text, ground_truth=ground_truth, level=level, tests=tests, prompt=prompt, missing=missing)
    return len(text) + 0.5

def verls(data_source, solution_str, ground_truth, extra_info=None):
    seen = {name: extra_info.get(name, "not there") for name in ("level", "tests", "missing")}
    told(text=solution_str, ground_truth=ground_truth, seen=seen)
    return {"score": len(solution_str) + 0.5, "style": 1.0}

def trls(completions, prompts, level, ground_truth, **columns):
    told(completions=completions, prompts=prompts, level=level, ground_truth=ground_truth, tests=columns["tests"])
    return [len(each[0]["content"]) + 0.5 for each in completions]

def graded(text, ground_truth):
    return -0.25 if "?" in text else 0.75

def form(completions, **_):
    return [None if "skip" in each[0]["content"] else 1.0 for each in completions]

def right(text, ground_truth):
    return float(text.endswith(str(ground_truth)))
right.zero_one = True

def broken(text, ground_truth):
    return 1 / 0

def needs(text, ground_truth, answer_key):
    return 0.0
"""
ROWS = [
    {"prompt": [{"role": "user", "content": "1 + 1 ="}], "ground_truth": 2, "level": 3, "tests": {"in": [1], "out": [[2]]}},
    {"prompt": [{"role": "user", "content": "One?"}], "ground_truth": "one", "level": "hard", "tests": None, "missing": 1.5},
    {"prompt": [{"role": "user", "content": "[]?"}], "ground_truth": [1, [2, None]], "level": True, "tests": []},
]


@pytest.fixture
def own(tmp_path):
    """(file of functions, JSONL data set with columns of mixed types)."""
    (tmp_path / "my rewards").mkdir()
    file = tmp_path / "my rewards" / "format.py"
    file.write_text(WITNESS)
    return file, write_jsonl(tmp_path / "a.jsonl", ROWS)


def told(file):
    """What the functions were given since the last call."""
    witness = file.with_name("told.jsonl")
    found = [json.loads(line) for line in witness.read_text().splitlines()]
    witness.unlink()
    return found


def in_evaluation(name, source):
    return [
        reward for row in load_dataset_rows(str(source), "train") for reward in resolve_reward(name).of_prompt(["= 2"], row)
    ]


def as_verl_calls(row, **kwargs):
    """As the reward manager of VERL 0.9.1 does, with what it adds to extra_info."""
    extra = {**row["extra_info"], "num_turns": np.int32(2), "rollout_reward_scores": {}, "turn_scores": []}
    return compute_score(
        data_source=row["data_source"],
        solution_str="= 2",
        ground_truth=row["reward_model"]["ground_truth"],
        extra_info=extra,
        reward_router_address=None,
        **kwargs,
    )


@pytest.mark.parametrize("function", ["ours", "verls", "trls"])
@pytest.mark.parametrize("named_by", ["the data", "the launcher"])
def test_it_sees_in_training_what_it_sees_in_the_evaluation(own, tmp_path, function, named_by):
    file, source = own
    name = f"{file}:{function}"
    train, _ = prepare(tmp_path, "jsonl", source, source, "--reward", name)
    wanted = in_evaluation(name, source)
    seen = told(file)
    keyword = {"reward": name} if named_by == "the launcher" else {}
    assert [as_verl_calls(row, **keyword)["score"] for row in train] == wanted == [3.5] * 3
    assert told(file) == seen
    assert in_evaluation(name, tmp_path / "out" / "train.parquet") == wanted  # the evaluation reads VERL's file too
    assert told(file) == seen


def test_verl_and_the_launcher_call_the_same_function(own, tmp_path):
    needs_verl()
    from omegaconf import OmegaConf
    from verl.trainer.ppo.reward import get_custom_reward_fn

    file, source = own
    train, _ = prepare(tmp_path, "jsonl", source, source, "--reward", f"{file}:ours")
    flags = ["--reward", f"{file}:graded", f"{file}:form", "integer", "--reward_weights", "1", "0.2", "2"]
    made = verl_overrides(read_settings(flags, {}))
    from Policy_Optimization.verl_config import compose

    custom = compose([text for text in made if "custom_reward_function" in text]).reward
    score = get_custom_reward_fn(OmegaConf.create({"reward": custom}))
    given = dict(data_source="custom", ground_truth="2", extra_info=train[0]["extra_info"])
    assert score(solution_str="so 2", **given) == {
        "score": pytest.approx(0.75 + 0.2 + 2),
        "format.py:graded": 0.75,
        "format.py:form": 1.0,
        "integer": 1.0,
        "acc": 1.0,  # of the first reward that is 0 or 1
        "pred": "2",
    }
    skipped = score(solution_str="skip? 3", **given)
    assert skipped["score"] == -0.25 and skipped["format.py:form"] is None and skipped["acc"] == 0.0


def test_several_rewards_of_the_data_are_added_with_weights(own, tmp_path):
    file, source = own
    rewards = ["--reward", f"{file}:graded", f"{file}:right", "--reward_weights", "2", "-1"]
    train, _ = prepare(tmp_path, "jsonl", source, source, *rewards)
    result = as_verl_calls(train[0])
    assert result == {"score": 2 * 0.75 - 1, "format.py:graded": 0.75, "format.py:right": 1.0, "acc": 1.0}
    assert as_verl_calls(train[0], reward="integer", reward_weights=[3]) == {"score": 3.0, "acc": 1.0, "pred": "2"}
    assert as_verl_calls(train[0], reward="integer") == {"score": 1.0, "acc": 1.0, "pred": "2"}


def test_gsm8k_and_math_keep_their_answers(own, tmp_path):
    file, _ = own
    gsm8k = write_jsonl(tmp_path / "g.jsonl", [{"question": f"{n}?", "answer": f"so\n#### {n}"} for n in (1, 2)])
    train, _ = prepare(tmp_path, "gsm8k", gsm8k, gsm8k, "--reward", f"{file}:graded")
    assert train[0]["reward_model"]["ground_truth"] == "1"
    assert json.loads(train[0]["extra_info"]["columns"]) == {"prompt": train[0]["prompt"]}
    rows = [{"problem": f"{n}?", "solution": rf"\boxed{{{n}}}", "level": "Level 5"} for n in (1, 2)]
    math = write_jsonl(tmp_path / "m.jsonl", rows)
    train, _ = prepare(tmp_path, "math", math, math, "--reward", f"{file}:graded")
    assert train[0]["reward_model"]["ground_truth"] == "1"
    assert json.loads(train[0]["extra_info"]["columns"])["level"] == "Level 5"


def test_a_graded_reward_has_no_accuracy(own, tmp_path):
    file, source = own
    train, _ = prepare(tmp_path, "jsonl", source, source, "--reward", f"{file}:graded")
    assert as_verl_calls(train[0]) == {"score": 0.75}


def test_a_continuation_without_a_reward_is_left_out(own, tmp_path):
    """VERL 0.9.1 trains on the others of a group where one raises; a score of None would end the training."""
    file, source = own
    train, _ = prepare(tmp_path, "jsonl", source, source, "--reward", f"{file}:form")
    row = train[1]
    with pytest.raises(UserError, match="train, row 2: a continuation is left out of training, as its reward is None"):
        compute_score("custom", "skip", row["ground_truth"], row["extra_info"])


def test_a_file_changed_since_the_launch_is_refused(own, tmp_path):
    file, source = own
    train, _ = prepare(tmp_path, "jsonl", source, source, "--reward", f"{file}:graded")
    other = tmp_path / "other.py"
    other.write_text(WITNESS)
    made = values(verl_overrides(read_settings(["--reward", f"{other}:graded"], {})))
    digest = json.loads(made["reward.custom_reward_function.reward_kwargs.reward_digests"])
    assert as_verl_calls(train[0], reward=f"{other}:graded", reward_digests=digest) == {"score": 0.75}
    with pytest.raises(UserError, match="other.py:graded: its file is not the one that the launcher checked"):
        as_verl_calls(train[0], reward=f"{other}:graded", reward_digests=["0" * 16])


def test_a_prompt_that_verl_does_not_pass_on_is_refused(own):
    file, _ = own
    with pytest.raises(UserError, match="format.py:trls is told the prompt, .*prepare_parquet.py --reward"):
        compute_score("custom", "2", "2", {"level": 1, "tests": 1}, reward=f"{file}:trls")
    foreign = {"level": 1, "tests": 1, "index": 4, "split": "test"}  # a file of another program: its fields are the columns
    assert compute_score("custom", "2", "2", foreign, reward=f"{file}:verls") == {"score": 1.5}


def test_workers_find_a_reward_of_a_module(tmp_path, monkeypatch):
    (tmp_path / "project" / "mine").mkdir(parents=True)
    (tmp_path / "project" / "mine" / "style.py").write_text("def f(text, ground_truth):\n    return 0.5\n")
    monkeypatch.chdir(tmp_path / "project")
    settings = read_settings(["--reward", "integer", "mine.style:f"], {})
    path = launch.module_path(settings.reward, {"PYTHONPATH": "/else"})["PYTHONPATH"]
    assert path == f"{tmp_path}/project:/else" and launch.module_path(("integer", "/a b/f.py:g"), {}) == {}
    digests = [text for text in verl_overrides(settings) if "reward_digests" in text]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", path)
    result = compute_score("custom", "2", "2", {"index": 0}, settings.reward)
    assert result["score"] == 1.5 and result["mine.style:f"] == 0.5 and digests


def test_the_sampling_law_names_rewards_as_results_do(own, monkeypatch):
    file, _ = own
    digest = resolve_reward(f"{file}:graded").digest
    one = training_law({"REWARD": f"'{file}:graded'"}, [])
    assert (one["reward"], one["reward_digest"], one["reward_weights"]) == ("format.py:graded", digest, None)
    two = training_law({"REWARD": f"integer '{file}:graded'", "REWARD_WEIGHTS": "1 0.5"}, [])
    assert two["reward"] == ["integer", "format.py:graded"] and two["reward_digest"] == [None, digest]
    assert two["reward_weights"] == [1.0, 0.5]
    assert training_law({"REWARD": "math"}, [])["reward"] == "math" and "reward_digest" not in training_law({}, [])


# refusals


@pytest.mark.parametrize(
    "rewards, message",
    [
        (["absent.py:f"], "there is no file"),
        (["{file}:absent"], "has no absent"),
        (["{file}:needs"], "a.jsonl, line 1: .*takes answer_key, and the row has no such column"),
        (["integer"], "a.jsonl, line 2: .*not an integer"),
    ],
)
def test_a_reward_that_cannot_judge_a_row_is_refused(own, tmp_path, rewards, message):
    file, source = own
    with pytest.raises(UserError, match=message):
        prepare(tmp_path, "jsonl", source, source, "--reward", *(name.format(file=file) for name in rewards))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--reward", "style"], "--reward: invalid choice: 'style' .*path/file.py:function"),
        (["--reward", "integer", "math", "--reward_weights", "1"], "--reward_weights: 1 weights for 2 "),
        (["--reward_weights", "1"], "--reward_weights: 1 weights for 0 "),
        (["--reward", "math", "--reward_weights", "0"], "--reward_weights: all are 0"),
        (["--reward", "math", "--reward_weights", "nan"], "--reward_weights: .*nan"),
        (["--reward", "math", "--reward_timeout", "0"], "--reward_timeout"),
    ],
)
def test_a_wrong_reward_flag_is_refused_by_name(flags, message, capsys):
    with pytest.raises((UserError, SystemExit)) as stopped:
        read_settings(flags, {})
    assert re.search(message, f"{stopped.value} {capsys.readouterr().err}")


def test_a_dry_run_scores_a_row(inputs, own, tmp_path, capsys):
    needs_verl()
    file, _ = own
    dry_run(inputs, "--reward", f"{file}:graded", f"{file}:right", "--reward_weights", "1", "0.2")
    assert "all checks passed" in (shown := capsys.readouterr().out) and f"{file}:graded {file}:right  (flag)" in shown
    with pytest.raises(UserError, match="row 1: .*format.py:broken raised ZeroDivisionError.*format.py, line"):
        dry_run(inputs, reward=f"{file}:broken")
    with pytest.raises(UserError, match="row 1: .*format.py:trls takes level, and the row has no such column"):
        dry_run(inputs, reward=f"{file}:trls")
    with pytest.raises(UserError, match="there is no file"):
        dry_run(inputs, reward=f"{file}x.py:graded")


def test_training_is_not_continued_with_a_changed_function(own, tmp_path):
    file, _ = own

    def overrides():
        return verl_overrides(read_settings(["--reward", f"{file}:graded"], {}))

    run_folder.start_attempt(tmp_path / "run", {}, overrides())
    checkpoint(tmp_path / "run", 5)
    run = run_folder.read_run(tmp_path / "run")
    run_folder.check_same_run(tmp_path / "run", run, overrides(), False)
    file.write_text(WITNESS + "\n")
    with pytest.raises(UserError, match="reward_digests was .*--allow_changes"):
        run_folder.check_same_run(tmp_path / "run", run, overrides(), False)


def test_a_data_set_of_an_earlier_version_still_trains(tmp_path):
    """Its extra_info has no columns; a function that takes none of them judges it."""
    file = tmp_path / "f.py"
    file.write_text("def f(text, ground_truth):\n    return 1.0 if ground_truth in text else -1.0\n")
    old = {"split": "train", "index": 0, "reward": "integer"}
    assert compute_score("custom", "1", "1", old, f"{file}:f") == {"score": 1.0}
