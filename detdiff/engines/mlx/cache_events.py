"""What happens to caches, and what they say of themselves at the start of a forward beside what the engine knows to be true.

Between forwards mlx-lm merges, extends, filters, rolls, trims and quantises them. Only its own functions that do these things are
wrapped, and only while the block lasts; nothing is wrapped that a forward calls, so a run in which nothing happens costs nothing.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch
from mlx_lm.models.cache import ArraysCache, BatchRotatingKVCache, QuantizedKVCache, RotatingKVCache

from detdiff.engines.mlx.taps.entries import cache_kind
from detdiff.engines.mlx.taps.forward import Forward, ForwardRecord
from detdiff.engines.schedule import OnEvent
from detdiff.trace import format_ranges

# By its name in full: the package has a function of that name, too.
mlx_lm_generate: Any = importlib.import_module("mlx_lm.generate")


@dataclass
class CacheOwners:
    """Whose caches are whose: ``of_uid`` maps a batch generator's uid to a request's number.

    ``serial`` is the request that a serial generator runs; ``named`` are lists of caches that belong to a model.
    """

    of_uid: Callable[[int], int]
    serial: int = 0
    named: list[tuple[str, Sequence[Any]]] = field(default_factory=list)

    def model(self, caches: Sequence[Any]) -> str:
        """The model that a list of caches belongs to: by its first cache, as mlx-lm slices lists."""
        for name, mine in self.named:
            if caches and any(cache is caches[0] for cache in mine):
                return name
        return "target"


@contextlib.contextmanager
def watched(owners: CacheOwners, event: OnEvent) -> Iterator[None]:
    """Tell ``event`` what mlx-lm's generators do to caches while the block lasts; undone on leaving, in reverse order."""
    watch = _CacheWatch(owners, event)
    with contextlib.ExitStack() as stack:
        for owner, name, wrap in (
            (PromptProcessingBatch, "__init__", watch.merge),
            (PromptProcessingBatch, "extend", watch.extend),
            (PromptProcessingBatch, "filter", watch.filter),
            (PromptProcessingBatch, "prompt", watch.prompt),
            (GenerationBatch, "extend", watch.extend),
            (GenerationBatch, "filter", watch.filter),
            (mlx_lm_generate, "trim_prompt_cache", watch.trim),
            (mlx_lm_generate, "maybe_quantize_kv_cache", watch.quantise),
        ):
            native = vars(owner)[name]
            setattr(owner, name, wrap(native))
            stack.callback(setattr, owner, name, native)
        yield


Native = Callable[..., Any]


class _CacheWatch:
    """The wrappers: each runs the native function and says what it did."""

    def __init__(self, owners: CacheOwners, event: OnEvent) -> None:
        self._owners, self._event = owners, event

    def _requests(self, uids: Sequence[int]) -> list[int]:
        return [self._owners.of_uid(uid) for uid in uids]

    def merge(self, native: Native) -> Native:
        def init(batch: Any, *args: Any, **kw: Any) -> None:
            native(batch, *args, **kw)
            if batch.uids:
                self._event("merge", requests=self._requests(batch.uids), layers=_all(batch.prompt_cache))

        return init

    def extend(self, native: Native) -> Native:
        def extend(batch: Any, other: Any) -> None:
            before, more = list(batch.uids), list(other.uids)
            native(batch, other)
            if before and more:
                self._event(
                    "extend",
                    requests=self._requests(before),
                    by=self._requests(more),
                    layers=_all(batch.prompt_cache),
                )

        return extend

    def filter(self, native: Native) -> Native:
        def filter_(batch: Any, keep: list[int]) -> None:
            before = list(batch.uids)
            native(batch, keep)
            if before and len(keep) < len(before):
                self._event(
                    "filter",
                    requests=self._requests(before),
                    kept=self._requests([before[slot] for slot in keep]),
                    slots=list(keep),
                )

        return filter_

    def prompt(self, native: Native) -> Native:
        def prompt(batch: Any, tokens: list[list[int]]) -> None:
            uids = list(batch.uids)
            lengths = [len(t) for t in tokens]
            native(batch, tokens)
            padding = [max(lengths) - length for length in lengths] if lengths else []
            if any(padding):
                self._event(
                    "roll", requests=self._requests(uids), by=padding, layers=_all(batch.prompt_cache)
                )

        return prompt

    def trim(self, native: Native) -> Native:
        def trim(cache: list[Any], num_tokens: int) -> Any:
            can = [c.is_trimmable() for c in cache]
            done = native(cache, num_tokens)
            if num_tokens:
                # mlx-lm trims no layer where one cannot be trimmed.
                blocked = [layer for layer, ok in enumerate(can) if not ok]
                self._event(
                    "trim",
                    request=self._owners.serial,
                    model=self._owners.model(cache),
                    asked=int(num_tokens),
                    done=int(done),
                    layers=format_ranges(blocked or range(len(cache))),
                )
            return done

        return trim

    def quantise(self, native: Native) -> Native:
        def quantise(
            prompt_cache: list[Any], quantized_kv_start: int, kv_group_size: int, kv_bits: int | None
        ) -> None:
            if kv_bits is None:
                native(prompt_cache, quantized_kv_start, kv_group_size, kv_bits)
                return
            before = list(prompt_cache)
            native(prompt_cache, quantized_kv_start, kv_group_size, kv_bits)
            changed = [n for n, (a, b) in enumerate(zip(before, prompt_cache, strict=True)) if a is not b]
            if changed:
                self._event(
                    "quantise",
                    request=self._owners.serial,
                    model=self._owners.model(prompt_cache),
                    position=int(before[changed[0]].offset),
                    layers=format_ranges(changed),
                    bits=kv_bits,
                    group_size=kv_group_size,
                    **_converted({n: (before[n], prompt_cache[n]) for n in changed}),
                )

        return quantise


def _converted(caches: Mapping[int, tuple[Any, Any]]) -> dict[str, Any]:
    """How far converted entries are from what was written, by layer: ``error``, the largest in units of its bound, and ``outside``,
    the first of each layer and side that is not within it. Nothing of caches whose codes are not known.
    """
    largest, outside = 0.0, []
    for layer, (written, codes) in caches.items():
        if not isinstance(codes, QuantizedKVCache) or written.keys is None:
            return {}
        for entry, exact, held in (("K", written.keys, codes.keys), ("V", written.values, codes.values)):
            rows = slice(0, int(written.offset))
            error = quantisation_error(
                exact[..., rows, :], [part[..., rows, :] for part in held], codes.group_size, codes.bits
            )
            sizes = np.asarray(error)[0].T  # [positions, heads]
            wrong = np.argwhere(~(sizes <= 1))
            if len(wrong):
                position, head = wrong[0].tolist()
                place = {"layer": layer, "entry": entry, "head": head, "position": position}
                size = float(sizes[position, head])
                outside.append({**place, "entries": len(wrong), "error": size if np.isfinite(size) else None})
            else:
                largest = max(largest, float(sizes.max(initial=0.0)))
    return {"error": largest, **({"outside": outside} if outside else {})}


def quantisation_error(exact: mx.array, codes: Sequence[mx.array], group_size: int, bits: int) -> mx.array:
    """The largest error of each entry in units of its bound, float32 [slots, heads, rows]: of ``exact`` [slots, heads, rows, width]
    in ``codes``, MLX's affine ones.

    The bound is half a step of the scale. MLX moves the scale so that the end of a group's range that is farther from zero is exact,
    by at most half a step of the whole range, which leaves the other end off by up to 4/3 of a step where its code is the last one. Roundings
    of the dtype come on top.
    """
    packed, scales, biases = codes
    held = mx.dequantize(packed, scales, biases, group_size=group_size, bits=bits).astype(mx.float32)
    wide = [mx.repeat(part.astype(mx.float32), group_size, axis=-1) for part in (scales, biases)]
    written, step, bias, last = exact.astype(mx.float32), mx.abs(wide[0]), wide[1], 2**bits - 1
    steps = mx.where(mx.abs(held - bias) > (last - 0.5) * step, 4 / 3, 0.5)
    slack = mx.finfo(scales.dtype).eps * (mx.abs(written) + mx.abs(bias) + last * step)
    largest: mx.array = (mx.abs(written - held) / (steps * step + slack + 1e-30)).max(axis=-1)
    return largest


def _all(caches: Sequence[Any]) -> str:
    return format_ranges(range(len(caches)))


def describe(cache: Sequence[Any]) -> list[dict[str, Any]]:
    """One note per layer: kind, offset and left padding per slot, length; arrays stay MLX arrays for now.

    ``known`` is False where nothing is known of how the cache counts its offset.

    Reading an offset here would wait for the forward that is still running, so only left padding, which some
    caches change in place, is copied at once.
    """
    return [_note(entry) for entry in cache]


def _note(cache: Any) -> dict[str, Any]:
    lanes = getattr(cache, "lanes", None)
    if lanes is not None:
        return {
            "kind": type(lanes[0]).__name__,
            "known": cache_kind(lanes[0]) is not None,
            "offset": [int(lane.offset) for lane in lanes],
            "left_padding": [],
            "length": max(int(lane.offset) for lane in lanes),
        }
    note: dict[str, Any] = {
        "kind": type(cache).__name__,
        "known": cache_kind(cache) is not None,
        "offset": [],
        "left_padding": [],
        "length": 0,
    }
    offset = getattr(cache, "offset", None)
    if isinstance(offset, mx.array):
        note["offset"] = offset.astype(offset.dtype)
    elif isinstance(offset, int):
        note["offset"] = [offset]
    padding = getattr(cache, "left_padding", None)
    if isinstance(padding, mx.array):
        note["left_padding"] = [int(p) for p in np.asarray(padding)]
    index = getattr(cache, "_idx", None)
    note["length"] = index if isinstance(index, int) else (offset if isinstance(offset, int) else 0)
    return note


def summarise(record: ForwardRecord, forward: Forward) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(cache lines, events): layers that say the same share a line; a wrong offset is an event.

    The offset of a slot is the position that its column 0 takes, so it must equal the segment's start less its
    column. A cache whose class is not known may count otherwise, and is not checked.
    """
    groups: dict[str, tuple[dict[str, Any], list[int]]] = {}
    events: list[dict[str, Any]] = []
    for layer, note in enumerate(record.bookkeeping):
        offset = note["offset"]
        if isinstance(offset, mx.array):
            offset = [int(o) for o in np.asarray(offset)]
        fields = {key: value for key, value in note.items() if key != "known"}
        line = {**fields, "offset": offset, "mask": record.masks.get(layer, "none")}
        if layer in record.limited:
            line["sees"] = record.limited[layer]
        groups.setdefault(repr(line), (line, []))[1].append(layer)
        for lane, segment in enumerate(forward.segments if note["known"] else ()):
            place = lane if forward.layout == "packed" else segment.slot
            if place < len(offset) and offset[place] != segment.start - segment.column * (
                forward.layout == "padded"
            ):
                events.append(
                    {
                        "kind": "offset",
                        "request": segment.request,
                        "layer": layer,
                        "expected": segment.start,
                        "found": offset[place],
                    }
                )
    return [{"layers": format_ranges(layers), **line} for line, layers in groups.values()], events


_ROTATING = (RotatingKVCache, BatchRotatingKVCache)


def wraps(forward: Forward, cache: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """One ``wrap`` for each request and window size that this forward's rows reach the end of.

    ``position`` is the first row that no longer sees the request's first token; ``layers`` are those of this window.
    """
    windows: dict[int, list[int]] = {}
    for layer, entry in enumerate(cache):
        held = entry.lanes[0] if hasattr(entry, "lanes") else entry
        if cache_kind(held) in _ROTATING:
            windows.setdefault(int(held.max_size), []).append(layer)
    for window, layers in windows.items():
        for segment in forward.segments:
            if segment.start <= window < segment.start + segment.count:
                yield {
                    "request": segment.request,
                    "position": window,
                    "rows": segment.count,
                    "start": segment.start,
                    "window": window,
                    "layers": format_ranges(layers),
                }


@dataclass
class _LeftState:
    """The recurrent states that a request left: those of its slot by layer, after ``position``."""

    position: int
    layers: dict[int, list[mx.array]]


class TurnStates:
    """Recurrent states from turn to turn: one that a later turn finds as it was left has not been taken back with its rows."""

    def __init__(self) -> None:
        self._left: dict[int, _LeftState] = {}
        self._before: dict[int, int] = {}

    def turn(self, request: int, before: int) -> None:
        """The next forward of a request goes on from the turn ``before``."""
        self._before[request] = before

    def left(self, forward: Forward, cache: Sequence[Any]) -> None:
        """Remember what a forward leaves; to be told while nothing has been written since."""
        layers = {layer: one for layer, one in enumerate(cache) if isinstance(one, ArraysCache)}
        for segment in forward.segments if layers else ():
            states = {layer: _of_slot(one, segment.slot) for layer, one in layers.items()}
            self._left[segment.request] = _LeftState(segment.start + segment.count - 1, states)

    def found(self, forward: Forward, cache: Sequence[Any]) -> list[dict[str, Any]]:
        """An event ``state`` for each layer in which a turn's first forward finds the state after another row than the one
        before its own."""
        events: list[dict[str, Any]] = []
        for segment in forward.segments:
            left = self._left.get(self._before.pop(segment.request, -1))
            if left is None or left.position == segment.start - 1:
                continue
            for layer, states in left.layers.items():
                now = _of_slot(cache[layer], segment.slot) if isinstance(cache[layer], ArraysCache) else []
                if now and len(now) == len(states) and all(map(_alike, now, states)):
                    events.append(
                        {
                            "kind": "state",
                            "request": segment.request,
                            "layer": layer,
                            "found": left.position,
                            "expected": segment.start - 1,
                        }
                    )
        return events


def _of_slot(cache: ArraysCache, slot: int) -> list[mx.array]:
    return [state[slot : slot + 1] for state in cache.cache if isinstance(state, mx.array)]


def _alike(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and bool(mx.array_equal(a, b))
