"""A scenario says everything about a run: model, requests, schedule, speculation, cache, kernel plan, capture.

Files and flags share one set of flat keys (``detdiff.scenario_flags``); ``to_dict`` and ``from_dict`` are the
one form behind both.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detdiff.errors import (
    RequestIdRepeated,
    RequestsMissing,
    ScenarioConflict,
    ScenarioError,
    ScenarioFileError,
    ScenarioKeyMissing,
    ScenarioRangeError,
    ScenarioTypeError,
)
from detdiff.scenario_flags import (
    CHANGE_KEYS,
    FILE_KEYS,
    REQUEST_KEYS,
    RULE_KEYS,
    SETTING_KEYS,
    known,
    nearest,
    parse_flags,
    toml_text,
    typed,
)
from detdiff.scenario_parts import (
    CachePlan,
    Capture,
    KernelPlan,
    PathRule,
    Request,
    Sampling,
    Schedule,
    Speculation,
    check_name,
)
from detdiff.scenario_uses import check_uses, useless

__all__ = [
    "CachePlan",
    "Capture",
    "KernelPlan",
    "PathRule",
    "Request",
    "Sampling",
    "Scenario",
    "Schedule",
    "Speculation",
]


@dataclass(frozen=True)
class Scenario:
    """A run, whole. ``force_tokens`` is a trace's directory: a request is fed what it generated there under the same id.

    Raises RequestsMissing, RequestIdRepeated, ScenarioConflict and ScenarioRangeError.
    """

    model: str
    requests: tuple[Request, ...]
    schedule: Schedule = field(default_factory=Schedule)
    kernels: KernelPlan = field(default_factory=KernelPlan)
    capture: Capture = field(default_factory=Capture)
    speculation: Speculation | None = None
    cache: CachePlan = field(default_factory=CachePlan)
    force_tokens: str | None = None

    def __post_init__(self) -> None:
        check_name("model", self.model)
        if not self.requests:
            raise RequestsMissing("there is no request; give one prompt at least.")
        places: dict[str, int] = {}
        for place, request in enumerate(self.requests, 1):
            if request.id in places:
                raise RequestIdRepeated(
                    f"requests {places[request.id]} and {place} both have the id {request.id!r}; "
                    "give each its own (without one, the first is r0)."
                )
            places[request.id] = place
            if request.arrival and self.schedule.kind == "static":
                raise ScenarioConflict(
                    f"request {request.id!r} arrives at forward {request.arrival} and schedule is static, "
                    "which starts all at once; remove the arrival, or use schedule continuous."
                )
        active = self.schedule.active
        if self.schedule.kind == "static" and active is not None and active < len(places):
            raise ScenarioConflict(
                f"active is {active} and schedule is static, which starts all {len(places)} "
                "requests at once; remove active, or use schedule continuous."
            )
        for name in self.capture.requests:
            if name not in places:
                raise ScenarioRangeError(
                    f"window_requests has {name!r}, which is no request; {nearest(name, places)}"
                )
        if self.force_tokens is not None:
            check_name("force_tokens", self.force_tokens)
        sampled = next((request.id for request in self.requests if request.sampling.temperature), None)
        check_uses(self.schedule, self.cache, self.speculation, self.force_tokens, sampled)

    @classmethod
    def from_toml(cls, path: str | Path) -> Scenario:
        """Read a scenario file. A relative model directory, profile file or trace is looked for in the file's own
        folder.

        Raises ScenarioFileError, and what ``from_dict`` raises, naming the file.
        """
        path = Path(path)
        try:
            table = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
        except OSError as error:
            raise ScenarioFileError(
                f"{path}: cannot be read ({error.strerror}); name a scenario file."
            ) from None
        except UnicodeDecodeError as error:
            raise ScenarioFileError(
                f"{path}: byte {error.start} is not UTF-8, which a scenario file must be; save it as UTF-8."
            ) from None
        except (ValueError, RecursionError) as error:
            raise ScenarioFileError(f"{path}: this is not a TOML file ({error}); correct it there.") from None
        return cls.from_dict(_resolved(table, path.parent), where=str(path))

    @classmethod
    def from_flags(cls, model: str, prompts: Sequence[str], flags: str) -> Scenario:
        """A scenario without a file: ``prompts`` in order (ids r0, r1, ...), then the flags' ``tokens``.

        ``flags`` is text for ``detdiff.scenario_flags.parse_flags``; ``arrivals`` has one number for each
        request. Raises what ``parse_flags`` and ``from_dict`` raise.
        """
        with located("flags"):
            keys = parse_flags(flags)
            requests: list[dict[str, Any]] = [{"prompt": prompt} for prompt in prompts]
            requests += [{"tokens": tokens} for tokens in keys.pop("tokens", ())]
            if "arrivals" in keys:
                _set_arrivals(requests, keys.pop("arrivals"))
        keys = _resolved({"model": model, **keys}, Path())
        return cls.from_dict({**keys, "request": requests}, where="flags")

    @classmethod
    def from_dict(cls, values: Any, *, where: str = "scenario") -> Scenario:
        """The scenario that flat keys describe, as in a file. ``where`` opens each error's message.

        Raises ScenarioKeyUnknown (naming the nearest key), ScenarioKeyMissing, ScenarioTypeError, and what
        the dataclasses raise.
        """
        with located(where):
            if not isinstance(values, Mapping):
                raise ScenarioTypeError(f"a {type(values).__name__} is not a table of keys; give one.")
            keys = typed(values, FILE_KEYS)
            if "model" not in keys:
                raise ScenarioKeyMissing(
                    'there is no model; add model = "builtin", or a directory or hub id instead of builtin.'
                )
            defaults = {name: keys[name] for name in SETTING_KEYS if name in keys}
            requests = []
            for place, table in enumerate(keys.get("request", ())):
                with located(f"request {place + 1}" + (f" ({table['id']!r})" if "id" in table else "")):
                    requests.append(_request(typed(table, REQUEST_KEYS), defaults, place))
            rules = []
            for place, table in enumerate(keys.get("rule", ()), 1):
                with located(f"rule {place}"):
                    rules.append(PathRule(**typed(table, RULE_KEYS)))
            return _scenario(keys, tuple(requests), tuple(rules))

    def to_dict(self) -> dict[str, Any]:
        """The flat keys, fit for JSON, in one order; ``from_dict`` reads them. None is left to a default, but for those
        of speculation, cache and forcing, which stand here where they are used."""
        schedule, capture = self.schedule, self.capture
        keys: dict[str, Any] = {
            "model": self.model,
            "schedule": schedule.kind,
            "layout": schedule.layout,
            "active": schedule.active,
            "row_budget": schedule.row_budget,
            "prefill_chunk": schedule.prefill_chunk,
            **({} if self.speculation is None else vars(self.speculation)),
            "force_tokens": self.force_tokens,
            **_cache_keys(self.cache),
            "kernels": self.kernels.profile,
            "split_rows": self.kernels.split_rows,
            "capture": capture.level,
            "lens": capture.lens,
            "top": capture.top,
            "window_requests": list(capture.requests),
            "window_positions": None if capture.positions is None else list(capture.positions),
            "window_sites": list(capture.sites),
            "digest": capture.digest,
            "memory_mb": capture.memory_mb,
            "request": [_request_keys(request) for request in self.requests],
            "rule": [{name: getattr(rule, name) for name in RULE_KEYS} for rule in self.kernels.rules],
        }
        return {name: value for name, value in keys.items() if value is not None and value != []}

    def to_toml(self) -> str:
        """The text of a scenario file that ``from_toml`` reads back to an equal scenario."""
        return toml_text(self.to_dict())

    def with_changes(self, **keys: Any) -> Scenario:
        """A copy with flat keys changed; None sets a key back to its default.

        A setting that the change leaves without a use goes (``active`` under serial, ``row_budget`` when padded, the
        window when another capture is asked for), so that one file serves for both sides of a comparison. What decides
        numbers (a draft, a quantised cache) never goes so: it is removed by name, or is a conflict.
        A request setting (``max_tokens``, ``seed``, ...) changes in every request, ``chat`` only where the
        prompt is text. ``arrivals`` has one number for each request. Raises what ``from_dict`` raises.
        """
        values = self.to_dict()
        requests = values["request"]
        with located("changes"):
            for name in keys:
                known(name, CHANGE_KEYS)
            changes = typed({name: value for name, value in keys.items() if value is not None}, CHANGE_KEYS)
            if "arrivals" in keys:
                _set_arrivals(requests, changes.pop("arrivals", [0] * len(requests)))
        changes = _resolved(changes, Path())
        gone = useless(keys, changes)
        for table in (values, *requests):
            for name in (*keys, *gone):
                table.pop(name, None)
        return Scenario.from_dict({**values, **changes}, where="changes")


@contextmanager
def located(where: str) -> Iterator[None]:
    """Puts ``where`` before the message of a ScenarioError that the block raises."""
    try:
        yield
    except ScenarioError as error:
        raise type(error)(f"{where}: {error}") from None


def _model_path(model: str, folder: Path) -> str:
    if not model or model in ("builtin", "builtin-draft"):
        return model
    path = folder / os.path.expanduser(model)
    # Absolute, so that a trace can be replayed from another folder. What is no directory may be a hub id.
    return os.path.abspath(path) if model.startswith((".", "~")) or path.is_dir() else model


def _profile_path(kernels: str, folder: Path) -> str:
    """A profile as it is, or the absolute path of a profile's file, with the parameters that follow it."""
    found = re.fullmatch(r"(.*\.toml)((?::.*)?)", kernels, re.DOTALL)
    return os.path.abspath(folder / os.path.expanduser(found[1])) + found[2] if found else kernels


def _trace_path(trace: str, folder: Path) -> str:
    return os.path.abspath(folder / os.path.expanduser(trace)) if trace else trace


_PLACES: Mapping[str, Callable[[str, Path], str]] = {
    "model": _model_path,
    "draft": _model_path,
    "kernels": _profile_path,
    "force_tokens": _trace_path,
}


def _resolved(keys: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """``keys`` with every relative file and directory looked for in ``folder``."""
    return {
        name: _PLACES[name](value, folder) if name in _PLACES and isinstance(value, str) else value
        for name, value in keys.items()
    }


def _cache_keys(cache: CachePlan) -> dict[str, Any]:
    plain = CachePlan()
    return {name: value for name, value in vars(cache).items() if value != getattr(plain, name)}


def _set_arrivals(requests: Sequence[dict[str, Any]], arrivals: Sequence[int]) -> None:
    if len(arrivals) != len(requests):
        raise ScenarioConflict(
            f"arrivals has {len(arrivals)} numbers and there are {len(requests)} requests; give one for each."
        )
    for request, arrival in zip(requests, arrivals, strict=True):
        request["arrival"] = arrival


def _pick(keys: Mapping[str, Any], **names: str) -> dict[str, Any]:
    return {name: keys[key] for name, key in names.items() if key in keys}


def _request(own: Mapping[str, Any], defaults: Mapping[str, Any], place: int) -> Request:
    keys = {"id": f"r{place}", **defaults, **own}
    if "prompt" not in own and "chat" not in own:
        # A default of the run; token ids are what they are.
        keys.pop("chat", None)
    sampling = Sampling(**{name: keys.pop(name) for name in ("temperature", "top_p", "seed") if name in keys})
    return Request(**keys, sampling=sampling)


def _request_keys(request: Request) -> dict[str, Any]:
    keys = {name: getattr(request, name, None) for name in REQUEST_KEYS}
    keys |= {"tokens": None if request.tokens is None else list(request.tokens)}
    keys |= {name: getattr(request.sampling, name) for name in ("temperature", "top_p", "seed")}
    return {name: value for name, value in keys.items() if value is not None}


def _scenario(
    keys: Mapping[str, Any], requests: tuple[Request, ...], rules: tuple[PathRule, ...]
) -> Scenario:
    schedule = _pick(
        keys,
        kind="schedule",
        layout="layout",
        active="active",
        row_budget="row_budget",
        prefill_chunk="prefill_chunk",
    )
    kernels = _pick(keys, profile="kernels", split_rows="split_rows")
    capture = _pick(
        keys,
        level="capture",
        lens="lens",
        top="top",
        requests="window_requests",
        positions="window_positions",
        sites="window_sites",
        digest="digest",
        memory_mb="memory_mb",
    )
    if "drafts" in keys and "draft" not in keys:
        raise ScenarioConflict(
            f"drafts is {keys['drafts']} and there is no draft model that could propose them; add draft, or remove drafts."
        )
    return Scenario(
        model=keys["model"],
        requests=requests,
        schedule=Schedule(**schedule),
        kernels=KernelPlan(**kernels, rules=rules),
        capture=Capture(**capture),
        speculation=Speculation(**_pick(keys, draft="draft", drafts="drafts")) if "draft" in keys else None,
        cache=CachePlan(**{name: keys[name] for name in vars(CachePlan()) if name in keys}),
        force_tokens=keys.get("force_tokens"),
    )
