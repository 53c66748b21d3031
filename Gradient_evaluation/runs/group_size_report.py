"""What does a group-size law say for a budget, and in words? From the dictionary of ``group_size_law`` alone."""

from __future__ import annotations

from Gradient_evaluation.stats.group_size import PREDICTION


def budget_table(law: dict, budget: int) -> list[dict]:
    """Rows {G, B, continuations, mse, mse_ci95, silent_share} for G = 2, 4, 8, ... with B = budget // G prompts.

    mse: predicted MSE of the minibatch gradient, ``mse_times_N`` over the B G continuations really used;
    silent_share: the share of groups whose rewards are all equal. None where the law has none (for silent_share: a G
    above the number of continuations of a prompt). Raises ValueError for a budget below 2.
    """
    if budget < 2:
        raise ValueError(f"a budget must hold one group of 2 continuations, got {budget}")
    curve, silent, rows = law["curve"], law["silent_share"], []
    for place, size in enumerate(silent["G"]):
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
                "silent_share": None if silent["share"] is None else silent["share"][place],
            }
        )
    return rows


def report(law: dict, budget: int | None = None) -> str:
    """The law in a few lines: constants, G*, the range, the noise scale; with a budget, its table; what it is."""
    lines = [
        f"Group-size law over {law['n_prompts']} prompt{'' if law['n_prompts'] == 1 else 's'}: MSE of the GRPO gradient = "
        "(c1 G + c2 + c3/(G-1)) / N for N continuations in groups of G"
    ]
    lines += [
        f"  {name} = {_number(law, name)}   {what}"
        for name, what in (("c1", "between prompts"), ("c2", "per continuation"), ("c3", "small groups"))
    ]
    if law["G_star"] is None:
        lines.append(f"  no best group size: {law['reasons']['G_star']}")
        if law.get("G_star_at_least"):
            lines.append(f"  G* is at least {law['G_star_at_least']:.3g} (one-sided 95%)")
    else:
        bound = law["G_star_paper_bound"]
        beside = "" if bound is None else f"   (the paper's bound form sqrt(c3/c1): {bound:.3g})"
        lines.append(f"  best group size G* = {_number(law, 'G_star', '.3g')}{beside}")
        if law.get("G_star_may_be_larger"):
            lines.append(f"  G* may well be larger: c1 is less than 3 standard errors above 0; {at_least(law)}")
        lines.append(f"  within 10% of the least MSE: {_range(law)}")
    lines += _relative(law)
    lines.append(f"  gradient noise scale: {_noise_scale(law)}")
    if budget is not None:
        lines += ["", *_table(law, budget)]
    return "\n".join([*lines, PREDICTION])


def at_least(law: dict) -> str:
    """The lower bound that the data support: ``"the data support G* of at least 5.1 (one-sided 95%)"``."""
    bound = law.get("G_star_at_least")
    if bound is None:
        return f"no lower bound ({(law.get('reasons') or {}).get('G_star_at_least', 'not in the results')})"
    return f"the data support G* of at least {bound:.3g} (one-sided 95%)"


def _relative(law: dict) -> list[str]:
    """What a wrong size costs: the MSE at each power of two over the least of them, at the same number of continuations."""
    table = law.get("relative_mse") or {}
    if table.get("value") is None:
        return []
    cells = [
        f"{size}: {value:.3g}" + ("" if size == table["reference"] else _ends(*ends))
        for size, value, ends in zip(table["G"], table["value"], table["ci95"])
    ]
    lines = [f"  MSE over that at G = {table['reference']}: " + ", ".join(cells)]
    if law.get("almost_best"):
        low, high = law["almost_best"]
        which = f"G = {low} is" if low == high else f"G = {low} to {high} are"
        lines.append(f"  {which} within 10% of the least of these powers of two")
    return lines


def _ends(low: float | None, high: float | None, form: str = ".3g") -> str:
    return " [{}, {}]".format(*("unbounded" if end is None else f"{end:{form}}" for end in (low, high)))


def _number(law: dict, name: str, form: str = ".4g") -> str:
    if law[name] is None:
        return f"not computed ({law['reasons'][name]})"
    interval = law[f"{name}_ci95"]
    if interval is None:
        return f"{law[name]:{form}} (no interval: {law['reasons'][f'{name}_ci95']})"
    return f"{law[name]:{form}}{_ends(*interval, form)}"


def _range(law: dict) -> str:
    if law["within_10_percent"] is None:
        return f"not computed ({law['reasons']['within_10_percent']})"
    low, high = law["within_10_percent"]
    powers = ", ".join(str(power) for power in law["powers_of_two"]) or "none"
    return f"G = {low} to {high}; powers of two among them: {powers}"


def _noise_scale(law: dict) -> str:
    if law["gradient_noise_scale"] is None:
        why = law["reasons"]["gradient_noise_scale"]
        return (
            "not computed, as there is no best group size" if why == law["reasons"].get("G_star") else f"not computed ({why})"
        )
    return (
        f"{_number(law, 'gradient_noise_scale', '.3g')} prompts at G = {law['gradient_noise_scale_G']} (a batch of so "
        "many has a mean gradient as large as its noise)"
    )


def _table(law: dict, budget: int) -> list[str]:
    lines = [f"  at {budget} continuations a step:", f"  {'G':>5} {'B':>5} {'MSE':>10}   {'95% interval':<22} silent"]
    for row in budget_table(law, budget):
        mse = "-" if row["mse"] is None else f"{row['mse']:.4g}"
        interval = "-" if row["mse_ci95"] is None else "[{:.4g}, {:.4g}]".format(*row["mse_ci95"])
        silent = "-" if row["silent_share"] is None else f"{row['silent_share']:.1%}"
        lines.append(f"  {row['G']:>5} {row['B']:>5} {mse:>10}   {interval:<22} {silent:>6}")
    return lines
