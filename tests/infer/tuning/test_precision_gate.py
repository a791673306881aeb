"""The precision gate: a precision is accepted only if it is faster here and changes scores and metric little."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
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
from tests.support.model_folders import HEADS, long_text, make_decoder, make_model_dir


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny classifier."""
    return make_model_dir(tmp_path_factory.mktemp("gated"), "single")


def set_times(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Make each precision take this time."""
    monkeypatch.setattr(module, "median_times", lambda functions, rounds: {name: seconds[name] for name in functions})


def refusals(measurements: tuple[Measurement, ...]) -> dict[str, str]:
    """Return the reason why each precision is refused, or ""."""
    return {measurement.precision: measurement.refused for measurement in measurements}


def test_a_precision_must_be_faster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, float32=1.0, bfloat16=0.5, int8=2.0)
    measurements = measure_precisions(folder, tolerance=Tolerance(scores=0.5))
    assert refusals(measurements)["bfloat16"] == "" and "it is not faster: " in refusals(measurements)["int8"]
    assert measurements[0].scores == 0 and 0 < measurements[1].scores < 0.05 and 0 < measurements[2].scores < 0.5
    assert fastest_accepted(measurements) == "bfloat16"


def test_a_much_slower_precision_is_measured_only_briefly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scored_chunks: list[tuple[str, int]] = []
    sample_scores = module._sample_scores
    monkeypatch.setattr(
        module,
        "_sample_scores",
        lambda engine, chunks: (
            scored_chunks.append((engine.plan.precision, len(chunks))) or sample_scores(engine, chunks)
        ),
    )
    set_times(monkeypatch, float32=1.0, bfloat16=0.5, int8=3.5)
    measurements = measure_precisions(
        folder, measure_metric=lambda engine: ("f1", {"float32": 0.5, "bfloat16": 0.5}[engine.plan.precision])
    )  # type: ignore[union-attr]
    assert [measurement.brief for measurement in measurements] == [False, False, True]
    assert measurements[2].metric_value is None
    assert "it is not faster: " in measurements[2].refused and 0 < measurements[2].scores < 0.5
    sizes = dict(scored_chunks)
    assert 0 < sizes["int8"] < sizes["float32"] == sizes["bfloat16"]


def test_a_precision_may_not_change_the_scores_much(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, float32=3.0, bfloat16=2.0, int8=1.0)
    measurements = measure_precisions(folder, tolerance=Tolerance(scores=1e-9))
    assert "of their spread, and 1e-09 is allowed" in refusals(measurements)["int8"]
    assert fastest_accepted(measurements) == "float32" and refusals(measurements)["float32"] == ""


def test_a_precision_must_not_lower_the_metric(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, float32=3.0, bfloat16=2.0, int8=1.0)
    accuracies = {"float32": 0.90, "bfloat16": 0.896, "int8": 0.88}
    measurements = measure_precisions(
        folder,
        tolerance=Tolerance(scores=9.0),
        measure_metric=lambda engine: ("accuracy", accuracies[engine.plan.precision]),
    )  # type: ignore[union-attr]
    assert refusals(measurements) == {
        "float32": "",
        "bfloat16": "",
        "int8": "accuracy falls from 90.0 % to 88.0 %, and 0.5 points is allowed",
    }
    assert [measurement.metric_value for measurement in measurements] == [0.90, 0.896, 0.88]
    assert "accuracy 89.6 %" in measurements[1].line()


def test_a_refused_precision_is_an_error_with_its_measurement(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_times(monkeypatch, float32=1.0, bfloat16=0.5, int8=2.0)
    with pytest.raises(HeedfulError, match=r"not answered in int8 on this machine: it is not faster: [\d,]+ tokens/s"):
        Engine(folder, precision="int8")
    command = f"heedful evaluate {folder} --data DATA --predictions {folder}/predictions-dev.jsonl"
    with pytest.raises(HeedfulError, match=f"compared on texts that ship with Heedful.*first run: {command}"):
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


def test_an_unsupported_precision_is_refused_before_others_are_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "measure_precisions", lambda *args, **options: pytest.fail("it was measured"))
    with pytest.raises(HeedfulError, match="float16 is for GPUs: on cpu use float32, bfloat16 or auto"):
        choose_precision(folder, "float16")


def test_measurements_are_cached(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    set_times(monkeypatch, float32=1.0, bfloat16=0.5, int8=2.0)
    measurements = measure_precisions(folder)
    monkeypatch.setattr(module, "_measure_engines", lambda *args: pytest.fail("it was measured again"))
    assert measure_precisions(folder) == measurements
    with pytest.raises(pytest.fail.Exception):
        measure_precisions(folder, ignore_cache=True)
    with pytest.raises(pytest.fail.Exception):
        measure_precisions(make_model_dir(tmp_path / "another", "single"))


def test_another_sample_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    set_times(monkeypatch, float32=1.0, bfloat16=0.5, int8=2.0)
    folder = make_model_dir(tmp_path / "model", "single")
    assert measure_precisions(folder) == measure_precisions(folder)
    (tmp_path / "predictions-dev.jsonl").write_text('{"input": "the cat"}\n')
    monkeypatch.setattr(module, "_measure_engines", lambda *args: pytest.fail("it was measured again"))
    with pytest.raises(pytest.fail.Exception):
        measure_precisions(folder)


def test_only_one_of_several_simultaneous_calls_measures(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def slow_measurement(*args: Any) -> list[Measurement]:
        calls.append(args)
        time.sleep(0.3)
        return [Measurement(precision="float32", speed=1.0, scores=0.0)]

    monkeypatch.setattr(module, "_measure_engines", slow_measurement)
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(measure_precisions, [folder, folder])
    assert first == second and len(calls) == 1
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "file"))  # no cache and no lock are possible there
    assert measure_precisions(folder) == first and len(calls) == 2


def test_waiting_for_the_measurement_of_another_process_is_limited(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "WARN_AFTER", 0.05)
    monkeypatch.setattr(cache, "GIVE_UP_AFTER", 0.2)
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    monkeypatch.setattr(
        module, "_measure_engines", lambda *args: [Measurement(precision="float32", speed=1.0, scores=0.0)]
    )
    measure_precisions(folder)
    (lock,) = tmp_path.glob("*.lock")
    (file,) = tmp_path.glob("*.json")
    file.unlink()
    with cache.lock(lock, "measuring"), pytest.warns(HeedfulWarning) as caught_warnings:
        assert [measurement.speed for measurement in measure_precisions(folder)] == [1.0]
    first, second = (str(warning.message) for warning in caught_warnings)
    assert first.startswith("waiting for process ") and "which is measuring and holds" in first
    assert second.startswith("the measurement is not cached: process ") and not file.exists()
    measure_precisions(folder)
    assert file.exists()


DAMAGES: list[Any] = [
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


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_a_damaged_cache_entry_is_measured_again(
    folder: Path, tmp_path: Path, damage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    monkeypatch.setattr(
        module, "_measure_engines", lambda *args: [Measurement(precision="float32", speed=1.0, scores=0.0)]
    )
    expected = measure_precisions(folder)
    (file,) = tmp_path.glob("*.json")
    entry = json.loads(file.read_text())
    (measurement,) = entry["found"]["trials"]
    damages_measurement = isinstance(damage, dict) and not damage.keys() & {"trials", "a"}
    entry["found"] = {"trials": [measurement | damage]} if damages_measurement else damage
    file.write_text(json.dumps(entry))
    assert measure_precisions(folder) == expected and json.loads(file.read_text())["found"] == {"trials": [measurement]}


def test_a_refusal_of_scores_that_are_not_finite_is_cached(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    measurements = [
        Measurement(precision="float32", speed=1.0, scores=0.0),
        Measurement(precision="int8", speed=2.0, scores=float("inf"), refused="its scores differ"),
    ]
    monkeypatch.setattr(module, "_measure_engines", lambda *args: measurements)
    measure_precisions(folder)
    monkeypatch.setattr(module, "_measure_engines", lambda *args: pytest.fail("it was measured again"))
    assert list(measure_precisions(folder)) == measurements


@pytest.mark.parametrize("name", [name for name in HEADS if name != "bare"])
def test_every_head_has_a_shipped_calibration_sample(name: str, tmp_path: Path) -> None:
    engine = open_in_precision(make_model_dir(tmp_path, name), "int8")
    chunks = calibration_chunks(engine, calibration_inputs(engine))
    assert len(chunks) >= 9 and len(engine.score(chunks)) == len(chunks)


@pytest.mark.parametrize(
    ("name", "engine_input", "expected"),
    [("single", ["a", "b"], ("a", "b")), ("tag", ["a", "b"], ["a", "b"]), ("single", "a", "a")],
)
def test_the_sample_of_a_run_is_its_evaluated_inputs(
    name: str, engine_input: Any, expected: Any, tmp_path: Path
) -> None:
    folder = make_model_dir(tmp_path / "model", name)
    (tmp_path / "predictions-dev.jsonl").write_text(
        "".join(json.dumps({"input": engine_input}) + "\n" for _ in range(200))
    )
    inputs = calibration_inputs(Engine(folder))
    assert inputs == [expected] * len(inputs) and 60 <= len(inputs) <= 80


def test_a_refusal_on_a_runs_own_texts_does_not_ask_for_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model_dir(tmp_path / "run", "single")
    (folder / "predictions-dev.jsonl").write_text('{"input": "the cat"}\n')
    set_times(monkeypatch, float32=1.0, bfloat16=0.5, int8=2.0)
    with pytest.raises(HeedfulError, match=r"the fastest that is not refused$"):
        Engine(folder, precision="int8")


@pytest.mark.parametrize("count", [3, 64, 127, 191])
def test_the_sample_is_spread_over_all_predictions(count: int, tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path / "model", "single")
    (tmp_path / "predictions-dev.jsonl").write_text("".join(f'{{"input": "{n}"}}\n' for n in range(count)))
    numbers = [int(str(text)) for text in calibration_inputs(Engine(folder))]
    assert len(numbers) == len({*numbers}) == min(64, count)
    assert min(numbers) == 0 and max(numbers) >= count - 1 - count // 64
    first = sorted(numbers[:8])  # a sample of long texts ends after a few of them
    assert first[0] == 0 and all(
        second - first <= count / 4 for first, second in pairwise([*first, count]) if count > 8
    )


def test_predictions_beside_a_folder_that_is_no_run_are_ignored(tmp_path: Path) -> None:
    engine = Engine(make_model_dir(tmp_path / "folder", "single"))
    expected = calibration_inputs(engine)
    (tmp_path / "predictions-dev.jsonl").write_text('{"input": ["a", "b"]}\n')
    assert calibration_inputs(engine) == expected


# -- models that generate text ------------------------------------------------------------------------------------


def test_the_generation_of_texts_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generated: list[Any] = []

    def fake_times(functions: Any, rounds: int) -> dict[str, float]:
        generated.extend(text for function in functions.values() for text in function())
        return {"float32": 1.0, "bfloat16": 0.5, "int8": 2.0}

    monkeypatch.setattr(module, "median_times", fake_times)
    measurements = measure_precisions(make_decoder(tmp_path), tolerance=Tolerance(scores=0.5))
    assert fastest_accepted(measurements) == "bfloat16" and 0 < measurements[1].scores < 0.5
    assert generated and all(len(best.tokens) <= 16 for best, *_ in generated)


@pytest.mark.parametrize(("int8_seconds", "counts"), [(2.0, {"float32": 1}), (3.5, {"float32": 2})])
def test_texts_are_generated_once_for_each_precision_to_count_tokens(
    int8_seconds: float, counts: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32 twice if a slow precision is measured on a part of the sample."""
    counted: list[str] = []
    count_tokens = module._count_tokens
    monkeypatch.setattr(
        module,
        "_count_tokens",
        lambda engine, chunks: counted.append(engine.plan.precision) or count_tokens(engine, chunks),
    )
    set_times(monkeypatch, float32=1.0, bfloat16=0.5, int8=int8_seconds)
    measure_precisions(make_decoder(tmp_path))
    assert Counter(counted) == counts | {"bfloat16": 1, "int8": 1}


def test_the_sample_of_a_model_that_generates_text_is_short(tmp_path: Path) -> None:
    engine = Engine(make_decoder(tmp_path))
    chunks = calibration_chunks(engine, ["a b c d"] * 1000)
    assert (
        len(chunks)
        == module.BRIEF_TOKENS // 4
        < len(calibration_chunks(open_in_precision(make_model_dir(tmp_path / "b", "single"), "float32"), ["a"] * 1000))
    )


def test_texts_that_are_too_long_for_the_model_are_truncated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_decoder(tmp_path / "model")
    (tmp_path / "predictions-dev.jsonl").write_text(f'{{"input": "{long_text(200)}"}}\n' * 9)
    engine = Engine(folder)
    with pytest.raises(HeedfulError, match="but this model reads 48"):
        engine(calibration_inputs(engine))
    assert [len(chunk.encoded) for chunk in calibration_chunks(engine, calibration_inputs(engine))] == [24] * 9
    assert engine.max_length is None
    set_times(monkeypatch, float32=1.0, bfloat16=0.5, int8=2.0)
    assert len(measure_precisions(folder)) == 3
    options = {"precision": "float32", "revision": None, "head": None, "device": "cpu"}
    exec(RESIDENT_CODE.format(path=sys.path, name=str(folder), **options), {})
    assert int(capsys.readouterr().out) > 1e7


def test_a_sample_that_the_model_cannot_read_is_an_error_with_its_reason(folder: Path) -> None:
    engine = Engine(folder)
    message = r"can read none of 2 sample inputs, .*: use float32; the first error is: input 0 is "
    with pytest.raises(HeedfulError, match=message):
        calibration_chunks(engine, [3, {"question": "who?"}])
    assert len(calibration_chunks(engine, [3, "the cat"])) == 1, "an input that cannot be read is skipped"


def test_a_predictions_file_may_be_empty_but_not_damaged(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path / "model", "single")
    engine, file = Engine(folder), tmp_path / "predictions-dev.jsonl"
    expected = calibration_inputs(engine)
    file.write_text("")
    assert calibration_inputs(engine) == expected
    for damaged in ('{"text": "a"}\n', "[]\n", "nothing\n", '{"input": "a"\n'):
        file.write_text(damaged)
        with pytest.raises(HeedfulError, match=r"predictions-dev.jsonl is no file of predictions .*: evaluate the run"):
            calibration_inputs(engine)


def test_cached_metrics_are_used_when_no_metric_is_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    set_times(monkeypatch, float32=3.0, bfloat16=2.0, int8=1.0)
    accuracies = {"float32": 0.90, "bfloat16": 0.896, "int8": 0.88}
    tolerance = Tolerance(scores=9.0)
    first = measure_precisions(
        folder, tolerance=tolerance, measure_metric=lambda engine: ("accuracy", accuracies[engine.plan.precision])
    )  # type: ignore[union-attr]
    assert (
        fastest_accepted(measure_precisions(folder, tolerance=tolerance, ignore_cache=True))
        == fastest_accepted(first)
        == "bfloat16"
    )
    assert fastest_accepted(measure_precisions(folder, tolerance=tolerance)) == "bfloat16"
    other_tolerance = Tolerance(scores=9.0, metric=0.1)
    assert refusals(measure_precisions(folder, tolerance=other_tolerance))["int8"] == ""


def test_a_sample_with_a_single_score_can_be_compared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_times(monkeypatch, float32=3.0, bfloat16=2.0, int8=1.0)
    sample_scores = module._sample_scores
    monkeypatch.setattr(module, "_sample_scores", lambda engine, chunks: sample_scores(engine, chunks)[:1])
    measurements = measure_precisions(folder)
    assert refusals(measurements)["float32"] == ""
    assert all(measurement.scores == measurement.scores for measurement in measurements), "no score is NaN"
    assert fastest_accepted(measurements) in refusals(measurements)


@pytest.mark.parametrize("metric", [None, float("nan")])
def test_float32_scores_that_are_not_finite_are_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch, metric: float | None
) -> None:
    set_times(monkeypatch, float32=3.0, bfloat16=2.0, int8=1.0)
    if metric is None:
        sample_scores = module._sample_scores
        monkeypatch.setattr(
            module, "_sample_scores", lambda engine, chunks: sample_scores(engine, chunks) * float("nan")
        )
    with pytest.raises(HeedfulError, match=r"in float32 its scores, or its metric \(.*\), are not finite"):
        measure_precisions(folder, measure_metric=None if metric is None else lambda engine: ("accuracy", metric))


def test_measurements_with_and_without_autotuning_are_cached_separately(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path))
    set_times(monkeypatch, float32=1.0, bfloat16=0.5, int8=2.0)
    measure_precisions(folder)
    monkeypatch.setattr(module, "_measure_engines", lambda *args: pytest.fail("it was measured again"))
    measure_precisions(folder)
    monkeypatch.setattr(module, "autotune_enabled", lambda: True)
    with pytest.raises(pytest.fail.Exception):
        measure_precisions(folder)
