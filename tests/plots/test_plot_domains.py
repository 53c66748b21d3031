"""The pictures of kinds of prompts show the numbers of the results."""

import numpy as np
import pytest
from results_files import group_size_law, notes, results

from Gradient_evaluation.errors import UserError
from plots.domains import plot_group_curves, plot_group_sizes, plot_with_groups


def kinds(**laws) -> dict:
    """Results by kind; ``laws``: the group-size law of each value."""
    values = {}
    for number, (name, each) in enumerate(laws.items(), 1):
        scaled = {curve: [number * value for value in found] for curve, found in results()["conditional_on_x"].items()}
        values[name] = results(conditional_on_x=scaled, conditional_on_x_ci95={}, n_prompts=number, group_size_law=each)
    return results(by_group={"column": "level", "values": values})


def nothing(at_least=None) -> dict:
    return {**group_size_law(), "G_star": None, "G_star_ci95": None, "within_10_percent": None, "G_star_at_least": at_least}


def test_each_value_has_the_curve_of_its_results():
    found = kinds(easy=group_size_law(), hard=group_size_law(seed=1))
    _, ax = plot_group_curves(found)
    names = ax.get_legend_handles_labels()[1]
    assert names == ["easy (1 prompt)", "hard (2 prompts)"] and ax.get_title() == "by level"
    for container, each in zip(ax.containers, found["by_group"]["values"].values()):
        assert container.lines[0].get_ydata() == pytest.approx(each["conditional_on_x"]["grpo"])


def test_each_row_has_its_best_size_and_range():
    laws = {"easy": group_size_law(), "hard": group_size_law(seed=1, c3=30.0)}
    _, ax = plot_group_sizes(kinds(**laws))
    drawn = [(list(line.get_xdata()), set(np.ravel(line.get_ydata()))) for line in ax.lines]
    for row, each in enumerate(laws.values()):
        low, high = each["G_star_ci95"]
        for x in (each["within_10_percent"], [low, high], [each["G_star"]]):
            assert (x, {row}) in drawn
    assert [text.get_text() for text in ax.get_yticklabels()] == ["easy (n = 1)", "hard (n = 2)"]


def test_a_value_without_a_best_size_is_named_and_bounded():
    _, ax = plot_group_sizes(kinds(easy=group_size_law(), hard=nothing(at_least=5.5), odd=nothing()))
    assert notes(ax) == "no G* for hard, odd (an arrow: at least)"
    arrows = [line for line in ax.lines if line.get_marker() == ">"]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in arrows] == [([5.5], [1])]
    open_ended = {**group_size_law(), "G_star_ci95": [3.0, None]}
    _, ax = plot_group_sizes(kinds(easy=open_ended))
    assert any(line.get_xdata()[-1] > ax.get_xlim()[1] for line in ax.lines)


def test_the_scripts_figure_has_all_three_panels():
    _, axes = plot_with_groups(kinds(easy=group_size_law(), hard=group_size_law()), label="base")
    assert [ax.get_title() for ax in axes] == ["base", "by level", ""]


def test_results_without_kinds_say_how_to_have_them():
    for draw in (plot_group_curves, plot_group_sizes, plot_with_groups):
        with pytest.raises(UserError, match="--by COLUMN"):
            draw(results())
