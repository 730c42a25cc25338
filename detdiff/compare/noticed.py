"""What a recorder noticed of rows and caches in each forward, as findings in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from detdiff.trace import format_ranges

from .divergence import Finding

Event = Mapping[str, Any]
_Group = tuple[int, str, Any, bool]  # a forward, a model, a request, and whether it is of layers


@dataclass(frozen=True)
class Noticed:
    """One thing that a recorder noticed: in which forward, whose (``target`` or ``draft``), and what."""

    forward: int
    model: str
    event: Event


def grouped(run: str, ids: Sequence[str], noticed: Iterable[Noticed]) -> Iterator[Finding]:
    """Findings in the order of their first forward; ``ids`` are the requests' ids by number.

    What one forward noticed of a request in several rows, layers or entries is one finding, and so is what later forwards noticed of
    the same layers: what the first forward saw, and for how long others did.
    """
    known: dict[str, dict[_Group, list[Noticed]]] = {kind: {} for kind in _DESCRIBED}
    findings: list[Finding] = []
    for found in noticed:
        kind, request = str(found.event.get("kind") or "event"), found.event.get("request")
        kind = "cache_changed" if kind == "cache_changed_more" else kind
        if kind in _DESCRIBED and _numbers(found.event, *_DESCRIBED[kind][0]):
            # A row's own offset is another matter than those of the caches before it.
            group = found.forward, found.model, request, "layer" in found.event
            known[kind].setdefault(group, []).append(found)
        else:
            detail = ", ".join(
                f"{key} {value}"
                for key, value in sorted(found.event.items())
                if key not in ("kind", "request")
            )
            findings.append(Finding(run, kind, _id(ids, request), found.forward, detail))
    for what, groups in known.items():
        describe = _DESCRIBED[what][1]
        for request, (first, *later) in _by_layers(groups).items():
            detail = describe([each.event for each in first], ids)
            other = [group for group in later if describe([each.event for each in group], ids) != detail]
            if other:
                forwards = f"{len(other)} later forward{'s' if len(other) > 1 else ''}"
                detail += f"; and otherwise in {forwards}, the last {other[-1][0].forward}"
            if request[1] == "draft":
                detail = f"in the draft model, {detail}"
            findings.append(Finding(run, what, _id(ids, request[0]), first[0].forward, detail))
    findings.sort(key=lambda finding: finding.forward or 0)
    yield from findings


def _by_layers(groups: Mapping[_Group, list[Noticed]]) -> dict[tuple[Any, str, str], list[list[Noticed]]]:
    """What forwards noticed of the same request, model and layers, in order."""
    found: dict[tuple[Any, str, str], list[list[Noticed]]] = {}
    for (_, model, request, _), group in groups.items():
        found.setdefault((request, model, _layers([each.event for each in group])), []).append(group)
    return found


def _layers(events: Sequence[Event]) -> str:
    return format_ranges(event["layer"] for event in events if _numbers(event, "layer"))


def _numbers(event: Event, *keys: str) -> bool:
    return all(type(event.get(key)) is int for key in keys)


def _id(ids: Sequence[str], request: Any) -> str | None:
    return ids[request] if type(request) is int and 0 <= request < len(ids) else None


def _changed(events: Sequence[Event], ids: Sequence[str]) -> str:
    """One entry by itself; many as the layers, sides, heads and positions that they span."""
    single = [event for event in events if event.get("kind") == "cache_changed"]
    more = sum(
        event["entries"]
        for event in events
        if event.get("kind") == "cache_changed_more" and _numbers(event, "entries")
    )
    if len(single) == 1 and not more:
        (event,) = single
        return (
            f"the cache entry {event.get('entry')} of layer {event.get('layer')}, head {event.get('head')}, position "
            f"{event.get('position')} is not what was written{_instead(single, ids)}"
        )
    sides = sorted({str(event.get("entry")) for event in single})
    spans = []
    for key in ("layer", "head", "position"):
        numbers = format_ranges(event[key] for event in single if _numbers(event, key))
        spans.append(f"{key}{'' if numbers.isdigit() else 's'} {numbers}")
    rest = f" and {more:,} more of these layers" if more else ""
    found = f"{len(single):,} cache entries{rest} are not what was written{_instead(single, ids)}"
    return f"{found}: {' and '.join(sides)}, {', '.join(spans)}"


def _instead(events: Sequence[Event], ids: Sequence[str]) -> str:
    """Whose entries changed ones are now, where that was found: the request that most are of."""
    known = Counter(of for event in events if (of := _id(ids, event.get("of"))) is not None)
    if not known:
        return ""
    of, count = known.most_common(1)[0]
    at = {event["at"] for event in events if _id(ids, event.get("of")) == of and _numbers(event, "at")}
    numbers = format_ranges(at)
    whose = f"what was written for position{'' if numbers.isdigit() else 's'} {numbers} of {of}"
    return f" but {whose}" if count == len(events) else f" ({count} are {whose})"


def _offset(events: Sequence[Event], ids: Sequence[str]) -> str:
    event, layers = events[0], _layers(events)
    if not layers:
        return _told_otherwise(events, "was computed at position", "were computed at other positions")
    return f"the cache {_of_layers(events)} is at offset {event['found']}, the row at {event['expected']}"


def _state(events: Sequence[Event], ids: Sequence[str]) -> str:
    event, layers = events[0], _layers(events)
    before = (
        "a row that nothing is before"
        if event["expected"] < 0
        else f"the row after position {event['expected']}"
    )
    return f"the recurrent state{'' if layers.isdigit() else 's'} {_of_layers(events)} that {before} found {'is' if layers.isdigit() else 'are'} as position {event['found']} left {'it' if layers.isdigit() else 'them'}"


def _token_fed(events: Sequence[Event], ids: Sequence[str]) -> str:
    return _told_otherwise(events, "was fed token", "were fed other tokens")


def _told_otherwise(events: Sequence[Event], one: str, several: str) -> str:
    """Rows for which the model was told another number than theirs."""
    found, expected = events[0]["found"], events[0]["expected"]
    if len(events) == 1:
        at = events[0].get("position", expected)
        end = "" if at == expected else f" where {expected} was expected"
        return f"the row at position {at} {one} {found}{end}"
    return f"{_rows(events)} {several}, the first {found} where {expected} was expected"


def _sequence(events: Sequence[Event], ids: Sequence[str]) -> str:
    of = _id(ids, events[0].get("of"))
    whose = "a sequence that no request has" if of is None else f"the sequence of {of}"
    return (
        f"{_rows(events)} {_was(events)} computed in {whose}, and {_its(events)} entries went into that cache"
    )


def _logits_read(events: Sequence[Event], ids: Sequence[str]) -> str:
    event = events[0]
    of = _id(ids, event.get("of"))
    others = (
        "others than the head gave at any row" if of is None else f"those of position {event['at']} of {of}"
    )
    return f"the token after position {event['position']} was chosen from logits that are not its row's but {others}"


def _foreign(events: Sequence[Event], ids: Sequence[str]) -> str:
    kinds: dict[tuple[str, str], list[Event]] = {}
    for event in events:
        kinds.setdefault(_whose(event, ids), []).append(event)
    saw = []
    for (one, several), mine in kinds.items():
        numbers = format_ranges({event["cell" if event["at"] < 0 else "at"] for event in mine})
        saw.append((one if numbers.isdigit() else several).format(numbers))
    return f"{_rows(events)} saw {' and '.join(saw)} in the cache {_of_layers(events)}"


def _whose(event: Event, ids: Sequence[str]) -> tuple[str, str]:
    """What a row saw in a cell, for one cell and for several; {} stands for the positions, or cells."""
    of = _id(ids, event["of"])
    if of is None or event["at"] < 0:
        return "cell {}, which no recorded row wrote,", "cells {}, which no recorded row wrote,"
    if event["of"] != event.get("request"):
        ended = ", which had ended," if event.get("ended") else ""
        return f"the entry of position {{}} of {of}{ended}", f"the entries of positions {{}} of {of}{ended}"
    if event["at"] > event["position"]:
        return (
            "the entry of its own later position {}",
            "the entries of later positions {} of their own request",
        )
    if _numbers(event, "window"):
        last = f"before the last {event['window']} positions that it may see,"
        return f"the entry of its own position {{}}, {last}", f"the entries of its own positions {{}}, {last}"
    return (
        "an entry of its own position {} that is not the last one written",
        "entries of own positions {} that are not the last ones written",
    )


def _missing(events: Sequence[Event], ids: Sequence[str]) -> str:
    most = max(events, key=lambda event: int(event["entries"]))
    count, first = most["entries"], most["first"]
    what = (
        f"the entry of {_its(events)} own position {first}"
        if count == 1
        else f"{count} of {_its(events)} own entries, the first of position {first},"
    )
    return f"{_rows(events)} did not see {what} in the cache {_of_layers(events)}"


def _more(events: Sequence[Event], ids: Sequence[str]) -> str:
    count = sum(event["entries"] for event in events)
    return f"{count:,} more contradictions of cache entries are not told one by one"


def _rows(events: Sequence[Event]) -> str:
    numbers = format_ranges(event["position"] for event in events if _numbers(event, "position"))
    return f"the row at position {numbers}" if numbers.isdigit() else f"the rows at positions {numbers}"


def _was(events: Sequence[Event]) -> str:
    return "was" if len({event.get("position") for event in events}) == 1 else "were"


def _its(events: Sequence[Event]) -> str:
    return "its" if len({event.get("position") for event in events}) == 1 else "their"


def _of_layers(events: Sequence[Event]) -> str:
    layers = _layers(events)
    return f"of layer {layers}" if layers.isdigit() else f"of layers {layers}"


def _rank_differs(events: Sequence[Event], ids: Sequence[str]) -> str:
    event = min(events, key=lambda each: int(each["rank"]))
    if event.get("site") == "rows":
        return f"process {event['rank']} runs other rows than process 0 after position {event['position']}"
    return (
        f"process {event['rank']} holds other bits than process 0 at {event.get('site')}.{event.get('port')}, position {event['position']}, "
        "where both should hold the same"
    )


def _rank_token(events: Sequence[Event], ids: Sequence[str]) -> str:
    event = events[0]
    return (
        f"process {event['rank']} chose token {event['found']} after position {event['position']} (token {event.get('index')}), where the "
        f"others chose {event['expected']}"
    )


_Describe = Callable[[Sequence[Event], Sequence[str]], str]
# Each with the numbers that an event must have. What was asked wrongly is why entries are not what they should be, so it stands first.
_DESCRIBED: Final[dict[str, tuple[tuple[str, ...], _Describe]]] = {
    "rank_token": (("position", "rank", "found", "expected"), _rank_token),
    "rank_differs": (("position", "rank"), _rank_differs),
    "token_fed": (("position", "found", "expected"), _token_fed),
    "sequence": (("position",), _sequence),
    "offset": (("found", "expected"), _offset),
    "state": (("found", "expected", "layer"), _state),
    "cache_missing": (("position", "first", "entries"), _missing),
    "cache_foreign": (("position", "cell", "at", "of"), _foreign),
    "cache_changed": ((), _changed),
    "cache_more": (("entries",), _more),
    "logits_read": (("position", "at"), _logits_read),
}
