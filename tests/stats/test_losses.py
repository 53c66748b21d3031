"""The losses of TRL and VERL by name: each is the gradient of the installed trainer's own code on one update batch."""

import numpy as np
import pytest
import torch

from Gradient_evaluation.runs.kl import KL_TYPES
from Gradient_evaluation.stats.clip import kind_of
from Gradient_evaluation.stats.estimators import ALIASES, ESTIMATORS, update_weights
from Gradient_evaluation.stats.kl import kl_weights

VERL = [name for name in [*ESTIMATORS, *ALIASES] if name.startswith("verl_")]
LONGEST = 7


def test_an_entry_with_a_baseline_of_its_own_has_no_weights_of_an_update():
    with pytest.raises(ValueError, match="oracleV: its baseline does not come from the rewards of the group"):
        update_weights("oracleV", np.zeros((1, 2)), np.ones((1, 2)))


@pytest.mark.parametrize("name", [*VERL, "dapo", "grpo", "opo"])
def test_the_weights_of_an_update_are_verls(name):
    """VERL's advantages and its policy loss on-policy, with the gradient by the token's log-prob."""
    pytest.importorskip("verl", reason="verl is not installed")
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    n, K, generator = 4, 3, np.random.default_rng(0)
    rewards = np.array([[1, 0, 0.5], [0, 0, 1], [1, 1, 1], [0.2, 0.7, 0.1]])
    lengths = generator.integers(1, LONGEST + 1, (n, K))
    mask = (torch.arange(LONGEST) < torch.tensor(lengths.reshape(-1, 1))).double()
    rows = torch.zeros_like(mask)
    rows[:, 0] = torch.tensor(rewards.reshape(-1))
    groups = np.repeat(np.arange(n), K)
    if name in ("grpo", "opo"):
        advantage = {"grpo": core_algos.compute_rloo_outcome_advantage, "opo": core_algos.compute_opo_outcome_advantage}[name]
        advantages, mode = advantage(rows, mask, groups)[0], "seq-mean-token-sum"
    else:
        advantages, _ = core_algos.compute_grpo_outcome_advantage(
            rows, mask, groups, norm_adv_by_std_in_grpo=not name.endswith("_none")
        )
        mode = {"dapo": "token-mean", "verl_default": "token-mean"}.get(name)
        mode = mode or name.removeprefix("verl_").removesuffix("_none").replace("_", "-")
    if name == "dapo":  # its trainer drops the groups of equal rewards before the loss
        kept = torch.tensor((rewards != rewards[:, :1]).any(1).repeat(K))
        advantages, mask = advantages[kept], mask[kept]
    log_probs = torch.zeros_like(mask, requires_grad=True)
    config = ActorConfig(strategy="fsdp", rollout_n=K, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=mode)
    loss, _ = core_algos.compute_policy_loss_vanilla(log_probs.detach(), log_probs, advantages, mask, mode, config)
    loss.backward()
    found = torch.zeros(n * K, LONGEST, dtype=torch.float64)
    found[kept if name == "dapo" else slice(None)] = -n * K * log_probs.grad
    # the constants without which these are given
    constant = {"token-sum": n * K, "seq-mean-token-sum-norm": 1 / LONGEST}.get(mode, 1.0)
    weights = torch.tensor(update_weights(name, rewards, lengths).reshape(-1, 1) * constant)
    whole = (torch.arange(LONGEST) < torch.tensor(lengths.reshape(-1, 1))).double()
    torch.testing.assert_close(found, weights * whole, rtol=1e-6, atol=1e-9)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """TRL's GRPOTrainer of a tiny model, 3 prompts with 4 completions each in a step."""
    trl = pytest.importorskip("trl", reason="trl is not installed")
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(tmp_path_factory.mktemp("trl"))
    model = AutoModelForCausalLM.from_pretrained("data/tiny_model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained("data/tiny_model")
    arguments = trl.GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=12,
        num_generations=4,
        max_completion_length=LONGEST,
        use_cpu=True,
        report_to=[],
        temperature=1.0,
        beta=0.0,
        bf16=False,
        disable_dropout=True,
        seed=0,
    )

    def reward(completions, **_):
        return [float(len(text) % 3) / 2 if not text.startswith("1") else 1.0 for text in completions]

    rows = Dataset.from_dict({"prompt": ["12+7=", "3+4=", "5+31="]})
    made = trl.GRPOTrainer(model=model, reward_funcs=reward, args=arguments, train_dataset=rows, processing_class=tokenizer)
    made.current_gradient_accumulation_steps = 1
    return made


def test_every_loss_of_trl_is_there():
    names = {f"trl_{loss}{end}" for loss in ("grpo", "bnpo", "dapo", "dr_grpo") for end in ("", "_batch", "_none")}
    assert names == {name for name in [*ESTIMATORS, *ALIASES] if name.startswith("trl_")}


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_the_gradient_of_an_update_is_trls(trainer, scale_rewards):
    """GRPOTrainer samples, rewards and takes the gradient; the same from one autograd pass per continuation."""
    model, prompts = trainer.model, trainer.train_dataset["prompt"]
    trainer.scale_rewards = scale_rewards
    model.train()
    batch = trainer._generate_and_score_completions([{"prompt": prompt} for prompt in prompts for _ in range(4)])
    texts = trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    rewards = np.array(trainer.reward_funcs[0](texts)).reshape(3, 4)
    mask = batch["completion_mask"]
    lengths = mask.sum(1).numpy().reshape(3, 4)
    assert len(set(rewards.ravel().tolist())) > 1 and len(set(lengths.ravel().tolist())) > 1
    scores = []
    for i in range(12):
        model.zero_grad()
        trainer._get_per_token_logps_and_entropies(
            model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)[i : i + 1],
            torch.cat([batch["prompt_mask"], mask], 1)[i : i + 1],
            mask.shape[1],
        )[0].mul(mask[i]).sum().backward()
        scores.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    for loss_type in ("grpo", "bnpo", "dapo", "dr_grpo"):
        name = f"trl_{loss_type}" + ("" if scale_rewards == "group" else f"_{scale_rewards}")
        trainer.loss_type = loss_type
        # bnpo divides by the tokens of the local batch, of which there are several: here each is a group
        parts = [batch] if loss_type != "bnpo" else [part(batch, range(4 * g, 4 * g + 4)) for g in range(3)]
        model.zero_grad()
        for each in parts:
            (trainer._compute_loss(model, each) / len(parts)).backward()
        found = -torch.cat([p.grad.flatten() for p in model.parameters()])
        constant = 1 / LONGEST if loss_type == "dr_grpo" else 1.0
        weights = torch.tensor(update_weights(name, rewards, lengths).ravel() * constant / 12, dtype=torch.float32)
        expected = weights @ torch.stack(scores)
        assert float((found - expected).norm() / expected.norm()) < 1e-5, name


@pytest.mark.parametrize("kl_type", ["k3", "k3+", "k2"])
def test_the_weights_of_the_kl_term_are_verls(kl_type):
    """The gradient of VERL's penalty by the token's log-prob."""
    pytest.importorskip("verl", reason="verl is not installed")
    from verl.trainer.ppo.core_algos import kl_penalty

    own = torch.linspace(-3, -0.1, 7, dtype=torch.float64, requires_grad=True)
    ref = torch.linspace(-1, -4, 7, dtype=torch.float64)  # VERL cuts k3 off at 10
    kl_penalty(own, ref, kl_type).sum().backward()
    rho = np.exp((ref - own).detach().numpy())
    assert KL_TYPES["k3" if kl_type == "k3" else "k2"](rho) == pytest.approx(own.grad.numpy(), rel=1e-12)


@pytest.mark.parametrize("kl_type", ["k3", "k2"])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo"])
def test_the_gradient_with_a_kl_term_is_trls(trainer, loss_type, kl_type, monkeypatch):
    """The KL term adds -beta sum u r, r = sum_t w_t grad log pi_t, to the gradient of a batch; k2 is TRL's default."""
    assert trainer.args.use_bias_correction_kl
    monkeypatch.setattr(trainer.args, "use_bias_correction_kl", kl_type == "k2")
    model, beta = trainer.model, 0.4
    monkeypatch.setattr(trainer, "scale_rewards", "batch")
    monkeypatch.setattr(trainer, "loss_type", loss_type)
    model.train()
    batch = trainer._generate_and_score_completions(
        [{"prompt": prompt} for prompt in trainer.train_dataset["prompt"] for _ in range(4)]
    )
    mask, inputs = batch["completion_mask"], torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention, width = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1), batch["completion_mask"].shape[1]

    def log_probs(i):
        return trainer._get_per_token_logps_and_entropies(model, inputs[i : i + 1], attention[i : i + 1], width)[0][0]

    own = torch.stack([log_probs(i).detach() for i in range(12)])
    batch["ref_per_token_logps"] = own + 0.5 * torch.randn(own.shape, generator=torch.Generator().manual_seed(0))
    r = []
    for i in range(12):
        model.zero_grad()
        rho = (batch["ref_per_token_logps"][i] - own[i]).exp().numpy()
        (torch.tensor(KL_TYPES[kl_type](rho)) * mask[i] * log_probs(i)).sum().backward()
        r.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    parts = [batch] if loss_type != "bnpo" else [part(batch, range(4 * g, 4 * g + 4)) for g in range(3)]
    gradients = []
    for coefficient in (0.0, beta):
        monkeypatch.setattr(trainer, "beta", coefficient)
        model.zero_grad()
        for each in parts:
            (trainer._compute_loss(model, each) / len(parts)).backward()
        gradients.append(-torch.cat([p.grad.flatten() for p in model.parameters()]))
    name, lengths = f"trl_{loss_type}_batch", mask.sum(1).numpy().reshape(3, 4)
    weights = kl_weights(kind_of(ALIASES.get(name, name)), lengths).ravel() / 12
    weights = weights / lengths.mean() if loss_type == "dapo" else weights / (LONGEST if loss_type == "dr_grpo" else 1)
    expected = -beta * torch.tensor(weights, dtype=torch.float32) @ torch.stack(r)
    found = gradients[1] - gradients[0]
    assert float((found - expected).norm() / expected.norm()) < 1e-3  # a difference of two float32 gradients


def part(batch, rows):
    """These rows of TRL's inputs."""
    return {key: value[list(rows)] if getattr(value, "ndim", 0) else value for key, value in batch.items()}
