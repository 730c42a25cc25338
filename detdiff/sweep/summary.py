"""What came out of a sweep: a line a pair, for people, programs and CI, and what is new since the sweep before."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from detdiff.errors import CommandError, Failure
from detdiff.report.build import build
from detdiff.report.index import IndexEntry
from detdiff.report.words import count

from .cells import ANSWERS, FAILURES, SweepFolder
from .grid import CellPair, HowCompared, Sweep

LINES: Final = "sweep.jsonl"
PAGE: Final = "sweep.html"
JUNIT: Final = "sweep.xml"
FAILED, INCONCLUSIVE, IDENTICAL = "failed", ("inconclusive", "undetermined"), "identical"
SAME: Final = "same"
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class SweepSummary:
    """All pairs of a sweep in its order; ``gone`` are those of the sweep before that this one has not, ``unwritten`` the files that
    should say all this and could not be written."""

    name: str
    entries: tuple[IndexEntry, ...]
    gone: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()

    @property
    def exit_code(self) -> int:
        """As of a comparison: 2 where a pair has no answer or a file is unwritten, else 1 where one differs, else 3 where one is inconclusive."""
        kinds = {each.kind for each in self.entries}
        if FAILED in kinds or self.unwritten:
            return 2
        if kinds - {IDENTICAL, *INCONCLUSIVE}:
            return 1
        return 3 if kinds & set(INCONCLUSIVE) else 0

    @property
    def news(self) -> str:
        """What is other than in the sweep before, in a sentence; "" where there is none."""
        told = [each for each in self.entries if each.since]
        if not told and not self.gone:
            return ""
        other = sum(each.since not in (SAME, "new") for each in told)
        new = sum(each.since == "new" for each in told)
        return (
            f"Since the sweep before: {count(other, 'pair is', 'pairs are')} otherwise, {new} new, {len(self.gone)} gone, "
            f"{len(told) - other - new} the same."
        )


def summarise(
    name: str, sweep: Sweep, folder: SweepFolder, failures: Mapping[str, Failure], before: Path | None = None
) -> SweepSummary:
    """The summary of what a folder holds; ``failures`` are those that this run saw. Raises CommandError for ``before``."""
    entries = tuple(_entry(pair, sweep.how, folder, failures) for pair in sweep.pairs)
    if before is None:
        return SweepSummary(name, entries)
    last = _lines_of(before)
    gone = tuple(sorted(last.keys() - {each.name for each in entries}))
    return SweepSummary(name, tuple(replace(e, since=_since(e, last.get(e.name))) for e in entries), gone)


def _entry(
    pair: CellPair, how: HowCompared, folder: SweepFolder, failures: Mapping[str, Failure]
) -> IndexEntry:
    labels = {**pair.b.labels, **({"along": pair.along} if pair.along else {})}
    saved = None if pair.name in failures else folder.answered(pair, how)
    if saved is not None:
        entry = IndexEntry.of(
            pair.name, build(saved.divergence, saved.verdict), f"{ANSWERS}/{pair.name}.json"
        )
        return replace(entry, a=pair.a.name, b=pair.b.name, labels=labels)
    failure = failures.get(pair.name) or folder.failed(pair.name)
    told = failure.message if failure is not None else "It was not run yet."
    kind = INCONCLUSIVE[0] if failure is not None and failure.exit_code == 3 else FAILED
    page = f"{FAILURES}/{pair.name}.json" if folder.failure(pair.name).is_file() else None
    return IndexEntry(pair.name, pair.a.name, pair.b.name, kind, told, 0, 0, "", page, labels)


def line(entry: IndexEntry) -> dict[str, Any]:
    """One pair as a JSON object."""
    found: dict[str, Any] = {
        "pair": entry.name,
        "a": entry.a,
        "b": entry.b,
        "axes": dict(entry.labels),
        "verdict": entry.kind,
        "flips": entry.flips,
        "requests": entry.requests,
        "origin": entry.origin or None,
        "places": [vars(place) for place in entry.places],
        "said": entry.headline,
        "answer": entry.page,
    }
    return found | ({"since": entry.since} if entry.since else {})


def lines_text(summary: SweepSummary) -> str:
    """JSON Lines, a pair each."""
    return "".join(json.dumps(line(each), ensure_ascii=False) + "\n" for each in summary.entries)


def summary_json(summary: SweepSummary) -> dict[str, Any]:
    """The same as one object."""
    return {
        "schema": "detdiff.sweep/1",
        "name": summary.name,
        "exit_code": summary.exit_code,
        "pairs": [line(each) for each in summary.entries],
        "gone": list(summary.gone),
    }


def _lines_of(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / LINES
    try:
        found = [json.loads(each) for each in path.read_text(encoding="utf-8").splitlines()]
        return {each["pair"]: each for each in found}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(
            f"--against {folder} holds no {LINES} that can be read ({error}); expected the folder of a sweep that has ended. Name one."
        ) from None


def _since(entry: IndexEntry, before: Mapping[str, Any] | None) -> str:
    if before is None:
        return "new"
    was = before.get("verdict"), before.get("origin"), before.get("flips")
    if was == (entry.kind, entry.origin or None, entry.flips):
        return SAME
    if was[0] != entry.kind:
        return f"was {was[0]}"
    if was[1] != (entry.origin or None):
        return f"origin was {was[1] or 'nowhere'}"
    return f"flips were {was[2]}"


def junit(summary: SweepSummary) -> bytes:
    """JUnit's XML: a pair that differs is a failure, one without an answer, or an inconclusive one, is an error."""
    kinds = [each.kind for each in summary.entries]
    errors = sum(kind == FAILED or kind in INCONCLUSIVE for kind in kinds)
    counts = {
        "tests": str(len(kinds)),
        "failures": str(len(kinds) - errors - kinds.count(IDENTICAL)),
        "errors": str(errors),
    }
    suites = ElementTree.Element("testsuites", {"name": _xml(summary.name), **counts})
    suite = ElementTree.SubElement(suites, "testsuite", {"name": _xml(summary.name), **counts})
    for each in summary.entries:
        case = ElementTree.SubElement(
            suite, "testcase", {"classname": _xml(f"sweep.{summary.name}"), "name": _xml(each.name)}
        )
        if each.kind == IDENTICAL:
            continue
        tag = "error" if each.kind == FAILED or each.kind in INCONCLUSIVE else "failure"
        told = ElementTree.SubElement(case, tag, {"type": each.kind, "message": _xml(each.headline)})
        words = [f"{each.b} against {each.a}", each.headline]
        if each.origin:
            words.append(f"first origin at {each.origin}; {each.flips} of {each.requests} flip")
        told.text = _xml("\n".join(words))
    ElementTree.indent(suites)
    text: str = ElementTree.tostring(suites, encoding="unicode")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'.encode()


def _xml(text: str) -> str:
    return _NOT_XML.sub("\ufffd", text)


def shown(entries: Sequence[IndexEntry]) -> list[IndexEntry]:
    """What a terminal shows: all pairs but the identical ones."""
    return [each for each in entries if each.kind != IDENTICAL]
