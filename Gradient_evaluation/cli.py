"""The command line: flags that the scripts share, and what a command does with bad input.

An error that the user can correct is a ``UserError`` of one line, which names the file, the line or flag, and the fix.
``run`` prints it and ends with exit code 2. Any other error is a bug of ours and shows its traceback. Importing this file
loads no large library, so a wrong flag is refused at once.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence

from Gradient_evaluation.chat_template import json_object
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.rewards.own_reward import CALL_LIMIT, is_own
from Gradient_evaluation.settings import DTYPES
from Gradient_evaluation.utils import REWARDS

LARGEST = 1e30  # of a weight
OURS = ("Gradient_evaluation", "Policy_Optimization", "data", "plots")  # a module of these that cannot be imported is our bug


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that takes no abbreviated flags and prints errors in one line, without argparse's usage."""

    def __init__(self, **settings):
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str):
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")

    def given(self) -> list[str]:
        """The flags that were typed on the command line, in the parser's order, without those that have their defaults."""
        written = {argument.partition("=")[0] for argument in sys.argv[1:]}
        return [action.option_strings[0] for action in self._actions if written & set(action.option_strings)]


def run(main: Callable[[], None]) -> None:
    """Call ``main``; a UserError becomes one line on stderr and exit code 2, Ctrl-C one line and 130."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.excepthook = sys.__excepthook__
    for stream in (sys.stdout, sys.stderr):  # so that a file name that the terminal cannot show is no error
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            main()
        except OSError:
            _flush_output("\n")  # if it was printing that failed, this raises a UserError
            raise
        _flush_output()
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt as interrupt:
        message = interrupt.args[0] if interrupt.args else "interrupted; nothing was being measured yet"
        if message:
            print(message, file=sys.stderr)
        sys.exit(130)


def _flush_output(more: str = "") -> None:
    """Write out what was printed so far, and ``more``. Raises UserError if that fails (a full disk, a closed pipe)."""
    try:
        sys.stdout.write(more)
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes again when it ends
        raise UserError(f"standard output cannot be written ({error.strerror or error}); redirect it elsewhere") from None


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Inside, a library that is not installed is a UserError, and Ctrl-C ends this process with one line.

    The libraries take seconds to import. A script reads its flags before them, so that a wrong flag is refused at once.
    """

    def end(*_) -> None:
        sys.stderr.write("interrupted; nothing was being measured yet\n")
        sys.stderr.flush()
        os._exit(130)  # an exception inside an import may be swallowed there

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    except ModuleNotFoundError as error:
        if not error.name or error.name.partition(".")[0] in OURS:
            raise
        raise UserError(
            f"{sys.executable} has no package {error.name.partition('.')[0]}; activate the environment "
            "(make demo or make test sets up .venv: . .venv/bin/activate), or pip install -r requirements.txt"
        ) from None
    finally:
        signal.signal(signal.SIGINT, before)


MOST_CONTINUATIONS = 10**8  # of one prompt; more than any memory can hold


def integer(minimum: int, maximum: int = 2**63 - 1) -> Callable[[str], int]:
    """An argparse type: an integer from ``minimum`` to ``maximum``, by default the largest of 64 bits."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        if value > maximum:
            raise argparse.ArgumentTypeError(f"must be at most {maximum}, got {value}")
        return value

    return convert


def number(low: float, high: float = math.inf, *, low_included: bool) -> Callable[[str], float]:
    """An argparse type: a finite number in [low, high], or in (low, high] without ``low_included``."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        inside = low <= value <= high if low_included else low < value <= high
        if not inside or not math.isfinite(value):
            bounds = f"{'[' if low_included else '('}{low:g}, {high:g}{']' if high < math.inf else ')'}"
            raise argparse.ArgumentTypeError(f"must be in {bounds}, got {text}")
        return value

    return convert


def group_sizes(values: Sequence[str]) -> list[int]:
    """The group sizes of --K_list (``4 8 16`` or ``4,8,16``), sorted and each once.

    Raises UserError for a size below 2: a group of one has no leave-one-out baseline.
    """
    convert = integer(2, MOST_CONTINUATIONS)
    parts = [part for value in values for part in value.replace(",", " ").split()]
    if not parts:
        raise UserError("--K_list: give at least one group size, for example --K_list 4 8 16")
    try:
        return sorted({convert(part) for part in parts})
    except argparse.ArgumentTypeError as error:
        raise UserError(f"--K_list: a group size {error}") from None


STOP_HELP = (
    r"end a continuation at any of these strings (\n is a new line); the reward reads the text before it; "
    "a special token such as <|im_end|> acts as an end-of-sequence token"
)
REWARD_HELP = (
    "integer: the last number is the answer; last_integer: the last digits, as the paper's scripts read "
    "them; math: Math-Verify; or a function of yours, path/file.py:function or package.module:function; several are "
    "added up (%(default)s)"
)


def add_law_flags(parser: argparse.ArgumentParser) -> None:
    """Model and sampling law; names and defaults as published where the paper has them."""
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="hub id or local folder (%(default)s)")
    model.add_argument("--revision", default="main", help="branch, tag or commit of a hub model (%(default)s)")
    law = parser.add_argument_group("sampling law")
    law.add_argument("--temperature", type=number(0, low_included=False), default=1.0, help="(%(default)s)")
    law.add_argument("--top_p", type=number(0, 1, low_included=False), default=0.95, help="(%(default)s)")
    law.add_argument("--top_k", type=integer(0), default=0, help="keep the k likeliest tokens, 0 for all (0)")
    law.add_argument("--max_new_tokens", type=integer(1), default=32, help="(%(default)s)")
    law.add_argument("--stop", nargs="+", default=[], metavar="TEXT", type=_stop_text, help=STOP_HELP)
    law.add_argument(
        "--chat_template_kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="""variables of the chat template, such as '{"enable_thinking": false}'""",
    )


def add_shared_flags(parser: argparse.ArgumentParser) -> None:
    """Model, sampling law, reward, seed and machine."""
    add_law_flags(parser)
    run = parser.add_argument_group("run")
    run.add_argument("--reward", nargs="+", default="integer", metavar="NAME", type=reward_name, help=REWARD_HELP)
    run.add_argument(
        "--reward_weights", nargs="+", type=number(-LARGEST, LARGEST, low_included=True), metavar="W", help="one for each (1)"
    )
    run.add_argument(
        "--reward_timeout",
        type=number(0, 1e6, low_included=False),
        default=CALL_LIMIT,
        metavar="SECONDS",
        help="of one call of a reward function of yours (%(default)s)",
    )
    run.add_argument("--seed", type=integer(0), default=0, help="(%(default)s)")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: bf16 on CUDA, else fp32")
    machine.add_argument("--device", default="auto", help="auto: CUDA if there is one, else the CPU")
    machine.add_argument(
        "--max_memory",
        type=number(0, low_included=False),
        metavar="GIB",
        help="memory that the run may use, of the GPU or (on Linux) of the machine; batches shrink to fit",
    )
    run.add_argument(
        "--skip_long", action="store_true", help="leave out prompts too long for the model's context, instead of an error"
    )
    run.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="run Python code that comes with the checkpoint; only for sources you trust",
    )
    run.add_argument(
        "--save_rollouts", metavar="DIR", help="also write every continuation, one parquet file a prompt (docs/rollouts.md)"
    )
    run.add_argument("--overwrite", action="store_true", help="start afresh instead of continuing")
    run.add_argument("--quiet", action="store_true", help="no progress bar")


def reward_name(text: str) -> str:
    """An argparse type: a name of utils.REWARDS, or one that has the form of a function's. Nothing is loaded."""
    if text in REWARDS or is_own(text):
        return text
    names = ", ".join(map(repr, sorted(REWARDS)))
    raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {names}, or path/file.py:function)")


def _stop_text(text: str) -> str:
    r"""A stop string as it is typed in a shell: \n and \t stand for a new line and a tab."""
    if not text:
        raise argparse.ArgumentTypeError("is empty (an unset variable?): it would end every continuation at once; leave it out")
    return text.replace(r"\n", "\n").replace(r"\t", "\t")
