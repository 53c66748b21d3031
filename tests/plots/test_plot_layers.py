"""The traces by module are drawn over depth, add up to the MSE, and stay legible for a deep model."""

import numpy as np
import pytest
from matplotlib.text import Text
from results_files import deep, results
from scripts import ROOT, call, read

from Gradient_evaluation import run_tracecov
from Gradient_evaluation.errors import UserError
from plots.plot_layers import MAX_KINDS, Position, plot_layers, plot_module_kinds, positions_of, shortest_names
from plots.style import CURVES

MODEL = ROOT / "data" / "tiny_model"


@pytest.fixture(scope="module")
def by_layer(small_run, tmp_path_factory):
    """The results of a run with --by_layer on the shipped tiny model: six prompts, K = 4 and 8."""
    folder = tmp_path_factory.mktemp("layers")
    table = ("--oracle_table", small_run / "oracle_v_n50_tiny_model.jsonl", "--save_json", folder, "--model", MODEL)
    flags = "--max_new_tokens 8 --device cpu --dtype float32 --T 6 --M 1 --K_list 4 8 --by_layer --sketch_dim 0 --skip_plot"
    assert call(run_tracecov, *table, *flags.split())[0] == 0
    return read(folder / "tracecov_tiny_model.json")


def points(ax) -> dict:
    """{legend's name: {x: y}}; the points outside the layers, drawn without a name of their own, go by their colour."""
    names = {line.get_color(): line.get_label() for line in ax.lines if not line.get_label().startswith("_")}
    found: dict = {}
    for line in ax.lines:
        label = line.get_label() if not line.get_label().startswith("_") else names[line.get_color()]
        found.setdefault(label, {}).update(zip(line.get_xdata(), line.get_ydata()))
    return found


@pytest.mark.parametrize("K", [4, 8])
def test_the_points_of_an_estimator_add_up_to_its_mse(by_layer, K):
    i = by_layer["K_list"].index(K)
    _, ax = plot_layers(by_layer, K)
    shown, added_up = points(ax), []
    for name in ("naive", "grpo", "oracleV"):
        layers = shown[CURVES[name].label]
        assert sorted(layers) == [-1, 0, 1, 2, 3]  # the embedding, three layers, the norm
        module = np.array(by_layer["by_layer"]["trace_cov"][name][i])
        inside = [f".layers.{x}." in text for x in (0, 1, 2) for text in by_layer["by_layer"]["modules"]]
        sums = [module[part].sum() for part in np.split(np.array(inside), 3)]
        assert [layers[x] for x in (0, 1, 2)] == pytest.approx([s if s > 0 else np.nan for s in sums], nan_ok=True)
        if all(np.isfinite(list(layers.values()))):
            added_up.append(name)
            assert sum(layers.values()) == pytest.approx(by_layer["conditional_on_x"][name][i], rel=1e-6)
    assert added_up
    assert [text.get_text() for text in ax.get_xticklabels()] == ["0", "1", "2", "embed_tokens", "norm"]
    assert f"K = {K}" in ax.get_ylabel() and "n = 6 prompts" in ax.get_xlabel()


def test_kinds_of_module_and_the_rest_add_up_to_the_mse():
    made = deep()
    _, ax = plot_module_kinds(made, 8)
    total = sum(y for curve in points(ax).values() for y in curve.values())
    assert total == pytest.approx(sum(made["by_layer"]["trace_cov"]["grpo"][1])) and "GRPO" in ax.get_ylabel()


def test_largest_kinds_have_own_curves_and_the_rest_one(by_layer):
    labels = list(points(plot_module_kinds(deep(), 4)[1]))
    own = ["v_proj", "q_proj", "q_norm", "o_proj", "k_proj", "post_attention_layernorm"]
    assert labels == [*own, "4 smaller kinds", "outside the layers"] and len(labels) == MAX_KINDS + 1
    measured = list(points(plot_module_kinds(by_layer, 4)[1]))  # nine kinds
    assert len(measured) == MAX_KINDS + 1 and measured[-2:] == ["3 smaller kinds", "outside the layers"]


@pytest.mark.parametrize("n_layers", [1, 24, 80])
@pytest.mark.parametrize("draw", [plot_layers, plot_module_kinds])
def test_any_number_of_layers_is_legible(draw, n_layers):
    figure, ax = draw(deep(n_layers), 4)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in ax.get_xticklabels()]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert ax.get_position().height * figure.get_size_inches()[1] > 1.5
    assert min(text.get_fontsize() for text in figure.findobj(Text) if text.get_text()) >= 7


def test_positions_are_read_from_the_names_of_any_kind_of_model():
    expected = {
        "transformer.wte": Position(None, "transformer.wte"),
        "transformer.h.0.attn.c_proj": Position(0, "attn.c_proj"),
        "transformer.h.11.mlp.c_proj": Position(11, "mlp.c_proj"),
        "transformer.h.11.mlp.experts.3.w1": Position(11, "mlp.experts.w1"),
        "transformer.h.11": Position(11, "layer"),
        "visual.blocks.4.norm": Position(None, "visual.blocks"),
        "lm_head": Position(None, "lm_head"),
    }
    assert positions_of(list(expected)) == list(expected.values())
    assert positions_of(["theta"]) == [Position(None, "theta")]
    short = shortest_names(["attn.c_proj", "mlp.c_proj", "mlp.experts.w1", "self_attn.q_proj.lora_A.default"])
    assert list(short.values()) == ["attn.c_proj", "mlp.c_proj", "w1", "default"]


@pytest.mark.parametrize("draw", [plot_layers, plot_module_kinds])
def test_a_model_without_repeated_layers_is_drawn(draw):
    traces = {name: [[1.0, -2.0]] * 3 for name in ("naive", "grpo", "oracleV")}
    figure, ax = draw(results(by_layer={"modules": ["a", "b"], "trace_cov": traces}), 4)
    figure.draw_without_rendering()
    assert [text.get_text() for text in ax.get_xticklabels()] == ["a", "b"]
    values = list(next(iter(points(ax).values())).values())
    assert values[0] == 1 and np.isnan(values[1])  # a logarithmic axis cannot show it


@pytest.mark.parametrize(
    "made, K, message",
    [(results(), 4, "no traces by module; measure again with --by_layer"), (deep(), 5, "are of K = 4, 8, 16, not of 5")],
)
def test_what_cannot_be_drawn_is_one_line(made, K, message):
    for draw in (plot_layers, plot_module_kinds):
        with pytest.raises(UserError, match=message) as caught:
            draw(made, K)
        assert "\n" not in str(caught.value)
