"""Fixtures of the launcher's tests: a folder with what a training run needs."""

import pytest
from launches import parquet, save_chat_tokenizer

from data.make_arithmetic import make_problems
from data.verl_parquet import Problem


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder with spaces in its name: model folder, train.parquet (64 rows), val.parquet (8)."""
    folder = tmp_path_factory.mktemp("the inputs") / "with 'quotes' and spaces"
    folder.mkdir()
    save_chat_tokenizer(folder / "my model")
    (folder / "my model" / "model.safetensors").write_bytes(b"weights")
    rows = [Problem(row["prompt"], str(row["ground_truth"]), "") for row in make_problems(72, seed=0)]
    for split, part in (("train", rows[:64]), ("val", rows[64:])):
        (folder / f"{split}.parquet").write_bytes(parquet(part, split))
    return folder
