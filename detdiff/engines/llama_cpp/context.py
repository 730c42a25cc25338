"""A GGUF model that llama.cpp has loaded, and a context of it: batches of rows in, logits out.

llama.cpp takes a batch of (token, position, sequence) rows in one call, and computes the logits of those that ask for them.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from detdiff.errors import EngineRefuses, LlamaFailed, LlamaModelRefused

from .library import ChatMessage, LlamaBatch, LlamaLibrary

if TYPE_CHECKING:
    from .nodes import NodeRecorder

Float32 = NDArray[np.float32]
CACHE_TYPES: Final = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2}
"""Types of cache entries by name; numbers of ``ggml_type``."""
FLASH: Final = {"auto": -1, "off": 0, "on": 1}


class BatchRow(NamedTuple):
    """A row of a batch; ``answers``: its logits are asked for."""

    token: int
    position: int
    sequence: int
    answers: bool = False


@dataclass(frozen=True)
class ContextSettings:
    """What a context is made with, in llama.cpp's words: ``cells`` of the cache (``n_ctx``), ``sequences`` at most, rows of a graph
    (``ubatch``), and whether sequences share one cache (``unified``)."""

    cells: int
    sequences: int
    threads: int = 1
    flash_attention: str = "auto"
    unified: bool = False
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    ubatch: int = 512


class LlamaModel:
    """A loaded model. Raises LlamaModelRefused for what llama.cpp does not load."""

    def __init__(self, library: LlamaLibrary, path: Path) -> None:
        self.library, self.path = library, path
        settings = library.llama_model_default_params()
        # Values are read where they lie, which is the memory of the host.
        settings.n_gpu_layers = 0
        library.complaint()
        self.handle = library.llama_model_load_from_file(str(path).encode(), settings)
        if not self.handle:
            raise LlamaModelRefused(
                f"llama.cpp does not load {path} ({library.complaint()}); expected a GGUF file of a model that {library.title} knows. "
                "Name another file, or install a newer version."
            )
        self._vocabulary = library.llama_model_get_vocab(self.handle)
        self.vocabulary = int(library.llama_vocab_n_tokens(self._vocabulary))
        self.layers = int(library.llama_model_n_layer(self.handle))
        self.context = int(library.llama_model_n_ctx_train(self.handle))
        self.window = int(library.llama_model_n_swa(self.handle))
        refused = next(
            (
                what
                for what, found in (
                    ("keeps a recurrent state", library.llama_model_is_recurrent(self.handle)),
                    ("keeps recurrent states in some layers", library.llama_model_is_hybrid(self.handle)),
                    ("has an encoder", library.llama_model_has_encoder(self.handle)),
                )
                if found
            ),
            None,
        )
        if refused is not None:
            self.close()
            raise LlamaModelRefused(
                f"The model {path.name} {refused}; the engine llama.cpp traces decoders that keep keys and values. Name such a model."
            )

    def close(self) -> None:
        """Free the model; its contexts must be closed."""
        if self.handle:
            self.library.llama_model_free(self.handle)
            self.handle = None

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.close()

    def metadata(self, key: str) -> str | None:
        """A value of the file's metadata as text."""
        buffer = c.create_string_buffer(1 << 16)
        length = self.library.llama_model_meta_val_str(self.handle, key.encode(), buffer, len(buffer))
        return None if length < 0 else buffer.value.decode(errors="replace")

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text, with what the model puts before and after where ``special``."""
        data = text.encode()
        size = len(data) + 8
        for _ in range(2):
            found = (c.c_int32 * size)()
            count = self.library.llama_tokenize(
                self._vocabulary, data, len(data), c.addressof(found), size, special, True
            )
            if count >= 0:
                return list(found[:count])
            size = -count
        raise LlamaFailed(
            f"llama.cpp cannot tokenise a text of {len(data)} bytes with {self.path.name}; expected token ids. Give token ids instead."
        )

    def chat(self, text: str) -> str:
        """A user's message in the model's chat template, with the opening of the answer. Raises EngineRefuses without one that
        llama.cpp knows."""
        template = self.library.llama_model_chat_template(self.handle, None)
        message = ChatMessage(b"user", text.encode())
        size = len(text.encode()) * 2 + 4096
        buffer = c.create_string_buffer(size)
        count = -1
        if template:
            count = self.library.llama_chat_apply_template(template, c.byref(message), 1, True, buffer, size)
        if count < 0 or count > size:
            raise EngineRefuses(
                f"The model {self.path.name} has no chat template that llama.cpp knows; expected one. Give the prompt as plain text."
            )
        return buffer.raw[:count].decode(errors="replace")

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        given = (c.c_int32 * max(1, len(tokens)))(*tokens)
        size = 32 * len(tokens) + 64
        for _ in range(2):
            text = c.create_string_buffer(size)
            count = self.library.llama_detokenize(
                self._vocabulary, c.addressof(given), len(tokens), text, size, False, True
            )
            if count >= 0:
                return text.raw[:count].decode(errors="replace")
            size = -count
        return ""

    def ends(self, token: int) -> bool:
        """Whether a token ends an answer."""
        return bool(self.library.llama_vocab_is_eog(self._vocabulary, token))


class LlamaContext:
    """A context: the cache, and what computes. ``callback`` is (function, user data), addresses, of the scheduler's eval callback.

    Raises LlamaModelRefused where llama.cpp makes none.
    """

    def __init__(
        self, model: LlamaModel, settings: ContextSettings, callback: tuple[int, int] | None = None
    ) -> None:
        self.model, self.settings, self._library = model, settings, model.library
        given = self._library.llama_context_default_params()
        for name, value in (
            ("n_ctx", settings.cells), ("n_seq_max", settings.sequences), ("n_batch", settings.cells),
            ("n_ubatch", settings.ubatch), ("n_threads", settings.threads), ("n_threads_batch", settings.threads),
            ("flash_attn_type", FLASH[settings.flash_attention]), ("kv_unified", settings.unified),
            ("type_k", CACHE_TYPES[settings.cache_type_k]), ("type_v", CACHE_TYPES[settings.cache_type_v]),
            ("offload_kqv", False), ("op_offload", False), ("no_perf", True), ("swa_full", True),
        ):  # fmt: skip
            setattr(given, name, value)
        if callback is not None:
            given.cb_eval, given.cb_eval_user_data = callback
        self._library.complaint()
        self.handle = self._library.llama_init_from_model(model.handle, given)
        if not self.handle:
            raise LlamaModelRefused(
                f"llama.cpp makes no context of {settings.cells} cells for {model.path.name} ({self._library.complaint()}); expected one. "
                "Give settings that this model can have, ask for fewer or shorter requests at a time, or free some memory."
            )
        self.memory = self._library.llama_get_memory(self.handle)
        self.cells_of_stream = int(self._library.llama_n_ctx(self.handle))
        if not settings.unified:
            self.cells_of_stream //= settings.sequences
        self._size = 0

    @property
    def split(self) -> bool:
        """Whether each sequence has a stream of its own."""
        return not self.settings.unified and self.settings.sequences > 1

    def close(self) -> None:
        if self.handle:
            self._library.llama_free(self.handle)
            self.handle = None

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.close()

    @property
    def most_rows(self) -> int:
        """Rows of a batch at most. llama.cpp ends the process at more."""
        return int(self._library.llama_n_batch(self.handle))

    def check_rows(self, count: int) -> None:
        """Raises LlamaFailed for a batch of more rows than `most_rows`."""
        if count > self.most_rows:
            raise LlamaFailed(
                f"The next batch has {count} rows, and the cache has {self.most_rows} cells; expected a cell for each row at least. Leave "
                "the setting context out or raise it, or lower active, prefill_chunk or row_budget."
            )

    def decode(self, rows: Sequence[BatchRow]) -> None:
        """Compute a batch. Raises LlamaFailed where the cache has no room for it, or llama.cpp gives up."""
        count = len(rows)
        self.check_rows(count)
        if count > self._size:
            self._room(count)
        batch = self._batch
        batch.n_tokens = count
        for n, (token, position, sequence, answers) in enumerate(rows):
            batch.token[n], batch.pos[n], batch.logits[n] = token, position, answers
            self._sequences[n][0] = sequence
        self._library.complaint()
        result = self._library.llama_decode(self.handle, batch)
        if result != 0:
            reason = "the cache has no room left" if result == 1 else self._library.complaint()
            raise LlamaFailed(
                f"llama.cpp could not compute a batch of {count} rows (llama_decode gave {result}: {reason}); expected 0. Ask for fewer "
                "or shorter requests at a time."
            )

    def _room(self, count: int) -> None:
        self._size = count
        self._sequences = [(c.c_int32 * 1)() for _ in range(count)]
        pointer: Any = c.POINTER(c.c_int32)
        self._arrays = (
            (c.c_int32 * count)(), (c.c_int32 * count)(), (c.c_int32 * count)(*[1] * count),
            (pointer * count)(*[c.cast(each, pointer) for each in self._sequences]), (c.c_int8 * count)(),
        )  # fmt: skip
        token, position, counts, sequences, answers = self._arrays
        self._batch = LlamaBatch(0, token, None, position, counts, sequences, answers)

    def logits(self, row: int) -> Float32:
        """The logits of a row of the last batch, float32 [vocabulary], valid until the next one."""
        address = self._library.llama_get_logits_ith(self.handle, row)
        if not address:
            raise LlamaFailed(
                f"llama.cpp gives no logits for row {row}, which asked for them; expected some. Report it."
            )
        kind: Any = c.c_float * self.model.vocabulary
        return np.frombuffer(kind.from_address(address), np.float32)

    def choose(self, logits: Float32) -> int:
        """The token of the highest logit, the first of equal ones."""
        return int(np.argmax(logits))

    def remove(self, sequence: int, start: int = 0, end: int = -1) -> bool:
        """Take a sequence's positions from ``start`` to before ``end`` (-1: all) out of the cache."""
        return bool(self._library.llama_memory_seq_rm(self.memory, sequence, start, end))

    def held(self, sequence: int) -> int:
        """How many positions of a sequence the cache says that it has: the position that its next row should have."""
        return int(self._library.llama_memory_seq_pos_max(self.memory, sequence)) + 1

    def state(self, sequence: int) -> bytes:
        """A sequence's cache as llama.cpp writes it to a file."""
        size = self._library.llama_state_seq_get_size(self.handle, sequence)
        buffer = c.create_string_buffer(size)
        written = self._library.llama_state_seq_get_data(self.handle, buffer, size, sequence)
        return buffer.raw[:written]

    def put_state(self, sequence: int, state: bytes) -> None:
        """Put a sequence's cache back. Raises LlamaFailed where llama.cpp does not take it."""
        buffer = c.create_string_buffer(state, len(state))
        if self._library.llama_state_seq_set_data(self.handle, buffer, len(state), sequence) != len(state):
            raise LlamaFailed(
                f"llama.cpp does not take {len(state)} bytes as the cache of sequence {sequence} ({self._library.complaint()}); expected "
                "what it wrote itself."
            )


class ContextFault:
    """A fault that is injected into a run, for tests: it may stand between llama.cpp's scheduler and what records its nodes, and
    change what is asked of the context. ``model`` says whose: ``target`` or ``draft``."""

    model = "target"

    def callback(self, function: int, user_data: int) -> tuple[int, int]:
        """What the context is given for the callback (``function``, ``user_data``), addresses."""
        return function, user_data

    def install(self, context: LlamaContext, nodes: NodeRecorder) -> None:
        """Change a run's context before its first batch. ``nodes`` records it."""
