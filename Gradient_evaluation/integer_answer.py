"""The integer a continuation ends in, and the integer a data file means by its ground truth."""

from __future__ import annotations

import math
import numbers
import re
import unicodedata
from typing import Any

from Gradient_evaluation.cli import UserError

LONGEST_INTEGER = 4000  # digits; Python refuses int() beyond 4300
# One number, or several with commas or dots between; every repetition consumes a fixed first character,
# so the match never backtracks by more than one step and a scan of any text is linear.
_NUMBER = re.compile(
    r"(?P<point>(?<![\w.)\]])\.)?(?P<digits>\d+(?:[.,]\d+)*)(?:[eE](?P<exponent>[+-]?\d{1,9})(?!\w))?"
)
_LATEX_COMMA = re.compile(r"\{,\}|,\\!")
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\,|[\u2009\u202f])(?=\d{3}(?!\d))")
_MINUS = "-\u2212\u2013\u2010\u2011\ufe63\uff0d"  # hyphen, minus, en dash, hyphens of typesetters; no em dash
_CURRENCY = "$\u20ac\u00a3\u00a5\u20b9\u20a9\u20bd"
_SPACE = " \t\u00a0"
_DROP_SPACE_AND_CURRENCY = str.maketrans("", "", _SPACE + _CURRENCY)


def parse_integer_answer(text: str) -> int | None:
    """The last number of ``text`` if it is an integer, else None. Linear time, never raises on a str.

    What counts as one number, and as its value:
    * a decimal: ``3.7`` is no integer (None), ``42.0`` is 42, ``1e5`` is 100000, ``.5`` is one half;
    * thousands in groups of three: ``1,234`` (also ``1{,}234``, ``1\\,234``) is 1234; commas elsewhere
      separate numbers, so ``1,23`` ends in 23 and ``12,345,67`` in 67;
    * several dots, ``1.234.567`` or ``192.168.0.1``, are no number at all: None;
    * any decimal digit of Unicode; superscripts and fractions such as ``½`` are not digits.
    A minus is a sign, also before a currency or after one (``-$5``, ``$-5``), unless an operand ends
    right before it: after a digit, a closing bracket or ``%`` it is an operator (``10-2``, ``10 - 2``
    end in 2), inside a word a hyphen (``x-7`` ends in 7), and with spaces on both sides of it after a
    word a dash (``answer - 7`` ends in 7, while ``is -7`` and ``= - 7`` end in -7). ``/``, ``*``, ``^``
    are operators: ``3/4`` ends in 4. A trailing dot, ``%``, unit or markdown is ignored. More than
    LONGEST_INTEGER digits: None.
    """
    text = _THIN_SPACE.sub(",", _LATEX_COMMA.sub(",", text))
    last = None
    for last in _NUMBER.finditer(text):
        pass
    if last is None:
        return None
    pieces = last["digits"]
    if not _single_number(pieces):
        pieces = pieces.rpartition(",")[2]
    starts_number = len(pieces) == len(last["digits"])
    magnitude = _integer_value("." + pieces if last["point"] and starts_number else pieces, last["exponent"])
    if magnitude is None:
        return None
    return -magnitude if starts_number and _negative(text, last.start()) else magnitude


def _single_number(pieces: str) -> bool:
    """Is ``1,234,567.8`` one number (groups of three, one dot at the end at most), not a list?"""
    whole, _, fraction = pieces.partition(".")
    first, *groups = whole.split(",")
    grouped = not groups or (len(first) <= 3 and first[0] != "0" and all(len(group) == 3 for group in groups))
    return grouped and "," not in fraction


def _integer_value(number: str, exponent: str | None) -> int | None:
    """``number`` times ten to ``exponent`` as an int; None if that is no integer, too long, or has two dots."""
    whole, _, fraction = number.replace(",", "").partition(".")
    if "." in fraction:
        return None
    digits = whole + fraction
    if not digits.isascii():
        digits = "".join(str(unicodedata.decimal(digit)) for digit in digits)
    if not digits.strip("0"):
        return 0
    shift = int(exponent or 0) - len(fraction)
    kept = digits if shift >= 0 else digits[:shift]
    lost = "" if shift >= 0 else digits[shift:]
    kept = kept.lstrip("0")
    if lost.strip("0") or len(kept) + max(shift, 0) > LONGEST_INTEGER:
        return None
    return int(kept) * 10 ** max(shift, 0)


def _negative(text: str, start: int) -> bool:
    """Does a sign stand before the number that starts at ``start``? (The rules: parse_integer_answer.)"""
    end = _skip_back(text, start)
    if end and text[end - 1] in _CURRENCY:
        end -= 2 if text[end - 2 : end - 1] == "\\" else 1
        end = _skip_back(text, end)
    if not end or text[end - 1] not in _MINUS:
        return False
    minus = end - 1
    before = _skip_back(text, minus)
    operand = text[before - 1] if before else ""
    if operand.isdigit() or (operand and operand in ")]}%"):
        return False
    spaced = end < start and text[start - 1] in _SPACE and text[end] in _SPACE
    in_word = operand.isalnum() and (before == minus or spaced)
    return not in_word


def _skip_back(text: str, end: int) -> int:
    while end and text[end - 1] in _SPACE:
        end -= 1
    return end


def check_integer_ground_truth(value: Any) -> int:
    """The integer a data file means by ``18``, ``18.0``, ``"18"``, ``"1,234"``, ``"-7"`` or ``"... #### 18"``.

    Raises UserError for anything else: None, True, 3.5, NaN, "n/a", "", "3 or 4", more than
    LONGEST_INTEGER digits.
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        if math.isfinite(value) and value == int(value):
            return int(value)
    elif isinstance(value, str):
        answer = value.rpartition("####")[2].strip().removesuffix(".")
        match = _NUMBER.search(answer)
        signs = answer[: match.start()].translate(_DROP_SPACE_AND_CURRENCY) if match else ""
        if match and len(signs) <= 1 and signs in "+" + _MINUS and match.end() == len(answer):
            parsed = parse_integer_answer(answer) if _single_number(match["digits"]) else None
            if parsed is not None:
                return parsed
    raise UserError(f"the ground_truth {shorten_repr(value)} is not an integer")


def shorten_repr(value: Any) -> str:
    """repr(value), cut to 80 characters, for a message."""
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
