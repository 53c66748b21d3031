r"""Prompts and rewards, for both evaluation scripts, the training workers and the plots.

    format_prompt(tokenizer, prompt)          -> token ids, exactly one BOS where the tokenizer uses one
    integer_reward(text, ground_truth)        -> 1.0 or 0.0: is the last number of the text the integer?
    last_integer_reward(text, ground_truth)   -> the same by the rule of the paper's released scripts
    math_reward(text, ground_truth)           -> 1.0 or 0.0: does Math-Verify find the answer equal?
    REWARDS["integer"].check(ground_truth)    -> the answer that the reward compares with, or UserError

Importing this file loads neither torch nor transformers, so a training worker imports it fast.
"""

from __future__ import annotations

import decimal
import math
import numbers
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from Gradient_evaluation.chat_template import PLAIN, Chat, Messages, plain_fields, render
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.rewards.integer_answer import (
    LONGEST_INTEGER,
    check_integer_ground_truth,
    closing_braces,
    final_reply,
    parse_integer_answer,
    shorten_repr,
)
from Gradient_evaluation.rewards.math_worker import MATH_WORKER

# ---------------------------------------------------------------------------------------- prompts


def normalise_prompt(prompt: Any) -> str | Messages:
    """The prompt as a string that is not blank, or as a list of messages {"role": str, "content": str, ...}.

    Messages may be any sequence of mappings (parquet gives NumPy arrays). Their content may be a list of OpenAI text
    parts, ``[{"type": "text", "text": "Hi"}]``, which are joined. The chat template also gets the other fields that are
    not null (name, tool_calls, tool_call_id, reasoning_content, ...). Beside tool_calls the content may be null.
    Raises UserError for anything else, for a message without role or content, and for a prompt of white space only.

    >>> normalise_prompt(({"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": None},))
    [{'role': 'user', 'content': 'Hi'}]
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise UserError("the prompt is empty")
        return str(prompt)
    if prompt is None or isinstance(prompt, (bytes, Mapping, numbers.Number)) or not hasattr(prompt, "__len__"):
        raise UserError(f"the prompt is {_name(prompt)}; give a string or messages with role and content")
    try:
        messages = [_normalise_message(message) for message in prompt]
    except TypeError:  # a zero-dimensional array has __len__ but neither a length nor items
        raise UserError("the prompt is no list of messages with role and content") from None
    if not any((message["content"] or "").strip() for message in messages):
        raise UserError("the prompt is empty: no message in it has content")
    return messages


def _normalise_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"the prompt holds {_name(message)} where a message with role and content is expected")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role.strip():
        raise UserError('the prompt holds a message without a role; give it one, such as "user"')
    fields = plain_fields(message)
    if isinstance(content, str):
        return {"role": str(role), "content": str(content), **fields}
    if content is None:
        if "tool_calls" in fields:
            return {"role": str(role), "content": None, **fields}
        raise UserError(f"the prompt holds a message of role {role} without content")
    parts = list(content) if hasattr(content, "__iter__") and not isinstance(content, (bytes, Mapping)) else [content]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise UserError(f"the prompt holds a message of role {role} whose content is not text; only text is supported")
    return {"role": str(role), "content": "".join(part["text"] for part in parts), **fields}


def format_prompt(tokenizer, prompt: Any, tools: Sequence[Mapping] = (), chat: Chat = PLAIN) -> list[int]:
    """The token ids that the model is to continue.

    tokenizer: a transformers tokenizer. prompt: anything that ``normalise_prompt`` takes. tools: function schemas.
    chat: what else the template is given.

    * Messages become text by the tokenizer's chat template (``chat_template.render``).
    * A string is used as it is: no template, no white space added or removed.
    * The tokens that the tokenizer puts before every text (a BOS, or none) are there exactly once, also if the template
      writes them too. The tokens that it puts after a text (an EOS) are never added.

    Raises UserError for a malformed prompt, for one that the template refuses, and for one without tokens.
    """
    prompt = normalise_prompt(prompt)
    if isinstance(prompt, str) and tools:
        raise UserError("the row has tools, and its prompt is a string, which no template renders; give messages")
    text = prompt if isinstance(prompt, str) else render(tokenizer, prompt, tools, chat)
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

    They are found by encoding a text with and without special tokens: neither add_bos_token nor bos_token_id says what
    a post-processor adds.
    """
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    special = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return special[:start]
    return []


# ---------------------------------------------------------------------------------------- rewards


def integer_reward(text: str, ground_truth: Any) -> float:
    """1.0 if the last number of ``text`` is the integer ``ground_truth``, else 0.0.

    Raises UserError if the ground truth is no integer.

    >>> integer_reward("12 + 7 = 19.", 19), integer_reward("19, because 12 + 7", 19)
    (1.0, 0.0)
    """
    return float(check_integer_ground_truth(ground_truth) == parse_integer_answer(text))


def parse_last_integer(text: str) -> int | None:
    r"""The last match of ``-?\d+`` in ``text``; None without one, or with more than LONGEST_INTEGER digits."""
    found = re.findall(r"-?\d+", text)
    return int(found[-1]) if found and len(found[-1]) <= LONGEST_INTEGER else None


def last_integer_reward(text: str, ground_truth: Any) -> float:
    r"""1.0 if the last match of ``-?\d+`` in ``text`` is the integer ``ground_truth``, else 0.0.

    This is the rule of the paper's released scripts, for comparisons with their numbers. It reads the digits behind a
    decimal point as an answer, and a minus operator as a sign. Raises UserError as integer_reward does.

    >>> last_integer_reward("12 + 7 = 19", 19), last_integer_reward("3.50", 50), last_integer_reward("9-2", -2)
    (1.0, 1.0, 1.0)
    """
    return float(check_integer_ground_truth(ground_truth) == parse_last_integer(text))


def check_math_ground_truth(value: Any) -> str:
    r"""The answer in ``value`` as LaTeX that Math-Verify can parse.

    value: a number, an answer (``72``, ``\frac{1}{2}``, ``$\sqrt{2}$``), a GSM8K solution (the answer follows the last
    ``####``) or a MATH solution (the answer is in the last ``\boxed{}`` whose braces balance).
    Raises UserError for None, a bool, NaN, text such as "n/a", or what Math-Verify cannot parse.
    """
    usable = isinstance(value, (str, numbers.Real, decimal.Decimal)) and not isinstance(value, bool)
    if not usable or (not isinstance(value, str) and value in (math.inf, -math.inf)) or value != value:
        raise UserError(f"the ground_truth {shorten_repr(value)} is not a math answer")
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
        raise UserError(f"the ground_truth {shorten_repr(solution)} is not a math answer")
    latex = answer if len(answer) > 2 and answer[0] == answer[-1] == "$" else f"${answer}$"
    if not MATH_WORKER.ask(None, latex):
        raise UserError(f"the ground_truth {shorten_repr(solution)} cannot be parsed by Math-Verify")
    return latex


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` (or ``\fbox{...}``) whose braces balance; None without one.

    >>> last_boxed(r"so \boxed{\frac{1}{2}}, not \boxed{2")
    '\\frac{1}{2}'
    """
    closing = closing_braces(text)
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s{0,8}\{", text))):
        if match.end() - 1 in closing:
            return text[match.end() : closing[match.end() - 1]]
    return None


def math_reward(text: str, ground_truth: Any) -> float:
    r"""1.0 if Math-Verify extracts from ``text`` an answer equal to ``ground_truth``, else 0.0.

    * Only the text after the last </think> counts. A reply with a <think> that is never closed has no answer.
    * Of several boxes the last one counts.
    * The library extracts and compares; its documentation has its limits. Three forms that it does not know are handled
      here: a Unicode minus is "-", a mixed number such as ``2 2/3`` is one value, and a per cent sign in the box is ignored
      if the ground truth has none.
    * A text on which the library fails, or exceeds its time limit, gets 0.0.

    Works in any thread (math_worker.py). Raises UserError as check_math_ground_truth does.

    >>> math_reward(r"so the answer is \boxed{\frac{2}{4}}.", "0.5")
    1.0
    """
    gold = check_math_ground_truth(ground_truth)
    reply = final_reply(text)
    if reply is None:
        return 0.0
    boxed = last_boxed(reply)
    answer = _mixed_as_fractions(reply if boxed is None else rf"\boxed{{{boxed}}}")
    if MATH_WORKER.ask(answer, gold):
        return 1.0
    without_percent = None if boxed is None or "%" in gold else re.sub(r"\s*\\?%\s*$", "", boxed)
    if without_percent in (None, boxed):
        return 0.0
    return float(MATH_WORKER.ask(_mixed_as_fractions(rf"\boxed{{{without_percent}}}"), gold))


_VULGAR = re.compile(r"(?P<whole>(?<!\d)\d{1,50})? ?(?P<vulgar>[\u00bc-\u00be\u2150-\u215e])")
_MIXED = re.compile(r"(?<![\w.,/^}])(\d{1,50})(?: |\u00a0|\\ |~)(\d{1,50})/(\d{1,50})(?![\w/])")


def _mixed_as_fractions(text: str) -> str:
    """The text with mixed numbers (``2 2/3``) as fractions (8/3), which Math-Verify reads as one number everywhere.

    >>> _mixed_as_fractions("so -2 2/3 and 5\u00bd")
    'so -8/3 and 11/2'
    """

    def proper(match: re.Match) -> str:
        whole, top, bottom = map(int, match.groups())
        return f"{whole * bottom + top}/{bottom}" if top < bottom else match[0]

    def vulgar(match: re.Match) -> str:
        top, bottom = unicodedata.normalize("NFKC", match["vulgar"]).split("\u2044")
        space = " " if match["whole"] is None and match[0][0] == " " else ""
        return f"{space}{int(match['whole'] or 0) * int(bottom) + int(top)}/{bottom}"

    return _MIXED.sub(proper, _VULGAR.sub(vulgar, text))


class Reward(NamedTuple):
    """A reward, and the check of its ground truths.

    check(ground_truth): raises UserError for a ground truth that ``score`` cannot use; call it before sampling.
    score(text, ground_truth): any finite number. zero_one: the score is always 0 or 1, so V(x) is the share of right answers.
    """

    check: Callable[[Any], Any]
    score: Callable[[str, Any], float]
    zero_one: bool = False


REWARDS = {
    "integer": Reward(check_integer_ground_truth, integer_reward, zero_one=True),
    "last_integer": Reward(check_integer_ground_truth, last_integer_reward, zero_one=True),
    "math": Reward(check_math_ground_truth, math_reward, zero_one=True),
}


def _name(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"
