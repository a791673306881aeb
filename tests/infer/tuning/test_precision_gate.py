"""The gate: a precision is taken only where it is faster here and changes little; refusals carry their figures."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import heedful.infer.tuning.precision_gate as module
from heedful import cache
from heedful.cli import main
from heedful.errors import HeedfulError, HeedfulWarning
from heedful.infer.engine import Engine
from heedful.infer.tuning.precision_gate import (
    Measurement,
    Tolerance,
    calibration_chunks,
    calibration_inputs,
    choose_precision,
    fastest_accepted,
    measure_precisions,
    open_in_precision,
)
from heedful.runs.bench import RESIDENT_CODE
from tests.support.model_folders import HEADS, long_text, make, make_decoder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("gated"), "single")


def clock(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Each precision takes so long."""
    monkeypatch.setattr(module, "median_times", lambda runs, rounds: {name: seconds[name] for name in runs})


def verdicts(trials: tuple[Measurement, ...]) -> dict[str, str]:
    return {trial.precision: trial.refused for trial in trials}


def test_a_precision_has_to_be_faster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, float32=1.0, bfloat16=0.5, int8=2.0)
    trials = measure_precisions(folder, tolerance=Tolerance(scores=0.5))
    assert verdicts(trials)["bfloat16"] == "" and "it is not faster: " in verdicts(trials)["int8"]
    assert trials[0].scores == 0 and 0 < trials[1].scores < 0.05 and 0 < trials[2].scores < 0.5
    assert fastest_accepted(trials) == "bfloat16"


def test_what_is_far_slower_is_looked_at_briefly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    usual = module._sample_scores
    monkeypatch.setattr(
        module,
        "_sample_scores",
        lambda engine, chunks: asked.append((engine.plan.precision, len(chunks))) or usual(engine, chunks),
    )
    clock(monkeypatch, float32=1.0, bfloat16=0.5, int8=3.5)
    trials = measure_precisions(
        folder, measure_metric=lambda engine: ("f1", {"float32": 0.5, "bfloat16": 0.5}[engine.plan.precision])
    )  # type: ignore[union-attr]
    assert [trial.brief for trial in trials] == [False, False, True] and trials[2].metric_value is None
    assert "it is not faster: " in trials[2].refused and 0 < trials[2].scores < 0.5
    sizes = dict(asked)
    assert 0 < sizes["int8"] < sizes["float32"] == sizes["bfloat16"]


def test_a_precision_may_not_change_the_scores_much(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, float32=3.0, bfloat16=2.0, int8=1.0)
    trials = measure_precisions(folder, tolerance=Tolerance(scores=1e-9))
    assert "of their spread, and 1e-09 is allowed" in verdicts(trials)["int8"]
    assert fastest_accepted(trials) == "float32" and verdicts(trials)["float32"] == ""


def test_a_precision_may_not_lose_quality(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, float32=3.0, bfloat16=2.0, int8=1.0)
    main = {"float32": 0.90, "bfloat16": 0.896, "int8": 0.88}
    trials = measure_precisions(
        folder, tolerance=Tolerance(scores=9.0), measure_metric=lambda engine: ("accuracy", main[engine.plan.precision])
    )  # type: ignore[union-attr]
    assert verdicts(trials) == {
        "float32": "",
        "bfloat16": "",
        "int8": "accuracy falls from 90.0 % to 88.0 %, and 0.5 points is allowed",
    }
    assert [trial.metric_value for trial in trials] == [0.90, 0.896, 0.88] and "accuracy 89.6 %" in trials[1].line()


def test_what_is_refused_is_an_error_with_its_measurement(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock(monkeypatch, float32=1.0, bfloat16=0.5, int8=2.0)
    with pytest.raises(HeedfulError, match=r"not answered in int8 on this machine: it is not faster: [\d,]+ tokens/s"):
        Engine(folder, precision="int8")
    engine = Engine(folder, precision="auto")
    assert engine.plan is not None and engine.plan.precision == "bfloat16"
    assert engine.explain().count("tokens/s, scores differ by") == 3 and engine(["the cat"])[0]["label"]
    assert choose_precision(folder, "float32") == ("float32", ())
    with pytest.raises(SystemExit, match="2"):
        main(["predict", str(folder), "a text", "--precision", "int4"])
    assert """int4' (did you mean "int8"?): use one of auto, float32""" in capsys.readouterr().err
    with pytest.raises(HeedfulError, match="give one of them"):
        Engine(folder, precision="int8", dtype=module.torch.float32)


def test_what_was_found_is_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    clock(monkeypatch, float32=1.0, bfloat16=0.5, int8=2.0)
    trials = measure_precisions(folder)
    monkeypatch.setattr(module, "_measure_engines", lambda *arguments: pytest.fail("it was measured again"))
    assert measure_precisions(folder) == trials
    with pytest.raises(pytest.fail.Exception):
        measure_precisions(folder, ignore_cache=True)
    with pytest.raises(pytest.fail.Exception):
        measure_precisions(make(tmp_path / "another", "single"))


def test_it_is_measured_anew_on_another_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    clock(monkeypatch, float32=1.0, bfloat16=0.5, int8=2.0)
    folder = make(tmp_path / "model", "single")
    assert measure_precisions(folder) == measure_precisions(folder)
    (tmp_path / "predictions-dev.jsonl").write_text('{"input": "the cat"}\n')
    monkeypatch.setattr(module, "_measure_engines", lambda *arguments: pytest.fail("it is measured anew"))
    with pytest.raises(pytest.fail.Exception):
        measure_precisions(folder)


def test_of_those_that_begin_at_once_one_measures(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    def slowly(*arguments: Any) -> list[Measurement]:
        measured.append(arguments)
        time.sleep(0.3)
        return [Measurement(precision="float32", speed=1.0, scores=0.0)]

    monkeypatch.setattr(module, "_measure_engines", slowly)
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(measure_precisions, [folder, folder])
    assert first == second and len(measured) == 1
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "file"))  # nothing can be kept, or waited for, there
    assert measure_precisions(folder) == first and len(measured) == 2


def test_a_measurement_of_another_process_is_waited_for_and_not_for_ever(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "WARN_AFTER", 0.05)
    monkeypatch.setattr(cache, "GIVE_UP_AFTER", 0.2)
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    monkeypatch.setattr(
        module, "_measure_engines", lambda *arguments: [Measurement(precision="float32", speed=1.0, scores=0.0)]
    )
    measure_precisions(folder)
    (lock,) = tmp_path.glob("*.lock")
    (file,) = tmp_path.glob("*.json")
    file.unlink()
    with cache.lock(lock, "measuring"), pytest.warns(HeedfulWarning) as warned:
        assert [trial.speed for trial in measure_precisions(folder)] == [1.0]
    first, second = (str(warning.message) for warning in warned)
    assert first.startswith("waiting for process ") and "which is measuring and holds" in first
    assert second.startswith("the measurement is not kept: process ") and not file.exists()
    measure_precisions(folder)
    assert file.exists()


BAD_TRIALS: list[Any] = [
    *(
        [],
        "x",
        None,
        float("nan"),
        {"a": 1},
        {"trials": []},
        {"trials": None},
        {"trials": [[]]},
        {"trials": [{"a": 1}]},
    ),
    *({"precision": "int4"}, {"precision": "int8"}, {"speed": float("nan")}, {"speed": 0.0}, {"speed": "1"}),
    *(
        {"speed": True},
        {"scores": None},
        {"scores": float("inf")},
        {"metric_value": float("nan")},
        {"metric_value": "1"},
    ),
    *({"refused": None}, {"refused": "yes"}, {"brief": 1}, {"more": 1}),
]


@pytest.mark.parametrize("damage", BAD_TRIALS, ids=str)
def test_a_damaged_measurement_counts_as_none(
    folder: Path, tmp_path: Path, damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    monkeypatch.setattr(
        module, "_measure_engines", lambda *arguments: [Measurement(precision="float32", speed=1.0, scores=0.0)]
    )
    expected = measure_precisions(folder)
    (file,) = tmp_path.glob("*.json")
    held = json.loads(file.read_text())
    (trial,) = held["found"]["trials"]
    in_trial = isinstance(damage, dict) and not damage.keys() & {"trials", "a"}
    held["found"] = {"trials": [trial | damage]} if in_trial else damage
    file.write_text(json.dumps(held))
    assert measure_precisions(folder) == expected and json.loads(file.read_text())["found"] == {"trials": [trial]}


def test_a_precision_whose_scores_are_not_finite_is_kept_as_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    trials = [
        Measurement(precision="float32", speed=1.0, scores=0.0),
        Measurement(precision="int8", speed=2.0, scores=float("inf"), refused="its scores differ"),
    ]
    monkeypatch.setattr(module, "_measure_engines", lambda *arguments: trials)
    measure_precisions(folder)
    monkeypatch.setattr(module, "_measure_engines", lambda *arguments: pytest.fail("it was measured again"))
    assert list(measure_precisions(folder)) == trials


@pytest.mark.parametrize("name", [name for name in HEADS if name != "bare"])
def test_every_head_has_a_sample_that_ships(name: str, tmp_path: Path) -> None:
    engine = open_in_precision(make(tmp_path, name), "int8")
    chunks = calibration_chunks(engine, calibration_inputs(engine))
    assert len(chunks) >= 9 and len(engine.score(chunks)) == len(chunks)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [("single", ["a", "b"], ("a", "b")), ("tag", ["a", "b"], ["a", "b"]), ("single", "a", "a")],
)
def test_a_run_is_tried_on_what_it_was_measured_on(name: str, settings: Any, expected: Any, tmp_path: Path) -> None:
    folder = make(tmp_path / "model", name)
    (tmp_path / "predictions-dev.jsonl").write_text("".join(json.dumps({"input": settings}) + "\n" for _ in range(200)))
    inputs = calibration_inputs(Engine(folder))
    assert inputs == [expected] * len(inputs) and 60 <= len(inputs) <= 80


@pytest.mark.parametrize("count", [3, 64, 127, 191])
def test_the_sample_reaches_from_the_first_prediction_to_the_last(count: int, tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "single")
    (tmp_path / "predictions-dev.jsonl").write_text("".join(f'{{"input": "{n}"}}\n' for n in range(count)))
    numbers = [int(str(text)) for text in calibration_inputs(Engine(folder))]
    assert len(numbers) == min(64, count) and numbers == sorted(set(numbers))
    assert numbers[0] == 0 and numbers[-1] >= count - 1 - count // 64


def test_what_lies_beside_another_folder_is_of_another_model(tmp_path: Path) -> None:
    engine = Engine(make(tmp_path / "mine", "single"))
    expected = calibration_inputs(engine)
    (tmp_path / "predictions-dev.jsonl").write_text('{"input": ["a", "b"]}\n')
    assert calibration_inputs(engine) == expected


# -- models that write ------------------------------------------------------------------------------------------


def test_a_model_that_writes_is_timed_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[Any] = []

    def timing(runs: Any, rounds: int) -> dict[str, float]:
        written.extend(text for run in runs.values() for text in run())
        return {"float32": 1.0, "bfloat16": 0.5, "int8": 2.0}

    monkeypatch.setattr(module, "median_times", timing)
    trials = measure_precisions(make_decoder(tmp_path), tolerance=Tolerance(scores=0.5))
    assert fastest_accepted(trials) == "bfloat16" and 0 < trials[1].scores < 0.5
    assert written and all(len(best.tokens) <= 16 for best, *_ in written)


def test_scores_of_whole_vocabularies_are_of_few_tokens(tmp_path: Path) -> None:
    engine = Engine(make_decoder(tmp_path))
    chunks = calibration_chunks(engine, ["a b c d"] * 1000)
    assert (
        len(chunks)
        == module.BRIEF_TOKENS // 4
        < len(calibration_chunks(open_in_precision(make(tmp_path / "b", "single"), "float32"), ["a"] * 1000))
    )


def test_long_texts_that_a_model_refuses_are_measured_by_their_beginnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_decoder(tmp_path / "model")
    (tmp_path / "predictions-dev.jsonl").write_text(f'{{"input": "{long_text(200)}"}}\n' * 9)
    engine = Engine(folder)
    with pytest.raises(HeedfulError, match="but this model reads 48"):
        engine(calibration_inputs(engine))
    assert [len(chunk.encoded) for chunk in calibration_chunks(engine, calibration_inputs(engine))] == [24] * 9
    assert engine.max_length is None
    clock(monkeypatch, float32=1.0, bfloat16=0.5, int8=2.0)
    assert len(measure_precisions(folder)) == 3
    options = {"precision": "float32", "revision": None, "head": None, "device": "cpu"}
    exec(RESIDENT_CODE.format(path=sys.path, name=str(folder), **options), {})
    assert int(capsys.readouterr().out) > 1e7


def test_a_file_of_predictions_may_be_empty_but_not_wrong(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "single")
    engine, file = Engine(folder), tmp_path / "predictions-dev.jsonl"
    expected = calibration_inputs(engine)
    file.write_text("")
    assert calibration_inputs(engine) == expected
    for bad in ('{"text": "a"}\n', "[]\n", "nothing\n", '{"input": "a"\n'):
        file.write_text(bad)
        with pytest.raises(HeedfulError, match=r"predictions-dev.jsonl is no file of predictions .*: evaluate the run"):
            calibration_inputs(engine)


def test_a_bench_without_data_keeps_what_one_with_data_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    clock(monkeypatch, float32=3.0, bfloat16=2.0, int8=1.0)
    main = {"float32": 0.90, "bfloat16": 0.896, "int8": 0.88}
    wide = Tolerance(scores=9.0)
    first = measure_precisions(
        folder, tolerance=wide, measure_metric=lambda engine: ("accuracy", main[engine.plan.precision])
    )  # type: ignore[union-attr]
    assert (
        fastest_accepted(measure_precisions(folder, tolerance=wide, ignore_cache=True))
        == fastest_accepted(first)
        == "bfloat16"
    )
    assert fastest_accepted(measure_precisions(folder, tolerance=wide)) == "bfloat16"
    assert (
        verdicts(measure_precisions(folder, tolerance=Tolerance(scores=9.0, metric=0.1)))["int8"] == ""
    )  # other bounds, another verdict


def test_one_number_is_something_to_compare_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, float32=3.0, bfloat16=2.0, int8=1.0)
    usual = module._sample_scores
    monkeypatch.setattr(module, "_sample_scores", lambda engine, chunks: usual(engine, chunks)[:1])
    trials = measure_precisions(folder)
    assert verdicts(trials)["float32"] == "" and all(trial.scores == trial.scores for trial in trials)
    assert fastest_accepted(trials) in verdicts(trials)


@pytest.mark.parametrize("main", [None, float("nan")])
def test_float32_that_is_not_finite_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, main: float | None
) -> None:
    clock(monkeypatch, float32=3.0, bfloat16=2.0, int8=1.0)
    if main is None:
        usual = module._sample_scores
        monkeypatch.setattr(module, "_sample_scores", lambda engine, chunks: usual(engine, chunks) * float("nan"))
    with pytest.raises(HeedfulError, match=r"in float32 its scores, or its metric \(.*\), are not finite"):
        measure_precisions(folder, measure_metric=None if main is None else lambda engine: ("accuracy", main))


def test_what_was_found_without_measuring_ways_is_kept_apart(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    clock(monkeypatch, float32=1.0, bfloat16=0.5, int8=2.0)
    measure_precisions(folder)
    monkeypatch.setattr(module, "_measure_engines", lambda *arguments: pytest.fail("it is measured anew"))
    measure_precisions(folder)
    monkeypatch.setattr(module, "autotune_enabled", lambda: True)
    with pytest.raises(pytest.fail.Exception):
        measure_precisions(folder)
