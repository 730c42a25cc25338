"""Dispatch profiles: which kernel a backend would run for a call. The rules are data, in profiles/*.toml."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

OPS = ("linear", "head", "switch", "attention")
TAGS = ("read", "inferred", "measured")
_SPLIT_OPS = ("linear", "head")


@dataclass(frozen=True)
class Call:
    """One operation of a forward. ``rows`` is M; ``second_last`` the second-to-last dimension of its input.

    ``dtype`` is the input's, such as "float32"; ``bits`` the weight's width, None for a dense weight.
    """

    op: Literal["linear", "head", "switch", "attention"]
    rows: int
    second_last: int
    k: int
    n: int
    dtype: str
    bits: int | None = None


@dataclass(frozen=True)
class Choice:
    """A kernel path (native, rows, pad:N or a reference kernel) and the rule that chose it, as text."""

    kernel: str
    rule: str


@dataclass(frozen=True)
class Range:
    """An inclusive range of sizes; ``high`` None means without limit."""

    low: int = 1
    high: int | None = None

    def __contains__(self, size: int) -> bool:
        return self.low <= size and (self.high is None or size <= self.high)

    def covers(self, other: Range) -> bool:
        if self.high is None:
            return self.low <= other.low
        return self.low <= other.low and other.high is not None and other.high <= self.high

    def __str__(self) -> str:
        if self.high is None:
            return f"{self.low}.."
        return str(self.low) if self.low == self.high else f"{self.low}..{self.high}"


ANY = Range()


@dataclass(frozen=True)
class Rule:
    """Conditions that all have to hold, and the kernel path then taken; a condition left out always holds.

    ``bits`` holds widths, and None for dense weights. ``source`` is file, function and commit; ``tag`` one of
    TAGS.
    """

    kernel: str
    source: str
    tag: str
    op: frozenset[str] = frozenset(OPS)
    rows: Range = ANY
    second_last: Range = ANY
    k: Range = ANY
    n: Range = ANY
    dtype: frozenset[str] | None = None
    bits: frozenset[int | None] | None = None

    def takes(self, call: Call) -> bool:
        sizes = ("rows", "second_last", "k", "n")
        return (
            call.op in self.op
            and all(getattr(call, size) in getattr(self, size) for size in sizes)
            and (self.dtype is None or call.dtype in self.dtype)
            and (self.bits is None or call.bits in self.bits)
        )

    def covers(self, other: Rule) -> bool:
        """Whether every call that ``other`` takes is one that this rule takes."""
        sizes = ("rows", "second_last", "k", "n")
        return (
            self.op >= other.op
            and all(getattr(self, size).covers(getattr(other, size)) for size in sizes)
            and (self.dtype is None or (other.dtype is not None and self.dtype >= other.dtype))
            and (self.bits is None or (other.bits is not None and self.bits >= other.bits))
        )

    @property
    def condition(self) -> str:
        """The conditions in words, without the operation, which whoever reads this knows."""
        named = {"rows": "rows", "second_last": "second-to-last dimension", "k": "k", "n": "n"}
        parts = [
            f"{word} {getattr(self, size)}" for size, word in named.items() if getattr(self, size) != ANY
        ]
        if self.dtype is not None:
            parts.append(" or ".join(sorted(self.dtype)))
        if self.bits is not None:
            widths = sorted(width for width in self.bits if width is not None)
            parts.append(" or ".join([f"{width}-bit" for width in widths] + ["dense"] * (None in self.bits)))
        return ", ".join(parts) or "any shape"


@dataclass(frozen=True)
class Profile:
    """Ordered rules that mirror one backend's thresholds; the first that takes a call wins."""

    name: str
    backend: str
    note: str
    rules: tuple[Rule, ...]

    def choose(self, call: Call, split_rows: int | None = None) -> Choice:
        """The kernel path for a call; native where no rule takes it.

        With ``split_rows`` n, a linear or head call of 2 to n rows is taken row by row, each row chosen for
        as a call of its own; where that choice is native, the path is rows.
        """
        if split_rows is None or call.op not in _SPLIT_OPS or not 1 < call.rows <= split_rows:
            return self._first(call)
        alone = self._first(replace(call, rows=1, second_last=1))
        rule = f"split_rows {split_rows}: {call.rows} rows <= {split_rows} -> {alone.rule}"
        return Choice("rows" if alone.kernel == "native" else alone.kernel, rule)

    def _first(self, call: Call) -> Choice:
        for rule in self.rules:
            if rule.takes(call):
                short = rule.kernel.removeprefix(f"{self.name}/")
                return Choice(rule.kernel, f"{self.name}: {rule.condition} -> {short}")
        return Choice("native", f"{self.name}: no rule -> native")
