"""Reads dispatch profiles from TOML and refuses those that cannot mean what they say.

Top-level keys: name, backend, note; [parameters.NAME] tables with default, meaning and one of range ("12..18"), choices
or versions ("0.29.."); [[define]] entries with name, value, source, tag and perhaps when; [[rule]] tables with kernel,
source, tag and any of the conditions op, rows, second_last, k, n, group_size, query, keys, head_dim (ranges: "1",
"2..8", "9.."), dtype, bits (widths, "dense" or "quantised"), format, mask, when (an expression), whole, and
shows and passes
(definitions).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from . import profile_tables as tables
from .condition import CALL_NAMES, Definition, Expression, Scope, chain, parse, version_of
from .dispatch import MASKS, OPS, QUANTISED, SIZES, TAGS, Entry, Profile, Rule
from .errors import (
    BadDefinition,
    BadParameter,
    BadParameterValue,
    BadValue,
    UnknownKernel,
    UnreadableProfile,
    nearest,
)
from .parameters import Parameter, bind
from .profile_checks import DTYPES, check_rules

_TOP = ("name", "backend", "note", "parameters", "define", "rule")
_NEEDED = ("kernel", "source", "tag")
_RULE = (*_NEEDED, "op", *SIZES, "dtype", "bits", "format", "mask", "when", "whole", "shows", "passes")
_DEFINE = ("name", "value", "when", "source", "tag")
_PARAMETER = ("default", "meaning", "range", "choices", "versions")
# The keyword arguments of kernels that a profile can decide.
ARGUMENTS = ("blocks",)
_FORMATS = ("dense", "affine", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_FORCED = re.compile(r"native|rows|pad:[1-9]\d*")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*", re.ASCII)
_IDENTIFIER = re.compile(r"[a-z]\w*", re.ASCII)


@lru_cache(maxsize=64)
def parse_profile(text: str, where: str, kernels: tuple[str, ...]) -> Profile:
    """The profile in a TOML text, its rules naming some of ``kernels``; ``where`` begins error messages.

    Raises a ProfileError, or UnknownKernel where a rule names none.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UnreadableProfile(f"{where} is not valid TOML: {error}. Correct it there.") from error
    tables.check_keys(data, _TOP, ("name", "backend", "note", "rule"), where)
    name, backend, note = (tables.text(data, key, where) for key in ("name", "backend", "note"))
    if not _NAME.fullmatch(name):
        raise BadValue(f"{where} has name = {name!r}; a name is made of letters, digits, '.', '_' and '-'.")
    parameters = _parameters(data.get("parameters", {}), where)
    entries, scope = _definitions(tables.listed(data.get("define", []), "define", where), parameters, where)
    found = tables.listed(data["rule"], "rule", where)
    if not found:
        raise BadValue(f"{where} has no list of rules under 'rule'; write each as a [[rule]] table.")
    rules = tuple(
        _rule(table, scope, kernels, f"{where}, rule {number}") for number, table in enumerate(found, 1)
    )
    check_rules(rules, parameters, where)
    return Profile(name, backend, note, rules, parameters, bind(parameters, {}, name), scope, entries)


def _parameters(data: Any, where: str) -> tuple[Parameter, ...]:
    if not isinstance(data, dict) or not all(isinstance(table, dict) for table in data.values()):
        raise BadParameter(f"{where} has parameters = {data!r}; write each as a [parameters.NAME] table.")
    return tuple(_parameter(name, table, f"{where}, parameter {name}") for name, table in data.items())


def _parameter(name: str, table: Mapping[str, Any], where: str) -> Parameter:
    tables.check_keys(table, _PARAMETER, ("default", "meaning"), where)
    if name in CALL_NAMES or not _IDENTIFIER.fullmatch(name):
        raise BadParameter(
            f"{where} has a name that is taken, or no name; use small letters, digits and _, and none of "
            f"{', '.join(CALL_NAMES)}."
        )
    default, meaning = table["default"], tables.text(table, "meaning", where)
    kinds = [key for key in ("range", "choices", "versions") if key in table]
    made: Parameter | None = None
    if len(kinds) == 1 and type(default) in (int, str):
        if kinds == ["range"]:
            limits = tables.size_range(table["range"], "range", where)
            made = Parameter(name, meaning, default, low=limits.low, high=limits.high or limits.low)
        elif kinds == ["choices"] and isinstance(table["choices"], list):
            alike = all(type(one) is type(default) for one in table["choices"])
            made = Parameter(name, meaning, default, tuple(table["choices"])) if alike else None
        elif kinds == ["versions"] and (oldest := _oldest(table["versions"])):
            made = Parameter(name, meaning, default, oldest=oldest)
    if made is None:
        raise BadParameter(
            f"{where} does not say which values it can have; expected a default (a number or a text) and exactly one "
            'of range = "12..18", choices = ["s", "d"] with items like the default, and versions = "0.29..". Correct it.'
        )
    try:
        made.value(default)
    except BadParameterValue as error:
        raise BadParameter(f"{where} has a default that it cannot have. {error}") from None
    return made


def _oldest(value: Any) -> str | None:
    try:
        oldest = value.removesuffix("..")
        version_of(oldest)
    except (AttributeError, ValueError):
        return None
    return str(oldest)


def _definitions(
    found: list[Mapping[str, Any]], parameters: tuple[Parameter, ...], where: str
) -> tuple[tuple[Entry, ...], Scope]:
    scope = Scope({parameter.name: parameter.kind for parameter in parameters}, {})
    made: dict[str, list[Entry]] = {}
    definitions: dict[str, Definition] = {}
    for number, table in enumerate(found, 1):
        entry = _entry(table, scope, where, number)
        place = f"{where}, definition {number} ({entry.name})"
        if entry.name in definitions or scope.kind(entry.name):
            raise BadDefinition(
                f"{place} has a name that is taken: by the call, by a parameter, or by a definition that ended with an "
                "entry without 'when'. Choose another name, or move the entry up."
            )
        mine = made.setdefault(entry.name, [])
        mine.append(entry)
        if entry.value.kind != mine[0].value.kind:
            raise BadDefinition(
                f"{place} is a {entry.value.kind} and its first entry a {mine[0].value.kind}; give all entries one kind."
            )
        if entry.when is None:
            tree = chain([(one.when, one.value) for one in mine])
            value = Expression(entry.name, entry.value.kind, tree)
            definitions[entry.name] = Definition(entry.name, value)
            scope = Scope(scope.parameters, dict(definitions))
    for name in made:
        if name not in definitions:
            raise BadDefinition(
                f"{where} defines {name!r} only under conditions, so that it may have no value; end its entries with one "
                "that has no 'when'."
            )
    return tuple(entry for mine in made.values() for entry in mine), scope


def _entry(table: Mapping[str, Any], scope: Scope, where: str, number: int) -> Entry:
    where = f"{where}, definition {number}"
    tables.check_keys(table, _DEFINE, ("name", "value", "source", "tag"), where)
    name, source, tag = (tables.text(table, key, where) for key in ("name", "source", "tag"))
    tables.check_one_of(tag, TAGS, "tag", where)
    if not _IDENTIFIER.fullmatch(name):
        raise BadDefinition(f"{where} has name = {name!r}; use small letters, digits and _.")
    value = parse(tables.expression(table, "value", where), scope, f"{where} ({name})")
    when = None
    if "when" in table:
        when = parse(tables.expression(table, "when", where), scope, f"{where} ({name})", "truth")
    return Entry(name, value, when, source, tag)


def _rule(table: Mapping[str, Any], scope: Scope, kernels: tuple[str, ...], where: str) -> Rule:
    tables.check_keys(table, _RULE, _NEEDED, where)
    path, source, tag = (tables.text(table, key, where) for key in _NEEDED)
    if path not in kernels and not _FORCED.fullmatch(path):
        known = [*kernels, "native", "rows", "pad:N"]
        raise UnknownKernel(
            f"{where} names the kernel {path!r}, which does not exist; {nearest(path, known)}"
        )
    tables.check_one_of(tag, TAGS, "tag", where)
    when = None
    if "when" in table:
        when = parse(tables.expression(table, "when", where), scope, where, "truth")
    return Rule(
        path,
        source,
        tag,
        op=tables.words(table, "op", OPS, where) or frozenset(OPS),
        dtype=tables.words(table, "dtype", DTYPES, where),
        bits=_bits(table, where),
        format=tables.words(table, "format", _FORMATS, where),
        mask=tables.words(table, "mask", MASKS, where),
        when=when,
        whole=_whole(table, where),
        shows=_named(table, "shows", scope, where),
        passes=_passes(table, scope, where),
        **{size: tables.size_range(table[size], size, where) for size in SIZES if size in table},
    )


def _named(table: Mapping[str, Any], key: str, scope: Scope, where: str) -> tuple[str, ...]:
    names = tables.items(table, key, where) if key in table else []
    for name in names:
        tables.check_one_of(name, tuple(scope.definitions), key, where)
    return tuple(names)


def _passes(table: Mapping[str, Any], scope: Scope, where: str) -> tuple[str, ...]:
    names = _named(table, "passes", scope, where)
    for name in names:
        tables.check_one_of(name, ARGUMENTS, "passes", where)
        if scope.kind(name) != "number":
            raise BadValue(f"{where} passes {name!r}, which is a {scope.kind(name)}; a kernel takes numbers.")
    return names


def _whole(table: Mapping[str, Any], where: str) -> int | None:
    whole = table.get("whole")
    if whole is not None and (type(whole) is not int or whole < 2):
        raise BadValue(f"{where} has whole = {whole!r}; it must be a number of rows from 2 on, such as 4.")
    return whole


def _bits(table: Mapping[str, Any], where: str) -> frozenset[int | str | None] | None:
    if "bits" not in table:
        return None
    widths = tables.items(table, "bits", where)
    for width in widths:
        if width not in ("dense", QUANTISED) and (type(width) is not int or width < 1):
            raise BadValue(
                f'{where} has bits = {width!r}; it must be a width such as 4, "dense" or "{QUANTISED}".'
            )
    return frozenset(None if width == "dense" else width for width in widths)
