"""Every operation that the real llama.cpp computes is inside its bound, and one that it gets wrong is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import KINDS, need_llama, tiny_gguf, tiny_k_gguf
from tiers import some_now

from detdiff import Scenario, Trace, record
from detdiff.engines.llama_cpp.engine import LlamaEngine
from detdiff.errors import EngineRefuses, OracleRefused
from detdiff.explain.oracle import Judgement, judge
from detdiff.explain.origins import Captured
from detdiff.explain.roundings import Arithmetic

PROMPTS = ("The cat sat on", "In the beginning was", "ab", "Once upon a time there lived")


@pytest.fixture(autouse=True)
def library() -> None:
    need_llama()


def run(file: Path, folder: Path, name: str = "a", **settings: Any) -> tuple[LlamaEngine, Trace, Scenario]:
    asked = Scenario.from_dict(
        {
            "model": str(file),
            "engine": {"name": "llama.cpp", **settings},
            "request": [{"prompt": prompt} for prompt in PROMPTS],
            "max_tokens": 3,
            "ignore_stop": True,
            "schedule": "continuous",
            "capture": "full",
        }
    )
    engine = LlamaEngine(file, settings)
    return engine, record(asked, folder / name, engine=engine), asked


def judgements(
    engine: LlamaEngine, trace: Trace, asked: Scenario, requests: Sequence[int] = range(len(PROMPTS))
) -> tuple[dict[str, list[Judgement]], Counter[str]]:
    """Of every site, all rows of a forward together and attention row by row; and what was refused, by its first words."""
    captured, index = Captured(trace), trace.row_index()
    found: dict[str, list[Judgement]] = {}
    refused: Counter[str] = Counter()
    for site in trace.sites:
        if site.kind == "cache_read":
            continue
        for request in requests:
            for forward in np.unique(index.forward[index.request == request]).tolist():
                mine = np.flatnonzero((index.request == request) & (index.forward == forward)).tolist()
                # Logits, and what only they need, are computed of last rows alone.
                mine = [row for row in mine if captured.value(row, site.name, site.outputs[0]) is not None]
                groups = [[row] for row in mine] if site.kind == "attention" else [mine] if mine else []
                for rows in groups:
                    try:
                        id = str(trace.requests[request]["id"])
                        operation = engine.operation(site, captured, id, rows, asked)
                        output, dtype = captured.output(site, rows)
                        found.setdefault(site.name, []).append(
                            judge(operation, output, Arithmetic("native", dtype))
                        )
                    except OracleRefused as error:
                        refused[f"{site.name}: {error}"] += 1
    return found, refused


@pytest.mark.parametrize(
    ("kind", "flash"), some_now([(k, f) for k in KINDS for f in ("on", "off")], 2, ci=(1, 4, 7, 8))
)
def test_all_that_llama_cpp_computes_is_inside(kind: str, flash: str, tmp_path: Path) -> None:
    found, refused = judgements(*run(tiny_gguf(tmp_path / "m.gguf", kind), tmp_path, flash_attention=flash))
    assert not refused
    assert {name: each for name, each in found.items() if any(not one.inside for one in each)} == {}
    worst = {name: max(one.worst for one in each) for name, each in found.items()}
    assert len(worst) > 35 and max(worst.values()) > 0.9


@pytest.mark.parametrize("kind", some_now(["Q4_K", "Q6_K"], 0))
def test_products_with_superblocks_are_inside(kind: str, tmp_path: Path) -> None:
    """Of the files that most people have: their rows are staged in blocks of 256."""
    found, refused = judgements(*run(tiny_k_gguf(tmp_path / "m.gguf", kind), tmp_path))
    assert not refused
    assert {name: each for name, each in found.items() if any(not one.inside for one in each)} == {}
    worst = {name: max(one.worst for one in each) for name, each in found.items()}
    assert len(worst) > 20 and max(worst[name] for name in worst if "MUL_MAT" in name) > 0.001


@pytest.mark.parametrize("kind", some_now(["Q5_K", "Q3_K", "IQ4_NL"], 0))
def test_products_with_blocks_that_are_not_known_are_refused(kind: str, tmp_path: Path) -> None:
    found, refused = judgements(*run(tiny_k_gguf(tmp_path / "m.gguf", kind), tmp_path))
    assert sum("ggml's staging" in each or "GGUF" in each or kind in each for each in refused)
    assert {name: each for name, each in found.items() if any(not one.inside for one in each)} == {}


def test_weights_of_another_file_are_outside(tmp_path: Path) -> None:
    """The engine ran one file, the oracle reads one with a row of one matrix changed: that product alone is outside."""
    import gguf

    file = tiny_gguf(tmp_path / "m.gguf")
    engine, trace, asked = run(file, tmp_path)
    tensor = next(each for each in gguf.GGUFReader(file).tensors if each.name == "blk.1.ffn_up.weight")
    raw = bytearray(file.read_bytes())
    at = int(tensor.data_offset)
    width = tensor.data.shape[1] * 2
    raw[at + 5 * width : at + 6 * width] = raw[at + 6 * width : at + 7 * width]
    (tmp_path / "other.gguf").write_bytes(raw)
    engine.model.path = tmp_path / "other.gguf"
    found, _ = judgements(engine, trace, asked)
    wrong = {name: each for name, each in found.items() if any(not one.inside for one in each)}
    assert set(wrong) == {"ffn_up-1.MUL_MAT"}
    assert {one.where[1] for one in wrong["ffn_up-1.MUL_MAT"] if not one.inside} == {5}


@pytest.mark.parametrize(
    ("cache", "flash"), some_now([("f32", "off"), ("bf16", "on"), ("bf16", "off"), ("q8_0", "on")], 3)
)
def test_caches_of_other_types(cache: str, flash: str, tmp_path: Path) -> None:
    file = tiny_gguf(tmp_path / "m.gguf", width=128, inner=128)
    settings = {"cache_type_k": cache, "cache_type_v": cache, "flash_attention": flash}
    found, refused = judgements(*run(file, tmp_path, **settings))
    assert {name: each for name, each in found.items() if any(not one.inside for one in each)} == {}
    unknown = {name.split(":")[0].split(".")[-1] for name in refused}
    # Codes of eight bits are bytes in a trace: what was written and what attention made of it is not judged, and said so.
    assert unknown == ({"write", "FLASH_ATTN_EXT"} if cache == "q8_0" else set())


def test_a_cache_that_is_not_seen_is_refused_where_rows_need_it(tmp_path: Path) -> None:
    """Over a float32 cache, flash attention reads a copy: each stream's rows would be taken for another's."""
    file = tiny_gguf(tmp_path / "m.gguf")
    settings = {"cache_type_k": "f32", "cache_type_v": "f32", "flash_attention": "on"}
    with pytest.raises(EngineRefuses, match="cannot be told apart"):
        run(file, tmp_path, **settings)
    assert not (tmp_path / "a").exists()
    engine, trace, asked = run(file, tmp_path, "b", unified=True, **settings)
    assert "cache" in trace.header["lacks"]
    assert not [event for line in trace.forwards() for event in line.get("events", ())]
    found, _ = judgements(engine, trace, asked)
    assert {name: each for name, each in found.items() if any(not one.inside for one in each)} == {}
    assert len(found) > 30
