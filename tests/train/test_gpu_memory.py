"""Micro-batches by the free memory of a GPU, of which the driver's numbers are invented here."""

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


def masked(layers: int = 12, width: int = 768, vocabulary: int = 30_522) -> ModelBundle:
    """A model whose weights take no memory."""
    stack = StackConfig(width=width, layers=layers, heads=12, head_width=width // 12, inner_width=4 * width)
    embedding = EmbeddingConfig(vocabulary=vocabulary, width=width)
    config = BundleConfig(family="heedful", model=ModelConfig(embedding=embedding, encoder=stack), head=MaskedTokens())
    with torch.device("meta"):
        return ModelBundle(config)


def chosen(monkeypatch: pytest.MonkeyPatch, free: int, loaded: Any = None, **settings: Any) -> int:
    """The micro-batch with that much free memory, 1 GiB of it cached."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GIB)
    loaded = loaded or masked()
    train = TrainSettings(max_steps=1, **settings)
    return initial_max_tokens(loaded, train, GPU, torch.bfloat16, list(loaded.parameters()))


def test_the_estimate_follows_the_shape() -> None:
    base = bytes_per_token(masked(), gradient_checkpointing=False, is_half=True)
    assert base == 12 * (40 * 768 + 6 * 3072) + 12 * 30_522
    assert bytes_per_token(masked(), gradient_checkpointing=False, is_half=False) == 2 * base
    assert bytes_per_token(masked(24), gradient_checkpointing=False, is_half=True) == 2 * base - 12 * 30_522
    less = bytes_per_token(masked(), gradient_checkpointing=True, is_half=True)
    assert less is not None and less < base / 2
    classic: Any = SimpleNamespace(config=SimpleNamespace(model=None, head=None))
    assert bytes_per_token(classic, gradient_checkpointing=False, is_half=True) is None


def test_micro_batches_grow_with_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [chosen(monkeypatch, free * GIB) for free in (2, 15, 40, 78, 500)]
    assert sizes == sorted(sizes) and sizes[-1] == 65_536
    assert 500 <= sizes[0] <= 2000 and 6000 <= sizes[1] <= 10_000 and 35_000 <= sizes[3] <= 50_000
    assert all(size % 1000 == 0 for size in sizes[:-1])
    assert chosen(monkeypatch, 0) == 1000  # the error about memory is better than one about this number


def test_settings_and_other_devices_keep_their_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, 78 * GIB, max_tokens_per_microbatch=777) == 777
    assert chosen(monkeypatch, 78 * GIB, deterministic=True) == 8192
    training = make_trainer(max_tokens_per_microbatch="auto", device="cpu")
    assert training.max_tokens_per_microbatch == training.state()[1]["tokens"] == 8192
