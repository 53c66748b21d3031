"""What can be checked of a training run without VERL: its data files, its model, and that no key is written down.

Every fault is a UserError of one line that names the setting, the file and the fix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.verl_parquet import Problem, refuse_for_verl, split_by_length
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.machine.files import one_line_errors
from Gradient_evaluation.utils import REWARDS, normalise_prompt
from Policy_Optimization.reward_fn import as_row, check_row, choose_reward, compute_score, resolved

MATH_ANSWERS_CHECKED = 50  # each is a question to Math-Verify; prepare_parquet.py has asked them all
SECRET = re.compile(r"(api_?key|token|secret|password)(=|$)", re.IGNORECASE)
PREPARE = "make it with data/prepare_parquet.py"


def read_training_file(path: str | Path, name: str) -> list[dict[str, Any]]:
    """The rows of a parquet file under the schema VERL trains from. ``name`` is the setting, for messages."""
    import pyarrow
    import pyarrow.parquet

    path = Path(path).expanduser()
    if not path.exists():
        raise UserError(f"--{name} {path}: no such file; {PREPARE}")
    if path.is_dir():
        raise UserError(f"--{name} {path}: is a folder; give a parquet file in it")
    if path.suffix != ".parquet":
        raise UserError(f"--{name} {path}: VERL reads files whose name ends in .parquet; {PREPARE}")
    columns = ["data_source", "prompt", "reward_model", "extra_info", "tools"]
    try:
        with one_line_errors(path, "read"):
            file = pyarrow.parquet.ParquetFile(path)
            table = file.read(columns=[column for column in columns if column in file.schema_arrow.names])
    except (pyarrow.ArrowException, ValueError) as error:
        raise UserError(f"--{name} {path}: cannot be read as parquet ({str(error).splitlines()[0][:120]})") from None
    for column in columns[:3]:
        if column not in table.column_names:
            raise UserError(f"--{name} {path}: has no column {column!r}, which VERL reads; {PREPARE}")
    if table.num_rows == 0:
        raise UserError(f"--{name} {path}: holds no rows; {PREPARE}")
    return table.to_pylist()


def check_loads_together(paths: Sequence[str | Path], name: str) -> None:
    """UserError, naming the file, where VERL's loader cannot read one of the files or join it to the first.

    VERL reads each file with ``datasets`` and concatenates them. The same is done here with one row of each file, because
    only the types of the columns matter: string and large_string, for example, cannot be joined.
    """
    import datasets
    import pyarrow
    import pyarrow.parquet

    found = []
    for path in map(Path, paths):
        try:
            batch = next(pyarrow.parquet.ParquetFile(path.expanduser()).iter_batches(batch_size=1))
            found.append(datasets.Dataset(pyarrow.Table.from_batches([batch])))
            datasets.concatenate_datasets(found)
        except Exception as error:  # of pyarrow and of datasets, of unrelated types
            reason = " ".join(f"{error}".split())
            if len(found) > 1:
                differing = [
                    column
                    for column in {**found[0].features, **found[-1].features}
                    if found[0].features.get(column) != found[-1].features.get(column)
                ]
                reason = f"the columns {', '.join(differing)} have other types than in {paths[0]}" if differing else reason
            raise UserError(
                f"--{name} {path}: VERL cannot load it: {reason[:300]}; write the files with one program "
                "(data/prepare_parquet.py)"
            ) from None


def check_rows(rows: Sequence[Mapping[str, Any]], path: str | Path, name: str, given: Mapping[str, Any]) -> None:
    """Each row has messages and an answer, as text, that its rewards can use, and its rewards give the first row a number.

    given: the keywords by which VERL calls compute_score. Raises UserError that names the first row at fault.
    """
    for number, row in enumerate(rows, start=1):
        where = f"--{name} {path}, row {number}"
        try:
            if isinstance(row["prompt"], str):
                raise UserError("the prompt is no list of messages with role and content")
            refuse_for_verl(normalise_prompt(row["prompt"]), row.get("tools"))
        except UserError as error:
            raise UserError(f"{where}: {error}; {PREPARE}") from None
        answer = row["reward_model"].get("ground_truth") if isinstance(row["reward_model"], dict) else None
        if not isinstance(answer, str):
            raise UserError(f"{where}: reward_model.ground_truth is {answer!r}, text is expected; {PREPARE}")
        try:
            _check_rewards(number, row, answer, given)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None


def _check_rewards(number: int, row: Mapping[str, Any], answer: str, given: Mapping[str, Any]) -> None:
    told = (row["data_source"], row.get("extra_info"))
    chosen = choose_reward(*told, **given)
    if "math" in chosen.names and number > MATH_ANSWERS_CHECKED:
        return
    if all(name in REWARDS for name in chosen.names):
        for name in chosen.names:
            REWARDS[name].check(answer)
        return
    check_row(as_row(told[0], answer, told[1]), resolved(chosen))
    if number == 1:
        compute_score(told[0], answer, answer, told[1], **given)


def check_model(model: str) -> dict[str, Any] | None:
    """The config.json of a local model folder; None for a plausible hub id, which is not looked up.

    Raises UserError for a missing folder, one without config, weights or tokenizer, and an implausible id.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1
        if folder.exists() or looks_local or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
            raise UserError(f"--model {model}: no such folder, and no hub id (NAME or OWNER/NAME)")
        return None
    with one_line_errors(folder, "read"):
        names = {path.name for path in folder.iterdir()}
    if "config.json" not in names:
        raise UserError(
            f"--model {folder}: has no config.json; merge a checkpoint first (docs/training.md, A checkpoint as a model)"
        )
    if not any(name.endswith((".safetensors", ".bin")) for name in names):
        raise UserError(f"--model {folder}: has no weights (*.safetensors or *.bin)")
    if not names & {"tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json"}:
        raise UserError(f"--model {folder}: has no tokenizer; save it there with tokenizer.save_pretrained")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return config.get("text_config") or config
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"--model {folder}: config.json cannot be read ({error})") from None


def check_model_fits(config: Mapping[str, Any], tokens: int, tensor_parallel: int) -> None:
    """UserError if prompt and response exceed the model's positions, or its heads cannot be shared among the GPUs."""
    positions, heads = config.get("max_position_embeddings"), config.get("num_attention_heads")
    if isinstance(positions, int) and tokens > positions:
        raise UserError(
            f"--max_prompt_length + --max_response_length is {tokens} tokens, the model has {positions} positions; "
            f"lower one of them"
        )
    if isinstance(heads, int) and heads % tensor_parallel:
        raise UserError(f"--tensor_parallel {tensor_parallel} does not divide the model's {heads} attention heads")


def count_overlong(rows: Sequence[Mapping[str, Any]], tokenizer, limit: int, kwargs: Mapping[str, Any]) -> int:
    """How many prompts have more than ``limit`` tokens under the chat template, given its variables ``kwargs``.

    VERL leaves these out while it loads the data.
    """
    problems = [Problem(row["prompt"], "", f"prompt {number}") for number, row in enumerate(rows, start=1)]
    return len(split_by_length(problems, tokenizer, limit, kwargs)[1])


def check_no_secret(overrides: Sequence[str], environment: Mapping[str, str]) -> None:
    """UserError if an override holds a key, because VERL prints and stores all overrides. The message does not show the key."""
    keys = [environment.get(name, "") for name in ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")]
    for override in overrides:
        name = override.partition("=")[0]
        if SECRET.search(name) or any(key and key in override for key in keys):
            raise UserError(f"{name.lstrip('+')}: looks like a key, which VERL would print; set it in the environment")
