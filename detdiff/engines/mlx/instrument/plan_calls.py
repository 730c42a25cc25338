"""Which path each site took in a forward, as a trace's plan says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from detdiff.trace import format_ranges

from .forward import ForwardRecord
from .paths import NATIVE, Taken

# A packed forward calls these request by request.
PER_REQUEST = ("rope", "attention", "cache_write", "cache_read")


class _Group(NamedTuple):
    """What sites have in common that share a line; ``rows`` and ``second_last`` are None for calls per request."""

    path: str
    rule: str
    rows: int | None
    second_last: int | None
    at: str | None


def plan_calls(record: ForwardRecord) -> list[dict[str, Any]]:
    """The calls of a forward's plan: sites whose calls were alike share one, in the order of their first site."""
    forward, sites = record.forward, record.sites
    head = sites.index.get(sites.head or "", -1)
    slots, columns = forward.shape
    groups: dict[_Group, list[int]] = {}
    known: dict[tuple[Sequence[int], tuple[Taken, ...]], list[_Group]] = {}
    for site, taken in record.calls.items():
        rows = forward.selected if site == head and forward.selected is not None else range(slots * columns)
        key = rows, tuple(taken)
        if key not in known:
            known[key] = _grouped(key[1], rows)
        for group in known[key]:
            groups.setdefault(group, []).append(site)
    for group, unchosen in _unchosen(record, head).items():
        groups.setdefault(group, []).extend(unchosen)
    ordered = sorted(groups.items(), key=lambda item: (min(item[1]), _first(item[0].at)))
    return [
        {
            "path": group.path,
            "rule": group.rule,
            **({} if group.rows is None else {"rows": group.rows, "second_last": group.second_last}),
            "sites": format_ranges([record.sites.first_site + site for site in found]),
            **({} if group.at is None else {"at": group.at}),
        }
        for group, found in ordered
    ]


def _grouped(taken: Sequence[Taken], rows: Sequence[int]) -> list[_Group]:
    """One group where all rows of a site took one path, else one for each path with the rows that took it.

    ``rows`` are the forward's rows that the site saw; it may have made several rows of each, which lie together.
    """
    runs: dict[tuple[int | None, int | None, str, str], list[range]] = {}
    for one in taken:
        runs.setdefault(one[:4], []).append(one.at or range(0))
    several, rest = divmod(taken[0].rows or len(rows), len(rows))
    if len(runs) == 1 or rest:
        n, second_last, path, rule = next(iter(runs))
        return [_Group(path, rule, n, second_last, None)]
    groups = []
    for (n, second_last, path, rule), mine in runs.items():
        # Of a row that took more than one path, the first says what it is recorded as.
        at = [rows[i] for run in mine for i in range(-(-run.start // several), -(-run.stop // several))]
        if at:
            groups.append(_Group(path, rule, n, second_last, format_ranges(at)))
    return groups


def _first(at: str | None) -> int:
    return 0 if at is None else int(at.partition(",")[0].partition("-")[0])


def _unchosen(record: ForwardRecord, head: int) -> dict[_Group, list[int]]:
    """The sites that the kernel plan had no say in, and how the backend ran them."""
    forward = record.forward
    slots, columns = forward.shape
    whole = _Group(NATIVE, "", slots * columns, columns, None)
    apart = _Group(NATIVE, "", None, None, None) if forward.layout == "packed" else whole
    found: dict[_Group, list[int]] = {whole: [], apart: []}
    for site, about in enumerate(record.sites.sites):
        if site not in record.calls:
            found[apart if about.kind in PER_REQUEST else whole].append(site)
    logits = record.sites.index["logits"]
    if not forward.logits_used:
        # They are never computed: the engine does not ask for them.
        found[whole] = [site for site in found[whole] if site not in (head, logits)]
    elif head in found[whole] and forward.selected is not None:
        found[whole].remove(head)
        own = _Group(NATIVE, "", len(forward.selected), len(forward.selected), None)
        found.setdefault(own, []).append(head)
    return {group: sites for group, sites in found.items() if sites}
