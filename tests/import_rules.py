"""What the files of a package import, read from their source: nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache
from pathlib import Path

DYNAMIC = ("import_module", "__import__", "find_spec")
"""Functions whose first argument names a module."""


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def imports(source: str) -> frozenset[str]:
    """Every module that ``source`` imports anywhere, by its full name, but for relative ones."""
    return frozenset(_named(source))


def _named(source: str) -> Iterator[str]:
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            if called in DYNAMIC and isinstance(node.args[0].value, str):
                yield node.args[0].value


def importers(folder: Path, package: str) -> set[str]:
    """The files below ``folder`` that import ``package``, as paths relative to ``folder``."""
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if package in {name.partition(".")[0] for name in imports(path.read_text(encoding="utf-8"))}
    }


def modules(root: Path, package: str) -> dict[str, Path]:
    """The modules of ``package``, a folder of ``root``, by their full names."""
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def edges(known: Mapping[str, Path]) -> dict[str, frozenset[str]]:
    """By module, the others of ``known`` that it imports, inside of functions too; not those that only types need."""
    names = frozenset(known)
    found = {}
    for name, path in known.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        found[name] = _imported(package, path.read_text(encoding="utf-8"), names) - {name}
    return found


@cache
def _imported(package: str, source: str, known: frozenset[str]) -> frozenset[str]:
    return frozenset(_imported_names(package, source, known))


def _imported_names(package: str, source: str, known: frozenset[str]) -> Iterator[str]:
    tree = _parsed(source)
    typed = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in typed:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")
            start = above[: len(above) - node.level + 1] if node.level else []
            module = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                # A package's own function may have the name of a module in it, which then is what is meant.
                inner = f"{module}.{alias.name}"
                if inner in known:
                    yield inner
                elif module in known:
                    yield module


def circles(graph: Mapping[str, Set[str]]) -> list[set[str]]:
    """The largest sets of modules that all import one another, directly or not."""
    reached: dict[str, set[str]] = {}
    for name in graph:
        found: set[str] = set()
        waiting = [name]
        while waiting:
            for other in graph.get(waiting.pop(), ()):
                if other not in found:
                    found.add(other)
                    waiting.append(other)
        reached[name] = found
    found_circles: list[set[str]] = []
    for name in graph:
        circle = {other for other in reached[name] if name in reached[other]}
        if circle and circle not in found_circles:
            found_circles.append(circle)
    return found_circles


def only_forwards(path: Path) -> bool:
    """Whether a file, not a package's list of public names, holds nothing but imports of other files' names."""
    if path.name == "__init__.py":
        return False
    body = _parsed(path.read_text(encoding="utf-8")).body
    own = [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    forwarding = [
        node
        for node in own
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Assign) and _is_alias(node.value))
        or (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
    ]
    return bool(own) and len(own) == len(forwarding)


def class_twins(folders: Iterable[Path]) -> dict[str, list[str]]:
    """By name, the files of ``folders`` that define a class of that name, where more than one class has it.

    An underscore does not tell names apart. Classes inside of others and of functions count.
    """
    found: dict[str, list[str]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(_parsed(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name.lstrip("_"), []).append(path.relative_to(folder).as_posix())
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def _is_alias(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) or (isinstance(value, ast.Attribute) and _is_alias(value.value))
