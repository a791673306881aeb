"""Floating-point operations of a training step, recorded: those of linear layers and the head equal a formula."""

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

LAYERS, WIDTH = 3, 48
MAX_LENGTH = 128  # tokens in a sequence
PACK_TOKENS, BATCH_SIZE = 1024, 4
LINEAR = {"mm", "addmm"}  # ops of linear layers
ATTENTION = {"bmm", "baddbmm"}  # ops of attention, whose products are batched over sequences and heads
# ends of words in the names of other ops that compute products
PRODUCT_SUFFIXES = ("mm", "matmul", "linear", "attention", "dot", "einsum", "convolution", "addr", "mv")


@dataclass(frozen=True, slots=True)
class Product:
    """A batch of `times` products of matrices [m, k] and [k, n]."""

    op: str
    sizes: tuple[int, int, int]  # m, k, n
    times: int = 1

    @property
    def flops(self) -> int:
        """Number of floating-point operations, two for each multiply-add."""
        return 2 * prod(self.sizes) * self.times


class ProductRecorder(TorchDispatchMode):
    """Context that records every product which is computed in it, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []
        self.unknown: Counter[str] = Counter()  # calls of ops that may be products, but are not recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in LINEAR | ATTENTION:
            a, b = [argument for argument in args if isinstance(argument, Tensor) and argument.ndim >= 2][-2:]
            times = a.shape[0] if a.ndim == 3 else 1
            self.products.append(Product(name, (a.shape[-2], a.shape[-1], b.shape[-1]), times))
        elif name.startswith("_scaled_dot_product"):
            self.products.append(Product(name, (0, 0, 0)))
        elif any(word.endswith(PRODUCT_SUFFIXES) for word in name.split("_")):
            self.unknown[name] += 1
        return func(*args, **(kwargs or {}))


def make_model() -> ModelBundle:
    """Return an encoder whose inner width is four times its width, with a tied head over the vocabulary."""
    embedding = EmbeddingConfig(
        vocabulary=tokenizer().size, width=WIDTH, positions=Learned(count=MAX_LENGTH), types=2, norm="layer"
    )
    encoder = StackConfig(width=WIDTH, layers=LAYERS, heads=3, head_width=WIDTH // 3, inner_width=4 * WIDTH)
    config = BundleConfig(
        family="heedful", model=ModelConfig(embedding=embedding, encoder=encoder), head=MaskedTokens()
    )
    return create(config, tokenizer(), seed=1)


def make_packs() -> list[Sample]:
    """Return the full packs of 200 sequences of 5 to 128 tokens."""
    rng = np.random.default_rng(1)
    lengths = np.minimum(rng.lognormal(4.5, 0.5, 200).astype(np.int64) + 5, MAX_LENGTH)
    packs = pack_best_fit(lengths, PACK_TOKENS, seed=1)
    packed_ids = [[rng.integers(5, tokenizer().size, lengths[index]).tolist() for index in pack] for pack in packs]
    return [
        Sample.of(ids, [[0] * len(sequence) for sequence in ids])
        for ids in packed_ids
        if sum(map(len, ids)) >= FULL * PACK_TOKENS
    ]


def products_of_a_step(
    precision: Literal["float32", "bfloat16"],
) -> tuple[ProductRecorder, int, int, set[tuple[int, int]]]:
    """Return the products of one update, its numbers of tokens and targets, and the shapes of all linear layers."""
    settings = TrainSettings(max_steps=9, batch_size=BATCH_SIZE, precision=precision)
    trainer = Trainer(make_model(), MaskedLM(tokenizer=tokenizer()), make_packs(), settings)
    plan = trainer.order.plan(0)
    batch = trainer.objective.batch([trainer.samples[index] for index in plan.indices], plan.keys)
    with ProductRecorder() as recorder:
        step = trainer.train_step()
    assert step.tokens == len(batch.packed.tokens)
    layers = [module for module in trainer.loaded.modules() if isinstance(module, nn.Linear)]
    weights = {(min(layer.weight.shape), max(layer.weight.shape)) for layer in layers}
    return recorder, step.tokens, len(batch.targets), weights


def expected_flops(tokens: int, targets: int) -> int:
    """Return the operations of linear layers and the head: forward, and twice as many backward.

    After its attention, the last block computes only rows of targets: 2 d^2 for the output, 16 d^2 for the MLP.
    """
    d, V = WIDTH, tokenizer().size
    return 3 * (tokens * (LAYERS * 24 - 18) * d**2 + targets * (18 * d**2 + 2 * d**2 + 2 * d * V))


def weight_flops(products: Iterable[Product], weights: set[tuple[int, int]]) -> int:
    """Return the operations of products that read a weight, or compute the gradient of one, for any number of rows.

    These are x W, its gradient dy W^T, and x^T dy, so that two of the three sizes are those of W.
    """
    total = 0
    for product in products:
        m, k, n = product.sizes
        if product.times == 1 and {(min(pair), max(pair)) for pair in ((m, k), (k, n), (m, n))} & weights:
            total += product.flops
    return total


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_operations_equal_the_formula(precision: Literal["float32", "bfloat16"]) -> None:
    recorder, tokens, targets, weights = products_of_a_step(precision)
    assert not recorder.unknown, "record these ops, or exclude them"
    assert FULL * PACK_TOKENS * BATCH_SIZE <= tokens <= PACK_TOKENS * BATCH_SIZE
    linear = [product for product in recorder.products if product.op in LINEAR]
    # ops and shapes must agree: products of attention are not counted as linear layers, and products of linear layers
    # not as attention
    assert weight_flops(linear, weights) == sum(product.flops for product in linear)
    assert any(product.op not in LINEAR for product in recorder.products)
    assert not weight_flops([product for product in recorder.products if product.op not in LINEAR], weights)
    ratio = sum(product.flops for product in linear) / expected_flops(tokens, targets)
    if precision == "float32":
        assert ratio == 1
    else:  # with rows of padding, see Packed.pad_to_bucket
        assert 1 <= ratio <= 1.02


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 6, 8, 16])
def test_padding_to_buckets_adds_few_rows(batch: int) -> None:
    """In bfloat16, the number of rows is rounded up; for packs that are nearly full, this adds at most 2 %."""
    for tokens in (batch * PACK_TOKENS, round(FULL * batch * PACK_TOKENS)):
        assert Packed.of([[7] * tokens]).pad_to_bucket().bounds[-1] <= 1.02 * tokens
