"""FusedBlock computes what the layers of a block compute one by one."""

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
MANY = Packed.of([[5, 6, 7] * 40, [8] * 599, [9, 10], [], [11, 12, 13, 14] * 20])  # enough rows for several threads


def make_model(
    monkeypatch: pytest.MonkeyPatch,
    linears: Any,
    heads: int = 4,
    attention: str = "native",
    dtype: torch.dtype = torch.bfloat16,
    **stack_options: Any,
) -> ModelBundle:
    """Make a model of three layers with a plan of these kernels, or skip the test on a processor without them."""
    kernel_library = kernels()
    if kernel_library is None or not (kernel_library.has_bfloat16 and kernel_library.has_int8):
        pytest.skip("this processor does not multiply bfloat16 or bytes")
    embedding = EmbeddingConfig(vocabulary=50, width=64, positions=Learned(count=600), norm="layer")
    encoder = StackConfig(width=64, layers=3, heads=heads, head_width=64 // heads, inner_width=96, **stack_options)
    created = create(
        BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=encoder), head=None), seed=1
    )
    names: dict[torch.dtype, Precision] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
    precision: Precision = "int8" if linears == "int8" else names[dtype]
    monkeypatch.setattr(
        module, "fastest_plan", lambda *_: ExecutionPlan(precision=precision, linears=linears, attention=attention)
    )
    bundle = created.to(dtype).eval()
    autotune(bundle, precision)
    return bundle


def hidden_states(bundle: ModelBundle, batch: Packed = BATCH) -> Tensor:
    with torch.inference_mode():
        return bundle.hidden_states(batch)


def fused_block(bundle: ModelBundle) -> Any:
    return bundle.model.execution.fused_block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("linears", ["native", "int8"])
@pytest.mark.parametrize("batch", [BATCH, MANY], ids=["few", "many"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": 2}, {"attention_bias": False, "mlp_bias": False}], ids=str
)
def test_a_fused_block_equals_its_layers(
    monkeypatch: pytest.MonkeyPatch, linears: str, batch: Packed, options: dict[str, Any], dtype: torch.dtype
) -> None:
    bundle = make_model(monkeypatch, linears, dtype=dtype, **options)
    assert fused_block(bundle)
    outputs = hidden_states(bundle, batch)
    assert len(fused_block(bundle)._descriptors) == len(bundle.model.encoder.blocks)  # type: ignore[union-attr]  # it was used
    bundle.model.execution = replace(bundle.model.execution, fused_block=None)
    assert torch.equal(outputs, hidden_states(bundle, batch))


def test_float32_results_are_close_to_those_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = hidden_states(make_model(monkeypatch, "plain", dtype=torch.float32), MANY)
    outputs = hidden_states(make_model(monkeypatch, "native", dtype=torch.float32), MANY)
    assert (outputs - expected).abs().max() < 2e-6 * expected.abs().max()


def test_rows_of_another_dtype_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = make_model(monkeypatch, "native", dtype=torch.float32)
    expected, encoder = hidden_states(bundle), bundle.model.encoder
    assert encoder is not None
    block, x = encoder.blocks[0], torch.randn(4, 64).bfloat16()
    context = AttentionContext(layout=Layout.of((0, 4)), execution=bundle.model.execution)
    layer = LayerContext(part="encoder", layer=0, window=None, relation=RelativePosition(), prepared=None)
    with torch.inference_mode():
        assert fused_block(bundle)(block, x, context, layer) is None
        assert fused_block(bundle)(block, x.float(), context, layer) is not None
    assert torch.equal(hidden_states(bundle), expected)


@pytest.mark.parametrize(("linears", "error"), [("native", 2e-2), ("int8", 5e-2)])
@pytest.mark.parametrize(
    "options",
    [
        {"norm_at": "pre", "final_norm": True},
        {"gated": True},
        {"activation": "relu"},
        {"kv_heads": 1},
        {"qk_norm": True},
    ],
    ids=str,
)
def test_other_kinds_of_blocks_are_not_fused(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], linears: str, error: float
) -> None:
    bundle = make_model(monkeypatch, linears, **options)
    assert fused_block(bundle) is None
    plain = hidden_states(make_model(monkeypatch, "plain", **options)).float()
    assert (hidden_states(bundle).float() - plain).norm() < error * plain.norm()


def test_head_widths_that_do_not_fill_vectors_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = make_model(monkeypatch, "int8", heads=8, attention="")
    assert fused_block(bundle) is None
    assert hidden_states(bundle).isfinite().all()


def test_a_copy_has_its_own_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = make_model(monkeypatch, "native")
    expected = hidden_states(bundle)
    copies = [copy.deepcopy(bundle), pickle.loads(pickle.dumps(bundle))]
    for panels in (layer.panels for layer in bundle.modules() if hasattr(layer, "panels")):
        panels.zero_()
    assert not torch.equal(hidden_states(bundle), expected)
    assert all(torch.equal(hidden_states(model), expected) for model in copies)


def test_blocks_with_a_trace_are_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = make_model(monkeypatch, "native")
    expected = hidden_states(bundle)
    fused_block(bundle)._descriptors.clear()
    trace = Trace()
    with torch.inference_mode():
        traced = bundle.hidden_states(BATCH, trace=trace)
    assert torch.equal(traced, expected)
    assert not fused_block(bundle)._descriptors


def test_an_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hidden_states(make_model(monkeypatch, "native"), Packed.of([[]])).shape == (0, 64)


def assign_new_tensors(bundle: ModelBundle) -> None:
    bundle.load_state_dict({name: tensor.clone() for name, tensor in bundle.state_dict().items()}, assign=True)


@pytest.mark.parametrize("linears", ["native", "int8"])
@pytest.mark.parametrize(
    "change", [assign_new_tensors, ModelBundle.share_memory, ForkingPickler.dumps, ModelBundle.bfloat16]
)
def test_moved_weights_are_read_at_their_new_addresses(
    native: Kernels, monkeypatch: pytest.MonkeyPatch, linears: str, change: Callable[[ModelBundle], Any]
) -> None:
    described: list[_Block] = []  # block descriptions that the kernel got

    def block(address: int, *args: Any) -> None:  # in place of the kernel, so that any processor can run this test
        described.append(_Block.from_buffer_copy(_Block.from_address(address)))

    fake_library = replace(native, has_bfloat16=True, has_int8=True, block=block)
    monkeypatch.setattr(library, "_library_or_reason", lambda: fake_library)
    bundle = make_model(monkeypatch, linears)
    assert bundle.model.encoder is not None
    hidden_states(bundle)
    change(bundle)
    described.clear()
    hidden_states(bundle)
    if change is ModelBundle.bfloat16:  # the kernel reads norms in float32 only
        assert not described
        return
    for description, layer in zip(described, bundle.model.encoder.blocks, strict=True):
        up: Any = layer.mlp.up
        assert description.up.panels == address(up.panels if linears == "native" else up.panels.panels)
        assert [description.attended.gain, description.attended.bias] == [
            address(x) for x in layer.attention_norm.parameters()
        ]
        assert [description.done.gain, description.done.bias] == [address(x) for x in layer.mlp_norm.parameters()]


def test_blocks_in_training_mode_are_not_fused(native: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []  # addresses of the descriptions
    fake_library = replace(native, has_bfloat16=True, has_int8=True, block=lambda address, *args: calls.append(address))
    monkeypatch.setattr(library, "_library_or_reason", lambda: fake_library)
    bundle = make_model(monkeypatch, "native")
    hidden_states(bundle)
    assert calls
    calls.clear()
    monkeypatch.setattr(type(bundle.model.encoder.blocks[0]), "_add", lambda self, x, *args: x)  # type: ignore[union-attr]
    bundle.train()
    hidden_states(bundle)
    assert not calls
