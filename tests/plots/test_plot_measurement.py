"""The pictures of a run show the numbers of its results and Grams, and say in one line what is missing."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from abstract_policy import summary_of
from results_files import notes
from scripts import detailed_rows

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.stats import summary as estimators
from Gradient_evaluation.stats.estimators import ALL, label_of
from Gradient_evaluation.stats.missing import Missing
from plots.measurement import Scores, load_measurement
from plots.notebook import mse_table
from plots.plot_estimators import (
    RATIO,
    fit_ratio_law,
    missing,
    plot_any_group_size,
    plot_estimators,
    plot_ratio,
    ratios_by_size,
)
from plots.plot_prompts import (
    best_baseline,
    difficulty,
    plot_best_baselines,
    plot_on_policy_check,
    plot_prompt_traces,
    plot_score_norms,
    plot_variance_shares,
    reward_classes,
)

AT_ONE_K = (plot_prompt_traces, plot_variance_shares, plot_best_baselines)
NEED_GRAMS = (*AT_ONE_K, plot_score_norms, plot_on_policy_check, plot_any_group_size)


@pytest.fixture(scope="module")
def path(small_run):
    return small_run / "tracecov_tiny_model.json"


@pytest.fixture(scope="module")
def measured(path):
    return load_measurement(path, compare_at=4)


@pytest.fixture(scope="module")
def without_grams(path, tmp_path_factory):
    return load_measurement(shutil.copy(path, tmp_path_factory.mktemp("alone")))


def lines(ax) -> dict:
    return {line.get_label(): (np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in ax.lines}


def compared(**ratios) -> dict:
    """The estimators of a measurement by name, each with its ratio and the ratio's interval."""
    return {name: {"target": "theta", RATIO: [each[0]], f"{RATIO}_ci95": [each[1]]} for name, each in ratios.items()}


def starting(shown: dict, text: str):
    (found,) = [value for label, value in shown.items() if label.startswith(text)]
    return found


def test_each_prompt_is_drawn_at_its_v_and_its_trace(measured, small_run):
    rows = detailed_rows(small_run / "tracecov_tiny_model_K4_detailed.json")
    _, ax = plot_prompt_traces(measured, 4)
    shown = lines(ax)
    for name, label in (("naive", "vanilla"), ("grpo", "GRPO"), ("oracleV", "oracle")):
        expected = [(row["V_oracle"], row["trace_cov"][name]) for row in rows if row["trace_cov"][name] > 0]
        assert np.transpose(starting(shown, label)) == pytest.approx(np.array(expected))
    left_out = sum(row["trace_cov"]["grpo"] <= 0 for row in rows)
    assert not left_out or any(label == f"GRPO ({left_out} at 0 or below)" for label in shown)


def test_bars_by_difficulty_add_up_to_the_mean(measured):
    _, ax = plot_variance_shares(measured, 4)
    i = measured.results["K_list"].index(4)
    bars = [container for container in ax.containers if hasattr(container, "patches")]
    for name, container in zip(("naive", "grpo", "oracleV"), bars):
        total = sum(bar.get_height() for bar in container)
        assert total == pytest.approx(measured.results["conditional_on_x"][name][i])
    counts = [int(text.get_text().split("n = ")[1]) for text in ax.get_xticklabels()]
    assert sum(counts) == 12


def test_difficulty_has_its_bounds_where_the_labels_say():
    assert difficulty(np.array([0, 0.249, 0.25, 0.75, 0.751, 1]))[0].tolist() == [0, 0, 1, 1, 2, 2]
    kinds, low, high = difficulty(np.array([-0.5, -0.1, 0.1, 0.3, 2.0]), zero_one=False)  # by quartiles
    assert kinds.tolist() == [0, 1, 1, 1, 2] and (low, high) == pytest.approx((-0.1, 0.3))


def test_ratio_fit_is_exact_for_ratios_of_its_form():
    sizes = [2, 4, 8, 64]
    assert fit_ratio_law(sizes, [1 + 1.7 / (size - 1) for size in sizes]) == pytest.approx(1.7, rel=1e-12)


def test_ratio_is_of_mean_traces_with_and_without_grams(measured, without_grams):
    means = measured.results["conditional_on_x"]
    expected = [grpo / oracle for grpo, oracle in zip(means["grpo"], means["oracleV"])]
    for each in (measured, without_grams):
        sizes, ratios, intervals = ratios_by_size(each)
        assert sizes == [2, 4, 8] and ratios == pytest.approx(expected)
        assert all(interval is None for interval in intervals) == (each is without_grams)
        _, ax = plot_ratio(each)
        fitted = starting(lines(ax), "fitted")
        assert fitted[1] == pytest.approx(1 + fit_ratio_law(sizes, ratios) / (fitted[0] - 1))


def test_rewards_are_classed_by_value_or_in_five_of_equal_width():
    binary = reward_classes(np.array([0.0, 1.0, 1.0]))
    assert [(name, members.tolist()) for name, members in binary] == [("0", [True, False, False]), ("1", [False, True, True])]
    rewards = np.linspace(0, 1, 101)
    classes = reward_classes(rewards)
    assert [name for name, _ in classes] == ["0 to 0.2", "0.2 to 0.4", "0.4 to 0.6", "0.6 to 0.8", "0.8 to 1"]
    assert np.sum([members for _, members in classes], axis=0).tolist() == [1] * 101
    assert [rewards[members].min() for _, members in classes] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8], abs=0.011)


def test_the_means_of_the_score_norms_are_those_of_the_results(measured):
    _, ax = plot_score_norms(measured)
    texts = [text.get_text() for text in ax.get_xticklabels()]
    for name, text in zip(("wrong", "right"), texts):
        found = measured.results["score_norm_sq"][name]
        assert f"n = {found['n_continuations']:,}" in text and f"mean {found['mean']:.4g}" in text


def test_scores_of_zero_are_counted_and_the_tick_says_so(measured):
    scores = [Scores(np.array([0.0, 0.0, 1.0]), np.array([0.0, 6.0, 5.0])), Scores(np.array([0.0, 1.0]), np.array([0.0, 7.0]))]
    figure, ax = plot_score_norms(replace(measured, scores=scores))
    texts = [text.get_text() for text in ax.get_xticklabels()]
    assert texts == ["0\nn = 3\nmean 2\n(2 at 0 not drawn)", "1\nn = 2\nmean 6"]
    (means,) = [line for line in ax.lines if line.get_marker() == "D"]
    assert list(means.get_ydata()) == [2, 6]
    only_zeros = [Scores(np.array([0.0, 1.0]), np.array([0.0, 5.0]))]
    figure, ax = plot_score_norms(replace(measured, scores=only_zeros))
    figure.draw_without_rendering()
    assert ax.get_xticklabels()[0].get_text() == "0\nn = 1\nmean 0\n(1 at 0 not drawn)"
    with pytest.raises(UserError, match="every score is 0"):
        plot_score_norms(replace(measured, scores=[Scores(np.ones(2), np.zeros(2))]))


def test_best_baseline_weighs_rewards_by_squared_norms():
    assert best_baseline(Scores(np.array([1.0, 0.0, 1.0]), np.array([1.0, 2.0, 5.0]))) == pytest.approx(6 / 8)
    assert np.isnan(best_baseline(Scores(np.ones(2), np.zeros(2))))


def test_prompts_are_marked_by_noisier_grpo_ties_apart(measured, small_run):
    rows = detailed_rows(small_run / "tracecov_tiny_model_K4_detailed.json")
    gaps = [row["trace_cov"]["grpo"] - row["trace_cov"]["naive"] for row in rows]
    shown = lines(plot_best_baselines(measured, 4)[1])
    counts = [sum(gap > 0 for gap in gaps), sum(gap < 0 for gap in gaps), sum(gap == 0 for gap in gaps)]
    assert counts[2] > 0 and sum(counts) == 12  # prompts without any reward: both traces are 0
    for count, text in zip(counts, ("noisier than", "less noisy than", "as noisy as")):
        assert len(starting(shown, f"GRPO {text} vanilla ({count} of 12)")[0]) == count
    assert not starting(shown, "GRPO as noisy as")[1].any()  # b* of no reward is 0


def test_without_ties_the_legend_has_no_line_for_them(measured, small_run):
    stored = gram_store.load_all(small_run / "grams")
    records = [replace(record, rewards=np.arange(len(record.rewards)) % 2.0) for record in stored]
    made = replace(measured, grams=estimators.reduce_prompts(records, [4], []))
    labels = list(lines(plot_best_baselines(made, 4)[1]))
    assert sum(label.startswith("GRPO ") for label in labels) == 2 and not any("as noisy" in label for label in labels)


def test_on_policy_points_average_to_the_results_ratio(measured):
    _, ax = plot_on_policy_check(measured)
    shown, check = lines(ax), measured.results["on_policy_check"]
    assert shown["one prompt"][1].mean() == pytest.approx(check["ratio"])
    assert starting(shown, "mean")[1] == pytest.approx([check["ratio"]] * 2)
    (band,) = ax.patches
    assert band.get_height() == pytest.approx(2 * 1.96 * check["standard_error"])
    assert not any("warning" in text.get_text() for text in ax.texts)
    warned = {**measured.results, "on_policy_check": {**check, "warning": "not of the <sampled> law"}}
    _, ax = plot_on_policy_check(replace(measured, results=warned))
    assert any("warning" in text.get_text() for text in ax.texts)
    assert "warning: not of the &lt;sampled&gt; law" in mse_table(warned) and "warning" not in mse_table(measured.results)


def test_prompts_are_counted_in_whole_numbers_on_the_axis(measured, small_run):
    records = list(gram_store.load_all(small_run / "grams"))[:2]
    _, ax = plot_on_policy_check(replace(measured, grams=estimators.reduce_prompts(records, [4], [])))
    assert all(float(tick).is_integer() for tick in ax.get_xticks())


def test_any_group_size_is_what_the_script_computes(measured, small_run):
    _, ax = plot_any_group_size(measured)
    shown = lines(ax)
    sizes = starting(shown, "GRPO")[0].tolist()
    assert (sizes[:2], sizes[-1]) == ([2, 3], 32)  # to four times the largest measured
    summary = summary_of(gram_store.load_all(small_run / "grams"), sizes)
    curves = summary["conditional_on_x"] | {"best_baseline": summary["best_baseline"]}
    for label, name in (("vanilla", "naive"), ("GRPO", "grpo"), ("floor", "best_baseline")):
        values = np.array(curves[name])
        assert starting(shown, label)[1] == pytest.approx(np.where(values > 0, values, np.nan), nan_ok=True)
    (band,) = [each for each in ax.collections if each.get_facecolor()[0, 0] == pytest.approx(0)][:1]  # GRPO's blue
    heights = band.get_paths()[0].vertices
    at_three = heights[heights[:, 0] == 3][:, 1]
    assert (at_three.min(), at_three.max()) == pytest.approx(summary["conditional_on_x_ci95"]["grpo"][1])


def test_all_estimators_are_compared_beyond_the_results(measured, small_run):
    assert set(measured.results["estimators"]) < set(measured.compared) == set(ALL)
    names = list(ALL)
    expected = summary_of(gram_store.load_all(small_run / "grams"), [4], names=names)["estimators"]
    _, ax = plot_estimators(measured)
    known = {label_of(name): each[RATIO][0] for name, each in expected.items() if each[RATIO][0] is not None}
    unit = known["GRPO"] if expected["grpo"][f"{RATIO}_ci95"][0][0] > 0 else 1.0
    assert {text.get_text() for text in ax.get_yticklabels()} == set(known)
    drawn = {c.lines[0].get_ydata()[0]: c.lines[0].get_xdata()[0] for c in ax.containers}
    for row, text in enumerate(ax.get_yticklabels()):
        assert drawn[row] == pytest.approx(known[text.get_text()] / unit)
    told = [line.split(": ", 1) for line in missing(measured)]
    assert {name for names, _ in told for name in names.split(", ")} == set(map(label_of, expected)) - set(known)
    assert ["greedy", "no greedy continuation was sampled; measure with --estimators greedy (12 of 12 prompts)"] in told


def test_nothing_is_divided_by_a_ratio_that_may_be_zero(measured):
    """Over one below 0 the order of the estimators would turn round."""
    for own, ends in ((-0.2, [-0.3, -0.1]), (0.2, [-0.1, 0.5]), (-0.2, None)):
        made = compared(grpo=(own, ends), dapo=(0.1, [0.05, 0.2]))
        _, ax = plot_estimators(replace(measured, compared=made))
        assert {c.lines[0].get_xdata()[0] for c in ax.containers} == {own, 0.1}
        assert "over that of" not in ax.get_xlabel()


def test_intervals_that_reach_zero_are_arrows_and_ticks_legible(measured):
    made = compared(grpo=(0.02, [-0.01, 0.05]), dapo=(0.01, [0.001, 0.3]), opo=(0.1, None))
    figure, ax = plot_estimators(replace(measured, compared=made))
    figure.draw_without_rendering()
    (arrows,) = [line for line in ax.lines if line.get_marker() == "<"]
    assert arrows.get_label() == "the interval reaches 0 or below"
    assert [ax.get_yticklabels()[row].get_text() for row in arrows.get_ydata()] == ["GRPO"]
    assert set(arrows.get_xdata()) == {ax.get_xlim()[0]} and ax.get_xlim()[0] < 0.001
    boxes = [text.get_window_extent() for text in ax.get_xticklabels()]
    assert len(boxes) >= 3 and not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


@pytest.mark.parametrize("reason", ["no reward ever differed", None])
def test_no_estimator_with_a_ratio_says_why(measured, reason):
    made, reasons = {"grpo": {RATIO: [None]}}, {f"estimators.grpo.{RATIO}": reason} if reason else {}
    with pytest.raises(UserError, match=f"per continuation sampled.: {reason or 'no reason is given'}$"):
        plot_estimators(replace(measured, compared=made, reasons=reasons))


def test_dropped_groups_are_paid_for_in_the_comparison(measured):
    made = compared(grpo=(0.2, [0.1, 0.4]), dapo=(0.1, [0.05, 0.2]))
    _, ax = plot_estimators(replace(measured, compared=made))
    assert [text.get_text() for text in ax.get_yticklabels()] == ["dapo", "GRPO"]  # the best on top
    (line,) = [line for line in ax.lines if list(line.get_xdata()) == [1.0, 1.0]]
    assert line.get_linestyle() == "--" and "over that of plain GRPO" in ax.get_xlabel()
    bars = [segment for each in ax.collections for segment in each.get_segments()]
    assert sorted(np.ravel([segment[:, 0] for segment in bars])) == pytest.approx([0.25, 0.5, 1.0, 2.0])
    del made["grpo"]
    with pytest.raises(UserError, match="plain GRPO, to compare with, has no signal-to-noise ratio per continuation"):
        plot_estimators(replace(measured, compared=made))


def test_estimators_missing_for_one_reason_are_one_line(measured):
    none = {RATIO: [None]}
    reasons = {"greedy": "not computed: nothing greedy", **dict.fromkeys(("opo", "best_baseline", "dapo"), "a larger block")}
    made = replace(
        measured,
        compared=dict.fromkeys(("greedy", "best_baseline", "opo", "dapo", "std_verl"), none),
        reasons={f"estimators.{name}.{RATIO}": reason for name, reason in reasons.items()},
    )
    assert missing(made) == ["greedy: nothing greedy", "floor b*(x), opo, dapo: a larger block", "std_verl: no reason is given"]


def test_without_grams_the_estimators_of_the_results_are_drawn(without_grams):
    _, ax = plot_estimators(without_grams)
    assert {text.get_text() for text in ax.get_yticklabels()} <= set(map(label_of, without_grams.results["estimators"]))
    assert "K = 2" in ax.get_xlabel()


@pytest.mark.parametrize("draw", NEED_GRAMS)
def test_without_grams_a_picture_says_so_in_one_line(without_grams, draw):
    with pytest.raises(UserError, match="no Grams beside tracecov_tiny_model.json") as caught:
        draw(without_grams, *([4] if draw in AT_ONE_K else []))
    assert "\n" not in str(caught.value)


def test_grams_of_a_recomputed_run_are_those_it_names(path, small_run, tmp_path):
    results = json.loads(path.read_text())
    results["config"]["from_grams"] = str(small_run / "grams")
    elsewhere = tmp_path / "tracecov_any_K.json"
    elsewhere.write_text(json.dumps(results))
    assert len(load_measurement(elsewhere, compare_at=2).moments) == 12


def test_without_oracle_values_pictures_take_the_mean_reward(measured):
    grams = replace(measured.grams, oracle_value=Missing("no oracle value V(x) (12 of 12 prompts)"))
    label = {"label": "oracle V(x), cross-fitted"}
    bare = replace(measured, grams=grams, compared={"oracleV": label})
    for draw in (plot_prompt_traces, plot_best_baselines):
        _, ax = draw(bare, 4)
        assert ax.get_xlabel().startswith("V(x), estimated by the prompt's mean reward")
    _, ax = plot_prompt_traces(bare, 4)
    assert set(starting(lines(ax), "GRPO")[0]) <= set(grams.mean_reward)
    assert any(name.startswith("oracle V(x), cross-fitted") for name in lines(ax))
    _, ax = plot_variance_shares(bare, 4)
    assert "oracle V(x), cross-fitted" in ax.get_legend_handles_labels()[1]
    _, ax = plot_any_group_size(bare)
    assert "oracle V(x), cross-fitted" in lines(ax)


def test_an_oracle_that_nothing_gives_is_named_below_the_axis(measured):
    missing = Missing("there is only one block")
    bare = replace(measured, grams=replace(measured.grams, oracle_value=missing, cross_fitted_trace=missing))
    for draw in (plot_prompt_traces, plot_variance_shares):
        _, ax = draw(bare, 4)
        assert notes(ax) == "oracle V(x) not computed: there is only one block"
    _, ax = plot_any_group_size(bare)
    assert notes(ax) == "oracle V(x) not computed: there is only one block"
    assert {"vanilla", "GRPO"} < set(lines(ax)) and "oracle V(x)" not in lines(ax)


def test_missing_floor_is_named_below_the_axis_at_any_size(measured):
    bare = replace(measured, grams=replace(measured.grams, best_trace=Missing("there is only one block")))
    _, ax = plot_any_group_size(bare)
    assert notes(ax) == "floor b*(x) not computed: raise --M or lower --block_size"
    assert not any("floor" in label for label in lines(ax))
