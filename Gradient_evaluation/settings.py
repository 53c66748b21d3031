"""What a run was asked to do: one frozen object per script. Its fields have the names of the flags."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

# name on the command line -> torch's
DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "float64": "float64",
}
GRAM_DTYPES = ("float32", "bfloat16")
# The flags that --from_grams reads; every other one says how Grams are made.
WITH_FROM_GRAMS = (
    "--from_grams",
    "--K_list",
    "--estimators",
    "--allocate",
    "--budget",
    "--clip",
    "--kl_coef",
    "--reward_weights",
    "--by",
    "--save_json",
    "--plot_path",
    "--skip_plot",
    "--quiet",
)
# The flags that --from_grams also reads where --rollouts has the texts that --reward judges anew.
WITH_FROM_GRAMS_AND_ROLLOUTS = (
    *WITH_FROM_GRAMS,
    "--rollouts",
    "--reward",
    "--reward_timeout",
    "--dataset",
    "--split",
    "--model",
    "--revision",
    "--trust_remote_code",
)
# The flags that have no effect with --rollouts, which brings the continuations.
NOT_WITH_ROLLOUTS = ("--plan", "--M", "--per_prompt", "--gen_bs", "--save_rollouts")


@dataclass(frozen=True)
class LawSettings:
    """The flags of model and sampling law, which every script has. Flags that take several values are tuples."""

    model: str
    revision: str
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop: tuple[str, ...]
    chat_template_kwargs: dict[str, Any]


@dataclass(frozen=True)
class Settings(LawSettings):
    """The flags that calculate_oracle_v.py and run_tracecov.py share."""

    reward: str | tuple[str, ...]  # a string for one reward
    reward_weights: tuple[float, ...] | None
    reward_timeout: float  # seconds
    seed: int
    dtype: str
    device: str
    max_memory: float | None  # GiB
    skip_long: bool
    trust_remote_code: bool
    overwrite: bool
    quiet: bool
    save_rollouts: str | None

    @classmethod
    def of(cls, flags: argparse.Namespace) -> Settings:
        """The settings that parsed flags describe."""
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(flags).items()}
        if isinstance(flags.reward, list) and len(flags.reward) == 1:
            values["reward"] = flags.reward[0]
        return cls(**values)

    def config(self) -> dict[str, Any]:
        """{flag: value} as JSON has them, for the results."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


@dataclass(frozen=True)
class OracleSettings(Settings):
    """The flags of calculate_oracle_v.py."""

    dataset: str
    split: str
    n_oracle: int
    batch_size: int
    out_dir: str


@dataclass(frozen=True)
class TracecovSettings(Settings):
    """The flags of run_tracecov.py. ``estimators``: those beside the default four, aliases resolved.

    reward is None where the rewards of --rollouts are taken as they are. T is None where there is no limit but the table's.
    """

    oracle_table: str | None
    dataset: str | None
    split: str | None
    rollouts: tuple[str, ...] | None
    T: int | None
    M: int
    per_prompt: int | None
    K_list: tuple[int, ...]  # sorted
    gen_bs: int
    subsample_prompts: int | None
    until: float | None  # half the interval's width over the value
    until_quantity: str | None
    minutes: float | None
    pilot: bool  # whether the first prompts decide how many continuations the further ones get
    plan: bool
    block_size: int | None
    gram_memory: int  # MiB
    gram_dtype: str
    estimators: tuple[str, ...]
    gradient_checkpointing: bool
    scoring: str
    importance_weights: bool
    params: str | None
    by_layer: bool
    budget: int | None
    clip: float | None
    by: str | None
    allocate: int | None
    sketch_dim: int
    ref_model: str | None
    kl_type: str
    kl_coef: float | None
    optimizer_state: str | None
    adam_step: int | None
    adam_beta2: float | None
    adam_eps: float | None
    allow_mismatch: bool
    from_grams: str | None
    save_json: str
    plot_path: str
    skip_plot: bool

    @property
    def stops_itself(self) -> bool:
        """Whether the run ends before the last prompt that it may take, for another reason than an error."""
        return self.until is not None or self.minutes is not None or self.plan


def continuations_of(settings: TracecovSettings) -> int:
    """How many continuations of each prompt a run samples: --per_prompt, or --M times the largest of --K_list."""
    return settings.per_prompt or settings.M * settings.K_list[-1]


@dataclass(frozen=True)
class VllmSettings(LawSettings):
    """The flags of sample_with_vllm.py."""

    dataset: str
    split: str
    n: int
    seed: int
    save_rollouts: str
    dtype: str
    tensor_parallel_size: int
    max_model_len: int | None
    gpu_memory_utilization: float
    prompts_at_once: int
    skip_long: bool
    trust_remote_code: bool
    overwrite: bool
    quiet: bool
