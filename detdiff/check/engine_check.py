"""An engine of the user's own under the same assertion as a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from detdiff.errors import CheckSettingInvalid, DetdiffError, EngineFailed

from .asked import Asked
from .compositions import LAYOUTS_BY_DEFAULT, Composition
from .engine import Engine, EngineCheck, EngineRequest, as_engine, name_of
from .failure import Failure
from .prompts import requests
from .tally import Tally


def check_engine(
    engine: Engine, asked: Asked, wanted: Sequence[Composition]
) -> tuple[list[Failure], Tally, str]:
    """The compositions that are not let through, what was compared, and the engine's name.

    An engine lays its rows out as it does, so ``wanted`` counts once whatever its layouts. Raises CheckSettingInvalid for
    what an engine cannot be told, and NothingToCheck.
    """
    name = name_of(engine)
    _refuse(name, asked)
    tally, failures = Tally(), []
    check = EngineCheck(engine, _requests(engine, asked, wanted), asked.level)
    for composition in wanted:
        started = time.perf_counter()
        why: Sequence[str] = ()
        checked = True
        try:
            (found,) = check.findings([composition], asked.seeds)
            tally.rows += found.compared.rows
            tally.tokens += found.compared.tokens
            tally.sites[name] = max(found.compared.sites, tally.sites.get(name, 0))
            why = () if found.identical else found.said()
        except DetdiffError as error:
            why, checked = (str(error),), False
        if checked:
            tally.compositions += 1
            tally.failed += bool(why)
        else:
            tally.unchecked += 1
        tally.seconds += time.perf_counter() - started
        if why:
            failures.append(
                Failure(
                    composition.name, "each request alone", composition.written, tuple(why), checked=checked
                )
            )
    return failures, tally, name


def engine_of(model: Any) -> Engine | None:
    """``model`` as an engine where it is one; a model's name, and what ``mlx_lm.load`` gives, never are."""
    from pathlib import Path

    return None if isinstance(model, str | Path | tuple | list) else as_engine(model)


def _refuse(name: str, asked: Asked) -> None:
    given = [
        key
        for key, differs in (
            ("layouts", tuple(asked.layouts) != LAYOUTS_BY_DEFAULT),
            ("kernels", asked.kernels != "native"),
            *((key, True) for key in asked.settings),
        )
        if differs
    ]
    if given:
        raise CheckSettingInvalid(
            f"{given[0]} cannot be told to the engine {name}, which is asked for requests under a schedule alone. Leave it out, "
            "or set it in the engine."
        )


def _requests(engine: Engine, asked: Asked, wanted: Sequence[Composition]) -> list[EngineRequest]:
    encode: Callable[[str], Sequence[int]] | None = getattr(engine, "encode", None)
    tables = requests(
        asked.prompts, encode, getattr(engine, "vocab_size", None), max(each.least for each in wanted)
    )
    found = []
    for table in tables:
        if "prompt" in table and encode is None:
            raise CheckSettingInvalid(
                f"Prompt {table['prompt'][:40]!r} is text, and the engine {name_of(engine)} has no encode(text) that gives token "
                "ids. Give prompts as lists of token ids, or the engine that method."
            )
        try:
            tokens = table["tokens"] if encode is None or "tokens" in table else encode(table["prompt"])
            ids = tuple(int(token) for token in tokens)
        except Exception as error:
            raise EngineFailed(
                f"encode of the engine {name_of(engine)} raised {type(error).__name__} ({error}) for the prompt "
                f"{table['prompt'][:40]!r}; expected its token ids. Correct the engine, or give prompts as lists of token ids."
            ) from error
        found.append(EngineRequest(table["id"], ids, asked.max_tokens))
    return found
