"""Where in the network does the variance live? The traces by module of a run with ``--by_layer``, over depth.

Functions for plots/results.ipynb; each takes a results dictionary, a K and an ``ax`` and returns (figure, ax).
UserError where the results hold no traces by module, or none at this K. MSE in squared gradient units; a trace is a
sum over parameters, so the points of one estimator add up to its MSE, those of parts not above 0 (not drawn) included.

Any number of layers and kinds of module stays legible: a layer is one position on x, and a kind of module one curve.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.results.results_file import PUBLISHED, counted, label_in
from plots.style import Curve, finish, new_ax, note, numbered
from plots.tracecov import look_in, why_missing

MAX_KINDS = 7  # curves, as many as there are colours; the kinds with the least MSE are one curve together
BEFORE = re.compile(r"embed|\bwte\b|\bwpe\b", re.IGNORECASE)  # outside the layers, drawn left of them
HEIGHT = 4.6  # inches: the legend stands above the curves


class Position(NamedTuple):
    """Where a module is in the network: its layer and kind; outside the repeated layers None and its own name."""

    layer: int | None
    kind: str


def positions_of(modules: Sequence[str]) -> list[Position]:
    """Layer and kind of each module, from its name: the first number in the names of the largest stack is the layer.

    Other numbers (experts, a vision tower's layers) are left out, so that such modules count together.

    >>> positions_of(["model.layers.3.mlp.up_proj", "model.layers.3.mlp.experts.7.w1", "model.norm"])
    [Position(layer=3, kind='mlp.up_proj'), Position(layer=3, kind='mlp.experts.w1'), Position(layer=None, kind='model.norm')]
    """
    parts = [re.fullmatch(r"(.*?)\.(\d+)(?:\.(.*))?", name) for name in modules]
    stacks = Counter(part[1] for part in parts if part)
    stack = stacks.most_common(1)[0][0] if stacks else None
    return [
        Position(int(part[2]), re.sub(r"\.\d+(?=\.|$)", "", part[3] or "layer"))
        if part and part[1] == stack
        else Position(None, part[1] if part else name)
        for name, part in zip(modules, parts)
    ]


def shortest_names(names: Sequence[str]) -> dict[str, str]:
    """Each name's last dotted parts, as many as tell it apart from the others.

    >>> shortest_names(["attn.c_proj", "mlp.c_proj", "mlp.c_fc"])
    {'attn.c_proj': 'attn.c_proj', 'mlp.c_proj': 'mlp.c_proj', 'mlp.c_fc': 'c_fc'}
    """

    def ends(name: str) -> list[str]:
        parts = name.split(".")
        return [".".join(parts[i:]) for i in reversed(range(len(parts)))]

    count = Counter(end for name in set(names) for end in ends(name))
    return {name: next((end for end in ends(name) if count[end] == 1), name) for name in names}


def traces_by_position(results: dict, group_size: int) -> tuple[list[Position], dict[str, np.ndarray]]:
    """Every module's position, and {naive, grpo, oracleV: (modules,) MSE} at K = ``group_size``; no curve that is null."""
    found, sizes = results.get("by_layer"), results["K_list"]
    if not isinstance(found, dict):
        raise UserError("the results hold no traces by module; measure again with --by_layer, into another --save_json folder")
    if group_size not in sizes:
        raise UserError(
            f"the traces by module are of K = {', '.join(map(str, sizes))}, not of {group_size}; choose one of these"
        )
    curves = {name: found["trace_cov"].get(name) for name in PUBLISHED}
    values = {name: np.array(curve[sizes.index(group_size)]) for name, curve in curves.items() if curve is not None}
    return positions_of(found["modules"]), values


def plot_layers(results: dict, group_size: int, ax=None):
    """MSE of the parameters of each layer, and of each module outside the layers, for the published estimators.

    The points of a curve add up to the estimator's MSE at K = ``group_size``; logarithmic, parts not above 0 left out.
    """
    positions, values = traces_by_position(results, group_size)
    ax = new_ax(ax, height=HEIGHT)
    x, inside = _depth_axis(ax, positions), np.array([each.layer is not None for each in positions])
    for name in values:
        look = look_in(results.get("estimators"), name)
        _draw(ax, x[inside], values[name][inside], look)
        _draw(ax, x[~inside], values[name][~inside], look._replace(label=None if inside.any() else look.label, line=""))
    absent = [name for name in PUBLISHED if name not in values]
    note(ax, "\n".join(why_missing(name, _reason(results, name)) for name in absent))
    _finish(ax, results, f"MSE of a layer at K = {group_size}", ncols=3)
    return ax.get_figure(), ax


def plot_module_kinds(results: dict, group_size: int, ax=None):
    """GRPO's MSE of each kind of module over the layers; the largest kinds first.

    Of more than seven kinds the smallest are one curve. All points, those outside the layers too, add up to the MSE.
    """
    positions, values = traces_by_position(results, group_size)
    ax = new_ax(ax, height=HEIGHT)
    x, trace = _depth_axis(ax, positions), values["grpo"]
    totals = Counter()
    for position, value in zip(positions, trace):
        if position.layer is not None:
            totals[position.kind] += value
    ordered, short = [kind for kind, _ in totals.most_common()], shortest_names(list(totals))
    count = len(ordered) if len(ordered) <= MAX_KINDS else MAX_KINDS - 1
    shown = {short[kind]: [kind] for kind in ordered[:count]}
    if ordered[count:]:
        shown[f"{len(ordered) - count} smaller kinds"] = ordered[count:]
    for number, (label, kinds) in enumerate(shown.items()):
        members = np.array([each.layer is not None and each.kind in kinds for each in positions])
        _draw(ax, x[members], trace[members], numbered(number, label))
    outside = np.array([each.layer is None for each in positions])
    _draw(ax, x[outside], trace[outside], Curve("outside the layers", "#000000", "*", ""))
    _finish(ax, results, f"MSE of a module at K = {group_size}\n({label_in(results.get('estimators'), 'grpo')})", ncols=2)
    return ax.get_figure(), ax


def _reason(results: dict, name: str) -> str | None:
    return (results.get("reasons") or {}).get(f"by_layer.trace_cov.{name}")


def _depth_axis(ax, positions: Sequence[Position]) -> np.ndarray:
    """Name the positions on x → (modules,) x of each module: a layer at its number, others left and right of them."""
    layers = sorted({each.layer for each in positions if each.layer is not None})
    outside = dict.fromkeys(each.kind for each in positions if each.layer is None)
    before = [kind for kind in outside if BEFORE.search(kind)]
    after = sorted((kind for kind in outside if kind not in before), key=lambda kind: "head" in kind)
    first, last = (layers[0], layers[-1]) if layers else (0, -1)
    room = max(1.0, (last - first) / 14)  # for a name
    at = {kind: first - room * (len(before) - i) for i, kind in enumerate(before)}
    at |= {kind: last + room * (i + 1) for i, kind in enumerate(after)}
    every = next((step for step in (1, 2, 5, 10, 20, 50) if len(layers) <= 6 * step), 100)
    numbers, names = [layer for layer in layers if layer % every == 0] or layers, shortest_names(list(at))
    ax.set_xticks([*numbers, *at.values()], [*map(str, numbers), *(names[kind] for kind in at)])
    for text in ax.get_xticklabels()[len(numbers) :]:
        text.set(rotation=90, fontsize="small")
    return np.array([at[each.kind] if each.layer is None else each.layer for each in positions], float)


def _draw(ax, x: np.ndarray, values: np.ndarray, look: Curve) -> None:
    """The sum of the values at each x, in order of x; markers at twelve of them."""
    where, number = np.unique(x, return_inverse=True)
    sums = np.bincount(number, values, minlength=len(where))
    every, size = (max(1, len(where) // 12), 4) if look.line else (1, 6)
    if len(where):
        ax.plot(where, np.where(sums > 0, sums, np.nan), markersize=size, linewidth=1.2, markevery=every, **look.look)


def _finish(ax, results: dict, quantity: str, ncols: int) -> None:
    ax.set_yscale("log")
    prompts = f"\n(n = {counted(results['n_prompts'], 'prompt')})" if results.get("n_prompts") else ""
    ax.set_xlabel(f"layer, and modules outside the layers{prompts}")
    ax.set_ylabel(quantity)
    finish(ax, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=ncols, columnspacing=1)
