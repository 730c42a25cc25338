"""What a server's runs show on a local engine, as text and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .document import Block, Item, Prose
from .json import encoded, verdict_json
from .text import plain, verdict_text
from .words import escaped

if TYPE_CHECKING:
    from detdiff.explain.inside import InsideAnswer, InsideFlip

INSIDE: Final = "detdiff.inside/1"


def inside_json(found: InsideAnswer) -> dict[str, Any]:
    """The answer as JSON values only; ``verdict`` is that of ``explain`` on the local runs."""
    told = {name: encoded(value) for name, value in vars(found).items() if name != "verdict"}
    return {"schema": INSIDE, **told, "verdict": verdict_json(found.verdict)}


def inside_text(found: InsideAnswer, *, width: int = 100) -> str:
    """The answer in lines of at most ``width`` characters, and the verdict on the local runs after it."""
    blocks: list[Block] = [Prose(escaped(found.sentence))]
    blocks += [Item(f"{escaped(each.request)}: ", _said(each)) for each in found.flips]
    if found.exact:
        blocks.append(Item("composition: ", "who shared a forward is known, and is the same here"))
    blocks += [Item("not carried over: ", escaped(each)) for each in found.not_carried]
    return f"{plain(blocks, width=width)}\n\nInside:\n\n{verdict_text(found.verdict, width=width)}"


def _said(flip: InsideFlip) -> str:
    what = "character" if flip.characters else "token"
    outside, inside = (
        "no flip" if each is None else f"{what} {each}" for each in (flip.outside, flip.inside)
    )
    same = ", the same" if flip.same else ""
    alone = "" if flip.alone_equal else "; alone the local engine answers otherwise before that"
    return f"outside {outside}, inside {inside}{same}{alone}"
