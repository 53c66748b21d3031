"""Which model and which sampling law is a curve of? Short texts for legends, from what a results file says of itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

ALWAYS = ("temperature", "top_p")
# shown where a file has another value than the neutral one: name -> (neutral value, how it is written)
UNLESS_NEUTRAL = {
    "top_k": (0, "top_k {}"),
    "stop": ([], "stop {}"),
    "scoring": ("exact", "{} scoring"),
    "params": (None, "parameters {}"),
    "revision": (None, "revision {}"),
    "chat_template_kwargs": (None, "template {}"),
}
# shown where files that are compared differ in it
IF_DIFFERENT = {
    "max_new_tokens": "at most {} tokens",
    "reward": "{} reward",
    "dtype": "{}",
    "seed": "seed {}",
    "model_fingerprint": "weights {}",
    "prompts": "prompts of {}",
}


def describe(results: dict) -> str:
    """Model, and on a second line the law: ``"tiny_model\\ntemperature 1, top_p 0.95"``; "" where neither is known."""
    return describe_each([results])[0]


def in_one_line(results: dict, otherwise: str) -> str:
    """``describe`` for a heading: ``"tiny_model (temperature 1, top_p 0.95)"``; else ``otherwise``."""
    model, _, law = describe(results).partition("\n")
    return f"{model} ({law})" if law else model or otherwise


def describe_each(several: Sequence[dict]) -> list[str]:
    """``describe`` of results files that are compared: what they differ in beside the usual is named too.

    Prompts (zero-shot, few-shot) go by the folder and name of the oracle table, so far as these differ.
    """
    facts = [_facts(results) for results in several]
    differing = [name for name in IF_DIFFERENT if len({repr(each.get(name)) for each in facts}) > 1]
    return [_text(each, differing) for each in facts]


def _facts(results: dict) -> dict:
    law = results.get("law") if isinstance(results.get("law"), dict) else {}
    config = results.get("config") if isinstance(results.get("config"), dict) else {}
    facts = {**config, **law}
    if isinstance(config.get("oracle_table"), str):
        facts["prompts"] = "/".join(Path(config["oracle_table"]).parts[-2:])
    return facts


def _text(facts: dict, differing: Sequence[str]) -> str:
    parts = [f"{name} {facts[name]:g}" for name in ALWAYS if isinstance(facts.get(name), (int, float))]
    for name, (neutral, form) in UNLESS_NEUTRAL.items():
        if name in facts and facts[name] != neutral:
            value = " ".join(map(repr, facts[name])) if isinstance(facts[name], list) else facts[name]
            parts.append(form.format(value))
    more = [IF_DIFFERENT[name].format(facts[name]) for name in differing if facts.get(name) is not None]
    model = Path(str(facts["model"])).name if facts.get("model") else ""
    lines = [model, ", ".join(parts), *more]
    return "\n".join(line for line in lines if line)
