"""What a chat template is given, and what it makes of messages.

    json_object(text)                       an argparse type: the value of --chat_template_kwargs
    plain_fields(message)                   the fields of a message beside role and content, in plain types
    tool_schemas(value)                     the column ``tools`` as a list of function schemas
    Chat(kwargs, date)                      what every prompt of a run is rendered with
    check_variables(tokenizer, kwargs)      UserError for a variable that the template does not read
    chat_of(tokenizer, kwargs, dates)       a Chat, its variables checked and its date pinned
    render(tokenizer, messages, tools, chat)
    verl_text(tokenizer, messages, kwargs)  the same as VERL renders a row of its parquet
    date_string(tokenizer, kwargs)          today's date as the template prints it, where a variable can stand for it

transformers passes a variable that the template does not read on without a word, and a template may print today's
date. The first is refused here by name, the second is the date that the run began with.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from Gradient_evaluation.errors import UserError

Messages = list[dict[str, Any]]
FLAG = "--chat_template_kwargs"
OURS = {  # what the flag may not set, and where it comes from
    "messages": "the column prompt",
    "tools": "the column tools",
    "add_generation_prompt": "the last message's role",
    "continue_final_message": "the last message's role",
    "strftime_now": "the clock",
}


class Chat(NamedTuple):
    """What a template is given beside messages and tools. date: in ISO form where the template prints the date."""

    kwargs: Mapping[str, Any] = {}
    date: str | None = None


PLAIN = Chat()


def json_object(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object, such as ``{"enable_thinking": false}``; empty text is {}."""
    try:
        value = json.loads(text) if text.strip() else {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"""{text[:80]!r} is no JSON object such as '{{"enable_thinking": false}}'""")
    return value


def plain(value: Any) -> Any:
    """``value`` without null fields and in plain types: parquet turns missing fields into null, lists into arrays."""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else value


def plain_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message beside role and content that say something, such as tool_calls or reasoning_content."""
    fields = {name: plain(value) for name, value in message.items() if name not in ("role", "content") and value is not None}
    if not fields.get("tool_calls", True):  # an empty list calls nothing; some templates ask for one call exactly
        del fields["tool_calls"]
    try:
        json.dumps(fields, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise UserError(f"the prompt holds a message whose {', '.join(fields)} JSON cannot hold; give text or JSON") from None
    return fields


def tool_schemas(value: Any) -> list[dict[str, Any]]:
    """The column ``tools`` of a row: a list of function schemas, or its JSON text; [] where there are none.

    Fields that are null are left out, as parquet fills them in; JSON text is taken as it stands.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except ValueError:
            raise UserError("the column tools is text, but no JSON; give a list of function schemas") from None
    else:
        value = plain(value)
    if value is None or value == []:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) and tool for tool in value):
        raise UserError("the column tools is no list of function schemas; correct it, or rename the column")
    return value


def template_variables(tokenizer) -> set[str]:
    """The variables that the tokenizer's chat template, or one of several, reads; empty without a template."""
    return set().union(*map(_variables, _templates(tokenizer)))


@lru_cache(maxsize=16)
def _variables(text: str) -> frozenset[str]:
    from jinja2 import meta, nodes
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        tree = _compile_jinja_template(text).environment.parse(text)
    except TemplateError:
        return frozenset()  # a template that is none is refused, with its reason, once it renders
    clock = {name.name for name in tree.find_all(nodes.Name) if name.name == "strftime_now"}  # no variable: a global there
    return frozenset(meta.find_undeclared_variables(tree) | clock)


def _templates(tokenizer) -> list[str]:
    template = getattr(tokenizer, "chat_template", None)
    return list(template.values()) if isinstance(template, dict) else [template] if template else []


def prints_date(tokenizer, kwargs: Mapping[str, Any]) -> bool:
    """Whether what the template makes of a prompt depends on the day."""
    return "date_string" not in kwargs and "strftime_now" in template_variables(tokenizer)


def check_variables(tokenizer, kwargs: Mapping[str, Any]) -> None:
    """UserError for a variable that the chat template does not read, or that is ours to set."""
    for name in kwargs:
        if name in OURS:
            raise UserError(f"{FLAG}: {name} comes from {OURS[name]}; leave it out")
    read = template_variables(tokenizer)
    name_of_it = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
    if kwargs and not _templates(tokenizer):
        raise UserError(f"{FLAG}: {name_of_it} has no chat template, so nothing reads it; leave it out")
    if unread := [name for name in kwargs if name not in read]:
        known = ", ".join(sorted(read - set(OURS) - set(tokenizer.special_tokens_map))) or "none"
        raise UserError(f"{FLAG}: the chat template of {name_of_it} does not read {', '.join(unread)} (it reads: {known})")


def chat_of(tokenizer, kwargs: Mapping[str, Any], dates: Iterable[Any] = ()) -> Chat:
    """What prompts are rendered with; UserError for a variable that the template does not read.

    dates: those earlier parts of the same run began with; the first of them is used again. Else it is today's, and a
    note on stderr says so.
    """
    check_variables(tokenizer, kwargs)
    if not prints_date(tokenizer, kwargs):
        return Chat(dict(kwargs))
    date = next((date for date in dates if _is_date(date)), None)
    if date is None:
        date = datetime.date.today().isoformat()
        print(f"note: the chat template prints the date; this run keeps {date}, also when it is continued", file=sys.stderr)
    return Chat(dict(kwargs), date)


def _is_date(text: Any) -> bool:
    try:
        return datetime.date.fromisoformat(text) is not None
    except (TypeError, ValueError):
        return False


def render(tokenizer, messages: Messages, tools: Sequence[Mapping] = (), chat: Chat = PLAIN) -> str:
    """The text of a conversation that the model is to continue.

    A last message of the assistant is continued where it ends; else the template adds what begins an answer. A
    template that refuses the system role gets the system text at the head of the first user turn. A tokenizer without
    a template gets ``System: ...``, ``User: ...``, ``Assistant: ...`` with blank lines between.
    """
    prefilled = messages[-1]["role"] == "assistant"
    if prefilled and messages[-1]["content"] is None:
        raise UserError("the prompt ends with a tool call of the assistant, which cannot be continued; add the tool's answer")
    calls = any("tool_calls" in message for message in messages)
    templates = _templates(tokenizer)
    if not templates:
        if tools or calls:
            raise UserError(
                f"the prompt has {'tools' if tools else 'tool_calls'}, and the tokenizer has no chat template to "
                "render them with; use a model with one"
            )
        turns = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
        return "\n\n".join(turns if prefilled else [*turns, "Assistant:"])
    if tools and "tools" not in template_variables(tokenizer):
        raise UserError("the row has tools, and the chat template reads none; remove the column, or use a model with tool use")
    if calls and not any("tool_calls" in text for text in templates):
        raise UserError("the prompt has tool_calls, and the chat template reads none; remove them, or use another model")
    return _apply(tokenizer, messages, tools, chat, prefilled)


def verl_text(tokenizer, messages: Messages, kwargs: Mapping[str, Any]) -> str:
    """The text VERL makes of a row's messages: all fields of the file, null where a message has none of them.

    Raises UserError where the template refuses them, or renders such messages otherwise than those without null.
    """
    whole = [
        {name: plain(value) for name, value in message.items() if value is not None or name == "content"}
        for message in messages
    ]
    texts = []
    for each in [messages] if whole == messages else [messages, whole]:
        try:
            texts.append(tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False, **kwargs))
        except Exception as error:  # a template is a program of its author's
            reason = " ".join(f"{error}".split())[:300] or type(error).__name__
            raise UserError(f"the chat template refuses this prompt: {reason}") from None
    if texts[0] != texts[-1]:
        raise UserError(
            "VERL gives every message the fields of all, null where it has none, and the chat template then "
            "renders this prompt otherwise; write the fields into the content, or use another template"
        )
    return texts[0]


def date_string(tokenizer, kwargs: Mapping[str, Any]) -> str | None:
    """What the variable date_string must be for the template to print today's date; None where it does not read it."""
    if not prints_date(tokenizer, kwargs) or "date_string" not in template_variables(tokenizer):
        return None
    printed: list[str] = []

    def strftime_now(form: str) -> str:
        printed.append(datetime.datetime.now().strftime(form))
        return printed[-1]

    ask = [{"role": "user", "content": "1 + 1"}]
    with contextlib.suppress(Exception):  # a template that fails here is refused where the prompts are rendered
        tokenizer.apply_chat_template(ask, tokenize=False, strftime_now=strftime_now, **kwargs)
    return printed[0] if printed else None


def _apply(tokenizer, messages: Messages, tools: Sequence[Mapping], chat: Chat, prefilled: bool) -> str:
    settings = {**chat.kwargs, **({"tools": list(tools)} if tools else {})}
    if chat.date is not None:  # a variable of this name stands before transformers' own function, which reads the clock
        settings["strftime_now"] = datetime.datetime.fromisoformat(chat.date).strftime
    attempts = [messages]
    if any(message["content"] is None for message in messages):  # beside tool calls; some templates want text there
        attempts.append([{**message, "content": message["content"] or ""} for message in messages])
    if any(message["role"] == "system" for message in messages):
        attempts.append(_fold_system(messages))
    reasons = []
    for attempt in attempts:
        try:
            return tokenizer.apply_chat_template(
                attempt, tokenize=False, add_generation_prompt=not prefilled, continue_final_message=prefilled, **settings
            )
        except Exception as error:  # a template is a program of its author's: it can raise anything
            reasons.append(" ".join(f"{error}".split()) or type(error).__name__)
    roles = ", ".join(message["role"] for message in messages)
    raise UserError(
        f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'} refuses this prompt "
        f"(roles: {roles}): {reasons[-1][:300]}; reword the messages or give the prompt as a string"
    )


def _fold_system(messages: Messages) -> Messages:
    """Every system message's text, in order, at the head of the first user turn (or as one, if there is none)."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    rest = [dict(message) for message in messages if message["role"] != "system"]
    for message in rest:
        if message["role"] == "user":
            message["content"] = f"{system}\n\n{message['content']}"
            return rest
    return [{"role": "user", "content": system}, *rest]
