"""Traces of two engines are aligned by the roles that each says of its sites, and what has none is said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from detdiff.compare import compare, series
from detdiff.engines.base import RowTable, decoder_roles, forward_line, port_rows, write_rows
from detdiff.errors import NothingComparable, TraceHeaderError
from detdiff.report import divergence_text, to_json
from detdiff.report.saved import from_json
from detdiff.trace import Generated, Site, Trace, TraceWriter

ROWS, WIDTH, LAYERS = 5, 8, 3
Values = dict[tuple[str, int | None], NDArray[np.float32]]
ONE = {
    "embedding": [("embed", "out")],
    "attn_norm": [("layers.*.norm", "out")],
    "q": [("layers.*.q_proj", "out")],
    "rope_q": [("layers.*.rope", "out")],
}
OTHER = {
    "embedding": [("tok.GET_ROWS", "out")],
    "attn_norm": [("attn_norm-*.MUL", "out")],
    "q": [("Qcur-*.MUL_MAT", "out")],
    "rope_q": [("Qcur-*.ROPE", "out")],
}


def values(seed: int = 0) -> Values:
    random = np.random.default_rng(seed)
    keys: list[tuple[str, int | None]] = [("embedding", None)]
    keys += [(role, layer) for layer in range(LAYERS) for role in ("attn_norm", "q", "rope_q")]
    return {key: random.normal(size=(ROWS, WIDTH)).astype(np.float32) for key in keys}


def nearly(found: Values, **larger: float) -> Values:
    """Each a few roundings off; those named ``role_layer`` by so much, relative to their size."""
    random = np.random.default_rng(1)
    made = {}
    for key, value in found.items():
        size = larger.get(f"{key[0]}_{key[1]}", 2.0**-23)
        made[key] = (value * (1 + size * random.choice([-1, 1], value.shape))).astype(np.float32)
    return made


def neighbours(found: Values, width: int) -> Values:
    """Heads with the items that are rotated together side by side."""
    return {
        key: value.reshape(ROWS, -1, 2, width // 2).swapaxes(-1, -2).reshape(ROWS, -1)
        if key[0] in ("q", "rope_q")
        else value
        for key, value in found.items()
    }


def written(
    path: Path,
    engine: str,
    places: Mapping[str, Sequence[tuple[str, str]]],
    found: Values,
    *,
    kept: bool = True,
    extra: Sequence[Site] = (),
    logits: float = 0.0,
    **roles: Any,
) -> Trace:
    sites = [
        Site(places[role][0][0].replace("*", str(layer)), "module", layer, (), ("out",))
        for role, layer in found
    ]
    header = {
        "scenario": {"schedule": "serial", "capture": "full" if kept else "digest"},
        "model": {"name": engine, "model_type": "llama", "weights_sha256": engine},
        "environment": {},
        "engine": {"name": engine, "settings": {}},
        "requests": [{"id": "r0", "tokens": list(range(ROWS)), "max_tokens": 1}],
        "sites": [*sites, *extra],
        "lacks": {"cache": "there is none", "kernel_paths": "they are not known"},
        **decoder_roles("llama", places, **roles),
    }
    if "observer" not in header:
        header["observer"] = {"forwards": 1, "equal": True}
    at = np.arange(ROWS, dtype=np.int64)
    table = RowTable(at * 0, at, at * 0, at * 0, at)
    with TraceWriter(path, header) as writer:
        plan = writer.plan([])
        writer.forward(forward_line(0, [(0, 0, 0, ROWS)], (1, ROWS), plan, [ROWS]))
        ports = {
            n: port_rows(at, value, "F32", np.ones(ROWS, np.bool_) if kept else None)
            for n, value in enumerate(found.values())
        }
        write_rows(writer, 0, table, ports, len(sites) + sum(len(s.inputs) + len(s.outputs) for s in extra))
        one = np.zeros(1, np.int32)
        top = np.array([[3, 5]], np.int32), np.array([[2.0 + logits, 1.0]], np.float32)
        writer.generated(Generated(one, one, one + 3, one, one + ROWS - 1, *top))
        writer.text(3, "x")
        writer.finish(complete=True, times={}, observer={"forwards": 1, "equal": True})
    return Trace.open(path)


def pair(tmp_path: Path, other: Values, **options: Any) -> tuple[Trace, Trace]:
    a = written(tmp_path / "a", "one", ONE, values())
    return a, written(tmp_path / "b", "other", OTHER, other, logits=1e-6, **options)


def test_values_of_one_role_are_compared_whatever_the_sites_are_called(tmp_path: Path) -> None:
    a, b = pair(tmp_path, nearly(values()))
    found = compare(a, b, across_engines=True)
    across = found.across_engines
    assert across is not None and (found.identical, found.stage) == (False, "bits")
    assert (across.aligned, len(across.roles), across.first, across.why) == (10, 10, None, "")
    q = next(each for each in across.roles if (each.role, each.layer) == ("q", 1))
    assert (q.site_a, q.site_b, q.rows) == ("layers.1.q_proj", "Qcur-1.MUL_MAT", ROWS)
    assert 0.5 * 2.0**-23 < q.typical < 2.0**-22 and q.largest >= q.typical
    assert found.requests[0].origin is None and found.compared.digests == 0
    assert from_json(to_json(found)) == found
    assert "no role departs" in divergence_text(found) and len(series(a, b, found).requests) == 1


def test_equal_tokens_and_logits_are_identical_with_equal_values_alone(tmp_path: Path) -> None:
    def found(name: str, other: Values, kept: bool = True) -> tuple[bool, bool, str | None]:
        a = written(tmp_path / name / "a", "one", ONE, values(), kept=kept)
        b = written(tmp_path / name / "b", "other", OTHER, other, kept=kept)
        answer = compare(a, b, across_engines=True)
        return answer.identical, answer.inconclusive, answer.stage

    assert found("equal", values()) == (True, False, None)
    assert found("near", nearly(values())) == (False, False, "bits")
    assert found("unknown", values(), kept=False) == (False, True, None)


def test_a_role_that_departs_is_named_and_is_no_verdict(tmp_path: Path) -> None:
    # What follows is as far off, which its inputs explain.
    wrong = nearly(values(), rope_q_1=0.3, attn_norm_2=0.3, q_2=0.3, rope_q_2=0.3)
    across = compare(*pair(tmp_path, wrong), across_engines=True).across_engines
    assert across is not None and across.first is not None
    assert (across.first.role, across.first.layer) == ("rope_q", 1)
    text = divergence_text(compare(*pair(tmp_path / "again", wrong), across_engines=True))
    assert "departs: rope_q of layer 1" in text and "no verdict by itself" in text


def test_heads_with_pairs_side_by_side_are_put_in_halves(tmp_path: Path) -> None:
    b = neighbours(nearly(values()), 4)
    across = compare(*pair(tmp_path, b, neighbours=True, head_width=4), across_engines=True).across_engines
    assert across is not None and max(each.typical for each in across.roles) < 1e-6
    wrong = compare(*pair(tmp_path / "wrong", b), across_engines=True).across_engines
    assert wrong is not None and wrong.first is not None and wrong.first.role == "q"


def test_what_is_not_aligned_is_said(tmp_path: Path) -> None:
    b = {key: value for key, value in nearly(values()).items() if key != ("rope_q", 2)}
    extra = [Site(f"kq_mask-{n}.ADD", "elementwise", n, (), ("out",)) for n in range(2)]
    found = compare(*pair(tmp_path, b, extra=extra), across_engines=True)
    across = found.across_engines
    assert across is not None
    assert (across.only_a, across.only_b) == (("rope_q of layer 2",), ())
    assert (across.without_role_a, across.without_role_b) == ((), ("kq_mask-*.ADD (2)",))
    text = " ".join(divergence_text(found).split())
    assert "not aligned, sites of b without a role: kq_mask-*.ADD (2)" in text


def test_without_values_or_roles_nothing_is_said_of_roles(tmp_path: Path) -> None:
    across = compare(*pair(tmp_path, nearly(values()), kept=False), across_engines=True).across_engines
    assert across is not None and across.roles == () and "capture full in a, digest in b" in across.why
    a = written(tmp_path / "c", "one", ONE, values())
    silent = written(tmp_path / "d", "other", OTHER, values())
    del silent.header["roles"]
    across = compare(a, silent, across_engines=True).across_engines
    assert across is not None and across.aligned == 0
    assert "run b does not say the roles of its sites (engine other" in across.why


def test_two_engines_are_compared_where_it_is_asked_for(tmp_path: Path) -> None:
    a, b = pair(tmp_path, nearly(values()))
    with pytest.raises(NothingComparable, match="--across-engines") as caught:
        compare(a, b)
    assert "'one'" in str(caught.value) and "'other'" in str(caught.value)
    # Two models are another question.
    with pytest.raises(NothingComparable, match="--across-engines"):
        compare(a, b, across_models=True)


@pytest.mark.parametrize(
    "roles",
    [
        [],
        {"places": []},
        {"places": {"q": "layers.*.q"}},
        {"places": {"q": [["layers.*.q"]]}},
        {"places": {}, "neighbours": 1},
        {"places": {}, "head_width": 0},
    ],
)
def test_a_header_with_other_roles_is_refused(roles: Any, tmp_path: Path) -> None:
    from detdiff.trace.header import check

    trace = written(tmp_path / "a", "one", ONE, values())
    check(trace.header, "it")
    with pytest.raises(TraceHeaderError, match="roles"):
        check({**trace.header, "roles": roles}, "it")
