"""Settings made plainer and smaller, by a predicate in the place of runs; and which divergences are alike."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from detdiff.reduce.pair import Candidate, Twin, dropped, lowered, plainer, short_toml
from detdiff.reduce.result import DivergenceKind
from detdiff.scenario import Scenario

FILES = sorted((Path(__file__).parents[2] / "traces" / "reference-case").glob("*.toml"))


def pair(a: dict[str, Any], b: dict[str, Any], **both: Any) -> Candidate:
    requests = [{"id": name, "tokens": [1, 2, 3], "arrival": n} for n, name in enumerate(("one", "two"))]
    keys = {"model": "builtin", "layout": "packed", "request": requests, **both}
    return Candidate(Scenario.from_dict({**keys, **a}), Scenario.from_dict({**keys, **b}))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_short_file_reads_back_to_the_same_scenario(file: Path) -> None:
    asked = Scenario.from_toml(file)
    text = short_toml(asked)
    assert Scenario.from_dict(tomllib.loads(text)) == asked
    assert "top_p" not in text and "prefill_chunk" not in text and len(text) < len(asked.to_toml())


def test_what_nothing_needs_is_dropped_and_the_rest_stays() -> None:
    start = pair(
        {"schedule": "serial"},
        {"schedule": "continuous", "active": 2},
        kernels="candle-metal",
        page_tokens=16,
        temperature=0.5,
        seed=3,
        prefill_chunk=8,
    )

    def holds(found: Candidate) -> bool:
        schedule = found.b.schedule
        profile = found.a.kernels.profile
        return schedule.kind == "continuous" and schedule.layout == "packed" and profile == "candle-metal"

    found = plainer(start, holds)
    assert dropped(start, found) == ("temperature", "seed", "page_tokens", "active", "prefill_chunk")
    assert found.a.schedule.kind == "serial" and found.b.schedule.kind == "continuous"
    assert found.a.kernels.profile == found.b.kernels.profile == "candle-metal"
    assert all(request.arrival == n for n, request in enumerate(found.b.requests))


def test_rules_that_nothing_needs_go() -> None:
    rules = [{"site": f"layers.{n}.*", "path": "rows"} for n in range(6)]
    start = pair({}, {"schedule": "continuous"}, rule=rules)
    found = plainer(
        start,
        lambda c: (
            any(rule.site == "layers.4.*" for rule in c.a.kernels.rules)
            and c.b.schedule.kind == "continuous"
            and c.a.schedule.layout == "packed"
        ),
    )
    assert [rule.site for rule in found.a.kernels.rules] == ["layers.4.*"]
    assert "rules" in dropped(start, found)


def test_numbers_that_fit_each_other_are_halved_together() -> None:
    start = pair({"prefill_chunk": 32}, {"prefill_chunk": 8}, split_rows=16)

    def holds(found: Candidate) -> bool:
        chunks = found.a.schedule.prefill_chunk, found.b.schedule.prefill_chunk
        return chunks[0] == 4 * chunks[1] == 2 * (found.a.kernels.split_rows or 0)

    found = lowered(start, holds)
    assert (found.a.schedule.prefill_chunk, found.b.schedule.prefill_chunk) == (4, 1)
    assert found.a.kernels.split_rows == found.b.kernels.split_rows == 2


def test_the_key_tells_candidates_apart() -> None:
    start = pair({}, {"schedule": "continuous"})
    others = [
        start,
        start.keeping(["one"]),
        start.with_prompts({"one": [1, 2]}),
        start.with_tokens({"two": 5}),
        start.with_arrivals({"two": 0}),
        replace(start, twin=Twin(0)),
        replace(start, twin=Twin(0, 1)),
        replace(start, a=start.b, b=start.a),
    ]
    assert len({each.key for each in others}) == len(others)
    assert start.with_tokens({"two": 5000}).key == start.key == replace(start).key


PLAIN = DivergenceKind("bits", "layers.3.mlp.up_proj", "linear", "x/mv", "x/mm", None, False, True)


@pytest.mark.parametrize(
    ("other", "alike"),
    [
        ({}, True),
        ({"flip": True}, True),
        ({"stage": "dtype"}, False),
        ({"site": "layers.2.mlp.up_proj"}, False),
        ({"path_b": "x/mm2"}, False),
        ({"contradiction": "offset"}, False),
        ({"shows": False}, False),
    ],
)
def test_what_has_to_be_the_same(other: dict[str, Any], alike: bool) -> None:
    assert PLAIN.alike(replace(PLAIN, **other), flip=False, layers=False) == alike


def test_layers_may_differ_where_asked_and_a_flip_may_have_to_stay() -> None:
    other = replace(PLAIN, site="layers.0.mlp.up_proj")
    assert PLAIN.alike(other, flip=False, layers=True) and not PLAIN.alike(other, flip=True, layers=True)
    assert not PLAIN.alike(replace(PLAIN, site="layers.0.mlp.gate_proj"), flip=False, layers=True)
    flipped = DivergenceKind("tokens", None, None, None, None, None, True, True)
    assert flipped.alike(flipped, flip=False, layers=False)
    assert not flipped.alike(replace(flipped, flip=False), flip=False, layers=False)


def test_a_divergence_survives_the_disk() -> None:
    assert DivergenceKind.from_json(PLAIN.to_json()) == PLAIN
    with pytest.raises(KeyError):
        DivergenceKind.from_json({"stage": "bits"})
