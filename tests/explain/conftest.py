"""Synthetic traces, answers and injected cases of the neighbouring folders serve these tests too."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("compare", "report", "faults"):
    sys.path.append(str(Path(__file__).resolve().parent.parent / folder))
