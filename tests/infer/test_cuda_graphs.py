"""Inference by CUDA graphs, on a CPU: hidden states are equal, and nothing is copied between CPU and GPU."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import heedful
from heedful.errors import DataError
from heedful.infer.cuda_graphs import MAX_TOKENS, CudaGraphs, GraphInputs, rerun
from heedful.infer.tuning.execution_plan import ExecutionPlan, apply_plan
from heedful.model.classic import ClassicModel
from heedful.model.classic_config import BagPooling, ClassicConfig, UntrainedSelfAttention
from heedful.model.config import EmbeddingConfig
from heedful.model.stack import Transformer
from heedful.nn.positions import DynamicNtkShape, RotaryPosition
from heedful.packed import Packed
from tests.support.tiny_models import save_tiny

MODELS = {"bert": "BertModel", "xlnet": "XLNetModel", "modernbert": "ModernBertModel", "gpt2": "GPT2Model"}
MODELS |= {"deberta-v2": "DebertaV2Model", "roberta": "RobertaModel"}


class Crossings(TorchDispatchMode):
    """Records operators that involve the CPU: those with a CPU tensor, and those that return a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if "_local_scalar_dense" in str(func) or any(tensor.device.type == "cpu" for tensor in tensors):
            self.operators.append(str(func))
        return result


@pytest.mark.parametrize("family", MODELS)
def test_hidden_states_equal_the_models_without_copies_to_the_cpu(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family, MODELS[family], torch.float64)
    bundle = heedful.load(tmp_path, dtype=torch.float64).eval()
    apply_plan(bundle, ExecutionPlan(precision="float32"))
    model = bundle.model
    assert isinstance(model, Transformer)
    with torch.no_grad():
        inputs = GraphInputs.of(24, torch.device("cpu"))
        run = rerun(model, inputs)
        # after the first batch, rows that a batch does not use have the tokens of earlier batches
        for lengths in ((24,), (13,), (1,), (3, 20), (9, 1, 9), (1,) * 24):
            batch = Packed.of([[5 + (7 * length + position) % 50 for position in range(length)] for length in lengths])
            inputs.load(batch)
            torch.testing.assert_close(run()[: sum(lengths)], model(batch), atol=1e-11, rtol=1e-11)
    meta_model = model.to("meta", torch.bfloat16)  # a device other than the CPU, in place of CUDA
    with torch.no_grad():
        run = rerun(meta_model, GraphInputs.of(24, torch.device("meta")))
        run()
        with Crossings() as crossings:
            rows = run()
    assert rows.device.type == "meta" and rows.dtype == torch.bfloat16 and rows.shape[0] == 24
    assert not crossings.operators, crossings.operators


def test_a_batch_without_a_graph_is_computed_by_the_model(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertModel", torch.float32)
    model = heedful.load(tmp_path).model
    assert isinstance(model, Transformer)
    graphs, batch = CudaGraphs(model), Packed.of([[5, 6], [7]])
    with torch.inference_mode():
        for graph_set in (graphs, copy.deepcopy(graphs)):
            assert graph_set.cannot(batch) == "the model is not on a CUDA device"
            assert torch.equal(graph_set(batch), model(batch))


class OnCuda(CudaGraphs):
    """CUDA graphs that take the CPU for a GPU, so that their decisions can be tested without one."""

    device = torch.device("cuda")


def test_batches_that_can_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "bert", "BertModel", torch.float32)
    model = heedful.load(tmp_path).model
    assert isinstance(model, Transformer)
    graphs = OnCuda(model, max_tokens=5)
    with torch.no_grad():
        assert graphs.cannot(Packed.of([[5] * 5])) == ""
        assert graphs.cannot(Packed.of([[5], [7, 8]])) == ""
        assert graphs.cannot(Packed.of([[5]] * 33)) == "only batches of up to 32 texts are recorded"
        assert graphs.cannot(Packed.of([[5] * 3] * 2)) == "batches of 1 to 5 tokens are recorded, not one of 6"
    assert graphs.cannot(Packed.of([[5]])) == "a recorded graph has no gradients and no dropout"
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    with torch.no_grad():
        assert "autocast frees its copies of weights" in graphs.cannot(Packed.of([[5]]))


def test_a_graph_is_recorded_at_the_third_batch_of_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "bert", "BertModel", torch.float64)
    recorded: list[int] = []

    def record(graphs: OnCuda, rows: int) -> SimpleNamespace:
        recorded.append(rows)
        inputs = GraphInputs.of(rows, torch.device("cpu"))
        output = torch.zeros(rows, graphs.model.config.width, dtype=torch.float64)
        run = rerun(graphs.model, inputs)
        return SimpleNamespace(inputs=inputs, rows=output, graph=SimpleNamespace(replay=lambda: output.copy_(run())))

    monkeypatch.setattr(OnCuda, "_record", record)
    monkeypatch.setattr(Packed, "to", lambda packed, device: packed)
    model = heedful.load(tmp_path, dtype=torch.float64).eval().model
    graphs = OnCuda(model, max_tokens=20)
    assert graphs.sizes == (8, 16, 20)
    with torch.inference_mode():
        for lengths in ((4,), (3,), (12,), (3, 5), (9,), (1,), (17,), (10, 10), (21,)):
            batch = Packed.of([[5 + position for position in range(length)] for length in lengths])
            torch.testing.assert_close(graphs(batch), model(batch), atol=1e-11, rtol=1e-11)
        assert recorded == [8]
        with pytest.raises(DataError, match="token id 99999 is unknown"):
            graphs(Packed.of([[99999]]))
        graphs.prepare()
        assert recorded == [8, 20, 16]


def test_the_largest_graph_has_as_many_rows_as_the_model_has_positions(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertModel", torch.float32)
    model = heedful.load(tmp_path).model
    limit = model.embedding.config.positions.limit
    assert limit is not None and limit < MAX_TOKENS and CudaGraphs(model).sizes[-1] == limit
    save_tiny(tmp_path, "qwen3", "Qwen3Model", torch.float32)
    sizes = CudaGraphs(heedful.load(tmp_path).model).sizes
    assert sizes[-1] == MAX_TOKENS and len(sizes) == 20
    assert all(larger <= max(smaller + 8, 1.25 * smaller) for smaller, larger in pairwise(sizes))


def test_models_whose_computation_depends_on_lengths_are_not_recorded(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deberta-v2", "DebertaV2Model", torch.float32)
    bundle = heedful.load(tmp_path)
    with torch.no_grad():
        assert "it projects distances in each pass" in OnCuda(bundle.model.eval()).cannot(Packed.of([[5]]))
        apply_plan(bundle, ExecutionPlan(precision="float32"))
        assert OnCuda(bundle.model.eval()).cannot(Packed.of([[5]])) == ""
        rotary = RotaryPosition(10_000.0, 8, by_length=DynamicNtkShape(factor=2.0, trained=100))
        assert bundle.model.encoder is not None
        bundle.model.encoder.relations[-1] = rotary
        assert "frequencies depend on the length" in OnCuda(bundle.model, max_tokens=128).cannot(Packed.of([[5]]))
        assert OnCuda(bundle.model, max_tokens=100).cannot(Packed.of([[5]])) == ""


def test_a_classic_model_is_not_recorded() -> None:
    """A classic model has no Transformer stack, or further layers besides the stack."""
    model = ClassicModel(
        ClassicConfig(
            embedding=EmbeddingConfig(vocabulary=9, width=4), reader=BagPooling(over=UntrainedSelfAttention())
        )
    )
    with torch.no_grad():
        assert OnCuda(model).cannot(Packed.of([[5]])) == "only models with a single stack of layers are recorded"
