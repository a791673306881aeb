"""Scores of a batch: the module that computes them, and their copy on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from heedful.checkpoint import ModelBundle
from heedful.model.heads import PretrainingHead
from heedful.tasks.answering import AnswerHead
from heedful.tasks.next_sentence import NEXT_SENTENCE_HEAD


def head_module(bundle: ModelBundle, answer_head: AnswerHead) -> nn.Module:
    """Return the module of a model's head; of a pre-training head, the one that the answer head uses."""
    head = bundle.head
    if isinstance(head, PretrainingHead):
        return head.next if answer_head is NEXT_SENTENCE_HEAD else head.masked
    assert head is not None
    return head


def to_cpu(scores: Tensor) -> Tensor:
    """Return scores on the CPU in float32, or in float64 if they are."""
    return scores.to("cpu", torch.float64 if scores.dtype == torch.float64 else torch.float32)
