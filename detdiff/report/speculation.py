"""What the draft proposed and what stood, in both runs, as lines of text."""

from __future__ import annotations

from detdiff.compare import Acceptance, RequestDivergence, Verified

from .page import Page
from .words import birth, count, named


def speculation_lines(page: Page, request: RequestDivergence) -> None:
    """Acceptance in both runs, whether proposals and choices are equal, and where the flip's own token came from."""
    found = request.verification
    if found is None:
        return
    page.item("  acceptance: ", f"{_acceptance(found.a)} in a, {_acceptance(found.b)} in b")
    if found.tokens:
        said = [
            f"{what} {'equal' if first is None else f'differ from token {first} on'}"
            for what, first in (
                ("proposals", found.first_other_proposal),
                ("the target's choices", found.first_other_choice),
            )
        ]
        until = " up to the flip" if request.flip is not None else ""
        page.item("  speculation: ", f"over {count(found.tokens, 'token')}{until}, {' and '.join(said)}")
    for run, verified in (("a", found.flip_a), ("b", found.flip_b)):
        if verified is not None:
            page.item(f"    {run}: ", _verified(verified))
    draft = request.draft
    if draft is not None and draft.differing:
        first = "; born there before the target differs" if draft.first else ""
        page.item("  draft model: ", f"{count(draft.differing, 'digest')} of its rows differ{first}")
        if draft.origin is not None and draft.origin != request.origin:
            origin = draft.origin
            page.item(
                "    birth: ",
                f"{named(origin.site)} ({named(origin.kind)}), position {origin.position}: {birth(origin)}",
            )


def _acceptance(found: Acceptance | None) -> str:
    if found is None:
        return "no draft"
    text = f"{found.accepted} of {found.proposed} in {count(found.verifications, 'verification')}"
    if found.agrees is None:
        return f"{text} (no count by the engine)"
    if found.agrees:
        return f"{text} (the engine counts the same)"
    return f"{text} (THE ENGINE COUNTS {found.own_accepted} of {found.own_proposed})"


def _verified(found: Verified) -> str:
    proposal = "none was proposed" if found.proposal is None else f"{found.proposal} was proposed"
    proposals, choices = (
        " ".join(map(str, tokens)) for tokens in (found.block.proposals, found.block.choices)
    )
    return (
        f"{proposal} and the target chose {found.choice} (token {found.place + 1} of the verification in forward "
        f"{found.forward}: proposals {proposals}; choices {choices})"
    )
