"""Fine-tuned models predict the examples that they were not trained on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heedful.checkpoint import save
from heedful.data import LabelledExample
from heedful.runs.finetune import out_of_fold
from heedful.runs.finetune.out_of_fold import finetuned_fold_predictor
from tests.support.generated_data import classification_rows
from tests.support.tiny_runs import classify


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute with one thread, so that equal trainings are equal."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("text_pair", [None, "a second text"])
def test_the_held_out_examples_are_predicted(
    text_pair: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, *_ = classify()
    save(model.eval(), tmp_path / "model")
    examples = [
        LabelledExample(text=row["text"], text_pair=text_pair, label=row["label"]) for row in classification_rows(24)
    ]
    trained_on: list[list[LabelledExample]] = []
    train_in_memory = out_of_fold.train_in_memory

    def record(plan: Any, base: Any, train: list[LabelledExample]) -> Any:
        trained_on.append(train)
        return train_in_memory(plan, base, train)

    monkeypatch.setattr(out_of_fold, "train_in_memory", record)
    messages: list[str] = []
    options: dict[str, Any] = {"model": tmp_path / "model", "seed": 3, "device": "cpu", "log": messages.append}
    predict = finetuned_fold_predictor(examples, ["bad", "good"], **options)
    train, held_out = np.arange(16), np.arange(16, 24)
    probabilities = predict(train, held_out)
    assert trained_on == [examples[:16]]
    assert messages[-1] == "fine-tuned on 16 examples, 8 held out"
    assert probabilities.shape == (8, 2)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, atol=1e-6)
    assert (predict(train, held_out) == probabilities).all(), "each training begins with the same weights"
    reversed_columns = finetuned_fold_predictor(examples, ["good", "bad"], **options)(train, held_out)
    assert (reversed_columns == probabilities[:, ::-1]).all()
