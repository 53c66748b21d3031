"""Every test runs offline, from any working directory, and may use a small part of the machine."""

import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", MPLBACKEND="Agg")
for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):  # a make that a test starts is none below the one that started the tests
    os.environ.pop(name, None)
# One setting for this process and for those it starts: byte equality is promised within one setting alone. Models this
# small gain nothing from threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest  # noqa: E402


def pytest_report_header():
    """What a stranger's red run was computed with."""
    import torch

    settings = [
        f"{name}={os.environ[name]}" for name in ("ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS", "MKL_CBWR") if name in os.environ
    ]
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads; {' '.join(settings)}"


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """A folder that a run of both scripts on the shipped tiny model has written: twelve prompts, K = 2, 4, 8."""
    from data.make_arithmetic import make_problems, write_jsonl
    from Gradient_evaluation import calculate_oracle_v, cli, run_tracecov

    folder = tmp_path_factory.mktemp("a small run")
    write_jsonl(make_problems(12, seed=0), folder / "problems.jsonl")
    model = Path(__file__).resolve().parents[1] / "data" / "tiny_model"
    law = ["--model", model, "--max_new_tokens", 8, "--device", "cpu", "--dtype", "float32"]
    for script, flags in (
        (calculate_oracle_v, ["--dataset", folder / "problems.jsonl", "--n_oracle", 50, "--out_dir", folder]),
        (
            run_tracecov,
            [
                "--oracle_table",
                folder / "oracle_v_n50_tiny_model.jsonl",
                "--K_list",
                2,
                4,
                8,
                "--M",
                4,
                "--save_json",
                folder,
                "--skip_plot",
            ],
        ),
    ):
        argv, sys.argv = sys.argv, [script.__file__, *map(str, [*law, *flags])]
        try:
            cli.run(script.main)
        finally:
            sys.argv = argv
    return folder
