"""A stand-in for vLLM 0.27: the part of its interface that sample_with_vllm.py calls, sampling with this repository's sampler.

Names, defaults and what comes back are vLLM's (vllm/entrypoints/llm.py, sampling_params.py, outputs.py, logprobs.py). What it
does not know is an error, so that a call which vLLM would refuse fails here too. Two settings are of the tests alone:
``LLM.calls`` lists what the engine was asked, and ``LLM.fails_at`` the number of the request at which the process dies.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import AutoConfig

from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.models import load_model, load_tokenizer
from Gradient_evaluation.sampling.generate import sample_continuations
from Gradient_evaluation.sampling.law import SamplingLaw, uniforms
from Gradient_evaluation.sampling.log_probs import log_probs
from Gradient_evaluation.sampling.stop_strings import decode_text, special_tokens

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class SamplingParams:
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self):
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are only supported when detokenize is True. Set `detokenize=True` to use stop.")
        if (self.presence_penalty, self.frequency_penalty, self.repetition_penalty, self.min_p) != (0.0, 0.0, 1.0, 0.0):
            raise NotImplementedError("the stand-in knows no penalties and no min_p")


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True


class LLM:
    calls: list = []
    fails_at: int | None = int(os.environ["VLLM_STAND_IN_FAILS_AT"]) if "VLLM_STAND_IN_FAILS_AT" in os.environ else None

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
        tensor_parallel_size: int = 1,
        dtype: str = "auto",
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        seed: int = 0,
        gpu_memory_utilization: float = 0.92,
        # of EngineArgs
        max_model_len: int | None = None,
        generation_config: str = "auto",
        logprobs_mode: str = "raw_logprobs",
    ):
        LLM.calls.append(("LLM", {name: value for name, value in locals().items() if name != "self"}))
        if generation_config != "vllm":
            raise NotImplementedError("the stand-in takes no sampling defaults from a checkpoint")
        context = AutoConfig.from_pretrained(model).max_position_embeddings
        if max_model_len is not None and max_model_len > context:
            raise ValueError(
                f"User-specified max_model_len ({max_model_len}) is greater than the derived max_model_len ({context})"
            )
        self.model = load_model(model, revision, torch.device("cpu"), DTYPES[dtype], trust_remote_code)
        self.tokenizer, self.logprobs_mode = load_tokenizer(tokenizer or model, tokenizer_revision), logprobs_mode

    def generate(self, prompts, sampling_params=None, *, use_tqdm: bool = True) -> list[RequestOutput]:
        params = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        LLM.calls.append(("generate", prompts, params))
        return [self._request(number, list(p["prompt_token_ids"]), s) for number, (p, s) in enumerate(zip(prompts, params))]

    def _request(self, number: int, prompt_ids: list[int], params: SamplingParams) -> RequestOutput:
        if LLM.fails_at is not None:
            LLM.fails_at -= 1
            if LLM.fails_at < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        names = {token: text for text, token in special_tokens(self.tokenizer).items()}
        stop = (*(params.stop or ()), *(names[token] for token in params.stop_token_ids or () if token in names))
        law = SamplingLaw(params.temperature, params.top_p, max(params.top_k, 0), params.max_tokens, stop)
        u = uniforms(params.seed, "vllm", 0, 0, params.n, law.max_new_tokens)
        drawn = sample_continuations(self.model, self.tokenizer, prompt_ids, u, law, params.n)
        outputs = [self._output(i, each, prompt_ids, params) for i, each in enumerate(drawn)]
        return RequestOutput(str(number), None, prompt_ids, None, outputs)

    def _output(self, index: int, each, prompt_ids: list[int], params: SamplingParams) -> CompletionOutput:
        values, reason, stop = each.log_probs, "length", None
        if self.logprobs_mode == "raw_logprobs":  # before temperature, top_k and top_p
            with ScoreGram(self.model, partial(log_probs, law=SamplingLaw())) as gram:
                row = gram.logits(prompt_ids, [each.tokens])[0]
            values = log_probs(row, torch.tensor(each.tokens), SamplingLaw()).numpy()
        if each.ended:
            reason, last = "stop", each.tokens[-1]
            stop = last if last in (params.stop_token_ids or ()) and last != self.tokenizer.eos_token_id else None
        elif found := [text for text in params.stop or () if text in decode_text(self.tokenizer, each.tokens)]:
            reason, stop = "stop", found[0]
        found = [{token: Logprob(float(value), 1)} for token, value in zip(each.tokens, values)]
        given = None if params.logprobs is None else found
        text = each.text if params.detokenize else ""
        return CompletionOutput(index, text, list(each.tokens), float(values.sum()), given, reason, stop)
