"""The checks before a run's first prompt: are sampler and scorer one law, and is the score Gram that of a backward pass?

``check_sampler``: decoding with a cache and scoring whole sequences are two computations of one log pi(Y | x). Where they
differ (other positions, another RoPE factor, another mask), the score is not that of what was sampled. Neither the
self-audit, which shares the scoring pass, nor the on-policy check, which is weak on a few prompts, sees it. So the
log-probs of the draws are compared with those of the scoring pass, token by token.

At every token the sampler gave log pi and m, the log of the share of probability that top_k and top_p left. Their sum,
the log-softmax at the temperature, has no edge: both sides must agree in it to rounding. m has one: a token within
rounding of the edge may be kept on one side and not on the other, and both are right. So m of the sampler may lie
anywhere between its least and its largest value when every logit of the scoring pass is off by the dtype's ``slack``;
what it is beyond counts as difference.

``self_audit``: ScoreGram.audit, parameter by parameter.

Rounding in half precision hides much: decoding one position further went unseen in bfloat16, and so would a rule of the
Gram that is some percent off. So both checks of a half-precision model run in float32 (``in_float32``), and in the model's
own dtype only where that does not fit or run.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.forward import is_out_of_memory
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.runs.machine.memory import release_memory
from Gradient_evaluation.sampling.generate import Continuation
from Gradient_evaluation.sampling.law import SamplingLaw, kept_tokens
from Gradient_evaluation.sampling.log_probs import log_probs

SHORT = 10  # tokens; a shorter continuation is allowed as much
HALF = (torch.float16, torch.bfloat16)


class Tolerance(NamedTuple):
    """What rounding may do to log pi; see ``tolerance_of``.

    per_token: for a sum over n tokens this times n, or where ``independent`` this times sqrt(n); slack: what a single
    logit may be off by, for the edge of the nucleus.
    """

    per_token: float
    slack: float
    independent: bool = False

    def share(self, found: Sequence[np.ndarray]) -> np.ndarray:
        """Each continuation's summed difference over what its length allows: (continuations,), at most 1 where it is right.

        The shortest are allowed what SHORT tokens are. Independent errors also average out over continuations: where the
        root mean square of sum / sqrt(n) is beyond a third of per_token, the largest counts as wrong too.
        """
        sums = np.array([abs(float(each.sum())) for each in found])
        lengths = np.array([len(each) for each in found], dtype=float)
        if not self.independent:
            return sums / (self.per_token * np.maximum(lengths, SHORT))
        shares = sums / (self.per_token * np.sqrt(np.maximum(lengths, SHORT)))
        overall = math.sqrt(float((sums**2).sum() / lengths.sum())) / (self.per_token / 3)
        return np.where(shares == shares.max(), np.maximum(shares, overall), shares)


def tolerance_of(model: torch.nn.Module) -> Tolerance:
    """From the coarsest dtype of the model's weights.

    float32, and float64 too, as some models compute norms in float32 whatever their dtype: 1e-5 per token, ten times what
    right models of thirty families show. Half precision: logits of size 8 to 16 are rounded in steps of 8 eps, and the
    layers before add as much again. The errors of two tokens are independent, so their sum grows with the square root of
    the length: right models show a root mean square of 4 eps per token and sums up to 12 eps sqrt(n); 32 eps are allowed.
    """
    eps = max(torch.finfo(p.dtype).eps for p in model.parameters() if p.dtype.is_floating_point)
    if eps < 1e-6:
        return Tolerance(1e-5, 1e-5)
    eps = min(eps, torch.finfo(torch.bfloat16).eps)  # weights of 8 bits are multiplied in bfloat16
    return Tolerance(32 * eps, 8 * eps, independent=True)


def possible_log_kept(logits: torch.Tensor, tokens: torch.Tensor, law: SamplingLaw, slack: float) -> tuple[torch.Tensor, ...]:
    """(least, largest) log of the share that top_k and top_p leave when every logit may be off by ``slack``.

    logits: (n, vocabulary) by the temperature; tokens: (n,), which are always kept. With logits off by s, a sum of
    probabilities is off by a factor of at most e^(2s). Let e be the least logit of the nucleus of top_p e^(-2s): a token
    with a logit above e + 2s stays, for what comes before it lies above e, less than top_p in all. Likewise a token more
    than 2s below the nucleus of top_p e^(2s) goes. The same holds for the k-th logit of top_k.
    """
    log_total, ends = logits.logsumexp(-1), []
    for off in (-2 * slack, 2 * slack):
        kept = torch.ones_like(logits, dtype=torch.bool)
        if 0 < law.top_k < logits.shape[-1]:
            kept = logits >= torch.topk(logits, law.top_k, dim=-1).values[..., -1:] - off
        if (top_p := law.top_p * math.exp(off)) < 1.0:
            left = logits.masked_fill(~kept, -torch.inf)
            nucleus = kept & kept_tokens(left, SamplingLaw(top_p=top_p))
            kept &= logits >= logits.masked_fill(~nucleus, torch.inf).amin(-1, keepdim=True) - off
        kept.scatter_(-1, tokens.unsqueeze(-1), True)
        ends.append(logits.masked_fill(~kept, -torch.inf).logsumexp(-1) - log_total)
    return tuple(ends)


def differences(
    gram: ScoreGram, law: SamplingLaw, prompt_ids: Sequence[int], continuations: Sequence[Continuation]
) -> list[np.ndarray]:
    """Per continuation, log pi of the sampler less that of the scoring pass at each token (length,), float64.

    law: the one that was sampled, whatever ``--scoring`` says. What rounding at the edge of the nucleus explains is
    taken off.
    """
    logits = gram.logits(prompt_ids, [drawn.tokens for drawn in continuations])
    slack = tolerance_of(gram.model).slack
    found = []
    for row, drawn in zip(logits, continuations):
        row, tokens = row[: len(drawn.tokens)], torch.tensor(drawn.tokens, device=row.device)
        whole = log_probs(row, tokens, replace(law, top_k=0, top_p=1.0)).double()
        value = log_probs(row, tokens, law).double()
        log_pi, log_kept = (torch.from_numpy(x).to(value) for x in (drawn.log_probs, drawn.log_kept))
        divided = row.to(torch.promote_types(row.dtype, torch.float32)) / law.temperature
        exact = whole - value  # that of the scoring pass itself
        least, largest = (end.double() for end in possible_log_kept(divided, tokens, law, slack))
        nearest = log_kept.clamp(torch.minimum(least, exact), torch.maximum(largest, exact))
        found.append(((log_pi + log_kept - whole) - (log_kept - nearest)).cpu().numpy())
    return found


def check_block(
    gram: ScoreGram, law: SamplingLaw, prompt_ids: Sequence[int], drawn: Sequence[Continuation], scored: np.ndarray, where: str
) -> None:
    """``check_sampler`` of a block whose ``scored`` log-probs (B,) the Gram's own pass has given, so that it costs nothing.

    A model can be one law on the first prompt and not on a longer one. Sums are compared; where one is beyond its
    tolerance, which the edge of a nucleus can do too, the tokens are compared in another pass, and that decides.
    """
    sums = [np.zeros(len(each.tokens)) for each in drawn]
    for each, value, found in zip(drawn, scored, sums):
        found[0] = float(each.log_probs.sum(dtype=np.float64)) - value
    if tolerance_of(gram.model).share(sums).max() > 1:
        check_sampler(gram, law, prompt_ids, drawn, where)


def check_sampler(
    gram: ScoreGram, law: SamplingLaw, prompt_ids: Sequence[int], continuations: Sequence[Continuation], where: str
) -> dict:
    """Compare the log-probs that the draws of ``law`` came with, with those of the scoring pass → what the results keep:

    {"continuations", "tokens", "median_difference" and "largest_difference" per token, "largest_sum": of a continuation,
    "tolerance": per token, or per square root of the tokens in half precision}. Raises UserError, naming ``where`` and
    the continuation and token of the largest difference, when a continuation's sum is beyond its tolerance.
    """
    found, tolerance = differences(gram, law, prompt_ids, continuations), tolerance_of(gram.model)
    shares = tolerance.share(found)
    worst = int(np.argmax(shares))
    if not shares[worst] <= 1:
        each = found[worst]
        token = int(np.abs(each).argmax())
        raise UserError(
            f"{where}: the sampler and the scoring pass are not one law: log pi of continuation {worst} differs by "
            f"{abs(each.sum()):.2g} over its {len(each)} tokens, {shares[worst]:.2g} times what rounding may do, most at token "
            f"{token + 1} ({abs(each[token]):.2g}); decoding with a cache and the forward pass of {type(gram.model).__name__} "
            "disagree: try --dtype float32, another version of transformers, or another model"
        )
    every = np.abs(np.concatenate(found))
    return {
        "continuations": len(found),
        "tokens": len(every),
        "median_difference": float(np.median(every)),
        "largest_difference": float(every.max()),
        "largest_sum": max(abs(float(each.sum())) for each in found),
        "tolerance": tolerance.per_token,
    }


def self_audit(gram: ScoreGram, prompt_ids: Sequence[int], continuations: Sequence[Sequence[int]], masks=None) -> dict:
    """ScoreGram.audit, of a half-precision model in float32 where that fits and runs."""
    return in_float32(gram.model, lambda: gram.audit(prompt_ids, continuations, masks), "the self-audit")


def in_float32(model: torch.nn.Module, check: Callable[[], dict], name: str) -> dict:
    """``check()`` with a half-precision model in float32; in its own dtype, and said so, where that does not fit or run.

    name: of the check, for the message.
    """
    own = {p.dtype for p in model.parameters() if p.dtype in HALF}
    if own:
        try:
            with widened(model):
                return check()
        except (RuntimeError, MemoryError, TypeError) as error:
            why = "out of memory" if is_out_of_memory(error) else str(error).strip().split("\n")[0]
        # Outside the handler, whose traceback keeps the tensors of the attempt alive.
        release_memory()
        coarsest = str(max(own, key=lambda dtype: torch.finfo(dtype).eps)).split(".")[-1]
        print(
            f"note: {name} does not run in float32 ({why}); it goes on in {coarsest}, whose rounding hides small faults",
            file=sys.stderr,
        )
    return check()


@contextmanager
def widened(model: torch.nn.Module) -> Iterator[None]:
    """While inside, the model's half-precision parameters and buffers are float32; afterwards they are as before.

    Parameters are widened in place, one at a time, so that there is never a second copy of the model. Every
    half-precision number is one of float32, so narrowing gives the same values back. Buffers are put back themselves.
    """
    parameters, buffers = [], []
    try:
        for module in model.modules():
            for name, x in module.named_buffers(recurse=False):
                if x.dtype in HALF:
                    buffers.append((module, name, x))
                    module._buffers[name] = x.float()
        for p in model.parameters():
            if p.dtype in HALF:
                parameters.append((p, p.dtype))
                p.data = p.data.float()
        yield
    finally:
        for p, dtype in parameters:
            p.data = p.data.to(dtype)
        for module, name, x in buffers:
            module._buffers[name] = x
