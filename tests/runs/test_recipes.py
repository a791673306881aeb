"""Recipes and sample data are listed and copied, and nothing is overwritten."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from heedful.bundled import BUNDLED_ENCODER
from heedful.data import read
from heedful.errors import HeedfulError
from heedful.runs.distil.settings import (
    LOSS_PRESETS,
    LayersStudent,
    MaskedDistilSettings,
    check_overrides,
    distil_overrides,
)
from heedful.runs.finetune.init_settings import TransformerInit
from heedful.runs.finetune.settings import preview_settings
from heedful.runs.overrides import Overrides
from heedful.runs.pretrain.settings import resolve_pretrain
from heedful.runs.recipes import SAMPLES, copy_asset, list_assets
from heedful.tasks.specs import SPECS, task_names

ROOT = Path(__file__).parents[2]


RECIPES = [asset.name for asset in list_assets() if asset.name not in SAMPLES]


def test_all_assets_are_listed() -> None:
    assets = list(list_assets())
    names = [asset.name for asset in assets]
    assert names == [*sorted(RECIPES), *SAMPLES]
    assert len(set(names)) == len(names)
    assert {"paper", "stable", "patient", "clock", "lean", "layered", "squad"} <= set(names)
    pretraining = ("bert", "roberta", "albert", "xlnet", "t5", "gpt2", "electra", "domain")
    assert {f"pretrain-{name}" for name in pretraining} <= set(names)
    assert {"distil-distilbert", "translate-small"} <= set(names)
    for asset in assets:
        assert 0 < len(asset.about) < 120
        assert "\n" not in asset.about
    shipped = {path.name for path in (ROOT / "heedful" / "assets").iterdir()}
    assert shipped == {"completion", "recipes", BUNDLED_ENCODER, *SAMPLES}, "all sample data that ships is listed"


@pytest.mark.parametrize("name", RECIPES)
def test_a_copied_recipe_can_be_used_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path, asset = copy_asset(name)
    assert path == Path(f"{name}.toml")
    assert path.read_bytes() == asset.content.read_bytes()
    match name.partition("-")[0]:
        case "pretrain":
            assert asset.command == "heedful pretrain DATA --recipe {}"
            assert resolve_pretrain(["a"], recipe=path).data == ("a",)
        case "distil":
            assert asset.command == "heedful distil TEACHER DATA --recipe {}"
            check_overrides(distil_overrides("a", recipe=path))
        case "translate":
            assert asset.command == "heedful finetune seq2seq DATA --recipe {}"
            settings = preview_settings("seq2seq", Overrides(recipe=path))
            assert settings.init == TransformerInit(norm_at="pre", dropout=0.15)
        case _:
            assert asset.command == "heedful finetune TASK DATA --recipe {}"
            for task in task_names():
                preview_settings(task, Overrides(recipe=path))  # raises an error for a wrong setting


@pytest.mark.parametrize("name", SAMPLES)
def test_copied_sample_data_can_be_read_and_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path, asset = copy_asset(name)
    _, task = SAMPLES[name]
    assert path == Path(name)
    assert asset.command == f"heedful finetune {task} {{}}"
    source = read(path, SPECS[task].example)
    num_examples = sum(len(list(source.examples(split))) for split in source.splits)
    assert str(num_examples) in asset.about
    (tmp_path / name / "train.txt").write_text("mine")
    with pytest.raises(HeedfulError, match=f"^{name} exists: give another path with --output$"):
        copy_asset(name)
    assert (tmp_path / name / "train.txt").read_text() == "mine"


def test_the_recipe_of_distilbert_is_the_paper_s(tmp_path: Path) -> None:
    path, _ = copy_asset("distil-distilbert", tmp_path / "a.toml")
    settings = distil_overrides("a", recipe=path).resolve(MaskedDistilSettings(teacher="?")).settings
    assert settings.loss == LOSS_PRESETS["distilbert"]
    assert settings.student == LayersStudent(layers=6, teacher_layers=(0, 2, 4, 7, 9, 11), family="distilbert")


def test_a_recipe_is_copied_to_another_path_unless_it_exists(tmp_path: Path) -> None:
    path, _ = copy_asset("paper", tmp_path / "a b" / "mine.toml")
    path.write_text("mine")
    with pytest.raises(HeedfulError, match=re.escape(f"{path} exists: give another path with --output")):
        copy_asset("stable", path)
    assert path.read_text() == "mine"
    with pytest.raises(HeedfulError, match=r'there is no recipe "papr" \(did you mean "paper"\?\): clock, '):
        copy_asset("papr")
    with pytest.raises(HeedfulError, match=r"mine\.toml/x cannot be written: Not a directory|exists"):
        copy_asset("paper", path / "x")


def test_they_import_no_torch() -> None:
    code = "import sys; from heedful.runs import recipes; list(recipes.list_assets()); print('torch' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert process.stdout == "False\n"
