"""`heedful distil`: runs from start to verdict, resumed runs, refused settings, unlabelled texts, and verdicts."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from heedful.checkpoint import ModelBundle, load, save
from heedful.checkpoint.new_head import with_head
from heedful.data import DataSettings, LabelledExample, PairExample, TaggedExample, read
from heedful.data.inputs.inherited_settings import columns_by_name
from heedful.errors import HeedfulError, HeedfulWarning, ModelError, SettingError
from heedful.infer.engine import Engine
from heedful.infer.tuning.precision_gate import open_in_precision
from heedful.model.token_pruning import TokenPruning
from heedful.objectives.distillation.objective import state_projections
from heedful.runs.distil import augment as distil_augment
from heedful.runs.distil import mlm as distil_mlm
from heedful.runs.distil import run as distil_run
from heedful.runs.distil import verdict as distil_verdict
from heedful.runs.distil.augment import WordReplacer
from heedful.runs.distil.plan import plan_distil
from heedful.runs.distil.run import distil
from heedful.runs.distil.search import search
from heedful.runs.distil.settings import (
    AugmentSettings,
    DistilSettings,
    LayersStudent,
    VerdictSettings,
    check_overrides,
    distil_overrides,
    parse_student,
    preview_distil_settings,
)
from heedful.runs.distil.students import resolve_losses, sentence_dimension, student_from_layers
from heedful.runs.distil.unlabelled import Unlabelled, read_unlabelled, without_evaluated
from heedful.runs.distil.verdict import ServingSpeed, compare_models, compare_speeds, plot_verdict, quality_over_seeds
from heedful.runs.finetune.build import build_task
from heedful.runs.results import read_results
from heedful.runs.run_folder import sha256_of
from heedful.settings import from_file
from heedful.tasks.task import TruncationStats, evaluate_task
from heedful.tokenizer import Encoding, PreTokenized
from tests.support.distillation import NO_BASELINE, QUICK, WITHOUT_DURATION, RecordingReporter
from tests.support.generated_data import (
    DURATION,
    ENTITY_TYPES,
    WORDS,
    classification_rows,
    finetune_tiny,
    write_csv,
    write_jsonl,
    write_splits,
)
from tests.support.model_folders import SPARE, VOCABULARY, make_model_dir

pytestmark = pytest.mark.usefixtures("quick")


def last_of_each(assignments: Sequence[str]) -> list[str]:
    """Return the last assignment to each setting. Epochs, steps and time budget count as one setting, the duration."""
    last: dict[str, str] = {}
    for assignment in assignments:
        name = assignment.partition("=")[0].strip()
        last["duration" if name in DURATION else name] = assignment
    return list(last.values())


def hashes(folder: Path) -> dict[str, str]:
    """Return the hash of each file of a folder by its name."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def assert_equal_weights(folder: Path, other_folder: Path) -> None:
    tensors, other_tensors = (load_file(path / "model.safetensors") for path in (folder, other_folder))
    assert tensors.keys() == other_tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, other_tensors[name]), name


def steps_of(run: Path) -> int:
    """Return how many steps a run of a single seed was trained for."""
    steps: int = json.loads((run / "seed.json").read_text())["steps"]
    return steps


def first_record(run: Path) -> dict[str, Any]:
    """Return the first record of a run's journal."""
    record: dict[str, Any] = json.loads((run / "journal.jsonl").read_text().splitlines()[0])
    return record


def test_a_verdict_truncates_long_texts_if_the_run_does(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": "the cat sat " * 100, "label": "good"}, {"text": "the dog ran", "label": "bad"}]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = read(tmp_path / "long.jsonl", settings=DataSettings(dev_fraction=0.0))
    truncations: list[TruncationStats] = []

    def evaluate_and_record(*arguments: Any) -> Any:
        metrics = evaluate_task(*arguments)
        truncations.append(metrics.truncation)
        return metrics

    monkeypatch.setattr(distil_verdict, "evaluate_task", evaluate_and_record)
    distil_verdict._served_metrics(str(teacher), "float32", dataset, "train", "truncate")
    distil_verdict._served_metrics(str(teacher), "float32", dataset, "train", "stride")
    truncated, with_windows = truncations
    assert truncated != TruncationStats()
    assert with_windows == TruncationStats()


def test_a_run_ends_in_a_verdict(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    teacher_hashes = hashes(teacher)
    texts = [row["text"] for row in classification_rows(40, seed=9)]
    text_of_test = (labelled / "test.csv").read_text().splitlines()[1].partition(",")[0]
    (tmp_path / "texts.txt").write_text("\n".join([*texts, text_of_test.upper()]) + "\n")
    recorder, folder = RecordingReporter(), tmp_path / "run"
    arguments: dict[str, Any] = {
        "student": "layers=1",
        "loss": "distilbert",
        "unlabelled": [tmp_path / "texts.txt"],
        "assignments": ["seeds=2", *QUICK[1:]],
    }
    result = distil(teacher, labelled, folder, reporter=recorder, **arguments)
    assert hashes(teacher) == teacher_hashes
    assert "40 examples without labels are learned from" in recorder.messages
    assert "examples without labels that are left out, since dev or test has them: 1" in recorder.messages
    verdict = json.loads((folder / "verdict.json").read_text())
    assert result.results["verdict"] == verdict
    assert verdict["split"] == "test"
    quality = {role: model["quality"] for role, model in verdict["models"].items()}
    assert {role: quality[role]["seeds"] for role in quality} == {"teacher": 1, "student": 2, "baseline": 2}
    for role, run in (("student", folder), ("baseline", folder / "baseline")):
        accuracies = [seed["splits"]["test"] for seed in read_results(run)["seeds"]]
        assert quality[role]["numbers"] == pytest.approx(accuracies)
    card = (folder / "model" / "README.md").read_text()
    assert verdict["sentence"] in card
    for line in ('"temperature": 2.0,', f'"teacher": "{teacher.name}",', '"kind": "layers",', '"texts.txt"'):
        assert line in card, "the settings of the distillation"
    assert '"start": {' not in card
    assert steps_of(folder / "seed-1") == 8, "two epochs of 64 texts in batches of 16"
    assert steps_of(folder / "baseline" / "seed-1") == 8, "as many steps, on fewer texts"
    settings = from_file(DistilSettings, folder / "settings.toml")
    assert settings.task.kind == "classify"
    assert settings.loss.kd_weight == 5.0
    assert settings.loss.label_weight == 2.0
    predicted_labels = {answer["label"] for answer in Engine(folder)(texts)}
    assert predicted_labels <= {"bad", "fair", "good"}, "the teacher's labels"
    recorder = RecordingReporter()
    repeated = distil(teacher, labelled, folder, reporter=recorder, **arguments)
    assert repeated.results == result.results
    assert not any("measuring" in message for message in recorder.messages)


STOPPED = pytest.param({"stop_step": 2}, marks=pytest.mark.slow)


@pytest.mark.parametrize("interruption", [{"fail_step": 3}, STOPPED], ids=["killed", "stopped"])
def test_a_resumed_run_has_the_same_weights(
    interruption: dict[str, int], tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    arguments: dict[str, Any] = {
        "student": "tiny",
        "loss": "tinybert",
        "assignments": [
            *NO_BASELINE,
            "fit.checkpoint_every_minutes=0",
            "student.width=32",
            "student.heads=2",
            "loss.relations.heads=2",
        ],
    }
    uninterrupted, resumed = tmp_path / "uninterrupted", tmp_path / "resumed"
    distil(teacher, labelled, uninterrupted, **arguments)
    reporter = RecordingReporter(**interruption)
    if reporter.stop_step:
        assert distil(teacher, labelled, resumed, reporter=reporter, **arguments).status == "interrupted"
    else:
        with pytest.raises(KeyError):
            distil(teacher, labelled, resumed, reporter=reporter, **arguments)
        next((resumed / "outputs").glob("part-*")).unlink()  # as if it had never been written
    assert not (resumed / "results.json").exists()
    assert distil(teacher, labelled, resumed, **arguments).status == "completed"
    assert_equal_weights(resumed / "model", uninterrupted / "model")
    assert (resumed / "journal.jsonl").read_text() == (uninterrupted / "journal.jsonl").read_text()


@pytest.mark.parametrize(
    "when", [{"fail_step": 1, "after_message": "the same student"}, {"after_message": "measuring speed"}]
)
def test_a_run_goes_on_alone_and_to_its_verdict(
    when: dict[str, Any], tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    """A run that is killed while the baseline is trained, or before the verdict, is resumed there."""
    arguments: dict[str, Any] = {"student": "layers=1", "assignments": [*QUICK, "fit.checkpoint_every_minutes=0"]}
    uninterrupted = distil(teacher, labelled, tmp_path / "uninterrupted", **arguments)
    with pytest.raises(KeyError):
        distil(teacher, labelled, tmp_path / "resumed", reporter=RecordingReporter(**when), **arguments)
    recorder = RecordingReporter()
    resumed = distil(teacher, labelled, tmp_path / "resumed", reporter=recorder, **arguments)
    assert any("is finished already" in message for message in recorder.messages), "the student was trained before"
    for model in ("model", "baseline/model"):
        assert_equal_weights(tmp_path / "resumed" / model, tmp_path / "uninterrupted" / model)
    verdict, expected = resumed.results["verdict"], uninterrupted.results["verdict"]
    assert verdict["models"].keys() == expected["models"].keys()
    for role, model_entry in verdict["models"].items():
        assert model_entry["quality"] == expected["models"][role]["quality"]
    assert verdict["delta_vs_baseline"] == expected["delta_vs_baseline"]


def test_quality_is_measured_in_the_served_precision(
    tmp_path: Path, teacher: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, str]] = []  # name of the run folder, precision

    def open_and_record(model: Any, precision: Any, **options: Any) -> Engine:
        opened.append((Path(model).parent.name, precision))
        return open_in_precision(model, precision, **options)

    monkeypatch.setattr(distil_verdict, "open_in_precision", open_and_record)
    assignments = last_of_each([*QUICK, "seeds=2", "train.epochs=1", "verdict.precision=int8"])
    verdict = distil(teacher, labelled, tmp_path / "run", student="layers=1", assignments=assignments).results[
        "verdict"
    ]
    for model in verdict["models"].values():
        assert model["quality"]["precision"] == "int8"
    assert "in int8 of " in verdict["sentence"]
    assert {precision for _, precision in opened} == {"int8"}
    _teacher_speed, _student_speed, _teacher_quality, *seed_folders = (name for name, _ in opened)
    assert seed_folders == ["seed-1", "seed-2", "seed-1", "seed-2"], "the student, then the baseline"


def test_projections_of_hidden_states_depend_on_the_seed(
    tmp_path: Path, teacher: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_weights: list[list[float]] = []  # for each seed, one weight of each projection

    def project_and_record(*arguments: Any) -> Any:
        projections = state_projections(*arguments)
        first_weights.append([projection.weight[0, 0].item() for projection in projections.values()])
        return projections

    monkeypatch.setattr(distil_run, "state_projections", project_and_record)
    assignments = ["seeds=2", *NO_BASELINE[1:], "student.width=16", "student.heads=2", "loss.relations.heads=2"]
    distil(teacher, labelled, tmp_path / "run", student="tiny", loss="tinybert", assignments=assignments)
    of_first_seed, of_second_seed = first_weights
    assert len(of_first_seed) == len(of_second_seed) == 3
    assert not set(of_first_seed) & set(of_second_seed)


@pytest.mark.slow
def test_random_weights_of_a_student_depend_on_the_seed(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    assignments = ["seeds=2", *QUICK[1:], "student.words.width=8"]
    distil(teacher, labelled, tmp_path / "run", student="bilstm", assignments=assignments)
    of_first_seed, of_second_seed = (load(tmp_path / "run" / name).named_tensors() for name in ("start", "start-2"))
    assert of_first_seed.keys() == of_second_seed.keys()
    for name, tensor in of_first_seed.items():
        if "bias" not in name:
            assert not torch.equal(tensor, of_second_seed[name]), name


@pytest.mark.slow
def test_layers_copied_from_the_teacher_do_not_depend_on_the_seed(
    tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    distil(teacher, labelled, tmp_path / "run", student="layers=1", assignments=["seeds=2", *QUICK[1:]])
    assert (tmp_path / "run" / "start").exists()
    assert not (tmp_path / "run" / "start-2").exists()


@pytest.mark.slow
def test_a_student_of_a_good_teacher_is_better_than_one_trained_on_bad_labels(tmp_path: Path) -> None:
    """The baseline is trained for as many steps on random labels, the student on the teacher's predictions only."""
    many = write_splits("single", tmp_path / "many", {"train": 300, "dev": 30, "test": 30})
    teacher_settings = {"init.layers": 2, "train.epochs": 8, "train.optimizer.lr": 2e-3}
    finetune_tiny("classify", many, tmp_path / "teacher", teacher_settings)
    few, rng = write_splits("single", tmp_path / "few", {"train": 40, "dev": 10, "test": 150}), random.Random(3)
    write_csv(few / "train.csv", [{**row, "label": rng.choice(("bad", "good"))} for row in classification_rows(40)])
    write_csv(tmp_path / "texts.csv", [{"text": row["text"]} for row in classification_rows(200, seed=5)])
    assignments = [
        "train.epochs=12",
        "train.optimizer.lr=2e-3",
        "loss.label_weight=0",
        "fit.load_best_at_end=false",
        "fit.eval_every_epochs=12",
        "student.kind=size",
        "student.size=tiny",
        "student.layers=1",
        "student.width=32",
        "student.heads=2",
        "seeds=2",
        *QUICK[2:],
    ]
    texts = [tmp_path / "texts.csv"]
    result = distil(tmp_path / "teacher", few, tmp_path / "run", unlabelled=texts, assignments=assignments)
    verdict = result.results["verdict"]
    mean = {role: model["quality"]["mean"] for role, model in verdict["models"].items()}
    assert mean["teacher"] > 0.95
    assert verdict["quality_ratio"] > 0.95
    assert mean["student"] > mean["baseline"] + 0.1


RELATION_SETTINGS = ("student.width=32", "student.heads=2", "loss.relations.heads=2")


@pytest.mark.parametrize(
    ("student", "assignments", "message"),
    [
        ("bag", ["loss.states.weight=1"], "does not have a single stack of Transformer layers"),
        ("layers=9", [], "layers is 9, but .* has 2"),
        ("layers=1", ["student.teacher_layers=[7]"], r"teacher_layers names the layers \[7\], but .* has 2, from 0"),
        ("layers=1", ["student.family=electric"], '"electric" is no family'),
        ("layers=1", ["student.family=gpt2"], "computed in another way than gpt2 does"),
        ("tiny", ["student.family=heedful-classic"], '"heedful-classic" has no published sizes; use one of bert, '),
        ("tiny", ["student.family=brt"], r'"brt" is no family \(did you mean "bert"\?\); use one of bert, '),
        ("layers=1", ["loss.kd_weight=0"], "kd_weight is 0"),
        ("layers=1", ["teacher_cache.top_k=3"], "teacher_cache.top_k is for a masked"),
        ("layers=1", ["loss.relations.heads=7"], "cannot be split into 7 heads"),
        ("layers=1", ["augment.copies=1"], "replaced by a masked language model, and .* has no such head"),
        ("bag", ["data.dev_fraction=0", "student.skipgram_steps=-1"], "steps"),
        ("bag", ["verdict.texts=0"], "texts is 0; expected a whole number from 1"),
        ("bag", ["verdict.rounds=-3"], "rounds is -3; expected a whole number from 1"),
        (
            "bag",
            ["verdict.precision=int8"],
            "int8, which rounds the linear layers of blocks, and a classic student has",
        ),
        (
            "bag",
            ["train.gradient_checkpointing=true"],
            "train.gradient_checkpointing would change nothing: a classic model has no blocks",
        ),
        (
            "bag",
            ["teacher_cache.enabled=false", "teacher_cache.precision=float32"],
            "teacher_cache.precision has no effect",
        ),
        (
            "tiny",
            ["loss.kd_weight=0", "loss.label_weight=0", *RELATION_SETTINGS],
            "nothing would train the head of a fresh model of size tiny",
        ),
        ("hierarchical", [], r"no token ends a sentence: .* give their ids in student\.reader\.ends"),
        ("tyni", [], '"tyni" is not a student: use one of tiny, mini'),
    ],
)
def test_unusable_settings_are_refused(
    student: str, assignments: list[str], message: str, tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    assignments = last_of_each([*NO_BASELINE, *assignments])
    with pytest.raises(HeedfulError, match=message):
        distil(teacher, labelled, tmp_path / "run", student=student, assignments=assignments)
    assert not (tmp_path / "run").exists(), "a corrected command may use the same folder"


def test_changed_settings_of_the_verdict_do_not_repeat_the_training(
    tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    run = tmp_path / "run"
    distil(teacher, labelled, run, student="bag", assignments=NO_BASELINE)
    weights_hash = hashes(run / "model")["model.safetensors"]
    recorder = RecordingReporter()
    assignments = last_of_each([*NO_BASELINE, "verdict.precision=bfloat16", "verdict.texts=4", "verdict.rounds=1"])
    result = distil(teacher, labelled, run, student="bag", assignments=assignments, reporter=recorder)
    assert result.results["verdict"]["models"]["student"]["precision"] == "bfloat16"
    assert hashes(run / "model")["model.safetensors"] == weights_hash
    assert f"{run} is finished already" in recorder.messages
    for setting, value in (("verdict.baseline", "steps"), ("train.batch_size", "8")):
        assignments = last_of_each([*assignments, f"{setting}={value}"])
        with pytest.raises(HeedfulError, match=f"other settings: {setting} was"):
            distil(teacher, labelled, run, student="bag", assignments=assignments)


def test_the_folder_of_another_kind_of_run_is_refused(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    (tmp_path / "run").mkdir()
    for name, text in (("run.lock", ""), ("results.json", "{}"), ("settings.toml", "held_out = 0.1\n")):
        (tmp_path / "run" / name).write_text(text)
    with pytest.raises(HeedfulError, match=r"run holds a run of another kind, .*Give another folder with --output"):
        distil(teacher, labelled, tmp_path / "run", student="bag", assignments=NO_BASELINE)


def test_a_run_cannot_be_resumed_with_changed_weights_of_the_teacher(tmp_path: Path, labelled: Path) -> None:
    teacher = make_model_dir(tmp_path / "teacher", "single")
    distil(teacher, labelled, tmp_path / "run", student="bag", assignments=NO_BASELINE)
    changed = {name: tensor + 0.01 for name, tensor in load_file(teacher / "model.safetensors").items()}
    save_file(changed, teacher / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HeedfulError, match="another teacher, or other texts \\(weights changed\\)"):
        distil(teacher, labelled, tmp_path / "run", student="bag", assignments=NO_BASELINE)


def test_labels_that_the_teacher_does_not_know_are_refused(tmp_path: Path, teacher: Path) -> None:
    data = write_csv(tmp_path / "data.csv", classification_rows(20, labels=("x", "good")))
    with pytest.raises(HeedfulError, match="cannot teach x"):
        distil(teacher, data, tmp_path / "run", student="bag", assignments=NO_BASELINE)


QUICK_MASKED = (  # settings of a quick distillation of a masked language model
    "verdict.precision=float32",
    "verdict.texts=4",
    "pretrain.max_seq_length=16",
    "pretrain.pack_length=48",
    "pretrain.eval_fraction=0.1",
    "pretrain.train.max_steps=4",
    "pretrain.train.batch_size=4",
    "pretrain.corpus.sample_by=paragraph",
)


def write_masked_lm_and_text(folder: Path) -> tuple[Path, Path]:
    """Write a tiny masked language model and a file with 80 paragraphs of random words."""
    rng = random.Random(1)
    paragraphs = []
    for _ in range(80):
        sentences = [" ".join(rng.choices(WORDS, k=9)) + "." for _ in range(6)]
        paragraphs.append("\n".join(sentences))
    (folder / "text.txt").write_text("\n\n".join(paragraphs))
    return make_model_dir(folder / "teacher", "masked"), folder / "text.txt"


def test_a_masked_language_model_is_distilled_on_text(tmp_path: Path) -> None:
    teacher, text = write_masked_lm_and_text(tmp_path)
    run = tmp_path / "run"
    assignments = [*QUICK_MASKED, "student.family=distilbert", "verdict.baseline=none"]
    result = distil(teacher, text, run, student="layers=1", loss="distilbert", assignments=assignments)
    assert result.results["verdict"]["metric"] == "mlm_accuracy"
    card = (run / "model" / "README.md").read_text()
    assert "## Compared with its teacher" in card
    assert "share of the teacher's quality" in card
    assert "further training of 1 of the layers of teacher, taught by teacher:" in card
    assert "loss.kd_weight = 5.0" in card
    assert "pretrain.max_seq_length = 16" in card
    assert "model.size" not in card
    initial, trained = (load_file(run / folder / "model.safetensors") for folder in ("start", "model"))
    assert initial.keys() == trained.keys()
    assert any(name.startswith("vocab_transform") for name in initial), "the head for masked tokens"


def test_a_masked_language_model_has_no_cache_of_changing_masks_and_no_classic_student(tmp_path: Path) -> None:
    teacher, text = write_masked_lm_and_text(tmp_path)
    with pytest.raises(HeedfulError, match="masks are new in each epoch"):
        distil(teacher, text, tmp_path / "run", student="layers=1", assignments=["teacher_cache.enabled=true"])
    with pytest.raises(HeedfulError, match="a classic student has no head"):
        distil(teacher, text, tmp_path / "run", student="bag")


@pytest.mark.slow
def test_vocabularies_may_be_padded_differently(tmp_path: Path) -> None:
    """Rows of the embedding that belong to no token are not compared."""
    teacher, text = write_masked_lm_and_text(tmp_path)
    padded = write_padded(tmp_path / "padded", teacher)
    vocab_size, padded_vocab_size = (load(model).config.model.embedding.vocabulary for model in (teacher, padded))
    assert vocab_size == len(VOCABULARY) + SPARE
    assert padded_vocab_size == len(VOCABULARY) + SPARE + 5
    for name, cache_settings in (
        ("online", ["teacher_cache.enabled=false"]),
        ("cached", ["teacher_cache.enabled=true", "teacher_cache.top_k=4", "pretrain.objective.num_static_masks=1"]),
    ):
        assignments = [*QUICK_MASKED, "verdict.baseline=none", "loss.label_weight=0", *cache_settings]
        distil(teacher, text, tmp_path / name, student=str(padded), assignments=assignments)
        first_loss = first_record(tmp_path / name)["loss"]
        assert first_loss == pytest.approx(0.0, abs=2e-3), "student and teacher differ in padding only"


def write_padded(folder: Path, model: Path) -> Path:
    """Write a copy of a model whose embedding has five more rows of padding."""
    config = json.loads((model / "config.json").read_text())
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 5}))
    tensors = load_file(model / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.shape[0] == config["vocab_size"]:
            tensors[name] = torch.cat([tensor, torch.ones_like(tensor[:5])])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "value"),
    [("model.size", "tiny"), ("data", '["a.txt"]'), ("tokenizer.path", "words"), ("tokenizer.algorithm", "bpe")],
)
def test_settings_of_pretraining_without_effect_are_refused(name: str, value: str, tmp_path: Path) -> None:
    teacher, text = write_masked_lm_and_text(tmp_path)
    table = name.partition(".")[0]
    with pytest.raises(HeedfulError, match=f"pretrain.{table} would change nothing"):
        distil(teacher, text, tmp_path / "run", student="layers=1", assignments=[f"pretrain.{name}={value}"])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_folder_of_a_run_that_failed_for_too_little_text_can_be_used_again(tmp_path: Path) -> None:
    teacher, text = write_masked_lm_and_text(tmp_path)
    run, assignments = tmp_path / "run", [*QUICK_MASKED, "verdict.baseline=none"]
    short_text = tmp_path / "short.txt"
    short_text.write_text("one two three.\n")
    with pytest.raises(HeedfulError, match="document"):
        distil(teacher, short_text, run, student="layers=1", assignments=assignments)
    with pytest.warns(HeedfulWarning, match="was made with other settings of the text"):
        result = distil(teacher, text, run, student="layers=1", assignments=assignments)
    assert result.status == "completed"
    with pytest.raises(HeedfulError, match="a run with other settings"):
        distil(teacher, short_text, run, student="layers=1", assignments=assignments)


@pytest.mark.slow
def test_cached_outputs_of_a_masked_language_model_give_the_same_loss(tmp_path: Path) -> None:
    teacher, text = write_masked_lm_and_text(tmp_path)

    def first_loss(name: str, *cache_settings: str) -> float:
        static_masks = "pretrain.objective.num_static_masks=2"
        assignments = [*QUICK_MASKED, static_masks, "loss.label_weight=0", *cache_settings]
        distil(teacher, text, tmp_path / name, student="layers=1", assignments=assignments)
        return float(first_record(tmp_path / name)["loss"])

    online = first_loss("online", "teacher_cache.enabled=false")
    cached = first_loss("cached", "teacher_cache.enabled=true")
    top_4 = first_loss("top-4", "teacher_cache.enabled=true", "teacher_cache.top_k=4", "verdict.baseline=none")
    assert cached == pytest.approx(online, rel=2e-3), "equal but for rounding to float16"
    assert 0 < top_4 <= online * 1.002, "a KL divergence is not larger with the other tokens as one sum"


def test_words_are_replaced_by_words_of_the_model(tmp_path: Path) -> None:
    masked_lm = load(make_model_dir(tmp_path / "lm", "masked"))
    replacer = WordReplacer(masked_lm, AugmentSettings(replace_prob=0.5, top_k=5))
    texts = ["The cat, sat on  the mat", "zzzz", ""]
    variants = replacer(texts, [1, 2, 3])
    variant, *unchanged = variants
    assert variant != texts[0]
    assert unchanged == ["zzzz", ""], "texts without a word of a single token"
    assert "  " in variant, "spaces between words are not changed"
    assert len(variant.split()) == len(texts[0].split())
    assert replacer(texts, [1, 2, 3]) == variants, "variants depend on keys only"
    assert replacer(texts, [4, 5, 6]) != variants
    (words,) = replacer([PreTokenized(["ada", "lives", "here", "qqq"])], [1])
    assert len(words) == 4
    assert words[:3] != ["ada", "lives", "here"]
    assert words[3] == "qqq"


def test_punctuation_is_neither_replaced_nor_a_replacement(tmp_path: Path) -> None:
    replacer = WordReplacer(load(make_model_dir(tmp_path / "lm", "masked")), AugmentSettings())
    words = [replacer.tokenizer.name(id) for id, is_word in enumerate(replacer._is_word.tolist()) if is_word]
    assert words
    assert not set(words) & set(".,;:!?")


def serving_speed(p50: float, texts_per_second: float) -> ServingSpeed:
    return ServingSpeed(
        precision="int8",
        p50=p50,
        p99=5.0,
        texts_per_second=texts_per_second,
        tokens_per_second=10 * texts_per_second,
    )


def verdict_of(
    numbers: dict[str, list[float]], student_speed: ServingSpeed, resolution: float = 0.01
) -> dict[str, Any]:
    """Return a verdict on f1 of dev.

    Args:
        numbers: The metric of each seed, by role.
        student_speed: The speed of the student. The teacher needs 4 ms for a text, and answers 10 texts a second.
        resolution: The smallest difference that the metric can show.
    """
    quality = {role: quality_over_seeds(numbers_of_role, "float32") for role, numbers_of_role in numbers.items()}
    speeds = {"teacher": serving_speed(4.0, 10.0), "student": student_speed}
    return compare_models("f1", "dev", quality, speeds, {"teacher": 100, "student": 25}, resolution)


def test_the_verdict_compares_quality_speed_and_size() -> None:
    numbers = {"teacher": [0.9], "student": [0.84, 0.85, 0.86], "baseline": [0.79, 0.8, 0.81]}
    verdict = verdict_of(numbers, serving_speed(1.0, 30.0))
    sentence, delta = verdict["sentence"], verdict["delta_vs_baseline"]
    assert "keeps 94.4 % of the teacher's f1 on dev (85.0 % in float32 of 90.0 % in float32)" in sentence
    assert "3.0 times as many texts a second and one text 4.0 times as fast, and has 25 % of the parameters" in sentence
    assert sentence.endswith("(95 % interval +2.5 to +7.5 points): the teacher was worth it.")
    assert delta["seeds"] == 3
    assert delta["difference"] == pytest.approx(0.05)
    # all differences are equal: their standard deviation is taken as the resolution of the metric, 0.01
    assert delta["low"] == pytest.approx(0.05 - 4.3027 * 0.01 / 3**0.5, abs=1e-6)
    student_interval = verdict["models"]["student"]["quality"]["interval"]
    assert student_interval["low"] < 0.84
    assert 0.86 < student_interval["high"] < 1
    teacher_interval = verdict["models"]["teacher"]["quality"]["interval"]
    assert 0 < teacher_interval["low"] < 0.9, "of one seed, the interval of a share of the examples"


def test_the_plot_of_a_verdict_names_all_models() -> None:
    numbers = {"teacher": [0.9], "student": [0.84, 0.85, 0.86], "baseline": [0.79, 0.8, 0.81]}
    verdict = verdict_of(numbers, serving_speed(1.0, 30.0))
    figure = plot_verdict(verdict, [{"name": "bag", "p50": 0.3, "quality": 0.7}])
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    names = {text.get_text() for text in axes.texts if text.get_text()}
    assert names == {"teacher", "student", "student without teacher", "bag"}
    assert figure.get_suptitle() == "The student is 4.0x faster, 94 % of the quality kept\nbars: 95 % intervals"


def test_names_of_points_do_not_overlap() -> None:
    numbers = {"teacher": [0.9], "student": [0.9], "baseline": [0.9]}
    (axes,) = plot_verdict(verdict_of(numbers, serving_speed(4.0, 10.0), resolution=0.0)).axes
    heights = sorted(text.xyann[1] for text in axes.texts if text.get_text())
    assert all(second - first >= 11.9 for first, second in pairwise(heights))
    assert axes.get_ylim()[1] <= 1.0


@pytest.mark.parametrize(
    ("student", "baseline", "ending"),
    [
        # a mean difference of 0.02, whose 95 % interval has a half-width of 0.066
        ([0.80, 0.85, 0.81], [0.79, 0.80, 0.81], ": no difference seen."),
        ([0.80, 0.80, 0.80], [0.81, 0.81, 0.81], ": no difference seen."),  # as large as the resolution of the metric
        ([0.70, 0.71, 0.72], [0.79, 0.80, 0.81], ": the teacher made it worse."),
        ([0.90, 0.90], [0.70, 0.70], "from 2 seeds each, too few for a verdict: 3 or more are needed."),
        ([0.90], [0.70], "from 1 seed each, too few for a verdict: 3 or more are needed."),
    ],
)
def test_student_and_baseline_are_compared_seed_by_seed(
    student: list[float], baseline: list[float], ending: str
) -> None:
    numbers = {"teacher": [0.9], "student": student, "baseline": baseline}
    verdict = verdict_of(numbers, serving_speed(4.0, 10.0))
    assert verdict["sentence"].endswith(ending)
    json.dumps(verdict, allow_nan=False)  # raises a ValueError for NaN


@pytest.mark.parametrize(
    "options", [{"student": "static"}, {"loss": "minilmv2"}, {"loss": "distilbert"}], ids=lambda options: str(options)
)
def test_hidden_states_of_a_pruned_teacher_are_refused_before_anything_is_written(
    tmp_path: Path, teacher: Path, labelled: Path, options: dict[str, str]
) -> None:
    bundle = load(teacher)
    bundle.prune_tokens(TokenPruning(layer=1, keep_rate=0.5))
    save(bundle, tmp_path / "pruned")
    with pytest.raises(ModelError, match="prunes tokens, and cannot be a teacher whose hidden states are learned"):
        distil(tmp_path / "pruned", labelled, tmp_path / "run", **{"student": "layers=1"} | options)
    assert not (tmp_path / "run").exists()


def test_a_pruned_student_learns_labels_and_no_hidden_states(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    bundle = load(teacher)
    bundle.prune_tokens(TokenPruning(layer=1, keep_rate=0.5))
    save(bundle, tmp_path / "pruned")
    options = {"student": str(tmp_path / "pruned"), "assignments": QUICK}
    with pytest.raises(ModelError, match="prunes tokens, and cannot be a student that learns hidden states"):
        distil(teacher, labelled, tmp_path / "run", loss="minilmv2", **options)
    assert not (tmp_path / "run").exists()
    with pytest.raises(SettingError, match="after layer 1, the model computes a part of the tokens: give 1 or fewer"):
        distil(teacher, labelled, tmp_path / "run", **options | {"assignments": [*QUICK, "train.freeze_layers=2"]})
    distil(teacher, labelled, tmp_path / "run", **options)
    assert load(tmp_path / "run").token_pruning == bundle.token_pruning


def test_misspelt_settings_are_refused_before_the_teacher_is_loaded() -> None:
    check_overrides(distil_overrides("x", assignments=["task.group_size=4"]))
    check_overrides(distil_overrides("x", assignments=["pretrain.max_seq_length=64"]))
    with pytest.raises(HeedfulError, match="temprature"):
        check_overrides(distil_overrides("x", assignments=["loss.temprature=4"]))
    with pytest.raises(HeedfulError, match="distilbrt"):
        distil_overrides("x", loss="distilbrt")


@pytest.mark.parametrize("marks", ["BIES", "BILU", "I"])
def test_a_tagging_teacher_may_have_another_tag_scheme_than_the_data(tmp_path: Path, marks: str) -> None:
    data, teacher = write_splits("tag", tmp_path / "data"), tmp_path / "teacher"
    entity_types = sorted({label[2:] for label in read(data).labels} - {""})
    labels = ("O", *(f"{mark}-{entity_type}" for mark in marks for entity_type in entity_types))
    tagger = load(make_model_dir(tmp_path / "tag", "tag"))
    save(with_head(tagger, "token_classification", labels=labels), teacher)
    result = distil(teacher, data, tmp_path / "run", student="layers=1", assignments=NO_BASELINE)
    assert result.status == "completed"
    assert load(result.output_dir / "model").config.head == load(teacher).config.head


def test_named_student_and_losses_replace_those_of_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('teacher = "other"\n[student]\nkind = "layers"\nlayers = 2\n[loss]\nkd_weight = 3.0\n')
    settings = preview_distil_settings(distil_overrides("mine", student="bag", loss="distilbert", recipe=recipe))
    assert settings.teacher == "mine"
    assert settings.student == parse_student("bag")
    assert settings.loss.kd_weight == 5.0
    assert preview_distil_settings(distil_overrides("mine", recipe=recipe)).loss.kd_weight == 3.0
    with pytest.raises(SettingError, match="TEACHER mine and teacher=other both set teacher"):
        preview_distil_settings(distil_overrides("mine", assignments=["teacher=other"]))


def test_a_search_refuses_settings_of_the_student(tmp_path: Path) -> None:
    recipe = {"student": {"kind": "layers", "layers": 2}}
    with pytest.raises(HeedfulError, match="a search makes its own students"):
        search("mine", tmp_path, tmp_path / "run", min_quality=0.9, assignments=["student.layers=2"])
    with pytest.raises(HeedfulError, match="a search makes its own students"):
        search("mine", tmp_path, tmp_path / "run", min_quality=0.9, recipe=recipe)


def test_the_losses_of_tinybert_compare_every_layer(tmp_path: Path) -> None:
    teacher = load(make_model_dir(tmp_path / "teacher", "single"))
    losses = resolve_losses(preview_distil_settings(distil_overrides("x", loss="tinybert")).loss, teacher, teacher)
    assert [(relation.pair, relation.weight) for relation in losses.relations] == [((0, 0), 0.5), ((1, 1), 0.5)]
    assert losses.states[0].pairs == ((0, 0), (1, 1), (2, 2))
    assert losses.label == 0


def test_thresholds_without_dev_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    teacher = make_model_dir(tmp_path / "teacher", "span")
    unanswerable = {"question": "who ?", "context": "ada ran", "answers": []}
    answerable = unanswerable | {"answers": [{"text": "ada", "answer_start": 0}]}
    rows = [{"id": str(number)} | unanswerable for number in range(6)] + [{"id": "x"} | answerable]
    files = [write_jsonl(tmp_path / f"{split}.jsonl", rows) for split in ("train", "test")]
    with pytest.raises(
        HeedfulError, match=r"thresholds are tuned on dev, but there is no dev split.*task.no_answer_threshold=0"
    ):
        distil(
            teacher,
            files,
            tmp_path / "run",
            student="layers=1",
            assignments=[*NO_BASELINE, "data.dev_fraction=0"],
        )
    assert not (tmp_path / "run").exists()


def test_a_loss_on_hidden_states_of_other_tokens_is_refused_before_anything_is_written(
    tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    student = make_model_dir(tmp_path / "student", "bare")
    vocabulary = (student / "vocab.txt").read_text().splitlines()
    vocabulary[vocabulary.index("the")] = "xyz"
    (student / "vocab.txt").write_text("".join(f"{token}\n" for token in vocabulary))
    assignments = [*NO_BASELINE, "loss.states.weight=1"]
    with pytest.raises(HeedfulError, match="different tokens or windows, but states compare"):
        distil(teacher, labelled, tmp_path / "run", student=str(student), assignments=assignments)
    assert not (tmp_path / "run").exists()


def test_the_maximum_length_of_a_masked_teacher_is_the_default_and_the_limit(tmp_path: Path) -> None:
    teacher, text = write_masked_lm_and_text(tmp_path)
    assignments = ["pretrain.max_seq_length=64", "verdict.precision=float32"]
    with pytest.raises(HeedfulError, match=r"pretrain.max_seq_length is 64, but .* reads 48 tokens"):
        distil(teacher, text, tmp_path / "run", student="tiny", assignments=assignments)
    overrides = distil_overrides(str(teacher), student="layers=1")
    assert distil_mlm._resolve_settings(load(teacher), overrides, text).pretrain.max_seq_length == 48
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_bad_rows_of_text_can_be_skipped(tmp_path: Path) -> None:
    teacher, text = write_masked_lm_and_text(tmp_path)
    rows = [json.dumps({"text": paragraph}) for paragraph in text.read_text().split("\n\n")]
    folder = tmp_path / "files"
    run = folder / "run"  # its files are not read
    folder.mkdir()
    (folder / "text.jsonl").write_text("\n".join([*rows[:9], "{broken", *rows[9:]]) + "\n")
    assignments = [setting for setting in QUICK_MASKED if not setting.startswith("pretrain.corpus.")]
    with pytest.raises(HeedfulError, match="--on-bad-row skip"):
        distil(teacher, folder, run, student="layers=1", assignments=assignments)
    result = distil(teacher, folder, run, student="layers=1", assignments=assignments, on_bad_row="skip")
    assert read_results(run)["corpus"] == read_results(run / "baseline")["corpus"]
    models = result.results["verdict"]["models"]
    validation_accuracy = result.results["splits"]["validation"]["numbers"]["mlm_accuracy"]
    assert models["student"]["quality"]["mean"] == pytest.approx(validation_accuracy, abs=0.02)
    assert {model["quality"]["precision"] for model in models.values()} == {"float32"}


# -- unlabelled texts ---------------------------------------------------------------------------------------------


def texts_of(unlabelled: Unlabelled) -> list[tuple[str, ...]]:
    return [example.texts for example in unlabelled.examples]


def test_columns_of_the_labelled_data_are_used_only_for_files_that_have_them(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("one two\nthree\n")
    (tmp_path / "more.csv").write_text("text\nfour\n")
    (tmp_path / "same.csv").write_text("review,text\nfive,six\n")
    files = [str(tmp_path / name) for name in ("more.txt", "more.csv", "same.csv")]
    settings = DataSettings(columns={"text": "review", "label": "stars"}, format="csv")
    unlabelled = read_unlabelled(
        files, LabelledExample, "sequence_classification", ("a",), settings, exclude=tmp_path / "run"
    )
    assert texts_of(unlabelled) == [("one two",), ("three",), ("four",), ("five",)]


def read_two_columns(folder: Path, header: str, settings: DataSettings) -> Unlabelled:
    """Read a CSV file with this header and two rows."""
    (folder / "more.csv").write_text(f"{header}\none two,x\nthree,y\n")
    files = [str(folder / "more.csv")]
    return read_unlabelled(files, LabelledExample, "sequence_classification", ("a",), settings, exclude=folder / "run")


UNKNOWN_COLUMN = r'more\.csv: which column is the text\? Call it "text" in its first row'


@pytest.mark.parametrize("header", ["message,kind", "message,label"])
def test_a_file_without_a_known_text_column_is_refused(header: str, tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match=UNKNOWN_COLUMN):
        read_two_columns(tmp_path, header, DataSettings())


def test_a_column_number_of_the_labelled_data_applies_to_files_without_a_recognised_header(tmp_path: Path) -> None:
    by_number = DataSettings(columns={"text": "1"})
    assert len(read_two_columns(tmp_path, "message,kind", by_number).examples) >= 2
    # "label" is a usual name of a column, so the first row is a header, which may be that of other columns
    with pytest.raises(HeedfulError, match=UNKNOWN_COLUMN):
        read_two_columns(tmp_path, "message,label", by_number)
    by_name = columns_by_name(by_number, {"text": ["message"]})
    assert len(read_two_columns(tmp_path, "message,label", by_name).examples) >= 2


@pytest.mark.parametrize("name", ["more.txt", "more.conll", "eng.train"])
def test_files_of_tagged_words_are_recognised_under_any_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    # without a suffix or a setting the format is recognised by the lines, so that none may be bad
    bad_row = "" if name == "more.txt" else "x\n\n"
    path.write_text(f"1 Ada B-X\n2 wrote O\n\n{bad_row}3 it O\n")
    settings = DataSettings(columns={"words": 2, "tags": 3}, format="conll" if name == "eng.train" else None)
    unlabelled = read_unlabelled(
        [str(path)], TaggedExample, "token_classification", ("O",), settings, exclude=tmp_path / "run"
    )
    examples = [example for example in unlabelled.examples if isinstance(example, TaggedExample)]
    assert [example.words for example in examples] == [("Ada", "wrote"), ("it",)]
    assert unlabelled.bad_rows == (1 if bad_row else 0)


def test_a_file_without_texts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("\n")
    files, settings = [str(tmp_path / "more.txt")], DataSettings()
    with pytest.raises(HeedfulError, match=r"more\.txt: no text to learn from"):
        read_unlabelled(files, LabelledExample, "sequence_classification", ("a",), settings, exclude=tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "content", "remaining"),
    [
        ("more.txt", "one two\nnew\nThree four\nfresh\n", ("new", "fresh")),  # single texts, which become pairs
        ("more.csv", "a,b\nX,one two\nnew,Three four\nnew,old\n", ("new", "old")),
    ],
)
def test_texts_of_evaluated_pairs_are_left_out(
    tmp_path: Path, name: str, content: str, remaining: tuple[str, str]
) -> None:
    (tmp_path / name).write_text(content)
    evaluated = [PairExample(anchor="one two", positive="x"), PairExample(anchor="y", positive="three four")]
    unlabelled = read_unlabelled(
        [str(tmp_path / name)], PairExample, "embedding", (), DataSettings(), evaluated, exclude=tmp_path / "run"
    )
    assert texts_of(unlabelled) == [remaining]
    assert unlabelled.in_evaluation == 2
    assert without_evaluated(unlabelled, evaluated).in_evaluation == 2


def test_evaluated_words_are_left_out_however_they_are_split(tmp_path: Path) -> None:
    (tmp_path / "more.csv").write_text("id,text\n1,I don't know.\n2,I do not know.\n")
    evaluated = [TaggedExample(words=("I", "do", "n't", "know", "."), tags=("O",) * 5)]
    files, settings = [str(tmp_path / "more.csv")], DataSettings()
    unlabelled = read_unlabelled(
        files, TaggedExample, "token_classification", ("O",), settings, exclude=tmp_path / "run"
    )
    unlabelled = without_evaluated(unlabelled, evaluated)
    assert texts_of(unlabelled) == [("I do not know .",)]
    assert unlabelled.in_evaluation == 1
    assert unlabelled.notes == ('more.csv: columns: text="text"; not used: "id"',)


def test_unlabelled_files_of_another_format_do_not_have_the_encoding_of_the_data(tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"text": "café"}\n', encoding="utf-8")
    (tmp_path / "more.tsv").write_bytes(b"text\ncaf\xe9\n")
    files, settings = [str(tmp_path / name) for name in ("more.jsonl", "more.tsv")], DataSettings(encoding="latin-1")
    unlabelled = read_unlabelled(
        files,
        LabelledExample,
        "sequence_classification",
        ("a",),
        settings,
        names=["train.tsv"],
        exclude=tmp_path / "run",
    )
    assert texts_of(unlabelled) == [("café",), ("café",)]


def test_a_word_is_replaced_without_the_space_before_it() -> None:
    encoding = Encoding(ids=(1, 2), types=(0, 0), segments=(0, 0), offsets=((0, 3), (3, 7)), words=(0, 1))
    assert distil_augment._with_replaced_words("the cat sat", encoding, {1: "dog"}) == "the dog sat"


# -- the plan -----------------------------------------------------------------------------------------------------


def plan_of(teacher: Path, data: Any, *assignments: str, student: str = "layers=1") -> Any:
    overrides = distil_overrides(str(teacher), student=student, assignments=assignments)
    return plan_distil(load(teacher), overrides, data, exclude=teacher / "run")


@pytest.mark.slow
def test_dev_is_split_off_as_by_the_run_of_the_teacher(tmp_path: Path) -> None:
    """If the teacher was trained on texts of dev or test nevertheless, a note says so."""
    teacher = make_model_dir(tmp_path / "teacher", "single")
    data = write_csv(tmp_path / "rows.csv", classification_rows(60))
    other_data = write_csv(tmp_path / "other.csv", classification_rows(60, seed=3))
    assert plan_of(teacher, data).settings.data == DataSettings(), "the teacher is not a run"
    data_facts = {"files": {"rows.csv": sha256_of(data)}, "trained_on": ["rows.csv"], "made_dev": True}
    (teacher / "settings.toml").write_text("[data]\ndev_fraction = 0.3\nseed = 5\n")
    (teacher / "data.json").write_text(json.dumps(data_facts))
    plan = plan_of(teacher, data)
    assert plan.settings.data == DataSettings(dev_fraction=0.3, seed=5)
    assert plan.notes == ()
    assert plan_of(teacher, data, "data.dev_fraction=0.2").notes == (), "a part of the teacher's dev"
    for assignment in ("data.dev_fraction=0.4", "data.seed=1"):
        (note,) = plan_of(teacher, data, assignment).notes
        assert note.startswith("the teacher was trained on texts of dev: its quality there is optimistic")
    assert plan_of(teacher, other_data).settings.data == DataSettings(), "the teacher was not trained on these texts"
    (note,) = plan_of(teacher, {"train": other_data, "test": data}).notes
    assert note.startswith("the teacher was trained on texts of test")
    (teacher / "data.json").write_text(json.dumps(data_facts | {"made_dev": False}))
    assert len(plan_of(teacher, data).notes) == 1, "the teacher had another dev, and was trained on the whole file"
    (teacher / "settings.toml").write_text("[data]\ndev_fraction = 0.0\n")
    with pytest.raises(HeedfulError, match=r"neither dev nor test .* that the teacher was not trained on"):
        plan_of(teacher, data)


def test_data_are_read_as_by_the_run_of_the_teacher(tmp_path: Path) -> None:
    teacher = make_model_dir(tmp_path / "teacher", "single")
    (teacher / "settings.toml").write_text(
        '[data]\nencoding = "latin-1"\nlabel_until = ":"\ncolumns = {text = "review", label = "stars"}\n'
    )
    (teacher / "data.json").write_text('{"files": {"reviews.csv": ""}}')
    rows = classification_rows(60)
    csv_rows = "".join(f"{row['label']}:x,caf\xe9 {row['text']}\n" for row in rows)
    csv_file = tmp_path / "data.csv"
    csv_file.write_bytes(b"stars,review\n" + csv_rows.encode("latin-1"))
    plan = plan_of(teacher, csv_file)
    assert plan.settings.data.columns == {"text": "review", "label": "stars"}
    assert plan.settings.data.dev_fraction == 0.1
    assert next(plan.source.examples("train")).text.startswith("café ")
    assert not any(":" in label for label in plan.source.labels)
    assert plan.notes[0].startswith("data are read as the teacher's run read its own: data.columns.text=review")
    assert plan_of(teacher, csv_file, "data.encoding=cp1252").settings.data.encoding == "cp1252"
    json_file = tmp_path / "data.jsonl"
    json_rows = [{"review": f"café {row['text']}", "stars": row["label"]} for row in rows]
    json_file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in json_rows), encoding="utf-8")
    assert next(plan_of(teacher, json_file).source.examples("train")).text.startswith("café "), "not read as latin-1"


def test_poolings_that_a_task_cannot_use_are_refused_before_the_data_are_read(tmp_path: Path) -> None:
    teacher = make_model_dir(tmp_path / "tag", "tag")
    for student in ("attention", "structured"):
        with pytest.raises(HeedfulError, match=f'student.reader.kind is "{student}": tag needs the hidden state'):
            plan_of(teacher, tmp_path / "missing", student=student)


def test_default_epochs_depend_on_all_texts(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    masked_lm = make_model_dir(tmp_path / "masked", "masked")
    with_24_texts = plan_of(teacher, labelled)
    with_504_texts = plan_of(teacher, labelled, "augment.copies=20", f"augment.model={masked_lm}")
    assert with_24_texts.settings.train.epochs == 30
    assert with_504_texts.settings.train.epochs == 16


def test_the_default_learning_rate_depends_on_the_hidden_size_of_the_student(
    tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    config = json.loads((teacher / "config.json").read_text()) | {"hidden_size": 64}
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
    wide = plan_of(teacher, labelled, student=str(tmp_path / "wide"))
    assert plan_of(teacher, labelled).settings.train.optimizer.lr == 1e-3, "0.04 / 32"
    assert wide.settings.train.optimizer.lr == 6e-4, "0.04 / 64"


def test_a_student_has_the_regression_head_of_its_teacher(tmp_path: Path) -> None:
    """The head has another label name than the data."""
    teacher = load(make_model_dir(tmp_path / "teacher", "regression"))
    plan = plan_of(tmp_path / "teacher", write_splits("regress", tmp_path / "data")).finetune_plan()
    base = student_from_layers(teacher, LayersStudent(layers=1))
    task, student = build_task(plan.settings, plan.source, plan.stats, base, plan.labels)
    assert student.config.head == teacher.config.head
    weight = task.for_inference(student).named_tensors()["head.out.weight"]
    assert torch.allclose(weight, teacher.named_tensors()["head.out.weight"], atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "thresholds", "assignments", "expected"),
    [
        ("span", {"max_answer_tokens": 60.0}, [], 60),
        ("span", {}, [], 30),
        ("span", {"max_answer_tokens": 60.0}, ["task.max_answer_tokens=9"], 9),
        ("multiple", {"good": 0.3}, [], "tuned"),
        ("multiple", {"good": 0.3}, ["task.thresholds=0.5"], 0.5),
        ("multiple", {}, [], 0.5),
    ],
)
def test_default_settings_of_the_task_follow_the_thresholds_of_the_teacher(
    kind: str, thresholds: dict[str, float], assignments: list[str], expected: object, tmp_path: Path
) -> None:
    teacher = load(make_model_dir(tmp_path / "teacher", kind))
    teacher.thresholds = thresholds
    if kind == "multiple":
        teacher.config = replace(teacher.config, head=replace(teacher.config.head, labels=tuple(ENTITY_TYPES)))
    overrides = distil_overrides(teacher.source, assignments=assignments)
    data = write_splits("qa" if kind == "span" else kind, tmp_path / "data")
    task: Any = plan_distil(teacher, overrides, data, exclude=tmp_path / "run").settings.task
    assert (task.max_answer_tokens if kind == "span" else task.thresholds) == expected


# -- baseline and speed -------------------------------------------------------------------------------------------


def test_a_baseline_may_be_trained_for_as_many_epochs(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(row["text"] for row in classification_rows(40, seed=9)) + "\n")
    assignments = [*WITHOUT_DURATION, "train.max_steps=8", "verdict.baseline=epochs"]
    distil(teacher, labelled, tmp_path / "run", student="bag", unlabelled=[texts], assignments=assignments)
    assert steps_of(tmp_path / "run") == 8, "two epochs of 64 texts in batches of 16"
    assert steps_of(tmp_path / "run" / "baseline") == 4, "two epochs of 24 texts"


def test_alone_it_makes_as_many_steps_as_in_minutes_with_the_teacher(
    tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    """The baseline of a student with a time budget is trained for the student's number of steps."""
    assignments = [*WITHOUT_DURATION, "train.time_budget=0.02"]
    distil(teacher, labelled, tmp_path / "run", student="bag", assignments=assignments)
    assert steps_of(tmp_path / "run") == steps_of(tmp_path / "run" / "baseline") >= 1


def test_the_vectors_of_several_poolings_are_concatenated(teacher: Path) -> None:
    one_pooling = with_head(load(teacher), "embedding")
    head = replace(one_pooling.config.head, pooling=("mean", "cls"))
    two_poolings = ModelBundle(replace(one_pooling.config, head=head), one_pooling.tokenizer, one_pooling.source)
    assert sentence_dimension(load(teacher)) == 32, "the hidden size"
    assert sentence_dimension(one_pooling) == 32
    assert sentence_dimension(two_poolings) == 64


def test_speed_is_measured_on_as_many_texts_as_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model_dir(tmp_path / "teacher", "single")
    (folder / "predictions-dev.jsonl").write_text('{"input": "ada ran"}\n' * 200)
    counts: list[int] = []

    def record_count(engines: Any, inputs: Sequence[object], rounds: int | None) -> dict[str, Any]:
        counts.append(len(inputs))
        return {}

    monkeypatch.setattr(distil_verdict, "time_engines", record_count)
    compare_speeds({"student": str(folder)}, VerdictSettings(texts=100, precision="float32"))
    assert counts == [100]


@pytest.mark.parametrize(("batch_seconds", "batches"), [(0.001, 51), (0.1, 12), (9.0, 4)])
def test_batches_are_timed_until_the_slowest_model_has_taken_a_second(
    batch_seconds: float, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least 3 and at most 50 batches are timed after a first one that is discarded."""
    calls = {"slow": 0, "fast": 0}  # batches by the name of the engine

    def fake_seconds(engine: Any, inputs: Sequence[str]) -> float:
        if len(inputs) > 1:  # a batch of all texts, for the throughput
            calls[engine.name] += 1
        return batch_seconds if engine.name == "slow" else batch_seconds / 10

    def tokenize(inputs: Sequence[str]) -> list[SimpleNamespace]:
        return [SimpleNamespace(tokens=5) for _ in inputs]

    monkeypatch.setattr(distil_verdict, "_seconds", fake_seconds)
    monkeypatch.setattr(distil_verdict, "MAX_BATCH_SECONDS", 1.0)
    engines: Any = {name: SimpleNamespace(name=name, tokenize=tokenize) for name in calls}
    speeds = distil_verdict.time_engines(engines, ["a", "b"], 1)
    assert calls == {"slow": batches, "fast": batches}
    assert speeds["slow"]["texts_per_second"] == round(2 / batch_seconds, 1)
    assert speeds["fast"]["tokens_per_second"] == round(10 / (batch_seconds / 10))
