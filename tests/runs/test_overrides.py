"""Overrides: full paths and short names, one value for each setting, errors that name the setting and its source."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from heedful.data import DataSettings
from heedful.errors import HeedfulError, SettingError
from heedful.runs.finetune.plan import plan_finetune
from heedful.runs.finetune.settings import FinetuneSettings, finetune_defaults
from heedful.runs.overrides import Overrides, Resolved
from heedful.runs.pretrain.settings import resolve_pretrain
from heedful.train.settings import Cosine, TrainSettings

DEFAULTS = finetune_defaults("classify", 600, random_init=False)[0]
LR = "train.optimizer.lr"


def resolve(**arguments: Any) -> Resolved[FinetuneSettings]:
    """Resolve the overrides with these arguments."""
    return Overrides(**arguments).resolve(DEFAULTS)


def refused(code: str, **arguments: Any) -> SettingError:
    """Return the error that `resolve` raises for these arguments, after checking its code."""
    with pytest.raises(SettingError) as raised:
        resolve(**arguments)
    assert raised.value.code == code
    return raised.value


@pytest.mark.parametrize("name", ["lr", "optimizer.lr", LR])
@pytest.mark.parametrize("argument", ["assignments", "values", "recipe", "flags"])
def test_a_setting_is_given_by_any_unique_end_of_its_path(name: str, argument: str) -> None:
    arguments: dict[str, Any] = {
        "assignments": [f"{name}=0.5"],
        "values": {name: 0.5},
        "recipe": {name: 0.5},
        "flags": {"--lr 0.5": {name: 0.5}},
    }
    resolved = resolve(**{argument: arguments[argument]})
    assert resolved.settings.train.optimizer.lr == 0.5
    assert list(resolved.sources) == [LR]
    optimizer = replace(DEFAULTS.train.optimizer, lr=0.5)
    assert resolved.settings == replace(DEFAULTS, train=replace(DEFAULTS.train, optimizer=optimizer))


def test_columns_are_given_without_the_table_in_front_of_them() -> None:
    assert resolve(assignments=["columns.text=my text"]).settings.data.columns == {"text": "my text"}
    assert Overrides(assignments=["columns.text=3"]).resolve(DataSettings()).settings.columns == {"text": 3}


def test_an_ambiguous_name_is_refused_with_all_full_paths() -> None:
    error = refused("ambiguous", assignments=["seed=3"])
    assert error.path == "seed"
    assert set(error.candidates) == {"data.seed", "train.seed"}
    assert all(path in str(error) for path in error.candidates)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    width: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    width: int = 2
    inner: Inner = Inner()


def test_a_full_path_wins_over_short_names() -> None:
    """`width` is a full path of `Outer`, and also the last component of `inner.width`."""
    assert Overrides(assignments=["width=3"]).resolve(Outer()).settings == Outer(width=3)
    assert Overrides(assignments=["inner.width=3"]).resolve(Outer()).settings == Outer(inner=Inner(width=3))


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
    resolved = resolve(values={"learning_rate": 0.5})
    assert resolved.settings.train.optimizer.lr == 0.5
    assert resolved.renamed == {"learning_rate": LR}
    assert refused("duplicate", values={"learning_rate": 0.5, "lr": 0.5}).path == LR
    assert refused("unknown", values={"learning_rat": 0.5}).candidates == (LR,)


@pytest.mark.parametrize(
    ("arguments", "path", "sources"),
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
def test_a_setting_given_twice_is_refused(arguments: dict[str, Any], path: str, sources: tuple[str, ...]) -> None:
    error = refused("duplicate", **arguments)
    assert error.path == path
    assert all(source in str(error) for source in sources)


def test_layers_lie_over_one_another(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        "seeds = 2\n[train]\nbatch_size = 2\nseed = 2\nschedule = { kind = 'cosine', min_lr_ratio = 0.5 }\n"
    )
    resolved = resolve(
        recipe=recipe,
        presets={"--preset": {"train": {"batch_size": 3, "seed": 3}}},
        assignments=["train.seed=4", "warmup_ratio=0.25"],
    )
    train = resolved.settings.train
    assert resolved.settings.seeds == 2, "as in the recipe"
    assert train.batch_size == 3, "as in the preset, over the recipe"
    assert train.seed == 4, "as in the assignment, over the preset and the recipe"
    assert train.schedule == Cosine(warmup_ratio=0.25, min_lr_ratio=0.5), "from the assignment and the recipe"
    assert resolved.has("train.schedule")
    assert resolved.has("seeds")
    assert not resolved.has("fit")
    sources = {str(recipe), "--preset", "train.seed=4", "warmup_ratio=0.25"}
    assert set(resolved.sources.values()) == sources


def test_another_kind_starts_its_table_anew_and_order_does_not_matter() -> None:
    kind, min_lr_ratio = "train.schedule.kind=cosine", "min_lr_ratio=0.5"
    for assignments in ([kind, min_lr_ratio], [min_lr_ratio, kind]):
        assert resolve(assignments=assignments).settings.train.schedule == Cosine(min_lr_ratio=0.5)
    mixed = resolve(flags={"--schedule cosine": {"train.schedule.kind": "cosine"}}, assignments=[min_lr_ratio])
    assert mixed.settings.train.schedule == Cosine(min_lr_ratio=0.5)


def test_a_refused_value_is_reported_with_its_path_and_its_source(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("[train]\nbatch_size = 0.5\n")
    error = refused("invalid", recipe=recipe, assignments=["seeds=2"])
    assert (error.path, error.source) == ("train.batch_size", str(recipe))
    assert str(error).startswith(f"{recipe}: train.batch_size")
    error = refused("invalid", flags={"--seeds none": {"seeds": None}})
    assert (error.path, error.source) == ("seeds", "--seeds none")


@pytest.mark.parametrize("assignments", [("epochs=0", "lr=0.1"), ("lr=0.1", "epochs=0")])
def test_a_value_that_its_table_refuses_is_reported_with_its_own_source(assignments: tuple[str, ...]) -> None:
    error = refused("invalid", assignments=assignments)
    assert (error.path, error.source) == ("train.epochs", "epochs=0")
    assert str(error).startswith("epochs=0: train.epochs is 0")


def test_python_values_may_be_dataclasses_paths_and_nested_tables() -> None:
    train = replace(DEFAULTS.train, batch_size=7)
    assert resolve(values={"train": train}).settings.train == train
    assert resolve(values={"train": {"batch_size": 7}}).settings.train.batch_size == 7
    assert resolve(values={"init.model": Path("a")}).settings.init.model == "a"
    values = {"train": TrainSettings(epochs=1.0, batch_size=7), "fit": {"patience": -1}}
    assert refused("invalid", values=values).path == "fit.patience"


@pytest.mark.parametrize(
    ("arguments", "epochs", "max_steps", "time_budget"),
    [
        ({}, DEFAULTS.train.epochs, None, None),
        ({"recipe": {"train": {"max_steps": 7}}}, None, 7, None),
        ({"recipe": {"train": {"max_steps": 7}}, "assignments": ["epochs=2"]}, 2.0, None, None),
        ({"recipe": {"train": {"max_steps": 7}}, "values": {"time_budget": "1h30m"}}, None, None, 90.0),
        ({"recipe": {"train": {"max_steps": 7}}, "flags": {"--x 5": {"train.time_budget": 5}}}, None, None, 5.0),
        ({"recipe": {"train": {"epochs": "none", "max_steps": 7, "time_budget": "none"}}}, None, 7, None),
        ({"values": {"train": TrainSettings(time_budget=2.0)}}, None, None, 2.0),
    ],
)
def test_a_duration_replaces_the_duration_of_lower_layers(
    arguments: dict[str, Any], epochs: float | None, max_steps: int | None, time_budget: float | None
) -> None:
    resolved = resolve(**arguments)
    train = resolved.settings.train
    assert (train.epochs, train.max_steps, train.time_budget) == (epochs, max_steps, time_budget)
    durations = {"train.epochs": epochs, "train.max_steps": max_steps, "train.time_budget": time_budget}
    given_paths = {path for path in durations if resolved.has(path)}
    set_paths = {path for path, value in durations.items() if value is not None}
    assert given_paths == (set_paths if arguments else set())


def test_a_duration_in_with_values_replaces_the_others() -> None:
    overrides = Overrides(assignments=["epochs=2"]).with_values({"max_steps": 3})
    train = overrides.resolve(DEFAULTS).settings.train
    assert (train.epochs, train.max_steps) == (None, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"recipe": {"train": {"epochs": 2, "max_steps": 7}}}, "recipe: train.epochs and train.max_steps are given"),
        ({"assignments": ["epochs=2", "max_steps=7"]}, "epochs=2 and max_steps=7 are given"),
        ({"assignments": ["epochs=2"], "values": {"time_budget": 7}}, "epochs=2 and time_budget=7 are given"),
        ({"assignments": ["train={epochs=2, max_steps=7}"]}, "train.epochs and train.max_steps are given"),
    ],
)
def test_two_durations_from_one_source_are_refused(arguments: dict[str, Any], message: str) -> None:
    error = refused("duplicate", **arguments)
    assert message in str(error)
    assert "give one of train.epochs, train.max_steps, train.time_budget" in str(error)


def test_the_same_defaults_are_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = []

    def from_mapping(cls: type, table: Any, source: Any) -> FinetuneSettings:
        classes.append(cls)
        return DEFAULTS

    monkeypatch.setattr("heedful.runs.overrides.from_mapping", from_mapping)
    overrides = Overrides(values={"lr": 0.5})
    for _ in range(3):
        overrides.resolve(DEFAULTS)
    assert classes == [FinetuneSettings]


def test_with_values_may_repeat_a_setting() -> None:
    overrides = Overrides(assignments=["seeds=3"])
    assert overrides.with_values({"seeds": 1}).resolve(DEFAULTS).settings.seeds == 1
    assert overrides.resolve(DEFAULTS).settings.seeds == 3, "the overrides themselves have not changed"


def test_python_functions_take_overrides(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\n" + "".join(f"text {n},{'ab'[n % 2]}\n" for n in range(40)))
    plan = plan_finetune("classify", tmp_path / "a.csv", overrides={"lr": 0.5, "train": {"batch_size": 7}})
    assert (plan.settings.train.optimizer.lr, plan.settings.train.batch_size) == (0.5, 7)
    assert resolve_pretrain(["a"], overrides={"batch_size": 7}).train.batch_size == 7
    with pytest.raises(HeedfulError, match=r"both set init\.model"):
        plan_finetune("classify", tmp_path / "a.csv", model="a", overrides={"init.model": "b"})


def test_no_heavy_library_is_imported() -> None:
    code = "import sys, heedful.runs.overrides; print({'torch', 'pyarrow', 'pydantic'} & set(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout == "set()\n"


def test_a_setting_of_another_kind_is_refused_with_the_kinds_that_have_it() -> None:
    for path, kinds in (("train.schedule.min_lr_ratio", ("cosine",)), ("init.layers", ("scratch", "transformer"))):
        error = refused("unknown", assignments=[f"{path}=1"])
        assert error.path == path
        table = path.rpartition(".")[0]
        assert all(f'{table}.kind = "{kind}"' in str(error) for kind in kinds)
