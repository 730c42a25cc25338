"""A reproduction pack: one zip file with all that running a divergence again needs, but for the weights."""

from __future__ import annotations

import json
import tempfile
import zipfile
from pathlib import Path

from detdiff.commands.outputs import whole
from detdiff.commands.pack_places import Places, without_values
from detdiff.commands.pack_readme import command, readme
from detdiff.report.build import build
from detdiff.report.document import Report
from detdiff.report.html import html
from detdiff.report.json import report_json_text
from detdiff.report.markdown import markdown
from detdiff.report.text import report_text
from detdiff.scenario import Scenario
from detdiff.trace import Trace

_WIDTH = 100
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of every member: the same pack twice is the same bytes."""


def pack(report: Report, traces: tuple[Trace, Trace], path: Path) -> None:
    """Write ``path``: both scenarios, both traces without captured values, the environment, the report in every format.

    What a scenario names goes in as well: models without weights (random ones), a profile's file, the trace that tokens were
    forced from. Of any other model only the identity does. The file appears whole or not at all. Raises what reading the
    traces raises, and OSError.
    """
    with tempfile.TemporaryDirectory(prefix="detdiff-pack-") as folder:
        root = Path(folder)
        places = Places(root, traces)
        for trace, name in zip(traces, "ab", strict=True):
            scenario = places.scenario(trace)
            without_values(trace, root / name, scenario)
            read = Scenario.from_dict(scenario, where=f"the scenario of {trace.path}")
            _write(root / f"{name}.toml", read.to_toml())
        runs = {
            name: {"environment": trace.header["environment"], "model": trace.model}
            for trace, name in zip(traces, "ab", strict=True)
        }
        _write(root / "environment.json", json.dumps(runs, indent=1, allow_nan=False) + "\n")
        # Read where it was unpacked, the report names what lies beside it.
        report = build(report.divergence, report.verdict, report.series, command(places))
        _write(root / "report.html", html(report))
        _write(root / "report.md", markdown(report))
        _write(root / "report.txt", report_text(report, width=_WIDTH))
        _write(root / "report.json", report_json_text(report))
        _write(root / "README.md", readme(report, traces, places))
        with whole(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as made:
            for file in sorted(root.rglob("*")):
                if file.is_file():
                    info = zipfile.ZipInfo(file.relative_to(root).as_posix(), _EPOCH)
                    info.compress_type = zipfile.ZIP_DEFLATED
                    info.external_attr = 0o644 << 16
                    made.writestr(info, file.read_bytes())


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
