"""Train the tiny model that ships in data/tiny_model: a character-level policy for the arithmetic problems.

    python data/train_tiny_model.py      # the shipped weights, all flags at their defaults: 1,600 steps of
                                         # 128 problems, 885 s on one core of a shared AMD EPYC (AVX2)

Qwen2 architecture (rotary attention with biased q, k, v; tied embedding and head), 0.48 M parameters, one
token per ASCII character. Every step draws fresh problems from make_arithmetic.draw_problem, asks them in
one of the prompt forms (FORMS) and takes one step on the next-token loss of the answers alone. Answers are
worded in a few ways at random, so sampled ones differ in wording as well as in the number. Training stops
while the model knows most products and quotients and is unsure of sums: the demo needs prompts whose
probability of a right answer is near 0, near 1 and in between. The share of easy problems and the number of
steps were chosen for that spread. Over the first 200 zero-shot problems of seed 0 the mean
probability is 0.37; 67% of the prompts are below 0.35 and 28% above 0.75.

The training problems are random draws, so those with small numbers also occur in the evaluation sets; the
model is there to be measured, not to show that it generalises. The same seed, torch version, processor
type and --threads give the same weights; other thread counts change the rounding of sums.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from data.make_arithmetic import KINDS, draw_problem, write_prompt
from Gradient_evaluation.cli import Parser, integer, number, run
from Gradient_evaluation.runs.machine.files import one_line_errors

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # the names Qwen gives them
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# how often a training step uses (style, plain, wording of the answer); a plain prompt ends with "="
FORMS = {
    ("zero_shot", True, " {}"): 6,  # the shortest: most of the arithmetic is learned here
    ("few_shot", True, " {}"): 2,
    ("zero_shot", False, "{}"): 4,
    ("zero_shot", False, "= {}"): 3,
    ("zero_shot", False, "The answer is {}."): 3,
    ("few_shot", False, "{}"): 2,
    ("few_shot", False, "= {}"): 2,
    ("few_shot", False, "The answer is {}."): 2,
}


@dataclass(frozen=True)
class Settings:
    """The flags, by their names."""

    out: Path
    steps: int
    batch_size: int
    learning_rate: float
    seed: int
    threads: int
    quiet: bool


def make_tokenizer():
    """A Qwen2Tokenizer without merges: one token per byte of UTF-8, so one per ASCII character.

    AutoTokenizer builds this class for every Qwen2 model, whatever class its folder names, so a
    tokenizer of another make would be read back as something else. All 256 bytes are in the vocabulary:
    nothing is unknown and any (NFC) text comes back exactly.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    tokens = [PAD, START, END, *sorted(ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer):
    """A Qwen2ForCausalLM with random weights from torch's global generator, in float32."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config).float()


def draw_batch(rng: random.Random, tokenizer, size: int) -> tuple[list[list[int]], list[list[int]]]:
    """``size`` fresh problems in one random form of FORMS → (prompt ids, answer ids), END included.

    One form a step keeps the rows of a batch at similar lengths, which saves a third of the time.
    """
    style, plain, wording = rng.choices(list(FORMS), weights=list(FORMS.values()))[0]
    prompts, answers = [], []
    for _ in range(size):
        expression, value = draw_problem(rng, rng.choice(KINDS))
        prompt = write_prompt(expression, style, plain)
        if not plain:
            prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        prompts.append(prompt)
        answers.append(wording.format(value) + END)
    return tokenizer(prompts)["input_ids"], tokenizer(answers)["input_ids"]


def answer_loss(model, prompts: list[list[int]], answers: list[list[int]], pad: int) -> torch.Tensor:
    """Mean cross-entropy (nats per answer token) of the batch, a scalar with a gradient.

    The longest beginning that all prompts share (template, instruction, worked examples) runs once and its
    keys and values serve every row: the same numbers as running each row whole, at a fraction of the cost.
    """
    shared = len(os.path.commonprefix(prompts))
    length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers)) - shared
    ids = torch.full((len(prompts), length), pad)
    is_answer = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        start, end = len(prompt) - shared, len(prompt) - shared + len(answer)
        ids[row, :end] = torch.tensor(prompt[shared:] + answer)
        is_answer[row, start:end] = True
    prefix = torch.tensor([prompts[0][:shared]])
    cache = model.model(input_ids=prefix, use_cache=True).past_key_values
    cache.batch_repeat_interleave(len(prompts))
    # rows are padded on the right, so causal attention alone keeps padding out of what the loss reads
    hidden = model.model(input_ids=ids[:, :-1], past_key_values=cache, use_cache=True).last_hidden_state
    logits = model.lm_head(hidden[is_answer[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][is_answer[:, 1:]])


class Muon(torch.optim.Optimizer):
    """Momentum steps made orthogonal, for weight matrices (Jordan et al. 2024): learns in half AdamW's steps.

    The step of a (rows, columns) matrix is its momentum with every singular value brought near 1 by five
    Newton-Schulz iterations, times lr * 0.2 * sqrt(max(rows, columns)), the size of an AdamW step
    (Liu et al. 2025). torch.optim.Muon does this in bfloat16, which is slow on a CPU; this one in float32.
    """

    def __init__(self, matrices, lr: float, momentum: float = 0.95):
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for matrix in group["params"]:
                average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                update = matrix.grad.lerp(average, group["momentum"])
                wide = update if update.shape[0] <= update.shape[1] else update.T
                wide = wide / (wide.norm() + 1e-7)
                for _ in range(5):
                    square = wide @ wide.T
                    wide = 3.4445 * wide + (2.0315 * square @ square - 4.7750 * square) @ wide
                update = wide if update.shape[0] <= update.shape[1] else wide.T
                matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def train(model, tokenizer, settings: Settings) -> float:
    """Train in place; the rate warms up for 5% of the steps, then falls to 0 → mean loss of the last 50 steps.

    Muon for the weight matrices of the layers; AdamW for the embedding, the norms and the biases.
    """
    rng, steps, learning_rate = random.Random(settings.seed), settings.steps, settings.learning_rate
    matrices = [parameter for parameter in model.model.layers.parameters() if parameter.dim() == 2]
    chosen = set(map(id, matrices))
    others = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    optimizers = [
        Muon(matrices, learning_rate),
        torch.optim.AdamW(others, 0.4 * learning_rate, betas=(0.9, 0.98), weight_decay=0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / (0.05 * steps), 1 - step / steps))
        for optimizer in optimizers
    ]
    losses: list[float] = []
    model.train()
    hidden = True if settings.quiet else None  # None: where stderr is no terminal
    progress = tqdm(desc="training", total=steps * settings.batch_size, unit="problem", disable=hidden)
    for _ in range(steps):
        loss = answer_loss(model, *draw_batch(rng, tokenizer, settings.batch_size), tokenizer.pad_token_id)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules):
            optimizer.step()
            schedule.step()
        losses.append(loss.item())
        running = sum(losses[-50:]) / len(losses[-50:])
        progress.set_postfix(loss=f"{running:.3f}", refresh=False)
        progress.update(settings.batch_size)
    progress.close()
    model.eval()
    return running


def save(model, tokenizer, folder: Path) -> None:
    """Write model, tokenizer and a generation config that names the end and pad tokens and sets nothing else."""
    from transformers import GenerationConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def parse_args(arguments: Sequence[str] | None) -> Settings:
    default_out = Path(__file__).resolve().parent / "tiny_model"
    parser = Parser(prog="train_tiny_model.py", description="Train the tiny arithmetic model.")
    parser.add_argument("--out", type=Path, default=default_out, help="model folder (default data/tiny_model)")
    parser.add_argument("--steps", type=integer(1), default=1600, help="optimiser steps (default 1600)")
    parser.add_argument("--batch_size", type=integer(1), default=128, help="problems a step (default 128)")
    parser.add_argument("--learning_rate", type=number(0, low_included=False), default=8e-3, help="peak (default 8e-3)")
    parser.add_argument("--seed", type=integer(0), default=0, help="seed of weights and problems (default 0)")
    parser.add_argument("--threads", type=integer(1), default=1, help="CPU threads (default 1)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    return Settings(**vars(parser.parse_args(arguments)))


def main(arguments: Sequence[str] | None = None) -> None:
    settings = parse_args(arguments)
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    with one_line_errors(settings.out, "write"):
        settings.out.mkdir(parents=True, exist_ok=True)
        # on the same file system, so that each finished file can be moved into place in one step
        staging = tempfile.TemporaryDirectory(prefix=".training-", dir=settings.out)
    with staging:
        began = time.perf_counter()
        tokenizer = make_tokenizer()
        model = make_model(tokenizer)
        loss = train(model, tokenizer, settings)
        save(model, tokenizer, Path(staging.name))
        files = sorted(Path(staging.name).iterdir())
        size = sum(file.stat().st_size for file in files)
        for file in files:
            os.replace(file, settings.out / file.name)
    print(
        f"{model.num_parameters():,} parameters, {settings.steps} steps, last loss {loss:.3f} nats a token, "
        f"{time.perf_counter() - began:.0f} s, {size / 1e6:.2f} MB in {settings.out}"
    )


if __name__ == "__main__":
    run(main)
