"""The launcher's false passes: files VERL cannot join, budgets it asserts on, checkpoints of other GPUs, templates."""

import json
import shutil
import types
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from chat_templates import CALLED, DATED, LLAMA_3, TOOL, USES_TOOLS
from launches import checkpoint, dry_run, needs_verl, prepare, read, write_jsonl

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs.dataset import load_dataset_rows
from Gradient_evaluation.utils import format_prompt
from Policy_Optimization import checks, launch, run_folder
from Policy_Optimization.overrides import verl_overrides
from Policy_Optimization.settings import read_settings


def with_template(inputs, template, tmp_path):
    """A model folder as the launcher wants it, with another chat template."""
    folder = shutil.copytree(inputs / "my model", tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    return folder


# the files of one setting


def with_column(name, change):
    """A table with one column changed."""
    return lambda table: table.set_column(table.column_names.index(name), name, change(table[name]))


def fields_in_another_order(prompts):
    return pyarrow.array([[{"content": m["content"], "role": m["role"]} for m in each] for each in prompts.to_pylist()])


REWRITTEN = {  # the same rows, by another program or with other types
    "same": lambda table: table,
    "large_string": with_column("data_source", lambda column: column.cast(pyarrow.large_string())),
    "dictionary": with_column("data_source", lambda column: column.dictionary_encode()),
    "null_column": with_column("ability", lambda column: pyarrow.nulls(len(column))),
    "index_column": lambda table: table.append_column("__index_level_0__", pyarrow.array(range(len(table)))),
    "columns_in_another_order": lambda table: table.select(list(reversed(table.column_names))),
    "fields_in_another_order": with_column("prompt", fields_in_another_order),
    "pandas": lambda table: pyarrow.Table.from_pandas(table.to_pandas()),
    "pandas_part": lambda table: pyarrow.Table.from_pandas(table.to_pandas().iloc[3:9]),
}


@pytest.mark.parametrize("kind", REWRITTEN)
def test_files_pass_exactly_where_verl_can_join_them(inputs, tmp_path, kind, monkeypatch):
    needs_verl()
    import datasets
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    first = Path(shutil.copy(inputs / "train.parquet", tmp_path))
    files = [str(first), str(tmp_path / f"{kind}.parquet")]
    pyarrow.parquet.write_table(REWRITTEN[kind](pyarrow.parquet.read_table(first)), files[1])
    config = OmegaConf.create({"filter_overlong_prompts": False, "cache_dir": str(tmp_path / "verl")})
    try:
        taken = len(RLHFDataset(data_files=files, tokenizer=None, config=config)) > 64
    except Exception:  # of datasets or pyarrow
        taken = False
    if taken:
        checks.check_loads_together(files, "train_files")
    else:
        with pytest.raises(UserError, match=f"--train_files .*{kind}.parquet: VERL cannot load it") as caught:
            checks.check_loads_together(files, "train_files")
        assert "\n" not in str(caught.value)
    assert {"same": True, "large_string": False}.get(kind, taken) == taken  # a rewrite by pandas 3 is a case of the latter


# budgets, LoRA, packages


def composed(*overrides):
    needs_verl()
    from Policy_Optimization.verl_config import compose

    shape = ["data.max_prompt_length=100", "data.max_response_length=28", "algorithm.adv_estimator=grpo"]
    return compose([*shape, f"{ROLLOUT}.name=vllm", f"{ACTOR}.use_dynamic_bsz=True", *overrides])


ACTOR, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "ref"))


@pytest.mark.parametrize(
    "overrides, named",
    [
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=128"], None),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=127"], "actor.ppo_max_token_len_per_gpu=127"),
        ([f"{ROLLOUT}.log_prob_max_token_len_per_gpu=127"], "rollout.log_prob_max_token_len_per_gpu=127"),
        ([f"{REF}.log_prob_max_token_len_per_gpu=127"], None),  # there is no reference model
        ([f"{REF}.log_prob_max_token_len_per_gpu=127", f"{ACTOR}.use_kl_loss=True"], "ref.log_prob_max_token_len_per_gpu=127"),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=64", f"{ACTOR}.ulysses_sequence_parallel_size=2"], None),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=63", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"], "63 x 2 GPUs"),
        ([f"{ACTOR}.ppo_max_token_len_per_gpu=1", f"{ACTOR}.use_dynamic_bsz=False"], None),
        ([f"{ROLLOUT}.log_prob_use_dynamic_bsz=False"], "log_prob_use_dynamic_bsz=False"),
    ],
)
def test_the_longest_sequence_fits_the_tokens_of_a_gpu(overrides, named):
    cfg = composed(*overrides)
    from Policy_Optimization.verl_config import check_token_budgets

    if named is None:
        check_token_budgets(cfg)
    else:
        with pytest.raises(UserError, match=named):
            check_token_budgets(cfg)


def test_lora_is_checked_on_a_machine_without_vllm(inputs, capsys):
    needs_verl()
    dry_run(inputs, "--", "actor_rollout_ref.model.lora_rank=32")
    assert "all checks passed" in capsys.readouterr().out


def test_missing_flash_attention_is_named_unless_not_needed():
    import importlib.util

    cfg = composed()
    from Policy_Optimization.verl_config import missing_for_training

    here = any(importlib.util.find_spec(name) for name in ("flash_attn", "kernels"))
    assert ("flash-attn" in missing_for_training(cfg)) != here
    assert "flash-attn" not in missing_for_training(composed("trainer.device=cpu"))
    other = composed("+actor_rollout_ref.model.override_config.attn_implementation=sdpa")
    assert "flash-attn" not in missing_for_training(other)


# a checkpoint of other GPUs


def test_a_checkpoint_of_eight_gpus_is_not_continued_on_four(inputs, tmp_path):
    checkpoint(tmp_path, 5)
    actor = tmp_path / "checkpoints" / "global_step_5" / "actor"
    for rank in range(8):
        (actor / f"model_world_size_8_rank_{rank}.pt").write_bytes(b"")

    def gpus(n_gpus_per_node, nnodes=1):
        return types.SimpleNamespace(trainer=types.SimpleNamespace(n_gpus_per_node=n_gpus_per_node, nnodes=nnodes))

    run_folder.check_same_gpus(tmp_path, gpus(8))
    run_folder.check_same_gpus(tmp_path, gpus(4, nnodes=2))
    with pytest.raises(UserError, match="global_step_5/actor: this checkpoint is in 8 parts.*continued on 4; .*merge"):
        run_folder.check_same_gpus(tmp_path, gpus(4))
    needs_verl()
    (tmp_path / "run.json").write_text(json.dumps({"attempts": 1, "overrides": [], "wandb_run_id": "x"}))
    with pytest.raises(UserError, match="8 parts.*cannot be continued on 1"):
        dry_run(inputs, "--allow_changes", run_dir=tmp_path)


# prompts, as prepare_parquet.py writes them and the launcher and VERL read them


def test_an_empty_system_message_is_written_and_taken(tmp_path):
    system = {"role": "system", "content": ""}
    rows = [{"prompt": [system, {"role": "user", "content": f"{n}?"}], "ground_truth": n} for n in (1, 2)]
    train, _ = prepare(tmp_path, "jsonl", write_jsonl(tmp_path / "a.jsonl", rows), None, "--val_size", "1")
    assert train[0]["prompt"][0] == {"role": "system", "content": ""}
    checks.check_rows(train, tmp_path / "train.parquet", "train_files", {})
    with pytest.raises(UserError, match="row 1: the prompt is empty.*prepare_parquet"):
        checks.check_rows([{**train[0], "prompt": [{"role": "user", "content": ""}]}], "x.parquet", "train_files", {})


def test_verl_renders_tool_calls_as_the_evaluation_does(inputs, tmp_path):
    needs_verl()
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    template = USES_TOOLS.replace("m.reasoning_content is defined", "m.reasoning_content")
    model = with_template(inputs, template.replace("'tool_call_id' in m", "m.tool_call_id"), tmp_path)
    prompts = [CALLED, [*CALLED, *CALLED[:1]], CALLED[:1]]
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": each, "ground_truth": n} for n, each in enumerate(prompts)])
    with pytest.raises(UserError, match="a.jsonl, line 1: has messages with more than role and content: pass --model"):
        prepare(tmp_path, "jsonl", source, source)
    kwargs = {"enable_thinking": False}
    prepare(tmp_path, "jsonl", source, source, "--model", str(model), "--chat_template_kwargs", json.dumps(kwargs))
    from Gradient_evaluation.chat_template import Chat
    from Gradient_evaluation.models import load_tokenizer

    tokenizer = load_tokenizer(str(model), None)
    config = {"max_prompt_length": 512, "filter_overlong_prompts": True, "apply_chat_template_kwargs": kwargs}
    config = OmegaConf.create({**config, "cache_dir": str(tmp_path)})
    data = RLHFDataset(data_files=str(tmp_path / "out" / "train.parquet"), tokenizer=tokenizer, config=config)
    assert len(data) == 3
    for source_row, row in zip(load_dataset_rows(str(source), "train"), (data[index] for index in range(3))):
        verl = tokenizer.apply_chat_template(list(row["raw_prompt"]), add_generation_prompt=True, tokenize=True, **kwargs)
        assert verl["input_ids"] == format_prompt(tokenizer, source_row.prompt, chat=Chat(kwargs))
    checks.check_rows(read(tmp_path / "out" / "train.parquet"), "train.parquet", "train_files", {})


def test_messages_that_verl_would_render_otherwise_are_refused(inputs, tmp_path):
    """USES_TOOLS asks whether a message *has* a tool_call_id, and in VERL every message has one, null or not."""
    model = with_template(inputs, USES_TOOLS, tmp_path)
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": CALLED, "ground_truth": 5}])
    with pytest.raises(UserError, match="a.jsonl, line 1: VERL gives every message the fields of all"):
        prepare(tmp_path, "jsonl", source, source, "--model", str(model))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tools": [TOOL]}, "the row has tools, and VERL 0.9.1 never reads them"),
        ({"tools": json.dumps([TOOL])}, "the row has tools"),
        ({"prompt": [*CALLED[:1], {"role": "assistant", "content": "The sum"}]}, "ends with a message of the assistant"),
    ],
)
def test_what_verl_cannot_carry_is_not_written_and_not_read(tmp_path, change, message):
    row = {"prompt": CALLED[:1], "ground_truth": 5, **change}
    source = write_jsonl(tmp_path / "a.jsonl", [row])
    with pytest.raises(UserError, match=f"a.jsonl, line 1: .*{message}"):
        prepare(tmp_path, "jsonl", source, source)
    known = {"data_source": "custom", "reward_model": {"ground_truth": "5"}, "extra_info": {"reward": "integer"}, **row}
    with pytest.raises(UserError, match=f"row 1: .*{message}"):
        checks.check_rows([known], "x.parquet", "train_files", {})


def test_template_variables_are_counted_unread_ones_refused(inputs, tmp_path, capsys):
    model = with_template(inputs, USES_TOOLS, tmp_path)
    source = write_jsonl(tmp_path / "a.jsonl", [{"prompt": CALLED[:1], "ground_truth": 5}])
    with pytest.raises(UserError, match="--chat_template_kwargs: pass --model"):
        prepare(tmp_path, "jsonl", source, source, "--chat_template_kwargs", '{"enable_thinking": false}')
    flags = ["--model", str(model), "--max_prompt_length", "22"]  # "[user]2+3?\\n[assistant]" in bytes
    prepare(tmp_path, "jsonl", source, source, *flags)
    with pytest.raises(UserError, match="longer than 22 tokens"):
        prepare(tmp_path, "jsonl", source, source, *flags, "--chat_template_kwargs", '{"enable_thinking": false}')
    with pytest.raises(UserError, match="does not read enable_thought"):
        prepare(tmp_path, "jsonl", source, source, *flags, "--chat_template_kwargs", '{"enable_thought": false}')


def test_variables_reach_verl_as_they_were_given():
    needs_verl()
    from omegaconf import OmegaConf

    from Policy_Optimization.verl_config import compose

    given = {"enable_thinking": False, "date_string": "26 Jul 2024", "level": 3, "share": 0.5, "none": None, "text": "true"}
    given |= {"nested": {"a": [1, "x, y", {"b": "it's"}], "c": ""}}
    settings = read_settings(["--chat_template_kwargs", json.dumps(given)], {})
    cfg = compose(verl_overrides(settings))
    assert OmegaConf.to_container(cfg.data.apply_chat_template_kwargs) == given
    with pytest.raises(UserError, match="'a b' is no name"):
        verl_overrides(read_settings([], {"CHAT_TEMPLATE_KWARGS": '{"a b": 1}'}))


def test_a_training_keeps_the_date_it_began_with(inputs, tmp_path, on_day, capsys):
    needs_verl()
    model = with_template(inputs, LLAMA_3, tmp_path)

    def pinned(previous, *flags):
        settings = read_settings(["--model", str(model), *flags], {})
        settings, notes = launch.pin_date(settings, previous)
        return settings.chat_template_kwargs, notes, verl_overrides(settings)

    on_day(0)
    kwargs, (note,), overrides = pinned({})
    assert kwargs["date_string"] in note
    on_day(1)
    assert pinned({})[0] != kwargs
    assert pinned({"overrides": overrides})[0] == kwargs
    given = {"date_string": "26 Jul 2024"}
    assert pinned({}, "--chat_template_kwargs", json.dumps(given))[:2] == (given, [])
    (model / "chat_template.jinja").write_text(DATED)  # reads the clock alone, and VERL passes no clock on
    dry_run(inputs, model=model)
    assert "VERL's prompts change from day to day" in capsys.readouterr().out
