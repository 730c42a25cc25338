"""TransformersEngine: causal language models of Hugging Face transformers, as its own ``generate`` or continuous batching runs them.

Needs the extra ``torch``. Importing this imports neither torch nor transformers.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from numpy.typing import NDArray

from detdiff.engines import base
from detdiff.engines.base import Begin, RunOptions, request_header, wanted_values
from detdiff.engines.schedule import request_tokens
from detdiff.errors import (
    EngineRefuses,
    EngineUnusable,
    TorchMissing,
    words_of,
)
from detdiff.scenario import GENERATE, CachePlan, KernelPlan, Request, Scenario, nearest
from detdiff.trace import Site

from .continuous import ContinuousBatches, refuse_paged
from .linear_sites import as_computed, called_again, load_torch, operation_of
from .padded import Given, PaddedBatches, text_ends
from .rows import RowSink
from .sites import ROLES, TorchSites, bits, discover
from .taps import implementations, tapped

if TYPE_CHECKING:
    from detdiff.explain.oracle import Operation
    from detdiff.explain.origins import Captured
    from detdiff.probe.measures import Clock, RowCosts

    from .invariance import TorchPinning

SETTINGS: Final = ("dtype", "device", "attn_implementation", "threads", "padding_side")
_CAPABILITIES: Final = frozenset(
    {
        base.TOKENS,
        base.LOGITS,
        base.SITES,
        base.INPUTS,
        base.ROWS_SEEN,
        base.CACHE,
        base.VALUES,
        base.FORWARDS,
        base.RESET,
        base.PIN_KERNELS,
        base.DTYPE,
        base.ORACLE,
        base.PADDING,
        base.INVARIANCE,
        base.SERIAL,
        base.STATIC,
        base.CONTINUOUS,
        base.EMBEDS,
        base.TIMED,
    }
)
_ENCODER: Final = "it is a model without a head, which generates and scores nothing"
_LACKS: Final = {
    base.TOKENS: _ENCODER,
    base.LOGITS: _ENCODER,
    base.SCORES: _ENCODER,
    base.KERNEL_PATHS: "torch does not say which of its kernels computed a site",
    base.TEXT: "the model was given without a tokenizer",
    base.MODEL_FILE: "the model came from no directory, so what is in its file is not known",
}


class TransformersEngine:
    """A model of transformers: each request alone (serial), all in one batch (static), or as its own continuous batching has them
    (continuous). Batches are padded on the left where it generates, on the right, or as ``padding_side`` says, where texts are scored or embedded.

    ``model`` is what ``AutoModelForCausalLM.from_pretrained`` gives, or ``AutoModel`` for one that embeds alone, ``tokenizer`` what turns texts into its token ids, where
    prompts are texts. ``settings`` has ``dtype``, ``device``, ``attn_implementation``, ``threads`` and ``padding_side``.

    Raises TorchMissing without torch, EngineUnusable for a model that does not generate, EngineRefuses for other settings.
    """

    name = "transformers"
    how_pinned = "every linear, expert, activation and attention call made for one row"
    stateless = True
    """Every run makes its caches anew, so that nothing is left of what was served."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        name: str | None = None,
        settings: Mapping[str, Any] | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        self._torch = _torch()
        if not all(hasattr(model, name) for name in ("named_modules", "base_model", "config")):
            raise EngineUnusable(
                f"A {type(model).__name__} is no model of transformers; expected what AutoModelForCausalLM.from_pretrained, or "
                "AutoModel for one that embeds, gives. Give that, or write an engine of your own."
            )
        self.settings: Mapping[str, Any] = dict(settings or {})
        self._set(model)
        self.model = model.eval()
        self.tokenizer = tokenizer
        own = str(getattr(model, "name_or_path", "") or type(model).__name__).rstrip("/").rpartition("/")[2]
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.identity: Mapping[str, Any] = {
            "name": name or own,
            "model_type": str(getattr(model.config, "model_type", "")),
            "vocab_size": self.vocab_size,
            **(identity or {}),
        }
        self.model_file = Path(str(getattr(model, "name_or_path", "") or "."))
        """The directory of the model, where it came from one."""
        known = {base.MODEL_FILE} if (self.model_file / "config.json").is_file() else set()
        self.capabilities = _CAPABILITIES | known | ({base.TEXT} if tokenizer is not None else set())
        if callable(getattr(model, "generate", None)):
            self.capabilities |= {base.SCORES}
        else:
            self.capabilities -= {base.TOKENS, base.LOGITS}
        self._other: dict[str, Any] = {}

    def _set(self, model: Any) -> None:
        wrong = next((key for key in self.settings if key not in SETTINGS), None)
        if wrong is not None:
            raise EngineRefuses(
                f"The engine transformers has no setting {wrong!r}; {nearest(wrong, SETTINGS)}"
            )
        if self.settings.get("padding_side", "left") not in ("left", "right"):
            raise EngineRefuses(
                f"padding_side is {self.settings['padding_side']!r}; expected 'left' or 'right'. Correct it."
            )
        if "threads" in self.settings:
            self._torch.set_num_threads(int(self.settings["threads"]))
        if "device" in self.settings:
            model.to(self.settings["device"])
        if "dtype" in self.settings:
            model.to(self._dtype(str(self.settings["dtype"])))
        if "attn_implementation" in self.settings:
            model.set_attn_implementation(str(self.settings["attn_implementation"]))

    def _dtype(self, name: str) -> Any:
        found = getattr(self._torch, name, None)
        if not isinstance(found, self._torch.dtype):
            raise EngineRefuses(
                f"dtype is {name!r}; expected one of torch's, such as float32 or bfloat16. Correct it."
            )
        return found

    def environment(self) -> dict[str, Any]:
        torch, device = self._torch, self.model.device
        return {
            **base.machine(),
            "torch": str(torch.__version__),
            "transformers": base.version("transformers"),
            "device": str(device.type),
            "chip_of_device": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
            "threads": torch.get_num_threads(),
            "attn_implementation": implementations(self.model),
            "matmul_precision": torch.get_float32_matmul_precision(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        }

    def lacks(self, capability: str) -> str:
        return _LACKS.get(capability, f"the transformers engine has no {capability}")

    def encode(self, text: str, chat: bool) -> list[int]:
        """Raises EngineRefuses without a tokenizer."""
        if self.tokenizer is None:
            raise EngineRefuses(
                "Prompts are texts, and the model was given without a tokenizer. Give one: TransformersEngine(model, "
                "tokenizer), or give token ids."
            )
        if chat:
            found = self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            return [int(token) for token in found]
        return [int(token) for token in self.tokenizer(text)["input_ids"]]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids)) if self.tokenizer is None else str(self.tokenizer.decode(ids))

    def reset(self) -> None:
        self._other.clear()

    def operation(
        self, site: Site, captured: Captured, request: str, rows: Sequence[int], scenario: Scenario
    ) -> Operation:
        """See ``explain.controls.oracle``."""
        return operation_of(self._torch, self.model, site, captured, request, rows)

    def again(
        self, site: Site, x: NDArray[Any], dtype: str, shape: tuple[int, int], scenario: Scenario
    ) -> NDArray[Any]:
        """See ``explain.controls.place``."""
        return called_again(self._torch, self.model, site, x, dtype, shape)

    def as_computed(self, role: str, operation: Operation, dtype: str) -> Operation:
        """See ``explain.controls.roles``."""
        return as_computed(operation, dtype)

    def pinning(self, kernels: KernelPlan) -> TorchPinning:
        """See ``invariance.pinning.PinsKernels``. Raises EngineRefuses for a kernel plan: torch's own kernels are all there are."""
        if kernels != KernelPlan():
            raise EngineRefuses(
                f"kernels is {kernels.profile!r}, and a model of transformers runs on torch's own kernels; expected native. Leave it out."
            )
        from .invariance import TorchPinning

        return TorchPinning(self._torch, self.model, str(self.identity["name"]))

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Token ids that end a text."""
        return frozenset(text_ends(self.model))

    @cached_property
    def sites(self) -> TorchSites:
        """The model's sites, found by two short forwards."""
        return discover(
            self._torch,
            self.model,
            lambda observe, attended: tapped(self._torch, self.model, observe, attended),
        )

    def check(self, scenario: Scenario) -> None:
        """Raises EngineRefuses for what ``generate``, or its continuous batching, cannot be told."""
        generates = scenario.task == GENERATE
        if generates and base.TOKENS not in self.capabilities:
            raise EngineRefuses(
                f"task is generate, and {self.identity['name']!r} cannot: {_ENCODER}. Use task=embed, or a causal language model."
            )
        if generates and self.settings.get("padding_side") == "right":
            raise EngineRefuses(
                "padding_side is 'right'; expected 'left': with padding on the right, generate continues the padding. Leave it out."
            )
        names = ["prefill_chunk", "kernels", "a draft", "force_tokens", "lens", "a temperature"]
        why = "transformers, which decodes greedily by its own generate. Leave it out."
        continuous = scenario.schedule.kind == "continuous"
        if continuous:
            why = "transformers, whose continuous batching decodes greedily and knows one limit, of a forward's rows (row_budget). Leave it out."
            refuse_paged(self.model, scenario)
        else:
            names.append("layout packed")
        if not continuous or replace(scenario.cache, page_tokens=None) != CachePlan():
            names.append("settings of the cache")
        base.refuse_untold(scenario, names, why)

    def run(self, scenario: Scenario, begin: Begin, options: RunOptions) -> Mapping[str, Any]:
        """See `base.Engine.run`."""
        overrides = options.overrides
        if overrides.patches:
            raise EngineRefuses(
                "The engine transformers was asked to put cache entries in, and has no way to. Ask without."
            )
        if overrides.dtype is not None:
            return self._in(overrides.dtype).run(scenario, begin, _without_dtype(options))
        given = self._given(scenario)
        served = self._served(scenario, given)
        total, count = sum(each.max_tokens for each in scenario.requests), 0
        sites = self.sites
        started, clock = time.time(), time.perf_counter()
        lacks = {base.KERNEL_PATHS: _LACKS[base.KERNEL_PATHS]}
        if sites.encoder:
            lacks[base.CACHE] = "its rows see later rows too, so that it keeps no cache"
        elif sites.unseen or not sites.caches:
            lacks[base.CACHE] = (
                f"what the attention of class {' and '.join(sites.unseen) or 'this model'} reads is not recorded"
            )
        writer = begin(
            {
                "requests": [
                    request_header(replace(request, max_tokens=len(scored) or request.max_tokens), prompt)
                    for request, (prompt, scored) in zip(scenario.requests, given, strict=True)
                ],
                "sites": [each.site for each in sites.sites],
                "lacks": lacks,
                "notes": [*served.notes, *self._notes(overrides.pin_kernels)],
                **base.decoder_roles(str(self.identity["model_type"]), ROLES),
            }
        )

        def on_token(_: int) -> None:
            nonlocal count
            count += 1
            if options.progress is not None:
                options.progress(count, total)

        into = RowSink(
            self._torch,
            sites,
            writer,
            [each.id for each in scenario.requests],
            wanted_values(scenario, options),
            scenario.capture.top,
            on_token,
            lambda token: self.decode([token]),
        )
        recorder, logits = served.record(into, options)
        seconds = time.perf_counter() - clock
        again = served.again(options, len(logits)) if logits else []
        equal = len(again) == len(logits) and all(
            a.dtype == b.dtype and self._torch.equal(bits(self._torch, a), bits(self._torch, b))
            for a, b in zip(logits, again, strict=True)
        )
        return {
            "times": {
                "started": started,
                "seconds": seconds,
                "rows": recorder.rows,
                "forwards": recorder.forwards,
            },
            "observer": {"forwards": len(logits), "equal": equal if logits else None},
            **({} if recorder.scored_in is None else {"scored_in": recorder.scored_in}),
        }

    def timed(
        self, scenario: Scenario, on_start: Callable[[], None], on_token: base.OnTimedToken
    ) -> list[float | None]:
        """See ``base.RunsUnrecorded``."""
        return self._served(scenario, self._given(scenario)).timed(on_start, on_token)

    def row_costs(self, scenario: Scenario, rows: Sequence[int], now: Clock) -> list[RowCosts]:
        """See ``base.CostsRows``: each linear shape once."""
        from detdiff.probe.measures import costs_of

        from .linear_sites import torch_shapes

        return costs_of(((each.shape, len(each.sites), each) for each in torch_shapes(self.model)), rows, now)

    def _notes(self, pin_kernels: bool) -> list[str]:
        if not pin_kernels:
            return []
        return [
            "linear layers and activations ran row by row, and attention row by row over the keys that each sees"
        ]

    def _in(self, dtype: str) -> TransformersEngine:
        """The same model in another dtype."""
        if dtype not in self._other:
            model = copy.deepcopy(self.model).to(self._dtype(dtype))
            self._other[dtype] = TransformersEngine(model, self.tokenizer, identity=self.identity)
        found: TransformersEngine = self._other[dtype]
        return found

    def _served(self, scenario: Scenario, given: Given) -> PaddedBatches | ContinuousBatches:
        """How a scenario's requests are run."""
        if scenario.schedule.kind == "continuous":
            return ContinuousBatches(self._torch, self.model, scenario, given)
        right = scenario.task != GENERATE and self.settings.get("padding_side") != "left"
        return PaddedBatches(self._torch, self.model, self.sites, scenario, given, right)

    def _given(self, scenario: Scenario) -> Given:
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        context = limit if isinstance(limit, int) else None

        def ids(request: Request, text: str) -> list[int]:
            return self.encode(text, request.chat)

        return request_tokens(scenario, ids, self.vocab_size, context)


def open_transformers(model: Any, settings: Mapping[str, Any]) -> TransformersEngine:
    """The factory of the transformers engine: ``model`` is a directory, or a causal language model that is loaded.

    Raises TorchMissing, EngineRefuses without a model, and what loading raises.
    """
    if model is None:
        raise EngineRefuses("The engine transformers needs a model; expected a directory. Name one.")
    if not isinstance(model, str | Path):
        return TransformersEngine(model, settings=settings)
    _torch()
    from detdiff.engines.mlx.model_directory import identity

    path = Path(model).expanduser()
    if not path.is_dir():
        raise EngineRefuses(
            f"{str(model)!r} is no directory; expected that of a model that transformers loads. Name one."
        )
    known = identity(path)
    loaded = load_torch(path)
    transformers = import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    return TransformersEngine(loaded, tokenizer, settings=settings, identity=known)


def _without_dtype(options: RunOptions) -> RunOptions:
    return replace(options, overrides=replace(options.overrides, dtype=None))


def _torch() -> Any:
    try:
        import_module("transformers")
        return import_module("torch")
    except ImportError as error:
        raise TorchMissing(
            f"A TransformersEngine needs torch and transformers ({words_of(error)}). Install them: "
            "pip install '.[torch]'."
        ) from error
