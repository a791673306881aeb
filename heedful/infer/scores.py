"""Helpers for the scores of a batch: the module that computes them, and copying them to the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heedful.checkpoint import ModelBundle
from heedful.model.heads import PretrainingHead
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
