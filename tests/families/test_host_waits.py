"""Training of every family on the meta device, which represents a GPU: the host waits for no copy and reads nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heedful.checkpoint import load
from heedful.families import FAMILIES
from tests.support.tiny_models import TINY, decoder_input, random_batch, save_tiny

INDEXING = ("aten.index.", "aten.index_put")  # operators that copy indices from the host, and wait for that


class Waits(TorchDispatchMode):
    """Records operators in which the host would wait for a copy to a GPU. A read of a meta tensor is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = str(func), kwargs or {}
        result = func(*args, **kwargs)
        inputs, outputs = (
            [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)] for values in ((args, kwargs), result)
        )
        from_host = any(tensor.device.type == "cpu" and tensor.ndim for tensor in inputs)
        to_gpu = from_host and any(tensor.is_meta for tensor in outputs)
        if to_gpu and (name.startswith(INDEXING) or not kwargs.get("non_blocking")):
            self.operators.append(name)
        return result


@pytest.mark.parametrize("family", TINY)
def test_the_host_does_not_wait_in_training(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, family, next(iter(FAMILIES[family].heads)))
    loaded, batch, make_tensor = load(tmp_path).train(), random_batch(family), torch.tensor
    target = decoder_input(loaded, batch)
    loaded.to("meta")
    batch, target = batch.to("meta"), None if target is None else target.to("meta")

    def make_on_host(*values: Any, **options: Any) -> Tensor:
        assert str(options.get("device", "cpu")) == "cpu", "torch.tensor waits for its copy to a GPU"
        return make_tensor(*values, **options)

    monkeypatch.setattr(torch, "tensor", make_on_host)
    with Waits() as waits:
        rows = loaded.model(batch, target)
        rows.square().sum().backward()
    assert rows.is_meta and waits.operators == []
    assert all(parameter.grad is not None for name, parameter in loaded.model.named_parameters() if "blocks.0." in name)
