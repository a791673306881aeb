"""Look-up of the answer heads for a model's head. The engine and the HTML export use it to answer inputs."""

from __future__ import annotations

from heedful.model.config import Head
from heedful.tasks.answering import AnswerHead
from heedful.tasks.fill_mask import FILL_MASK_HEAD
from heedful.tasks.next_sentence import NEXT_SENTENCE_HEAD
from heedful.tasks.specs import SPECS, spec_of_head

PRETRAINING_HEADS: dict[str, tuple[AnswerHead, ...]] = {  # heads of pre-training, for which there is no task
    "masked_lm": (FILL_MASK_HEAD,),
    "next_sentence": (NEXT_SENTENCE_HEAD,),
    "pretraining": (FILL_MASK_HEAD, NEXT_SENTENCE_HEAD),
}


def answer_heads_of(kind: str) -> tuple[AnswerHead, ...]:
    """Return the answer heads for a kind of head, or () if such a head gives no answers.

    The first answer head that accepts the form of an input answers that input. A registered task takes precedence over
    `PRETRAINING_HEADS`.
    """
    spec = next((spec for spec in SPECS.values() if spec.head == kind), None)
    return PRETRAINING_HEADS.get(kind, ()) if spec is None else spec.task.answerers


def answer_heads_of_head(head: Head) -> tuple[AnswerHead, ...]:
    """Return the answer heads of the task for a model with this head; without a task, those for the kind of head."""
    spec = spec_of_head(head)
    return answer_heads_of(head.kind) if spec is None else spec.task.answerers
