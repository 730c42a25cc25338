"""Hypothesis strategies for batches: prompts, arrivals, schedules, whole compositions.

What they draw shrinks to the smallest batch that fails: the fewest requests, the shortest prompts of the smallest token ids,
arrivals at 0, the smallest row budget, and no other setting that is not needed. Needs hypothesis, which detdiff does not
install; everything else in detdiff works without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from detdiff.errors import HypothesisMissing, ScenarioRangeError, words_of
from detdiff.scenario import LAYOUTS, Request, Scenario, Schedule

try:
    from hypothesis import strategies as st
    from hypothesis.strategies import SearchStrategy
except ImportError as error:
    raise HypothesisMissing(
        f"detdiff.strategies needs hypothesis ({words_of(error)}). Install it: pip install hypothesis."
    ) from error

__all__ = ["arrivals", "compositions", "prompts", "row_counts", "schedules"]

KINDS = ("static", "continuous")
CHUNK = Schedule().prefill_chunk


def row_counts(most: int = 16, *, least: int = 1) -> SearchStrategy[int]:
    """A number of rows M, ``least`` to ``most``; shrinks to ``least``."""
    _check(1 <= least <= most, f"numbers of rows from {least} to {most}", "1 or more, the smaller one first")
    return st.integers(least, most)


def prompts(vocabulary: int = 256, *, shortest: int = 1, longest: int = 8) -> SearchStrategy[tuple[int, ...]]:
    """A prompt: token ids below ``vocabulary``, ``shortest`` to ``longest`` of them; shrinks to few zeros."""
    _check(vocabulary >= 1, f"a vocabulary of {vocabulary}", "1 token at least")
    _check(
        1 <= shortest <= longest, f"prompts of {shortest} to {longest} tokens", "1 or more, the shorter first"
    )
    return st.lists(st.integers(0, vocabulary - 1), min_size=shortest, max_size=longest).map(tuple)


def arrivals(requests: int, *, latest: int = 8) -> SearchStrategy[tuple[int, ...]]:
    """When each of ``requests`` requests arrives, in forwards: the first at 0, none before the one in front of it, none more
    than ``latest`` after it. Shrinks to all at 0.
    """
    _check(requests >= 1, f"{requests} requests", "1 at least")
    _check(latest >= 0, f"arrivals up to {latest}", "0 or more")
    gaps = st.tuples(*[st.integers(0, latest)] * (requests - 1))
    return gaps.map(lambda found: tuple(accumulate(found, initial=0)))


def schedules(
    *,
    kinds: Sequence[str] = KINDS,
    layouts: Sequence[str] = LAYOUTS,
    requests: int = 4,
    most_rows: int = 16,
) -> SearchStrategy[Schedule]:
    """A schedule for up to ``requests`` requests: its kind, layout and limits.

    Shrinks to the first of ``kinds`` and of ``layouts``, to the smallest row budget (which layout packed has, up to
    ``most_rows`` or none), and to no limit on active requests and no prefill chunk.
    """
    kinds, layouts = ([each] if isinstance(each, str) else list(each) for each in (kinds, layouts))
    _check(bool(kinds) and bool(layouts), "no kind or no layout", "one of each at least")
    _check(requests >= 1 and most_rows >= 1, "no request or no row", "1 or more of each")

    def made(kind: str, layout: str, budget: int, active: int, chunk: int) -> Schedule:
        return Schedule(
            kind=kind,  # type: ignore[arg-type]
            layout=layout,  # type: ignore[arg-type]
            active=active if active and kind == "continuous" else None,
            row_budget=budget if budget <= most_rows and layout == "packed" else None,
            prefill_chunk=chunk or CHUNK,
        )

    # One draw for each setting, whatever the others are: an example that has more draws counts as larger, and would not be
    # shrunk to.
    return st.builds(
        made,
        st.sampled_from(kinds),
        st.sampled_from(layouts),
        st.integers(1, most_rows + 1),
        st.integers(0, requests),
        st.integers(0, most_rows),
    )


def compositions(
    model: str = "builtin",
    *,
    max_requests: int = 4,
    prompt: SearchStrategy[tuple[int, ...]] | None = None,
    max_tokens: int = 4,
    latest: int = 8,
    schedule: SearchStrategy[Schedule] | None = None,
) -> SearchStrategy[Scenario]:
    """A whole batch: requests r0, r1, ... and who is beside whom, as a scenario to record or to check an engine with.

    Up to ``max_requests`` requests in their order of arrival, each with what ``prompt`` draws (see `prompts`) and 1 to
    ``max_tokens`` tokens, under what ``schedule`` draws (see `schedules`); where that is continuous, up to ``latest`` forwards
    lie between two arrivals. Shrinks to the fewest requests, then to the smallest of the rest. Raises ScenarioRangeError for
    numbers that no batch has.
    """
    _check(
        max_requests >= 1 and max_tokens >= 1 and latest >= 0, "no request or no token", "1 or more of each"
    )
    one = st.tuples(
        prompts() if prompt is None else prompt, st.integers(1, max_tokens), st.integers(0, latest)
    )
    return st.builds(
        partial(_composition, model),
        schedules(requests=max_requests) if schedule is None else schedule,
        st.lists(one, min_size=1, max_size=max_requests),
    )


def _composition(
    model: str, schedule: Schedule, drawn: Sequence[tuple[tuple[int, ...], int, int]]
) -> Scenario:
    requests: list[Request] = []
    for tokens, count, gap in drawn:
        at = requests[-1].arrival + gap if requests and schedule.kind == "continuous" else 0
        requests.append(
            Request(f"r{len(requests)}", tokens=tokens, max_tokens=count, arrival=at, ignore_stop=True)
        )
    return Scenario(model, tuple(requests), schedule)


def _check(holds: bool, found: str, expected: str) -> None:
    if not holds:
        raise ScenarioRangeError(f"A strategy was asked for {found}; expected {expected}. Correct it.")
