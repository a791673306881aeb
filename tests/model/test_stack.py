"""The Transformer, compared with torch.nn.Transformer; parameter counts, batches, norms, windows, dropout, errors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heedful.nn.dropout
from heedful.checkpoint import BundleConfig, ModelBundle
from heedful.errors import HeedfulError
from heedful.model.attention import ExecutionOptions
from heedful.model.config import (
    Buckets,
    EmbeddingConfig,
    Learned,
    ModelConfig,
    NextToken,
    Rotary,
    Shaw,
    Sinusoidal,
    StackConfig,
)
from heedful.model.stack import Block, Transformer
from heedful.nn.dropout import STEPS
from heedful.packed import Packed

EMBEDDING = EmbeddingConfig(vocabulary=30, width=16)
STACK = StackConfig(width=16, layers=2, heads=4, head_width=4, inner_width=24, activation="relu", norm_eps=1e-5)
DECODER = replace(STACK, causal=True, cross=True)
BOTH = ModelConfig(embedding=EMBEDDING, encoder=STACK, decoder=DECODER)
SOURCE = Packed.of([[1, 2, 3, 4, 5], [6], [7, 8, 9]])
TARGET = Packed.of([[2, 3], [4, 5, 6, 7], [8]])


def build(config: ModelConfig, seed: int = 0) -> Transformer:
    """Return a model in float64 with random weights. Biases and norms are random too: 0 and 1 would hide errors."""
    torch.manual_seed(seed)
    model = Transformer(config).double()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if "norm.weight" in name else 0.0, std=0.3)
    return model


def single_batches(batch: Packed) -> list[Packed]:
    """Return each sequence as a batch of its own."""
    return [Packed.of([tokens.tolist()]) for tokens in batch.unpack(batch.tokens)]


# -- comparison with PyTorch's Transformer --------------------------------------------------------------------


def copy_from_torch(model: Transformer, reference: nn.Transformer) -> None:
    """Copy all weights of PyTorch's model to ours."""
    parameters = dict(reference.named_parameters())
    renamed: dict[str, Tensor] = {}
    for side in ("encoder", "decoder"):
        for layer in range(2):
            their, our = f"{side}.layers.{layer}", f"{side}.blocks.{layer}"
            norms = ["attention_norm", *["cross_norm"] * (side == "decoder"), "mlp_norm"]
            for kind in ("weight", "bias"):
                renamed[f"{our}.attention.qkv.{kind}"] = parameters.pop(f"{their}.self_attn.in_proj_{kind}")
                renamed[f"{our}.attention.out.{kind}"] = parameters.pop(f"{their}.self_attn.out_proj.{kind}")
                if side == "decoder":
                    qkv = parameters.pop(f"{their}.multihead_attn.in_proj_{kind}")
                    renamed[f"{our}.cross.q.{kind}"], renamed[f"{our}.cross.kv.{kind}"] = qkv[:16], qkv[16:]
                    renamed[f"{our}.cross.out.{kind}"] = parameters.pop(f"{their}.multihead_attn.out_proj.{kind}")
                renamed[f"{our}.mlp.up.{kind}"] = parameters.pop(f"{their}.linear1.{kind}")
                renamed[f"{our}.mlp.down.{kind}"] = parameters.pop(f"{their}.linear2.{kind}")
                for index, norm in enumerate(norms, start=1):
                    renamed[f"{our}.{norm}.{kind}"] = parameters.pop(f"{their}.norm{index}.{kind}")
        for kind in ("weight", "bias"):
            renamed[f"{side}.norm.{kind}"] = parameters.pop(f"{side}.norm.{kind}")
    assert not parameters
    parameters = dict(model.named_parameters())
    assert parameters.keys() - renamed.keys() == {"embedding.tokens.weight"} and not renamed.keys() - parameters.keys()
    with torch.no_grad():
        for name, tensor in renamed.items():
            parameters[name].copy_(tensor)


@pytest.mark.parametrize("norm_at", ["post", "pre"])
def test_encoder_and_decoder_equal_those_of_torch(norm_at: Any) -> None:
    norm_first = norm_at == "pre"
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(16), enable_nested_tensor=False)
    reference = nn.Transformer(
        16, 4, 2, 2, 24, dropout=0.0, batch_first=True, norm_first=norm_first, custom_encoder=encoder
    ).double()
    torch.manual_seed(0)
    for parameter in reference.parameters():
        nn.init.normal_(parameter, std=0.3)
    norms = {"norm_at": norm_at, "final_norm": True}
    model = build(replace(BOTH, encoder=replace(STACK, **norms), decoder=replace(DECODER, **norms)))
    copy_from_torch(model, reference)

    rows = model(SOURCE, TARGET)
    tokens = model.embedding.tokens
    for source, target, target_rows in zip(
        single_batches(SOURCE), single_batches(TARGET), TARGET.unpack(rows), strict=True
    ):
        causal = nn.Transformer.generate_square_subsequent_mask(len(target.tokens), dtype=torch.float64)
        expected = reference(tokens(source.tokens)[None], tokens(target.tokens)[None], tgt_mask=causal)[0]
        torch.testing.assert_close(target_rows, expected, atol=1e-12, rtol=0)


# -- parameter counts -----------------------------------------------------------------------------------------


def count(model: ModelConfig, head: NextToken | None = None) -> int:
    with torch.device("meta"):
        return ModelBundle(BundleConfig(family="heedful", model=model, head=head)).count()


@pytest.mark.parametrize(
    ("width", "heads", "bias", "expected"),
    [
        (512, 8, True, 63_082_496),
        (512, 8, False, 63_045_632),
        (1024, 16, True, 214_245_376),
        (1024, 16, False, 214_171_648),
    ],
)
def test_counts_of_the_original_transformer(width: int, heads: int, bias: bool, expected: int) -> None:
    stack = StackConfig(
        width=width, layers=6, heads=heads, head_width=64, inner_width=4 * width, activation="relu", attention_bias=bias
    )
    embedding = EmbeddingConfig(vocabulary=37_000, width=width, positions=Sinusoidal(), scale=width**0.5)
    model = ModelConfig(embedding=embedding, encoder=stack, decoder=replace(stack, causal=True, cross=True))
    assert count(model, NextToken(tied=True)) == expected


def test_count_of_the_multi30k_transformer() -> None:
    stack = StackConfig(width=256, layers=3, heads=8, head_width=32, inner_width=512, activation="relu")
    source = EmbeddingConfig(vocabulary=7853, width=256, positions=Learned(count=100), scale=16.0)
    model = ModelConfig(
        embedding=source,
        encoder=stack,
        decoder=replace(stack, causal=True, cross=True),
        decoder_embedding=replace(source, vocabulary=5893),
    )
    assert count(model, NextToken(tied=False, bias=True)) == 9_038_341


@pytest.mark.parametrize(
    ("norm", "bias", "expected_count"), [("layer", True, 32), ("layer", False, 16), ("rms", True, 16)]
)
def test_only_the_final_norm_changes_the_count(norm: Any, bias: bool, expected_count: int) -> None:
    def count_with(**settings: Any) -> int:
        return count(ModelConfig(embedding=EMBEDDING, encoder=replace(STACK, norm=norm, norm_bias=bias, **settings)))

    assert count_with(norm_at="pre") == count_with(norm_at="post")
    assert count_with(norm_at="pre", final_norm=True) == count_with(norm_at="pre") + expected_count


# -- a batch equals its sequences alone -----------------------------------------------------------------------

RICH = replace(
    BOTH,
    embedding=replace(EMBEDDING, positions=Learned(count=9), types=2, norm="layer", width=12),
    encoder=replace(STACK, norm_at="pre", final_norm=True, gated=True, window=1, global_every=2),
)


@pytest.mark.parametrize("config", [BOTH, RICH, replace(BOTH, encoder=None, decoder=replace(STACK, causal=True))])
def test_a_batch_and_its_gradient_equal_those_of_its_sequences_alone(config: ModelConfig) -> None:
    model = build(config)
    parameters = dict(model.named_parameters())
    torch.manual_seed(1)
    batches = (SOURCE, TARGET) if config.encoder else (SOURCE,)
    rows = model(*batches)
    output_gradient = torch.randn_like(rows)
    batch_gradients = torch.autograd.grad(rows, list(parameters.values()), output_gradient)
    sums = [torch.zeros_like(gradient) for gradient in batch_gradients]
    sequences = zip(*map(single_batches, batches), strict=True)  # (source, target) or (source,)
    sequence_rows, sequence_gradients = batches[-1].unpack(rows), batches[-1].unpack(output_gradient)
    for inputs, expected, gradient in zip(sequences, sequence_rows, sequence_gradients, strict=True):
        outputs = model(*inputs)
        torch.testing.assert_close(outputs, expected, atol=1e-12, rtol=0)
        grads = torch.autograd.grad(outputs, list(parameters.values()), gradient, allow_unused=True)
        sums = [total if grad is None else total + grad for total, grad in zip(sums, grads, strict=True)]
    for name, of_batch, of_sequences in zip(parameters, batch_gradients, sums, strict=True):
        torch.testing.assert_close(
            of_batch, of_sequences, atol=1e-11, rtol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_an_empty_sequence_and_an_empty_batch() -> None:
    model = build(RICH)
    sources, targets = Packed.of([[1, 2], [], [3], []]), Packed.of([[4], [5, 6], [], []])
    rows = model(sources, targets)
    assert rows.shape == (3, 16) and rows.isfinite().all()
    torch.testing.assert_close(rows[:1], model(Packed.of([[1, 2]]), Packed.of([[4]])), atol=1e-12, rtol=0)
    assert model(Packed.of([]), Packed.of([])).shape == (0, 16)


def test_a_decoder_attends_to_no_later_token() -> None:
    model = build(BOTH)
    changed = replace(TARGET, tokens=TARGET.tokens.clone())
    changed.tokens[4] = 29  # the third of the second sequence
    before, after = model(SOURCE, TARGET), model(SOURCE, changed)
    assert torch.equal(before[[0, 1, 2, 3, 6]], after[[0, 1, 2, 3, 6]])
    assert (before[[4, 5]] != after[[4, 5]]).any(-1).all()
    sources = replace(SOURCE, tokens=SOURCE.tokens.clone())
    sources.tokens[4] = 29  # the last of the first source: all rows of the first target attend to it
    after = model(sources, TARGET)
    assert (before[:2] != after[:2]).any(-1).all() and torch.equal(before[2:], after[2:])


@pytest.mark.parametrize("positions", [None, Learned(count=9), Sinusoidal()])
def test_the_order_of_tokens_matters_only_with_positions(positions: Learned | Sinusoidal | None) -> None:
    model = build(ModelConfig(embedding=replace(EMBEDDING, positions=positions), encoder=STACK))
    order = torch.tensor([3, 0, 4, 1, 2])
    tokens = torch.tensor([5, 9, 2, 2, 7])
    rows = model(Packed.of([tokens.tolist()]))[order]
    difference = (model(Packed.of([tokens[order].tolist()])) - rows).abs().max()
    assert difference < 1e-12 if positions is None else difference > 1e-3


# -- norms and windows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_at", ["post", "pre"])
@pytest.mark.parametrize("final_norm", [True, False])
def test_where_the_norms_are(norm_at: Any, final_norm: bool) -> None:
    """If all sublayers return 0, only norms remain: two with post-norm, none with pre-norm, and the final one."""
    model = build(
        ModelConfig(embedding=EMBEDDING, encoder=replace(STACK, layers=1, norm_at=norm_at, final_norm=final_norm))
    )
    assert model.encoder is not None
    (block,) = model.encoder.blocks
    assert isinstance(block, Block)
    for last in (block.attention.out, block.mlp.down):
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
    rows = model.embedding(SOURCE)
    expected = rows if norm_at == "pre" else block.mlp_norm(block.attention_norm(rows))
    if final_norm:
        expected = model.encoder.norm(expected)
    torch.testing.assert_close(model(SOURCE), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"window": 2, "global_every": 3}, [None, 2, 2, None, 2]),
        ({"window": 2}, [2] * 5),
        ({"window": 0, "global_every": 1}, [None] * 5),
        ({"global_every": 2}, [None] * 5),
        ({"window": 2, "global_layers": (1, 4)}, [2, None, 2, 2, None]),
        ({"window": 2, "global_layers": ()}, [2] * 5),
    ],
)
def test_the_window_of_each_layer(
    more: dict[str, Any], expected: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = []
    forward = Block.forward

    def record_window(self: Block, x: Tensor, context: Any, layer: Any) -> Tensor:
        windows.append(layer.window)
        return forward(self, x, context, layer)

    monkeypatch.setattr(Block, "forward", record_window)
    build(ModelConfig(embedding=EMBEDDING, encoder=replace(STACK, layers=5, **more)))(SOURCE)
    assert windows == expected


def test_a_changed_token_changes_only_rows_within_the_window() -> None:
    model = build(ModelConfig(embedding=EMBEDDING, encoder=replace(STACK, layers=1, window=2)))
    rows, changed = model(Packed.of([list(range(9))])), list(range(9))
    changed[4] = 20
    is_changed = (model(Packed.of([changed])) != rows).any(-1)
    assert is_changed.tolist() == [False, False, True, True, True, True, True, False, False]


# -- output rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        replace(BOTH, decoder=None),
        replace(BOTH, decoder=None, encoder=replace(STACK, norm_at="pre", final_norm=True)),
        replace(BOTH, decoder=None, encoder=replace(STACK, relation=Rotary(), window=1)),
        replace(BOTH, decoder=None, encoder=replace(STACK, relation=Buckets(count=8, reach=16))),
        replace(BOTH, decoder=None, encoder=replace(STACK, relation=Shaw(reach=2))),
        replace(BOTH, decoder=None, encoder=replace(STACK, layers=3, blocks=1)),
        replace(BOTH, encoder=None, decoder=replace(STACK, causal=True)),
    ],
    ids=["post", "pre", "rotary", "buckets", "shaw", "shared", "causal"],
)
@pytest.mark.parametrize("recompute", [False, True])
def test_output_rows_and_their_gradient_equal_those_of_all_rows(config: ModelConfig, recompute: bool) -> None:
    model, output_rows = build(config), torch.tensor([8, 0, 3, 4])  # in any order, of some sequences
    model.execution = ExecutionOptions(gradient_checkpointing=recompute)
    outcomes = []
    for rows in (model(SOURCE)[output_rows], model(SOURCE, output_rows=output_rows)):
        model.zero_grad()
        (rows**3).sum().backward()
        outcomes.append([rows, *(parameter.grad for parameter in model.parameters())])
    for actual, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def test_output_rows_of_a_decoder_beside_an_encoder() -> None:
    model, output_rows = build(BOTH), torch.tensor([6, 1])
    assert torch.equal(model(SOURCE, TARGET, output_rows=output_rows), model(SOURCE, TARGET)[output_rows])


def test_the_last_block_computes_only_output_rows_after_attention() -> None:
    """One case has a padding sequence, without output rows."""
    model = build(replace(BOTH, decoder=None)).eval()
    model.execution = ExecutionOptions(pad_to_bucket=True)
    row_counts: list[int] = []
    for block in model.encoder.blocks if model.encoder else ():
        block.mlp.register_forward_pre_hook(lambda module, inputs: row_counts.append(len(inputs[0])))
    with torch.no_grad():
        rows = model(Packed.of([[1] * 100, [2] * 33]), output_rows=torch.tensor([0, 100]))
    assert rows.shape == (2, 16) and row_counts == [136, 2]


def test_the_number_of_rows_is_rounded_up_only_with_pad_to_bucket() -> None:
    """The meta device represents a GPU, on which the default is not to round."""
    model = build(replace(BOTH, decoder=None)).eval().to("meta", torch.bfloat16)
    batch = Packed.of([[1] * 100, [2] * 33]).to("meta")
    counts: list[int] = []
    assert model.encoder is not None
    model.encoder.register_forward_pre_hook(lambda module, inputs: counts.append(len(inputs[0])))
    for pad_to_bucket in (None, False, True):
        model.execution = ExecutionOptions(pad_to_bucket=pad_to_bucket)
        assert model(batch).shape == (133, 16)
    assert counts == [133, 133, 136]


# -- refusals -------------------------------------------------------------------------------------------------


def refusal(model: nn.Module, *batches: Packed) -> str:
    with pytest.raises(HeedfulError) as caught:
        model(*batches)
    return str(caught.value)


def test_targets_are_for_models_with_an_encoder_and_a_decoder() -> None:
    because = "only models with an encoder and a decoder take two batches"
    assert refusal(build(BOTH), SOURCE) == f"this model needs a target: {because}"
    encoder = build(ModelConfig(embedding=EMBEDDING, encoder=STACK))
    assert refusal(encoder, SOURCE, TARGET) == f"this model takes no target: {because}"
    shorter = Packed.of([[1]])
    assert refusal(build(BOTH), SOURCE, shorter) == "3 source and 1 target sequences: give one target for each"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"encoder": None, "decoder": None}, "a model has an encoder, a decoder, or both, but this config has neither"),
        ({"decoder": replace(DECODER, cross=False)}, "a decoder beside an encoder attends to it: set cross = true"),
        ({"encoder": None}, "cross = true is for a decoder beside an encoder, but there is nothing to attend to"),
        (
            {"encoder": replace(STACK, cross=True), "decoder": None},
            "cross = true is for a decoder beside an encoder, but there is nothing to attend to",
        ),
        (
            {"decoder": replace(DECODER, width=24)},
            "the encoder is 16 wide and the decoder 24: attention between them needs one width",
        ),
        (
            {"decoder": None, "decoder_embedding": EMBEDDING},
            "decoder_embedding is for models with an encoder and a decoder",
        ),
    ],
)
def test_configs_that_do_not_fit_together_are_refused(more: dict[str, Any], text: str) -> None:
    with pytest.raises(HeedfulError) as caught:
        Transformer(replace(BOTH, **more))
    assert str(caught.value) == text


RATES = {"dropout": 0.1, "attention_out_dropout": 0.2, "attention_dropout": 0.3, "inner_dropout": 0.4}


def test_dropout_is_applied_only_in_training() -> None:
    model = build(replace(BOTH, encoder=replace(STACK, **RATES), decoder=replace(DECODER, **RATES)))
    assert torch.equal(model.eval()(SOURCE, TARGET), build(BOTH)(SOURCE, TARGET))
    model.train()
    assert not torch.equal(model(SOURCE, TARGET), model(SOURCE, TARGET))


@pytest.mark.parametrize("out", [0.2, None])
def test_where_dropout_is(out: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = RATES | {"attention_out_dropout": out, "layers": 1}
    embedding = replace(EMBEDDING, dropout=0.5)
    model = build(ModelConfig(embedding=embedding, encoder=replace(STACK, **rates), decoder=replace(DECODER, **rates)))
    probabilities: list[float] = []
    factors = heedful.nn.dropout._factors

    def record_probability(x: Tensor, below: int) -> Tensor:
        probabilities.append(round(below / STEPS, 3))
        return factors(x, below)

    monkeypatch.setattr(heedful.nn.dropout, "_factors", record_probability)
    model(SOURCE, TARGET)
    attention = [0.3, 0.1 if out is None else out]  # of attention weights, and after attention
    mlp = [0.4, 0.1]  # inside the MLP, and after it
    encoder, decoder = [0.5, *attention, *mlp], [0.5, *attention, *attention, *mlp]
    assert probabilities == encoder + decoder


@pytest.mark.parametrize("rows", [1, 3, 31, 33, 130])
def test_a_padding_sequence_changes_no_row(rows: int) -> None:
    model = build(replace(BOTH, decoder=None))
    batch = Packed.of([[index % 7 for index in range(rows)]])
    with torch.no_grad():
        expected = model(batch)
        padded = model(batch.pad_to_bucket())[:rows]
    torch.testing.assert_close(padded, expected, atol=1e-12, rtol=0)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert model.float()(batch).shape[0] == rows
