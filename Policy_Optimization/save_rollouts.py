"""The buffer from which VERL's trainer takes its rollouts, and which writes them to a folder first (--save_rollouts DIR).

    trainer.v1.sampler.custom_sampler.path=/abs/path/Policy_Optimization/save_rollouts.py    (grpo_train.sh sets these)
    trainer.v1.sampler.custom_sampler.name=SavingReplayBuffer
    +trainer.v1.sampler.sampler_kwargs.save_rollouts={directory: DIR, model: MODEL, law: JSON}

VERL loads this file by its path, in the one process that trains. At every step that process takes a batch of finished
rollouts from the buffer and trains on it; this buffer is VERL's own, and all it adds is DIR/step_000001.parquet and so on, in
the format of rollout_rows.py. The file is written before the step's update and checkpoint. So a killed run has the rollouts
of every step that its checkpoint has seen, and a step that is trained again replaces its file.

A folder or tokenizer that cannot be used stops the training at its start. A step that cannot be written later (a full disk)
does not: a warning says which step and why, and the metric rollouts/saved, elsewhere their number, is 0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import transfer_queue
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

if str(Path(__file__).resolve().parents[1]) not in sys.path:  # Ray's workers start in other folders
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from Gradient_evaluation.models import checkpoint_eos, load_tokenizer
from Gradient_evaluation.runs.machine.files import one_line_errors, write_bytes_atomic
from Policy_Optimization.rollout_rows import FIELDS, as_lists, rollout_rows, step_file, to_parquet


class SavingReplayBuffer(ReplayBuffer):
    """VERL's buffer of the synchronous trainer. Its keyword arguments are VERL's; sampler_kwargs as the module says."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        asked = self.sampler_kwargs["save_rollouts"]
        self.directory, self.law = Path(asked["directory"]), json.loads(asked["law"])
        self.tokenizer = load_tokenizer(asked["model"], None)
        self.eos = checkpoint_eos(asked["model"], None, self.tokenizer)
        with one_line_errors(self.directory, "write"):
            self.directory.mkdir(parents=True, exist_ok=True)

    def sample(self, global_steps: int, partition_id: str, batch_size: int):
        """VERL's own batch and metrics; the rollouts of a training batch are in the folder when this returns."""
        batch, metrics = super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        if partition_id == "train":
            metrics = {**metrics, "rollouts/saved": self.save(batch, global_steps)}
        return batch, metrics

    def save(self, batch: Any, step: int) -> int:
        """Write the rollouts of a batch; returns how many, 0 where they could not be written."""
        try:
            found = transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(FIELDS))
            rows = rollout_rows(as_lists(found), batch.keys, step, self)
            write_bytes_atomic(step_file(self.directory, step), to_parquet(rows))
            return len(rows)
        except Exception as error:  # of a disk, of VERL's queue, of a row that is not as expected
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            print(
                f"warning: the rollouts of step {step} are not saved in {self.directory}: {reason}", file=sys.stderr, flush=True
            )
            return 0
