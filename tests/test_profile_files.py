"""What a profile file may contain, and what is refused: every broken rule is one class and one paragraph."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profile_files import FIRST, HEAD, define, parameter, rule, written
from profile_lint import OverlappingRules, check_rules

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
NUMBERED = parameter("size", 3, range="1..9")


def call(op: str = "linear", rows: int = 1, second_last: int = 1, **rest: object) -> Call:
    shape = {"k": 576, "n": 1536, "dtype": "float32", "bits": 4, **rest}
    return Call(op, rows, second_last, **shape)  # type: ignore[arg-type]


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


def test_every_further_condition_decides_as_well(tmp_path: Path) -> None:
    conditions: dict[str, str | int | list[str]] = {
        "op": "attention",
        "query": "1..8",
        "keys": "64..",
        "head_dim": 64,
        "group_size": 32,
        "format": ["Q4_K", "Q6_K"],
        "bits": "quantised",
        "mask": ["array"],
        "when": "gqa == 3 and padded and batch > 1",
    }
    mine = load_profile(written(tmp_path, HEAD, rule(**conditions)))
    right = Call(
        "attention", 1, bits=4, group_size=32, format="Q4_K", query=1, keys=64, head_dim=64, heads=9, kv_heads=3,
        batch=2, mask="array",
    )  # fmt: skip
    words = (
        "group size 32, query length 1..8, key length 64.., head dimension 64, quantised, Q4_K or Q6_K, mask array, "
        "gqa == 3 and padded and batch > 1"
    )
    assert mine.choose(right) == Choice(MV, f"mine: {words} -> {MV}")
    wrong = {
        "op": "linear", "query": 9, "keys": 63, "head_dim": 128, "group_size": 64, "format": "affine", "bits": None,
        "mask": "causal", "heads": 6, "batch": 1,
    }  # fmt: skip
    for key, value in wrong.items():
        assert mine.choose(replace(right, **{key: value})).kernel == "native", key  # type: ignore[arg-type]


def test_the_first_definition_that_holds_counts(tmp_path: Path) -> None:
    text = [
        HEAD,
        NUMBERED,
        define("limit", "10 * size", "k > 1024"),
        define("limit", "n // 2", "size == 4"),
        define("limit", 8),
    ]
    mine = load_profile(written(tmp_path, *text, rule(MM, when="m >= limit")))
    for spec, k, n, limit in (
        ({}, 2048, 6, 30),
        ({"size": "4"}, 512, 14, 7),
        ({"size": 4}, 1025, 14, 40),
        ({}, 512, 14, 8),
    ):
        chosen = mine.with_parameters(spec)
        assert chosen.choose(call(rows=limit, k=k, n=n)).rule == f"mine: m >= limit ({limit}) -> {MM}"
        assert chosen.choose(call(rows=limit - 1, k=k, n=n)).kernel == "native"


def test_what_a_rule_shows_is_in_its_text(tmp_path: Path) -> None:
    mine = load_profile(
        written(tmp_path, HEAD, define("lanes", "32 if m <= 5 else 16"), rule(shows=["lanes"], rows="2.."))
    )
    assert mine.choose(call(rows=5)).rule == f"mine: rows 2.., lanes 32 -> {MV}"
    assert mine.choose(call(rows=6)).rule == f"mine: rows 2.., lanes 16 -> {MV}"
    assert mine.rules[0].condition == "rows 2.."


def test_whole_groups_of_rows_leave_a_call_of_their_own(tmp_path: Path) -> None:
    mine = load_profile(written(tmp_path, HEAD, rule(MM, whole=4), rule(MV)))
    for rows in range(1, 20):
        parts = mine.parts(call(rows=rows, second_last=rows))
        whole = rows - rows % 4
        expected = [(0, whole, MM)] * (whole > 0) + [(whole, rows, MV)] * (rows > whole)
        assert [(part.first, part.last, part.choice.kernel) for part in parts] == expected
        assert mine.choose(call(rows=rows)) == parts[0].choice
    assert parts[0].choice.rule == f"mine: whole groups of 4 rows -> {MM}"
    assert parts[1].choice == Choice(MV, f"mine: any shape -> {MV}")
    (one,) = mine.parts(call(rows=7, second_last=7), split_rows=8)
    assert (one.first, one.last, one.choice.kernel) == (0, 7, MV)


def test_rows_left_over_that_no_rule_takes_are_native(tmp_path: Path) -> None:
    mine = load_profile(written(tmp_path, HEAD, rule(MM, whole=3)))
    assert [part.choice.kernel for part in mine.parts(call(rows=5))] == [MM, "native"]


def test_split_rows_without_a_kernel_for_one_row_is_the_rows_path(tmp_path: Path) -> None:
    mine = load_profile(written(tmp_path, f'{HEAD}{FIRST}rows = "2.."\n'))
    assert mine.choose(call(rows=3, second_last=3)).kernel == MV
    expected = Choice("rows", "split_rows 4: 3 rows <= 4 -> mine: no rule -> native")
    assert mine.choose(call(rows=3, second_last=3), split_rows=4) == expected


BROKEN: list[tuple[str, type[Exception], str]] = [
    (f"{HEAD}{FIRST}bit = 4\n", errors.UnknownKey, "rule 1 has the key 'bit'.*did you mean bits"),
    (f"nam = 1\n{HEAD}{FIRST}", errors.UnknownKey, "'nam'.*did you mean name"),
    (HEAD + NUMBERED + "ranges = 1\n" + FIRST, errors.UnknownKey, "parameter size has the key 'ranges'"),
    (HEAD + define("a", 1) + "wen = 1\n" + FIRST, errors.UnknownKey, "definition 1 has the key 'wen'"),
    (HEAD, errors.MissingKey, "'rule'"),
    (FIRST, errors.MissingKey, "'name'"),
    (f'{HEAD}[[rule]]\nkernel = "native"\n', errors.MissingKey, "rule 1 has no 'source'"),
    (f'{HEAD}[[define]]\nname = "a"\n{FIRST}', errors.MissingKey, "definition 1 has no 'value'"),
    (f"{HEAD}[parameters.a]\ndefault = 1\n{FIRST}", errors.MissingKey, "parameter a has no 'meaning'"),
    (f"{HEAD}{FIRST.replace('/mv', '/mx')}", UnknownKernel, "rule 1.*'candle-metal/mx'.*did you mean candle-metal/m"),
    (f"{HEAD}{FIRST.replace('candle-metal/mv', 'pad:0')}", UnknownKernel, "'pad:0'"),
    (f"{HEAD}{FIRST.replace('read', 'guess')}", errors.BadValue, "tag = 'guess'"),
    (f'{HEAD}{FIRST}op = "conv"\n', errors.BadValue, "op = 'conv'"),
    (f'{HEAD}{FIRST}op = [["linear"]]\n', errors.BadValue, "op ="),
    (f"{HEAD}{FIRST}op = []\n", errors.BadValue, "empty op"),
    (f'{HEAD}{FIRST}dtype = "float23"\n', errors.BadValue, "float23.*did you mean float32"),
    (f'{HEAD}{FIRST}format = "Q4_L"\n', errors.BadValue, "Q4_L.*did you mean Q4_"),
    (f'{HEAD}{FIRST}mask = "some"\n', errors.BadValue, "mask = 'some'"),
    (f'{HEAD}{FIRST}bits = ["four"]\n', errors.BadValue, "bits = 'four'"),
    (f"{HEAD}{FIRST}bits = true\n", errors.BadValue, "bits = True"),
    (f"{HEAD}{FIRST}whole = 1\n", errors.BadValue, "whole = 1; .* from 2 on"),
    (f'{HEAD}{FIRST}shows = "lanes"\n', errors.BadValue, "shows = 'lanes'"),
    (HEAD + define("lanes", 3) + FIRST + 'passes = "lanes"\n', errors.BadValue, "passes = 'lanes'.*known are blocks"),
    (HEAD + define("blocks", "dtype") + FIRST + 'passes = "blocks"\n', errors.BadValue, "which is a text; a kernel takes numbers"),
    (f"{HEAD}{FIRST}when = true\n", errors.BadValue, "when = True"),
    (f"{HEAD}rule = 3\n", errors.BadValue, "no list of rules"),
    (f"{HEAD}rule = []\n", errors.BadValue, "no list of rules"),
    (f"{HEAD}define = 3\n{FIRST}", errors.BadValue, r"under 'define'; write each as a \[\[define\]\]"),
    (f"name = 3\nbackend = 'b'\nnote = 'n'\n{FIRST}", errors.BadValue, "name = 3"),
    (HEAD.replace("mine", "my:own") + FIRST, errors.BadValue, "name = 'my:own'; a name is made of"),
    (f"{HEAD}{FIRST}rows = ", errors.UnreadableProfile, "not valid TOML"),
    (HEAD + rule(when="m >= 2 or kk"), errors.BadExpression, r"rule 1 has .* at 'kk' \(character 11\): there is no such"),
    (HEAD + rule(when="m // (k - k) > 1"), errors.BadExpression, "rule 1: .* divides by zero"),
    (HEAD + rule(when="m + 2"), errors.BadExpression, "it is a number and a truth is needed"),
    (HEAD + define("a", "b + 1") + define("b", 1) + FIRST, errors.BadExpression, r"definition 1 \(a\) .*at 'b'"),
    (HEAD + "".join(define(f"a{i}", f"a{i - 1} + a{i - 1}" if i else "m + m + m") for i in range(20)) + FIRST,
     errors.BadExpression, "more than 5000 parts"),
    (HEAD + define("a", 1, "m > 1") + FIRST, errors.BadDefinition, "defines 'a' only under conditions"),
    (HEAD + define("a", 1) + define("a", 2) + FIRST, errors.BadDefinition, r"definition 2 \(a\) has a name that is taken"),
    (HEAD + define("m", 1) + FIRST, errors.BadDefinition, "name that is taken"),
    (HEAD + NUMBERED + define("size", 1) + FIRST, errors.BadDefinition, "name that is taken"),
    (HEAD + define("A", 1) + FIRST, errors.BadDefinition, "name = 'A'; use small letters"),
    (HEAD + define("a", 1, "m > 1") + define("a", "dtype") + FIRST, errors.BadDefinition, "is a text and its first entry a number"),
    (HEAD + "parameters = 3\n" + FIRST, errors.BadParameter, r"write each as a \[parameters.NAME\]"),
    (HEAD + parameter("m", 1, range="1..2") + FIRST, errors.BadParameter, "parameter m has a name that is taken"),
    (HEAD + parameter("a", 1) + FIRST, errors.BadParameter, "does not say which values"),
    (HEAD + parameter("a", 1, range="1..2", choices=["b"]) + FIRST, errors.BadParameter, "exactly one"),
    (HEAD + parameter("a", 1, choices=["b"]) + FIRST, errors.BadParameter, "items like the default"),
    (HEAD + parameter("a", "1", versions="new..") + FIRST, errors.BadParameter, "does not say which values"),
    (HEAD + parameter("a", 9, range="1..2") + FIRST, errors.BadParameter, "'9'; it takes a whole number from 1 to 2"),
    (f"{HEAD}{FIRST}{FIRST}rows = 3\n", errors.UnreachableRule, r"rule 2 \(rows 3 -> .*rule 1 \(any shape\) takes all"),
    (HEAD + rule(MM, bits="quantised", when="m > 2") + rule(bits=[4, 8], rows="2..", when="m > 2"), errors.UnreachableRule,
     r"rule 2 \(rows 2\.\., 4-bit or 8-bit, m > 2.*rule 1 \(quantised, m > 2\) takes all its calls"),
    *((f"{HEAD}{FIRST}rows = {value}\n", errors.BadRange, "rule 1 has rows = ")
      for value in ('"8..2"', '"0"', '"..4"', '"a"', '""', "0", "-1", "true", "1.5", '"1-4"', '"1..4.."')),
]  # fmt: skip


@pytest.mark.parametrize(("text", "error", "message"), BROKEN)
def test_a_broken_profile_is_one_clear_error(
    tmp_path: Path, text: str, error: type[Exception], message: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(error, match=message) as caught:
        load_profile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value) and type(caught.value) is error
    assert isinstance(caught.value, errors.KernelLibraryError)


# What loading leaves to the lint, since it takes thousands of calls to find.
CROSSING: list[tuple[str, type[errors.ProfileError], str]] = [
    (HEAD + rule(rows="1..4") + rule(MM, rows="5..") + rule("native", k="64.."), errors.UnreachableRule,
     r"rule 3 \(k 64\.\. -> native\) .*rule 1 \(rows 1\.\.4\) and rule 2 \(rows 5\.\.\) together take all its calls"),
    (HEAD + rule(when="m < 5") + rule(MM, when="m > 4 and k > 7") + rule("rows", when="m >= 5 and k == 512"),
     errors.UnreachableRule, r"rule 3 .*: rule 2 \(m > 4 and k > 7\) takes all"),
    (HEAD + rule(when="m < 2 and m > 3"), errors.UnreachableRule, "no call was found for which its conditions hold"),
    (HEAD + NUMBERED + rule(when="size > 9 and m > 2"), errors.UnreachableRule, "no call was found"),
    (HEAD + rule(rows="1..8") + rule(MM, k="512.."), OverlappingRules,
     r"rules? 1 \(rows 1\.\.8 -> candle-metal/mv\) and rule 2 \(k 512\.\. -> candle-metal/mm\) cross: both take a "),
    (HEAD + rule(when="m < 9 and n % 8 == 0") + rule(MM, when="k % 512 == 0") + rule("native"), OverlappingRules,
     r"rule 2 \(k % 512 == 0.*cross: both take .*, k = \d+, n = \d+"),
    (HEAD + NUMBERED + rule(when="size > 4") + rule(MM, rows="2.."), OverlappingRules, "cross.*size = "),
]  # fmt: skip


def linted(path: Path) -> None:
    found = load_profile(path)
    check_rules(found.rules, found.parameters, f"Profile {path}")


@pytest.mark.parametrize(("text", "error", "message"), CROSSING)
def test_the_lint_finds_rules_that_cannot_be_read_alone(
    tmp_path: Path, text: str, error: type[errors.ProfileError], message: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(error, match=message) as caught:
        linted(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", profile_names())
def test_the_shipped_profiles_pass_the_lint(name: str) -> None:
    found = profile(name)
    check_rules(found.rules, found.parameters, f"Profile {name}")


@pytest.mark.parametrize(
    "text",
    [
        rule(rows=3) + rule(),
        rule(rows="1..4", op="linear") + rule(MM, rows="5..", op="linear") + rule("native", op="attention"),
        rule(rows="1..8", k="512..") + rule(MM, k="512.."),
        rule(rows="1..8") + rule(k="512.."),  # These cross, and name one kernel.
        rule(rows="1..8", op="linear") + rule(MM, k="512..", op="head"),
        rule(when="m < 9 and n % 8 == 0") + rule(MM, when="m >= 9 and k % 512 == 0") + rule("native"),
        NUMBERED + rule(when="size > 4 and m > 1") + rule(MM, rows="2.."),
        rule(bits="dense") + rule(MM, format="affine") + rule("rows", format=["Q4_K", "Q6_K"]),
        rule(op="linear") + rule(MM),
    ],
)
def test_the_unbroken_twin_loads_and_passes(tmp_path: Path, text: str) -> None:
    linted(written(tmp_path, HEAD, text))


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_an_unreadable_file_is_one_clear_error(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "mine.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(errors.UnreadableProfile, match=r"mine\.toml cannot be read"):
        load_profile(path)
    with pytest.raises(errors.UnreadableProfile, match=r"mine\.toml cannot be read"):
        profile(f"{path}:size=3")


ranges = st.builds(
    lambda low, more: Range(low, None if more is None else low + more),
    st.integers(1, 3),
    st.none() | st.integers(0, 2),
)
rules = st.builds(
    Rule,
    kernel=st.sampled_from(["native", "rows"]),
    source=st.just("here"),
    tag=st.just("read"),
    op=st.frozensets(st.sampled_from(["linear", "head"]), min_size=1),
    rows=ranges,
    k=ranges,
    dtype=st.none() | st.frozensets(st.sampled_from(["float32", "float16"]), min_size=1),
    bits=st.none() | st.frozensets(st.sampled_from([None, 4, "quantised"]), min_size=1),
)
CALLS = [
    call(op, rows, 1, k=k, dtype=dtype, bits=bits)
    for op, rows, k, dtype, bits in product(
        ("linear", "head", "switch"),
        range(1, 8),
        range(1, 8),
        ("float32", "float16", "bfloat16"),
        (None, 4, 8),
    )
]


@given(st.lists(rules, min_size=1, max_size=3))
def test_the_checks_find_what_a_full_count_finds(found: list[Rule]) -> None:
    taken = [{place for place, each in enumerate(CALLS) if one.takes(each)} for one in found]
    unreachable = any(not mine - set().union(*taken[:place]) for place, mine in enumerate(taken))
    crossing = any(
        found[a].kernel != found[b].kernel
        and taken[a] & taken[b]
        and taken[a] - taken[b]
        and taken[b] - taken[a]
        for a in range(len(found))
        for b in range(a + 1, len(found))
    )
    try:
        check_rules(found, (), "Here")
    except errors.UnreachableRule:
        assert unreachable
    except OverlappingRules:
        assert crossing and not unreachable
    else:
        assert not unreachable and not crossing
    for place, mine in enumerate(found):
        for above, earlier in enumerate(found[:place]):
            if earlier.contains(mine):
                assert taken[place] <= taken[above]
