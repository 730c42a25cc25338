"""Causal language models of Hugging Face transformers, in torch, as an engine: batches as ``generate`` runs them.

Needs the extra ``torch``. Importing this imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from importlib import import_module
from typing import Any

import numpy as np

from detdiff.engines.transformers.linear_sites import is_linear, torch_shapes
from detdiff.errors import CheckSubjectInvalid, EngineFailed, TorchMissing
from detdiff.probe import Probe, probe
from detdiff.probe.sweep import work
from detdiff.scenario import Schedule
from detdiff_kernels.rounding import DTYPES

from .generation import EngineRequest, Generation
from .torch_taps import Taps

SEEDS = 2  # of the probes
BUDGET = 1 << 38  # multiplications of one sweep; a second or a few
LARGE = 1 << 22
"""Weights of a linear site that is not probed unless it is asked for: a head takes longer than all others together."""


class TransformersEngine:
    """A causal language model of transformers: static batches, padded on the left, decoded greedily by its own ``generate``.

    ``model`` is what ``AutoModelForCausalLM.from_pretrained`` gives, ``tokenizer`` what turns texts into its token ids, where
    prompts are texts. With ``taps`` every module that computes rows is a site, its inputs and outputs kept as a digest a row.

    Raises TorchMissing without torch, and CheckSubjectInvalid for a model that does not generate.
    """

    def __init__(
        self, model: Any, tokenizer: Any = None, *, taps: bool = True, name: str | None = None
    ) -> None:
        self._torch = _torch()
        if not (callable(getattr(model, "generate", None)) and hasattr(model, "named_modules")):
            raise CheckSubjectInvalid(
                f"A {type(model).__name__} is no causal language model of transformers; expected what "
                "AutoModelForCausalLM.from_pretrained gives. Give that, or write an engine of your own."
            )
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name = (
            name
            or str(getattr(model, "name_or_path", "") or type(model).__name__).rstrip("/").rpartition("/")[2]
        )
        self.vocab_size = int(model.config.vocab_size)
        self._taps = taps

    def encode(self, text: str) -> list[int]:
        """A text's token ids. Raises CheckSubjectInvalid without a tokenizer."""
        if self.tokenizer is None:
            raise CheckSubjectInvalid(
                "Prompts are texts, and the engine was made without a tokenizer. Give one: "
                "TransformersEngine(model, tokenizer), or give token ids."
            )
        return [int(token) for token in self.tokenizer(text)["input_ids"]]

    def generate(self, requests: Sequence[EngineRequest], schedule: Schedule) -> list[Generation]:
        """All requests in one batch. Raises EngineFailed for schedule continuous, which ``generate`` does not have."""
        if schedule.kind != "static":
            raise EngineFailed(
                f"The generate of transformers runs one batch from start to end, and schedule {schedule.kind} was asked for. "
                "Ask for static:N."
            )
        torch = self._torch
        longest = max(len(each.tokens) for each in requests)
        padding = [longest - len(each.tokens) for each in requests]
        ends, pad = self._ends()
        ids = torch.tensor([[pad] * n + list(each.tokens) for n, each in zip(padding, requests, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (longest - n) for n in padding])
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        taps = Taps(torch, self.model, padding) if self._taps else None
        with torch.inference_mode():
            if taps is None:
                done = self._generate(ids, mask, requests, pad)
            else:
                with taps:
                    done = self._generate(ids, mask, requests, pad)
            scores = torch.stack([torch.log_softmax(step.float(), dim=-1) for step in done.logits], dim=1)
            new = done.sequences[:, longest:]
            chosen = scores.gather(2, new[:, :, None])[:, :, 0].cpu().numpy()
        found = []
        for row, request in enumerate(requests):
            tokens = _until(new[row].tolist()[: request.max_tokens], ends)
            # What the last token would have led to is no row of this request.
            rows = len(request.tokens) + len(tokens) - 1
            found.append(
                Generation(
                    tokens,
                    np.ascontiguousarray(chosen[row, : len(tokens)]),
                    {} if taps is None else taps.of(row, rows),
                )
            )
        return found

    def kernels(self, rows: Iterable[int], sites: Set[str] | None = None) -> Iterator[Probe]:
        """A probe of each distinct linear shape, with the model's own weights: those of ``sites``, where any is linear, else
        all but large ones. With ``sites`` None, all. Fewer ``rows`` where the weights are many."""
        swept = tuple(rows)
        for shape in torch_shapes(self.model, sites, self.name) if self._plain() else ():
            asked = sites is None or not sites.isdisjoint(shape.sites)
            if shape.dtype in DTYPES and (asked or shape.weights <= LARGE):
                with self._torch.inference_mode():
                    yield probe(shape, rows=affordable(swept, shape.weights), seeds=SEEDS, timed=False)

    def _plain(self) -> bool:
        """On the CPU, where a probe runs, and with a linear layer at all."""
        return self.model.device.type == "cpu" and any(map(is_linear, self.model.modules()))

    def _generate(self, ids: Any, mask: Any, requests: Sequence[EngineRequest], pad: int) -> Any:
        return self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(each.max_tokens for each in requests),
            do_sample=False,
            num_beams=1,
            pad_token_id=pad,
            return_dict_in_generate=True,
            output_logits=True,
        )

    def _ends(self) -> tuple[set[int], int]:
        """The tokens that end a text, and the one that pads."""
        settings = self.model.generation_config
        ends = settings.eos_token_id
        listed = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
        pad = settings.pad_token_id
        return set(listed), int(pad) if pad is not None else int(listed[0]) if listed else 0


def affordable(rows: tuple[int, ...], weights: int) -> tuple[int, ...]:
    """Numbers of rows whose sweep takes no more than ``BUDGET``: the last two and what else fits, evenly thinned out."""
    kept = rows
    while SEEDS * weights * work(kept) > BUDGET and len(kept) > 4:
        kept = (*kept[:-2][::2], *kept[-2:])
    return kept


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    """Up to the first end, which is generated like any other token."""
    at = next((place for place, token in enumerate(tokens) if token in ends), None)
    return tokens if at is None else tokens[: at + 1]


def _torch() -> Any:
    try:
        import_module("transformers")
        return import_module("torch")
    except ImportError as error:
        raise TorchMissing(
            f"A TransformersEngine needs torch and transformers ({' '.join(str(error).split())}). Install them: "
            "pip install '.[torch]'."
        ) from error
