"""Nothing lost: runs that are stopped, repeated, doubled, starved of disk or memory, or shared by several processes."""

import contextlib
import fcntl
import json
import os
import pickle
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time

import numpy as np
import pytest
import torch
from test_scripts import FLAGS, ROOT, call, one_line_error, oracle, policy, problems, read, rows_of, table, tracecov  # noqa: F401
from test_tables import small_disk  # noqa: F401
from tiny_models import enumerable_policy, tiny_tokenizer

from Gradient_evaluation import calculate_oracle_v, gram_store, run_tracecov
from Gradient_evaluation.cli import UserError
from Gradient_evaluation.memory import Batch
from Gradient_evaluation.run_files import only_writer, part_of

ORACLE, TRACECOV = (ROOT / "Gradient_evaluation" / name for name in ("calculate_oracle_v.py", "run_tracecov.py"))
RESULTS = "tracecov_four tokens.json"


def oracle_flags(policy, problems, out, *more):
    return [ORACLE, "--model", policy, "--dataset", problems, "--n_oracle", 400, "--out_dir", out, *FLAGS, *more]


def tracecov_flags(policy, table, out, *more):
    return [TRACECOV, "--model", policy, "--oracle_table", table, "--save_json", out, "--skip_plot", "--K_list", 4, 8,
            "--M", 3, *FLAGS, *more]


def start(flags, **settings):
    """One of the scripts as a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *map(str, flags)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=environment, **settings)


def ended(process, limit=300):
    out, err = process.communicate(timeout=limit)
    return process.returncode, out, err


def torchrun(flags, processes=2):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return ended(subprocess.Popen([*command, *map(str, flags)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  env={**os.environ, "OMP_NUM_THREADS": "1"}))


def wait_for(condition, process):
    deadline = time.monotonic() + 240
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.01)


def held_by(lock, process):
    try:
        return str(process.pid) in lock.read_text()
    except FileNotFoundError:
        return False


def files_of(folder):
    """{name: content} of a folder of results, without what tells the time or this command from the other."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found[str(path.relative_to(folder))] = path.read_bytes()
            if path.name == RESULTS:
                results = read(path)
                found[str(path.relative_to(folder))] = {**results, "seconds": 0, "config": {**results["config"], "save_json": 0, "plot_path": 0}}
    return found


@pytest.fixture(scope="module")
def undisturbed(policy, table, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("undisturbed")
    assert call(run_tracecov, *tracecov_flags(policy, table, out)[1:])[0] == 0
    return out


# ------------------------------------------------------------------------------------------------ finished


def test_a_finished_oracle_run_says_so_without_loading_the_model(policy, problems, table, tmp_path, capsys, monkeypatch):  # noqa: F811
    shutil.copy(table, tmp_path)
    monkeypatch.setattr(calculate_oracle_v, "load_model", None)  # a call would be a TypeError
    code, out, _ = oracle(policy, problems, tmp_path, capsys=capsys)
    assert code == 0 and out.startswith("finished before") and "5 prompts" in out
    assert (tmp_path / table.name).read_bytes() == table.read_bytes() and len(list(tmp_path.iterdir())) == 1


def test_a_finished_tracecov_run_says_so_without_loading_the_model(policy, table, undisturbed, tmp_path, capsys, monkeypatch):  # noqa: F811
    out = shutil.copytree(undisturbed, tmp_path / "copy")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.rglob("*") if path.is_file()}
    flags = tracecov_flags(policy, table, out)[1:]
    monkeypatch.setattr(run_tracecov, "load_model", None)
    (out / RESULTS).unlink()
    assert call(run_tracecov, *flags)[0] == 0  # the Grams are all there: results again, without the model
    assert files_of(out) == files_of(undisturbed)
    (out / RESULTS).write_bytes((out / RESULTS).read_bytes())
    capsys.readouterr()
    code, printed, _ = call(run_tracecov, *flags, capsys=capsys)
    assert code == 0 and printed.startswith("finished before") and "MSE of the gradient estimate" in printed
    assert {path for path in out.rglob("*") if path.is_file()} == set(before)


def test_a_finished_run_of_other_weights_under_the_same_name_is_not_taken_for_this_one(policy, problems, table, undisturbed, tmp_path, capsys):  # noqa: F811
    other = tmp_path / "four tokens"
    enumerable_policy(vocabulary=4, seed=7).save_pretrained(other)
    tiny_tokenizer(("<eos>", "1", "2", "3")).save_pretrained(other)
    shutil.copy(table, tmp_path)
    one_line_error(oracle(other, problems, tmp_path, capsys=capsys), "other weights", "--overwrite")
    out = shutil.copytree(undisturbed, tmp_path / "copy")
    flags = tracecov_flags(other, table, out)[1:]
    one_line_error(call(run_tracecov, *flags, "--allow_mismatch", capsys=capsys), "model_fingerprint")


def test_oracle_values_that_changed_since_are_used(policy, table, undisturbed, tmp_path):  # noqa: F811
    changed, out = tmp_path / "changed.jsonl", shutil.copytree(undisturbed, tmp_path / "copy")
    rows = [{**row, "V_oracle": 0.5, "correct_count": 200} for row in rows_of(table)]
    changed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert call(run_tracecov, *tracecov_flags(policy, changed, out)[1:])[0] == 0
    before, after = read(undisturbed / RESULTS), read(out / RESULTS)
    assert after["conditional_on_x"]["oracleV"] != before["conditional_on_x"]["oracleV"]
    assert after["conditional_on_x"]["grpo"] == before["conditional_on_x"]["grpo"]
    assert {record.oracle_value for record in gram_store.load_all(out / "grams")} == {0.5}


def test_a_table_is_not_continued_with_another_data_set(policy, table, tmp_path, capsys):  # noqa: F811
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "2", "ground_truth": 22}) + "\n")
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(table, out)
    one_line_error(oracle(policy, other, out, capsys=capsys), "line 1", "not in --dataset")
    assert (out / table.name).read_bytes() == table.read_bytes()


def test_a_data_set_that_grew_is_continued_in_its_own_order(policy, problems, table, tmp_path):  # noqa: F811
    rows = rows_of(table)
    (tmp_path / table.name).write_text("".join(json.dumps(rows[i], ensure_ascii=False) + "\n" for i in (3, 1)))
    assert oracle(policy, problems, tmp_path)[0] == 0
    assert (tmp_path / table.name).read_bytes() == table.read_bytes()


def test_gram_files_that_do_not_say_what_made_them_are_left_alone(policy, table, tmp_path, capsys):  # noqa: F811
    (tmp_path / "grams").mkdir()
    (tmp_path / "grams" / "mine.npz").write_bytes(b"precious")
    one_line_error(tracecov(policy, table, tmp_path, "--K_list", 4, "--M", 1, capsys=capsys), "grams", "--overwrite")
    assert (tmp_path / "grams" / "mine.npz").read_bytes() == b"precious"


# ------------------------------------------------------------------------------------------------ two at once, Ctrl-C


def test_the_second_of_two_processes_is_refused_and_writes_nothing(policy, problems, table, tmp_path, capsys):  # noqa: F811
    with only_writer(tmp_path / table.name), only_writer(tmp_path / "grams"):
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        one_line_error(oracle(policy, problems, tmp_path, capsys=capsys), table.name, f"process {os.getpid()}")
        one_line_error(tracecov(policy, table, tmp_path, "--K_list", 4, "--M", 1, capsys=capsys), "grams", "is writing")
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert not list(tmp_path.iterdir())


def test_a_lock_is_free_again_once_its_process_was_killed(tmp_path):
    holder = ("import sys, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
              "from Gradient_evaluation.run_files import only_writer\n"
              "with only_writer(Path(sys.argv[2])): print('held', flush=True); time.sleep(600)")
    process = subprocess.Popen([sys.executable, "-c", holder, ROOT, tmp_path / "out"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"process {process.pid} on "), only_writer(tmp_path / "out"):
        pass
    process.kill()
    process.wait()
    process.stdout.close()
    assert (tmp_path / ".out.lock").exists()
    with only_writer(tmp_path / "out"):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", ["oracle", "tracecov"])
def test_ctrl_c_says_what_is_saved_and_the_same_command_goes_on(policy, problems, table, undisturbed, tmp_path, script):  # noqa: F811
    flags, made = {"oracle": (oracle_flags(policy, problems, tmp_path), lambda: (tmp_path / table.name).exists()),
                   "tracecov": (tracecov_flags(policy, table, tmp_path),
                                lambda: list((tmp_path / "grams").glob("[0-9a-f]*.npz")))}[script]
    process = start(flags)
    wait_for(made, process)
    process.send_signal(signal.SIGINT)
    code, _, err = ended(process)
    assert code == 130 and err.count("\n") == 1 and "saved in" in err and "same command" in err
    assert ended(start(flags))[0] == 0
    if script == "oracle":
        assert (tmp_path / table.name).read_bytes() == table.read_bytes()
    else:
        assert files_of(tmp_path) == files_of(undisturbed)


# ------------------------------------------------------------------------------------------------ killed


@pytest.mark.slow
@pytest.mark.parametrize("script", ["oracle", "tracecov"])
def test_a_run_killed_at_ten_random_moments_ends_with_the_same_bytes(policy, problems, table, undisturbed, tmp_path, script):  # noqa: F811
    flags = {"oracle": oracle_flags(policy, problems, tmp_path), "tracecov": tracecov_flags(policy, table, tmp_path)}[script]
    lock = tmp_path / f".{table.name if script == 'oracle' else 'grams'}.lock"
    generator, kills, lasts = np.random.default_rng(0), 0, 5.0
    while kills < 10:
        process = start(flags)
        while process.poll() is None and not held_by(lock, process):  # until imports are done and work begins
            time.sleep(0.01)
        began = time.monotonic()
        try:
            process.wait(timeout=lasts * generator.random())
        except subprocess.TimeoutExpired:
            process.kill()
        code = ended(process)[0]
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        if code == 0:  # it came through: undo a part, so that there is something left to be killed in
            lasts = max(1.0, time.monotonic() - began)
            for path in sorted((tmp_path / "grams").glob("[0-9a-f]*.npz"))[1:]:
                path.unlink()
            if script == "oracle":
                lines = (tmp_path / table.name).read_bytes().splitlines(keepends=True)
                (tmp_path / table.name).write_bytes(lines[0] + lines[1][:20])
    assert ended(start(flags))[0] == 0
    if script == "oracle":
        assert (tmp_path / table.name).read_bytes() == table.read_bytes()
    else:
        assert files_of(tmp_path) == files_of(undisturbed)


# ------------------------------------------------------------------------------------------------ several processes


def test_two_processes_leave_what_one_leaves(policy, problems, table, undisturbed, tmp_path):  # noqa: F811
    code, out, err = torchrun(oracle_flags(policy, problems, tmp_path / "oracle"))
    assert code == 0 and out.count("mean V") == 1, err
    assert (tmp_path / "oracle" / table.name).read_bytes() == table.read_bytes()
    assert [path.name for path in (tmp_path / "oracle").iterdir()] == [table.name]
    code, out, err = torchrun(tracecov_flags(policy, table, tmp_path / "tracecov"))
    assert code == 0 and out.count("MSE of the gradient estimate") == 1, err
    assert files_of(tmp_path / "tracecov") == files_of(undisturbed)


def test_what_several_processes_left_is_continued_by_any_number(policy, problems, table, tmp_path):  # noqa: F811
    lines = table.read_bytes().splitlines(keepends=True)
    path = tmp_path / table.name
    path.write_bytes(lines[1])
    part_of(path, 0).write_bytes(lines[4] + lines[1])  # one row both in the table and in a part: killed while merging
    part_of(path, 3).write_bytes(lines[0] + lines[2][:30])
    assert oracle(policy, problems, tmp_path)[0] == 0
    assert path.read_bytes() == table.read_bytes() and [file.name for file in tmp_path.iterdir()] == [table.name]


def test_bad_input_under_torchrun_is_said_once(policy, tmp_path):  # noqa: F811
    code, _, err = torchrun(oracle_flags(policy, tmp_path / "missing.jsonl", tmp_path / "out"))
    assert code != 0 and err.count("error: ") == 1 and "missing.jsonl" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_process_that_fails_fails_the_job_by_name_and_the_rest_is_kept(policy, table, tmp_path):  # noqa: F811
    """A prompt whose token has a weight that is not finite: whoever meets it ends the job, and mending it continues."""
    broken = tmp_path / "four tokens"
    shutil.copytree(policy, broken)
    model = enumerable_policy(vocabulary=4, seed=6)
    with torch.no_grad():
        model.transformer.wpe.weight[5] = torch.nan  # the sixth position, which only the long prompt reaches
    model.save_pretrained(broken)
    data = tmp_path / "long.jsonl"
    data.write_text("".join(json.dumps({"prompt": p, "ground_truth": 1}) + "\n" for p in ("1", "2", "13", "123123", "3")))
    code, _, err = torchrun(oracle_flags(broken, data, tmp_path / "out"))
    assert code != 0 and "line 4" in err and "not finite" in err
    kept = list((tmp_path / "out").glob(".*rank*")) + list((tmp_path / "out").glob("*.jsonl"))
    assert kept and all(json.loads(line)["prompt"] != "123123" for path in kept for line in path.read_text().splitlines())


# ------------------------------------------------------------------------------------------------ progress


@pytest.mark.parametrize("script", ["oracle", "tracecov"])
def test_progress_is_shown_on_a_terminal_alone(policy, problems, table, tmp_path, script):  # noqa: F811
    flags = {"oracle": oracle_flags(policy, problems, tmp_path), "tracecov": tracecov_flags(policy, table, tmp_path)}[script]
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("4H", 24, 160, 0, 0))
    process = subprocess.Popen([sys.executable, *map(str, flags)], stdout=subprocess.PIPE, stderr=inside,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    os.close(inside)
    shown = b""
    with contextlib.suppress(OSError):  # the terminal is gone once its last writer is
        while data := os.read(terminal, 4096):
            shown += data
    os.close(terminal)
    assert process.wait() == 0 and process.stdout.read()
    process.stdout.close()
    mean = "mean V" if script == "oracle" else "mean reward"
    assert re.search(rf"/5 \[.*<.*, [\d,]+ continuations/s, {mean} [\d.]+\]", shown.decode()), shown
    assert ended(start([*flags, "--overwrite"]))[2] == ""


# ------------------------------------------------------------------------------------------------ memory


def out_of_memory(size):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(),
                                   RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")])
def test_a_batch_halves_until_it_fits_says_so_and_stays(error, capsys):
    tried = []

    def work(size):
        tried.append(size)
        if size > 20:
            raise error
        return size

    batch = Batch("--gen_bs", 100, least=1)
    assert batch.run(work, "line 3") == 12 and batch.run(work, "line 4") == 12
    assert tried == [100, 50, 25, 12, 12]
    assert capsys.readouterr().err == "note: line 3: out of memory with 100 continuations at a time (--gen_bs); going on with 12\n"
    with pytest.raises(UserError, match="line 5: out of memory with 4 continuations"):
        Batch("--block_size", 8, least=4).run(out_of_memory, "line 5")
    with pytest.raises(RuntimeError, match="size of tensor"):
        batch.run(lambda size: torch.zeros(2) + torch.zeros(3), "line 6")


def test_with_less_memory_blocks_and_batches_shrink_and_the_results_say_so(policy, table, undisturbed, tmp_path, monkeypatch, capsys):  # noqa: F811
    """A model that takes no more than five sequences at a time, as if on a small GPU."""
    def load(*args):
        model = enumerable_policy(vocabulary=4, seed=6).to(torch.float64)
        model.register_forward_pre_hook(lambda module, args, kwargs: out_of_memory(0) if len(kwargs["input_ids"]) > 5 else None,
                                        with_kwargs=True)
        return model

    monkeypatch.setattr(run_tracecov, "load_model", load)
    code, _, err = call(run_tracecov, *tracecov_flags(policy, table, tmp_path)[1:], capsys=capsys)
    assert code == 0 and "--gen_bs" in err and "--block_size" in err
    results = read(tmp_path / RESULTS)
    assert results["batches"] == {"gen_bs": 4, "blocks_by_size": {"4": 30}}
    assert read(undisturbed / RESULTS)["batches"] == {"gen_bs": 64, "blocks_by_size": {"8": 15}}
    for small, whole in zip(gram_store.load_all(tmp_path / "grams"), gram_store.load_all(undisturbed / "grams")):
        assert (small.rewards == whole.rewards).all()
        np.testing.assert_allclose(small.log_probs, whole.log_probs, rtol=1e-9)


def test_gradient_checkpointing_changes_no_number_and_may_be_switched_when_continuing(policy, table, undisturbed, tmp_path):  # noqa: F811
    out = shutil.copytree(undisturbed, tmp_path / "copy")
    redone = sorted((out / "grams").glob("[0-9a-f]*.npz"))[:2]
    for path in redone:
        path.unlink()
    assert call(run_tracecov, *tracecov_flags(policy, table, out)[1:], "--gradient_checkpointing")[0] == 0
    for path in redone:
        again, before = gram_store.load(path), gram_store.load(undisturbed / "grams" / path.name)
        np.testing.assert_allclose(again.grams, before.grams, rtol=1e-12)


def test_max_memory_makes_the_real_allocator_refuse_and_the_run_go_on(tmp_path):
    """A vocabulary of 50,000 and 4,096 continuations at a time: over 1.5 GiB of logits and their exponentials."""
    folder = tmp_path / "wide"
    words = ("<eos>", *(str(i) for i in range(1, 50_000)))
    enumerable_policy(vocabulary=len(words)).float().save_pretrained(folder)
    tiny_tokenizer(words).save_pretrained(folder)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "1", "ground_truth": 1}) + "\n")
    flags = [ORACLE, "--model", folder, "--dataset", data, "--n_oracle", 4096, "--batch_size", 4096, "--max_new_tokens", 1,
             "--device", "cpu", "--top_p", 1.0]
    code, _, err = ended(start([*flags, "--out_dir", tmp_path / "a", "--max_memory", 0.01]))
    assert code == 2 and "--max_memory 0.01" in err and err.count("\n") == 1
    allowed = float(re.search(r"already takes ([\d.]+) GiB", err)[1]) + 0.5
    code, _, err = ended(start([*flags, "--out_dir", tmp_path / "a", "--max_memory", allowed]))
    assert code == 0 and "going on with" in err, err
    assert ended(start([*flags[:-2], "--top_p", 1.0, "--batch_size", 128, "--out_dir", tmp_path / "b"]))[0] == 0
    capped, free = (rows_of(tmp_path / out / "oracle_v_n4096_wide.jsonl") for out in "ab")
    assert capped == free


def test_a_memory_limit_ends_with_the_measuring(policy, table, tmp_path):  # noqa: F811
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert call(run_tracecov, *tracecov_flags(policy, table, tmp_path)[1:], "--max_memory", 20)[0] == 0
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


# ------------------------------------------------------------------------------------------------ another model


def changed(policy, tmp_path, **config):  # noqa: F811
    folder = shutil.copytree(policy, tmp_path / "other" / "four tokens", dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**read(folder / "config.json"), **config}))
    return folder


def test_messages_in_any_form_are_continued(policy, tmp_path):  # noqa: F811
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
def test_a_checkpoint_that_lacks_weights_is_refused(policy, problems, tmp_path, capsys, kind):  # noqa: F811
    config = {"n_layer": 2} if kind == "lacks" else {"n_positions": 32}
    one_line_error(oracle(changed(policy, tmp_path, **config), problems, tmp_path / "a", capsys=capsys), "--model", kind)
    assert not list((tmp_path / "a").glob("*.jsonl"))


def test_encoder_decoders_and_bidirectional_models_are_refused(policy, problems, tmp_path, capsys):  # noqa: F811
    from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertForMaskedLM

    small = dict(vocab_size=8, max_position_embeddings=64)
    bart = BartConfig(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
                      encoder_ffn_dim=16, decoder_ffn_dim=16, pad_token_id=0, bos_token_id=1, eos_token_id=0, **small)
    bert = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, **small)
    for name, model, reason in (("bart", BartForConditionalGeneration(bart), "encoder-decoder"),
                                ("bert", BertForMaskedLM(bert), "not a causal language model")):
        model.save_pretrained(tmp_path / name)
        tiny_tokenizer(("<eos>", "1", "2", "3")).save_pretrained(tmp_path / name)
        one_line = oracle(tmp_path / name, problems, tmp_path / "a", capsys=capsys)
        assert one_line[0] == 2 and reason in one_line[2].splitlines()[-1], one_line


def test_another_template_or_config_is_not_mixed_in(policy, problems, table, tmp_path, capsys):  # noqa: F811
    lines = table.read_bytes().splitlines(keepends=True)
    template = changed(policy, tmp_path)
    (template / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] * 2 }}{% endfor %}")
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / table.name).write_bytes(b"".join(lines[:3]))
    one_line_error(oracle(template, problems, tmp_path / "a", capsys=capsys), "prompt_format")
    one_line_error(tracecov(template, table, tmp_path / "t", "--K_list", 4, "--M", 1, capsys=capsys), "prompt_format")
    (template / "chat_template.jinja").unlink()
    one_line_error(oracle(changed(policy, tmp_path, activation_function="relu"), problems, tmp_path / "b", capsys=capsys),
                   "other weights")


def test_a_model_without_its_tokenizer_or_with_anothers_is_refused(policy, problems, tmp_path, capsys):  # noqa: F811
    folder = changed(policy, tmp_path)
    tiny_tokenizer(("<eos>", "7", "8", "9", "0", "1", "2", "3")).save_pretrained(folder)
    one_line_error(oracle(folder, problems, tmp_path / "a", capsys=capsys), "line 1", "do not belong together")
    (folder / "tokenizer.json").unlink()
    one_line_error(oracle(folder, problems, tmp_path / "a", capsys=capsys), "no tokenizer file")


@pytest.mark.parametrize("name, data", [("tokenizer.json", "{}"), ("config.json", "[]"), ("config.json", "{"),
                                        ("model.safetensors", "short")])
def test_a_damaged_model_is_one_line(policy, problems, tmp_path, capsys, name, data):  # noqa: F811
    folder = changed(policy, tmp_path)
    (folder / name).write_text(data)
    one_line_error(oracle(folder, problems, tmp_path / "a", "--overwrite", capsys=capsys), "--model")


def test_overwrite_removes_nothing_before_the_model_is_known_to_load(policy, problems, table, tmp_path, capsys):  # noqa: F811
    folder = changed(policy, tmp_path)
    (folder / "model.safetensors").write_bytes(b"short")
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(table, out)
    one_line_error(oracle(folder, problems, out, "--overwrite", capsys=capsys), "--model")
    assert (out / table.name).read_bytes() == table.read_bytes()


@pytest.mark.parametrize("change", [{"V_oracle": "high"}, {"V_oracle": None}, {"V_oracle": 0.99}, {"prompt": None}])
def test_a_row_of_the_own_table_that_was_damaged_is_named(policy, problems, table, tmp_path, capsys, change):  # noqa: F811
    rows = rows_of(table)
    rows[1] |= change
    (tmp_path / table.name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    one_line_error(oracle(policy, problems, tmp_path, capsys=capsys), "line 2")


def test_a_gram_file_of_another_prompt_is_refused(policy, table, undisturbed, tmp_path, capsys):  # noqa: F811
    out = shutil.copytree(undisturbed, tmp_path / "copy")
    first, second = sorted((out / "grams").glob("[0-9a-f]*.npz"))[:2]
    shutil.copy(first, second)
    (out / RESULTS).unlink()
    one_line_error(call(run_tracecov, *tracecov_flags(policy, table, out)[1:], capsys=capsys), second.name)


# ------------------------------------------------------------------------------------------------ bad input


def test_long_prompts_are_skipped_and_counted_by_flag(policy, table, tmp_path, capsys):  # noqa: F811
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": p, "ground_truth": 1}) + "\n" for p in ("1" * 63, "13", "2" * 62, "1" * 70)))
    code, out, _ = oracle(policy, data, tmp_path / "out", "--skip_long", capsys=capsys)
    assert code == 0 and "2 prompts, 2 left out as too long" in out
    rows = rows_of(tmp_path / "out" / table.name)
    assert [len(row["prompt"]) for row in rows] == [2, 62]
    long = tmp_path / "table.jsonl"
    long.write_text("".join(json.dumps({**rows[0], "prompt": p}) + "\n" for p in ("1" * 63, "13", "2", "3")))
    flags = ("--K_list", 4, "--M", 1, "--T", 2)
    one_line_error(tracecov(policy, long, tmp_path / "t", *flags, capsys=capsys), "line 1", "--skip_long")
    code, out, _ = tracecov(policy, long, tmp_path / "t", *flags, "--skip_long", capsys=capsys)
    assert code == 0 and "left out 1 " in out
    assert [row["prompt"] for row in read(tmp_path / "t" / "tracecov_four tokens_K4_detailed.json")] == ["13", "2"]
    data.write_text(json.dumps({"prompt": "1" * 63, "ground_truth": 1}) + "\n")
    one_line_error(oracle(policy, data, tmp_path / "none", "--skip_long", capsys=capsys), "every one of the 1")


def test_all_input_is_checked_before_the_model_is_loaded(policy, problems, table, tmp_path, capsys, monkeypatch):  # noqa: F811
    for script in (calculate_oracle_v, run_tracecov):
        monkeypatch.setattr(script, "load_model", None)
    bad = tmp_path / "bad.jsonl"
    bad.write_text(json.dumps({"prompt": "1", "ground_truth": "no number"}) + "\n")
    one_line_error(oracle(policy, bad, tmp_path / "a", capsys=capsys), "bad.jsonl, line 1", "ground_truth")
    one_line_error(tracecov(policy, bad, tmp_path / "a", capsys=capsys), "bad.jsonl, line 1")
    one_line_error(tracecov(policy, table, tmp_path / "a", "--M", 1, "--K_list", 2, capsys=capsys), "at least 4")
    assert not (tmp_path / "a").exists()


def test_code_that_comes_with_a_checkpoint_runs_by_flag_only(policy, problems, tmp_path, capsys):  # noqa: F811
    folder = shutil.copytree(policy, tmp_path / "with code")
    config = read(folder / "config.json")
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "from transformers import GPT2Config, GPT2LMHeadModel\n"
        "class OwnConfig(GPT2Config):\n    model_type = 'own'\n"
        "class OwnModel(GPT2LMHeadModel):\n    config_class = OwnConfig\n")
    one_line_error(oracle(folder, problems, tmp_path / "a", capsys=capsys), "--trust_remote_code")
    assert not (tmp_path / "ran").exists() and not (tmp_path / "a").exists()
    code, _, err = oracle(folder, problems, tmp_path / "a", "--trust_remote_code", capsys=capsys)
    assert code == 0 and err.count("warning: --trust_remote_code") == 1 and (tmp_path / "ran").exists()


class Trap:
    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_pickled_weights_are_never_read_beside_safetensors_and_never_run_code(policy, problems, table, tmp_path, capsys):  # noqa: F811
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


def test_a_full_disk_is_one_line_and_what_was_done_is_kept(policy, problems, table, small_disk, tmp_path_factory, capsys):  # noqa: F811
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
    ballast.write_bytes(b"x" * (64 - 7 * 4) * 1024)
    flags = tracecov_flags(policy, table, small_disk)[1:]
    one_line_error(call(run_tracecov, *flags, capsys=capsys), "cannot write it")
    kept = list((small_disk / "grams").glob("[0-9a-f]*.npz"))
    assert kept and all(gram_store.load(path) for path in kept) and not (small_disk / RESULTS).exists()
    ballast.unlink()
    capsys.readouterr()
    one_line_error(call(run_tracecov, *flags, capsys=capsys), "cannot write it")  # 64 KiB do not hold all the results


def test_a_read_only_folder_is_one_line_before_any_work(policy, problems, table, small_disk, capsys):  # noqa: F811
    if subprocess.run(["mount", "-o", "remount,ro", small_disk], capture_output=True).returncode:
        pytest.skip("cannot make a mount read-only here")
    one_line_error(oracle(policy, problems, small_disk, capsys=capsys), "cannot be written to")
    one_line_error(tracecov(policy, table, small_disk, capsys=capsys), "cannot be written to")
    one_line_error(oracle(policy, problems, small_disk / "new", capsys=capsys), "cannot create this folder")


def test_a_folder_that_cannot_be_made_is_one_line_before_any_work(policy, problems, table, tmp_path, capsys):  # noqa: F811
    (tmp_path / "file").touch()
    one_line_error(oracle(policy, problems, tmp_path / "file" / "out", capsys=capsys), "cannot create this folder")
    one_line_error(tracecov(policy, table, tmp_path / "file" / "out", capsys=capsys), "cannot create this folder")


def test_a_damaged_gram_file_is_named_and_never_averaged_in(policy, table, undisturbed, tmp_path, capsys):  # noqa: F811
    out = shutil.copytree(undisturbed, tmp_path / "copy")
    (out / RESULTS).unlink()
    path = sorted((out / "grams").glob("[0-9a-f]*.npz"))[2]
    whole = path.read_bytes()
    damaged = [whole[:cut] for cut in range(0, len(whole), len(whole) // 30)]
    damaged += [whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1:] for at in range(0, len(whole), len(whole) // 30)]
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
