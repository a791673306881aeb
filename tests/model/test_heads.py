"""Heads: poolings, formulas, tied decoders, dropout, and refused configurations."""

from __future__ import annotations

import dataclasses
from math import sqrt
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heedful.checkpoint import BundleConfig, ModelBundle
from heedful.errors import HeedfulError
from heedful.model import config as c
from heedful.model.heads import make_head, pool, pooled_row
from heedful.model.stack import Transformer
from heedful.nn.dropout import dropout
from heedful.packed import Packed

MODEL = c.ModelConfig(
    embedding=c.EmbeddingConfig(vocabulary=30, width=8),
    encoder=c.StackConfig(width=8, layers=1, heads=2, head_width=4, inner_width=12),
)
BATCH = Packed.of([[1, 2, 3], [4], [5, 6, 7, 8, 9], [2, 2]])


def build(head: c.Head) -> tuple[Transformer, nn.Module]:
    """Return a tiny model, and a head for it with random weights, in float64."""
    torch.manual_seed(0)
    model = Transformer(MODEL)
    built = make_head(head, model)
    for parameter in built.parameters():
        nn.init.normal_(parameter)
    return model.double().eval(), built.double().eval()


def pool_in_python(rows: list[list[float]], pooling: str) -> list[float]:
    """Pool the rows of one sequence."""
    columns = list(zip(*rows, strict=True))
    return {
        "mean": [sum(column) / len(rows) for column in columns],
        "first": rows[0],
        "last": rows[-1],
        "max": [max(column) for column in columns],
        "mean_sqrt_length": [sum(column) / sqrt(len(rows)) for column in columns],
    }[pooling]


@pytest.mark.parametrize("pooling", ["mean", "first", "max", "mean_sqrt_length", "last"])
def test_poolings_equal_plain_python(pooling: c.Pooling) -> None:
    rows = torch.randn(11, 8, dtype=torch.float64)
    expected = [pool_in_python(sequence_rows.tolist(), pooling) for sequence_rows in BATCH.unpack(rows)]
    torch.testing.assert_close(
        pool(rows, BATCH, pooling), torch.tensor(expected, dtype=torch.float64), atol=1e-14, rtol=0
    )
    assert pool(rows[:0], Packed.of([]), pooling).shape == (0, 8)


@pytest.mark.parametrize("pooling", ["mean", "mean_sqrt_length"])
def test_poolings_of_long_sequences_in_bfloat16_are_rounded_once(pooling: c.Pooling) -> None:
    rows = (torch.rand(2000, 4, generator=torch.Generator().manual_seed(1)) + 0.5).bfloat16()
    batch = Packed.of([[1] * 1331, [1] * 669])
    exact = pool(rows.double(), batch, pooling)
    assert torch.equal(pool(rows, batch, pooling), exact.bfloat16())


def test_sentence_embeddings_are_concatenated_and_then_normalised() -> None:
    rows = torch.randn(11, 8, dtype=torch.float64)
    model, _ = build(c.Pooled())
    poolings: tuple[c.Pooling, ...] = ("max", "first")
    concatenated = torch.cat([pool(rows, BATCH, pooling) for pooling in poolings], -1)
    assert torch.equal(make_head(c.SentenceEmbedding(pooling=poolings), model)(rows, BATCH), concatenated)
    unit = make_head(c.SentenceEmbedding(pooling=poolings, normalise=True), model)(rows, BATCH)
    expected = concatenated / concatenated.square().sum(-1, keepdim=True).sqrt()
    torch.testing.assert_close(unit, expected, atol=1e-14, rtol=0)


@pytest.mark.parametrize("pooling", get_args(c.Pooling))
def test_an_empty_sequence_has_a_vector_of_zeros(pooling: c.Pooling) -> None:
    """An empty sequence has no gradient and changes no other sequence."""
    _, head = build(c.SentenceEmbedding(pooling=(pooling,), normalise=True))
    rows = torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    logits = head(rows, Packed.of([[1], [], [2]]))
    assert torch.equal(logits[1], torch.zeros(8)) and torch.equal(logits[[0, 2]], F.normalize(rows, dim=-1))
    logits.square().sum().backward()
    assert rows.grad is not None and rows.grad.isfinite().all()


@pytest.mark.parametrize("head", [c.Classes(labels=()), c.TokenClasses(labels=())], ids=lambda head: head.kind)
def test_classes_need_labels(head: c.Head) -> None:
    with pytest.raises(HeedfulError, match=f'^a "{head.kind}" head has no labels'):
        make_head(head, Transformer(MODEL))


def linear(x: Tensor, layer: nn.Module) -> Tensor:
    assert isinstance(layer, nn.Linear)
    return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)


def test_the_masked_lm_head_equals_its_formula() -> None:
    model, head = build(c.MaskedTokens(activation="gelu"))
    rows = torch.randn(11, 8, dtype=torch.float64)
    inner = F.gelu(linear(rows, head.get_submodule("dense")))
    centred = inner - inner.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-12).sqrt()
    normed = normed * head.get_parameter("norm.weight") + head.get_parameter("norm.bias")
    expected = normed @ model.embedding.tokens.weight.T + head.get_parameter("decoder.bias")
    torch.testing.assert_close(head(rows, BATCH), expected, atol=1e-12, rtol=0)


def test_heads_that_pool_the_first_row_equal_their_formulas() -> None:
    rows = torch.randn(11, 8, dtype=torch.float64)
    first = rows[[0, 3, 4, 9]]
    _, pooled = build(c.Pooled())
    torch.testing.assert_close(pooled(rows, BATCH), linear(first, pooled.get_submodule("first.dense")).tanh())
    _, classes = build(c.Classes(labels=("x", "y", "z"), activation="relu"))
    hidden = linear(first, classes.get_submodule("first.dense")).relu()
    torch.testing.assert_close(classes(rows, BATCH), linear(hidden, classes.get_submodule("out")))
    _, choice = build(c.Choice())
    hidden = linear(first, choice.get_submodule("first.dense")).tanh()
    torch.testing.assert_close(choice(rows, BATCH), linear(hidden, choice.get_submodule("out"))[:, 0])


@pytest.mark.parametrize(
    ("head", "rows"),
    [
        (c.Classes(labels=("x", "y")), [0, 3, 4, 9]),
        (c.Classes(labels=("x", "y"), pooling="last"), [2, 3, 8, 10]),
        (c.Classes(labels=("x", "y"), pooling="mean"), None),
        (c.Choice(), [0, 3, 4, 9]),
        (c.Pooled(), [0, 3, 4, 9]),
        (c.NextSentenceScores(), [0, 3, 4, 9]),
        (c.SentenceEmbedding(pooling=("last",)), [2, 3, 8, 10]),
        (c.SentenceEmbedding(pooling=("first", "last")), None),
        (c.TokenClasses(labels=("x", "y")), None),
        (c.Pretraining(), None),
    ],
    ids=lambda head_: head_.kind if isinstance(head_, c.Head) else "",
)
def test_scores_from_the_pooled_rows_equal_those_from_all_rows(head: c.Head, rows: list[int] | None) -> None:
    loaded = ModelBundle(BundleConfig(family="heedful", model=MODEL, head=head)).double().eval()
    assert loaded.head is not None
    pooled_rows, pooled_batch = pooled_row(loaded.head, BATCH)
    assert rows == (None if pooled_rows is None else pooled_rows.tolist())
    assert pooled_batch.bounds == (BATCH.bounds if rows is None else (0, 1, 2, 3, 4))
    from_all_rows = loaded.head(loaded.model(BATCH), BATCH)
    torch.testing.assert_close(loaded(BATCH), from_all_rows, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("pooling", ["first", "last"])
def test_the_scores_of_an_empty_sequence_are_the_bias(pooling: c.Pooling) -> None:
    head = c.Classes(labels=("x", "y"), pooling=pooling, dense=False, activation=None)
    loaded = ModelBundle(BundleConfig(family="heedful", model=MODEL, head=head)).double().eval()
    assert loaded.head is not None
    logits, bias = loaded(Packed.of([[1, 2], [], [3]])), loaded.head.get_parameter("out.bias")
    assert torch.equal(logits[1], bias) and torch.equal(loaded(Packed.of([[]]))[0], bias)
    torch.testing.assert_close(logits[[0, 2]], loaded(Packed.of([[1, 2], [3]])), atol=1e-12, rtol=1e-12)


def test_a_head_of_an_empty_batch() -> None:
    loaded = ModelBundle(BundleConfig(family="heedful", model=MODEL, head=c.Classes(labels=("x", "y"))))
    assert loaded(Packed.of([])).shape == (0, 2)


def test_heads_that_score_each_row() -> None:
    rows = torch.randn(11, 8, dtype=torch.float64)
    for config, scores in ((c.TokenClasses(labels=("a", "b", "c")), 3), (c.SpanScores(), 2)):
        _, head = build(config)
        assert head(rows, BATCH).shape == (11, scores)
        torch.testing.assert_close(head(rows, BATCH), linear(rows, head.get_submodule("out")))


@pytest.mark.parametrize(
    "head", [c.MaskedTokens(), c.Pretraining(), c.NextToken(bias=True)], ids=lambda head: head.kind
)
@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_decoder_shares_storage_and_counts_once(head: c.Head, tied: bool) -> None:
    loaded = ModelBundle(BundleConfig(family="heedful", model=MODEL, head=dataclasses.replace(head, tied=tied)))
    name = "head.masked.decoder" if isinstance(head, c.Pretraining) else "head.decoder"
    decoder = loaded.get_submodule(name)
    assert (decoder.weight is loaded.model.embedding.tokens.weight) == tied
    untied = ModelBundle(BundleConfig(family="heedful", model=MODEL, head=dataclasses.replace(head, tied=not tied)))
    assert loaded.count() - untied.count() == (-30 * 8 if tied else 30 * 8)
    assert decoder.bias.shape == (30,)


def test_the_classes_head_has_dropout_before_both_layers() -> None:
    _, head = build(c.Classes(labels=("a",), dropout_first=0.25, dropout=0.5))
    rows = torch.randn(11, 8, dtype=torch.float64)
    torch.manual_seed(3)
    dropped = head.train()(rows, BATCH)
    torch.manual_seed(3)
    hidden = linear(dropout(rows[[0, 3, 4, 9]], 0.25), head.get_submodule("first.dense")).tanh()
    torch.testing.assert_close(dropped, linear(dropout(hidden, 0.5), head.get_submodule("out")))
    assert torch.equal(head.eval()(rows, BATCH), head(rows, BATCH))
