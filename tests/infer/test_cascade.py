"""Cascades: each text gets the answer of the first stage that is confident."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from heedful.checkpoint import load, save
from heedful.checkpoint.bundle import EarlyStage, check_stage
from heedful.checkpoint.new_head import with_head
from heedful.errors import HeedfulError, InputError, ModelError
from heedful.infer.batch.file_prediction import BatchSettings, fingerprint, predict_files
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.cascade import answer_in_stages
from heedful.infer.encoded_input import Chunk
from heedful.infer.engine import Engine
from heedful.infer.scheduling.scheduler import Scheduler
from heedful.infer.static_classifier import StaticClassifier
from heedful.infer.tuning import execution_plan
from heedful.infer.tuning.execution_plan import ExecutionPlan, apply_plan
from heedful.infer.tuning.precision_gate import open_in_precision
from heedful.model.config import Classes
from heedful.runs.evaluate import evaluate
from heedful.runs.text_selection import select_texts
from heedful.tasks.metrics.conformal import least_probability
from tests.support.cascades import TEXTS, make_cascade
from tests.support.model_folders import LIMIT, long_text, make_model_dir


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a cascade of two stages, and with each stage as a model of its own."""
    path = tmp_path_factory.mktemp("two")
    make_cascade(path)
    return path


def expected_answers(folder: Path, texts: Sequence[Any], **options: Any) -> list[dict[str, Any]]:
    """Return the answer to each text from the first stage, run by itself, that is confident."""
    thresholds = json.loads((folder / "cascade" / "heedful.json").read_text())["stage_thresholds"]
    stages = [Engine(folder / f"alone-{number}", **options)(texts) for number in range(1, len(thresholds) + 2)]
    answers = []
    for row in zip(*stages, strict=True):
        stage = next(i for i, threshold in enumerate([*thresholds, 0.0]) if row[i]["probability"] >= threshold)
        answers.append(row[stage] | {"stage": stage + 1})
    return answers


def assert_close(answers: Sequence[dict[str, Any]], expected: Sequence[dict[str, Any]]) -> None:
    for answer, expected_answer in zip(answers, expected, strict=True):
        assert answer["probabilities"] == pytest.approx(expected_answer["probabilities"], abs=1e-6)
        without_numbers = {"probability": 0, "probabilities": 0}
        assert answer | without_numbers == expected_answer | without_numbers


@pytest.mark.parametrize("stages", [2, 3])
def test_each_answer_is_that_of_the_first_confident_stage(stages: int, tmp_path: Path) -> None:
    engine = Engine(make_cascade(tmp_path, stages))
    answers = engine(TEXTS)
    assert_close(answers, expected_answers(tmp_path, TEXTS))
    assert {answer["stage"] for answer in answers} == {*range(1, stages + 1)}
    assert engine.parameters == stages * Engine(tmp_path / "alone-1").parameters
    predictions = engine.predict(TEXTS)
    assert [prediction.label for prediction in predictions] == [answer["label"] for answer in answers]  # type: ignore[attr-defined]
    assert engine([]) == []


def test_only_unconfident_texts_reach_the_last_stage_in_one_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, batches = Engine(folder / "cascade", token_budget=2048), list[tuple[BundleEngine, int]]()
    score = BundleEngine.score

    def counting(self: BundleEngine, chunks: Sequence[Chunk], *args: Any, **kwargs: Any) -> Any:
        batches.append((self, len(chunks)))
        return score(self, chunks, *args, **kwargs)

    monkeypatch.setattr(BundleEngine, "score", counting)
    answers = engine(TEXTS)
    passed_on = sum(answer["stage"] == 2 for answer in answers)
    assert 0 < passed_on < len(TEXTS)
    assert [size for scoring_engine, size in batches if scoring_engine is engine] == [passed_on]
    assert sum(size for scoring_engine, size in batches if scoring_engine is not engine) == len(TEXTS)


@pytest.mark.parametrize("limit", [None, 24])
def test_texts_are_tokenized_once_for_stages_that_split_them_alike(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    copy = shutil.copytree(folder / "cascade", tmp_path / "cascade")
    if limit is not None:  # the student splits long texts into shorter windows than the teacher
        config = copy / "stage-1" / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": limit}))
    engine, tokenizing = Engine(copy), list[BundleEngine]()
    tokenize = BundleEngine.tokenize

    def recording(self: BundleEngine, *args: Any, **kwargs: Any) -> Any:
        tokenizing.append(self)
        return tokenize(self, *args, **kwargs)

    monkeypatch.setattr(BundleEngine, "tokenize", recording)
    answers = engine(TEXTS)
    assert {answer["stage"] for answer in answers} == {1, 2}
    first, _ = engine.stages[0]
    assert tokenizing == ([first] if limit is None else [first, engine])


def test_engine_options_apply_to_every_stage(folder: Path) -> None:
    texts = [*TEXTS, long_text(200)]
    for options in ({"max_length": 16}, {"min_confidence": 0.6}):
        answers = Engine(folder / "cascade", **options)(texts)  # type: ignore[arg-type]
        assert_close(answers, expected_answers(folder, texts, **options))
    abstained = {answer["stage"] for answer in answers if answer["label"] == ""}
    assert abstained, "the probability of every text reaches min_confidence"
    windows = Engine(folder / "cascade")([long_text(200)])[0]["windows"]
    assert windows > 200 // LIMIT


def test_prediction_sets_use_the_calibration_of_the_cascade(folder: Path, tmp_path: Path) -> None:
    bundle = load(folder / "cascade")
    bundle.calibration = tuple(number / 200 for number in range(101))
    save(bundle, tmp_path / "with-sets")
    answers = Engine(tmp_path / "with-sets", prediction_set=0.9)(TEXTS)
    minimum = least_probability(bundle.calibration, 0.9)
    for answer in answers:
        probabilities = answer["probabilities"]
        expected = [name for name, p in probabilities.items() if p >= minimum or name == answer["label"]]
        assert answer["prediction_set"] == expected
    assert {answer["stage"] for answer in answers if len(answer["prediction_set"]) > 1} == {1, 2}


def test_a_saved_cascade_is_loaded_with_all_stages(folder: Path, tmp_path: Path) -> None:
    bundle = load(folder / "cascade")
    save(bundle, tmp_path / "copy")
    reloaded = load(tmp_path / "copy")
    assert [stage.threshold for stage in reloaded.early_stages] == [stage.threshold for stage in bundle.early_stages]
    assert Engine(reloaded)(TEXTS) == Engine(folder / "cascade")(TEXTS)
    assert fingerprint(Engine(reloaded)) == fingerprint(Engine(folder / "cascade"))
    reloaded.early_stages = tuple(EarlyStage(bundle=stage.bundle, threshold=0.0) for stage in reloaded.early_stages)
    assert fingerprint(Engine(reloaded)) != fingerprint(Engine(folder / "cascade"))
    assert {answer["stage"] for answer in Engine(reloaded)(TEXTS)} == {1}
    last_stage_answers = Engine(folder / "cascade").without_early_stages()(TEXTS)
    assert last_stage_answers == Engine(folder / "alone-2")(TEXTS)


def test_a_model_with_a_new_head_has_no_early_stages(folder: Path) -> None:
    bundle = load(folder / "cascade")
    assert len(bundle.early_stages) == 1
    assert with_head(bundle, "sequence_classification", labels=("bad", "fair", "good")).early_stages == ()
    assert load(folder / "cascade", head="token_classification").early_stages == ()


def test_transformers_loads_the_last_stage(folder: Path) -> None:
    cascade_tensors, last_stage_tensors = (
        transformers.BertForSequenceClassification.from_pretrained(folder / name).state_dict()
        for name in ("cascade", "alone-2")
    )
    assert all(torch.equal(tensor, last_stage_tensors[name]) for name, tensor in cascade_tensors.items())


def test_batch_prediction_uses_all_stages(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    engine = Engine(folder / "cascade")
    predict_files(engine, tmp_path / "texts.jsonl", tmp_path / "out.jsonl", BatchSettings(format="jsonl", rows=25))
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    answers = engine(TEXTS)
    assert_close([{name: row[name] for name in answers[0]} for row in rows], answers)
    assert engine.columns(pairs=False)["stage"] is int
    assert "stage" not in Engine(folder / "alone-1").columns(pairs=False)


def test_a_scheduler_uses_all_stages(folder: Path) -> None:
    engine, scheduler = Engine(folder / "cascade"), Scheduler()
    try:
        queue = scheduler.add_model(engine)

        async def ask_all() -> list[Any]:
            deadline = time.monotonic() + 30
            parts = [TEXTS[:20], TEXTS[20:], [TEXTS[0]]]
            sizes = [[len(text) for text in part] for part in parts]
            return await asyncio.gather(
                *(
                    queue.ask(part, deadline=deadline, sizes=part_sizes)
                    for part, part_sizes in zip(parts, sizes, strict=True)
                ),
                queue.ask(TEXTS[:5], deadline=deadline, in_stages=False),
            )

        *part_results, last_stage_result = asyncio.run(ask_all())
        assert_close([answer for answers, _ in part_results for answer in answers], engine([*TEXTS, TEXTS[0]]))
        assert_close(last_stage_result[0], Engine(folder / "alone-2")(TEXTS[:5]))
        answers, tokens = part_results[1]
        stage_tokens = [
            sum(encoded_input.tokens for encoded_input in stage.tokenize(TEXTS[20:])) for stage, _ in engine.stages
        ]
        assert stage_tokens[0] < tokens < sum(stage_tokens), "the last stage reads only unconfident texts"
        assert any(answer["stage"] == 2 for answer in answers)
        assert scheduler.waiting_tokens == 0 and scheduler.active_requests == 0
    finally:
        scheduler.close()


def test_a_cascade_is_loaded_from_the_links_of_the_hub_cache(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "0123456789abcdef"
    blobs.mkdir()
    for number, path in enumerate(sorted((folder / "cascade").rglob("*.*"))):
        link = snapshot / path.relative_to(folder / "cascade")
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blobs / f"blob-{number}")
        link.symlink_to(blobs / f"blob-{number}")
    assert Engine(snapshot)(TEXTS) == Engine(folder / "cascade")(TEXTS)
    shutil.move(snapshot / "stage-1", tmp_path / "elsewhere")
    (snapshot / "stage-1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="'stage-1' lies outside the folder"):
        load(snapshot)


def test_an_error_has_the_index_among_all_inputs() -> None:
    def ask(stage: str, inputs: list[int]) -> list[dict[str, Any]]:
        if stage == "last" and 5 in inputs:
            raise InputError("is damaged", inputs.index(5))
        return [{"probability": number / 10} for number in inputs]

    with pytest.raises(InputError, match="input 5: is damaged") as error:
        answer_in_stages([("first", 0.6), ("last", 0.0)], [0, 1, 2, 3, 4, 5, 6, 7], ask)
    assert error.value.index == 5
    answers = answer_in_stages([("first", 0.6), ("last", 0.0)], [9, 3, 6], ask)
    assert [answer["stage"] for answer in answers] == [1, 2, 1]


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_a_cascade_in_a_lower_precision_keeps_most_labels(folder: Path, precision: Any) -> None:
    try:
        engine = open_in_precision(folder / "cascade", precision)
    except HeedfulError as error:
        pytest.skip(str(error))
    float32_answers = Engine(folder / "cascade")(TEXTS)
    answers = engine(TEXTS)
    same = [answer["label"] == exact["label"] for answer, exact in zip(answers, float32_answers, strict=True)]
    assert sum(same) > 0.9 * len(TEXTS)
    assert {answer["stage"] for answer in answers} == {1, 2}


def test_the_fingerprint_does_not_depend_on_the_plan_of_an_early_stage(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans with C++ kernels hold norms in float32, whatever the activation dtype."""
    fingerprints = []
    for kernels in (None, "some"):
        monkeypatch.setattr(execution_plan, "usable_kernels", lambda weight, kernels=kernels: kernels)
        bundle = load(folder / "cascade", dtype=torch.bfloat16)
        early_bundle = bundle.early_stages[0].bundle
        apply_plan(early_bundle, ExecutionPlan(precision="bfloat16", linears="onednn"))
        fingerprints.append(fingerprint(BundleEngine(bundle)))
    assert any(parameter.dtype == torch.float32 for parameter in early_bundle.parameters()), "no norm in float32"
    assert fingerprints[0] == fingerprints[1] != fingerprint(Engine(folder / "cascade"))


def test_labels_are_in_the_order_of_the_last_stage(folder: Path, tmp_path: Path) -> None:
    bundle = load(folder / "cascade")
    early_bundle = bundle.early_stages[0].bundle
    head = early_bundle.config.head
    assert isinstance(head, Classes)
    early_bundle.config = replace(early_bundle.config, head=replace(head, labels=head.labels[::-1]))
    bundle.calibration = (0.1, 0.2)
    save(bundle, tmp_path / "cascade")
    engine = Engine(tmp_path / "cascade", prediction_set=0.9)
    answers = engine(TEXTS)
    assert {answer["stage"] for answer in answers} == {1, 2}
    for answer in answers:
        assert tuple(answer["probabilities"]) == head.labels
        assert answer["prediction_set"] == [label for label in head.labels if label in answer["prediction_set"]]
        assert (
            answer["probability"] == answer["probabilities"][answer["label"]] == max(answer["probabilities"].values())
        )
    labels = {text: answer["label"] for text, answer in zip(TEXTS, answers, strict=True)}
    selected = select_texts(engine, TEXTS, len(TEXTS)).texts
    assert [text.suggested_label for text in selected] == [labels[text.text] for text in selected]


def test_evaluation_reports_the_share_of_each_stage(folder: Path) -> None:
    engine = Engine(folder / "cascade")
    answers = engine(TEXTS)
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, ["bad", "fair", "good"] * 20, strict=True)]
    result = evaluate(folder / "cascade", rows)
    share = 100 * sum(answer["stage"] == 1 for answer in answers) / len(TEXTS)
    note = f"examples that the stages of the cascade answered: {share:.1f} % by stage 1, {100 - share:.1f} % by stage 2"
    assert note in result.numbers["notes"]
    right = [answer["label"] == row["label"] for answer, row in zip(answers, rows, strict=True)]
    assert result.numbers["accuracy"] == pytest.approx(sum(right) / len(rows))
    single = evaluate(folder / "alone-1", rows)
    assert not any("stage" in note for note in single.numbers["notes"])


def test_invalid_cascade_folders_are_rejected(folder: Path, tmp_path: Path) -> None:
    def copy_cascade(name: str) -> Path:
        return Path(shutil.copytree(folder / "cascade", tmp_path / name))

    shutil.rmtree(copy_cascade("missing") / "stage-1")
    with pytest.raises(ModelError, match=r"stage-1, the folder of its early stage 1, is no model folder"):
        load(tmp_path / "missing")
    config = json.loads((copy_cascade("labels") / "stage-1" / "config.json").read_text())
    config["id2label"] = {"0": "bad", "1": "fair", "2": "best"}
    config["label2id"] = {label: int(id) for id, label in config["id2label"].items()}
    (tmp_path / "labels" / "stage-1" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"has the labels bad, best, fair, and .* has bad, fair, good: all stages"):
        load(tmp_path / "labels")
    notes = json.loads((copy_cascade("thresholds") / "heedful.json").read_text())
    (tmp_path / "thresholds" / "heedful.json").write_text(json.dumps(notes | {"stage_thresholds": ["high"]}))
    with pytest.raises(ModelError, match=r"stage_thresholds is \['high'\]; expected a list of probabilities"):
        load(tmp_path / "thresholds")
    shutil.rmtree(copy_cascade("nested") / "stage-1")
    shutil.copytree(folder / "cascade", tmp_path / "nested" / "stage-1")
    with pytest.raises(ModelError, match="is a cascade itself: name its stages one by one"):
        load(tmp_path / "nested")
    multi_label = load(make_model_dir(tmp_path / "multiple", "multiple"))
    with pytest.raises(ModelError, match=r"cannot be a stage of a cascade \(multi_label_classification\)"):
        check_stage(multi_label, load(folder / "alone-1"))
    with pytest.raises(ModelError, match=r"cannot be a stage of a cascade \(token_classification\)"):
        check_stage(load(folder / "alone-1"), load(make_model_dir(tmp_path / "tag", "tag")))
    assert StaticClassifier.open(folder / "cascade") is None
