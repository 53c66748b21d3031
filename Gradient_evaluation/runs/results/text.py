"""How numbers and sentences are written on the terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 126  # letters of a line of text on the terminal; rows of a table may be longer


def wrapped(text: str) -> str:
    """The text, its long lines broken at ``WIDTH`` letters; what follows a break is indented."""
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(lines)


def value_text(value: float | None, interval: Sequence[float] | None) -> str:
    """``"33.61 [25.44, 42.2]"``, without an interval the value alone, without a value ``"-"``."""
    if value is None or interval is None:
        return "-" if value is None else f"{value:.4g}"
    low, high = (0.0 if abs(end) < 1e-12 * abs(value) else end for end in interval)  # rounding of a sum that is 0
    return f"{value:.4g} [{low:.4g}, {high:.4g}]"


def ends_text(low: float | None, high: float | None, form: str = ".3g") -> str:
    return " [{}, {}]".format(*("unbounded" if end is None else f"{end:{form}}" for end in (low, high)))


def number_text(group_size_law: dict, name: str, form: str = ".4g") -> str:
    if group_size_law[name] is None:
        return f"not computed ({group_size_law['reasons'][name]})"
    interval = group_size_law[f"{name}_ci95"]
    if interval is None:
        return f"{group_size_law[name]:{form}} (no interval: {group_size_law['reasons'][f'{name}_ci95']})"
    return f"{group_size_law[name]:{form}}{ends_text(*interval, form)}"


def cell_text(found: dict, quantity: str, i: int) -> str:
    return value_text(found[quantity][i], found[f"{quantity}_ci95"][i])
