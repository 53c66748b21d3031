"""What do results have where a number could not be computed? A null, and the reason beside it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Missing:
    """Why there is no number, or no array."""

    reason: str


def with_reasons(tree: dict) -> dict:
    """``tree`` as JSON has it: every Missing is None, and its reason stands in ``reasons`` under its dotted path.

    A list is one path. Its entries' reasons are joined, each once.

    >>> with_reasons({"mse": {"grpo": [1.5, Missing("too few")]}, "best": Missing("no prompts")})
    {'mse': {'grpo': [1.5, None]}, 'best': None, 'reasons': {'mse.grpo': 'too few', 'best': 'no prompts'}}
    """
    return {**_without_missing(tree), "reasons": _reasons(tree, "")}


def _without_missing(node):
    if isinstance(node, dict):
        return {key: _without_missing(each) for key, each in node.items()}
    if isinstance(node, list):
        return [_without_missing(each) for each in node]
    return None if isinstance(node, Missing) else node


def _reasons(tree: dict, parent: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, node in tree.items():
        path = f"{parent}{key}"
        if isinstance(node, dict):
            found |= _reasons(node, f"{path}.")
        missing = [each.reason for each in (node if isinstance(node, list) else [node]) if isinstance(each, Missing)]
        if missing:
            found[path] = "; ".join(dict.fromkeys(missing))
    return found
