"""Continuations as data, whoever sampled them: the rollouts of one prompt, checked. No files here.

Rollouts(row, prompt_ids, continuations, rewards, ...)   of one prompt
check_rollouts(rollouts, vocabulary)                     what no importer may hand on
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.sampling.generate import Continuation


class Prompt(Protocol):
    """What rollouts say of their prompt, as a Row of a data set has it; ground_truth may be None."""

    prompt: Any
    ground_truth: Any
    columns: dict[str, Any]
    where: str
    prompt_id: int

    @property
    def tools(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class Rollouts:
    """The continuations of one prompt, as data, whoever sampled them.

    row: the prompt; prompt_ids: its token ids, None where the file has none. continuations: N of them. rewards: (N,) float64,
    NaN where the file has none; None: the file has no rewards at all. components: {name of a reward: (N,) float64}. law: what
    the file says of model and sampling law (keys of run_identity, and model_fingerprint); {} where it says nothing.
    step: the training step of each, or None. wheres: where each stands, for messages; () where that is not known.
    from_text: whether the token ids were made again from text.
    """

    row: Prompt
    prompt_ids: tuple[int, ...] | None
    continuations: tuple[Continuation, ...]
    rewards: np.ndarray | None = None
    components: dict[str, np.ndarray] = field(default_factory=dict)
    law: dict[str, Any] = field(default_factory=dict)
    step: tuple[int | None, ...] | None = None
    wheres: tuple[str, ...] = ()
    from_text: bool = False

    def where(self, index: int) -> str:
        """Where continuation ``index`` stands, for messages."""
        return self.wheres[index] if self.wheres else f"{self.row.where}, continuation {index + 1}"

    def only(self, indices: Sequence[int]) -> Rollouts:
        """These continuations alone, in this order."""
        return replace(
            self,
            continuations=tuple(self.continuations[i] for i in indices),
            rewards=None if self.rewards is None else self.rewards[list(indices)],
            components={name: values[list(indices)] for name, values in self.components.items()},
            step=None if self.step is None else tuple(self.step[i] for i in indices),
            wheres=tuple(self.where(i) for i in indices),
        )


def check_rollouts(several: Sequence[Rollouts], vocabulary: int | None = None) -> None:
    """Raise UserError, one line naming where it stands, for what no model could score or what does not belong together.

    That is an empty continuation, a token that the model's ``vocabulary`` lacks, log-probs or a mask of another length, a
    mask without a token that counts, a log-prob or reward that is not finite, two prompts with one id, two laws.
    """
    first: dict[int, Rollouts] = {}
    for rollouts in several:
        other = first.setdefault(rollouts.row.prompt_id, rollouts)
        if other is not rollouts:
            raise UserError(
                f"{rollouts.where(0)}: its prompt has the id {rollouts.row.prompt_id:016x} of the prompt of {other.where(0)}; "
                "give each prompt an id of its own"
            )
        _check_ids(rollouts.row.where, "prompt_ids", rollouts.prompt_ids, vocabulary)
        for index, continuation in enumerate(rollouts.continuations):
            _check_continuation(rollouts.where(index), continuation, vocabulary)
        _check_rewards(rollouts)
        check_same_law(several[0].where(0), several[0].law, rollouts.where(0), rollouts.law)


def _check_ids(where: str, name: str, ids: Sequence[int] | None, vocabulary: int | None) -> None:
    if ids is None:
        return
    if not len(ids):
        raise UserError(f"{where}: its {name} are empty; give at least one token, or remove it")
    worst = min(ids) if min(ids) < 0 else max(ids)
    if worst < 0 or vocabulary is not None and worst >= vocabulary:
        knows = "" if vocabulary is None else f", the model knows {vocabulary}"
        raise UserError(f"{where}: its {name} hold token {worst}{knows}; these are rollouts of another model or tokenizer")


def _check_continuation(where: str, continuation: Continuation, vocabulary: int | None) -> None:
    tokens, mask = continuation.tokens, continuation.mask
    _check_ids(where, "response_ids", tokens, vocabulary)
    for name, values in (("log_probs", continuation.log_probs), ("log_kept", continuation.log_kept), ("mask", mask)):
        if values is not None and len(values) != len(tokens):
            raise UserError(f"{where}: {len(values)} {name} of {len(tokens)} response_ids; give one for each token, or none")
    for name, values in (("log_probs", continuation.log_probs), ("log_kept", continuation.log_kept)):
        counting = [] if values is None else values if mask is None else np.asarray(values)[np.asarray(mask)]
        if len(counting) and not np.isfinite(counting).all():
            raise UserError(f"{where}: its {name} hold a value that is not finite; mend or leave them out")
    if mask is not None and not any(mask):
        raise UserError(f"{where}: its mask lets no token count; remove this continuation")


def _check_rewards(rollouts: Rollouts) -> None:
    named: Iterable[tuple[str, np.ndarray | None]] = [("reward", rollouts.rewards), *rollouts.components.items()]
    for name, values in named:
        if values is None:
            continue
        if values.shape != (len(rollouts.continuations),):
            raise UserError(f"{rollouts.row.where}: {values.shape} values of {name} for {len(rollouts.continuations)} rollouts")
        for index in np.flatnonzero(np.isinf(values)):
            raise UserError(f"{rollouts.where(int(index))}: its {name} is {values[index]}, not a finite number; mend it")


def check_same_law(where: str, law: dict[str, Any], other_where: str, other_law: dict[str, Any]) -> None:
    """Raise UserError where the rollouts at two places are of two models or laws."""
    for name in dict.fromkeys([*law, *other_law]):
        if law.get(name) != other_law.get(name):
            raise UserError(
                f"{other_where}: sampled with {name} = {other_law.get(name)!r}, and {where} with {law.get(name)!r}; rollouts "
                "of one model under one law are measured at a time, give those alone"
            )
