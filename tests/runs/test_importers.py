"""Rollouts that VERL, TRL and vLLM wrote: real files, what they lack, and files that are wrong."""

import json
from types import SimpleNamespace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from rollouts_runs import written
from scripts import ROOT, call, one_line_error, read

from data.make_arithmetic import make_problems, write_jsonl
from Gradient_evaluation import run_tracecov
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.models import load_tokenizer
from Gradient_evaluation.runs.inputs.dataset import load_dataset_rows
from Gradient_evaluation.runs.inputs.rollouts import read_rollouts
from Gradient_evaluation.runs.inputs.rollouts.trl import total
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.utils import format_prompt, integer_reward

MODEL, CASES = ROOT / "data" / "tiny_model", ROOT / "tests" / "cases"
TRL_IDS = read(CASES / "trl" / "token_ids.json")
LAW = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 8, "stop": (), "chat_template_kwargs": {}}


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(MODEL), None)


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    """The data set that VERL trained on for the file in tests/cases/verl."""
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    write_jsonl(make_problems(40, seed=7), path)
    return path


def settings(**flags):
    model = {"model": str(MODEL), "revision": "main", "trust_remote_code": False, "allow_mismatch": False}
    return SimpleNamespace(**{**model, **LAW, "reward_weights": None, **flags})


def imported(tokenizer, *paths, problems=None, **flags):
    rows = None if problems is None else load_dataset_rows(str(problems), "train")
    return read_rollouts([str(path) for path in paths], tokenizer, rows, settings(**flags))


def tokens_of(several):
    return [list(each.tokens) for rollouts in several for each in rollouts.continuations]


def refused(tokenizer, path, *parts, **more):
    with pytest.raises(UserError) as error:
        imported(tokenizer, path, **more)
    assert all(part in str(error.value) for part in parts), error.value


def measured(paths, out, *more, capsys):
    law = "--top_p 1 --max_new_tokens 8 --K_list 2 4 --skip_plot --device cpu --dtype float32".split()
    return call(run_tracecov, "--model", MODEL, "--rollouts", *paths, "--save_json", out, *law, *more, capsys=capsys)


# ------------------------------------------------------------------------------------------------ VERL


def test_a_real_dump_of_verl(tokenizer, problems, capsys):
    found = imported(tokenizer, CASES / "verl" / "1.jsonl", problems=problems)
    assert [len(rollouts.continuations) for rollouts in found] == [8] * 8
    lines = [json.loads(line) for line in (CASES / "verl" / "1.jsonl").read_text().splitlines()]
    position = 0
    for rollouts in found:
        assert rollouts.from_text and rollouts.prompt_ids is None and rollouts.law == {} and set(rollouts.step) == {1}
        for each, reward in zip(rollouts.continuations, rollouts.rewards):
            line, position = lines[position], position + 1
            assert each.text == line["output"] and each.log_probs is None
            assert reward == line["score"] == integer_reward(each.text, rollouts.row.ground_truth)
            assert str(rollouts.row.ground_truth) == line["gts"]
            assert each.ended == (len(each.tokens) < 8 or each.tokens[-1] == 2)
            assert each.ended == (each.tokens[-1] == tokenizer.eos_token_id)
    (note,) = capsys.readouterr().err.splitlines()
    assert "lost are the model's own cut into tokens, special tokens, the end of sequence, log-probs" in note
    assert "64 of 64 texts come back" in note and "11 reach --max_new_tokens 8" in note


def test_verl_measured(problems, tmp_path, capsys):
    dump = [CASES / "verl" / "1.jsonl"]
    code, out, err = measured(dump, tmp_path / "right", "--dataset", problems, capsys=capsys)
    assert code == 0, err
    results = read(tmp_path / "right" / "tracecov_tiny_model.json")
    check = results["rollouts_check"]
    assert results["n_prompts"] == 8 and results["checks"]["retokenised"] == 1.0
    assert abs(check["surprise"]) < 3 * check["surprise_standard_error"] and check["tokens"] == 288
    assert "without the sampler's log-probs" in out
    wrong = measured(dump, tmp_path / "top_p", "--dataset", problems, "--top_p", 0.95, capsys=capsys)
    one_line_error((wrong[0], wrong[1], wrong[2].splitlines(True)[-1]), "cannot come from", "--top_p 0.95", "VERL and TRL")
    wrong = measured(dump, tmp_path / "hot", "--dataset", problems, "--temperature", 3, capsys=capsys)  # half characters
    one_line_error((wrong[0], wrong[1], wrong[2].splitlines(True)[-1]), "come back as the tokens they were, 90% are needed")
    wrong = measured(dump, tmp_path / "limit", "--dataset", problems, "--max_new_tokens", 32, capsys=capsys)
    one_line_error((wrong[0], wrong[1], wrong[2].splitlines(True)[-1]), "end where --model goes on", "has 8 tokens")


def verl_line(**changes):
    line = json.loads((CASES / "verl" / "1.jsonl").read_text().splitlines()[0])
    return {name: value for name, value in {**line, **changes}.items() if value is not ...}


@pytest.mark.parametrize(
    "rows, parts",
    [
        ([verl_line(input="user\nWhat?\nassistant\n")], ["no prompt of --dataset is 'user", "--chat_template_kwargs"]),
        ([verl_line(output="123456789")], ["has 9 tokens, --max_new_tokens is 8", "data.max_response_length"]),
        ([verl_line(output=7)], ["its response is of type int, not text"]),
        ([verl_line(output="a\u0301")], ["does not come back", "1 of 1", "token ids"]),  # NFC makes one letter of two
        ([verl_line(output="4\ufffd")], ["does not come back"]),  # a character that was cut in two
        ([verl_line(score="right")], ["its score is 'right', not a number"]),
        ([verl_line(), verl_line(step=2)], ["line 2: of training step 2", "line 1 of 1", "after step s-1"]),
        ([verl_line(step="1")], ["its step is '1', not an integer"]),
        ([verl_line(uid="a_0_1")], ["is output 1 of a session of several turns"]),
        ([verl_line(), {"prompt": "x", "response_ids": [1], "ended": True}], ["'score'"]),
    ],
)
def test_a_wrong_dump_of_verl_is_one_line(rows, parts, tokenizer, problems, tmp_path):
    if "response_ids" in rows[-1]:
        other = written(rows[1:], tmp_path / "b.jsonl")
        with pytest.raises(UserError, match="give files of one format"):
            imported(tokenizer, written(rows[:1], tmp_path / "a.jsonl"), other, problems=problems)
        return
    refused(tokenizer, written(rows, tmp_path / "dump.jsonl"), "dump.jsonl, line", *parts, problems=problems)


def test_verl_needs_the_data_set_and_no_stop(tokenizer, problems, tmp_path):
    path = written([verl_line()], tmp_path / "dump.jsonl")
    refused(tokenizer, path, "give --dataset")
    refused(tokenizer, path, "--stop: ", "leave it out", problems=problems, stop=("\n",))
    assert len(imported(tokenizer, CASES / "verl", problems=problems, allow_mismatch=True)) > 8  # steps 1 and 2


def test_gts_say_which_of_two_rows_with_one_prompt(tokenizer, tmp_path):
    prompt, line = [{"role": "user", "content": "Reply with one integer.\n4 - 2 - 18 ="}], verl_line()
    rows = [{"prompt": prompt, "ground_truth": truth} for truth in (5, -16)]
    (found,) = imported(tokenizer, written([line], tmp_path / "a.jsonl"), problems=written(rows, tmp_path / "d.jsonl"))
    assert found.row.ground_truth == -16
    both = written([verl_line(gts=None)], tmp_path / "b.jsonl")
    refused(tokenizer, both, "is that of 2 rows of --dataset", problems=tmp_path / "d.jsonl")


def test_tools_are_not_told_from_the_model_in_text(tokenizer, tmp_path, monkeypatch):
    prompt = [{"role": "user", "content": "Reply with one integer.\n4 - 2 - 18 ="}]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    template = "{% if tools %}{% endif %}" + tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", template)
    data = written([{"prompt": prompt, "ground_truth": -16, "tools": tools}], tmp_path / "d.jsonl")
    refused(tokenizer, written([verl_line()], tmp_path / "a.jsonl"), "its prompt has tools", "dump token ids", problems=data)


# ------------------------------------------------------------------------------------------------ TRL


@pytest.mark.parametrize("name", list(TRL_IDS))
def test_the_tokens_of_a_real_run_of_trl(name, tokenizer):
    """TRL stored the text alone; the trainer's own completion_ids were written down beside it."""
    found = imported(tokenizer, CASES / "trl" / f"{name}.parquet")
    assert tokens_of(found) == TRL_IDS[name] and [len(each.continuations) for each in found] == [8, 8]
    assert all(each.from_text and each.row.ground_truth is None for each in found)


def test_ground_truths_of_trl_come_from_the_data_set(tokenizer, tmp_path):
    data = tmp_path / "d.jsonl"
    write_jsonl(make_problems(8, seed=3), data)
    found = imported(tokenizer, CASES / "trl" / "messages_00001.parquet", problems=data, reward_weights=(1.0, 0.2))
    for rollouts in found:
        right = [integer_reward(each.text, rollouts.row.ground_truth) for each in rollouts.continuations]
        np.testing.assert_array_equal(rollouts.components["right"], right)
        np.testing.assert_allclose(rollouts.rewards, right + 0.2 * rollouts.components["short"])


def test_the_total_is_that_of_trl():
    components = {"a": [1.0, np.nan, np.nan], "b": [2.0, 3.0, np.nan]}
    np.testing.assert_array_equal(total(components, {"a": 1.0, "b": 0.5}), [2.0, 1.5, np.nan])


def test_weights_that_the_advantages_deny(tokenizer, capsys):
    path = CASES / "trl" / "messages_00001.parquet"
    imported(tokenizer, path, reward_weights=(1.0, 0.2))  # as the training had them
    assert "warning" not in capsys.readouterr().err
    imported(tokenizer, path)
    assert "warning: TRL's advantages do not follow from the reward 1 right + 1 short on 1 of 2" in capsys.readouterr().err


def trl_file(path, **changes):
    columns = {**pyarrow.parquet.read_table(CASES / "trl" / "messages_00001.parquet").to_pydict(), **changes}
    pyarrow.parquet.write_table(pyarrow.table({name: value for name, value in columns.items() if value is not ...}), path)
    return path


SAID = [{"role": "assistant", "content": "48"}]


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"right": ..., "short": ...}, ["row 1: has no column of a reward"]),
        ({"completion": [[*SAID, {"role": "tool", "content": "5"}]] * 16}, ["row 1: its completion has 2 messages"]),
        ({"completion": [[{**SAID[0], "reasoning_content": "so"}]] * 16}, ["was parsed into reasoning_content"]),
        ({"completion": ["a\u0301"] * 16}, ["row 1: this response does not come back", "16 of 16"]),
        ({"completion": ["123456789"] * 16}, ["row 1: its response has 9 tokens", "max_completion_length"]),
        ({"prompt": [""] * 16}, ["row 1: the prompt is empty"]),
        ({"step": [1] * 15 + [2]}, ["row 16: of training step 2", "row 1 of 1"]),
        ({"advantage": ["x"] * 16}, ["row 1: its advantage is 'x', not a number"]),
    ],
)
def test_a_wrong_file_of_trl_is_one_line(changes, parts, tokenizer, tmp_path):
    refused(tokenizer, trl_file(tmp_path / "completions.parquet", **changes), "completions.parquet", *parts)


def test_reward_weights_for_other_columns(tokenizer):
    refused(tokenizer, CASES / "trl" / "messages_00001.parquet", "1 of them", "right, short", reward_weights=(1.0,))


def test_trl_measured(tmp_path, capsys):
    """At the temperature that sampled: the surprise is 0 within its standard error."""
    code, out, err = measured([CASES / "trl" / "messages_00001.parquet"], tmp_path, "--temperature", 1.5, capsys=capsys)
    assert code == 0, err
    check = read(tmp_path / "tracecov_tiny_model.json")["rollouts_check"]
    assert abs(check["surprise"]) < 3 * check["surprise_standard_error"]
    lengths = {len(tokens) for record in gram_store.load_all(tmp_path / "grams") for tokens in [record.lengths]}
    assert lengths == {8}


# ------------------------------------------------------------------------------------------------ vLLM


def vllm_row(prompt_ids, *outputs, **more):
    return {"request_id": "0", "prompt": None, "prompt_token_ids": prompt_ids, "outputs": list(outputs), **more}


def vllm_output(tokens=(22, 26, 2), text="48", reason="stop", stop=None, **more):
    logprobs = [{str(token): {"logprob": -0.5, "rank": 1, "decoded_token": "x"}} for token in tokens]
    output = {"index": 0, "text": text, "token_ids": list(tokens), "logprobs": logprobs, "finish_reason": reason}
    return {**output, "stop_reason": stop, **more}


@pytest.fixture(scope="module")
def prompt_ids(tokenizer):
    return format_prompt(tokenizer, [{"role": "user", "content": "Reply with one integer.\n4 - 2 - 18 ="}])


def test_outputs_of_vllm(tokenizer, prompt_ids, problems, tmp_path):
    cut = vllm_output((54, 74, 71, 223, 67, 80, 85, 89), "The answ", "length")
    row = vllm_row(prompt_ids, vllm_output(), cut, vllm_output(logprobs=[-1.0, -2.0, -3.0]), vllm_output(logprobs=None))
    path = written([row], tmp_path / "outputs.jsonl")
    (found,) = imported(tokenizer, path, problems=problems)
    assert found.row.ground_truth == -16 and found.prompt_ids == tuple(prompt_ids) and not found.from_text
    first, second, third, fourth = found.continuations
    assert first.tokens == (22, 26, 2) and first.ended and first.text == "48" and list(first.log_probs) == [-0.5] * 3
    assert len(second.tokens) == 8 and not second.ended and second.text == "The answ"
    assert list(third.log_probs) == [-1.0, -2.0, -3.0] and fourth.log_probs is None
    (alone,) = imported(tokenizer, path)  # without a data set the prompt is what the ids decode to
    assert alone.row.prompt == tokenizer.decode(prompt_ids) and alone.row.ground_truth is None


def test_stop_strings_of_vllm_end_as_ours_do(tokenizer, prompt_ids, tmp_path):
    output = vllm_output((31, 223, 26, 2), "= ", "stop", "8")
    late = vllm_output((31, 223, 26, 24, 2), "= 86", "stop", None)  # vLLM was given no stop string, we are
    path = written([vllm_row(prompt_ids, {**output, "token_ids": [31, 223, 26], "logprobs": None}, late)], tmp_path / "o.jsonl")
    (found,) = imported(tokenizer, path, stop=("8",))
    for each in found.continuations:
        assert each.tokens == (31, 223, 26) and not each.ended and each.text == "= "
    assert found.continuations[1].log_probs.shape == (3,)
    refused(tokenizer, path, "ended at the stop string '8', which is none of --stop")


@pytest.mark.parametrize(
    "output, parts",
    [
        (vllm_output((22, 26), reason="length"), ["cut off after 2 tokens, --max_new_tokens is 8", "max_tokens"]),
        (vllm_output((22,) * 9), ["has 9 tokens, --max_new_tokens is 8"]),
        (vllm_output(reason="abort"), ["its finish_reason is 'abort'"]),
        (vllm_output(reason=None), ["its finish_reason is None"]),
        (vllm_output((22, 26), "48"), ["stopped at token 26, which is no end of sequence"]),
        (vllm_output(text="seven"), ["its text is not what the tokenizer of --model makes of its token_ids", "1 of 1"]),
        (vllm_output(logprobs=[-1.0]), ["1 logprobs for 3 token_ids"]),
        (vllm_output(logprobs=[{"5": {"logprob": -1.0}}] * 3), ["no finite logprob of token 22"]),
        (vllm_output(logprobs=[-1.0, float("-inf"), -1.0]), ["no finite logprob of token 26"]),
        (vllm_output(token_ids=[]), ["has no token_ids"]),
        (vllm_output(token_ids=[22.0, 26.0, 2.0]), ["its token_ids is [22.0"]),
        (vllm_output((9999, 2), text=""), ["token 9999", "the model knows 259"]),
    ],
)
def test_a_wrong_output_of_vllm_is_one_line(output, parts, tokenizer, prompt_ids, tmp_path):
    path = written([vllm_row(prompt_ids, output)], tmp_path / "outputs.jsonl")
    refused(tokenizer, path, "outputs.jsonl, line 1", *parts)


def test_a_prompt_of_vllm_that_is_another(tokenizer, prompt_ids, problems, tmp_path):
    path = written([vllm_row([5, 6, 7], vllm_output())], tmp_path / "a.jsonl")
    refused(tokenizer, path, "no prompt of --dataset is this one", problems=problems)
    path = written([vllm_row(None, vllm_output())], tmp_path / "b.jsonl")
    refused(tokenizer, path, "has neither a prompt nor prompt_token_ids")
    rows = [vllm_row([5, 6, 7], vllm_output(), prompt="x"), vllm_row([5, 6], vllm_output(), prompt="x")]
    refused(tokenizer, written(rows, tmp_path / "c.jsonl"), "line 2: other prompt_token_ids than")
    path = written([vllm_row(prompt_ids, vllm_output())], tmp_path / "d.jsonl")
    refused(
        tokenizer, path, "no prompt of --dataset", problems=written([{"prompt": "2", "ground_truth": 1}], tmp_path / "e.jsonl")
    )
