"""What the cells of plots/results.ipynb call: where things are, what is missing, and a figure as an image.

    RESULTS = setting("RESULTS", "outputs/demo/tracecov_tiny_model.json")      # a path, or several with settings()
    picture(plot_ratio, measured)                                              # an image, or one line that says why not

Needs IPython, which every notebook has. Nothing is looked for outside this machine.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from Gradient_evaluation.errors import UserError
from plots.describe import in_one_line
from plots.measurement import Measurement
from plots.plot_training import plot_training
from plots.style import new_figure
from plots.summary import headline
from plots.training_logs import load_runs

ROOT = Path(__file__).resolve().parents[1]
PIXELS_PER_INCH = 240
SHOWN_PER_INCH = 150  # on the page


def setting(name: str, default: str | None = None) -> Path | None:
    """The path in the environment variable ``name``, else ``default``; relative ones start at the repository's root."""
    value = os.environ.get(name) or default
    return ROOT / value if value else None


def settings(name: str) -> list[Path]:
    """The paths in the environment variable ``name``; [] without it.

    Separated as in PATH (``:``; ``;`` on Windows), or a JSON list, which takes any path: ``["a:b/tracecov.json"]``.
    """
    text = os.environ.get(name, "")
    try:
        values = json.loads(text) if text.startswith("[") else text.split(os.pathsep)
    except ValueError:  # a path that begins with a bracket
        values = text.split(os.pathsep)
    return [ROOT / value for value in values if value]


def plot_training_beside(results: Path):
    """Accuracy of the training runs by step and by group size; returns (figure, axes).

    The runs are those in the variable TRAINING, else group_sizes.json beside the results. UserError without any.
    """
    sources = settings("TRAINING")
    if not sources and (results.parent / "group_sizes.json").is_file():
        sources = [results.parent / "group_sizes.json"]
    if not sources:
        raise UserError("there are no training runs; name them in the variable TRAINING, see plots/plot_training.py")
    return plot_training([each for source in sources for each in load_runs(source)])


def picture(draws: Callable | Sequence[Callable], *arguments, **keywords):
    """Call one plot function, or several on panels of one figure, with the same arguments → an IPython image.

    A panel that cannot be drawn (a UserError) is left out, and its reason is printed, once; None where none is left.
    """
    draws, usable, figure, heights, reasons = [draws] if callable(draws) else draws, [], None, [], {}
    for draw in draws:
        try:
            figure = draw(*arguments, **keywords)[0]
            usable.append(draw)
            heights.append(figure.get_size_inches()[1])
        except UserError as error:
            reasons[f"not shown: {error}"] = None
    if reasons:
        print("\n".join(reasons))
    if len(usable) > 1:
        figure, axes = new_figure(len(usable), height=max(heights))
        for draw, ax in zip(usable, axes):
            draw(*arguments, **keywords, ax=ax)
    return as_image(figure, " ".join(_about(draw) for draw in usable)) if usable else None


def as_image(figure: Figure, about: str = ""):
    """A figure as an IPython image, sharp on a screen of high resolution, with the text a screen reader reads."""
    from IPython.display import Image

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=PIXELS_PER_INCH, bbox_inches="tight", pad_inches=0.03)
    data = buffer.getvalue()
    width = int.from_bytes(data[16:20], "big")  # of the PNG header
    return Image(data, width=round(width * SHOWN_PER_INCH / PIXELS_PER_INCH), alt=about)


def _about(draw: Callable) -> str:
    return (draw.__doc__ or "").strip().split("\n")[0].split("; returns")[0]


def summary(measured: Measurement):
    """Model, law, sizes and, in large letters, the best group size, as IPython HTML; what is missing is printed."""
    from IPython.display import HTML

    results = measured.results
    if isinstance(measured.grams, str):
        print(f"note: {measured.grams}")
    elif results.get("n_prompts") not in (None, len(measured.grams)):
        print(f"note: the Grams are of {len(measured.grams)} prompts, the results of {results['n_prompts']}")
    return HTML(headline(results, in_one_line(results, measured.label)))
