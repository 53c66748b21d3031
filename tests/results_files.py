"""Made-up results of a run for the tests of the plots, and what a picture says below its axes."""

import json

import numpy as np
from abstract_policy import group_size_law_of, plain_case

KINDS = (  # of modules in a layer, in alphabetical order
    *"input_layernorm mlp.down_proj mlp.gate_proj mlp.up_proj post_attention_layernorm".split(),
    *"self_attn.k_proj self_attn.o_proj self_attn.q_norm self_attn.q_proj self_attn.v_proj".split(),
)


def results(**changes) -> dict:
    """Results of three group sizes."""
    curves = {"naive": [8.0, 4.0, 2.0], "grpo": [6.0, 2.5, 1.2], "oracleV": [4.0, 2.0, 1.0]}
    made = {
        "K_list": [4, 8, 16],
        "n_prompts": 500,
        "n_continuations": 128000,
        "conditional_on_x": curves,
        "conditional_on_x_ci95": {name: [[v - 0.5, v + 0.25] for v in curve] for name, curve in curves.items()},
        "best_baseline": [3.0, 1.5, 0.75],
        "best_baseline_ci95": [[2.5, 3.5], [1.0, 2.0], None],
    }
    return {**made, **changes}


def group_size_law(**settings) -> dict:
    """A group-size law as in a results file; c1, c2, c3 about 1, 1, 9."""
    return json.loads(json.dumps(group_size_law_of(plain_case(**settings))))


def deep(n_layers: int = 24) -> dict:
    """Results of a made-up model of many layers; the kinds differ in size by 2 each, the first the smallest."""
    inside = [f"model.layers.{layer}.{kind}" for layer in range(n_layers) for kind in KINDS]
    modules = ["lm_head", "model.embed_tokens", *inside, "model.norm"]
    sizes = np.array([7.0, 5.0, *[2.0**number for _ in range(n_layers) for number in range(len(KINDS))], 3.0])
    traces = {
        name: [(scale * sizes / K).tolist() for K in (4, 8, 16)]
        for name, scale in (("naive", 3.0), ("grpo", 2.0), ("oracleV", 1.0))
    }
    return results(by_layer={"modules": modules, "trace_cov": traces, "trace_cov_ci95": {}})


def notes(ax) -> str:
    """The small text below the axis, its lines joined."""
    return " ".join(text.get_text() for text in ax.texts).replace("\n", " ")
