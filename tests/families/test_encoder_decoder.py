"""T5 with gated MLPs, with an output layer of its own and as an encoder alone; BART, mBART and Marian."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import heedful
from heedful.checkpoint import read_config
from heedful.checkpoint.new_head import with_head
from heedful.errors import HeedfulWarning
from heedful.families import FAMILIES
from heedful.model.config import NextToken
from heedful.model.heads import ClassesHead
from heedful.packed import Packed
from tests.support.tiny_models import (
    TINY,
    Float64Mode,
    hf_outputs,
    our_outputs,
    random_batch,
    random_sequences,
    save_tiny,
    scaled_error,
    use_eager_attention,
)
from tests.support.tokenizer_folders import wordpieces, write_wordpiece

GATED = {"feed_forward_proj": "gated-gelu"}


@pytest.mark.parametrize("architecture", ["T5ForConditionalGeneration", "T5EncoderModel", "T5ForTokenClassification"])
def test_gated_mlps_equal_transformers(tmp_path: Path, architecture: str) -> None:
    reference = save_tiny(tmp_path, "t5", architecture, torch.float64, **GATED)
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    ids, types = random_sequences("t5")
    with torch.no_grad():
        (actual,), (expected,) = our_outputs(loaded, random_batch("t5")), hf_outputs(reference, "t5", ids, types)
    assert scaled_error(actual, expected) < 1e-12
    heedful.save(loaded, tmp_path / "again")
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path, tmp_path / "again"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_version_1_1_has_an_output_of_its_own_and_does_not_scale(tmp_path: Path) -> None:
    """Google publishes it with tie_word_embeddings false and lm_head apart from shared; logits lack width^-0.5."""
    reference = save_tiny(tmp_path, "t5", "T5ForConditionalGeneration", torch.float64, **GATED)
    tensors = load_file(tmp_path / "model.safetensors")
    output = torch.randn(99, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    save_file(tensors | {"lm_head.weight": output}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": False}
    config.pop("scale_decoder_outputs", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    assert loaded.config.head == NextToken(tied=False)
    batch = random_batch("t5")
    with torch.no_grad(), Float64Mode(torch.float64):
        rows = loaded.model(batch, batch.shift_right(0))
        assert (loaded(batch, batch.shift_right(0)) - rows @ output.T).abs().max() < 1e-12
        ids, decoder_ids = batch.tokens[None, :7], batch.shift_right(0).tokens[None, :7]  # of the first text
        tied_logits = reference(input_ids=ids, decoder_input_ids=decoder_ids).logits[0]
        assert (rows[:7] @ tensors["shared.weight"].T * 32**-0.5 - tied_logits).abs().max() < 1e-12


@pytest.fixture
def resaved(tmp_path: Path) -> Any:
    """T5 1.1, which transformers 5 reads and saves to "resaved"; return its model.

    Its config.json then has tie_word_embeddings true, though the tensors lm_head and shared differ.
    """
    save_tiny(tmp_path / "published", "t5", "T5ForConditionalGeneration", torch.float64, **GATED)
    tensors = load_file(tmp_path / "published/model.safetensors")
    output = torch.randn(99, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    save_file(tensors | {"lm_head.weight": output}, tmp_path / "published/model.safetensors", metadata={"format": "pt"})
    values = json.loads((tmp_path / "published/config.json").read_text()) | {"tie_word_embeddings": False}
    values.pop("scale_decoder_outputs", None)
    (tmp_path / "published/config.json").write_text(json.dumps(values))
    reference = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "published", dtype=torch.float64)
    reference.save_pretrained(tmp_path / "resaved")
    values = json.loads((tmp_path / "resaved/config.json").read_text())
    assert values["tie_word_embeddings"] and values["scale_decoder_outputs"] is False
    return use_eager_attention(reference).eval()


def test_version_1_1_as_transformers_5_saves_it(tmp_path: Path, resaved: Any) -> None:
    loaded = heedful.load(tmp_path / "resaved", dtype=torch.float64)
    assert loaded.config.head == NextToken(tied=False)
    ids, types = random_sequences("t5")
    with torch.no_grad():
        (actual,), (expected,) = our_outputs(loaded, random_batch("t5")), hf_outputs(resaved, "t5", ids, types)
    assert scaled_error(actual, expected) < 1e-12
    heedful.save(loaded, tmp_path / "again")
    reloaded = heedful.load(tmp_path / "again", dtype=torch.float64)
    assert reloaded.config.head == loaded.config.head
    assert all(torch.equal(reloaded.named_tensors()[name], tensor) for name, tensor in loaded.named_tensors().items())
    assert with_head(loaded, "language_model").config.head == loaded.config.head
    assert heedful.load(tmp_path / "resaved", head="encoder").model.decoder is None


def test_version_1_1_that_is_tied(tmp_path: Path, resaved: Any) -> None:
    """With that config.json, a file without lm_head, or with one that equals shared, has a tied output."""
    tensors = load_file(tmp_path / "resaved/model.safetensors")
    del tensors["lm_head.weight"]
    for output in ({}, {"lm_head.weight": tensors["shared.weight"].clone()}):
        save_file(tensors | output, tmp_path / "new.safetensors")
        (tmp_path / "new.safetensors").replace(tmp_path / "resaved/model.safetensors")
        assert heedful.load(tmp_path / "resaved").config.head == NextToken()


@pytest.mark.parametrize(
    ("buckets", "expected"), [({"num_buckets": 3}, "num_buckets is 3"), ({"max_distance": 4}, "max_distance is 4")]
)
def test_buckets_that_hold_no_distances(tmp_path: Path, buckets: dict[str, int], expected: str) -> None:
    save_tiny(tmp_path, "t5", "T5Model")
    values = json.loads((tmp_path / "config.json").read_text())
    changed = {f"relative_attention_{name}": value for name, value in buckets.items()}
    (tmp_path / "config.json").write_text(json.dumps(values | changed))
    with pytest.raises(heedful.HeedfulError, match=rf"config\.json: relative_attention_{expected}; expected a whole"):
        heedful.load(tmp_path)


def test_cross_attention_has_no_distances_and_scores_are_not_scaled(tmp_path: Path) -> None:
    save_tiny(tmp_path, "t5", "T5Model")
    loaded = heedful.load(tmp_path)
    tables = [name for name in loaded.named_tensors() if "relations" in name]
    assert sorted(tables) == ["decoder.relations.0.table.weight", "encoder.relations.0.table.weight"]
    for stack in (loaded.model.encoder, loaded.model.decoder):
        assert {block.attention.scale for block in stack.blocks} == {1.0}  # type: ignore[union-attr]
    assert {block.cross.scale for block in loaded.model.decoder.blocks} == {1.0}  # type: ignore[union-attr]


def test_float16_is_warned_about(tmp_path: Path) -> None:
    save_tiny(tmp_path, "t5", "T5Model")
    with pytest.warns(heedful.HeedfulWarning, match="overflow in float16: load it in bfloat16 or float32"):
        heedful.load(tmp_path, dtype=torch.float16)
    heedful.load(tmp_path, dtype=torch.bfloat16)


def test_the_encoder_of_a_whole_model(tmp_path: Path) -> None:
    """`head="encoder"` loads the encoder of an encoder-decoder; heads that read the decoder refuse the result."""
    reference = save_tiny(tmp_path / "whole", "t5", "T5ForConditionalGeneration", torch.float64)
    encoder = heedful.load(tmp_path / "whole", head="encoder", dtype=torch.float64)
    assert encoder.model.decoder is None and len(encoder.unused_tensors) > 30
    with torch.no_grad(), Float64Mode(torch.float64):
        expected = reference.encoder(input_ids=torch.tensor([[5, 6, 7]])).last_hidden_state[0]
    assert (encoder.model(Packed.of([[5, 6, 7]])) - expected).abs().max() < 1e-12
    heedful.save(encoder, tmp_path / "encoder")
    reloaded, report = transformers.T5EncoderModel.from_pretrained(tmp_path / "encoder", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys")), report
    with torch.no_grad(), Float64Mode(torch.float64):
        actual = use_eager_attention(reloaded.double()).eval()(input_ids=torch.tensor([[5, 6, 7]])).last_hidden_state[0]
    assert (actual - expected).abs().max() < 1e-12

    tagger = with_head(encoder, "token_classification", labels=["a", "b"], seed=1)
    assert tagger.model.decoder is None and tagger(Packed.of([[5, 6, 7]])).shape == (3, 2)
    assert with_head(heedful.load(tmp_path / "whole"), "token_classification", labels=["a", "b"]).model.decoder is None
    with pytest.raises(
        heedful.HeedfulError, match='the head "sequence_classification" of this family reads the decoder, but this'
    ):
        with_head(encoder, "sequence_classification", labels=["a", "b"])


def test_a_folder_with_a_prefix_of_its_own(tmp_path: Path) -> None:
    """Classifiers of T5 store the body under "transformer.", other models do not; a new head changes the names."""
    save_tiny(tmp_path / "classes", "t5", "T5ForSequenceClassification")
    loaded = heedful.load(tmp_path / "classes")
    heedful.save(with_head(loaded, "question_answering", seed=3), tmp_path / "span")
    names = load_file(tmp_path / "span/model.safetensors").keys()
    assert "shared.weight" in names and "qa_outputs.weight" in names
    classifier = with_head(heedful.load(tmp_path / "span"), "sequence_classification", labels=["x", "y"])
    heedful.save(classifier, tmp_path / "again")
    assert "transformer.shared.weight" in load_file(tmp_path / "again/model.safetensors")
    report = transformers.T5ForSequenceClassification.from_pretrained(tmp_path / "again", output_loading_info=True)[1]
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys")), report


# -- BART and Marian ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changed", "message"),
    [
        ("bart", {"encoder_layerdrop": 0.1}, "encoder_layerdrop is 0.1; only 0, None can be loaded: LayerDrop is not"),
        ("bart", {"tie_word_embeddings": False}, "tie_word_embeddings is False; only True"),
        ("bart", {"normalize_before": True}, "normalize_before is True; only False"),
        ("bart", {"num_hidden_layers": 9}, "num_hidden_layers is 9; only 4, None can be loaded"),
        ("marian", {"share_encoder_decoder_embeddings": False}, "share_encoder_decoder_embeddings is False; only True"),
        ("marian", {"decoder_vocab_size": 70}, "decoder_vocab_size is 70; only 99, None can be loaded: separate"),
        ("marian", {"normalize_embedding": True}, "normalize_embedding is True; only False"),
    ],
)
def test_other_variants_are_refused_by_name(family: str, changed: dict[str, Any], message: str) -> None:
    config_class, settings = TINY[family]
    values = config_class(**settings).to_dict() | {"architectures": [FAMILIES[family].bare]}
    read_config(values, "config.json")
    with pytest.raises(heedful.HeedfulError, match=message):
        read_config(values | changed, "config.json")


def test_a_folder_without_final_logits_bias(tmp_path: Path) -> None:
    """A bare model that is loaded with an output layer has a bias of zero there, as in transformers."""
    save_tiny(tmp_path, "bart", "BartModel", torch.float64)
    loaded = heedful.load(tmp_path, head="language_model", dtype=torch.float64)
    assert loaded.head is not None and not loaded.named_tensors()["head.decoder.bias"].any()
    reference = transformers.BartForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float64)
    use_eager_attention(reference)
    ids, types = random_sequences("bart")
    with torch.no_grad():
        (actual,), (expected,) = our_outputs(loaded, random_batch("bart")), hf_outputs(reference, "bart", ids, types)
    assert scaled_error(actual, expected) < 1e-12


def test_other_positions_than_sinusoids_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "marian", "MarianModel")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["encoder.embed_positions.weight"] += 0.1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(heedful.HeedfulError, match=r"embed_positions\.weight is not the sinusoids of this family"):
        heedful.load(tmp_path)


def test_texts_end_where_sinusoids_were_trained(tmp_path: Path) -> None:
    save_tiny(tmp_path, "marian", "MarianMTModel")
    loaded = heedful.load(tmp_path)
    assert loaded.max_length == 40
    with pytest.raises(heedful.HeedfulError, match="has 41 tokens, but the model has positions for 40"):
        loaded(Packed.of([[5] * 41]), Packed.of([[98]]))


def test_the_bias_of_the_output_layer_is_not_trained(tmp_path: Path) -> None:
    save_tiny(tmp_path, "marian", "MarianMTModel")
    frozen = [name for name, tensor in heedful.load(tmp_path).named_tensors().items() if not tensor.requires_grad]
    assert frozen == ["head.decoder.bias"]
    save_tiny(tmp_path / "bare", "bart", "BartModel")
    with_output_layer = with_head(heedful.load(tmp_path / "bare"), "language_model")
    assert not with_output_layer.named_tensors()["head.decoder.bias"].requires_grad


@pytest.mark.parametrize("ends", [(2, 90), (2,), (90, 2)], ids=["mBART", "mBART-50", "two"])
def test_mbart_classifies_the_row_of_the_last_end_token(tmp_path: Path, ends: tuple[int, ...]) -> None:
    """The head reads the decoder's row at the last end token (id 2), which a language code (id 90) may follow.

    The decoder reads the text shifted right, with its own last token in front.
    """
    reference = save_tiny(
        tmp_path, "mbart", "MBartForSequenceClassification", torch.float64, decoder_start_token_id=None
    )
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    texts = [[5, 6, 2, 7, *ends], [8, 2, *ends], [9, 10, 11, 2, 12, *ends]]
    with torch.no_grad():
        expected = torch.cat([reference(torch.tensor([text])).logits for text in texts])
        assert (loaded(Packed.of(texts)) - expected).abs().max() < 1e-12 and expected.std() > 0.01
        selected = loaded.head_outputs(Packed.of(texts[:1]))
        assert torch.allclose(selected, expected[:1], atol=1e-12)


def test_mbart_answers_questions_without_a_start_token(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path, "mbart", "MBartForQuestionAnswering", torch.float64, decoder_start_token_id=None)
    loaded, text = heedful.load(tmp_path, dtype=torch.float64), [5, 6, 7, 8, 2, 90]
    with torch.no_grad():
        out = reference(torch.tensor([text]))
        expected = torch.stack([out.start_logits[0], out.end_logits[0]], -1)
        assert (loaded(Packed.of([text, [9, 2]]))[: len(text)] - expected).abs().max() < 1e-12


def test_mbart_texts_without_tokens_or_end_token(tmp_path: Path) -> None:
    """The head reads zeros for an empty text, and the last row of a text that has no end token."""
    save_tiny(tmp_path, "mbart", "MBartForSequenceClassification", torch.float64)
    loaded, texts = heedful.load(tmp_path, dtype=torch.float64), [[5, 2, 6], [], [7, 8], [9, 2, 10, 11]]
    assert isinstance(loaded.head, ClassesHead)
    rows = torch.randn(9, 32, dtype=torch.float64)
    with torch.no_grad():
        vectors = loaded.head.vectors(rows, Packed.of(texts))
        read_rows = (1, 4, 6)  # the end token of the first text, the last row of the third, the end token of the fourth
        alone = [loaded.head.vectors(rows[row][None], Packed.of([[2]])) for row in read_rows]
        assert torch.allclose(vectors[[0, 2, 3]], torch.cat(alone), atol=1e-12)
        assert torch.allclose(vectors[1], torch.tanh(loaded.head.first.dense.bias), atol=1e-12)


def test_an_end_token_that_the_tokenizer_does_not_add_is_warned_about(tmp_path: Path) -> None:
    write_wordpiece(tmp_path, wordpieces()[:99])
    save_tiny(tmp_path, "mbart", "MBartForSequenceClassification", eos_token_id=50)
    with pytest.warns(
        HeedfulWarning, match="the row of the token 50, eos_token_id in config.json, which its tokenizer"
    ):
        heedful.load(tmp_path)
