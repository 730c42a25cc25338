"""What is checked around a run: that no request's answer depends on who shares its forwards, and that recording changes nothing.

Taps see RoPE, attention and the cache. A model may mix the rows of a forward in another way (a shift or a convolution
over the sequence, pooling, positions counted by the forward), which runs without an error and is wrong when packed. So a
probe of a few rows runs beside neighbours of other content and order, and alone, and must come out the same. The observer check runs
the first forwards again without recording, and compares logits bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx_lm.sample_utils import greedy_sampler
from numpy.typing import NDArray

from detdiff.engines.mlx.taps.forward import Forward, handle, memory
from detdiff.engines.mlx.taps.kernel_plan import StagedWeights, TakenPath
from detdiff.engines.mlx.taps.session import Session
from detdiff.engines.mlx.taps.sites import Arrays, SiteMap
from detdiff.engines.schedule import Share, Work
from detdiff.errors import LayoutError
from detdiff.scenario import KernelPlan

from .packed_model import PackedModel, refuse_unpackable

Steps = tuple[tuple[int, ...], ...]

PROBE: Steps = ((1, 2), (4,))  # a prompt and a decode row
NEIGHBOUR: Steps = ((5, 6, 2), (7,))
STRANGER: Steps = ((3, 1, 7), (6,))
KERNELS = ("linear", "head", "switch", "attention")  # a backend may choose these by the number of rows
ANY_ROWS = 1 << 20
ROUNDING = 1 / 8  # of the largest logit: far above what rounding does in a few layers of any dtype


@dataclass
class _PortRecording:
    """A session's recording that keeps the probe's rows of every port, lazily."""

    sites: SiteMap
    seen: dict[tuple[int, int], mx.array] = field(default_factory=dict)  # (step, port)

    def begin(self, forward: Forward, cache: Sequence[Any]) -> None:
        self._forward = forward

    def site(self, key: str, kind: str, inputs: Arrays, outputs: Arrays, parent: str | None) -> None:
        for name, array in (*inputs, *outputs):
            self._keep(key, name, array)

    def _keep(self, key: str, name: str, array: mx.array) -> None:
        forward = self._forward
        port = self.sites.ports.get((key, name), -1)
        if port not in self.sites.axes or forward.selected is not None and key == self.sites.head:
            return
        (probe,) = (s for s in forward.segments if s.request == 0)
        rows = slice(probe.column, probe.column + probe.count)
        # The number of the forward is its step: every composition runs prompt and decode together.
        self.seen[forward.index, port] = mx.moveaxis(array, self.sites.axes[port], 1)[:1, rows]

    def end(self, forward: Forward, logits: mx.array) -> None:
        row = forward.selected.index(self._last()) if forward.selected is not None else self._last()
        port = self.sites.ports["logits", "out"]
        self.seen[forward.index, port] = logits[:, row : row + 1]

    def _last(self) -> int:
        (probe,) = (s for s in self._forward.segments if s.request == 0)
        return probe.column + probe.count - 1

    def call(self, key: str, taken: TakenPath) -> None: ...
    def cache_call(self, key: str, keys: mx.array, values: mx.array, calls: Any) -> None: ...
    def attended(self, key: str, layer: int | None, keys: Any, mask: Any) -> None: ...
    def block_done(self, key: str) -> None: ...


def refuse_leaks(model: Module, plan: KernelPlan, staged: StagedWeights | None = None) -> None:
    """Raises LayoutError, naming the module or site, for a model that cannot be packed or mixes requests' rows.

    Runs some 20 rows. Of the plan only the profile is used, since a native path can be the slower one by far.
    """
    refuse_unpackable(model)
    # Row by row, so that a profile's choice by the number of rows is not taken for a leak.
    session = Session(model, KernelPlan(plan.profile, ANY_ROWS if plan.profile else None), staged=staged)
    together = _run(session, (PROBE, NEIGHBOUR), (1, 0))
    for order, requests, change in (
        ((1, 0), (PROBE, STRANGER), "the tokens of the request before it"),
        ((0, 1), (PROBE, NEIGHBOUR), "the order of the requests"),
        ((0,), (PROBE,), "the presence of another request"),
    ):
        other = _run(session, requests, order)
        if not _same_answers(session.sites, together, other):
            _refuse(session.sites, together, other, change)


def _run(session: Session, requests: tuple[Steps, ...], order: tuple[int, ...]) -> _PortRecording:
    """Prompt and decode of ``requests`` in one forward each, their rows in this ``order``; the probe is request 0."""
    work = [
        Work(i, str(i), steps[0], len(steps), 0, frozenset(), greedy_sampler)
        for i, steps in enumerate(requests)
    ]
    rows = _PortRecording(session.sites)
    model = PackedModel(session)
    with session.running(rows):
        for step in range(len(PROBE)):
            model.logits([_share(work[i], requests[i][step], step) for i in order])
    return rows


def _share(work: Work, tokens: tuple[int, ...], step: int) -> Share:
    start, work.done = work.done, work.done + len(tokens)
    return Share(work, start, tokens, 1, "decode" if step else "prefill")


def _same_answers(sites: SiteMap, a: _PortRecording, b: _PortRecording) -> bool:
    """Blocks and logits only: what is wrong inside a block and not after it harms nobody."""
    ports = [sites.ports[key, "out"] for key in (*sites.blocks, "logits")]
    keys = [(step, port) for step in range(len(PROBE)) for port in ports]
    return all(_equal(a.seen[key], b.seen[key]) for key in keys)


def _equal(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and np.array_equal(_bits(a), _bits(b))


def _bits(array: mx.array) -> NDArray[Any]:
    return memory(array).numpy()


def _refuse(sites: SiteMap, a: _PortRecording, b: _PortRecording, change: str) -> None:
    names = {port: key for key, port in sites.ports.items()}
    step, port = next(key for key in sorted(a.seen) if not _equal(a.seen[key], b.seen[key]))
    key, name = names[port]
    site = sites.sites[sites.index[key]]
    if name == "out" and site.kind in KERNELS and _close(sites, a, b):
        return
    raise LayoutError(
        f"The model mixes the rows of a forward: {change} changed a request's rows, first at the site {site.name} "
        f"({name}; {'prompt' if step == 0 else 'decode'} rows). Expected rows that depend on their own request alone, "
        "with positions and masks from the cache: only RoPE and attention can be run per request in the packed layout. "
        'Use layout = "padded" for this model.'
    )


def _close(sites: SiteMap, a: _PortRecording, b: _PortRecording) -> bool:
    """Whether logits differ by rounding at most: a kernel chosen by the number of rows is no leak."""
    port = sites.ports["logits", "out"]
    for step in range(len(PROBE)):
        x, y = (rows.seen[step, port].astype(mx.float32) for rows in (a, b))
        if not bool(mx.all(mx.abs(x - y) <= ROUNDING * mx.abs(x).max())):
            return False
    return True


class LogitsSeen(Exception):
    """Ends a run whose logits have all been seen."""


class FirstLogits:
    """Keeps the logits of the first ``limit`` forwards whose logits an engine uses."""

    def __init__(self, limit: int, *, stop: bool = False) -> None:
        self.limit = limit
        self._stop = stop
        self.kept: list[mx.array] = []

    def __call__(self, forward: Forward, logits: mx.array) -> None:
        if len(self.kept) < self.limit:
            # Only the last column is used by mlx-lm; the rest may never be computed.
            self.kept.append(handle(logits))
        if self._stop and len(self.kept) >= self.limit:
            raise LogitsSeen


def compare_logits(traced: FirstLogits, again: Callable[[FirstLogits], None]) -> dict[str, Any]:
    """The observer block of a trace: how many forwards were run again and whether all bits were equal."""
    count = len(traced.kept)
    if count == 0:
        return {"forwards": 0, "equal": None}
    untraced = FirstLogits(count, stop=True)
    try:
        again(untraced)
    except LogitsSeen:
        pass
    equal = len(untraced.kept) == count and all(
        _same_bits(a, b) for a, b in zip(traced.kept, untraced.kept, strict=True)
    )
    return {"forwards": count, "equal": equal}


def _same_bits(a: mx.array, b: mx.array) -> bool:
    x, y = memory(a), memory(b)
    return x.dtype == y.dtype and np.array_equal(x.numpy(), y.numpy())
