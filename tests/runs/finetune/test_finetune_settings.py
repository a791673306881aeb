"""Settings of a fine-tuning run: defaults that depend on the data, recipes, assignments, and refused settings."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from heedful.bundled import BUNDLED_ENCODER
from heedful.errors import HeedfulError, SettingError
from heedful.runs.distil.settings import LayersStudent, check_overrides, distil_overrides, preview_distil_settings
from heedful.runs.finetune.plan import plan_finetune
from heedful.runs.finetune.settings import (
    FinetuneSettings,
    check_batch_groups,
    finetune_defaults,
    finetune_overrides,
    preview_settings,
    resolve_finetune,
    training_summary,
)
from heedful.runs.run_folder import can_resume
from heedful.settings import from_file, from_mapping, load_mapping, overlay, to_mapping, to_toml
from heedful.tasks.specs import SPECS, task_names
from heedful.tasks.specs.classify import MultiLabelSettings
from heedful.tasks.specs.embed import EmbedSettings
from heedful.train import fit, optim, trainer
from heedful.train import settings as train_settings
from heedful.train.settings import AdamW, DecayFromStart

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path for path in Path(str(files("heedful") / "assets" / "recipes")).iterdir() if "-" not in path.stem)


def settings_for(task: str = "classify", recipe: Path | None = None, *assignments: str) -> Any:
    """Return the settings of a run with 600 examples and a pretrained model."""
    defaults, _ = finetune_defaults(task, 600, random_init=False)
    return resolve_finetune(finetune_overrides(recipe=recipe, assignments=assignments), defaults).settings


def preview(task: str, *assignments: str, recipe: Path | None = None) -> FinetuneSettings:
    """Return the settings that are known before the data are read."""
    return preview_settings(task, finetune_overrides(recipe=recipe, assignments=assignments))


@pytest.mark.parametrize(
    ("examples", "epochs", "batch_size", "eval_every_epochs"),
    [
        (1, 15, 16, 1.0),
        (499, 15, 16, 1.0),
        (500, 8, 16, 1.0),
        (2_000, 4, 16, 1.0),
        (10_000, 4, 32, 1.0),
        (50_000, 2, 32, 0.5),
        (500_000, 1, 32, 0.5),
    ],
)
def test_defaults_depend_on_the_number_of_examples(
    examples: int, epochs: int, batch_size: int, eval_every_epochs: float
) -> None:
    defaults, reason = finetune_defaults("classify", examples, random_init=False)
    assert defaults.train.epochs == epochs
    assert defaults.train.batch_size == batch_size
    assert defaults.fit.eval_every_epochs == eval_every_epochs
    assert reason == f"defaults for {examples:,} examples and a trained model 768 wide"
    assert training_summary(defaults, reason) == f"{reason}: {epochs} epochs, batches of {batch_size}, lr 5e-05"
    of_random_weights, _ = finetune_defaults("classify", examples, random_init=True)
    assert of_random_weights.train.epochs == epochs


@pytest.mark.parametrize(("hidden_size", "lr"), [(256, 2e-4), (384, 1e-4), (768, 5e-5), (1024, 4e-5)])
def test_the_default_learning_rate_depends_on_the_hidden_size(hidden_size: int, lr: float) -> None:
    defaults, _ = finetune_defaults("classify", 600, random_init=False, width=hidden_size)
    assert defaults.train.optimizer.lr == lr


def test_the_default_learning_rate_is_higher_for_random_weights() -> None:
    defaults, reason = finetune_defaults("classify", 600, random_init=True)
    assert defaults.train.optimizer.lr == 5e-4
    assert "a fresh encoder" in reason


@pytest.mark.parametrize(("examples", "epochs"), [(499, 15), (2_000, 6), (14_041, 6), (50_000, 2)])
def test_tagging_has_more_epochs_from_2000_sentences_on(examples: int, epochs: int) -> None:
    defaults, reason = finetune_defaults("tag", examples, random_init=False)
    assert defaults.train.epochs == epochs
    assert " characters" not in reason


@pytest.mark.parametrize(
    ("examples", "characters", "epochs"),
    [
        (400, 400 * 500, 15),  # short texts: by the number of examples
        (400, 400 * 12_000, 4),  # as 9,375 examples
        (25_000, 25_000 * 1_300, 2),
        (25_000, 25_000 * 80, 4),
        (3, 10**9, 1),
    ],
)
def test_long_texts_have_fewer_epochs(examples: int, characters: int, epochs: int) -> None:
    defaults, reason = finetune_defaults("classify", examples, random_init=False, characters=characters)
    assert defaults.train.epochs == epochs
    without_characters, _ = finetune_defaults("classify", examples, random_init=False)
    assert defaults.train.batch_size == without_characters.train.batch_size
    has_fewer_epochs = epochs < without_characters.train.epochs
    assert (f" of {characters:,} characters " in reason) == has_fewer_epochs


def test_the_summary_names_settings_that_were_set_by_hand(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[train]\nbatch_size = 7\n[train.optimizer]\nlr = 1e-3\n")
    overrides = finetune_overrides(recipe=recipe, assignments=["train.max_steps=9", "train.batch_size=5"])
    defaults, reason = finetune_defaults("classify", 600, random_init=True)
    resolved = resolve_finetune(overrides, defaults)
    assert training_summary(resolved.settings, reason, tuple(resolved.sources)) == (
        "defaults for 600 examples and a fresh encoder: 9 steps, batches of 5, lr 0.001; "
        "set by hand: train.batch_size, train.optimizer.lr, train.max_steps"
    )


@pytest.mark.parametrize(
    ("examples", "group_size", "batch_size"), [(600, 32, 32), (600, 12, 12), (20_000, 12, 24), (9, 4, 16)]
)
def test_the_batch_size_is_a_multiple_of_the_group_size(examples: int, group_size: int, batch_size: int) -> None:
    defaults, reason = finetune_defaults("embed", examples, random_init=False, group_size=group_size)
    assert defaults.train.batch_size == batch_size
    assert f"batches of {batch_size}," in training_summary(defaults, reason, ())
    check_batch_groups(defaults.train, group_size)
    message = (
        f"^train.batch_size is {batch_size + 1}, but an update takes whole groups of {group_size} pairs "
        f".* to {group_size} or"
    )
    with pytest.raises(HeedfulError, match=message):
        check_batch_groups(replace(defaults.train, batch_size=batch_size + 1), group_size)


def test_a_recipe_overrides_defaults_and_assignments_override_both(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("seeds = 3\n[train]\nbatch_size = 7\n[train.optimizer]\nlr = 1e-3\nweight_decay = 0.5\n")
    settings = settings_for("tag", recipe, "train.optimizer.lr=2e-3", "fit.patience=4")
    defaults, _ = finetune_defaults("tag", 600, random_init=False)
    assert settings == overlay(
        defaults,
        {
            "seeds": 3,
            "train": {"batch_size": 7, "optimizer": {"lr": 2e-3, "weight_decay": 0.5}},
            "fit": {"patience": 4},
        },
        source="",
    )
    assert settings.train.epochs == 8.0, "the default"
    json_recipe = tmp_path / "mine.json"
    json_recipe.write_text('{"seeds": 3, "train": {"batch_size": 7, "optimizer": {"lr": 1e-3, "weight_decay": 0.5}}}')
    assert settings_for("tag", json_recipe, "train.optimizer.lr=2e-3", "fit.patience=4") == settings


def test_a_time_budget_replaces_the_default_epochs() -> None:
    train = settings_for("tag", None, "train.time_budget=2").train
    assert train.epochs is None
    assert train.time_budget == 2.0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_bundled_recipe_begins_with_a_description(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    first_line = text.partition("\n")[0]
    assert first_line.startswith("# ")
    assert first_line.endswith((".", ")"))
    assert re.search(r"^\[|^\w+ = ", text, re.MULTILINE), "a table or a setting"


@pytest.mark.parametrize("task", SPECS)
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_bundled_recipe_applies_to_each_task(path: Path, task: str) -> None:
    defaults, _ = finetune_defaults(task, 600, random_init=False)
    settings = settings_for(task, path)
    assert settings != defaults
    assert from_mapping(FinetuneSettings, tomllib.loads(to_toml(settings)), source="") == settings
    tables = to_mapping(settings)
    for table_name, table in load_mapping(path).items():
        if isinstance(table, dict):
            for name, value in table.items():
                resolved = tables[table_name][name]
                if isinstance(value, dict):
                    assert value.items() <= resolved.items()
                else:
                    assert resolved == value


def test_the_recipe_of_the_paper_has_its_settings() -> None:
    (path,) = (path for path in RECIPES if path.stem == "paper")
    train = settings_for("classify", path).train
    assert train.epochs == 3.0
    assert train.batch_size == 32
    assert train.schedule == DecayFromStart(warmup_ratio=0.1)
    assert train.optimizer == AdamW.without_bias_correction(3e-5)


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["train.optimiser.lr=1"], 'train.optimiser.lr is not a setting (did you mean "train.optimizer.lr"?)'),
        (["sede=3"], 'sede is not a setting (did you mean "seeds"?)'),
        (["seeds=0"], "seeds is 0; expected a whole number from 1"),
        (["seeds=two"], 'seeds is "two", expected a whole number'),
        (["train.batch_size=1.5"], "train.batch_size is 1.5, expected a whole number"),
        (["train.epochs=few"], 'train.epochs is "few", expected a number or "none"'),
        (["train.time_budget=soon"], 'time_budget is "soon"; expected a duration'),
        (["train.epochs=3", "max_steps=5"], "train.epochs=3 and max_steps=5 are given: give one of"),
        (["train.epochs=none"], "none of epochs, max_steps and time_budget is given"),
        (["max_length=7"], "max_length is 7; expected a number of tokens from 8"),
        (["init.kind=scratch", "init.width=100"], "init.width is 100; expected a multiple of 32"),
        (["init.kind=scratch", "init.layers=0"], "init.layers is 0; expected a whole number from 1"),
        (["init.kind=classic", "init.width=64"], 'init.width is for init.kind = "scratch"'),
        (["init.width=64"], 'init.width is for init.kind = "scratch" or init.kind = "transformer"'),
        (["init.kind=classic", "init.words.vectors=v.txt", "init.words.width=7"], "width conflicts with vectors"),
        (["init.model="], 'init.model is ""; give a folder or NAME[@REVISION]'),
        (
            ["init.kind=transformer", "init.dropout=1"],
            "init.dropout is 1.0; expected a number from 0 to below 1",
        ),
        (["reinit_layers=-1"], "init.reinit_layers is -1; expected a whole number from 0"),
        (["task.kind=regress"], 'task.kind is "regress", but the task, classify, and its data decide it'),
        (["task.class_wieght=balanced"], 'task.class_wieght is not a setting (did you mean "task.class_weight"?)'),
        (["task.thresholds=best"], 'task.thresholds is "best", expected a number or "tuned"'),
        (["data.dev_fraction=1"], "data.dev_fraction is 1.0, expected a share from 0 up to 1"),
        (["long"], '"long" is not of the form name=value'),
        (["seeds=2", "seeds=3"], "seeds=2 and seeds=3 both set seeds"),
    ],
)
def test_wrong_assignments_are_refused(assignments: list[str], message: str) -> None:
    with pytest.raises(HeedfulError, match=re.escape(message)):
        preview("classify", *assignments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[train]\nbatchsize = 3", "mine.toml: train.batchsize is not a setting"),
        ("[trian]\nbatch = 3", 'mine.toml: trian.batch is not a setting (did you mean "train.batch_size"?)'),
        ("seeds = '3'", 'mine.toml: seeds is "3", expected a whole number'),
        ("seeds = 3\nseeds = 4", "mine.toml: is not TOML"),
        ("a = " + "[" * 10_000, "mine.toml: is nested more than 100 deep"),
        ("# " + "x" * 1_000_000, "mine.toml: is larger than 1 MB"),
        ("[train]\nrate = nan", "mine.toml: train.rate is nan, expected a finite number"),
    ],
)
def test_the_error_for_a_wrong_recipe_names_file_and_setting(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(HeedfulError, match=re.escape(message)) as caught:
        preview("classify", recipe=path)
    assert str(caught.value).startswith(str(path))


def test_missing_recipes_and_unknown_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match=r"no\.toml: there is no such file"):
        preview("classify", recipe=tmp_path / "no.toml")
    with pytest.raises(
        HeedfulError, match=r'"clasify" is not a task \(did you mean "classify"\?\): use one of classify, '
    ):
        preview("clasify")


def test_multi_label_classification_is_not_a_task_of_its_own() -> None:
    with pytest.raises(HeedfulError, match='"multiple" is not a task of its own'):
        preview("multiple")
    assert set(task_names()) == set(SPECS) - {"multiple"}


def test_classify_accepts_settings_of_multi_label_tasks_until_the_data_are_read() -> None:
    assignment = "task.thresholds=tuned"
    assert preview("classify", assignment).task == MultiLabelSettings(thresholds="tuned")
    with pytest.raises(HeedfulError, match=r"task\.thresholds is for task\.kind = .multiple."):
        settings_for("classify", None, assignment)  # with data that have one label per text
    with pytest.raises(HeedfulError, match=r"task\.thresholds is for task\.kind = .multiple."):
        preview("tag", assignment)


@pytest.mark.parametrize("arguments", [{"group_size": 1}, {"scale": 0.0}])
def test_settings_of_a_task_are_checked(arguments: dict[str, Any]) -> None:
    with pytest.raises(HeedfulError, match=r"expected"):
        EmbedSettings(**arguments)


@pytest.mark.parametrize("task", SPECS)
@pytest.mark.parametrize(
    "assignments",
    [
        (),
        ("max_length=64", 'data.columns={text = ["a", 2]}', "train.optimizer.max_grad_norm=none", "seeds=2"),
        ('init.model=a/"b"/ü 🦊', "data.delimiter=;", "train.schedule={kind = 'cosine'}"),
    ],
    ids=["defaults", "none and numbers", "unusual texts"],
)
def test_settings_are_written_to_toml_and_read_again(task: str, assignments: tuple[str, ...], tmp_path: Path) -> None:
    settings = settings_for(task, None, *assignments)
    path = tmp_path / "settings.toml"
    path.write_text(to_toml(settings), encoding="utf-8")
    assert from_file(FinetuneSettings, path) == settings


def test_a_run_whose_settings_have_name_and_revision_separately_can_be_resumed(tmp_path: Path) -> None:
    separate, joined = 'model = "org/name"\nrevision = "v1"', 'model = "org/name@v1"\nrevision = ""'
    finetune_settings = settings_for("tag", None, "init.model=org/name@v1")
    with_student = preview_distil_settings(distil_overrides("t", student="org/name@v1"))
    (tmp_path / "checkpoints").mkdir()
    for settings in (finetune_settings, with_student):
        assert joined in to_toml(settings)
        (tmp_path / "settings.toml").write_text(to_toml(settings).replace(joined, separate))
        assert can_resume(tmp_path, settings)


@pytest.mark.parametrize(
    ("model", "model_with_revision", "revision"),
    [("a@v1", "a@v2", ""), ("folder", "folder", "v2"), (BUNDLED_ENCODER, BUNDLED_ENCODER, "v2")],
)
def test_a_revision_becomes_a_part_of_a_name_on_the_hub(
    model: str, model_with_revision: str, revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    init = settings_for("tag", None, f"init.model={model}", "init.revision=v2").init
    assert init.model == model_with_revision
    assert init.revision == revision


def test_a_recipe_may_have_the_revision_of_an_assigned_model(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('init.revision = "v1"\n')
    assert settings_for("tag", recipe, "init.model=a").init.model == "a@v1"


def test_the_settings_import_neither_torch_nor_other_large_packages() -> None:
    code = "import sys, heedful.runs.finetune.settings; print({'torch', 'pyarrow', 'tokenizers'} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "set()\n"


@pytest.mark.parametrize("module", [fit, trainer, optim])
def test_settings_of_training_can_be_imported_from_the_modules_that_use_them(module: ModuleType) -> None:
    names = [name for name in module.__all__ if hasattr(train_settings, name)]
    assert names
    for name in names:
        assert getattr(module, name) is getattr(train_settings, name)


def test_a_flag_and_an_assignment_cannot_set_the_same_setting() -> None:
    with pytest.raises(SettingError, match=r"^--model a and init\.model=b both set init\.model:") as caught:
        plan_finetune("classify", "none.csv", model="a", assignments=["seeds=2", "init.model=b"])
    assert caught.value.code == "duplicate"
    assert caught.value.path == "init.model"


def test_assignments_cannot_replace_the_settings_that_a_named_student_decides() -> None:
    assignments = ["student.teacher_layers=[0, 2, 4]", "student.family=bert"]
    settings = preview_distil_settings(distil_overrides("t", student="layers=3", assignments=assignments))
    assert settings.student == LayersStudent(layers=3, teacher_layers=(0, 2, 4), family="bert")
    for student, assignment in (("layers=3", "student.layers=2"), ("bag", "student = {kind = 'size'}")):
        overrides = distil_overrides("t", student=student, assignments=[assignment])
        with pytest.raises(SettingError, match=f"^--student {student} and {re.escape(assignment)} both set"):
            check_overrides(overrides)
