"""More continuations for a folder of Grams: --per_prompt, and what a grown run has in common with one that began so."""

import numpy as np
import pytest
from scripts import RESULTS, one_line_error, read, tracecov

from Gradient_evaluation.runs import gram_store

TWELVE = ("--K_list", 4, 8, "--per_prompt", 12)


def test_per_prompt_is_the_number_of_continuations_whatever_the_largest_group_size(policy, table, tmp_path):
    for name, more in (("a", ("--K_list", 4, "--M", 3)), ("b", ("--K_list", 4, 64, "--per_prompt", 12, "--block_size", 4))):
        assert tracecov(policy, table, tmp_path / name, *more)[0] == 0
    a, b = (list(gram_store.load_all(tmp_path / name / "grams")) for name in "ab")
    for one, other in zip(a, b, strict=True):
        assert len(other.rewards) == 12 and np.array_equal(np.stack(one.grams), np.stack(other.grams))
    a, b = (read(tmp_path / name / RESULTS)["conditional_on_x"] for name in "ab")
    assert b["grpo"][0] == a["grpo"][0] and 0 < b["grpo"][1] < b["grpo"][0]


@pytest.mark.parametrize("more, said", [(("--M", 2), "--M: no effect with --per_prompt"), (("--per_prompt", 3), "at least 4")])
def test_per_prompt_that_cannot_be_is_refused(policy, table, tmp_path, capsys, more, said):
    one_line_error(tracecov(policy, table, tmp_path, *TWELVE, *more, capsys=capsys), "--per_prompt", said)
