"""A GGUF file loaded in a process of its own first: llama.cpp ends the process that it runs in where a damaged file contradicts itself."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Final

from detdiff.errors import LlamaModelRefused

from .library import LlamaLibrary

SECONDS: Final = 900
"""How long a trial may take; a file that loads takes as long as it does again right after."""
_TRIAL: Final = """
import sys
from pathlib import Path
from detdiff.engines.llama_cpp.context import BatchRow, ContextSettings, LlamaContext, LlamaModel
from detdiff.engines.llama_cpp.library import find_library
from detdiff.errors import DetdiffError
try:
    model = LlamaModel(find_library(), Path(sys.argv[1]))
    LlamaContext(model, ContextSettings(64, 1)).decode([BatchRow(0, 0, 0, True)])
except DetdiffError as error:
    print(error)
    sys.exit(2)
"""


def try_model(library: LlamaLibrary, path: Path) -> None:
    """Load ``path`` and compute one row elsewhere, once for each state of the file.

    Raises LlamaModelRefused with what llama.cpp said, also where it ended the process.
    """
    found = path.stat()
    code, words = _tried(path.resolve(), found.st_size, found.st_mtime_ns)
    if code == 2:
        raise LlamaModelRefused(words)
    if code != 0:
        raise LlamaModelRefused(
            f"llama.cpp gave up on {path} ({words}); expected a GGUF file of a model that {library.title} knows. The file is damaged or "
            "contradicts itself: fetch it or convert it again, or name another one."
        )


@lru_cache(64)
def _tried(path: Path, size: int, modified: int) -> tuple[int, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRIAL, str(path)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return 1, f"it was not loaded after {SECONDS} seconds"
    if done.returncode == 2:
        return 2, " ".join(done.stdout.split())
    said = [" ".join(line.split()) for line in done.stderr.splitlines() if line.strip()]
    line = next((each for each in said if re.search(r"ASSERT|error|abort|failed", each)), "")
    ended = f"signal {-done.returncode}" if done.returncode < 0 else f"exit status {done.returncode}"
    return done.returncode, line[-300:].rstrip(".") or f"it ended with {ended}"
