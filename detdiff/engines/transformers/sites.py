"""Which modules of a torch model are sites, and which axes of their tensors are requests and positions.

Found by two forwards of known batch sizes and lengths: an axis stands for positions where it has the length of both. No
axis is guessed from its place, so heads, features and experts are never taken for positions.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from detdiff.engines import base
from detdiff.trace import Site

PROBES: Final = ((2, 5), (3, 7))
"""(requests, positions) of the two forwards."""
Shape = tuple[int, ...]


# Positions are turned between modules: what attention and the cache are given is what came of it.
ROLES: Final = base.llama_roles("model.")
"""Where the values of each role are, in models that are built as llama is."""


@dataclass(frozen=True)
class RowAxes:
    """Where a tensor has requests and positions. ``batch`` None: it is the same for all requests; ``flat``: one axis for
    both, request by request."""

    batch: int | None
    length: int
    flat: bool = False

    @classmethod
    def of(cls, shapes: list[Shape]) -> RowAxes | None:
        """The layout of tensors that the two probes saw; None where they have no rows, or more than one reading."""
        if len(shapes) != len(PROBES) or len({len(shape) for shape in shapes}) != 1:
            return None

        def axes(sizes: list[int]) -> list[int]:
            return [axis for axis in range(len(shapes[0])) if [shape[axis] for shape in shapes] == sizes]

        batch, length, flat = (
            axes(sizes)
            for sizes in (
                [b for b, _ in PROBES],
                [n for _, n in PROBES],
                [b * n for b, n in PROBES],
            )
        )
        if len(flat) == 1 and not batch and not length:
            return cls(None, flat[0], True)
        if len(length) != 1 or len(batch) > 1 or flat:
            return None
        return cls(batch[0] if batch else None, length[0])

    def rows(self, tensor: Any, requests: int, length: int) -> Any | None:
        """``tensor`` as [requests, columns, ...] of a forward, columns being its last ones; None where it does not fit."""
        if self.flat:
            if tensor.shape[self.length] != requests * length:
                return None
            moved = tensor.movedim(self.length, 0)
            return moved.reshape(requests, length, *moved.shape[1:])
        if tensor.ndim <= max(self.length, self.batch or 0) or tensor.shape[self.length] > length:
            return None
        if self.batch is None or tensor.shape[self.batch] == 1 != requests:
            moved = tensor.movedim(self.length, 0)
            if self.batch is None:
                return moved[None].expand(requests, *moved.shape)
            at = self.batch + (self.batch < self.length)
            return moved.movedim(at, 0).expand(requests, moved.shape[0], *([-1] * (moved.ndim - 2)))
        if tensor.shape[self.batch] != requests:
            return None
        return tensor.movedim((self.batch, self.length), (0, 1))


@dataclass(frozen=True)
class TorchSite:
    """A site and the layouts of its input and output."""

    site: Site
    given: RowAxes | None
    made: RowAxes | None


@dataclass(frozen=True)
class TorchSites:
    """The sites of a model in the order in which a forward ends them; ``head`` names the output projection.

    ``caches`` are the layers whose attention was seen, by the attention module's name: (layer, heads of keys, heads of
    values, whether the entries before the cache were seen). ``unseen`` are classes of attention modules whose cache was not.
    ``encoder`` says that rows see later ones too, so that there is no cache: what attention reads is then seen for origins alone.
    """

    sites: tuple[TorchSite, ...]
    caches: dict[str, tuple[int | None, int, int, bool]]
    head: str | None
    unseen: tuple[str, ...]
    encoder: bool


def first_tensor(torch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any | None:
    """What a module is given: its first tensor by place, or its hidden states or ids by name."""
    for value in args:
        if isinstance(value, torch.Tensor):
            return value
    for name in ("hidden_states", "input_ids", "inputs_embeds", "x", "input"):
        if isinstance(kwargs.get(name), torch.Tensor):
            return kwargs[name]
    return None


def output_tensor(torch: Any, output: Any) -> Any | None:
    """What a module gives: its output, or the first of several."""
    found = output[0] if isinstance(output, tuple | list) and output else output
    return found if isinstance(found, torch.Tensor) else None


def call_names(name: str, seen: dict[str, int]) -> str:
    """The site's name of a module's call: that of the module, and of a second call in one forward its number too."""
    seen[name] = seen.get(name, 0) + 1
    return name if seen[name] == 1 else f"{name}#{seen[name]}"


def discover(torch: Any, model: Any, tap: Any) -> TorchSites:
    """Run both probes; ``tap(observe)`` is the context that calls ``observe(name, kind, given, made)`` for modules and
    attention calls."""
    seen: list[dict[str, tuple[Shape | None, Shape | None]]] = []
    attention: dict[str, tuple[Any, Any, bool]] = {}
    parameter = next(model.parameters())
    for requests, length in PROBES:
        found: dict[str, tuple[Shape | None, Shape | None]] = {}

        def observe(name: str, given: Any, made: Any, into: dict[str, Any] = found) -> None:
            into[name] = tuple(None if each is None else tuple(each.shape) for each in (given, made))

        def attended(name: str, key: Any, value: Any, call: Any) -> None:
            attention[name] = (tuple(key.shape), tuple(value.shape), call.cached)

        ids = torch.zeros((requests, length), dtype=torch.long, device=parameter.device)
        with torch.inference_mode(), tap(observe, attended):
            called(model, ids, torch.ones_like(ids))
        seen.append(found)
    modules = dict(model.named_modules())
    # Of experts, too, another token can move the last bits of every row.
    causal = all(getattr(modules[name], "is_causal", True) is not False for name in attention)
    encoder = not causal and _sees_later_rows(torch, model, parameter.device)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    head_name = next((name for name, module in modules.items() if module is head), None)
    blocks = _blocks(torch, modules)
    drafted: list[tuple[str, str, RowAxes | None, RowAxes | None]] = []
    caches: dict[str, tuple[int | None, int, int, bool]] = {}
    for name in seen[0]:
        shapes = [each[name] for each in seen if name in each]
        given, made = (
            RowAxes.of([pair[side] for pair in shapes if pair[side] is not None])  # type: ignore[misc]
            for side in (0, 1)
        )
        if made is None:
            continue
        module = modules.get(re.sub(r"#\d+$", "", name))
        kind = "attention" if module is None else _kind(torch, name, module, blocks, head)
        if module is None and (owner := name.removesuffix(".attention")) in attention:
            key, value, before = attention[owner]
            layer = _layer(name)
            caches[owner] = (layer, key[1], value[1], before)
        if not encoder and module is None and owner in attention:
            drafted += [(f"{owner}.cache.write", "cache_write", None, None)]
            drafted += [(f"{owner}.cache.read", "cache_read", None, None)]
        drafted.append((name, kind, given, made))
    if head is not None:
        drafted.append(("logits", "logits", None, None))
    names = {name for name, *_ in drafted}
    sites = []
    for name, kind, given, made in drafted:
        inputs, outputs = _ports(name, kind, given, caches)
        sites.append(
            TorchSite(Site(name, kind, _layer(name), inputs, outputs, _parent(name, names)), given, made)
        )
    unseen = sorted(
        {
            type(modules[name]).__name__
            for name, kind, *_ in drafted
            if kind == "attn_block" and name not in caches
        }
    )
    return TorchSites(tuple(sites), caches, head_name, tuple(unseen), encoder)


def called(model: Any, ids: Any, mask: Any) -> Any:
    """What a model gives for ids and the mask of those that are no padding, int64 [requests, columns] each."""
    known = inspect.signature(model.forward).parameters
    given = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0), "use_cache": True}
    return model(input_ids=ids, attention_mask=mask, **{k: v for k, v in given.items() if k in known})


def last_hidden(output: Any) -> Any:
    """The last hidden states that a model without a head gives."""
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]


def _sees_later_rows(torch: Any, model: Any, device: Any) -> bool:
    """Whether another token at the end changes what the first row is made to."""
    with torch.inference_mode():
        first = []
        for last in (0, 1):
            ids = torch.tensor([[0, 0, 0, last]], device=device)
            first.append(last_hidden(called(model.base_model, ids, torch.ones_like(ids)))[0, 0])
    return not torch.equal(*first)


def _ports(
    name: str, kind: str, given: RowAxes | None, caches: dict[str, tuple[int | None, int, int, bool]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    if kind == "cache_write":
        _, keys, values, before = caches[name.removesuffix(".cache.write")]
        entries = (*(f"K.{h}" for h in range(keys)), *(f"V.{h}" for h in range(values)))
        return ("k", "v") if before else (), entries
    if kind == "cache_read":
        return ("written",), ("read",)
    if kind == "attention" and name.removesuffix(".attention") in caches:
        return ("in", "kv"), ("out",)
    if kind == "logits":
        return ("in",), ("out",)
    return ("in",) if given is not None else (), ("out",)


def _blocks(torch: Any, modules: dict[str, Any]) -> set[str]:
    """Members of the longest list of modules."""
    lists = {name: module for name, module in modules.items() if isinstance(module, torch.nn.ModuleList)}
    longest = max((len(module) for module in lists.values()), default=0)
    return {
        f"{name}.{n}" for name, module in lists.items() if len(module) == longest for n in range(len(module))
    }


def multiplies(torch: Any, module: Any) -> bool:
    """Whether a module is a linear layer of torch, or transformers' own of GPT-2."""
    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"


def _kind(torch: Any, name: str, module: Any, blocks: set[str], head: Any) -> str:
    kind, last = type(module).__name__, name.rpartition(".")[2]
    if module is head:
        return "head"
    if isinstance(module, torch.nn.Embedding):
        return "embedding"
    if multiplies(torch, module):
        return "linear"
    if "Norm" in kind:
        return "norm"
    if name in blocks:
        return "block"
    if "Rotary" in kind:
        return "rope"
    if "Attention" in kind or last in ("self_attn", "attn", "attention"):
        return "attn_block"
    if "Experts" in kind and any(each.ndim > 2 for each in module.parameters(recurse=False)):
        return "switch"
    if re.search(r"MLP|MoE|Expert|FeedForward", kind, re.IGNORECASE) or last == "mlp":
        return "mlp"
    return "module"


def _layer(name: str) -> int | None:
    found = re.search(r"\.(\d+)(?:\.|$)", name)
    return None if found is None else int(found[1])


def _parent(name: str, names: set[str]) -> str | None:
    parent = name.rpartition(".")[0]
    while parent and parent not in names:
        parent = parent.rpartition(".")[0]
    return parent or None


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute with another value for the length of the block."""
    missing = object()
    before = vars(owner).get(name, missing) if hasattr(owner, "__dict__") else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def bits(torch: Any, tensor: Any) -> Any:
    """The same values as integers, of which NaN equals itself."""
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.element_size()])
