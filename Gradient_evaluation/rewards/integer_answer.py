"""The integer answer of a continuation, and the integer ground truth of a data file."""

from __future__ import annotations

import decimal
import math
import numbers
import re
from fractions import Fraction
from typing import Any, NamedTuple

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.rewards.written_number import (
    CURRENCY,
    LONGEST_INTEGER,
    NUMBER,
    SPACE,
    is_long,
    one_number,
    one_value,
    plain,
    power_of,
    signed_number,
    small_integer,
    value_of,
)

TAIL = 5 * LONGEST_INTEGER  # characters at the end of a text that are read first
NEAR = 40  # characters within which a bracket is looked for
_SUPERSCRIPTS = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
_FROM_SUPERSCRIPT = str.maketrans(_SUPERSCRIPTS + "\u207a\u207b", "0123456789+-")
_ATOM = re.compile(
    r"(?P<command>\\(?:[dtc]?frac|sqrt|[dt]?binom)(?![A-Za-z]))"
    r"|(?P<power>\^|(?<=[A-Za-z])\*\*(?=\d))"
    rf"|(?P<vulgar>[\u00bc-\u00be\u2150-\u215f\u2189]|[{_SUPERSCRIPTS}]+/[\u2080-\u2089]+)"
    rf"|(?P<superscript>[\u207a\u207b]?[{_SUPERSCRIPTS}]+)"
    rf"|(?P<number>{NUMBER.pattern})"
)
_POWER = re.compile(
    rf" {{0,2}}\^ {{0,2}}|\*\*(?=[-+]?\d)| \*\* (?=[-+]?\d)|(?P<superscript>[\u207a\u207b]?[{_SUPERSCRIPTS}]+)|\u207f"
)
_PLAIN_EXPONENT = re.compile(r"[-+]?\d+(?![.,]\d)")
_NO_EXPONENT = re.compile(
    r"[{(]?\s*(?:\\circ|\\degree|\u00b0|(?:\\(?:text|mathrm|textrm)\s*\{\s*)?(?:th|st|nd|rd)\b)[}\s]{0,9}"
)
_TIMES_TEN = re.compile(
    r"\s{0,3}(?:[\u00d7\u00b7\u22c5xX*]|\\times(?![A-Za-z])|\\cdot(?![A-Za-z]))\s{0,3}10(?=\s{0,2}\^|\*\*[-+]?\d| \*\* [-+]?\d"
    rf"|[\u207a\u207b{_SUPERSCRIPTS}])"
)
_COLON_CHAIN = re.compile(r"(?: : ?(?=\d)|:(?=\d))\d+(?:[.,:]\d+)*")
_SLASH = re.compile(r"\s{0,2}/\s{0,2}(?P<sign>[-+]?)(?=\d)")
_MIXED = re.compile(
    rf"[ \u00a0]{{0,2}}(?:[\u00bc-\u00be\u2150-\u215f\u2189]|[{_SUPERSCRIPTS}]+/[\u2080-\u2089]+)"
    r"|[ \u00a0]{1,2}\d+ ?/ ?\d+|\s{0,2}(?P<command>\\[dtc]?frac(?![A-Za-z]))"
)
_CIRCLE_NUMBER = re.compile(r"\s{0,2}(?:\\pi(?![A-Za-z])|\u03c0)")
_DATE = re.compile(r"\d{4}-\d{1,2}-\d{1,2}(?!\d)")
_UNIT_POWER = re.compile(r"(?<![A-Za-z\\])(?:[kcdm]?m|ft|in|yd|mi)$")
_SUBSCRIPT = re.compile(r"(?:[^\W_]|[)}\]])_+\{?\Z")
_NUMERATOR = re.compile(r"(?:[^\W_]|[)}\]]) */ *\Z")
_LIST_NUMBER = re.compile(r"^[ \t>]*(\d{1,3})[.)](?=\s|$)([ \t]*\S)?", re.MULTILINE)
_ARGUMENT = re.compile(r"\s*(?:(?P<brace>\{)|\\[A-Za-z]+|[\dA-Za-z])")
_DROP_SPACE_AND_CURRENCY = str.maketrans("", "", SPACE + CURRENCY)


def parse_integer_answer(text: str) -> int | None:
    r"""The last number of ``text`` if it is an integer, else None. Takes linear time, never raises on a str.

    Only the text after the last </think> counts. A reply with a <think> that is never closed has no answer.

    These are one number, with this value:
    * Decimals: ``3.7`` is no integer (None), ``42.0`` is 42, ``1e5`` is 100000, ``.5`` is one half.
    * Thousands in groups of three: ``1,234`` (also ``1{,}234``, ``1\,234``, ``1'234``, a no-break or thin space,
      ``1.234.567``, the Arabic marks). Or in the groups of India: ``12,34,567``. A decimal mark other than the
      thousands mark may follow: ``1.000,00`` is 1000, ``1.234,50`` is None.
    * Numbers with two readings are None: ``1.234``, and ``2 602`` with a plain space. ``1 000`` has one reading.
    * Other commas separate numbers: ``4, 2`` ends in 2, and ``1,23`` in 23. But ``1,05`` is a decimal, and so is
      ``12,50`` (two digits after the comma) next to a currency sign.
    * Fractions (``6/2`` is 3, ``3/4`` None; also ``\frac``, ``x/4``), mixed numbers and vulgar fractions (None),
      powers (``2^10``, ``10^{2}``, a superscript, ``10**2``), numbers times a power of ten (``3 x 10^4``).
    * None: times (``7:00``), ratios (``3:2``), dates, addresses such as ``192.168.0.1``, roots, multiples of pi.

    These are no numbers, so the number before them counts: the exponent of a unit or a variable (``42 ft^2``, ``cm2``),
    a subscript, the number of an item in a numbered list.

    A minus is a sign, also before or after a currency sign (``-$5``, ``$-5``). It is no sign
    * after a digit, a closing bracket or ``%``, where it is an operator: ``10-2`` and ``10 - 2`` end in 2;
    * inside a word, where it is a hyphen: ``x-7`` ends in 7;
    * after a word with spaces on both sides, where it is a dash: ``answer - 7`` ends in 7, but ``is -7`` and ``= - 7``
      end in -7;
    * at the beginning of a later line with a space after it, where it is a bullet.

    ``*`` is an operator. A dot, ``%``, unit or markdown after the number is ignored. A number of more than
    LONGEST_INTEGER digits is None.
    """
    reply = final_reply(text)
    value = None if reply is None else _Reader(plain(reply)).last_value()
    if value is None or value.denominator != 1 or is_long(value):
        return None
    return value.numerator


def final_reply(text: str) -> str | None:
    """The text after the last </think>, without one the whole text; None if a <think> in it is never closed."""
    reply = text.rpartition("</think>")[2]
    return None if "<think>" in reply else reply


def closing_braces(text: str) -> dict[int, int]:
    """{index of a "{": index of the "}" that closes it}; escaped braces do not count. One pass with a stack."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for match in re.finditer(r"\\[{}]|[{}]", text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    return closing


class _Found(NamedTuple):
    """What was read: where it ends, its value (None: not known, no answer), and whether it counts as a number."""

    end: int
    value: Fraction | None = None
    counts: bool = True


class _Reader:
    """Reads the values of a text from left to right, each character a bounded number of times."""

    def __init__(self, text: str):
        self.text = text
        self.closing = closing_braces(text) if "{" in text else {}
        self.list_numbers = _list_numbers(text)

    def last_value(self) -> Fraction | None:
        """The value of the last number; None without a number, or if the last one has no known value."""
        end = len(self.text)
        for start in (
            max(0, end - TAIL),
            0,
        ):  # of a long text the end is read first, and all of it only if the end has no number
            last, position = None, start
            while atom := _ATOM.search(self.text, position):
                found = self._read(atom)
                position = found.end
                last = found if found.counts else last
            if last is not None:
                return last.value
        return None

    def _read(self, atom: re.Match) -> _Found:
        if atom["number"]:
            return self._number(atom)
        if atom["command"]:
            return self._command(atom)
        if atom["vulgar"]:
            return _Found(atom.end())
        # An exponent. After a bracket with a number its value is not known here; after a unit or variable it is no number.
        end = atom.end() if atom["superscript"] else self._exponent(atom.start())[1]
        base = self.text[max(0, atom.start() - NEAR) : atom.start()].rstrip(" )]}")
        return _Found(max(end, atom.end()), counts=base[-1:].isdigit())

    def _number(self, atom: re.Match) -> _Found:
        text, start = self.text, atom.start()
        if self._belongs_to_a_word(start):
            return _Found(atom.end(), counts=False)
        read = one_number(atom["digits"], self._beside_currency(atom), text[max(0, start - 2) : start])
        start += read.offset
        value = value_of(read, atom["point"] and not read.offset, atom["exponent"])
        if chain := _COLON_CHAIN.match(text, atom.end()) or _DATE.match(text, atom.start()):
            return _Found(chain.end())
        sign, signed_from = self._sign(start)
        if text[start - 1 : start] == "\u221a" or self._divides(start):
            value = None
        value, end = self._in_brackets(sign, value, signed_from, *self._powered(value, atom.end()))
        if (mixed := _MIXED.match(text, end)) and not read.offset:
            command = mixed["command"]
            return _Found(self._command(mixed, mixed.start("command")).end if command else mixed.end())
        value, end = self._divided(value, end)
        if ten := _TIMES_TEN.match(text, end):
            power, end = self._powered(Fraction(10), ten.end())
            value = None if value is None or power is None else value * power
        if circle := _CIRCLE_NUMBER.match(text, end):
            return _Found(circle.end())
        return _Found(end, None if value is None else sign * value)

    def _belongs_to_a_word(self, start: int) -> bool:
        """Whether the number at ``start`` is a subscript, a unit's exponent (``cm2``) or the number of a list item."""
        text = self.text
        if start in self.list_numbers:
            return True
        if _SUBSCRIPT.search(text[max(0, start - 3) : start]):
            return True
        one_digit = text[start : start + 1] in "23" and not text[start + 1 : start + 2].isalnum()
        return one_digit and _UNIT_POWER.search(text[max(0, start - 4) : start]) is not None

    def _beside_currency(self, atom: re.Match) -> bool:
        before, after = self.text[max(0, atom.start() - 2) : atom.start()], self.text[atom.end() : atom.end() + 2]
        signs = CURRENCY[1:]  # a dollar sign may be LaTeX's: $1,23$ is a list
        return any(c in signs for c in before.strip()[-1:] + after.strip()[:1]) or (
            "$" in before.strip()[-1:] and "$" not in after
        )

    def _divides(self, start: int) -> bool:
        """Whether the number is the denominator of something that is no number, as in ``x/4`` or ``(1+2)/4``."""
        return _NUMERATOR.search(self.text[max(0, start - 3) : start]) is not None

    def _powered(self, base: Fraction | None, end: int) -> tuple[Fraction | None, int]:
        """(``base`` with the exponents that follow at ``end``, their end). 2^3^2 is 2^9: the last exponent binds first."""
        if self.text[end : end + 2] == "**" and "**" in self.text[max(0, end - NEAR) : end]:
            return base, end  # the end of bold text in markdown
        exponents = []
        while True:
            exponent, after = self._exponent(end)
            if after == end:
                break
            end = after
            if exponent is not _ABSENT:
                exponents.append(exponent)
        if not exponents:
            return base, end
        exponent = exponents.pop()
        while exponents:
            exponent = power_of(exponents.pop(), exponent)
        return power_of(base, exponent), end

    def _exponent(self, position: int) -> tuple[Any, int]:
        """(exponent, its end): None for an unknown exponent, _ABSENT without one. The end is ``position`` if none is there."""
        text = self.text
        power = _POWER.match(text, position)
        if power is None:
            return _ABSENT, position
        if power["superscript"] or power[0] == "\u207f":
            sign_and_digits = (power["superscript"] or "").translate(_FROM_SUPERSCRIPT)
            return small_integer(sign_and_digits), power.end()
        start = power.end()
        if digits := _PLAIN_EXPONENT.match(text, start):
            return small_integer(digits[0]), digits.end()
        if mark := _NO_EXPONENT.match(text, start):
            return _ABSENT, mark.end()
        if text[start : start + 1] == "{":
            close = self.closing.get(start, self._line_end(start))
            return small_integer(text[start + 1 : close]), close + 1
        if text[start : start + 1] == "(":
            close = text.find(")", start, start + NEAR)
            return (None, start + 1) if close < 0 else (small_integer(text[start + 1 : close]), close + 1)
        if text[start : start + 1].isalnum() or text[start : start + 1] in tuple("\\-"):
            return None, start + 1
        return _ABSENT, power.end()

    def _in_brackets(self, sign: int, value, signed_from: int, powered, end: int) -> tuple[Fraction | None, int]:
        """(value, end) of ``number^power``, or of ``(-number)^power`` where the brackets enclose the number alone."""
        close = self.text[end : end + 1]
        opens = {")": "(", "}": "{"}.get(close)
        if opens and self.text[signed_from - 1 : signed_from] == opens and powered == value:
            whole, after = self._powered(None if value is None else sign * value, end + 1)
            if after > end + 1 and _POWER.match(self.text, end + 1):
                return (None if whole is None else sign * whole), after
        return powered, end

    def _divided(self, value: Fraction | None, end: int) -> tuple[Fraction | None, int]:
        """(``value`` divided by the number after a slash, its end). Two slashes give None: a date, or two readings."""
        divisions = 0
        while slash := _SLASH.match(self.text, end):
            number = NUMBER.match(self.text, slash.end())
            read = one_number(number["digits"])
            if read.offset:
                return None, number.end()
            divisor, end = self._powered(value_of(read, None, number["exponent"]), number.end())
            value = None if value is None or not divisor else value / divisor
            value = -value if value is not None and slash["sign"] == "-" else value
            divisions += 1
        return (value if divisions < 2 else None), end

    def _command(self, match: re.Match, start: int | None = None) -> _Found:
        r"""The value of ``\frac{a}{b}`` with two numbers; None for other commands (roots, binomials) and for terms."""
        start = match.start() if start is None else start
        name, end, arguments = match["command"], match.end(), []
        if name == "\\sqrt" and self.text[end : end + 1] == "[":
            end = max(end, self.text.find("]", end, end + NEAR) + 1)
        for _ in range(1 if name == "\\sqrt" else 2):
            argument = _ARGUMENT.match(self.text, end)
            if argument is None:
                break
            if argument["brace"]:
                opening = argument.end() - 1
                close = self.closing.get(opening, self._line_end(opening))
                arguments.append(signed_number(self.text[opening + 1 : close]))
                end = close + 1
            else:
                arguments.append(signed_number(argument[0]))
                end = argument.end()
        after = self._powered(None, end)[1]
        if not name.endswith("frac") or len(arguments) < 2 or None in arguments or not arguments[1] or after > end:
            return _Found(after)
        if self._divides(start):
            return _Found(end)
        value, end = self._divided(self._sign(start)[0] * arguments[0] / arguments[1], end)
        circle = _CIRCLE_NUMBER.match(self.text, end)
        return _Found(circle.end()) if circle else _Found(end, value)

    def _line_end(self, position: int) -> int:
        end = self.text.find("\n", position)
        return len(self.text) if end < 0 else end

    def _sign(self, start: int) -> tuple[int, int]:
        """(-1 or 1, where the signed number begins) of the number at ``start``. parse_integer_answer has the rules."""
        text = self.text
        end = _skip_back(text, start)
        if end and text[end - 1] in CURRENCY:
            end -= 2 if text[end - 2 : end - 1] == "\\" else 1
            end = _skip_back(text, end)
        if not end or text[end - 1] != "-":
            return 1, start
        minus = end - 1
        before = _skip_back(text, minus)
        operand = text[before - 1] if before else ""
        if operand.isdigit() or (operand and operand in ")]}%"):
            return 1, start
        spaced_after = end < start and text[end] in SPACE
        if operand == "\n" and spaced_after and self._is_bullet(before):
            return 1, start
        spaced = spaced_after and text[start - 1] in SPACE
        in_word = operand.isalnum() and (before == minus or spaced)
        return (1, start) if in_word else (-1, minus)

    def _is_bullet(self, line_start: int) -> bool:
        """Whether a "- " at ``line_start`` is a bullet: not at the beginning of the text, nor after an operator."""
        above = self.text[max(0, line_start - NEAR) : line_start].rstrip()
        return bool(above) and above[-1] not in "=+*/(<>"


_ABSENT = object()  # no exponent: degrees, ordinals


def _list_numbers(text: str) -> set[int]:
    """The positions of the item numbers of numbered lists: 1 (not first in the text, or with a 2 below it), then 2, 3, ..."""
    positions: set[int] = set()
    first, expected = None, 1
    for match in _LIST_NUMBER.finditer(text):
        number = int(match[1])
        if number == expected > 1:
            positions |= {match.start(1), first}
        elif number == 1 and match[2]:
            first = match.start(1)
            if text[max(0, match.start() - NEAR) : match.start()].strip():
                positions.add(first)
        else:
            continue
        expected = number + 1
    return positions


def _skip_back(text: str, end: int) -> int:
    while end and text[end - 1] in SPACE:
        end -= 1
    return end


def check_integer_ground_truth(value: Any) -> int:
    """The integer of a ground truth: ``18``, ``18.0``, ``"18"``, ``"1,234"``, ``"-7"`` or ``"... #### 18"``.

    Raises UserError for anything else: None, True, 3.5, NaN, "n/a", "", "3 or 4", "1.234" (which has two readings),
    more than LONGEST_INTEGER digits.
    """
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        if abs(int(value)) < 10**LONGEST_INTEGER:
            return int(value)
    elif isinstance(value, decimal.Decimal):
        if value.is_finite() and value.adjusted() < LONGEST_INTEGER and value == value.to_integral_value():
            return int(value)
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        if math.isfinite(value) and value == int(value):
            return int(value)
    elif isinstance(value, str):
        answer = plain(value.rpartition("####")[2]).strip().removesuffix(".").rstrip(CURRENCY + SPACE)
        match = NUMBER.search(answer)
        signs = answer[: match.start()].translate(_DROP_SPACE_AND_CURRENCY) if match else ""
        if match and len(signs) <= 1 and signs in "+-" and match.end() == len(answer):
            parsed = one_value(match)
            if parsed is not None and parsed.denominator == 1 and not is_long(parsed):
                return -parsed.numerator if signs == "-" else parsed.numerator
    raise UserError(f"the ground_truth {shorten_repr(value)} is not an integer")


def shorten_repr(value: Any) -> str:
    """repr(value), cut to 80 characters, for a message."""
    try:
        shown = repr(value)
    except ValueError:  # an int of more digits than Python prints
        return f"of {value.bit_length()} bits"
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
