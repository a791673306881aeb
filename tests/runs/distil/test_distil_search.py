"""A search over students: the shapes that are timed and distilled, the chosen one, and resumed searches."""

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


TWO_SHAPES: dict[str, Any] = {"shapes": ["layers=1", "bag"], "assignments": QUICK}  # arguments of `search`


def test_a_search_chooses_the_fastest_student_with_enough_quality(
    tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    run = tmp_path / "run"
    limits: dict[str, Any] = {"min_quality": 0.01, "max_latency": 1e4}  # which all shapes are within
    result = search(teacher, labelled, run, **limits, **TWO_SHAPES)
    state = result.results["search"]
    fastest = min(state["tried"], key=lambda shape: shape["p50"])
    assert state["taken"] == fastest["name"]
    assert "quality" in fastest
    assert (run / "best" / "model").is_dir()
    assert state["split"] == "dev", "the split for the choice"
    assert result.results["verdict"]["split"] == "test"
    recorder = RecordingReporter()
    repeated = search(teacher, labelled, run, reporter=recorder, **limits, **TWO_SHAPES)
    assert repeated.results == result.results
    assert not any(message.startswith(("trying", "timing")) for message in recorder.messages)
    with pytest.raises(HeedfulError, match="a run with other settings"):
        search(teacher, labelled, run, loss="distilbert", **limits, **TWO_SHAPES)


def test_a_search_can_be_repeated_with_other_limits(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    run, recorder = tmp_path / "run", RecordingReporter()
    first = search(teacher, labelled, run, min_quality=0.01, max_latency=1e4, **TWO_SHAPES).results["search"]
    # usually one shape, but none if the trained student was slower than the other shape when it was measured again
    untried = {shape["name"] for shape in first["tried"] if "quality" not in shape}
    without_limits = search(teacher, labelled, run, reporter=recorder, **TWO_SHAPES).results["search"]
    assert without_limits["min_quality"] is None
    assert without_limits["max_latency"] is None
    assert all("quality" in shape for shape in without_limits["tried"])
    announced = [message for message in recorder.messages if message.startswith("trying")]
    assert {message.split()[1].removesuffix(",") for message in announced} == untried
    assert "timing 2 shapes" not in recorder.messages, "the times of the first search are used"
    largest_latency = max(shape["p50"] for shape in without_limits["tried"])
    search(teacher, labelled, run, max_latency=largest_latency, **TWO_SHAPES)
    best_folders = {path.name for path in run.glob("best*")}
    assert "best" in best_folders
    assert best_folders <= {"best", "best-bag", "best-layers=1"}
    with pytest.raises(HeedfulError, match="Lower the limits"):
        search(teacher, labelled, run, min_quality=1.0, max_latency=1e-6, **TWO_SHAPES)
    with pytest.raises(HeedfulError, match="another shapes"):
        search(teacher, labelled, run, shapes=["bag"], assignments=QUICK)


def test_a_search_without_a_student_within_the_limits_is_an_error(
    tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    with pytest.raises(HeedfulError, match=r"no student answers in 1e-06 ms:\n  .*ms, not trained"):
        search(teacher, labelled, tmp_path / "run", max_latency=1e-6, **TWO_SHAPES)
    with pytest.raises(HeedfulError, match="a search tries 1 to 6"):
        search(teacher, labelled, tmp_path / "many", shapes=["bag"] * 7)


def test_a_folder_of_other_files_is_refused(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("a.txt", "b", "c", "d"):
        (folder / name).write_text("")
    with pytest.raises(HeedfulError, match=r"files is no search: it holds a\.txt, b, c and more, but no search\.json"):
        search(teacher, labelled, folder, min_quality=0.9)
    assert len(list(folder.iterdir())) == 4


def test_a_locked_folder_is_refused(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    run = tmp_path / "run"
    with lock_run(run), pytest.raises(HeedfulError, match=r"another run, pid \d+, .* holds .*run"):
        search(teacher, labelled, run, min_quality=0.9, shapes=["bag"], assignments=QUICK)
    assert [path.name for path in run.iterdir()] == ["run.lock"]


def test_missing_data_are_refused_before_anything_is_written(tmp_path: Path, teacher: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(HeedfulError, match=r"rows\.csv"):
        search(teacher, tmp_path / "rows.csv", run, min_quality=0.9, shapes=["bag"], assignments=QUICK)
    assert not run.exists()


@pytest.mark.slow
def test_all_ranks_use_the_measurements_of_the_first_one(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--module"]
    command = ["heedful", "distil", str(teacher), str(labelled), "--output", str(tmp_path / "run")]
    settings = ["--min-quality", "1%", *QUICK, "verdict.rounds=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.run(
        [*launcher, *command, *settings], env=environment, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stderr
    state = json.loads((tmp_path / "run" / "search.json").read_text())
    fastest = min(state["tried"], key=lambda shape: float(shape["p50"]))
    assert state["taken"] == fastest["name"]


def test_a_search_without_dev_says_that_it_chose_on_test(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    recorder, data = RecordingReporter(), tmp_path / "data"
    data.mkdir()
    for name in ("train.csv", "test.csv"):
        (data / name).write_bytes((labelled / name).read_bytes())
    assignments = [*NO_BASELINE, "data.dev_fraction=0"]
    result = search(teacher, data, tmp_path / "run", shapes=["bag"], assignments=assignments, reporter=recorder)
    assert result.results["search"]["split"] == "test"
    assert f"bag is chosen, {distil_search.CHOSEN_ON_TEST}" in recorder.messages


def test_default_shapes_begin_with_classic_students_of_the_task(tmp_path: Path, teacher: Path) -> None:
    embedding = with_head(load(make_model_dir(tmp_path / "bare", "bare")), "embedding")
    assert default_shapes(embedding) == default_shapes(load(teacher)) == ["bag", "bilstm", "tiny", "layers=1"]
    assert default_shapes(load(make_model_dir(tmp_path / "span", "span"))) == ["tiny", "layers=1"]


def test_untrained_students_are_timed_in_the_fastest_precision_even_if_it_is_refused() -> None:
    float32 = Measurement(precision="float32", speed=1.0, scores=0.0)
    int8 = Measurement(precision="int8", speed=2.0, scores=1.0, refused="its weights are random")
    assert choose_fastest([float32, int8]) == "int8", "a trained student may be accepted in int8"


def test_times_of_trained_students_replace_those_of_untrained_ones(
    tmp_path: Path, teacher: Path, labelled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    untrained_latency = {"bag": 1.0, "tiny": 2.0, "layers=1": 2.75}  # milliseconds
    trained_latency = {"bag": 6.0, "tiny": 2.5, "layers=1": 3.0}
    distilled: list[str] = []

    def fake_distil_task(
        teacher: Any, overrides: Overrides, data: Any, folder: Path, on_bad_row: str, *, parent_dir: Path, **more: Any
    ) -> RunResult:
        student_settings = preview_distil_settings(overrides).student
        (name,) = (name for name in trained_latency if parse_student(name) == student_settings)
        assert parent_dir == tmp_path / "run"
        distilled.append(name)
        speed = {"precision": "float32", "p99": 9.0, "texts_per_second": 1.0, "tokens_per_second": 1.0}
        student = speed | {"p50": trained_latency[name], "parameters": 7, "quality": {"mean": 0.9}}
        verdict = {"metric": "accuracy", "split": "dev", "quality_ratio": 1.0, "models": {"student": student}}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "verdict.json").write_text(json.dumps(verdict))
        return RunResult(output_dir=folder, status="completed", results={"verdict": verdict})

    shapes = [{"name": name, "folder": name, "p50": latency} for name, latency in untrained_latency.items()]
    monkeypatch.setattr(distil_search, "_time_shapes", lambda plan, names, reporter: shapes)
    monkeypatch.setattr(distil_search, "distil_task", fake_distil_task)
    names = list(untrained_latency)
    result = search(teacher, labelled, tmp_path / "run", shapes=names, max_latency=5.0, min_quality=0.9)
    state = result.results["search"]
    assert state["taken"] == "tiny", "bag is slower than the limit, and layers=1 cannot be faster than tiny"
    assert distilled == ["bag", "tiny", "tiny"], "the chosen one again, with all seeds"
    assert [shape["p50"] for shape in state["tried"]] == [6.0, 2.5, 2.75]
    assert state["tried"][0]["parameters"] == 7


@pytest.mark.slow
def test_default_shapes_of_a_teacher_without_a_single_stack_have_none_of_its_layers(
    tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    size = dict(next(iter(FAMILIES["t5"].sizes.values())))
    assert single_stack(read_config(size | {"model_type": "t5"}, "t5").model) is None, "encoder and decoder"
    bag = tmp_path / "bag"  # a teacher without Transformer layers
    distil(teacher, labelled, bag, student="bag", assignments=NO_BASELINE)
    assert default_shapes(load(bag)) == ["bag", "bilstm", "tiny"]
    result = search(bag, labelled, tmp_path / "run", assignments=(*QUICK, "verdict.rounds=1"))
    assert {shape["name"] for shape in result.results["search"]["tried"]} == {"bag", "bilstm", "tiny"}


@pytest.mark.slow
def test_shapes_share_cached_outputs_of_the_teacher(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    """A search that was killed uses the cache when it is resumed, and chooses students with the same weights."""
    reporter = RecordingReporter(fail_step=2, after_message="trying bag")
    with pytest.raises(KeyError, match="the power failed"):
        search(teacher, labelled, tmp_path / "resumed", reporter=reporter, **TWO_SHAPES)
    recorder = RecordingReporter()
    resumed = search(teacher, labelled, tmp_path / "resumed", reporter=recorder, **TWO_SHAPES)
    assert not any(message.startswith("the teacher reads") for message in recorder.messages)
    assert len(list(tmp_path.glob("resumed/outputs/*/about.json"))) == 1, "one cache for all shapes"
    assert not list(tmp_path.glob("resumed/*/outputs"))
    uninterrupted = search(teacher, labelled, tmp_path / "uninterrupted", **TWO_SHAPES)
    for name in ("bag", "layers=1"):
        tensors, expected = weights_of_shape(resumed, name), weights_of_shape(uninterrupted, name)
        assert tensors.keys() == expected.keys()
        for tensor_name, tensor in tensors.items():
            assert torch.equal(tensor, expected[tensor_name]), tensor_name


def weights_of_shape(result: RunResult, name: str) -> dict[str, torch.Tensor]:
    """Load the weights of a shape that a search has tried."""
    (shape,) = (shape for shape in result.results["search"]["tried"] if shape["name"] == name)
    return load_file(result.output_dir.parent / shape["folder"] / "model" / "model.safetensors")
