"""How noisy is each gradient estimator at each group size? Covariance traces (MSE) → JSON and the figure.

    python Gradient_evaluation/run_tracecov.py --model data/tiny_model \
        --oracle_table outputs/demo/oracle_v_n256_tiny_model.jsonl --T 40 --M 4 --K_list 4 8 16 32 64 \
        --save_json outputs/demo --plot_path outputs/demo
    python Gradient_evaluation/run_tracecov.py --model Qwen/Qwen2.5-0.5B-Instruct \
        --oracle_table outputs/qwen/oracle_v_n1000_Qwen2.5-0.5B-Instruct.jsonl --save_json outputs/qwen
    python Gradient_evaluation/run_tracecov.py --from_grams outputs/demo/grams --K_list 2 3 5 --save_json outputs/any_K

For T prompts of the oracle table it samples M * max(K_list) continuations each, builds the Gram matrix of their
scores over all parameters (score_gram.py), and computes from it the traces of the vanilla, GRPO and oracle
estimators at every group size at once (estimators.py). Each prompt's Gram is stored as soon as it is done: run the
command again and it continues, or give --from_grams to compute other group sizes without a model.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation import estimators, gram_store, group_size_report  # noqa: E402
from Gradient_evaluation.cli import Parser, UserError, group_sizes, integer, run  # noqa: E402
from Gradient_evaluation.estimator_table import DEFAULT, ESTIMATORS, group_rules  # noqa: E402
from Gradient_evaluation.flags import add_shared_flags, law_of, law_record  # noqa: E402
from Gradient_evaluation.layer_traces import layer_moments  # noqa: E402
from Gradient_evaluation.models import (check_prompt_length, fingerprint, load_model, load_tokenizer,  # noqa: E402
                                        model_label, resolve_device, resolve_dtype)
from Gradient_evaluation.run_files import (at_row, check_fingerprint, check_identity, output_folder,  # noqa: E402
                                           read_identity)
from Gradient_evaluation.sampling import sample_continuations, uniforms  # noqa: E402
from Gradient_evaluation.score_gram import GRAM_DTYPES, ScoreGram  # noqa: E402
from Gradient_evaluation.sketch_weights import sketch_weights, sketched_names  # noqa: E402
from Gradient_evaluation.tables import check_ground_truths, check_law, load_oracle_table  # noqa: E402
from Gradient_evaluation.tracecov_results import report, versions, write_results  # noqa: E402
from Gradient_evaluation.utils import REWARDS, format_prompt  # noqa: E402
from plots.plot_tracecov import plot_tracecov  # noqa: E402
from plots.style import save_figure  # noqa: E402


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    add_shared_flags(parser)
    parser.add_argument("--oracle_table", help="JSONL table of calculate_oracle_v.py")
    parser.add_argument("--T", type=integer(1), default=500, help="prompts, fewer if the table has fewer (%(default)s)")
    parser.add_argument("--M", type=integer(1), default=16, help="repeats at the largest group size (%(default)s)")
    parser.add_argument("--K_list", nargs="+", default=["4", "8", "16", "32", "64"], metavar="K", help="group sizes")
    parser.add_argument("--gen_bs", type=integer(1), default=64, help="continuations sampled at a time (%(default)s)")
    parser.add_argument("--subsample_prompts", action="store_true",
                        help="draw the T prompts at random by --seed instead of taking the first T")
    parser.add_argument("--block_size", type=integer(4),
                        help="continuations per Gram, at least 4; less takes less memory (max(K_list), twice that for some --estimators)")
    parser.add_argument("--gram_memory", type=integer(1), default=64, help="MiB of a temporary in a Gram (%(default)s)")
    parser.add_argument("--gram_dtype", choices=list(GRAM_DTYPES), default="float32",
                        help="of the products in a Gram; bfloat16 is faster where the hardware has it (%(default)s)")
    parser.add_argument("--estimators", nargs="+", default=[], metavar="NAME",
                        help=f"more estimators to compare: {', '.join(ESTIMATORS)}; all for every one")
    parser.add_argument("--scoring", choices=["exact", "published"], default="exact",
                        help="published: the paper's released log-probs, for comparison (%(default)s)")
    parser.add_argument("--params", metavar="REGEX", help="measure only parameters whose name this finds")
    parser.add_argument("--by_layer", action="store_true", help="also the traces of every module")
    parser.add_argument("--budget", type=integer(2), metavar="N",
                        help="also the predicted MSE of every G at N = B*G continuations per step")
    parser.add_argument("--sketch_dim", type=integer(0), default=16,
                        help="size of the gradient sketches behind the group-size law, 0 for none (%(default)s)")
    parser.add_argument("--allow_mismatch", action="store_true", help="take a table made under another law")
    parser.add_argument("--from_grams", metavar="DIR", help="recompute from stored Grams alone, without a model")
    parser.add_argument("--save_json", default="outputs/tracecov", help="folder of results and Grams (%(default)s)")
    parser.add_argument("--plot_path", help="folder of the figure (that of --save_json)")
    parser.add_argument("--skip_plot", action="store_true", help="no figure")
    parser.add_argument("--overwrite", action="store_true", help="start afresh instead of continuing")
    args = parser.parse_args()
    args.K_list = group_sizes(args.K_list)
    args.plot_path = args.plot_path or args.save_json
    try:
        names = ESTIMATORS if args.estimators == ["all"] else args.estimators
        args.estimators = [name for name in estimators.resolve(names) if name not in DEFAULT]
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
    return args


def block_sizes(continuations: int, largest: int) -> list[int]:
    """Cut ``continuations`` into as few even blocks of at most ``largest`` as give each at least 4.

    (Where both cannot be had, 6 in blocks of 4 say, a block is larger.)
    """
    count = -(-continuations // largest)
    if continuations < 4 * count:
        count = continuations // 4  # an estimate of ||theta||^2 needs four continuations in a block
    if count == 0:
        raise UserError(f"--M times the largest of --K_list gives {continuations} continuations; at least 4 are needed")
    return [len(part) for part in np.array_split(np.arange(continuations), count)]


def choose_rows(args) -> list:
    """The T prompts of the oracle table, each with its place in the table, after every check that needs no model."""
    rows = load_oracle_table(args.oracle_table)
    check_ground_truths(rows, args.reward)
    check_law(rows, law_record(args), args.oracle_table, args.allow_mismatch)
    places = range(len(rows))
    if args.T < len(rows) and args.subsample_prompts:
        places = sorted(np.random.default_rng(args.seed).choice(len(rows), args.T, replace=False).tolist())
    return [(place, rows[place]) for place in places][:args.T]


def greedy_reward(model, tokenizer, prompt_ids, row, args) -> float | None:
    """Reward of the greedy continuation, when the estimator that needs it is asked for."""
    if "greedy" not in args.estimators:
        return None
    law = replace(law_of(args), temperature=1.0, top_k=1, top_p=1.0)
    greedy = sample_continuations(model, tokenizer, prompt_ids, np.zeros((1, args.max_new_tokens)), law, 1)[0]
    return REWARDS[args.reward].score(greedy.text, row.ground_truth)


def measure(model, tokenizer, gram, prompt_ids, place, row, sizes, args) -> gram_store.GramRecord:
    """Sample one prompt, reward its continuations and build its Grams."""
    u = uniforms(args.seed, "tracecov", row.prompt_id, 0, sum(sizes), args.max_new_tokens)
    drawn = sample_continuations(model, tokenizer, prompt_ids, u, law_of(args), args.gen_bs)
    score = REWARDS[args.reward].score
    ends = np.cumsum(sizes).tolist()
    rewards = np.array([score(continuation.text, row.ground_truth) for continuation in drawn])
    lengths = np.array([len(continuation.tokens) for continuation in drawn])
    names = sketched_names(args.estimators) if args.sketch_dim else None
    blocks, moments, sketches = [], [], []
    for size, end in zip(sizes, ends):
        part = slice(end - size, end)
        weights = sketch_weights(names, rewards[part], lengths[part], args.K_list[-1]) if names else None
        block = gram.block(prompt_ids, drawn[part], args.by_layer, weights)
        if names:
            sketches.append(block.sketch)
        if args.by_layer:
            moments.append(layer_moments(block.by_module, rewards[part]))
        blocks.append(replace(block, by_module=None, sketch=None))
    return gram_store.GramRecord(
        prompt_id=row.prompt_id, index=place, prompt=row.prompt, ground_truth=row.ground_truth,
        oracle_value=row.oracle_value, n_oracle=row.oracle_samples,
        rewards=rewards, lengths=lengths,
        log_probs=np.concatenate([block.log_probs for block in blocks]), grams=[block.gram for block in blocks],
        modules=gram.modules if moments else None, module_moments=np.mean(moments, axis=0) if moments else None,
        sketch=np.mean(sketches, axis=0) if sketches else None, sketch_names=names,
        sketch_layout=np.array(gram.sketch.layout, dtype=np.int64) if names else None,
        greedy_reward=greedy_reward(model, tokenizer, prompt_ids, row, args))


def measure_all(args, chosen: list, sizes: list[int], grams: Path, device) -> dict:
    """Measure every chosen prompt that has no Gram file yet → the checks of the run."""
    dtype = resolve_dtype(args.dtype, device)
    identity = {**law_record(args), "seed": args.seed, "scoring": args.scoring, "block_sizes": sizes,
                "params": args.params, "by_layer": args.by_layer, "sketch_dim": args.sketch_dim,
                "greedy": "greedy" in args.estimators, "gram_dtype": args.gram_dtype,
                "sketched": sketched_names(args.estimators) if args.sketch_dim else [], "dtype": str(dtype).split(".")[-1]}
    tokenizer = load_tokenizer(args.model, args.revision)
    prompts = [at_row(row, format_prompt, tokenizer, row.prompt) for _, row in chosen]
    model = load_model(args.model, args.revision, device, dtype)
    for (_, row), prompt_ids in zip(chosen, prompts):
        check_prompt_length(model, prompt_ids, args.max_new_tokens, row.where)
    identity["model_fingerprint"] = fingerprint(model)
    if not args.allow_mismatch:
        check_fingerprint((row.columns for _, row in chosen), identity["model_fingerprint"],
                                 args.oracle_table, "make the table again, or pass --allow_mismatch")
    check_identity(grams / "run.json", identity, args.overwrite)

    gram = ScoreGram(model, law_of(args), args.scoring, args.gram_memory * 2**20, args.params, args.sketch_dim,
                     gram_dtype=args.gram_dtype)
    audit = None
    progress = tqdm(list(zip(chosen, prompts)), unit="prompt", disable=args.quiet or not sys.stderr.isatty())
    for (place, row), prompt_ids in progress:
        try:
            if audit is None:
                u = uniforms(args.seed, "audit", row.prompt_id, 0, min(sizes[0], 16), args.max_new_tokens)
                audit = gram.audit(prompt_ids, sample_continuations(model, tokenizer, prompt_ids, u, law_of(args),
                                                                    args.gen_bs))
            if not (grams / f"{row.prompt_id:016x}.npz").exists():
                measure(model, tokenizer, gram, prompt_ids, place, row, sizes, args).save(grams)
        except FloatingPointError as error:
            raise UserError(f"{row.where}: {error} on this prompt; check the checkpoint, or try --dtype float32") \
                from None
    return {"self_audit": audit}


def main() -> None:
    args = parse_args()
    started = time.monotonic()
    if args.from_grams:
        grams, folder = Path(args.from_grams), output_folder(args.save_json)
        identity = read_identity(grams / "run.json")
        label, checks, records = model_label(identity["model"]), {}, gram_store.load_all(grams)
    else:
        device = resolve_device(args.device)
        # Estimators whose weights depend on the whole group need two disjoint groups in a block.
        usual = args.K_list[-1] * (2 if group_rules(args.estimators) else 1)
        sizes = block_sizes(args.M * args.K_list[-1], args.block_size or usual)
        chosen = choose_rows(args)
        folder = output_folder(args.save_json)
        grams = output_folder(folder / "grams")
    plots = None if args.skip_plot else output_folder(args.plot_path)
    if not args.from_grams:
        checks = measure_all(args, chosen, sizes, grams, device)
        identity, label = read_identity(grams / "run.json"), model_label(args.model)
        records = (gram_store.load(grams / f"{row.prompt_id:016x}.npz") for _, row in chosen)
    config = vars(args)
    if args.from_grams:  # what made the Grams, not this call's defaults
        config |= {name: value for name, value in identity.items() if name in config}
    about = {"config": config, "law": identity, "checks": checks, "versions": versions(),
             "seconds": round(time.monotonic() - started, 1)}
    results = write_results(args, records, about, label)
    print(report(results))
    print(f"results: {folder / f'tracecov_{label}.json'}")
    if plots is not None:
        figure, _ = plot_tracecov(results, label=label)
        print(f"figure:  {save_figure(figure, plots / f'tracecov_{label}.png')}")
    print(f"\n{group_size_report.report(results['group_size_law'], args.budget)}")


if __name__ == "__main__":
    run(main)
