"""Adam's second moments from a trainer's optimizer state, by the names of the model's parameters.

digest_of(path)                       what run.json stores of a state; a file that is none is refused before a model is loaded
second_moments(model, settings)       {name: SecondMoment} for gram/metric.py

Three forms are read: ``optimizer.pt`` of a Hugging Face Trainer (numbered parameters, or the checkpoint folder with it), a
state by parameter names (merged from FSDP, as VERL's workers have it), and a safetensors file of v (exp_avg_sq) by name. The
tensors stay in the file, which is mapped into memory.
"""

from __future__ import annotations

import hashlib
import pickle
import re
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.gram.metric import SecondMoment
from Gradient_evaluation.settings import TracecovSettings

BETA2, EPS = 0.999, 1e-8  # Adam's, where neither the state nor a flag says another
WRAPPERS = re.compile(r"^module\.|_fsdp_wrapped_module\.|_orig_mod\.|^base_model\.model\.")  # in the names of parameters
SAMPLES, PIECE = 64, 2**22  # elements of a parameter


class _Moment(NamedTuple):
    v: torch.Tensor
    step: float | None  # optimizer steps; None where the file does not say
    beta2: float
    eps: float


def _read(path: Path) -> tuple[dict, list[dict]]:
    """({key: _Moment}, parameter groups, [] where there are none); keys are names or numbers."""
    if path.is_dir():
        path = path / "optimizer.pt"
    if not path.exists():
        raise UserError(f"--optimizer_state {path}: there is no such file")
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt") as file:
                return {name: _Moment(file.get_tensor(name), None, BETA2, EPS) for name in file.keys()}, []
        except (SafetensorError, OSError) as error:
            raise UserError(f"--optimizer_state {path}: not a safetensors file ({error})") from None
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(
            f"--optimizer_state {path}: torch.load cannot read it as tensors alone ({str(error).strip().splitlines()[0]}); "
            "give an optimizer.pt, or a safetensors file of exp_avg_sq by parameter name"
        ) from None
    if not isinstance(found, dict) or not isinstance(found.get("state"), dict) or not found["state"]:
        raise UserError(f"--optimizer_state {path}: holds no optimizer state (no entry 'state'); give a trainer's optimizer.pt")
    groups = found.get("param_groups") or []
    group_of = {key: group for group in groups for key in group["params"]}
    moments = {key: _moment(path, key, entry, group_of.get(key, {})) for key, entry in found["state"].items()}
    return moments, groups


def _moment(path: Path, key, entry: dict, group: dict) -> _Moment:
    v = entry.get("max_exp_avg_sq", entry.get("exp_avg_sq"))
    if any(name in entry for name in ("state2", "absmax2", "qmap2")) or v is not None and not v.is_floating_point():
        raise UserError(
            f"--optimizer_state {path}: an 8-bit state; train with a 32-bit AdamW, or give its exp_avg_sq in a safetensors file"
        )
    if v is None:
        raise UserError(
            f"--optimizer_state {path}: parameter {key} has no exp_avg_sq (it has {', '.join(map(str, entry)) or 'nothing'}); "
            "the metric is Adam's"
        )
    if hasattr(v, "to_local"):
        v = v.to_local()
    step = entry.get("step", group.get("step"))
    return _Moment(v, None if step is None else float(step), group.get("betas", (0, BETA2))[1], group.get("eps", EPS))


def digest_of(settings: TracecovSettings) -> str | None:
    """16 hex digits of a sample of v, the steps and the flags; None without --optimizer_state. UserError as for reading."""
    if not settings.optimizer_state:
        return None
    digest = hashlib.sha256(repr((settings.adam_step, settings.adam_beta2, settings.adam_eps)).encode())
    for key, each in _read(Path(settings.optimizer_state))[0].items():
        flat = each.v.reshape(-1)
        sample = flat[:: max(1, len(flat) // SAMPLES)].double().numpy().tobytes()
        digest.update(repr((key, tuple(each.v.shape), *each[1:])).encode() + sample)
    return digest.hexdigest()[:16]


def second_moments(model: nn.Module, settings: TracecovSettings) -> dict[str, SecondMoment]:
    """The second moments of --optimizer_state by the names of the model's parameters, with Adam's bias correction.

    Flags come before the state. A file without steps has its v taken as it is, as if it were corrected already. Raises
    UserError for a state of other parameters, and for a v that is negative or not finite.
    """
    path = Path(settings.optimizer_state)
    moments, groups = _read(path)
    if not all(isinstance(key, str) for key in moments):
        moments = _by_name(path, moments, groups, model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    named = {name if name in trained else WRAPPERS.sub("", name): each for name, each in moments.items()}
    found = {name: _corrected(path, name, each, settings) for name, each in named.items()}
    measured = [each.v for name, each in found.items() if name in trained]
    empty, elements = sum(map(_zeros, measured)), sum(v.numel() for v in measured)
    if empty:
        print(
            f"note: --optimizer_state {path}: v is 0 in {empty:,} of {elements:,} elements, which never had a gradient; there "
            "the metric is 1/eps, and one gradient weighs as much as it does in Adam's first step",
            file=sys.stderr,
        )
    return found


def _by_name(path: Path, moments: dict, groups: list[dict], model: nn.Module) -> dict:
    """Numbered parameters by name: as the groups say, else in the order in which Trainer.create_optimizer gives them."""
    from transformers import Trainer  # takes seconds

    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    orders = [[trained], [[n for n in trained if n in decayed], [n for n in trained if n not in decayed]]]
    if all("param_names" in group for group in groups):
        names = {key: name for group in groups for key, name in zip(group["params"], group["param_names"])}
    else:
        numbers = [group["params"] for group in groups]
        order = next((each for each in orders if list(map(len, each)) == list(map(len, numbers))), None)
        if order is None:
            counts = " + ".join(str(len(each)) for each in numbers)
            raise UserError(
                f"--optimizer_state {path}: has {counts} parameters in its groups, the model's trainable ones are "
                f"{len(trained)} ({len(orders[1][0])} with weight decay): not the optimizer of this model, or one with groups "
                "of its own; give a safetensors file of exp_avg_sq by parameter name"
            )
        names = {key: name for keys, own in zip(numbers, order) for key, name in zip(keys, own)}
    return {names[key]: each for key, each in moments.items()}


def _corrected(path: Path, name: str, each: _Moment, settings: TracecovSettings) -> SecondMoment:
    step, beta2, eps = (
        own if flag is None else flag
        for own, flag in zip(each[1:], (settings.adam_step, settings.adam_beta2, settings.adam_eps))
    )
    correction = 1.0 if step is None else 1 - beta2**step
    if not correction > 0:
        raise UserError(f"--optimizer_state {path}: {name} is at step {step:g}; a trainer that took no step has no metric yet")
    return SecondMoment(each.v, correction, eps)


def _zeros(v: torch.Tensor) -> int:
    """The elements that are 0. Raises UserError for one below 0 or not finite."""
    count = 0
    for piece in v.reshape(-1).split(PIECE):
        if not bool(torch.isfinite(piece).all()) or bool((piece < 0).any()):
            raise UserError("--optimizer_state: exp_avg_sq has an element that is negative or not finite; was the training?")
        count += int((piece == 0).sum())
    return count
