"""LlamaEngine: a GGUF file in the real llama.cpp, its requests as sequences, each batch as llama.cpp's own server makes them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from detdiff.engines import base
from detdiff.engines.base import Begin, RunOptions, request_header, wanted_values
from detdiff.engines.schedule import Work, forced_tokens, prompt_tokens
from detdiff.engines.speculation import refuse_long_for_draft, refuse_other_vocabulary
from detdiff.errors import (
    ContextExceeded,
    EngineRefuses,
    OracleRefused,
)
from detdiff.scenario import Scenario, nearest
from detdiff.trace import Site, TraceWriter

from . import float32_twin
from .context import CACHE_TYPES, FLASH, BatchRow, ContextSettings, LlamaContext, LlamaModel
from .float32_twin import Float32Twin, operand_dtype
from .graph import NodeGraph, ProbeBatch, probes
from .layout import checked_library
from .nodes import NodeRecorder, RecordingSizes
from .recorder import LlamaRecorder
from .served_models import (
    DRAFT,
    FirstBatches,
    PreparedRun,
    ServedModel,
    Unfollowed,
    drafted,
    model_parts,
    observed,
)
from .serving import EndTokens, FedTokens, Serving
from .sites import ROLES, GraphSites, find_sites
from .trial import try_model

if TYPE_CHECKING:
    from detdiff.explain.case import Case
    from detdiff.explain.controls.patches import Patches
    from detdiff.explain.oracle import Operation
    from detdiff.explain.origins import Captured
    from detdiff.probe.measures import Clock, RowCosts

    from .oracle_operations import GgufWeights

SETTINGS: Final = (
    "threads",
    "flash_attention",
    "unified",
    "cache_type_k",
    "cache_type_v",
    "ubatch",
    "context",
)
MOST_SEQUENCES: Final = 62
"""Sequences at a time; each is a bit of a cell's owners."""
MOST_THREADS: Final = 512
"""ggml's own ``GGML_MAX_N_THREADS``; some larger numbers end the process."""
_CAPABILITIES: Final = frozenset(
    {
        base.TOKENS, base.LOGITS, base.SITES, base.INPUTS, base.ROWS_SEEN, base.CACHE, base.VALUES, base.FORWARDS,
        base.RESET, base.PIN_KERNELS, base.PATCH, base.DTYPE, base.ORACLE, base.MODEL_FILE, base.SERIAL, base.STATIC, base.CONTINUOUS, base.PREFILL_CHUNK, base.PACKED, base.TEXT,
        base.SPECULATION, base.SPLIT_ROWS, base.TIMED,
    }
)  # fmt: skip
_LACKS: Final = {
    base.KERNEL_PATHS: "llama.cpp does not say which of its kernels computed a node",
    base.KERNEL_PLAN: "llama.cpp's kernels are compiled in",
    base.SAMPLING: "this engine decodes greedily",
    base.MINIMAL_CHANGE: "llama.cpp's kernels cannot be chosen site by site",
}


class LlamaEngine:
    """A GGUF model in llama.cpp.

    ``settings``: ``threads`` (1), ``flash_attention`` (auto, on, off), ``unified`` (false: each sequence has a cache of its own), ``cache_type_k`` and ``cache_type_v`` (f16), ``ubatch`` (512 rows of a graph), ``context`` (cells; as many as the requests
    need). Raises LlamaMissing, LlamaLibraryRefused, LlamaModelRefused, and EngineRefuses for other settings.
    """

    name = "llama.cpp"
    stateless = True
    """Every run makes its context anew, so that nothing is left of what was served."""

    def __init__(self, path: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.settings: Mapping[str, Any] = dict(settings or {})
        self._check_settings()
        self.library = checked_library()
        try_model(self.library, path)
        self.model = LlamaModel(self.library, path)
        self.capabilities = _CAPABILITIES
        self._graphs: dict[ContextSettings, GraphSites] = {}
        self._weights: GgufWeights | None = None
        self._drafts: dict[str, LlamaEngine] = {}
        self._twin: tuple[LlamaEngine, Float32Twin] | None = None

    def _check_settings(self) -> None:
        wrong = next((key for key in self.settings if key not in SETTINGS), None)
        if wrong is not None:
            raise EngineRefuses(f"The engine llama.cpp has no setting {wrong!r}; {nearest(wrong, SETTINGS)}")
        for key, known in (
            ("flash_attention", FLASH),
            ("cache_type_k", CACHE_TYPES),
            ("cache_type_v", CACHE_TYPES),
        ):
            value = self.settings.get(key)
            if value is not None and str(value) not in known:
                raise EngineRefuses(f"{key} is {value!r}; expected one of {', '.join(known)}. Correct it.")
        for key, most in (("threads", MOST_THREADS), ("ubatch", 1 << 24), ("context", 1 << 24)):
            value = self.settings.get(key, 1)
            if type(value) is not int or not 1 <= value <= most:
                raise EngineRefuses(
                    f"{key} is {value!r}; expected a whole number from 1 to {most}. Correct it."
                )
        if type(self.settings.get("unified", False)) is not bool:
            raise EngineRefuses(
                f"unified is {self.settings['unified']!r}; expected true or false. Correct it."
            )

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        digest = hashlib.sha256()
        with open(self.model.path, "rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
        return {
            "name": self.model.path.stem,
            "model_type": self.model.metadata("general.architecture") or "",
            "vocab_size": self.model.vocabulary,
            "weights_sha256": digest.hexdigest(),
            "file_type": self.model.metadata("general.file_type"),
        }

    def environment(self) -> dict[str, Any]:
        info = self.library.llama_print_system_info()
        return {
            **base.machine(),
            "llama.cpp": self.library.title,
            "device": "cpu",
            "backend": "cpu",
            "threads": int(self.settings.get("threads", 1)),
            "system_info": " ".join(info.decode(errors="replace").split()) if info else None,
        }

    def lacks(self, capability: str) -> str:
        return _LACKS.get(capability, f"the engine llama.cpp has no {capability}")

    def encode(self, text: str, chat: bool) -> list[int]:
        """Raises EngineRefuses for a chat with a model whose template llama.cpp does not know."""
        return self.model.encode(self.model.chat(text) if chat else text, special=not chat)

    def decode(self, ids: list[int]) -> str:
        return self.model.decode(ids)

    @property
    def how_pinned(self) -> str:
        """How kernels are pinned, in words."""
        streams = ", and each sequence in a stream of the cache of its own" if self._unified else ""
        return f"each row decoded in a call of its own{streams}"

    @property
    def operand_dtype(self) -> str | None:
        """The dtype that the control ``dtype`` compares with float32, since every node's values are float32: see `float32_twin`."""
        types = (str(self.settings.get(f"cache_type_{side}", "f16")) for side in "kv")
        return operand_dtype(self.model.path, (next(types), next(types)))

    def _in(self, dtype: str) -> LlamaEngine:
        """The same model in another dtype. Raises EngineRefuses for another than float32, and what `Float32Twin` raises."""
        if dtype != "float32":
            raise EngineRefuses(
                f"The engine llama.cpp was asked for {dtype}; expected float32. Ask for that."
            )
        if self._twin is None:
            file = Float32Twin(self.model.path)
            twin = LlamaEngine(file.path, {**self.settings, **float32_twin.SETTINGS})
            # A trace of it is one of this model, in another dtype.
            twin.__dict__["identity"] = self.identity
            self._twin = twin, file
        return self._twin[0]

    @property
    def keys_apart(self) -> str | None:
        """How the keys of requests are laid apart, where they share a cache."""
        return (
            "each sequence in a stream of the cache of its own, and batches as they are"
            if self._unified
            else None
        )

    @property
    def _unified(self) -> bool:
        return bool(self.settings.get("unified", False))

    def reset(self) -> None:
        """Nothing is kept from one run to the next."""

    def operation(
        self, site: Site, captured: Captured, request: str, rows: Sequence[int], scenario: Scenario
    ) -> Operation:
        """See ``explain.controls.oracle``."""
        from .oracle_operations import GgufWeights, SiteNode, operation_of  # what only the oracle needs

        name = site.name.removeprefix(DRAFT)
        engine = self if name == site.name else self._draft(scenario)
        graphs = () if engine is None else engine._graphs.values()
        node = next((each for graph in graphs for each in graph.sites if each.site.name == name), None)
        if engine is None or node is None:
            raise OracleRefused(
                f"The site {site.name} is in no graph that this engine ran. Judge the sites before and after it."
            )
        engine._weights = engine._weights or GgufWeights(engine.model.path)
        return operation_of(engine._weights, SiteNode(node.weight, node.width), site, captured, request, rows)

    def cache_patches(self, case: Case) -> Patches:
        """See ``explain.controls.patches``."""
        from .cache_patches import LlamaCachePatches

        return LlamaCachePatches(self, case)

    def _roles(self) -> dict[str, Any]:
        kind = str(self.identity["model_type"])
        known = [self.model.metadata(f"{kind}.{key}") for key in ("embedding_length", "attention.head_count")]
        width = self.model.metadata(f"{kind}.attention.key_length")
        if width is None and None not in known:
            width = str(int(known[0] or 0) // int(known[1] or 1))
        places = {role: [(name, "out") for name in names] for role, names in ROLES.items()}
        # llama's own pairs of rotary positions are neighbours in GGUF files.
        return base.decoder_roles(
            kind, places, neighbours=kind == "llama", head_width=None if width is None else int(width)
        )

    @property
    def model_file(self) -> Path:
        """The GGUF file."""
        return self.model.path

    def as_computed(self, role: str, operation: Operation, dtype: str) -> Operation:
        """See ``explain.controls.roles``. Raises OracleRefused."""
        from detdiff.explain.origins import DTYPES

        from .oracle_operations import as_computed, sums_in_halves

        graph = next(reversed(self._graphs.values()))
        stored = {each.dtypes for each in graph.caches}
        cache = stored.pop() if len(stored) == 1 else ("", "")
        if role == "attention" and not set(cache) <= DTYPES.keys():
            raise OracleRefused(
                f"What the cache holds is not known in every layer as one of {', '.join(DTYPES)}, so what attention read is not either. "
                "Judge what is around it."
            )
        return as_computed(
            operation,
            flash=any(each.site.name.endswith(".FLASH_ATTN_EXT") for each in graph.sites),
            cache=(DTYPES.get(cache[0], ""), DTYPES.get(cache[1], "")),
            half_sums=sums_in_halves(base.machine()),
        )

    def check(self, scenario: Scenario) -> None:
        """Raises EngineRefuses for what this engine cannot be told."""
        names = "kernels beside split_rows", "settings of the cache", "lens", "a temperature"
        base.refuse_untold(
            scenario, names, "llama.cpp, which decodes greedily with its own kernels. Leave it out."
        )
        self._draft(scenario)

    def draft_identity(self, scenario: Scenario) -> Mapping[str, Any]:
        """The identity of a speculative scenario's draft model."""
        draft = self._draft(scenario)
        return {} if draft is None else draft.identity

    def _draft(self, scenario: Scenario) -> LlamaEngine | None:
        """The scenario's draft, opened once. Raises DraftMismatch for one of another vocabulary, and what opening raises."""
        if scenario.speculation is None:
            return None
        name = scenario.speculation.draft
        if name not in self._drafts:
            draft = open_llama(name, self.settings)
            refuse_other_vocabulary(
                (scenario.model or "", self.model.vocabulary), (name, draft.model.vocabulary)
            )
            self._drafts[name] = draft
        return self._drafts[name]

    def run(self, scenario: Scenario, begin: Begin, options: RunOptions) -> Mapping[str, Any]:
        """See `base.Engine.run`."""
        overrides = options.overrides
        if overrides.patches:
            raise EngineRefuses(
                "The engine llama.cpp was asked to put cache entries in without being told when, and has no way to. Ask without."
            )
        if overrides.dtype is not None:
            plain = replace(options, overrides=replace(overrides, dtype=None))
            return self._in(overrides.dtype).run(scenario, begin, plain)
        apart = overrides.pin_kernels or overrides.keys_apart
        with self.prepared(scenario, options.faults, pinned=apart) as run:
            runs = [run] if run.draft is None else [run, run.draft]
            lacks = {base.KERNEL_PATHS: _LACKS[base.KERNEL_PATHS]}
            if any(len(each.graph.caches) < each.context.model.layers for each in runs):
                unseen = [clause for each in runs for clause in each.graph.unseen]
                lacks[base.CACHE] = "; ".join(unseen) or "the cache of some layers was not seen"
            notes = list(dict.fromkeys(clause for each in runs for clause in each.graph.unseen))
            if overrides.pin_kernels:
                notes.append(f"pinned: {self.how_pinned}")
            draft = self.draft_identity(scenario)
            writer = begin(
                {
                    **({"draft": dict(draft)} if draft else {}),
                    "requests": [
                        request_header(request, item.prompt)
                        for request, item in zip(scenario.requests, run.work, strict=True)
                    ],
                    "sites": [site.site for each in runs for site in each.graph.sites],
                    "lacks": lacks,
                    "notes": notes,
                    **self._roles(),
                }
            )
            return self._record(run, options, writer)

    @contextmanager
    def prepared(
        self, scenario: Scenario, faults: Sequence[Any] = (), *, pinned: bool = False
    ) -> Iterator[PreparedRun]:
        """A context with room for the requests of ``scenario``, recorded, with nothing in its cache, and closed at the end.

        For ``pinned`` runs each sequence has a stream of the cache: in one that is shared, attention's sums depend on which cells
        between others' a row's keys lie in. The draft's context is prepared beside it. Raises what `run` raises before it records.
        """
        work = self._work(scenario)
        draft = self._draft(scenario)
        mine, theirs = ([fault for fault in faults if fault.model == name] for name in ("target", "draft"))
        with ExitStack() as stack:
            beside = None
            if draft is not None:
                refuse_long_for_draft(work, draft.model.context)
                beside = draft._prepared(scenario, work, stack, theirs, pinned=pinned)
                beside = replace(beside, graph=drafted(beside.graph))
            yield replace(self._prepared(scenario, work, stack, mine, pinned=pinned), draft=beside)

    def _prepared(
        self,
        scenario: Scenario,
        work: list[Work],
        stack: ExitStack,
        faults: Sequence[Any] = (),
        *,
        pinned: bool = False,
    ) -> PreparedRun:
        settings = self._context_settings(work, self._unified and not pinned)
        graph, nodes = self._graph(settings), NodeRecorder()
        callback = nodes.function, nodes.user_data
        for fault in faults:
            callback = fault.callback(*callback)
        context = LlamaContext(self.model, settings, callback)
        stack.callback(context.close)
        if context.split and not graph.caches:
            # Which stream a row belongs to is read off the cell that its keys are written to.
            raise EngineRefuses(
                f"{'; '.join(graph.unseen[:1])}, so rows of several sequences cannot be told apart. Give unified = true, or another "
                "cache type or flash_attention."
            )
        nodes.plan(graph.plan, self._sizes(context, graph, work), self.model.window, context.split)
        for fault in faults:
            fault.install(context, nodes)
        return PreparedRun(scenario, work, context, nodes, graph)

    def _record(self, run: PreparedRun, options: RunOptions, writer: TraceWriter) -> Mapping[str, Any]:
        scenario, work = run.scenario, run.work
        runs = [run] if run.draft is None else [run, run.draft]
        recorders = [
            LlamaRecorder(
                each.graph,
                each.nodes,
                writer,
                [request.id for request in scenario.requests],
                wanted_values(scenario, options),
                scenario.capture.top,
                part,
            )
            for each, part in zip(runs, model_parts([each.graph for each in runs]), strict=True)
        ]
        total, count = sum(item.max_tokens for item in work), 0

        def on_token(*_: int) -> None:
            nonlocal count
            count += 1
            if options.progress is not None:
                options.progress(count, total)

        started, clock = time.time(), time.perf_counter()
        # An injected fault is not there when a batch is computed again by itself.
        first = [FirstBatches(each, 0 if options.faults else options.observe) for each in runs]

        def text(token: int) -> str:
            return self.decode([token])

        pinned = options.overrides.pin_kernels
        draft = None
        if run.draft is not None:
            draft = ServedModel(run.draft, recorders[1], first[1], pinned)
        counts = Serving(run, pinned, first[0], on_token).run(recorders[0], text, draft)
        seconds = time.perf_counter() - clock
        written = recorders[0].part.written
        return {
            "times": {
                "started": started,
                "seconds": seconds,
                "rows": written.rows,
                "forwards": written.forwards,
            },
            "observer": observed(first),
            **({} if draft is None else {"speculation": counts}),
        }

    def timed(
        self, scenario: Scenario, on_start: Callable[[], None], on_token: base.OnTimedToken
    ) -> list[float | None]:
        """See ``base.RunsUnrecorded``: the same batches in contexts that nothing looks into."""
        with self.prepared(scenario) as run, ExitStack() as stack:
            plain = []
            for each in [run] if run.draft is None else [run, run.draft]:
                context = LlamaContext(each.context.model, each.context.settings)
                stack.callback(context.close)
                plain.append(replace(each, context=context, draft=None))
            follows = Unfollowed(model_parts([each.graph for each in plain])[0])
            draft = None if run.draft is None else ServedModel(plain[1], follows, plain[1].computed, False)
            on_start()
            serving = Serving(plain[0], False, plain[0].computed, lambda n, _, token: on_token(n, token))
            serving.run(follows, lambda token: "", draft)
            return [item.came for item in run.work]

    def row_costs(self, scenario: Scenario, rows: Sequence[int], now: Clock) -> list[RowCosts]:
        """See ``base.CostsRows``: the whole forward of a row each of so many sequences, since llama.cpp calls no kernel by itself."""
        from detdiff.probe.measures import RowCosts, call_times

        settings = self._context_settings(
            [Work(n, "", (0,), 1, 0, frozenset(), None) for n in range(rows[-1])], self._unified
        )
        context = LlamaContext(self.model, settings)

        def call(count: int) -> None:
            context.decode([BatchRow(0, 0, sequence, True) for sequence in range(count)])
            for sequence in range(count):
                context.remove(sequence)

        try:
            return [RowCosts("the whole forward", 1, call_times(call, rows, now))]
        finally:
            context.close()

    def _sizes(self, context: LlamaContext, graph: GraphSites, work: Sequence[Work]) -> RecordingSizes:
        settings = context.settings
        rows = min(context.most_rows, sum(len(item.prompt) + item.max_tokens for item in work))
        cells = context.cells_of_stream * (settings.sequences if context.split else 1)
        return RecordingSizes(
            rows, graph.width, cells, graph.heads, settings.sequences, context.cells_of_stream,
            len(graph.caches), max(graph.row_bytes, 4 * self.model.vocabulary),
        )  # fmt: skip

    def _graph(self, settings: ContextSettings) -> GraphSites:
        """The model's sites, found by two short batches in a context of their own."""
        settings = replace(settings, ubatch=512)
        if settings not in self._graphs:
            nodes = NodeRecorder()
            context = LlamaContext(self.model, settings, (nodes.function, nodes.user_data))
            try:
                batches = probes(settings.sequences if context.split else 1)
                graphs = []
                for probe in batches:
                    nodes.discover()
                    context.decode(_probe_rows(probe))
                    graphs.append(NodeGraph(self.library, nodes.nodes))
                    for sequence in range(probe.sequences):
                        context.remove(sequence)
                self._graphs[settings] = find_sites(self.library, graphs, batches, context.cells_of_stream)
            finally:
                context.close()
        return self._graphs[settings]

    def _context_settings(self, work: Sequence[Work], unified: bool) -> ContextSettings:
        """A context that has room for all requests at once, so that it is the same for every schedule."""
        found = self.settings
        lengths = [len(item.prompt) + item.max_tokens for item in work]
        sequences = min(len(work), MOST_SEQUENCES)
        # Two sequences at least, since llama.cpp treats one alone like a cache that is shared.
        need = sum(lengths) if unified else sequences * _padded(max(lengths))
        # What was asked of a cache that is shared says nothing of one with streams.
        asked = need if unified != self._unified else int(found.get("context", need))
        cells = _padded(max(asked, 32 * sequences))
        if "context" in found and unified and max(lengths) > cells:
            raise ContextExceeded(
                f"context is {found['context']} cells, and a request needs {max(lengths)}; expected room for one at least. Ask for more."
            )
        return ContextSettings(
            cells,
            sequences,
            int(found.get("threads", 1)),
            str(found.get("flash_attention", "auto")),
            unified,
            str(found.get("cache_type_k", "f16")),
            str(found.get("cache_type_v", "f16")),
            int(found.get("ubatch", 512)),
        )

    def _work(self, scenario: Scenario) -> list[Work]:
        """The requests, tokenised and checked. Raises NothingToCheck, TokenOutOfRange, ContextExceeded, and what forcing raises."""
        found: list[Work] = []
        prompts = prompt_tokens(scenario, self.encode, self.model.vocabulary, self.model.context)
        for index, (request, prompt) in enumerate(zip(scenario.requests, prompts, strict=True)):
            arrival = 0 if scenario.schedule.kind == "static" else request.arrival
            ends: Callable[[int], bool] = (lambda _: False) if request.ignore_stop else self.model.ends
            found.append(
                Work(index, request.id, prompt, request.max_tokens, arrival, EndTokens(ends), None)  # type: ignore[arg-type]
            )
        if scenario.force_tokens is not None:
            for item, tokens in zip(found, forced_tokens(found, scenario.force_tokens), strict=True):
                item.max_tokens = min(item.max_tokens, len(tokens))
                item.stop = frozenset()
                item.sampler = FedTokens(tokens)
        return found


def open_llama(model: Any, settings: Mapping[str, Any]) -> LlamaEngine:
    """The factory of the engine llama.cpp: ``model`` is a GGUF file.

    Raises EngineRefuses without one, and what LlamaEngine raises.
    """
    if model is None:
        raise EngineRefuses("The engine llama.cpp needs a model; expected a GGUF file. Name one.")
    path = Path(str(model)).expanduser()
    if not path.is_file():
        raise EngineRefuses(f"{str(model)!r} is no file; expected a GGUF file. Name one.")
    return LlamaEngine(path, settings)


def _probe_rows(probe: ProbeBatch) -> list[BatchRow]:
    """The rows of a probe, with an output in each sequence, and as many in all as it has."""
    rows = [
        BatchRow(0, position, sequence)
        for sequence in range(probe.sequences)
        for position in range(probe.rows)
    ]
    for n in range(probe.outputs):
        at = (n % probe.sequences) * probe.rows + n // probe.sequences
        rows[at] = rows[at]._replace(answers=True)
    return rows


def _padded(cells: int) -> int:
    """llama.cpp makes caches of multiples of 256 cells."""
    return -(-cells // 256) * 256
