"""Written numbers and their values: digits with thousands and decimal marks, exponents, powers."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

LONGEST_INTEGER = 4000  # digits; Python refuses int() beyond 4300
# One number, or several with marks between them. Every repetition begins with a fixed character, so a match backtracks
# by at most one step, and a scan of any text takes linear time.
NUMBER = re.compile(
    r"(?P<point>(?<![\w.)\]])\.)?"
    r"(?P<digits>\d+(?:(?:[.,'\u066b\u066c\u00a0]|[ _](?=\d{3}(?!\d)))\d+)*)(?:[eE](?P<exponent>[+-]?\d+))?"
)
_MARK = re.compile(r"([.,' _\u066b\u066c\u00a0])")
_MINUS = "-\u2212\u2013\u2010\u2011\ufe63\uff0d"  # hyphens, minus, en dash; not the em dash
CURRENCY = "$\u20ac\u00a3\u00a5\u20b9\u20a9\u20bd"
SPACE = " \t\u00a0"
_PLAIN = str.maketrans(_MINUS, "-" * len(_MINUS)) | str.maketrans(
    "\u2007\u2009\u202f\u2019\uff0c\uff0e\uff0f\u2044\u2215\uff1a\u2236\uff3e\uff0b\uff05", "\u00a0\u00a0\u00a0',.///::^+%"
)
_LATEX_NOISE = re.compile(r"\\(?:left|right)(?![A-Za-z])|\\!")
_LATEX_SPACE = re.compile(r"(?<=\d)(?:\\[,;: ]|~)(?=\d)")


def plain(text: str) -> str:
    """``text`` with ASCII digits, one character each for minus, slash and thin space, and without LaTeX's spacing."""
    if not text.isascii():
        digits = {ord(c): str(unicodedata.decimal(c)) for c in set(text) if c.isdecimal() and not c.isascii()}
        text = text.translate(_PLAIN | digits)
    if "\\" in text or "~" in text or "{,}" in text:
        text = _LATEX_SPACE.sub("\u00a0", _LATEX_NOISE.sub("", text).replace("{,}", ","))
    return text


class Digits(NamedTuple):
    """The digits of one number before and after the decimal mark (None: not readable), and its offset in the match."""

    whole: str | None
    fraction: str = ""
    offset: int = 0


def one_number(cluster: str, price: bool = False, before: str = "") -> Digits:
    """The number that ``cluster`` ends in. It has digits with marks between them: one number, or a list of several.

    ``whole`` is None where there are two readings. price: a currency sign is next to the cluster. before: the two
    characters before it.
    """
    parts = _MARK.split(cluster)
    groups, marks = parts[::2], [("'" if mark in "_\u066c" else mark) for mark in parts[1::2]]
    if not marks:
        return Digits(cluster)
    last = groups[-1]
    in_list = marks[0] == " " and before[:1].isdigit() and before[1:] == " "
    if len(set(marks)) == 1 and _grouped(groups, marks[0]) and not in_list:
        two_readings = (
            len(marks) == 1 if marks[0] == "." else (marks[0] == " " and not any(group[0] == "0" for group in groups))
        )
        return Digits(None) if two_readings else Digits("".join(groups))
    if marks[-1] in ".,\u066b" and marks[-1] not in marks[:-1]:
        alone = len(marks) == 1
        comma = marks[-1] == ","
        decimal_mark = not (alone and comma) or (last[0] == "0" and len(last) > 1) or (price and len(last) == 2)
        if decimal_mark and (alone or (len(set(marks[:-1])) == 1 and _grouped(groups[:-1], marks[0]))):
            return Digits("".join(groups[:-1]), last)
    offset = max(cluster.rfind(mark) for mark in ", \u00a0") + 1
    if not offset:
        return Digits(None)
    tail = one_number(cluster[offset:])
    if tail.whole and tail.whole[0] == "0" and len(tail.whole) > 1:
        return Digits(None)  # in a list one writes 5, not 05
    return tail._replace(offset=offset)


def _grouped(groups: list[str], mark: str) -> bool:
    """Whether these are groups of three digits, or with commas those of India: groups of two, then one of three."""
    first, *rest = groups
    if mark == "\u066b" or first[0] == "0" or len(first) > 3:
        return False
    if all(len(group) == 3 for group in rest):
        return True
    indian = len(first) <= 2 and len(rest) > 1 and len(rest[-1]) == 3
    return mark == "," and indian and all(len(group) == 2 for group in rest[:-1])


def value_of(read: Digits, point: str | None, exponent: str | None) -> Fraction | None:
    """The number times ten to the power ``exponent``. None if it cannot be read or has too many digits.

    point: a decimal point before the first digit, as in ``.5``.
    """
    if read.whole is None:
        return None
    whole, fraction = ("", read.whole) if point else (read.whole, read.fraction)
    if point and read.fraction:
        return None
    digits = (whole + fraction).lstrip("0")
    if not digits:
        return Fraction(0)
    significant = digits.rstrip("0")
    if exponent is not None and len(exponent.lstrip("+-0")) > 6:
        return None
    shift = int(exponent or 0) - len(fraction) + len(digits) - len(significant)
    if len(significant) + abs(shift) > LONGEST_INTEGER:
        return None
    return Fraction(int(significant)) * Fraction(10) ** shift


def one_value(number: re.Match) -> Fraction | None:
    """The value of a match of NUMBER; None if it is a list of several numbers."""
    read = one_number(number["digits"])
    return None if read.offset else value_of(read, number["point"], number["exponent"])


def power_of(base: Fraction | None, exponent: Fraction | None) -> Fraction | None:
    """``base`` to the power ``exponent``. None if one is not known, for a fraction as exponent, and for too many digits."""
    if base is None or exponent is None or exponent.denominator != 1:
        return None
    power = exponent.numerator
    if base in (0, 1, -1):
        power = (power > 0) - (power < 0) if base == 0 else abs(power) % 2
        return None if base == 0 and power < 0 else base**power
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    return None if (bits - 1) * abs(power) > 4 * LONGEST_INTEGER else base**power


def is_long(value: Fraction) -> bool:
    """Whether the value has more than LONGEST_INTEGER digits."""
    return abs(value) >= 10**LONGEST_INTEGER


def small_integer(text: str) -> Fraction | None:
    """The value of ``text``: a sign and at most nine digits, with spaces around them. None for anything else."""
    match = re.fullmatch(r"\s{0,9}([-+]?)\s{0,9}(\d{1,9})\s{0,9}", text[:60])
    return Fraction(int(match[1] + match[2])) if match and len(text) <= 60 else None


def signed_number(text: str) -> Fraction | None:
    """The value of ``text``: one number with at most one sign before it. None for anything else."""
    text = text.strip(SPACE)
    number = NUMBER.fullmatch(text.lstrip("+-").lstrip(SPACE)) if len(text) <= 2 * LONGEST_INTEGER else None
    if number is None or text[1:2] in tuple("+-"):
        return None
    value = one_value(number)
    return -value if value is not None and text[0] == "-" else value
