"""`finetune` on every task: the files of a run, its model in transformers, special cases of tasks, and refused data."""

from __future__ import annotations

import csv
import json
import random
import tomllib
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder

from heedful.checkpoint import load
from heedful.data import DataSettings, ScoredExample, Skip, dataset_for_task, read
from heedful.data.examples import LabelledExample
from heedful.data.formats.csv_escape import escape_cell
from heedful.data.labelled.statistics import compute_stats, split_warnings
from heedful.errors import HeedfulError
from heedful.infer.engine import Engine
from heedful.runs.evaluate import evaluate
from heedful.runs.finetune import run as run_module
from heedful.runs.finetune.build import build_task, initial_model
from heedful.runs.finetune.init_settings import Pretrained, Scratch
from heedful.runs.finetune.plan import plan_finetune
from heedful.runs.finetune.settings import FinetuneSettings
from heedful.runs.run_folder import BAD_ROWS, DATA, init_labelled_run, read_run_json
from heedful.settings import from_file
from heedful.tasks.classify import best_threshold
from heedful.tasks.qa import NO_ANSWER
from heedful.tasks.specs.classify import ClassifySettings, MultiLabelSettings
from heedful.tokenizer import PreTokenized
from heedful.train.fit import Reporter
from heedful.train.settings import AdamW
from tests.support import generated_data
from tests.support.generated_data import classification_rows, finetune_tiny, write_csv, write_jsonl, write_splits
from tests.support.model_folders import load_reference, make_model_dir, reference_logits
from tests.support.reporters import Messages

TASKS = {  # by kind of generated data: task, kind of the task's settings, main metric
    "single": ("classify", "classify", "accuracy"),
    "pair": ("classify", "classify", "accuracy"),
    "classes": ("classify", "classify", "accuracy"),
    "multiple": ("classify", "multiple", "micro_f1"),
    "regress": ("regress", "regress", "pearson"),
    "tag": ("tag", "tag", "f1"),
    "plain": ("tag", "tag", "accuracy"),
    "qa": ("qa", "qa", "f1"),
    "impossible": ("qa", "qa", "f1"),
    "choose 2": ("multiple-choice", "multiple-choice", "accuracy"),
    "choose 4": ("multiple-choice", "multiple-choice", "accuracy"),
    "rank": ("rank", "rank", "ndcg@10"),
    "embed": ("embed", "embed", "spearman"),
    "together": ("embed", "embed", "accuracy"),
}
SETTINGS_BY_KIND: dict[str, dict[str, Any]] = {
    "classes": {"task.class_weight": "balanced"},
    "multiple": {"task.thresholds": "tuned", "task.class_weight": "balanced"},
    "together": {"task.group_size": 4},
}
RUN_FILES = {  # files and folders of every run
    *("settings.toml", "environment.json", "data.json", "journal.jsonl", "results.csv", "results.json", "seed.json"),
    *("run.lock", "predictions-dev.jsonl", "predictions-test.jsonl", "plots", "model", "report.html"),
}
LATENCY = {"latency": {"16": {"p50": 1.0, "p99": 1.0}}, "throughput": 1}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out the measurement of latency, and compute with one thread, so that equal runs are equal."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: LATENCY)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an encoder without a head, as transformers saves it."""
    return make_model_dir(tmp_path_factory.mktemp("bare"), "bare")


def read_strict_json(path: Path) -> Any:
    """Read a file that must be JSON without NaN and Infinity."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(path.read_text("utf-8"), parse_constant=refuse)


def read_jsonl(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


# -- every task -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("run_plots")
@pytest.mark.parametrize("kind", TASKS)
def test_a_run_is_complete(kind: str, tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # with the measurement of latency
    task, task_kind, metric = TASKS[kind]
    data, folder = write_splits(kind, tmp_path / "data"), tmp_path / "run"
    result = finetune_tiny(task, data, folder, SETTINGS_BY_KIND.get(kind), model=bare)
    results = result.results
    assert result.status == "completed"
    assert results == read_strict_json(folder / "results.json")
    optional_files = set()
    if results["checkpoints"]["best"]["step"] != results["checkpoints"]["last"]["step"]:
        optional_files.add("checkpoints")
    if task in ("embed", "rank"):
        optional_files.add("before.json")
    assert {path.name for path in folder.iterdir()} == RUN_FILES | optional_files
    assert (folder / "plots" / "curves.png").stat().st_size > 1000
    card = (folder / "model" / "README.md").read_text("utf-8")
    assert "heedful" in card
    assert metric in card
    assert from_file(FinetuneSettings, folder / "settings.toml").task.kind == task_kind
    assert tomllib.loads((folder / "settings.toml").read_text())["train"]["batch_size"] == 16
    assert results["task"] == task_kind
    assert results["metric"] == metric
    assert results["base"] == str(bare)
    assert results["notes"][0].startswith("24 training examples are ")
    assert results["latency"].keys() == {"16"}, "the largest of the measured lengths that the model can read"
    assert results["throughput"] > 0
    assert results["memory"] > 10**8
    assert results["data"]["splits"] == {split: {"examples": count} for split, count in generated_data.SIZES.items()}
    assert results["data"]["bad_rows"] == {}
    assert ("label_counts" in results) == ("| examples of train | share |" in card) == (task == "classify")
    if task_kind == "classify":
        assert list(results["label_counts"]) == results["labels"]
        assert sum(results["label_counts"].values()) == generated_data.SIZES["train"]
    assert len(results["data"]["files"]) == 3
    check_scores(results, kind)
    for split, split_results in results["splits"].items():
        check_predictions(folder / f"predictions-{split}.jsonl", split_results["numbers"])
    check_journal_and_table(folder, metric)
    check_model(folder, kind)


def check_scores(results: dict[str, Any], kind: str) -> None:
    """Check the metrics of both splits in the results of a run with one seed."""
    (seed,) = results["seeds"]
    assert seed["seed"] == results["seed"] == 1
    assert set(results["splits"]) == set(results["across_seeds"]) == {"dev", "test"}
    metric = results["metric"]
    for split, split_results in results["splits"].items():
        numbers, intervals = split_results["numbers"], split_results["intervals"]
        assert numbers["count"] == (64 if kind == "plain" else 8), "words for tags without entities, else examples"
        assert metric in intervals
        for interval in intervals.values():
            assert interval["low"] <= interval["high"]
        assert results["across_seeds"][split] == {"mean": numbers[metric], "std": None, "seeds": 1}
        assert seed["splits"][split] == numbers[metric]


def check_predictions(path: Path, numbers: dict[str, Any]) -> None:
    """Check the keys and the order of the predictions for a split, and their accuracy against the metrics."""
    predictions = read_jsonl(path)
    assert sorted(prediction["id"] for prediction in predictions) == list(range(8))
    order = [(prediction["correct"] is False, prediction["loss"]) for prediction in predictions]
    assert order == sorted(order, reverse=True), "mistakes first, each part by decreasing loss"
    is_retrieval = "mrr" in numbers and "map" not in numbers
    expected_keys = {"id", "input", "label", "prediction", "correct", "loss", "answer"}
    if is_retrieval:
        expected_keys.add("rank")
    for prediction in predictions:
        assert prediction.keys() == expected_keys
        assert not {"vector", "vectors"} & prediction["answer"].keys()
    accuracy = next((numbers[name] for name in ("subset_accuracy", "exact", "accuracy") if name in numbers), None)
    if predictions[0]["correct"] is not None and numbers["count"] == 8 and accuracy is not None:
        assert sum(prediction["correct"] for prediction in predictions) / 8 == accuracy


def check_journal_and_table(folder: Path, metric: str) -> None:
    """Check that results.csv has the records of the journal, and the baseline in its last row."""
    results = read_strict_json(folder / "results.json")
    with (folder / "results.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if "baseline" in results:
        assert rows.pop()["baseline"] in ("a bag of words", "before training")
    records = read_jsonl(folder / "journal.jsonl")
    assert len(rows) == len(records)
    for row, record in zip(rows, records, strict=True):
        flat = {name: value for name, value in record.items() if name != "dev"}
        flat |= {f"dev_{name}": value for name, value in record.get("dev", {}).items()}
        filled_cells = {name: cell for name, cell in row.items() if cell}
        assert filled_cells == {name: escape_cell(str(value)) for name, value in flat.items()}
    steps = [record["step"] for record in records if "loss" in record]
    assert steps == list(range(1, len(steps) + 1))
    evaluations = [record for record in records if "metric_value" in record]
    assert len(evaluations) == 2, "after each of the two epochs"
    best = [evaluation for evaluation in evaluations if evaluation["best"]][-1]
    assert best["metric_value"] == max(evaluation["metric_value"] for evaluation in evaluations)
    assert results["seeds"][0]["best_step"] == best["step"]
    assert results["seeds"][0]["steps"] == steps[-1]
    if results["task"] not in ("multiple", "qa"):  # whose thresholds are tuned after the last evaluation
        assert results["splits"]["dev"]["numbers"][metric] == pytest.approx(best["metric_value"], abs=1e-6)


@torch.no_grad()
def check_model(folder: Path, kind: str) -> None:
    """Check that an engine gives the answers of the run, and that other libraries compute the same scores."""
    model, engine, task = folder / "model", Engine(folder), TASKS[kind][0]
    for prediction in read_jsonl(folder / "predictions-test.jsonl")[:3]:
        inputs, answer = prediction["input"], prediction["answer"]
        engine_input = tuple(inputs) if isinstance(inputs, list) and task != "tag" else inputs
        (engine_answer,) = engine([engine_input])
        assert rounded(engine_answer) == rounded(answer)
        match task:
            case "classify":
                texts = [inputs] if isinstance(inputs, str) else inputs
                (logits,) = reference_logits(model, *texts).logits
                probabilities = logits.sigmoid() if kind == "multiple" else logits.softmax(-1)
                assert answer["probabilities"] == pytest.approx(by_label(model, probabilities), abs=1e-6)
            case "regress":
                (logits,) = reference_logits(model, *inputs).logits
                assert answer["values"] == pytest.approx(by_label(model, logits), abs=1e-5)
            case "tag":
                check_tags(model, inputs, answer)
            case "qa":
                outputs = reference_logits(model, inputs["question"], inputs["context"])
                no_answer_score = float(outputs.start_logits[0, 0] + outputs.end_logits[0, 0])
                assert answer["no_answer_score"] == pytest.approx(no_answer_score, abs=1e-5)
            case "multiple-choice":
                reference, tokenizer = load_reference(model)
                choices = inputs["choices"]
                batch = tokenizer([inputs["prompt"]] * len(choices), choices, return_tensors="pt", padding=True)
                (logits,) = reference(**{name: tensor[None] for name, tensor in batch.items()}).logits
                assert answer["probabilities"] == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)
            case "rank":
                cross_encoder = CrossEncoder(str(model), device="cpu")
                scores = cross_encoder.predict([(inputs["query"], text) for text in inputs["texts"]]).tolist()
                assert answer["scores"] == pytest.approx(scores, abs=1e-5)
            case "embed":
                vectors = [reference_logits(model, text).last_hidden_state[0].mean(0) for text in inputs]
                cosine = torch.nn.functional.cosine_similarity(vectors[0], vectors[1], dim=0)
                assert answer["similarity"] == pytest.approx(float(cosine), abs=1e-5)


def rounded(value: Any) -> Any:
    """Return an answer with numbers rounded to four decimals, and without vectors."""
    match value:
        case float():
            return round(value, 4)
        case dict():
            return {name: rounded(item) for name, item in value.items() if name not in ("vector", "vectors")}
        case list():
            return [rounded(item) for item in value]
    return value


def by_label(model: Path, values: torch.Tensor) -> dict[str, float]:
    """Return values by the labels of a model's config.json."""
    reference, _ = load_reference(model)
    return {reference.config.id2label[index]: value for index, value in enumerate(values.tolist())}


def check_tags(model: Path, words: list[str], answer: Any) -> None:
    """Check label and probability of each word, which are those of its first token in transformers."""
    reference, tokenizer = load_reference(model)
    batch = tokenizer(words, is_split_into_words=True, return_tensors="pt")
    (logits,) = reference(**batch).logits
    word_of_token = load(model).tokenizer.encode(PreTokenized(words)).words  # type: ignore[union-attr]
    for index, word in enumerate(answer["words"]):
        probabilities = logits[word_of_token.index(index)].softmax(-1)
        assert word["probability"] == pytest.approx(float(probabilities.max()), abs=1e-6)
        assert word["label"] == reference.config.id2label[int(probabilities.argmax())]


# -- classification and tagging -----------------------------------------------------------------------------------


def test_balanced_weights_are_larger_for_rare_classes(tmp_path: Path) -> None:
    rows = [{"text": f"the cat {number}", "label": "x" if number < 9 else "y"} for number in range(12)]
    dataset = read(write_csv(tmp_path / "a.csv", rows), None, DataSettings(dev_fraction=0.0))
    base = initial_model(Scratch(layers=1, width=32), dataset, {"train": 9}, 1, None, lambda text: None)

    def class_weights(task_settings: Any) -> Any:
        settings = FinetuneSettings(task=task_settings)
        task, _ = build_task(settings, dataset, compute_stats(dataset, ["train"]), base)
        return task.weights  # type: ignore[attr-defined]

    assert class_weights(ClassifySettings()) == ()
    assert class_weights(ClassifySettings(class_weight="balanced")) == (12 / (2 * 9), 12 / (2 * 3))
    assert class_weights(MultiLabelSettings(class_weight="balanced")) == (3 / 9, 9 / 3)


def seed_with_unseen_labels(data: Path) -> int:
    """Return a seed with which the generated dev split has a label that train lacks."""
    for seed in range(200):
        if compute_stats(read(data, None, DataSettings(seed=seed)), ["train", "dev"]).unseen_labels:
            return seed
    raise AssertionError("no seed up to 200")


def test_a_label_that_only_dev_has_is_noted(tmp_path: Path) -> None:
    rows = [*classification_rows(40), {"text": "sat here", "label": "rare"}]
    data = write_csv(tmp_path / "a.csv", rows)
    settings = {"data.seed": seed_with_unseen_labels(data), "task.class_weight": "balanced", "train.epochs": 1}
    results = finetune_tiny("classify", data, tmp_path / "run", settings).results
    assert results["labels"] == ["bad", "good", "rare"]
    note = 'dev has labels that do not occur in train, so that they cannot be learned: "rare" (1)'
    assert note in results["notes"]


def test_tags_that_only_dev_has_are_noted(tmp_path: Path) -> None:
    rows = [{"words": ["the", f"cat{number}"], "tags": ["O", "B-X"]} for number in range(60)]
    rows += [{"words": ["in", "new", "york"], "tags": ["O", "I-Y", "I-Y"]}]
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    stats = compute_stats(read(data, None, DataSettings(seed=seed_with_unseen_labels(data))), ["train", "dev"])
    assert stats.unseen_labels == {"dev": {"B-Y": 1}}
    assert "X" not in str(split_warnings(stats))


def test_labels_that_only_train_has_are_not_noted(tmp_path: Path) -> None:
    rows = [{"text": "the cat", "labels": ["a"]}, {"text": "a dog", "labels": ["b", "a"]}]
    data = {"train": write_jsonl(tmp_path / "train.jsonl", rows), "dev": write_jsonl(tmp_path / "dev.jsonl", rows[:1])}
    assert not compute_stats(read(data), ["train", "dev"]).unseen_labels


def test_thresholds_of_labels_are_tuned_on_dev(tmp_path: Path) -> None:
    data, fixed, tuned = write_splits("multiple", tmp_path / "data"), tmp_path / "fixed", tmp_path / "tuned"

    def f1_on_dev(run: Path, thresholds: float | str) -> dict[str, float]:
        """Fine-tune, and return the F1 of each label on dev."""
        results = finetune_tiny("classify", data, run, {"task.thresholds": thresholds}).results
        assert load(run).thresholds == read_strict_json(run / "model" / "heedful.json").get("thresholds", {})
        return {label: scores["f1"] for label, scores in results["splits"]["dev"]["numbers"]["labels"].items()}

    fixed_f1, tuned_f1 = f1_on_dev(fixed, 0.5), f1_on_dev(tuned, "tuned")
    assert load(fixed).thresholds == {}
    assert all(tuned_f1[label] >= fixed_f1[label] for label in fixed_f1)
    assert any(tuned_f1[label] > fixed_f1[label] for label in fixed_f1)
    thresholds = load(tuned).thresholds
    assert set(thresholds) == set(generated_data.ENTITY_TYPES)
    for prediction in read_jsonl(tuned / "predictions-dev.jsonl"):
        probabilities = prediction["answer"]["probabilities"]
        labels = [label for label, probability in probabilities.items() if probability >= thresholds[label]]
        assert prediction["prediction"] == labels


@pytest.mark.parametrize("seed", range(5))
def test_no_other_threshold_gives_a_better_f1(seed: int) -> None:
    rng = np.random.default_rng(seed)
    probabilities, has_label = rng.integers(0, 12, 40) / 12, rng.integers(0, 2, 40)

    def f1(threshold: float) -> float:
        predicted = probabilities >= threshold
        true_positives = (predicted & (has_label == 1)).sum()
        return float(2 * true_positives / (predicted.sum() + has_label.sum()))

    best_f1 = max(f1(threshold) for threshold in [*probabilities, 1.5])
    assert f1(best_threshold(probabilities, has_label)) == best_f1


def test_the_tag_scheme_is_recognised_and_converted(tmp_path: Path) -> None:
    run = tmp_path / "run"
    results = finetune_tiny("tag", write_splits("tag", tmp_path / "data"), run).results  # in the scheme IOB1
    assert any("IOB1" in sentence for sentence in results["data"]["stated"])
    assert results["labels"] == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"]
    for prediction in read_jsonl(run / "predictions-test.jsonl"):
        tags = prediction["label"]
        for previous, tag in pairwise(["O", *tags]):
            assert not (previous == "O" and tag.startswith("I-")), "IOB2 begins each entity with B"


def test_tags_without_a_scheme_are_labels(tmp_path: Path) -> None:
    results = finetune_tiny("tag", write_splits("plain", tmp_path / "data"), tmp_path / "run").results
    assert results["labels"] == ["LOC", "PER", "WORD"]


# -- question answering -------------------------------------------------------------------------------------------


def test_the_no_answer_threshold_is_tuned_on_dev(tmp_path: Path) -> None:
    data = write_splits("impossible", tmp_path / "data")
    tuned = finetune_tiny("qa", data, tmp_path / "tuned").results["splits"]["dev"]["numbers"]
    assert tuned["f1"] == pytest.approx(tuned["best_f1"], abs=1e-9)
    assert load(tmp_path / "tuned").thresholds == {NO_ANSWER: tuned["best_f1_threshold"]}
    settings = {"task.no_answer_threshold": 0}
    zero = finetune_tiny("qa", data, tmp_path / "zero", settings).results["splits"]["dev"]["numbers"]
    assert load(tmp_path / "zero").thresholds == {NO_ANSWER: 0.0}
    assert zero["f1"] <= tuned["f1"]


def test_there_is_no_no_answer_threshold_if_all_questions_have_answers(tmp_path: Path) -> None:
    results = finetune_tiny("qa", write_splits("qa", tmp_path / "data"), tmp_path / "run").results
    assert load(tmp_path / "run").thresholds == {}
    assert results["splits"]["dev"]["numbers"]["version"] == "1.1"


def test_answers_longer_than_the_maximum_are_counted_and_not_predicted(tmp_path: Path) -> None:
    context = " ".join(["cat", "dog"] * 20)
    row = {"question": "which ?", "context": context, "answers": {"text": [context], "answer_start": [0]}}
    rows = write_jsonl(tmp_path / "a.jsonl", [row | {"id": str(number)} for number in range(6)])
    data = {"train": rows, "dev": rows}
    short = finetune_tiny("qa", data, tmp_path / "short").results
    note = "6 training examples have an answer that is longer than task.max_answer_tokens=30"
    assert note in short["notes"]
    assert load(tmp_path / "short").thresholds == {}
    settings = {"task.max_answer_tokens": 200, "train.epochs": 40}
    long = finetune_tiny("qa", data, tmp_path / "long", settings).results
    assert not any("have an answer that is longer" in note for note in long["notes"])
    assert load(tmp_path / "long").thresholds == {"max_answer_tokens": 200.0}
    assert long["splits"]["dev"]["numbers"]["f1"] > short["splits"]["dev"]["numbers"]["f1"]
    (answer,) = Engine(tmp_path / "long")([{"question": "which ?", "context": context}])
    assert len(answer["answer"].split()) > 30


def test_a_maximum_answer_length_of_0_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match="max_answer_tokens is 0; expected a whole number from 1"):
        finetune_tiny("qa", write_splits("qa", tmp_path / "data"), tmp_path / "run", {"task.max_answer_tokens": 0})


def test_questions_in_csv_train_the_same_model_as_in_squad_json(tmp_path: Path) -> None:
    write_splits("impossible", tmp_path / "json")
    (tmp_path / "csv").mkdir()
    for split in ("train", "dev", "test"):
        paragraphs = json.loads((tmp_path / "json" / f"{split}.json").read_text())["data"][0]["paragraphs"]
        rows = [
            {"context": paragraph["context"], "question": question["question"], "answer": answer["text"]}
            for paragraph in paragraphs
            for question in paragraph["qas"]
            for answer in question["answers"] or [{"text": ""}]
        ]
        write_csv(tmp_path / "csv" / f"{split}.csv", rows)
    expected_run, run = tmp_path / "run-json", tmp_path / "run-csv"
    settings = {"train.epochs": 1}
    expected = finetune_tiny("qa", tmp_path / "json", expected_run, settings).results["splits"]
    splits = finetune_tiny("qa", tmp_path / "csv", run, settings).results["splits"]
    assert splits["test"]["numbers"]["exact"] == expected["test"]["numbers"]["exact"]
    assert splits["dev"]["numbers"]["f1"] == expected["dev"]["numbers"]["f1"]
    assert load(run).weights_digest() == load(expected_run).weights_digest()


def write_unanswerable(path: Path) -> None:
    """Write a split of six questions in the form of SQuAD, two of which have no answer."""
    path.write_text(json.dumps(generated_data.squad_json(6, 9, impossible=True)))


def test_unanswerable_questions_in_dev_only(tmp_path: Path) -> None:
    data = write_splits("qa", tmp_path / "data")
    write_unanswerable(data / "dev.json")
    results = finetune_tiny("qa", data, tmp_path / "run", {"train.epochs": 1}).results
    assert results["splits"]["dev"]["numbers"]["version"] == "2.0"


def test_unanswerable_questions_in_test_only_do_not_change_the_training(tmp_path: Path) -> None:
    all_answerable, data = write_splits("qa", tmp_path / "answerable"), write_splits("qa", tmp_path / "data")
    write_unanswerable(data / "test.json")
    run, expected_run = tmp_path / "run", tmp_path / "expected"
    expected = finetune_tiny("qa", all_answerable, expected_run).results
    results = finetune_tiny("qa", data, run).results
    weights, expected_weights = (folder / "model" / "model.safetensors" for folder in (run, expected_run))
    assert weights.read_bytes() == expected_weights.read_bytes()
    assert load(run).thresholds == {}
    dev, test = (results["splits"][split]["numbers"] for split in ("dev", "test"))
    assert dev == expected["splits"]["dev"]["numbers"]
    assert dev["version"] == "1.1"
    assert test["version"] == "2.0"
    assert test["unanswerable_count"] == 2
    evaluated = evaluate(run, data, split="test").numbers
    assert evaluated["f1"] == test["f1"]
    assert evaluated["best_f1"] == test["best_f1"]
    assert any(note.startswith("test has unanswerable questions, but train") for note in results["notes"])
    assert "thresholds" not in (run / "model" / "README.md").read_text()


# -- pairs and scores ---------------------------------------------------------------------------------------------


def test_scores_of_pairs_have_a_scale(tmp_path: Path) -> None:
    run = tmp_path / "run"
    results = finetune_tiny("embed", write_splits("embed", tmp_path / "data"), run).results
    assert results["label_scaling"] == {"low": 0.0, "high": 5.0}
    assert load(run).label_scaling == {"low": 0.0, "high": 5.0}
    for prediction in read_jsonl(run / "predictions-dev.jsonl"):
        error = abs(prediction["prediction"] - prediction["label"] / 5)
        assert prediction["loss"] == pytest.approx(error)


def test_pairs_without_scores_are_evaluated_by_retrieval(tmp_path: Path) -> None:
    data = write_splits("together", tmp_path / "data")
    results = finetune_tiny("embed", data, tmp_path / "run", {"task.group_size": 3}).results
    assert results["metric"] == "accuracy"
    assert "mrr" in results["splits"]["dev"]["numbers"]


def regression_rows() -> list[dict[str, Any]]:
    """Return texts with scores from 75 to 84 if the last word is "love", and from 30 to 39 if it is "dog"."""
    rng, rows = random.Random(0), []
    for number in range(164):
        words = rng.choices(["the", "cat", "sat", "on", "a", "mat"], k=4)
        last_word, lowest = ("love", 75) if number % 2 else ("dog", 30)
        rows.append({"text": " ".join([*words, last_word]), "score": lowest + rng.randrange(10)})
    return rows


@pytest.mark.slow
def test_scores_are_learned_in_any_unit(tmp_path: Path, bare: Path) -> None:
    settings = {"train.epochs": 8, "fit.keep_checkpoints": "true"}
    dev_numbers = {}
    for name, unit in (("small", 1.0), ("large", 1e4)):
        data = write_csv(tmp_path / f"{name}.csv", [row | {"score": unit * row["score"]} for row in regression_rows()])
        run = tmp_path / name
        results = finetune_tiny("regress", data, run, settings, model=bare).results
        dev_numbers[name] = results["splits"]["dev"]["numbers"]
        assert results["label_scaling"] == pytest.approx(mean_and_std_of_train(data))
        assert load(run).label_scaling == results["label_scaling"]
        prediction = read_jsonl(run / "predictions-dev.jsonl")[-1]
        reference_score = float(reference_logits(run / "model", prediction["input"]).logits[0])
        assert prediction["answer"]["values"]["score"] == pytest.approx(reference_score, rel=1e-5)
        best = [record["dev"] for record in read_jsonl(run / "journal.jsonl") if record.get("best")][-1]
        assert best["mse"] == pytest.approx(dev_numbers[name]["mse"], rel=1e-3), "also in evaluations while training"
        (answer,) = Engine(max((run / "state").iterdir()))([prediction["input"]])
        assert answer["values"]["score"] == pytest.approx(reference_score, abs=20 * unit), "also of a checkpoint"
    small, large = dev_numbers["small"], dev_numbers["large"]
    assert small["pearson"] > 0.95
    assert large["pearson"] == pytest.approx(small["pearson"], abs=1e-3)
    assert large["mse"] == pytest.approx(1e8 * small["mse"], rel=1e-2)
    continued = finetune_tiny(
        "regress", tmp_path / "small.csv", tmp_path / "continued", {"train.epochs": 0.1}, model=tmp_path / "small"
    )
    assert continued.results["splits"]["dev"]["numbers"]["mse"] < 2 * small["mse"], "with the scaling of the first run"


def mean_and_std_of_train(data: Path) -> dict[str, float]:
    """Return mean and standard deviation of the scores of train, without the generated dev split."""
    scores = [example.score for example in read(data, ScoredExample, DataSettings()).examples("train")]
    return {"mean": float(np.mean(scores)), "std": float(np.std(scores))}


def test_scores_that_are_too_large_are_refused(tmp_path: Path) -> None:
    rows = [{"text": f"the cat {number}", "score": (3 + number % 2) * 1e34} for number in range(40)]
    with pytest.raises(HeedfulError, match=r"^scores of train go from 3e\+34 to 4e\+34: scale them down below 1e\+30$"):
        finetune_tiny("regress", write_csv(tmp_path / "a.csv", rows), tmp_path / "run")


def test_the_batch_size_is_a_multiple_of_the_group_size(tmp_path: Path) -> None:
    recorder, data, run = Messages(), write_splits("together", tmp_path / "data"), tmp_path / "run"
    settings = {"task.group_size": 12, "train.epochs": 1}
    results = finetune_tiny("embed", data, run, settings, reporter=recorder).results
    assert any("batches of 12," in message for message in recorder.messages)
    assert tomllib.loads((run / "settings.toml").read_text())["train"]["batch_size"] == 12
    assert results["seeds"][0]["steps"] == 2, "24 pairs"
    with pytest.raises(HeedfulError, match=r"^train\.batch_size is 8, but an update takes whole groups of 32 pairs"):
        finetune_tiny("embed", data, tmp_path / "refused", {"train.batch_size": 8})
    assert not (tmp_path / "refused").exists()


def test_pairs_with_scores_may_have_any_batch_size(tmp_path: Path) -> None:
    settings = {"train.batch_size": 7, "train.epochs": 1}
    result = finetune_tiny("embed", write_splits("embed", tmp_path / "data"), tmp_path / "run", settings)
    assert result.status == "completed"


# -- long texts ---------------------------------------------------------------------------------------------------


def test_truncated_texts_of_pairs_are_noted(tmp_path: Path) -> None:
    settings = {"task.group_size": 4, "max_length": 8, "train.epochs": 1, "data.dev_fraction": 0.3}
    rows = [{"a": f"the dog ran {number} " * 9, "b": f"the cat sat {number}"} for number in range(20)]
    results = finetune_tiny("embed", write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "run", settings).results
    assert any("were cut: " in note for note in results["notes"])
    for split_results in results["splits"].values():
        (note,) = split_results["numbers"]["notes"]
        assert note.startswith("examples longer than the model reads, which were cut: ")


@pytest.mark.parametrize(("kind", "task"), [("single", "classify"), ("tag", "tag")])
def test_truncated_examples_of_dev_are_noted(tmp_path: Path, bare: Path, kind: str, task: str) -> None:
    """The note is in the results of the run, in its card, and in later evaluations."""
    data, run = write_splits(kind, tmp_path / "data"), tmp_path / "run"
    if kind == "single":
        with (data / "dev.csv").open("a") as file:
            file.writelines(f"{'the cat sat ' * 40},{label}\n" for label in ("bad", "good"))
    else:
        tagged_words = "the O\n" * 120
        with next(data.glob("dev.*")).open("a") as file:
            file.write(f"\n{tagged_words}\n{tagged_words}")
    results = finetune_tiny(task, data, run, {"long_inputs": "truncate", "train.epochs": 1}, model=bare).results
    assert not any("cut" in note for note in results["notes"]), "the examples of train are short"
    dev_notes, test_notes = (results["splits"][split]["numbers"]["notes"] for split in ("dev", "test"))
    truncated_tokens = 120 + 2 - 48  # words and special tokens without those that the model reads
    note = f"examples longer than the model reads, which were cut: 2 ({2 * truncated_tokens} tokens)"
    assert note in dev_notes
    assert not any("cut" in note for note in test_notes)
    assert f"On dev: {note}." in (run / "model" / "README.md").read_text()
    assert note in evaluate(run, data, split="dev").numbers["notes"]
    with_windows = evaluate(load(run), data, split="dev").numbers["notes"]
    assert not any("cut" in note for note in with_windows)
    predictions = read_jsonl(run / "predictions-dev.jsonl")
    assert {prediction["answer"]["truncated_tokens"] for prediction in predictions} == {0, truncated_tokens}


@pytest.mark.parametrize("kind", ["pair", "qa"])
def test_a_long_first_text_or_question_is_read_in_windows_or_truncated(tmp_path: Path, bare: Path, kind: str) -> None:
    data = write_splits(kind, tmp_path / "data")
    dev_file = next(data.glob("dev.*"))
    long_text = " ".join(["the cat sat"] * 40)
    if kind == "pair":
        with dev_file.open("a") as file:
            file.write(f"{long_text},a dog,bad\n{long_text},{long_text},good\n")
    else:
        dev_file.write_text(dev_file.read_text().replace("who is it ?", long_text, 1))
    task = TASKS[kind][0]
    in_windows = finetune_tiny(task, data, tmp_path / "windows", model=bare).results
    predictions = read_jsonl(tmp_path / "windows" / "predictions-dev.jsonl")
    assert max(prediction["answer"]["windows"] for prediction in predictions) > 3
    assert in_windows["splits"]["dev"]["numbers"]["count"] == len(predictions)
    truncated = finetune_tiny(task, data, tmp_path / "truncated", {"long_inputs": "truncate"}, model=bare).results
    assert truncated["splits"]["dev"]["numbers"]["count"] == len(predictions)


def test_texts_longer_than_max_length_are_read_in_windows(tmp_path: Path, bare: Path) -> None:
    data, run, recorder = write_rows_with_four_long_texts(tmp_path / "a.csv"), tmp_path / "run", Messages()
    results = finetune_tiny("classify", data, run, {"max_length": 12}, model=bare, reporter=recorder).results
    note = "4 training examples are longer than the model reads and are read in windows"
    assert note in recorder.messages
    assert results["notes"][1] == note
    assert load(run).max_length == 12, "the model is served as it was trained"
    windows = {prediction["answer"]["windows"] for prediction in read_jsonl(run / "predictions-dev.jsonl")}
    assert windows <= {1, 2}
    with pytest.raises(HeedfulError, match=r"max_length is 64, but .* reads 48 tokens"):
        finetune_tiny("classify", data, tmp_path / "long", {"max_length": 64}, model=bare)


def test_texts_longer_than_max_length_can_be_truncated(tmp_path: Path, bare: Path) -> None:
    data, run, recorder = write_rows_with_four_long_texts(tmp_path / "a.csv"), tmp_path / "run", Messages()
    settings = {"max_length": 12, "long_inputs": "truncate"}
    results = finetune_tiny("classify", data, run, settings, model=bare, reporter=recorder).results
    (note,) = (message for message in recorder.messages if "cut" in message)
    assert note.startswith("4 training examples are longer than the model reads and were cut: ")
    assert note in results["notes"]
    windows = {prediction["answer"]["windows"] for prediction in read_jsonl(run / "predictions-dev.jsonl")}
    assert windows == {1}, "texts of dev are truncated too"


def write_rows_with_four_long_texts(path: Path) -> Path:
    rows = classification_rows(24)
    for row in rows[:4]:
        row["text"] += " the cat sat on the mat"
    return write_csv(path, rows)


# -- training -----------------------------------------------------------------------------------------------------


def test_a_model_learns_to_classify(tmp_path: Path) -> None:
    settings = {"train.epochs": 15, "train.optimizer.lr": 3e-3, "init.tokenizer.vocab_size": 500}
    data = write_splits("single", tmp_path / "data", {"train": 96, "dev": 24, "test": 40})
    results = finetune_tiny("classify", data, tmp_path / "run", settings).results
    assert results["splits"]["test"]["numbers"]["accuracy"] > 0.9


def test_the_model_is_saved_before_it_is_evaluated(tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise HeedfulError("the evaluation failed")

    monkeypatch.setattr(run_module.FinetuneTraining, "_evaluate_split", fail)
    with pytest.raises(HeedfulError, match="the evaluation failed"):
        finetune_tiny("classify", write_splits("single", tmp_path / "data"), tmp_path / "run", model=bare)
    (answer,) = Engine(tmp_path / "run")(["the cat"])
    assert answer["label"] in ("bad", "good")


# -- where it starts --------------------------------------------------------------------------------------------


def test_an_encoder_from_scratch_is_trained_as_a_masked_lm_and_saved(tmp_path: Path) -> None:
    recorder, run = Messages(), tmp_path / "run"
    settings = {"init.mlm_steps": 3, "max_length": 64}
    finetune_tiny("classify", write_splits("single", tmp_path / "data"), run, settings, reporter=recorder)
    initial = load(run / "start")
    assert initial.config.head is not None
    assert initial.config.head.kind == "masked_lm"
    assert initial.max_length == 64
    assert initial.config.model.encoder is not None
    assert initial.config.model.encoder.layers == 1
    (message,) = (text for text in recorder.messages if text.startswith("no model was given: an encoder of "))
    assert "trained on the spot" in message
    assert any(text.startswith("it was trained on ") for text in recorder.messages)
    trained = load(run)
    assert trained.max_length == 64
    assert Engine(trained).limit == 64
    assert read_strict_json(run / "results.json")["base"] == "a small encoder, trained on the spot"


def test_a_model_that_is_neither_a_folder_nor_in_the_cache_is_refused(tmp_path: Path) -> None:
    data = write_splits("single", tmp_path / "data")
    with pytest.raises(
        HeedfulError, match="'nobody/nothing' is no folder here, and revision 'v1' of it is not in the local cache"
    ):
        finetune_tiny("classify", data, tmp_path / "run", model="nobody/nothing@v1")
    assert not (tmp_path / "run").exists()


def test_only_the_top_layers_are_re_initialised(tmp_path: Path, bare: Path) -> None:
    data = write_splits("single", tmp_path / "data")
    dataset = read(data)
    settings = FinetuneSettings(task=ClassifySettings(), init=Pretrained(reinit_layers=1))
    _, model = build_task(settings, dataset, compute_stats(dataset, ["train"]), load(bare))
    pretrained, initial = load(bare).named_tensors(), model.named_tensors()
    body = [name for name in pretrained if not name.startswith("head.")]
    changed = [name for name in body if not torch.equal(pretrained[name], initial[name])]
    assert changed
    assert all(name.startswith("encoder.blocks.1.") for name in changed)
    with pytest.raises(HeedfulError, match="reinit_layers is 3, but this model has 2 blocks"):
        finetune_tiny("classify", data, tmp_path / "run", {"reinit_layers": 3}, model=bare)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path, bare: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((bare / name).read_bytes())
    with pytest.raises(HeedfulError, match=r"has no tokenizer: put its tokenizer\.json"):
        finetune_tiny("classify", write_splits("single", tmp_path / "data"), tmp_path / "run", model=folder)


# -- seeds ------------------------------------------------------------------------------------------------------


def test_several_seeds(tmp_path: Path) -> None:
    data, run = write_splits("single", tmp_path / "data"), tmp_path / "run"
    results = finetune_tiny("classify", data, run, {"seeds": 2, "train.optimizer.lr": 5e-3}).results
    first, second = results["seeds"]
    assert first["seed"] == 1
    assert second["seed"] == 2
    accuracies = [first["splits"]["dev"], second["splits"]["dev"]]
    assert results["across_seeds"]["dev"] == {
        "mean": pytest.approx(fmean(accuracies)), "std": pytest.approx(stdev(accuracies)), "seeds": 2
    }  # fmt: skip
    best = run / f"seed-{results['seed']}"
    assert results["splits"]["dev"]["numbers"]["accuracy"] == max(accuracies)
    for name in ("journal.jsonl", "predictions-dev.jsonl", "predictions-test.jsonl", "model/model.safetensors"):
        assert (run / name).read_bytes() == (best / name).read_bytes()
    assert (run / "seed-1" / "journal.jsonl").read_bytes() != (run / "seed-2" / "journal.jsonl").read_bytes()
    assert not list(run.rglob("state"))


def test_the_first_of_several_seeds_has_the_results_of_a_run_with_one_seed(tmp_path: Path) -> None:
    data, run = write_splits("single", tmp_path / "data"), tmp_path / "run"
    finetune_tiny("classify", data, run, {"seeds": 2})
    single = finetune_tiny("classify", data, tmp_path / "single", {"train.seed": 1}).results
    assert read_strict_json(run / "seed-1" / "seed.json")["splits"] == single["splits"]


@pytest.mark.parametrize(
    ("split", "chosen_seed", "sentence"),
    [
        ("dev", 2, "that of seed 2, the best of 3 on dev;"),
        ("test", 1, "that of seed 1, the first of 3;"),
    ],
)
def test_the_seed_is_chosen_on_dev_and_never_on_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, chosen_seed: int, sentence: str
) -> None:
    data, run = write_splits("single", tmp_path / "data", {"train": 24, split: 8}), tmp_path / "run"
    accuracies = iter([0.2, 0.9, 0.5])  # of the seeds 1, 2 and 3
    evaluate_split = run_module.FinetuneTraining._evaluate_split

    def with_other_accuracy(training: Any, *arguments: Any) -> dict[str, Any]:
        split_results = evaluate_split(training, *arguments)
        return split_results | {"numbers": split_results["numbers"] | {"accuracy": next(accuracies)}}

    monkeypatch.setattr(run_module.FinetuneTraining, "_evaluate_split", with_other_accuracy)
    results = finetune_tiny("classify", data, run, {"data.dev_fraction": 0, "seeds": 3}).results
    assert results["seed"] == chosen_seed
    assert set(results["splits"]) == {split}
    assert [seed["splits"] for seed in results["seeds"]] == [{split: 0.2}, {split: 0.9}, {split: 0.5}]
    assert sentence in (run / "model" / "README.md").read_text()


# -- missing splits and useless data ----------------------------------------------------------------------------


def test_a_run_without_dev_and_test(tmp_path: Path) -> None:
    data, run = write_csv(tmp_path / "a.csv", classification_rows(20)), tmp_path / "run"
    results = finetune_tiny("classify", data, run, {"data.dev_fraction": 0}).results
    assert results["splits"] == {}
    assert results["across_seeds"] == {}
    assert results["seeds"][0]["best_step"] == results["seeds"][0]["steps"] == 4
    assert not list(run.glob("predictions-*"))
    assert "metric_value" not in read_jsonl(run / "journal.jsonl")[-1]
    assert "Nothing was measured" in (run / "model" / "README.md").read_text()


def test_tuned_thresholds_without_dev_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = tmp_path / "run"
    multilabel = write_jsonl(tmp_path / "multilabel.jsonl", generated_data.multilabel_rows(20))
    with pytest.raises(
        HeedfulError, match=r"tuned on dev, but there is no dev split: set data\.dev_fraction.*task\.thresholds=0.5"
    ):
        finetune_tiny("classify", multilabel, run, {"data.dev_fraction": 0, "task.thresholds": "tuned"})
    questions = tmp_path / "questions.json"
    questions.write_text(json.dumps(generated_data.squad_json(9, impossible=True)))
    with pytest.raises(HeedfulError, match=r"set data\.dev_fraction.*task\.no_answer_threshold=0"):
        finetune_tiny("qa", questions, run, {"data.dev_fraction": 0})
    assert not run.exists()


def test_a_dev_split_that_would_be_empty_is_left_out(tmp_path: Path) -> None:
    recorder, data = Messages(), write_csv(tmp_path / "a.csv", classification_rows(6))
    seeds_without_dev = (
        seed
        for seed in range(100)
        if not list(read(data, None, DataSettings(dev_fraction=0.02, seed=seed)).examples("dev"))
    )
    settings = {"data.dev_fraction": 0.02, "data.seed": next(seeds_without_dev)}
    results = finetune_tiny("classify", data, tmp_path / "run", settings, reporter=recorder).results
    reason = "the hash of their texts would put none of the 6 examples into it, so all are train"
    note = f"no dev split can be made: {reason}"
    assert note in recorder.messages
    assert note in results["notes"]
    assert results["splits"] == {}


# by a description of the data: task, rows, and the message of the error
UNLEARNABLE = {
    "one class": ("classify", [{"text": f"the cat {n}", "label": "x"} for n in range(9)],
                  'all examples of train have the label "x": there is nothing to distinguish'),
    "ids": ("classify", [{"text": f"the cat {n}", "label": f"id-{n}"} for n in range(120)],
            "label column looks like an id or a text.*--data.columns.label=NAME"),
    "no label": ("classify", [{"text": f"the cat {n}", "labels": []} for n in range(9)],
                 "all examples of train have no label: there is nothing to distinguish"),
    "one score": ("regress", [{"text": f"the cat {n}", "score": 2} for n in range(9)],
                  "all scores of train are 2: nothing can be learned from them$"),
    "far from 0": ("regress", [{"text": f"the cat {n}", "score": 1_700_000_000 + 10 * (n % 2)} for n in range(40)],
                   r"^scores of train, from 1700000000 to 1700000010, vary too .*: subtract about 170000000\d"),
    "far below 0": ("regress", [{"text": f"the cat {n}", "score": n % 2 - 1e6} for n in range(40)],
                    r"^scores of train, from -1000000 to -999999, vary too .*: subtract about -999999\.\d+ from"),
    "one score of pairs": ("embed", [{"a": f"the cat {n}", "b": "x", "score": 2} for n in range(9)],
                           "all scores of train are 2: .*leave the column out .*data.columns.score="),
    "no tag": ("tag", [{"words": ["the", "cat"], "tags": ["O", "O"]} for n in range(9)],
               'all words of train have the tag "O": there are no entities to learn'),
}  # fmt: skip


@pytest.mark.parametrize("description", UNLEARNABLE)
def test_data_from_which_nothing_can_be_learned_are_refused(tmp_path: Path, description: str) -> None:
    task, rows, message = UNLEARNABLE[description]
    with pytest.raises(HeedfulError, match=message):
        finetune_tiny(task, write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", ["", "text,label\n", "\n\n"])
def test_empty_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    with pytest.raises(HeedfulError, match=r"a\.csv"):
        finetune_tiny("classify", tmp_path / "a.csv", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unknown_tasks_and_missing_columns_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    data = write_csv(tmp_path / "a.csv", [{"text": "a", "stars": 3}])
    with pytest.raises(HeedfulError, match=r'"classfy" is not a task \(did you mean "classify"\?\)'):
        finetune_tiny("classfy", data, run)
    with pytest.raises(
        HeedfulError, match=r'a\.csv: which column is the label\? .* say --data\.columns\.label=NAME, one of "text"'
    ):
        finetune_tiny("classify", data, run)
    with pytest.raises(HeedfulError, match=r"which column is the score\?"):
        finetune_tiny("regress", data, run)
    with_label_columns = write_csv(tmp_path / "b.csv", [{"text": "a", "toxic": 1, "mild": 0}])
    misspelt = {"data.columns": '{labels = ["toxic", "milt"]}'}
    with pytest.raises(HeedfulError, match=r'has no column "milt", but "text", "toxic", "mild" \(did you mean "mild"'):
        finetune_tiny("classify", with_label_columns, run, misspelt)


# -- bad rows ---------------------------------------------------------------------------------------------------


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_the_error_for_a_bad_row_names_its_line(tmp_path: Path) -> None:
    data = write_splits("single", tmp_path / "data")
    append(data / "test.csv", "the cat sat,ugly\n")
    with pytest.raises(HeedfulError, match=r'test\.csv:10: the label "ugly" is not in train, which has "bad", "good"'):
        finetune_tiny("classify", data, tmp_path / "run")


def test_a_test_split_without_labels_is_left_out(tmp_path: Path) -> None:
    data = write_splits("single", tmp_path / "data")
    (data / "test.csv").write_text("text\nthe cat\n")
    results = finetune_tiny("classify", data, tmp_path / "run", {"train.epochs": 1}).results
    assert set(results["splits"]) == {"dev"}
    assert "test: has no label, so it is left out" in results["data"]["stated"]


def test_the_reason_of_a_bad_row_names_settings_of_the_run(tmp_path: Path) -> None:
    data = write_csv(tmp_path / "a.csv", classification_rows(30))
    data.write_bytes(data.read_bytes() + "café,good\n".encode("latin-1"))
    with pytest.raises(HeedfulError, match=r"say --data\.encoding=cp1252, or iconv"):
        finetune_tiny("classify", data, tmp_path / "run")
    finetune_tiny("classify", data, tmp_path / "run", on_bad_row="skip")
    (bad_row,) = read_jsonl(tmp_path / "run" / "bad-rows.jsonl")
    assert "say --data.encoding=cp1252, or iconv" in bad_row["reason"]


def test_bad_rows_are_set_aside_and_counted(tmp_path: Path) -> None:
    data, run, recorder = write_splits("single", tmp_path / "data"), tmp_path / "run", Messages()
    append(data / "test.csv", "the cat sat,ugly\n")
    append(data / "train.csv", "the dog ran,\nthe dog sat,\n")
    results = finetune_tiny("classify", data, run, on_bad_row="skip", reporter=recorder).results
    lines_of_bad_rows = sorted((Path(row["file"]).name, row["line"]) for row in read_jsonl(run / "bad-rows.jsonl"))
    assert lines_of_bad_rows == [("test.csv", 10), ("train.csv", 26), ("train.csv", 27)]
    assert results["data"]["bad_rows"] == {"train.csv": 2, "test.csv": 1}
    assert results["data"]["splits"]["test"] == {"examples": 8}
    assert "bad rows of train.csv that are left out: 2" in results["notes"]
    assert "bad rows of test.csv that are left out: 1" in results["notes"]
    assert f"bad rows are set aside in {run / 'bad-rows.jsonl'}" in recorder.messages
    repeated = finetune_tiny("classify", data, run, on_bad_row="skip").results
    assert repeated == results


def test_bad_rows_of_files_with_the_same_name_are_counted_separately(tmp_path: Path) -> None:
    rows = '{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n'
    files = []
    for folder, num_bad_rows in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "train.jsonl"
        file.write_text("broken\n" * num_bad_rows + rows)
        files.append(file)
    settings = FinetuneSettings(task=ClassifySettings(), data=DataSettings(dev_fraction=0.0))
    dataset = dataset_for_task(LabelledExample, files, settings.data, Skip())
    assert len(list(dataset.examples("train"))) == 4
    run = tmp_path / "run"
    run.mkdir()
    reopen = partial(dataset_for_task, LabelledExample, files, settings.data)
    init_labelled_run(run, settings, dataset, {"train": 4}, reopen)
    assert read_run_json(run / DATA)["bad_rows"] == {"a/train.jsonl": 1, "b/train.jsonl": 2}
    assert len(read_jsonl(run / BAD_ROWS)) == 3


# -- names ------------------------------------------------------------------------------------------------------

UNUSUAL_LABELS = ["a, b", 'say "yes"', "=cmd()", "@x", "🦊 ü", "two\nlines", "[red]", "</script>"]


@pytest.mark.slow
@pytest.mark.usefixtures("run_plots")
def test_labels_may_be_any_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    monkeypatch.undo()  # with the measurement of latency
    rows = [{"text": f"the cat {number % 8} sat", "label": UNUSUAL_LABELS[number % 8]} for number in range(32)]
    data = {split: write_csv(tmp_path / f"{split}.csv", rows) for split in ("train", "test")}
    run, labels = tmp_path / "run", sorted(UNUSUAL_LABELS)
    results = finetune_tiny("classify", data, run, model=bare).results
    assert results["labels"] == labels
    assert list(load(run).config.head.labels) == labels  # type: ignore[union-attr]
    assert set(results["splits"]["test"]["numbers"]["classes"]) == set(labels)
    assert {prediction["label"] for prediction in read_jsonl(run / "predictions-test.jsonl")} == set(labels)
    reference, _ = load_reference(run / "model")
    assert reference.config.label2id == {label: index for index, label in enumerate(labels)}
    for line in (run / "results.csv").read_text().splitlines():
        assert not any(cell.startswith(("=", "@")) for cell in line.split(",")), "formulas of spreadsheets"


def test_names_of_files_and_folders_may_be_any_text(tmp_path: Path) -> None:
    folder = tmp_path / "a b ü🦊" / "with 'quotes'"
    folder.mkdir(parents=True)
    data, run = write_csv(folder / "mein tägliches = 🦊.csv", classification_rows(30)), folder / "run [1]"
    results = finetune_tiny("classify", data, run).results
    assert list(results["data"]["files"]) == [data.name]
    (answer,) = Engine(run)(["the cat"])
    assert answer["label"] in ("bad", "good")
    repeated = finetune_tiny("classify", data, run).results
    assert repeated == results


def test_files_with_the_same_name_are_listed_with_their_folders(tmp_path: Path) -> None:
    files = {}
    for split, count in (("train", 24), ("dev", 8)):
        (tmp_path / split).mkdir()
        files[split] = write_csv(tmp_path / split / "data.csv", classification_rows(count))
    results = finetune_tiny("classify", files, tmp_path / "run").results
    assert set(results["data"]["files"]) == {"train/data.csv", "dev/data.csv"}


# -- settings and interruptions ---------------------------------------------------------------------------------


def test_automatic_settings_are_written_with_their_resolved_values(tmp_path: Path) -> None:
    settings = {"train.precision": "auto", "train.optimizer": "{kind = 'adamw', lr = 1e-3}"}
    finetune_tiny("classify", write_splits("single", tmp_path / "data"), tmp_path / "run", settings)
    written = from_file(FinetuneSettings, tmp_path / "run" / "settings.toml")
    assert written.train.precision in ("float32", "bfloat16")
    assert written.train.optimizer == AdamW(lr=1e-3)


def test_a_run_may_start_from_a_run_of_another_task(tmp_path: Path, bare: Path) -> None:
    classifier, tagger = tmp_path / "classifier", tmp_path / "tagger"
    finetune_tiny("classify", write_splits("single", tmp_path / "data"), classifier, model=bare)
    results = finetune_tiny("tag", write_splits("tag", tmp_path / "tags"), tagger, model=classifier).results
    assert results["base"] == str(classifier)
    reference, _ = load_reference(tagger / "model")
    assert reference.config.id2label[1] == "B-LOC"


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        ("classify", {"init.layers": 6}, 'init.layers is for init.kind = "scratch" or'),
        (
            "classify",
            {"data.dev_fraction": 0, "fit.patience": 2},
            "fit.patience would change nothing: it counts",
        ),
        (
            "classify",
            {"init.kind": "classic", "train.gradient_checkpointing": "true"},
            "train.gradient_checkpointing would change nothing",
        ),
    ],
)
def test_settings_that_would_change_nothing_are_refused(
    task: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", forty_labelled_rows())
    assignments = [f"{name}={value}" for name, value in settings.items()]
    with pytest.raises(HeedfulError, match=message):
        plan_finetune(task, data, assignments=assignments)


def forty_labelled_rows() -> list[dict[str, Any]]:
    return [{"text": f"word {number}", "label": "ab"[number % 2]} for number in range(40)]


def test_a_dev_split_whose_scores_are_equal_cannot_choose_a_step(tmp_path: Path) -> None:
    rows = [{"text": f"word {number}", "score": number} for number in range(40)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "dev.jsonl", rows[:1])
    with pytest.raises(HeedfulError, match="all scores of dev are the same"):
        plan_finetune("regress", tmp_path)
    last_step = plan_finetune("regress", tmp_path, assignments=["fit.load_best_at_end=false"])
    assert not last_step.settings.fit.load_best_at_end


def test_a_tiny_generated_dev_split_is_not_refused_for_equal_scores(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", [{"text": f"word {number}", "score": number} for number in range(40)])
    plan = plan_finetune("regress", data, assignments=["data.dev_fraction=0.001", "data.seed=3"])
    assert "dev" not in set(plan.stats.non_empty_splits) & set(plan.stats.constant_score_splits)


def test_a_signal_after_the_last_step_ends_the_command(tmp_path: Path) -> None:
    """The next seed is not started. The same command resumes the run."""

    class StopAtTheEnd(Reporter):
        def step(self, step: Any, trainer: Any) -> None:
            trainer.stop_requested = trainer.progress >= 1

    data, run = write_jsonl(tmp_path / "a.jsonl", forty_labelled_rows()), tmp_path / "run"
    settings = {"init.kind": "scratch", "seeds": 2, "train.epochs": 1}
    assert finetune_tiny("classify", data, run, settings, reporter=StopAtTheEnd()).status == "interrupted"
    assert not list(run.glob("seed-*/seed.json"))
    assert finetune_tiny("classify", data, run, settings).status == "completed"
