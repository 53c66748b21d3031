"""What a block keeps for its backward pass: the shared prefix once, the Gram the same up to rounding, no other axis taken
for that of the positions, and a change in place still noticed."""

import contextlib

import numpy as np
import pytest
import torch
from grams import audit_of, block_of
from tiny_models import FAMILIES, float_means_double, random_continuations, tiny_model
from torch import nn

from Gradient_evaluation.gram import shared_prefix
from Gradient_evaluation.gram.shared_prefix import SharedPrefix

PROMPT, LENGTHS = [1, 5, 9, 5, 0, 2, 7, 8, 3, 4, 6, 11], (3, 6, 1, 5)


@contextlib.contextmanager
def counted():
    """The tensors that autograd keeps, of each stretch of memory one, hooks inside this one included."""
    seen = []  # kept here too, so that no stretch of memory is used twice

    def see(x):
        if isinstance(x, torch.Tensor) and all(x.data_ptr() != other.data_ptr() for other in seen):
            seen.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(see, lambda x: x):
        yield seen


# A tensor put together again may lie otherwise in memory, and a processor may then sum in another order. Rounding is 1e-16
# in float64 (the sketch is float32: 1e-7), 1e-7 in float32 and 4e-3 in bfloat16, and a block takes some hundred steps.
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_the_gram_is_the_same_up_to_rounding(family, dtype, tolerance, monkeypatch):
    def block():
        model = tiny_model(family, dtype=dtype)
        return block_of(model, random_continuations(0, LENGTHS), prompt=PROMPT, weights=np.eye(4), sketch_dim=8)

    with float_means_double() if dtype == torch.float64 else contextlib.nullcontext():
        found = block()
        monkeypatch.setattr(SharedPrefix, "kept_once", lambda _: contextlib.nullcontext())
        plain = block()
    for name in ("gram", "log_probs", "by_module", "sketch"):
        value, expected = getattr(found, name), getattr(plain, name)
        allowed = max(tolerance, 1e-6 if expected.dtype == np.float32 else 0.0) * np.abs(expected).max()
        np.testing.assert_allclose(value, expected, rtol=0, atol=allowed, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_most_of_what_is_kept_has_the_prompt_once(family, monkeypatch):
    """Of 16 rows of 40 + 5 positions, 40 + 16 x 5 = 120 positions for 720."""
    kept = []

    class Counting(shared_prefix._Parts):
        def __init__(self, x, *where):
            super().__init__(x, *where)
            kept.append((x.numel(), self.prompt.numel() + self.rest.numel()))

    monkeypatch.setattr(shared_prefix, "_Parts", Counting)
    prompt = [3 + i % 30 for i in range(40)]
    block_of(tiny_model(family, dtype=torch.float32), random_continuations(0, [6] * 16), prompt=prompt)
    whole, less = np.array(kept).T
    assert np.array_equal(whole * 120, less * 720)
    assert whole.sum() > 2 * 8 * 16 * 45 * 32  # of each of 2 layers more than eight tensors as wide as the model


def activations(rows, length, width, shared):
    """(rows, length, width) random numbers in float64, the rows the same in the first ``shared`` positions."""
    x = torch.randn(rows, length, width, dtype=torch.float64)
    x[:, :shared] = x[0, :shared]
    return x


def gradient(work, x, *settings):
    x = x.clone().requires_grad_(True)
    with SharedPrefix(*settings).kept_once():
        y = work(x)
    return torch.autograd.grad(y.sum(), x)[0]


def assert_same(work, x, *settings):
    """The gradient is that of autograd alone, up to rounding in float64."""
    plain = x.clone().requires_grad_(True)
    expected = torch.autograd.grad(work(plain).sum(), plain)[0]
    torch.testing.assert_close(gradient(work, x, *settings), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "work",
    [
        lambda x: (x * 2).square().sin(),
        lambda x: (x * 2).transpose(1, 2).exp(),
        lambda x: (x * 2)[..., 1:4].cos(),  # not dense
        lambda x: (x * 2).unflatten(-1, (3, 2)).transpose(1, 2).tanh(),  # (rows, heads, positions, width)
    ],
)
def test_views_in_any_order_come_back_as_they_were(work):
    assert_same(work, activations(4, 7, 6, 3), 4, 7, 3)


@pytest.mark.parametrize("shape", [(4, 7, 7), (4, 7, 3, 7), (4, 5, 2), (7, 4, 2), (4, 2, 7)])
def test_an_axis_of_that_size_without_positions_is_left_alone(shape):
    """Two candidates, none, or one along which the rows differ: what is kept is the tensor itself."""
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    assert_same(lambda x: (x * 2).sin(), x, 4, 7, 3)


def test_rows_that_differ_in_one_number_are_kept_whole():
    x = activations(4, 7, 6, 3)
    x[2, 1, 5] += 1e-6
    assert_same(lambda x: (x * 2).exp(), x, 4, 7, 3)


def test_a_weight_that_looks_like_a_batch_is_left_alone():
    layer = nn.Linear(7, 4, dtype=torch.float64)  # weight (4, 7): as many rows as the batch, as many columns as positions
    assert_same(lambda x: layer(x.transpose(1, 2)).sin(), activations(4, 7, 6, 3), 4, 7, 3)
    model = tiny_model("llama", dtype=torch.float32, hidden_size=16, num_attention_heads=4, head_dim=4)
    continuations = random_continuations(1, [10] * 16)  # 16 rows of 16 positions, heads of 4 and a width of 16
    assert audit_of(model, continuations)["max_relative_error"] < 1e-5


def test_several_layers_keep_one_copy_until_its_value_changes():
    x = activations(4, 7, 6, 3).requires_grad_(True)
    with SharedPrefix(4, 7, 3).kept_once():
        y = x * 2
        first, again = y.sin(), y.cos()
        with torch.no_grad():
            y.mul_(3)  # in place: the next keeper sees another value in the same memory
        third = y.sin()
    value = 2 * x.detach()
    got = torch.autograd.grad((first + again + third).sum(), x)[0]
    torch.testing.assert_close(got, 2 * (value.cos() - value.sin() + (3 * value).cos()))


def test_a_tensor_kept_whole_and_changed_in_place_is_noticed():
    x = torch.randn(4, 7, 6).requires_grad_(True)  # the rows differ: kept whole
    with SharedPrefix(4, 7, 3).kept_once():
        y = x * 2
        z = y.sin()
        with torch.no_grad():
            y.mul_(3)
    with pytest.raises(RuntimeError, match="inplace operation"):
        z.sum().backward()


def test_a_prompt_of_one_token_or_a_block_of_one_is_no_prefix():
    with counted() as kept:
        with SharedPrefix(4, 7, 1).kept_once(), SharedPrefix(1, 7, 3).kept_once():
            (activations(4, 7, 6, 3).requires_grad_(True) * 2).sin()
    assert sum(x.numel() for x in kept) == 4 * 7 * 6
