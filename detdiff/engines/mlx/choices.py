"""The draws of a run, kept by a re-run and computed anew: by each request's own settings, and by any others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import mlx.core as mx
import numpy as np

from detdiff.engines.mlx.taps.forward import Forward, handle
from detdiff.engines.schedule import Work
from detdiff.explain.case import Case, Side
from detdiff.explain.control import CannotRun
from detdiff.scenario import Scenario

from .requests import prepare
from .reruns import Reruns
from .sampling import Processor, Sampler, StateDraw, native_sampler, processors, random_state, sampler
from .serve import serve

Tokens = Mapping[int, mx.array]
"""A token [1] for each draw, by its place."""
Owner = Callable[["Draw"], int]
"""The request whose sampler, settings or tokens a draw is given."""
OWN_SEEDS, ONE_SEED, SEED_ZERO = "own", "once", "zero"


@dataclass(eq=False)
class Draw:
    """One call of a sampler, the one of number ``place`` in a run: for token ``index`` of a request, in forward ``forward``, beside
    the requests ``live`` in the order of their slots.

    ``logits`` [1, V] are the model's; ``logprobs`` [1, V], what the sampler was given, and ``token`` are None for a draw whose token
    nobody asked for.
    """

    place: int
    request: int
    index: int
    forward: int
    live: tuple[int, ...]
    logits: mx.array
    logprobs: mx.array | None = None
    token: int | None = None


def own(draw: Draw) -> int:
    """The owner of a draw of a sound run."""
    return draw.request


class _Enough(Exception):
    """Ends a re-run once all draws were made that are looked at."""


@dataclass
class _DrawWatch:
    """Collects the draws of a re-run, in the order in which its samplers were called."""

    work: Sequence[Work]
    until: Mapping[str, int]
    draws: list[Draw] = field(default_factory=list)
    kept: dict[int, int] = field(default_factory=dict)
    """How many tokens of a request were kept of the turn before."""
    _of: dict[tuple[int, int], Draw] = field(default_factory=dict)

    def on_logits(self, forward: Forward, logits: mx.array) -> None:
        segments = sorted(forward.segments, key=lambda s: (s.slot, s.column))
        answering = [s for s in segments if s.start + s.count >= len(self.work[s.request].prompt)]
        live = tuple(s.request for s in answering)
        for s in answering:
            index = s.start + s.count - len(self.work[s.request].prompt)
            if index > self.until.get(self.work[s.request].id, index):
                raise _Enough
            column = s.column + s.count - 1
            if forward.selected is not None:
                column = forward.selected.index(column)
            row = handle(logits)[s.slot : s.slot + 1, column]
            draw = Draw(len(self.draws), s.request, index, forward.index, live, row)
            self.draws.append(draw)
            self._of[s.request, index] = draw

    def on_event(self, kind: str, **fields: Any) -> None:
        if kind == "turn":
            self.kept[fields["request"]] = fields["kept"]

    def on_choice(self, request: int, index: int, logprobs: mx.array) -> None:
        if (request, index) in self._of:
            self._of[request, index].logprobs = handle(logprobs)[None]

    def on_token(self, request: int, index: int, token: int) -> None:
        if (request, index) in self._of:
            self._of[request, index].token = token


NEAR: Final = 8
"""By how many units in the last place of the largest value log-probabilities may move together that are summed in another order."""


class RunDraws:
    """The draws of one run, ``known`` those whose tokens were asked for, and what others they could have been."""

    def __init__(
        self, scenario: Scenario, work: Sequence[Work], draws: Sequence[Draw], kept: Mapping[int, int]
    ) -> None:
        self.scenario, self.work, self.draws = scenario, work, draws
        self.kept = kept
        self.sampling = [request.sampling for request in scenario.requests]
        self.known = [draw for draw in draws if draw.token is not None and draw.logprobs is not None]
        self.batched = scenario.schedule.kind != "serial"
        self.states: dict[int, int] = {}
        """MLX's random state before each draw from it that was last computed, by the draw's place."""

    @classmethod
    def of(cls, case: Case, side: Side, until: Mapping[str, int]) -> RunDraws:
        """Run a side again as far as the tokens ``until``, by request id. Raises CannotRun for speculation."""
        scenario = case.scenario(side)
        if scenario.speculation is not None:
            raise CannotRun("under speculation proposals are verified, and tokens are not drawn one by one")
        runs = Reruns.of(case)
        sessions, work = runs.sessions(side), prepare(scenario, runs.loaded)
        watch = _DrawWatch(work, until)
        case.budget.begin()
        packed = scenario.schedule.layout == "packed"
        with contextlib.suppress(_Enough), sessions.running(None, watch.on_logits, packed=packed):
            serve(scenario, sessions, work, watch.on_token, watch.on_event, watch.on_choice)
        case.budget.spend(len({draw.forward for draw in watch.draws}))
        return cls(scenario, work, watch.draws, watch.kept)

    # What a sampler is given.

    def tokens(self, draw: Draw, of: int) -> list[int]:
        """The tokens of a request, its prompt's first, that were known when a draw was made."""
        item = self.work[of]
        before = sum(d.request == of and d.forward < draw.forward for d in self.draws)
        return [*item.prompt, *item.generated[: draw.index if of == draw.request else before]]

    def buffered(self, owner: Owner) -> dict[int, list[int]]:
        """The tokens that the processors of each draw are given, by its place, where each request has a buffer of its tokens and
        that of the owner takes a draw's newest token and is given."""
        buffers = {item.index: list(item.prompt[:-1]) for item in self.work}
        found = {}
        for draw in self.draws:
            buffer = buffers[owner(draw)]
            buffer.append(self.tokens(draw, draw.request)[-1])
            found[draw.place] = list(buffer)
        return found

    def given(
        self, draw: Draw, run: Sequence[Processor] | None = None, tokens: Sequence[int] | None = None
    ) -> mx.array:
        """Log-probabilities [1, V] after processors and for tokens, the request's own where none are given."""
        logits = handle(draw.logits)
        run = processors(self.sampling[draw.request]) if run is None else run
        if run:
            history = mx.array(self.tokens(draw, draw.request) if tokens is None else list(tokens))
            for processor in run:
                logits = processor(history, logits)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    def was_given(self, draw: Draw, expected: mx.array) -> bool:
        """Whether these are the log-probabilities that the sampler was given.

        A sum in another order moves all by the same, but for the rounding of each: a bound on the whole would let penalties through
        in low precision.
        """
        assert draw.logprobs is not None
        found, wanted = (np.asarray(array.astype(mx.float32)) for array in (draw.logprobs, expected))
        finite = np.isfinite(wanted)
        if not np.array_equal(finite, np.isfinite(found)):
            return False
        found, wanted = found[finite], wanted[finite]
        if np.array_equal(found, wanted):
            return True
        unit = float(mx.finfo(draw.logprobs.dtype).eps)
        moved, size = found - wanted, np.abs(wanted)
        least = int(np.argmin(size))
        shift = float(moved[least])
        if abs(shift) > NEAR * unit * max(1.0, float(size.max())):
            return False
        return bool(np.all(np.abs(moved - shift) <= unit * (size + size[least] + 2 * abs(shift))))

    # What it chooses.

    def sampler(self, request: int, **changes: Any) -> Sampler:
        """A new sampler of a request, of its settings or of changed ones."""
        native = native_sampler(self.work[request])
        special = native.special if isinstance(native, StateDraw) else ()
        return sampler(replace(self.sampling[request], **changes), special)

    def from_state(self, request: int) -> bool:
        """Whether a request draws from MLX's random state."""
        return isinstance(native_sampler(self.work[request]), StateDraw)

    def chosen(self, made: Sequence[Sampler], owner: Owner = own, seeds: str = OWN_SEEDS) -> Tokens:
        """What these samplers, one a request, choose when that of each draw's owner is called in its turn.

        MLX's random state is set where a run sets it to the request's seed (``own``), there only the first time (``once``), or to
        the seed 0 (``zero``).
        """
        found: dict[int, mx.array] = {}
        begun: set[int] = set()
        for draw in self.draws:
            begins = draw.request not in begun and not (begun and self.batched)
            if begins and not (begun and seeds == ONE_SEED):
                mx.random.seed(0 if seeds == SEED_ZERO else self._seed(draw.request))
            begun.add(draw.request)
            given = self.given(draw) if draw.logprobs is None else draw.logprobs
            if self.from_state(draw.request):
                self.states[draw.place] = random_state()
            found[draw.place] = made[owner(draw)](given)
        return found

    def _seed(self, request: int) -> int:
        """That of the request; for a batch, of the first one that draws from MLX's random state."""
        every = [each.seed for number, each in enumerate(self.sampling) if self.from_state(number)]
        return every[0] if self.batched and every else self.sampling[request].seed

    def unlike(self, tokens: Tokens) -> list[Draw]:
        """The draws whose tokens are not these."""
        mx.eval([tokens[draw.place] for draw in self.known])
        return [draw for draw in self.known if int(np.asarray(tokens[draw.place]).ravel()[0]) != draw.token]

    def samplers(self, make: Callable[[int], Sampler] | None = None) -> list[Sampler]:
        """One of each request."""
        return [(make or self.sampler)(item.index) for item in self.work]

    # Whose else it could be.

    def others(self, wrong: Iterable[Draw]) -> list[tuple[str, Owner]]:
        """Ways in which draws are given what is another request's, in words that come after what is given, each way once."""
        found: list[tuple[str, Owner]] = []
        seen = {tuple(map(own, self.draws))}
        for words, owner in self._ways({draw.request for draw in wrong}):
            owners = tuple(map(owner, self.draws))
            if owners not in seen:
                seen.add(owners)
                found.append((words, owner))
        return found

    def _ways(self, wrong: set[int]) -> list[tuple[str, Owner]]:
        ids = {item.index: item.id for item in self.work[:16]}
        return [
            ("at its place in a list that was not shortened when a request left", self._unshortened),
            ("of the request after it, in a shifted list", _Beside(1)),
            ("of the request before it, in a shifted list", _Beside(-1)),
            *((f"of {id}", _Always(to)) for to, id in ids.items()),
            *((f"of {id}", _Always(to, at)) for at in sorted(wrong) for to, id in ids.items()),
        ]

    def _unshortened(self, draw: Draw) -> int:
        first = {d.request: d.forward for d in reversed(self.draws)}
        joined = list(dict.fromkeys(d.request for d in self.draws))
        place = draw.live.index(draw.request)
        # A batch that begins has lists of its own.
        begins = all(first[request] == draw.forward for request in draw.live)
        return draw.live[place] if begins else joined[place]


@dataclass(frozen=True)
class _Beside:
    """The owner is so many slots further, in a ring."""

    step: int

    def __call__(self, draw: Draw) -> int:
        return draw.live[(draw.live.index(draw.request) + self.step) % len(draw.live)]


@dataclass(frozen=True)
class _Always:
    """The owner is one request, for all draws or for those of the request ``at``."""

    to: int
    at: int | None = None

    def __call__(self, draw: Draw) -> int:
        return self.to if self.at in (None, draw.request) else draw.request
