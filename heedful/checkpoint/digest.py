"""A checksum that identifies the weights of a model."""

from __future__ import annotations

import hashlib

import torch

from heedful.checkpoint.bundle import ModelBundle


def weights_digest(loaded: ModelBundle) -> str:
    """SHA-256 over the names and bytes of all parameters, in hexadecimal."""
    found = hashlib.sha256()
    for name, tensor in sorted(loaded.named_tensors().items()):
        found.update(name.encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
