"""The recorder: takes what the taps saw, forward by forward, and writes it to a trace."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from detdiff.engines.mlx.cache_events import TurnStates, describe, summarise, wraps
from detdiff.engines.tasks import Pooling, scores
from detdiff.scenario import Capture
from detdiff.trace import Generated, Lens, Rows, TraceWriter, digest_rows, format_ranges

from .digesting import Digester
from .digests import device_entries, device_rows
from .entries import Selection, cache_call
from .forward import (
    DRAFT,
    DTYPE_NAMES,
    TARGET,
    CacheCall,
    Forward,
    ForwardRecord,
    ForwardRows,
    KeyReader,
    as_float32,
    handle,
    memory,
    top,
)
from .kernel_plan import NATIVE, TakenPath
from .sites import Arrays, SiteMap
from .unread import CacheUpdate

# A packed forward calls these request by request.
PER_REQUEST = ("rope", "attention", "cache_write", "cache_read")


class _CallGroup(NamedTuple):
    """What sites have in common that share a line; ``rows`` and ``second_last`` are None for calls per request."""

    path: str
    rule: str
    rows: int | None
    second_last: int | None
    at: str | None


def plan_calls(record: ForwardRecord) -> list[dict[str, Any]]:
    """The calls of a forward's plan: sites whose calls were alike share one, in the order of their first site."""
    forward, sites = record.forward, record.sites
    head = sites.index.get(sites.head or "", -1)
    slots, columns = forward.shape
    groups: dict[_CallGroup, list[int]] = {}
    known: dict[tuple[Sequence[int], tuple[TakenPath, ...]], list[_CallGroup]] = {}
    for site, taken in record.calls.items():
        rows = forward.selected if site == head and forward.selected is not None else range(slots * columns)
        key = rows, tuple(taken)
        if key not in known:
            known[key] = _grouped(key[1], rows)
        for group in known[key]:
            groups.setdefault(group, []).append(site)
    for group, unchosen in _unchosen(record, head).items():
        groups.setdefault(group, []).extend(unchosen)
    ordered = sorted(groups.items(), key=lambda item: (min(item[1]), _first(item[0].at)))
    return [
        {
            "path": group.path,
            "rule": group.rule,
            **({} if group.rows is None else {"rows": group.rows, "second_last": group.second_last}),
            "sites": format_ranges([record.sites.first_site + site for site in found]),
            **({} if group.at is None else {"at": group.at}),
        }
        for group, found in ordered
    ]


def _grouped(taken: Sequence[TakenPath], rows: Sequence[int]) -> list[_CallGroup]:
    """One group where all rows of a site took one path, else one for each path with the rows that took it.

    ``rows`` are the forward's rows that the site saw; it may have made several rows of each, which lie together.
    """
    runs: dict[tuple[int | None, int | None, str, str], list[range]] = {}
    for one in taken:
        runs.setdefault(one[:4], []).append(one.at or range(0))
    several, rest = divmod(taken[0].rows or len(rows), len(rows))
    if len(runs) == 1 or rest:
        n, second_last, path, rule = next(iter(runs))
        return [_CallGroup(path, rule, n, second_last, None)]
    groups = []
    for (n, second_last, path, rule), mine in runs.items():
        # Of a row that took more than one path, the first says what it is recorded as.
        at = [rows[i] for run in mine for i in range(-(-run.start // several), -(-run.stop // several))]
        if at:
            groups.append(_CallGroup(path, rule, n, second_last, format_ranges(at)))
    return groups


def _first(at: str | None) -> int:
    return 0 if at is None else int(at.partition(",")[0].partition("-")[0])


def _unchosen(record: ForwardRecord, head: int) -> dict[_CallGroup, list[int]]:
    """The sites that the kernel plan had no say in, and how the backend ran them."""
    forward = record.forward
    slots, columns = forward.shape
    whole = _CallGroup(NATIVE, "", slots * columns, columns, None)
    apart = _CallGroup(NATIVE, "", None, None, None) if forward.layout == "packed" else whole
    found: dict[_CallGroup, list[int]] = {whole: [], apart: []}
    for site, about in enumerate(record.sites.sites):
        if site not in record.calls:
            found[apart if about.kind in PER_REQUEST else whole].append(site)
    logits = record.sites.index["logits"]
    if not forward.logits_used:
        # They are never computed: the engine does not ask for them.
        found[whole] = [site for site in found[whole] if site not in (head, logits)]
    elif head in found[whole] and forward.selected is not None:
        found[whole].remove(head)
        own = _CallGroup(NATIVE, "", len(forward.selected), len(forward.selected), None)
        found.setdefault(own, []).append(head)
    return {group: sites for group, sites in found.items() if sites}


def key_count(keys: Any) -> int:
    """How many keys attention was given; quantised ones come in several arrays. 0 where that cannot be told."""
    first = keys[0] if isinstance(keys, tuple | list) and keys else keys
    return int(first.shape[-2]) if isinstance(first, mx.array) and first.ndim > 2 else 0


def mask_kind(mask: Any) -> str:
    """What a mask is, in a word."""
    if mask is None:
        return "none"
    return mask if isinstance(mask, str) else getattr(mask, "kind", "array")


def _returning(calls: Sequence[CacheCall], keys: Any, key: str, lane: int) -> CacheCall | None:
    """The call that gave back these very keys, or that of the cache ``key`` where a model made others of them."""
    for call in reversed(calls):
        if call.returned is keys:
            return call
    own = [call for call in calls if call.key == key]
    return own[lane] if lane < len(own) else None


LAG = 2  # forwards whose digests wait: mlx-lm computes one ahead, so older ones are surely evaluated

READ_ANEW = 32  # of so many updates of a cache one is read in full, or of as many as there are layers


@dataclass
class _RowLogits:
    """What a row's logits said: forward, top ids and logits, and the lens."""

    forward: int
    ids: Any
    logits: Any
    lens: tuple[Any, Any, Any] | None = None


@dataclass(frozen=True)
class RecordingSettings:
    """What is recorded: the capture, the requests' ids and prompt lengths, a text for each token id.

    ``selection`` are the values to keep beside the digests (None: none), by model; ``lens`` gives the logits [rows, V]
    of hidden rows [rows, D] as if the model ended there. ``scored`` are, where a run scores, each request's scored tokens;
    ``pooling`` makes vectors where it embeds.
    """

    capture: Capture
    request_ids: list[str]
    prompt_lengths: list[int]
    text: Callable[[int], str]
    selection: Mapping[str, Selection | None] = field(default_factory=dict)
    lens: Callable[[mx.array], mx.array] | None = None
    scored: Sequence[tuple[int, ...]] = ()
    pooling: Pooling | None = None


@dataclass
class _PendingTokens:
    """Generated tokens and the logits that chose them, until both are known.

    ``verified`` is the last forward that a position was verified in: what an earlier one answered there was rejected.
    """

    chosen: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    answers: dict[tuple[int, int], _RowLogits] = field(default_factory=dict)
    verified: dict[tuple[int, int], int] = field(default_factory=dict)


class Recorder:
    """Implements what the sessions of one run call while they record: that of the target, and of the draft if any."""

    def __init__(
        self, writer: TraceWriter, sites: SiteMap, settings: RecordingSettings, draft: SiteMap | None = None
    ) -> None:
        """``draft`` are the sites of the draft model, placed after ``sites``."""
        self._writer = writer
        self._maps = {TARGET: sites} if draft is None else {TARGET: sites, DRAFT: draft}
        self._ports = sum(len(each.ports) for each in self._maps.values())
        self._settings = settings
        capture = settings.capture
        # What a process holds of a whole row is digested on the host.
        self._on_device = not sites.parts and (
            capture.digest == "device" or (capture.digest == "auto" and mx.default_device() == mx.gpu)
        )
        self._digesters = {
            model: Digester(each, settings.selection.get(model)) for model, each in self._maps.items()
        }
        self._pending: deque[ForwardRecord] = deque()
        self._record: ForwardRecord | None = None
        self._last: ForwardRecord | None = None
        self._texts: set[int] = set()
        self._tokens = _PendingTokens()
        self._native_plans: dict[tuple[Any, ...], int] = {}
        self._eager = False
        # The prompt of a later turn is not known yet.
        self._states = TurnStates() if 0 in settings.prompt_lengths else None
        self._cache: Sequence[Any] = ()
        self.unrecorded: dict[int, str] = dict(sites.unrecorded)
        self.scored_in: str | None = None
        """The dtype of the logits that log-probabilities of given tokens were made of."""
        """The class of the cache of each layer of the target whose entries are not recorded."""
        self.forwards = 0
        self.rows = 0

    # What a session calls.

    def begin(self, forward: Forward, cache: Sequence[Any]) -> None:
        while len(self._pending) >= LAG:
            self._finish(self._pending.popleft())
        sites = self._maps[forward.model]
        self._record = self._last = ForwardRecord(forward, sites, bookkeeping=describe(cache))
        self._cache = cache
        if self._states is not None and forward.model == TARGET:
            self._last.events += self._states.found(forward, cache)
        for segment in forward.segments:
            if segment.phase == "verify":
                for position in range(segment.start, segment.start + segment.count):
                    self._tokens.verified[segment.request, position] = forward.index
        for found in wraps(forward, cache):
            self.event("wrap", model=forward.model, **found)
        budget = self._settings.capture.memory_mb << 20
        # Up to LAG + 1 forwards are held at once.
        self._eager = forward.rows * sites.bytes_per_row * (LAG + 1) > budget
        if self._eager:
            self._drain()

    def site(self, key: str, kind: str, inputs: Arrays, outputs: Arrays, parent: str | None) -> None:
        record = self._record
        if record is None or (not record.forward.logits_used and key == record.sites.head):
            return
        if kind == "embedding":
            # Token ids are int32 in mlx-lm's prefill and uint32 in its decode; the same bits are the same input.
            inputs = [(name, ids.view(mx.int32) if ids.dtype == mx.uint32 else ids) for name, ids in inputs]
            # Nothing else computes such a view: left lazy, reading it later would wait for the forward in flight.
            mx.async_eval(*(ids for _, ids in inputs))
        record.add(key, inputs, outputs)
        if kind == "state":
            record.states.update(
                record.sites.ports[key, name] for name, _ in outputs if (key, name) in record.sites.ports
            )

    def call(self, key: str, taken: TakenPath) -> None:
        if self._record is not None:
            self._record.calls.setdefault(self._record.sites.index[key], []).append(taken)

    def cache_call(self, key: str, keys: mx.array, values: mx.array, calls: list[CacheUpdate]) -> None:
        record = self._record
        write = f"{key}.write"
        if record is None or write not in record.sites.index:
            return
        # One handle of each for all who keep it.
        keys, values = handle(keys), handle(values)
        record.add(write, [("k", keys), ("v", values)])
        layer = record.sites.cache_layers[write]
        segments = record.forward.segments
        packed = record.forward.layout == "packed"
        for lane, update in enumerate(calls):
            lanes = (lane,) if packed else tuple(range(len(segments)))
            slots = (0,) if packed else tuple(s.slot for s in segments)
            columns = segments[lane].count if packed else keys.shape[2]
            unkept = record.sites.unkept.get(write, "")
            fresh, sides = self._fresh(record, write, update), (keys, values)
            found = cache_call(key, layer, update, fresh, sides, columns, (lanes, slots, packed), unkept)
            if found is not None:
                record.caches.append(found)
                if update.known is not None:
                    update.known.recorded = update.known.updates
            elif record.forward.model == TARGET:
                self.unrecorded.setdefault(layer, type(update.cache).__name__)

    def _fresh(self, record: ForwardRecord, write: str, update: CacheUpdate) -> range | None:
        """The columns that have to be read of what a cache gave back; None: all of them."""
        known, sites = update.known, record.sites
        if known is None or known.recorded != known.updates - 1:
            return None
        if self._settings.selection.get(record.forward.model) is not None:
            return None  # values are taken from the arrays themselves
        turns = max(READ_ANEW, len(sites.cache_layers))
        return None if (known.updates + sites.cache_layers[write]) % turns == 0 else update.fresh

    def attended(self, key: str, layer: int | None, keys: Any, mask: Any) -> None:
        """Attention was given ``keys`` under ``mask``, one each for every request where they are apart."""
        record = self._record
        if record is None:
            return
        if layer is not None:
            record.masks[layer] = mask_kind(mask)
        inside, _, again = key.rpartition(".attention")
        pairs = zip(getattr(keys, "parts", (keys,)), getattr(mask, "masks", (mask,)), strict=False)
        for lane, (held, shown) in enumerate(pairs):
            call = _returning(record.caches, held, f"{inside}.cache{again}", lane)
            if call is not None:
                # A model may change its mask in place before it is looked at.
                seen = handle(shown) if isinstance(shown, mx.array) else shown
                columns = key_count(held)
                fewer = 0 < columns < key_count(call.returned) and isinstance(held, mx.array)
                call.readers.append(KeyReader(key, columns, seen, handle(held) if fewer else None))

    def block_done(self, key: str) -> None:
        record = self._record
        if record is None:
            return
        forward = record.forward
        if self._settings.lens is not None and forward.logits_used and forward.model == TARGET:
            port = record.sites.ports[key, "out"]
            rows = self._answering(forward)
            if len(rows[0]):
                hidden = record.arrays[port][mx.array(rows[2]), mx.array(rows[3])]
                record.lens.append(self._settings.lens(hidden))
        if self._eager:
            self._digesters[forward.model].flush(record)

    def end(self, forward: Forward, logits: mx.array) -> None:
        record = self._record
        assert record is not None
        self._record = None
        if self._states is not None and forward.model == TARGET:
            self._states.left(forward, self._cache)
        for call in record.caches:
            call.returned = None
        if forward.logits_used:
            record.add("logits", [], [("in", self._head_out(record, logits)), ("out", logits)])
            if forward.model == TARGET:
                record.logits = logits.astype(logits.dtype)
        if self._settings.pooling is not None:
            record.hidden = record.arrays[record.sites.ports[record.sites.norm or "", "out"]]
        side = list(record.lens)
        side += [array for call in record.caches if call.fresh is not None for _, array in call.parts]
        if self._on_device:
            side += self._on_device_digests(record)
        if side:
            # Evaluated with the logits, so that reading them later waits for nothing.
            mx.async_eval(*([logits] if forward.logits_used else []), *side)
        self._pending.append(record)
        if self._eager:
            self._drain()

    def token(self, request: int, index: int, token: int) -> None:
        """The engine's answer: token ``index`` (from 0) of a request."""
        position = self._settings.prompt_lengths[request] - 1 + index
        self._tokens.chosen[request, position] = (index, token)
        self._emit(self._made(request, position))

    def choice(self, request: int, index: int, logprobs: mx.array) -> None:
        """The log-probabilities [V], evaluated, that token ``index`` of a request is chosen from: after its processors."""
        where = memory(logprobs)
        ids, values = top(as_float32(logprobs)[None], self._settings.capture.top)
        # What a processor forbids is minus infinity, which JSON has not.
        kept = [
            (token, value)
            for token, value in zip(ids[0].tolist(), values[0].tolist(), strict=True)
            if isfinite(value)
        ]
        self.event(
            "choice",
            request=request,
            index=index,
            digest=f"{int(digest_rows(where.numpy()[None], where.dtype)[0]):016x}",
            top_ids=[token for token, _ in kept],
            top_logprobs=[value for _, value in kept],
        )

    def event(self, kind: str, **fields: Any) -> None:
        """What the engine or a cache did in the forward that runs, or after the one that ran last."""
        if kind == "prefix":
            self._digesters[fields.get("model", TARGET)].share(
                fields["request"], fields["from"], fields["tokens"]
            )
        elif kind == "turn":
            self._settings.prompt_lengths[fields["request"]] = fields["tokens"]
            if self._states is not None:
                self._states.turn(fields["request"], fields["from"])
        last = self._last
        line = {"event": kind, "forward": -1 if last is None else last.forward.index, **fields}
        if last is None or last.written:
            self._writer.event(line)
        else:
            last.after.append(line)

    def forget(self, request: int) -> None:
        """No row of a request comes after the forward that ran last, and nobody shares its entries."""
        if self._last is None or self._last.written:
            self._forgotten([request])
        else:
            self._last.ended.append(request)

    def _forgotten(self, requests: Sequence[int]) -> None:
        for request in requests:
            for digester in self._digesters.values():
                digester.forget(request)

    def finish(self) -> None:
        """Digest what is still held."""
        self._drain()

    # How it is done.

    def _head_out(self, record: ForwardRecord, logits: mx.array) -> mx.array:
        port = record.sites.ports.get((record.sites.head or "", "out"))
        return record.arrays.get(port, logits) if port is not None else logits

    def _on_device_digests(self, record: ForwardRecord) -> list[mx.array]:
        for port, array in record.arrays.items():
            axis = record.axis(port)
            record.device[port] = device_rows(array, axis)
        for call in record.caches:
            call.device = [device_entries(array) for _, array in call.parts]
            call.device_given = [device_entries(array) for array in call.given]
        made = (d for call in record.caches for d in (*call.device, *call.device_given))
        return [*record.device.values(), *made]

    def _drain(self) -> None:
        while self._pending:
            self._finish(self._pending.popleft())

    def _answering(self, forward: Forward) -> tuple[Any, Any, Any, Any]:
        """(requests, positions, slots, columns) of the rows whose logits may choose a token."""
        table = ForwardRows.of(forward.segments)
        # A server's requests are many, and those of a forward few.
        told = self._settings.prompt_lengths
        lengths = [told[segment.request] for segment in forward.segments]
        keep = table.position >= np.repeat(lengths, [segment.count for segment in forward.segments]) - 1
        return table.request[keep], table.position[keep], table.slot[keep], table.column[keep]

    def _finish(self, record: ForwardRecord) -> None:
        rows, events = self._digesters[record.forward.model].digest(record)
        forward = record.forward
        caches, wrong = summarise(record, forward)
        line = {
            "forward": forward.index,
            **({} if forward.model == TARGET else {"model": forward.model}),
            "phase": forward.phase,
            "layout": forward.layout,
            "shape": list(forward.shape),
            "rows": [
                {
                    "request": s.request,
                    "slot": lane if forward.layout == "packed" else s.slot,
                    "start": s.start,
                    "count": s.count,
                    "phase": s.phase,
                }
                for lane, s in enumerate(forward.segments)
            ],
            "plan": self._plan(record),
            "caches": caches,
        }
        events = record.events + events + wrong
        if events:
            line["events"] = events
        for group in rows:
            self._see(group.token)
        self._writer.forward(line)
        for group in rows:
            self._writer.rows(self._placed(record.sites, group))
            self.rows += len(group.request)
        for event in record.after:
            self._writer.event(event)
        self._forgotten(record.ended)
        record.written = True
        self.forwards += 1
        if record.logits is not None:
            self._answers(record)
        if record.hidden is not None and self._settings.pooling is not None:
            table = ForwardRows.of(forward.segments)
            hidden = as_float32(record.hidden)[table.slot, table.column]
            self._writer.embeddings(self._settings.pooling.add(table.request, table.position, hidden))

    def _plan(self, record: ForwardRecord) -> int:
        """The number of the forward's plan. Where the kernel plan had no say, it follows from the forward's form."""
        if record.calls:
            return self._writer.plan(plan_calls(record))
        forward = record.forward
        form = forward.model, forward.layout, forward.shape, forward.selected, forward.logits_used
        if form not in self._native_plans:
            self._native_plans[form] = self._writer.plan(plan_calls(record))
        return self._native_plans[form]

    def _placed(self, sites: SiteMap, rows: Rows) -> Rows:
        """``rows`` with a table over the ports of all models."""
        before, after = sites.first_port, self._ports - sites.first_port - len(sites.ports)
        if not (before or after):
            return rows
        return replace(rows, table=(-1,) * before + tuple(rows.table) + (-1,) * after)

    def _answers(self, record: ForwardRecord) -> None:
        requests, positions, slots, columns = self._answering(record.forward)
        assert record.logits is not None
        selected = record.forward.selected
        if selected is not None:
            place = {column: i for i, column in enumerate(selected)}
            columns = np.array([place[int(c)] for c in columns], np.int64)
        if not len(requests):
            return
        k = self._settings.capture.top
        chosen = as_float32(record.logits)[slots, columns]
        if self._settings.scored:
            self.scored_in = DTYPE_NAMES[record.logits.dtype]
            given = [
                self._settings.scored[request][position - self._settings.prompt_lengths[request] + 1]
                for request, position in zip(requests.tolist(), positions.tolist(), strict=True)
            ]
            ids, logits = scores(chosen, given, k)
        else:
            ids, logits = top(chosen, k)
        lens = [as_float32(layer) for layer in record.lens]
        made: list[Generated] = []
        for i, (request, position) in enumerate(zip(requests.tolist(), positions.tolist(), strict=True)):
            answer = _RowLogits(record.forward.index, ids[i], logits[i])
            if lens:
                layers = np.stack([layer[i] for layer in lens])
                answer.lens = (*top(layers, k), layers[:, ids[i][:2]])
            self._tokens.answers[request, position] = answer
            made += self._made(request, position)
        self._emit(made)

    def _made(self, request: int, position: int) -> list[Generated]:
        """A token, once both its id and the logits that chose it are known."""
        found = self._tokens.answers.get((request, position))
        if found is None or (request, position) not in self._tokens.chosen:
            return []
        if self._tokens.verified.get((request, position), found.forward) != found.forward:
            return []
        index, token = self._tokens.chosen.pop((request, position))
        answer = self._tokens.answers.pop((request, position))
        self._see([token, *answer.ids.tolist()])
        lens = None
        if answer.lens is not None:
            ids, logits, contested = answer.lens
            self._see(ids.ravel().tolist())
            lens = Lens(ids[None], logits[None], contested[None])
        one = np.array([request, index, token, answer.forward, position], np.int32)[:, None]
        return [
            Generated(one[0], one[1], one[2], one[3], one[4], answer.ids[None], answer.logits[None], lens)
        ]

    def _emit(self, made: Sequence[Generated]) -> None:
        """Write tokens: in one batch, unless each has a lens of its own."""
        if len(made) > 1 and all(each.lens is None for each in made):
            request, index, token, forward, position, ids = (
                np.concatenate([getattr(each, name) for each in made])
                for name in ("request", "index", "token", "forward", "position", "top_ids")
            )
            logits = np.concatenate([each.top_logits for each in made])
            made = [Generated(request, index, token, forward, position, ids, logits)]
        for each in made:
            self._writer.generated(each)

    def _see(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            number = int(token)
            if number not in self._texts:
                self._texts.add(number)
                self._writer.text(number, self._settings.text(number))
