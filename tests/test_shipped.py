"""The encoder that ships with the package: its size, loading it by name, equality with transformers, its answers."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

import heedful
from heedful.bundled import BUNDLED_ENCODER, bundled_model

SENTENCES = {  # each with a word that is among the ten most likely ones
    "Please close the [MASK] behind you.": "door",
    "They live in a small [MASK] near the sea.": "village",
    "The cat is sleeping on the [MASK].": "bed",
    "My brother is older than my [MASK].": "sister",
}


def test_it_is_small_and_read_by_its_name() -> None:
    folder = bundled_model(BUNDLED_ENCODER)
    assert folder is not None and bundled_model("another") is None
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 25_000_000
    loaded = heedful.load(BUNDLED_ENCODER, head="masked_lm")
    assert loaded.source == BUNDLED_ENCODER and loaded.max_length == 512
    assert all(parameter.dtype == torch.float32 for parameter in loaded.parameters())
    assert loaded.tokenizer is not None and loaded.tokenizer.size == 16_000 and loaded.tokenizer.lowercases
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert f"{loaded.count():,} parameters" in card and "@" not in re.sub(r"\S+@\S+", "", card)
    assert all(part in card for part in ("CC BY-SA", "SST-2", "Limits", *SENTENCES))


def test_transformers_computes_the_same() -> None:
    folder, loaded = bundled_model(BUNDLED_ENCODER), heedful.load(BUNDLED_ENCODER, head="masked_lm")
    assert loaded.source == heedful.load(f"{BUNDLED_ENCODER}@main").source == BUNDLED_ENCODER
    reference, info = transformers.BertForMaskedLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert loaded.tokenizer is not None
    batch = loaded.tokenizer.pack(["The rain came [MASK] from the hills."])
    with torch.inference_mode():
        actual, expected = loaded(batch), reference.eval()(batch.tokens[None]).logits[0]
    assert (actual - expected).abs().max() < 1e-4


@pytest.mark.parametrize("text", SENTENCES)
def test_it_fills_in_masks(text: str) -> None:
    (answer,) = heedful.Engine(BUNDLED_ENCODER, head="masked_lm")([text], top_k=10)
    assert SENTENCES[text] in [token["text"] for token in answer["masks"][0]["candidates"]]


def test_its_sentence_vectors_are_the_mean_of_its_rows() -> None:
    """Mean pooling, as modules.json says; paraphrases have a larger cosine than unrelated sentences."""
    folder = bundled_model(BUNDLED_ENCODER)
    texts = ["A man is playing a guitar.", "Somebody plays the guitar.", "The price of oil fell again."]
    vectors = heedful.Engine(BUNDLED_ENCODER).encode(texts)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    reference = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    for text, vector in zip(texts, vectors, strict=True):
        with torch.inference_mode():
            expected = reference(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        assert torch.allclose(torch.from_numpy(vector), expected, atol=1e-4)
    paraphrase, unrelated = (
        torch.cosine_similarity(*torch.from_numpy(vectors[[0, index]])[:, None]) for index in (1, 2)
    )
    assert paraphrase > 0.5 > unrelated + 0.2
