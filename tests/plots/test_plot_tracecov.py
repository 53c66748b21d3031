"""The figure shows the results file's numbers, leaves matplotlib's state alone, refuses bad input in one line."""

import numpy as np
import pytest
from results_files import notes, results

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.results.results_file import load_results
from plots.style import CURVES, save_figure, short_lines
from plots.tracecov import plot_by_estimator, plot_tracecov

FLOOR = CURVES["best_baseline"].label


def drawn(ax) -> dict:
    """What the axes show: label → (x, y, bar ends)."""
    shown = {}
    for container in ax.containers:
        line, _, bars = container.lines
        shown[container.get_label()] = (line.get_xdata(), line.get_ydata(), bars[0].get_segments())
    return shown


def test_every_curve_is_drawn_with_its_values_and_intervals():
    figure, ax = plot_tracecov(results(), label="base")
    shown = drawn(ax)
    assert list(shown) == [look.label for look in CURVES.values()]
    for name, curve in results()["conditional_on_x"].items():
        x, values, bars = shown[CURVES[name].label]
        assert list(values) == curve
        assert np.log2(np.asarray(x, dtype=float)) == pytest.approx(np.log2([4, 8, 16]), abs=0.1)
        for segment, value in zip(bars, curve):
            assert segment[:, 1] == pytest.approx([value - 0.5, value + 0.25])
    assert list(shown[FLOOR][1]) == [3.0, 1.5, 0.75]
    assert ax.get_xscale() == "log" and ax.get_xaxis().get_transform().base == 2
    assert "500 prompts, 128,000 continuations" in ax.get_xlabel() and ax.get_title() == "base"


def test_missing_curves_are_named_below_the_axis():
    _, ax = plot_tracecov(results(best_baseline=[None] * 3, best_baseline_ci95=[None] * 3))
    assert list(drawn(ax)) == ["vanilla", "GRPO", "oracle V(x)"]
    assert notes(ax) == f"{FLOOR} not computed: raise --M or lower --block_size"
    published = {key: results()[key] for key in ("K_list", "conditional_on_x")}  # as the published script writes it
    _, ax = plot_tracecov(published)
    assert list(drawn(ax)["GRPO"][1]) == [6.0, 2.5, 1.2] and FLOOR in notes(ax)
    without_v = {**results()["conditional_on_x"], "oracleV": [None] * 3}
    reasons = {"estimators.oracleV.trace_cov": "no oracle value V(x) (2 of 500 prompts)"}
    _, ax = plot_tracecov(results(conditional_on_x=without_v, reasons=reasons))
    assert notes(ax) == "oracle V(x) not computed: no oracle value V(x) (2 of 500 prompts)"
    assert not plot_tracecov(results())[1].texts


def test_a_cross_fitted_oracle_is_called_so():
    made = results(estimators={"oracleV": {"label": "oracle V(x), cross-fitted"}})
    assert list(drawn(plot_tracecov(made)[1]))[2] == "oracle V(x), cross-fitted"
    _, axes = plot_by_estimator([made, made])
    assert "oracle V(x), cross-fitted" in [ax.get_title() for ax in axes]
    _, axes = plot_by_estimator([made, results()])
    assert "oracle V(x)" in [ax.get_title() for ax in axes]


@pytest.mark.parametrize("floor", [[3.0, 1.5, 0.75], [None] * 3])
def test_legend_stays_inside_axes_and_note_inside_figure(floor):
    law = {"model": "org/m", "temperature": 1.0, "top_p": 0.95}
    figure, ax = plot_tracecov(results(best_baseline=floor, best_baseline_ci95=[None] * 3, law=law), label="m")
    figure.draw_without_rendering()
    outer, legend = ax.get_window_extent(), ax.get_legend().get_window_extent()
    assert outer.x0 <= legend.x0 and legend.x1 <= outer.x1
    label = ax.xaxis.label.get_window_extent()
    for text in ax.texts:
        box = text.get_window_extent()
        assert 0 <= box.x0 and box.x1 <= figure.bbox.x1 and 0 <= box.y0 and box.y1 <= label.y0


def test_the_models_name_is_written_once():
    law = {"model": "org/m", "temperature": 1.0, "top_p": 0.95}
    for label, heading in (("m", "temperature 1, top_p 0.95"), ("few-shot", "m\ntemperature 1, top_p 0.95")):
        _, ax = plot_tracecov(results(law=law), label=label)
        assert (ax.get_title(), ax.get_legend().get_title().get_text()) == (label, heading)


def test_long_notes_are_broken_behind_the_colon_first():
    assert short_lines("a: b") == "a: b" and short_lines("a: b", 3) == "a:\nb"
    assert max(map(len, short_lines("word " * 40).split("\n"))) <= 46


def test_log_axis_leaves_out_what_is_not_positive():
    spoiled = results(best_baseline=[3.0, -0.5, 0.75])
    _, ax = plot_tracecov(spoiled, log_y=True)
    assert ax.get_yscale() == "log" and np.isnan(drawn(ax)[FLOOR][1][1])
    figure, ax = plot_tracecov(spoiled)
    assert drawn(ax)[FLOOR][1][1] == -0.5 and ax.get_ylim()[0] < -0.5
    figure.draw_without_rendering()


def test_an_interval_that_leaves_out_its_value_is_drawn():
    plot_tracecov(results(best_baseline_ci95=[[3.2, 3.5], [1.0, 1.4], [0.5, 1.0]]))


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "is not a results file"),
        ('{"K": 4, "prompt_results": []}', "is not a results file .* not a detailed one"),
        ('{"K_list": [4]}', "is not a results file"),
        ('{"K_list": [], "conditional_on_x": {"naive": [], "grpo": [], "oracleV": []}}', "is not a results file"),
        ('{"K_list": [4], "conditional_on_x": {"naive": [1], "grpo": [1]}}', "is not a results file .* oracleV"),
        ('{"K_list": [4], "conditional_on_x": {"naive": [1], "grpo": [1, 2], "oracleV": [1]}}', "is not a results file"),
    ],
)
def test_a_bad_results_file_is_one_line_that_names_it(tmp_path, text, message):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_results(path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_unreadable_and_unwritable_paths_are_user_errors(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        load_results(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot read it"):
        load_results(tmp_path)
    figure, _ = plot_tracecov(results())
    with pytest.raises(UserError, match="cannot write this kind of file"):
        save_figure(figure, tmp_path / "figure.docx")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write it"):
        save_figure(figure, tmp_path / "file" / "figure.pdf")


def test_a_figure_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    figure, _ = plot_tracecov(results())
    path = save_figure(figure, tmp_path / "figure.png")
    before = path.read_bytes()

    def torn(buffer, **settings):
        buffer.write(b"half a figure")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(figure, "savefig", torn)
    with pytest.raises(OSError):
        save_figure(figure, path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]
