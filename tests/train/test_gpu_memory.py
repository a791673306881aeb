"""Micro-batches that fit into the free memory of a GPU, which these tests simulate."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from heedful.checkpoint import BundleConfig, ModelBundle
from heedful.model.config import EmbeddingConfig, MaskedTokens, ModelConfig, StackConfig
from heedful.train.gpu_memory import bytes_per_token, initial_max_tokens
from heedful.train.settings import TrainSettings
from tests.support.tiny_runs import make_trainer

GPU = torch.device("cuda", 0)
GIB = 2**30


def make_masked_lm(layers: int = 12, width: int = 768, vocabulary: int = 30_522) -> ModelBundle:
    """Return a model on the meta device, where weights take no memory."""
    stack = StackConfig(width=width, layers=layers, heads=12, head_width=width // 12, inner_width=4 * width)
    embedding = EmbeddingConfig(vocabulary=vocabulary, width=width)
    config = BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=stack), head=MaskedTokens())
    with torch.device("meta"):
        return ModelBundle(config)


def max_tokens(monkeypatch: pytest.MonkeyPatch, free: int, loaded: Any = None, **settings: Any) -> int:
    """Return the maximum tokens of a micro-batch with `free` bytes of memory; PyTorch has cached 1 GiB."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GIB)
    loaded = loaded or make_masked_lm()
    train = TrainSettings(max_steps=1, **settings)
    return initial_max_tokens(loaded, train, GPU, torch.bfloat16, list(loaded.parameters()))


def test_the_estimate_follows_the_shape() -> None:
    base = bytes_per_token(make_masked_lm(), gradient_checkpointing=False, is_half=True)
    assert base == 12 * (40 * 768 + 6 * 3072) + 12 * 30_522
    assert bytes_per_token(make_masked_lm(), gradient_checkpointing=False, is_half=False) == 2 * base
    assert bytes_per_token(make_masked_lm(24), gradient_checkpointing=False, is_half=True) == 2 * base - 12 * 30_522
    checkpointed = bytes_per_token(make_masked_lm(), gradient_checkpointing=True, is_half=True)
    assert checkpointed is not None and checkpointed < base / 2
    classic: Any = SimpleNamespace(config=SimpleNamespace(model=None, head=None))
    assert bytes_per_token(classic, gradient_checkpointing=False, is_half=True) is None
    table = ModelConfig(embedding=EmbeddingConfig(vocabulary=30_522, width=256))
    table_of_vectors: Any = SimpleNamespace(config=SimpleNamespace(model=table, head=None))
    assert bytes_per_token(table_of_vectors, gradient_checkpointing=False, is_half=True) is None


def test_micro_batches_grow_with_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [max_tokens(monkeypatch, free * GIB) for free in (2, 15, 40, 78, 500)]
    assert sizes == sorted(sizes) and sizes[-1] == 65_536
    assert 500 <= sizes[0] <= 2000 and 6000 <= sizes[1] <= 10_000 and 35_000 <= sizes[3] <= 50_000
    assert all(size % 1000 == 0 for size in sizes[:-1])
    assert max_tokens(monkeypatch, 0) == 1000  # too much, so that the error is about memory


def test_settings_and_other_devices_do_not_use_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert max_tokens(monkeypatch, 78 * GIB, max_tokens_per_microbatch=777) == 777
    assert max_tokens(monkeypatch, 78 * GIB, deterministic=True) == 8192
    training = make_trainer(max_tokens_per_microbatch="auto", device="cpu")
    assert training.max_tokens_per_microbatch == training.state()[1]["tokens"] == 8192
