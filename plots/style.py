"""How the figures of this repository look: one colour, marker and line per curve, and how a figure is written.

Colours are Okabe and Ito's (safe for colour-blind readers); markers and dashes tell curves apart in grey.
Nothing here touches matplotlib's global settings.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure

from Gradient_evaluation.cli import UserError


class Curve(NamedTuple):
    """The look of one curve: its name in the legend, and matplotlib's colour, marker and line style."""

    label: str
    colour: str
    marker: str
    line: str


CURVES = {
    "naive": Curve("vanilla", "#D55E00", "s", "--"),
    "grpo": Curve("GRPO", "#0072B2", "o", "-"),
    "oracleV": Curve("oracle V(x)", "#009E73", "^", "-."),
    "best_baseline": Curve("floor: best prompt-only baseline", "#000000", "x", ":"),
}


def new_figure(n_panels: int = 1, width: float = 5.0, height: float = 3.8):
    """A figure without pyplot state and its panels side by side: (figure, (n_panels,) array of axes)."""
    figure = Figure(figsize=(width * n_panels, height), layout="constrained")
    return figure, figure.subplots(1, n_panels, squeeze=False)[0]


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write the figure in the format of the suffix (.pdf and .svg are vector); missing folders are made.

    Raises UserError for a suffix matplotlib cannot write or a place that cannot be written.
    """
    path = Path(path)
    suffixes = figure.canvas.get_supported_filetypes()
    if path.suffix.lstrip(".").lower() not in suffixes:
        raise UserError(f"{path}: cannot write this kind of file; end the name in one of .{', .'.join(suffixes)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=200)
    except OSError as error:
        raise UserError(f"{path}: cannot write the figure ({error.strerror or error}); choose another place") from None
    return path
