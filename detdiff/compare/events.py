"""What engines and caches did: each run's events checked against its rows, and the two runs' against one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from detdiff.trace import PHASES, Trace, format_ranges

from .divergence import EventCount, Events, Finding
from .forwards import RunLog
from .pages import Event, page_findings, page_tables

_CHANGES: Final = (
    "merge",
    "extend",
    "filter",
    "roll",
    "trim",
    "quantise",
    "prefix",
    "turn",
    "load",
    "cancel",
)
"""Events that move, drop or replace entries which have been written."""

_LISTED: Final = 8


@dataclass(frozen=True)
class EventAnswer:
    """Findings that contradict a run's rows or part the runs, and what else there is to say of the events."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    events: Events
    diverged: bool


class RunEvents:
    """The events of one run, by request."""

    def __init__(self, trace: Trace, log: RunLog, run: str) -> None:
        self.trace, self.log, self.run = trace, log, run
        self.events: tuple[Event, ...] = trace.events()
        self.ids = [str(request["id"]) for request in trace.requests]

    def of(self, *kinds: str) -> Iterator[Event]:
        return (event for event in self.events if event["event"] in kinds)

    def id(self, event: Event) -> str:
        return self.ids[event["request"]]

    def touched(self, event: Event, request: int) -> bool:
        return request == event.get("request") or request in event.get("requests", ())

    def turns_to(self, request: int) -> list[int]:
        """A request and the turns before it, by number."""
        before = {event["request"]: event["from"] for event in self.of("turn")}
        found = [request]
        while found[-1] in before:
            found.append(before[found[-1]])
        return found

    def forwards_of(self, request: int, draft: bool) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The forwards with rows of a request in one of the models, ascending."""
        rows = self.trace.row_index()
        mine = (rows.request == request) & ((rows.phase == PHASES.index("draft")) == draft)
        return np.unique(rows.forward[mine]).astype(np.int64)


def event_answer(a: RunEvents, b: RunEvents) -> EventAnswer:
    """Check both runs' events. Raises what reading rows and forwards raises."""
    runs = a, b
    alone = [
        [
            *_short_trims(run),
            *_stale(run),
            *_prefixes(run),
            *_turns(run),
            *_adapters(run),
            *_acceptance(run),
            *_converted(run),
            *page_findings(run.trace, run.events, run.run),
        ]
        for run in runs
    ]
    both = {(f.what, f.request, f.detail) for f in alone[0]} & {
        (f.what, f.request, f.detail) for f in alone[1]
    }
    findings = [
        replace(f, run="both") if (f.what, f.request, f.detail) in both else f
        for f in (*alone[0], *alone[1])
        if f.run == "a" or (f.what, f.request, f.detail) not in both
    ]
    apart = list(_quantised_apart(*runs))
    tables = [page_tables(run.trace, run.events) for run in runs]
    notes = []
    if all(tables) and tables[0] != tables[1]:
        notes.append(
            "the runs' page tables differ: entries lie in other physical places, and are compared in logical order"
        )
    listed = tuple(found for run in runs for found in _listed(run))
    return EventAnswer(
        findings=(*findings, *apart),
        notes=tuple(notes),
        events=Events(_counts(*runs), listed),
        diverged=bool(apart) or len(both) * 2 != len(alone[0]) + len(alone[1]),
    )


def reused(trace: Trace) -> dict[int, int]:
    """How many leading positions each request, by number, took from another request instead of running them."""
    return {
        event["request"]: event["tokens"]
        for event in trace.events()
        if event["event"] == "prefix"
        and event["from"] != event["request"]
        and event.get("model", "target") == "target"
    }


def attributed(findings: Sequence[Finding], a: RunEvents, b: RunEvents) -> tuple[Finding, ...]:
    """Findings of changed entries and wrong offsets with what was done to the caches right before."""
    return tuple(_attributed(finding, b if finding.run == "b" else a) for finding in findings)


def _attributed(finding: Finding, run: RunEvents) -> Finding:
    if (
        finding.what not in ("cache_changed", "cache_foreign", "cache_missing", "offset")
        or finding.forward is None
    ):
        return finding
    if finding.request not in run.ids:
        return finding
    request = run.ids.index(finding.request)
    earlier = [n for n in run.forwards_of(request, draft=False).tolist() if n < finding.forward]
    since = earlier[-1] if earlier else -1
    done = [
        event
        for event in run.of(*_CHANGES)
        if (run.touched(event, request) or event["event"] == "cancel")
        and since <= event["forward"] < finding.forward
    ]
    if not done:
        return finding
    deeds = "; ".join(dict.fromkeys(deed(event, run.ids) for event in done))
    when = f"right before, after forward {since}" if earlier else "right before its first row"
    return replace(finding, detail=f"{finding.detail}; {when}: {deeds}")


def deed(event: Event, ids: Sequence[str]) -> str:
    """What an event did, in a few words."""
    kind = event["event"]
    if kind == "filter":
        return (
            f"filter (kept {_names(event.get('kept', ()), ids)} of {_names(event.get('requests', ()), ids)})"
        )
    if kind == "extend":
        return f"extend ({_names(event.get('requests', ()), ids)} by {_names(event.get('by', ()), ids)})"
    if kind == "merge":
        return f"merge ({_names(event.get('requests', ()), ids)})"
    if kind == "roll":
        pairs = zip(_several(event.get("requests")), _several(event.get("by")), strict=False)
        return "roll (" + ", ".join(f"{_names([request], ids)} by {by}" for request, by in pairs) + ")"
    if kind == "trim":
        return f"trim of the {_model(event)}'s cache ({event['done']} of {event['asked']} rows)"
    if kind == "turn":
        return (
            f"turn ({_names([event['request']], ids)} goes on from {_names([event['from']], ids)} over {event['kept']} of "
            f"{event['tokens']} tokens)"
        )
    if kind in ("save", "load"):
        return f"{kind} (layers {event['layers']}, for {_names([event['request']], ids)})"
    if kind == "adapter":
        return f"adapter {'on' if event['on'] else 'off'} ({_names([event['request']], ids)})"
    if kind == "cancel":
        return f"cancel ({_names([event['request']], ids)} after {event['tokens']} tokens)"
    if kind == "quantise":
        return f"quantise (from position {event['position']} on, layers {event['layers']})"
    if event["from"] == event["request"]:
        return f"prefix ({event['tokens']} tokens, run beforehand)"
    return f"prefix ({event['tokens']} tokens of {_names([event['from']], ids)})"


def _names(requests: Any, ids: Sequence[str]) -> str:
    return ", ".join(ids[n] for n in _several(requests) if type(n) is int and 0 <= n < len(ids)) or "none"


def _several(value: Any) -> Sequence[Any]:
    """A list that an event may have; the format leaves most keys free."""
    return value if isinstance(value, list | tuple) else ()


def _model(event: Event) -> str:
    return str(event.get("model", "target"))


def _short_trims(run: RunEvents) -> Iterator[Finding]:
    """Trims that took off another number of rows than was asked, one finding for a request, a model and its layers."""
    short: dict[tuple[int, str, str], list[Event]] = {}
    for event in run.of("trim"):
        if event["done"] != event["asked"]:
            short.setdefault((event["request"], _model(event), event["layers"]), []).append(event)
    for (_, model, layers), events in short.items():
        first = events[0]
        more = f", and {len(events) - 1} more trims like it" if len(events) > 1 else ""
        yield Finding(
            run.run,
            "trim",
            run.id(first),
            first["forward"],
            f"a trim of the {model}'s cache after forward {first['forward']} took {first['done']} of {first['asked']} "
            f"rows off in layers {layers}{more}",
        )


def _stale(run: RunEvents) -> Iterator[Finding]:
    """Rows that were written, then written again at an earlier place, and that the cache still held.

    A cache that is ahead of the engine's rows still holds the entries in between: those that a trim left, or that no
    trim was asked for.
    """
    rows = run.trace.row_index()
    ahead: dict[tuple[int, str], list[tuple[int, Event]]] = {}
    for noticed in run.log.noticed:
        event = noticed.event
        found, expected = event.get("found"), event.get("expected")
        if event.get("kind") != "offset" or type(found) is not int or type(expected) is not int:
            continue
        request = event.get("request")
        if found > expected and type(request) is int:
            ahead.setdefault((request, noticed.model), []).append((noticed.forward, event))
    for (request, model), seen in ahead.items():
        first, event = seen[0]
        drafts = (rows.phase == PHASES.index("draft")) == (model == "draft")
        inside = (rows.position >= event["expected"]) & (rows.position < event["found"])
        mine = np.isin(rows.request, run.turns_to(request))
        before = np.flatnonzero(mine & drafts & inside & (rows.forward < first))
        if not len(before):
            continue
        layers = format_ranges(e["layer"] for f, e in seen if f == first and type(e.get("layer")) is int)
        last = before[rows.forward[before] == int(rows.forward[before].max())]
        owner = int(rows.request[last[0]])
        what = f"rejected row{'' if len(last) == 1 else 's'}"
        if owner != request:
            # Of the turn before every row, the last write of each position.
            last = before[
                [
                    n
                    for n in range(len(before))
                    if rows.position[before[n]] not in rows.position[before[n + 1 :]]
                ]
            ]
            what = f"row{'' if len(last) == 1 else 's'} of {run.ids[owner]}"
        several = "" if len(last) == 1 else "s"
        tokens = ", ".join(str(token) for token in rows.token[last].tolist()[:_LISTED])
        written = format_ranges(sorted(set(rows.forward[last].tolist())))
        yield Finding(
            run.run,
            "stale",
            run.ids[request],
            first,
            f"{len(last)} {what} that forward{'' if written.isdigit() else 's'} {written} wrote at position{several} "
            f"{format_ranges(rows.position[last].tolist())} (token{several} {tokens}) stayed in the {model}'s cache "
            f"in layers {layers}, and the rows of forward {first} from position {event['expected']} on saw them",
        )


def _prefixes(run: RunEvents) -> Iterator[Finding]:
    """Prefixes of other tokens than the request's own."""
    rows = run.trace.row_index()
    for event in run.of("prefix"):
        prompt = run.trace.requests[event["request"]]["tokens"]
        draft = _model(event) == "draft"
        mine = (rows.request == event["from"]) & ((rows.phase == PHASES.index("draft")) == draft)
        # The last write of each position; what a donor itself took over is in its prompt.
        given = dict(enumerate(run.trace.requests[event["from"]]["tokens"]))
        given |= dict(zip(rows.position[mine].tolist(), rows.token[mine].tolist(), strict=True))
        wrong = next(
            (p for p in range(event["tokens"]) if p >= len(prompt) or given.get(p) != prompt[p]), None
        )
        if wrong is not None:
            yield Finding(
                run.run,
                "prefix",
                run.id(event),
                event["forward"],
                f"the {_model(event)}'s cache took {event['tokens']} positions from {run.ids[event['from']]}, whose token at "
                f"position {wrong} is {given.get(wrong)} where this prompt has "
                f"{prompt[wrong] if wrong < len(prompt) else 'none'}",
            )


def _turns(run: RunEvents) -> Iterator[Finding]:
    """Turns that do not begin where the rows that they keep end, and those that lack tokens of the chat template."""
    rows = run.trace.row_index()
    # A turn that begins anew takes over what an earlier prompt began with, as any request does.
    taken = {event["request"]: event["tokens"] for event in run.of("prefix") if _model(event) != "draft"}
    for event in run.of("turn"):
        request, told, closing = event["request"], event["told"], event.get("closing") or []
        own = np.flatnonzero((rows.request == request) & (rows.phase != PHASES.index("draft")))
        begins = max(event["kept"], taken.get(request, 0))
        if len(own) and int(rows.position[own[0]]) != begins:
            yield Finding(
                run.run,
                "turn",
                run.id(event),
                int(rows.forward[own[0]]),
                f"the turn keeps {event['kept']} rows of {run.ids[event['from']]}, and its own begin at position "
                f"{int(rows.position[own[0]])}",
            )
        tokens = run.trace.requests[request]["tokens"]
        missing = next(
            (n for n, token in enumerate(closing) if tokens[told + n : told + n + 1] != [token]), None
        )
        if missing is not None:
            first = own[rows.position[own] >= told + missing]
            left = len(closing) - missing
            yield Finding(
                run.run,
                "template",
                run.id(event),
                int(rows.forward[first[0]]) if len(first) else event["forward"],
                f"at position {told + missing} the conversation lacks the {'token' if left == 1 else f'{left} tokens'} "
                f"{', '.join(map(str, closing[missing:]))} with which the chat template ends the answer of "
                f"{run.ids[event['from']]}; it goes on with {tokens[told + missing] if told + missing < len(tokens) else 'nothing'}",
            )


def _adapters(run: RunEvents) -> Iterator[Finding]:
    """Rows that a layer's adapter computed although it was off, one finding a request; and rows of another adapter's turn."""
    on = {event["request"]: event["on"] for event in run.of("adapter")}
    for event in run.of("turn"):
        if event["kept"] and on.get(event["request"]) != on.get(event["from"]):
            yield Finding(
                run.run,
                "adapter",
                run.id(event),
                event["forward"],
                f"the turn keeps {event['kept']} rows of {run.ids[event['from']]}, which the model computed "
                f"{'with' if on.get(event['from']) else 'without'} its adapter",
            )
    trace, rows = run.trace, run.trace.row_index()
    ports = {(trace.sites[port.site].name, port.name): n for n, port in enumerate(trace.ports)}
    # A layer with an adapter gives what its base within gives, where that is off.
    layers = [
        (site.name, ports[site.name, "out"], ports[f"{site.name}.linear", "out"])
        for site in trace.sites
        if (site.name, "out") in ports and (f"{site.name}.linear", "out") in ports
    ]
    for request in (number for number, state in on.items() if not state and layers):
        own = np.flatnonzero(rows.request == request)
        wrong: list[tuple[str, int]] = []
        for table in np.unique(rows.table[own]):
            mine = own[rows.table[own] == table]
            digests, columns = trace.digests(mine), trace.tables[int(table)]
            for name, whole, base in layers:
                pair = int(columns[whole]), int(columns[base])
                if -1 not in pair and pair[0] != pair[1]:
                    differs = mine[digests[:, pair[0]] != digests[:, pair[1]]]
                    wrong += [(name, int(row)) for row in differs[:1]]
        if wrong:
            first = min(row for _, row in wrong)
            names = list(dict.fromkeys(name for name, row in wrong))
            more = f" and {len(names) - 1} more layers" if len(names) > 1 else ""
            yield Finding(
                run.run,
                "adapter",
                run.ids[request],
                int(rows.forward[first]),
                f"the adapter of {names[0]}{more} computed the rows from position {int(rows.position[first])} on, although it was off",
            )


def _acceptance(run: RunEvents) -> Iterator[Finding]:
    """The engine's own counts of drafts against the sums of its verifications."""
    own = run.trace.header.get("speculation")
    sums: dict[str, list[int]] = {}
    for event in run.of("verify"):
        both = sums.setdefault(run.id(event), [0, 0])
        both[0] += len(event["proposals"])
        both[1] += event["accepted"]
    for id, counted in own.items() if isinstance(own, Mapping) else ():
        found = sums.get(id, [0, 0])
        if isinstance(counted, Mapping) and [counted.get("proposed"), counted.get("accepted")] != found:
            yield Finding(
                run.run,
                "acceptance",
                id,
                None,
                f"the engine counted {counted.get('accepted')} of {counted.get('proposed')} drafts accepted, and its "
                f"verifications sum to {found[1]} of {found[0]}",
            )


def _converted(run: RunEvents) -> Iterator[Finding]:
    """Entries that are further from what was written than quantising them can put them, the first of each conversion."""
    for event in run.of("quantise"):
        outside = [each for each in _several(event.get("outside")) if isinstance(each, Mapping)]
        if not outside or "request" not in event:
            continue
        first, more = outside[0], sum(int(each.get("entries", 1)) for each in outside)
        error = first.get("error")
        far = "is not finite" if error is None else f"is {error:.3g} times the bound of its scale"
        yield Finding(
            run.run,
            "converted",
            run.id(event),
            event["forward"],
            f"the cache entry {first.get('entry')} of layer {first.get('layer')}, head {first.get('head')}, position "
            f"{first.get('position')} is not what was written: once quantised, its error {far}"
            + (f", and {more - 1:,} more entries like it" if more > 1 else ""),
        )


def _quantised_apart(a: RunEvents, b: RunEvents) -> Iterator[Finding]:
    """Requests whose caches were quantised from different positions."""
    sides = []
    for run in (a, b):
        found: dict[tuple[str, str], Event] = {}
        for event in run.of("quantise"):
            found.setdefault((run.ids[event["request"]] if "request" in event else "", _model(event)), event)
        sides.append(found)
    common = [key for key in sides[0] if key[0] in b.ids or not key[0]]
    common += [key for key in sides[1] if key not in sides[0] and (key[0] in a.ids or not key[0])]
    for key in common:
        events = sides[0].get(key), sides[1].get(key)
        quantised = [
            "not at all" if event is None else f"from position {event['position']} on{_chunk(run, event)}"
            for run, event in zip((a, b), events, strict=True)
        ]
        if quantised[0] != quantised[1] and (
            None in events or events[0]["position"] != events[1]["position"]  # type: ignore[index]
        ):
            layers = next(event["layers"] for event in events if event is not None)
            yield Finding(
                "both",
                "quantise",
                key[0] or None,
                None,
                f"the cache of layers {layers} was quantised {quantised[0]} in run a and {quantised[1]} in run b",
            )


def _chunk(run: RunEvents, event: Event) -> str:
    """Which part of the request's prompt was the last before an event."""
    if "request" not in event or event["forward"] < 0:
        return ""
    found = chunk_of(run.trace, event["request"], event["forward"])
    return f" (after forward {event['forward']}" + (f", prefill chunk {found})" if found is not None else ")")


def chunk_of(trace: Trace, request: int, forward: int) -> int | None:
    """Which of a request's prefill forwards this is, from 0; None where it is none of them."""
    rows, mine = trace.row_index(), trace.rows_of(request)
    forwards = rows.forward[mine[rows.phase[mine] == PHASES.index("prefill")]]
    # Rows lie in execution order.
    some = forwards[np.flatnonzero(np.diff(forwards, prepend=-1))]
    found = np.flatnonzero(some == forward)
    return int(found[0]) if len(found) else None


def _counts(a: RunEvents, b: RunEvents) -> tuple[EventCount, ...]:
    sides = [Counter((str(e["event"]), _model(e)) for e in run.events) for run in (a, b)]
    keys = dict.fromkeys((*sides[0], *sides[1]))
    return tuple(
        EventCount(kind, model, sides[0][kind, model], sides[1][kind, model]) for kind, model in keys
    )


def _listed(run: RunEvents) -> Iterator[Finding]:
    """What a reader should know of although nothing is wrong with it, the first of each kind."""
    seen: Counter[str] = Counter()
    for event in run.of("prefix", "quantise", "wrap", "turn", "load", "cancel", "adapter"):
        kind = event["event"]
        seen[kind] += 1
        if seen[kind] > _LISTED or "request" not in event:
            continue
        if kind == "wrap":
            chunk = chunk_of(run.trace, event["request"], event["forward"])
            start, rows = event.get("start"), event.get("rows")
            where = (
                f"positions {start} to {start + rows - 1}"
                if type(start) is type(rows) is int
                else "unknown positions"
            )
            detail = (
                f"{'a decode row' if chunk is None else f'prefill chunk {chunk}'} ({where}) passes the end of the window of "
                f"{event.get('window')} in layers {event.get('layers')}"
            )
        else:
            detail = deed(event, run.ids)
        yield Finding(run.run, kind, run.id(event), event["forward"], detail)
