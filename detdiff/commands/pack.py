"""A reproduction pack: one zip file with all that running a divergence again needs, but for the weights."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from detdiff.report.content import Report
from detdiff.report.html import html
from detdiff.report.markdown import markdown
from detdiff.report.report_json import report_json_text
from detdiff.report.terminal import report_text
from detdiff.scenario import Scenario
from detdiff.trace import Trace
from detdiff.trace.files import read_bytes
from detdiff.trace.header import HEADER, encode

_VALUES = "value/"
_WIDTH = 100
_WEIGHTS = (".safetensors", ".gguf", ".npz", ".bin", ".pt", ".pth")
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of every member: the same pack twice is the same bytes."""
MODEL = "model"


def pack(report: Report, traces: tuple[Trace, Trace], path: Path) -> None:
    """Write ``path``: both scenarios, both traces without captured values, the environment, the report in every format.

    A model without weights (a random one) goes in as well; of any other only the identity does. The file appears whole or
    not at all. Raises what reading the traces raises, and OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="detdiff-pack-") as folder:
        root = Path(folder)
        twins = _twins(traces)
        for trace, name in zip(traces, "ab", strict=True):
            without_values(trace, root / name)
            scenario = _scenario(trace, traces[0], twins)
            (root / f"{name}.toml").write_text(scenario.to_toml(), encoding="utf-8")
        for key, twin in twins.items():
            shutil.copytree(twin, root / key)
        runs = {
            name: {"environment": trace.header["environment"], "model": trace.model}
            for trace, name in zip(traces, "ab", strict=True)
        }
        _write(root / "environment.json", json.dumps(runs, indent=1, allow_nan=False) + "\n")
        _write(root / "report.html", html(report))
        _write(root / "report.md", markdown(report))
        _write(root / "report.txt", report_text(report, width=_WIDTH))
        _write(root / "report.json", report_json_text(report))
        _write(root / "README.md", _readme(report, traces, MODEL in twins))
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as made:
                for file in sorted(root.rglob("*")):
                    if file.is_file():
                        info = zipfile.ZipInfo(file.relative_to(root).as_posix(), _EPOCH)
                        info.compress_type = zipfile.ZIP_DEFLATED
                        info.external_attr = 0o644 << 16
                        made.writestr(info, file.read_bytes())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _twins(traces: tuple[Trace, Trace]) -> dict[str, Path]:
    """The directories of the runs' models that have no weights of their own, so that they may go along, by the
    scenario's key."""
    found = {}
    for key in (MODEL, "draft"):
        named = {str(trace.scenario.get(key, "")) for trace in traces}
        folder = Path(named.pop())
        if named or not (folder / "config.json").is_file():
            continue
        if not any(file.suffix in _WEIGHTS for file in folder.rglob("*")):
            found[key] = folder
    return found


def _scenario(trace: Trace, a: Trace, twins: Mapping[str, Path]) -> Scenario:
    """A run's scenario with paths that hold inside of the pack."""
    keys: dict[str, Any] = dict(trace.scenario)
    for key in twins:
        keys[key] = f"./{key}"
    if keys.get("force_tokens") == str(a.path):
        keys["force_tokens"] = "./a"
    return Scenario.from_dict(keys, where=f"the scenario of {trace.path}")


def without_values(trace: Trace, path: Path) -> None:
    """A copy of a trace at ``path``, a new directory, without captured values: digests, tokens and logs stay.

    Raises TraceReadError.
    """
    from safetensors.numpy import save

    path.mkdir()
    header = dict(trace.header)
    entries = []
    for file in sorted(trace.path.iterdir()):
        if file.is_file() and file.name != HEADER and not file.name.startswith((".", "shard-")):
            (path / file.name).write_bytes(read_bytes(file))
    for shard in trace.shards:
        if shard.value_columns():
            data = save(dict(_kept(shard.path)))
        else:
            data = read_bytes(shard.path)
        (path / shard.path.name).write_bytes(data)
        entries.append({"name": shard.path.name, "bytes": len(data), "crc32": zlib.crc32(data)})
    if header["complete"]:
        header["shards"] = entries
    (path / HEADER).write_bytes(encode(header))


def _kept(path: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    with safe_open(path, framework="np") as tensors:
        for name in tensors.keys():
            if not name.startswith(_VALUES):
                yield name, tensors.get_tensor(name)


def _readme(report: Report, traces: tuple[Trace, Trace], twin: bool) -> str:
    a = traces[0]
    name = a.model.get("name") or a.scenario.get("model")
    if twin:
        model = "The model is in `model/`: a configuration and a seed, from which detdiff makes its weights. Nothing else is needed."
        more = ""
    elif a.scenario.get("model") == "builtin":
        model = "The model is the one that detdiff brings along. Nothing else is needed."
        more = ""
    else:
        model = (
            f"The model's weights are not in here. It is `{name}`; `environment.json` has the hashes of its weights, configuration "
            "and tokenizer. Say where it is with `--both model=DIR`."
        )
        more = " --both model=DIR"
    moved = " --model model" if twin else "" if not more else " --model DIR"
    return f"""# Where two runs part

> {report.headline}

One command, in this folder, runs both sides again and says why they part:

    detdiff explain a.toml b.toml{more}

{model}

To see whether your machine gives the very bits that were recorded here:

    detdiff compare a b --replay{moved}

| file | holds |
|---|---|
| `a.toml`, `b.toml` | the two scenarios; prompts are in them |
| `a/`, `b/` | the two traces: digests of every recorded row, tokens, forwards; no values and no weights |
| `environment.json` | what both were recorded on |
| `report.html`, `report.md`, `report.txt`, `report.json` | the report |
"""
