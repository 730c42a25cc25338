"""What servers differ in, as data: how they are known, what they are asked, and how their answers come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from .load import MetricNames


@dataclass(frozen=True)
class ServerKind:
    """One kind of server.

    ``shape`` is how it is asked and answers: "openai", or its own "sglang" or "tgi". ``asks`` is added to every request of
    its own or OpenAI's shape. ``top`` is how many of the likeliest it can name at most (0: the chosen one alone), ``tokenize``
    the path that gives a text's token ids, ``takes_ids`` whether a prompt may be token ids, ``ignores_stop`` whether it
    generates on after a stop token. ``streams_values`` is whether log-probabilities come in streams, too. ``cache_off`` is
    added where prefix caches are to be off; the value "fresh" stands for one that no other request has. ``reset`` is
    the path that forgets what was cached. ``values`` is false where it gives text alone. ``notes`` are what a trace says of it.
    ``load`` is where it tells how many requests it runs. ``names_requests``: it keeps the name that a request has in its headers.
    """

    name: str
    shape: str = "openai"
    asks: Mapping[str, Any] = field(default_factory=dict)
    top: int = 20
    completion_top: int = 20
    tokenize: str = ""
    takes_ids: bool = False
    ignores_stop: bool = False
    streams_values: bool = True
    cache_off: Mapping[str, Any] = field(default_factory=dict)
    reset: str = ""
    says_done: bool = True
    values: bool = True
    notes: tuple[str, ...] = ()
    sampled_note: str = ""
    load: MetricNames | None = None
    names_requests: bool = False


KINDS: Final[Mapping[str, ServerKind]] = {
    kind.name: kind
    for kind in (
        # `return_token_ids`, `return_tokens_as_token_ids`, `cache_salt`: vLLM's OpenAI-compatible server, extra parameters.
        ServerKind(
            "vllm",
            asks={"return_token_ids": True, "return_tokens_as_token_ids": True},
            tokenize="/tokenize",
            takes_ids=True,
            ignores_stop=True,
            cache_off={"cache_salt": "fresh"},
            # docs/usage/metrics.md of vLLM.
            load=MetricNames("vllm:num_requests_running", "vllm:num_requests_waiting"),
        ),
        # `/generate`, `/flush_cache`: SGLang's native API.
        ServerKind(
            "sglang",
            shape="sglang",
            tokenize="/tokenize",
            takes_ids=True,
            ignores_stop=True,
            reset="/flush_cache",
            # docs/references/production_metrics.md of SGLang; counted every 40 forwards.
            load=MetricNames(
                "sglang:num_running_reqs",
                "sglang:num_queue_reqs",
                switch="; --enable-metrics switches them on",
            ),
        ),
        # tools/server/README.md of llama.cpp: `cache_prompt`, `/tokenize`, `id` in log-probabilities.
        ServerKind(
            "llama.cpp",
            tokenize="/tokenize",
            takes_ids=True,
            ignores_stop=True,
            cache_off={"cache_prompt": False},
            # tools/server/README.md of llama.cpp, `/metrics` and `/slots`.
            load=MetricNames(
                "llamacpp:requests_processing",
                "llamacpp:requests_deferred",
                busy="llamacpp:n_busy_slots_per_decode",
                forwards="llamacpp:n_decode_total",
                slots="/slots",
                switch="; --metrics switches them on",
            ),
        ),
        # `/generate_stream`, `/tokenize`: TGI's native API.
        ServerKind(
            "tgi",
            shape="tgi",
            top=5,
            completion_top=5,
            tokenize="/tokenize",
            # docs/source/reference/metrics.md of TGI.
            load=MetricNames("tgi_batch_current_size", "tgi_queue_size"),
        ),
        ServerKind(
            "mlx_lm",
            top=0,
            completion_top=0,
            streams_values=False,
            notes=(
                "mlx_lm.server names another token than the one it sent where top_logprobs is asked (0.32.2), so it is asked "
                "for the chosen token alone, and margins are not known",
                "mlx_lm.server gives ids and log-probabilities only where the answer does not stream",
            ),
            sampled_note="mlx_lm.server does not batch a request with a seed, so that sampled requests ran one by one",
        ),
        # transformers 5.19, cli/serving: no log-probabilities, no stream_options, and no [DONE] behind the last event.
        ServerKind("transformers", values=False, says_done=False),
        # Our own, `detdiff serve`: keys as vLLM's.
        ServerKind(
            "detdiff",
            asks={"return_token_ids": True, "return_tokens_as_token_ids": True},
            tokenize="/tokenize",
            takes_ids=True,
            ignores_stop=True,
            cache_off={"cache_prompt": False},
            load=MetricNames("detdiff:num_requests_running", "detdiff:num_requests_waiting"),
            names_requests=True,
        ),
        ServerKind("openai", completion_top=5),
    )
}

Asked = Callable[[str], tuple[int, Mapping[str, str], Any]]
"""Asks for a path: the status, the headers with names in lower case, and the JSON answer or None."""


@dataclass(frozen=True)
class FoundServer:
    """What was found at an address: its ``kind``, the ``version`` where it says one, and the ``models`` it names."""

    kind: ServerKind
    version: str
    models: tuple[str, ...]
    how: str


def detect(ask: Asked, said: str = "") -> FoundServer:
    """What serves there, by asking; ``said`` is the kind that the user names. Raises what asking raises."""
    status, headers, listed = ask("/v1/models")
    data = listed.get("data") if isinstance(listed, Mapping) and status == 200 else None
    entries = [each for each in data if isinstance(each, Mapping)] if isinstance(data, list) else []
    models = tuple(str(each["id"]) for each in entries if isinstance(each.get("id"), str))
    owners = {str(each.get("owned_by", "")) for each in entries}
    own = headers.get("server", "")

    def asked(path: str, *keys: str) -> str | None:
        """The first of ``keys`` that the JSON object at a path has; None where it has not all."""
        found, _, answer = ask(path)
        if found == 200 and isinstance(answer, Mapping) and all(key in answer for key in keys):
            return str(answer[keys[0]]) if keys else ""
        return None

    def known(name: str, version: str, how: str) -> FoundServer:
        return FoundServer(KINDS[said or name], version, models, "said" if said else how)

    if "detdiff" in owners:
        return known("detdiff", asked("/version", "version") or "", "its models")
    if own.startswith("llama.cpp") or "llamacpp" in owners:
        return known("llama.cpp", asked("/props", "build_info") or "", "its headers and models")
    if "vllm" in owners:
        return known("vllm", asked("/version", "version") or "", "its models")
    if "sglang" in owners:
        return known("sglang", asked("/get_server_info", "version") or "", "its models")
    for name, path, keys in (
        ("llama.cpp", "/props", ("build_info", "default_generation_settings")),
        ("sglang", "/get_model_info", ("model_path", "is_generation")),
        ("tgi", "/info", ("version", "model_id", "max_total_tokens")),
    ):
        version = asked(path, *keys)
        if version is not None:
            if name == "tgi" and not models:
                models = (str(asked("/info", "model_id")),)
            return known(name, "" if name == "sglang" else version, path)
    # Python's own server, which names its models without owners, or nothing where the hub's cache is not there.
    unowned = owners == {""} if entries else listed is None or isinstance(listed, Mapping)
    if own.startswith("BaseHTTP/") and unowned and asked("/health", "status") is not None:
        return known("mlx_lm", "", "its headers and models")
    if own == "uvicorn" and "x-request-id" in headers and asked("/health", "status") is not None:
        return known("transformers", "", "its headers")
    version = asked("/version", "version")
    if version is not None:
        return known("vllm", version, "/version")
    return known("openai", "", "nothing that tells it apart")
