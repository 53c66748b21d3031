"""One HTML file with every picture of a run, to send to a colleague: plots/results.ipynb, executed.

    python plots/make_report.py outputs/demo/tracecov_tiny_model.json
    python plots/make_report.py base.json instruct.json --training outputs/sweep/manifest.json --out report.html
    make report RESULTS=outputs/demo/tracecov_tiny_model.json

The first results file is the one reported, the others are drawn beside it. What a run has not left is one line at
the end. Images and style are inside the file, and it has no scripts: it opens anywhere, offline. Half a minute for 40
prompts on two busy cores.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import Parser, importing, run
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.files import one_line_errors, write_bytes_atomic


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="make_report.py", description="Every picture of a run in one HTML file.")
    results = "results of run_tracecov.py; more than one: drawn beside the first"
    training = "training runs, as plot_training.py takes them (group_sizes.json beside the results)"
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json", help=results)
    parser.add_argument("--training", nargs="+", type=Path, default=[], metavar="SOURCE", help=training)
    parser.add_argument("--out", type=Path, help="file to write (report_NAME.html beside the first results)")
    flags = parser.parse_args(arguments)
    with importing():
        from Gradient_evaluation.runs.results import in_one_line, load_results
        from plots.report_page import execute, to_html

    reported, *_ = [load_results(path) for path in flags.results]
    for path in flags.training:
        if not path.exists():
            raise UserError(f"--training {path}: no such file or folder; give a run folder, a manifest.json or a log")
    first, *others = (path.resolve() for path in flags.results)
    name = first.stem.removeprefix("tracecov_")
    out = flags.out or first.with_name(f"report_{name}.html")
    lists = {"COMPARE": others, "TRAINING": [path.resolve() for path in flags.training]}
    variables = {name: json.dumps(list(map(str, paths))) for name, paths in lists.items()}  # any path: also one with a colon
    notebook = execute({"RESULTS": str(first), **variables})
    with one_line_errors(out, "write"):
        out.parent.mkdir(parents=True, exist_ok=True)
    title = f"GRPO gradient estimates: {in_one_line(reported, otherwise=name)}"
    write_bytes_atomic(out, to_html(notebook, title).encode())
    print(out)


if __name__ == "__main__":
    run(main)
