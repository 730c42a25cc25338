"""Scenarios that cannot be run: each has its own error, whose words name the place and the way out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detdiff.errors import (
    PromptAmbiguous,
    PromptMissing,
    RequestIdRepeated,
    RequestsMissing,
    ScenarioConflict,
    ScenarioError,
    ScenarioFileError,
    ScenarioFlagError,
    ScenarioKeyMissing,
    ScenarioKeyUnknown,
    ScenarioRangeError,
    ScenarioTypeError,
)
from detdiff.scenario import Scenario
from detdiff.scenario.keys import FILE_KEYS, REQUEST_KEYS, RULE_KEYS


def minimal(**keys: Any) -> dict[str, Any]:
    return {"model": "builtin", "request": [{"prompt": "a"}], **keys}


@given(st.text(st.sampled_from("aeio_pst"), min_size=1, max_size=9))
def test_any_key_that_does_not_exist_is_refused_at_every_level(name: str) -> None:
    places = (
        (FILE_KEYS, minimal(**{name: 1})),
        (REQUEST_KEYS, minimal(request=[{"prompt": "a", name: 1}])),
        (RULE_KEYS, minimal(rule=[{name: 1}])),
    )
    for known, keys in places:
        if name not in known:
            with pytest.raises(ScenarioKeyUnknown, match=repr(name)):
                Scenario.from_dict(keys)


REFUSED: list[tuple[dict[str, Any], type[ScenarioError], str]] = [
    (
        minimal(max_token=3),
        ScenarioKeyUnknown,
        r"case: there is no key 'max_token' here; did you mean 'max_tokens'\?",
    ),
    (minimal(sampler="vllm"), ScenarioRangeError, "sampler is 'vllm'; the known ones are detdiff and mlx-lm"),
    (minimal(top_k=0), ScenarioRangeError, "top_k is 0; it must be 1 to"),
    (minimal(min_p=1.5), ScenarioRangeError, "min_p is 1.5; it must be 0 to 1"),
    (minimal(repetition_penalty=0), ScenarioRangeError, "repetition_penalty is 0.0; it must be more than 0"),
    (
        minimal(presence_context_size=3),
        ScenarioConflict,
        "presence_context_size is a part of presence_penalty",
    ),
    (minimal(xtc_probability=0.5), ScenarioConflict, "add sampler mlx-lm, or remove xtc_probability"),
    (minimal(logit_bias={"a": 1}), ScenarioTypeError, "logit_bias takes a table of token ids and numbers"),
    (minimal(logit_bias={"1": 1, "01": 2}), ScenarioTypeError, "logit_bias takes a table"),
    (minimal(max_kv_size=4), ScenarioRangeError, "max_kv_size is 4; it must be 5 or more"),
    (
        minimal(max_kv_size=8, layout="packed"),
        ScenarioConflict,
        "layout is packed, whose caches are detdiff's",
    ),
    (minimal(stop=[""]), ScenarioRangeError, "an entry of stop is empty"),
    (
        minimal(chat_template_args={"a": 1}, request=[{"prompt": "a"}]),
        ScenarioConflict,
        "neither chat nor messages",
    ),
    (minimal(request=[{"messages": [{"content": "a"}]}]), ScenarioRangeError, "message 1 has no role"),
    (minimal(request=[{"messages": []}]), PromptMissing, "messages is empty"),
    (
        minimal(request=[{"messages": [{"role": "user"}], "prompt": "a"}]),
        PromptAmbiguous,
        "both prompt and messages",
    ),
    (
        minimal(top_k=3, engine="transformers"),
        ScenarioConflict,
        "top_k is mlx-lm's own, and engine is transformers",
    ),
    (
        minimal(
            schedule="static",
            sampler="mlx-lm",
            temperature=1,
            request=[{"prompt": "a", "seed": 1}, {"prompt": "a", "seed": 2}],
        ),
        ScenarioConflict,
        "MLX's one random state, which has one seed",
    ),
    (
        minimal(quantize=4),
        ScenarioKeyUnknown,
        "'quantize' here; the known ones are model, adapter_path, engine",
    ),
    (
        minimal(zzzzz=3),
        ScenarioKeyUnknown,
        "the known ones are model, adapter_path, engine, task, pooling, schedule, layout",
    ),
    (minimal(request=[{"promt": "a"}]), ScenarioKeyUnknown, "case: request 1: .* did you mean 'prompt'"),
    (minimal(request=[{"prompt": "a", "layout": "packed"}]), ScenarioKeyUnknown, "request 1: .*'layout'"),
    (minimal(rule=[{"paths": "rows"}]), ScenarioKeyUnknown, "rule 1: .* did you mean 'path'"),
    ({"request": [{"prompt": "a"}]}, ScenarioKeyMissing, "no model"),
    (minimal(model=3), ScenarioTypeError, "model takes a string, and 3 "),
    (minimal(active="4"), ScenarioTypeError, "active takes an integer, and '4' "),
    (minimal(active=True), ScenarioTypeError, "active takes an integer, and True "),
    (minimal(active=4.0), ScenarioTypeError, "active takes an integer, and 4.0 "),
    (minimal(lens=1), ScenarioTypeError, "lens takes true or false, and 1 "),
    (minimal(temperature="hot"), ScenarioTypeError, "temperature takes a number"),
    (minimal(window_positions=[1, 2, 3]), ScenarioTypeError, "window_positions takes a pair of integers"),
    (minimal(window_sites="lm_head"), ScenarioTypeError, "window_sites takes a list of strings"),
    (minimal(request={"prompt": "a"}), ScenarioTypeError, "request takes a list of tables"),
    (
        minimal(request=[{"tokens": [1, "2"]}]),
        ScenarioTypeError,
        "request 1: tokens takes a list of integers",
    ),
    (minimal(model=""), ScenarioRangeError, "model is empty"),
    (minimal(model="a\0b"), ScenarioRangeError, "control characters"),
    (minimal(schedule="serail"), ScenarioRangeError, "schedule is 'serail'; did you mean 'serial'"),
    (minimal(layout="ragged"), ScenarioRangeError, "layout is 'ragged'"),
    (minimal(schedule="continuous", active=0), ScenarioRangeError, "active is 0; it must be 1 or more"),
    (minimal(prefill_chunk=0), ScenarioRangeError, "prefill_chunk is 0"),
    (minimal(layout="packed", row_budget=-1), ScenarioRangeError, "row_budget is -1"),
    (minimal(split_rows=0), ScenarioRangeError, "split_rows is 0"),
    (minimal(kernels=""), ScenarioRangeError, "kernels is empty"),
    (minimal(capture="all"), ScenarioRangeError, "capture is 'all'"),
    (minimal(digest="gpu"), ScenarioRangeError, "digest is 'gpu'"),
    (minimal(top=1), ScenarioRangeError, "top is 1; it must be 2 or more"),
    (minimal(memory_mb=0), ScenarioRangeError, "memory_mb is 0"),
    (minimal(capture="window", window_positions=[5, 4]), ScenarioRangeError, r"window_positions is \[5, 4\]"),
    (minimal(capture="window", window_requests=["r1"]), ScenarioRangeError, "'r1', which is no request"),
    (minimal(capture="window", window_sites=[""]), ScenarioRangeError, "an entry of window_sites is empty"),
    (minimal(max_tokens=0), ScenarioRangeError, "request 1: max_tokens is 0; it must be 1 or more"),
    (
        minimal(request=[{"id": "x", "prompt": "a", "max_tokens": -2}]),
        ScenarioRangeError,
        r"request 1 \('x'\): max_tokens",
    ),
    (minimal(max_tokens=2**31), ScenarioRangeError, "or less"),
    (minimal(temperature=-0.1), ScenarioRangeError, "temperature is -0.1"),
    (minimal(temperature=float("nan")), ScenarioRangeError, "temperature is nan"),
    (minimal(temperature=float("inf")), ScenarioRangeError, "temperature is inf"),
    (minimal(top_p=0), ScenarioRangeError, "top_p is 0.0"),
    (minimal(top_p=1.01), ScenarioRangeError, "top_p is 1.01"),
    (minimal(seed=-1), ScenarioRangeError, "seed is -1"),
    (minimal(seed=2**63), ScenarioRangeError, "seed is"),
    (minimal(request=[{"prompt": "a", "arrival": -1}]), ScenarioRangeError, "arrival is -1"),
    (minimal(request=[{"tokens": [1, -5]}]), ScenarioRangeError, "a token id is -5"),
    (minimal(request=[{"prompt": "a\ud800"}]), ScenarioRangeError, "not valid Unicode"),
    (minimal(request=[{"id": "", "prompt": "a"}]), ScenarioRangeError, "id is empty"),
    (minimal(request=[{"id": "a\nb", "prompt": "a"}]), ScenarioRangeError, "control characters"),
    (minimal(rule=[{"rows": "x"}]), ScenarioRangeError, "rule 1: rows is 'x'; it must be like"),
    (minimal(rule=[{"rows": "0..2"}]), ScenarioRangeError, "no call can have"),
    (minimal(rule=[{"rows": "8..2"}]), ScenarioRangeError, "smaller end first"),
    (minimal(rule=[{"second_last": "..2"}]), ScenarioRangeError, "second_last is"),
    (minimal(rule=[{"phase": "decoding"}]), ScenarioRangeError, "did you mean 'decode'"),
    (minimal(rule=[{"path": "pad:0"}]), ScenarioRangeError, "path is 'pad:0'"),
    (minimal(rule=[{"path": "row"}]), ScenarioRangeError, "must be native, rows, pad:N"),
    (minimal(rule=[{"site": ""}]), ScenarioRangeError, "site is empty"),
    (minimal(row_budget=8), ScenarioConflict, "layout is padded"),
    (minimal(active=2), ScenarioConflict, "schedule is serial"),
    (
        minimal(schedule="static", request=[{"prompt": "a", "arrival": 1}]),
        ScenarioConflict,
        "'r0' arrives at forward 1",
    ),
    (minimal(window_positions=[0, 1]), ScenarioConflict, "need capture window"),
    (minimal(engine=3), ScenarioTypeError, "engine takes an engine's name, or a table .*, and 3 "),
    (minimal(engine={"name": 3}), ScenarioTypeError, "engine takes an engine's name"),
    (minimal(engine={"name": "e", "x": float("nan")}), ScenarioTypeError, "engine takes an engine's name"),
    (minimal(engine=""), ScenarioRangeError, "engine is empty"),
    (minimal(engine="a\nb"), ScenarioRangeError, "engine .* control characters"),
    (minimal(**{"engine.x": 1}), ScenarioKeyUnknown, "did you mean 'engine'"),
    (minimal(draft=""), ScenarioRangeError, "draft is empty"),
    (minimal(draft="builtin-draft", drafts=0), ScenarioRangeError, "drafts is 0; it must be 1 or more"),
    (minimal(drafts=4), ScenarioConflict, "drafts is 4 and there is no draft model"),
    (
        minimal(draft="builtin-draft", request=[{"prompt": "a", "temperature": 0.5}]),
        ScenarioConflict,
        "request 'r0' draws its tokens; speculation is greedy",
    ),
    (
        minimal(draft="builtin-draft", schedule="continuous"),
        ScenarioConflict,
        "schedule is continuous, and mlx-lm speculates for one request at a time",
    ),
    (minimal(draft="builtin-draft", force_tokens="x"), ScenarioConflict, "cannot be told its tokens"),
    (minimal(force_tokens="a\nb"), ScenarioRangeError, "force_tokens .* control characters"),
    (minimal(kv_bits=7), ScenarioRangeError, "kv_bits is 7; it must be one of 2, 3, 4, 5, 6 or 8"),
    (minimal(kv_bits=4, kv_group_size=16), ScenarioRangeError, "one of 32, 64 or 128"),
    (minimal(kv_bits=4, kv_start=-1), ScenarioRangeError, "kv_start is -1"),
    (minimal(kv_start=5), ScenarioConflict, "there is no kv_bits"),
    (minimal(kv_bits=4, layout="packed"), ScenarioConflict, "kv_bits is 4, layout is packed"),
    (
        minimal(reuse_tokens=4, schedule="static"),
        ScenarioConflict,
        "reuse_tokens is 4, .* schedule is static",
    ),
    (minimal(reuse_tokens=0), ScenarioRangeError, "reuse_tokens is 0"),
    (minimal(page_tokens=16), ScenarioConflict, "page_tokens is 16 and layout is padded"),
    (minimal(page_tokens=0, layout="packed"), ScenarioRangeError, "page_tokens is 0"),
    (minimal(share_prefix=True), ScenarioConflict, "share_prefix is true and layout is padded"),
    (minimal(share_prefix=1), ScenarioTypeError, "share_prefix takes true or false"),
    (minimal(request=[{"tokens": [1], "chat": True}]), ScenarioConflict, "chat needs a prompt that is text"),
    (minimal(request=[]), RequestsMissing, "no request"),
    ({"model": "builtin"}, RequestsMissing, "no request"),
    (minimal(request=[{"prompt": ""}]), PromptMissing, "prompt is empty"),
    (minimal(request=[{"tokens": []}]), PromptMissing, "tokens is empty"),
    (minimal(request=[{"id": "x"}]), PromptMissing, "neither prompt nor tokens"),
    (minimal(request=[{"prompt": "a", "tokens": [1]}]), PromptAmbiguous, "both prompt and tokens"),
    (
        minimal(request=[{"id": "x", "prompt": "a"}] * 2),
        RequestIdRepeated,
        "requests 1 and 2 both have the id 'x'",
    ),
    (minimal(request=[{"prompt": "a"}, {"id": "r0", "prompt": "a"}]), RequestIdRepeated, "'r0'"),
]


@pytest.mark.parametrize(
    ("keys", "error", "text"), REFUSED, ids=[f"{i}-{case[2][:30]}" for i, case in enumerate(REFUSED)]
)
def test_what_cannot_be_run_is_refused(keys: dict[str, Any], error: type[ScenarioError], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        Scenario.from_dict(keys, where="case")
    message = str(caught.value)
    assert caught.type is error and error.exit_code == 2
    assert message.startswith("case: ") and "\n" not in message and message[-1] in ".?"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"model = x", r"not a TOML file .*line 1"),
        (b'model = "a"\nmodel = "b"', "not a TOML file"),
        (b'model = "\xff"', "byte 9 is not UTF-8"),
        (b"x = " + b"[" * 100_000, "not a TOML file"),
        (b"active = " + b"9" * 10_000, "not a TOML file"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "case.toml"
    path.write_bytes(content)
    with pytest.raises(ScenarioFileError, match=text) as caught:
        Scenario.from_toml(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(ScenarioFileError, match=re.escape(str(path)) + ": cannot be read"):
            Scenario.from_toml(path)


@pytest.mark.parametrize(
    ("flags", "error", "text"),
    [
        (
            "shedule=serial",
            ScenarioKeyUnknown,
            "flags: there is no key 'shedule' here; did you mean 'schedule'",
        ),
        ("active", ScenarioFlagError, "flags: active has no value and takes an integer; write active=VALUE"),
        ("active=2 active=3", ScenarioFlagError, "active is given twice"),
        ("kernels='a", ScenarioFlagError, "cannot be split into words"),
        ("engine.=1", ScenarioKeyUnknown, "there is no key 'engine.'"),
        ("engine.name=e", ScenarioConflict, "flags: engine.name says which engine"),
        ("active=many", ScenarioTypeError, "active takes an integer, and 'many'"),
        ("lens=yes", ScenarioTypeError, "lens takes true or false, and 'yes'"),
        ("tokens=1,x", ScenarioTypeError, "tokens takes lists of token ids"),
        ("tokens=", ScenarioTypeError, "tokens takes lists of token ids"),
        ("arrivals=0,1", ScenarioConflict, "arrivals has 2 numbers and there are 1 requests"),
        ("active=2", ScenarioConflict, "flags: active is 2 and schedule is serial"),
    ],
)
def test_flags_that_cannot_be_read_are_refused(flags: str, error: type[ScenarioError], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        Scenario.from_flags("builtin", ["a"], flags)
    assert caught.type is error


def test_flags_without_a_prompt_have_no_request() -> None:
    with pytest.raises(RequestsMissing):
        Scenario.from_flags("builtin", [], "")


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"max_token": 3}, ScenarioKeyUnknown),
        ({"max_token": None}, ScenarioKeyUnknown),
        ({"max_tokens": 0}, ScenarioRangeError),
        ({"max_tokens": "3"}, ScenarioTypeError),
        ({"schedule": "serial", "active": 4}, ScenarioConflict),
        ({"arrivals": [1]}, ScenarioConflict),
    ],
)
def test_changes_are_checked(keys: dict[str, Any], error: type[ScenarioError]) -> None:
    with pytest.raises(error, match="^changes: "):
        Scenario.from_dict(
            minimal(schedule="continuous", active=4) | {"request": [{"prompt": "a"}] * 2}
        ).with_changes(**keys)
