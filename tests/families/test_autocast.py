"""Attention of every family gets tensors of one dtype, under autocast too, which the fast kernels take."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from heedful.checkpoint import load
from heedful.families import FAMILIES
from heedful.model import attention
from heedful.nn.attend import choose_kernel, explain
from heedful.nn.kernels import KERNELS
from heedful.nn.layout import AttentionArgs
from tests.support.tiny_models import TINY, our_hidden_states, random_batch, save_tiny

HEAD_WIDTH = 64  # of published models; some kernels do not take the narrow heads of tiny models
(NATIVE,) = (kernel for kernel in KERNELS if kernel.name == "native")


def with_wide_heads(qkv: tuple[Tensor, ...], device: str) -> Any:
    """Return empty tensors like q, k and v, with heads of HEAD_WIDTH."""
    return [torch.empty(*tensor.shape[:2], HEAD_WIDTH, dtype=tensor.dtype, device=device) for tensor in qkv]


@pytest.mark.parametrize("family", TINY)
def test_attention_takes_the_fast_kernels(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    save_tiny(tmp_path, family, next(iter(FAMILIES[family].heads)))
    calls: list[tuple[tuple[Tensor, ...], AttentionArgs]] = []
    loaded, attend_with = load(tmp_path), attention.attend_with

    def recorded(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        calls.append(((q, k, v), args))
        return attend_with(q, k, v, args)

    monkeypatch.setattr(attention, "attend_with", recorded)
    for training, dtype in product((False, True), (torch.float32, torch.bfloat16)):
        first = len(calls)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            rows = our_hidden_states(loaded.train(training), random_batch(family))
        assert rows.isfinite().all() and calls[first:]
        assert {tensor.dtype for qkv, _ in calls[first:] for tensor in qkv} == {dtype}
    for qkv, args in calls:
        # kernels on CUDA need widths that are multiples of 8; relative positions may add dimensions to q and k
        assert (qkv[0].shape[-1] - qkv[2].shape[-1]) % 8 == 0
        with FakeTensorMode():
            on_gpu = with_wide_heads(qkv, "cuda")
        expected = "flash" if qkv[0].dtype == torch.bfloat16 and args.bias is None else "grouped"
        assert choose_kernel(*on_gpu, args).name == expected, explain(*on_gpu, args)
    native = request.getfixturevalue("native")  # skips the rest without a compiler
    for qkv, args in calls:
        if args.bias is None and (native.has_bfloat16 or qkv[0].dtype == torch.float32):
            assert NATIVE.cannot(*with_wide_heads(qkv, "cpu"), args) == ""
