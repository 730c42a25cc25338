"""What an engine of the user's own is asked and answers: requests, generated tokens, log-probabilities, tapped rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.metrics import Values
from detdiff.errors import EngineAnswerInvalid
from detdiff.scenario import EMBED, GENERATE

_DTYPES = {"f2": "F16", "f4": "F32", "f8": "F64", "c8": "C64", "b1": "BOOL"} | {
    f"{kind}{size}": f"{kind.upper()}{8 * size}" for kind in "iu" for size in (1, 2, 4, 8)
}


@dataclass(frozen=True)
class EngineRequest:
    """One prompt as token ids, and at most how many tokens are generated, greedily.

    ``arrival`` counts forwards of the run, as in a scenario; it is 0 but under schedule ``continuous``. ``prompt`` is the text
    that the tokens stand for, where there is one. ``task`` is ``generate``, or ``embed`` where one vector is asked for.
    """

    id: str
    tokens: tuple[int, ...]
    max_tokens: int
    arrival: int = 0
    prompt: str | None = None
    task: str = GENERATE


@dataclass(frozen=True, eq=False)
class Tap:
    """What one site computed for rows of one request.

    ``out`` is an array [rows, ...] of values, or of one digest a row (uint64 [rows]); ``inputs`` is the same for what the
    site was given, where that is known. ``positions`` int [rows] says which positions of the request the rows are; without
    it they are 0, 1, 2, ... ``m`` int [rows] is how many rows, of all requests, the call had that computed each. Arrays are
    NumPy's, or anything that NumPy can take; bfloat16 comes as uint16 patterns.
    """

    out: Any
    inputs: Any = None
    positions: Any = None
    m: Any = None


@dataclass(frozen=True, eq=False)
class Generation:
    """What an engine generated for one request; only the tokens are asked for, or the ``text`` where it has no token ids.

    ``log_probabilities`` is a float array [tokens], of each generated token; ``top`` is (ids [tokens, k], logits or
    log-probabilities [tokens, k]) of the likeliest. ``taps`` holds sites in the order in which a forward runs them, each a
    Tap, or an array [positions, ...] of outputs. ``embedding`` is a float array [width], where one was asked for.
    """

    tokens: Any = None
    log_probabilities: Any = None
    taps: Mapping[str, Any] = field(default_factory=dict)
    top: Any = None
    text: str | None = None
    embedding: Any = None


@dataclass(frozen=True, eq=False)
class TappedRows:
    """A tap that was checked: ``positions`` int64 [rows], outputs and inputs [rows, ...], and M int64 [rows] or None."""

    positions: NDArray[np.int64]
    out: Values
    inputs: Values | None
    m: NDArray[np.int64] | None


@dataclass(frozen=True, eq=False)
class Answer:
    """A generation that was checked, in plain types. With ``text`` the tokens are its code points."""

    tokens: tuple[int, ...]
    log_probabilities: Values | None
    taps: dict[str, TappedRows]
    top: tuple[NDArray[np.int32], NDArray[np.float32]] | None = None
    text: bool = False
    embedding: NDArray[np.float32] | None = None


def answer(given: Any, request: EngineRequest, engine: str) -> Answer:
    """What an engine gave for one request: a Generation, or its tokens alone. Raises EngineAnswerInvalid."""
    embeds = request.task == EMBED
    if isinstance(given, Generation):
        found = (
            given if not embeds else replace(given, tokens=(), text=None, top=None, log_probabilities=None)
        )
    else:
        found = Generation((), embedding=given) if embeds else Generation(given)

    def refuse(what: str, expected: str) -> EngineAnswerInvalid:
        return EngineAnswerInvalid(
            f"The engine {engine} gave {what} for request {request.id!r}; expected {expected}. Correct the engine, or leave out "
            "what it cannot give."
        )

    written = found.tokens if isinstance(found.tokens, str) else found.text if found.tokens is None else None
    tokens = _whole(found.tokens) if written is None else tuple(map(ord, written))
    if tokens is None:
        raise refuse(
            f"{_shown(found.tokens)} as tokens",
            "a list of the token ids that were generated, the prompt left out",
        )
    if written is None and len(tokens) > request.max_tokens:
        raise refuse(f"{len(tokens)} tokens", f"{request.max_tokens} at most, the prompt left out")
    scores = None
    if found.log_probabilities is not None:
        scores = _values(found.log_probabilities)
        if scores is None or scores.dtype not in ("F16", "F32", "F64") or scores.data.shape != (len(tokens),):
            raise refuse(
                f"{_shown(found.log_probabilities)} as log-probabilities",
                f"a float array of shape ({len(tokens)},), one for each generated token",
            )
    taps: dict[str, TappedRows] = {}
    for site, tap in found.taps.items():
        tapped = _rows(tap if isinstance(tap, Tap) else Tap(tap))
        if tapped is None:
            raise refuse(
                f"rows of {site!r} that do not fit together",
                "arrays with one row for each position, and a value at least in each",
            )
        last = len(request.tokens) + len(tokens) - 1
        wrong = next((int(p) for p in tapped.positions if not 0 <= p <= last), None)
        if wrong is not None:
            # It would be compared with nothing.
            raise refuse(
                f"a row of {site!r} at position {wrong}",
                f"positions of the prompt and of what follows, 0 to {last}",
            )
        taps[str(site)] = tapped
    top = None
    if found.top is not None:
        top = _top(found.top, len(tokens))
        if top is None:
            raise refuse(
                "a top that does not fit", f"ids and logits, arrays of shape ({len(tokens)}, k) each"
            )
    embedding = None
    if embeds:
        vector = _values(found.embedding)
        if (
            vector is None
            or vector.dtype not in ("F16", "F32", "F64")
            or vector.data.ndim != 1
            or not vector.data.size
        ):
            raise refuse(f"{_shown(found.embedding)} as an embedding", "a float array of shape (width,)")
        embedding = vector.data.astype(np.float32)
    return Answer(tokens, scores, taps, top, written is not None, embedding)


def _top(given: Any, count: int) -> tuple[NDArray[np.int32], NDArray[np.float32]] | None:
    """Ids int32 and logits float32 [tokens, k], the highest first, equal ones by lower id."""
    try:
        ids, logits = (np.asarray(each) for each in given)
    except (TypeError, ValueError, RuntimeError):
        return None
    if ids.ndim != 2 or ids.shape != logits.shape or len(ids) != count or ids.dtype.kind not in "iu":
        return None
    ids, logits = ids.astype(np.int32), logits.astype(np.float32)
    order = np.lexsort((ids, -logits), axis=1)
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(logits, order, axis=1)


def _rows(tap: Tap) -> TappedRows | None:
    out = _tapped(tap.out)
    inputs = None if tap.inputs is None else _tapped(tap.inputs)
    if out is None or (tap.inputs is not None and (inputs is None or len(inputs.data) != len(out.data))):
        return None
    count = len(out.data)
    positions = tuple(range(count)) if tap.positions is None else _whole(tap.positions)
    if positions is None or len(positions) != count or len(set(positions)) != count:
        return None
    m = () if tap.m is None else _whole(tap.m)
    if m is None or len(m) not in (0, count):
        return None
    return TappedRows(
        np.array(positions, np.int64), out, inputs, np.array(m, np.int64) if len(m) and count else None
    )


def _tapped(given: Any) -> Values | None:
    values = _values(given)
    if values is None or values.data.ndim == 0 or (len(values.data) and not values.data.size):
        return None
    return Values(np.ascontiguousarray(values.data), values.dtype)


def _values(given: Any) -> Values | None:
    try:
        data: NDArray[Any] = np.asarray(given)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ):  # ragged lists, and arrays of other libraries that NumPy cannot take
        return None
    name = _DTYPES.get(data.dtype.str[1:])
    return None if name is None else Values(data, name)


def _whole(given: Any) -> tuple[int, ...] | None:
    try:
        data: NDArray[Any] = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):
        return None
    if data.ndim != 1 or (data.size and data.dtype.kind not in "iu"):
        return None
    return tuple(int(each) for each in data)


def _shown(given: Any) -> str:
    shape = getattr(given, "shape", None)
    if shape is not None:
        return f"a {type(given).__name__} of shape {tuple(shape)}"
    text = repr(given)
    return text if len(text) <= 60 else f"a {type(given).__name__} ({text[:40]}...)"
