"""Loading a causal language model and its tokenizer: device, dtype, and the checks that both scripts need."""

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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from Gradient_evaluation.adapters import base_of, is_adapter, load_adapter
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.forward import is_out_of_memory
from Gradient_evaluation.settings import DTYPES

TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*vocab*.json", "*.tiktoken", "tekken.json", "*.py")
TRAINABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Names of what quantised checkpoints store beside a layer's weights: scales, zero points, tables of indices.
SCALES = re.compile(
    r"(^|[._])((weight|input|output|activation|[qkv])_scale(_inv|_2)?|scale_inv|scales|qweight|qzeros|g_idx|"
    r"absmax|quant_map|quant_state\b.*|SCB|weight_packed|weight_shape|(weight|input)_zero_point)$"
)
NOT_THE_MODEL = ("transformers_version", "dtype", "torch_dtype", "architectures", "use_cache", "name_or_path")


def resolve_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device of this name. ``auto`` is CUDA if torch sees a GPU, else the CPU. A CUDA device has its index.

    local_rank: the number of this process among those on this machine; None for a single process. The process takes the
    GPU of that number. If it sees only one GPU (CUDA_VISIBLE_DEVICES for each task, a MIG slice), it takes that one.
    Raises UserError for a device that torch does not know or does not see.
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
    """Device and dtype in one line, ``device: NVIDIA H200 (cuda:0), bfloat16``; for the CPU with the reason."""
    if device.type == "cuda":
        name = f"{torch.cuda.get_device_name(device)} ({device})"
    else:
        has_cuda = torch.version.cuda or torch.version.hip
        name = f"{device} ({'torch sees no GPU' if has_cuda else 'this build of torch is without CUDA'})"
    return f"device: {name}, {str(dtype).split('.')[-1]}"


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of this name (``DTYPES``). ``auto`` is bfloat16 on CUDA and float32 elsewhere."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return getattr(torch, DTYPES[name])


def model_label(model: str) -> str:
    """The part of a model's name that goes into file names: the last component of the id or path."""
    return Path(model).resolve().name or "model"


def load_tokenizer(model: str, revision: str | None, trust_remote_code: bool = False):
    """The tokenizer of a local folder or hub id. Raises UserError if there is none or it cannot be loaded."""
    _refuse_missing_folder(model)
    source = model
    if is_adapter(model) and not list(Path(model).glob("tokenizer*")):  # its base model has one
        source, revision = base_of(model)
    if Path(source).is_dir() and not any(next(Path(source).glob(name), None) for name in TOKENIZER_FILES):
        raise UserError(f"--model {model}: has no tokenizer file (tokenizer.json or the like); save the tokenizer there")
    with quiet_libraries():
        try:
            _say_that_the_hub_is_asked(source, revision)
            return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
        except Exception as error:  # readers of damaged files raise errors of many types
            raise UserError(f"--model {model}: cannot load its tokenizer ({_reason(error)})") from None


def model_limits(model: str, revision: str | None, trust_remote_code: bool = False) -> tuple[int | None, ...]:
    """(longest sequence, vocabulary size, ``rope_length``) of the model, read from its config; None for what it lacks.

    Raises UserError if the config cannot be read, or is that of an encoder-decoder.
    """
    _refuse_missing_folder(model)
    source, revision = base_of(model) if is_adapter(model) else (model, revision)
    with quiet_libraries():
        try:
            config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
        except Exception as error:
            raise UserError(f"--model {model}: cannot read its config ({_reason(error)})") from None
    if getattr(config, "is_encoder_decoder", False):
        raise UserError(f"--model {model}: is an encoder-decoder; give a causal language model")
    text = config.get_text_config(decoder=True)
    return getattr(text, "max_position_embeddings", None), getattr(text, "vocab_size", None), rope_length(config)


def load_model(model: str, revision: str | None, device: torch.device, dtype: torch.dtype, trust_remote_code: bool = False):
    """The causal language model in eval mode on its device. Raises UserError, one line, if it cannot be loaded.

    A folder with a PEFT adapter gives the base model with the adapter in its layers. The parameters that PEFT trains
    require grad. Pickled weights are read only where there are no safetensors (``warn_of_risks`` warns of it), and code
    inside them is never run. trust_remote_code: allow Python code that comes with the checkpoint; it is run here.
    """
    _refuse_missing_folder(model)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    source, revision = base_of(model) if is_adapter(model) else (model, revision)
    settings = {"revision": revision, "dtype": dtype, "trust_remote_code": trust_remote_code}
    if device.type == "cuda" and importlib.util.find_spec("accelerate"):
        settings["device_map"] = {"": device}  # weights go straight to the GPU, not through the machine's memory
    if Path(source).is_dir():
        settings["use_safetensors"] = _has_safetensors(Path(source))
    try:
        with quiet_libraries():
            loaded, info = AutoModelForCausalLM.from_pretrained(source, weights_only=True, output_loading_info=True, **settings)
        if getattr(loaded, "_hf_peft_config_loaded", False):
            raise UserError(f"--model {model}: is an adapter on the hub; download it and give its folder")
        _check_complete(source, info, loaded)
        loaded = loaded.to(device)  # with a device_map it is there already
        if is_adapter(model):
            loaded = load_adapter(model, loaded, device)
        _check_trainable(model, loaded)
        _check_causal(model, loaded.eval())
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise UserError(
                f"--model {model}: does not fit into memory; use a larger device, a smaller model, or --dtype bfloat16"
            ) from None
        raise UserError(f"--model {model}: cannot load it ({_reason(error)})") from None
    return loaded


def _check_complete(model: str, info: dict, loaded) -> None:
    """Raise UserError for missing weights, and for unused weights without which it is another model.

    transformers fills missing weights with random numbers, and ignores weights that the model has no parameter for. If
    these belong to a layer of the model (scales of quantised weights, a bias that the config turns off), the model
    computes something else without them. For other unused weights there is a warning.
    """
    unused = sorted(map(str, info.get("unexpected_keys") or ()))
    if scales := [name for name in unused if SCALES.search(name)]:
        raise UserError(
            f"--model {model}: the checkpoint is quantised, and {len(scales)} of its scales would be ignored (such as "
            f"{scales[0]}), so its weights would be wrong; give the checkpoint with its quantization_config, or one "
            "that is not quantised"
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
            f"--model {model}: {len(dropped)} weights of the checkpoint would be ignored, although they belong to layers "
            f"of the model (such as {dropped[0]}), so it would compute something else; correct its config.json"
        )
    if unused:
        print(
            f"warning: {model}: {len(unused)} weights of the checkpoint are not used (such as {unused[0]}); check that "
            "its config.json is the right one",
            file=sys.stderr,
        )


def _check_trainable(model: str, loaded) -> None:
    """Raise UserError for weights in integers or 8 bits, which have no gradient. An adapter's base model may have them."""
    narrow = [(name, p) for name, p in loaded.named_parameters() if p.dtype not in TRAINABLE]
    if narrow and not is_adapter(model):
        name, p = narrow[0]
        raise UserError(
            f"--model {model}: its weights stay quantised in memory ({name} is {str(p.dtype).split('.')[-1]}), and "
            "such weights have no gradient; give a checkpoint that is not quantised"
        )


@torch.no_grad()
def _check_causal(model: str, loaded) -> None:
    """Raise UserError for a bidirectional model, in which a later token changes the logits of earlier positions."""
    last = min(7, loaded.get_input_embeddings().weight.shape[0] - 1)
    ids = torch.tensor([[1, 2, 3, 1, 2, last], [1, 2, 3, 1, 2, 0]], device=loaded.device)
    with quiet_libraries():
        logits = loaded(input_ids=ids.clamp(max=last), attention_mask=torch.ones_like(ids), use_cache=False).logits
    one, other = logits[:, :-1].double()
    if (one - other).abs().max() > max(1e-4, 8 * torch.finfo(logits.dtype).eps) * one.abs().max():
        raise UserError(
            f"--model {model}: a later token changes the logits before it, so this is not a causal language model; give one"
        )


@contextlib.contextmanager
def quiet_libraries() -> Iterator[None]:
    """Inside, transformers and the hub print no reports and retries; our own messages say what matters."""
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
            f"warning: {model}: has only pickled weights (.bin), no safetensors; tensors are loaded from them, code in "
            "them is refused",
            file=sys.stderr,
        )


def _has_safetensors(folder: Path) -> bool:
    return next(folder.glob("model*.safetensors*"), None) is not None


def fingerprint(model) -> str:
    """A short hash of the model: the same on every machine and device, different for another checkpoint or config.

    It covers the config entries that differ from their defaults, and the name, the shape and 16 values of every
    parameter. The values are rounded to bfloat16, so the dtype in which a checkpoint is loaded changes nothing.
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
    """A short hash that tells whether the weights are still those of a finished run. It takes only a moment.

    For a local folder it covers the names, the sizes and samples of the bytes of the weight and config files; for an
    adapter also those of its base model. For a hub id it is the commit in the local cache, "" if there is none.
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
    """The longest sequence, in tokens, that RoPE rotates by its short factors; None if there is one set of factors.

    LongRoPE rotates a whole sequence by its long factors as soon as it is longer than the original context.
    """
    rope = getattr(config.get_text_config(decoder=True), "rope_parameters", None) or {}
    by_layer = [each for each in rope.values() if isinstance(each, dict)] or [rope]
    lengths = [each.get("original_max_position_embeddings") for each in by_layer if each.get("rope_type") == "longrope"]
    return min((length for length in lengths if length), default=None)


def crosses_rope_length(length: int | None, prompt_length: int, max_new_tokens: int) -> bool:
    """Whether a continuation may begin with the short RoPE factors and be scored with the long ones.

    length: ``rope_length``. The last token is never an input, so it does not count. A prompt that is longer than the
    length is sampled and scored with the long factors alone.
    """
    return length is not None and prompt_length <= length < prompt_length + max_new_tokens - 1


def check_prompt_length(context: int | None, prompt_ids: list[int], max_new_tokens: int) -> None:
    """Raise UserError when prompt and continuation do not fit the model's context."""
    if context is not None and len(prompt_ids) + max_new_tokens > context:
        raise UserError(
            f"the prompt has {len(prompt_ids)} tokens and --max_new_tokens is {max_new_tokens}, together "
            f"more than the model's context of {context}; shorten the prompt, lower --max_new_tokens, or pass --skip_long"
        )


def _refuse_missing_folder(model: str) -> None:
    # transformers would look for the missing folder on the hub, and the error would not say that there is no folder.
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1
    if looks_local and not Path(model).is_dir():
        raise UserError(f"--model {model}: there is no such folder")


def _say_that_the_hub_is_asked(model: str, revision: str | None) -> None:
    if not Path(model).is_dir() and not isinstance(try_to_load_from_cache(model, "config.json", revision=revision), str):
        print(
            f"{model}: no folder here and not downloaded before; asking the Hugging Face hub (without a network this fails "
            "after about a minute)",
            file=sys.stderr,
        )


def _reason(error: Exception) -> str:
    text = str(error).strip()
    if "trust_remote_code" in text:
        return "it comes with Python code of its own; if you trust its source, pass --trust_remote_code"
    if "ignore_mismatched_sizes" in text:
        return "the checkpoint has another shape for some weights than its config asks for"
    if "huggingface.co" in text:
        return "no local folder of this name, and the hub did not give such a model; check the spelling and the network"
    line = text.splitlines()[0] if text else ""
    return line if isinstance(error, (OSError, ValueError)) and line else f"{type(error).__name__}: {line}"
