"""The launcher refuses what would fail later, in one line that names the setting."""

import pytest
from launches import FAKE_KEY, dry_run, needs_verl, parquet, save_chat_tokenizer

from data.make_arithmetic import make_problems
from data.verl_parquet import Problem
from Gradient_evaluation.errors import UserError

# wrong settings: an error that names the setting, before VERL is imported

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
WITHOUT_VERL = [
    ("G does not divide the budget", dict(group_size=3), r"--group_size 3 does not divide --budget 256: .*change --budget"),
    ("nor the update", dict(group_size=64, budget=1024, update_budget=32), "64 does not divide --update_budget 32"),
    ("nor the epochs", dict(group_size=256, budget=1024, update_budget=256), "256 does not divide --epoch_budget 128"),
    ("G of one", dict(group_size=1), None),
    ("G is no number", dict(group_size="many"), None),
    ("learning rate is text", dict(learning_rate="abc"), None),
    ("learning rate of zero", dict(learning_rate=0), None),
    ("estimator misspelt", dict(estimator="gpro"), None),
    ("no steps between checkpoints", dict(save_freq=0), None),
    ("several nodes without a cluster", dict(nnodes=2), "--nnodes: .*--ray_address"),
    ("no training file", dict(train_files="absent.parquet"), "--train_files .*absent.parquet: no such file; make it"),
    ("no validation file", dict(val_files="absent.parquet"), "--val_files .*absent.parquet: no such file"),
    ("a folder for a file", dict(train_files="{inputs}"), "--train_files .*: is a folder"),
    ("JSONL for parquet", dict(train_files="{inputs}/rows.jsonl"), "whose name ends in .parquet"),
    ("not parquet inside", dict(train_files="{inputs}/text.parquet"), "cannot be read as parquet"),
    ("parquet of another schema", dict(train_files="{inputs}/other.parquet"), "no column 'data_source'"),
    ("no rows", dict(val_files="{inputs}/empty.parquet"), "--val_files .*holds no rows"),
    ("missing model folder", dict(model="./absent/model"), "--model ./absent/model: no such folder, and no hub id"),
    ("implausible model id", dict(model="a b/c"), "--model a b/c: no such folder, and no hub id"),
    ("model folder without config", dict(model="{inputs}"), "has no config.json"),
    ("model folder without weights", dict(model="{inputs}/bare model"), "has no weights"),
    ("more tokens than positions", dict(max_prompt_length=1000), "1064 tokens, the model has 1024 positions"),
    ("heads not shared among GPUs", dict(tensor_parallel=3, gpus_per_node=3), "does not divide the model's 2 attention heads"),
    ("experiment with a slash", dict(experiment="a/b"), "--experiment 'a/b'"),
    ("run folder is a file", dict(run_dir="{inputs}/rows.jsonl"), "--run_dir .*: is a file"),
]


@pytest.fixture(scope="module")
def faults(inputs):
    """Files that are wrong in one way each, beside the good ones."""
    import pyarrow
    import pyarrow.parquet

    (inputs / "rows.jsonl").write_text('{"prompt": "1?", "ground_truth": 1}\n')
    (inputs / "text.parquet").write_text("not parquet")
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"]}), inputs / "other.parquet")
    (inputs / "empty.parquet").write_bytes(parquet([], "val"))
    save_chat_tokenizer(inputs / "bare model")
    rows = [Problem([{"role": "user", "content": "1?"}], "none", "")] * 40
    (inputs / "answers.parquet").write_bytes(parquet(rows, "train"))
    rows = [Problem([{"role": "user", "content": "1?"}], "1", "")] * 40
    (inputs / "poetry.parquet").write_bytes(parquet(rows, "train", "poetry", "poetry"))
    (inputs / "few.parquet").write_bytes(parquet(rows[:31], "train"))
    table = pyarrow.parquet.read_table(inputs / "train.parquet")
    large = table.set_column(0, "data_source", table["data_source"].cast(pyarrow.large_string()))
    pyarrow.parquet.write_table(large, inputs / "large.parquet")
    (inputs / "reward.py").write_text("def other(): pass\n")
    return inputs


@pytest.mark.parametrize("changes, message", [row[1:] for row in WITHOUT_VERL], ids=[row[0] for row in WITHOUT_VERL])
def test_a_wrong_setting_is_refused_by_name(faults, capsys, changes, message):
    changes = {name: str(value).format(inputs=faults) for name, value in changes.items()}
    if message is None:  # argparse itself
        with pytest.raises(SystemExit) as stopped:
            dry_run(faults, **changes)
        assert stopped.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and f"--{next(iter(changes))}" in lines[0]
    else:
        with pytest.raises(UserError, match=message) as error:
            dry_run(faults, **changes)
        assert "\n" not in str(error.value)
    assert not (faults / "run").exists()


@pytest.mark.parametrize(
    "environment, message",
    [
        ({"GROUP_SIZE": "many"}, "environment variable GROUP_SIZE: 'many' is not an integer"),
        ({"ESTIMATOR": "gpro"}, "environment variable ESTIMATOR: 'gpro' is unknown"),
        ({"WANDB_MODE": "sometimes"}, "WANDB_MODE=sometimes"),
        ({"WANDB_MODE": "online"}, "WANDB_MODE=online, but there is no key"),
    ],
)
def test_a_wrong_environment_variable_is_refused_by_name(inputs, environment, message):
    with pytest.raises(UserError, match=message):
        dry_run(inputs, group_size=None, environment={"HOME": str(inputs), **environment})


def test_an_unknown_flag_is_an_error(inputs, capsys):
    with pytest.raises(SystemExit) as stopped:
        dry_run(inputs, "--group_sise", "4")
    assert stopped.value.code == 2 and "--group_sise" in capsys.readouterr().err


@pytest.mark.parametrize(
    "variables, changes, message",
    [
        ({"MICRO_BATCH_SIZE": "24"}, {}, r"^MICRO_BATCH_SIZE=24 does not divide .*these fit: MICRO_BATCH_SIZE=16$"),
        ({"MICRO_BATCH_SIZE": "24"}, {"micro_batch_size": 12}, "^--micro_batch_size 12 .*these fit: --micro_batch_size 8$"),
        ({"MINI_BATCH_SIZE": "12"}, {}, "^MINI_BATCH_SIZE=12 does not divide --train_batch_size 32 .*these fit: MINI_BATCH"),
        ({"UPDATE_BUDGET": "96"}, {"update_budget": None}, r"^the mini-batch of 12 .*\(by default they are UPDATE_BUDGET / G"),
        ({"GPUS": "3"}, {"gpus_per_node": None}, "change GPUS, --nnodes or the batch; these fit: GPUS=2$"),
        ({"IN_SWEEP": "1"}, {"budget": 96}, "are --update_budget / G and --budget / G.*these fit: --update_budget 32$"),
        ({"IN_SWEEP": "1", "GPUS_PER_NODE": "3"}, {"gpus_per_node": None}, "change GPUS_PER_NODE, NNODES or the batch"),
        ({"IN_SWEEP": "1"}, {"group_size": 4, "update_budget": 4}, "^MICRO_BATCH_SIZE=8 .*fit: MICRO_BATCH_SIZE=4$"),
        ({"IN_SWEEP": "1"}, {"group_size": 3}, "^--group_sizes 3 does not divide --budget 256"),
    ],
)
def test_a_refusal_names_what_the_person_can_type(inputs, variables, changes, message):
    needs_verl()
    with pytest.raises(UserError, match=message):
        dry_run(inputs, environment={"HOME": str(inputs), **variables}, **changes)


# wrong settings that VERL itself accepts without a message, and its own checks

FOUR, TWO = ["trainer.n_gpus_per_node=4"], "['{inputs}/train.parquet','{inputs}/large.parquet']"
WITH_VERL = [
    ("misspelt estimator", ["algorithm.adv_estimator=gpro"], "adv_estimator=gpro: unknown to VERL; use one of .*grpo"),
    ("misspelt loss", [f"{ACTOR}.policy_loss.loss_mode=vanila"], "loss_mode=vanila: unknown to VERL"),
    ("no continuations", [f"{ROLLOUT}.n=0"], "rollout.n=0: a whole number of at least 1"),
    ("a group of one", [f"{ROLLOUT}.n=1"], "rollout.n=1: grpo compares at least two"),
    ("learning rate is text", [f"{ACTOR}.optim.lr=abc"], "optim.lr=abc: a number is expected"),
    ("learning rate is infinite", [f"{ACTOR}.optim.lr=inf"], "optim.lr=inf: a finite number"),
    ("a switch is text", [f"{ACTOR}.use_kl_loss=perhaps"], "use_kl_loss=perhaps: True or False"),
    ("missing file behind the dashes", ["data.train_files=/absent/x.parquet"], "/absent/x.parquet: no such file"),
    ("micro-batch", [f"{ACTOR}.ppo_micro_batch_size_per_gpu=24"], "--micro_batch_size 24 does not divide the 128"),
    ("log-prob batch", [f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=24"], "--log_prob_micro_batch_size 24 does not divide"),
    ("mini-batch", [f"{ACTOR}.ppo_mini_batch_size=12"], "the mini-batch of 12 prompts does not divide the 32"),
    ("tensor parallelism", [f"{ROLLOUT}.tensor_model_parallel_size=3", *FOUR], "--tensor_parallel 3 does not fit 1 nodes of 4"),
    ("batch does not fit the GPUs", ["trainer.n_gpus_per_node=3"], "cannot be shared among 3 GPUs"),
    ("dead key of the reward", ["custom_reward_function.path=/x.py"], "ignores it; use reward.custom_reward_function.path"),
    ("reward manager under the dead key", ["reward_model.reward_manager=dapo"], "use reward.reward_manager.name"),
    ("reward file is missing", ["reward.custom_reward_function.path=/absent.py"], "VERL cannot load it"),
    ("reward function is missing", ["reward.custom_reward_function.path='{inputs}/reward.py'"], "VERL cannot load it"),
    ("unknown key", ["trainer.epochs=3"], r"^trainer.epochs: VERL has no such key; is it trainer.\w+\? \(\+.*=... adds one\)$"),
    ("misspelt key", ["data.train_batchsize=3"], "data.train_batchsize: VERL has no such key; is it data.train_batch_size"),
    ("no override", ["train_batch_size"], "VERL's configuration: .*train_batch_size"),
    ("unknown engine", [f"{ROLLOUT}.name=vlm"], "rollout.name=vlm: unknown to VERL; use one of .*vllm"),
    ("unknown logger", ["trainer.logger=[console,wand]"], "trainer.logger=wand: unknown to VERL"),
    ("unknown resume mode", ["trainer.resume_mode=always"], "resume_mode=always: unknown to VERL"),
    ("unknown aggregation", [f"{ACTOR}.loss_agg_mode=mean"], "VERL's validate_config: .*loss_agg_mode"),
    ("batch below the mini-batch", ["data.train_batch_size=8"], "the mini-batch of 16 prompts does not divide the 8 prompts"),
    ("engine without room", [f"{ROLLOUT}.max_model_len=100"], "max_model_len=100: prompt and response have up to 576"),
    ("no micro-batch", [f"{ACTOR}.ppo_micro_batch_size_per_gpu=null"], "VERL's validate_config: .*ppo_micro_batch_size"),
    ("fewer prompts than a step", ["data.train_files='{inputs}/few.parquet'"], "31 usable prompts, a step takes 32"),
    ("unusable answers", ["data.train_files='{inputs}/answers.parquet'"], "row 1: the ground_truth 'none' is not an integer"),
    ("unknown reward in the data", ["data.train_files='{inputs}/poetry.parquet'"], "reward 'poetry' .*is unknown"),
    ("all prompts too long", ["data.max_prompt_length=10"], "0 usable .*64 are longer than --max_prompt_length 10: raise it"),
    ("token budget", [f"{ACTOR}.use_dynamic_bsz=True", f"{ACTOR}.ppo_max_token_len_per_gpu=575"], "raise it to 576"),
    ("LoRA rank above vLLM's", ["actor_rollout_ref.model.lora_rank=513"], "lora_rank"),
    ("unread variable", ["+data.apply_chat_template_kwargs.enable_thinking=False"], "does not read enable_thinking"),
    ("files VERL cannot join", [f"data.train_files={TWO}"], "large.parquet: VERL cannot load it: .*train.parquet"),
    ("a key among the overrides", [f"+x.WANDB_API_KEY={FAKE_KEY}"], "x.WANDB_API_KEY: looks like a key"),
]


@pytest.mark.parametrize("passed, message", [row[1:] for row in WITH_VERL], ids=[row[0] for row in WITH_VERL])
def test_what_verl_would_take_in_silence_is_refused(faults, capsys, passed, message):
    needs_verl()
    passed = [text.replace("{inputs}", str(faults).replace("'", "\\'")) for text in passed]
    with pytest.raises(UserError, match=message) as error:
        dry_run(faults, "--", *passed)
    assert "\n" not in str(error.value) and FAKE_KEY not in str(error.value)
    assert not (faults / "run").exists()


@pytest.mark.parametrize(
    "rows, changes, message",
    [
        (5, {}, "give more, or"),
        (31, {"group_size": 4, "budget": None, "update_budget": None, "gpus_per_node": 8}, "give more, or"),
        (200, {"group_size": 2, "gpus_per_node": 64, "nnodes": 1}, "these fit:"),
        (3, {"train_batch_size": 32, "mini_batch_size": 32}, "give more, or"),
        (1, {"group_size": 2}, "give more, or"),
        (64, {"budget": 96, "update_budget": 128}, "these fit:"),
        (64, {"micro_batch_size": 24}, "these fit:"),
        (64, {"gpus_per_node": 3}, "these fit:"),
        (64, {"train_batch_size": 24, "mini_batch_size": 16}, "these fit:"),
    ],
)
def test_the_flags_that_are_said_to_fit_do(inputs, tmp_path, capsys, rows, changes, message):
    needs_verl()
    problems = [Problem(row["prompt"], str(row["ground_truth"]), "") for row in make_problems(rows, seed=1)]
    few = tmp_path / "few.parquet"
    few.write_bytes(parquet(problems, "train"))
    with pytest.raises(UserError, match=message) as error:
        dry_run(inputs, train_files=few, **changes)
    dry_run(inputs, *str(error.value).partition(message)[2].split(), train_files=few, **changes)
    assert "all checks passed" in capsys.readouterr().out
