"""Which part of a decoder a site plays: sites of two engines have no name in common, and roles have.

An engine says its own sites' roles in its traces' headers (``roles``), by patterns of their names. Nothing is guessed: a
site that no pattern names has no role.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import Site, Trace

from .metrics import Values

Float64 = NDArray[np.float64]
Key = tuple[str, int | None]
"""A role, and its layer; None outside of the layers."""

FIRST: Final = ("embedding",)
LAYER: Final = (
    "attn_norm", "q", "k", "v", "q_norm", "k_norm", "rope_q", "rope_k", "attention", "o", "residual",
    "mlp_norm", "gate", "up", "activation", "down", "block",
)  # fmt: skip
LAST: Final = ("final_norm", "head", "logits")
ROLES: Final = (*FIRST, *LAYER, *LAST)
"""What a decoder of the llama kind computes, in order. ``embedding`` is what enters the first layer, ``residual`` the stream
after attention and ``block`` after the MLP, ``activation`` what the down projection is given."""
FEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    "embedding": (), "attn_norm": ("stream",), "q": ("attn_norm",), "k": ("attn_norm",), "v": ("attn_norm",),
    "q_norm": ("q",), "k_norm": ("k",), "rope_q": ("q_norm", "q"), "rope_k": ("k_norm", "k"),
    "attention": ("rope_q", "rope_k", "v"), "o": ("attention",), "residual": ("stream", "o"),
    "mlp_norm": ("residual",), "gate": ("mlp_norm",), "up": ("mlp_norm",), "activation": ("gate", "up"),
    "down": ("activation",), "block": ("residual", "down"), "final_norm": ("stream",), "head": ("final_norm",),
    "logits": ("head",),
}  # fmt: skip
"""The roles whose values each is computed from; ``stream`` is the block of the layer before, or the embedding."""
_OF_HEADS: Final = ("q", "k", "q_norm", "k_norm", "rope_q", "rope_k")


def place(key: Key) -> tuple[int, int]:
    """Where a role stands in the order of execution."""
    role, layer = key
    if layer is not None:
        return layer, ROLES.index(role)
    return (-1 if role in FIRST else 1 << 31), ROLES.index(role)


def named(key: Key) -> str:
    """A role in words, such as ``gate of layer 3``."""
    return key[0] if key[1] is None else f"{key[0]} of layer {key[1]}"


def fed_by(key: Key, known: Mapping[Key, object], layers: int) -> dict[str, Key]:
    """The keys among ``known`` that feed one, by the names of ``FEEDS``; of ``q_norm`` and ``q`` the first that is there."""
    role, layer = key
    found: dict[str, Key] = {}
    for name in FEEDS[role]:
        own = layer
        if name == "stream":
            before = layers - 1 if layer is None else layer - 1
            other: Key = ("block", before) if before >= 0 else ("embedding", None)
        else:
            other = (name, own)
        if other in known and not (name in ("q", "k") and f"{name}_norm" in found):
            found[name] = other
    return found


@dataclass(frozen=True)
class Roles:
    """The roles of a trace's sites: the site and port that hold each role's value.

    ``without`` are the sites that have no role, those that differ in their layer alone as one. ``neighbours`` says that the
    items of a head that are rotated together lie side by side, as GGUF's llama has them, and not half a head of
    ``head_width`` items apart.
    """

    places: Mapping[Key, tuple[Site, str]]
    without: tuple[str, ...]
    neighbours: bool
    head_width: int | None

    @classmethod
    def of(cls, trace: Trace) -> Roles | None:
        """What a trace says; None where its engine says nothing."""
        told = trace.header.get("roles")
        if told is None:
            return None
        places: dict[Key, tuple[Site, str]] = {}
        named_sites: set[str] = set()
        for role, patterns in told["places"].items():
            for pattern, port in patterns:
                for site in trace.sites:
                    if role not in ROLES or not fnmatchcase(site.name, pattern):
                        continue
                    named_sites.add(site.name)
                    key = (role, site.layer if role in LAYER else None)
                    if port in (*site.inputs, *site.outputs):
                        places.setdefault(key, (site, port))
        return cls(
            dict(sorted(places.items(), key=lambda item: place(item[0]))),
            _without(trace.sites, named_sites),
            bool(told.get("neighbours", False)),
            told.get("head_width"),
        )

    @property
    def layers(self) -> int:
        return 1 + max((layer for _, layer in self.places if layer is not None), default=-1)

    def where(self, key: Key) -> str:
        """Where a role's value is recorded: the site, and its port where that is not its output."""
        site, port = self.places[key]
        return site.name if port == "out" else f"{site.name}.{port}"

    def values(self, trace: Trace, key: Key, rows: Sequence[int] | NDArray[np.int64]) -> RoleValues:
        """The captured values of a role in ``rows``, places in the trace's row index; heads in halves."""
        site, port = self.places[key]
        found = _read(trace, site, port, np.asarray(rows, np.int64))
        width = self.head_width
        if not (self.neighbours and width and key[0] in _OF_HEADS and found.numbers.size):
            return found
        pairs = found.numbers.reshape(len(found.numbers), -1, width // 2, 2)
        return RoleValues(found.known, pairs.swapaxes(-1, -2).reshape(len(found.numbers), -1), found.dtype)


@dataclass(frozen=True, eq=False)
class RoleValues:
    """``known`` bool [rows], and the values of those that are, float64 [known, width], as they were in ``dtype``."""

    known: NDArray[np.bool_]
    numbers: Float64
    dtype: str


def _without(sites: Sequence[Site], with_role: set[str]) -> tuple[str, ...]:
    names: dict[str, int] = {}
    for site in sites:
        if site.name not in with_role:
            # The first number that is the layer's is taken for it.
            name = re.sub(rf"(?<!\d){site.layer}(?!\d)", "*", site.name, count=1)
            names[name] = names.get(name, 0) + 1
    return tuple(name if count == 1 else f"{name} ({count})" for name, count in names.items())


def _read(trace: Trace, site: Site, port: str, rows: NDArray[np.int64]) -> RoleValues:
    number = trace.port_index(site.name, port)
    index = trace.row_index()
    known = np.zeros(len(rows), np.bool_)
    parts: list[tuple[NDArray[np.intp], Float64]] = []
    dtype = ""
    groups = np.stack([index.shard[rows], index.table[rows]], axis=1)
    for shard_number, table in np.unique(groups, axis=0).tolist():
        column = int(trace.tables[table][number])
        shard = trace.shard(shard_number)
        if column < 0 or f"value/{table}/{column}" not in shard.tensors:
            continue
        mine = np.flatnonzero((groups == (shard_number, table)).all(axis=1))
        held = shard.value_rows(table, column)
        at = np.searchsorted(held, index.row[rows[mine]])
        there = np.append(held, -1)[at] == index.row[rows[mine]]
        mine, at = mine[there], at[there]
        if not len(mine):
            continue
        dtype = shard.tensors[f"value/{table}/{column}"].dtype
        numbers = Values(shard.values_at(table, column, at), dtype).numbers().reshape(len(mine), -1)
        parts.append((mine, numbers))
        known[mine] = True
    if not parts:
        return RoleValues(known, np.empty((0, 0)), dtype)
    order = np.argsort(np.concatenate([mine for mine, _ in parts]))
    return RoleValues(known, np.concatenate([numbers for _, numbers in parts])[order], dtype)
