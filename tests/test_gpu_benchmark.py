"""The GPU benchmark: the same data in every arm, shapes that never change, goals, and a rehearsal of all of it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import one of the benchmarks' modules."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_every_arm_reads_the_same_and_no_shape_changes(benchmarks: Any) -> None:
    arms = benchmarks("gpu_arms")
    case = replace(benchmarks("gpu_measures").rehearsal().cases["mixed lengths, base"], steps=3)
    inputs, device = arms.make_round(case), torch.device("cpu")
    batches = inputs.batches(device)
    shapes = {(len(batch.packed.tokens), len(batch.packed), len(batch.targets)) for batch in batches}
    assert shapes == {(case.tokens, len(batches[0].packed), case.masked)}
    assert all(bool(batch.weights.all()) for batch in batches)
    for batch, step in zip(batches, inputs.texts, strict=True):
        read, asked = batch.packed.tokens.tolist(), [-100] * case.tokens
        for row, target in zip(batch.rows.tolist(), batch.targets.tolist(), strict=True):
            asked[row] = target
        assert read[: sum(len(ids) for ids, _ in step)] == list(chain(*(ids for ids, _ in step)))
        assert asked[: sum(len(ids) for ids, _ in step)] == list(chain(*(labels for _, labels in step)))
        assert sum(label >= 0 for _, labels in step for label in labels) == case.masked
    texts = sorted((ids, labels) for step in inputs.texts for ids, labels in step)
    for grouped in (False, True):
        padded = arms.pad(inputs, device, grouped=grouped)
        lines = []
        for ids, mask, labels in padded:
            assert mask is not None and (grouped or ids.shape[1] == case.most)
            for line, seen, wanted in zip(ids.tolist(), mask.tolist(), labels.tolist(), strict=True):
                count = sum(seen)
                assert seen == [1] * count + [0] * (len(seen) - count) and set(wanted[count:]) <= {-100}
                lines.append((line[:count], wanted[:count]))
        assert sorted(lines) == texts
    lines = []
    for batch in arms.pack(inputs, device):
        assert batch["input_ids"].shape[1] == case.most
        for ids, places, wanted, mask in zip(
            *(batch[name].tolist() for name in ("input_ids", "position_ids", "labels")),
            batch["attention_mask"][:, 0],
            strict=True,
        ):
            starts = [
                number for number, (place, token) in enumerate(zip(places, ids, strict=True)) if token and not place
            ]
            stops = [*starts[1:], sum(token > 0 for token in ids)]
            for start, stop in zip(starts, stops, strict=True):
                assert places[start:stop] == list(range(stop - start)), "positions begin anew"
                assert mask[start:stop].nonzero()[:, 1].unique().tolist() == list(range(start, stop))
                lines.append((ids[start:stop], wanted[start:stop]))
            assert set(wanted[stops[-1] :]) <= {-100} and mask.any(1).all()
    assert sorted(lines) == texts
    assert inputs.tokens == sum(len(ids) for ids, _ in texts) >= arms.FULL * case.tokens * case.steps


def test_a_round_of_one_length_has_no_mask_and_the_formula_s_work(benchmarks: Any) -> None:
    arms, cases = benchmarks("gpu_arms"), benchmarks("gpu_measures").Size().cases
    case = replace(cases["full length, base"], distribution=128, steps=1)
    share = case.masked / case.tokens
    blocks = 12 * (24 * 768**2 + 4 * 128 * 768)
    head = share * (2 * 768**2 + 2 * 768 * case.vocabulary)
    small_case = replace(case, tokens=512, vocabulary=2000)
    inputs = arms.make_round(small_case)
    assert [
        mask
        for _, mask, _ in arms.pad(
            replace(inputs, case=replace(small_case, most=128)), torch.device("cpu"), grouped=False
        )
    ] == [None]
    assert case.flop(case.tokens * 128, case.tokens) == pytest.approx(3 * case.tokens * (blocks + head), rel=1e-9)
    assert 3 * (blocks + head) == pytest.approx(545e6, rel=0.01)


def test_goals_are_reported_as_reached_or_missed(benchmarks: Any) -> None:
    gpu, measures = benchmarks("gpu"), benchmarks("gpu_measures")
    quick = measures.Served(what="one", seconds={"a": [7e-3], "b": [2e-3], "c": [5e-4]}, cosines={})
    slow = measures.Served(what="many", seconds={"a": [3.0], "b": [1.0], "c": [2.0]}, cosines={})
    results = gpu.Results(rates={"matrix": 1e12, "copy": 1e12}, served={"32": quick, "mixed": slow})
    rows = [line.split(" | ") for line in gpu.goals(results).splitlines() if line.startswith("| ")][2:]
    assert [(row[0].strip("| "), row[2][:5], row[3].strip(" |")) for row in rows] == [
        ("one, ms", "0.500", "yes"),
        ("one, to transformers", "14.00", "yes"),
        ("many: to the best other arm", "0.50 ", "no"),
    ]


@pytest.mark.slow
def test_without_a_gpu_it_says_how_to_rehearse() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py")], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == 2 and "there is no CUDA device: give --rehearse" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_parts_can_be_rehearsed(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--rehearse", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=590)
    assert done.returncode == 0, done.stderr
    (record,) = tmp_path.glob("gpu-*.md")
    text = record.read_text(encoding="utf-8")
    for part in ("## The device", "## Goals", "## mixed lengths, small", "## full length, base", "24 texts of mixed"):
        assert part in text
    assert "Not measured" not in text
