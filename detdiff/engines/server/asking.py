"""One request as a server of its kind is asked, and its answer read to the end."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass
from typing import Any

from detdiff.scenario import Request, prompt_messages

from .answers import ServerAnswer
from .client import ServerClient
from .kinds import ServerKind
from .settings import ServerSettings


@dataclass(frozen=True, eq=False)
class Asking:
    """How the requests of one run are asked: ``model`` as the server names it, ``top`` likeliest tokens for each; ``run`` is the name of the
    run for a server that keeps the names of requests."""

    client: ServerClient
    kind: ServerKind
    settings: ServerSettings
    model: str
    top: int
    run: str = ""

    def ask(self, request: Request, tokens: tuple[int, ...], *, values: bool = True) -> ServerAnswer:
        """The whole answer; without ``values`` as a stream of text. Raises what the client raises, and ServerAnswerInvalid."""
        kind, chat = self.kind, request.chat
        streams = (self.settings.stream and kind.streams_values) or not values
        shape = "openai" if chat else kind.shape
        top = self._top(chat)
        answer = ServerAnswer(self.client.invalid, top)
        body = getattr(self, f"_{shape}")(request, tokens, top if values else 0, streams, values)
        path, read = {
            "openai": ("/v1/chat/completions" if chat else "/v1/completions", answer.openai),
            "sglang": ("/generate", answer.sglang),
            "tgi": ("/generate_stream" if streams else "/generate", answer.tgi),
        }[shape]
        name = f"{self.run}-{request.id}" if self.run and kind.names_requests and values else ""
        if not (name.isascii() and name.isprintable()):
            name = ""
        if streams:
            events, done = self.client.events(path, body, name)
            with self.client.reading:
                for at, line in events:
                    read(line, at)
            # Those that do not say that a stream is done say it of the answer.
            if not done and (answer.finished is None or (kind.says_done and shape != "tgi")):
                self.client.cut()
        else:
            found = self.client.post(path, body, name)
            read(found, time.perf_counter())
        if answer.finished is None:
            self.client.invalid("an answer without a reason why it ended", "a finish_reason")
        return answer

    def _top(self, chat: bool) -> int:
        """How many of the likeliest tokens are asked for; below two none is, but the chosen one."""
        most = min(self.top, self.kind.top if chat else self.kind.completion_top)
        return most if most >= 2 else 0

    def _openai(
        self, request: Request, tokens: tuple[int, ...], top: int, streams: bool, values: bool
    ) -> dict[str, Any]:
        sampling, kind = request.sampling, self.kind
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "stream": streams,
        }
        if sampling.temperature:
            body |= {"top_p": sampling.top_p, "seed": sampling.seed}
        if streams and kind.name != "transformers":
            body["stream_options"] = {"include_usage": True}
        if values and kind.values:
            if request.chat or kind.name == "mlx_lm":
                body |= {"logprobs": True} | ({"top_logprobs": top} if top else {})
            else:
                body["logprobs"] = top
            body |= kind.asks
        if request.chat:
            body["messages"] = messages_of(request.prompt or "")
        else:
            body["prompt"] = list(tokens) if kind.takes_ids else request.prompt
        if request.ignore_stop:
            body["ignore_eos"] = True
        return {**body, **self._cache_off(), **self.settings.body}

    def _sglang(
        self, request: Request, tokens: tuple[int, ...], top: int, streams: bool, values: bool
    ) -> dict[str, Any]:
        sampling = {
            "max_new_tokens": request.max_tokens,
            "temperature": request.sampling.temperature,
            "ignore_eos": request.ignore_stop,
        }
        if request.sampling.temperature:
            sampling |= {"top_p": request.sampling.top_p, "sampling_seed": request.sampling.seed}
        body: dict[str, Any] = {"input_ids": list(tokens), "sampling_params": sampling, "stream": streams}
        if values:
            body |= {"return_logprob": True, "top_logprobs_num": top, "return_text_in_logprobs": True}
        own = dict(self.settings.body)
        sampling |= own.pop("sampling_params", {})
        return {**body, **own}

    def _tgi(
        self, request: Request, tokens: tuple[int, ...], top: int, streams: bool, values: bool
    ) -> dict[str, Any]:
        parameters: dict[str, Any] = {"max_new_tokens": request.max_tokens, "details": True}
        if top:
            parameters["top_n_tokens"] = top
        if request.sampling.temperature:
            parameters |= {
                "do_sample": True,
                "temperature": request.sampling.temperature,
                "seed": request.sampling.seed,
            }
            if request.sampling.top_p < 1:
                parameters["top_p"] = request.sampling.top_p
        own = dict(self.settings.body)
        parameters |= own.pop("parameters", {})
        return {"inputs": request.prompt, "parameters": parameters, **own}

    def _cache_off(self) -> dict[str, Any]:
        if self.settings.cache != "off":
            return {}
        return {
            key: uuid.uuid4().hex if value == "fresh" else value for key, value in self.kind.cache_off.items()
        }


def messages_of(prompt: str) -> list[Any]:
    """The messages of a chat prompt: JSON of a list of them, or the text of one from the user."""
    return prompt_messages(prompt) or [{"role": "user", "content": prompt}]
