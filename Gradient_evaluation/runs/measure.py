"""Measure one prompt: sample its continuations, reward them, and build the Grams of their scores, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.runs.checks import check_block, check_sampler, in_float32, self_audit
from Gradient_evaluation.runs.gram_store import GramRecord
from Gradient_evaluation.runs.memory import Batch
from Gradient_evaluation.runs.oracle_table import OracleRow, oracle_components
from Gradient_evaluation.runs.prompts import sampling_law
from Gradient_evaluation.runs.rewards import Rewards, RunRewards, rewards_of
from Gradient_evaluation.sampling.generate import Continuation, sample_continuations
from Gradient_evaluation.sampling.law import SamplingLaw, uniforms
from Gradient_evaluation.sampling.log_probs import log_probs
from Gradient_evaluation.settings import TracecovSettings
from Gradient_evaluation.stats.estimators import (
    extra_rollouts,
    group_rules,
    leave_one_out_weights,
    sketch_weights,
    sketched_names,
)
from Gradient_evaluation.stats.modules import layer_moments

SMALLEST_BLOCK = 4  # an unbiased estimate of ||theta||^2 needs four continuations in a block


def planned_block_size(settings: TracecovSettings) -> int:
    """--block_size, or the largest group size; twice that where an estimator needs two disjoint groups in a block."""
    return settings.block_size or settings.K_list[-1] * (2 if group_rules(settings.estimators) else 1)


def block_sizes(continuations: int, largest: int) -> list[int]:
    """Cut ``continuations`` into as few even blocks of at most ``largest`` as give each at least 4.

    (Where both cannot be had, 6 in blocks of 4 say, a block is larger.)
    """
    count = -(-continuations // largest)
    if continuations < SMALLEST_BLOCK * count:
        count = continuations // SMALLEST_BLOCK
    if count == 0:
        raise UserError(
            f"--M times the largest of --K_list gives {continuations} continuations; at least {SMALLEST_BLOCK} are needed"
        )
    return [len(part) for part in np.array_split(np.arange(continuations), count)]


def score_gram(model, settings: TracecovSettings) -> ScoreGram:
    """The ScoreGram that the flags describe. Raises UserError when they choose no parameter or the model lacks what they ask.

    --scoring published scores as the paper's released evaluation does: the full softmax at temperature 1, without the
    end-of-sequence token (``scored``).
    """
    law = sampling_law(settings) if settings.scoring == "exact" else SamplingLaw()
    try:
        return ScoreGram(
            model,
            partial(log_probs, law=law),
            params=settings.params,
            sketch_dim=settings.sketch_dim,
            budget=settings.gram_memory * 2**20,
            gradient_checkpointing=settings.gradient_checkpointing,
            gram_dtype=settings.gram_dtype,
        )
    except ValueError as error:  # it begins with the argument, which has the flag's name
        raise UserError(f"--{error}") from None


def scored(continuations: Sequence[Continuation], scoring: str) -> tuple[list[tuple[int, ...]], list[list[bool]] | None]:
    """(token ids, masks) of the continuations as ScoreGram takes them under this --scoring."""
    tokens = [each.tokens for each in continuations]
    if scoring == "exact":
        return tokens, None
    counting = [len(each.tokens) - 1 if each.ended else len(each.tokens) for each in continuations]
    return tokens, [[i < n for i in range(len(each))] for each, n in zip(tokens, counting)]


class Measurement:
    """Measures prompts with one model; the batch sizes shrink, and stay so, when memory runs out.

    model, tokenizer: a causal language model on its device; gram: its ScoreGram, entered.
    """

    def __init__(self, model, tokenizer, gram: ScoreGram, settings: TracecovSettings, rewards: RunRewards):
        self.model, self.tokenizer, self.gram, self.settings = model, tokenizer, gram, settings
        self.rewards = rewards
        self.generation = Batch("--gen_bs", settings.gen_bs, least=1)
        self.block = Batch("--block_size", planned_block_size(settings), least=SMALLEST_BLOCK)

    def audit(self, row: OracleRow, prompt_ids: list[int]) -> dict:
        """The self-audit of a block as large as this run's, of continuations that are used for nothing else."""
        count = max(block_sizes(self.settings.M * self.settings.K_list[-1], self.block.size))
        drawn = self._sample("audit", row, prompt_ids, count)
        batch = Batch("self-audit", count, least=1)

        def check(size: int) -> dict:
            return self_audit(self.gram, prompt_ids, *scored(drawn[:size], self.settings.scoring))

        return batch.run(check, row.where)

    def check_sampler(self, row: OracleRow, prompt_ids: list[int]) -> dict:
        """checks.check_sampler of a block of continuations of this prompt that are used for nothing else.

        A half-precision model draws and scores them in float32: its own rounding would hide a wrong sampler.
        """
        count = min(self.block.size, self.settings.M * self.settings.K_list[-1])

        def check() -> dict:
            drawn, law = self._sample("audit", row, prompt_ids, count), sampling_law(self.settings)
            batch = Batch("sampler check", count, least=1)
            return batch.run(lambda size: check_sampler(self.gram, law, prompt_ids, drawn[:size], row.where), row.where)

        return in_float32(self.model, check, "the comparison of sampler and scorer")

    def measure(self, row: OracleRow, prompt_ids: list[int], index: int) -> GramRecord:
        """The record of one prompt, ``index`` its row in the oracle table. FloatingPointError: not finite."""
        drawn = self._sample("tracecov", row, prompt_ids, self.settings.M * self.settings.K_list[-1])
        drawn, rewards, n_left_out = self._rewarded(drawn, row)
        blocks = self.block.run(lambda size: self._blocks(row, prompt_ids, drawn, rewards, size), row.where)
        return GramRecord(
            prompt_id=row.prompt_id,
            index=index,
            prompt=row.prompt,
            ground_truth=row.ground_truth,
            oracle_value=row.oracle_value,
            n_oracle=row.oracle_samples,
            rewards=rewards.total,
            n_left_out=n_left_out or None,
            **self._greedy_reward(row, prompt_ids),
            **self._components(row, rewards),
            **blocks,
        )

    def _rewarded(self, drawn: list[Continuation], row: OracleRow) -> tuple[list[Continuation], Rewards, int]:
        """(the continuations that have a reward, their rewards, how many are left out). UserError: fewer than 4 have one."""
        texts, token_ids = [each.text for each in drawn], [each.tokens for each in drawn]
        found = rewards_of(texts, row, self.rewards, token_ids)
        kept = found.kept
        if kept.sum() < SMALLEST_BLOCK:
            raise UserError(
                f"{row.where}: only {kept.sum()} of {len(drawn)} continuations have a reward (the others None); at least "
                f"{SMALLEST_BLOCK} are needed: raise --M, remove the row, or let a reward take it"
            )
        drawn = [each for each, stays in zip(drawn, kept) if stays]
        return drawn, Rewards(found.total[kept], found.components[:, kept]), int((~kept).sum())

    def _components(self, row: OracleRow, rewards: Rewards) -> dict:
        """The fields of GramRecord that only several rewards have."""
        if not self.rewards.are_several:
            return {}
        return {
            "components": rewards.components,
            "component_names": self.rewards.names,
            "component_weights": list(self.rewards.weights),
            "oracle_components": oracle_components(row, self.rewards.names),
        }

    def _sample(self, purpose: str, row: OracleRow, prompt_ids: list[int], count: int) -> list[Continuation]:
        u = uniforms(self.settings.seed, purpose, row.prompt_id, 0, count, self.settings.max_new_tokens)

        def sample(size: int) -> list[Continuation]:
            return sample_continuations(self.model, self.tokenizer, prompt_ids, u, sampling_law(self.settings), size)

        return self.generation.run(sample, row.where)

    def _blocks(self, row: OracleRow, prompt_ids, drawn: list[Continuation], rewards: Rewards, largest: int) -> dict:
        """The fields of GramRecord that come from the continuations, taken in blocks of at most ``largest``."""
        lengths = np.array([len(continuation.tokens) for continuation in drawn])
        names = sketched_names(self.settings.estimators) if self.settings.sketch_dim else None
        grams, values, moments, sketches, start = [], [], [], [], 0
        for size in block_sizes(len(drawn), largest):
            part = slice(start, start + size)
            start += size
            weights = self._sketch_weights(names, rewards, lengths, part) if names else None
            tokens, masks = scored(drawn[part], self.settings.scoring)
            block = self.gram.block(prompt_ids, tokens, masks, self.settings.by_layer, weights)
            if masks is None:
                check_block(self.gram, sampling_law(self.settings), prompt_ids, drawn[part], block.log_probs, row.where)
            grams.append(block.gram)
            values.append(block.log_probs)
            if names:
                sketches.append(block.sketch)
            if self.settings.by_layer:
                moments.append(layer_moments(block.by_module, rewards.total[part]))
        sketch = np.mean(sketches, axis=0) if sketches else None
        return {
            "lengths": lengths,
            "grams": grams,
            "log_probs": np.concatenate(values),
            "modules": self.gram.modules if moments else None,
            "module_moments": np.mean(moments, axis=0) if moments else None,
            "sketch": sketch[: len(names)] if names else None,
            "component_sketch": sketch[len(names) :] if names and self.rewards.are_several else None,
            "sketch_names": names,
            "sketch_layout": np.array(self.gram.sketch.layout, dtype=np.int64) if names else None,
        }

    def _sketch_weights(self, names: Sequence[str], rewards: Rewards, lengths: np.ndarray, part: slice) -> np.ndarray:
        """Weights (E, B) of one block's scores for the E ``names``; with several rewards, below them GRPO's of each alone."""
        weights = sketch_weights(names, rewards.total[part], lengths[part], self.settings.K_list[-1])
        if not self.rewards.are_several:
            return weights
        alone = [leave_one_out_weights(np.nan_to_num(values[part]), lengths[part]) for values in rewards.components]
        return np.concatenate([weights, alone])

    def _greedy_reward(self, row: OracleRow, prompt_ids: list[int]) -> dict:
        """The fields of GramRecord of the greedy continuation's reward, where an estimator needs it."""
        if "greedy" not in extra_rollouts(self.settings.estimators):
            return {}
        law = replace(sampling_law(self.settings), temperature=1.0, top_k=1, top_p=1.0)
        u = np.zeros((1, self.settings.max_new_tokens))
        greedy = sample_continuations(self.model, self.tokenizer, prompt_ids, u, law, 1)[0]
        found = rewards_of([greedy.text], row, self.rewards, [greedy.tokens])
        components = [None if np.isnan(value) else float(value) for value in found.components[:, 0]]
        return {
            "greedy_reward": float(found.total[0]) if found.kept[0] else None,
            "greedy_components": components if self.rewards.are_several else None,
        }
