"""--until against the published design: the time to G* within +-25%, and --plan's forecast against what then happened.

    OMP_NUM_THREADS=1 .venv/bin/python tests/bench_until.py                        # the shipped tiny model
    .venv/bin/python tests/bench_until.py --model /tmp/smollm --minutes 60        # another model, each run at most so long

Both designs measure the same prompts, one after the other on this machine, and stop by the same rule. The published design has
16 x 64 continuations of each prompt. For every seed the plan is made from the pilot, and the run that follows is compared
with it. Writes outputs/bench/until.json. Not collected by pytest.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.make_arithmetic import make_problems, write_jsonl
from Gradient_evaluation.cli import Parser, integer, number, run
from Gradient_evaluation.runs.machine import gram_store

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "Gradient_evaluation" / "run_tracecov.py"


def measured(args, out: Path, *flags) -> tuple[dict | None, float, str]:
    """(the entry ``stopping``, seconds, what was printed) of one call."""
    command = [sys.executable, SCRIPT, "--model", args.model, "--dataset", args.out / "problems.jsonl", "--save_json", out]
    begun = time.monotonic()
    done = subprocess.run([*map(str, (*command, "--skip_plot", *flags))], capture_output=True, text=True)
    seconds = time.monotonic() - begun
    if done.returncode:
        print(done.stderr, file=sys.stderr)
    results = next(out.glob("tracecov_*[!d].json"), None)
    return json.loads(results.read_text())["stopping"] if results else None, seconds, done.stdout


def loop_seconds(out: Path) -> float:
    """Seconds from the first Gram to the last, and as many more as one takes: without loading and results."""
    times = sorted(path.stat().st_mtime for path in (out / "grams").glob("*.npz"))
    return (times[-1] - times[0]) * len(times) / (len(times) - 1)


def forecasts(args) -> list[dict]:
    """For each seed the plan's number of prompts, seconds and width, and the run's."""
    found = []
    for seed in range(args.seeds):
        out = args.out / f"seed{seed}"
        shutil.rmtree(out, ignore_errors=True)
        flags = ("--seed", seed, "--until", args.until, *(("--minutes", args.minutes) if args.minutes else ()))
        printed = measured(args, out, *flags, "--plan")[2]
        planned = re.search(r"about ([\d,]+) prompts? with (\d+) continuations of each", printed)
        table = re.findall(r"^ +(\d+) +(\d+) +(\S+ \S+) +\+-(\d+)%", printed, re.M)
        stopping, seconds, _ = measured(args, out, *flags)
        if not planned or stopping is None:
            continue
        n, T = int(planned[2]), stopping["n_prompts"]
        spread = json.loads((out / "grams" / "run.json").read_text())["pilot"]
        # the plan's width falls as 1/sqrt(T), so any row of its table gives the width at the T that was reached
        T0, width0 = next((int(a), int(d) / 100) for a, b, _, d in table if int(b) == n)
        per_prompt = spread["seconds_per_prompt"] + n * spread["seconds_per_continuation"]
        found.append(
            {
                "seed": seed,
                "continuations": n,
                "planned_prompts": int(planned[1].replace(",", "")),
                "prompts": T,
                "reached": stopping["reached"],
                "planned_width": width0 * (T0 / T) ** 0.5,
                "width": stopping["half_width"],
                "planned_seconds": per_prompt * T,
                "seconds": loop_seconds(out),
                "wall_seconds": seconds,
            }
        )
        print(found[-1], flush=True)
    return found


def main() -> None:
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=str(ROOT / "data" / "tiny_model"))
    parser.add_argument("--until", type=number(0, 1, low_included=False), default=0.25)
    parser.add_argument("--minutes", type=number(0, low_included=False))
    parser.add_argument("--prompts", type=integer(20), default=500)
    parser.add_argument("--seeds", type=integer(1), default=10)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench" / "until")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(make_problems(args.prompts, 0), args.out / "problems.jsonl")
    limits = ("--minutes", args.minutes) if args.minutes else ()
    result: dict = {"model": args.model, "until": args.until}
    for name, flags in (("until", ()), ("published", ("--M", 16, "--gen_bs", 256))):
        out = args.out / name
        shutil.rmtree(out, ignore_errors=True)
        stopping, seconds, _ = measured(args, out, "--until", args.until, *limits, *flags)
        first = next((out / "grams").glob("*.npz"))
        result[name] = {
            "wall_seconds": seconds,
            "loop_seconds": loop_seconds(out),
            "continuations_of_a_prompt": gram_store.n_drawn(first),
            **{key: stopping[key] for key in ("reached", "n_prompts", "value", "interval", "half_width", "more_prompts")},
        }
        print(name, result[name], flush=True)
        (args.out / "until.json").write_text(json.dumps(result, indent=1))
    result["ratio"] = {key: result["published"][key] / result["until"][key] for key in ("wall_seconds", "loop_seconds")}
    print("published over until:", result["ratio"], flush=True)
    result["forecasts"] = each = forecasts(args)
    for name in ("width", "seconds"):
        errors = [abs(one[name] / one[f"planned_{name}"] - 1) for one in each if one[name]]
        result[f"median_error_of_{name}"] = statistics.median(errors) if errors else None
    (args.out / "until.json").write_text(json.dumps(result, indent=1))
    print({name: value for name, value in result.items() if name.startswith("median")})


if __name__ == "__main__":
    run(main)
