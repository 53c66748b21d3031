"""Measure one prompt: sample its continuations, reward them, and build the Grams of their scores, block by block."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.gram.self_audit import in_float32
from Gradient_evaluation.runs.gram_store import GramRecord
from Gradient_evaluation.runs.memory import Batch
from Gradient_evaluation.runs.oracle_table import Row
from Gradient_evaluation.runs.prompts import sampling_law
from Gradient_evaluation.runs.rewards import rewards_of
from Gradient_evaluation.runs.sampler_check import check_sampler
from Gradient_evaluation.sampling.generate import Continuation, sample_continuations, uniforms
from Gradient_evaluation.stats.estimators import group_rules
from Gradient_evaluation.stats.modules import layer_moments
from Gradient_evaluation.stats.sketch_weights import sketch_weights, sketched_names

SMALLEST_BLOCK = 4  # an unbiased estimate of ||theta||^2 needs four continuations in a block


def planned_block_size(args) -> int:
    """--block_size, or the largest group size; twice that where an estimator needs two disjoint groups in a block."""
    return args.block_size or args.K_list[-1] * (2 if group_rules(args.estimators) else 1)


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


class Measurement:
    """Measures prompts with one model; the batch sizes shrink, and stay so, when memory runs out.

    model, tokenizer: a causal language model on its device; gram: its ScoreGram; args: the flags of run_tracecov.py.
    """

    def __init__(self, model, tokenizer, gram: ScoreGram, args):
        self.model, self.tokenizer, self.gram, self.args = model, tokenizer, gram, args
        self.generation = Batch("--gen_bs", args.gen_bs, least=1)
        self.block = Batch("--block_size", planned_block_size(args), least=SMALLEST_BLOCK)

    def audit(self, row: Row, prompt_ids: list[int]) -> dict:
        """ScoreGram.audit of a block as large as this run's, of continuations that are used for nothing else."""
        count = max(block_sizes(self.args.M * self.args.K_list[-1], self.block.size))
        drawn = self._sample("audit", row, prompt_ids, count)
        batch = Batch("self-audit", count, least=1)
        return batch.run(lambda size: self.gram.audit(prompt_ids, drawn[:size]), row.where)

    def check_sampler(self, row: Row, prompt_ids: list[int]) -> dict:
        """sampler_check.check_sampler of a block of continuations of this prompt that are used for nothing else.

        A half-precision model draws and scores them in float32: its own rounding would hide a wrong sampler.
        """
        count = min(self.block.size, self.args.M * self.args.K_list[-1])

        def check() -> dict:
            drawn = self._sample("audit", row, prompt_ids, count)
            batch = Batch("sampler check", count, least=1)
            return batch.run(lambda size: check_sampler(self.gram, prompt_ids, drawn[:size], row.where), row.where)

        return in_float32(self.model, check, "the comparison of sampler and scorer")

    def measure(self, row: Row, prompt_ids: list[int], place: int) -> GramRecord:
        """The record of one prompt, ``place`` its index in the oracle table. FloatingPointError: not finite."""
        drawn = self._sample("tracecov", row, prompt_ids, self.args.M * self.args.K_list[-1])
        rewards = rewards_of((continuation.text for continuation in drawn), row, self.args.reward)
        lengths = np.array([len(continuation.tokens) for continuation in drawn])
        blocks = self.block.run(lambda size: self._blocks(prompt_ids, drawn, rewards, lengths, size), row.where)
        return GramRecord(
            prompt_id=row.prompt_id,
            index=place,
            prompt=row.prompt,
            ground_truth=row.ground_truth,
            oracle_value=row.oracle_value,
            n_oracle=row.oracle_samples,
            rewards=rewards,
            lengths=lengths,
            greedy_reward=self._greedy_reward(row, prompt_ids),
            **blocks,
        )

    def _sample(self, purpose: str, row: Row, prompt_ids: list[int], count: int) -> list[Continuation]:
        u = uniforms(self.args.seed, purpose, row.prompt_id, 0, count, self.args.max_new_tokens)

        def sample(size: int) -> list[Continuation]:
            return sample_continuations(self.model, self.tokenizer, prompt_ids, u, sampling_law(self.args), size)

        return self.generation.run(sample, row.where)

    def _blocks(self, prompt_ids, drawn, rewards, lengths, largest: int) -> dict:
        """The fields of GramRecord that come from blocks of at most ``largest`` continuations."""
        names = sketched_names(self.args.estimators) if self.args.sketch_dim else None
        grams, log_probs, moments, sketches, start = [], [], [], [], 0
        for size in block_sizes(len(drawn), largest):
            part = slice(start, start := start + size)
            weights = sketch_weights(names, rewards[part], lengths[part], self.args.K_list[-1]) if names else None
            block = self.gram.block(prompt_ids, drawn[part], self.args.by_layer, weights)
            grams.append(block.gram)
            log_probs.append(block.log_probs)
            if names:
                sketches.append(block.sketch)
            if self.args.by_layer:
                moments.append(layer_moments(block.by_module, rewards[part]))
        return {
            "grams": grams,
            "log_probs": np.concatenate(log_probs),
            "modules": self.gram.modules if moments else None,
            "module_moments": np.mean(moments, axis=0) if moments else None,
            "sketch": np.mean(sketches, axis=0) if sketches else None,
            "sketch_names": names,
            "sketch_layout": np.array(self.gram.sketch.layout, dtype=np.int64) if names else None,
        }

    def _greedy_reward(self, row: Row, prompt_ids: list[int]) -> float | None:
        """Reward of the greedy continuation, when the estimator that needs it is asked for."""
        if "greedy" not in self.args.estimators:
            return None
        law = replace(sampling_law(self.args), temperature=1.0, top_k=1, top_p=1.0)
        u = np.zeros((1, self.args.max_new_tokens))
        greedy = sample_continuations(self.model, self.tokenizer, prompt_ids, u, law, 1)[0]
        return float(rewards_of([greedy.text], row, self.args.reward)[0])
