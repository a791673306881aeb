"""distil: what a run leaves, how it goes on, what is refused, and whether a teacher is worth it."""

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
from heedful.errors import HeedfulError, HeedfulWarning, SettingError
from heedful.infer.engine import Engine
from heedful.infer.tuning.precision_gate import open_in_precision
from heedful.objectives.distillation.objective import state_projections
from heedful.runs.distil import augment as distil_more
from heedful.runs.distil import mlm as distil_masked
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
from heedful.runs.distil.unlabelled import read_unlabelled, without_evaluated
from heedful.runs.distil.verdict import ServingSpeed, compare_models, compare_speeds, quality_over_seeds
from heedful.runs.distil.verdict import plot_verdict as drawn
from heedful.runs.finetune.build import build_task
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
    write_splits,
)
from tests.support.model_folders import SPARE, VOCABULARY, make_model_dir

pytestmark = pytest.mark.usefixtures("quick")


def contents(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_a_verdict_cuts_long_texts_where_the_run_does(
    tmp_path: Path, teacher: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": "the cat sat " * 100, "label": "good"}, {"text": "the dog ran", "label": "bad"}]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source, cut = read(tmp_path / "long.jsonl", settings=DataSettings(dev_fraction=0.0)), []

    def evaluate_and_record(*arguments: Any) -> Any:
        measure = evaluate_task(*arguments)
        cut.append(measure.truncation)
        return measure

    monkeypatch.setattr(distil_verdict, "evaluate_task", evaluate_and_record)
    for long in ("truncate", "stride"):
        distil_verdict._served_metrics(str(teacher), "float32", source, "train", long)
    assert [each != TruncationStats() for each in cut] == [True, False]


def test_a_run_ends_in_a_verdict(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    before = contents(teacher)
    texts = [row["text"] for row in classification_rows(40, seed=9)]
    tested = (labelled / "test.csv").read_text().splitlines()[1].partition(",")[0]
    (tmp_path / "texts.txt").write_text("\n".join([*texts, tested.upper()]) + "\n")
    recorder, folder = RecordingReporter(), tmp_path / "run"
    wishes = [*QUICK, "seeds=2"][1:]
    done = distil(
        teacher, labelled, folder, student="layers=1", loss="distilbert", unlabelled=[tmp_path / "texts.txt"],
        assignments=wishes, reporter=recorder,
    )  # fmt: skip
    assert contents(teacher) == before, "the teacher is as it was"
    assert "40 examples without labels are learned from" in recorder.messages
    assert "examples without labels that are left out, since dev or test has them: 1" in recorder.messages
    content = json.loads((folder / "verdict.json").read_text())
    assert done.results["verdict"] == content and set(content["models"]) == {"teacher", "student", "baseline"}
    assert [content["models"][name]["quality"]["seeds"] for name in ("teacher", "student", "baseline")] == [1, 2, 2]
    card = (folder / "model" / "README.md").read_text()
    assert content["split"] == "test" and content["sentence"] in card
    for line in ('"temperature": 2.0,', f'"teacher": "{teacher.name}",', '"kind": "layers",', '"texts.txt"'):
        assert line in card, "the card tells how it was taught, and nothing of a start that it has not had"
    assert '"start": {' not in card
    steps = [json.loads((folder / each / "seed-1" / "seed.json").read_text())["steps"] for each in ("", "baseline")]
    assert steps[0] == steps[1] == 2 * 4, "64 texts in batches of 16, twice; and as many steps alone"
    settings = from_file(DistilSettings, folder / "settings.toml")
    assert (settings.task.kind, settings.loss.kd_weight, settings.loss.label_weight) == ("classify", 5.0, 2.0)
    results = [json.loads((folder / each / "results.json").read_text())["seeds"] for each in ("", "baseline")]
    for name, seeds in zip(("student", "baseline"), results, strict=True):
        assert content["models"][name]["quality"]["numbers"] == pytest.approx(
            [each["splits"]["test"] for each in seeds]
        )
    assert {each["label"] for each in Engine(folder)(texts)} <= {"bad", "fair", "good"}, "the teacher's labels"
    again = RecordingReporter()
    same = distil(
        teacher, labelled, folder, student="layers=1", loss="distilbert", unlabelled=[tmp_path / "texts.txt"],
        assignments=wishes, reporter=again,
    )  # fmt: skip
    assert same.results == done.results
    assert not any("measuring" in message for message in again.messages)


STOPPED = pytest.param({"stop_step": 2}, marks=pytest.mark.slow)


@pytest.mark.parametrize("how", [{"fail_step": 3}, STOPPED], ids=["killed", "stopped"])
def test_a_run_goes_on_to_the_same_bits(how: dict[str, int], tmp_path: Path, teacher: Path, labelled: Path) -> None:
    wishes = [*NO_BASELINE, "fit.checkpoint_every_minutes=0", "student.width=32", "student.heads=2"]
    more: dict[str, Any] = {"student": "tiny", "loss": "tinybert", "assignments": [*wishes, "loss.relations.heads=2"]}
    distil(teacher, labelled, tmp_path / "whole", **more)
    reporter = RecordingReporter(**how)
    if reporter.stop_step:
        assert distil(teacher, labelled, tmp_path / "cut", reporter=reporter, **more).status == "interrupted"
    else:
        with pytest.raises(KeyError):
            distil(teacher, labelled, tmp_path / "cut", reporter=reporter, **more)
        next((tmp_path / "cut" / "outputs").glob("part-*")).unlink()  # as if it had never been written
    assert not (tmp_path / "cut" / "results.json").exists()
    assert distil(teacher, labelled, tmp_path / "cut", **more).status == "completed"
    mine, whole = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("cut", "whole"))
    assert mine.keys() == whole.keys() and all(torch.equal(each, whole[name]) for name, each in mine.items())
    journals = [(tmp_path / name / "journal.jsonl").read_text() for name in ("cut", "whole")]
    assert journals[0] == journals[1]


@pytest.mark.parametrize(
    "when", [{"fail_step": 1, "after_message": "the same student"}, {"after_message": "measuring speed"}]
)
def test_a_run_goes_on_alone_and_to_its_verdict(
    when: dict[str, Any], tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    more: dict[str, Any] = {"student": "layers=1", "assignments": [*QUICK, "fit.checkpoint_every_minutes=0"]}
    whole = distil(teacher, labelled, tmp_path / "whole", **more)
    with pytest.raises(KeyError):
        distil(teacher, labelled, tmp_path / "cut", reporter=RecordingReporter(**when), **more)
    recorder = RecordingReporter()
    cut = distil(teacher, labelled, tmp_path / "cut", reporter=recorder, **more)
    assert any("is finished already" in message for message in recorder.messages), "the student had ended"
    for name in ("model", "baseline/model"):
        mine, theirs = (load_file(tmp_path / run / name / "model.safetensors") for run in ("cut", "whole"))
        assert all(torch.equal(each, theirs[n]) for n, each in mine.items())
    verdict = [{n: each["quality"] for n, each in run.results["verdict"]["models"].items()} for run in (cut, whole)]
    assert (
        verdict[0] == verdict[1]
        and cut.results["verdict"]["delta_vs_baseline"] == whole.results["verdict"]["delta_vs_baseline"]
    )


def test_quality_is_that_of_the_served_precision(
    tmp_path: Path, teacher: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def noted(place: Any, precision: Any, **more: Any) -> Engine:
        asked.append((Path(place).parent.name, precision))
        return open_in_precision(place, precision, **more)

    monkeypatch.setattr(distil_verdict, "open_in_precision", noted)
    wishes = [*QUICK[1:], "seeds=2", "train.epochs=1", "verdict.precision=int8"]
    done = distil(teacher, labelled, tmp_path / "run", student="layers=1", assignments=last(wishes))
    verdict = done.results["verdict"]
    assert {each["quality"]["precision"] for each in verdict["models"].values()} == {"int8"}
    assert "in int8 of " in verdict["sentence"]
    assert [place for place, _ in asked[3:]] == ["seed-1", "seed-2"] * 2, "the student and the same one alone"
    assert {precision for _, precision in asked} == {"int8"}


def test_each_seed_draws_its_own_maps(
    tmp_path: Path, teacher: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[list[float]] = []

    def noted(*arguments: Any) -> Any:
        projections = state_projections(*arguments)
        drawn.append([each.weight[0, 0].item() for each in projections.values()])
        return projections

    monkeypatch.setattr(distil_run, "state_projections", noted)
    wishes = ["seeds=2", *NO_BASELINE[1:], "student.width=16", "student.heads=2", "loss.relations.heads=2"]
    distil(teacher, labelled, tmp_path / "run", student="tiny", loss="tinybert", assignments=wishes)
    assert len(drawn) == 2 and len(drawn[0]) == 3 and not {*drawn[0]} & {*drawn[1]}


@pytest.mark.slow
def test_each_seed_of_a_fresh_student_draws_its_own_weights(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    wishes = ["seeds=2", *QUICK[1:], "student.words.width=8"]
    distil(teacher, labelled, tmp_path / "run", student="bilstm", assignments=wishes)
    one, other = (load(tmp_path / "run" / name).named_tensors() for name in ("start", "start-2"))
    assert one.keys() == other.keys()
    assert not any(torch.equal(each, other[name]) for name, each in one.items() if "bias" not in name)
    cut = tmp_path / "cut"
    distil(teacher, labelled, cut, student="layers=1", assignments=wishes[:-1])
    assert (cut / "start").exists() and not (cut / "start-2").exists(), "the teacher's layers are the same for all"


@pytest.mark.slow
def test_a_teacher_is_worth_it_where_labels_are_bad(tmp_path: Path) -> None:
    """Half its layers and soft labels, beside the same student on as many steps of the labels, many of them wrong."""
    many = write_splits("single", tmp_path / "many", {"train": 300, "dev": 30, "test": 30})
    wishes = {"init.layers": 2, "train.epochs": 8, "train.optimizer.lr": 2e-3}
    finetune_tiny("classify", many, tmp_path / "teacher", wishes)
    few, draw = write_splits("single", tmp_path / "few", {"train": 40, "dev": 10, "test": 150}), random.Random(3)
    write_csv(few / "train.csv", [{**row, "label": draw.choice(("bad", "good"))} for row in classification_rows(40)])
    write_csv(tmp_path / "texts.csv", [{"text": row["text"]} for row in classification_rows(200, seed=5)])
    student = ["student.kind=size", "student.size=tiny", "student.layers=1", "student.width=32", "student.heads=2"]
    more = [
        "train.epochs=12",
        "train.optimizer.lr=2e-3",
        "loss.label_weight=0",
        "fit.load_best_at_end=false",
        "fit.eval_every_epochs=12",
    ]
    more += [*student, "seeds=2", *QUICK[2:]]
    texts = [tmp_path / "texts.csv"]
    done = distil(tmp_path / "teacher", few, tmp_path / "run", unlabelled=texts, assignments=more)
    verdict = done.results["verdict"]["models"]
    assert verdict["teacher"]["quality"]["mean"] > 0.95 and done.results["verdict"]["quality_ratio"] > 0.95
    assert verdict["student"]["quality"]["mean"] > verdict["baseline"]["quality"]["mean"] + 0.1


RELATED = ("student.width=32", "student.heads=2", "loss.relations.heads=2")


@pytest.mark.parametrize(
    ("student", "wishes", "message"),
    [
        ("bag", ["loss.states.weight=1"], "does not have a single stack of Transformer layers"),
        ("layers=9", [], "layers is 9, but .* has 2"),
        ("layers=1", ["student.teacher_layers=[7]"], r"teacher_layers names the layers \[7\], but .* has 2, from 0"),
        ("layers=1", ["student.family=electric"], '"electric" is no family'),
        ("layers=1", ["student.family=gpt2"], "computed in another way than gpt2 does"),
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
            ["loss.kd_weight=0", "loss.label_weight=0", *RELATED],
            "nothing would train the head of a fresh model of size tiny",
        ),
        ("hierarchical", [], r"no token ends a sentence: .* give their ids in student\.reader\.ends"),
        ("tyni", [], '"tyni" is not a student: use one of tiny, mini'),
    ],
)
def test_refusals(student: str, wishes: list[str], message: str, tmp_path: Path, teacher: Path, labelled: Path) -> None:
    with pytest.raises(HeedfulError, match=message):
        distil(teacher, labelled, tmp_path / "run", student=student, assignments=last([*NO_BASELINE, *wishes]))
    assert not (tmp_path / "run").exists(), "a corrected command may take the same folder"


def test_another_verdict_needs_no_other_run(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    arguments: dict[str, Any] = {"student": "bag", "assignments": NO_BASELINE}
    distil(teacher, labelled, tmp_path / "run", **arguments)
    weights, recorder = contents(tmp_path / "run" / "model")["model.safetensors"], RecordingReporter()
    arguments["assignments"] = last([*NO_BASELINE, "verdict.precision=bfloat16", "verdict.texts=4", "verdict.rounds=1"])
    verdict = distil(teacher, labelled, tmp_path / "run", reporter=recorder, **arguments).results["verdict"]
    assert verdict["models"]["student"]["precision"] == "bfloat16"
    assert contents(tmp_path / "run" / "model")["model.safetensors"] == weights
    assert f"{tmp_path / 'run'} is finished already" in recorder.messages
    for other in ("verdict.baseline=steps", "train.batch_size=8"):
        arguments["assignments"] = last([*arguments["assignments"], other])
        with pytest.raises(HeedfulError, match=f"other settings: {other.partition('=')[0]} was"):
            distil(teacher, labelled, tmp_path / "run", **arguments)


def test_the_folder_of_another_run_is_told_as_such(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    (tmp_path / "run").mkdir()
    for name, text in (("run.lock", ""), ("results.json", "{}"), ("settings.toml", "held_out = 0.1\n")):
        (tmp_path / "run" / name).write_text(text)
    with pytest.raises(HeedfulError, match=r"run holds a run of another kind, .*Give another folder with --output"):
        distil(teacher, labelled, tmp_path / "run", student="bag", assignments=NO_BASELINE)


def test_another_teacher_cannot_go_on(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    mine = make_model_dir(tmp_path / "mine", "single")
    distil(mine, labelled, tmp_path / "run", student="bag", assignments=NO_BASELINE)
    torch.manual_seed(77)
    tensors = {name: each + 0.01 for name, each in load_file(mine / "model.safetensors").items()}

    save_file(tensors, mine / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HeedfulError, match="another teacher, or other texts \\(weights changed\\)"):
        distil(mine, labelled, tmp_path / "run", student="bag", assignments=NO_BASELINE)
    write_csv(tmp_path / "other.csv", classification_rows(20, labels=("x", "good")))
    with pytest.raises(HeedfulError, match="cannot teach x"):
        distil(mine, tmp_path / "other.csv", tmp_path / "else", student="bag", assignments=NO_BASELINE)


SIZES = (
    "max_seq_length=16",
    "pack_length=48",
    "eval_fraction=0.1",
    "train.max_steps=4",
    "train.batch_size=4",
    "corpus.sample_by=paragraph",
)
MASKED = ["verdict.precision=float32", "verdict.texts=4", *(f"pretrain.{each}" for each in SIZES)]


def of_text(folder: Path) -> tuple[Path, Path]:
    """A teacher of hidden tokens, and text."""
    draw, words = random.Random(1), WORDS
    lines = ("\n".join(" ".join(draw.choices(words, k=9)) + "." for _ in range(6)) for _ in range(80))
    (folder / "text.txt").write_text("\n\n".join(lines))
    return make_model_dir(folder / "teacher", "masked"), folder / "text.txt"


def test_hidden_tokens_are_distilled_on_text(tmp_path: Path) -> None:
    teacher, text = of_text(tmp_path)
    wishes = [*MASKED, "student.family=distilbert", "verdict.baseline=none"]
    done = distil(teacher, text, tmp_path / "run", student="layers=1", loss="distilbert", assignments=wishes)
    assert done.results["verdict"]["metric"] == "mlm_accuracy"
    card = (tmp_path / "run" / "model" / "README.md").read_text()
    assert "Beside its teacher" in card and "further training of 1 of the layers of teacher, taught by teacher:" in card
    assert "loss.kd_weight = 5.0" in card and "pretrain.max_seq_length = 16" in card and "model.size" not in card
    tensors = [load_file(tmp_path / "run" / each / "model.safetensors") for each in ("start", "model")]
    assert tensors[0].keys() == tensors[1].keys() and any(name.startswith("vocab_transform") for name in tensors[0])
    with pytest.raises(HeedfulError, match="masks are new in each epoch"):
        distil(teacher, text, tmp_path / "no", student="layers=1", assignments=["teacher_cache.enabled=true"])
    with pytest.raises(HeedfulError, match="a classic student has no head"):
        distil(teacher, text, tmp_path / "no", student="bag")


@pytest.mark.slow
def test_vocabularies_may_be_padded_differently(tmp_path: Path) -> None:
    """Rows of no token are not compared; soft labels are over those that both have."""
    teacher, text = of_text(tmp_path)
    rows = [each.config.model.embedding.vocabulary for each in map(load, (teacher, _padded(tmp_path, teacher)))]
    assert rows == [len(VOCABULARY) + SPARE, len(VOCABULARY) + SPARE + 5]
    for how in (
        ["teacher_cache.enabled=false"],
        ["teacher_cache.enabled=true", "teacher_cache.top_k=4", "pretrain.objective.num_static_masks=1"],
    ):
        folder = tmp_path / str(len(how))
        wishes = [*MASKED, "verdict.baseline=none", "loss.label_weight=0", *how]
        distil(teacher, text, folder, student=str(tmp_path / "padded"), assignments=wishes)
        first = json.loads((folder / "journal.jsonl").read_text().splitlines()[0])
        assert first["loss"] == pytest.approx(0.0, abs=2e-3), "they are the same but for the padding"


def _padded(folder: Path, teacher: Path) -> Path:
    """The same model with five more rows for no token."""
    config = json.loads((teacher / "config.json").read_text())
    (folder / "padded").mkdir()
    for path in teacher.iterdir():
        (folder / "padded" / path.name).write_bytes(path.read_bytes())
    (folder / "padded" / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 5}))
    tensors = load_file(teacher / "model.safetensors")
    for name, each in tensors.items():
        if each.shape[0] == config["vocab_size"]:
            tensors[name] = torch.cat([each, torch.ones_like(each[:5])])
    save_file(tensors, folder / "padded" / "model.safetensors", metadata={"format": "pt"})
    return folder / "padded"


@pytest.mark.parametrize(
    "wish", ["model.size=tiny", 'data=["a.txt"]', "tokenizer.path=words", "tokenizer.algorithm=bpe"]
)
def test_what_pretraining_alone_decides_is_refused(wish: str, tmp_path: Path) -> None:
    teacher, text = of_text(tmp_path)
    message = f"pretrain.{wish.partition('=')[0].partition('.')[0]} would change nothing"
    with pytest.raises(HeedfulError, match=message):
        distil(teacher, text, tmp_path / "run", student="layers=1", assignments=[f"pretrain.{wish}"])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_hidden_tokens_are_distilled_where_a_text_was_too_short_before(tmp_path: Path) -> None:
    teacher, text = of_text(tmp_path)
    short, wishes = tmp_path / "short.txt", [*MASKED, "verdict.baseline=none"]
    short.write_text("one two three.\n")
    with pytest.raises(HeedfulError, match="document"):
        distil(teacher, short, tmp_path / "run", student="layers=1", assignments=wishes)
    with pytest.warns(HeedfulWarning, match="was made with other settings of the text"):
        done = distil(teacher, text, tmp_path / "run", student="layers=1", assignments=wishes)
    assert done.status == "completed"
    with pytest.raises(HeedfulError, match="a run with other settings"):
        distil(teacher, short, tmp_path / "run", student="layers=1", assignments=wishes)


@pytest.mark.slow
def test_kept_shares_of_hidden_tokens_are_those_that_are_said(tmp_path: Path) -> None:
    teacher, text = of_text(tmp_path)
    wishes = [*MASKED, "pretrain.objective.num_static_masks=2", "loss.label_weight=0"]
    losses = []
    for how in (["false"], ["true"], ["true", "teacher_cache.top_k=4", "verdict.baseline=none"]):
        more, folder = [*wishes, f"teacher_cache.enabled={how[0]}", *how[1:]], tmp_path / str(len(losses))
        distil(teacher, text, folder, student="layers=1", assignments=more)
        losses.append(json.loads((folder / "journal.jsonl").read_text().splitlines()[0])["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=2e-3), "in float16"
    assert 0 < losses[2] <= losses[0] * 1.002, "what is grouped tells less"


def test_replaced_words_are_words_of_the_model(tmp_path: Path) -> None:
    replacer = WordReplacer(load(make_model_dir(tmp_path / "lm", "masked")), AugmentSettings(replace_prob=0.5, top_k=5))
    texts = ["The cat, sat on  the mat", "zzzz", ""]
    variants = replacer(texts, [1, 2, 3])
    assert variants == replacer(texts, [1, 2, 3]) and variants != replacer(texts, [4, 5, 6])
    assert variants[1:] == ["zzzz", ""] and variants[0] != texts[0]
    assert "  " in variants[0] and len(variants[0].split()) == len(texts[0].split()), "what stands between words stays"
    signs = [n for n, may in enumerate(replacer._is_word.tolist()) if may and replacer.tokenizer.name(n) in ".,;:!?"]
    assert not signs, "a sign is no word: no word takes its place, nor it that of a word"
    (words,) = replacer([PreTokenized(["ada", "lives", "here", "qqq"])], [1])
    assert len(words) == 4 and words[3] == "qqq" and words != ["ada", "lives", "here", "qqq"]


def test_the_sentence_says_what_was_seen() -> None:
    speed = [ServingSpeed(precision="int8", p50=4.0, p99=5.0, texts_per_second=10.0, tokens_per_second=100)]
    speed.append(ServingSpeed(precision="float32", p50=1.0, p99=5.0, texts_per_second=30.0, tokens_per_second=300))
    several = {"teacher": [0.9], "student": [0.84, 0.85, 0.86], "baseline": [0.79, 0.8, 0.81]}
    models = {name: quality_over_seeds(numbers, "float32") for name, numbers in several.items()}
    speeds, counts = dict(zip(models, speed, strict=False)), {"teacher": 100, "student": 25}
    verdict = compare_models("f1", "dev", models, speeds, counts, 0.01)
    sentence, gain = verdict["sentence"], verdict["delta_vs_baseline"]
    assert "keeps 94.4 % of the teacher's f1 on dev (85.0 % in float32 of 90.0 % in float32)" in sentence
    assert gain["difference"] == pytest.approx(0.05) and gain["seeds"] == 3
    assert gain["low"] == pytest.approx(0.05 - 4.3027 * 0.01 / 3**0.5, abs=1e-6), "equal differences are a grain apart"
    assert sentence.endswith("(95 % interval +2.5 to +7.5 points): the teacher was worth it.")
    assert "3.0 times as many texts a second and one text 4.0 times as fast, and has 25 % of the parameters" in sentence
    figure = drawn(verdict, [{"name": "bag", "p50": 0.3, "quality": 0.7}])
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    names = {text.get_text(): text.xyann[1] for text in axes.texts if text.get_text()}
    assert set(names) == {"teacher", "student", "student alone", "bag"}
    assert figure.get_suptitle() == "The student is 4.0x faster, 94 % of the quality kept\nbars: 95 % intervals"
    interval = verdict["models"]["student"]["quality"]["interval"]
    assert interval["low"] < 0.84 and 0.86 < interval["high"] < 1
    assert 0 < verdict["models"]["teacher"]["quality"]["interval"]["low"] < 0.9, "one seed: of the share of examples"


def test_names_of_points_do_not_lie_on_each_other() -> None:
    speed = ServingSpeed(precision="int8", p50=4.0, p99=5.0, texts_per_second=10.0, tokens_per_second=100)
    models = {name: quality_over_seeds([0.9], "float32") for name in ("teacher", "student", "baseline")}
    verdict = compare_models("f1", "dev", models, {"teacher": speed, "student": speed}, {"teacher": 9, "student": 9})
    (axes,) = drawn(verdict).axes
    heights = sorted(text.xyann[1] for text in axes.texts if text.get_text())
    assert all(second - first >= 11.9 for first, second in pairwise(heights))
    assert axes.get_ylim()[1] <= 1.0


@pytest.mark.parametrize(
    ("student", "baseline", "ending"),
    [
        ([0.80, 0.85, 0.81], [0.79, 0.80, 0.81], ": no difference seen."),  # two standard errors would have seen one
        ([0.80, 0.80, 0.80], [0.81, 0.81, 0.81], ": no difference seen."),  # one text of a hundred
        ([0.70, 0.71, 0.72], [0.79, 0.80, 0.81], ": the teacher made it worse."),
        ([0.90, 0.90], [0.70, 0.70], "from 2 seeds each, too few for a verdict: 3 or more are needed."),
        ([0.90], [0.70], "from 1 seed each, too few for a verdict: 3 or more are needed."),
    ],
)
def test_a_teacher_is_judged_seed_by_seed(student: list[float], baseline: list[float], ending: str) -> None:
    fast = ServingSpeed(precision="int8", p50=4.0, p99=5.0, texts_per_second=10.0, tokens_per_second=100)
    several = {"teacher": [0.9], "student": student, "baseline": baseline}
    models = {name: quality_over_seeds(numbers, "int8") for name, numbers in several.items()}
    speeds, counts = {"teacher": fast, "student": fast}, {"teacher": 100, "student": 25}
    verdict = compare_models("f1", "dev", models, speeds, counts, 0.01)
    assert verdict["sentence"].endswith(ending) and json.dumps(verdict, allow_nan=False)


def test_settings_that_are_wrong_are_told_first() -> None:
    check_overrides(distil_overrides("x", assignments=["task.group_size=4"]))
    check_overrides(distil_overrides("x", assignments=["pretrain.max_seq_length=64"]))
    with pytest.raises(HeedfulError, match="temprature"):
        check_overrides(distil_overrides("x", assignments=["loss.temprature=4"]))
    with pytest.raises(HeedfulError, match="distilbrt"):
        distil_overrides("x", loss="distilbrt")


@pytest.mark.parametrize("marks", ["BIES", "BILU", "I"])
def test_a_tagging_teacher_may_have_its_own_marks(tmp_path: Path, marks: str) -> None:
    files = write_splits("tag", tmp_path / "data")
    kinds = sorted({label[2:] for label in read(files).labels} - {""})
    labels = ("O", *(f"{mark}-{kind}" for mark in marks for kind in kinds))
    save(
        with_head(load(make_model_dir(tmp_path / "tag", "tag")), "token_classification", labels=labels),
        tmp_path / "teacher",
    )
    done = distil(tmp_path / "teacher", files, tmp_path / "run", student="layers=1", assignments=NO_BASELINE)
    assert (
        done.status == "completed"
        and load(done.output_dir / "model").config.head == load(tmp_path / "teacher").config.head
    )


def test_names_go_over_a_recipe_and_the_teacher_is_named_once(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('teacher = "of-before"\n[student]\nkind = "layers"\nlayers = 2\n[loss]\nkd_weight = 3.0\n')
    settings = preview_distil_settings(distil_overrides("mine", student="bag", loss="distilbert", recipe=recipe))
    assert (settings.teacher, settings.student, settings.loss.kd_weight) == ("mine", parse_student("bag"), 5.0)
    assert preview_distil_settings(distil_overrides("mine", recipe=recipe)).loss.kd_weight == 3.0
    with pytest.raises(SettingError, match="TEACHER mine and teacher=other both set teacher"):
        preview_distil_settings(distil_overrides("mine", assignments=["teacher=other"]))
    arguments: tuple[dict[str, Any], ...] = ({"assignments": ["student.layers=2"]}, {"recipe": recipe})
    for more in arguments:
        with pytest.raises(HeedfulError, match="a search makes its own students"):
            search("mine", tmp_path, tmp_path / "run", min_quality=0.9, **more)


def test_tinyberts_losses_are_of_every_layer(tmp_path: Path) -> None:
    teacher = load(make_model_dir(tmp_path / "teacher", "single"))
    losses = resolve_losses(preview_distil_settings(distil_overrides("x", loss="tinybert")).loss, teacher, teacher)
    assert [each.pair for each in losses.relations] == [(0, 0), (1, 1)] and losses.label == 0
    assert [each.weight for each in losses.relations] == [0.5, 0.5]
    assert losses.states[0].pairs == ((0, 0), (1, 1), (2, 2))


def test_what_can_be_foreseen_is_refused_before_anything_is_written(
    tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    no = tmp_path / "no"
    span = make_model_dir(tmp_path / "span", "span")
    rows = [{"id": str(n), "question": "who ?", "context": "ada ran", "answers": []} for n in range(6)]
    rows += [{"id": "x", "question": "who ?", "context": "ada ran", "answers": [{"text": "ada", "answer_start": 0}]}]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = [tmp_path / "train.jsonl", tmp_path / "test.jsonl"]
    with pytest.raises(
        HeedfulError, match=r"thresholds are tuned on dev, but there is no dev split.*task.no_answer_threshold=0"
    ):
        distil(span, files, no, student="layers=1", assignments=[*NO_BASELINE, "data.dev_fraction=0"])
    other = make_model_dir(tmp_path / "other", "bare")
    words = (other / "vocab.txt").read_text().splitlines()
    (other / "vocab.txt").write_text("".join(f"{word if word != 'the' else 'xyz'}\n" for word in words))
    wishes = [*NO_BASELINE, "loss.states.weight=1"]
    with pytest.raises(HeedfulError, match="different tokens or windows, but states compare"):
        distil(teacher, labelled, no, student=str(other), assignments=wishes)
    masked, text = of_text(tmp_path)
    with pytest.raises(HeedfulError, match=r"pretrain.max_seq_length is 64, but .* reads 48 tokens"):
        distil(masked, text, no, student="tiny", assignments=["pretrain.max_seq_length=64", *MASKED[:2]])
    overrides = distil_overrides(str(masked), student="layers=1")
    assert distil_masked._resolve_settings(load(masked), overrides, text).pretrain.max_seq_length == 48, (
        "by default, as it reads"
    )
    assert not no.exists()


@pytest.mark.slow
def test_bad_rows_of_text_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    teacher, text = of_text(tmp_path)
    lines = [json.dumps({"text": each}) for each in text.read_text().split("\n\n")]
    files, run = tmp_path / "files", tmp_path / "files" / "run"  # which is not read
    files.mkdir()
    (files / "text.jsonl").write_text("\n".join([*lines[:9], "{broken", *lines[9:]]) + "\n")
    arguments: dict[str, Any] = {"student": "layers=1", "assignments": [*MASKED[:-1]]}
    with pytest.raises(HeedfulError, match="--on-bad-row skip"):
        distil(teacher, files, run, **arguments)
    done = distil(teacher, files, run, on_bad_row="skip", **arguments)
    read = [json.loads((run / each / "results.json").read_text())["corpus"] for each in ("", "baseline")]
    assert read[0] == read[1], "alone it reads the same text, and no file of the run"
    models = done.results["verdict"]["models"]
    assert models["student"]["quality"]["mean"] == pytest.approx(
        done.results["splits"]["validation"]["numbers"]["mlm_accuracy"], abs=0.02
    )
    assert {each["quality"]["precision"] for each in models.values()} == {"float32"}


def test_texts_without_labels_need_not_have_the_columns_of_others(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("one two\nthree\n")
    (tmp_path / "more.csv").write_text("text\nfour\n")
    (tmp_path / "same.csv").write_text("review,text\nfive,six\n")
    files = [str(tmp_path / name) for name in ("more.txt", "more.csv", "same.csv")]
    settings = DataSettings(columns={"text": "review", "label": "stars"}, format="csv")
    unlabelled = read_unlabelled(
        files, LabelledExample, "sequence_classification", ("a",), settings, exclude=tmp_path / "run"
    )
    assert [each.texts for each in unlabelled.examples] == [("one two",), ("three",), ("four",), ("five",)]


@pytest.mark.parametrize("head", ["message,kind", "message,label"])
def test_a_column_that_no_setting_can_name_is_to_be_called_otherwise(head: str, tmp_path: Path) -> None:
    (tmp_path / "more.csv").write_text(f"{head}\none two,x\nthree,y\n")
    arguments = [str(tmp_path / "more.csv")], LabelledExample, "sequence_classification", ("a",)
    message = r'more\.csv: which column is the text\? Call it "text" in its first row'
    with pytest.raises(HeedfulError, match=message):
        read_unlabelled(*arguments, DataSettings(), exclude=tmp_path / "run")
    by_number = DataSettings(columns={"text": "1"})
    if head == "message,label":  # a header, perhaps another than that of the labelled data
        with pytest.raises(HeedfulError, match=message):
            read_unlabelled(*arguments, by_number, exclude=tmp_path / "run")
        by_number = columns_by_name(by_number, {"text": ["message"]})
    assert len(read_unlabelled(*arguments, by_number, exclude=tmp_path / "run").examples) >= 2


@pytest.mark.parametrize("name", ["more.txt", "more.conll", "eng.train"])
def test_words_in_columns_are_read_as_such_whatever_their_file_is_called(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    bad = "" if name == "more.txt" else "x\n\n"  # of what is only found by what it looks like, all must be alike
    path.write_text(f"1 Ada B-X\n2 wrote O\n\n{bad}3 it O\n")
    settings = DataSettings(columns={"words": 2, "tags": 3}, format="conll" if name == "eng.train" else None)
    unlabelled = read_unlabelled(
        [str(path)], TaggedExample, "token_classification", ("O",), settings, exclude=tmp_path / "run"
    )
    assert [each.words for each in unlabelled.examples if isinstance(each, TaggedExample)] == [
        ("Ada", "wrote"),
        ("it",),
    ]
    assert unlabelled.bad_rows == bool(bad)


def test_a_file_of_no_texts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("\n")
    with pytest.raises(HeedfulError, match=r"more\.txt: no text to learn from"):
        read_unlabelled(
            [str(tmp_path / "more.txt")],
            LabelledExample,
            "sequence_classification",
            ("a",),
            DataSettings(),
            exclude=tmp_path / "run",
        )


def test_texts_that_pairs_are_measured_on_are_not_learned(tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("one two\nnew\nThree four\nfresh\n")
    measured = [PairExample(anchor="one two", positive="x"), PairExample(anchor="y", positive="three four")]
    unlabelled = read_unlabelled(
        [str(tmp_path / "more.txt")], PairExample, "embedding", (), DataSettings(), measured, exclude=tmp_path / "run"
    )
    assert [each.texts for each in unlabelled.examples] == [("new", "fresh")] and unlabelled.in_evaluation == 2
    assert without_evaluated(unlabelled, measured).in_evaluation == 2
    (tmp_path / "more.csv").write_text("a,b\nX,one two\nnew,Three four\nnew,old\n")
    unlabelled = read_unlabelled(
        [str(tmp_path / "more.csv")], PairExample, "embedding", (), DataSettings(), measured, exclude=tmp_path / "run"
    )
    assert [each.texts for each in unlabelled.examples] == [("new", "old")] and unlabelled.in_evaluation == 2


def test_words_that_are_measured_on_are_not_learned_however_they_are_parted(tmp_path: Path) -> None:
    (tmp_path / "more.csv").write_text("id,text\n1,I don't know.\n2,I do not know.\n")
    measured = [TaggedExample(words=("I", "do", "n't", "know", "."), tags=("O",) * 5)]
    files, run = [str(tmp_path / "more.csv")], tmp_path / "run"
    unlabelled = without_evaluated(
        read_unlabelled(files, TaggedExample, "token_classification", ("O",), DataSettings(), exclude=run), measured
    )
    assert [each.texts for each in unlabelled.examples] == [("I do not know .",)] and unlabelled.in_evaluation == 1
    assert unlabelled.notes == ('more.csv: columns: text="text"; not used: "id"',)


def test_a_word_is_replaced_without_the_space_before_it() -> None:
    encoded = Encoding(ids=(1, 2), types=(0, 0), segments=(0, 0), offsets=((0, 3), (3, 7)), words=(0, 1))
    assert distil_more._with_replaced_words("the cat sat", encoded, {1: "dog"}) == "the dog sat"


def last(assignments: Sequence[str]) -> list[str]:
    """The last assignment to each setting, and the last duration."""
    names = [each.partition("=")[0].strip() for each in assignments]
    settings = {"duration" if name in DURATION else name: each for name, each in zip(names, assignments, strict=True)}
    return list(settings.values())


def planned(teacher: Path, data: Any, *wishes: str, student: str = "layers=1") -> Any:
    """What is going to be done, of which nothing is written."""
    overrides = distil_overrides(str(teacher), student=student, assignments=wishes)
    return plan_distil(load(teacher), overrides, data, exclude=teacher / "run")


@pytest.mark.slow
def test_dev_is_parted_as_the_teacher_parted_it(tmp_path: Path) -> None:
    """What is parted otherwise, and a file that it has learned from, is told."""
    teacher, rows = (
        make_model_dir(tmp_path / "teacher", "single"),
        write_csv(tmp_path / "rows.csv", classification_rows(60)),
    )
    assert planned(teacher, rows).settings.data == DataSettings(), "no run"
    facts = {"files": {"rows.csv": sha256_of(rows)}, "trained_on": ["rows.csv"], "made_dev": True}
    (teacher / "settings.toml").write_text("[data]\ndev_fraction = 0.3\nseed = 5\n")
    (teacher / "data.json").write_text(json.dumps(facts))
    plan = planned(teacher, rows)
    assert (plan.settings.data, plan.notes) == (DataSettings(dev_fraction=0.3, seed=5), ())
    assert planned(teacher, rows, "data.dev_fraction=0.2").notes == (), "a part of the teacher's dev"
    for wish in ("data.dev_fraction=0.4", "data.seed=1"):
        (note,) = planned(teacher, rows, wish).notes
        assert note.startswith("the teacher was trained on texts of dev: its quality there is optimistic")
    other = write_csv(tmp_path / "other.csv", classification_rows(60, seed=3))
    assert planned(teacher, other).settings.data == DataSettings(), "other texts may be parted otherwise"
    (note,) = planned(teacher, {"train": other, "test": rows}).notes
    assert note.startswith("the teacher was trained on texts of test")
    (teacher / "data.json").write_text(json.dumps(facts | {"made_dev": False}))
    assert len(planned(teacher, rows).notes) == 1, "it had another dev, and learned from all of this file"
    (teacher / "settings.toml").write_text("[data]\ndev_fraction = 0.0\n")
    with pytest.raises(HeedfulError, match=r"neither dev nor test .* that the teacher was not trained on"):
        planned(teacher, rows)


def test_data_are_read_as_the_teachers_run_read_its_own(tmp_path: Path) -> None:
    teacher = make_model_dir(tmp_path / "teacher", "single")
    (teacher / "settings.toml").write_text(
        '[data]\nencoding = "latin-1"\nlabel_until = ":"\ncolumns = {text = "review", label = "stars"}\n'
    )
    (teacher / "data.json").write_text('{"files": {"reviews.csv": ""}}')
    rows = classification_rows(60)
    text = "".join(f"{row['label']}:x,caf\xe9 {row['text']}\n" for row in rows)
    (tmp_path / "data.csv").write_bytes(b"stars,review\n" + text.encode("latin-1"))
    plan = planned(teacher, tmp_path / "data.csv")
    assert plan.settings.data.columns == {"text": "review", "label": "stars"} and plan.settings.data.dev_fraction == 0.1
    assert next(plan.source.examples("train")).text.startswith("café ") and not any(
        ":" in x for x in plan.source.labels
    )
    assert plan.notes[0].startswith("data are read as the teacher's run read its own: data.columns.text=review")
    assert planned(teacher, tmp_path / "data.csv", "data.encoding=cp1252").settings.data.encoding == "cp1252"
    (tmp_path / "data.jsonl").write_text(
        "".join(
            json.dumps({"review": f"café {row['text']}", "stars": row["label"]}, ensure_ascii=False) + "\n"
            for row in rows
        ),
        encoding="utf-8",
    )
    assert next(planned(teacher, tmp_path / "data.jsonl").source.examples("train")).text.startswith("café ")


def test_texts_without_labels_have_the_encoding_of_their_own_format(tmp_path: Path) -> None:
    (tmp_path / "more.jsonl").write_text('{"text": "café"}\n', encoding="utf-8")
    (tmp_path / "more.tsv").write_bytes(b"text\ncaf\xe9\n")
    files = [str(tmp_path / name) for name in ("more.jsonl", "more.tsv")]
    settings = DataSettings(encoding="latin-1")
    arguments = (files, LabelledExample, "sequence_classification", ("a",), settings)
    unlabelled = read_unlabelled(*arguments, names=["train.tsv"], exclude=tmp_path / "run")
    assert [each.texts for each in unlabelled.examples] == [("café",), ("café",)]


def test_readers_that_a_task_does_not_take_are_refused(tmp_path: Path) -> None:
    tagger = make_model_dir(tmp_path / "tag", "tag")
    for student in ("attention", "structured"):
        with pytest.raises(HeedfulError, match=f'student.reader.kind is "{student}": tag needs the hidden state'):
            planned(tagger, tmp_path / "unread", student=student)


def test_defaults_are_for_all_texts_and_for_the_student(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    masked = make_model_dir(tmp_path / "masked", "masked")
    usual = planned(teacher, labelled).settings.train
    more = planned(teacher, labelled, "augment.copies=20", f"augment.model={masked}").settings.train
    assert (usual.epochs, more.epochs) == (30, 16), "24 texts, and 504"
    config = json.loads((teacher / "config.json").read_text()) | {"hidden_size": 64}
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config))
    wide = planned(teacher, labelled, student=str(tmp_path / "wide")).settings.train
    assert (usual.optimizer.lr, wide.optimizer.lr) == (1e-3, 6e-4), "0.04 / width"


def test_a_student_has_its_teachers_score(tmp_path: Path) -> None:
    """Whatever the number is called, the last layer stays."""
    known = load(make_model_dir(tmp_path / "teacher", "regression"))
    distil_plan = planned(tmp_path / "teacher", write_splits("regress", tmp_path / "data"))
    plan = distil_plan.finetune_plan()
    task, distil_task = build_task(
        plan.settings, plan.source, plan.stats, student_from_layers(known, LayersStudent(layers=1)), plan.labels
    )
    assert distil_task.config.head == known.config.head
    answers = task.for_inference(distil_task).named_tensors()
    assert torch.allclose(answers["head.out.weight"], known.named_tensors()["head.out.weight"], atol=1e-5)


def test_alone_it_passes_as_often_over_the_labels(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(row["text"] for row in classification_rows(40, seed=9)) + "\n")
    wishes = last([*WITHOUT_DURATION, "train.max_steps=8", "verdict.baseline=epochs"])
    more: dict[str, Any] = {"unlabelled": [tmp_path / "texts.txt"], "assignments": wishes}
    distil(teacher, labelled, tmp_path / "run", student="bag", **more)
    steps = [json.loads((tmp_path / "run" / each / "seed.json").read_text())["steps"] for each in ("", "baseline")]
    assert steps == [8, 4], "two passes over 64 texts, and over 24, in batches of 16"


def test_alone_it_makes_as_many_steps_as_in_minutes_with_the_teacher(
    tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    wishes = last([*WITHOUT_DURATION, "train.time_budget=0.02"])
    distil(teacher, labelled, tmp_path / "run", student="bag", assignments=wishes)
    steps = [json.loads((tmp_path / "run" / each / "seed.json").read_text())["steps"] for each in ("", "baseline")]
    assert steps[0] == steps[1] >= 1


def test_vectors_are_compared_by_their_own_width(teacher: Path) -> None:
    """Poolings that stand side by side make them wider than the model."""
    both = with_head(load(teacher), "embedding")
    head = replace(both.config.head, pooling=("mean", "cls"))
    twice = ModelBundle(replace(both.config, head=head), both.tokenizer, both.source)
    assert (sentence_dimension(both), sentence_dimension(twice), sentence_dimension(load(teacher))) == (
        32,
        64,
        32,
    )


def test_as_many_texts_are_answered_as_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, seen = make_model_dir(tmp_path / "teacher", "single"), list[int]()
    (place / "predictions-dev.jsonl").write_text('{"input": "ada ran"}\n' * 200)
    monkeypatch.setattr(distil_verdict, "time_engines", lambda engines, inputs, rounds: seen.append(len(inputs)) or {})
    compare_speeds({"student": str(place)}, VerdictSettings(texts=100, precision="float32"))
    assert seen == [100]


@pytest.mark.parametrize(("seconds", "turns"), [(0.001, 51), (0.1, 12), (9.0, 4)])
def test_texts_are_answered_until_it_has_taken_long_enough(
    seconds: float, turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 short texts take a fast model a few milliseconds, of which three alone would tell little."""
    calls: dict[str, int] = {"slow": 0, "quick": 0}

    def took(engine: Any, inputs: Sequence[str]) -> float:
        if len(inputs) > 1:
            calls[engine.name] += 1
        return seconds if engine.name == "slow" else seconds / 10

    monkeypatch.setattr(distil_verdict, "_seconds", took)
    monkeypatch.setattr(distil_verdict, "MAX_BATCH_SECONDS", 1.0)
    tokenize = lambda inputs: [SimpleNamespace(tokens=5) for _ in inputs]  # noqa: E731
    engines: Any = {name: SimpleNamespace(name=name, tokenize=tokenize) for name in calls}
    speeds = distil_verdict.time_engines(engines, ["a", "b"], 1)
    assert calls == {"slow": turns, "quick": turns}
    assert speeds["slow"]["texts_per_second"] == round(2 / seconds, 1)
    assert speeds["quick"]["tokens_per_second"] == round(10 / (seconds / 10))


@pytest.mark.parametrize(
    ("kind", "answers", "wishes", "want"),
    [
        ("span", {"max_answer_tokens": 60.0}, [], 60),
        ("span", {}, [], 30),
        ("span", {"max_answer_tokens": 60.0}, ["task.max_answer_tokens=9"], 9),
        ("multiple", {"good": 0.3}, [], "tuned"),
        ("multiple", {"good": 0.3}, ["task.thresholds=0.5"], 0.5),
        ("multiple", {}, [], 0.5),
    ],
)
def test_a_student_answers_as_its_teacher_does(
    kind: str, answers: dict[str, float], wishes: list[str], want: object, tmp_path: Path
) -> None:
    """Unless the settings say otherwise."""
    taught = load(make_model_dir(tmp_path / "teacher", kind))
    taught.thresholds = answers
    if kind == "multiple":
        taught.config = replace(taught.config, head=replace(taught.config.head, labels=tuple(ENTITY_TYPES)))
    overrides = distil_overrides(taught.source, assignments=wishes)
    held = write_splits({"span": "qa"}.get(kind, kind), tmp_path / "data")
    task: Any = plan_distil(taught, overrides, held, exclude=tmp_path / "run").settings.task
    assert (task.max_answer_tokens if kind == "span" else task.thresholds) == want
