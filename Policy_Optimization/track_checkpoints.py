"""The group size along the checkpoints of a training: each one measured on the same prompts, one table, one figure.

    python Policy_Optimization/track_checkpoints.py outputs/trl --dataset outputs/demo/problems.jsonl --max_new_tokens 24 \\
        --top_p 1.0 --num_generations 8 --prompts_per_step 16 --save_json outputs/trl_tracked
    python Policy_Optimization/track_checkpoints.py BASE_MODEL RUN_DIR --every 100 --dataset D --T 64 --save_json DIR

RUN_DIR holds checkpoint-N (Hugging Face, also PEFT adapters) or VERL's global_step_N (merged). A folder that is a model itself
may be given too. Each checkpoint is one run of Gradient_evaluation/run_tracecov.py in DIR/step_N, with every flag that is not
one of this script; its --help has them. --T 16 and --per_prompt 16 are the defaults here. The random numbers of a continuation
depend on --seed, the prompt and its number alone, so checkpoints differ by their parameters only. Run it again and it
continues: what is measured is not measured again. DIR/group_size.jsonl has one line for each step, with the names of
GroupSizeCallback's file; DIR/group_size.png is the figure of plots/plot_over_steps.py. A measurement takes as long as
run_tracecov.py says (docs/costs.md); one of the shipped tiny model about half a minute on two cores.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import Parser, importing, integer, run
from Gradient_evaluation.errors import UserError

RUN_TRACECOV = Path(__file__).resolve().parents[1] / "Gradient_evaluation" / "run_tracecov.py"
FILE, FIGURE = "group_size.jsonl", "group_size.png"
STEP = re.compile(r"(?:checkpoint-|global_step_)(\d+)")
# Of run_tracecov.py: a model or a folder that is this script's to give, and what would make checkpoints differ by more than
# their parameters.
NOT_HERE = {
    **dict.fromkeys(("--model", "--revision"), "give the checkpoint's folder"),
    **dict.fromkeys(("--plot_path", "--plan", "--save_rollouts", "--from_grams"), "leave it out"),
    **dict.fromkeys(("--oracle_table", "--rollouts"), "it is of one checkpoint; give --dataset"),
    **dict.fromkeys(("--until", "--minutes"), "checkpoints would have other prompts; give --T"),
}


class Checkpoint(NamedTuple):
    """One checkpoint. step: of its folder's name, else its number in the order given. model: the folder that is loaded."""

    step: int
    folder: Path
    model: Path
    has_step: bool


def parse_args(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The flags of this script, and the words that are left for run_tracecov.py."""
    parser = Parser(
        prog="track_checkpoints.py",
        description=__doc__.split("\n")[0],
        epilog="Every other flag is one of run_tracecov.py: --T (16 here), --per_prompt (16 here), --temperature, ...",
    )
    parser.add_argument(
        "checkpoints", nargs="+", metavar="RUN_DIR|CHECKPOINT", help="before the flags: folders of runs, or of checkpoints"
    )
    parser.add_argument("--dataset", required=True, help="the prompts: hub id, or a local file or folder")
    parser.add_argument("--save_json", required=True, metavar="DIR", help="folder of the results, one sub-folder a checkpoint")
    parser.add_argument("--every", type=integer(1), metavar="N", help="of a RUN_DIR only the steps that N divides")
    parser.add_argument("--num_generations", type=integer(2), metavar="G", help="the group size of the training")
    parser.add_argument("--prompts_per_step", type=integer(1), metavar="B", help="the prompts of one step of the training")
    parser.add_argument("--wandb", action="store_true", help="also log to Weights & Biases, offline without a key")
    parser.add_argument("--tensorboard", action="store_true", help="also write TensorBoard's events to DIR/tensorboard")
    if arguments and arguments[0].startswith("-") and not {"-h", "--help"} & set(arguments):
        parser.error("give the folders of runs or checkpoints first, then the flags")
    flags, passed = parser.parse_known_args(arguments)
    for word in passed:
        if fix := NOT_HERE.get(word.partition("=")[0]):
            parser.error(f"{word.partition('=')[0]}: not with several checkpoints; {fix}")
    if flags.prompts_per_step and not flags.num_generations:
        parser.error("--prompts_per_step: no effect without --num_generations; give both")
    return flags, passed


def find_checkpoints(folders: Sequence[str], every: int | None) -> list[Checkpoint]:
    """The checkpoints of these folders, by step. ``every`` chooses among those that a run's folder holds.

    Raises UserError for a folder without any, shards that are not merged, and two checkpoints of one step.
    """
    found: dict[int, Checkpoint] = {}
    n_unnamed = 0
    for folder in map(Path, folders):
        for each in _in_run(folder.expanduser(), every):
            named = STEP.fullmatch(each.resolve().name)
            step = int(named[1]) if named else n_unnamed
            n_unnamed += not named
            if step in found:
                raise UserError(f"{each}: is of step {step}, as {found[step].folder} is; give each a --save_json of its own")
            found[step] = Checkpoint(step, each, each, bool(named))
    return [each._replace(model=_model_of(each.folder)) for _, each in sorted(found.items())]


def _in_run(folder: Path, every: int | None) -> list[Path]:
    """The checkpoints that the folder of a run holds, or the folder itself if it holds none and may be one."""
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; give that of a run or of a checkpoint, before the flags")
    inside = [each for parent in (folder, folder / "checkpoints") if parent.is_dir() for each in parent.iterdir()]
    steps = {int(STEP.fullmatch(each.name)[1]): each for each in inside if each.is_dir() and STEP.fullmatch(each.name)}
    if steps and every:
        chosen = [each for step, each in steps.items() if step % every == 0]
        if not chosen:
            raise UserError(f"--every {every}: divides no step of {folder}, which has {', '.join(map(str, sorted(steps)))}")
        return chosen
    if not steps and not (STEP.fullmatch(folder.resolve().name) or (folder / "actor").is_dir() or _is_model(folder)):
        raise UserError(
            f"{folder}: holds no checkpoint-N or global_step_N, and is no checkpoint (config.json with weights, or an adapter)"
        )
    return list(steps.values()) or [folder]


def _is_model(folder: Path) -> bool:
    has_weights = any(each.suffix in (".safetensors", ".bin") for each in folder.glob("*model*"))
    return (folder / "adapter_config.json").is_file() or (folder / "config.json").is_file() and has_weights


def _model_of(checkpoint: Path) -> Path:
    """The folder in a checkpoint that a model is loaded from: the merged one, or the adapters beside it, in VERL's."""
    actor = checkpoint / "actor"
    merged = actor / "huggingface" if actor.is_dir() else checkpoint
    if actor.is_dir() and _is_model(merged / "lora_adapter"):
        return merged / "lora_adapter"  # VERL's merger writes the base model without them
    if _is_model(merged):
        return merged
    if actor.is_dir():
        raise UserError(
            f"{checkpoint}: VERL's shards are not merged; run: python -m verl.model_merger merge --backend fsdp "
            f"--local_dir {actor} --target_dir {merged}"
        )
    raise UserError(f"{checkpoint}: is no checkpoint (config.json with weights, or an adapter's adapter_config.json)")


def measure(checkpoint: Checkpoint, folder: Path, flags, passed: Sequence[str]) -> None:
    """Run run_tracecov.py for one checkpoint; its report goes to ``folder``/report.txt. SystemExit where it fails."""
    from Gradient_evaluation.runs.machine.files import one_line_errors

    given = {word.partition("=")[0] for word in passed}
    command = [sys.executable, str(RUN_TRACECOV), "--model", str(checkpoint.model)]
    command += ["--dataset", flags.dataset, "--save_json", str(folder), "--skip_plot", *passed]
    command += [] if "--T" in given else ["--T", "16"]
    command += [] if {"--per_prompt", "--M"} & given else ["--per_prompt", "16"]
    with one_line_errors(folder, "write"):
        folder.mkdir(parents=True, exist_ok=True)
        report = open(folder / "report.txt", "w")
    with report, subprocess.Popen(command, stdout=report) as process:
        try:
            code = process.wait()
        except KeyboardInterrupt:  # the terminal has sent it to both
            process.wait()
            raise KeyboardInterrupt("the same command continues") from None
    if code:
        raise SystemExit(code if code > 0 else 128 - code)


def row_of(checkpoint: Checkpoint, folder: Path, trained) -> dict[str, Any]:
    """The line of one measured checkpoint: the names of GroupSizeCallback's lines, as far as results have them."""
    import numpy as np

    from Gradient_evaluation.models import model_label
    from Gradient_evaluation.runs.results.results_file import detailed_path, load_results, results_path
    from Gradient_evaluation.stats.missing import Missing
    from Policy_Optimization.policy_in_place import LAW_NUMBERS, at_own_size

    label = model_label(str(checkpoint.model))
    results = load_results(results_path(folder, label))
    law = results["group_size_law"]
    shares = dict(zip(law["silent_share"]["G"], law["silent_share"]["share"]))

    def silent_share(size: int) -> float | Missing:
        share = shares.get(size)
        return Missing("known for powers of two up to the continuations of a prompt") if share is None else share

    at_own, no_own = at_own_size(law, trained, silent_share)
    rewards = _mean_rewards(detailed_path(folder, label, results["K_list"][0]))
    return {
        "step": checkpoint.step,
        **({} if checkpoint.has_step else {"label": checkpoint.folder.resolve().name}),
        "checkpoint": str(checkpoint.folder),
        **{name: law[name] for name in LAW_NUMBERS},
        **at_own,
        "num_generations": trained.group_size,
        "prompts_per_step": trained.prompts,
        "mean_reward": float(np.mean(rewards)),
        "mean_reward_standard_error": float(np.std(rewards, ddof=1) / len(rewards) ** 0.5) if len(rewards) > 1 else None,
        **{name: results[name] for name in ("n_prompts", "n_continuations", "n_left_out")},
        "seconds": results["seconds"],
        "reasons": {name: why for name, why in law["reasons"].items() if name in LAW_NUMBERS} | no_own,
    }


def _mean_rewards(detailed: Path) -> list[float]:
    import json

    from Gradient_evaluation.runs.machine.files import one_line_errors

    with one_line_errors(detailed, "read"):
        return [row["mean_reward"] for row in json.loads(detailed.read_text(encoding="utf-8"))["prompt_results"]]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line for each step; an end of an interval that is not bounded is ``inf``."""
    titles = ("step", "G*", "at least", "c1", "c2", "c3", "signal/noise", "mean reward", "silent")
    lines = [titles]
    for row in rows:
        low, high = row["G_star_ci95"] or (None, None)
        best = "-" if row["G_star"] is None else f"{row['G_star']:.3g} [{low or 1:.3g}, {high or float('inf'):.3g}]"
        cells = [row[name] for name in ("G_star_at_least", "c1", "c2", "c3", "signal_to_noise", "mean_reward")]
        numbers = ["-" if each is None else f"{each:.3g}" for each in cells]
        silent = row["frac_reward_zero_std"]
        lines.append((row.get("label") or str(row["step"]), best, *numbers, "-" if silent is None else f"{silent:.0%}"))
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def log(rows: Sequence[Mapping[str, Any]], flags) -> None:
    """The rows by step to W&B and TensorBoard, where they are asked for, as group_size/NAME."""
    from Policy_Optimization.policy_in_place import as_logged
    from Policy_Optimization.run_folder import wandb_mode

    if flags.wandb:
        import wandb

        settings = {"project": os.environ.get("WANDB_PROJECT") or "group_size", "name": Path(flags.save_json).resolve().name}
        with wandb.init(**settings, dir=flags.save_json, mode=wandb_mode(os.environ)) as logged:
            for row in rows:
                logged.log(as_logged(row), step=row["step"])
    if flags.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(str(Path(flags.save_json) / "tensorboard")) as writer:
            for row in rows:
                for name, value in as_logged(row).items():
                    writer.add_scalar(name, value, row["step"])


def check_loggers(flags) -> None:
    """Refuse, before anything is measured, a logger that is not installed or a setting of it that cannot be."""
    from Policy_Optimization.run_folder import wandb_mode

    with importing():
        if flags.wandb:
            import wandb  # noqa: F401

            wandb_mode(os.environ)
        if flags.tensorboard:
            import torch.utils.tensorboard  # noqa: F401


def main() -> None:
    flags, passed = parse_args(sys.argv[1:])
    checkpoints = find_checkpoints(flags.checkpoints, flags.every)
    check_loggers(flags)
    folder, rows = Path(flags.save_json), []
    with importing():
        from Gradient_evaluation.runs.machine.files import to_json_line, write_bytes_atomic
        from plots.plot_over_steps import plot_over_steps
        from plots.style import save_figure
        from Policy_Optimization.policy_in_place import Trained
    for number, checkpoint in enumerate(checkpoints, start=1):
        measure(checkpoint, folder / f"step_{checkpoint.step}", flags, passed)
        trained = Trained(flags.num_generations, flags.prompts_per_step)
        rows.append(row_of(checkpoint, folder / f"step_{checkpoint.step}", trained))
        print(f"{checkpoint.folder}: measured ({number} of {len(checkpoints)})", file=sys.stderr, flush=True)
    write_bytes_atomic(folder / FILE, b"".join(map(to_json_line, rows)))
    log(rows, flags)
    print(table(rows))
    if not flags.prompts_per_step:
        print("\n--num_generations and --prompts_per_step of the training add the signal-to-noise ratio and the silent groups")
    print(f"\nmeasurements: {folder / FILE}\nfigure:       {save_figure(plot_over_steps(rows)[0], folder / FIGURE)}")


if __name__ == "__main__":
    run(main)
