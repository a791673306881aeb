"""Predictions of fine-tuned models for examples that they were not trained on, used by the search for label errors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from heedful.data.examples import LabelledExample
from heedful.device import resolve_dtype
from heedful.runs.finetune.build import initial_model
from heedful.runs.finetune.method_choice import train_in_memory
from heedful.runs.finetune.plan import plan_finetune
from heedful.runs.frozen_vectors import PredictFold
from heedful.runs.scoring import engine_for
from heedful.tasks.answering import Answer
from heedful.tasks.task import evaluate_task


def finetuned_fold_predictor(
    examples: Sequence[LabelledExample],
    classes: Sequence[str],
    *,
    model: str | Path,
    seed: int,
    device: str | None,
    log: Callable[[str], None],
) -> PredictFold:
    """Return a function that fine-tunes a model on some of the examples, and predicts the classes of others.

    Each call starts from the same pretrained weights.

    Args:
        examples: All examples.
        classes: All labels, in the order of the columns of the predictions.
        model: The pretrained model. It is fine-tuned with the settings that are the defaults for all examples, although
            a fold has fewer.
        seed: Seed of the training.
        device: "cpu", "cuda" or "cuda:1". If None, a GPU if there is one.
        log: Receives a message after each training, and messages about the initial model.
    """
    inputs = [example.text if example.text_pair is None else example.texts for example in examples]
    overrides = {"method": "finetune", "data.dev_fraction": 0.0, "train.seed": seed, "train.device": device or "auto"}
    data = {"train": (inputs, [example.label for example in examples])}
    plan = plan_finetune("classify", data, model=model, overrides=overrides)
    settings = plan.settings
    base = initial_model(settings.init, plan.source, plan.stats.counts, seed, settings.max_length, log)

    def predict(train: NDArray[np.int64], held_out: NDArray[np.int64]) -> NDArray[np.float64]:
        task, trained = train_in_memory(plan, base, [examples[index] for index in train])
        probabilities = np.zeros((len(held_out), len(classes)))

        def record(index: int, example: LabelledExample, answer: Answer, scored: object) -> None:
            probabilities[index] = [answer["probabilities"][label] for label in classes]

        engine = engine_for(task, trained, resolve_dtype(settings.eval_precision, next(trained.parameters()).device))
        evaluate_task(task, engine, [examples[index] for index in held_out], on_answer=record)
        log(f"fine-tuned on {len(train):,} examples, {len(held_out):,} held out")
        return probabilities

    return predict
