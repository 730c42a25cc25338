"""What a test that fails says: a small report for each composition, or the whole of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from detdiff.compare import Choice, Divergence, Flip, RequestDivergence
from detdiff.explain import Verdict
from detdiff.report import divergence_text, headline, verdict_text
from detdiff.report.document import Page
from detdiff.report.findings import cache_lines, flip_lines, origin_lines
from detdiff.report.text import plain
from detdiff.report.words import count, escaped

from .kept import Kept, relative
from .levels import GOLDEN

WIDTH: Final = 100
_NEAREST: Final = 2
"""Top logits that a small report shows of either run."""


@dataclass(frozen=True)
class Failure:
    """One composition that is not let through: ``why``, what parted, and what was kept of it.

    ``a`` and ``b`` say in a few words what the two runs are. ``more`` are other runs of the composition, by seed and batch,
    that fail too. ``checked`` is False where it could not be run, and ``why`` says why; ``unkept`` says why nothing was kept.
    """

    name: str
    a: str
    b: str
    why: tuple[str, ...]
    divergence: Divergence | None = None
    verdict: Verdict | None = None
    kept: Kept | None = None
    more: tuple[str, ...] = ()
    checked: bool = True
    unkept: str = ""


def failure_text(
    failures: Sequence[Failure], *, level: str, model: str, passed: Sequence[str] = (), full: bool = False
) -> str:
    """The text of a failed check; ``full`` adds everything that is known of each failure."""
    text = f"{_headline(failures, level, escaped(model), len(passed))}\n"
    for failure in failures:
        text += "\n" + _failure(failure, full)
    if passed:
        page = Page()
        page.item("passed: ", ", ".join(map(escaped, passed)))
        text += "\n" + plain(page.blocks, width=WIDTH)
    return text.rstrip("\n")


def _headline(failures: Sequence[Failure], level: str, model: str, passed: int) -> str:
    """Which compositions, and whether they were checked at all."""
    total = count(len(failures) + passed, "composition")
    what = "not the golden trace" if level == GOLDEN else f"not invariant at level {level}"
    said = []
    for ending, those in (
        (what, [failure for failure in failures if failure.checked]),
        ("not checked", [failure for failure in failures if not failure.checked]),
    ):
        if those:
            who = escaped(those[0].name) if len(failures) + passed == 1 else f"{len(those)} of {total}"
            said.append(f"{who} of {model} {ending}")
    return "; ".join(said)


def _failure(failure: Failure, full: bool) -> str:
    page = Page()
    divergence = failure.divergence
    page.item(f"{escaped(failure.name)}: ", "" if divergence is None else headline(divergence))
    page.item("  a: ", failure.a)
    page.item("  b: ", failure.b)
    for why in dict.fromkeys(failure.why):
        page.item("  why: " if failure.checked else "  NOT CHECKED: ", why)
    text = plain(page.blocks, width=WIDTH)
    if full and failure.verdict is not None:
        text += "\n" + verdict_text(failure.verdict, width=WIDTH) + "\n"
    if full and divergence is not None:
        text += "\n" + divergence_text(divergence, width=WIDTH) + "\n"
    page = Page()
    if not full and divergence is not None:
        _small(page, divergence)
        if failure.verdict is not None:
            verdict = failure.verdict
            page.item("  verdict: ", f"{verdict.kind}. {escaped(verdict.said)}")
            if verdict.advice:
                page.item("  what to do: ", escaped(verdict.advice))
    if failure.more:
        page.item("  fails too: ", ", ".join(map(escaped, failure.more)))
    if failure.kept is not None:
        page.item("  kept: ", f"{', '.join(failure.kept.names)} in {relative(failure.kept.folder)}")
    if failure.unkept:
        page.item("  kept: ", f"nothing, because it could not be written: {escaped(failure.unkept)}")
    return text + plain(page.blocks, width=WIDTH) + _commands(failure.kept)


def _commands(kept: Kept | None) -> str:
    """Lines to be copied, which are never wrapped."""
    return "" if kept is None else "".join(f"  run: {command}\n" for command in kept.commands)


def _small(page: Page, divergence: Divergence) -> None:
    """The request with the first origin, and the first that flips where that is another one."""
    parted = [request for request in divergence.requests if request.rung is not None]
    first = [request for request in parted if request.id == divergence.first]
    flipped = [request for request in parted if request.flip is not None]
    for request in {request.id: request for request in (*first[:1], *flipped[:1]) or parted[:1]}.values():
        _request(page, request)
    for finding in divergence.bookkeeping[:2]:
        page.item("  bookkeeping: ", f"in run {finding.run}: {escaped(finding.detail)}")


def _request(page: Page, request: RequestDivergence) -> None:
    ending = "and flips" if request.flip is not None else "and no token flips"
    page.item(f"  request {escaped(request.id)}: ", f"parts in {request.rung} {ending}")
    if request.flip is not None:
        flip_lines(page, request, _near(request.flip))
    if request.origin is not None:
        origin_lines(page, request.origin)
    cache_lines(page, request)


def _near(flip: Flip) -> Flip:
    """The flip with the nearest tokens alone."""

    def cut(choice: Choice) -> Choice:
        return replace(choice, top=choice.top[:_NEAREST])

    return replace(flip, a=cut(flip.a), b=cut(flip.b))
