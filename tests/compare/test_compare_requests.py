"""Flips, and what can and cannot be compared: nothing compared is never a pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from synthetic_traces import Ask, Fault, Plan, serial, together, write_trace

from detdiff.compare import Divergence, compare
from detdiff.errors import NothingComparable
from detdiff.trace import Trace, TraceWriter

PROMPT = tuple(range(10, 20))
ANCHOR = Ask("anchor", PROMPT, (30, 31, 32, 33, 34, 35))
OTHER = Ask("follower", (40, 41, 42, 43, 44), (50, 51, 52))
ASKS = (ANCHOR, OTHER)
PLAN = Plan(ASKS, serial(ASKS))


class Desk:
    """Writes traces into one directory and compares them."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def trace(self, plan: Plan) -> Trace:
        return write_trace(self.path / f"t{len(list(self.path.iterdir()))}", plan)

    def compare(self, a: Plan, b: Plan) -> Divergence:
        return compare(self.trace(a), self.trace(b))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def flipped(at: int, *faults: Fault) -> Plan:
    """Run b: the anchor's token ``at`` and those after it differ."""
    tokens = (*ANCHOR.generated[:at], *(t + 60 for t in ANCHOR.generated[at:]))
    asks = (replace(ANCHOR, generated=tokens), OTHER)
    logits = {(0, at): [(tokens[at], 25.5), (ANCHOR.generated[at], 25.25)]}
    return Plan(asks, together(asks), faults, logits=logits)


def test_a_flip_with_all_that_belongs_to_it(desk: Desk) -> None:
    a = replace(PLAN, logits={(0, 3): [(33, 25.75), (93, 25.625)]})
    found = desk.compare(a, flipped(3, Fault("layers.0.attn.k_proj", "out", 0, 4)))
    anchor = found.request("anchor")
    flip = anchor.flip
    assert flip is not None and anchor.flip_forward is not None
    assert (flip.index, flip.kind, flip.position, flip.forward_a, flip.forward_b) == (3, "token", 12, 3, 3)
    assert (flip.a.token, flip.a.text, flip.a.logit, flip.a.margin) == (33, " t33", 25.75, 0.125)
    assert (flip.b.token, flip.b.text, flip.b.logit, flip.b.margin) == (93, " t93", 25.5, 0.25)
    assert [(c.token, c.logit) for c in flip.b.top] == [(93, 25.5), (33, 25.25)]
    assert anchor.swapped is True and anchor.inherited is True
    assert anchor.flip_forward.origins == 0 < anchor.flip_forward.differing
    assert anchor.flip_forward.paths_equal is True
    assert anchor.flip_forward.composition_b is not None
    assert [m.request for m in anchor.flip_forward.composition_b.members] == ["anchor"]
    assert anchor.origin is not None and anchor.origin.position == 4
    assert anchor.differing_entries is not None
    assert (anchor.differing_entries.alive_at, anchor.differing_entries.positions) == (12, ((4, 12),))
    # Rows 13 and 14 saw other tokens; the row that chose the flipped one is still compared.
    assert (found.compared.after_flip_a, found.compared.after_flip_b, anchor.rows) == (2, 2, 13)
    assert found.request("follower").identical and not found.identical and not found.inconclusive
    assert [m.index for m in anchor.margins] == [0, 1, 2]


def test_an_origin_in_the_flips_own_forward_is_not_inherited(desk: Desk) -> None:
    found = desk.compare(PLAN, flipped(3, Fault("layers.1.mlp.up", "out", 0, 12))).request("anchor")
    assert found.inherited is False and found.flip_forward is not None and found.flip_forward.origins == 1


def test_a_flip_in_the_prompts_forward_counts_that_whole_forward(desk: Desk) -> None:
    found = desk.compare(PLAN, flipped(0, Fault("layers.1.mlp.up", "out", 0, 2))).request("anchor")
    assert found.flip is not None and (found.flip.index, found.flip.position) == (0, 9)
    assert found.inherited is False


def test_top_tokens_that_are_not_swapped(desk: Desk) -> None:
    fault = Fault("lm_head", "out", 0, 12)
    b = replace(flipped(3, fault), logits={(0, 3): [(93, 25.5), (77, 25.25)]})
    assert desk.compare(PLAN, b).request("anchor").swapped is False


def test_equal_digests_and_other_tokens(desk: Desk) -> None:
    found = desk.compare(PLAN, flipped(5))
    anchor = found.request("anchor")
    assert (found.stage, found.identical, found.inconclusive) == ("tokens", False, False)
    assert anchor.flip is not None and anchor.origin is None and anchor.inherited is False
    assert any("the tokens differ" in note for note in found.notes)


def test_a_run_that_stops_earlier_flips_in_length(desk: Desk) -> None:
    limit = {"requests": [{"id": a.id, "tokens": list(a.prompt), "max_tokens": 9} for a in ASKS]}
    short = (replace(ANCHOR, generated=ANCHOR.generated[:4]), OTHER)
    found = desk.compare(replace(PLAN, header=limit), Plan(short, serial(short), header=limit))
    flip = found.request("anchor").flip
    assert flip is not None and not found.identical
    assert (flip.index, flip.kind, flip.position) == (4, "length", 13)
    assert (flip.a.token, flip.b.token, flip.b.text, flip.forward_b) == (34, None, "", None)
    assert found.request("anchor").swapped is None


def test_fewer_tokens_asked_for_is_no_flip_and_no_pass(desk: Desk) -> None:
    short = (replace(ANCHOR, generated=ANCHOR.generated[:4]), OTHER)
    found = desk.compare(PLAN, Plan(short, serial(short)))
    assert (found.identical, found.inconclusive, found.stage) == (False, True, None)
    assert found.request("anchor").flip is None and not found.request("anchor").identical
    assert [(f.what, f.request) for f in found.workload] == [("settings", "anchor")]


def test_the_extra_row_of_a_generator_is_only_counted(desk: Desk) -> None:
    found = desk.compare(PLAN, replace(PLAN, forwards=serial(ASKS, extra=True)))
    assert found.identical and (found.compared.only_a, found.compared.only_b) == (0, 2)


def test_rows_that_are_missing_are_no_pass(desk: Desk) -> None:
    found = desk.compare(PLAN, replace(PLAN, skip=frozenset({2})))
    assert (found.identical, found.inconclusive) == (False, True)
    assert any("1 of its rows are in one run only" in note for note in found.notes)


def test_chunks_of_the_prompt_do_not_matter(desk: Desk) -> None:
    assert desk.compare(PLAN, replace(PLAN, forwards=serial(ASKS, chunk=3))).identical


def test_some_requests_in_common(desk: Desk) -> None:
    third = Ask("third", (1, 2, 3), (4, 5))
    asks = (third, replace(OTHER, prompt=(40, 41, 42, 49, 44)), ANCHOR)
    found = desk.compare(PLAN, Plan(asks, serial(asks)))
    assert [r.id for r in found.requests] == ["anchor"] and found.request("anchor").identical
    assert (found.identical, found.inconclusive) == (False, True)
    reasons = {left_out.id: left_out.reason for left_out in found.not_compared}
    assert reasons["third"] == "only run b has it"
    assert reasons["follower"] == "the prompts differ from token 3 on (43 in run a, 49 in run b)"


def test_some_in_common_and_one_parts(desk: Desk) -> None:
    asks = (ANCHOR, replace(OTHER, id="else"))
    found = desk.compare(PLAN, Plan(asks, serial(asks), [Fault("norm", "out", 0, 3)]))
    assert (found.identical, found.inconclusive, found.stage) == (False, False, "bits")


def nothing(desk: Desk, a: Plan, b: Plan) -> str:
    with pytest.raises(NothingComparable) as caught:
        desk.compare(a, b)
    assert caught.value.exit_code == 3
    message = str(caught.value)
    assert "\n" not in message and "xpected" in message
    return message


def test_other_ids(desk: Desk) -> None:
    asks = tuple(replace(a, id=f"x{a.id}") for a in ASKS)
    assert "no request in common" in nothing(desk, PLAN, Plan(asks, serial(asks)))


def test_other_prompts_under_the_same_ids(desk: Desk) -> None:
    asks = (replace(ANCHOR, prompt=PROMPT[:-1]),)
    message = nothing(
        desk, replace(PLAN, asks=(ANCHOR,), forwards=serial((ANCHOR,))), Plan(asks, serial(asks))
    )
    assert "10 tokens in run a and 9 in run b" in message


@pytest.mark.parametrize("key", ["config_sha256", "weights_sha256"])
def test_other_models(desk: Desk, key: str) -> None:
    model = {"name": "made-up", "config_sha256": "c" * 64, "weights_sha256": "w" * 64, key: "0" * 64}
    assert "different models" in nothing(desk, PLAN, replace(PLAN, header={"model": model}))


def test_no_rows(desk: Desk) -> None:
    everything = frozenset(range(len(PLAN.forwards)))
    assert "holds no rows" in nothing(desk, PLAN, replace(PLAN, skip=everything))


def test_no_requests(desk: Desk) -> None:
    assert "has no requests" in nothing(desk, PLAN, Plan((), ()))


def test_no_row_in_common(desk: Desk) -> None:
    ahead = replace(PLAN, skip=frozenset(range(1, len(PLAN.forwards))))
    behind = replace(PLAN, skip=frozenset({0}))
    assert "no row in common" in nothing(desk, ahead, behind)


def test_no_port_in_common(desk: Desk) -> None:
    model = write_trace(desk.path / "ports", PLAN)
    every = frozenset((model.sites[p.site].name, p.name) for p in model.ports)
    first = frozenset({("embed_tokens", "in")})
    assert "no port is recorded" in nothing(
        desk, replace(PLAN, absent=every - first), replace(PLAN, absent=first)
    )


def test_no_site_in_common(desk: Desk) -> None:
    a = desk.trace(PLAN)
    header = {
        "requests": a.requests,
        "sites": [
            {"name": "x", "kind": "linear", "layer": 0, "inputs": ["in"], "outputs": ["out"], "parent": None}
        ],
    }
    with TraceWriter(desk.path / "other", header) as writer:
        writer.finish()
    with pytest.raises(NothingComparable, match="no site in common"):
        compare(a, Trace.open(desk.path / "other"))


def test_a_trace_that_was_not_finished_is_no_pass(desk: Desk) -> None:
    whole = replace(PLAN, shard_forwards=1)
    cut = replace(whole, forwards=PLAN.forwards[:4], complete=False)
    found = desk.compare(whole, cut)
    assert (found.identical, found.inconclusive, found.b.complete) == (False, True, False)
    assert found.request("anchor").flip is None and found.request("anchor").rows == 13
    assert [left_out.id for left_out in found.not_compared] == ["follower"]
    assert any("run b is incomplete" in note for note in found.notes)


def test_a_trace_that_was_not_finished_can_still_part(desk: Desk) -> None:
    cut = replace(PLAN, forwards=PLAN.forwards[:4], complete=False, faults=[Fault("norm", "out", 0, 3)])
    found = desk.compare(PLAN, cut)
    assert (found.identical, found.inconclusive, found.stage) == (False, False, "bits")


def test_a_row_that_was_fed_another_token(desk: Desk) -> None:
    # Run b generates the same tokens but feeds another one at position 11.
    class Odd(Ask):
        def fed(self, position: int) -> int:
            return 77 if position == 11 else super().fed(position)

    odd = Odd(ANCHOR.id, ANCHOR.prompt, ANCHOR.generated)
    found = desk.compare(PLAN, replace(PLAN, asks=(odd, OTHER)))
    assert (found.stage, found.identical, found.compared.token_differs) == ("workload", False, 1)
    finding = found.workload[0]
    assert (finding.what, finding.request) == ("token_in", "anchor")
    assert "position 11 was fed token 31 in run a and 77 in run b" in finding.detail
    assert found.request("anchor").stage == "workload"


def test_a_divergence_has_no_truth_value(desk: Desk) -> None:
    found = desk.compare(PLAN, PLAN)
    with pytest.raises(TypeError, match=r"ask \.identical"):
        bool(found)
    with pytest.raises(KeyError):
        found.request("nobody")
