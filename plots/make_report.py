"""One HTML file with every picture of a run, to send to a colleague: plots/results.ipynb, executed.

    python plots/make_report.py outputs/demo/tracecov_tiny_model.json
    python plots/make_report.py base.json instruct.json --training outputs/sweep/manifest.json --out report.html
    make report RESULTS=outputs/demo/tracecov_tiny_model.json

The first results file is the one reported, the others are drawn beside it. What a run has not left is one line at
the end. Images and style are inside the file, and it has no scripts: it opens anywhere, offline. Half a minute for 40
prompts on two busy cores.
"""

from __future__ import annotations

import copy
import html
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import Parser, importing, run
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine.files import one_line_errors, write_bytes_atomic

NOTEBOOK = Path(__file__).resolve().parent / "results.ipynb"

STYLE = """
body { max-width: 52rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.5 system-ui, sans-serif; color: #222; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; }
img { max-width: 100%; height: auto; } pre { white-space: pre-wrap; color: #444; font-size: 14px; }
code { background: #f2f2f2; padding: 0 0.2em; } .jp-InputPrompt, .jp-OutputPrompt { display: none; }
table { border-collapse: collapse; font-size: 14px; } caption { text-align: left; margin-bottom: 0.5em; }
td, th { padding: 0.3em 0.9em; border-top: 1px solid #ddd; text-align: right; } th:first-child { text-align: left; }
"""
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head>
<body>
<h1>{title}</h1>
{body}
{end}
</body></html>
"""
NOT_SHOWN = "not shown: "  # what notebook.picture prints before a reason


def execute(environment: Mapping[str, str], folder: Path = NOTEBOOK.parent):
    """plots/results.ipynb with the outputs of a fresh kernel of this Python; nothing is written.

    environment: variables that the kernel gets beside those of this process (RESULTS, COMPARE, TRAINING). folder: where
    the kernel starts. A UserError in a cell is raised again here; any other error in one is nbclient's CellExecutionError.
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
            # looks in no folder, so that the kernel is the Python that runs this and not one installed for the user
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            connection_file=f"{private}/kernel.json",
            **({} if os.name == "nt" else {"transport": "ipc"}),  # files in that folder instead of ports
        )
        try:
            hidden, place = not sys.stderr.isatty(), {"metadata": {"path": str(folder)}}
            with tqdm(desc="notebook", total=len(notebook.cells), unit="cell", leave=False, disable=hidden) as bar:
                client = NotebookClient(notebook, km=manager, timeout=None, resources=place)
                client.on_cell_complete = lambda cell, cell_index: bar.update(cell_index + 1 - bar.n)
                client.execute(env={**os.environ, **environment})
        except CellExecutionError as error:
            if error.ename == "UserError":
                raise UserError(error.evalue) from None
            raise
        finally:
            if manager.has_kernel:
                manager.shutdown_kernel(now=True)
    return notebook


def to_html(notebook, title: str) -> str:
    """An executed notebook's text and outputs, without its code, as one page of HTML without scripts.

    ``title`` replaces the notebook's own. A section with neither picture nor table is left out, and a line at the end
    names it with the reason.
    """
    from nbconvert import HTMLExporter

    page, left_out = copy.deepcopy(notebook), {}
    first, *sections = sections_of(page["cells"])
    first[0]["source"] = first[0]["source"].partition("\n")[2]
    page["cells"] = list(first)
    for cells in sections:
        reasons = _plain_reasons(cells)
        if any(_shows_something(cell) for cell in cells):
            page["cells"] += cells
        else:
            heading = cells[0]["source"].partition("\n")[0].lstrip("# ")
            left_out.setdefault("; ".join(reasons) or "nothing to show", []).append(heading)
    exporter = HTMLExporter(template_name="basic", exclude_input=True, exclude_output_prompt=True, exclude_anchor_links=True)
    body, _ = exporter.from_notebook_node(page)
    missing = "; ".join(f"{', '.join(headings)} ({reason})" for reason, headings in left_out.items())
    end = f"<p>Not in this report: {html.escape(missing)}.</p>" if missing else ""
    return PAGE.format(title=html.escape(title), style=STYLE, body=body, end=end)


def sections_of(cells: list) -> list[list]:
    """The cells, grouped: each group begins with a text cell that has a heading."""
    groups: list[list] = []
    for cell in cells:
        if not groups or cell["cell_type"] == "markdown" and cell["source"].startswith("#"):
            groups.append([])
        groups[-1].append(cell)
    return groups


def _shows_something(cell) -> bool:
    return any({"image/png", "text/html"} & set(output.get("data", {})) for output in cell.get("outputs", []))


def _plain_reasons(cells: list) -> list[str]:
    """Why parts of a section are not shown. What the author could do, behind a semicolon, is cut off in the cells."""
    reasons = {}
    for output in (output for cell in cells for output in cell.get("outputs", []) if output["output_type"] == "stream"):
        lines = output["text"].split("\n")
        lines = [line.partition("; ")[0] if line.startswith(NOT_SHOWN) else line for line in lines]
        output["text"] = "\n".join(lines)
        reasons |= {line.removeprefix(NOT_SHOWN): None for line in lines if line.startswith(NOT_SHOWN)}
    return list(reasons)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="make_report.py", description="Every picture of a run in one HTML file.")
    results = "results of run_tracecov.py; more than one: drawn beside the first"
    training = "training runs, as plot_training.py takes them (group_sizes.json beside the results)"
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS.json", help=results)
    parser.add_argument("--training", nargs="+", type=Path, default=[], metavar="SOURCE", help=training)
    parser.add_argument("--out", type=Path, help="file to write (report_NAME.html beside the first results)")
    flags = parser.parse_args(arguments)
    with importing():
        for package in ("matplotlib", "nbclient", "nbconvert"):  # found missing now, not after half a minute
            importlib.import_module(package)
        from Gradient_evaluation.runs.results.results_file import in_one_line, load_results

    reported, *_ = [load_results(path) for path in flags.results]
    for path in flags.training:
        if not path.exists():
            raise UserError(f"--training {path}: no such file or folder; give a run folder, a manifest.json or a log")
    first, *others = (path.resolve() for path in flags.results)
    name = first.stem.removeprefix("tracecov_")
    out = flags.out or first.with_name(f"report_{name}.html")
    lists = {"COMPARE": others, "TRAINING": [path.resolve() for path in flags.training]}
    variables = {each: json.dumps(list(map(str, paths))) for each, paths in lists.items()}  # any path: also one with a colon
    notebook = execute({"RESULTS": str(first), **variables})
    with one_line_errors(out, "write"):
        out.parent.mkdir(parents=True, exist_ok=True)
    title = f"GRPO gradient estimates: {in_one_line(reported, otherwise=name)}"
    write_bytes_atomic(out, to_html(notebook, title).encode())
    print(out)


if __name__ == "__main__":
    run(main)
