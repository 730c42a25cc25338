"""A small model behind Ray Serve, as people write one: each step of a request goes through ``serve.batch``, and a batch is one
matrix product. ``python ray_model.py PORT`` says when it serves, and ends with its standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

LETTERS, WIDTH, SEEN, TOP = 64, 384, 6, 5


@serve.deployment(max_ongoing_requests=32)
class LetterModel:
    def __init__(self) -> None:
        draw = np.random.default_rng(3)
        self._in = draw.normal(0, 1, (SEEN, LETTERS, WIDTH)).astype(np.float32)
        self._mix = draw.normal(0, 0.08, (WIDTH, WIDTH)).astype(np.float32)
        self._out = draw.normal(0, 0.25, (WIDTH, LETTERS)).astype(np.float32)

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.02)
    async def step(self, texts: list[str]) -> list[np.ndarray[Any, Any]]:
        """Log-probabilities of the next letter of each text, float32 [letters]."""
        rows = [self._in[np.arange(SEEN), _ids(text)].sum(axis=0) for text in texts]
        logits = np.tanh(np.stack(rows) @ self._mix) @ self._out
        return list(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))

    async def __call__(self, request: Request) -> Response:
        if request.url.path.endswith("/models"):
            return JSONResponse({"object": "list", "data": [{"id": "letters", "owned_by": "ray"}]})
        if not request.url.path.endswith("completions"):
            return JSONResponse({"error": "no such path"}, 404)
        body = await request.json()
        chat = request.url.path.endswith("chat/completions")
        text = "".join(each["content"] for each in body["messages"]) if chat else body["prompt"]
        return StreamingResponse(self._events(text, body, chat), media_type="text/event-stream")

    async def _events(self, text: str, body: dict[str, Any], chat: bool) -> AsyncIterator[str]:
        for number in range(body["max_tokens"]):
            scores = await self.step(text)
            best = np.argsort(-scores, kind="stable")[:TOP].tolist()
            named = [{"token": _letter(each), "logprob": float(scores[each]), "bytes": None} for each in best]
            last = number + 1 == body["max_tokens"]
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
            if chat:
                choice |= {"delta": {"content": _letter(best[0])}}
                choice |= {"logprobs": {"content": [{**named[0], "top_logprobs": named}]}}
            else:
                tops = {each["token"]: each["logprob"] for each in named}
                values = {
                    "tokens": [named[0]["token"]],
                    "token_logprobs": [named[0]["logprob"]],
                    "top_logprobs": [tops],
                }
                choice |= {"text": _letter(best[0]), "logprobs": values}
            text += _letter(best[0])
            yield f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\n"
        yield "data: [DONE]\n\n"


def _letter(id: int) -> str:
    return chr(48 + id)


def _ids(text: str) -> list[int]:
    return [ord(each) % LETTERS for each in text.rjust(SEEN)[-SEEN:]]


if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, logging_level="error")
    serve.start(
        http_options={"host": "127.0.0.1", "port": int(sys.argv[1])}, logging_config={"log_level": "ERROR"}
    )
    serve.run(LetterModel.bind(), name="letters", route_prefix="/")
    print("serves", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()
