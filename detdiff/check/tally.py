"""What was checked in a session: numbers that workers add up, and how they read at its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Tally:
    """Sums over the checks of a session, or of one worker of it.

    ``compositions`` are schedules in layouts, ``rows`` compared down to their bits in ``sites`` (by model), ``tokens`` generated
    and compared, ``operations`` functions that were checked, ``failed`` those of either that failed. ``unchecked`` counts
    compositions and calls that could not be checked, ``skipped`` marked tests that were skipped.
    """

    compositions: int = 0
    operations: int = 0
    failed: int = 0
    unchecked: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0
    skipped: int = 0
    sites: dict[str, int] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.compositions or self.operations or self.unchecked or self.skipped)

    def add(self, other: Tally) -> None:
        """Add what another worker checked."""
        for name, value in asdict(other).items():
            if name == "sites":
                for model, sites in value.items():
                    self.sites[model] = max(sites, self.sites.get(model, 0))
            else:
                setattr(self, name, getattr(self, name) + value)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, which one process can send to another."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Tally:
        return cls(**values)

    def lines(self) -> Iterator[str]:
        """The summary, line by line."""
        checked = [
            _count(n, noun)
            for n, noun in ((self.compositions, "composition"), (self.operations, "operation"))
            if n
        ]
        if checked or self.unchecked:
            lacking = f", {self.unchecked:,} NOT CHECKED" if self.unchecked else ""
            yield f"{' and '.join(checked) or 'nothing'} checked, {_failed(self.failed)}{lacking}, {self.seconds:.1f} s"
        if self.compositions:
            yield (
                f"{_count(self.rows, 'row')} at {_count(sum(self.sites.values()), 'site')} of "
                f"{_count(len(self.sites), 'model')}, {_count(self.tokens, 'token')}"
            )
        if self.skipped:
            yield f"{_count(self.skipped, 'marked test')} skipped, so not checked"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"


def _failed(n: int) -> str:
    return "none failed" if not n else f"{n:,} FAILED"
