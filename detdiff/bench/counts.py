"""What a policy made an engine do, in counts that no machine changes: forwards, rows, padding, idle slots, and memory of the cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from detdiff.trace import Trace, parse_ranges


@dataclass(frozen=True)
class ForwardShape:
    """One forward: the rows that each request has in it, and ``shape`` as (slots, columns), padding included.

    ``holding`` are the positions in the caches of the requests that are served, after it.
    """

    rows: Mapping[int, int]
    shape: tuple[int, int]
    holding: Mapping[int, int]

    @property
    def useful(self) -> int:
        return sum(self.rows.values())

    @property
    def computed(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True)
class Counts:
    """``rows`` are those of requests, ``padding`` those computed beside them. ``slots`` sums over forwards how many requests the
    policy lets run at a time, ``busy`` how many had a row: the rest waited for the longest, or for an arrival. No slots: that cannot be said.

    ``rows_per_forward`` counts forwards by the rows computed in them. ``paths`` has calls by kernel path, where it was recorded.
    ``drafted`` are the forwards of a draft beside them, which count nowhere else.
    """

    forwards: int
    rows: int
    padding: int
    slots: int
    busy: int
    rows_per_forward: tuple[tuple[int, int], ...]
    paths: tuple[tuple[str, int], ...] = ()
    drafted: int = 0

    @classmethod
    def of(
        cls, forwards: Iterable[ForwardShape], slots: int, paths: Mapping[str, int] | None = None
    ) -> Counts:
        """Of forwards of a policy that lets ``slots`` requests run at a time."""
        count = rows = computed = busy = 0
        sizes: Counter[int] = Counter()
        for each in forwards:
            count += 1
            rows += each.useful
            computed += each.computed
            busy += len(each.rows)
            sizes[each.computed] += 1
        shares = tuple(sorted((paths or {}).items()))
        return cls(count, rows, computed - rows, slots * count, busy, tuple(sorted(sizes.items())), shares)

    @property
    def padded_share(self) -> float:
        """The part of computed rows that is padding."""
        return self.padding / (self.rows + self.padding) if self.rows else 0.0

    @property
    def idle_share(self) -> float:
        """The part of slots in which nobody had a row."""
        return 1 - self.busy / self.slots if self.slots else 0.0


def recorded(trace: Trace) -> list[ForwardShape]:
    """The forwards of a trace's target model."""
    found = []
    for line in trace.forwards():
        if line.get("model", "target") == "target":
            rows: Counter[int] = Counter()
            holding = {}
            for row in line["rows"]:
                rows[row["request"]] += row["count"]
                holding[row["request"]] = row["start"] + row["count"]
            found.append(ForwardShape(dict(rows), (line["shape"][0], line["shape"][1]), holding))
    return found


def drafted(trace: Trace) -> int:
    """Forwards of a trace's draft."""
    return sum(line.get("model", "target") != "target" for line in trace.forwards())


def kernel_paths(trace: Trace) -> dict[str, int]:
    """Calls of sites by kernel path; empty where paths are not recorded."""
    found: Counter[str] = Counter()
    if "kernel_paths" in trace.lacks:
        return {}
    for line in trace.forwards():
        for call in line["calls"]:
            found[call["path"]] += sum(len(run) for run in parse_ranges(call["sites"], len(trace.sites)))
    return dict(found)


@dataclass(frozen=True)
class CacheMemory:
    """Positions of keys and values held at the worst: what requests really hold, what contiguous caches reserve for their longest,
    and what pages of ``page`` positions take. ``most_contiguous`` and ``most_paged`` are how many requests of this workload fit at a time into
    ``budget`` positions, on average over it."""

    held: int
    contiguous: int
    paged: int
    page: int
    budget: int | None = None
    most_contiguous: float | None = None
    most_paged: float | None = None


def cache_memory(
    lengths: Sequence[tuple[int, int]],
    forwards: Iterable[ForwardShape],
    page: int = 16,
    budget: int | None = None,
) -> CacheMemory:
    """Of requests with (prompt, answer) lengths that ``forwards`` served."""
    longest = max(prompt + answer for prompt, answer in lengths)
    held = contiguous = paged = 0
    for each in forwards:
        held = max(held, sum(each.holding.values()))
        contiguous = max(contiguous, longest * len(each.holding))
        paged = max(paged, sum(-(-n // page) * page for n in each.holding.values()))
    if budget is None:
        return CacheMemory(held, contiguous, paged, page)
    # On its way from a prompt to its end a request holds half its answer on average, and half a page beside.
    average = sum(prompt + answer / 2 + page / 2 for prompt, answer in lengths) / len(lengths)
    return CacheMemory(held, contiguous, paged, page, budget, budget / longest, budget / average)
