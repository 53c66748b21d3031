"""How noisy is each gradient estimator at each group size? Covariance traces (MSE) → JSON and the figure.

    python Gradient_evaluation/run_tracecov.py --model data/tiny_model \
        --oracle_table outputs/demo/oracle_v_n256_tiny_model.jsonl --T 40 --M 4 --K_list 4 8 16 32 64 \
        --save_json outputs/demo --plot_path outputs/demo
    python Gradient_evaluation/run_tracecov.py --model Qwen/Qwen2.5-0.5B-Instruct \
        --oracle_table outputs/qwen/oracle_v_n1000_Qwen2.5-0.5B-Instruct.jsonl --save_json outputs/qwen
    python Gradient_evaluation/run_tracecov.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset Kyleyee/arithmetic-test \
        --T 50 --M 4 --save_json outputs/one_command
    python Gradient_evaluation/run_tracecov.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset Kyleyee/arithmetic-test \
        --until 0.2 --minutes 20 --save_json outputs/until
    python Gradient_evaluation/run_tracecov.py --model CHECKPOINT --rollouts DIR --save_json outputs/from_rollouts
    python Gradient_evaluation/run_tracecov.py --from_grams outputs/demo/grams --K_list 2 3 5 --save_json outputs/any_K

For T prompts, drawn by --seed from an oracle table or a data set, it samples M * max(K_list) continuations each (or
--per_prompt) and builds the Gram matrix of their scores over all parameters. From it follow the traces of the vanilla, GRPO
and oracle estimators at every group size at once. Each prompt's Gram is stored as soon as it is done: run the command again
and it continues, or give --from_grams to compute other group sizes without a model. --rollouts measures continuations that are
there, and samples none (docs/rollouts.md). The loop over prompts is in runs/tracecov.py.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import MOST_CONTINUATIONS, Parser, add_shared_flags, group_sizes, importing, integer, number, run
from Gradient_evaluation.settings import (
    GRAM_DTYPES,
    NOT_WITH_ROLLOUTS,
    WITH_FROM_GRAMS,
    WITH_FROM_GRAMS_AND_ROLLOUTS,
    TracecovSettings,
)


def parse_args() -> TracecovSettings:
    with importing():
        from Gradient_evaluation.stats.estimators import ALIASES, ALL, DEFAULT, ESTIMATORS, resolve
    parser = Parser(description=__doc__.split("\n")[0])
    add_shared_flags(parser)
    add_prompt_flags(parser.add_argument_group("prompts and continuations"))
    add_precision_flags(parser.add_argument_group("precision and time"))
    add_gram_flags(parser.add_argument_group("Grams"))
    add_result_flags(parser.add_argument_group("results"), [*ESTIMATORS, *ALIASES])
    args = parser.parse_args()
    check_source(parser, args)
    check_precision(parser, args)
    args.K_list = group_sizes(args.K_list)
    if args.per_prompt and "--M" in parser.given():
        parser.error(
            "--M: no effect with --per_prompt, which says how many continuations of each prompt; leave one of them out"
        )
    if not (args.from_grams or args.rollouts or args.per_prompt) and args.M * args.K_list[-1] > MOST_CONTINUATIONS:
        parser.error(
            f"--M {args.M} times the largest of --K_list is {args.M * args.K_list[-1]} continuations of each prompt, "
            "more than memory can hold; lower one of them"
        )
    args.plot_path = args.plot_path or args.save_json
    try:
        names = ALL if args.estimators == ["all"] else args.estimators
        args.estimators = [name for name in resolve(names) if name not in DEFAULT]
    except ValueError as error:
        parser.error(f"--estimators: {error}")
    try:
        re.compile(args.params or "")
    except re.error as error:
        parser.error(f"--params {args.params}: not a regular expression ({error})")
    if args.sketch_dim == 1:
        parser.error("--sketch_dim must be 0 or at least 2, got 1")
    if not args.save_json:
        parser.error("--save_json is required: the folder of results and Grams")
    if args.rollouts and "--reward" not in parser.given():
        args.reward = None
    if not args.dataset:
        args.split = None
    return TracecovSettings.of(args)


def check_source(parser: Parser, args) -> None:
    """Refuse, in one line, more than one source of prompts or none, and flags that a source leaves without effect."""
    given = parser.given()
    sources = [name for name in ("oracle_table", "dataset", "rollouts", "from_grams") if getattr(args, name)]
    heeded = WITH_FROM_GRAMS_AND_ROLLOUTS if args.rollouts else WITH_FROM_GRAMS
    without_effect = [flag for flag in given if flag not in heeded]
    if args.from_grams and without_effect:
        parser.error(
            f"{', '.join(without_effect)}: no effect with --from_grams, which takes what made the Grams from "
            f"{args.from_grams}/run.json; leave out"
        )
    if not sources:
        parser.error("give --oracle_table (from calculate_oracle_v.py), --dataset, --rollouts or --from_grams")
    if args.from_grams and args.rollouts and "--reward" not in given:
        parser.error("--from_grams with --rollouts: give the --reward that judges the texts anew, or leave --rollouts out")
    if len(set(sources) - {"from_grams"}) > 1 and sources[:2] != ["dataset", "rollouts"]:
        parser.error(f"give one of {' and '.join(f'--{name}' for name in sources)}")
    if "--split" in given and not args.dataset:
        parser.error("--split: no effect without --dataset; leave it out")
    if args.rollouts and (without_effect := [flag for flag in given if flag in NOT_WITH_ROLLOUTS]):
        parser.error(f"{', '.join(without_effect)}: no effect with --rollouts, which brings the continuations; leave out")
    if args.importance_weights and not args.rollouts:
        parser.error("--importance_weights: no effect without --rollouts, as the run samples from --model itself; leave out")
    if args.clip and not args.budget:
        parser.error("--clip: give --budget too, the continuations of a step")
    check_kl(parser, args)
    if adam := [flag for flag in given if flag.startswith("--adam_")]:
        if not args.optimizer_state:
            parser.error(f"{', '.join(adam)}: no effect without --optimizer_state; leave out")
    if args.importance_weights and args.scoring == "published":
        parser.error("--importance_weights: weights are ratios of exact log-probs; leave out --scoring published")


def check_precision(parser: Parser, args) -> None:
    """What --until, --minutes and --plan make of the flags that were not typed; refuse, in one line, what does not fit them."""
    with importing():
        from Gradient_evaluation.stats.group_size.precision import Quantity
    given = parser.given()
    stops = args.until is not None or args.minutes is not None
    args.pilot = False
    if args.until_quantity and args.until is None and not args.plan:
        parser.error("--until_quantity: no effect without --until; leave it out, or give --until 0.2")
    if stops and args.allocate:
        parser.error("--allocate: shares N among a known number of prompts; run --until first, then --from_grams --allocate")
    try:
        names = Quantity.parse(args.until_quantity or "G_star").names
    except ValueError as error:
        parser.error(f"--until_quantity {args.until_quantity}: {error}")
    args.estimators += [name for name in names if args.estimators != ["all"]]
    if not (stops or args.plan):
        return
    if "--T" not in given:
        args.T = None
    args.pilot = args.plan or not {"--M", "--K_list", "--per_prompt", "--rollouts"} & set(given)


def check_kl(parser: Parser, args) -> None:
    """Refuse, in one line, the flags of a KL term where one has no effect or the law is not that of the trainers' KL."""
    if not args.from_grams and bool(args.kl_coef) != bool(args.ref_model):
        parser.error("--kl_coef and --ref_model: give both, the coefficient of the KL term and the reference policy")
    if args.ref_model and (args.top_p < 1 or args.top_k):
        parser.error("--ref_model: trainers take the KL of the whole softmax; sample with --top_p 1 and without --top_k")
    if args.ref_model and args.scoring == "published":
        parser.error("--ref_model: the KL is that of exact log-probs; leave out --scoring published")
    if args.ref_model and args.importance_weights:
        parser.error("--importance_weights: a KL term has no weighted form; leave it out, or --ref_model")


def add_prompt_flags(group) -> None:
    group.add_argument("--oracle_table", help="table of calculate_oracle_v.py, JSONL or parquet")
    group.add_argument(
        "--dataset",
        help="prompts without oracle values: hub id, or a local file or folder; with --rollouts, their ground truths",
    )
    group.add_argument("--split", default="train", help="split of a hub or saved data set (%(default)s)")
    group.add_argument(
        "--rollouts", nargs="+", metavar="FILE", help="measure these files or folders of rollouts, without sampling"
    )
    group.add_argument(
        "--T",
        type=integer(1),
        default=500,
        help="prompts, drawn at random by --seed; fewer if the table has fewer (%(default)s)",
    )
    group.add_argument("--M", type=integer(1), default=16, help="repeats at the largest group size (%(default)s)")
    group.add_argument(
        "--per_prompt",
        type=integer(4, MOST_CONTINUATIONS),
        metavar="N",
        help="continuations of each prompt; instead of --M times the largest of --K_list, which may then be above N",
    )
    group.add_argument(
        "--K_list", nargs="+", default=["4", "8", "16", "32", "64"], metavar="K", help="group sizes (4 8 16 32 64)"
    )
    group.add_argument("--gen_bs", type=integer(1), default=64, help="continuations sampled at a time (%(default)s)")
    group.add_argument(
        "--subsample_prompts",
        nargs="?",
        type=integer(1),
        metavar="N",
        help="draw N rows of the table first, by --seed, and the T prompts from these; without N: no effect, "
        "the T prompts are drawn from the whole table",
    )


def add_precision_flags(group) -> None:
    group.add_argument(
        "--until",
        type=number(0, 1, low_included=False),
        metavar="SHARE",
        help="measure prompts until the 95%% interval of G* is within this share of it: 0.2 for +-20%%; without --M, --K_list "
        "and --per_prompt the first prompts decide how many continuations each further one gets",
    )
    group.add_argument(
        "--until_quantity",
        metavar="NAME",
        help="what --until watches instead of G*: trace:NAME:K, snr:NAME:K or difference:A:B:K of the estimators NAME, A, B",
    )
    group.add_argument(
        "--minutes",
        type=number(0, low_included=False),
        help="begin no prompt after so many minutes, the loading of the model included; the same command goes on",
    )
    group.add_argument(
        "--plan",
        action="store_true",
        help="only print what a run would take and give, from the Grams that are there or from two minutes of measuring",
    )


def add_gram_flags(group) -> None:
    group.add_argument(
        "--block_size",
        type=integer(4),
        help="continuations per Gram, at least 4; less takes less memory (max(K_list), twice that for some --estimators)",
    )
    group.add_argument("--gram_memory", type=integer(1, 2**24), default=64, help="MiB of a temporary in a Gram (%(default)s)")
    group.add_argument(
        "--gram_dtype",
        choices=GRAM_DTYPES,
        default="float32",
        help="of the products in a Gram; bfloat16 is faster where the hardware has it (%(default)s)",
    )
    group.add_argument(
        "--gradient_checkpointing",
        action="store_true",
        help="keep fewer activations and compute them again in the backward pass: less memory, more time",
    )
    group.add_argument(
        "--scoring",
        choices=["exact", "published"],
        default="exact",
        help="published: the paper's released log-probs, for comparison (%(default)s)",
    )
    group.add_argument(
        "--importance_weights",
        action="store_true",
        help="weight --rollouts by pi(model) / pi(sampler) of each, from the log-probs that came with them",
    )
    group.add_argument("--params", metavar="REGEX", help="measure only parameters whose name this finds")
    group.add_argument(
        "--by_layer",
        action="store_true",
        help="also the traces of every module: by_layer in the results, the largest are printed",
    )
    group.add_argument(
        "--sketch_dim",
        type=integer(0, 2**20),
        default=16,
        help="size of the gradient sketches behind the group-size law, 0 for none (%(default)s)",
    )
    group.add_argument("--ref_model", metavar="MODEL", help="of a KL term: hub id or folder of the reference policy")
    group.add_argument(
        "--kl_type",
        choices=["k3", "k2"],
        default="k3",
        help="its gradient: k3, VERL's low_var_kl; k2, also that of VERL's k3+ and of TRL's default (%(default)s)",
    )
    group.add_argument(
        "--optimizer_state", metavar="PATH", help="measure everything in Adam's metric too: optimizer.pt, or safetensors of v"
    )
    group.add_argument("--adam_step", type=integer(1), metavar="N", help="steps behind v (the state's; none: v is corrected)")
    group.add_argument("--adam_beta2", type=number(0, 1, low_included=True), metavar="B", help="(the state's, or 0.999)")
    group.add_argument("--adam_eps", type=number(0, low_included=True), metavar="EPS", help="(the state's, or 1e-8)")
    group.add_argument("--allow_mismatch", action="store_true", help="take a table made under another law")


def add_result_flags(group, names) -> None:
    group.add_argument(
        "--estimators",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"more estimators to compare: {', '.join(names)}; all for every one that is not called after a trainer",
    )
    group.add_argument(
        "--budget", type=integer(2), metavar="N", help="also the predicted MSE of every G at N = B*G continuations per step"
    )
    group.add_argument(
        "--clip",
        type=number(0, low_included=False),
        metavar="NORM",
        help="also the share of steps of --budget continuations whose gradient is clipped at this norm",
    )
    group.add_argument(
        "--kl_coef",
        type=number(0, low_included=False),
        metavar="BETA",
        help="also the losses with beta times the KL (k3) to --ref_model; with --from_grams of a run with --ref_model",
    )
    group.add_argument(
        "--by", metavar="COLUMN", help="also every number for each value of this column of the prompts: data_source, level, ..."
    )
    group.add_argument(
        "--allocate",
        type=integer(4, 10**6),
        metavar="N",
        help="also how many of N continuations each prompt should get, as JSONL, and what that gains over equal groups",
    )
    group.add_argument("--from_grams", metavar="DIR", help="recompute from stored Grams alone, without a model")
    group.add_argument("--save_json", help="folder of results and Grams (required)")
    group.add_argument("--plot_path", help="folder of the figure (that of --save_json)")
    group.add_argument("--skip_plot", action="store_true", help="no figure")


def main() -> None:
    settings = parse_args()
    with importing():
        from Gradient_evaluation.runs import tracecov
        from plots.domains import plot_with_groups
        from plots.style import save_figure
        from plots.tracecov import plot_tracecov

    def draw(results: dict, label: str) -> Path:
        figure, _ = (plot_with_groups if "by_group" in results else plot_tracecov)(results, label=label)
        return save_figure(figure, Path(settings.plot_path) / f"tracecov_{label}.png")

    tracecov.run(settings, draw, shlex.join(["python", *(word for word in sys.argv if word != "--plan")]))


if __name__ == "__main__":
    run(main)
