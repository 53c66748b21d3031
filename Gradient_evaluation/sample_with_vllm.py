"""Sample with vLLM, many prompts at once → rollouts that run_tracecov.py measures.

    python Gradient_evaluation/sample_with_vllm.py --model Qwen/Qwen2.5-1.5B-Instruct --dataset Kyleyee/arithmetic-test \
        --n 64 --top_p 1 --max_new_tokens 512 --tensor_parallel_size 2 --save_rollouts outputs/vllm/rollouts
    python Gradient_evaluation/run_tracecov.py --rollouts outputs/vllm/rollouts --model Qwen/Qwen2.5-1.5B-Instruct \
        --reward math --top_p 1 --max_new_tokens 512 --save_json outputs/vllm

It needs vLLM (tried with 0.27), in an environment of its own if need be: the files are all that the other script takes. For
each prompt it writes one parquet file with n continuations: their token ids, the log-prob of each token under the sampling
law of the flags (vLLM's processed_logprobs), the ground truth, and the law. Of the checkpoint's generation_config only the
ends of sequence are used. Run the same command again and it continues; a killed run loses the --prompts_at_once it was on.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import MOST_CONTINUATIONS, Parser, add_law_flags, importing, integer, number, run
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.settings import DTYPES, VllmSettings


def parse_args() -> VllmSettings:
    parser = Parser(description=__doc__.split("\n")[0])
    add_law_flags(parser)
    data = parser.add_argument_group("data")
    data.add_argument("--dataset", required=True, help="prompts and ground truths: hub id, or a local file or folder")
    data.add_argument("--split", default="train", help="split of a hub or saved data set (%(default)s)")
    data.add_argument("--n", type=integer(1, MOST_CONTINUATIONS), default=64, help="continuations of each prompt (%(default)s)")
    data.add_argument("--seed", type=integer(0), default=0, help="(%(default)s)")
    data.add_argument("--save_rollouts", required=True, metavar="DIR", help="folder of the rollouts, one file a prompt")
    engine = parser.add_argument_group("vLLM")
    dtypes = ["auto", *(name for name in DTYPES if DTYPES[name] != "float64")]
    engine.add_argument("--dtype", choices=dtypes, default="auto", help="auto: bfloat16")
    engine.add_argument("--tensor_parallel_size", type=integer(1), default=1, help="GPUs that share a model (%(default)s)")
    engine.add_argument("--max_model_len", type=integer(2), help="prompt and continuation at most (the model's context)")
    share = number(0, 1, low_included=False)
    engine.add_argument("--gpu_memory_utilization", type=share, default=0.9, help="share of a GPU's memory (%(default)s)")
    engine.add_argument(
        "--prompts_at_once", type=integer(1), default=64, help="prompts given to vLLM and saved together (%(default)s)"
    )
    more = parser.add_argument_group("run")
    more.add_argument("--skip_long", action="store_true", help="leave out prompts too long for the model's context")
    more.add_argument("--trust_remote_code", action="store_true", help="let a checkpoint run Python code of its own")
    more.add_argument("--overwrite", action="store_true", help="start afresh instead of continuing")
    more.add_argument("--quiet", action="store_true", help="no progress bar")
    flags = vars(parser.parse_args())
    return VllmSettings(**{**flags, "stop": tuple(flags["stop"])})


def load_engine(settings: VllmSettings):
    """vLLM with the model, under none of its own defaults for the sampling law."""
    try:
        from vllm import LLM
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise UserError(
            f"{sys.executable} has no package vllm; pip install vllm, or run this script in an environment that has it and the "
            "packages of requirements.txt"
        ) from None
    try:
        return LLM(
            model=settings.model,
            revision=settings.revision,
            tokenizer_revision=settings.revision,
            dtype="bfloat16" if settings.dtype == "auto" else DTYPES[settings.dtype],
            seed=settings.seed,
            tensor_parallel_size=settings.tensor_parallel_size,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            max_model_len=settings.max_model_len,
            trust_remote_code=settings.trust_remote_code,
            generation_config="vllm",  # not the checkpoint's temperature, top_k, repetition_penalty, ...
            logprobs_mode="processed_logprobs",  # after temperature, top_k and top_p: those of what is drawn from
        )
    except Exception as error:  # vLLM raises what its parts raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"--model {settings.model}: vLLM cannot load it ({reason[0][:300]})") from None


def sampling_params(settings: VllmSettings, tokenizer, ends: Sequence[int], prompt_id: int):
    """The law of the flags as vLLM takes it; a seed of its own for each prompt, whatever else is sampled beside it."""
    from vllm import SamplingParams

    from Gradient_evaluation.sampling.stop_strings import special_tokens

    special = special_tokens(tokenizer)
    strings = [text for text in settings.stop if text not in special]
    own = hashlib.sha256(f"{settings.seed}/vllm/{prompt_id}".encode()).digest()
    return SamplingParams(
        n=settings.n,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        max_tokens=settings.max_new_tokens,
        stop=strings or None,
        stop_token_ids=list(ends),
        seed=int.from_bytes(own[:6], "big"),
        logprobs=0,  # of the sampled token alone
        detokenize=bool(strings),
    )


def as_record(output) -> dict:
    """One CompletionOutput as the importer reads it from a file."""
    log_probs = [of_token[token].logprob for token, of_token in zip(output.token_ids, output.logprobs)]
    reasons = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
    return {"token_ids": list(output.token_ids), "logprobs": log_probs, **reasons}


def sample(engine, settings: VllmSettings, tokenizer, todo: Sequence[tuple]) -> Iterator[tuple]:
    """Yield (row, prompt ids, continuations) of every (row, prompt ids) of ``todo``."""
    from Gradient_evaluation.models import checkpoint_eos
    from Gradient_evaluation.runs.inputs.rollouts import Context
    from Gradient_evaluation.runs.inputs.rollouts.vllm import OutputReader
    from Gradient_evaluation.sampling.stop_strings import stop_token_ids

    ends = checkpoint_eos(settings.model, settings.revision, tokenizer, settings.trust_remote_code)
    ends = sorted({*ends, *stop_token_ids(tokenizer, settings.stop)})
    reader = OutputReader(Context(tokenizer, None, settings), ends)
    for start in range(0, len(todo), settings.prompts_at_once):
        part = todo[start : start + settings.prompts_at_once]
        outputs = engine.generate(
            [{"prompt_token_ids": list(prompt_ids)} for _, prompt_ids in part],
            [sampling_params(settings, tokenizer, ends, row.prompt_id) for row, _ in part],
            use_tqdm=False,
        )
        for (row, prompt_ids), request in zip(part, outputs, strict=True):
            wheres = [f"{row.where}, continuation {number}" for number in range(1, settings.n + 1)]
            drawn = [reader.continuation(where, as_record(each)) for where, each in zip(wheres, request.outputs, strict=True)]
            yield row, prompt_ids, drawn


def main() -> None:
    settings = parse_args()
    with importing():
        import numpy as np
        from tqdm import tqdm

        from Gradient_evaluation.runs.inputs.rollouts.save import RolloutsFolder, begin_folder, check_folder, name_of
        from Gradient_evaluation.runs.machine.resume import only_writer, output_folder
    rows, prompts, tokenizer, law = prepare(settings)
    folder, of_run = output_folder(settings.save_rollouts), {"continuations": settings.n, "seed": settings.seed}
    identity = {**law, "script": "sample_with_vllm.py", **of_run, "dtype": settings.dtype}
    with only_writer(folder):
        check_folder(folder, identity, settings.overwrite)
        there = {row.prompt_id for row in rows if (folder / name_of(row.prompt_id)).exists() and not settings.overwrite}
        todo = [(row, prompt_ids) for row, prompt_ids in zip(rows, prompts) if row.prompt_id not in there]
        if todo:
            engine = load_engine(settings)
            begin_folder(folder, identity, settings.overwrite)
            writer, silent = RolloutsFolder(folder, law), settings.quiet or not sys.stderr.isatty()
            try:
                with tqdm(total=len(rows), initial=len(there), unit="prompt", disable=silent) as bar:
                    for row, prompt_ids, drawn in sample(engine, settings, tokenizer, todo):
                        writer.save(row, prompt_ids, drawn, np.full(len(drawn), np.nan))
                        bar.update()
            except KeyboardInterrupt:
                saved = f"interrupted; finished prompts are saved in {folder}, and the same command continues from there"
                raise KeyboardInterrupt(saved) from None
    text = f"{len(rows)} prompts, {settings.n} continuations each -> {folder}"
    print(text if todo else f"finished before, nothing left to do: {text}")


def prepare(settings: VllmSettings) -> tuple[list, list, object, dict]:
    """(rows, token ids of their prompts, tokenizer, the law): all that is checked before vLLM is loaded."""
    from Gradient_evaluation.adapters import is_adapter
    from Gradient_evaluation.models import load_tokenizer, warn_of_risks, weights_digest
    from Gradient_evaluation.runs.inputs.dataset import load_dataset_rows
    from Gradient_evaluation.runs.inputs.prompts import chat_from, law_identity, tokenised
    from Gradient_evaluation.runs.machine.resume import IDENTITY, read_identity

    if is_adapter(settings.model):
        raise UserError(f"--model {settings.model}: an adapter; merge it into its base model and give that folder")
    rows = load_dataset_rows(settings.dataset, settings.split)
    warn_of_risks(settings.model, settings.trust_remote_code)
    tokenizer = load_tokenizer(settings.model, settings.revision, settings.trust_remote_code)
    path = Path(settings.save_rollouts) / IDENTITY
    earlier = [read_identity(path)] if path.exists() and not settings.overwrite else []
    chat = chat_from(settings, tokenizer, earlier)
    rows, prompts, n_long = tokenised(rows, settings, tokenizer, chat)
    most = settings.max_model_len
    for row, prompt_ids in zip(rows, prompts):
        if most is not None and len(prompt_ids) + settings.max_new_tokens > most:
            raise UserError(
                f"{row.where}: the prompt has {len(prompt_ids)} tokens and --max_new_tokens is {settings.max_new_tokens}, more "
                f"than --max_model_len {most}; raise it"
            )
    if n_long:
        print(f"left out {n_long} prompts that are too long for the model's context")
    law = {**law_identity(settings, tokenizer, chat), "weights_digest": weights_digest(settings.model, settings.revision)}
    return rows, prompts, tokenizer, law


if __name__ == "__main__":
    run(main)
