"""Reading the keys of a profile's tables: texts, lists of words, ranges. Every error is one paragraph."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .dispatch import Range
from .errors import BadRange, BadValue, MissingKey, UnknownKey, nearest

_RANGE = re.compile(r"(\d+)(\.\.(\d+)?)?")


def check_keys(table: Mapping[str, Any], known: tuple[str, ...], needed: tuple[str, ...], where: str) -> None:
    """Raises UnknownKey for a key that is not known, and MissingKey where one that is needed is missing."""
    for key in table:
        if key not in known:
            raise UnknownKey(f"{where} has the key {key!r}, which does not exist; {nearest(key, known)}")
    for key in needed:
        if key not in table:
            raise MissingKey(f"{where} has no {key!r}; add it. Needed are {', '.join(needed)}.")


def listed(value: Any, key: str, where: str) -> list[Mapping[str, Any]]:
    """A list of tables; raises BadValue for anything else."""
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise BadValue(f"{where} has no list of rules under {key!r}; write each as a [[{key}]] table.")
    return value


def text(table: Mapping[str, Any], key: str, where: str) -> str:
    """A text that is not empty; raises BadValue."""
    value = table[key]
    if not isinstance(value, str) or not value:
        raise BadValue(f"{where} has {key} = {value!r}; it must be a text that is not empty.")
    return value


def expression(table: Mapping[str, Any], key: str, where: str) -> str:
    """The text of an expression; a number stands for itself. Raises BadValue."""
    value = table[key]
    return str(value) if type(value) is int else text(table, key, where)


def check_one_of(value: Any, known: tuple[str, ...], key: str, where: str) -> None:
    """Raises BadValue for a value that is not known."""
    if value not in known:
        raise BadValue(f"{where} has {key} = {value!r}, which does not exist; {nearest(str(value), known)}")


def items(table: Mapping[str, Any], key: str, where: str) -> list[Any]:
    """The items of a list, or the one value there is; raises BadValue for none."""
    value = table[key]
    found = value if isinstance(value, list) else [value]
    if not found:
        raise BadValue(f"{where} has an empty {key}, so it could take no call; leave the key out or fill it.")
    return found


def words(table: Mapping[str, Any], key: str, known: tuple[str, ...], where: str) -> frozenset[str] | None:
    """One or more known words, None where the key is missing; raises BadValue."""
    if key not in table:
        return None
    found = items(table, key, where)
    for word in found:
        check_one_of(word, known, key, where)
    return frozenset(found)


def size_range(value: Any, key: str, where: str) -> Range:
    """The range that "4", "2..8" or "9.." stands for; raises BadRange."""
    found = _RANGE.fullmatch(str(value)) if isinstance(value, str | int) else None
    if found is None:
        raise BadRange(f'{where} has {key} = {value!r}; a range is written "4", "2..8" or "9..".')
    low, dots, high = int(found[1]), found[2], found[3]
    top = low if not dots else int(high) if high else None
    if low < 1 or (top is not None and top < low):
        raise BadRange(
            f"{where} has {key} = {value!r}, which holds no size; sizes start at 1 and ranges ascend."
        )
    return Range(low, top)
