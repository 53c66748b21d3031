"""The house itself: which way imports run, how long a file and a function may be, and where the mutations' texts stand."""

import ast
import sys
from pathlib import Path

import pytest
from mutations import MUTATIONS

ROOT = Path(__file__).resolve().parents[1]
OURS = ("Gradient_evaluation", "Policy_Optimization", "data", "plots")
MODULES = sorted(path for folder in OURS for path in (ROOT / folder).rglob("*.py"))
SCRIPTS = {"calculate_oracle_v", "run_tracecov", "sample_with_vllm"}
TOOLS = {"adapters", "chat_template", "models", "rewards", "utils"}
# room -> the other rooms of ours that its modules import. A module beside the rooms is a room of its own.
MAY_IMPORT = {
    "errors": set(),
    "forward": {"errors"},
    "settings": {"errors"},
    "sampling": {"errors", "forward"},
    "gram": {"errors", "forward"},
    "stats": {"errors"},
    **{tool: TOOLS | {"errors", "forward", "settings"} for tool in TOOLS},
    "cli": TOOLS | {"errors", "settings"},
    "runs": TOOLS | {"errors", "forward", "settings", "sampling", "gram", "stats"},
    "plots": {"errors", "cli", "runs", "stats"},
}
# The same inside runs: machine knows no prompts, inputs no results. A module beside these rooms may import any of them.
INSIDE_RUNS = {"machine": set(), "inputs": {"machine"}, "results": {"machine", "inputs"}}
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 400, 60


def imports(path: Path) -> list[tuple[int, str, bool]]:
    """[(line, module, whether it is imported with the file), ...] of a file; a name that is a module of ours is one."""
    tree = ast.parse(path.read_text())
    inside = {id(node) for function in ast.walk(tree) if isinstance(function, ast.FunctionDef) for node in ast.walk(function)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}, line {node.lineno}: write the whole name of the module"
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(node.lineno, module, id(node) not in inside) for module in modules]
    return found


def room(module: str) -> str | None:
    """The room of a module by its dotted name; None for a module that is not ours."""
    first, *rest = module.split(".")
    return None if first not in OURS else rest[0] if first == "Gradient_evaluation" else first


def wrong_arrows(path: Path) -> list[str]:
    """What a module imports and may not, one line each."""
    here = room(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found = []
    for line, module, with_the_file in imports(path):
        there = room(module)
        if there is None or there == here:
            continue
        if here in ("data", "Policy_Optimization"):
            wrong = there in SCRIPTS or there == "plots" and with_the_file
        else:
            wrong = there in SCRIPTS if here in SCRIPTS else there not in MAY_IMPORT[here]
        if wrong:
            found.append(f"{path.relative_to(ROOT)}, line {line}: {module}")
    return found


def test_imports_run_from_the_scripts_down_to_the_errors():
    """Scripts import runs; runs import sampling, gram and stats, which import neither each other nor files and flags."""
    wrong = [arrow for path in MODULES for arrow in wrong_arrows(path)]
    assert not wrong, "\n".join(wrong)


def test_the_rooms_of_runs_import_as_they_may():
    runs = ROOT / "Gradient_evaluation" / "runs"
    for here, allowed in INSIDE_RUNS.items():
        for path in (runs / here).rglob("*.py"):
            for line, module, _ in imports(path):
                first, second, *there = module.split(".")[:3] if module.count(".") > 1 else (module, "")
                inside = (first, second) == ("Gradient_evaluation", "runs")
                assert not inside or {here, *allowed} & set(there), f"{path}, line {line}: {module}"


def test_the_rooms_know_no_flags_and_statistics_no_torch():
    for path in (ROOT / "Gradient_evaluation").glob("*/**/*.py"):
        packages = {module.partition(".")[0] for _, module, _ in imports(path)}
        assert "argparse" not in packages, path
        assert "stats" not in path.parts or packages <= {*sys.stdlib_module_names, "numpy", "Gradient_evaluation"}, path


def test_no_test_file_imports_another():
    for path in (ROOT / "tests").rglob("*.py"):
        found = [module for _, module, _ in imports(path) if module.startswith("test_")]
        assert not found, f"{path.relative_to(ROOT)}: {', '.join(found)}; put what they share into a module without test_"


@pytest.mark.parametrize(
    "source, wrong",
    [
        ("stats", "from Gradient_evaluation.gram import layers"),
        ("gram", "def f():\n    from Gradient_evaluation.sampling import law"),
        ("runs", "from Gradient_evaluation import cli"),
        ("runs", "import plots.style"),
        ("plots", "from Gradient_evaluation import errors, run_tracecov"),
        ("data", "from plots.style import new_figure"),
    ],
)
def test_a_wrong_arrow_would_be_found(source, wrong, tmp_path, monkeypatch):
    monkeypatch.setattr("test_house.ROOT", tmp_path)
    folder = tmp_path if source in OURS else tmp_path / "Gradient_evaluation"
    (folder / source).mkdir(parents=True)
    (folder / source / "a.py").write_text(wrong)
    (arrow,) = wrong_arrows(folder / source / "a.py")
    assert "a.py, line " in arrow


def test_no_file_and_no_function_is_too_long():
    long = []
    for path in MODULES:
        name, text = path.relative_to(ROOT), path.read_text()
        if len(text.splitlines()) > MOST_LINES:
            long.append(f"{name}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= MOST_LINES_OF_A_FUNCTION:
                long.append(f"{name}, {node.name}: {node.end_lineno - node.lineno + 1} lines")
    assert not long, "\n".join(long)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name.replace(" ", "_"))
def test_the_text_that_a_mutation_breaks_is_there(mutation):
    assert mutation.old in (ROOT / mutation.file).read_text()
    tests, _, name = mutation.tests.split()[0].partition("::")
    assert f"def {name}" in (ROOT / tests).read_text()
