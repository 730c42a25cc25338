"""Make the golden traces again: `python tools/golden_traces.py`, after a change of the format or the built-in model.

Two runs of the built-in model under `candle-metal`, and the answer that compare gives for them, for tests and docs
that need a real pair without a model. Another processor may round otherwise and then gives another pair.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from detdiff.compare import compare
from detdiff.engines.mlx.engine import record
from detdiff.report import to_json
from detdiff.scenario import Scenario

FOLDER = Path(__file__).parents[1] / "traces"
RUNS = ("serial", "continuous")


def main() -> None:
    for name in RUNS:
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    traces = [record(Scenario.from_toml(FOLDER / f"{name}.toml"), FOLDER / name) for name in RUNS]
    answer = json.loads(json.dumps(to_json(compare(*traces))))
    for side, name in zip("ab", RUNS, strict=True):
        answer[side]["trace"] = name
    (FOLDER / "answer.json").write_text(json.dumps(answer, indent=1) + "\n")


if __name__ == "__main__":
    main()
