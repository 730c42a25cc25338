"""Scenarios: what is read, what is written back, and what can be changed."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detdiff.errors import ScenarioConflict, ScenarioKeyMissing
from detdiff.scenario import (
    CachePlan,
    Capture,
    KernelPlan,
    PathRule,
    Request,
    Sampling,
    Scenario,
    Schedule,
    Speculation,
    Turn,
)
from detdiff.scenario.keys import (
    CHANGE_KEYS,
    FILE_KEYS,
    FLAG_KEYS,
    REQUEST_KEYS,
    RULE_KEYS,
    TABLE,
    parse_flags,
)

DOCS = Path(__file__).resolve().parent.parent / "docs" / "scenario.md"

WHOLE = """
model = "builtin"
schedule = "continuous"
layout = "packed"
active = 4
row_budget = 512
prefill_chunk = 64
kernels = "candle-metal"
split_rows = 4
max_tokens = 32
temperature = 1
seed = 7
capture = "window"
lens = true
top = 4
window_requests = ["anchor"]
window_positions = [3, 9]
window_sites = ["layers.*.mlp.*"]
digest = "host"
memory_mb = 64

[[request]]
id = "anchor"
prompt = "In the beginning"

[[request]]
tokens = [1, 2, 3]
arrival = 5
max_tokens = 8
temperature = 0.0
ignore_stop = true

[[rule]]
site = "layers.*.mlp.*"
phase = "decode"
rows = "2..8"
path = "pad:8"
"""


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "case.toml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def minimal(**keys: Any) -> dict[str, Any]:
    return {"model": "builtin", "request": [{"prompt": "a"}], **keys}


def test_every_key_of_a_file_arrives_in_its_place(tmp_path: Path) -> None:
    assert Scenario.from_toml(written(tmp_path, WHOLE)) == Scenario(
        model="builtin",
        requests=(
            Request("anchor", prompt="In the beginning", max_tokens=32, sampling=Sampling(1.0, 1.0, 7)),
            Request(
                "r1",
                tokens=(1, 2, 3),
                max_tokens=8,
                arrival=5,
                ignore_stop=True,
                sampling=Sampling(0.0, 1.0, 7),
            ),
        ),
        schedule=Schedule("continuous", "packed", active=4, row_budget=512, prefill_chunk=64),
        kernels=KernelPlan("candle-metal", 4, (PathRule("layers.*.mlp.*", "decode", "2..8", "pad:8"),)),
        capture=Capture("window", True, 4, ("anchor",), (3, 9), ("layers.*.mlp.*",), "host", 64),
    )


def test_defaults() -> None:
    assert Scenario.from_dict(minimal()) == Scenario("builtin", (Request("r0", prompt="a"),))


def test_a_default_of_the_run_is_the_default_of_each_request_and_chat_is_for_text_only() -> None:
    scenario = Scenario.from_dict(
        {"model": "m", "chat": True, "top_p": 0.5, "request": [{"prompt": "a"}, {"tokens": [1], "top_p": 1}]}
    )
    assert [request.chat for request in scenario.requests] == [True, False]
    assert [request.sampling.top_p for request in scenario.requests] == [0.5, 1.0]


characters = st.characters(exclude_categories=["Cs"])
names = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=12)
positive = st.integers(1, 2**31 - 1)
natural = st.integers(0, 2**31 - 1)


def own_sampling(serial: bool) -> st.SearchStrategy[dict[str, Any]]:
    """What mlx-lm's sampler and processors are asked for, as strategies by field."""
    finite = st.floats(-1e300, 1e300)
    every: dict[str, Any] = {
        "top_k": positive,
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.floats(0, 1e300, exclude_min=True),
        "presence_penalty": finite,
        "logit_bias": st.dictionaries(natural.filter(lambda n: n < 10**9), finite, max_size=3).map(
            lambda biases: tuple(sorted(biases.items()))
        ),
    }
    if serial:
        every["sampler"] = st.just("mlx-lm")
    return st.sets(st.sampled_from(sorted(every))).map(lambda names: {name: every[name] for name in names})


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    kind: Any = draw(st.sampled_from(["serial", "static", "continuous"]))
    layout: Any = draw(st.sampled_from(["padded", "packed"]))
    packed, one_by_one = layout == "packed", layout == "padded" and kind == "serial"
    speculates = (packed or one_by_one) and draw(st.booleans())
    quantised = one_by_one and draw(st.booleans())
    engine = draw(st.just("mlx") | names)
    native = engine == "mlx"
    json_values = st.recursive(
        st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(-1e300, 1e300) | st.text(characters),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(characters), inner, max_size=3),
        max_leaves=5,
    )
    objects = st.dictionaries(st.text(characters), json_values, max_size=3)
    requests = []
    for name in draw(st.lists(names, min_size=1, max_size=4, unique=True)):
        kind_of_prompt = draw(st.sampled_from(["text", "ids", "messages"] if native else ["text", "ids"]))
        is_text, is_chat = kind_of_prompt == "text", kind_of_prompt == "messages"
        chat = is_text and draw(st.booleans())
        sampling = st.builds(
            Sampling,
            st.just(0.0) if speculates else st.floats(0, 1e300),
            st.floats(0, 1, exclude_min=True),
            st.integers(0, 2**63 - 1),
            **draw(own_sampling(kind == "serial")) if native and not speculates else {},
        )
        requests.append(
            Request(
                name,
                prompt=draw(st.text(characters, min_size=1)) if is_text else None,
                tokens=tuple(draw(st.lists(natural, min_size=1, max_size=5)))
                if kind_of_prompt == "ids"
                else None,
                messages=({**draw(objects), "role": draw(st.text(characters))},) if is_chat else None,
                chat_template_args=draw(objects) if native and (chat or is_chat) else {},
                stop=tuple(draw(st.lists(st.text(characters, min_size=1), max_size=2))) if native else (),
                chat=chat,
                max_tokens=draw(positive),
                arrival=0 if kind == "static" else draw(natural),
                ignore_stop=draw(st.booleans()),
                sampling=draw(sampling),
            )
        )
    level: Any = draw(st.sampled_from(["digest", "full", "window"]))
    window = level == "window"
    rules = st.builds(
        PathRule,
        site=st.text(characters, min_size=1, max_size=8),
        phase=st.sampled_from(["any", "prefill", "decode", "mixed", "draft", "verify"]),
        rows=st.sampled_from(["1", "2..8", "9.."]),
        path=st.sampled_from(["native", "rows", "pad:8", "candle-metal/mv"]),
        second_last=st.sampled_from(["1..", "2.."]),
    )
    profile = st.none() | names.filter(lambda name: name != "native")
    settings = st.dictionaries(st.text(characters).filter(lambda key: key != "name"), json_values, max_size=3)
    return Scenario(
        model=draw(names if engine in ("mlx", "transformers") else names | st.just("")),
        requests=tuple(requests),
        schedule=Schedule(
            kind,
            layout,
            active=draw(st.none() | positive) if kind == "continuous" else None,
            row_budget=draw(st.none() | positive) if layout == "packed" else None,
            prefill_chunk=draw(positive),
        ),
        kernels=KernelPlan(
            draw(profile), draw(st.none() | positive), tuple(draw(st.lists(rules, max_size=2)))
        ),
        capture=Capture(
            level,
            lens=draw(st.booleans()),
            top=draw(st.integers(2, 100)),
            requests=(requests[0].id,) if window and draw(st.booleans()) else (),
            positions=(0, draw(natural)) if window and draw(st.booleans()) else None,
            sites=tuple(draw(st.lists(st.text(characters, min_size=1), max_size=2))) if window else (),
            digest=draw(st.sampled_from(["auto", "host", "device"])),
            memory_mb=draw(positive),
        ),
        speculation=Speculation(draw(names), draw(positive)) if speculates else None,
        cache=CachePlan(
            kv_bits=draw(st.sampled_from([2, 3, 4, 5, 6, 8])) if quantised else None,
            kv_group_size=draw(st.sampled_from([32, 64, 128])) if quantised else 64,
            kv_start=draw(natural) if quantised else 0,
            page_tokens=draw(st.none() | positive) if packed else None,
            share_prefix=packed and draw(st.booleans()),
            reuse_tokens=draw(st.none() | positive) if one_by_one else None,
            max_kv_size=draw(st.none() | st.integers(5, 2**31 - 1))
            if native and not packed and not speculates
            else None,
        ),
        force_tokens=draw(st.none() | names) if packed or not speculates else None,
        adapter_path=draw(st.none() | names) if native else None,
        engine=engine,
        engine_settings=draw(settings),
    )


@given(scenarios())
def test_the_dict_survives_json_and_gives_the_scenario_back(scenario: Scenario) -> None:
    keys = json.loads(json.dumps(scenario.to_dict()))
    assert keys == scenario.to_dict()
    assert Scenario.from_dict(keys) == scenario
    assert list(Scenario.from_dict(keys).to_dict()) == list(keys)


@given(scenarios())
def test_the_toml_gives_the_scenario_back(scenario: Scenario) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.toml"
        path.write_bytes(scenario.to_toml().encode())
        read, keys = Scenario.from_toml(path).to_dict(), scenario.to_dict()
        named_files = ("model", "draft", "force_tokens", "adapter_path")
        # A name that looks like a path is resolved on reading; all else is as it was.
        named = {name: keys[name] for name in named_files if name in keys}
        assert named.keys() == {name for name in read if name in named_files}
        assert Scenario.from_dict({**read, **named}) == scenario


def test_the_limits_themselves_are_allowed() -> None:
    scenario = Scenario.from_dict(
        minimal(
            layout="packed",
            schedule="static",
            active=1,
            row_budget=1,
            top=2,
            top_p=1,
            seed=2**63 - 1,
            max_tokens=1,
        )
    )
    assert scenario.requests[0].sampling.seed == 2**63 - 1 and scenario.schedule.row_budget == 1


def test_a_file_may_start_with_a_byte_order_mark_and_use_any_line_ends(tmp_path: Path) -> None:
    plain = Scenario.from_toml(written(tmp_path, WHOLE))
    assert (
        Scenario.from_toml(written(tmp_path, b"\xef\xbb\xbf" + WHOLE.replace("\n", "\r\n").encode())) == plain
    )


def test_a_model_directory_is_looked_for_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    def model(name: str) -> str:
        path = written(tmp_path, f'model = "{name}"\n[[request]]\nprompt = "a"')
        return Scenario.from_toml(Path("..") / path.name).model

    assert model("models/tiny") == str(tmp_path / "models" / "tiny")
    assert model("./missing") == str(tmp_path / "missing")
    assert model("builtin") == "builtin"
    assert model("owner/name") == "owner/name"


def test_a_draft_and_a_trace_are_looked_for_beside_the_file_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "small").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    text = 'model = "builtin"\nlayout = "packed"\ndraft = "models/small"\nforce_tokens = "run"\n[[request]]\nprompt = "a"'
    path = written(tmp_path, text)
    monkeypatch.chdir(tmp_path / "elsewhere")
    read = Scenario.from_toml(path)
    assert read.speculation == Speculation(str(tmp_path / "models" / "small"), 4)
    assert read.force_tokens == str(tmp_path / "run")
    changed = read.with_changes(draft="builtin-draft", force_tokens="run")
    assert changed.speculation == Speculation("builtin-draft", 4)
    assert changed.force_tokens == str(tmp_path / "elsewhere" / "run")


def test_a_scenario_without_speculation_and_cache_settings_is_written_as_before() -> None:
    keys = set(Scenario.from_dict(minimal(layout="packed")).to_dict())
    assert not keys & {"draft", "drafts", "force_tokens", *vars(CachePlan())}


def test_what_a_change_leaves_without_a_use_goes_and_what_decides_numbers_stays() -> None:
    packed = Scenario.from_dict(
        minimal(layout="packed", draft="builtin-draft", drafts=3, page_tokens=16, share_prefix=True)
    )
    padded = packed.with_changes(layout="padded")
    assert padded.cache == CachePlan() and padded.speculation == Speculation("builtin-draft", 3)
    assert packed.with_changes(draft=None).speculation is None
    quantised = Scenario.from_dict(minimal(kv_bits=4, kv_group_size=32, kv_start=7, reuse_tokens=5))
    assert quantised.with_changes(kv_bits=None).cache == CachePlan(reuse_tokens=5)
    with pytest.raises(ScenarioConflict, match="kv_bits is 4, layout is packed"):
        quantised.with_changes(layout="packed")
    assert quantised.with_changes(layout="packed", kv_bits=None).cache == CachePlan()


def test_flags_say_what_a_file_says(tmp_path: Path) -> None:
    by_flags = Scenario.from_flags(
        "builtin",
        ["In the beginning"],
        "schedule=continuous layout=packed active=4 row_budget=512 prefill_chunk=64 "
        "kernels=candle-metal split_rows=4 max_tokens=32 temperature=1 seed=7 capture=window lens top=4 "
        "window_requests=r0 window_positions=3..9 window_sites='layers.*.mlp.*' digest=host "
        "memory_mb=64 tokens=1,2,3 arrivals=0,5",
    )
    text = WHOLE.partition("[[rule]]")[0].replace("anchor", "r0")
    text = text.replace("max_tokens = 8\ntemperature = 0.0\nignore_stop = true", "")
    assert by_flags == Scenario.from_toml(written(tmp_path, text))


def test_flags_split_as_a_shell_does_and_read_each_type() -> None:
    assert parse_flags(
        "lens ignore_stop=false 'kernels=a b' window_sites=x,y tokens=1,2;3 top_p=.5 window_positions=1,2"
    ) == {
        "lens": True,
        "ignore_stop": False,
        "kernels": "a b",
        "window_sites": ("x", "y"),
        "tokens": ([1, 2], [3]),
        "top_p": 0.5,
        "window_positions": (1, 2),
    }


@given(scenarios())
def test_changing_nothing_changes_nothing(scenario: Scenario) -> None:
    assert scenario.with_changes() == scenario


def test_changes_reach_every_request_and_none_is_the_default(tmp_path: Path) -> None:
    scenario = Scenario.from_toml(written(tmp_path, WHOLE))
    changed = scenario.with_changes(
        max_tokens=3, chat=True, arrivals=[1, 2], row_budget=None, kernels=None, split_rows=None, lens=False
    )
    assert [(r.max_tokens, r.chat, r.arrival) for r in changed.requests] == [(3, True, 1), (3, False, 2)]
    assert changed.schedule == Schedule("continuous", "packed", active=4, prefill_chunk=64)
    assert changed.kernels == KernelPlan(rules=scenario.kernels.rules)
    assert not changed.capture.lens and changed.capture.positions == (3, 9)
    assert [r.arrival for r in changed.with_changes(arrivals=None).requests] == [0, 0]
    assert scenario == Scenario.from_toml(tmp_path / "case.toml")


def test_a_rule_holds_inside_its_ranges() -> None:
    cases = {"4": [4], "2..4": [2, 3, 4], "4..": [4, 5, 6], "1..": [1, 2, 3, 4, 5, 6]}
    for rows, holding in cases.items():
        assert [n for n in range(1, 7) if PathRule(rows=rows).holds(n)] == holding
    # Two rows, packed [1, 2, K] and padded [2, 1, K].
    packed_only = PathRule(rows="2..", second_last="2..")
    assert packed_only.holds(2, 2) and not packed_only.holds(2, 1) and not packed_only.holds(1, 1)
    with pytest.raises(ValueError, match="not given"):
        packed_only.holds(2)


def test_the_page_names_every_key_and_its_file_and_flags_can_be_run(tmp_path: Path) -> None:
    page = DOCS.read_text(encoding="utf-8")
    for name in {*FILE_KEYS, *REQUEST_KEYS, *RULE_KEYS, *CHANGE_KEYS, *FLAG_KEYS}:
        assert f"`{name}`" in page, f"docs/scenario.md does not explain {name}"
    files = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert files and all(Scenario.from_toml(written(tmp_path, text)) for text in files)
    flags = re.findall(r'--[ab] "([^"]*)"', page)
    assert flags and all(Scenario.from_flags("builtin", ["a", "b"], text) for text in flags)


@pytest.mark.parametrize(
    ("given", "folder", "rest"),
    [
        ("mine.toml", "", ""),
        ("./sub/mine.toml", "sub/", ""),
        ("../mine.toml:chip=3,letter=s", "../", ":chip=3,letter=s"),
    ],
)
def test_a_profiles_file_is_looked_for_beside_the_scenario(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, folder: str, rest: str
) -> None:
    home = tmp_path / "scenarios"
    home.mkdir()
    (home / "s.toml").write_text(f'model = "builtin"\nkernels = "{given}"\n[[request]]\nprompt = "a"\n')
    expected = str((home / f"{folder}mine.toml").resolve()) + rest
    read = Scenario.from_toml(home / "s.toml")
    assert read.kernels.profile == expected
    # A flag means the folder that the command runs in, and a path that is whole already stays.
    monkeypatch.chdir(home)
    flags = Scenario.from_flags("builtin", ["a"], f"kernels={given}")
    assert flags.kernels.profile == read.with_changes(kernels=given).kernels.profile == expected
    assert Scenario.from_dict(read.to_dict()) == read.with_changes(max_tokens=64) == read


def test_a_profiles_name_and_parameters_stay_as_they_are() -> None:
    spec = "mlx-metal:generation=15,letter=s,version=0.32.0"
    assert Scenario.from_flags("builtin", ["a"], f"kernels={spec}").kernels.profile == spec


def test_the_table_says_the_defaults_that_the_classes_have() -> None:
    plain = Scenario("builtin", (Request("r0", prompt="a"),), speculation=Speculation("builtin-draft"))
    words = {"off": None, "no limit": None, "contiguous": None, "all": None, "false": False}
    words |= dict.fromkeys(("none", "all tokens", "as mlx-lm's commands"))
    checked = 0
    for section, keys in TABLE.items():
        later = Request("r0/2", prompt="b", turn=Turn("r0"))
        whole: Any = {"Rule": PathRule(), "Request": plain.requests[0], "Turn": later}.get(
            section.split()[0].rstrip("s"), plain
        )
        for key in keys:
            said = key.default.strip("`")
            if key.name in ("model", "engine", "draft", "kernels", "id", "prompt", "tokens", "messages"):
                continue
            found = getattr(getattr(whole, key.part) if key.part else whole, key.attribute) or None
            expected = words[said] or None if said in words else key.kind.read(said) or None
            assert found == expected, key.name
            checked += 1
    assert checked == sum(map(len, TABLE.values())) - 8


def factory_case(**keys: Any) -> dict[str, Any]:
    return {"engine": "my.engines:make", "request": [{"prompt": "a"}], **keys}


def test_an_engine_is_a_name_or_a_table_with_settings_and_mlx_is_not_written(tmp_path: Path) -> None:
    assert "engine" not in Scenario.from_dict(minimal(engine="mlx")).to_dict()
    named = Scenario.from_dict(minimal(engine="transformers"))
    assert named.engine == "transformers" and named.to_dict()["engine"] == "transformers"
    text = 'model = "m"\n[engine]\nname = "transformers"\ndevice = "cpu"\nopts = {a = [1, 2]}\n[[request]]\nprompt = "a"'
    read = Scenario.from_toml(written(tmp_path, text))
    assert (read.engine, read.engine_settings) == ("transformers", {"device": "cpu", "opts": {"a": [1, 2]}})
    flags = Scenario.from_flags(
        "m", ["a"], """engine=transformers engine.device=cpu 'engine.opts={"a": [1, 2]}'"""
    )
    assert flags == read and hash(flags) == hash(read)


def test_a_factory_needs_no_model_and_the_libraries_do() -> None:
    made = Scenario.from_dict(factory_case())
    assert made.model == "" and "model" not in made.to_dict()
    assert Scenario.from_flags(None, ["a"], "engine=my.engines:make") == made
    for engine in ("mlx", "transformers"):
        with pytest.raises(ScenarioKeyMissing, match="there is no model"):
            Scenario.from_dict(factory_case(engine=engine))


def test_llama_cpp_is_packed_without_being_asked() -> None:
    asked = minimal(engine="llama.cpp", schedule="continuous", row_budget=4)
    found = Scenario.from_dict(asked)
    assert (found.schedule.layout, found.schedule.row_budget) == ("packed", 4)
    assert Scenario.from_dict(found.to_dict()) == found
    flags = Scenario.from_flags("m.gguf", ["a"], "engine=llama.cpp schedule=continuous row_budget=4")
    assert flags.schedule == found.schedule
    made = Scenario("m", (Request("r0", prompt="a"),), Schedule("static"), engine="llama.cpp")
    assert made.schedule == Schedule("static", layout="packed")
    # The layout of the engine that was there before was not asked of this one.
    padded = Scenario.from_dict(minimal(schedule="static"))
    assert padded.with_changes(engine="llama.cpp").schedule.layout == "packed"
    assert found.with_changes(engine="mlx").schedule.layout == "packed"
    # Whose cache has settings of its own; the engine refuses these by name.
    assert Scenario.from_dict({**asked, "kv_bits": 4}).cache.kv_bits == 4
    for change in (
        lambda: Scenario.from_dict({**asked, "layout": "padded"}),
        lambda: found.with_changes(layout="padded"),
    ):
        with pytest.raises(ScenarioConflict, match="leave layout out"):
            change()


def test_transformers_packs_rows_where_its_schedule_is_continuous() -> None:
    serial = Scenario.from_dict(minimal(engine="transformers"))
    assert serial.schedule == Schedule("serial")
    found = serial.with_changes(schedule="continuous", active=4, row_budget=8, page_tokens=4)
    assert found.schedule == Schedule("continuous", "packed", 4, 8) and found.cache.page_tokens == 4
    assert Scenario.from_dict(found.to_dict()) == found
    asked = minimal(engine="transformers", schedule="continuous", layout="padded")
    assert Scenario.from_dict(asked).schedule.layout == "packed"
    # What says something of packed rows alone goes with them.
    assert found.with_changes(schedule="static").schedule == Schedule("static")
    assert found.with_changes(schedule="serial") == serial
    assert found.with_changes(max_tokens=3).schedule == found.schedule
    assert found.with_changes(engine="mlx").schedule.layout == "packed"


def test_settings_of_an_engine_are_json_and_cannot_be_changed_from_outside() -> None:
    given: dict[str, Any] = {"layers": [1]}
    made = Scenario("", (Request("r0", prompt="a"),), engine="e", engine_settings=given)
    given["layers"].append(2)
    assert made.engine_settings == {"layers": [1]}
    assert parse_flags("engine.a=1 engine.b=true engine.c=x engine.d engine.e=01 engine.f=.5") == {
        "engine.a": 1,
        "engine.b": True,
        "engine.c": "x",
        "engine.d": True,
        "engine.e": "01",
        "engine.f": ".5",
    }


def test_changes_of_an_engine_keep_its_other_settings_and_another_engine_begins_without() -> None:
    first = Scenario.from_dict(factory_case(engine={"name": "e", "a": 1, "b": 2}))
    assert first.with_changes(**{"engine.a": 3}).engine_settings == {"a": 3, "b": 2}
    assert first.with_changes(**{"engine.a": None}).engine_settings == {"b": 2}
    assert first.with_changes(engine="e", **{"engine.c": 0}).engine_settings == {"a": 1, "b": 2, "c": 0}
    other = first.with_changes(engine="f", **{"engine.c": 0})
    assert (other.engine, other.engine_settings) == ("f", {"c": 0})
    assert first.with_changes(engine={"name": "e", "a": 5}).engine_settings == {"a": 5}
    assert first.with_changes(engine=None, model="builtin").to_dict().get("engine") is None
