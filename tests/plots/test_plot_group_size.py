"""The group-size figure shows the numbers of the group-size law, marks the best G, refuses bad input in one line."""

import json

import numpy as np
import pytest
from results_files import group_size_law, results

from Gradient_evaluation.errors import UserError
from plots.group_size import plot_group_size
from plots.plot_group_size import main


def lines(ax) -> dict:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines}


def test_the_curve_its_terms_and_its_band_are_those_of_the_law():
    made = group_size_law()
    _, ax = plot_group_size(made, label="base")
    curve, shown = made["curve"], lines(ax)
    assert shown["predicted MSE"] == (curve["G"], curve["mse_times_N"])
    labels = {"c1": "between prompts: c1 G", "c2": "per continuation: c2", "c3": "small groups: c3/(G-1)"}
    for name, label in labels.items():
        assert shown[label] == (curve["G"], curve["terms"][name])
    corners = ax.collections[0].get_paths()[0].vertices
    for size, ends in zip(curve["G"], curve["ci95"]):
        heights = corners[corners[:, 0] == size][:, 1]
        assert heights.min() == pytest.approx(ends[0]) and heights.max() == pytest.approx(ends[1])
    assert ax.get_title() == "base" and "n = 40 prompts" in ax.get_xlabel() and "x N" in ax.get_ylabel()


def test_best_size_papers_bound_and_range_are_marked():
    made = group_size_law()
    _, ax = plot_group_size(made)
    shown = lines(ax)
    marked = {label: x for label, (x, _) in shown.items() if len(x) == 1}
    assert sorted(marked.values()) == [[made["G_star_paper_bound"]], [made["G_star"]]]
    bound_x, bound_y = shown["bound form c1 G + c2 + c3/G"]
    assert bound_y == pytest.approx([made["c1"] * g + made["c2"] + made["c3"] / g for g in bound_x])
    assert bound_x[int(np.argmin(bound_y))] in (int(made["G_star_paper_bound"]), int(made["G_star_paper_bound"]) + 1)
    low, high = made["within_10_percent"]
    (shade,) = [patch for patch in ax.patches if patch.get_label().startswith("within 10%")]
    assert (shade.get_x(), shade.get_x() + shade.get_width()) == (low, high)


def test_with_a_budget_the_axis_is_the_mse_up_to_one_group():
    made = group_size_law()
    _, ax = plot_group_size(made, budget=64)
    sizes, values = lines(ax)["predicted MSE"]
    assert sizes[-1] == 64 and values == pytest.approx([v / 64 for v in made["curve"]["mse_times_N"][: len(sizes)]])
    assert "N = 64" in ax.get_ylabel()


def test_a_law_without_a_best_size_is_drawn_and_says_so():
    made = group_size_law(c1=0.05, spread=0.5)
    assert made["G_star"] is None
    figure, ax = plot_group_size(made)
    (text,) = [label for label in lines(ax) if label.startswith("G*")]
    reason = f"G* not computed, at least {made['G_star_at_least']:.3g}: {made['reasons']['G_star']}"
    assert text.replace("\n", " ") == reason and max(map(len, text.split("\n"))) <= 46
    figure.draw_without_rendering()


def test_a_best_size_that_may_well_be_larger_is_drawn_as_such():
    made = {**group_size_law(), "G_star_may_be_larger": True}
    assert any(label.startswith("G* =") and label.endswith("may well be larger") for label in lines(plot_group_size(made)[1]))


def test_terms_that_are_not_above_zero_are_left_out_and_named():
    figure, ax = plot_group_size(group_size_law(c3=-0.5))
    assert "small groups: c3/(G-1) (not above 0)" in lines(ax)
    figure.draw_without_rendering()


def test_a_law_without_intervals_is_drawn_without_a_band():
    figure, ax = plot_group_size(group_size_law(n=3))
    assert not ax.collections
    figure.draw_without_rendering()


@pytest.mark.parametrize(
    "bad, message",
    [
        (None, "holds no group_size_law"),
        ([1], "holds no group_size_law"),
        ({"curve": {"mse_times_N": None}, "reasons": {"curve": "one prompt"}}, "no curve: one prompt"),
        (
            {**group_size_law(), "curve": {**group_size_law()["curve"], "mse_times_N": [-1.0] * 511}},
            "no predicted MSE .* above 0",
        ),
    ],
)
def test_a_law_that_cannot_be_drawn_is_one_line(tmp_path, bad, message):
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(results(group_size_law=bad)))
    with pytest.raises(UserError, match=message) as caught:
        main([str(path), "--out", str(tmp_path / "x.png")])
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)
