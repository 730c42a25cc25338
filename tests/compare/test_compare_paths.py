"""Where the rows of one call took several kernels, an origin shows those of its own row."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from synthetic_traces import Ask, Fault, Plan, serial, together
from test_compare_origins import run

from detdiff.compare.forwards import _numbers_after
from detdiff.report import divergence_text, to_json

ASKS = (
    Ask("anchor", tuple(range(10, 20)), (30, 31, 32, 33, 34)),
    Ask("follower", (40, 41, 42, 43, 44), (50, 51, 52)),
)
SERIAL = Plan(ASKS, serial(ASKS), path=lambda rows: "reference/gemv")
# 15 rows at once: 12 in whole fours and 3 left over, which are the last of the follower's prompt.
TOGETHER = replace(SERIAL, forwards=together(ASKS), whole=4)


@pytest.mark.parametrize(
    ("request_number", "position", "path"),
    [
        (0, 0, "reference/gemm"),
        (0, 9, "reference/gemm"),
        (1, 0, "reference/gemm"),
        (1, 1, "reference/gemm"),
        (1, 2, "reference/gemv"),
        (1, 4, "reference/gemv"),
    ],
)
def test_the_path_of_the_row(request_number: int, position: int, path: str) -> None:
    fault = Fault("layers.0.mlp.up", "out", request_number, position)
    found = run(SERIAL, replace(TOGETHER, faults=[fault]))
    (hit,) = [request for request in found.requests if request.origin is not None]
    assert hit.origin is not None and (hit.origin.site, hit.origin.position) == (fault.site, position)
    assert (hit.origin.path_a, hit.origin.path_b) == ("reference/gemv", path)
    assert hit.origin.rule_b == f"fours -> {path}" and hit.origin.rows_b == 15
    (count,) = hit.origins
    assert (count.path_a, count.path_b, count.count) == ("reference/gemv", path, 1)
    text = " ".join(divergence_text(found).split())
    assert f"path {path}, which saw 15 rows (second-to-last dimension 15); rule: fours -> {path}" in text
    (told,) = [r for r in to_json(found)["requests"] if r["origin"] is not None]
    assert told["origin"]["path_b"] == path and told["origins"][0]["path_b"] == path


def test_origins_are_counted_by_the_paths_of_their_rows() -> None:
    # Rows 10 to 14 of the first forward; the first two are the end of the third group of four.
    faults = [Fault("layers.0.mlp.up", "out", 1, position) for position in range(5)]
    found = run(SERIAL, replace(TOGETHER, faults=faults)).request("follower")
    linear = {(count.path_b, count.count) for count in found.origins if count.kind == "linear"}
    assert {("reference/gemm", 2), ("reference/gemv", 3)} <= linear


def test_the_flips_forward_is_told_by_its_own_row() -> None:
    """A decode row of three takes the same kernel as alone, though whole fours would not."""
    flipped = replace(ASKS[1], generated=(50, 51, 59))
    other = replace(TOGETHER, asks=(ASKS[0], flipped), faults=[Fault("layers.0.mlp.up", "out", 1, 6)])
    forward = run(SERIAL, other).request("follower").flip_forward
    assert forward is not None and forward.paths_equal is True
    assert {use.path for use in forward.paths_b} == {"native", "reference/gemv"}


def test_numbers_behind_a_word_are_those_that_a_pattern_finds() -> None:
    word = b'"plan":'
    for raw in (
        b'{"forward":0,"plan":12,"x":"plan":},\n{"plan":0}\n"plan":1234567890123 "plan":-1 "pla "plan":7',
        *(b'"plan":7'[:n] for n in range(9)),
    ):
        expected = [(m.start(), int(m[1] or -1)) for m in re.finditer(rb'"plan":(\d{0,9})', raw)]
        places, values = _numbers_after(word, raw)
        assert list(zip(places.tolist(), values.tolist(), strict=True)) == expected
