"""Scoring and embedding in transformers: decoders and encoders, padding on either side, a padding fault at its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_models import VOCABULARY, row_by_row, tiny_llama, torch_or_skip

from detdiff.compare import compare
from detdiff.engines.record import record
from detdiff.engines.transformers.engine import TransformersEngine
from detdiff.errors import EngineRefuses
from detdiff.explain import explain
from detdiff.report import verdict_text
from detdiff.scenario import Scenario
from detdiff.trace import Trace

PROMPTS = ([5, 9, 13, 2, 40, 7, 7, 21], [3, 4, 5], [60, 1, 2, 3, 50])


def tiny_bert(torch: Any) -> Any:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    model = BertModel(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.data.mul_(8)
    return model.eval()


def asked(task: str, schedule: str = "serial", **keys: Any) -> Scenario:
    requests = [{"tokens": tokens} for tokens in PROMPTS]
    return Scenario.from_dict(
        {
            "engine": "transformers",
            "model": "tiny",
            "task": task,
            "schedule": schedule,
            "request": requests,
            **keys,
        }
    )


def vectors(trace: Trace) -> dict[int, Any]:
    found = trace.embeddings()
    return dict(zip(found.request.tolist(), found.vector, strict=True))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(
    ("build", "task"), [(tiny_llama, "score"), (tiny_llama, "embed"), (tiny_bert, "embed")]
)
def test_micro_batches_on_either_side_agree(build: Any, task: str, side: str, tmp_path: Path) -> None:
    torch = torch_or_skip()
    engine = TransformersEngine(row_by_row(torch, build(torch)), settings={"padding_side": side})
    alone = record(asked(task), tmp_path / "a", engine=engine)
    batched = record(asked(task, "static", active=2), tmp_path / "b", engine=engine)
    found = compare(alone, batched)
    assert found.compared.rows == sum(map(len, PROMPTS)) - (3 if task == "score" else 0)
    # Padding alone may change the order of attention's sums in torch.
    origins = {origin.kind for r in found.requests for origin in r.origins}
    assert origins <= {"attention"}, found
    assert alone.header["observer"]["equal"] and batched.header["observer"]["equal"]
    for request in found.requests:
        if task == "score":
            assert request.scored is not None and request.scored.max_abs < 1e-4
        else:
            assert request.embedding is not None and request.embedding.cosine is not None
            assert request.embedding.cosine > 0.999999
    assert (alone.header["lacks"].get("cache") is not None) == (build is tiny_bert)


def test_embeddings_are_the_models_own(tmp_path: Path) -> None:
    torch = torch_or_skip()
    model = tiny_bert(torch)
    trace = record(asked("embed", pooling="first"), tmp_path / "a", engine=TransformersEngine(model))
    with torch.inference_mode():
        for number, tokens in enumerate(PROMPTS):
            expected = model(torch.tensor([tokens])).last_hidden_state[0, 0].numpy()
            assert np.array_equal(vectors(trace)[number], expected)


def test_an_encoder_whose_attention_looks_at_padding_is_found_there(tmp_path: Path) -> None:
    torch = torch_or_skip()
    model = row_by_row(torch, tiny_bert(torch))
    native = type(model).forward

    def blind(self: Any, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
        # The mask is dropped: rows see padding.
        return native(self, input_ids=input_ids, attention_mask=torch.ones_like(attention_mask), **more)

    engine = TransformersEngine(model)
    sound = [record(asked("embed", s), tmp_path / f"sound-{s}", engine=engine) for s in ("serial", "static")]
    verdict = explain(*sound, engine=engine)
    assert verdict.kind in ("identical", "numerics", "undetermined"), verdict_text(verdict)
    type(model).forward = blind
    try:
        faulty = [
            record(asked("embed", s), tmp_path / f"faulty-{s}", engine=engine) for s in ("serial", "static")
        ]
        found = compare(*faulty)
        verdict = explain(*faulty, engine=engine)
    finally:
        type(model).forward = native
    assert found.requests[0].stage is None or found.requests[0].embedding.cosine > 0.999999  # type: ignore[union-attr]
    short = next(r for r in found.requests if r.id == "r1")
    assert short.origin is not None and short.origin.kind == "attention" and short.origin.layer == 0
    assert (
        short.embedding is not None and short.embedding.cosine is not None and short.embedding.cosine < 0.9999
    )
    # Pinned attention is over the keys that the mask says, so that what is in the padding still matters.
    assert (verdict.kind, verdict.rule) == ("bug", "padding"), verdict_text(verdict)


def test_a_model_without_a_head_generates_nothing(tmp_path: Path) -> None:
    torch = torch_or_skip()
    engine = TransformersEngine(tiny_bert(torch))
    for task in ("generate", "score"):
        with pytest.raises(EngineRefuses, match="without a head"):
            record(asked(task), tmp_path / task, engine=engine)


def test_a_directory_of_an_encoder_is_loaded_as_one(tmp_path: Path) -> None:
    torch = torch_or_skip()
    from transformers import BertTokenizer

    tiny_bert(torch).save_pretrained(tmp_path / "bert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    scenario = Scenario.from_dict(
        {
            "engine": "transformers",
            "model": str(tmp_path / "bert"),
            "task": "embed",
            "request": [{"prompt": "a b c"}],
        }
    )
    trace = record(scenario, tmp_path / "t")
    assert trace.embeddings().vector.shape == (1, 32)
    assert trace.requests[0]["tokens"][0] == words.index("[CLS]")
