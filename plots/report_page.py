"""Executes plots/results.ipynb and makes the page a colleague reads: what there is to show, one line on what is missing."""

from __future__ import annotations

import copy
import html
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter
from tqdm import tqdm

from Gradient_evaluation.errors import UserError

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
