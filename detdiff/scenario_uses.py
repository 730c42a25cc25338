"""Which settings of a scenario have a use under which schedule and layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from detdiff.errors import ScenarioConflict
from detdiff.scenario_parts import CachePlan, Schedule, Speculation

_WINDOW = ("window_requests", "window_positions", "window_sites")
_USELESS: Mapping[tuple[str, Any], tuple[str, ...]] = {
    ("schedule", "serial"): ("active",),
    ("schedule", "static"): ("active", "reuse_tokens"),
    ("schedule", "continuous"): ("reuse_tokens",),
    ("layout", "padded"): ("row_budget", "page_tokens", "share_prefix"),
    ("layout", "packed"): ("reuse_tokens",),
    ("capture", "digest"): _WINDOW,
    ("capture", "full"): _WINDOW,
    ("draft", None): ("drafts",),
    ("kv_bits", None): ("kv_group_size", "kv_start"),
}
"""What a changed key leaves without a use; None stands for a key that is taken back."""


def useless(asked: Iterable[str], changes: Mapping[str, Any]) -> set[str]:
    """The keys that a change leaves without a use. ``asked`` are all changed keys; those that ``changes`` lacks are
    taken back. A key that is asked for itself is never among them."""
    asked = set(asked)
    gone = {name for key in asked for name in _USELESS.get((key, changes.get(key)), ())}
    if changes.get("schedule") == "static" and "arrivals" not in asked:
        gone.add("arrival")
    return gone - asked


def check_uses(
    schedule: Schedule,
    cache: CachePlan,
    speculation: Speculation | None,
    force_tokens: str | None,
    sampled: str | None,
) -> None:
    """Raises ScenarioConflict for a setting that the schedule and layout have no use for. ``sampled`` is the id of a
    request that is not greedy."""
    padded, serial = schedule.layout == "padded", schedule.kind == "serial"
    for name in ("page_tokens", "share_prefix"):
        if padded and getattr(cache, name):
            raise ScenarioConflict(
                f"{name} is {_said(getattr(cache, name))} and layout is padded, whose caches are mlx-lm's own; "
                f"remove {name}, or use layout packed."
            )
    for name in ("kv_bits", "reuse_tokens"):
        value = getattr(cache, name)
        if value is not None and not (padded and serial):
            raise ScenarioConflict(
                f"{name} is {value}, layout is {schedule.layout} and schedule is {schedule.kind}, and mlx-lm does that "
                f"for one request at a time only; remove {name}, or use layout padded and schedule serial."
            )
    if speculation is None:
        return
    if sampled is not None:
        raise ScenarioConflict(
            f"there is a draft, and request {sampled!r} draws its tokens; speculation is greedy here, so remove draft, or "
            "set temperature 0."
        )
    if padded and not serial:
        raise ScenarioConflict(
            f"there is a draft, layout is padded and schedule is {schedule.kind}, and mlx-lm speculates for one request "
            "at a time; use schedule serial, or layout packed."
        )
    if padded and force_tokens is not None:
        raise ScenarioConflict(
            "there are draft and force_tokens, and mlx-lm's own speculation cannot be told its tokens; remove one of "
            "them, or use layout packed."
        )


def _said(value: int | bool) -> str:
    return str(value).lower()
