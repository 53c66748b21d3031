"""Every picture: an ax may be given, no global state, legible at column width, told apart without colour, n on it."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.text import Text
from results_files import deep, group_size_law, notes, results

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.results.results_file import describe, describe_each
from Gradient_evaluation.stats.estimators import label_of
from plots import plot_group_size as group_size_command
from plots import plot_tracecov as tracecov_command
from plots.group_size import plot_group_size
from plots.measurement import load_measurement
from plots.plot_estimators import plot_any_group_size, plot_estimators, plot_ratio
from plots.plot_layers import plot_layers, plot_module_kinds
from plots.plot_prompts import (
    plot_best_baselines,
    plot_on_policy_check,
    plot_prompt_traces,
    plot_score_norms,
    plot_variance_shares,
)
from plots.plot_training import plot_by_group_size, plot_by_step
from plots.style import COLOURS, COLUMN, CURVES, new_figure, numbered, save_figure, side_by_side
from plots.tracecov import plot_by_estimator, plot_tracecov
from plots.training_logs import Run

ROOT = Path(__file__).resolve().parents[2]
RUNS = [Run(f"g{size}_seed{seed}", size, seed, {0: 0.1, 9: 0.3 + seed / 9}) for size in (4, 8) for seed in (0, 1)]
PICTURES = {
    "plot_tracecov": lambda m, ax: plot_tracecov(m.results, ax=ax, label="m"),
    "plot_group_size": lambda m, ax: plot_group_size(group_size_law(), ax=ax, label="m"),
    "plot_prompt_traces": lambda m, ax: plot_prompt_traces(m, 4, ax=ax),
    "plot_variance_shares": lambda m, ax: plot_variance_shares(m, 4, ax=ax),
    "plot_ratio": lambda m, ax: plot_ratio(m, ax=ax),
    "plot_score_norms": lambda m, ax: plot_score_norms(m, ax=ax),
    "plot_best_baselines": lambda m, ax: plot_best_baselines(m, 4, ax=ax),
    "plot_on_policy_check": lambda m, ax: plot_on_policy_check(m, ax=ax),
    "plot_any_group_size": lambda m, ax: plot_any_group_size(m, ax=ax),
    "plot_estimators": lambda m, ax: plot_estimators(m, ax=ax),
    "plot_layers": lambda m, ax: plot_layers(deep(), 4, ax=ax),
    "plot_module_kinds": lambda m, ax: plot_module_kinds(deep(), 4, ax=ax),
    "plot_by_step": lambda m, ax: plot_by_step(RUNS, ax=ax),
    "plot_by_group_size": lambda m, ax: plot_by_group_size(RUNS, ax=ax),
}


@pytest.fixture(scope="module")
def measured(small_run):
    return load_measurement(small_run / "tracecov_tiny_model.json", compare_at=4)


@pytest.fixture(params=PICTURES)
def draw(request, measured):
    return lambda ax=None: PICTURES[request.param](measured, ax)


def has_content(ax) -> bool:
    return bool(ax.lines or ax.patches or ax.collections)


def test_it_draws_on_a_given_ax_and_changes_no_global_state(draw):
    before = dict(matplotlib.rcParams)
    figure, (left, right) = new_figure(2)
    assert draw(right) == (figure, right)
    assert has_content(right) and not has_content(left)
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_alone_it_is_one_column_wide_legible_and_names_n(draw):
    figure, ax = draw()
    assert figure.get_size_inches()[0] == COLUMN
    figure.draw_without_rendering()
    sizes = [text.get_fontsize() for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert min(sizes) >= 7
    words = " ".join(text.get_text() for text in figure.findobj(Text))
    assert "n = " in words and ax.get_ylabel() + "".join(t.get_text() for t in ax.get_yticklabels())


def test_curves_of_one_legend_differ_in_grey(draw):
    _, ax = draw()
    looks = []
    for handle in ax.get_legend_handles_labels()[0]:
        line = handle[0] if isinstance(handle, tuple) else handle
        if hasattr(line, "get_marker"):
            filled = line.get_markerfacecolor() not in ("none", "white")
            dashes = str(line._dash_pattern)  # get_linestyle calls every pattern of one's own "--"
            looks.append((line.get_marker(), line.get_linestyle(), dashes, filled))
    assert len(set(looks)) == len(looks)


def lightness(colour: str) -> float:
    """CIE L* of an sRGB colour."""
    channels = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
    luminance = linear @ [0.2126, 0.7152, 0.0722]
    return 116 * luminance ** (1 / 3) - 16 if luminance > 0.009 else 903.3 * luminance


def test_colours_are_okabe_and_itos_and_readable_on_white():
    okabe_ito = {"#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7"}
    assert {look.colour for look in CURVES.values()} | set(COLOURS) <= okabe_ito
    assert len({look.colour for look in CURVES.values()}) == len(CURVES)
    assert all(lightness(colour) < 75 for colour in COLOURS)
    looks = [numbered(number)[1:] for number in range(28)]
    assert all(a != b for a, b in itertools.combinations(looks, 2))


ODD = ("_{$x_{$", r"\$\frac{^%", "a$b$ & <script>", "half \udcff a\x01 name")


def odd_runs() -> list[Run]:
    return [Run(name, None, None, {0: 0.1, 9: 0.3}) for name in ODD]


def with_odd_reasons() -> dict:
    made = of(ODD[0])
    made["conditional_on_x"]["naive"] = [None] * len(made["K_list"])
    return {**made, "reasons": {"estimators.naive.trace_cov": "of $x_{$"}}


def odd_modules() -> dict:
    made = deep()
    made["by_layer"]["modules"] = [
        name.replace("lm_head", "$x_{$").replace("mlp.down_proj", "_$y^{$").replace("norm", "n$^$")
        for name in made["by_layer"]["modules"]
    ]
    return made


@pytest.mark.parametrize(
    "draw_odd",
    [
        lambda: plot_tracecov(with_odd_reasons(), label="$x_{$"),
        lambda: plot_tracecov(of(ODD[0], stop=["$x_{$", "\\$"]), label="odd", log_y=True),
        lambda: plot_by_estimator([of(name, stop=[name]) for name in ODD], labels=list(ODD)),
        lambda: plot_group_size(group_size_law(), label=ODD[0]),
        lambda: plot_layers(odd_modules(), 4),
        lambda: plot_module_kinds(odd_modules(), 4),
        lambda: plot_by_step(odd_runs()),
    ],
)
def test_no_name_is_drawn_as_a_formula_whatever_its_letters(draw_odd, tmp_path):
    figure, _ = draw_odd()
    ElementTree.parse(save_figure(figure, tmp_path / "odd.svg"))
    seen = [text for text in figure.findobj(Text) if text.get_visible() and "$" in text.get_text()]
    formulas = [text.get_text() for text in seen if text.get_parse_math()]
    assert all("\\mathdefault" in text for text in formulas)  # matplotlib's own numbers at ticks


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_output_that_cannot_be_printed_is_one_line(tmp_path):
    code = "from Gradient_evaluation.cli import run; run(lambda: print('a'))"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and done.stderr.startswith("error: standard output")


def test_a_name_with_a_leading_underscore_is_in_the_legend():
    _, ax = plot_by_step(odd_runs())
    assert [text.get_text().strip() for text in ax.get_legend().get_texts()] == [*ODD[:3], "half ? a? name"]


def of(model="org/base", temperature=1.0, **more) -> dict:
    table = more.pop("table", "outputs/zero_shot/oracle.jsonl")
    law = {"model": model, "temperature": temperature, "top_p": 0.95, "top_k": 0, "stop": [], "scoring": "exact"}
    return results(law={**law, "max_new_tokens": 32, "seed": 0, **more}, config={"oracle_table": table})


@pytest.mark.parametrize(
    "made, text",
    [
        (of(), "base\ntemperature 1, top_p 0.95"),
        (of(temperature=0.7, top_k=40, stop=["\n"]), "base\ntemperature 0.7, top_p 0.95, top_k 40, stop '\\n'"),
        (of(scoring="published"), "base\ntemperature 1, top_p 0.95, published scoring"),
        (of(model="a$b$c"), "a$b$c\ntemperature 1, top_p 0.95"),  # not a formula
        (results(), ""),
        ({"law": None, "config": None}, ""),
    ],
)
def test_a_result_is_described_by_its_model_and_law(made, text):
    assert describe(made) == text


def test_compared_results_are_described_by_differences():
    few = describe_each([of(), of(table="outputs/few_shot/oracle.jsonl")])
    assert [text.split("\n")[-1] for text in few] == ["prompts of zero_shot/oracle.jsonl", "prompts of few_shot/oracle.jsonl"]
    longer = describe_each([of(), of(max_new_tokens=512)])
    assert [text.split("\n")[-1] for text in longer] == ["at most 32 tokens", "at most 512 tokens"]
    assert len(set(describe_each([of(), of("org/instruct")]))) == 2


@pytest.mark.parametrize("draw, made", [(plot_tracecov, results()), (plot_group_size, group_size_law())])
def test_several_results_are_labelled_panels_side_by_side(draw, made):
    figure, axes = side_by_side(draw, [made, made], ["base", "few-shot"], height=3)
    assert [ax.get_title() for ax in axes] == ["base", "few-shot"] and list(figure.axes) == list(axes)
    with pytest.raises(UserError, match="2 files, 1 labels"):
        side_by_side(draw, [made, made], ["base"], height=3)


@pytest.mark.parametrize(
    "command, flags, suffix, start",
    [
        (tracecov_command, ["--log_y"], "pdf", b"%PDF"),
        (tracecov_command, ["--by_estimator"], "svg", b"<?xml"),
        (group_size_command, ["--budget", "256"], "png", b"\x89PNG"),
    ],
)
def test_a_command_writes_the_figure_that_it_names(tmp_path, command, flags, suffix, start, capsys):
    source, out = tmp_path / "tracecov_m.json", tmp_path / "new" / f"figure.{suffix}"
    source.write_text(json.dumps({**of(), "group_size_law": group_size_law()}))
    command.main([str(source), str(source), "--label", "a", "b", "--out", str(out), *flags])
    assert out.read_bytes().startswith(start) and capsys.readouterr().out.strip() == str(out)


@pytest.mark.parametrize("flags", ["none.json --out x.pdf", "old.json --out x.pdf --lo", "none.json"])
@pytest.mark.parametrize("script", ["plot_tracecov", "plot_group_size", "plot_training"])
def test_an_error_of_a_command_is_one_line_and_exit_code_two(script, flags):
    done = subprocess.run([sys.executable, f"plots/{script}.py", *flags.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


SHOWN = ("naive", "grpo", "oracleV", "best_baseline")


def test_compared_results_share_a_legend_of_model_and_law():
    figure, axes = plot_by_estimator([of(), of("org/instruct", 0.7, top_k=40)])
    assert [ax.get_title() for ax in axes] == [CURVES[name].label for name in SHOWN]
    assert not any(ax.get_legend() for ax in axes)
    (legend,) = figure.legends
    first, second = [text.get_text() for text in legend.get_texts()]
    assert first.startswith("base\ntemperature 1, top_p 0.95\n") and "n = 500 prompts" in first
    assert second.startswith("instruct\ntemperature 0.7, top_p 0.95, top_k 40")
    for ax, name in zip(axes, SHOWN):
        expected = of()["conditional_on_x"].get(name, of()["best_baseline"])
        assert [list(c.lines[0].get_ydata()) for c in ax.containers] == [expected] * 2
    assert len({ax.get_ylim() for ax in axes}) == 1


@pytest.mark.parametrize("n", [1, 2, 5])
def test_panels_of_a_comparison_are_even_above_the_legend(n):
    figure, axes = plot_by_estimator([of()] * n)
    figure.draw_without_rendering()
    assert len(figure.legends[0].get_texts()) == n  # files of one name too
    boxes = np.array([ax.get_position().bounds for ax in axes])  # left, bottom, width, height
    assert boxes[:, 2:] == pytest.approx(np.tile(boxes[0, 2:], (4, 1)), rel=0.02)
    assert boxes[:2, 1] == pytest.approx(boxes[0, 1]) and boxes[2:, 1] == pytest.approx(boxes[2, 1])
    assert boxes[::2, 0] == pytest.approx(boxes[0, 0]) and boxes[1::2, 0] == pytest.approx(boxes[1, 0])
    assert figure.legends[0].get_window_extent().y1 <= min(ax.get_tightbbox().y0 for ax in axes)


def test_a_comparison_says_which_panel_lacks_the_floor():
    bare = {**of("org/bare"), "best_baseline": [None] * 3, "best_baseline_ci95": None}
    _, axes = plot_by_estimator([of(), bare])
    assert len(axes) == 4 and len(axes[3].containers) == 1
    assert [notes(ax) for ax in axes] == [""] * 3 + ["not computed in 1 of 2 files: raise --M or lower --block_size"]
    figure, axes = plot_by_estimator([bare, bare])
    assert [ax.get_title() for ax in axes] == [CURVES[name].label for name in SHOWN[:3]]
    (cell,) = [ax for ax in figure.axes if ax not in axes]
    assert notes(cell) == "floor b*(x) not computed: raise --M or lower --block_size" and not cell.axison


def test_every_picture_calls_an_estimator_by_the_same_name(measured):
    names = {look.label for look in CURVES.values()}
    for shown in (plot_tracecov(measured.results), plot_any_group_size(measured)):
        assert set(shown[1].get_legend_handles_labels()[1]) == names
    ticks = {text.get_text() for text in plot_estimators(measured)[1].get_yticklabels()}
    assert names <= ticks and not set(CURVES) & ticks
    assert [label_of(name) for name in ("naive", "opo")] == ["vanilla", "opo"]
