"""The launcher's settings: flags, variables and defaults, and what they become in VERL's configuration."""

import pytest
from launches import needs_verl, values

from Policy_Optimization.overrides import hydra_value, verl_overrides
from Policy_Optimization.settings import read_settings


@pytest.mark.parametrize("size, prompts, mini, epochs", [(4, 256, 64, 32), (32, 32, 8, 4), (128, 8, 2, 1)])
def test_the_published_budgets_fix_batch_mini_batch_and_epochs(size, prompts, mini, epochs):
    made = values(verl_overrides(read_settings(["--group_size", str(size)], {})))
    assert made["data.train_batch_size"] == str(prompts)
    assert made["actor_rollout_ref.actor.ppo_mini_batch_size"] == str(mini)
    assert made["trainer.total_epochs"] == str(epochs)
    assert float(made["actor_rollout_ref.actor.optim.lr"]) == 1e-6
    assert made["data.max_prompt_length"] == made["data.max_response_length"] == "512"
    assert made["actor_rollout_ref.actor.use_kl_loss"] == "False" and made["actor_rollout_ref.rollout.name"] == "vllm"


def test_the_two_estimators_are_verls_and_the_papers():
    made = values(verl_overrides(read_settings([], {})))
    assert (made["algorithm.adv_estimator"], made["algorithm.norm_adv_by_std_in_grpo"]) == ("grpo", "True")
    made = values(verl_overrides(read_settings(["--estimator", "paper"], {})))
    assert made["algorithm.adv_estimator"] == "rloo"
    assert made["actor_rollout_ref.actor.loss_agg_mode"] == "seq-mean-token-sum"


def test_the_papers_estimator_is_unnormalised_in_verl():
    """rloo gives (r - mean) G / (G - 1): the leave-one-out advantage, not divided by the group's std."""
    needs_verl()
    import numpy as np
    import torch
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    rewards = torch.zeros(8, 3)
    rewards[:3, -1] = 1.0
    group = {"token_level_rewards": rewards, "response_mask": torch.ones(8, 3), "index": np.array(["x"] * 8)}
    advantage, _ = get_adv_estimator_fn("rloo")(**group)
    assert advantage[0, 0].item() == pytest.approx(0.7143, abs=1e-4)
    assert advantage[7, 0].item() == pytest.approx(-0.4286, abs=1e-4)


def test_a_flag_beats_a_variable_and_both_beat_the_default():
    settings = read_settings(["--learning_rate", "3e-6"], {"LEARNING_RATE": "1e-5", "GROUP_SIZE": "16", "SEED": " "})
    assert (settings.learning_rate, settings.group_size, settings.seed) == (3e-6, 16, 0)
    assert [settings.origin[name] for name in ("learning_rate", "group_size", "seed")] == ["flag", "environment", "default"]


def test_what_follows_the_dashes_comes_last_and_unchanged():
    passed = ["trainer.save_freq=7", "+a.b='x y'", "--not-a-flag", "--"]
    assert verl_overrides(read_settings(["--save_freq", "3", "--", *passed], {}))[-4:] == passed


SIGNS = ["a b", "it's", 'say "x"', "back\\", '\\"', "a=b,c", "[x]", "(a)", "a:b", "~/x", "a$b", "#x", "", "ünï"]


@pytest.mark.parametrize("text", [*SIGNS, "null", "TRUE", "1e5", "plain/path_1.parquet", "/abs/a-b.c"])
def test_hydra_reads_any_text_back_as_it_was(text):
    pytest.importorskip("hydra", reason="hydra is not installed")
    from hydra.core.override_parser.overrides_parser import OverridesParser

    value = OverridesParser.create().parse_override("key=" + hydra_value(text)).value()
    assert value == text and isinstance(value, str)
