"""Loading a causal language model and its tokenizer the way both scripts need it: device, dtype, no surprises."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from Gradient_evaluation.cli import UserError

DTYPES = {"float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
          "float16": torch.float16, "fp16": torch.float16, "float64": torch.float64}


def resolve_device(name: str) -> torch.device:
    """``auto`` is CUDA where there is one, else the CPU; any other name as torch reads it."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: torch knows no such device; use auto, cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"--device {name}: torch sees no CUDA device here; use --device cpu or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(f"--device {name}: there are only {torch.cuda.device_count()} CUDA devices")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on CUDA and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[name]


def model_label(model: str) -> str:
    """The part of a model's name that goes into file names: the last component of the id or path."""
    return Path(model).resolve().name or "model"


def load_tokenizer(model: str, revision: str | None):
    """The tokenizer of a local folder or hub id; raises UserError in one line when there is none."""
    _refuse_missing_folder(model)
    source, adapter = model, Path(model) / "adapter_config.json"
    if adapter.is_file() and not list(Path(model).glob("tokenizer*")):  # an adapter's tokenizer is its base model's
        source, revision = json.loads(adapter.read_text())["base_model_name_or_path"], None
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {model}: cannot load its tokenizer ({_first_line(error)})") from None


def load_model(model: str, revision: str | None, device: torch.device, dtype: torch.dtype):
    """The causal language model in eval mode on its device; raises UserError in one line when it cannot load.

    A folder with a PEFT adapter gives its base model with the adapter in place and only the adapter requiring grad.
    """
    _refuse_missing_folder(model)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    try:
        loaded = AutoModelForCausalLM.from_pretrained(model, revision=revision, dtype=dtype)
    except (OSError, ValueError) as error:
        raise UserError(f"--model {model}: cannot load it ({_first_line(error)})") from None
    if getattr(loaded.config, "is_encoder_decoder", False):
        raise UserError(f"--model {model}: an encoder-decoder; give a causal language model")
    if getattr(loaded, "_hf_peft_config_loaded", False):
        _train_adapters_only(loaded)
    return loaded.to(device).eval()


def _train_adapters_only(model) -> None:
    """What training would update under PEFT: the adapters' own layers and whole modules saved with them."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            for name in module.adapter_layer_names:
                getattr(module, name).requires_grad_(True)
    for name, p in model.named_parameters():
        if ".modules_to_save." in name:
            p.requires_grad_(True)


def fingerprint(model) -> str:
    """A short hash of the weights: the same on every machine and device, another for another checkpoint.

    Reads the names, the shapes and 16 values of every parameter, rounded to bfloat16 so that loading the same
    checkpoint in another dtype changes nothing.
    """
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        places = torch.linspace(0, p.numel() - 1, 16, dtype=torch.float64).long().to(p.device)
        values = p.detach().flatten()[places].to(torch.bfloat16).float().cpu().numpy()
        digest.update(f"{name} {tuple(p.shape)}".encode() + values.tobytes())
    return digest.hexdigest()[:16]


def check_prompt_length(model, prompt_ids: list[int], max_new_tokens: int, where: str) -> None:
    """Raise UserError when prompt and continuation do not fit the model's context."""
    context = getattr(model.config, "max_position_embeddings", None)
    if context is not None and len(prompt_ids) + max_new_tokens > context:
        raise UserError(f"{where}: the prompt has {len(prompt_ids)} tokens and --max_new_tokens is {max_new_tokens}, "
                        f"more than the model's context of {context}; shorten it or lower --max_new_tokens")


def _refuse_missing_folder(model: str) -> None:
    # A path that does not exist would be asked of the hub, whose answer says nothing about the folder.
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1
    if looks_local and not Path(model).is_dir():
        raise UserError(f"--model {model}: there is no such folder")


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
