"""Documents and blocks as text: what matters first, tables and texts that fit the width of a terminal."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Final, Literal

from tabulate import tabulate

from detdiff.compare.divergence import (
    Divergence,
    RequestDivergence,
)
from detdiff.explain.control import NOT_RUN, Control
from detdiff.explain.verdict import Evidence, Verdict

from .document import (
    Blank,
    Block,
    Code,
    Excerpt,
    Item,
    Page,
    Prose,
    Report,
    Section,
    Table,
    Texts,
    View,
    excerpts,
    is_numeric,
    legend,
    marked,
)
from .findings import (
    agreement_lines,
    cache_lines,
    chunk_lines,
    compared_lines,
    finding_lines,
    flip_forward_lines,
    flip_lines,
    float64_lines,
    fragile_lines,
    headline,
    margin_lines,
    not_run_lines,
    origin_count_lines,
    origin_lines,
    run_line,
    sentence_of,
    speculation_lines,
    verdict_lines,
)
from .views import view_blocks
from .words import asked, count, named, passage, sampling

NARROWEST = 40
_BESIDE = 100
"""From this width on two texts stand side by side."""
_INDENT = 2
_STYLES: dict[str, Style] = {"flip": "flip", "near": "near", "after": "after"}


def report_text(report: Report, *, width: int = 100, colour: bool = False) -> str:
    """The whole report in lines of at most ``width`` (at least 40) characters; only a word that is longer stands out.

    ``colour`` adds escape sequences, and nothing that is not said in characters too.
    """
    width = max(NARROWEST, width)
    return "".join(f"{line.rstrip()}\n" for line in _report_lines(report, width, colour))


def _report_lines(report: Report, width: int, colour: bool) -> Iterator[str]:
    for line in _fill(report.headline, width):
        yield _title(line, colour)
    yield from _fill(f"kind: {report.kind}", width)
    if report.advice:
        yield from _fill(f"what to do: {report.advice}", width)
    for section in report.sections:
        yield ""
        yield from _section(section, report, width, colour)


def _section(section: Section, report: Report, width: int, colour: bool) -> Iterator[str]:
    yield _title(section.title, colour)
    yield "-" * len(section.title)
    before: Block | None = None
    for block in section.blocks:
        shown = view_blocks(block, report, width - 4) if isinstance(block, View) else (block,)
        for each in shown:
            if isinstance(before, Table) and isinstance(each, Table):
                yield ""
            yield from _block(each, width, colour)
            before = each


def _block(block: Block, width: int, colour: bool) -> Iterator[str]:
    match block:
        case Table():
            yield from table_lines(block, width)
        case Texts():
            yield from _two_texts(block, width, colour)
        case Code(text):
            # A command is copied as one line, whatever the width.
            yield from textwrap.indent(text, "    ").splitlines()
        case _:
            yield from plain([block], width=width).splitlines()


def _two_texts(texts: Texts, width: int, colour: bool) -> Iterator[str]:
    a, b = excerpts(texts)
    indent = " " * _INDENT
    if [word.token for word in texts.a] == [word.token for word in texts.b]:
        yield from _text_column(_excerpt("both", a, len(texts.a)), width, colour)
    elif width >= _BESIDE:
        room = (width - _INDENT - 3) // 2
        columns = [
            [line for part in _excerpt(run, of, len(words)) for line in wrapped(part, room)]
            for run, of, words in (("a", a, texts.a), ("b", b, texts.b))
        ]
        for left, right in zip_longest(*columns, fillvalue=[]):
            yield (f"{indent}{printed(left, colour=colour, width=room)} | {printed(right, colour=colour)}")
    else:
        for run, of, words in (("a", a, texts.a), ("b", b, texts.b)):
            yield from _text_column(_excerpt(run, of, len(words)), width, colour)
    if said := legend(texts):
        yield from textwrap.wrap(said, width, initial_indent=indent, subsequent_indent=indent)


def _text_column(parts: list[Line], width: int, colour: bool) -> Iterator[str]:
    for part in parts:
        for line in wrapped(part, width - _INDENT):
            yield " " * _INDENT + printed(line, colour=colour)


def _excerpt(run: str, of: Excerpt, total: int) -> list[Line]:
    """A heading, and the words with how many are left out before and after."""
    if not of.words:
        return [styled([(f"{run}: {count(total, 'token')}, none of them here", "head")])]
    first, last = of.words[0].index, of.words[-1].index
    heading = f"{run}: tokens {first} to {last} of {total:,}"
    body: list[tuple[str, Style]] = [(marked(word), _STYLES.get(word.mark, "")) for word in of.words]
    if of.before:
        body.insert(0, (f"({of.before:,} before) … ", ""))
    if of.after:
        body.append((f" … ({of.after:,} more)", ""))
    return [styled([(heading, "head")]), styled(body)]


def _fill(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _title(text: str, colour: bool) -> str:
    return printed(styled([(text, "head")]), colour=colour)


def plain(blocks: Iterable[Block], *, width: int) -> str:
    """Lines of prose are at most ``width`` (at least 40) characters, tables as wide as they need."""
    width = max(40, width)
    return "\n".join(line for block in blocks for line in _plain_lines(block, width)) + "\n"


def _plain_lines(block: Block, width: int) -> Iterator[str]:
    match block:
        case Prose(text):
            yield from textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
        case Item(lead, text):
            indent = " " * min(len(lead), 6)
            yield from textwrap.wrap(
                lead + text,
                width,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
                drop_whitespace=True,
            )
        case Table(headers, rows, level):
            # Every cell is text already: tabulate must not read "1e3" or "007" as a number.
            table = tabulate(
                rows, headers=headers, tablefmt="simple", disable_numparse=True, colalign=_align(headers)
            )
            yield from ("  " * level + line.rstrip() for line in table.splitlines())
        case Blank():
            yield ""
        case Code(text):
            yield from textwrap.indent(text, "    ").splitlines()
        case View(_, said):
            yield from textwrap.wrap(said, width, break_long_words=False, break_on_hyphens=False)
        case Texts():
            yield from _plain_texts(block, width)


def _plain_texts(texts: Texts, width: int) -> Iterator[str]:
    for run, words in (("a", texts.a), ("b", texts.b)):
        said = "".join(f"[{word.text}]" if word.mark == "flip" else word.text for word in words)
        yield from textwrap.wrap(f"{run}: {said}", width, subsequent_indent="   ")


def _align(headers: Sequence[str]) -> tuple[str, ...]:
    left = {"text", "kind", "path in a", "path in b"}
    return tuple(
        "left" if header.removeprefix("a ").removeprefix("b ") in left else "right" for header in headers
    )


_GAP = 2
_PADDING = 2
"""What tabulate adds to every header."""
_NARROWEST = 8


def table_lines(table: Table, width: int) -> Iterator[str]:
    """No line is longer than ``width`` (from 40 characters on)."""
    indent = "  " * table.level
    numeric = [is_numeric(table, n) for n in range(len(table.headers))]
    limits = _limits(table, numeric, width - len(indent) - _GAP * (len(numeric) - 1))
    if limits is None:
        yield from _records(table, width)
        return
    # Cells are wrapped here and are text already: tabulate would read "1,001", "1e3" and "007" as numbers.
    headers = [_wrap(header, limit - _PADDING) for header, limit in zip(table.headers, limits, strict=True)]
    rows = [[_wrap(cell, limit) for cell, limit in zip(row, limits, strict=True)] for row in table.rows]
    made = tabulate(
        rows,
        headers=headers,
        tablefmt="simple",
        disable_numparse=True,
        colalign=["right" if one else "left" for one in numeric] if rows else None,
    )
    yield from (f"{indent}{line}".rstrip() for line in made.splitlines())


def _wrap(cell: str, limit: int) -> str:
    return cell if len(cell) <= limit else "\n".join(textwrap.wrap(cell, limit))


def _word(header: str) -> int:
    return _PADDING + max(map(len, header.split()), default=1)


def _limits(table: Table, numeric: Sequence[bool], room: int) -> list[int] | None:
    """The widths of the columns, or None where there is not room for all of them."""
    limits = [
        max(len(header) + _PADDING, *(len(row[n]) for row in table.rows), 1 + _PADDING)
        for n, header in enumerate(table.headers)
    ]
    least = [
        # Numbers are not wrapped, and their headers between words only.
        max([_word(header) if number else _NARROWEST, *(len(row[n]) for row in table.rows if number)])
        for n, (header, number) in enumerate(zip(table.headers, numeric, strict=True))
    ]
    least = [min(low, limit) for low, limit in zip(least, limits, strict=True)]
    if sum(least) > room:
        return None
    while sum(limits) > room:
        widest = max(range(len(limits)), key=lambda n: (limits[n] > least[n], limits[n]))
        limits[widest] -= 1
    return limits


def _records(table: Table, width: int) -> Iterator[str]:
    indent = "  " * table.level
    for row in table.rows:
        cells = ", ".join(f"{header} {cell}" for header, cell in zip(table.headers, row, strict=True))
        yield from textwrap.wrap(
            cells,
            width,
            initial_indent=f"{indent}- ",
            subsequent_indent=f"{indent}  ",
            break_on_hyphens=False,
        )


Style = Literal["", "head", "flip", "near", "after"]
Line = list[tuple[str, Style]]
"""Characters, each with its style."""
_CODES: Final[dict[Style, str]] = {"head": "1", "flip": "1;31", "near": "33", "after": "2"}


def styled(parts: Sequence[tuple[str, Style]]) -> Line:
    """Pieces of text, character by character."""
    return [(character, style) for text, style in parts for character in text]


def cells(line: Sequence[tuple[str, Style]]) -> int:
    """How many cells of a terminal these characters take."""
    return sum(_cells(character) for character, _ in line)


def _cells(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def wrapped(line: Line, width: int) -> Iterator[Line]:
    """Lines of at most ``width`` cells, broken at spaces where there are any; the space itself is kept."""
    start = 0
    while start < len(line):
        used, end, space = 0, start, None
        while end < len(line) and used + _cells(line[end][0]) <= width:
            used += _cells(line[end][0])
            end += 1
            # What is marked is not torn apart.
            if line[end - 1][0] == " " and line[end - 1][1] not in ("flip", "near"):
                space = end
        if end < len(line) and line[end] not in ((" ", ""), (" ", "after")) and space is not None:
            end = space
        end = max(end, start + 1)
        yield line[start:end]
        start = end


def printed(line: Line, *, colour: bool, width: int = 0) -> str:
    """The line as characters, with escape sequences where ``colour`` is asked for.

    It is filled up to ``width`` cells, or without a width ends with its last character that is no space.
    """
    while not width and line and line[-1][0] == " ":
        line = line[:-1]
    out, now = [], ""
    for character, style in line:
        if colour and style != now:
            out.append(_switch(style))
            now = style
        out.append(character)
    if now:
        out.append("\x1b[0m")
    return "".join(out) + " " * (width - cells(line))


def _switch(style: Style) -> str:
    return f"\x1b[0;{_CODES[style]}m" if style else "\x1b[0m"


def divergence_text(divergence: Divergence, *, width: int = 100) -> str:
    """The whole answer; lines of prose are at most ``width`` characters, tables as wide as they need."""
    page = Page()
    page.prose(headline(divergence))
    for run, name in ((divergence.a, "a"), (divergence.b, "b")):
        page.item(f"{name}: ", run_line(run))
    finding_lines(page, divergence)
    for request in divergence.requests:
        if request.rung is not None:
            how = tuple(
                sampling(asked(run.scenario).get(request.id, {})) for run in (divergence.a, divergence.b)
            )
            _request_lines(page, request, how)
    page.blank()
    compared_lines(page, divergence)
    return plain(page.blocks, width=width)


def _request_lines(page: Page, request: RequestDivergence, how: Sequence[str | None]) -> None:
    page.blank()
    if request.flip is None:
        end = (
            "no flip: all generated tokens are equal"
            if request.generated_a or request.generated_b
            else "no tokens"
        )
        page.prose(f"request {named(request.id)}: parts in {request.rung}; {end}")
    else:
        page.prose(f"request {named(request.id)}: parts in {request.rung} and flips")
        flip_lines(page, request, request.flip)
        if any(how):
            for run, words in zip("ab", how, strict=True):
                page.item(f"    {run}: ", words or "greedy")
        flip_forward_lines(page, request)
    if request.origin is not None:
        origin_lines(page, request.origin)
        chunk_lines(page, request)
    elif request.differing:
        page.item("  birth: ", "no origin could be named")
    agreement_lines(page, request)
    speculation_lines(page, request)
    cache_lines(page, request)
    origin_count_lines(page, request)
    margin_lines(page, request)


TITLES = (
    "the flip",
    "the flip's forward",
    "the birth",
    "the first cache entry and the carriers",
    "the controls",
    "against float64",
    "the verdict",
)
"""What stands under each number, 1 to 7."""
HOLD = "hold_path"


def verdict_text(verdict: Verdict, *, width: int = 100) -> str:
    """The whole answer; lines of prose are at most ``width`` characters, tables as wide as they need."""
    page = Page()
    divergence = verdict.divergence
    page.prose(f"Verdict: {verdict.kind}. {'' if divergence is None else headline(divergence)}")
    if divergence is not None:
        _runs(page, divergence)
        parted = [request for request in divergence.requests if request.rung is not None]
        if parted:
            _flips(page, verdict, divergence)
            fragile_lines(page, verdict)
            _forwards(page, parted)
            _births(page, verdict, parted)
            _caches(page, parted)
    _numbered(page, 5)
    control_lines(page, verdict)
    if verdict.control("oracle") is not None:
        _numbered(page, 6)
        float64_lines(page, verdict)
    _numbered(page, 7)
    verdict_lines(page, verdict)
    return plain(page.blocks, width=width)


def _numbered(page: Page, number: int) -> None:
    page.blank()
    page.prose(f"{number}. {TITLES[number - 1]}")


def _runs(page: Page, divergence: Divergence) -> None:
    for run, found in (("a", divergence.a), ("b", divergence.b)):
        page.item(f"{run}: ", f"{named(found.trace)}, {count(found.forwards, 'forward')}")


def _flips(page: Page, verdict: Verdict, divergence: Divergence) -> None:
    _numbered(page, 1)
    for request in divergence.requests:
        page.prose(f"request {named(request.id)}: {_end(request)}")
        if request.flip is not None:
            flip_lines(page, request, request.flip)
            agreement_lines(page, request)
            for each in verdict.evidence:
                if each.fact == "proposals" and each.detail.get("request") == request.id:
                    page.item("  draft: ", passage(each.said))
            speculation_lines(page, request)


def _end(request: RequestDivergence) -> str:
    if request.flip is not None:
        return f"flips at generated token {request.flip.index}"
    generated = min(request.generated_a, request.generated_b)
    bits = "every compared digest is equal" if request.rung is None else f"it parts in {request.rung}"
    return f"no flip within its {count(generated, 'token')}; {bits}"


def _forwards(page: Page, parted: list[RequestDivergence]) -> None:
    flipped = [request for request in parted if request.flip_forward is not None]
    if not flipped:
        return
    _numbered(page, 2)
    for request in flipped:
        page.prose(f"request {named(request.id)}:")
        flip_forward_lines(page, request)


def _births(page: Page, verdict: Verdict, parted: list[RequestDivergence]) -> None:
    _numbered(page, 3)
    for request in parted:
        page.prose(f"request {named(request.id)}:")
        if request.origin is None:
            page.item("  birth: ", "no origin could be named")
        else:
            origin_lines(page, request.origin)
            chunk_lines(page, request)
        total = sum(found.count for found in request.origins)
        if total:
            page.item("  origins: ", count(total, "in all", "in all"))
    for each in verdict.evidence:
        if each.fact in ("contradiction", "settings", "quantised", "not_finite"):
            page.item("  - ", f"{passage(each.said)}{_where(each)}")


def _where(evidence: Evidence) -> str:
    run, forward = evidence.detail.get("run"), evidence.detail.get("forward")
    if run is None:
        return ""
    where = "in both runs" if run == "both" else f"run {named(str(run))}"
    return f" ({where}{'' if forward is None else f', forward {named(str(forward))}'})"


def _caches(page: Page, parted: list[RequestDivergence]) -> None:
    _numbered(page, 4)
    for request in parted:
        page.prose(f"request {named(request.id)}:")
        if request.cache_entry is None and request.carriers is None:
            page.item("  ", "no compared cache entry differs")
        cache_lines(page, request)


def control_lines(page: Page, verdict: Verdict) -> None:
    """Every control with its result, those that were not run with the reason, and the acceptance of drafts."""
    ran = [control for control in verdict.controls if control.result != NOT_RUN]
    # What was done by hand came to rest on this one, so it is read first.
    for control in sorted(ran, key=lambda control: control.name != HOLD):
        page.item(f"  {named(control.name)}: ", f"{named(control.result)}. {_control(control)}")
    not_run_lines(page, verdict)
    if not verdict.controls:
        page.item("  ", "none was needed")
    for each in verdict.evidence:
        if each.fact == "acceptance":
            page.item("  acceptance: ", passage(each.said))


def _control(control: Control) -> str:
    forwards = count(control.forwards, "forward")
    return f"{passage(sentence_of(control.said))} ({forwards}, {control.seconds:.1f} s)"
