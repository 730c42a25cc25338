"""What the tests of the engine and the instruments share: small scenarios, recorded runs, rows by port."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import mamba2
from numpy.typing import NDArray
from tiny import CONFIGS, PACKABLE, VOCAB, TinyTokenizer, tiny

from detdiff.engines.mlx.engine import RecordOptions, record
from detdiff.engines.mlx.model import LoadedModel
from detdiff.engines.mlx.taps.forward import Forward, memory
from detdiff.scenario import Scenario
from detdiff.trace import Trace

LENGTHS = (12, 3, 21)
ARCHITECTURES = (*CONFIGS, "mamba2")
Ports = dict[tuple[int, int, str, str], int]

QUIET = RecordOptions(observe=0)

_MAMBA2 = {
    "model_type": "mamba2",
    "num_heads": 4,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "state_size": 16,
    "num_hidden_layers": 2,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "tie_word_embeddings": True,
    "time_step_limit": (0.001, 100.0),
    "time_step_rank": 4,
}


@cache
def model(arch: str, fmt: str = "f32") -> LoadedModel:
    """A tiny model of the matrix, built once; tests must leave it as they found it."""
    if arch != "mamba2":
        return tiny(arch, fmt)
    mx.random.seed(0)
    built = mamba2.Model(mamba2.ModelArgs.from_dict(_MAMBA2))
    if fmt == "bf16":
        built.set_dtype(mx.bfloat16)
    elif fmt == "q4":
        nn.quantize(built, group_size=32, bits=4, class_predicate=_quantisable)
    return loaded(built, f"mamba2-{fmt}", _MAMBA2)


def _quantisable(path: str, module: nn.Module) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def loaded(built: nn.Module, name: str, config: Mapping[str, Any] | None = None) -> LoadedModel:
    """Any model in mlx-lm's form, as the engine takes it."""
    mx.eval(built.parameters())
    built.eval()
    identity = {"name": f"tiny-{name}", "model_type": name, "vocab_size": VOCAB, "weights": name}
    return LoadedModel(built, TinyTokenizer(), Path("tiny"), identity, config or {})


def prompts(lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(length)] for length in lengths]


def scenario(
    schedule: str = "serial",
    layout: str = "padded",
    *,
    arrivals: Sequence[int] = (),
    lengths: Sequence[int] = LENGTHS,
    **keys: Any,
) -> Scenario:
    """Requests r0, r1, … with random prompts of these lengths; other keys are those of a scenario file."""
    requests = [{"id": f"r{i}", "tokens": tokens} for i, tokens in enumerate(prompts(lengths))]
    for request, arrival in zip(requests, arrivals, strict=False):
        request["arrival"] = arrival
    given = {"model": "tiny", "schedule": schedule, "layout": layout, "max_tokens": 8, "request": requests}
    return Scenario.from_dict({**given, **keys})


class Runs:
    """Records traces below one directory; ``once`` records each run of a sound model once, ``base`` each serial padded one."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0
        self._bases: dict[tuple[Any, ...], Trace] = {}
        self._once: dict[str, Trace] = {}

    def record(
        self,
        of: LoadedModel,
        asked: Scenario,
        options: RecordOptions = QUIET,
        draft: LoadedModel | None = None,
    ) -> Trace:
        self._count += 1
        path = self._directory / str(self._count)
        return record(asked, path, loaded=of, draft=draft, options=options)

    def once(self, of: LoadedModel, asked: Scenario) -> Trace:
        """The trace of a run that other tests may have asked for already; never while something is patched."""
        key = json.dumps([of.identity, asked.to_dict()], sort_keys=True, default=str)
        if key not in self._once:
            self._once[key] = self.record(of, asked)
        return self._once[key]

    def base(self, arch: str, fmt: str, **keys: Any) -> Trace:
        key = (arch, fmt, *sorted((name, str(value)) for name, value in keys.items()))
        if key not in self._bases:
            self._bases[key] = self.record(model(arch, fmt), scenario(**keys))
        return self._bases[key]


def digests(trace: Trace) -> Ports:
    """Every digest of a trace by (request, position, site, port); the last write of a position counts."""
    names = [(trace.sites[p.site].name, p.name) for p in trace.ports]
    found: Ports = {}
    for shard in trace.shards:
        for number, table in shard.tables.items():
            stored = shard.digests(number)
            rows = shard.table_rows(number)
            requests, positions = shard.rows.request[rows], shard.rows.position[rows]
            for port, column in enumerate(table.tolist()):
                if column >= 0:
                    for r, p, digest in zip(
                        requests.tolist(), positions.tolist(), stored[:, column].tolist(), strict=True
                    ):
                        found[(r, p, *names[port])] = digest
    return found


def values(trace: Trace, site: str, port: str) -> dict[tuple[int, int], NDArray[Any]]:
    """The captured values of one port in storage form by (request, position)."""
    index = trace.port_index(site, port)
    found: dict[tuple[int, int], NDArray[Any]] = {}
    for shard in trace.shards:
        for number, table in shard.tables.items():
            kept = shard.values(number, int(table[index])) if table[index] >= 0 else None
            if kept is not None:
                keys = zip(
                    shard.rows.request[kept.rows].tolist(),
                    shard.rows.position[kept.rows].tolist(),
                    strict=True,
                )
                found.update(zip(keys, kept.data, strict=True))
    return found


def events(trace: Trace) -> list[dict[str, Any]]:
    """All events of a trace, each with its forward."""
    return [{**event, "in": line["forward"]} for line in trace.forwards() for event in line["events"]]


def content(trace: Trace) -> tuple[Any, ...]:
    """What a trace says, however it is stored: digests, events, forwards without their plans, tokens."""
    generated = trace.generated()
    lines = [
        {key: value for key, value in line.items() if key not in ("plan", "calls")}
        for line in trace.forwards()
    ]
    arrays = [generated.token, generated.forward, generated.position, generated.top_ids, generated.top_logits]
    return digests(trace), events(trace), lines, [array.tolist() for array in arrays]


def bits(array: mx.array) -> NDArray[Any]:
    """The bits of an array as unsigned integers, copied."""
    return memory(array).numpy().copy()


class Logits:
    """Collects the bits of the logits of every forward that an engine uses."""

    def __init__(self) -> None:
        self.seen: list[NDArray[Any]] = []

    def __call__(self, forward: Forward, logits: mx.array) -> None:
        # generate_step computes the last column only; asking for more here would change nothing but cost.
        self.seen.append(bits(logits[:, -1:] if forward.layout == "padded" else logits))


def same(a: Iterable[NDArray[Any]], b: Iterable[NDArray[Any]]) -> bool:
    return all(
        x.dtype == y.dtype and x.shape == y.shape and np.array_equal(x, y)
        for x, y in zip(list(a), list(b), strict=True)
    )


def patched(owner: Any, name: str, value: Callable[..., Any]) -> Callable[[], None]:
    """Set an attribute of a class or module; the answer puts back what was there."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


__all__ = ["ARCHITECTURES", "PACKABLE", "Logits", "Runs", "digests", "events", "model", "prompts", "scenario"]
