"""Names and configs go both ways: each key is claimed once, files come back bitwise, transformers reads ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import heedful
from heedful.checkpoint import read_config, write_config
from heedful.errors import HeedfulError
from heedful.families import FAMILIES
from heedful.families.names import name_pattern
from tests.support.tiny_models import (
    MODELS,
    MODELS_WITH_OWN_HEADS,
    hf_outputs,
    make_tiny,
    our_outputs,
    random_batch,
    random_sequences,
    save_tiny,
    use_eager_attention,
)

Saved = Callable[..., tuple[Any, Path]]
each_model = pytest.mark.parametrize(("family", "architecture"), MODELS)
each_own_head = pytest.mark.parametrize(("family", "architecture"), MODELS_WITH_OWN_HEADS)


@each_model
def test_every_key_is_claimed_exactly_once_in_both_directions(saved: Saved, family: str, architecture: str) -> None:
    _, folder = saved(family, architecture)
    loaded = heedful.load(folder)
    table = FAMILIES[family].table(loaded.config.model, loaded.config.head)
    bare = architecture == FAMILIES[family].bare
    for name in load_file(folder / "model.safetensors"):
        inner = FAMILIES[family].table_name(name, bare)
        if inner in table.constants:
            continue
        hits = [t for row in table.rows for t in row.hf if name_pattern(t).fullmatch(inner)]
        assert len(hits) == 1, (name, hits)
    for name in loaded.named_tensors():
        assert len([row for row in table.rows if name_pattern(row.name).fullmatch(name)]) == 1, name


@each_own_head
def test_round_trip_is_bitwise_and_transformers_reads_it(
    tmp_path: Path, saved: Saved, family: str, architecture: str
) -> None:
    reference, folder = saved(family, architecture)
    heedful.save(heedful.load(folder), tmp_path / "ours")

    before, after = (load_file(side / "model.safetensors") for side in (folder, tmp_path / "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "ours/config.json").read_text()) == json.loads((folder / "config.json").read_text())

    reloaded, report = getattr(transformers, architecture).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    expected, actual = reference.state_dict(), reloaded.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    use_eager_attention(reloaded)
    ids, types = random_sequences(family)
    with torch.no_grad():  # the same bits at other addresses may be summed in another order
        for one, other in zip(
            hf_outputs(reference, family, ids, types), hf_outputs(reloaded.eval(), family, ids, types), strict=True
        ):
            assert (one - other).abs().max() <= 2e-6 * max(1.0, one.abs().max())


@each_own_head
def test_config_is_written_as_transformers_understands_it(family: str, architecture: str) -> None:
    """Without the config.json that we read: everything that matters is written from our own config."""
    source = make_tiny(family, architecture, problem_type="multi_label_classification")
    reference = source.config
    values = json.loads(reference.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    config = read_config(values, "config.json")
    written = write_config(heedful.checkpoint.BundleConfig(family=family, model=config.model, head=config.head))
    reloaded = read_config(written, "written")
    assert (reloaded.model, reloaded.head) == (config.model, config.head)
    rebuilt = type(reference)(**written)
    model = getattr(transformers, architecture)(rebuilt)
    model.load_state_dict(source.state_dict())
    use_eager_attention(model)
    ids, types = random_sequences(family)
    with torch.no_grad():
        for expected, actual in zip(
            hf_outputs(source, family, ids, types), hf_outputs(model.eval(), family, ids, types), strict=True
        ):
            assert (expected - actual).abs().max() <= 2e-6 * max(1.0, expected.abs().max())


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_untied_vocabulary_head(tmp_path: Path, family: str) -> None:
    architecture = next(a for f, a in MODELS if f == family and "MaskedLM" in a)
    reference = save_tiny(tmp_path / "theirs", family, architecture, tie_word_embeddings=False)
    loaded = heedful.load(tmp_path / "theirs")
    ids, types = random_sequences(family)
    with torch.no_grad():
        expected = hf_outputs(reference, family, ids, types)[0]
        assert (our_outputs(loaded, random_batch(family))[0] - expected).abs().max() < 2e-6 * expected.abs().max()
    heedful.save(loaded, tmp_path / "ours")
    before, after = (load_file(tmp_path / side / "model.safetensors") for side in ("theirs", "ours"))
    assert before.keys() == after.keys()
    reloaded, report = getattr(transformers, architecture).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys")), report
    with torch.no_grad():
        assert (hf_outputs(reloaded.eval(), family, ids, types)[0] - expected).abs().max() <= 2e-6 * max(
            1.0, expected.abs().max()
        )


def _rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertForMaskedLM")

    def second(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tokens = tensors["bert.embeddings.word_embeddings.weight"]
        return tensors | {"cls.predictions.decoder.weight": tokens.clone() + 1}

    _rewrite(tmp_path, second)
    with pytest.raises(heedful.HeedfulError, match="should be one tensor, but they differ"):
        heedful.load(tmp_path)


def test_tied_tensors_that_are_stored_twice_are_one(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertForMaskedLM")
    count = heedful.load(tmp_path).count()
    _rewrite(
        tmp_path,
        lambda tensors: (
            tensors | {"cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone()}
        ),
    )
    assert heedful.load(tmp_path).count() == count


def test_old_names_of_norms(tmp_path: Path) -> None:
    """Gamma and beta, position_ids that older versions saved, and a folder without the prefix."""
    save_tiny(tmp_path, "bert", "BertForMaskedLM")
    expected = heedful.load(tmp_path)(random_batch("bert"))

    def old(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        renamed = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in tensors.items()
        }
        return renamed | {"bert.embeddings.position_ids": torch.arange(40.0)[None]}

    _rewrite(tmp_path, old)
    assert "cls.predictions.transform.LayerNorm.gamma" in load_file(tmp_path / "model.safetensors")
    assert torch.equal(heedful.load(tmp_path)(random_batch("bert")), expected)


def test_a_folder_with_more_heads_than_it_names(tmp_path: Path) -> None:
    """As bert-base-uncased is published: the file has a pooler and a next-sentence head, the config names neither."""
    reference = save_tiny(tmp_path, "bert", "BertForPreTraining")
    values = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.warns(heedful.HeedfulWarning, match=r"4 tensors belong to other heads.*bert\.pooler\.dense"):
        loaded = heedful.load(tmp_path)
    assert loaded.config.head is not None and loaded.config.head.kind == "masked_lm"
    whole = heedful.load(tmp_path, head="pretraining")
    assert whole.unused_tensors == ()
    ids, types = random_sequences("bert")
    with torch.no_grad():
        for actual, expected in zip(
            our_outputs(whole, random_batch("bert")), hf_outputs(reference, "bert", ids, types), strict=True
        ):
            assert (actual - expected).abs().max() < 2e-6 * expected.abs().max()
    with pytest.raises(heedful.HeedfulError, match=r"qa_outputs"):
        heedful.load(tmp_path, head="question_answering")
    with pytest.raises(heedful.HeedfulError, match=r"'mask' is no head.*did you mean \"masked_lm\""):
        heedful.load(tmp_path, head="mask")


def test_a_bare_folder_without_its_pooler(tmp_path: Path) -> None:
    model = make_tiny("bert", "BertModel")
    bare = transformers.BertModel(model.config, add_pooling_layer=False)
    bare.save_pretrained(tmp_path)
    loaded = heedful.load(tmp_path)
    assert loaded.head is None
    heedful.save(loaded, tmp_path / "again")
    assert load_file(tmp_path / "again/model.safetensors").keys() == load_file(tmp_path / "model.safetensors").keys()


def test_an_untied_head_whose_bias_has_its_first_name_alone(tmp_path: Path) -> None:
    """transformers 4 saves one name of what it shares."""
    save_tiny(tmp_path, "bert", "BertForMaskedLM", tie_word_embeddings=False)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = heedful.load(tmp_path).named_tensors()["head.decoder.bias"]
    bias = tensors.pop("cls.predictions.decoder.bias")
    save_file(tensors | {"cls.predictions.bias": bias}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(heedful.load(tmp_path).named_tensors()["head.decoder.bias"], expected)


def test_keys_that_change_nothing_are_passed_over(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertModel")
    known = json.loads((tmp_path / "config.json").read_text())
    more = {"_attn_implementation_autoset": True, "_attn_implementation_internal": "sdpa", "sentence_transformers": {}}
    (tmp_path / "config.json").write_text(json.dumps(known | more))
    heedful.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(known | {"_attn_implementation_internal": "kernels/mine"}))
    with pytest.raises(HeedfulError, match="runs no code"):
        heedful.load(tmp_path)
    save_tiny(tmp_path / "albert", "albert", "AlbertModel")
    config = json.loads((tmp_path / "albert/config.json").read_text()) | {"position_embedding_type": "relative_key"}
    (tmp_path / "albert/config.json").write_text(json.dumps(config))
    with pytest.raises(HeedfulError, match="position_embedding_type"):
        heedful.load(tmp_path / "albert")
