"""Fresh weights of every family are spread as transformers spreads them, matrix by matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import heedful
from heedful.checkpoint import read_config
from heedful.families import FAMILIES
from tests.support.tiny_models import TINY, under_file_names

BODIES = {family: kind.__name__.removesuffix("Config") + "Model" for family, (kind, _) in TINY.items()}


@pytest.mark.parametrize("family", TINY)
def test_as_transformers(family: str, tmp_path: Path) -> None:
    kind, settings = TINY[family]
    reference = getattr(transformers, BODIES[family])(kind(**settings))
    values = reference.config.to_dict() | {"architectures": [BODIES[family]]}
    fresh = heedful.checkpoint.create(read_config(values, "config.json"))
    heedful.save(fresh, tmp_path / "ours")
    loaded = load_file(tmp_path / "ours/model.safetensors")
    tensors = under_file_names(reference, reference.state_dict())
    published = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    constants = FAMILIES[family].body(fresh.config.model).constants
    compared = 0
    for name, tensor in loaded.items():
        mean, std, count = tensor.mean(), tensor.std(), tensor.numel()
        if FAMILIES[family].prefix + name in constants:
            assert torch.allclose(tensor, published[name], atol=1e-6), name
        elif published[name].std() == 0:
            assert torch.equal(tensor, published[name]), name
        elif tensor.ndim > 1 and count >= 64:
            compared += 1
            assert abs(mean) < 6 * published[name].std() / count**0.5, name
            assert abs(std / published[name].std() - 1) < 6 / count**0.5, name  # two spreads of 1 / sqrt(2 count) each
    assert compared >= 10
