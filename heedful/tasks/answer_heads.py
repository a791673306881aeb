"""Answerers by kind of head: each turns the scores of a head into answers."""

from __future__ import annotations

from heedful.model.config import Head
from heedful.tasks.answering import AnswerHead
from heedful.tasks.fill_mask import FILL_MASK_HEAD
from heedful.tasks.next_sentence import NEXT_SENTENCE_HEAD
from heedful.tasks.specs import SPECS, spec_of_head

PRETRAINED: dict[str, tuple[AnswerHead, ...]] = {  # heads that no task of fine-tuning has, unless one is registered
    "masked_lm": (FILL_MASK_HEAD,),
    "next_sentence": (NEXT_SENTENCE_HEAD,),
    "pretraining": (FILL_MASK_HEAD, NEXT_SENTENCE_HEAD),
}


def answer_heads_of(kind: str) -> tuple[AnswerHead, ...]:
    """Return what answers with a head of this kind; the first that knows an input's form answers it; (): nothing."""
    spec = next((spec for spec in SPECS.values() if spec.head == kind), None)
    return PRETRAINED.get(kind, ()) if spec is None else spec.task.answerers


def answer_heads_of_head(head: Head) -> tuple[AnswerHead, ...]:
    """Return what answers with this head: that of the task that it does, else of the kind of head."""
    spec = spec_of_head(head)
    return answer_heads_of(head.kind) if spec is None else spec.task.answerers
