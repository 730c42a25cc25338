"""The controls that run a case again, by name, in the order in which they are worth running."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from detdiff.errors import DetdiffError, ReplayError

from .case import Case
from .control import NOT_RUN, CannotRun, Control
from .graft import graft_in, graft_out
from .hold import hold_path
from .neighbours import neighbour_content, neighbour_length
from .outcome import Outcome
from .precision import dtype
from .relax import relax
from .repeat import repeat


def _counted(name: str, run: Callable[[Case], Outcome]) -> Callable[[Case], Control]:
    """``run`` as a control that says what it took, also where it could not be run to its end."""

    def control(case: Case) -> Control:
        started, before = time.perf_counter(), case.budget.forwards_spent
        try:
            outcome = run(case)
        except ReplayError:
            raise
        except (CannotRun, DetdiffError) as why:
            outcome = Outcome(NOT_RUN, str(why))
        forwards = case.budget.forwards_spent - before
        return Control(
            name, outcome.result, outcome.said, forwards, time.perf_counter() - started, outcome.detail
        )

    return control


CONTROLS: Final[Mapping[str, Callable[[Case], Control]]] = {
    name: _counted(name, run)
    for name, run in {
        "repeat": repeat,
        "hold_path": hold_path,
        "relax": relax,
        "graft_in": graft_in,
        "graft_out": graft_out,
        "neighbour_content": neighbour_content,
        "neighbour_length": neighbour_length,
        "dtype": dtype,
    }.items()
}
"""Each takes a case and gives a control; what it took is counted in the case's budget."""
