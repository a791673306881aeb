"""EuroBERT, Llama and Qwen3: classifiers, positions and windows, embedding models, and configs that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import decoders, models, pre_tokenizers, processors

import heedful
from heedful.checkpoint import read_config
from heedful.checkpoint.new_head import make_head_config
from heedful.errors import HeedfulError
from heedful.model.config import Classes, NextToken, SentenceEmbedding
from heedful.model.decode import Greedy, generate
from tests.support.tiny_models import (
    hf_outputs,
    make_tiny,
    our_outputs,
    random_batch,
    random_sequences,
    save_tiny,
    transformers_in_float64,
)

END = "<|endoftext|>"
QUERY = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"


@pytest.mark.parametrize(
    ("pooling", "our_pooling", "pools_last"), [("bos", "first", False), ("mean", "mean", False), ("late", "mean", True)]
)
def test_poolings_of_a_eurobert_classifier(tmp_path: Path, pooling: str, our_pooling: str, pools_last: bool) -> None:
    reference = save_tiny(
        tmp_path, "eurobert", "EuroBertForSequenceClassification", torch.float64, classifier_pooling=pooling
    )
    loaded = heedful.load(tmp_path, dtype=torch.float64)
    head, (ids, types) = loaded.config.head, random_sequences("eurobert")
    assert isinstance(head, Classes) and (head.pooling, head.pools_last) == (our_pooling, pools_last)
    with torch.no_grad():
        (expected,) = hf_outputs(reference, "eurobert", ids, types)
        assert (our_outputs(loaded, random_batch("eurobert"))[0] - expected).abs().max() < 1e-12
    heedful.save(loaded, tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["classifier_pooling"] == pooling


def values_of(family: str, architecture: str, **changed: object) -> dict[str, Any]:
    """Return the complete config.json of a tiny model."""
    values = json.loads(make_tiny(family, architecture).config.to_json_string(use_diff=False))
    return {**values, "architectures": [architecture], **changed}


FULL, LOCAL = "full_attention", "sliding_attention"
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4}
LONGROPE = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("family", "architecture", "changed", "message"),
    [
        ("eurobert", "EuroBertModel", {"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide"),
        (
            "eurobert",
            "EuroBertModel",
            {"hidden_dropout": 0.1},
            r"hidden_dropout is 0\.1; only 0\.0, None can be loaded",
        ),
        ("eurobert", "EuroBertForSequenceClassification", {"clf_pooling": "mean"}, "clf_pooling is 'mean'.*rename"),
        ("eurobert", "EuroBertForSequenceClassification", {"classifier_pooling": "max"}, "one of bos, mean, late"),
        ("llama", "LlamaModel", {"rope_interleaved": True}, "rope_interleaved is True; only False"),
        ("llama", "LlamaModel", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "this stack is causal"),
        ("llama", "LlamaModel", {"rope_parameters": LONGROPE}, r"\(longrope\) are for encoders; this stack is causal"),
        ("llama", "LlamaModel", {"num_attention_heads": 5}, "num_attention_heads is 5, which does not divide"),
        ("qwen3", "Qwen3Model", {"layer_types": [LOCAL] * 4}, "layer_types is .*use_sliding_window and sliding_window"),
        ("qwen3", "Qwen3Model", WINDOW | {"layer_types": [LOCAL] * 3}, "sliding_attention for each of 4 layers"),
        ("qwen3", "Qwen3Model", WINDOW | {"sliding_window": 0}, "sliding_window is 0; expected a whole number from 1"),
        ("qwen3", "Qwen3Model", {"mlp_bias": True}, "does not know the key 'mlp_bias'"),
        ("qwen3", "Qwen3Model", {"head_dim": 7}, "head_width is 7; rotary positions .*make it even"),
    ],
)
def test_unsupported_configs_are_refused_by_key(
    family: str, architecture: str, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(HeedfulError, match=message):
        read_config(values_of(family, architecture, **changed), "config.json")


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
def test_without_tie_word_embeddings_the_output_is_not_tied(architecture: str) -> None:
    family = architecture.removesuffix("ForCausalLM").lower()
    values = values_of(family, architecture)
    assert read_config(values | {"tie_word_embeddings": True}, "config.json").head == NextToken(tied=True)
    del values["tie_word_embeddings"]
    assert read_config(values, "config.json").head == NextToken(tied=False)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.1, "high_freq_factor": 1.2},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0},
    ],
    ids=["llama3", "yarn"],
)
def test_stretched_positions_of_decoders(tmp_path: Path, family: str, parameters: dict[str, Any]) -> None:
    rope_parameters = {"rope_theta": 500.0, "original_max_position_embeddings": 10} | parameters
    architecture = f"{family.capitalize()}ForCausalLM"
    reference = save_tiny(tmp_path, family, architecture, torch.float64, rope_parameters=rope_parameters)
    loaded, lengths = heedful.load(tmp_path, dtype=torch.float64), (3, 10, 11, 37)
    ids, types = random_sequences(family, lengths)
    with transformers_in_float64():
        (expected,) = hf_outputs(reference, family, ids, types)
        (actual,) = our_outputs(loaded, random_batch(family, lengths))
        assert (actual - expected).abs().max() < 1e-12 * expected.abs().max()


@pytest.mark.parametrize(
    "windows",
    [
        WINDOW | {"max_window_layers": 2},
        WINDOW | {"max_window_layers": 0, "sliding_window": 2},
        WINDOW | {"layer_types": [LOCAL, FULL, FULL, LOCAL]},
        WINDOW | {"max_window_layers": 9},
        {"sliding_window": 4, "max_window_layers": 0},
    ],
    ids=str,
)
def test_sliding_windows_of_qwen3(tmp_path: Path, windows: dict[str, Any]) -> None:
    """Logits and generated tokens equal those of transformers, which reads the saved folder with the same logits."""
    reference = save_tiny(tmp_path / "theirs", "qwen3", "Qwen3ForCausalLM", torch.float64, **windows)
    loaded, lengths = heedful.load(tmp_path / "theirs", dtype=torch.float64), (3, 4, 11, 30)
    ids, types = random_sequences("qwen3", lengths)
    with transformers_in_float64():
        (expected,) = hf_outputs(reference, "qwen3", ids, types)
        (actual,) = our_outputs(loaded, random_batch("qwen3", lengths))
        assert (actual - expected).abs().max() < 1e-12 * expected.abs().max()
    inputs, options = torch.tensor([ids[2]]), {"do_sample": False, "max_new_tokens": 7, "eos_token_id": 200}
    with transformers_in_float64():
        generated = reference.generate(inputs, attention_mask=torch.ones_like(inputs), pad_token_id=0, **options)
    assert loaded.head is not None
    answers = generate(loaded.model, loaded.head, random_batch("qwen3", lengths), Greedy(), max_new_tokens=7, stop=[])
    assert answers[2][0].tokens == generated[0, len(ids[2]) :].tolist()
    heedful.save(loaded, tmp_path / "ours")
    with transformers_in_float64():
        reloaded = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float64).eval()
        (resaved,) = hf_outputs(reloaded, "qwen3", ids, types)
        assert (resaved - expected).abs().max() < 1e-12 * expected.abs().max()


@pytest.mark.parametrize("tied", [True, False])
def test_vocabulary_head_tied_or_not(tmp_path: Path, tied: bool) -> None:
    for family, architecture in (("qwen3", "Qwen3ForCausalLM"), ("eurobert", "EuroBertForMaskedLM")):
        folder = tmp_path / family
        reference = save_tiny(folder / "theirs", family, architecture, torch.float64, tie_word_embeddings=tied)
        loaded, (ids, types) = heedful.load(folder / "theirs", dtype=torch.float64), random_sequences(family)
        with torch.no_grad():
            (expected,) = hf_outputs(reference, family, ids, types)
            assert (our_outputs(loaded, random_batch(family))[0] - expected).abs().max() < 1e-12 * expected.abs().max()
        heedful.save(loaded, folder / "ours")
        before, after = (load_file(folder / name / "model.safetensors") for name in ("theirs", "ours"))
        assert ("lm_head.weight" in before) != tied and before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_new_embedding_head_of_a_decoder_reads_the_last_token() -> None:
    for family, pooling in (("Qwen3", "last"), ("Llama", "last"), ("EuroBert", "mean")):
        config = read_config(values_of(family.lower(), f"{family}Model"), "config.json")
        assert make_head_config(config, "embedding") == SentenceEmbedding(pooling=(pooling,))  # type: ignore[arg-type]


# -- folders of sentence-transformers -----------------------------------------------------------------------------

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SIZE = {"vocab_size": len(ALPHABET) + 1, "max_position_embeddings": 60}


def save_tokenizer(folder: Path, *, appends_end: bool) -> None:
    """Save a tokenizer of bytes, which appends the end token to each text if `appends_end`."""
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: n for n, token in enumerate(ALPHABET)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    backend.add_special_tokens([END])
    if appends_end:
        backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, len(ALPHABET))]
        )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=END, eos_token=END, model_max_length=60, padding_side="left"
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the files of Qwen3-Embedding: names of the bare model, though its architecture has a head."""
    folder = tmp_path_factory.mktemp("embedding")
    save_tiny(folder / "body", "qwen3", "Qwen3Model", pad_token_id=None, **SIZE)
    save_tokenizer(folder / "body", appends_end=True)
    modules = [Transformer(str(folder / "body")), Pooling(32, pooling_mode="lasttoken"), Normalize()]
    reference = SentenceTransformer(
        modules=modules, prompts={"query": QUERY, "document": ""}, similarity_fn_name="cosine", device="cpu"
    )
    reference.save(str(folder / "published"))
    config = json.loads((folder / "published/config.json").read_text())
    config |= {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True}
    (folder / "published/config.json").write_text(json.dumps(config))
    return folder / "published"


def test_a_reranker_scores_as_in_sentence_transformers(tmp_path: Path) -> None:
    labels = {"id2label": {0: "score"}, "label2id": {"score": 0}}
    ids = {"pad_token_id": len(ALPHABET), "eos_token_id": len(ALPHABET)}
    save_tiny(tmp_path / "body", "qwen3", "Qwen3ForSequenceClassification", **SIZE, **labels, **ids)
    save_tokenizer(tmp_path / "body", appends_end=False)
    reference = CrossEncoder(str(tmp_path / "body"), device="cpu", activation_fn=torch.nn.Sigmoid())
    reference.save_pretrained(str(tmp_path / "reranker"))
    pairs = [(f"<Query>: {query}\n", f"<Document>: {text}") for query in ("noon?", "why") for text in TEXTS[:3]]
    answers = heedful.Engine(tmp_path / "reranker")(pairs)
    scores = np.array([answer["values"]["score"] for answer in answers])
    assert np.abs(scores - reference.predict(pairs)).max() < 2e-6 and scores.std() > 0.01


TEXTS = [
    "The ferry leaves at noon.",
    "x",
    "Ünïcode and 漢字",
    "A longer sentence about nothing, cut before its end. " * 3,
]


def test_an_embedding_folder_equals_sentence_transformers(published: Path, tmp_path: Path) -> None:
    names = load_file(published / "model.safetensors").keys()
    assert "embed_tokens.weight" in names and not any(name.startswith("model.") for name in names)
    reference, loaded = SentenceTransformer(str(published), device="cpu"), heedful.load(published)
    assert isinstance(loaded.config.head, SentenceEmbedding) and loaded.config.head.pooling == ("last",)
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.name(loaded.tokenizer.encode("x").ids[-1]) == END
    engine = heedful.Engine(loaded)
    for vectors, expected in (
        (engine.encode_query(TEXTS), reference.encode_query(TEXTS)),
        (engine.encode_document(TEXTS), reference.encode_document(TEXTS)),
        (engine.encode(TEXTS), reference.encode(TEXTS)),
    ):
        assert np.abs(np.asarray(vectors) - expected).max() < 2e-6
    assert np.abs(reference.encode_query(TEXTS) - reference.encode_document(TEXTS)).max() > 0.01
    heedful.save(loaded, tmp_path / "again")
    reloaded = SentenceTransformer(str(tmp_path / "again"), device="cpu")
    assert np.array_equal(reloaded.encode(TEXTS), reference.encode(TEXTS))


def test_names_of_a_whole_model_are_read_too(published: Path, tmp_path: Path) -> None:
    tensors = load_file(published / "model.safetensors")
    heedful.save(heedful.load(published), tmp_path / "whole")
    named = {f"model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, tmp_path / "whole/model.safetensors", metadata={"format": "pt"})
    bare, whole = heedful.load(published), heedful.load(tmp_path / "whole")
    assert bare.tokenizer is not None
    batch = bare.tokenizer.pack(TEXTS)
    with torch.no_grad():
        assert torch.equal(bare(batch), whole(batch))
