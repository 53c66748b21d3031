"""What would a GPU do with a block, without a GPU? Qwen2.5 at full width on fake tensors of a made-up accelerator.

    python tests/gpu_simulator.py                                  a Gram block of 64 x (46 + 32) tokens, 0.5B wide, 2 layers
    python tests/gpu_simulator.py --width 7B --layers 1 --batch 16 --response 512
    python tests/gpu_simulator.py --decode 8 --batch 500           8 decoded tokens of 500 continuations

Nothing is multiplied: a fake tensor has a shape, a dtype and a device. So a 7B layer takes seconds on a laptop. It prints
the peak memory beyond the weights, how many kernels would be launched, where the host would wait for the accelerator, and the
operations of the matrix products. A tensor of the CPU that meets one of the accelerator is an error, as on CUDA. Costs are
linear in the layers: run 1 and 3 and extrapolate. What the host reads is made up: every comparison of two tensors finds
them equal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Qwen2Config, masking_utils
from transformers.cache_utils import DynamicLayer

from Gradient_evaluation.gram import linear
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.sampling.generate import sample_continuations
from Gradient_evaluation.sampling.law import SamplingLaw
from Gradient_evaluation.sampling.log_probs import log_probs

WIDTHS = {  # of Qwen2.5: hidden, intermediate, heads, key-value heads, whether head and embedding are tied
    "0.5B": (896, 4864, 14, 2, True),
    "1.5B": (1536, 8960, 12, 2, True),
    "7B": (3584, 18944, 28, 4, False),
}
VOCABULARY = 151936
READ_BY_HOST = ("_local_scalar_dense", "item", "is_nonzero")
NO_KERNEL = ("empty", "detach", "_unsafe_view", "device")
MOST_FOUND = 4000  # distinct tokens, columns with a gradient: of what a search finds


class Accelerator(TorchDispatchMode):
    """Counts what is done on the made-up device; answers what its host would ask it."""

    def __init__(self, count: int):
        """count: what every integer that the host reads is said to be, such as how many rows still go on."""
        super().__init__()
        self.count = count
        self.kernels, self.flops, self.live, self.peak, self.largest = 0, 0, 0, 0, 0
        self.waits: Counter[str] = Counter()
        self.known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.partition("::")[2]
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not any(x.device.type == "gpu" for x in inputs):
            return self._note(func(*args, **(kwargs or {})))
        made_up = self._answer(name, args, kwargs or {})
        if made_up is not None:
            self.waits[f"{name} at {_where()}"] += 1
            self.kernels += 1
            return self._note(made_up)
        result = func(*args, **(kwargs or {}))
        is_view = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)
        if not is_view and not name.startswith(NO_KERNEL):
            self.kernels += 1
            if name in ("mm", "bmm", "addmm", "baddbmm"):
                left, right = args[-2:] if name in ("addmm", "baddbmm") else args[:2]
                self.flops += 2 * left.numel() * right.shape[-1]
        return self._note(result)

    def _answer(self, name: str, args, kwargs):
        """What the host reads, made up; None where it reads nothing."""
        x = args[0]
        if name == "equal":
            return True
        if name in READ_BY_HOST:
            return True if x.dtype == torch.bool else self.count if x.dtype == torch.int64 else 1.0
        if name == "nonzero":
            found = x.numel() if x.numel() < 2 * MOST_FOUND else min(x.numel(), MOST_FOUND)
            return torch.zeros(found, x.dim(), dtype=torch.int64, device=x.device)
        if name == "_unique2":
            found = torch.zeros(min(x.numel(), MOST_FOUND), dtype=x.dtype, device=x.device)
            nothing = torch.zeros(0, dtype=torch.int64, device=x.device)
            return found, torch.zeros(x.shape, dtype=torch.int64, device=x.device), nothing
        return None

    def _note(self, result):
        """Count the memory of new tensors, until they are gone."""
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.device.type == "gpu":
                storage = x.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.known or self.known[key]() is None:
                    self.known[key] = weakref.ref(storage, partial(self._gone, key, size))
                    self.live += size
                    self.peak, self.largest = max(self.peak, self.live), max(self.largest, size)
        return result

    def own(self, tensors) -> None:
        """Tensors that were there before: a view of one is no new memory."""
        for x in tensors:
            storage = x.untyped_storage()
            self.known[storage._cdata] = weakref.ref(storage)

    def _gone(self, key: int, size: int, _) -> None:
        self.live -= size
        self.known.pop(key, None)


def _where() -> str:
    ours = [f for f in traceback.extract_stack() if "Gradient_evaluation" in f.filename or "/transformers/" in f.filename]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"


@contextlib.contextmanager
def made_up_device(accelerator: Accelerator) -> Iterator[torch.device]:
    """While inside there is a device "gpu" of fake tensors; what such a tensor lacks (memory, a host copy) is made up."""
    if not hasattr(torch, "gpu"):
        backend_registration._setup_privateuseone_for_python_backend("gpu")
        torch.gpu.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    device = torch.device("gpu:0")
    plain_tensor, plain_cpu = torch.tensor, torch.Tensor.cpu

    def tensor(data, *args, device=None, **kwargs):
        x = plain_tensor(data, *args, **kwargs)
        on_host = device is None or torch.device(device).type == "cpu"
        return x if on_host else torch.zeros(x.shape, dtype=x.dtype, device=device)

    def wait(name: str, x: torch.Tensor):
        accelerator.waits[f"{name} at {_where()}"] += 1
        return x

    changes = [
        (torch, "tensor", tensor),
        (torch.Tensor, "data_ptr", lambda x: x.untyped_storage()._cdata + x.storage_offset() * x.element_size()),
        (torch.Tensor, "cpu", lambda x: plain_cpu(wait("cpu", x))),
        (torch.Tensor, "numpy", lambda x: np.zeros(tuple(x.shape))),
        (FakeTensor, "tolist", lambda x: np.full(tuple(wait("tolist", x).shape), 5).tolist()),
        (F, "scaled_dot_product_attention", _attention),
        (linear, "product", _product),
        (masking_utils, "is_tracing", lambda *args: False),
        (DynamicLayer, "lazy_initialization", _lazy_initialization),
    ]
    lifted = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        with contextlib.ExitStack() as changed:
            for owner, name, value in changes:
                changed.enter_context(mock.patch.object(owner, name, value))
            changed.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            yield device
    finally:
        torch._C._set_only_lift_cpu_tensors(lifted)


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Flash attention in half precision, as CUDA would choose; in float32 the products and the softmax."""
    assert attn_mask is None, "a mask would keep CUDA from flash attention"
    if query.dtype != torch.float32:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    repeat = query.shape[1] // key.shape[1]
    weights = (query @ key.repeat_interleave(repeat, 1).transpose(-1, -2)).softmax(-1)
    return weights @ value.repeat_interleave(repeat, 1)


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, y, out_dtype=torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x @ y


def _lazy_initialization(layer: DynamicLayer, keys: torch.Tensor, values: torch.Tensor) -> None:
    layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
    layer.keys, layer.values = keys[:, :, :0], values[:, :, :0]


def fake_model(width: str, n_layers: int, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Qwen2.5 of a width, its parameters fake tensors of the device."""
    hidden, intermediate, heads, key_value_heads, tied = WIDTHS[width]
    config = Qwen2Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        num_hidden_layers=n_layers,
        vocab_size=VOCABULARY,
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = torch.nn.Parameter(torch.empty(p.shape, dtype=dtype, device=device))
        for name, x in module._buffers.items():
            if x is not None:
                module._buffers[name] = torch.empty(x.shape, dtype=x.dtype, device=device)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.generation_config.eos_token_id = None
    return model.eval()


class NoTokenizer:
    """Enough of a tokenizer to sample: no token ends, and no text is read."""

    eos_token_id = None

    def decode(self, ids, **settings) -> str:
        return ""


def simulate(
    width: str = "0.5B",
    n_layers: int = 2,
    batch: int = 64,
    prompt: int = 46,
    response: int = 32,
    *,
    decode: int = 0,
    top_p: float = 0.95,
    dtype: torch.dtype = torch.bfloat16,
    **settings,
) -> dict:
    """One Gram block, or ``decode`` tokens of ``batch`` continuations → what the device did. settings: of ScoreGram."""
    accelerator = Accelerator(batch)
    with made_up_device(accelerator) as device:
        model = fake_model(width, n_layers, dtype, device)
        weights = sum(p.numel() * p.element_size() for p in model.parameters())
        accelerator.own([*model.parameters(), *model.buffers()])
        law = SamplingLaw(top_p=top_p, max_new_tokens=decode or response)
        if decode:
            sample = getattr(sample_continuations, "__wrapped__", sample_continuations)
            with torch.no_grad(), accelerator:
                sample(model, NoTokenizer(), [7] * prompt, np.full((batch, decode), 0.5), law, batch)
        else:
            combinations = np.ones((1, batch)) if settings.get("sketch_dim") else None
            with ScoreGram(model, partial(log_probs, law=law), **settings) as gram, accelerator:
                gram.block([7] * prompt, [[5] * response] * batch, weights=combinations)
    return {
        "weights_MiB": round(weights / 2**20),
        "peak_MiB": round(accelerator.peak / 2**20),
        "largest_MiB": round(accelerator.largest / 2**20),
        "kernels": accelerator.kernels,
        "tflop": round(accelerator.flops / 1e12, 3),
        "waits": dict(accelerator.waits.most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--width", choices=WIDTHS, default="0.5B")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=46)
    parser.add_argument("--response", type=int, default=32)
    parser.add_argument("--decode", type=int, default=0, help="tokens to decode instead of a block")
    parser.add_argument("--top_p", type=float, default=0.95)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--sketch_dim", type=int, default=16)
    parser.add_argument("--gram_dtype", default="float32")
    parser.add_argument("--gradient_checkpointing", action="store_true")
    args = parser.parse_args()
    settings = {name: getattr(args, name) for name in ("sketch_dim", "gram_dtype", "gradient_checkpointing")}
    found = simulate(
        args.width,
        args.layers,
        args.batch,
        args.prompt,
        args.response,
        decode=args.decode,
        top_p=args.top_p,
        dtype=getattr(torch, args.dtype),
        **settings,
    )
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
