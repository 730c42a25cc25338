"""Two engines by the roles of their sites: how far values are apart, and how each engine's operations stand against float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from detdiff.compare.divergence import AcrossEngines, Divergence, RoleDifference
from detdiff.explain.control import NOT_RUN, Control
from detdiff.explain.verdict import Verdict

from .document import Page
from .words import count, layer, named, passage

_LISTED: Final = 12
ORDER: Final = ("role", "layers", "rows", "first layer", "last layer", "largest", "where")


def role_words(divergence: Divergence) -> str:
    """The end of a headline on two engines."""
    across = divergence.across_engines
    assert across is not None
    names = list(dict.fromkeys((named(divergence.a.engine), named(divergence.b.engine))))
    both = f"{' and '.join(names)} are two engines, whose bits never agree"
    if len(names) == 1:
        both = f"two runs of {names[0]} were compared as two engines are, by role"
    if not across.roles:
        return f"; {both}, and no values of a role were compared"
    if across.first is None:
        return f"; {both}, and no role departs by more than its inputs' growth"
    first = f"the first role that departs by more than its inputs' growth is {_role(across.first)}"
    return f"; {both}, and {first}"


def _role(found: RoleDifference) -> str:
    return named(found.role) if found.layer is None else f"{named(found.role)} of {layer(found.layer)}"


def role_lines(page: Page, across: AcrossEngines) -> None:
    """How far the values of each role are apart, and what is not aligned."""
    if across.why:
        page.item("not compared: ", passage(across.why))
    rows = [
        _row(role, [each for each in across.roles if each.role == role])
        for role in dict.fromkeys(each.role for each in across.roles)
    ]
    if rows:
        page.prose(
            f"{count(across.aligned, 'role')} in both runs; differences relative to the size of the values, root mean square over rows:"
        )
        page.table(rows, ORDER, "    ")
    if across.first is not None:
        first = across.first
        page.item(
            "departs: ",
            f"{_role(first)} ({named(first.site_a)} in a, {named(first.site_b)} in b) differs by {first.typical:.3g}, "
            f"{first.growth:.3g} times what it is computed from differs by; no verdict by itself: explain --across-engines scores "
            "each engine's operations",
        )
    for run, only, without in (
        ("a", across.only_a, across.without_role_a),
        ("b", across.only_b, across.without_role_b),
    ):
        if only:
            page.item(f"roles of {run} alone: ", _names(only))
        if without:
            page.item(f"not aligned, sites of {run} without a role: ", _names(without))


def _row(role: str, found: Sequence[RoleDifference]) -> list[str]:
    worst = max(found, key=lambda each: each.largest)
    last = f"{found[-1].typical:.2g}" if len(found) > 1 else "-"
    where = f"position {worst.position} of {named(worst.request)}"
    return [
        named(role),
        str(len(found)) if found[0].layer is not None else "-",
        f"{max(each.rows for each in found):,}",
        f"{found[0].typical:.2g}",
        last,
        f"{worst.largest:.2g}",
        where if worst.layer is None else f"{layer(worst.layer)}, {where}",
    ]


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(named(name) for name in names[:_LISTED])
    more = len(names) - _LISTED
    return f"{shown} and {more} more" if more > 0 else shown


def role_score_lines(page: Page, verdict: Verdict) -> None:
    """How far each engine's operations are from float64, in units of their rounding bounds, by role."""
    control = verdict.control("roles")
    if control is None or (verdict.divergence is not None and verdict.divergence.across_engines is None):
        return
    if control.result == NOT_RUN:
        page.item("  not run: ", passage(control.sentence))
        return
    page.item("  ", passage(control.sentence))
    scores = [_score(each) for each in _listed(control, "roles")]
    if scores:
        headers = ("role", "judged (a / b)", "outside (a / b)", "a worst", "b worst", "nearer")
        page.table(scores, headers, "    ")
    for each in _listed(control, "outside_where"):
        page.item("  outside: ", passage(str(each.get("said"))))
    refused = control.detail.get("not_judged")
    for why, which in refused.items() if isinstance(refused, Mapping) else ():
        if isinstance(which, list | tuple):
            page.item("  not judged: ", f"{_names([str(each) for each in which])}: {passage(str(why))}")


def _listed(control: Control, key: str) -> list[Mapping[str, Any]]:
    """The figures under ``key``; a saved verdict may hold anything there."""
    found = control.detail.get(key)
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list | tuple) else []


def _score(found: Mapping[str, Any]) -> list[str]:
    worst = [found.get(f"worst_{run}") for run in "ab"]
    return [
        named(str(found.get("role"))),
        " / ".join(named(str(found.get(f"judged_{run}"))) for run in "ab"),
        " / ".join(named(str(found.get(f"outside_{run}"))) for run in "ab"),
        *(f"{each:.3g}" if isinstance(each, int | float) else "-" for each in worst),
        {"equal": "neither", "None": "-"}.get(str(found.get("nearer")), named(str(found.get("nearer")))),
    ]
