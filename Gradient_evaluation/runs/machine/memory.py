"""When memory runs out: halve the batch, try again, and stay at the smaller size.

    with limited_memory(8.0, device):    # --max_memory: CUDA's allocator or the kernel refuses more
    batch = Batch("--gen_bs", 256, least=1)
    batch.run(lambda size: sample(..., size), "problems.jsonl, line 7")

The size does not change what is measured: a continuation depends on its index and not on the batch, and every block of at
least four gives unbiased estimates.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.forward import is_out_of_memory

GIB = 2**30
LARGE = 2**22  # bytes
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
Result = TypeVar("Result")


class Batch:
    """How many continuations are processed at a time.

    flag: the flag that sets it, for messages. size: the present size. least: the smallest size that is tried.
    """

    def __init__(self, flag: str, size: int, least: int):
        self.flag, self.size, self.least = flag, size, least

    def run(self, work: Callable[[int], Result], where: str) -> Result:
        """What ``work(size)`` returns. When it runs out of memory, it starts again with half the size.

        A note on stderr says which size worked. Raises UserError, naming ``where``, when the least size is too large.
        """
        asked = self.size
        while True:
            try:
                result = work(self.size)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            self._halve(where)  # outside of except, where the traceback still refers to the tensors of the attempt
        if self.size < asked:
            print(
                f"note: {where}: out of memory with {asked} continuations at a time ({self.flag}); going on with {self.size}",
                file=sys.stderr,
            )
        return result

    def _halve(self, where: str) -> None:
        if self.size <= self.least:
            raise UserError(
                f"{where}: out of memory with {self.size} continuation{'s' * (self.size > 1)} at a time; "
                "lower --max_new_tokens, raise --max_memory if it is set, try --gradient_checkpointing, or "
                "use a larger device"
            )
        self.size = max(self.least, self.size // 2)
        release_memory()


def release_memory() -> None:
    """Give the memory of a failed attempt back to the system."""
    gc.collect()
    _libc_call("malloc_trim", 0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def tune_allocator(device: torch.device) -> None:
    """Set the allocator so that memory is not fragmented. Call it before the model is loaded.

    On a CPU, the C library returns large temporaries to the system at once, and reuses the memory of small ones. Measuring
    a block allocates and frees the same sizes a thousand times. Large temporaries, aligned as torch needs them, seldom fit
    into the gaps that earlier ones left: a heap with them grew to twice what was in use. For small ones reuse is cheaper.
    Only glibc has the two settings (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD); with another C library nothing happens.

    On CUDA, torch's segments may grow (expandable_segments), unless the environment has allocator settings of its own.
    """
    if device.type == "cpu":
        _libc_call("mallopt", -3, LARGE)
        _libc_call("mallopt", -1, 2**30)
    elif device.type == "cuda" and sys.platform == "linux" and not any(os.environ.get(name) for name in ALLOCATOR_SETTINGS):
        with contextlib.suppress(AttributeError, RuntimeError):  # torch is loaded and reads no environment variable any more
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _libc_call(name: str, *arguments: int) -> None:
    """Call a function of the C library, where there is one of that name."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        getattr(ctypes.CDLL(None), name)(*arguments)


@contextlib.contextmanager
def limited_memory(gib: float | None, device: torch.device) -> Iterator[None]:
    """Inside, this process uses at most ``gib`` GiB: of the GPU's memory on CUDA, else of the machine's. None: no limit.

    Enter it after the model is loaded. Raises UserError if the model already takes more, or if the system has no such
    limit (on a CPU only Linux has one).
    """
    if gib is None:
        yield
        return
    if device.type == "cuda":
        taken, total = torch.cuda.memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
        _check_room(gib, taken)
        torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total), device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    status = Path("/proc/self/status")
    if device.type != "cpu" or not status.exists():
        raise UserError(f"--max_memory: works on CUDA and on Linux, not on {device.type} here; leave it out")
    import resource

    kib = {name: int(size) for name, size in re.findall(r"(\w+):\s+(\d+) kB", status.read_text())}
    _check_room(gib, kib["VmRSS"] * 1024)
    # The kernel limits all writable private memory (VmData), used or not; the flag limits what is used (VmRSS). So VmData may
    # grow by as much as the flag leaves beyond VmRSS.
    most = int(kib["VmData"] * 1024 + gib * GIB - kib["VmRSS"] * 1024)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _check_room(gib: float, taken: int) -> None:
    if taken >= gib * GIB:
        raise UserError(f"--max_memory {gib:g}: the loaded model already takes {taken / GIB:.2f} GiB; raise it")
