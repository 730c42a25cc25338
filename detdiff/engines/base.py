"""What an engine is: an opened model that runs a scenario's requests into a trace. Imports no model library."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from detdiff.scenario import Scenario
from detdiff.trace import TraceWriter

# What a trace of the engine holds.
TOKENS: Final = "tokens"
LOGITS: Final = "logits"
SITES: Final = "sites"
INPUTS: Final = "inputs"
ROWS_SEEN: Final = "rows_seen"
KERNEL_PATHS: Final = "kernel_paths"
CACHE: Final = "cache"
VALUES: Final = "values"
FORWARDS: Final = "forwards"
# What a control can ask for.
RESET: Final = "reset"
PIN_KERNELS: Final = "pin_kernels"
MINIMAL_CHANGE: Final = "minimal_change"
PATCH: Final = "patch"
DTYPE: Final = "dtype"
ORACLE: Final = "oracle"
FIRST_NOT_FINITE: Final = "first_not_finite"
RESUME: Final = "resume"
# What a scenario can say.
PACKED: Final = "packed"
SPECULATION: Final = "speculation"
CACHE_SETTINGS: Final = "cache_settings"
KERNEL_PLAN: Final = "kernel_plan"
SAMPLING: Final = "sampling"
SERIAL: Final = "serial"
STATIC: Final = "static"
CONTINUOUS: Final = "continuous"
PREFILL_CHUNK: Final = "prefill_chunk"
TEXT: Final = "text"

TRACE_CAPABILITIES: Final = (
    TOKENS,
    LOGITS,
    SITES,
    INPUTS,
    ROWS_SEEN,
    KERNEL_PATHS,
    CACHE,
    VALUES,
    FORWARDS,
)
"""The keys of a trace header's ``lacks``."""

Progress = Callable[[int, int], None]  # tokens generated so far, tokens at most
Begin = Callable[[Mapping[str, Any]], TraceWriter]


@dataclass(frozen=True)
class Patch:
    """A cache entry to put in before a forward: [head_dim] values of (layer, K or V, head, position) of a request.

    ``port`` is ``k``, ``v`` or a state's name; ``values`` is in storage form (BF16 as uint16 bits).
    """

    request: int
    layer: int
    port: str
    head: int
    position: int
    values: Any


@dataclass(frozen=True)
class Overrides:
    """What a control changes in a run beside its scenario.

    ``pin_kernels``: every site is computed by one kernel path whatever the number of rows; ``dtype``: the dtype that the
    model computes in instead of its own; ``patches``: cache entries to put in.
    """

    pin_kernels: bool = False
    dtype: str | None = None
    patches: tuple[Patch, ...] = ()


@dataclass(frozen=True)
class RunOptions:
    """How to record, beyond what the scenario says.

    ``observe`` forwards are run again without recording and their logits compared (0: no check); ``faults`` are
    faults to inject, for tests; ``progress`` is called after each generated token; ``values`` keeps the values of these
    positions by request id, whatever the scenario's capture says. A trace that is not ``durable`` is not synced to the
    disk. ``overrides`` are what a control changes.
    """

    observe: int = 4
    faults: tuple[Any, ...] = ()
    progress: Progress | None = None
    values: Mapping[str, Collection[int]] | None = None
    durable: bool = True
    overrides: Overrides = field(default_factory=Overrides)


@runtime_checkable
class Engine(Protocol):
    """An opened model, ready to run.

    ``name`` is the registered name, or ``package.module:factory``. ``identity`` is the ``model`` of a trace's header.
    ``settings`` are the free keys that it was opened with. ``capabilities`` says what its traces hold, what controls
    can ask of it and which scenarios it runs, in the words of this module.
    """

    @property
    def name(self) -> str: ...

    @property
    def identity(self) -> Mapping[str, Any]: ...

    @property
    def settings(self) -> Mapping[str, Any]: ...

    @property
    def capabilities(self) -> frozenset[str]: ...

    def environment(self) -> dict[str, Any]:
        """Versions, device and flags that change numerics; no paths, no times."""

    def lacks(self, capability: str) -> str:
        """Why it has not got a capability, as a clause; asked only for those that are missing."""

    def encode(self, text: str, chat: bool) -> list[int]:
        """Token ids of a prompt. Raises DetdiffError where text cannot be taken."""

    def decode(self, ids: list[int]) -> str:
        """The text of token ids."""

    def check(self, scenario: Scenario) -> None:
        """Raises DetdiffError, one paragraph, for a scenario that it cannot run; nothing is recorded then."""

    def run(self, scenario: Scenario, begin: Begin, options: RunOptions) -> Mapping[str, Any]:
        """Run all requests to their ends and write them.

        ``begin(own)`` is called once, when the sites are known, and gives the writer; ``own`` has ``requests`` and
        ``sites`` of the header and what else the engine has to say there (``notes``, ``lacks``, ``draft``). Returns what
        the writer's ``finish`` is told: ``times``, ``observer`` and further keys.
        """

    def reset(self) -> None:
        """Forget what was served. An engine that cannot lacks ``reset``."""


FLAGS = (
    "MLX_ENABLE_TF32",
    "MLX_METAL_FAST_SYNCH",
    "MLX_MAX_OPS_PER_BUFFER",
    "MLX_MAX_MB_PER_BUFFER",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "OMP_NUM_THREADS",
    "MKL_CBWR",
    "VECLIB_MAXIMUM_THREADS",
    "LD_PRELOAD",
)
"""Environment variables that change numerics."""


def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def chip() -> str:
    """The processor's own name."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def blas_in_use() -> list[str]:
    """File names of BLAS libraries mapped into this process (Linux); what MLX's f32 matmul on CPU calls."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    names = {line.rsplit("/", 1)[-1] for line in maps.splitlines() if "/" in line}
    return sorted(name for name in names if re.search(r"blas|libmkl|accelerate", name, re.IGNORECASE))


def flags() -> dict[str, str]:
    """Those of FLAGS that are set."""
    return {name: os.environ[name] for name in FLAGS if name in os.environ}


IMPORTED: Final[dict[str, str]] = {}
"""Modules of the user's that were imported before a run, which may change anything: name to sha256 of the source."""


def imported() -> dict[str, Any]:
    """What an environment says of the user's own modules; nothing where there is none."""
    return {"imports": dict(sorted(IMPORTED.items()))} if IMPORTED else {}


def machine() -> dict[str, Any]:
    """The environment that every engine shares: detdiff, Python, system, chip and flags."""
    import detdiff

    return {
        "detdiff": detdiff.__version__,
        "numpy": version("numpy"),
        "python": platform.python_version(),
        "os": f"{platform.system()} {platform.machine()}",
        "chip": chip(),
        "flags": flags(),
        **imported(),
    }
