"""Attention under autocast: queries, keys and values have one dtype, which the fast kernels take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from heedful.checkpoint import load
from heedful.families import FAMILIES
from heedful.model import attention
from heedful.nn.layout import AttentionArgs
from tests.support.tiny_models import TINY, our_hidden_states, random_batch, save_tiny


@pytest.mark.parametrize("family", TINY)
def test_queries_keys_and_values_are_in_bfloat16(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny(tmp_path, family, next(iter(FAMILIES[family].heads)))
    dtypes: list[set[Any]] = []
    attend_with = attention.attend_with

    def recorded(q: Tensor, k: Tensor, v: Tensor, args: AttentionArgs) -> Tensor:
        dtypes.append({q.dtype, k.dtype, v.dtype})
        return attend_with(q, k, v, args)

    monkeypatch.setattr(attention, "attend_with", recorded)
    with torch.autocast("cpu", torch.bfloat16):
        rows = our_hidden_states(load(tmp_path).train(), random_batch(family))
    assert rows.isfinite().all()
    assert dtypes and all(head_dtypes == {torch.bfloat16} for head_dtypes in dtypes)
