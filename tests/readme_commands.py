"""What commands do README.md and docs/ hold, and would each start? Every word of them, against the parsers and files there are.

for command in readme_commands(): check(command)        # AssertionError says what is wrong with it
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# README.md and what it links, in the order in which a person's commands build on each other
PAGES = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in "prompts rewards rollouts estimators long_runs precision files limits costs paper training method".split()
    ),
)
INSTALLED = ("-o", ".venv/installed", "-o", "outputs/verl_cpu/venv/installed")  # what make is to take as done
REPORTED = "outputs/demo/tracecov_tiny_model.json"  # what make report takes without RESULTS
PROGRAMS = ("python", ".venv/bin/python", "torchrun", "bash", "make", "pip", "ray", "wandb", "jupyter", "export")
WRITTEN_BY = (
    "--out",
    "--out_dir",
    "--save_json",
    "--plot_path",
    "--save_rollouts",
    "--run_dir",
    "--sweep_dir",
    "--target_dir",
    "--local_dir",
)
# the names of what the scripts write; an outputs/ path of the README that is read must be one of them
OUTPUTS = re.compile(
    r"oracle_v_n\d+_[\w.-]+\.jsonl|tracecov_(?!.*_detailed)[\w.-]+\.json|grams|rollouts|manifest\.json|"
    r"group_sizes\.json|group_size\.jsonl|trl|(train|val)\.parquet|(arithmetic_\w+|problems)\.jsonl"
)


class Command(NamedTuple):
    """One command: its words, and the variables set before it."""

    text: str
    words: list[str]
    variables: dict[str, str]


class Parsed(Exception):
    """A script's parser has accepted its arguments."""


def code_blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language, indented ones too, without their indent."""
    found = re.finditer(rf"^( *)```{language}\n(.*?)^\1```", text, re.MULTILINE | re.DOTALL)
    return [re.sub(rf"^{match[1]}", "", match[2], flags=re.MULTILINE) for match in found]


def commands_in(block: str) -> Iterator[Command]:
    """The commands of a shell block, continued lines joined, comments left out."""
    for line in block.replace("\\\n", " ").splitlines():
        words, variables = shlex.split(line, comments=True), {}
        while words and re.match(r"[A-Z_]+=", words[0]):
            name, _, value = words.pop(0).partition("=")
            variables[name] = value
        if words:
            yield Command(" ".join(line.split()), words, variables)


def readme_text() -> str:
    """README.md and the pages of docs/, in the order in which one would follow them."""
    return "\n".join((ROOT / name).read_text() for name in PAGES)


def readme_commands(text: str | None = None) -> list[Command]:
    """Every command of the bash blocks, and those in running text that begin with a program and have arguments."""
    text = text if text is not None else readme_text()
    blocks = code_blocks(text, "bash")
    prose = re.sub(r"^( *)```.*?^\1```", "", text, flags=re.MULTILINE | re.DOTALL)
    inline = [words for words in re.findall(r"`([^`]+)`", prose) if re.match(r"[\w./]+ +\S", words)]
    blocks += [words for words in inline if words.split()[0] in PROGRAMS]
    return [command for block in blocks for command in commands_in(block)]


def check(command: Command) -> None:
    """Raise AssertionError unless the command's program, flags, values and files are there. Nothing is run."""
    program, *arguments = command.words
    assert program in PROGRAMS, f"{program}: a command of no known kind; teach tests/readme_commands.py to check it"
    if program in ("python", ".venv/bin/python"):
        check_python(arguments)
    elif program == "torchrun":
        own, arguments = torchrun_flags(arguments)
        from torch.distributed.run import get_args_parser

        with one_line():
            get_args_parser().parse_args([*own, "script.py"])
        check_python(arguments)
    elif program == "bash":
        check_shell(arguments, command.variables)
    elif program == "make":
        make_lines(arguments)
    elif program in ("ray", "wandb", "jupyter"):
        check_outer_program(command.words)
    else:
        assert arguments, f"{program}: has no arguments"
        packages = r"[\w.-]+(\[\w+\])?([=<>]=[\d.]+)?"
        wanted = packages if program == "pip" else r"[A-Z_]+=\S+"
        names = arguments[1:] if program == "pip" else arguments
        assert all(re.fullmatch(wanted, name) or name.startswith("-r") or (ROOT / name).is_file() for name in names)


def torchrun_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """torchrun's own flags, and the script with its."""
    index = next(i for i, word in enumerate(arguments) if word.endswith(".py"))
    return list(arguments[:index]), list(arguments[index:])


def check_python(arguments: Sequence[str]) -> None:
    """python FILE ... or python -m MODULE ..."""
    if arguments[0] != "-m":
        check_paths(arguments)
        parse(arguments[0], arguments[1:])
        return
    module, rest = arguments[1], list(arguments[2:])
    assert module in ("pytest", "ruff", "verl.model_merger"), f"-m {module}: teach tests/readme_commands.py to check it"
    if module == "pytest":
        check_paths(rest)
        markers = re.findall(r'"(\w+): ', (ROOT / "pyproject.toml").read_text())
        chosen = rest[rest.index("-m") + 1] if "-m" in rest else ""
        assert set(re.findall(r"\w+", chosen)) <= {"not", "and", "or", *markers}, f"-m {chosen}: no such marker"
        others = [word for word in rest if word.startswith("-") and word not in ("-m", "-q", "-x")]
        assert not others, f"pytest {others}: teach tests/readme_commands.py to check it"


def check_shell(arguments: Sequence[str], variables: dict[str, str]) -> None:
    """bash FILE ..., for the launcher and the sweep: settings as flags or variables, with their values."""
    script = Path(arguments[0]).name
    arguments = [word for word in arguments if word != "..."]
    check_paths(arguments)
    if script == "grpo_train.sh":
        from Policy_Optimization.settings import read_settings

        with one_line():
            read_settings(arguments[1:], variables)
        return
    assert script == "sweep_group_size.sh", f"{arguments[0]}: teach tests/readme_commands.py to check it"
    from Policy_Optimization.settings import SETTINGS

    unknown = set(variables) - {setting.name.upper() for setting in SETTINGS}
    assert not unknown, f"{unknown}: no such setting"
    parse("Policy_Optimization/sweep.py", arguments[1:])


def check_outer_program(words: Sequence[str]) -> None:
    """ray, wandb, jupyter: a command we know, and what follows ``--`` is checked as a command of its own."""
    known = {"ray": ("start", "status", "job"), "wandb": ("sync", "login"), "jupyter": ("lab", "notebook")}
    end = list(words).index("--") if "--" in words else len(words)
    check_paths(words[:end])
    assert words[1] in known[words[0]], f"{words[0]} {words[1]}: teach tests/readme_commands.py to check it"
    if inner := [re.sub(r"^/shared/repo/", "", word) for word in words[end + 1 :]]:
        check(Command(shlex.join(inner), inner, {}))


def make_lines(arguments: Sequence[str]) -> list[Command]:
    """What make would run for these targets (``make -n``), as commands; AssertionError for an unknown target."""
    done = subprocess.run(["make", "-n", *INSTALLED, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for word in arguments:
        if "=" in word:
            check_paths([word.partition("=")[2]])
    lines = re.sub(r"^if .*; fi && \\\n\s*", "", done.stdout, flags=re.MULTILINE)  # how report takes RESULTS apart
    results = next((word.partition("=")[2] for word in arguments if word.startswith("RESULTS=")), REPORTED)
    commands = commands_in(lines.replace('"$@"', results))
    return [command for command in commands if not command.words[0].startswith("make")]


def check_paths(arguments: Sequence[str]) -> None:
    """Files of the repository must exist; what is read from outputs/ must have a name that the scripts write."""
    before = ""
    for word in arguments:
        top = word.split("/")[0]
        if top == "outputs":
            known = before in WRITTEN_BY or OUTPUTS.fullmatch(Path(word).name) or word.startswith("outputs/demo/problems")
            assert known, f"{word}: no script writes a file of this name"
        elif "/" in word and (ROOT / top).is_dir() or word.endswith((".py", ".sh")):
            path = re.sub(r"(\.py):\w+$", r"\1", word)  # a function in a file
            assert (ROOT / path).exists(), f"{word}: no such file"
        before = word if word.startswith("-") else before


def parse(script: str, arguments: Sequence[str]) -> None:
    """Let a script's own parser judge the arguments, and stop there."""
    parts = Path(script).with_suffix("").parts
    main = importlib.import_module(".".join(parts[1:] if parts[0] == "tests" else parts)).main  # pytest imports tests/ bare
    of_argparse, argv = argparse.ArgumentParser, sys.argv
    original, known, others = of_argparse.parse_args, of_argparse.parse_known_args, []

    def parse_args(parser, args=None, namespace=None):
        of_argparse.parse_known_args = known  # parse_args calls it
        raise Parsed(original(parser, args, namespace))

    def parse_known_args(parser, args=None, namespace=None):
        others.extend(known(parser, args, namespace)[1])
        raise Parsed(others)

    of_argparse.parse_args, of_argparse.parse_known_args = parse_args, parse_known_args
    sys.argv = [script, *arguments]
    try:
        with one_line():
            main()
        raise AssertionError(f"{script}: its main reads no arguments")
    except Parsed:
        pass
    finally:
        of_argparse.parse_args, of_argparse.parse_known_args, sys.argv = original, known, argv
    if others:  # track_checkpoints.py passes them on
        parse("Gradient_evaluation/run_tracecov.py", ["--dataset", "d", "--save_json", "out", *others])


@contextlib.contextmanager
def one_line():
    """A refusal, by exit or as a UserError, becomes an AssertionError with its line."""
    from Gradient_evaluation.errors import UserError

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as end:
        raise AssertionError(said.getvalue().strip() or f"exit code {end.code}") from None
    except UserError as error:
        raise AssertionError(str(error)) from None


def help_flags(words: Sequence[str]) -> set[str]:
    """The flags that ``words --help`` names."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run([*words, "--help"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-500:]
    return set(re.findall(r"--[\w-]+", done.stdout))
