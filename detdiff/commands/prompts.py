"""Prompts from a file, a request each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from detdiff.errors import CommandError
from detdiff.scenario import Request, Scenario, are_messages


def read_prompts(path: Path) -> tuple[dict[str, Any], ...]:
    """The prompts of a file, one a line: text, or a JSON object with ``prompt`` or chat ``messages``, and ``id`` and
    ``max_tokens`` where they are given. Empty lines are left out. Raises CommandError."""
    try:
        lines = path.read_bytes().decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(
            f"{path} cannot be read as prompts ({error}); expected a text file in UTF-8 with one prompt a line. Correct it."
        ) from None
    found = [
        _prompt(f"{path}, line {number}", line, place)
        for place, (number, line) in enumerate((n, line) for n, line in enumerate(lines, 1) if line.strip())
    ]
    if not found:
        raise CommandError(
            f"{path} has no prompt; expected one a line, as text or as a JSON object. Write some."
        )
    return tuple(found)


def _prompt(where: str, line: str, place: int) -> dict[str, Any]:
    found: dict[str, Any] = {"id": f"r{place}", "prompt": line}
    if not line.lstrip().startswith("{"):
        return found
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{where} begins like a JSON object and is none ({error}); correct it.") from None
    wrong = sorted(given.keys() - {"id", "prompt", "messages", "max_tokens"})
    if wrong or ("prompt" in given) == ("messages" in given):
        raise CommandError(
            f"{where} has the keys {', '.join(map(str, given))}; expected prompt or messages, and, where they are given, id and max_tokens. Correct it."
        )
    found |= {key: value for key, value in given.items() if key != "messages"}
    if "messages" in given:
        messages = given["messages"]
        if not are_messages(messages):
            raise CommandError(f"{where} has no list of messages, each with role and content; correct it.")
        one = messages[0] if len(messages) == 1 else None
        plain = one is not None and one["role"] == "user" and isinstance(one["content"], str)
        found |= {"prompt": one["content"] if plain and one else json.dumps(messages), "chat": True}
    kinds = (("id", str), ("prompt", str), ("max_tokens", int))
    bad = next((key for key, kind in kinds if key in found and type(found[key]) is not kind), None)
    if bad is not None:
        raise CommandError(
            f"{where} has the {bad} {found[bad]!r}; expected {'a number' if bad == 'max_tokens' else 'text'}. Correct it."
        )
    return found


def with_prompts(scenario: Scenario, prompts: Sequence[Mapping[str, Any]]) -> Scenario:
    """The scenario, made of the prompts' texts in their order, with what a file says of each beside."""
    requests: list[Request] = []
    for request, given in zip(scenario.requests, prompts, strict=True):
        changed = {key: given[key] for key in ("id", "max_tokens", "chat") if key in given}
        requests.append(replace(request, **changed))
    return replace(scenario, requests=tuple(requests))
