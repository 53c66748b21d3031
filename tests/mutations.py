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
CHECK, STOPS, REWARDS = "tests/test_sampler_check.py", "tests/test_stop_strings.py", "tests/test_rewards.py"
SILENT, GRADED, TABLE = "tests/test_silent_groups.py", "tests/test_graded_rewards.py", "tests/test_estimator_table.py"
CHAT, DATA, PAPER = "tests/test_chat_template.py", "tests/test_launcher_data.py", "tests/test_published_commands.py"
LAW, MODELS, AUDIT = "tests/test_group_size_law.py", "tests/test_models.py", "tests/test_self_audit.py"
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
    Mutation("pad counted", "score_gram.py", ".masked_fill(~scored.to(device), 0.0)", "", GRAM),
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
    Mutation("top_k left out of the draws", "sampling.py", "    if 0 < law.top_k < logits.shape[-1]:\n        whole = ", "    if False:\n        whole = ", SAMPLING),
    Mutation("the bias of a thin product left out", "thin_products.py", "out += layer.bias", "pass", SAMPLING),
    Mutation("a token of probability 0 drawn", "vocabulary.py", "_below(rest, inside[:, -1:])", "rest", SAMPLING),
    Mutation("top_p before top_k", "sampling.py", "        logits = logits.masked_fill(~kept, -torch.inf)\n    if law.top_p",
             "    if law.top_p", SAMPLING),
    Mutation("random numbers by place in the batch", "sampling.py", "np.array([0, index, 0, 0]", "np.array([0, index - first, 0, 0]", SAMPLING),
    Mutation("shared draws between the scripts", "prompt_measurement.py", 'self._sample("tracecov"', 'self._sample("oracle"',
             f"{SCRIPTS}::test_the_two_scripts_never_share_draws"),
    Mutation("the reward reads past a stop string", "stop_strings.py", "length, text[:min(starts)]", "length, text", STOPS),
    Mutation("a stop found late", "stop_strings.py", "for length in range(self.looked_at + 1, len(ids) + 1):",
             "for length in range(len(ids), len(ids) + 1):", STOPS),
    Mutation("an unclosed think answers", "integer_answer.py", 'return None if "<think>" in reply else reply', "return reply", REWARDS),
    Mutation("the tail of a fraction", "integer_answer.py", "value = None if value is None or not divisor else value / divisor",
             "value = divisor", REWARDS),
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
    Mutation("the prompt kept once where the rows are only close", "prompt_activations.py",
             "if not torch.equal(prompt, prompt[:1].expand_as(prompt)):", "if not torch.allclose(prompt, prompt[:1].expand_as(prompt)):", KEPT),
    Mutation("the allocator keeps large temporaries", "memory.py", '_libc_call("mallopt", -3, LARGE)', "pass", RUNS),
    Mutation("the allocator gives small ones back", "memory.py", '_libc_call("mallopt", -1, 2**30)', "pass", RUNS),
    Mutation("the sampler's positions start elsewhere", "sampling.py", "return padding + real.cumsum(1) * real", "return real.cumsum(1) * real", CHECK),
    Mutation("decoded tokens get no positions", "sampling.py", "positions = {} if counted is None else", "positions = {} if True else", CHECK),
    Mutation("sampler and scorer are never compared", "sampler_check.py", "if not shares[worst] <= 1:", "if False:", CHECK),
    Mutation("the sampler check's tolerance ten times larger", "sampler_check.py", "return Tolerance(1e-5, 1e-5)", "return Tolerance(1e-4, 1e-5)", CHECK),
    Mutation("silent share biased upward", "silent_groups.py", "((counts[enough, None] - steps) / (total - steps)).prod(-1)",
             "(counts[enough] / total) ** size", SILENT),
    Mutation("P(keep) of the same continuations under ||E ghat||^2", "estimator_table.py", "np.divide(found.signal, kept * beside,",
             "np.divide(found.signal, kept * kept,", SILENT),
    Mutation("P(keep) left out of the trace", "estimator_table.py", "np.divide(found.trace + found.signal, kept,",
             "np.divide(found.trace + found.signal, np.ones_like(kept),", TABLE),
    Mutation("P(keep) of each prompt is one", "estimator_table.py", "kept = np.array([1 - each.silent_share(group_size) for",
             "kept = np.array([1 - 0 * each.silent_share(group_size) for", TABLE),
    Mutation("token-mean without the batch's tokens", "estimator_table.py", "length = prompts.mean_length",
             "length = 1.0", f"{TABLE}::test_token_mean_is_grpo_in_another_unit_and_keeps_its_effective_group_size"),
    Mutation("DAPO over the tokens of dropped groups too", "estimator_table.py",
             "if drop_silent and found.weight is not None and found.weight.sum() > 0:", "if False:",
             f"{TABLE}::test_token_mean_aggregation_is_that_of_verls_loss_over_a_whole_update_batch"),
    Mutation("V's standard error is 0 at V = 0", "calculate_oracle_v.py", "(rewards.sum() + 0.5) / (n + 1)", "rewards.mean()", GRADED),
    Mutation("a reward that is not finite is averaged", "tables.py", "if not math.isfinite(found[-1]) or (", "if False or (", GRADED),
    Mutation("V_oracle of any size in a table of 0/1 rewards", "tables.py", "if kind == ZERO_ONE and not 0 <= value <= 1:", "if False:",
             GRADED),
    Mutation("chat_template_kwargs not in the identity", "law_and_prompts.py",
             '"chat_template_kwargs": dict(chat.kwargs) or None', '"chat_template_kwargs": None',
             f"{CHAT}::test_what_the_template_was_given_belongs_to_the_identity_of_a_run_and_its_table"),
    Mutation("the date of the run forgotten", "chat_template.py",
             "date = next((date for date in dates if _is_date(date)), None)", "date = None",
             f"{CHAT}::test_a_pinned_date_is_printed_on_every_day"),
    Mutation("the clock read in spite of the date", "chat_template.py", "if chat.date is not None:", "if False:",
             f"{CHAT}::test_a_pinned_date_is_printed_on_every_day"),
    Mutation("null fields reach the template", "chat_template.py", 'if name not in ("role", "content") and value is not None}',
             'if name not in ("role", "content")}', f"{CHAT}::test_fields_that_are_null_do_not_reach_the_template"),
    Mutation("tools dropped", "chat_template.py", '**({"tools": list(tools)} if tools else {})', "**{}",
             f"{CHAT}::test_tools_reach_the_template_from_a_list_or_from_json_text"),
    Mutation("a prefill closed instead of continued", "chat_template.py", 'prefilled = messages[-1]["role"] == "assistant"',
             "prefilled = False", f"{CHAT}::test_a_last_message_of_the_assistant_is_continued_where_it_ends"),
    Mutation("a variable nothing reads taken in silence", "chat_template.py",
             "if unread := [name for name in kwargs if name not in read]:", "if unread := []:",
             f"{CHAT}::test_a_variable_the_template_does_not_read_is_refused_by_name"),
    Mutation("old tables refused for what was added later", "run_files.py", "found.get(name, ADDED_LATER.get(name)) != value",
             'found.get(name, "missing") != value',
             f"{CHAT}::test_tables_and_runs_of_earlier_versions_are_continued_and_taken_without_a_word"),
    Mutation("law of --recommended not compared", "../Policy_Optimization/sweep_manifest.py",
             "if differences and not allow_mismatch:", "if False:",
             "tests/test_sweep.py::test_a_recommendation_holds_for_the_law_it_was_measured_under"),
    Mutation("token budgets of dynamic batches not checked", "../Policy_Optimization/verl_config.py",
             "limit * shared < tokens", "limit * shared < 0",
             f"{DATA}::test_under_dynamic_batches_the_longest_sequence_fits_the_tokens_of_a_gpu"),
    Mutation("files joined unseen", "../Policy_Optimization/checks.py", "datasets.concatenate_datasets(found)", "pass",
             f"{DATA}::test_files_pass_exactly_where_verl_can_join_them"),
    Mutation("another number of GPUs taken", "../Policy_Optimization/run_folder.py", "if before and now not in before:", "if False:",
             f"{DATA}::test_a_checkpoint_of_eight_gpus_is_not_continued_on_four_whatever_flag_insists"),
    Mutation("the first rows instead of drawn ones", "run_tracecov.py", "    np.random.default_rng(seed).shuffle(order)\n", "", PAPER),
    Mutation("prompts shuffled by another generator", "run_tracecov.py", "    np.random.default_rng(seed).shuffle(order)\n",
             "    np.random.RandomState(seed).shuffle(order)\n", PAPER),
    Mutation("--subsample_prompts without effect", "run_tracecov.py", "if subsample is not None and subsample < n:", "if False:", PAPER),
    Mutation("other keys in the detailed files", "tracecov_results.py", '"tr_cov": {', '"traces": {', PAPER),
    Mutation("detailed rows numbered by row of the table", "tracecov_results.py", '"prompt_index": record.order', '"prompt_index": record.index', PAPER),
    Mutation("the released reward reads no sign", "utils.py", 're.finditer(r"-?\\d+", text)', 're.finditer(r"\\d+", text)', REWARDS),
    Mutation("two processes share a GPU", "processes.py", "if identity is not None and first.setdefault(identity, rank) != rank:", "if False:", MODELS),
    Mutation("a CUDA device without its index", "models.py", 'return torch.device("cuda", index)', 'return torch.device("cuda")', MODELS),
    Mutation("the audit's tolerance as wide as ever", "self_audit.py", "torch.bfloat16: (0.02, 0.1)}", "torch.bfloat16: (0.1, 0.1)}", AUDIT),
    Mutation("a half-precision model audited as it is", "self_audit.py", "if own & set(HALF):", "if False:", AUDIT),
    Mutation("16 rows audited whatever the block", "prompt_measurement.py",
             "count = max(block_sizes(self.args.M * self.args.K_list[-1], self.block.size))", "count = min(16, self.block.size)", AUDIT),
    Mutation("time taken for the batch", "gram_capture.py", "if module not in self.leading or next", "if next", AUDIT),
    Mutation("a gradient of a broken-off audit stays", "self_audit.py",
             "            for p in parameters.values():  # where the pass broke off, the next one would add to it\n                p.grad = None\n",
             "", AUDIT),
    Mutation("only LoRA's own matrices of an adapter trained", "adapters.py", "    model = whole.get_base_model()\n",
             "    model = whole.get_base_model()\n    for name, p in model.named_parameters():\n        p.requires_grad_('lora_' in name)\n",
             "tests/test_adapters.py"),
    Mutation("an incomplete adapter taken", "adapters.py", "if lacking := sorted(expected - held):", "if False:", "tests/test_adapters.py"),
    Mutation("scales of a quantised checkpoint dropped", "models.py",
             "if scales := [name for name in unused if SCALES.search(name)]:", "if scales := []:", MODELS),
    Mutation('percentile interval instead of bootstrap-t', 'prompt_bootstrap.py',
             '        return values.mean(0) - size * _studentised(deviations, errors, np.sqrt((centred**2).mean(0)))',
             '        return values.mean(0) + size * deviations',
             'tests/test_coverage.py::test_bootstrap_t_holds_the_truth_far_more_often_than_the_percentile_interval'),
    Mutation('percentile interval of a ratio', 'prompt_bootstrap.py',
             'draws = value - _studentised(function(*self.resampled.T) - value, errors, error)',
             'draws = function(*self.resampled.T)',
             'tests/test_coverage.py::test_bootstrap_t_holds_the_truth_far_more_often_than_the_percentile_interval'),
    Mutation("no Student's t for two or three prompts", 'prompt_bootstrap.py',
             'STUDENT = 4',
             'STUDENT = 1',
             'tests/test_coverage.py::test_two_or_three_prompts_have_students_interval'),
    Mutation('a ratio over a denominator below 0', 'prompt_bootstrap.py',
             '    if low > 0:\n        return None',
             '    if low > 0 or high < 0:\n        return None',
             'tests/test_coverage.py::test_a_ratio_is_formed_only_over_a_denominator_whose_lower_end_is_above_zero'),
    Mutation('c3 not above 0 gives G = 2', 'group_size_law.py',
             'np.where(c3 <= 0, np.nan,',
             'np.where(c3 <= 0, 2.0,',
             'tests/test_group_size_law.py::test_a_c3_that_is_not_above_zero_is_noise_and_never_the_answer_two'),
    Mutation('an answer of a c3 that is noise', 'group_size_law.py',
             '    if law["c3"] <= 0:\n        return _without',
             '    if False:\n        return _without',
             'tests/test_group_size_law.py::test_a_c3_that_is_not_above_zero_is_noise_and_never_the_answer_two'),
    Mutation('rewards that never differ not noticed', 'group_size_law.py',
             'silence = NO_REWARD_DIFFERED if not np.any(columns[2] / 2 + columns[0]) else None',
             'silence = None',
             'tests/test_group_size_law.py::test_rewards_that_never_differ_have_no_best_group_size_and_say_why'),
    Mutation('the forecast takes the interval to shrink to c1 and no further', 'group_size_answer.py',
             'CHANCE = 0.8416',
             'CHANCE = -0.5',
             'tests/test_coverage.py::test_the_forecast_never_asks_for_one_more_again_and_again'),
    Mutation('G* from c1 and c3 without the uncertainty of c1', 'group_size_answer.py',
             'draws = constants.linear((C3 - distance**2 * C1)[None])[1]',
             'draws = constants.linear(C3[None])[1] - distance**2 * (C1 @ constants.means)',
             'tests/test_group_size_law.py::test_the_less_c1_is_known_the_less_is_said_of_g_star'),
    Mutation('an effective group size below two', 'estimators.py',
             'if estimate.value < 2 - 1e-9:',
             'if False:',
             'tests/test_estimators.py::test_an_effective_group_size_below_the_smallest_group_is_null_with_the_reason'),
    Mutation("the sweep's refusal without the law's reason", '../Policy_Optimization/sweep_manifest.py',
             'recommends no size: {reason};',
             'recommends no size;',
             'tests/test_sweep.py::test_the_law_of_rewards_that_never_differ_is_refused_by_the_sweep'),
    Mutation("a ratio of an estimator over GRPO's that may be 0", '../plots/plot_estimators.py',
             '    relative = own is not None and (',
             '    relative = own is not None or (',
             'tests/test_plot_measurement.py::test_nothing_is_divided_by_a_signal_to_noise_ratio_of_grpo_that_may_be_zero'),
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
