"""Answers of vLLM, SGLang and TGI, in the shapes that they document: found out by asking, and read to the last number.

They were written after those documents; no such server ran here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_servers import Reply, models, send_events, send_json, serving

from detdiff import Scenario, record
from detdiff.engines.registry import open_engine
from detdiff.engines.server.shapes import NamedToken
from detdiff.errors import ServerAnswerInvalid
from detdiff.trace import Trace


def always(value: Any) -> Reply:
    return lambda handler, _: send_json(handler, value)


def _vllm(text: str, id: int, score: float, other: int, last: bool, **more: Any) -> dict[str, Any]:
    named, second = f"token_id:{id}", f"token_id:{other}"
    values = {
        "tokens": [named],
        "token_logprobs": [score],
        "top_logprobs": [{named: score, second: score - 1}],
        "text_offset": [0],
    }
    choice = {"index": 0, "text": text, "logprobs": values, "finish_reason": "length" if last else None,
              "stop_reason": None, "token_ids": [id]}  # fmt: skip
    return {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": [choice], **more}


VLLM = {
    "listed": {
        "/v1/models": models("m", owner="vllm"),
        "/version": always({"version": "0.32.0"}),
        "/tokenize": always({"count": 3, "max_model_len": 99, "tokens": [1, 20, 30]}),
    },
    "path": "/v1/completions",
    "stream": [
        _vllm(" The", 450, -0.25, 7, False, prompt_token_ids=[1, 20, 30]),
        _vllm(" cat", 6635, -1.5, 8, True),
        {"id": "cmpl-1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5,
         "prompt_tokens_details": {"cached_tokens": 2}}},
    ],
    "asked": {"return_token_ids": True, "return_tokens_as_token_ids": True, "prompt": [1, 20, 30], "logprobs": 2},
    "version": "0.32.0",
}  # fmt: skip


def _sglang(text: str, triples: list[Any], tops: list[Any], reason: Any) -> dict[str, Any]:
    meta = {"id": "a", "finish_reason": reason, "prompt_tokens": 3, "completion_tokens": len(triples), "cached_tokens": 2,
            "output_token_logprobs": triples, "output_top_logprobs": tops}  # fmt: skip
    return {"text": text, "output_ids": [each[1] for each in triples], "meta_info": meta}


_FIRST, _SECOND = [-0.25, 450, " The"], [-1.5, 6635, " cat"]
_TOPS = [[_FIRST, [-1.25, 7, " A"]], [_SECOND, [-2.5, 8, " dog"]]]
SGLANG = {
    "listed": {
        "/v1/models": models("m", owner="sglang"),
        "/get_server_info": always({"version": "0.5.9", "model_path": "m"}),
        "/tokenize": always({"tokens": [1, 20, 30], "count": 3}),
        "/flush_cache": always({}),
    },
    "path": "/generate",
    "stream": [
        _sglang(" The", [_FIRST], _TOPS[:1], None),
        _sglang(" The cat", [_FIRST, _SECOND], _TOPS, {"type": "length", "length": 2}),
    ],
    "asked": {"input_ids": [1, 20, 30], "return_logprob": True, "top_logprobs_num": 2},
    "version": "0.5.9",
}


def _tgi(index: int, id: int, text: str, score: float, other: int, whole: str | None) -> dict[str, Any]:
    token = {"id": id, "text": text, "logprob": score, "special": False}
    second = {"id": other, "text": " x", "logprob": score - 1, "special": False}
    details = {"finish_reason": "length", "generated_tokens": 2, "seed": None, "input_length": 3}
    return {"index": index, "token": token, "top_tokens": [token, second], "generated_text": whole,
            "details": details if whole else None}  # fmt: skip


TGI = {
    "listed": {
        "/v1/models": models("m", owner="m"),
        "/info": always({"model_id": "m", "version": "3.3.6", "max_total_tokens": 99, "router": "text-generation-router"}),
    },
    "path": "/generate_stream",
    "stream": [_tgi(1, 450, " The", -0.25, 7, None), _tgi(2, 6635, " cat", -1.5, 8, " The cat")],
    "asked": {"inputs": "a prompt", "parameters": {"max_new_tokens": 2, "details": True, "top_n_tokens": 2}},
    "version": "3.3.6",
    "done": False,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {"vllm": VLLM, "sglang": SGLANG, "tgi": TGI}


def recorded(name: str, path: Path, stream: list[Any] | None = None) -> tuple[Trace, dict[str, Any]]:
    """A trace of one request, and what the server was asked."""
    shape, asked = KINDS[name], {}

    def reply(handler: Any, body: dict[str, Any]) -> None:
        asked.update(body)
        send_events(handler, stream or shape["stream"], done=shape.get("done", True))

    with serving({**shape["listed"], shape["path"]: reply}) as address:
        scenario = Scenario.from_flags(f"{address}/v1", ["a prompt"], "max_tokens=2 top=2")
        engine = open_engine(scenario)
        if name == "sglang":
            engine.reset()
        return record(scenario, path, engine=engine), asked


@pytest.mark.parametrize("name", KINDS)
def test_a_shape_is_read_to_the_last_number(tmp_path: Path, name: str) -> None:
    trace, asked = recorded(name, tmp_path / "a")
    assert trace.header["model"] == {"name": "m", "server": name, "version": KINDS[name]["version"]}
    generated = trace.generated(lens=False)
    assert generated.token.tolist() == [450, 6635]
    assert generated.top_ids.tolist() == [[450, 7], [6635, 8]]
    assert np.array_equal(generated.top_logits, np.array([[-0.25, -1.25], [-1.5, -2.5]], np.float32))
    assert KINDS[name]["asked"].items() <= asked.items()
    cached = trace.header["server"]["cached_tokens"]
    assert cached == ({} if name == "tgi" else {"r0": 2})
    assert trace.requests[0]["tokens"] == (list(map(ord, "a prompt")) if name == "tgi" else [1, 20, 30])
    assert ("cache_salt" in asked) == (name == "vllm")


@pytest.mark.parametrize(
    ("name", "stream", "words"),
    [
        ("tgi", TGI["stream"][1:], "token 2 after token 0"),
        ("sglang", SGLANG["stream"][::-1], "1 tokens after 2"),
        ("vllm", [VLLM["stream"][0], {**VLLM["stream"][1], "id": "cmpl-2"}], "events of two answers"),
    ],
)
def test_events_out_of_their_order_are_no_answer(
    tmp_path: Path, name: str, stream: list[Any], words: str
) -> None:
    with pytest.raises(ServerAnswerInvalid, match=words):
        recorded(name, tmp_path / "a", stream)


def test_sglang_streams_what_is_new_too(tmp_path: Path) -> None:
    first = SGLANG["stream"][0]
    second = _sglang(" cat", [_SECOND], _TOPS[1:], {"type": "length"})
    second["meta_info"]["completion_tokens"] = 2
    trace, _ = recorded("sglang", tmp_path / "a", [first, second])
    assert trace.generated(lens=False).token.tolist() == [450, 6635]


def test_tokens_that_vllm_names_by_id_are_ids_in_chat_too(tmp_path: Path) -> None:
    """As vLLM's chat has them: ``token_id:N`` in the place of the text, and that in bytes. What no text is known of shows its id."""

    def named(id: int, score: float) -> dict[str, Any]:
        name = f"token_id:{id}"
        return {"token": name, "logprob": score, "bytes": list(name.encode())}

    entry = {**named(450, -0.25), "top_logprobs": [named(450, -0.25), named(7, -1.25)]}
    choice = {
        "index": 0,
        "delta": {"content": " The"},
        "logprobs": {"content": [entry]},
        "finish_reason": "length",
    }
    replies = {
        **VLLM["listed"],
        "/v1/chat/completions": lambda handler, _: send_events(handler, [{"choices": [choice]}]),
    }
    with serving(replies) as address:
        asked = Scenario.from_flags(f"{address}/v1", ["a prompt"], "chat max_tokens=1 top=2")
        trace = record(asked, tmp_path / "a")
    generated = trace.generated(lens=False)
    assert generated.token.tolist() == [450] and generated.top_ids.tolist() == [[450, 7]]
    assert trace.header["server"]["token_ids"] and not any(
        "by text alone" in each for each in trace.header["notes"]
    )
    assert trace.texts()[450] == "<450>"


@pytest.mark.parametrize("name", ["token_id:²", "token_id:99999999999", "token_id:", "token_id:-1"])
def test_a_name_that_holds_no_id_is_a_text(name: str) -> None:
    token = NamedToken(-0.5, name)
    assert token.number is None and token.raw == name.encode() and 0 <= token.key < 2**31


def test_salts_of_requests_differ(tmp_path: Path) -> None:
    salts = {recorded("vllm", tmp_path / str(n))[1]["cache_salt"] for n in range(2)}
    assert len(salts) == 2


def test_transformers_serve_gives_text_and_no_end_of_stream(tmp_path: Path) -> None:
    """Shapes of transformers 5.19, cli/serving/completion.py: what is None is left out, and there is no [DONE]."""
    asked: dict[str, Any] = {}

    def chunk(text: str, **more: Any) -> dict[str, Any]:
        return {
            "id": "q",
            "object": "text_completion",
            "created": 1,
            "model": "m",
            "choices": [{"text": text, "index": 0, **more}],
        }

    def reply(handler: Any, body: dict[str, Any]) -> None:
        asked.update(body)
        usage = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
        send_events(
            handler,
            [chunk("Hel"), chunk("lo"), {**chunk("", finish_reason="length"), "usage": usage}],
            done=False,
        )

    def listed(handler: Any, _: Any) -> None:
        send_json(handler, {"data": [{"id": "m", "owned_by": "me"}]}, headers={"x-request-id": "1"})

    replies = {"/v1/models": listed, "/health": always({"status": "ok"}), "/v1/completions": reply}
    with serving(replies, server="uvicorn") as address:
        trace = record(Scenario.from_flags(f"{address}/v1", ["a prompt"], "max_tokens=2"), tmp_path / "a")
    assert trace.header["model"]["server"] == "transformers"
    assert "".join(map(chr, trace.generated(lens=False).token)) == "Hello"
    assert {"tokens", "logits"} <= trace.lacks.keys()
    assert not {"logprobs", "stream_options"} & asked.keys()
