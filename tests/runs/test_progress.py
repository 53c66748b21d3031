"""What a run says of how far it is: on a terminal, in a log, or nothing; by a clock that the test moves."""

import sys

import pytest

from Gradient_evaluation.runs.machine.durations import time_text
from Gradient_evaluation.runs.machine.processes import Processes
from Gradient_evaluation.runs.machine.progress import Progress


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def said(capsys, seconds, total=500, quiet=False, answer="", before=0, terminal=False, monkeypatch=None):
    """What stderr has after prompts that took so many seconds each."""
    clock = Clock()
    if terminal:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(total, before, "reward", quiet, Processes("cpu"), clock) as progress:
        progress.answer = answer
        for each in seconds:
            clock.now += each
            progress.done(0.43, 16)
    return capsys.readouterr().err.splitlines()


def test_a_log_has_one_line_a_minute(capsys):
    assert said(capsys, [15] * 7) == ["4/500 prompts, 60 s, about 2.1 h left, mean reward 0.43"]
    lines = said(capsys, [15] * 119, before=1)
    assert len(lines) == 29 and lines[-1] == "117/500 prompts, 29 min, about 1.6 h left, mean reward 0.43"


def test_a_slow_prompt_has_its_line_at_once(capsys):
    assert said(capsys, [600, 600, 10]) == [
        "1/500 prompts, 10 min, about 3.5 days left, mean reward 0.43",
        "2/500 prompts, 20 min, about 3.5 days left, mean reward 0.43",
    ]


def test_a_log_has_the_answer_so_far_where_the_run_stops_by_itself(capsys):
    assert said(capsys, [30, 30], total=None) == ["60 s: 2 prompts, mean reward 0.43"]
    answer = "G* 5.8 [4.1, 9.0] after 34 prompts, about 3 min to +-20%"
    assert said(capsys, [61], total=None, answer=answer) == [f"61 s: {answer}"]


def test_nothing_is_said_under_quiet_or_within_a_minute(capsys):
    assert said(capsys, [100] * 5, quiet=True) == []
    assert said(capsys, [1] * 59) == []


def test_a_terminal_has_a_line_that_changes_and_no_log(capsys, monkeypatch):
    lines = said(capsys, [100, 100], total=None, answer="G* 5.8", terminal=True, monkeypatch=monkeypatch)
    assert any("G* 5.8" in line for line in lines) and not any("min" in line for line in lines)


@pytest.mark.parametrize(
    "seconds, text",
    [(0.2, "0 s"), (89, "89 s"), (91, "2 min"), (31 * 60, "31 min"), (1.6 * 3600, "1.6 h"), (2.31 * 86400, "2.3 days")],
)
def test_a_time_has_the_unit_that_people_say_it_in(seconds, text):
    assert time_text(seconds) == text
