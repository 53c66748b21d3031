"""The reward VERL trains with: the evaluation's own, chosen row by row.

    reward.custom_reward_function.path=/abs/path/Policy_Optimization/reward_fn.py    (grpo_train.sh sets it)

VERL loads this file by its path in every reward worker and calls ``compute_score``. The reward of a row is named by the
first of these that is there: the keyword ``reward`` (+reward.custom_reward_function.reward_kwargs.reward=math), the row's
extra_info["reward"] (prepare_parquet.py writes it), and DATA_SOURCES. Safe in worker threads.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if str(Path(__file__).resolve().parents[1]) not in sys.path:  # Ray's workers start in other folders
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.integer_answer import final_reply, parse_integer_answer
from Gradient_evaluation.utils import REWARDS, last_boxed, parse_last_integer

DATA_SOURCES = {
    "arithmetic": "integer",
    "Kyleyee/arithmetic-few-shot": "integer",
    "Kyleyee/arithmetic-test": "integer",
    "openai/gsm8k": "integer",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
}


def choose_reward(data_source: str, extra_info: Mapping[str, Any] | None = None, reward: str | None = None) -> str:
    """The name of the reward (of utils.REWARDS) for a row; UserError, one line, if nothing names a known one."""
    named = reward or (extra_info or {}).get("reward") or DATA_SOURCES.get(data_source)
    if named is None:
        raise UserError(
            f"no reward is known for data_source {data_source!r}; prepare the data with prepare_parquet.py, or pass "
            f"--reward {'|'.join(REWARDS)}"
        )
    if named not in REWARDS:
        raise UserError(f"reward {named!r} of data_source {data_source!r} is unknown; use {' or '.join(REWARDS)}")
    return named


def extract_answer(text: str, reward: str) -> str:
    r"""The answer of a continuation as text, for logs and majority votes; "" if there is none.

    integer, last_integer: the number the reward compares. math: the last balanced ``\boxed{}``, else what follows the last
    ``####``, else the last integer; Math-Verify, which gives the score, reads more forms than these.
    """
    if reward == "math":
        reply = final_reply(text) or ""
        if (boxed := last_boxed(reply)) is not None:
            return boxed.strip()
        if "####" in reply:
            return reply.rpartition("####")[2].strip()
    answer = parse_last_integer(text) if reward == "last_integer" else parse_integer_answer(text)
    return "" if answer is None else str(answer)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    reward: str | None = None,
    **_: Any,
) -> dict[str, float | str]:
    """Score one continuation → {"score", "acc": 1.0 or 0.0, "pred": extracted answer}.

    "score" is what training maximises, "acc" the accuracy VERL averages over the validation prompts
    (val-core/DATA_SOURCE/acc/mean@N), and "pred" a str always, because VERL takes its majority vote over it.
    Other keywords of VERL's are ignored. Raises UserError for an unknown reward or an unusable ground_truth.
    """
    name = choose_reward(data_source, extra_info, reward)
    score = REWARDS[name].score(solution_str, ground_truth)
    return {"score": score, "acc": score, "pred": extract_answer(solution_str, name)}
