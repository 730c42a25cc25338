"""Adapters of mlx-lm (LoRA, DoRA, full): loaded into a model, and named in its identity."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from detdiff.errors import AdapterInvalid, words_of

FILES: Final = ("adapter_config.json", "adapters.safetensors")


def load_adapter(model: Any, folder: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """Put the adapter of a directory into ``model``, as ``mlx_lm.load`` does; the identity ``known`` with the adapter's.

    ``adapter`` has its name, type, scale and rank, the sha256 of its files and the one of the model's own weights;
    ``weights_sha256`` is of both. Raises AdapterInvalid.
    """
    from mlx_lm.tuner.utils import load_adapters

    path = Path(folder).expanduser()
    missing = [name for name in FILES if not (path / name).is_file()]
    if missing:
        raise AdapterInvalid(
            f"The adapter directory {str(path)!r} has no {' and no '.join(missing)}; expected what mlx_lm.lora writes: "
            f"{' and '.join(FILES)}. Correct adapter_path."
        )
    try:
        config = json.loads((path / FILES[0]).read_text(encoding="utf-8"))
        load_adapters(model, str(path))
    except (
        Exception
    ) as error:  # a wrong file shows as a key, a shape or a name that is missing somewhere in mlx-lm
        raise AdapterInvalid(
            f"mlx-lm does not load the adapter in {str(path)!r} ({type(error).__name__}: {words_of(error)}); expected one that was "
            "made for this model. Name the model that it was trained on, or another adapter."
        ) from error
    model.eval()
    total = hashlib.sha256()
    for name in FILES:
        total.update(name.encode() + b"\0" + hashlib.sha256((path / name).read_bytes()).digest())
    adapter = total.hexdigest()
    parameters = config.get("lora_parameters", {})
    return {
        **known,
        "weights_sha256": hashlib.sha256(f"{known['weights_sha256']}{adapter}".encode()).hexdigest(),
        "adapter": {
            "name": path.resolve().name,
            "type": config.get("fine_tune_type", "lora"),
            "scale": parameters.get("scale"),
            "rank": parameters.get("rank"),
            "sha256": adapter,
            "base_weights_sha256": known["weights_sha256"],
        },
    }
