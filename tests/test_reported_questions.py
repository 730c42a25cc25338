"""Kinds of what people could not ask: turns, samplers, scores, chats, texts, patches; one answer both ways, and a healthy twin."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from command_line import run
from reported import (
    IDENTICAL,
    LLAMA,
    SMALL,
    TOKENS,
    Answer,
    Ask,
    Asked,
    Kind,
    Right,
    directory,
    module,
    same,
    verdict,
)
from tiers import some_now

import detdiff
from detdiff import Scenario
from detdiff.engines.base import IMPORTED
from detdiff.engines.mlx.model import locate
from detdiff.engines.registry import import_before_runs

QWEN3 = {**SMALL, "model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 32}
ELEVEN = f"tokens={','.join(map(str, range(1, 12)))} max_tokens=3"


def a_turn_trimmed_too_far(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
    from detdiff.engines.mlx.cache_events import mlx_lm_generate

    def more(cache: list[Any], count: int) -> int:
        for layer, one in enumerate(cache):
            one.trim(count + (layer == 1))
        return count

    if ill:
        patch.setattr(mlx_lm_generate, "trim_prompt_cache", more)
    model = directory(folder / "llama", {**LLAMA, "num_hidden_layers": 2})
    turn = "[[request]]\ntokens = [1, 2, 3, 4, 5]\n[[request.turn]]\ntokens = [6, 7]\nrewind = 2\n"
    (folder / "talk.toml").write_text(f'model = "{model}"\nmax_tokens = 3\n{turn}')
    return Asked(
        "", "turns=fresh", "turns=kept", more={"controls": ("repeat",)}, files=(folder / "talk.toml",)
    )


def penalties_over_a_turn(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
    # generate_step's own way, and no fault.
    both = f"tokens=1,2,3,4,5 turn_tokens=7,8 max_tokens=4 {'repetition_penalty=2' if ill else ''}"
    return Asked(both, "turns=kept", "turns=fresh", directory(folder / "llama", LLAMA))


def samplers_shifted(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
    from mlx_lm.generate import BatchGenerator

    sound = BatchGenerator.insert

    def insert(self: Any, *args: Any, **keys: Any) -> Any:
        keys["samplers"] = [*keys["samplers"][1:], keys["samplers"][0]]
        return sound(self, *args, **keys)

    if ill:
        patch.setattr(BatchGenerator, "insert", insert)
    requests = "".join(f"[[request]]\ntokens = [{n}, 2, 3]\nseed = {n}\n" for n in (4, 5))
    text = f'model = "{directory(folder / "llama", LLAMA)}"\nmax_tokens = 4\ntemperature = 1\ntop_k = 20\nmin_p = 0.001\n'
    (folder / "drawn.toml").write_text(text + requests)
    return Asked("", files=(folder / "drawn.toml",))


def stops_that_a_batch_forgets(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
    from mlx_lm.generate import BatchGenerator, StopSequences

    sound = BatchGenerator.insert

    def insert(self: Any, *args: Any, **keys: Any) -> Any:
        keys["stop_sequences"] = [StopSequences(None) for _ in keys["stop_sequences"]]
        return sound(self, *args, **keys)

    if ill:
        patch.setattr(BatchGenerator, "insert", insert)
    asked = 'model = "builtin"\nmax_tokens = 6\nstop = [" the"]\n[[request]]\nprompt = "In the beginning"\n'
    (folder / "stops.toml").write_text(asked)
    return Asked("", files=(folder / "stops.toml",))


def off_in_batches(flags: str) -> Ask:
    """One operation of a small model is wrong where several requests are computed together."""

    def ask(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
        sound = nn.Linear.__call__

        def off(self: nn.Linear, x: mx.array) -> mx.array:
            return sound(self, x) + 0.01 * (
                x.shape[0] > 1 and self.weight.shape[0] == LLAMA["intermediate_size"]
            )

        if ill:
            patch.setattr(nn.Linear, "__call__", off)
        model = directory(folder / "llama", LLAMA)
        return Asked(f"{TOKENS} {flags}", model=model, more={"controls": ("repeat", "oracle")})

    return ask


def two_poolings(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
    b = f"pooling={'last' if ill else 'mean'}"
    return Asked("tokens=1,2,3,4 task=embed", "pooling=mean", b, directory(folder / "llama", LLAMA))


def a_ring_of_a_size(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
    b = f"max_kv_size={8 if ill else 64}"
    controls = {"controls": ("repeat", "cache_size")}
    return Asked(ELEVEN, "schedule=serial", b, directory(folder / "qwen3", QWEN3), controls)


def a_ring_and_prompts_cut_otherwise(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
    # A sound model: which of the positions a row still finds depends on who else is in its forward.
    b = f"prefill_chunk={64 if ill else 3}"
    return Asked(f"{ELEVEN} max_kv_size=8", "prefill_chunk=3", b, directory(folder / "qwen3", QWEN3))


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if thinking %}<think>{% endif %}"
)


def chats(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
    model = shutil.copytree(locate("builtin"), folder / "chatty")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    for name, thinking in (("a", "true"), ("b", "false" if ill else "true")):
        (folder / f"{name}.toml").write_text(
            f'model = "{model}"\nmax_tokens = 2\n[[request]]\nmessages = [{{role = "system", content = "In the"}}, '
            f'{{role = "user", content = "My son"}}]\nchat_template_args = {{thinking = {thinking}}}\n'
            '[[request]]\nprompt = "My son"\n'
        )
    return Asked("", "", "", files=(folder / "a.toml", folder / "b.toml"))


def a_patch_by_its_name(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
    from mlx_lm.models import llama

    # What the module changes is put back with everything else.
    patch.setattr(llama.MLP, "__call__", llama.MLP.__call__)
    factor = "1 + 0.1 * (x.shape[0] > 1)" if ill else "1"
    text = "from mlx_lm.models.llama import MLP\nsound = MLP.__call__\n"
    module(folder, patch, "my_patch", f"{text}MLP.__call__ = lambda self, x: sound(self, x) * ({factor})\n")
    return Asked(f"{TOKENS} max_tokens=2", model=directory(folder / "llama", LLAMA))


def a_draft_trimmed_too_far(folder: Path, patch: pytest.MonkeyPatch, ill: bool) -> Asked:
    from detdiff.engines.mlx.caches import RequestCaches

    sound = RequestCaches.trim

    def one_too_many(self: RequestCaches, request: int, count: int) -> int:
        done = sound(self, request, count)
        for cache in self.of(request) if self._name == "draft" and count else ():
            cache.trim(1)
        return done

    if ill:
        patch.setattr(RequestCaches, "trim", one_too_many)
    model, draft = (
        directory(folder / "llama", LLAMA),
        directory(folder / "draft", {**LLAMA, "rope_theta": 5e5}),
    )
    return Asked("tokens=1,2,3,4,5 max_tokens=6 layout=packed", "", f"draft={draft} drafts=3", model)


def another_prompt(found: Answer) -> bool:
    """The chat alone is not compared, for what its template made of it, and the other request is equal."""
    (left_out,) = found["not_compared"]
    (compared,) = found["requests"]
    told = left_out["id"] == "r0" and left_out["reason"].startswith("the prompts differ: ")
    return told and compared["identical"] and found["inconclusive"]


def one_entry_short(found: Answer) -> bool:
    """The offset stands first, the entry that is gone after it, and no entry is said to have changed."""
    offset, missing, *more = found["bookkeeping"]
    at = "in the draft model, the cache of layer 0 is at offset 5, the row at 6"
    return (
        (offset["what"], missing["what"], more) == ("offset", "cache_missing", [])
        and offset["detail"].startswith(at)
        and found["requests"][0]["differing"] == 0
    )


def explained(name: str, ask: Ask, right: Right, sound: Right = IDENTICAL) -> Kind:
    return Kind(name, ask, right, sound, "explain")


OFF = verdict(
    "bug", "outside", "layers.0.mlp.gate_proj (linear, columns 0 to 47), position 0 of r0", "in run b"
)
KINDS = (
    explained("B14 a turn trimmed too far", a_turn_trimmed_too_far,
              verdict("bug", "bookkeeping", "the cache of layer 1 is at offset 5, the row at 6", "request r0/2")),
    explained("B15 samplers shifted", samplers_shifted,
              verdict("bug", "choices", "In run b token 0 of r0", "the sampler of the request after it")),
    explained("B15 penalties over a turn", penalties_over_a_turn,
              verdict("configuration", "uncached-history", "of r0/2 in run a", "none that came from a cache")),
    explained("B16 scores", off_in_batches("task=score"), OFF),
    explained("B16 embeddings", off_in_batches("task=embed pooling=last"), OFF),
    explained("B16 two poolings", two_poolings, verdict("configuration", "settings", "pooling mean and last")),
    explained("B16 max_kv_size", a_ring_of_a_size,
              verdict("configuration", "cache-size", "all positions in a and 8 positions in b")),
    explained("B16 max_kv_size and prompts cut otherwise", a_ring_and_prompts_cut_otherwise,
              verdict("configuration", "cache-size", "keep 8 positions", "prefill_chunk 3 and 64")),
    explained("B16 stops that a batch forgets", stops_that_a_batch_forgets,
              verdict("bug", "sampling", "r0 ends after 2 tokens in run a and goes on in run b")),
    Kind("B16 chats with template arguments", chats, another_prompt),
    Kind("D23 a draft trimmed too far", a_draft_trimmed_too_far, one_entry_short),
)  # fmt: skip


@pytest.mark.parametrize("kind", some_now(KINDS, 0, 1), ids=lambda kind: kind.name)
def test_a_kind_can_be_asked_is_answered_alike_and_its_twin_is_sound(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind.check(tmp_path, monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize("ill", [True, False])
def test_a_patch_is_imported_by_its_name_and_the_trace_names_it(
    ill: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B17: --import, and the same in Python."""
    monkeypatch.setattr("detdiff.engines.base.IMPORTED", IMPORTED)
    try:
        with monkeypatch.context() as patch:
            asked = a_patch_by_its_name(tmp_path, patch, ill)
            words = ("--model", asked.model, "--both", asked.both, "--a", asked.a, "--b", asked.b)
            found = run("compare", *words, "--import", "my_patch", "--keep", tmp_path / "kept", "--json")
            assert found.exit_code == int(ill), found.output
        IMPORTED.clear()
        (tmp_path / "again").mkdir()
        with monkeypatch.context() as patch:
            again = a_patch_by_its_name(tmp_path / "again", patch, ill)
            import_before_runs("my_patch")
            answer = again.python("compare", tmp_path / "again")
        written: Answer = json.loads(found.stdout)
        for key in ("identical", "stage", "requests"):
            assert written[key] == json.loads(json.dumps(answer[key]))
        assert same(written) is not ill
        if ill:
            origin = written["requests"][0]["origin"]
            assert (origin["site"], origin["how"]) == ("layers.0.mlp", "composite")
        traces = [detdiff.Trace.open(path / "a") for path in (tmp_path / "kept", tmp_path / "again")]
        hashes = [trace.header["environment"]["imports"] for trace in traces]
        assert hashes[0] == hashes[1] and list(hashes[0]) == ["my_patch"]
    finally:
        IMPORTED.clear()


def test_an_option_of_a_run_is_a_flag_as_well() -> None:
    asked = Scenario.from_flags("m", (), "tokens=1,2;3 turn_tokens=4 cancel=2")
    assert [request.cancel for request in asked.requests] == [2, 2, 2, 2]
    table = {"model": "m", "request": [{"tokens": [1], "cancel": 2, "turn": [{"tokens": [4]}]}]}
    assert [request.cancel for request in Scenario.from_dict(table).requests] == [2, None]
