"""Nothing lost: runs that are stopped, repeated, doubled, starved of disk or memory, or shared by several processes."""

import contextlib
import fcntl
import json
import os
import platform
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
from scripts import (
    ORACLE,
    RESULTS,
    ROOT,
    call,
    ended,
    files_of,
    held_by,
    one_line_error,
    oracle,
    oracle_flags,
    read,
    rows_of,
    start,
    torchrun,
    tracecov,
    tracecov_flags,
    wait_for,
)
from tiny_models import enumerable_policy, tiny_tokenizer

from Gradient_evaluation import run_tracecov
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.inputs import prompts
from Gradient_evaluation.runs.inputs.begun_table import part_of
from Gradient_evaluation.runs.machine import gram_store
from Gradient_evaluation.runs.machine.memory import Batch
from Gradient_evaluation.runs.machine.processes import Processes
from Gradient_evaluation.runs.machine.resume import only_writer, saved_on_interrupt

# ------------------------------------------------------------------------------------------------ finished


def test_a_finished_oracle_run_loads_no_model(policy, problems, table, tmp_path, capsys, monkeypatch):
    shutil.copy(table, tmp_path)
    monkeypatch.setattr(prompts, "load_model", None)  # a call would be a TypeError
    code, out, _ = oracle(policy, problems, tmp_path, capsys=capsys)
    assert code == 0 and out.startswith("finished before") and "5 prompts" in out
    assert (tmp_path / table.name).read_bytes() == table.read_bytes() and len(list(tmp_path.iterdir())) == 1


def test_a_finished_tracecov_run_loads_no_model(policy, table, undisturbed, tmp_path, capsys, monkeypatch):
    out = shutil.copytree(undisturbed, tmp_path / "copy")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.rglob("*") if path.is_file()}
    flags = tracecov_flags(policy, table, out)[1:]
    monkeypatch.setattr(prompts, "load_model", None)
    (out / RESULTS).unlink()
    assert call(run_tracecov, *flags)[0] == 0  # the Grams are all there: results again, without the model
    assert files_of(out) == files_of(undisturbed)
    (out / RESULTS).write_bytes((out / RESULTS).read_bytes())
    capsys.readouterr()
    code, printed, _ = call(run_tracecov, *flags, capsys=capsys)
    assert code == 0 and printed.startswith("finished before") and "MSE of the gradient estimate" in printed
    assert {path for path in out.rglob("*") if path.is_file()} == set(before)


def test_a_finished_run_of_other_weights_is_refused(policy, problems, table, undisturbed, tmp_path, capsys):
    other = tmp_path / "four tokens"
    enumerable_policy(vocabulary=4, seed=7).save_pretrained(other)
    tiny_tokenizer(("<eos>", "1", "2", "3")).save_pretrained(other)
    shutil.copy(table, tmp_path)
    one_line_error(oracle(other, problems, tmp_path, capsys=capsys), "other weights", "--overwrite")
    out = shutil.copytree(undisturbed, tmp_path / "copy")
    flags = tracecov_flags(other, table, out)[1:]
    one_line_error(call(run_tracecov, *flags, "--allow_mismatch", capsys=capsys), "model_fingerprint")


def test_oracle_values_that_changed_since_are_used(policy, table, undisturbed, tmp_path):
    changed, out = tmp_path / "changed.jsonl", shutil.copytree(undisturbed, tmp_path / "copy")
    rows = [{**row, "V_oracle": 0.5, "correct_count": 200} for row in rows_of(table)]
    changed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert call(run_tracecov, *tracecov_flags(policy, changed, out)[1:])[0] == 0
    before, after = read(undisturbed / RESULTS), read(out / RESULTS)
    assert after["conditional_on_x"]["oracleV"] != before["conditional_on_x"]["oracleV"]
    assert after["conditional_on_x"]["grpo"] == before["conditional_on_x"]["grpo"]
    assert {record.oracle_value for record in gram_store.load_all(out / "grams")} == {0.5}


def test_a_table_is_not_continued_with_another_data_set(policy, table, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"prompt": "2", "ground_truth": 22}) + "\n")
    out = tmp_path / "out"
    out.mkdir()
    shutil.copy(table, out)
    one_line_error(oracle(policy, other, out, capsys=capsys), "line 1", "not in --dataset")
    assert (out / table.name).read_bytes() == table.read_bytes()


def test_a_data_set_that_grew_is_continued_in_its_own_order(policy, problems, table, tmp_path):
    rows = rows_of(table)
    (tmp_path / table.name).write_text("".join(json.dumps(rows[i], ensure_ascii=False) + "\n" for i in (3, 1)))
    assert oracle(policy, problems, tmp_path)[0] == 0
    assert (tmp_path / table.name).read_bytes() == table.read_bytes()


def test_gram_files_of_unknown_origin_are_left_alone(policy, table, tmp_path, capsys):
    (tmp_path / "grams").mkdir()
    (tmp_path / "grams" / "mine.npz").write_bytes(b"precious")
    one_line_error(tracecov(policy, table, tmp_path, "--K_list", 4, "--M", 1, capsys=capsys), "grams", "--overwrite")
    assert (tmp_path / "grams" / "mine.npz").read_bytes() == b"precious"


# ------------------------------------------------------------------------------------------------ two at once, Ctrl-C


def test_the_second_of_two_processes_writes_nothing(policy, problems, table, tmp_path, capsys):
    with only_writer(tmp_path / table.name), only_writer(tmp_path / "grams"):
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        one_line_error(oracle(policy, problems, tmp_path, capsys=capsys), table.name, f"process {os.getpid()}")
        one_line_error(tracecov(policy, table, tmp_path, "--K_list", 4, "--M", 1, capsys=capsys), "grams", "is writing")
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert not list(tmp_path.iterdir())


def test_a_lock_is_free_again_once_its_process_was_killed(tmp_path):
    holder = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); from pathlib import Path\n"
        "from Gradient_evaluation.runs.machine.resume import only_writer\n"
        "with only_writer(Path(sys.argv[2])): print('held', flush=True); time.sleep(600)"
    )
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
def test_ctrl_c_says_what_is_saved_and_the_same_command_goes_on(policy, problems, table, undisturbed, tmp_path, script):
    flags, made = {
        "oracle": (oracle_flags(policy, problems, tmp_path), lambda: (tmp_path / table.name).exists()),
        "tracecov": (tracecov_flags(policy, table, tmp_path), lambda: list((tmp_path / "grams").glob("[0-9a-f]*.npz"))),
    }[script]
    for _ in range(10):
        process = start(flags)
        wait_for(made, process)
        process.send_signal(signal.SIGINT)
        code, _, err = ended(process)
        if code:
            break
        for path in tmp_path.iterdir():  # on a busy machine it came through before the signal: once more
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert code == 130 and err.count("\n") == 1 and "saved in" in err and "same command" in err
    assert ended(start(flags))[0] == 0
    if script == "oracle":
        assert (tmp_path / table.name).read_bytes() == table.read_bytes()
    else:
        assert files_of(tmp_path) == files_of(undisturbed)


def test_ctrl_c_before_the_first_finished_prompt_says_so(tmp_path):
    grams, table = tmp_path / "grams", tmp_path / "table.jsonl"
    grams.mkdir()
    (grams / "run.json").touch()
    for path, prompt in ((grams, grams / "1.npz"), (table, part_of(table, 1))):
        with pytest.raises(KeyboardInterrupt, match="no prompt was finished yet"), saved_on_interrupt(path, False, True):
            raise KeyboardInterrupt
        prompt.write_text("{}\n")
        with pytest.raises(KeyboardInterrupt, match="is saved in"), saved_on_interrupt(path, False, True):
            raise KeyboardInterrupt


# ------------------------------------------------------------------------------------------------ killed


@pytest.mark.slow
@pytest.mark.parametrize("script", ["oracle", "tracecov"])
def test_a_run_killed_ten_times_ends_with_the_same_bytes(policy, problems, table, undisturbed, tmp_path, script):
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


def test_two_processes_leave_what_one_leaves(policy, problems, table, undisturbed, tmp_path):
    code, out, err = torchrun(oracle_flags(policy, problems, tmp_path / "oracle"))
    assert code == 0 and out.count("mean V") == 1, err
    assert (tmp_path / "oracle" / table.name).read_bytes() == table.read_bytes()
    assert [path.name for path in (tmp_path / "oracle").iterdir()] == [table.name]
    code, out, err = torchrun(tracecov_flags(policy, table, tmp_path / "tracecov"))
    assert code == 0 and out.count("MSE of the gradient estimate") == 1, err
    assert files_of(tmp_path / "tracecov") == files_of(undisturbed)


def test_every_prompt_is_taken_by_exactly_one_process():
    store, shares = torch.distributed.HashStore(), []
    for rank in range(2):
        one = object.__new__(Processes)  # without a process group: this is about the counter
        one.rank, one.size, one._store = rank, 2, store
        shares.append(one.share(range(7)))
    slow = next(shares[0])
    quick = list(shares[1])
    assert (slow, quick, list(shares[0])) == (0, [1, 2, 3, 4, 5, 6], [])


def test_what_several_processes_left_is_continued_by_any_number(policy, problems, table, tmp_path):
    lines = table.read_bytes().splitlines(keepends=True)
    path = tmp_path / table.name
    path.write_bytes(lines[1])
    part_of(path, 0).write_bytes(lines[4] + lines[1])  # one row both in the table and in a part: killed while merging
    part_of(path, 3).write_bytes(lines[0] + lines[2][:30])
    assert oracle(policy, problems, tmp_path)[0] == 0
    assert path.read_bytes() == table.read_bytes() and [file.name for file in tmp_path.iterdir()] == [table.name]


def test_bad_input_under_torchrun_is_said_once(policy, tmp_path):
    code, _, err = torchrun(oracle_flags(policy, tmp_path / "missing.jsonl", tmp_path / "out"))
    assert code != 0 and err.count("error: ") == 1 and "missing.jsonl" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_process_that_fails_ends_the_job_and_names_the_row(policy, table, tmp_path):
    """A prompt whose token has an embedding that is not finite: whoever meets it ends the job; other rows stay."""
    broken = tmp_path / "four tokens"
    shutil.copytree(policy, broken)
    model = enumerable_policy(vocabulary=4, seed=6, tied=False)
    data = tmp_path / "prompts.jsonl"  # the check before the first row looks at the first prompt and at the longest
    data.write_text("".join(json.dumps({"prompt": p, "ground_truth": 1}) + "\n" for p in ("1", "2", "21", "3", "1221")))
    with torch.no_grad():
        model.transformer.wte.weight[3] = torch.nan  # that of "3"
    model.save_pretrained(broken)
    # one token: a drawn one is never read
    code, _, err = torchrun(oracle_flags(broken, data, tmp_path / "out", "--max_new_tokens", 1))
    assert code != 0 and "line 4" in err and "not finite" in err
    kept = list((tmp_path / "out").glob(".*rank*")) + list((tmp_path / "out").glob("*.jsonl"))
    assert kept and all(json.loads(line)["prompt"] != "3" for path in kept for line in path.read_text().splitlines())


# ------------------------------------------------------------------------------------------------ progress


@pytest.mark.parametrize("script", ["oracle", "tracecov"])
def test_progress_is_shown_on_a_terminal_alone(policy, problems, table, tmp_path, script):
    flags = {"oracle": oracle_flags(policy, problems, tmp_path), "tracecov": tracecov_flags(policy, table, tmp_path)}[script]
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("4H", 24, 160, 0, 0))
    process = subprocess.Popen([sys.executable, *map(str, flags)], stdout=subprocess.PIPE, stderr=inside)
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


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    ],
)
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
    assert (
        capsys.readouterr().err == "note: line 3: out of memory with 100 continuations at a time (--gen_bs); going on with 12\n"
    )
    with pytest.raises(UserError, match="line 5: out of memory with 4 continuations"):
        Batch("--block_size", 8, least=4).run(out_of_memory, "line 5")
    with pytest.raises(RuntimeError, match="size of tensor"):
        batch.run(lambda size: torch.zeros(2) + torch.zeros(3), "line 6")


def test_with_less_memory_blocks_and_batches_shrink(policy, table, undisturbed, tmp_path, monkeypatch, capsys):
    """A model that takes no more than five sequences at a time, as if on a small GPU."""

    def load(*args):
        model = enumerable_policy(vocabulary=4, seed=6).to(torch.float64)
        model.register_forward_pre_hook(
            lambda module, args, kwargs: out_of_memory(0) if len(kwargs["input_ids"]) > 5 else None, with_kwargs=True
        )
        return model

    monkeypatch.setattr(prompts, "load_model", load)
    code, _, err = call(run_tracecov, *tracecov_flags(policy, table, tmp_path)[1:], capsys=capsys)
    assert code == 0 and "--gen_bs" in err and "--block_size" in err
    results = read(tmp_path / RESULTS)
    assert results["batches"] == {"gen_bs": 4, "blocks_by_size": {"4": 30}}
    assert read(undisturbed / RESULTS)["batches"] == {"gen_bs": 64, "blocks_by_size": {"8": 15}}
    for small, whole in zip(gram_store.load_all(tmp_path / "grams"), gram_store.load_all(undisturbed / "grams")):
        assert (small.rewards == whole.rewards).all()
        np.testing.assert_allclose(small.log_probs, whole.log_probs, rtol=1e-9)


def test_gradient_checkpointing_changes_no_number(policy, table, undisturbed, tmp_path):
    out = shutil.copytree(undisturbed, tmp_path / "copy")
    redone = sorted((out / "grams").glob("[0-9a-f]*.npz"))[:2]
    for path in redone:
        path.unlink()
    assert call(run_tracecov, *tracecov_flags(policy, table, out)[1:], "--gradient_checkpointing")[0] == 0
    for path in redone:
        again, before = gram_store.load(path), gram_store.load(undisturbed / "grams" / path.name)
        np.testing.assert_allclose(again.grams, before.grams, rtol=1e-12)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="--max_memory on a CPU needs Linux")
def test_max_memory_is_that_of_the_real_allocator(tmp_path):
    """A vocabulary of 50,000 and 4,096 continuations at a time: over 1.5 GiB of logits and their exponentials."""
    folder = tmp_path / "wide"
    words = ("<eos>", *(str(i) for i in range(1, 50_000)))
    enumerable_policy(vocabulary=len(words)).float().save_pretrained(folder)
    tiny_tokenizer(words).save_pretrained(folder)
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "1", "ground_truth": 1}) + "\n")
    law = "--n_oracle 4096 --max_new_tokens 1 --device cpu --top_p 1 --batch_size 4096".split()
    flags = [ORACLE, "--model", folder, "--dataset", data, *law]
    code, _, err = ended(start([*flags, "--out_dir", tmp_path / "a", "--max_memory", 0.01]))
    assert code == 2 and "--max_memory 0.01" in err and err.count("\n") == 1
    allowed = float(re.search(r"already takes ([\d.]+) GiB", err)[1]) + 0.5
    code, _, err = ended(start([*flags, "--out_dir", tmp_path / "a", "--max_memory", allowed]))
    assert code == 0 and "going on with" in err, err
    assert ended(start([*flags, "--batch_size", 128, "--out_dir", tmp_path / "b"]))[0] == 0
    (capped,), (free,) = (rows_of(tmp_path / out / "oracle_v_n4096_wide.jsonl") for out in "ab")
    # In float32 a draw next to the boundary of the right token may move with the batch; two of 4096 are unheard of.
    assert abs(capped["correct_count"] - free["correct_count"]) <= 1
    assert {**capped, **{name: free[name] for name in ("V_oracle", "V_standard_error", "correct_count")}} == free


@pytest.mark.skipif(not sys.platform.startswith("linux") or platform.libc_ver()[0] != "glibc", reason="glibc's settings")
def test_large_temporaries_go_back_to_the_system():
    code = f"""if True:
        import resource, sys, torch
        sys.path.insert(0, {str(ROOT)!r})
        from Gradient_evaluation.runs.machine.memory import tune_allocator
        tune_allocator(torch.device("cpu"))
        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
        torch.ones(2**22)  # glibc's own rule: what was freed once comes from the heap the next time
        before = resident()
        pairs = [(torch.ones(2**22), torch.ones(2**8)) for _ in range(20)]
        small = [small for _, small in pairs]  # they stay between the large ones, as the nodes of a graph do
        del pairs
        held = resident() - before
        before = resident()
        [torch.ones(2**19) for _ in range(64)]
        print(held, resident() - before)"""
    own = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_")  # settings of the machine's owner that stand above ours
    environment = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**environment, "THP_MEM_ALLOC_ENABLE": "0"},
    )
    held, kept = map(int, done.stdout.split())
    assert held < 2**22 and kept > 2**26  # bytes: of 20 tensors of 2**24, and of 64 freed ones of 2**21


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="--max_memory on a CPU needs Linux")
def test_a_memory_limit_ends_with_the_measuring(policy, table, tmp_path):
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    assert call(run_tracecov, *tracecov_flags(policy, table, tmp_path)[1:], "--max_memory", 20)[0] == 0
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
