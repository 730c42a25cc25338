"""SentencePiece BPE tokenizers (GGUF calls them ``llama``): the file has pieces and scores, the merges are
rebuilt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from detdiff.engines.mlx.gguf_import.vocabulary import BYTE, CONTROL, UNUSED, Vocabulary

SPACE = "\u2581"


def visible_spaces(vocabulary: Vocabulary) -> Vocabulary:
    """The vocabulary with runs of spaces, which gemma's files write with real spaces, spelled as they are met after
    normalising."""
    pieces = [SPACE * len(piece) if piece.strip(" ") == "" else piece for piece in vocabulary.tokens]
    return replace(vocabulary, tokens=pieces)


def sentencepiece_bpe(vocabulary: Vocabulary, by_score: bool) -> Any:
    """A ``tokenizers.Tokenizer`` without added tokens.

    With `by_score` a merge that makes a better-scored piece comes first, which is SentencePiece's own rule.
    Without, file order decides: gemma's scores are no merge order.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    pieces = vocabulary.tokens
    ids = {piece: number for number, piece in enumerate(pieces)}
    unknown = vocabulary.special("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=ids,
            merges=list(_merges(vocabulary, pieces, ids, by_score)),
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.types,
            unk_token=None if unknown is None else pieces[unknown],
        )
    )
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flag("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
        )
        decoding.append(decoders.Strip(content=" ", left=1, right=0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(decoding)
    return tokenizer


def _merges(
    vocabulary: Vocabulary, pieces: list[str], ids: dict[str, int], by_score: bool
) -> Iterator[tuple[str, str]]:
    scores = vocabulary.metadata.get("tokenizer.ggml.scores")
    order = list(range(len(pieces)))
    if by_score and isinstance(scores, list) and len(scores) == len(pieces):
        order.sort(key=lambda number: -scores[number])
    for number in order:
        if vocabulary.types[number] in (CONTROL, BYTE, UNUSED):
            continue
        piece = pieces[number]
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        # Several splits of one piece: SentencePiece would meet the better, that is earlier, parts first.
        yield from sorted(
            ((left, right) for left, right in halves if left in ids and right in ids),
            key=lambda pair: (ids[pair[0]], ids[pair[1]]),
        )
