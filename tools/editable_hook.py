"""A step of the build: pytest leaves the module of an editable installation alone.

pytest rewrites the assertions of a plugin's modules, and hatchling's finder, which an editable installation has beside them,
is imported before pytest can. Without this every run of pytest warns of it.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FINDER = "_editable_impl_detdiff.py"
MARK = b'"""PYTEST_DONT_REWRITE"""\n'


class EditableHook(BuildHookInterface[Any]):
    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Marks the finder in a finished editable wheel; other wheels stay as they are."""
        if version == "editable":
            mark(Path(artifact_path))


def mark(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = [(each, archive.read(each)) for each in archive.infolist()]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for each, content in files:
            if each.filename == FINDER:
                content = MARK + content
            elif each.filename.endswith(".dist-info/RECORD"):
                finder = next(old for other, old in files if other.filename == FINDER)
                content = content.replace(_entry(finder), _entry(MARK + finder))
            archive.writestr(each, content)


def _entry(content: bytes) -> bytes:
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{FINDER},sha256={digest},{len(content)}".encode()
