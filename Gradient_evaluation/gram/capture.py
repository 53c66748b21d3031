"""Watch one forward and one backward of a block, and contract each layer as its output gradient arrives.

``GramCapture`` puts a hook on every module that owns a measured parameter. In the forward pass the hook keeps
the layer's input; when the gradient of its output arrives in the backward pass, a rule of layers.py turns the two into
a share of the Gram and both are let go. Modules that it cannot read are left to the exact fallback.

The input is kept the way autograd keeps what a backward needs, so under gradient checkpointing (the variant with
use_reentrant=False) it is not kept at all but comes from the layer's second run, whose hooks count nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial

import torch
from torch import nn

from Gradient_evaluation.forward import is_out_of_memory
from Gradient_evaluation.gram import layers
from Gradient_evaluation.gram.layers import Gradient, Rule, TiedHead, UnsupportedUse
from Gradient_evaluation.gram.metric import InMetric
from Gradient_evaluation.gram.shared_prefix import SharedPrefix
from Gradient_evaluation.gram.sketch import CombinationSketches


class _Keep(torch.autograd.Function):
    """Does nothing but save ``a`` for a backward, so that checkpointing can drop it and bring it back."""

    @staticmethod
    def forward(ctx, a: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a)
        return anchor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("nothing depends on what _Keep returns")


class _KeptInput:
    """A layer's input as autograd keeps it."""

    def __init__(self, a: torch.Tensor):
        self.node = _Keep.apply(a, torch.zeros((), requires_grad=True)).grad_fn

    def take(self) -> torch.Tensor:
        """The input, let go here. Raises UnsupportedUse when it was changed in place after the layer read it."""
        node, self.node = self.node, None
        try:
            return node.saved_tensors[0]
        except RuntimeError as error:
            if "inplace operation" in str(error):
                raise UnsupportedUse("the layer's input was changed in place after it was read") from None
            raise


@torch.no_grad()
def leading_with_batch(model: nn.Module, forward: Callable[[int], object]) -> set[nn.Module]:
    """The modules whose tensors lead with the batch dimension, each time they are called.

    ``forward(rows)`` runs the model on so many rows. Two numbers of rows of the same length tell the batch from every
    other dimension (time, say) that is as long as the batch by chance.
    """
    leading: dict[nn.Module, bool] = {}

    def look(rows: int, module: nn.Module, args: tuple, output) -> None:
        tensors = [x for x in (*args, output) if isinstance(x, torch.Tensor)]
        leads = all(x.dim() > 0 and x.shape[0] == rows for x in tensors)
        leading[module] = leading.get(module, True) and leads

    for rows in (2, 3):
        hooks = [module.register_forward_hook(partial(look, rows)) for module in model.modules()]
        try:
            forward(rows)
        finally:
            for hook in hooks:
                hook.remove()
    return {module for module, leads in leading.items() if leads}


class GramCapture:
    """Context manager around one forward of a block and its ``backward``; ``finish`` gives the Grams.

    owners: {module: {name of a measured parameter that it holds itself: key}}; leading: the modules of
    ``leading_with_batch``, the only ones that are read; prefix: the block's shape (a layer may see the response alone, as
    the head does, or all inputs); budget, dtype: see layers.Gradient.gram; sketches: take every use as it arrives;
    in_metric: gets what the Grams get.
    """

    def __init__(
        self,
        owners: dict[nn.Module, dict[str, int]],
        leading: Container[nn.Module],
        prefix: SharedPrefix,
        budget: int,
        dtype: torch.dtype | None = None,
        sketches: CombinationSketches | None = None,
        in_metric: InMetric | None = None,
    ):
        self.owners, self.leading, self.prefix = owners, leading, prefix
        self.budget, self.dtype, self.sketches, self.in_metric = budget, dtype, sketches, in_metric
        self.lengths = {prefix.length - prefix.shared + 1, prefix.length}
        self.grams: dict[int, torch.Tensor] = {}
        self.expected: dict[int, int] = {}  # uses of a parameter seen in the forward pass
        self.arrived: dict[int, list[Gradient]] = {}  # uses whose output gradient has come
        self.looked_up: dict[int, list[torch.Tensor]] = {}  # ids of a parameter's uses as an embedding
        self.heads: dict[int, TiedHead] = {}
        self.unreadable: set[int] = set()
        self.paused = False
        self.in_backward = False
        self.hooks: list = []

    def __enter__(self) -> GramCapture:
        for module in self.owners:
            self.hooks.append(module.register_forward_hook(self._on_forward, with_kwargs=True))
        return self

    def __exit__(self, *error) -> None:
        for hook in self.hooks:
            hook.remove()

    def backward(self, loss: torch.Tensor) -> None:
        """The one backward pass of the block; layers that run again inside it are not counted again."""
        self.in_backward = True
        loss.backward()

    def finish(self) -> dict[int, torch.Tensor]:
        """{key of a parameter: Q_p (B, B) float64}; parameters that could not be read are absent."""
        for key in list(self.arrived):  # a use the loss does not depend on sends no gradient
            try:
                self._contract(key)
            except UnsupportedUse:
                self.unreadable.add(key)
        return {key: gram for key, gram in self.grams.items() if key not in self.unreadable}

    def _readable(self, module: nn.Module, args: tuple, kwargs: dict, output) -> bool:
        """One tensor in, one floating tensor out, both leading with the batch and carrying the positions."""
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or not isinstance(output, torch.Tensor):
            return False
        if module not in self.leading or next(module.children(), None) is not None or not output.is_floating_point():
            return False
        ranks = ((args[0], 3 if args[0].is_floating_point() else 2), (output, 3))
        batch = self.prefix.batch
        return all(x.dim() >= rank and x.shape[0] == batch and self.lengths & set(x.shape[1:]) for x, rank in ranks)

    def _on_forward(self, module: nn.Module, args: tuple, kwargs: dict, output):
        if self.paused:
            return None
        owned = self.owners[module]
        if not self._readable(module, args, kwargs, output) or not torch.is_grad_enabled():
            self.unreadable.update(owned.values())
            return None
        a = args[0].detach()
        replaced = None
        if not output.requires_grad:  # nothing measured lies before it: gradients start here
            replaced = output = output.detach().requires_grad_(True).clone()  # a copy may be changed in place
        kept = _KeptInput(a)
        if self.in_backward:  # a checkpointed layer's second run, which only has to keep what the first one kept
            return replaced
        for key in owned.values():
            self.expected[key] = self.expected.get(key, 0) + 1
            if not a.is_floating_point():
                self.looked_up.setdefault(key, []).append(a)
        rule = layers.rule_of(module, a, output) or partial(self._by_vjp, list(owned))
        output.register_hook(partial(self._on_gradient, module, rule, kept))
        return replaced

    def _on_gradient(self, module: nn.Module, rule: Rule, kept: _KeptInput, b: torch.Tensor) -> None:
        owned = self.owners[module]
        try:
            a = kept.take()  # the graph keeps this hook to the end of the pass, but not the input
            uses = rule(module, a, b)
            whole = a.dim() == 3 and a.shape[1] == self.prefix.length and self.prefix.batch > 1
            for name, key in owned.items():
                use = self._checked(module, name, uses.get(name))
                self._arrive(key, use.with_shared(self.prefix.shared) if whole else use)
        except UnsupportedUse:
            self.unreadable.update(owned.values())

    def _checked(self, module: nn.Module, name: str, use) -> Gradient:
        if not isinstance(use, Gradient) or use.batch != self.prefix.batch:
            raise ValueError(
                f"the rule for {type(module).__name__} gives no gradient of its {name} that leads with the batch of "
                f"{self.prefix.batch} samples"
            )
        return use

    def _by_vjp(self, names: list[str], module: nn.Module, a: torch.Tensor, b: torch.Tensor) -> dict[str, Gradient]:
        self.paused = True
        try:
            return layers.uses_by_vjp(module, a, b, names)
        except (RuntimeError, TypeError) as error:  # what vmap cannot run, a value read on the host say
            if is_out_of_memory(error):
                raise
            raise UnsupportedUse(str(error)) from None
        finally:
            self.paused = False

    def _arrive(self, key: int, use: Gradient) -> None:
        """Note one use; a tied head is contracted at once down to what the embedding's cross terms need."""
        if self.sketches is not None:
            self.sketches.add(key, use)
        arrived, looked_up = self.arrived.setdefault(key, []), self.looked_up.get(key)
        if looked_up and use.can_be_head:
            if self.expected[key] != len(looked_up) + 1:
                raise UnsupportedUse("an embedding tied to several heads")
            self._add_use(key, use)
            self.heads[key] = use.tied_head(looked_up)
        else:
            arrived.append(use)
        if len(arrived) + (key in self.heads) == self.expected[key]:
            self._contract(key)

    def _contract(self, key: int) -> None:
        uses = self.arrived.pop(key)
        if not uses:
            return
        whole = uses[0].joined(uses[1:])
        self._add_use(key, whole)
        if key in self.heads:
            head = self.heads.pop(key)
            self._add(key, head.gram(whole, self.budget))
            if self.in_metric is not None:
                self.in_metric.add_tied(key, head, whole)

    def _add_use(self, key: int, use: Gradient) -> None:
        self._add(key, use.gram(self.budget, self.dtype))
        if self.in_metric is not None:
            self.in_metric.add(key, use)

    def _add(self, key: int, gram: torch.Tensor) -> None:
        self.grams[key] = self.grams[key] + gram if key in self.grams else gram
