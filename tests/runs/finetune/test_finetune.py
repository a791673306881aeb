"""finetune on every task: what a run leaves, what its model answers elsewhere, and what is refused before it starts."""

from __future__ import annotations

import csv
import json
import math
import random
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
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
from heedful.runs.finetune import run as module
from heedful.runs.finetune.build import build_task, initial_model
from heedful.runs.finetune.init_settings import Pretrained, Scratch
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

TASKS = {  # the kind of invented data -> the task, its setting, and its main number
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
MORE: dict[str, dict[str, Any]] = {
    "classes": {"task.class_weight": "balanced"},
    "multiple": {"task.thresholds": "tuned", "task.class_weight": "balanced"},
    "together": {"task.group_size": 4},
}
ALWAYS = {
    *("settings.toml", "environment.json", "data.json", "journal.jsonl", "results.csv", "results.json", "seed.json"),
    *("run.lock", "predictions-dev.jsonl", "predictions-test.jsonl", "plots", "model", "report.html"),
}
TIMES = {"latency": {"16": {"p50": 1.0, "p99": 1.0}}, "throughput": 1}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No timing, but where a test undoes it; one thread, so that equal runs are equal."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: TIMES)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder that transformers saved."""
    return make_model_dir(tmp_path_factory.mktemp("bare"), "bare")


def strict(path: Path) -> Any:
    """JSON without NaN and the like."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(path.read_text("utf-8"), parse_constant=refuse)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


# -- every task -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("run_plots")
@pytest.mark.parametrize("kind", TASKS)
def test_a_run_is_complete(kind: str, tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    task, setting, main = TASKS[kind]
    folder = tmp_path / "run"
    done = finetune_tiny(task, write_splits(kind, tmp_path / "data"), folder, MORE.get(kind), model=bare)
    assert done.status == "completed" and done.results == strict(folder / "results.json")
    steps = {name: each["step"] for name, each in done.results["checkpoints"].items() if name != "model"}
    more = {"checkpoints"} if steps["best"] != steps["last"] else set()
    more |= {"before.json"} if task in ("embed", "rank") else set()
    assert {path.name for path in folder.iterdir()} == ALWAYS | more
    assert (folder / "plots" / "curves.png").stat().st_size > 1000
    card = (folder / "model" / "README.md").read_text("utf-8")
    assert "heedful" in card and main in card

    results = done.results
    assert (results["task"], results["metric"], results["base"]) == (setting, main, str(bare))
    assert results["seed"] == 1 and [each["seed"] for each in results["seeds"]] == [1]
    assert set(results["splits"]) == {"dev", "test"} == set(results["across_seeds"])
    for split, split_results in results["splits"].items():
        numbers = split_results["numbers"]
        assert numbers["count"] == (64 if kind == "plain" else 8), "examples; of plain tags, words"
        assert (
            all(each["low"] <= each["high"] for each in split_results["intervals"].values())
            and main in split_results["intervals"]
        )
        assert results["across_seeds"][split] == {"mean": numbers[main], "std": None, "seeds": 1}
        assert results["seeds"][0]["splits"][split] == numbers[main]
        check_predictions(folder / f"predictions-{split}.jsonl", numbers)
    assert results["latency"].keys() == {"16"} and results["throughput"] > 0, "the model reads 48 tokens"
    assert results["memory"] > 10**8
    assert results["data"]["splits"] == {split: {"examples": count} for split, count in generated_data.SIZES.items()}
    assert results["data"]["bad_rows"] == {} and len(results["data"]["files"]) == 3
    assert results["notes"][0].startswith("24 training examples are ")
    assert from_file(FinetuneSettings, folder / "settings.toml").task.kind == setting
    assert tomllib.loads((folder / "settings.toml").read_text())["train"]["batch_size"] == 16
    check_table(folder, main)
    check_model(folder, kind)


def check_predictions(path: Path, numbers: dict[str, Any]) -> None:
    predictions = lines(path)
    assert sorted(line["id"] for line in predictions) == list(range(8))
    order = [(line["correct"] is False, line["loss"]) for line in predictions]
    assert order == sorted(order, reverse=True)
    for line in predictions:
        assert line.keys() - {"rank"} == {"id", "input", "label", "prediction", "correct", "loss", "answer"}
        assert ("rank" in line) == ("mrr" in numbers and "map" not in numbers)
        assert not {"vector", "vectors"} & line["answer"].keys()
    share = next((numbers[name] for name in ("subset_accuracy", "exact", "accuracy") if name in numbers), None)
    if predictions[0]["correct"] is not None and numbers["count"] == 8 and share is not None:
        assert sum(line["correct"] for line in predictions) / 8 == share


def check_table(folder: Path, main: str) -> None:
    """The table has what the journal has, and in its last row the score that others are compared with."""
    with (folder / "results.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if "baseline" in strict(folder / "results.json"):
        assert rows.pop()["baseline"] in ("a bag of words", "before training")
    records = lines(folder / "journal.jsonl")
    assert len(rows) == len(records)
    for row, record in zip(rows, records, strict=True):
        flat = record | {f"dev_{name}": value for name, value in record.pop("dev", {}).items()}
        assert {name: value for name, value in row.items() if value} == {
            name: escape_cell(str(value)) for name, value in flat.items() if name != "dev"
        }
    losses = [record for record in records if "loss" in record]
    looks = [record for record in records if "metric_value" in record]
    assert [record["step"] for record in losses] == list(range(1, len(losses) + 1))
    assert len(looks) == 2, "after each of the two epochs"
    results = strict(folder / "results.json")
    best = [record for record in looks if record["best"]][-1]
    assert best["metric_value"] == max(record["metric_value"] for record in looks)
    assert results["seeds"][0]["best_step"] == best["step"] and results["seeds"][0]["steps"] == losses[-1]["step"]
    if results["task"] not in ("multiple", "qa"):  # whose thresholds were calibrated after the last look
        assert results["splits"]["dev"]["numbers"][main] == pytest.approx(best["metric_value"], abs=1e-6)


@torch.no_grad()
def check_model(folder: Path, kind: str) -> None:
    """transformers computes from the model folder what Heedful does, and Heedful answers as it did in the run."""
    model, engine = folder / "model", Engine(folder)
    for line in lines(folder / "predictions-test.jsonl")[:3]:
        inputs, answer = line["input"], line["answer"]
        (again,) = engine([inputs if not isinstance(inputs, list) or TASKS[kind][0] == "tag" else tuple(inputs)])
        assert rounded(again) == rounded(answer)
        match TASKS[kind][0]:
            case "classify":
                (logits,) = reference_logits(model, *([inputs] if isinstance(inputs, str) else inputs)).logits
                shares = logits.sigmoid() if kind == "multiple" else logits.softmax(-1)
                assert answer["probabilities"] == pytest.approx(named(model, shares), abs=1e-6)
            case "regress":
                assert answer["values"] == pytest.approx(
                    named(model, reference_logits(model, *inputs).logits[0]), abs=1e-5
                )
            case "tag":
                check_tags(model, inputs, answer)
            case "qa":
                out = reference_logits(model, inputs["question"], inputs["context"])
                first = float(out.start_logits[0, 0] + out.end_logits[0, 0])
                assert answer["no_answer_score"] == pytest.approx(first, abs=1e-5)
            case "multiple-choice":
                their_model, tokenizer = load_reference(model)
                count = len(inputs["choices"])
                batch = tokenizer([inputs["prompt"]] * count, inputs["choices"], return_tensors="pt", padding=True)
                logits = their_model(**{name: tensor[None] for name, tensor in batch.items()}).logits[0]
                assert answer["probabilities"] == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)
            case "rank":
                peer = CrossEncoder(str(model), device="cpu")
                expected = peer.predict([(inputs["query"], text) for text in inputs["texts"]]).tolist()
                assert answer["scores"] == pytest.approx(expected, abs=1e-5)
            case "embed":
                vectors = [reference_logits(model, text).last_hidden_state[0].mean(0) for text in inputs]
                cosine = torch.nn.functional.cosine_similarity(vectors[0], vectors[1], dim=0)
                assert answer["similarity"] == pytest.approx(float(cosine), abs=1e-5)


def rounded(value: Any) -> Any:
    """An answer without the last digits of its numbers, and without vectors."""
    match value:
        case float():
            return round(value, 4)
        case dict():
            return {name: rounded(each) for name, each in value.items() if name not in ("vector", "vectors")}
        case list():
            return [rounded(each) for each in value]
    return value


def named(model: Path, values: torch.Tensor) -> dict[str, float]:
    """By the labels of their config."""
    labels = load_reference(model)[0].config.id2label
    return {labels[number]: value for number, value in enumerate(values.tolist())}


def check_tags(model: Path, words: list[str], answer: Any) -> None:
    their_model, tokenizer = load_reference(model)
    batch = tokenizer(words, is_split_into_words=True, return_tensors="pt")
    logits = their_model(**batch).logits[0]
    ids = load(model).tokenizer.encode(PreTokenized(words)).words  # type: ignore[union-attr]
    for number, word in enumerate(answer["words"]):
        best = logits[ids.index(number)].softmax(-1)
        assert word["probability"] == pytest.approx(float(best.max()), abs=1e-6)
        assert word["label"] == their_model.config.id2label[int(best.argmax())]


# -- what is particular to a task -------------------------------------------------------------------------------


def test_classes_weigh_by_how_rare_they_are(tmp_path: Path) -> None:
    rows = [{"text": f"the cat {number}", "label": "x" if number < 9 else "y"} for number in range(12)]
    source = read(write_csv(tmp_path / "a.csv", rows), None, DataSettings(dev_fraction=0.0))
    loaded = initial_model(Scratch(layers=1, width=32), source, {"train": 9}, 1, None, lambda text: None)

    def weights(kind: Any) -> Any:
        task, _ = build_task(FinetuneSettings(task=kind), source, compute_stats(source, ["train"]), loaded)
        return task.weights  # type: ignore[attr-defined]

    assert weights(ClassifySettings()) == ()
    assert weights(ClassifySettings(class_weight="balanced")) == (12 / (2 * 9), 12 / (2 * 3))
    assert weights(MultiLabelSettings(class_weight="balanced")) == (3 / 9, 9 / 3)


def test_a_label_that_only_dev_has_weighs_something(tmp_path: Path) -> None:
    rows = [*classification_rows(40), {"text": "sat here", "label": "rare"}]
    rare = next(
        seed
        for seed in range(200)
        if "rare"
        not in compute_stats(read(write_csv(tmp_path / "a.csv", rows), None, DataSettings(seed=seed)), ["train"]).labels
    )
    settings = {"data.seed": rare, "task.class_weight": "balanced", "train.epochs": 1}
    done = finetune_tiny("classify", tmp_path / "a.csv", tmp_path / "run", settings)
    assert done.results["labels"] == ["bad", "good", "rare"]
    warning = 'dev has labels that do not occur in train, so that they cannot be learned: "rare" (1)'
    assert warning in done.results["notes"]


def test_tags_that_only_dev_has_are_told(tmp_path: Path) -> None:
    rows = [{"words": ["the", f"cat{number}"], "tags": ["O", "B-X"]} for number in range(60)]
    rows += [{"words": ["in", "new", "york"], "tags": ["O", "I-Y", "I-Y"]}]
    labelled = write_jsonl(tmp_path / "a.jsonl", rows)
    note = next(
        note
        for seed in range(200)
        if (note := compute_stats(read(labelled, None, DataSettings(seed=seed)), ["train", "dev"])).unseen_labels
    )
    assert note.unseen_labels == {"dev": {"B-Y": 1}} and "X" not in str(split_warnings(note))
    named = [{"text": "the cat", "labels": ["a"]}, {"text": "a dog", "labels": ["b", "a"]}]
    data = {"train": write_jsonl(tmp_path / "b.jsonl", named), "dev": write_jsonl(tmp_path / "c.jsonl", named[:1])}
    assert not compute_stats(read(data), ["train", "dev"]).unseen_labels, "what train has and dev lacks is learned"


def test_thresholds_are_calibrated_on_dev(tmp_path: Path) -> None:
    labelled = write_splits("multiple", tmp_path / "data")
    scores = {}
    for how in (0.5, "tuned"):
        done = finetune_tiny("classify", labelled, tmp_path / str(how), {"task.thresholds": how})
        scores[how] = done.results["splits"]["dev"]["numbers"]["labels"]
        thresholds = load(tmp_path / str(how)).thresholds
        assert set(thresholds) == (set(generated_data.ENTITY_TYPES) if how == "tuned" else set())
        assert thresholds == strict(tmp_path / str(how) / "model" / "heedful.json").get("thresholds", {})
    assert all(each["f1"] >= scores[0.5][label]["f1"] for label, each in scores["tuned"].items())
    assert any(each["f1"] > scores[0.5][label]["f1"] for label, each in scores["tuned"].items())
    for line in lines(tmp_path / "tuned" / "predictions-dev.jsonl"):
        shares = line["answer"]["probabilities"]
        assert line["prediction"] == [label for label in shares if shares[label] >= thresholds[label]]


@pytest.mark.parametrize("seed", range(5))
def test_no_other_threshold_gives_a_better_f1(seed: int) -> None:
    draw = np.random.default_rng(seed)
    shares, gold = draw.integers(0, 12, 40) / 12, draw.integers(0, 2, 40)

    def f1(threshold: float) -> float:
        predicted = shares >= threshold
        return float(2 * (predicted & (gold == 1)).sum() / (predicted.sum() + gold.sum()))

    assert f1(best_threshold(shares, gold)) == max(f1(threshold) for threshold in [*shares, 1.5])


def test_the_threshold_of_no_answer(tmp_path: Path) -> None:
    labelled = write_splits("impossible", tmp_path / "data")
    done = finetune_tiny("qa", labelled, tmp_path / "run")
    numbers = done.results["splits"]["dev"]["numbers"]
    assert numbers["f1"] == pytest.approx(numbers["best_f1"], abs=1e-9), "it is the best one on dev"
    assert load(tmp_path / "run").thresholds == {NO_ANSWER: numbers["best_f1_threshold"]}
    zero = finetune_tiny("qa", labelled, tmp_path / "zero", {"task.no_answer_threshold": 0})
    assert load(tmp_path / "zero").thresholds == {NO_ANSWER: 0.0}
    assert zero.results["splits"]["dev"]["numbers"]["f1"] <= numbers["f1"]
    plain = finetune_tiny("qa", write_splits("qa", tmp_path / "plain"), tmp_path / "always")
    assert load(tmp_path / "always").thresholds == {} and plain.results["splits"]["dev"]["numbers"]["version"] == "1.1"


def test_long_answers_are_counted_and_given_where_it_is_said(tmp_path: Path) -> None:
    words = " ".join(["cat", "dog"] * 20)
    asked = {"question": "which ?", "context": words, "answers": {"text": [words], "answer_start": [0]}}
    labelled = write_jsonl(tmp_path / "a.jsonl", [asked | {"id": str(number)} for number in range(6)])
    data = {"train": labelled, "dev": labelled}
    message = "6 training examples have an answer that is longer than task.max_answer_tokens=30"
    few = finetune_tiny("qa", data, tmp_path / "few")
    assert message in few.results["notes"] and load(tmp_path / "few").thresholds == {}
    many = finetune_tiny("qa", data, tmp_path / "many", {"task.max_answer_tokens": 200, "train.epochs": 40})
    assert not [note for note in many.results["notes"] if "an answer of" in note]
    assert load(tmp_path / "many").thresholds == {"max_answer_tokens": 200.0}
    assert many.results["splits"]["dev"]["numbers"]["f1"] > few.results["splits"]["dev"]["numbers"]["f1"]
    assert len(Engine(tmp_path / "many")([{"question": "which ?", "context": words}])[0]["answer"].split()) > 30
    with pytest.raises(HeedfulError, match="max_answer_tokens is 0; expected a whole number from 1"):
        finetune_tiny("qa", data, tmp_path / "none", {"task.max_answer_tokens": 0})


def test_questions_in_csv_train_the_same_model_as_in_squads_json(tmp_path: Path) -> None:
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
    settings = {"train.epochs": 1}
    runs = [finetune_tiny("qa", tmp_path / form, tmp_path / f"run-{form}", settings) for form in ("json", "csv")]
    expected, splits = (run.results["splits"] for run in runs)
    assert splits["test"]["numbers"]["exact"] == expected["test"]["numbers"]["exact"]
    assert splits["dev"]["numbers"]["f1"] == expected["dev"]["numbers"]["f1"]
    weights = [load(run.output_dir).weights_digest() for run in runs]
    assert weights[0] == weights[1]


def test_questions_without_answers_in_dev_alone(tmp_path: Path) -> None:
    write_splits("qa", tmp_path / "data")
    (tmp_path / "data" / "dev.json").write_text(json.dumps(generated_data.squad_json(6, 9, impossible=True)))
    done = finetune_tiny("qa", tmp_path / "data", tmp_path / "run", {"train.epochs": 1})
    assert done.results["splits"]["dev"]["numbers"]["version"] == "2.0"


def test_questions_without_answers_in_test_alone_change_no_weight(tmp_path: Path) -> None:
    write_splits("qa", tmp_path / "plain")
    write_splits("qa", tmp_path / "data")
    (tmp_path / "data" / "test.json").write_text(json.dumps(generated_data.squad_json(6, 9, impossible=True)))
    plain = finetune_tiny("qa", tmp_path / "plain", tmp_path / "without")
    done = finetune_tiny("qa", tmp_path / "data", tmp_path / "run")
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("without", "run")]
    assert weights[0] == weights[1] and load(tmp_path / "run").thresholds == {}
    numbers = {split: each["numbers"] for split, each in done.results["splits"].items()}
    assert numbers["dev"] == plain.results["splits"]["dev"]["numbers"] and numbers["dev"]["version"] == "1.1"
    assert numbers["test"]["version"] == "2.0" and numbers["test"]["unanswerable_count"] == 2
    again = evaluate(tmp_path / "run", tmp_path / "data", split="test").numbers
    assert again["f1"] == numbers["test"]["f1"] and again["best_f1"] == numbers["test"]["best_f1"]
    assert any(note.startswith("test has unanswerable questions, but train") for note in done.results["notes"])
    assert "thresholds" not in (tmp_path / "run" / "model" / "README.md").read_text()


def test_tags_come_as_they_are_meant(tmp_path: Path) -> None:
    done = finetune_tiny("tag", write_splits("tag", tmp_path / "data"), tmp_path / "run")
    assert done.results["labels"] == ["O", "B-LOC", "I-LOC", "B-PER", "I-PER"], "IOB1 was read"
    assert any("IOB1" in sentence for sentence in done.results["data"]["stated"])
    golds = [line["label"] for line in lines(tmp_path / "run" / "predictions-test.jsonl")]
    assert not [tags for tags in golds for one, two in zip(["O", *tags], tags, strict=False) if two[0] == "I" == one]
    plain = finetune_tiny("tag", write_splits("plain", tmp_path / "words"), tmp_path / "plain")
    assert plain.results["labels"] == ["LOC", "PER", "WORD"]


def test_scores_of_pairs_have_a_range(tmp_path: Path) -> None:
    done = finetune_tiny("embed", write_splits("embed", tmp_path / "data"), tmp_path / "run")
    assert done.results["label_scaling"] == {"low": 0.0, "high": 5.0} == load(tmp_path / "run").label_scaling
    for line in lines(tmp_path / "run" / "predictions-dev.jsonl"):
        assert line["loss"] == pytest.approx(abs(line["prediction"] - line["label"] / 5))
    other = finetune_tiny(
        "embed", write_splits("together", tmp_path / "pairs"), tmp_path / "other", {"task.group_size": 3}
    )
    assert other.results["metric"] == "accuracy" and "mrr" in other.results["splits"]["dev"]["numbers"]


@pytest.mark.slow
def test_numbers_in_any_unit_are_learned(tmp_path: Path, bare: Path) -> None:
    draw, rows, scores = random.Random(0), [], {}
    for number in range(164):
        words, low = draw.choices(["the", "cat", "sat", "on", "a", "mat"], k=4), 75 if number % 2 else 30
        rows.append({"text": " ".join([*words, "love" if number % 2 else "dog"]), "score": low + draw.randrange(10)})
    for name, unit in (("plain", 1.0), ("far", 1e4)):
        folder, scaled_rows = tmp_path / name, [row | {"score": unit * row["score"]} for row in rows]
        settings = {"train.epochs": 8, "fit.keep_checkpoints": "true"}
        done = finetune_tiny("regress", write_csv(tmp_path / f"{name}.csv", scaled_rows), folder, settings, model=bare)
        scores[name] = done.results["splits"]["dev"]["numbers"]
        assert load(folder).label_scaling == done.results["label_scaling"] == pytest.approx(about(folder, name))
        line = lines(folder / "predictions-dev.jsonl")[-1]
        theirs = float(reference_logits(folder / "model", line["input"]).logits[0])
        assert line["answer"]["values"]["score"] == pytest.approx(theirs, rel=1e-5)
        best = [each["dev"] for each in lines(folder / "journal.jsonl") if each.get("best")][-1]
        assert best["mse"] == pytest.approx(scores[name]["mse"], rel=1e-3), "looks of training are in scores too"
        (answer,) = Engine(max((folder / "state").iterdir()))([line["input"]])
        assert answer["values"]["score"] == pytest.approx(theirs, abs=20 * unit), "and so is what a checkpoint answers"
    assert scores["plain"]["pearson"] > 0.95
    assert scores["far"]["pearson"] == pytest.approx(scores["plain"]["pearson"], abs=1e-3)
    assert scores["far"]["mse"] == pytest.approx(1e8 * scores["plain"]["mse"], rel=1e-2)
    once, start = {"train.epochs": 0.1}, tmp_path / "plain"
    again = finetune_tiny("regress", tmp_path / "plain.csv", tmp_path / "again", once, model=start)
    assert again.results["splits"]["dev"]["numbers"]["mse"] < 2 * scores["plain"]["mse"], "it goes on from its scores"
    huge = write_csv(tmp_path / "huge.csv", [row | {"score": 1e33 * row["score"]} for row in rows])
    with pytest.raises(
        HeedfulError, match=r"^scores of train go from 3e\+34 to 8\.4e\+34: scale them down below 1e\+30$"
    ):
        finetune_tiny("regress", huge, tmp_path / "none")


def about(folder: Path, name: str) -> dict[str, float]:
    """Mean and deviation of the training scores of a run."""
    source = read(folder.parent / f"{name}.csv", ScoredExample, DataSettings())
    scores = [each.score for each in source.examples("train")]
    return {"mean": float(np.mean(scores)), "std": float(np.std(scores))}


def test_the_batch_that_is_said_is_the_one_that_is_used(tmp_path: Path) -> None:
    recorder, labelled = Messages(), write_splits("together", tmp_path / "data")
    done = finetune_tiny(
        "embed", labelled, tmp_path / "run", {"task.group_size": 12, "train.epochs": 1}, reporter=recorder
    )
    assert any("batches of 12," in sentence for sentence in recorder.messages)
    assert tomllib.loads((tmp_path / "run/settings.toml").read_text())["train"]["batch_size"] == 12
    assert done.results["seeds"][0]["steps"] == 2, "24 pairs"
    with pytest.raises(HeedfulError, match=r"^train\.batch_size is 8, but an update takes whole groups of 32 pairs"):
        finetune_tiny("embed", labelled, tmp_path / "other", {"train.batch_size": 8})
    assert not (tmp_path / "other").exists()
    finetune_tiny(
        "embed",
        write_splits("embed", tmp_path / "scored"),
        tmp_path / "scores",
        {"train.batch_size": 7, "train.epochs": 1},
    )


def test_texts_of_pairs_that_are_cut_are_said(tmp_path: Path) -> None:
    settings = {"task.group_size": 4, "max_length": 8, "train.epochs": 1, "data.dev_fraction": 0.3}
    rows = [{"a": f"the dog ran {n} " * 9, "b": f"the cat sat {n}"} for n in range(20)]
    done = finetune_tiny("embed", write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "run", settings)
    assert any("were cut: " in note for note in done.results["notes"])
    assert not any("asked" in note for note in done.results["notes"])
    for split_results in done.results["splits"].values():
        (note,) = split_results["numbers"]["notes"]
        assert note.startswith("examples longer than the model reads, which were cut: ")


@pytest.mark.parametrize(("kind", "task"), [("single", "classify"), ("tag", "tag")])
def test_what_is_cut_in_measuring_is_said(tmp_path: Path, bare: Path, kind: str, task: str) -> None:
    """Texts of train are short, two of dev are long; the run says it, its card, and whoever evaluates it."""
    labelled = write_splits(kind, tmp_path / "data")
    if kind == "single":
        with (labelled / "dev.csv").open("a") as file:
            file.writelines(f"{'the cat sat ' * 40},{label}\n" for label in ("bad", "good"))
    else:
        long = "the O\n" * 120
        with next(labelled.glob("dev.*")).open("a") as file:
            file.write(f"\n{long}\n{long}")
    run = tmp_path / "run"
    done = finetune_tiny(task, labelled, run, {"long_inputs": "truncate", "train.epochs": 1}, model=bare)
    assert not any("cut" in note for note in done.results["notes"]), "nothing of train"
    message = f"examples longer than the model reads, which were cut: 2 ({2 * (120 + 2 - 48)} tokens)"
    splits = {split: split_results["numbers"]["notes"] for split, split_results in done.results["splits"].items()}
    assert message in splits["dev"] and not any("cut" in note for note in splits["test"])
    assert f"On dev: {message}." in (run / "model" / "README.md").read_text()
    assert message in evaluate(run, labelled, split="dev").numbers["notes"]
    assert not any("cut" in note for note in evaluate(load(run), labelled, split="dev").numbers["notes"]), "in windows"
    assert {line["answer"]["truncated_tokens"] for line in lines(run / "predictions-dev.jsonl")} == {0, 74}


def test_it_learns(tmp_path: Path) -> None:
    settings = {"train.epochs": 15, "train.optimizer.lr": 3e-3, "init.tokenizer.vocab_size": 500}
    labelled = write_splits("single", tmp_path / "data", {"train": 96, "dev": 24, "test": 40})
    done = finetune_tiny("classify", labelled, tmp_path / "run", settings)
    assert done.results["splits"]["test"]["numbers"]["accuracy"] > 0.9


def test_long_first_texts_and_questions_end_a_run_too(tmp_path: Path, bare: Path) -> None:
    for kind, task, name in (("pair", "classify", "text"), ("qa", "qa", "question")):
        labelled = write_splits(kind, tmp_path / kind)
        path = next(labelled.glob("dev.*"))
        long = " ".join(["the cat sat"] * 40)
        if kind == "pair":
            with path.open("a") as file:
                file.write(f"{long},a dog,bad\n{long},{long},good\n")
        else:
            path.write_text(path.read_text().replace("who is it ?", long, 1))
        done = finetune_tiny(task, labelled, tmp_path / f"{kind}-run", model=bare)
        windows = [line["answer"]["windows"] for line in lines(tmp_path / f"{kind}-run" / "predictions-dev.jsonl")]
        assert max(windows) > 3 and done.results["splits"]["dev"]["numbers"]["count"] == len(windows), name
        cut = finetune_tiny(task, labelled, tmp_path / f"{kind}-cut", {"long_inputs": "truncate"}, model=bare)
        assert cut.results["splits"]["dev"]["numbers"]["count"] == len(windows)


def test_what_was_trained_is_there_before_it_is_measured(
    tmp_path: Path, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **more: Any) -> Any:
        raise HeedfulError("it cannot be measured")

    monkeypatch.setattr(module.FinetuneTraining, "_evaluate_split", fails)
    with pytest.raises(HeedfulError, match="it cannot be measured"):
        finetune_tiny("classify", write_splits("single", tmp_path / "data"), tmp_path / "run", model=bare)
    assert Engine(tmp_path / "run")(["the cat"])[0]["label"] in ("bad", "good")


# -- where it starts --------------------------------------------------------------------------------------------


def test_an_encoder_is_trained_on_the_spot_and_kept(tmp_path: Path) -> None:
    recorder, labelled = Messages(), write_splits("single", tmp_path / "data")
    finetune_tiny("classify", labelled, tmp_path / "run", {"init.mlm_steps": 3, "max_length": 64}, reporter=recorder)
    kept = load(tmp_path / "run" / "start")
    assert kept.config.head is not None and kept.config.head.kind == "masked_lm" and kept.max_length == 64
    assert kept.config.model.encoder is not None and kept.config.model.encoder.layers == 1
    assert any(text.startswith("no model was given: an encoder of ") and "trained on the spot" in text
               for text in recorder.messages)  # fmt: skip
    assert any(text.startswith("it was trained on ") for text in recorder.messages)
    model = load(tmp_path / "run")
    assert model.max_length == 64 == Engine(model).limit
    assert strict(tmp_path / "run" / "results.json")["base"] == "a small encoder, trained on the spot"


def test_sequences_have_the_length_that_was_asked_for(tmp_path: Path, bare: Path) -> None:
    rows = [row | {"text": row["text"] + " the cat sat on the mat" * (number < 4)} for number, row in
            enumerate(classification_rows(24))]  # fmt: skip
    labelled, recorder = write_csv(tmp_path / "a.csv", rows), Messages()
    done = finetune_tiny("classify", labelled, tmp_path / "run", {"max_length": 12}, model=bare, reporter=recorder)
    assert "4 training examples are longer than the model reads and are read in windows" in recorder.messages
    assert done.results["notes"][1].startswith("4 training examples are longer")
    assert load(tmp_path / "run").max_length == 12, "and the model is served as it was trained"
    assert {line["answer"]["windows"] for line in lines(tmp_path / "run" / "predictions-dev.jsonl")} <= {1, 2}
    recorder = Messages()
    cut = finetune_tiny(
        "classify",
        labelled,
        tmp_path / "cut",
        {"max_length": 12, "long_inputs": "truncate"},
        model=bare,
        reporter=recorder,
    )
    (note,) = (text for text in recorder.messages if "cut" in text)
    assert (
        note.startswith("4 training examples are longer than the model reads and were cut: ")
        and note in cut.results["notes"]
    )
    predictions = [line["answer"]["windows"] for line in lines(tmp_path / "cut" / "predictions-dev.jsonl")]
    assert set(predictions) == {1}, "it is measured as it was trained"
    with pytest.raises(HeedfulError, match=r"max_length is 64, but .* reads 48 tokens"):
        finetune_tiny("classify", labelled, tmp_path / "long", {"max_length": 64}, model=bare)


def test_a_name_on_the_hub_has_a_revision(tmp_path: Path) -> None:
    labelled = write_splits("single", tmp_path / "data")
    with pytest.raises(
        HeedfulError, match="'nobody/nothing' is no folder here, and revision 'v1' of it is not in the local cache"
    ):
        finetune_tiny("classify", labelled, tmp_path / "run", model="nobody/nothing@v1")
    assert not (tmp_path / "run").exists()


def test_blocks_are_drawn_anew_when_asked(tmp_path: Path, bare: Path) -> None:
    labelled = write_splits("single", tmp_path / "data")
    source = read(labelled)
    settings = FinetuneSettings(task=ClassifySettings(), init=Pretrained(reinit_layers=1))
    _, finetune_task = build_task(settings, source, compute_stats(source, ["train"]), load(bare))
    before, after = load(bare).named_tensors(), finetune_task.named_tensors()
    changed = {name for name in before if not name.startswith("head.") and not torch.equal(before[name], after[name])}
    assert {name.split(".")[2] for name in changed} == {"1"}
    with pytest.raises(HeedfulError, match="reinit_layers is 3, but this model has 2 blocks"):
        finetune_tiny("classify", labelled, tmp_path / "run", {"reinit_layers": 3}, model=bare)


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path, bare: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((bare / name).read_bytes())
    with pytest.raises(HeedfulError, match=r"has no tokenizer: put its tokenizer\.json"):
        finetune_tiny("classify", write_splits("single", tmp_path / "data"), tmp_path / "run", model=folder)


# -- seeds ------------------------------------------------------------------------------------------------------


def test_several_seeds(tmp_path: Path) -> None:
    labelled, run = write_splits("single", tmp_path / "data"), tmp_path / "run"
    done = finetune_tiny("classify", labelled, run, {"seeds": 2, "train.optimizer.lr": 5e-3})
    results, scores = done.results, []
    for each in results["seeds"]:
        alone = finetune_tiny("classify", labelled, tmp_path / str(each["seed"]),
                     {"train.seed": each["seed"], "train.optimizer.lr": 5e-3})  # fmt: skip
        if each["seed"] == 1:  # the encoder on the spot has the first seed
            assert alone.results["splits"] == strict(run / "seed-1" / "seed.json")["splits"]
        scores.append(each["splits"]["dev"])
    assert [each["seed"] for each in results["seeds"]] == [1, 2]
    deviation = abs(scores[0] - scores[1]) / math.sqrt(2)
    assert results["across_seeds"]["dev"] == {
        "mean": pytest.approx(sum(scores) / 2), "std": pytest.approx(deviation), "seeds": 2
    }  # fmt: skip
    best = run / f"seed-{results['seed']}"
    assert results["splits"]["dev"]["numbers"]["accuracy"] == max(scores)
    for name in ("journal.jsonl", "predictions-dev.jsonl", "predictions-test.jsonl", "model/model.safetensors"):
        assert (run / name).read_bytes() == (best / name).read_bytes()
    assert (run / "seed-1" / "journal.jsonl").read_bytes() != (run / "seed-2" / "journal.jsonl").read_bytes()
    assert not list(run.rglob("state"))


@pytest.mark.parametrize(("split", "chosen"), [("dev", 2), ("test", 1)])
def test_seeds_are_chosen_by_dev_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, chosen: int
) -> None:
    labelled = write_splits("single", tmp_path / "data", {"train": 24, split: 8})
    scores, measured = iter([0.2, 0.9, 0.5]), module.FinetuneTraining._evaluate_split

    def pretended(run: Any, *rest: Any) -> dict[str, Any]:
        run_results = measured(run, *rest)
        return run_results | {"numbers": run_results["numbers"] | {"accuracy": next(scores)}}

    monkeypatch.setattr(module.FinetuneTraining, "_evaluate_split", pretended)
    done = finetune_tiny("classify", labelled, tmp_path / "run", {"data.dev_fraction": 0, "seeds": 3})
    assert done.results["seed"] == chosen and set(done.results["splits"]) == {split}
    assert [each["splits"] for each in done.results["seeds"]] == [{split: 0.2}, {split: 0.9}, {split: 0.5}]
    message = "that of seed 2, the best of 3 on dev;" if split == "dev" else "that of seed 1, the first of 3;"
    assert message in (tmp_path / "run" / "model" / "README.md").read_text()


# -- data that are short of something ---------------------------------------------------------------------------


def test_without_dev(tmp_path: Path) -> None:
    data_file = write_csv(tmp_path / "a.csv", classification_rows(20))
    done = finetune_tiny("classify", data_file, tmp_path / "run", {"data.dev_fraction": 0})
    assert done.results["splits"] == {} == done.results["across_seeds"]
    assert done.results["seeds"][0]["best_step"] == done.results["seeds"][0]["steps"] == 4
    assert (
        not list((tmp_path / "run").glob("predictions-*"))
        and "metric_value" not in lines(tmp_path / "run/journal.jsonl")[-1]
    )
    assert "Nothing was measured" in (tmp_path / "run" / "model" / "README.md").read_text()
    with pytest.raises(
        HeedfulError, match=r"tuned on dev, but there is no dev split: set data\.dev_fraction.*task\.thresholds=0.5"
    ):
        finetune_tiny("classify", write_jsonl(tmp_path / "m.jsonl", generated_data.multilabel_rows(20)), tmp_path / "m",
             {"data.dev_fraction": 0, "task.thresholds": "tuned"})  # fmt: skip
    (tmp_path / "q.json").write_text(json.dumps(generated_data.squad_json(9, impossible=True)))
    with pytest.raises(HeedfulError, match=r"set data\.dev_fraction.*task\.no_answer_threshold=0"):
        finetune_tiny("qa", tmp_path / "q.json", tmp_path / "q", {"data.dev_fraction": 0})
    assert not (tmp_path / "m").exists() and not (tmp_path / "q").exists(), "refused before anything was begun"


def test_a_dev_split_that_would_be_empty_is_left_out(tmp_path: Path) -> None:
    recorder, labelled = Messages(), write_csv(tmp_path / "a.csv", classification_rows(6))
    empty = next(
        seed
        for seed in range(100)
        if not list(read(labelled, None, DataSettings(dev_fraction=0.02, seed=seed)).examples("dev"))
    )
    done = finetune_tiny(
        "classify", labelled, tmp_path / "run", {"data.dev_fraction": 0.02, "data.seed": empty}, reporter=recorder
    )
    reason = "the hash of their texts would put none of the 6 examples into it, so all are train"
    assert f"no dev split can be made: {reason}" in recorder.messages
    assert done.results["splits"] == {} and f"no dev split can be made: {reason}" in done.results["notes"]


DULL = {
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


@pytest.mark.parametrize("name", DULL)
def test_data_from_which_nothing_can_be_learned(tmp_path: Path, name: str) -> None:
    task, rows, message = DULL[name]
    with pytest.raises(HeedfulError, match=message):
        finetune_tiny(task, write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("text", ["", "text,label\n", "\n\n"])
def test_empty_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(HeedfulError, match=r"a\.csv"):
        finetune_tiny("classify", tmp_path / "a.csv", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unknown_tasks_and_wrong_columns_are_said(tmp_path: Path) -> None:
    labelled = write_csv(tmp_path / "a.csv", [{"text": "a", "stars": 3}])
    with pytest.raises(HeedfulError, match=r'"classfy" is not a task \(did you mean "classify"\?\)'):
        finetune_tiny("classfy", labelled, tmp_path / "run")
    with pytest.raises(
        HeedfulError, match=r'a\.csv: which column is the label\? .* say --data\.columns\.label=NAME, one of "text"'
    ):
        finetune_tiny("classify", labelled, tmp_path / "run")
    typo = {"data.columns": '{labels = ["toxic", "milt"]}'}
    with pytest.raises(HeedfulError, match=r'has no column "milt", but "text", "toxic", "mild" \(did you mean "mild"'):
        finetune_tiny(
            "classify", write_csv(tmp_path / "b.csv", [{"text": "a", "toxic": 1, "mild": 0}]), tmp_path / "run", typo
        )
    with pytest.raises(HeedfulError, match=r"which column is the score\?"):
        finetune_tiny("regress", labelled, tmp_path / "run")


# -- bad rows ---------------------------------------------------------------------------------------------------


def with_bad_rows(folder: Path) -> Path:
    write_splits("single", folder)
    with (folder / "test.csv").open("a") as file:
        file.write("the cat sat,ugly\n")
    with (folder / "train.csv").open("a") as file:
        file.write("the dog ran,\nthe dog sat,\n")
    return folder


def test_a_bad_row_is_named(tmp_path: Path) -> None:
    labelled = write_splits("single", tmp_path / "data")
    with (labelled / "test.csv").open("a") as file:
        file.write("the cat sat,ugly\n")
    with pytest.raises(HeedfulError, match=r'test\.csv:10: the label "ugly" is not in train, which has "bad", "good"'):
        finetune_tiny("classify", labelled, tmp_path / "run")
    (labelled / "test.csv").write_text("text\nthe cat\n")
    done = finetune_tiny("classify", labelled, tmp_path / "run", {"train.epochs": 1})
    assert set(done.results["splits"]) == {"dev"}, "a test split without labels is left out, and that is said"
    assert "test: has no label, so it is left out" in done.results["data"]["stated"]


def test_what_is_set_aside_names_settings_as_the_run_has_them(tmp_path: Path) -> None:
    labelled = write_csv(tmp_path / "a.csv", classification_rows(30))
    labelled.write_bytes(labelled.read_bytes() + "café,good\n".encode("latin-1"))
    with pytest.raises(HeedfulError, match=r"say --data\.encoding=cp1252, or iconv"):
        finetune_tiny("classify", labelled, tmp_path / "run")
    finetune_tiny("classify", labelled, tmp_path / "run", on_bad_row="skip")
    (aside,) = lines(tmp_path / "run" / "bad-rows.jsonl")
    assert "say --data.encoding=cp1252, or iconv" in aside["reason"]


def test_bad_rows_are_set_aside_and_counted(tmp_path: Path) -> None:
    labelled, run, recorder = with_bad_rows(tmp_path / "data"), tmp_path / "run", Messages()
    done = finetune_tiny("classify", labelled, run, on_bad_row="skip", reporter=recorder)
    aside = lines(run / "bad-rows.jsonl")
    assert Counter((Path(row["file"]).name, row["line"]) for row in aside) == {
        ("train.csv", 26): 1, ("train.csv", 27): 1, ("test.csv", 10): 1
    }  # fmt: skip
    assert done.results["data"]["bad_rows"] == {"train.csv": 2, "test.csv": 1}
    assert done.results["data"]["splits"]["test"] == {"examples": 8}
    for name, count in (("train", 2), ("test", 1)):
        assert f"bad rows of {name}.csv that are left out: {count}" in done.results["notes"]
    assert f"bad rows are set aside in {run / 'bad-rows.jsonl'}" in recorder.messages
    assert finetune_tiny("classify", labelled, run, on_bad_row="skip").results == done.results, "the same command again"


def test_bad_rows_of_files_that_are_called_the_same(tmp_path: Path) -> None:
    """They are counted apart, and a first row that is bad is no other than the rest."""
    files = []
    for number, name in enumerate(("a", "b"), start=1):
        (tmp_path / name).mkdir()
        files.append(tmp_path / name / "train.jsonl")
        files[-1].write_text("broken\n" * number + '{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n')
    settings = FinetuneSettings(task=ClassifySettings(), data=DataSettings(dev_fraction=0.0))
    source = dataset_for_task(LabelledExample, files, settings.data, Skip())
    assert len(list(source.examples("train"))) == 4
    (tmp_path / "run").mkdir()
    init_labelled_run(
        tmp_path / "run",
        settings,
        source,
        {"train": 4},
        partial(dataset_for_task, LabelledExample, files, settings.data),
    )
    assert read_run_json(tmp_path / "run" / DATA)["bad_rows"] == {"a/train.jsonl": 1, "b/train.jsonl": 2}
    assert len(lines(tmp_path / "run" / BAD_ROWS)) == 3


# -- labels -----------------------------------------------------------------------------------------------------

ODD = ["a, b", 'say "yes"', "=cmd()", "@x", "🦊 ü", "two\nlines", "[red]", "</script>"]


@pytest.mark.slow
@pytest.mark.usefixtures("run_plots")
def test_labels_may_be_called_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    monkeypatch.undo()
    rows = [{"text": f"the cat {number % 8} sat", "label": ODD[number % 8]} for number in range(32)]
    for split in ("train", "test"):
        write_csv(tmp_path / f"{split}.csv", rows)
    run = tmp_path / "run"
    done = finetune_tiny("classify", {"train": tmp_path / "train.csv", "test": tmp_path / "test.csv"}, run, model=bare)
    assert done.results["labels"] == sorted(ODD) == list(load(run).config.head.labels)  # type: ignore[union-attr]
    assert set(done.results["splits"]["test"]["numbers"]["classes"]) == set(ODD)
    assert {line["label"] for line in lines(run / "predictions-test.jsonl")} == set(ODD)
    assert load_reference(run / "model")[0].config.label2id == {
        label: number for number, label in enumerate(sorted(ODD))
    }
    for line in (run / "results.csv").read_text().splitlines():
        assert not [cell for cell in line.split(",") if cell.startswith(("=", "@"))]


def test_names_of_files_and_folders_may_be_anything(tmp_path: Path) -> None:
    folder = tmp_path / "a b ü🦊" / "with 'quotes'"
    folder.mkdir(parents=True)
    labelled = write_csv(folder / "mein tägliches = 🦊.csv", classification_rows(30))
    done = finetune_tiny("classify", labelled, folder / "run [1]")
    assert list(done.results["data"]["files"]) == [labelled.name]
    assert Engine(folder / "run [1]")(["the cat"])[0]["label"] in ("bad", "good")
    assert finetune_tiny("classify", labelled, folder / "run [1]").results == done.results


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    files = {}
    for split, count in (("train", 24), ("dev", 8)):
        (tmp_path / split).mkdir()
        files[split] = write_csv(tmp_path / split / "data.csv", classification_rows(count))
    done = finetune_tiny("classify", files, tmp_path / "run")
    assert set(done.results["data"]["files"]) == {"train/data.csv", "dev/data.csv"}


def test_settings_that_were_found_out_are_written_down(tmp_path: Path) -> None:
    settings = {"train.precision": "auto", "train.optimizer": "{kind = 'adamw', lr = 1e-3}"}
    finetune_tiny("classify", write_splits("single", tmp_path / "data"), tmp_path / "run", settings)
    resolved_settings = from_file(FinetuneSettings, tmp_path / "run" / "settings.toml")
    assert resolved_settings.train.precision in ("float32", "bfloat16") and resolved_settings.train.optimizer == AdamW(
        lr=1e-3
    )


def test_a_run_starts_from_another_run_of_another_task(tmp_path: Path, bare: Path) -> None:
    finetune_tiny("classify", write_splits("single", tmp_path / "data"), tmp_path / "one", model=bare)
    done = finetune_tiny("tag", write_splits("tag", tmp_path / "tags"), tmp_path / "two", model=tmp_path / "one")
    assert done.results["base"] == str(tmp_path / "one")
    assert load_reference(tmp_path / "two" / "model")[0].config.id2label[1] == "B-LOC"


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
    rows = [{"text": f"word {n}", "label": "ab"[n % 2]} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(HeedfulError, match=message):
        module.plan_finetune(
            task, tmp_path / "a.jsonl", assignments=[f"{name}={value}" for name, value in settings.items()]
        )


def test_a_dev_of_one_score_chooses_nothing(tmp_path: Path) -> None:
    rows = [{"text": f"word {n}", "score": n} for n in range(40)]
    for name, some in (("train", rows), ("dev", rows[:1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in some))
    with pytest.raises(HeedfulError, match="all scores of dev are the same"):
        module.plan_finetune("regress", tmp_path)
    last = module.plan_finetune("regress", tmp_path, assignments=["fit.load_best_at_end=false"])
    assert not last.settings.fit.load_best_at_end
    alone = module.plan_finetune(
        "regress", tmp_path / "train.jsonl", assignments=["data.dev_fraction=0.001", "data.seed=3"]
    )
    assert "dev" not in alone.stats.non_empty_splits or "dev" not in alone.stats.constant_score_splits


def test_a_signal_after_the_last_step_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other seed begins; the same command goes on with it."""
    rows = [{"text": f"word {n}", "label": "ab"[n % 2]} for n in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    class Late(Reporter):
        def step(self, step: Any, trainer: Any) -> None:
            trainer.stop_requested = trainer.progress >= 1

    settings = {"init.kind": "scratch", "seeds": 2, "train.epochs": 1}
    done = finetune_tiny("classify", tmp_path / "a.jsonl", tmp_path / "run", settings, reporter=Late())
    assert done.status == "interrupted" and not list((tmp_path / "run").glob("seed-*/seed.json"))
    assert finetune_tiny("classify", tmp_path / "a.jsonl", tmp_path / "run", settings).status == "completed"
