"""Train the two models that detdiff ships: `builtin` (the target) and `builtin-draft` (a smaller draft).

Needs, beyond the project's own environment: PyTorch (CPU build, 2.13 was used; no other extra) and Debian's
package `bible-kjv`, whose command `bible` prints the training text. A saved copy of that output does too:

    bible -f 'gen1:1-rev22:21' > kjv.txt
    python tools/train_builtin.py --text kjv.txt --out detdiff/engines/mlx/builtin

Every random choice comes from --seed. The same seed, thread count, PyTorch and processor type give the same
bytes; another thread count or processor sums in another order and gives other weights of equal quality.
One thread of a server processor takes about half an hour.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch  # type: ignore[import-not-found]
import torch.nn.functional as F  # type: ignore[import-not-found]
from safetensors.torch import save as serialise
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS = "<s>", "</s>"
VOCABULARY = 1280
CONTEXT = 1024
NORM_EPS = 1e-5
ROPE_BASE = 10000.0
HEAD_DIM = 32
CHAPTERS = 1189
HELD_OUT = 25  # one chapter in so many is kept for validation

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of one model and how long it trains. `steps` counts optimiser steps of 4096 tokens."""

    hidden: int
    layers: int
    mlp: int
    heads: int
    kv_heads: int
    steps: int


SHAPES = {
    "builtin": Shape(hidden=192, layers=4, mlp=416, heads=6, kv_heads=2, steps=1600),
    "builtin-draft": Shape(hidden=96, layers=2, mlp=192, heads=3, kv_heads=1, steps=2400),
}


# Text and tokens


def read_chapters(text: str) -> list[str]:
    """Split `bible -f` output into chapters, one verse a line, without the verse references."""
    chapters: dict[str, list[str]] = {}
    for line in text.splitlines():
        found = re.match(r"(\w+):\d+ (.*)", line)
        if found:
            chapters.setdefault(found[1], []).append(found[2].strip())
    return ["\n".join(verses) + "\n" for verses in chapters.values()]


def split_chapters(chapters: list[str]) -> tuple[list[str], list[str]]:
    """Return (training, held out) chapters."""
    kept = [c for i, c in enumerate(chapters) if i % HELD_OUT != HELD_OUT // 2]
    return kept, chapters[HELD_OUT // 2 :: HELD_OUT]


def train_tokenizer(chapters: list[str]) -> Tokenizer:
    """Byte-level BPE: it can write any prompt, whatever the training text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(chapters, trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


class Windows:
    """Random windows over the training text; each opens with BOS and goes on from the start of a verse."""

    def __init__(self, tokenizer: Tokenizer, chapters: list[str], seed: int) -> None:
        self.bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
        newline = tokenizer.encode("\n", add_special_tokens=False).ids[0]
        ids = [t for c in chapters for t in (*tokenizer.encode(c).ids, eos)]
        self.stream = torch.tensor(ids)
        opens = (self.stream == newline) | (self.stream == self.bos)
        opens[:-1] &= self.stream[1:] != eos
        self.opens = opens.nonzero().flatten()
        self.random = torch.Generator().manual_seed(seed)

    def draw(self, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (inputs, targets), int64 [batch, length]."""
        usable = self.opens[self.opens + length < len(self.stream)]
        starts = usable[torch.randint(len(usable), (batch,), generator=self.random)]
        rows = self.stream[starts[:, None] + torch.arange(length + 1)]
        rows[:, 0] = self.bos
        return rows[:, :-1], rows[:, 1:]

    def draw_loops(self, batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (inputs, targets, penalised): windows that fall into a loop of 2 to 40 tokens.

        `penalised` (bool) marks the targets that go on with the loop after it can be recognised as one.
        """
        inputs, targets = self.draw(batch, length)
        rows = torch.cat((inputs, targets[:, -1:]), dim=1)
        period = torch.randint(2, 41, (batch, 1), generator=self.random)
        cut = period + torch.randint(1, length // 2 - 40, (batch, 1), generator=self.random)
        place = torch.arange(length + 1)[None]
        rows = rows.gather(1, torch.where(place < cut, place, cut - period + (place - cut) % period))
        return rows[:, :-1], rows[:, 1:], (place >= cut + period.clamp(max=12))[:, 1:]


# Model: llama as mlx-lm reads it, on a dictionary with the file's own names


def new_weights(shape: Shape, seed: int) -> Weights:
    random = torch.Generator().manual_seed(seed)

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=random) * scale

    wide, kv = shape.heads * HEAD_DIM, shape.kv_heads * HEAD_DIM
    fan_in = shape.hidden**-0.5
    weights = {"model.embed_tokens.weight": normal(VOCABULARY, shape.hidden, 0.05)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        weights[at + "input_layernorm.weight"] = torch.ones(shape.hidden)
        weights[at + "self_attn.q_proj.weight"] = normal(wide, shape.hidden, fan_in)
        weights[at + "self_attn.k_proj.weight"] = normal(kv, shape.hidden, fan_in)
        weights[at + "self_attn.v_proj.weight"] = normal(kv, shape.hidden, fan_in)
        weights[at + "self_attn.o_proj.weight"] = torch.zeros(shape.hidden, wide)
        weights[at + "post_attention_layernorm.weight"] = torch.ones(shape.hidden)
        weights[at + "mlp.gate_proj.weight"] = normal(shape.mlp, shape.hidden, fan_in)
        weights[at + "mlp.up_proj.weight"] = normal(shape.mlp, shape.hidden, fan_in)
        weights[at + "mlp.down_proj.weight"] = torch.zeros(shape.hidden, shape.mlp)
    weights["model.norm.weight"] = torch.ones(shape.hidden)
    return weights


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of float32 [batch, heads, length, HEAD_DIM]."""
    frequency = ROPE_BASE ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angle = torch.outer(torch.arange(x.shape[-2]).float(), frequency)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), dim=-1)


def logits_of(weights: Weights, shape: Shape, tokens: torch.Tensor) -> torch.Tensor:
    """Return float32 [batch, length, VOCABULARY] for int64 tokens [batch, length]."""
    batch, length = tokens.shape

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weights[f"model.{name}.weight"])

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (shape.hidden,), weights[f"model.{name}.weight"], NORM_EPS)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.view(batch, length, -1, HEAD_DIM).transpose(1, 2)

    x = F.embedding(tokens, weights["model.embed_tokens.weight"])
    for layer in range(shape.layers):
        at = f"layers.{layer}."
        y = norm(at + "input_layernorm", x)
        q = rotate(heads(linear(at + "self_attn.q_proj", y)))
        k = rotate(heads(linear(at + "self_attn.k_proj", y)))
        v = heads(linear(at + "self_attn.v_proj", y))
        share = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(at + "self_attn.o_proj", y.transpose(1, 2).reshape(batch, length, -1))
        y = norm(at + "post_attention_layernorm", x)
        y = F.silu(linear(at + "mlp.gate_proj", y)) * linear(at + "mlp.up_proj", y)
        x = x + linear(at + "mlp.down_proj", y)
    return linear("embed_tokens", norm("norm", x))


# Training


def schedule(steps: int) -> Iterator[tuple[float, int, int]]:
    """Yield (learning rate factor, batch, length) a step: warm up, hold, decay to zero.

    Most steps read short windows, which are cheap; the last eighth reads the full context, so that
    every position the model may be asked for has been trained.
    """
    for step in range(steps):
        length = 256 if step < 0.875 * steps else CONTEXT
        factor = min((step + 1) / 60, 1.0, (steps - step) / (0.6 * steps))
        yield factor, 4096 // length, length


def make_optimisers(weights: Weights) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers; Adam for the embedding and the norms."""
    for w in weights.values():
        w.requires_grad_()
    inner = [w for name, w in weights.items() if "layers" in name and w.ndim == 2]
    norms = [w for w in weights.values() if w.ndim == 1]
    adam = [
        {"params": [weights["model.embed_tokens.weight"]], "lr": 4e-3, "weight_decay": 0.01},
        {"params": norms, "lr": 4e-3, "weight_decay": 0.0},
    ]
    return [
        torch.optim.Muon(inner, lr=0.02, weight_decay=0.1, momentum=0.95, nesterov=True),
        torch.optim.AdamW(adam, betas=(0.9, 0.98), fused=True),
    ]


def loop_loss(weights: Weights, shape: Shape, windows: Windows) -> torch.Tensor:
    """Unlikelihood of going on with a loop: without it greedy text of so small a model repeats one phrase."""
    inputs, targets, penalised = windows.draw_loops(2, 256)
    logits = logits_of(weights, shape, inputs).float()
    p = logits.softmax(-1).gather(-1, targets[..., None])[..., 0]
    return -torch.log1p(-p[penalised].clamp(max=0.999)).mean()


def train(shape: Shape, windows: Windows, seed: int) -> Weights:
    weights = new_weights(shape, seed)
    optimisers = make_optimisers(weights)
    rates = [(group, group["lr"]) for o in optimisers for group in o.param_groups]
    started = time.monotonic()
    for step, (factor, batch, length) in enumerate(schedule(shape.steps)):
        for group, rate in rates:
            group["lr"] = rate * factor
        inputs, targets = windows.draw(batch, length)
        with torch.autocast("cpu", torch.bfloat16):
            logits = logits_of(weights, shape, inputs).float()
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            if step >= shape.steps // 3:
                loss = loss + loop_loss(weights, shape, windows)
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
            optimiser.zero_grad()
        if step % 100 == 99:
            print(f"step {step + 1}  loss {loss.item():.3f}  {time.monotonic() - started:.0f} s", flush=True)
    return {name: w.detach().to(torch.bfloat16) for name, w in weights.items()}


def perplexity(
    weights: Weights, shape: Shape, tokenizer: Tokenizer, chapters: list[str]
) -> tuple[float, float]:
    """Return (perplexity per token, bits per character) over the chapters, each from its start."""
    full = {name: w.float() for name, w in weights.items()}
    nats, tokens, characters = 0.0, 0, 0
    with torch.no_grad():
        for chapter in chapters:
            ids = torch.tensor(tokenizer.encode(chapter).ids[: CONTEXT + 1])
            logits = logits_of(full, shape, ids[None, :-1])[0]
            nats += F.cross_entropy(logits, ids[1:], reduction="sum").item()
            tokens += len(ids) - 1
            characters += len(tokenizer.decode(ids.tolist()))
    return math.exp(nats / tokens), nats / characters / math.log(2)


# Model directory


def config_of(shape: Shape, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(EOS),
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "max_position_embeddings": CONTEXT,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_BASE,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY,
    }


def save(path: Path, shape: Shape, tokenizer: Tokenizer, weights: Weights) -> None:
    path.mkdir(parents=True, exist_ok=True)
    config = config_of(shape, tokenizer)
    files = {
        "config.json": config,
        "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id")},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    tokenizer.save(str(path / "tokenizer.json"), pretty=False)
    (path / "model.safetensors").write_bytes(serialise(weights, metadata={"format": "pt"}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="saved output of the command `bible`; default: run it")
    parser.add_argument("--out", type=Path, required=True, help="directory for the model directories")
    parser.add_argument("--only", choices=sorted(SHAPES), help="train one of the two")
    parser.add_argument("--seed", type=int, default=1611)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    if not args.text and not shutil.which("bible"):
        parser.error("there is no command `bible`: install Debian's package bible-kjv, or give --text")
    if args.text:
        text = args.text.read_text(encoding="utf-8")
    else:
        text = subprocess.check_output(["bible", "-f", "gen1:1-rev22:21"], text=True)
    chapters = read_chapters(text)
    if len(chapters) != CHAPTERS:
        parser.error(f"the text has {len(chapters)} chapters, expected the {CHAPTERS} of the whole book")
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid, and 7% of the time
    kept, held_out = split_chapters(chapters)
    tokenizer = train_tokenizer(kept)
    for name in [args.only] if args.only else sorted(SHAPES):
        shape = SHAPES[name]
        windows = Windows(tokenizer, kept, args.seed)
        print(
            f"{name}: {len(windows.stream)} tokens, {len(kept)} chapters, {len(held_out)} held out",
            flush=True,
        )
        weights = train(shape, windows, args.seed)
        save(args.out / name, shape, tokenizer, weights)
        for what, some in (("held out", held_out), ("training", kept[::HELD_OUT])):
            token, bits = perplexity(weights, shape, tokenizer, some)
            print(f"{name}: {what} perplexity {token:.2f} a token, {bits:.3f} bits a character", flush=True)


if __name__ == "__main__":
    main()
