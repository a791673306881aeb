"""Classifiers that read the last token: which token transformers reads if texts end with the padding token."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import transformers

import heedful
from heedful.checkpoint import create, read_config
from heedful.packed import Packed
from heedful.tokenizer import TokenizerSettings, train_tokenizer

TOKENIZER = train_tokenizer(
    ["when do you open ?", "the drill smokes"] * 5, TokenizerSettings(algorithm="bpe", vocab_size=270)
)


def save_classifier(folder: Path, pad: int | None) -> Path:
    """Save a decoder with a classifier, whose tokenizer ends texts with a separator; returns the folder."""
    values = {
        "model_type": "gpt2",
        "architectures": ["GPT2ForSequenceClassification"],
        "vocab_size": TOKENIZER.size,
        "n_positions": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "activation_function": "gelu_new",
        "num_labels": 3,
        "pad_token_id": pad,
    }
    heedful.save(create(read_config(values, "config.json"), TOKENIZER, seed=1), folder)
    return folder


def test_a_separator_that_is_also_padding_is_warned_of_with_advice_for_the_scores_of_transformers(
    tmp_path: Path,
) -> None:
    end = TOKENIZER.encode("a").ids[-1]
    folder = save_classifier(tmp_path / "model", end)
    with pytest.warns(heedful.HeedfulWarning, match="pad_token_id") as warned:
        loaded = heedful.load(folder)
    assert len(warned) == 1
    ids = list(TOKENIZER.encode("the drill smokes").ids)
    reference = transformers.GPT2ForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = reference(input_ids=torch.tensor([ids])).logits[0]
        assert (loaded(Packed.of([ids]))[0] - expected).abs().max() > 1e-3
        assert (loaded(Packed.of([ids[:-1]]))[0] - expected).abs().max() < 1e-5
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": None}))
    (folder / "heedful.json").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        corrected = heedful.load(folder)
    assert corrected.tokenizer is not None
    assert corrected.tokenizer.encode("the drill smokes").ids[-1] == ids[-2]


@pytest.mark.parametrize("pad", [None, TOKENIZER.special.pad])
def test_another_padding_token_causes_no_warning(tmp_path: Path, pad: int | None) -> None:
    save_classifier(tmp_path / "model", pad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        heedful.load(tmp_path / "model")
