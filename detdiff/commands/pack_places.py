"""Where what a run names lies inside of a pack: what can go along does, and the rest is noted as missing."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from detdiff.engines.mlx.model_directory import RANDOM, TOKENIZER_FILES
from detdiff.errors import TraceError
from detdiff.trace import Trace
from detdiff.trace.files import read_bytes
from detdiff.trace.header import FORWARDS, HEADER, TEXTS, encode
from detdiff.trace.shard import shard_name

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


class Places:
    """``packed`` are the names of what went along; ``missing`` says for each trace which keys name what did not."""

    def __init__(self, root: Path, traces: tuple[Trace, Trace]) -> None:
        """``root`` is the directory that becomes the pack."""
        self._root, self._traces = root, traces
        self._names: dict[Path, str] = {}
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
        folder = Path(value)
        if key == "force_tokens":
            return self._tokens(folder)
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

    def _tokens(self, folder: Path) -> str | None:
        for trace, name in zip(self._traces, "ab", strict=True):
            if folder.resolve() == trace.path.resolve():
                return f"./{name}"
        try:
            given = Trace.open(folder)
        except TraceError:
            return None
        return self._placed(folder, "tokens", "", lambda path: without_values(given, path, given.scenario))

    def _placed(self, source: Path, name: str, suffix: str, write: Any) -> str:
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
    for name in (FORWARDS, TEXTS):
        (path / name).write_bytes(read_bytes(trace.path / name))
    entries = []
    for number, shard in enumerate(trace.shards):
        data = save(dict(_kept(shard.path))) if shard.value_columns() else read_bytes(shard.path)
        name = shard_name(number)
        (path / name).write_bytes(data)
        entries.append({"name": name, "bytes": len(data), "crc32": zlib.crc32(data)})
    header["shards"] = entries if trace.complete else []
    header["logs"] = trace.header["logs"] if trace.complete else []
    (path / HEADER).write_bytes(encode(header))


def _kept(path: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    with safe_open(os.fspath(path), framework="np") as tensors:
        for name in tensors.keys():
            if not name.startswith(_VALUES):
                yield name, tensors.get_tensor(name)
