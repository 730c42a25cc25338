"""A reproduction pack: one zip file with all that running a divergence again needs, but for the weights."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from detdiff.engines.mlx.model_directory import RANDOM, TOKENIZER_FILES
from detdiff.errors import TraceError
from detdiff.report.build import build
from detdiff.report.document import Report
from detdiff.report.html import html
from detdiff.report.json import report_json_text
from detdiff.report.markdown import inline, markdown, sentence
from detdiff.report.text import report_text
from detdiff.report.words import escaped
from detdiff.scenario import Scenario
from detdiff.trace import Place, Shard, Trace, place
from detdiff.trace.digest import STORAGE
from detdiff.trace.files import read_array, read_bytes
from detdiff.trace.header import HEADER, encode
from detdiff.trace.shard import shard_name

_WIDTH = 100
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of every member: the same pack twice is the same bytes."""


def pack(report: Report, traces: tuple[Trace, Trace], path: Path) -> None:
    """Write ``path``: both scenarios, both traces without captured values, the environment, the report in every format.

    What a scenario names goes in as well: models without weights (random ones), a profile's file, the trace that tokens were
    forced from. Of any other model only the identity does. Raises what reading the traces raises, and OSError.
    """
    with tempfile.TemporaryDirectory(prefix="detdiff-pack-") as folder:
        root = Path(folder)
        places = PackedPaths(root, traces)
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
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
            for file in sorted(root.rglob("*")):
                if file.is_file():
                    info = zipfile.ZipInfo(file.relative_to(root).as_posix(), _EPOCH)
                    info.compress_type = zipfile.ZIP_DEFLATED
                    info.external_attr = 0o644 << 16
                    made.writestr(info, file.read_bytes())


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


_VALUES = "value/"
_BROUGHT = ("", "builtin", "builtin-draft")
_TWIN_FILES = ("config.json", "generation_config.json", "tiktoken.model", *TOKENIZER_FILES)
"""All that a model of random weights is read from. Nothing else of its directory goes along, so that no weights do."""
WORDS: Final[Mapping[str, str]] = {
    "model": "DIR",
    "draft": "DRAFT",
    "kernels": "PROFILE",
    "force_tokens": "TRACE",
}
"""What stands in a README for what is missing, by the scenario's key."""


class PackedPaths:
    """``packed`` are the names of what went along; ``missing`` says for each trace which keys name what did not."""

    def __init__(self, root: Path, traces: tuple[Trace, Trace]) -> None:
        """``root`` is the directory that becomes the pack."""
        self._root, self._traces = root, traces
        self._names: dict[Place, str] = {}
        self.packed: list[str] = []
        self.missing: list[dict[str, str]] = []

    def scenario(self, trace: Trace) -> dict[str, Any]:
        """A run's scenario with paths that hold inside of the pack; to be asked once a trace, in order."""
        keys, missing = dict(trace.scenario), {}
        for key in WORDS:
            value = keys.get(key)
            if not isinstance(value, str) or value in _BROUGHT:
                continue
            inside = self._inside(key, value)
            if inside is None:
                missing[key] = value
            else:
                keys[key] = inside
        self.missing.append(missing)
        return keys

    def has(self, trace: Trace, key: str) -> bool:
        """Whether what a run names by ``key`` is in the pack."""
        return key not in self.missing[self._traces.index(trace)] and trace.scenario.get(key) not in (
            None,
            *_BROUGHT,
        )

    def _inside(self, key: str, value: str) -> str | None:
        """What a key's value is inside of the pack; None where that is missing."""
        if key == "kernels":
            found = re.fullmatch(r"(.*\.toml)((?::.*)?)", value, re.DOTALL)
            if found is None:
                return value
            file = Path(found[1])
            return f"{self._file(file)}{found[2]}" if file.is_file() else None
        if key == "force_tokens":
            return self._tokens(place(value))
        folder = Path(value)
        return self._twin(folder, key) if _is_random(folder) else None

    def _file(self, file: Path) -> str:
        def write(path: Path) -> None:
            path.write_bytes(file.read_bytes())

        return self._placed(file, "profile", ".toml", write)

    def _twin(self, folder: Path, key: str) -> str:
        def write(path: Path) -> None:
            path.mkdir()
            names = {*_TWIN_FILES, *(found.name for found in folder.glob("*.tiktoken"))}
            for name in sorted(names):
                if (folder / name).is_file():
                    shutil.copyfile(folder / name, path / name)

        return self._placed(folder, key, "", write)

    def _tokens(self, folder: Place) -> str | None:
        for trace, name in zip(self._traces, "ab", strict=True):
            if folder.resolve() == trace.path.resolve():
                return f"./{name}"
        try:
            given = Trace.open(folder)
        except TraceError:
            return None
        return self._placed(folder, "tokens", "", lambda path: without_values(given, path, given.scenario))

    def _placed(self, source: Place, name: str, suffix: str, write: Any) -> str:
        """Write ``source`` once, under a name of its own."""
        source = source.resolve()
        if source not in self._names:
            number, given = 2, f"{name}{suffix}"
            while given in self.packed:
                given, number = f"{name}-{number}{suffix}", number + 1
            self.packed.append(given)
            self._names[source] = given
            write(self._root / given)
        return f"./{self._names[source]}"


def _is_random(folder: Path) -> bool:
    try:
        return RANDOM in json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def without_values(trace: Trace, path: Path, scenario: Mapping[str, Any]) -> None:
    """A copy of a trace at ``path``, a new directory, without captured values: digests, tokens and logs stay.

    Its scenario is ``scenario``. Nothing but the trace's own files is copied; of one that was not finished, or is damaged, what
    can be read, and the copy is marked as not finished. Raises TraceReadError.
    """
    from safetensors.numpy import save

    path.mkdir()
    header = {**trace.header, "scenario": dict(scenario), "complete": trace.complete}
    for name, raw in trace.logs():
        (path / name).write_bytes(raw)
    entries = []
    for number, shard in enumerate(trace.shards):
        data = save(dict(_kept(shard))) if shard.value_columns() else read_bytes(shard.path)
        name = shard_name(number)
        (path / name).write_bytes(data)
        entries.append({"name": name, "bytes": len(data), "crc32": zlib.crc32(data)})
    header["shards"] = entries if trace.complete else []
    header["logs"] = trace.header["logs"] if trace.complete else []
    (path / HEADER).write_bytes(encode(header))


def _kept(shard: Shard) -> Iterator[tuple[str, Any]]:
    for name, tensor in shard.tensors.items():
        if not name.startswith(_VALUES):
            yield name, read_array(shard.path, tensor.offset, tensor.shape, STORAGE[tensor.dtype])


_WHAT = {
    "model": "model",
    "draft": "draft model",
    "kernels": "dispatch profile",
    "force_tokens": "trace that tokens were forced from",
}


def readme(report: Report, traces: tuple[Trace, Trace], places: PackedPaths) -> str:
    """The text, in Markdown."""
    return f"""# Where two runs diverge

> {sentence(report.headline, leading=True)}

One command, in this folder, runs both sides again and says why they diverge:

    {command(places)}

{_needed(traces, places)}

{_bits(traces, places)}| file | holds |
|---|---|
| `a.toml`, `b.toml` | the two scenarios; prompts are in them |
| `a/`, `b/` | the two traces: digests of every recorded row, tokens, forwards; no values and no weights |
{_packed(places)}| `environment.json` | what both were recorded on |
| `report.html`, `report.md`, `report.txt`, `report.json` | the report |
"""


def command(places: PackedPaths) -> str:
    """What runs both sides again, in the folder of what was unpacked."""
    return f"detdiff explain a.toml b.toml{_options(places)}"


def _options(places: PackedPaths) -> str:
    """The flags that say where what is missing is, as words of a command."""
    a, b = places.missing
    both = [key for key in WORDS if key in a and a.get(key) == b.get(key)]
    parts = {
        "--both": [f"{key}={WORDS[key]}" for key in both],
        "--a": [f"{key}={WORDS[key]}-A" for key in a if key not in both],
        "--b": [f"{key}={WORDS[key]}-B" for key in b if key not in both],
    }
    return "".join(
        f" {option} {flags[0] if len(flags) == 1 else repr(' '.join(flags))}"
        for option, flags in parts.items()
        if flags
    )


def _needed(traces: tuple[Trace, Trace], places: PackedPaths) -> str:
    lines = []
    if any(places.has(trace, "model") for trace in traces):
        lines.append(
            "The model is in `model/`: a configuration and a seed, from which detdiff makes its weights."
        )
    if all(trace.scenario.get("model") == "builtin" for trace in traces):
        lines.append("The model is the one that detdiff brings along.")
    if not any(places.missing):
        return " ".join([*lines, "Nothing else is needed."])
    a, b = places.missing
    if "model" in a or "model" in b:
        lines.append("The model's weights are not in here.")
    for key, what in _WHAT.items():
        if a.get(key) == b.get(key) and key in a:
            lines.append(f"The {what} was {_code(a[key])}.")
        else:
            lines += [
                f"The {what} of {side} was {_code(missing[key])}."
                for side, missing in (("a", a), ("b", b))
                if key in missing
            ]
    lines.append(
        "Put where that is now in the place of the words in capitals; `environment.json` has the hashes of weights, configuration "
        "and tokenizer."
    )
    return " ".join(lines)


def _code(path: str) -> str:
    shown = escaped(path, "\\")
    return inline(shown) if "`" in shown else f"`{shown}`"


def _bits(traces: tuple[Trace, Trace], places: PackedPaths) -> str:
    """How to compare bits; empty where a replay cannot be told where all that it needs is."""
    a, b = places.missing
    whole = all(trace.complete for trace in traces)
    if not whole or a != b or any(key != "model" for key in a):
        return ""
    moved = " --model DIR" if a else " --model model" if places.has(traces[0], "model") else ""
    return f"""To see whether your machine gives the very bits that were recorded here:

    detdiff compare a b --replay{moved}

"""


def _packed(places: PackedPaths) -> str:
    return "".join(f"| `{name}` | what the scenarios name by it |\n" for name in places.packed)
