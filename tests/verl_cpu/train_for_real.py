"""Train the tiny model with VERL for real, without a GPU: kill it, continue it, merge it, measure it.

    make test-train                                                            # installs what it needs first
    .venv/bin/python tests/verl_cpu/train_for_real.py --env outputs/verl_cpu/venv --out_dir outputs/verl_cpu/run

It runs the launcher itself, Policy_Optimization/grpo_train.sh, with overrides.txt behind ``--``. The run is killed
(SIGKILL, all its processes) two steps after its first checkpoint, and started again with the same command. Then
the checkpoint is merged into a model folder and calculate_oracle_v.py measures V on the validation prompts with
the model before and after. What must hold is asserted at the end; the figures are printed and left in
figures.json. Needs 9 GB of memory; minutes on two cores, see the README.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from Gradient_evaluation.cli import Parser, integer, run
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine.files import write_json
from plots.training_logs import load_runs

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "verl_cpu"
LIMIT = 3600  # seconds for one start of the launcher, on a busy machine
# The model knows products and quotients, and at temperature 2 says them with doubt: what a few steps can learn. At
# temperature 1 on all kinds, 32 steps moved nothing beyond noise (0.2225 to 0.2213).
KINDS = ("multiplication", "division")
TEMPERATURE = "2.0"
LAW = ["--temperature", TEMPERATURE, "--top_p", "1.0", "--max_new_tokens", "24"]  # what VERL samples from


def command_line(*parts) -> None:
    """Run one of the repository's commands with this python; its failure ends the test."""
    subprocess.run([sys.executable, *map(str, parts)], check=True, cwd=ROOT)


def make_data(out: Path, model: Path, drawn: int, val: int) -> None:
    """Train and validation parquet from those of ``drawn`` problems that are of ``KINDS``."""
    problems = out / "problems.jsonl"
    command_line("data/make_arithmetic.py", "--n", drawn, "--seed", 7, "--out", problems)
    kept = [line for line in problems.read_text().splitlines() if json.loads(line)["kind"] in KINDS]
    problems.write_text("".join(line + "\n" for line in kept))
    flags = ["--val_size", val, "--model", model, "--max_prompt_length", 96, "--out_dir", out / "the data"]
    command_line("data/prepare_parquet.py", "arithmetic", "--train", problems, *flags)


def mean_value(model: Path, out: Path) -> dict[str, float]:
    """V_oracle of every validation prompt under ``model``, by prompt."""
    flags = ["--model", model, "--dataset", out / "the data" / "val.parquet", "--out_dir", out / "V", "--quiet"]
    command_line("Gradient_evaluation/calculate_oracle_v.py", *flags, "--n_oracle", 64, "--batch_size", 64, *LAW)
    table = out / "V" / f"oracle_v_n64_{model.name}.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    return {json.dumps(row["prompt"]): row["V_oracle"] for row in rows}


def launcher(out: Path, model: Path, env: Path, steps: int) -> tuple[list[str], dict[str, str]]:
    """The command that trains, and its environment."""
    data, overrides = out / "the data", (HERE / "overrides.txt").read_text().split()
    flags = {
        "env": env,
        "model": model,
        "train_files": data / "train.parquet",
        "val_files": data / "val.parquet",
        "run_dir": out / "the run",
        "experiment": "tiny_g8_seed0",
        "group_size": 8,
        "budget": 256,
        "update_budget": 128,
        "epoch_budget": 64,
        "learning_rate": 3e-4,
        "max_prompt_length": 96,
        "max_response_length": 24,
        "gpus_per_node": 1,
        "micro_batch_size": 128,
        "log_prob_micro_batch_size": 256,
        "save_freq": 8,
        "test_freq": 8,
        "save_rollouts": out / "rollouts",
    }
    settings = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    passed = [
        "--",
        *overrides,
        f"trainer.total_training_steps={steps}",
        f"trainer.rollout_data_dir={out / 'verl_dump'}",
        f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        f"actor_rollout_ref.rollout.val_kwargs.temperature={TEMPERATURE}",
    ]
    environment = {
        **{name: text for name, text in os.environ.items() if not name.startswith(("WANDB", "RAY", "VERL"))},
        "PYTHONPATH": str(HERE),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu_platform",
        "VERL_ENGINE_DEVICE": "cuda",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "RAY_worker_niceness": "0",
        "RAY_worker_register_timeout_seconds": "900",  # a busy machine imports for minutes
        "HOME": str(out / "home"),
        "TRAIN_FOR_REAL": str(out),
    }
    (out / "home").mkdir(exist_ok=True)
    return ["bash", str(ROOT / "Policy_Optimization" / "grpo_train.sh"), *settings, *passed], environment


def steps_logged(run_dir: Path, attempt: int) -> list[int]:
    """The steps in the metrics file of one attempt, training and validation."""
    path = run_dir / "logs" / f"metrics_{attempt}.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line)["step"] for line in lines]


def train_and_kill(command: list[str], environment: dict[str, str], run_dir: Path, after: int) -> float:
    """Start the launcher and kill all its processes once step ``after`` is logged; returns the seconds it ran."""
    started = time.monotonic()
    marker = f"TRAIN_FOR_REAL={environment['TRAIN_FOR_REAL']}"
    process = subprocess.Popen(command, env=environment, cwd=ROOT)
    while after not in steps_logged(run_dir, 1):
        if process.poll() is not None or time.monotonic() - started > LIMIT:
            kill_all(process, marker)
            raise UserError(f"{run_dir}: the run ended or hung before step {after}; see logs/console_1.log")
        time.sleep(1)
    kill_all(process, marker)
    return time.monotonic() - started


def kill_all(process: subprocess.Popen, marker: str) -> None:
    """SIGKILL to the launcher and whatever it started, told by ``marker`` in their environment: a power cut."""
    process.kill()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)
        except OSError:  # it ended meanwhile, or is another user's
            continue
    process.wait()


def merge(env: Path, out: Path, step: int) -> Path:
    """The checkpoint of ``step`` as a model folder, by VERL's own merger."""
    target, actor = out / "trained_model", out / "the run" / "checkpoints" / f"global_step_{step}" / "actor"
    flags = ["--backend", "fsdp", "--local_dir", actor, "--target_dir", target]
    command = [env / "bin" / "python", "-m", "verl.model_merger", "merge", *flags]
    subprocess.run(command, check=True, cwd=ROOT)
    return target


def paired(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Means of two measurements of the same prompts, and the standard error of the mean difference."""
    assert set(before) == set(after)
    differences = [after[prompt] - before[prompt] for prompt in before]
    error = statistics.stdev(differences) / len(differences) ** 0.5
    return {
        "before": statistics.fmean(before.values()),
        "after": statistics.fmean(after.values()),
        "difference": statistics.fmean(differences),
        "standard_error": error,
        "prompts": len(differences),
    }


def accuracy_by_prompt(run_dir: Path, step: int) -> dict[str, float]:
    """Mean accuracy of each validation prompt at a step, from the continuations VERL wrote down."""
    found: dict[str, list[float]] = {}
    for line in (run_dir / "validation" / f"{step}.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["acc"] == row["score"] and isinstance(row["pred"], str)
        found.setdefault(row["input"], []).append(row["acc"])
    return {prompt: statistics.fmean(values) for prompt, values in found.items()}


def check(run_dir: Path, steps: int, saved: int, killed_after: int) -> dict:
    """Assert what the two attempts must have left, and return the validation figures."""
    first, second = steps_logged(run_dir, 1), steps_logged(run_dir, 2)
    assert first[0] == 0 and first[-1] >= killed_after, first
    assert [step for step in second if step != saved][0] == saved + 1 and second[-1] == steps, second
    (logged,) = load_runs(run_dir)
    assert logged.group_size == 8 and {0, saved, steps} <= set(logged.accuracy)
    offline_files = list(run_dir.glob("wandb/offline-run-*/*.wandb"))
    assert len(offline_files) == 2 and len({file.name for file in offline_files}) == 1, offline_files
    assert (run_dir / "finished").exists()
    before, after = accuracy_by_prompt(run_dir, 0), accuracy_by_prompt(run_dir, steps)
    validation = paired(before, after)
    assert abs(validation["after"] - logged.accuracy[steps]) < 1e-6
    return {"validation": validation, "accuracy_by_step": logged.accuracy, "steps_first": first, "steps_second": second}


def check_rollouts(out: Path, model: Path, steps: int, budget: int = 256) -> float:
    """Assert that the ``budget`` rollouts of every step are saved, and that VERL's own dump has the same texts and scores.

    Returns the largest difference between a saved log-prob of step 1 and that of ``model``, which sampled it.
    """
    import pyarrow.parquet
    import torch
    from transformers import AutoModelForCausalLM

    for step in range(1, steps + 1):
        rows = pyarrow.parquet.read_table(out / "rollouts" / f"step_{step:06d}.parquet").to_pylist()
        dumped = [json.loads(line) for line in (out / "verl_dump" / f"{step}.jsonl").read_text().splitlines()]
        saved = sorted((row["text"], row["reward"]) for row in rows)
        assert len(rows) == budget and saved == sorted((row["output"], row["score"]) for row in dumped), step
    scorer, largest = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), 0.0
    for row in pyarrow.parquet.read_table(out / "rollouts" / "step_000001.parquet").to_pylist():
        ids, tokens = torch.tensor([row["prompt_ids"] + row["response_ids"]]), row["response_ids"]
        with torch.inference_mode():
            logits = scorer(ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / float(TEMPERATURE)
        found = torch.log_softmax(logits, -1)[range(len(tokens)), tokens]
        largest = max(largest, (found - torch.tensor(row["log_probs"])).abs().max().item())
    assert largest < 1e-4, largest
    return largest


def main() -> None:
    parser = Parser(prog="train_for_real.py", description="VERL training on a CPU, killed, continued, measured.")
    parser.add_argument("--env", type=Path, required=True, help="environment with requirements.txt of this folder")
    parser.add_argument("--model", type=Path, default=ROOT / "data" / "tiny_model", help="start (data/tiny_model)")
    parser.add_argument("--out_dir", type=Path, default=ROOT / "outputs" / "verl_cpu" / "run", help="emptied first")
    parser.add_argument("--steps", type=integer(9), default=40, help="training steps (%(default)s)")
    flags = parser.parse_args()
    out, env, model = flags.out_dir.absolute(), flags.env.absolute(), flags.model.absolute()
    if not (env / "bin" / "python").exists():
        raise UserError(f"--env {flags.env}: holds no bin/python; make test-train installs it")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    started, run_dir, saved = time.monotonic(), out / "the run", 8

    make_data(out, model, drawn=600, val=80)
    before = mean_value(model, out)
    command, environment = launcher(out, model, env, flags.steps)
    first = train_and_kill(command, environment, run_dir, after=saved + 2)
    print(f"killed after step {saved + 2}; starting the same command again", flush=True)
    again = time.monotonic()
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=LIMIT)
    second = time.monotonic() - again
    figures = check(run_dir, flags.steps, saved, saved + 2)
    figures["log_prob_difference"] = check_rollouts(out, model, flags.steps)
    trained = merge(env, out, flags.steps)
    after = mean_value(trained, out)
    figures["mean_V"] = paired(before, after)
    command_line("plots/plot_training.py", run_dir, "--out", out / "training.png")
    seconds = {"first_attempt": first, "second_attempt": second, "all": time.monotonic() - started}
    write_json(out / "figures.json", {**figures, "seconds": seconds})
    for name in ("validation", "mean_V"):
        got = figures[name]
        print(
            f"{name}: {got['before']:.3f} -> {got['after']:.3f}, difference {got['difference']:+.3f} "
            f"+- {got['standard_error']:.3f} (standard error, {got['prompts']} prompts)"
        )
        assert got["difference"] > 4 * got["standard_error"], f"{name} did not rise beyond noise"
    print(f"passed in {seconds['all']:.0f} s; everything is in {out}")


if __name__ == "__main__":
    run(main)
