"""What a server says of itself while requests run: how many it runs, how many wait, how many share a forward."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from detdiff.errors import DetdiffError

from .client import ServerClient

_FIRST_PAUSE: Final = 0.05
_LAST_PAUSE: Final = 1.0
_SAMPLE: Final = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?\s+(\S+)")


@dataclass(frozen=True)
class MetricNames:
    """Where a kind of server tells its load: names of Prometheus' text at ``/metrics``, each summed over its labels.

    ``running`` and ``waiting`` count requests. ``busy`` is the average, since the server was started, of how many requests
    shared a forward, and ``forwards`` counts those. ``slots`` is a path with a JSON list of slots that say whether they work.
    """

    running: str
    waiting: str
    busy: str = ""
    forwards: str = ""
    slots: str = ""
    switch: str = ""


@dataclass(frozen=True)
class ServerLoad:
    """What a server said of a run's batches, from ``readings`` at ``by``: how many requests it ran ``before`` them, and
    at most ``running`` and ``waiting`` meanwhile; ``shared`` is how many requests a forward had on average, None where it does not say."""

    by: str
    before: float
    running: float
    waiting: float | None
    shared: float | None
    readings: int

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


class LoadWatch:
    """Reads a server's load before a run's batches and while they run; ``absent`` says why there is nothing to read."""

    def __init__(self, client: ServerClient, names: MetricNames | None) -> None:
        self._client, self._names = client, names
        self._path, self.absent = "", ""
        self._running: list[float] = []
        self._waiting: list[float] = []
        self._before = 0.0
        self._shared: list[tuple[float, float]] = []
        self._began = False

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Read while a batch runs, less often the longer it takes."""
        if not self._began:
            self._begin()
        if not self._path:
            yield
            return
        over = threading.Event()

        def read() -> None:
            pause = _FIRST_PAUSE
            while not over.wait(pause):
                self._keep(self._read(self._path))
                pause = min(2 * pause, _LAST_PAUSE)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield
        finally:
            over.set()
            reader.join()
            self._totals(self._read(self._path))

    def _begin(self) -> None:
        self._began = True
        if self._names is None:
            self.absent = "it is of a kind that shows none"
            return
        said = []
        for path in ("/metrics", self._names.slots):
            found = self._read(path) if path else None
            if found is not None and "running" in found:
                self._path, self._before = path, found["running"]
                self._totals(found)
                return
            said += [path] if path else []
        self.absent = f"it has none at {' and '.join(said)}{self._names.switch}"

    def _read(self, path: str) -> Mapping[str, float] | None:
        """Figures by what they mean; None where none came."""
        assert self._names is not None
        try:
            status, _, raw = self._client.get_text(path)
        except DetdiffError:
            return None
        text = raw.decode("utf-8", "replace")
        if status != 200:
            return None
        return slots_load(text) if path == self._names.slots else prometheus_load(text, self._names)

    def _keep(self, found: Mapping[str, float] | None) -> None:
        if found is not None and "running" in found:
            self._running.append(found["running"])
            self._waiting += [found["waiting"]] if "waiting" in found else []

    def _totals(self, found: Mapping[str, float] | None) -> None:
        if found is not None and {"busy", "forwards"} <= found.keys():
            self._shared.append((found["busy"] * found["forwards"], found["forwards"]))

    def found(self) -> ServerLoad | None:
        """What was read; None where nothing was."""
        shared = None
        if len(self._shared) > 1:
            busy, forwards = (
                last - first for first, last in zip(self._shared[0], self._shared[-1], strict=True)
            )
            shared = round(busy / forwards, 2) if forwards > 0 else None
        if not self._running and shared is None:
            return None
        return ServerLoad(
            self._path,
            self._before,
            max(self._running, default=0.0),
            max(self._waiting, default=None),
            shared,
            len(self._running),
        )


def prometheus_load(text: str, names: MetricNames) -> dict[str, float]:
    """Figures of Prometheus' text by what they mean, summed over labels; what is not there, or no number, is left out."""
    meanings = {
        name: meaning
        for meaning in ("running", "waiting", "busy", "forwards")
        if (name := getattr(names, meaning))
    }
    found: dict[str, float] = {}
    for line in text.splitlines():
        sample = _SAMPLE.match(line)
        if sample is None or sample[1] not in meanings:
            continue
        try:
            value = float(sample[2])
        except ValueError:
            continue
        if 0 <= value < float("inf"):
            meaning = meanings[sample[1]]
            found[meaning] = found.get(meaning, 0.0) + value
    return found


def slots_load(text: str) -> dict[str, float]:
    """How many slots of llama.cpp's list work."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        return {}
    said = [each["is_processing"] for each in given if isinstance(each.get("is_processing"), bool)]
    return {"running": float(sum(said))} if said else {}
