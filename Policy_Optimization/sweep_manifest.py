"""The plan of a sweep over group sizes and its manifest: which run is where, and how far it came.

    sweep_manifest.py plan --sweep_dir D --group_sizes 4 8 16 --seeds 0 1     writes D/manifest.json, keeps what is done
    sweep_manifest.py plan --sweep_dir D --recommended RESULTS.json           sizes near the evaluation's G*, measured
                                       [-- overrides of VERL]                 under the training's law
    sweep_manifest.py todo --sweep_dir D [flags of plan]                      NUL-separated: G, seed, run folder, ...
    sweep_manifest.py mark --sweep_dir D --run_dir R --status finished        one run's new status

manifest.json: {"budget": 1024, "runs": [{"group_size", "seed", "run_dir", "status", "exit_code", "changed"}, ...]}
with status pending, running, finished, failed or interrupted. plots/plot_training.py reads it.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import Parser, group_sizes, integer, run  # noqa: E402
from Gradient_evaluation.errors import UserError  # noqa: E402
from Gradient_evaluation.runs.files import one_line_errors, write_json  # noqa: E402
from Gradient_evaluation.runs.oracle_table import ADDED_LATER  # noqa: E402
from Policy_Optimization.settings import BUDGETS, SETTINGS, training_law  # noqa: E402

STATUSES = ("pending", "running", "finished", "failed", "interrupted")
IN_TRAINING = {  # entry of the law -> how the training sets it
    "model": "MODEL",
    "temperature": "TEMPERATURE",
    "max_new_tokens": "MAX_RESPONSE_LENGTH",
    "reward": "REWARD",
    "chat_template_kwargs": "CHAT_TEMPLATE_KWARGS",
    "top_p": "actor_rollout_ref.rollout.top_p",
    "top_k": "actor_rollout_ref.rollout.top_k",
}
DEFAULTS = {setting.name: setting.default for setting in SETTINGS}


def admissible_sizes(budgets: Sequence[int]) -> list[int]:
    """The powers of two from 2 up that divide every budget.

    >>> admissible_sizes([1024, 256, 128])
    [2, 4, 8, 16, 32, 64, 128]
    """
    common = math.gcd(*budgets)
    return [2**power for power in range(1, common.bit_length()) if common % 2**power == 0]


def recommended_sizes(results: Mapping[str, Any], name: str, budgets: Sequence[int]) -> list[int]:
    """The admissible sizes near the evaluation's recommendation, from ``group_size_law`` of its results file.

    Taken are its powers_of_two; without them the powers of two inside within_10_percent, and the one next to
    G_star on a logarithmic scale. Raises UserError, in one line, where there is no recommendation to follow.
    """
    law = results.get("group_size_law")
    if not isinstance(law, Mapping):
        raise UserError(f"{name}: holds no group_size_law, so nothing is recommended; give --group_sizes")
    allowed = admissible_sizes(budgets)
    listed, within, best = law.get("powers_of_two"), law.get("within_10_percent"), law.get("G_star")
    wanted = {size for size in listed if size in allowed} if isinstance(listed, list) else set()
    if not wanted and _is_interval(within):
        wanted = {size for size in allowed if within[0] <= size <= within[1]}
    if not wanted and _is_number(best) and best > 0:
        wanted = {min(allowed, key=lambda size: abs(math.log(size / best)))} if allowed else set()
    if not wanted and best is None and isinstance(reason := (law.get("reasons") or {}).get("G_star"), str):
        raise UserError(f"{name}: group_size_law recommends no size: {reason}; give --group_sizes")
    if not wanted:
        raise UserError(f"{name}: group_size_law recommends no admissible size ({allowed}); give --group_sizes")
    return sorted(wanted)


def check_same_law(results: Mapping[str, Any], name: str, training: Mapping[str, Any], allow_mismatch: bool) -> list[str]:
    """Warnings about the law the evaluation measured under and that of the training; UserError where they differ.

    A group size is recommended for the distribution it was measured on: another temperature, top_p, token limit, model,
    reward or chat template has another one. Under ``allow_mismatch`` a difference is a warning.
    """
    law = results.get("law")
    if not isinstance(law, Mapping):
        return [f"{name}: does not say under which law it was measured; taken as made under the training's"]
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
            f"{name}: {'; '.join(differences)}; measure under the training's law, train under the file's, or pass "
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
    """D/manifest.json, checked; UserError if it is missing or damaged."""
    path = sweep_dir / "manifest.json"
    manifest = read_json(path, "a manifest of sweep_group_size.sh is expected")
    runs = manifest.get("runs")
    keys = {"group_size": int, "seed": int, "run_dir": str, "status": str}
    good = isinstance(runs, list) and all(
        isinstance(each, dict) and all(isinstance(each.get(key), kind) for key, kind in keys.items()) for each in runs
    )
    if not good or any(each["status"] not in STATUSES for each in runs):
        raise UserError(f"{path}: its runs are damaged; remove it and start the sweep again, finished runs are kept")
    return manifest


def make_plan(sweep_dir: Path, sizes: Sequence[int], seeds: Sequence[int], budgets: Mapping[str, int]) -> dict:
    """Write the manifest with one run for each size and seed; runs it already holds keep their status.

    Raises UserError, before anything is written, for a size that does not divide a budget, and where the
    manifest was made with other budgets.
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
    for size in sizes:
        for seed in seeds:
            known.setdefault(
                (size, seed),
                {
                    "group_size": size,
                    "seed": seed,
                    "run_dir": f"g{size}_seed{seed}",
                    "status": "pending",
                    "exit_code": None,
                    "changed": None,
                },
            )
    manifest = {**budgets, "runs": [known[key] for key in sorted(known)]}
    with one_line_errors(sweep_dir, "write"):
        sweep_dir.mkdir(parents=True, exist_ok=True)
    write_json(sweep_dir / "manifest.json", manifest)
    return manifest


def mark(sweep_dir: Path, run_dir: str, status: str, exit_code: int | None) -> None:
    """Give one run of the manifest a new status."""
    manifest = read_manifest(sweep_dir)
    for each in manifest["runs"]:
        if each["run_dir"] == run_dir:
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            each.update(status=status, exit_code=exit_code, changed=now)
            write_json(sweep_dir / "manifest.json", manifest)
            return
    raise UserError(f"{sweep_dir}/manifest.json: holds no run {run_dir}")


def parse_args(arguments: Sequence[str] | None):
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = Parser(
        prog="sweep_group_size.sh",
        description="One training run for each group size and seed, at a fixed "
        "budget of continuations. Other settings of grpo_train.sh are given as environment variables.",
    )
    parser.add_argument("action", choices=("plan", "todo", "mark"), help="what the shell script asks for")
    parser.add_argument("--sweep_dir", type=Path, default=Path("outputs/sweep"), help="folder (%(default)s)")
    parser.add_argument("--group_sizes", nargs="+", help="sizes, for example 4 8 16 32 64 128 (the default)")
    parser.add_argument("--recommended", metavar="RESULTS.json", help="take the sizes near the evaluation's G*")
    parser.add_argument(
        "--allow_mismatch",
        action="store_true",
        help="take a recommendation that was measured under another law than the training's",
    )
    parser.add_argument("--seeds", nargs="+", type=integer(0), default=[0], help="one run each (default 0)")
    for _, name in BUDGETS:
        default = os.environ.get(name.upper(), "").strip() or str(DEFAULTS[name])
        parser.add_argument(f"--{name}", type=integer(1), default=default, help="see grpo_train.sh (%(default)s)")
    parser.add_argument("--run_dir", help="of mark: the run")
    parser.add_argument("--status", choices=STATUSES, help="of mark: its new status")
    parser.add_argument("--exit_code", type=int, help="of mark: of the launcher")
    options = parser.parse_args(arguments[:split])
    options.passed = arguments[split + 1 :]
    return options


def choose_sizes(options, budgets: Mapping[str, int]) -> list[int]:
    if options.recommended and options.group_sizes:
        raise UserError("--recommended and --group_sizes: give one of them")
    if options.recommended:
        results = read_json(options.recommended, "a results file of run_tracecov.py is expected")
        sizes = recommended_sizes(results, options.recommended, list(budgets.values()))
        law = training_law(os.environ, options.passed)
        for warning in check_same_law(results, options.recommended, law, options.allow_mismatch):
            if options.action == "plan":  # asked twice, said once
                print(f"warning: {warning}", file=sys.stderr)
        return sizes
    if options.group_sizes:
        try:
            return group_sizes(options.group_sizes)
        except UserError as error:
            raise UserError(str(error).replace("--K_list", "--group_sizes")) from None
    return [4, 8, 16, 32, 64, 128]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_args(arguments)
    budgets = {name: getattr(options, name) for _, name in BUDGETS}
    if options.action == "plan":
        sizes = choose_sizes(options, budgets)
        runs = make_plan(options.sweep_dir, sizes, sorted(set(options.seeds)), budgets)["runs"]
        finished = sum(each["status"] == "finished" for each in runs)
        print(f"{len(runs)} runs, {finished} of them finished; sizes {', '.join(map(str, sizes))}", file=sys.stderr)
    elif options.action == "todo":
        sizes = choose_sizes(options, budgets)
        for each in read_manifest(options.sweep_dir)["runs"]:
            asked = each["group_size"] in sizes and each["seed"] in options.seeds
            if asked and each["status"] != "finished":
                fields = (each["group_size"], each["seed"], each["run_dir"])
                sys.stdout.write("".join(f"{field}\0" for field in fields))
    else:
        mark(options.sweep_dir, options.run_dir, options.status, options.exit_code)


if __name__ == "__main__":
    run(main)
