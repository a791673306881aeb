"""Helpers for the scores of a batch: the module that computes them, copying them to the CPU, and vectors of windows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from heedful.checkpoint import ModelBundle
from heedful.model.heads import PretrainingHead
from heedful.nn.layers import segment_means
from heedful.packed import send
from heedful.tasks.answering import AnswerHead
from heedful.tasks.next_sentence import NEXT_SENTENCE_HEAD


def head_module(bundle: ModelBundle, answer_head: AnswerHead) -> nn.Module:
    """Return the head of a model, or the part of a pre-training head whose scores the answer head reads."""
    head = bundle.head
    if isinstance(head, PretrainingHead):
        return head.next if answer_head is NEXT_SENTENCE_HEAD else head.masked
    assert head is not None
    return head


def to_cpu(scores: Tensor) -> Tensor:
    """Return scores on the CPU, in float32; scores in float64 stay in float64."""
    return scores.to("cpu", torch.float64 if scores.dtype == torch.float64 else torch.float32)


def window_vectors(rows: Tensor, counts: Sequence[int]) -> NDArray[np.float32]:
    """Return the mean of the rows of each window, [windows, width], on the CPU.

    Args:
        rows: Hidden states that the head reads, [rows, width], one window after the other.
        counts: Number of rows of each window.
    """
    if len(counts) == 1:
        rows = rows.mean(0, keepdim=True, dtype=torch.promote_types(rows.dtype, torch.float32))
    elif any(count != 1 for count in counts):
        lengths = send(counts, rows.device)
        windows = torch.arange(len(counts), device=rows.device).repeat_interleave(lengths, output_size=len(rows))
        rows = segment_means(rows, windows, lengths)
    vectors: NDArray[np.float32] = rows.to("cpu", torch.float32).numpy()
    return vectors


def ignore_rows(rows: Tensor, counts: Sequence[int]) -> None:
    """Do nothing: the `on_rows` of an engine whose vectors nobody compares."""
