"""Token types of a pair are the same in the tokenizer of a saved folder, which transformers reads, and in ours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import heedful
from heedful.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer
from tests.support.tiny_models import save_tiny

PAIR = ("the ferry left", "a boat came late")
ARCHITECTURES = {
    "bert": "BertModel",
    "albert": "AlbertModel",
    "electra": "ElectraModel",
    "xlnet": "XLNetModel",
    "distilbert": "DistilBertModel",
    "modernbert": "ModernBertModel",
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer that was saved with a model that has token types, for models with and without them."""
    folder = tmp_path_factory.mktemp("words")
    save_tiny(folder, "bert", "BertModel")
    loaded = heedful.load(folder)
    loaded.tokenizer = train_tokenizer(PAIR * 4, TokenizerSettings(vocab_size=60, min_frequency=1))
    heedful.save(loaded, folder, overwrite=True)
    return Tokenizer.load(folder)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_tokenizer_of_transformers_has_types_if_the_model_uses_them(
    tmp_path: Path, words: Tokenizer, family: str
) -> None:
    save_tiny(tmp_path / "tiny", family, ARCHITECTURES[family])
    loaded = heedful.load(tmp_path / "tiny")
    loaded.tokenizer = words
    heedful.save(loaded, tmp_path / "out")
    inputs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(*PAIR, return_tensors="pt")
    model = transformers.AutoModel.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.no_grad():
        expected, actual = model(**inputs).last_hidden_state[0], loaded.hidden_states(words.pack([PAIR]))
    assert torch.allclose(actual, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


def test_a_tokenizer_class_of_one_model_is_not_changed(tmp_path: Path, words: Tokenizer) -> None:
    published = Tokenizer(words._backend, {"tokenizer_class": "BertTokenizer"})
    for types in (True, False, None):
        published.save(tmp_path, types=types)
        assert "model_input_names" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
