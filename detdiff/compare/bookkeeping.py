"""What a recorder noticed of caches and offsets, one line for everything that says the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from detdiff.trace import format_ranges

from .divergence import Finding

_CHANGED: Final = ("cache_changed", "cache_changed_more")


@dataclass(frozen=True)
class Noticed:
    """One thing that a recorder noticed: in which forward, whose (``target`` or ``draft``), and what."""

    forward: int
    model: str
    event: Mapping[str, Any]


def grouped(run: str, ids: Sequence[str], noticed: Iterable[Noticed]) -> Iterator[Finding]:
    """Findings in the order of their first forward; ``ids`` are the requests' ids by number.

    Changed entries of a request's layers are one finding, and so are wrong offsets of its layers: what the first forward
    saw, and for how long others did.
    """
    changed: dict[tuple[int, str, Any], list[Noticed]] = {}
    offsets: dict[tuple[int, str, Any], list[Noticed]] = {}
    findings: list[Finding] = []
    for found in noticed:
        kind, request = found.event.get("kind"), found.event.get("request")
        key = (found.forward, found.model, request)
        if kind in _CHANGED:
            changed.setdefault(key, []).append(found)
        elif kind == "offset" and _numbers(found.event, "found", "expected"):
            offsets.setdefault(key, []).append(found)
        else:
            detail = ", ".join(
                f"{key} {value}"
                for key, value in sorted(found.event.items())
                if key not in ("kind", "request")
            )
            findings.append(Finding(run, str(kind or "event"), _id(ids, request), found.forward, detail))
    for what, groups, said in (("cache_changed", changed, _changed), ("offset", offsets, _offset)):
        for request, (first, *later) in _by_layers(groups).items():
            detail = said([each.event for each in first])
            other = [group for group in later if said([each.event for each in group]) != detail]
            if other:
                forwards = f"{len(other)} later forward{'s' if len(other) > 1 else ''}"
                detail += f"; and otherwise in {forwards}, the last {other[-1][0].forward}"
            if request[1] == "draft":
                detail = f"in the draft model, {detail}"
            findings.append(Finding(run, what, _id(ids, request[0]), first[0].forward, detail))
    findings.sort(key=lambda finding: finding.forward or 0)
    yield from findings


def _by_layers(
    groups: Mapping[tuple[int, str, Any], list[Noticed]],
) -> dict[tuple[Any, str, str], list[list[Noticed]]]:
    """What forwards noticed of the same request, model and layers, in order."""
    found: dict[tuple[Any, str, str], list[list[Noticed]]] = {}
    for (_, model, request), group in groups.items():
        found.setdefault((request, model, _layers([each.event for each in group])), []).append(group)
    return found


def _layers(events: Sequence[Mapping[str, Any]]) -> str:
    return format_ranges(event["layer"] for event in events if _numbers(event, "layer"))


def _numbers(event: Mapping[str, Any], *keys: str) -> bool:
    return all(type(event.get(key)) is int for key in keys)


def _id(ids: Sequence[str], request: Any) -> str | None:
    return ids[request] if type(request) is int and 0 <= request < len(ids) else None


def _changed(events: Sequence[Mapping[str, Any]]) -> str:
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
            f"{event.get('position')} is not what was written"
        )
    sides = sorted({str(event.get("entry")) for event in single})
    spans = [
        f"{key}s {format_ranges(event[key] for event in single if _numbers(event, key))}"
        for key in ("layer", "head", "position")
    ]
    rest = f" and {more:,} more of these layers" if more else ""
    return f"{len(single):,} cache entries{rest} are not what was written: {' and '.join(sides)}, {', '.join(spans)}"


def _offset(events: Sequence[Mapping[str, Any]]) -> str:
    event, layers = events[0], _layers(events)
    of = f"layer {layers}" if layers.isdigit() else f"layers {layers}"
    return f"the cache of {of} is at offset {event['found']}, the row at {event['expected']}"
