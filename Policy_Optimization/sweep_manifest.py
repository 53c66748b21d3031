"""The plan of a sweep over group sizes: the runs it has, and which of them are still to be trained.

    sweep_manifest.py --sweep_dir D --group_sizes 4 8 16 --seeds 0 1      writes D/manifest.json
    sweep_manifest.py --sweep_dir D --recommended RESULTS.json            group sizes near the evaluation's G*, if it was
                                    [-- overrides of VERL]                measured under the training's sampling law

On stdout are the runs that were asked for and are not finished, as NUL-separated texts: G, seed, run folder, G, seed, ...
manifest.json is {"budget": 1024, ..., "runs": [{"group_size", "seed", "run_dir"}, ...]}; plots/plot_training.py reads it. How
far a run came is in its run folder (run_folder.py), where the launcher writes ``finished``.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import Parser, group_sizes, integer, run
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.files import one_line_errors, write_json
from Policy_Optimization.overrides import training_law
from Policy_Optimization.settings import BUDGETS, SETTINGS

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

    The result is powers_of_two. Without them it is the powers of two inside within_10_percent, and without these the one next
    to G_star on a logarithmic scale. Raises UserError, in one line, where the file recommends nothing.
    """
    group_size_law = results.get("group_size_law")
    if not isinstance(group_size_law, Mapping):
        raise UserError(f"{name}: holds no group_size_law, so nothing is recommended; give --group_sizes")
    allowed = admissible_sizes(budgets)
    listed, within, best = (group_size_law.get(name) for name in ("powers_of_two", "within_10_percent", "G_star"))
    wanted = {size for size in listed if size in allowed} if isinstance(listed, list) else set()
    if not wanted and _is_interval(within):
        wanted = {size for size in allowed if within[0] <= size <= within[1]}
    if not wanted and _is_number(best) and best > 0:
        wanted = {min(allowed, key=lambda size: abs(math.log(size / best)))} if allowed else set()
    if not wanted and best is None and isinstance(reason := (group_size_law.get("reasons") or {}).get("G_star"), str):
        raise UserError(f"{name}: group_size_law recommends no size: {reason}; give --group_sizes")
    if not wanted:
        raise UserError(f"{name}: group_size_law recommends no admissible size ({allowed}); give --group_sizes")
    return sorted(wanted)


def check_same_law(results: Mapping[str, Any], name: str, training: Mapping[str, Any], allow_mismatch: bool) -> list[str]:
    """Warnings about the sampling laws of the evaluation and of the training; UserError where they differ.

    The recommended group size belongs to the distribution that was measured. Another temperature, top_p, token limit, model,
    reward or chat template has another one. Under ``allow_mismatch`` a difference is a warning.
    """
    from Gradient_evaluation.runs.oracle_table import ADDED_LATER

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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_interval(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(_is_number(end) for end in value)


def read_json(path: str | Path, what: str) -> dict:
    """A JSON object from a file; UserError, saying ``what`` was expected, if there is none."""
    path = Path(path)
    with one_line_errors(path, "read"):
        text = path.read_text(encoding="utf-8-sig")
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{path}: is no JSON object; {what}")
    return value


def read_manifest(sweep_dir: Path) -> dict:
    """D/manifest.json; UserError if it is missing or damaged. Other entries of a run, of earlier versions, are left out."""
    path = sweep_dir / "manifest.json"
    manifest = read_json(path, "a manifest of sweep_group_size.sh is expected")
    try:
        runs = [run_entry(int(each["group_size"]), int(each["seed"]), each["run_dir"]) for each in manifest["runs"]]
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: its runs are damaged; remove it and start the sweep again, finished runs are kept") from None
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


def is_finished(sweep_dir: Path, each: Mapping[str, Any]) -> bool:
    return (sweep_dir / each["run_dir"] / "finished").exists()


@dataclass(frozen=True)
class SweepSettings:
    """The sweep's flags, by their names; passed: what follows ``--``."""

    sweep_dir: Path
    group_sizes: list[str] | None
    recommended: str | None
    allow_mismatch: bool
    seeds: list[int]
    budget: int
    update_budget: int
    epoch_budget: int
    dry_run: bool
    passed: list[str]


def parse_args(arguments: Sequence[str] | None) -> SweepSettings:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = Parser(
        prog="sweep_group_size.sh",
        description="One training run for each group size and seed, at a fixed "
        "budget of continuations. Other settings of grpo_train.sh are given as environment variables.",
    )
    parser.add_argument("--sweep_dir", type=Path, default=Path("outputs/sweep"), help="folder (%(default)s)")
    parser.add_argument("--group_sizes", nargs="+", help="sizes, for example 4 8 16 32 64 128 (the default)")
    parser.add_argument("--recommended", metavar="RESULTS.json", help="take the sizes near the evaluation's G*")
    parser.add_argument(
        "--allow_mismatch",
        action="store_true",
        help="take a recommendation that was measured under another sampling law than the training's",
    )
    parser.add_argument("--seeds", nargs="+", type=integer(0), default=[0], help="one run each (default 0)")
    defaults = {setting.name: setting.default for setting in SETTINGS}
    for _, name in BUDGETS:
        default = os.environ.get(name.upper(), "").strip() or str(defaults[name])
        parser.add_argument(f"--{name}", type=integer(1), default=default, help="see grpo_train.sh (%(default)s)")
    parser.add_argument("--dry_run", action="store_true", help="write no manifest")
    return SweepSettings(**vars(parser.parse_args(arguments[:split])), passed=arguments[split + 1 :])


def choose_sizes(settings: SweepSettings, budgets: Mapping[str, int]) -> list[int]:
    if settings.recommended and settings.group_sizes:
        raise UserError("--recommended and --group_sizes: give one of them")
    if settings.recommended:
        results = read_json(settings.recommended, "a results file of run_tracecov.py is expected")
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


def main(arguments: Sequence[str] | None = None) -> None:
    settings = parse_args(arguments)
    budgets = {name: getattr(settings, name) for _, name in BUDGETS}
    sizes, sweep_dir = choose_sizes(settings, budgets), settings.sweep_dir
    manifest = make_plan(sweep_dir, sizes, sorted(set(settings.seeds)), budgets)
    if not settings.dry_run:
        write_manifest(sweep_dir, manifest)
    finished = sum(is_finished(sweep_dir, each) for each in manifest["runs"])
    shown = ", ".join(map(str, sizes))
    print(f"{len(manifest['runs'])} runs, {finished} of them finished; sizes {shown}", file=sys.stderr)
    for each in manifest["runs"]:
        if each["group_size"] in sizes and each["seed"] in settings.seeds and not is_finished(sweep_dir, each):
            sys.stdout.write("".join(f"{each[name]}\0" for name in ("group_size", "seed", "run_dir")))


if __name__ == "__main__":
    run(main)
