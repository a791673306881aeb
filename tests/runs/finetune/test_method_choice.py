"""The choice of a training method for few labels: methods are compared on held-out examples, and the best one trains.

The methods are "contrastive", "linear" and "finetune".
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from heedful.checkpoint import save
from heedful.data import LabelledExample
from heedful.errors import DataError, RunError, SettingError
from heedful.runs.finetune.method_choice import METHODS, HeldOutAnswers, assign_folds, choose_method
from heedful.runs.finetune.plan import plan_finetune
from heedful.runs.finetune.run import finetune
from heedful.runs.results import RunResult, coverage_numbers, read_predictions, read_results
from heedful.tasks.specs import SPECS
from heedful.train.fit import Reporter
from tests.support.generated_data import classification_rows
from tests.support.reporters import Messages
from tests.support.tiny_runs import classify


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model with random weights."""
    folder = tmp_path_factory.mktemp("encoder") / "model"
    model, *_ = classify()
    save(model.eval(), folder)
    return str(folder)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out the measurement of latency, compute with one thread, and train for few steps and epochs."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {"latency": {}, "throughput": 1})
    monkeypatch.setattr("heedful.runs.finetune.settings.MIN_CONTRASTIVE_STEPS", 5)
    for kind in ("classify", "multiple"):
        monkeypatch.setitem(SPECS, kind, replace(SPECS[kind], epochs=((0, 2.0),)))
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def train_and_test(num_train: int = 24) -> dict[str, Any]:
    return {"train": classification_rows(num_train), "test": classification_rows(12, 1)}


def results_of_run(folder: Path, encoder: str, *, num_train: int = 24, **overrides: Any) -> dict[str, Any]:
    """Fine-tune on few rows without a dev split, and return the results."""
    return finetune("classify", train_and_test(num_train), folder, model=encoder, overrides=overrides).results


def test_methods_are_compared_and_the_best_one_trains_on_all_rows(tmp_path: Path, encoder: str) -> None:
    run = tmp_path / "run"
    results = results_of_run(run, encoder)
    comparison = results["method_comparison"]
    methods = comparison["methods"]
    assert tuple(methods) == METHODS
    assert comparison["measured_on"] == "4 folds of train"
    best = comparison["method"]
    highest = max(result["metric_value"] for result in methods.values())
    assert best == "contrastive" or methods[best]["metric_value"] == highest
    assert results["settings"]["method"] == best
    for method in methods.values():
        assert method["numbers"]["count"] == 24, "each example is held out once"
        assert method["intervals"]["accuracy"]["low"] <= method["metric_value"]
    assert results["data"]["splits"]["train"]["examples"] == 24
    assert "dev" not in results["splits"]
    card = (run / "model/README.md").read_text()
    assert "Methods on held-out examples" in card
    assert f"Method {best}, chosen for 24 examples" in card
    assert "Methods on held-out examples" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("correct", "expected"),
    [
        ({"contrastive": 30, "linear": 32, "finetune": 29}, "contrastive"),  # linear is better by chance
        ({"contrastive": 20, "linear": 33, "finetune": 38}, "finetune"),
        ({"contrastive": 20, "linear": 33}, "linear"),  # there was no time for finetune
    ],
)
def test_a_method_is_chosen_if_it_is_better_by_more_than_chance(correct: dict[str, int], expected: str) -> None:
    _, task, _ = classify()
    examples = [LabelledExample(text=str(index), label="good") for index in range(40)]

    def answers(method: str, count: int) -> HeldOutAnswers:
        order = random.Random(method).sample(range(40), 40)  # methods are right about different examples
        labels = [("good", "bad") if index < count else ("bad", "good") for index in order]
        rows: list[Any] = [
            {"label": label, "probability": 0.9, "probabilities": {label: 0.9, rest: 0.1}} for label, rest in labels
        ]
        return HeldOutAnswers(task=task, ids=range(40), examples=examples, answers=rows)

    assert choose_method({method: answers(method, count) for method, count in correct.items()}) == expected


@pytest.mark.slow
def test_a_resumed_run_does_not_compare_again(tmp_path: Path, encoder: str) -> None:
    run = tmp_path / "run"
    results_of_run(run, encoder)
    comparison = (run / "method.json").read_bytes()
    (run / "results.json").unlink()  # as if the run had been interrupted
    results_of_run(run, encoder)
    assert (run / "method.json").read_bytes() == comparison, "the measured seconds would differ"


@pytest.mark.parametrize("finished_method", ["auto", "linear"])
def test_nothing_is_compared_for_a_folder_with_a_finished_run(
    tmp_path: Path, encoder: str, monkeypatch: pytest.MonkeyPatch, finished_method: str
) -> None:
    run = tmp_path / "run"
    results_of_run(run, encoder, method=finished_method)
    monkeypatch.setattr("heedful.runs.finetune.method_choice._compare", lambda *arguments: pytest.fail("compared"))
    with pytest.raises(RunError, match=r"train\.seed was 1 and is 2 now"):
        results_of_run(run, encoder, **{"train.seed": 2})
    with pytest.raises(RunError, match="holds a run on other data"):
        results_of_run(run, encoder, num_train=23)


def test_methods_are_compared_on_dev_if_there_is_a_dev_split(tmp_path: Path, encoder: str) -> None:
    data = {"train": classification_rows(24), "dev": classification_rows(10, 2)}
    results = finetune("classify", data, tmp_path / "run", model=encoder).results
    comparison = results["method_comparison"]
    assert comparison["measured_on"] == "dev"
    assert comparison["methods"]["linear"]["numbers"]["count"] == 10
    dev = results["splits"]["dev"]["numbers"]
    assert dev["count"] == 10
    if comparison["method"] == "linear":  # the order of examples in the other methods is not that of the comparison
        assert dev["accuracy"] == comparison["methods"]["linear"]["metric_value"]


@pytest.mark.parametrize("method", ["linear", "contrastive"])
def test_a_named_method_is_not_compared(tmp_path: Path, encoder: str, method: str) -> None:
    run = tmp_path / "run"
    results = results_of_run(run, encoder, method=method)
    assert "method_comparison" not in results
    assert not (run / "method.json").exists()
    assert results["settings"]["method"] == method
    (answer,) = heedful.Engine(run)(["the cat sat"])
    assert set(answer["probabilities"]) == {"bad", "good"}
    assert len(list(read_predictions(run, "test"))) == 12
    repeated = results_of_run(tmp_path / "repeated", encoder, method=method)
    assert repeated["splits"] == results["splits"]


def test_folds_evaluate_the_method_of_the_run_out_of_fold(tmp_path: Path, encoder: str) -> None:
    run = tmp_path / "linear"
    comparison = results_of_run(run, encoder, method="linear", folds=3)["method_comparison"]
    assert list(comparison["methods"]) == ["linear"]
    assert comparison["measured_on"] == "3 folds of train"
    assert "Accuracy on test of the answers" in (run / "model/README.md").read_text(), "the test split goes first"
    comparison = results_of_run(tmp_path / "finetune", encoder, folds=2, epochs=1)["method_comparison"]
    assert list(comparison["methods"]) == ["finetune"]


def test_without_dev_and_test_the_folds_show_accuracy_over_coverage(tmp_path: Path, encoder: str) -> None:
    run = tmp_path / "run"
    data = {"train": classification_rows(24)}
    results = finetune("classify", data, run, model=encoder, overrides={"method": "linear", "folds": 4}).results
    numbers = results["method_comparison"]["methods"]["linear"]["numbers"]
    assert coverage_numbers(results) == ("4 folds of train", numbers)
    card = (run / "model/README.md").read_text()
    assert "Accuracy on 4 folds of train of the answers above a confidence threshold" in card
    assert f"| 100.0 % | 24 | {numbers['accuracy']:.3f} |" in card
    for text in (card, (run / "report.html").read_text()):
        assert "Nothing was measured" not in text and "Not measured at all" not in text
        assert (
            "Its method was measured by cross-validation (4 folds of train): see Methods on held-out examples." in text
        )
    assert "- Not measured itself; only its method was, by cross-validation." in card


def test_nothing_is_compared_if_there_is_no_time(tmp_path: Path, encoder: str) -> None:
    comparison = results_of_run(tmp_path / "run", encoder, method_seconds=0.0)["method_comparison"]
    assert comparison["method"] == "contrastive"
    assert not comparison["methods"]
    assert "comparing methods would take about" in comparison["why"]
    assert "comparing methods would take about" in (tmp_path / "run/model/README.md").read_text()


def test_methods_that_take_too_long_are_left_out(tmp_path: Path, encoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"contrastive": 1.0, "linear": 0.0, "finetune": 1000.0}
    monkeypatch.setattr(
        "heedful.runs.finetune.method_choice._training_seconds", lambda plan, examples: seconds[plan.settings.method]
    )
    comparison = results_of_run(tmp_path / "run", encoder)["method_comparison"]
    assert list(comparison["methods"]) == ["contrastive", "linear"]
    assert "finetune not tried within 120 s" in comparison["why"]


def test_contrastive_training_resumes(tmp_path: Path, encoder: str) -> None:
    settings: dict[str, Any] = {"method": "contrastive", "train.max_steps": 8}
    uninterrupted = results_of_run(tmp_path / "uninterrupted", encoder, **settings)

    def run(reporter: Reporter | None) -> RunResult:
        return finetune(
            "classify", train_and_test(), tmp_path / "run", model=encoder, overrides=settings, reporter=reporter
        )

    assert run(Messages(stop_after=3)).status == "interrupted"
    assert run(None).results["splits"] == uninterrupted["splits"]


def method_and_dev(encoder: str, num_train: int = 24, **overrides: Any) -> tuple[str, bool]:
    """Return the planned method, and whether there is a dev split."""
    data = {"train": classification_rows(num_train)}
    plan = plan_finetune("classify", data, model=encoder, overrides=overrides)
    return plan.settings.method, "dev" in plan.stats.non_empty_splits


def test_methods_are_compared_for_few_rows(encoder: str) -> None:
    assert method_and_dev(encoder) == ("auto", False)
    assert method_and_dev(encoder, 199) == ("auto", False)
    assert method_and_dev(encoder, 230) == ("finetune", True)
    assert method_and_dev(encoder, 230, method="auto") == ("auto", True)
    assert method_and_dev(encoder, **{"train.seed": 3}) == ("auto", False)
    assert method_and_dev(encoder, **{"data.dev_fraction": 0.3}) == ("auto", True)
    assert method_and_dev(encoder, method="linear") == ("linear", False)


def test_methods_are_not_compared_if_settings_of_fine_tuning_are_given(encoder: str) -> None:
    assert method_and_dev(encoder, method="finetune") == ("finetune", True)
    assert method_and_dev(encoder, epochs=2)[0] == "finetune"
    assert method_and_dev(encoder, patience=2)[0] == "finetune"
    from_scratch = plan_finetune("classify", classification_rows(24), overrides={"init.kind": "scratch"})
    assert from_scratch.settings.method == "finetune"


@pytest.mark.parametrize(
    ("task", "overrides", "path"),
    [
        ("regress", {"method": "linear"}, "method"),
        ("regress", {"folds": 3}, "folds"),
        ("classify", {"method": "linear", "init.kind": "scratch"}, "method"),
    ],
)
def test_methods_that_a_task_or_a_model_cannot_use_are_refused(task: str, overrides: dict[str, Any], path: str) -> None:
    scored_rows = [{"text": "a b", "score": 1.0}, {"text": "c d", "score": 2.0}]
    data = {"train": scored_rows if task == "regress" else classification_rows(24)}
    with pytest.raises(SettingError) as error:
        plan_finetune(task, data, overrides=overrides)
    assert error.value.path == path


@pytest.mark.parametrize(
    ("method", "setting"),
    [
        ("auto", {"epochs": 2}),
        ("linear", {"epochs": 2}),
        ("linear", {"patience": 2}),
        ("contrastive", {"patience": 2}),
        ("contrastive", {"load_best_at_end": False}),
    ],
)
def test_settings_without_effect_are_refused(encoder: str, method: str, setting: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="would change nothing"):
        plan_finetune("classify", classification_rows(24), model=encoder, overrides={"method": method} | setting)


def test_more_folds_than_texts_are_refused(tmp_path: Path, encoder: str) -> None:
    rows = [{"text": text, "label": label} for text, label in [("a cat", "x"), ("a dog", "y")] * 3]
    with pytest.raises(DataError, match="2 different texts"):
        finetune("classify", {"train": rows}, tmp_path / "run", model=encoder, overrides={"folds": 3})
    results = finetune("classify", {"train": rows}, tmp_path / "two", model=encoder, overrides={"folds": 2}).results
    assert results["method_comparison"]["folds"] == 2


def test_folds_are_stratified_by_label_and_no_text_is_in_two_folds() -> None:
    # 40 different texts, 20 of which occur twice
    examples = [LabelledExample(text=f"text {number % 40}", label=str(number % 4)) for number in range(60)]
    fold_numbers = assign_folds(examples, 5, seed=1)
    label_by_text: list[dict[str, str]] = [{} for _ in range(5)]  # for each fold
    for example, fold_number in zip(examples, fold_numbers, strict=True):
        label_by_text[fold_number][example.text] = example.label
    assert sum(map(len, label_by_text)) == 40
    for labels in label_by_text:
        assert sorted(labels.values()) == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert assign_folds(examples, 5, seed=1) == fold_numbers
    assert assign_folds(examples, 5, seed=2) != fold_numbers


def test_methods_are_compared_for_several_labels_per_text(tmp_path: Path, encoder: str) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "the cat sat", "labels": ["a"]},
        {"text": "the dog ran", "labels": ["b"]},
        {"text": "on the mat", "labels": []},
        {"text": "a cat", "labels": ["a", "b"]},
    ]
    results = finetune("classify", {"train": rows * 3, "test": rows}, tmp_path / "run", model=encoder).results
    assert list(results["method_comparison"]["methods"]) == list(METHODS)
    assert read_results(tmp_path / "run")["task"] == "multiple"
