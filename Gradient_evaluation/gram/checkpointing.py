"""Gradient checkpointing of a model in eval mode: memory of one layer instead of all, for one more forward.

transformers checkpoints only in train mode, which would turn dropout on and change the law that is scored. Here the
layers that transformers marks as checkpointable are wrapped for the length of one pass and nothing else is touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.forward import replaced_forward


def check_checkpointable(model: nn.Module) -> None:
    """Raise UserError when the model has no layer that ``checkpointed_layers`` could wrap."""
    if not any(isinstance(module, GradientCheckpointingLayer) for module in model.modules()):
        raise UserError(
            f"gradient checkpointing: {type(model).__name__} has no layer that transformers can checkpoint; run without it"
        )


@contextmanager
def checkpointed_layers(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """While inside, every GradientCheckpointingLayer keeps its input alone and runs again in the backward pass."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)] if enabled else []
    # No random state to restore: nothing is drawn in eval mode, and reading a GPU's state makes the host wait.
    with replaced_forward(
        layers, lambda layer, plain: partial(checkpoint, plain, use_reentrant=False, preserve_rng_state=False)
    ):
        yield
