"""distil --min-quality and --max-latency: which shapes are tried, and which is taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from heedful.checkpoint import load, read_config
from heedful.checkpoint.new_head import with_head
from heedful.errors import HeedfulError
from heedful.families import FAMILIES
from heedful.infer.tuning.precision_gate import Measurement
from heedful.runs.distil import search as distil_search
from heedful.runs.distil.run import distil
from heedful.runs.distil.search import choose_fastest, default_shapes, search
from heedful.runs.distil.settings import parse_student, preview_distil_settings
from heedful.runs.distil.students import single_stack
from heedful.runs.overrides import Overrides
from heedful.runs.results import RunResult
from heedful.train.run_lock import lock_run
from tests.support.distillation import NO_BASELINE, QUICK, RecordingReporter
from tests.support.model_folders import make_model_dir

pytestmark = pytest.mark.usefixtures("quick")


def test_the_search_takes_the_fastest_that_keeps_enough(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    arguments: dict[str, Any] = {"shapes": ["layers=1", "bag"], "assignments": QUICK}
    done = search(teacher, labelled, tmp_path / "run", min_quality=0.01, max_latency=1e4, **arguments)
    search_results = done.results["search"]
    fastest = min(search_results["tried"], key=lambda each: each["p50"])["name"]
    assert search_results["taken"] == fastest in [each["name"] for each in search_results["tried"] if "quality" in each]
    assert (tmp_path / "run" / "best" / "model").is_dir()
    assert search_results["split"] == "dev" and done.results["verdict"]["split"] == "test", (
        "chosen on dev, told of test"
    )
    recorder = RecordingReporter()
    again = search(
        teacher, labelled, tmp_path / "run", min_quality=0.01, max_latency=1e4, reporter=recorder, **arguments
    )
    assert again.results == done.results
    assert not any(message.startswith(("trying", "timing")) for message in recorder.messages)
    with pytest.raises(HeedfulError, match=r"no student answers in 1e-06 ms:\n  .*ms, not trained"):
        search(teacher, labelled, tmp_path / "none", max_latency=1e-6, **arguments)
    other = search(teacher, labelled, tmp_path / "run", reporter=recorder, **arguments).results["search"]
    assert (other["min_quality"], other["max_latency"]) == (None, None) and all(
        "quality" in each for each in other["tried"]
    )
    assert (
        any(message.startswith("trying") for message in recorder.messages)
        and "timing 2 shapes" not in recorder.messages
    )
    other = search(
        teacher, labelled, tmp_path / "run", max_latency=max(each["p50"] for each in other["tried"]), **arguments
    ).results["search"]
    kept = {each.name for each in (tmp_path / "run").glob("best*")}
    assert kept <= {"best", "best-bag", "best-layers=1"} and "best" in kept
    with pytest.raises(HeedfulError, match="Lower the limits"):
        search(teacher, labelled, tmp_path / "run", min_quality=1.0, max_latency=1e-6, **arguments)
    with pytest.raises(HeedfulError, match="a run with other settings"):
        search(teacher, labelled, tmp_path / "run", min_quality=0.01, max_latency=1e4, loss="distilbert", **arguments)
    with pytest.raises(HeedfulError, match="another shapes"):
        search(teacher, labelled, tmp_path / "run", shapes=["bag"], assignments=QUICK)
    with pytest.raises(HeedfulError, match="a search tries 1 to 6"):
        search(teacher, labelled, tmp_path / "many", shapes=["bag"] * 7)


def test_a_search_takes_no_folder_of_others(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("a.txt", "b", "c", "d"):
        (mine / name).write_text("")
    with pytest.raises(HeedfulError, match=r"mine is no search: it holds a\.txt, b, c and more, but no search\.json"):
        search(teacher, labelled, mine, min_quality=0.9)
    assert len(list(mine.iterdir())) == 4
    with lock_run(tmp_path / "run"), pytest.raises(HeedfulError, match=r"another run, pid \d+, .* holds .*run"):
        search(teacher, labelled, tmp_path / "run", min_quality=0.9, shapes=["bag"], assignments=QUICK)
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["run.lock"]
    with pytest.raises(HeedfulError, match=r"rows\.csv"):
        search(teacher, tmp_path / "rows.csv", tmp_path / "no", min_quality=0.9, shapes=["bag"], assignments=QUICK)
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_ranks_search_together(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    """Each goes by what the first has timed and measured."""
    ranks = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--module")
    command = (
        "heedful",
        "distil",
        str(teacher),
        str(labelled),
        "--output",
        str(tmp_path / "run"),
        "--min-quality",
        "1%",
    )
    settings = (*QUICK, "verdict.rounds=1")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([*ranks, *command, *settings], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    search_results = json.loads((tmp_path / "run" / "search.json").read_text())
    assert search_results["taken"] == min(search_results["tried"], key=lambda each: float(each["p50"]))["name"]


def test_a_search_without_dev_says_that_it_chose_on_test(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    recorder, files = RecordingReporter(), tmp_path / "files"
    files.mkdir()
    for name in ("train.csv", "test.csv"):
        (files / name).write_bytes((labelled / name).read_bytes())
    wishes = [*NO_BASELINE, "data.dev_fraction=0"]
    done = search(teacher, files, tmp_path / "run", shapes=["bag"], assignments=wishes, reporter=recorder)
    assert done.results["search"]["split"] == "test"
    assert f"bag is taken, {distil_search.CHOSEN_ON_TEST}" in recorder.messages


def test_usual_shapes_begin_with_classic_ones(tmp_path: Path, teacher: Path) -> None:
    embedding = with_head(load(make_model_dir(tmp_path / "bare", "bare")), "embedding")
    assert default_shapes(embedding) == default_shapes(load(teacher)) == ["bag", "bilstm", "tiny", "layers=1"]
    assert default_shapes(load(make_model_dir(tmp_path / "span", "span"))) == ["tiny", "layers=1"]


def test_a_search_goes_by_the_time_of_what_is_trained(
    tmp_path: Path, teacher: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = [Measurement(precision="float32", speed=1.0, scores=0.0)]
    trials.append(Measurement(precision="int8", speed=2.0, scores=1.0, refused="its weights are drawn"))
    assert choose_fastest(trials) == "int8", "after training it may be taken"
    times, trained = {"bag": 6.0, "tiny": 2.5, "layers=1": 3.0}, []

    def done(
        known: Any, overrides: Overrides, data: Any, folder: Path, on_bad_row: str, *, parent_dir: Path, **more: Any
    ) -> RunResult:
        (student,) = (name for name in times if parse_student(name) == preview_distil_settings(overrides).student)
        trained.append((student, parent_dir))
        speed = {"precision": "float32", "p99": 9.0, "texts_per_second": 1.0, "tokens_per_second": 1.0}
        mine = speed | {"p50": times[student], "parameters": 7, "quality": {"mean": 0.9}}
        verdict = {"metric": "accuracy", "split": "dev", "quality_ratio": 1.0, "models": {"student": mine}}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "verdict.json").write_text(json.dumps(verdict))
        return RunResult(output_dir=folder, status="completed", results={"verdict": verdict})

    shapes = [{"name": name, "folder": name, "p50": when} for name, when in (("bag", 1.0), ("tiny", 2.0))]
    shapes.append({"name": "layers=1", "folder": "layers=1", "p50": 2.75})
    monkeypatch.setattr(distil_search, "_time_shapes", lambda planned, names, reporter: shapes)
    monkeypatch.setattr(distil_search, "distil_task", done)
    search_results = search(
        teacher, labelled, tmp_path / "run", shapes=list(times), max_latency=5.0, min_quality=0.9
    ).results["search"]
    assert trained == [(name, tmp_path / "run") for name in ("bag", "tiny", "tiny")], "the last one whole"
    assert search_results["taken"] == "tiny", "bag is not in time, and layers=1 cannot be faster"
    assert [each["p50"] for each in search_results["tried"]] == [6.0, 2.5, 2.75] and search_results["tried"][0][
        "parameters"
    ] == 7


@pytest.mark.slow
def test_shapes_of_models_without_one_stack_are_fresh(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    """None has some of the teacher's layers, of which there are none, or two kinds."""
    size = dict(next(iter(FAMILIES["t5"].sizes.values())))
    assert single_stack(read_config(size | {"model_type": "t5"}, "t5").model) is None, "two"
    distil(teacher, labelled, tmp_path / "bag", student="bag", assignments=NO_BASELINE)
    bag = tmp_path / "bag"
    assert default_shapes(load(bag)) == ["bag", "bilstm", "tiny"]
    wishes = (*QUICK, "student.words.width=8")[:-1]
    done = search(bag, labelled, tmp_path / "run", assignments=(*wishes, "verdict.rounds=1"))
    assert {each["name"] for each in done.results["search"]["tried"]} == {"bag", "bilstm", "tiny"}


@pytest.mark.slow
def test_shapes_share_what_the_teacher_says(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    """Those that need the same of it, and what is taken, too; a search that was killed goes on with that."""
    arguments: dict[str, Any] = {"shapes": ["layers=1", "bag"], "assignments": QUICK}
    with pytest.raises(KeyError, match="the power failed"):
        search(
            teacher,
            labelled,
            tmp_path / "cut",
            reporter=RecordingReporter(fail_step=2, after_message="trying bag"),
            **arguments,
        )
    recorder = RecordingReporter()
    cut = search(teacher, labelled, tmp_path / "cut", reporter=recorder, **arguments)
    assert not any(message.startswith("the teacher reads") for message in recorder.messages)
    assert len(list(tmp_path.glob("cut/outputs/*/about.json"))) == 1 and not list(tmp_path.glob("cut/*/outputs"))
    whole = search(teacher, labelled, tmp_path / "whole", **arguments)
    for name in ("bag", "layers=1"):
        mine, theirs = (_weights(name, each) for each in (cut, whole))
        assert mine.keys() == theirs.keys() and all(torch.equal(each, theirs[n]) for n, each in mine.items())


def _weights(name: str, done: RunResult) -> dict[str, torch.Tensor]:
    """Of a shape that was tried."""
    place = next(each["folder"] for each in done.results["search"]["tried"] if each["name"] == name)
    return load_file(done.output_dir.parent / place / "model" / "model.safetensors")
