"""What is asked of a model: the prompts given, or some of differing length that any model can take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from detdiff.errors import CheckSettingInvalid, DetdiffError, NothingToCheck

Prompt = str | Sequence[int]
Encode = Callable[[str], Sequence[int]]

BY_DEFAULT: Final = 4
"""How many prompts there are without any given, if no schedule needs more."""
_TEXTS: Final = (
    "In the beginning",
    "And the king said unto the people, Hear ye the words of this day, and keep them",
    "The value of two sums in another order is",
    "Once there was a small house at the end of a long road. Nobody who passed it knew who lived there, but at night",
)
_LENGTHS: Final = (8, 24, 12, 32)
"""Tokens of the first prompts at most: a tokenizer of single characters makes many of a text."""
_VOCABULARY: Final = 32
"""Token ids that every model has, where nothing says how many there are."""


def requests(
    given: Sequence[Prompt] | str | None, encode: Encode | None, vocabulary: int | None, least: int
) -> list[dict[str, Any]]:
    """The requests r0, r1, ... as tables of a scenario: ``given`` as text or token ids, else at least ``least``.

    ``encode`` gives a text's token ids, which lie below ``vocabulary``; either may not be known. Raises NothingToCheck for an empty list, and CheckSettingInvalid for what is neither text nor token ids.
    """
    prompts = default(encode, vocabulary, max(least, BY_DEFAULT)) if given is None else given
    if isinstance(prompts, str):
        prompts = [prompts]
    if not isinstance(prompts, Iterable):
        raise CheckSettingInvalid(
            f"prompts are {prompts!r}; expected a list of texts or of lists of token ids. Give one."
        )
    prompts = list(prompts)
    if not len(prompts):
        raise NothingToCheck(
            "There are no prompts, so that nothing would be checked. Give one at least, or leave prompts out."
        )
    return [{"id": f"r{n}", **_table(prompt, n)} for n, prompt in enumerate(prompts)]


def default(encode: Encode | None, vocabulary: int | None, count: int) -> list[Prompt]:
    """Prompts that differ in length: texts where they can be encoded, token ids where they cannot."""
    found: list[Prompt] = []
    for n in range(count):
        # A number in front keeps prompts apart where there are more of them than texts.
        text = _TEXTS[n % len(_TEXTS)] if n < len(_TEXTS) else f"{n}. {_TEXTS[n % len(_TEXTS)]}"
        most = _LENGTHS[n % len(_LENGTHS)]
        tokens = _tokens(text, encode, vocabulary)
        if tokens is None:
            found.append([(7 * n + 13 * place + 1) % (vocabulary or _VOCABULARY) for place in range(most)])
        else:
            found.append(text if len(tokens) <= most else tokens[:most])
    return found


def _tokens(text: str, encode: Encode | None, vocabulary: int | None) -> list[int] | None:
    """The text's token ids; None where it cannot be encoded, or not with the model's own."""
    if encode is None:
        return None
    try:
        ids = [int(token) for token in encode(text)]
    except (DetdiffError, AttributeError, TypeError, KeyError, ValueError):  # a tokenizer of the user's own
        return None
    return ids if ids and (vocabulary is None or max(ids) < vocabulary) else None


def _table(prompt: Any, n: int) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    tokens = getattr(prompt, "tolist", lambda: prompt)()
    if isinstance(tokens, list | tuple) and all(type(token) is int for token in tokens):
        return {"tokens": list(tokens)}
    raise CheckSettingInvalid(
        f"Prompt {n} is {str(prompt)[:60]!r}, a {type(prompt).__name__}; expected text, or a list of token ids. Give one of them."
    )
