"""The control ``invariant``: kernels pinned as ``detdiff.invariant`` pins them, on both sides, and what a decode step costs then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from detdiff.engines.base import INVARIANCE, LIVE
from detdiff.invariance.invariant import StepPrice, pinned_engine
from detdiff.invariance.policies import AUTO
from detdiff.scenario import KernelPlan
from detdiff.trace import Trace

from ..case import Case
from ..control import CannotRun, Figures, Outcome, control
from ..facts import Fix
from .pin_kernels import entry


@dataclass(frozen=True, eq=False)
class InvariantFigures(Figures):
    """``pinned`` has what serves each group of sites; ``price`` is that of a decode step, by field of `StepPrice`, empty where
    ``not_priced`` says why; ``tokens_equal`` and ``bits_equal`` are of both sides under the pins."""

    pinned: tuple[str, ...]
    price: Mapping[str, Any]
    not_priced: str
    tokens_equal: bool
    bits_equal: bool

    @property
    def cost(self) -> str:
        """The price in words."""
        if not self.price:
            return f"no price was measured: {self.not_priced}"
        found = StepPrice(**self.price)
        requests = f"{found.batch:,} request{'' if found.batch == 1 else 's'}"
        return (
            f"here a decode step of {requests} took {found.ratio:.2f} of its time as it is ({found.low:.2f} to {found.high:.2f} in "
            f"{found.rounds} rounds)"
        )


@control("invariant", after="pin_kernels", needs=(INVARIANCE,), asked_by=lambda facts: False)
def invariant(case: Case) -> Outcome:
    """Result ``removed`` where both sides then give the same tokens, and every compared row is bit-equal, else ``remains``."""
    engine = case.one_engine()
    profiles = {case.scenario(side).kernels.profile for side in "ab"}
    if len(profiles) > 1:
        raise CannotRun("the two sides run different kernels, of which pins would leave one")
    plan = KernelPlan(profile=profiles.pop())
    batch = max(_at_once(case.trace(side)) for side in "ab")
    with pinned_engine(engine, AUTO, plan, compositions=0, price=(batch,)) as found:
        # The pins stand in the place of the scenario's kernels.
        scenarios = {side: replace(case.scenario(side), kernels=KernelPlan()) for side in "ab"}
        traces = {side: case.record(scenario, side) for side, scenario in scenarios.items()}
    made = entry("invariant", traces)
    tokens, bits = made["tokens_equal"], made["bits_equal"]
    price = asdict(found.price[0]) if found.price else {}
    figures = InvariantFigures(tuple(map(str, found.pinned)), price, found.not_priced, tokens, bits)
    result = "removed" if tokens and bits else "remains"
    said = "both sides give the same bits" if tokens and bits else "the two sides still differ"
    return Outcome(result, f"with kernels pinned by detdiff.invariant {said}; {figures.cost}", figures)


def _at_once(trace: Trace) -> int:
    """The most requests that a forward has rows of."""
    return max((len({row["request"] for row in line["rows"]}) for line in trace.forwards()), default=1)


def fix_of(case: Case) -> Fix | None:
    """How to pin the kernels of both sides' engine for good; None where it cannot be done."""
    engines = set(map(id, case.engines.values()))
    engine, plans = case.engine("a"), {case.scenario(side).kernels.profile for side in "ab"}
    if len(engines) > 1 or len(plans) > 1 or INVARIANCE not in engine.capabilities:
        return None
    profile = plans.pop()
    call = f"detdiff.invariant(model, policy={AUTO!r}{'' if profile is None else f', kernels={profile!r}'})"
    served = f"detdiff serve MODEL --invariant{'' if profile is None else f' --kernels {profile}'}"
    known = f"`with {call}:`{f' or `{served}`' if LIVE in engine.capabilities else ''}"
    if profile is None:
        return Fix(known, "what that costs here was not measured; explain --measure-fix measures it")
    return Fix(
        known,
        f"the kernels of {profile} are emulated here, so that a price is to be measured where they run: the block prints its own",
    )
