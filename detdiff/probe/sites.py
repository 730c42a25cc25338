"""A model's linear sites as operations, and its distinct linear shapes with the sites of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches

from mlx.nn.layers.base import Module

from detdiff.engines.mlx.model import LoadedModel
from detdiff.engines.mlx.taps.session import Session
from detdiff.engines.mlx.taps.sites import walk
from detdiff.errors import ProbeSiteUnknown

from .linear import Shape
from .module import Op, module_operation, width_of
from .operation import Operation

AS_LINEAR = ".as_linear"


@dataclass(frozen=True, eq=False)
class Site:
    """A linear, head or norm site of a model, with the model's own weights; only the rows are drawn by the seed."""

    model: str
    site: str
    kind: str
    module: Module
    on: str = "native"
    layout: str = "packed"

    @property
    def name(self) -> str:
        return f"{self.model} {self.site}"

    @property
    def shape(self) -> Shape:
        """K, N, activation dtype and width of a linear site."""
        quantised = "scales" in self.module
        bits, group = (int(self.module.bits), int(self.module.group_size)) if quantised else (None, None)
        return Shape(width_of(self.module), int(self.module["weight"].shape[0]), self.dtype, bits, group)

    @property
    def dtype(self) -> str:
        """Of the activations: that of a dense weight, or of the scales."""
        kept = self.module["scales"] if "scales" in self.module else self.module["weight"]
        name = str(kept.dtype).rpartition(".")[2]
        return name if name in ("float32", "float16", "bfloat16") else "bfloat16"

    def operation(self, seed: int) -> Operation:
        """Raises ProbeBackendUnusable for a backend that cannot run it, and ProbeSiteUnknown for a norm on one."""
        if self.kind == "norm":
            return self._norm()
        op: Op = "head" if self.kind == "head" else "linear"
        method = "as_linear" if self.site.endswith(AS_LINEAR) else "__call__"
        return module_operation(self.module, self.on, self.layout, self.dtype, op=op, method=method)

    def _norm(self) -> Operation:
        if self.on != "native":
            raise ProbeSiteUnknown(
                f"The site {self.site!r} is a norm, which profiles and reference kernels leave native. Leave --on out."
            )
        from .arrays import MlxArrays

        return Operation(
            int(self.module["weight"].shape[0]), self.dtype, MlxArrays(), self.module, self.layout
        )


@dataclass(frozen=True, eq=False)
class ShapeSites:
    """A linear shape and the sites that have it; ``first`` stands for all of them."""

    shape: Shape
    op: Op
    first: Site
    sites: tuple[str, ...]


def sites_of(loaded: LoadedModel, on: str = "native", layout: str = "packed") -> Iterator[Site]:
    """Every linear, head and norm site with a weight, in execution order."""
    modules = {name: module for name, module, _ in walk(loaded.model)}
    found = Session(loaded.model).sites
    name = str(loaded.identity.get("name", "model"))
    for key, place in found.index.items():
        site = found.sites[place]
        module = modules.get(key.partition("#")[0].removesuffix(AS_LINEAR))
        if site.kind in ("linear", "head", "norm") and module is not None and "weight" in module:
            yield Site(name, site.name, site.kind, module, on, layout)


def find_site(loaded: LoadedModel, site: str, on: str = "native", layout: str = "packed") -> Site:
    """The site of that name; raises ProbeSiteUnknown."""
    found = {one.site: one for one in sites_of(loaded, on, layout)}
    if site in found:
        return found[site]
    near = get_close_matches(site, found, n=3, cutoff=0.4) or list(found)[:3]
    raise ProbeSiteUnknown(
        f"The model {loaded.identity.get('name', 'model')!r} has no site {site!r} that works on rows alone (linear, head or "
        f"norm); the nearest of {len(found)} are {', '.join(near)}. `detdiff show TRACE --sites` lists a model's sites."
    )


def shapes_of(loaded: LoadedModel, on: str = "native", layout: str = "packed") -> list[ShapeSites]:
    """The distinct shapes (K, N, dtype, bits, group size, head or not) in the order of their first sites.

    Raises ProbeSiteUnknown for a model without a linear site.
    """
    groups: dict[tuple[Shape, str], list[Site]] = {}
    for site in sites_of(loaded, on, layout):
        if site.kind != "norm":
            groups.setdefault((site.shape, site.kind), []).append(site)
    if not groups:
        raise ProbeSiteUnknown(
            f"The model {loaded.identity.get('name', 'model')!r} has no linear site. Probe a function of your own instead."
        )
    return [
        ShapeSites(shape, "head" if kind == "head" else "linear", sites[0], tuple(one.site for one in sites))
        for (shape, kind), sites in groups.items()
    ]
