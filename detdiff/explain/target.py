"""What must still happen for a trial to count: the flip, or where nothing flipped the parting of a named row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .case import Case, Side
from .control import CannotRun
from .rerun import Run
from .watch import Mark, Row


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


def origin_port(case: Case, side: Side) -> dict[tuple[str, str], Row]:
    """The first output port of the focus's origin, with its row in a side."""
    request = case.focus
    origin = request.origin
    if origin is None:
        return {}
    sites = {site.name: site for site in case.trace(side).sites}
    port = next((name for name in origin.ports if name in sites[origin.site].outputs), "out")
    model = "draft" if origin.site.startswith("draft.") else "target"
    return {(origin.site, port): Row(model, case.number(side, request.id), origin.position)}


def flip_of(case: Case) -> FlipOf | None:
    """The flip of the case's focus; None where nothing flipped."""
    request = case.focus
    flip = request.flip
    if flip is None:
        return None
    generated = case.a.generated()
    number = case.number("a", request.id)
    mine = {
        int(index): int(token)
        for of, index, token in zip(generated.request, generated.index, generated.token, strict=True)
        if int(of) == number
    }
    tokens = tuple(mine[i] for i in range(flip.index + 1) if i in mine)
    return FlipOf(request.id, case.number("b", request.id), flip.index, tokens, flip.a.token is None)


def parting_of(case: Case, a: Run, b: Run) -> PartingOf | OutputOf:
    """The first row of the focus, in b's order, whose cache entries or logits are not run a's; else its first origin.

    Raises CannotRun where none is.
    """
    request = case.focus
    numbers = case.number("a", request.id), case.number("b", request.id)
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
    for (site, port), row in origin_port(case, "b").items():
        twin = row._replace(request=numbers[0])
        value, other = a.watch.marks.get(Mark(site, port, twin)), b.watch.marks.get(Mark(site, port, row))
        if value is not None and other is not None and value != other:
            return OutputOf(request.id, Mark(site, port, row), value, b.watch.forward_of[row])
    raise CannotRun(
        f"nothing that {request.id} wrote to a cache, none of its logits and no output of its first origin differ, so a re-run "
        "cannot see it part"
    )
