"""Text with styles that wraps and fills columns as a terminal shows it: some characters take two cells, some none."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import Final, Literal

Style = Literal["", "head", "flip", "near", "after"]
Line = list[tuple[str, Style]]
"""Characters, each with its style."""

_CODES: Final[dict[Style, str]] = {"head": "1", "flip": "1;31", "near": "33", "after": "2"}


def styled(parts: Sequence[tuple[str, Style]]) -> Line:
    """Pieces of text, character by character."""
    return [(character, style) for text, style in parts for character in text]


def cells(line: Sequence[tuple[str, Style]]) -> int:
    """How many cells of a terminal these characters take."""
    return sum(_cells(character) for character, _ in line)


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def wrapped(line: Line, width: int) -> Iterator[Line]:
    """Lines of at most ``width`` cells, broken at spaces where there are any; the space itself is kept."""
    start = 0
    while start < len(line):
        used, end, space = 0, start, None
        while end < len(line) and used + _cells(line[end][0]) <= width:
            used += _cells(line[end][0])
            end += 1
            # What is marked is not torn apart.
            if line[end - 1][0] == " " and line[end - 1][1] not in ("flip", "near"):
                space = end
        if end < len(line) and line[end] not in ((" ", ""), (" ", "after")) and space is not None:
            end = space
        end = max(end, start + 1)
        yield line[start:end]
        start = end


def printed(line: Line, *, colour: bool, width: int = 0) -> str:
    """The line as characters, with escape sequences where ``colour`` is asked for.

    It is filled up to ``width`` cells, or without a width ends with its last character that is no space.
    """
    while not width and line and line[-1][0] == " ":
        line = line[:-1]
    out, now = [], ""
    for character, style in line:
        if colour and style != now:
            out.append(_switch(style))
            now = style
        out.append(character)
    if now:
        out.append("\x1b[0m")
    return "".join(out) + " " * (width - cells(line))


def _switch(style: Style) -> str:
    return f"\x1b[0;{_CODES[style]}m" if style else "\x1b[0m"
