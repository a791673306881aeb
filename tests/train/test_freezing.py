"""Frozen layers: outputs do not change, weights are not trained, and there is no dropout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from heedful.checkpoint import load
from heedful.errors import HeedfulError, SettingError
from heedful.model.token_pruning import TokenPruning
from heedful.objectives import Sample
from heedful.packed import Packed
from heedful.train.freezing import check_freezing, freeze_layers
from heedful.train.optim import AdamW, Constant
from heedful.train.trainer import Trainer, TrainSettings
from tests.support import tiny_runs
from tests.support.tiny_models import make_tiny, random_sequences
from tests.support.tiny_runs import copy_weights, make_trainer, relative_error

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
BASE_MODELS = {
    "bert": "BertModel",
    "mpnet": "MPNetModel",
    "deberta-v2": "DebertaV2Model",
    "xlnet": "XLNetModel",
    "gpt2": "GPT2Model",
    "modernbert": "ModernBertModel",
    "nomic_bert": "NomicBertModel",
}


@pytest.mark.parametrize("family", BASE_MODELS)
def test_states_of_frozen_layers_lead_to_the_same_result(family: str, tmp_path: Path) -> None:
    make_tiny(family, BASE_MODELS[family]).save_pretrained(tmp_path)
    loaded = load(tmp_path)
    batch = Packed.of(random_sequences("bert", (7, 23, 4, 12))[0])
    rows = torch.tensor([0, 7, 30])
    for count in (1, 3, 4):
        expected = loaded.hidden_states(batch), loaded.hidden_states(batch, output_rows=rows)
        freeze_layers(loaded, count)
        states = loaded.model.frozen_states(batch)
        loaded.model.training = True  # only the flag of the model, since modules in training mode have dropout
        for source in (batch, replace(batch, states=states)):
            actual = loaded.hidden_states(source), loaded.hidden_states(source, output_rows=rows)
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
        changed = loaded.hidden_states(replace(batch, states=states + 1))
        assert not torch.allclose(changed, expected[0]), "the upper layers do not read the states"
        loaded.train(False)


def test_an_update_is_that_of_transformers_with_frozen_parameters(tmp_path: Path) -> None:
    reference = make_tiny("bert", "BertForSequenceClassification", **NO_DROPOUT)
    reference.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    ids, types = random_sequences("bert", (9, 9, 9, 9))
    samples = [Sample.of([i], [t], target=number % 3) for number, (i, t) in enumerate(zip(ids, types, strict=True))]
    settings = TrainSettings(
        max_steps=2, batch_size=4, freeze_layers=3, optimizer=AdamW(lr=1e-3, eps=1e-5, weight_decay=0.0),
        schedule=Constant(), precision="float32",
    )  # fmt: skip
    frozen_trainer = Trainer(loaded, tiny_runs.classify()[1], samples, settings)
    frozen = ("bert.embeddings.", *(f"bert.encoder.layer.{layer}." for layer in range(3)))
    trained = [tensor for name, tensor in reference.named_parameters() if not name.startswith(frozen)]
    assert sum(map(torch.numel, trained)) == sum(map(torch.numel, frozen_trainer.parameters.values()))
    optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=1e-5, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        labels = torch.tensor([0, 1, 2, 0])
        loss = reference(input_ids=torch.tensor(ids), token_type_ids=torch.tensor(types), labels=labels).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        step = frozen_trainer.train_step()
        assert step.loss == pytest.approx(loss.item(), rel=1e-5)
        assert step.grad_norm == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize("train", [{}, {"gradient_checkpointing": True}, {"ema_decay": 0.9}])
def test_frozen_layers_do_not_change_and_have_no_dropout(train: dict[str, Any]) -> None:
    frozen_trainer = make_trainer(dropout=0.3, freeze_layers=1, **train)
    before = copy_weights(frozen_trainer)
    list(frozen_trainer)
    after = copy_weights(frozen_trainer)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(frozen_trainer.parameters)
    assert not any(name.startswith(("embedding.", "encoder.blocks.0.")) for name in changed)
    assert any(name.startswith("encoder.blocks.1.") for name in changed)
    batch = Packed.of([[5, 6, 7], [8, 9]])
    frozen_trainer.loaded.train()
    states = [frozen_trainer.loaded.model.frozen_states(batch) for _ in range(2)]
    rows = [frozen_trainer.loaded.hidden_states(batch) for _ in range(2)]
    assert torch.equal(*states) and not torch.equal(*rows)
    assert (
        frozen_trainer.loaded.model.embedding.training is False
        and frozen_trainer.loaded.model.encoder.blocks[1].training
    )


def test_layer_decay_counts_frozen_layers() -> None:
    optimizer = {"kind": "adamw", "lr": 1e-2, "layer_decay": 0.5}
    frozen, all_trained = (make_trainer(freeze_layers=count, optimizer=optimizer) for count in (1, 0))
    expected = all_trained._optimizer.peak_lrs
    assert frozen._optimizer.peak_lrs == {name: expected[name] for name in frozen.parameters}


def test_a_run_resumes_with_frozen_layers() -> None:
    uninterrupted, first, second = (make_trainer(freeze_layers=1) for _ in range(3))
    list(uninterrupted)
    for _ in range(5):
        first.train_step()
    second.load_state(*tiny_runs.copy_state(first))
    list(second)
    assert tiny_runs.tensors_equal(copy_weights(second), copy_weights(uninterrupted))
    assert relative_error(copy_weights(uninterrupted), copy_weights(make_trainer())) > 0


def test_models_whose_layers_cannot_be_frozen_are_refused(tmp_path: Path) -> None:
    for family, architecture, expected in (
        ("albert", "AlbertModel", "is 2, but the 4 layers of the model share the weights of 2: leave it out"),
        ("t5", "T5ForConditionalGeneration", "the model has an encoder and a decoder"),
        ("bert", "BertModel", ""),
    ):
        make_tiny(family, architecture).save_pretrained(tmp_path / family)
        config = load(tmp_path / family).config.model
        if expected:
            with pytest.raises(SettingError, match=expected):
                check_freezing(config, 2)
    check_freezing(config, 4)
    for count, top, expected in (
        (5, 0, "freeze_layers is 5, but the model has 4 layers: give 4 or fewer"),
        (3, 2, "has 4 layers, and init.reinit_layers gives random weights to 2 of them: give 2 or fewer"),
        (1, 4, "has 4 layers, and init.reinit_layers gives random weights to 4 of them: leave it out"),
    ):
        with pytest.raises(SettingError, match=expected):
            check_freezing(config, count, top)
    check_freezing(config, 2, pruning=TokenPruning(layer=2, keep_rate=0.5))
    with pytest.raises(SettingError, match="after layer 2, the model computes a part of the tokens: give 2 or fewer"):
        check_freezing(config, 3, pruning=TokenPruning(layer=2, keep_rate=0.5))
    with pytest.raises(SettingError, match="starts from random weights"):
        check_freezing(None, 1)
    with pytest.raises(SettingError, match="is no Transformer"):
        check_freezing(object(), 1)
    with pytest.raises(SettingError, match="the model has 2 layers"):
        make_trainer(freeze_layers=3)


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        ({"freeze_layers": -1}, "freeze_layers is -1; expected a whole number from 0"),
        ({"cache_gb": 2.0}, "cache_gb is 2, which is for outputs of frozen layers, and freeze_layers is 0"),
        ({"freeze_layers": 1, "cache_gb": -1.0}, "cache_gb is -1.0; expected a number of GB from 0"),
        ({"freeze_layers": 1, "data_parallel_shard_degree": 2}, "unset one of them"),
    ],
)
def test_conflicting_settings_are_refused(train: dict[str, Any], expected: str) -> None:
    with pytest.raises(HeedfulError, match=expected):
        TrainSettings(epochs=1.0, **train)
