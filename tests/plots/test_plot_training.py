"""The figure shows the accuracies of the logs, with Student's intervals over seeds, whatever form the logs have."""

import csv
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from Gradient_evaluation.errors import UserError
from plots.plot_training import main, mean_over_seeds, plot_by_group_size, plot_by_step, plot_training, summarise
from plots.style import new_figure
from plots.training_logs import Run, load_runs
from Policy_Optimization.sweep_manifest import make_plan

SCRIPT = Path(__file__).resolve().parents[2] / "plots" / "plot_training.py"
METRIC = "val-core/arithmetic/acc/mean@1"
CURVE = {0: 0.25, 5: 0.5, 10: 0.625}


def jsonl(path, curve=CURVE, metric=METRIC, start=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"step": 1 + start, "data": {"critic/score/mean": 0.1, "text": "x"}}]
    lines += [{"step": step, "data": {metric: value, "val-aux/a/reward/mean@1": 0.0}} for step, value in curve.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_verls_jsonl_log_is_read_and_a_torn_last_line_is_left_out(tmp_path):
    path = jsonl(tmp_path / "qwen_g16_seed3.jsonl")
    path.write_text(path.read_text() + '{"step": 15, "da')
    assert load_runs(path) == [Run("qwen_g16_seed3", 16, 3, CURVE)]


def test_verls_console_log_is_read_as_ray_prints_it(tmp_path):
    path = tmp_path / "console.log"
    path.write_text(
        "\x1b[36m(TaskRunnerV1 pid=1)\x1b[0m ('Initial validation metrics: ...')\n"
        f"\x1b[36m(TaskRunnerV1 pid=1)\x1b[0m step:0 - {METRIC}:np.float64(0.25)\n"
        f"(TaskRunnerV1 pid=1) step:5 - actor/pg_loss:-1.5e-05 - {METRIC}:0.5 - training/epoch:0\n"
        "timing_s/step:5 is no step line\n"
        f"step:10 - {METRIC}:0.625"
    )
    assert load_runs(path) == [Run("console", None, None, CURVE)]


def test_the_attempts_of_a_run_folder_are_joined_and_the_later_one_counts(tmp_path):
    run = tmp_path / "a run"
    jsonl(run / "logs" / "metrics_1.jsonl", {0: 0.25, 5: 0.4, 10: 0.9})  # killed at 11; the checkpoint was of step 5
    jsonl(run / "logs" / "metrics_2.jsonl", {5: 0.5}, start=5)  # VERL validates where it continues
    jsonl(run / "logs" / "metrics_10.jsonl", {10: 0.625}, start=9)
    overrides = ["actor_rollout_ref.rollout.n=8", "data.seed=2", "a=b=c"]
    (run / "run.json").write_text(json.dumps({"overrides": overrides}))
    assert load_runs(run) == [Run("a run", 8, 2, CURVE)]


def test_a_sweep_gives_its_sizes_and_seeds_and_leaves_out_runs_without_a_validation(tmp_path):
    make_plan(tmp_path, [4, 8], [0, 1], {"budget": 1024, "update_budget": 256, "epoch_budget": 128})
    for name in ("g4_seed0", "g4_seed1", "g8_seed0"):
        jsonl(tmp_path / name / "logs" / "metrics_1.jsonl")
    runs = load_runs(tmp_path / "manifest.json")
    assert [(run.group_size, run.seed) for run in runs] == [(4, 0), (4, 1), (8, 0)] and runs == load_runs(tmp_path)


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def test_a_wandb_chart_export_holds_a_run_in_each_column(tmp_path):
    names = ["qwen_grpo_g8_seed0", "qwen - b_g16_seed1"]
    header = ["Step"] + [f"{name} - {METRIC}{end}" for name in names for end in ("", "__MIN", "__MAX")]
    rows = [header, *[[s, v, v, v, v / 2, v / 2, v / 2] for s, v in CURVE.items()], [15, "", "", "", 0.5, 0.5, 0.5]]
    first, second = load_runs(write_csv(tmp_path / "chart.csv", rows))
    assert first == Run(names[0], 8, 0, CURVE)
    assert second == Run(names[1], 16, 1, {0: 0.125, 5: 0.25, 10: 0.3125, 15: 0.5})


def test_a_wandb_history_export_is_one_run(tmp_path):
    rows = [["_step", "actor/lr", METRIC, "name"], [0, "", 0.25, "x"], [1, 1e-6, "", "x"], [5, 1e-6, 0.5, "x"]]
    rows.append([10, "NaN", 0.625, ""])
    assert load_runs(write_csv(tmp_path / "history_g4.csv", rows)) == [Run("history_g4", 4, None, CURVE)]


def test_a_real_offline_run_of_wandb_is_read(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    for name in ("WANDB_API_KEY", "WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)
    run = wandb.init(
        mode="offline",
        dir=str(tmp_path),
        project="test",
        id="g8_seed1",
        settings=wandb.Settings(silent=True, x_disable_stats=True),
    )
    for step in range(11):
        run.log({"padding": "x" * 40_000, **({METRIC: CURVE[step]} if step in CURVE else {})}, step=step)  # many blocks
    run.finish()
    wandb.teardown()  # the service may still be writing when finish returns
    assert [each.accuracy for each in load_runs(tmp_path / "wandb")] == [CURVE]
    file = next(tmp_path.glob("wandb/*run-*/*.wandb"))
    torn = tmp_path / "torn.wandb"
    torn.write_bytes(file.read_bytes()[: file.stat().st_size // 2])  # of a killed run
    assert set(load_runs(torn)[0].accuracy.items()) < set(CURVE.items())


def test_intervals_are_students_t():
    assert mean_over_seeds([0.4]) == (0.4, None, 1)
    assert mean_over_seeds([0.5, 0.7]) == pytest.approx((0.6, 12.706 * 0.1, 2), abs=1e-3)
    scipy = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    for n in (3, 10, 16, 17, 40):
        values = [0.1 * (i % 7) for i in range(n)]
        low, high = scipy.t.interval(0.95, n - 1, sum(values) / n, scipy.sem(values))
        assert mean_over_seeds(values).half_width == pytest.approx((high - low) / 2, rel=2e-3)


def test_the_panels_show_means_and_intervals_over_seeds():
    runs = [Run(f"g{g}_seed{s}", g, s, {0: 0.2, 5: 0.3 + 0.1 * s + g / 100}) for g in (8, 4) for s in (0, 1)]
    figure, (left, right) = plot_training(runs)
    summary = summarise(runs)
    assert [line.get_label() for line in left.lines] == ["G = 4 (2 seeds)", "G = 8 (2 seeds)"]
    assert list(left.lines[0].get_ydata()) == pytest.approx([0.2, 0.39]) and len(left.collections) == 2
    line, _, bars = right.containers[0].lines
    assert list(line.get_xdata()) == [4, 8] and list(line.get_ydata()) == pytest.approx([0.39, 0.43])
    half = 12.706 * 0.05
    assert bars[0].get_segments()[0][:, 1] == pytest.approx([0.39 - half, 0.39 + half], abs=1e-3)
    assert summary["accuracy_by_group_size"][8] == pytest.approx([0.43, half, 2], abs=1e-3)
    figure.draw_without_rendering()


def test_one_seed_has_no_interval_and_unknown_sizes_have_no_right_panel():
    _, axes = plot_training([Run("g4", 4, 0, CURVE), Run("g8", 8, 0, CURVE)])
    assert not axes[0].collections and len(axes) == 2
    _, axes = plot_training([Run("mine", None, None, CURVE)])
    assert len(axes) == 1 and axes[0].lines[0].get_label() == "mine"


def test_only_steps_all_seeds_have_are_averaged_and_unequal_ends_are_said():
    runs = [Run("a", 4, 0, {0: 0.2, 5: 0.4, 10: 0.6}), Run("b", 4, 1, {0: 0.2, 5: 0.6})]
    summary = summarise(runs)
    assert list(summary["accuracy_by_step"]["G = 4"]) == [0, 5]
    assert summary["warnings"] == ["the runs end at different steps (5, 10)"]


def test_the_last_validations_are_averaged():
    runs = [Run("a", 4, 0, CURVE)]
    (_, axes), summary = plot_training(runs, last=2), summarise(runs, last=2)
    assert summary["accuracy_by_group_size"][4][0] == pytest.approx(0.5625) and "last 2" in axes[1].get_ylabel()


def test_each_panel_is_drawn_on_a_given_ax():
    figure, (first, second, third) = new_figure(3)
    runs = [Run("a", 4, 0, CURVE), Run("b", 8, 0, CURVE)]
    assert plot_by_step(runs, ax=third) == (figure, third) and plot_by_group_size(runs, ax=first) == (figure, first)
    assert third.lines and first.containers and not second.lines
    figure, axes = plot_training(runs, axes=[second, third])
    assert figure is first.get_figure() and second.lines
    with pytest.raises(UserError, match="no run has a known G"):
        plot_by_group_size([Run("mine", None, None, CURVE)])


def test_runs_of_train_group_sizes_are_read(tmp_path):
    path = tmp_path / "group_sizes.json"
    one = {"G": 4, "seed": 1, "train_reward": [0.25, 0.5], "held_out_reward": 0.75}
    path.write_text(json.dumps({"start": 0.125, "runs": {"G4_seed1": one}}))
    assert load_runs(path) == [Run("G4_seed1", 4, 1, {0: 0.125, 2: 0.75})]
    with pytest.raises(UserError, match="have held_out_reward alone"):
        load_runs(path, "loss")
    path.write_text(json.dumps({"start": 0.125, "runs": {}}))
    with pytest.raises(UserError, match="no run in it is finished yet"):
        load_runs(path)


def test_a_seed_given_twice_is_refused():
    with pytest.raises(UserError, match="G = 4: two runs have the same seed"):
        plot_training([Run("a", 4, 0, CURVE), Run("b", 4, 0, CURVE)])


def test_the_command_writes_figure_and_numbers(tmp_path, capsys):
    source = jsonl(tmp_path / "q_g4_seed0.jsonl")
    out, numbers = tmp_path / "new" / "figure.pdf", tmp_path / "n.json"
    main([str(source), "--out", str(out), "--save_json", str(numbers)])
    assert out.read_bytes().startswith(b"%PDF") and capsys.readouterr().out.strip() == str(out)
    assert json.loads(numbers.read_text())["accuracy_by_group_size"] == {"4": [0.625, None, 1]}


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("absent.jsonl", None, "no such file or folder"),
        ("a.jsonl", "not json\n{}\n", "a.jsonl, line 1: no line of VERL's file logger"),
        ("a.jsonl", '{"step": 1, "data": {"x": 1}}\n', "holds no validation accuracy"),
        ("a.jsonl", json.dumps({"step": 1, "data": {METRIC: 1, "val-core/b/acc/mean@1": 1}}) + "\n", "with --metric"),
        ("a.log", "nothing here", "holds no validation accuracy"),
        ("a.csv", "", "has no column Step"),
        ("a.csv", "Step,run - loss\n1,2\n", "has no column of a validation accuracy"),
        ("a.wandb", "text", "is no offline file of W&B"),
        ("results.json", "{}", "give the manifest.json of a sweep"),
        ("folder", {}, "is no run folder"),
    ],
)
def test_bad_input_is_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    if isinstance(content, dict):
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=message) as error:
        load_runs(path)
    assert "\n" not in str(error.value)


def test_the_script_exits_2_with_one_line(tmp_path):
    command = [sys.executable, SCRIPT, "absent", "--out", "f.pdf"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_blocks_of_an_offline_file_end_on_their_boundaries(tmp_path):
    """A record split over blocks, and a block whose last bytes are too few for a header."""
    from plots.training_logs import _leveldb_records

    def piece(kind, payload):
        return struct.pack("<IHB", 0, len(payload), kind) + payload

    first = piece(1, b"a" * (32768 - 7 - 7 - 5))  # leaves 5 bytes of the first block
    data = b":W&B\xe1\xbe\x00" + first + b"\0" * 5 + piece(2, b"b" * 32761) + piece(4, b"c") + piece(1, b"d")
    assert list(_leveldb_records(data, 7)) == [first[7:], b"b" * 32761 + b"c", b"d"]
