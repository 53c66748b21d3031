"""The flags both scripts share. Importing this file loads no library, so that a wrong flag is refused at once."""

from __future__ import annotations

import argparse

from Gradient_evaluation.chat_template import json_object
from Gradient_evaluation.cli import integer, number
from Gradient_evaluation.utils import REWARDS

DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "float64": "float64",
}  # name on the command line -> torch's
GRAM_DTYPES = ("float32", "bfloat16")


def add_shared_flags(parser: argparse.ArgumentParser) -> None:
    """Model, sampling law, reward, seed and machine; names and defaults as published where the paper has them."""
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="hub id or local folder (%(default)s)")
    parser.add_argument("--revision", default="main", help="branch, tag or commit of a hub model (%(default)s)")
    parser.add_argument("--temperature", type=number(0, low_included=False), default=1.0, help="(%(default)s)")
    parser.add_argument("--top_p", type=number(0, 1, low_included=False), default=0.95, help="(%(default)s)")
    parser.add_argument("--top_k", type=integer(0), default=0, help="keep the k likeliest tokens, 0 for all (0)")
    parser.add_argument("--max_new_tokens", type=integer(1), default=32, help="(%(default)s)")
    parser.add_argument(
        "--stop",
        nargs="+",
        default=[],
        metavar="TEXT",
        type=_stop_text,
        help=r"end a continuation at any of these strings (\n is a new line); the reward reads what is before; "
        "a special token such as <|im_end|> ends it as the end of sequence does",
    )
    parser.add_argument(
        "--chat_template_kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="""variables of the chat template, such as '{"enable_thinking": false}'""",
    )
    parser.add_argument(
        "--reward",
        choices=sorted(REWARDS),
        default="integer",
        help="integer: the last number is the answer; last_integer: the last digits, as the paper's scripts read "
        "them; math: Math-Verify (%(default)s)",
    )
    parser.add_argument("--seed", type=integer(0), default=0, help="(%(default)s)")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: bf16 on CUDA, else fp32")
    parser.add_argument("--device", default="auto", help="auto: CUDA if there is one, else the CPU")
    parser.add_argument(
        "--max_memory",
        type=number(0, low_included=False),
        metavar="GIB",
        help="memory the run may take, of the GPU or (on Linux) of the machine; batches shrink to fit",
    )
    parser.add_argument(
        "--skip_long", action="store_true", help="leave out prompts too long for the model's context, instead of refusing them"
    )
    parser.add_argument(
        "--trust_remote_code",
        action="store_true",
        help="let a checkpoint run Python code of its own; only for sources you trust",
    )
    parser.add_argument("--overwrite", action="store_true", help="start afresh instead of continuing")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _stop_text(text: str) -> str:
    r"""A stop string as typed in a shell, where \n and \t are easier to write than the characters."""
    if not text:
        raise argparse.ArgumentTypeError("is empty (an unset variable?): it would end every continuation at once; leave it out")
    return text.replace(r"\n", "\n").replace(r"\t", "\t")
