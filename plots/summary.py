"""What a run found, in numbers and words: a table of the MSE by group size, and the best group size in one line."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from Gradient_evaluation.runs.group_size_report import at_least
from Gradient_evaluation.runs.results import value_text
from Gradient_evaluation.stats.estimators import label_of
from plots.plot_tracecov import FLOOR, PUBLISHED, curve_of
from plots.style import CURVES


def mse_table(results: dict) -> str:
    """The MSE of each estimator that has one, by K, with 95% intervals, as an HTML table.

    The digits are those of the table that run_tracecov.py prints.
    """
    rows = []
    for name, values, intervals in mse_by_estimator(results):
        title = "" if name in CURVES else (results["estimators"][name].get("title") or "")
        head = escape(label_of(name)) + (f"<br><small>{escape(title)}</small>" if title else "")
        rows.append(f"<tr><th>{head}</th>{''.join(map(_cell, values, intervals))}</tr>")
    sizes = "".join(f"<th>K = {size}</th>" for size in results["K_list"])
    warning = (results.get("on_policy_check") or {}).get("warning")
    return (f"<p>warning: {escape(warning)}</p>\n" if warning else "") + (
        "<table><caption>MSE of the gradient estimate, in squared gradient units, and its 95% interval over prompts"
        f"</caption>\n<tr><th>estimator</th>{sizes}</tr>\n" + "\n".join(rows) + "\n</table>"
    )


def mse_by_estimator(results: dict) -> list[tuple[str, Sequence, Sequence]]:
    """(name, values, intervals) aligned with K_list, of every estimator that has a value; others are left out."""
    found = results.get("estimators") or {}
    curves = [(name, each["mse"], each.get("mse_ci95") or [None] * len(each["mse"])) for name, each in found.items()]
    curves = curves or [(name, *curve_of(results, name)) for name in (*PUBLISHED, FLOOR)]
    return [(name, values, intervals) for name, values, intervals in curves if any(v is not None for v in values)]


def _cell(value: float | None, interval: Sequence | None) -> str:
    return f"<td>{value_text(value, interval).replace(' [', '<br>[')}</td>"


def headline(results: dict, title: str) -> str:
    """What a reader wants to know first, as HTML: the best group size, then what it is of."""
    best, _, more = group_size_in_words(results.get("group_size_law")).partition("; ")
    counts = ", ".join(f"{results[f'n_{what}']:,} {what}" for what in ("prompts", "continuations") if results.get(f"n_{what}"))
    lines = [more, f"measured on {title}: {counts or 'the number of prompts is not in the results'}"]
    return f'<p style="font-size: 1.4em; margin: 0.8em 0 0.3em">{_sentence(best)}</p>\n' + "\n".join(
        f"<p>{_sentence(line)}</p>" for line in lines if line
    )


def _sentence(text: str) -> str:
    return f"{escape(text[:1].upper() + text[1:])}."


def group_size_in_words(law: dict | None) -> str:
    """One line: ``"best group size to train with: G* = 5.84 [4.84, 7]; G = 4 to 10 are within 10% of ..."``.

    Or why there is none.
    """
    law = law if isinstance(law, dict) else {}
    if law.get("G_star") is None:
        reason = (law.get("reasons") or {}).get("G_star", "the results hold no law of the group size")
        words = f"best group size to train with: not computed ({reason})"
        if law.get("G_star_at_least"):
            words += f"; {at_least(law)}"
        return words + _almost_best(law)
    ends = law.get("G_star_ci95")
    interval = "" if not ends else " [{}, {}]".format(*("unbounded" if end is None else f"{end:.3g}" for end in ends))
    words = f"best group size to train with: G* = {law['G_star']:.3g}{interval}"
    if law.get("within_10_percent"):
        low, high = law["within_10_percent"]
        powers = ", ".join(map(str, law.get("powers_of_two") or [])) or "none"
        words += f"; G = {low} to {high} are within 10% of the least MSE (powers of two among them: {powers})"
    if law.get("G_star_may_be_larger"):
        words += f"; G* may well be larger, c1 is less than 3 standard errors above 0: {at_least(law)}"
    return words


def _almost_best(law: dict) -> str:
    if not law.get("almost_best"):
        return ""
    low, high = law["almost_best"]
    sizes = f"G = {low} is" if low == high else f"G = {low} to {high} are"
    return f"; as measured, {sizes} within 10% of the least MSE among powers of two"
