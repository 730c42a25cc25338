"""The models that ship with detdiff: small, trained, and ordinary mlx-lm directories."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from detdiff.errors import ModelError

NAMES = ("builtin", "builtin-draft")


def builtin_path(name: str = "builtin") -> Path:
    """Return the directory of a built-in model.

    Raises ModelError for an unknown name and for an installation that lacks the model's files.
    """
    if name not in NAMES:
        raise ModelError(
            f"There is no built-in model {name!r}; the built-in models are {' and '.join(NAMES)}. "
            "Give one of these names, or the path of a model directory."
        )
    path = Path(str(files(__name__))) / name
    if not (path / "model.safetensors").is_file():
        raise ModelError(
            f"The built-in model {name!r} is missing from this installation: {path} holds no "
            "model.safetensors. Install detdiff again, or give the path of a model directory."
        )
    return path
