"""--allocate: the file of continuations for each prompt, the entry of the results, and what is printed."""

import pytest
from scripts import RESULTS, from_grams, one_line_error, read, rows_of, tracecov

from Gradient_evaluation.runs.machine import gram_store

SIZES = ("--K_list", 4, 8)


def test_the_file_shares_all_continuations_among_the_prompts(undisturbed, tmp_path, capsys):
    code, out, _ = from_grams(undisturbed / "grams", tmp_path, *SIZES, "--allocate", 101, capsys=capsys)
    assert code == 0
    rows, records = rows_of(tmp_path / "allocation_four tokens_N101.jsonl"), list(gram_store.load_all(undisturbed / "grams"))
    assert [row["prompt_id"] for row in rows] == [f"{record.prompt_id:016x}" for record in records]
    assert [row["prompt"] for row in rows] == [record.prompt for record in records]
    counts = [row["n"] for row in rows]
    assert sum(counts) == 101 and min(counts) >= 2
    assert [row["share"] for row in rows] == pytest.approx([count / 101 for count in counts])
    found = read(tmp_path / RESULTS)["allocation"]
    assert found["N"] == 101 and found["continuations"]["most"] == max(counts)
    assert f"allocation of 101 continuations to {len(rows)} prompts: {min(counts)} to {max(counts)} each" in out


def test_without_the_flag_nothing_changes(undisturbed, tmp_path):
    for out, more in (("plain", ()), ("allocated", ("--allocate", 64))):
        assert from_grams(undisturbed / "grams", tmp_path / out, *SIZES, *more)[0] == 0
    plain, allocated = (read(tmp_path / out / RESULTS) for out in ("plain", "allocated"))
    assert set(allocated) - set(plain) == {"allocation"} and not list((tmp_path / "plain").glob("*.jsonl"))
    assert all(plain[name] == allocated[name] for name in set(plain) - {"config", "seconds"})


def test_one_block_writes_no_file_and_says_why(policy, table, tmp_path, capsys):
    code, out, _ = tracecov(policy, table, tmp_path, "--T", 2, "--M", 1, *SIZES, "--allocate", 64, capsys=capsys)
    assert code == 0 and "not computed (2 of 2 prompts have one block only" in " ".join(out.split())
    assert not list(tmp_path.glob("allocation_*")) and read(tmp_path / RESULTS)["allocation"]["gain"] is None


def test_too_few_continuations_are_one_line_before_any_work(undisturbed, policy, table, tmp_path, capsys):
    one_line_error(
        from_grams(undisturbed / "grams", tmp_path / "a", *SIZES, "--allocate", 9, capsys=capsys), "--allocate 9", "at least 10"
    )
    one_line_error(
        tracecov(policy, table, tmp_path / "b", *SIZES, "--allocate", 9, capsys=capsys), "--allocate 9", "at least 10"
    )
    assert not list(tmp_path.glob("*/*.json")) and not (tmp_path / "b").exists()
