"""The engine ``server``: requests sent to an address under a schedule, and their answers as a trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from detdiff.engines import base
from detdiff.engines.base import Begin, RunOptions
from detdiff.errors import EngineRefuses, ServerRefused
from detdiff.scenario import Request, Scenario, nearest

from .answers import ServerAnswer
from .asking import Asking, messages_of
from .client import ServerClient
from .kinds import KINDS, FoundServer, detect
from .run import ServerRun
from .settings import ServerAddress, ServerSettings

NAME: Final = "server"
_REASONS: Final = {
    base.RESET: "what it served before cannot be taken back from outside",
    base.SITES: "a server shows answers, and no place inside the model",
    base.INPUTS: "a server shows answers, and no place inside the model",
    base.VALUES: "a server shows answers, and no place inside the model",
    base.CACHE: "a server shows no cache",
    base.KERNEL_PATHS: "a server does not say what computes its answers",
    base.ROWS_SEEN: "a server does not say how many rows (M) its calls had",
    base.FORWARDS: "a server does not say what was in its batches; forwards here stand for steps of requests that were sent together",
}


class ServerEngine:
    """A server at an address, asked over HTTP.

    Token ids are the server's where it names them; else numbers of the tokens' bytes, or, where it answers with text alone, the
    text's code points (``lacks.tokens``). A prompt is token ids where the server has a tokenizer to ask and takes ids.
    """

    name = NAME

    def __init__(self, address: ServerAddress, settings: ServerSettings, given: Mapping[str, Any]) -> None:
        self.settings: Mapping[str, Any] = dict(given)
        self._address, self._own = address, settings
        if settings.kind and settings.kind not in KINDS:
            raise EngineRefuses(
                f"engine.kind is {settings.kind!r}, which is no kind of server; {nearest(settings.kind, KINDS)} Correct it, or "
                "leave it out and the server is asked."
            )
        self._client = ServerClient(address, settings)
        self._found = self._detected()
        self.kind = self._found.kind
        self._model = self._chosen()
        self.identity: Mapping[str, Any] = self._identity(self._found)
        self._texts: dict[int, str] = {}
        self.asks_text = not (self.kind.tokenize and self.kind.takes_ids)
        """Whether prompts go to the server as text."""
        found = {
            base.TOKENS, base.SERIAL, base.STATIC, base.CONTINUOUS, base.SAMPLING, base.ADDRESS,
        }  # fmt: skip
        found |= {base.LOGITS} if self.kind.values else set()
        found |= {base.RESET} if self.kind.reset else set()
        found |= set() if self.asks_text else {base.TEXT}
        self.capabilities = frozenset(found)

    def _detected(self) -> FoundServer:
        def ask(path: str) -> tuple[int, Mapping[str, str], Any]:
            status, headers, found = self._client.get(path)
            if status in (401, 403):
                raise ServerRefused(
                    f"{self._address.root}{path} answered with the status {status}: it wants a token, or another one. Name the "
                    "environment variable that holds it with engine.token_env=NAME."
                )
            return status, headers, found

        return detect(ask, self._own.kind)

    def _chosen(self) -> str:
        models = self._found.models
        if self._own.model:
            if models and self._own.model not in models and self.kind.name not in ("mlx_lm", "transformers"):
                raise ServerRefused(
                    f"{self._address.root} has no model {self._own.model!r}; it names {', '.join(models[:8])}. Correct engine.model."
                )
            return self._own.model
        if self.kind.name == "mlx_lm":
            return "default_model"
        if len(models) > 1:
            raise ServerRefused(
                f"{self._address.root} has {len(models)} models ({', '.join(models[:8])}); expected one, or its name. Say "
                "engine.model=NAME."
            )
        return models[0] if models else "default"

    def _identity(self, found: FoundServer) -> dict[str, Any]:
        named = {"name": self._model, "server": found.kind.name}
        return {**named, "version": found.version} if found.version else named

    def environment(self) -> dict[str, Any]:
        return base.machine()

    def lacks(self, capability: str) -> str:
        if capability == base.TEXT:
            return f"{self.kind.name} does not give token ids of a text, or takes none as a prompt"
        if capability == base.LOGITS:
            return f"{self.kind.name} answers with text alone"
        return _REASONS.get(capability, f"a server cannot be told of {capability}")

    def encode(self, text: str, chat: bool) -> list[int]:
        """The server's token ids of a prompt. Raises EngineRefuses where it gives none."""
        if self.asks_text or chat:
            raise EngineRefuses(
                f"{self.kind.name} at {self._address.root} gives no token ids of "
                f"{'chat messages' if chat else 'a text'} that it takes as a prompt; give prompts as texts."
            )
        return list(self._tokens(text))

    def _tokens(self, text: str) -> tuple[int, ...]:
        body: dict[str, Any] = {"content": text, "add_special": True}
        if self.kind.name != "llama.cpp":
            body = {"model": self._model, "prompt": text, "add_special_tokens": True}
        found = self._client.post_json(self.kind.tokenize, body)
        tokens = found.get("tokens") if isinstance(found, Mapping) else None
        if not isinstance(tokens, list) or not all(type(each) is int and each >= 0 for each in tokens):
            self._client.invalid(
                f"{str(found)[:80]!r} as token ids of a text", "a list of them under 'tokens'"
            )
        return tuple(tokens)

    def decode(self, ids: list[int]) -> str:
        return "".join(self._texts.get(each, f"<{each}>") for each in ids)

    def check(self, scenario: Scenario) -> None:
        """Raises EngineRefuses for what a server cannot be told."""
        own = (
            (
                f"ignore_stop to {self.kind.name}",
                any(each.ignore_stop for each in scenario.requests) and not self.kind.ignores_stop,
            ),
            (
                f"token ids as the prompt to {self.kind.name}",
                self.asks_text and any(each.prompt is None for each in scenario.requests),
            ),
        )
        wrong = next((what for what, differs in own if differs), None)
        if wrong is not None:
            raise EngineRefuses(
                f"{wrong} cannot be told to the server at {self._address.root}. Leave it out, or set it where the server is started."
            )
        names = (
            "layout packed",
            "prefill_chunk",
            "kernels",
            "a draft",
            "settings of the cache",
            "force_tokens",
            "lens",
        )
        where = f"server at {self._address.root}. Leave it out, or set it where the server is started."
        base.refuse_untold(scenario, names, where)
        schedule = scenario.schedule
        if schedule.kind == "continuous" and self._own.arrivals:
            count = len(scenario.requests)
            if len(self._own.arrivals) != count:
                raise EngineRefuses(
                    f"engine.arrivals has {len(self._own.arrivals)} numbers and there are {count} requests; give one for each."
                )

    def reset(self) -> None:
        """Have the server forget what it cached."""
        self._client.post(self.kind.reset, {})

    def run(self, scenario: Scenario, begin: Begin, options: RunOptions) -> Mapping[str, Any]:
        """See `base.Engine.run`. Raises ServerUnreachable, ServerRefused, ServerAnswerInvalid and EngineAnswerInvalid; what was
        answered until then stays readable."""
        if options.overrides != base.Overrides():
            raise EngineRefuses("A server was asked for an override; expected none. Leave it out.")
        self._same("before the run")
        run = ServerRun(self, scenario, begin, options)
        run.all()
        self._same("after it")
        return run.told()

    def _same(self, when: str) -> None:
        """Raises ServerRefused where another server, version or model is at the address."""
        now = self._detected()
        found = self._identity(now)
        if self._model in self._found.models and self._model not in now.models:
            found["name"] = ", ".join(now.models[:8]) or "without a model"
        if found != self.identity:
            raise ServerRefused(
                f"{self._address.root} was {self.identity} when it was opened and is {found} {when}: it was started again as "
                "another one. Nothing can be said of it as one server; run again."
            )

    def asking(self, top: int, run: str = "") -> Asking:
        """How requests are asked, with so many of the likeliest tokens."""
        return Asking(self._client, self.kind, self._own, self._model, top, run)

    def prompt(self, request: Request) -> tuple[int, ...]:
        """The prompt's ids in a trace: token ids, or code points of the text where the server gives none."""
        if request.tokens is not None:
            return request.tokens
        text = request.prompt or ""
        if self.asks_text or request.chat:
            if request.chat:
                text = "\n".join(str(each["content"]) for each in messages_of(text))
            return tuple(map(ord, text)) or (0,)
        return self._tokens(text)

    def learn(self, found: ServerAnswer) -> None:
        """Remember the texts of an answer's token ids."""
        self._texts |= found.texts(self._texts)

    def text(self, token: int) -> str:
        return self._texts.get(token, "")

    @property
    def client(self) -> ServerClient:
        return self._client

    @property
    def own(self) -> ServerSettings:
        return self._own


def open_server(model: str | None, settings: Mapping[str, Any]) -> ServerEngine:
    """The server at an address. Raises ServerAddressInvalid, EngineRefuses, ServerUnreachable and ServerRefused."""
    return ServerEngine(ServerAddress.of(model), ServerSettings.of(settings), settings)
