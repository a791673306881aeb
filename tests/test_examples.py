"""Every file in examples/ runs, and what it says to expect is true, as far as little training can show it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.fixture
def result(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the example of that number in a folder of its own, with little training, and return its result."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEEDFUL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HEEDFUL_AUTOTUNE", "off")
    number, arguments = request.param
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return runpy.run_path(str(EXAMPLES[number - 1]))["main"](**arguments)
    finally:
        torch.set_num_threads(threads)


def example(number: int, **arguments: float) -> Any:
    """Return a decorator that gives a test the `result` of the example with this number, called with arguments."""
    return pytest.mark.parametrize("result", [(number, arguments)], indirect=True, ids=[EXAMPLES[number - 1].stem])


def test_there_are_ten_short_examples_with_idea_code_and_expectation() -> None:
    assert [int(path.name[:2]) for path in EXAMPLES] == list(range(1, 11))
    road = (ROOT / "docs" / "road.md").read_text(encoding="utf-8")
    for path in EXAMPLES:
        text = path.read_text(encoding="utf-8")
        assert text.count("\n") < 80 and path.name in road, path.name
        assert all(f"\n{word}: " in text for word in ("Idea", "Code", "Expect")), path.name


@example(1, steps=3)
def test_a_bag_of_words_is_blind_to_order(result: Any) -> None:
    bag, net = result.values()
    assert bag["apart"] < 1e-5 < net["apart"]
    # two texts with the same words in another order have the same prediction, which is right for one of them
    assert bag["but"] == bag["not"] == bag["both"] == 0.5


@example(2)
def test_weights_sum_to_one(result: Any) -> None:
    assert len(result) == 7
    for name, (weights, mixed) in result.items():
        assert weights.sum() == pytest.approx(1, abs=1e-6) and (weights >= 0).all(), name
        assert torch.allclose(mixed, weights), "the values are the unit vectors"
    assert all(result[name][0].argmax() == 2 for name in ("cosine", "dot", "scaled dot", "hard, dot"))


@example(3, steps=2)
def test_only_attention_gives_an_alignment(result: Any) -> None:
    without_attention, _, with_attention, alignment = result.values()
    assert without_attention[0] > 0 and with_attention[0] > 0
    assert result["alignment of recurrent, no attention"] is None
    assert alignment.weights.shape == (len(alignment.target), len(alignment.source))
    assert alignment.weights.sum(-1) == pytest.approx(1, abs=1e-5)


@example(4)
def test_untrained_attention_mixes_vectors_without_order(result: Any) -> None:
    before, after, cosine_in_first_text, cosine_in_second_text, change_when_reversed = result.values()
    assert before == pytest.approx(1, abs=1e-5) and after < 0.99
    assert cosine_in_first_text == pytest.approx(cosine_in_second_text, abs=1e-6)
    assert change_when_reversed < 1e-5


@example(5)
def test_only_positions_make_scores_depend_on_order(result: Any) -> None:
    assert result.pop("none") < 1e-5
    assert len(result) == 5 and min(result.values()) > 1e-3
    sinusoids = runpy.run_path(str(EXAMPLES[4]))["sinusoids"]()
    products = sinusoids @ sinusoids.T
    for distance in (0, 1, 7):
        assert products.diagonal(distance).std() < 1e-9, "a product depends on more than the distance"
    assert torch.cdist(sinusoids, sinusoids).fill_diagonal_(1).min() > 0.1


@example(6, steps=12)
def test_a_transformer_is_counted_and_sees_no_later_token(result: Any) -> None:
    assert result["count"] == result["formula"]
    assert result["losses"][-1] < result["losses"][0]
    self_attention, cross_attention = result["own"], result["cross"]
    assert self_attention.triu(1).abs().max() == 0
    for weights in (self_attention, cross_attention):
        assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:2]))


@example(7, steps=3)
def test_masks_are_filled(result: Any) -> None:
    assert result["loss"] > 0 and result["filled"] and result["guess"] > 0
    assert all(0 < score < 1 for _, score in result["filled"])


@example(8, epochs=0.05)
def test_finetuning_writes_a_run_folder(result: Any) -> None:
    assert {"model", "results.json", "report.html"} <= set(result["files"])
    for answer in result["answers"]:
        assert sum(answer["probabilities"].values()) == pytest.approx(1, abs=1e-5)


@example(9)
def test_reading_attention_weights_changes_no_output(result: Any) -> None:
    assert result["same"] and max(result["following"].values()) > 0.3
    for weights in result["weights"]:
        assert torch.allclose(weights.sum(-1), torch.ones(weights.shape[:2]), atol=1e-5)
    assert result["likeness"][-1] < 0.99


@example(10)
def test_a_text_has_the_same_answer_alone_in_a_batch_and_from_the_server(result: Any) -> None:
    names, scores = zip(*result["alone"], strict=True)
    for way in ("among others", "served"):
        names_there, scores_there = zip(*result[way], strict=True)
        assert names_there == names
        assert scores_there == pytest.approx(scores, rel=1e-3)
