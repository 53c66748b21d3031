"""Training at several group sizes: its batched draws and gradients against one prompt at a time; runs that resume."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from abstract_policy import group_size_law_of, plain_case
from results_files import results
from tiny_models import float_means_double, tiny_model, tiny_tokenizer

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.sampling.generate import Continuation, sample_continuations, sample_groups
from Gradient_evaluation.sampling.law import SamplingLaw, uniforms
from Gradient_evaluation.sampling.log_probs import log_probs
from Policy_Optimization.policy_gradient import weighted_log_probs
from Policy_Optimization.train_group_sizes import main, summarise

LAW = SamplingLaw(temperature=1.2, top_p=0.9, max_new_tokens=7)
PROMPTS = [[5, 9, 3], [5, 9, 3, 8, 8, 1, 4], [5, 9, 7, 2], [5, 9, 3]]
WORDS = ("<eos>", *"0123456789-+*/() =", "?")


def model_of(family="qwen2", **settings):
    return tiny_model(family, vocab_size=len(WORDS), eos_token_id=0, max_position_embeddings=128, **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random policy over digits and signs, whose answers are short and sometimes right."""
    path, tokenizer = tmp_path_factory.mktemp("policy"), tiny_tokenizer(WORDS)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    model_of(dtype=torch.float32, tie_word_embeddings=True).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.mark.parametrize("family", ["qwen2", "gpt2"])  # of relative and of absolute positions
@pytest.mark.parametrize("size", [1, 12])
@float_means_double()  # rounding of 1e-16: no draw lies so near to the boundary between two tokens
def test_a_batch_of_prompts_draws_what_each_prompt_alone_would(size, family):
    model, tokenizer = model_of(family), tiny_tokenizer(WORDS)
    law = replace(LAW, max_new_tokens=20)  # long enough for finished rows to leave the batch
    u = np.stack([uniforms(0, "t", number, 0, size, 20) for number in range(len(PROMPTS))])
    together = sample_groups(model, tokenizer, PROMPTS, u, law)
    alone = [sample_continuations(model, tokenizer, prompt, part, law, 100) for prompt, part in zip(PROMPTS, u)]
    assert together == alone
    for a, b in zip(sum(together, []), sum(alone, [])):
        np.testing.assert_allclose(a.log_probs, b.log_probs, rtol=1e-9)
    assert len({c.tokens for group in together for c in group}) > 2  # several lengths and answers, or it shows nothing
    assert {c.ended for group in together for c in group} == {True, False} or size == 1


@pytest.mark.parametrize(
    "prompts", [PROMPTS, PROMPTS[:1] * 3, [[4], [4, 5], [6]]], ids=["shared_beginning", "one_prompt", "nothing_shared"]
)
def test_loss_and_gradient_are_those_of_one_row_at_a_time(prompts):
    model, generator = model_of(), np.random.default_rng(0)
    continuations = [
        Continuation(tuple(generator.integers(0, len(WORDS), size=length).tolist()), True, "")
        for length in (1, 5, 3, 2)[: len(prompts)]
    ]
    weights = generator.normal(size=len(prompts))
    value, plain = weighted_log_probs(model, prompts, continuations, weights, LAW), 0.0
    for prompt, continuation, weight in zip(prompts, continuations, weights):
        ids = torch.tensor([[*prompt, *continuation.tokens]])
        logits = model(input_ids=ids[:, :-1]).logits[0, len(prompt) - 1 :]
        plain = plain + weight * log_probs(logits, ids[0, len(prompt) :], LAW).sum()
    gradient, truth = (
        torch.autograd.grad(scalar, list(model.parameters()), allow_unused=True, materialize_grads=True)
        for scalar in (value, plain)
    )
    assert value.item() == pytest.approx(plain.item(), rel=1e-6)
    for mine, right in zip(gradient, truth):  # Qwen2's norms compute in float32, so a sum regrouped differs a little
        torch.testing.assert_close(mine, right, rtol=0, atol=1e-5 * right.abs().max().item())


FLAGS = (
    "--group_sizes 2 8 --budget 16 --steps 2 --seeds 2 --learning_rate 0.5 --n_train 40 --n_held_out 10 --eval_samples 8 "
    "--top_p 1 --max_new_tokens 4 --threads 1 --quiet"
)


def flags(folder, out, *more):
    return ["--model", str(folder), "--out", str(out), *FLAGS.split(), *more]


def test_interrupted_runs_continue_to_the_same_numbers(folder, tmp_path, capsys):
    out = tmp_path / "new" / "sizes.json"
    main(flags(folder, out))
    shown, first = capsys.readouterr().out, json.loads(out.read_text())
    assert set(first["runs"]) == {"G2_seed0", "G2_seed1", "G8_seed0", "G8_seed1"}
    assert all(len(run["train_reward"]) == 2 and 0 <= run["held_out_reward"] <= 1 for run in first["runs"].values())
    assert [row["G"] for row in first["summary"]] == [2, 8] and [row["B"] for row in first["summary"]] == [8, 2]
    assert "before training" in shown and len(shown.splitlines()) == 4
    stopped = {**first, "runs": {"G2_seed0": first["runs"]["G2_seed0"]}}
    out.write_text(json.dumps(stopped))
    main(flags(folder, out))
    again = json.loads(out.read_text())
    assert again["runs"]["G2_seed0"] == first["runs"]["G2_seed0"]  # its seconds too: it was not run again
    for name, run in first["runs"].items():
        assert {**run, "seconds": 0} == {**again["runs"][name], "seconds": 0}
    assert again["summary"] == first["summary"]


def test_silent_groups_do_not_move_the_policy(folder, tmp_path):
    """Greedy draws have equal rewards: every group is silent, and the held-out reward stays that of the start."""
    out = tmp_path / "silent.json"
    main(flags(folder, out, "--max_new_tokens", "1", "--temperature", "1e-6", "--group_sizes", "4"))
    saved = json.loads(out.read_text())
    assert all(run["silent_share"] == 1.0 and run["held_out_reward"] == saved["start"] for run in saved["runs"].values())


def test_enough_steps_raise_the_reward_of_the_training_problems(folder, tmp_path):
    out = tmp_path / "learns.json"
    more = "--steps 80 --seeds 1 --group_sizes 8 --budget 128 --n_train 5 --optimizer adam --learning_rate 0.01"
    main(flags(folder, out, *more.split()))
    rewards = json.loads(out.read_text())["runs"]["G8_seed0"]["train_reward"]
    assert np.mean(rewards[-10:]) > np.mean(rewards[:10]) + 0.15


def test_the_table_stands_beside_the_predicted_curve(folder, tmp_path, capsys):
    path, predicted = tmp_path / "tracecov.json", group_size_law_of(plain_case())
    path.write_text(json.dumps(results(group_size_law=predicted, law={"top_p": 0.5, "temperature": 1.0})))
    main(flags(folder, tmp_path / "out.json", "--results", str(path), "--seeds", "1"))
    captured = capsys.readouterr()
    assert "measured with another top_p than these runs" in captured.err
    for size in (2, 8):
        assert f"{predicted['curve']['mse_times_N'][size - 2] / 16:.4g}" in captured.out


def test_the_summary_is_the_mean_over_seeds_with_its_error():
    runs = {
        str(i): {"G": 4, "held_out_reward": value, "train_reward": [0.1, 0.3], "silent_share": 0.5}
        for i, value in enumerate((0.2, 0.4))
    }
    (row,) = summarise(runs, [4], 16, None)
    assert row["held_out_reward"] == pytest.approx(0.3) and row["standard_error"] == pytest.approx(0.1)
    assert row["train_reward"] == pytest.approx(0.2) and row["B"] == 4 and row["predicted_mse"] is None


def test_runs_of_other_settings_are_refused_in_one_line(folder, tmp_path):
    out = tmp_path / "sizes.json"
    main(flags(folder, out, "--seeds", "1", "--group_sizes", "2"))
    with pytest.raises(UserError, match="another learning_rate"):
        main(flags(folder, out, "--learning_rate", "0.1"))
    main(flags(folder, out, "--learning_rate", "0.1", "--seeds", "1", "--group_sizes", "2", "--overwrite"))
    for text in ("{", "[]", '{"settings": 1}'):
        out.write_text(text)
        with pytest.raises(UserError, match="is not a file of train_group_sizes.py"):
            main(flags(folder, out))
    with pytest.raises(UserError, match="holds no group_size_law"):
        (tmp_path / "old.json").write_text(json.dumps(results()))
        main(flags(folder, tmp_path / "o.json", "--results", str(tmp_path / "old.json")))


@pytest.mark.parametrize("more", [["--budget", "12"], ["--group_sizes", "1"], ["--n_train", "100000"]])
def test_what_cannot_be_trained_is_exit_code_two(folder, tmp_path, more, capsys):
    with pytest.raises((SystemExit, UserError)) as caught:
        main(flags(folder, tmp_path / "x.json", *more))
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 2 and capsys.readouterr().err.startswith("error: ")
