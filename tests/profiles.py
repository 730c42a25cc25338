"""Dispatch profiles that tests make for themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_profile(path: Path, *rules: dict[str, Any]) -> str:
    """A profile file named after ``path``; each rule has ``kernel`` and conditions. Returns the path."""
    lines = [f'name = "{path.stem}"', 'backend = "made for a test"', 'note = "Mirrors nothing."']
    for rule in rules:
        lines += ["", "[[rule]]", 'source = "none"', 'tag = "inferred"']
        lines += [
            f"{key} = {value}" if isinstance(value, int) else f"{key} = {_text(value)}"
            for key, value in rule.items()
        ]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return "[" + ", ".join(map(_text, value)) + "]"
