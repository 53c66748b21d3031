"""PEFT adapters: the base model with the adapter in its layers. Exactly what PEFT would train requires grad.

PEFT itself loads them (``PeftModel.from_pretrained(base, folder, is_trainable=True)``). So its rules hold for all that an
adapter can train: modules saved whole, biases, DoRA's magnitudes, rows of single tokens, other tuners. An adapter is refused
if it acts outside the model's layers (virtual tokens), or if its file is incomplete.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

from Gradient_evaluation.errors import UserError


def is_adapter(model: str) -> bool:
    """Whether ``model`` is a folder with a PEFT adapter."""
    return (Path(model) / "adapter_config.json").is_file()


def base_of(adapter: str) -> tuple[str, str | None]:
    """(folder or hub id, revision) of an adapter's base model. A relative path may also start at the adapter's folder.

    Raises UserError when the adapter's config names no base model, or a folder that does not exist.
    """
    try:
        config = json.loads((Path(adapter) / "adapter_config.json").read_text(encoding="utf-8"))
        named, revision = config["base_model_name_or_path"], config.get("revision")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        named, revision = None, None
    if not named or not isinstance(named, str):
        raise UserError(
            f"--model {adapter}: its adapter_config.json names no base_model_name_or_path; write the base "
            "model's folder or hub id there"
        )
    beside = Path(adapter) / named
    source = str(beside) if beside.is_dir() and not Path(named).is_dir() else named
    if not Path(source).is_dir() and (source.startswith((".", "/", "~")) or source.count("/") > 1):
        raise UserError(
            f"--model {adapter}: its adapter_config.json names the base model {named}, and there is no such "
            "folder here; correct base_model_name_or_path in it"
        )
    if is_adapter(source):
        raise UserError(
            f"--model {adapter}: its base model {named} is itself an adapter; merge that one into its base model first"
        )
    return source, revision


def load_adapter(adapter: str, base: nn.Module, device: torch.device) -> nn.Module:
    """``base`` (already on ``device``) with the adapter in its layers. Only what PEFT trains requires grad.

    Raises UserError when PEFT is not installed, the adapter is of an unsupported kind, or its file is incomplete.
    """
    try:
        import peft
    except ImportError:
        raise UserError(f"--model {adapter}: is an adapter, and loading it needs the package peft; pip install peft") from None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config = peft.PeftConfig.from_pretrained(adapter)
        _refuse_other_kinds(adapter, config)
        try:
            whole = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True, torch_device=str(device))
        except KeyError as error:  # PEFT looks up saved modules by their names
            raise UserError(
                f"--model {adapter}: the adapter's file lacks {error} of the weights that its config asks for; "
                "give the complete adapter"
            ) from None
    for warning in said:
        if "nexpected keyword" in str(warning.message):  # from a newer PEFT; without the setting the adapter may differ
            print(f"warning: {adapter}: {str(warning.message).splitlines()[0]}", file=sys.stderr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = set(peft.get_peft_model_state_dict(whole, save_embedding_layers=False))
        stored = set(peft.utils.load_peft_weights(adapter, device="cpu"))
    if lacking := sorted(expected - stored):
        raise UserError(
            f"--model {adapter}: the adapter's file lacks {len(lacking)} of the weights that its config asks for "
            f"(such as {lacking[0]}); they would not have their trained values; give the complete "
            "adapter"
        )
    if unused := sorted(stored - expected - set(whole.state_dict())):
        print(
            f"warning: {adapter}: PEFT does not use {len(unused)} weights of the adapter's file (such as {unused[0]})",
            file=sys.stderr,
        )
    model = whole.get_base_model()
    _check_same_logits(adapter, whole, model)
    return model


def _refuse_other_kinds(adapter: str, config) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning or getattr(config, "is_adaption_prompt", False):
        raise UserError(
            f"--model {adapter}: a {kind} adapter puts virtual tokens before the prompt, which sampling and scores "
            "here do not support; give an adapter inside the model's layers (LoRA, IA3, ...)"
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise UserError(
            f"--model {adapter}: an activated LoRA (alora_invocation_tokens) acts only after certain tokens, which "
            "sampling and scores here do not support; give a plain LoRA"
        )


@torch.no_grad()
def _check_same_logits(adapter: str, whole: nn.Module, model: nn.Module) -> None:
    """Raise UserError if PEFT's wrapper changes the logits: sampling and scores use the model without the wrapper."""
    ids = torch.tensor([[1, 2, 3, 1, 2, 0]], device=next(model.parameters()).device)
    settings = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    whole.eval()
    if not torch.allclose(whole(**settings).logits, model(**settings).logits, rtol=1e-3, atol=1e-3):
        raise UserError(
            f"--model {adapter}: PEFT's wrapper changes what the model with this adapter computes, which is not "
            "supported here; merge it into its base model"
        )
