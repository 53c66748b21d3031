"""How the tests run both scripts, in this process or as other processes, and read what they write."""

import json
import subprocess
import sys
import time
from pathlib import Path

from Gradient_evaluation import calculate_oracle_v, cli, run_tracecov

ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ["13", "2", "321", "31", "122"]
ANSWERS = [33, 22, 33, 11, 33]
FLAGS = "--dtype float64 --device cpu --max_new_tokens 2 --top_p 0.9 --temperature 1.3".split()
ORACLE, TRACECOV = (ROOT / "Gradient_evaluation" / name for name in ("calculate_oracle_v.py", "run_tracecov.py"))
RESULTS = "tracecov_four tokens.json"


def call(script, *arguments, capsys=None):
    """Run a script's main in this process → (exit code, stdout, stderr)."""
    argv, sys.argv = sys.argv, [script.__file__, *map(str, arguments)]
    try:
        cli.run(script.main)
        code = 0
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = argv
    captured = capsys.readouterr() if capsys else None
    return code, captured and captured.out, captured and captured.err


def one_line_error(outcome, *parts):
    """``call`` ended with exit code 2 and one line on stderr that has every part."""
    code, _, err = outcome
    assert code == 2, err
    assert err.count("\n") == 1 and err.startswith("error: ") and all(part in err for part in parts), err


def oracle(policy, problems, out, *more, capsys=None):
    return call(calculate_oracle_v, *oracle_flags(policy, problems, out, *more)[1:], capsys=capsys)


def tracecov(policy, table, out, *more, capsys=None):
    model = ("--model", policy, "--oracle_table", table)
    return call(run_tracecov, *model, "--save_json", out, "--skip_plot", *FLAGS, *more, capsys=capsys)


def from_grams(grams, out, *more, capsys=None):
    return call(run_tracecov, "--from_grams", grams, "--save_json", out, "--skip_plot", *more, capsys=capsys)


def read(path):
    return json.loads(Path(path).read_text())


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def detailed_rows(path):
    """The prompts of a detailed file, in the order of the oracle table."""
    return sorted(read(path)["prompt_results"], key=lambda row: row["table_row"])


def oracle_flags(policy, problems, out, *more):
    return [ORACLE, "--model", policy, "--dataset", problems, "--n_oracle", 400, "--out_dir", out, *FLAGS, *more]


def tracecov_flags(policy, table, out, *more):
    made = ("--K_list", 4, 8, "--M", 3)
    return [TRACECOV, "--model", policy, "--oracle_table", table, "--save_json", out, "--skip_plot", *made, *FLAGS, *more]


def start(flags, **settings):
    """One of the scripts as another process."""
    return subprocess.Popen(
        [sys.executable, *map(str, flags)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings
    )


def ended(process, limit=300):
    out, err = process.communicate(timeout=limit)
    return process.returncode, out, err


def torchrun(flags, processes=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return ended(subprocess.Popen([*command, *map(str, flags)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))


def wait_for(condition, process):
    deadline = time.monotonic() + 240
    while True:
        over = process.poll() is not None  # asked first: it may end between the two questions
        if condition():
            return
        assert not over and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)


def held_by(lock, process):
    try:
        return str(process.pid) in lock.read_text()
    except FileNotFoundError:
        return False


def files_of(folder):
    """{name: content} of a folder of results, without its times and paths."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
            if path.name == RESULTS:
                results = read(path)
                found[str(path.relative_to(folder))] = {
                    **results,
                    "seconds": 0,
                    "config": {**results["config"], "save_json": 0, "plot_path": 0},
                }
    return found
