"""Measure one prompt: take its continuations and rewards, and build the Grams of their scores, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.runs.checks import check_block, check_sampler, in_float32, self_audit
from Gradient_evaluation.runs.inputs.oracle_table import OracleRow, oracle_components
from Gradient_evaluation.runs.inputs.prompts import sampling_law
from Gradient_evaluation.runs.inputs.rewards import Rewards, judged
from Gradient_evaluation.runs.inputs.rollouts.compare import Comparison, importance_weights
from Gradient_evaluation.runs.kl import Reference
from Gradient_evaluation.runs.machine.gram_store import GramRecord, scalar_columns
from Gradient_evaluation.runs.machine.memory import Batch
from Gradient_evaluation.runs.optimizer_state import second_moments
from Gradient_evaluation.runs.source import Sampled, Stored, with_rewards
from Gradient_evaluation.sampling.generate import Continuation
from Gradient_evaluation.sampling.law import SamplingLaw
from Gradient_evaluation.sampling.log_probs import log_probs
from Gradient_evaluation.settings import TracecovSettings
from Gradient_evaluation.stats.estimators import group_rules, leave_one_out_weights, sketch_weights, sketched_names
from Gradient_evaluation.stats.modules import layer_moments, mean_moments
from Gradient_evaluation.stats.prompts import cross_fitted_oracle
from Gradient_evaluation.stats.weighted import Weights, distinct_products, self_normalised

SMALLEST_BLOCK = 4  # an unbiased estimate of ||theta||^2 needs four continuations in a block


def planned_block_size(settings: TracecovSettings) -> int:
    """--block_size, or the largest group size; twice that for rollouts, and where an estimator needs two disjoint groups."""
    return settings.block_size or settings.K_list[-1] * (2 if settings.rollouts or group_rules(settings.estimators) else 1)


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
            metric=second_moments(model, settings) if settings.optimizer_state else None,
        )
    except ValueError as error:  # it begins with the argument, which has the flag's name
        raise UserError(f"--{str(error).replace('metric:', f'optimizer_state {settings.optimizer_state}:', 1)}") from None


def scored(continuations: Sequence[Continuation], scoring: str) -> tuple[list[tuple[int, ...]], list[list[bool]] | None]:
    """(token ids, masks) of the continuations as ScoreGram takes them under this --scoring; None: every token counts."""
    tokens = [each.tokens for each in continuations]
    if scoring == "exact" and all(each.mask is None for each in continuations):
        return tokens, None
    masks = [list(each.mask or [True] * len(each.tokens)) for each in continuations]
    if scoring == "published":
        for mask, each in zip(masks, continuations):
            mask[-1] &= not each.ended
    return tokens, masks


class Measurement:
    """Measures prompts with one model; the batch sizes shrink, and stay so, when memory runs out.

    model: a causal language model on its device; gram: its ScoreGram, entered; source: where continuations come from.
    """

    def __init__(self, model, gram: ScoreGram, source: Sampled | Stored, settings: TracecovSettings):
        self.model, self.gram, self.source, self.settings = model, gram, source, settings
        self.several = source.rewards if source.rewards and source.rewards.are_several else None
        self.block = Batch("--block_size", planned_block_size(settings), least=SMALLEST_BLOCK)
        self.reference = Reference(model, settings) if settings.ref_model else None
        self.comparison = Comparison(gram, sampling_law(settings), settings.allow_mismatch)

    def audit(self, row: OracleRow, prompt_ids: list[int]) -> dict:
        """The self-audit of a block as large as this run's: drawn for nothing else, or the first of the stored."""
        count = max(block_sizes(self.source.count_of(row), self.block.size))
        drawn = self.source.for_audit(row, prompt_ids, count)
        batch = Batch("self-audit", count, least=1)

        def check(size: int) -> dict:
            return self_audit(self.gram, prompt_ids, *scored(drawn[:size], self.settings.scoring))

        return batch.run(check, row.where)

    def check_sampler(self, row: OracleRow, prompt_ids: list[int]) -> dict:
        """checks.check_sampler of a block of continuations of this prompt that are used for nothing else.

        A half-precision model draws and scores them in float32: its own rounding would hide a wrong sampler.
        """
        count = min(self.block.size, self.source.count_of(row))

        def check() -> dict:
            drawn, law = self.source.for_audit(row, prompt_ids, count), sampling_law(self.settings)
            batch = Batch("sampler check", count, least=1)
            return batch.run(lambda size: check_sampler(self.gram, law, prompt_ids, drawn[:size], row.where), row.where)

        return in_float32(self.model, check, "the comparison of sampler and scorer")

    def rehearse(self, row: OracleRow, prompt_ids: list[int], count: int) -> None:
        """All the work that ``count`` continuations of a prompt take, for the time it takes. They are used for nothing."""
        found = self.source.for_audit(row, prompt_ids, count)
        drawn, rewards, _ = with_rewards(found, judged(found, row, self.source.rewards))
        if len(drawn) >= SMALLEST_BLOCK:
            self._blocks(row, prompt_ids, drawn, rewards, None, self.block.size)

    def measure(self, row: OracleRow, prompt_ids: list[int], index: int, first: int = 0) -> GramRecord:
        """The record of one prompt, ``index`` its row among the prompts, of its continuations from number ``first`` on.

        Raises FloatingPointError where something is not finite.
        """
        drawn, rewards, n_left_out = self.source.draw(row, prompt_ids, first)
        if len(drawn) < SMALLEST_BLOCK:
            count, more = (
                len(drawn) + n_left_out,
                "raise --M or --per_prompt" if self.source.is_sampled else "give more rollouts of it",
            )
            raise UserError(
                f"{row.where}: only {len(drawn)} of {count} continuations have a reward (the others None); at least "
                f"{SMALLEST_BLOCK} are needed: {more}, remove the row, or let a reward take it"
            )
        compared = weights = None
        if not self.source.is_sampled:
            compare = partial(self.comparison.of_prompt, prompt_ids, drawn, row.where)
            compared, log_weights = self.block.run(compare, row.where)
            if self.settings.importance_weights:
                weights = importance_weights(log_weights, row.where)
        blocks = self.block.run(lambda size: self._blocks(row, prompt_ids, drawn, rewards, weights, size), row.where)
        return GramRecord(
            prompt_id=row.prompt_id,
            index=index,
            prompt=row.prompt,
            ground_truth=row.ground_truth,
            oracle_value=row.oracle_value,
            n_oracle=row.oracle_samples,
            rewards=rewards.total,
            n_left_out=n_left_out or None,
            columns=scalar_columns(row.columns),
            **self.source.greedy_reward(row, prompt_ids),
            **self._components(row, rewards),
            rollouts_check=compared,
            log_weights=weights,
            **blocks,
        )

    def _components(self, row: OracleRow, rewards: Rewards) -> dict:
        """The fields of GramRecord that only several rewards have."""
        if not self.several:
            return {}
        return {
            "components": rewards.components,
            "component_names": self.several.names,
            "component_weights": list(self.several.weights),
            "oracle_components": oracle_components(row, self.several.names),
        }

    def _blocks(self, row: OracleRow, prompt_ids, drawn, rewards: Rewards, log_weights, largest: int) -> dict:
        """The fields of GramRecord that come from the continuations, taken in blocks of at most ``largest``.

        log_weights: (N,) of ``importance_weights``, or None.
        """
        lengths = np.array([continuation.length for continuation in drawn])
        names = sketched_names(self.settings.estimators, log_weights is not None) if self.settings.sketch_dim else None
        grams, values, moments, sketches, start = [], [], [], [], 0
        in_metric, metric_sketches, kl = [], [], []
        cuts = block_sizes(len(drawn), largest)
        importance: list[Weights | None] = [None] * len(cuts)
        if log_weights is not None:
            importance = self_normalised(np.split(np.exp(log_weights - log_weights.max()), np.cumsum(cuts)[:-1]))
        for size, of_block in zip(cuts, importance):
            part = slice(start, start + size)
            start += size
            weights = self._sketch_weights(names, rewards, lengths, part, of_block) if names else None
            tokens, masks = scored(drawn[part], self.settings.scoring)
            if self.reference is None:
                block = self.gram.block(prompt_ids, tokens, masks, self.settings.by_layer, weights)
            else:
                block, own = self.reference.block(self.gram, prompt_ids, tokens, masks, self.settings.by_layer, weights)
                kl.append(own)
            if self.source.is_sampled and masks is None:
                check_block(self.gram, sampling_law(self.settings), prompt_ids, drawn[part], block.log_probs, row.where)
            grams.append(block.gram)
            values.append(block.log_probs)
            if names:
                sketches.append(block.sketch)
            if self.gram.metric is not None:
                in_metric.append(block.metric_gram)
                metric_sketches.append(block.metric_sketch)
            if self.settings.by_layer:
                moments.append(layer_moments(block.by_module, rewards.total[part], of_block))
        sizes = [len(gram) for gram in grams]
        sketch = _mean_sketch(sketches, sizes) if sketches else None
        return {
            "lengths": lengths,
            "grams": grams,
            "log_probs": np.concatenate(values),
            "modules": self.gram.modules if moments else None,
            "module_moments": mean_moments(moments, [[size] for size in sizes]) if moments else None,
            "sketch": sketch[: len(names)] if names else None,
            **_kl_fields(kl),
            "metric_grams": in_metric or None,
            "metric_sketch": _mean_sketch(metric_sketches, sizes)[: len(names)] if names and in_metric else None,
            "component_sketch": sketch[len(names) :] if names and self.several else None,
            "module_oracle": _module_oracle(row, moments, np.split(rewards.total, np.cumsum(sizes)[:-1]), importance),
            "sketch_names": names,
            "sketch_layout": np.array(self.gram.sketch.layout, dtype=np.int64) if names else None,
        }

    def _sketch_weights(
        self, names, rewards: Rewards, lengths: np.ndarray, part: slice, of_block: Weights | None
    ) -> np.ndarray:
        """Weights (E, B) of one block's scores for the E ``names``; with several rewards, below them GRPO's of each alone."""
        importance = None if of_block is None else of_block.values
        weights = sketch_weights(names, rewards.total[part], lengths[part], self.settings.K_list[-1], importance)
        if self.several:
            each = (np.nan_to_num(values[part]) for values in rewards.components)
            alone = [leave_one_out_weights(values, lengths[part], importance) for values in each]
            weights = np.concatenate([weights, alone])
        if of_block is not None:  # they are divided by the block's own mean of w_i w_j; by the prompt's, as moments are
            weights = weights * (distinct_products(of_block.values)[1] / of_block.shares[1])
        return weights


def _mean_sketch(sketches: list[np.ndarray], sizes: list[int]) -> np.ndarray:
    """The mean over blocks, which count by their size; in the sketches' dtype."""
    return np.average(sketches, axis=0, weights=sizes).astype(sketches[0].dtype)


def _kl_fields(found: list[dict]) -> dict:
    """The fields of GramRecord that only --ref_model has."""
    if not found:
        return {}
    sketches = [each["sketch"] for each in found]
    return {
        "kl_grams": [each["gram"] for each in found],
        "kl_sketch": None if sketches[0] is None else _mean_sketch(sketches, [len(each["values"]) for each in found]),
        "kl": np.concatenate([each["values"] for each in found]),
    }


def _module_oracle(
    row: OracleRow, moments: list[np.ndarray], rewards: list[np.ndarray], importance: list[Weights | None]
) -> np.ndarray | None:
    """Each module's trace at a cross-fitted V(x), where the row has none and there are two blocks or more."""
    if row.oracle_value is not None or len(moments) < 2:
        return None
    weights = None if importance[0] is None else [each.values for each in importance]
    return cross_fitted_oracle(np.stack(moments)[..., :3], rewards, weights)
