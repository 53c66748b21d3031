"""What prepare_parquet.py makes of a file, read back."""

import json

import pyarrow.parquet

from data.prepare_parquet import main


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return pyarrow.parquet.read_table(path).to_pylist()


def prepare(folder, kind, train, val=None, *flags):
    sources = ["--train", str(train), *(["--val", str(val)] if val else [])]
    main([kind, *sources, "--out_dir", str(folder / "out"), *flags])
    return read(folder / "out" / "train.parquet"), read(folder / "out" / "val.parquet")
