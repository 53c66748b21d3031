"""The group size while a policy is trained: a callback for TRL's trainers and every other Hugging Face Trainer.

    from Policy_Optimization.group_size_callback import GroupSizeCallback

    trainer = GRPOTrainer(model=..., reward_funcs=reward, args=..., train_dataset=problems)
    GroupSizeCallback(problems, reward, every=50).attach(trainer)
    trainer.train()

Every 50 steps it measures how noisy the GRPO gradient of the present policy is at every group size, on the trainer's own model:
c1, c2, c3, the best group size G*, the signal-to-noise ratio of one step, and what half and double the group size would give
(numbers_of in policy_in_place.py says what each is). The numbers go wherever the trainer logs to, as group_size/NAME, and
to OUTPUT_DIR/group_size.jsonl, one line a measurement; plots/plot_over_steps.py draws that file.

The training is the same with and without it, to the last bit: it changes no parameter, gradient, optimiser state, random state
or mode. An error in a measurement is one warning, and the training goes on. train_with_trl.py is an example to run.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.rewards.own_reward import check_weights, resolve_reward, reward_in_process
from Gradient_evaluation.runs.inputs.rewards import RunRewards, check_ground_truths, judged
from Gradient_evaluation.runs.machine.files import append_row, one_line_errors, read_finished_rows, truncate_file
from Gradient_evaluation.runs.measure import SMALLEST_BLOCK
from Gradient_evaluation.sampling.generate import eos_token_ids
from Gradient_evaluation.sampling.law import SamplingLaw
from Policy_Optimization.policy_in_place import Group, Policy, Record, Trained, as_logged, in_place, numbers_of, rows_of
from Policy_Optimization.trainer_rollouts import (
    RolloutRecorder,
    check_measurable,
    gathered,
    groups_of,
    law_of,
    prompt_ids,
    trained_with,
)

FILE = "group_size.jsonl"
OWN, OF_TRAINER = "own", "trainer"


class GroupSizeCallback(TrainerCallback):
    """Measures the group-size law of the policy that is trained.

    prompts: a datasets.Dataset or a list of dictionaries with a column ``prompt``; ``n_prompts`` of them are drawn by ``seed``
    and stay the same for the whole run, and so do the random numbers of their continuations.
    reward: f(text, ground_truth), TRL's f(completions, **columns) or VERL's compute_score, the name of a built-in reward
    ("integer", "math"), or several of these with ``reward_weights``. It is called in this process, and must not keep state.
    every: optimiser steps from one measurement to the next; the first one is made before the training.
    group_size: continuations of a block, at least 4; blocks: blocks of each prompt. Any group size is predicted from them.
    rollouts: "own" samples anew; "trainer" measures the groups that a TRL trainer has just generated and rewarded, before the
    step that they are for (no ``prompts``, ``reward`` and ``group_size`` then).
    law: the sampling law; by default that of the trainer's arguments (temperature, top_p, top_k, max_completion_length).
    num_generations, prompts_per_step: the trainer's G and B, where its arguments do not say.
    sample_at_once: continuations in one batch of sampling; by default as many as the trainer generates at a time.

    Raises UserError for a setting that cannot be, here or when the training begins; nothing after that stops a training.
    """

    def __init__(
        self,
        prompts: Sequence[Mapping[str, Any]] | None = None,
        reward: Callable | str | Sequence[Callable | str] | None = None,
        every: int = 50,
        blocks: int = 1,
        group_size: int = 16,
        *,
        n_prompts: int = 16,
        rollouts: str = OWN,
        reward_weights: Sequence[float] | None = None,
        law: SamplingLaw | None = None,
        num_generations: int | None = None,
        prompts_per_step: float | None = None,
        sample_at_once: int | None = None,
        sketch_dim: int = 16,
        seed: int = 0,
    ):
        least = {
            "every": (every, 1),
            "blocks": (blocks, 1),
            "group_size": (group_size, SMALLEST_BLOCK),
            "n_prompts": (n_prompts, 1),
            "sketch_dim": (sketch_dim, 2),
            "sample_at_once": (sample_at_once or 1, 1),
            "num_generations": (num_generations or 2, 2),
        }
        for name, (value, lowest) in least.items():
            if not isinstance(value, int) or value < lowest:
                raise UserError(f"GroupSizeCallback: {name}={value!r}: give an integer of at least {lowest}")
        if rollouts not in (OWN, OF_TRAINER):
            raise UserError(f'GroupSizeCallback: rollouts={rollouts!r}: give "{OWN}" or "{OF_TRAINER}"')
        if (rollouts == OWN) != (prompts is not None and reward is not None):
            raise UserError('GroupSizeCallback: give prompts and reward, or rollouts="trainer" without both')
        self.every, self.blocks, self.group_size, self.rollouts = every, blocks, group_size, rollouts
        self.law, self.sketch_dim, self.seed, self.sample_at_once = law, sketch_dim, seed, sample_at_once
        self.trained = Trained(num_generations, prompts_per_step)
        self.rows, self.rewards = [], None
        if rollouts == OWN:
            self.rows, self.rewards = rows_of(prompts, n_prompts, seed), _rewards(reward, reward_weights)
            check_ground_truths(self.rows, self.rewards)
        self.recorder = RolloutRecorder()
        self.trainer: Trainer | None = None
        self.audited = self.warned = False
        self.template: Mapping[str, Any] = {}

    def attach(self, trainer: Trainer) -> GroupSizeCallback:
        """Add this callback to a trainer, and log through it. Without it (callbacks=[...]) W&B and TensorBoard get nothing."""
        if self.trainer is trainer:
            return self
        self.trainer = trainer
        if self.rollouts == OF_TRAINER:
            if not hasattr(trainer, "reward_funcs"):
                raise UserError(f'GroupSizeCallback: rollouts="trainer": {type(trainer).__name__} has no reward_funcs')
            trainer.reward_funcs = self.recorder.wrapped(trainer.reward_funcs)
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        return self

    # --- events of the trainer ---

    def on_train_begin(self, args, state, control, model=None, processing_class=None, **others):
        """Check what can be checked, then measure the policy that the training starts from, and tell the cost."""
        if processing_class is None:
            raise UserError("GroupSizeCallback: the trainer has no processing_class; give it the model's tokenizer")
        self._prepare(args, model)
        self.began, self.spent, self.measurements, self.due = time.perf_counter(), 0.0, 0, state.global_step
        if self.rollouts == OWN:
            self._measure(args, state, control, model, processing_class)

    def on_step_begin(self, args, state, control, **others):
        """Forget the rollouts of the step before, and those of an evaluation."""
        self.recorder.clear()

    def on_pre_optimizer_step(self, args, state, control, model=None, processing_class=None, **others):
        """rollouts="trainer": the parameters are still those that generated the batch."""
        if self.rollouts == OF_TRAINER and state.global_step >= self.due and self.recorder.calls:
            self._measure(args, state, control, model, processing_class)

    def on_step_end(self, args, state, control, model=None, processing_class=None, **others):
        """rollouts="own": every so many steps."""
        if self.rollouts == OWN and state.global_step >= self.due:
            self._measure(args, state, control, model, processing_class)

    def on_train_end(self, args, state, control, **others):
        """What it cost."""
        if state.is_world_process_zero and self.measurements:
            whole = time.perf_counter() - self.began
            self._say(
                f"{self.measurements} measurements took {self.spent:.1f} s, {self.spent / whole:.1%} of the run's "
                f"{whole:.0f} s: {self._file(args)}"
            )

    # --- before the training ---

    def _prepare(self, args, model) -> None:
        check_measurable(args, model, self.trainer)
        if self.rollouts == OF_TRAINER and self.trainer is None:
            raise UserError(
                'GroupSizeCallback: rollouts="trainer": write callback.attach(trainer) instead of callbacks=[callback]'
            )
        if self.rollouts == OF_TRAINER and getattr(args, "multi_objective_aggregation", "") == "normalize_then_sum":
            raise UserError(
                'GroupSizeCallback: rollouts="trainer" sums rewards as multi_objective_aggregation="sum_then_normalize"'
            )
        self.law = self.law or law_of(args)
        own = trained_with(args)
        self.trained = Trained(self.trained.group_size or own.group_size, self.trained.prompts or own.prompts)
        self.template = getattr(args, "chat_template_kwargs", None) or {}
        if self.rollouts == OF_TRAINER and self.trained.group_size < SMALLEST_BLOCK:
            raise UserError(
                f'GroupSizeCallback: rollouts="trainer": num_generations {self.trained.group_size}: at least {SMALLEST_BLOCK} '
                "completions of a prompt are needed; give prompts and reward, which are sampled anew"
            )
        if args.process_index == 0:
            with one_line_errors(args.output_dir, "write"):
                Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            truncate_file(self._file(args), read_finished_rows(self._file(args))[1])

    # --- one measurement ---

    def _measure(self, args, state, control, model, processing_class) -> None:
        """One measurement, logged. No error gets out of it, but for KeyboardInterrupt."""
        began, step = time.perf_counter(), state.global_step
        self.due = (step // self.every + 1) * self.every
        try:
            numbers = self._numbers(args, model, getattr(processing_class, "tokenizer", processing_class))
        except Exception as error:
            numbers = {"error": _in_one_line(error)}
        seconds = time.perf_counter() - began
        self.spent, self.measurements = self.spent + seconds, self.measurements + 1
        share = self.spent / (time.perf_counter() - self.began) if self.measurements > 1 else None
        row = {"step": step, "epoch": state.epoch, **numbers, "seconds": round(seconds, 3), "share_of_run": share}
        try:
            if state.is_world_process_zero:
                append_row(self._file(args), row)
            self._log(state, control, row)
        except Exception as error:
            numbers = {"error": _in_one_line(error)}
        if state.is_world_process_zero:
            self._tell(numbers, state, seconds)

    def _numbers(self, args, model, tokenizer) -> dict[str, Any]:
        """The numbers of all processes' prompts. An error in one of them is raised in every one."""
        work = self._own_groups if self.rollouts == OWN else self._trainer_groups
        generations = gathered(self.recorder.rollouts()) if self.rollouts == OF_TRAINER else []
        layout, records, error = [], [], None
        try:
            with in_place(model, self.law, self.sketch_dim, self._checkpoints(args, model)) as policy:
                layout = policy.layout
                for number, group in work(args, policy, tokenizer, generations):
                    if not self.audited:
                        policy.audit(group)
                        self.audited = True
                    size = self.group_size if self.rollouts == OWN else len(group.continuations)
                    records.append((number, policy.measured(group, size)))
        except Exception as caught:
            error = _in_one_line(caught)
        found = gathered((records, error))
        for _, error in found:
            if error:
                raise UserError(error)
        every = [record for _, record in sorted((pair for part, _ in found for pair in part), key=lambda pair: pair[0])]
        kept: list[Record] = [record for record in every if record is not None]
        if not kept:
            raise UserError(f"no prompt has {SMALLEST_BLOCK} continuations with a reward")
        return numbers_of(kept, layout, self.sketch_dim, self.trained, self.seed)

    def _own_groups(self, args, policy: Policy, tokenizer, generations) -> list[tuple[int, Group]]:
        """This process's share of the prompts, with new continuations: (number of the prompt, group)."""
        mine = list(range(args.process_index, len(self.rows), args.world_size))
        asked = [(self.rows[i], prompt_ids(tokenizer, self.rows[i].prompt, self.template)) for i in mine]
        count, per_step = self.blocks * self.group_size, getattr(args, "steps_per_generation", None) or 1
        at_once = self.sample_at_once or max(count, args.per_device_train_batch_size * per_step)
        drawn = policy.sampled(tokenizer, asked, count, at_once, self.seed)
        return [
            (i, Group(row, ids, continuations, judged(continuations, row, self.rewards).total))
            for i, (row, ids), continuations in zip(mine, asked, drawn)
        ]

    def _trainer_groups(self, args, policy: Policy, tokenizer, generations) -> list[tuple[int, Group]]:
        """This process's share of the groups that the trainer has generated. generations: of each process, in order of rank."""
        together = [[each for part in parts for each in part] for parts in zip(*generations)]
        weights = [float(each) for each in self.trainer.reward_weights]
        ends = eos_token_ids(policy.gram.model, tokenizer)
        groups = groups_of(together, self.trained.group_size, weights, tokenizer, self.template, ends)
        return list(enumerate(groups))[args.process_index :: args.world_size]

    def _checkpoints(self, args, model) -> bool:
        """Whether the layers are run again in the backward pass: as the trainer does, where the model can."""
        return bool(getattr(args, "gradient_checkpointing", False)) and getattr(model, "supports_gradient_checkpointing", False)

    # --- what is told ---

    def _log(self, state, control, row: Mapping[str, Any]) -> None:
        """The numbers as group_size/NAME, to what the trainer logs to. The trainer's own entry of this step stays as it is."""
        logs = as_logged(row)
        if self.trainer is None:
            state.log_history.append({**logs, "epoch": state.epoch, "step": state.global_step})
            return
        asked = control.should_log
        # Trainer.log itself: a trainer's own log would put its averages so far into this entry and begin new ones
        Trainer.log(self.trainer, logs)
        control.should_log = asked

    def _tell(self, numbers: Mapping[str, Any], state, seconds: float) -> None:
        if "error" in numbers:
            if not self.warned:
                warnings.warn(
                    f"GroupSizeCallback: no measurement at step {state.global_step}: {numbers['error']}; the training goes on, "
                    "and the next ones are tried without another warning",
                    stacklevel=2,
                )
            self.warned = True
        elif self.measurements == 1:
            more = max(0, (state.max_steps - state.global_step) // self.every)
            self._say(
                f"a measurement of {numbers['n_prompts']} prompts and {numbers['n_continuations']} continuations took "
                f"{seconds:.1f} s; {more} more in {state.max_steps} steps (every={self.every}): about {more * seconds:.0f} s"
            )

    def _say(self, text: str) -> None:
        print(f"GroupSizeCallback: {text}", file=sys.stderr, flush=True)

    def _file(self, args) -> Path:
        return Path(args.output_dir) / FILE


def _rewards(reward, weights: Sequence[float] | None) -> RunRewards:
    several = [reward] if callable(reward) or isinstance(reward, str) else list(reward)
    found = tuple(resolve_reward(each) if isinstance(each, str) else reward_in_process(each) for each in several)
    return RunRewards(found, check_weights(weights, [each.name for each in found]))


def _in_one_line(error: BaseException) -> str:
    return " ".join((str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}").split())[:400]
