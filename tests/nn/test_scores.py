"""Score functions equal loops over their formulas; masks; soft, hard and sampled attention weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heedful.errors import HeedfulError
from heedful.nn.attend import attend
from heedful.nn.layout import Layout
from heedful.nn.scores import (
    Additive,
    General,
    Location,
    align,
    cosine,
    dot,
    hard_weights,
    reinforce,
    sample_weights,
    scaled_dot,
    soft_weights,
    update_baseline,
    visible_pairs,
    weighted_sum,
)

WIDTH = 3
LAYOUT = Layout.of([0, 3, 3, 5, 6], [0, 4, 6, 6, 7])  # n x m: 3 x 4, 0 x 2, 2 x 0, 1 x 1
SCORES: dict[str, Callable[[], Any]] = {
    "cosine": lambda: cosine,
    "dot": lambda: dot,
    "scaled": lambda: scaled_dot,
    "general": lambda: randomize(General(width=WIDTH, key_width=WIDTH)),
    "additive": lambda: randomize(Additive(width=WIDTH, key_width=WIDTH, inner_width=2)),
    "location": lambda: randomize(Location(width=WIDTH, longest=5)),
}


def randomize(module: nn.Module) -> nn.Module:
    """Sample the parameters of a module, in float64."""
    generator = torch.Generator().manual_seed(7)
    for parameter in module.double().requires_grad_(False).parameters():
        parameter.normal_(generator=generator)
    return module


def sample_qkv(layout: Layout = LAYOUT, width: int = WIDTH) -> list[Tensor]:
    """Sample q, k and v for a layout."""
    generator = torch.Generator().manual_seed(1)
    rows = (layout.rows, *[layout.keys[-1][1]] * 2)
    return [torch.randn(n, width, dtype=torch.float64, generator=generator) for n in rows]


def dot_product(x: Any, y: Any) -> float:
    return sum(float(a) * float(b) for a, b in zip(x, y, strict=True))


def by_formula(name: str, score: Any, q: Tensor, k: Tensor, j: int) -> float:
    """Return the score of a query and the key at position j of its sequence."""
    match name:
        case "cosine":
            return dot_product(q, k) / math.sqrt(dot_product(q, q) * dot_product(k, k))
        case "dot":
            return dot_product(q, k)
        case "scaled":
            return dot_product(q, k) / math.sqrt(3)
        case "general":
            return sum(float(q[a]) * float(score.weight.weight[a, b]) * float(k[b]) for a in range(3) for b in range(3))
        case "additive":
            joint_weight = torch.cat([score.query.weight, score.key.weight], 1)  # W q + U k = [W U] [q; k]
            inner = [math.tanh(dot_product(row, torch.cat([q, k]))) for row in joint_weight]
            return dot_product(score.out.weight[0], inner)
    return dot_product(score.weight.weight[j], q)


def softmax(numbers: list[float]) -> list[float]:
    exponentials = [math.exp(number) for number in numbers]
    return [number / sum(exponentials) for number in exponentials]


@pytest.mark.parametrize("name", SCORES)
def test_each_score_is_its_formula(name: str) -> None:
    """Attention equals its formula. With a causal mask, query 0 of 3 attends to the keys 0 and 1 of 4."""
    score, (q, k, v) = SCORES[name](), sample_qkv()
    for causal in (False, True):
        masks = visible_pairs(LAYOUT, causal=causal)
        out = weighted_sum(soft_weights(align(score, q, k, LAYOUT), masks), v, LAYOUT)
        for (start, stop), (first, last) in zip(LAYOUT.queries, LAYOUT.keys, strict=True):
            n, m = stop - start, last - first
            for i in range(n):
                positions = [j for j in range(m) if not causal or j <= i + m - n]
                weights = softmax([by_formula(name, score, q[start + i], k[first + j], j) for j in positions])
                weighted_values = [(w, v[first + j]) for w, j in zip(weights, positions, strict=True)]
                expected = [sum(w * float(value[d]) for w, value in weighted_values) for d in range(3)]
                assert out[start + i].tolist() == pytest.approx(expected, abs=1e-12)
    assert (out[3:5] == 0).all(), "queries without keys"


def test_properties_of_scores() -> None:
    q, k, _ = sample_qkv()
    cosines = align(cosine, 100 * q, k, LAYOUT)
    assert all((block.abs() <= 1 + 1e-12).all() for block in cosines)
    assert (cosine(q[:1] * 0, k) == 0).all()
    general = General(width=WIDTH, key_width=WIDTH).double()
    with torch.no_grad():
        general.weight.weight.copy_(torch.eye(WIDTH))
    assert torch.equal(general(q, k), dot(q, k)) and torch.equal(scaled_dot(q, k), dot(q, k) / math.sqrt(WIDTH))
    location = randomize(Location(width=WIDTH, longest=5))
    assert torch.equal(location(q, k[:4]), location(q, 9 + k[:4]))
    with pytest.raises(HeedfulError, match="a sequence has 7 keys, but location scores know 5 positions"):
        location(q, k)
    blocks = soft_weights((location(q, k[:4]),))
    assert torch.allclose(blocks[0].sum(-1), torch.ones(6).double(), atol=1e-12)


@pytest.mark.parametrize("name", SCORES)
def test_gradients_and_permuted_keys(name: str) -> None:
    score, (q, k, v) = SCORES[name](), [tensor.requires_grad_() for tensor in sample_qkv()]
    parameters = list(score.requires_grad_().parameters()) if isinstance(score, nn.Module) else []

    def run(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> Tensor:
        return weighted_sum(soft_weights(align(score, q, k, LAYOUT), visible_pairs(LAYOUT, causal=True)), v, LAYOUT)

    assert torch.autograd.gradcheck(run, (q, k, v, *parameters), fast_mode=True)
    order = torch.tensor([2, 0, 3, 1, 4, 5, 6])  # permutes the keys of the first sequence
    out = weighted_sum(soft_weights(align(score, q, k, LAYOUT)), v, LAYOUT)
    permuted = weighted_sum(soft_weights(align(score, q, k[order], LAYOUT)), v[order], LAYOUT)
    assert ((permuted - out).abs().max() < 1e-12) == (name != "location"), "only location scores depend on positions"


def test_scaled_dot_attention_equals_attend() -> None:
    q, k, v = sample_qkv()
    actual = weighted_sum(soft_weights(align(scaled_dot, q, k, LAYOUT), visible_pairs(LAYOUT, window=1)), v, LAYOUT)
    expected = attend(q[:, None], k[:, None], v[:, None], LAYOUT, scale=WIDTH**-0.5, window=1)[:, 0]
    assert torch.allclose(actual, expected, atol=1e-12)


def test_hard_attention_is_one_hot_with_the_gradient_of_soft() -> None:
    q, k, v = (tensor.requires_grad_() for tensor in sample_qkv())
    masks = visible_pairs(LAYOUT, causal=True)
    weights = hard_weights(align(dot, q, k, LAYOUT), masks)
    for block, scores, mask in zip(weights, align(dot, q, k, LAYOUT), masks, strict=True):
        for row, row_scores, row_mask in zip(block.tolist(), scores.tolist(), mask.tolist(), strict=True):
            best = max((score for score, visible in zip(row_scores, row_mask, strict=True) if visible), default=None)
            assert row == [float(score == best) for score in row_scores]
    assert (weighted_sum(weights, v, LAYOUT)[3:5] == 0).all()
    with torch.no_grad():
        values = v.detach()
    gradients = [
        torch.autograd.grad(weighted_sum(make_weights(align(dot, q, k, LAYOUT), masks), values, LAYOUT).sum(), (q, k))
        for make_weights in (hard_weights, soft_weights)
    ]
    assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))
    with pytest.raises(HeedfulError, match=r"the masks have the shapes .*, but the scores .*: give one for each pair"):
        soft_weights(align(dot, q, k, LAYOUT), masks[1:])


def test_sampled_keys_and_their_gradient_estimate() -> None:
    """The expected gradient of REINFORCE is the gradient of the expected loss, with any baseline."""
    q, k, _ = (tensor.requires_grad_() for tensor in sample_qkv())
    layout, losses = Layout.of([0, 1], [0, 4]), torch.tensor([3.0, -1.0, 0.5, 2.0], dtype=torch.float64)
    (probabilities,) = soft_weights(align(dot, q[:1], k[:4], layout))
    (expected,) = torch.autograd.grad((probabilities[0] * losses).sum(), q)
    for baseline in (0.0, 5.0):
        (probabilities,) = soft_weights(align(dot, q[:1], k[:4], layout))
        (p,) = probabilities
        estimates = [p[j].item() * reinforce(p[j].log()[None], losses[j : j + 1], baseline) for j in range(4)]
        expectation = torch.stack(estimates).sum()
        assert torch.allclose(torch.autograd.grad(expectation, q)[0], expected, atol=1e-12)
    assert update_baseline(update_baseline(0.0, 1.0), 3.0) == pytest.approx(0.9 * 0.1 + 0.1 * 3)

    sample_layout = Layout.of([0, 2000], [0, 4])
    samples = sample_weights(
        align(dot, q[:1].expand(2000, -1), k[:4], sample_layout), generator=torch.Generator().manual_seed(0)
    )
    one_hot = torch.cat(samples.weights)
    assert ((one_hot == 0) | (one_hot == 1)).all() and (one_hot.sum(-1) == 1).all()
    assert torch.allclose(samples.log_probs, (one_hot * probabilities.log()).sum(-1), atol=1e-12)
    tolerance = 5 * (probabilities * (1 - probabilities) / 2000).sqrt()
    assert ((one_hot.mean(0) - probabilities[0]).abs() <= tolerance[0]).all()
    with_empty_sequences = sample_weights(align(dot, q, k, LAYOUT), visible_pairs(LAYOUT))
    assert with_empty_sequences.log_probs[3:5].tolist() == [0, 0]
    assert [tuple(weights.shape) for weights in with_empty_sequences.weights] == LAYOUT.sizes()


def test_cosine_of_small_and_of_half_precision_vectors() -> None:
    small = torch.full((1, 4), 1e-13, dtype=torch.float64)
    assert cosine(small, small).item() == pytest.approx(1)
    zero, random = torch.zeros(1, 4).half(), torch.randn(2, 4).half()
    assert cosine(zero, random).tolist() == [[0, 0]]
    assert cosine(random, random).diagonal().float().tolist() == pytest.approx([1, 1], abs=2e-3)


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e30])
def test_cosine_does_not_depend_on_the_norm(size: float) -> None:
    x = torch.tensor([[1.0, 2.0, -3.0]], requires_grad=True)
    y = torch.tensor([[2.0, 0.0, 1.0]])
    assert cosine(x * size, y).item() == pytest.approx(cosine(x, y).item(), abs=1e-6)
    plain = torch.nn.functional.cosine_similarity(x, y)
    (expected,) = torch.autograd.grad(plain.sum(), x)
    (gradient,) = torch.autograd.grad(cosine(x, y).sum(), x)
    torch.testing.assert_close(gradient, expected)
