"""--optimizer_state: a trainer's second moments by the names of the parameters, and results in their metric."""

import pytest
import torch
from safetensors.torch import save_file
from scripts import RESULTS, from_grams, one_line_error, read, tracecov
from tiny_models import tiny_model

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.models import load_model
from Gradient_evaluation.runs.optimizer_state import digest_of, second_moments

CPU = torch.device("cpu")
SMALL = ("--K_list", 4, "--M", 4, "--block_size", 8)


class Flags:
    adam_step = adam_beta2 = adam_eps = None

    def __init__(self, path, **flags):
        self.optimizer_state = str(path)
        vars(self).update(flags)


def trained(model, folder, **settings):
    """A Hugging Face Trainer after three steps, and the checkpoint that it wrote."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 40, (6,), generator=generator) for _ in range(6)]
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        save_steps=3,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        adam_beta2=0.99,
        weight_decay=0.1,
        disable_tqdm=True,
        **settings,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows])
    trainer.train()
    return trainer, folder / "checkpoint-3"


def check(found, model, optimizer):
    """Every parameter has the v that the trainer's own optimizer holds of it, corrected for three steps."""
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert set(found) == set(names)
    inner = getattr(optimizer, "optimizer", optimizer)
    for name, p in names.items():
        v = inner.state[p]["exp_avg_sq"]
        assert torch.equal(found[name].v, v.cpu()) and v.any(), name
        assert found[name].correction == pytest.approx(1 - 0.99**3) and found[name].eps == 1e-8


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen2", "gpt2"])
def test_the_state_of_a_real_trainer_is_read_by_name(family, tied, tmp_path):
    model = tiny_model(family, dtype=torch.float32, tie_word_embeddings=tied)
    trainer, checkpoint = trained(model, tmp_path)
    for path in (checkpoint, checkpoint / "optimizer.pt"):
        check(second_moments(trainer.model, Flags(path)), trainer.model, trainer.optimizer)
    assert digest_of(Flags(checkpoint)) == digest_of(Flags(checkpoint / "optimizer.pt"))


def test_the_state_of_an_adapter_is_read_by_name(tmp_path):
    peft = pytest.importorskip("peft")
    base = tiny_model("qwen2", dtype=torch.float32)
    base.save_pretrained(tmp_path / "base")
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    trainer, checkpoint = trained(model, tmp_path)
    loaded = load_model(str(checkpoint), None, CPU, torch.float32)
    found = second_moments(loaded, Flags(checkpoint))
    assert set(found) == {name for name, p in loaded.named_parameters() if p.requires_grad}
    own = {name: trainer.optimizer.state[p]["exp_avg_sq"] for name, p in model.named_parameters() if p.requires_grad}
    save_file({name: v.contiguous() for name, v in own.items()}, tmp_path / "v.safetensors")  # by PEFT's names
    for path in (checkpoint, tmp_path / "v.safetensors"):
        found = second_moments(loaded, Flags(path))
        assert len(found) == len(own)
        assert all(torch.equal(found[name.removeprefix("base_model.model.")].v, v) for name, v in own.items())


def adam_of(model, order=None):
    """A step of torch's Adam over all parameters in this order."""
    names = order or [name for name, _ in model.named_parameters()]
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.Adam([parameters[name] for name in names], betas=(0.9, 0.95), eps=1e-6)
    for at, name in enumerate(names):
        parameters[name].grad = torch.full_like(parameters[name], float(at + 1))
    optimizer.step()
    return names, optimizer.state_dict()


def test_states_by_name_are_read_whatever_wraps_the_model(tmp_path):
    model = tiny_model("llama")
    names, state = adam_of(model)
    for wrapper in ("", "module.", "_fsdp_wrapped_module."):
        named = {f"{wrapper}{name}": state["state"][at] for at, name in enumerate(names)}
        groups = [{**state["param_groups"][0], "params": list(named)}]
        torch.save({"state": named, "param_groups": groups}, tmp_path / "optim.pt")
        found = second_moments(model, Flags(tmp_path / "optim.pt"))
        assert list(found) == names
        for at, name in enumerate(names):
            assert found[name].v.unique().tolist() == pytest.approx([0.05 * (at + 1) ** 2])
            assert (found[name].correction, found[name].eps) == (pytest.approx(0.05), 1e-6)
    torch.save(state, tmp_path / "numbered.pt")  # one group: the model's own order
    assert second_moments(model, Flags(tmp_path / "numbered.pt")).keys() == found.keys()
    state["param_groups"][0]["param_names"] = names[::-1]
    torch.save(state, tmp_path / "named.pt")
    assert second_moments(model, Flags(tmp_path / "named.pt"))[names[-1]].v.max() == pytest.approx(0.05)


def test_flags_say_what_a_safetensors_file_does_not(tmp_path):
    model = tiny_model("llama")
    path = tmp_path / "v.safetensors"
    save_file({name: torch.full_like(p, 0.25) for name, p in model.named_parameters()}, path)
    plain = second_moments(model, Flags(path))["model.norm.weight"]
    assert (plain.correction, plain.eps) == (1.0, 1e-8)
    flags = dict(adam_step=10, adam_beta2=0.95, adam_eps=0.0)
    told = second_moments(model, Flags(path, **flags))["model.norm.weight"]
    assert (told.correction, told.eps) == (pytest.approx(1 - 0.95**10), 0.0)
    assert digest_of(Flags(path)) != digest_of(Flags(path, **flags))


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda state: {"model": state}, "holds no optimizer state"),
        (lambda state: {**state, "state": {0: {"momentum_buffer": torch.ones(2)}}}, "no exp_avg_sq (it has momentum_buffer)"),
        (lambda state: {**state, "state": {0: {"state2": torch.ones(2, dtype=torch.uint8)}}}, "an 8-bit state"),
        (lambda state: {**state, "param_groups": [{**state["param_groups"][0], "params": [0, 1]}]}, "has 2 parameters in its"),
        (lambda state: step_zero(state), "a trainer that took no step"),
        (lambda state: negative(state), "negative or not finite"),
    ],
)
def test_what_is_no_state_of_this_model_is_one_line(spoil, message, tmp_path):
    model = tiny_model("llama")
    torch.save(spoil(adam_of(model)[1]), tmp_path / "optimizer.pt")
    with pytest.raises(UserError) as error:
        second_moments(model, Flags(tmp_path))
    assert message in str(error.value) and "\n" not in str(error.value) and "--optimizer_state" in str(error.value)


def step_zero(state):
    for each in state["state"].values():
        each["step"] = torch.tensor(0.0)
    return state


def negative(state):
    state["state"][3]["exp_avg_sq"].view(-1)[-1] = -1e-9
    return state


@pytest.mark.parametrize("name", ["optimizer.pt", "v.safetensors"])
def test_damaged_and_missing_files_are_one_line(name, tmp_path):
    with pytest.raises(UserError, match="there is no such file"):
        digest_of(Flags(tmp_path / name))
    (tmp_path / name).write_bytes(b"PK nonsense")
    with pytest.raises(UserError, match=f"--optimizer_state {tmp_path / name}: "):
        digest_of(Flags(tmp_path / name))


@pytest.fixture(scope="module")
def measured(policy, table, tmp_path_factory):
    """A run with D = 0.5 in every element, and v in a file of its own."""
    folder = tmp_path_factory.mktemp("metric")
    model = load_model(str(policy), None, CPU, torch.float64)
    save_file({name: torch.full_like(p, 0.25) for name, p in model.named_parameters()}, folder / "v.safetensors")
    more = ("--optimizer_state", folder / "v.safetensors", "--adam_eps", 0, "--estimators", "dr_grpo", "trl_grpo")
    assert tracecov(policy, table, folder / "out", *SMALL, *more)[0] == 0
    return folder


def test_results_in_a_metric_of_one_number_are_the_plain_ones_over_it(measured, tmp_path, capsys):
    assert from_grams(measured / "out" / "grams", tmp_path, "--K_list", 4, "--estimators", "dr_grpo", "trl_grpo")[0] == 0
    assert "in the metric of --optimizer_state" in capsys.readouterr().out
    for path in (measured / "out" / RESULTS, tmp_path / RESULTS):
        results = read(path)
        metric = results["optimizer_metric"]
        for name in ("naive", "grpo", "oracleV", "dr_grpo", "trl_grpo"):
            plain, scaled = results["estimators"][name], metric["estimators"][name]
            assert scaled["trace_cov"] == pytest.approx([2 * value for value in plain["trace_cov"]], rel=1e-9)
        for key in ("theta_norm_sq", "conditional_on_x", "signal_to_noise", "score_norm_sq", "on_policy_check", "reasons"):
            assert type(metric[key]) is type(results[key])
        law, plain = metric["group_size_law"], results["group_size_law"]
        for key in ("c1", "c2", "c3", "mean_theta_norm_sq"):
            assert law[key] == pytest.approx(2 * plain[key], rel=1e-5)
        assert law["G_star_at_least"] == pytest.approx(plain["G_star_at_least"], rel=1e-5)


def test_a_run_goes_on_with_the_same_state_only(measured, policy, table, tmp_path, capsys):
    more = (*SMALL, "--estimators", "dr_grpo", "trl_grpo")
    outcome = tracecov(policy, table, measured / "out", *more, capsys=capsys)
    one_line_error(outcome, "run.json", "optimizer_state")
    more = (*more, "--optimizer_state", measured / "v.safetensors")
    one_line_error(tracecov(policy, table, measured / "out", *more, capsys=capsys), "run.json", "--adam flags")
    code, out, _ = tracecov(policy, table, measured / "out", *more, "--adam_eps", 0, capsys=capsys)
    assert code == 0 and "nothing left to do" in out and "in the metric of" in out


def test_a_state_without_a_measured_parameter_stops_the_run(policy, table, tmp_path, capsys):
    model = load_model(str(policy), None, CPU, torch.float64)
    v = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    del v["transformer.ln_f.bias"]
    save_file(v, tmp_path / "v.safetensors")
    more = (*SMALL, "--optimizer_state", tmp_path / "v.safetensors")
    outcome = tracecov(policy, table, tmp_path / "out", *more, capsys=capsys)
    one_line_error(outcome, f"--optimizer_state {tmp_path / 'v.safetensors'}: 1 of the", "transformer.ln_f.bias", "--params")
    assert not list((tmp_path / "out").rglob("*.npz"))


def test_the_flags_of_adam_need_a_state(policy, table, tmp_path, capsys):
    outcome = tracecov(policy, table, tmp_path / "out", "--adam_eps", "1e-6", capsys=capsys)
    one_line_error(outcome, "--adam_eps: no effect without --optimizer_state")
