"""Policies small enough to enumerate, one random model of every family, and the plain truth about both.

The truth here uses nothing of the toolkit: transformers' own logits processors for the law, one autograd pass
per sample for the scores.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

PROMPT = [1, 3, 2]  # of an enumerable policy
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma", "gemma2", "gemma3_text", "olmo2", "gpt_neox", "phi3")


def tiny_model(family: str, dtype=torch.float64, seed: int = 0, **settings):
    """A random model of a family, float64 by default, every parameter moved off its initial value."""
    shape = dict(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    if family == "gpt2":
        shape = dict(vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
    if family == "gpt_neox":
        del shape["num_key_value_heads"]
    if family in ("gemma2", "gemma3_text"):
        shape["sliding_window"] = 4
    config = AutoConfig.for_model(family, **{**shape, **settings})
    config._experts_implementation = "eager"  # the grouped product of the default takes no float64
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


@contextlib.contextmanager
def float_means_double():
    """While inside, what asks for float32 gets float64. Also a decorator.

    Norms, rotary embeddings and softmaxes of many models compute in float32 whatever their dtype. Their rounding, 1e-7,
    depends on the processor and on the shape of the batch; a proof in float64 must be free of it.
    """

    def wider(function):
        def call(*args, **kwargs):
            args = [torch.float64 if x is torch.float32 else x for x in args]
            return function(*args, **{name: torch.float64 if x is torch.float32 else x for name, x in kwargs.items()})

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        patch.setattr(torch.Tensor, "to", wider(torch.Tensor.to))
        patch.setattr(torch.nn.functional, "softmax", wider(torch.nn.functional.softmax))
        yield


def tiny_tokenizer(words=("<eos>", "1", "2", "3", "-")) -> PreTrainedTokenizerFast:
    """One token per word, decoded without spaces; the first is the end of sequence (and the pad)."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=words[0], pad_token=words[0])


def enumerable_policy(seed: int = 0, vocabulary: int = 5, tied: bool = True):
    """A GPT-2 (float64 throughout) over ``vocabulary`` tokens, peaked enough that top_p and top_k cut; EOS = 0."""
    model = tiny_model(
        "gpt2",
        seed=seed,
        vocab_size=vocabulary,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=0,
        tie_word_embeddings=tied,
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(3.0)
    model.generation_config.eos_token_id = 0
    return model


class Outcome(NamedTuple):
    tokens: tuple[int, ...]
    ended: bool
    probability: float
    score: torch.Tensor  # (number of parameters,) float64


def law_log_probs(logits: torch.Tensor, law) -> torch.Tensor:
    """Log-probs (1, vocabulary) by transformers' own processors, in the order of its generate."""
    scores = TemperatureLogitsWarper(law.temperature)(None, logits)
    if law.top_k:
        scores = TopKLogitsWarper(law.top_k)(None, scores)
    if law.top_p < 1:
        scores = TopPLogitsWarper(law.top_p)(None, scores)
    return scores.log_softmax(-1)


def enumerate_outcomes(model, prompt_ids, law, eos=(0,)) -> list[Outcome]:
    """Every continuation with its probability and score under the law."""
    parameters = list(model.parameters())
    outcomes = []

    def grow(tokens: tuple[int, ...], log_prob: torch.Tensor) -> None:
        ended = bool(tokens) and tokens[-1] in eos
        if ended or len(tokens) == law.max_new_tokens:
            score = torch.autograd.grad(log_prob, parameters, retain_graph=True, allow_unused=True, materialize_grads=True)
            outcomes.append(Outcome(tokens, ended, float(log_prob.detach().exp()), torch.cat([g.flatten() for g in score])))
            return
        logits = model(input_ids=torch.tensor([[*prompt_ids, *tokens]])).logits[:, -1]
        step = law_log_probs(logits, law)[0]
        for token in range(len(step)):
            if step[token] > -torch.inf:
                grow((*tokens, token), log_prob + step[token])

    for p in parameters:
        p.requires_grad_(True)
    with torch.enable_grad():
        grow((), torch.zeros((), dtype=torch.float64))
    return outcomes


def per_sample_scores(model, prompt_ids, continuations, law) -> torch.Tensor:
    """Scores (n, number of parameters) by one autograd pass per continuation, without padding."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for continuation in continuations:
        with torch.enable_grad():
            logits = model(input_ids=torch.tensor([[*prompt_ids, *continuation.tokens]])).logits[0]
            total = 0.0
            for i, token in enumerate(continuation.tokens):
                total = total + law_log_probs(logits[None, len(prompt_ids) - 1 + i], law)[0, token]
            gradients = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(rows)


def random_continuations(seed: int, lengths, vocabulary: int = 40):
    """Continuations of the given lengths with random tokens (none is an end of sequence)."""
    from Gradient_evaluation.sampling.generate import Continuation

    rng = np.random.default_rng(seed)
    return [Continuation(tuple(int(t) for t in rng.integers(3, vocabulary, n)), False, "") for n in lengths]


def draw(model, law, n, seed=0, batch_size=64, prompt=PROMPT, tokenizer=None):
    """``n`` continuations as the oracle script draws them."""
    from Gradient_evaluation.sampling.generate import sample_continuations
    from Gradient_evaluation.sampling.law import uniforms

    u = uniforms(seed, "oracle", 7, 0, n, law.max_new_tokens)
    return sample_continuations(model, tokenizer or tiny_tokenizer(), prompt, u, law, batch_size)


def frequencies_agree(drawn, outcomes) -> None:
    """Every outcome's frequency lies within 4.5 standard errors of its probability, none is impossible."""
    n, counts = len(drawn), Counter(continuation.tokens for continuation in drawn)
    assert set(counts) <= {outcome.tokens for outcome in outcomes}
    for outcome in outcomes:
        error = np.sqrt(outcome.probability * (1 - outcome.probability) / n) + 0.5 / n
        assert abs(counts[outcome.tokens] / n - outcome.probability) < 4.5 * error


def longrope_model():
    """A model whose rotary factors change at 16 tokens."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0, "rope_theta": 10000.0}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 16, **factors}
    model = tiny_model("phi3", dtype=torch.float32, rope_parameters=rope, original_max_position_embeddings=16)
    model.generation_config.eos_token_id = None
    return model
