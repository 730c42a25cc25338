"""Answers that were saved as JSON, read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from detdiff.compare.divergence import Divergence
from detdiff.errors import AnswerError
from detdiff.explain.verdict import Verdict

from .decode import Decoder
from .json import SCHEMA as DIVERGENCE
from .json import from_json
from .report_json import SCHEMA as REPORT
from .series_json import series_from_json
from .verdict_json import SCHEMA as VERDICT
from .verdict_json import verdict_from_json

if TYPE_CHECKING:
    from detdiff.compare.series import Series

_KEYS = (
    "schema",
    "kind",
    "headline",
    "advice",
    "command",
    "sections",
    "divergence",
    "verdict",
    "series",
)


@dataclass(frozen=True, eq=False)
class Saved:
    """What a saved answer holds, ready for ``build``. ``command`` is empty where it is not a report's."""

    divergence: Divergence | None
    verdict: Verdict | None = None
    series: Series | None = None
    command: str = ""


def read_saved(path: Path) -> Saved:
    """A saved comparison, verdict or report. Raises AnswerError for a file that holds none, and OSError."""
    try:
        answer = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise AnswerError(
            f"{path} is not JSON ({error}); expected what `compare`, `explain` or `report` wrote with --json. Save the answer "
            "again."
        ) from error
    try:
        return saved(answer)
    except AnswerError as error:
        raise AnswerError(f"{path}: {error}") from error


def saved(answer: object) -> Saved:
    """The same of JSON values. Raises AnswerError."""
    schema = answer.get("schema") if isinstance(answer, Mapping) else None
    if schema == DIVERGENCE:
        return Saved(from_json(answer))
    if schema == VERDICT:
        verdict = verdict_from_json(answer)
        return Saved(verdict.divergence, verdict)
    if schema == REPORT:
        return _report(answer)
    found = f"schema {schema!r}" if isinstance(answer, Mapping) else f"a {type(answer).__name__}"
    raise AnswerError(
        f"The answer is {found[:200]}; expected {DIVERGENCE!r}, {VERDICT!r} or {REPORT!r}. Save what `compare`, `explain` or "
        "`report` says with --json."
    )


def _report(answer: Any) -> Saved:
    decoder = Decoder(REPORT, "Make the report again with this version.")
    found = decoder.keys(answer, _KEYS, "report")
    verdict = None if found["verdict"] is None else verdict_from_json(found["verdict"])
    inside = None if verdict is None else verdict.divergence
    divergence = inside if found["divergence"] is None else from_json(found["divergence"])
    drawn = found["series"]
    return Saved(
        divergence,
        verdict,
        None if drawn is None else series_from_json(drawn, "report.series", REPORT),
        decoder.read(str, found["command"], "report.command"),
    )
