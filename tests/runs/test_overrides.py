"""Settings given by hand: full paths and short names, one value for each setting, errors with a class and a path."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from heedful.data import DataSettings
from heedful.errors import HeedfulError, SettingError
from heedful.runs.finetune.plan import plan_finetune
from heedful.runs.finetune.settings import FinetuneSettings, finetune_defaults
from heedful.runs.overrides import Overrides, Resolved
from heedful.runs.pretrain.settings import PretrainSettings
from heedful.runs.pretrain.settings import pretrain_defaults as pretraining
from heedful.runs.pretrain.settings import resolve_pretrain as pretrain_settings
from heedful.train.settings import Cosine, TrainSettings

USUAL = finetune_defaults("classify", 600, random_init=False)[0]
LR = "train.optimizer.lr"


def resolved(**arguments: Any) -> Resolved[FinetuneSettings]:
    return Overrides(**arguments).resolve(USUAL)


def refused(code: str, **arguments: Any) -> SettingError:
    """The error that is raised, which has this code."""
    with pytest.raises(SettingError) as caught:
        resolved(**arguments)
    assert caught.value.code == code
    return caught.value


@pytest.mark.parametrize("name", ["lr", "optimizer.lr", LR])
@pytest.mark.parametrize("how", ["assignments", "values", "recipe", "flags"])
def test_a_setting_is_given_by_any_unique_end_of_its_path(name: str, how: str) -> None:
    arguments: dict[str, Any] = {
        "assignments": [f"{name}=0.5"],
        "values": {name: 0.5},
        "recipe": {name: 0.5},
        "flags": {"--lr 0.5": {name: 0.5}},
    }
    resolved_settings = resolved(**{how: arguments[how]})
    assert resolved_settings.settings.train.optimizer.lr == 0.5 and list(resolved_settings.sources) == [LR]
    assert resolved_settings.settings == replace(USUAL, train=resolved_settings.settings.train), (
        "nothing else has changed"
    )


def test_columns_are_given_without_the_table_in_front_of_them() -> None:
    assert resolved(assignments=["columns.text=my text"]).settings.data.columns == {"text": "my text"}
    assert Overrides(assignments=["columns.text=3"]).resolve(DataSettings()).settings.columns == {"text": 3}


def test_an_ambiguous_name_is_refused_with_all_full_paths() -> None:
    error = refused("ambiguous", assignments=["seed=3"])
    assert error.path == "seed" and set(error.candidates) == {"data.seed", "train.seed"}
    assert all(path in str(error) for path in error.candidates)


def test_a_full_path_wins_over_short_names() -> None:
    usual = pretraining("mlm", 256, continued=False)
    resolved_settings = Overrides(assignments=["max_seq_length=64"]).resolve(usual).settings
    assert (
        isinstance(resolved_settings, PretrainSettings)
        and resolved_settings.max_seq_length == 64
        and resolved_settings.pack_length == usual.pack_length
    )


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("lrr", LR),
        ("train.lr", LR),
        ("train.batchsize", "train.batch_size"),
        ("trian.batch", "train.batch_size"),
        ("fit.patince", "fit.patience"),
    ],
)
def test_an_unknown_name_is_refused_with_what_may_have_been_meant(name: str, meant: str) -> None:
    error = refused("unknown", assignments=[f"{name}=1"])
    assert (error.path, error.candidates, error.source) == (name, (meant,), f"{name}=1")


def test_a_foreign_name_is_accepted_and_reported() -> None:
    resolved_settings = resolved(values={"learning_rate": 0.5})
    assert resolved_settings.settings.train.optimizer.lr == 0.5 and resolved_settings.renamed == {"learning_rate": LR}
    assert refused("duplicate", values={"learning_rate": 0.5, "lr": 0.5}).path == LR
    assert refused("unknown", values={"learning_rat": 0.5}).candidates == (LR,)


@pytest.mark.parametrize(
    ("arguments", "path", "texts"),
    [
        ({"flags": {"--lr 1": {LR: 1.0}}, "assignments": ["lr=2"]}, LR, ("--lr 1", "lr=2")),
        ({"assignments": ["seeds=1", "seeds=2"]}, "seeds", ("seeds=1", "seeds=2")),
        (
            {"assignments": ["train={batch_size=3}"], "values": {"batch_size": 4}},
            "train.batch_size",
            ("train=", "batch_size=4"),
        ),
        ({"recipe": {"lr": 1.0, "train": {"optimizer": {"lr": 2.0}}}}, LR, ("recipe",)),
    ],
)
def test_a_setting_given_twice_is_refused(arguments: dict[str, Any], path: str, texts: tuple[str, ...]) -> None:
    error = refused("duplicate", **arguments)
    assert error.path == path and all(text in str(error) for text in texts)


def test_layers_lie_over_one_another(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        "seeds = 2\n[train]\nbatch_size = 2\nseed = 2\nschedule = { kind = 'cosine', min_lr_ratio = 0.5 }\n"
    )
    resolved_settings = resolved(
        recipe=recipe,
        presets={"--preset": {"train": {"batch_size": 3, "seed": 3}}},
        assignments=["train.seed=4", "warmup_ratio=0.25"],
    )
    train = resolved_settings.settings.train
    assert (resolved_settings.settings.seeds, train.batch_size, train.seed) == (2, 3, 4)
    assert train.schedule == Cosine(warmup_ratio=0.25, min_lr_ratio=0.5)
    assert (
        resolved_settings.has("train.schedule") and resolved_settings.has("seeds") and not resolved_settings.has("fit")
    )
    sources = {str(recipe), "--preset", "train.seed=4", "warmup_ratio=0.25"}
    assert set(resolved_settings.sources.values()) == sources, "of the value that counts"


def test_another_kind_starts_its_table_anew_and_order_does_not_matter() -> None:
    settings_args = ["train.schedule.kind=cosine", "min_lr_ratio=0.5"]
    for assignments in (settings_args, settings_args[::-1]):
        assert resolved(assignments=assignments).settings.train.schedule == Cosine(min_lr_ratio=0.5)
    mixed = resolved(flags={"--schedule cosine": {"train.schedule.kind": "cosine"}}, assignments=["min_lr_ratio=0.5"])
    assert mixed.settings.train.schedule == Cosine(min_lr_ratio=0.5)


def test_a_refused_value_is_reported_with_its_path_and_its_source(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[train]\nbatch_size = 0.5\n")
    error = refused("invalid", recipe=recipe, assignments=["seeds=2"])
    assert (error.path, error.source) == ("train.batch_size", str(recipe)) and str(error).startswith(
        f"{recipe}: train.batch_size"
    )
    error = refused("invalid", flags={"--seeds none": {"seeds": None}})
    assert (error.path, error.source) == ("seeds", "--seeds none")


@pytest.mark.parametrize("assignments", [("epochs=0", "lr=0.1"), ("lr=0.1", "epochs=0")])
def test_a_value_that_its_table_refuses_is_reported_with_its_own_source(assignments: tuple[str, ...]) -> None:
    error = refused("invalid", assignments=assignments)
    assert (error.path, error.source) == ("train.epochs", "epochs=0")
    assert str(error).startswith("epochs=0: train.epochs is 0")


def test_python_values_may_be_dataclasses_paths_and_nested_tables() -> None:
    train = replace(USUAL.train, batch_size=7)
    assert resolved(values={"train": train}).settings.train == train
    assert resolved(values={"train": {"batch_size": 7}}).settings.train.batch_size == 7
    assert resolved(values={"init.model": Path("a")}).settings.init.model == "a"
    assert (
        refused("invalid", values={"train": TrainSettings(epochs=1.0, batch_size=7), "fit": {"patience": -1}}).path
        == "fit.patience"
    )


@pytest.mark.parametrize(
    ("arguments", "epochs", "max_steps", "time_budget"),
    [
        ({}, USUAL.train.epochs, None, None),
        ({"recipe": {"train": {"max_steps": 7}}}, None, 7, None),
        ({"recipe": {"train": {"max_steps": 7}}, "assignments": ["epochs=2"]}, 2.0, None, None),
        ({"recipe": {"train": {"max_steps": 7}}, "values": {"time_budget": "1h30m"}}, None, None, 90.0),
        ({"recipe": {"train": {"max_steps": 7}}, "flags": {"--x 5": {"train.time_budget": 5}}}, None, None, 5.0),
        ({"recipe": {"train": {"epochs": "none", "max_steps": 7, "time_budget": "none"}}}, None, 7, None),
        ({"values": {"train": TrainSettings(time_budget=2.0)}}, None, None, 2.0),
    ],
)
def test_a_duration_replaces_that_of_what_it_lies_over(
    arguments: dict[str, Any], epochs: float | None, max_steps: int | None, time_budget: float | None
) -> None:
    resolved = Overrides(**arguments).resolve(USUAL)
    duration = resolved.settings.train
    assert (duration.epochs, duration.max_steps, duration.time_budget) == (epochs, max_steps, time_budget)
    one = {"train.epochs": epochs, "train.max_steps": max_steps, "train.time_budget": time_budget}
    by_hand = {path for path in one if resolved.has(path)}
    assert by_hand == ({path for path, value in one.items() if value is not None} if arguments else set())


def test_a_duration_laid_over_everything_replaces_the_others() -> None:
    overrides = Overrides(assignments=["epochs=2"]).with_values({"max_steps": 3})
    resolved_settings = overrides.resolve(USUAL).settings.train
    assert (resolved_settings.epochs, resolved_settings.max_steps) == (None, 3)


@pytest.mark.parametrize(
    ("arguments", "both"),
    [
        ({"recipe": {"train": {"epochs": 2, "max_steps": 7}}}, "recipe: train.epochs and train.max_steps are given"),
        ({"assignments": ["epochs=2", "max_steps=7"]}, "epochs=2 and max_steps=7 are given"),
        ({"assignments": ["epochs=2"], "values": {"time_budget": 7}}, "epochs=2 and time_budget=7 are given"),
        ({"assignments": ["train={epochs=2, max_steps=7}"]}, "train.epochs and train.max_steps are given"),
    ],
)
def test_two_durations_from_one_source_are_refused(arguments: dict[str, Any], both: str) -> None:
    error = refused("duplicate", **arguments)
    assert both in str(error) and "give one of train.epochs, train.max_steps, train.time_budget" in str(error)


def test_the_same_defaults_are_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("heedful.runs.overrides.from_mapping", lambda cls, data, source: calls.append(cls) or USUAL)
    overrides = Overrides(values={"lr": 0.5})
    for _ in range(3):
        overrides.resolve(USUAL)
    assert calls == [FinetuneSettings]


def test_values_laid_over_everything_may_repeat_a_setting() -> None:
    overrides = Overrides(assignments=["seeds=3"])
    assert overrides.with_values({"seeds": 1}).resolve(USUAL).settings.seeds == 1
    assert overrides.resolve(USUAL).settings.seeds == 3, "which has not changed"


def test_python_functions_take_overrides(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"text {n},{'ab'[n % 2]}\n" for n in range(40)))
    plan = plan_finetune("classify", tmp_path / "a.csv", overrides={"lr": 0.5, "train": {"batch_size": 7}})
    assert (plan.settings.train.optimizer.lr, plan.settings.train.batch_size) == (0.5, 7)
    assert pretrain_settings(["a"], overrides={"batch_size": 7}).train.batch_size == 7
    with pytest.raises(HeedfulError, match=r"both set init\.model"):
        plan_finetune("classify", tmp_path / "a.csv", model="a", overrides={"init.model": "b"})


def test_no_heavy_library_is_imported() -> None:
    code = "import sys, heedful.runs.overrides; print({'torch', 'pyarrow', 'pydantic'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_setting_of_another_kind_is_refused_with_the_kinds_that_have_it() -> None:
    for name, kinds in (("train.schedule.min_lr_ratio", ("cosine",)), ("init.layers", ("scratch", "transformer"))):
        error = refused("unknown", assignments=[f"{name}=1"])
        path = name.rpartition(".")[0]
        assert error.path == name and all(f'{path}.kind = "{kind}"' in str(error) for kind in kinds)
