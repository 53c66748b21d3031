"""Values that a flag takes by its type and no machine can follow: one clear line, or the right thing."""

from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest
from scripts import call

from Gradient_evaluation import calculate_oracle_v, run_tracecov
from Gradient_evaluation.runs.inputs.oracle_table import load_oracle_table
from Gradient_evaluation.runs.inputs.rewards import check_ground_truths, resolve_rewards
from plots.style import finish, new_ax, save_figure

HUGE = "99999999999"


@pytest.mark.parametrize(
    "script, flags",
    [
        (run_tracecov, ("--K_list", HUGE)),
        (run_tracecov, ("--K_list", 4, "--M", HUGE)),
        (run_tracecov, ("--K_list", 4, "--M", HUGE * 3)),
        (run_tracecov, ("--T", HUGE * 3)),
        (run_tracecov, ("--seed", HUGE * 3)),
        (run_tracecov, ("--budget", HUGE * 3)),
        (run_tracecov, ("--gram_memory", HUGE * 3)),
        (run_tracecov, ("--sketch_dim", HUGE)),
        (calculate_oracle_v, ("--n_oracle", HUGE)),
        (calculate_oracle_v, ("--max_new_tokens", HUGE * 3)),
    ],
)
def test_a_number_beyond_any_machine_is_refused_by_its_flag(script, flags, capsys):
    code, _, err = call(script, *(("--oracle_table", "t") if script is run_tracecov else ()), *flags, capsys=capsys)
    assert code == 2 and len(err.splitlines()) == 1 and flags[-2] in err


def test_a_name_with_dollars_is_shown_as_it_stands(tmp_path):
    ax = new_ax()
    ax.plot([1, 2], [1, 2], label="b $y^$")
    finish(ax, "a $x_{$ $")
    assert save_figure(ax.figure, tmp_path / "a:1.png").exists()


def test_decimals_in_parquet_are_the_numbers_they_write(tmp_path):
    long = Decimal("12345678901234567891.00")
    table = {"prompt": ["a", "b"], "ground_truth": [long, Decimal("18.00")], "V_oracle": [Decimal("0.25"), Decimal("1.00")]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "t.parquet")
    rows = load_oracle_table(tmp_path / "t.parquet")
    assert [row.ground_truth for row in rows] == [12345678901234567891, 18]
    assert [row.oracle_value for row in rows] == [0.25, 1.0]
    for reward in ("integer", "math"):
        check_ground_truths(rows, resolve_rewards(reward))
