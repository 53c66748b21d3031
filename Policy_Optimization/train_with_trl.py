"""Train with TRL's GRPOTrainer and see the best group size move: an example to run and to copy from.

    pip install trl peft
    python Policy_Optimization/train_with_trl.py --out_dir outputs/trl
    python plots/plot_over_steps.py outputs/trl/group_size.jsonl --out outputs/trl/group_size.png

The shipped tiny model learns arithmetic on a CPU: 100 steps of 16 prompts with 8 completions each, about two minutes on two
cores. G* is printed every --every steps. All that GroupSizeCallback needs are the two lines that name it. With --rollouts
trainer the completions that the trainer has generated anyway are measured. Resumes by itself from a checkpoint in --out_dir.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.cli import Parser, importing, integer, number, run


def parse_args(arguments: Sequence[str] | None):
    parser = Parser(prog="train_with_trl.py", description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="data/tiny_model", help="a model's folder or hub id (%(default)s)")
    parser.add_argument("--out_dir", default="outputs/trl", help="checkpoints and group_size.jsonl (%(default)s)")
    parser.add_argument("--steps", type=integer(1), default=100, help="optimiser steps (%(default)s)")
    parser.add_argument("--num_generations", type=integer(2), default=8, help="G of the training (%(default)s)")
    parser.add_argument("--prompts_per_step", type=integer(1), default=16, help="B of the training (%(default)s)")
    parser.add_argument("--learning_rate", type=number(0, low_included=False), default=3e-4, help="(%(default)s)")
    parser.add_argument("--every", type=integer(1), default=10, help="steps between measurements (%(default)s)")
    parser.add_argument("--n_prompts", type=integer(1), default=16, help="prompts of a measurement (%(default)s)")
    parser.add_argument("--rollouts", choices=("own", "trainer"), default="own", help="what is measured (%(default)s)")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 8 instead of the model")
    parser.add_argument("--seed", type=integer(0), default=0, help="(%(default)s)")
    return parser.parse_args(arguments)


def right(completions, ground_truth, **columns):
    """1.0 where the last number of a completion is the ground truth: a reward function as TRL calls it."""
    from Gradient_evaluation.utils import integer_reward

    return [integer_reward(each[0]["content"], truth) for each, truth in zip(completions, ground_truth)]


def main(arguments: Sequence[str] | None = None) -> None:
    flags = parse_args(arguments)
    with importing():
        import torch
        from datasets import Dataset
        from transformers.trainer_utils import get_last_checkpoint
        from trl import GRPOConfig, GRPOTrainer

        from data.make_arithmetic import make_problems
        from Policy_Optimization.group_size_callback import GroupSizeCallback
    problems = Dataset.from_list(make_problems(300, seed=flags.seed))
    adapters = None
    if flags.lora:
        from peft import LoraConfig

        adapters = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = GRPOTrainer(
        model=flags.model,
        reward_funcs=right,
        train_dataset=problems,
        peft_config=adapters,
        args=GRPOConfig(
            output_dir=flags.out_dir,
            max_steps=flags.steps,
            num_generations=flags.num_generations,
            per_device_train_batch_size=flags.num_generations * flags.prompts_per_step,
            max_completion_length=24,
            learning_rate=flags.learning_rate,
            lr_scheduler_type="constant",
            logging_steps=flags.every,
            save_steps=flags.every,
            seed=flags.seed,
            bf16=torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
        ),
    )
    if flags.rollouts == "trainer":
        callback = GroupSizeCallback(rollouts="trainer", every=flags.every)
    else:
        callback = GroupSizeCallback(problems, right, every=flags.every, n_prompts=flags.n_prompts, seed=flags.seed)
    callback.attach(trainer)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(flags.out_dir) if Path(flags.out_dir).is_dir() else None)
    for entry in trainer.state.log_history:
        if "group_size/c1" in entry:
            print(line_of(entry))


def line_of(entry: dict) -> str:
    """One measurement in a line: step, mean reward, G* with its interval, silent groups, the cost of half and double G."""

    def shown(name: str, form: str = ".3g") -> str:
        return format(entry[f"group_size/{name}"], form) if f"group_size/{name}" in entry else "-"

    half, own, double = (entry.get(f"group_size/mse{each}") for each in ("_half", "", "_double"))
    ratios = [f"{other / own:.2f}" if own and other is not None else "-" for other in (half, double)]
    return (
        f"step {entry['step']:>5}  reward {shown('mean_reward', '.3f')}  G* {shown('G_star'):>5} "
        f"[{shown('G_star_low')}, {shown('G_star_high')}]  at least {shown('G_star_at_least'):>4}  "
        f"silent {shown('frac_reward_zero_std', '.0%'):>4}  MSE at G/2, 2G over that at G: {', '.join(ratios)}"
    )


if __name__ == "__main__":
    run(main)
