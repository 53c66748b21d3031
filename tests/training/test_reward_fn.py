"""VERL's reward is the evaluation's reward: same cases, loaded as VERL loads it, from any folder, in threads."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.utils import REWARDS
from Policy_Optimization.reward_fn import DATA_SOURCES, choose_reward, compute_score, extract_answer

ROOT = Path(__file__).resolve().parents[2]
REWARD_FILE = ROOT / "Policy_Optimization" / "reward_fn.py"
FILES = [ROOT / f"tests/cases/{name}.jsonl" for name in ("reward_integer", "reward_integer_2")]
CASES = [json.loads(line) for path in FILES for line in path.read_text().splitlines()]
MATH_CASES = [(r"so \boxed{\frac{2}{4}}", "0.5"), (r"\boxed{3}", "4"), ("no answer", "4"), (r"$x^2+1$", "x^2+1")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["kind"])
def test_training_scores_each_case_as_the_evaluation_does(case):
    text = case["text"].replace("TEXT_OF_9000_DIGITS_7", "7" * 9000)
    if case["reward"] == "error":
        with pytest.raises(UserError):
            compute_score("arithmetic", text, case["gold"])
        return
    for gold in (case["gold"], str(case["gold"])):  # parquet holds text
        result = compute_score(data_source="arithmetic", solution_str=text, ground_truth=gold, extra_info={})
        assert result["score"] == result["acc"] == case["reward"] == REWARDS["integer"].score(text, case["gold"])


@pytest.mark.parametrize("text, gold", MATH_CASES)
def test_training_scores_math_as_the_evaluation_does(text, gold):
    assert compute_score("lighteval/MATH", text, gold)["score"] == REWARDS["math"].score(text, gold)


@pytest.mark.parametrize(
    "text, reward, expected",
    [
        ("so 12 + 7 = 19.", "integer", "19"),
        ("no number", "integer", ""),
        ("so 10-2", "integer", "2"),
        ("so 10-2", "last_integer", "-2"),
        ("no number", "last_integer", ""),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", "math", r"\frac{1}{2}"),
        ("it is\n#### 72", "math", "72"),
        ("72 in all", "math", "72"),
        ("", "math", ""),
        (r"<think>\boxed{4}", "math", ""),
        (r"<think>\boxed{4}</think> \boxed{5}", "math", "5"),
        ("<think> 4", "integer", ""),
    ],
)
def test_the_extracted_answer_is_text_always(text, reward, expected):
    assert extract_answer(text, reward) == expected
    assert compute_score("x", text, "72", {"reward": reward})["pred"] == expected


def test_keyword_beats_row_beats_data_source():
    assert choose_reward("openai/gsm8k").names == ("integer",)
    assert choose_reward("openai/gsm8k", {"reward": "math"}).names == ("math",)
    assert choose_reward("openai/gsm8k", {"reward": "math"}, "integer").names == ("integer",)
    assert set(DATA_SOURCES.values()) <= set(REWARDS)


def test_an_unknown_data_source_or_reward_names_the_fix():
    with pytest.raises(UserError, match="data_source 'poetry'.*prepare_parquet.py"):
        compute_score("poetry", "x", "1")
    with pytest.raises(UserError, match="'style'.*integer or math"):
        compute_score("poetry", "x", "1", {"reward": "style"})


def test_keywords_of_verls_and_numpy_values_are_taken():
    extra = {"index": np.int64(3), "num_turns": np.int32(2), "rollout_reward_scores": {}}
    assert compute_score(np.str_("arithmetic"), "= 4", np.str_("4"), extra, reward_router_address="x")["score"] == 1.0


def test_it_scores_in_worker_threads_at_once():
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: compute_score("lighteval/MATH", rf"\boxed{{{n % 3}}}", "1"), range(24)))
    assert [result["score"] for result in results] == [float(n % 3 == 1) for n in range(24)]


def test_it_finds_the_repository_from_its_own_path(tmp_path):
    """Ray workers start in another folder and load the file by path, under a made-up module name."""
    code = (
        "import importlib.util as u; s = u.spec_from_file_location('made_up', r'%s'); m = u.module_from_spec(s)\n"
        "s.loader.exec_module(m); print(m.compute_score('arithmetic', '= 4', '4')['score'])"
    )
    done = subprocess.run([sys.executable, "-c", code % REWARD_FILE], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "1.0", done.stderr


def verl_reward(**changes):
    pytest.importorskip("verl", reason="verl is not installed")
    from omegaconf import OmegaConf
    from verl.trainer.ppo.reward import get_custom_reward_fn

    custom = {"path": str(REWARD_FILE), "name": "compute_score", **changes}
    return get_custom_reward_fn(OmegaConf.create({"reward": {"custom_reward_function": custom}}))


def test_verls_own_loader_gives_the_same_scores():
    score = verl_reward()
    for case in CASES[:10]:
        if case["reward"] != "error":
            given = dict(data_source="arithmetic", solution_str=case["text"], ground_truth=str(case["gold"]))
            assert score(**given, extra_info={})["score"] == case["reward"]
    assert verl_reward(reward_kwargs={"reward": "math"})("poetry", r"\boxed{0.5}", r"\frac12")["score"] == 1.0


def test_verls_validation_metrics_take_the_extra_keys():
    """acc becomes the core metric of the data source; the answers in pred are voted on, not averaged."""
    pytest.importorskip("verl", reason="verl is not installed")
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    texts = ["= 4", "= 4", "= 5", "none"]
    results = [compute_score("arithmetic", text, "4") for text in texts]
    infos = {key: [result[key] for result in results] for key in results[0]}
    metrics = process_validation_metrics(["arithmetic"] * 4, ["a", "a", "b", "b"], infos)["arithmetic"]
    assert metrics["acc"]["mean@2"] == 0.5 and "pred" not in metrics
    assert metrics["acc"]["maj@2/mean"] == pytest.approx(0.5)
