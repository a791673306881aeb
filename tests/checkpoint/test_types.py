"""Segment types reach a model through transformers' own tokenizer, as they do through ours."""

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
    """Trained here, and as a model that has types left it, so that another one may take it over."""
    folder = tmp_path_factory.mktemp("words")
    save_tiny(folder, "bert", "BertModel")
    loaded = heedful.load(folder)
    loaded.tokenizer = train_tokenizer(PAIR * 4, TokenizerSettings(vocab_size=60, min_frequency=1))
    heedful.save(loaded, folder, overwrite=True)
    return Tokenizer.load(folder)


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_their_tokenizer_gives_types_to_a_model_that_tells_them_apart(
    tmp_path: Path, words: Tokenizer, family: str
) -> None:
    save_tiny(tmp_path / "tiny", family, ARCHITECTURES[family])
    loaded = heedful.load(tmp_path / "tiny")
    loaded.tokenizer = words
    heedful.save(loaded, tmp_path / "out")
    inputs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")(*PAIR, return_tensors="pt")
    model = transformers.AutoModel.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    with torch.no_grad():
        theirs, ours = model(**inputs).last_hidden_state[0], loaded.hidden_states(words.pack([PAIR]))
    assert torch.allclose(ours, theirs, rtol=0, atol=2e-6 * float(theirs.abs().max()))


def test_a_class_that_knows_its_model_is_left_alone(tmp_path: Path, words: Tokenizer) -> None:
    published = Tokenizer(words._backend, {"tokenizer_class": "BertTokenizer"})
    for types in (True, False, None):
        published.save(tmp_path, types=types)
        assert "model_input_names" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
