"""DeBERTa-v2 and v3: buckets of distances, published folders and tokenizers, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

import heedful
from heedful.checkpoint import read_config
from heedful.errors import HeedfulError
from heedful.families import FAMILIES
from heedful.infer.tuning.execution_plan import ExecutionPlan, apply_plan
from heedful.model.attention import Attention
from heedful.nn.positions import ProjectedDistances, signed_log_buckets
from heedful.packed import Packed
from tests.support.sentencepiece_models import train_sentencepiece
from tests.support.tiny_models import (
    Float64Mode,
    hf_outputs,
    our_outputs,
    random_batch,
    random_sequences,
    save_tiny,
    scaled_error,
)
from tests.support.tokenizer_folders import wordpieces, write_wordpiece

BODY, MASKED = "DebertaV2Model", "DebertaV2ForMaskedLM"


@pytest.mark.parametrize(("count", "reach"), [(256, 512), (32, 128), (8, 40), (10, 41), (256, 1024)])
def test_buckets_are_those_of_transformers(count: int, reach: int) -> None:
    distances = torch.arange(-3 * reach, 3 * reach + 1)
    expected = make_log_bucket_position(distances, count, reach).long()
    assert torch.equal(signed_log_buckets(distances, count, reach), expected)


@pytest.mark.parametrize(
    "changed", [{}, {"norm_rel_ebd": "none"}, {"position_buckets": 16, "max_relative_positions": 24}]
)
def test_distances_past_the_last_bucket(tmp_path: Path, changed: dict[str, Any]) -> None:
    reference = save_tiny(tmp_path, "deberta-v2", BODY, torch.float64, max_position_embeddings=40, **changed)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(5, 98, (length,), generator=generator).tolist() for length in (38, 100, 3)]
    with torch.no_grad():
        rows = Packed.of(ids).unpack(loaded.hidden_states(Packed.of(ids)))
        # transformers needs a buffer of positions as long as the text, which it does not use
        reference.embeddings.position_ids = torch.arange(100)[None]
        for row_ids, actual in zip(ids, rows, strict=True):
            with Float64Mode(torch.float64):
                expected = reference(torch.tensor([row_ids])).last_hidden_state[0]
            assert scaled_error(actual, expected) <= 1e-12


def test_learned_positions_and_types_as_in_version_2(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "deberta-v2", BODY, torch.float64, position_biased_input=True, type_vocab_size=2)
    ids, _ = random_sequences("deberta-v2")
    types = [[index % 2 for index in range(len(row_ids))] for row_ids in ids]
    batch, loaded = Packed.of(ids, types), heedful.load(tmp_path, dtype=torch.float64)
    assert loaded.max_length == 40
    with torch.no_grad():
        for index, actual in enumerate(batch.unpack(loaded.hidden_states(batch))):
            inputs = torch.tensor([ids[index]]), torch.tensor([types[index]])
            with Float64Mode(torch.float64):
                expected = reference(inputs[0], token_type_ids=inputs[1]).last_hidden_state[0]
            assert scaled_error(actual, expected) <= 1e-12


def test_published_files_hold_the_head_for_masked_tokens_and_the_discriminator(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "deberta-v2", MASKED)
    path = tmp_path / "model.safetensors"
    unused = {
        "mask_predictions.dense.weight": torch.ones(32, 32),
        "mask_predictions.LayerNorm.bias": torch.ones(32),
        "deberta.embeddings.position_embeddings.weight": torch.ones(40, 32),
    }
    save_file(load_file(path) | unused, path, metadata={"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text())
    for name in ("architectures", "legacy"):
        del values[name]
    (tmp_path / "config.json").write_text(json.dumps(values | {"pos_att_type": "p2c|c2p"}))
    with pytest.warns(heedful.HeedfulWarning, match=r"5 tensors belong to other heads.*lm_predictions"):
        assert heedful.load(tmp_path).head is None
    loaded = heedful.load(tmp_path, head="masked_lm")
    ids, types = random_sequences("deberta-v2")
    with torch.no_grad():
        (expected,) = hf_outputs(reference, "deberta-v2", ids, types)
        (actual,) = our_outputs(loaded, random_batch("deberta-v2"))
    assert (actual - expected).abs().max() <= 2e-6 * expected.abs().max()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"relative_attention": False}, "relative_attention is False, share_att_key True"),
        ({"share_att_key": False}, "share_att_key False"),
        ({"pos_att_type": "c2p"}, "pos_att_type 'c2p'; only true, true and"),
        ({"pos_att_type": None}, "pos_att_type 'None'"),
        ({"conv_kernel_size": 3}, "the convolution after the first layer is not supported"),
        ({"z_steps": 2}, "z_steps is 2"),
        ({"embedding_size": 16}, "narrow embeddings are not supported"),
        ({"pooler_hidden_size": 16}, "a pooler of another width is not supported"),
        ({"attention_head_size": 16}, "heads of another width are not supported"),
        ({"position_buckets": -1}, "position_buckets is -1; expected a whole number from 4"),
        ({"position_buckets": 80}, "relation.buckets is 80; expected a whole number from 4 to less than twice"),
        ({"norm_rel_ebd": "rms"}, "norm_rel_ebd is 'rms'"),
        ({"legacy": True}, "legacy is True.*another head, with other names"),
    ],
)
def test_other_attention_is_refused_by_key(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    save_tiny(tmp_path, "deberta-v2", MASKED)
    values = json.loads((tmp_path / "config.json").read_text())
    read_config(values, "config.json")
    with pytest.raises(HeedfulError, match=message):
        read_config(values | changed, "config.json")


def test_the_legacy_key_does_not_matter_to_other_heads(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deberta-v2", "DebertaV2ForSequenceClassification", legacy=True)
    assert heedful.load(tmp_path).config.head is not None


def test_the_tokenizer_is_made_of_spm_model(tmp_path: Path) -> None:
    """The special tokens are the pieces 0 to 3 of the model, except [MASK], which has the id after the last piece."""
    save_tiny(tmp_path, "deberta-v2", BODY, vocab_size=420)
    options = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
    names = {"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"}
    model = train_sentencepiece(**options, **names)
    (tmp_path / "spm.model").write_bytes(model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": False, "vocab_type": "spm"}))
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    loaded = heedful.load(tmp_path).tokenizer
    assert loaded is not None
    for text in ("Ada reads the café guide", "Nobody has lost it", ""):
        assert list(loaded.encode(text).ids) == [1, *reference.encode(text), 2]
    pair = loaded.encode(("Ada reads", "the map"))
    first, second = reference.encode("Ada reads"), reference.encode("the map")
    assert list(pair.ids) == [1, *first, 2, *second, 2]
    assert list(pair.types) == [0] * (len(first) + 2) + [1] * (len(second) + 1)
    assert loaded.id("[MASK]") == reference.get_piece_size() and loaded.id("[PAD]") == 0 and loaded.id("[UNK]") == 3
    assert loaded.id("[MASK]") in loaded.encode("Ada [MASK] the map").ids


def test_only_vectors_of_distances_that_occur_are_projected(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deberta-v2", BODY, position_buckets=256, max_position_embeddings=512)
    loaded = heedful.load(tmp_path)
    assert loaded.model.encoder is not None
    relation = loaded.model.encoder.relations[0]
    for length in (1, 9, 100):
        batch = Packed.of([[7] * length, [7]])
        prepared = relation.prepare(batch, torch.zeros(1), cache_bias=True)  # type: ignore[operator]
        assert len(prepared.vectors) == 2 * length - 1
    assert FAMILIES["deberta-v2"].write(loaded.config.model)["position_buckets"] == 256


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_distances_are_projected_once_for_inference(tmp_path: Path, precision: Any) -> None:
    """An applied execution plan stores the projected distances: outputs stay the same for short and long texts."""
    save_tiny(tmp_path, "deberta-v2", BODY, position_buckets=6, max_relative_positions=9)
    plain, planned = heedful.load(tmp_path), heedful.load(tmp_path)
    before = planned.weights_digest() if precision == "float32" else ""
    apply_plan(planned, ExecutionPlan(precision=precision, linears="int8" if precision == "int8" else "plain"))
    assert planned.model.encoder is not None
    projected = [module for module in planned.model.encoder.relations if isinstance(module, ProjectedDistances)]
    assert len(projected) == len(planned.model.encoder.blocks)
    with torch.inference_mode():
        for lengths in ((1,), (2, 9), (10, 3, 30), (30,)):
            rows, expected = (loaded.model(random_batch("deberta-v2", lengths)) for loaded in (planned, plain))
            tolerance = 2e-6 if precision == "float32" else 0.2
            assert scaled_error(rows, expected) <= tolerance
    if before:
        assert planned.weights_digest() == before
        for index, relation in enumerate(projected):
            attention = plain.model.encoder.blocks[index].attention  # type: ignore[union-attr]
            vectors = plain.model.encoder.relations[0]  # type: ignore[union-attr]
            q, k, _ = attention.project(vectors.norm(vectors.table.weight))
            assert torch.equal(relation.position_q, q) and torch.equal(relation.position_k, k)


def test_an_engine_projects_distances_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "deberta-v2", "DebertaV2ForSequenceClassification", vocab_size=len(wordpieces()))
    write_wordpiece(tmp_path, wordpieces())
    engine = heedful.Engine(tmp_path)
    rows_of_calls: list[int] = []
    project = Attention.project

    def recorded(self: Attention, x: torch.Tensor) -> Any:
        rows_of_calls.append(len(x))
        return project(self, x)

    monkeypatch.setattr(Attention, "project", recorded)
    engine(["hello"])
    tokens = len(engine.tokenizer.encode("hello"))
    assert rows_of_calls == [tokens] * 4, "each of four layers projects its tokens, and nothing else"
