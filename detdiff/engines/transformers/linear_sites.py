"""A torch model's linear sites as operations, for probes and for the float64 oracle, and its distinct linear shapes.

Importing this imports no torch: the model that is given has done so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.compare.metrics import Values
from detdiff.errors import OracleRefused, ProbeBackendUnusable, ProbeSiteUnknown, TorchMissing, words_of
from detdiff.explain.attention_bounds import AttentionOperation, AttentionRoundings
from detdiff.explain.bounds import Embedding, Linear
from detdiff.explain.oracle import Operation
from detdiff.explain.origins import Captured, dtype_of
from detdiff.probe.operation import (
    ONE_AFTER_THE_OTHER,
    Float64,
    InputLayout,
    NumpyArrays,
    ProbedOperation,
    Weights,
)
from detdiff.trace import Site
from detdiff_kernels.rounding import DTYPES, Float32
from detdiff_kernels.weights import Dense

LAYOUT = "batch"
"""Rows lie as in a decode step of ``generate``: [M, 1, K]."""


class TorchArrays:
    """Raises ProbeBackendUnusable where torch is not installed."""

    name = "torch"

    def __init__(self) -> None:
        try:
            self._torch: Any = import_module("torch")
        except ImportError as error:
            raise ProbeBackendUnusable(
                f"torch was asked for and cannot be imported here ({words_of(error)}). Install it, or probe "
                "on native or numpy."
            ) from error

    def make(self, x: Float32, dtype: str) -> Any:
        return self._torch.from_numpy(x.copy()).to(getattr(self._torch, dtype))

    def laid(self, x: Any, lies: InputLayout) -> Any:
        if lies.transposed:
            return x.transpose(-1, -2).contiguous().transpose(-1, -2)
        wide = self._torch.zeros((*x.shape[:-1], lies.pitch or x.shape[-1]), dtype=x.dtype)
        wide[..., : x.shape[-1]] = x
        return wide[..., : x.shape[-1]]

    def finish(self, y: Any) -> None:
        if getattr(y, "is_cuda", False):
            self._torch.cuda.synchronize()
        elif getattr(y, "is_mps", False):
            self._torch.mps.synchronize()

    def values(self, y: Any) -> Values | None:
        if not isinstance(y, self._torch.Tensor):
            return None
        y = y.detach().cpu().contiguous()
        if y.dtype == self._torch.bfloat16:
            bits: NDArray[Any] = y.view(self._torch.int16).numpy().view(np.uint16)
            return Values(bits, "BF16")
        return NumpyArrays().values(y.numpy())


@dataclass(frozen=True, eq=False)
class TorchLinear:
    """``torch.nn.Linear`` modules of one shape. ``module``, that of the first of ``sites``, stands for all; only the rows are
    drawn by the seed. ``lies`` is how they lie in memory in the model's own call."""

    model: str
    module: Any
    sites: tuple[str, ...]
    lies: InputLayout = ONE_AFTER_THE_OTHER
    on: str = "torch"

    @property
    def name(self) -> str:
        more = len(self.sites) - 1
        others = f" and {more:,} more" if more else ""
        return f"{self.model} {self.sites[0]}{others} ({self.shape})"

    @property
    def shape(self) -> str:
        """``K,N,dtype``."""
        n, k = self.module.weight.shape
        return f"{k},{n},{self.dtype}"

    @property
    def dtype(self) -> str:
        return str(self.module.weight.dtype).rpartition(".")[2]

    @property
    def weights(self) -> int:
        """How many."""
        return int(self.module.weight.numel())

    def operation(self, seed: int) -> ProbedOperation:
        """The module as it is. Raises ProbeBackendUnusable for weights that are no plain floats on the CPU."""
        weight = self.module.weight
        if self.dtype not in DTYPES or weight.device.type != "cpu":
            raise ProbeBackendUnusable(
                f"{self.name} has weights of {self.dtype} on {weight.device.type}; expected one of {', '.join(DTYPES)} on cpu. "
                "Move the model there, or probe a function of your own."
            )
        bias = self.module.bias
        rows = Weights(
            int(weight.shape[0]),
            lambda first, last: _wide(weight[first:last]),
            None if bias is None else _wide(bias),
        )
        return ProbedOperation(
            int(weight.shape[1]),
            self.dtype,
            TorchArrays(),
            self._call,
            # A transposed input has several rows in a sequence; one a sequence lies the same either way.
            LAYOUT if self.lies == ONE_AFTER_THE_OTHER else "packed",
            weights=rows,
            lies=self.lies,
        )

    def _call(self, x: Any) -> Any:
        return self.module(x).detach()


def _inputs(model: Any) -> dict[str, InputLayout]:
    """How the inputs of linear modules lie in memory, in a forward of a few tokens; empty for a model that takes other things."""
    found: dict[str, InputLayout] = {}
    torch = import_module("torch")

    def seen(site: str) -> Callable[[Any, tuple[Any, ...]], None]:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            found.setdefault(site, InputLayout.of(tuple(args[0].shape), tuple(args[0].stride())))

        return hook

    modules = [(site, module) for site, module in model.named_modules() if is_linear(module)]
    hooks = [module.register_forward_pre_hook(seen(site)) for site, module in modules]
    try:
        with torch.no_grad():
            model(torch.zeros((1, 5), dtype=torch.long))
    except (TypeError, ValueError, RuntimeError):
        return {}
    finally:
        for hook in hooks:
            hook.remove()
    return found


def torch_shapes(
    model: Any, sites: Collection[str] | None = None, name: str = "model"
) -> Iterator[TorchLinear]:
    """The distinct shapes (K, N, dtype, biased or not) of a ``torch.nn.Module``'s linear sites, in the order of its modules.

    Only those of ``sites``, where any of these is linear, and these stand for their shapes. Raises ProbeSiteUnknown for a model without a linear site.
    """
    groups: dict[tuple[Any, ...], list[tuple[str, Any]]] = {}
    called = _inputs(model)
    for site, module in model.named_modules():
        if is_linear(module):
            key = (*module.weight.shape, str(module.weight.dtype), module.bias is None, called.get(site))
            groups.setdefault(key, []).append((site, module))
    if not groups:
        raise ProbeSiteUnknown(
            f"The model {name!r} has no torch.nn.Linear. Probe a function of your own instead."
        )
    wanted = set(sites or ())
    for group in groups.values():
        # A site that is asked for stands for its shape.
        group.sort(key=lambda member: member[0] not in wanted)
    found = [
        TorchLinear(
            name, group[0][1], tuple(site for site, _ in group), called.get(group[0][0], ONE_AFTER_THE_OTHER)
        )
        for group in groups.values()
    ]
    yield from [each for each in found if each.sites[0] in wanted] or found


def torch_site(model: Any, site: str, name: str = "model") -> TorchLinear:
    """The linear site of that name; raises ProbeSiteUnknown."""
    found = {place: module for place, module in model.named_modules() if is_linear(module)}
    if site in found:
        return TorchLinear(name, found[site], (site,), _inputs(model).get(site, ONE_AFTER_THE_OTHER))
    near = get_close_matches(site, found, n=3, cutoff=0.4) or list(found)[:3]
    raise ProbeSiteUnknown(
        f"The model {name!r} has no linear site {site!r} in torch; the nearest of {len(found)} are {', '.join(near) or 'none'}."
    )


def load_torch(directory: Path) -> Any:
    """A model directory as a causal language model of transformers, or as the model without a head that its configuration
    says it is, in its own dtype, on the CPU.

    Raises TorchMissing without torch and transformers, and ProbeBackendUnusable for a directory that they do not load, such as
    one of MLX's quantised weights.
    """
    try:
        import_module("torch")
        transformers = import_module("transformers")
    except ImportError as error:
        raise TorchMissing(
            f"A model in torch needs torch and transformers ({words_of(error)}). Install them: "
            "pip install '.[torch]'."
        ) from error
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
        classes = config.architectures or ["ForCausalLM"]
        # An encoder loaded as a decoder would run, with a head of random weights.
        generates = any(re.search(r"CausalLM|LMHead|ConditionalGeneration", each) for each in classes)
        kind = transformers.AutoModelForCausalLM if generates else transformers.AutoModel
        model = kind.from_pretrained(directory, dtype="auto", local_files_only=True)
    except Exception as error:  # transformers raises what its many model classes raise
        raise ProbeBackendUnusable(
            f"transformers does not load the model directory {directory.name!r}: {type(error).__name__}, {words_of(error)}. Expected is a "
            "directory of unquantised weights that it runs; leave --on torch out, or name another model."
        ) from error
    finally:
        if shown:
            bars.enable_progress_bar()
    return model.eval()


def is_linear(module: Any) -> bool:
    """A ``torch.nn.Linear`` or a class made from one, with a weight of its own."""
    names = {f"{each.__module__}.{each.__name__}" for each in type(module).__mro__}
    return "torch.nn.modules.linear.Linear" in names and getattr(module.weight, "ndim", 0) == 2


def _wide(tensor: Any) -> Float64:
    found: Float64 = tensor.detach().double().numpy()
    return found


def torch_note() -> str:
    """What torch's kernels depend on besides M."""
    torch = import_module("torch")
    threads = torch.get_num_threads()
    return (
        f"torch {torch.__version__} with {threads} thread{'' if threads == 1 else 's'}; with another number of threads its "
        "kernels may change at other M."
    )


def operation_of(
    torch: Any, model: Any, site: Site, captured: Captured, request: str, rows: Sequence[int]
) -> Operation:
    """Of ``rows`` of a captured run. Raises OracleRefused for another kind of site, a module that computes in a way of its
    own, and a device whose kernels' roundings are not known."""
    name = re.sub(r"#\d+$", "", site.name)
    modules = dict(model.named_modules())
    module: Any = modules.get(name)
    if model.device.type != "cpu":
        raise OracleRefused(
            f"The site {site.name} ran on {model.device.type}, and which roundings torch's kernels do there is not known. Judge it on "
            "the CPU."
        )
    if site.kind == "attention" and len(rows) == 1:
        return _attention(modules[name.removesuffix(".attention")], site, captured, request, rows[0])
    if type(module) is torch.nn.Embedding:
        return Embedding(_ids(captured, request, rows), _weight(torch, module))
    if type(module) is not torch.nn.Linear:
        raise OracleRefused(
            f"The site {site.name} is a {type(module).__name__}, whose roundings are not known; known are torch's Linear and "
            "Embedding, and causal attention. Judge the sites before and after it."
        )
    given = np.stack([captured.needed(row, site, "in").numbers() for row in rows])
    bias = None if module.bias is None else module.bias.detach().float().numpy().astype(np.float64)
    # Products of float32, float16 and bfloat16 sum in float32 on a CPU, in any order.
    return Linear(given.reshape(len(rows), -1), _weight(torch, module), bias)


def _attention(module: Any, site: Site, captured: Captured, request: str, row: int) -> Operation:
    """Attention of one row over its own entries up to it. Raises OracleRefused where more than those, a scale and a window goes into it."""
    config = module.config
    more = [
        name
        for name in ("sinks", "attn_logit_softcapping", "softcap", "position_bias")
        if getattr(module, name, None) is not None
    ]
    scale = getattr(module, "scaling", None)
    if more or scale is None or getattr(module, "is_causal", True) is False:
        raise OracleRefused(
            f"The attention of a {type(module).__name__} at {site.name} is no plain causal one ({', '.join(more) or 'no scale, or later rows are seen'}), "
            "and its roundings are not known. Judge the sites around it."
        )
    window = getattr(module, "sliding_window", None)
    if not hasattr(module, "sliding_window") and not getattr(config, "layer_types", None):
        window = getattr(config, "sliding_window", None)
    position = int(captured.trace.row_index().position[row])
    span = range(max(0, position + 1 - window) if window else 0, position + 1)
    write = captured.write_site(site.layer, draft=False)
    keys, values = (
        captured.entries(request, write, side, span, captured.forward(row)) for side in ("K", "V")
    )
    given = captured.needed(row, site, "in")
    query = given.numbers().reshape(1, -1, keys.shape[-1])
    attention = AttentionOperation(query, keys, values, float(scale), np.zeros((1, 1, len(span))))
    return as_computed(attention, dtype_of(given))


def called_again(
    torch: Any, model: Any, site: Site, x: NDArray[Any], dtype: str, shape: tuple[int, int]
) -> NDArray[Any]:
    """The output (rows, n) of a linear site for inputs (rows, k) in storage form, laid out as ``shape`` (slots, columns).

    Raises OracleRefused for another site.
    """
    module: Any = dict(model.named_modules()).get(re.sub(r"#\d+$", "", site.name))
    if not is_linear(module):
        raise OracleRefused(f"The site {site.name} cannot be called on its own. Judge the sites around it.")
    held = torch.from_numpy(np.ascontiguousarray(x).view(np.int16) if dtype == "BF16" else x.copy())
    given = (held.view(torch.bfloat16) if dtype == "BF16" else held).reshape(*shape, -1).to(model.device)
    with torch.no_grad():
        y = module(given).cpu().contiguous()
    bits = y.view(torch.int16) if y.dtype == torch.bfloat16 else y
    found: NDArray[Any] = bits.numpy().reshape(len(x), -1)
    return found


def _ids(captured: Captured, request: str, rows: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The tokens that rows were fed."""
    trace = captured.trace
    number = next(n for n, each in enumerate(trace.requests) if each["id"] == request)
    generated = trace.generated()
    mine = generated.request == number
    made = generated.token[mine][np.argsort(generated.index[mine])]
    fed = [*trace.requests[number]["tokens"], *(int(token) for token in made)]
    return np.array([fed[int(trace.row_index().position[row])] for row in rows], np.int64)


def _weight(torch: Any, module: Any) -> Dense:
    weight = module.weight.detach()
    names = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
    if weight.dtype not in names:
        raise OracleRefused(
            f"The weight of a {type(module).__name__} is of dtype {weight.dtype}; the oracle knows {', '.join(names.values())}. Judge "
            "other sites."
        )
    if weight.dtype == torch.bfloat16:
        return Dense(weight.contiguous().view(torch.int16).numpy().view(np.uint16), "bfloat16")
    return Dense(weight.contiguous().numpy(), names[weight.dtype])


def as_computed(operation: Operation, dtype: str) -> Operation:
    """An operation with the roundings of torch's own kernels on a CPU, where they are others than MLX's.

    Attention: whichever implementation is taken; the widest is assumed. Read in pytorch v2.13
    aten/src/ATen/native/transformers/attention.cpp (query and key each times the root of the scale) and
    aten/src/ATen/native/cpu/FlashAttentionKernel.cpp (blocks of keys, each an exponential of 20 ULP and a factor).
    """
    if not isinstance(operation, AttentionOperation):
        return operation
    keys, width = operation.keys.shape[1:]
    own = AttentionRoundings(
        query=((2, dtype),),
        cached=((1, dtype),),
        score=((width + 1, "float32"),),
        scores=((3, dtype),),
        apart=4,
        whole=1,
        power=24,
        sums=((3 * keys + 8, "float32"),),
        weights=((1, dtype),),
    )
    return replace(operation, roundings=own)
