"""Templates of recipes: every setting is a line, commented out, with its default and its meaning."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from heedful.cli import main
from heedful.errors import HeedfulError
from heedful.runs.overrides import Overrides
from heedful.runs.recipe_template import recipe_template, template_names, template_settings
from heedful.runs.settings_schema import describe_settings
from heedful.settings import to_mapping

COMMENTED_OUT = re.compile(r"^#(?=\w)", re.MULTILINE)  # the "#" of a line with a setting; other comments have a space


def leaf_paths(table: dict[str, object], prefix: str = "") -> list[str]:
    """Return the path of each value in nested tables that is not itself a table with values."""
    paths = []
    for key, value in table.items():
        if isinstance(value, dict) and value:
            paths += leaf_paths(value, f"{prefix}{key}.")
        else:
            paths.append(prefix + key)
    return paths


@pytest.mark.parametrize("name", template_names())
def test_uncommenting_every_line_gives_the_defaults_back(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_text(COMMENTED_OUT.sub("", recipe_template(name)), encoding="utf-8")
    defaults = template_settings(name)
    assert Overrides(recipe=recipe).resolve(defaults).settings == defaults
    recipe_paths = leaf_paths(tomllib.loads(recipe.read_text()))
    assert sorted(recipe_paths) == sorted(leaf_paths(to_mapping(defaults))), "every setting is in the template"


@pytest.mark.parametrize("name", template_names())
def test_as_it_is_printed_it_changes_nothing(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "run.toml"
    recipe.write_text(recipe_template(name), encoding="utf-8")
    resolved = Overrides(recipe=recipe).resolve(template_settings(name))
    assert resolved.settings == template_settings(name)


@pytest.mark.parametrize("name", template_names())
def test_every_line_has_a_meaning(name: str) -> None:
    lines = [line for line in recipe_template(name).splitlines() if COMMENTED_OUT.match(line)]
    assert len(lines) > 30
    assert [line for line in lines if "  # " not in line] == []


def test_one_line_that_is_uncommented_is_set(tmp_path: Path) -> None:
    text = recipe_template("classify")
    assert "\n#weight_decay = 0.01  # " in text
    recipe = tmp_path / "run.toml"
    recipe.write_text(text.replace("\n#weight_decay = 0.01", "\nweight_decay = 0.5"))
    resolved = Overrides(recipe=recipe).resolve(template_settings("classify"))
    assert resolved.settings.train.optimizer.weight_decay == 0.5
    optimizer_paths = [path for path in resolved.sources if path.startswith("train.optimizer.")]
    assert optimizer_paths == ["train.optimizer.weight_decay"]


def test_other_kinds_are_named_with_their_settings() -> None:
    assert '# with kind = "cosine": warmup_ratio, min_lr_ratio' in recipe_template("classify")


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["init", "text-classification"])
    assert stop.value.code in (0, None)
    assert "[train.optimizer]" in capsys.readouterr().out
    with pytest.raises(HeedfulError, match="is not a task"):
        recipe_template("clasify")


def test_every_setting_of_a_run_has_a_meaning() -> None:
    from heedful.runs.distil.settings import DistilSettings, MaskedDistilSettings
    from heedful.runs.finetune.settings import FinetuneSettings
    from heedful.runs.pretrain.settings import PretrainSettings
    from heedful.serve.settings import ServeSettings
    from heedful.tokenizer.settings import TokenizerSettings

    classes = (
        FinetuneSettings,
        PretrainSettings,
        DistilSettings,
        MaskedDistilSettings,
        ServeSettings,
        TokenizerSettings,
    )
    settings = [setting for cls in classes for setting in describe_settings(cls)]
    without_doc = {f"{setting.owner.__name__}.{setting.name}" for setting in settings if not setting.doc}
    assert not without_doc
