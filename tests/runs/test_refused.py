"""Nothing silently wrong: models, tables, Gram files and disks that a run must refuse, and what it then leaves alone."""

import json
import pickle
import shutil
import subprocess

import numpy as np
import pytest
import torch
from scripts import RESULTS, call, detailed_rows, one_line_error, oracle, read, rows_of, tracecov, tracecov_flags
from tiny_models import enumerable_policy, tiny_tokenizer

from Gradient_evaluation import run_tracecov
from Gradient_evaluation.runs.inputs import prompts
from Gradient_evaluation.runs.machine import gram_store

# ------------------------------------------------------------------------------------------------ another model


def changed(policy, tmp_path, **config):
    folder = shutil.copytree(policy, tmp_path / "other" / "four tokens", dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**read(folder / "config.json"), **config}))
    return folder


def test_what_the_blocks_come_from_is_said_in_flags(policy, table, tmp_path, capsys):
    flags, grams = ("--K_list", 4, 8, "--M", 2, "--T", 2), tmp_path / "grams"
    assert tracecov(policy, table, tmp_path, *flags)[0] == 0
    for changed_flags, then, now in (
        (("--K_list", 8, 2, "--M", 2, "--block_size", 5), "no --block_size", "--block_size 5"),
        (("--K_list", 4, 16, "--M", 2, "--block_size", 5), "--K_list 4 8 no --block_size", "--K_list 4 16 --block_size 5"),
        ((*flags, "--estimators", "dapo"), "no --estimators", "--estimators dapo"),
    ):
        outcome = tracecov(policy, table, tmp_path, *changed_flags, "--T", 2, capsys=capsys)
        one_line_error(outcome, f"made with {then}, this run has {now};", "--overwrite")
        assert "keep 8" not in outcome[2]
    path = grams / "run.json"
    path.write_text(json.dumps({name: value for name, value in read(path).items() if name != "flags"}))  # an older one
    one_line_error(
        tracecov(policy, table, tmp_path, *flags, "--block_size", 5, capsys=capsys),
        "largest_block = 8, this run has 5 (from --K_list, --block_size)",
    )


def test_sketches_of_further_estimators_keep_the_largest_group_size(policy, table, tmp_path, capsys):
    flags, grams = ("--M", 1, "--T", 2, "--estimators", "dapo"), tmp_path / "grams"
    assert tracecov(policy, table, tmp_path, "--K_list", 4, 8, *flags)[0] == 0
    outcome = tracecov(policy, table, tmp_path, "--K_list", 4, 16, *flags, capsys=capsys)
    way_out = f"keep 8 as the largest of --K_list, or compute other group sizes from these Grams with --from_grams {grams};"
    one_line_error(outcome, "made with --K_list 4 8, this run has --K_list 4 16", way_out)


def test_results_that_are_replaced_by_fewer_are_named(policy, table, tmp_path, capsys):
    whole = ("--K_list", 2, 4, 8, "--M", 2, "--estimators", "dr_grpo")
    assert tracecov(policy, table, tmp_path, *whole, capsys=capsys)[2].count("note: ") == 0
    before = (tmp_path / RESULTS).read_bytes()
    code, _, err = tracecov(policy, table, tmp_path, "--K_list", 8, "--M", 2, "--T", 3, capsys=capsys)
    assert (
        code == 0
        and f"note: {tmp_path / RESULTS} is replaced: before, it had 5 prompts, where these have 3 and K = 2, 4 "
        "and the estimators dr_grpo."
        in err
    )
    assert read(tmp_path / RESULTS)["n_prompts"] == 3
    code, _, err = tracecov(policy, table, tmp_path, *whole, capsys=capsys)
    assert code == 0 and "note" not in err
    again = read(tmp_path / RESULTS)
    assert {**json.loads(before), "seconds": 0} == {**again, "seconds": 0}
    assert "note" not in tracecov(policy, table, tmp_path, "--K_list", 8, "--M", 2, "--T", 3, "--overwrite", capsys=capsys)[2]


def test_messages_in_any_form_are_continued(policy, tmp_path):
    data = tmp_path / "data.jsonl"
    forms = ([{"role": "user", "content": "13", "name": None}], [{"role": "user", "content": [{"type": "text", "text": "2"}]}])
    data.write_text("".join(json.dumps({"prompt": p, "ground_truth": 1}) + "\n" for p in forms))
    out = tmp_path / "out"
    assert oracle(policy, data, out)[0] == 0
    (path,) = out.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole.splitlines(keepends=True)[0])
    assert oracle(policy, data, out)[0] == 0 and path.read_bytes() == whole


@pytest.mark.parametrize("kind", ["lacks", "has another shape for"])
def test_a_checkpoint_that_lacks_weights_is_refused(policy, problems, tmp_path, capsys, kind):
    config = {"n_layer": 2} if kind == "lacks" else {"n_positions": 32}
    one_line_error(oracle(changed(policy, tmp_path, **config), problems, tmp_path / "a", capsys=capsys), "--model", kind)
    assert not list((tmp_path / "a").glob("*.jsonl"))


def test_encoder_decoders_and_bidirectional_models_are_refused(policy, problems, tmp_path, capsys):
    from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertForMaskedLM

    small = dict(vocab_size=8, max_position_embeddings=64)
    bart = BartConfig(
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=0,
        **small,
    )
    bert = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, **small)
    for name, model, reason in (
        ("bart", BartForConditionalGeneration(bart), "encoder-decoder"),
        ("bert", BertForMaskedLM(bert), "not a causal language model"),
    ):
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer(("<eos>", "1", "2", "3")).save_pretrained(tmp_path / name)
        one_line = oracle(tmp_path / name, problems, tmp_path / "a", capsys=capsys)
        assert one_line[0] == 2 and reason in one_line[2].splitlines()[-1], one_line


def test_another_template_or_config_is_not_mixed_in(policy, problems, table, tmp_path, capsys):
    lines = table.read_bytes().splitlines(keepends=True)
    template = changed(policy, tmp_path)
    (template / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] * 2 }}{% endfor %}")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / table.name).write_bytes(b"".join(lines[:3]))
    one_line_error(oracle(template, problems, tmp_path / "a", capsys=capsys), "prompt_format")
    one_line_error(tracecov(template, table, tmp_path / "t", "--K_list", 4, "--M", 1, capsys=capsys), "prompt_format")
    (template / "chat_template.jinja").unlink()
    one_line_error(
        oracle(changed(policy, tmp_path, activation_function="relu"), problems, tmp_path / "b", capsys=capsys), "other weights"
    )


def test_a_model_without_its_own_tokenizer_is_refused(policy, problems, tmp_path, capsys):
    folder = changed(policy, tmp_path)
    tiny_tokenizer(("<eos>", "7", "8", "9", "0", "1", "2", "3")).save_pretrained(folder)
    one_line_error(oracle(folder, problems, tmp_path / "a", capsys=capsys), "line 1", "do not belong together")
    (folder / "tokenizer.json").unlink()
    one_line_error(oracle(folder, problems, tmp_path / "a", capsys=capsys), "no tokenizer file")


@pytest.mark.parametrize(
    "name, data", [("tokenizer.json", "{}"), ("config.json", "[]"), ("config.json", "{"), ("model.safetensors", "short")]
)
def test_a_damaged_model_is_one_line(policy, problems, tmp_path, capsys, name, data):
    folder = changed(policy, tmp_path)
    (folder / name).write_text(data)
    one_line_error(oracle(folder, problems, tmp_path / "a", "--overwrite", capsys=capsys), "--model")


def test_overwrite_removes_nothing_before_the_model_loads(policy, problems, table, tmp_path, capsys):
    folder = changed(policy, tmp_path)
    (folder / "model.safetensors").write_bytes(b"short")
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(table, out)
    one_line_error(oracle(folder, problems, out, "--overwrite", capsys=capsys), "--model")
    assert (out / table.name).read_bytes() == table.read_bytes()


@pytest.mark.parametrize("change", [{"V_oracle": "high"}, {"V_oracle": None}, {"V_oracle": 0.99}, {"prompt": None}])
def test_a_row_of_the_own_table_that_was_damaged_is_named(policy, problems, table, tmp_path, capsys, change):
    rows = rows_of(table)
    rows[1] |= change
    (tmp_path / table.name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    one_line_error(oracle(policy, problems, tmp_path, capsys=capsys), "line 2")


def test_a_gram_file_of_another_prompt_is_refused(policy, table, undisturbed, tmp_path, capsys):
    out = shutil.copytree(undisturbed, tmp_path / "copy")
    first, second = sorted((out / "grams").glob("[0-9a-f]*.npz"))[:2]
    shutil.copy(first, second)
    (out / RESULTS).unlink()
    one_line_error(call(run_tracecov, *tracecov_flags(policy, table, out)[1:], capsys=capsys), second.name)


# ------------------------------------------------------------------------------------------------ bad input


def test_long_prompts_are_skipped_and_counted_by_flag(policy, table, tmp_path, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": p, "ground_truth": 1}) + "\n" for p in ("1" * 63, "13", "2" * 62, "1" * 70)))
    code, out, _ = oracle(policy, data, tmp_path / "out", "--skip_long", capsys=capsys)
    assert code == 0 and "2 prompts, 2 left out as too long" in out
    rows = rows_of(tmp_path / "out" / table.name)
    assert [len(row["prompt"]) for row in rows] == [2, 62]
    long = tmp_path / "table.jsonl"
    long.write_text("".join(json.dumps({**rows[0], "prompt": p}) + "\n" for p in ("1" * 63, "13", "2", "3")))
    flags = ("--K_list", 4, "--M", 1, "--T", 2)
    one_line_error(tracecov(policy, long, tmp_path / "t", *flags[:-2], capsys=capsys), "line 1", "--skip_long")
    code, out, _ = tracecov(policy, long, tmp_path / "t", *flags, "--skip_long", capsys=capsys)
    assert code == 0 and "left out 1 " in out
    found = detailed_rows(tmp_path / "t" / "tracecov_four tokens_K4_detailed.json")
    assert len(found) == 2 and {row["prompt"] for row in found} <= {"13", "2", "3"}
    data.write_text(json.dumps({"prompt": "1" * 63, "ground_truth": 1}) + "\n")
    one_line_error(oracle(policy, data, tmp_path / "none", "--skip_long", capsys=capsys), "every one of the 1")


def test_all_input_is_checked_before_the_model_is_loaded(policy, problems, table, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(prompts, "load_model", None)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"prompt": "1", "ground_truth": "no number"}) + "\n")
    one_line_error(oracle(policy, bad, tmp_path / "a", capsys=capsys), "bad.jsonl, line 1", "ground_truth")
    one_line_error(tracecov(policy, bad, tmp_path / "a", capsys=capsys), "bad.jsonl, line 1")
    one_line_error(tracecov(policy, table, tmp_path / "a", "--M", 1, "--K_list", 2, capsys=capsys), "at least 4")
    assert not (tmp_path / "a").exists()


def test_code_that_comes_with_a_checkpoint_runs_by_flag_only(policy, problems, tmp_path, capsys):
    folder = shutil.copytree(policy, tmp_path / "with code")
    config = read(folder / "config.json")
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "class OwnConfig(GPT2Config):\n    model_type = 'own'\n"
        "class OwnModel(GPT2LMHeadModel):\n    config_class = OwnConfig\n"
    )
    one_line_error(oracle(folder, problems, tmp_path / "a", capsys=capsys), "--trust_remote_code")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "a").exists()
    code, _, err = oracle(folder, problems, tmp_path / "a", "--trust_remote_code", capsys=capsys)
    assert code == 0 and err.count("warning: --trust_remote_code") == 1 and (tmp_path / "ran").exists()


class Trap:
    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_pickled_weights_never_run_code(policy, problems, table, tmp_path, capsys):
    trap = Trap()
    trap.path = tmp_path / "ran"
    both = shutil.copytree(policy, tmp_path / "a" / "four tokens")
    (both / "pytorch_model.bin").write_bytes(pickle.dumps(trap))
    code, _, err = oracle(both, problems, tmp_path / "out", capsys=capsys)
    assert code == 0 and "warning" not in err
    digest = [{**row, "weights_digest": 0} for row in rows_of(tmp_path / "out" / table.name)]
    assert digest == [{**row, "weights_digest": 0} for row in rows_of(table)]
    alone = shutil.copytree(both, tmp_path / "b" / "four tokens")
    (alone / "model.safetensors").unlink()
    code, _, err = oracle(alone, problems, tmp_path / "none", capsys=capsys)
    assert code == 2 and "Traceback" not in err and err.splitlines()[-1].startswith("error: --model")
    torch.save(enumerable_policy(vocabulary=4, seed=6).state_dict(), alone / "pytorch_model.bin")
    code, _, err = oracle(alone, problems, tmp_path / "pickled", capsys=capsys)
    assert code == 0 and err.count("warning") == 1 and "pickled" in err
    assert not trap.path.exists()


def test_a_full_disk_is_one_line_and_what_was_done_is_kept(policy, problems, table, small_disk, tmp_path_factory, capsys):
    long = tmp_path_factory.mktemp("long") / "long.jsonl"  # rows of about a page, so that the disk fills half way
    long.write_text("".join(json.dumps({**row, "note": "x" * 3500}) + "\n" for row in rows_of(problems)))
    path, ballast = small_disk / table.name, small_disk / "ballast"
    ballast.write_bytes(b"x" * (64 - 4 * 4) * 1024)
    one_line_error(oracle(policy, long, small_disk, capsys=capsys), table.name, "cannot write it")
    assert 1 <= len(rows_of(path)) < 5 and path.read_bytes().endswith(b"\n")
    ballast.unlink()
    assert oracle(policy, long, small_disk)[0] == 0
    assert [row["V_oracle"] for row in rows_of(path)] == [row["V_oracle"] for row in rows_of(table)]
    path.unlink()
    ballast.write_bytes(b"x" * (64 - 9 * 4) * 1024)
    flags = tracecov_flags(policy, table, small_disk)[1:]
    one_line_error(call(run_tracecov, *flags, capsys=capsys), "cannot write it")
    kept = list((small_disk / "grams").glob("[0-9a-f]*.npz"))
    assert kept and all(gram_store.load(path) for path in kept) and not (small_disk / RESULTS).exists()
    ballast.unlink()
    capsys.readouterr()
    one_line_error(call(run_tracecov, *flags, capsys=capsys), "cannot write it")  # 64 KiB do not hold all the results


def test_a_read_only_folder_is_one_line_before_any_work(policy, problems, table, small_disk, capsys):
    if subprocess.run(["mount", "-o", "remount,ro", small_disk], capture_output=True).returncode:
        pytest.skip("cannot make a mount read-only here")
    one_line_error(oracle(policy, problems, small_disk, capsys=capsys), "cannot be written to")
    one_line_error(tracecov(policy, table, small_disk, capsys=capsys), "cannot be written to")
    one_line_error(oracle(policy, problems, small_disk / "new", capsys=capsys), "cannot create this folder")


def test_a_folder_that_cannot_be_made_is_one_line(policy, problems, table, tmp_path, capsys):
    (tmp_path / "file").touch()
    one_line_error(oracle(policy, problems, tmp_path / "file" / "out", capsys=capsys), "cannot create this folder")
    one_line_error(tracecov(policy, table, tmp_path / "file" / "out", capsys=capsys), "cannot create this folder")


def test_a_damaged_gram_file_is_named_and_never_averaged_in(policy, table, undisturbed, tmp_path, capsys):
    out = shutil.copytree(undisturbed, tmp_path / "copy")
    (out / RESULTS).unlink()
    path = sorted((out / "grams").glob("[0-9a-f]*.npz"))[2]
    whole = path.read_bytes()
    damaged = [whole[:cut] for cut in range(0, len(whole), len(whole) // 30)]
    damaged += [whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :] for at in range(0, len(whole), len(whole) // 30)]
    refused = 0
    for data in damaged:
        path.write_bytes(data)
        code, _, err = call(run_tracecov, *tracecov_flags(policy, table, out)[1:], capsys=capsys)
        if code:  # some bytes of an archive are padding or dates
            one_line_error((code, "", err), path.name)
            refused += 1
    assert refused > 45
    path.write_bytes(whole)
    arrays = dict(np.load(path))
    arrays["grams"][3] = np.nan
    np.savez(path, **arrays)
    outcome = call(run_tracecov, "--from_grams", out / "grams", "--K_list", 4, "--save_json", tmp_path / "b", capsys=capsys)
    one_line_error(outcome, path.name)
    assert not (tmp_path / "b" / RESULTS).exists()
