"""Does a test fail for every mistake that matters? Break one thing at a time in a copy of the tree and see.

    .venv/bin/python tests/mutations.py            # all, about ten minutes on two cores
    .venv/bin/python tests/mutations.py eos pad    # those whose name holds one of these words

Prints a line per mutation and exits with 1 if any survives. Not collected by pytest; run it after changing a formula.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Mutation(NamedTuple):
    name: str
    file: str
    old: str
    new: str
    tests: str  # where it must be found


GRAM, SAMPLING, ESTIMATORS = "tests/test_score_gram.py", "tests/test_sampling.py", "tests/test_estimators.py"
KEPT = "tests/test_prompt_activations.py"
SCRIPTS, RUNS = "tests/test_scripts.py", "tests/test_runs.py"
MUTATIONS = [
    Mutation("drop the tied cross terms", "gram_capture.py", "if key in self.heads and uses:", "if False:", GRAM),
    Mutation("prompt kept once where the rows differ", "prompt_activations.py",
             "if not torch.equal(prompt, prompt[:1].expand_as(prompt)):", "if False:", KEPT),
    Mutation("an old value in the same memory taken for the new", "prompt_activations.py",
             "if other._version == version and _is_same", "if _is_same", KEPT),
    Mutation("a change in place not noticed", "prompt_activations.py", "if self.x._version != self.version:", "if False:", KEPT),
    Mutation("leave out the norm layers", "gram_rules.py", "Dense(g.reshape(len(a), -1)) for", "Dense(0 * g.reshape(len(a), -1)) for", GRAM),
    Mutation("leave out biases", "gram_rules.py", '"bias": Dense(widen(b).sum(1))', '"bias": Dense(0 * widen(b).sum(1))', GRAM),
    Mutation("a padding row has a gradient", "gram_rules.py", "if module.padding_idx is not None:", "if False:", GRAM),
    Mutation("forget the end of sequence", "score_gram.py", 'self.score_eos = scoring == "exact"', "self.score_eos = False", GRAM),
    Mutation("pad counted", "score_gram.py", ".masked_fill(~scored, 0.0)", "", GRAM),
    Mutation("temperature not applied to log-probs", "vocabulary.py", "        x = x / temperature", "        pass", SAMPLING),
    Mutation("temperature not applied to the kept set and draws", "sampling.py",
             "return logits if law.temperature == 1.0 else logits / law.temperature", "return logits", SAMPLING),
    Mutation("temperature missing from the gradient", "vocabulary.py", "gradient.unsqueeze(1) / ctx.temperature", "gradient.unsqueeze(1)", SAMPLING),
    Mutation("top_p not renormalised", "vocabulary.py", "return x if removed is None else x.masked_fill(removed[part], -torch.inf)", "return x", SAMPLING),
    Mutation("sampled token not kept in the nucleus", "sampling.py", "~kept.scatter_(-1, chosen.unsqueeze(-1), True)", "~kept", SAMPLING),
    Mutation("ties and more at the edge of the nucleus", "vocabulary.py", "(edge < values.gather(-1, count - 1)).squeeze(-1)",
             "(edge <= values.gather(-1, count - 1)).squeeze(-1)", SAMPLING),
    Mutation("draws by likelihood instead of by id", "vocabulary.py", "masked_fill(torch.arange(k) >= count, logits.shape[1]).sort(dim=-1)",
             "masked_fill(torch.arange(k) >= count, logits.shape[1]).sort(dim=-1, descending=True)", SAMPLING),
    Mutation("top_k left out of the draws", "sampling.py", "    if 0 < law.top_k < logits.shape[-1]:\n        logits = logits.masked",
             "    if False:\n        logits = logits.masked", SAMPLING),
    Mutation("the bias of a thin product left out", "thin_products.py", "out += layer.bias", "pass", SAMPLING),
    Mutation("a token of probability 0 drawn", "vocabulary.py", "_below(rest, inside[:, -1:])", "rest", SAMPLING),
    Mutation("top_p before top_k", "sampling.py", "        logits = logits.masked_fill(~kept, -torch.inf)\n    if law.top_p",
             "    if law.top_p", SAMPLING),
    Mutation("random numbers by place in the batch", "sampling.py", "np.array([0, index, 0, 0]", "np.array([0, index - first, 0, 0]", SAMPLING),
    Mutation("shared draws between the scripts", "prompt_measurement.py", 'self._sample("tracecov"', 'self._sample("oracle"',
             f"{SCRIPTS}::test_the_two_scripts_never_share_draws"),
    Mutation("the reward reads past a stop string", "sampling.py", "False, text[:min(places)])", "False, text)", SAMPLING),
    Mutation("only one of two end ids", "sampling.py", "ids.update(named if", "ids.update(named[:1] if", SAMPLING),
    Mutation("published scoring everywhere", "score_gram.py", 'self.law = law if scoring == "exact" else SamplingLaw()', "self.law = SamplingLaw()", GRAM),
    Mutation("richer results replaced in silence", "tracecov_results.py", "if not lost:", "if True:", "tests/test_refused.py"),
    Mutation("flags without effect beside --from_grams", "run_tracecov.py", "if args.from_grams and without_effect:", "if False:", SCRIPTS),
    Mutation("ddof 0", "advantages.py", "ddof=1", "ddof=0", ESTIMATORS),
    Mutation("off-diagonal mean with n^2", "block_statistics.py", "return (everything - diagonal) / (size * (size - 1))",
             "return (everything - diagonal) / size**2", ESTIMATORS),
    Mutation("K/(K-1) left out of the variance", "block_statistics.py", "/ (group_size * (group_size - 1))", "/ group_size**2", ESTIMATORS),
    Mutation("coinciding pairs counted in ||theta||^2", "block_statistics.py", "everything - 4 * chains - 2 * pairs", "everything - 4 * chains", ESTIMATORS),
    Mutation("b* from the same block", "prompt_moments.py", "1.0 - np.eye(len(blocks))", "np.eye(len(blocks))", ESTIMATORS),
    Mutation("ratio of per-prompt ratios", "prompt_bootstrap.py", "self.of_means([numerator, denominator], np.divide)",
             "self.of_means([np.asarray(numerator) / np.asarray(denominator)], lambda x: x)", ESTIMATORS),
    Mutation("a tied head missing from the sketch", "gradient_sketch.py", "if isinstance(use, Rows):", "if isinstance(use, Outer) and len(self.parameters[key][1]) == 40:\n            return torch.zeros(len(use.a), self.sizes[key], dtype=use.a.dtype)\n        if isinstance(use, Rows):",
             "tests/test_gradient_sketch.py"),
    Mutation("the sum of blocks instead of their mean", "prompt_measurement.py", '"sketch": np.mean(sketches, axis=0)',
             '"sketch": np.sum(sketches, axis=0)',
             f"{SCRIPTS}::test_sketches_are_the_true_gradients_and_the_group_size_law_follows_within_error"),
    Mutation("no lock between two processes", "run_files.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB",
             f"{RUNS}::test_the_second_of_two_processes_is_refused_and_writes_nothing"),
    Mutation("rows of other processes are not taken", "run_files.py", "for path in (table, *_parts(table)):\n        found, size",
             "for path in (table,):\n        found, size",
             f"{RUNS}::test_two_processes_leave_what_one_leaves"),
    Mutation("every process measures every prompt", "processes.py", 'self._store.add, "taken", 1', 'self._store.add, f"taken{self.rank}", 1',
             f"{RUNS}::test_every_prompt_is_taken_by_exactly_one_process_and_a_slow_one_holds_up_nobody"),
    Mutation("a batch that does not fit goes to the least size", "memory.py",
             "self.size = max(self.least, self.size // 2)", "self.size = self.least",
             f"{RUNS}::test_a_batch_halves_until_it_fits_says_so_and_stays"),
    Mutation("a halved batch grows again", "memory.py", "        asked = self.size\n",
             "        asked = self.size = getattr(self, 'first', self.size)\n        self.first = asked\n",
             f"{RUNS}::test_a_batch_halves_until_it_fits_says_so_and_stays"),
    Mutation("a torn last row is not cut off", "run_files.py", "        truncate_file(path, size)\n", "", SCRIPTS),
]


def survives(mutation: Mutation) -> str | None:
    """Why the mutation was not caught, or None when a test failed."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "outputs", "__pycache__", ".hypothesis"))
        path = tree / "Gradient_evaluation" / mutation.file
        source = path.read_text()
        if source.count(mutation.old) < 1:
            return "the text to break is not there any more: mend tests/mutations.py"
        path.write_text(source.replace(mutation.old, mutation.new))
        run = subprocess.run([sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", mutation.tests],
                             cwd=tree, capture_output=True, text=True)
        if run.returncode == 0:
            return "NO TEST FAILS"
        if run.returncode != 1:
            return f"pytest could not run: {run.stdout[-300:]}"
        failed = next((line for line in run.stdout.splitlines() if line.startswith("FAILED")), "FAILED")
        print(f"caught    {mutation.name:45} {failed.split(' - ')[0].removeprefix('FAILED ')}", flush=True)
        return None


def main() -> None:
    words = sys.argv[1:]
    chosen = [m for m in MUTATIONS if not words or any(word in m.name for word in words)]
    missed = 0
    for mutation in chosen:
        why = survives(mutation)
        if why is not None:
            missed += 1
            print(f"SURVIVED  {mutation.name:45} {why}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} mutations caught")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
