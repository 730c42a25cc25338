"""Dispatch profiles: which kernel a backend would run for a call, and what a profile leaves open, such as a chip's
generation or a version. The rules are data, in profiles/*.toml.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from .condition import Expression, Kind, Scope, Version, version_of
from .errors import BadParameterValue, UnknownParameter, nearest

Value = int | str | Version


@dataclass(frozen=True)
class Parameter:
    """A parameter of a profile: ``low`` to ``high``, one of ``choices``, or a version not below ``oldest``.

    ``default`` is as it is written, an integer or a text.
    """

    name: str
    meaning: str
    default: int | str
    choices: tuple[int | str, ...] = ()
    low: int = 0
    high: int = 0
    oldest: str = ""

    @property
    def kind(self) -> Kind:
        if self.oldest:
            return "version"
        return "text" if isinstance(self.default, str) else "number"

    @property
    def allowed(self) -> str:
        """The values it can have, in words."""
        if self.oldest:
            return f"a version not below {self.oldest}"
        if self.choices:
            return "one of " + ", ".join(map(str, self.choices))
        return f"a whole number from {self.low} to {self.high}"

    def value(self, text: int | str) -> Value:
        """The value that ``text`` stands for; raises BadParameterValue."""
        try:
            if self.oldest:
                found = version_of(str(text))
                if found < version_of(self.oldest):
                    raise ValueError(text)
                return found
            number = int(text) if self.kind == "number" else text
            if number not in self.choices if self.choices else not self.low <= int(number) <= self.high:
                raise ValueError(text)
            return number
        except ValueError:
            close = f" ({nearest(str(text), map(str, self.choices))})" if self.choices else ""
            raise BadParameterValue(
                f"The parameter {self.name} ({self.meaning}) was given {str(text)!r}; it takes {self.allowed}{close}. "
                "Give one of these, or leave it out for the default "
                f"{self.default}."
            ) from None


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """The name or path and the parameters of "NAME:key=value,key=value"; raises BadParameterValue."""
    stem, dot, rest = spec.partition(".toml:")
    name, _, given = (f"{stem}.toml", "", rest) if dot else spec.partition(":")
    values: dict[str, str] = {}
    for part in given.split(",") if given else ():
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not key or not value or key in values:
            raise BadParameterValue(
                f"The profile {spec!r} has {part!r} after the colon; parameters are written key=value, each once, with "
                "commas between them, such as mlx-metal:generation=15,letter=d."
            )
        values[key] = value
    return name, values


def bind(parameters: tuple[Parameter, ...], given: Mapping[str, int | str], profile: str) -> dict[str, Value]:
    """The value of each parameter, given or default. Raises UnknownParameter and BadParameterValue."""
    names = [parameter.name for parameter in parameters]
    for key in given:
        if key not in names:
            known = nearest(key, names) if names else "it has none."
            raise UnknownParameter(f"The profile {profile} has no parameter {key!r}; {known}")
    return {one.name: one.value(given.get(one.name, one.default)) for one in parameters}


def shown(value: Value) -> str:
    """A value as it is written."""
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)


OPS = ("linear", "head", "switch", "attention")
TAGS = ("read", "inferred", "measured")
MASKS = ("none", "causal", "array")
QUANTISED = "quantised"
_SPLIT_OPS = ("linear", "head")
# A run has some hundred different calls at a time; a bound keeps a long one, whose key lengths grow, from growing too.
_REMEMBERED = 20_000


@dataclass(frozen=True)
class Call:
    """One operation of a forward.

    ``rows`` is M: for a switch the gathered rows, tokens times experts per token. ``second_last`` is the second-to-last
    dimension of the input, ``dtype`` its dtype such as "float32". ``k`` and ``n`` are the weight's inputs and outputs,
    ``bits`` its width and ``group_size`` the items of a group, both None for a dense weight, ``format`` "dense",
    "affine" or a GGUF block such as "Q4_K". A switch has ``experts`` and may be ``sorted`` by expert. Attention has
    ``query`` and ``keys`` positions, padding included, ``head_dim``, and a ``mask`` that is none, causal or an array.
    """

    op: Literal["linear", "head", "switch", "attention"]
    rows: int
    second_last: int = 1
    k: int = 0
    n: int = 0
    dtype: str = "float32"
    bits: int | None = None
    group_size: int | None = None
    format: str = "dense"
    experts: int = 1
    sorted: bool = False
    query: int = 0
    keys: int = 0
    head_dim: int = 0
    heads: int = 1
    kv_heads: int = 1
    batch: int = 1
    mask: Literal["none", "causal", "array"] = "none"

    def names(self) -> dict[str, Any]:
        """The values of the names that a condition can use (``condition.CALL_NAMES``); 0 bits mean dense."""
        plain = self.format == "dense" and self.bits is not None
        return {
            "m": self.rows,
            "n": self.n,
            "k": self.k,
            "l": self.second_last,
            "bits": self.bits or 0,
            "group_size": self.group_size or 0,
            "q": self.query,
            "kv": self.keys,
            "d": self.head_dim,
            "heads": self.heads,
            "kv_heads": self.kv_heads,
            "gqa": self.heads // max(1, self.kv_heads),
            "batch": self.batch,
            "experts": self.experts,
            "sorted": self.sorted,
            "padded": self.mask == "array" and self.batch > 1,
            "dtype": self.dtype,
            "format": "affine" if plain else self.format,
            "mask": self.mask,
        }


@dataclass(frozen=True)
class Choice:
    """A kernel path (native, rows, pad:N or a reference kernel) and the rule that chose it, as text.

    ``arguments`` are keyword arguments that the kernel has to be called with, such as (("blocks", 64),).
    """

    kernel: str
    rule: str
    arguments: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class RowSpan:
    """The flat rows [first, last) of a call, row-major over its leading dimensions, and the kernel that takes them."""

    first: int
    last: int
    choice: Choice


@dataclass(frozen=True)
class Range:
    """An inclusive range of sizes; ``high`` None means without limit."""

    low: int = 1
    high: int | None = None

    def __contains__(self, size: int) -> bool:
        return self.low <= size and (self.high is None or size <= self.high)

    def contains(self, other: Range) -> bool:
        return other.low in self and (
            self.high is None or (other.high is not None and other.high <= self.high)
        )

    def __str__(self) -> str:
        if self.high is None:
            return f"{self.low}.."
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


ANY = Range()
# The range conditions and how they read.
SIZES = {
    "rows": "rows",
    "second_last": "second-to-last dimension",
    "k": "k",
    "n": "n",
    "group_size": "group size",
    "query": "query length",
    "keys": "key length",
    "head_dim": "head dimension",
}


@dataclass(frozen=True)
class Rule:
    """Conditions that all have to hold, and the kernel path then taken; a condition left out always holds.

    ``bits`` holds widths, None for dense weights and QUANTISED for any width. With ``whole`` n, the kernel takes whole
    groups of n rows and the rows left over are a call of their own. ``shows`` names definitions whose value the text of
    a choice says, since the kernel works by them; ``passes`` names those that the kernel is handed as well. ``source``
    is file, function and commit; ``tag`` one of TAGS.
    """

    kernel: str
    source: str
    tag: str
    op: frozenset[str] = frozenset(OPS)
    rows: Range = ANY
    second_last: Range = ANY
    k: Range = ANY
    n: Range = ANY
    group_size: Range = ANY
    query: Range = ANY
    keys: Range = ANY
    head_dim: Range = ANY
    dtype: frozenset[str] | None = None
    bits: frozenset[int | str | None] | None = None
    format: frozenset[str] | None = None
    mask: frozenset[str] | None = None
    when: Expression | None = None
    whole: int | None = None
    shows: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()

    @cached_property
    def ranges(self) -> tuple[tuple[str, Range], ...]:
        """The sizes that are limited."""
        return tuple((size, getattr(self, size)) for size in SIZES if getattr(self, size) != ANY)

    def takes(self, call: Call, names: Mapping[str, Any] | None = None) -> bool:
        """Whether all conditions hold; ``names`` are the call's and the parameters' values, where at hand."""
        return (
            call.op in self.op
            and (self.whole is None or call.rows >= self.whole)
            and all((getattr(call, size) or 0) in limits for size, limits in self.ranges)
            and (self.dtype is None or call.dtype in self.dtype)
            and (
                self.bits is None
                or call.bits in self.bits
                or (QUANTISED in self.bits and call.bits is not None)
            )
            and (self.format is None or call.names()["format"] in self.format)
            and (self.mask is None or call.mask in self.mask)
            and (self.when is None or bool(self.when.value(call.names() if names is None else names)))
        )

    def contains(self, other: Rule) -> bool:
        """Whether this takes every call that ``other`` takes, as far as sizes and names say: an expression contains
        itself and nothing else."""
        return (
            self.op >= other.op
            and self.whole in (None, other.whole)
            and all(limits.contains(getattr(other, size)) for size, limits in self.ranges)
            and _holds(self.dtype, other.dtype)
            and _holds(self.bits, other.bits)
            and _holds(self.format, other.format)
            and _holds(self.mask, other.mask)
            and (self.when is None or (other.when is not None and self.when.text == other.when.text))
        )

    @property
    def condition(self) -> str:
        """The conditions in words, without the operation, which whoever reads this knows."""
        return self._words(self.when.text if self.when else None)

    def arguments_for(self, names: Mapping[str, Any], scope: Scope) -> tuple[tuple[str, int], ...]:
        """The keyword arguments of the kernel."""
        return tuple((name, scope.definitions[name].expression.value(names)) for name in self.passes)

    def condition_for(self, names: Mapping[str, Any], scope: Scope) -> str:
        """The conditions with the values of definitions and parameters, as in "m >= limit (13)"."""
        words = self._words(self.when.with_values(names, scope) if self.when else None)
        values = [
            f"{name} {scope.definitions[name].expression.value(names)}"
            for name in (*self.shows, *self.passes)
        ]
        return ", ".join([words, *values])

    def _words(self, when: str | None) -> str:
        parts = [f"{SIZES[size]} {limits}" for size, limits in self.ranges]
        if self.dtype is not None:
            parts.append(" or ".join(sorted(self.dtype)))
        if self.bits is not None:
            widths = [
                f"{width}-bit" for width in sorted(width for width in self.bits if isinstance(width, int))
            ]
            kinds = [QUANTISED] * (QUANTISED in self.bits) + ["dense"] * (None in self.bits)
            parts.append(" or ".join(widths + kinds))
        if self.format is not None:
            parts.append(" or ".join(sorted(self.format)))
        if self.mask is not None:
            parts.append("mask " + " or ".join(sorted(self.mask)))
        if when is not None:
            parts.append(when)
        if self.whole is not None:
            parts.append(f"whole groups of {self.whole} rows")
        return ", ".join(parts) or "any shape"


def _holds(mine: frozenset[Any] | None, other: frozenset[Any] | None) -> bool:
    """Whether one condition's names, or widths, hold all of another's."""
    if mine is None or other is None:
        return mine is None
    return all(one in mine or (QUANTISED in mine and one is not None) for one in other)


@dataclass(frozen=True)
class Profile:
    """Ordered rules that mirror one backend's thresholds; the first that takes a call wins.

    ``values`` are those of ``parameters``; ``define`` are the entries of the definitions in ``scope``, for display.
    """

    name: str
    backend: str
    note: str
    rules: tuple[Rule, ...]
    parameters: tuple[Parameter, ...] = ()
    values: Mapping[str, Value] = field(default_factory=dict)
    scope: Scope = field(default_factory=Scope, repr=False)
    define: tuple[DefinitionEntry, ...] = field(default=(), repr=False)
    _parts: dict[tuple[Call, int | None], tuple[RowSpan, ...]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @property
    def spec(self) -> str:
        """The name with the value of every parameter, as ``profile`` takes it."""
        given = ",".join(f"{name}={shown(value)}" for name, value in self.values.items())
        return f"{self.name}:{given}" if given else self.name

    def with_parameters(self, given: Mapping[str, int | str]) -> Profile:
        """The same profile for other parameters. Raises UnknownParameter and BadParameterValue."""
        values = bind(self.parameters, given, self.name)
        return Profile(
            self.name, self.backend, self.note, self.rules, self.parameters, values, self.scope, self.define
        )

    def choose(self, call: Call, split_rows: int | None = None) -> Choice:
        """The kernel path for a call, or for its first rows where the path depends on a row's place; native where no
        rule takes it.

        With ``split_rows`` n, a linear or head call of 2 to n rows is taken row by row, each row chosen for
        as a call of its own; where that choice is native, the path is rows.
        """
        return self.parts(call, split_rows)[0].choice

    def parts(self, call: Call, split_rows: int | None = None) -> tuple[RowSpan, ...]:
        """The kernel path of each run of rows, in order and without gaps; see ``choose``."""
        key = (call, split_rows)
        found = self._parts.get(key)
        if found is None:
            if len(self._parts) >= _REMEMBERED:
                self._parts.clear()
            found = self._parts[key] = self._divide(call, split_rows)
        return found

    def rule_for(self, call: Call) -> Rule | None:
        """The rule that takes a call, or its first rows; None where the call stays native."""
        names = {**call.names(), **self.values}
        return next((rule for rule in self.rules if rule.takes(call, names)), None)

    def _divide(self, call: Call, split_rows: int | None) -> tuple[RowSpan, ...]:
        if split_rows is not None and call.op in _SPLIT_OPS and 1 < call.rows <= split_rows:
            alone = self.choose(replace(call, rows=1, second_last=1))
            text = f"split_rows {split_rows}: {call.rows} rows <= {split_rows} -> {alone.rule}"
            path = "rows" if alone.kernel == "native" else alone.kernel
            return (RowSpan(0, call.rows, Choice(path, text, alone.arguments)),)
        rule = self.rule_for(call)
        if rule is None:
            return (RowSpan(0, call.rows, Choice("native", f"{self.name}: no rule -> native")),)
        names = {**call.names(), **self.values}
        text = rule.condition_for(names, self.scope)
        choice = Choice(
            rule.kernel,
            f"{self.name}: {text} -> {rule.kernel.removeprefix(f'{self.name}/')}",
            rule.arguments_for(names, self.scope),
        )
        left = call.rows % rule.whole if rule.whole else 0
        first = (RowSpan(0, call.rows - left, choice),)
        if not left:
            return first
        rest = self.parts(replace(call, rows=left, second_last=min(left, call.second_last)))
        start = call.rows - left
        return (*first, *(RowSpan(start + part.first, start + part.last, part.choice) for part in rest))


@dataclass(frozen=True)
class DefinitionEntry:
    """One [[define]] of a profile: ``name`` is ``value`` where ``when`` holds and no entry above it does."""

    name: str
    value: Expression
    when: Expression | None
    source: str
    tag: str
