"""The golden reports: exactly what each format makes of one answer, and what the answers of all kinds say.

After a change of a format, `python tools/golden_reports.py` writes them again; look at what changed.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from test_report_markdown import Read

from detdiff.report.build import build
from detdiff.report.document import Report
from detdiff.report.saved import read_saved

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from golden_reports import EVERY_FORMAT, RECIPES, TARGET, made, texts  # noqa: E402

KINDS = {
    "reference": "numerics",
    "kernel-switch": "numerics",
    "bug": "bug",
    "configuration": "configuration",
    "identical": "identical",
    "inconclusive": "inconclusive",
}
FORMATS = ("report.txt", "report.md", "report.json")


def golden(name: str) -> Report:
    kept = read_saved(TARGET / name / "report.json")
    return build(kept.divergence, kept.verdict, kept.series, kept.command)


def test_there_is_one_of_each_kind() -> None:
    assert list(KINDS) == list(RECIPES) and {folder.name for folder in TARGET.iterdir()} == set(KINDS)
    assert {name: golden(name).kind for name in KINDS} == KINDS


def test_every_format_gives_exactly_the_golden_text() -> None:
    found = made(TARGET / EVERY_FORMAT)
    assert set(found) == set(FORMATS)
    for file, text in found.items():
        assert text == (TARGET / EVERY_FORMAT / file).read_text(encoding="utf-8"), file


def test_another_answer_gives_another_text_in_every_format() -> None:
    report = golden("reference")
    assert report.verdict is not None and report.divergence is not None
    other = build(report.divergence, replace(report.verdict, advice="Other."), report.series, report.command)
    changed = texts(other)
    assert all(changed[file] != (TARGET / "reference" / file).read_text(encoding="utf-8") for file in FORMATS)


@pytest.mark.parametrize("name", KINDS)
def test_they_hold_nothing_of_the_machine_that_made_them(name: str) -> None:
    for path in (TARGET / name).iterdir():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w.])/(tmp|work|home|root|Users|var)/", text), path.name
        seconds = re.findall(r'"seconds": (\[[^]]*\]|[^,}\s]+)', text)
        assert set(re.findall(r"[-+.\de]+", " ".join(seconds))) <= {"0.5"}


SECTIONS = {
    "reference": "flip origin differing_entries controls float64 verdict timeline margins lens",
    "kernel-switch": "flip origin differing_entries controls float64 verdict timeline margins",
    "bug": "flip origin differing_entries controls float64 verdict timeline margins",
    "configuration": "flip origin differing_entries controls float64 verdict timeline margins",
    "identical": "controls verdict timeline margins",
    "inconclusive": "timeline margins",
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_says_the_same_in_every_format(name: str) -> None:
    report = golden(name)
    found = texts(report)
    answer = json.loads(found["report.json"])
    assert (answer["kind"], answer["headline"], answer["advice"]) == (
        report.kind,
        report.headline,
        report.advice,
    )
    ids = [section.id for section in report.sections if not section.folded and section.id != "reproduce"]
    assert " ".join(ids) == SECTIONS[name]
    assert [section["id"] for section in answer["sections"]] == [section.id for section in report.sections]
    text, page = " ".join(found["report.txt"].split()), Read(found["report.md"])
    for part in (report.headline, f"kind: {report.kind}", report.advice):
        assert " ".join(part.split()) in text
    assert all(
        f"{section.title}\n{'-' * len(section.title)}\n" in found["report.txt"] for section in report.sections
    )
    assert page.text and report.kind in page.text


def test_the_reference_case_tells_what_its_investigation_found() -> None:
    text = " ".join((TARGET / "reference" / "report.txt").read_text(encoding="utf-8").split())
    assert re.match(
        r"Rounding: anchor flips at token 55 from .* took candle-metal/mv and .* candle-metal/mm; of 39 path changes 1 is enough",
        text,
    )
    for part in (
        "0 origins there: inherited",
        "top two swapped",
        "proposals equal and the target's choices differ from token 55 on",
        "pin_kernels removed",
        "patch_in removed",
        "neither side is nearer",
        "the preference turns in",
        "4 verify of anchor + 121 prefill of follower",
        "detdiff explain traces/reference-case/serial.toml traces/reference-case/continuous.toml",
    ):
        assert part in text, part


def test_the_kinds_say_what_to_do() -> None:
    assert "pin the kernels" in golden("kernel-switch").advice
    assert "numerics" in golden("bug").advice and golden("bug").headline.startswith("A bug: ")
    assert "same settings" in golden("configuration").advice
    assert golden("identical").advice == "" and golden("identical").headline.startswith(
        "The runs are identical"
    )
    assert "What was compared" in golden("inconclusive").advice


@pytest.mark.parametrize("name", KINDS)
def test_the_html_page_has_the_same_content(name: str) -> None:
    report = golden(name)
    found = Read(pytest.importorskip("detdiff.report.html").html(report))
    assert found.names >= {"html", "main", "table", "figure" if report.series else "main"}
    ids = [attributes["id"] for _, attributes in found.elements if attributes.get("id")]
    assert len(ids) == len(set(ids))
    assert [id for id in ids if id in {s.id for s in report.sections}] == [s.id for s in report.sections]
    assert all(part.replace("`", "") in found.text for part in (report.headline, report.advice))
