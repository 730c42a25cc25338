"""Facts of divergences that were made up, for the tests of the rules and of the reports of verdicts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from answers import ANCHOR, FOLLOWER, QUIET, path, plan, run
from synthetic_traces import Fault, Plan, together

from detdiff.compare import AcrossEngines, Divergence, Finding
from detdiff.compare.flips import Acceptance, Proposed, Verification, Verified
from detdiff.explain import Control
from detdiff.explain.control import Figures
from detdiff.explain.controls.finite import FiniteFigures
from detdiff.explain.controls.oracle import OracleFigures
from detdiff.explain.controls.pin_kernels import PinKernelsFigures
from detdiff.explain.controls.roles import RolesFigures
from detdiff.explain.facts import Facts, RecordedFacts

ASKS = (ANCHOR, FOLLOWER, QUIET)
HELD = "split_rows 1024"


@cache
def diverged() -> Divergence:
    """The anchor flips and inherited it from a linear layer that took another path; nothing else is wrong."""
    other = replace(ANCHOR, generated=(30, 31, 32, 93, 94))
    asks = (other, FOLLOWER, QUIET)
    b = Plan(asks, together(asks), (Fault("layers.0.attn.k_proj", "out", 0, 2),), path=path)
    return run(plan(ASKS), replace(b, logits={(0, 3): [(93, 25.56222), (33, 25.549618)]}))


@cache
def equal() -> Divergence:
    return run(plan(ASKS), replace(plan(ASKS), forwards=together(ASKS)))


@cache
def chosen() -> Divergence:
    """Every digest is equal and a token is not."""
    other = replace(ANCHOR, generated=(30, 31, 32, 33, 94))
    return run(plan(ASKS), plan((other, FOLLOWER, QUIET)))


@cache
def read() -> Divergence:
    """A row read other entries than were written."""
    fault = Fault("layers.1.attn.cache.read", "read", 1, 5)
    return run(plan(ASKS), replace(plan(ASKS), forwards=together(ASKS), faults=(fault,)))


@cache
def two_engines() -> Divergence:
    """Two engines that were compared by role."""
    return replace(diverged(), across_engines=AcrossEngines((), None, 0, (), (), (), ()))


PINNED: dict[str, Any] = {
    "how": HELD,
    "cost": "10 ms a forward instead of 8 ms",
    "tried": (),
    "seconds_per_forward": {},
    "tokens_equal": True,
    "bits_equal": True,
}


def control(name: str, result: str, **detail: Any) -> Control:
    """With the control's own figures where rules or sentences read them."""
    kinds: dict[str, type[Figures]] = {
        "oracle": OracleFigures,
        "pin_kernels": PinKernelsFigures,
        "finite": FiniteFigures,
        "roles": RolesFigures,
    }
    own: dict[str, Any] = {"oracle": ORACLE, "pin_kernels": PINNED, "roles": ROLES}.get(name, {})
    figures = kinds[name](**{**own, **detail}) if name in kinds else detail
    return Control(name, result, f"the control {name} gave {result}", 7, 0.25, figures)


ORACLE: dict[str, Any] = {
    **dict.fromkeys(
        ("origins", "judged", "inside_a", "inside_b", "outside_a", "outside_b", "changed", "not_finite"), 0
    ),
    "skipped": {},
    "pattern": "",
    "nearer": "a",
    "ratio": 0.4,
    "far": None,
    "precision": None,
    "outside_where": [],
    "pairs": [],
}
ROLES: dict[str, Any] = {
    "request": "anchor",
    "positions": [1, 2],
    "operations": {"a": 34, "b": 34},
    "outside_a": 0,
    "outside_b": 0,
    "shared": [],
    "nearer": "b",
    "ratio": 2.0,
    "roles": [],
    "outside_where": [{"said": "gate of layer 0 in run b (other) is off float64"}],
    "not_judged": {"run a: it is at no site": ["activation of layer 0"]},
    "files": "",
}
OUTSIDE = {
    "site": "layers.0.attn.k_proj",
    "kind": "linear",
    "run": "b",
    "forward": 4,
    "position": 2,
    "said": "layers.0.attn.k_proj (linear, columns 128 to 149), position 2 of anchor, is off float64 by 1e+04 times its "
    "rounding bound in run b, forward 4, on native",
}
PRECISION = {
    "run": "b",
    "bits": 11,
    "name": "float16 or tf32",
    "path": "native",
    "said": "run b needs inputs of 11 bits",
}
FAR = {"worse": "a", "path": "reference/x/mv", "ratio": 12.0, "precision": "bfloat16"}


def controls(**results: str | Control) -> dict[str, Control]:
    """Those of a path change whose cause is confirmed, changed by name; ``not_run`` leaves one out."""
    known: dict[str, Control] = {
        "repeat": control("repeat", "equal"),
        "pin_kernels": control("pin_kernels", "removed"),
        "oracle": control("oracle", "inside", **ORACLE),
    }
    for name, result in results.items():
        known[name] = result if isinstance(result, Control) else control(name, result)
    return {name: one for name, one in known.items() if one.result != "not_run"}


def oracle(result: str, **changes: Any) -> Control:
    return control("oracle", result, **{**ORACLE, **changes})


def facts(
    divergence: Divergence | None = None, recorded: RecordedFacts | None = None, **results: str | Control
) -> Facts:
    return Facts(
        diverged() if divergence is None else divergence, recorded or RecordedFacts(), controls(**results)
    )


def found(divergence: Divergence, *findings: Finding) -> Divergence:
    """With these findings of the bookkeeping."""
    return replace(divergence, bookkeeping=findings, stage="bookkeeping")


def asked(divergence: Divergence, **changes: Any) -> Divergence:
    """With other settings in the scenario of run b."""
    return replace(divergence, b=replace(divergence.b, scenario={**divergence.b.scenario, **changes}))


def observed(divergence: Divergence) -> Divergence:
    """With logits of run b that recording changed."""
    return replace(divergence, b=replace(divergence.b, observer={"equal": False, "forwards": 4}))


TRIM = Finding("b", "trim", "anchor", 6, "a trim took 0 of 2 rows off in layers 0-1")
BLOCK = Proposed((323, 7), (323, 9))
SPECULATION = Verification(
    tokens=3,
    proposals_equal=True,
    first_other_proposal=None,
    choices_equal=True,
    first_other_choice=None,
    flip_a=Verified(3, BLOCK, 0, 323, 33),
    flip_b=Verified(4, BLOCK, 0, 323, 93),
    a=Acceptance(4, 8, 5, 8, 5, True),
    b=Acceptance(4, 8, 4, 8, 4, True),
)


def speculated(divergence: Divergence, found: Verification = SPECULATION) -> Divergence:
    """With a draft model in both runs."""
    requests = tuple(replace(r, verification=found) if r.id == "anchor" else r for r in divergence.requests)
    return replace(divergence, requests=requests)


QUANTISED = RecordedFacts(quantised_a=((20, 1),), quantised_b=((32, 1),))
