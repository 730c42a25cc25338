"""Recording changes nothing: the logits of a traced run are those of an untraced one, bit for bit."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from numpy.typing import NDArray
from runs import ARCHITECTURES, PACKABLE, Runs, bits, model, scenario, values
from tiers import some_now
from tiny import FORMATS

from detdiff.engines.mlx.engine import RecordOptions, generate
from detdiff.engines.mlx.taps.forward import Forward, ForwardRows
from detdiff.engines.mlx.taps.recorder import Recorder
from detdiff.engines.mlx.taps.session import Session
from detdiff.scenario import Scenario

LOGITS: dict[str, Any] = {"capture": "window", "window_sites": ["logits"]}
SCHEDULES: dict[str, dict[str, Any]] = {
    "serial padded": {"prefill_chunk": 5},
    "continuous padded": {"schedule": "continuous", "arrivals": (0, 2, 5), "prefill_chunk": 5},
    "continuous packed": {
        "schedule": "continuous",
        "layout": "packed",
        "arrivals": (0, 2, 5),
        "prefill_chunk": 5,
    },
}
MATRIX = [
    (arch, fmt, how)
    for arch in ARCHITECTURES
    for fmt in FORMATS
    for how in SCHEDULES
    # What cannot run is asserted so in test_identity.py and test_packed_refusals.py.
    if not (arch in ("qwen3_moe", "qwen3_next") and fmt == "bf16")
    if "padded" in how or arch in PACKABLE
]


class Answers:
    """The logits' bits of every row that an untraced engine uses, by (request, position)."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], NDArray[Any]] = {}

    def __call__(self, forward: Forward, logits: mx.array) -> None:
        table = ForwardRows.of(forward.segments)
        found = bits(logits)
        columns = table.column.tolist()
        for i, (request, position) in enumerate(
            zip(table.request.tolist(), table.position.tolist(), strict=True)
        ):
            if forward.selected is None:
                self.rows[request, position] = found[table.slot[i], columns[i]]
            elif columns[i] in forward.selected:
                self.rows[request, position] = found[0, forward.selected.index(columns[i])]


def traced(runs: Runs, arch: str, fmt: str, asked: Scenario) -> dict[tuple[int, int], NDArray[Any]]:
    trace = runs.record(model(arch, fmt), asked)
    found = values(trace, "logits", "out")
    return {key: np.ascontiguousarray(data).view(f"u{data.itemsize}") for key, data in found.items()}


@pytest.mark.parametrize(
    ("arch", "fmt", "how"), some_now(MATRIX, *range(0, len(MATRIX), 9), ci=range(0, len(MATRIX), 2))
)
def test_traced_logits_are_those_of_an_untraced_run(runs: Runs, arch: str, fmt: str, how: str) -> None:
    keys = SCHEDULES[how]
    untraced = Answers()
    generate(scenario(**keys, max_tokens=5), loaded=model(arch, fmt), on_logits=untraced)
    recorded = traced(runs, arch, fmt, scenario(**keys, max_tokens=5, **LOGITS))
    # Five tokens of each of the three requests; engines that compute ahead run one row more.
    assert 15 <= len(recorded) <= 18
    assert recorded.keys() == untraced.rows.keys()
    for key, row in recorded.items():
        assert np.array_equal(row, untraced.rows[key]), key


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("plan", [{}, {"kernels": "candle-metal", "split_rows": 2}])
def test_the_check_runs_as_many_forwards_as_asked(runs: Runs, layout: str, plan: dict[str, Any]) -> None:
    asked = scenario("continuous", layout, arrivals=(0, 2, 5), **plan)
    trace = runs.record(model("llama"), asked, RecordOptions(observe=7))
    assert trace.header["observer"] == {"forwards": 7, "equal": True}
    trace = runs.record(model("llama"), asked, RecordOptions(observe=1000))
    assert trace.header["observer"]["equal"] is True
    assert trace.header["observer"]["forwards"] > 7
    assert runs.record(model("llama"), asked).header["observer"] == {"forwards": 0, "equal": None}


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("site", ["layers.1.mlp.down_proj", "norm", "embed_tokens"])
def test_a_tap_that_disturbs_is_caught(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, layout: str, site: str
) -> None:
    sound = Session.leaf

    def leaf(self: Session, name: str, *rest: Any) -> Any:
        out = sound(self, name, *rest)
        # One unit in the last place of one element, and only where a recorder listens.
        if name == site and isinstance(self.recording, Recorder):
            raised = mx.contiguous(out).view(mx.uint32)
            raised[0, 0, 7] = raised[0, 0, 7] + 1
            return raised.view(out.dtype)
        return out

    monkeypatch.setattr(Session, "leaf", leaf)
    asked = scenario("continuous", layout, arrivals=(0, 2, 5))
    trace = runs.record(model("llama"), asked, RecordOptions(observe=1000))
    assert trace.header["observer"]["equal"] is False
