"""The arithmetic problems are right, distinct and reproducible; the shipped model can be measured on them."""

import ast
import json
import operator
import random
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from data import train_tiny_model
from data.make_arithmetic import KINDS, MAX_PROBLEMS, STYLES, WORKED_EXAMPLES, make_problems
from Gradient_evaluation.sampling.generate import sample_groups
from Gradient_evaluation.sampling.law import SamplingLaw
from Gradient_evaluation.utils import format_prompt

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "data" / "make_arithmetic.py"
MODEL = ROOT / "data" / "tiny_model"

OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: Fraction}
FORMS = {
    "two_step": r"\d+ [+-] \d+ [+-] \d+",
    "three_step": r"\d+ [+-] \d+ [+-] \d+ [+-] \d+",
    "multiplication": r"\d+ \* \d+",
    "division": r"\d+ / \d+",
    "parentheses": r"(\d+|\(\d+ [+-] \d+\)) [+-] \(\d+ [+-] \d+\)",
}


def exact_value(expression):
    """The value of an expression in rational arithmetic, so that an inexact division shows."""

    def value(node):
        if isinstance(node, ast.Constant):
            return node.value
        return OPERATIONS[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(expression, mode="eval").body)


def expressions(rows):
    """The question of every row: the last line of its prompt, without the equals sign."""
    prompts = [row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"] for row in rows]
    assert all(prompt.endswith(" =") for prompt in prompts)
    return [prompt.splitlines()[-1].removesuffix(" =") for prompt in prompts]


def run_script(*arguments, script=SCRIPT, cwd=None):
    command = [sys.executable, str(script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


# the problems


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_every_ground_truth_is_the_value_of_its_expression(seed):
    rows = make_problems(2000, seed)
    for row, expression in zip(rows, expressions(rows)):
        assert type(row["ground_truth"]) is int
        assert exact_value(expression) == row["ground_truth"], expression
    assert min(row["ground_truth"] for row in rows) < 0


def test_worked_examples_are_right_and_show_each_kind_once():
    assert all(exact_value(expression) == answer for expression, answer in WORKED_EXAMPLES)
    kinds = [kind for expression, _ in WORKED_EXAMPLES for kind in KINDS if re.fullmatch(FORMS[kind], expression)]
    assert sorted(kinds) == sorted(KINDS)


def test_expressions_have_the_documented_forms_and_numbers():
    rows = make_problems(3000, 3)
    for row, expression in zip(rows, expressions(rows)):
        assert re.fullmatch(FORMS[row["kind"]], expression), (row["kind"], expression)
        numbers = [int(number) for number in re.findall(r"\d+", expression)]
        if row["kind"] == "multiplication":
            assert 2 <= numbers[0] <= 99 and 2 <= numbers[1] <= 20
        elif row["kind"] == "division":
            assert 2 <= row["ground_truth"] <= 99 and 2 <= numbers[1] <= 20
        else:
            assert all(1 <= number <= 99 for number in numbers)


@pytest.mark.parametrize("n", [1, 4, 5, 7, 500, 503])
def test_kinds_are_as_even_as_the_number_allows(n):
    counts = Counter(row["kind"] for row in make_problems(n, 2))
    counted = [counts[kind] for kind in KINDS]
    assert sum(counted) == n and max(counted) - min(counted) <= 1


def test_the_largest_set_holds_every_product_and_quotient_once():
    found, examples = expressions(make_problems(MAX_PROBLEMS, 1)), {expression for expression, _ in WORKED_EXAMPLES}
    assert len(set(found)) == MAX_PROBLEMS and not set(found) & examples
    asked = set(found) | examples
    assert {f"{a} * {b}" for a in range(2, 100) for b in range(2, 21)} <= asked
    assert {f"{a * b} / {b}" for a in range(2, 100) for b in range(2, 21)} <= asked


def test_a_seed_decides_the_problems_and_a_smaller_set_is_their_beginning():
    assert make_problems(500, 7)[:42] == make_problems(42, 7)
    assert expressions(make_problems(100, 7)) != expressions(make_problems(100, 8))


@pytest.mark.parametrize("style", STYLES)
def test_a_plain_prompt_is_the_text_of_the_user_message(style):
    for chat, plain in zip(make_problems(60, 0, style), make_problems(60, 0, style, plain=True)):
        assert chat == {**plain, "prompt": [{"role": "user", "content": plain["prompt"]}]}


def test_few_shot_prompts_add_the_worked_examples_alone():
    for zero, few in zip(make_problems(60, 0, plain=True), make_problems(60, 0, "few_shot", plain=True)):
        assert {**zero, "prompt": None} == {**few, "prompt": None}
        instruction, question = zero["prompt"].split("\n")
        first, *worked, last = few["prompt"].split("\n")
        assert (first, last) == (instruction, question)
        assert worked == [f"{expression} = {answer}" for expression, answer in WORKED_EXAMPLES]


# the command


@pytest.mark.parametrize("flags, form", [("--plain", ("zero_shot", True)), ("--style few_shot", ("few_shot", False))])
def test_the_command_writes_exactly_the_rows_of_make_problems(tmp_path, flags, form):
    out = tmp_path / "new" / "folder" / "set.jsonl"
    done = run_script("--n", 12, "--seed", 3, "--out", out, *flags.split())
    assert done.returncode == 0 and done.stderr == ""
    assert len(done.stdout.splitlines()) == 1 and str(out) in done.stdout
    assert [json.loads(line) for line in out.read_text().splitlines()] == make_problems(12, 3, *form)
    assert list(out.parent.iterdir()) == [out]


BAD = ["--n 0", "--n many", f"--n {MAX_PROBLEMS + 1}", "--seed -1", "--style one_shot", "--sty few_shot", "--out folder"]


@pytest.mark.parametrize("arguments", [*map(str.split, BAD), ["--out", "file/below.jsonl"], ["--out", ""]], ids=" ".join)
def test_bad_input_is_exit_code_2_one_line_and_nothing_written(tmp_path, arguments):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    done = run_script(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"


# the training script


def test_the_shared_prefix_changes_no_loss_and_no_gradient():
    torch.manual_seed(0)
    rng = random.Random(4)
    tokenizer = train_tiny_model.make_tokenizer()
    model = train_tiny_model.make_model(tokenizer).double()
    for _ in range(6):
        prompts, answers = train_tiny_model.draw_batch(rng, tokenizer, 5)
        model.zero_grad()
        loss = train_tiny_model.answer_loss(model, prompts, answers, tokenizer.pad_token_id)
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        whole = torch.zeros((), dtype=torch.float64)
        for prompt, answer in zip(prompts, answers):
            logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
            whole = whole + torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
        whole = whole / sum(map(len, answers))
        whole.backward()
        assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
        for shared, parameter in zip(gradients, model.parameters()):
            assert torch.allclose(shared, parameter.grad, rtol=1e-4, atol=1e-7)


def test_training_answers_are_right_and_end_with_the_end_token():
    tokenizer = train_tiny_model.make_tokenizer()
    rng = random.Random(0)
    for _ in range(40):
        for prompt, answer in zip(*train_tiny_model.draw_batch(rng, tokenizer, 3)):
            assert answer[-1] == tokenizer.eos_token_id and answer.count(tokenizer.eos_token_id) == 1
            text = tokenizer.decode(prompt).removesuffix("<|im_end|>\n<|im_start|>assistant\n")
            question = text.splitlines()[-1].removesuffix(" =")
            assert re.findall(r"-?\d+", tokenizer.decode(answer)) == [str(exact_value(question))]


def test_a_seed_decides_the_weights_of_the_trained_model(tmp_path, capsys):
    outs = [tmp_path / name for name in ("first", "second", "other")]
    for out, seed in zip(outs, ("3", "3", "4")):
        flags = ["--steps", "2", "--batch_size", "4", "--seed", seed, "--out", str(out), "--quiet"]
        train_tiny_model.main(flags)
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 3 and printed.err == ""
    weights = [(out / "model.safetensors").read_bytes() for out in outs]
    assert weights[0] == weights[1] != weights[2]
    assert {path.name for path in outs[0].iterdir()} == {path.name for path in MODEL.iterdir()}


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--learning_rate", "0"], ["--out", "file"]])
def test_bad_input_to_training_is_exit_code_2_and_one_line(tmp_path, arguments):
    (tmp_path / "file").write_text("kept")
    done = run_script(*arguments, script=ROOT / "data" / "train_tiny_model.py", cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "kept"


# the shipped model


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def test_the_model_folder_is_small_and_holds_no_pickle():
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 3_000_000
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".jinja"}


def test_the_model_is_a_small_qwen2_with_tied_weights(model):
    config = model.config
    assert config.model_type == "qwen2" and config.tie_word_embeddings
    assert config.hidden_size // config.num_attention_heads >= 32
    assert config.max_position_embeddings >= 1024
    assert 400_000 < model.num_parameters() < 550_000


def test_the_generation_config_only_names_tokens(tokenizer):
    stored = json.loads((MODEL / "generation_config.json").read_text())
    assert stored.keys() <= {"eos_token_id", "pad_token_id", "transformers_version"}
    assert (stored["eos_token_id"], stored["pad_token_id"]) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


@pytest.mark.parametrize(
    "text", ["".join(map(chr, range(32, 127))), "\n", " a  b \n\n c ", "don't . , ! ?", "= -19.", "3 × 4 ≤ é 日本 🙂", ""]
)
def test_decoding_gives_back_any_text_exactly(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_ascii_characters_and_special_tokens_are_one_token(tokenizer, model):
    text = "12 + (7 - 5) =\n"
    assert len(tokenizer(text)["input_ids"]) == len(text)
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert len(tokenizer(token)["input_ids"]) == 1
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token_id != tokenizer.eos_token_id
    assert len(tokenizer) == model.config.vocab_size


def test_the_chat_template_renders_turns_and_the_next_one(tokenizer):
    messages = [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}]
    turns = "<|im_start|>user\n1 + 1 =<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == turns
    opened = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert opened == "<|im_start|>user\n1 + 1 =<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(opened)["input_ids"] == tokenizer.apply_chat_template(
        messages[:1], add_generation_prompt=True, return_dict=False
    )


def sampled_texts(model, tokenizer, rows, samples, seed):
    """``samples`` continuations of every row at temperature 1 → one list of texts per row."""
    prompts, law = [format_prompt(tokenizer, row["prompt"]) for row in rows], SamplingLaw(top_p=0.95)
    u = np.random.default_rng(seed).random((len(rows), samples, law.max_new_tokens))
    return [[each.text for each in group] for group in sample_groups(model, tokenizer, prompts, u, law)]


def share_right(texts, ground_truth):
    """The share of texts whose last integer is the answer."""
    return sum(re.findall(r"-?\d+", text)[-1:] == [str(ground_truth)] for text in texts) / len(texts)


@pytest.mark.parametrize("style", STYLES)
def test_the_chance_of_a_right_answer_differs_between_prompts(model, tokenizer, style):
    rows = make_problems(40, 0, style)
    texts = sampled_texts(model, tokenizer, rows, samples=40, seed=1)
    values = torch.tensor([share_right(group, row["ground_truth"]) for group, row in zip(texts, rows)])
    assert (values < 0.35).float().mean() >= 0.2, values
    assert (values > 0.75).float().mean() >= 0.2, values


def test_sampled_answers_differ_in_wording_as_well_as_in_number(model, tokenizer):
    texts = sum(sampled_texts(model, tokenizer, make_problems(10, 0), samples=32, seed=2), [])
    wordings = Counter(re.sub(r"-?\d+", "N", text) for text in texts)
    assert all(wordings[wording] >= 0.05 * len(texts) for wording in ("N", "= N", "The answer is N."))
