"""The control ``pin_kernels``: one kernel path for every number of rows, on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from detdiff.compare import Divergence, RequestDivergence, compare
from detdiff.engines.base import KERNEL_PLAN, PIN_KERNELS, Overrides
from detdiff.scenario import Scenario
from detdiff.trace import Trace

from ..case import Case, Side
from ..control import CannotRun, Figures, Outcome, control

SINGLE_ROWS: Final = "every linear, expert and attention call on the path that a single row takes"
"""How kernels are pinned, where an engine has no ``how_pinned`` that says it in its own words."""


@dataclass(frozen=True, eq=False)
class PinKernelsFigures(Figures):
    """``how`` the paths were pinned and what that costs, in words; ``tried`` has each way that was tried.

    ``seconds_per_forward`` is by side (as it is, pinned).
    """

    how: str
    cost: str
    tried: tuple[Mapping[str, Any], ...]
    seconds_per_forward: Mapping[Side, tuple[float, float]]
    tokens_equal: bool
    bits_equal: bool


@control("pin_kernels", after="configuration")
def pin_kernels(case: Case) -> Outcome:
    """First the kernel plan's own way (``split_rows`` above every forward's rows), then every call as its single rows are.

    Result ``removed`` where both sides then give the same tokens, and every compared row is bit-equal, else ``remains``.
    """
    if not any(request.stage is not None for request in case.divergence.requests):
        raise CannotRun("the two runs do not diverge")
    tried: list[dict[str, Any]] = []
    rows = max(_rows(case.trace(side)) for side in "ab")
    if _splits(case):
        split = 1 << (rows - 1).bit_length() if rows > 1 else 2
        how = f"split_rows {split}, above every forward's {rows} rows, so that linear layers run row by row"
        traces = {side: case.record(_with_split(case.scenario(side), split), side) for side in "ab"}
        tried.append(entry("split_rows", traces) | {"split_rows": split})
        if tried[-1]["tokens_equal"] and tried[-1]["bits_equal"]:
            return _outcome(case, how, traces, tried)
    lacking = case.lacking((PIN_KERNELS,))
    if lacking is not None:
        raise CannotRun(lacking)
    pinned = Overrides(pin_kernels=True)
    traces = {side: case.record(case.scenario(side), side, overrides=pinned) for side in "ab"}
    tried.append(entry("single rows", traces))
    # Of two engines of one kind, what more one does goes for both.
    how = max((str(getattr(case.engine(side), "how_pinned", SINGLE_ROWS)) for side in "ab"), key=len)
    return _outcome(case, how, traces, tried)


def _splits(case: Case) -> bool:
    """Whether the kernel plans of both sides have a threshold that can be raised."""
    plans = [case.scenario(side).kernels for side in "ab"]
    plain = all(plan.profile is not None or plan.split_rows is not None for plan in plans)
    return plain and not any(plan.rules for plan in plans) and case.lacking((KERNEL_PLAN,)) is None


def _rows(trace: Trace) -> int:
    shapes = [line["shape"] for line in trace.forwards()]
    return max((int(shape[0]) * int(shape[1]) for shape in shapes), default=1)


def _with_split(scenario: Scenario, rows: int) -> Scenario:
    return replace(scenario, kernels=replace(scenario.kernels, split_rows=rows))


def entry(how: str, traces: Mapping[Side, Trace]) -> dict[str, Any]:
    """What two pinned runs have in common, and where they first differ, as JSON has it."""
    found = compare(traces["a"], traces["b"])
    return {
        "how": how,
        "tokens_equal": not any(request.flip is not None for request in found.requests),
        "bits_equal": not any(_differing(request) for request in found.requests),
        "first": _first(found),
        "forwards": [len(trace.forwards()) for trace in traces.values()],
        "seconds": [_seconds(trace) for trace in traces.values()],
    }


def _differing(request: RequestDivergence) -> int:
    return request.differing + (0 if request.draft is None else request.draft.differing)


def _first(found: Divergence) -> dict[str, Any] | None:
    """Where two pinned runs still differ."""
    apart = [request for request in found.requests if request.flip is not None or _differing(request)]
    if not apart:
        return None
    request = next((each for each in apart if each.id == found.first), apart[0])
    origin = request.origin
    if origin is None:
        return {"request": request.id, "site": None, "position": None}
    return {"request": request.id, "site": origin.site, "position": origin.position}


def _seconds(trace: Trace) -> float:
    return float(trace.header.get("times", {}).get("seconds", 0.0))


def _cost(side: Side, trace: Trace, pinned: Trace, own: float, held: float) -> str:
    """What pinning costs a side; by forward, where both runs have as many."""
    calls = [len(each.forwards()) for each in (pinned, trace)]
    if calls[0] == calls[1]:
        return f"side {side} took {1000 * held:.1f} ms a forward instead of {1000 * own:.1f} ms"
    return f"side {side} took {_seconds(pinned):.2f} s in {calls[0]:,} calls instead of {_seconds(trace):.2f} s in {calls[1]:,}"


def _outcome(case: Case, how: str, traces: Mapping[Side, Trace], tried: list[dict[str, Any]]) -> Outcome:
    last = tried[-1]
    per_forward = {
        side: tuple(
            _seconds(trace) / max(1, len(trace.forwards())) for trace in (case.trace(side), traces[side])
        )
        for side in "ab"
    }
    cost = "; ".join(_cost(side, case.trace(side), traces[side], *each) for side, each in per_forward.items())
    tokens, bits = last["tokens_equal"], last["bits_equal"]
    if tokens and bits:
        # A cache that is not recorded was not compared.
        unseen = any("cache" in trace.header.get("lacks", {}) for trace in traces.values())
        entries = "has bit-equal sites" if unseen else "writes bit-equal cache entries"
        sentence = f"with {how}, both sides give the same tokens, and every row {entries}"
    elif tokens:
        sentence = f"even with {how}, cache entries or logits differ, though the tokens are equal"
    else:
        sentence = f"even with {how}, the two sides diverge"
    figures = PinKernelsFigures(how, cost, tuple(tried), per_forward, tokens, bits)  # type: ignore[arg-type]
    return Outcome("removed" if tokens and bits else "remains", sentence, figures)
