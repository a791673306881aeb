"""Relative positions equal loops over their formulas: buckets, rotary, disentangled, Shaw's and Transformer-XL's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from heedful.errors import DataError
from heedful.nn.attend import attend
from heedful.nn.layout import DenseBias, Layout, RelativeBias
from heedful.nn.positions import (
    SEGMENTS,
    BucketedPosition,
    DisentangledPosition,
    RotaryPosition,
    ShawPosition,
    TransformerXlPosition,
    distance_buckets,
    sinusoid,
)
from heedful.packed import Packed

HEADS, WIDTH = 2, 6
LENGTHS = (5, 1, 9)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def make_qkv(types: bool = False) -> tuple[Packed, Tensor, Tensor, Tensor]:
    """Return a batch, and random q, k and v; `types`: with three token types."""
    ids = [[7] * length for length in LENGTHS]
    batch = Packed.of(ids, [[position % 3 for position in range(length)] for length in LENGTHS] if types else None)
    return batch, *(torch.randn(len(batch.tokens), HEADS, WIDTH, dtype=torch.float64) for _ in range(3))


def test_buckets_are_the_published_ones() -> None:
    distances = [-200, -128, -127, -64, -20, -16, -9, -8, -7, -1, 0, 1, 7, 8, 9, 16, 20, 64, 127, 128, 200]
    bidirectional = [15, 15, 15, 14, 10, 10, 8, 8, 7, 1, 0, 17, 23, 24, 24, 26, 26, 30, 31, 31, 31]
    causal = [31, 31, 31, 26, 17, 16, 9, 8, 7, 1, 0, *[0] * 10]
    assert distance_buckets(torch.tensor(distances), 32, 128, False).tolist() == bidirectional
    assert distance_buckets(torch.tensor(distances), 32, 128, True).tolist() == causal


@pytest.mark.parametrize(("count", "reach"), [(32, 128), (8, 14), (6, 20), (64, 300)])
@pytest.mark.parametrize("causal", [False, True])
def test_buckets_equal_transformers_at_every_distance(count: int, reach: int, causal: bool) -> None:
    distances = torch.arange(-400, 401)
    expected = T5Attention._relative_position_bucket(distances, not causal, count, reach)
    assert torch.equal(distance_buckets(distances, count, reach, causal), expected)


def refuse_to_project(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fail: most relative positions do not use the layer's projection."""
    raise AssertionError("the layer's projection is not needed")


def test_the_bias_of_disentangled_attention_equals_its_formula() -> None:
    """The bias is scale (q K(p) + k Q(p)), where p is the vector of query position minus key position."""
    batch, q, k, _ = make_qkv()
    relation = DisentangledPosition(buckets=4, reach=6, width=12, norm_eps=1e-7, dropout=0.0).double()
    queries, keys = (torch.nn.Linear(12, HEADS * WIDTH).double() for _ in range(2))

    def project(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        projected_q, projected_k = (layer(rows).unflatten(-1, (HEADS, WIDTH)) for layer in (queries, keys))
        return projected_q, projected_k, projected_k

    bias = relation.bias(q, k, relation.prepare(batch, q, cache_bias=True), 0.3, project)
    dense = bias.dense(q, k, 0.3, Layout.within(batch))
    vectors = relation.norm(relation.table.weight)
    for number, (start, _) in enumerate(Layout.within(batch).queries):
        block = dense.blocks[number]
        for i in range(block.shape[1]):
            for j in range(block.shape[2]):
                row = int(relation.rows(torch.tensor([i - j])))
                position_q, position_k, _ = project(vectors[row : row + 1])
                expected = 0.3 * ((q[start + i] * position_k[0]).sum(-1) + (k[start + j] * position_q[0]).sum(-1))
                assert (block[:, i, j] - expected).abs().max() < 1e-12


def test_the_bias_of_a_distance_is_that_of_its_bucket() -> None:
    batch, q, k, _ = make_qkv()
    relation = BucketedPosition(count=8, reach=6, heads=HEADS, causal=False).double()
    bias = relation.bias(q, k, relation.prepare(batch, q, cache_bias=True), 1.0, refuse_to_project)
    for distance in range(-8, 9):
        column = max(-bias.reach, min(bias.reach, distance)) + bias.reach
        expected = relation.table.weight[distance_buckets(torch.tensor(distance), 8, 6, False)]
        assert torch.equal(bias.table[:, column], expected)


def test_rotary_products_depend_on_the_distance_only() -> None:
    batch, q, k, _ = make_qkv()
    relation = RotaryPosition(base=100.0, width=WIDTH)
    rotated = relation.rotate(q, k, relation.prepare(batch, q, cache_bias=True))
    shifted_batch = Packed(tokens=batch.tokens, positions=batch.positions + 11, types=batch.types, bounds=batch.bounds)
    shifted = relation.rotate(q, k, relation.prepare(shifted_batch, q, cache_bias=True))
    for span in batch.spans():
        products, shifted_products = (torch.einsum("ihd,jhd->hij", x[span], y[span]) for x, y in (rotated, shifted))
        assert (products - shifted_products).abs().max() < 1e-12
    position = int(batch.positions[3])
    for i in range(WIDTH // 2):
        angle = position * 100.0 ** (-2 * i / WIDTH)
        x, y = q[3, 0, i], q[3, 0, i + WIDTH // 2]
        assert abs(rotated[0][3, 0, i] - (x * math.cos(angle) - y * math.sin(angle))) < 1e-12
        assert abs(rotated[0][3, 0, i + WIDTH // 2] - (y * math.cos(angle) + x * math.sin(angle))) < 1e-12


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("backend", ["reference", "bmm"])
@pytest.mark.parametrize("reach", [2, 30])
def test_shaw(values: bool, backend: str, reach: int) -> None:
    """Attention equals its formula with clipped distances; there are 2 reach + 1 vectors for keys and for values."""
    batch, q, k, v = make_qkv()
    relation = ShawPosition(reach=reach, width=WIDTH, values=values).double()
    assert sum(weight.numel() for weight in relation.parameters()) == (1 + values) * (2 * reach + 1) * WIDTH
    bias = relation.bias(q, k, relation.prepare(batch, q, cache_bias=True), 0.4, refuse_to_project)
    output = attend(q, k, v, Layout.within(batch), scale=0.4, bias=bias, backend=backend)
    for start, stop in Layout.within(batch).queries:
        for i in range(start, stop):
            for h in range(HEADS):
                columns = [max(-reach, min(reach, j - i)) + reach for j in range(start, stop)]
                keys = torch.stack([k[start + n, h] + relation.keys.weight[p] for n, p in enumerate(columns)])
                weights = (0.4 * keys @ q[i, h]).softmax(0)
                values_of_keys = v[start:stop, h] + (relation.values.weight[columns] if values else 0.0)
                assert (output[i, h] - weights @ values_of_keys).abs().max() < 1e-12


@pytest.mark.parametrize("reach", [None, 3])
@pytest.mark.parametrize("two_streams", [False, True])
def test_transformer_xl(reach: int | None, two_streams: bool) -> None:
    """Logits are scale ((q + u) k + (q + w) R p + (q + s) e), in one stream and with the masks of two streams."""
    batch, q, k, v = make_qkv(types=True)
    relation = TransformerXlPosition(width=8, heads=HEADS, head_width=WIDTH, reach=reach, dropout=0.0).double()
    for weight in relation.parameters():
        torch.nn.init.normal_(weight)
    masks = [torch.rand(length, length) < 0.6 for length in LENGTHS]
    if two_streams:
        batch = Packed(
            tokens=batch.tokens,
            positions=batch.positions,
            types=batch.types,
            bounds=batch.bounds,
            key_lengths=LENGTHS,
            visibility=tuple(mask | torch.eye(len(mask), dtype=torch.bool) for mask in masks),
        )
    prepared = relation.prepare(batch, q, cache_bias=True)
    bias = relation.bias(q, k, prepared, 0.3, refuse_to_project)
    assert isinstance(bias, DenseBias if two_streams else RelativeBias)
    rotated = relation.rotate(q, k, prepared)
    output = attend(*rotated, v, Layout.within(batch), scale=0.3, bias=bias)
    for number, (start, stop) in enumerate(Layout.within(batch).queries):
        for i in range(start, stop):
            for h in range(HEADS):
                logits = []
                for j in range(start, stop):
                    distance = i - j if reach is None else max(-reach, min(reach, i - j))
                    wave = sinusoid(torch.tensor([distance]), 8, "halves")[0]
                    position = relation.position(wave).unflatten(0, (HEADS, WIDTH))[h]
                    segment = relation.same_type[int(batch.types[i] != batch.types[j]), h]
                    content_term = (q[i, h] + relation.content_bias[h]) @ k[j, h]
                    position_term = (q[i, h] + relation.position_bias[h]) @ position
                    segment_term = (q[i, h] + relation.type_bias[h]) @ segment
                    logits.append(0.3 * (content_term + position_term + segment_term))
                row = torch.stack(logits)
                if batch.visibility is not None:
                    row = row.masked_fill(~batch.visibility[number][i - start], -torch.inf)
                assert (output[i, h] - row.softmax(0) @ v[start:stop, h]).abs().max() < 1e-12


@pytest.mark.parametrize("bad", [SEGMENTS, -1])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_unknown_segment_types_are_refused_before_a_gpu_gets_them(bad: int, device: str) -> None:
    """The meta device, which has no values to read, represents a GPU."""
    relation = TransformerXlPosition(width=8, heads=HEADS, head_width=WIDTH, reach=None, dropout=0.0)
    batch = Packed.of([[5, 6]], [[0, bad]]).to(device)
    with pytest.raises(DataError, match=f"the batch has segment type {bad}; this model knows 0 to 7"):
        relation.prepare(batch, torch.zeros(1, device=device), cache_bias=True)
