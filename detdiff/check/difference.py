"""Where an engine's answers for one request part: alone, and beside others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from detdiff.compare.metrics import Values, ulp_distance
from detdiff.errors import EngineAnswerInvalid
from detdiff.report.words import count, escaped
from detdiff.scenario import Request

from .generation import Answer, Rows


@dataclass(frozen=True)
class Compared:
    """What was compared: generated tokens, their log-probabilities, and rows summed over sites."""

    tokens: int = 0
    log_probabilities: int = 0
    rows: int = 0
    sites: int = 0

    def add(self, other: Compared) -> Compared:
        """Sums; ``sites`` is the most of the two."""
        return Compared(
            self.tokens + other.tokens,
            self.log_probabilities + other.log_probabilities,
            self.rows + other.rows,
            max(self.sites, other.sites),
        )


@dataclass(frozen=True)
class TokenFlip:
    """The first generated token that differs; None where that run has stopped."""

    index: int
    alone: int | None
    beside: int | None


@dataclass(frozen=True)
class ScoreDifference:
    """The first log-probability with other bits, of ``differing`` up to the flip. ``ulp`` is None between two dtypes, and
    where one is not finite."""

    index: int
    alone: float
    beside: float
    ulp: int | None
    differing: int


@dataclass(frozen=True)
class SiteDifference:
    """The first tapped row that differs, in the order of forwards and, in each, of sites.

    ``birth`` says that its inputs are equal, ``False`` that they differ too, and ``None`` that they are not known.
    ``alone`` and ``beside`` are the rows (M) of the two calls, where the engine said them. ``sites`` of ``tapped``
    differ somewhere.
    """

    site: str
    position: int
    birth: bool | None
    alone: int | None
    beside: int | None
    sites: int
    tapped: int


@dataclass(frozen=True)
class Difference:
    """One request alone against the same beside ``neighbours``; ``drawn`` says by which seed."""

    request: Request
    drawn: str
    neighbours: tuple[str, ...]
    compared: Compared
    flip: TokenFlip | None
    score: ScoreDifference | None
    site: SiteDifference | None

    @property
    def equal(self) -> bool:
        return self.flip is None and self.score is None and self.site is None

    def said(self) -> Iterator[str]:
        """The difference in sentences, the effect first."""
        if self.equal:
            return
        if self.flip is not None:
            yield f"token {self.flip.index} is {_token(self.flip.beside)}, and {_token(self.flip.alone)} alone"
        else:
            yield f"none of {count(self.compared.tokens, 'token')} differs"
        if self.score is not None:
            size = "" if self.score.ulp is None else f", {self.score.ulp:,} ULP apart"
            yield (
                f"the log-probability of token {self.score.index} is {self.score.beside!r}, and {self.score.alone!r} alone{size}; "
                f"{self.score.differing:,} of {self.compared.log_probabilities:,} differ"
            )
        if self.site is not None:
            yield _site(self.site)


def difference(
    request: Request, where: tuple[str, tuple[str, ...]], alone: Answer, beside: Answer, *, exact: bool
) -> Difference:
    """Compare two answers. ``exact`` compares log-probabilities and tapped rows too; what follows the first different token
    has other inputs and is left out.

    Raises EngineAnswerInvalid where one run gave what the other did not.
    """
    shared = min(len(alone.tokens), len(beside.tokens))
    flip = next(
        (
            TokenFlip(k, *(run.tokens[k] if k < len(run.tokens) else None for run in (alone, beside)))
            for k in range(max(len(alone.tokens), len(beside.tokens)))
            if k >= shared or alone.tokens[k] != beside.tokens[k]
        ),
        None,
    )
    same = shared if flip is None else flip.index
    compared = Compared(max(len(alone.tokens), len(beside.tokens)))
    score = site = None
    if exact:
        score, scores = _score(request, alone.log_probabilities, beside.log_probabilities, same)
        # A position's inputs are the tokens up to it.
        prompt = len(request.tokens or ())
        site, rows = _first_site(request, alone, beside, prompt + same)
        compared = Compared(compared.tokens, scores, rows, len(alone.taps))
    drawn, beside_whom = where
    neighbours = tuple(name for name in beside_whom if name != request.id)
    return Difference(request, drawn, neighbours, compared, flip, score, site)


def _score(
    request: Request, alone: Values | None, beside: Values | None, same: int
) -> tuple[ScoreDifference | None, int]:
    if alone is None or beside is None:
        if alone is not beside:
            _refuse(request, "log-probabilities")
        return None, 0
    a, b = Values(alone.data[:same], alone.dtype), Values(beside.data[:same], beside.dtype)
    if a.dtype != b.dtype:
        differing = np.ones(same, np.bool_)
    else:
        differing = a.bits() != b.bits()
    if not differing.any():
        return None, same
    at = int(differing.argmax())
    x, y = float(a.numbers()[at]), float(b.numbers()[at])
    known = a.dtype == b.dtype and np.isfinite(x) and np.isfinite(y)
    ulp = int(ulp_distance(a, b)[at]) if known else None
    return ScoreDifference(at, x, y, ulp, int(differing.sum())), same


def _first_site(
    request: Request, alone: Answer, beside: Answer, limit: int
) -> tuple[SiteDifference | None, int]:
    if alone.taps.keys() != beside.taps.keys():
        _refuse(request, "taps of other sites")
    prompt = len(request.tokens or ())
    rows, parted, found = 0, set[str](), list[tuple[int, int, int, str]]()
    for order, (site, a) in enumerate(alone.taps.items()):
        b = beside.taps[site]
        wanted = {position for position in a.out if position < limit}
        if wanted != {position for position in b.out if position < limit}:
            _refuse(request, f"rows of {site!r} at other positions")
        rows += len(wanted)
        for position in wanted:
            if a.out[position] != b.out[position]:
                parted.add(site)
                # The prompt's positions go first, then a forward for each token.
                found.append((max(position - prompt + 1, 0), order, position, site))
    if not found:
        return None, rows
    found.sort()
    birth, (_, _, position, site) = _birth(alone.taps, beside.taps, found)
    counts = (alone.taps[site].m.get(position), beside.taps[site].m.get(position))
    return SiteDifference(site, position, birth, *counts, len(parted), len(alone.taps)), rows


def _birth(
    alone: Mapping[str, Rows], beside: Mapping[str, Rows], found: list[tuple[int, int, int, str]]
) -> tuple[bool | None, tuple[int, int, int, str]]:
    """The first row with equal inputs, or the first of all."""
    for each in found:
        a, b = alone[each[3]].inputs, beside[each[3]].inputs
        if a is not None and b is not None and a[each[2]] == b[each[2]]:
            return True, each
    first = alone[found[0][3]].inputs, beside[found[0][3]].inputs
    return (None if None in first else False), found[0]


def _refuse(request: Request, what: str) -> NoReturn:
    raise EngineAnswerInvalid(
        f"For request {request.id!r} the engine gave {what} in one run and not in the other; expected the same kinds of answer "
        "alone and in a batch, so that all of it can be compared. Correct the engine, or leave them out in both."
    )


def _token(token: int | None) -> str:
    return "the end" if token is None else str(token)


def _site(found: SiteDifference) -> str:
    birth = {
        True: "its inputs are bit-equal and its outputs are not",
        False: "its inputs differ too, from something that is not tapped",
        None: "whether its inputs are equal is not known",
    }[found.birth]
    rows = (
        ""
        if found.alone is None or found.beside is None
        else f", M = {found.alone} alone and {found.beside} here"
    )
    return (
        f"first different site {escaped(found.site)}, position {found.position}{rows}: {birth}; {found.sites:,} of "
        f"{count(found.tapped, 'tapped site')} {'differ' if found.sites != 1 else 'differs'}"
    )
