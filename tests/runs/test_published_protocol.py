"""The Gram results agree with the published protocol run by brute force: fresh groups, three backwards per group."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scripts import ROOT

from data.make_arithmetic import make_problems
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.models import load_model, load_tokenizer
from Gradient_evaluation.runs.measure import scored
from Gradient_evaluation.sampling.generate import sample_continuations
from Gradient_evaluation.sampling.law import SamplingLaw, uniforms
from Gradient_evaluation.sampling.log_probs import log_probs
from Gradient_evaluation.stats import summary as estimators
from Gradient_evaluation.utils import format_prompt, integer_reward

LAW = SamplingLaw(top_p=0.95, max_new_tokens=32)
V = 0.5  # any fixed number is an oracle value as good as another for this comparison


def published_protocol(model, prompt_ids, groups, rewards, scoring):
    """trace(Cov) of (naive, grpo, oracleV) and its standard error, from running means and M2 of every parameter."""
    parameters = [p.requires_grad_(True) for p in model.parameters()]
    law = LAW if scoring == "exact" else SamplingLaw()
    mean = [[torch.zeros_like(p) for p in parameters] for _ in range(3)]
    squares = [[] for _ in range(3)]
    for n, (group, z) in enumerate(zip(groups, rewards), 1):
        scores = []
        for c in group:
            tokens = c.tokens[:-1] if c.ended and scoring == "published" else c.tokens
            logits = model(input_ids=torch.tensor([[*prompt_ids, *c.tokens]])).logits[0, len(prompt_ids) - 1 :]
            scores.append(log_probs(logits[: len(tokens)], torch.tensor(tokens, dtype=torch.int64), law).sum())
        z = torch.tensor(z, dtype=torch.float32)
        for e, baseline in enumerate((0.0, (z.sum() - z) / (len(z) - 1), V)):
            loss = (torch.stack(scores) * (z - baseline)).mean()
            gradients = torch.autograd.grad(loss, parameters, retain_graph=True)
            moved = 0.0
            for m, g in zip(mean[e], gradients):  # Welford: M2 grows by (g - old mean) (g - new mean)
                delta = g - m
                m += delta / n
                moved += float((delta * (g - m)).sum())
            squares[e].append(moved)
    squares = np.array(squares)
    return squares.sum(1) / (len(groups) - 1), squares.std(axis=1, ddof=1) / np.sqrt(len(groups))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("scoring", ["exact", "published"])
def test_gram_results_are_those_of_the_published_protocol(scoring, number):
    """Within Monte-Carlo error, for each of three prompts."""
    folder, repeats = str(ROOT / "data" / "tiny_model"), 120
    tokenizer, problem = load_tokenizer(folder, None), make_problems(3, 0)[number]
    model = load_model(folder, None, torch.device("cpu"), torch.float32)
    prompt_ids = format_prompt(tokenizer, problem["prompt"])

    def draw(purpose, count):
        u = uniforms(0, purpose, number, 0, count, LAW.max_new_tokens)
        drawn = sample_continuations(model, tokenizer, prompt_ids, u, LAW, 512)
        return drawn, np.array([integer_reward(c.text, problem["ground_truth"]) for c in drawn])

    blocks = []
    with ScoreGram(model, partial(log_probs, law=LAW if scoring == "exact" else SamplingLaw())) as grams:
        for b in range(12):
            drawn, z = draw(f"block {b}", 64)
            gram = grams.block(prompt_ids, *scored(drawn, scoring)).gram
            blocks.append((gram, z, np.array([len(c.tokens) for c in drawn])))
    records = [SimpleNamespace(oracle_value=V, blocks=[block], prompt_id=0) for block in blocks]
    for K in (4, 8):
        drawn, z = draw(f"groups of {K}", repeats * K)
        groups = [drawn[i : i + K] for i in range(0, len(drawn), K)]
        truth, error = published_protocol(model, prompt_ids, groups, z.reshape(-1, K), scoring)
        found = [estimators.prompt_trace_covs(estimators.reduce_prompts([record]), K) for record in records]
        per_block = np.array([[traces[name][0] for name in ("naive", "grpo", "oracleV")] for traces in found])
        spread = per_block.std(axis=0, ddof=1) / np.sqrt(len(blocks))
        assert (np.abs(per_block.mean(0) - truth) < 4 * np.hypot(error, spread)).all(), K
