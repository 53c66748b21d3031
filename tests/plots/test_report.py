"""The notebook is clean in git, runs from anywhere on whatever a run left, and becomes one file that opens offline."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from results_files import deep, group_size_law
from results_files import results as made_up

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.runs.results.report import group_size_report, report
from Gradient_evaluation.runs.results.results_file import in_one_line
from Gradient_evaluation.runs.results.text import WIDTH, value_text, wrapped
from plots.make_report import NOTEBOOK, execute, main, sections_of, to_html
from plots.notebook import group_size_in_words, headline, mse_by_estimator, mse_table, picture, setting, settings
from plots.style import new_figure

ROOT = Path(__file__).resolve().parents[2]


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


def test_cells_are_short_and_pictures_explained():
    before, pictures = "", 0
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
    assert pictures == 13


def test_the_first_code_cell_sets_what_is_read():
    first = next(source(cell) for cell in cells() if cell["cell_type"] == "code")
    assert "RESULTS = setting(" in first and "outputs/demo/tracecov_tiny_model.json" in first


@pytest.fixture(scope="module")
def full(small_run, tmp_path_factory):
    """The notebook executed from plots/ on a small run with traces by module and kinds, a second run and training runs."""
    folder = tmp_path_factory.mktemp("more")
    runs = {
        f"G{size}_seed{seed}": {"G": size, "seed": seed, "train_reward": [0.1] * 5, "held_out_reward": 0.4 + seed / 9}
        for size in (4, 8)
        for seed in (0, 1)
    }
    (folder / "group_sizes.json").write_text(json.dumps({"start": 0.3, "runs": runs}))
    results = folder / "tracecov_tiny_model.json"
    second = json.loads((small_run / "tracecov_tiny_model.json").read_text())
    layers = {**deep()["by_layer"], "trace_cov_ci95": {}}  # of K = 4, 8, 16; the run is of 2, 4, 8
    kinds = {"column": "kind", "values": {"sum": second, "quotient": second}}  # each value has the numbers of a run
    results.write_text(json.dumps({**second, "by_layer": layers, "by_group": kinds, "group_size_law": group_size_law()}))
    (folder / "grams").symlink_to(small_run / "grams")
    second["law"]["temperature"] = 0.5
    (folder / "tracecov_cooler.json").write_text(json.dumps(second))
    more = {"COMPARE": str(folder / "tracecov_cooler.json"), "TRAINING": str(folder / "group_sizes.json")}
    return execute({"RESULTS": str(results), **more})


def test_on_a_whole_run_every_picture_is_drawn_and_described(full):
    shown, said = images(full), printed(full)
    assert len(shown) == 13 and all(out["metadata"]["image/png"]["alt"] for out in shown)
    assert "not computed: greedy: " in said and "not shown" not in said


@pytest.fixture(scope="module")
def bare(small_run, tmp_path_factory):
    """The notebook executed from the root on results alone: no Grams, law, traces by module or training runs."""
    results = json.loads((small_run / "tracecov_tiny_model.json").read_text())
    results["group_size_law"] = None
    path = tmp_path_factory.mktemp("bare") / "tracecov_bare.json"
    path.write_text(json.dumps(results))
    return execute({"RESULTS": str(path), "COMPARE": "", "TRAINING": ""}, folder=ROOT)


def test_each_missing_part_is_one_line(bare):
    assert len(images(bare)) == 3  # the paper's figure, the ratio and the estimators need no Grams
    reasons = [line for line in printed(bare).splitlines() if line.startswith("not shown: ")]
    assert len(reasons) == 10 and sum("there are no Grams beside tracecov_bare.json" in line for line in reasons) == 5
    for text in ("name them in COMPARE", "holds no group_size_law", "no traces by module", "are no training runs"):
        assert any(text in line for line in reasons)


def words(page: str) -> str:
    """What a page says, without its tags, pictures and style."""
    page = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def test_page_names_what_it_leaves_out_in_a_closing_line(bare):
    page = to_html(bare, "title")
    headings = re.findall(r"<h2[^>]*>(.*?)<", page)
    assert headings == ["The paper's figure", "The numbers", "What not knowing V(x) costs", "Estimators beside each other"]
    closing = words(page).split("Not in this report: ")[1]
    for part in (
        "Several results beside each other (no other results were given)",
        "The on-policy check, Any group size (",
        "Where in the network? (the results hold no traces by module)",
        "Kinds of prompts (the results hold no kinds of prompts)",
        "Training (there are no training runs)",
    ):
        assert part in closing
    assert "Student's" not in page and "Assumption 2 (no correlation" not in page  # the texts of those sections
    for hint in ("COMPARE", "TRAINING", "not shown", "--by_layer", "write the results again", "plot_training.py"):
        assert hint not in words(page)
    assert len(images(bare)) == page.count("<img")


def test_whole_page_has_no_closing_line_and_no_hints(full):
    page = words(to_html(full, "title"))
    for hint in ("COMPARE", "TRAINING", "Several results beside each other (", "Training (", "Where in the network? ("):
        assert hint not in page
    assert to_html(full, "title").count("<h2") == len(sections_of(cells(full))) - 1
    assert "Not in this report" not in page


def test_hint_is_cut_from_the_page_not_the_notebook(full):
    nbformat = pytest.importorskip("nbformat")
    made = nbformat.from_dict(json.loads(json.dumps(full)))
    (cell,) = [cell for cell in made["cells"] if "import plot_prompt_traces" in cell["source"]]
    cell["outputs"].insert(0, nbformat.v4.new_output("stream", name="stdout", text="not shown: half of it; do this\n"))
    page = words(to_html(made, "title"))
    assert "not shown: half of it" in page and "do this" not in page and "do this" in cell["outputs"][0]["text"]


def test_title_and_the_only_first_heading_are_those_given(full):
    page = to_html(full, "m (temperature 1)")
    assert re.findall(r"<h1[^>]*>(.*?)</h1>", page, re.DOTALL) == ["m (temperature 1)"]
    assert "<title>m (temperature 1)</title>" in page
    made = made_up(law={"model": "org/a$b", "temperature": 1.0, "top_p": 0.95})
    assert in_one_line(made, "x") == "a$b (temperature 1, top_p 0.95)"
    assert (in_one_line(made_up(law={"model": "m"}), "x"), in_one_line(made_up(), "x")) == ("m", "x")


def test_table_holds_the_mse_of_every_estimator(small_run, full):
    results = json.loads((small_run / "tracecov_tiny_model.json").read_text())
    table = mse_table(results)
    rows = re.findall(r"<tr><th>(.*?)</th>(.*?)</tr>", table)
    assert [name for name, _ in rows[1:]] == ["vanilla", "GRPO", "oracle V(x)", "floor b*(x)"]
    assert rows[0][1] == "<th>K = 2</th><th>K = 4</th><th>K = 8</th>"
    for (_, cells_of_row), name in zip(rows[1:], ("naive", "grpo", "oracleV", "best_baseline")):
        found = results["estimators"][name]
        expected = [f"{value:.4g}<br>[{low:.4g}, {high:.4g}]" for value, (low, high) in zip(found["mse"], found["mse_ci95"])]
        assert re.findall(r"<td>(.*?)</td>", cells_of_row) == expected
    page = to_html(full, "title")
    assert words(table) in words(page) and page.count("<table") == 1


def test_the_table_of_other_estimators_and_of_older_results():
    none = {"title": "other <target>", "mse": [None] * 3, "mse_ci95": [None] * 3}
    some = {"title": "a <b> & c", "mse": [1.0, None, 0.25], "mse_ci95": [[0.5, 1.5], None, None]}
    made = made_up(estimators={"dapo": none, "opo": some})
    assert [name for name, *_ in mse_by_estimator(made)] == ["opo"]
    assert mse_table(made).split("\n")[2] == (
        "<tr><th>opo<br><small>a &lt;b&gt; &amp; c</small></th><td>1<br>[0.5, 1.5]</td><td>-</td><td>0.25</td></tr>"
    )
    old = mse_by_estimator(made_up(best_baseline=None))
    assert old == [
        (name, made_up()["conditional_on_x"][name], made_up()["conditional_on_x_ci95"][name])
        for name in ("naive", "grpo", "oracleV")
    ]


def test_table_prints_what_the_run_prints():
    for value, interval, text in (
        (2.0, [-1e-15, 3.25], "2 [0, 3.25]"),
        (2.0, [-0.5, 3.0], "2 [-0.5, 3]"),
        (2.0, None, "2"),
        (None, None, "-"),
    ):
        made = {
            "K_list": [4],
            "estimators": {"grpo": {"mse": [value], "mse_ci95": [interval]}, "naive": {"mse": [1.0], "mse_ci95": [None]}},
        }
        assert value_text(value, interval) == text
        assert value is None or f"<td>{text.replace(' [', '<br>[')}</td>" in mse_table(made)


def test_lines_on_the_terminal_are_broken_tables_are_not(small_run):
    results = json.loads((small_run / "tracecov_tiny_model.json").read_text())
    text = report(results) + "\n" + group_size_report(results["group_size_law"], 64)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "12 prompts, 384 continuations" in " ".join(text.split())
    assert wrapped("  a: " + "word " * 40).split("\n")[1].startswith("    word")
    assert wrapped("  best  G") == "  best  G"  # columns keep their spaces


def test_a_curve_below_the_floor_is_explained(small_run):
    results = json.loads((small_run / "tracecov_tiny_model.json").read_text())
    for floor, said in ((1e9, True), (-1e9, False)):
        results["estimators"]["best_baseline"]["mse"] = [floor] * 3
        assert ("errs upward" in report(results)) == said
    assert "1 prompt," in report({**results, "n_prompts": 1})


def test_an_interval_of_an_mse_below_zero_is_explained(small_run):
    results = json.loads((small_run / "tracecov_tiny_model.json").read_text())
    for low, said in ((-0.5, True), (-1e-15, False), (0.1, False)):
        for found in results["estimators"].values():
            found["mse_ci95"] = [[low, 1e9], None, [0.1, 1e9]]
        assert ("no MSE is below 0" in report(results)) == said


@pytest.mark.parametrize(
    "found, words",
    [
        (
            {"G_star": 5.84, "G_star_ci95": [4.84, None], "within_10_percent": [4, 10], "powers_of_two": [4, 8]},
            "G* = 5.84 [4.84, unbounded]; G = 4 to 10 are within 10% of the least MSE (powers of two among them: 4, 8)",
        ),
        (
            {"G_star": 3.0, "G_star_ci95": None, "within_10_percent": [3, 3], "powers_of_two": []},
            "G* = 3; G = 3 to 3 are within 10% of the least MSE (powers of two among them: none)",
        ),
        ({"G_star": 3.0}, "G* = 3"),
        (
            {"G_star": None, "reasons": {"G_star": "no reward ever differed"}, "almost_best": None, "G_star_at_least": None},
            "not computed (no reward ever differed)",
        ),
        (
            {"G_star": None, "reasons": {"G_star": "c1 is not above 0"}, "G_star_at_least": 5.11, "almost_best": [16, 128]},
            "not computed (c1 is not above 0); the data support G* of at least 5.11 (one-sided 95%); as measured, G = 16 to "
            "128 are within 10% of the least MSE among powers of two",
        ),
        (
            {"G_star": 9.0, "G_star_ci95": [4.0, None], "G_star_may_be_larger": True, "G_star_at_least": 4.5},
            "G* = 9 [4, unbounded]; G* may well be larger, c1 is less than 3 standard errors above 0: the data support G* of "
            "at least 4.5 (one-sided 95%)",
        ),
        (None, "not computed (the results hold no group-size law)"),
    ],
)
def test_the_best_group_size_is_said_in_words(found, words):
    assert group_size_in_words(found) == f"best group size to train with: {words}"


def test_best_group_size_comes_first_in_large_letters(full, bare):
    for notebook, text in (
        (full, "Best group size to train with: "),
        (bare, "not computed (the results hold no group-size law"),
    ):
        page = to_html(notebook, "title")
        (large,) = re.findall(r'<p style="font-size: 1.4em[^>]*>(.*?)</p>', page)
        assert text in html.unescape(large)
        assert words(page).index(large.split("(")[0]) < words(page).index("In these words")
        assert "Measured on tiny_model (temperature 1, top_p 0.95): 12 prompts, 384 continuations." in words(page)


def test_the_headline_escapes_and_says_what_the_results_lack():
    made = headline({"n_prompts": 4000, "group_size_law": {"G_star": 3.0, "within_10_percent": [2, 5]}}, "a <b>")
    assert re.findall("<p[^>]*>(.*?)</p>", made) == [
        "Best group size to train with: G* = 3.",
        "G = 2 to 5 are within 10% of the least MSE (powers of two among them: none).",
        "Measured on a &lt;b&gt;: 4,000 prompts.",
    ]
    assert "<p>Measured on x: the number of prompts is not in the results.</p>" in headline({}, "x")


def test_the_report_is_one_file_that_needs_nothing_else(full):
    page = to_html(full, "a <title> & more")
    assert page.startswith("<!DOCTYPE html>") and "<title>a &lt;title&gt; &amp; more</title>" in page
    for tag in ("<script", "<link", "<iframe", "@import", "<object"):
        assert tag not in page
    sources = re.findall(r"""(?:src|href)\s*=\s*["']([^"']{0,40})""", page)
    paper = "https://arxiv.org/abs/2603.01162"  # a link to click, which nothing is loaded from
    assert sources and all(text.startswith(("data:image/png;base64,", "#", paper)) for text in sources)
    assert page.count(paper) == page.count(f'href="{paper}"') == 1
    assert page.count("<img") == len(images(full)) == page.count('alt="')
    assert "import" not in words(page)[:500] and "What a run of" in words(page)[:200]  # the code is left out
    assert "The on-policy check" in page and "Traceback" not in page and "\u00b6" not in page


def test_a_damaged_gram_is_one_line_that_names_the_file(small_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(small_run, folder)
    damaged = sorted((folder / "grams").glob("*.npz"))[0]
    damaged.write_text("no Gram")
    with pytest.raises(UserError, match=f"{damaged.name}: not a Gram file") as caught:
        main([str(folder / "tracecov_tiny_model.json")])
    assert "\n" not in str(caught.value) and not list(folder.glob("*.html"))


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_report_takes_any_path_and_several_in_quotes(tmp_path):
    python = tmp_path / ".venv" / "bin" / "python"  # prints what it is given
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nshift\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    odd = "a b'c\"d$e#f%g:\u4e2d.json"
    for name in (odd, "requirements.txt", ".venv/installed"):
        (tmp_path / name).touch()
    shutil.copy(ROOT / "Makefile", tmp_path)
    for given, reported in (
        (odd, [odd]),
        ("x.json y.json", ["x.json", "y.json"]),
        ("'x y.json' z.json", ["x y.json", "z.json"]),
    ):
        done = subprocess.run(["make", "report", f"RESULTS={given}"], cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stdout.splitlines()) == (0, reported), done.stderr


@pytest.mark.slow
def test_the_report_is_written_beside_the_results(small_run, tmp_path, capsys):
    shutil.copytree(small_run, tmp_path / "mine")
    main([str(tmp_path / "mine" / "tracecov_tiny_model.json")])
    written = tmp_path / "mine" / "report_tiny_model.html"
    assert capsys.readouterr().out.split() == [str(written)] and written.stat().st_size > 100_000


@pytest.mark.parametrize(
    "flags, message",
    [
        (["missing.json"], "missing.json: no such file"),
        ([str(ROOT / "README.md")], "is not JSON"),
        (["RESULTS", "missing.json"], "missing.json: no such file"),
        (["RESULTS", "--training", "nowhere"], "--training nowhere: no such file or folder"),
    ],
)
def test_what_cannot_be_reported_is_refused_in_one_line(small_run, flags, message, monkeypatch):
    monkeypatch.chdir(small_run)
    flags = [flag.replace("RESULTS", "tracecov_tiny_model.json") for flag in flags]
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        main(flags)
    assert "\n" not in str(caught.value)


def test_relative_settings_start_at_the_repository(monkeypatch):
    monkeypatch.delenv("RESULTS", raising=False)
    assert setting("RESULTS", "a/b.json") == ROOT / "a/b.json"
    monkeypatch.setenv("RESULTS", os.pathsep.join(["x.json", "/y.json"]))
    assert settings("RESULTS") == [ROOT / "x.json", Path("/y.json")]
    monkeypatch.setenv("RESULTS", json.dumps(["a:b.json", "/y;z.json", "[1].json"]))
    assert settings("RESULTS") == [ROOT / "a:b.json", Path("/y;z.json"), ROOT / "[1].json"]
    monkeypatch.setenv("RESULTS", "[1].json")
    assert settings("RESULTS") == [ROOT / "[1].json"]
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

    one, two = picture([whole, broken, broken]), picture([whole, whole])
    assert capsys.readouterr().out == "not shown: there is nothing\n"  # a reason once
    assert one.alt == "A line" and two.width > 1.5 * one.width
    assert picture(broken) is None
