"""The flags both scripts share, the law they describe, and the prompts as the model will read them."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from Gradient_evaluation.cli import UserError, integer, number
from Gradient_evaluation.models import DTYPES, check_prompt_length, model_label, model_limits
from Gradient_evaluation.run_files import at_row
from Gradient_evaluation.sampling import SamplingLaw
from Gradient_evaluation.tables import Row
from Gradient_evaluation.utils import REWARDS, format_prompt


def add_shared_flags(parser: argparse.ArgumentParser) -> None:
    """Model, sampling law, reward, seed and machine; names and defaults as published where the paper has them."""
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="hub id or local folder (%(default)s)")
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    parser.add_argument("--temperature", type=number(0, low_included=False), default=1.0, help="(%(default)s)")
    parser.add_argument("--top_p", type=number(0, 1, low_included=False), default=0.95, help="(%(default)s)")
    parser.add_argument("--top_k", type=integer(0), default=0, help="keep the k likeliest tokens, 0 for all (0)")
    parser.add_argument("--max_new_tokens", type=integer(1), default=32, help="(%(default)s)")
    parser.add_argument("--stop", nargs="+", default=[], metavar="TEXT", type=_stop_text,
                        help=r"end a continuation at any of these strings (\n is a new line); the reward reads what is before")
    parser.add_argument("--reward", choices=sorted(REWARDS), default="integer",
                        help="integer: the last integer equals the answer; math: Math-Verify (%(default)s)")
    parser.add_argument("--seed", type=integer(0), default=0, help="(%(default)s)")
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: bf16 on CUDA, else fp32")
    parser.add_argument("--device", default="auto", help="auto: CUDA if there is one, else the CPU")
    parser.add_argument("--max_memory", type=number(0, low_included=False), metavar="GIB",
                        help="memory the run may take, of the GPU or (on Linux) of the machine; batches shrink to fit")
    parser.add_argument("--skip_long", action="store_true",
                        help="leave out prompts too long for the model's context, instead of refusing them")
    parser.add_argument("--trust_remote_code", action="store_true",
                        help="let a checkpoint run Python code of its own; only for sources you trust")
    parser.add_argument("--overwrite", action="store_true", help="start afresh instead of continuing")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")


def _stop_text(text: str) -> str:
    r"""A stop string as typed in a shell, where \n and \t are easier to write than the characters."""
    return text.replace(r"\n", "\n").replace(r"\t", "\t")


def law_of(args: argparse.Namespace) -> SamplingLaw:
    """The sampling law the flags describe."""
    return SamplingLaw(args.temperature, args.top_p, args.top_k, args.max_new_tokens, tuple(args.stop))


def law_record(args: argparse.Namespace, tokenizer) -> dict:
    """What decides a continuation's distribution and reward, as stored with every row and result.

    A local model goes by its folder's name, so that a table may move between machines; its weights' fingerprint,
    stored beside, tells two folders of one name apart.
    """
    model = model_label(args.model) if Path(args.model).is_dir() else args.model
    return {"model": model, "revision": args.revision, "temperature": args.temperature, "top_p": args.top_p,
            "top_k": args.top_k, "max_new_tokens": args.max_new_tokens, "stop": list(args.stop),
            "reward": args.reward, "prompt_format": prompt_format(tokenizer)}


def prompt_format(tokenizer) -> str:
    """A short hash of what the tokenizer and its chat template make of a fixed prompt, as string and as messages."""
    text = "What is 12 + 34? Answer with one integer.\n"
    made = [format_prompt(tokenizer, prompt) for prompt in (text, [{"role": "user", "content": text}])]
    return hashlib.sha256(json.dumps(made).encode()).hexdigest()[:16]


def tokenised(rows: Sequence[Row], args: argparse.Namespace, tokenizer) -> tuple[list[Row], list[list[int]], int]:
    """(rows, token ids of their prompts, number left out): before the model is loaded, every prompt is checked.

    Raises UserError naming the row of a prompt that the tokenizer refuses, or that does not fit the model's context;
    the latter are left out and counted under --skip_long.
    """
    context, vocabulary = model_limits(args.model, args.revision, args.trust_remote_code)
    kept, prompts = [], []
    for row in rows:
        prompt_ids = at_row(row, format_prompt, tokenizer, row.prompt)
        if vocabulary is not None and max(prompt_ids) >= vocabulary:
            raise UserError(f"{row.where}: the tokenizer makes token {max(prompt_ids)} of this prompt, the model knows "
                            f"{vocabulary}; they do not belong together, check --model {args.model}")
        if not args.skip_long:
            at_row(row, check_prompt_length, context, prompt_ids, args.max_new_tokens)
        elif context is not None and len(prompt_ids) + args.max_new_tokens > context:
            continue
        kept.append(row)
        prompts.append(prompt_ids)
    if not kept:
        raise UserError(f"--skip_long: every one of the {len(rows)} prompts is too long for the model's context of "
                        f"{context} with --max_new_tokens {args.max_new_tokens}; lower that, or shorten them")
    return kept, prompts, len(rows) - len(kept)
