"""The operations of a model that a kernel plan has a say in, under one plan."""

from __future__ import annotations

from detdiff.scenario import KernelPlan

from .attention import AttentionCalls
from .linear import LinearCalls
from .paths import PathChooser
from .switch import SwitchCalls
from .weights import Kernels, StagedWeights


class Operations:
    """Linear, expert and attention calls; they share the plan's choices and the staged weights."""

    def __init__(self, plan: KernelPlan, staged: StagedWeights | None = None) -> None:
        """``staged`` keeps what kernels make of weights from one session of a model to the next.

        Raises KernelPlanError for a path or profile that does not exist.
        """
        self.chooser = PathChooser(plan)
        kernels = Kernels(staged)
        self.linear = LinearCalls(self.chooser, kernels)
        self.switch = SwitchCalls(self.chooser, kernels)
        self.attention = AttentionCalls(self.chooser, kernels)

    @property
    def native(self) -> bool:
        """True when every call runs as the backend would run it."""
        return self.chooser.native and self.chooser.override is None
