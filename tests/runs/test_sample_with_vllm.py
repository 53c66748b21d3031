"""sample_with_vllm.py against a stand-in with vLLM's interface, which samples with our own sampler."""

import json
import os
import signal
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from rollouts_runs import rows_in, written
from scripts import ROOT, call, one_line_error, read

from data.make_arithmetic import make_problems, write_jsonl
from Gradient_evaluation import run_tracecov, sample_with_vllm
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.models import checkpoint_eos, load_model, load_tokenizer
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.sampling.generate import eos_token_ids
from Gradient_evaluation.sampling.law import SamplingLaw
from Gradient_evaluation.sampling.log_probs import log_probs
from Gradient_evaluation.utils import format_prompt

MODEL, STAND_IN = ROOT / "data" / "tiny_model", ROOT / "tests" / "vllm_stand_in"
LAW = "--temperature 1.3 --top_p 0.9 --top_k 40 --max_new_tokens 6 --stop 9 <|im_start|>".split()
N = 12


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    write_jsonl(make_problems(5, seed=2), path)
    return path


@pytest.fixture
def vllm(monkeypatch):
    """The stand-in, imported afresh."""
    monkeypatch.syspath_prepend(str(STAND_IN))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    import vllm

    vllm.LLM.calls.clear()
    yield vllm
    sys.modules.pop("vllm", None)


def flags(problems, out, *more):
    data = ("--dataset", problems, "--save_rollouts", out, "--n", N, "--prompts_at_once", 2)
    return ["--model", MODEL, *data, *LAW, "--dtype", "float32", *more]


def sample(problems, out, *more, capsys=None):
    return call(sample_with_vllm, *flags(problems, out, *more), capsys=capsys)


def measure(rollouts, out, *more, capsys=None):
    made = ("--rollouts", rollouts, "--save_json", out, "--K_list", 2, 4, "--skip_plot")
    return call(run_tracecov, "--model", MODEL, *made, *LAW, *"--dtype float32 --device cpu".split(), *more, capsys=capsys)


def test_vllm_is_asked_for_the_law_of_the_flags_alone(vllm, problems, tmp_path):
    assert sample(problems, tmp_path, "--tensor_parallel_size", 2, "--max_model_len", 200)[0] == 0
    (_, engine), *generated = vllm.LLM.calls
    wanted = {"tensor_parallel_size": 2, "max_model_len": 200, "gpu_memory_utilization": 0.9, "dtype": "float32"}
    assert engine | wanted == engine
    assert engine["generation_config"] == "vllm" and engine["logprobs_mode"] == "processed_logprobs"
    assert [len(prompts) for _, prompts, _ in generated] == [2, 2, 1]  # many prompts at once
    params = [each for _, _, several in generated for each in several]
    for each in params:
        assert (each.temperature, each.top_p, each.top_k, each.max_tokens, each.n) == (1.3, 0.9, 40, 6, N)
        assert (each.min_p, each.presence_penalty, each.frequency_penalty, each.repetition_penalty) == (0, 0, 0, 1)
        assert each.stop == ["9"] and each.stop_token_ids == [1, 2] and each.logprobs == 0 and not each.ignore_eos
    assert len({each.seed for each in params}) == 5
    tokenizer = load_tokenizer(str(MODEL), None)
    asked = [prompt["prompt_token_ids"] for _, prompts, _ in generated for prompt in prompts]
    assert asked == [format_prompt(tokenizer, problem["prompt"]) for problem in make_problems(5, seed=2)]


def test_its_rollouts_are_measured_as_they_are(vllm, problems, tmp_path, capsys):
    """The Grams against ScoreGram on the same tokens, and sampler and scorer in agreement to rounding."""
    assert sample(problems, tmp_path / "rollouts")[0] == 0
    rows = rows_in(tmp_path / "rollouts")
    assert len(rows) == 5 * N and {row["reward"] for row in rows} == {None}
    code, out, err = measure(tmp_path / "rollouts", tmp_path, "--reward", "integer", capsys=capsys)
    assert code == 0 and "warning" not in err, err
    check = read(tmp_path / "tracecov_tiny_model.json")["rollouts_check"]
    assert check["largest_difference"] < 1e-4 and check["least_effective_sample_size"] > 0.999 and check["prompts"] == 5
    assert "log-probs of scorer and sampler differ by" in out and "effective sample size 1.000" in out
    model = load_model(str(MODEL), None, torch.device("cpu"), torch.float32)
    law = SamplingLaw(1.3, 0.9, 40, 6)
    for record in gram_store.load_all(tmp_path / "grams"):
        own = [row for row in rows if row["prompt_id"] == f"{record.prompt_id:016x}"]
        with ScoreGram(model, partial(log_probs, law=law)) as gram:
            block = gram.block(own[0]["prompt_ids"], [row["response_ids"] for row in own])
        np.testing.assert_allclose(np.diag(block.gram), np.concatenate([np.diag(g) for g in record.grams]), rtol=1e-5)
        np.testing.assert_allclose(block.log_probs, record.log_probs, rtol=1e-5, atol=1e-6)
        sampler = [sum(row["log_probs"]) for row in own]
        np.testing.assert_allclose(sampler, record.log_probs, atol=1e-5)


def test_ends_are_those_of_our_sampler(vllm, problems, tmp_path):
    assert sample(problems, tmp_path)[0] == 0
    ends = {"stop string": 0, "end of sequence": 0, "limit": 0}
    for row in rows_in(tmp_path):
        ids, text = row["response_ids"], row["text"]
        assert "9" not in text and len(row["log_probs"]) == len(ids) <= 6
        if row["ended"]:
            assert ids[-1] in (1, 2) and not {1, 2} & set(ids[:-1])
            ends["end of sequence"] += 1
        elif ids[-1] == 27:  # "9", whose text is left out
            ends["stop string"] += 1
        else:
            assert len(ids) == 6
            ends["limit"] += 1
    assert all(ends.values()), ends


def test_the_same_command_continues_after_a_kill(problems, tmp_path):
    """Killed in its second call of vLLM: the first two prompts stay as they are, the others are those of an undisturbed run."""
    script, path = ROOT / "Gradient_evaluation" / "sample_with_vllm.py", str(STAND_IN)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([path, str(ROOT)])}
    command = [sys.executable, str(script)]

    def start(out, **more):
        arguments = [str(each) for each in flags(problems, out)]
        return subprocess.run([*command, *arguments], env={**environment, **more}, capture_output=True, text=True)

    assert start(tmp_path / "whole").returncode == 0
    killed = start(tmp_path / "killed", VLLM_STAND_IN_FAILS_AT="3")
    assert killed.returncode == -signal.SIGKILL
    files = sorted((tmp_path / "killed").glob("*.parquet"))
    written_at = {file.name: file.stat().st_mtime_ns for file in files}
    assert len(files) == 2
    done = start(tmp_path / "killed")
    assert done.returncode == 0 and "5 prompts, 12 continuations each" in done.stdout, done.stderr
    for file in sorted((tmp_path / "whole").iterdir()):
        assert (tmp_path / "killed" / file.name).read_bytes() == file.read_bytes()
    assert all((tmp_path / "killed" / name).stat().st_mtime_ns == at for name, at in written_at.items())
    finished = start(tmp_path / "killed", VLLM_STAND_IN_FAILS_AT="0")  # no engine is asked
    assert finished.returncode == 0 and finished.stdout.startswith("finished before, nothing left to do"), finished.stderr


def test_a_folder_of_another_law_is_refused(vllm, problems, tmp_path, capsys):
    assert sample(problems, tmp_path)[0] == 0
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    one_line_error(sample(problems, tmp_path, "--top_p", 0.8, capsys=capsys), "run.json", "top_p = 0.9", "0.8")
    one_line_error(sample(problems, tmp_path, "--n", 3, capsys=capsys), "run.json", "continuations = 12", "3")
    one_line_error(sample(problems, tmp_path, "--seed", 3, capsys=capsys), "run.json", "seed = 0")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    assert sample(problems, tmp_path, "--top_p", 0.8, "--overwrite")[0] == 0
    assert read(tmp_path / "run.json")["top_p"] == 0.8
    assert all(json.loads(row["law"])["top_p"] == 0.8 for row in rows_in(tmp_path))


def test_what_it_cannot_do_is_one_line(vllm, problems, tmp_path, capsys):
    out = tmp_path / "new"
    one_line_error(sample(problems, out, "--max_model_len", 20, capsys=capsys), "line 1: the prompt has", "--max_model_len 20")
    wrong = sample(problems, out, "--max_model_len", 5000, capsys=capsys)
    one_line_error(wrong, "vLLM cannot load it", "greater than the derived max_model_len (1024)")
    assert not (out / "run.json").exists() and not list(out.glob("*.parquet"))
    one_line_error(sample(problems, out, "--dtype", "float64", capsys=capsys), "--dtype")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    written([{"base_model_name_or_path": str(MODEL)}], adapter / "adapter_config.json")
    one_line_error(sample(problems, out, "--model", adapter, capsys=capsys), "an adapter; merge it")


def test_without_vllm_it_is_one_line(problems, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as where it is not installed
    one_line_error(sample(problems, tmp_path, capsys=capsys), "has no package vllm; pip install vllm")
    assert not (tmp_path / "run.json").exists()


@pytest.mark.parametrize("named", [[2, 0], 2, None])
def test_ends_of_a_checkpoint_without_loading_it(named, tmp_path):
    model, tokenizer = load_model(str(MODEL), None, torch.device("cpu"), torch.float32), load_tokenizer(str(MODEL), None)
    model.generation_config.eos_token_id = named
    model.config.eos_token_id = 0
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for stored in (True, False):  # a checkpoint without a generation_config has that of its config
        loaded = load_model(str(tmp_path), None, torch.device("cpu"), torch.float32)
        assert checkpoint_eos(str(tmp_path), None, tokenizer) == eos_token_ids(loaded, tokenizer)
        (tmp_path / "generation_config.json").unlink(missing_ok=not stored)
