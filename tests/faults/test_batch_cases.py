"""Cases 6, 7, 9, 10, 14 and 16: faults that need a neighbour, found in the request and at the row that they hit."""

from __future__ import annotations

import pytest
from cases import CASES
from runs import events
from trials import SEEDS, Recorded, check_named, diverged


@pytest.mark.parametrize("seed", SEEDS)
def test_a_leak_is_the_entry_that_changed(recorded: Recorded, seed: int) -> None:
    trial = CASES[6].trial(seed)
    expected = trial.expected
    divergence = recorded.compare(trial)
    check_named(divergence, expected)
    (request,) = diverged(divergence)
    assert request.origin is not None
    entry = (expected.layer, expected.entry, expected.head, expected.entry_position)
    assert [(c.run, c.layer, c.kind, c.head, c.position) for c in request.origin.changes] == [("b", *entry)]
    # As long as the entry is there it is said, and nothing else is.
    found = [event for event in events(recorded.b) if event["kind"] == expected.event]
    assert {(e["request"], e["layer"], e["entry"], e["head"], e["position"]) for e in found} == {(0, *entry)}
    assert divergence.stage == "bookkeeping" and events(recorded.a) == []
    assert {finding.request for finding in divergence.bookkeeping} == {"r0"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_nan_begins_where_it_was_made(recorded: Recorded, seed: int) -> None:
    trial = CASES[7].trial(seed)
    divergence = recorded.compare(trial, capture="full")
    check_named(divergence, trial.expected)
    for request in diverged(divergence):
        magnitude = request.origin.magnitude if request.origin else None
        assert magnitude is not None and (magnitude.nan_a, magnitude.nan_b > 0) == (0, True)
    assert {request.id for request in diverged(divergence)} == trial.expected.requests


@pytest.mark.parametrize("seed", SEEDS)
def test_lost_rows_begin_with_the_rope_of_one_token(recorded: Recorded, seed: int) -> None:
    trial = CASES[9].trial(seed)
    divergence = recorded.compare(trial, capture="full")
    check_named(divergence, trial.expected)
    assert divergence.request("r0").identical
    for name, prompt in (("r1", 3), ("r2", 40)):
        origin = divergence.request(name).origin
        # The last row of a prompt is the first that a batch runs alone: all before it are exact.
        assert origin is not None and origin.position == prompt - 1
        # Zero in place of numbers of order one.
        assert origin.magnitude is not None and (origin.magnitude.max_abs or 0) > 0.5
        assert origin.magnitude.differing == origin.magnitude.elements


@pytest.mark.parametrize("seed", SEEDS)
def test_unwritten_columns_are_the_last_ones(recorded: Recorded, seed: int) -> None:
    trial = CASES[10].trial(seed)
    divergence = recorded.compare(trial, capture="full")
    check_named(divergence, trial.expected)
    columns = trial.expected.columns
    assert columns is not None
    for request, prompt in zip(divergence.requests, (12, 9, 40), strict=True):
        origin = request.origin
        # Prompts are more than seven rows in both runs.
        assert origin is not None and origin.magnitude is not None and origin.position == prompt - 1
        assert origin.magnitude.differing == columns[1] - columns[0] + 1
        assert columns[0] <= (origin.magnitude.worst or 0) <= columns[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_shared_position_contradicts_the_rows(recorded: Recorded, seed: int) -> None:
    trial = CASES[14].trial(seed)
    divergence = recorded.compare(trial)
    check_named(divergence, trial.expected)
    offsets = [event for event in events(recorded.b) if event["kind"] == "offset"]
    assert offsets and events(recorded.a) == []
    # Rows 1 and 2 are said to be where row 0 is, in both layers, from the end of the prompts on.
    assert {(e["request"], e["layer"]) for e in offsets} == {(r, layer) for r in (1, 2) for layer in (0, 1)}
    assert all(e["found"] - 11 == e["expected"] - (2, 39)[e["request"] - 1] for e in offsets)
    assert divergence.request("r0").identical
    for name, prompt in (("r1", 3), ("r2", 40)):
        origin = divergence.request(name).origin
        assert origin is not None and origin.position == prompt - 1


@pytest.mark.parametrize("seed", SEEDS)
def test_samplers_that_shift_leave_the_logits_alone(recorded: Recorded, seed: int) -> None:
    trial = CASES[16].trial(seed)
    divergence = recorded.compare(trial)
    assert divergence.stage == trial.expected.stage == "tokens"
    assert {request.id for request in diverged(divergence)} == trial.expected.requests
    assert divergence.compared.differing == 0 and divergence.bookkeeping == ()
    for request in diverged(divergence):
        # The fourth token of r0 is its last; the next step's samplers are one off.
        assert request.flip is not None and request.flip.index >= 4 and request.origin is None
        assert request.flip.a.top == request.flip.b.top
