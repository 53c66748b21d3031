"""How noisy is each gradient estimator at each group size? Covariance traces (MSE) → JSON and the figure.

    python Gradient_evaluation/run_tracecov.py --model data/tiny_model \
        --oracle_table outputs/demo/oracle_v_n256_tiny_model.jsonl --T 40 --M 4 --K_list 4 8 16 32 64 \
        --save_json outputs/demo --plot_path outputs/demo
    python Gradient_evaluation/run_tracecov.py --model Qwen/Qwen2.5-0.5B-Instruct \
        --oracle_table outputs/qwen/oracle_v_n1000_Qwen2.5-0.5B-Instruct.jsonl --save_json outputs/qwen
    python Gradient_evaluation/run_tracecov.py --from_grams outputs/demo/grams --K_list 2 3 5 --save_json outputs/any_K

For T prompts, drawn from the oracle table by --seed, it samples M * max(K_list) continuations each, builds the Gram matrix of their
scores over all parameters (score_gram.py), and computes from it the traces of the vanilla, GRPO and oracle
estimators at every group size at once (estimators.py). Each prompt's Gram is stored as soon as it is done: run the
command again and it continues, or give --from_grams to compute other group sizes without a model.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import MOST_CONTINUATIONS, Parser, group_sizes, integer, one_line_while_importing, run  # noqa: E402
from Gradient_evaluation.errors import UserError  # noqa: E402

if __name__ == "__main__":
    one_line_while_importing()

from Gradient_evaluation.flags import GRAM_DTYPES, add_shared_flags  # noqa: E402
from Gradient_evaluation.stats.estimators import DEFAULT, ESTIMATORS, extra_rollouts, resolve, sketched_names  # noqa: E402

# The flags that --from_grams heeds; every other one says how Grams are made.
WITH_FROM_GRAMS = (
    "--from_grams",
    "--K_list",
    "--estimators",
    "--budget",
    "--save_json",
    "--plot_path",
    "--skip_plot",
    "--quiet",
)
# Flags that decide how Grams are cut and which prompts there are; run.json keeps them, for messages and --from_grams.
KEPT = ("T", "M", "K_list", "block_size", "estimators", "subsample_prompts")


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    add_shared_flags(parser)
    parser.add_argument("--oracle_table", help="table of calculate_oracle_v.py, JSONL or parquet")
    parser.add_argument(
        "--T",
        type=integer(1),
        default=500,
        help="prompts, drawn at random by --seed; fewer if the table has fewer (%(default)s)",
    )
    parser.add_argument("--M", type=integer(1), default=16, help="repeats at the largest group size (%(default)s)")
    parser.add_argument(
        "--K_list", nargs="+", default=["4", "8", "16", "32", "64"], metavar="K", help="group sizes (4 8 16 32 64)"
    )
    parser.add_argument("--gen_bs", type=integer(1), default=64, help="continuations sampled at a time (%(default)s)")
    parser.add_argument(
        "--subsample_prompts",
        nargs="?",
        type=integer(1),
        metavar="N",
        help="draw N rows of the table first, by --seed, and the T prompts from these; without N: no effect, "
        "the T prompts are drawn from the whole table",
    )
    parser.add_argument(
        "--block_size",
        type=integer(4),
        help="continuations per Gram, at least 4; less takes less memory (max(K_list), twice that for some --estimators)",
    )
    parser.add_argument("--gram_memory", type=integer(1, 2**24), default=64, help="MiB of a temporary in a Gram (%(default)s)")
    parser.add_argument(
        "--gram_dtype",
        choices=GRAM_DTYPES,
        default="float32",
        help="of the products in a Gram; bfloat16 is faster where the hardware has it (%(default)s)",
    )
    parser.add_argument(
        "--estimators",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"more estimators to compare: {', '.join(ESTIMATORS)}; all for every one",
    )
    parser.add_argument(
        "--gradient_checkpointing",
        action="store_true",
        help="keep fewer activations and compute them again in the backward pass: less memory, more time",
    )
    parser.add_argument(
        "--scoring",
        choices=["exact", "published"],
        default="exact",
        help="published: the paper's released log-probs, for comparison (%(default)s)",
    )
    parser.add_argument("--params", metavar="REGEX", help="measure only parameters whose name this finds")
    parser.add_argument(
        "--by_layer",
        action="store_true",
        help="also the traces of every module: by_layer in the results, the largest are printed",
    )
    parser.add_argument(
        "--budget", type=integer(2), metavar="N", help="also the predicted MSE of every G at N = B*G continuations per step"
    )
    parser.add_argument(
        "--sketch_dim",
        type=integer(0, 2**20),
        default=16,
        help="size of the gradient sketches behind the group-size law, 0 for none (%(default)s)",
    )
    parser.add_argument("--allow_mismatch", action="store_true", help="take a table made under another law")
    parser.add_argument("--from_grams", metavar="DIR", help="recompute from stored Grams alone, without a model")
    parser.add_argument("--save_json", help="folder of results and Grams (required)")
    parser.add_argument("--plot_path", help="folder of the figure (that of --save_json)")
    parser.add_argument("--skip_plot", action="store_true", help="no figure")
    args = parser.parse_args()
    without_effect = [flag for flag in parser.given() if flag not in WITH_FROM_GRAMS]
    if args.from_grams and without_effect:
        parser.error(
            f"{', '.join(without_effect)}: no effect with --from_grams, which takes what made the Grams from "
            f"{args.from_grams}/run.json; leave out"
        )
    args.K_list = group_sizes(args.K_list)
    if not args.from_grams and args.M * args.K_list[-1] > MOST_CONTINUATIONS:
        parser.error(
            f"--M {args.M} times the largest of --K_list is {args.M * args.K_list[-1]} continuations of each prompt, "
            "more than memory can hold; lower one of them"
        )
    args.plot_path = args.plot_path or args.save_json
    try:
        names = ESTIMATORS if args.estimators == ["all"] else args.estimators
        args.estimators = [name for name in resolve(names) if name not in DEFAULT]
    except ValueError as error:
        parser.error(f"--estimators: {error}")
    try:
        re.compile(args.params or "")
    except re.error as error:
        parser.error(f"--params {args.params}: not a regular expression ({error})")
    if args.sketch_dim == 1:
        parser.error("--sketch_dim must be 0 or at least 2, got 1")
    if not (args.oracle_table or args.from_grams):
        parser.error("give --oracle_table (from calculate_oracle_v.py) or --from_grams")
    if not args.save_json:
        parser.error("--save_json is required: the folder of results and Grams")
    return args


if __name__ == "__main__":
    parse_args()  # a wrong flag is refused now, before the libraries below, which take seconds to import

import numpy as np  # noqa: E402
import torch  # noqa: E402

from Gradient_evaluation.chat_template import Chat  # noqa: E402
from Gradient_evaluation.gram.score_gram import ScoreGram  # noqa: E402
from Gradient_evaluation.models import (
    device_line,
    fingerprint,
    load_model,
    load_tokenizer,
    model_label,  # noqa: E402
    resolve_dtype,
    warn_of_risks,
    weights_digest,
)
from Gradient_evaluation.runs import (
    gram_store,  # noqa: E402
    group_size_report,  # noqa: E402
)
from Gradient_evaluation.runs.files import write_json  # noqa: E402
from Gradient_evaluation.runs.measure import Measurement, block_sizes, planned_block_size  # noqa: E402
from Gradient_evaluation.runs.memory import limited_memory, tune_allocator  # noqa: E402
from Gradient_evaluation.runs.oracle_table import Row, check_ground_truths, check_law, load_oracle_table  # noqa: E402
from Gradient_evaluation.runs.processes import Processes  # noqa: E402
from Gradient_evaluation.runs.progress import Progress  # noqa: E402
from Gradient_evaluation.runs.prompts import chat_from, law_of, law_record, tokenised  # noqa: E402
from Gradient_evaluation.runs.results import (
    finished_results,
    report,
    results_path,
    versions,  # noqa: E402
    write_results,
)
from Gradient_evaluation.runs.resume import (
    CHECKS,
    IDENTITY,
    check_fingerprint,
    check_identity,
    check_same_weights,  # noqa: E402
    finite_at,
    only_writer,
    output_folder,
    read_checks,
    read_identity,
    refuse_difference,
    saved_on_interrupt,
)
from plots.plot_tracecov import plot_tracecov  # noqa: E402
from plots.style import save_figure  # noqa: E402


def kept_flags(args) -> dict:
    """What run.json keeps of the flags beside the identity."""
    return {name: getattr(args, name) for name in KEPT}


class Plan(NamedTuple):
    """What there is to do, the same for every process."""

    grams: Path  # folder of the Gram files
    identity: dict  # of the run, without the weights' fingerprint
    chosen: list[tuple[int, Row, list[int]]]  # as drawn: index in the table, row, token ids of the prompt
    todo: list[tuple[int, Row, list[int]]]  # those of them without a Gram file
    n_long: int  # prompts left out as too long


def drawn(n: int, T: int, subsample: int | None, seed: int) -> list[int]:
    """Indices of T rows of a table of n, in the order in which they are measured: the paper's released choice.

    ``subsample`` rows are drawn where the table has more; these are shuffled, by a generator of the same seed, and the
    first T taken. So the prompts of a smaller T are the first of a larger, and an interrupted run a random sample.
    """
    order = list(range(n))
    if subsample is not None and subsample < n:
        order = np.random.default_rng(seed).choice(n, size=subsample, replace=False).tolist()
    np.random.default_rng(seed).shuffle(order)
    return order[:T]


def choose_rows(rows: list[Row], args, tokenizer, chat: Chat) -> tuple[list[tuple[int, Row, list[int]]], int]:
    """The drawn rows of the oracle table with their index in it and token ids, and how many rows were too long."""
    place, n_long = {row.prompt_id: i for i, row in enumerate(rows)}, 0
    if args.skip_long:
        rows, prompts, n_long = tokenised(rows, args, tokenizer, chat)
    picked = drawn(len(rows), args.T, args.subsample_prompts, args.seed)
    rows = [rows[i] for i in picked]
    prompts = [prompts[i] for i in picked] if args.skip_long else tokenised(rows, args, tokenizer, chat)[1]
    return [(place[row.prompt_id], row, prompt_ids) for row, prompt_ids in zip(rows, prompts)], n_long


def prepare(args, dtype: torch.dtype, held: ExitStack) -> Plan:
    """Everything that can be checked and done before the model is loaded; ``held`` takes the lock on the output."""
    sketched = sketched_names(args.estimators) if args.sketch_dim else []
    sizes = block_sizes(args.M * args.K_list[-1], planned_block_size(args))
    rows = load_oracle_table(args.oracle_table)
    check_ground_truths(rows, args.reward)
    warn_of_risks(args.model, args.trust_remote_code)
    tokenizer = load_tokenizer(args.model, args.revision, args.trust_remote_code)
    record = Path(args.save_json) / "grams" / IDENTITY
    earlier = [read_identity(record)] if record.exists() and not args.overwrite else []
    chat = chat_from(args, tokenizer, [*(row.columns for row in rows), *earlier])
    law = law_record(args, tokenizer, chat)
    check_law(rows, law, args.oracle_table, args.allow_mismatch)
    chosen, n_long = choose_rows(rows, args, tokenizer, chat)
    identity = {
        **law,
        "seed": args.seed,
        "scoring": args.scoring,
        "block_sizes": sizes,
        "params": args.params,
        "by_layer": args.by_layer,
        "sketch_dim": args.sketch_dim,
        "greedy": "greedy" in extra_rollouts(args.estimators),
        "gram_dtype": args.gram_dtype,
        "sketched": sketched,
        "sketched_at": args.K_list[-1] if len(sketched) > 1 else None,
        "dtype": str(dtype).split(".")[-1],
    }
    grams = output_folder(args.save_json) / "grams"
    held.enter_context(only_writer(grams))
    output_folder(grams)
    if not args.skip_plot:
        output_folder(args.plot_path)
    todo = [(place, row, prompt) for place, row, prompt in chosen if not gram_store.path_of(grams, row.prompt_id).exists()]
    if args.overwrite:
        todo = chosen
    elif (grams / IDENTITY).exists():
        found = read_identity(grams / IDENTITY)
        refuse_difference(str(grams / IDENTITY), found, identity, kept_flags(args))
        note_older_choice(grams, found, chosen)
    return Plan(grams, identity, chosen, todo, n_long)


def note_older_choice(grams: Path, found: dict, chosen: list[tuple[int, Row, list[int]]]) -> None:
    """Say where a folder was begun when a run took the first T rows of its table, and has Grams of prompts not drawn."""
    if "subsample_prompts" in (found.get("flags") or {}):
        return
    drawn_now = {gram_store.path_of(grams, row.prompt_id).name for _, row, _ in chosen}
    others = sum(path.name not in drawn_now for path in grams.glob("*.npz"))
    if others:
        print(
            f"note: {grams}: begun when a run took the first T rows; now they are drawn at random by --seed. {others} of its "
            "Grams are of prompts that are not drawn; they stay, unused, and --from_grams reads them",
            file=sys.stderr,
        )


def is_measured(plan: Plan, args) -> bool:
    """Whether an earlier run has left every Gram and its checks, made with the weights that are there now."""
    if plan.todo or not {"self_audit", "sampler_check"} <= set(read_checks(plan.grams)) or not (plan.grams / IDENTITY).exists():
        return False
    return read_identity(plan.grams / IDENTITY).get("weights_digest") == weights_digest(args.model, args.revision)


def begin(plan: Plan, args, fingerprints: list[str]) -> None:
    """The checks that need the model's weights, by the first process, before anything is measured or removed."""
    check_same_weights(fingerprints)
    model_fingerprint = fingerprints[0]
    if not args.allow_mismatch:
        check_fingerprint(
            (row.columns for _, row, _ in plan.chosen),
            model_fingerprint,
            args.oracle_table,
            "make the table again, or pass --allow_mismatch",
        )
    about_weights = {"model_fingerprint": model_fingerprint, "weights_digest": weights_digest(args.model, args.revision)}
    check_identity(
        plan.grams / IDENTITY,
        {**plan.identity, "model_fingerprint": model_fingerprint},
        {**plan.identity, **about_weights, "flags": kept_flags(args)},
        args.overwrite,
        kept_flags(args),
    )


def measure_all(plan: Plan, args, dtype: torch.dtype, processes: Processes) -> None:
    """Measure what the plan leaves to do, this process its share of it; every Gram is on disk once it is done."""
    tokenizer = load_tokenizer(args.model, args.revision, args.trust_remote_code)
    tune_allocator(processes.device)
    if args.device == "auto" and processes.is_first and not args.quiet:
        print(device_line(processes.device, dtype), file=sys.stderr)
    model = load_model(args.model, args.revision, processes.device, dtype, args.trust_remote_code)
    fingerprints = processes.gather(fingerprint(model))
    processes.from_first(begin, plan, args, fingerprints)
    gram = ScoreGram(
        model,
        law_of(args),
        args.scoring,
        args.gram_memory * 2**20,
        args.params,
        args.sketch_dim,
        gradient_checkpointing=args.gradient_checkpointing,
        gram_dtype=args.gram_dtype,
    )
    measurement = Measurement(model, tokenizer, gram, args)
    done = len(plan.chosen) - len(plan.todo)
    checks = {"gen_bs": args.gen_bs, **read_checks(plan.grams)}
    with (
        limited_memory(args.max_memory, processes.device),
        Progress(len(plan.chosen), done, "reward", args.quiet, processes) as progress,
    ):
        if processes.is_first:
            _, row, prompt_ids = plan.chosen[0]
            if "sampler_check" not in checks:  # a law does not change while a run is continued
                checks["sampler_check"] = finite_at(row, measurement.check_sampler, row, prompt_ids)
            checks["self_audit"] = finite_at(row, measurement.audit, row, prompt_ids)
            write_json(plan.grams / CHECKS, checks)
        order = {row.prompt_id: position for position, (_, row, _) in enumerate(plan.chosen)}
        for place, row, prompt_ids in processes.share(plan.todo):
            record = finite_at(row, measurement.measure, row, prompt_ids, place)
            replace(record, order=order[row.prompt_id]).save(plan.grams)
            progress.done(float(record.rewards.mean()), len(record.rewards))
    smallest = min(processes.gather(measurement.generation.size))
    if processes.is_first and smallest < checks["gen_bs"]:
        write_json(plan.grams / CHECKS, {**checks, "gen_bs": smallest})


def records_of(plan: Plan) -> Iterator[gram_store.GramRecord]:
    """The Gram records of the chosen prompts in the order of the table, with the oracle values it has now."""
    for order, (place, row, _) in sorted(enumerate(plan.chosen), key=lambda each: each[1][0]):
        record = gram_store.load(gram_store.path_of(plan.grams, row.prompt_id))
        now = {"index": place, "order": order, "oracle_value": row.oracle_value, "n_oracle": row.oracle_samples}
        current = replace(record, **now)
        if any(getattr(record, name) != value for name, value in now.items()):
            current.save(plan.grams)
        yield current


def recompute(args) -> None:
    """--from_grams: results for any group sizes, without a model."""
    started, grams = time.monotonic(), Path(args.from_grams)
    identity = read_identity(grams / IDENTITY, "give the grams folder of a finished run")
    folder = output_folder(args.save_json)
    if not args.skip_plot:
        output_folder(args.plot_path)
    with only_writer(folder / "grams"):
        # Into the config goes what made the Grams, null where that is not known, and never this call's defaults.
        made, heeded = {**identity.get("flags", {}), **identity}, {flag.lstrip("-") for flag in WITH_FROM_GRAMS}
        config = {name: value if name in heeded else made.get(name) for name, value in vars(args).items()}
        args.seed = made.get("seed", args.seed)  # of the bootstrap: the same intervals as the run that made the Grams
        try:
            finish(args, gram_store.load_all(grams), config, identity, read_checks(grams), started)
        except ValueError as error:  # records of different runs in one folder do not fit each other
            raise UserError(f"{grams}: its files cannot be used together ({error}); give a folder of one run") from None


def finish(args, records: Iterable, config: dict, identity: dict, checks: dict, started: float) -> None:
    """Results, report and figure from the Gram records."""
    audit = {name: value for name, value in checks.items() if name != "gen_bs"}
    about = {
        "config": config,
        "law": identity,
        "checks": audit,
        "versions": versions(),
        "seconds": round(time.monotonic() - started, 1),
    }
    label = model_label(identity["model"])
    results = write_results(args, records, about, label, checks.get("gen_bs"))
    present(args, results, label)


def present(args, results: dict, label: str) -> None:
    """What a run ends with: the table, the names of its files, and the group size."""
    print(report(results))
    print(f"results: {results_path(args.save_json, label)}")
    if not args.skip_plot:
        figure, _ = plot_tracecov(results, label=label)
        print(f"figure:  {save_figure(figure, Path(args.plot_path) / f'tracecov_{label}.png')}")
    print(f"\n{group_size_report.report(results['group_size_law'], args.budget)}")


def main() -> None:
    args = parse_args()
    if args.from_grams:
        recompute(args)
        return
    started = time.monotonic()
    with Processes(args.device) as processes, ExitStack() as held:
        dtype = resolve_dtype(args.dtype, processes.device)
        plan = processes.from_first(prepare, args, dtype, held)
        with saved_on_interrupt(plan.grams, args.overwrite, processes.is_first):
            measured = processes.from_first(is_measured, plan, args)
            if not measured:
                measure_all(plan, args, dtype, processes)
            if not processes.is_first:
                return
            if plan.n_long:
                print(f"left out {plan.n_long} prompts that are too long for the model's context")
            label, rows = model_label(args.model), [row for _, row, _ in plan.chosen]
            results = finished_results(args, label, rows) if measured else None
            if results is not None:
                print(f"finished before, nothing left to do; --overwrite starts afresh\n{report(results)}")
                print(f"results: {results_path(args.save_json, label)}")
                return
            finish(args, records_of(plan), vars(args), read_identity(plan.grams / IDENTITY), read_checks(plan.grams), started)


if __name__ == "__main__":
    run(main)
