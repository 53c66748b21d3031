"""A person's own reward function, called in a helper process (this file, as a script); own_reward.py is the other side.

The function runs in the main thread of a process of its own: an endless loop, a crash or what it prints harms no run.
One JSON line each way. ``argv[1]``: {"file" or "module", "function", "limit"}. The first answer is {"about": ...} of
``describe``, or {"error": text}. Each question {"texts", "token_ids", "row": {prompt, ground_truth, columns}} gets one
answer per call of the function: {"values": [...]}, one value per continuation of the call, or {"error": text}. After an
error no more answers come for that question. The helper ends when its input does. Only the standard library is imported.
"""

from __future__ import annotations

import copy
import faulthandler
import functools
import hashlib
import importlib.util
import inspect
import json
import math
import os
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

GRACE = 30.0  # seconds after the time limit of a call when the helper ends by itself: its parent may be gone
FORMS = (
    "f(text, ground_truth), VERL's compute_score(data_source, solution_str, ground_truth, extra_info) or TRL's "
    "f(completions, **columns)"
)
TEXT, VERL, TRL = "text", "verl", "trl"
NOT_EXTRA = ("prompt", "ground_truth", "data_source", "extra_info")  # columns that VERL's extra_info does not repeat
# What TRL passes beside the columns: no trainer runs here, and what a function logs goes nowhere.
LIKE_TRL = {"trainer_state": None, "log_extra": lambda *_: None, "log_metric": lambda *_: None}


class Unusable(Exception):
    """What is wrong with the function or with what it returned, in one line."""


# --- finding the function and reading its signature ---


def file_of(asked: dict) -> str:
    """The file of the function, "" where there is none. Its folder (of a module the working folder) goes first on sys.path."""
    if "file" in asked:
        sys.path.insert(0, os.path.dirname(asked["file"]))
        return asked["file"]
    sys.path.insert(0, os.getcwd())
    spec = importlib.util.find_spec(asked["module"])
    return (spec and spec.has_location and spec.origin) or ""


def load(asked: dict, path: str) -> tuple[Any, str]:
    """(the function, the first 16 hex digits of the SHA-256 of its file).

    asked: {"file": absolute path} or {"module": dotted name}, and "function", which may be dotted (``judge.score``).
    """
    if "file" in asked:
        module, source = _module_of_file(path)
    else:
        module = importlib.import_module(asked["module"])
        if not path:
            raise Unusable(f"module {asked['module']} has no file")
        with open(path, "rb") as file:
            source = file.read()
    found: Any = module
    for name in asked["function"].split("."):
        if not hasattr(found, name):
            known = [each for each, value in vars(module).items() if callable(value) and each[0] != "_"]
            raise Unusable(f"has no {asked['function']}; it has {', '.join(known[:8]) or 'no function'}")
        found = getattr(found, name)
    return found, hashlib.sha256(source).hexdigest()[:16]


def _module_of_file(path: str) -> tuple[types.ModuleType, bytes]:
    with open(path, "rb") as file:
        source = file.read()
    name = os.path.splitext(os.path.basename(path))[0]
    module = types.ModuleType(name if name not in sys.modules else f"{name}_of_reward")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses and pickle look there
    exec(compile(source, path, "exec"), module.__dict__)
    return module, source


def prepared(function: Any, name: str) -> Callable:
    """What is called: the function, or an instance of a class that has ``__call__``. Raises Unusable."""
    if inspect.isclass(function):
        if "__call__" not in {each for base in function.__mro__ for each in vars(base)}:
            raise Unusable(f"{name} is a class whose instances cannot be called; give it __call__, or name a function")
        function = function()
    if not callable(function):
        raise Unusable(f"{name} is {_short(function)}, not a function")
    bare = function
    while isinstance(bare, functools.partial):
        bare = bare.func
    for each in (bare, inspect.getattr_static(type(bare), "__call__", None)):
        if inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each):
            raise Unusable(f"{name} is an async function, which nothing here awaits; give a plain function (asyncio.run in it)")
    return function


def _layers(function: Any) -> Iterator[Any]:
    """The function, and what functools.partial and functools.wraps have around it."""
    while function is not None:
        yield function
        function = function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)


class Signature:
    """How a function wants to be called, by the names of its parameters.

    kind: TRL where one is ``completions``, VERL where one is ``solution_str``; else TEXT: the text goes to the parameter
    ``text``, or to the first one. Every other parameter gets what has its name (``given``). Raises Unusable.
    """

    def __init__(self, function: Callable, name: str):
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):
            raise Unusable(f"{name} does not tell its parameters; wrap it in a function with one of {FORMS}") from None
        self.parameters = [each for each in parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        names = [each.name for each in self.parameters]
        shown = f"{name} has the parameters ({', '.join(map(str, parameters.values()))})"
        if names[:1] == ["self"]:
            raise Unusable(f"{shown}: a method of a class; name that of an instance")
        if "solution_strs" in names:
            raise Unusable(f"{shown}, VERL's form for whole batches; give {FORMS}")
        self.kind = TRL if "completions" in names else VERL if "solution_str" in names else TEXT
        self.text = {TRL: "completions", VERL: "solution_str"}.get(self.kind) or ("text" if "text" in names else "")
        if not self.text:
            positional = [each.name for each in self.parameters if each.kind != each.KEYWORD_ONLY]
            if not positional or positional[0] in ("ground_truth", "prompt", "prompts", "data_source", "extra_info"):
                raise Unusable(f"{shown}, none of which is the text; give {FORMS}")
            self.text = positional[0]
        keywords = any(each.kind == each.VAR_KEYWORD for each in parameters.values())
        self.takes_all = keywords and self.kind != VERL  # VERL's are settings of its own, no columns

    @property
    def required(self) -> list[str]:
        """The columns that a row must have: parameters without a default that nothing else fills."""
        beside = {TRL: ("prompts", "completion_ids", *LIKE_TRL), VERL: ("data_source", "extra_info"), TEXT: ("prompt",)}
        filled = {self.text, "ground_truth", *beside[self.kind]}
        return [each.name for each in self.parameters if each.default is each.empty and each.name not in filled]

    @property
    def takes_prompt(self) -> bool:
        """Whether it is told the prompt; under TRL's signature its form is also that of the completions."""
        return self.kind == TRL or any(each.name == "prompt" for each in self.parameters)

    @property
    def needs_ground_truth(self) -> bool:
        return any(each.name == "ground_truth" and each.default is each.empty for each in self.parameters)

    def taken(self, given: dict) -> dict:
        """Of {name: value} those that a call passes on."""
        return given if self.takes_all else {each.name: given[each.name] for each in self.parameters if each.name in given}

    def arguments(self, given: dict) -> tuple[list, dict]:
        """(args, kwargs) of a call, of {name: value}; parameters that have no value keep their default."""
        args, kwargs = [], {}
        for each in self.parameters:
            if each.name in given and each.kind == each.POSITIONAL_ONLY:
                args.append(given[each.name])
            elif each.name in given:
                kwargs[each.name] = given[each.name]
            elif each.default is each.empty:
                raise Unusable(f"takes {each.name}, and the row has no such column")
        if self.takes_all:
            kwargs |= {name: value for name, value in given.items() if name not in {each.name for each in self.parameters}}
        return args, kwargs


def describe(function: Callable, signature: Signature, path: str, digest: str) -> dict:
    """{kind, zero_one, required, takes_prompt, needs_ground_truth, file, digest}, which own_reward.py reads."""
    return {
        "kind": signature.kind,
        "zero_one": any(getattr(each, "zero_one", False) is True for each in _layers(function)),
        "required": signature.required,
        "takes_prompt": signature.takes_prompt,
        "needs_ground_truth": signature.needs_ground_truth,
        "file": path,
        "digest": digest,
    }


# --- calling it ---


def calls(signature: Signature, question: dict) -> Iterator[tuple[dict, int]]:
    """({name: value}, number of continuations) of each call that a question needs."""
    texts, row, ids = question["texts"], question["row"], question["token_ids"]
    columns = {**row["columns"], "ground_truth": row["ground_truth"]}
    if signature.kind == TRL:
        is_chat, count = isinstance(row["prompt"], list), len(texts)
        given = {name: [value] * count for name, value in columns.items() if name not in ("prompt", "completion")}
        given |= {
            **LIKE_TRL,
            "prompts": [row["prompt"]] * count,
            "completions": [[{"role": "assistant", "content": text}] if is_chat else text for text in texts],
        }
        if ids is not None:
            given["completion_ids"] = ids
        yield copy.deepcopy(signature.taken(given)), count
        return
    given = {**columns, "prompt": row["prompt"]}
    if signature.kind == VERL:
        rest = {name: value for name, value in columns.items() if name not in NOT_EXTRA}
        written = columns.get("extra_info") or {}
        if not isinstance(written, dict):
            raise Unusable(f"takes an object as extra_info, and the row's column of this name is {_short(written)}")
        info = {**rest, **written}
        given |= {"data_source": columns.get("data_source") or "", "extra_info": info}
        given["ground_truth"] = verl_ground_truth(columns)
    for text in texts:  # a copy for each call: a function may change what it is given
        yield copy.deepcopy(signature.taken({**given, signature.text: text})), 1


def verl_ground_truth(columns: dict) -> Any:
    """What VERL passes: reward_model["ground_truth"], where the row has it; a number as the text that its parquet holds."""
    judged = columns.get("reward_model")
    value = judged["ground_truth"] if isinstance(judged, dict) and "ground_truth" in judged else columns["ground_truth"]
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


def values_of(signature: Signature, returned: Any, count: int) -> list[float | None]:
    """The rewards in what one call returned for ``count`` continuations. Raises Unusable."""
    if signature.kind == TRL:
        if isinstance(returned, (str, bytes, dict)) or not hasattr(returned, "__iter__"):
            raise Unusable(f"returned {_short(returned)}, not a list of {count} rewards, one for each completion")
        values = returned.tolist() if hasattr(returned, "tolist") else list(returned)
        if len(values) != count:
            raise Unusable(f"returned {len(values)} rewards for {count} completions")
        return [None if value is None else number(value) for value in values]
    if signature.kind == VERL and isinstance(returned, dict):
        if "score" not in returned:
            raise Unusable(f"returned {_short(returned)}, a dict without score")
        returned = returned["score"]
    return [number(returned)]


def number(value: Any) -> float:
    """A finite float; Unusable for what is none."""
    if not isinstance(value, (str, bytes)):
        try:
            found = float(value)
            if math.isfinite(found):
                return found
        except (TypeError, ValueError, OverflowError):
            pass
    raise Unusable(f"returned {_short(value)}, not a finite number")


def _short(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = "something without a repr"
    return f"{text[:60]}{'...' if len(text) > 60 else ''} ({type(value).__name__})"


def in_one_line(error: BaseException, path: str) -> str:
    """``raised ValueError: no digits (format.py, line 12)``: the deepest line of the person's own file, ``path``."""
    if isinstance(error, Unusable):
        return str(error)
    if isinstance(error, SyntaxError):
        places, text = [(error.filename or path, error.lineno or 1)], error.msg
    else:
        frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
        places = [each for each in frames if each[0] == path]
        try:
            text = " ".join(str(error).split())[:200]
        except Exception:
            text = ""
    where = f" ({os.path.basename(places[-1][0] or '')}, line {places[-1][1]})" if places else ""
    return f"raised {type(error).__name__}{': ' if text else ''}{text}{where}"


def serve() -> None:
    """Answer questions until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    questions, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    silence = os.open(os.devnull, os.O_RDONLY)
    os.dup2(silence, 0)
    os.dup2(2, 1)  # what the function prints is no answer
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path = [each for each in sys.path if os.path.abspath(each or ".") != here]
    sys.path.append(os.path.dirname(os.path.dirname(here)))  # a reward may use those of this toolkit
    asked = json.loads(sys.argv[1])
    nowhere, served_by = open(os.devnull, "w"), os.getpid()

    def answer(value: dict) -> None:
        data = json.dumps(value).encode() + b"\n"
        while data:
            data = data[answers.write(data) :]

    path = ""
    try:
        path = file_of(asked)
        function, digest = load(asked, path)
        function = prepared(function, asked["function"])
        signature = Signature(function, asked["function"])
        answer({"about": describe(function, signature, path, digest)})
    except BaseException as error:  # SystemExit too: a script without a main guard
        answer({"error": in_one_line(error, path)})
        return
    for line in questions:
        try:
            for given, count in calls(signature, json.loads(line)):
                args, kwargs = signature.arguments(given)
                faulthandler.dump_traceback_later(asked["limit"] + GRACE, exit=True, file=nowhere)
                try:
                    returned = function(*args, **kwargs)
                finally:
                    if os.getpid() != served_by:  # a fork of the function's own came back: its answer is one too many
                        os._exit(0)
                values = values_of(signature, returned, count)
                faulthandler.cancel_dump_traceback_later()
                answer({"values": values})
        except BaseException as error:
            faulthandler.cancel_dump_traceback_later()
            answer({"error": in_one_line(error, path)})
    if os.getsid(0) == os.getpid():  # as HelperProcess starts it: end threads and processes that the function has left
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    serve()
