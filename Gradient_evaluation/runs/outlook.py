"""--plan: what a run takes and gives for a few choices of prompts and continuations. It writes no results.

The Grams that are there say how much prompts differ, and how much the continuations of one add to that. Where there are too
few, a pilot of at most two minutes measures them (runs/pilot.py). They stay, and the run that follows uses them.
"""

from __future__ import annotations

import statistics
from itertools import pairwise

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.runs.machine.durations import time_text
from Gradient_evaluation.runs.machine.memory import GIB
from Gradient_evaluation.runs.pilot import continuations, costs_text, stored_choice
from Gradient_evaluation.runs.results.results_file import counted
from Gradient_evaluation.runs.until import Until
from Gradient_evaluation.stats.group_size.design import expected_half_width, expected_seconds, prompts_needed
from Gradient_evaluation.stats.missing import Missing

PROMPTS = (20, 50, 100, 200, 500, 1000)  # rows of the table, as far as there are so many
USUAL = 0.2  # the precision that is planned for without --until
ONE_BLOCK = 64  # continuations of a row of the table, beside the best number and the published one


def outlook(until: Until, command: str) -> str:
    """The plan in words. until: it has read what is measured. Without a pilot the costs are those of the files.

    command: that which was typed, without --plan. Raises UserError where too little is measured to say anything.
    """
    settings, plan = until.settings, until.plan
    if until.n_ready < 2:
        raise UserError(
            "--plan: fewer than two prompts were measured in two minutes; lower --max_new_tokens, or use a larger GPU"
        )
    found = until.choice or stored_choice(plan.grams)
    costs = (found.seconds_per_prompt, found.seconds_per_continuation) if found else costs_of_files(until)
    spread = until.spread()
    if isinstance(spread, Missing):
        raise UserError(f"--plan: {spread.reason}; run it with --minutes first, and plan again")
    best = found.continuations if found else continuations(until, *costs)[0]
    target, most = settings.until or USUAL, len(plan.chosen)
    needed = prompts_needed(spread, best, target)
    sizes = dict.fromkeys([best, ONE_BLOCK, settings.M * settings.K_list[-1]])
    numbers = sorted({*(each for each in PROMPTS if each < most), most})
    lines = [
        f"from {counted(until.n_ready, 'prompt')} in {plan.grams}: on this machine {costs_text(*costs)}",
        f"  {'prompts':>7} {'continuations':>13} {'time':>9} {'interval of ' + str(until.quantity):>24} {'disk':>10}",
    ]
    for n in sizes:
        for T in numbers:
            width = expected_half_width(spread, T, n)
            seconds = time_text(expected_seconds(T, n, *costs))
            lines.append(f"  {T:>7} {n:>13} {seconds:>9} {f'+-{width:.0%}':>24} {_size(T * bytes_of_gram(until, n)):>10}")
    if found:
        lines.append(f"memory at the peak of the pilot: {found.peak_memory / GIB:.2f} GiB")
    if needed > most:
        lines.append(f"for +-{target:.0%} about {needed} prompts are needed, and there are {most}; give a larger table")
    typed = command if settings.until is not None else f"{command} --until {target:g}"
    took = time_text(expected_seconds(needed, best, *costs))
    lines.append(f"to +-{target:.0%}: about {counted(needed, 'prompt')} with {best} continuations of each, {took}:\n  {typed}")
    return "\n".join(lines)


def costs_of_files(until: Until) -> tuple[float, float]:
    """(0, seconds per continuation) from the times at which the Grams of a run without a pilot were written.

    What a prompt costs beside its continuations is in the second number, so fewer continuations take longer than it says.
    """
    paths = [gram_store.path_of(until.plan.grams, each.row.prompt_id) for each in until.plan.chosen[: until.n_ready]]
    times = sorted(path.stat().st_mtime for path in paths)
    sizes = [gram_store.n_drawn(path) for path in paths]
    return 0.0, statistics.median(later - earlier for earlier, later in pairwise(times)) / statistics.median(sizes)


def bytes_of_gram(until: Until, n: int) -> int:
    """About the bytes of a Gram file of ``n`` continuations, from one that is there: its blocks have 8 bytes a product."""
    path = gram_store.path_of(until.plan.grams, until.plan.chosen[0].row.prompt_id)
    block, there = until.plan.identity["largest_block"], gram_store.n_drawn(path)
    return path.stat().st_size + 8 * (n * min(n, block) - there * min(there, block))


def _size(count: float) -> str:
    for unit, size in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if count < 1000 * size:
            return f"{count / size:.3g} {unit}"
    return f"{count / 1e12:.3g} TB"
