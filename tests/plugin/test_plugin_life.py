"""The plugin from outside: markers, the fixture, options and ini settings, what a failure says and keeps, the summary."""

from __future__ import annotations

import pytest
from inner_runs import Run, text_of

from detdiff.commands.sides import ComparisonArguments, sides
from detdiff.compare import compare
from detdiff.trace import Trace

MARKED = """
import pytest
from tiny import tiny

@pytest.mark.batch_invariant(model=tiny("llama"), max_tokens=4)
def test_answers():
    pass
"""
SWITCHED = """
from tiny import tiny

def test_answers(batch_invariance):
    batch_invariance.check(tiny("llama"), kernels="candle-metal", max_tokens=4, **{})
"""


def test_a_marked_test_is_one_test_for_each_composition(run: Run) -> None:
    result = run(MARKED, "-v")
    result.assert_outcomes(passed=4)
    assert [line.split()[0].partition("::")[2] for line in result.outlines if "::test_answers" in line] == [
        f"test_answers[{schedule}-{layout}]"
        for schedule in ("static:2", "continuous:4")
        for layout in ("padded", "packed")
    ]
    summary = text_of(result).partition("detdiff: batch invariance")[2]
    assert "4 compositions checked, none failed, " in summary
    assert " rows at 38 sites of 1 model, 64 tokens" in summary


def test_one_composition_that_fails_does_not_hide_the_others(run: Run) -> None:
    result = run(MARKED.replace("max_tokens=4", "max_tokens=4, kernels='candle-metal'"))
    result.assert_outcomes(passed=2, failed=2)
    assert "4 compositions checked, 2 FAILED, " in text_of(result)
    result.stdout.fnmatch_lines(
        [
            "*_ test_answers[[]static:2-packed[]] _*",
            "static:2-packed of tiny-llama-f32-0 not invariant at level exact",
            "*_ test_answers[[]continuous:4-packed[]] _*",
            "FAILED test_it.py::test_answers[[]static:2-packed[]] - NotInvariant: static*",
        ]
    )


@pytest.mark.thorough
def test_a_call_checks_all_compositions_and_tells_of_each_failure(run: Run) -> None:
    result = run(SWITCHED)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "2 of 4 compositions of tiny-llama-f32-0 not invariant at level exact",
            "static:2-packed: The runs diverge*",
            "  a: each request alone (serial)",
            "  b: static:2, layout packed, batch 0",
            "  why: bits of the same rows differ",
            "  origin: embed_tokens.as_linear (head, outside the layers), position 7: its inputs are bit-equal",
            "    a: forward * path reference/candle-metal/mv, which saw 1 row*",
            "    b: forward * path reference/candle-metal/mm,",
            "  first cache entry: layer *, K, head *, position *",
            "  kept: a, b, report.html in .detdiff/test_it.py/test_answers/static-2-packed/batch-0",
            "  run: detdiff compare .detdiff/test_it.py/test_answers/static-2-packed/batch-0/a "
            ".detdiff/test_it.py/test_answers/static-2-packed/batch-0/b",
            "continuous:4-packed: The runs diverge*",
            "passed: static:2-padded, continuous:4-padded",
        ]
    )
    assert "rule: candle-metal: second-to-last dimension" in text_of(result)
    assert "Traceback" not in result.stdout.str() and "invariance.py" not in result.stdout.str()


@pytest.mark.thorough
def test_what_is_kept_says_what_the_failure_said(pytester: pytest.Pytester, run: Run) -> None:
    run(SWITCHED)
    kept = pytester.path / ".detdiff" / "test_it.py" / "test_answers" / "continuous-4-packed"
    found = compare(Trace.open(kept / "a"), Trace.open(kept / "b"))
    assert not found.identical and found.requests[0].origin is not None
    assert found.requests[0].origin.path_b == "reference/candle-metal/mm"
    page = (kept / "report.html").read_text(encoding="utf-8")
    assert "reference/candle-metal/mm" in page and "detdiff compare" in page
    assert (pytester.path / ".detdiff" / ".gitignore").read_text() == "*\n"


@pytest.mark.thorough
def test_what_is_kept_of_a_named_model_runs_again(pytester: pytest.Pytester, run: Run) -> None:
    result = run(
        "def test_it(batch_invariance):\n"
        "    batch_invariance.check('builtin', schedules='static:2', layouts='packed', kernels='candle-metal', max_tokens=3)\n"
    )
    folder = ".detdiff/test_it.py/test_it/static-2-packed/batch-0"
    for command in ("compare", "explain"):
        assert f"  run: detdiff {command} {folder}/a.toml {folder}/b.toml" in result.outlines
    found = sides(ComparisonArguments((pytester.path / folder / "a.toml", pytester.path / folder / "b.toml")))
    a, b = (side.source for side in found)
    assert not isinstance(a, Trace) and not isinstance(b, Trace)
    assert (a.schedule.kind, b.schedule.kind) == ("serial", "static")
    assert [r.id for r in a.requests] == [r.id for r in b.requests] == ["r0", "r1"]


@pytest.mark.thorough
def test_a_test_that_passes_again_keeps_nothing(pytester: pytest.Pytester, run: Run) -> None:
    run(SWITCHED)
    kept = pytester.path / ".detdiff" / "test_it.py" / "test_answers"
    assert kept.is_dir()
    run(SWITCHED.replace("candle-metal", "native")).assert_outcomes(passed=1)
    assert not kept.exists()


@pytest.mark.thorough
def test_a_failure_is_said_where_nothing_can_be_kept(pytester: pytest.Pytester, run: Run) -> None:
    (pytester.path / "taken").write_text("a file")
    result = run(SWITCHED, "--detdiff-report-dir", "taken")
    result.assert_outcomes(failed=1)
    said = text_of(result)
    assert "kept: nothing, because it could not be written: " in said and "run: detdiff" not in said
    assert "origin: embed_tokens.as_linear (head, outside the layers), position 7" in said


@pytest.mark.thorough
def test_a_folder_that_holds_other_things_is_not_ignored(pytester: pytest.Pytester, run: Run) -> None:
    (pytester.path / "mine").mkdir()
    (pytester.path / "mine" / "file").write_text("")
    run(SWITCHED, "--detdiff-report-dir", "mine")
    assert (pytester.path / "mine" / "test_it.py" / "test_answers" / "static-2-packed").is_dir()
    assert not (pytester.path / "mine" / ".gitignore").exists()


@pytest.mark.thorough
def test_the_whole_report_comes_with_vv(run: Run) -> None:
    short, full = run(SWITCHED).stdout.str(), run(SWITCHED, "-vv").stdout.str()
    for words in ("note: recording was checked", "origins: ", "smallest margins of equal tokens"):
        assert words not in short and words in full
    assert len(full.splitlines()) > len(short.splitlines())


@pytest.mark.thorough
def test_a_verdict_is_asked_for(run: Run) -> None:
    text = """
from tiny import tiny
def test_it(batch_invariance):
    batch_invariance.check(tiny("llama"), schedules="static:2", layouts="packed", kernels="candle-metal", max_tokens=3)
"""
    assert "verdict: " not in run(text).stdout.str()
    said = text_of(run(text, "--detdiff-explain"))
    assert "verdict: numerics. " in said and "candle-metal" in said and "what to do: " in said


@pytest.mark.thorough
def test_the_nearest_of_option_marker_and_call_wins(run: Run) -> None:
    text = """
import pytest

def test_by_option(batch_invariance):
    assert batch_invariance.check(max_tokens=2, layouts="packed").compositions == ("static:3-packed", "serial-packed")

@pytest.mark.batch_invariant(schedules="static:2", layouts="padded", max_tokens=2)
class TestMarked:
    def test_by_marker(self, batch_invariance):
        assert batch_invariance.check().compositions == ("static:2-padded",)

    @pytest.mark.batch_invariant(schedules="continuous")
    def test_by_its_own(self, batch_invariance):
        assert batch_invariance.check("builtin").compositions == ("continuous-padded",)
"""
    result = run(text, "--detdiff-model", "builtin", "--detdiff-schedules", "static:3,serial")
    result.assert_outcomes(passed=3)


@pytest.mark.thorough
def test_settings_come_from_the_ini_file(pytester: pytest.Pytester, run: Run) -> None:
    pytester.makeini(
        "[pytest]\ndetdiff_model = builtin\ndetdiff_schedules = static:2\ndetdiff_level = tokens\ndetdiff_report_dir = kept\n"
    )
    text = """
ASKED = {"max_tokens": 2, "layouts": "packed", "kernels": "candle-metal", "prompts": ["In", "My son"]}

def test_passes(batch_invariance):
    found = batch_invariance.check(**ASKED)
    assert found.compositions == ("static:2-packed",) and found.tokens == 4 and found.sites == 72

def test_fails(batch_invariance):
    batch_invariance.check(**ASKED, level="exact")
"""
    result = run(text)
    result.assert_outcomes(passed=1, failed=1)
    assert (pytester.path / "kept" / "test_it.py" / "test_fails" / "static-2-packed" / "a").is_dir()
    result = run(text, "--detdiff-level", "exact", "--detdiff-report-dir", "elsewhere")
    result.assert_outcomes(failed=2)
    assert (pytester.path / "elsewhere" / "test_it.py" / "test_passes").is_dir()


@pytest.mark.thorough
def test_models_are_loaded_and_run_alone_once_for_a_session(run: Run) -> None:
    text = """
import pytest
from detdiff.check import checked_engines

loads, alone = [], []
load, record = checked_engines.open_named, checked_engines.record

@pytest.fixture(autouse=True)
def counted(monkeypatch):
    monkeypatch.setattr(checked_engines, "open_named", lambda engine, name, given: loads.append(name) or load(engine, name, given))
    def counting(scenario, path, **kw):
        if scenario.schedule.kind == "serial":
            alone.append(scenario.schedule.layout)
        return record(scenario, path, **kw)
    monkeypatch.setattr(checked_engines, "record", counting)

@pytest.mark.batch_invariant(model="builtin", max_tokens=2)
def test_marked(): pass

def test_called(batch_invariance):
    batch_invariance.check("builtin", max_tokens=2, schedules="static:4", seeds=(1, 2))

def test_count():
    assert loads == ["builtin"] and sorted(alone) == ["packed", "padded"]
"""
    run(text).assert_outcomes(passed=6)


@pytest.mark.thorough
def test_a_model_that_changed_after_it_was_run_alone_is_run_again(run: Run) -> None:
    text = """
import pytest
from injected_faults import kernel_switch
from tiny import tiny

MODEL = tiny("llama")

@pytest.fixture
def injected():
    with kernel_switch():
        yield

def test_injected(injected, batch_invariance):
    with pytest.raises(AssertionError):
        batch_invariance.check(MODEL, schedules="static:2", layouts="padded", max_tokens=3)

def test_sound(batch_invariance):
    batch_invariance.check(MODEL, schedules="static:2", layouts="padded", max_tokens=3)

def test_injected_again(injected, batch_invariance):
    with pytest.raises(AssertionError, match="gate_proj"):
        batch_invariance.check(MODEL, schedules="static:2", layouts="padded", max_tokens=3)
"""
    run(text).assert_outcomes(passed=3)


@pytest.mark.parametrize("given", ["made", "(made.model, made.tokenizer)"])
def test_a_model_that_changed_is_run_with_its_own_weights(run: Run, given: str) -> None:
    text = f"""
from tiny import tiny

SAME = dict(prompts=[[1, 2, 3], [4, 5]], schedules="static:2", layouts="packed", kernels="batch-invariant", max_tokens=3)

def test_it(batch_invariance, monkeypatch):
    from detdiff.check import checked_engines
    from detdiff.compare import compare

    runs = []
    record = checked_engines.record
    monkeypatch.setattr(checked_engines, "record", lambda *args, **kw: runs.append(record(*args, **kw)) or runs[-1])
    made = tiny("llama")
    batch_invariance.check({given}, **SAME)
    layer = made.model.layers[0].mlp.down_proj
    layer.weight = layer.weight * 2
    batch_invariance.check({given}, **SAME)
    before, after, *_ = (each for each in runs if each.scenario["schedule"] == "serial")
    sites = [request.origin.site for request in compare(before, after).requests]
    assert sites and all("mlp.down_proj" in str(site) for site in sites)
"""
    run(text).assert_outcomes(passed=1)


def test_what_mlx_lm_load_gives_is_checked(run: Run) -> None:
    text = """
from tiny import tiny

def test_pair(batch_invariance):
    made = tiny("qwen3", "bf16")
    found = batch_invariance.check((made.model, made.tokenizer), max_tokens=3)
    assert found.rows > 0 and found.sites > 20 and found.seconds > 0
"""
    run(text).assert_outcomes(passed=1)


@pytest.mark.thorough
def test_a_unittest_method_is_checked_whole(run: Run) -> None:
    text = """
import unittest
import pytest

class TestIt(unittest.TestCase):
    @pytest.mark.batch_invariant(model="builtin", kernels="candle-metal", max_tokens=2)
    def test_it(self):
        pass
"""
    result = run(text)
    result.assert_outcomes(failed=1)
    assert "2 of 4 compositions of builtin" in result.stdout.str()


def test_nothing_is_said_where_nothing_was_checked(run: Run) -> None:
    assert "batch invariance" not in run("def test_it(): pass\n").stdout.str()


def test_skipped_tests_are_counted_as_not_checked(run: Run) -> None:
    text = "import pytest\n@pytest.mark.skip\n@pytest.mark.batch_invariant(model='builtin')\ndef test_it(): pass\n"
    result = run(text)
    result.assert_outcomes(skipped=4)
    assert "4 marked tests skipped, so not checked" in text_of(result)
