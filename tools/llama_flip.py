#!/usr/bin/env python3
"""Search a GGUF model for prompts whose answer flips when other requests share their batches, on llama.cpp's own kernels.

    python tools/llama_flip.py SMOL-F16.gguf
    python tools/llama_flip.py SMOL-F16.gguf --tokens 256 --neighbours 48

Every prompt of the list is decoded alone, and then all of them together, one row each in every batch. With --neighbours N
they are together for N tokens only, and alone after that: a flip from there on was inherited through the cache. Prints the
flips, shortest first, and for prompts without one the step at which the two highest logits came closest. Nothing is
recorded, so that 32 prompts of 256 tokens take some minutes on one thread with SmolLM2-135M in F16. What flips depends on
the processor; where none does, the margins say how near it was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from detdiff.engines.base import highest
from detdiff.engines.llama_cpp.context import BatchRow, ContextSettings, LlamaContext, LlamaModel
from detdiff.engines.llama_cpp.layout import checked_library
from detdiff.errors import DetdiffError

PROMPTS = (
    "Tell me about the history of the lighthouse.",
    "Why do leaves change colour in autumn?",
    "Write a short story about a dog who finds a map.",
    "Explain how a bicycle stays upright.",
    "What should I pack for a week in the mountains?",
    "Describe the taste of an orange to someone who has never eaten one.",
    "Write a letter to a friend you have not seen for ten years.",
    "How does a refrigerator work?",
    "Give me a plan for learning to play the guitar.",
    "What was daily life like in ancient Rome?",
    "Write a poem about the sea in winter.",
    "Explain the difference between weather and climate.",
    "How do I bake bread without yeast?",
    "Tell me a fable about a fox and a clock.",
    "What makes a good teacher?",
    "Describe a city that is built on a bridge.",
    "How do bees find their way home?",
    "Write a dialogue between the sun and the moon.",
    "What are the advantages of travelling by train?",
    "Explain recursion to a child.",
    "Describe your perfect breakfast.",
    "How did people tell the time before clocks?",
    "Write a review of a restaurant that serves only soup.",
    "What would happen if the moon disappeared?",
    "Explain why the sky is blue.",
    "Give advice to someone who is moving to a new country.",
    "Write the opening of a detective novel set in a library.",
    "How do volcanoes form?",
    "What is the role of music in film?",
    "Describe a market on a rainy morning.",
    "How can a small garden be made to look larger?",
    "Write a speech for the retirement of a postman.",
)
CELLS = 256


@dataclass(frozen=True)
class Step:
    """The two highest logits of a row, and their tokens."""

    token: int
    second: int
    margin: float

    @classmethod
    def of(cls, logits: np.ndarray) -> Step:
        (first, second), (most, next_) = highest(logits, 2)
        return cls(int(first), int(second), float(most - next_))


@dataclass(frozen=True)
class PromptAnswers:
    """A prompt's answers: alone, and beside the other prompts."""

    prompt: str
    alone: tuple[Step, ...]
    beside: tuple[Step, ...]

    @property
    def flip(self) -> int | None:
        """The first token that differs."""
        pairs = zip(self.alone, self.beside, strict=True)
        return next((n for n, (a, b) in enumerate(pairs) if a.token != b.token), None)

    @property
    def closest(self) -> int:
        """The step with the smallest margin, before any flip."""
        return min(range(self.flip or len(self.alone)), key=lambda n: self.alone[n].margin)

    @property
    def shift(self) -> float:
        """How much a margin moved at most while the top two were the same, before any flip."""
        pairs = list(zip(self.alone, self.beside, strict=True))[: self.flip]
        return max(
            (abs(a.margin - b.margin) for a, b in pairs if (a.token, a.second) == (b.token, b.second)),
            default=0.0,
        )


class FlipSearch:
    """Prompts in one context, a stream each."""

    def __init__(
        self,
        model: LlamaModel,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        progress: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.prompts, self.tokens, self._progress = prompts, tokens, progress
        longest = max(map(len, prompts)) + tokens
        settings = ContextSettings(-(-longest // CELLS) * CELLS * len(prompts), len(prompts))
        self._context = LlamaContext(model, settings)

    def alone(self) -> list[list[Step]]:
        """The steps of each prompt in batches of its own."""
        found = []
        for number in range(len(self.prompts)):
            steps = [self._prompt(number)]
            for _ in range(self.tokens - 1):
                steps += self._rows([(number, steps)])
            self._context.remove(number)
            found.append(steps)
            self._progress(f"alone: {number + 1} of {len(self.prompts)} prompts")
        return found

    def beside(self, neighbours: int) -> list[list[Step]]:
        """The steps of each prompt with a row of every prompt in each batch, for ``neighbours`` tokens."""
        found = [[self._prompt(number)] for number in range(len(self.prompts))]
        for step in range(1, self.tokens):
            rows = list(enumerate(found))
            batches = [rows] if step <= neighbours else [[row] for row in rows]
            made = [each for batch in batches for each in self._rows(batch)]
            for steps, each in zip(found, made, strict=True):
                steps.append(each)
            if step % 32 == 0:
                self._progress(f"beside others: {step} of {self.tokens} tokens")
        for number in range(len(self.prompts)):
            self._context.remove(number)
        return found

    def _prompt(self, number: int) -> Step:
        prompt = self.prompts[number]
        self._context.decode(
            [BatchRow(token, n, number, n == len(prompt) - 1) for n, token in enumerate(prompt)]
        )
        return Step.of(self._context.logits(len(prompt) - 1))

    def _rows(self, rows: Sequence[tuple[int, Sequence[Step]]]) -> list[Step]:
        """The next row of each of these prompts, in one batch."""
        self._context.decode(
            [
                BatchRow(steps[-1].token, len(self.prompts[number]) + len(steps) - 1, number, True)
                for number, steps in rows
            ]
        )
        return [Step.of(self._context.logits(n)) for n in range(len(rows))]


def encoded(model: LlamaModel, text: str) -> list[int]:
    """A user's message in the model's chat template."""
    return model.encode(model.chat(text), special=False)


def paired(
    texts: Sequence[str], alone: Sequence[Sequence[Step]], beside: Sequence[Sequence[Step]]
) -> list[PromptAnswers]:
    """Each prompt's two answers."""
    return [PromptAnswers(text, tuple(a), tuple(b)) for text, a, b in zip(texts, alone, beside, strict=True)]


def listed(model: LlamaModel, found: Sequence[PromptAnswers]) -> str:
    """The flips, shortest first, then the prompts without one, closest margin first."""
    lines = []

    def text(token: int) -> str:
        return f"{token} {model.decode([token])!r}"

    flips = sorted((each for each in found if each.flip is not None), key=lambda each: each.flip or 0)
    lines.append(f"{len(flips)} of {len(found)} prompts flip")
    for each in flips:
        at = each.flip
        assert at is not None
        a, b = each.alone[at], each.beside[at]
        lines.append(
            f"  token {at}: {text(a.token)} alone (margin {a.margin:.6f}), {text(b.token)} beside others (margin "
            f"{b.margin:.6f}); {'the top two swapped' if a.second == b.token else 'the top two are others'}; {each.prompt}"
        )
    rest = sorted(
        (each for each in found if each.flip is None), key=lambda each: each.alone[each.closest].margin
    )
    lines.append("closest margins of the others")
    for each in rest:
        step = each.alone[each.closest]
        lines.append(
            f"  token {each.closest}: {text(step.token)} before {text(step.second)} by {step.margin:.6f}; margins moved by "
            f"{each.shift:.6f} at most; {each.prompt}"
        )
    return "\n".join(lines)


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help="how many of the list")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--neighbours", type=int, nargs="+", help="tokens that are decoded together (all)")
    arguments = parser.parse_args()
    try:
        model = LlamaModel(checked_library(), arguments.model)
        texts = PROMPTS[: arguments.prompts]
        prompts = [encoded(model, text) for text in texts]
        search = FlipSearch(
            model, prompts, arguments.tokens, lambda line: print(line, file=sys.stderr, flush=True)
        )
        alone = search.alone()
        for neighbours in arguments.neighbours or [arguments.tokens]:
            found = paired(texts, alone, search.beside(neighbours))
            print(f"beside the others for {neighbours} tokens")
            print(listed(model, found), flush=True)
    except DetdiffError as error:
        print(f"llama_flip: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
