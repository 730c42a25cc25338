"""The answer of a comparison: frozen dataclasses, and nothing else.

Field names are the keys of the JSON answer (``docs/json-schema.md``). ``a`` and ``b`` are the two runs in the order
given. Positions count tokens of a request from 0; forwards count model calls of a run from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, NoReturn

from .flips import (
    EmbeddingDifference,
    Flip,
    Magnitude,
    NotFiniteLogits,
    ScoreDifference,
    ScoredText,
    TextFlip,
    Verification,
)


@dataclass(frozen=True)
class Member:
    """What one forward held of one request: ``rows`` rows from position ``start`` on."""

    request: str
    phase: str
    start: int
    rows: int


@dataclass(frozen=True)
class Composition:
    """Who was in a forward. ``rows`` is the sum over its members, padding not counted."""

    forward: int
    phase: str
    layout: str
    rows: int
    members: tuple[Member, ...]


@dataclass(frozen=True)
class PathUse:
    """One kernel path and the number of sites that took it in a forward."""

    path: str
    sites: int


@dataclass(frozen=True)
class SiteDifference:
    """The first site, in execution order, that differs between two models: no origin, since their weights differ."""

    site: str
    kind: str
    layer: int | None
    position: int
    port: str
    magnitude: Magnitude | None


@dataclass(frozen=True)
class FlipForward:
    """The flip's own forward on each side, and what arose there for this request.

    ``origins`` and ``differing`` count over this request's compared rows of either flip forward. ``paths_equal`` is
    None where a run recorded no kernel plan.
    """

    composition_a: Composition | None
    composition_b: Composition | None
    paths_a: tuple[PathUse, ...]
    paths_b: tuple[PathUse, ...]
    paths_equal: bool | None
    origins: int
    differing: int


@dataclass(frozen=True)
class EntryChange:
    """A cache entry that changed after it was written, as run ``run`` (``a`` or ``b``) saw in ``forward``."""

    run: str
    forward: int
    layer: int | None
    kind: str
    head: int | None
    position: int | None


@dataclass(frozen=True)
class Origin:
    """A site and row whose inputs are bit-equal in both runs and whose outputs are not.

    ``how`` says by which rule: ``leaf``; ``composite`` (arising between two recorded sites, named by ``between``);
    ``changed`` (a cache entry read otherwise than it was written: ``changes``); ``visible`` (every entry up to this
    position was written alike, and yet this row saw others: a mask, offset or length). ``stage`` is ``dtype``,
    ``shape`` or ``bits``. ``rows_a`` and ``rows_b`` are the rows (M) that the operation saw; they and paths are
    None where a run recorded no kernel call for the site.
    """

    site: str
    kind: str
    layer: int | None
    position: int
    how: str
    stage: str
    ports: tuple[str, ...]
    between: tuple[str, ...]
    forward_a: int
    forward_b: int
    rows_a: int | None
    rows_b: int | None
    second_last_a: int | None
    second_last_b: int | None
    path_a: str | None
    path_b: str | None
    rule_a: str | None
    rule_b: str | None
    composition_a: Composition | None
    composition_b: Composition | None
    changes: tuple[EntryChange, ...]
    magnitude: Magnitude | None


@dataclass(frozen=True)
class OriginCount:
    """Origins of one request by site kind, layer and pair of kernel paths."""

    kind: str
    layer: int | None
    path_a: str | None
    path_b: str | None
    count: int


@dataclass(frozen=True)
class CacheEntry:
    """A cache entry that differs: ``kind`` is ``K``, ``V`` or ``state``; ``head`` is the state's number for a state.

    ``written_a`` and ``written_b`` are the forwards that wrote it. ``rewritten_*`` is the forward after which a run
    stored the entry anew in another form, as a cache does that is quantised; None where it did not.
    """

    layer: int | None
    kind: str
    head: int
    position: int
    written_a: int
    written_b: int
    composition_a: Composition | None
    composition_b: Composition | None
    magnitude: Magnitude | None
    rewritten_a: int | None = None
    rewritten_b: int | None = None


@dataclass(frozen=True)
class DifferingEntries:
    """Differing cache entries that the row at position ``alive_at`` could read.

    ``positions`` are inclusive ranges. ``alive_at`` is the flip's row, or the last compared row where nothing flipped.
    """

    count: int
    entries: int
    layers: tuple[int, ...]
    positions: tuple[tuple[int, int], ...]
    alive_at: int


@dataclass(frozen=True)
class LayerGrowth:
    """Differing and compared digests of one layer (None: sites outside the layers)."""

    layer: int | None
    differing: int
    compared: int


@dataclass(frozen=True)
class PositionGrowth:
    """Differing and compared digests of the positions ``first`` to ``last``."""

    first: int
    last: int
    differing: int
    compared: int


@dataclass(frozen=True)
class Growth:
    """How the difference spread over layers and over positions."""

    layers: tuple[LayerGrowth, ...]
    positions: tuple[PositionGrowth, ...]


@dataclass(frozen=True)
class Margin:
    """The margins of one generated token that both runs agree on."""

    index: int
    token: int
    margin_a: float
    margin_b: float


@dataclass(frozen=True)
class Agreement:
    """What each run would have chosen while one was fed the other's tokens.

    Of ``tokens`` choices ``differing`` differ. After the first that does, choices agree again from token ``again`` on
    (None: never), for ``span`` tokens in a row.
    """

    tokens: int
    differing: int
    again: int | None
    span: int


@dataclass(frozen=True)
class Chunk:
    """The part of a prompt in which a request's first origin lies, in one run.

    ``index`` counts its prefill forwards from 0. Of its rows, positions ``first`` to ``last``, those that differ lie in
    ``differing``, inclusive ranges. ``earlier_equal`` says that no row of an earlier part differs.
    """

    run: str
    index: int
    first: int
    last: int
    differing: tuple[tuple[int, int], ...]
    earlier_equal: bool


@dataclass(frozen=True)
class DraftDivergence:
    """The draft model's own rows of a request: how many were compared, digests that differ, and the first origin there.

    ``first`` says that this origin was run before the target's, or that the target has none.
    """

    rows: int
    differing: int
    origin: Origin | None
    first: bool | None


@dataclass(frozen=True)
class RequestDivergence:
    """One request's comparison.

    ``stage`` is the first stage on which it diverged, or None. ``swapped`` is None without a flip or without top-k.
    ``inherited`` is None without a flip; True when the flip's own forward has differences and no origin.
    ``origin`` is the first one in execution order. ``margins`` are the smallest before the flip. ``chunks`` is empty
    unless the origin lies in a prompt; ``forced`` is None unless a run was fed given tokens. Rows are the target's;
    those of a draft model are in ``draft``, and ``origin`` is the draft's where the target has none. ``text`` is where texts
    differ of a request without token ids. ``logits_equal`` says that the logits of the flip's row are bit-equal, so that the
    token was only chosen otherwise; None where that is not known. ``first_site`` is given across models alone. ``scored`` and
    ``embedding`` are given where both runs score, or embed.
    """

    id: str
    identical: bool
    stage: str | None
    prompt_tokens: int
    generated_a: int
    generated_b: int
    rows: int
    differing: int
    flip: Flip | None
    swapped: bool | None
    flip_forward: FlipForward | None
    inherited: bool | None
    origin: Origin | None
    origins: tuple[OriginCount, ...]
    cache_entry: CacheEntry | None
    differing_entries: DifferingEntries | None
    margins: tuple[Margin, ...]
    growth: Growth | None
    chunks: tuple[Chunk, ...]
    forced: Agreement | None
    draft: DraftDivergence | None
    verification: Verification | None
    text: TextFlip | None = None
    scores: ScoreDifference | None = None
    logits_equal: bool | None = None
    not_finite: tuple[NotFiniteLogits, ...] = ()
    first_site: SiteDifference | None = None
    scored: ScoredText | None = None
    embedding: EmbeddingDifference | None = None


@dataclass(frozen=True)
class NotCompared:
    """A request that is not compared, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class Finding:
    """A difference in the workload, or bookkeeping that contradicts the rows.

    ``run`` is ``a``, ``b`` or ``both``; ``what`` names the rule; ``detail`` is a sentence.
    """

    run: str
    what: str
    request: str | None
    forward: int | None
    detail: str


@dataclass(frozen=True)
class EventCount:
    """How often something was done in each run to the caches of ``model`` (``target`` or ``draft``)."""

    event: str
    model: str
    a: int
    b: int


@dataclass(frozen=True)
class Events:
    """What engines and caches did: ``counts`` of all events, and those ``listed`` that tell of a setting's effect."""

    counts: tuple[EventCount, ...]
    listed: tuple[Finding, ...]


@dataclass(frozen=True)
class Compared:
    """What was compared, and what was there and was not.

    ``digests`` counts pairs of digests. ``only_a`` and ``only_b`` are rows up to the flip that one run lacks,
    ``superseded_*`` rows whose position was written again later, ``after_flip_*`` rows that saw other tokens,
    ``token_differs`` rows before the flip whose input token differs. ``one_sided`` counts digests present in one run
    only; ``unattributed`` differing outputs with an input that was not recorded, so that no origin can be claimed.
    ``tokens`` counts generated tokens, and ``reused_*`` rows at a request's start that the other run alone computed, as this
    one took them from a cache.
    """

    requests: int
    rows: int
    ports: int
    digests: int
    differing: int
    only_a: int
    only_b: int
    superseded_a: int
    superseded_b: int
    after_flip_a: int
    after_flip_b: int
    token_differs: int
    one_sided: int
    unattributed: int
    ports_only_a: int
    ports_only_b: int
    tokens: int = 0
    reused_a: int = 0
    reused_b: int = 0


@dataclass(frozen=True)
class RunIdentity:
    """Which run this was. ``model``, ``scenario``, ``environment`` and ``observer`` are the trace's own blocks.

    ``engine`` is the name of what ran it, and ``lacks`` why something is not in its trace, by what: ``sites``, ``cache``, ...
    """

    trace: str
    complete: bool
    forwards: int
    model: Mapping[str, Any]
    scenario: Mapping[str, Any]
    environment: Mapping[str, Any]
    observer: Mapping[str, Any]
    engine: str = "mlx"
    lacks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RoleDifference:
    """How far a role's values are apart in two engines, ``rows`` rows of them, relative to their size.

    A row's difference is the length of a minus b over the longer of the two; ``typical`` is the root mean square over rows,
    ``largest`` the largest, at ``position`` of ``request``. ``growth`` is ``typical`` over that of what the role is computed
    from. ``site_a`` and ``site_b`` are where the values are recorded.
    """

    role: str
    layer: int | None
    site_a: str
    site_b: str
    rows: int
    typical: float
    largest: float
    request: str
    position: int
    growth: float


@dataclass(frozen=True)
class AcrossEngines:
    """Two engines by the roles of their sites, ``aligned`` of which are in both; ``roles`` are those with values in both.

    ``first`` is the first in execution order whose ``growth`` is ten times the usual one, which is no verdict by itself; None
    where none is. ``only_*`` are roles of one run, ``without_role_*`` its sites without any, which are not
    aligned. ``why`` says why no values are compared, and is empty where some are.
    """

    roles: tuple[RoleDifference, ...]
    first: RoleDifference | None
    aligned: int
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    without_role_a: tuple[str, ...]
    without_role_b: tuple[str, ...]
    why: str = ""


@dataclass(frozen=True)
class Divergence:
    """Where two runs diverge. It has no truth value: ask ``identical``.

    ``identical`` needs every request of both runs compared in whole. ``inconclusive`` is true when nothing diverged but
    something was left out. ``stage`` is the first stage that diverged: ``workload``, ``bookkeeping``, ``dtype``,
    ``shape``, ``bits``, ``tokens`` or None. ``first`` is the id of the request with the earliest origin. With
    ``across_models`` the runs may be of two models, and nothing is an origin; ``across_engines`` is there where two engines
    were compared by the roles of their sites, and then nothing is one either.
    """

    identical: bool
    inconclusive: bool
    stage: str | None
    first: str | None
    compared: Compared
    requests: tuple[RequestDivergence, ...]
    not_compared: tuple[NotCompared, ...]
    workload: tuple[Finding, ...]
    bookkeeping: tuple[Finding, ...]
    events: Events
    notes: tuple[str, ...]
    a: RunIdentity
    b: RunIdentity
    across_models: bool = False
    across_engines: AcrossEngines | None = None

    def __bool__(self) -> NoReturn:
        raise TypeError("a Divergence has no truth value; ask .identical")

    def not_kept(self, sides: Iterable[str]) -> Divergence:
        """The same, of traces of ``sides`` (``a``, ``b``) that are gone when it is read."""
        runs = {side: replace(getattr(self, side), trace=f"{side} (not kept)") for side in sides}
        return replace(self, **runs) if runs else self

    def __str__(self) -> str:
        """Its report as text."""
        # Reports are made of comparisons, so that no import here may name them.
        text: str = import_module("detdiff.report").divergence_text(self)
        return text

    def request(self, id: str) -> RequestDivergence:
        """The comparison of request ``id``. Raises KeyError for a request that was not compared."""
        for request in self.requests:
            if request.id == id:
                return request
        raise KeyError(id)
