"""The part of two texts that is worth reading: some tokens before the flip and some after it."""

from __future__ import annotations

from dataclasses import dataclass

from .blocks import Texts, Word

BEFORE, AFTER = 12, 8


@dataclass(frozen=True)
class Excerpt:
    """``words`` of one run, with how many tokens are left out ``before`` and ``after`` them."""

    words: tuple[Word, ...]
    before: int
    after: int


def excerpts(texts: Texts) -> tuple[Excerpt, Excerpt]:
    """Of run a and of run b, cut at the same tokens; from the first token on where nothing flips."""
    flip = next((word.index for word in (*texts.a, *texts.b) if word.mark == "flip"), None)
    first = 0 if flip is None else max(0, flip - BEFORE)
    last = BEFORE + AFTER if flip is None else flip + AFTER
    return _cut(texts.a, first, last), _cut(texts.b, first, last)


def _cut(words: tuple[Word, ...], first: int, last: int) -> Excerpt:
    return Excerpt(
        tuple(word for word in words if first <= word.index <= last),
        sum(word.index < first for word in words),
        sum(word.index > last for word in words),
    )


def marked(word: Word) -> str:
    """The word's text with the characters that tell what it is: ``[flip]``, ``~near to another choice~``."""
    around = {"flip": ("[", "]"), "near": ("~", "~")}.get(word.mark, ("", ""))
    return f"{around[0]}{word.text}{around[1]}"


def legend(texts: Texts) -> str:
    """What the marks of its excerpt mean; empty where there are none."""
    marks = {word.mark for part in excerpts(texts) for word in part.words}
    known = {
        "flip": "[ ] the flip",
        "near": "~ ~ a token whose margin is no larger than what moved between the runs",
    }
    return "; ".join(said for mark, said in known.items() if mark in marks)
