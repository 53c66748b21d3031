"""format_prompt on tiny tokenizers built here: one BOS, no EOS, and templates of every temper."""

import numpy as np
import pytest
from chat_templates import BOS_TEMPLATE, CHAT, EOS, PLAIN_TEMPLATE, USER, shown, tiny_tokenizer

from Gradient_evaluation.errors import UserError
from Gradient_evaluation.utils import format_prompt, normalise_prompt

REFUSES_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
REFUSES_ALL = "{{ raise_exception('roles must alternate') }}"
BROKEN_TEMPLATE = "{{ messages[0]['content'].no_such_method() }}"


SYSTEM = [{"role": "system", "content": "Be brief."}, *USER]


@pytest.mark.parametrize(
    "kind, adds, template, prompt, expected",
    [
        ("string, BOS from the post-processor", "<s> $A", None, "2+3?", "<s>2+3?"),
        ("string that brings its BOS", "<s> $A", None, "<s>2+3?", "<s>2+3?"),
        ("string that brings its BOS twice", "<s> $A", None, "<s><s>2+3?", "<s>2+3?"),
        ("string, a BOS exists but is not used", "", None, "2+3?", "2+3?"),
        ("string, no template applied to it", "<s> $A", BOS_TEMPLATE, "2+3?", "<s>2+3?"),
        ("string, its white space kept", "", None, " 2+3=\n", " 2+3=\n"),
        ("string, EOS from the post-processor", "<s> $A </s>", None, "2+3?", "<s>2+3?"),
        ("string, EOS only", "$A </s>", None, "2+3?", "2+3?"),
        ("string, two tokens before it", "<x> <s> $A </s>", None, "2+3?", "<x><s>2+3?"),
        ("template renders the BOS", "", BOS_TEMPLATE, USER, "<s>" + CHAT),
        ("tokenizer adds the BOS", "<s> $A", PLAIN_TEMPLATE, USER, "<s>" + CHAT),
        ("both", "<s> $A", BOS_TEMPLATE, USER, "<s>" + CHAT),
        ("neither", "", PLAIN_TEMPLATE, USER, CHAT),
        ("both, and EOS", "<s> $A </s>", BOS_TEMPLATE, USER, "<s>" + CHAT),
        ("system role taken", "", PLAIN_TEMPLATE, SYSTEM, "[system]Be brief.\n" + CHAT),
        ("no template", "<s> $A", None, SYSTEM, "<s>System: Be brief.\n\nUser: 2+3?\n\nAssistant:"),
        ("system refused", "", REFUSES_SYSTEM + PLAIN_TEMPLATE, SYSTEM, "[user]Be brief.\n\n2+3?\n[assistant]"),
        ("system alone refused", "", REFUSES_SYSTEM + PLAIN_TEMPLATE, SYSTEM[:1], "[user]Be brief.\n[assistant]"),
    ],
)
def test_prompt_has_one_bos_no_eos_and_nothing_lost(kind, adds, template, prompt, expected):
    assert shown(tiny_tokenizer(adds, template), prompt) == expected


def test_bos_that_is_also_the_eos_is_no_prefix():
    assert shown(tiny_tokenizer("$A </s>", bos=EOS), "2+3?") == "2+3?"


@pytest.mark.parametrize("template", [REFUSES_ALL, BROKEN_TEMPLATE], ids=["raises", "broken"])
@pytest.mark.parametrize("prompt", [USER, SYSTEM], ids=["user", "system"])
def test_template_that_refuses_a_prompt_is_one_line(template, prompt):
    with pytest.raises(UserError, match="chat template of .* refuses this prompt") as caught:
        format_prompt(tiny_tokenizer(template=template), prompt)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "kind, prompt",
    [
        ("array of dicts, as pandas reads parquet", np.array(USER, dtype=object)),
        ("tuple", tuple(USER)),
        ("extra keys", [{"role": "user", "content": "2+3?", "name": None, "tool_calls": None}]),
        ("text parts", [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}]}]),
        ("text parts in an array", [{"role": "user", "content": np.array([{"type": "text", "text": "2+3?"}])}]),
    ],
)
def test_messages_come_in_any_sequence(kind, prompt):
    assert normalise_prompt(prompt) == USER
    assert shown(tiny_tokenizer(template=PLAIN_TEMPLATE), prompt) == CHAT


@pytest.mark.parametrize(
    "kind, prompt, message",
    [
        ("null", None, "the prompt is null"),
        ("empty string", "", "empty"),
        ("blank string", " \n", "empty"),
        ("number", 3, "int"),
        ("bytes", b"2+3?", "bytes"),
        ("single message, not in a list", USER[0], "dict"),
        ("no messages", [], "empty"),
        ("zero-dimensional array", np.array("2+3?"), "the prompt is"),
        ("list of strings", ["2+3?"], "str where a message"),
        ("no content", [{"role": "user"}], "role user without content"),
        ("null content", [{"role": "user", "content": None}], "role user without content"),
        ("blank content", [{"role": "user", "content": " "}], "empty"),
        ("no role", [{"content": "2+3?"}], "without a role"),
        ("image part", [{"role": "user", "content": [{"type": "image", "url": "x"}]}], "only text"),
        ("number as content", [{"role": "user", "content": 5}], "only text"),
    ],
)
def test_malformed_prompt_is_refused_with_one_line(kind, prompt, message):
    with pytest.raises(UserError, match=message) as caught:
        format_prompt(tiny_tokenizer(template=PLAIN_TEMPLATE), prompt)
    assert "\n" not in str(caught.value)


def test_prompt_of_which_no_token_is_made_is_refused():
    with pytest.raises(UserError, match="no token"):
        format_prompt(tiny_tokenizer(template="{{ '' }}"), USER)
