"""What must also hold on a GPU. Run with: .venv/bin/python -m pytest -m cuda tests"""

import numpy as np
import pytest
import torch
from grams import block_of, score_gram, tokens
from scripts import ORACLE, ROOT, ended, start, torchrun
from tiny_models import (
    PROMPT,
    enumerable_policy,
    enumerate_outcomes,
    frequencies_agree,
    random_continuations,
    tiny_model,
    tiny_tokenizer,
)

from data.make_arithmetic import make_problems, write_jsonl
from Gradient_evaluation.models import resolve_device
from Gradient_evaluation.runs.checks import self_audit
from Gradient_evaluation.runs.machine.memory import Batch, limited_memory
from Gradient_evaluation.sampling.generate import sample_continuations
from Gradient_evaluation.sampling.law import SamplingLaw, uniforms

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LAW = SamplingLaw(temperature=0.8, max_new_tokens=6)
GRAM_PROMPT = [1, 5, 9, 5, 0, 2, 7]


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma3_text", "mixtral"])
@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_gram_on_cuda_is_that_of_the_cpu(family, dtype, tolerance):
    settings = dict(num_local_experts=3, num_experts_per_tok=3) if family == "mixtral" else {}
    exact, other = tiny_model(family, **settings), tiny_model(family, dtype=dtype, **settings)
    other.load_state_dict(exact.state_dict())
    exact.load_state_dict({k: v.double() for k, v in other.state_dict().items()})
    continuations = random_continuations(0, (3, 6, 1, 5))
    truth = block_of(exact, continuations, LAW, GRAM_PROMPT).gram
    with score_gram(other.cuda(), LAW) as gram:
        found = gram.block(GRAM_PROMPT, tokens(continuations)).gram
        self_audit(gram, GRAM_PROMPT, tokens(continuations))
    assert np.abs(found - truth).max() < tolerance * np.abs(truth).max()


@pytest.mark.parametrize("law", [SamplingLaw(max_new_tokens=3), SamplingLaw(1.4, 0.85, 4, 3)], ids=["neutral", "cut"])
def test_frequencies_on_cuda_are_those_of_the_law(law):
    model = enumerable_policy()
    outcomes = enumerate_outcomes(model, PROMPT, law)
    u = uniforms(0, "oracle", 7, 0, 4000, law.max_new_tokens)
    frequencies_agree(sample_continuations(model.cuda(), tiny_tokenizer(), PROMPT, u, law, 1000), outcomes)


def test_a_block_peaks_at_the_model_and_its_activations():
    model = tiny_model(
        "qwen2",
        dtype=torch.float32,
        vocab_size=50_000,
        hidden_size=512,
        intermediate_size=1024,
        num_attention_heads=8,
        head_dim=64,
    ).cuda()
    continuations = tokens(random_continuations(0, (3, 6, 1, 5)))
    with score_gram(model, LAW, budget=2**20) as gram:
        gram.block(GRAM_PROMPT, continuations)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        gram.block(GRAM_PROMPT, continuations)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    assert torch.cuda.max_memory_allocated() - before < parameters / 2


def test_max_memory_makes_the_gpu_refuse_and_the_batch_shrink():
    batch = Batch("--gen_bs", 64, least=1)
    with limited_memory(1.0, resolve_device("auto")):
        assert batch.run(lambda size: torch.empty(size * 2**26, dtype=torch.uint8, device="cuda").numel(), "here") < 2**30
    assert batch.size < 64


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gram_in_bfloat16_products_is_near_that_of_float32(checkpointing):
    model = tiny_model("qwen2", dtype=torch.bfloat16).cuda()
    continuations = random_continuations(0, (3, 6, 1, 5))
    exact, fast = (
        block_of(model, continuations, LAW, GRAM_PROMPT, gram_dtype=dtype, gradient_checkpointing=checkpointing)
        for dtype in ("float32", "bfloat16")
    )
    assert np.abs(exact.gram - fast.gram).max() < 0.05 * np.abs(exact.gram).max()


def test_processes_on_gpus_of_their_own_leave_what_one_leaves(tmp_path):
    """torchrun with every GPU of the machine."""
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("has one GPU")
    data = tmp_path / "problems.jsonl"
    flags = ["--model", ROOT / "data" / "tiny_model", "--dataset", data, "--n_oracle", 64, "--dtype", "float32"]
    write_jsonl(make_problems(6, seed=1), data)
    assert ended(start([ORACLE, *flags, "--out_dir", tmp_path / "one"]))[0] == 0
    code, _, err = torchrun([ORACLE, *flags, "--out_dir", tmp_path / "many"], processes=count)
    assert code == 0, err
    one, many = (tmp_path / out / "oracle_v_n64_tiny_model.jsonl" for out in ("one", "many"))
    assert one.read_bytes() == many.read_bytes()
