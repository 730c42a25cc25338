"""How a check ends in a test: as a failure whose text is the report, without a traceback through detdiff."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.outcomes import Failed
else:
    Failed = pytest.fail.Exception

# As pytest's own: a summary of one line has no room for a module's name.
_MODULE = "builtins"


class _WithNotes(Failed):
    """What hypothesis notes of the example that failed belongs to the text."""

    __module__ = _MODULE

    def __init__(self, text: str) -> None:
        super().__init__(text, pytrace=False)

    def __str__(self) -> str:
        return "\n".join([self.msg or "", *getattr(self, "__notes__", ())])


class NotInvariant(_WithNotes, AssertionError):
    """A composition is not let through at its level. An AssertionError for whoever catches it, a plain text for pytest."""

    __module__ = _MODULE


class NotChecked(_WithNotes):
    """Nothing was checked, or not all of what was asked for, which is never a pass: not where a failure is expected, either."""

    __module__ = _MODULE
