"""Watch one forward and one backward of a block, and contract each layer as its output gradient arrives.

``GramCapture`` puts a hook on every module that owns a measured parameter. In the forward pass the hook keeps
the layer's input; when the gradient of its output arrives in the backward pass, gram_rules.py turns the two into
a share of the Gram and both are let go. Modules it cannot read are left to the caller's exact fallback.

The input is kept the way autograd keeps what a backward needs, so under gradient checkpointing (the variant with
use_reentrant=False) it is not kept at all but comes from the layer's second run, whose hooks count nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import nn

from Gradient_evaluation.forward import is_out_of_memory
from Gradient_evaluation.gram import layers as gram_rules
from Gradient_evaluation.gram.sketch import GradientSketch


class _Keep(torch.autograd.Function):
    """Does nothing but save ``a`` for a backward, so that checkpointing can drop it and bring it back."""

    @staticmethod
    def forward(ctx, a: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a)
        return anchor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise AssertionError("nothing depends on what _Keep returns")


@torch.no_grad()
def leading_with_batch(model: nn.Module, forward: Callable[[int], object]) -> set[nn.Module]:
    """The modules whose tensors lead with the batch dimension, each time they are called.

    ``forward(rows)`` runs the model on so many rows. Two numbers of rows of the same length tell the batch from every
    other dimension (time, say) that is as long as the batch by chance.
    """
    leading: dict[nn.Module, bool] = {}
    for rows in (2, 3):

        def look(module: nn.Module, args: tuple, output, rows=rows) -> None:
            tensors = [x for x in (*args, output) if isinstance(x, torch.Tensor)]
            leads = all(x.dim() > 0 and x.shape[0] == rows for x in tensors)
            leading[module] = leading.get(module, True) and leads

        hooks = [module.register_forward_hook(look) for module in model.modules()]
        try:
            forward(rows)
        finally:
            for hook in hooks:
                hook.remove()
    return {module for module, leads in leading.items() if leads}


class GramCapture:
    """Context manager around one forward of ``batch`` samples and its ``backward``; ``finish`` gives the Grams.

    parameters: {id: parameter} measured; prompt, response: positions of each. A layer may see the response alone
    (the head) or all prompt + response - 1 inputs, of which the first ``prompt`` are the same in every sample.
    budget: bytes of a temporary; dtype: that of the products of a Linear weight; leading: the modules of
    ``leading_with_batch``, the only ones that are read. With ``sketch`` and ``weights``
    (E, batch), ``sketches`` holds {id of parameter: (E, entries)}, the sketches of sum_i weights_ei g_i.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: dict[int, nn.Parameter],
        batch: int,
        prompt: int,
        response: int,
        budget: int,
        sketch: GradientSketch | None = None,
        weights: torch.Tensor | None = None,
        dtype: torch.dtype | None = None,
        leading: Container[nn.Module] = (),
    ):
        self.model, self.parameters = model, parameters
        self.batch, self.budget, self.dtype = batch, budget, dtype
        self.prompt, self.length = prompt, prompt + response - 1
        self.lengths = {response, self.length}
        self.sketch, self.weights, self.leading = sketch, weights, leading
        self.grams: dict[int, torch.Tensor] = {}
        self.sketches: dict[int, torch.Tensor] = {}
        self.expected: dict[int, int] = {}  # uses of a parameter seen in the forward pass
        self.arrived: dict[int, list] = {}  # uses whose output gradient has come
        self.looked_up: dict[int, list[torch.Tensor]] = {}  # ids of a parameter's uses as an embedding
        self.heads: dict[int, gram_rules.TiedHead] = {}
        self.unreadable: set[int] = set()
        self.paused = False
        self.in_backward = False
        self.hooks: list = []

    def __enter__(self) -> GramCapture:
        for module in self.model.modules():
            if self._owned(module):
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
        """{id of parameter: Q_p (batch, batch) float64}; parameters that could not be read are absent."""
        for key in list(self.arrived):  # a use the loss does not depend on sends no gradient
            try:
                self._contract(key)
            except gram_rules.UnsupportedUse:
                self.unreadable.add(key)
        return {key: gram for key, gram in self.grams.items() if key not in self.unreadable}

    def _owned(self, module: nn.Module) -> dict[str, int]:
        """{name in the module: id} of the measured parameters the module itself holds."""
        return {name: id(p) for name, p in module.named_parameters(recurse=False) if id(p) in self.parameters}

    def _readable(self, module: nn.Module, args: tuple, kwargs: dict, output) -> bool:
        """One tensor in, one floating tensor out, both leading with the batch and carrying the positions."""
        if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor) or not isinstance(output, torch.Tensor):
            return False
        if module not in self.leading or next(module.children(), None) is not None or not output.is_floating_point():
            return False
        ranks = ((args[0], 3 if args[0].is_floating_point() else 2), (output, 3))
        return all(x.dim() >= rank and x.shape[0] == self.batch and self.lengths & set(x.shape[1:]) for x, rank in ranks)

    def _on_forward(self, module: nn.Module, args: tuple, kwargs: dict, output):
        if self.paused:
            return None
        owned = self._owned(module)
        if not self._readable(module, args, kwargs, output) or not torch.is_grad_enabled():
            self.unreadable.update(owned.values())
            return None
        a = args[0].detach()
        replaced = None
        if not output.requires_grad:  # nothing measured lies before it: gradients start here
            replaced = output = output.detach().requires_grad_(True).clone()  # a copy may be changed in place
        kept = _Keep.apply(a, torch.zeros((), requires_grad=True)).grad_fn
        if self.in_backward:  # a checkpointed layer's second run, which only has to keep what the first one kept
            return replaced
        for key in owned.values():
            self.expected[key] = self.expected.get(key, 0) + 1
            if not a.is_floating_point():
                self.looked_up.setdefault(key, []).append(a)
        rule = gram_rules.RULES.get(type(module))
        if rule is None and gram_rules.is_scaled_embedding(module, a, output):
            rule = gram_rules.scaled_embedding_uses
        held = [kept]
        output.register_hook(lambda b: self._on_gradient(module, owned, rule, held, b))
        return replaced

    def _on_gradient(self, module: nn.Module, owned: dict[str, int], rule, held: list, b: torch.Tensor) -> None:
        try:
            a = _saved(held.pop())  # the graph keeps this hook to the end of the pass; the input is let go here
            if rule is not None:
                uses = rule(module, a, b)
            elif isinstance(module, nn.Embedding):  # its gradient per sample would be as large as the table
                raise gram_rules.UnsupportedUse("an embedding that does more than look up")
            else:
                uses = self._by_vjp(module, a, b, list(owned))
            whole = a.dim() == 3 and a.shape[1] == self.length
            for name, key in owned.items():
                use = uses[name]
                if whole and isinstance(use, gram_rules.Outer) and self.batch > 1:
                    use = use._replace(shared=self.prompt)
                self._arrive(key, use)
        except gram_rules.UnsupportedUse:
            self.unreadable.update(owned.values())

    def _by_vjp(self, module: nn.Module, a: torch.Tensor, b: torch.Tensor, names: list[str]):
        self.paused = True
        try:
            return gram_rules.uses_by_vjp(module, a, b, names)
        except (RuntimeError, TypeError) as error:  # what vmap cannot run, a value read on the host say
            if is_out_of_memory(error):
                raise
            raise gram_rules.UnsupportedUse(str(error)) from None
        finally:
            self.paused = False

    def _arrive(self, key: int, use) -> None:
        """Note one use; a tied head is contracted at once down to what the embedding's cross terms need."""
        if self.sketch is not None:
            per_sample = self.sketch.per_sample(key, use)
            share = self.weights.to(per_sample.dtype) @ per_sample
            self.sketches[key] = self.sketches[key] + share if key in self.sketches else share
        arrived = self.arrived.setdefault(key, [])
        looked_up = self.looked_up.get(key, [])
        if looked_up and isinstance(use, gram_rules.Outer):
            if self.expected[key] != len(looked_up) + 1:
                raise gram_rules.UnsupportedUse("an embedding tied to several heads")
            self._add(key, gram_rules.outer_gram(use, self.budget, self.dtype))
            self.heads[key] = gram_rules.tie(use, looked_up)
        else:
            arrived.append(use)
        if len(arrived) + (key in self.heads) == self.expected[key]:
            self._contract(key)

    def _contract(self, key: int) -> None:
        uses = self.arrived.pop(key)
        if uses:
            self._add(key, gram_rules.gram(uses, self.budget, self.dtype))
        if key in self.heads and uses:
            self._add(key, gram_rules.tied_cross_gram(uses, self.heads.pop(key), self.budget))

    def _add(self, key: int, gram: torch.Tensor) -> None:
        self.grams[key] = self.grams[key] + gram if key in self.grams else gram


def _saved(kept) -> torch.Tensor:
    """The input a ``_Keep`` node holds; raises UnsupportedUse when it was changed in place after it was read."""
    try:
        return kept.saved_tensors[0]
    except RuntimeError as error:
        if "inplace operation" in str(error):
            raise gram_rules.UnsupportedUse("the layer's input was changed in place after it was read") from None
        raise
