"""The text answer says what the reference investigation had to find by hand, in that order."""

from __future__ import annotations

import re
from dataclasses import replace

import answers
import pytest
from synthetic_traces import Plan, serial

from detdiff.compare import Divergence
from detdiff.report import divergence_text, headline


def flat(text: str) -> str:
    """The text with its line breaks undone."""
    return re.sub(r"\s+", " ", text)


@pytest.fixture(scope="module")
def found() -> Divergence:
    return answers.flips()


def test_one_sentence_first(found: Divergence) -> None:
    first = flat(divergence_text(found)).split(" kind: ")[0]
    assert first == (
        'The runs diverge: anchor flips at token 3 from " t33" to " t93"; origin at layers.0.attn.k_proj, position 2 of anchor, '
        "where 4 rows took candle-metal/mv and 18 rows took candle-metal/mm."
    )
    assert headline(found) == first


def test_the_flip(found: Divergence) -> None:
    text = divergence_text(found)
    assert (
        'generated token 3 is 33 " t33" in a and 93 " t93" in b (row at position 12); top two swapped'
        in flat(text)
    )
    assert "margin 0.005457 in a, 0.012602 in b" in text
    (line,) = [line for line in text.splitlines() if line.lstrip().startswith("1 ")]
    assert line.split() == ["1", "33", '"', 't33"', "25.571232", "93", '"', 't93"', "25.562220"]


def test_a_sampled_flip_says_so_on_each_side(found: Divergence) -> None:
    assert "sampled" not in divergence_text(found) and "greedy" not in divergence_text(found)
    anchor = found.requests[0]
    assert anchor.flip is not None
    odd = replace(anchor.flip, b=replace(anchor.flip.b, token=7, logit=None))
    settings = {"id": "anchor", "temperature": 0.8, "top_p": 0.95, "seed": 3}
    b = replace(found.b, scenario={**found.b.scenario, "request": [settings, "not a table"]})
    changed = replace(found, requests=(replace(anchor, flip=odd, swapped=False), *found.requests[1:]), b=b)
    text = flat(divergence_text(changed))
    assert "(row at position 12); b's token is outside its top 2 margin" in text
    assert "a: greedy b: sampled at temperature 0.8, top_p 0.95, seed 3 the flip's forward:" in text


def test_no_differing_entries_are_nowhere_and_a_rule_is_called_one_once(found: Divergence) -> None:
    anchor = found.requests[0]
    assert anchor.differing_entries is not None and anchor.origin is not None
    none = replace(anchor.differing_entries, count=0, layers=(), positions=())
    origin = replace(anchor.origin, rule_a="rule: site lm_head -> rows")
    text = flat(
        divergence_text(replace(found, requests=(replace(anchor, differing_entries=none, origin=origin),)))
    )
    assert (
        "differing cache entries: 0 of 104 cache entries alive at the flip (position 12) differ Margins"
        in text
    )
    assert "; rule: site lm_head -> rows" in text and "rule: rule:" not in text


def test_the_flips_forward(found: Divergence) -> None:
    text = flat(divergence_text(found))
    assert (
        "the flip's forward: a: forward 5 (1 row: 1 decode of anchor); b: forward 3 (1 row: 1 decode of anchor)"
        in text
    )
    assert "kernel paths equal on both sides" in text and "0 origins there: inherited" in text


def test_the_origin(found: Divergence) -> None:
    text = flat(divergence_text(found))
    assert (
        "origin: layers.0.attn.k_proj (linear, layer 0), position 2: its inputs are bit-equal and its outputs are not "
        "a: forward 0 (4 rows: 4 prefill of anchor); path reference/candle-metal/mv, which saw 4 rows" in text
    )
    assert (
        "b: forward 0 (18 rows: 10 prefill of anchor + 5 prefill of follower + 3 prefill of quiet); path "
        "reference/candle-metal/mm, which saw 18 rows (second-to-last dimension 18); rule: 18 rows -> "
        "reference/candle-metal/mm" in text
    )


def test_the_cache_and_its_differing_entries(found: Divergence) -> None:
    text = flat(divergence_text(found))
    assert (
        "first cache entry: layer 0, K, head 0, position 2; written in a by forward 0 (4 rows: 4 prefill of anchor)"
        in text
    )
    assert re.search(r"differing cache entries: \d+ of 104 cache entries alive at the flip \(position 12\) differ, over positions 2-12 "
                     r"and layers 0-1", text)  # fmt: skip


def test_a_divergence_without_a_flip_and_its_cause(found: Divergence) -> None:
    text = flat(divergence_text(found))
    assert "request follower: diverges in bits; no flip within its 3 generated tokens" in text
    assert "changed entry: in b, forward 1: layer 1, K, head 0, position 3" in text
    assert (
        "bookkeeping: - request follower: the cache entry K of layer 1, head 0, position 3 is not what was written"
        in text
    )
    assert "smallest margins of equal tokens (a / b): 1.000000 / 1.000000 at token 0" in text


def test_what_is_equal_and_what_was_compared(found: Divergence) -> None:
    text = flat(divergence_text(found))
    assert "equal in all that was compared: quiet (4 rows)" in text
    assert (
        f"compared: 3 requests, {found.compared.rows} rows, 74 ports, {found.compared.digests:,} digests"
        in text
    )
    assert "note: rows after a request's first flip saw other tokens and are not compared" in text


def test_identical_runs_take_a_few_lines() -> None:
    asks = (answers.ANCHOR, answers.QUIET)
    found = answers.run(Plan(asks, serial(asks)), Plan(asks, serial(asks)))
    text = divergence_text(found)
    assert text.startswith(
        f"The runs are identical: 2 requests, 18 rows and {found.compared.digests} digests compared"
    )
    assert "equal in all that was compared: anchor, quiet (18 rows)" in text and "origin" not in text
    assert len(text.splitlines()) < 14


def test_inconclusive_says_so_and_why() -> None:
    asks = (answers.ANCHOR, answers.QUIET)
    text = flat(divergence_text(answers.run(Plan(asks, serial(asks)), Plan(asks[:1], serial(asks[:1])))))
    assert text.startswith("Inconclusive: 1 request, ")
    assert "not compared: quiet: only run a has it" in text


@pytest.mark.parametrize("width", [40, 72, 100, 160])
def test_prose_keeps_to_the_width(found: Divergence, width: int) -> None:
    text = divergence_text(found, width=width)
    prose = [
        line
        for line in text.splitlines()
        if not re.search(r"  \S+  |----|reference/\S{12}|/tmp/|\w/\w", line)
    ]
    assert prose and max(len(line) for line in prose) <= width
    assert text.endswith("\n") and not re.search(r"[ \t]\n", text)


def test_what_a_terminal_would_obey_is_escaped(found: Divergence) -> None:
    anchor = found.requests[0]
    assert anchor.flip is not None
    evil = replace(anchor.flip.a, text='\x1b[31m"\n\u202e\\\x7f\u200b\ud800é')
    request = replace(anchor, id="an\x1b[2Jchor", flip=replace(anchor.flip, a=evil))
    text = divergence_text(replace(found, requests=(request,), notes=("a\rb",)))
    assert r'33 "\x1b[31m\"\n\u202e\\\x7f\u200b\ud800é"' in flat(text)
    assert "\\x1b[2Jchor" in text and "a\\rb" in text
    assert all(c == "\n" or c.isprintable() for c in text)


def test_speculation_is_told_per_request_with_the_engines_own_counts() -> None:
    found = answers.flips()
    anchor = found.request("anchor")
    assert anchor.origin is not None
    told = replace(anchor, **answers.speculation(anchor.origin))
    text = divergence_text(replace(found, requests=(told,)), width=200)
    assert (
        "acceptance: 21 of 48 in 12 verifications (the engine counts the same) in a, 20 of 52 in 13 verifications (THE"
        in text
    )
    assert "THE ENGINE COUNTS 21 of 52" in text
    assert (
        "over 4 tokens up to the flip, proposals equal and the target's choices differ from token 3 on"
        in text
    )
    assert (
        "b: 33 was proposed and the target chose 93 (token 3 of the verification in forward 7: proposals 31 32 33 34; "
        "choices 31 32 93 34)"
    ) in " ".join(text.split())
    assert "draft model: 5 digests of its rows differ" in text and "arising there before" not in text
