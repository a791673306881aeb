"""Recording of CUDA graphs, as far as a CPU can check it: equal rows, and no copies between host and GPU."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import heedful
from heedful.infer.cuda_graphs import CudaGraphs, rerun
from heedful.model.classic import ClassicModel
from heedful.model.classic_config import BagPooling, ClassicConfig, UntrainedSelfAttention
from heedful.model.config import EmbeddingConfig
from heedful.model.stack import Transformer
from heedful.packed import Packed
from tests.support.tiny_models import save_tiny

MODELS = {"bert": "BertModel", "xlnet": "XLNetModel", "modernbert": "ModernBertModel", "gpt2": "GPT2Model"}


class Crossings(TorchDispatchMode):
    """Operators that touch the host: any that has a tensor there, or asks for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if "_local_scalar_dense" in str(func) or any(tensor.device.type == "cpu" for tensor in tensors):
            self.found.append(str(func))
        return result


@pytest.mark.parametrize("family", MODELS)
def test_rows_are_the_models_and_nothing_crosses(family: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, family, MODELS[family], torch.float32)
    model = heedful.load(tmp_path).model
    assert isinstance(model, Transformer)
    ids = [[5, 6, 7, 8, 9]]
    with torch.no_grad():
        batch = Packed.of(ids)
        run = rerun(model, batch)
        for _ in range(2):
            assert torch.equal(run(), model(batch))
            batch.tokens.copy_(torch.tensor([9, 8, 7, 6, 5]))  # the same place, other tokens
    elsewhere = model.to("meta", torch.bfloat16)  # in place of CUDA: another device than the host
    with torch.no_grad():
        run = rerun(elsewhere, Packed.of(ids).to("meta"))
        with Crossings() as first:
            run()
        with Crossings() as second:
            rows = run()
    assert rows.device.type == "meta" and rows.dtype == torch.bfloat16
    assert first.found and not second.found, second.found


def test_what_is_not_recorded_is_computed_as_usual(tmp_path: Path) -> None:
    save_tiny(tmp_path, "bert", "BertModel", torch.float32)
    model = heedful.load(tmp_path).model
    assert isinstance(model, Transformer)
    graphs, batch = CudaGraphs(model), Packed.of([[5, 6], [7]])
    with torch.inference_mode():
        for graph_set in (graphs, copy.deepcopy(graphs)):
            assert graph_set.cannot(batch) == "the model is not on a CUDA device"
            assert torch.equal(graph_set(batch), model(batch))


class OnCuda(CudaGraphs):
    """CUDA graphs that take the CPU for a GPU."""

    device = torch.device("cuda")


def test_what_can_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "bert", "BertModel", torch.float32)
    model = heedful.load(tmp_path).model
    assert isinstance(model, Transformer)
    graphs = OnCuda(model, max_tokens=5)
    with torch.no_grad():
        assert graphs.cannot(Packed.of([[5] * 5])) == ""
        assert graphs.cannot(Packed.of([[5], [7]])) == "only a single text is recorded"
        assert graphs.cannot(Packed.of([[5] * 6])) == "a text of 1 to 5 tokens is recorded, not one of 6"
    assert graphs.cannot(Packed.of([[5]])) == "what is recorded has no gradients and no dropout"
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    with torch.no_grad():
        assert "autocast frees its copies of weights" in graphs.cannot(Packed.of([[5]]))


def test_a_length_is_recorded_when_it_is_frequent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, "bert", "BertModel", torch.float32)
    recorded: list[int] = []

    def record(graphs: OnCuda, batch: Packed) -> SimpleNamespace:
        recorded.append(batch.bounds[-1])
        rows = graphs.model(batch)
        return SimpleNamespace(batch=batch, rows=rows, graph=SimpleNamespace(replay=lambda: None))

    monkeypatch.setattr(OnCuda, "_record", record)
    monkeypatch.setattr(Packed, "to", lambda packed, device: packed)
    graphs = OnCuda(heedful.load(tmp_path).model, max_graphs=2)
    with torch.inference_mode():
        for length in (4, 3, 4, 3, 3, 3, 4):
            assert graphs(Packed.of([[5] * length])).shape[0] == length
        assert recorded == [3, 4]
        graphs.prepare([6])
        assert recorded == [3, 4, 6] and list(graphs._recorded) == [4, 6]


def test_a_model_that_is_more_than_its_stack_is_not_recorded() -> None:
    """A classic model has no stack, or something that goes over its rows."""
    model = ClassicModel(
        ClassicConfig(
            embedding=EmbeddingConfig(vocabulary=9, width=4), reader=BagPooling(over=UntrainedSelfAttention())
        )
    )
    with torch.no_grad():
        assert OnCuda(model).cannot(Packed.of([[5]])) == "only one stack of layers is recorded"
