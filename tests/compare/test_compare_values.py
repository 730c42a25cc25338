"""Where traces hold values, the answer says how far they are apart, and on which stage they diverge."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from detdiff.compare import Divergence, Origin, compare
from detdiff.trace import Generated, Rows, Site, Trace, TraceWriter, Value, digest_rows

LINEAR = Site("layers.0.proj", "linear", 0, ("in",), ("out",))
WRITE = Site("layers.0.cache.write", "cache_write", 0, ("k", "v"), ("K.0", "V.0"))
LOGITS = Site("logits", "logits", None, ("in",), ("out",))
INPUT = np.linspace(-1, 1, 8, dtype=np.float32)
OUTPUT = np.linspace(0.5, 4, 8, dtype=np.float32)


def write(path: Path, ports: list[tuple[NDArray[Any], str]], token: int = 5, values: bool = True) -> Trace:
    """One request of one row; ``ports`` are the arrays of all eight ports with their dtypes."""
    header = {
        "requests": [{"id": "r0", "tokens": [3], "max_tokens": 1}],
        "sites": [LINEAR, WRITE, LOGITS],
    }
    with TraceWriter(path, header) as writer:
        line = {"forward": 0, "phase": "prefill", "layout": "padded", "shape": [1, 1], "caches": []}
        span = {"request": 0, "slot": 0, "start": 0, "count": 1, "phase": "prefill"}
        plan = writer.plan([{"path": "native", "rule": "", "rows": 1, "second_last": 1, "sites": "0-2"}])
        writer.forward({**line, "rows": [span], "plan": plan})
        zero = np.zeros(1, np.int32)
        digests = np.array([[int(digest_rows(data[None], dtype)[0]) for data, dtype in ports]], np.uint64)
        held = {n: Value(zero, data[None], dtype) for n, (data, dtype) in enumerate(ports)}
        table = tuple(range(len(ports)))
        writer.rows(Rows(zero, zero, zero, zero, zero, zero + 3, table, digests, held if values else {}))
        top = np.array([[token, token + 1]], np.int32), np.array([[2.0, 1.0]], np.float32)
        writer.generated(Generated(zero, zero, zero + token, zero, zero, *top))
        writer.finish()
    return Trace.open(path)


def ports(**other: tuple[NDArray[Any], str]) -> list[tuple[NDArray[Any], str]]:
    names = ("x", "out", "k", "v", "K", "V", "hidden", "logits")
    f32 = {name: (INPUT if name == "x" else OUTPUT, "F32") for name in names}
    return [{**f32, **other}[name] for name in names]


def bumped(ulps: int) -> NDArray[np.float32]:
    """OUTPUT with element 3 the given number of ULPs up."""
    changed = OUTPUT.copy()
    changed.view(np.uint32)[3] += np.uint32(ulps)
    return changed


def origin_of(found: Divergence) -> Origin:
    origin = found.requests[0].origin
    assert origin is not None
    return origin


def test_the_origin_has_its_ulps(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", ports()), write(tmp_path / "b", ports(out=(bumped(3), "F32")))
    origin = origin_of(compare(a, b))
    assert (origin.site, origin.stage) == ("layers.0.proj", "bits")
    size = origin.magnitude
    assert size is not None
    assert (size.elements, size.differing, size.max_ulp, size.worst) == (8, 1, 3, 3)
    assert size.mean_ulp == 3 / 8 and [(u.first, u.last, u.count) for u in size.ulp_histogram] == [(3, 4, 1)]
    assert size.max_abs == float(bumped(3)[3]) - float(OUTPUT[3])


def test_digests_alone_give_the_origin_without_a_size(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", ports()), write(tmp_path / "b", ports(out=(bumped(1), "F32")), values=False)
    origin = origin_of(compare(a, b))
    assert (origin.site, origin.stage, origin.magnitude) == ("layers.0.proj", "bits", None)


def test_the_cache_entry_and_the_flips_logits_have_sizes(tmp_path: Path) -> None:
    a = write(tmp_path / "a", ports())
    b = write(tmp_path / "b", ports(V=(bumped(2), "F32"), logits=(bumped(1 << 20), "F32")), token=6)
    found = compare(a, b).requests[0]
    assert found.cache_entry is not None and found.cache_entry.magnitude is not None
    assert (found.cache_entry.kind, found.cache_entry.magnitude.max_ulp) == ("V", 2)
    assert found.flip is not None and found.flip.magnitude is not None
    assert found.flip.magnitude.max_ulp == 1 << 20
    assert found.flip.magnitude.kl is not None and found.flip.magnitude.kl > 0


@pytest.mark.parametrize("values", [True, False])
def test_a_change_of_dtype_alone_is_named_as_that(tmp_path: Path, values: bool) -> None:
    a = write(tmp_path / "a", ports(out=(OUTPUT, "F32")), values=values)
    b = write(tmp_path / "b", ports(out=(OUTPUT.view(np.uint32), "U32")), values=values)
    found = compare(a, b)
    assert (found.stage, origin_of(found).stage, origin_of(found).site) == ("dtype", "dtype", "layers.0.proj")


def test_the_same_numbers_in_another_dtype_are_a_finding(tmp_path: Path) -> None:
    half = (OUTPUT.view(np.uint32) >> 16).astype(np.uint16)
    a, b = write(tmp_path / "a", ports()), write(tmp_path / "b", ports(out=(half, "BF16")))
    origin = origin_of(compare(a, b))
    assert origin.magnitude is not None
    assert (origin.stage, origin.magnitude.dtype_a, origin.magnitude.dtype_b) == ("dtype", "F32", "BF16")
    assert (origin.magnitude.max_ulp, origin.magnitude.max_abs, origin.magnitude.differing) == (None, 0.0, 0)


def test_another_shape_is_named_as_that(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", ports()), write(tmp_path / "b", ports(out=(OUTPUT[:4], "F32")))
    origin = origin_of(compare(a, b))
    assert origin.magnitude is not None and origin.stage == "shape"
    assert (origin.magnitude.shape_a, origin.magnitude.shape_b) == ((8,), (4,))


def test_a_nan_with_another_payload_is_not_equal(tmp_path: Path) -> None:
    first, second = OUTPUT.copy(), OUTPUT.copy()
    first.view(np.uint32)[2], second.view(np.uint32)[2] = 0x7FC00000, 0x7FC00001
    same = write(tmp_path / "a", ports(out=(first, "F32")))
    assert compare(same, write(tmp_path / "same", ports(out=(first.copy(), "F32")))).identical
    origin = origin_of(compare(same, write(tmp_path / "b", ports(out=(second, "F32")))))
    size = origin.magnitude
    assert size is not None and origin.site == "layers.0.proj"
    assert (size.nan_a, size.nan_b, size.non_finite, size.differing, size.max_ulp) == (1, 1, 1, 1, 0)


def test_zeros_of_different_sign_differ(tmp_path: Path) -> None:
    first, second = OUTPUT.copy(), OUTPUT.copy()
    first[0], second[0] = 0.0, -0.0
    a, b = write(tmp_path / "a", ports(out=(first, "F32"))), write(tmp_path / "b", ports(out=(second, "F32")))
    size = origin_of(compare(a, b)).magnitude
    assert size is not None
    assert (size.differing, size.max_ulp, size.max_abs) == (1, 0, 0.0)
    assert [(u.first, u.last, u.count) for u in size.ulp_histogram] == [(0, 0, 1)]
