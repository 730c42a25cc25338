"""What all tests share: no network, no time limits on examples, one way to a real model."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings
from tiers import THOROUGH

# Before any test imports a host library: a model that is not on the disk is an error, never a download.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Texts are as wide as where there is no terminal. pytest imports readline, which sets these for the workers of xdist.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)

# The time of an example says more about the machine than about the code. On CI every run tries the same
# examples, so that a red one can be repeated.
settings.register_profile("local", deadline=None, print_blob=True, max_examples=100 if THOROUGH else 15)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "local")

COSTLY_PAGES = ("docs/findings.md", "docs/invariance.md", "docs/reduce.md", "docs/strategies.md")
"""Pages with examples of seconds, of what tests of the first tier show too."""

pytest_plugins = ["plugins.real_models", "stores", "pytester"]


@pytest.fixture(scope="session", autouse=True)
def not_synced() -> Iterator[None]:
    """No trace of a test has to survive a power cut, and waiting for the disk leaves a core idle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def hears_ctrl_c() -> Iterator[None]:
    """Ctrl-C as a terminal gives it: a suite that a script starts in its background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def pytest_collection_finish() -> None:
    # Model libraries and thousands of tests: the collector would look through them again and again.
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Those of minutes first, so that at the end no worker waits for another one's.
    items.sort(key=lambda item: item.get_closest_marker("real_model") is None)
    if THOROUGH:
        return
    left_out = pytest.mark.skip(reason="thorough: with CI=1 or DETDIFF_TEST_FULL=1")
    for item in items:
        if item.get_closest_marker("thorough") or item.nodeid.partition("::")[0] in COSTLY_PAGES:
            item.add_marker(left_out)
