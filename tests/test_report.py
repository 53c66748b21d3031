"""The notebook is clean in git, runs from anywhere on whatever a run left, and becomes one file that opens offline."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from Gradient_evaluation.cli import UserError
from plots.make_report import NOTEBOOK, execute, main, to_html
from plots.notebook import picture, setting, settings
from plots.style import new_figure

ROOT = Path(__file__).resolve().parents[1]


def cells(notebook=None) -> list[dict]:
    return notebook["cells"] if notebook else json.loads(NOTEBOOK.read_text())["cells"]


def source(cell) -> str:
    return "".join(cell["source"])


def printed(notebook) -> str:
    return "".join(out["text"] for cell in cells(notebook) for out in cell.get("outputs", []) if out["output_type"] == "stream")


def images(notebook) -> list[dict]:
    outputs = [out for cell in cells(notebook) for out in cell.get("outputs", []) if "data" in out]
    return [out for out in outputs if "image/png" in out["data"]]


def test_the_notebook_holds_no_outputs_and_says_which_kernel():
    for cell in cells():
        assert cell["cell_type"] == "markdown" or (cell["outputs"] == [] and cell["execution_count"] is None)
        assert set(cell["metadata"]) == set()
    assert json.loads(NOTEBOOK.read_text())["metadata"]["kernelspec"]["name"] == "python3"


def test_every_cell_is_short_and_every_picture_is_explained_in_two_or_three_sentences():
    before = ""
    pictures = 0
    for cell in cells():
        if cell["cell_type"] == "markdown":
            before = source(cell)
            continue
        assert len(source(cell).splitlines()) <= 9
        if "picture(" in source(cell):
            pictures += 1
            text = re.sub(r"^#.*\n", "", before).strip()
            sentences = re.findall(r"\w[^.]*?[.](?=\s|$)", re.sub(r"(?<=\d)\.(?=\d)|\.(?=\w)", "", text))
            assert 2 <= len(sentences) <= 3, text
            assert "$" not in text and "\\" not in text  # formulas would need a script to be shown
    assert pictures == 11


def test_the_first_code_cell_sets_what_is_read():
    first = next(source(cell) for cell in cells() if cell["cell_type"] == "code")
    assert "RESULTS = setting(" in first and "outputs/demo/tracecov_tiny_model.json" in first


@pytest.fixture(scope="module")
def full(small_run, tmp_path_factory):
    """The notebook executed from plots/ on a small run with a second results file and training runs."""
    folder = tmp_path_factory.mktemp("more")
    runs = {f"G{size}_seed{seed}": {"G": size, "seed": seed, "train_reward": [0.1] * 5, "held_out_reward": 0.4 + seed / 9}
            for size in (4, 8) for seed in (0, 1)}  # fmt: skip
    (folder / "group_sizes.json").write_text(json.dumps({"start": 0.3, "runs": runs}))
    results = small_run / "tracecov_tiny_model.json"
    second = json.loads(results.read_text())
    second["law"]["temperature"] = 0.5
    (folder / "tracecov_cooler.json").write_text(json.dumps(second))
    return execute({"RESULTS": str(results), "COMPARE": str(folder / "tracecov_cooler.json"),
                    "TRAINING": str(folder / "group_sizes.json")})  # fmt: skip


def test_on_a_whole_run_every_picture_is_drawn_and_described(full):
    shown = images(full)
    law_is_known = "group_size_law" not in printed(full)
    assert len(shown) == 10 + law_is_known
    assert all(out["metadata"]["image/png"]["alt"] for out in shown)
    said = printed(full)
    assert "tiny_model\ntemperature 1, top_p 0.95\n6 prompts, 192 continuations" in said.replace("\\", "")
    assert "not computed: greedy: " in said
    assert [line for line in said.splitlines() if line.startswith("not shown")] == (
        [] if law_is_known else [line for line in said.splitlines() if "group_size_law" in line]
    )


def test_from_the_root_without_grams_law_or_training_each_missing_part_is_one_line(small_run, tmp_path):
    results = json.loads((small_run / "tracecov_tiny_model.json").read_text())
    results["group_size_law"] = None
    path = tmp_path / "tracecov_bare.json"
    path.write_text(json.dumps(results))
    done = execute({"RESULTS": str(path), "COMPARE": "", "TRAINING": ""}, folder=ROOT)
    assert len(images(done)) == 3  # the paper's figure, the ratio and the estimators need no Grams
    reasons = [line for line in printed(done).splitlines() if line.startswith("not shown: ")]
    assert len(reasons) == 9 and sum("there are no Grams beside tracecov_bare.json" in line for line in reasons) == 6
    for text in ("COMPARE names no other", "holds no group_size_law", "there are no training runs"):
        assert any(text in line for line in reasons)


def test_the_report_is_one_file_that_needs_nothing_else(full):
    page = to_html(full, "a <title> & more")
    assert page.startswith("<!DOCTYPE html>") and "<title>a &lt;title&gt; &amp; more</title>" in page
    for tag in ("<script", "<link", "<iframe", "@import", "<object"):
        assert tag not in page
    sources = re.findall(r"""(?:src|href)\s*=\s*["']([^"']{0,40})""", page)
    assert sources and all(text.startswith(("data:image/png;base64,", "#")) for text in sources)
    assert page.count("<img") == len(images(full)) == page.count('alt="')
    assert "import" not in re.sub(r"<[^>]*>", " ", page).split("How noisy")[1][:300]  # the code is left out
    assert "The on-policy check" in page and "Traceback" not in page


def test_a_damaged_gram_is_one_line_that_names_the_file(small_run, tmp_path):
    place = tmp_path / "run"
    shutil.copytree(small_run, place)
    damaged = sorted((place / "grams").glob("*.npz"))[0]
    damaged.write_text("no Gram")
    with pytest.raises(UserError, match=f"{damaged.name}: not a Gram file") as caught:
        main([str(place / "tracecov_tiny_model.json")])
    assert "\n" not in str(caught.value) and not list(place.glob("*.html"))


def stub_environment(folder: Path) -> Path:
    """A copy of what make needs, whose .venv is this Python."""
    for name in ("Makefile", "requirements.txt"):
        shutil.copy(ROOT / name, folder)
    for name in ("plots", "Gradient_evaluation", "Policy_Optimization", "data"):
        (folder / name).symlink_to(ROOT / name)
    binaries = folder / ".venv" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (binaries / "python").chmod(0o755)
    (folder / ".venv" / "installed").touch()
    return folder


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_report_of_a_missing_file_is_one_line_and_fails(tmp_path):
    place = stub_environment(tmp_path)
    done = subprocess.run(["make", "report", "RESULTS=missing.json"], cwd=place, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == ""
    ours = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert ours == ["error: missing.json: no such file; give a tracecov_*.json written by run_tracecov.py"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_report_writes_it_beside_the_results(small_run, tmp_path):
    place = stub_environment(tmp_path)
    results = tmp_path / "mine" / "tracecov_tiny_model.json"
    shutil.copytree(small_run, results.parent)
    done = subprocess.run(["make", "report", f"RESULTS={results}"], cwd=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(results.parent / "report_tiny_model.html")]
    assert (results.parent / "report_tiny_model.html").stat().st_size > 100_000


@pytest.mark.parametrize(
    "flags, message",
    [
        (["missing.json"], "missing.json: no such file"),
        ([str(ROOT / "README.md")], "is not JSON"),
        (["RESULTS", "missing.json"], "missing.json: no such file"),
        (["RESULTS", "--training", "nowhere"], "--training nowhere: no such file or folder"),
    ],
)
def test_what_cannot_be_reported_is_refused_in_one_line_before_anything_runs(small_run, flags, message, monkeypatch):
    monkeypatch.chdir(small_run)
    flags = [flag.replace("RESULTS", "tracecov_tiny_model.json") for flag in flags]
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        main(flags)
    assert "\n" not in str(caught.value)


def test_relative_settings_start_at_the_repository(monkeypatch):
    monkeypatch.delenv("RESULTS", raising=False)
    assert setting("RESULTS", "a/b.json") == ROOT / "a/b.json" and setting("RESULTS") is None
    monkeypatch.setenv("RESULTS", os.pathsep.join(["x.json", "/y.json"]))
    assert settings("RESULTS") == [ROOT / "x.json", Path("/y.json")]
    monkeypatch.setenv("RESULTS", "")
    assert settings("RESULTS") == [] and setting("RESULTS", "z.json") == ROOT / "z.json"


def test_of_two_panels_the_one_that_can_be_drawn_is(capsys):
    pytest.importorskip("IPython", reason="IPython is not installed")

    def whole(ax=None):
        """A line; returns (figure, ax)."""
        figure, axes = new_figure() if ax is None else (ax.get_figure(), [ax])
        axes[0].plot([1, 2])
        return figure, axes[0]

    def broken(ax=None):
        raise UserError("there is nothing")

    one, two = picture([whole, broken]), picture([whole, whole])
    assert capsys.readouterr().out == "not shown: there is nothing\n"
    assert one.alt == "A line" and two.width > 1.5 * one.width
    assert picture(broken) is None
