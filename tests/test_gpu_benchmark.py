"""benchmarks/gpu.py: every arm reads the same texts, goals are reported, and `--rehearse` runs it without a GPU."""

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


@pytest.fixture
def case(benchmarks: Any) -> Any:
    """A small case of texts of mixed lengths, with three training steps."""
    return replace(benchmarks("gpu_measures").rehearsal().cases["mixed lengths, base"], steps=3)


def texts_of(inputs: Any) -> list[tuple[list[int], list[int]]]:
    """Return the token ids and the labels of all texts of the benchmark's inputs, sorted."""
    return sorted((ids, labels) for step in inputs.texts for ids, labels in step)


def test_packs_of_heedful_hold_all_texts_and_have_one_shape(benchmarks: Any, case: Any) -> None:
    arms = benchmarks("gpu_arms")
    inputs = arms.make_round(case)
    batches = inputs.batches(torch.device("cpu"))
    shapes = {(len(batch.packed.tokens), len(batch.packed), len(batch.targets)) for batch in batches}
    assert shapes == {(case.tokens, len(batches[0].packed), case.masked)}
    assert all(bool(batch.weights.all()) for batch in batches)
    for batch, step in zip(batches, inputs.texts, strict=True):
        expected_ids = list(chain(*(ids for ids, _ in step)))
        expected_labels = list(chain(*(labels for _, labels in step)))
        labels = torch.full((case.tokens,), -100)
        labels[batch.rows] = batch.targets
        assert batch.packed.tokens[: len(expected_ids)].tolist() == expected_ids
        assert labels[: len(expected_ids)].tolist() == expected_labels
        assert sum(label >= 0 for label in expected_labels) == case.masked
    num_tokens = sum(len(ids) for ids, _ in texts_of(inputs))
    assert inputs.tokens == num_tokens >= arms.FULL * case.tokens * case.steps


@pytest.mark.parametrize("grouped", [False, True])
def test_padded_batches_hold_all_texts(benchmarks: Any, case: Any, grouped: bool) -> None:
    arms = benchmarks("gpu_arms")
    inputs = arms.make_round(case)
    texts = []
    for ids, mask, labels in arms.pad(inputs, torch.device("cpu"), grouped=grouped):
        assert mask is not None and (grouped or ids.shape[1] == case.most)
        for row_ids, row_mask, row_labels in zip(ids.tolist(), mask.tolist(), labels.tolist(), strict=True):
            count = sum(row_mask)
            assert row_mask == [1] * count + [0] * (len(row_mask) - count)
            assert set(row_labels[count:]) <= {-100}
            texts.append((row_ids[:count], row_labels[:count]))
    assert sorted(texts) == texts_of(inputs)


def test_packs_of_transformers_hold_all_texts(benchmarks: Any, case: Any) -> None:
    arms = benchmarks("gpu_arms")
    inputs = arms.make_round(case)
    texts = []
    for batch in arms.pack(inputs, torch.device("cpu")):
        assert batch["input_ids"].shape[1] == case.most
        columns = (batch[name].tolist() for name in ("input_ids", "position_ids", "labels"))
        for ids, positions, labels, mask in zip(*columns, batch["attention_mask"][:, 0], strict=True):
            count = sum(id > 0 for id in ids)  # without padding
            starts = [index for index in range(count) if positions[index] == 0]
            stops = [*starts[1:], count]
            for start, stop in zip(starts, stops, strict=True):
                assert positions[start:stop] == list(range(stop - start)), "positions do not restart at 0"
                attended = mask[start:stop].nonzero()[:, 1].unique().tolist()
                assert attended == list(range(start, stop))
                texts.append((ids[start:stop], labels[start:stop]))
            assert set(labels[stops[-1] :]) <= {-100} and mask.any(1).all()
    assert sorted(texts) == texts_of(inputs)


def test_texts_of_one_length_have_no_mask_and_the_operations_of_the_formula(benchmarks: Any) -> None:
    arms, cases = benchmarks("gpu_arms"), benchmarks("gpu_measures").Size().cases
    case = replace(cases["full length, base"], distribution=128, steps=1)
    share = case.masked / case.tokens
    blocks = 12 * (24 * 768**2 + 4 * 128 * 768)
    head = share * (2 * 768**2 + 2 * 768 * case.vocabulary)
    small_case = replace(case, tokens=512, vocabulary=2000)
    inputs = replace(arms.make_round(small_case), case=replace(small_case, most=128))
    ((_, mask, _),) = arms.pad(inputs, torch.device("cpu"), grouped=False)
    assert mask is None
    assert case.flop(case.tokens * 128, case.tokens) == pytest.approx(3 * case.tokens * (blocks + head), rel=1e-9)
    assert 3 * (blocks + head) == pytest.approx(545e6, rel=0.01)


def test_goals_are_reported_as_reached_or_missed(benchmarks: Any) -> None:
    gpu, measures = benchmarks("gpu"), benchmarks("gpu_measures")
    quick = measures.Served(what="one", seconds={"a": [7e-3], "b": [2e-3], "c": [5e-4]}, cosines={})
    slow = measures.Served(what="many", seconds={"a": [3.0], "b": [1.0], "c": [2.0]}, cosines={})
    results = gpu.Results(rates={"matrix": 1e12, "copy": 1e12}, served={"32": quick, "mixed": slow})
    cells_of_rows = [line.split(" | ") for line in gpu.goals(results).splitlines() if line.startswith("| ")][2:]
    assert [(cells[0].strip("| "), cells[2][:5], cells[3].strip(" |")) for cells in cells_of_rows] == [
        ("one, ms", "0.500", "yes"),
        ("one, to transformers", "14.00", "yes"),
        ("many: to the best other arm", "0.50 ", "no"),
    ]


def test_every_part_is_in_one_group(benchmarks: Any) -> None:
    gpu, measures = benchmarks("gpu"), benchmarks("gpu_measures")
    parts = gpu.parts(gpu.Results(), measures.rehearsal(), torch.device("cpu"), measures.Clock(1))
    groups = {group: [name for name, *_ in parts if gpu.group_of(name) == group] for group in gpu.GROUPS}
    assert sum(map(len, groups.values())) == len(parts)
    assert groups["variants"] == [f"mixed lengths, base, {kind}" for kind in ("dropout 0.1", "float32", "rotary")]
    assert groups["serving"] == ["one text, all-MiniLM-L6-v2", "one text, BERT-base", "mixed texts", "decoding"]


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
