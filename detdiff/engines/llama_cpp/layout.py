"""Whether a loaded library has the structures that ``library.py`` describes; nothing of it is trusted before."""

from __future__ import annotations

import ctypes as c
import platform
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from detdiff.errors import DetdiffError, LlamaLibraryRefused

from .context import BatchRow, ContextSettings, LlamaContext, LlamaModel
from .known_model import PROMPT, TOLERANCE, KnownModel
from .library import GgmlTensor, LlamaLibrary, find_library

DEFAULTS: Final[dict[str, Any]] = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "rope_scaling_type": -1, "pooling_type": -1,
    "attention_type": -1, "flash_attn_type": -1, "rope_freq_base": 0.0, "rope_freq_scale": 0.0, "yarn_ext_factor": -1.0, "defrag_thold": -1.0, "yarn_orig_ctx": 0,
    "cb_eval": None, "cb_eval_user_data": None, "type_k": 1, "type_v": 1, "abort_callback": None, "embeddings": False,
    "offload_kqv": True, "no_perf": True, "op_offload": True, "kv_unified": False,
}  # fmt: skip
"""What ``llama_context_default_params`` gives, by llama.cpp's own source; a field that was moved gives something else."""


@lru_cache(1)
def checked_library() -> LlamaLibrary:
    """The installed library, after all checks; once a process. Raises LlamaMissing and LlamaLibraryRefused."""
    library = find_library()
    check_library(library)
    return library


def check_library(library: LlamaLibrary) -> None:
    """Raises LlamaLibraryRefused with the first of the library's answers that is not as described."""
    for wrong in (_defaults, _size, _tensors, _known_logits):
        found = wrong(library)
        if found is not None:
            raise LlamaLibraryRefused(
                f"The library of {library.title} is not laid out as this engine knows it: {found}. Nothing of it can be trusted then. "
                "Install a version of xllamacpp that is known to work: 2026.10.11549."
            )


def _defaults(library: LlamaLibrary) -> str | None:
    given = library.llama_context_default_params()
    for name, expected in DEFAULTS.items():
        found = getattr(given, name, expected)
        if found != expected:
            return f"{name} of a new context is {found!r} where {expected!r} was expected"
    if not 1 <= given.n_threads == given.n_threads_batch:
        return f"the threads of a new context are {given.n_threads} and {given.n_threads_batch}"
    return None


def _size(library: LlamaLibrary) -> str | None:
    """How many bytes the library writes for a structure, where the calling convention shows it."""
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() == "Windows":
        return None
    for name, kind in (
        ("llama_context_default_params", library.structures.context),
        ("llama_model_default_params", library.structures.model),
    ):
        function = library.raw(name)
        # A large structure is returned through a hidden first argument.
        function.restype, function.argtypes = c.c_void_p, [c.c_void_p]
        written: set[int] = set()
        for fill in (0xA5, 0x5A):
            buffer = c.create_string_buffer(bytes([fill]) * 4096, 4096)
            function(c.addressof(buffer))
            written |= {n for n, byte in enumerate(buffer.raw) if byte != fill}
        size = max(written, default=-1) + 1
        # Fields of zeros and padding at the end: the alignment is 8 bytes.
        if -(-size // 8) * 8 != c.sizeof(kind):
            return f"{name} writes {size} bytes where {c.sizeof(kind)} were expected"
    return None


def _tensors(library: LlamaLibrary) -> str | None:
    """A small graph whose tensors must be as ``GgmlTensor`` reads them."""
    from .library import InitParams

    memory = c.create_string_buffer(1 << 16)
    context = library.ggml_init(InitParams(len(memory), c.addressof(memory), True))
    try:
        a, b = (library.ggml_new_tensor_2d(context, kind, 64, n) for kind, n in ((1, 5), (0, 7)))
        library.ggml_set_name(b, b"rows")
        made = library.ggml_mul_mat(context, a, b)
        view = library.ggml_view_1d(context, b, 3, 128)
        weight, rows, product, part = (GgmlTensor.from_address(each) for each in (a, b, made, view))
        for what, found, expected in (
            ("the type of a half-precision tensor", weight.type, 1),
            ("its elements", tuple(weight.ne), (64, 5, 1, 1)),
            ("its strides", tuple(weight.nb), (2, 128, 640, 640)),
            ("a tensor's name", rows.name, b"rows"),
            ("a product's elements", tuple(product.ne), (5, 7, 1, 1)),
            ("its operation", library.ggml_op_name(product.op), b"MUL_MAT"),
            ("its sources", (product.src[0], product.src[1], product.src[2]), (a, b, None)),
            ("a view's tensor", part.view_src, b),
            ("a view's offset", part.view_offs, 128),
        ):
            if found != expected:
                return f"{what} reads {found!r} where {expected!r} was expected"
        if library.ggml_tensor_overhead() < c.sizeof(GgmlTensor):
            return f"a tensor takes {library.ggml_tensor_overhead()} bytes, fewer than {c.sizeof(GgmlTensor)}"
    finally:
        library.ggml_free(context)
    return None


def _known_logits(library: LlamaLibrary) -> str | None:
    """A tiny model whose logits are known, in a context that must be as it was asked for."""
    known = KnownModel()
    with tempfile.TemporaryDirectory(prefix="detdiff-llama-") as folder:
        try:
            model = LlamaModel(library, known.write(Path(folder) / "known.gguf"))
            settings = ContextSettings(
                512,
                3,
                threads=2,
                flash_attention="off",
                unified=True,
                cache_type_k="f32",
                cache_type_v="f32",
                ubatch=128,
            )
            context = LlamaContext(model, settings)
        except DetdiffError as error:
            return f"a tiny known model does not load ({str(error).partition('; expected')[0]})"
        try:
            for what, expected in (
                ("n_ctx", 512), ("n_seq_max", 3), ("n_ubatch", 128), ("n_threads", 2), ("n_threads_batch", 2),
            ):  # fmt: skip
                found = getattr(library, f"llama_{what}")(context.handle)
                if found != expected:
                    return f"a context has {what} {found} where {expected} was asked for"
            context.decode([BatchRow(token, n, 1, True) for n, token in enumerate(PROMPT)])
            logits = np.stack([context.logits(n) for n in range(len(PROMPT))])
            off = float(np.max(np.abs(logits - known.logits(PROMPT))))
            if not off <= TOLERANCE:
                return f"the logits of a tiny known model are off by {off:.3g}, more than {TOLERANCE:g}"
        finally:
            context.close()
            model.close()
    return None
