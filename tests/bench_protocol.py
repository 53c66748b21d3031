"""The published protocol, written plainly, as bench.py's opponent: fresh groups for every K, three backwards a group.

Per group: K continuations by ``model.generate``, one forward, and for each of the vanilla, GRPO and oracle estimators
one backward whose gradient enters a running float32 mean and M2 of every parameter (Welford).
"""

from __future__ import annotations

import torch

from Gradient_evaluation.sampling.generate import Continuation
from Gradient_evaluation.sampling.law import SamplingLaw
from Gradient_evaluation.sampling.log_probs import log_probs

ESTIMATORS = ("naive", "grpo", "oracleV")


def generate(model, prompt_ids: list[int], count: int, law: SamplingLaw, eos: tuple[int, ...]) -> list[Continuation]:
    """``count`` continuations by transformers' own generate under the same law (texts are left empty)."""
    prompt = torch.tensor([prompt_ids], device=model.device)
    settings = {"do_sample": True, "num_return_sequences": count, "eos_token_id": list(eos), "pad_token_id": eos[0]}
    settings |= {name: getattr(law, name) for name in ("temperature", "top_p", "top_k", "max_new_tokens")}
    out = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **settings)
    found = []
    for row in out[:, len(prompt_ids) :].tolist():
        end = next((i + 1 for i, token in enumerate(row) if token in eos), None)
        found.append(Continuation(tuple(row if end is None else row[:end]), end is not None, ""))
    return found


def batch_log_probs(model, prompt_ids: list[int], continuations: list[Continuation], law: SamplingLaw) -> torch.Tensor:
    """log pi(Y_i | x) (n,) with its graph, by one ordinary padded forward."""
    longest = max(len(c.tokens) for c in continuations)
    rows = [[*prompt_ids, *c.tokens, *[0] * (longest - len(c.tokens))] for c in continuations]
    ids = torch.tensor(rows, device=model.device)
    mask = torch.tensor([[t < len(c.tokens) for t in range(longest)] for c in continuations], device=model.device)
    output = model(input_ids=ids[:, :-1], attention_mask=torch.ones_like(ids[:, :-1]), use_cache=False, logits_to_keep=longest)
    return log_probs(output.logits, ids[:, len(prompt_ids) :], law).masked_fill(~mask, 0.0).sum(1)


def ordinary_pass(model, prompt_ids, continuations, law) -> None:
    """One forward and one backward with gradients for every parameter, which are thrown away."""
    model.requires_grad_(True)
    batch_log_probs(model, prompt_ids, continuations, law).sum().backward()
    model.zero_grad(set_to_none=True)
    model.requires_grad_(False)


class RunningTraces:
    """Mean and M2 of each estimator's gradient over groups, float32, one tensor of each per parameter."""

    def __init__(self, model):
        self.model, self.groups = model, 0
        self.mean = [[torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()] for _ in ESTIMATORS]
        self.squares = [[torch.zeros_like(p, dtype=torch.float32) for p in model.parameters()] for _ in ESTIMATORS]
        self.added: list[list[float]] = []  # what each group added to the total of M2, per estimator

    def add(
        self, prompt_ids, continuations, rewards: torch.Tensor, oracle_value: float, law: SamplingLaw, keep_totals: bool = False
    ) -> None:
        """Take in one group: one forward, three backwards, six parameter-sized statistics."""
        self.model.requires_grad_(True)
        values, size, z = batch_log_probs(self.model, prompt_ids, continuations, law), len(continuations), rewards
        self.groups += 1
        added = []
        for e, baseline in enumerate((torch.zeros_like(z), (z.sum() - z) / (size - 1), oracle_value)):
            ((z - baseline) * values).mean().backward(retain_graph=e < 2)
            added.append(self._update(e, keep_totals))
        self.added.append(added)
        self.model.requires_grad_(False)

    @torch.no_grad()
    def _update(self, e: int, keep_totals: bool) -> float:
        moved = 0.0
        for p, mean, squares in zip(self.model.parameters(), self.mean[e], self.squares[e]):
            delta = p.grad.float() - mean
            mean.add_(delta, alpha=1 / self.groups)
            delta.mul_(p.grad.float() - mean)
            squares.add_(delta)
            moved += float(delta.sum()) if keep_totals else 0.0
            p.grad = None
        return moved
