"""Series made by hand for the tests of pictures and pages: a small one with every part, a long one, and hostile text."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from detdiff.compare.divergence import Member, PathUse
from detdiff.compare.grids import Grid
from detdiff.compare.series import ForwardPoint, LensPoint, RequestSeries, Series, Threshold, TokenPoint

MV, MM = "reference/candle-metal/mv", "reference/candle-metal/mm"
SITES = ("norm1", "attn.q_proj", "attn.k_proj", "attn.cache.write", "attn.attention", "attn.o_proj", "mlp")
ENTRIES = ("K head 0", "K head 1", "V head 0", "V head 1")
HOSTILE = "</svg><script>alert(1)</script>\x00\x1b[31m\u202eסוף\ud800&\"'"


def grid(
    name: str, rows: tuple[str, ...], state: np.ndarray, share: np.ndarray, ulp: np.ndarray | None = None
) -> Grid:
    rel = None if ulp is None else (ulp * np.float32(2**-23)).astype(np.float32)
    return Grid(name, rows, state.astype(np.uint8), share.astype(np.uint8), ulp, rel)


def layered(layers: int, start: np.ndarray, origin: tuple[int, int], seed: int, ulps: bool) -> list[Grid]:
    """The layers of a request and then the sites of each; ``start`` is the layer from which a position differs."""
    draw = np.random.default_rng(seed)
    positions = len(start)
    names = tuple(f"layer {n}" for n in range(layers))
    ulp = None
    if ulps:
        ulp = np.exp2(draw.uniform(0, 18, (layers, positions))).astype(np.float32).round()
    differs = np.arange(layers)[:, None] >= start[None, :]
    state = np.where(differs, 2, 1)
    share = np.where(differs, draw.integers(20, 256, differs.shape), 0)
    state[origin], share[origin] = 3, 90
    found = [grid("layers", names, state, share, None if ulp is None else np.where(differs, ulp, np.nan))]
    for n in range(layers):
        part, some = (
            np.repeat(state[n : n + 1], len(SITES), axis=0),
            np.repeat(share[n : n + 1], len(SITES), 0),
        )
        part[:1], some[:1] = np.where(start < n, 2, 1), np.where(start < n, 200, 0)
        part[part == 3] = 1
        if n == origin[0]:
            part[:, origin[1]] = [1, 3, 3, 2, 2, 2, 2]
        some = np.where(part > 1, np.maximum(some, 1), 0)
        sized = None if ulp is None else np.where(part > 1, ulp[n][None, :], np.nan).astype(np.float32)
        rows = tuple(f"layers.{n}.{site}" for site in SITES)
        found.append(grid(names[n], rows, part, some, sized))
    return found


def entries(layers: int, start: np.ndarray) -> tuple[Grid, ...]:
    found = []
    for n in range(layers):
        state = np.repeat(np.where(start <= n, 2, 1)[None, :], len(ENTRIES), axis=0)
        state[1] = np.where(np.arange(len(start)) % 7 == 3, state[1], 1)
        found.append(grid(f"layer {n}", ENTRIES, state, np.where(state > 1, 255, 0)))
    return tuple(found)


def tokens(
    prompt: int, margins: list[float], deltas: list[float | None], first: int = 30
) -> tuple[TokenPoint, ...]:
    return tuple(
        TokenPoint(n, prompt - 1 + n, first + n, f" t{first + n}", margin, delta)
        for n, (margin, delta) in enumerate(zip(margins, deltas, strict=True))
    )


def point(
    forward: int, members: list[Member], events: tuple[str, ...] = (), model: str = "target"
) -> ForwardPoint:
    rows = sum(member.rows for member in members)
    path = MV if rows <= 1 else MM
    return ForwardPoint(
        forward, model, rows, tuple(members), (PathUse(path, 28), PathUse("native", 20)), path, rows, events
    )


def thresholds() -> tuple[Threshold, ...]:
    return tuple(Threshold(run, 1, 2, MV, MM) for run in "ab")


def small() -> Series:
    """A flip at token 4 of ``anchor`` (prompt 8, 6 tokens, 4 layers), origin at position 9 in layer 1; follower is equal."""
    start = np.array([9, 9, 9, 9, 9, 9, 9, 9, 9, 1, 2, 1])
    layers, *sites = layered(4, start, (1, 9), 3, ulps=True)
    anchor = RequestSeries(
        id="anchor",
        prompt=8,
        flip_index=4,
        flip_position=11,
        positions=12,
        layers=layers,
        sites=tuple(sites),
        entries=entries(4, start),
        tokens_a=tokens(8, [2.5, 0.8, 1.25, 0.03, 0.004, 1.5], [0.0, 0.0, 0.006, -0.011, -0.009, None]),
        tokens_b=tokens(8, [2.5, 0.8, 1.256, 0.019, 0.005, 0.7], [None] * 6, 31),
        lens=tuple(
            LensPoint(n, a, b)
            for n, (a, b) in enumerate([(-1.25, -1.3), (-0.4, -0.5), (0.3, -0.1), (0.004, -0.005)])
        ),
        origin_forwards=(2, 2),
        flip_forwards=(4, 4),
    )
    none = np.full(6, 9)
    layers, *sites = layered(4, none, (0, 0), 4, ulps=False)
    equal = [
        replace(each, state=np.ones_like(each.state), share=np.zeros_like(each.share))
        for each in (layers, *sites)
    ]
    follower = RequestSeries(
        id="follower",
        prompt=5,
        flip_index=None,
        flip_position=None,
        positions=6,
        layers=equal[0],
        sites=tuple(equal[1:]),
        entries=(),
        tokens_a=tokens(5, [1.5, 0.0], [0.0, 0.0]),
        tokens_b=tokens(5, [1.5, 0.0], [None, None]),
        lens=(),
    )
    a = [point(0, [Member("anchor", "prefill", 0, 8)])]
    a += [point(n, [Member("anchor", "decode", 7 + n, 1)]) for n in range(1, 6)]
    a += [point(6, [Member("follower", "prefill", 0, 5)]), point(7, [Member("follower", "decode", 5, 1)])]
    b = [point(0, [Member("anchor", "prefill", 0, 8)]), point(1, [Member("anchor", "decode", 8, 1)])]
    b.append(point(2, [Member("anchor", "decode", 9, 1), Member("follower", "prefill", 0, 5)]))
    b.append(point(3, [Member("anchor", "decode", 10, 1), Member("follower", "decode", 5, 1)]))
    b += [point(4, [Member("anchor", "decode", 11, 1)], ("trim of anchor, 3 asked, 3 done",))]
    b += [point(5, [Member("anchor", "decode", 12, 1)], ("wrap of anchor",))]
    return Series((anchor, follower), tuple(a), tuple(b), thresholds())


def large(positions: int = 5000, layers: int = 32, seed: int = 7) -> Series:
    """A flip near the end of ``anchor``, arising soon after its prompt; states vary from position to position."""
    draw = np.random.default_rng(seed)
    prompt = positions // 5
    origin = min(3, layers - 1), prompt + positions // 20
    start = draw.geometric(0.2, positions) + (draw.random(positions) < 0.1) * layers
    start[: origin[1]] = layers + 1
    start[origin[1]] = origin[0]
    found, *sites = layered(layers, start, origin, seed, ulps=False)
    count = positions - prompt
    margins = draw.gamma(1.2, 1.5, count)
    deltas = np.where(np.arange(count) + prompt - 1 < origin[1], 0.0, draw.normal(0, 0.01, count))
    margins[-1], deltas[-1] = 0.004, -0.009
    lens = tuple(
        LensPoint(n, float(x), float(x - 0.02 * n))
        for n, x in enumerate(np.linspace(-1.5, 0.3, layers) + draw.normal(0, 0.1, layers))
    )
    anchor = RequestSeries(
        id="anchor",
        prompt=prompt,
        flip_index=count - 1,
        flip_position=positions - 2,
        positions=positions,
        layers=found,
        sites=tuple(sites),
        entries=entries(layers, start),
        tokens_a=tokens(prompt, margins.tolist(), deltas.tolist()),
        tokens_b=tokens(prompt, (margins + 0.001).tolist(), [None] * count, 31),
        lens=lens,
        origin_forwards=(origin[1] - prompt + 1, origin[1] - prompt + 1),
        flip_forwards=(count - 1, count - 1),
    )
    a = [point(0, [Member("anchor", "prefill", 0, prompt)])]
    a += [point(n, [Member("anchor", "decode", prompt + n - 1, 1)]) for n in range(1, count)]
    b = list(a)
    n = origin[1] - prompt + 1
    other = Member("follower", "prefill", 0, 64)
    b[n] = point(n, [*a[n].members, other], ("trim of anchor, 1 asked, 1 done",))
    return Series((anchor,), tuple(a), tuple(b), thresholds())


def hostile() -> Series:
    """The small series with markup, control characters, a lone surrogate and a very long text wherever a text stands."""
    found, long = small(), "x" * 1_000_000
    first = found.requests[0]
    rows = tuple(f"{HOSTILE}{n}" for n in range(len(first.layers.rows)))
    anchor = replace(
        first,
        id=HOSTILE,
        layers=replace(first.layers, name=HOSTILE, rows=rows),
        tokens_a=tuple(replace(token, text=HOSTILE) for token in first.tokens_a),
        tokens_b=tuple(replace(token, text=long) for token in first.tokens_b),
    )
    follower = replace(found.requests[1], id=long)
    names = {"anchor": HOSTILE, "follower": long}

    def renamed(each: ForwardPoint) -> ForwardPoint:
        members = tuple(replace(member, request=names[member.request]) for member in each.members)
        return replace(
            each, members=members, linear_path=f"{each.linear_path}{HOSTILE}", events=(HOSTILE, long)
        )

    a, b = (tuple(renamed(each) for each in run) for run in (found.a, found.b))
    seen = tuple(replace(each, path_after=HOSTILE, path_before=long) for each in found.thresholds)
    return Series((anchor, follower), a, b, seen)
