"""Answers there and back: what was saved as JSON gives the same report again, and what is no answer is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from made_reports import explained, flips, long_text

from detdiff.compare.grids import Grid
from detdiff.compare.series import LensPoint
from detdiff.errors import AnswerError
from detdiff.explain import Control, Evidence
from detdiff.report import to_json, verdict_json
from detdiff.report.build import build
from detdiff.report.document import Report
from detdiff.report.json import REPORT as SCHEMA
from detdiff.report.json import encoded, report_json, report_json_text
from detdiff.report.saved import SavedAnswer, read_saved, saved, series_from_json, verdict_from_json
from detdiff.report.text import report_text

DOCS = Path(__file__).resolve().parents[2] / "docs" / "json-schema.md"
SECTION = "\n# The JSON form of a report\n"


def same(a: Any, b: Any) -> bool:
    """Equal, arrays bit by bit."""
    if isinstance(a, np.ndarray):
        return (
            isinstance(b, np.ndarray)
            and (a.dtype, a.shape) == (b.dtype, b.shape)
            and a.tobytes() == b.tobytes()
        )
    if is_dataclass(a):
        return type(a) is type(b) and all(same(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def again(report: Report) -> Report:
    """Saved and read."""
    found = saved(json.loads(report_json_text(report)))
    return build(found.divergence, found.verdict, found.series, found.command)


def sized(report: Report) -> Report:
    """With sizes in the maps and a lens, as a replay and a recording with --lens give them."""
    assert report.series is not None
    draw = np.random.default_rng(0)

    def fill(grid: Grid) -> Grid:
        known = np.where(grid.state > 1, draw.random(grid.state.shape), np.nan).astype(np.float32)
        return replace(grid, ulp=np.ceil(known * 1000), rel=np.where(known > 0.9, np.float32(np.inf), known))

    requests = tuple(
        replace(
            each,
            layers=fill(each.layers),
            sites=tuple(map(fill, each.sites)),
            lens=(LensPoint(0, 0.1, -0.5), LensPoint(1, None, 0.25)),
        )
        for each in report.series.requests
    )
    return build(report.divergence, report.verdict, replace(report.series, requests=requests), report.command)


REPORTS: dict[str, Callable[[], Report]] = {
    "flips": flips,
    "long": long_text,
    "verdict": lambda: explained(flips()),
    "sizes": lambda: sized(explained(flips())),
    "no series": lambda: build(flips().divergence, None, None, "detdiff compare a b"),
    "nothing": lambda: build(None, None, None),
    "replayed": lambda: replayed(explained(flips())),
}


def replayed(report: Report) -> Report:
    """The verdict's own comparison is another object than the report's."""
    assert report.divergence is not None
    return build(
        replace(report.divergence, notes=("replayed",)), report.verdict, report.series, report.command
    )


@pytest.mark.parametrize("name", REPORTS)
def test_there_and_back(name: str) -> None:
    report = REPORTS[name]()
    back = again(report)
    for key in ("kind", "headline", "advice", "command", "sections", "divergence", "verdict", "series"):
        assert same(getattr(back, key), getattr(report, key)), key
    assert report_json_text(back) == report_json_text(report)


@pytest.mark.parametrize("name", REPORTS)
def test_the_text_is_the_json_object_in_lines_that_can_be_read(name: str) -> None:
    report = REPORTS[name]()
    text = report_json_text(report)
    assert json.loads(text) == json.loads(json.dumps(report_json(report), allow_nan=False))
    assert text.isascii() and len(text.splitlines()) >= 11


def test_what_the_reader_sees_is_there_too() -> None:
    answer = report_json(explained(flips()))
    assert answer["schema"] == SCHEMA == "detdiff.report/2" and answer["kind"] == "numerics"
    assert [s["id"] for s in answer["sections"]][:3] == ["flip", "origin", "differing_entries"]
    texts = next(b for b in answer["sections"][0]["blocks"] if b["type"] == "texts")
    assert texts["request"] == "anchor" and texts["a"] == [{"index": 3, "text": " t33", "mark": "flip"}]
    assert answer["divergence"] is None and answer["verdict"]["divergence"]["stage"] == "bits"


def test_maps_are_runs_of_equal_cells() -> None:
    answer = report_json(flips())["series"]["requests"][0]["layers"]
    assert answer["positions"] == 13 and answer["rows"][1] == "layer 0"
    assert answer["state"][1] == [[1, 2], [3, 1], [2, 10]] and answer["ulp"] is None


@given(
    arrays(np.uint8, st.tuples(st.integers(0, 3), st.integers(0, 9)), elements=st.integers(0, 3)), st.data()
)
def test_any_map_comes_back(state: np.ndarray[Any, Any], data: st.DataObject) -> None:
    cells = st.floats(width=32) | st.just(math.nan)
    share = data.draw(arrays(np.uint8, state.shape))
    sizes = [data.draw(st.none() | arrays(np.float32, state.shape, elements=cells)) for _ in range(2)]
    # All NaN are one to a map.
    ulp, rel = (None if each is None else np.where(np.isnan(each), np.float32("nan"), each) for each in sizes)
    grid = Grid("g", tuple(f"row {n}" for n in range(len(state))), state, share, ulp, rel)
    series = flips().series
    assert series is not None
    drawn = replace(series, requests=(replace(series.requests[0], layers=grid),))
    text = json.dumps(encoded(drawn), allow_nan=False)
    assert same(series_from_json(json.loads(text), "series", SCHEMA), drawn)


# A verdict


def test_a_verdict_comes_back() -> None:
    verdict = explained(flips()).verdict
    assert verdict is not None
    assert verdict_from_json(json.loads(json.dumps(verdict_json(verdict), allow_nan=False))) == verdict


def test_numbers_that_json_does_not_have_come_back_as_numbers() -> None:
    detail = {"pairs": [{"worst": math.inf, "least": -math.inf, "odd": math.nan, "word": "Inf"}]}
    verdict = explained(
        flips(),
        controls=(Control("repeat", "equal", "x", 1, 0.5, detail),),
        evidence=(Evidence("ratio", "x", {"ratio": math.inf}),),
    ).verdict
    assert verdict is not None
    back = verdict_from_json(json.loads(json.dumps(verdict_json(verdict), allow_nan=False)))
    pair = back.controls[0].detail["pairs"][0]
    assert (pair["worst"], pair["least"], pair["word"]) == (math.inf, -math.inf, "Inf") and math.isnan(
        pair["odd"]
    )
    assert back.evidence[0].detail == {"ratio": math.inf}


# Files


def test_a_file_of_each_schema_is_read(tmp_path: Path) -> None:
    report = explained(flips())
    assert report.divergence is not None and report.verdict is not None
    path = tmp_path / "answer.json"

    def read(answer: Any) -> SavedAnswer:
        path.write_text(json.dumps(answer), encoding="utf-8")
        return read_saved(path)

    found = read(to_json(report.divergence))
    assert found.divergence == report.divergence and found.verdict is None and found.command == ""
    found = read(verdict_json(report.verdict))
    assert found.verdict == report.verdict and found.divergence is found.verdict.divergence  # type: ignore[union-attr]
    found = read(report_json(report))
    assert found.verdict == report.verdict and same(found.series, report.series)
    assert found.command == "detdiff explain a.toml b.toml"


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "null", '{"schema": "detdiff.demo/2"}', '{"schema": 1}', "\ud800", "[" * 100_000]
)
def test_what_is_no_answer_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "answer.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(AnswerError) as caught:
        read_saved(path)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message and "--json" in message


def damage(answer: Any) -> Iterator[tuple[str, Any]]:
    """One change of a whole report each, and what it is called."""
    grid = answer["series"]["requests"][0]["layers"]
    for name, holder, key, value in (
        ("a key more", answer, "surprise", 1),
        ("command", answer, "command", None),
        ("kind of verdict", answer["verdict"], "verdict", "fine"),
        ("schema of verdict", answer["verdict"], "schema", "detdiff.verdict/3"),
        ("control", answer["verdict"]["controls"][0], "seconds", "long"),
        ("a control less", answer["verdict"]["controls"], 0, {}),
        ("fragile", answer["verdict"], "fragile", {}),
        ("runs too short", grid["state"], 0, [[1, 2]]),
        ("runs of nothing", grid["state"], 0, [[1, 13], [1, 0]]),
        ("runs backwards", grid["state"], 0, [[1, 14], [1, -1]]),
        ("state", grid["state"], 0, [[4, 13]]),
        ("share", grid["share"], 0, [[256, 13]]),
        ("a row less", grid, "state", grid["state"][1:]),
        ("a size outside", grid["ulp"], 0, [[13, 1.0]]),
        ("rows of sizes", grid, "rel", []),
        ("positions", grid, "positions", -1),
        ("far too many positions", grid, "positions", 10**15),
        ("a token", answer["series"]["requests"][0]["tokens_a"][0], "margin", "small"),
        ("model", answer["series"]["a"][0], "rows", 1.5),
    ):
        before = holder.get(key) if isinstance(holder, dict) else holder[key]
        missing = isinstance(holder, dict) and key not in holder
        holder[key] = value
        yield name, answer
        if missing:
            del holder[key]
        else:
            holder[key] = before


def test_a_damaged_report_is_refused_in_one_paragraph() -> None:
    whole = json.loads(report_json_text(sized(explained(flips()))))
    count = 0
    for name, answer in damage(whole):
        with pytest.raises(AnswerError) as caught:
            saved(answer)
        assert "\n" not in str(caught.value) and "again with this version" in str(caught.value), name
        assert len(str(caught.value)) < 1_000, name
        count += 1
    saved(whole)
    assert count == 19


# The documentation


def keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in keys(item)}
    return {key for item in value for key in keys(item)} if isinstance(value, list) else set()


def documented() -> set[str]:
    section = DOCS.read_text(encoding="utf-8").partition(SECTION)[2].partition("\n# ")[0]
    return set(re.findall(r"`([a-z][a-z_0-9]*)`", section))


def test_details_that_are_not_what_explain_writes_are_shown_as_far_as_they_go() -> None:
    found = verdict_json(explained(flips()).verdict)  # type: ignore[arg-type]
    for detail in ({"pairs": [{"kind": 3}, {"worst_a": "high"}]}, {"outside_where": [{}]}):
        found["controls"] = [{**found["controls"][0], "name": "oracle", "detail": detail}]
        assert "Against float64" in report_text(build(None, verdict_from_json(found)))


def present() -> set[str]:
    """The keys of a report, without those of a comparison and of a verdict, which have pages of their own."""
    answer = report_json(sized(explained(flips())))
    return keys({**answer, "divergence": None, "verdict": None})


def test_every_key_of_a_report_is_documented_and_no_other() -> None:
    assert present() - documented() == set()
    words = {
        "identical",
        "different",
        "inconclusive",
        "target",
        "draft",
        "flip",
        "near",
        "compare",
        "explain",
    }
    blocks = {"prose", "item", "table", "texts", "code", "view", "blank", "map", "timeline", "margins"}
    assert documented() - present() - words - blocks == set()
    assert "surprise" not in documented()
