"""The reward VERL trains with: the evaluation's own, chosen row by row.

    reward.custom_reward_function.path=/abs/path/Policy_Optimization/reward_fn.py    (grpo_train.sh sets it)

VERL loads this file by its path in every reward worker and calls ``compute_score``. The rewards of a row are named by the
first of these that is there: the keyword ``reward`` (+reward.custom_reward_function.reward_kwargs.reward=math), the row's
extra_info["reward"] (prepare_parquet.py writes it), and DATA_SOURCES. A name is one of utils.REWARDS or a person's own
function, "/path/file.py:function" (own_reward.py); that gets the columns that it gets in the evaluation, and runs in a helper
process of each worker. Safe in worker threads, which share that process: one call at a time.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

if str(Path(__file__).resolve().parents[1]) not in sys.path:  # Ray's workers start in other folders
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.rewards.integer_answer import final_reply, parse_integer_answer
from Gradient_evaluation.rewards.own_reward import CALL_LIMIT, Reward, check_weights, is_own, resolve_reward
from Gradient_evaluation.runs.inputs.dataset import packed_columns, to_json, with_packed_columns
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


class Chosen(NamedTuple):
    """The rewards of a row: as they were named, what each counts, and seconds per call of a person's own function."""

    names: tuple[str, ...]
    weights: tuple[float, ...]
    timeout: float = CALL_LIMIT
    digests: tuple[str | None, ...] = ()


def choose_reward(
    data_source: str,
    extra_info: Mapping[str, Any] | None = None,
    reward: str | Sequence[str] | None = None,
    reward_weights: Sequence[float] | None = None,
    reward_timeout: float = CALL_LIMIT,
    reward_digests: Sequence[str | None] = (),
) -> Chosen:
    """The rewards of a row; UserError, one line, if nothing names a known one. The keywords are those of compute_score."""
    named = reward or (extra_info or {}).get("reward") or DATA_SOURCES.get(data_source)
    if named is None:
        raise UserError(
            f"no reward is known for data_source {data_source!r}; prepare the data with prepare_parquet.py, or pass "
            f"--reward {'|'.join(REWARDS)}"
        )
    weights = reward_weights if reward else None
    if isinstance(named, str) and named.startswith("{"):  # several, as prepare_parquet.py writes them
        given = json.loads(named)
        named, weights = list(given), list(given.values())
    names = (named,) if isinstance(named, str) else tuple(named)
    for name in names:
        if name not in REWARDS and not is_own(name):
            known = " or ".join(REWARDS)
            raise UserError(f"reward {name!r} of data_source {data_source!r} is unknown; use {known} or file.py:function")
    return Chosen(names, check_weights(weights, names), float(reward_timeout), tuple(reward_digests) if reward else ())


_RESOLVED: dict[tuple[str, float], Reward] = {}
_LOCK = threading.Lock()


def resolved(chosen: Chosen) -> list[Reward]:
    """The rewards themselves, found once in a process. UserError where a file is not the one that was checked at the start."""
    with _LOCK:
        for name in chosen.names:
            if (name, chosen.timeout) not in _RESOLVED:
                _RESOLVED[name, chosen.timeout] = resolve_reward(name, chosen.timeout)
        found = [_RESOLVED[name, chosen.timeout] for name in chosen.names]
    for reward, digest in zip(found, chosen.digests):
        if digest is not None and reward.digest != digest:
            raise UserError(f"the reward {reward.name}: its file is not the one that the launcher checked; start again")
    return found


def as_row(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any] | None) -> SimpleNamespace:
    """The row (runs/inputs/dataset.py) as the evaluation would have it, of what VERL tells of it; prompt None without one.

    The columns are those that prepare_parquet.py has packed, or the fields of another program's extra_info.
    """
    info = json_fields(extra_info or {})
    fields = {} if packed_columns(info) else info
    told = {"data_source": str(data_source), "ground_truth": to_json(ground_truth), "extra_info": info}
    columns = with_packed_columns({**fields, **told})
    number = f", row {info['index'] + 1}" if isinstance(info.get("index"), int) else ""
    where = f"{info.get('split') or data_source}{number}"
    return SimpleNamespace(
        prompt=columns.get("prompt"), ground_truth=columns["ground_truth"], columns=columns, where=where, tools=[]
    )


def json_fields(info: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an extra_info that have a form in JSON."""
    found = {}
    for name, value in info.items():
        with contextlib.suppress(UserError):
            found[str(name)] = to_json(value)
    return found


def check_row(row: Any, rewards: Sequence[Reward]) -> None:
    """UserError where a reward cannot judge the continuations of a row of ``as_row``."""
    for reward in rewards:
        reward.check_row(row)
        if reward.takes_prompt and row.prompt is None:
            raise UserError(
                f"{row.where}: the reward {reward.name} is told the prompt, which VERL does not pass on; prepare the data "
                "with prepare_parquet.py --reward, which puts it into extra_info"
            )


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
    reward: str | Sequence[str] | None = None,
    **more: Any,
) -> dict[str, float | str | None]:
    """Score one continuation → {"score", and where there is one "acc" (1.0 or 0.0) and "pred" (extracted answer)}.

    "score" is what training maximises; of several rewards the sum of weight times reward, and each reward stands beside it
    under its name. "acc" is the first reward that is 0 or 1, the accuracy VERL averages over the validation prompts
    (val-core/DATA_SOURCE/acc/mean@N). "pred" is the answer that the first of this toolkit's own rewards reads, a str always,
    because VERL takes its majority vote over it.

    more: reward_weights, reward_timeout and reward_digests, as in ``choose_reward``; VERL's other keywords are ignored.
    Raises UserError for an unknown reward, an unusable ground_truth or row, a person's function that fails, and a
    continuation that every reward leaves out (None): VERL logs it and trains on the others of its group.
    """
    given = {name: more[name] for name in ("reward_weights", "reward_timeout", "reward_digests") if more.get(name) is not None}
    chosen = choose_reward(data_source, extra_info, reward, **given)
    if chosen.weights == (1.0,) and chosen.names[0] in REWARDS:
        score = REWARDS[chosen.names[0]].score(solution_str, ground_truth)
        return {"score": score, "acc": score, "pred": extract_answer(solution_str, chosen.names[0])}
    rewards, row = resolved(chosen), as_row(data_source, ground_truth, extra_info)
    check_row(row, rewards)
    values = [each.of_prompt([str(solution_str)], row)[0] for each in rewards]
    parts = [weight * value for weight, value in zip(chosen.weights, values) if value is not None]
    if not parts:
        raise UserError(f"{row.where}: a continuation is left out of training, as its reward is None")
    judged = [value for each, value in zip(rewards, values) if each.zero_one and value is not None]
    readers = [name for name in chosen.names if name in REWARDS]
    return {
        "score": float(sum(parts)),
        **({each.name: value for each, value in zip(rewards, values)} if len(rewards) > 1 else {}),
        **({"acc": judged[0]} if judged else {}),
        **({"pred": extract_answer(solution_str, readers[0])} if readers else {}),
    }
