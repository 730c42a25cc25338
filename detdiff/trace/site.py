"""Sites and ports: what a trace records values of, in execution order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from detdiff.errors import SiteListError


@dataclass(frozen=True)
class Site:
    """A named place in the model; ``parent`` is the composite site that holds it, or None."""

    name: str
    kind: str
    layer: int | None
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parent: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "layer": self.layer,
            "inputs": list(self.inputs),
            "outputs": list(self.outputs),
            "parent": self.parent,
        }

    @classmethod
    def from_json(cls, item: object) -> Site:
        """Raises SiteListError unless ``item`` has exactly the fields of a site, each of its type."""
        if not isinstance(item, Mapping):
            raise SiteListError(f"A site is {item!r}; expected an object. Record the trace again.")
        found = dict(item)
        name, kind, layer, parent = (found.get(key) for key in ("name", "kind", "layer", "parent"))
        ports = (found.get("inputs"), found.get("outputs"))
        ok = (
            set(found) == {"name", "kind", "layer", "inputs", "outputs", "parent"}
            and isinstance(name, str)
            and name != ""
            and isinstance(kind, str)
            and kind != ""
            and (layer is None or (type(layer) is int and layer >= 0))
            and (parent is None or isinstance(parent, str))
            and all(isinstance(side, list | tuple) for side in ports)
            and all(isinstance(port, str) and port != "" for side in ports for port in side or ())
        )
        if not ok:
            raise SiteListError(
                f"The site {name!r} is written as {str(found)[:200]}; expected exactly the fields name, kind, "
                "layer, inputs, outputs and parent, each of its own type. Record the trace again."
            )
        inputs, outputs = (tuple(side or ()) for side in ports)
        return cls(str(name), str(kind), layer, inputs, outputs, parent)


@dataclass(frozen=True)
class Port:
    """One side of a site: ``site`` is the site's index, ``name`` unique within that site."""

    site: int
    name: str
    is_input: bool


def ports_of(sites: Iterable[Site]) -> tuple[Port, ...]:
    """All ports in the order that tables use: for each site its inputs, then its outputs."""
    ports: list[Port] = []
    for index, site in enumerate(sites):
        ports += [Port(index, name, True) for name in site.inputs]
        ports += [Port(index, name, False) for name in site.outputs]
    return tuple(ports)


def check_sites(sites: Sequence[Site]) -> None:
    """Raises SiteListError for a repeated name, a repeated port, or a parent that is not listed later."""
    place = {site.name: index for index, site in enumerate(sites)}
    for index, site in enumerate(sites):
        if place[site.name] != index:
            raise SiteListError(
                f"The site {site.name!r} is listed twice; expected every site once, in execution order. "
                "Record the trace again."
            )
        names = site.inputs + site.outputs
        if len(set(names)) != len(names):
            raise SiteListError(
                f"The site {site.name!r} has the ports {names}; expected every port name once within a site. "
                "Record the trace again."
            )
        if site.parent is not None and place.get(site.parent, -1) <= index:
            raise SiteListError(
                f"The site {site.name!r} names the parent {site.parent!r}; expected a site that is listed "
                "later, because a composite completes after its children. Record the trace again."
            )


def format_ranges(indices: Iterable[int]) -> str:
    """Ascending indices as text: (0, 1, 2, 5) is "0-2,5"."""
    runs: list[list[int]] = []
    for index in sorted(set(indices)):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_ranges(text: str, limit: int) -> tuple[range, ...]:
    """The runs of ``format_ranges``; raises ValueError unless ascending and all below ``limit``."""
    runs: list[range] = []
    for part in text.split(",") if text else ():
        ends = part.split("-")
        if len(part) > 32 or len(ends) > 2 or not all(end.isascii() and end.isdigit() for end in ends):
            raise ValueError(text)
        run = range(int(ends[0]), int(ends[-1]) + 1)
        if not run or run.stop > limit or (runs and run.start < runs[-1].stop):
            raise ValueError(text)
        runs.append(run)
    return tuple(runs)
