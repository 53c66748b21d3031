"""When memory runs out: halve what is done at a time, go on, and keep the smaller size.

    with limited_memory(8.0, device):    # --max_memory: the allocator of CUDA, or the kernel, says no beyond it
    batch = Batch("--gen_bs", 256, least=1)
    batch.run(lambda size: sample(..., size), "problems.jsonl, line 7")

No size changes what is measured: a continuation is fixed by its index, and every block of at least four gives unbiased
estimates.
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
    """How many continuations are handled at a time.

    flag: what sets it, for messages; size: now; least: below this there is nothing left to halve.
    """

    def __init__(self, flag: str, size: int, least: int):
        self.flag, self.size, self.least = flag, size, least

    def run(self, work: Callable[[int], Result], where: str) -> Result:
        """``work(size)``, from the start with half the size each time it runs out of memory.

        Says once what it came to. Raises UserError, naming ``where``, when the least size is still too much.
        """
        asked = self.size
        while True:
            try:
                result = work(self.size)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
            self._halve(where)  # outside the handler, whose traceback keeps the tensors of the attempt alive
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
                "take a larger device"
            )
        self.size = max(self.least, self.size // 2)
        release_memory()


def release_memory() -> None:
    """Give what a failed attempt left behind back to the system."""
    gc.collect()
    _libc_call("malloc_trim", 0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def tune_allocator(device: torch.device) -> None:
    """Keep memory in one piece; call it before the model is loaded.

    On a CPU the C library gives large temporaries back at once and keeps small ones for what comes next. A block frees
    and asks for the same pieces a thousand times. Large ones, aligned as torch wants them, seldom fit into the holes they
    left: a heap of them grew to twice what was in use. Small ones are cheaper kept than asked for again. glibc alone knows
    the two settings (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD); elsewhere nothing happens.

    On CUDA torch's segments may grow (expandable_segments), unless the environment has settings of its own.
    """
    if device.type == "cpu":
        _libc_call("mallopt", -3, LARGE)
        _libc_call("mallopt", -1, 2**30)
    elif device.type == "cuda" and sys.platform == "linux" and not any(os.environ.get(name) for name in ALLOCATOR_SETTINGS):
        with contextlib.suppress(AttributeError, RuntimeError):  # the environment would be read too late: torch is loaded
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _libc_call(name: str, *arguments: int) -> None:
    """Call a function of the C library, where there is one of that name."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        getattr(ctypes.CDLL(None), name)(*arguments)


@contextlib.contextmanager
def limited_memory(gib: float | None, device: torch.device) -> Iterator[None]:
    """While inside, this process takes no more than ``gib`` GiB: of the GPU's memory on CUDA, else of the machine's.

    Enter it with the model loaded. Raises UserError when that already takes more, or the system knows no such limit
    (on a CPU: Linux does). Without a number there is none.
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
        raise UserError(f"--max_memory: can be had on CUDA and on Linux, not on {device.type} here; leave it out")
    import resource

    kib = {name: int(size) for name, size in re.findall(r"(\w+):\s+(\d+) kB", status.read_text())}
    _check_room(gib, kib["VmRSS"] * 1024)
    # The limit counts writable private memory, touched or not; what may still come is what the flag leaves.
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
