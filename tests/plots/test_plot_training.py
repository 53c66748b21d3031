"""The figure shows the accuracies of the logs, with Student's intervals over seeds."""

import json

import pytest

from Gradient_evaluation.errors import UserError
from plots.plot_training import main, mean_over_seeds, plot_by_group_size, plot_training, summarise
from plots.training_logs import Run, load_runs
from Policy_Optimization.sweep import make_plan, write_manifest

METRIC = "val-core/arithmetic/acc/mean@1"
CURVE = {0: 0.25, 5: 0.5, 10: 0.625}


def jsonl(path, curve=CURVE, metric=METRIC, start=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{"step": 1 + start, "data": {"critic/score/mean": 0.1, "text": "x"}}]
    lines += [{"step": step, "data": {metric: value, "val-aux/a/reward/mean@1": 0.0}} for step, value in curve.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_verls_jsonl_is_read_up_to_a_torn_last_line(tmp_path):
    path = jsonl(tmp_path / "qwen_g16_seed3.jsonl")
    path.write_text(path.read_text() + '{"step": 15, "da')
    assert load_runs(path) == [Run("qwen_g16_seed3", 16, 3, CURVE)]


def test_a_run_without_accuracy_shows_its_reward(tmp_path):
    path = jsonl(tmp_path / "g16_seed3.jsonl", metric="val-core/custom/reward/mean@4")
    runs = load_runs(path)
    assert runs == [Run("g16_seed3", 16, 3, CURVE, "reward")]
    _, axes = plot_training(runs)
    assert [ax.get_ylabel() for ax in axes] == ["validation reward", "final validation reward"]


def test_attempts_are_joined_and_the_later_one_counts(tmp_path):
    run = tmp_path / "a run"
    jsonl(run / "logs" / "metrics_1.jsonl", {0: 0.25, 5: 0.4, 10: 0.9})  # killed at 11; the checkpoint was of step 5
    jsonl(run / "logs" / "metrics_2.jsonl", {5: 0.5}, start=5)  # VERL validates where it continues
    jsonl(run / "logs" / "metrics_10.jsonl", {10: 0.625}, start=9)
    overrides = ["actor_rollout_ref.rollout.n=8", "data.seed=2", "a=b=c"]
    (run / "run.json").write_text(json.dumps({"overrides": overrides}))
    assert load_runs(run) == [Run("a run", 8, 2, CURVE)]


def test_a_sweep_gives_the_runs_that_have_validated(tmp_path):
    write_manifest(tmp_path, make_plan(tmp_path, [4, 8], [0, 1], {"budget": 1024, "update_budget": 256, "epoch_budget": 128}))
    for name in ("g4_seed0", "g4_seed1", "g8_seed0"):
        jsonl(tmp_path / name / "logs" / "metrics_1.jsonl")
    runs = load_runs(tmp_path / "manifest.json")
    assert [(run.group_size, run.seed) for run in runs] == [(4, 0), (4, 1), (8, 0)] and runs == load_runs(tmp_path)


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


def test_one_seed_has_no_interval_no_size_no_right_panel():
    _, axes = plot_training([Run("g4", 4, 0, CURVE), Run("g8", 8, 0, CURVE)])
    assert not axes[0].collections and len(axes) == 2
    _, axes = plot_training([Run("mine", None, None, CURVE)])
    assert len(axes) == 1 and axes[0].lines[0].get_label() == "mine"
    with pytest.raises(UserError, match="no run has a known G"):
        plot_by_group_size([Run("mine", None, None, CURVE)])


def test_only_shared_steps_are_averaged():
    runs = [Run("a", 4, 0, {0: 0.2, 5: 0.4, 10: 0.6}), Run("b", 4, 1, {0: 0.2, 5: 0.6})]
    summary = summarise(runs)
    assert list(summary["accuracy_by_step"]["G = 4"]) == [0, 5]
    assert summary["warnings"] == ["the runs end at different steps (5, 10)"]


def test_the_last_validations_are_averaged():
    runs = [Run("a", 4, 0, CURVE)]
    (_, axes), summary = plot_training(runs, last=2), summarise(runs, last=2)
    assert summary["accuracy_by_group_size"][4][0] == pytest.approx(0.5625) and "last 2" in axes[1].get_ylabel()


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


def test_a_run_folder_without_a_jsonl_is_one_line(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "console_1.log").write_text(f"step:5 - {METRIC}:0.5\n")
    with pytest.raises(UserError, match="has no logs/metrics_.*; train with .file. in trainer.logger"):
        load_runs(tmp_path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("absent.jsonl", None, "no such file or folder"),
        ("a.jsonl", "not json\n{}\n", "a.jsonl, line 1: no line of VERL's file logger"),
        ("a.jsonl", '{"step": 1, "data": {"x": 1}}\n', "holds no validation accuracy"),
        ("a.jsonl", json.dumps({"step": 1, "data": {METRIC: 1, "val-core/b/acc/mean@1": 1}}) + "\n", "with --metric"),
        ("a.log", "step:5 - x:1", "is no JSONL of VERL's file logger; train with .file. in trainer.logger"),
        ("results.json", "{}", "give the manifest.json of a sweep"),
        ("manifest.json", '{"runs": [{"run_dir": "a"}]}', "is no manifest of sweep_group_size.sh; remove it"),
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
