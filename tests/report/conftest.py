"""The synthetic traces of the compare tests serve the reports too."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "compare"))
