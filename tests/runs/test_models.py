"""Loading: a dtype and device as asked, one line when it cannot be, adapters alone trainable, weights told apart."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import enumerable_policy, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.models import (
    _check_trainable,
    device_line,
    fingerprint,
    load_model,
    load_tokenizer,
    model_label,
    resolve_device,
    resolve_dtype,
)
from Gradient_evaluation.runs.machine.memory import limited_memory
from Gradient_evaluation.runs.machine.processes import check_own_gpus, gpu_identity

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


def test_an_adapter_loads_with_its_base_and_alone_has_grad(folder, tmp_path):
    peft = pytest.importorskip("peft")
    model = load_model(str(folder), None, CPU, torch.float32)
    lora = peft.LoraConfig(
        r=2, target_modules=["c_attn"], modules_to_save=["lm_head"], init_lora_weights=False, fan_in_fan_out=True
    )
    peft.get_peft_model(model, lora).save_pretrained(tmp_path / "adapter")
    loaded = load_model(str(tmp_path / "adapter"), None, CPU, torch.float32)
    trainable = {name for name, p in loaded.named_parameters() if p.requires_grad}
    assert any("lora_A" in name for name in trainable) and any("lora_B" in name for name in trainable)
    assert all("lora_" in name or "modules_to_save" in name for name in trainable)
    assert load_tokenizer(str(tmp_path / "adapter"), None).get_vocab() == tiny_tokenizer().get_vocab()


@pytest.fixture
def gpus(monkeypatch):
    """Let torch see so many CUDA devices, of one UUID each; nothing can be computed on them."""

    def visible(count, uuids=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
        known = uuids or [f"GPU-{i}" for i in range(count)]
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=known[device.index]))

    return visible


def test_a_cuda_device_has_its_index(gpus):
    gpus(2)
    assert [str(resolve_device(name)) for name in ("auto", "cuda", "cuda:1")] == ["cuda:0", "cuda:0", "cuda:1"]
    with pytest.raises(UserError, match="only 2"):
        resolve_device("cuda:2")


def test_a_process_takes_its_gpu_or_the_only_one_it_sees(gpus):
    gpus(2)
    assert [str(resolve_device("auto", rank)) for rank in (0, 1)] == ["cuda:0", "cuda:1"]
    with pytest.raises(UserError, match="only 2 .*--nproc-per-node"):
        resolve_device("auto", 2)
    gpus(1)  # CUDA_VISIBLE_DEVICES per task
    assert [str(resolve_device("auto", rank)) for rank in (0, 3)] == ["cuda:0", "cuda:0"]


def test_processes_may_share_no_gpu_but_take_slices_of_it(gpus, monkeypatch):
    gpus(1, ["GPU-7"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    one = gpu_identity(torch.device("cuda:0"))
    with pytest.raises(UserError, match="processes 0 and 2 use the same GPU"):
        check_own_gpus([one, ("elsewhere", "GPU-7"), one])
    slices = []
    for name in ("MIG-a", "MIG-b"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
        slices.append(gpu_identity(torch.device("cuda:0")))
    check_own_gpus(slices)
    check_own_gpus([gpu_identity(CPU)] * 2)


def test_a_run_says_what_auto_came_to_and_why_it_is_the_cpu(gpus, monkeypatch):
    gpus(0)
    monkeypatch.setattr(torch.version, "hip", None)
    for version, reason in ((None, "this build of torch is without CUDA"), ("13.0", "torch sees no GPU")):
        monkeypatch.setattr(torch.version, "cuda", version)
        assert device_line(CPU, torch.float32) == f"device: cpu ({reason}), float32"
    gpus(1)
    assert device_line(resolve_device("auto"), torch.bfloat16) == "device: a GPU (cuda:0), bfloat16"


def test_memory_can_be_limited_on_the_gpu_that_auto_finds(gpus, monkeypatch):
    gpus(1)
    asked = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 * 2**30))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, device: asked.append((share, device.index))
    )
    with limited_memory(20, resolve_device("auto")):
        assert asked == [(0.25, 0)]  # torch refuses a device without an index here
    assert asked[-1] == (1.0, 0)


def test_weights_go_straight_to_a_device_and_leave_no_hooks(folder):
    """What load_model asks of transformers on CUDA, asked of the CPU."""
    pytest.importorskip("accelerate")
    straight = AutoModelForCausalLM.from_pretrained(folder, device_map={"": CPU}, dtype=torch.float32)
    usual = load_model(str(folder), None, CPU, torch.float32)
    assert fingerprint(straight) == fingerprint(usual) and not any(hasattr(m, "_hf_hook") for m in straight.modules())


def checkpoint(tmp_path, edit, **settings):
    """A llama's folder with ``edit`` made of its weights {name: tensor}."""
    tiny_model("llama", dtype=torch.float32, **settings).save_pretrained(tmp_path / "edited")
    path = tmp_path / "edited" / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})
    return str(tmp_path / "edited")


@pytest.mark.parametrize(
    "name",
    [
        "weight_scale",
        "weight_scale_inv",
        "input_scale",
        "qzeros",
        "absmax",
        "g_idx",
        "weight.absmax",
        "weight.quant_state.bitsandbytes__nf4",
        "SCB",
    ],
)
def test_scales_of_a_quantised_checkpoint_are_refused(name, tmp_path):
    def edit(weights):
        weights[f"model.layers.0.mlp.up_proj.{name}"] = torch.ones(1)
        weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn)

    with pytest.raises(UserError, match="quantised, and 1 of its scales"):
        load_model(checkpoint(tmp_path, edit), None, CPU, torch.float32)


def test_integer_weights_of_another_name_are_quantised(tmp_path):
    def edit(weights):
        weights.pop("model.layers.0.mlp.up_proj.weight")
        weights["model.layers.0.mlp.up_proj.qweight"] = torch.ones(4, 4, dtype=torch.int32)

    with pytest.raises(UserError, match="is quantised"):
        load_model(checkpoint(tmp_path, edit), None, CPU, torch.float32)


def test_an_unused_weight_is_refused_in_a_layer_of_the_model(tmp_path, capsys):
    def bias(weights):
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)

    with pytest.raises(UserError, match="layers of the model.*q_proj.bias"):
        load_model(checkpoint(tmp_path, bias), None, CPU, torch.float32)
    load_model(
        checkpoint(tmp_path, lambda weights: weights.update({"vision.tower.weight": torch.ones(2)})), None, CPU, torch.float32
    )
    assert "1 weights of the checkpoint are not used" in capsys.readouterr().err


def test_weights_that_stay_quantised_in_memory_are_refused():
    model = tiny_model("llama", dtype=torch.float32)
    model.model.layers[0].mlp.up_proj.weight = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(UserError, match="up_proj.weight is uint8"):
        _check_trainable("somewhere", model)
