"""The row that decides, found in the traces, and what must still happen in a re-run for a trial to count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from detdiff.engines.mlx.taps.forward import TARGET
from detdiff.explain.case import Side
from detdiff.explain.control import CannotRun
from detdiff.trace import Trace

from .reruns import Mark, Reruns, Row, Run


@dataclass(frozen=True)
class Place:
    """The deciding row of a side: its request, position and forward; ``index`` is the token it chooses, None where the
    row's bits are asked for instead."""

    request: int
    position: int
    forward: int
    index: int | None

    @property
    def row(self) -> Row:
        return Row(TARGET, self.request, self.position)


def place(runs: Reruns, side: Side) -> Place:
    """The flip's row of the focus; without a flip its last compared row whose logits differ, or the very last one.

    Raises CannotRun where a side has none.
    """
    request = runs.case.focus
    number = runs.case.number(side, request.id)
    if request.flip is not None:
        forward = request.flip.forward_a if side == "a" else request.flip.forward_b
        if forward is None:
            raise CannotRun(
                f"side {side} had stopped before the flip, so it has no forward to put entries into"
            )
        return Place(number, request.flip.position, forward, request.flip.index)
    if request.carriers is None:
        raise CannotRun(f"no row of {request.id} differs, so nothing was carried")
    position = request.carriers.alive_at
    logits = [_logits(runs.case.trace(each), runs.case.number(each, request.id)) for each in "ab"]
    apart = [at for at, digest in logits[0].items() if at <= position and logits[1].get(at, digest) != digest]
    position = max(apart, default=position)
    index = runs.case.trace(side).row_index()
    here = np.flatnonzero((index.request == number) & (index.position == position))
    here = here[
        [runs.case.trace(side).forwards()[int(n)].get("model", TARGET) == TARGET for n in index.forward[here]]
    ]
    if not len(here):
        raise CannotRun(f"side {side} has no row of {request.id} at position {position}")
    return Place(number, position, int(index.forward[here[-1]]), None)


def _logits(trace: Trace, request: int) -> dict[int, int]:
    """Digests of a request's logits by position, the last write of each."""
    port = trace.port_index("logits", "out")
    found: dict[int, int] = {}
    for shard in trace.shards:
        for number, table in shard.tables.items():
            if table[port] < 0:
                continue
            rows = shard.table_rows(number)
            mine = shard.rows.request[rows] == request
            digests = shard.digests(number)[:, table[port]]
            found.update(zip(shard.rows.position[rows][mine].tolist(), digests[mine].tolist(), strict=True))
    return found


class Target(Protocol):
    """Decides about a run of side b."""

    def happened(self, run: Run) -> bool | None:
        """Whether it did; None while that is open."""
        ...

    @property
    def said(self) -> str: ...


@dataclass(frozen=True)
class FlipOf:
    """A request's token ``index``, or an earlier one, is another than run a's. ``tokens`` are run a's up to it; ``ends``
    says that run a had stopped before it."""

    id: str
    request: int
    index: int
    tokens: tuple[int, ...]
    ends: bool

    @property
    def said(self) -> str:
        return f"the flip of {self.id} at token {self.index}"

    def happened(self, run: Run) -> bool | None:
        got = run.tokens[self.request]
        if any(x != y for x, y in zip(got, self.tokens, strict=False)):
            return True
        if len(got) > len(self.tokens):
            return True if self.ends else False
        if len(got) == len(self.tokens) and not self.ends:
            return False
        if run.whole:
            return len(got) != len(self.tokens)
        return None


@dataclass(frozen=True)
class PartingOf:
    """What the row writes to the caches, or its logits, is not what run a's was."""

    id: str
    row: Row
    what: str
    digest: bytes
    forward: int

    @property
    def said(self) -> str:
        what = "cache entries" if self.what == "rows" else "logits"
        return f"the parting of the {what} of {self.id} at position {self.row.position}"

    def happened(self, run: Run) -> bool | None:
        found = (run.watch.rows if self.what == "rows" else run.watch.logits).get(self.row)
        if found is None or (run.last <= self.forward and not run.whole):
            return None
        return found != self.digest


@dataclass(frozen=True)
class OutputOf:
    """The output of the first origin is not what run a's was."""

    id: str
    mark: Mark
    value: bytes
    forward: int

    @property
    def said(self) -> str:
        return f"the parting of {self.mark.site} of {self.id} at position {self.mark.row.position}"

    def happened(self, run: Run) -> bool | None:
        found = run.watch.marks.get(self.mark)
        if found is None or (run.last <= self.forward and not run.whole):
            return None
        return found != self.value


def origin_port(runs: Reruns, side: Side) -> dict[tuple[str, str], Row]:
    """The first output port of the focus's origin, with its row in a side."""
    request = runs.case.focus
    origin = request.origin
    if origin is None:
        return {}
    sites = {site.name: site for site in runs.case.trace(side).sites}
    port = next((name for name in origin.ports if name in sites[origin.site].outputs), "out")
    model = "draft" if origin.site.startswith("draft.") else "target"
    return {(origin.site, port): Row(model, runs.case.number(side, request.id), origin.position)}


def flip_of(runs: Reruns) -> FlipOf | None:
    """The flip of the case's focus; None where nothing flipped."""
    request = runs.case.focus
    flip = request.flip
    if flip is None:
        return None
    generated = runs.case.a.generated()
    number = runs.case.number("a", request.id)
    mine = {
        int(index): int(token)
        for of, index, token in zip(generated.request, generated.index, generated.token, strict=True)
        if int(of) == number
    }
    tokens = tuple(mine[i] for i in range(flip.index + 1) if i in mine)
    return FlipOf(request.id, runs.case.number("b", request.id), flip.index, tokens, flip.a.token is None)


def parting_of(runs: Reruns, a: Run, b: Run) -> PartingOf | OutputOf:
    """The first row of the focus, in b's order, whose cache entries or logits are not run a's; else its first origin.

    Raises CannotRun where none is.
    """
    request = runs.case.focus
    numbers = runs.case.number("a", request.id), runs.case.number("b", request.id)
    # The last token is not fed; what a run ahead or a rejected proposal wrote there was another one's.
    end = request.prompt_tokens + min(request.generated_a, request.generated_b) - 1
    for row in sorted(b.watch.rows, key=lambda row: (b.watch.forward_of[row], row.position)):
        if row.request != numbers[1] or row.position >= end:
            continue
        twin = row._replace(request=numbers[0])
        for what in ("rows", "logits"):
            mine, theirs = (getattr(run.watch, what).get(r) for run, r in ((a, twin), (b, row)))
            if mine is not None and theirs is not None and mine != theirs:
                return PartingOf(request.id, row, what, mine, b.watch.forward_of[row])
    for (site, port), row in origin_port(runs, "b").items():
        twin = row._replace(request=numbers[0])
        value, other = a.watch.marks.get(Mark(site, port, twin)), b.watch.marks.get(Mark(site, port, row))
        if value is not None and other is not None and value != other:
            return OutputOf(request.id, Mark(site, port, row), value, b.watch.forward_of[row])
    raise CannotRun(
        f"nothing that {request.id} wrote to a cache, none of its logits and no output of its first origin differ, so a re-run "
        "cannot see it part"
    )
