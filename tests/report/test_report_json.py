"""The JSON answer: valid, reversible, and documented key by key."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import answers
import numpy as np
import pytest

from detdiff.compare import (
    Agreement,
    Divergence,
    EventCount,
    Events,
    Finding,
    NotCompared,
    NotFiniteLogits,
    SiteDifference,
    TextFlip,
    Values,
    measure,
)
from detdiff.compare.divergence import AcrossEngines, RoleDifference
from detdiff.compare.flips import EmbeddingDifference, ScoredText
from detdiff.errors import AnswerError
from detdiff.report import SCHEMA, from_json, to_json

DOCS = Path(__file__).resolve().parents[2] / "docs" / "json-schema.md"
COPIED = {"model", "scenario", "environment", "observer"}


def full() -> Divergence:
    """An answer in which no list is empty and nothing is null that need not be."""
    found = answers.flips()
    size = measure(
        Values(np.array([1, math.nan, 2], np.float32), "F32"),
        Values(np.array([1.5, 1, 2], np.float32), "F32"),
    )
    anchor, follower, quiet = found.requests
    assert anchor.origin is not None and anchor.cache_entry is not None and follower.origin is not None
    origin = replace(anchor.origin, magnitude=size, changes=follower.origin.changes)
    left_out = (NotCompared("x", "only run a has it"),)
    speculated = replace(anchor, origin=origin, **answers.speculation(origin))
    forced = replace(follower, forced=Agreement(5, 2, 3, 2))
    events = Events(
        (EventCount("trim", "draft", 1, 2),), (Finding("a", "wrap", "quiet", 0, "passes the end"),)
    )
    quiet = replace(
        quiet,
        not_finite=(NotFiniteLogits("a", 0, 1, 0),),
        first_site=SiteDifference("norm", "norm", None, 0, "out", size),
        text=TextFlip(0, "a", "b"),
        scored=ScoredText(3, -5.0, -6.0, 1, 2, 0.5, 0),
        embedding=EmbeddingDifference(4, 1, 0.5, 0.99, 0, 0),
    )
    role = RoleDifference("q", 0, "q_proj", "Qcur-0.MUL_MAT", 3, 0.1, 0.2, "anchor", 4, 12.0)
    across = AcrossEngines((role,), role, 1, ("k",), ("v",), ("norm",), ("rope",), "")
    return replace(
        found,
        requests=(speculated, forced, quiet),
        not_compared=left_out,
        events=events,
        across_engines=across,
    )


def keys(answer: Any) -> Iterator[str]:
    if isinstance(answer, dict):
        for key, value in answer.items():
            yield key
            if key not in COPIED:
                yield from keys(value)
    elif isinstance(answer, list):
        for item in answer:
            yield from keys(item)


def documented() -> set[str]:
    """What stands in backquotes in the first column of a table, or anywhere in prose that lists keys."""
    found: set[str] = set()
    text = DOCS.read_text(encoding="utf-8").partition("\n# The JSON answer of `explain`\n")[0]
    for line in text.splitlines():
        where = line.split("|")[1] if line.startswith("|") else line
        found |= set(re.findall(r"`([a-z][a-z_0-9]*)`", where))
        if line.startswith("|"):
            # Small objects are described in the row of the key that holds them.
            found |= set(re.findall(r"`([a-z][a-z_0-9]*)`", line.split("|", 2)[2]))
    return found


VALUES = {
    "token",
    "length",
    "leaf",
    "composite",
    "changed",
    "visible",
    "dtype",
    "shape",
    "bits",
    "state",
    "settings",
    "max_tokens",
    "sampling",
    "ignore_stop",
}
VALUES |= {
    "workload",
    "bookkeeping",
    "tokens",
    "token_in",
    "offset",
    "cache_changed",
    "more",
    "both",
    "compare",
}
VALUES |= {"token_fed", "sequence", "cache_missing", "cache_foreign", "logits_read"}
VALUES |= {"rank_token", "rank_differs"}
VALUES |= {"trim", "stale", "page", "prefix", "acceptance", "choice", "quantise", "wrap"}


def test_every_key_is_documented_and_every_documented_key_is_there() -> None:
    present = set(keys(to_json(full())))
    assert present - documented() == set()
    assert documented() - present - VALUES == set()


def test_the_check_of_the_documentation_can_fail() -> None:
    assert "surprise" not in documented()
    assert {"flip", "ulp_histogram", "differing_entries", "written_b"} <= documented()


def test_the_keys_that_scripts_rely_on() -> None:
    answer = to_json(answers.flips())
    assert (answer["schema"], answer["identical"], answer["inconclusive"]) == (SCHEMA, False, False)
    request = answer["requests"][0]
    assert request["id"] == "anchor" and request["swapped"] is True and request["inherited"] is True
    assert request["flip"]["index"] == 3 and request["flip"]["a"]["token"] == 33
    assert request["flip"]["b"]["text"] == " t93"
    assert request["flip"]["a"]["top"][1] == {
        "token": 93,
        "text": " t93",
        "logit": float(np.float32(25.565775)),
    }
    origin = request["origin"]
    assert {
        key: origin[key] for key in ("site", "layer", "position", "rows_a", "rows_b", "path_a", "path_b")
    } == {
        "site": "layers.0.attn.k_proj",
        "layer": 0,
        "position": 2,
        "rows_a": 4,
        "rows_b": 18,
        "path_a": "reference/candle-metal/mv",
        "path_b": "reference/candle-metal/mm",
    }
    entry = request["cache_entry"]
    assert [entry[key] for key in ("layer", "kind", "head", "position", "written_a", "written_b")] == [
        0,
        "K",
        0,
        2,
        0,
        0,
    ]
    assert request["differing_entries"]["layers"] == [0, 1] and request["differing_entries"]["positions"] == [
        [2, 12]
    ]
    assert request["origins"] == [
        {"kind": "linear", "layer": 0, "path_a": origin["path_a"], "path_b": origin["path_b"], "count": 1}
    ]


@pytest.mark.parametrize("make", [answers.flips, full])
def test_there_and_back_through_text(make: Any) -> None:
    found = make()
    text = json.dumps(to_json(found), allow_nan=False)
    assert from_json(json.loads(text)) == found


def test_numbers_that_json_does_not_have() -> None:
    found = answers.flips()
    anchor = found.requests[0]
    assert anchor.flip is not None
    odd = replace(anchor.flip.a, logit=math.inf, margin=-math.inf)
    changed = replace(
        found, requests=(replace(anchor, flip=replace(anchor.flip, a=odd)), *found.requests[1:])
    )
    answer = json.loads(json.dumps(to_json(changed), allow_nan=False))
    assert answer["requests"][0]["flip"]["a"]["logit"] == "Infinity"
    assert from_json(answer) == changed
    answer["requests"][0]["flip"]["a"]["logit"] = "NaN"
    back = from_json(answer).requests[0].flip
    assert back is not None and back.a.logit is not None and math.isnan(back.a.logit)


def damaged(answer: dict[str, Any], how: str) -> Any:
    if how == "schema":
        return {**answer, "schema": "detdiff.divergence/3"}
    if how == "list":
        return [answer]
    if how == "missing":
        del answer["requests"][0]["flip"]["index"]
    if how == "unknown":
        answer["compared"]["surprise"] = 1
    if how == "type":
        answer["requests"][0]["origin"]["position"] = "2"
    if how == "bool for int":
        answer["requests"][0]["rows"] = True
    if how == "pair":
        answer["requests"][0]["differing_entries"]["positions"][0] = [1, 2, 3]
    return answer


@pytest.mark.parametrize("how", ["schema", "list", "missing", "unknown", "type", "bool for int", "pair"])
def test_another_answer_is_refused(how: str) -> None:
    with pytest.raises(AnswerError) as caught:
        from_json(damaged(json.loads(json.dumps(to_json(answers.flips()))), how))
    assert "\n" not in str(caught.value) and "again with this version" in str(caught.value)
