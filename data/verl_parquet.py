"""Problems of a data set → the rows that VERL reads from parquet (prepare_parquet.py is the command)."""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from tqdm import tqdm

from data.answers import answer_of
from Gradient_evaluation.chat_template import FLAG, check_variables, tool_schemas, verl_text
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.rewards.own_reward import check_weights, is_own
from Gradient_evaluation.runs.inputs.dataset import Record, prompt_id, read_records, to_json, warn_on_stderr
from Gradient_evaluation.utils import Messages, normalise_prompt
from Policy_Optimization.reward_fn import Chosen, as_row, check_row, resolved

if TYPE_CHECKING:
    from data.prepare_parquet import Settings


class Problem(NamedTuple):
    """One row to be: messages, the answer as text, where it stands for messages to the user, and its other columns."""

    messages: Messages
    ground_truth: str
    where: str
    columns: Mapping[str, Any] = MappingProxyType({})


def read_source(source: str, split: str, configuration: str | None) -> Iterator[Record]:
    """The rows of a local file or folder, or of a hub data set (with its configuration, where it has several)."""
    if configuration is None or Path(source).expanduser().exists():
        yield from read_records(source, split)
        return
    import datasets

    try:
        data = datasets.load_dataset(source, configuration, split=split)
    except Exception as error:  # network, hub and builder errors are of many unrelated types
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise UserError(f"{source}: no local file or folder of this name, and the hub gave: {reason}") from None
    for number, record in enumerate(data, start=1):
        yield f"row {number} of {source} [{split}]", record


def load_problems(records: Iterator[Record], source: str, settings: Settings) -> list[Problem]:
    """The problems of one source, the first of those with the same prompt and answer.

    Raises UserError, naming the row, for a row without the columns of its kind, for a malformed prompt, and, unless --unusable
    drop, for an answer that the reward cannot use. Warns of the rows that are left out.
    """
    found: dict[int, Problem] = {}
    repeated, dropped = 0, []
    for where, record in tqdm(records, "reading", unit="row", disable=None, leave=False):  # None: not off a terminal
        try:
            problem = read_problem(where, record, settings)
        except UnusableAnswer as error:
            if settings.unusable == "refuse":
                fix = "correct it, choose another --reward, or pass --unusable drop"
                raise UserError(f"{where}: {error}; {fix}") from None
            dropped.append(where)
            continue
        key = prompt_id(problem.messages, problem.ground_truth)
        repeated += key in found
        found.setdefault(key, problem)
    if dropped:
        reason = f"whose answer the {' and '.join(settings.reward)} reward cannot use; the first: {dropped[0]}"
        warn_on_stderr(f"{source}: dropped {len(dropped)} rows {reason}")
    if repeated:
        warn_on_stderr(f"{source}: left out {repeated} rows with the prompt and answer of an earlier one")
    return list(found.values())


class UnusableAnswer(UserError):
    """The answer of a row is none that its reward can compare with."""


def read_problem(where: str, record: Record, settings: Settings) -> Problem:
    """One row of a source; UnusableAnswer, or UserError for a missing column or a malformed prompt."""
    form = settings.form
    for column in (form.prompt_column, form.answer_column):
        if column not in record:
            existing = ", ".join(map(str, record))[:200] or "none"
            raise UserError(f"{where}: no column {column!r} (columns: {existing}); {settings.kind} rows need it")
    messages = _messages(record[form.prompt_column], form.request, where, record.get("tools"))
    try:
        problem = Problem(
            messages,
            answer_of(record[form.answer_column], settings.kind, settings.reward),
            where,
            other_columns(record, settings),
        )
        _check_rewards(problem, settings)
        return problem
    except UserError as error:
        raise UnusableAnswer(str(error)) from None


def other_columns(record: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The columns of a source that VERL's rows do not have, of those that have a form in JSON."""
    found = {}
    for name, value in record.items():
        if name not in (settings.form.prompt_column, settings.form.answer_column, "tools", "__index_level_0__"):
            with contextlib.suppress(UserError):
                found[str(name)] = to_json(value)
    if any(map(is_own, settings.reward)) and not settings.form.request:  # as the evaluation has it of the source itself
        found["ground_truth"] = to_json(record[settings.form.answer_column])
    return found


def _check_rewards(problem: Problem, settings: Settings) -> None:
    """UserError where a reward cannot judge the continuations of a problem."""
    if any(map(is_own, settings.reward)) or len(settings.reward) > 1:
        rewards = resolved(Chosen(settings.reward, (), settings.reward_timeout))
        row = as_row(settings.data_source, problem.ground_truth, extra_info(problem, "", None, settings))
        try:
            check_row(row, rewards)
        except UserError as error:  # the caller says where, and what to do
            raise UserError(str(error).removeprefix(f"{row.where}: ").partition("; correct it or")[0]) from None


def extra_info(problem: Problem, split: str, index: int | None, settings: Settings) -> dict[str, Any]:
    """What VERL passes to the reward beside the answer: which reward it is, and the columns of the source, as JSON text."""
    own, columns = any(map(is_own, settings.reward)), dict(problem.columns)
    if own:
        columns["prompt"] = problem.messages
    reward: str = settings.reward[0]
    weights = check_weights(settings.reward_weights, settings.reward)
    if len(settings.reward) > 1 or weights != (1.0,):
        reward = json.dumps(dict(zip(settings.reward, weights)))
    text = json.dumps(columns, ensure_ascii=False) if columns else None
    return {"split": split, "index": index, "reward": reward, "columns": text}


def _messages(prompt: Any, request: str, where: str, tools: Any = None) -> Messages:
    try:
        messages = normalise_prompt(prompt)
        refuse_for_verl(messages, tools)
        if isinstance(messages, str):  # VERL renders messages only: a string becomes one user turn
            messages = [{"role": "user", "content": f"{messages}\n\n{request}" if request else messages}]
        json.dumps(messages, ensure_ascii=False).encode()
        return messages
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    except UnicodeEncodeError:
        raise UserError(f"{where}: the prompt holds half a character (a lone surrogate); remove it") from None


def refuse_for_verl(messages: str | Messages, tools: Any) -> None:
    """UserError for what VERL 0.9.1 cannot carry: tools of one row, and an answer that is to be continued."""
    if tool_schemas(tools):
        raise UserError(
            "the row has tools, and VERL 0.9.1 never reads them there (data.tool_config_path is for all rows); "
            "remove the column tools, or write them into the system message"
        )
    if not isinstance(messages, str) and messages[-1]["role"] == "assistant":
        raise UserError(
            "the prompt ends with a message of the assistant, and VERL 0.9.1 begins another one instead of "
            "continuing it; remove that message"
        )


def load_chat_tokenizer(model: str):
    """The tokenizer of ``model`` (hub id or folder); UserError if it has no chat template, which VERL needs."""
    from Gradient_evaluation.models import load_tokenizer

    tokenizer = load_tokenizer(model, None)
    if not getattr(tokenizer, "chat_template", None):
        raise UserError(f"--model {model}: its tokenizer has no chat template, which VERL needs; use an instruct model")
    return tokenizer


def split_by_length(
    problems: Sequence[Problem], tokenizer, limit: int, kwargs: Mapping[str, Any]
) -> tuple[list[Problem], list[Problem]]:
    """(problems of at most ``limit`` prompt tokens, the longer ones), counted as VERL counts them.

    kwargs: variables of the chat template.
    """
    short, long = [], []
    for problem in tqdm(problems, "counting tokens", unit="prompt", disable=None, leave=False):
        try:
            text = verl_text(tokenizer, problem.messages, kwargs)
        except UserError as error:
            raise UserError(f"{problem.where}: {error}") from None
        length = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        (short if length <= limit else long).append(problem)
    return short, long


def message_type(prompts: Sequence[Messages]):
    """The parquet type of prompts: role, content, and the other fields that their messages have."""
    import pyarrow

    text = pyarrow.string()
    fields = {"role": text, "content": text}
    names = {name: None for messages in prompts for message in messages for name in message if name not in fields}
    for name in names:
        values = [message.get(name) for messages in prompts for message in messages]
        try:
            fields[name] = pyarrow.infer_type(values)
        except pyarrow.ArrowException as error:
            reason = str(error).splitlines()[0][:120]
            raise UserError(f"the messages' {name} have no one type that parquet holds ({reason}); give it as text") from None
    return pyarrow.list_(pyarrow.struct(fields))


def as_verl_reads(problems: dict[str, list[Problem]]) -> dict[str, list[Problem]]:
    """The problems as they come back from parquet: every message has the fields of all messages, null where it had none."""
    import pyarrow

    kind = message_type([problem.messages for rows in problems.values() for problem in rows])

    def read_back(rows: list[Problem]) -> list[Problem]:
        messages = pyarrow.array([problem.messages for problem in rows], type=kind).to_pylist()
        return [problem._replace(messages=each) for problem, each in zip(rows, messages)]

    return {split: read_back(rows) for split, rows in problems.items()}


def to_parquet(problems: Sequence[Problem], split: str, settings: Settings) -> bytes:
    """The bytes of a parquet file with one row a problem, under the schema VERL's RLHFDataset reads."""
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.string()
    columns = {
        "data_source": text,
        "prompt": message_type([problem.messages for problem in problems]),
        "ability": text,
        "reward_model": pyarrow.struct({"style": text, "ground_truth": text}),
        "extra_info": pyarrow.struct({"split": text, "index": pyarrow.int64(), "reward": text, "columns": text}),
        "ground_truth": text,
    }
    rows = [
        {
            "data_source": settings.data_source,
            "prompt": problem.messages,
            "ability": settings.form.ability,
            "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
            "extra_info": extra_info(problem, split, index, settings),
            "ground_truth": problem.ground_truth,
        }
        for index, problem in enumerate(problems)
    ]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(columns)), buffer)
    return buffer.getvalue()


def load_both(settings: Settings) -> dict[str, list[Problem]]:
    """The problems of both splits, from two sources or one with some held out; UserError where one is missing."""
    hub, configuration = settings.form.hub or (None, None)
    if settings.val and settings.val_size:
        raise UserError("--val and --val_size: give one of them")
    sources = {"train": settings.train or hub}
    if not settings.val_size:
        sources["val"] = settings.val or hub
    for split, source in sources.items():
        if not source:
            other = ", or hold out rows of --train with --val_size N" if split == "val" else ""
            raise UserError(f"--{split}: {settings.kind} has no default source; give a file, a folder or a hub id{other}")
    problems = {}
    for split, source in sources.items():
        records = read_source(source, getattr(settings, f"{split}_split"), configuration if source == hub else None)
        problems[split] = load_problems(records, source, settings)
    return hold_out(problems["train"], sources["train"], settings) if settings.val_size else problems


def hold_out(rows: Sequence[Problem], source: str, settings: Settings) -> dict[str, list[Problem]]:
    """Both splits from one source: --val_size of its rows, chosen at random, are the validation."""
    if settings.val_size >= len(rows):
        raise UserError(f"--val_size {settings.val_size}: {source} has {len(rows)} rows")
    held_out = set(random.Random(settings.seed).sample(range(len(rows)), settings.val_size))
    return {
        "train": [row for number, row in enumerate(rows) if number not in held_out],
        "val": [rows[number] for number in sorted(held_out)],
    }


def keep_short(problems: dict[str, list[Problem]], settings: Settings) -> dict[str, list[Problem]]:
    """The problems whose prompts have at most --max_prompt_length tokens of --model; --overlong decides about the others."""
    more = [row.where for rows in problems.values() for row in rows for message in row.messages if len(message) > 2]
    if not settings.model and (more or settings.chat_template_kwargs):
        what = f"{more[0]}: has messages with more than role and content" if more else FLAG
        raise UserError(f"{what}: pass --model, whose chat template says what becomes of it")
    if not settings.model:
        warn_on_stderr("prompt lengths are not checked; pass --model to count them in its tokens")
        return problems
    tokenizer, short = load_chat_tokenizer(settings.model), {}
    check_variables(tokenizer, settings.chat_template_kwargs)
    problems = as_verl_reads(problems) if more else problems
    for split, rows in problems.items():
        short[split], long = split_by_length(rows, tokenizer, settings.max_prompt_length, settings.chat_template_kwargs)
        if long and settings.overlong == "refuse":
            raise UserError(
                f"{long[0].where}: {len(long)} of {len(rows)} {split} prompts, this one first, are longer than "
                f"{settings.max_prompt_length} tokens; raise --max_prompt_length or pass --overlong drop"
            )
        if long:
            warn_on_stderr(f"dropped {len(long)} {split} prompts of more than {settings.max_prompt_length} tokens")
    return short


def without_shared(problems: dict[str, list[Problem]], settings: Settings) -> dict[str, list[Problem]]:
    """Warn of training prompts that are in validation too and, under --drop_shared, leave them out of train.

    Raises UserError where no row is left for a split.
    """
    asked = {prompt_id(problem.messages, None) for problem in problems["val"]}  # whatever the answers say
    shared = [problem for problem in problems["train"] if prompt_id(problem.messages, None) in asked]
    if shared:
        done = "left out of train" if settings.drop_shared else "kept in both; --drop_shared leaves them out of train"
        warn_on_stderr(f"{len(shared)} training prompts are in validation too (first: {shared[0].where}): {done}")
    if settings.drop_shared:
        left_out = {id(problem) for problem in shared}
        problems = {**problems, "train": [problem for problem in problems["train"] if id(problem) not in left_out]}
    for split, rows in problems.items():
        if not rows:
            raise UserError(f"no rows are left for {split}; check the source and the flags that drop rows")
    return problems
