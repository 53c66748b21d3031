"""How the figures of this repository look: one colour, marker and line per curve, and how a figure is written.

Colours are Okabe and Ito's (safe for colour-blind readers); markers and dashes tell curves apart in grey. A panel is
as wide as the column of a paper, so that its letters are printed at the size they have here.
Nothing here touches matplotlib's global settings.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator, StrMethodFormatter

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine.files import one_line_errors, write_bytes_atomic
from Gradient_evaluation.stats.estimators import label_of


class Curve(NamedTuple):
    """The look of one curve: its name in the legend, and matplotlib's colour, marker and line style."""

    label: str
    colour: str
    marker: str
    line: str

    @property
    def look(self) -> dict:
        """These four as keywords of matplotlib's plot and errorbar."""
        return {"label": self.label, "color": self.colour, "marker": self.marker, "linestyle": self.line}


CURVES = {
    "naive": Curve(label_of("naive"), "#D55E00", "s", "--"),
    "grpo": Curve(label_of("grpo"), "#0072B2", "o", "-"),
    "oracleV": Curve(label_of("oracleV"), "#009E73", "^", "-."),
    "best_baseline": Curve(label_of("best_baseline"), "#000000", "x", ":"),
}

# For curves that are told apart by number: a run, a group size, a file.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":")

UNDRAWABLE = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")  # all but the line break

COLUMN = 3.5  # inches: one column of a two-column page


def numbered(number: int, label: str = "") -> Curve:
    """The look of the ``number``-th of several curves, from 0."""
    kinds = (COLOURS, MARKERS, LINES)
    # matplotlib leaves a curve out of the legend where its name begins with an underscore
    label = f" {label}" if label.startswith("_") else label
    return Curve(label, *(kind[number % len(kind)] for kind in kinds))


def new_figure(n_panels: int = 1, width: float = COLUMN, height: float = 2.9, in_a_row: int | None = None):
    """A figure without pyplot state and its panels, all in a row or ``in_a_row``: (figure, (n_panels,) array of axes).

    width, height: of one panel, in inches.
    """
    columns = in_a_row or n_panels
    rows = -(-n_panels // columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).ravel()[:n_panels]


def new_ax(ax=None, **size):
    """``ax`` itself, or where it is None the only panel of a new figure of ``size``."""
    return new_figure(**size)[1][0] if ax is None else ax


def check_labels(labels: Sequence[str], several: Sequence) -> None:
    """UserError unless there is one label for each of several results files."""
    if len(labels) != len(several):
        raise UserError(f"--label: give one label for each results file ({len(several)} files, {len(labels)} labels)")


def side_by_side(draw: Callable, several: Sequence, labels: Sequence[str], height: float, **settings):
    """One panel for each of several results, each with its own y axis; returns (figure, (n,) array of axes).

    draw: a plot function, called with one of them, its ``ax``, its ``label`` and the ``settings``.
    """
    check_labels(labels, several)
    figure, axes = new_figure(len(several), height=height)
    for ax, each, label in zip(axes, several, labels):
        draw(each, ax=ax, label=label, **settings)
    return figure, axes


def group_size_axis(ax, sizes: Sequence[int]) -> None:
    """Group size on x in log2, a tick at each of ``sizes`` (at most eight of them, evenly chosen)."""
    ax.set_xscale("log", base=2)
    shown = list(sizes)[:: -(-len(sizes) // 8)]
    ax.xaxis.set_major_locator(FixedLocator(shown))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))


def finish(ax, title: str | None = None, /, **legend) -> None:
    """Faint grid, title if there is one, and a legend (``legend``: matplotlib's settings) if a curve has a name.

    Call it last: every text of the panel is then drawn letter for letter (``as_written``).
    """
    ax.grid(True, alpha=0.3, linewidth=0.6)
    if title:
        ax.set_title(title)
    if ax.get_legend_handles_labels()[1]:
        as_written(ax.legend(**{"frameon": False, "fontsize": "small", **legend}))
    # numbers at ticks may be formulas, 10^2 say; names at ticks (set_xticks makes them a function) are not
    named = [axis for axis in (ax.xaxis, ax.yaxis) if isinstance(axis.get_major_formatter(), FuncFormatter)]
    as_written(ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts, *(text for axis in named for text in axis.get_ticklabels()))


def as_written(*artists) -> None:
    """Draw every text in these artists letter for letter, never as a formula: names of files and models may hold a dollar.

    What no font and no SVG file can hold (half a character, a control character) becomes a question mark.
    """
    for text in (text for artist in artists for text in artist.findobj(Text)):
        text.set_parse_math(False)
        text.set_text(UNDRAWABLE.sub("?", text.get_text()))


def note(ax, text: str) -> None:
    """Small text below the label of the x axis, in lines short enough for one column; nothing for an empty text."""
    if text:
        below = {"xycoords": ax.xaxis.label, "xytext": (0, -3), "textcoords": "offset points", "ha": "center", "va": "top"}
        ax.annotate(short_lines(text), (0.5, 0), fontsize="small", **below)


def short_lines(text: str, width: int = 46) -> str:
    """The text with its lines broken to ``width`` letters, behind a colon first.

    >>> short_lines("floor: raise --M or lower --block_size", 36)
    'floor:\\nraise --M or lower --block_size'
    """
    whole = [line if len(line) <= width else line.replace(": ", ":\n", 1) for line in text.split("\n")]
    return "\n".join(short for line in "\n".join(whole).split("\n") for short in textwrap.wrap(line, width))


def bars_of(values: Sequence[float], intervals: Sequence[Sequence[float] | None]) -> list[list[float]]:
    """matplotlib's error bars [below, above] of values and intervals [low, high]; 0 where there is no interval.

    A bar cannot point inwards: where an interval leaves out its value, that side is 0.
    """
    ends = [[value, value] if interval is None else interval for value, interval in zip(values, intervals)]
    below = [max(0.0, value - low) for value, (low, _) in zip(values, ends)]
    above = [max(0.0, high - value) for value, (_, high) in zip(values, ends)]
    return [below, above]


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write the figure in the format of the suffix (.pdf and .svg are vector), whole or not at all; make missing folders.

    Raises UserError for a suffix that matplotlib cannot write, or where nothing can be written.
    """
    path = Path(path)
    kind, kinds = path.suffix.lstrip(".").lower(), figure.canvas.get_supported_filetypes()
    if kind not in kinds:
        raise UserError(f"{path}: cannot write this kind of file; end the name in one of .{', .'.join(kinds)}")
    drawn = io.BytesIO()
    figure.savefig(drawn, format=kind, dpi=200, bbox_inches="tight", pad_inches=0.03)  # legends beside an ax included
    with one_line_errors(path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(path, drawn.getvalue())
    return path
