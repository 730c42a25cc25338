"""Dispatch profiles: what they choose, how they say it, and what a profile file may not contain."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detdiff_kernels import (
    Call,
    Choice,
    Range,
    Rule,
    UnknownKernel,
    errors,
    load_profile,
    profile,
    profile_names,
)

MV, MM = "candle-metal/mv", "candle-metal/mm"
ONE = "candle-metal: second-to-last dimension 1 -> mv"
MORE = "candle-metal: second-to-last dimension 2.. -> mm"
NONE = "candle-metal: no rule -> native"


def call(op: str = "linear", rows: int = 1, second_last: int = 1, **rest: object) -> Call:
    shape = {"k": 576, "n": 1536, "dtype": "float32", "bits": 4, **rest}
    return Call(op, rows, second_last, **shape)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("op", "rows", "second_last", "split", "kernel", "rule"),
    [
        ("linear", 1, 1, None, MV, ONE),
        ("head", 1, 1, None, MV, ONE),
        ("linear", 2, 1, None, MV, ONE),  # [2, 1, k], a padded decode, stays on mv
        ("linear", 2, 2, None, MM, MORE),  # [1, 2, k], a packed decode, does not
        ("linear", 124, 124, None, MM, MORE),
        ("switch", 1, 1, None, "native", NONE),
        ("attention", 8, 8, None, "native", NONE),
        ("linear", 1, 1, 4, MV, ONE),
        ("linear", 3, 3, 4, MV, f"split_rows 4: 3 rows <= 4 -> {ONE}"),
        ("head", 4, 4, 4, MV, f"split_rows 4: 4 rows <= 4 -> {ONE}"),
        ("linear", 5, 5, 4, MM, MORE),
        ("linear", 5, 5, 1024, MV, f"split_rows 1024: 5 rows <= 1024 -> {ONE}"),
        ("linear", 2, 2, 0, MM, MORE),
        ("attention", 2, 2, 4, "native", NONE),
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


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_is_valid_and_has_sources(name: str) -> None:
    shipped = profile(name)
    assert shipped.name == name and shipped.backend and "Metal" in shipped.note
    assert all(rule.source and rule.tag for rule in shipped.rules)


def test_an_unknown_profile_names_the_nearest() -> None:
    with pytest.raises(errors.UnknownProfile, match="'candle'.*did you mean candle-metal"):
        profile("candle")


HEAD = 'name = "mine"\nbackend = "a test"\nnote = "none"\n'
FIRST = '[[rule]]\nkernel = "candle-metal/mv"\nsource = "here"\ntag = "read"\n'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(text, "utf-8")
    return path


def test_all_conditions_hold_or_the_next_rule_is_tried(tmp_path: Path) -> None:
    text = (
        f'{HEAD}{FIRST}op = "linear"\nrows = "2..8"\nsecond_last = 2\nk = "512.."\nn = "1..64"\n'
        'dtype = ["float16", "bfloat16"]\nbits = [4, "dense"]\n'
        '[[rule]]\nkernel = "pad:8"\nsource = "here"\ntag = "inferred"\nrows = "2.."\n'
    )
    mine = load_profile(written(tmp_path, text))
    right = {"rows": 2, "second_last": 2, "k": 512, "n": 64, "dtype": "float16", "bits": None}
    words = "rows 2..8, second-to-last dimension 2, k 512.., n 1..64, bfloat16 or float16, 4-bit or dense"
    assert mine.choose(call(**right)) == Choice(MV, f"mine: {words} -> {MV}")  # type: ignore[arg-type]
    wrong = {"op": "head", "rows": 9, "second_last": 1, "k": 511, "n": 65, "dtype": "float32", "bits": 8}
    for key, value in wrong.items():
        changed = call(**{**right, key: value})  # type: ignore[arg-type]
        assert mine.choose(changed) == Choice("pad:8", "mine: rows 2.. -> pad:8"), key


def test_split_rows_without_a_kernel_for_one_row_is_the_rows_path(tmp_path: Path) -> None:
    mine = load_profile(written(tmp_path, f'{HEAD}{FIRST}rows = "2.."\n'))
    assert mine.choose(call(rows=3, second_last=3)).kernel == MV
    expected = Choice("rows", "split_rows 4: 3 rows <= 4 -> mine: no rule -> native")
    assert mine.choose(call(rows=3, second_last=3), split_rows=4) == expected


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (f"{HEAD}{FIRST}bit = 4\n", errors.UnknownKey, "rule 1 has the key 'bit'.*did you mean bits"),
        (f"nam = 1\n{HEAD}{FIRST}", errors.UnknownKey, "'nam'.*did you mean name"),
        (HEAD, errors.MissingKey, "'rule'"),
        (FIRST, errors.MissingKey, "'name'"),
        (f'{HEAD}[[rule]]\nkernel = "native"\n', errors.MissingKey, "rule 1 has no 'source'"),
        (
            f"{HEAD}{FIRST.replace('/mv', '/mx')}",
            UnknownKernel,
            "rule 1.*'candle-metal/mx'.*did you mean candle-metal/m",
        ),
        (f"{HEAD}{FIRST.replace('candle-metal/mv', 'pad:0')}", UnknownKernel, "'pad:0'"),
        (f"{HEAD}{FIRST.replace('read', 'guess')}", errors.BadValue, "tag = 'guess'"),
        (f'{HEAD}{FIRST}op = "conv"\n', errors.BadValue, "op = 'conv'"),
        (f'{HEAD}{FIRST}op = [["linear"]]\n', errors.BadValue, "op ="),
        (f"{HEAD}{FIRST}op = []\n", errors.BadValue, "empty op"),
        (f'{HEAD}{FIRST}dtype = "float23"\n', errors.BadValue, "float23.*did you mean float32"),
        (f'{HEAD}{FIRST}bits = ["four"]\n', errors.BadValue, "bits = 'four'"),
        (f"{HEAD}{FIRST}bits = true\n", errors.BadValue, "bits = True"),
        (f"{HEAD}rule = 3\n", errors.BadValue, "no list of rules"),
        (f"{HEAD}rule = []\n", errors.BadValue, "no list of rules"),
        (f"name = 3\nbackend = 'b'\nnote = 'n'\n{FIRST}", errors.BadValue, "name = 3"),
        (f"{HEAD}{FIRST}rows = ", errors.UnreadableProfile, "not valid TOML"),
        (
            f"{HEAD}{FIRST}{FIRST}rows = 3\n",
            errors.UnreachableRule,
            r"rule 2 \(rows 3 -> .*rule 1 \(any shape\)",
        ),
        *(
            (f"{HEAD}{FIRST}rows = {value}\n", errors.BadRange, "rule 1 has rows = ")
            for value in (
                '"8..2"',
                '"0"',
                '"..4"',
                '"a"',
                '""',
                "0",
                "-1",
                "true",
                "1.5",
                '"1-4"',
                '"1..4.."',
            )
        ),
    ],
)
def test_a_broken_profile_is_one_clear_error(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(error, match=message) as caught:
        load_profile(path)
    assert str(path) in str(caught.value) and "\n\n" not in str(caught.value)
    assert isinstance(caught.value, errors.KernelLibraryError)


def test_the_unbroken_twin_loads(tmp_path: Path) -> None:
    mine = load_profile(written(tmp_path, f"{HEAD}{FIRST}rows = 3\n{FIRST}"))
    assert [rule.rows for rule in mine.rules] == [Range(3, 3), Range(1, None)]


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_an_unreadable_file_is_one_clear_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(errors.UnreadableProfile, match=r"mine\.toml cannot be read"):
        load_profile(path)


ranges = st.builds(
    lambda low, more: Range(low, None if more is None else low + more),
    st.integers(1, 3),
    st.none() | st.integers(0, 2),
)
rules = st.builds(
    Rule,
    kernel=st.just("native"),
    source=st.just("here"),
    tag=st.just("read"),
    op=st.frozensets(st.sampled_from(["linear", "head", "switch", "attention"]), min_size=1),
    rows=ranges,
    second_last=ranges,
    dtype=st.none() | st.frozensets(st.sampled_from(["float32", "float16"]), min_size=1),
    bits=st.none() | st.frozensets(st.sampled_from([None, 4]), min_size=1),
)
CALLS = [
    call(op, rows, second_last, dtype=dtype, bits=bits)
    for op, rows, second_last, dtype, bits in product(
        ("linear", "head", "switch", "attention"),
        range(1, 7),
        range(1, 7),
        ("float32", "float16", "bfloat16"),
        (None, 4, 8),
    )
]


@given(rules, rules)
def test_a_rule_covers_another_exactly_when_it_takes_all_its_calls(one: Rule, other: Rule) -> None:
    assert one.covers(other) == all(one.takes(each) for each in CALLS if other.takes(each))
