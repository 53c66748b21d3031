"""What VERL's trainer holds of a step's rollouts -> rows of this toolkit's rollouts format, one per continuation.

rollout_rows(data, keys, step, reading)   the rows of a batch: {prompt_id, prompt, prompt_ids, response_ids, log_probs, ...}
to_parquet(rows)                          the bytes of their file
check_saving(cfg, directory, resumed)     UserError where VERL would not use the buffer that saves them (save_rollouts.py)

log_probs are the sampling engine's own, of the sampled tokens under the law that it sampled from. mask is there where tokens
of others (a tool's output) stand among the response's. reward is what training maximised, rewards its parts. step counts
from 1; the rollouts of step s are drawn from the weights after s - 1 updates, so their law names no model.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from data.verl_parquet import message_type
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import prompt_id, with_packed_columns
from Gradient_evaluation.sampling.stop_strings import decode_text
from Gradient_evaluation.utils import normalise_prompt
from Policy_Optimization.reward_fn import json_fields

FIELDS = (  # of a trajectory in VERL's queue
    "prompts",
    "responses",
    "response_mask",
    "rollout_log_probs",
    "rm_scores",
    "raw_prompt",
    "data_source",
    "reward_model",
    "extra_info",
    "extra_fields",
)
NO_PARTS = ("score", "acc", "pred")  # of what compute_score returns; the rest are the parts of a reward


class Reading(Protocol):
    """How tokens are read: the tokenizer, the ids that end a continuation, and the sampling law as run_identity has it."""

    tokenizer: Any
    eos: Sequence[int]
    law: Mapping[str, Any]


def step_file(directory: Path, step: int) -> Path:
    """The file of a training step in a folder of rollouts."""
    return directory / f"step_{step:06d}.parquet"


def as_lists(data: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The fields of a TensorDict as lists with one value per trajectory; of tensors, nested ones too, lists of numbers."""
    found = {}
    for name in data.keys():
        value = data[name]
        if hasattr(value, "unbind") and hasattr(value, "layout"):
            found[name] = [row.tolist() for row in value.unbind(0)]
        else:
            found[name] = value.tolist() if hasattr(value, "tolist") else list(value)
    return found


def rollout_rows(data: Mapping[str, Sequence], keys: Sequence[str], step: int, reading: Reading) -> list[dict[str, Any]]:
    """One row for each trajectory of a batch, the continuations of a prompt together and in the order of their session.

    data: {field: values}, one value per trajectory, of ``FIELDS`` those that VERL has. keys: VERL's names of the trajectories,
    UID_SESSION_INDEX. Left out are a session that an agent loop cut into several trajectories, which is no one continuation of
    its prompt, and an empty response.
    """
    names = [key.rsplit("_", 2) for key in keys]
    parts = Counter((uid, session) for uid, session, _ in names)
    groups = {uid: number for number, uid in enumerate(dict.fromkeys(uid for uid, _, _ in names))}
    order = sorted(
        (
            number
            for number, (uid, session, _) in enumerate(names)
            if parts[uid, session] == 1 and len(data["responses"][number])
        ),
        key=lambda number: (groups[names[number][0]], int(names[number][1])),
    )
    law = json.dumps(reading.law, sort_keys=True, ensure_ascii=False)
    return [
        {**_row({name: values[number] for name, values in data.items()}, reading), "step": step, "law": law} for number in order
    ]


def _row(one: Mapping[str, Any], reading: Reading) -> dict[str, Any]:
    """The columns of one trajectory that are its own."""
    tokens, info = list(one["responses"]), one.get("extra_info") or {}
    told = (one.get("extra_fields") or {}).get("reward_extra_info") or {}
    said = {"ground_truth": (one.get("reward_model") or {}).get("ground_truth"), "data_source": one.get("data_source")}
    columns = with_packed_columns({**said, "extra_info": json_fields(info)})
    columns["extra_info"].pop("columns", None)
    prompt = normalise_prompt(one["raw_prompt"])
    mask = [bool(counts) for counts in one["response_mask"]]
    reward = told.get("score", sum(one["rm_scores"]) if "rm_scores" in one else None)  # rm_scores are float32
    parts = {name: value for name, value in told.items() if name not in NO_PARTS and (value is None or type(value) is float)}
    return {
        "prompt_id": f"{prompt_id(prompt, columns['ground_truth']):016x}",
        "prompt": prompt,
        "prompt_ids": list(one["prompts"]),
        "columns": json.dumps({name: value for name, value in columns.items() if name != "prompt"}, ensure_ascii=False),
        "response_ids": tokens,
        "log_probs": one.get("rollout_log_probs"),
        "mask": None if all(mask) else mask,
        "text": decode_text(reading.tokenizer, tokens),
        "reward": None if reward is None else float(reward),
        "rewards": parts,
        "ended": bool(tokens) and tokens[-1] in reading.eos,
    }


def to_parquet(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """The bytes of a parquet file with these rows."""
    import pyarrow
    import pyarrow.parquet

    text, ids = pyarrow.string(), pyarrow.list_(pyarrow.int32())
    parts = dict.fromkeys(name for row in rows for name in row["rewards"])
    schema = {
        "prompt_id": text,
        "prompt": message_type([row["prompt"] for row in rows]),
        "prompt_ids": ids,
        "columns": text,
        "response_ids": ids,
        "log_probs": pyarrow.list_(pyarrow.float32()),
        "mask": pyarrow.list_(pyarrow.bool_()),
        "text": text,
        "reward": pyarrow.float64(),
        "rewards": pyarrow.struct(dict.fromkeys(parts, pyarrow.float64())) if parts else None,
        "ended": pyarrow.bool_(),
        "step": pyarrow.int64(),
        "law": text,
    }
    fields = {name: kind for name, kind in schema.items() if kind is not None}
    table = pyarrow.Table.from_pylist([{name: row[name] for name in fields} for row in rows], schema=pyarrow.schema(fields))
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def check_saving(cfg: Any, directory: Path, resumed: bool) -> list[str]:
    """Notes on what will be missing; UserError where VERL's configuration ``cfg`` has no place for a buffer that saves.

    resumed: the run is continued, so that rollouts in ``directory`` are its own.
    """
    sampler, flag = cfg.trainer.v1.sampler, f"--save_rollouts {directory}"
    if Path(str(sampler.custom_sampler.path)).name != "save_rollouts.py":
        raise UserError(f"{flag}: trainer.v1.sampler.custom_sampler.path={sampler.custom_sampler.path} takes its place")
    # VERL gives these settings to its own buffer alone, and under an asynchronous trainer a step has no one law
    for key, value, wanted in (
        ("trainer.use_v1", cfg.trainer.use_v1, True),
        ("trainer.v1.trainer_mode", cfg.trainer.v1.trainer_mode, "sync"),
        ("trainer.v1.sampler.sync_refill_failed_groups", sampler.sync_refill_failed_groups, False),
        ("algorithm.filter_groups.enable", bool((cfg.algorithm.get("filter_groups") or {}).get("enable")), False),
    ):
        if value != wanted:
            raise UserError(f"{flag}: needs {key}={wanted}, and it is {value}; change it, or leave --save_rollouts out")
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{flag}: is a file; give a folder")
    if not resumed and next(directory.glob("step_*.parquet"), None):
        raise UserError(f"{flag}: holds the rollouts of another run; give another folder")
    rollout, notes = cfg.actor_rollout_ref.rollout, []
    if not rollout.calculate_log_probs:
        notes.append("the rollouts are saved without log-probs (actor_rollout_ref.rollout.calculate_log_probs=False)")
    elif rollout.get("logprobs_mode") != "processed_logprobs":
        notes.append(f"the log-probs of saved rollouts are {rollout.get('logprobs_mode')}, before temperature and top_p")
    return notes
