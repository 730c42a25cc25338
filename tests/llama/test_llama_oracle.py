"""llama.cpp's operations for the oracle: ggml's arithmetic stays inside its bounds, a wrong element or a wrong operation does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ggml_statement import StatedRun, product, staged
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from models import KINDS
from tiers import some_now

from detdiff.engines.llama_cpp.ggml_bounds import Elementwise, StagedLinear, staged_rows
from detdiff.engines.llama_cpp.known_model import PROMPT, KnownModel
from detdiff.engines.llama_cpp.oracle_operations import GgufWeights, SiteNode, operation_of
from detdiff.errors import OracleRefused
from detdiff.explain.oracle import Judgement, judge
from detdiff.explain.roundings import Arithmetic

CPU = Arithmetic("native", "float32")
TOKENS = (*PROMPT, 99, 100, 1, 250, 17, 17, 3, 64)


def judged(run: StatedRun, weights: GgufWeights) -> dict[str, Judgement]:
    """Every site of a run, attention row by row (the worst row stands for all)."""
    found: dict[str, Judgement] = {}
    for name, node in run.nodes.items():
        every = list(range(len(TOKENS)))
        for rows in [[row] for row in every] if node.site.kind == "attention" else [every]:
            operation = operation_of(weights, node.node, node.site, run, "r", rows)  # type: ignore[arg-type]
            dtype = "float16" if node.site.kind == "cache_write" else "float32"
            one = judge(operation, run.output(name, rows), Arithmetic("native", dtype))
            if name not in found or one.worst > found[name].worst:
                found[name] = one
    return found


def outside(run: StatedRun, weights: GgufWeights) -> list[str]:
    return [name for name, found in judged(run, weights).items() if not found.inside]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GgufWeights]:
    folder = tmp_path_factory.mktemp("gguf")
    return {
        kind: GgufWeights(KnownModel(layers=2, kind=kind).write(folder / f"{kind}.gguf")) for kind in KINDS
    }


@pytest.mark.parametrize("kind", some_now(KINDS, 1, 4))
@pytest.mark.parametrize("flash", [True, False])
def test_all_that_ggml_computes_is_inside(kind: str, flash: bool, files: dict[str, GgufWeights]) -> None:
    found: dict[str, float] = {}
    for lanes in (1, 8):
        run = StatedRun(KnownModel(layers=2, kind=kind), TOKENS, lanes=lanes, flash=flash)
        for name, each in judged(run, files[kind]).items():
            assert each.inside, (name, each)
            found[name] = max(found.get(name, 0.0), each.worst)
    # The bounds say something: each kind of operation comes near its own.
    assert max(found.values()) > 0.9
    least = {"ROPE": 0.02, "GLU": 0.05, "ADD": 0.5, "MUL": 0.5, "MUL_MAT": 0.002, "FLASH_ATTN_EXT": 0.05}
    for op, share in least.items():
        mine = [worst for name, worst in found.items() if name.rpartition(".")[2].split("#")[0] == op]
        assert not mine or max(mine) > share, (op, mine)


FAULTS = {
    "weight": "Qcur-1.MUL_MAT",
    "embedding": "embd.GET_ROWS",
    "eps": "norm-1.RMS_NORM",
    "norm weight": "attn_norm-1.MUL",
    "rope base": "Qcur-1.ROPE",
    "gate and up": "ffn_swiglu-1.GLU",
    "residual": "l_out-1.ADD",
    "cache": "cache_l1.write",
    "attention scale": "kqv-1.FLASH_ATTN_EXT",
    "entry skipped": "kqv-1.FLASH_ATTN_EXT",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_operation_is_outside_and_nothing_else(fault: str, files: dict[str, GgufWeights]) -> None:
    run = StatedRun(KnownModel(layers=2, kind="F16"), TOKENS, fault=fault)
    assert outside(run, files["F16"]) == [FAULTS[fault]]


@pytest.mark.parametrize("fault", ["attention scale", "entry skipped", "cache"])
def test_a_wrong_attention_without_flash_is_outside(fault: str, files: dict[str, GgufWeights]) -> None:
    run = StatedRun(KnownModel(layers=2, kind="F16"), TOKENS, fault=fault, flash=False)
    assert outside(run, files["F16"]) == [FAULTS[fault].replace("FLASH_ATTN_EXT", "MUL_MAT")]


@pytest.mark.parametrize("kind", KINDS)
def test_one_wrong_element_of_a_product_is_outside_at_its_place(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    weight, x = (
        rng.normal(0, 0.1, (48, 128)).astype(np.float32),
        rng.normal(0, 1, (5, 128)).astype(np.float32),
    )
    writer = GGUFWriter(tmp_path / "w.gguf", "llama")
    number = GGMLQuantizationType[kind]
    writer.add_tensor("w.weight", quantize(weight, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    operation = StagedLinear(x.astype(np.float64), GgufWeights(tmp_path / "w.gguf").matrix("w.weight"))
    sides = [product(x, weight, kind, lanes=lanes) for lanes in (1, 2)]
    assert not np.array_equal(*sides)
    for out in sides:
        assert judge(operation, out, CPU).inside
        bounded = operation.bounded(CPU)
        wrong = out.copy()
        wrong[3, 7] += 2.1 * bounded.bound[3, 7] * np.sign(out[3, 7] - bounded.exact[3, 7])
        found = judge(operation, wrong, CPU)
        assert (found.outside, found.where) == (1, (3, 7))
    # The rows of another request: nowhere near.
    assert judge(operation, np.roll(sides[0], 1, axis=0), CPU).outside > 200


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_staged_as_ggml_stages_them(kind: str) -> None:
    rng = np.random.default_rng(5)
    x = (rng.normal(0, 1, (40, 96)) * np.exp2(rng.integers(-8, 8, (40, 1)))).astype(np.float32)
    x[0] = 0
    form = {"F32": "float32", "F16": "float16", "Q4_1": "q8_1"}.get(kind, "q8_0")
    found = staged_rows(x.astype(np.float64), form)
    codes, scales = staged(x, kind)
    if form.startswith("q8"):
        codes = codes * np.repeat(scales.astype(np.float16).astype(np.float32), 32, axis=1)
    sure = found.doubt == 0
    assert np.array_equal(found.values[sure], codes[sure])
    assert sure.mean() > 0.99
    assert np.all(np.abs(found.values - codes) <= found.doubt)


def test_a_code_between_two_is_in_doubt_by_one_quantum() -> None:
    x = np.zeros((1, 32))
    x[0, :3] = 127.0, 2.5, 2.4
    found = staged_rows(x, "q8_1")
    assert found.doubt[0, :4].tolist() == [0, 1, 0, 0]
    assert found.values[0, 2] == 2.0
    assert found.sums_doubt is not None and found.sums_doubt[0, 0] > 0
    x[0, 1] = 2.0
    assert not staged_rows(x, "q8_1").doubt.any()


def test_sums_in_float16_are_inside_only_where_the_processor_has_them(files: dict[str, GgufWeights]) -> None:
    run = StatedRun(KnownModel(layers=2, kind="F16"), TOKENS)
    node = run.nodes["ffn_out-0.MUL_MAT"]
    x = node.given["in"].astype(np.float16)
    w = KnownModel(layers=2).weights()["blk.0.ffn_down.weight"].astype(np.float16)
    out = np.zeros((len(x), 8, len(w)), np.float16)
    for at in range(0, x.shape[1], 8):
        out += x[:, at : at + 8, None] * w[:, at : at + 8].T[None]
    halves = out.sum(axis=1, dtype=np.float16).astype(np.float32)
    for system, inside in (("Linux x86_64", False), ("Darwin arm64", True)):
        run.trace.header["environment"]["os"] = system
        rows = list(range(len(TOKENS)))
        operation = operation_of(files["F16"], node.node, node.site, run, "r", rows)  # type: ignore[arg-type]
        assert judge(operation, halves, CPU).inside is inside


@pytest.mark.parametrize("form", ["sum", "product", "swiglu"])
def test_elements_that_hurt_are_inside(form: str) -> None:
    rng = np.random.default_rng(1)
    a, b = (
        rng.normal(0, 1, 4000).astype(np.float32) * np.float32(2.0) ** rng.integers(-60, 6, 4000)
        for _ in range(2)
    )
    a, b = a.astype(np.float32), b.astype(np.float32)
    a[:4] = -100, -88.5, 88.5, 0
    with np.errstate(over="ignore", under="ignore"):
        out = {
            "sum": a + b,
            "product": a * b,
            "swiglu": a / (np.float32(1) + np.exp(-a)) * b,
        }[form]
    operation = Elementwise(form, a.astype(np.float64), b.astype(np.float64))  # type: ignore[arg-type]
    assert judge(operation, out, CPU).inside
    wrong = out.copy()
    place = int(np.argmax(np.abs(out)))
    wrong[place] *= np.float32(1 + 2.0**-18)
    assert judge(operation, wrong, CPU).where == (place,)
    assert not judge(operation, wrong, CPU).inside


def refused(run: StatedRun, weights: GgufWeights, at: str, **changes: object) -> str:
    node = run.nodes[at]
    site = replace(node.site, **changes)  # type: ignore[arg-type]
    run.nodes[site.name] = replace(node, site=site)
    with pytest.raises(OracleRefused) as caught:
        operation_of(weights, node.node, site, run, "r", [1]).bounded(CPU)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text and text.endswith(".")
    return text


def test_what_is_not_known_is_refused(files: dict[str, GgufWeights], monkeypatch: pytest.MonkeyPatch) -> None:
    run, weights = StatedRun(KnownModel(layers=2, kind="F16"), TOKENS), files["F16"]
    assert "is a TANH in a form" in refused(run, weights, "ffn_swiglu-0.GLU", name="x-0.TANH")
    assert "is a GLU in a form" in refused(run, weights, "ffn_swiglu-0.GLU", name="ffn_geglu-0.GLU")
    assert "is no site of this trace" in refused(run, weights, "l_out-0.ADD", inputs=("in",))
    node, site = run.nodes["Qcur-0.MUL_MAT"].node, run.nodes["Qcur-0.MUL_MAT"].site
    with pytest.raises(OracleRefused, match=r"has no tensor blk\.9"):
        operation_of(weights, replace(node, weight="blk.9.x"), site, run, "r", [1])  # type: ignore[arg-type]
    with pytest.raises(OracleRefused, match="row by row"):
        attention = run.nodes["kqv-0.FLASH_ATTN_EXT"]
        operation_of(weights, SiteNode(), attention.site, run, "r", [1, 2])  # type: ignore[arg-type]
    operation = operation_of(weights, node, site, run, "r", [1])  # type: ignore[arg-type]
    with pytest.raises(OracleRefused, match="on metal"):
        operation.bounded(Arithmetic("native", "float32", "metal"))
    for architecture, name in (("gemma3", "Qcur-0.ROPE"), ("gemma3", "kqv-0.FLASH_ATTN_EXT")):
        monkeypatch.setattr(weights, "architecture", architecture)
        assert "'gemma3' are not known" in refused(run, weights, name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    with pytest.raises(OracleRefused, match="not a GGUF file"):
        GgufWeights(tmp_path / "x.gguf")
