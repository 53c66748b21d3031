"""What a run prints at its end: the MSE by group size, the checks, and the group-size law in words.

print(report(results))                                          the results of write_results
print(group_size_report(results["group_size_law"], budget))     constants, G*, what another size costs
"""

from __future__ import annotations

import numpy as np

from Gradient_evaluation.runs.results.report_losses import lines_of_losses
from Gradient_evaluation.runs.results.results_file import FLOOR, label_in
from Gradient_evaluation.runs.results.rollouts_check import check_lines
from Gradient_evaluation.runs.results.stopping import stopping_text
from Gradient_evaluation.runs.results.text import cell_text, ends_text, number_text, value_text, wrapped
from Gradient_evaluation.stats.estimators import DEFAULT, label_of
from Gradient_evaluation.stats.group_size.law import PREDICTION


def report(results: dict) -> str:
    """MSE by K, the other estimators, the largest modules, the checks and the score norms."""
    lines = [*_mse_table(results), *_notes(results), *_by_reward(results), *_other_estimators(results)]
    lines += lines_of_losses(results)
    lines += [*_by_group(results), *_allocation(results), *_largest_modules(results)]
    checks = [_on_policy(results["on_policy_check"]), _sampler_check(results.get("checks", {})), _norms(results)]
    checks += check_lines(results["rollouts_check"]) if "rollouts_check" in results else []
    checks += [stopping_text(results["stopping"])] if "stopping" in results else []
    return "\n".join([*lines, *(wrapped(line) for line in checks if line)])


def _mse_table(results: dict) -> list[str]:
    curves = {name: results["estimators"][name] for name in DEFAULT}
    rows = [
        f"{K:>4}" + "".join(f"{cell_text(curve, 'mse', i):>30}" for curve in curves.values())
        for i, K in enumerate(results["K_list"])
    ]
    return [
        "MSE of the gradient estimate: mean over prompts of trace(Cov | x) [95% interval]",
        "   K" + "".join(f"{label_in(curves, name):>30}" for name in curves),
        *rows,
    ]


def _notes(results: dict) -> list[str]:
    """Why a column of the MSE table is empty, what a curve below the floor means, and what an interval below 0."""
    reasons = {name: results["reasons"].get(f"estimators.{name}.mse") for name in DEFAULT}
    lines = [wrapped(f"note: {name}: {reason}") for name, reason in reasons.items() if reason]
    if left_out := results.get("n_left_out"):
        lines.append(f"note: {left_out} continuations had no reward (None) and are left out")
    floor = results["estimators"][FLOOR]["mse"]
    baselines_of_the_prompt = ("naive", "oracleV")
    pairs = [pair for name in baselines_of_the_prompt for pair in zip(results["estimators"][name]["mse"], floor)]
    if any(mse is not None and least is not None and mse < least for mse, least in pairs):
        lines.append(
            wrapped(
                f"note: {label_of(FLOOR)} is an estimate that errs upward where a prompt has few blocks, so another column may "
                "come out below it; more blocks (--M) bring it down"
            )
        )
    intervals = [ends for name in DEFAULT for ends in results["estimators"][name]["mse_ci95"] if ends is not None]
    if any(low < -1e-12 * high for low, high in intervals):
        lines.append(
            wrapped(
                "note: no MSE is below 0; where an interval reaches below 0, the prompts are too few or too different for a "
                "lower bound; measure more of them (--T)"
            )
        )
    return lines


def _by_reward(results: dict) -> list[str]:
    """Where there are several rewards, a line for each of them alone."""
    found = results.get("by_reward")
    if not found:
        return []
    K = results["K_list"][0]
    lines = ["", f"each reward alone (weight): mean reward | MSE of GRPO at K = {K} [95% interval] | best group size G*"]
    for name, each in found.items():
        mean = "-" if each["mean_reward"] is None else f"{each['mean_reward']:.3g}"
        ends = each["conditional_on_x_ci95"]["grpo"][0]
        group_size_law = each["group_size_law"]
        best = "-" if group_size_law["G_star"] is None else number_text(group_size_law, "G_star", ".3g")
        cells = (mean, value_text(each["conditional_on_x"]["grpo"][0], ends), best)
        lines.append(f"  {name} ({each['weight']:g}): {' | '.join(cells)}")
    return [*lines, ""]


def _on_policy(check: dict) -> str:
    error = "" if check["standard_error"] is None else f" +- {check['standard_error']:.1e}"
    ratio = "not computed" if check["ratio"] is None else f"{check['ratio']:.1e}{error}"
    line = (
        f"on-policy check ||E g||^2 / E||g||^2 = {ratio} (0 for right scores: an estimate below 0 is noise, one far above 0 "
        "speaks against the scores; a small one does not show that sampler and scorer agree; only their comparison does)"
    )
    return line + (f"\nwarning: {check['warning']}" if check.get("warning") else "")


def _sampler_check(checks: dict) -> str:
    compared = checks.get("sampler_check")
    if not compared:
        return ""
    return (
        f"sampler and scoring pass: log pi of {compared['tokens']} tokens differs by {compared['median_difference']:.1e}"
        f" in the median, {compared['largest_difference']:.1e} at most (tolerance {compared['tolerance']:.1e})"
    )


def _norms(results: dict) -> str:
    norms = results["score_norm_sq"]
    kinds = {"right": "right answers", "wrong": "wrong answers"}
    if "above V" in norms.get("split", ""):
        kinds = {"right": "rewards above V(x)", "wrong": "rewards not above V(x)"}
    if "mean reward" in norms.get("split", ""):
        kinds = {"right": "rewards above their prompt's mean", "wrong": "rewards not above it"}
    means = {text: norms[name]["mean"] for name, text in kinds.items()}
    shown = [f"{text} {'not computed' if mean is None else format(mean, '.4g')}" for text, mean in means.items()]
    prompts = f"{results['n_prompts']} prompt{'' if results['n_prompts'] == 1 else 's'}"
    return (
        f"squared score norm E||g||^2: {', '.join(shown)}; mean over prompts of the squared gradient norm ||theta(x)||^2 = "
        f"{results['theta_norm_sq']:.4g}; {prompts}, {results['n_continuations']} continuations"
    )


def _other_estimators(results: dict) -> list[str]:
    others = {name: found for name, found in results["estimators"].items() if name not in DEFAULT}
    if not others:
        return []
    cosines = (results.get("group_size_law") or {}).get("cosine_to_gradient") or {}
    lines = [
        "",
        "other estimators: MSE | signal-to-noise ratio | K at which plain GRPO has that ratio | cosine to the gradient; - : "
        "reasons in the results say why",
    ]
    if cosines:
        largest = results["law"]["sketched_at"]
        lines.append(
            f"(cosine: of the mean of groups of {largest}; - also where the mean has the gradient's direction by construction)"
        )
    for name, found in others.items():
        lines.append(f"  {name}: {found['title']}")
        cosine = cosines.get(name) or {"cosine": None, "ci95": None}
        for i, K in enumerate(results["K_list"]):
            cells = [cell_text(found, part, i) for part in ("mse", "signal_to_noise", "effective_group_size")]
            cells.append(value_text(cosine["cosine"], cosine["ci95"]))
            each = found["continuations_per_group"][i]
            dropped = "" if each is None or each <= K else f" | {each:.3g} continuations are sampled for a group that is kept"
            lines.append(f"{K:>6}  " + " | ".join(f"{cell:>30}" for cell in cells) + dropped)
    return [*lines, ""]


def _by_group(results: dict) -> list[str]:
    """A row for each value of the column that --by names; [] without it."""
    if "by_group" not in results:
        return []
    found, sizes = results["by_group"]["values"], results["K_list"]
    ends = sorted({0, len(sizes) - 1})
    width = max(len(name) for name in [*found, results["by_group"]["column"]])
    heads = [f"GRPO at K = {sizes[i]}" for i in ends]
    lines = [
        "",
        f"by {results['by_group']['column']}: MSE of GRPO and best group size for each value [95% interval]",
        f"  {results['by_group']['column']:<{width}} {'prompts':>8} {'mean reward':>25}"
        + "".join(f"{head:>28}" for head in heads)
        + f"{'G*':>24}{'within 10%':>14}",
    ]
    for name, each in found.items():
        group_size_law, grpo = each["group_size_law"], each["estimators"]["grpo"]
        cells = f"{value_text(each['mean_reward'], each['mean_reward_ci95']):>25}"
        cells += "".join(f"{cell_text(grpo, 'mse', i):>28}" for i in ends)
        best = (
            "-"
            if group_size_law["G_star"] is None
            else f"{group_size_law['G_star']:.3g}{ends_text(*group_size_law['G_star_ci95'], '.3g')}"
        )
        near = "-" if group_size_law["within_10_percent"] is None else "{} to {}".format(*group_size_law["within_10_percent"])
        lines.append(f"  {name:<{width}} {each['n_prompts']:>8} {cells}{best:>24}{near:>14}")
    return [*lines, *_why_no_interval(found), ""]


def _why_no_interval(found: dict) -> list[str]:
    """A line for each value that has no interval or no best group size, with the reason."""
    lines = []
    for name, each in found.items():
        reasons = [each["reasons"].get("estimators.grpo.mse_ci95"), each["group_size_law"]["reasons"].get("G_star")]
        told = dict.fromkeys(reason for reason in reasons if reason)
        lines += [wrapped(f"  note: {name}: {'; '.join(told)}")] if told else []
    return lines


def _allocation(results: dict) -> list[str]:
    """How the continuations of --allocate are shared, and the gain; [] without it."""
    found = results.get("allocation")
    if found is None:
        return []
    head = f"allocation of {found['N']} continuations to {found['n_prompts']} prompts"
    if found["continuations"] is None:
        return [wrapped(f"{head}: not computed ({found['reasons']['continuations']})")]
    counts, variances = (
        found["continuations"],
        [value_text(found[name], found[f"{name}_ci95"]) for name in ("variance_equal", "variance_allocated")],
    )
    lines = [
        f"{head}: {counts['least']} to {counts['most']} each, {counts['median']:g} in the median (equal groups: "
        f"{found['N'] / found['n_prompts']:.3g})",
        f"  mean variance of a prompt's GRPO gradient: {variances[0]} with equal groups, {variances[1]} allocated",
    ]
    if found["gain"] is None:
        return [wrapped(line) for line in (*lines, f"  gain: not computed ({found['reasons']['gain']})")]
    interval = found["gain_ci95"]
    gain = f"{found['gain']:.1%}" + ("" if interval is None else " [{:.1%}, {:.1%}]".format(*interval))
    unsure = interval is None or interval[0] <= 0
    warning = "; these prompts do not show that it is better than equal groups" if unsure else ""
    lines.append(f"  gain {gain}, of an allocation from half of each prompt's blocks, judged on the other half{warning}")
    return [wrapped(line) for line in lines]


def _largest_modules(results: dict, count: int = 5) -> list[str]:
    """The modules with the largest share of GRPO's trace at the smallest K; [] without traces by module."""
    if "by_layer" not in results:
        return []
    names, traces = results["by_layer"]["modules"], np.array(results["by_layer"]["trace_cov"]["grpo"][0])
    whole = traces.sum()
    lines = [f"share of the modules in GRPO's trace at K = {results['K_list'][0]} (all of them: by_layer in the results)"]
    for index in np.argsort(-traces)[:count]:
        share = f"{traces[index] / whole:.1%}" if whole > 0 else "-"
        lines.append(f"{share:>8}  {names[index]}")
    return lines


# --- the group-size law ---


def budget_table(group_size_law: dict, budget: int) -> list[dict]:
    """Rows {G, B, continuations, mse, mse_ci95, silent_share} for G = 2, 4, 8, ... with B = budget // G prompts.

    mse: predicted MSE of the minibatch gradient, ``mse_times_N`` over the B G continuations really used;
    silent_share: the share of groups whose rewards are all equal. A value is None where the group-size law has none
    (silent_share: where G is above the number of continuations of a prompt). ValueError for a budget below 2.
    """
    if budget < 2:
        raise ValueError(f"a budget must hold one group of 2 continuations, got {budget}")
    curve, silent, rows = group_size_law["curve"], group_size_law["silent_share"], []
    for i, size in enumerate(silent["G"]):
        if size > budget:
            break
        used, at = budget // size * size, curve["G"].index(size)
        rows.append(
            {
                "G": size,
                "B": budget // size,
                "continuations": used,
                "mse": None if curve["mse_times_N"] is None else curve["mse_times_N"][at] / used,
                "mse_ci95": None if curve["ci95"] is None else [end / used for end in curve["ci95"][at]],
                "silent_share": None if silent["share"] is None else silent["share"][i],
            }
        )
    return rows


def group_size_report(group_size_law: dict, budget: int | None = None) -> str:
    """The group-size law in a few lines: constants, G*, what another size costs, the noise scale; the table of a budget."""
    n_prompts = group_size_law["n_prompts"]
    lines = [
        f"Group-size law over {n_prompts} prompt{'' if n_prompts == 1 else 's'}: MSE of the GRPO gradient = "
        "(c1 G + c2 + c3/(G-1)) / N for N continuations in groups of G"
    ]
    lines += [
        f"  {name} = {number_text(group_size_law, name)}   {what}"
        for name, what in (("c1", "between prompts"), ("c2", "per continuation"), ("c3", "small groups"))
    ]
    if group_size_law["G_star"] is None:
        lines.append(f"  no best group size: {group_size_law['reasons']['G_star']}")
        if group_size_law.get("G_star_at_least"):
            lines.append(f"  G* is at least {group_size_law['G_star_at_least']:.3g} (one-sided 95%)")
    else:
        bound = group_size_law["G_star_paper_bound"]
        beside = "" if bound is None else f"   (the paper's bound form sqrt(c3/c1): {bound:.3g})"
        lines.append(f"  best group size G* = {number_text(group_size_law, 'G_star', '.3g')}{beside}")
        if group_size_law.get("G_star_may_be_larger"):
            lines.append(f"  G* may well be larger: c1 is less than 3 standard errors above 0; {at_least(group_size_law)}")
        lines.append(f"  within 10% of the least MSE: {_range(group_size_law)}")
    lines += _relative(group_size_law)
    lines.append(f"  gradient noise scale: {_noise_scale(group_size_law)}")
    if budget is not None:
        lines += ["", *_table(group_size_law, budget)]
    return "\n".join(map(wrapped, [*lines, PREDICTION]))


def at_least(group_size_law: dict) -> str:
    """The lower bound that the data support: ``"the data support G* of at least 5.1 (one-sided 95%)"``."""
    bound = group_size_law.get("G_star_at_least")
    if bound is None:
        return f"no lower bound ({(group_size_law.get('reasons') or {}).get('G_star_at_least', 'not in the results')})"
    return f"the data support G* of at least {bound:.3g} (one-sided 95%)"


def _relative(group_size_law: dict) -> list[str]:
    """What a wrong size costs: the MSE at each power of two over the least of them, at the same number of continuations."""
    table = group_size_law.get("relative_mse") or {}
    if table.get("value") is None:
        return []
    lines = [f"  MSE at G over the MSE at G = {table['reference']}, at the same number of continuations [95% interval]:"]
    for size, value, ends in zip(table["G"], table["value"], table["ci95"]):
        lines.append(f"  {size:>5}  {value:.3g}" + ("" if size == table["reference"] else ends_text(*ends)))
    if group_size_law.get("almost_best"):
        low, high = group_size_law["almost_best"]
        sizes = f"G = {low} is" if low == high else f"G = {low} to {high} are"
        lines.append(f"  {sizes} within 10% of the least of these powers of two")
    return lines


def _range(group_size_law: dict) -> str:
    if group_size_law["within_10_percent"] is None:
        return f"not computed ({group_size_law['reasons']['within_10_percent']})"
    low, high = group_size_law["within_10_percent"]
    powers = ", ".join(str(power) for power in group_size_law["powers_of_two"]) or "none"
    return f"G = {low} to {high}; powers of two among them: {powers}"


def _noise_scale(group_size_law: dict) -> str:
    if group_size_law["gradient_noise_scale"] is None:
        why = group_size_law["reasons"]["gradient_noise_scale"]
        return (
            "not computed, as there is no best group size"
            if why == group_size_law["reasons"].get("G_star")
            else f"not computed ({why})"
        )
    return (
        f"{number_text(group_size_law, 'gradient_noise_scale', '.3g')} prompts at G = "
        f"{group_size_law['gradient_noise_scale_G']} (a batch of so many has a mean gradient as large as its noise)"
    )


def _table(group_size_law: dict, budget: int) -> list[str]:
    lines = [f"  at {budget} continuations a step:", f"  {'G':>5} {'B':>5} {'MSE':>10}   {'95% interval':<22} silent"]
    for row in budget_table(group_size_law, budget):
        mse = "-" if row["mse"] is None else f"{row['mse']:.4g}"
        interval = "-" if row["mse_ci95"] is None else "[{:.4g}, {:.4g}]".format(*row["mse_ci95"])
        silent = "-" if row["silent_share"] is None else f"{row['silent_share']:.1%}"
        lines.append(f"  {row['G']:>5} {row['B']:>5} {mse:>10}   {interval:<22} {silent:>6}")
    return lines
