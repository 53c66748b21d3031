"""What a block keeps for its backward pass: the prompt once, the Gram the same up to rounding, nothing taken for a
position that is none, and a change in place still noticed."""

import contextlib

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, float_means_double, random_continuations, tiny_model
from torch import nn

from Gradient_evaluation.gram import kept_prefix as prompt_activations
from Gradient_evaluation.gram import score_gram
from Gradient_evaluation.gram.kept_prefix import prompt_kept_once
from Gradient_evaluation.gram.score_gram import ScoreGram
from Gradient_evaluation.sampling.generate import SamplingLaw

LAW = SamplingLaw(temperature=0.8, max_new_tokens=6)
PROMPT, LENGTHS = [1, 5, 9, 5, 0, 2, 7, 8, 3, 4, 6, 11], (3, 6, 1, 5)


@contextlib.contextmanager
def counted():
    """[bytes that autograd keeps]: of each stretch of memory once, hooks inside this one included."""
    kept, seen = [0], []  # the tensors are held, so that no stretch of memory is used twice

    def count(x):
        if isinstance(x, torch.Tensor) and all(x.data_ptr() != other.data_ptr() for other in seen):
            seen.append(x)
            kept[0] += x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        yield kept


# A tensor put together again may lie otherwise in memory, and a processor may then sum in another order. Rounding is 1e-16
# in float64 (the sketch is float32: 1e-7), 1e-7 in float32 and 4e-3 in bfloat16, and a block takes some hundred steps.
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-11), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_the_gram_is_the_same_up_to_rounding(family, dtype, tolerance, monkeypatch):
    def block():
        gram = ScoreGram(tiny_model(family, dtype=dtype), LAW, sketch_dim=8)
        return gram.block(PROMPT, random_continuations(0, LENGTHS), True, np.eye(4))

    with float_means_double() if dtype == torch.float64 else contextlib.nullcontext():
        found = block()
        monkeypatch.setattr(score_gram, "prompt_kept_once", lambda *_: contextlib.nullcontext())
        plain = block()
    for name in ("gram", "log_probs", "by_module", "sketch"):
        value, expected = getattr(found, name), getattr(plain, name)
        allowed = max(tolerance, 1e-6 if expected.dtype == np.float32 else 0.0) * np.abs(expected).max()
        np.testing.assert_allclose(value, expected, rtol=0, atol=allowed, err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_most_of_what_is_kept_has_the_prompt_once(family, monkeypatch):
    """Of 16 rows of 40 + 5 places, 40 + 16 x 5 = 120 places for 720."""
    kept = []

    class Counting(prompt_activations._Parts):
        def __init__(self, x, *where):
            super().__init__(x, *where)
            kept.append((x.numel(), self.prompt.numel() + self.rest.numel()))

    monkeypatch.setattr(prompt_activations, "_Parts", Counting)
    gram = ScoreGram(tiny_model(family, dtype=torch.float32), LAW)
    gram.block([3 + i % 30 for i in range(40)], random_continuations(0, [6] * 16))
    whole, less = np.array(kept).T
    assert np.array_equal(whole * 120, less * 720)
    assert whole.sum() > 2 * 8 * 16 * 45 * 32  # of each of 2 layers more than eight tensors as wide as the model


def places(rows, length, width, shared):
    """(rows, length, width) random numbers in float64, the rows alike in the first ``shared`` places."""
    x = torch.randn(rows, length, width, dtype=torch.float64)
    x[:, :shared] = x[0, :shared]
    return x


def gradient(work, x, *settings):
    x = x.clone().requires_grad_(True)
    with prompt_kept_once(*settings):
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
        lambda x: (x * 2).unflatten(-1, (3, 2)).transpose(1, 2).tanh(),  # (rows, heads, places, width)
    ],
)
def test_views_in_any_order_come_back_as_they_were(work):
    assert_same(work, places(4, 7, 6, 3), 4, 7, 3)


@pytest.mark.parametrize("shape", [(4, 7, 7), (4, 7, 3, 7), (4, 5, 2), (7, 4, 2), (4, 2, 7)])
def test_an_axis_of_that_size_that_is_not_the_places_is_left_alone(shape):
    """Two candidates, none, or one along which the rows differ: what is kept is the tensor itself."""
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    assert_same(lambda x: (x * 2).sin(), x, 4, 7, 3)


def test_rows_that_differ_in_one_place_of_one_row_are_kept_whole():
    x = places(4, 7, 6, 3)
    x[2, 1, 5] += 1e-6
    assert_same(lambda x: (x * 2).exp(), x, 4, 7, 3)


def test_a_weight_that_looks_like_a_batch_is_left_alone():
    layer = nn.Linear(7, 4, dtype=torch.float64)  # weight (4, 7): as many rows as the batch, as many columns as places
    assert_same(lambda x: layer(x.transpose(1, 2)).sin(), places(4, 7, 6, 3), 4, 7, 3)
    model = tiny_model("llama", dtype=torch.float32, hidden_size=16, num_attention_heads=4, head_dim=4)
    continuations = random_continuations(1, [5] * 16)  # 16 rows of 16 places, heads of 4 and a width of 16
    audit = ScoreGram(model, LAW).audit(PROMPT, continuations)
    assert audit["max_relative_error"] < 1e-5


def test_what_several_layers_keep_is_kept_once_and_a_new_value_in_the_same_memory_is_not():
    x = places(4, 7, 6, 3).requires_grad_(True)
    with prompt_kept_once(4, 7, 3):
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
    with prompt_kept_once(4, 7, 3):
        y = x * 2
        z = y.sin()
        with torch.no_grad():
            y.mul_(3)
    with pytest.raises(RuntimeError, match="inplace operation"):
        z.sum().backward()


def test_a_prompt_of_one_token_or_a_block_of_one_changes_nothing():
    with counted() as kept:
        with prompt_kept_once(4, 7, 1), prompt_kept_once(1, 7, 3):
            (places(4, 7, 6, 3).requires_grad_(True) * 2).sin()
    assert kept[0] == 4 * 7 * 6 * 8  # bytes of float64
