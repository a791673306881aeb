"""Names of tensors and keys of config.json: each is read once and written again, and transformers reads the result."""

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
    scaled_error,
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
    is_bare = architecture == FAMILIES[family].bare
    for name in load_file(folder / "model.safetensors"):
        table_name = FAMILIES[family].table_name(name, is_bare)
        if table_name in table.constants:
            continue
        templates = [template for row in table.rows for template in row.hf]
        matching = [template for template in templates if name_pattern(template).fullmatch(table_name)]
        assert len(matching) == 1, (name, matching)
    for name in loaded.named_tensors():
        matching = [row.name for row in table.rows if name_pattern(row.name).fullmatch(name)]
        assert len(matching) == 1, (name, matching)


@each_own_head
def test_round_trip_is_bitwise_and_transformers_reads_it(
    tmp_path: Path, saved: Saved, family: str, architecture: str
) -> None:
    reference, folder = saved(family, architecture)
    heedful.save(heedful.load(folder), tmp_path / "ours")

    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "ours/config.json").read_text()) == json.loads((folder / "config.json").read_text())

    reloaded, report = getattr(transformers, architecture).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    expected, actual = reference.state_dict(), reloaded.state_dict()
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
    use_eager_attention(reloaded)
    ids, types = random_sequences(family)
    with torch.no_grad():
        expected_outputs = hf_outputs(reference, family, ids, types)
        actual_outputs = hf_outputs(reloaded.eval(), family, ids, types)
    for actual_output, expected_output in zip(actual_outputs, expected_outputs, strict=True):
        # not bitwise: the order of a sum may depend on the alignment of its tensors in memory
        assert scaled_error(actual_output, expected_output) <= 2e-6


@each_own_head
def test_config_is_written_as_transformers_understands_it(family: str, architecture: str) -> None:
    """A config.json that is written from our own config alone, without the one that was read, describes the model."""
    reference = make_tiny(family, architecture, problem_type="multi_label_classification")
    values = json.loads(reference.config.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    config = read_config(values, "config.json")
    written = write_config(heedful.checkpoint.BundleConfig(family=family, model=config.model, head=config.head))
    reloaded = read_config(written, "written")
    assert (reloaded.model, reloaded.head) == (config.model, config.head)
    rebuilt = getattr(transformers, architecture)(type(reference.config)(**written))
    rebuilt.load_state_dict(reference.state_dict())
    use_eager_attention(rebuilt)
    ids, types = random_sequences(family)
    with torch.no_grad():
        expected_outputs = hf_outputs(reference, family, ids, types)
        actual_outputs = hf_outputs(rebuilt.eval(), family, ids, types)
    for actual, expected in zip(actual_outputs, expected_outputs, strict=True):
        assert scaled_error(actual, expected) <= 2e-6


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_untied_vocabulary_head(tmp_path: Path, family: str) -> None:
    architecture = next(name for name in FAMILIES[family].heads if name.endswith("MaskedLM"))
    reference = save_tiny(tmp_path / "theirs", family, architecture, tie_word_embeddings=False)
    loaded = heedful.load(tmp_path / "theirs")
    ids, types = random_sequences(family)
    with torch.no_grad():
        expected = hf_outputs(reference, family, ids, types)[0]
        assert (our_outputs(loaded, random_batch(family))[0] - expected).abs().max() < 2e-6 * expected.abs().max()
    heedful.save(loaded, tmp_path / "ours")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    assert before.keys() == after.keys()
    reloaded, report = getattr(transformers, architecture).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys")), report
    with torch.no_grad():
        assert scaled_error(hf_outputs(reloaded.eval(), family, ids, types)[0], expected) <= 2e-6


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Replace the tensors of a folder by what `change` makes of them."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")


def test_tied_tensors_that_differ_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertForMaskedLM")

    def store_another_output(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tokens = tensors["bert.embeddings.word_embeddings.weight"]
        return tensors | {"cls.predictions.decoder.weight": tokens.clone() + 1}

    _rewrite(tmp_path, store_another_output)
    with pytest.raises(heedful.HeedfulError, match="should be one tensor, but they differ"):
        heedful.load(tmp_path)


def test_tied_tensors_that_are_stored_twice_are_one(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertForMaskedLM")
    count = heedful.load(tmp_path).count()

    def store_the_output_too(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tokens = tensors["bert.embeddings.word_embeddings.weight"]
        return tensors | {"cls.predictions.decoder.weight": tokens.clone()}

    _rewrite(tmp_path, store_the_output_too)
    assert heedful.load(tmp_path).count() == count


def test_old_names_of_norms(tmp_path: Path) -> None:
    """Older versions named the parameters of a norm gamma and beta, and saved position_ids as well."""
    save_tiny(tmp_path, "bert", "BertForMaskedLM")
    expected = heedful.load(tmp_path)(random_batch("bert"))

    def rename_as_older_versions(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        renamed = {
            name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
            for name, tensor in tensors.items()
        }
        return renamed | {"bert.embeddings.position_ids": torch.arange(40.0)[None]}

    _rewrite(tmp_path, rename_as_older_versions)
    assert "cls.predictions.transform.LayerNorm.gamma" in load_file(tmp_path / "model.safetensors")
    assert torch.equal(heedful.load(tmp_path)(random_batch("bert")), expected)


def test_a_folder_with_more_heads_than_it_names(tmp_path: Path) -> None:
    """Published weights of bert-base-uncased include a pooler and a next-sentence head; its config names neither."""
    reference = save_tiny(tmp_path, "bert", "BertForPreTraining")
    values = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.warns(heedful.HeedfulWarning, match=r"4 tensors belong to other heads.*bert\.pooler\.dense"):
        loaded = heedful.load(tmp_path)
    assert loaded.config.head is not None and loaded.config.head.kind == "masked_lm"
    with_all_heads = heedful.load(tmp_path, head="pretraining")
    assert with_all_heads.unused_tensors == ()
    ids, types = random_sequences("bert")
    with torch.no_grad():
        actual_outputs = our_outputs(with_all_heads, random_batch("bert"))
        expected_outputs = hf_outputs(reference, "bert", ids, types)
        for actual, expected in zip(actual_outputs, expected_outputs, strict=True):
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
    """transformers 4 saves a tensor that two parameters share under one of their names."""
    save_tiny(tmp_path, "bert", "BertForMaskedLM", tie_word_embeddings=False)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = heedful.load(tmp_path).named_tensors()["head.decoder.bias"]
    bias = tensors.pop("cls.predictions.decoder.bias")
    save_file(tensors | {"cls.predictions.bias": bias}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(heedful.load(tmp_path).named_tensors()["head.decoder.bias"], expected)


def test_keys_that_change_nothing_are_passed_over(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertModel")
    values = json.loads((tmp_path / "config.json").read_text())
    ignored = {"_attn_implementation_autoset": True, "_attn_implementation_internal": "sdpa"}
    ignored["sentence_transformers"] = {}
    (tmp_path / "config.json").write_text(json.dumps(values | ignored))
    heedful.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values | {"_attn_implementation_internal": "kernels/mine"}))
    with pytest.raises(HeedfulError, match="runs no code"):
        heedful.load(tmp_path)
    save_tiny(tmp_path / "albert", "albert", "AlbertModel")
    config = json.loads((tmp_path / "albert/config.json").read_text()) | {"position_embedding_type": "relative_key"}
    (tmp_path / "albert/config.json").write_text(json.dumps(config))
    with pytest.raises(HeedfulError, match="position_embedding_type"):
        heedful.load(tmp_path / "albert")
