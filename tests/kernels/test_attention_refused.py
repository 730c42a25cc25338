"""What an attention kernel refuses, and how it says so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from attention_calls import attend, normals, plain, same, takes_sinks

from detdiff_kernels.attention import ATTENTION
from detdiff_kernels.errors import BadOperand, UnsupportedFormat

BAD = {
    "float64 queries": lambda call: replace(call, q=call.q.astype(np.float64)),
    "three axes": lambda call: replace(call, k=call.k[0]),
    "another batch": lambda call: replace(call, q=call.q[[0, 0]]),
    "another head dimension": lambda call: replace(call, k=call.k[..., :4]),
    "fewer values than keys": lambda call: replace(call, v=call.v[:, :, 1:]),
    "heads that do not divide": lambda call: replace(call, q=call.q[:, :3]),
    "no keys": lambda call: replace(call, k=call.k[:, :, :0], v=call.v[:, :, :0]),
    "a mask of other sizes": lambda call: replace(call, mask=np.ones((3, 9), bool)),
    "a mask of five axes": lambda call: replace(call, mask=np.ones((1, 1, 1, 1, 1), bool)),
    "a mask of integers": lambda call: replace(call, mask=np.ones((1, 1), np.int32)),
    "a mask of another name": lambda call: replace(call, mask="sliding"),
    "another dtype": lambda call: replace(call, dtype="float8"),
    "keys behind the front": lambda call: replace(call, offset=-1),
    "too few sinks": lambda call: replace(call, sinks=np.zeros(1, np.float32)),
}


@pytest.mark.parametrize("change", BAD)
@pytest.mark.parametrize("name", ["mlx-metal/sdpa_vector", "mlx-metal/sdpa_steel", "mlx-metal/sdpa_unfused"])
def test_bad_operands_are_refused(name: str, change: str) -> None:
    with pytest.raises(BadOperand) as refused:
        attend(ATTENTION[name], BAD[change](plain(name, 8, "float32", rows=2)))
    assert name in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ATTENTION)
def test_sinks_are_refused_where_there_are_none(name: str) -> None:
    call = replace(plain(name, 8, "float32"), sinks=np.zeros(4, np.float32))
    if takes_sinks(name):
        assert not same(attend(ATTENTION[name], call), attend(ATTENTION[name], replace(call, sinks=None)))
        return
    with pytest.raises(BadOperand, match="given sinks; the kernel has none"):
        attend(ATTENTION[name], call)


@pytest.mark.parametrize(
    ("name", "count"),
    [("mlx-metal/sdpa_vector", 32), ("mlx-metal/sdpa_steel", 32), ("mlx-metal/sdpa_vector_2pass", 48)],
)
def test_blocks_are_refused_where_they_mean_nothing(name: str, count: int) -> None:
    with pytest.raises(BadOperand, match=f"given blocks={count}; only a kernel"):
        attend(ATTENTION[name], plain(name, 8, "float32"), blocks=count)


@pytest.mark.parametrize(
    ("name", "width", "value_width", "part"),
    [
        ("ggml-metal/flash_attn_vec", 48, 32, "both must be multiples of 32"),
        ("ggml-metal/flash_attn_vec", 128, 96, "both must be multiples of 32"),
        ("flash-split-kv/attention", 257, 8, "forms up to 256"),
        ("mlx-cuda/sdpa_cudnn", 8, 129, "forms up to 128"),
    ],
)
def test_head_dimensions_without_a_form_are_refused(
    name: str, width: int, value_width: int, part: str
) -> None:
    q, k, v = normals(1, 2, 1, width), normals(1, 2, 3, width), normals(1, 2, 3, value_width)
    with pytest.raises(UnsupportedFormat, match=part):
        ATTENTION[name](q, k, v, 1.0)
