"""Pages of a paged cache: which request named which, and where two owners of one wrote into it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from detdiff.trace import PHASES, Trace

from .divergence import Finding

Event = Mapping[str, Any]
Owner = tuple[str, int]  # a model and a request's number
Tables = dict[tuple[str, str], tuple[tuple[int, int], ...]]


def page_tables(trace: Trace, events: Sequence[Event]) -> Tables:
    """Every page that a request named, as (index, page) in order, by model and request id."""
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for event in events:
        if event["event"] == "page" and not event.get("freed"):
            model, request = _owner(event)
            owner = model, str(trace.requests[request]["id"])
            found.setdefault(owner, []).append((event["index"], event["page"]))
    return {owner: tuple(pages) for owner, pages in found.items()}


def _owner(event: Event) -> Owner:
    return str(event.get("model", "target")), int(event["request"])


@dataclass
class _Together:
    """Two owners name one page at one index since a forward; positions below ``shared`` are the same for both."""

    owners: tuple[Owner, Owner]
    index: int
    page: int
    since: int
    shared: int


def page_findings(trace: Trace, events: Sequence[Event], run: str) -> Iterator[Finding]:
    """Pages that two tables name without a shared prefix, and shared pages that were written without being copied."""
    paged = [event for event in events if event["event"] in ("page", "prefix")]
    size = trace.scenario.get("page_tokens")
    if not isinstance(size, int) or size < 1 or not any(event["event"] == "page" for event in paged):
        return
    ids = [str(request["id"]) for request in trace.requests]
    writes = _Writes(trace, size)
    tables: dict[Owner, dict[int, int]] = {}
    shared: dict[Owner, int] = {}  # positions that a request took over
    together: list[_Together] = []

    def diverged(owner: Owner, index: int, until: int) -> Iterator[Finding]:
        for pair in [p for p in together if owner in p.owners and p.index == index]:
            together.remove(pair)
            yield from writes.into(pair, until, ids, run)

    for event in paged:
        owner = _owner(event)
        if event["event"] == "prefix":
            shared[owner] = event["tokens"]
            continue
        table, index, page = tables.setdefault(owner, {}), event["index"], event["page"]
        if event.get("freed"):
            table.pop(index, None)
            yield from diverged(owner, index, event["forward"] + 1)
            continue
        if index in table:
            # What was written in the forward of a copy went to the copy.
            yield from diverged(owner, index, event["forward"])
        for other, pages in tables.items():
            for place, named in pages.items():
                if named != page or other[0] != owner[0] or (other, place) == (owner, index):
                    continue
                if other != owner and place == index and index * size < shared.get(owner, 0):
                    together.append(_Together((other, owner), index, page, event["forward"], shared[owner]))
                else:
                    yield Finding(
                        run,
                        "page",
                        ids[owner[1]],
                        event["forward"],
                        f"page {page} was given to {ids[owner[1]]} for positions {index * size} to {index * size + size - 1} "
                        f"while it held positions {place * size} to {place * size + size - 1} of {ids[other[1]]}",
                    )
        table[index] = page
    for pair in together:
        yield from writes.into(pair, 1 << 40, ids, run)


class _Writes:
    """Which rows were written when."""

    def __init__(self, trace: Trace, size: int) -> None:
        self._rows, self._size = trace.row_index(), size

    def into(self, pair: _Together, until: int, ids: Sequence[str], run: str) -> Iterator[Finding]:
        """A finding where either owner wrote into a page that both named, after they shared it and before ``until``."""
        rows, size = self._rows, self._size
        for model, request in pair.owners:
            drafts = (rows.phase == PHASES.index("draft")) == (model == "draft")
            mine = (rows.request == request) & drafts & (rows.position // size == pair.index)
            found = np.flatnonzero(mine & (rows.forward > pair.since) & (rows.forward < until))
            if len(found):
                forward = int(rows.forward[found[0]])
                yield Finding(
                    run,
                    "page",
                    ids[request],
                    forward,
                    f"page {pair.page} was written at position {int(rows.position[found[0]])} by {ids[request]} while "
                    f"{' and '.join(ids[owner[1]] for owner in pair.owners)} share it up to position {pair.shared - 1}; "
                    "expected a copy first",
                )
                return
