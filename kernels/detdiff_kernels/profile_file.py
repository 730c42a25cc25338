"""Reads dispatch profiles from TOML and refuses those that cannot mean what they say.

Top-level keys: name, backend, note; [parameters.NAME] tables with default, meaning and one of range ("12..18"), choices
or versions ("0.29.."); [[define]] entries with name, value, source, tag and perhaps when; [[rule]] tables with kernel,
source, tag and any of the conditions op, rows, second_last, k, n, group_size, query, keys, head_dim (ranges: "1",
"2..8", "9.."), dtype, bits (widths, "dense" or "quantised"), format, mask, when (an expression), whole, and
shows and passes
(definitions).

Profiles are found by name: those that are shipped, those of installed packages, and files. Every error is one paragraph.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from importlib.resources import files
from pathlib import Path
from typing import Any

from .condition import CALL_NAMES, Definition, Expression, Scope, chain, parse, version_of
from .dispatch import (
    MASKS,
    OPS,
    QUANTISED,
    SIZES,
    TAGS,
    Call,
    DefinitionEntry,
    Parameter,
    Profile,
    Range,
    Rule,
    Value,
    bind,
    split_spec,
)
from .errors import (
    BadDefinition,
    BadEntryPoint,
    BadExpression,
    BadParameter,
    BadParameterValue,
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
from .rounding import DTYPES

_RANGE = re.compile(r"(\d+)(\.\.(\d+)?)?")


def _check_keys(
    table: Mapping[str, Any], known: tuple[str, ...], needed: tuple[str, ...], where: str
) -> None:
    """Raises UnknownKey for a key that is not known, and MissingKey where one that is needed is missing."""
    for key in table:
        if key not in known:
            raise UnknownKey(f"{where} has the key {key!r}, which does not exist; {nearest(key, known)}")
    for key in needed:
        if key not in table:
            raise MissingKey(f"{where} has no {key!r}; add it. Needed are {', '.join(needed)}.")


def _listed(value: Any, key: str, where: str) -> list[Mapping[str, Any]]:
    """A list of tables; raises BadValue for anything else."""
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise BadValue(f"{where} has no list of rules under {key!r}; write each as a [[{key}]] table.")
    return value


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    """A text that is not empty; raises BadValue."""
    value = table[key]
    if not isinstance(value, str) or not value:
        raise BadValue(f"{where} has {key} = {value!r}; it must be a text that is not empty.")
    return value


def _expression(table: Mapping[str, Any], key: str, where: str) -> str:
    """The text of an expression; a number stands for itself. Raises BadValue."""
    value = table[key]
    return str(value) if type(value) is int else _text(table, key, where)


def _check_one_of(value: Any, known: tuple[str, ...], key: str, where: str) -> None:
    """Raises BadValue for a value that is not known."""
    if value not in known:
        raise BadValue(f"{where} has {key} = {value!r}, which does not exist; {nearest(str(value), known)}")


def _items(table: Mapping[str, Any], key: str, where: str) -> list[Any]:
    """The items of a list, or the one value there is; raises BadValue for none."""
    value = table[key]
    found = value if isinstance(value, list) else [value]
    if not found:
        raise BadValue(f"{where} has an empty {key}, so it could take no call; leave the key out or fill it.")
    return found


def _words(table: Mapping[str, Any], key: str, known: tuple[str, ...], where: str) -> frozenset[str] | None:
    """One or more known words, None where the key is missing; raises BadValue."""
    if key not in table:
        return None
    found = _items(table, key, where)
    for word in found:
        _check_one_of(word, known, key, where)
    return frozenset(found)


def _size_range(value: Any, key: str, where: str) -> Range:
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


_TOP = ("name", "backend", "note", "parameters", "define", "rule")
_NEEDED = ("kernel", "source", "tag")
_RULE = (*_NEEDED, "op", *SIZES, "dtype", "bits", "format", "mask", "when", "whole", "shows", "passes")
_DEFINE = ("name", "value", "when", "source", "tag")
_PARAMETER = ("default", "meaning", "range", "choices", "versions")
# Sizes for which conditions are worked out once, so that one that always divides by zero is refused.
_TRIED = (1, 7, 64, 4096)
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
    _check_keys(data, _TOP, ("name", "backend", "note", "rule"), where)
    name, backend, note = (_text(data, key, where) for key in ("name", "backend", "note"))
    if not _NAME.fullmatch(name):
        raise BadValue(f"{where} has name = {name!r}; a name is made of letters, digits, '.', '_' and '-'.")
    parameters = _parameters(data.get("parameters", {}), where)
    entries, scope = _definitions(_listed(data.get("define", []), "define", where), parameters, where)
    found = _listed(data["rule"], "rule", where)
    if not found:
        raise BadValue(f"{where} has no list of rules under 'rule'; write each as a [[rule]] table.")
    rules = tuple(
        _rule(table, scope, kernels, f"{where}, rule {number}") for number, table in enumerate(found, 1)
    )
    _check_reached(rules, where)
    values = bind(parameters, {}, name)
    _check_divisions(rules, values, where)
    return Profile(name, backend, note, rules, parameters, values, scope, entries)


def _check_reached(rules: tuple[Rule, ...], where: str) -> None:
    for place, rule in enumerate(rules, 1):
        for above, earlier in enumerate(rules[: place - 1], 1):
            if earlier.contains(rule):
                raise UnreachableRule(
                    f"{where}, rule {place} ({rule.condition} -> {rule.kernel}) can never be reached: rule {above} "
                    f"({earlier.condition}) takes all its calls. Move it up, or remove it."
                )


def _check_divisions(rules: tuple[Rule, ...], values: Mapping[str, Value], where: str) -> None:
    for size in _TRIED:
        call = Call("linear", size, size, size, size, query=size, keys=size, head_dim=size)
        names = {**call.names(), **values}
        for number, rule in enumerate(rules, 1):
            try:
                if rule.when is not None:
                    rule.when.value(names)
            except BadExpression as error:
                raise BadExpression(f"{where}, rule {number}: {error}") from None


def _parameters(data: Any, where: str) -> tuple[Parameter, ...]:
    if not isinstance(data, dict) or not all(isinstance(table, dict) for table in data.values()):
        raise BadParameter(f"{where} has parameters = {data!r}; write each as a [parameters.NAME] table.")
    return tuple(_parameter(name, table, f"{where}, parameter {name}") for name, table in data.items())


def _parameter(name: str, table: Mapping[str, Any], where: str) -> Parameter:
    _check_keys(table, _PARAMETER, ("default", "meaning"), where)
    if name in CALL_NAMES or not _IDENTIFIER.fullmatch(name):
        raise BadParameter(
            f"{where} has a name that is taken, or no name; use small letters, digits and _, and none of "
            f"{', '.join(CALL_NAMES)}."
        )
    default, meaning = table["default"], _text(table, "meaning", where)
    kinds = [key for key in ("range", "choices", "versions") if key in table]
    made: Parameter | None = None
    if len(kinds) == 1 and type(default) in (int, str):
        if kinds == ["range"]:
            limits = _size_range(table["range"], "range", where)
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
) -> tuple[tuple[DefinitionEntry, ...], Scope]:
    scope = Scope({parameter.name: parameter.kind for parameter in parameters}, {})
    made: dict[str, list[DefinitionEntry]] = {}
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


def _entry(table: Mapping[str, Any], scope: Scope, where: str, number: int) -> DefinitionEntry:
    where = f"{where}, definition {number}"
    _check_keys(table, _DEFINE, ("name", "value", "source", "tag"), where)
    name, source, tag = (_text(table, key, where) for key in ("name", "source", "tag"))
    _check_one_of(tag, TAGS, "tag", where)
    if not _IDENTIFIER.fullmatch(name):
        raise BadDefinition(f"{where} has name = {name!r}; use small letters, digits and _.")
    value = parse(_expression(table, "value", where), scope, f"{where} ({name})")
    when = None
    if "when" in table:
        when = parse(_expression(table, "when", where), scope, f"{where} ({name})", "truth")
    return DefinitionEntry(name, value, when, source, tag)


def _rule(table: Mapping[str, Any], scope: Scope, kernels: tuple[str, ...], where: str) -> Rule:
    _check_keys(table, _RULE, _NEEDED, where)
    path, source, tag = (_text(table, key, where) for key in _NEEDED)
    if path not in kernels and not _FORCED.fullmatch(path):
        known = [*kernels, "native", "rows", "pad:N"]
        raise UnknownKernel(
            f"{where} names the kernel {path!r}, which does not exist; {nearest(path, known)}"
        )
    _check_one_of(tag, TAGS, "tag", where)
    when = None
    if "when" in table:
        when = parse(_expression(table, "when", where), scope, where, "truth")
    return Rule(
        path,
        source,
        tag,
        op=_words(table, "op", OPS, where) or frozenset(OPS),
        dtype=_words(table, "dtype", DTYPES, where),
        bits=_bits(table, where),
        format=_words(table, "format", _FORMATS, where),
        mask=_words(table, "mask", MASKS, where),
        when=when,
        whole=_whole(table, where),
        shows=_named(table, "shows", scope, where),
        passes=_passes(table, scope, where),
        **{size: _size_range(table[size], size, where) for size in SIZES if size in table},
    )


def _named(table: Mapping[str, Any], key: str, scope: Scope, where: str) -> tuple[str, ...]:
    names = _items(table, key, where) if key in table else []
    for name in names:
        _check_one_of(name, tuple(scope.definitions), key, where)
    return tuple(names)


def _passes(table: Mapping[str, Any], scope: Scope, where: str) -> tuple[str, ...]:
    names = _named(table, "passes", scope, where)
    for name in names:
        _check_one_of(name, ARGUMENTS, "passes", where)
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
    widths = _items(table, "bits", where)
    for width in widths:
        if width not in ("dense", QUANTISED) and (type(width) is not int or width < 1):
            raise BadValue(
                f'{where} has bits = {width!r}; it must be a width such as 4, "dense" or "{QUANTISED}".'
            )
    return frozenset(None if width == "dense" else width for width in widths)


GROUP = "detdiff.profiles"


def profile_names() -> tuple[str, ...]:
    """The names of the profiles that are shipped, then those that installed packages offer."""
    shipped = _shipped()
    return (*shipped, *(name for name in _offered() if name not in shipped))


def profile(spec: str) -> Profile:
    """The profile of that name, or in the file of a path that ends in .toml, with parameters after a colon.

    "mlx-metal", "mlx-metal:generation=15,letter=d", "./mine.toml:chip=2". Raises UnknownProfile, UnknownParameter,
    BadParameterValue, and what ``load_profile`` raises.
    """
    name, given = split_spec(spec)
    if name.endswith(".toml"):
        return load_profile(Path(name)).with_parameters(given)
    if name in _shipped():
        text = (files(__package__) / "profiles" / f"{name}.toml").read_text("utf-8")
        return parse_profile(text, f"Profile {name}", kernel_names()).with_parameters(given)
    offered = _offered()
    if name in offered:
        return _load(offered[name]).with_parameters(given)
    raise UnknownProfile(
        f"There is no dispatch profile named {name!r}; {nearest(name, profile_names())} A file of your own is given by "
        "a path that ends in .toml."
    )


def load_profile(path: Path) -> Profile:
    """The profile in a TOML file; raises a ProfileError, or UnknownKernel where a rule names none."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnreadableProfile(
            f"Profile {path} cannot be read: {error}. It must be a UTF-8 TOML file; check the path."
        ) from error
    return parse_profile(text, f"Profile {path}", kernel_names())


def _shipped() -> tuple[str, ...]:
    found = (files(__package__) / "profiles").iterdir()
    return tuple(sorted(entry.name.removesuffix(".toml") for entry in found if entry.name.endswith(".toml")))


def _offered() -> dict[str, EntryPoint]:
    return {point.name: point for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)}


def _load(point: EntryPoint) -> Profile:
    """What an entry point names: a Path, or a text that is a path ending in .toml or the TOML itself."""
    try:
        found = point.load()
    except Exception as error:
        raise BadEntryPoint(
            f"The profile {point.name} of an installed package ({point.value}) cannot be loaded: "
            f"{type(error).__name__}: {error}. Repair or remove that package."
        ) from error
    if isinstance(found, Path) or (isinstance(found, str) and found.endswith(".toml")):
        return load_profile(Path(found))
    if isinstance(found, str):
        return parse_profile(found, f"Profile {point.name} of {point.value}", kernel_names())
    raise BadEntryPoint(
        f"The profile {point.name} of an installed package ({point.value}) is a {type(found).__name__}; expected a "
        "pathlib.Path, or a text that is a path ending in .toml or the TOML itself. Repair or remove that package."
    )
