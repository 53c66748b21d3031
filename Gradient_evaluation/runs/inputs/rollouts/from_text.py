"""Rollouts that a trainer stored as text: prompts found again in --dataset, tokens made again from the text.

A trainer that stores decoded text drops the special tokens, the end of sequence among them, the log-probs, and how the
model cut the text into tokens. The tokens made again are those of the tokenizer's own cut. Two shares say how often that
is right: of the texts that come back from their tokens (``FromText``, here), and of the model's own draws whose tokens
come back from their text (``retokenised_share``, once the model is loaded).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import Row
from Gradient_evaluation.runs.inputs.prompts import sampling_law
from Gradient_evaluation.runs.inputs.rewards import RESCALE
from Gradient_evaluation.runs.inputs.rollouts.context import Context
from Gradient_evaluation.sampling.generate import Continuation, eos_token_ids, sample_continuations
from Gradient_evaluation.sampling.law import uniforms
from Gradient_evaluation.sampling.rollouts import Rollouts
from Gradient_evaluation.settings import Settings

LEAST_SHARE = 0.95  # of the texts that must come back from their tokens; below it the rollouts are refused
LEAST_OWN_SHARE = 0.9  # of the model's own draws whose tokens must come back from their text
DRAWS, PROMPTS = 16, 4  # on which that is measured


def decoded_prompts(context: Context, needed_by: str) -> dict[str, list[Row]]:
    """{prompt as a trainer's decoding leaves it, without special tokens: the rows of --dataset with it}.

    needed_by: the format, for the message where there is no --dataset.
    """
    if context.rows is None:
        raise UserError(f"--rollouts: {needed_by} lacks the special tokens of its prompts; give --dataset, the data of the run")
    found: dict[str, list[Row]] = {}
    for row, ids in context.rendered_rows():
        found.setdefault(context.tokenizer.decode(ids, skip_special_tokens=True), []).append(row)
    return found


class FromText:
    """Makes continuations of texts, and keeps count of what is lost.

    name: of the program that stored them; limit: what it calls the largest number of new tokens. Raises UserError where
    text cannot say what was sampled: stop strings, a tokenizer without an end of sequence.
    """

    def __init__(self, name: str, limit: str, context: Context):
        self.name, self.limit, self.tokenizer = name, limit, context.tokenizer
        self.most, self.eos = context.settings.max_new_tokens, context.tokenizer.eos_token_id
        self.first, self.texts, self.truncated, self.inexact = "", 0, 0, ""
        self.exact = 0
        if context.settings.stop:
            raise UserError(f"--stop: the text that {name} stores does not say where a stop string ended it; leave it out")
        if self.eos is None:
            raise UserError(f"--model: its tokenizer names no end of sequence, which the text that {name} stores has lost")

    def continuation(self, where: str, text: Any) -> Continuation:
        """The tokens of a text: an end of sequence is put back where fewer than --max_new_tokens are there."""
        if not isinstance(text, str):
            raise UserError(f"{where}: its response is of type {type(text).__name__}, not text")
        self.first = self.first or where
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(ids) > self.most:
            raise UserError(
                f"{where}: its response has {len(ids)} tokens, --max_new_tokens is {self.most}; give the {self.limit} of the "
                "training, and the tokenizer of its model"
            )
        self.texts += 1
        if self.tokenizer.decode(ids, skip_special_tokens=True) == text and "\ufffd" not in text:
            self.exact += 1
        else:
            self.inexact = self.inexact or where
        ended = len(ids) < self.most
        self.truncated += not ended
        return Continuation(tuple([*ids, self.eos] if ended else ids), ended, text)

    def report(self) -> None:
        """Say in one line what is lost. UserError where fewer than LEAST_SHARE of the texts come back from their tokens."""
        if self.exact < LEAST_SHARE * self.texts:
            raise UserError(
                f"{self.inexact}: this response does not come back from the tokens that the tokenizer of --model makes of it, "
                f"as {self.texts - self.exact} of {self.texts} do not (at most {1 - LEAST_SHARE:.0%} may); give the model that "
                "sampled them, or rollouts with token ids"
            )
        eos = self.tokenizer.convert_ids_to_tokens(self.eos)
        print(
            f"note: {self.name} stores text: lost are the model's own cut into tokens, special tokens, the end of sequence, "
            f"log-probs, and which tokens are a tool's. {self.exact} of {self.texts} texts come back from their tokens; "
            f"{self.truncated} reach --max_new_tokens {self.most} and count as cut off, the others are taken to end with {eos}",
            file=sys.stderr,
        )


def retokenised_share(
    model, tokenizer, prompts: Sequence[tuple[int, Sequence[int]]], stored: Mapping[int, Rollouts], settings: Settings
) -> dict[str, float]:
    """{"retokenised": the share of the model's own draws whose tokens come back from their text}; {} without such rollouts.

    prompts: (id, token ids) of each. DRAWS continuations of the first PROMPTS whose rollouts were stored as text are drawn
    under the law of the flags, and used for nothing else. UserError below LEAST_OWN_SHARE: of a file of text, as many rollouts
    would get the score of other tokens than were sampled.
    """
    prompts = [each for each in prompts if stored[each[0]].from_text][:PROMPTS]
    if not prompts:
        return {}
    law, eos, same = sampling_law(settings), eos_token_ids(model, tokenizer), []
    for prompt_id, ids in prompts:
        u = uniforms(settings.seed, "retokenised", prompt_id, 0, DRAWS, law.max_new_tokens)
        for each in sample_continuations(model, tokenizer, ids, u, law, DRAWS):
            tokens = each.tokens[:-1] if each.ended and each.tokens[-1] in eos else each.tokens
            same.append(list(tokens) == list(tokenizer(each.text, add_special_tokens=False)["input_ids"]))
    share = sum(same) / len(same)
    if share < LEAST_OWN_SHARE:
        raise UserError(
            f"{stored[prompts[0][0]].where(0)}: of {len(same)} texts that --model samples itself only {share:.0%} come back as "
            f"the tokens they were, {LEAST_OWN_SHARE:.0%} are needed: rollouts stored as text would be scored as other tokens; "
            "give rollouts with token ids"
        )
    return {"retokenised": share}


def check_one_step(name: str, steps: Sequence[int | None], wheres: Sequence[str], allow_mismatch: bool) -> None:
    """Raise UserError for rollouts of several training steps: each was sampled by other weights."""
    other = next((i for i, step in enumerate(steps) if step != steps[0]), None)
    if other is not None and not allow_mismatch:
        raise UserError(
            f"{wheres[other]}: of training step {steps[other]}, and {wheres[0]} of {steps[0]}: other weights sampled them "
            f"({name}'s step s has those after step s-1); give the files of one step with its checkpoint, or --allow_mismatch"
        )


def number_of(where: str, name: str, value: Any) -> float:
    """A reward as a float, NaN where it is null. UserError for what is no number."""
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UserError(f"{where}: its {name} is {str(value)[:40]!r}, not a number")
    try:
        return float(value)
    except OverflowError:
        raise UserError(f"{where}: its {name} is a whole number beyond 1e308; {RESCALE}") from None
