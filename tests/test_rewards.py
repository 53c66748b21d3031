"""The rewards as tables of (text, ground truth, expected), named after the kind of fault each row stands for."""

import json
import os
import select
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from Gradient_evaluation.cli import UserError
from Gradient_evaluation.integer_answer import LONGEST_INTEGER, check_integer_ground_truth, parse_integer_answer
from Gradient_evaluation.math_worker import MathWorker
from Gradient_evaluation.utils import (
    REWARDS,
    check_math_ground_truth,
    integer_reward,
    last_boxed,
    last_integer_reward,
    math_reward,
)

ROOT = Path(__file__).resolve().parents[1]
CASES = [json.loads(line) for line in (ROOT / "tests/cases/reward_integer.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("text, gold, reward", [
    ("so 12 + 7 = 19.", 19, 1.0), ("19, because 12 + 7", 19, 0.0), ("-7", "-7", 1.0), ("10-2", -2, 1.0), ("10-2", 2, 0.0),
    ("3.50", 50, 1.0), ("1,234", 1234, 0.0), ("1,234", 234, 1.0), ("1e5", 5, 1.0), ("007", "7.0", 1.0), ("\u0663", 3, 1.0),
    ("none", 0, 0.0), ("", 0, 0.0), ("9" * 9000, 9, 0.0), ("so\n19", "a\n#### 19", 1.0)])
def test_last_integer_is_the_released_rule(text, gold, reward):
    assert last_integer_reward(text, gold) == REWARDS["last_integer"].score(text, gold) == reward


def test_last_integer_refuses_what_is_no_integer():
    for gold in ("n/a", 3.5, None, True):
        with pytest.raises(UserError, match="ground_truth"):
            REWARDS["last_integer"].check(gold)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["kind"])
def test_integer_reward_gives_what_the_shared_case_says(case):
    text = case["text"].replace("TEXT_OF_9000_DIGITS_7", "7" * 9000)
    if case["reward"] == "error":
        with pytest.raises(UserError, match="ground_truth"):
            integer_reward(text, case["gold"])
        with pytest.raises(UserError, match="ground_truth"):
            REWARDS["integer"].check(case["gold"])
    else:
        assert integer_reward(text, case["gold"]) == case["reward"]


@pytest.mark.parametrize(
    "kind, text, expected",
    [
        ("minus touching", "-7", -7),
        ("minus touching after a word", "The answer is -7", -7),
        ("minus in brackets", "(-7)", -7),
        ("minus with a space after it, first in the text", "- 7", -7),
        ("minus with a space after it, after an equals sign", "3 - 10 = - 7", -7),
        ("minus between spaces after a word is a dash", "The answer - 7", 7),
        ("minus between spaced numbers", "10 - 2", 2),
        ("minus touching the second number", "10 -2", 2),
        ("minus after a line break", "10\n-2", -2),
        ("minus after a bracket", "(3+4)-2", 2),
        ("minus after a percent sign", "50%-7", 7),
        ("minus after a minus", "10--7", -7),
        ("minus after a comma", "3,-7", -7),
        ("minus after a times", "5*-7", -7),
        ("minus in a box", r"\boxed{-7}", -7),
        ("minus trailing", "7-", 7),
        ("hyphen in a word", "x-7", 7),
        ("unicode minus", "\u22127", -7),
        ("en dash as a minus", "\u20137", -7),
        ("en dash as a range", "5\u20133", 3),
        ("em dash is punctuation", "the answer\u20147", 7),
        ("currency before the minus", "$-5", -5),
        ("currency after the minus", "-$5", -5),
        ("currency in LaTeX", r"-\$5", -5),
        ("separators in LaTeX", r"12{,}000", 12000),
        ("separators in LaTeX, spaced", r"70\,000", 70000),
        ("separators twice", "1,234,567", 1234567),
        ("separator of a short group starts a new number", "1,23", 23),
        ("separators at odd places", "12,345,67", 67),
        ("separators after four digits", "1234,567", 567),
        ("separators and a zero fraction", "1,234.00", 1234),
        ("several dots are no number", "1.234.567", None),
        ("several dots are no number", "at 192.168.0.1", None),
        ("decimal", "2.4 = 12/5 = 2.4", None),
        ("decimal without a leading zero", "x = .5", None),
        ("dot of an abbreviation", "e.g.5", 5),
        ("dots of an ellipsis", "...5", 5),
        ("trailing dot", "19.", 19),
        ("fraction: the slash is an operator", "3/4", 4),
        ("percent", "50%", 50),
        ("unit", "7kg", 7),
        ("exponent", "1e5", 100000),
        ("exponent with a fraction", "1.5e3", 1500),
        ("exponent that leaves a fraction", "1e-1", None),
        ("exponent out of reach", "1e999999999", None),
        ("exponent of zero", "0e999999999", 0),
        ("leading zeros", "007", 7),
        ("leading zeros beyond Python's limit", "0" * 5000 + "7", 7),
        ("the longest integer", "1" * LONGEST_INTEGER, int("1" * LONGEST_INTEGER)),
        ("one digit too long", "1" * (LONGEST_INTEGER + 1), None),
        ("minus zero", "-0", 0),
        ("digits of another script", "\u0664\u0662", 42),
        ("full-width digits", "\uff14\uff12", 42),
        ("zero fraction in another script", "\u0664\u0662.\u0660", 42),
        ("superscript is no digit", "2\u00b3", 2),
        ("no number", "\u00bd of it", None),
    ],
)
def test_last_number_of_a_text_is_read_as_documented(kind, text, expected):
    assert parse_integer_answer(text) == expected


@pytest.mark.parametrize(
    "value, expected",
    [
        (18, 18),
        (-7, -7),
        (18.0, 18),
        ("18", 18),
        (" 18.0 ", 18),
        ("1,234", 1234),
        ("-7", -7),
        ("\u22127", -7),
        ("+3", 3),
        ("$70,000", 70000),
        ("She has 9 + 9 = <<9+9=18>>18.\n#### 18", 18),
        (np.int64(3), 3),
        (np.float32(3), 3),
        (np.str_("3"), 3),
    ],
)
def test_integer_ground_truth_is_read_as_data_files_hold_it(value, expected):
    assert check_integer_ground_truth(value) == expected


@pytest.mark.parametrize(
    "value",
    [None, True, np.True_, 3.5, "3.5", np.nan, float("inf"), "n/a", "", "#### ", "3 or 4", "1,23", "--7", "5-",
     "18 eggs", "x-7", "7" * 5000, [3], {"answer": 3}, b"3", np.array([3])],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_what_is_no_integer_is_refused_as_ground_truth_in_one_line(value):
    with pytest.raises(UserError, match="is not an integer") as caught:
        check_integer_ground_truth(value)
    assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)


NUMBER_LIKE = st.text(st.sampled_from("0123456789.,-+eE $%/()*=x\n{}\\\u2212\u0664\u00b2\u2009"))


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.text(), NUMBER_LIKE))
def test_integer_reward_raises_on_no_text(text):
    answer = parse_integer_answer(text)
    assert integer_reward(text, 7) == float(answer == 7)


@settings(max_examples=300, deadline=None)
@given(st.integers(), st.sampled_from(["{}", "{:,}", "The answer is {:,}.", "**{}**", "3 + 4 = {}.0", "\\boxed{{{}}}"]))
def test_every_integer_written_out_is_read_back(value, form):
    assert integer_reward(form.format(value), value) == 1.0
    assert integer_reward(form.format(value), value + 1) == 0.0
    assert check_integer_ground_truth(f"{value:,}") == value


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.none(), st.booleans(), st.floats(), st.text(), NUMBER_LIKE, st.lists(st.integers())))
def test_integer_ground_truth_is_an_int_or_the_documented_error(value):
    try:
        assert isinstance(check_integer_ground_truth(value), int)
    except UserError:
        pass


REPEATED = [
    "1", "1,", "1.", "1,1.", "1,123", "1e1", "-", "- ", "-1", "$", "{,}", "1\\,", "e1", "x-", "\u00b2", "\u0664",
]  # fmt: skip


@pytest.mark.parametrize("piece", REPEATED)
def test_a_megabyte_of_anything_is_read_in_linear_time(piece):
    """A quadratic scan takes hours on these, so the test would hang."""
    text = piece * (1_000_000 // len(piece))
    for tail in ("", "5", " 5", "x"):
        parse_integer_answer(text + tail)


@pytest.mark.parametrize("piece", ["\\boxed{", "\\boxed{1}", "{", "}", "\\boxed", "\\boxed        "])
def test_a_megabyte_of_boxes_is_read_in_linear_time(piece):
    last_boxed(piece * (1_000_000 // len(piece)))


@pytest.mark.parametrize(
    "text, expected",
    [
        (r"\boxed{5}", "5"),
        (r"\boxed{1} then \fbox{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {3}", "3"),
        ("none", None),
    ],
)
def test_last_balanced_box(text, expected):
    assert last_boxed(text) == expected


@pytest.mark.parametrize(
    "kind, text, gold, expected",
    [
        ("gsm8k solution as ground truth", "The answer is 72.", "48/2 = <<48/2=24>>24\n#### 72", 1),
        ("gsm8k marker in the text", "so 24+48=72\n#### 72", 72, 1),
        ("gsm8k marker with trailing dot", "#### 18.", 18, 1),
        ("gsm8k separators", "#### 1,234", "1234", 1),
        ("wrong number", "#### 71", 72, 0),
        ("math solution as ground truth", r"\boxed{\frac{1}{2}}", r"Thus $x=\boxed{\frac12}$.", 1),
        ("equal value, other form", r"\boxed{0.5}", r"\frac{1}{2}", 1),
        ("equal value, unsimplified", r"\boxed{\frac{3}{6}}", "1/2", 1),
        ("ground truth between dollars", r"$\sqrt{8}$", r"$2\sqrt{2}$", 1),
        ("interval", r"\boxed{(-\infty, 3)}", r"(-\infty,3)", 1),
        ("tuple", r"\boxed{(3, \frac{\pi}{2})}", r"\left( 3, \frac{\pi}{2} \right)", 1),
        ("percent", r"\boxed{50\%}", r"50\%", 1),
        ("text answer", r"\boxed{\text{Evelyn}}", r"\text{Evelyn}", 1),
        ("unicode minus", "The answer is \u22127", -7, 1),
        ("float ground truth", "The answer is 3.5", 3.5, 1),
        ("lone surrogate", "\ud800 72", 72, 1),
        ("no answer", "I do not know", 72, 0),
        ("empty", "", 72, 0),
    ],
)
def test_math_reward(kind, text, gold, expected):
    assert math_reward(text, gold) == expected


@pytest.mark.parametrize(
    "value",
    [None, True, np.nan, float("inf"), "", " ", "n/a", "None", "???", "text #### ", [72], b"72"],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_math_answer_is_refused_as_ground_truth(value):
    with pytest.raises(UserError, match="ground_truth"):
        check_math_ground_truth(value)
    with pytest.raises(UserError, match="ground_truth"):
        math_reward("72", value)


def test_math_reward_has_its_time_limit_in_every_thread():
    """The library's limit works in a main thread only; without one, the power tower would hang this thread."""
    tower, answers = r"\boxed{9^{9^{9^{9}}}}", {}
    thread = threading.Thread(target=lambda: answers.update(tower=math_reward(tower, 72), next=math_reward("72", 72)))
    thread.start()
    thread.join(timeout=150)
    assert answers == {"tower": 0.0, "next": 1.0}


def test_math_reward_called_from_many_threads_gives_each_its_own_answer():
    with ThreadPoolExecutor(8) as pool:
        rewards = list(pool.map(lambda n: math_reward(f"The answer is {n}", n - n % 3), range(60)))
    assert rewards == [float(n % 3 == 0) for n in range(60)]


def test_math_worker_that_was_killed_is_started_again():
    worker = MathWorker()
    assert worker.ask("72", "$72$")
    worker._process.kill()
    worker._process.wait()
    assert worker.ask("72", "$72$")
    worker.close()


def test_math_worker_ends_with_its_process():
    code = "from Gradient_evaluation.utils import math_reward; import Gradient_evaluation.math_worker as m; "
    code += "print(math_reward('72', 72), m.MATH_WORKER._process.pid, flush=True); import os; os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    reward, helper = done.stdout.split()
    assert reward == "1.0"
    try:
        ended = os.pidfd_open(int(helper))
    except ProcessLookupError:
        return
    with open(ended):
        assert select.select([ended], [], [], 60)[0]


MATH_PIECES = [*"0123456789^{}\\$+-*/()=.,!_ x", "\\frac", "\\boxed{"]
MATH_LIKE = st.lists(st.sampled_from(MATH_PIECES), max_size=12).map("".join)


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.text(max_size=80), MATH_LIKE))
def test_math_reward_survives_any_text(text):
    assert math_reward(text, 72) in (0.0, 1.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["kind"])
def test_math_reward_survives_the_integer_cases(case):
    assert math_reward(case["text"].replace("TEXT_OF_9000_DIGITS_7", "7" * 9000), 72) in (0.0, 1.0)


def test_utils_are_cheap_to_import():
    heavy = {"torch", "transformers", "numpy", "sympy"}
    code = f"import sys, Gradient_evaluation.utils; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
