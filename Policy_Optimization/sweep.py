"""A sweep over group sizes: its runs are planned, checked and trained, one after the other (sweep_group_size.sh starts it).

manifest.json is {"budget": 1024, ..., "runs": [{"group_size", "seed", "run_dir"}, ...]}; plots/plot_training.py reads it. How
far a run came is in its run folder (run_folder.py), where the launcher writes ``finished``.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import Parser, group_sizes, importing, integer, run
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine.files import one_line_errors, write_json
from Policy_Optimization.overrides import training_law
from Policy_Optimization.settings import BUDGETS, value_without_flag

LAUNCHER = Path(__file__).resolve().parent / "grpo_train.sh"
DECIDED = ("TRAIN_BATCH_SIZE", "MINI_BATCH_SIZE", "EPOCHS", "EXPERIMENT", "EXPERIMENT_NAME")  # variables, by the sweep
IN_TRAINING = {  # entry of the sampling law -> how the training sets it
    "model": "MODEL",
    "temperature": "TEMPERATURE",
    "max_new_tokens": "MAX_RESPONSE_LENGTH",
    "reward": "REWARD",
    "reward_weights": "REWARD_WEIGHTS",
    "chat_template_kwargs": "CHAT_TEMPLATE_KWARGS",
    "top_p": "actor_rollout_ref.rollout.top_p",
    "top_k": "actor_rollout_ref.rollout.top_k",
}


def admissible_sizes(budgets: Sequence[int]) -> list[int]:
    """The powers of two from 2 up that divide every budget.

    >>> admissible_sizes([1024, 256, 128])
    [2, 4, 8, 16, 32, 64, 128]
    """
    common = math.gcd(*budgets)
    return [2**power for power in range(1, common.bit_length()) if common % 2**power == 0]


def recommended_sizes(results: Mapping[str, Any], name: str, budgets: Sequence[int]) -> list[int]:
    """The admissible sizes near the evaluation's recommendation, from ``group_size_law`` of its results file.

    They are the powers of two inside within_10_percent, or without these the one next to G_star on a logarithmic scale.
    Raises UserError, in one line, where the file recommends nothing.
    """
    group_size_law, allowed = results.get("group_size_law"), admissible_sizes(budgets)
    if not isinstance(group_size_law, dict):
        raise UserError(f"{name}: holds no group_size_law, so nothing is recommended; give --group_sizes")
    best, within = group_size_law.get("G_star"), group_size_law.get("within_10_percent")
    if best is None:
        reason = (group_size_law.get("reasons") or {}).get("G_star", "it has no G_star")
        raise UserError(f"{name}: group_size_law recommends no size: {reason}; give --group_sizes")
    if not allowed:
        raise UserError(f"{name}: no power of two divides the budgets {list(budgets)}; give --group_sizes")
    wanted = [size for size in allowed if within and within[0] <= size <= within[1]]
    return wanted or [min(allowed, key=lambda size: abs(math.log(size / best)))]


def check_same_law(results: Mapping[str, Any], name: str, training: Mapping[str, Any], allow_mismatch: bool) -> list[str]:
    """Warnings about the sampling laws of the evaluation and of the training; UserError where they differ.

    The recommended group size belongs to the distribution that was measured. Another temperature, top_p, token limit, model,
    reward or chat template has another one. Under ``allow_mismatch`` a difference is a warning.
    """
    from Gradient_evaluation.runs.inputs.oracle_table import ADDED_LATER

    law = results.get("law")
    if not isinstance(law, Mapping):
        return [f"{name}: does not say under which sampling law it was measured; it is taken to be the training's"]
    differences = []
    for entry, here in training.items():
        there = law.get(entry, ADDED_LATER.get(entry))
        unknown = (entry not in law and entry not in ADDED_LATER) or (entry == "reward" and here is None)
        if unknown or there == here or (entry == "model" and _same_model(there, here)):
            continue
        setting = IN_TRAINING.get(entry, entry)
        differences.append(f"measured with {entry} {json.dumps(there)}, training has {setting} {json.dumps(here)}")
    if differences and not allow_mismatch:
        raise UserError(
            f"{name}: {'; '.join(differences)}; measure under the training's sampling law, train under the file's, or pass "
            "--allow_mismatch"
        )
    return [f"{name}: {'; '.join(differences)}; going on as --allow_mismatch says"] if differences else []


def _same_model(there: Any, here: str) -> bool:
    """A local folder goes by its name alone, so a hub id is compared with it without its owner."""
    return isinstance(there, str) and ("/" not in there or "/" not in here) and there.split("/")[-1] == here.split("/")[-1]


def read_manifest(sweep_dir: Path) -> dict:
    """D/manifest.json; UserError if it is missing or damaged. Other entries of a run, of earlier versions, are left out."""
    path = sweep_dir / "manifest.json"
    with one_line_errors(path, "read"):
        data = path.read_bytes()
    try:
        manifest = json.loads(data)
        runs = [run_entry(int(each["group_size"]), int(each["seed"]), each["run_dir"]) for each in manifest["runs"]]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: is damaged; remove it and start the sweep again, finished runs are kept") from None
    return {**manifest, "runs": runs}


def run_entry(size: int, seed: int, run_dir: str | None = None) -> dict[str, Any]:
    return {"group_size": size, "seed": seed, "run_dir": run_dir or f"g{size}_seed{seed}"}


def make_plan(sweep_dir: Path, sizes: Sequence[int], seeds: Sequence[int], budgets: Mapping[str, int]) -> dict:
    """The manifest with one run for each size and seed, and with the runs that it has already.

    Raises UserError for a size that does not divide a budget, and where the manifest was made with other budgets.
    """
    for size in sizes:
        for _, name in BUDGETS:
            if budgets[name] % size:
                allowed = ", ".join(map(str, admissible_sizes(list(budgets.values()))))
                raise UserError(f"--group_sizes {size} does not divide --{name} {budgets[name]}; these do: {allowed}")
    known: dict[tuple[int, int], dict] = {}
    if (sweep_dir / "manifest.json").exists():
        manifest = read_manifest(sweep_dir)
        for name, value in budgets.items():
            if manifest.get(name) != value:
                raise UserError(
                    f"{sweep_dir}: its manifest was made with --{name} {manifest.get(name)}, not {value}; "
                    f"give another --sweep_dir"
                )
        known = {(each["group_size"], each["seed"]): each for each in manifest["runs"]}
    asked = {(size, seed): run_entry(size, seed) for size in sizes for seed in seeds}
    runs = {**asked, **known}
    return {**budgets, "runs": [runs[key] for key in sorted(runs)]}


def write_manifest(sweep_dir: Path, manifest: Mapping[str, Any]) -> None:
    with one_line_errors(sweep_dir, "write"):
        sweep_dir.mkdir(parents=True, exist_ok=True)
    write_json(sweep_dir / "manifest.json", manifest)


@dataclass(frozen=True)
class SweepSettings:
    """The sweep's flags, by their names; budgets: those on the command line; passed: what follows ``--``."""

    sweep_dir: Path
    group_sizes: list[str] | None
    recommended: str | None
    allow_mismatch: bool
    seeds: list[int]
    budgets: dict[str, int]
    env: str | None
    dry_run: bool
    passed: list[str]


def parse_args(arguments: Sequence[str] | None) -> SweepSettings:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    text = "One training run for each group size and seed, at a fixed budget of continuations."
    more = "Every other setting of grpo_train.sh is given as an environment variable; what follows -- goes to VERL."
    parser = Parser(prog="sweep_group_size.sh", description=f"{text} {more}")
    folder = os.environ.get("SWEEP_DIR") or "outputs/sweep"
    parser.add_argument("--sweep_dir", type=Path, default=Path(folder), help="folder (%(default)s)")
    parser.add_argument("--group_sizes", nargs="+", help="sizes, for example 4 8 16 32 64 128 (the default)")
    parser.add_argument("--recommended", metavar="RESULTS.json", help="take the sizes near the evaluation's G*")
    mismatch = "take a recommendation that was measured under another sampling law than the training's"
    parser.add_argument("--allow_mismatch", action="store_true", help=mismatch)
    parser.add_argument("--seeds", nargs="+", type=integer(0), default=[0], help="one run each (default 0)")
    for _, name in BUDGETS:
        parser.add_argument(f"--{name}", type=integer(1), help="see grpo_train.sh")
    parser.add_argument("--env", help="environment to train in, see grpo_train.sh")
    parser.add_argument("--dry_run", action="store_true", help="check every run, start nothing")
    flags = vars(parser.parse_args(arguments[:split]))
    budgets = {name: flags.pop(name) for _, name in BUDGETS}
    flags["sweep_dir"] = flags["sweep_dir"].expanduser().absolute()
    given = {name: value for name, value in budgets.items() if value is not None}
    return SweepSettings(**flags, budgets=given, passed=arguments[split + 1 :])


def choose_sizes(settings: SweepSettings, budgets: Mapping[str, int]) -> list[int]:
    if settings.recommended and settings.group_sizes:
        raise UserError("--recommended and --group_sizes: give one of them")
    if settings.recommended:
        with importing():
            from Gradient_evaluation.runs.results.results_file import load_results
        results = load_results(settings.recommended)
        sizes = recommended_sizes(results, settings.recommended, list(budgets.values()))
        law = training_law(os.environ, settings.passed)
        for warning in check_same_law(results, settings.recommended, law, settings.allow_mismatch):
            print(f"warning: {warning}", file=sys.stderr)
        return sizes
    if settings.group_sizes:
        try:
            return group_sizes(settings.group_sizes)
        except UserError as error:
            raise UserError(str(error).replace("--K_list", "--group_sizes")) from None
    return [4, 8, 16, 32, 64, 128]


def launch(settings: SweepSettings, each: Mapping[str, Any], *more: str, **pipes: Any) -> subprocess.Popen:
    """Start the launcher for one run, with ``more`` of its flags.

    Sizes, seeds and folders are the sweep's: its flags win over variables of the same names. A hub model is fetched once.
    """
    own = {"group_size": each["group_size"], "seed": each["seed"], "run_dir": settings.sweep_dir / each["run_dir"]}
    if folder := os.environ.get("SAVE_ROLLOUTS", "").strip():
        own["save_rollouts"] = Path(folder) / each["run_dir"]
    flags = [text for name, value in (own | settings.budgets).items() for text in (f"--{name}", str(value))]
    chosen = ["--env", settings.env] if settings.env else []
    passed = ["--", *settings.passed] if settings.passed else []
    environment = {name: value for name, value in os.environ.items() if name not in DECIDED}
    environment["IN_SWEEP"] = "1"  # errors then name settings as they are typed here
    environment.setdefault("HF_HOME", str(settings.sweep_dir / "cache" / "huggingface"))
    return subprocess.Popen(["bash", str(LAUNCHER), *chosen, *more, *flags, *passed], env=environment, **pipes)


def check_all(settings: SweepSettings, todo: Sequence[Mapping[str, Any]]) -> None:
    """Check every run before the first one starts. Exits with the code of the first that is refused."""
    for number, each in enumerate(todo):
        print(f"checking G = {each['group_size']}, seed {each['seed']}", file=sys.stderr)
        shown = settings.dry_run and number == 0  # the others differ in what follows from G and the seed
        code = launch(settings, each, "--dry_run", stdout=None if shown else subprocess.DEVNULL).wait()
        if code:
            sys.exit(code)


def train_all(settings: SweepSettings, todo: Sequence[Mapping[str, Any]]) -> None:
    """Train one run after the other. Exits with 130 or 143 after a signal, which the run gets too, and 1 if a run failed."""
    running, told, failed = [], [], 0

    def stop(number: int, _) -> None:
        told.append(128 + number)
        for child in running[-1:]:
            child.terminate()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    for each in todo:
        running.append(launch(settings, each))
        code = running[-1].wait()
        if told or code in (130, 143):
            print(f"stopped at {each['run_dir']}; the same command goes on from there", file=sys.stderr)
            sys.exit(told[0] if told else code)
        failed += code != 0
    if failed:
        logs = f"their logs are in {settings.sweep_dir}/*/logs; the same command tries them again"
        print(f"error: {failed} of the runs failed; {logs}", file=sys.stderr)
        sys.exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    settings = parse_args(arguments)
    budgets = {name: settings.budgets.get(name) or value_without_flag(name, os.environ) for _, name in BUDGETS}
    sizes, sweep_dir = choose_sizes(settings, budgets), settings.sweep_dir
    manifest = make_plan(sweep_dir, sizes, sorted(set(settings.seeds)), budgets)
    if not settings.dry_run:
        write_manifest(sweep_dir, manifest)
    left = [each for each in manifest["runs"] if not (sweep_dir / each["run_dir"] / "finished").exists()]
    done, shown = len(manifest["runs"]) - len(left), ", ".join(map(str, sizes))
    print(f"{len(manifest['runs'])} runs, {done} of them finished; sizes {shown}", file=sys.stderr)
    todo = [each for each in left if each["group_size"] in sizes and each["seed"] in settings.seeds]
    check_all(settings, todo)
    if settings.dry_run:
        print(f"all {len(todo)} runs can start; shown is the first" if todo else "every run is finished")
        return
    train_all(settings, todo)
    print(f"all runs are finished: python plots/plot_training.py {sweep_dir}/manifest.json --out figure.pdf")


if __name__ == "__main__":
    run(main)
