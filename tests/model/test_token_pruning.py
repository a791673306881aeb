"""Token pruning, compared with a loop over heads and tokens in float64; the models and values that it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heedful.checkpoint import BundleConfig, ModelBundle
from heedful.checkpoint.new_head import with_head
from heedful.errors import ModelError
from heedful.model.attention import ExecutionOptions
from heedful.model.classic_config import ClassicConfig
from heedful.model.config import (
    Choice,
    Classes,
    EmbeddingConfig,
    Head,
    Learned,
    MaskedTokens,
    ModelConfig,
    NextToken,
    Rotary,
    SentenceEmbedding,
    SpanScores,
    StackConfig,
    TokenClasses,
)
from heedful.model.stack import Block
from heedful.model.token_pruning import (
    MIN_TOKENS,
    TokenPruning,
    cannot_prune,
    first_and_mean,
    prune_tokens,
    received_attention,
    rows_after,
)
from heedful.model.trace import Trace
from heedful.packed import Packed

LIMIT = 64
STACK = StackConfig(width=16, layers=4, heads=4, head_width=4, inner_width=24)
CONFIG = ModelConfig(
    embedding=EmbeddingConfig(vocabulary=50, width=16, positions=Learned(count=LIMIT), norm="layer"), encoder=STACK
)
HEAD = Classes(labels=("bad", "fair", "good"))
LENGTHS = (40, 1, 64, MIN_TOKENS, 33)
PRUNING = TokenPruning(layer=2, keep_rate=0.5)
STACKS: dict[str, dict[str, Any]] = {
    "post-norm": {},
    "pre-norm": {"norm_at": "pre", "final_norm": True},
    "key heads": {"kv_heads": 2},
    "normed keys": {"qk_norm": True},
    "shared blocks": {"blocks": 2},
}


def build(seed: int = 0, head: Head = HEAD, **stack: Any) -> ModelBundle:
    """Return a model in float64 with random weights; biases and norms are random too."""
    torch.manual_seed(seed)
    config = replace(CONFIG, encoder=replace(STACK, **stack))
    bundle = ModelBundle(BundleConfig(family="heedful", model=config, head=head)).double().eval()
    for name, parameter in bundle.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if "norm.weight" in name else 0.0, std=0.5)
    return bundle


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Return random tokens of sequences with these lengths."""
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(1, 50, (length,), generator=generator).tolist() for length in lengths]


def scores(bundle: ModelBundle, batch: Packed) -> Tensor:
    with torch.no_grad():
        outputs = bundle.head_outputs(batch)
    assert isinstance(outputs, Tensor)
    return outputs


def scores_by_loops(bundle: ModelBundle, tokens: list[int], pruning: TokenPruning) -> Tensor:
    """Return the scores of one sequence; the importance of its tokens is summed head by head and token by token."""
    batch, encoder = Packed.of([tokens]), bundle.model.encoder
    assert encoder is not None
    options = ExecutionOptions()
    x = encoder(bundle.model.embedding(batch), batch, options, end_layer=pruning.layer)
    block = encoder.blocks[pruning.layer * len(encoder.blocks) // encoder.config.layers]
    assert isinstance(block, Block)
    inputs = (block.attention_norm(x) if block.norm_first else x).detach()
    queries = torch.stack([inputs[0], inputs.mean(0)])
    q, k = (block.attention.project(states)[part].detach() for part, states in enumerate((queries, inputs)))
    group = block.attention.heads // block.attention.kv_heads
    importance = [0.0] * len(tokens)
    for head in range(block.attention.heads):
        for query in (0, 1):
            products = [q[query, head] @ k[row, head // group] * block.attention.scale for row in range(len(tokens))]
            for row, weight in enumerate(torch.stack(products).softmax(0).tolist()):
                importance[row] += weight
    ranked = sorted(range(1, len(tokens)), key=lambda row: -importance[row])
    count = max(MIN_TOKENS, -(-len(tokens) * int(100 * pruning.keep_rate) // 100))
    rows = sorted([0, *ranked[: count - 1]])
    remaining = Packed(
        tokens=batch.tokens[rows], positions=batch.positions[rows], types=batch.types[rows], bounds=(0, len(rows))
    )
    states = encoder(x[rows], remaining, options, first_layer=pruning.layer)
    assert bundle.head is not None
    outputs: Tensor = bundle.head(states, remaining)
    return outputs


@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS.keys())
@pytest.mark.parametrize(
    "pruning", [PRUNING, TokenPruning(layer=1, keep_rate=0.3), TokenPruning(layer=3, keep_rate=0.75)]
)
def test_scores_equal_those_of_a_loop_over_tokens(stack: dict[str, Any], pruning: TokenPruning) -> None:
    bundle = build(**stack)
    batch = Packed.of(sequences())
    unpruned = scores(bundle, batch)
    with torch.no_grad():
        expected = torch.cat([scores_by_loops(bundle, tokens, pruning) for tokens in sequences()])
    bundle.prune_tokens(pruning)
    outputs = scores(bundle, batch)
    torch.testing.assert_close(outputs, expected, atol=1e-10, rtol=0)
    is_long = torch.tensor([length > MIN_TOKENS for length in LENGTHS])
    changes = (outputs - unpruned).abs().amax(1)
    assert (changes[is_long] > 1e-4).all() and (changes[~is_long] < 1e-10).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_keep_rate_of_1_changes_no_bit(dtype: torch.dtype) -> None:
    bundle, batch = build().to(dtype), Packed.of(sequences())
    expected = scores(bundle, batch)
    bundle.prune_tokens(TokenPruning(layer=2, keep_rate=1.0))
    assert torch.equal(scores(bundle, batch), expected)


def test_a_sequence_does_not_depend_on_the_others() -> None:
    bundle = build()
    bundle.prune_tokens(PRUNING)
    batch_scores = scores(bundle, Packed.of(sequences()))
    alone = torch.cat([scores(bundle, Packed.of([tokens])) for tokens in sequences()])
    torch.testing.assert_close(batch_scores, alone, atol=1e-10, rtol=0)
    reversed_scores = scores(bundle, Packed.of(sequences()[::-1])).flip(0)
    torch.testing.assert_close(batch_scores, reversed_scores, atol=1e-10, rtol=0)


@pytest.mark.parametrize("lengths", [(40, 24), (40, 20, 4, 3), (64, 64, 2)])  # 64 rows need no padding, 67 and 130 do
def test_padding_to_a_bucket_changes_nothing(lengths: tuple[int, ...]) -> None:
    bundle, batch = build(), Packed.of(sequences(lengths))
    bundle.prune_tokens(PRUNING)
    expected = scores(bundle, batch)
    bundle.model.execution = replace(bundle.model.execution, pad_to_bucket=True)
    torch.testing.assert_close(scores(bundle, batch), expected, atol=1e-12, rtol=0)


def test_equally_important_tokens_remain_in_their_order() -> None:
    batch = Packed.of(sequences((40, 20)))
    rows, remaining = prune_tokens(PRUNING, torch.full((60,), 1 / 40), batch)
    assert rows.tolist() == [*range(20), *range(40, 40 + MIN_TOKENS)]
    assert remaining.bounds == (0, 20, 20 + MIN_TOKENS)


def test_received_attention_is_the_mean_over_heads_and_queries() -> None:
    generator = torch.Generator().manual_seed(0)
    batch = Packed.of(sequences((5, 1, 6)))
    q, k = (100 * torch.randn(shape, generator=generator).double() for shape in ((3, 2, 3, 4), (12, 3, 4)))
    received = received_attention(q, k, batch)  # exp of the products would overflow
    assert [part.sum().item() for part in batch.unpack(received)] == pytest.approx([1, 1, 1])
    weights = [(k[6:, head] @ q[2, query, head]).softmax(0) for head in range(3) for query in range(2)]
    torch.testing.assert_close(received[6:], torch.stack(weights).mean(0))


def test_empty_sequences_change_nothing() -> None:
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    batch = Packed.of(sequences((24, 16)))
    with_empty = replace(batch, bounds=(0, 0, 24, 24, 40, 40))
    q, q_with_empty = first_and_mean(x, batch), first_and_mean(x, with_empty)
    assert torch.equal(q[:, 0], x[[0, 24]]) and torch.equal(q_with_empty[[1, 3]], q)
    received = received_attention(q[:, :, None], x[:, None], batch)
    assert torch.equal(received_attention(q_with_empty[:, :, None], x[:, None], with_empty), received)
    rows, remaining = prune_tokens(PRUNING, received, with_empty)
    assert torch.equal(rows, prune_tokens(PRUNING, received, batch)[0])
    assert remaining.bounds == (0, 0, MIN_TOKENS, MIN_TOKENS, 2 * MIN_TOKENS, 2 * MIN_TOKENS)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("stack", STACKS.values(), ids=STACKS.keys())
def test_gradients_equal_those_of_a_loop_over_tokens(stack: dict[str, Any], gradient_checkpointing: bool) -> None:
    bundle = build(**stack).train()  # the models have no dropout
    weights = torch.randn(len(LENGTHS), 3, generator=torch.Generator().manual_seed(1)).double()
    parameters = [*bundle.parameters()]
    outputs = torch.cat([scores_by_loops(bundle, tokens, PRUNING) for tokens in sequences()])
    expected = torch.autograd.grad((weights * outputs).sum(), parameters)
    bundle.prune_tokens(PRUNING)
    bundle.model.execution = replace(bundle.model.execution, gradient_checkpointing=gradient_checkpointing)
    loss = (weights * bundle.head_outputs(Packed.of(sequences()))).sum()  # type: ignore[operator]
    torch.testing.assert_close(torch.autograd.grad(loss, parameters), expected, atol=1e-9, rtol=1e-9)


def test_a_new_head_keeps_the_pruning_if_it_can() -> None:
    bundle = build()
    bundle.prune_tokens(PRUNING)
    assert with_head(bundle, "sequence_classification", labels=("a", "b")).token_pruning == PRUNING
    assert with_head(bundle, "token_classification", labels=("O", "X")).token_pruning is None


def test_states_of_pruned_tokens_are_refused() -> None:
    bundle, batch = build(), Packed.of(sequences())
    bundle.prune_tokens(PRUNING)
    for arguments in ({}, {"trace": Trace(), "output_rows": batch.first_rows()}):
        with pytest.raises(ModelError, match="this model prunes tokens, so that it has no last hidden states of all"):
            bundle.hidden_states(batch, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="hidden states of pruned tokens are needed: only the first token"):
        bundle.hidden_states(batch, output_rows=torch.arange(40))
    rows = torch.tensor([0, 3, 7])
    assert rows_after(rows, torch.tensor([7, 0])).tolist() == [2, 0]
    for pruned_row in (1, 8):
        with pytest.raises(ModelError, match="pruned tokens"):
            rows_after(rows, torch.tensor([0, pruned_row]))


@pytest.mark.parametrize(
    ("layer", "keep_rate", "message"),
    [
        (0, 0.5, "layer is 0; expected the number of lower layers that compute all tokens, from 1"),
        (1, 0.0, "keep_rate is 0.0; expected a share of the tokens, above 0 and at most 1"),
        (1, 1.1, "keep_rate is 1.1"),
        (1, float("nan"), "keep_rate is nan"),
    ],
)
def test_values_out_of_range_are_refused(layer: int, keep_rate: float, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        TokenPruning(layer=layer, keep_rate=keep_rate)


@pytest.mark.parametrize(
    ("model", "head", "reason"),
    [
        (CONFIG, None, "it has no head, and tokens are pruned for labels or a score of a whole text"),
        (CONFIG, TokenClasses(labels=("O", "X")), "it has a token_classification head"),
        (CONFIG, SpanScores(), "it has a question_answering head"),
        (CONFIG, MaskedTokens(), "it has a masked_lm head"),
        (CONFIG, Choice(), "it has a multiple_choice head"),
        (CONFIG, SentenceEmbedding(pooling=("mean",)), "it has an? embedding head"),
        (CONFIG, Classes(labels=("a", "b"), pooling="mean"), 'its pooling is "mean"'),
        (ModelConfig(embedding=CONFIG.embedding, decoder=replace(STACK, causal=True)), NextToken(), "no decoder"),
        (ClassicConfig(embedding=EmbeddingConfig(vocabulary=9, width=8)), HEAD, "an encoder and no decoder"),
        (replace(CONFIG, encoder=replace(STACK, relation=Rotary())), HEAD, r'relative positions \("rotary"\)'),
        (replace(CONFIG, encoder=replace(STACK, window=8)), HEAD, "does not attend to the whole sequence"),
        (replace(CONFIG, encoder=replace(STACK, layers=1)), HEAD, "it has one layer"),
    ],
)
def test_models_that_cannot_be_pruned_are_refused_with_a_reason(
    model: ModelConfig, head: Head | None, reason: str
) -> None:
    bundle = ModelBundle(BundleConfig(family="heedful", model=model, head=head), source="model")
    with pytest.raises(ModelError, match=f"model: tokens cannot be pruned: .*{reason}"):
        bundle.prune_tokens(PRUNING)
    assert cannot_prune(model, head)
    assert bundle.token_pruning is None
    bundle.prune_tokens(None)


def test_the_layer_must_exist() -> None:
    bundle = build()
    with pytest.raises(ModelError, match="layer is 4, of 4 layers: give 1 to 3"):
        bundle.prune_tokens(TokenPruning(layer=4, keep_rate=0.5))
    assert cannot_prune(bundle.config.model, bundle.config.head) == ""
    bundle.prune_tokens(TokenPruning(layer=3, keep_rate=0.5))
    assert bundle.token_pruning == TokenPruning(layer=3, keep_rate=0.5)
