"""`evaluate` and `evaluate_glue`.

A run gets the metrics that it has measured itself. Metrics do not depend on the order of labels or on batch sizes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import heedful
from heedful.checkpoint import load, save
from heedful.checkpoint.new_head import rescaled, with_head
from heedful.cli import main
from heedful.data import DataSettings, LabelledExample, Quarantine, Raise, Skip, read
from heedful.data.labelled.statistics import DatasetStats
from heedful.errors import HeedfulError
from heedful.infer.engine import Engine
from heedful.infer.tuning.precision_gate import choose_precision, measure_precisions, open_in_precision
from heedful.runs import evaluate as evaluate_module
from heedful.runs import scoring
from heedful.runs.evaluate import GLUE_FOLDERS, build_eval_task, evaluate, evaluate_glue, open_for_model
from heedful.runs.results import read_results
from heedful.runs.scoring import PredictionFile, engine_for, measure_split
from heedful.tasks.embed import comparison
from heedful.tasks.metrics import GLUE
from heedful.tasks.task import ScoredAnswer
from heedful.train.ranks import Ranks
from tests.support import generated_data
from tests.support.classic_models import make_classic
from tests.support.generated_data import classification_rows, finetune_tiny, write_csv, write_jsonl, write_splits
from tests.support.model_folders import load_reference, make_model_dir, reference_logits

TASKS = {  # task by kind of generated data
    "single": "classify",
    "multiple": "classify",
    "regress": "regress",
    "tag": "tag",
    "plain": "tag",
    "impossible": "qa",
    "qa": "qa",
    "choose 2": "multiple-choice",
    "rank": "rank",
    "embed": "embed",
    "together": "embed",
}


def read_jsonl(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out the measurement of latency, and compute with one thread."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {})
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with labelled texts in the folder `data` and a classifier trained on them in the folder `run`."""
    folder = tmp_path_factory.mktemp("single")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heedful.runs.run.measure_latency", lambda loaded: {})
        finetune_tiny("classify", write_splits("single", folder / "data"), folder / "run", {"train.optimizer.lr": 3e-3})
    return folder


# -- the run's own numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TASKS)
def test_the_numbers_of_the_run_itself(kind: str, tmp_path: Path) -> None:
    labelled = write_splits(kind, tmp_path / "data")
    run = tmp_path / "run"
    settings = {"task.thresholds": "tuned"} if kind == "multiple" else None
    run_results = finetune_tiny(TASKS[kind], labelled, run, settings).results
    for split, expected in run_results["splits"].items():
        predictions = tmp_path / f"{split}.jsonl"
        evaluation = evaluate(run, labelled, split=split, predictions=predictions)
        assert evaluation.split == split
        assert evaluation.metric == run_results["metric"]
        assert as_json(evaluation.numbers) == expected["numbers"]
        assert as_json(evaluation.intervals) == expected["intervals"]
        assert predictions.read_bytes() == (run / f"predictions-{split}.jsonl").read_bytes()
    assert evaluate(run, labelled).split == "test", "the default split"


def as_json(value: Any) -> Any:
    """Return the value after writing and reading it as JSON, where tuples are lists and keys are texts."""
    return json.loads(json.dumps(value))


def test_a_generated_dev_split_can_be_generated_again(tmp_path: Path) -> None:
    labelled = write_csv(tmp_path / "a.csv", classification_rows(60))
    run_results = finetune_tiny("classify", labelled, tmp_path / "run").results
    dev_numbers = run_results["splits"]["dev"]["numbers"]
    assert 0 < dev_numbers["count"] < 20
    generated = evaluate(tmp_path / "run", labelled, split="dev", settings=DataSettings(dev_fraction=0.1))
    assert generated.numbers == dev_numbers
    whole_file = evaluate(tmp_path / "run", labelled)
    assert whole_file.split == "train"
    assert whole_file.numbers["count"] == 60


@pytest.mark.slow
def test_a_file_that_the_run_was_trained_on_is_reported(
    single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training file is recognised by its content, under any name. Files of dev and test, and a changed file, are not
    reported."""
    train_file = single / "data" / "train.csv"
    copied = tmp_path / "copied.csv"
    copied.write_bytes(train_file.read_bytes())
    assert evaluate(single / "run", copied).trained_on == (str(copied),)
    assert evaluate(single / "run", single / "data").trained_on == ()
    assert evaluate(single / "run", single / "data", split="train").trained_on == (str(train_file),)
    assert evaluate(load(single / "run"), copied).trained_on == (), "a loaded model does not know its data"
    message = "copied.csv: this run was trained on it, so the metrics do not measure generalization"
    for options in ([], ["--json"]):
        with pytest.raises(SystemExit, match="0"):
            main(["evaluate", str(single / "run"), "--data", str(copied), *options])
        assert message in capsys.readouterr().err.splitlines()
    copied.write_text(copied.read_text().replace("good", "bad", 1))
    assert evaluate(single / "run", copied).trained_on == ()


def test_the_default_split_is_dev_without_test(single: Path, tmp_path: Path) -> None:
    run, data = single / "run", tmp_path / "data"
    data.mkdir()
    for split in ("train", "dev"):
        (data / f"{split}.csv").write_bytes((single / "data" / f"{split}.csv").read_bytes())
    assert evaluate(run, data).split == "dev"
    assert evaluate(run, data, split="train").numbers["count"] == 24
    with pytest.raises(HeedfulError, match=r'there is no split "test", but train, dev'):
        evaluate(run, data, split="test")


def test_a_model_folder_and_a_loaded_model_have_the_same_metrics(single: Path) -> None:
    by_folder = evaluate(single / "run" / "model", single / "data")
    by_bundle = evaluate(heedful.load(single / "run"), single / "data")
    assert by_folder.numbers == by_bundle.numbers


# -- labels ---------------------------------------------------------------------------------------------------------


def test_metrics_do_not_depend_on_the_order_of_labels_in_the_data(single: Path, tmp_path: Path) -> None:
    rows = classification_rows(30, 7)

    def numbers_of(rows: list[dict[str, str]], name: str) -> dict[str, Any]:
        return evaluate(single / "run", write_csv(tmp_path / name, rows)).numbers

    numbers = numbers_of(rows, "a.csv")
    assert numbers_of(rows[::-1], "reversed.csv") == numbers
    only_good = numbers_of([row for row in rows if row["label"] == "good"], "good.csv")
    good = numbers["classes"]["good"]
    assert only_good["count"] == good["count"]
    assert only_good["classes"]["good"]["recall"] == good["recall"]


def test_a_folder_that_transformers_saved_has_its_own_order_of_labels(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path / "model", "single")  # bad, fair, good
    rows = [row | {"label": ("good", "bad")[number % 2]} for number, row in enumerate(classification_rows(12))]
    numbers = evaluate(folder, write_csv(tmp_path / "a.csv", rows)).numbers
    assert set(numbers["classes"]) == {"bad", "fair", "good"}
    model, *_ = load_reference(folder)
    correct = 0
    with torch.no_grad():
        for row in rows:
            logits = reference_logits(folder, row["text"]).logits
            correct += model.config.id2label[int(logits.argmax())] == row["label"]
    assert numbers["accuracy"] == correct / 12


@pytest.mark.parametrize(
    ("kind", "rows", "message"),
    [
        ("single", [{"text": "a", "label": "ugly"}, {"text": "b", "label": "good"}],
         "the data has the labels good, ugly, but .*run knows bad, good: ugly could never be correct. Rename them"),
        ("tag", [{"words": ["a", "b"], "tags": ["O", "B-ORG"]}], "B-ORG, I-ORG could never be correct"),
        ("multiple", [{"text": "a", "labels": ["ada", "x"]}], "x could never be correct"),
    ],
)  # fmt: skip
def test_unknown_labels_are_refused(tmp_path: Path, single: Path, kind: str, rows: Any, message: str) -> None:
    run = single / "run"
    if kind != "single":
        run = tmp_path / "run"
        finetune_tiny(TASKS[kind], write_splits(kind, tmp_path / "data"), run, {"train.epochs": 1})
    with pytest.raises(HeedfulError, match=message):
        evaluate(run, write_jsonl(tmp_path / "a.jsonl", rows))


@pytest.mark.parametrize("marks", ["BIES", "BILU"])
def test_tags_of_data_and_model_may_have_different_schemes(tmp_path: Path, marks: str) -> None:
    """The model predicts an entity of one word for each word. The data has other marks; both become IOB2."""
    labels = ("O", *(f"{mark}-PER" for mark in marks))
    loaded = with_head(load(make_model_dir(tmp_path / "bare", "bare")), "token_classification", labels=labels)
    with torch.no_grad():
        loaded.head.out.bias[4] = 1e3  # type: ignore[union-attr]  # always the last label, an entity of one word
    one_word, two_words = {"words": ["Ann"], "tags": ["S-PER"]}, {"words": ["Ann", "Lee"], "tags": ["B-PER", "E-PER"]}
    data = write_jsonl(tmp_path / "a.jsonl", [one_word] * 3 + [two_words])
    evaluation = evaluate(loaded, data, predictions=tmp_path / "predictions.jsonl")
    assert evaluation.metric == "f1"
    assert evaluation.numbers["token_accuracy"] == 4 / 5
    assert evaluation.numbers["precision"] == 3 / 5
    assert evaluation.numbers["recall"] == 3 / 4
    assert evaluation.numbers["strict_f1"] == evaluation.numbers["f1"] == pytest.approx(2 / 3)
    predictions = [line["prediction"] for line in read_jsonl(tmp_path / "predictions.jsonl")]
    assert predictions == [["B-PER", "B-PER"], ["B-PER"], ["B-PER"], ["B-PER"]], "the mistake comes first"
    with pytest.raises(HeedfulError, match="B-ORG, I-ORG could never be correct"):
        evaluate(loaded, write_jsonl(tmp_path / "b.jsonl", [{"words": ["Ann"], "tags": ["S-ORG"]}]))


def test_bad_rows_are_an_error_or_set_aside(single: Path, tmp_path: Path) -> None:
    data = tmp_path / "a.csv"
    data.write_text("text,label\nthe cat,good\nthe dog,\n")
    with pytest.raises(HeedfulError, match=r"a\.csv:3:label: is empty, expected a label"):
        evaluate(single / "run", data)
    quarantine = Quarantine(file=tmp_path / "bad-rows.jsonl")
    evaluation = evaluate(single / "run", data, on_bad_row=quarantine)
    assert evaluation.numbers["count"] == 1
    assert evaluation.bad_rows == {str(data): 1}
    (bad_row,) = read_jsonl(quarantine.file)
    assert bad_row["line"] == 3


def test_rows_with_labels_that_a_model_does_not_know(single: Path, tmp_path: Path) -> None:
    folder, quarantine = tmp_path / "data", Quarantine(file=tmp_path / "bad-rows.jsonl")
    folder.mkdir()
    (folder / "train.csv").write_text("text,label\nthe cat,good\nthe dog,ugly\n")
    (folder / "test.csv").write_text("text,label\nthe cat,bad\nthe dog,ugly\nthe cow,good\n")
    evaluation = evaluate(single / "run", folder, on_bad_row=quarantine)
    assert evaluation.numbers["count"] == 2
    assert evaluation.bad_rows == {str(folder / "test.csv"): 1}
    message = 'the label \\"ugly\\" is not one that the model knows: \\"bad\\", \\"good\\"'
    assert message in quarantine.file.read_text()
    with pytest.raises(
        HeedfulError, match=r"could never be correct\. Rename them in the data, or skip the rows .* skip$"
    ):
        evaluate(single / "run", folder)


def test_data_whose_labels_are_all_unknown_is_refused(single: Path, tmp_path: Path) -> None:
    data = tmp_path / "a.csv"
    data.write_text("text,label\nthe cat,ugly\n")
    for on_bad_row in (Skip(), Raise()):
        with pytest.raises(HeedfulError, match=r"ugly could never be correct\. Rename them in the data$"):
            evaluate(single / "run", data, on_bad_row=on_bad_row)


def test_rows_with_tags_that_a_model_does_not_know_can_be_skipped(tmp_path: Path) -> None:
    loaded = with_head(
        load(make_model_dir(tmp_path / "bare", "bare")),
        "token_classification",
        labels=("O", "B-PER", "I-PER", "E-PER", "S-PER"),
    )
    rows = [{"words": ["Ann", "Lee"], "tags": tags} for tags in (["B-PER", "I-PER"], ["B-ORG", "O"], ["O", "O"])]
    evaluation = evaluate(loaded, write_jsonl(tmp_path / "a.jsonl", rows), on_bad_row=Skip())
    assert evaluation.numbers["count"] == 2
    assert sum(evaluation.bad_rows.values()) == 1


# -- batches, precisions and ranks ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("token_budget", "largest_batch"), [(1, 1), (40, 4), (10**6, 8)])
def test_metrics_do_not_depend_on_the_token_budget(
    single: Path, monkeypatch: pytest.MonkeyPatch, token_budget: int, largest_batch: int
) -> None:
    expected = evaluate(single / "run", single / "data")
    batch_sizes: list[int] = []

    class EngineWithBudget(Engine):
        def __init__(self, loaded: Any, **options: Any) -> None:
            super().__init__(loaded, token_budget=token_budget, **options)

        def _score_batch(self, chunks: Any, *arguments: Any) -> Any:
            batch_sizes.append(len(chunks))
            return super()._score_batch(chunks, *arguments)

    monkeypatch.setattr(scoring, "Engine", EngineWithBudget)
    evaluation = evaluate(single / "run", single / "data")
    assert max(batch_sizes) == largest_batch
    assert sum(batch_sizes) == 8
    assert evaluation.intervals == expected.intervals
    for name, value in expected.numbers.items():
        if name not in ("calibration", "coverage"):
            assert evaluation.numbers[name] == (pytest.approx(value, abs=1e-6) if isinstance(value, float) else value)


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_precisions_are_those_of_engines(single: Path, precision: Any) -> None:
    served = open_in_precision(single / "run", precision).loaded
    evaluation = evaluate(single / "run", single / "data", precision=precision)
    assert evaluation.precision == precision
    assert evaluation.numbers == evaluate(served, single / "data").numbers
    assert evaluation.numbers != evaluate(single / "run", single / "data").numbers
    with pytest.raises(HeedfulError, match=f"loaded already: to measure it in {precision}, give its folder"):
        evaluate(served, single / "data", precision=precision)


def test_auto_is_the_fastest_accepted_precision(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heedful.runs.evaluate.measure_precisions", lambda *arguments, **options: arguments)
    for fastest in ("float32", "int8"):
        monkeypatch.setattr("heedful.runs.evaluate.fastest_accepted", lambda measurements, fastest=fastest: fastest)
        assert evaluate(single / "run", single / "data", precision="auto").precision == fastest


def test_an_unknown_precision_is_refused(single: Path) -> None:
    with pytest.raises(HeedfulError, match="precision is 'fp16': give one of auto, float32, bfloat16, float16, int8"):
        evaluate(single / "run", single / "data", precision="fp16")  # type: ignore[arg-type]


def test_int8_is_refused_for_models_without_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "words"
    save(make_classic("bag of means"), folder)
    assert [measurement.precision for measurement in measure_precisions(folder)] == ["float32", "bfloat16"]
    message = "words: int8 rounds the linear layers of blocks, and this model has none"
    with pytest.raises(HeedfulError, match=message):
        evaluate(folder, tmp_path, precision="int8")
    with pytest.raises(HeedfulError, match=message):
        choose_precision(folder, "int8")
    with pytest.raises(HeedfulError, match=message):
        open_in_precision(folder, "int8")


def test_bfloat16_is_near_float32(single: Path) -> None:
    exact = evaluate(single / "run", single / "data", precision="float32").numbers
    rounded = evaluate(single / "run", single / "data", precision="bfloat16").numbers
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=0.02)
    assert rounded != exact
    exact_engine, rounded_engine = (
        engine_for(None, load(single / "run"), dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    exact_probability = exact_engine(["the cat sat"])[0]["probability"]
    rounded_probability = rounded_engine(["the cat sat"])[0]["probability"]
    assert rounded_probability == pytest.approx(exact_probability, abs=0.02)
    assert rounded_probability != exact_probability


def test_large_numbers_of_a_regression_differ_in_bfloat16(tmp_path: Path) -> None:
    """The scale and offset of a regression are applied in float32: near 1.7e9, numbers in bfloat16 are 8e6 apart."""
    model = rescaled(load(make_model_dir(tmp_path / "model", "regression")), 3e4, 1.7e9)
    texts = ["the cat sat on the mat .", "who ran ?", "ada wrote the first program", "it is the capital of france"]
    exact, rounded = (
        [answer["values"]["stars"] for answer in engine_for(None, model, dtype)(texts)]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert len(set(rounded)) == 4
    assert rounded == pytest.approx(exact, abs=0.1 * 3e4)
    assert rounded != exact


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Return the values in nested dicts and lists, by path. Floats are compared with a relative tolerance of 1e-6."""
    if not isinstance(value, dict | list):
        return {path: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value}
    flat: dict[str, Any] = {}
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        flat |= flatten(item, f"{path}/{key}")
    return flat


@pytest.mark.parametrize("kind", ["single", "together", "impossible"])
def test_merged_metrics_of_ranks_are_those_of_a_single_process(kind: str, tmp_path: Path) -> None:
    labelled = write_splits(kind, tmp_path / "data")
    finetune_tiny(TASKS[kind], labelled, tmp_path / "run", {"train.epochs": 1})
    loaded = load(tmp_path / "run")
    dataset = open_for_model(loaded, labelled, DataSettings(dev_fraction=0.0), Raise())
    task, loaded = build_eval_task(loaded, dataset, "test")
    metrics = measure_split(task, loaded, dataset.examples("test"))
    metrics_of_ranks = [
        measure_split(task, loaded, dataset.examples("test"), ranks=Ranks(rank=rank, size=3)) for rank in range(3)
    ]
    merged = metrics_of_ranks[2].merge_state(metrics_of_ranks[0]).merge_state(metrics_of_ranks[1])
    # equal but for rounding, since products of fewer rows may be summed in another order
    assert flatten(task.compute_metrics(merged)) == flatten(task.compute_metrics(metrics))
    assert merged.intervals() == metrics.intervals()
    with pytest.raises(AssertionError, match="each rank would write its own share"):
        measure_split(task, loaded, [], ranks=Ranks(rank=0, size=3), predictions=tmp_path / "x")


# -- tasks and heads ------------------------------------------------------------------------------------------------


def test_evaluation_of_unanswerable_questions_does_not_change_the_model(tmp_path: Path) -> None:
    finetune_tiny("qa", write_splits("qa", tmp_path / "data"), tmp_path / "run", {"train.epochs": 1})
    loaded = load(tmp_path / "run")
    (tmp_path / "new.json").write_text(json.dumps(generated_data.squad_json(9, 3, impossible=True)))
    numbers = evaluate(loaded, tmp_path / "new.json").numbers
    assert numbers["version"] == "2.0"
    assert "best_f1" in numbers
    assert loaded.thresholds == {}


def test_the_evaluated_split_decides_whether_questions_may_be_unanswerable(tmp_path: Path) -> None:
    finetune_tiny("qa", write_splits("qa", tmp_path / "data"), tmp_path / "run", {"train.epochs": 1})
    data = tmp_path / "splits"
    data.mkdir()
    (data / "train.json").write_text(json.dumps(generated_data.squad_json(9, 3)))
    (data / "dev.json").write_text(json.dumps(generated_data.squad_json(9, 4, impossible=True)))
    loaded = load(tmp_path / "run")
    assert evaluate(loaded, data).numbers["version"] == "2.0"
    assert evaluate(loaded, data, split="train").numbers["version"] == "1.1"


def test_a_model_trained_on_unanswerable_questions_is_evaluated_as_squad_2(tmp_path: Path) -> None:
    """The split is evaluated so even if all of its questions have answers, as by the run itself."""
    labelled = write_splits("impossible", tmp_path / "data")
    (labelled / "test.json").write_text(json.dumps(generated_data.squad_json(9, 3)))
    run_results = finetune_tiny("qa", labelled, tmp_path / "run", {"train.epochs": 1}).results
    numbers = evaluate(tmp_path / "run", labelled).numbers
    assert numbers["version"] == "2.0"
    assert numbers == run_results["splits"]["test"]["numbers"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("masked", r"has a masked_lm head, which no data can score: fine-tune it first, or load it with another head"),
        ("bare", r"has a pooler head, which no data can score"),
    ],
)
def test_heads_that_no_data_can_score(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        evaluate(make_model_dir(tmp_path / "model", name), write_csv(tmp_path / "a.csv", classification_rows(3)))


def test_a_head_with_several_numbers_cannot_be_evaluated(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path / "model", "regression")
    data = write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "score": 1}, {"text": "b", "score": 2}])
    evaluate(folder, data)  # with one number
    config = json.loads((folder / "config.json").read_text())
    config |= {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}, "problem_type": "regression"}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for name in ("classifier.weight", "classifier.bias"):
        tensors[name] = torch.cat([tensors[name]] * 2).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HeedfulError, match="gives 2 numbers, and data has one"):
        evaluate(folder, data)


def test_the_scale_of_similarities_depends_on_the_scores_of_the_data() -> None:
    def fields_for(min_score: float | None, max_score: float | None) -> Any:
        stats = DatasetStats(counts={"test": 3}, labels=Counter(), min_score=min_score, max_score=max_score)
        return comparison(stats)

    assert fields_for(None, None) == {"scored": False, "group_size": 2}
    assert fields_for(0.0, 5.0) == {"scored": True, "low": 0.0, "high": 5.0}
    assert fields_for(1.0, 5.0) == {"scored": True, "low": 0.0, "high": 5.0}
    assert fields_for(-1.0, 0.0) == {"scored": True, "low": -1.0, "high": 0.0}
    assert fields_for(0.0, 0.0) == {"scored": True, "low": 0.0, "high": 1.0}


def test_mistakes_are_written_before_correct_answers_by_decreasing_loss(tmp_path: Path, single: Path) -> None:
    correct_and_loss = [(True, 0.9), (False, 0.7), (True, 0.1), (False, 0.8), (False, 0.7)]
    task, _ = build_eval_task(load(single / "run"), read(single / "data"), "test")
    example = LabelledExample(text="x", label="good")
    with PredictionFile(tmp_path / "predictions.jsonl") as file:
        for index, (correct, loss) in enumerate(correct_and_loss):
            file.write(task, index, example, {}, ScoredAnswer("good", "bad", correct, loss))
    assert [line["id"] for line in read_jsonl(tmp_path / "predictions.jsonl")] == [3, 1, 4, 0, 2]


def test_pairs_that_were_not_retrieved_are_written_first(tmp_path: Path) -> None:
    """A pair is correct if its second text is the nearest of all second texts to its first text."""
    loaded = with_head(load(make_model_dir(tmp_path / "bare", "bare")), "embedding")
    texts = ["the cat", "a dog ran", "who ?", "love", "in paris", "first program", "she lives", "x"]
    pairs = [(texts[0], texts[1]), (texts[1], texts[2]), (texts[2], texts[3])]  # with the next text
    pairs += [(text, f"{text} {text}") for text in texts[3:]]  # with the same text twice
    data = write_jsonl(tmp_path / "a.jsonl", [{"a": first, "b": second} for first, second in pairs])
    evaluation = evaluate(loaded, data, predictions=tmp_path / "predictions.jsonl")
    predictions = read_jsonl(tmp_path / "predictions.jsonl")
    correct = [prediction["correct"] for prediction in predictions]
    ranks = [prediction["rank"] for prediction in predictions]
    assert set(correct) == {False, True}
    assert correct == sorted(correct), "mistakes first"
    assert correct == [rank == 1 for rank in ranks]
    assert evaluation.numbers["accuracy"] == sum(correct) / 8
    assert evaluation.numbers["mrr"] == pytest.approx(sum(1 / rank for rank in ranks) / 8)
    num_mistakes = correct.count(False)
    mistakes, correct_predictions = predictions[:num_mistakes], predictions[num_mistakes:]
    assert ranks[:num_mistakes] == sorted(ranks[:num_mistakes], reverse=True)
    assert ranks[:num_mistakes] == [mistake["loss"] for mistake in mistakes]
    similarities = [prediction["prediction"] for prediction in correct_predictions]
    assert similarities == sorted(similarities), "the least similar pair first"


def test_scored_pairs_are_compared_on_the_scale_of_training(tmp_path: Path) -> None:
    labelled = write_splits("embed", tmp_path / "data")
    run = tmp_path / "run"
    finetune_tiny("embed", labelled, run, {"train.epochs": 1})
    rows = read_jsonl(labelled / "test.jsonl")
    low_scores = write_jsonl(tmp_path / "low.jsonl", [row for row in rows if row["score"] <= 2])  # of a scale up to 5
    evaluation = evaluate(run, low_scores, predictions=tmp_path / "predictions.jsonl")
    predictions = read_jsonl(tmp_path / "predictions.jsonl")
    errors = [abs(prediction["prediction"] - prediction["label"] / 5) for prediction in predictions]
    assert errors
    assert [prediction["loss"] for prediction in predictions] == pytest.approx(errors)
    assert evaluation.numbers["mse"] == pytest.approx(sum(error**2 for error in errors) / len(errors))
    without_scores = write_jsonl(tmp_path / "pairs.jsonl", [{"a": row["a"], "b": row["b"]} for row in rows])
    assert evaluate(run, without_scores).metric == "accuracy"


def test_predictions_that_cannot_be_written_are_an_error(single: Path, tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match=re.escape(f"{tmp_path / 'no' / 'x.jsonl'} cannot be written")):
        evaluate(single / "run", single / "data", predictions=tmp_path / "no" / "x.jsonl")


# -- GLUE -------------------------------------------------------------------------------------------------------------

# header of GLUE's files, and a function from the number of a row and a number of 0 or 1 to its cells
GLUE_FILES: dict[str, Any] = {
    "CoLA": (None, lambda number, bit: ["gj04", str(bit), "", f"the cat {number} sat"]),
    "MRPC": (
        ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
        lambda number, bit: [str(bit), str(number), str(number + 900), f"the cat {number}", f"the dog {number} {bit}"],
    ),
    "STS-B": (
        ["index", "sentence1", "sentence2", "score"],
        lambda number, bit: [str(number), f"the cat {number}", f"the dog {number}", f"{bit + number % 4}.5"],
    ),
    "MNLI": (
        ["index", "sentence1", "sentence2", "gold_label"],
        lambda number, bit: [
            str(number),
            f"the cat {number}",
            f"a dog {number}",
            ("contradiction", "entailment", "neutral")[number % 3],
        ],
    ),
}


def write_glue(folder: Path) -> Path:
    """Write invented data in the layout of some of GLUE's folders: 24 rows of train, 9 of dev."""
    for name, (header, make_row) in GLUE_FILES.items():
        (folder / name).mkdir(parents=True)
        counts = {"train.tsv": 24, "dev.tsv": 9}
        if name == "MNLI":
            counts = {"train.tsv": 24, "dev_matched.tsv": 9, "dev_mismatched.tsv": 10}
        for file, count in counts.items():
            rows = [header] if header else []
            rows += [make_row(number, number % 2) for number in range(count)]
            (folder / name / file).write_text("".join("\t".join(row) + "\n" for row in rows))
    (folder / "QNLI").mkdir()  # without a run
    return folder


def test_glue_is_evaluated_with_a_run_for_each_task(tmp_path: Path) -> None:
    labelled, runs = write_glue(tmp_path / "glue"), tmp_path / "runs"
    run_names = {"CoLA": "cola", "MRPC": "MRPC", "STS-B": "STS-B", "MNLI": "MNLI"}  # in lower case, or as GLUE's folder
    for name, run_name in run_names.items():
        task = "regress" if name == "STS-B" else "classify"
        finetune_tiny(task, labelled / name, runs / run_name, {"train.epochs": 1})
    evaluation = evaluate_glue(runs, labelled)
    assert set(evaluation) == {"cola", "mrpc", "stsb", "mnli", "mnli-mm"}
    for entry, name in (("cola", "CoLA"), ("mrpc", "MRPC"), ("stsb", "STS-B"), ("mnli", "MNLI")):
        run = runs / run_names[name]
        numbers = read_results(run)["splits"]["dev"]["numbers"]
        scores = evaluation[entry]
        assert scores["model"] == str(run)
        assert scores["count"] == 9
        for metric in GLUE[entry].official:
            assert scores[metric] == numbers[metric]
        assert scores["score"] == pytest.approx(fmean(numbers[metric] for metric in GLUE[entry].official))
    mismatched = read_results(runs / "MNLI")["splits"]["dev-mismatched"]["numbers"]
    assert evaluation["mnli-mm"]["accuracy"] == mismatched["accuracy"]
    assert evaluation["mnli-mm"]["count"] == 10
    of_one_run = evaluate_glue(runs / "MRPC", labelled)
    assert of_one_run.keys() == {"mrpc"}, "the only task that the run was trained on"
    assert of_one_run["mrpc"] | {"model": ""} == evaluation["mrpc"] | {"model": ""}
    with pytest.raises(HeedfulError, match=r"nothing to evaluate: of CoLA, .* has CoLA, MRPC, STS-B, MNLI, QNLI, and"):
        evaluate_glue(tmp_path, labelled)


def test_each_entry_of_glue_has_a_folder() -> None:
    entries = {entry for split_by_entry in GLUE_FOLDERS.values() for entry in split_by_entry}
    assert entries == set(GLUE)


def test_glue_truncates_long_texts_if_the_run_truncated_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labelled = write_glue(tmp_path / "glue")
    make_model_dir(tmp_path / "runs" / "CoLA" / "model", "single")
    (tmp_path / "runs" / "CoLA" / "settings.toml").write_text('long_inputs = "truncate"\n')
    seen: list[Any] = []

    def record_long_inputs(*arguments: Any, **options: Any) -> Any:
        seen.append(options["long_inputs"])
        raise HeedfulError("enough")

    monkeypatch.setattr(evaluate_module, "evaluate", record_long_inputs)
    with pytest.raises(HeedfulError, match="enough"):
        evaluate_glue(tmp_path / "runs", labelled)
    assert seen == ["truncate"]


def test_f1_of_glue_is_that_of_its_positive_class_in_any_order_of_labels(tmp_path: Path) -> None:
    labelled = write_glue(tmp_path / "glue")
    folder = make_model_dir(tmp_path / "runs" / "MRPC", "single")
    config = json.loads((folder / "config.json").read_text())
    config |= {"id2label": {"0": "1", "1": "0", "2": "2"}, "label2id": {"1": 0, "0": 1, "2": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    f1 = evaluate_glue(tmp_path / "runs", labelled)["mrpc"]["f1"]
    classes = evaluate(folder, labelled / "MRPC", split="dev").numbers["classes"]
    assert f1 == classes["1"]["f1"]
    assert f1 != classes["0"]["f1"]
