"""A block in one call of the kernels: what it computes part by part."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor

import heedful.infer.tuning.autotune as module
from heedful.checkpoint import BundleConfig, ModelBundle, create
from heedful.csrc import Kernels, kernels, library
from heedful.infer.precision import Precision
from heedful.infer.tuning.autotune import autotune
from heedful.infer.tuning.execution_plan import ExecutionPlan
from heedful.infer.tuning.fused_block import _Block
from heedful.model.attention import AttentionContext, LayerContext
from heedful.model.config import EmbeddingConfig, Learned, ModelConfig, StackConfig
from heedful.model.trace import Trace
from heedful.nn.cpu_ops import address
from heedful.nn.layout import Layout
from heedful.nn.positions import RelativePosition
from heedful.packed import Packed

pytestmark = pytest.mark.usefixtures("native")

BATCH = Packed.of([[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16] * 3])
MANY = Packed.of([[5, 6, 7] * 40, [8] * 599, [9, 10], [], [11, 12, 13, 14] * 20])  # rows that threads share out


def ready(
    monkeypatch: pytest.MonkeyPatch,
    linears: Any,
    heads: int = 4,
    attention: str = "native",
    dtype: torch.dtype = torch.bfloat16,
    **more: Any,
) -> ModelBundle:
    native = kernels()
    if native is None or not (native.has_bfloat16 and native.has_int8):
        pytest.skip("this processor does not multiply bfloat16 or bytes")
    embedding = EmbeddingConfig(vocabulary=50, width=64, positions=Learned(count=600), norm="layer")
    encoder = StackConfig(width=64, layers=3, heads=heads, head_width=64 // heads, inner_width=96, **more)
    loaded = create(
        BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=encoder), head=None), seed=1
    )
    names: dict[torch.dtype, Precision] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    precision: Precision = "int8" if linears == "int8" else names[dtype]
    monkeypatch.setattr(
        module, "fastest_plan", lambda *_: ExecutionPlan(precision=precision, linears=linears, attention=attention)
    )
    bundle = loaded.to(dtype).eval()
    autotune(bundle, precision)
    return bundle


def rows(loaded: ModelBundle, batch: Packed = BATCH) -> Tensor:
    with torch.inference_mode():
        return loaded.hidden_states(batch)


def fused(loaded: ModelBundle) -> Any:
    return loaded.model.execution.fused_block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("linears", ["native", "int8"])
@pytest.mark.parametrize("batch", [BATCH, MANY], ids=["few", "many"])
@pytest.mark.parametrize(
    "more", [{}, {"causal": True}, {"window": 2}, {"attention_bias": False, "mlp_bias": False}], ids=str
)
def test_it_computes_what_the_parts_do(
    monkeypatch: pytest.MonkeyPatch, linears: str, batch: Packed, more: dict[str, Any], dtype: torch.dtype
) -> None:
    loaded = ready(monkeypatch, linears, dtype=dtype, **more)
    assert fused(loaded)
    outputs = rows(loaded, batch)
    assert len(fused(loaded)._descriptors) == len(loaded.model.encoder.blocks)  # type: ignore[union-attr]  # it was used
    loaded.model.execution = replace(loaded.model.execution, fused_block=None)
    assert torch.equal(outputs, rows(loaded, batch))


def test_float32_is_as_exact_as_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rows(ready(monkeypatch, "plain", dtype=torch.float32), MANY)
    outputs = rows(ready(monkeypatch, "native", dtype=torch.float32), MANY)
    assert (outputs - expected).abs().max() < 2e-6 * expected.abs().max()


def test_a_block_in_another_dtype_is_computed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ready(monkeypatch, "native", dtype=torch.float32)
    expected, encoder = rows(loaded), loaded.model.encoder
    assert encoder is not None
    block, half = encoder.blocks[0], torch.randn(4, 64).bfloat16()
    context = AttentionContext(layout=Layout.of((0, 4)), execution=loaded.model.execution)
    layer = LayerContext(part="encoder", layer=0, window=None, relation=RelativePosition(), prepared=None)
    with torch.inference_mode():
        assert fused(loaded)(block, half, context, layer) is None
        assert fused(loaded)(block, half.float(), context, layer) is not None
    assert torch.equal(rows(loaded), expected)


@pytest.mark.parametrize(("linears", "error"), [("native", 2e-2), ("int8", 5e-2)])
@pytest.mark.parametrize(
    "more",
    [
        {"norm_at": "pre", "final_norm": True},
        {"gated": True},
        {"activation": "relu"},
        {"kv_heads": 1},
        {"qk_norm": True},
    ],
    ids=str,
)
def test_other_blocks_are_computed_part_by_part(
    monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], linears: str, error: float
) -> None:
    loaded = ready(monkeypatch, linears, **more)
    assert fused(loaded) is None
    plain = rows(ready(monkeypatch, "plain", **more)).float()
    assert (rows(loaded).float() - plain).norm() < error * plain.norm()


def test_heads_that_are_no_whole_vectors_are_computed_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ready(monkeypatch, "int8", heads=8, attention="")
    assert fused(loaded) is None
    assert rows(loaded).isfinite().all()


def test_a_copy_has_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ready(monkeypatch, "native")
    before = rows(loaded)
    copied = [copy.deepcopy(loaded), pickle.loads(pickle.dumps(loaded))]
    for parameter in (layer.panels for layer in loaded.modules() if hasattr(layer, "panels")):
        parameter.zero_()
    assert not torch.equal(rows(loaded), before)
    assert all(torch.equal(rows(model), before) for model in copied)


def test_what_looks_inside_goes_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = ready(monkeypatch, "native")
    expected = rows(loaded)
    fused(loaded)._descriptors.clear()
    trace = Trace()
    with torch.inference_mode():
        traced = loaded.hidden_states(BATCH, trace=trace)
    assert torch.equal(traced, expected)
    assert not fused(loaded)._descriptors


def test_an_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows(ready(monkeypatch, "native"), Packed.of([[]])).shape == (0, 64)


def assign(loaded: ModelBundle) -> None:
    loaded.load_state_dict({name: tensor.clone() for name, tensor in loaded.state_dict().items()}, assign=True)


@pytest.mark.parametrize("linears", ["native", "int8"])
@pytest.mark.parametrize("change", [assign, ModelBundle.share_memory, ForkingPickler.dumps, ModelBundle.bfloat16])
def test_weights_that_moved_are_not_read_where_they_were(
    native: Kernels, monkeypatch: pytest.MonkeyPatch, linears: str, change: Callable[[ModelBundle], Any]
) -> None:
    asked: list[_Block] = []

    def block(address: int, *rest: Any) -> None:  # replaces the kernel, also on a processor without bfloat16
        asked.append(_Block.from_buffer_copy(_Block.from_address(address)))

    stand_in = replace(native, has_bfloat16=True, has_int8=True, block=block)
    monkeypatch.setattr(library, "_library_or_reason", lambda: stand_in)
    loaded = ready(monkeypatch, linears)
    assert loaded.model.encoder is not None
    rows(loaded)
    change(loaded)
    asked.clear()
    rows(loaded)
    if change is ModelBundle.bfloat16:  # the norms are no longer what the kernel reads
        assert not asked
        return
    for fused, layer in zip(asked, loaded.model.encoder.blocks, strict=True):
        up: Any = layer.mlp.up
        assert fused.up.panels == address(up.panels if linears == "native" else up.panels.panels)
        assert [fused.attended.gain, fused.attended.bias] == [address(x) for x in layer.attention_norm.parameters()]
        assert [fused.done.gain, fused.done.bias] == [address(x) for x in layer.mlp_norm.parameters()]


def test_what_drops_is_computed_part_by_part(native: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    stand_in = replace(native, has_bfloat16=True, has_int8=True, block=lambda address, *rest: asked.append(address))
    monkeypatch.setattr(library, "_library_or_reason", lambda: stand_in)
    loaded = ready(monkeypatch, "native")
    rows(loaded)
    assert asked
    asked.clear()
    monkeypatch.setattr(type(loaded.model.encoder.blocks[0]), "_add", lambda self, x, *arguments: x)  # type: ignore[union-attr]
    loaded.train()
    rows(loaded)
    assert not asked
