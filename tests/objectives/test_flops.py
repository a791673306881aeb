"""Products of a training step: those of linear layers and the vocabulary head are what the formula says, no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
import pytest
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.model.config import EmbeddingConfig, Learned, MaskedTokens, ModelConfig, StackConfig
from heedful.objectives import Sample
from heedful.objectives.masked_lm import MaskedLM
from heedful.objectives.packing import FULL, pack_best_fit
from heedful.packed import Packed
from heedful.train.trainer import Trainer, TrainSettings
from tests.support.tiny_runs import tokenizer

LAYERS, WIDTH, LENGTH, ROW, STEP = 3, 48, 128, 1024, 4
LINEAR = {"mm", "addmm"}  # what linear layers are made of
ATTENTION = {"bmm", "baddbmm"}  # attention's products have a batch of lines and heads
# what ends a word in the name of any other product
PRODUCT = ("mm", "matmul", "linear", "attention", "dot", "einsum", "convolution", "addr", "mv")


@dataclass(frozen=True, slots=True)
class Product:
    """[m, k] x [k, n], so many times."""

    op: str
    sizes: tuple[int, int, int]
    times: int = 1

    @property
    def flops(self) -> int:
        """A multiplication and an addition each."""
        return 2 * prod(self.sizes) * self.times


class Products(TorchDispatchMode):
    """Takes down every product that is computed inside, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Product] = []
        self.unknown: Counter[str] = Counter()  # ops that sound like products, and are not understood here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in LINEAR | ATTENTION:
            a, b = [each for each in args if isinstance(each, Tensor) and each.ndim >= 2][-2:]
            times = a.shape[0] if a.ndim == 3 else 1
            self.seen.append(Product(name, (a.shape[-2], a.shape[-1], b.shape[-1]), times))
        elif name.startswith("_scaled_dot_product"):
            self.seen.append(Product(name, (0, 0, 0)))
        elif any(part.endswith(PRODUCT) for part in name.split("_")):
            self.unknown[name] += 1
        return func(*args, **(kwargs or {}))


def model() -> ModelBundle:
    """A stack whose inner width is four times its width, and a tied head over the vocabulary."""
    embedding = EmbeddingConfig(
        vocabulary=tokenizer().size, width=WIDTH, positions=Learned(count=LENGTH), types=2, norm="layer"
    )
    encoder = StackConfig(width=WIDTH, layers=LAYERS, heads=3, head_width=WIDTH // 3, inner_width=4 * WIDTH)
    config = BundleConfig(
        family="heedful", model=ModelConfig(embedding=embedding, encoder=encoder), head=MaskedTokens()
    )
    return create(config, tokenizer(), seed=1)


def rows() -> list[Sample]:
    """Rows of 1,024 tokens, of sequences of 5 to 128 tokens; no more than one of them is not full."""
    draw = np.random.default_rng(1)
    lengths = np.minimum(draw.lognormal(4.5, 0.5, 200).astype(np.int64) + 5, LENGTH)
    packs = pack_best_fit(lengths, ROW, seed=1)
    packed_ids = [[draw.integers(5, tokenizer().size, lengths[each]).tolist() for each in row] for row in packs]
    return [Sample.of(ids, [[0] * len(each) for each in ids]) for ids in packed_ids if sum(map(len, ids)) >= FULL * ROW]


def products_of_a_step(precision: Literal["float32", "bfloat16"]) -> tuple[Products, int, int, set[tuple[int, int]]]:
    """What one update computes, how many tokens and targets it has, and the shapes of all linear layers."""
    settings = TrainSettings(max_steps=9, batch_size=STEP, precision=precision)
    trainer = Trainer(model(), MaskedLM(tokenizer=tokenizer()), rows(), settings)
    plan = trainer.order.plan(0)
    batch = trainer.objective.batch([trainer.samples[index] for index in plan.indices], plan.keys)
    with Products() as products:
        step = trainer.train_step()
    assert step.tokens == len(batch.packed.tokens)
    layers = [each for each in trainer.loaded.modules() if isinstance(each, nn.Linear)]
    weights = {(min(each.weight.shape), max(each.weight.shape)) for each in layers}
    return products, step.tokens, len(batch.targets), weights


def formula(tokens: int, targets: int) -> int:
    """Forward, and twice as much backward; inner width 4 d, scores apart.

    After its attention the last block (2 d^2 to leave it, 16 d^2 of the MLP) goes on with the targets' rows alone.
    """
    d, V = WIDTH, tokenizer().size
    return 3 * (tokens * (LAYERS * 24 - 18) * d**2 + targets * (18 * d**2 + 2 * d**2 + 2 * d * V))


def of_weights(products: Iterable[Product], weights: set[tuple[int, int]]) -> int:
    """The operations of those that read a weight, or make the gradient of one, for any number of rows.

    These are x W, its gradient dy W^T, and x^T dy, so that two of the three sizes are those of W.
    """
    total = 0
    for each in products:
        m, k, n = each.sizes
        if each.times == 1 and {(min(pair), max(pair)) for pair in ((m, k), (k, n), (m, n))} & weights:
            total += each.flops
    return total


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_products_are_those_of_the_formula(precision: Literal["float32", "bfloat16"]) -> None:
    products, tokens, targets, weights = products_of_a_step(precision)
    assert not products.unknown, "count them, or say that they are none"
    assert FULL * ROW * STEP <= tokens <= ROW * STEP
    linear = [each for each in products.seen if each.op in LINEAR]
    # the op and the shape have to tell the same: nothing of attention is among the linear layers, and nothing of theirs
    # among attention's products
    assert of_weights(linear, weights) == sum(each.flops for each in linear)
    assert any(each.op not in LINEAR for each in products.seen)
    assert not of_weights([each for each in products.seen if each.op not in LINEAR], weights)
    ratio = sum(each.flops for each in linear) / formula(tokens, targets)
    if precision == "float32":
        assert ratio == 1
    else:  # rows that only fill: see Packed.filled
        assert 1 <= ratio <= 1.02


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 6, 8, 16])
def test_rows_that_fill_are_few(batch: int) -> None:
    """In bfloat16 the number of rows is rounded up: rows of 1,024 that are nearly full leave almost nothing to add."""
    for tokens in (batch * ROW, round(FULL * batch * ROW)):
        assert Packed.of([[7] * tokens]).pad_to_bucket().bounds[-1] <= 1.02 * tokens
