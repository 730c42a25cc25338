"""A summary of many requests as text, as JSON, and its picture: drift against how many requests ran at once."""

from __future__ import annotations

from typing import Any, Final

from detdiff.compare.summary import ArmSummary, Summary

from .document import Block, Item, Prose, Table
from .drift import drift_svg
from .json import encoded
from .text import plain
from .words import escaped

SUMMARY: Final = "detdiff.summary/1"


def summary_json(summary: Summary) -> dict[str, Any]:
    """The summary as JSON values only."""
    return {"schema": SUMMARY, **encoded(summary)}


def summary_text(summary: Summary, *, width: int = 100) -> str:
    """The summary in lines of at most ``width`` characters."""
    return plain(summary_blocks(summary), width=width)


def summary_html(summary: Summary) -> str:
    """The summary as a page with the picture of the drift."""
    # A text needs no templates.
    from markupsafe import Markup

    from .html import render

    blocks = summary_blocks(summary)
    return render(
        "summary.html",
        ("page.js",),
        title=summary_headline(summary),
        picture=Markup(drift_svg(summary, standalone=False)),
        tables=[block for block in blocks if isinstance(block, Table)],
        items=[block for block in blocks if isinstance(block, Item)],
    )


def summary_blocks(summary: Summary) -> list[Block]:
    """What is said of a summary: one sentence, run to run first, then a against b, and the drift by level."""
    blocks: list[Block] = [Prose(summary_headline(summary))]
    for title, arms in (("run to run", summary.repeats), ("a against b", summary.arms)):
        for arm in arms:
            blocks.append(Item(f"{title}, {escaped(arm.name)}: ", _said(arm)))
            blocks += [Item("  ", line) for line in _details(arm)]
    if summary.arms:
        rows = tuple(
            (
                f"{arm.asked}",
                "-" if arm.most is None else f"{arm.most}",
                f"{arm.flipped} of {arm.requests}",
                f"{arm.differing} of {arm.requests}",
                _number(arm.largest) if arm.numbers else "-",
                _number(arm.mean) if arm.numbers else "-",
            )
            for arm in (*(each for each in summary.repeats if each.asked == 1), *summary.arms)
        )
        headers = ("at once", "seen at once", "flipped", "differ", "largest drift", "mean drift")
        blocks.append(
            Table(headers, rows, caption="drift of log-probabilities by how many requests ran at once")
        )
    blocks += [Item("note: ", escaped(note)) for note in summary.notes]
    return blocks


def summary_headline(summary: Summary) -> str:
    """The one sentence."""
    worst = max(summary.arms, key=lambda arm: (arm.flipped, arm.differing), default=None)
    if worst is None or not worst.requests:
        return "Nothing was compared."
    together = [arm for arm in summary.repeats if not arm.identical]
    if together and all(arm.asked > 1 for arm in together) and any(arm.asked == 1 for arm in summary.repeats):
        again = sum(arm.differing for arm in together)
        return (
            f"The sides differ ({escaped(worst.name)}): {worst.flipped} of {worst.requests} answers flip, {worst.differing} differ in numbers or "
            f"tokens. One by one every answer repeats; together {again} do not, as which requests meet is not the same each time."
        )
    if not summary.repeatable:
        again = sum(arm.differing for arm in summary.repeats)
        return (
            f"Run-to-run change: {again} answers differ from their own repetition, so that what the sides' difference changes is not "
            "known by itself."
        )
    same = "repetitions are equal" if summary.repeats else "nothing was repeated"
    if all(arm.identical for arm in summary.arms):
        unmet = (
            ", but nothing shows that requests which were sent together ran together" if summary.unmet else ""
        )
        return f"Every answer of {worst.requests} is equal in both sides{unmet}; {same}."
    flips = (
        f"{worst.flipped} of {worst.requests} answers flip"
        if worst.flipped
        else f"no answer of {worst.requests} flips"
    )
    bits = f"{worst.differing} differ in numbers or tokens"
    return f"The sides differ ({escaped(worst.name)}): {flips}, {bits}; {same}."


def _said(arm: ArmSummary) -> str:
    low, high = (f"{100 * each:.1f}" for each in arm.interval)
    return f"{arm.flipped} of {arm.requests} flipped (95 % interval {low} to {high} %), {arm.differing} differ in numbers or tokens"


def _details(arm: ArmSummary) -> list[str]:
    lines = []
    unit = "character" if arm.characters else "token"
    if arm.first:
        middle = arm.first[len(arm.first) // 2]
        lines.append(
            f"first other {unit}: {arm.first[0]} at the earliest, {middle} in the middle, {arm.first[-1]} at the latest"
        )
    if arm.moved:
        lines.append(
            f"log-probabilities before and at flips: {arm.moved:,} of {arm.numbers:,} moved, by {_number(arm.largest)} at most and "
            f"{_number(arm.mean)} on average"
        )
    if arm.margins_at_flips is not None and arm.margins_elsewhere is not None:
        at, other = arm.margins_at_flips, arm.margins_elsewhere
        lines.append(
            f"margins: {_number(at[1])} in the middle at flips (largest {_number(at[2])}), {_number(other[1])} elsewhere (smallest {_number(other[0])})"
        )
    if arm.met is False and arm.most is None:
        lines.append("whether the requests ran together was not seen")
    elif arm.met is False:
        lines.append(f"the requests did not all run together: {arm.most} at most at a time of {arm.asked}")
    elif arm.most is not None and arm.most < arm.asked:
        lines.append(f"at most {arm.most} of {arm.asked} were seen to run at a time")
    if arm.cached_a or arm.cached_b:
        lines.append(f"prompt tokens from a prefix cache: {arm.cached_a or 0} and {arm.cached_b or 0}")
    if arm.left_out:
        lines.append(f"{arm.left_out} requests could not be compared")
    return lines


def _number(value: float) -> str:
    return f"{value:.3g}"
