"""What a run prints of --optimizer_state, --kl_coef and --clip."""

from __future__ import annotations

from Gradient_evaluation.runs.results.text import cell_text, number_text, value_text, wrapped
from Gradient_evaluation.stats.estimators import label_of


def lines_of_losses(results: dict) -> list[str]:
    """Their lines; [] without any of them."""
    return [*kl(results), *optimizer_metric(results), *clip(results)]


def optimizer_metric(results: dict) -> list[str]:
    """GRPO in the optimiser's metric beside the plain one; [] without --optimizer_state."""
    found = results.get("optimizer_metric")
    if found is None:
        return []
    lines = ["", "in the metric of --optimizer_state, 1 / (sqrt(v) + eps): MSE of GRPO | signal-to-noise ratio (plain)"]
    for i, K in enumerate(results["K_list"]):
        grpo, plain = (each["estimators"]["grpo"] for each in (found, results))
        cells = [
            cell_text(grpo, "mse", i),
            f"{cell_text(grpo, 'signal_to_noise', i)} ({cell_text(plain, 'signal_to_noise', i)})",
        ]
        lines.append(f"{K:>6}  " + " | ".join(f"{cell:>30}" for cell in cells))
    own, plain = (each["group_size_law"] for each in (found, results))
    beside = "" if plain["G_star"] is None else f" (plain: {number_text(plain, 'G_star', '.3g')})"
    return [*lines, wrapped(f"  best group size G* = {number_text(own, 'G_star', '.3g')}{beside}"), ""]


def kl(results: dict) -> list[str]:
    """The losses with the KL term; [] without --kl_coef."""
    found = results.get("kl")
    if found is None:
        return []
    head = f"with {found['coef']:g} times the KL to the reference ({found['mean_kl_per_token']:.3g} per token)"
    lines = ["", f"{head}: trace(Cov) | signal-to-noise ratio"]
    for name, each in found["estimators"].items():
        lines.append(f"  {label_of(name)}")
        for i, K in enumerate(results["K_list"]):
            cells = " | ".join(f"{cell_text(each, part, i):>30}" for part in ("trace_cov", "signal_to_noise"))
            lines.append(f"{K:>6}  {cells}")
        if why := found["reasons"].get(f"estimators.{name}.trace_cov"):
            lines.append(wrapped(f"    note: {why}"))
    return [
        *lines,
        wrapped(f"  best group size of GRPO with it: G* = {number_text(found['group_size_law'], 'G_star', '.3g')}"),
        "",
    ]


def clip(results: dict) -> list[str]:
    """How many steps --clip cuts; [] without it."""
    found = results.get("clip")
    if found is None:
        return []
    head = f"share of steps of {found['N']} continuations whose gradient is longer than {found['threshold']:g}, by G (groups)"
    lines = ["", f"{head} [95% interval] | its root mean square norm"]
    for name, each in found["estimators"].items():
        lines.append(f"  {label_of(name)}")
        for i, (G, B) in enumerate(zip(found["G"], found["B"])):
            norm = "-" if each["norm_sq"][i] is None else f"{max(0.0, each['norm_sq'][i]) ** 0.5:.3g}"
            lines.append(f"{G:>6} ({B}) {value_text(each['share'][i], each['share_ci95'][i]):>24} | {norm}")
        if why := found["reasons"].get(f"estimators.{name}.share"):
            lines.append(wrapped(f"    note: {why}"))
    return [*lines, ""]
