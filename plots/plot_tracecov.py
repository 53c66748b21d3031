"""The paper's figure: MSE of vanilla, GRPO and oracle gradients against the group size, and the floor.

    python plots/plot_tracecov.py outputs/tracecov_base.json --out figure.pdf
    python plots/plot_tracecov.py base.json instruct.json few_shot.json --label base Instruct few-shot --out figure.pdf
    python plots/plot_tracecov.py base.json instruct.json --by_estimator --out figure.pdf

Each results file (written by Gradient_evaluation/run_tracecov.py) is one panel, its legend headed by model and sampling
law. With --by_estimator each estimator is one panel and each file one curve, and one legend names model and sampling law of
each. Runs in seconds. The drawing is in tracecov.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import Parser, importing, run


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="plot_tracecov.py", description="MSE of gradient estimators against the group size.")
    parser.add_argument("results", nargs="+", metavar="RESULTS.json", help="results of run_tracecov.py, one panel each")
    parser.add_argument("--out", required=True, help="figure to write; .pdf and .svg are vector, .png is not")
    parser.add_argument("--label", nargs="+", help="one title for each results file (default: its file name)")
    parser.add_argument("--log_y", action="store_true", help="logarithmic MSE axis (default: linear)")
    by_estimator = "a panel for each estimator and a curve for each file, MSE logarithmic"
    parser.add_argument("--by_estimator", action="store_true", help=by_estimator)
    flags = parser.parse_args(arguments)
    with importing():
        from Gradient_evaluation.runs.results.results_file import load_results
        from plots.style import save_figure, side_by_side
        from plots.tracecov import plot_by_estimator, plot_tracecov

    loaded = [load_results(path) for path in flags.results]
    if flags.by_estimator:
        figure, _ = plot_by_estimator(loaded, flags.label)
    else:
        labels = flags.label or [Path(path).stem.removeprefix("tracecov_") for path in flags.results]
        figure, _ = side_by_side(plot_tracecov, loaded, labels, height=3.1, log_y=flags.log_y)
    print(save_figure(figure, flags.out))


if __name__ == "__main__":
    run(main)
