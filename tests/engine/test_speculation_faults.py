"""Faults injected into speculation: each is named as itself, also where no token changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from runs import Runs, model, patched, scenario
from test_speculation import drafting

from detdiff.compare import Divergence, compare
from detdiff.engines.mlx import packed
from detdiff.engines.mlx.caches import RequestCaches
from detdiff.engines.mlx.engine import RecordOptions
from detdiff.engines.mlx.packed_model import PackedModel
from detdiff.engines.mlx.taps.injected import InjectedFault
from detdiff.engines.speculation import Speculator
from detdiff.report import divergence_text, from_json, to_json
from detdiff.scenario import Scenario
from detdiff.trace import Trace

Undo = Callable[[], None]


def asked(**keys: Any) -> Scenario:
    given = {"arrivals": (0, 2, 3), "draft": "tiny", "drafts": 3, "max_tokens": 10, **keys}
    return scenario("continuous", "packed", **given)


@pytest.fixture(scope="module")
def sound(runs: Runs) -> Trace:
    return runs.record(model("llama"), asked(), draft=drafting(seed=5))


def faulty(runs: Runs, undo: Undo) -> Trace:
    try:
        return runs.record(model("llama"), asked(), draft=drafting(seed=5))
    finally:
        undo()


def found(divergence: Divergence, what: str) -> list[str]:
    return [finding.detail for finding in divergence.bookkeeping if finding.what == what]


def test_nothing_is_found_where_nothing_is_wrong(sound: Trace, runs: Runs) -> None:
    again = compare(sound, runs.record(model("llama"), asked(), draft=drafting(seed=5)))
    assert again.identical and not again.bookkeeping
    for request in again.requests:
        verification = request.verification
        assert verification is not None and verification.tokens == 9
        assert verification.proposals_equal and verification.choices_equal
        assert verification.a == verification.b and verification.a is not None and verification.a.agrees
        assert request.draft is not None and request.draft.rows > 0 and request.draft.differing == 0


def test_a_draft_cache_that_is_never_trimmed(sound: Trace, runs: Runs) -> None:
    def only_the_target(self: Speculator[PackedModel], request: int, rejected: int) -> None:
        if rejected:
            self.target.caches.trim(request, rejected)

    divergence = compare(sound, faulty(runs, patched(Speculator, "rewind", only_the_target)))
    assert divergence.stage == "bookkeeping"
    assert any("stayed in the draft's cache" in text for text in found(divergence, "stale"))
    # A draft that sees rejected rows proposes otherwise, and no token of the target changes.
    assert all(request.flip is None and request.differing == 0 for request in divergence.requests)


def test_a_target_cache_that_keeps_one_row_too_many(sound: Trace, runs: Runs) -> None:
    native = RequestCaches.trim

    def one_too_few(self: RequestCaches, request: int, count: int) -> int:
        return native(self, request, count - (self._name == "target"))

    divergence = compare(sound, faulty(runs, patched(RequestCaches, "trim", one_too_few)))
    assert divergence.stage == "bookkeeping"
    assert any("stayed in the target's cache" in text for text in found(divergence, "stale"))
    offsets = found(divergence, "offset")
    assert offsets and "trim of the target's cache (1 of 1 rows)" in " ".join(offsets)


def test_a_draft_cache_that_is_trimmed_one_too_many(sound: Trace, runs: Runs) -> None:
    native = RequestCaches.trim

    def one_too_many(self: RequestCaches, request: int, count: int) -> int:
        done = native(self, request, count)
        for cache in self.of(request) if self._name == "draft" and count else ():
            cache.trim(1)
        return done

    divergence = compare(sound, faulty(runs, patched(RequestCaches, "trim", one_too_many)))
    told = [finding for finding in divergence.bookkeeping if finding.what.startswith(("offset", "cache"))]
    assert told[0].what == "offset" and "is at offset" in told[0].detail
    offset, row = (int(n) for n in re.findall(r"at offset (\d+), the row at (\d+)", told[0].detail)[0])
    assert offset == row - 1
    # What is gone is missing; nothing is said to have changed.
    assert {finding.what for finding in told} == {"offset", "cache_missing"}
    missing = next(finding for finding in told if finding.what == "cache_missing")
    assert f"row at position {row} did not see the entry of its own position {offset} in" in missing.detail
    assert all(request.flip is None and request.differing == 0 for request in divergence.requests)


def test_a_trim_that_does_less_than_it_is_asked(sound: Trace, runs: Runs) -> None:
    from mlx_lm.models.cache import KVCache

    divergence = compare(sound, faulty(runs, patched(KVCache, "trim", lambda self, n: 0)))
    assert any("took 0 of 2 rows off in layers 0-1" in text for text in found(divergence, "trim"))


def test_a_choice_taken_from_the_row_before(sound: Trace, runs: Runs) -> None:
    native = packed.greedy
    shifted = patched(packed, "greedy", lambda logits: native(mx.roll(logits, 1, axis=0)))
    divergence = compare(sound, faulty(runs, shifted))
    assert divergence.stage == "bookkeeping"
    assert any("and that row's own logits choose" in text for text in found(divergence, "choice"))


def test_counts_that_do_not_add_up(sound: Trace, runs: Runs) -> None:
    native = Speculator.settle

    def generous(self: Speculator[PackedModel], *args: Any) -> None:
        native(self, *args)
        self.counts[args[0].work.index].accepted += 1

    divergence = compare(sound, faulty(runs, patched(Speculator, "settle", generous)))
    assert len(found(divergence, "acceptance")) == 3
    for request in divergence.requests:
        acceptance = request.verification and request.verification.b
        assert acceptance and acceptance.agrees is False
        assert acceptance.own_accepted == acceptance.accepted + acceptance.verifications
    assert "counts that do not" not in divergence_text(divergence)
    assert from_json(to_json(divergence)) == divergence


def test_a_difference_arising_in_the_draft_is_named_as_such(sound: Trace, runs: Runs) -> None:
    injected_fault = InjectedFault("draft.layers.1.mlp.up_proj", 1, 4)
    other = runs.record(
        model("llama"), asked(), RecordOptions(observe=0, faults=(injected_fault,)), drafting(seed=5)
    )
    divergence = compare(sound, other)
    assert divergence.stage == "bits" and divergence.first == "r1"
    request = divergence.request("r1")
    assert request.flip is None and request.differing == 0 and request.draft is not None
    assert request.draft.first and request.origin == request.draft.origin
    assert request.origin is not None and request.origin.site == "draft.layers.1.mlp.up_proj"
    assert request.origin.position == 4 and request.origin.how == "leaf"
    assert all(divergence.request(id).identical for id in ("r0", "r2"))
    assert "arising there before the target differs" in divergence_text(divergence)


def test_a_difference_arising_in_the_target_comes_before_the_drafts(sound: Trace, runs: Runs) -> None:
    injected_faults = (
        InjectedFault("layers.0.mlp.up_proj", 0, 13),
        InjectedFault("draft.layers.0.mlp.up_proj", 2, 1),
    )
    other = runs.record(
        model("llama"), asked(), RecordOptions(observe=0, faults=injected_faults), drafting(seed=5)
    )
    divergence = compare(sound, other)
    assert divergence.first == "r0"
    origin = divergence.request("r0").origin
    assert origin is not None and (origin.site, origin.position) == ("layers.0.mlp.up_proj", 13)
    assert divergence.request("r0").draft.differing == 0  # type: ignore[union-attr]
    drafted = divergence.request("r2").origin
    assert drafted is not None and drafted.site == "draft.layers.0.mlp.up_proj"


def test_a_run_with_a_draft_compares_with_one_without(sound: Trace, runs: Runs) -> None:
    plain = runs.record(model("llama"), scenario("serial", "packed", max_tokens=10))
    for pair in ((sound, plain), (plain, sound)):
        divergence = compare(*pair)
        assert divergence.identical
        for request in divergence.requests:
            assert request.draft is None and request.verification is not None
            assert (request.verification.a is None) == (pair[0] is plain)
        assert "no draft" in divergence_text(divergence) or divergence.identical


def test_padded_and_packed_speculation_give_the_same_bits(sound: Trace, runs: Runs) -> None:
    padded = runs.record(
        model("llama"), scenario(draft="tiny", drafts=3, max_tokens=10), draft=drafting(seed=5)
    )
    divergence = compare(sound, padded)
    assert divergence.identical and not divergence.bookkeeping


def test_rows_that_a_draft_kept_of_the_turn_before_are_compared(runs: Runs) -> None:
    turns = [{"tokens": [11, 12], "rewind": 2}, {"tokens": [3]}]
    keys = {"model": "tiny", "layout": "packed", "draft": "tiny", "drafts": 3, "max_tokens": 6}
    kept = Scenario.from_dict({**keys, "request": [{"id": "r0", "tokens": [5, 9, 2, 7, 1], "turn": turns}]})
    fresh, of = kept.with_changes(turns="fresh"), {"draft": drafting(seed=5)}
    b = runs.record(model("llama"), kept, **of)
    sound = compare(runs.record(model("llama"), fresh, **of), b)
    assert sound.identical
    # Every position of the conversation, though the later turn ran the newest alone.
    assert [each.draft.rows for each in sound.requests if each.draft] == [10, 16, 23]
    wrong = InjectedFault("draft.layers.1.mlp.up_proj", 1, 3)
    options = RecordOptions(observe=0, faults=(wrong,))
    found = compare(runs.record(model("llama"), fresh, options, **of), b).request("r0/2")
    assert found.draft is not None and found.draft.differing > 0 and found.differing == 0
    assert found.origin is not None and (found.origin.site, found.origin.position) == (wrong.site, 3)
