"""Every command and every snippet of README.md works: checked word by word, and run on the tiny model where it can be.

The quick tests let each script's own parser judge the command and look for the files it names. The long one (slow)
runs the commands in their order in a copy of the repository, where folders named like the README's models and data
sets hold the tiny model and a few problems; ADDED makes them small, and training stops at --dry_run.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from readme_commands import (
    PAGES,
    ROOT,
    WRITTEN_BY,
    Command,
    check,
    code_blocks,
    commands_in,
    help_flags,
    make_lines,
    readme_commands,
    readme_text,
    torchrun_flags,
)

COMMANDS = readme_commands()


def only(text: str) -> Command:
    (command,) = commands_in(text)
    return command


def test_the_readme_has_commands_of_every_script_a_person_runs():
    named = " ".join(command.text for command in COMMANDS)
    scripts = "calculate_oracle_v.py run_tracecov.py sample_with_vllm.py grpo_train.sh sweep_group_size.sh plot_tracecov.py"
    more = "plot_group_size.py plot_training.py make_arithmetic.py prepare_parquet.py train_group_sizes.py"
    for script in f"{scripts} {more}".split():
        assert script in named
    assert len(COMMANDS) >= 25


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.text[:60])
def test_a_command_names_programs_flags_and_files_that_exist(command):
    check(command)


@pytest.mark.parametrize(
    "text, message",
    [
        ("python Gradient_evaluation/run_tracecov.py --oracle_tabel x", "unrecognized arguments: --oracle_tabel"),
        ("python Gradient_evaluation/run_tracecov.py --T 0 --from_grams g", "must be at least 1"),
        ("python Gradient_evaluation/calculate_oracle_v.py --reward maths", "invalid choice: 'maths'"),
        ("python Gradient_evaluation/calculate_v.py --n_oracle 3", "calculate_v.py: no such file"),
        ("python Gradient_evaluation/calculate_oracle_v.py --model data/small_model", "data/small_model: no such file"),
        ("python plots/plot_tracecov.py outputs/qwen/trace_cov_a.json --out a.pdf", "no script writes a file of this name"),
        ("python plots/plot_tracecov.py outputs/qwen/tracecov_a.json", "--out"),
        ("python -m verl.trainer.main_ppo", "teach"),
        ("python -m pytest -m gpu tests", "no such marker"),
        ("bash Policy_Optimization/grpo_train.sh --groupsize 32", "--groupsize"),
        ("bash Policy_Optimization/grpo_train.sh --group_size 3", "does not divide"),
        ("GROUP=3 bash Policy_Optimization/sweep_group_size.sh --seeds 0", "no such setting"),
        ("bash Policy_Optimization/sweep_group_size.sh --seed 0", "--seed"),
        ("ray job submit --address=a -- bash /shared/repo/Policy_Optimization/grpo_train.sh --nodes 2", "--nodes"),
        ("ray up", "teach"),
        ("jupyter lab plots/result.ipynb", "plots/result.ipynb: no such file"),
        ("make demonstrate", "demonstrate"),
        ("docker run image", "a command of no known kind"),
        ("pip install 'verl = 3'", ""),
    ],
)
def test_a_wrong_command_would_be_found(text, message):
    with pytest.raises(AssertionError) as caught:
        check(only(text))
    assert message in str(caught.value)


def test_commands_are_found_in_blocks_and_in_running_text():
    block = "1. a\n   ```bash\n   # why\n   X=1 python a.py \\\n       --b 'c d'  # so\n   ```\n"
    text = block + "and `make x` but `not this` or `K`\n"
    assert [(command.words, command.variables) for command in readme_commands(text)] == [
        (["python", "a.py", "--b", "c d"], {"X": "1"}),
        (["make", "x"], {}),
    ]


def test_every_page_and_every_link_between_pages_exists():
    assert sorted(PAGES) == sorted(["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))])
    for name in PAGES:
        text = (ROOT / name).read_text()
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", text):
            path, _, anchor = target.partition("#")
            linked = (ROOT / name).parent / path if path else ROOT / name
            assert linked.exists(), f"{name}: {target}"
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.MULTILINE) if anchor else []
            assert not anchor or anchor in [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings], target


def written_by(command: Command) -> set[str]:
    """The files and folders below outputs/ that a command leaves, by the names that its script gives them."""
    words, program = command.words, " ".join(command.words[:8])

    def flag(name, default=None):
        return words[words.index(name) + 1] if name in words else default

    label = Path(flag("--model", command.variables.get("MODEL", ""))).name
    found = {flag("--out", ""), flag("--save_rollouts", "")}
    if "calculate_oracle_v.py" in program:
        found.add(f"{flag('--out_dir')}/oracle_v_n{flag('--n_oracle', 1000)}_{label}.jsonl")
    elif "run_tracecov.py" in program:
        found |= {f"{flag('--save_json')}/grams", f"{flag('--save_json')}/tracecov_{label}.json"}
    elif "prepare_parquet.py" in program:
        found |= {f"{flag('--out_dir')}/{name}.parquet" for name in ("train", "val")}
    elif "train_with_trl.py" in program:
        found |= {flag("--out_dir"), f"{flag('--out_dir')}/group_size.jsonl"}
    elif "sweep_group_size.sh" in program and "--dry_run" not in words:
        found.add(f"{flag('--sweep_dir', 'outputs/sweep')}/manifest.json")
    return found


def read_too_early(text: str) -> list[str]:
    """What the commands of a text's blocks read below outputs/ that no command before them has written."""
    written, early = set(), []
    for command in (command for block in code_blocks(text, "bash") for command in commands_in(block)):
        is_make = command.words[0] == "make"
        given = [Command("", [word.partition("=")[2]], {}) for word in command.words if is_make and "=" in word]
        for each in [*given, *(make_lines(command.words[1:]) if is_make else [command])]:
            before = ""
            for word in each.words:
                if word.startswith("outputs/") and before not in WRITTEN_BY and word not in [*written, *early]:
                    early.append(word)
                before = word if word.startswith("-") else before
            written |= written_by(each)
    return early


def test_every_file_that_a_command_reads_is_written_by_a_command_before_it():
    assert read_too_early(readme_text()) == []


def test_a_file_that_is_read_before_a_command_writes_it_would_be_found():
    path = "outputs/a/tracecov_m.json"
    write, read = (
        "python Gradient_evaluation/run_tracecov.py --model x/m --save_json outputs/a",
        f"python plots/plot_tracecov.py {path} --out outputs/a.pdf",
    )
    assert read_too_early(f"```bash\n{write}\n{read}\n```\n") == []
    assert read_too_early(f"```bash\n{read}\n{write}\n```\n") == [path]
    other = write.replace("x/m", "x/n")  # the results of another model
    for reader in (read, f"make report RESULTS={path}"):
        assert read_too_early(f"```bash\n{other}\n{reader}\n```\n") == [path]


def test_what_make_runs_is_checked_too():
    for target in ("demo", "test", "test-all", "report"):
        lines = make_lines([target])
        assert lines
        for command in lines:
            check(command)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [command for command in COMMANDS if command.words[0] in ("ray", "wandb") or "verl.model_merger" in command.words],
    ids=lambda command: command.text[:60],
)
def test_flags_of_other_peoples_programs_are_in_their_help(command):
    words = command.words[: command.words.index("--")] if "--" in command.words else command.words
    n = 3 if words[:2] == ["ray", "job"] else 4 if words[0] == "python" else 2
    program = shutil.which(words[0], path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None or words[0] == "python" and not find_spec("verl"):
        pytest.skip(f"{words[0]} is not installed")
    program = sys.executable if words[0] == "python" else program
    flags = {word.partition("=")[0] for word in words[n:] if word.startswith("--")}
    assert flags <= help_flags([program, *words[1:n]])


# Small numbers for a command that begins so; the last of two flags counts. None: not run, with the reason.
TOKENS = ["--max_new_tokens", "8"]
SCRIPTS = "Gradient_evaluation/"
ADDED = {
    "data/make_arithmetic.py --n 40": ["--n", "4"],
    "data/make_arithmetic.py --seed 7 --n 40": [],  # the prompts of tests/cases/verl
    "data/make_arithmetic.py": ["--n", "4"],
    SCRIPTS + "calculate_oracle_v.py --model RUN_DIR": [*TOKENS, "--n_oracle", "4"],
    SCRIPTS + "calculate_oracle_v.py": TOKENS,
    SCRIPTS + "sample_with_vllm.py": [*TOKENS, "--n", "8"],
    SCRIPTS + "run_tracecov.py --from_grams": [],
    SCRIPTS + "run_tracecov.py --rollouts": [*TOKENS, "--K_list", "4", "8"],
    SCRIPTS + "run_tracecov.py": [*TOKENS, "--K_list", "4", "8", "--M", "4"],
    "Policy_Optimization/train_group_sizes.py": [
        *TOKENS,
        *"--steps 1 --seeds 1 --group_sizes 2 4 --budget 8 --n_train 4 --n_held_out 2 --eval_samples 2 --overwrite".split(),
    ],
    "Policy_Optimization/train_with_trl.py": None,  # needs trl; test_group_size_trl.py runs it
    "Policy_Optimization/track_checkpoints.py": None,  # measures that training; test_track_checkpoints.py runs it
    "plots/plot_over_steps.py": None,  # draws that training
    "data/prepare_parquet.py jsonl": ["--val_size", "1"],
    "data/prepare_parquet.py gsm8k": ["--train", "gsm8k.jsonl", "--val", "gsm8k.jsonl"],
    "Policy_Optimization/grpo_train.sh --dry_run --model data/tiny_model": (
        "--budget 16 --update_budget 16 --gpus_per_node 1".split()
    ),
    "Policy_Optimization/grpo_train.sh": ["--dry_run"],
    "Policy_Optimization/sweep_group_size.sh --recommended": ["--dry_run", "--seeds", "0"],
    "Policy_Optimization/sweep_group_size.sh": ["--dry_run", "--seeds", "0", "--group_sizes", "32"],
    "plots/": [],
    "-m pytest": None,  # the tests themselves
    "-m ruff": None,  # make test runs it before them
    "tests/bench.py": None,  # hours, and a model of 270 MB
    "tests/bench_until.py": None,  # half an hour
    "tests/bench_precision.py": None,  # ten minutes
    "tests/verl_cpu/train_for_real.py": None,  # half an hour, and an environment of 4 GB
    "-m verl.model_merger": None,  # needs a checkpoint of several GPUs
}
VLLM = str(ROOT / "tests" / "vllm_stand_in")
NOT_RUN = ("ray", "wandb", "pip", "jupyter", "export")  # a cluster, an account, an installation: checked above


def added(command: Command) -> list[str] | None:
    words = command.words[1:]
    text = " ".join(torchrun_flags(words)[1] if command.words[0] == "torchrun" else words)
    for beginning, flags in ADDED.items():
        if text.startswith(beginning):
            return flags
    raise AssertionError(f"{command.text}: in no category of ADDED; say there how it is run or why not")


def test_every_command_is_run_or_has_a_reason_not_to_be():
    with pytest.raises(AssertionError, match="in no category"):
        added(only("python Gradient_evaluation/new_script.py --x"))
    for command in COMMANDS:
        expanded = make_lines(command.words[1:]) if command.words[0] == "make" else [command]
        for each in expanded:
            if each.words[0] not in NOT_RUN:
                added(each)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository with stand-ins for what the README takes from the hub, and for a sweep's training."""
    from datasets import Dataset, DatasetDict

    from data.make_arithmetic import make_problems, write_jsonl
    from Policy_Optimization.sweep import make_plan, write_manifest

    copy = tmp_path_factory.mktemp("readme") / "copy"
    left_out = shutil.ignore_patterns(".git", ".venv*", "outputs", "__pycache__", ".hypothesis", ".pytest_cache")
    shutil.copytree(ROOT, copy, ignore=left_out)
    for name in ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "RUN_DIR/model"):
        shutil.copytree(ROOT / "data" / "tiny_model", copy / name)
    shutil.copytree(ROOT / "data" / "tiny_model", copy / "CHECKPOINT")
    save_optimizer(copy / "CHECKPOINT")
    problems = make_problems(3, seed=3)
    DatasetDict({"train": Dataset.from_list(problems)}).save_to_disk(copy / "Kyleyee" / "arithmetic-test")
    questions = [
        {"question": f"{row['prompt'][0]['content']} ({number})", "answer": f"So.\n#### {row['ground_truth']}"}
        for number, row in enumerate(make_problems(40, seed=4))
    ]
    write_jsonl(questions, copy / "gsm8k.jsonl")
    sweep, budgets = copy / "outputs" / "sweep", {"budget": 1024, "update_budget": 256, "epoch_budget": 128}
    write_manifest(sweep, make_plan(sweep, [32], [0], budgets))
    logs = copy / "outputs" / "sweep" / "g32_seed0" / "logs"
    logs.mkdir(parents=True)
    (logs / "metrics_1.jsonl").write_text('{"step": 5, "data": {"val-core/openai/gsm8k/acc/mean@1": 0.5}}\n')
    return copy


def save_optimizer(checkpoint: Path) -> None:
    """The state of torch's AdamW after a step of random gradients."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.save(optimizer.state_dict(), checkpoint / "optimizer.pt")


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run_it(command: Command, copy: Path) -> None:
    flags = added(command)
    if flags is None:
        return
    if command.words[0] == "bash" and not find_spec("verl"):
        return
    words = [sys.executable if re.search("python$", word) else word for word in command.words]
    if words[0] == "torchrun":  # two processes of this machine, whatever the README's machine has
        launcher = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
        words = [sys.executable, *launcher, *torchrun_flags(words[1:])[1]]
    done = subprocess.run(
        [*words, *flags],
        cwd=copy,
        capture_output=True,
        text=True,
        env={**environment(), **command.variables, **({"PYTHONPATH": VLLM} if "sample_with_vllm" in command.text else {})},
    )
    assert done.returncode == 0, f"{command.text}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"


@pytest.mark.slow
def test_the_readme_run_from_its_first_command_to_its_last(copy):
    text = readme_text()
    ran = 0
    for command in [command for block in code_blocks(text, "bash") for command in commands_in(block)]:
        if "--recommended" in command.words:  # measured above, but with TOKENS and on a few prompts
            results = copy / command.words[command.words.index("--recommended") + 1]
            found = json.loads(results.read_text())
            assert "group_size_law" in found
            results.write_text(json.dumps({**found, "law": None, "group_size_law": {"G_star": 32.0}}))
        for each in make_lines(command.words[1:]) if command.words[0] == "make" else [command]:
            if each.words[0] not in NOT_RUN:
                run_it(each, copy)
                ran += 1
    assert ran >= 15
    for command in readme_commands(text):  # those of the running text that write something
        if "make_arithmetic.py" in command.text and "few_shot" in command.text:
            run_it(command, copy)
    for snippet in code_blocks(text, "python"):
        done = subprocess.run([sys.executable, "-c", snippet], cwd=copy, capture_output=True, text=True, env=environment())
        assert done.returncode == 0 and done.stdout, done.stderr


def test_python_snippets_compile_and_name_files_of_the_demo():
    snippets = code_blocks(readme_text(), "python")
    assert snippets
    for snippet in snippets:
        compile(snippet, "README.md", "exec")
        for path in re.findall(r'"(outputs/[^"]+)"', snippet):
            assert re.fullmatch(r"outputs/demo/tracecov_tiny_model(_K(4|8|16|32|64)_detailed)?\.json", path)
