"""A platform "cpu" for VERL 0.9.1, registered through VERL's own hook, for tests without a GPU.

    PYTHONPATH=tests/verl_cpu VERL_PLATFORM=cpu VERL_USE_EXTERNAL_MODULES=verl_cpu_platform VERL_ENGINE_DEVICE=cuda

VERL imports this in every process. Besides the platform it makes three repairs, each where
VERL or vLLM takes an accelerator for granted: the process group, vLLM's repacked weights, pinned memory.
"""

import contextlib
import importlib.abc
import importlib.util
import os
import sys
import types
from datetime import timedelta

import torch
import verl.utils.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

VLLM_LINEAR = "vllm.model_executor.layers.utils"


class CpuDevice(str):
    """Where tensors go ("cpu"), which VERL also formats as the index of a device."""

    def __format__(self, specification):
        return "0"

    def __index__(self):
        return 0


def nothing(*_, **__):
    return None


def zero(*_, **__):
    return 0


class CpuModule(types.ModuleType):
    """What VERL calls on torch.cuda, answered for a machine without device memory; the rest is torch.cpu's."""

    empty_cache = ipc_collect = synchronize = set_device = reset_peak_memory_stats = staticmethod(nothing)
    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = staticmethod(zero)
    get_rng_state, set_rng_state = staticmethod(torch.get_rng_state), staticmethod(torch.set_rng_state)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    mem_get_info = staticmethod(lambda *_: (0, 0))
    get_device_name = staticmethod(lambda *_: "CPU")
    is_available = staticmethod(lambda: False)

    def __getattr__(self, name):
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    """One CPU as one logical GPU of Ray (ray.init(num_gpus=1)), with gloo between processes."""

    device_name = vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: CPU_MODULE)
    set_device = synchronize = set_allocator_settings = empty_cache = nothing
    profiler_start = profiler_stop = cudart = nothing

    def is_available(self):
        return True

    def current_device(self):
        return CpuDevice("cpu")

    def device_count(self):
        return 1

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index=0):
        return (None, None)

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, message):
        yield

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False


CPU_MODULE = CpuModule("verl_cpu_device")


def start_process_group(timeout_second=None, backend=None):
    """VERL's own asks for a backend per device and finds none for a platform it does not know: gloo alone here."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            backend="gloo",
            rank=int(os.environ.get("RANK", 0)),
            world_size=int(os.environ.get("WORLD_SIZE", 1)),
            timeout=timedelta(seconds=timeout_second) if timeout_second else None,
            init_method=os.environ.get("DIST_INIT_METHOD"),
        )


def keep_weights(module):
    """vLLM-CPU repacks a linear layer's weights and drops the originals, which VERL then cannot update: keep them."""

    def plain_linear(layer, remove_weight):
        layer.cpu_linear = torch.nn.functional.linear

    module.dispatch_cpu_unquantized_gemm = plain_linear


class RepairOnImport(importlib.abc.MetaPathFinder):
    """Calls ``keep_weights`` on vLLM's module right after its import, once."""

    def find_spec(self, name, path, target=None):
        if name != VLLM_LINEAR:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_repair(module):
            execute(module)
            keep_weights(module)

        spec.loader.exec_module = execute_and_repair
        return spec


verl.utils.distributed.initialize_global_process_group_ray = start_process_group
torch.Tensor.pin_memory = lambda self, *_, **__: self  # pinning needs an accelerator
if VLLM_LINEAR in sys.modules:
    keep_weights(sys.modules[VLLM_LINEAR])
else:
    sys.meta_path.insert(0, RepairOnImport())
