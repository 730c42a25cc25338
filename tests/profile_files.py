"""Profile files for tests: their parts as text, written where a test wants them."""

from __future__ import annotations

from pathlib import Path

HEAD = 'name = "mine"\nbackend = "a test"\nnote = "none"\n'
FIRST = '[[rule]]\nkernel = "candle-metal/mv"\nsource = "here"\ntag = "read"\n'


def rule(kernel: str = "candle-metal/mv", **conditions: str | int | list[str]) -> str:
    """A [[rule]] table; conditions are written as Python writes them, which TOML reads."""
    lines = [f"{key} = {value!r}" for key, value in conditions.items()]
    return "\n".join(["[[rule]]", f'kernel = "{kernel}"', 'source = "here"', 'tag = "read"', *lines, ""])


def define(name: str, value: str | int, when: str | None = None) -> str:
    """A [[define]] entry."""
    condition = [] if when is None else [f"when = {when!r}"]
    lines = [
        "[[define]]",
        f'name = "{name}"',
        f"value = {value!r}",
        *condition,
        'source = "here"',
        'tag = "read"',
        "",
    ]
    return "\n".join(lines)


def parameter(name: str, default: str | int, **values: str | list[str]) -> str:
    """A [parameters.NAME] table."""
    lines = [f"{key} = {value!r}" for key, value in values.items()]
    return "\n".join([f"[parameters.{name}]", f"default = {default!r}", 'meaning = "a test"', *lines, ""])


def written(folder: Path, *parts: str) -> Path:
    """``mine.toml`` in a folder."""
    path = folder / "mine.toml"
    path.write_text("".join(parts), "utf-8")
    return path
