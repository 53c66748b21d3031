r"""Prompts and rewards: what both evaluation scripts, the training workers and the plots agree on.

    format_prompt(tokenizer, prompt)          -> token ids, exactly one BOS where the tokenizer uses one
    integer_reward(text, ground_truth)        -> 1.0 or 0.0: is the last number of the text the integer?
    math_reward(text, ground_truth)           -> 1.0 or 0.0: does Math-Verify find the answer equal?
    REWARDS["integer"].check(ground_truth)    -> the answer a reward compares with, or UserError

Importing this file loads neither torch nor transformers, so that training workers can afford it.
"""

from __future__ import annotations

import math
import numbers
import re
import unicodedata
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from Gradient_evaluation.cli import UserError
from Gradient_evaluation.math_worker import MATH_WORKER

Messages = list[dict[str, str]]

# ---------------------------------------------------------------------------------------- prompts


def normalise_prompt(prompt: Any) -> str | Messages:
    """The two forms a prompt can have: a non-blank string, or a list of {"role": str, "content": str}.

    Messages may come as any sequence of mappings (parquet gives NumPy arrays) and their content as
    OpenAI text parts, ``[{"type": "text", "text": "Hi"}]``, which are joined; other keys are dropped.
    Raises UserError: not one of these, a message without role or content, or nothing but white space.

    >>> normalise_prompt(({"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None},))
    [{'role': 'user', 'content': 'Hi'}]
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError("the prompt is empty")
        return str(prompt)
    if prompt is None or isinstance(prompt, (bytes, Mapping, numbers.Number)) or not hasattr(prompt, "__len__"):
        raise UserError(f"the prompt is {_name(prompt)}; it must be a string or a list of messages with role and content")
    try:
        messages = [_normalise_message(message) for message in prompt]
    except TypeError:  # a zero-dimensional array has __len__ but neither a length nor items
        raise UserError("the prompt is no list of messages with role and content") from None
    if not any(message["content"].strip() for message in messages):
        raise UserError("the prompt is empty: no message in it has content")
    return messages


def _normalise_message(message: Any) -> dict[str, str]:
    if not isinstance(message, Mapping):
        raise UserError(f"the prompt holds {_name(message)} where a message with role and content is expected")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role.strip():
        raise UserError('the prompt holds a message without a role, such as "user"')
    if isinstance(content, str):
        return {"role": str(role), "content": str(content)}
    if content is None:
        raise UserError(f"the prompt holds a message of role {role} without content")
    parts = list(content) if hasattr(content, "__iter__") and not isinstance(content, (bytes, Mapping)) else [content]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise UserError(f"the prompt holds a message of role {role} whose content is not text; only text is supported")
    return {"role": str(role), "content": "".join(part["text"] for part in parts)}


def format_prompt(tokenizer, prompt: Any) -> list[int]:
    """Token ids the model is to continue.

    tokenizer: a transformers tokenizer. prompt: anything ``normalise_prompt`` takes.

    * Messages go through the tokenizer's chat template with the generation prompt added. A template that
      refuses the system role gets the system text at the head of the first user turn instead. A tokenizer
      without a template gets the plain form ``System: ...``, ``User: ...``, ``Assistant: ...`` with blank
      lines between, closed by ``Assistant:``.
    * A string is taken raw: no template, no white space added or removed.
    * Whatever the tokenizer itself puts before a text (a BOS, for most that put anything) stands there
      exactly once, whether the template renders it too or not. What it puts after a text (an EOS) is
      never added.

    Raises UserError with one line for a malformed prompt, a template that refuses it, or no tokens at all.
    """
    prompt = normalise_prompt(prompt)
    text = prompt if isinstance(prompt, str) else _render(tokenizer, prompt)
    token_ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    prefix = _tokenizer_prefix(tokenizer)
    if prefix:
        while token_ids[: len(prefix)] == prefix:
            token_ids = token_ids[len(prefix) :]
        token_ids = prefix + token_ids
    if not token_ids:
        raise UserError("the prompt is empty: the tokenizer makes no token of it")
    return token_ids


def _tokenizer_prefix(tokenizer) -> list[int]:
    """The special tokens this tokenizer puts before any text: [bos] for Llama, [] for Qwen and GPT-2.

    Found by comparing, because neither add_bos_token nor bos_token_id says what a post-processor does.
    """
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    special = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return special[:start]
    return []


def _render(tokenizer, messages: Messages) -> str:
    if not getattr(tokenizer, "chat_template", None):
        turns = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
        return "\n\n".join([*turns, "Assistant:"])
    attempts = [messages]
    if any(message["role"] == "system" for message in messages):
        attempts.append(_fold_system(messages))
    reasons = []
    for attempt in attempts:
        try:
            return tokenizer.apply_chat_template(attempt, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program of its author's: it can raise anything
            reasons.append(" ".join(f"{error}".split()) or type(error).__name__)
    roles = ", ".join(message["role"] for message in messages)
    raise UserError(
        f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'} refuses this prompt "
        f"(roles: {roles}): {reasons[-1]}; reword the messages or give the prompt as a string"
    )


def _fold_system(messages: Messages) -> Messages:
    """Every system message's text, in order, at the head of the first user turn (or as one, if there is none)."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    rest = [dict(message) for message in messages if message["role"] != "system"]
    for message in rest:
        if message["role"] == "user":
            message["content"] = f"{system}\n\n{message['content']}"
            return rest
    return [{"role": "user", "content": system}, *rest]


# --------------------------------------------------------------------------------- integer answers

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
    raise UserError(f"the ground_truth {_show(value)} is not an integer")


def integer_reward(text: str, ground_truth: Any) -> float:
    """1.0 if the last number of ``text`` is the integer ``ground_truth``, else 0.0; UserError if that is none.

    >>> integer_reward("12 + 7 = 19.", 19), integer_reward("19, because 12 + 7", 19)
    (1.0, 0.0)
    """
    return float(check_integer_ground_truth(ground_truth) == parse_integer_answer(text))


# ------------------------------------------------------------------------------------ math answers


def check_math_ground_truth(value: Any) -> str:
    r"""The LaTeX of the answer in ``value``, once Math-Verify has parsed it.

    A number, an answer (``72``, ``\frac{1}{2}``, ``$\sqrt{2}$``), a GSM8K solution (what follows the
    last ``####``) or a MATH solution (its last balanced ``\boxed{}``).
    Raises UserError for None, a bool, NaN, text such as "n/a", or what Math-Verify cannot parse.
    """
    usable = isinstance(value, (str, numbers.Real)) and not isinstance(value, bool)
    if not usable or (not isinstance(value, str) and not math.isfinite(value)):
        raise UserError(f"the ground_truth {_show(value)} is not a math answer")
    return _checked_math_answer(str(value))


@lru_cache(maxsize=65536)
def _checked_math_answer(solution: str) -> str:
    answer = solution
    if "####" in solution:
        answer = solution.rpartition("####")[2]
    elif (boxed := last_boxed(solution)) is not None:
        answer = boxed
    answer = answer.strip()
    missing = not any(character.isalnum() or character == "\\" for character in answer)
    if missing or answer.lower() in ("n/a", "nan", "none", "null"):
        raise UserError(f"the ground_truth {_show(solution)} is not a math answer")
    latex = answer if len(answer) > 2 and answer[0] == answer[-1] == "$" else f"${answer}$"
    if not MATH_WORKER.ask(None, latex):
        raise UserError(f"the ground_truth {_show(solution)} cannot be parsed by Math-Verify")
    return latex


def last_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{...}`` (or ``\fbox{...}``) whose braces balance; None without one.

    >>> last_boxed(r"so \boxed{\frac{1}{2}}, not \boxed{2")
    '\\frac{1}{2}'
    """
    closing: dict[int, int] = {}  # index of "{" -> index of its "}"; a stack, so one pass over the text
    opened: list[int] = []
    for match in re.finditer(r"\\[{}]|[{}]", text):
        if match[0] == "{":
            opened.append(match.start())
        elif match[0] == "}" and opened:
            closing[opened.pop()] = match.start()
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s{0,8}\{", text))):
        if match.end() - 1 in closing:
            return text[match.end() : closing[match.end() - 1]]
    return None


def math_reward(text: str, ground_truth: Any) -> float:
    r"""1.0 if Math-Verify extracts from ``text`` an answer equal to ``ground_truth``, else 0.0.

    Extraction and comparison are the library's own (its limits are documented there); a Unicode minus
    is read as "-". A text on which it fails, or takes longer than its time limit, gets 0.0. Works in any
    thread: see math_worker.py. Raises UserError as check_math_ground_truth does.

    >>> math_reward(r"so the answer is \boxed{\frac{2}{4}}.", "0.5")
    1.0
    """
    return float(MATH_WORKER.ask(text, check_math_ground_truth(ground_truth)))


class Reward(NamedTuple):
    """``check`` raises UserError on a ground truth ``score`` could not use; call it before sampling."""

    check: Callable[[Any], Any]
    score: Callable[[str, Any], float]


REWARDS = {
    "integer": Reward(check_integer_ground_truth, integer_reward),
    "math": Reward(check_math_ground_truth, math_reward),
}


def _name(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


def _show(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
