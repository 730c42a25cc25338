"""The shared library of llama.cpp that a wheel brings, its C functions and structures, through ctypes.

Declarations follow llama.h and ggml.h of llama.cpp b11549 (package xllamacpp 2026.10.11549). C carries no layout in the
library itself, so nothing here is trusted before ``layout.py`` has checked it against the library that was loaded.
"""

from __future__ import annotations

import ctypes as c
import importlib
import importlib.util
import os
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from detdiff.engines.base import version
from detdiff.errors import LlamaLibraryRefused, LlamaMissing

EVAL_CALLBACK: Final = c.CFUNCTYPE(c.c_bool, c.c_void_p, c.c_bool, c.c_void_p)
_LOG_CALLBACK: Final = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
_LOGS: Final[list[Any]] = []
TYPE_NAMES: Final = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
"""ggml's types that a trace can hold, by number, as the trace names them."""


class ContextParams(c.Structure):
    """``llama_context_params``."""

    _fields_ = [
        ("n_ctx", c.c_uint32),
        ("n_batch", c.c_uint32),
        ("n_ubatch", c.c_uint32),
        ("n_seq_max", c.c_uint32),
        ("n_rs_seq", c.c_uint32),
        ("n_outputs_max", c.c_uint32),
        ("n_outputs_max_per_seq", c.c_uint32),
        ("n_threads", c.c_int32),
        ("n_threads_batch", c.c_int32),
        ("ctx_type", c.c_int),
        ("rope_scaling_type", c.c_int),
        ("pooling_type", c.c_int),
        ("attention_type", c.c_int),
        ("flash_attn_type", c.c_int),
        ("rope_freq_base", c.c_float),
        ("rope_freq_scale", c.c_float),
        ("yarn_ext_factor", c.c_float),
        ("yarn_attn_factor", c.c_float),
        ("yarn_beta_fast", c.c_float),
        ("yarn_beta_slow", c.c_float),
        ("yarn_orig_ctx", c.c_uint32),
        ("defrag_thold", c.c_float),
        ("cb_eval", c.c_void_p),
        ("cb_eval_user_data", c.c_void_p),
        ("type_k", c.c_int),
        ("type_v", c.c_int),
        ("moe_cache_size", c.c_size_t),
        ("abort_callback", c.c_void_p),
        ("abort_callback_data", c.c_void_p),
        ("embeddings", c.c_bool),
        ("offload_kqv", c.c_bool),
        ("no_perf", c.c_bool),
        ("op_offload", c.c_bool),
        ("swa_full", c.c_bool),
        ("kv_unified", c.c_bool),
        ("samplers", c.c_void_p),
        ("n_samplers", c.c_size_t),
        ("ctx_other", c.c_void_p),
    ]


class ModelParams(c.Structure):
    """``llama_model_params``."""

    _fields_ = [
        ("devices", c.c_void_p),
        ("tensor_buft_overrides", c.c_void_p),
        ("n_gpu_layers", c.c_int32),
        ("split_mode", c.c_int),
        ("load_mode", c.c_int),
        ("lazy_mode", c.c_int),
        ("main_gpu", c.c_int32),
        ("tensor_split", c.c_void_p),
        ("progress_callback", c.c_void_p),
        ("progress_callback_user_data", c.c_void_p),
        ("kv_overrides", c.c_void_p),
        ("vocab_only", c.c_bool),
        ("check_tensors", c.c_bool),
        ("use_extra_bufts", c.c_bool),
        ("no_host", c.c_bool),
        ("no_alloc", c.c_bool),
        ("load_mtp", c.c_bool),
    ]


class LlamaBatch(c.Structure):
    """``llama_batch``: rows by token, position, sequence, and whether their logits are asked for."""

    _fields_ = [
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.c_void_p),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    ]


class GgmlTensor(c.Structure):
    """``ggml_tensor``, a node or leaf of a graph: ``ne`` elements and ``nb`` bytes between them, innermost axis first."""

    _fields_ = [
        ("type", c.c_int),
        ("buffer", c.c_void_p),
        ("ne", c.c_int64 * 4),
        ("nb", c.c_size_t * 4),
        ("op", c.c_int),
        ("op_params", c.c_int32 * 16),
        ("flags", c.c_int32),
        ("src", c.c_void_p * 10),
        ("view_src", c.c_void_p),
        ("view_offs", c.c_size_t),
        ("data", c.c_void_p),
        ("name", c.c_char * 64),
        ("extra", c.c_void_p),
        ("padding", c.c_char * 8),
    ]


class ChatMessage(c.Structure):
    """``llama_chat_message``."""

    _fields_ = [("role", c.c_char_p), ("content", c.c_char_p)]


class InitParams(c.Structure):
    """``ggml_init_params``."""

    _fields_ = [("mem_size", c.c_size_t), ("mem_buffer", c.c_void_p), ("no_alloc", c.c_bool)]


@dataclass(frozen=True)
class Structures:
    """The two structures that change between versions, as ctypes classes."""

    context: type[c.Structure] = ContextParams
    model: type[c.Structure] = ModelParams


_POINTER, _INT, _BOOL = c.c_void_p, c.c_int32, c.c_bool
_FUNCTIONS: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (_POINTER, _POINTER)),
    "llama_print_system_info": (c.c_char_p, ()),
    "llama_model_load_from_file": (_POINTER, (c.c_char_p, "model")),
    "llama_model_free": (None, (_POINTER,)),
    "llama_model_default_params": ("model", ()),
    "llama_context_default_params": ("context", ()),
    "llama_init_from_model": (_POINTER, (_POINTER, "context")),
    "llama_free": (None, (_POINTER,)),
    "llama_n_ctx": (c.c_uint32, (_POINTER,)),
    "llama_n_batch": (c.c_uint32, (_POINTER,)),
    "llama_n_ubatch": (c.c_uint32, (_POINTER,)),
    "llama_n_seq_max": (c.c_uint32, (_POINTER,)),
    "llama_n_threads": (_INT, (_POINTER,)),
    "llama_n_threads_batch": (_INT, (_POINTER,)),
    "llama_get_memory": (_POINTER, (_POINTER,)),
    "llama_memory_clear": (None, (_POINTER, _BOOL)),
    "llama_memory_seq_rm": (_BOOL, (_POINTER, _INT, _INT, _INT)),
    "llama_memory_seq_pos_max": (_INT, (_POINTER, _INT)),
    "llama_memory_seq_cp": (None, (_POINTER, _INT, _INT, _INT, _INT)),
    "llama_memory_seq_add": (None, (_POINTER, _INT, _INT, _INT, _INT)),
    "llama_state_seq_get_size": (c.c_size_t, (_POINTER, _INT)),
    "llama_state_seq_get_data": (c.c_size_t, (_POINTER, _POINTER, c.c_size_t, _INT)),
    "llama_state_seq_set_data": (c.c_size_t, (_POINTER, _POINTER, c.c_size_t, _INT)),
    "llama_decode": (_INT, (_POINTER, LlamaBatch)),
    "llama_get_logits_ith": (_POINTER, (_POINTER, _INT)),
    "llama_model_get_vocab": (_POINTER, (_POINTER,)),
    "llama_vocab_n_tokens": (_INT, (_POINTER,)),
    "llama_vocab_is_eog": (_BOOL, (_POINTER, _INT)),
    "llama_tokenize": (_INT, (_POINTER, c.c_char_p, _INT, _POINTER, _INT, _BOOL, _BOOL)),
    "llama_detokenize": (_INT, (_POINTER, _POINTER, _INT, _POINTER, _INT, _BOOL, _BOOL)),
    "llama_model_chat_template": (c.c_char_p, (_POINTER, c.c_char_p)),
    "llama_chat_apply_template": (
        _INT,
        (c.c_char_p, c.POINTER(ChatMessage), c.c_size_t, _BOOL, _POINTER, _INT),
    ),
    "llama_model_meta_val_str": (_INT, (_POINTER, c.c_char_p, _POINTER, c.c_size_t)),
    "llama_model_n_ctx_train": (_INT, (_POINTER,)),
    "llama_model_n_layer": (_INT, (_POINTER,)),
    "llama_model_n_swa": (_INT, (_POINTER,)),
    "llama_model_is_recurrent": (_BOOL, (_POINTER,)),
    "llama_model_is_hybrid": (_BOOL, (_POINTER,)),
    "llama_model_has_encoder": (_BOOL, (_POINTER,)),
    "llama_model_desc": (_INT, (_POINTER, _POINTER, c.c_size_t)),
    "ggml_init": (_POINTER, (InitParams,)),
    "ggml_free": (None, (_POINTER,)),
    "ggml_new_tensor_2d": (_POINTER, (_POINTER, c.c_int, c.c_int64, c.c_int64)),
    "ggml_set_name": (_POINTER, (_POINTER, c.c_char_p)),
    "ggml_mul_mat": (_POINTER, (_POINTER, _POINTER, _POINTER)),
    "ggml_view_1d": (_POINTER, (_POINTER, _POINTER, c.c_int64, c.c_size_t)),
    "ggml_tensor_overhead": (c.c_size_t, ()),
    "ggml_op_name": (c.c_char_p, (c.c_int,)),
    "ggml_type_name": (c.c_char_p, (c.c_int,)),
    "ggml_type_size": (c.c_size_t, (c.c_int,)),
    "ggml_blck_size": (c.c_int64, (c.c_int,)),
    "ggml_backend_buffer_is_host": (_BOOL, (_POINTER,)),
    "ggml_backend_tensor_get": (None, (_POINTER, _POINTER, c.c_size_t, c.c_size_t)),
}


class LlamaLibrary:
    """A loaded llama.cpp: its C functions as attributes, its structures, and the last lines of its own log.

    Raises LlamaLibraryRefused where the file does not load, or lacks a function.
    """

    def __init__(self, package: str, path: Path, structures: Structures | None = None) -> None:
        self.package, self.path = package, path
        # Where an assertion fails, ggml starts a debugger, whose lines would run over the answer.
        os.environ.setdefault("GGML_NO_BACKTRACE", "1")
        self.version = version(package) or "of unknown version"
        self.structures = structures or Structures()
        try:
            self._library = c.CDLL(str(path))
        except OSError as error:
            raise LlamaLibraryRefused(
                f"The library of {self.title} does not load ({' '.join(str(error).split())}); expected one for this system. Install "
                "the package again."
            ) from error
        named = {"model": self.structures.model, "context": self.structures.context}
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise LlamaLibraryRefused(
                    f"The library of {self.title} has no function {name}; expected llama.cpp's C interface as of build 11549. "
                    "Install a version of xllamacpp from 2026.10 on."
                )
            function.restype = named.get(result, result) if isinstance(result, str) else result
            function.argtypes = [named[each] if isinstance(each, str) else each for each in arguments]
            setattr(self, name, function)
        self._lines: deque[str] = deque(maxlen=40)

        def line(level: int, text: bytes | None, _: Any) -> None:
            if text and level >= 3:
                self._lines.append(text.decode(errors="replace"))

        log = _LOG_CALLBACK(line)
        self.llama_log_set(c.cast(log, c.c_void_p), None)
        # C holds no reference, and calls it also when this object is gone.
        _LOGS.append(log)
        self.llama_backend_init()

    def __getattr__(self, name: str) -> Any:
        """C functions, which ``__init__`` sets; only what is missing comes here."""
        raise AttributeError(name)

    @property
    def title(self) -> str:
        """Package and version."""
        return f"{self.package} {self.version}"

    def complaint(self) -> str:
        """What the library logged as warnings and errors since the last call, as a clause."""
        words = " ".join("".join(self._lines).split())
        self._lines.clear()
        return words[:300].strip() or "it gave no reason"

    def raw(self, name: str) -> Any:
        """A fresh, undeclared handle of a function."""
        return self._library[name]


def find_library() -> LlamaLibrary:
    """The library of the package xllamacpp, or of llama-cpp-python, which declares its own structures.

    Raises LlamaMissing where neither is installed.
    """
    spec = importlib.util.find_spec("xllamacpp")
    if spec is not None and spec.submodule_search_locations:
        # Found, not imported: the package's own Python side is not needed.
        for folder in spec.submodule_search_locations:
            for pattern in ("xllamacpp*.so", "xllamacpp*.pyd", "xllamacpp*.dylib"):
                for path in sorted(Path(folder).glob(pattern)):
                    return LlamaLibrary("xllamacpp", path)
    if importlib.util.find_spec("llama_cpp") is not None:
        own: Any = importlib.import_module("llama_cpp.llama_cpp")
        found = Structures(own.llama_context_params, own.llama_model_params)
        return LlamaLibrary("llama-cpp-python", Path(own._lib._name), found)
    raise LlamaMissing(
        "The engine llama.cpp needs the package xllamacpp, which is not installed; expected that or llama-cpp-python. "
        "Install it: pip install '.[llama]'."
    )
