"""Text for GitHub-flavoured Markdown that stays text: no markup, no HTML, no links, no mentions, no references."""

from __future__ import annotations

import html
import re
from typing import Final

_BREAK: Final = "&#8203;"
"""A space without width, which parts what GitHub would turn into a link, a mention or an emoji."""
_CODE: Final = re.compile(r"(?<!`)`([^`]{1,120})`(?!`)")
_LEADING: Final = re.compile(r"^(?:(?P<mark>[-+=>#*~:|])|(?P<number>\d{1,9})(?P<end>[.)]))")
_FENCE: Final = re.compile(r"`+")

_LINKED: Final = r"""
      @
    | \#(?=\w)
    | \bGH(?=-\d)
    | :(?=//)
    | :(?=[\w+-]+:)
    | \bwww(?=\.)
    | (?<![0-9a-f])[0-9a-f]{7}(?=[0-9a-f]{33}(?![0-9a-f]))  # a commit's name
"""
"""What GitHub makes a link, a mention, a reference or a picture of, if the next character follows at once."""
_PARTED: Final = re.compile(_LINKED, re.VERBOSE | re.IGNORECASE)
_SPECIAL: Final = re.compile(
    rf"""
      (?P<entity>[&<>])
    | (?P<escaped>[\\`*\[\]|~]
        | (?<![^\W_])_|_(?![^\W_]))  # an underscore inside a word is no markup
    | (?P<dollar>\$)
    | (?P<parted>{_LINKED})
    """,
    re.VERBOSE | re.IGNORECASE,
)


def inline(text: str) -> str:
    """``text``, which has no line break, as inline Markdown that shows every character of it."""
    return _SPECIAL.sub(_replaced, text)


def sentence(text: str, *, leading: bool = False) -> str:
    """Prose as inline Markdown; what stands in single backquotes becomes code, in which nothing is active either.

    ``leading`` says that it begins a line, where a character may make a list or a heading.
    """
    out, at = [], 0
    for found in _CODE.finditer(text):
        # A pipe would end a table's cell even in code.
        code = "|" in found[1] or not found[1].strip()
        out += [inline(text[at : found.start()]), inline(found[0]) if code else found[0]]
        at = found.end()
    made = "".join([*out, inline(text[at:])])
    return _led(made) if leading else made


def cell(text: str) -> str:
    """``text`` in one cell of a table; it may hold ``\\n``, which breaks the line."""
    return "<br>".join(sentence(line) for line in text.split("\n"))


def in_html(text: str) -> str:
    """``text`` inside an HTML element, where Markdown is not read; GitHub still looks for mentions and links there."""
    parted = _PARTED.sub(lambda found: f"{found[0]}\0", text)
    return html.escape(parted, quote=True).replace("\0", _BREAK)


def fenced(text: str, language: str = "") -> str:
    """A block of code, in a fence that is longer than any run of backquotes in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in _FENCE.findall(text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def _replaced(found: re.Match[str]) -> str:
    kind, character = found.lastgroup, found[0]
    if kind == "entity":
        return html.escape(character)
    if kind == "escaped":
        return f"\\{character}"
    if kind == "dollar":
        # What GitHub's manual gives for a dollar sign that begins no formula.
        return "<span>$</span>"
    return f"{character}{_BREAK}"


def _led(text: str) -> str:
    found = _LEADING.match(text.lstrip(" "))
    text = text.lstrip(" ")
    if found is None:
        return text
    if found["mark"]:
        return f"\\{text}"
    return f"{found['number']}\\{text[len(found['number']) :]}"
