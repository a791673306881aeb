"""Few labels: methods are compared on held-out examples, and the best one trains on all of them."""

from __future__ import annotations

import json
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
from heedful.runs.finetune.method_choice import METHODS, assign_folds
from heedful.runs.finetune.plan import plan_finetune
from heedful.runs.finetune.run import finetune
from heedful.runs.results import read_results
from heedful.tasks.specs import SPECS
from heedful.train.fit import Reporter
from tests.support.generated_data import classification_rows
from tests.support.tiny_runs import classify


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model that has random weights."""
    folder = tmp_path_factory.mktemp("encoder") / "model"
    save(classify()[0].eval(), folder)
    return str(folder)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No timing, one thread, few steps of contrastive training, few epochs of fine-tuning."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {"latency": {}, "throughput": 1})
    monkeypatch.setattr("heedful.runs.finetune.settings.MIN_CONTRASTIVE_STEPS", 5)
    for kind in ("classify", "multiple"):
        monkeypatch.setitem(SPECS, kind, replace(SPECS[kind], epochs=((0, 2.0),)))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(folder: Path, encoder: str, *, count: int = 24, **overrides: Any) -> dict[str, Any]:
    """The results of a run on few rows and on a test split."""
    data = {"train": classification_rows(count), "test": classification_rows(12, 1)}
    return finetune("classify", data, folder, model=encoder, overrides=overrides).results


def test_few_labels_compare_all_methods_and_train_by_the_best(tmp_path: Path, encoder: str) -> None:
    results = run(tmp_path / "run", encoder)
    comparison = results["method_comparison"]
    assert list(comparison["methods"]) == list(METHODS) and comparison["measured_on"] == "4 folds of train"
    ranked = {name: (scored["metric_value"], scored["tie_breaker"]) for name, scored in comparison["methods"].items()}
    assert comparison["method"] == max(ranked, key=lambda name: ranked[name]) == results["settings"]["method"]
    for scored in comparison["methods"].values():
        assert scored["numbers"]["count"] == 24, "each example is held out once"
        assert scored["intervals"]["accuracy"]["low"] <= scored["metric_value"]
    assert results["data"]["splits"]["train"]["examples"] == 24 and "dev" not in results["splits"]
    card = (tmp_path / "run/model/README.md").read_text()
    assert "Methods on held-out examples" in card and "contrastive" in card
    assert "Methods on held-out examples" in (tmp_path / "run/report.html").read_text()


@pytest.mark.slow
def test_the_choice_is_kept_when_the_same_command_is_given_again(tmp_path: Path, encoder: str) -> None:
    run(tmp_path / "run", encoder)
    path = tmp_path / "run/method.json"
    before = path.read_bytes()
    (tmp_path / "run/results.json").unlink()  # as if it had been interrupted
    run(tmp_path / "run", encoder)
    assert path.read_bytes() == before, "seconds would differ if it was measured again"


@pytest.mark.parametrize("before", ["auto", "linear"])
def test_nothing_is_compared_for_a_folder_with_a_finished_run(
    tmp_path: Path, encoder: str, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    run(tmp_path / "run", encoder, method=before)
    monkeypatch.setattr("heedful.runs.finetune.method_choice._compare", lambda *arguments: pytest.fail("compared"))
    with pytest.raises(RunError, match=r"train\.seed was 1 and is 2 now"):
        run(tmp_path / "run", encoder, **{"train.seed": 2})
    with pytest.raises(RunError, match="holds a run on other data"):
        run(tmp_path / "run", encoder, count=23)


def test_a_dev_split_that_is_given_compares_the_methods(tmp_path: Path, encoder: str) -> None:
    data = {"train": classification_rows(24), "dev": classification_rows(10, 2)}
    results = finetune("classify", data, tmp_path / "run", model=encoder).results
    comparison = results["method_comparison"]
    assert comparison["measured_on"] == "dev"
    assert comparison["methods"]["linear"]["numbers"]["count"] == 10
    chosen = comparison["methods"][comparison["method"]]
    assert results["splits"]["dev"]["numbers"]["count"] == 10
    if comparison["method"] == "linear":  # the other methods read examples in another order
        assert results["splits"]["dev"]["numbers"]["accuracy"] == chosen["metric_value"]


@pytest.mark.parametrize("method", ["linear", "contrastive"])
def test_a_method_that_is_named_is_not_compared(tmp_path: Path, encoder: str, method: str) -> None:
    results = run(tmp_path / "run", encoder, method=method)
    assert "method_comparison" not in results and not (tmp_path / "run/method.json").exists()
    assert results["settings"]["method"] == method
    answer = heedful.Engine(tmp_path / "run")(["the cat sat"])[0]
    assert set(answer["probabilities"]) == {"bad", "good"}
    lines = [json.loads(line) for line in (tmp_path / "run/predictions-test.jsonl").read_text().splitlines()]
    assert len(lines) == 12
    again = run(tmp_path / "again", encoder, method=method)
    assert again["splits"] == results["splits"], "the same to the last bit"


def test_folds_evaluate_the_method_of_the_run_out_of_fold(tmp_path: Path, encoder: str) -> None:
    results = run(tmp_path / "run", encoder, method="linear", folds=3)
    assert list(results["method_comparison"]["methods"]) == ["linear"]
    assert results["method_comparison"]["measured_on"] == "3 folds of train"
    tuned = run(tmp_path / "tuned", encoder, folds=2, epochs=1)
    assert list(tuned["method_comparison"]["methods"]) == ["finetune"]


def test_methods_that_take_too_long_are_not_compared(
    tmp_path: Path, encoder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = run(tmp_path / "run", encoder, method_seconds=0.0)["method_comparison"]
    assert comparison["method"] == "contrastive" and not comparison["methods"]
    assert "comparing methods would take about" in comparison["why"]
    seconds = {"contrastive": 1.0, "linear": 0.0, "finetune": 1000.0}
    monkeypatch.setattr(
        "heedful.runs.finetune.method_choice._training_seconds", lambda plan, examples: seconds[plan.settings.method]
    )
    comparison = run(tmp_path / "some", encoder)["method_comparison"]
    assert list(comparison["methods"]) == ["contrastive", "linear"]
    assert "finetune not tried within 120 s" in comparison["why"]


def test_contrastive_training_resumes(tmp_path: Path, encoder: str) -> None:
    whole = run(tmp_path / "whole", encoder, method="contrastive", **{"train.max_steps": 8})
    data = {"train": classification_rows(24), "test": classification_rows(12, 1)}

    class StopAfterThree(Reporter):
        def step(self, step: Any, trainer: Any) -> None:
            trainer.stop_requested = step.number == 3

    settings: dict[str, Any] = {"method": "contrastive", "train.max_steps": 8}
    stopped = finetune("classify", data, tmp_path / "run", model=encoder, overrides=settings, reporter=StopAfterThree())
    assert stopped.status == "interrupted"
    resumed = finetune("classify", data, tmp_path / "run", model=encoder, overrides=settings)
    assert resumed.results["splits"] == whole["splits"]


def plan_method(encoder: str, count: int = 24, **overrides: Any) -> tuple[str, bool]:
    """The planned method, and whether there is a dev split."""
    data = {"train": classification_rows(count)}
    plan = plan_finetune("classify", data, model=encoder, overrides=overrides)
    return plan.settings.method, "dev" in plan.stats.non_empty_splits


def test_methods_are_compared_for_few_rows_unless_fine_tuning_is_set_up_by_hand(encoder: str) -> None:
    assert plan_method(encoder) == ("auto", False)
    assert plan_method(encoder, 199) == ("auto", False)
    assert plan_method(encoder, 230) == ("finetune", True)
    assert plan_method(encoder, epochs=2)[0] == "finetune"
    assert plan_method(encoder, patience=2)[0] == "finetune"
    assert plan_method(encoder, **{"train.seed": 3}) == ("auto", False)
    assert plan_method(encoder, **{"data.dev_fraction": 0.3}) == ("auto", True)
    assert plan_method(encoder, 230, method="auto") == ("auto", True)
    assert plan_method(encoder, method="finetune") == ("finetune", True)
    assert plan_method(encoder, method="linear") == ("linear", False)
    assert (
        plan_finetune("classify", classification_rows(24), overrides={"init.kind": "scratch"}).settings.method
        == "finetune"
    )


def test_methods_that_cannot_be_used_are_refused(encoder: str) -> None:
    rows = {"train": [{"text": "a b", "score": 1.0}, {"text": "c d", "score": 2.0}]}
    with pytest.raises(SettingError) as refused:
        plan_finetune("regress", rows, model=encoder, overrides={"method": "linear"})
    assert refused.value.path == "method"
    with pytest.raises(SettingError) as refused:
        plan_finetune("regress", rows, model=encoder, overrides={"folds": 3})
    assert refused.value.path == "folds"
    with pytest.raises(SettingError) as refused:
        plan_finetune("classify", classification_rows(24), overrides={"method": "linear", "init.kind": "scratch"})
    assert refused.value.path == "method"


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


def test_folds_have_each_label_in_equal_shares_and_no_text_twice() -> None:
    examples = [LabelledExample(text=f"text {number % 40}", label=str(number % 4)) for number in range(60)]
    numbers = assign_folds(examples, 5, seed=1)
    assert numbers == assign_folds(examples, 5, seed=1) != assign_folds(examples, 5, seed=2)
    texts = [{e.text for e, own in zip(examples, numbers, strict=True) if own == fold} for fold in range(5)]
    assert sum(map(len, texts)) == 40, "no text is in two folds"
    for fold in range(5):
        labels = {e.text: e.label for e, own in zip(examples, numbers, strict=True) if own == fold}
        assert sorted(labels.values()) == ["0", "0", "1", "1", "2", "2", "3", "3"]


def test_any_number_of_labels_may_be_few(tmp_path: Path, encoder: str) -> None:
    rows = [
        {"text": text, "labels": labels}
        for text, labels in [("the cat sat", ["a"]), ("the dog ran", ["b"]), ("on the mat", []), ("a cat", ["a", "b"])]
    ]
    results = finetune("classify", {"train": rows * 3, "test": rows}, tmp_path / "run", model=encoder).results
    assert list(results["method_comparison"]["methods"]) == list(METHODS)
    assert read_results(tmp_path / "run")["task"] == "multiple"
