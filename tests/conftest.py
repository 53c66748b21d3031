"""Every test runs offline, from any working directory, and may use a small part of the machine."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg")
for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):  # a make that a test starts is not below the one that started the tests
    os.environ.pop(name, None)
# Models this small gain nothing from threads. Every process has the same setting: byte equality holds within one only.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def pytest_report_header():
    """What the numbers of a red run depend on."""
    import torch

    names = ("ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS", "MKL_CBWR")
    settings = " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    cpu = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return f"torch {torch.__version__}, {cpu}; {settings}"


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """A folder that a run of both scripts on the shipped tiny model has written: twelve prompts, K = 2, 4, 8."""
    from scripts import ROOT, call

    from data.make_arithmetic import make_problems, write_jsonl
    from Gradient_evaluation import calculate_oracle_v, run_tracecov

    folder = tmp_path_factory.mktemp("a small run")
    problems, table = folder / "problems.jsonl", folder / "oracle_v_n50_tiny_model.jsonl"
    write_jsonl(make_problems(12, seed=0), problems)
    shared = ("--model", ROOT / "data" / "tiny_model", *"--max_new_tokens 8 --device cpu --dtype float32".split())
    oracle = ("--dataset", problems, "--n_oracle", 50, "--out_dir", folder)
    tracecov = ("--oracle_table", table, *"--K_list 2 4 8 --M 4 --skip_plot".split(), "--save_json", folder)
    assert call(calculate_oracle_v, *shared, *oracle)[0] == call(run_tracecov, *shared, *tracecov)[0] == 0
    return folder


@pytest.fixture(scope="session")
def policy(tmp_path_factory):
    """A folder with a model over four tokens and its tokenizer; 13 outcomes of at most two tokens."""
    from tiny_models import enumerable_policy, tiny_tokenizer

    folder = tmp_path_factory.mktemp("policy") / "four tokens"
    enumerable_policy(vocabulary=4, seed=6).save_pretrained(folder)
    tiny_tokenizer(("<eos>", "1", "2", "3")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def problems(tmp_path_factory):
    from scripts import ANSWERS, PROMPTS

    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "ground_truth": a, "kind": "x"}) + "\n" for p, a in zip(PROMPTS, ANSWERS)))
    return path


@pytest.fixture(scope="session")
def table(policy, problems, tmp_path_factory):
    from scripts import oracle

    out = tmp_path_factory.mktemp("oracle")
    assert oracle(policy, problems, out)[0] == 0
    return out / "oracle_v_n400_four tokens.jsonl"


@pytest.fixture(scope="session")
def undisturbed(policy, table, tmp_path_factory):
    from scripts import ended, start, tracecov_flags

    out = tmp_path_factory.mktemp("undisturbed")
    assert ended(start(tracecov_flags(policy, table, out)))[0] == 0  # a process as those it is compared with
    return out


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of 64 KiB, where this machine lets us mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(tmp_path)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs here")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


@pytest.fixture
def on_day(monkeypatch):
    """on_day(0) and on_day(1): this process's clock, one day apart whatever the hour (time zones 24 hours apart)."""

    def move(day):
        monkeypatch.setenv("TZ", "AAA+12" if day == 0 else "BBB-12")
        time.tzset()

    yield move
    monkeypatch.undo()
    time.tzset()
