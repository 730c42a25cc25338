"""What one of several processes holds of a model: mlx-lm's own ``shard``, and which part of each row of the whole model its sites show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from mlx.nn.layers import distributed as layers
from mlx.nn.layers.base import Module

from detdiff.engines.mlx.taps.sites import RowPart, SiteMap
from detdiff.errors import EngineRefuses
from detdiff.trace import Site

SAME: Final = "same"
"""Every process holds the whole value."""
SUM: Final = "sum"
"""The processes' parts together are the value, and their digests add up to its digest."""
OWN: Final = "own"
"""Every process has a value of its own, as before an all-reduce."""
_COUNTS: Final = ("n_heads", "n_kv_heads", "num_heads", "num_kv_heads", "num_attention_heads", "num_key_value_heads")  # fmt: skip
_CONTRACTING: Final = ("linear", "head", "switch")


@dataclass(frozen=True)
class PortShare:
    """How a port of one process belongs to the whole model's: SAME, SUM (with the ``part``, where there are values), or OWN;
    ``name`` is the port's in the whole model."""

    how: str
    name: str
    part: RowPart | None = None


@dataclass(frozen=True)
class SiteShares:
    """The sites of one process and, for each of their ports in order, how it belongs to the whole model's."""

    sites: tuple[Site, ...]
    ports: tuple[PortShare, ...]


class ModelShare:
    """What process ``rank`` of ``size`` has of a model whose sites were ``whole`` before it was sharded."""

    def __init__(self, whole: SiteMap, rank: int, size: int) -> None:
        self._whole, self._rank, self._size = whole, rank, size
        self.last: SiteShares | None = None
        """Of the sites that were placed last."""

    def placed(self, sites: SiteMap) -> SiteMap:
        """``sites`` with the part of a whole row that each port holds, and the whole model's numbers of the cache's heads.

        Raises EngineRefuses where a value is no plain part of the whole model's.
        """
        self.last = self._of(sites)
        parts = {port: share.part for port, share in enumerate(self.last.ports) if share.part is not None}
        numbers: dict[int, Any] = {}
        for key in sites.cache_layers:
            mine, whole = sites.sites[sites.index[key]].outputs, self._site(sites, key).outputs
            at = np.array([whole.index(self._entry(sites, key, name)) for name in mine])
            if not np.array_equal(numbers.setdefault(len(mine), at), at):
                raise self._refused(key, "layers with as many heads a process have others of them")
        return replace(sites, parts=parts, head_numbers=numbers)

    def _of(self, sites: SiteMap) -> SiteShares:
        own = self._own(sites)
        found: list[PortShare] = []
        for key, place in sites.index.items():
            site = sites.sites[place]
            for name in (*site.inputs, *site.outputs):
                share = self._share(sites, key, site, name)
                alone = (
                    key in own and name in site.outputs or site.kind == "all_reduce" and name in site.inputs
                )
                found.append(replace(share, how=OWN) if alone and share.how == SAME else share)
        return SiteShares(sites.sites, tuple(found))

    def _site(self, sites: SiteMap, key: str) -> Site:
        place = self._whole.index.get(key)
        if place is None:
            raise self._refused(key, "the whole model has no such site")
        return self._whole.sites[place]

    def _share(self, sites: SiteMap, key: str, site: Site, name: str) -> PortShare:
        if site.kind == "all_reduce" or key == "logits":
            return PortShare(SAME, name)
        whole = self._site(sites, key)
        if site.kind == "cache_write" and name in site.outputs:
            entry = self._entry(sites, key, name)
            return PortShare(SAME if len(site.outputs) == len(whole.outputs) else OWN, entry)
        if name in ("kv", "written", "read"):
            writes = [
                each for each in sites.cache_layers if sites.sites[sites.index[each]].layer == site.layer
            ]
            split = any(
                len(sites.sites[sites.index[each]].outputs) != len(self._site(sites, each).outputs)
                for each in writes
            )
            return PortShare(SUM if split else SAME, name)
        port, other = sites.ports[key, name], self._whole.ports.get((key, name))
        if other is None:
            raise self._refused(key, f"the whole model has no port {name} there")
        mine, theirs = (_row_shape(each, place) for each, place in ((sites, port), (self._whole, other)))
        if mine == theirs:
            return PortShare(SAME, name)
        return PortShare(SUM, name, self._part(key, mine, theirs))

    def _part(self, key: str, mine: tuple[int, ...], whole: tuple[int, ...]) -> RowPart:
        unlike = [axis for axis, (a, b) in enumerate(zip(mine, whole, strict=False)) if a != b]
        if len(mine) != len(whole) or len(unlike) != 1 or mine[unlike[0]] * self._size != whole[unlike[0]]:
            raise self._refused(key, f"a row is {mine} here and {whole} in the whole model")
        count = mine[unlike[0]]
        return RowPart(whole, unlike[0], self._rank * count, count, self._rank == 0)

    def _entry(self, sites: SiteMap, key: str, name: str) -> str:
        """What a cache entry of this process is called in the whole model."""
        side, _, head = name.partition(".")
        mine, whole = (
            sum(each.partition(".")[0] == side for each in site.outputs)
            for site in (sites.sites[sites.index[key]], self._site(sites, key))
        )
        if mine == whole:
            return name
        if mine * self._size != whole:
            raise self._refused(key, f"{mine} of {whole} heads of {side} are here")
        return f"{side}.{self._rank * mine + int(head)}"

    def _own(self, sites: SiteMap) -> set[str]:
        """Keys of sites whose outputs are sums over this process's inputs alone, which an all-reduce between layers adds up."""
        keys = {sites.sites[place].name: key for key, place in sites.index.items()}
        sums = [site for site in sites.sites if site.kind == "all_reduce"]
        order = {site.name: place for place, site in enumerate(sites.sites)}
        found: set[str] = set()
        for key, place in sites.index.items():
            site = sites.sites[place]
            if site.kind not in _CONTRACTING or f"{key}.all_sum" in sites.index:
                continue
            shares = [self._share(sites, key, site, name) for name in (site.inputs[0], site.outputs[0])]
            if [share.how for share in shares] != [SUM, SAME]:
                continue
            inside, parent = [key], site.parent
            while parent is not None and sites.sites[order[parent]].kind != "block":
                if any(each.parent == parent and order[each.name] > place for each in sums):
                    found.update(inside)
                    break
                inside.append(keys[parent])
                parent = sites.sites[order[parent]].parent
        return found

    def _refused(self, key: str, why: str) -> EngineRefuses:
        return EngineRefuses(
            f"The model cannot be recorded over {self._size} processes: at {key}, {why}. Expected that each process holds one run of "
            "rows' items, or all of them. Record it in one process (processes=1), or over another number of them."
        )


def _row_shape(sites: SiteMap, port: int) -> tuple[int, ...]:
    axis = sites.axes.get(port)
    return tuple(n for place, n in enumerate(sites.shapes[port]) if place not in (0, axis))


def shard(model: Module, group: Any) -> None:
    """Leave in ``model`` what this process of ``group`` has of it, by mlx-lm's own ``shard``.

    Raises EngineRefuses for a model without one, for heads that cannot be dealt out evenly, which mlx-lm would cut in pieces, and for
    layers that are split in several segments.
    """
    size = group.size()
    before = dict(_head_counts(model))
    if not callable(getattr(model, "shard", None)):
        raise EngineRefuses(
            f"mlx-lm cannot run a {type(model).__module__.rpartition('.')[2]} model over several processes: it has no shard(). Expected "
            "one that has, such as llama, qwen2, qwen3 or qwen3_moe. Record it in one process (processes=1)."
        )
    odd = next(((name, n) for name, n in before.items() if n % size), None)
    try:
        with _whole_segments():
            model.shard(group)
    except ValueError as error:
        odd_heads = "" if odd is None else f" (it has {odd[1]} {odd[0].rpartition('.')[2]})"
        raise EngineRefuses(
            f"mlx-lm cannot deal this model out to {size} processes{odd_heads}: {str(error).rstrip('.')}. Expected sizes that {size} divides. "
            "Choose another number of processes."
        ) from error
    after = dict(_head_counts(model))
    wrong = next(
        (name for name, n in before.items() if after.get(name, n) != n and after[name] * size != n), None
    )
    if wrong is not None:
        raise EngineRefuses(
            f"This model has {before[wrong]} {wrong.rpartition('.')[2]} at {wrong.rpartition('.')[0]}, which {size} processes cannot share; "
            "mlx-lm does not notice and would cut heads into pieces. Expected a number of processes that divides the heads of queries and of "
            f"keys. {_fitting(before, size)}"
        )


def _fitting(counts: dict[str, int], size: int) -> str:
    common = int(np.gcd.reduce(list(counts.values())))
    fits = [n for n in range(2, common + 1) if common % n == 0]
    numbers = " or ".join(map(str, fits[:4]))
    return f"Choose {numbers} processes." if fits else "Record it in one process (processes=1)."


def _head_counts(model: Module) -> Iterator[tuple[str, int]]:
    for path, module in model.named_modules():
        for name in _COUNTS:
            count = getattr(module, name, None)
            if path and type(count) is int:
                yield f"{path}.{name}", count


@contextmanager
def _whole_segments() -> Iterator[None]:
    """While the block lasts, a layer whose weight is to be split in several segments is refused."""
    native = layers._shard

    def watched(parameters: Any, predicate: Any, group: Any = None) -> Any:
        def asked(path: str, weight: Any) -> Any:
            found = predicate(path, weight)
            if isinstance(found, tuple) and found[1] != 1:
                raise EngineRefuses(
                    f"This model joins several projections in one weight ({path}, in {found[1]} segments), so that what a process has of a "
                    "row is no single run of it, which is not recorded. Record it in one process (processes=1)."
                )
            return found

        return native(parameters, asked, group)

    layers._shard = watched  # type: ignore[assignment]
    try:
        yield
    finally:
        layers._shard = native
