"""Engines by name: the built-in ones, those of entry points, and a user's ``package.module:factory``."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from detdiff.engines.base import IMPORTED, Engine
from detdiff.errors import (
    DetdiffError,
    EngineUnknown,
    EngineUnusable,
    ImportRefused,
    ReplayError,
    library_lacks,
    words_of,
)
from detdiff.scenario import Scenario

GROUP: Final = "detdiff.engines"
DEFAULT: Final = "mlx"
SERVER: Final = "server"
BUILT_IN: Final[Mapping[str, str]] = {
    "mlx": "detdiff.engines.mlx.engine:open_mlx",
    "transformers": "detdiff.engines.transformers.engine:open_transformers",
    "llama.cpp": "detdiff.engines.llama_cpp.engine:open_llama",
    "server": "detdiff.engines.server.engine:open_server",
    "function": "detdiff.engines.function.engine:open_function",
}
"""Found without installation metadata, so that a source tree works."""

Factory = Callable[..., Any]


def engine_of(scenario: Scenario) -> tuple[str, str | None, dict[str, Any]]:
    """A scenario's engine by name, its model and its engine settings, an adapter among them: what decides which engine is
    opened."""
    settings = dict(scenario.engine_settings)
    if scenario.adapter_path is not None:
        settings["adapter_path"] = scenario.adapter_path
    return scenario.engine, scenario.model or None, settings


def same_engine(a: Scenario, b: Scenario) -> bool:
    """Whether one opened engine serves both scenarios."""
    return engine_of(a) == engine_of(b)


def open_engine(scenario: Scenario) -> Engine:
    """The engine that a scenario names, opened with its model and settings.

    Raises EngineUnknown, EngineUnusable, and what opening a model raises.
    """
    name, model, settings = engine_of(scenario)
    return open_named(name, model, settings)


def open_named(name: str, model: str | None, settings: Mapping[str, Any]) -> Engine:
    """The engine ``name`` (registered, or ``package.module:factory``) with a model. Raises as ``open_engine`` does."""
    try:
        factory = find_factory(name)
        made = factory(*_arguments(factory, model, settings))
    except DetdiffError:
        raise
    except ImportError as error:
        if name in BUILT_IN:
            raise library_lacks(error) from error
        raise _failed(name, model, error) from error
    except Exception as error:  # a factory of the user's may fail in any way
        if name in BUILT_IN:
            raise
        raise _failed(name, model, error) from error
    found = as_engine(made, name=name, settings=settings)
    if found is None:
        raise EngineUnusable(
            f"The factory of the engine {name!r} returned a {type(made).__name__}; expected an engine, or an object or "
            "function with generate(requests, schedule). Return one of them."
        )
    return found


def _failed(name: str, model: str | None, error: Exception) -> EngineUnusable:
    return EngineUnusable(
        f"The factory of the engine {name!r} raised {type(error).__name__} ({words_of(error)}) for the model {model!r}; expected an "
        "engine. Correct the factory, or the model and settings that it is given."
    )


def as_engine(
    given: Any, *, name: str | None = None, settings: Mapping[str, Any] | None = None
) -> Engine | None:
    """``given`` as an engine: one already, an object or a function that generates, a causal language model of
    transformers; None for anything else. ``name`` and ``settings`` are those that a trace is to name."""
    if isinstance(given, Engine) and not isinstance(given, type):
        return given
    kinds = {
        kind for each in type(given).__mro__ for kind in (each.__name__, f"{each.__module__}.{each.__name__}")
    }
    if "PreTrainedModel" in kinds:
        opened: Engine = find_factory("transformers")(given, settings or {})
        return opened
    from detdiff.engines.function.engine import wrap

    return wrap(given, name=name, settings=settings or {})


def mlx_engine(loaded: Any, draft: Any = None) -> Engine:
    """The mlx engine on models that are loaded already."""
    engine: Engine = _imported("detdiff.engines.mlx.engine:MlxEngine", DEFAULT)(loaded, draft)
    return engine


def find_factory(name: str) -> Factory:
    """The factory behind an engine's name. Raises EngineUnknown."""
    if ":" in name:
        return _imported(name, name)
    own = {entry.name: entry.value for entry in metadata.entry_points(group=GROUP)}
    known = {**own, **BUILT_IN}
    if name not in known:
        raise EngineUnknown(
            f"There is no engine {name!r}; expected {', '.join(sorted(known))}, or a factory as package.module:factory. "
            "Correct the name, or install the package that has it."
        )
    return _imported(known[name], name)


def import_before_runs(name: str) -> None:
    """Import a module of the user's, such as a patch of a library, and have each trace name it with its source's sha256.

    Raises ImportRefused where it cannot be imported, or raises an exception.
    """
    try:
        with _own_folder():
            module = importlib.import_module(name)
    except DetdiffError:
        raise
    except Exception as error:  # a module of the user's may fail in any way
        raise ImportRefused(
            f"The module {name!r} cannot be imported ({type(error).__name__}: {words_of(error)}); "
            "expected one that can, by its dotted name. Correct it, or run from the folder that it is in."
        ) from error
    source = Path(module.__file__) if module.__file__ is not None else None
    whole = source is not None and hasattr(module, "__path__")
    files = sorted(source.parent.rglob("*.py")) if source and whole else [source] if source else []
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    IMPORTED[name] = total.hexdigest()


def import_again(environments: Sequence[Mapping[str, Any]]) -> None:
    """Import what runs were recorded with before they are run again, where this process has not; ``environments`` are their traces'.

    What a module changes is changed for the whole process, so that all must name the same ones. Raises ReplayError where they do not,
    and ImportRefused.
    """
    each = [environment.get("imports", {}) for environment in environments]
    names = [frozenset(found) for found in each]
    if len(set(names)) > 1:
        one = min(frozenset.union(*names) - frozenset.intersection(*names))
        raise ReplayError(
            f"One run was recorded with the module {one!r} (--import) and another without it, and a module changes all runs of a process; "
            "expected the same modules for runs that are run again. Compare the two without re-runs, or record both with it."
        )
    for name in sorted(names[0] if names else ()):
        if name not in IMPORTED:
            import_before_runs(name)


def changed_imports(environment: Mapping[str, Any]) -> list[str]:
    """The modules that a run was recorded with and that are others today, in the order of their names."""
    recorded = environment.get("imports", {})
    return sorted(name for name, hash in recorded.items() if IMPORTED.get(name, hash) != hash)


@contextmanager
def _own_folder() -> Iterator[None]:
    """Finds modules in the folder that a console script was started in, which is not on its path."""
    folder = os.getcwd()
    added = folder not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, folder)
    try:
        yield
    finally:
        if added:
            sys.path.remove(folder)


def _imported(place: str, name: str) -> Factory:
    module_name, _, attribute = place.partition(":")
    try:
        with _own_folder() if name == place else nullcontext():
            found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        if isinstance(error, ImportError) and name in BUILT_IN:
            raise  # what the engine's own library lacks is said by its name
        raise EngineUnknown(
            f"The engine {name!r} cannot be imported ({type(error).__name__}: {str(error).rstrip('.')}); expected a module and "
            "the name of a factory in it, as package.module:factory. Correct it, or run from the folder that the module is in."
        ) from error
    if not callable(found):
        raise EngineUnknown(
            f"The engine {name!r} names a {type(found).__name__}; expected a factory that can be called. Name one."
        )
    factory: Factory = found
    return factory


def _arguments(factory: Factory, model: str | None, settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """As many of model and settings as the factory takes."""
    given = (model, dict(settings))
    for count in (2, 1):
        try:
            inspect.signature(factory).bind(*given[:count])
        except (TypeError, ValueError):
            continue
        return given[:count]
    return ()
