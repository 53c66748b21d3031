"""PEFT adapters: the base model with the adapter in place, and requiring grad exactly what PEFT would train.

PEFT itself loads them (``PeftModel.from_pretrained(base, folder, is_trainable=True)``), so that its rules decide what is
trained and from which values: whole modules saved with the adapter, biases, DoRA's magnitudes, token rows, other tuners.
An adapter that lives outside the model's own layers (virtual tokens), or whose file is incomplete, is refused.
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
    """(folder or hub id, revision) of an adapter's base model; a relative path may also start at the adapter's folder.

    Raises UserError when the adapter's config names none, or a folder that is not here.
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
        raise UserError(f"--model {adapter}: its base model {named} is an adapter itself; merge that one into its base first")
    return source, revision


def load_adapter(adapter: str, base: nn.Module, device: torch.device) -> nn.Module:
    """``base`` (already on ``device``) with the adapter in its layers; what PEFT trains requires grad, nothing else does.

    Raises UserError when PEFT is not installed, the adapter is of a kind that is not measured, or its file is incomplete.
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
        except KeyError as error:  # PEFT looks saved modules up by name
            raise UserError(
                f"--model {adapter}: the adapter's file lacks {error} of the weights that its config asks for; "
                "give the complete adapter"
            ) from None
    for warning in said:
        if "nexpected keyword" in str(warning.message):  # a setting of a newer PEFT, without which it is another adapter
            print(f"warning: {adapter}: {str(warning.message).splitlines()[0]}", file=sys.stderr)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = set(peft.get_peft_model_state_dict(whole, save_embedding_layers=False))
        stored = set(peft.utils.load_peft_weights(adapter, device="cpu"))
    if lacking := sorted(expected - stored):
        raise UserError(
            f"--model {adapter}: the adapter's file lacks {len(lacking)} of the weights that its config asks for "
            f"(such as {lacking[0]}); they would have other values than those trained; give the "
            "complete adapter"
        )
    if unused := sorted(stored - expected - set(whole.state_dict())):
        print(
            f"warning: {adapter}: PEFT leaves {len(unused)} weights of the adapter's file unused (such as {unused[0]})",
            file=sys.stderr,
        )
    model = whole.get_base_model()
    _check_same_logits(adapter, whole, model)
    return model


def _refuse_other_kinds(adapter: str, config) -> None:
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if config.is_prompt_learning or getattr(config, "is_adaption_prompt", False):
        raise UserError(
            f"--model {adapter}: a {kind} adapter puts virtual tokens before the prompt, which the sampling and "
            "the score here know nothing of; give an adapter of the model's own layers (LoRA, IA3 and the like)"
        )
    if getattr(config, "alora_invocation_tokens", None):
        raise UserError(
            f"--model {adapter}: an activated LoRA (alora_invocation_tokens) acts from certain tokens on, which "
            "the sampling and the score here know nothing of; give a plain LoRA"
        )


@torch.no_grad()
def _check_same_logits(adapter: str, whole: nn.Module, model: nn.Module) -> None:
    """PEFT's wrapper must do nothing that its layers do not do: sampling and scores use the layers alone."""
    ids = torch.tensor([[1, 2, 3, 1, 2, 0]], device=next(model.parameters()).device)
    settings = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    whole.eval()
    if not torch.allclose(whole(**settings).logits, model(**settings).logits, rtol=1e-3, atol=1e-3):
        raise UserError(
            f"--model {adapter}: PEFT runs this adapter by more than the model's own layers, which is not "
            "measured here; merge it into its base model"
        )
