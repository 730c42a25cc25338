"""How a run's scenario reads: what decides the run, in a few words.

A trace keeps whatever its recorder put into the scenario, so what is missing or of another type is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from detdiff.scenario import PathRule, Schedule

from .words import count, named

_LISTED = 4
_OF_REQUESTS: Final[Mapping[str, Any]] = {
    "max_tokens": None,
    "arrival": 0,
    "ignore_stop": False,
    "chat": False,
    "temperature": 0.0,
    "top_p": 1.0,
    "seed": 0,
}
"""What a request may be asked for beside its prompt, and what it is where nothing is asked."""
_DECISIVE = (
    "schedule",
    "layout",
    "active",
    "row_budget",
    "prefill_chunk",
    "kernels",
    "split_rows",
    "draft",
    "drafts",
    "force_tokens",
    "kv_bits",
    "kv_group_size",
    "kv_start",
    "page_tokens",
    "share_prefix",
    "reuse_tokens",
)


def asked(scenario: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The scenario's requests by id; empty where it does not hold them."""
    found = _tables(scenario, "request")
    return {request["id"]: request for request in found if isinstance(request.get("id"), str)}


def sampling(request: Mapping[str, Any]) -> str | None:
    """``sampled at temperature 0.8, top_p 1, seed 0``; None for a greedy request, or where nothing says."""
    temperature = request.get("temperature")
    if not isinstance(temperature, int | float) or temperature <= 0:
        return None
    known = [
        f"{name} {_plain(request[name])}" for name in ("temperature", "top_p", "seed") if name in request
    ]
    return f"sampled at {', '.join(known)}"


def rules(scenario: Mapping[str, Any]) -> list[str]:
    """Each rule as ``site layers.*, phase decode, rows 2..8 -> pad:8``, in order, without conditions that always hold."""
    found = []
    for rule in _tables(scenario, "rule"):
        conditions = [
            f"{key} {named(str(value))}"
            for key, value in rule.items()
            if key == "site" or (key != "path" and value != getattr(PathRule, key, None))
        ]
        found.append(f"{', '.join(conditions)} -> {named(str(rule.get('path', 'unknown')))}")
    return found


def of_requests(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What both runs' requests were asked for, one setting a row: its name, and its values in a and in b in the order of the
    requests; one value where all have the same, and no row for what nobody asked for.
    """
    rows: list[tuple[str, str, str]] = []
    for key, plain in _OF_REQUESTS.items():
        values = [[request.get(key, plain) for request in asked(run).values()] for run in (a, b)]
        if any(value != plain for run in values for value in run):
            rows.append((f"{key} of requests", _values(values[0]), _values(values[1])))
    return rows


def _values(values: Sequence[Any]) -> str:
    said = [str(value).lower() if isinstance(value, bool) else _plain(value) for value in values]
    if len(set(said)) == 1:
        return said[0]
    more = f", … ({len(said):,} in all)" if len(said) > 2 * _LISTED else ""
    return ", ".join(said[: 2 * _LISTED]) + more if said else "-"


def decisive(scenario: Mapping[str, Any]) -> Iterator[str]:
    """What decides a run, one setting each; a setting that does nothing is left out."""
    for key in _DECISIVE:
        if key in scenario and not (key == "prefill_chunk" and scenario[key] == Schedule.prefill_chunk):
            yield f"{key} {named(str(scenario[key]))}"
    if found := _tables(scenario, "rule"):
        yield count(len(found), "rule")
    requests = asked(scenario)
    arrivals = [request.get("arrival", 0) for request in requests.values()]
    if any(arrivals):
        # As the flag is written.
        more = ",..." if len(arrivals) > 2 * _LISTED else ""
        yield f"arrivals {','.join(map(str, arrivals[: 2 * _LISTED]))}{more}"
    yield from _sampled(requests)


def _sampled(requests: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    how = {id: sampling(request) for id, request in requests.items()}
    if len(set(how.values())) == 1:
        yield from (words for words in list(how.values())[:1] if words is not None)
        return
    yield from (f"request {named(id)} {words or 'greedy'}" for id, words in list(how.items())[:_LISTED])
    if len(how) > _LISTED:
        yield f"and {len(how) - _LISTED} more requests"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else named(str(value))


def _tables(scenario: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = scenario.get(key, [])
    return [item for item in found if isinstance(item, Mapping)] if isinstance(found, list) else []
