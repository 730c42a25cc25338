"""Pictures as files: every view of a report, the zoom into the first origin, and names that any file system takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from answers import ANCHOR, FOLLOWER, QUIET, path
from series_samples import HOSTILE, hostile, small
from svg_reader import DIFFERS, check
from synthetic_traces import Fault, Plan, serial, together, write_trace

from detdiff.compare import compare
from detdiff.compare.series import series
from detdiff.report.build import build
from detdiff.report.document import Report, Section, View
from detdiff.report.views import plots


@pytest.fixture(scope="module")
def flipped(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The anchor flips at token 3; differences arise in layer 0 at position 2."""
    work = tmp_path_factory.mktemp("traces")
    asks = (ANCHOR, FOLLOWER, QUIET)
    other = (replace(ANCHOR, generated=(30, 31, 32, 93, 94)), FOLLOWER, QUIET)
    fault = Fault("layers.0.attn.k_proj", "out", 0, 2)
    logits = {(0, 3): [(33, 25.571232), (93, 25.565775)]}
    a = write_trace(work / "a", Plan(asks, serial(asks, chunk=4), path=path, logits=logits))
    b = write_trace(work / "b", Plan(other, together(other), (fault,), path=path))
    divergence = compare(a, b)
    return build(divergence, series=series(a, b, divergence))


def test_each_view_is_a_file_and_the_first_origin_is_shown_close(flipped: Report, tmp_path: Path) -> None:
    files = plots(flipped)
    views = [block for section in flipped.sections for block in section.blocks if isinstance(block, View)]
    assert len(files) == len(views) + 2
    assert {"map-anchor.svg", "timeline.svg", "sites-anchor-layer-0.svg", "entries-anchor-layer-0.svg"} <= {
        *files
    }
    for name, svg in files.items():
        (tmp_path / name).write_text(svg)
        check((tmp_path / name).read_text())
    zoom = check(files["sites-anchor-layer-0.svg"])
    rows = [words for words in zoom.words() if words.startswith("layers.0.")]
    assert [(rows[row], column) for row, column in zoom.origins()] == [("layers.0.attn.k_proj", 2)]
    entries = check(files["entries-anchor-layer-0.svg"])
    heads = [words for words in entries.words() if " head " in words]
    # The keys written at that position differ, the values do not.
    assert {(heads[row].split()[0], column) for row, column in entries.painted(*DIFFERS)} == {("K", 2)}


def test_the_timeline_marks_the_forwards_that_the_comparison_names(flipped: Report) -> None:
    assert flipped.divergence is not None and flipped.divergence.first == "anchor"
    found = flipped.divergence.request("anchor")
    assert found.origin is not None and found.flip is not None
    words = check(plots(flipped)["timeline.svg"]).words()
    for forward in (found.origin.forward_a, found.origin.forward_b):
        assert any(each.startswith(f"origin, forward {forward}") for each in words)
    for flip in (found.flip.forward_a, found.flip.forward_b):
        assert any(each.startswith(f"flip, forward {flip}") for each in words)


def test_a_report_without_traces_has_no_pictures(flipped: Report) -> None:
    assert plots(replace(flipped, series=None)) == {}


def test_another_site_of_the_same_name_is_not_taken_for_the_origin(flipped: Report) -> None:
    """A draft has sites of the same names: the layer is the one whose cell was an origin."""
    assert flipped.series is not None
    request = flipped.series.requests[0]
    layer = next(grid for grid in request.sites if grid.name == "layer 0")
    state = np.where(layer.state == 3, 2, layer.state).astype(np.uint8)
    state[0, 5] = 3
    draft = replace(layer, name="draft: layer 0", state=state)
    moved = replace(request, sites=(draft, *request.sites))
    found = replace(flipped, series=replace(flipped.series, requests=(moved, *flipped.series.requests[1:])))
    assert "sites-anchor-layer-0.svg" in plots(found) and "sites-anchor-draft-layer-0.svg" not in plots(found)


IDS = [
    "../x",
    "..",
    "",
    "x/../..",
    "CON",
    "a" * 1_000_000,
    HOSTILE,
    "A",
    "a",
    "é",
    "e",
    "a b",
    "a-b",
    "-",
    "\ud800",
]


def test_file_names_are_safe_and_no_two_are_alike() -> None:
    found = small()
    requests = tuple(replace(found.requests[0], id=id) for id in IDS)
    views = tuple(View("map", "", id) for id in IDS)
    report = Report(
        "different",
        "",
        "",
        (Section("origin", "", views),),
        None,
        None,
        replace(found, requests=requests),
        "",
    )
    files = plots(report)
    assert len(files) == len(IDS)
    assert len({name.casefold() for name in files}) == len(IDS)
    for name, svg in files.items():
        stem, dot, ending = name.partition(".")
        assert (dot, ending) == (".", "svg") and len(name) < 80
        assert stem.startswith("map-") and all(c.isascii() and (c.isalnum() or c in "_-") for c in stem)
        check(svg)
    assert {"map-CON.svg", "map-A.svg", "map-a-b.svg"} <= {*files}


def test_hostile_names_are_text_in_files() -> None:
    found = hostile()
    views = (View("timeline", ""), *(View("map", "", request.id) for request in found.requests))
    report = Report("different", "", "", (Section("origin", "", views),), None, None, found, "")
    files = plots(report)
    assert len(files) == 3
    for svg in files.values():
        check(svg)
        assert "<script" not in svg and "\x00" not in svg
