"""How the cost of one prompt grows with the largest group, M, the prompt, the response and the parameters."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from bench_measures import interleaved
from bench_protocol import RunningTraces
from tiny_models import tiny_model

from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.sampling.generate import Continuation
from Gradient_evaluation.sampling.law import SamplingLaw
from Gradient_evaluation.sampling.log_probs import log_probs
from plots.style import new_figure

BASE = {"largest K": 32, "M": 1, "prompt tokens": 64, "response tokens": 32, "width": 128}
AXES = {
    "largest K": (8, 16, 32, 64),
    "M": (1, 2, 4),
    "prompt tokens": (16, 64, 256),
    "response tokens": (8, 16, 32, 64),
    "width": (64, 128, 256),
}
VOCABULARY, LAYERS = 2000, 2


def cost_growth(device: torch.device) -> dict:
    """{axis: {"values": [...], "ours": seconds, "published": seconds}}: gradients of one prompt, one axis at a time.

    Random Llama-type models, float32; continuations are given, so this is the Gram against the published protocol's
    forward, three backwards and running statistics (K = 4, 8, ... up to the largest, M groups each).
    """
    found = {}
    for axis, values in AXES.items():
        rows = [_cost({**BASE, axis: value}, device) for value in values]
        shown = [row["parameters"] for row in rows] if axis == "width" else list(values)
        seconds = {name: [row[name] for row in rows] for name in ("ours", "published")}
        found["parameters" if axis == "width" else axis] = {"values": shown, **seconds}
    return found


def _cost(setting: dict, device: torch.device) -> dict:
    width, largest, repeats = setting["width"], setting["largest K"], setting["M"]
    shape = {"vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": LAYERS}
    shape |= {"num_attention_heads": 4, "head_dim": width // 4, "max_position_embeddings": 1024, "tie_word_embeddings": True}
    model = tiny_model("llama", torch.float32, **shape).to(device)
    rng, law = np.random.default_rng(0), SamplingLaw(max_new_tokens=setting["response tokens"])
    prompt = rng.integers(3, VOCABULARY, setting["prompt tokens"]).tolist()
    answers = rng.integers(3, VOCABULARY, (largest, setting["response tokens"])).tolist()
    drawn = [Continuation(tuple(answer), False, "") for answer in answers]
    sizes = [k for k in (4, 8, 16, 32, 64) if k <= largest]
    grams, traces = ScoreGram(model, partial(log_probs, law=law)), RunningTraces(model)
    tokens = [each.tokens for each in drawn]

    def ours():
        for _ in range(repeats):
            grams.block(prompt, tokens)

    def published():
        for size in sizes * repeats:
            traces.add(prompt, drawn[:size], torch.arange(size, device=device) % 2.0, 0.5, law)

    with grams:
        ours()  # what is made once, and the first touch of memory
        times = interleaved({"ours": ours, "published": published}, 1, device)
    return {name: values[0] for name, values in times.items()} | {"parameters": sum(p.numel() for p in model.parameters())}


def plot_cost(growth: dict):
    """One panel per axis, seconds per prompt of both protocols; three panels in a row, so that a README's width suffices."""
    figure, cells = new_figure(6, width=2.6, height=2.3, in_a_row=3)
    seconds = [value for rows in growth.values() for name in ("ours", "published") for value in rows[name]]
    for panel, (axis, rows) in zip(cells, growth.items()):
        panel.plot(rows["values"], rows["published"], "s--", color="#D55E00", label="published protocol")
        panel.plot(rows["values"], rows["ours"], "o-", color="#0072B2", label="score Gram")
        panel.set(xscale="log", yscale="log", xlabel=axis, ylim=(min(seconds) / 1.5, max(seconds) * 1.5))
        panel.minorticks_off()
        names = [f"{value / 1e6:.2g}M" if value >= 1e5 else str(value) for value in rows["values"]]
        panel.set_xticks(rows["values"], names)
        panel.grid(True, alpha=0.3, linewidth=0.6)
    for panel in cells[::3]:
        panel.set_ylabel("seconds per prompt")
    for cell in cells[len(growth) :]:
        cell.set_axis_off()
    legend = "\n".join(["what is not varied:", *(f"{name} {value}" for name, value in BASE.items())])
    cells[-1].legend(*cells[0].get_legend_handles_labels(), title=legend, loc="center left", frameon=False, fontsize="small")
    cells[-1].get_legend().get_title().set_fontsize("small")
    return figure
