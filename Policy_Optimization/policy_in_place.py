"""The group size, measured on a model in the middle of its training: the policy as it stands, and the model as it was.

    with in_place(model, law) as policy:
        drawn = policy.sampled(tokenizer, prompts, count, at_once, seed)     # continuations of each prompt
        records = [policy.measured(group, block_size) for group in groups]   # Group: a prompt, continuations, rewards
    numbers = numbers_of(records, policy.layout, sketch_dim, trained, seed)

No trainer here. While the policy is entered its model is in eval mode, no parameter requires grad, and autocast is off;
afterwards all this is as before, and so is every global random state (torch, CUDA, NumPy, Python). Prompts, continuations
and sketches are those of run_tracecov.py with the same seed, so a checkpoint of the run gives the same numbers there.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.gram.scoring import own_modes, without_accelerate
from Gradient_evaluation.runs.checks import check_block
from Gradient_evaluation.runs.inputs.dataset import Row, prompt_id, to_json
from Gradient_evaluation.runs.measure import SMALLEST_BLOCK, block_sizes
from Gradient_evaluation.runs.plan import drawn
from Gradient_evaluation.sampling.generate import Continuation, sample_continuations, sample_groups
from Gradient_evaluation.sampling.law import SamplingLaw, uniforms
from Gradient_evaluation.sampling.log_probs import log_probs
from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.estimators import leave_one_out_weights
from Gradient_evaluation.stats.group_size.law import group_size_law
from Gradient_evaluation.stats.group_size.sketch_pairs import Sketches, SketchPart
from Gradient_evaluation.stats.missing import Missing
from Gradient_evaluation.stats.prompts import reduce_prompts
from Gradient_evaluation.utils import normalise_prompt

LAW_NUMBERS = (
    *("G_star", "G_star_ci95", "G_star_at_least", "G_star_may_be_larger", "almost_best", "within_10_percent"),
    *(f"{name}{end}" for name in ("c1", "c2", "c3", "mean_theta_norm_sq") for end in ("", "_ci95")),
)

# What a log gets of a measurement; its file has the rest.
LOGGED = (
    *("G_star", "G_star_ci95", "G_star_at_least", "almost_best", "c1", "c1_ci95", "c2", "c2_ci95", "c3", "c3_ci95"),
    *("mse", "mse_half", "mse_double", "signal_to_noise", "frac_reward_zero_std", "mean_reward", "seconds", "share_of_run"),
)


class Group(NamedTuple):
    """One prompt, its continuations and their rewards (N,), NaN where a continuation has none."""

    row: Row
    prompt_ids: list[int]
    continuations: list[Continuation]
    rewards: np.ndarray


@dataclass(frozen=True)
class Record:
    """The measurement of one prompt, as reduce_prompts reads it. sketch (S,) float32 of its GRPO gradient.

    n_truncated: continuations that the limit cut off; n_left_out: those without a reward, which are in no block.
    """

    prompt_id: int
    blocks: list[tuple[np.ndarray, np.ndarray, np.ndarray]]  # Gram (B, B), rewards (B,), lengths (B,)
    sketch: np.ndarray
    n_truncated: int
    n_left_out: int
    oracle_value: None = None


class Trained(NamedTuple):
    """How the trainer takes its steps: groups of ``group_size``, ``prompts`` of them. None: it has no groups."""

    group_size: int | None
    prompts: float | None


def rows_of(prompts: Sequence[Mapping[str, Any]], count: int, seed: int) -> list[Row]:
    """``count`` of the prompts, drawn by ``seed`` as run_tracecov.py --T draws them, in the order of the data set.

    prompts: a datasets.Dataset or a list of dictionaries with a column ``prompt`` (string or messages). Columns are kept as
    they are. Raises UserError that names the row.
    """
    if not hasattr(prompts, "__len__"):
        raise UserError("prompts: a stream has no length to draw from; give a list of dictionaries or a datasets.Dataset")
    rows = []
    for index in sorted(drawn(len(prompts), count, None, seed)):
        record, where = prompts[index], f"prompts, row {index + 1}"
        if not isinstance(record, Mapping) or "prompt" not in record:
            raise UserError(f"{where}: no column 'prompt'; give a data set or a list of dictionaries that have one")
        try:
            prompt, truth = normalise_prompt(record["prompt"]), record.get("ground_truth")
            rows.append(Row(prompt, truth, dict(record), where, prompt_id(prompt, to_json(truth))))
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    if not rows:
        raise UserError("prompts: there are none")
    return rows


@contextmanager
def random_state_kept(devices: Sequence[torch.device]) -> Iterator[None]:
    """While inside, whatever is drawn from torch (CPU and ``devices``), NumPy or Python leaves no trace."""
    of_numpy, of_python = np.random.get_state(), random.getstate()
    others = sorted({(each.type, each.index or 0) for each in devices if each.type != "cpu"})
    kind = others[0][0] if others else "cuda"
    try:
        with torch.random.fork_rng([index for _, index in others], device_type=kind):
            yield
    finally:
        np.random.set_state(of_numpy)
        random.setstate(of_python)


@contextmanager
def in_place(model, law: SamplingLaw, sketch_dim: int = 16, gradient_checkpointing: bool = False) -> Iterator[Policy]:
    """The policy of a model that a trainer holds; see the module. model: on its device, not inside a wrapper of processes.

    Of a PEFT model the adapters are measured: what requires grad is, and nothing else.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    with random_state_kept([p.device for p in model.parameters()]):
        gram = ScoreGram(
            model, partial(log_probs, law=law), sketch_dim=sketch_dim, gradient_checkpointing=gradient_checkpointing
        )
        with gram, without_accelerate(model), own_modes(model.device):
            yield Policy(gram, law)


class Policy:
    """A model under a sampling law, entered by ``in_place``."""

    def __init__(self, gram: ScoreGram, law: SamplingLaw):
        self.gram, self.law = gram, law
        self.layout = [SketchPart(*part) for part in gram.sketch.layout]

    def sampled(
        self, tokenizer, prompts: Sequence[tuple[Row, list[int]]], count: int, at_once: int, seed: int
    ) -> list[list[Continuation]]:
        """``count`` continuations of each prompt (row, token ids), at most ``at_once`` in a batch; the same for a seed."""
        u = [uniforms(seed, "tracecov", row.prompt_id, 0, count, self.law.max_new_tokens) for row, _ in prompts]
        asked = [ids for _, ids in prompts]
        if at_once < 2 * count:
            return [sample_continuations(self.gram.model, tokenizer, ids, own, self.law, at_once) for ids, own in zip(asked, u)]
        step, found = at_once // count, []
        for start in range(0, len(asked), step):
            part = slice(start, start + step)
            found += sample_groups(self.gram.model, tokenizer, asked[part], np.stack(u[part]), self.law)
        return found

    def audit(self, group: Group) -> None:
        """Compare the Gram of a group with one ordinary backward pass. UserError where a parameter is not measured right."""
        self.gram.audit(group.prompt_ids, [each.tokens for each in group.continuations])

    def measured(self, group: Group, block_size: int) -> Record | None:
        """Grams and sketch of one prompt's continuations; None where fewer than four of them have a reward.

        Raises UserError where the log-probs that the continuations came with are not those of the scoring pass.
        """
        kept = np.flatnonzero(~np.isnan(group.rewards))
        if len(kept) < SMALLEST_BLOCK:
            return None
        blocks, sketches, start = [], [], 0
        for size in block_sizes(len(kept), block_size):
            part, start = kept[start : start + size], start + size
            continuations, rewards = [group.continuations[i] for i in part], group.rewards[part]
            lengths = np.array([each.length for each in continuations], dtype=np.float64)
            weights = leave_one_out_weights(rewards, lengths)[None]
            block = self.gram.block(group.prompt_ids, [each.tokens for each in continuations], weights=weights)
            if continuations[0].log_probs is not None:
                check_block(self.gram, self.law, group.prompt_ids, continuations, block.log_probs, group.row.where)
            blocks.append((block.gram, rewards, lengths))
            sketches.append(block.sketch[0])
        truncated = sum(not each.ended for each in group.continuations)
        left_out = len(group.rewards) - len(kept)
        return Record(group.row.prompt_id, blocks, np.mean(sketches, axis=0), truncated, left_out)


def numbers_of(
    records: Sequence[Record], layout: Sequence[SketchPart], sketch_dim: int, trained: Trained, seed: int
) -> dict[str, Any]:
    """The numbers of one measurement, JSON-ready: None where there is none, and why in ``reasons``.

    Those of group_size_law that ``LAW_NUMBERS`` names; at the trainer's own group size G and B prompts a step:
    mse = c1/B + c2/(BG) + c3/(BG(G-1)), mse_half and mse_double at G//2 and 2G with as many continuations a step,
    signal_to_noise = ||mean theta||^2 / mse, frac_reward_zero_std (unbiased, for G up to the continuations of a prompt);
    mean_reward and its standard error over prompts, mean_length, n_prompts, n_continuations, n_truncated, n_left_out.
    """
    prompts = reduce_prompts(records)
    sketches = Sketches(np.stack([each.sketch for each in records]), layout, sketch_dim)
    law = group_size_law(prompts, sketches, PromptBootstrap(len(records), seed=seed))
    numbers = {name: law[name] for name in LAW_NUMBERS}
    reasons = {name: why for name, why in law["reasons"].items() if name in LAW_NUMBERS}
    at_own, no_own = at_own_size(law, trained, partial(_silent_share, prompts.outcomes))
    n = len(records)
    numbers |= at_own | {
        "num_generations": trained.group_size,
        "prompts_per_step": trained.prompts,
        "mean_reward": float(prompts.mean_reward.mean()),
        "mean_reward_standard_error": float(prompts.mean_reward.std(ddof=1) / n**0.5) if n > 1 else None,
        "mean_length": prompts.mean_length,
        "n_prompts": n,
        "n_continuations": sum(len(rewards) for each in records for _, rewards, _ in each.blocks),
        "n_truncated": sum(each.n_truncated for each in records),
        "n_left_out": sum(each.n_left_out for each in records),
    }
    return {**numbers, "reasons": reasons | no_own}


def _silent_share(outcomes: Sequence, size: int) -> float | Missing:
    fewest = min(each.total for each in outcomes)
    if size > fewest:
        return Missing(f"num_generations {size} is more than the {fewest} continuations of a prompt")
    return float(np.mean([each.silent_share(size) for each in outcomes]))


def at_own_size(law: Mapping[str, Any], trained: Trained, silent_share: Callable[[int], float | Missing]) -> tuple[dict, dict]:
    """What is said at the trainer's own group size (see ``numbers_of``), and why of each None.

    law: of ``group_size_law``. silent_share: the share of silent groups at a group size.
    """
    size, batch = trained
    found: dict = dict.fromkeys(("mse", "mse_half", "mse_double", "signal_to_noise", "frac_reward_zero_std"))
    if size is None:
        return found, dict.fromkeys(found, "the trainer has no num_generations; give num_generations and prompts_per_step")
    reasons: dict = {}
    share = silent_share(size)
    if isinstance(share, Missing):
        reasons["frac_reward_zero_std"] = share.reason
    else:
        found["frac_reward_zero_std"] = share
    if batch is None or law["c1"] is None:
        why = law["reasons"]["c1"] if batch else "prompts_per_step is not known"
        return found, {**reasons, **{name: why for name in found if name != "frac_reward_zero_std"}}
    for name, other in (("mse", size), ("mse_half", size // 2), ("mse_double", 2 * size)):
        if other < 2:
            reasons[name] = f"there is no group size {other}"
            continue
        found[name] = (law["c1"] * other + law["c2"] + law["c3"] / (other - 1)) / (batch * size)
    ends = law["curve"]["ci95"] if size - 2 < len(law["curve"]["G"]) else None
    if min(found["mse"], ends[size - 2][0] if ends else found["mse"]) > 0:
        found["signal_to_noise"] = law["mean_theta_norm_sq"] / found["mse"]
    else:
        reasons["signal_to_noise"] = "the predicted MSE cannot be told from 0 with these prompts"
    return found, reasons


def as_logged(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a measurement as a log has them, group_size/NAME; an interval as NAME_low and NAME_high."""
    found = {}
    for name in LOGGED:
        value = row.get(name)
        parts = {name: value}
        if isinstance(value, list):
            parts = {f"{name.removesuffix('_ci95')}_{end}": each for end, each in zip(("low", "high"), value)}
        found |= {f"group_size/{each}": float(number) for each, number in parts.items() if number is not None}
    return found
