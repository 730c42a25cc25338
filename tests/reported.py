"""Questions about what people reported: small models, engines of their own, and each question asked from the command line and from Python."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from command_line import run

import detdiff
from detdiff import Scenario, explain
from detdiff.report.json import to_json, verdict_json
from detdiff.scenario import parse_flags

Answer = dict[str, Any]

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5, "vocab_size": 96, "max_position_embeddings": 512, "rope_theta": 10000.0,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "vocab_size": 64, "tie_word_embeddings": True,
}  # fmt: skip
TOKENS = "tokens=1,2,3;4,5,6,7,8,9,10,11,12"

COMPARED = {
    "explain": ("verdict", "rule", "said"),
    "compare": (
        "identical",
        "inconclusive",
        "stage",
        "first",
        "compared",
        "requests",
        "not_compared",
        "workload",
        "bookkeeping",
        "notes",
    ),
}
"""What has to be the same from both, by command."""


def directory(folder: Path, config: dict[str, Any], dtype: str = "float32", code: str = "") -> str:
    """A model of random weights, which need no file; ``code`` is a Python file of its own."""
    made = {
        **config,
        "detdiff_random": {"seed": 0, "dtype": dtype},
        **({"model_file": "own.py"} if code else {}),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(made))
    if code:
        (folder / "own.py").write_text(code)
    return str(folder)


@dataclass(frozen=True)
class Asked:
    """The flags of both sides, of a and of b, with ``files`` over one file or two; ``more`` are options of the command by their
    Python names."""

    both: str = TOKENS
    a: str = "schedule=serial"
    b: str = "schedule=static"
    model: str = ""
    more: dict[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()

    def command_line(self, command: str) -> Answer:
        model = ["--model", self.model] if self.model else []
        options: list[str] = []
        for name, value in self.more.items():
            flag = f"--{name.removesuffix('s') if name == 'controls' else name.replace('_', '-')}"
            for each in value if isinstance(value, tuple) else (value,):
                options += [flag] if each is True else [flag, str(each)]
        flags = ("--both", self.both, "--a", self.a, "--b", self.b)
        found = run(command, *self.files, *model, *(flags if any(flags[1::2]) else ()), *options, "--json")
        assert found.exit_code in (0, 1, 3), found.output
        answer: Answer = json.loads(found.stdout)
        return answer

    def scenarios(self) -> list[Scenario]:
        sides = []
        for own, file in zip((self.a, self.b), (*self.files, *self.files)[:2] or (None, None), strict=True):
            flags = f"{self.both} {own}"
            sides.append(
                Scenario.from_flags(self.model or None, (), flags)
                if file is None
                else Scenario.from_toml(file).with_changes(**parse_flags(flags))
            )
        return sides

    def python(self, command: str, folder: Path) -> Answer:
        if command == "explain":
            return verdict_json(explain(*self.scenarios(), **self.more))
        a, _ = (
            detdiff.record(each, folder / name) for name, each in zip("ab", self.scenarios(), strict=True)
        )
        # A trace beside the path of one is a comparison as well.
        return to_json(detdiff.compare(a, folder / "b", **self.more))


Ask = Callable[[Path, pytest.MonkeyPatch, bool], Asked]
Right = Callable[[Answer], bool]


def verdict(kind: str, rule: str, *words: str, never: tuple[str, ...] = ()) -> Right:
    """That an answer is this verdict by this rule, with all of ``words`` and none of ``never`` in its sentence."""
    return lambda found: (
        (found["verdict"], found["rule"]) == (kind, rule)
        and all(word in found["said"] for word in words)
        and not any(word in found["said"] for word in never)
    )


IDENTICAL = verdict("identical", "identical")


def same(found: Answer) -> bool:
    """That a comparison found no difference."""
    return bool(found["identical"])


@dataclass(frozen=True)
class Kind:
    """``ask`` makes the question in a folder, with its cause where it is ``ill``; ``right`` holds of that answer, and ``sound`` of the
    one without the cause."""

    name: str
    ask: Ask
    right: Right
    sound: Right = same
    command: str = "compare"

    def check(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        """The ill one and its twin, each asked in both ways."""
        for ill in (True, False):
            own = folder / str(ill)
            (own / "again").mkdir(parents=True)
            with patch.context() as inner:
                written = self.ask(own, inner, ill).command_line(self.command)
            with patch.context() as inner:
                python = self.ask(own / "again", inner, ill).python(self.command, own / "again")
            for key in COMPARED[self.command]:
                assert written[key] == json.loads(json.dumps(python[key])), key
            assert (self.right if ill else self.sound)(written), _shown(written)


def _shown(answer: Answer) -> str:
    told = {
        key: answer[key]
        for key in (*COMPARED["explain"], "stage", "requests", "bookkeeping")
        if key in answer
    }
    return json.dumps(told, indent=1)[:6000]


ENGINE = """
import numpy as np
from detdiff.engines.function import Generation, Tap

class Engine:
    name, vocab_size, calls = "made", 64, 0

    def __init__(self, model=None, settings=None):
        self.settings = dict(settings or {})

    def reset(self):
        self.calls = CALLS

    def generate(self, requests, schedule):
        self.calls += 1
        on, batch, found = self.settings.get("on", False), len(requests), []
        for each in requests:
            tokens, taps, scores, top = [7, 8], {}, [-0.5, -1.5], None
            x = np.arange(len(each.tokens) + 1, dtype=np.float32)[:, None]
BODY
            scores = None if scores is None else np.float32(scores)
            found.append(Generation(tokens, log_probabilities=scores, taps=taps, top=top))
        return found
"""
COUNTED = "tokens, scores = [(sum(each.tokens) + n + SHIFT) % 50 for n in range(each.max_tokens)], None"


def engine(folder: Path, patch: pytest.MonkeyPatch, name: str, body: str, calls: str = "0") -> str:
    """An engine of the user's as a module of the folder that they are in: ``body`` says what it answers to each request, ``calls`` how
    many calls it remembers when it is reset."""
    lines = "\n".join(" " * 12 + line for line in body.splitlines())
    module(folder, patch, name, ENGINE.replace("BODY", lines).replace("CALLS", calls))
    return f"engine={name}:Engine"


def module(folder: Path, patch: pytest.MonkeyPatch, name: str, text: str) -> None:
    """A module of the folder that the user is in."""
    (folder / f"{name}.py").write_text(text)
    patch.chdir(folder)
    patch.syspath_prepend(str(folder))
    patch.delitem(sys.modules, name, raising=False)
