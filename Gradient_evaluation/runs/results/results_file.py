"""The results of a run: JSON files written from Gram records, read again, and named by model and sampling law.

write_results(settings, records, about, label, gen_bs)     the JSON files of a run
load_results(path)                                         a results file, for plots and training
check_group_size_law(results["group_size_law"], path)      it has a curve that can be drawn
describe(results)                                          "tiny_model\\ntemperature 1, top_p 0.95"
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.oracle_table import OracleRow
from Gradient_evaluation.runs.machine.files import to_json_line, write_bytes_atomic, write_json
from Gradient_evaluation.runs.results.by_reward import OTHER_LAYERS
from Gradient_evaluation.runs.results.rollouts_check import rollouts_check
from Gradient_evaluation.runs.results.summaries import (
    Notes,
    by_group,
    check_allocation,
    clipping_of,
    in_metric,
    layers_of,
    rewards_alone,
    summary_of,
    with_kl,
)
from Gradient_evaluation.settings import TracecovSettings
from Gradient_evaluation.stats import summary as estimators
from Gradient_evaluation.stats.bootstrap import PromptBootstrap
from Gradient_evaluation.stats.estimators import label_of
from Gradient_evaluation.stats.group_size.allocation import allocation
from Gradient_evaluation.stats.missing import with_reasons
from Gradient_evaluation.stats.summary import FLOOR, PUBLISHED

DRAWN = (*PUBLISHED, FLOOR)  # the curves of every results file


def results_path(folder: str | Path, label: str) -> Path:
    """The results file of a model in a folder."""
    return Path(folder) / f"tracecov_{label}.json"


def detailed_path(folder: str | Path, label: str, K: int) -> Path:
    """The file with the traces of every prompt at one K."""
    return Path(folder) / f"tracecov_{label}_K{K}_detailed.json"


def allocation_path(folder: str | Path, label: str, N: int) -> Path:
    """The file with how many of N continuations each prompt should get."""
    return Path(folder) / f"allocation_{label}_N{N}.jsonl"


def write_results(settings: TracecovSettings, records: Iterable, about: dict, label: str, gen_bs: int | None) -> dict:
    """Compute the results from the Gram records, write the JSON files, and return the results.

    gen_bs: the smallest number of continuations that were sampled at a time; None if it is not known.
    """
    notes, folder = Notes(), Path(settings.save_json)
    prompts = estimators.reduce_prompts(notes.passing(records), settings.K_list, settings.estimators)
    bootstrap = PromptBootstrap(len(prompts), seed=settings.seed)
    counts = None
    if settings.allocate:
        check_allocation(settings.allocate, len(prompts))
    summary = {**summary_of(settings, prompts, notes.sketched, about, bootstrap), "n_left_out": notes.n_left_out}
    if settings.allocate:
        summary["allocation"], counts = allocation(prompts, settings.allocate, bootstrap)
    if settings.by:
        summary["by_group"] = by_group(settings, prompts, notes, about)
    if notes.component_names:
        summary["by_reward"] = rewards_alone(settings, records, notes, about)
    if settings.clip:
        summary["clip"] = clipping_of(settings, prompts, records, summary, bootstrap)
    if settings.kl_coef:
        summary["kl"] = with_kl(settings, prompts, records, notes.sketched, about, bootstrap)
    if notes.has_metric:
        summary["optimizer_metric"] = in_metric(settings, records, about)
    if notes.layers:
        layers = with_reasons({"by_layer": layers_of(notes, settings.K_list, bootstrap)})
        summary["reasons"] |= layers.pop("reasons")
        summary |= layers
    elif about["law"].get("by_layer"):
        summary["reasons"]["by_layer"] = OTHER_LAYERS
    sizes = {str(size): notes.block_sizes[size] for size in sorted(notes.block_sizes)}
    results = {**summary, **about, "batches": {"gen_bs": gen_bs, "blocks_by_size": sizes}}
    if (compared := rollouts_check(notes.compared, notes.weighted)) is not None:
        results["rollouts_check"] = compared
    for position, K in enumerate(settings.K_list):
        averages = {name: curve[position] for name, curve in summary["conditional_on_x"].items()}
        traces = estimators.prompt_trace_covs(prompts, K, settings.estimators)
        write_json(detailed_path(folder, label, K), detailed(K, notes.table, traces, averages))
    if counts is not None:
        write_allocation(allocation_path(folder, label, settings.allocate), notes, counts)
    if not settings.overwrite and (lost := replaced(results_path(folder, label), results)):
        print(f"note: {lost}", file=sys.stderr)
    write_json(results_path(folder, label), results)
    return results


def write_allocation(path: Path, notes: Notes, counts: np.ndarray) -> None:
    """One JSON line for each prompt: {prompt_id: 16 hex digits, prompt, n: its continuations, share: of all}."""
    rows = [
        {"prompt_id": f"{prompt_id:016x}", "prompt": row["prompt"], "n": int(count), "share": float(count / counts.sum())}
        for prompt_id, row, count in zip(notes.prompt_ids, notes.table, counts)
    ]
    write_bytes_atomic(path, b"".join(map(to_json_line, rows)))


def detailed(K: int, table: Sequence[dict], traces: dict, averages: dict) -> dict:
    """The detailed file of one K: the released keys, and more columns in every row of ``prompt_results``.

    table: the other columns of each row, in the order of the oracle table. traces: {estimator: a value per row, or None}.
    averages: {published estimator: mean trace}. As in the released files, the rows are in the order in which the prompts
    were drawn. ``prompt_index`` is a row's position in that order; it is null for Grams that were made before it was stored.
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
    """One line that names what the old results at ``path`` hold and the new ``results`` lack; None if nothing is lost."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        n_prompts = before["n_prompts"]
        sizes = [str(K) for K in before["K_list"] if K not in results["K_list"]]
        names = [name for name in before["estimators"] if name not in results["estimators"]]
        reward = (before.get("law") or {}).get("reward")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    lost = []
    if n_prompts > results["n_prompts"]:
        lost.append(f"{n_prompts} prompts, where these have {results['n_prompts']}")
    if sizes:
        lost.append(f"K = {', '.join(sizes)}")
    if names:
        lost.append(f"the estimators {', '.join(names)}")
    if reward is not None and reward != results["law"].get("reward"):
        lost.append(f"the reward {reward}")
    if not lost:
        return None
    return (
        f"{path} is replaced: before, it had {' and '.join(lost)}. Their Grams are still there: give the earlier command "
        "again to have those results back in moments. To have both, use another --save_json with --from_grams"
    )


# flags that results of earlier versions lack, with their defaults
FLAGS_ADDED_LATER = {"reward_weights": None, "dataset": None, "split": None, "rollouts": None, "pilot": False}
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
    "reward_timeout",
    "save_rollouts",
    "minutes",
    "plan",
)


def finished_results(settings: TracecovSettings, label: str, rows: Sequence[OracleRow]) -> dict | None:
    """The results that the same command has written before, for the same prompts and oracle values; None if there are none.

    The flags in ``NOT_IN_RESULTS`` change no number, so they may differ. A missing figure also means: not finished.
    """
    if not settings.skip_plot and not (Path(settings.plot_path) / f"tracecov_{label}.png").exists():
        return None
    if settings.allocate and not allocation_path(settings.save_json, label, settings.allocate).exists():
        return None
    try:
        results = json.loads(results_path(settings.save_json, label).read_text(encoding="utf-8"))
        files = [json.loads(detailed_path(settings.save_json, label, K).read_text(encoding="utf-8")) for K in settings.K_list]
        tables = [file["prompt_results"] for file in files]
        config = {name: value for name, value in (FLAGS_ADDED_LATER | results["config"]).items() if name not in NOT_IN_RESULTS}
        found = [[[row["prompt"], row["ground_truth"], row["V_oracle"], row["n_oracle"]] for row in table] for table in tables]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not {"estimators", "group_size_law", "score_norm_sq", "on_policy_check"} <= set(results):
        return None
    if "split" not in results["score_norm_sq"]:  # made before P(keep) and the batch's tokens were right: compute them again
        return None
    # a flag that earlier versions did not have, and that is not given, is no difference
    asked = {name: value for name, value in settings.config().items() if value is not None or name in config}
    wanted = {name: value for name, value in asked.items() if name not in NOT_IN_RESULTS}
    table = [[row.prompt, row.ground_truth, row.oracle_value, row.oracle_samples] for row in rows]
    return results if config == wanted and all(each == table for each in found) else None


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


# --- reading results again ---


def load_results(path: str | Path) -> dict:
    """Read a results JSON. Raises UserError where it is missing, not JSON, or not a results file."""
    path = Path(path)
    try:
        results = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give a tracecov_*.json written by run_tracecov.py") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read it ({error.strerror}); give a tracecov_*.json file") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: is not JSON ({error}); give a tracecov_*.json file") from None
    try:
        whole = all(len(curve) == len(results["K_list"]) > 0 for name in DRAWN for curve in curve_of(results, name))
    except (KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise UserError(
            f"{path}: is not a results file (no K_list, or no conditional_on_x with {', '.join(PUBLISHED)} at each K); give a "
            "tracecov_*.json that run_tracecov.py wrote, not a detailed one"
        )
    return results


def curve_of(results: dict, curve: str) -> tuple[list, list]:
    """One curve's values and intervals [low, high], lists aligned with K_list; None where there is none."""
    absent = [None] * len(results["K_list"])
    if curve in PUBLISHED:
        intervals = (results.get("conditional_on_x_ci95") or {}).get(curve)
        return results["conditional_on_x"][curve], intervals or absent
    return results.get(curve) or absent, results.get(f"{curve}_ci95") or absent


def label_in(estimators: Mapping | None, name: str) -> str:
    """What a picture or list calls an estimator: as these results (their ``estimators``) label it, else ``label_of``.

    The oracle's label says where its V(x) is cross-fitted.
    """
    return ((estimators or {}).get(name) or {}).get("label") or label_of(name)


def check_group_size_law(found: dict | None, name: str) -> None:
    """Raise UserError, beginning with ``name``, unless ``found`` is a group-size law with a curve that can be drawn."""
    try:
        values, reasons = found["curve"]["mse_times_N"], found["reasons"]
    except (TypeError, KeyError):
        raise UserError(f"{name}: holds no group_size_law; write the results again with run_tracecov.py") from None
    if values is None:
        raise UserError(f"{name}: its group_size_law has no curve: {reasons['curve']}")
    if not max(values) > 0:  # with few prompts the noise of c1 and c2 may outweigh all
        raise UserError(
            f"{name}: no predicted MSE of its group_size_law is above 0, so there is nothing to draw; measure more "
            "prompts (--T)"
        )


def counted(number: int, noun: str) -> str:
    """``"1 prompt"``, ``"1,024 prompts"``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


# --- which model and which sampling law is a curve of? ---

ALWAYS = ("temperature", "top_p")
# named where the value is not the neutral one: {name: (neutral value, how it is written)}
UNLESS_NEUTRAL = {
    "top_k": (0, "top_k {}"),
    "stop": ([], "stop {}"),
    "scoring": ("exact", "{} scoring"),
    "params": (None, "parameters {}"),
    "revision": (None, "revision {}"),
    "chat_template_kwargs": (None, "template {}"),
}
# named where the files that are compared differ in it
IF_DIFFERENT = {
    "max_new_tokens": "at most {} tokens",
    "reward": "{} reward",
    "reward_weights": "weights {} of the rewards",
    "dtype": "{}",
    "seed": "seed {}",
    "model_fingerprint": "weights {}",
    "prompts": "prompts of {}",
}


def describe(results: dict) -> str:
    """Model, and on a second line the sampling law: ``"tiny_model\\ntemperature 1, top_p 0.95"``; "" if neither is known."""
    return describe_each([results])[0]


def in_one_line(results: dict, otherwise: str) -> str:
    """``describe`` for a heading: ``"tiny_model (temperature 1, top_p 0.95)"``; else ``otherwise``."""
    model, _, law = describe(results).partition("\n")
    return f"{model} ({law})" if law else model or otherwise


def describe_each(several: Sequence[dict]) -> list[str]:
    """``describe`` of results files that are compared; what they differ in is named too.

    Prompts (zero-shot, few-shot) are named by the folder and file name of their oracle table, rollouts or data set.
    """
    facts = [_facts(results) for results in several]
    differing = [name for name in IF_DIFFERENT if len({repr(each.get(name)) for each in facts}) > 1]
    return [_description(each, differing) for each in facts]


def _facts(results: dict) -> dict:
    config = results.get("config") or {}
    facts = {**config, **(results.get("law") or {})}
    source = config.get("oracle_table") or (config.get("rollouts") or [config.get("dataset")])[0]
    if source:
        facts["prompts"] = "/".join(Path(source).parts[-2:])
    return facts


def _listed(values: list) -> str:
    return " ".join(f"{each:g}" if isinstance(each, float) else str(each) for each in values)


def _description(facts: dict, differing: Sequence[str]) -> str:
    parts = [f"{name} {facts[name]:g}" for name in ALWAYS if isinstance(facts.get(name), (int, float))]
    for name, (neutral, form) in UNLESS_NEUTRAL.items():
        if name in facts and facts[name] != neutral:
            value = " ".join(map(repr, facts[name])) if isinstance(facts[name], list) else facts[name]
            parts.append(form.format(value))
    shown = {name: _listed(fact) if isinstance(fact, list) else fact for name, fact in facts.items()}
    more = [IF_DIFFERENT[name].format(shown[name]) for name in differing if facts.get(name) is not None]
    model = Path(str(facts["model"])).name if facts.get("model") else ""
    return "\n".join(line for line in (model, ", ".join(parts), *more) if line)
