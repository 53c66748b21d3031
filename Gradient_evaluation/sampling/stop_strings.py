"""Stop strings: a continuation ends with the token that completes one, and its text ends before it.

What ends a row is decided once, at the token that completes the string, and kept: a later token can change the text
before it (bytes that are no UTF-8 together), and what is decoded after the end is filler.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from Gradient_evaluation.errors import UserError

MARGIN = 16  # tokens decoded beyond those a stop string can span
NO_CHARACTER = "\ufffd"


def decode_text(tokenizer, tokens: Sequence[int]) -> str:
    """The text of token ids without special tokens, spaces as they are."""
    return tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def special_tokens(tokenizer) -> dict[str, int]:
    """{text: id} of the tokens that a decoded text leaves out."""
    added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids))


def stop_token_ids(tokenizer, stop: Sequence[str]) -> tuple[int, ...]:
    """The ids of those ``stop`` that are a special token: no text holds one, so the token itself ends a continuation."""
    special = special_tokens(tokenizer) if stop else {}
    return tuple(special[string] for string in stop if string in special)


def check_stop_strings(tokenizer, stop: Sequence[str]) -> None:
    """Raise UserError for a stop string that holds a special token among other text: it would never be found."""
    special = special_tokens(tokenizer) if stop else {}
    for string in stop:
        inside = [token for token in special if token and token in string]
        if inside and string not in special:
            token = max(inside, key=len)
            raise UserError(
                f"--stop {string!r}: {token} is a special token of the tokenizer, which the text never shows; "
                f"give --stop {token!r} alone"
            )


class StopStrings:
    """Finds, for the rows of one batch, the token that completes a stop string.

    found: {row: (number of tokens, text before the stop string)} of the rows that a stop string has ended.
    """

    def __init__(self, tokenizer, stop: Sequence[str], eos: Sequence[int], rows: int):
        special = special_tokens(tokenizer) if stop else {}
        self.tokenizer, self.eos, self.silent = tokenizer, frozenset(eos), frozenset(special.values())
        self.stop = tuple(string for string in stop if string not in special)
        self.going = list(range(rows)) if self.stop else []
        # A token gives at least one byte of text, or is left out here; a few may give none.
        self.span = max((len(string.encode()) for string in self.stop), default=0) + MARGIN
        self.looked_at = 0
        self.found: dict[int, tuple[int, str]] = {}

    def look(self, tokens: torch.Tensor, ended: torch.Tensor) -> None:
        """Look at the tokens (rows, length) drawn since the last look, and set ``ended`` (rows,) where one stops."""
        if self.going:
            part = tokens if len(self.going) == len(tokens) else tokens[torch.tensor(self.going, device=tokens.device)]
            before = len(self.found)
            self.going = [row for row, ids in zip(self.going, part.tolist()) if self._goes_on(row, ids)]
            if len(self.found) > before:
                ended[torch.tensor(list(self.found)[before:], device=ended.device)] = True
        self.looked_at = tokens.shape[1]

    def _goes_on(self, row: int, ids: list[int]) -> bool:
        """Every length since the last look in turn, so that how often one looks changes nothing."""
        for length in range(self.looked_at + 1, len(ids) + 1):
            if ids[length - 1] in self.eos:
                return False
            if self._may_stop(ids[:length]):
                text = decode_text(self.tokenizer, ids[:length])
                starts = [text.find(string) for string in self.stop if string in text]
                if starts:
                    self.found[row] = length, text[: min(starts)]
                    return False
        return True

    def _may_stop(self, ids: list[int]) -> bool:
        """Whether the text of the last tokens holds a stop string, or does not say because it begins inside a character."""
        tail = []
        for token in reversed(ids):
            if token not in self.silent:
                tail.append(token)
            if len(tail) == self.span:
                break
        text = decode_text(self.tokenizer, tail[::-1])
        return NO_CHARACTER in text or any(string in text for string in self.stop)
