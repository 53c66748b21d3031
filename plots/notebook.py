"""What the cells of plots/results.ipynb call: where things are, the numbers in words and a table, a figure as an image.

    RESULTS = setting("RESULTS", "outputs/demo/tracecov_tiny_model.json")      # a path, or several with settings()
    summary(measured)                                                          # the best group size, in large letters
    picture(plot_ratio, measured)                                              # an image, or one line that says why not
    mse_table(measured.results)                                                # HTML

Needs IPython, which every notebook has. Nothing is looked for outside this machine.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.results.report import at_least
from Gradient_evaluation.runs.results.results_file import DRAWN, counted, curve_of, in_one_line, label_in
from Gradient_evaluation.runs.results.text import value_text
from plots.measurement import Measurement
from plots.plot_training import plot_training
from plots.style import CURVES, new_figure
from plots.training_logs import load_runs

ROOT = Path(__file__).resolve().parents[1]
PIXELS_PER_INCH = 240
SHOWN_PER_INCH = 150  # on the page


def setting(name: str, default: str) -> Path:
    """The path in the environment variable ``name``, else ``default``; relative ones start at the repository's root."""
    return ROOT / (os.environ.get(name) or default)


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
    """Call one plot function, or several on panels of one figure, with the same arguments; returns an IPython image.

    A panel that cannot be drawn (a UserError) is left out and its reason printed, each reason once. None if no panel is left.
    """
    usable, figure, heights, reasons = [], None, [], {}
    for draw in [draws] if callable(draws) else draws:
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
    """The best group size in large letters, model, sampling law and sizes, as IPython HTML; prints what is missing."""
    from IPython.display import HTML

    results = measured.results
    if isinstance(measured.grams, str):
        print(f"note: {measured.grams}")
    elif results.get("n_prompts") not in (None, len(measured.grams)):
        print(f"note: the Grams are of {counted(len(measured.grams), 'prompt')}, the results of {results['n_prompts']}")
    return HTML(headline(results, in_one_line(results, measured.label)))


def headline(results: dict, title: str) -> str:
    """What a reader wants to know first, as HTML: the best group size, then what it is of."""
    best, _, more = group_size_in_words(results.get("group_size_law")).partition("; ")
    nouns = [noun for noun in ("prompt", "continuation") if results.get(f"n_{noun}s")]
    counts = ", ".join(counted(results[f"n_{noun}s"], noun) for noun in nouns)
    lines = [more, f"measured on {title}: {counts or 'the number of prompts is not in the results'}"]
    return f'<p style="font-size: 1.4em; margin: 0.8em 0 0.3em">{_sentence(best)}</p>\n' + "\n".join(
        f"<p>{_sentence(line)}</p>" for line in lines if line
    )


def _sentence(text: str) -> str:
    return f"{escape(text[:1].upper() + text[1:])}."


def group_size_in_words(group_size_law: dict | None) -> str:
    """``"best group size to train with: G* = 5.84 [4.84, 7]; G = 4 to 10 are within 10% of ..."``, or why there is none.

    group_size_law: the group-size law of the results.
    """
    group_size_law = group_size_law or {}
    if group_size_law.get("G_star") is None:
        reason = (group_size_law.get("reasons") or {}).get("G_star", "the results hold no group-size law")
        words = f"best group size to train with: not computed ({reason})"
        if group_size_law.get("G_star_at_least"):
            words += f"; {at_least(group_size_law)}"
        return words + _almost_best(group_size_law)
    ends = group_size_law.get("G_star_ci95")
    interval = "" if not ends else " [{}, {}]".format(*("unbounded" if end is None else f"{end:.3g}" for end in ends))
    words = f"best group size to train with: G* = {group_size_law['G_star']:.3g}{interval}"
    if group_size_law.get("within_10_percent"):
        low, high = group_size_law["within_10_percent"]
        powers = ", ".join(map(str, group_size_law.get("powers_of_two") or [])) or "none"
        words += f"; G = {low} to {high} are within 10% of the least MSE (powers of two among them: {powers})"
    if group_size_law.get("G_star_may_be_larger"):
        words += f"; G* may well be larger, c1 is less than 3 standard errors above 0: {at_least(group_size_law)}"
    return words


def _almost_best(group_size_law: dict) -> str:
    if not group_size_law.get("almost_best"):
        return ""
    low, high = group_size_law["almost_best"]
    sizes = f"G = {low} is" if low == high else f"G = {low} to {high} are"
    return f"; as measured, {sizes} within 10% of the least MSE among powers of two"


def mse_table(results: dict) -> str:
    """The MSE of each estimator that has one, by K, with 95% intervals, as an HTML table.

    The digits are those of the table that run_tracecov.py prints.
    """
    rows = []
    for name, values, intervals in mse_by_estimator(results):
        title = "" if name in CURVES else (results["estimators"][name].get("title") or "")
        head = escape(label_in(results.get("estimators"), name)) + (f"<br><small>{escape(title)}</small>" if title else "")
        rows.append(f"<tr><th>{head}</th>{''.join(map(_cell, values, intervals))}</tr>")
    sizes = "".join(f"<th>K = {size}</th>" for size in results["K_list"])
    warning = (results.get("on_policy_check") or {}).get("warning")
    return (f"<p>warning: {escape(warning)}</p>\n" if warning else "") + (
        "<table><caption>MSE of the gradient estimate, in squared gradient units, and its 95% interval over prompts"
        f"</caption>\n<tr><th>estimator</th>{sizes}</tr>\n" + "\n".join(rows) + "\n</table>"
    )


def mse_by_estimator(results: dict) -> list[tuple[str, Sequence, Sequence]]:
    """(name, values, intervals) of every estimator that has a value; the lists are aligned with K_list."""
    found = results.get("estimators") or {}
    curves = [(name, each["mse"], each.get("mse_ci95") or [None] * len(each["mse"])) for name, each in found.items()]
    curves = curves or [(name, *curve_of(results, name)) for name in DRAWN]
    return [(name, values, intervals) for name, values, intervals in curves if any(v is not None for v in values)]


def _cell(value: float | None, interval: Sequence | None) -> str:
    return f"<td>{value_text(value, interval).replace(' [', '<br>[')}</td>"
