"""Loading a causal language model and its tokenizer the way both scripts need it: device, dtype, no surprises."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging as python_logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging

from Gradient_evaluation.adapters import base_of, is_adapter, load_adapter
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.forward import is_out_of_memory
from Gradient_evaluation.settings import DTYPES

TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*vocab*.json", "*.tiktoken", "tekken.json", "*.py")
TRAINABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# What the formats of quantised checkpoints call the numbers beside a layer's weights.
SCALES = re.compile(
    r"(^|[._])((weight|input|output|activation|[qkv])_scale(_inv|_2)?|scale_inv|scales|qweight|qzeros|g_idx|"
    r"absmax|quant_map|quant_state\b.*|SCB|weight_packed|weight_shape|(weight|input)_zero_point)$"
)
NOT_THE_MODEL = ("transformers_version", "dtype", "torch_dtype", "architectures", "use_cache", "name_or_path")


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """``auto`` is CUDA where there is one, else the CPU; any other name as torch reads it. A CUDA device has its index.

    local_rank: which of several processes on this machine this is. Each takes the GPU of that number, or the only one
    it sees, where every process was given one of its own (CUDA_VISIBLE_DEVICES per task, a MIG slice).
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda:") and local_rank is not None:
        raise UserError(f"--device {name}: every process takes a GPU of its own; use --device auto under torchrun")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name}: torch knows no such device; use auto, cpu, cuda or cuda:0") from None
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise UserError(f"--device {name}: torch sees no CUDA device here; use --device cpu or auto")
    count = torch.cuda.device_count()
    index = device.index or 0
    if local_rank is not None and count > 1:
        index = local_rank
    if index >= count:
        raise UserError(
            f"--device {name}: there are only {count} CUDA devices here"
            + (", one per process; lower --nproc-per-node" if local_rank is not None else "")
        )
    return torch.device("cuda", index)


def device_line(device: torch.device, dtype: torch.dtype) -> str:
    """What --device auto came to: ``device: NVIDIA H200 (cuda:0), bfloat16``, or the CPU with the reason."""
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)} ({device})"
    else:
        has_cuda = torch.version.cuda or torch.version.hip
        name = f"{device} ({'torch sees no GPU' if has_cuda else 'this build of torch knows no GPU'})"
    return f"device: {name}, {str(dtype).split('.')[-1]}"


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """``auto`` is bfloat16 on CUDA and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, DTYPES[name])


def model_label(model: str) -> str:
    """The part of a model's name that goes into file names: the last component of the id or path."""
    return Path(model).resolve().name or "model"


def load_tokenizer(model: str, revision: str | None, trust_remote_code: bool = False):
    """The tokenizer of a local folder or hub id; raises UserError in one line when there is none."""
    _refuse_missing_folder(model)
    source = model
    if is_adapter(model) and not list(Path(model).glob("tokenizer*")):  # its tokenizer is its base model's
        source, revision = base_of(model)
    if Path(source).is_dir() and not any(next(Path(source).glob(name), None) for name in TOKENIZER_FILES):
        raise UserError(f"--model {model}: has no tokenizer file (tokenizer.json or the like); save the tokenizer there")
    with quiet_libraries():
        try:
            _say_that_the_hub_is_asked(source, revision)
            return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
        except Exception as error:  # a damaged file raises whatever its reader happens to
            raise UserError(f"--model {model}: cannot load its tokenizer ({_reason(error)})") from None


def model_limits(model: str, revision: str | None, trust_remote_code: bool = False) -> tuple[int | None, ...]:
    """(positions, vocabulary, ``rope_length``) of the model, from its config alone; None where it names none.

    Raises UserError if it has no config, or one of an encoder-decoder.
    """
    _refuse_missing_folder(model)
    source, revision = base_of(model) if is_adapter(model) else (model, revision)
    with quiet_libraries():
        try:
            config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
        except Exception as error:
            raise UserError(f"--model {model}: cannot read its config ({_reason(error)})") from None
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"--model {model}: an encoder-decoder; give a causal language model")
    text = config.get_text_config(decoder=True)
    return getattr(text, "max_position_embeddings", None), getattr(text, "vocab_size", None), rope_length(config)


def checkpoint_eos(model: str, revision: str | None, tokenizer, trust_remote_code: bool = False) -> tuple[int, ...]:
    """The ids that end a continuation, as sampling/generate.py has them of a loaded model, without loading it."""
    with quiet_libraries():
        try:
            generation = GenerationConfig.from_pretrained(model, revision=revision)
        except OSError:  # none is stored: transformers makes it of the config
            config = AutoConfig.from_pretrained(model, revision=revision, trust_remote_code=trust_remote_code)
            generation = GenerationConfig.from_model_config(config)
    named = generation.eos_token_id
    ids = {*(named if isinstance(named, (list, tuple)) else [named]), tokenizer.eos_token_id} - {None}
    return tuple(sorted(int(token) for token in ids))


def load_model(model: str, revision: str | None, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False):
    """The causal language model in eval mode on its device; raises UserError in one line when it cannot load.

    A folder with a PEFT adapter gives its base model with the adapter in place, requiring grad what PEFT trains.
    Pickled weights are never read where there are safetensors, and never with code in them; a model that has nothing
    else is loaded with a warning. trust_remote_code: let the checkpoint bring Python code of its own, which will run.
    """
    _refuse_missing_folder(model)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    source, revision = base_of(model) if is_adapter(model) else (model, revision)
    settings = {"revision": revision, "dtype": dtype, "trust_remote_code": trust_remote_code}
    if device.type == "cuda" and importlib.util.find_spec("accelerate"):
        settings["device_map"] = {"": device}  # weights go straight to the GPU; otherwise the machine holds them all first
    if Path(source).is_dir():
        settings["use_safetensors"] = _has_safetensors(Path(source))
    try:
        with quiet_libraries():
            loaded, info = AutoModelForCausalLM.from_pretrained(source, weights_only=True, output_loading_info=True, **settings)
        if getattr(loaded, "_hf_peft_config_loaded", False):
            raise UserError(f"--model {model}: an adapter on the hub; download it and give its folder")
        _check_complete(source, info, loaded)
        loaded = loaded.to(device)  # on a GPU it is there already
        if is_adapter(model):
            loaded = load_adapter(model, loaded, device)
        _check_trainable(model, loaded)
        _check_causal(model, loaded.eval())
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(
                f"--model {model}: does not fit into memory; take a larger device, a smaller model, or --dtype bfloat16"
            ) from None
        raise UserError(f"--model {model}: cannot load it ({_reason(error)})") from None
    return loaded


def _check_complete(model: str, info: dict, loaded) -> None:
    """transformers fills what a checkpoint lacks with random numbers and drops what it does not know.

    Refuses both where it makes another model of it: weights that are lacking, and weights that belong to a layer the
    model has (the scales of quantised weights, a bias the config denies). Says what else is left unused.
    """
    unused = sorted(map(str, info.get("unexpected_keys") or ()))
    if scales := [name for name in unused if SCALES.search(name)]:
        raise UserError(
            f"--model {model}: the checkpoint is quantised, and {len(scales)} of its scales have no place in the "
            f"model (such as {scales[0]}), so its weights would be wrong; give the checkpoint with its "
            "quantization_config, or one that is not quantised"
        )
    for kind, names in (("lacks", info.get("missing_keys")), ("has another shape for", info.get("mismatched_keys"))):
        if names:
            first = min(str(name[0] if isinstance(name, tuple) else name) for name in names)
            raise UserError(
                f"--model {model}: the checkpoint {kind} {len(names)} of the weights its config asks for (such "
                f"as {first}), which would be random numbers; give a complete causal language model"
            )
    layers = {name for name, module in loaded.named_modules() if next(module.parameters(recurse=False), None) is not None}
    if dropped := [name for name in unused if name.rpartition(".")[0] in layers]:
        raise UserError(
            f"--model {model}: the checkpoint holds {len(dropped)} weights of layers of the model that the model "
            f"does not use (such as {dropped[0]}), so it would compute something else; correct its config.json"
        )
    if unused:
        print(
            f"warning: {model}: {len(unused)} weights of the checkpoint have no place in the model (such as "
            f"{unused[0]}); is its config the right one?",
            file=sys.stderr,
        )


def _check_trainable(model: str, loaded) -> None:
    """Weights that are kept as integers or in 8 bits have no gradient; under an adapter they need none."""
    narrow = [(name, p) for name, p in loaded.named_parameters() if p.dtype not in TRAINABLE]
    if narrow and not is_adapter(model):
        name, p = narrow[0]
        raise UserError(
            f"--model {model}: its weights stay quantised in memory ({name} is {str(p.dtype).split('.')[-1]}), and "
            "such weights have no gradient; give a checkpoint that is not quantised"
        )


@torch.no_grad()
def _check_causal(model: str, loaded) -> None:
    """What comes later must not change the logits before: refuse a bidirectional model."""
    last = min(7, loaded.get_input_embeddings().weight.shape[0] - 1)
    ids = torch.tensor([[1, 2, 3, 1, 2, last], [1, 2, 3, 1, 2, 0]], device=loaded.device)
    with quiet_libraries():
        logits = loaded(input_ids=ids.clamp(max=last), attention_mask=torch.ones_like(ids), use_cache=False).logits
    one, other = logits[:, :-1].double()
    if (one - other).abs().max() > max(1e-4, 8 * torch.finfo(logits.dtype).eps) * one.abs().max():
        raise UserError(
            f"--model {model}: a later token changes what comes before it, so this is not a causal language model; give one"
        )


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep transformers' and the hub's own reports and retries off stderr; what matters of them we say ourselves."""
    hub, level = python_logging.getLogger("huggingface_hub"), logging.get_verbosity()
    before = hub.level
    logging.set_verbosity_error()
    hub.setLevel(python_logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        hub.setLevel(before)


def warn_of_risks(model: str, trust_remote_code: bool) -> None:
    """One line on stderr for each way in which loading ``model`` may run code that came with it."""
    if trust_remote_code:
        print(f"warning: --trust_remote_code: Python code that comes with {model} will run here", file=sys.stderr)
    if (
        Path(model).is_dir()
        and not is_adapter(model)
        and not _has_safetensors(Path(model))
        and list(Path(model).glob("pytorch_model*.bin"))
    ):
        print(
            f"warning: {model}: has pickled weights only (.bin), no safetensors; loading tensors from them, code in "
            "them is refused",
            file=sys.stderr,
        )


def _has_safetensors(folder: Path) -> bool:
    return next(folder.glob("model*.safetensors*"), None) is not None


def fingerprint(model) -> str:
    """A short hash of the model: the same on every machine and device, another for another checkpoint or config.

    Reads the config's differences from its defaults, and the names, the shapes and 16 values of every parameter,
    rounded to bfloat16 so that loading the same checkpoint in another dtype changes nothing.
    """
    config = {
        name: value
        for name, value in model.config.to_diff_dict().items()
        if name not in NOT_THE_MODEL and not name.startswith("_")
    }
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for name, p in model.named_parameters():
        positions = torch.linspace(0, p.numel() - 1, 16, dtype=torch.float64).long().to(p.device)
        values = p.detach().flatten()[positions].to(torch.bfloat16).float().cpu().numpy()
        digest.update(f"{name} {tuple(p.shape)}".encode() + values.tobytes())
    return digest.hexdigest()[:16]


def weights_digest(model: str, revision: str | None = None) -> str:
    """A short hash of a local folder's weight and config files, from their names, sizes and samples of their bytes, an
    adapter's with its base model's; the commit of a hub id, "" where it is not known. Takes no more than a moment: it
    tells whether the weights are still those of a finished run.
    """
    if not Path(model).is_dir():
        cached = try_to_load_from_cache(model, "config.json", revision=revision)
        return Path(cached).parent.name if isinstance(cached, str) else ""
    digest = hashlib.sha256(weights_digest(*base_of(model)).encode() if is_adapter(model) else b"")
    files = [
        path
        for path in Path(model).glob("*")
        if path.is_file() and (path.suffix in (".safetensors", ".bin") or path.name in ("config.json", "adapter_config.json"))
    ]
    for path in sorted(files):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with open(path, "rb") as file:
            for part in range(64):
                file.seek(part * size // 64)
                digest.update(file.read(1024))
    return digest.hexdigest()[:16]


def rope_length(config) -> int | None:
    """Up to how many tokens the model's RoPE keeps its first factors; None where they depend on no length.

    LongRoPE rotates a whole sequence with other factors as soon as it is longer than the original context.
    """
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    by_layer = [each for each in rope.values() if isinstance(each, dict)] or [rope]
    lengths = [each.get("original_max_position_embeddings") for each in by_layer if each.get("rope_type") == "longrope"]
    return min((length for length in lengths if length), default=None)


def crosses_rope_length(length: int | None, prompt_length: int, max_new_tokens: int) -> bool:
    """Whether a continuation may begin under one RoPE factor and be scored under another. length: see ``rope_length``.

    The last token is never read. A prompt beyond the length is decoded and scored with the long factors throughout.
    """
    return length is not None and prompt_length <= length < prompt_length + max_new_tokens - 1


def check_prompt_length(context: int | None, prompt_ids: list[int], max_new_tokens: int, stored: bool = False) -> None:
    """Raise UserError when prompt and continuation do not fit the model's context.

    stored: the continuation was sampled before and has max_new_tokens tokens.
    """
    if context is not None and len(prompt_ids) + max_new_tokens > context:
        if stored:
            raise UserError(
                f"the prompt has {len(prompt_ids)} tokens and its longest continuation {max_new_tokens}, more than the model's "
                f"context of {context}; are these rollouts of another model? --skip_long leaves such prompts out"
            )
        raise UserError(
            f"the prompt has {len(prompt_ids)} tokens and --max_new_tokens is {max_new_tokens}, more than "
            f"the model's context of {context}; shorten it, lower --max_new_tokens, or pass --skip_long"
        )


def _refuse_missing_folder(model: str) -> None:
    # A path that does not exist would be asked of the hub, whose answer says nothing about the folder.
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1
    if looks_local and not Path(model).is_dir():
        raise UserError(f"--model {model}: there is no such folder")


def _say_that_the_hub_is_asked(model: str, revision: str | None) -> None:
    if not Path(model).is_dir() and not isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
        print(
            f"{model}: no folder here and not downloaded before, asking the Hugging Face hub (about a minute to give up "
            "without a network)",
            file=sys.stderr,
        )


def _reason(error: Exception) -> str:
    text = str(error).strip()
    if "trust_remote_code" in text:
        return "it brings Python code of its own; if you trust its source, pass --trust_remote_code"
    if "ignore_mismatched_sizes" in text:
        return "the checkpoint has another shape for some weights than its config asks for"
    if "huggingface.co" in text:
        return "no local folder of this name, and the hub has or gives no such model; check the spelling and the network"
    line = text.splitlines()[0] if text else ""
    return line if isinstance(error, (OSError, ValueError)) and line else f"{type(error).__name__}: {line}"
