"""A pair of long traces, written from whole arrays: a flip near the end, arising in one row long before.

Run ``a`` runs the requests one after the other. In run ``b`` the follower's prompt shares a forward with one row of the
anchor, whose linear calls take another kernel path there, in one layer with other bits. The row's cache entries differ
from that layer on; later rows read them, and differ from a layer on that varies from row to row as rounding swallows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import PHASES, Generated, Lens, Rows, Site, Trace, TraceWriter, format_ranges, ports_of

FOLLOWER = 64
"""Prompt tokens of the follower, which generates two."""

_ANSWER = 2
_CHUNK = 512
_TOP = 4
_WORDS = 400
_OTHER = np.uint64(0x5555)

Bool = NDArray[np.bool_]
Span = tuple[int, int, int]  # request, first position, rows


@dataclass(frozen=True)
class Big:
    """The sizes of a pair. ``prompt`` tokens precede the anchor's first; ``origin`` is a position and a layer."""

    positions: int
    layers: int
    sites: int

    @property
    def prompt(self) -> int:
        return max(1, self.positions // 5)

    @property
    def tokens(self) -> int:
        """How many the anchor generates; the last one is not run."""
        return self.positions - self.prompt + 1

    @property
    def origin(self) -> tuple[int, int]:
        return self.prompt + self.tokens // 20, min(3, self.layers - 1)

    @property
    def flip(self) -> int:
        """The index of the first generated token that differs."""
        return self.tokens - 1 - max(1, self.tokens // 100)


def big_pair(folder: Path, positions: int = 5000, layers: int = 32, sites: int = 13) -> tuple[Trace, Trace]:
    """Write and open both runs below ``folder``: an anchor of ``positions`` rows and a short follower.

    A layer has ``sites`` sites, at least 12; further ones are linear sites of its MLP.
    """
    made = _Maker(Big(positions, layers, sites))
    return made.write(folder / "a", "a"), made.write(folder / "b", "b")


def big_sites(layers: int, sites: int) -> tuple[Site, ...]:
    """The sites of the made-up model."""
    one = ("in",), ("out",)
    found = [Site("embed_tokens", "embedding", None, *one)]
    for n in range(layers):
        block = f"layers.{n}"
        attn, mlp = f"{block}.attn", f"{block}.mlp"
        found.append(Site(f"{block}.norm1", "norm", n, *one, block))
        found += [Site(f"{attn}.{x}_proj", "linear", n, *one, attn) for x in "qkv"]
        found += [
            Site(f"{attn}.cache.write", "cache_write", n, ("k", "v"), ("K.0", "K.1", "V.0", "V.1"), attn),
            Site(f"{attn}.attention", "attention", n, ("in", "kv"), ("out",), attn),
            Site(f"{attn}.o_proj", "linear", n, *one, attn),
            Site(attn, "attn_block", n, *one, block),
            Site(f"{block}.norm2", "norm", n, *one, block),
        ]
        found += [Site(f"{mlp}.linear_{i}", "linear", n, *one, mlp) for i in range(sites - 11)]
        found += [Site(mlp, "mlp", n, *one, block), Site(block, "block", n, *one)]
    found += [Site("norm", "norm", None, *one), Site("lm_head", "head", None, *one)]
    return (*found, Site("logits", "logits", None, *one))


def _value_names(sites: tuple[Site, ...]) -> list[str]:
    """Which array is at each port: ports of one array share a column, as in a recorded trace."""
    same = {"embed_tokens.in": "token", "embed_tokens.out": "0.x"}
    layers = sum(site.kind == "block" for site in sites)
    linears = sum(site.name.startswith("layers.0.mlp.linear_") for site in sites)
    for n in range(layers):
        block = f"layers.{n}"
        attn, mlp = f"{block}.attn", f"{block}.mlp"
        after = f"{n + 1}.x"
        same |= {f"{block}.in": f"{n}.x", f"{block}.norm1.in": f"{n}.x", f"{block}.norm1.out": f"{n}.n1"}
        same |= {f"{attn}.{x}_proj.in": f"{n}.n1" for x in "qkv"} | {f"{attn}.in": f"{n}.n1"}
        same |= {f"{attn}.{x}_proj.out": f"{n}.{x}" for x in "qkv"} | {f"{attn}.attention.in": f"{n}.q"}
        same |= {f"{attn}.cache.write.{x}": f"{n}.{x}" for x in "kv"}
        same |= {f"{attn}.cache.write.{e}": f"{n}.{e}" for e in ("K.0", "K.1", "V.0", "V.1")}
        same |= {f"{attn}.attention.kv": f"{n}.kv", f"{attn}.attention.out": f"{n}.att"}
        same |= {f"{attn}.o_proj.in": f"{n}.att", f"{attn}.o_proj.out": f"{n}.o", f"{attn}.out": f"{n}.o"}
        same |= {f"{block}.norm2.in": f"{n}.x2", f"{block}.norm2.out": f"{n}.n2", f"{mlp}.in": f"{n}.n2"}
        for i in range(linears):
            same |= {f"{mlp}.linear_{i}.in": f"{n}.h{i}.in" if i else f"{n}.n2"}
            same |= {f"{mlp}.linear_{i}.out": f"{n}.h{i}.out"}
        same |= {f"{mlp}.out": f"{n}.h{linears - 1}.out", f"{block}.out": after}
    same |= {"norm.in": f"{layers}.x", "norm.out": "normed", "lm_head.in": "normed"}
    same |= {"lm_head.out": "logits", "logits.in": "logits", "logits.out": "logits"}
    return [same[f"{sites[port.site].name}.{port.name}"] for port in ports_of(sites)]


class _Maker:
    def __init__(self, big: Big) -> None:
        self.big, self.sites = big, big_sites(big.layers, big.sites)
        names = _value_names(self.sites)
        self.columns = {name: n for n, name in enumerate(dict.fromkeys(names))}
        with_logits = tuple(self.columns[name] for name in names)
        # The head runs for the last row of a forward alone, and its column is the last.
        without = tuple(-1 if name == "logits" else self.columns[name] for name in names)
        self.tables = without, with_logits
        draw = np.random.default_rng(5)
        width = len(self.columns)
        lengths = (big.positions, FOLLOWER + _ANSWER - 1)
        self.digests = [draw.integers(1 << 63, size=(n, width), dtype=np.uint64) for n in lengths]
        self.fed = [draw.integers(_WORDS, size=n + 1, dtype=np.int32) for n in lengths]
        self.differ = self._differences(draw)
        self.margin = draw.gamma(1.2, 1.5, big.tokens).astype(np.float32)
        self.moved = np.where(
            np.arange(big.tokens) + big.prompt - 1 < big.origin[0], 0, draw.normal(0, 0.01, big.tokens)
        ).astype(np.float32)
        self.margin[big.flip], self.moved[big.flip] = 0.004, -0.009
        before = slice(0, big.flip)
        self.margin[before] = np.maximum(self.margin[before], np.abs(self.moved[before]) + np.float32(0.001))
        self.layer_noise = draw.normal(0, 1, (big.tokens, big.layers)).astype(np.float32)

    def _differences(self, draw: np.random.Generator) -> Bool:
        """Which columns of which of the anchor's rows differ, bool [positions, columns]."""
        big = self.big
        row, layer = big.origin
        start = (
            layer + draw.geometric(0.2, big.positions) - 1 + (draw.random(big.positions) < 0.1) * big.layers
        )
        waves = 1 + np.sin(np.arange(big.positions) / (big.positions / 25))
        start = start + (waves * big.layers / 8).astype(np.int64)
        position = np.arange(big.positions)
        start[row], start[:row] = layer, big.layers + 1
        differ = np.zeros((big.positions, len(self.columns)), dtype=bool)
        early = ("x", "n1", "q", "k", "v", "K.0", "K.1", "V.0", "V.1")
        for n in range(big.layers):
            for name in [name for name in self.columns if name.startswith(f"{n}.")]:
                kind = name.split(".", 1)[1]
                differ[:, self.columns[name]] = start < n if kind in early else start <= n
            if n == layer:
                differ[row, [self.columns[f"{n}.{kind}"] for kind in early[2:]]] = True
            written = differ[:, self.columns[f"{n}.K.0"]]
            differ[:, self.columns[f"{n}.kv"]] = np.logical_or.accumulate(written)
        for name in (f"{big.layers}.x", "normed", "logits"):
            differ[:, self.columns[name]] = start < big.layers
        # Rows after the flip saw other tokens, and the flip's own row chose another.
        differ[position >= big.prompt + big.flip] = True
        differ[big.prompt + big.flip - 1, [self.columns[name] for name in ("normed", "logits")]] = True
        differ[big.prompt + big.flip - 1, self.columns[f"{big.layers}.x"]] = True
        return differ

    def forwards(self, run: str) -> list[list[Span]]:
        big = self.big
        found: list[list[Span]] = [
            [(0, first, min(_CHUNK, big.prompt - first))] for first in range(0, big.prompt, _CHUNK)
        ]
        found += [[(0, position, 1)] for position in range(big.prompt, big.positions)]
        other: list[Span] = [(1, 0, FOLLOWER), *((1, FOLLOWER + n, 1) for n in range(_ANSWER - 1))]
        if run == "a":
            return found + [[span] for span in other]
        shared = next(n for n, spans in enumerate(found) if spans[0][1] == big.origin[0])
        return [
            [*spans, *other[max(0, n - shared) :][:1]] if n >= shared else spans
            for n, spans in enumerate(found)
        ]

    def write(self, path: Path, run: str) -> Trace:
        big = self.big
        fed = [*self.fed]
        if run == "b":
            fed[0] = np.where(np.arange(len(fed[0])) >= big.prompt + big.flip, fed[0] + 1, fed[0]).astype(
                np.int32
            )
        digests = [self.digests[0] ^ (self.differ * _OTHER if run == "b" else np.uint64(0)), self.digests[1]]
        header: dict[str, Any] = {
            "scenario": {"schedule": "serial" if run == "a" else "continuous", "layout": "packed"},
            "model": {"name": "made-up", "config_sha256": "c" * 64, "weights_sha256": "w" * 64},
            "environment": {"detdiff": "0"},
            "requests": [
                {"id": "anchor", "tokens": self.fed[0][: big.prompt].tolist(), "max_tokens": big.tokens},
                {"id": "follower", "tokens": self.fed[1][:FOLLOWER].tolist(), "max_tokens": _ANSWER},
            ],
            "sites": self.sites,
            "observer": {"checked": True, "equal": True, "forwards": 2},
        }
        with TraceWriter(path, header) as writer:
            for token in range(_WORDS + 1):
                writer.text(token, f" t{token}")
            forwards = self.forwards(run)
            for first in range(0, len(forwards), 500):
                some = forwards[first : first + 500]
                for number, spans in enumerate(some, first):
                    writer.forward(self._line(writer, number, spans))
                for rows in self._rows(some, first, fed, digests):
                    writer.rows(rows)
            for generated in self._generated(forwards, fed, run):
                writer.generated(generated)
            writer.finish()
        return Trace.open(path)

    def _line(self, writer: TraceWriter, number: int, spans: list[Span]) -> dict[str, Any]:
        total = sum(count for _, _, count in spans)
        linear = [n for n, site in enumerate(self.sites) if site.kind in ("linear", "head")]
        path = f"reference/candle-metal/{'mv' if total <= 4 else 'mm'}"
        calls = [
            {"path": name, "rule": rule, "rows": total, "second_last": total, "sites": format_ranges(sites)}
            for name, rule, sites in (
                (path, f"{total} rows -> {path}", linear),
                ("native", "", set(range(len(self.sites))) - set(linear)),
            )
        ]
        phases = [self._phase(span) for span in spans]
        rows = [
            {"request": r, "slot": 0, "start": start, "count": count, "phase": phase}
            for (r, start, count), phase in zip(spans, phases, strict=True)
        ]
        phase = phases[0] if len(set(phases)) == 1 else "mixed"
        shape = {"layout": "packed", "shape": [1, total], "rows": rows, "caches": []}
        return {"forward": number, "phase": phase, **shape, "plan": writer.plan(calls)}

    def _phase(self, span: Span) -> str:
        return "prefill" if span[1] < (self.big.prompt, FOLLOWER)[span[0]] else "decode"

    def _rows(
        self,
        forwards: list[list[Span]],
        first: int,
        fed: list[NDArray[np.int32]],
        digests: list[NDArray[np.uint64]],
    ) -> Iterator[Rows]:
        """The rows of some forwards, in stretches that have one table and are of one request."""
        parts = []
        for number, spans in enumerate(forwards, first):
            for request, start, count in spans:
                phase = PHASES.index(self._phase((request, start, count)))
                if count > 1:
                    parts.append((0, request, range(start, start + count - 1), number, phase))
                parts.append((1, request, range(start + count - 1, start + count), number, phase))
        for (table, request), run in groupby(parts, key=lambda part: part[:2]):
            stretch = list(run)
            sizes = [len(positions) for _, _, positions, _, _ in stretch]
            position = np.concatenate([np.arange(p.start, p.stop) for _, _, p, _, _ in stretch]).astype(
                np.int32
            )
            forward = np.repeat([part[3] for part in stretch], sizes).astype(np.int32)
            phase = np.repeat([part[4] for part in stretch], sizes).astype(np.int32)
            zero = np.zeros(len(position), np.int32)
            found = digests[request][position]
            yield Rows(
                request=zero + request,
                position=position,
                forward=forward,
                slot=zero,
                phase=phase,
                token=fed[request][position],
                table=self.tables[table],
                digests=found if table else found[:, :-1],
            )

    def _generated(
        self, forwards: list[list[Span]], fed: list[NDArray[np.int32]], run: str
    ) -> Iterator[Generated]:
        big = self.big
        for request, (prompt, count) in enumerate(((big.prompt, big.tokens), (FOLLOWER, _ANSWER))):
            position = np.arange(prompt - 1, prompt - 1 + count, dtype=np.int32)
            last = {
                start + rows - 1: n
                for n, spans in enumerate(forwards)
                for r, start, rows in spans
                if r == request
            }
            token = fed[request][position + 1]
            margin = self.margin if not request else self.margin[:count]
            if run == "b" and not request:
                margin = np.abs(margin + self.moved).astype(np.float32)
            ids = (token[:, None] + np.arange(_TOP) * np.array([1, 1, 7, 7])) % _WORDS
            # At the flip run b has the two highest the other way round.
            flipped = run == "b" and not request
            if flipped:
                ids[big.flip, 1] = token[big.flip] - 1
            top = 20 - np.cumsum(
                np.column_stack([np.zeros(count), margin, *[np.full(count, 0.5)] * 2]), axis=1
            )
            noise = self.layer_noise[:count] * np.linspace(1, 0, big.layers, dtype=np.float32)
            if flipped:
                # The other token leads here, against the same preference of each layer.
                noise[big.flip] *= -1
            turn = np.linspace(-1, 1, big.layers, dtype=np.float32)
            lead = np.float32(margin)[:, None] * turn + noise
            contested = np.stack([20 + lead / 2, 20 - lead / 2], axis=2).astype(np.float32)
            order = np.argsort(-contested, axis=2, kind="stable")
            zero = np.zeros(count, np.int32)
            yield Generated(
                request=zero + request,
                index=np.arange(count, dtype=np.int32),
                token=token,
                forward=np.array([last[p] for p in position.tolist()], np.int32),
                position=position,
                top_ids=ids.astype(np.int32),
                top_logits=top.astype(np.float32),
                lens=Lens(
                    np.take_along_axis(np.repeat(ids[:, None, :2], big.layers, axis=1), order, axis=2).astype(
                        np.int32
                    ),
                    np.take_along_axis(contested, order, axis=2),
                    contested,
                ),
            )
