"""GroupSizeCallback in a plain Trainer: the training is the same to the last bit, and the numbers are those of the policy."""

import itertools
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from callback_runs import LAW, PROBLEMS, TINY, after, callback_of, graded, measured, model_of, same, trainer_of
from scripts import ROOT, call, read
from transformers import TrainerCallback

from data.make_arithmetic import write_jsonl
from Gradient_evaluation import run_tracecov
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.rewards.own_reward import reward_in_process
from Gradient_evaluation.runs.inputs.rewards import RunRewards
from Gradient_evaluation.sampling.law import SamplingLaw
from Policy_Optimization.group_size_callback import GroupSizeCallback
from Policy_Optimization.policy_in_place import in_place, rows_of
from Policy_Optimization.trainer_rollouts import check_measurable, law_of, prompt_ids


def trained(out, callback=None, **changes):
    trainer = trainer_of(out, callback, **changes)
    trainer.train()
    return trainer


def lora(**_):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=2, lora_dropout=0.2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(model_of(), config)


SETTINGS = {
    "plain": {},
    "checkpointing": dict(gradient_checkpointing=True, gradient_accumulation_steps=2),
    "autocast": dict(bf16=True),
    "lora": dict(lora=True),
}


def run_of(settings, out, callback=None):
    changes = {name: value for name, value in settings.items() if name != "lora"}
    return trained(out, callback, model=lora() if settings.get("lora") else None, **changes)


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """What each of the trainings leaves without a callback."""
    return {name: after(run_of(settings, tmp_path_factory.mktemp(name))) for name, settings in SETTINGS.items()}


# ------------------------------------------------------------------------------------------- the training is the same


@pytest.mark.parametrize("name", SETTINGS)
def test_ten_steps_are_bit_equal_with_and_without_the_callback(name, without, tmp_path):
    trainer = run_of(SETTINGS[name], tmp_path, callback_of())
    assert [line["step"] for line in measured(tmp_path)] == [0, 5, 10]
    assert all("error" not in line for line in measured(tmp_path))
    same(without[name], after(trainer))


def test_a_training_with_other_random_numbers_would_be_told_apart(without, tmp_path):
    class Draws(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            torch.rand(1)

    with pytest.raises(AssertionError):
        same(without["plain"], after(trained(tmp_path, callbacks=[Draws()])))


def broken(text, ground_truth):
    np.random.rand(), torch.rand(3)
    raise ValueError("the judge is down")


def test_an_exception_is_one_warning_and_the_training_stays_bit_equal(without, tmp_path):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer = trained(tmp_path, callback_of(broken))
    about = [str(each.message) for each in said if "GroupSizeCallback" in str(each.message)]
    assert len(about) == 1 and "step 0" in about[0] and "the judge is down" in about[0] and "\n" not in about[0]
    assert [(line["step"], "the judge is down" in line["error"]) for line in measured(tmp_path)] == [
        (0, True),
        (5, True),
        (10, True),
    ]
    same(without["plain"], after(trainer))


def test_an_exception_in_the_middle_of_the_scores_leaves_the_model_as_it_was(without, tmp_path):
    """The embedding fails in eval mode once gradients are asked for: inside ScoreGram's forward pass."""

    def fails(module, inputs, output):
        if not module.training and torch.is_grad_enabled():
            raise RuntimeError("no gradient today")

    model = model_of()
    hook = model.get_input_embeddings().register_forward_hook(fails)
    with pytest.warns(UserWarning, match="RuntimeError: no gradient today"):
        trainer = trained(tmp_path, callback_of(), model=model)
    hook.remove()
    same(without["plain"], after(trainer))


def test_ctrl_c_in_a_measurement_ends_the_training(tmp_path):
    def interrupted(text, ground_truth):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path, callback_of(interrupted))


# ------------------------------------------------------------------------------------------- the numbers


def test_the_numbers_are_those_of_run_tracecov_on_the_checkpoint(tmp_path):
    """In float64: same prompts, same continuations, same sketches, whatever the batches of the sampler."""
    trainer = trained(tmp_path / "run", callback_of("integer", group_size=8), model=model_of(torch.float64))
    trainer.save_model(tmp_path / "model")
    write_jsonl(PROBLEMS, tmp_path / "problems.jsonl")
    flags = ("--dataset", tmp_path / "problems.jsonl", *"--T 5 --M 1 --K_list 4 8 --block_size 8 --max_new_tokens 6".split())
    law = "--temperature 1 --top_p 1 --dtype float64 --device cpu --skip_plot".split()
    assert call(run_tracecov, "--model", tmp_path / "model", *flags, *law, "--save_json", tmp_path)[0] == 0
    law = read(tmp_path / "tracecov_model.json")["group_size_law"]
    last = measured(tmp_path / "run")[-1]
    names = ("c1", "c2", "c3", "c1_ci95", "mean_theta_norm_sq", "mean_theta_norm_sq_ci95")
    for name in names:
        assert np.allclose(last[name], law[name], rtol=1e-6), name
    assert last["G_star"] == law["G_star"] or np.isclose(last["G_star"], law["G_star"])


def test_what_is_said_at_the_trainers_own_group_size(tmp_path):
    trained(tmp_path, callback_of(), max_steps=1)
    line = measured(tmp_path)[0]
    c1, c2, c3 = (line[name] for name in ("c1", "c2", "c3"))

    def mse(G, N=8):  # four continuations of each of two prompts
        return c1 / (N / G) + c2 / N + c3 / (N * (G - 1))

    assert np.allclose([line["mse"], line["mse_half"], line["mse_double"]], [mse(4), mse(2), mse(8)], rtol=1e-12)
    assert line["signal_to_noise"] is None or np.isclose(line["signal_to_noise"], line["mean_theta_norm_sq"] / mse(4))


def test_the_share_of_silent_groups_is_that_of_all_groups_of_the_continuations(tmp_path):
    rows = rows_of(PROBLEMS, 5, 0)
    trained(tmp_path, callback_of("integer", num_generations=3), max_steps=1)
    line = measured(tmp_path)[0]
    shares, model = [], model_of().eval()
    from transformers import AutoTokenizer

    from Gradient_evaluation.utils import integer_reward

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    with in_place(model, LAW) as policy:
        asked = [(row, prompt_ids(tokenizer, row.prompt, {})) for row in rows]
        for row, drawn in zip(rows, policy.sampled(tokenizer, asked, 4, 1, 0)):
            rewards = [integer_reward(each.text, row.ground_truth) for each in drawn]
            shares.append(np.mean([len(set(group)) == 1 for group in itertools.combinations(rewards, 3)]))
    assert np.isclose(line["frac_reward_zero_std"], np.mean(shares)) and line["n_continuations"] == 20


@pytest.mark.parametrize("at_once", [1, 4, 8, 100])
def test_a_continuation_does_not_depend_on_the_batch(at_once):
    from transformers import AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(TINY), model_of(torch.float64)
    asked = [(row, prompt_ids(tokenizer, row.prompt, {})) for row in rows_of(PROBLEMS, 5, 0)]
    with in_place(model, LAW) as policy:
        assert policy.sampled(tokenizer, asked, 4, at_once, 0) == policy.sampled(tokenizer, asked, 4, 3, 0)


def test_group_sizes_that_the_continuations_do_not_reach_have_a_reason(tmp_path):
    trained(tmp_path, callback_of(num_generations=8), max_steps=1)
    line = measured(tmp_path)[0]
    assert line["frac_reward_zero_std"] is None and "8 is more than the 4" in line["reasons"]["frac_reward_zero_std"]
    assert line["mse"] is not None


def test_a_trainer_without_groups_is_measured_too(tmp_path):
    trained(tmp_path, callback_of(num_generations=None, prompts_per_step=None), max_steps=1)
    line = measured(tmp_path)[0]
    assert line["c2"] is not None and line["mse"] is None and "num_generations" in line["reasons"]["mse"]


# ------------------------------------------------------------------------------------------- where the numbers go


class Tracker(TrainerCallback):
    """A tracker as transformers' W&B and TensorBoard callbacks are."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **others):
        self.seen.append((state.global_step, sorted(logs)))


def test_the_trainer_logs_the_numbers_and_its_own_entries_as_before(tmp_path):
    tracker = Tracker()
    trainer = trained(tmp_path, callback_of(), callbacks=[tracker])
    ours = [step for step, names in tracker.seen if "group_size/c2" in names]
    losses = [step for step, names in tracker.seen if "loss" in names]
    assert ours == [0, 5, 10] and losses == [5, 10]
    entries = [entry for entry in trainer.state.log_history if "group_size/c2" in entry]
    for entry, line in zip(entries, measured(tmp_path)):
        assert entry["step"] == line["step"] and entry["group_size/c2"] == line["c2"]
        assert entry["group_size/c2_low"] == line["c2_ci95"][0] and entry["group_size/c2_high"] == line["c2_ci95"][1]
        assert all(isinstance(value, (int, float)) for value in entry.values())


def test_without_attach_the_history_has_the_numbers(without, tmp_path):
    trainer = trained(tmp_path, callback_of(), attach=False)
    assert [entry["step"] for entry in trainer.state.log_history if "group_size/c2" in entry] == [0, 5, 10]
    same(without["plain"], after(trainer))


def test_the_cost_is_told_before_and_after(tmp_path, capsys):
    trained(tmp_path, callback_of())
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("GroupSizeCallback: ")]
    assert len(told) == 2
    assert "5 prompts and 20 continuations took" in told[0] and "2 more in 10 steps (every=5)" in told[0]
    assert "3 measurements took" in told[1] and "% of the run's" in told[1]
    lines = measured(tmp_path)
    assert lines[0]["share_of_run"] is None and all(0 < line["share_of_run"] < 1 for line in lines[1:])
    assert all(line["seconds"] > 0 for line in lines)


def test_a_resumed_run_appends_and_a_torn_line_is_cut_off(tmp_path):
    trained(tmp_path, callback_of(), save_strategy="steps", save_steps=5)
    whole = measured(tmp_path)
    with open(tmp_path / "group_size.jsonl", "a") as file:
        file.write('{"step": 15, "torn')
    found = []
    for out, callback in ((tmp_path, callback_of()), (tmp_path / "without", None)):
        trainer = trainer_of(out, callback)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
        found.append(after(trainer))
    same(*found)
    lines = measured(tmp_path)
    assert [line["step"] for line in lines] == [0, 5, 10, 5, 10]
    assert {**whole[1], "seconds": 0, "share_of_run": 0} == {**lines[3], "seconds": 0, "share_of_run": 0}


# ------------------------------------------------------------------------------------------- several processes


def test_two_processes_share_the_prompts_and_train_as_without(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, ROOT / "tests" / "training" / "callback_runs.py", tmp_path], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(line for line in done.stdout.splitlines() if "bit-equal" in line) == [
        "rank 0: bit-equal",
        "rank 1: bit-equal",
    ]
    trained(tmp_path / "alone", callback_of(), max_steps=1)
    alone, shared = measured(tmp_path / "alone")[0], measured(tmp_path / "with")[0]
    assert shared["n_prompts"] == 5
    for name in ("c1", "c2", "c3", "mean_reward", "mean_theta_norm_sq", "mse"):
        assert np.isclose(alone[name], shared[name], rtol=1e-4), name


# ------------------------------------------------------------------------------------------- refused


def test_sharded_parameters_are_refused_by_name(tmp_path):
    from torch.distributed.fsdp import fully_shard

    class Arguments:
        fsdp = []

    model = model_of()
    next(model.parameters()).ds_id = 0  # as DeepSpeed marks what it splits
    with pytest.raises(UserError, match="ZeRO-3.*run_tracecov.py"):
        check_measurable(Arguments(), model)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        with pytest.raises(UserError, match="FSDP.*run_tracecov.py"):
            check_measurable(Arguments(), fully_shard(model_of(), mesh=mesh))
    finally:
        torch.distributed.destroy_process_group()
    Arguments.fsdp = ["full_shard"]
    with pytest.raises(UserError, match="FSDP"):
        check_measurable(Arguments(), model_of())
    Arguments.fsdp = []
    check_measurable(Arguments(), model_of())


def test_virtual_tokens_are_refused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(model_of(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(UserError, match="virtual tokens"):
        check_measurable(None, model)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(every=0), "every=0: give an integer of at least 1"),
        (dict(group_size=3), "group_size=3: give an integer of at least 4"),
        (dict(num_generations=1), "num_generations=1: give an integer of at least 2"),
        (dict(sample_at_once=-1), "sample_at_once=-1: give an integer of at least 1"),
        (dict(rollouts="theirs"), "rollouts='theirs'"),
        (dict(rollouts="trainer"), "without both"),
        (dict(prompts=None), "give prompts and reward"),
        (dict(prompts=[]), "there are none"),
        (dict(prompts=iter(PROBLEMS)), "a stream has no length"),
        (dict(prompts=[{"question": "1+1"}]), "row 1: no column 'prompt'"),
        (dict(prompts=[{"prompt": "1+1"}]), "takes ground_truth"),
        (dict(reward=lambda ground_truth: 0.0), "none of which is the text"),
        (dict(reward="nonsense"), "unknown"),
        (dict(reward=[graded, graded], reward_weights=[1.0]), "1 weights for 2 rewards"),
    ],
)
def test_what_cannot_be_is_refused_before_any_training(changes, message):
    given = {"prompts": PROBLEMS, "reward": graded, **changes}
    with pytest.raises(UserError) as error:
        GroupSizeCallback(given.pop("prompts"), given.pop("reward"), **given)
    assert message in str(error.value) and "\n" not in str(error.value)


class Arguments:
    """The sampling of a TRL trainer."""

    temperature, top_p, top_k, max_completion_length = 0.7, 0.9, 5, 64
    min_p, repetition_penalty, generation_kwargs = None, 1.0, None

    def __init__(self, **changes):
        vars(self).update(changes)


def test_the_law_is_that_of_the_trainers_arguments():
    assert law_of(Arguments()) == SamplingLaw(0.7, 0.9, 5, 64)
    assert law_of(Arguments(top_k=None)).top_k == 0
    for changes in (dict(min_p=0.1), dict(repetition_penalty=1.2), dict(generation_kwargs={"typical_p": 0.5})):
        with pytest.raises(UserError, match=f"{next(iter(changes))}.*give law="):
            law_of(Arguments(**changes))


def test_a_trainer_that_says_nothing_of_sampling_needs_a_law(tmp_path):
    with pytest.raises(UserError, match="max_completion_length.*law=SamplingLaw"):
        trained(tmp_path, callback_of(law=None))
    trainer = trainer_of(tmp_path)
    trainer.callback_handler.processing_class = None
    with pytest.raises(UserError, match="no processing_class"):
        callback_of().attach(trainer)
        trainer.train()


# ------------------------------------------------------------------------------------------- rewards in this process


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(solution_str) + float(ground_truth) + len(extra_info["kind"]), "acc": 1}


def trl_reward(prompts, completions, completion_ids, kind, **columns):
    texts = [each[0]["content"] for each in completions]
    return [None if text == "b" else len(text) + sum(ids) for text, ids in zip(texts, completion_ids)]


@pytest.mark.parametrize(
    "function, expected",
    [
        (lambda text, ground_truth: len(text) + ground_truth, [8, 9]),
        (lambda text, kind: kind + text, None),
        (compute_score, [11, 12]),
        (trl_reward, [None, 9]),
    ],
    ids=["text", "not_a_number", "verl", "trl"],
)
def test_rewards_of_the_three_signatures_are_called_in_this_process(function, expected):
    (row,) = rows_of([{"prompt": [{"role": "user", "content": "x"}], "ground_truth": 7, "kind": "abc"}], 1, 0)
    reward = reward_in_process(function)
    if expected is None:
        with pytest.raises(UserError, match="not a finite number.*continuation 1"):
            reward.of_prompt(["b", "cc"], row, [[1], [3, 4]])
    else:
        assert reward.of_prompt(["b", "cc"], row, [[1], [3, 4]]) == expected


def test_several_rewards_are_weighted_and_a_left_out_continuation_is_counted(tmp_path):
    def some(completions, completion_ids, **columns):
        return [None if sum(ids) % 5 == 0 else 1.0 + len(ids) for ids in completion_ids]

    trained(tmp_path, callback_of([some], group_size=12), max_steps=1)
    line = measured(tmp_path)[0]
    assert line["n_left_out"] > 0 and line["n_left_out"] + line["n_continuations"] <= 60
    both = callback_of(["integer", graded], reward_weights=[2.0, 0.5]).rewards
    assert isinstance(both, RunRewards) and both.weights == (2.0, 0.5)
