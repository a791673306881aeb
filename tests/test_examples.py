"""Every example runs, and what it says of itself holds where that is certain."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from heedful.runs import timing

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture
def found(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the example of that number gives, run in a folder of its own, with so little training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HEEDFUL_AUTOTUNE", "off")
    monkeypatch.setattr(timing, "ROUNDS", 5)
    number, arguments = request.param
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return runpy.run_path(str(EXAMPLES[number - 1]))["main"](**arguments)
    finally:
        torch.set_num_threads(threads)


def of(number: int, **arguments: float) -> Any:
    return pytest.mark.parametrize("found", [(number, arguments)], indirect=True, ids=[EXAMPLES[number - 1].stem])


def test_there_are_ten_short_ones_that_say_what_they_show() -> None:
    assert [int(path.name[:2]) for path in EXAMPLES] == list(range(1, 11))
    road = (ROOT / "docs" / "road.md").read_text(encoding="utf-8")
    for path in EXAMPLES:
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") < 80 and path.name in road, path.name
        assert all(f"\n{word}: " in text for word in ("Idea", "Code", "Expect")), path.name


@of(1, steps=3)
def test_a_bag_of_words_is_blind_to_order(found: Any) -> None:
    bag, net = found.values()
    assert bag["apart"] < 1e-5 < net["apart"]
    assert bag["but"] == bag["not"] == bag["both"] == 0.5, "twins: right for one of the two"


@of(2)
def test_weights_sum_to_one(found: Any) -> None:
    assert len(found) == 7
    for name, (weights, mixed) in found.items():
        assert weights.sum() == pytest.approx(1, abs=1e-6) and (weights >= 0).all(), name
        assert torch.allclose(mixed, weights), "the values are the unit vectors"
    assert all(found[name][0].argmax() == 2 for name in ("cosine", "dot", "scaled dot", "hard, dot"))


@of(3, steps=2)
def test_an_alignment_is_there_with_attention_alone(found: Any) -> None:
    without, _, looks, looked = found.values()
    assert without[0] > 0 and looks[0] > 0 and found["alignment of recurrent, no attention"] is None
    assert looked.weights.shape == (len(looked.written), len(looked.read))
    assert looked.weights.sum(-1) == pytest.approx(1, abs=1e-5)


@of(4)
def test_attention_without_weights(found: Any) -> None:
    same, mixed, first, second, backwards = found.values()
    assert same == pytest.approx(1, abs=1e-5) and mixed < 0.99
    assert first == pytest.approx(second, abs=1e-6) and backwards < 1e-5


@of(5)
def test_permutations_show_with_positions_alone(found: Any) -> None:
    assert found.pop("none") < 1e-5
    assert len(found) == 5 and min(found.values()) > 1e-3
    products = (clock := runpy.run_path(str(EXAMPLES[4]))["clock"]()) @ clock.T
    for distance in (0, 1, 7):
        assert products.diagonal(distance).std() < 1e-9, "the distance alone"
    assert torch.cdist(clock, clock).fill_diagonal_(1).min() > 0.1


@of(6, steps=12)
def test_a_transformer_is_counted_and_sees_no_later_token(found: Any) -> None:
    assert found["count"] == found["formula"]
    assert found["losses"][-1] < found["losses"][0]
    own = found["own"]
    assert own.triu(1).abs().max() == 0 and torch.allclose(own.sum(-1), torch.ones(own.shape[:2]))
    assert torch.allclose(found["cross"].sum(-1), torch.ones(found["cross"].shape[:2]))


@of(7, steps=3)
def test_masks_are_filled(found: Any) -> None:
    assert found["loss"] > 0 and found["filled"] and found["guess"] > 0
    assert all(0 < score < 1 for _, score in found["filled"])


@of(8, epochs=0.05)
def test_a_run_is_made(found: Any) -> None:
    assert {"model", "results.json", "plots"} <= set(found["files"])
    for answer in found["answers"]:
        assert sum(answer["probabilities"].values()) == pytest.approx(1, abs=1e-5)


@of(9)
def test_looking_changes_nothing(found: Any) -> None:
    assert found["same"] and max(found["following"].values()) > 0.3
    for weights in found["weights"]:
        assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:2]), atol=1e-5)
    assert found["likeness"][-1] < 0.99


@of(10)
def test_one_answer_alone_among_others_and_served(found: Any) -> None:
    alone, among, served = (found[name] for name in ("alone", "among others", "served"))
    assert [name for name, _ in alone] == [name for name, _ in among] == [name for name, _ in served]
    for other in (among, served):
        assert [score for _, score in other] == pytest.approx([score for _, score in alone], rel=1e-3)
