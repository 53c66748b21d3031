"""GroupSizeCallback in TRL's GRPOTrainer: its own samples, and the rollouts that the trainer has generated. Needs trl."""

import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch

pytest.importorskip("trl", reason="trl is not installed")

from callback_runs import TINY, after, measured, same
from datasets import Dataset
from readme_commands import code_blocks
from scripts import ROOT
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from data.make_arithmetic import make_problems, write_jsonl
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.stats.prompts import reduce_prompts
from Gradient_evaluation.utils import integer_reward
from Policy_Optimization import train_with_trl
from Policy_Optimization.group_size_callback import GroupSizeCallback
from Policy_Optimization.trainer_rollouts import prompt_ids

PROBLEMS = Dataset.from_list(make_problems(12, seed=0))
SMALL = dict(every=5, group_size=4, n_prompts=5)


def right(completions, ground_truth, **columns):
    return [integer_reward(each[0]["content"], truth) for each, truth in zip(completions, ground_truth)]


def length(completions, completion_ids, **columns):
    """Graded, so that no group is silent; no reward for a completion of a single token."""
    return [None if len(ids) < 2 else 0.1 * len(ids) + sum(ids) % 7 for ids in completion_ids]


def trainer_of(out, rewards=(right, length), dtype=torch.float32, **changes):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    settings = dict(
        output_dir=str(out),
        max_steps=10,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=6,
        learning_rate=1e-3,
        logging_steps=5,
        save_strategy="no",
        bf16=False,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype),
        reward_funcs=list(rewards),
        train_dataset=PROBLEMS,
        eval_dataset=PROBLEMS.select(range(4)),
        processing_class=AutoTokenizer.from_pretrained(TINY),
        args=GRPOConfig(**{**settings, **changes}),
    )


def trained(out, callback=None, **changes):
    trainer = trainer_of(out, **changes)
    if callback:
        callback.attach(trainer)
    trainer.train()
    return trainer


def own():
    return GroupSizeCallback(PROBLEMS, [right, length], **SMALL)


def of_trainer(**changes):
    return GroupSizeCallback(rollouts="trainer", **{"every": 5, **changes})


def entries(trainer):
    """What the trainer itself has logged, without its clock."""
    clock = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
    return [
        {name: value for name, value in entry.items() if name not in clock}
        for entry in trainer.state.log_history
        if "group_size/c2" not in entry
    ]


SETTINGS = {
    "plain": {},
    "reused": dict(num_iterations=2, gradient_accumulation_steps=2, gradient_checkpointing=True, temperature=0.8, top_p=0.9),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_ten_steps_of_grpo_are_bit_equal_with_and_without_the_callback(name, tmp_path):
    without = trained(tmp_path / "without", **SETTINGS[name])
    for callback in (own(), of_trainer()):
        found = trained(tmp_path / callback.rollouts, callback, **SETTINGS[name])
        same(after(without), after(found))
        assert entries(without) == entries(found)  # TRL's averages too
        lines = measured(tmp_path / callback.rollouts)
        assert len(lines) >= 2 and all("error" not in line for line in lines), lines


def gram_of(model, prompt, completions):
    """Scores by one ordinary backward each, of the full softmax at temperature 1: (B, parameters) float64."""
    scores = []
    for tokens in completions:
        model.zero_grad()
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None]).sum().backward()
        scores.append(torch.cat([p.grad.flatten() for p in model.parameters()]).numpy().copy())
    return np.stack(scores)


class Seen:
    """A reward that keeps what it was given, and the weights that generated it."""

    __name__ = "seen"

    def __init__(self):
        self.batches, self.trainer = [], None

    def __call__(self, prompts, completions, completion_ids, **columns):
        rewards = [float(sum(ids) % 5) for ids in completion_ids]
        weights = {name: value.clone() for name, value in self.trainer.model.state_dict().items()}
        self.batches.append((prompts, completion_ids, rewards, weights))
        return rewards


def test_the_trainers_rollouts_give_the_numbers_of_an_ordinary_backward_pass_at_the_weights_that_drew_them(tmp_path):
    """Float64, and sketches so large that they are the gradients: c1 too is exact."""
    seen = Seen()
    trainer = trainer_of(tmp_path, [seen], torch.float64, max_steps=6, gradient_accumulation_steps=2)
    seen.trainer = trainer
    of_trainer(sketch_dim=1024).attach(trainer)
    trainer.train()
    lines = measured(tmp_path)
    assert [line["step"] for line in lines] == [0, 5] and all(line["n_prompts"] == 4 for line in lines)
    tokenizer, model = AutoTokenizer.from_pretrained(TINY), AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float64)
    for line in lines:
        prompts, ids, rewards, weights = seen.batches[line["step"]]
        model.load_state_dict(weights)
        records, thetas = [], []
        for start in range(0, 16, 4):
            part = slice(start, start + 4)
            prompt = tokenizer.apply_chat_template(prompts[start], add_generation_prompt=True, return_dict=True)["input_ids"]
            scores, own_rewards = gram_of(model, list(prompt), ids[part]), np.array(rewards[part])
            lengths = np.array([len(each) for each in ids[part]])
            thetas.append((own_rewards - own_rewards.mean()) @ scores / 3)
            records.append(Prompt([(scores @ scores.T, own_rewards, lengths)]))
        pairs, thetas = reduce_prompts(records).pairs, np.array(thetas)
        inner = thetas @ thetas.T
        common = (inner.sum() - np.trace(inner)) / 12
        assert np.isclose(line["c1"], pairs.theta_sq.mean() - common, rtol=1e-5)
        assert np.isclose(line["c2"], 4 * pairs.zeta1.mean(), rtol=1e-6)
        assert np.isclose(line["c3"], (2 * pairs.zeta2 - 4 * pairs.zeta1).mean(), rtol=1e-6)
        assert np.isclose(line["mean_reward"], np.mean(rewards)) and line["num_generations"] == 4
        ends = [each[-1] == tokenizer.eos_token_id for each in ids]
        assert line["n_truncated"] == ends.count(False)


class Prompt:
    oracle_value = None

    def __init__(self, blocks):
        self.blocks = blocks


def test_only_batches_that_have_just_been_generated_are_measured(tmp_path):
    """Two updates of each batch; an evaluation after every step has completions of its own, which are not taken."""
    trained(tmp_path, of_trainer(every=1), max_steps=5, num_iterations=2, eval_strategy="steps", eval_steps=1)
    lines = measured(tmp_path)
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert all("error" not in line and line["n_prompts"] == 2 for line in lines)


def test_a_reward_function_is_called_as_often_and_with_the_same_arguments(tmp_path):
    calls = {}
    for name, callback in (("without", None), ("with", of_trainer())):
        calls[name] = []

        def counted(name=name, **given):
            calls[name].append((given["prompts"], given["completions"], given["completion_ids"], sorted(given)))
            return [0.5 * len(ids) for ids in given["completion_ids"]]

        trained(tmp_path / name, callback, rewards=[counted], max_steps=3)
    assert calls["with"] == calls["without"] and len(calls["with"]) == 3


def test_a_callback_that_is_attached_twice_records_once(tmp_path):
    callback, trainer = of_trainer(), trainer_of(tmp_path, max_steps=1)
    callback.attach(trainer).attach(trainer)
    trainer.train()
    (line,) = measured(tmp_path)
    assert line["n_continuations"] + line["n_left_out"] == 8 and trainer.callback_handler.callbacks.count(callback) == 1


def test_async_rewards_and_generators_are_recorded_too(tmp_path):
    async def slow(completion_ids, **columns):
        return [float(len(ids)) for ids in completion_ids]

    def lazy(completion_ids, **columns):
        return np.array([float(sum(ids) % 3) for ids in completion_ids])

    trained(tmp_path, of_trainer(), rewards=[slow, lazy], max_steps=2, reward_weights=[1.0, 2.0])
    (line,) = measured(tmp_path)
    assert "error" not in line and line["n_continuations"] == 8 and line["mean_reward"] > 0


@pytest.mark.parametrize("prompt", ["1+1=", [{"role": "user", "content": "What is 1+1?"}]], ids=["string", "messages"])
def test_prompts_have_the_token_ids_that_trl_gives_them(prompt, tmp_path):
    trainer = trainer_of(tmp_path)
    assert prompt_ids(trainer.processing_class, prompt, {}) == list(trainer._tokenize_prompts([prompt])[0][0])


def test_what_the_trainers_rollouts_do_not_allow_is_refused(tmp_path):
    with pytest.raises(UserError, match="callback.attach"):
        trainer = trainer_of(tmp_path)
        trainer.add_callback(of_trainer())
        trainer.train()
    model = AutoModelForSequenceClassification.from_pretrained(TINY, num_labels=1)
    trainer = trainer_of(tmp_path)
    trainer.reward_funcs = [model]
    with pytest.raises(UserError, match="gets none; give a function"):
        of_trainer().attach(trainer)
    with pytest.raises(UserError, match="sum_then_normalize"):
        trained(tmp_path, of_trainer(), multi_objective_aggregation="normalize_then_sum")
    with pytest.raises(UserError, match="min_p=0.1"):
        trained(tmp_path, own(), min_p=0.1)
    with pytest.raises(UserError, match="num_generations 2"):
        trained(tmp_path, of_trainer(), num_generations=2)


def test_groups_that_two_processes_share_are_put_together(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = f"""
import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}, {str(ROOT / "tests" / "training")!r}]
from test_group_size_trl import of_trainer, trained
trained({str(tmp_path)!r}, of_trainer(), per_device_train_batch_size=6, max_steps=2)
"""
    (tmp_path / "run.py").write_text(script)
    done = subprocess.run([*launcher, tmp_path / "run.py"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = measured(tmp_path)
    assert "error" not in line and line["n_prompts"] == 3 and line["n_continuations"] + line["n_left_out"] == 12
    assert line["prompts_per_step"] == 3


@pytest.mark.parametrize("rollouts", ["own", "trainer"])
def test_the_example_trains_and_prints_the_group_size(rollouts, tmp_path, capsys):
    flags = ["--steps", "2", "--every", "1", "--num_generations", "4", "--prompts_per_step", "4", "--n_prompts", "4"]
    more = ["--lora"] if rollouts == "own" else []
    train_with_trl.main([*flags, *more, "--out_dir", str(tmp_path), "--rollouts", rollouts, "--model", str(TINY)])
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    steps = [0, 1, 2] if rollouts == "own" else [0, 1]
    assert [int(line.split()[1]) for line in printed] == steps and all("G* " in line for line in printed)


def test_the_snippet_of_the_page_runs_as_it_is_copied(tmp_path):
    """From the root of the repository, after the demo; with two steps."""
    (snippet,) = [
        each for each in code_blocks((ROOT / "docs" / "training.md").read_text(), "py") if "GroupSizeCallback" in each
    ]
    write_jsonl(make_problems(20, seed=0), tmp_path / "outputs" / "demo" / "problems.jsonl")
    (tmp_path / "data").symlink_to(ROOT / "data")
    code = snippet.replace("max_steps=100", "max_steps=2").replace("every=50", "every=2")
    assert code.count("=2") >= 2
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = measured(tmp_path / "outputs" / "trl_demo")
    assert [line["step"] for line in lines] == [0, 2] and all("error" not in line for line in lines)
