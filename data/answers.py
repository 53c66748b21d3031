r"""The answer of a row as the text that VERL's files hold: after ``####``, in the last ``\boxed{}``, or the value itself.

answer_of(value, kind, rewards)     for the rewards of a data set
answer_text(value, reward, kind)    for one of this toolkit's own, which must be able to compare with it
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import to_json
from Gradient_evaluation.utils import REWARDS, last_boxed


def answer_of(value: Any, kind: str, rewards: Sequence[str]) -> str:
    """The answer of a row as text, by the first of this toolkit's own rewards; a person's own function gets it whole."""
    for name in rewards:
        if name in REWARDS:
            return answer_text(value, name, kind)
    if kind == "math":
        return _boxed_answer(value)
    if kind == "gsm8k":
        return _marked_answer(value)
    return value if isinstance(value, str) else json.dumps(to_json(value), ensure_ascii=False)


def answer_text(value: Any, reward: str, kind: str) -> str:
    r"""The answer of a row as text: what follows the last ``####``, the last ``\boxed{}``, or the value itself.

    Raises UserError if ``reward`` could not compare with it, or where a kind promises a mark that is missing.

    >>> answer_text("48 / 2 = 24\n#### 1,024", "integer", "gsm8k"), answer_text(r"so \boxed{\frac12}", "math", "math")
    ('1024', '\\frac12')
    """
    if kind == "gsm8k":
        _marked_answer(value)
    if kind == "math":
        value = _boxed_answer(value)
    checked = REWARDS[reward].check(value)
    if isinstance(checked, int):
        return str(checked)
    text = str(value)
    if "####" in text:
        return text.rpartition("####")[2].strip()
    boxed = last_boxed(text)
    return (text if boxed is None else boxed).strip()


def _marked_answer(answer: Any) -> str:
    """What follows the last ``####``."""
    if not (isinstance(answer, str) and "####" in answer):
        raise UserError("the answer has no ####; is this GSM8K?")
    return answer.rpartition("####")[2].strip()


def _boxed_answer(solution: Any) -> str:
    r"""What the last ``\boxed{}`` holds; a few solutions of MATH write ``\boxed 5$`` without braces."""
    answer = last_boxed(solution) if isinstance(solution, str) else None
    if answer is None and isinstance(solution, str):
        bare = re.findall(r"\\boxed\s+([^${}\\\s]+)\s*(?=\$)", solution)
        answer = bare[-1] if bare else None
    if answer is None:
        raise UserError(r"the solution has no balanced \boxed{}; is this MATH?")
    return answer
