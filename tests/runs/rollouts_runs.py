"""How the tests measure rollouts: the script's call, and rows of the format that are easy to change."""

import json

from scripts import FLAGS, call

from Gradient_evaluation import run_tracecov
from Gradient_evaluation.runs.inputs.dataset import file_records


def measure(policy, paths, out, *more, capsys=None):
    """run_tracecov.py --rollouts under the law of the other tests."""
    model = ("--model", policy, "--rollouts", *paths, "--save_json", out, "--skip_plot")
    return call(run_tracecov, *model, *FLAGS, *more, capsys=capsys)


def rows_in(folder):
    """The rows of every file of a folder of --save_rollouts, as the format has them."""
    return [record for path in sorted(folder.glob("*.parquet")) for _, record in file_records(path)]


def written(rows, path):
    """The rows as a JSONL file → its path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
