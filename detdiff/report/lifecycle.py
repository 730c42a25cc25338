"""What was done to the caches, where in a prompt a difference was born, and how forced runs agree, as lines of text."""

from __future__ import annotations

from detdiff.compare.divergence import Divergence, RequestDivergence

from .page import Page
from .words import count, named, passage, spans


def event_lines(page: Page, divergence: Divergence) -> None:
    """How often caches were changed in each run, and what a setting did to them."""
    events = divergence.events
    if events.counts:
        said = ", ".join(
            f"{named(of.event)}{'' if of.model == 'target' else f' ({of.model})'} {of.a:,} / {of.b:,}"
            for of in events.counts
        )
        page.item("events (a / b): ", said)
    for found in events.listed:
        where = f"run {found.run}, forward {found.forward}, request {named(found.request or '')}"
        page.item("  - ", f"{where}: {passage(found.detail)}")


def chunk_lines(page: Page, request: RequestDivergence) -> None:
    """The part of the prompt that the first origin lies in."""
    for chunk in request.chunks:
        differing = f"{spans(chunk.differing)} differ" if chunk.differing else "none differs"
        earlier = (
            ""
            if chunk.index == 0
            else "; earlier ones are equal"
            if chunk.earlier_equal
            else "; so do earlier ones"
        )
        page.item(
            f"    {chunk.run}: ",
            f"prefill chunk {chunk.index}, positions {chunk.first} to {chunk.last}, of which {differing}{earlier}",
        )


def agreement_lines(page: Page, request: RequestDivergence) -> None:
    """How the choices agree after the first that differs, where a run was fed the other's tokens."""
    forced = request.forced
    if forced is None:
        return
    text = f"of {count(forced.tokens, 'choice')} {forced.differing:,} differ"
    if request.flip is not None:
        if forced.again is None:
            text += "; after the flip they never agree again"
        else:
            after = forced.again - request.flip.index
            text += (
                f"; they agree again {count(after, 'token')} after the flip (token {forced.again}), for "
                f"{count(forced.span, 'token')} in a row"
            )
    page.item("  fed the same tokens: ", text)
