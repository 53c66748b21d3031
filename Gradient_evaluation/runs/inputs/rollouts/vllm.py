"""vLLM's outputs: JSON lines (or a JSON list) of RequestOutput, one object per request.

    {"prompt": ..., "prompt_token_ids": [...], "outputs": [{"text": ..., "token_ids": [...], "logprobs": [...],
                                                            "finish_reason": "stop", "stop_reason": null}, ...]}

``logprobs`` holds one {token id: {"logprob": ...}} for each token, as vLLM has them, or plain numbers. They are those of
the sampling law only under logprobs_mode="processed_logprobs" (compare.py says when they are not).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import Record, Row, prompt_id
from Gradient_evaluation.runs.inputs.rollouts.context import Context, OfPrompt
from Gradient_evaluation.runs.inputs.rollouts.from_text import LEAST_SHARE
from Gradient_evaluation.sampling.generate import Continuation
from Gradient_evaluation.sampling.rollouts import Rollouts
from Gradient_evaluation.sampling.stop_strings import NO_CHARACTER, StopStrings, decode_text, special_tokens

LIMIT = "give the max_tokens that sampled it"
FIX = "write the RequestOutput of LLM.generate as docs/rollouts.md shows"


def recognises(record: Mapping[str, Any]) -> bool:
    """Whether a record is a RequestOutput with token ids."""
    outputs = record.get("outputs")
    return isinstance(outputs, list) and bool(outputs) and isinstance(outputs[0], dict) and "token_ids" in outputs[0]


def read(records: Iterable[Record], context: Context) -> list[Rollouts]:
    """The rollouts of each prompt; without --dataset its text and ids are those of the file."""
    known = None if context.rows is None else _RowsByIds(context)
    reader = OutputReader(context)
    prompts: dict[int, OfPrompt] = {}
    for where, record in records:
        ids = _ids(where, "prompt_token_ids", record.get("prompt_token_ids"))
        row = _own_row(where, record, ids, context.tokenizer) if known is None else known.of(where, record, ids)
        prompt = prompts.setdefault(row.prompt_id, OfPrompt(replace(row, where=where), ids))
        if prompt.prompt_ids != ids:
            raise UserError(f"{where}: other prompt_token_ids than {prompt.wheres[0]} has for this prompt; give one of the two")
        for number, output in enumerate(_outputs(where, record), start=1):
            prompt.wheres.append(f"{where}, output {number}")
            prompt.continuations.append(reader.continuation(prompt.wheres[-1], output))
    reader.report()
    return [prompt.rollouts() for prompt in prompts.values()]


class _RowsByIds:
    """The rows of --dataset by the token ids of their prompts, and by a prompt that is a string."""

    def __init__(self, context: Context):
        self.by_ids: dict[tuple[int, ...], list[Row]] = {}
        self.by_text: dict[str, list[Row]] = {}
        for row, ids in context.rendered_rows():
            self.by_ids.setdefault(tuple(ids), []).append(row)
            self.by_text.setdefault(context.tokenizer.decode(ids), []).append(row)

    def of(self, where: str, record: Mapping[str, Any], ids: tuple[int, ...] | None) -> Row:
        text = record.get("prompt")
        found = self.by_ids.get(ids, []) if ids is not None else self.by_text.get(text, [])
        if not found:
            same_text = ids is not None and self.by_text.get(text)
            why = "with other token ids" if same_text else f"{str(text)[:60]!r}"
            raise UserError(
                f"{where}: no prompt of --dataset is this one ({why}); give the data that were sampled, with the tokenizer and "
                "chat template of their model"
            )
        if len(found) > 1:
            raise UserError(
                f"{where}: its prompt is that of {len(found)} rows of --dataset ({found[0].where}, {found[1].where}); leave "
                "one of them out"
            )
        return found[0]


class OutputReader:
    """Makes continuations of outputs, and keeps count of the texts that the tokens do not decode to.

    ends: the tokens that may end a continuation; all special ones where they are not known.
    """

    def __init__(self, context: Context, ends: Iterable[int] | None = None):
        self.tokenizer, self.settings = context.tokenizer, context.settings
        self.ends = set(special_tokens(context.tokenizer).values() if ends is None else ends)
        self.texts, self.other = 0, []

    def continuation(self, where: str, output: Mapping[str, Any]) -> Continuation:
        tokens = _ids(where, "token_ids", output.get("token_ids"))
        if not tokens:
            raise UserError(f"{where}: has no token_ids; {FIX}")
        log_probs = _log_probs(where, output.get("logprobs"), tokens)
        ended, stop = self._end(where, output, tokens)
        self._compare_text(where, output.get("text"), tokens)
        found = self._stopped(tokens, ended)
        if found is None and stop is not None:
            raise UserError(f"{where}: ended at the stop string {stop!r}, and its tokens do not hold it; {FIX}")
        if found is None:
            return Continuation(tokens, ended, decode_text(self.tokenizer, tokens[:-1] if ended else tokens), log_probs)
        length, text = found
        return Continuation(tokens[:length], False, text, None if log_probs is None else log_probs[:length])

    def _stopped(self, tokens: tuple[int, ...], ended: bool) -> tuple[int, str] | None:
        """Where --stop ends these tokens by the rule of our own sampler: (number of tokens, text), None where it does not."""
        stops = StopStrings(self.tokenizer, self.settings.stop, tokens[-1:] if ended else (), rows=1)
        stops.look(torch.tensor([tokens]), torch.zeros(1, dtype=torch.bool))
        return stops.found.get(0)

    def _end(self, where: str, output: Mapping[str, Any], tokens: tuple[int, ...]) -> tuple[bool, str | None]:
        """(whether the last token is an end of sequence, the stop string that ended it)."""
        reason, stop, most = output.get("finish_reason"), output.get("stop_reason"), self.settings.max_new_tokens
        if reason == "length":
            if len(tokens) != most:
                raise UserError(f"{where}: cut off after {len(tokens)} tokens, --max_new_tokens is {most}; {LIMIT}")
            return False, None
        if reason != "stop":
            raise UserError(
                f"{where}: its finish_reason is {reason!r}; only outputs that stopped or reached the limit are whole"
            )
        if len(tokens) > most:
            raise UserError(f"{where}: has {len(tokens)} tokens, --max_new_tokens is {most}; {LIMIT}")
        if isinstance(stop, str):
            if stop not in self.settings.stop:
                raise UserError(f"{where}: ended at the stop string {stop!r}, which is none of --stop; add it there")
            return False, stop
        if tokens[-1] not in self.ends:
            raise UserError(f"{where}: stopped at token {tokens[-1]}, which is no end of sequence of the tokenizer of --model")
        return True, None

    def _compare_text(self, where: str, written: Any, tokens: tuple[int, ...]) -> None:
        """Count a text that these tokens do not begin with, with or without special tokens (a stop string is cut off)."""
        if isinstance(written, str) and written:
            self.texts += 1
            possible = (decode_text(self.tokenizer, tokens), self.tokenizer.decode(list(tokens), skip_special_tokens=False))
            if not any(text.startswith(written.rstrip(NO_CHARACTER)) for text in possible):
                self.other.append(where)

    def report(self) -> None:
        """UserError where the texts are not what the tokenizer of --model makes of the tokens."""
        if len(self.other) > (1 - LEAST_SHARE) * self.texts:
            raise UserError(
                f"{self.other[0]}: its text is not what the tokenizer of --model makes of its token_ids, as that of "
                f"{len(self.other)} of {self.texts} is not; give the model that sampled them"
            )


def _own_row(where: str, record: Mapping[str, Any], ids: tuple[int, ...] | None, tokenizer) -> Row:
    """The prompt as the file has it."""
    text = record.get("prompt")
    if text is None and ids is not None:
        text = tokenizer.decode(list(ids))
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: has neither a prompt nor prompt_token_ids; {FIX}")
    return Row(text, None, {"prompt": text}, where, prompt_id(text, None))


def _outputs(where: str, record: Mapping[str, Any]) -> list[dict[str, Any]]:
    outputs = record.get("outputs")
    if not isinstance(outputs, list) or not outputs or not all(isinstance(each, dict) for each in outputs):
        raise UserError(f"{where}: its outputs are {json.dumps(outputs)[:40]}, not a list of objects; {FIX}")
    return outputs


def _ids(where: str, name: str, values: Any) -> tuple[int, ...] | None:
    if values is None:
        return None
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise UserError(f"{where}: its {name} is {json.dumps(values)[:40]}, not a list of token ids; {FIX}")
    return tuple(values)


def _log_probs(where: str, values: Any, tokens: Sequence[int]) -> np.ndarray | None:
    """The log-prob of each token, (len(tokens),) float64; None without."""
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != len(tokens):
        count = len(values) if isinstance(values, list) else "no list of"
        raise UserError(f"{where}: {count} logprobs for {len(tokens)} token_ids; give one for each, or none")
    found = []
    for token, value in zip(tokens, values):
        if isinstance(value, dict):
            value = value.get(str(token))
            value = value.get("logprob") if isinstance(value, dict) else value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise UserError(f"{where}: no finite logprob of token {token}; give SamplingParams a logprobs of 0 or more")
        found.append(float(value))
    return np.array(found)
