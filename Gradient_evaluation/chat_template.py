"""Chat templates: what they are given, and the text that they make of messages.

    json_object(text)                       an argparse type: the value of --chat_template_kwargs
    plain_fields(message)                   the fields of a message besides role and content, in plain types
    tool_schemas(value)                     the column ``tools`` as a list of function schemas
    Chat(kwargs, date)                      what every prompt of a run is rendered with
    check_variables(tokenizer, kwargs)      UserError for a variable that the template does not read
    chat_of(tokenizer, kwargs, dates)       a Chat with checked variables and a fixed date
    render(tokenizer, messages, tools, chat)  the text that the model is to continue
    verl_text(tokenizer, messages, kwargs)  the text that VERL makes of a row of its parquet
    date_string(tokenizer, kwargs)          today's date as the template prints it, if a variable can set it

transformers ignores a variable that the template does not read. Here it is an error that names the variable. A template
may print today's date. Here it prints the date on which the run began.
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
OURS = {  # variables that the flag may not set, and where they come from
    "messages": "the column prompt",
    "tools": "the column tools",
    "add_generation_prompt": "the last message's role",
    "continue_final_message": "the last message's role",
    "strftime_now": "the clock",
}


class Chat(NamedTuple):
    """What a template is given besides messages and tools. date: in ISO form if the template prints the date, else None."""

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
    """``value`` in plain types, without null fields. (Parquet turns missing fields into null, and lists into arrays.)"""
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return plain(value.tolist()) if hasattr(value, "tolist") else value


def plain_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a message besides role and content that are not null, such as tool_calls or reasoning_content."""
    fields = {name: plain(value) for name, value in message.items() if name not in ("role", "content") and value is not None}
    if not fields.get("tool_calls", True):  # no call at all; some templates raise unless there is exactly one
        del fields["tool_calls"]
    try:
        json.dumps(fields, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise UserError(
            f"the prompt has a message whose {', '.join(fields)} cannot be written as JSON; give text or JSON"
        ) from None
    return fields


def tool_schemas(value: Any) -> list[dict[str, Any]]:
    """The column ``tools`` of a row: a list of function schemas, or its JSON text; [] where there are none.

    Fields that are null are left out, because parquet adds them. JSON text is used unchanged.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else []
        except ValueError:
            raise UserError("the column tools is text, but not JSON; give a list of function schemas") from None
    else:
        value = plain(value)
    if value is None or value == []:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) and tool for tool in value):
        raise UserError("the column tools is no list of function schemas; correct it, or rename the column")
    return value


def template_variables(tokenizer) -> set[str]:
    """The variables that the tokenizer's chat template reads (or any of several templates); empty without a template."""
    return set().union(*map(_variables, _templates(tokenizer)))


@lru_cache(maxsize=16)
def _variables(text: str) -> frozenset[str]:
    from jinja2 import meta, nodes
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        tree = _compile_jinja_template(text).environment.parse(text)
    except TemplateError:
        return frozenset()  # render() refuses a broken template and says why
    clock = {name.name for name in tree.find_all(nodes.Name) if name.name == "strftime_now"}  # a global, not a variable
    return frozenset(meta.find_undeclared_variables(tree) | clock)


def _templates(tokenizer) -> list[str]:
    template = getattr(tokenizer, "chat_template", None)
    return list(template.values()) if isinstance(template, dict) else [template] if template else []


def prints_date(tokenizer, kwargs: Mapping[str, Any]) -> bool:
    """Whether the text that the template makes depends on today's date."""
    return "date_string" not in kwargs and "strftime_now" in template_variables(tokenizer)


def check_variables(tokenizer, kwargs: Mapping[str, Any]) -> None:
    """Raise UserError for a variable that the chat template does not read, or that is set otherwise (``OURS``)."""
    for name in kwargs:
        if name in OURS:
            raise UserError(f"{FLAG}: {name} comes from {OURS[name]}; leave it out")
    read = template_variables(tokenizer)
    name_of_it = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
    if kwargs and not _templates(tokenizer):
        raise UserError(f"{FLAG}: {name_of_it} has no chat template that could read the variables; leave the flag out")
    if unread := [name for name in kwargs if name not in read]:
        known = ", ".join(sorted(read - set(OURS) - set(tokenizer.special_tokens_map))) or "none"
        raise UserError(f"{FLAG}: the chat template of {name_of_it} does not read {', '.join(unread)} (it reads: {known})")


def chat_of(tokenizer, kwargs: Mapping[str, Any], dates: Iterable[Any] = ()) -> Chat:
    """The Chat for all prompts of a run. Raises UserError for a variable that the template does not read.

    dates: the dates that earlier parts of the same run have stored. The first valid one is used again. Without one it is
    today's date, and a note on stderr says so.
    """
    check_variables(tokenizer, kwargs)
    if not prints_date(tokenizer, kwargs):
        return Chat(dict(kwargs))
    date = next((date for date in dates if _is_date(date)), None)
    if date is None:
        date = datetime.date.today().isoformat()
        print(f"note: the chat template prints the date; this run uses {date}, also when it is continued", file=sys.stderr)
    return Chat(dict(kwargs), date)


def _is_date(text: Any) -> bool:
    try:
        return datetime.date.fromisoformat(text) is not None
    except (TypeError, ValueError):
        return False


def render(tokenizer, messages: Messages, tools: Sequence[Mapping] = (), chat: Chat = PLAIN) -> str:
    """The text that the model is to continue.

    * If the assistant wrote the last message, the model continues that message. Else the template begins an answer.
    * If the template refuses the system role, the system text goes to the beginning of the first user message.
    * Without a template, messages are ``System: ...``, ``User: ...``, ``Assistant: ...``, with blank lines between them.

    Raises UserError if the template refuses the messages, or does not read the tools or tool calls that they have.
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
    """The text that VERL makes of a row's messages.

    VERL gives each message every field that the file has, and null where the message lacks it. Raises UserError if the
    template refuses the messages, or if these nulls change the text.
    """
    whole = [
        {name: plain(value) for name, value in message.items() if value is not None or name == "content"}
        for message in messages
    ]
    texts = []
    for each in [messages] if whole == messages else [messages, whole]:
        try:
            texts.append(tokenizer.apply_chat_template(each, add_generation_prompt=True, tokenize=False, **kwargs))
        except Exception as error:  # a template can raise anything
            reason = " ".join(f"{error}".split())[:300] or type(error).__name__
            raise UserError(f"the chat template refuses this prompt: {reason}") from None
    if texts[0] != texts[-1]:
        raise UserError(
            "VERL gives every message the fields of all messages, null where it lacks one, and these nulls change what "
            "the chat template makes of this prompt; write the fields into the content, or use another template"
        )
    return texts[0]


def date_string(tokenizer, kwargs: Mapping[str, Any]) -> str | None:
    """The value of the variable date_string that makes the template print today's date; None if it reads no such variable."""
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
    if chat.date is not None:  # used instead of transformers' function of this name, which reads the clock
        settings["strftime_now"] = datetime.datetime.fromisoformat(chat.date).strftime
    attempts = [messages]
    if any(message["content"] is None for message in messages):  # beside tool calls; some templates need text
        attempts.append([{**message, "content": message["content"] or ""} for message in messages])
    if any(message["role"] == "system" for message in messages):
        attempts.append(_fold_system(messages))
    reasons = []
    for attempt in attempts:
        try:
            return tokenizer.apply_chat_template(
                attempt, tokenize=False, add_generation_prompt=not prefilled, continue_final_message=prefilled, **settings
            )
        except Exception as error:  # a template can raise anything
            reasons.append(" ".join(f"{error}".split()) or type(error).__name__)
    roles = ", ".join(message["role"] for message in messages)
    raise UserError(
        f"the chat template of {getattr(tokenizer, 'name_or_path', '') or 'the tokenizer'} refuses this prompt "
        f"(roles: {roles}): {reasons[-1][:300]}; reword the messages or give the prompt as a string"
    )


def _fold_system(messages: Messages) -> Messages:
    """The messages with all system texts at the beginning of the first user message (or as a user message, without one)."""
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    rest = [dict(message) for message in messages if message["role"] != "system"]
    for message in rest:
        if message["role"] == "user":
            message["content"] = f"{system}\n\n{message['content']}"
            return rest
    return [{"role": "user", "content": system}, *rest]
