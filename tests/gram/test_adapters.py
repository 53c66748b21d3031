"""Adapters: measured is what PEFT trains, from the values PEFT loads; what cannot be measured is refused with the reason."""

import json

import numpy as np
import pytest
import torch
from grams import LAW, PROMPT, audit_of, score_gram, tokens
from safetensors.torch import load_file, save_file
from tiny_models import per_sample_scores, random_continuations, tiny_model

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.models import fingerprint, load_model, weights_digest
from Gradient_evaluation.sampling.generate import sample_continuations
from Gradient_evaluation.sampling.law import uniforms

peft = pytest.importorskip("peft")
CPU = torch.device("cpu")
PLAIN = dict(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
KINDS = {
    "plain": peft.LoraConfig(**PLAIN),
    "whole modules": peft.LoraConfig(**PLAIN, modules_to_save=["input_layernorm", "norm", "lm_head"]),
    "whole embedding": peft.LoraConfig(**PLAIN, modules_to_save=["embed_tokens"]),
    "biases of its layers": peft.LoraConfig(**PLAIN, bias="lora_only"),
    "all biases": peft.LoraConfig(**PLAIN, bias="all"),
    "dora": peft.LoraConfig(**PLAIN, use_dora=True),
    "embedding": peft.LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False),
    "token rows": peft.LoraConfig(**PLAIN, trainable_token_indices=[3, 5]),
    "ranks": peft.LoraConfig(
        **PLAIN, rank_pattern={"q_proj": 3}, alpha_pattern={"q_proj": 5}, use_rslora=True, layers_to_transform=[1]
    ),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
}


def save(folder, config, tied=False):
    """A base model and an adapter of random values, as PEFT saves them."""
    base = tiny_model("qwen2", tie_word_embeddings=tied)
    base.save_pretrained(folder / "base")
    config.base_model_name_or_path = None  # that of the model before
    model = peft.get_peft_model(base, config)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
    model.peft_config["default"].base_model_name_or_path = str(folder / "base")
    model.save_pretrained(folder / "adapter")
    return str(folder / "adapter")


@pytest.mark.parametrize(
    "kind,tied",
    [(kind, kind in ("plain", "token rows")) for kind in KINDS]
    + [("whole modules", True), ("embedding", True), ("token rows", False)],
)
def test_what_peft_trains_is_measured_exactly(kind, tied, tmp_path):
    adapter = save(tmp_path, KINDS[kind], tied)
    base = type(tiny_model("qwen2")).from_pretrained(tmp_path / "base", dtype=torch.float64)
    truth = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()
    model = load_model(adapter, None, CPU, torch.float64)
    expected = {name: p for name, p in truth.named_parameters() if p.requires_grad}
    found = {f"base_model.model.{name}": p for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == expected.keys() and all(torch.equal(found[name], p) for name, p in expected.items())
    ids = torch.tensor([[1, 5, 9, 5, 3, 2, 7]])
    assert torch.equal(model(ids).logits, truth(ids).logits)
    continuations = random_continuations(0, (3, 6, 1, 5))
    scores = per_sample_scores(truth, PROMPT, continuations, LAW)
    with score_gram(model) as gram:
        assert set(gram.names.values()) == {name.removeprefix("base_model.model.") for name in expected}
        block = gram.block(PROMPT, tokens(continuations)).gram
    assert np.abs(block - (scores @ scores.T).numpy()).max() < 1e-9 * np.abs(block).max()


def test_an_adapter_is_sampled_audited_and_told_apart(tmp_path):
    adapter = save(tmp_path, KINDS["whole modules"])
    model = load_model(adapter, None, CPU, torch.bfloat16)
    assert audit_of(model, random_continuations(0, (3, 6, 1, 5)))["max_relative_error"] < 1e-5
    assert fingerprint(model) != fingerprint(load_model(str(tmp_path / "base"), None, CPU, torch.bfloat16))
    assert weights_digest(adapter) != weights_digest(str(tmp_path / "base"))

    class Tokenizer:
        eos_token_id = 2

        def decode(self, tokens, **settings):
            return ""

    drawn = sample_continuations(model, Tokenizer(), PROMPT, uniforms(0, "oracle", 1, 0, 2, 6), LAW, 2)
    assert len(drawn) == 2


def edit(adapter, **changes):
    path = f"{adapter}/adapter_config.json"
    with open(path) as file:
        config = json.load(file)
    with open(path, "w") as file:
        json.dump({**config, **changes}, file)


def test_a_base_model_is_found_beside_the_adapter_or_named(tmp_path):
    adapter = save(tmp_path, KINDS["plain"])
    edit(adapter, base_model_name_or_path="../base")
    load_model(adapter, None, CPU, torch.float32)
    for name, said in (
        (None, "names no base_model"),
        ("", "names no base_model"),
        ("./elsewhere", "no such folder"),
        ("/a/b/c", "no such folder"),
        (7, "names no base_model"),
    ):
        edit(adapter, base_model_name_or_path=name)
        with pytest.raises(UserError, match=said):
            load_model(adapter, None, CPU, torch.float32)


@pytest.mark.parametrize("weight", ["layers.0.input_layernorm", "lora_B"])
def test_a_weight_that_the_file_lacks_is_refused_by_name(weight, tmp_path):
    adapter = save(tmp_path, KINDS["whole modules"])
    weights = load_file(f"{adapter}/adapter_model.safetensors")
    name = next(name for name in weights if weight in name)
    save_file({key: x for key, x in weights.items() if key != name}, f"{adapter}/adapter_model.safetensors")
    with pytest.raises(UserError, match=f"lacks .*{weight}"):
        load_model(adapter, None, CPU, torch.float32)


def test_a_weight_of_the_file_that_peft_does_not_use_is_named(tmp_path, capsys):
    adapter = save(tmp_path, KINDS["plain"])
    weights = load_file(f"{adapter}/adapter_model.safetensors")
    save_file(
        {**weights, "base_model.model.model.nowhere.lora_A.weight": torch.zeros(2)}, f"{adapter}/adapter_model.safetensors"
    )
    load_model(adapter, None, CPU, torch.float32)
    assert "does not use 1 weights of the adapter's file (such as base_model.model.model.nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config,said",
    [
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PROMPT_TUNING.*virtual tokens"),
        (peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PREFIX_TUNING.*virtual tokens"),
    ],
)
def test_adapters_outside_the_models_layers_are_refused(config, said, tmp_path):
    with pytest.raises(UserError, match=said):
        load_model(save(tmp_path, config), None, CPU, torch.float32)
