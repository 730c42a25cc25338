"""What is checked, as opened engines of a session, and what was recorded of them."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from detdiff.compare import Divergence, compare
from detdiff.engines.base import RESET, Engine, RunOptions
from detdiff.engines.record import record
from detdiff.engines.registry import DEFAULT, SERVER, as_engine, open_engine, open_named
from detdiff.errors import CheckSubjectInvalid
from detdiff.scenario import Scenario, is_address
from detdiff.trace import Trace

# Nobody needs these runs after a power cut, and what fails is copied.
_OPTIONS = RunOptions(observe=1, durable=False)


@dataclass(frozen=True, eq=False)
class CheckedEngine:
    """An engine that is ready to run.

    ``name`` stands for its model in scenarios. ``again`` says that the name alone loads it, so that a kept scenario can be
    run from the command line. ``key`` tells it from every other one of this session.
    """

    engine: Engine
    name: str
    again: bool
    key: object = field(repr=False)

    @property
    def label(self) -> str:
        """What it is called in what is said, without the folder that it lies in."""
        return str(self.engine.identity.get("name") or self.name)

    @property
    def laid_out(self) -> bool:
        """Whether layouts, kernels and further scenario keys can be told to it: it is detdiff's own engine of MLX."""
        return self.engine.name == DEFAULT


class CheckedEngines:
    """The engines of a session: models with a name are loaded once, what is an object belongs to who made it."""

    def __init__(self) -> None:
        self._named: dict[str, CheckedEngine] = {}
        self._objects: dict[int, tuple[Callable[[], Any], object]] = {}

    def of(self, model: Any) -> CheckedEngine:
        """The engine of a path, hub id, server's address or ``builtin``, a LoadedModel, the pair that ``mlx_lm.load`` gives, or
        an engine.

        Raises CheckSubjectInvalid for anything else, and what loading raises.
        """
        if isinstance(model, str | Path):
            return self._by_name(str(model))
        engine = as_engine(model) if is_engine(model) else None
        if engine is not None:
            name = str(engine.identity.get("name") or engine.name)
            return CheckedEngine(engine, name, False, self._known(model))
        from detdiff.engines.mlx.engine import engine_of_objects

        made = engine_of_objects(model)
        if not isinstance(made, str):
            name = str(made.identity.get("name") or made.loaded.path.name or "model")
            return CheckedEngine(made, name, False, self._known(made.loaded.model))
        raise CheckSubjectInvalid(
            f"{made[0].upper()}{made[1:]} cannot be checked; expected a model's path or hub id, 'builtin', what `mlx_lm.load` "
            "gives (model and tokenizer), a LoadedModel, an object or function that generates, or an engine. Give one of them."
        )

    def _by_name(self, name: str) -> CheckedEngine:
        path = Path(name).expanduser()
        if is_address(name):
            if name not in self._named:
                self._named[name] = CheckedEngine(open_named(SERVER, name, {}), name, True, object())
            return self._named[name]
        # A path of its own in every scenario: one that is kept is run from another folder.
        place = str(path.resolve()) if path.is_dir() and not name.startswith("builtin") else name
        if place not in self._named:
            self._named[place] = CheckedEngine(open_named(DEFAULT, place, {}), place, True, object())
        return self._named[place]

    def _known(self, given: Any) -> object:
        """An object's key, which goes when the object does."""
        found = self._objects.get(id(given))
        if found is None or found[0]() is not given:
            try:
                held: Callable[[], Any] = weakref.ref(given, _forget(self._objects, id(given)))
            except (
                TypeError
            ):  # a bound method, or what has slots: it is held, so that no other takes its place
                held = _holding(given)
            found = (held, object())
            self._objects[id(given)] = found
        return found[1]


def is_engine(model: Any) -> bool:
    """Whether it is an engine, and no model of MLX: neither a name, nor what mlx-lm or detdiff loads."""
    if isinstance(model, str | Path | tuple | list) or type(model).__name__ == "LoadedModel":
        return False
    kinds = {f"{each.__module__}.{each.__name__}" for each in type(model).__mro__}
    if "mlx.nn.layers.base.Module" in kinds or isinstance(model, type):
        return False
    return callable(getattr(model, "generate", None)) or callable(model) or as_engine(model) is not None


def _holding(given: Any) -> Callable[[], Any]:
    return lambda: given


def _forget(objects: dict[int, Any], id_: int) -> Callable[[Any], None]:
    def gone(ref: Any) -> None:
        if id_ in objects and objects[id_][0] is ref:
            del objects[id_]

    return gone


@dataclass(frozen=True, eq=False)
class SerialRun:
    """The serial run of a workload. ``fresh`` says that it was recorded for the check that asked for it."""

    trace: Trace
    fresh: bool


class RecordedRuns:
    """All runs of a session, in one directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._bases: dict[tuple[Any, str], Trace] = {}

    def base(self, checked: CheckedEngine, scenario: Scenario, *, again: bool = False) -> SerialRun:
        """The run of ``scenario``, from an earlier check where there is one, unless it is to be recorded ``again``."""
        key = (checked.key, scenario.to_toml())
        known = self._bases.get(key)
        if known is not None and not again:
            return SerialRun(known, False)
        self._bases[key] = self.run(checked, scenario)
        return SerialRun(self._bases[key], True)

    def run(self, checked: CheckedEngine, scenario: Scenario, *, warm: bool = False) -> Trace:
        """Record ``scenario`` on an engine that was reset, where it can be, unless it is to be ``warm``. Raises what recording
        raises."""
        self._count += 1
        if not warm and RESET in checked.engine.capabilities and not checked.laid_out:
            checked.engine.reset()
        return record(scenario, self._folder / str(self._count), engine=checked.engine, options=_OPTIONS)


def against_alone(scenario: Scenario, engine: Any = None) -> Divergence:
    """Record a scenario and its requests one after the other (a), and compare; nothing is kept.

    For compositions that `detdiff.strategies` draws. ``engine`` is the scenario's engine where it is opened already, or a
    model of MLX that is loaded. Raises what recording raises.
    """
    options = RunOptions(observe=0, durable=False)
    opened = open_engine(scenario) if engine is None else CheckedEngines().of(engine).engine
    with tempfile.TemporaryDirectory(prefix="detdiff-alone-") as folder:
        alone = record(
            scenario.with_changes(schedule="serial", arrivals=None),
            Path(folder, "a"),
            engine=opened,
            options=options,
        )
        return compare(alone, record(scenario, Path(folder, "b"), engine=opened, options=options))
