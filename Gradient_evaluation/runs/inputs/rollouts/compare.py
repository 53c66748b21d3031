"""Are these rollouts of the model that scores them, under the law of the flags? docs/rollouts.md has the comparison.

With the sampler's log-probs, each token's is compared with the scorer's. The rounding of two engines leaves some hundredths
per token; another temperature, log-probs before top_p and top_k (vLLM's default) or another checkpoint leave more.

Without them the model itself says what to expect: under the law that sampled, -log pi of a token has the entropy of its
position as its mean, whatever came before. So the sum of -log pi less entropy, the surprise, is 0 within its standard
error. In the same way the ends of sequence that the model finds unlikely are as many as it expects; more of them are
responses that were cut off.

In both cases a token that top_p or top_k cannot have left, by more than rounding, is one of another law.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.runs.inputs.rollouts.laws import Tokens, likeliest, nearer, outside, scorer, standardised, surprise
from Gradient_evaluation.sampling.generate import Continuation
from Gradient_evaluation.sampling.law import SamplingLaw

EXACT = 1e-4  # mean |difference| per token below which both sides are one law, and no other is tried
ROUNDING = 0.05  # mean |difference| per token that the rounding of two engines may leave
OTHER_MODEL = 0.1  # mean |difference| or |surprise| per token from which another checkpoint sampled
CLEAR = 6.0  # standard errors by which a surprise is clearly not 0
SHARE_OF_LEFT = 0.3  # of so large a difference, below which another law explains it
RARE, CHANCE = 0.01, 1e-6  # an end of sequence less likely than RARE; a chance of so many of them that is none
TRIED, MANY = 128, 1024  # different tokens on which other laws are tried; tokens as drawn on which surprise is judged
POSSIBLE = 3.0  # standard errors of a surprise up to which a law may have sampled
LEAST_EFFECTIVE, LEAST_SHARE = 4, 0.1  # rollouts, and share of them, that importance weights must leave of a prompt
HINT = "pass --allow_mismatch to measure them all the same"


class Comparison:
    """Compares the rollouts of one prompt after the other with the scoring pass.

    gram: entered; law: of the flags; allow_mismatch: what would be an error is a warning, once.
    """

    def __init__(self, gram: ScoreGram, law: SamplingLaw, allow_mismatch: bool = False):
        self.gram, self.law, self.allow_mismatch = gram, law, allow_mismatch
        self.warned, self.surprise = False, np.zeros(3)  # total, variance, tokens
        self.off = np.zeros(2)  # sum of |scorer less sampler|, tokens
        self.tried: list[Tokens] = []  # the first different tokens, on which other laws are tried

    def of_prompt(
        self, prompt_ids: Sequence[int], drawn: Sequence[Continuation], where: str, size: int
    ) -> tuple[dict, np.ndarray | None]:
        """Compare one prompt's rollouts, ``size`` at a time → what its record keeps, and log w (N,), scorer less sampler.

        With log-probs: {"tokens", "mean_difference", "median_difference", "largest_difference" (of |scorer less sampler| per
        token), "effective" (effective sample size of the weights exp(scorer less sampler), as a share)}. Without them:
        {"tokens", "surprise" (the sum), "variance" (of it)}, and None for log w. Raises UserError, naming ``where`` and
        what the rollouts are instead, when they cannot be of this model and law.
        """
        with_log_probs = all(each.log_probs is not None for each in drawn)
        kept, log_weights, error = (self._differences if with_log_probs else self._surprises)(prompt_ids, drawn, where, size)
        if error is not None and not self.allow_mismatch:
            raise error
        if error is not None and not self.warned:
            self.warned = True
            print(f"warning: {str(error).removesuffix('; or ' + HINT)}; going on as --allow_mismatch says", file=sys.stderr)
        return kept, log_weights

    def _differences(self, prompt_ids, drawn, where: str, size: int) -> tuple[dict, np.ndarray, UserError | None]:
        values, cut = [], 0
        for each in self._tokens(prompt_ids, drawn, size):
            values.append(scorer(each, self.law) - each.log_probs)
            cut += outside(each, self.law)
        every = np.abs(np.concatenate(values))
        log_weights = np.array([each.sum() for each in values])
        kept = {
            "tokens": len(every),
            "mean_difference": float(every.mean()),
            "median_difference": float(np.median(every)),
            "largest_difference": float(every.max()),
            "effective": effective_share(log_weights),
        }
        mean, error = kept["mean_difference"], None
        self.off += every.sum(), len(every)
        few = sum(len(each.tokens) for each in self.tried) < TRIED
        if few:
            self.tried += self._different_tokens(prompt_ids, drawn)
        if mean > ROUNDING or (mean > EXACT and few):
            tried = self.tried if few else self._different_tokens(prompt_ids, drawn)
            error = self._other_law(tried, self._drawn_tokens(prompt_ids, drawn), mean, cut, where)
        return kept, log_weights, error or self._cut_off(cut, len(every), where)

    def _surprises(self, prompt_ids, drawn, where: str, size: int) -> tuple[dict, None, UserError | None]:
        found, cut, rare, expected = np.zeros(3), 0, 0, 0.0
        ends = sorted({each.tokens[-1] for each in drawn if each.ended})
        for each in self._tokens(prompt_ids, drawn, size):
            of_token, variance, end = surprise(each, self.law, ends)
            found += of_token.sum(), variance.sum(), len(of_token)
            cut += outside(each, self.law)
            expected += end[end < RARE].sum()
            rare += int(each.ended and end[-1] < RARE)
        kept = {"tokens": int(found[2]), "surprise": float(found[0]), "variance": float(found[1])}
        if (error := self._cut_off(cut, int(found[2]), where)) is not None:
            return kept, None, error
        if rare and poisson_tail(rare, expected) < CHANCE:
            longest = max(len(each.tokens) - 1 for each in drawn if each.ended)
            return (
                kept,
                None,
                UserError(
                    f"{where}: {rare} of its {len(drawn)} responses end where --model goes on ({expected:.2g} are usual), as "
                    f"if cut off; pass the sampler's limit as --max_new_tokens (the longest has {longest} tokens), or {HINT}"
                ),
            )
        self.surprise += found
        total, variance, count = self.surprise
        if abs(total) > max(CLEAR * math.sqrt(variance), OTHER_MODEL * count):
            return kept, None, self._other_sampler(self._drawn_tokens(prompt_ids, drawn), total / count, where)
        return kept, None, None

    def _tokens(self, prompt_ids, drawn: Sequence[Continuation], size: int) -> Iterator[Tokens]:
        """The tokens that count of every continuation, ``size`` of them in a pass."""
        for start in range(0, len(drawn), size):
            part = drawn[start : start + size]
            for row, each in zip(self.gram.logits(prompt_ids, [one.tokens for one in part]), part):
                counts = np.ones(len(each.tokens), dtype=bool) if each.mask is None else np.array(each.mask)
                index = torch.from_numpy(np.flatnonzero(counts)).to(row.device)
                tokens = torch.tensor(each.tokens, device=row.device)[index]
                given = None if each.log_probs is None else np.asarray(each.log_probs, dtype=np.float64)[counts]
                yield Tokens(row[index], tokens, given, each.ended and bool(counts[-1]))

    def _drawn_tokens(self, prompt_ids, drawn: Sequence[Continuation]) -> list[Tokens]:
        """The tokens of the first continuations, as often as they were drawn."""
        lengths = np.cumsum([each.length for each in drawn])
        return list(self._tokens(prompt_ids, drawn[: int(np.searchsorted(lengths, MANY)) + 1], 1))

    def _different_tokens(self, prompt_ids, drawn: Sequence[Continuation]) -> list[Tokens]:
        """Tokens that differ or stand in other contexts: the same first token of many continuations counts once."""
        found, count, seen = [], 0, set()
        for each, one in zip(self._tokens(prompt_ids, drawn, 1), drawn):
            ids = [i for i in range(len(one.tokens)) if one.mask is None or one.mask[i]]
            new = [n for n, i in enumerate(ids) if one.tokens[: i + 1] not in seen]
            seen.update(one.tokens[: i + 1] for i in range(len(one.tokens)))
            if new:
                index = torch.tensor(new, device=each.tokens.device)
                given = None if each.log_probs is None else each.log_probs[new]
                found.append(Tokens(each.logits[index], each.tokens[index], given, each.ended))
            count += len(new)
            if count >= TRIED:
                break
        return found

    def _other_law(self, tried, as_drawn: list[Tokens], mean: float, cut: int, where: str) -> UserError | None:
        """The error that says what the log-probs are; None where rounding explains what they are off."""
        law, (other, least, clear) = self.law, nearer(tried, self.law)
        about = f"{where}: the log-probs of its rollouts are {mean:.2g} per token off those of --model"
        if clear or (mean > OTHER_MODEL and least < SHARE_OF_LEFT * mean):
            about = f"{about} under these flags, and {least:.2g} off {flags_of(other)}"
            raw = " (vLLM's default, logprobs_mode raw_logprobs)" if other.temperature == 1.0 else ""
            before = f"taken before the law{raw}: sample with processed_logprobs"
            whole = other.top_p == 1.0 and not other.top_k and other.temperature in (1.0, law.temperature)
            by_stated = whole and not cut and abs(standardised(as_drawn, law)) <= POSSIBLE
            by_other = other.temperature != law.temperature and abs(standardised(as_drawn, other)) <= POSSIBLE
            if by_stated and not by_other:  # the tokens are of the law that is stated, their log-probs are not
                return UserError(f"{about}: they were {before}, or {HINT}")
            either = f", or they were {before}" if by_stated else ""
            return UserError(f"{about}: they were sampled so, and these flags are to be passed{either}; or {HINT}")
        overall = self.off[0] / self.off[1]
        if overall > OTHER_MODEL:
            about = f"{where}: the log-probs of the rollouts so far are {overall:.2g} per token off those of --model"
            return UserError(
                f"{about}, and at no temperature nearer: another checkpoint sampled them (rounding leaves {ROUNDING:g}); give "
                f"that one, or {HINT}"
            )
        return None

    def _other_sampler(self, as_drawn: list[Tokens], by: float, where: str) -> UserError:
        kind, fitting = ("less" if by > 0 else "more"), likeliest(as_drawn, self.law)
        about = f"{where}: its rollouts are {kind} likely than --model samples them, by {abs(by):.2g} per token"
        if abs(standardised(as_drawn, fitting)) <= POSSIBLE:
            return UserError(
                f"{about}, and as likely as it would at temperature {fitting.temperature:.2g}; pass the sampler's "
                f"--temperature, its checkpoint if it had another, or {HINT}"
            )
        return UserError(f"{about}, and at no temperature as likely: another checkpoint sampled them; give that one, or {HINT}")

    def _cut_off(self, cut: int, count: int, where: str) -> UserError | None:
        if cut < max(2, 0.002 * count):
            return None
        return UserError(
            f"{where}: {cut} of the {count} tokens of its rollouts cannot come from {flags_of(self.law)}; pass the sampler's "
            f"law (VERL and TRL cut nothing off by default: --top_p 1 --top_k 0), or {HINT}"
        )


def flags_of(law: SamplingLaw) -> str:
    """A law as typed."""
    return f"--temperature {law.temperature:.3g} --top_p {law.top_p:g} --top_k {law.top_k}"


def effective_share(log_weights: np.ndarray) -> float:
    """The effective sample size (sum w)^2 / sum w^2 of the weights exp(log_weights) (n,), over n."""
    w = np.exp(log_weights - log_weights.max())
    return float(w.sum() ** 2 / (w**2).sum() / len(w))


def importance_weights(log_weights: np.ndarray | None, where: str) -> np.ndarray:
    """``log_weights`` (N,) of a prompt's rollouts, as ``Comparison.of_prompt`` gives them, where they can be used.

    Raises UserError where a rollout has no log-probs, or the weights leave too few rollouts.
    """
    if log_weights is None:
        raise UserError(f"{where}: --importance_weights needs the sampler's log-probs, which these rollouts lack; leave it out")
    share = effective_share(log_weights)
    if share < LEAST_SHARE or share * len(log_weights) < LEAST_EFFECTIVE:
        raise UserError(
            f"{where}: importance weights leave {share * len(log_weights):.3g} of its {len(log_weights)} rollouts "
            f"(effective sample size); at least {LEAST_EFFECTIVE} and a share of {LEAST_SHARE:g} are needed: sample nearer to "
            "--model, or leave --importance_weights out"
        )
    return log_weights


def poisson_tail(count: int, mean: float) -> float:
    """An upper bound of P(N >= count) of a Poisson variable: e^-mean (e mean / count)^count for count > mean, else 1."""
    if count <= mean:
        return 1.0
    return math.exp(count - mean + count * math.log(max(mean, 1e-300) / count))
