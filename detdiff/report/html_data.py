"""What a page's script draws: the series as compressed arrays in one line of JSON, within a given size.

Every array is zlib's, in base64, and unpacked by the browser when it is looked at. Arrays that do not fit are left out
from the least needed on, and the page says which.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.divergence import Divergence

from .words import named

if TYPE_CHECKING:
    from detdiff.compare.grids import Grid
    from detdiff.compare.series import ForwardPoint, RequestSeries, Series

_LONGEST: Final = 40
_ORIGIN: Final = 3
_STEPS: Final = (1, 2, 4, 8, 16, 32, 64)
_SAID: Final = {
    "state": "which cells differ",
    "share": "the share of differing digests",
    "ulp": "the largest ULP",
    "rel": "the largest relative difference",
}
_OF: Final = {"layers": "each layer", "sites": "each site", "entries": "each cache entry"}
_ORDER: Final = (
    ("layers", "state"),
    ("entries", "state"),
    ("sites", "state"),
    ("layers", "share"),
    ("layers", "ulp"),
    ("layers", "rel"),
    ("sites", "share"),
    ("entries", "share"),
    ("sites", "ulp"),
    ("sites", "rel"),
    ("entries", "ulp"),
    ("entries", "rel"),
)
"""What is kept first: a map without sizes is still a map."""
# Ten bits of a float32's fraction: three digits, which is what a reader is shown.
_KEPT_BITS: Final = np.uint32(0xFFFFE000)


@dataclass(frozen=True)
class Payload:
    """``text`` is JSON that may stand inside a script element. ``left_out`` are sentences."""

    text: str
    left_out: tuple[str, ...]


def payload(series: Series, divergence: Divergence | None, room: int) -> Payload:
    """At most ``room`` bytes, where that can be.

    What costs least goes first: sizes and shares, then single positions below the layers, then requests after the first
    ones, and at last the forwards.
    """
    requests = len(series.requests)
    tries = [(requests, step) for step in _STEPS]
    tries += [(requests >> n, step) for n in range(1, requests.bit_length()) for step in _STEPS[::3]]
    found = None
    for live, step in tries:
        if found is None or found.live != live:
            found = _Kept(replace(series, requests=series.requests[:live]), divergence, room)
        if found.keep(step):
            return Payload(found.text, found.said(requests))
    found = _Kept(replace(series, requests=series.requests[:1], a=(), b=()), divergence, room)
    found.keep(_STEPS[-1])
    return Payload(found.text, found.said(requests))


class _Kept:
    """Some requests of a series, with the arrays for which there is room."""

    def __init__(self, series: Series, divergence: Divergence | None, room: int) -> None:
        self._series = series
        self._lists = _packed(_text(_lists(series, divergence)))
        self._room = room
        self._step = 1
        self._left_out: list[tuple[str, str]] = []
        self.text = ""

    @property
    def live(self) -> int:
        """How many requests there are."""
        return len(self._series.requests)

    def keep(self, step: int) -> bool:
        """Whether it fits that way, with all states, positions below the layers in groups of ``step``."""
        self._step, self._left_out = step, []
        names = _Names()
        places: dict[str, list[tuple[dict[str, Any], Grid]]] = {"layers": [], "sites": [], "entries": []}
        requests = [_shells(request, step, names, places) for request in self._series.requests]
        whole = {"lists": self._lists, "rows": names.shown(), "requests": requests}
        room = self._room - len(_text(whole))
        for part, name in _ORDER:
            found = None if room < 0 else _within(places[part], name, room)
            if found is None:
                self._left_out.append((part, name))
                continue
            for slot, packed in found:
                slot[name] = packed
                room -= len(packed) + len(name) + 6
        self.text = _text(whole)
        return room >= 0 and not any(array == "state" for _, array in self._left_out)

    def said(self, requests: int) -> tuple[str, ...]:
        """What is missing, of a series of so many requests."""
        said = []
        if self.live < requests:
            first = "first request" if self.live == 1 else f"first {self.live} requests"
            said.append(
                f"To keep this page small, only the {first} of {requests} can be zoomed into; the others are tables and pictures."
            )
        if not self._series.a and not self._series.b:
            said.append("The timeline is left to its picture to keep this page small.")
        if self._step > 1:
            said.append(
                f"Sites and cache entries are drawn in groups of {self._step} positions to keep this page small."
            )
        left_out = self._left_out
        said += [
            f"Left out to keep this page small: {_SAID[array]} of {_OF[part]}." for part, array in left_out
        ]
        return tuple(said)


def _shells(
    request: RequestSeries,
    step: int,
    names: _Names,
    places: dict[str, list[tuple[dict[str, Any], Grid]]],
) -> dict[str, Any]:
    """A request's grids, still without arrays; ``places`` collects where those of each part belong."""
    made: dict[str, Any] = {}
    for part, grids in (
        ("layers", (request.layers,)),
        ("sites", request.sites),
        ("entries", request.entries),
    ):
        made[part] = [
            {
                "name": named(grid.name),
                "rows": names(list(grid.rows)),
                "columns": grid.state.shape[1],
                "step": 1 if part == "layers" else step,
            }
            for grid in grids
        ]
        places[part] += zip(made[part], grids, strict=True)
    return made


def _within(
    places: Iterable[tuple[dict[str, Any], Grid]], name: str, room: int
) -> list[tuple[dict[str, Any], str]] | None:
    """That array of every grid, packed; None as soon as they take more than ``room``. One that says nothing is not kept."""
    found = []
    for slot, grid in places:
        array: NDArray[Any] | None = getattr(grid, name)
        if array is None or (array.dtype.kind == "f" and np.isnan(array).all()):
            continue
        packed = _packed(_bytes(_grouped(array, slot["step"]), name))
        found.append((slot, packed))
        room -= len(packed) + len(name) + 6
        if room < 0:
            return None
    return found


def _bytes(array: NDArray[Any], name: str) -> bytes:
    if name == "rel":
        words = np.ascontiguousarray(array, "<f4").view("<u4")
        array = np.where(np.isnan(array), words, words & _KEPT_BITS)
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()


def _grouped(array: NDArray[Any], step: int) -> NDArray[Any]:
    """The largest of every ``step`` columns."""
    if step == 1 or not array.shape[1]:
        return array
    largest: np.ufunc = np.fmax if array.dtype.kind == "f" else np.maximum
    grouped: NDArray[Any] = largest.reduceat(array, np.arange(0, array.shape[1], step), axis=1)
    return grouped


def _packed(content: str | bytes) -> str:
    raw = content.encode() if isinstance(content, str) else content
    return base64.b64encode(zlib.compress(raw, 6)).decode("ascii")


def _text(content: Any) -> str:
    """JSON in which no character can end the element that it stands in."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _lists(series: Series, divergence: Divergence | None) -> dict[str, Any]:
    names = _Names()
    requests = [_request(request, divergence) for request in series.requests]
    runs = {run: _forwards(points, names) for run, points in (("a", series.a), ("b", series.b))}
    thresholds = [
        {
            "run": each.run,
            "after": each.after,
            "before": each.before,
            "paths": [named(each.path_after), named(each.path_before)],
        }
        for each in series.thresholds
    ]
    return {"requests": requests, "runs": runs, "thresholds": thresholds, "names": names.shown()}


class _Names:
    """Each name, or list of them, once; other lists then hold its number."""

    def __init__(self) -> None:
        self._found: list[Any] = []
        self._numbers: dict[str, int] = {}

    def __call__(self, value: Any) -> int:
        key = repr(value)
        if key not in self._numbers:
            self._numbers[key] = len(self._found)
            self._found.append(value)
        return self._numbers[key]

    def shown(self) -> list[Any]:
        """All of them by their numbers, escaped and cut."""
        return [_shown(value) for value in self._found]


def _shown(value: Any) -> Any:
    if isinstance(value, list):
        return [_shown(each) for each in value]
    return named(value) if isinstance(value, str) else value


def _request(request: RequestSeries, divergence: Divergence | None) -> dict[str, Any]:
    b = {token.index: token for token in request.tokens_b}
    tokens = request.tokens_a
    return {
        "id": named(request.id),
        "prompt": request.prompt,
        "positions": request.positions,
        "flip": request.flip_index,
        "flip_position": request.flip_position,
        "birth": _birth(request, divergence),
        "birth_forwards": request.birth_forwards,
        "flip_forwards": request.flip_forwards,
        "tokens": {
            "index": [token.index for token in tokens],
            "position": [token.position for token in tokens],
            "text": [_cut(token.text) for token in tokens],
            "other": {
                token.index: _cut(b[token.index].text)
                for token in tokens
                if token.index in b and b[token.index].token != token.token
            },
            "margin": [_number(token.margin) for token in tokens],
            "delta": [_number(token.delta) for token in tokens],
        },
    }


def _birth(request: RequestSeries, divergence: Divergence | None) -> int | None:
    """The position at which this request's first difference was born."""
    found = None if divergence is None else next((r for r in divergence.requests if r.id == request.id), None)
    if found is not None and found.origin is not None:
        return found.origin.position
    born = np.flatnonzero((request.layers.state == _ORIGIN).any(axis=0))
    return int(born[0]) if born.size else None


def _forwards(points: Iterable[ForwardPoint], name: Callable[[Any], int]) -> dict[str, list[Any]]:
    """One list a column; what repeats from forward to forward is a number into the names."""
    columns: dict[str, list[Any]] = {
        key: [] for key in ("forward", "model", "rows", "members", "paths", "path", "writes", "events")
    }
    for point in points:
        columns["forward"].append(point.forward)
        columns["model"].append(name(point.model))
        columns["rows"].append(point.rows)
        columns["members"].append([[name(m.request), name(m.phase), m.start, m.rows] for m in point.members])
        columns["paths"].append(name([[use.path, use.sites] for use in point.paths]))
        columns["path"].append(-1 if point.linear_path is None else name(point.linear_path))
        columns["writes"].append(point.writes)
        columns["events"].append(name(list(point.events)))
    return columns


def _cut(text: str, longest: int = _LONGEST) -> str:
    """Shorter than names elsewhere: there are thousands of them."""
    return named(text) if len(text) <= longest else f"{named(text[:longest])}…"


def _number(x: float | None) -> float | None:
    return None if x is None or not np.isfinite(x) else float(f"{x:.7g}")
