"""A session: answers the taps of one model, runs its kernel plan and hands what it sees to a recorder."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx_lm.models.cache import ArraysCache

from detdiff.errors import LayoutError
from detdiff.scenario import KernelPlan

from .entries import cache_kind, entry_parts
from .experts import ExpertOrder
from .forward import Attend, Forward, Packing, PathOverride, Recording, Sink, handle
from .injected import InjectedFault, Injector
from .kernel_plan import CallSite, StagedWeights, TakenPath
from .latent import EMBED, UNEMBED, LatentCall, rows_alone
from .operations import ATTENTION_NAMES, Operations, scanned
from .sites import Arrays, Discovery, SiteMap, discover, walk
from .tapping import tapped, tapped_top
from .unread import CacheUpdate, CacheUpdates


class AttentionWatcher(Protocol):
    """Sees attention as it is called."""

    def around(self, site: str, forward: Forward, attend: Attend) -> Attend: ...


class ScanWatcher(Protocol):
    """Sees recurrences, and attention over latents, as they are called."""

    def scan(
        self, where: str, forward: Forward, given: Mapping[str, Any], y: mx.array, state: mx.array
    ) -> None: ...

    def latent(self, where: str, forward: Forward, call: LatentCall) -> None: ...


class Session:
    """Taps on one model for the length of a ``with`` block.

    ``compose(inputs, cache)`` is called at the start of each model call and says whose rows it holds.
    Entering a session that is already entered raises RuntimeError; after leaving, it can be entered again.
    """

    def __init__(
        self,
        model: Module,
        plan: KernelPlan | None = None,
        injected_faults: Iterable[InjectedFault] = (),
        staged: StagedWeights | None = None,
        *,
        after: Session | None = None,
        alone: bool = True,
    ) -> None:
        """A draft model's session comes ``after`` the target's, which then does not stand ``alone``.

        Raises KernelPlanError for a rule that no site of either model can follow.
        """
        self.model = model
        self.operations = Operations(plan or KernelPlan(), staged)
        self._injector = Injector(injected_faults)
        self.compose: Callable[[mx.array, Any], Forward] | None = None
        self.recording: Recording | None = None
        self.on_logits: Callable[[Forward, mx.array], None] | None = None
        self.packing: Packing | None = None
        self._override: PathOverride | None = None
        self.paused = False
        self._entered = False
        self.watch: AttentionWatcher | None = None
        self.scans: ScanWatcher | None = None
        self._updates = CacheUpdates()
        self.operations.attention.source = self._source
        self._reset()
        self.sites: SiteMap = discover(model, self._discovering)
        if after is not None:
            self.sites = self.sites.after(after.sites, "draft.")
            self.operations.chooser.check_sites((*after.sites.sites, *self.sites.sites))
        elif alone:
            self.operations.chooser.check_sites(self.sites.sites)

    def _reset(self) -> None:
        self._sink: Sink | None = None
        self.forward: Forward | None = None
        self._stack: list[str] = []
        self._leaf: str | None = None
        self._counts: dict[str, int] = {}
        self._states_done: set[int] = set()
        self._failed_in: str | None = None
        self._experts: ExpertOrder | None = None
        self._as_is = False
        self._last_updates: dict[int, CacheUpdate] = {}
        self._latents: dict[str | None, LatentCall] = {}

    @contextlib.contextmanager
    def _discovering(self, sink: Sink) -> Iterator[None]:
        self._reset()
        self.compose = None
        self.paused = False
        self.packing = None
        self._sink = sink
        try:
            with tapped(self.model, self):
                yield
        finally:
            self._reset()

    @contextlib.contextmanager
    def running(self, recording: Recording | None, *, packed: bool = False) -> Iterator[Session]:
        """Taps on; every forward goes to ``recording``.

        With None nothing is recorded, and taps are on only as far as the kernel plan and the packed layout need
        them: a native padded run is then mlx-lm's own engine with nothing but the model call counted.
        """
        if self._entered:
            raise RuntimeError("this session is already entered; leave it first, or make a second session")
        self._entered = True
        self._updates = CacheUpdates()
        self._reset()
        self.recording = recording
        bare = recording is None and self.operations.native and not packed and not self._injector
        try:
            with tapped_top(self.model, self) if bare else tapped(self.model, self):
                yield self
        finally:
            self._entered = False
            self._updates = CacheUpdates()
            self.recording = None
            self.on_logits = None
            self._reset()

    def override_paths(self, override: PathOverride | None) -> None:
        """From the next forward on let ``override`` choose the paths; None: the plan alone."""
        self._override = override
        self.operations.chooser.override = None if override is None else override.spans

    def module(self, key: str | None) -> Callable[[mx.array], mx.array] | None:
        """The module behind a site's key, as a function; a tied head is the embedding's ``as_linear``."""
        for name, module, _ in walk(self.model):
            if name == key:
                return module
            if f"{name}.as_linear" == key:
                linear: Callable[[mx.array], mx.array] = module.as_linear
                return linear
        return None

    # What the taps call. `_active` is False outside a model call, so a paused session or another model
    # that shares a cache class runs untouched.

    @property
    def _active(self) -> bool:
        return not self.paused and (self._sink is not None or self.forward is not None)

    @property
    def _inside(self) -> str | None:
        """Key of the composite that is running."""
        return self._stack[-1] if self._stack else None

    @property
    def _where(self) -> str | None:
        """Its name, whatever call of it this is."""
        return self._stack[-1].partition("#")[0] if self._stack else None

    def _key(self, name: str) -> str:
        count = self._counts[name] = self._counts.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"

    def top(self, native: Callable[..., Any], args: Any, kw: Any) -> Any:
        if self.paused or self._sink is not None or self.compose is None:
            return native(*args, **kw)
        cache = kw.get("cache", args[1] if len(args) > 1 else None)
        self._reset()
        forward = self.compose(args[0], cache)
        self.forward = forward
        self._sink = self.recording
        # Nothing but the model itself says how its modules are computed.
        self._as_is = self.packing is None and self.operations.native
        if self._override is not None:
            self._override.begin(self.sites, forward)
        if self.recording is not None:
            self.recording.begin(forward, cache or [])
        try:
            logits = native(*args, **kw)
            logits = self._injected("logits", "out", logits)
            if self.recording is not None:
                self.recording.end(forward, logits)
            if self.on_logits is not None and forward.logits_used:
                self.on_logits(forward, logits)
            return logits
        except (TypeError, AttributeError, ValueError, IndexError, NotImplementedError) as error:
            if self.packing is None:
                raise
            raise LayoutError(
                f"The module {self._failed_in or type(self.model).__name__} cannot run in the packed layout: {error}. It does "
                "something with the cache, the mask or the position other than passing it to RoPE and attention. "
                'Use layout = "padded" for this model.'
            ) from error
        finally:
            self._reset()

    def leaf(
        self, name: str, kind: str, native: Callable[..., Any], module: Module, args: Any, kw: Any
    ) -> Any:
        if not self._active:
            return native(*args, **kw)
        key = self._key(name)
        try:
            if kind in ("linear", "as_linear"):
                args = self._selected(key, args)
            held = self._hold_all((*args, *kw.values()) if kw else args)
            self._leaf = name
            y = native(*args, **kw) if self._as_is else self._computed(key, kind, native, module, args, kw)
        except Exception:
            self._failed_in = self._failed_in or name
            raise
        finally:
            self._leaf = None
        if self._injector:
            y = self._injected(key, "out", y) if kind != "switch" else self._switch_injected(key, args[1], y)
        if self._sink is not None and isinstance(y, mx.array):
            outputs: Arrays = [("out", y)]
            if kind == "switch":
                inputs = list(zip(("in", "experts"), held, strict=False))
                order = self._order(args[1])
                if order is not None:
                    given, outputs = order.ports(args[0], y)
                    inputs = [(port, handle(array)) for port, array in given]
            elif len(held) == 1:
                inputs = [("in", held[0])]
            else:
                inputs = [("in" if i == 0 else f"in.{i + 1}", a) for i, a in enumerate(held)]
            self._sink.site(key, kind, inputs, outputs, self._inside)
        return y

    def _hold_all(self, values: Sequence[Any]) -> list[mx.array]:
        """Handles on the arrays among a call's arguments, taken before the call may change them in place."""
        if self.forward is None:
            # Discovery tells a query's RoPE from a key's by the identity of the arrays, and reads only shapes.
            return [a for a in values if isinstance(a, mx.array) and a.ndim > 1]
        return [handle(a) for a in values if isinstance(a, mx.array) and a.ndim > 1]

    def _selected(self, key: str, args: Any) -> Any:
        """In a packed forward the head sees only the rows whose logits are asked for, as engines do it."""
        forward = self.forward
        if forward is None or forward.selected is None or key != self.sites.head:
            return args
        return args[0][:, mx.array(forward.selected, mx.uint32)], *args[1:]

    def _computed(
        self, key: str, kind: str, native: Callable[..., Any], module: Module, args: Any, kw: Any
    ) -> Any:
        """The output of a leaf module, on the path that the kernel plan chooses where it has a say."""
        if kind == "rope" and self.packing is not None:
            return self.packing.rope(native, args, kw)
        place = self._place(key)
        # The engine throws unused logits away; leaving them lazy keeps the head from running at all.
        unused = self.forward is not None and not self.forward.logits_used and key == self.sites.head
        if place is None or unused or kind not in ("linear", "as_linear", "switch"):
            return native(*args, **kw)

        def run() -> tuple[mx.array, Sequence[TakenPath]]:
            if kind == "switch":
                self.operations.switch.order = self._order(args[1])
                return self.operations.switch.run(place, native, module, args, kw)
            method = "as_linear" if kind == "as_linear" else "__call__"
            return self.operations.linear.run(place, native, module, args[0], method)

        y, taken = run()
        self._on_others(place, y, run)
        if self.recording is not None:
            for one in taken:
                self.recording.call(key, one)
        return y

    def _on_others(self, place: CallSite, y: mx.array, run: Callable[[], tuple[mx.array, Any]]) -> None:
        """Run a call again on the other paths that an override may want to know about."""
        override, chooser = self._override, self.operations.chooser
        if override is None or not override.has_others:
            return
        chooser.override = override.others
        try:
            other, _ = run()
        finally:
            chooser.override = override.spans
        override.compare(place, y, other)

    def _place(self, key: str) -> CallSite | None:
        """Where the kernel plan has a say: a site, in a forward."""
        forward, number = self.forward, self.sites.index.get(key) if self.forward is not None else None
        if forward is None or number is None or self.operations.native:
            return None
        site = self.sites.sites[number]
        return CallSite(site.name, site.kind, forward.phase)

    def _injected(self, key: str, port: str, value: Any) -> Any:
        if self.forward is None or not self._injector:
            return value
        return self._injector.apply(self.sites, key, port, value, self.forward)

    def gather_sort(self, native: Callable[..., Any], args: Any) -> Any:
        result = native(*args)
        if self._active:
            self._experts = ExpertOrder.of(args, result)
        return result

    def _order(self, indices: Any) -> ExpertOrder | None:
        """The sorting that an expert linear's ``indices`` come from, or None where they are in row order."""
        order = self._experts
        return order if order is not None and indices is order.indices else None

    def _switch_injected(self, key: str, indices: Any, y: mx.array) -> Any:
        order = self._order(indices) if self._injector else None
        if order is None:
            return self._injected(key, "out", y)
        return order.sorted(self._injected(key, "out", order.rows(y)))

    def composite(self, name: str, native: Callable[..., Any], args: Any, kw: Any) -> Any:
        if not self._active:
            return native(*args, **kw)
        key = self._key(name)
        parent = self._inside
        held = self._hold_all(args[:1] or list(kw.values()))
        self._stack.append(key)
        try:
            result = native(*args, **kw)
        except Exception:
            self._failed_in = self._failed_in or name
            raise
        finally:
            self._stack.pop()
        given = (*args, *kw.values()) if kw else args
        self._states(key, given)
        if isinstance(self._sink, Discovery):
            self._sink.given(key, given)
        first = result[0] if isinstance(result, tuple) and result else result
        if isinstance(first, mx.array):
            injected = self._injected(key, "out", first) if self._injector else first
            if injected is not first:
                result = (injected, *result[1:]) if isinstance(result, tuple) else injected
            if self._sink is not None and held:
                self._sink.site(key, "composite", [("in", held[0])], [("out", injected)], parent)
        if self.recording is not None and self.forward is not None and key in self.sites.blocks:
            self.recording.block_done(key)
        return result

    def _states(self, inside: str, arguments: Sequence[Any]) -> None:
        """Recurrent states, recorded by the innermost module that was given the cache."""
        for cache in arguments:
            if (
                isinstance(cache, ArraysCache)
                and id(cache) not in self._states_done
                and self._sink is not None
            ):
                self._states_done.add(id(cache))
                states = [(str(i), s) for i, s in enumerate(cache.cache) if isinstance(s, mx.array)]
                key = self._key(f"{inside.partition('#')[0]}.state")
                self._sink.site(key, "state", [], states, inside)
                if isinstance(self._sink, Discovery):
                    self._sink.recorded(cache)

    def attention(self, native: Callable[..., Any], args: Any, kw: Any) -> Any:
        if not self._active:
            return native(*args, **kw)
        key = self._key(f"{self._where}.attention")
        queries = self._hold_all(args[:1] or [kw.get("queries")])
        attend = self._attend(key, native)
        place = self.sites.index.get(key) if self.watch is not None else None
        if self.watch is not None and self.forward is not None and place is not None:
            attend = self.watch.around(self.sites.sites[place].name, self.forward, attend)
        latent = self._latents.pop(self._where, None)
        if latent is not None:
            latent.takes({**dict(zip(ATTENTION_NAMES, args, strict=False)), **kw})
        if latent is not None and latent.expanded and self._single:
            args, kw = (), latent.as_one_row()
            queries = [kw["queries"]]
        y = attend(None, args, kw) if self.packing is None else self.packing.attention(attend, args, kw)
        y = self._injected(key, "out", y)
        if self._sink is not None:
            self._sink.site(key, "attention", [("in", q) for q in queries], [("out", y)], self._inside)
            if self.recording is not None and self.forward is not None:
                keys, mask = (
                    kw.get(name, args[place] if len(args) > place else None)
                    for name, place in (("keys", 1), ("mask", 5))
                )
                self.recording.attended(key, self._layer(key), keys, mask)
        return y if latent is None else self._latent_done(latent, y)

    @property
    def _single(self) -> bool:
        """Whether an override asks for every row alone."""
        return self._override is not None and self._override.single_scans

    def latent(
        self, name: str, native: Callable[..., Any], module: Module, x: mx.array, transpose: bool
    ) -> Any:
        """A product with the weights of keys or values that latents stand for."""
        watched = self.scans is not None or self._single
        if not self._active or self.forward is None or self.packing is not None or not watched:
            return native(x, transpose=transpose)
        known = self._latents.get(self._where)
        if name == EMBED:
            queries, latents = (handle(x), None) if transpose else (None, handle(x))
            self._latents[self._where] = LatentCall(module, native, not transpose, queries, latents)
        elif known is not None:
            known.unembed, known.times_values = module, native
        alone = self._single and (known is None or not known.expanded) and transpose
        y = rows_alone(native, x) if alone else native(x, transpose=transpose)
        if name == UNEMBED and known is not None and known.given is not None:
            self._latents.pop(self._where)
            self._saw_latent(replace(known, y=handle(y)))
        return y

    def _latent_done(self, call: LatentCall, y: mx.array) -> mx.array:
        """What attention gives of a call over latents, whose weights of the values are still to come where it has one row."""
        if not call.expanded:
            self._latents[self._where] = call
            return y
        if self._single:
            assert call.times_values is not None
            y = rows_alone(call.times_values, y)
        self._saw_latent(replace(call, y=handle(y)))
        return y

    def _saw_latent(self, call: LatentCall) -> None:
        if self.scans is not None and self.forward is not None:
            self.scans.latent(self._where or "", self.forward, call)

    def scan(self, kind: str, native: Callable[..., Any], args: Any, kw: Any) -> Any:
        """A recurrence of rows; on a path of single rows where an override says so."""
        if not self._active or self.forward is None:
            return native(*args, **kw)
        single = self._single
        if self.scans is None and not single:
            return native(*args, **kw)
        given, y, state = scanned(kind, native, args, kw, single=single)
        if self.scans is not None:
            self.scans.scan(self._where or "", self.forward, given, y, state)
        return y, state

    def all_sum(self, native: Callable[..., Any], args: Any, kw: Any) -> Any:
        """The sum of what each process has of an array, in a layer or between layers."""
        y = native(*args, **kw)
        if not self._active:
            return y
        key = self._key(f"{self._leaf or self._where or 'model'}.all_sum")
        y = self._injected(key, "out", y)
        if self._sink is not None:
            given = self._hold_all(args[:1] or [kw.get("x")])
            self._sink.site(key, "all_reduce", [("in", x) for x in given], [("out", y)], self._inside)
        return y

    def _attend(self, key: str, native: Callable[..., Any]) -> Attend:
        """Attention of one call, or of one request in a packed forward: the one in these columns."""
        place, recording = self._place(key), self.recording
        if place is None:
            return lambda columns, args, kw: native(*args, **kw)

        def attend(columns: range | None, args: Any, kw: Any) -> mx.array:
            here = place if self._override is None else place._replace(columns=columns)

            def run() -> tuple[mx.array, TakenPath]:
                return self.operations.attention.run(here, native, args, kw)

            y, taken = run()
            self._on_others(here, y, run)
            if recording is not None:
                if columns is not None:
                    taken = taken._replace(rows=None, second_last=None, at=columns)
                recording.call(key, taken)
            return y

        return attend

    def _layer(self, key: str) -> int | None:
        place = self.sites.index.get(key)
        return None if place is None else self.sites.sites[place].layer

    def cache(self, native: partial[Any], cache: Any, args: Any) -> Any:
        if not self._active:
            return native(*args)
        if self.packing is not None:
            return self._updated(native, cache, args).result
        given = self._hold_all(args)
        update = self._updated(native, cache, args)
        self.cache_call(given[0], given[1], [update])
        return update.result

    def _updated(self, native: partial[Any], cache: Any, args: Any) -> CacheUpdate:
        """Run an update, and say which of the columns that came back are new."""
        if self.recording is None:
            return CacheUpdate(cache, native(*args))
        before = self._updates.begins(cache, native.func)
        update = self._updates.ended(cache, native.func, native(*args), before)
        self._last_updates[id(cache)] = update
        return update

    def update_of(self, cache: Any, result: Any) -> CacheUpdate:
        """The update of this forward in which a cache gave ``result`` back."""
        found = self._last_updates.get(id(cache))
        return found if found is not None and found.result is result else CacheUpdate(cache, result)

    def _source(self, keys: Any) -> Any:
        given = (each for each in self._last_updates.values() if isinstance(each.result, tuple))
        return next((each.cache for each in given if each.result[0] is keys), None)

    def cache_call(self, keys: mx.array, values: mx.array, calls: list[CacheUpdate]) -> None:
        """Record one write of ``keys`` and ``values`` [slots, heads, columns, width], per cache that took part."""
        key = self._key(f"{self._where}.cache")
        if self._sink is None:
            return
        if self.recording is not None and self.forward is not None:
            self.recording.cache_call(key, keys, values, calls)
            return
        known = all(cache_kind(call.cache) and entry_parts(call.result) for call in calls)
        if not known or not isinstance(self._sink, Discovery):
            return
        for call in calls:
            self._sink.recorded(call.cache, f"{key}.write")
        given = [("k", keys), ("v", values)]
        self._sink.site(f"{key}.write", "cache_write", given, given, self._inside)
        self._sink.site(f"{key}.read", "cache_read", [], [], self._inside)
