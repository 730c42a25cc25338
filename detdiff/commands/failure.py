"""What went wrong, as one paragraph, a name for programs and an exit code."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from detdiff.errors import DetdiffError, Interrupted, ReportNeeded

SCHEMA = "detdiff.error/1"
# What running a model needs and reading traces does not.
RUNNING = frozenset(
    {"mlx", "mlx_lm", "numba", "safetensors", "transformers", "tokenizers", "huggingface_hub"}
)


@dataclass(frozen=True)
class Failure:
    """``error`` is the class of the broken rule, ``message`` one paragraph without line breaks."""

    error: str
    message: str
    exit_code: int

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Any exception; one that detdiff does not raise on purpose is named by what the user can do."""
        if not isinstance(error, DetdiffError):
            error = _foreign(error)
        return cls(type(error).__name__, " ".join(str(error).split()), error.exit_code)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "error": self.error,
            "message": self.message,
            "exit_code": self.exit_code,
        }


def _foreign(error: BaseException) -> DetdiffError:
    if isinstance(error, KeyboardInterrupt):
        return Interrupted("Interrupted; nothing was written.")
    # mlx's own allocator reports with a plain RuntimeError.
    if isinstance(error, MemoryError) or "Unable to allocate" in str(error):
        return DetdiffError(
            "There is not enough memory. Lower memory_mb, record fewer values (capture digest, or a window), or "
            "use a smaller model."
        )
    if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in RUNNING:
        return DetdiffError(
            f"Running a model (record, demo, --replay, and compare with anything but two traces) needs MLX and what "
            f"comes with it, and the package {str(error.name).partition('.')[0]!r} is not installed here. Install all "
            "of it with `pip install .` in the folder of detdiff's source. Comparing and showing traces works without."
        )
    if isinstance(error, OSError):
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return DetdiffError(
            f"{where}{error.strerror or error}. The operating system refused; check the path, its permissions and "
            "the space on the disk."
        )
    return ReportNeeded(
        f"This is a fault of detdiff or of a library that it calls, not of what you gave it: {type(error).__name__}, "
        f"{str(error).rstrip('.') or 'without a message'}. Please report it with the traceback, which "
        "`detdiff --debug` and the same arguments show."
    )
