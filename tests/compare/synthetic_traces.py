"""Small traces of a made-up model whose every port is a hash of what it was computed from.

An injected fault changes one port of one row; everything computed from it changes by itself, as in a real model.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Generated, Rows, Site, Trace, TraceWriter, format_ranges, ports_of

PHASES = ("prefill", "decode")
Row = dict[tuple[str, str], int]


def site_list(layers: int, recurrent: bool = False) -> tuple[Site, ...]:
    """The sites of the made-up model; with ``recurrent``, layer 0 has a recurrent state instead of attention."""
    one = ("in",), ("out",)
    sites = [Site("embed_tokens", "embedding", None, *one)]
    for n in range(layers):
        block = f"layers.{n}"
        sites.append(Site(f"{block}.norm1", "norm", n, *one, block))
        if recurrent and n == 0:
            mixer = f"{block}.mixer"
            sites += [
                Site(f"{mixer}.in_proj", "linear", n, *one, mixer),
                Site(f"{mixer}.state", "state", n, (), ("0",), mixer),
                Site(f"{mixer}.out_proj", "linear", n, *one, mixer),
                Site(mixer, "recurrent", n, *one, block),
            ]
        else:
            attn = f"{block}.attn"
            sites += [Site(f"{attn}.{x}_proj", "linear", n, *one, attn) for x in "qkv"]
            sites += [
                Site(f"{attn}.cache.write", "cache_write", n, ("k", "v"), ("K.0", "K.1", "V.0", "V.1"), attn),
                Site(f"{attn}.cache.read", "cache_read", n, ("written",), ("read",), attn),
                Site(f"{attn}.attention", "attention", n, ("in", "kv"), ("out",), attn),
                Site(f"{attn}.o_proj", "linear", n, *one, attn),
                Site(attn, "attn_block", n, *one, block),
            ]
        sites += [
            Site(f"{block}.norm2", "norm", n, *one, block),
            Site(f"{block}.mlp.up", "linear", n, *one, f"{block}.mlp"),
            Site(f"{block}.mlp.down", "linear", n, *one, f"{block}.mlp"),
            Site(f"{block}.mlp", "mlp", n, *one, block),
            Site(block, "block", n, *one),
        ]
    sites += [Site("norm", "norm", None, *one), Site("lm_head", "head", None, *one)]
    return (*sites, Site("logits", "logits", None, *one))


@dataclass(frozen=True)
class Fault:
    """Changes one port of one row, in the given write of its position (None: in all)."""

    site: str
    port: str
    request: int
    position: int
    write: int | None = None


@dataclass(frozen=True)
class Ask:
    """One request: prompt ids and the ids that the run generates."""

    id: str
    prompt: tuple[int, ...]
    generated: tuple[int, ...]

    def fed(self, position: int) -> int:
        return (self.prompt + self.generated)[position]


Span = tuple[int, int, int]
"""(request, first position, rows) of one request in a forward."""


@dataclass(frozen=True)
class Plan:
    """How to write a trace; every field has the value of an ordinary run.

    With ``whole`` n, linear sites take ``reference/gemm`` for whole groups of n rows and ``reference/gemv`` for the rest.
    """

    asks: Sequence[Ask]
    forwards: Sequence[Sequence[Span]]
    faults: Sequence[Fault] = ()
    layers: int = 2
    recurrent: bool = False
    path: Callable[[int], str] = lambda rows: "native"
    whole: int | None = None
    events: Mapping[int, list[dict[str, Any]]] = field(default_factory=dict)
    absent: frozenset[tuple[str, str]] = frozenset()
    skip: frozenset[int] = frozenset()
    header: Mapping[str, Any] = field(default_factory=dict)
    logits: Mapping[tuple[int, int], Sequence[tuple[int, float]]] = field(default_factory=dict)
    words: Mapping[int, str] = field(default_factory=dict)
    complete: bool = True
    shard_forwards: int = 512


def serial(asks: Sequence[Ask], chunk: int = 64, extra: bool = False) -> list[list[Span]]:
    """One request after the other, one row a forward after the prompt; ``extra`` runs one row past the last token."""
    forwards: list[list[Span]] = []
    for number, ask in enumerate(asks):
        forwards += [[(number, s, min(chunk, len(ask.prompt) - s))] for s in range(0, len(ask.prompt), chunk)]
        rows = len(ask.generated) - 1 + extra
        forwards += [[(number, len(ask.prompt) + n, 1)] for n in range(rows)]
    return forwards


def together(asks: Sequence[Ask]) -> list[list[Span]]:
    """All requests at once: one forward of all prompts, then one row of each."""
    forwards: list[list[Span]] = [[(n, 0, len(ask.prompt)) for n, ask in enumerate(asks)]]
    for step in range(max(len(ask.generated) for ask in asks) - 1):
        forwards.append(
            [(n, len(a.prompt) + step, 1) for n, a in enumerate(asks) if step < len(a.generated) - 1]
        )
    return forwards


def mix(*parts: object) -> int:
    """A 64-bit hash; two CRCs are enough to keep a few thousand ports apart."""
    text = repr(parts).encode()
    return zlib.crc32(text) << 32 | zlib.crc32(text[::-1] + b"x")


class Model:
    """Computes the ports of one row after the other, with a cache and states per request."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.sites = site_list(plan.layers, plan.recurrent)
        self.faults = {(f.site, f.port, f.request, f.position, f.write) for f in plan.faults}
        self.writes: Counter[tuple[int, int]] = Counter()
        self.entries: dict[tuple[int, str], dict[int, list[int]]] = {}
        self.states: dict[tuple[int, str], int] = {}

    def row(self, request: int, position: int, last: bool) -> Row:
        self.at = (request, position)
        self.writes[self.at] += 1
        self.out: Row = {}
        token = self.plan.asks[request].fed(position)
        x = self.leaf("embed_tokens", mix("token", token))
        for n in range(self.plan.layers):
            x = self.block(f"layers.{n}", x, last)
        x = self.leaf("norm", x)
        if last:
            x = self.leaf("lm_head", x)
            self.leaf("logits", x)
        return self.out

    def port(self, site: str, name: str, value: int) -> int:
        here = (site, name, *self.at)
        value ^= 0x5555 if {(*here, None), (*here, self.writes[self.at] - 1)} & self.faults else 0
        self.out[site, name] = value
        return value

    def leaf(self, site: str, x: int) -> int:
        x = self.port(site, "in", x)
        # A head and the logits after it are one and the same array.
        return self.port(site, "out", x if site == "logits" else mix(site, x))

    def block(self, name: str, x: int, last: bool) -> int:
        x = self.port(name, "in", x)
        y = self.leaf(f"{name}.norm1", x)
        mixer = self.plan.recurrent and name == "layers.0"
        y = self.mixer(f"{name}.mixer", y, last) if mixer else self.attention(f"{name}.attn", y)
        x = self.port(f"{name}.norm2", "in", mix("add", x, y))
        y = self.port(f"{name}.mlp", "in", self.port(f"{name}.norm2", "out", mix("norm2", x)))
        y = mix("act", self.leaf(f"{name}.mlp.up", y))
        y = self.port(f"{name}.mlp", "out", self.leaf(f"{name}.mlp.down", y))
        return self.port(name, "out", mix("add", x, y))

    def attention(self, name: str, x: int) -> int:
        request, position = self.at
        x = self.port(name, "in", x)
        q, k, v = (self.leaf(f"{name}.{p}_proj", x) for p in "qkv")
        write, read = f"{name}.cache.write", f"{name}.cache.read"
        k, v = self.port(write, "k", k), self.port(write, "v", v)
        entries = [
            self.port(write, f"{s}.{h}", mix(s, h, given))
            for s, given in (("K", k), ("V", v))
            for h in (0, 1)
        ]
        ledger = self.entries.setdefault((request, name), {})
        ledger[position] = entries
        written = self.port(read, "written", mix([ledger[p] for p in range(position + 1)]))
        found = self.port(read, "read", written)
        q = self.port(f"{name}.attention", "in", q)
        kv = self.port(f"{name}.attention", "kv", found)
        y = self.port(f"{name}.attention", "out", mix("attention", q, kv))
        return self.port(name, "out", self.leaf(f"{name}.o_proj", y))

    def mixer(self, name: str, x: int, last: bool) -> int:
        x = self.port(name, "in", x)
        y = self.leaf(f"{name}.in_proj", x)
        key = (self.at[0], name)
        state = mix("state", self.states.get(key, 0), y)
        if last:
            state = self.port(f"{name}.state", "0", state)
        self.states[key] = state
        return self.port(name, "out", self.leaf(f"{name}.out_proj", mix("read", state, y)))


def write_trace(path: Path, plan: Plan) -> Trace:
    """Write the trace that ``plan`` describes and open it."""
    model = Model(plan)
    header: dict[str, Any] = {
        "scenario": {"schedule": "serial", "layout": "packed"},
        "model": {"name": "made-up", "config_sha256": "c" * 64, "weights_sha256": "w" * 64},
        "environment": {"detdiff": "0"},
        "requests": [
            {"id": a.id, "tokens": list(a.prompt), "max_tokens": len(a.generated)} for a in plan.asks
        ],
        "sites": model.sites,
        "observer": {"checked": True},
        **plan.header,
    }
    ports = [(model.sites[p.site].name, p.name) for p in ports_of(model.sites)]
    with TraceWriter(path, header, shard_forwards=plan.shard_forwards) as writer:
        for number, spans in enumerate(plan.forwards):
            _write_forward(writer, plan, model, number, spans, ports)
        for token in {t for a in plan.asks for t in (*a.prompt, *a.generated)}:
            writer.text(token, plan.words.get(token, f" t{token}"))
        writer.finish(complete=plan.complete)
    return Trace.open(path)


def _write_forward(
    writer: TraceWriter,
    plan: Plan,
    model: Model,
    number: int,
    spans: Sequence[Span],
    ports: list[tuple[str, str]],
) -> None:
    total = sum(count for _, _, count in spans)
    linear = [n for n, site in enumerate(model.sites) if site.kind in ("linear", "head")]
    others = [n for n in range(len(model.sites)) if n not in linear]
    path = plan.path(total)
    calls = [
        {"path": name, "rule": rule, "rows": total, "second_last": total, "sites": format_ranges(sites)}
        for name, rule, sites in ((path, f"{total} rows -> {path}", linear), ("native", "", others))
    ]
    if plan.whole is not None:
        groups = total - total % plan.whole
        parts = [("reference/gemm", 0, groups), ("reference/gemv", groups, total)]
        calls = [
            {**calls[0], "path": name, "rule": f"fours -> {name}", "at": format_ranges(range(first, last))}
            for name, first, last in parts
            if first < last
        ] + calls[1:]
    phases = ["decode" if start >= len(plan.asks[r].prompt) else "prefill" for r, start, _ in spans]
    line: dict[str, Any] = {
        "forward": number,
        "phase": phases[0] if len(set(phases)) == 1 else "mixed",
        "layout": "packed",
        "shape": [1, total],
        "rows": [
            {"request": r, "slot": slot, "start": start, "count": count, "phase": phases[slot]}
            for slot, (r, start, count) in enumerate(spans)
        ],
        "plan": writer.plan(calls),
        "caches": [],
    }
    if number in plan.events:
        line["events"] = plan.events[number]
    writer.forward(line)
    for slot, (request, start, count) in enumerate(spans):
        for position in range(start, start + count):
            row = model.row(request, position, position == start + count - 1)
            if number not in plan.skip:
                _write_row(
                    writer, plan, row, ports, (request, position, number, slot, PHASES.index(phases[slot]))
                )
        position = start + count - 1
        rewritten = any(
            r == request and s <= position < s + n for f in plan.forwards[number + 1 :] for r, s, n in f
        )
        if not rewritten:
            _write_token(writer, plan, request, position, number)


def _write_row(
    writer: TraceWriter,
    plan: Plan,
    row: Row,
    ports: list[tuple[str, str]],
    numbers: tuple[int, int, int, int, int],
) -> None:
    request, position, forward, slot, phase = numbers
    columns: dict[int, int] = {}
    table = []
    for port in ports:
        # Equal values share a column, as the very same array does in a recorded trace.
        present = port in row and port not in plan.absent
        table.append(columns.setdefault(row[port], len(columns)) if present else -1)
    writer.rows(
        Rows(
            request=one(request),
            position=one(position),
            forward=one(forward),
            slot=one(slot),
            phase=one(phase),
            token=one(plan.asks[request].fed(position)),
            table=tuple(table),
            digests=np.array([list(columns)], np.uint64),
        )
    )


def one(number: int) -> NDArray[np.int32]:
    return np.array([number], np.int32)


def _write_token(writer: TraceWriter, plan: Plan, request: int, position: int, forward: int) -> None:
    ask = plan.asks[request]
    index = position - len(ask.prompt) + 1
    if not 0 <= index < len(ask.generated):
        return
    token = ask.generated[index]
    top = plan.logits.get((request, index), [(token, 2.0), (token + 1, 1.0)])
    for id, _ in top:
        writer.text(id, plan.words.get(id, f" t{id}"))
    ids, logits = np.array([[id for id, _ in top]], np.int32), np.array([[x for _, x in top]], np.float32)
    writer.generated(
        Generated(one(request), one(index), one(token), one(forward), one(position), ids, logits)
    )
