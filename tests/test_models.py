"""Loading: a dtype and device as asked, one line when it cannot be, adapters alone trainable, weights told apart."""

import pytest
import torch
from tiny_models import enumerable_policy, tiny_tokenizer

from Gradient_evaluation.cli import UserError
from Gradient_evaluation.models import (fingerprint, load_model, load_tokenizer, model_label, resolve_device,
                                        resolve_dtype)

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    enumerable_policy(seed=1).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def test_auto_is_the_cpu_in_float32_where_there_is_no_cuda():
    if torch.cuda.is_available():
        pytest.skip("has CUDA")
    assert resolve_device("auto") == CPU
    assert resolve_dtype("auto", CPU) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    for name in ("cuda", "cuda:1", "nonsense"):
        with pytest.raises(UserError, match="--device"):
            resolve_device(name)


def test_a_model_loads_in_the_dtype_asked_for_and_in_eval_mode(folder):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        model = load_model(str(folder), None, CPU, dtype)
        assert {p.dtype for p in model.parameters()} == {dtype} and not model.training


def test_a_folder_without_a_model_is_one_line(tmp_path):
    (tmp_path / "empty").mkdir()
    for load in (lambda m: load_tokenizer(m, None), lambda m: load_model(m, None, CPU, torch.float32)):
        for model in (str(tmp_path / "empty"), str(tmp_path / "missing")):
            with pytest.raises(UserError, match="--model") as error:
                load(model)
            assert "\n" not in str(error.value)


def test_the_fingerprint_is_that_of_the_weights_in_any_dtype(folder, tmp_path):
    prints = {fingerprint(load_model(str(folder), None, CPU, dtype)) for dtype in (torch.float32, torch.bfloat16)}
    assert len(prints) == 1
    enumerable_policy(seed=2).save_pretrained(tmp_path / "other")
    assert fingerprint(load_model(str(tmp_path / "other"), None, CPU, torch.float32)) not in prints


def test_a_label_is_the_last_part_of_an_id_or_path(folder):
    assert model_label("Qwen/Qwen2.5-0.5B") == "Qwen2.5-0.5B"
    assert model_label(f"{folder}/") == "base"


def test_an_adapter_folder_loads_with_its_base_and_only_the_adapter_requires_grad(folder, tmp_path):
    peft = pytest.importorskip("peft")
    model = load_model(str(folder), None, CPU, torch.float32)
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["lm_head"], init_lora_weights=False,
                           fan_in_fan_out=True)
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    loaded = load_model(str(tmp_path / "adapter"), None, CPU, torch.float32)
    trainable = {name for name, p in loaded.named_parameters() if p.requires_grad}
    assert any("lora_A" in name for name in trainable) and any("lora_B" in name for name in trainable)
    assert all("lora_" in name or "modules_to_save" in name for name in trainable)
    assert load_tokenizer(str(tmp_path / "adapter"), None).get_vocab() == tiny_tokenizer().get_vocab()
