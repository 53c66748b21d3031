r"""Write the two parquet files VERL trains from: train.parquet and val.parquet in one folder.

    python data/make_arithmetic.py --n 2000 --seed 1 --out outputs/train.jsonl
    python data/prepare_parquet.py arithmetic --train outputs/train.jsonl --val_size 200
    python data/prepare_parquet.py gsm8k --model Qwen/Qwen2.5-1.5B-Instruct --out_dir outputs/parquet/gsm8k
    python data/prepare_parquet.py math --train train.jsonl --val test.jsonl --model ./my_model --overlong drop
    python data/prepare_parquet.py jsonl --train a.jsonl --val b.jsonl --reward math --data_source mine

    kind        columns read           answer taken from                  reward    default sources
    arithmetic  prompt, ground_truth   ground_truth                       integer   none
    gsm8k       question, answer       after the last ####                integer   openai/gsm8k (train, test)
    math        problem, solution      last balanced \boxed{}             math      DigitalLearningGmbH/MATH-lighteval
    jsonl       prompt, ground_truth   ground_truth, #### or \boxed{}     --reward  none

A source is a hub id or a local file or folder (JSONL, JSON, parquet). Every answer is checked with the reward
that will judge it. With ``--model`` the prompts are counted in that model's tokens, chat template included,
against ``--max_prompt_length``. Messages may have tool_calls and the like where VERL renders them whole. VERL takes
no tools row by row and does not continue an assistant's message: such rows are refused. Prompts that train and
validation share are reported. Columns written: data_source, prompt (messages), ability, reward_model {style,
ground_truth (text)}, extra_info {split, index, reward}, and ground_truth, so that calculate_oracle_v.py reads the
same file. Seconds for GSM8K.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import one_line_while_importing  # noqa: E402

if __name__ == "__main__":
    one_line_while_importing()

from tqdm import tqdm  # noqa: E402

from Gradient_evaluation.chat_template import FLAG, check_variables, json_object, tool_schemas, verl_text  # noqa: E402
from Gradient_evaluation.cli import Parser, integer, run  # noqa: E402
from Gradient_evaluation.errors import UserError  # noqa: E402
from Gradient_evaluation.runs.dataset import SUFFIXES, Record, prompt_id, read_records, warn_on_stderr  # noqa: E402
from Gradient_evaluation.runs.files import one_line_errors, write_bytes_atomic  # noqa: E402
from Gradient_evaluation.utils import REWARDS, Messages, last_boxed, normalise_prompt  # noqa: E402

GSM8K_REQUEST = "Reason step by step, then give the final answer alone on the last line after ####."
MATH_REQUEST = r"Reason step by step and put the final answer in \boxed{}."


class Kind(NamedTuple):
    """One kind of source: its columns, what is asked after the question, and how its answers are judged."""

    prompt_column: str
    answer_column: str
    request: str
    reward: str
    data_source: str
    ability: str
    hub: tuple[str, str | None] | None  # data set id and configuration


KINDS = {
    "arithmetic": Kind("prompt", "ground_truth", "", "integer", "arithmetic", "arithmetic", None),
    "gsm8k": Kind("question", "answer", GSM8K_REQUEST, "integer", "openai/gsm8k", "math", ("openai/gsm8k", "main")),
    "math": Kind(
        "problem",
        "solution",
        MATH_REQUEST,
        "math",
        "DigitalLearningGmbH/MATH-lighteval",
        "math",
        ("DigitalLearningGmbH/MATH-lighteval", None),
    ),
    "jsonl": Kind("prompt", "ground_truth", "", "integer", "custom", "custom", None),
}


class Problem(NamedTuple):
    """One row to be: messages, the answer as text, and where it stands for messages to the user."""

    messages: Messages
    ground_truth: str
    where: str


def read_source(source: str, split: str, configuration: str | None) -> Iterator[Record]:
    """Records of a local file or folder, or of a hub data set (with its configuration, where it has several)."""
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


def answer_text(value: Any, reward: str, kind: str) -> str:
    r"""The answer of a row as text: what follows the last ``####``, the last ``\boxed{}``, or the value itself.

    Raises UserError if ``reward`` could not compare with it, or where a kind promises a mark that is missing.

    >>> answer_text("48 / 2 = 24\n#### 1,024", "integer", "gsm8k"), answer_text(r"so \boxed{\frac12}", "math", "math")
    ('1024', '\\frac12')
    """
    if kind == "gsm8k" and not (isinstance(value, str) and "####" in value):
        raise UserError("the answer has no ####; is this GSM8K?")
    if kind == "math":
        value = _boxed_answer(value)
    checked = REWARDS[reward].check(value)
    if isinstance(checked, int):
        return str(checked)
    text = str(value)
    if "####" in text:
        return text.rpartition("####")[2].strip()
    boxed = last_boxed(text)
    return (text if boxed is None else boxed).strip()


def _boxed_answer(solution: Any) -> str:
    r"""What the last ``\boxed{}`` holds; a few solutions of MATH write ``\boxed 5$`` without braces."""
    answer = last_boxed(solution) if isinstance(solution, str) else None
    if answer is None and isinstance(solution, str):
        bare = re.findall(r"\\boxed\s+([^${}\\\s]+)\s*(?=\$)", solution)
        answer = bare[-1] if bare else None
    if answer is None:
        raise UserError(r"the solution has no balanced \boxed{}; is this MATH?")
    return answer


def load_problems(
    kind: str, records: Iterator[Record], reward: str, unusable: str, warn: Callable[[str], None]
) -> list[Problem]:
    """The problems of one source, the first of those with the same prompt and answer.

    A row without the columns of its kind or with a malformed prompt is refused. ``unusable`` says what is done
    with an answer the reward cannot use: "refuse" (UserError naming the row) or "drop" (counted by ``warn``).
    """
    form = KINDS[kind]
    found: dict[int, Problem] = {}
    repeated, dropped = 0, []
    for where, record in tqdm(records, "reading", unit="row", disable=None, leave=False):  # None: not off a terminal
        for column in (form.prompt_column, form.answer_column):
            if column not in record:
                existing = ", ".join(map(str, record))[:200] or "none"
                raise UserError(f"{where}: no column {column!r} (columns: {existing}); {kind} rows need it")
        messages = _messages(record[form.prompt_column], form.request, where, record.get("tools"))
        try:
            ground_truth = answer_text(record[form.answer_column], reward, kind)
        except UserError as error:
            if unusable == "refuse":
                fix = "correct it, choose another --reward, or pass --unusable drop"
                raise UserError(f"{where}: {error}; {fix}") from None
            dropped.append(where)
            continue
        key = prompt_id(messages, ground_truth)
        repeated += key in found
        found.setdefault(key, Problem(messages, ground_truth, where))
    if dropped:
        warn(f"dropped {len(dropped)} rows whose answer the {reward} reward cannot use; the first: {dropped[0]}")
    if repeated:
        warn(f"left out {repeated} rows with the prompt and answer of an earlier one")
    return list(found.values())


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
    problems: Sequence[Problem], tokenizer, limit: int, kwargs: Mapping[str, Any] = {}
) -> tuple[list[Problem], list[Problem]]:  # noqa: B006: never changed
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


def shared_prompts(train: Sequence[Problem], val: Sequence[Problem]) -> list[Problem]:
    """The training problems whose prompt is also asked in validation, whatever the answers say."""
    asked = {prompt_id(problem.messages, None) for problem in val}
    return [problem for problem in train if prompt_id(problem.messages, None) in asked]


def prompt_type(problems: Sequence[Problem]):
    """The parquet type of the prompts: role and content, and what other fields their messages have."""
    import pyarrow

    text = pyarrow.string()
    fields = {"role": text, "content": text}
    names = {name: None for problem in problems for message in problem.messages for name in message if name not in fields}
    for name in names:
        values = [message.get(name) for problem in problems for message in problem.messages]
        try:
            fields[name] = pyarrow.infer_type(values)
        except pyarrow.ArrowException as error:
            reason = str(error).splitlines()[0][:120]
            raise UserError(f"the messages' {name} have no one type that parquet holds ({reason}); give it as text") from None
    return pyarrow.list_(pyarrow.struct(fields))


def as_verl_reads(problems: dict[str, list[Problem]]) -> dict[str, list[Problem]]:
    """The problems with the messages that come back from parquet: in each the fields of all, null where it has none."""
    import pyarrow

    kind = prompt_type([problem for rows in problems.values() for problem in rows])
    return {
        split: [
            problem._replace(messages=messages)
            for problem, messages in zip(rows, pyarrow.array([problem.messages for problem in rows], type=kind).to_pylist())
        ]
        for split, rows in problems.items()
    }


def to_parquet(problems: Sequence[Problem], split: str, form: Kind, data_source: str, reward: str) -> bytes:
    """The bytes of a parquet file with one row a problem, under the schema VERL's RLHFDataset reads."""
    import pyarrow
    import pyarrow.parquet

    text = pyarrow.string()
    schema = pyarrow.schema(
        {
            "data_source": text,
            "prompt": prompt_type(problems),
            "ability": text,
            "reward_model": pyarrow.struct({"style": text, "ground_truth": text}),
            "extra_info": pyarrow.struct({"split": text, "index": pyarrow.int64(), "reward": text}),
            "ground_truth": text,
        }
    )
    rows = [
        {
            "data_source": data_source,
            "prompt": problem.messages,
            "ability": form.ability,
            "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
            "extra_info": {"split": split, "index": index, "reward": reward},
            "ground_truth": problem.ground_truth,
        }
        for index, problem in enumerate(problems)
    ]
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), buffer)
    return buffer.getvalue()


def kind_name(text: str) -> str:
    """An argparse type: a key of KINDS; a file in its place is answered with the whole command."""
    if text in KINDS:
        return text
    if Path(text).suffix in SUFFIXES:
        raise argparse.ArgumentTypeError(f"first what the file holds, then the file: jsonl --train {text} --val_size 100")
    raise argparse.ArgumentTypeError(f"{text!r} is unknown; choose from {', '.join(sorted(KINDS))} (jsonl: a file of yours)")


def parse_args(arguments: Sequence[str] | None):
    parser = Parser(prog="prepare_parquet.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", type=kind_name, metavar="KIND", help=f"what the sources hold: {', '.join(sorted(KINDS))}")
    parser.add_argument("--train", help="file, folder or hub id to train on (gsm8k and math: their hub ids)")
    parser.add_argument("--val", help="the same for validation")
    parser.add_argument("--train_split", default="train", help="split of a hub or saved data set (%(default)s)")
    parser.add_argument("--val_split", default="test", help="the same for validation (%(default)s)")
    parser.add_argument("--val_size", type=integer(1), help="instead of --val: hold out this many training rows")
    parser.add_argument("--seed", type=integer(0), default=0, help="of the held-out choice (%(default)s)")
    parser.add_argument("--reward", choices=sorted(REWARDS), help="default: that of the kind; jsonl: integer")
    parser.add_argument("--data_source", help="name of the data in VERL's metrics (default: that of the kind)")
    parser.add_argument("--model", help="count prompts in this model's tokens, against --max_prompt_length")
    parser.add_argument("--max_prompt_length", type=integer(1), default=512, help="tokens (%(default)s)")
    parser.add_argument(
        FLAG, type=json_object, default={}, metavar="JSON", help="variables of its chat template; give the launcher the same"
    )
    parser.add_argument("--overlong", choices=("refuse", "drop"), default="refuse", help="longer prompts (%(default)s)")
    parser.add_argument(
        "--unusable", choices=("refuse", "drop"), default="refuse", help="answers the reward cannot use (%(default)s)"
    )
    parser.add_argument("--drop_shared", action="store_true", help="leave prompts that are in validation out of train")
    parser.add_argument("--out_dir", type=Path, help="folder for the two files (default outputs/parquet/KIND)")
    return parser.parse_args(arguments)


def load_both(options) -> dict[str, list[Problem]]:
    """The problems of both splits, from two sources or one with some held out; UserError where one is missing."""
    hub, configuration = KINDS[options.kind].hub or (None, None)
    if options.val and options.val_size:
        raise UserError("--val and --val_size: give one of them")
    sources = {"train": options.train or hub}
    if not options.val_size:
        sources["val"] = options.val or hub
    for split, source in sources.items():
        if not source:
            other = ", or hold out rows of --train with --val_size N" if split == "val" else ""
            raise UserError(f"--{split}: {options.kind} has no default source; give a file, a folder or a hub id{other}")
    problems = {}
    for split, source in sources.items():
        records = read_source(source, getattr(options, f"{split}_split"), configuration if source == hub else None)
        problems[split] = load_problems(
            options.kind, records, options.reward, options.unusable, lambda text: warn_on_stderr(f"{source}: {text}")
        )
    if options.val_size:
        if options.val_size >= len(problems["train"]):
            raise UserError(f"--val_size {options.val_size}: {sources['train']} has {len(problems['train'])} rows")
        held_out = set(random.Random(options.seed).sample(range(len(problems["train"])), options.val_size))
        rows = problems["train"]
        problems = {
            "train": [row for number, row in enumerate(rows) if number not in held_out],
            "val": [rows[number] for number in sorted(held_out)],
        }
    return problems


def keep_short(problems: dict[str, list[Problem]], options) -> dict[str, list[Problem]]:
    """Refuse or drop, as --overlong says, the prompts of more than --max_prompt_length tokens of --model."""
    more = [row.where for rows in problems.values() for row in rows for message in row.messages if len(message) > 2]
    if not options.model and (more or options.chat_template_kwargs):
        what = f"{more[0]}: has messages with more than role and content" if more else FLAG
        raise UserError(f"{what}: pass --model, whose chat template says what becomes of it")
    if not options.model:
        warn_on_stderr("prompt lengths are not checked; pass --model to count them in its tokens")
        return problems
    tokenizer, kept = load_chat_tokenizer(options.model), {}
    check_variables(tokenizer, options.chat_template_kwargs)
    problems = as_verl_reads(problems) if more else problems
    for split, rows in problems.items():
        kept[split], long = split_by_length(rows, tokenizer, options.max_prompt_length, options.chat_template_kwargs)
        if long and options.overlong == "refuse":
            raise UserError(
                f"{long[0].where}: {len(long)} of {len(rows)} {split} prompts, this one first, are longer than "
                f"{options.max_prompt_length} tokens; raise --max_prompt_length or pass --overlong drop"
            )
        if long:
            warn_on_stderr(f"dropped {len(long)} {split} prompts of more than {options.max_prompt_length} tokens")
    return kept


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_args(arguments)
    form = KINDS[options.kind]
    options.reward = options.reward or form.reward
    options.data_source = options.data_source or form.data_source
    out_dir = options.out_dir or Path("outputs") / "parquet" / options.kind
    problems = keep_short(load_both(options), options)

    shared = shared_prompts(problems["train"], problems["val"])
    if shared:
        done = "left out of train" if options.drop_shared else "kept in both; --drop_shared leaves them out of train"
        warn_on_stderr(f"{len(shared)} training prompts are in validation too (first: {shared[0].where}): {done}")
    if options.drop_shared:
        left_out = {id(problem) for problem in shared}
        problems["train"] = [problem for problem in problems["train"] if id(problem) not in left_out]
    for split, rows in problems.items():
        if not rows:
            raise UserError(f"no rows are left for {split}; check the source and the flags that drop rows")

    with one_line_errors(out_dir, "write"):
        out_dir.mkdir(parents=True, exist_ok=True)
    written = {split: to_parquet(rows, split, form, options.data_source, options.reward) for split, rows in problems.items()}
    for split, data in written.items():
        write_bytes_atomic(out_dir / f"{split}.parquet", data)
        print(f"{len(problems[split])} rows in {out_dir / f'{split}.parquet'}")


if __name__ == "__main__":
    run(main)
