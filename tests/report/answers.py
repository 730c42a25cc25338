"""Answers with every part filled, for the tests of the reports."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from synthetic_traces import Ask, Fault, Plan, serial, together, write_trace

from detdiff.compare import (
    Acceptance,
    Divergence,
    DraftDivergence,
    Origin,
    Proposed,
    Verification,
    Verified,
    compare,
)

ANCHOR = Ask("anchor", tuple(range(10, 20)), (30, 31, 32, 33, 34))
FOLLOWER = Ask("follower", (40, 41, 42, 43, 44), (50, 51, 52))
QUIET = Ask("quiet", (60, 61, 62), (63, 64))


def path(rows: int) -> str:
    return "reference/candle-metal/mv" if rows <= 4 else "reference/candle-metal/mm"


def plan(asks: tuple[Ask, ...]) -> Plan:
    return Plan(asks, serial(asks, chunk=4), path=path, logits={(0, 3): [(33, 25.571232), (93, 25.565775)]})


def flips() -> Divergence:
    """The anchor flips at token 3 and inherited it, the follower parts without a flip, quiet is equal."""
    other = replace(ANCHOR, generated=(30, 31, 32, 93, 94))
    asks = (other, FOLLOWER, QUIET)
    faults = (
        Fault("layers.0.attn.k_proj", "out", 0, 2),
        Fault("layers.1.attn.cache.read", "read", 1, 5),
    )
    event = {"kind": "cache_changed", "request": 1, "layer": 1, "entry": "K", "head": 0, "position": 3}
    b = Plan(asks, together(asks), faults, path=path, events={1: [event]})
    return run(
        plan((ANCHOR, FOLLOWER, QUIET)), replace(b, logits={(0, 3): [(93, 25.56222), (33, 25.549618)]})
    )


def run(a: Plan, b: Plan) -> Divergence:
    with tempfile.TemporaryDirectory() as work:
        return compare(write_trace(Path(work) / "a", a), write_trace(Path(work) / "b", b))


def speculation(origin: Origin) -> dict[str, Any]:
    """What an answer says of a request with a draft: the proposals equal, the choice at the flip another one."""
    sides = [Verified(7, Proposed((31, 32, 33, 34), (31, 32, token, 34)), 2, 33, token) for token in (33, 93)]
    counts = Acceptance(12, 48, 21, 48, 21, True), Acceptance(13, 52, 20, 52, 21, False)
    return {
        "draft": DraftDivergence(40, 5, origin, False),
        "verification": Verification(4, True, None, False, 3, *sides, *counts),
    }
