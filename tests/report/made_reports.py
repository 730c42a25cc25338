"""Reports of small made-up traces, for the tests of the formats."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import answers
from synthetic_traces import Ask, Fault, Plan, together, write_trace

from detdiff.compare import compare
from detdiff.compare.series import series
from detdiff.explain import Control, Evidence, Verdict
from detdiff.explain.verdict import Fragility
from detdiff.report.build import build
from detdiff.report.document import Report


def report_of(a: Plan, b: Plan, command: str = "", names: tuple[str, str] = ("a", "b")) -> Report:
    """Of two traces, written into directories of these names."""
    with tempfile.TemporaryDirectory() as work:
        traces = [write_trace(Path(work) / name, plan) for name, plan in zip(names, (a, b), strict=True)]
        divergence = compare(traces[0], traces[1])
        drawn = series(traces[0], traces[1], divergence)
    runs = {
        side: replace(getattr(divergence, side), trace=name) for side, name in zip("ab", names, strict=True)
    }
    return build(replace(divergence, **runs), None, drawn, command)


@cache
def flips() -> Report:
    """The anchor flips at token 3 and inherited it, the follower parts without a flip, quiet is equal."""
    asks = (replace(answers.ANCHOR, generated=(30, 31, 32, 93, 94)), answers.FOLLOWER, answers.QUIET)
    faults = (
        Fault("layers.0.attn.k_proj", "out", 0, 2),
        Fault("layers.1.attn.cache.read", "read", 1, 5),
    )
    b = Plan(
        asks, together(asks), faults, path=answers.path, logits={(0, 3): [(93, 25.56222), (33, 25.549618)]}
    )
    a = answers.plan((answers.ANCHOR, answers.FOLLOWER, answers.QUIET))
    return report_of(a, b, "detdiff explain a.toml b.toml")


@cache
def long_text() -> Report:
    """A text of 40 tokens that flips at token 25, of a prompt of 100 tokens."""
    ask = Ask("long", tuple(range(100, 200)), tuple(range(300, 340)))
    other = replace(ask, generated=(*ask.generated[:25], 999, *ask.generated[26:]))
    a = replace(answers.plan((ask,)), logits={(0, 25): [(325, 5.0), (999, 4.75)]})
    fault = Fault("layers.1.mlp.up", "out", 0, 50)
    b = replace(answers.plan((other,)), faults=(fault,), logits={(0, 25): [(999, 5.0), (325, 4.5)]})
    return report_of(a, b)


def explained(report: Report, **changes: Any) -> Report:
    """The same with a verdict, in which every part is filled; ``changes`` are those of the verdict."""
    verdict = Verdict(
        **{
            "kind": "numerics",
            "sentence": "Rounding: a kernel took another path.",
            "evidence": (
                Evidence("path", "the path changed at layers.0.attn.k_proj", {"rows": [4, 18]}, decided=True),
                Evidence("acceptance", "5 of 8 drafts accepted", {"run": "b", "forward": 3}),
            ),
            "controls": (
                Control(
                    "pin_kernels", "removed", "with split_rows 8 nothing differs", 7, 0.5, {"how": "held"}
                ),
                Control("dtype", "not_run", "the model is in float32 already", 0, 0.0),
            ),
            "divergence": report.divergence,
            "rule": "path",
            "advice": "Hold the path, see `detdiff probe`.",
            "missing": ("nothing",),
            "fragile": (
                Fragility("anchor", 1, 31, 0.5, -0.25, 0.125),
                Fragility("anchor", 2, 32, 1.0, None, 0.1),
            ),
            **changes,
        }
    )
    return build(report.divergence, verdict, report.series, report.command)
