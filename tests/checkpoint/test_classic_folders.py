"""Folders of classic models: weights and configuration are restored, and the engine answers from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import heedful
from heedful.checkpoint import load, save
from heedful.checkpoint.new_head import with_head
from heedful.errors import HeedfulError
from heedful.model.classic_config import ClassicConfig
from heedful.model.config import StackConfig
from heedful.packed import Packed
from tests.support.classic_models import BATCH, READERS, make_classic_encoder

TEXTS = ["the film was good . very good .", "", "unheard of", ("the end", "not bad")]


@pytest.mark.parametrize("name", READERS)
def test_a_saved_model_is_restored_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = with_head(
        make_classic_encoder(READERS[name]), "sequence_classification", labels=("bad", "good"), seed=1
    ).eval()
    save(model, tmp_path / "first")
    reloaded = load(tmp_path / "first")
    assert reloaded.config.model == model.config.model and reloaded.config.head == model.config.head
    assert isinstance(reloaded.config.model, ClassicConfig) and reloaded.max_length is None
    assert reloaded.named_tensors().keys() == model.named_tensors().keys()
    assert all(torch.equal(tensor, model.named_tensors()[key]) for key, tensor in reloaded.named_tensors().items())
    with torch.no_grad():
        assert torch.equal(reloaded(Packed.of(BATCH)), model(Packed.of(BATCH)))
    config = json.loads((tmp_path / "first/config.json").read_text())
    assert config["model_type"] == "heedful-classic" and config["architectures"] == ["HeedfulClassicForClasses"]
    save(reloaded, tmp_path / "second")
    for file in ("config.json", "model.safetensors", "tokenizer.json", "heedful.json"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()

    answers = heedful.Engine(reloaded)(TEXTS)
    with torch.no_grad():
        for text, answer in zip(TEXTS, answers, strict=True):
            assert reloaded.tokenizer is not None
            encoded = reloaded.tokenizer.encode(text)
            probabilities = model(Packed.of([encoded.ids], [encoded.types])).softmax(-1)[0].tolist()
            assert list(answer["probabilities"].values()) == pytest.approx(probabilities, abs=1e-6)
    for kind, options in (("token_classification", {"labels": ("O", "X")}), ("embedding", {})):
        new_model = with_head(reloaded, kind, **options)
        save(new_model, tmp_path / kind)
        assert len(heedful.Engine(load(tmp_path / kind))(["the film"])) == 1
    answers = heedful.Engine(load(tmp_path / "token_classification"))([["good.", "film"], ["the", "not-bad", "end"]])
    assert [len(answer["words"]) for answer in answers] == [2, 3], "a word of several tokens has several labels"


def test_frozen_parts_are_restored_as_frozen(tmp_path: Path) -> None:
    stack = StackConfig(width=4, layers=1, heads=2, head_width=2, inner_width=8)
    model = make_classic_encoder(READERS["recurrent"], encoder=stack, frozen=True)
    save(model, tmp_path / "model")
    reloaded = load(tmp_path / "model")
    assert {name.split(".")[0] for name, tensor in reloaded.named_tensors().items() if tensor.requires_grad} == {"over"}
    assert torch.equal(reloaded(Packed.of(BATCH)), model.eval()(Packed.of(BATCH)))


def test_an_invalid_config_is_refused(tmp_path: Path) -> None:
    save(make_classic_encoder(READERS["structured"]), tmp_path / "model")
    path = tmp_path / "model/config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"hops": 0}, "hops is 0; expected a number from 1"),
        ({"hop": 3}, r'model: reader.hop is not a setting \(did you mean "hops"\?\)'),
        ({"over": {"kind": "recurrent", "width": 5}}, "do not belong together"),
    ):
        model = config["model"] | {"reader": config["model"]["reader"] | change}
        path.write_text(json.dumps(config | {"model": model}))
        with pytest.raises(HeedfulError, match=message):
            load(tmp_path / "model")
