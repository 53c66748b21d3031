"""What CUDA would say of a block and of decoding, on fake tensors of a made-up accelerator (gpu_simulator.py)."""

import subprocess
import sys

import pytest
import torch
from gpu_simulator import Accelerator, made_up_device, simulate
from scripts import ROOT

pytestmark = pytest.mark.slow  # and in a process of its own: the device stays registered


def test_a_tensor_of_the_host_among_those_of_the_device_is_an_error():
    accelerator = Accelerator(4)
    with (
        made_up_device(accelerator) as device,
        accelerator,
        pytest.raises(RuntimeError, match="two different devices|on the same device"),
    ):
        torch.ones(4, device=device) + torch.ones(4)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sketch_dim": 16},
        {"sketch_dim": 16, "gradient_checkpointing": True},
        {"gram_dtype": "bfloat16"},
        {"dtype": torch.float32},
        {"top_p": 1.0},
    ],
    ids=str,
)
def test_a_block_mixes_no_devices_and_keeps_nothing_parameter_sized(settings):
    found = {n: simulate("0.5B", n, batch=16, prompt=46, response=32, **settings) for n in (1, 3)}
    logits = 16 * 32 * 151936 * 4 / 2**20
    assert found[3]["largest_MiB"] <= 1.01 * logits  # float32 logits of the block: no table of the embedding's size
    layer = (found[3]["weights_MiB"] - found[1]["weights_MiB"]) / 2
    more = (found[3]["peak_MiB"] - found[1]["peak_MiB"]) / 2
    shared = 46 + 16 * 32  # positions whose activations are kept
    activations = 0 if settings.get("gradient_checkpointing") else shared * (8 * 896 + 6 * 4864) * 4 / 2**20
    assert more < activations + 0.1 * layer


def test_a_7b_block_mixes_no_devices():
    assert simulate("7B", 1, batch=8, response=64, sketch_dim=16)["tflop"] > 0


def test_decoding_mixes_no_devices_and_waits_few_times_a_token():
    found = simulate("0.5B", 2, batch=64, decode=8)
    assert sum(found["waits"].values()) <= 3 * 8, found["waits"]


def test_the_command_prints_what_it_found():
    done = subprocess.run([sys.executable, "tests/gpu_simulator.py", "--layers", "1"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and '"peak_MiB"' in done.stdout
