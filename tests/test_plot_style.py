"""Every picture: an ax may be given, no global state, legible at column width, told apart without colour, n on it."""

import itertools
import json
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.text import Text

from plots.describe import describe, describe_each
from plots.measurement import load_measurement
from plots.plot_estimators import plot_any_group_size, plot_estimators, plot_ratio
from plots.plot_group_size import plot_group_size
from plots.plot_prompts import plot_prompt_traces, plot_variance_shares
from plots.plot_scores import plot_best_baselines, plot_on_policy_check, plot_score_norms
from plots.plot_tracecov import main, plot_by_estimator, plot_compared, plot_tracecov
from plots.plot_training import plot_by_group_size, plot_by_step
from plots.style import COLOURS, COLUMN, CURVES, new_figure, numbered, save_figure
from plots.training_logs import Run
from test_plot_group_size import law
from test_plot_tracecov import results

RUNS = [Run(f"g{size}_seed{seed}", size, seed, {0: 0.1, 9: 0.3 + seed / 9}) for size in (4, 8) for seed in (0, 1)]
PICTURES = {
    "plot_tracecov": lambda m, ax: plot_tracecov(m.results, ax=ax, label="m"),
    "plot_compared": lambda m, ax: plot_compared([m.results, m.results], "grpo", ax=ax, labels=["a", "b"]),
    "plot_group_size": lambda m, ax: plot_group_size(law(), ax=ax, label="m"),
    "plot_prompt_traces": lambda m, ax: plot_prompt_traces(m, 4, ax=ax),
    "plot_variance_shares": lambda m, ax: plot_variance_shares(m, 4, ax=ax),
    "plot_ratio": lambda m, ax: plot_ratio(m, ax=ax),
    "plot_score_norms": lambda m, ax: plot_score_norms(m, ax=ax),
    "plot_best_baselines": lambda m, ax: plot_best_baselines(m, 4, ax=ax),
    "plot_on_policy_check": lambda m, ax: plot_on_policy_check(m, ax=ax),
    "plot_any_group_size": lambda m, ax: plot_any_group_size(m, ax=ax),
    "plot_estimators": lambda m, ax: plot_estimators(m, ax=ax),
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


def test_it_draws_on_a_given_ax_alone_and_changes_no_global_state(draw):
    before = dict(matplotlib.rcParams)
    figure, (left, right) = new_figure(2)
    assert draw(right) == (figure, right)
    assert has_content(right) and not has_content(left)
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_made_alone_it_is_one_column_wide_with_legible_letters_and_names_its_axes_and_n(draw):
    figure, ax = draw()
    assert figure.get_size_inches()[0] == COLUMN
    figure.canvas.draw()
    sizes = [text.get_fontsize() for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert min(sizes) >= 7
    words = " ".join(text.get_text() for text in figure.findobj(Text))
    assert "n = " in words and ax.get_ylabel() + "".join(t.get_text() for t in ax.get_yticklabels())


@pytest.mark.slow
def test_it_is_written_as_vector_graphics_and_as_pixels(draw, tmp_path):
    for suffix, start in (("pdf", b"%PDF"), ("svg", b"<?xml"), ("png", b"\x89PNG")):
        assert save_figure(draw()[0], tmp_path / f"a.{suffix}").read_bytes().startswith(start)


def test_curves_of_one_legend_differ_in_grey_by_marker_line_or_filling(draw):
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
    assert all(lightness(colour) < 75 for colour in COLOURS)
    looks = [numbered(number)[1:] for number in range(28)]
    assert all(a != b for a, b in itertools.combinations(looks, 2))


def of(model="org/base", temperature=1.0, **more) -> dict:
    table = more.pop("table", "outputs/zero_shot/oracle.jsonl")
    return results(law={"model": model, "temperature": temperature, "top_p": 0.95, "top_k": 0, "stop": [],
                        "scoring": "exact", "max_new_tokens": 32, "seed": 0, **more},
                   config={"oracle_table": table})  # fmt: skip


@pytest.mark.parametrize(
    "made, text",
    [
        (of(), "base\ntemperature 1, top_p 0.95"),
        (of(temperature=0.7, top_k=40, stop=["\n"]), "base\ntemperature 0.7, top_p 0.95, top_k 40, stop '\\n'"),
        (of(scoring="published"), "base\ntemperature 1, top_p 0.95, published scoring"),
        (of(model="a$b$c"), "a\\$b\\$c\ntemperature 1, top_p 0.95"),  # not a formula
        (results(), ""),
        ({"law": None, "config": [1]}, ""),
    ],
)
def test_a_result_is_described_by_its_model_and_law(made, text):
    assert describe(made) == text


def test_results_that_are_compared_are_described_by_what_they_differ_in():
    few = describe_each([of(), of(table="outputs/few_shot/oracle.jsonl")])
    assert [text.split("\n")[-1] for text in few] == ["prompts of zero_shot/oracle.jsonl", "prompts of few_shot/oracle.jsonl"]
    longer = describe_each([of(), of(max_new_tokens=512)])
    assert [text.split("\n")[-1] for text in longer] == ["at most 32 tokens", "at most 512 tokens"]
    assert len(set(describe_each([of(), of("org/instruct")]))) == 2


def test_two_results_are_compared_in_one_figure_whose_legend_names_model_and_law():
    figure, axes = plot_by_estimator([of(), of("org/instruct", 0.7, top_k=40)])
    assert [ax.get_title() for ax in axes] == [CURVES[name].label for name in ("naive", "grpo", "oracleV")]
    (legend,) = [ax.get_legend() for ax in axes if ax.get_legend()]
    first, second = [text.get_text() for text in legend.get_texts()]
    assert first.startswith("base\ntemperature 1, top_p 0.95\n") and "n = 500 prompts" in first
    assert second.startswith("instruct\ntemperature 0.7, top_p 0.95, top_k 40")
    for ax, name in zip(axes, ("naive", "grpo", "oracleV")):
        assert [list(c.lines[0].get_ydata()) for c in ax.containers] == [of()["conditional_on_x"][name]] * 2
    assert len({ax.get_ylim() for ax in axes}) == 1
    _, ax = plot_tracecov(of(), label="base")
    assert ax.get_legend().get_title().get_text() == "base\ntemperature 1, top_p 0.95"


def test_from_the_shell_by_estimator(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(json.dumps(of(name)))
    out = tmp_path / "both.svg"
    main([str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--by_estimator", "--label", "x", "y", "--out", str(out)])
    assert out.exists() and capsys.readouterr().out.strip() == str(out)
