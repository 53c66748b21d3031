"""One process or several: with ``torchrun --nproc-per-node N script.py ...`` they share the prompts.

Every process loads the whole model onto its own device. It takes the next prompt when it has finished one, so a slow prompt
delays no other process. A continuation depends on seed, prompt and index alone, so it does not matter which process measures
a prompt. The first process (rank 0) checks the input, sends the plan to the others, and collects the results. Only small
objects such as the plan and a counter are sent, no tensors. ``Progress`` is the progress line on stderr.
"""

from __future__ import annotations

import datetime
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.models import resolve_device

PATIENCE = datetime.timedelta(days=30)  # a process may have to wait for a slow prompt of another; torchrun reports a dead one


def gpu_identity(device: torch.device) -> tuple[str, str] | None:
    """(machine, GPU) of a CUDA device, the same in every process that uses it; None for other devices."""
    if device.type != "cuda":
        return None
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if named[0].startswith("MIG-") and device.index < len(named):  # slices of one GPU may share its UUID
        return platform.node(), named[device.index]
    return platform.node(), str(torch.cuda.get_device_properties(device).uuid)


def check_own_gpus(found: Sequence[tuple[str, str] | None]) -> None:
    """Raise UserError when two processes (``gpu_identity`` of each, in order of rank) use one GPU."""
    first: dict[tuple[str, str], int] = {}
    for rank, identity in enumerate(found):
        if identity is not None and first.setdefault(identity, rank) != rank:
            raise UserError(
                f"processes {first[identity]} and {rank} use the same GPU of {identity[0]}; lower "
                "--nproc-per-node, or give each task a GPU of its own (CUDA_VISIBLE_DEVICES)"
            )


class Processes:
    """The processes of this run, seen from one of them.

    rank: the number of this process. size: how many there are. device: the torch.device of this process. A context
    manager: leaving it ends the process group.
    """

    def __init__(self, device: str):
        """device: the flag --device. Raises UserError when the machine lacks it or processes would share a GPU."""
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        local = int(os.environ.get("LOCAL_RANK", 0)) if self.size > 1 else None
        self.device = resolve_device(device, local)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._store, self._done = None, 0
        if self.size > 1:
            self._join()
            self.from_first(check_own_gpus, self.gather(gpu_identity(self.device)))

    def _join(self) -> None:
        """Join the process group. gloo serves every device, because only objects are sent, no tensors."""
        store, _, _ = next(torch.distributed.rendezvous("env://"))
        torch.distributed.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=PATIENCE)
        self._store = torch.distributed.PrefixStore("prompts", store)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind, *error) -> None:
        if self.size > 1 and kind is None:  # after an error the others may never answer; torchrun ends them
            torch.distributed.destroy_process_group()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def from_first(self, make: Callable[..., Any], *args) -> Any:
        """What ``make(*args)`` returns in the first process, in every process. It must be picklable.

        A UserError is raised in the first process. The others exit with code 2 and print nothing.
        """
        found: list[Any] = [None]
        if self.is_first:
            try:
                found = [make(*args)]
            except UserError as error:
                found = [error]
        if self.size > 1:
            self._together(torch.distributed.broadcast_object_list, found)
        if isinstance(found[0], UserError):
            if self.is_first:
                raise found[0]
            sys.exit(2)
        return found[0]

    def share(self, items: Sequence) -> Iterator:
        """The items that this process takes. ``items`` is the same in every process; each goes to the first that is free."""
        if self.size == 1:
            yield from items
            return
        while (index := self._together(self._store.add, "taken", 1) - 1) < len(items):
            yield items[index]

    def count(self) -> int:
        """Count one more prompt as done; returns how many all processes together have done in this run."""
        self._done += 1
        return self._together(self._store.add, "done", 1) if self.size > 1 else self._done

    def gather(self, value: Any) -> list:
        """The ``value`` of every process, in order of rank, once all have called this."""
        found = [value] * self.size
        if self.size > 1:
            self._together(torch.distributed.all_gather_object, found, value)
        return found

    def _together(self, operation: Callable, *args) -> Any:
        try:
            return operation(*args)
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"process {self.rank} lost the others ({reason}); see the first error of this job; the same command continues"
            ) from None


class Progress:
    """The line ``12/40 [00:31<01:12, 2.6s/prompt, 410 continuations/s, mean V 0.43]`` of the first process, on a terminal.

    total: number of prompts. before: how many of them an earlier run has measured. name: of the value whose mean is shown.
    """

    def __init__(self, total: int, before: int, name: str, quiet: bool, processes: Processes):
        self.processes, self.name = processes, name
        self.bar = tqdm(
            total=total,
            initial=before,
            unit="prompt",
            leave=False,
            mininterval=0,
            disable=quiet or not processes.is_first or not sys.stderr.isatty(),
        )
        self.started, self.before = time.monotonic(), before
        self.values: list[float] = []

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error) -> None:
        self.bar.close()

    def done(self, value: float, continuations: int) -> None:
        """Count one more prompt. value: for the running mean. continuations: how many each prompt takes."""
        self.values.append(value)
        count = self.processes.count()
        rate = count * continuations / (time.monotonic() - self.started)
        mean = sum(self.values) / len(self.values)
        self.bar.set_postfix_str(f"{rate:,.0f} continuations/s, mean {self.name} {mean:.3g}", refresh=False)
        self.bar.update(self.before + count - self.bar.n)
