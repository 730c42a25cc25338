"""What recorders notice of rows and caches, in words: one finding for what is of one kind, with its rows, entries and layers."""

from __future__ import annotations

from typing import Any

import pytest

from detdiff.compare import Finding
from detdiff.compare.noticed import Noticed, grouped

IDS = ("anchor", "other")
Event = dict[str, Any]


def findings(*events: Event | tuple[int, Event]) -> list[Finding]:
    """Of events of forward 3, or of the forward that stands before one."""
    placed = [each if isinstance(each, tuple) else (3, each) for each in events]
    return list(grouped("b", IDS, [Noticed(forward, "target", event) for forward, event in placed]))


def foreign(**keys: Any) -> Event:
    given = {"layer": 0, "request": 0, "position": 9, "cell": 40, "at": 4, "of": 1, "ended": False}
    return {"kind": "cache_foreign", **given, **keys}


def row(kind: str, position: int, found: int, expected: int) -> Event:
    return {"kind": kind, "request": 0, "position": position, "found": found, "expected": expected}


def missing(layer: int, entries: int) -> Event:
    return {
        "kind": "cache_missing", "layer": layer, "request": 0, "position": 9, "first": 2, "entries": entries,
    }  # fmt: skip


def changed(head: int, **keys: Any) -> Event:
    given = {"layer": 1, "entry": "K", "head": head, "position": 3, "request": 0}
    return {"kind": "cache_changed", **given, **keys}


CASES: dict[str, tuple[list[Event], str, str]] = {
    "a token": (
        [row("token_fed", 9, 17, 12)],
        "token_fed",
        "the row at position 9 was fed token 17 where 12 was expected",
    ),
    "tokens": (
        [row("token_fed", 9, 17, 12), row("token_fed", 10, 18, 13)],
        "token_fed",
        "the rows at positions 9-10 were fed other tokens, the first 17 where 12 was expected",
    ),
    "a position": ([row("offset", 9, 8, 9)], "offset", "the row at position 9 was computed at position 8"),
    "positions": (
        [row("offset", 9, 8, 9), row("offset", 10, 9, 10)],
        "offset",
        "the rows at positions 9-10 were computed at other positions, the first 8 where 9 was expected",
    ),
    "a cache's offset": (
        [{"kind": "offset", "request": 0, "layer": layer, "found": 8, "expected": 9} for layer in (0, 1)],
        "offset",
        "the cache of layers 0-1 is at offset 8, the row at 9",
    ),
    "a sequence": (
        [{"kind": "sequence", "request": 0, "position": 9, "of": 1}],
        "sequence",
        "the row at position 9 was computed in the sequence of other, and its entries went into that cache",
    ),
    "nobody's sequence": (
        [{"kind": "sequence", "request": 0, "position": position, "of": -1} for position in (9, 10)],
        "sequence",
        "the rows at positions 9-10 were computed in a sequence that no request has, and their entries went into that cache",
    ),
    "another's entry": (
        [foreign(), foreign(layer=1)],
        "cache_foreign",
        "the row at position 9 saw the entry of position 4 of other in the cache of layers 0-1",
    ),
    "another's entries": (
        [foreign(), foreign(at=5), foreign(at=5, position=10)],
        "cache_foreign",
        "the rows at positions 9-10 saw the entries of positions 4-5 of other in the cache of layer 0",
    ),
    "one that had ended": (
        [foreign(ended=True)],
        "cache_foreign",
        "the row at position 9 saw the entry of position 4 of other, which had ended, in the cache of layer 0",
    ),
    "a later one of its own": (
        [foreign(of=0, at=12)],
        "cache_foreign",
        "the row at position 9 saw the entry of its own later position 12 in the cache of layer 0",
    ),
    "an older one of its own": (
        [foreign(of=0)],
        "cache_foreign",
        "the row at position 9 saw an entry of its own position 4 that is not the last one written in the cache of layer 0",
    ),
    "nobody's entries": (
        [foreign(of=-1, at=-1), foreign(of=-1, at=-1, cell=42), foreign()],
        "cache_foreign",
        "the row at position 9 saw cells 40,42, which no recorded row wrote, and the entry of position 4 of other in the cache of "
        "layer 0",
    ),
    "an entry not seen": (
        [missing(0, 1), missing(1, 1)],
        "cache_missing",
        "the row at position 9 did not see the entry of its own position 2 in the cache of layers 0-1",
    ),
    "entries not seen": (
        [missing(0, 3)],
        "cache_missing",
        "the row at position 9 did not see 3 of its own entries, the first of position 2, in the cache of layer 0",
    ),
    "another's instead": (
        [changed(0, of=1, at=7)],
        "cache_changed",
        "the cache entry K of layer 1, head 0, position 3 is not what was written but what was written for position 7 of other",
    ),
    "some of another's": (
        [changed(0, of=1, at=7), changed(1, of=1, at=8), changed(2)],
        "cache_changed",
        "3 cache entries are not what was written (2 are what was written for positions 7-8 of other): K, layer 1, heads 0-2, "
        "position 3",
    ),
    "more than are told": (
        [{"kind": "cache_more", "entries": 1234}],
        "cache_more",
        "1,234 more contradictions of cache entries are not told one by one",
    ),
    "another's logits": (
        [{"kind": "logits_read", "request": 0, "position": 9, "of": 1, "at": 4}],
        "logits_read",
        "the token after position 9 was chosen from logits that are not its row's but those of position 4 of other",
    ),
    "a process with other bits": (
        [{"kind": "rank_differs", "request": 0, "position": 9, "rank": 1, "site": "layers.0.mlp", "port": "out"}],
        "rank_differs",
        "process 1 holds other bits than process 0 at layers.0.mlp.out, position 9, where both should hold the same",
    ),
    "a process with other rows": (
        [{"kind": "rank_differs", "request": 0, "position": 9, "rank": 1, "site": "rows", "port": "after"}],
        "rank_differs",
        "process 1 runs other rows than process 0 after position 9",
    ),
    "a process with another token": (
        [{"kind": "rank_token", "request": 0, "position": 9, "index": 2, "rank": 1, "found": 7, "expected": 5}],
        "rank_token",
        "process 1 chose token 7 after position 9 (token 2), where the others chose 5",
    ),
    "nobody's logits": (
        [{"kind": "logits_read", "request": 0, "position": 9, "of": -1, "at": -1}],
        "logits_read",
        "the token after position 9 was chosen from logits that are not its row's but others than the head gave at any row",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_one_kind_is_one_finding(name: str) -> None:
    events, what, detail = CASES[name]
    (found,) = findings(*events)
    request = None if what == "cache_more" else "anchor"
    assert (found.run, found.what, found.request, found.forward, found.detail) == (
        "b",
        what,
        request,
        3,
        detail,
    )


def test_later_forwards_are_counted_where_they_say_something_else() -> None:
    (found,) = findings((3, foreign()), (4, foreign()), (6, foreign(position=12)))
    assert found.forward == 3 and found.detail.endswith("; and otherwise in 1 later forward, the last 6")
    assert len(findings((3, foreign()), (4, foreign()))) == 1


def test_what_was_asked_wrongly_stands_before_what_came_of_it() -> None:
    found = findings(changed(0), missing(0, 1), foreign(), row("offset", 9, 8, 9), row("token_fed", 9, 1, 2))
    assert [each.what for each in found] == [
        "token_fed", "offset", "cache_missing", "cache_foreign", "cache_changed",
    ]  # fmt: skip


def test_events_that_lack_a_number_or_a_name_are_listed_as_they_are() -> None:
    odd = {"kind": "cache_foreign", "request": 0, "cell": "third"}
    assert [(each.what, each.request, each.detail) for each in findings(odd, {"kind": "else", "request": 7})] == [
        ("cache_foreign", "anchor", "cell third"), ("else", None, ""),
    ]  # fmt: skip
    assert findings() == []
