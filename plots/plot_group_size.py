"""Which group size? The predicted MSE of a minibatch gradient against G, its three terms, and the best G.

    python plots/plot_group_size.py outputs/demo/tracecov_tiny_model.json --out group_size.pdf
    python plots/plot_group_size.py base.json instruct.json --label base Instruct --budget 1024 --out group_size.png

Each results file (written by Gradient_evaluation/run_tracecov.py) is one panel. Without --budget the axis is MSE times the
number N of continuations per step, for which N need not be known. Runs in seconds. The drawing is in group_size.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import Parser, importing, integer, run


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="plot_group_size.py", description="Predicted MSE of a minibatch gradient against G.")
    parser.add_argument("results", nargs="+", metavar="RESULTS.json", help="results of run_tracecov.py, one panel each")
    parser.add_argument("--out", required=True, help="figure to write; .pdf and .svg are vector, .png is not")
    parser.add_argument("--label", nargs="+", help="one title for each results file (default: its file name)")
    parser.add_argument("--budget", type=integer(2), help="continuations per step, for the MSE itself")
    flags = parser.parse_args(arguments)
    with importing():
        from Gradient_evaluation.runs.results.results_file import check_group_size_law, load_results
        from plots.group_size import HEIGHT, plot_group_size
        from plots.style import save_figure, side_by_side

    group_size_laws = [load_results(path).get("group_size_law") for path in flags.results]
    for path, each in zip(flags.results, group_size_laws):
        check_group_size_law(each, path)
    labels = flags.label or [Path(path).stem.removeprefix("tracecov_") for path in flags.results]
    figure, _ = side_by_side(plot_group_size, group_size_laws, labels, HEIGHT, budget=flags.budget)
    print(save_figure(figure, flags.out))


if __name__ == "__main__":
    run(main)
