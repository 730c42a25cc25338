"""The operation of a linear site or an embedding for the float64 oracle: what it was given, with its module's parameters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from detdiff.errors import OracleRefused
from detdiff.explain.bounds import Embedding, Linear
from detdiff.explain.oracle import Operation
from detdiff.explain.origins import Captured
from detdiff.trace import Site
from detdiff_kernels.weights import Dense


def operation_of(
    torch: Any, model: Any, site: Site, captured: Captured, request: str, rows: Sequence[int]
) -> Operation:
    """Of ``rows`` of a captured run. Raises OracleRefused for another kind of site, a module that computes in a way of its
    own, and a device whose kernels' roundings are not known."""
    name = re.sub(r"#\d+$", "", site.name)
    module: Any = dict(model.named_modules()).get(name)
    if model.device.type != "cpu":
        raise OracleRefused(
            f"The site {site.name} ran on {model.device.type}, and which roundings torch's kernels do there is not known. Judge it on "
            "the CPU."
        )
    if type(module) is torch.nn.Embedding:
        return Embedding(_ids(captured, request, rows), _weight(torch, module))
    if type(module) is not torch.nn.Linear:
        raise OracleRefused(
            f"The site {site.name} is a {type(module).__name__}, whose roundings are not known; known are torch's Linear and "
            "Embedding. Judge the sites before and after it."
        )
    given = np.stack([captured.needed(row, site, "in").numbers() for row in rows])
    bias = None if module.bias is None else module.bias.detach().float().numpy().astype(np.float64)
    # Products of float32, float16 and bfloat16 sum in float32 on a CPU, in any order.
    return Linear(given.reshape(len(rows), -1), _weight(torch, module), bias)


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
