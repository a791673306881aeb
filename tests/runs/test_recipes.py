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


def test_everything_on_offer() -> None:
    listed = list(list_assets())
    names = [offer.name for offer in listed]
    assert names == [*sorted(set(names) - set(SAMPLES)), *SAMPLES] and len(set(names)) == len(names)
    assert {"paper", "stable", "patient", "clock", "lean", "layered", "squad"} <= set(names)
    kinds = ("bert", "roberta", "albert", "xlnet", "t5", "gpt2", "electra", "domain")
    assert {f"pretrain-{each}" for each in kinds} <= set(names)
    assert {"distil-distilbert", "translate-small"} <= set(names)
    assert all(offer.about and len(offer.about) < 120 and "\n" not in offer.about for offer in listed)
    assets = ROOT / "heedful" / "assets"
    assert {path.name for path in assets.iterdir()} == {"completion", "recipes", BUNDLED_ENCODER, *SAMPLES}, (
        "nothing ships that is not on offer"
    )


@pytest.mark.parametrize("name", [offer.name for offer in list_assets()])
def test_a_copy_can_be_used_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    path, offer = copy_asset(name)
    if name not in SAMPLES:
        assert path == Path(f"{name}.toml") and path.read_bytes() == offer.content.read_bytes()
        if name.startswith("pretrain-"):
            assert offer.command == "heedful pretrain DATA --recipe {}"
            assert resolve_pretrain(["a"], recipe=path).data == ("a",)
            return
        if name.startswith("distil-"):
            assert offer.command == "heedful distil TEACHER DATA --recipe {}"
            check_overrides(distil_overrides("a", recipe=path))
            return
        if name.startswith("translate-"):
            assert offer.command == "heedful finetune seq2seq DATA --recipe {}"
            assert preview_settings("seq2seq", Overrides(recipe=path)).init == TransformerInit(
                norm_at="pre", dropout=0.15
            )
            return
        assert offer.command == "heedful finetune TASK DATA --recipe {}"
        assert all(preview_settings(task, Overrides(recipe=path)) for task in task_names())
        return
    task = offer.command.split()[2]
    source = read(path, SPECS[task].example)
    counts = {split: len(list(source.examples(split))) for split in source.splits}
    assert path == Path(name) and offer.command == f"heedful finetune {task} {{}}" and task == SAMPLES[name][1]
    assert str(sum(counts.values())) in offer.about, "as many as it says"
    (tmp_path / name / "train.txt").write_text("mine")
    with pytest.raises(HeedfulError, match=f"^{name} exists: give another path with --output$"):
        copy_asset(name)
    assert (tmp_path / name / "train.txt").read_text() == "mine"


def test_the_recipe_of_distilbert_is_the_paper_s(tmp_path: Path) -> None:
    path, _ = copy_asset("distil-distilbert", tmp_path / "a.toml")
    resolved_settings = distil_overrides("a", recipe=path).resolve(MaskedDistilSettings(teacher="?")).settings
    assert resolved_settings.loss == LOSS_PRESETS["distilbert"]
    assert resolved_settings.student == LayersStudent(layers=6, teacher_layers=(0, 2, 4, 7, 9, 11), family="distilbert")


def test_another_place(tmp_path: Path) -> None:
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
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
