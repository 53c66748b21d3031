"""What the tests of training share: a tokenizer and files made here (no network, no model), flags, a dry run, a checkpoint."""

import json
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet
import pytest

from data import prepare_parquet
from data.train_tiny_model import make_tokenizer
from data.verl_parquet import to_parquet
from Policy_Optimization import launch

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "Policy_Optimization" / "grpo_train.sh"
FAKE_KEY = "0123456789abcdef0123456789abcdef01234567"  # of the length of a W&B key


def save_chat_tokenizer(folder):
    """Save the tiny model's tokenizer to ``folder``, with the config AutoTokenizer needs; returns it."""
    from transformers import Qwen2Config

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    shape = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=1)
    config = Qwen2Config(vocab_size=len(tokenizer), intermediate_size=64, max_position_embeddings=1024, **shape)
    config.save_pretrained(folder)
    return tokenizer


def parquet(rows, split, data_source="arithmetic", reward="integer") -> bytes:
    """The bytes of a file that prepare_parquet.py would write of these rows."""
    settings = prepare_parquet.parse_args(["arithmetic"])
    return to_parquet(rows, split, replace(settings, data_source=data_source, reward=(reward,)))


def good(inputs, **changes) -> list[str]:
    """Flags of a run that passes every check."""
    flags = {
        "model": inputs / "my model",
        "train_files": inputs / "train.parquet",
        "val_files": inputs / "val.parquet",
        "run_dir": inputs / "run",
        "group_size": 8,
        "budget": 256,
        "update_budget": 128,
        "gpus_per_node": 1,
        "max_response_length": 64,
        **changes,
    }
    return [text for name, value in flags.items() if value is not None for text in (f"--{name}", str(value))]


def needs_verl():
    pytest.importorskip("verl", reason="verl is not installed")


def dry_run(inputs, *more, environment=None, **changes):
    passed = list(more[more.index("--") :]) if "--" in more else []
    flags = [*good(inputs, **changes), *[text for text in more if text not in passed]]
    launch.main([*flags, "--dry_run", *passed], environment or {"HOME": str(inputs)})


def values(overrides):
    return dict(override.lstrip("+").partition("=")[::2] for override in overrides)


def checkpoint(run_dir, step, complete=True):
    """What VERL leaves at a step; without the file that it writes last unless ``complete``."""
    folder = run_dir / "checkpoints" / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    if complete:
        (folder / "data.pt").write_bytes(b"x")


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def prepare(folder, kind, train, val=None, *flags):
    """What prepare_parquet.py makes of a file, read back: the rows of train and val."""
    sources = ["--train", str(train), *(["--val", str(val)] if val else [])]
    prepare_parquet.main([kind, *sources, "--out_dir", str(folder / "out"), *flags])
    return read(folder / "out" / "train.parquet"), read(folder / "out" / "val.parquet")
