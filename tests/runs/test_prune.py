"""heedful prune: the fastest pruning within the allowed loss is chosen, saved, and reported on other examples."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from heedful import atomic_io
from heedful.checkpoint import load, save
from heedful.data import read
from heedful.errors import HeedfulError, ModelError
from heedful.infer.engine import Engine
from heedful.model.token_pruning import TokenPruning
from heedful.packed import Packed
from heedful.runs.card.pruning import pruning_sentence, pruning_table
from heedful.runs.evaluate import evaluate
from heedful.runs.finetune.run import finetune
from heedful.runs.prune import prune
from tests.support.generated_data import finetune_tiny, long_rows, write_csv, write_jsonl
from tests.support.model_folders import make_model_dir

KEEP_RATES = (0.4, 0.5, 0.7, 0.9)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of data with dev and test."""
    folder = tmp_path / "data"
    folder.mkdir()
    for seed, split in enumerate(("dev", "test")):
        write_csv(folder / f"{split}.csv", long_rows(40, seed))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A classifier with random weights whose mean scores are equal for all labels, so that it predicts each label."""
    bundle = load(make_model_dir(tmp_path / "random", "single"))
    encoded_inputs = Engine(bundle).tokenize([row["text"] for row in long_rows(40)])
    with torch.no_grad():
        scores = bundle.head_outputs(Packed.of([encoded.chunks[0].encoded.ids for encoded in encoded_inputs]))
        bundle.head.out.bias -= scores.mean(0)  # type: ignore[union-attr,operator]
    save(bundle, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(autouse=True)
def speeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds that depend only on the keep rate, since those of tiny models do not depend on the number of tokens."""

    def texts_per_second(engine: Any, task: Any, examples: Any, prunings: Sequence[TokenPruning | None]) -> Any:
        return {pruning: 100.0 if pruning is None else 100.0 / pruning.keep_rate for pruning in prunings}

    monkeypatch.setattr("heedful.runs.prune._texts_per_second", texts_per_second)


def test_the_report_is_that_of_the_saved_folder(model: Path, folder: Path, tmp_path: Path) -> None:
    log: list[str] = []
    report = prune(model, folder, tmp_path / "out", max_loss=90, keep_rates=KEEP_RATES, log=log.append)
    assert report == json.loads((tmp_path / "out" / "pruning.json").read_text())
    assert (report["fitted_on"], report["reported_on"], report["reported_rows"]) == ("dev", "test", 40)
    assert load(tmp_path / "out").token_pruning == TokenPruning(layer=1, keep_rate=0.4)
    (trial,) = report["trials"]
    assert (trial["layer"], trial["keep_rate"], trial["speedup"]) == (1, 0.4, 2.5)
    for name, model_folder in (("all_tokens", model), ("pruned", tmp_path / "out")):
        evaluation = evaluate(model_folder, folder, split="test")
        assert report[name]["value"] == pytest.approx(evaluation.numbers["accuracy"])
        assert report[name]["interval"]["low"] == pytest.approx(evaluation.intervals["accuracy"]["low"])
    chosen = report["chosen"]
    assert chosen["difference"] == pytest.approx(report["pruned"]["value"] - report["all_tokens"]["value"])
    assert chosen["low"] <= chosen["difference"] <= chosen["high"]
    encoded_inputs = Engine(model).tokenize([row["text"] for row in long_rows(40, 1)])
    lengths = [len(chunk.encoded) for encoded_input in encoded_inputs for chunk in encoded_input.chunks]
    tokens_left = [max(16, math.ceil(4 * length / 10)) for length in lengths]  # at least 16 tokens of each text
    assert chosen["tokens_left"] == pytest.approx(sum(tokens_left) / sum(lengths))
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("# out\n")
    assert "## Token pruning" in card
    assert "2.50 times as many texts a second" in card
    trial_line = log[-2]
    assert trial_line.startswith("layer 1, keep rate 0.4: accuracy ")
    assert trial_line.endswith("2.50 times as fast")


def test_the_fastest_within_the_loss_is_chosen_on_dev(model: Path, folder: Path, tmp_path: Path) -> None:
    """A lower keep rate is faster, so the lowest one whose loss and expected loss are allowed is chosen."""
    texts = [row["text"] for row in long_rows(40)]
    full_accuracy = evaluate(model, folder, split="dev").numbers["accuracy"]
    full_answers = Engine(model)(texts)
    differences, expected_losses = {}, {}  # by keep rate
    for keep_rate in KEEP_RATES:
        bundle = load(model)
        bundle.prune_tokens(TokenPruning(layer=1, keep_rate=keep_rate))
        differences[keep_rate] = evaluate(bundle, folder, split="dev").numbers["accuracy"] - full_accuracy
        losses = [
            full["probability"] - full["probabilities"][pruned["label"]]
            for full, pruned in zip(full_answers, Engine(bundle)(texts), strict=True)
        ]
        expected_losses[keep_rate] = sum(losses) / len(losses)
    assert len(set(differences.values())) > 2, "prunings of this model hardly differ"
    larger_losses = {rate: max(-differences[rate], expected_losses[rate]) for rate in KEEP_RATES}
    assert any(expected_losses[rate] > -differences[rate] for rate in KEEP_RATES), "the expected loss decides nowhere"
    for max_loss in sorted(larger_losses.values()):
        expected = next(rate for rate in KEEP_RATES if larger_losses[rate] <= max_loss)
        limit = 100 * max_loss + 1e-6
        report = prune(model, folder, tmp_path / "out", max_loss=limit, keep_rates=KEEP_RATES, overwrite=True)
        assert report["chosen"]["keep_rate"] == expected
        tried = [trial["keep_rate"] for trial in report["trials"]]
        assert tried == [keep_rate for keep_rate in KEEP_RATES if keep_rate <= expected]
        for trial in report["trials"]:
            assert trial["difference"] == pytest.approx(differences[trial["keep_rate"]])
            assert trial["expected_loss"] == pytest.approx(expected_losses[trial["keep_rate"]], abs=1e-6)


def test_nothing_is_saved_where_all_lose_more(model: Path, folder: Path, tmp_path: Path) -> None:
    bundle = load(model)
    texts = [row["text"] for row in long_rows(40, 0)]
    labels = [answer["label"] for answer in Engine(bundle)(texts)]
    rows = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    write_csv(folder / "dev.csv", rows)  # on which the model with all tokens has an accuracy of 1
    bundle.prune_tokens(TokenPruning(layer=1, keep_rate=0.4))
    pruned_labels = [answer["label"] for answer in Engine(bundle)(texts)]
    assert pruned_labels != labels, "pruning changes no label of this model"
    message = r"loses more than 0 points of accuracy on dev. The least loss is that of layer 1"
    with pytest.raises(HeedfulError, match=message):
        prune(model, folder, tmp_path / "out", max_loss=0, keep_rates=(0.4,))
    assert not (tmp_path / "out").exists()


def test_no_pruning_is_faster(model: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match="no pruning is faster on these texts: keep all tokens"):
        prune(model, folder, tmp_path / "out", max_loss=90, keep_rates=(1.0,))


@pytest.mark.parametrize("kind", ["regression", "multiple"])
def test_other_heads_of_whole_texts(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for seed, split in enumerate(("dev", "test")):
        texts = [row["text"] for row in long_rows(20, seed)]
        if kind == "regression":
            write_csv(folder / f"{split}.csv", [{"text": text, "score": len(text)} for text in texts])
        else:
            labels = ("bad", "fair", "good")
            rows = [{"text": text, "labels": list(labels[index % 3 :])} for index, text in enumerate(texts)]
            write_jsonl(folder / f"{split}.jsonl", rows)
    report = prune(make_model_dir(tmp_path / kind, kind), folder, tmp_path / "out", max_loss=90, keep_rates=(0.5,))
    assert report["metric"] == {"regression": "pearson", "multiple": "micro_f1"}[kind]
    assert report["chosen"]["low"] is not None
    head, (row,) = pruning_table(report)
    assert len(row) == len(head)
    assert row[-1] == "chosen"


def test_the_calibration_is_that_of_the_pruned_model(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for seed, split in enumerate(("dev", "test")):
        write_csv(folder / f"{split}.csv", long_rows(150, seed))
    prune(model, folder, tmp_path / "out", max_loss=90, keep_rates=(0.4,))
    examples: Any = list(read(folder).examples("dev"))
    answers = Engine(tmp_path / "out")([example.text for example in examples])
    label_probabilities = [
        answer["probabilities"][example.label] for answer, example in zip(answers, examples, strict=True)
    ]
    assert list(load(tmp_path / "out").calibration) == pytest.approx(sorted(label_probabilities), abs=1e-5)


def test_rows_that_a_run_was_trained_on_are_left_out(tmp_path: Path) -> None:
    rows = write_csv(tmp_path / "rows.csv", long_rows(60, 0))
    settings = {"init.layers": 2, "data.dev_fraction": 0.4}
    finetune_tiny("classify", rows, tmp_path / "run", settings)
    report = prune(tmp_path / "run", rows, tmp_path / "out", max_loss=90, keep_rates=(0.4,))
    assert (report["fitted_on"], report["reported_on"]) == ("half of dev", "the other half of dev")
    assert report["fitted_rows"] + report["reported_rows"] < 40
    assert (tmp_path / "out" / "settings.toml").read_text() == (tmp_path / "run" / "settings.toml").read_text()
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith((tmp_path / "run" / "model" / "README.md").read_text().rstrip("\n"))
    assert card.count("## Token pruning") == 1
    pruned_again = prune(tmp_path / "out", rows, tmp_path / "again", max_loss=90, keep_rates=(0.7,))
    assert pruned_again["all_tokens"] == report["all_tokens"]
    assert (tmp_path / "again" / "README.md").read_text().count("## Token pruning") == 1
    in_place = prune(tmp_path / "out", rows, tmp_path / "out", max_loss=90, keep_rates=(0.7,), overwrite=True)
    assert in_place["all_tokens"] == report["all_tokens"]
    for name in ("settings.toml", "data.json", "README.md"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "again" / name).read_text()


def test_rows_of_a_run_that_was_trained_on_all_of_them_are_refused_and_new_ones_are_used(tmp_path: Path) -> None:
    rows = write_csv(tmp_path / "rows.csv", long_rows(60, 0))
    finetune_tiny("classify", rows, tmp_path / "run", {"init.layers": 2, "data.dev_fraction": 0.4})
    without_dev = finetune(
        "classify",
        rows,
        tmp_path / "all",
        model=str(tmp_path / "run"),
        assignments=("data.dev_fraction=0", "train.max_steps=1"),
    )
    message = r"was trained on all rows of .*rows\.csv: give rows that it was not trained on"
    with pytest.raises(HeedfulError, match=message):
        prune(without_dev.output_dir, rows, tmp_path / "none", max_loss=90)
    new_rows = write_csv(tmp_path / "new.csv", long_rows(30, 5))
    report = prune(tmp_path / "run", new_rows, tmp_path / "out", max_loss=90, keep_rates=(0.4,))
    assert report["fitted_rows"] == report["reported_rows"] == 15


def test_a_folder_that_cannot_be_written_is_refused_before_measuring(
    model: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heedful.runs.prune._measure", None)  # a call would raise a TypeError
    with pytest.raises(ModelError, match=r"data is not a model folder: .* will not be replaced"):
        prune(model, folder, folder, overwrite=True)
    with pytest.raises(ModelError, match="exists and is not empty: give another folder, or overwrite=True"):
        prune(model, folder, model)

    def refuse(path: Path, chunks: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(atomic_io, "write_synced", refuse)
    with pytest.raises(ModelError, match="out/sub cannot be written: Read-only file system"):
        prune(model, folder, tmp_path / "out" / "sub")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_pruned_is_refused_before_measuring(folder: Path, tmp_path: Path, model: Path) -> None:
    with pytest.raises(ModelError, match="tokens cannot be pruned: it has a token_classification head"):
        prune(make_model_dir(tmp_path / "tag", "tag"), folder, tmp_path / "out")
    with pytest.raises(ModelError, match="layer is 2, of 2 layers: give 1 to 1"):
        prune(model, folder, tmp_path / "out", layers=(2,))
    with pytest.raises(HeedfulError, match="max_loss is 100; expected percentage points from 0 to below 100"):
        prune(model, folder, tmp_path / "out", max_loss=100)


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.004, 0.002, ": the reported rows confirm it."),
        (-0.020, 0.002, ": too few rows are reported to confirm it."),
        (None, None, "points."),
    ],
)
def test_the_sentence_says_whether_the_loss_is_kept(low: float | None, high: float | None, verdict: str) -> None:
    chosen = {"layer": 3, "keep_rate": 0.3, "tokens_left": 0.31, "difference": -0.001, "low": low, "high": high}
    report = {
        **{"metric": "accuracy", "reported_on": "test", "fitted_on": "dev", "fitted_rows": 990, "max_loss": 0.5},
        **{"precision": "int8", "pruned": {"value": 0.894}, "all_tokens": {"value": 0.895}},
        "chosen": chosen | {"speedup": 1.5},
    }
    sentence = pruning_sentence(report)
    assert sentence.endswith(verdict)
    scores = "After layer 3, 31 % of the tokens are left: 89.4 % accuracy on test beside 89.5 % with all tokens"
    assert scores in sentence
    assert "with 1.50 times as many texts a second in int8" in sentence
