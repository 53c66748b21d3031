"""Where a stop string ends a continuation: at the token that completes it, whatever is decoded after it."""

import json

import numpy as np
import pytest
import torch
from scripts import call, oracle
from tiny_models import enumerable_policy, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from Gradient_evaluation import run_tracecov
from Gradient_evaluation.errors import UserError
from Gradient_evaluation.sampling.generate import sample_continuations
from Gradient_evaluation.sampling.law import SamplingLaw, uniforms
from Gradient_evaluation.sampling.stop_strings import StopStrings, check_stop_strings, decode_text, stop_token_ids

BYTES = ("<eos>", "<0x31>", "<0x0A>", "<0xE2>", "<0x82>", "<0xAC>", "<|im_end|>", "<0x32>", "a")


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, as Llama 2, Mistral and Phi-3 fall back to; a run of bytes that is no UTF-8 becomes U+FFFD."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(BYTES)}, unk_token="<0x31>"))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    return fast


def draw(model, tokenizer, law, n=300, batch_size=64):
    return sample_continuations(model, tokenizer, [1, 3], uniforms(0, "oracle", 7, 0, n, law.max_new_tokens), law, batch_size)


def first_stop(tokenizer, tokens, stop, eos=(0,)):
    """(length, text before) by decoding every prefix whole; None if no string stops before an end of sequence."""
    for length in range(1, len(tokens) + 1):
        if tokens[length - 1] in eos:
            return None
        text = tokenizer.decode(list(tokens[:length]), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if starts := [text.find(string) for string in stop if string in text]:
            return length, text[: min(starts)]
    return None


@pytest.mark.parametrize("stop", [("\n",), ("11", "2\n")])
def test_a_row_ends_at_its_first_stop_whatever_bytes_follow(stop):
    model, tokenizer = enumerable_policy(vocabulary=9), byte_fallback_tokenizer()
    assert "\n" not in decode_text(tokenizer, [2, 3]) and "\n" in decode_text(tokenizer, [2])  # what follows undoes it
    free = draw(model, tokenizer, SamplingLaw(temperature=4.0, max_new_tokens=12))
    stopped = draw(model, tokenizer, SamplingLaw(temperature=4.0, max_new_tokens=12, stop=stop))
    hits = 0
    for a, b in zip(free, stopped):
        expected = first_stop(tokenizer, a.tokens, stop)
        if expected is None:
            assert a == b
        else:
            hits += 1
            assert (b.tokens, b.text, b.ended) == (a.tokens[: expected[0]], expected[1], False)
    assert hits > 5
    assert stopped == draw(model, tokenizer, SamplingLaw(temperature=4.0, max_new_tokens=12, stop=stop), batch_size=7)


@pytest.mark.parametrize("every", [1, 3, 4, 200])
def test_how_often_one_looks_changes_no_stop(every):
    tokenizer, stop = byte_fallback_tokenizer(), ("a12\n", "\u20ac21", "2a1a")
    rows = np.random.default_rng(0).choice(9, p=[0.004, 0.2, 0.1, 0.1, 0.1, 0.1, 0.096, 0.15, 0.15], size=(60, 200))
    rows[:20, :150] = np.tile([3, 4, 5], 50)  # a long run of whole characters, cut by the tail inside one
    found = StopStrings(tokenizer, stop, (0,), len(rows))
    ended = torch.zeros(len(rows), dtype=torch.bool)
    for length in [*range(every, 200, every), 200]:
        found.look(torch.from_numpy(rows[:, :length]), ended)
    expected = {i: hit for i, row in enumerate(rows.tolist()) if (hit := first_stop(tokenizer, row, stop))}
    assert found.found == expected and len(expected) > 5
    assert ended.nonzero().squeeze(-1).tolist() == sorted(expected)


def test_a_special_token_as_stop_string_ends_as_eos_does():
    model, tokenizer = enumerable_policy(vocabulary=9), byte_fallback_tokenizer()
    assert stop_token_ids(tokenizer, ("<|im_end|>", "\n")) == (6,)
    law = SamplingLaw(max_new_tokens=8, stop=("<|im_end|>",))
    free, stopped = draw(model, tokenizer, SamplingLaw(max_new_tokens=8)), draw(model, tokenizer, law)
    hits = 0
    for a, b in zip(free, stopped):
        end = a.tokens.index(6) + 1 if 6 in a.tokens else len(a.tokens)
        hits += 6 in a.tokens
        assert b.tokens == a.tokens[:end] and b.ended == (b.tokens[-1] in (0, 6))
        assert b.text == decode_text(tokenizer, b.tokens)
    assert hits > 20


def test_a_special_token_among_text_is_refused_with_the_fix():
    tokenizer = byte_fallback_tokenizer()
    check_stop_strings(tokenizer, ("<|im_end|>", "\n", "1"))
    with pytest.raises(UserError, match=r"<\|im_end\|> is a special token.*alone"):
        check_stop_strings(tokenizer, ("<|im_end|>\n",))


def test_an_empty_stop_string_is_refused_by_both_scripts(policy, problems, tmp_path, capsys):
    for code, _, err in (
        oracle(policy, problems, tmp_path / "a", "--stop", "", capsys=capsys),
        call(run_tracecov, "--oracle_table", "t", "--stop", "1", "", capsys=capsys),
    ):
        assert code == 2 and len(err.splitlines()) == 1 and "--stop" in err and "empty" in err
    assert not (tmp_path / "a").exists()


def test_a_stop_string_never_found_is_refused_at_once(tmp_path, capsys):
    folder, data = tmp_path / "four", tmp_path / "data.jsonl"
    enumerable_policy(vocabulary=4, seed=6).save_pretrained(folder)
    tiny_tokenizer(("<eos>", "1", "2", "3")).save_pretrained(folder)
    data.write_text(json.dumps({"prompt": "13", "ground_truth": 1}) + "\n")
    (folder / "model.safetensors").write_bytes(b"short")
    code, _, err = oracle(folder, data, tmp_path / "a", "--stop", "1<eos>", capsys=capsys)
    assert code == 2 and "special token" in err.splitlines()[-1]
