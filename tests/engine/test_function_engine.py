"""The function engine: each form of answer as a trace, what it lacks by name, and what compare finds in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from detdiff import Scenario, compare, record
from detdiff.engines.base import RunOptions
from detdiff.engines.function import EngineRequest, Generation, Tap
from detdiff.errors import EngineAnswerInvalid, EngineFailed, EngineRefuses, EngineUnknown
from detdiff.scenario import Schedule
from detdiff.trace import Trace

Form = Callable[[EngineRequest, list[int], int], Any]
SERIAL = Scenario.from_dict(
    {"model": "counting", "request": [{"tokens": [1, 2, 3]}, {"tokens": [4, 5]}], "max_tokens": 6}
)


class Counting:
    """Counts on from the prompt's sum; ``fault`` adds 1 to token 3 of a request that is not alone."""

    name = "counting"

    def __init__(self, form: Form, fault: bool = True) -> None:
        self.form, self.fault = form, fault

    def generate(self, requests: Sequence[EngineRequest], schedule: Schedule) -> list[Any]:
        more = self.fault and len(requests) > 1
        return [
            self.form(
                each,
                [(sum(each.tokens) + n + (more and n == 3)) % 50 for n in range(each.max_tokens)],
                len(requests) if self.fault else 1,
            )
            for each in requests
        ]


def scored(request: EngineRequest, tokens: list[int], m: int) -> Generation:
    scores = [-0.5 - 0.25 * (m > 1 and n > 1) for n in range(len(tokens))]
    return Generation(tokens, np.array(scores, np.float32))


def tapped(request: EngineRequest, tokens: list[int], m: int) -> Generation:
    rows = len(request.tokens) + len(tokens) - 1
    x = np.arange(4 * rows, dtype=np.float32).reshape(rows, 4)
    y = 2 * x
    if m > 1:
        y[len(request.tokens) + 1 :] += 1
    return Generation(
        tokens, taps={"first": Tap(x, x, m=[m] * rows), "second": Tap(y, x, m=[m] * rows), "third": Tap(y, y)}
    )


def two(folder: Path, form: Form, fault: bool = True, schedule: str = "static") -> tuple[Trace, Trace]:
    engine = Counting(form, fault)
    a = record(SERIAL, folder / "a", engine=engine)
    b = record(SERIAL.with_changes(schedule=schedule, capture="full"), folder / "b", engine=engine)
    for trace in (a, b):
        trace.verify()
        assert trace.engine == "function" and {"cache", "kernel_paths", "forwards"} < trace.lacks.keys()
    return a, b


FORMS: dict[str, Form] = {
    "tokens": lambda request, tokens, m: tokens,
    "text": lambda request, tokens, m: Generation(text="".join(chr(65 + token) for token in tokens)),
    "scores": scored,
    "taps": tapped,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schedule", ["static", "continuous"])
def test_every_form_of_answer_is_compared_and_its_flip_found(
    tmp_path: Path, form: str, schedule: str
) -> None:
    a, b = two(tmp_path, FORMS[form], schedule=schedule)
    found = compare(a, b)
    assert [request.flip.index for request in found.requests if request.flip] == [3, 3]
    assert ("tokens" in a.lacks, "sites" in a.lacks, "logits" in a.lacks) == (
        form == "text",
        form != "taps",
        form != "scores",
    )


@pytest.mark.parametrize("form", FORMS)
def test_an_engine_without_the_fault_is_identical(tmp_path: Path, form: str) -> None:
    found = compare(*two(tmp_path, FORMS[form], fault=False))
    assert found.identical and found.compared.digests > 0


def test_taps_give_the_first_origin_with_its_m_on_both_sides(tmp_path: Path) -> None:
    a, b = two(tmp_path, tapped)
    origin = compare(a, b).requests[0].origin
    assert origin is not None and (origin.site, origin.position) == ("second", 4)
    assert [a.call(2, 1, (0, 4))["rows"], b.call(2, 1, (0, 4))["rows"]] == [1, 2]  # type: ignore[index]


def test_log_probabilities_that_move_without_a_flip_are_a_divergence(tmp_path: Path) -> None:
    def moved(request: EngineRequest, tokens: list[int], m: int) -> Generation:
        return scored(request, [7] * len(tokens), m)

    found = compare(*two(tmp_path, moved))
    assert not found.identical and found.stage == "bits"
    assert all(request.flip is None for request in found.requests)
    scores = found.requests[0].scores
    assert scores is not None and (scores.differing, scores.max_abs) == (scores.compared - scores.index, 0.25)
    # No place inside the model is known, so none is an origin.
    assert found.requests[0].origin is None and "sites" in found.a.lacks


def test_what_a_function_cannot_be_told_is_refused_before_anything_is_recorded(tmp_path: Path) -> None:
    engine = Counting(FORMS["tokens"])
    for changes, words in (
        ({"temperature": 1.0}, "the temperature of request 'r0' cannot be told"),
        ({"kv_bits": 8}, "settings of the cache cannot be told"),
    ):
        with pytest.raises(EngineRefuses, match=words):
            record(SERIAL.with_changes(**changes), tmp_path / "a", engine=engine)
    with pytest.raises(EngineFailed, match="schedule continuous was asked for. Ask for static:N"):
        record(SERIAL.with_changes(schedule="continuous"), tmp_path / "a", engine=lambda requests: [])
    with pytest.raises(EngineAnswerInvalid, match="otherwise than for another request"):
        record(
            SERIAL.with_changes(schedule="static"),
            tmp_path / "a",
            engine=lambda requests: [Generation([1]), Generation([1], np.zeros(1, np.float32))],
        )
    with pytest.raises(EngineUnknown, match="There is no engine 'nothing'"):
        from detdiff.engines.registry import find_factory

        find_factory("nothing")
    assert not (tmp_path / "a").exists()


def test_values_are_kept_where_they_are_asked_for(tmp_path: Path) -> None:
    engine = Counting(tapped)
    plain = record(SERIAL, tmp_path / "a", engine=engine)
    some = record(SERIAL, tmp_path / "b", engine=engine, options=RunOptions(values={"r0": [4]}))
    assert not any(shard.value_columns() for shard in plain.shards)
    assert any(shard.value_columns() for shard in some.shards)
    assert compare(plain, some).identical


class Mean:
    """Embeds by the mean of two features a token; ``counts_padding`` has padding of zeros in the mean, as a batch of other lengths
    brings it."""

    def __init__(self, counts_padding: bool) -> None:
        self.counts_padding = counts_padding
        self.asked: list[int] = []

    def generate(self, requests: Sequence[EngineRequest], schedule: Schedule) -> list[Any]:
        self.asked.append(len(requests))
        longest = max(len(each.tokens) for each in requests)
        answers = []
        for each in requests:
            assert each.task == "embed"
            hidden = np.array([[t, t * t] for t in each.tokens], np.float32)
            total = hidden.sum(axis=0) / np.float32(longest if self.counts_padding else len(each.tokens))
            answers.append(Generation(embedding=total, taps={"features": hidden}))
        return answers


@pytest.mark.parametrize("faulty", [True, False])
def test_a_function_that_embeds_is_compared_by_its_vectors(tmp_path: Path, faulty: bool) -> None:
    asked = {
        "model": "mine",
        "task": "embed",
        "request": [{"tokens": [1, 2, 3]}, {"tokens": [4, 5]}, {"tokens": [6]}],
    }
    engine = Mean(faulty)
    a = record(Scenario.from_dict(asked), tmp_path / "a", engine=engine)
    b = record(
        Scenario.from_dict({**asked, "schedule": "static", "active": 2}), tmp_path / "b", engine=engine
    )
    assert engine.asked == [1, 1, 1, 2, 1]
    found = compare(a, b)
    assert found.identical is not faulty
    moved = [r.id for r in found.requests if r.embedding is not None and r.embedding.differing]
    assert moved == (["r1"] if faulty else [])
    if faulty:
        # Every tapped row is equal: the difference was made after the last tap.
        assert found.requests[1].origin is None and found.requests[1].differing == 0


def test_an_embedding_is_one_vector(tmp_path: Path) -> None:
    asked = Scenario.from_dict({"model": "mine", "task": "embed", "request": [{"tokens": [1, 2]}]})
    for given in ([[1.0]], [], "text", None):
        with pytest.raises(EngineAnswerInvalid, match="as an embedding"):
            record(asked, tmp_path / "t", engine=lambda requests, given=given: [given])
