"""Reads dispatch profiles from TOML and refuses those that cannot mean what they say.

Top-level keys: name, backend, note, and one [[rule]] table per rule with kernel, source, tag and any of the
conditions op, rows, second_last, k, n (ranges: "1", "2..8", "9.."), dtype, bits (widths or "dense").
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from .dispatch import OPS, TAGS, Profile, Range, Rule
from .errors import (
    BadRange,
    BadValue,
    MissingKey,
    UnknownKernel,
    UnknownKey,
    UnknownProfile,
    UnreachableRule,
    UnreadableProfile,
    nearest,
)
from .library import kernel_names

_TOP = ("name", "backend", "note", "rule")
_NEEDED = ("kernel", "source", "tag")
_SIZES = ("rows", "second_last", "k", "n")
_RULE = (*_NEEDED, "op", *_SIZES, "dtype", "bits")
_RANGE = re.compile(r"(\d+)(\.\.(\d+)?)?")
_FORCED = re.compile(r"native|rows|pad:[1-9]\d*")


def profile_names() -> tuple[str, ...]:
    """The names of the profiles that are shipped."""
    shipped = (files(__package__) / "profiles").iterdir()
    return tuple(
        sorted(entry.name.removesuffix(".toml") for entry in shipped if entry.name.endswith(".toml"))
    )


def profile(name: str) -> Profile:
    """The shipped profile of that name; raises UnknownProfile."""
    if name not in profile_names():
        raise UnknownProfile(f"There is no dispatch profile named {name!r}; {nearest(name, profile_names())}")
    return _parse((files(__package__) / "profiles" / f"{name}.toml").read_text("utf-8"), f"Profile {name}")


def load_profile(path: Path) -> Profile:
    """The profile in a TOML file; raises a ProfileError, or UnknownKernel where a rule names none."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableProfile(
            f"Profile {path} cannot be read: {error}. It must be a UTF-8 TOML file; check the path."
        ) from error
    return _parse(text, f"Profile {path}")


def _parse(text: str, where: str) -> Profile:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UnreadableProfile(f"{where} is not valid TOML: {error}. Correct it there.") from error
    _check_keys(data, _TOP, _TOP, where)
    tables = data["rule"]
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        raise BadValue(f"{where} has no list of rules under 'rule'; write each as a [[rule]] table.")
    rules = tuple(_rule(table, f"{where}, rule {number}") for number, table in enumerate(tables, 1))
    for number, rule in enumerate(rules):
        for earlier in range(number):
            if rules[earlier].covers(rule):
                raise UnreachableRule(
                    f"{where}, rule {number + 1} ({rule.condition} -> {rule.kernel}) can never be reached: "
                    f"rule {earlier + 1} ({rules[earlier].condition}) takes all its calls. Move it up, or "
                    "remove it."
                )
    name, backend, note = (_text(data, key, where) for key in ("name", "backend", "note"))
    return Profile(name, backend, note, rules)


def _rule(table: Mapping[str, Any], where: str) -> Rule:
    _check_keys(table, _RULE, _NEEDED, where)
    path, source, tag = (_text(table, key, where) for key in _NEEDED)
    if path not in kernel_names() and not _FORCED.fullmatch(path):
        known = [*kernel_names(), "native", "rows", "pad:N"]
        raise UnknownKernel(
            f"{where} names the kernel {path!r}, which does not exist; {nearest(path, known)}"
        )
    _check_one_of(tag, TAGS, "tag", where)
    ops = _items(table, "op", where) if "op" in table else list(OPS)
    for op in ops:
        _check_one_of(op, OPS, "op", where)
    return Rule(
        path,
        source,
        tag,
        op=frozenset(ops),
        dtype=_dtypes(table, where),
        bits=_bits(table, where),
        **{size: _range(table[size], size, where) for size in _SIZES if size in table},
    )


def _check_keys(
    table: Mapping[str, Any], known: tuple[str, ...], needed: tuple[str, ...], where: str
) -> None:
    for key in table:
        if key not in known:
            raise UnknownKey(f"{where} has the key {key!r}, which does not exist; {nearest(key, known)}")
    for key in needed:
        if key not in table:
            raise MissingKey(f"{where} has no {key!r}; add it. Needed are {', '.join(needed)}.")


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    value = table[key]
    if not isinstance(value, str) or not value:
        raise BadValue(f"{where} has {key} = {value!r}; it must be a text that is not empty.")
    return value


def _check_one_of(value: Any, known: tuple[str, ...], key: str, where: str) -> None:
    if value not in known:
        raise BadValue(f"{where} has {key} = {value!r}, which does not exist; {nearest(str(value), known)}")


def _items(table: Mapping[str, Any], key: str, where: str) -> list[Any]:
    value = table[key]
    items = value if isinstance(value, list) else [value]
    if not items:
        raise BadValue(f"{where} has an empty {key}, so it could take no call; leave the key out or fill it.")
    return items


def _range(value: Any, key: str, where: str) -> Range:
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


def _dtypes(table: Mapping[str, Any], where: str) -> frozenset[str] | None:
    if "dtype" not in table:
        return None
    dtypes = _items(table, "dtype", where)
    for dtype in dtypes:
        _check_one_of(dtype, ("float32", "float16", "bfloat16"), "dtype", where)
    return frozenset(dtypes)


def _bits(table: Mapping[str, Any], where: str) -> frozenset[int | None] | None:
    if "bits" not in table:
        return None
    widths = _items(table, "bits", where)
    for width in widths:
        if width != "dense" and (not isinstance(width, int) or isinstance(width, bool) or width < 1):
            raise BadValue(f'{where} has bits = {width!r}; it must be a width such as 4, or "dense".')
    return frozenset(None if width == "dense" else width for width in widths)
