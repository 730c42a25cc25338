"""An engine of two places for sweeps, quick to start: what its settings say goes wrong with it in a worker."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from detdiff.engines.function import EngineRequest, Generation, Tap


class TwoPlaces:
    """Its second place is one unit in the last place off where ``off`` says so and requests share a batch."""

    name = "two places"

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings

    def generate(self, requests: Sequence[EngineRequest], schedule: Any) -> list[Generation]:
        settings = self._settings
        if "sleeps" in settings:
            # The file says that it does, and what it would have removed.
            left = tempfile.mkdtemp()
            Path(settings["sleeps"]).write_text(left)
            time.sleep(600)
        if "killed_once" in settings and len(requests) > 1:
            # An empty file is left by the worker that is killed first.
            marker = Path(settings["killed_once"])
            if not marker.exists():
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if "where" in settings:
            there = [place for place in sys.path if (Path(place) / "detdiff" / "__init__.py").exists()]
            Path(settings["where"]).write_text("\n".join([__file__, *there]))
        if settings.get("killed") and len(requests) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if settings.get("exits") and len(requests) > 1:
            # As of a file whose name is no UTF-8.
            sys.exit("weights.\udcff")
        if settings.get("megabytes"):
            assert len(bytearray(settings["megabytes"] << 20))
        return [self._answer(request, len(requests)) for request in requests]

    def _answer(self, request: EngineRequest, m: int) -> Generation:
        x = np.array(request.tokens, np.float32)
        first = x * np.float32(1.1)
        off = m > 1 and self._settings.get("off", False)
        second = np.nextafter(first + 1, np.float32(9)) if off else first + 1
        taps = {"scale": Tap(first, x, m=[m] * len(x)), "shift": Tap(second, first, m=[m] * len(x))}
        flips = off and self._settings["off"] == "flips"
        return Generation([int(second.sum()) + flips], [-0.5], taps)


def engine(model: str | None, settings: Mapping[str, Any]) -> TwoPlaces:
    """The factory that grids name."""
    if model == "missing":
        raise FileNotFoundError("there is no such model")
    return TwoPlaces(settings)
