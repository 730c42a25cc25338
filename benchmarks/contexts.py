"""What recording costs at short and long contexts: a decode step with so many positions in the cache, untapped and recorded.

The caches hold random entries, which the recorder is told of as one prefill, so that nothing has to be run to get there; each
side decodes on a copy of its own. Processor time is that of all threads and does not care what else the machine does.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.normalization import RMSNorm
from mlx.nn.layers.quantized import quantize
from mlx_lm.generate import generate_step
from mlx_lm.models import llama
from mlx_lm.models.base import create_attention_mask, scaled_dot_product_attention
from mlx_lm.models.cache import make_prompt_cache
from tabulate import tabulate

from detdiff.engines.mlx.taps.forward import Forward, Segment
from detdiff.engines.mlx.taps.recorder import Recorder, RecordingSettings
from detdiff.engines.mlx.taps.session import Session
from detdiff.engines.mlx.taps.unread import CacheUpdate
from detdiff.scenario import Capture
from detdiff.trace import TraceWriter

from .decoding import SKIPPED
from .paired import alternate, ratio, spread

ROUNDS = 5
STEPS = 12
CONTEXTS = (20, 2000, 8000)
SIDES = ("untapped", "recorded")
LAYERS, HEADS, WIDTH = 30, 3, 64  # of SmolLM2-135M's caches
LIMITS = {"SmolLM2-135M": 1.10, "cache alone": 1.15}


class _CacheLayer(Module):
    """Reads and writes a cache and computes next to nothing else."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.norm = RMSNorm(HEADS * WIDTH)

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        rows = self.norm(x).reshape(1, x.shape[1], HEADS, WIDTH).transpose(0, 2, 1, 3)
        keys, values = cache.update_and_fetch(rows, rows)
        y = scaled_dot_product_attention(rows, keys, values, cache=cache, scale=WIDTH**-0.5, mask=mask)
        out: mx.array = y.transpose(0, 2, 1, 3).reshape(x.shape)
        return out


class _CacheModel(Module):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.embed_tokens = Embedding(64, HEADS * WIDTH)
        self.layers = [_CacheLayer() for _ in range(LAYERS)]

    def __call__(self, inputs: mx.array, cache: Any = None) -> mx.array:
        h = self.embed_tokens(inputs)
        mask = create_attention_mask(h, cache[0])
        for layer, entry in zip(self.layers, cache, strict=True):
            h = layer(h, mask, entry)
        logits: mx.array = self.embed_tokens.as_linear(h)
        return logits


def _smollm2() -> Module:
    """SmolLM2-135M's shapes with random weights in 4-bit blocks whose scales are float32."""
    model: Module = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=576,
            num_hidden_layers=LAYERS,
            intermediate_size=1536,
            num_attention_heads=9,
            num_key_value_heads=HEADS,
            rms_norm_eps=1e-5,
            vocab_size=49152,
            max_position_embeddings=16384,
            tie_word_embeddings=True,
        )
    )
    quantize(model, group_size=32, bits=4)
    return model


MODELS = {"SmolLM2-135M": _smollm2, "cache alone": _CacheModel}


class _Step(NamedTuple):
    wall: float
    processor: float


class FilledCaches:
    """One model with a recorded and an untapped copy of the same caches, or with one of them."""

    def __init__(self, model: Module, positions: int, folder: Path, sides: tuple[str, ...] = SIDES) -> None:
        mx.eval(model.parameters())
        self._model, self._session = model, Session(model)
        self._caches = {side: make_prompt_cache(model) for side in sides}
        self._positions, self._folder = positions, folder
        self._done = dict.fromkeys(self._caches, positions)
        self._forwards = 0
        sites = self._session.sites
        request = {"id": "a", "tokens": [1] * positions, "max_tokens": ROUNDS * STEPS}
        self._writer = TraceWriter(
            folder, {"sites": [site.to_json() for site in sites.sites], "requests": [request]}
        )
        settings = RecordingSettings(Capture(), ["a"], [positions], str)
        self._recorder = Recorder(self._writer, sites, settings)
        if "recorded" in sides:
            self._fill(positions)
        else:
            for cache in self._caches["untapped"]:
                cache.update_and_fetch(*(mx.random.normal((1, HEADS, positions, WIDTH)) for _ in range(2)))
                mx.eval(cache.state)

    def _fill(self, positions: int) -> None:
        forward = self._forward(mx.zeros((1, positions), mx.int32), "recorded", "prefill")
        self._recorder.begin(forward, self._caches["recorded"])
        for layer, key in enumerate(self._session.sites.cache_layers):
            rows = [mx.random.normal((1, HEADS, positions, WIDTH)) for _ in range(2)]
            mx.eval(rows)
            for side, caches in self._caches.items():
                found = caches[layer].update_and_fetch(*rows)
                if side == "recorded":
                    call = [CacheUpdate(caches[layer], found)]
                    self._recorder.cache_call(key.removesuffix(".write"), rows[0], rows[1], call)
            mx.eval([caches[layer].state for caches in self._caches.values()])
        self._recorder.end(forward, mx.zeros((1, positions, 1)))
        self._recorder.finish()

    def _forward(self, inputs: mx.array, side: str, phase: str = "decode") -> Forward:
        count = inputs.shape[1]
        start = 0 if phase == "prefill" else self._done[side]
        if phase != "prefill":
            self._done[side] += count
        if side == "recorded":
            self._forwards += 1
        segments = (Segment(0, 0, start, count, phase),)
        return Forward(self._forwards - 1, "padded", (1, count), segments, inputs, None, phase != "prefill")

    def side(self, name: str) -> _Step:
        """Median seconds of a decode step, and its processor time."""
        recorder = self._recorder if name == "recorded" else None
        times: list[tuple[float, float]] = []
        with self._session.running(recorder):
            self._session.compose = lambda inputs, cache: self._forward(inputs, name)
            index = self._done[name] - self._positions + 1
            steps = generate_step(
                mx.array([1]), self._model, max_tokens=STEPS, prompt_cache=self._caches[name]
            )
            with contextlib.closing(steps):
                for number, (token, _) in enumerate(steps):
                    times.append((perf_counter(), process_time()))
                    if recorder is not None:
                        recorder.token(0, index + number, int(token))
        wall, processor = (
            [after[i] - before[i] for before, after in pairwise(times[SKIPPED:])] for i in range(2)
        )
        return _Step(median(wall), sum(processor) / len(processor))

    def bytes_a_row(self) -> int:
        """Of the trace that was written."""
        self._recorder.finish()
        self._writer.finish()
        return sum(file.stat().st_size for file in self._folder.iterdir()) // self._forwards


def _case(name: str, positions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        contexts = FilledCaches(MODELS[name](), positions, Path(folder) / "trace")
        sides = {side: partial(contexts.side, side) for side in SIDES}
        alternate(sides, 1)
        found = alternate(sides, ROUNDS)
    wall, processor = ({side: [step[i] for step in steps] for side, steps in found.items()} for i in range(2))
    return {
        "model": name,
        "positions": positions,
        **{f"{side} ms": round(1e3 * median(times), 1) for side, times in wall.items()},
        "recorded / untapped": round(ratio(wall["recorded"], wall["untapped"]), 3),
        "its rounds": spread(wall["recorded"], wall["untapped"]),
        **{f"{side} processor ms": round(1e3 * median(times), 1) for side, times in processor.items()},
        "processor ratio": round(ratio(processor["recorded"], processor["untapped"]), 3),
        "at most": LIMITS[name],
    }


def run() -> list[dict[str, Any]]:
    """One row per model and context: medians per decode step, and medians of the rounds' ratios."""
    return [_case(name, positions) for name in MODELS for positions in CONTEXTS]


if __name__ == "__main__":
    chosen = [(name, int(number)) for name in sys.argv[1:2] for number in sys.argv[2:]]
    print(tabulate([_case(*one) for one in chosen], headers="keys", tablefmt="github"))
