"""evaluate: the run's own numbers again, whatever the order of labels, the batches or the precision; and a suite."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
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
from heedful.runs import evaluate as evaluation
from heedful.runs import scoring
from heedful.runs.evaluate import GLUE_FOLDERS, build_eval_task, evaluate, evaluate_glue, open_for_model
from heedful.runs.scoring import PredictionFile, engine_for, measure_split
from heedful.tasks.embed import comparison
from heedful.tasks.metrics import GLUE
from heedful.tasks.task import ScoredAnswer
from heedful.train.ranks import Ranks
from tests.support import generated_data
from tests.support.classic_models import make_classic
from tests.support.generated_data import classification_rows, finetune_tiny, write_csv, write_jsonl, write_splits
from tests.support.model_folders import load_reference, make_model_dir, reference_logits

TASKS = {
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


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No timing, one thread."""
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: {})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the folders data and run."""
    folder = tmp_path_factory.mktemp("single")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heedful.runs.run.measure_latency", lambda loaded: {})
        finetune_tiny("classify", write_splits("single", folder / "data"), folder / "run", {"train.optimizer.lr": 3e-3})
    return folder


# -- the run's own numbers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TASKS)
def test_the_numbers_of_the_run_itself(kind: str, tmp_path: Path) -> None:
    labelled = write_splits(kind, tmp_path / "data")
    done = finetune_tiny(
        TASKS[kind], labelled, tmp_path / "run", {"task.thresholds": "tuned"} if kind == "multiple" else None
    )
    for split, expected in done.results["splits"].items():
        again = evaluate(tmp_path / "run", labelled, split=split, predictions=tmp_path / f"{split}.jsonl")
        assert (again.split, again.metric) == (split, done.results["metric"])
        assert json.loads(json.dumps([again.numbers, again.intervals])) == [expected["numbers"], expected["intervals"]]
        assert (tmp_path / f"{split}.jsonl").read_bytes() == (tmp_path / f"run/predictions-{split}.jsonl").read_bytes()
    assert evaluate(tmp_path / "run", labelled).split == "test", "unless another is asked for"


def test_a_dev_split_that_was_made_is_made_again(tmp_path: Path) -> None:
    labelled = write_csv(tmp_path / "a.csv", classification_rows(60))
    done = finetune_tiny("classify", labelled, tmp_path / "run")
    dev = done.results["splits"]["dev"]["numbers"]
    assert 0 < dev["count"] < 20
    assert evaluate(tmp_path / "run", labelled, split="dev", settings=DataSettings(dev_fraction=0.1)).numbers == dev
    everything = evaluate(tmp_path / "run", labelled)
    assert (everything.split, everything.numbers["count"]) == ("train", 60), "one file is measured whole"


@pytest.mark.slow
def test_a_file_that_the_run_learned_from_is_told(
    single: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever it is called now; its dev and test are no such files, nor is one that changed."""
    mine = tmp_path / "mine.csv"
    mine.write_bytes((single / "data" / "train.csv").read_bytes())
    assert evaluate(single / "run", mine).trained_on == (str(mine),)
    assert evaluate(single / "run", single / "data").trained_on == ()
    assert evaluate(single / "run", single / "data", split="train").trained_on == (str(single / "data" / "train.csv"),)
    assert evaluate(load(single / "run"), mine).trained_on == (), "a model by itself has no data"
    message = "mine.csv: this run was trained on it, so the metrics do not measure generalization"
    for more in ([], ["--json"]):
        with pytest.raises(SystemExit, match="0"):
            main(["evaluate", str(single / "run"), "--data", str(mine), *more])
        assert message in capsys.readouterr().err.splitlines()
    mine.write_text(mine.read_text().replace("good", "bad", 1))
    assert evaluate(single / "run", mine).trained_on == ()


def test_which_split(single: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("train", "dev"):
        (tmp_path / "data" / f"{name}.csv").write_bytes((single / "data" / f"{name}.csv").read_bytes())
    assert evaluate(single / "run", tmp_path / "data").split == "dev"
    assert evaluate(single / "run", tmp_path / "data", split="train").numbers["count"] == 24
    with pytest.raises(HeedfulError, match=r'there is no split "test", but train, dev'):
        evaluate(single / "run", tmp_path / "data", split="test")
    assert (
        evaluate(single / "run" / "model", tmp_path / "data").numbers
        == evaluate(heedful.load(single / "run"), tmp_path / "data").numbers
    )


# -- labels ---------------------------------------------------------------------------------------------------------


def test_the_order_of_labels_in_another_file_is_nothing(single: Path, tmp_path: Path) -> None:
    rows = classification_rows(30, 7)
    some = [row for row in rows if row["label"] == "good"]
    orders = {"a.csv": rows, "b.csv": rows[::-1], "c.csv": some}
    metrics = [evaluate(single / "run", write_csv(tmp_path / name, rows)).numbers for name, rows in orders.items()]
    assert metrics[0] == metrics[1]
    good = metrics[0]["classes"]["good"]
    assert metrics[2]["classes"]["good"]["recall"] == good["recall"] and metrics[2]["count"] == good["count"]


def test_a_folder_that_transformers_saved_has_its_own_order(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path / "model", "single")  # bad, fair, good
    rows = [row | {"label": ("good", "bad")[number % 2]} for number, row in enumerate(classification_rows(12))]
    numbers = evaluate(folder, write_csv(tmp_path / "a.csv", rows)).numbers
    assert set(numbers["classes"]) == {"bad", "fair", "good"}
    model = load_reference(folder)[0]
    with torch.no_grad():
        predicted = [model.config.id2label[int(reference_logits(folder, row["text"]).logits.argmax())] for row in rows]
    assert numbers["accuracy"] == sum(a == row["label"] for a, row in zip(predicted, rows, strict=True)) / 12


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
def test_a_head_with_other_marks_than_the_data(tmp_path: Path, marks: str) -> None:
    """It says that every word is an entity by itself; gold is IOB2."""
    labels = ("O", *(f"{mark}-PER" for mark in marks))
    loaded = with_head(load(make_model_dir(tmp_path / "bare", "bare")), "token_classification", labels=labels)
    with torch.no_grad():
        loaded.head.out.bias[4] = 1e3  # type: ignore[union-attr]
    rows = [{"words": ["Ann"], "tags": ["S-PER"]}] * 3 + [{"words": ["Ann", "Lee"], "tags": ["B-PER", "E-PER"]}]
    evaluation = evaluate(loaded, write_jsonl(tmp_path / "a.jsonl", rows), predictions=tmp_path / "said.jsonl")
    assert evaluation.metric == "f1" and evaluation.numbers["token_accuracy"] == 4 / 5
    assert (evaluation.numbers["precision"], evaluation.numbers["recall"]) == (3 / 5, 3 / 4)
    assert evaluation.numbers["strict_f1"] == evaluation.numbers["f1"] == pytest.approx(2 / 3)
    predicted = [json.loads(line)["prediction"] for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    assert predicted == [["B-PER", "B-PER"], *[["B-PER"]] * 3]
    with pytest.raises(HeedfulError, match="B-ORG, I-ORG could never be correct"):
        evaluate(loaded, write_jsonl(tmp_path / "b.jsonl", [{"words": ["Ann"], "tags": ["S-ORG"]}]))


def test_bad_rows(single: Path, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nthe cat,good\nthe dog,\n")
    with pytest.raises(HeedfulError, match=r"a\.csv:3:label: is empty, expected a label"):
        evaluate(single / "run", tmp_path / "a.csv")
    aside = Quarantine(file=tmp_path / "aside.jsonl")
    evaluation = evaluate(single / "run", tmp_path / "a.csv", on_bad_row=aside)
    assert evaluation.numbers["count"] == 1 and evaluation.bad_rows == {str(tmp_path / "a.csv"): 1}
    assert json.loads(aside.file.read_text())["line"] == 3


def test_rows_with_labels_that_a_model_does_not_know(single: Path, tmp_path: Path) -> None:
    folder, aside = tmp_path / "data", Quarantine(file=tmp_path / "aside.jsonl")
    folder.mkdir()
    (folder / "train.csv").write_text("text,label\nthe cat,good\nthe dog,ugly\n")
    (folder / "test.csv").write_text("text,label\nthe cat,bad\nthe dog,ugly\nthe cow,good\n")
    evaluation = evaluate(single / "run", folder, on_bad_row=aside)
    assert evaluation.numbers["count"] == 2 and evaluation.bad_rows == {str(folder / "test.csv"): 1}
    assert 'the label \\"ugly\\" is not one that the model knows: \\"bad\\", \\"good\\"' in aside.file.read_text()
    with pytest.raises(
        HeedfulError, match=r"could never be correct\. Rename them in the data, or skip the rows .* skip$"
    ):
        evaluate(single / "run", folder)
    (tmp_path / "none.csv").write_text("text,label\nthe cat,ugly\n")
    for bad_rows in (Skip(), Raise()):
        with pytest.raises(HeedfulError, match=r"ugly could never be correct\. Rename them in the data$"):
            evaluate(single / "run", tmp_path / "none.csv", on_bad_row=bad_rows)
    loaded = with_head(
        load(make_model_dir(tmp_path / "bare", "bare")),
        "token_classification",
        labels=("O", "B-PER", "I-PER", "E-PER", "S-PER"),
    )
    rows = [{"words": ["Ann", "Lee"], "tags": tags} for tags in (["B-PER", "I-PER"], ["B-ORG", "O"], ["O", "O"])]
    evaluation = evaluate(loaded, write_jsonl(tmp_path / "a.jsonl", rows), on_bad_row=Skip())
    assert evaluation.numbers["count"] == 2 and sum(evaluation.bad_rows.values()) == 1


# -- what does not matter -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("budget", "largest"), [(1, 1), (40, 4), (10**6, 8)])
def test_the_token_budget_does_not_matter(
    single: Path, monkeypatch: pytest.MonkeyPatch, budget: int, largest: int
) -> None:
    expected = evaluate(single / "run", single / "data")
    sizes: list[int] = []

    class Small(Engine):
        def __init__(self, loaded: Any, **more: Any) -> None:
            super().__init__(loaded, token_budget=budget, **more)

        def _score_batch(self, chunks: Any, *more: Any) -> Any:
            sizes.append(len(chunks))
            return super()._score_batch(chunks, *more)

    monkeypatch.setattr(scoring, "Engine", Small)
    evaluation = evaluate(single / "run", single / "data")
    assert max(sizes) == largest and sum(sizes) == 8
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


def test_auto_is_what_an_engine_takes(single: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heedful.runs.evaluate.measure_precisions", lambda *arguments, **more: arguments)
    for chosen in ("float32", "int8"):
        monkeypatch.setattr("heedful.runs.evaluate.fastest_accepted", lambda trials, chosen=chosen: chosen)
        assert evaluate(single / "run", single / "data", precision="auto").precision == chosen


def test_a_precision_that_there_is_not_is_refused(single: Path) -> None:
    with pytest.raises(HeedfulError, match="precision is 'fp16': give one of auto, float32, bfloat16, float16, int8"):
        evaluate(single / "run", single / "data", precision="fp16")  # type: ignore[arg-type]


def test_int8_is_for_models_with_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "words"
    save(make_classic("bag of means"), folder)
    assert [trial.precision for trial in measure_precisions(folder)] == ["float32", "bfloat16"]
    ways = (
        lambda: evaluate(folder, tmp_path, precision="int8"),
        lambda: choose_precision(folder, "int8"),
        lambda: open_in_precision(folder, "int8"),
    )
    for way in ways:
        with pytest.raises(
            HeedfulError, match="words: int8 rounds the linear layers of blocks, and this model has none"
        ):
            way()


def test_bfloat16_is_near(single: Path) -> None:
    exact, near = (
        evaluate(single / "run", single / "data", precision=precision) for precision in ("float32", "bfloat16")
    )
    assert near.numbers["loss"] == pytest.approx(exact.numbers["loss"], rel=0.02) and near.numbers != exact.numbers
    (ask, same) = (engine_for(None, load(single / "run"), dtype) for dtype in (torch.bfloat16, torch.float32))
    one, other = (each(["the cat sat"])[0]["probability"] for each in (ask, same))
    assert one == pytest.approx(other, abs=0.02) and one != other


def test_numbers_far_from_zero_are_told_apart_in_bfloat16(tmp_path: Path) -> None:
    """The last product of a regression is not rounded: bfloat16 has one number in eight millions near 1.7e9."""
    model = rescaled(load(make_model_dir(tmp_path / "model", "regression")), 3e4, 1.7e9)
    texts = ["the cat sat on the mat .", "who ran ?", "ada wrote the first program", "it is the capital of france"]
    plain, half = (
        [each["values"]["stars"] for each in engine_for(None, model, how)(texts)]
        for how in (torch.float32, torch.bfloat16)
    )
    assert len(set(half)) == 4 and half == pytest.approx(plain, abs=0.1 * 3e4) and half != plain


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """What lies in mappings and lists, by its way there; numbers are like those that are near."""
    if not isinstance(value, dict | list):
        return {name: pytest.approx(value, rel=1e-6) if isinstance(value, float) else value}
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    return {way: each for key, one in inner for way, each in flat(one, f"{name}/{key}").items()}


@pytest.mark.parametrize("kind", ["single", "together", "impossible"])
def test_shares_of_ranks_make_the_whole(kind: str, tmp_path: Path) -> None:
    labelled = write_splits(kind, tmp_path / "data")
    finetune_tiny(TASKS[kind], labelled, tmp_path / "run", {"train.epochs": 1})
    loaded = load(tmp_path / "run")
    source = open_for_model(loaded, labelled, DataSettings(dev_fraction=0.0), Raise())
    task, loaded = build_eval_task(loaded, source, "test")
    whole = measure_split(task, loaded, source.examples("test"))
    parts = [measure_split(task, loaded, source.examples("test"), ranks=Ranks(rank=rank, size=3)) for rank in range(3)]
    merged = parts[2].merge_state(parts[0]).merge_state(parts[1])
    assert flat(task.compute_metrics(merged)) == flat(task.compute_metrics(whole)), (
        "but for how products of fewer rows are rounded"
    )
    assert merged.intervals() == whole.intervals()
    with pytest.raises(AssertionError, match="each rank would write its own share"):
        measure_split(task, loaded, [], ranks=Ranks(rank=0, size=3), predictions=tmp_path / "x")


# -- what heads can do ----------------------------------------------------------------------------------------------


def test_the_model_that_was_given_stays_as_it_is(tmp_path: Path) -> None:
    finetune_tiny("qa", write_splits("qa", tmp_path / "data"), tmp_path / "run", {"train.epochs": 1})
    loaded = load(tmp_path / "run")
    (tmp_path / "new.json").write_text(json.dumps(generated_data.squad_json(9, 3, impossible=True)))
    evaluation = evaluate(loaded, tmp_path / "new.json")
    assert evaluation.numbers["version"] == "2.0" and "best_f1" in evaluation.numbers
    assert loaded.thresholds == {}
    with_dev = tmp_path / "splits"
    with_dev.mkdir()
    (with_dev / "train.json").write_text(json.dumps(generated_data.squad_json(9, 3)))
    (with_dev / "dev.json").write_text(json.dumps(generated_data.squad_json(9, 4, impossible=True)))
    assert evaluate(loaded, with_dev).numbers["version"] == "2.0", "what counts is the split that is measured"
    assert evaluate(loaded, with_dev, split="train").numbers["version"] == "1.1"


def test_a_model_that_may_find_no_answer_is_measured_as_such(tmp_path: Path) -> None:
    """Also where all questions have one, as its run measures it there."""
    labelled = write_splits("impossible", tmp_path / "data")
    (labelled / "test.json").write_text(json.dumps(generated_data.squad_json(9, 3)))
    run = finetune_tiny("qa", labelled, tmp_path / "run", {"train.epochs": 1})
    metrics = evaluate(tmp_path / "run", labelled).numbers
    assert metrics["version"] == "2.0" and metrics == run.results["splits"]["test"]["numbers"]


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


def test_several_numbers_cannot_be_scored(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path / "model", "regression")
    config = json.loads((folder / "config.json").read_text())
    loaded = load(folder)
    assert evaluate(loaded, write_jsonl(tmp_path / "a.jsonl", [{"text": "a", "score": 1}, {"text": "b", "score": 2}]))
    config["id2label"], config["label2id"] = {"0": "a", "1": "b"}, {"a": 0, "b": 1}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for key in ("classifier.weight", "classifier.bias"):
        tensors[key] = torch.cat([tensors[key]] * 2).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config["problem_type"] = "regression"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeedfulError, match="gives 2 numbers, and data has one"):
        evaluate(folder, tmp_path / "a.jsonl")


def test_pairs_are_compared_on_their_own_scale() -> None:
    def scale(low: float | None, high: float | None) -> Any:
        return comparison(DatasetStats(counts={"test": 3}, labels=Counter(), min_score=low, max_score=high))

    assert scale(None, None) == {"scored": False, "group_size": 2}
    assert scale(0.0, 5.0) == scale(1.0, 5.0) == {"scored": True, "low": 0.0, "high": 5.0}
    assert scale(-1.0, 0.0) == {"scored": True, "low": -1.0, "high": 0.0}
    assert scale(0.0, 0.0) == {"scored": True, "low": 0.0, "high": 1.0}


def test_mistakes_come_before_right_answers_that_were_unsure(tmp_path: Path, single: Path) -> None:
    answers = [(True, 0.9), (False, 0.7), (True, 0.1), (False, 0.8), (False, 0.7)]
    task, _ = build_eval_task(load(single / "run"), read(single / "data"), "test")
    with PredictionFile(tmp_path / "predictions.jsonl") as book:
        for number, (right, loss) in enumerate(answers):
            book.write(
                task, number, LabelledExample(text="x", label="good"), {}, ScoredAnswer("good", "bad", right, loss)
            )
    rows = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert [line["id"] for line in rows] == [3, 1, 4, 0, 2]


def test_pairs_that_were_not_found_come_first(tmp_path: Path) -> None:
    """A pair is right where its second text is nearest of all, however near that is."""
    loaded = with_head(load(make_model_dir(tmp_path / "bare", "bare")), "embedding")
    words = ["the cat", "a dog ran", "who ?", "love", "in paris", "first program", "she lives", "x"]
    rows = [{"a": word, "b": words[(n + 1) % 8] if n < 3 else f"{word} {word}"} for n, word in enumerate(words)]
    evaluation = evaluate(loaded, write_jsonl(tmp_path / "a.jsonl", rows), predictions=tmp_path / "said.jsonl")
    written_rows = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    right, ranks = [line["correct"] for line in written_rows], [line["rank"] for line in written_rows]
    assert right == sorted(right) and set(right) == {False, True}
    assert right == [rank == 1 for rank in ranks]
    assert (sum(right) / 8, sum(1 / rank for rank in ranks) / 8) == (
        evaluation.numbers["accuracy"],
        pytest.approx(evaluation.numbers["mrr"]),
    )
    wrong = right.count(False)
    assert ranks[:wrong] == sorted(ranks[:wrong], reverse=True) == [line["loss"] for line in written_rows[:wrong]]
    near = [line["prediction"] for line in written_rows[wrong:]]
    assert near == sorted(near), "of what was found the least near comes first"


def test_pairs_are_compared_on_the_scale_that_was_learned(tmp_path: Path) -> None:
    labelled = write_splits("embed", tmp_path / "data")
    finetune_tiny("embed", labelled, tmp_path / "run", {"train.epochs": 1})
    rows = [json.loads(line) for line in (labelled / "test.jsonl").read_text().splitlines()]
    low = write_jsonl(tmp_path / "low.jsonl", [row for row in rows if row["score"] <= 2])
    evaluation = evaluate(tmp_path / "run", low, predictions=tmp_path / "said.jsonl")
    written_rows = [json.loads(line) for line in (tmp_path / "said.jsonl").read_text().splitlines()]
    errors = [abs(line["prediction"] - line["label"] / 5) for line in written_rows]
    assert [line["loss"] for line in written_rows] == pytest.approx(errors) and errors
    assert evaluation.numbers["mse"] == pytest.approx(sum(error**2 for error in errors) / len(errors))
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"a": row["a"], "b": row["b"]} for row in rows])
    assert evaluate(tmp_path / "run", plain).metric == "accuracy", "these have no scores"


def test_predictions_that_cannot_be_written(single: Path, tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match=re.escape(f"{tmp_path / 'no' / 'x.jsonl'} cannot be written")):
        evaluate(single / "run", single / "data", predictions=tmp_path / "no" / "x.jsonl")


# -- a suite ----------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, Any] = {  # the columns of GLUE's own files
    "CoLA": (None, lambda n, d: ["gj04", str(d), "", f"the cat {n} sat"]),
    "MRPC": (
        ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
        lambda n, d: [str(d), str(n), str(n + 900), f"the cat {n}", f"the dog {n} {d}"],
    ),
    "STS-B": (
        ["index", "sentence1", "sentence2", "score"],
        lambda n, d: [str(n), f"the cat {n}", f"the dog {n}", f"{d + n % 4}.5"],
    ),
    "MNLI": (
        ["index", "sentence1", "sentence2", "gold_label"],
        lambda n, d: [str(n), f"the cat {n}", f"a dog {n}", ("contradiction", "entailment", "neutral")[n % 3]],
    ),
}


def glue(folder: Path) -> Path:
    """An invented copy of some of its folders."""
    for name, (head, row) in LAYOUTS.items():
        (folder / name).mkdir(parents=True)
        devs = ("dev_matched.tsv", "dev_mismatched.tsv") if name == "MNLI" else ("dev.tsv",)
        for file, count in (("train.tsv", 24), *((dev, 9 + place) for place, dev in enumerate(devs))):
            rows = [head] if head else []
            rows += [row(number, number % 2) for number in range(count)]
            (folder / name / file).write_text("".join("\t".join(each) + "\n" for each in rows))
    (folder / "QNLI").mkdir()  # without a run
    return folder


def test_a_suite_of_several_runs(tmp_path: Path) -> None:
    labelled = glue(tmp_path / "glue")
    for name in LAYOUTS:
        task, folder = "regress" if name == "STS-B" else "classify", "cola" if name == "CoLA" else name
        finetune_tiny(task, labelled / name, tmp_path / "runs" / folder, {"train.epochs": 1})
    evaluation = evaluate_glue(tmp_path / "runs", labelled)
    assert set(evaluation) == {"cola", "mrpc", "stsb", "mnli", "mnli-mm"}
    for name, folder in (("cola", "cola"), ("mrpc", "MRPC"), ("stsb", "STS-B"), ("mnli", "MNLI")):
        results = json.loads((tmp_path / "runs" / folder / "results.json").read_text())
        numbers = results["splits"]["dev"]["numbers"]
        assert evaluation[name]["model"] == str(tmp_path / "runs" / folder) and evaluation[name]["count"] == 9
        official = {each: numbers[each] for each in GLUE[name].official}
        assert {each: evaluation[name][each] for each in official} == official
        assert evaluation[name]["score"] == pytest.approx(sum(official.values()) / len(official))
    mismatched = json.loads((tmp_path / "runs" / "MNLI" / "results.json").read_text())["splits"]["dev-mismatched"]
    assert (
        evaluation["mnli-mm"]["accuracy"] == mismatched["numbers"]["accuracy"] and evaluation["mnli-mm"]["count"] == 10
    )
    alone = evaluate_glue(tmp_path / "runs" / "MRPC", labelled)
    assert alone.keys() == {"mrpc"}, "a run knows what it was trained on"
    assert alone["mrpc"] | {"model": ""} == evaluation["mrpc"] | {"model": ""}
    with pytest.raises(HeedfulError, match=r"nothing to evaluate: of CoLA, .* has CoLA, MRPC, STS-B, MNLI, QNLI, and"):
        evaluate_glue(tmp_path, labelled)
    assert {name for each in GLUE_FOLDERS.values() for name in each} == set(GLUE)


def test_a_suite_cuts_long_texts_where_its_run_did(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labelled = glue(tmp_path / "glue")
    make_model_dir(tmp_path / "runs" / "CoLA" / "model", "single")
    (tmp_path / "runs" / "CoLA" / "settings.toml").write_text('long_inputs = "truncate"\n')
    asked: list[Any] = []

    def evaluated(*labelled: Any, **more: Any) -> Any:
        asked.append(more["long_inputs"])
        raise HeedfulError("enough")

    monkeypatch.setattr(evaluation, "evaluate", evaluated)
    with pytest.raises(HeedfulError, match="enough"):
        evaluate_glue(tmp_path / "runs", labelled)
    assert asked == ["truncate"]


def test_f1_of_the_suite_is_that_of_its_class_whatever_the_order(tmp_path: Path) -> None:
    labelled = glue(tmp_path / "glue")
    folder = make_model_dir(tmp_path / "runs" / "MRPC", "single")
    config = json.loads((folder / "config.json").read_text())
    config |= {"id2label": {"0": "1", "1": "0", "2": "2"}, "label2id": {"1": 0, "0": 1, "2": 2}}
    (folder / "config.json").write_text(json.dumps(config))
    evaluation = evaluate_glue(tmp_path / "runs", labelled)["mrpc"]
    numbers = evaluate(folder, labelled / "MRPC", split="dev").numbers
    assert evaluation["f1"] == numbers["classes"]["1"]["f1"] != numbers["classes"]["0"]["f1"]
