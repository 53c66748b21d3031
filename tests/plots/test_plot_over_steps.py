"""The figure over training steps shows the lines of GroupSizeCallback's file."""

import json

import pytest

from Gradient_evaluation.errors import UserError
from plots.plot_over_steps import load_measurements, main, plot_over_steps

LINE = {
    "c1": 2.0,
    "c2": 30.0,
    "c3": 50.0,
    "G_star": 6.0,
    "G_star_ci95": [4.0, None],
    "G_star_at_least": 4.5,
    "almost_best": [4, 8],
    "mean_reward": 0.25,
    "mean_reward_standard_error": 0.1,
    "frac_reward_zero_std": 0.5,
    "num_generations": 8,
    "n_prompts": 16,
}


def written(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_curves_are_those_of_the_file(tmp_path):
    unknown = {**LINE, "step": 20, "G_star": None, "G_star_ci95": None, "almost_best": None}
    path = written(tmp_path / "a.jsonl", [{**LINE, "step": 0}, {"step": 10, "error": "out of memory"}, unknown])
    rows = load_measurements(path)
    assert [row["step"] for row in rows] == [0, 20]
    _, axes = plot_over_steps(rows)
    curves = {line.get_label(): [list(data) for data in line.get_data()] for ax in axes for line in ax.get_lines()}
    assert curves["G*"] == [[0], [6.0]] and curves["G* is at least"] == [[20], [4.5]]
    assert curves["G of the training"][1] == [8, 8]
    assert curves["between prompts: c1 G"] == [[0, 20], [16.0, 16.0]]
    assert (
        curves["small groups: c3/(G-1)"][1] == pytest.approx([50 / 7] * 2) and curves["per continuation: c2"][1] == [30.0] * 2
    )
    assert curves["silent groups"][1] == [0.5, 0.5]


def test_the_signal_to_noise_ratio_has_a_panel_where_it_is_known():
    rows = [{**LINE, "step": 0, "signal_to_noise": 0.3, "label": "base"}, {**LINE, "step": 10, "signal_to_noise": None}]
    _, axes = plot_over_steps(rows)
    assert len(axes) == 4 and list(axes[3].get_lines()[0].get_ydata())[0] == 0.3
    assert [each.get_text() for each in axes[3].get_xticklabels()] == ["base", "10"]
    assert len(plot_over_steps([{**LINE, "step": 0}])[1]) == 3


def test_an_attempt_counts_up_to_where_the_next_one_went_on(tmp_path):
    steps = [(0, 1.0), (5, 2.0), (10, 3.0), (5, 4.0), (15, 5.0)]
    path = written(tmp_path / "a.jsonl", [{**LINE, "step": step, "c2": c2} for step, c2 in steps])
    path.write_text(path.read_text() + '{"step": 20, "torn')
    assert [(row["step"], row["c2"]) for row in load_measurements(path)] == [(0, 1.0), (5, 4.0), (15, 5.0)]


@pytest.mark.parametrize("lines, message", [([], "no measurement"), ([{"step": 3, "loss": 1.0}], "line 1: no measurement")])
def test_other_files_are_refused(lines, message, tmp_path):
    with pytest.raises(UserError, match=message):
        load_measurements(written(tmp_path / "a.jsonl", lines))
    with pytest.raises(UserError, match="no such file"):
        load_measurements(tmp_path / "b.jsonl")


def test_the_script_writes_the_figure(tmp_path, capsys):
    path = written(tmp_path / "a.jsonl", [{**LINE, "step": step} for step in (0, 10)])
    main([str(path), "--out", str(tmp_path / "figure.png")])
    assert (tmp_path / "figure.png").stat().st_size > 5000 and "figure.png" in capsys.readouterr().out
