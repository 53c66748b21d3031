"""From Gram records to what a run of run_tracecov.py leaves and says: the JSON files and the table it prints."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.integer_answer import check_integer_ground_truth
from Gradient_evaluation.runs.files import write_json
from Gradient_evaluation.runs.oracle_table import Row
from Gradient_evaluation.stats import summary as estimators
from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.estimators import DEFAULT, label_of
from Gradient_evaluation.stats.group_size import group_size_law
from Gradient_evaluation.stats.modules import by_layer
from Gradient_evaluation.stats.prompts import PromptMoments
from Gradient_evaluation.stats.sketch_pairs import Sketches, SketchPart, prompt_averaged_cosines


@dataclass
class Notes:
    """What is kept of each Gram record while the records stream past: its table row, layers and sketches."""

    table: list[dict] = field(default_factory=list)
    block_sizes: Counter[int] = field(default_factory=Counter)
    layers: list[tuple] = field(default_factory=list)
    sketches: list[np.ndarray | None] = field(default_factory=list)
    sketch_names: list[str] | None = None
    sketch_layout: np.ndarray | None = None

    def passing(self, records: Iterable) -> Iterable:
        """Pass the records on, noting each."""
        for record in records:
            self.table.append(
                {
                    "prompt_index": record.order,
                    "table_row": record.index,
                    "prompt": record.prompt,
                    "gold": gold_of(record.ground_truth),
                    "ground_truth": record.ground_truth,
                    "V_oracle": record.oracle_value,
                    "n_oracle": record.n_oracle,
                    "mean_reward": float(record.rewards.mean()),
                }
            )
            self.block_sizes.update(len(gram) for gram in record.grams)
            if record.modules is not None:
                self.layers.append((record.modules, record.module_moments))
            self.sketches.append(record.sketch)
            self.sketch_names, self.sketch_layout = record.sketch_names, record.sketch_layout
            yield record


def gold_of(ground_truth):
    """The integer that a ground truth means, as the released detailed files have it; any other as it is."""
    try:
        return check_integer_ground_truth(ground_truth)
    except UserError:
        return ground_truth


def results_path(folder: str | Path, label: str) -> Path:
    """The results of a model in a folder of results."""
    return Path(folder) / f"tracecov_{label}.json"


def detailed_path(folder: str | Path, label: str, K: int) -> Path:
    """The traces of every prompt at one K."""
    return Path(folder) / f"tracecov_{label}_K{K}_detailed.json"


def write_results(args, records: Iterable, about: dict, label: str, gen_bs: int | None) -> dict:
    """Compute everything from the Gram records and write the JSON files → the results.

    gen_bs: the smallest number of continuations that were sampled at a time, None where that is not known.
    """
    notes, folder = Notes(), Path(args.save_json)
    prompts = estimators.reduce_prompts(notes.passing(records), args.K_list, args.estimators)
    bootstrap = PromptBootstrap(len(prompts), seed=args.seed)
    summary = estimators.summarise(prompts, args.K_list, bootstrap, args.estimators)
    summary["group_size_law"] = group_size_law_of(prompts, notes, about["law"], bootstrap)
    if notes.layers:
        summary["by_layer"] = by_layer(
            notes.layers[0][0],
            [moments for _, moments in notes.layers],
            [row["V_oracle"] for row in notes.table],
            args.K_list,
            bootstrap,
        )
    sizes = {str(size): notes.block_sizes[size] for size in sorted(notes.block_sizes)}
    results = {**summary, **about, "batches": {"gen_bs": gen_bs, "blocks_by_size": sizes}}
    for position, K in enumerate(args.K_list):
        averages = {name: curve[position] for name, curve in summary["conditional_on_x"].items()}
        traces = estimators.prompt_trace_covs(prompts, K, args.estimators)
        write_json(detailed_path(folder, label, K), detailed(K, notes.table, traces, averages))
    if not args.overwrite and (lost := replaced(results_path(folder, label), results)):
        print(f"note: {lost}", file=sys.stderr)
    write_json(results_path(folder, label), results)
    return results


def detailed(K: int, table: Sequence[dict], traces: dict, averages: dict) -> dict:
    """The detailed file of one K: the released keys, and in every row of ``prompt_results`` also ours.

    table: the rows' other columns, in the order of the oracle table; traces: {estimator: a value per row, or None};
    averages: {published estimator: mean trace}. The rows are listed in the order in which the prompts were drawn, as
    in the released files: ``prompt_index`` is the position in it, null for Grams older than that order.
    """
    columns = {name: _per_prompt(values, len(table)) for name, values in traces.items()}
    rows = [
        {
            **row,
            "K": K,
            "tr_cov": {name: columns[name][i] for name in averages},
            "trace_cov": {name: column[i] for name, column in columns.items()},
        }
        for i, row in enumerate(table)
    ]
    if all(row["prompt_index"] is not None for row in rows):
        rows.sort(key=lambda row: row["prompt_index"])
    return {"K": K, "prompt_results": rows, "avg_traces": averages}


def replaced(path: Path, results: dict) -> str | None:
    """What the results at ``path`` have that ``results``, which will stand in their place, lack, in a line; None: nothing."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        sizes = [K for K in before["K_list"] if K not in results["K_list"]]
        names = [name for name in before["estimators"] if name not in results["estimators"]]
        n_prompts = before["n_prompts"] if before["n_prompts"] > results["n_prompts"] else 0
    except (OSError, ValueError, KeyError, TypeError):
        return None
    lost = [f"{n_prompts} prompts, where these have {results['n_prompts']}"] * bool(n_prompts)
    lost += [f"K = {', '.join(map(str, sizes))}"] * bool(sizes) + [f"the estimators {', '.join(names)}"] * bool(names)
    if not lost:
        return None
    return (
        f"{path} is replaced: before, it had {' and '.join(lost)}. Their Grams stay, so the command that made it, given "
        "again, brings it back in moments; for both, use another --save_json with --from_grams"
    )


NOT_IN_RESULTS = (
    "device",
    "gen_bs",
    "gram_memory",
    "max_memory",
    "quiet",
    "plot_path",
    "skip_plot",
    "save_json",
    "gradient_checkpointing",
    "trust_remote_code",
)


def finished_results(args, label: str, rows: Sequence[Row]) -> dict | None:
    """The results that this very command has left, for these prompts and their oracle values; None if there are none.

    Flags in ``NOT_IN_RESULTS`` decide no number. A figure that is asked for and missing makes it unfinished too.
    """
    if not args.skip_plot and not (Path(args.plot_path) / f"tracecov_{label}.png").exists():
        return None
    try:
        results = json.loads(results_path(args.save_json, label).read_text(encoding="utf-8"))
        files = [json.loads(detailed_path(args.save_json, label, K).read_text(encoding="utf-8")) for K in args.K_list]
        tables = [file["prompt_results"] for file in files]
        config = {name: value for name, value in results["config"].items() if name not in NOT_IN_RESULTS}
        found = [[[row["prompt"], row["ground_truth"], row["V_oracle"], row["n_oracle"]] for row in table] for table in tables]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not {"estimators", "group_size_law", "score_norm_sq", "on_policy_check"} <= set(results):
        return None
    if "split" not in results["score_norm_sq"]:  # made before P(keep) and the batch's tokens were right: compute them again
        return None
    wanted = {name: value for name, value in vars(args).items() if name not in NOT_IN_RESULTS}
    table = [[row.prompt, row.ground_truth, row.oracle_value, row.oracle_samples] for row in rows]
    return results if config == wanted and all(each == table for each in found) else None


def group_size_law_of(prompts: PromptMoments, notes: Notes, identity: dict, bootstrap: PromptBootstrap) -> dict:
    """The entry ``group_size_law``: constants, G*, and the cosine of each sketched estimator to the gradient.

    identity: of the run that made the Grams.
    """
    sketches = theta = None
    if all(sketch is not None for sketch in notes.sketches):
        sketches, layout = np.stack(notes.sketches), [SketchPart(*map(int, part)) for part in notes.sketch_layout]
        theta = Sketches(sketches[:, 0], layout, identity.get("sketch_dim") or None)
    law = group_size_law(prompts, theta, bootstrap)
    law |= {"sketch_dim": identity.get("sketch_dim") or None, "cosine_to_gradient": {}}
    if theta is None or sketches.shape[1] == 1:
        return law
    smallest, largest = min(notes.block_sizes), identity.get("sketched_at") or 0
    if smallest < largest:
        why = f"blocks of {smallest} continuations hold no group of {largest}; raise --block_size"
        law["reasons"]["cosine_to_gradient"] = why
    else:
        law["cosine_to_gradient"] = prompt_averaged_cosines(sketches[:, 1:], notes.sketch_names[1:], theta, bootstrap)
    return law


def _per_prompt(values, n: int) -> list:
    return [None] * n if values is None else [None if value is None else float(value) for value in values]


def versions() -> dict:
    """Versions of the packages a result depends on."""
    found = {"python": sys.version.split()[0]}
    for package in ("torch", "transformers", "tokenizers", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            pass
    return found


def report(results: dict) -> str:
    """The lines a run ends with: MSE by K, other estimators, on-policy check, score norms."""
    curves = {name: results["estimators"][name] for name in DEFAULT}
    lines = [
        "MSE of the gradient estimate: mean over prompts of trace(Cov | x) [95% interval]",
        "   K" + "".join(f"{label_of(name):>30}" for name in curves),
    ]
    for i, K in enumerate(results["K_list"]):
        lines.append(f"{K:>4}" + "".join(f"{_cell(curve, 'mse', i):>30}" for curve in curves.values()))
    lines += [
        f"note: {name}: {results['reasons'][path]}"
        for name in curves
        if (path := f"estimators.{name}.mse") in results["reasons"]
    ]
    lines += _other_estimators(results)
    lines += _largest_modules(results)
    check, norms = results["on_policy_check"], results["score_norm_sq"]
    error = "" if check["standard_error"] is None else f" +- {check['standard_error']:.1e}"
    ratio = "not computed" if check["ratio"] is None else f"{check['ratio']:.1e}{error}"
    lines.append(
        f"on-policy check ||E g||^2 / E||g||^2 = {ratio} (within two standard errors of 0 when the scores are "
        "those of the law that was sampled)"
    )
    if check.get("warning"):
        lines.append(f"warning: {check['warning']}")
    if compared := results.get("checks", {}).get("sampler_check"):
        lines.append(
            f"sampler and scoring pass: log pi of {compared['tokens']} tokens differs by {compared['median_difference']:.1e}"
            f" in the median, {compared['largest_difference']:.1e} at most (tolerance {compared['tolerance']:.1e})"
        )
    split = "above V" not in norms.get("split", "")
    kinds = (
        {"right": "right answers", "wrong": "wrong answers"}
        if split
        else {"right": "rewards above V(x)", "wrong": "rewards not above V(x)"}
    )
    shown = [
        f"{text} " + ("not computed" if norms[name]["mean"] is None else f"{norms[name]['mean']:.4g}")
        for name, text in kinds.items()
    ]
    lines.append(
        f"squared score norm E||g||^2: {', '.join(shown)}; squared gradient norm ||theta||^2 = "
        f"{results['theta_norm_sq']:.4g}; {results['n_prompts']} prompts, {results['n_continuations']} continuations"
    )
    return "\n".join(lines)


def _other_estimators(results: dict) -> list[str]:
    others = {name: found for name, found in results["estimators"].items() if name not in DEFAULT}
    if not others:
        return []
    cosines = (results.get("group_size_law") or {}).get("cosine_to_gradient") or {}
    lines = [
        "",
        "other estimators: MSE | signal-to-noise ratio | K at which plain GRPO has that ratio | cosine to the gradient; - : "
        "reasons in the results say why",
    ]
    if cosines:
        largest = results["law"]["sketched_at"]
        lines.append(
            f"(cosine: of the mean of groups of {largest}; - also where the mean has the gradient's direction by construction)"
        )
    for name, found in others.items():
        lines.append(f"  {name}: {found['title']}")
        cosine = cosines.get(name) or {"cosine": None, "ci95": None}
        for i, K in enumerate(results["K_list"]):
            cells = [_cell(found, part, i) for part in ("mse", "signal_to_noise", "effective_group_size")]
            cells.append(value_text(cosine["cosine"], cosine["ci95"]))
            each = found["continuations_per_group"][i]
            dropped = "" if each is None or each <= K else f" | {each:.3g} continuations are sampled for a group that is kept"
            lines.append(f"{K:>6}  " + " | ".join(f"{cell:>30}" for cell in cells) + dropped)
    return [*lines, ""]


def _largest_modules(results: dict, count: int = 5) -> list[str]:
    """The modules with the largest share of GRPO's trace at the smallest K, where there are traces by module."""
    if "by_layer" not in results:
        return []
    names, traces = results["by_layer"]["modules"], np.array(results["by_layer"]["trace_cov"]["grpo"][0])
    lines = [f"share of the modules in GRPO's trace at K = {results['K_list'][0]} (all of them: by_layer in the results)"]
    whole = traces.sum()
    for place in np.argsort(-traces)[:count]:
        share = f"{traces[place] / whole:.1%}" if whole > 0 else "-"
        lines.append(f"{share:>8}  {names[place]}")
    return lines


def _cell(found: dict, quantity: str, i: int) -> str:
    return value_text(found[quantity][i], found[f"{quantity}_ci95"][i])


def value_text(value: float | None, interval: Sequence[float] | None) -> str:
    """``"33.61 [25.44, 42.2]"``, without an interval the value alone, without a value ``"-"``."""
    if value is None or interval is None:
        return "-" if value is None else f"{value:.4g}"
    low, high = (0.0 if abs(end) < 1e-12 * abs(value) else end for end in interval)  # rounding of a sum that is 0
    return f"{value:.4g} [{low:.4g}, {high:.4g}]"
