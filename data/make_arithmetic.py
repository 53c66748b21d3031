"""Write the arithmetic problem set: short integer problems of five kinds, one JSON object a line.

    python data/make_arithmetic.py --n 500 --seed 0 --out outputs/arithmetic_zero_shot.jsonl
    python data/make_arithmetic.py --style few_shot          # five worked examples before the question
    python data/make_arithmetic.py --style few_shot --plain  # string prompts, for base models

Each line holds ``prompt`` (a list with one user message, or a string under --plain), ``ground_truth``
(int, may be negative) and ``kind``. The setting is that of section 5.1 of Zhou et al., arXiv 2603.01162;
the wording and the number ranges are our own:

    kind            form                                       numbers
    two_step        a ± b ± c                                  easy: operands 1..9
    three_step      a ± b ± c ± d                              else: operands of one digit (1..9) or two
    parentheses     a ± (b ± c) or (a ± b) ± (c ± d)                 (10..99), even odds, each on its own
    multiplication  a * b                                      easy: a and b from 2..9
    division        a / b, exact                               else: a (or a / b) 2..9 or 10..99, b 2..20

Seven draws in ten are easy. Every round of five problems holds each kind once, in random order, so the
kinds are as even as n allows and a smaller set is the beginning of a larger one. No problem comes twice
and none is a worked example; one seed gives the same problems in both styles, as messages and as strings.
Runs in under a second.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import Parser, integer, run
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine.files import one_line_errors, to_json_line, write_bytes_atomic

KINDS = ("two_step", "three_step", "multiplication", "division", "parentheses")
STYLES = ("zero_shot", "few_shot")
EASY_SHARE = 0.7  # of the draws; the rest spread from easy to hard for a model of any size
INSTRUCTION = "Reply with one integer."
WORKED_EXAMPLES = (("14 + 9 - 6", 17), ("8 - 15 + 5 - 2", -4), ("7 * 12", 84), ("96 / 12", 8), ("18 - (7 + 5)", 6))
# multiplication and division have the fewest problems: 98 * 19 each, less the worked example
MAX_PROBLEMS = len(KINDS) * (98 * 19 - 1)


def draw_operand(rng: random.Random, easy: bool, low: int = 1) -> int:
    """An integer in low..9, or unless ``easy`` with even odds in 10..99, uniform within each range."""
    return rng.randint(low, 9) if easy or rng.random() < 0.5 else rng.randint(10, 99)


def draw_sum(rng: random.Random, easy: bool, terms: int) -> tuple[str, int]:
    """A sum of ``terms`` operands with random signs → (expression, value); the first has no sign."""
    value = draw_operand(rng, easy)
    expression = str(value)
    for _ in range(terms - 1):
        sign, operand = rng.choice("+-"), draw_operand(rng, easy)
        expression += f" {sign} {operand}"
        value += operand if sign == "+" else -operand
    return expression, value


def draw_parentheses(rng: random.Random, easy: bool) -> tuple[str, int]:
    """a ± (b ± c) or (a ± b) ± (c ± d), with even odds → (expression, value)."""
    terms = 1 if rng.random() < 0.5 else 2
    first, first_value = draw_sum(rng, easy, terms)
    first = first if terms == 1 else f"({first})"
    sign = rng.choice("+-")
    second, second_value = draw_sum(rng, easy, 2)
    value = first_value + second_value if sign == "+" else first_value - second_value
    return f"{first} {sign} ({second})", value


def draw_problem(rng: random.Random, kind: str) -> tuple[str, int]:
    """One random problem of ``kind`` (of KINDS) → (expression, exact integer value)."""
    easy = rng.random() < EASY_SHARE
    if kind == "two_step":
        return draw_sum(rng, easy, 3)
    if kind == "three_step":
        return draw_sum(rng, easy, 4)
    if kind == "parentheses":
        return draw_parentheses(rng, easy)
    large, small = draw_operand(rng, easy, low=2), rng.randint(2, 9 if easy else 20)
    if kind == "multiplication":
        return f"{large} * {small}", large * small
    if kind == "division":
        return f"{large * small} / {small}", large
    raise ValueError(f"unknown kind {kind!r}, expected one of {KINDS}")


def write_prompt(expression: str, style: str, plain: bool) -> str | list[dict[str, str]]:
    """The prompt that asks for ``expression``: chat messages, or one string when ``plain``.

    It ends with "=", so a base model goes on with the number:
    ``write_prompt("2 * 3", "zero_shot", True)`` → ``"Reply with one integer.\\n2 * 3 ="``.
    """
    examples = WORKED_EXAMPLES if style == "few_shot" else ()
    lines = [INSTRUCTION, *(f"{worked} = {answer}" for worked, answer in examples), f"{expression} ="]
    text = "\n".join(lines)
    return text if plain else [{"role": "user", "content": text}]


def make_problems(n: int, seed: int, style: str = "zero_shot", plain: bool = False) -> list[dict]:
    """``n`` distinct problems, the kinds as even as n allows → rows with prompt, ground_truth, kind.

    style: one of STYLES. Raises UserError where n is not in 1..MAX_PROBLEMS.
    """
    if not 1 <= n <= MAX_PROBLEMS:
        raise UserError(f"--n: {n} problems asked for; the number ranges allow 1 to {MAX_PROBLEMS} without repeats")
    rng = random.Random(seed)
    seen = {expression for expression, _ in WORKED_EXAMPLES}
    rows: list[dict] = []
    while len(rows) < n:
        for kind in rng.sample(KINDS, len(KINDS))[: n - len(rows)]:
            expression, answer = draw_problem(rng, kind)
            while expression in seen:
                expression, answer = draw_problem(rng, kind)
            seen.add(expression)
            rows.append({"prompt": write_prompt(expression, style, plain), "ground_truth": answer, "kind": kind})
    return rows


def write_jsonl(rows: Sequence[dict], path: Path) -> None:
    """Write one JSON object a line; ``path`` appears only when it is complete. Makes parent folders."""
    if not path.name:
        raise UserError(f"--out {path}: that is a folder; give the path of a file")
    with one_line_errors(path, "write"):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes_atomic(path, b"".join(map(to_json_line, rows)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(prog="make_arithmetic.py", description="Write the arithmetic problem set as JSONL.")
    parser.add_argument("--n", type=integer(1), default=500, help="number of problems (default 500)")
    parser.add_argument("--seed", type=integer(0), default=0, help="seed of the problems (default 0)")
    parser.add_argument("--style", choices=STYLES, default="zero_shot", help="few_shot: five worked examples first")
    parser.add_argument("--plain", action="store_true", help="prompts as strings instead of chat messages")
    parser.add_argument("--out", type=Path, help="file to write (default outputs/arithmetic_STYLE.jsonl)")
    options = parser.parse_args(arguments)

    out = options.out or Path("outputs") / f"arithmetic_{options.style}.jsonl"
    rows = make_problems(options.n, options.seed, options.style, options.plain)
    write_jsonl(rows, out)
    counts = Counter(row["kind"] for row in rows)
    print(f"{len(rows)} problems ({', '.join(f'{kind} {counts[kind]}' for kind in KINDS)}) in {out}")


if __name__ == "__main__":
    run(main)
