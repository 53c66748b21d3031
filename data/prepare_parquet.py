r"""Write the two parquet files VERL trains from: train.parquet and val.parquet in one folder.

    python data/make_arithmetic.py --n 2000 --seed 1 --out outputs/train.jsonl
    python data/prepare_parquet.py arithmetic --train outputs/train.jsonl --val_size 200
    python data/prepare_parquet.py gsm8k --model Qwen/Qwen2.5-1.5B-Instruct --out_dir outputs/parquet/gsm8k
    python data/prepare_parquet.py math --train train.jsonl --val test.jsonl --model ./my_model --overlong drop
    python data/prepare_parquet.py jsonl --train a.jsonl --val b.jsonl --reward math --data_source mine
    python data/prepare_parquet.py jsonl --train a.jsonl --val_size 200 --reward integer format.py:score --reward_weights 1 0.2

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
ground_truth (text)}, extra_info {split, index, reward, columns}, and ground_truth, so that calculate_oracle_v.py reads the
same file. extra_info.columns is JSON: the other columns of the source, which a reward function of yours
(path/file.py:function) gets in training and evaluation alike; with such a function also the prompt, and the
ground_truth as the source has it. Seconds for GSM8K.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.chat_template import FLAG, json_object
from Gradient_evaluation.cli import Parser, importing, integer, number, run
from Gradient_evaluation.rewards.own_reward import CALL_LIMIT, check_weights
from Gradient_evaluation.runs.inputs.dataset import SUFFIXES
from Gradient_evaluation.runs.machine.files import one_line_errors, write_bytes_atomic
from Policy_Optimization.settings import reward_of_a_run, weight

GSM8K_REQUEST = "Reason step by step, then give the final answer alone on the last line after ####."
MATH = "DigitalLearningGmbH/MATH-lighteval"
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
    "math": Kind("problem", "solution", MATH_REQUEST, "math", MATH, "math", (MATH, None)),
    "jsonl": Kind("prompt", "ground_truth", "", "integer", "custom", "custom", None),
}


@dataclass(frozen=True)
class Settings:
    """The flags, by their names; reward and data_source are those of the kind where no flag says otherwise."""

    kind: str
    train: str | None
    val: str | None
    train_split: str
    val_split: str
    val_size: int | None
    seed: int
    reward: tuple[str, ...]
    reward_weights: tuple[float, ...] | None
    reward_timeout: float
    data_source: str
    model: str | None
    max_prompt_length: int
    chat_template_kwargs: dict[str, Any]
    overlong: str
    unusable: str
    drop_shared: bool
    out_dir: Path

    @property
    def form(self) -> Kind:
        return KINDS[self.kind]


def kind_name(text: str) -> str:
    """An argparse type: a key of KINDS; for a file the message is the whole command."""
    if text in KINDS:
        return text
    if Path(text).suffix in SUFFIXES:
        raise argparse.ArgumentTypeError(f"first what the file holds, then the file: jsonl --train {text} --val_size 100")
    raise argparse.ArgumentTypeError(f"{text!r} is unknown; choose from {', '.join(sorted(KINDS))} (jsonl: a file of yours)")


def parse_args(arguments: Sequence[str] | None) -> Settings:
    parser = Parser(prog="prepare_parquet.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", type=kind_name, metavar="KIND", help=f"what the sources hold: {', '.join(sorted(KINDS))}")
    parser.add_argument("--train", help="file, folder or hub id to train on (gsm8k and math: their hub ids)")
    parser.add_argument("--val", help="the same for validation")
    parser.add_argument("--train_split", default="train", help="split of a hub or saved data set (%(default)s)")
    parser.add_argument("--val_split", default="test", help="the same for validation (%(default)s)")
    parser.add_argument("--val_size", type=integer(1), help="instead of --val: hold out this many training rows")
    parser.add_argument("--seed", type=integer(0), default=0, help="of the held-out choice (%(default)s)")
    parser.add_argument(
        "--reward",
        type=reward_of_a_run,
        nargs="+",
        metavar="NAME_OR_FILE",
        help="integer, last_integer, math, or path/file.py:function; several are added up. Default: that of the kind; "
        "jsonl: integer",
    )
    parser.add_argument("--reward_weights", type=weight, nargs="+", metavar="W", help="of several rewards (1 each)")
    parser.add_argument(
        "--reward_timeout",
        type=number(0, low_included=False),
        default=CALL_LIMIT,
        help="seconds per call of a reward function of yours (%(default)g)",
    )
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
    flags = parser.parse_args(arguments)
    form = KINDS[flags.kind]
    flags.reward = tuple(flags.reward or [form.reward])
    flags.reward_weights = tuple(flags.reward_weights) if flags.reward_weights else None
    check_weights(flags.reward_weights, flags.reward)
    flags.data_source = flags.data_source or form.data_source
    flags.out_dir = flags.out_dir or Path("outputs") / "parquet" / flags.kind
    return Settings(**vars(flags))


def main(arguments: Sequence[str] | None = None) -> None:
    settings = parse_args(arguments)
    with importing():
        from data.verl_parquet import keep_short, load_both, to_parquet, without_shared
    problems = without_shared(keep_short(load_both(settings), settings), settings)
    with one_line_errors(settings.out_dir, "write"):
        settings.out_dir.mkdir(parents=True, exist_ok=True)
    written = {split: to_parquet(rows, split, settings) for split, rows in problems.items()}
    for split, data in written.items():
        path = settings.out_dir / f"{split}.parquet"
        write_bytes_atomic(path, data)
        print(f"{len(problems[split])} rows in {path}")


if __name__ == "__main__":
    run(main)
