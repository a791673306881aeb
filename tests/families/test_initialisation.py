"""New weights have the mean and standard deviation of transformers' in each matrix of every family."""

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
def test_new_weights_are_distributed_as_in_transformers(family: str, tmp_path: Path) -> None:
    config_class, settings = TINY[family]
    reference = getattr(transformers, BODIES[family])(config_class(**settings))
    values = reference.config.to_dict() | {"architectures": [BODIES[family]]}
    created = heedful.checkpoint.create(read_config(values, "config.json"))
    heedful.save(created, tmp_path / "ours")
    tensors = load_file(tmp_path / "ours/model.safetensors")
    expected_tensors = under_file_names(reference, reference.state_dict())
    constants = FAMILIES[family].body(created.config.model).constants
    compared = 0
    for name, tensor in tensors.items():
        expected, count = expected_tensors[name], tensor.numel()
        if FAMILIES[family].prefix + name in constants:
            assert torch.allclose(tensor, expected, atol=1e-6), name
        elif expected.std() == 0:
            assert torch.equal(tensor, expected), name
        elif tensor.ndim > 1 and count >= 64:
            compared += 1
            assert abs(tensor.mean()) < 6 * expected.std() / count**0.5, name
            # each of the two standard deviations has a relative error of 1 / sqrt(2 count)
            assert abs(tensor.std() / expected.std() - 1) < 6 / count**0.5, name
    assert compared >= 10
