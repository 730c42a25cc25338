"""A page as a tree of elements, read strictly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from typing import Any

from detdiff.report.document import Report, Section

VOID = frozenset(("meta", "link", "br", "hr", "img", "input", "path", "rect"))


@dataclass
class Node:
    """An element with its attributes and what it holds."""

    tag: str
    attributes: dict[str, str]
    parent: Node | None = None
    children: list[Node | str] = field(default_factory=list)

    def all(self, *tags: str, **attributes: str) -> list[Node]:
        """Elements below, in order, with one of these names and all of these attributes; ``class_`` is one of several."""
        return [node for node in self._below() if (not tags or node.tag in tags) and node._has(attributes)]

    def one(self, *tags: str, **attributes: str) -> Node:
        (found,) = self.all(*tags, **attributes)
        return found

    @property
    def text(self) -> str:
        return "".join(each if isinstance(each, str) else each.text for each in self.children)

    def _has(self, attributes: dict[str, str]) -> bool:
        return all(
            value in self.attributes.get("class", "").split()
            if name == "class_"
            else self.attributes.get(name) == value
            for name, value in attributes.items()
        )

    def _below(self) -> Iterator[Node]:
        for each in self.children:
            if isinstance(each, Node):
                yield each
                yield from each._below()


class Tree(HTMLParser):
    """A document, strictly: every element is closed where it was opened."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.root = self._at = Node("", {})
        self.feed(text)
        self.close()
        assert self._at is self.root, f"<{self._at.tag}> is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs}, self._at)
        self._at.children.append(node)
        if tag not in VOID:
            self._at = node

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._at.children.append(Node(tag, {name: value or "" for name, value in attrs}, self._at))

    def handle_endtag(self, tag: str) -> None:
        assert self._at.tag == tag, f"</{tag}> closes <{self._at.tag}>"
        assert self._at.parent is not None
        self._at = self._at.parent

    def handle_data(self, data: str) -> None:
        self._at.children.append(data)


def tree(text: str) -> Node:
    return Tree(text).root


def of(*blocks: Any, **changes: Any) -> Report:
    """A report of one section."""
    made = Report(
        "different", "The runs diverge", "", (Section("flip", "The flip", blocks),), None, None, None, ""
    )
    return replace(made, **changes)
