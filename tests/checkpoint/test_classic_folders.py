"""Folders of classic models: everything comes back, and the engine answers from them."""

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
def test_a_folder_comes_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = with_head(
        make_classic_encoder(READERS[name]), "sequence_classification", labels=("bad", "good"), seed=1
    ).eval()
    save(model, tmp_path / "one")
    again = load(tmp_path / "one")
    assert again.config.model == model.config.model and again.config.head == model.config.head
    assert isinstance(again.config.model, ClassicConfig) and again.max_length is None
    assert again.named_tensors().keys() == model.named_tensors().keys()
    assert all(torch.equal(each, model.named_tensors()[key]) for key, each in again.named_tensors().items())
    with torch.no_grad():
        assert torch.equal(again(Packed.of(BATCH)), model(Packed.of(BATCH)))
    config = json.loads((tmp_path / "one/config.json").read_text())
    assert config["model_type"] == "heedful-classic" and config["architectures"] == ["HeedfulClassicForClasses"]
    save(again, tmp_path / "two")
    for file in ("config.json", "model.safetensors", "tokenizer.json", "heedful.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()

    answers = heedful.Engine(again)(TEXTS)
    with torch.no_grad():
        for text, answer in zip(TEXTS, answers, strict=True):
            assert again.tokenizer is not None
            encoded = again.tokenizer.encode(text)
            shares = model(Packed.of([encoded.ids], [encoded.types])).softmax(-1)[0].tolist()
            assert list(answer["probabilities"].values()) == pytest.approx(shares, abs=1e-6)
    for kind, more in (("token_classification", {"labels": ("O", "X")}), ("embedding", {})):
        other = with_head(again, kind, **more)
        save(other, tmp_path / kind)
        assert len(heedful.Engine(load(tmp_path / kind))(["the film"])) == 1
    answers = heedful.Engine(load(tmp_path / "token_classification"))([["good.", "film"], ["the", "not-bad", "end"]])
    assert [len(each["words"]) for each in answers] == [2, 3], "one label a word, however many tokens it has"


def test_what_is_frozen_stays_frozen(tmp_path: Path) -> None:
    stack = StackConfig(width=4, layers=1, heads=2, head_width=2, inner_width=8)
    model = make_classic_encoder(READERS["recurrent"], encoder=stack, frozen=True)
    save(model, tmp_path / "model")
    again = load(tmp_path / "model")
    assert {name.split(".")[0] for name, each in again.named_tensors().items() if each.requires_grad} == {"over"}
    assert torch.equal(again(Packed.of(BATCH)), model.eval()(Packed.of(BATCH)))


def test_a_config_that_is_wrong_is_refused(tmp_path: Path) -> None:
    save(make_classic_encoder(READERS["structured"]), tmp_path / "model")
    path = tmp_path / "model/config.json"
    whole = json.loads(path.read_text())
    for change, message in (
        ({"hops": 0}, "hops is 0; expected a number from 1"),
        ({"hop": 3}, r'model: reader.hop is not a setting \(did you mean "hops"\?\)'),
        ({"over": {"kind": "recurrent", "width": 5}}, "do not belong together"),
    ):
        model = whole["model"] | {"reader": whole["model"]["reader"] | change}
        path.write_text(json.dumps(whole | {"model": model}))
        with pytest.raises(HeedfulError, match=message):
            load(tmp_path / "model")
