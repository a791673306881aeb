"""Settings of a run: defaults by the data, a recipe over them, assignments over both; wrong ones are refused."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from heedful.bundled import BUNDLED_ENCODER
from heedful.errors import HeedfulError, SettingError
from heedful.runs.distil import settings as distil_settings
from heedful.runs.distil.settings import LayersStudent
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
from heedful.train import fit, optim, settings, trainer
from heedful.train.settings import AdamW, DecayFromStart

ROOT = Path(__file__).parents[3]
RECIPES = sorted(path for path in Path(str(files("heedful") / "assets" / "recipes")).iterdir() if "-" not in path.stem)


def wished(task: str = "classify", recipe: Path | None = None, *assignments: str, examples: int = 600) -> Any:
    """What a run of so many examples has."""
    overrides = finetune_overrides(recipe=recipe, assignments=assignments)
    return resolve_finetune(overrides, finetune_defaults(task, examples, random_init=False)[0]).settings


def early(task: str, *assignments: str, recipe: Path | None = None) -> FinetuneSettings:
    """What is known before the data are read."""
    return preview_settings(task, finetune_overrides(recipe=recipe, assignments=assignments))


@pytest.mark.parametrize(
    ("examples", "epochs", "batch", "evaluate"),
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
def test_defaults_follow_from_the_size(examples: int, epochs: int, batch: int, evaluate: float) -> None:
    settings, why = finetune_defaults("classify", examples, random_init=False)
    assert (settings.train.epochs, settings.train.batch_size, settings.fit.eval_every_epochs) == (
        epochs,
        batch,
        evaluate,
    )
    assert settings.train.optimizer.lr == 5e-5
    encoder = "a trained model 768 wide"
    message = f"defaults for {examples:,} examples and {encoder}: {epochs} epochs, batches of {batch}, lr 5e-05"
    assert training_summary(settings, why) == message
    for width, rate in ((256, 2e-4), (384, 1e-4), (1024, 4e-5)):
        assert finetune_defaults("classify", examples, random_init=False, width=width)[0].train.optimizer.lr == rate
    fresh, why = finetune_defaults("classify", examples, random_init=True)
    assert fresh.train.epochs == settings.train.epochs and fresh.train.optimizer.lr == 5e-4
    assert "a fresh encoder" in why


@pytest.mark.parametrize(("examples", "epochs"), [(499, 15), (2_000, 6), (14_041, 6), (50_000, 2)])
def test_tagging_has_more_epochs_from_2000_sentences_on(examples: int, epochs: int) -> None:
    defaults, why = finetune_defaults("tag", examples, random_init=False)
    assert defaults.train.epochs == epochs and " characters" not in why


@pytest.mark.parametrize(
    ("examples", "characters", "epochs"),
    [
        (400, 400 * 500, 15),  # short texts: by their number
        (400, 400 * 12_000, 4),  # mails of 3,000 tokens, as 9,375 examples
        (25_000, 25_000 * 1_300, 2),
        (25_000, 25_000 * 80, 4),
        (3, 10**9, 1),
    ],
)
def test_long_texts_have_fewer_epochs(examples: int, characters: int, epochs: int) -> None:
    defaults, why = finetune_defaults("classify", examples, random_init=False, characters=characters)
    assert defaults.train.epochs == epochs
    by_number, _ = finetune_defaults("classify", examples, random_init=False)
    assert (f" of {characters:,} characters " in why) == (defaults.train.epochs != by_number.train.epochs)
    assert defaults.train.batch_size == by_number.train.batch_size


def test_what_was_set_by_hand_is_said(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[train]\nbatch_size = 7\n[train.optimizer]\nlr = 1e-3\n")
    overrides = finetune_overrides(recipe=recipe, assignments=["train.max_steps=9", "train.batch_size=5"])
    usual, why = finetune_defaults("classify", 600, random_init=True)
    resolved = resolve_finetune(overrides, usual)
    assert training_summary(resolved.settings, why, tuple(resolved.sources)) == (
        "defaults for 600 examples and a fresh encoder: 9 steps, batches of 5, lr 0.001; "
        "set by hand: train.batch_size, train.optimizer.lr, train.max_steps"
    )


@pytest.mark.parametrize(
    ("examples", "together", "batch"), [(600, 32, 32), (600, 12, 12), (20_000, 12, 24), (9, 4, 16)]
)
def test_a_batch_has_whole_groups(examples: int, together: int, batch: int) -> None:
    defaults, why = finetune_defaults("embed", examples, random_init=False, group_size=together)
    assert defaults.train.batch_size == batch and f"batches of {batch}," in training_summary(defaults, why, ())
    check_batch_groups(defaults.train, together)
    message = (
        f"^train.batch_size is {batch + 1}, but an update takes whole groups of {together} pairs .* to {together} or"
    )
    with pytest.raises(HeedfulError, match=message):
        check_batch_groups(replace(defaults.train, batch_size=batch + 1), together)


def test_a_recipe_goes_over_defaults_and_assignments_over_both(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("seeds = 3\n[train]\nbatch_size = 7\n[train.optimizer]\nlr = 1e-3\nweight_decay = 0.5\n")
    settings = wished("tag", recipe, "train.optimizer.lr=2e-3", "fit.patience=4")
    assert settings == overlay(
        finetune_defaults("tag", 600, random_init=False)[0],
        {
            "seeds": 3,
            "train": {"batch_size": 7, "optimizer": {"lr": 2e-3, "weight_decay": 0.5}},
            "fit": {"patience": 4},
        },
        source="",
    )
    assert settings.train.epochs == 8.0, "what nobody set follows from the size"
    as_json = tmp_path / "mine.json"
    as_json.write_text('{"seeds": 3, "train": {"batch_size": 7, "optimizer": {"lr": 1e-3, "weight_decay": 0.5}}}')
    assert wished("tag", as_json, "train.optimizer.lr=2e-3", "fit.patience=4") == settings
    other = wished("tag", recipe, "train.time_budget=2")
    assert (other.train.epochs, other.train.time_budget) == (None, 2.0)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_that_ships_resolves(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ") and text.partition("\n")[0].endswith((".", ")"))
    assert re.search(r"^\[|^\w+ = ", text, re.MULTILINE)
    for task in SPECS:
        plain = finetune_defaults(task, 600, random_init=False)[0]
        settings = wished(task, path)
        assert (
            settings != plain
            and from_mapping(FinetuneSettings, tomllib.loads(to_toml(settings)), source="") == settings
        )
        flat = to_mapping(settings)
        for table, value in load_mapping(path).items():  # all of it has arrived
            for name, each in value.items() if isinstance(value, dict) else ():
                kept = flat[table][name]
                assert kept == each or (isinstance(each, dict) and each.items() <= kept.items())


def test_the_published_recipe_is_the_published_one() -> None:
    (path,) = (path for path in RECIPES if path.stem == "paper")
    settings = wished("classify", path).train
    assert (
        settings.epochs == 3.0 and settings.batch_size == 32 and settings.schedule == DecayFromStart(warmup_ratio=0.1)
    )
    assert settings.optimizer == AdamW.without_bias_correction(3e-5)


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
        early("classify", *assignments)


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
def test_wrong_recipes_are_refused_by_file_and_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(HeedfulError, match=re.escape(message)) as raised:
        early("classify", recipe=path)
    assert str(raised.value).startswith(str(path))


def test_a_recipe_that_is_not_there_and_a_task_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match=r"no\.toml: there is no such file"):
        early("classify", recipe=tmp_path / "no.toml")
    with pytest.raises(
        HeedfulError, match=r'"clasify" is not a task \(did you mean "classify"\?\): use one of classify, '
    ):
        early("clasify")
    with pytest.raises(HeedfulError, match='"multiple" is not a task of its own'):
        early("multiple")
    assert set(task_names()) == set(SPECS) - {"multiple"}, "which classify finds out by itself"


def test_classify_takes_settings_of_many_labels_before_it_has_seen_the_data() -> None:
    assignment = "task.thresholds=tuned"
    assert early("classify", assignment).task == MultiLabelSettings(thresholds="tuned")
    with pytest.raises(HeedfulError, match=r"task\.thresholds is for task\.kind = .multiple."):
        wished("classify", None, assignment)  # one label, as it turned out
    with pytest.raises(HeedfulError, match=r"task\.thresholds is for task\.kind = .multiple."):
        early("tag", assignment)


@pytest.mark.parametrize("arguments", [{"group_size": 1}, {"scale": 0.0}])
def test_settings_of_a_task_are_checked(arguments: dict[str, Any]) -> None:
    with pytest.raises(HeedfulError, match=r"expected"):
        EmbedSettings(**arguments)


@pytest.mark.parametrize("task", SPECS)
def test_resolved_settings_come_back_from_toml(task: str, tmp_path: Path) -> None:
    for resolved in (
        finetune_defaults(task, 700, random_init=True)[0],
        wished(
            task,
            None,
            "max_length=64",
            'data.columns={text = ["a", 2]}',
            "train.optimizer.max_grad_norm=none",
            "seeds=2",
        ),
        wished(task, None, 'init.model=a/"b"/ü 🦊', "data.delimiter=;", "train.schedule={kind = 'cosine'}"),
    ):
        path = tmp_path / "settings.toml"
        path.write_text(to_toml(resolved), encoding="utf-8")
        assert from_file(FinetuneSettings, path) == resolved


def test_a_run_from_the_hub_goes_on_whose_revision_was_saved_beside_the_name(tmp_path: Path) -> None:
    apart, joined = 'model = "org/name"\nrevision = "v1"', 'model = "org/name@v1"\nrevision = ""'
    student = distil_settings.preview_distil_settings(distil_settings.distil_overrides("t", student="org/name@v1"))
    for wishes in (wished("tag", None, "init.model=org/name@v1"), student):
        assert joined in to_toml(wishes)
        (tmp_path / "settings.toml").write_text(to_toml(wishes).replace(joined, apart))
        (tmp_path / "checkpoints").mkdir(exist_ok=True)
        assert can_resume(tmp_path, wishes)


def test_a_revision_is_of_a_name_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    apart = [(model, (model, "v2")) for model in ("here", BUNDLED_ENCODER)]
    for model, named in (("a@v1", ("a@v2", "")), *apart):
        settings = wished("tag", None, f"init.model={model}", "init.revision=v2").init
        assert (settings.model, settings.revision) == named
    recipe = tmp_path / "mine.toml"
    recipe.write_text('init.revision = "v1"\n')
    assert wished("tag", recipe, "init.model=a").init.model == "a@v1"


def test_settings_import_no_torch_and_keep_their_old_names() -> None:
    code = "import sys, heedful.runs.finetune.settings; print({'torch', 'pyarrow', 'tokenizers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
    for module in (fit, trainer, optim):
        names = [name for name in module.__all__ if hasattr(settings, name)]
        assert names and all(getattr(module, name) is getattr(settings, name) for name in names)


def test_a_flag_and_an_assignment_cannot_set_the_same() -> None:
    with pytest.raises(SettingError, match=r"^--model a and init\.model=b both set init\.model:") as caught:
        plan_finetune("classify", "none.csv", model="a", assignments=["seeds=2", "init.model=b"])
    assert (caught.value.code, caught.value.path) == ("duplicate", "init.model")
    others = ["student.teacher_layers=[0, 2, 4]", "student.family=bert"]
    overrides = distil_settings.distil_overrides("t", student="layers=3", assignments=others)
    assert distil_settings.preview_distil_settings(overrides).student == LayersStudent(
        teacher_layers=(0, 2, 4), family="bert"
    )
    for student, setting in (("layers=3", "student.layers=2"), ("bag", "student = {kind = 'size'}")):
        overrides = distil_settings.distil_overrides("t", student=student, assignments=[setting])
        with pytest.raises(SettingError, match=f"^--student {student} and {re.escape(setting)} both set"):
            distil_settings.check_overrides(overrides)
