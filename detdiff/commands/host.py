"""The libraries that load models write hints about themselves to the terminal; a command keeps them quiet."""

from __future__ import annotations

import logging
import os

# Set before the libraries are imported, which is when they read them. What the user has set stays.
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_SYMLINKS_WARNING": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
}


def quiet_hosts() -> None:
    """Silence import chatter and hints of transformers, tokenizers and the hub library, in this process only."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    for name in ("transformers", "huggingface_hub"):
        logging.getLogger(name).setLevel(logging.ERROR)
