"""What a control found, before it is known what it took."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """A control's result, its sentence and its figures."""

    result: str
    said: str
    detail: Mapping[str, Any] = field(default_factory=dict)
