"""ScoreGram is a library: a trainer's model is as it was afterwards, wrong use is a ValueError, and its example runs."""

import contextlib
import doctest
import importlib
import pkgutil
import random

import numpy as np
import pytest
import torch
from grams import LENGTHS, PROMPT, block_of, score_gram, tokens
from tiny_models import random_continuations, tiny_model

import Gradient_evaluation.gram as gram_folder

TOKENS = tokens(random_continuations(0, LENGTHS))
MODELS = {
    "qwen2": dict(tie_word_embeddings=True),
    "gpt2": dict(resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
    "mixtral": dict(num_local_experts=3, num_experts_per_tok=2),  # measured by the fallback
    "lora": dict(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.5, init_lora_weights=False),
}


def made(family):
    if family != "lora":
        return tiny_model(family, dtype=torch.float32, **MODELS[family])
    peft = pytest.importorskip("peft")
    base = tiny_model("qwen2", dtype=torch.float32)
    return peft.get_peft_model(base, peft.LoraConfig(**MODELS[family])).float().eval()


def in_training(family):
    """A model in the middle of a step: some modules in train mode, a frozen parameter, gradients, hooks, checkpointing."""
    model = made(family)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    model.train()
    list(model.modules())[-2].eval()
    next(model.parameters()).requires_grad_(False)
    model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT]), use_cache=False).loss.backward()
    fired = []
    for p in model.parameters():
        if p.requires_grad:
            p.register_hook(lambda gradient: fired.append(gradient) or 0 * gradient)
            p.register_post_accumulate_grad_hook(fired.append)
    return model, fired


def hooks_of(module):
    """The ids of every hook of a module."""
    return {name: list(hooks) for name, hooks in vars(module).items() if "hook" in name and isinstance(hooks, dict)}


def state_of(model):
    """All that must be the same afterwards, tensors copied."""
    return {
        "modes": [module.training for module in model.modules()],
        "hooks": [hooks_of(module) for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "parameters": [(id(p), p.data_ptr(), p._version) for p in model.parameters()],
        "tensor hooks": [(id(p._backward_hooks), list(p._backward_hooks or ())) for p in model.parameters()],
        "grads": [(id(p.grad), p.grad.data_ptr(), p.grad._version) if p.grad is not None else None for p in model.parameters()],
        "values": [x.tolist() for x in model.state_dict().values()],
        "grad values": [p.grad.tolist() if p.grad is not None else None for p in model.parameters()],
        "random": (torch.get_rng_state().tolist(), str(np.random.get_state()), random.getstate()),
        "modes of torch": (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")),
    }


def everything(gram):
    gram.block(PROMPT, TOKENS, by_module=True, weights=np.eye(4))
    gram.logits(PROMPT, TOKENS)
    gram.audit(PROMPT, TOKENS)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", MODELS)
def test_a_model_in_training_is_left_as_it_was_found(family, checkpointing):
    model, fired = in_training(family)
    kept = [p.grad for p in model.parameters()]
    before = state_of(model)
    with score_gram(model, sketch_dim=4, gradient_checkpointing=checkpointing) as gram:
        everything(gram)
        assert not any(module.training for module in model.modules())
        assert not any(p.requires_grad for p in model.parameters())
    assert not fired
    after = state_of(model)
    for name in before:
        assert after[name] == before[name], name
    assert all(p.grad is grad for p, grad in zip(model.parameters(), kept))
    model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT]), use_cache=False).loss.backward()
    assert len(fired) == 2 * sum(p.requires_grad for p in model.parameters())  # the trainer's hooks run again


@pytest.mark.parametrize("where", ["forward", "backward", "audit", "fallback", "log_prob"])
def test_an_exception_leaves_the_model_as_it_was_found(where, monkeypatch):
    model, fired = in_training("mixtral" if where == "fallback" else "qwen2")
    before, calls = state_of(model), []

    def fail(*_, **settings):
        calls.append(where)
        raise KeyboardInterrupt

    gram = score_gram(model, sketch_dim=4)
    if where == "log_prob":
        gram.scorer.log_prob = fail
    layer = {"forward": model.model.norm, "backward": model.model.norm}.get(where)
    hook = None
    with pytest.raises(KeyboardInterrupt), gram:
        if where == "forward":
            hook = layer.register_forward_pre_hook(fail)
        elif where == "backward":
            hook = layer.register_full_backward_hook(fail)
        elif where == "audit":
            monkeypatch.setattr(torch.Tensor, "square", fail)
        elif where == "fallback":
            monkeypatch.setattr(torch.autograd, "grad", fail)
        everything(gram)
    monkeypatch.undo()
    if hook is not None:
        hook.remove()
    assert calls == [where] and not fired
    after = state_of(model)
    for name in before:
        assert after[name] == before[name], name


@pytest.mark.parametrize(
    "outer",
    [lambda: torch.autocast("cpu", torch.bfloat16), torch.no_grad, torch.inference_mode, contextlib.nullcontext],
    ids=["autocast", "no_grad", "inference_mode", "none"],
)
@pytest.mark.parametrize("family", MODELS)
def test_a_trainers_modes_change_no_number(family, outer):
    expected = block_of(made(family), random_continuations(0, LENGTHS))
    model, _ = in_training(family)
    next(model.parameters()).requires_grad_(family != "lora")
    with outer(), score_gram(model) as gram:
        block = gram.block(PROMPT, TOKENS)
        assert gram.logits(PROMPT, TOKENS).dtype == torch.float32
        gram.audit(PROMPT, TOKENS)
    assert np.array_equal(block.gram, expected.gram) and np.array_equal(block.log_probs, expected.log_probs)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "lora"])
def test_the_autocast_inside_a_prepared_model_is_off_too(family):
    accelerate = pytest.importorskip("accelerate")
    expected = block_of(made(family), random_continuations(0, LENGTHS))
    model = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(made(family))
    forward = model.forward
    with score_gram(model) as gram:
        block = gram.block(PROMPT, TOKENS)
        gram.audit(PROMPT, TOKENS)
    assert np.array_equal(block.gram, expected.gram) and np.array_equal(block.log_probs, expected.log_probs)
    assert model.forward is forward and model(torch.tensor([PROMPT])).logits.dtype == torch.float32


def test_a_step_of_the_trainer_between_two_blocks_is_seen():
    model = tiny_model("qwen2")
    gram = score_gram(model)
    with gram:
        first = gram.block(PROMPT, TOKENS).gram
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    optimizer.step()
    with gram:
        second = gram.block(PROMPT, TOKENS).gram
    assert not np.allclose(first, second)
    assert np.array_equal(block_of(model, random_continuations(0, LENGTHS)).gram, second)


@pytest.mark.parametrize(
    "settings,said",
    [
        (
            dict(params="nothing like it"),
            "params nothing like it: finds no parameter; names look like model.embed_tokens.weight",
        ),
        (dict(params="(("), r"params \(\(: not a regular expression"),
        (dict(gram_dtype="float8"), "gram_dtype: 'float8' is none of float32, bfloat16"),
    ],
)
def test_a_setting_that_cannot_be_is_one_clear_sentence(settings, said):
    with pytest.raises(ValueError, match=said):
        score_gram(tiny_model("qwen2"), **settings)


def test_a_model_in_a_wrapper_is_refused():
    for wrapped in (torch.nn.Sequential(tiny_model("qwen2")), torch.compile(tiny_model("qwen2"))):
        with pytest.raises(ValueError, match="give the model inside the wrapper"):
            score_gram(wrapped)


def test_a_model_without_a_free_parameter_is_refused():
    with pytest.raises(ValueError, match="the model has no parameter with requires_grad"):
        score_gram(tiny_model("qwen2").requires_grad_(False))


@pytest.mark.parametrize(
    "arguments,said",
    [
        ((PROMPT, []), "there is no continuation"),
        ((PROMPT, [[3], []]), "continuation 1 has no token"),
        (([], [[3]]), "the prompt has no token"),
        ((PROMPT, [[3], [4, 40, 41]]), "continuation 1 has token 40, but the model's vocabulary has the tokens 0 to 39"),
        (([-1], [[3]]), "the prompt has token -1"),
        ((PROMPT, [[3], [4]], [[1]]), "there are 1 masks for 2 continuations"),
        ((PROMPT, [[3], [4]], [[1], [1, 1]]), "mask 1 has 2 entries for the 1 tokens"),
        ((PROMPT, [[3], [4]], [[1], [0.5]]), "mask 1 has an entry that is neither 0 nor 1"),
        ((PROMPT, [[3], [4]], None, False, np.ones((1, 3))), r"weights: shape \(1, 3\) for 2 continuations"),
    ],
)
def test_arguments_that_do_not_fit_are_one_clear_sentence(arguments, said):
    with score_gram(tiny_model("qwen2"), sketch_dim=4) as gram, pytest.raises(ValueError, match=said):
        gram.block(*arguments)


def test_weights_without_a_sketch_are_refused():
    with score_gram(tiny_model("qwen2")) as gram, pytest.raises(ValueError, match="give ScoreGram a sketch_dim"):
        gram.block(PROMPT, [[3], [4]], weights=np.eye(2))


@pytest.mark.parametrize("call", ["block", "audit", "logits"])
def test_a_scoregram_that_is_not_entered_says_so(call):
    gram = score_gram(tiny_model("qwen2"))
    with pytest.raises(ValueError, match="not entered"):
        getattr(gram, call)(PROMPT, TOKENS)
    with gram, pytest.raises(ValueError, match="entered already"), gram:
        pass
    with pytest.raises(ValueError, match="not entered"):
        getattr(gram, call)(PROMPT, TOKENS)


def test_logits_or_log_probs_of_another_shape_are_refused():
    model = tiny_model("qwen2")
    with score_gram(model) as gram:
        gram.scorer.log_prob = lambda logits, tokens: logits
        with pytest.raises(ValueError, match=r"log_prob gave shape \(2, 5, 40\) for tokens of shape \(2, 5\)"):
            gram.block(PROMPT, [[3] * 5, [4]])
    model.lm_head.register_forward_hook(lambda head, args, out: out.transpose(0, 1))
    with score_gram(model) as gram, pytest.raises(ValueError, match="do not lead with the 2 continuations and their 5 tokens"):
        gram.block(PROMPT, [[3] * 5, [4]])


def test_tokens_may_come_as_tensors_and_arrays():
    model = tiny_model("qwen2")
    with score_gram(model) as gram:
        lists = gram.block(PROMPT, TOKENS, [[True] * len(each) for each in TOKENS])
        others = gram.block(torch.tensor(PROMPT), [np.array(each) for each in TOKENS], [np.ones(len(each)) for each in TOKENS])
    assert np.array_equal(lists.gram, others.gram)


@pytest.mark.parametrize("name", [each.name for each in pkgutil.iter_modules(gram_folder.__path__)])
def test_the_examples_of_the_docstrings_run(name):
    failed, tried = doctest.testmod(importlib.import_module(f"{gram_folder.__name__}.{name}"))
    assert failed == 0 and (tried > 8 or name != "score_gram")
