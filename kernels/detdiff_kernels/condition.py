"""The language of a profile's conditions: integers, texts and versions, checked when read, never executed blindly.

An expression is parsed with ``ast`` and may hold only and, or, not, comparisons, ``in`` with a tuple, + - * // %,
``A if B else C``, min, max, ceil(a, b) (division rounded up), npow2(a) (the power of two not below a), even_split(a, u,
c) (the largest count up to c of equal parts of a that are multiples of u, at least 1), numbers, texts and known names.
Kinds are checked as well, so that a text is never compared with a number.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType
from typing import Any, Literal, NoReturn

from .errors import BadExpression, nearest

Kind = Literal["number", "text", "truth", "version"]
Version = tuple[int, ...]

# What an expression can ask of a call, by name; Call.names gives the values.
CALL_NAMES: dict[str, Kind] = {
    **dict.fromkeys(("m", "n", "k", "l", "bits", "group_size"), "number"),
    **dict.fromkeys(("q", "kv", "d", "heads", "kv_heads", "gqa", "batch", "experts"), "number"),
    **dict.fromkeys(("sorted", "padded"), "truth"),
    **dict.fromkeys(("dtype", "format", "mask"), "text"),
}
LONGEST = 1000
_LARGEST = 2**53
_MOST_NODES = 5000
_SUMS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_ORDERS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_COUNTS = {"min": None, "max": None, "ceil": 2, "npow2": 1, "even_split": 3}


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _npow2(a: int) -> int:
    return 1 << max(0, a - 1).bit_length()


def _even_split(items: int, unit: int, most: int) -> int:
    units = items // unit if items % unit == 0 else 1
    return next((parts for parts in range(min(most, units), 1, -1) if units % parts == 0), 1)


_GLOBALS: dict[str, Any] = {
    "__builtins__": {},
    "min": min,
    "max": max,
    "ceil": _ceil,
    "npow2": _npow2,
    "even_split": _even_split,
}


def version_of(text: str) -> Version:
    """The numbers of "0.32.1" without zeros at the end, so that "0.31" equals "0.31.0"; raises ValueError."""
    numbers = [int(part) for part in text.split(".") if part.isascii() and part.isdigit()]
    if not numbers or len(numbers) != len(text.split(".")):
        raise ValueError(text)
    while len(numbers) > 1 and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


@dataclass(frozen=True)
class Definition:
    """A name of a profile and the expression that it stands for."""

    name: str
    expression: Expression


@dataclass(frozen=True)
class Scope:
    """The names an expression may use: those of a call, a profile's parameters, and definitions made so far."""

    parameters: Mapping[str, Kind] = field(default_factory=dict)
    definitions: Mapping[str, Definition] = field(default_factory=dict)

    def kind(self, name: str) -> Kind | None:
        """The kind of the value that a name has, None for an unknown one."""
        if name in self.definitions:
            return self.definitions[name].expression.kind
        return self.parameters.get(name) or CALL_NAMES.get(name)

    @property
    def names(self) -> tuple[str, ...]:
        return (*CALL_NAMES, *self.parameters, *self.definitions)


@dataclass(frozen=True)
class Expression:
    """A checked expression. ``tree`` has definitions put in place; equality is that of the text."""

    text: str
    kind: Kind
    tree: ast.expr = field(compare=False, repr=False)
    shown: tuple[tuple[int, str], ...] = field(default=(), compare=False, repr=False)

    @cached_property
    def _code(self) -> CodeType:
        tree = ast.fix_missing_locations(ast.Expression(self.tree))
        return compile(tree, "<profile>", "eval")

    def value(self, names: Mapping[str, Any]) -> Any:
        """The value where ``names`` gives that of each name; raises BadExpression for a division by zero."""
        try:
            return eval(self._code, _GLOBALS, names)
        except ZeroDivisionError:
            used = ", ".join(f"{name} = {names[name]}" for name in sorted(self.leaves))
            raise BadExpression(
                f"The expression {self.text!r} divides by zero for {used}. Guard the division, such as by "
                "max(..., 1)."
            ) from None

    def with_values(self, names: Mapping[str, Any], scope: Scope) -> str:
        """The text with the value of each parameter and definition put behind its first mention."""
        text = self.text
        for end, name in reversed(self.shown):
            found = scope.definitions.get(name)
            value = found.expression.value(names) if found else names[name]
            if value is True or value is False:
                continue
            word = ".".join(map(str, value)) if isinstance(value, tuple) else value
            text = f"{text[:end]} ({word}){text[end:]}"
        return text

    @cached_property
    def leaves(self) -> frozenset[str]:
        """The names of the call and the parameters that the value depends on."""
        return frozenset(_names(self.tree))

    @cached_property
    def constants(self) -> dict[str, frozenset[int | str | Version]]:
        """For each leaf, the constants of the comparisons that it takes part in: where the value may change."""
        found: dict[str, set[Any]] = {name: set() for name in self.leaves}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Compare):
                values = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
                for name in _names(node):
                    found[name] |= values
        return {name: frozenset(values) for name, values in found.items()}


def _names(node: ast.AST) -> Iterator[str]:
    for leaf in ast.walk(node):
        if isinstance(leaf, ast.Name) and leaf.id not in _COUNTS:
            yield leaf.id


def parse(text: str, scope: Scope, where: str, wanted: Kind | None = None) -> Expression:
    """The expression in ``text``; ``where`` begins error messages. Raises BadExpression, which names the place."""
    reader = _Reader(text, scope, where)
    if len(text) > LONGEST:
        reader.refuse(None, f"it is longer than {LONGEST} characters")
    if not text.isascii():
        reader.refuse(None, "it has characters that are not ASCII")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            body = ast.parse(text, mode="eval").body
        kind, tree = reader.read(body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, BadExpression):
            raise
        reader.refuse(None, f"it cannot be parsed ({getattr(error, 'msg', error)})")
    # Definitions are put in place, so that a few of them could grow without bounds.
    if sum(1 for _ in ast.walk(tree)) > _MOST_NODES:
        reader.refuse(None, f"with its definitions put in place it has more than {_MOST_NODES} parts")
    if wanted is not None and kind != wanted:
        reader.refuse(body, f"it is a {kind} and a {wanted} is needed here")
    return Expression(text, kind, tree, tuple(reader.shown.values()))


def chain(parts: list[tuple[Expression | None, Expression]]) -> ast.expr:
    """``value if when else …`` over (when, value), the last of which has no ``when``."""
    tree = parts[-1][1].tree
    for when, value in reversed(parts[:-1]):
        assert when is not None
        tree = ast.IfExp(when.tree, value.tree, tree)
    return tree


class _Reader:
    def __init__(self, text: str, scope: Scope, where: str) -> None:
        self._text, self._scope, self._where = text, scope, where
        self.shown: dict[str, tuple[int, str]] = {}

    def refuse(self, node: ast.AST | None, why: str) -> NoReturn:
        place = ""
        if isinstance(node, ast.expr):
            part = ast.get_source_segment(self._text, node) or ""
            place = f" at {part!r} (character {node.col_offset + 1})"
        raise BadExpression(
            f"{self._where} has the expression {self._text!r}, which is refused{place}: {why}. An expression holds and, "
            "or, not, comparisons, in with a tuple, + - * // %, if else, min, max, ceil(a, b), npow2(a), "
            "even_split(a, unit, most), numbers, texts and known names."
        )

    def read(self, node: ast.expr) -> tuple[Kind, ast.expr]:
        """The kind of a node, and the node with definitions and versions put in place."""
        reader: Callable[[Any], tuple[Kind, ast.expr]] | None = getattr(self, f"_{type(node).__name__}", None)
        if reader is None:
            self.refuse(node, "this is not part of the language")
        return reader(node)

    def _of(self, node: ast.expr, wanted: Kind) -> ast.expr:
        kind, tree = self.read(node)
        if kind != wanted:
            self.refuse(node, f"it is a {kind} and a {wanted} is needed here")
        return tree

    def _Constant(self, node: ast.Constant) -> tuple[Kind, ast.expr]:
        if isinstance(node.value, bool):
            return "truth", node
        if isinstance(node.value, int) and abs(node.value) <= _LARGEST:
            return "number", node
        if isinstance(node.value, str):
            return "text", node
        self.refuse(node, "numbers are whole, of at most 53 bits, and other constants do not exist")

    def _Name(self, node: ast.Name) -> tuple[Kind, ast.expr]:
        kind = self._scope.kind(node.id)
        if kind is None:
            self.refuse(node, f"there is no such name; {nearest(node.id, self._scope.names)[:-1]}")
        if node.id not in CALL_NAMES and node.id not in self.shown:
            self.shown[node.id] = (node.end_col_offset or 0, node.id)
        if node.id in self._scope.definitions:
            return kind, self._scope.definitions[node.id].expression.tree
        return kind, node

    def _BoolOp(self, node: ast.BoolOp) -> tuple[Kind, ast.expr]:
        return "truth", ast.BoolOp(node.op, [self._of(part, "truth") for part in node.values])

    def _UnaryOp(self, node: ast.UnaryOp) -> tuple[Kind, ast.expr]:
        kind: Kind = "truth" if isinstance(node.op, ast.Not) else "number"
        if not isinstance(node.op, ast.Not | ast.USub):
            self.refuse(node, "the only signs are - and not")
        return kind, ast.UnaryOp(node.op, self._of(node.operand, kind))

    def _BinOp(self, node: ast.BinOp) -> tuple[Kind, ast.expr]:
        if not isinstance(node.op, _SUMS):
            self.refuse(node, "the operators are + - * // %")
        return "number", ast.BinOp(self._of(node.left, "number"), node.op, self._of(node.right, "number"))

    def _IfExp(self, node: ast.IfExp) -> tuple[Kind, ast.expr]:
        test = self._of(node.test, "truth")
        kind, body = self.read(node.body)
        return kind, ast.IfExp(test, body, self._of(node.orelse, kind))

    def _Call(self, node: ast.Call) -> tuple[Kind, ast.expr]:
        if not isinstance(node.func, ast.Name) or node.func.id not in _COUNTS or node.keywords:
            self.refuse(node, "the functions are min, max, ceil, npow2 and even_split")
        count = _COUNTS[node.func.id]
        if len(node.args) != count if count else len(node.args) < 2:
            self.refuse(node, f"{node.func.id} takes {count or 'two or more'} numbers")
        return "number", ast.Call(node.func, [self._of(arg, "number") for arg in node.args], [])

    def _Compare(self, node: ast.Compare) -> tuple[Kind, ast.expr]:
        sides = [node.left, *node.comparators]
        if len(sides) == 2 and isinstance(node.ops[0], ast.In | ast.NotIn):
            return "truth", self._membership(node)
        read = [self.read(side) for side in sides]
        if any(kind == "version" for kind, _ in read):
            read = [self._version(side, *pair) for side, pair in zip(sides, read, strict=True)]
        for side, (kind, _) in zip(sides, read, strict=True):
            if kind != read[0][0]:
                self.refuse(side, f"a {read[0][0]} is compared with a {kind}")
        for operator in node.ops:
            equal = isinstance(operator, ast.Eq | ast.NotEq)
            if not isinstance(operator, _ORDERS) or (read[0][0] in ("text", "truth") and not equal):
                self.refuse(node, f"a {read[0][0]} cannot be compared in this way")
        return "truth", ast.Compare(read[0][1], node.ops, [tree for _, tree in read[1:]])

    def _version(self, side: ast.expr, kind: Kind, tree: ast.expr) -> tuple[Kind, ast.expr]:
        if not isinstance(tree, ast.Constant):
            return kind, tree
        try:
            if kind != "text":
                raise ValueError(tree.value)
            # A code object can hold a tuple, which ast's types do not say.
            return "version", ast.Constant(version_of(str(tree.value)))  # type: ignore[arg-type]
        except ValueError:
            self.refuse(side, 'a version is written as a text such as "0.32.1"')

    def _membership(self, node: ast.Compare) -> ast.expr:
        kind, left = self.read(node.left)
        right = node.comparators[0]
        if not isinstance(right, ast.Tuple) or not right.elts:
            self.refuse(right, "in is followed by a tuple, such as (64, 128)")
        for item in right.elts:
            if not isinstance(item, ast.Constant) or self.read(item)[0] != kind:
                self.refuse(
                    item, f"the tuple has to hold constants that are a {kind} like what stands before in"
                )
        return ast.Compare(left, node.ops, [right])
