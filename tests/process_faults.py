"""Faults of a model over several processes, put into one process or all of them; and the small models that they are put into."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from tiny import CONFIGS

SIZES = {"llama": {"attention_bias": True}, "qwen3": {}, "qwen3_moe": {}, "qwen2": {}}


def model_directory(folder: Path, name: str, seed: int = 0, dtype: str = "float32", **more: Any) -> Path:
    """A directory with a small model of random weights."""
    path = folder / f"{name}-{seed}-{dtype}{len(more) or ''}"
    path.mkdir(parents=True, exist_ok=True)
    config = {**CONFIGS[name], **SIZES[name], "detdiff_random": {"seed": seed, "dtype": dtype}, **more}
    (path / "config.json").write_text(json.dumps(config))
    return path


def _module(model: Any, path: str) -> Any:
    return dict(model.named_modules())[f"model.{path}"]


@contextlib.contextmanager
def _class_of(module: Any, call: Any) -> Iterator[None]:
    """Another way to call a module; what it is called stays."""
    own = type(module)
    module.__class__ = type(own.__name__, (own,), {"__module__": own.__module__, "__call__": call})
    try:
        yield
    finally:
        module.__class__ = own


@contextlib.contextmanager
def _weights(module: Any, name: str, value: mx.array) -> Iterator[None]:
    own = module[name]
    module[name] = value
    mx.eval(value)
    try:
        yield
    finally:
        module[name] = own


@dataclass(frozen=True)
class StaleShard:
    """Process ``rank`` has an older state of a layer's weights, a little off."""

    path: str
    rank: int
    seed: int = 0

    @contextlib.contextmanager
    def in_process(self, model: Any, group: Any) -> Iterator[None]:
        if group.rank() != self.rank:
            yield
            return
        module = _module(model, self.path)
        weight = module["weight"]
        noise = mx.random.normal(weight.shape, key=mx.random.key(self.seed)) * 0.01
        with _weights(module, "weight", (weight * (1 + noise)).astype(weight.dtype)):
            yield


@dataclass(frozen=True)
class BiasTwice:
    """Process ``rank`` adds the bias to its part, and the sum gets it once more."""

    path: str
    rank: int

    @contextlib.contextmanager
    def in_process(self, model: Any, group: Any) -> Iterator[None]:
        if group.rank() != self.rank:
            yield
            return

        def call(self: Any, x: mx.array) -> mx.array:
            part = x @ self["weight"].T + self["bias"]
            return mx.distributed.all_sum(part, group=self.group) + self["bias"]

        with _class_of(_module(model, self.path), call):
            yield


@dataclass(frozen=True)
class NoAllReduce:
    """No process adds up what the others have."""

    path: str

    @contextlib.contextmanager
    def in_process(self, model: Any, group: Any) -> Iterator[None]:
        def call(self: Any, x: mx.array) -> mx.array:
            part = x @ self["weight"].T
            return part + self["bias"] if "bias" in self else part

        with _class_of(_module(model, self.path), call):
            yield


@dataclass(frozen=True)
class OtherToken:
    """Process ``rank`` samples the least likely token as token ``index`` of request ``request``."""

    rank: int
    request: int
    index: int

    @contextlib.contextmanager
    def in_process(self, model: Any, group: Any) -> Iterator[None]:
        with _tokens(self.rank, group, self._sampler):
            yield

    def _sampler(self, native: Any, request: int, index: int, logprobs: mx.array) -> mx.array:
        if (request, index) != (self.request, self.index):
            return native(logprobs)
        return mx.argmin(logprobs, axis=-1)


@contextlib.contextmanager
def _tokens(rank: int, group: Any, chosen: Any) -> Iterator[None]:
    """In one process, ``chosen(native, request, index, logprobs)`` chooses tokens."""
    from detdiff.engines.mlx import requests

    if group.rank() != rank:
        yield
        return
    native, made = requests.sampler, []

    def sampler(*args: Any) -> Any:
        own, number, calls = native(*args), len(made), []
        made.append(number)

        def choose(logprobs: mx.array) -> mx.array:
            calls.append(None)
            return chosen(own, number, len(calls) - 1, logprobs)

        return choose

    requests.sampler = sampler
    try:
        yield
    finally:
        requests.sampler = native


@dataclass(frozen=True)
class HeadsOfAnother:
    """Process ``rank`` has the KV heads of process ``of`` in one layer; ``directory`` is the model's."""

    layer: int
    rank: int
    of: int
    directory: str

    @contextlib.contextmanager
    def in_process(self, model: Any, group: Any) -> Iterator[None]:
        if group.rank() != self.rank:
            yield
            return
        from detdiff.engines.mlx.model import load_weights

        whole = dict(tree_flatten(load_weights(Path(self.directory))[0].parameters()))
        with contextlib.ExitStack() as stack:
            for name in ("k_proj", "v_proj"):
                path = f"layers.{self.layer}.self_attn.{name}"
                module = _module(model, path)
                for kind in ("weight", "bias"):
                    if kind in module:
                        each = mx.split(whole[f"model.{path}.{kind}"], group.size(), axis=0)[self.of]
                        stack.enter_context(_weights(module, kind, each))
            yield


@dataclass(frozen=True)
class Dies:
    """Process ``rank`` gets a signal when token ``index`` of the first request is chosen."""

    rank: int
    index: int
    signal: int = signal.SIGKILL

    @contextlib.contextmanager
    def in_process(self, model: Any, group: Any) -> Iterator[None]:
        def ended(native: Any, request: int, index: int, logprobs: mx.array) -> mx.array:
            if (request, index) == (0, self.index):
                os.kill(os.getpid(), self.signal)
            return native(logprobs)

        with _tokens(self.rank, group, ended):
            yield
