"""What the modules of a torch model compute for each row of a batch, taken by forward hooks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from detdiff.trace import digest_rows

from .generation import Tap

UInt64 = NDArray[np.uint64]

_BITS = {"torch.bfloat16": ("int16", np.uint16, "BF16")}
_PLAIN = {
    "torch.float16": "F16",
    "torch.float32": "F32",
    "torch.float64": "F64",
    "torch.int64": "I64",
    "torch.int32": "I32",
}


@dataclass
class _Site:
    """One site in all forwards so far: the column and M of each row, and digests [batch, columns] of each port."""

    columns: list[int] = field(default_factory=list)
    m: list[int] = field(default_factory=list)
    inputs: list[UInt64] = field(default_factory=list)
    out: list[UInt64] = field(default_factory=list)


class Taps:
    """Hooks on every module that takes and gives rows [batch, length, ...], while the context is entered.

    ``padding`` is how many columns on the left are no rows, for each request of the batch. A module that is called more
    than once in a forward, or for some of the columns only, keeps its last columns.
    """

    def __init__(self, torch: Any, model: Any, padding: Sequence[int]) -> None:
        self._torch = torch
        self._model = model
        self._padding = tuple(padding)
        self._sites: dict[str, _Site] = {}
        self._handles: list[Any] = []
        self._before = 0
        self._length = 0

    def __enter__(self) -> Taps:
        self._handles.append(self._model.register_forward_pre_hook(self._begin, with_kwargs=True))
        for name, module in self._model.named_modules():
            if name and not isinstance(module, self._torch.nn.ModuleList):
                self._handles.append(module.register_forward_hook(self._hook(name), with_kwargs=True))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def of(self, row: int, rows: int) -> dict[str, Tap]:
        """The sites in the order in which a forward ends them, with the first ``rows`` positions of one request. M counts
        padding too: a kernel computes it like any row."""
        found = {}
        for name, site in self._sites.items():
            positions = np.array(site.columns) - self._padding[row]
            kept = (positions >= 0) & (positions < rows)
            out, inputs = (np.concatenate(port, axis=1)[row] for port in (site.out, site.inputs))
            found[name] = Tap(out[kept], inputs[kept], positions[kept], np.array(site.m)[kept])
        return found

    def _begin(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self._before += self._length
        self._length = int(ids.shape[1])

    def _hook(self, name: str) -> Any:
        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = args[0] if args else kwargs.get("hidden_states", kwargs.get("input_ids"))
            made = output[0] if isinstance(output, tuple) else output
            inputs, out = self._digests(given), self._digests(made)
            if inputs is None or out is None or inputs.shape != out.shape:
                return
            site = self._sites.setdefault(name, _Site())
            last = self._before + self._length
            columns = range(last - out.shape[1], last)
            if site.columns and site.columns[-1] >= columns[0]:
                return
            site.columns += columns
            site.m += [out.size] * len(columns)
            site.inputs.append(inputs)
            site.out.append(out)

        return hook

    def _digests(self, tensor: Any) -> UInt64 | None:
        """uint64 [batch, columns], or None for what does not hold rows of this forward."""
        if not isinstance(tensor, self._torch.Tensor) or tensor.ndim < 2:
            return None
        if tensor.shape[0] != len(self._padding) or tensor.shape[1] > self._length:
            return None
        dtype = str(tensor.dtype)
        tensor = tensor.detach().cpu().contiguous()
        if dtype in _BITS:
            bits, storage, name = _BITS[dtype]
            data = tensor.view(getattr(self._torch, bits)).numpy().view(storage)
        elif dtype in _PLAIN:
            data, name = tensor.numpy(), _PLAIN[dtype]
        else:
            return None
        shape = data.shape[:2]
        return digest_rows(data.reshape(shape[0] * shape[1], -1), name).reshape(shape)
