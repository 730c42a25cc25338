"""llama.cpp as an engine: what it records is what was computed, and any two compositions of one that computes rows alike are equal."""

from __future__ import annotations

import ctypes as c
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import need_llama, tiny_gguf
from tiers import some_now

from detdiff import compare, record
from detdiff.engines.base import RunOptions
from detdiff.engines.registry import open_named
from detdiff.errors import DetdiffError, EngineRefuses, LlamaFailed, LlamaLibraryRefused, LlamaMissing
from detdiff.scenario import Capture, Request, Scenario, Schedule
from detdiff.trace import Trace, digest_rows

PROMPTS = ("The quick brown fox", "Once", "In the beginning was", "Water boils at 100")
ALIKE = ("Q8_0", "Q4_1", "Q4_0")
"""Weights whose rows llama.cpp computes alike for every number of rows on a CPU."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_llama()
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def engines(folder: Path) -> Any:
    found: dict[tuple[str, str], Any] = {}

    def opened(kind: str, **settings: Any) -> Any:
        key = kind, json.dumps(settings, sort_keys=True)
        if key not in found:
            path = folder / f"{kind}.gguf"
            if not path.exists():
                # A head of 32, the block of a quantised cache.
                tiny_gguf(path, kind, heads=2, kv_heads=2)
            found[key] = open_named("llama.cpp", str(path), settings)
        return found[key]

    return opened


def scenario(
    kind: str = "serial", *, tokens: int = 6, capture: Capture | None = None, **schedule: Any
) -> Scenario:
    arrivals = (0, 1, 2, 5) if kind == "continuous" else (0,) * 4
    return Scenario(
        model="tiny",
        engine="llama.cpp",
        requests=tuple(
            Request(id=f"r{n}", prompt=prompt, max_tokens=tokens + n, arrival=arrival, ignore_stop=True)
            for n, (prompt, arrival) in enumerate(zip(PROMPTS, arrivals, strict=True))
        ),
        schedule=Schedule(kind, "packed", **schedule),  # type: ignore[arg-type]
        capture=capture or Capture(),
    )


def events(trace: Trace) -> list[Any]:
    lines = (trace.path / "forwards.jsonl").read_text().splitlines()
    return [event for line in lines for event in json.loads(line).get("events", [])]


COMPOSITIONS: dict[str, dict[str, Any]] = {
    "static": {"kind": "static"},
    "continuous": {"kind": "continuous"},
    "two at a time": {"kind": "continuous", "active": 2},
    "chunks": {"kind": "continuous", "prefill_chunk": 3},
    "budget": {"kind": "continuous", "row_budget": 4, "prefill_chunk": 5},
}


@pytest.mark.parametrize("name", COMPOSITIONS)
@pytest.mark.parametrize("kind", some_now(ALIKE, 0))
def test_compositions_of_rows_that_are_computed_alike_are_equal(
    engines: Any, tmp_path: Path, kind: str, name: str
) -> None:
    engine = engines(kind)
    alone = record(scenario(), tmp_path / "alone", engine=engine)
    together = record(scenario(**COMPOSITIONS[name]), tmp_path / "together", engine=engine)
    found = compare(alone, together)
    assert found.identical and found.compared.digests > 3000
    for trace in (alone, together):
        assert trace.header["observer"]["equal"] is True and events(trace) == []
    most = max(sum(row["count"] for row in json.loads(line)["rows"]) for line in _forwards(together))
    assert most > 1 and all(len(json.loads(line)["rows"]) == 1 for line in _forwards(alone))


def _forwards(trace: Trace) -> list[str]:
    return [
        line
        for line in (trace.path / "forwards.jsonl").read_text().splitlines()
        if line.startswith('{"forward"')
    ]


@pytest.mark.parametrize(
    "settings",
    some_now(
        [
            {"unified": True},
            {"flash_attention": "off"},
            {"cache_type_k": "q8_0", "cache_type_v": "q8_0"},
            {"ubatch": 3},
            {"flash_attention": "off", "unified": True},
            {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": "off"},
            {"ubatch": 3, "unified": True},
            {"threads": 2},
        ],
        0,
        1,
        2,
        3,
    ),
)
def test_what_attention_reads_is_what_was_written(
    engines: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """With every layout of the cache; which kernels differ there is the processor's own."""
    trace = record(scenario("continuous"), tmp_path / "trace", engine=engines("F16", **settings))
    assert trace.header["observer"]["equal"] is True and events(trace) == []
    assert "cache" not in trace.header["lacks"]
    seen = 0
    for shard in trace.shards:
        for number, table in shard.tables.items():
            digests = shard.digests(number)
            for layer in (0, 1):
                written, read = (
                    digests[:, table[trace.port_index(f"cache_l{layer}.read", which)]]
                    for which in ("written", "read")
                )
                assert np.array_equal(written, read)
                seen += len(read)
    assert seen > 50


def test_requests_that_end_early_leave_the_check_of_recording_equal(engines: Any, tmp_path: Path) -> None:
    """In a shared cache the cells of one that ended are others' next, in the batches that are computed again too."""
    for short in (scenario("static", tokens=1), scenario("continuous", tokens=1)):
        trace = record(short, tmp_path / short.schedule.kind, engine=engines("F16", unified=True))
        assert trace.header["observer"] == {"forwards": 4, "equal": True}


def test_a_batch_may_have_more_rows_than_llama_cpp_takes_by_default(engines: Any, tmp_path: Path) -> None:
    """That is 2048; of more than its context was made for it ends the process."""
    requests = tuple(
        Request(id=f"r{n}", tokens=tuple(range(3 + n, 233 + n)), max_tokens=2, ignore_stop=True)
        for n in range(9)
    )
    long = replace(scenario("static"), requests=requests)
    trace = record(long, tmp_path / "all", engine=engines("Q8_0"))
    (first, *_) = (json.loads(line) for line in _forwards(trace))
    assert sum(row["count"] for row in first["rows"]) > 500 and events(trace) == []
    again = record(
        replace(long, schedule=Schedule("continuous", "packed")), tmp_path / "again", engine=engines("Q8_0")
    )
    found = compare(again, trace)
    assert found.identical and found.compared.rows == 9 * 231
    with pytest.raises(LlamaFailed, match="2070 rows, and the cache has 512 cells"):
        record(long, tmp_path / "small", engine=engines("Q8_0", context=256))


def test_a_value_has_the_digest_that_was_recorded(engines: Any, tmp_path: Path) -> None:
    engine = engines("F16")
    trace = record(
        scenario("static", tokens=2, capture=Capture(level="full")), tmp_path / "full", engine=engine
    )
    kinds, count = set(), 0
    for shard in trace.shards:
        for table, column in shard.value_columns():
            value = shard.values(table, column)
            assert value is not None
            places = np.searchsorted(shard.table_rows(table), value.rows)
            digests = shard.digests(table)[places, column]
            assert np.array_equal(digest_rows(value.data, value.dtype), digests)
            kinds.add(value.dtype)
            count += len(digests)
    assert kinds == {"F16", "F32"} and count > 1000


def test_recorded_logits_are_those_of_plain_calls(engines: Any, tmp_path: Path) -> None:
    from detdiff.engines.llama_cpp.context import BatchRow, LlamaContext

    engine = engines("F16")
    trace = record(scenario(tokens=3), tmp_path / "trace", engine=engine, options=RunOptions(observe=0))
    generated = trace.generated()
    with engine.prepared(scenario(tokens=3)) as run:
        settings = run.context.settings
    context = LlamaContext(engine.model, settings)
    tokens = trace.requests[0]["tokens"]
    context.decode([BatchRow(token, n, 0, n == len(tokens) - 1) for n, token in enumerate(tokens)])
    logits = context.logits(len(tokens) - 1)
    first = np.flatnonzero((generated.request == 0) & (generated.index == 0))[0]
    ids = generated.top_ids[first]
    assert np.array_equal(logits[ids].view(np.uint32), generated.top_logits[first].view(np.uint32))
    context.close()


def test_sites_have_llama_cpps_own_names(engines: Any, tmp_path: Path) -> None:
    trace = record(scenario(tokens=1), tmp_path / "trace", engine=engines("F16"))
    names = {site.name: site for site in trace.sites}
    assert names["Qcur-0.MUL_MAT"].kind == "linear" and names["Qcur-0.MUL_MAT"].inputs == ("in",)
    assert names["Qcur-1.ROPE"].kind == "rope" and names["Qcur-1.ROPE"].layer == 1
    assert names["kqv_out-0.FLASH_ATTN_EXT"].inputs == ("in", "kv")
    assert names["cache_l1.write"].outputs == ("K.0", "K.1", "V.0", "V.1")
    assert names["result_output.MUL_MAT"].kind == "head" and names["ffn_inp-0.ADD"].inputs == ("in", "in2")
    assert names["embd.GET_ROWS"].kind == "embedding"


# What is refused.


def refused(model: Path | str | None, **settings: Any) -> str:
    with pytest.raises(DetdiffError) as error:
        open_named("llama.cpp", None if model is None else str(model), settings)
    words = str(error.value)
    assert "\n" not in words and ("expected" in words or "did you mean" in words)
    return words


def test_what_is_no_gguf_file_is_refused(folder: Path) -> None:
    assert "needs a model" in refused(None)
    assert "no file" in refused(folder / "nowhere.gguf")
    (folder / "text.gguf").write_text("a text and no model " * 20)
    assert "invalid magic" in refused(folder / "text.gguf")
    (folder / "empty.gguf").write_bytes(b"")
    assert "does not load" in refused(folder / "empty.gguf")


@pytest.mark.parametrize("part", some_now([0.5, 0.02, 0.1, 0.9, 0.999], 0))
def test_a_cut_file_is_refused(folder: Path, tmp_path: Path, part: float) -> None:
    whole = tiny_gguf(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: int(len(whole) * part)])
    assert "does not load" in refused(tmp_path / "cut.gguf")


def test_a_file_that_ends_the_process_ends_a_trial_only(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp aborts where a file contradicts itself in some ways."""
    from detdiff.engines.llama_cpp import trial

    monkeypatch.setattr(
        trial,
        "_TRIAL",
        "import os, sys; print('GGML_ASSERT(n_head > 0) failed', file=sys.stderr, flush=True); os.abort()",
    )
    path = tiny_gguf(tmp_path / "contradicts.gguf", seed=7)
    assert "GGML_ASSERT(n_head > 0) failed" in refused(path)


def test_settings_that_there_are_not_are_refused(folder: Path) -> None:
    path = tiny_gguf(folder / "settings.gguf")
    assert "no setting 'thread'" in refused(path, thread=2)
    assert "one of auto, off, on" in refused(path, flash_attention="maybe")
    assert "one of" in refused(path, cache_type_k="q3")
    assert "whole number" in refused(path, threads=0)
    assert "from 1 to 512" in refused(path, threads=100_000)
    assert "true or false" in refused(path, unified="both")


def test_what_does_not_fit_is_refused_before_anything_is_recorded(engines: Any, tmp_path: Path) -> None:
    engine = engines("F16")
    long = scenario(tokens=400)
    with pytest.raises(DetdiffError, match="context is 256"):
        record(long, tmp_path / "long", engine=engine)
    assert not (tmp_path / "long").exists()
    with pytest.raises(EngineRefuses, match="temperature"):
        from detdiff.scenario import Sampling

        hot = tuple(replace(each, sampling=Sampling(temperature=1.0)) for each in scenario().requests)
        record(replace(scenario(), requests=hot), tmp_path / "hot", engine=engine)
    assert not (tmp_path / "hot").exists()


def test_a_context_that_cannot_be_made_is_a_paragraph(engines: Any) -> None:
    """In a process that may not have the memory."""
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from detdiff.engines.llama_cpp.context import ContextSettings, LlamaContext, LlamaModel\n"
        "from detdiff.engines.llama_cpp.library import find_library\n"
        "from detdiff.errors import LlamaModelRefused\n"
        "model = LlamaModel(find_library(), Path(sys.argv[1]))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "try:\n"
        "    LlamaContext(model, ContextSettings(1 << 25, 1))\n"
        "except LlamaModelRefused as error:\n"
        "    print(error)\n"
    )
    path = str(engines("F16").model.path)
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert "makes no context of 33554432 cells" in done.stdout and done.stderr == ""


# The library.


def test_a_library_of_another_build_is_refused(engines: Any) -> None:
    """Fields moved, taken out, or added; each by the check that sees it."""
    from detdiff.engines.llama_cpp import layout, library

    real = engines("F16").library
    fields = list(library.ContextParams._fields_)
    places = {name: n for n, (name, _) in enumerate(fields)}

    def changed(change: Any) -> Any:
        own = list(fields)
        change(own)
        context = type("ContextParams", (c.Structure,), {"_fields_": own})
        return library.LlamaLibrary(real.package, real.path, library.Structures(context, library.ModelParams))

    layout.check_library(real)
    for change in (
        lambda own: own.insert(places["type_k"], ("new", c.c_size_t)),
        lambda own: own.pop(places["yarn_orig_ctx"]),
        lambda own: own.append(("new", c.c_void_p)),
        lambda own: own.insert(places["embeddings"], own.pop(places["kv_unified"])),
    ):
        with pytest.raises(LlamaLibraryRefused, match=real.version):
            layout.check_library(changed(change))


def test_a_tensor_laid_out_otherwise_is_refused(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from detdiff.engines.llama_cpp import layout, library

    moved = list(library.GgmlTensor._fields_)
    moved[0], moved[4] = ("op", c.c_int), ("type", c.c_int)
    other = type("GgmlTensor", (c.Structure,), {"_fields_": moved})
    monkeypatch.setattr(layout, "GgmlTensor", other)
    with pytest.raises(LlamaLibraryRefused, match="half-precision"):
        layout.check_library(engines("F16").library)


def test_other_logits_of_the_known_model_are_refused(engines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from detdiff.engines.llama_cpp import layout

    true = layout.KnownModel.logits
    monkeypatch.setattr(layout.KnownModel, "logits", lambda self, tokens: true(self, tokens) + 0.01)
    with pytest.raises(LlamaLibraryRefused, match="off by 0.01"):
        layout.check_library(engines("F16").library)


def test_without_a_library_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from detdiff.engines.llama_cpp import library

    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LlamaMissing, match="xllamacpp"):
        library.find_library()


def test_llama_cpp_python_brings_its_own_structures(
    engines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of that name, whose structures are declared by itself, over the library that is here."""
    from importlib.util import find_spec

    from detdiff.engines.llama_cpp import layout, library

    real = engines("F16").library
    package = tmp_path / "llama_cpp"
    package.mkdir()
    (package / "__init__.py").write_text("")
    declared = "".join(
        f"class {name}(ctypes.Structure):\n"
        f"    _fields_ = [(name, getattr(ctypes, kind)) for name, kind in {_named(kind._fields_)}]\n"
        for name, kind in (
            ("llama_context_params", library.ContextParams),
            ("llama_model_params", library.ModelParams),
        )
    )
    (package / "llama_cpp.py").write_text(
        f"import ctypes\n{declared}_lib = ctypes.CDLL({str(real.path)!r})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        library.importlib.util, "find_spec", lambda name: None if name == "xllamacpp" else find_spec(name)
    )
    found = library.find_library()
    assert found.title == "llama-cpp-python of unknown version"
    assert found.structures.context is not library.ContextParams
    layout.check_library(found)


def _named(fields: Any) -> list[tuple[str, str]]:
    return [(name, kind.__name__) for name, kind in fields]
