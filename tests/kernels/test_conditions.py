"""The language of profile conditions: what it computes, how it reads, and what it refuses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detdiff_kernels import Call, errors
from detdiff_kernels.condition import CALL_NAMES, Definition, Scope, parse, version_of

CALL = Call("linear", 13, 13, 2048, 4096, "bfloat16", 4, 64)
SCOPE = Scope({"generation": "number", "letter": "text", "version": "version"})
NAMES = {**CALL.names(), "generation": 15, "letter": "s", "version": version_of("0.32.1")}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("m", 13),
        ("m + n * k // 2 - 1", 13 + 4096 * 2048 // 2 - 1),
        ("-(m % 4)", -1),
        ("ceil(m, 4)", 4),
        ("ceil(12, 4)", 3),
        ("npow2(m)", 16),
        ("npow2(16)", 16),
        ("npow2(0)", 1),
        ("min(m, 3, k) + max(1, 2)", 5),
        ("even_split(896, 64, 18)", 14),
        ("even_split(896, 64, 9)", 7),
        ("even_split(896, 64, 6)", 2),
        ("even_split(100, 64, 6)", 1),
        ("1 if m < 13 else 2 if m == 13 else 3", 2),
        ("m >= 13 and not (k in (64, 128) or n <= 5)", True),
        ("2 <= m < 13", False),
        ("bits not in (6, 8)", True),
        ('dtype == "bfloat16" and format != "dense"', True),
        ('letter in ("s", "d")', True),
        ("sorted or padded", False),
        ("not sorted and True", True),
        ('version >= "0.32.1"', True),
        ('"0.31.2" <= version < "0.32.10"', True),
        ('version == "0.32.1.0"', True),
    ],
)
def test_an_expression_computes(text: str, value: object) -> None:
    assert parse(text, SCOPE, "here").value(NAMES) == value


def test_versions_compare_as_versions() -> None:
    ascending = ["0.9", "0.31", "0.31.2", "0.32.0", "0.32.1", "0.32.10", "1"]
    assert sorted(reversed(ascending), key=version_of) == ascending


def test_a_version_without_its_zeros_is_the_same() -> None:
    assert version_of("0.31.0") == version_of("0.31") and version_of("0") == version_of("0.0.0")


def test_the_text_gets_the_values_of_definitions_and_parameters_once() -> None:
    limit = parse('13 if letter == "s" else 18', SCOPE, "here")
    wide = parse("generation >= 15", SCOPE, "here")
    scope = Scope(SCOPE.parameters, {"limit": Definition("limit", limit), "wide": Definition("wide", wide)})
    when = parse('m >= limit and limit > 2 and wide and version >= "0.32"', scope, "here", "truth")
    assert (
        when.with_values(NAMES, scope)
        == 'm >= limit (13) and limit > 2 and wide and version (0.32.1) >= "0.32"'
    )
    assert when.value(NAMES) is True
    assert when.leaves == {"m", "letter", "generation", "version"}


REFUSED = {
    "__import__('os')": "functions are min",
    "().__class__": r"at '\(\)\.__class__' \(character 1\)",
    "m.real": "not part of the language",
    "m if m else n": "at 'm' .*it is a number and a truth is needed",
    "m < 3 and mm > 2": "at 'mm' \\(character 11\\): there is no such name; did you mean m",
    "m ** 9": "operators are",
    "m << 9": "operators are",
    "m / 2": "operators are",
    "~m": "only signs",
    "m < 1.5": "at '1.5'.*numbers are whole",
    "m < 99999999999999999999": "at most 53 bits",
    "m < None": "other constants do not exist",
    "[m]": "not part of the language",
    "{m: n}": "not part of the language",
    "lambda: m": "not part of the language",
    "[x for x in (1, 2)]": "not part of the language",
    "(m := 3)": "not part of the language",
    "f'{m}'": "not part of the language",
    "m in k": "in is followed by a tuple",
    "m in ()": "in is followed by a tuple",
    "m in (k, 2)": "the tuple has to hold constants",
    'm in (1, "a")': "the tuple has to hold constants that are a number",
    'm == "a"': "a number is compared with a text",
    "dtype == 3": "a text is compared with a number",
    'dtype < "float32"': "cannot be compared in this way",
    "sorted < padded": "cannot be compared in this way",
    "m is k": "cannot be compared in this way",
    "m + dtype": "at 'dtype' .*it is a text and a number is needed",
    '"a" * 9': "it is a text and a number is needed",
    "not m": "it is a number and a truth is needed",
    "m and n": "it is a number and a truth is needed",
    "version >= 3": "a version is written as a text",
    'version >= "new"': 'a version is written as a text such as "0.32.1"',
    "version >= letter": "a version is compared with a text",
    "min(m)": "min takes two or more numbers",
    "ceil(m)": "ceil takes 2 numbers",
    "min(m, default=3)": "functions are",
    "abs(m)": "functions are",
    "min": "no such name",
    "1 if sorted else 'a'": "it is a text and a number is needed",
    "m >": "cannot be parsed",
    "m = 3": "cannot be parsed",
    "": "cannot be parsed",
    "m < 3 # \u00e9": "not ASCII",
    "-" * 900 + "m": "cannot be parsed",
    "1is 2": "cannot be parsed",
    "1 + " * 400 + "1": "longer than 1000",
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_in_the_language_is_refused_by_its_place(text: str) -> None:
    with pytest.raises(errors.BadExpression, match=REFUSED[text]) as caught:
        parse(text, SCOPE, "Rule 7")
    message = str(caught.value)
    assert message.startswith("Rule 7 has the expression") and "\n" not in message


def test_a_condition_has_to_be_a_truth() -> None:
    with pytest.raises(errors.BadExpression, match="it is a number and a truth is needed here"):
        parse("m + 1", SCOPE, "here", "truth")


def test_a_division_by_zero_names_the_call() -> None:
    with pytest.raises(errors.BadExpression, match=r"divides by zero for d = 0, k = 2048\. Guard"):
        parse("k // d > 1", SCOPE, "here").value(NAMES)


numbers = st.integers(0, 300)
expressions = st.recursive(
    st.sampled_from(["m", "k", "n", "q"]) | numbers.map(str),
    lambda part: st.one_of(
        st.tuples(part, st.sampled_from(["+", "-", "*"]), part).map(lambda three: f"({' '.join(three)})"),
        st.tuples(st.sampled_from(["min", "max"]), part, part).map(lambda p: f"{p[0]}({p[1]}, {p[2]})"),
        st.tuples(part, part, part, part).map(lambda p: f"({p[0]} if {p[1]} <= {p[2]} else {p[3]})"),
    ),
    max_leaves=8,
)


@given(expressions, st.fixed_dictionaries(dict.fromkeys(("m", "k", "n", "q"), numbers)))
def test_an_expression_is_what_python_makes_of_it(text: str, values: dict[str, int]) -> None:
    assert parse(text, Scope(), "here").value(values) == eval(text, {}, dict(values))


@given(st.text(st.sampled_from("mkn()<>=!+-*/%,'\"[]{}.:_ andorti0123"), max_size=30))
def test_any_text_is_an_expression_or_one_refusal(text: str) -> None:
    try:
        found = parse(text, SCOPE, "here")
    except errors.BadExpression as error:
        assert "\n\n" not in str(error)
    else:
        assert found.leaves <= CALL_NAMES.keys() | SCOPE.parameters.keys()
