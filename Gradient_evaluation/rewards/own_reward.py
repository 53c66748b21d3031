"""The rewards that --reward names: those of this toolkit, and functions in people's own files.

    resolve_reward("integer")                  one of utils.REWARDS
    resolve_reward("rewards/format.py:score")  a function in a file
    resolve_reward("package.module:function")  a function of a module that Python finds

A function has one of three signatures, told apart by the names of its parameters:
* ``f(text, ground_truth) -> float``. Further parameters get the row's column of their name, ``prompt`` the prompt;
  ``**columns`` gets all columns.
* VERL's ``compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)`` -> float or {"score": float}.
  data_source is the row's column of this name, "" where it has none; extra_info has the row's other columns, and what is in
  its column extra_info. ground_truth is that of the column reward_model where there is one, and a number is passed as text,
  as in VERL's parquet.
* TRL's ``f(completions, **columns) -> list of float or None``, one call for all continuations of a prompt. Each column is
  a list with one value per completion; so are ``prompts`` and ``completion_ids``. Where the prompt is a list of messages,
  each completion is [{"role": "assistant", "content": text}]. None leaves a continuation out.

It may also be a functools.partial, an object with ``__call__`` or a class of such objects; async functions are refused. A
function that returns only 0 and 1 may say so: ``f.zero_one = True``. It is called in a helper process (reward_worker.py)
under a time limit per call. Importing this file loads neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.rewards.helper_process import HelperProcess, NoAnswer
from Gradient_evaluation.rewards.integer_answer import shorten_repr
from Gradient_evaluation.rewards.reward_worker import (
    TRL,
    Signature,
    Unusable,
    calls,
    describe,
    in_one_line,
    prepared,
    values_of,
)
from Gradient_evaluation.utils import REWARDS

CALL_LIMIT = 60.0  # seconds; the default of --reward_timeout
START_LIMIT = 120.0  # seconds for the import of a person's file, where --reward_timeout is not longer


class Reward:
    """One reward, whoever wrote it.

    name: as stored with results: "integer", "format.py:score" (of a path the file's name only), "package.module:function".
    digest: the first 16 hex digits of the SHA-256 of the function's file; None for this toolkit's own rewards.
    zero_one: every reward is 0 or 1, so that the share of right answers is V(x).
    """

    def __init__(self, name: str, check: Callable, score: Callable, zero_one: bool, own: OwnFunction | None = None):
        self.name, self.check, self.score, self.zero_one, self._own = name, check, score, zero_one, own

    @property
    def digest(self) -> str | None:
        return self._own.about["digest"] if self._own else None

    @property
    def takes_prompt(self) -> bool:
        """Whether a person's function is told the prompt."""
        return self._own is not None and self._own.about["takes_prompt"]

    def check_row(self, row: Any) -> None:
        """Raise UserError, naming ``row.where``, for a row that lacks what the reward needs. Call it before sampling."""
        try:
            self.check(row.ground_truth)
            if self._own:
                self._own.check_columns(row.columns)
        except UserError as error:
            raise UserError(f"{row.where}: {error}; correct it or choose another --reward") from None

    def of_prompt(self, texts: Sequence[str], row: Any, token_ids: Sequence[Sequence[int]] | None = None) -> list[float | None]:
        """The rewards of the continuations of one prompt; None leaves a continuation out (TRL's signature only).

        texts: the continuations. row: their prompt, with ``prompt``, ``ground_truth``, ``columns`` and ``where`` as in
        runs/inputs/dataset.py. token_ids: the continuations' tokens, for functions that take completion_ids.
        Raises UserError that names ``row.where``, the reward, the continuation and its text.
        """
        if self._own:
            self.check_row(row)
            return self._own.of_prompt(list(texts), row, token_ids)
        return [self.score(text, row.ground_truth) for text in texts]


def resolve_reward(name: str, timeout: float = CALL_LIMIT) -> Reward:
    """The reward of a name: of utils.REWARDS, "path/file.py:function", or "package.module:function".

    timeout: seconds per call of a person's own function. The function's file is imported in the helper process, at once.
    Raises UserError: no such file, module or function, an import that fails, or a signature that is none of the three.
    """
    if name in REWARDS:
        found = REWARDS[name]
        return Reward(name, found.check, found.score, found.zero_one)
    own = OwnFunction(name, timeout)
    return Reward(own.name, own.check, own.score, own.about["zero_one"], own)


def reward_in_process(function: Callable) -> Reward:
    """The reward of a function (one of the three signatures) that is called in this process, without a time limit.

    For a trainer, which calls its rewards so too. Raises UserError for what is no such function.
    """
    own = OwnFunctionHere(function)
    return Reward(own.name, own.check, own.score, own.about["zero_one"], own)


def is_own(name: str) -> bool:
    """Whether a name is that of a person's own function, by its form."""
    return ":" in name.strip(":")


def stored_name(name: str) -> str:
    """The name that results have: of a path only the file's name, so that a folder may move."""
    source, _, function = name.rpartition(":")
    return f"{Path(source).name}:{function}" if _is_path(source) else name


def _is_path(source: str) -> bool:
    return source.endswith(".py") or os.sep in source


class OwnFunction:
    """A person's function behind its helper process, which is started when it is needed and again after it died.

    Safe in threads (one call at a time) and forks. A pickled copy starts a helper of its own.
    """

    def __init__(self, name: str, timeout: float):
        if not is_own(name):
            raise UserError(
                f"--reward {name}: unknown; use {', '.join(REWARDS)}, or a function of yours: path/file.py:function "
                "or package.module:function"
            )
        source, _, function = name.rpartition(":")
        self.typed, self.name, self.timeout = name, stored_name(name), timeout
        self.asked: dict[str, Any] = {"function": function, "limit": timeout}
        if _is_path(source):
            path = Path(source).expanduser()
            if not path.is_file():
                raise UserError(f"--reward {name}: there is no file {source}")
            self.asked["file"] = str(path.resolve())
        else:
            self.asked["module"] = source
        self.about: dict[str, Any] = {}
        self._helper = self._new_helper()
        with self._helper.asking():
            self.about = self._start()

    def _new_helper(self) -> HelperProcess:
        return HelperProcess([sys.executable, str(Path(__file__).with_name("reward_worker.py")), json.dumps(self.asked)])

    def __getstate__(self) -> dict:
        return {name: value for name, value in vars(self).items() if name != "_helper"}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._helper = self._new_helper()

    def check(self, ground_truth: Any) -> None:
        """Raise UserError where the function needs a ground truth and there is none."""
        if ground_truth is None and self.about["needs_ground_truth"]:
            raise UserError(f"the reward {self.name} takes ground_truth, and the row has none")

    def check_columns(self, columns: dict) -> None:
        """Raise UserError where the function needs a column that is not there."""
        for name in self.about["required"]:
            if name not in columns:
                there = ", ".join(columns) or "none"
                raise UserError(f"the reward {self.name} takes {name}, and the row has no such column (columns: {there})")

    def score(self, text: str, ground_truth: Any) -> float | None:
        """The reward of one text, for a row that has a ground truth and nothing else."""
        row = SimpleNamespace(prompt="", ground_truth=ground_truth, columns={}, where="a single text")
        return self.of_prompt([text], row, None)[0]

    def of_prompt(self, texts: list[str], row: Any, token_ids: Sequence[Sequence[int]] | None) -> list[float | None]:
        """See ``Reward.of_prompt``."""
        plain = {"prompt": row.prompt, "ground_truth": row.ground_truth, "columns": row.columns}
        ids = None if token_ids is None else [list(map(int, each)) for each in token_ids]
        values, error = self._answers({"texts": texts, "token_ids": ids, "row": plain}, len(texts))
        if error:
            raise UserError(self._told(error, texts, len(values), row))
        return values

    def _answers(self, question: dict, count: int) -> tuple[list[float | None], str | None]:
        """The values of ``count`` continuations; or those before the first fault, and what that was."""
        values: list[float | None] = []
        line = json.dumps(question).encode() + b"\n"
        with self._helper.asking():
            self._send(line)
            while len(values) < count:
                answer = self._answer(self.timeout)
                if "error" in answer:
                    return values, answer["error"]
                values += answer["values"]
        return values, None

    def _told(self, what: str, texts: Sequence[str], done: int, row: Any) -> str:
        """One line: where, which reward, which continuation, its text, and what went wrong."""
        text = shorten_repr(texts[done])
        which = f"continuation {done + 1}, {text}"
        if self.about["kind"] == TRL:
            which = f"{len(texts)} continuations, the first {text}"
        return f"{row.where}: the reward {self.name} {what}, for {which}; mend the reward function"

    # --- the helper process ---

    def _start(self) -> dict:
        """Start the helper; what it says about the function. Raises UserError where it is unusable or has changed."""
        self._helper.start()
        answer = self._answer(max(START_LIMIT, self.timeout), "while it was imported")
        if "error" in answer:
            raise UserError(f"--reward {self.typed}: {answer['error']}")
        if self.about and answer["about"] != self.about:
            raise UserError(f"--reward {self.typed}: its file changed during the run; give the same command again")
        return answer["about"]

    def _send(self, question: bytes) -> None:
        for _ in range(2):  # a helper that died while idle is replaced once
            if self._helper.process is None:
                self._start()
            if self._helper.write(question):
                return
        raise UserError(f"--reward {self.typed}: its process ends before it is asked anything")

    def _answer(self, limit: float, when: str = "") -> dict:
        """The helper's next answer; an error where it ended, or said nothing for ``limit`` seconds."""
        try:
            return json.loads(self._helper.line(limit))
        except NoAnswer as none:
            if none.exit_code is None:
                return {"error": f"took more than {limit:g} seconds {when}".rstrip() + " (--reward_timeout)"}
            return {"error": f"ended its process (exit code {none.exit_code}) {when}".rstrip()}


class OwnFunctionHere(OwnFunction):
    """A person's function in this process; there is no helper."""

    def __init__(self, function: Callable):
        self.name = getattr(function, "__name__", type(function).__name__)
        try:
            self.function = prepared(function, self.name)
            self.signature = Signature(self.function, self.name)
        except Unusable as error:
            raise UserError(f"reward: {error}") from None
        self.path = getattr(getattr(self.function, "__code__", None), "co_filename", "")
        self.about = describe(self.function, self.signature, self.path, "in this process")

    def _answers(self, question: dict, count: int) -> tuple[list[float | None], str | None]:
        values: list[float | None] = []
        try:
            for given, size in calls(self.signature, question):
                args, kwargs = self.signature.arguments(given)
                values += values_of(self.signature, self.function(*args, **kwargs), size)
        except Exception as error:
            return values, in_one_line(error, self.path)
        return values, None


def check_weights(weights: Sequence[float] | None, names: Sequence[str]) -> tuple[float, ...]:
    """One weight for each of ``names``; UserError where there are more or fewer, or all are 0."""
    if weights is None:
        return (1.0,) * len(names)
    if len(weights) != len(names):
        raise UserError(
            f"--reward_weights: {len(weights)} weights for {len(names)} rewards ({', '.join(names)}); give one each"
        )
    if not any(weights):
        raise UserError("--reward_weights: all are 0, so that no reward counts; give one that is not")
    return tuple(map(float, weights))
