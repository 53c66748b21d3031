"""One HTML file with every picture of a run, to send to a colleague: plots/results.ipynb, executed.

    python plots/make_report.py outputs/demo/tracecov_tiny_model.json
    python plots/make_report.py base.json instruct.json --training outputs/sweep/manifest.json --out report.html
    make report RESULTS=outputs/demo/tracecov_tiny_model.json

The first results file is the one reported, the others are drawn beside it. What a run has not left is one line at the
end. Images and style are inside the file, and it has no scripts: it opens anywhere, offline. Half a minute for 40
prompts on two busy cores.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import one_line_while_importing  # noqa: E402

if __name__ == "__main__":
    one_line_while_importing()

from Gradient_evaluation.cli import Parser, run  # noqa: E402
from Gradient_evaluation.errors import UserError  # noqa: E402
from Gradient_evaluation.runs.files import one_line_errors, write_bytes_atomic  # noqa: E402
from plots.describe import in_one_line  # noqa: E402
from plots.plot_tracecov import load_results  # noqa: E402
from plots.report_page import to_html  # noqa: E402

NOTEBOOK = Path(__file__).resolve().parent / "results.ipynb"


def execute(environment: Mapping[str, str], folder: Path = NOTEBOOK.parent):
    """plots/results.ipynb as a notebook with the outputs of a fresh kernel of this Python; nothing is written.

    environment: variables the kernel gets beside this process's own (RESULTS, COMPARE, TRAINING). folder: where the
    kernel starts. Raises UserError where a cell does, and nbclient's CellExecutionError where one fails otherwise.
    """
    import nbformat
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import KernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    from tqdm import tqdm

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory(prefix="report-") as private:
        manager = KernelManager(
            kernel_name="python3",
            # no folders to look in: the kernel is the Python that runs this, not one that is installed for the user
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            connection_file=f"{private}/kernel.json",
            **({} if os.name == "nt" else {"transport": "ipc"}),  # files in that folder instead of ports
        )
        try:
            with tqdm(
                desc="notebook", total=len(notebook.cells), unit="cell", leave=False, disable=not sys.stderr.isatty()
            ) as bar:
                client = NotebookClient(
                    notebook,
                    km=manager,
                    timeout=None,
                    resources={"metadata": {"path": str(folder)}},
                    on_cell_complete=lambda cell, cell_index: bar.update(cell_index + 1 - bar.n),
                )
                client.execute(env={**os.environ, **environment})
        except CellExecutionError as error:
            if error.ename == "UserError":
                raise UserError(error.evalue) from None
            raise
        finally:
            if manager.has_kernel:
                manager.shutdown_kernel(now=True)
    return notebook


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="make_report.py", description="Every picture of a run in one HTML file.")
    parser.add_argument(
        "results",
        nargs="+",
        type=Path,
        metavar="RESULTS.json",
        help="results of run_tracecov.py; more than one: drawn beside the first",
    )
    parser.add_argument(
        "--training",
        nargs="+",
        type=Path,
        default=[],
        metavar="SOURCE",
        help="training runs, as plot_training.py takes them (group_sizes.json beside the results)",
    )
    parser.add_argument("--out", type=Path, help="file to write (report_NAME.html beside the first results)")
    flags = parser.parse_args(arguments)
    reported, *_ = [load_results(path) for path in flags.results]
    for path in flags.training:
        if not path.exists():
            raise UserError(f"--training {path}: no such file or folder; give a run folder, a manifest.json or a log")
    first, *others = (path.resolve() for path in flags.results)
    name = first.stem.removeprefix("tracecov_")
    out = flags.out or first.with_name(f"report_{name}.html")
    try:
        import nbclient  # noqa: E401, F401
        import nbconvert
    except ImportError as error:
        raise UserError(f"the report needs the package {error.name}; pip install -r requirements.txt") from None
    notebook = execute(
        {
            "RESULTS": str(first),
            "COMPARE": json.dumps([str(path) for path in others]),  # any path: also one with a colon
            "TRAINING": json.dumps([str(path.resolve()) for path in flags.training]),
        }
    )
    with one_line_errors(out, "write"):
        out.parent.mkdir(parents=True, exist_ok=True)
    title = f"GRPO gradient estimates: {in_one_line(reported, otherwise=name)}"
    write_bytes_atomic(out, to_html(notebook, title).encode())
    print(out)


if __name__ == "__main__":
    run(main)
