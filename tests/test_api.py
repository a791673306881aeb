"""Training and prediction through the public Python functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import heedful
from heedful import api
from heedful.errors import HeedfulError, SettingError
from heedful.runs.finetune.settings import FinetuneSettings
from heedful.settings import to_mapping
from heedful.tasks.specs.classify import ClassifySettings
from heedful.train.settings import AdamW, TrainSettings

TEXTS = [f"it was {word}" for word in ("good", "fine", "bad", "sad") for _ in range(6)]
LABELS = [word for word in ("yes", "yes", "no", "no") for _ in range(6)]
TINY = {"init.kind": "scratch", "init.width": 32, "init.layers": 1, "eval_baseline": False}

SCRIPT = """
import heedful

result: heedful.RunResult = heedful.finetune(
    "classify", (["a"], ["x"]), output_dir="run", epochs=3, lr=5e-5, seed=1, weight_decay=0.1
)
scores: dict[str, float] = result.scores
engine = heedful.Engine("run")
for answer in engine.predict(["a text"], heedful.Classification):
    print(answer.label.upper(), round(answer.probability, 2), answer.probabilities["x"])
labels: list[str] = [answer.label for answer in heedful.predict("run", ["a text"], heedful.Classification)]
width: int = engine.encode(["a"]).shape[1]
for prediction in engine.predict(["a text"]):
    if isinstance(prediction, heedful.TokenClassification):
        print([entity.text for entity in prediction.entities])
    print(prediction.to_dict())
print(heedful.evaluate("run", "data.csv").to_dict())
"""


def test_finetune_takes_settings_as_keywords_and_predicts(tmp_path: Path) -> None:
    data = {"train": (TEXTS, LABELS), "dev": (TEXTS[::3], LABELS[::3])}
    result = heedful.finetune(
        "classify", data, tmp_path / "run", max_steps=3, lr=1e-3, batch_size=4, seed=7, weight_decay=0.2, overrides=TINY
    )
    assert (result.status, result.output_dir, result.metric) == ("completed", tmp_path / "run", "accuracy")
    train_settings = result.results["settings"]["train"]
    assert (train_settings["epochs"], train_settings["max_steps"]) == (None, 3)
    assert train_settings["seed"] == 7 and train_settings["batch_size"] == 4
    assert train_settings["optimizer"]["lr"] == 1e-3 and train_settings["optimizer"]["weight_decay"] == 0.2
    assert result.scores == {"dev": result.results["splits"]["dev"]["numbers"]["accuracy"]}
    assert json.loads(json.dumps(result.to_dict()))["output_dir"] == str(tmp_path / "run")
    (answer,) = heedful.predict(tmp_path / "run", ["it was good"], heedful.Classification)
    assert set(answer.probabilities) == {"yes", "no"} and answer.probability == answer.probabilities[answer.label]
    assert heedful.evaluate(tmp_path / "run", [{"text": "it was bad", "label": "no"}]).to_dict()["split"] == "train"


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"epochs": 1, "max_steps": 2}, "epochs=1 and train.max_steps=2 are given"),
        ({"lr": 0.1, "overrides": {"train.optimizer.lr": 0.2}}, "train.optimizer.lr is given twice"),
        ({"weight_decai": 0.1}, "did you mean .*weight_decay"),
        ({"seed": -1}, "seed is -1"),
        ({"recipe": "x.toml", "settings": FinetuneSettings(task=ClassifySettings())}, "recipe and settings"),
    ],
)
def test_invalid_settings_are_rejected_before_data_is_read(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(SettingError, match=error):
        heedful.finetune("classify", "nowhere.csv", "run", **settings)


def test_settings_are_used_as_a_recipe_below_keyword_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    passed_arguments: dict[str, Any] = {}
    monkeypatch.setattr(
        api.finetune_run, "finetune", lambda *args, **kwargs: passed_arguments.update(kwargs) or fake_result()
    )
    settings = FinetuneSettings(task=ClassifySettings(), train=TrainSettings(max_steps=2, optimizer=AdamW(lr=0.5)))
    heedful.finetune("classify", "data.csv", "run", settings=settings, batch_size=2)
    assert passed_arguments["recipe"] == to_mapping(settings)
    assert passed_arguments["overrides"] == {"train.batch_size": 2}


def fake_result() -> Any:
    from heedful.runs.results import RunResult

    return RunResult(output_dir=Path("run"), status="interrupted", results={})


def test_predict_accepts_no_load_options_with_an_engine(tmp_path: Path) -> None:
    engine = heedful.Engine("heedful-mini-en", head="masked_lm")
    assert heedful.predict(engine, ["the [MASK]"], heedful.FillMask)[0].masks[0].candidates
    with pytest.raises(HeedfulError, match="given with an Engine"):
        heedful.predict(engine, ["the [MASK]"], device="cpu")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_script_passes_a_strict_type_checker(tmp_path: Path) -> None:
    """A correct script passes the type checker, and a wrong type is reported."""
    for name, code, status in (("right", SCRIPT, 0), ("wrong", SCRIPT + '\nheedful.finetune("classify", 1, 2)\n', 1)):
        (tmp_path / f"{name}.py").write_text(code)
        command = [sys.executable, "-m", "mypy", "--strict", "--ignore-missing-imports", f"{name}.py"]
        environment = os.environ | {"MYPYPATH": str(Path(heedful.__file__).parents[1])}
        process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert process.returncode == status, process.stdout
        assert status == 0 or "wrong.py:" in process.stdout.splitlines()[-2]
