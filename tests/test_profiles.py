"""The profiles that are shipped: what they choose, against statements of the backends' own dispatch in plain Python."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detdiff_kernels import (
    Call,
    Choice,
    attention_order,
    kernel,
    kernel_names,
    profile,
    profile_names,
)
from detdiff_kernels.profile_file import parse_profile

ROOT = Path(__file__).resolve().parent.parent
MV, MM = "candle-metal/mv", "candle-metal/mm"
ONE = "candle-metal: second-to-last dimension 1 -> mv"
MORE = "candle-metal: second-to-last dimension 2.. -> mm"


def call(op: str = "linear", rows: int = 1, second_last: int = 1, **rest: object) -> Call:
    shape = {"k": 576, "n": 1536, "dtype": "float32", "bits": 4, **rest}
    return Call(op, rows, second_last, **shape)  # type: ignore[arg-type]


def attention(query: int = 1, keys: int = 64, head_dim: int = 64, gqa: int = 1, **rest: Any) -> Call:
    shape: dict[str, Any] = {"dtype": "bfloat16", "heads": 2 * gqa, "kv_heads": 2, **rest}
    return Call("attention", query, query, query=query, keys=keys, head_dim=head_dim, **shape)


@pytest.mark.parametrize(
    ("op", "rows", "second_last", "split", "kernel", "rule"),
    [
        ("linear", 1, 1, None, MV, ONE),
        ("head", 1, 1, None, MV, ONE),
        ("linear", 2, 1, None, MV, ONE),  # [2, 1, k], a padded decode, stays on mv
        ("linear", 2, 2, None, MM, MORE),  # [1, 2, k], a packed decode, does not
        ("linear", 124, 124, None, MM, MORE),
        ("linear", 1, 1, 4, MV, ONE),
        ("linear", 3, 3, 4, MV, f"split_rows 4: 3 rows <= 4 -> {ONE}"),
        ("head", 4, 4, 4, MV, f"split_rows 4: 4 rows <= 4 -> {ONE}"),
        ("linear", 5, 5, 4, MM, MORE),
        ("linear", 5, 5, 1024, MV, f"split_rows 1024: 5 rows <= 1024 -> {ONE}"),
        ("linear", 2, 2, 0, MM, MORE),
        ("switch", 1, 1, None, MV, "candle-metal: m <= experts -> mv"),
        ("switch", 2, 1, None, MM, "candle-metal: any shape -> mm"),
    ],
)
def test_candle_metal_looks_at_the_second_to_last_dimension(
    op: str, rows: int, second_last: int, split: int | None, kernel: str, rule: str
) -> None:
    assert profile("candle-metal").choose(call(op, rows, second_last), split) == Choice(kernel, rule)


def test_dense_and_quantised_weights_choose_alike_under_candle_metal() -> None:
    chosen = {
        profile("candle-metal").choose(call(bits=bits, dtype=dtype)).kernel
        for bits, dtype in product((None, 4, 8), ("float32", "bfloat16"))
    }
    assert chosen == {MV}


def test_one_output_is_a_vector_product_in_candle() -> None:
    assert profile("candle-metal").choose(call(rows=3, second_last=3, n=1, bits=None)).kernel == MV
    assert profile("candle-metal").choose(call(rows=3, second_last=3, n=1)).kernel == MM


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_is_valid_and_has_sources(name: str) -> None:
    shipped = profile(name)
    assert shipped.name == name and shipped.backend and "ead in the sources" in shipped.note
    assert all(one.source and one.tag for one in (*shipped.rules, *shipped.define))
    assert {one.kernel for one in shipped.rules} <= {*kernel_names(), "native"}


@pytest.mark.parametrize("name", profile_names())
def test_every_kernel_belongs_to_its_profile_and_does_the_operation(name: str) -> None:
    for one in profile(name).rules:
        if one.kernel != "native":
            assert one.kernel.startswith(f"{name}/")
            assert (kernel(one.kernel).op == "attention") == (one.op == {"attention"})


def test_all_backends_are_there() -> None:
    assert set(profile_names()) >= {
        "batch-invariant", "candle-metal", "flash-split-kv", "ggml-cpu-repack", "ggml-cuda", "ggml-metal", "mlx-cuda",
        "mlx-metal",
    }  # fmt: skip


# mlx-metal: (K, N both up to 2048, both up to 4096, else), by generation, letter and version.
LIMITS = {
    "new": {17: (33, 25, 13), 15: (13, 15, 13), 13: (14, 10, 6), 12: (18, 12, 10)},
    "old": {15: (18, 12, 10), 13: (14, 10, 6), 12: (18, 12, 10)},
}


def metal_limit(chip: tuple[int, str, str], k: int, n: int) -> int:
    generation, letter, version = chip
    table = LIMITS["new" if version in ("0.32.1", "0.32.4") else "old"]
    row = (32, 18, 12) if letter == "d" else table[max(low for low in table if low <= generation)]
    return row[0 if max(k, n) <= 2048 else 1 if max(k, n) <= 4096 else 2]


def metal_splits(m: int, n: int, k: int, group: int) -> int:
    unit = max(group, 32)
    splits = min(max(1, 512 // (-(-n // 32) * -(-m // 32))), k // unit)
    while k % (splits * unit):
        splits -= 1
    return splits


def metal_quantised(chip: tuple[int, str, str], m: int, k: int, n: int, bits: int, group: int) -> str:
    generation, _, version = chip
    old = "-0.32.0" if version < "0.32.1" else ""
    if m >= metal_limit(chip, k, n):
        split = metal_splits(m, n, k, group) > 1 and version >= "0.31.2"
        return f"qmm_splitk{old}" if split else f"qmm_t{old}"
    if k in (64, 128) and bits in (2, 4, 8):
        return "qmv_quad"
    if m >= 2 and generation >= 15 and version >= "0.32.0":
        return "qmv_wide"
    unit = 256 if bits in (6, 8) and not old else 512
    return "qmv_fast" if n % 8 == 0 and k % unit == 0 else "qmv"


def metal_dense(chip: tuple[int, str, str], m: int, k: int, n: int, dtype: str) -> str:
    generation, letter, version = chip
    recent = version >= "0.32.1" and generation >= 15
    if dtype != "float32" and recent and 2 <= m <= 15 and n >= 2 and k % 4 == 0:
        return "gemv_wide"
    if min(m, n) == 1:
        return "gemv"
    if generation >= (18 if letter == "p" else 17):
        most = max(m, n)
        return "splitk_nax" if k >= 3 * most or (most <= 1024 and k > 2 * most) else "steel"
    if version < "0.30.1":
        return "splitk-0.30.0" if (m // 16) * (n // 16) <= 32 and k >= 128 else "steel"
    tiles = -(-m // 16) * -(-n // 16)
    return (
        "splitk" if tiles <= (2048 if letter in "sd" else 1024) and k >= 128 and k >= max(m, n) else "steel"
    )


chips = st.tuples(
    st.integers(12, 18),
    st.sampled_from("pgscd"),
    st.sampled_from(["0.30.0", "0.31", "0.31.2", "0.32.0", "0.32.1", "0.32.4"]),
)
sizes = st.sampled_from([1, 2, 64, 128, 256, 512, 576, 896, 1536, 2048, 2304, 3584, 4096, 4864, 18944])


def spec_of(chip: tuple[int, str, str]) -> str:
    return f"mlx-metal:generation={chip[0]},letter={chip[1]},version={chip[2]}"


@given(
    chips,
    st.integers(1, 70),
    sizes.filter(lambda k: k >= 64),
    sizes,
    st.sampled_from([2, 3, 4, 5, 6, 8]),
    st.sampled_from([32, 64]),
)
def test_mlx_metal_takes_the_quantised_kernels_of_the_source(
    chip: tuple[int, str, str], m: int, k: int, n: int, bits: int, group: int
) -> None:
    found = profile(spec_of(chip)).choose(Call("linear", m, m, k, n, "bfloat16", bits, group))
    assert found.kernel == f"mlx-metal/{metal_quantised(chip, m, k, n, bits, group)}", found.rule
    if "qmm" in found.kernel:
        assert f"m >= limit ({metal_limit(chip, k, n)})" in found.rule


@given(chips, st.integers(1, 70), sizes, sizes, st.sampled_from(["float32", "float16", "bfloat16"]))
def test_mlx_metal_takes_the_dense_kernels_of_the_source(
    chip: tuple[int, str, str], m: int, k: int, n: int, dtype: str
) -> None:
    found = profile(spec_of(chip)).choose(Call("head", m, m, k, n, dtype))
    assert found.kernel == f"mlx-metal/{metal_dense(chip, m, k, n, dtype)}", found.rule


@given(
    st.sampled_from("pgscd"),
    st.integers(1, 20),
    st.integers(1, 9000),
    st.sampled_from([32, 64, 80, 96, 128, 192, 256]),
    st.integers(1, 8),
)
def test_mlx_metal_takes_the_attention_kernels_of_the_source(
    letter: str, query: int, keys: int, head_dim: int, gqa: int
) -> None:
    found = profile(f"mlx-metal:letter={letter}").choose(attention(query, keys, head_dim, gqa)).kernel
    if query <= 8 and query <= keys and query * gqa <= 32 and head_dim in (64, 96, 128, 256):
        two = (letter in "sd" and keys >= 1024) or (gqa > 1 and keys >= 4096)
        assert found.startswith("mlx-metal/sdpa_vector_2pass" if two else "mlx-metal/sdpa_vector")
        assert two or "2pass" not in found
    elif query > 8 and head_dim in (64, 72, 80, 96, 128):
        assert found == "mlx-metal/sdpa_steel"
    else:
        assert found == "mlx-metal/sdpa_unfused"


@pytest.mark.parametrize(
    ("entry", "other", "chip", "shape"),
    [
        ("13 if k <= 2048", "14 if k <= 2048", (15, "s", "0.32.1"), (13, 2048, 2048)),
        (
            "generation >= 15 and version",
            "generation >= 16 and version",
            (15, "s", "0.32.1"),
            (13, 2048, 2048),
        ),
        ("n % 8 == 0 and k % align", "n % 16 == 0 and k % align", (13, "s", "0.32.1"), (1, 512, 24)),
        ('version >= "0.32.1" and bits in (6, 8)', "bits in (6, 8)", (13, "s", "0.32.0"), (1, 2304, 576)),
    ],
)
def test_a_injected_threshold_is_told_from_the_source(
    entry: str, other: str, chip: tuple[int, str, str], shape: tuple[int, int, int]
) -> None:
    text = (files("detdiff_kernels") / "profiles" / "mlx-metal.toml").read_text("utf-8")
    assert entry in text
    injected = parse_profile(text.replace(entry, other), "Injected", kernel_names())
    values = {"generation": chip[0], "letter": chip[1], "version": chip[2]}
    m, k, n = shape
    found = injected.with_parameters(values).choose(Call("linear", m, m, k, n, "bfloat16", 8, 64)).kernel
    assert found != f"mlx-metal/{metal_quantised(chip, m, k, n, 8, 64)}"
    right = profile(spec_of(chip)).choose(Call("linear", m, m, k, n, "bfloat16", 8, 64)).kernel
    assert right == f"mlx-metal/{metal_quantised(chip, m, k, n, 8, 64)}"


@pytest.mark.parametrize(
    ("spec", "made", "kernel"),
    [
        ("mlx-metal", call("switch", 64, experts=8, group_size=64), "mlx-metal/qmv"),
        ("mlx-metal", call("switch", 64, experts=8, sorted=True, group_size=64), "mlx-metal/qmm_t"),
        ("mlx-metal", call("switch", 31, experts=8, sorted=True, group_size=64), "mlx-metal/qmv"),
        ("mlx-metal", call("switch", 15, experts=1, sorted=True, k=512), "mlx-metal/qmv_fast"),
        ("mlx-metal:version=0.32.0", call("switch", 64, experts=8, sorted=True), "mlx-metal/qmm_t-0.32.0"),
        ("mlx-metal", call("switch", 64, experts=8, bits=None), "mlx-metal/gemv"),
        ("mlx-metal", call("switch", 64, experts=8, bits=None, sorted=True), "mlx-metal/steel"),
        ("mlx-metal:generation=17,letter=g", call(rows=4096, second_last=4096, k=4096, n=4096), "mlx-metal/qmm_t"),
        ("mlx-metal:generation=17,nax=off", call(rows=16, second_last=16, k=64, n=64, bits=None), "mlx-metal/steel"),
        ("mlx-metal:nax=on", call(rows=16, second_last=16, k=512, n=16, bits=None), "mlx-metal/splitk_nax"),
        ("mlx-metal:nax=on,tf32=off", call(rows=16, second_last=16, k=512, n=16, bits=None), "mlx-metal/splitk"),
        ("mlx-cuda", call(rows=7, second_last=7), "mlx-cuda/qmv"),
        ("mlx-cuda", call(rows=8, second_last=8), "mlx-cuda/qmm"),
        ("mlx-cuda", call(rows=2, second_last=2, k=64, group_size=64), "mlx-cuda/qmm"),  # sm90 only
        ("mlx-cuda:sm=80", call(rows=2, second_last=2, k=64, group_size=64), "mlx-cuda/qmv"),
        ("mlx-cuda", call(rows=1, bits=None), "mlx-cuda/gemv"),
        ("mlx-cuda", call(rows=2, second_last=2, bits=None), "mlx-cuda/gemm"),
        ("mlx-cuda", attention(1, 255), "mlx-cuda/sdpa_vector"),
        ("mlx-cuda", attention(1, 256), "mlx-cuda/sdpa_cudnn"),
        ("mlx-cuda", attention(1, 256, mask="array", batch=2), "mlx-cuda/sdpa_unfused"),
        ("mlx-cuda", attention(1, 1024, dtype="float32"), "mlx-cuda/sdpa_vector"),
        ("mlx-cuda", attention(1, 1025, dtype="float32"), "mlx-cuda/sdpa_vector_2pass"),
        ("mlx-cuda", attention(4, 1025, dtype="float32"), "mlx-cuda/sdpa_unfused"),
        ("mlx-cuda", attention(2, 64, mask="array"), "mlx-cuda/sdpa_cudnn"),
        ("mlx-cuda:sm=75", attention(16, 64), "mlx-cuda/sdpa_unfused"),
        ("candle-metal", attention(1, 1023), "candle-metal/sdpa_vector"),
        ("candle-metal", attention(1, 1024), "candle-metal/sdpa_vector_2pass"),
        ("candle-metal", attention(2, 1024), "candle-metal/sdpa_full"),
        ("candle-metal", attention(2, 1024, 48), "native"),
        ("ggml-metal", call(rows=1, k=640), "ggml-metal/mv"),
        ("ggml-metal", call(rows=2, k=640), "ggml-metal/mv_ext"),
        ("ggml-metal", call(rows=3, k=768, format="Q4_K"), "ggml-metal/mv"),
        ("ggml-metal", call(rows=4, k=768, format="Q4_K"), "ggml-metal/mv_ext"),
        ("ggml-metal", call(rows=8, k=576), "ggml-metal/mv"),
        ("ggml-metal", call(rows=8, k=640, bits=None), "ggml-metal/mv_ext"),
        ("ggml-metal", call(rows=9), "ggml-metal/mm"),
        ("ggml-metal", call(rows=9, k=32), "ggml-metal/mv"),
        ("ggml-metal", call("switch", 255), "ggml-metal/mv"),
        ("ggml-metal", call("switch", 256), "ggml-metal/mm"),
        ("ggml-metal:active=2", call("switch", 64), "ggml-metal/mm"),
        ("ggml-metal", attention(19, 64), "ggml-metal/flash_attn_vec"),
        ("ggml-metal", attention(20, 64), "ggml-metal/flash_attn"),
        ("ggml-metal", attention(1, 64, 80), "ggml-metal/flash_attn"),
        ("ggml-cuda", call(rows=8), "ggml-cuda/mmvq"),
        ("ggml-cuda", call(rows=9), "ggml-cuda/mmq"),
        ("ggml-cuda:arch=ada", call(rows=8, format="Q4_K"), "ggml-cuda/mmq"),
        ("ggml-cuda:arch=ampere", call(rows=8, format="Q4_K"), "ggml-cuda/mmvq"),
        ("ggml-cuda:arch=blackwell", call(rows=6, format="Q4_K"), "ggml-cuda/mmq"),
        ("ggml-cuda:arch=blackwell", call(rows=7, format="Q6_K", bits=6), "ggml-cuda/mmvq"),
        ("ggml-cuda:arch=volta", call(rows=63), "ggml-cuda/mmq"),
        ("ggml-cuda:arch=volta", call(rows=64), "ggml-cuda/cublas"),
        ("ggml-cuda", call(rows=3, bits=None), "ggml-cuda/mmvf"),
        ("ggml-cuda", call(rows=4, bits=None), "ggml-cuda/cublas"),
        ("ggml-cuda:arch=turing", call(rows=4, bits=None), "ggml-cuda/mmvf"),
        ("ggml-cuda", call(rows=2, bits=None, dtype="bfloat16"), "ggml-cuda/cublas"),
        ("ggml-cpu-repack", call(rows=3), "ggml-cpu-repack/gemv"),
        ("ggml-cpu-repack", call(rows=4), "ggml-cpu-repack/gemm"),
        ("ggml-cpu-repack", call(rows=4, bits=None), "native"),
        ("flash-split-kv", attention(1, 4096), "flash-split-kv/attention"),
        ("flash-split-kv", call(), "native"),
    ],
)  # fmt: skip
def test_thresholds_of_the_other_rules(spec: str, made: Call, kernel: str) -> None:
    assert profile(spec).choose(made).kernel == kernel


def test_what_changes_within_a_kernel_is_said() -> None:
    metal = profile("mlx-metal")
    texts = {
        m: metal.choose(call(rows=m, second_last=m, k=896, n=896, group_size=64)).rule for m in (32, 33, 65)
    }
    assert [f"splits ({s}) > 1" in texts[m] for m, s in ((32, 14), (33, 7), (65, 2))] == [True] * 3
    assert "lanes 16" in metal.choose(call(rows=6, bits=None, dtype="bfloat16")).rule
    assert "warps 2" in profile("ggml-cuda").choose(call(rows=5)).rule


BLOCKS = [
    ("s", 1024, 16, 64), ("s", 1025, 4, 64), ("s", 1025, 5, 128), ("s", 8193, 5, 256), ("s", 32769, 5, 512), ("s", 65537, 5, 1024),
    ("d", 8192, 2, 128), ("d", 8193, 2, 256), ("d", 16384, 5, 128), ("d", 16384, 6, 512), ("d", 65536, 6, 1024),
    ("g", 4096, 4, 64), ("g", 4096, 3, 32), ("p", 65536, 3, 32),
]  # fmt: skip


@pytest.mark.parametrize(("letter", "keys", "gqa", "blocks"), BLOCKS)
def test_the_two_pass_kernel_is_handed_its_blocks(letter: str, keys: int, gqa: int, blocks: int) -> None:
    found = profile(f"mlx-metal:letter={letter}").choose(attention(1, keys, gqa=gqa))
    assert found.kernel == "mlx-metal/sdpa_vector_2pass" and found.arguments == (("blocks", blocks),)
    assert found.rule.endswith(f", blocks {blocks} -> sdpa_vector_2pass")
    assert attention_order.blocks(letter, gqa, keys) == blocks


@pytest.mark.parametrize(
    ("version", "kernels"),
    [
        ("0.30.3", ("sdpa_vector_2pass-0.30.3", "sdpa_steel-0.30.6")),
        ("0.30.6", ("sdpa_vector_2pass", "sdpa_steel-0.30.6")),
        ("0.31", ("sdpa_vector_2pass", "sdpa_steel")),
    ],
)
def test_old_versions_have_attention_kernels_of_their_own(version: str, kernels: tuple[str, str]) -> None:
    old = profile(f"mlx-metal:version={version}")
    assert [old.choose(attention(query, 2048)).kernel for query in (1, 16)] == [
        f"mlx-metal/{name}" for name in kernels
    ]


@given(st.integers(1, 40))
def test_repacked_rows_take_gemm_by_whole_fours(rows: int) -> None:
    parts = profile("ggml-cpu-repack").parts(call(rows=rows, second_last=rows))
    found = [part.choice.kernel for part in parts for _ in range(part.first, part.last)]
    assert found == [f"ggml-cpu-repack/{'gemm' if row < rows - rows % 4 else 'gemv'}" for row in range(rows)]


@given(
    st.sampled_from(["linear", "head", "switch"]),
    st.integers(1, 5000),
    sizes,
    sizes,
    st.sampled_from([None, 4, 8]),
)
def test_nothing_changes_under_batch_invariant(op: str, m: int, k: int, n: int, bits: int | None) -> None:
    chosen = profile("batch-invariant")
    assert chosen.choose(call(op, m, m, k=k, n=n, bits=bits)).kernel == "batch-invariant/mm"
    assert chosen.choose(attention(m, m + k)).kernel == "batch-invariant/attention"


def test_choosing_loads_no_compiler() -> None:
    program = (
        "import sys, detdiff_kernels as k; k.profile('mlx-metal').choose(k.Call('linear', 1)); "
        "assert not {'numba', 'mlx'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_choice_is_remembered() -> None:
    chosen = profile("mlx-metal")
    assert chosen.choose(call(rows=9)) is chosen.choose(call(rows=9))


def test_the_page_of_profiles_is_up_to_date() -> None:
    done = subprocess.run([sys.executable, "tools/profile_docs.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0, "run `python tools/profile_docs.py`"
    text = (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")
    sections = text.split("\n## ")
    for name in profile_names():
        (section,) = (part for part in sections if part.startswith(f"{name}\n"))
        assert "```text" in section and all(one.source in section for one in profile(name).rules)
