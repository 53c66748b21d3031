"""Every rollout of a step is in a folder before VERL trains on it, token by token, and training is the same without."""

import importlib.util
import json
import types

import numpy as np
import pyarrow.parquet
import pytest
import queue_stand_in
from launches import dry_run, needs_verl, save_chat_tokenizer, values

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import make_row
from Policy_Optimization import rollout_rows
from Policy_Optimization.overrides import verl_overrides
from Policy_Optimization.settings import read_settings

LAW = {"temperature": 0.7, "top_p": 1.0, "reward": ["integer", "format.py:score"]}
PROMPT = [{"role": "user", "content": "1 + 1 ="}]


@pytest.fixture
def tokenizer(tmp_path):
    return save_chat_tokenizer(tmp_path / "model")


@pytest.fixture
def trained(tmp_path, tokenizer, monkeypatch):
    """(VERL's buffer that saves, the queue it reads), with rollouts of two prompts of step 3."""
    needs_verl()
    queue = queue_stand_in.install(monkeypatch)
    for uid in ("b-b", "a-a"):
        queue.put("train", uid, {"is_prompt": True, "status": "finished", "global_steps": 3})
        for session in (1, 0):
            queue.put("train", f"{uid}_{session}_0", {"global_steps": 3}, trajectory(tokenizer, uid, session))
    buffer = load_as_verl_does()(
        trainer_mode="sync",
        trainer_config={},
        max_off_policy_threshold=8,
        max_off_policy_strategy="drop",
        sampler_kwargs={"save_rollouts": asked(tmp_path)},
        refill_fn=None,
    )
    return buffer, queue


def asked(tmp_path):
    return {"directory": str(tmp_path / "rollouts"), "model": str(tmp_path / "model"), "law": json.dumps(LAW)}


def load_as_verl_does():
    """The class, loaded by the file's path under a made-up name."""
    spec = importlib.util.spec_from_file_location("custom_module_1", launch_file())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SavingReplayBuffer


def launch_file():
    made = values(verl_overrides(read_settings(["--save_rollouts", "x"], {})))
    return made["trainer.v1.sampler.custom_sampler.path"].strip('"')


def trajectory(tokenizer, uid, session):
    """What an agent loop of VERL puts into the queue for one continuation (AgentLoopOutput.as_dict and the row's fields)."""
    import torch

    text = {0: "= 2", 1: "maybe 31"}[session]
    tokens = tokenizer(text)["input_ids"] + ([tokenizer.eos_token_id] if session == 0 else [])
    mask = [0 if session == 1 and position in (2, 3) else 1 for position in range(len(tokens))]
    scores = torch.zeros(len(tokens))
    scores[-1] = 0.1
    told = {"score": 0.1, "integer": float(session == 0), "format.py:score": None, "acc": 1.0, "pred": "2"}
    return {
        "prompts": torch.tensor(tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=False)),
        "responses": torch.tensor(tokens),
        "response_mask": torch.tensor(mask),
        "rollout_log_probs": torch.arange(len(tokens)) * -0.25,
        "rm_scores": scores,
        "raw_prompt": [dict(PROMPT[0], content=f"{uid} {PROMPT[0]['content']}")],
        "data_source": "custom",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": np.int64(4), "reward": None, "columns": '{"level": 3, "ground_truth": 2}'},
        "extra_fields": {"reward_extra_info": told, "turn_scores": []},
    }


def saved(tmp_path, step=3):
    return pyarrow.parquet.read_table(tmp_path / "rollouts" / f"step_{step:06d}.parquet").to_pylist()


def test_a_step_is_saved_token_by_token(trained, tmp_path, tokenizer):
    buffer, _ = trained
    batch, metrics = buffer.sample(global_steps=3, partition_id="train", batch_size=2)
    rows = saved(tmp_path)
    assert metrics["rollouts/saved"] == len(rows) == len(batch.keys) == 4
    uids = [row["prompt"][0]["content"].split()[0] for row in rows]
    assert uids[0] == uids[1] != uids[2] == uids[3]
    for row, session in zip(rows, (0, 1, 0, 1)):
        given = trajectory(tokenizer, uids[0], session)
        assert row["response_ids"] == given["responses"].tolist() and row["prompt_ids"] == given["prompts"].tolist()
        assert row["log_probs"] == given["rollout_log_probs"].tolist()
        counts = given["response_mask"].bool().tolist()
        assert row["mask"] == (None if all(counts) else counts) and (row["mask"] is None) == (session == 0)
        assert row["ended"] == (session == 0) and row["text"] == ("= 2" if session == 0 else "maybe 31")
        assert row["reward"] == 0.1  # not the float32 in rm_scores
        assert row["rewards"] == {"integer": float(session == 0), "format.py:score": None}
        assert row["step"] == 3 and json.loads(row["law"]) == LAW


def test_a_saved_prompt_has_the_id_it_has_in_a_data_set(trained, tmp_path):
    buffer, _ = trained
    buffer.sample(global_steps=3, partition_id="train", batch_size=2)
    for row in saved(tmp_path):
        there = make_row("", {"prompt": row["prompt"], "ground_truth": 2, "level": 3})
        assert row["prompt_id"] == f"{there.prompt_id:016x}"
        columns = json.loads(row["columns"])
        assert columns["level"] == 3 and columns["ground_truth"] == 2 and columns["data_source"] == "custom"


def test_the_toolkit_reads_what_training_saved(trained, tmp_path, tokenizer):
    reader = pytest.importorskip("Gradient_evaluation.runs.inputs.rollouts")
    from Gradient_evaluation.runs.inputs.dataset import file_records

    buffer, _ = trained
    buffer.sample(global_steps=3, partition_id="train", batch_size=2)
    file = tmp_path / "rollouts" / "step_000003.parquet"
    found = reader.importer_of(file).read(file_records(file), reader.Context(tokenizer, None, None))
    assert [len(each.continuations) for each in found] == [2, 2] and [each.step for each in found] == [(3, 3)] * 2
    assert found[0].row.ground_truth == 2 and found[0].law == LAW and list(found[0].rewards) == [0.1, 0.1]
    assert found[0].continuations[0].ended and found[0].continuations[1].mask == (True, True, False, False, *[True] * 4)


def test_training_gets_the_batch_it_would_get_without(trained):
    from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

    buffer, queue = trained
    plain = ReplayBuffer("sync", {}, 8, "drop", {})
    before = {name: dict(tags) for name, tags in queue.tags.items()}
    wanted, _ = plain.sample(global_steps=3, partition_id="train", batch_size=2)
    queue.tags = before
    got, _ = buffer.sample(global_steps=3, partition_id="train", batch_size=2)
    assert (got.keys, got.tags, got.partition_id) == (wanted.keys, wanted.tags, wanted.partition_id)


def test_validation_is_not_saved(trained, tmp_path, tokenizer):
    buffer, queue = trained
    queue.put("val", "v", {"is_prompt": True, "status": "finished", "global_steps": 3})
    queue.put("val", "v_0_0", {"global_steps": 3}, trajectory(tokenizer, "v", 0))
    batch, metrics = buffer.sample(global_steps=3, partition_id="val", batch_size=1)
    assert batch.keys == ["v_0_0"] and metrics == {} and not list((tmp_path / "rollouts").iterdir())


def test_a_step_that_cannot_be_written_stops_no_training(trained, tmp_path, capsys):
    buffer, queue = trained
    (tmp_path / "rollouts" / "step_000003.parquet").mkdir()  # a folder in the file's place
    batch, metrics = buffer.sample(global_steps=3, partition_id="train", batch_size=2)
    assert len(batch.keys) == 4 and metrics["rollouts/saved"] == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: the rollouts of step 3 are not saved in ") and "step_000003.parquet" in line
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_000003.parquet"]


def test_a_step_trained_again_replaces_its_file(trained, tmp_path):
    buffer, queue = trained
    before = {name: dict(tags) for name, tags in queue.tags.items()}
    buffer.sample(global_steps=3, partition_id="train", batch_size=2)
    queue.tags = before
    for _, fields in filter(lambda each: each[1], queue.fields.items()):
        fields["extra_fields"]["reward_extra_info"]["score"] = 0.9
    buffer.sample(global_steps=3, partition_id="train", batch_size=2)
    assert [row["reward"] for row in saved(tmp_path)] == [0.9] * 4 and len(list((tmp_path / "rollouts").iterdir())) == 1


def test_a_folder_that_cannot_be_made_stops_at_the_start(trained, tmp_path):
    (tmp_path / "rollouts").rmdir()
    (tmp_path / "rollouts").write_text("")
    with pytest.raises(UserError, match="rollouts: cannot write it"):
        type(trained[0])("sync", {}, 8, "drop", {"save_rollouts": asked(tmp_path)})


def test_a_cut_session_and_an_empty_response_are_left_out(tokenizer):
    data = rollout_rows.as_lists(
        {name: [trajectory(tokenizer, "a", 0)[name]] * 4 for name in ("raw_prompt", "reward_model", "extra_info")}
        | {name: [[1, 2]] * 3 + [[]] for name in ("prompts", "responses", "response_mask")}
    )
    reading = types.SimpleNamespace(tokenizer=tokenizer, eos=(2,), law={})
    rows = rollout_rows.rollout_rows(data, ["a_0_0", "a_1_0", "a_1_1", "a_2_0"], 1, reading)
    assert len(rows) == 1 and rows[0]["log_probs"] is None and rows[0]["reward"] is None and rows[0]["ended"]


# the launcher


def test_the_launcher_names_law_and_folder_but_no_model(tmp_path):
    flags = ["--save_rollouts", str(tmp_path), "--temperature", "0.7", "--chat_template_kwargs", '{"a": 1}']
    needs_verl()
    from Policy_Optimization.verl_config import compose

    cfg = compose(verl_overrides(read_settings([*flags, "--", "actor_rollout_ref.rollout.top_p=0.9"], {})))
    asked = cfg.trainer.v1.sampler.sampler_kwargs.save_rollouts
    law = json.loads(asked.law)
    assert asked.directory == str(tmp_path) and "model" not in law and "reward" not in law
    assert (law["temperature"], law["top_p"], law["max_new_tokens"]) == (0.7, 0.9, 512)
    assert law["chat_template_kwargs"] == {"a": 1}


def test_a_run_that_is_begun_may_save_from_now_on(inputs):
    from Policy_Optimization.run_folder import FREE

    with_it = values(verl_overrides(read_settings(["--save_rollouts", "x"], {})))
    without = values(verl_overrides(read_settings([], {})))
    changed = [key for key in with_it if with_it[key] != without.get(key)]
    assert changed and all(key.startswith(FREE) for key in changed)


@pytest.mark.parametrize(
    "passed, message",
    [
        ([], None),
        (["trainer.v1.trainer_mode=colocate_async"], "needs trainer.v1.trainer_mode=sync"),
        (["trainer.use_v1=False"], "needs trainer.use_v1=True"),
        (["trainer.v1.sampler.sync_refill_failed_groups=True"], "needs trainer.v1.sampler.sync_refill_failed_groups=False"),
        (["algorithm.filter_groups.enable=True"], "needs algorithm.filter_groups.enable=False"),
        (["trainer.v1.sampler.custom_sampler.path=/x/mine.py"], "custom_sampler.path=/x/mine.py takes its place"),
    ],
)
def test_where_nothing_would_be_saved_the_launcher_says_so(inputs, tmp_path, capsys, passed, message):
    needs_verl()
    if message is None:
        dry_run(inputs, save_rollouts=tmp_path / "new")
        dry_run(inputs, "--", "actor_rollout_ref.rollout.calculate_log_probs=False", save_rollouts=tmp_path / "new")
        assert capsys.readouterr().out.count("saved without log-probs") == 1 and not (tmp_path / "new").exists()
        return
    with pytest.raises(UserError, match=message):
        dry_run(inputs, "--", *passed, save_rollouts=tmp_path / "new")


def test_the_rollouts_of_another_run_stay(inputs, tmp_path):
    needs_verl()
    (tmp_path / "step_000001.parquet").write_bytes(b"")
    with pytest.raises(UserError, match="holds the rollouts of another run; give another folder"):
        dry_run(inputs, save_rollouts=tmp_path)
