"""The control ``hold_path``: one kernel path for every number of rows, on both sides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from detdiff.engines.mlx.path_changes import Held
from detdiff.engines.mlx.reruns import Changes, Reruns, Row, Run, rerun

from .case import Case
from .control import BudgetSpent, CannotRun
from .outcome import Outcome


@dataclass(frozen=True)
class _Compared:
    """Two held runs: whether tokens and what every row wrote are equal, and where they first are not."""

    tokens: bool
    entries: bool
    first: dict[str, Any] | None


def hold_path(case: Case) -> Outcome:
    """First the kernel plan's own way (``split_rows`` above every forward's rows), then every call as its single rows are.

    Result ``removed`` where both sides then give the same tokens and write bit-equal cache entries and logits, else
    ``remains``. ``how`` and ``cost`` of the detail are for people.
    """
    if not any(request.rung is not None for request in case.divergence.requests):
        raise CannotRun("the two runs do not part")
    rows = max(_rows(case, side) for side in "ab")
    plans = [case.scenario(side).kernels for side in "ab"]
    tried: list[dict[str, Any]] = []
    if all(plan.profile is not None or plan.split_rows is not None for plan in plans) and not any(
        plan.rules for plan in plans
    ):
        split = 1 << (rows - 1).bit_length() if rows > 1 else 2
        runs = _both(case, lambda side: _with_split(case, side, split))
        how = f"split_rows {split}, above every forward's {rows} rows, so that linear layers run row by row"
        found = _same(case, *runs)
        tried.append(_entry("split_rows", found, runs) | {"split_rows": split})
        if found.tokens and found.entries:
            return _outcome(case, "removed", how, found, runs, tried)
    runs = _both(case, lambda side: _held(case, side))
    how = "every linear, expert and attention call on the path that a single row takes"
    found = _same(case, *runs)
    tried.append(_entry("single rows", found, runs))
    return _outcome(case, "removed" if found.tokens and found.entries else "remains", how, found, runs, tried)


def _rows(case: Case, side: str) -> int:
    return max(int(line["shape"][0]) * int(line["shape"][1]) for line in case.trace(side).forwards())


def _both(case: Case, run: Callable[[str], Run]) -> tuple[Run, Run]:
    return run("a"), run("b")


def _with_split(case: Case, side: str, rows: int) -> Run:
    scenario = case.scenario(side)
    scenario = replace(scenario, kernels=replace(scenario.kernels, split_rows=rows))
    return rerun(Reruns.of(case), side, Changes(scenario=scenario))


def _held(case: Case, side: str) -> Run:
    sessions = Reruns.of(case).sessions(side)
    return rerun(Reruns.of(case), side, Changes(steering=Held(sessions.target.operations.chooser.planned)))


def _same(case: Case, a: Run, b: Run) -> _Compared:
    """All rows that both runs have, up to each request's first different token."""
    ids = case.ids("a"), case.ids("b")
    tokens = entries = True
    first: dict[str, Any] | None = None
    for number, name in enumerate(ids[0]):
        if name not in ids[1]:
            continue
        other = ids[1].index(name)
        mine, theirs = a.tokens[number], b.tokens[other]
        common = min(len(mine), len(theirs))
        flip = next((i for i in range(common) if mine[i] != theirs[i]), None)
        tokens = tokens and mine == theirs
        # The last token is never fed; what speculation wrote there was rejected.
        limit = len(case.a.requests[number]["tokens"]) + (common - 1 if flip is None else flip)
        for row, digest in sorted(a.watch.rows.items()):
            if row.request != number or row.position >= limit:
                continue
            twin = row._replace(request=other)
            if twin not in b.watch.rows:
                continue
            logits = (a.watch.logits.get(row), b.watch.logits.get(twin))
            if digest != b.watch.rows[twin] or (None not in logits and logits[0] != logits[1]):
                entries = False
                first = first or _where(name, row)
                break
    return _Compared(tokens, entries, first)


def _where(name: str, row: Row) -> dict[str, Any]:
    return {"request": name, "model": row.model, "position": row.position}


def _entry(how: str, found: _Compared, runs: tuple[Run, Run]) -> dict[str, Any]:
    return {
        "how": how,
        "tokens_equal": found.tokens,
        "bits_equal": found.entries,
        "first": found.first,
        "forwards": [run.forwards for run in runs],
        "seconds": [run.seconds for run in runs],
    }


def _outcome(
    case: Case, result: str, how: str, found: _Compared, runs: tuple[Run, Run], tried: list[dict[str, Any]]
) -> Outcome:
    per_forward: dict[str, tuple[float, float]] = {}
    with contextlib.suppress(BudgetSpent):
        for side, held in zip("ab", runs, strict=True):
            plain = rerun(Reruns.of(case), side)
            per_forward[side] = plain.seconds / max(1, plain.forwards), held.seconds / max(1, held.forwards)
    cost = "; ".join(
        f"side {side} took {1000 * held:.1f} ms a forward instead of {1000 * own:.1f} ms"
        for side, (own, held) in per_forward.items()
    )
    if result == "removed":
        said = f"with {how}, both sides give the same tokens, and every row writes bit-equal cache entries"
    elif found.tokens:
        said = f"even with {how}, cache entries or logits differ, though the tokens are equal"
    else:
        said = f"even with {how}, the two sides part"
    detail = {"how": how, "cost": cost, "tried": tried, "seconds_per_forward": per_forward}
    return Outcome(result, said, {**detail, "tokens_equal": found.tokens, "bits_equal": found.entries})
