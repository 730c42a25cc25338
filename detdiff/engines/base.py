"""What an engine is: an opened model that runs a scenario's requests into a trace; and rows from digests.

Rows are what engines without a recorder of their own write with. Imports no model library.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import EngineRefuses
from detdiff.scenario import CachePlan, KernelPlan, Request, Scenario, Schedule
from detdiff.trace import PHASES, Rows, TraceWriter, Value, digest_rows

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
MODEL_FILE: Final = "model_file"
CHOICES: Final = "choices"
PADDING: Final = "padding"
ADAPTERS: Final = "adapters"
RANKS: Final = "ranks"
INVARIANCE: Final = "invariance"
# What a scenario can say.
PACKED: Final = "packed"
SPECULATION: Final = "speculation"
CACHE_SETTINGS: Final = "cache_settings"
KERNEL_PLAN: Final = "kernel_plan"
SPLIT_ROWS: Final = "split_rows"
SAMPLING: Final = "sampling"
SERIAL: Final = "serial"
STATIC: Final = "static"
CONTINUOUS: Final = "continuous"
PREFILL_CHUNK: Final = "prefill_chunk"
TEXT: Final = "text"
SCORES: Final = "scores"
EMBEDS: Final = "embeds"
TIMED: Final = "timed"
LIVE: Final = "live"
# Where it is.
ADDRESS: Final = "address"

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

if TYPE_CHECKING:
    from detdiff.probe.measures import Clock, RowCosts

Progress = Callable[[int, int], None]  # tokens generated so far, tokens at most
Begin = Callable[[Mapping[str, Any]], TraceWriter]


OnTimedToken = Callable[[int, int], None]
"""``on_token(request, token)``: called as soon as the engine answers with a token."""


class RunsUnrecorded(Protocol):
    """What an engine with the capability ``timed`` has."""

    def timed(
        self, scenario: Scenario, on_start: Callable[[], None], on_token: OnTimedToken
    ) -> Sequence[float | None]:
        """Run all requests as ``run`` does, without recording; ``on_start`` is called when all is prepared. When each came, by
        time.perf_counter(); None: at the start."""


@runtime_checkable
class CostsRows(Protocol):
    """What an engine has that can tell what a call of M rows costs."""

    def row_costs(self, scenario: Scenario, rows: Sequence[int], now: Clock) -> Sequence[RowCosts]:
        """Times, by ``now``, of every M of ``rows``, which start with 1, under the scenario's kernel profile; ``split_rows`` is left out."""


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
    model computes in instead of its own; ``patches``: cache entries to put in; ``padding``: rows of padding are fed this token; ``keys_apart``: keys of
    requests that share one cache lie apart, in the order of positions;
    ``watch``: the engine's own object that sees operations as they are called.
    """

    pin_kernels: bool = False
    dtype: str | None = None
    patches: tuple[Patch, ...] = ()
    padding: int | None = None
    keys_apart: bool = False
    watch: Any = None


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


@cache
def version(package: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
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


Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]
WantedValues = Callable[[str, int, str], bool]
"""Whether the values of (request id, position, site) are kept."""


@dataclass(frozen=True, eq=False)
class RowTable:
    """The rows of one forward, int64 [n] each: request, position, slot, phase (index into PHASES) and input token."""

    request: Int64
    position: Int64
    slot: Int64
    phase: Int64
    token: Int64

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True, eq=False)
class PortRows:
    """What one port holds in a forward: ``rows`` int64 [m], places in the row table in ascending order, ``digests`` uint64
    [m], and, where ``kept`` bool [m] says so, the values ``data`` [m, ...] in storage form."""

    rows: Int64
    digests: UInt64
    data: NDArray[Any] | None = None
    dtype: str = ""
    kept: NDArray[np.bool_] | None = None


def llama_roles(prefix: str) -> dict[str, list[tuple[str, str]]]:
    """Where the values of each role are, as (site pattern, port) with what is recorded first, in models that are built and named
    as llama is; ``prefix`` is what comes before ``layers``. How positions are turned is each engine's own to say."""
    layer = f"{prefix}layers.*."
    attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
    return {
        # Some models multiply the embedding before the first layer.
        "embedding": [(f"{prefix}layers.0.input_layernorm", "in"), (f"{prefix}embed_tokens", "out")],
        "attn_norm": [(f"{layer}input_layernorm", "out")],
        **{name: [(f"{attention}{name}_proj", "out")] for name in ("q", "k", "v")},
        "q_norm": [(f"{attention}q_norm", "out")],
        "k_norm": [(f"{attention}k_norm", "out")],
        "rope_q": [(f"{attention}attention", "in")],
        "rope_k": [(f"{attention}cache.write", "k")],
        "attention": [(f"{attention}attention", "out")],
        "o": [(f"{attention}o_proj", "out")],
        "residual": [(f"{layer}post_attention_layernorm", "in")],
        "mlp_norm": [(f"{layer}post_attention_layernorm", "out")],
        "gate": [(f"{mlp}gate_proj", "out")],
        "up": [(f"{mlp}up_proj", "out")],
        "activation": [(f"{mlp}down_proj", "in")],
        "down": [(f"{mlp}down_proj", "out")],
        "block": [(f"{prefix}layers.{number}", "out") for number in ("?", "??", "???")],
        "final_norm": [(f"{prefix}norm", "out")],
        "head": [("lm_head", "out")],
        "logits": [("logits", "out")],
    }


def decoder_roles(
    model_type: str,
    places: Mapping[str, Sequence[tuple[str, str]]],
    *,
    neighbours: bool = False,
    head_width: int | None = None,
) -> dict[str, Any]:
    """What an engine of a ``model_type`` that is a decoder of the llama kind adds to a header to say its sites' roles:
    for each role patterns of site names, each with the port that holds its value; the first that is there counts.

    ``neighbours``: see ``compare.roles.Roles``. Empty for another model type.
    """
    if model_type not in DECODERS:
        return {}
    told = {role: [list(each) for each in sites] for role, sites in places.items()}
    return {"roles": {"places": told, "neighbours": neighbours, "head_width": head_width}}


DECODERS: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma")
"""Types of models that are built as llama is: two norms a layer, rotary positions, a gated MLP."""


def port_rows(rows: Int64, data: NDArray[Any], dtype: str, kept: NDArray[np.bool_] | None = None) -> PortRows:
    """The port of values [m, ...]; ``kept`` says whose values stay beside their digests."""
    return PortRows(rows, digest_rows(data, dtype), None if kept is None else data, dtype, kept)


def write_rows(
    writer: TraceWriter, forward: int, table: RowTable, ports: Mapping[int, PortRows], count: int
) -> None:
    """Write the rows of a logged forward; ``ports`` by their number, ``count`` of them in the trace's sites.

    Rows without any port are left out.
    """
    present = np.zeros((len(table), count), np.bool_)
    place = {port: np.full(len(table), -1, np.int64) for port in ports}
    for port, found in ports.items():
        present[found.rows, port] = True
        place[port][found.rows] = np.arange(len(found.rows))
    patterns, group = np.unique(present, axis=0, return_inverse=True)
    group = group.reshape(-1)
    for number in dict.fromkeys(group.tolist()):
        columns = np.flatnonzero(patterns[number])
        if not len(columns):
            continue
        mine = np.flatnonzero(group == number)
        order = np.full(count, -1, np.int64)
        order[columns] = np.arange(len(columns))
        digests = np.stack([ports[port].digests[place[port][mine]] for port in columns.tolist()], axis=1)
        values = {}
        for column, port in enumerate(columns.tolist()):
            found = ports[port]
            if found.kept is None or found.data is None:
                continue
            at = place[port][mine]
            kept = np.flatnonzero(found.kept[at])
            if len(kept):
                values[column] = Value(kept.astype(np.int32), found.data[at[kept]], found.dtype)

        def int32(array: Int64, mine: Int64 = mine) -> NDArray[np.int32]:
            return array[mine].astype(np.int32)

        writer.rows(
            Rows(
                int32(table.request),
                int32(table.position),
                np.full(len(mine), forward, np.int32),
                int32(table.slot),
                int32(table.phase),
                int32(table.token),
                tuple(order.tolist()),
                digests,
                values,
            )
        )


def highest(logits: NDArray[np.float32], count: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ids and logits [count] of the highest of float32 [vocabulary], equal ones by lower id."""
    count = min(count, len(logits))
    least = np.partition(logits, -count)[-count] if not np.isnan(logits).any() else -np.inf
    near = np.flatnonzero(~(logits < least))
    ids = near[np.lexsort((near, -logits[near]))][:count]
    return ids, logits[ids]


def wanted_values(scenario: Scenario, options: RunOptions) -> WantedValues | None:
    """Which values are kept beside digests; None: none at all."""
    capture = scenario.capture
    if options.values is not None:
        places = {id: frozenset(positions) for id, positions in options.values.items()}
        return lambda request, position, site: position in places.get(request, ())
    if capture.level == "full":
        return lambda request, position, site: True
    if capture.level != "window":
        return None
    span = capture.positions or (0, 1 << 31)

    def inside(request: str, position: int, site: str) -> bool:
        return (
            (not capture.requests or request in capture.requests)
            and span[0] <= position <= span[1]
            and (not capture.sites or any(fnmatchcase(site, pattern) for pattern in capture.sites))
        )

    return inside


def refuse_untold(scenario: Scenario, names: Sequence[str], why: str) -> None:
    """Raises EngineRefuses for the first of ``names`` that ``scenario`` asks for, or for later turns of a request and ``cancel``,
    which mlx alone runs; ``why`` goes on after the word engine.

    Names are "layout packed", "prefill_chunk", "kernels", "kernels beside split_rows", "a draft", "settings of the cache",
    "force_tokens", "lens", "chat" and "a temperature".
    """
    sampled = next((each.id for each in scenario.requests if each.sampling.temperature), None)
    asked = {
        "layout packed": scenario.schedule.layout != "padded",
        "prefill_chunk": scenario.schedule.prefill_chunk != Schedule().prefill_chunk,
        "kernels": scenario.kernels != KernelPlan(),
        "kernels beside split_rows": replace(scenario.kernels, split_rows=None) != KernelPlan(),
        "a draft": scenario.speculation is not None,
        "settings of the cache": scenario.cache != CachePlan(),
        "force_tokens": scenario.force_tokens is not None,
        "lens": scenario.capture.lens,
        "chat": any(each.chat for each in scenario.requests),
        "a temperature": sampled is not None,
        "a turn": any(each.turn for each in scenario.requests),
        "cancel": any(each.cancel for each in scenario.requests),
    }
    wrong = next((name for name in ("a turn", "cancel", *names) if asked[name]), None)
    if wrong is not None:
        what = f"the temperature of request {sampled!r}" if wrong == "a temperature" else wrong
        raise EngineRefuses(f"{what} cannot be told to the engine {why}")


def request_header(request: Request, tokens: Sequence[int]) -> dict[str, Any]:
    """A request in a trace's header."""
    return {
        "id": request.id,
        "tokens": list(tokens),
        "max_tokens": request.max_tokens,
        "arrival": request.arrival,
        "ignore_stop": request.ignore_stop,
        "sampling": request.sampling.told(),
        **({} if request.cancel is None else {"cancel": request.cancel}),
        **({} if request.turn is None else {"after": request.turn.after}),
        **({"stop": list(request.stop)} if request.stop else {}),
    }


def forward_line(
    number: int,
    spans: Sequence[tuple[int, int, int, int]],
    shape: tuple[int, int],
    plan: int,
    prompts: Sequence[int] | Mapping[int, int],
    layout: str = "padded",
) -> dict[str, Any]:
    """The line of the forward ``number``: ``spans`` are (request, slot, start, count); ``prompts`` the prompts' lengths by request."""
    rows = [
        {
            "request": request,
            "slot": slot,
            "start": start,
            "count": count,
            "phase": PHASES[0] if start < prompts[request] else PHASES[1],
        }
        for request, slot, start, count in spans
    ]
    phases = {row["phase"] for row in rows}
    return {
        "forward": number,
        "phase": phases.pop() if len(phases) == 1 else "mixed",
        "layout": layout,
        "shape": list(shape),
        "rows": rows,
        "plan": plan,
        "caches": [],
    }
