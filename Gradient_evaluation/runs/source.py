"""Where a prompt's continuations come from: drawn by this run, or stored by whoever sampled them.

    Sampled(model, tokenizer, settings, rewards, folder)    draws them, and saves them where --save_rollouts says so
    Stored(rollouts, rewards)                               those of --rollouts

Both have ``draw`` (the continuations that are measured, and their rewards), ``for_audit``, ``greedy_reward``, and ``rewards``,
those of the run; None where they stand in the files of rollouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from Gradient_evaluation.runs.inputs.dataset import Row
from Gradient_evaluation.runs.inputs.prompts import sampling_law
from Gradient_evaluation.runs.inputs.rewards import Rewards, RunRewards, judged
from Gradient_evaluation.runs.inputs.rollouts.save import RolloutsFolder
from Gradient_evaluation.runs.inputs.rollouts.stored import rewards_of_rollouts
from Gradient_evaluation.runs.machine.memory import Batch
from Gradient_evaluation.sampling.generate import Continuation, sample_continuations
from Gradient_evaluation.sampling.law import uniforms
from Gradient_evaluation.sampling.rollouts import Rollouts
from Gradient_evaluation.settings import TracecovSettings, continuations_of
from Gradient_evaluation.stats.estimators import extra_rollouts


def with_rewards(drawn: list[Continuation], rewards: Rewards) -> tuple[list[Continuation], Rewards, int]:
    """(the continuations that have a reward, their rewards, how many have none)."""
    kept = rewards.kept
    left = Rewards(rewards.total[kept], rewards.components[:, kept])
    return [each for each, stays in zip(drawn, kept) if stays], left, int((~kept).sum())


class Sampled:
    """Continuations that this run draws from the model. folder: where they are saved, None without --save_rollouts."""

    is_sampled = True

    def __init__(self, model, tokenizer, settings: TracecovSettings, rewards: RunRewards, folder: RolloutsFolder | None = None):
        self.model, self.tokenizer, self.settings, self.folder = model, tokenizer, settings, folder
        self.rewards = rewards
        self.generation = Batch("--gen_bs", settings.gen_bs, least=1)

    def count_of(self, row: Row) -> int:
        """How many continuations of the prompt are measured."""
        return continuations_of(self.settings)

    def draw(self, row: Row, prompt_ids: Sequence[int], first: int = 0) -> tuple[list[Continuation], Rewards, int]:
        """(the continuations that have a reward, their rewards, how many have none and are left out), from number ``first``."""
        drawn = self._sample("tracecov", row, prompt_ids, self.count_of(row) - first, first)
        rewards = judged(drawn, row, self.rewards)
        if self.folder is not None:
            self.folder.save(row, prompt_ids, drawn, rewards.total, self.rewards.by_name(rewards), first)
        return with_rewards(drawn, rewards)

    def for_audit(self, row: Row, prompt_ids: Sequence[int], count: int) -> list[Continuation]:
        """``count`` continuations that are used for nothing else."""
        return self._sample("audit", row, prompt_ids, count)

    def greedy_reward(self, row: Row, prompt_ids: Sequence[int]) -> dict:
        """The fields of GramRecord of the greedy continuation's reward, where an estimator needs it."""
        if "greedy" not in extra_rollouts(self.settings.estimators):
            return {}
        law = replace(sampling_law(self.settings), temperature=1.0, top_k=1, top_p=1.0)
        u = np.zeros((1, self.settings.max_new_tokens))
        greedy = sample_continuations(self.model, self.tokenizer, prompt_ids, u, law, 1)[0]
        found = judged([greedy], row, self.rewards)
        components = [None if np.isnan(value) else float(value) for value in found.components[:, 0]]
        return {
            "greedy_reward": float(found.total[0]) if found.kept[0] else None,
            "greedy_components": components if self.rewards.are_several else None,
        }

    def _sample(self, purpose: str, row: Row, prompt_ids: Sequence[int], count: int, first: int = 0) -> list[Continuation]:
        u = uniforms(self.settings.seed, purpose, row.prompt_id, first, count, self.settings.max_new_tokens)

        def sample(size: int) -> list[Continuation]:
            return sample_continuations(self.model, self.tokenizer, prompt_ids, u, sampling_law(self.settings), size)

        return self.generation.run(sample, row.where)


class Stored:
    """Continuations that someone else sampled, by prompt id. Nothing is drawn, so there is no greedy continuation."""

    is_sampled = False

    def __init__(self, rollouts: Mapping[int, Rollouts], rewards: RunRewards | None):
        self.rollouts, self.rewards = rollouts, rewards

    def count_of(self, row: Row) -> int:
        """How many continuations of the prompt are measured."""
        return len(self.rollouts[row.prompt_id].continuations)

    def draw(self, row: Row, prompt_ids: Sequence[int], first: int = 0) -> tuple[list[Continuation], Rewards, int]:
        """As ``Sampled.draw``, always from the first. The rewards are those of the file, or under --reward new ones."""
        rollouts = self.rollouts[row.prompt_id]
        return with_rewards(list(rollouts.continuations), rewards_of_rollouts(rollouts, self.rewards))

    def for_audit(self, row: Row, prompt_ids: Sequence[int], count: int) -> list[Continuation]:
        """The first ``count`` continuations of the prompt."""
        return list(self.rollouts[row.prompt_id].continuations[:count])

    def greedy_reward(self, row: Row, prompt_ids: Sequence[int]) -> dict:
        """Nothing: no greedy continuation is stored."""
        return {}
