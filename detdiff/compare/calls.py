"""Which kernel call computed a site in a row, by the kernel plan of the row's forward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from detdiff.trace import computed, parse_ranges


@dataclass(frozen=True)
class Call:
    """The kernel call that computed a site: rows M, second-to-last dimension, path and the rule that chose it."""

    rows: int | None
    second_last: int | None
    path: str | None
    rule: str | None


NO_CALL: Final = Call(None, None, None, None)


class PlanCalls:
    """The calls of one kernel plan by site; where a site's rows took several, each names its rows."""

    def __init__(self, calls: Sequence[Mapping[str, Any]], sites: int) -> None:
        self._of: list[list[tuple[Call, Mapping[str, Any]]]] = [[] for _ in range(sites)]
        for item in calls:
            call = Call(item.get("rows"), item.get("second_last"), item["path"], item.get("rule"))
            for run in parse_ranges(item["sites"], sites):
                for site in run:
                    self._of[site].append((call, item))

    def alike(self, site: int) -> Call | None:
        """The call that computed all rows of a site; None where that depends on the row."""
        found = self._of[site]
        if not found:
            return NO_CALL
        return None if "at" in found[0][1] else found[0][0]

    def at(self, site: int, row: int | None) -> Call:
        """The call that computed a site in a row, given by its place in the forward (``flat_row``)."""
        return next((call for call, item in self._of[site] if computed(item, row)), NO_CALL)

    def paths(self) -> Counter[str]:
        """How many sites took each path; a site whose rows took several counts for each."""
        pairs = {(site, call.path) for site, found in enumerate(self._of) for call, _ in found}
        return Counter(path for _, path in pairs if path is not None)
