"""A small training for the tests of GroupSizeCallback: the shipped tiny model, a plain Trainer, everything random in it.

As a script it is one of two processes: torchrun ... tests/training/callback_runs.py OUT_DIR    (trains with and without)
"""

import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.make_arithmetic import make_problems
from Gradient_evaluation.sampling.law import SamplingLaw
from Policy_Optimization.group_size_callback import GroupSizeCallback

TINY = Path(__file__).resolve().parents[2] / "data" / "tiny_model"
LAW = SamplingLaw(max_new_tokens=6)
PROBLEMS = make_problems(12, seed=0)
SMALL = dict(every=5, group_size=4, n_prompts=5, law=LAW, num_generations=4, prompts_per_step=2)


def graded(text, ground_truth):
    """A reward that draws from every global random state, and depends on none."""
    random.random(), np.random.rand(), torch.rand(1)
    return float(text.strip() == str(ground_truth)) + 0.1 * len(text)


def fails_in_one_process(text, ground_truth):
    if os.environ["RANK"] == "1":
        raise ValueError("the judge of rank 1 is down")
    return graded(text, ground_truth)


def noisy(rows):
    """A collator: labels hidden at random, by three generators."""
    ids = torch.stack([torch.as_tensor(row["input_ids"]) for row in rows])
    labels = ids.clone()
    labels[:, random.randrange(3) + np.random.randint(3)] = -100
    labels[torch.rand(labels.shape) < 0.1] = -100
    return {"input_ids": ids, "labels": labels}


def model_of(dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=dtype, attention_dropout=0.1)


def trainer_of(out, callback=None, model=None, attach=True, callbacks=(), **changes):
    """A Trainer of ten steps of language modelling, which draws on torch, NumPy and Python in every step."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    rows = [{"input_ids": ids} for ids in np.random.default_rng(0).integers(3, 60, size=(40, 12)).tolist()]
    settings = dict(
        output_dir=str(out),
        max_steps=10,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=1,
    )
    trainer = Trainer(
        model=model or model_of(),
        args=TrainingArguments(**{**settings, **changes}),
        train_dataset=rows,
        data_collator=noisy,
        processing_class=AutoTokenizer.from_pretrained(TINY),
        callbacks=[*callbacks, *([callback] if callback and not attach else [])],
    )
    if callback and attach:
        callback.attach(trainer)
    return trainer


def callback_of(reward=graded, **changes):
    return GroupSizeCallback(PROBLEMS, reward, **{**SMALL, **changes})


def after(trainer):
    """All that a training leaves, to be compared to the last bit."""
    return {
        "parameters": {name: p.detach().clone() for name, p in trainer.model.named_parameters()},
        "grads": {name: None if p.grad is None else p.grad.clone() for name, p in trainer.model.named_parameters()},
        "optimizer": [value.clone() for state in trainer.optimizer.state.values() for value in state.values()],
        "modes": [module.training for module in trainer.model.modules()],
        "requires_grad": [p.requires_grad for p in trainer.model.parameters()],
        "hooks": [
            {name: len(hooks) for name, hooks in vars(module).items() if "hook" in name and isinstance(hooks, dict)}
            for module in trainer.model.modules()
        ],
        "random": (torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()),
        "losses": [(entry["step"], entry["loss"]) for entry in trainer.state.log_history if "loss" in entry],
        "use_cache": getattr(trainer.model.config, "use_cache", None),
    }


def equal(one, other) -> bool:
    """To the last bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def same(one, other):
    """Two of ``after`` are equal; AssertionError that names what is not."""
    assert [name for name in one if not equal(one[name], other[name])] == []


def measured(out):
    """The lines of the callback's file."""
    return [json.loads(line) for line in (Path(out) / "group_size.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found = []
    for name, callback in (("without", None), ("with", callback_of()), ("failing", callback_of(fails_in_one_process))):
        trainer = trainer_of(folder / name, callback, ddp_find_unused_parameters=False)
        assert trainer.args.world_size == 2
        trainer.train()
        found.append(after(trainer))
    same(found[0], found[1])
    same(found[0], found[2])
    print(f"rank {trainer.args.process_index}: bit-equal")
