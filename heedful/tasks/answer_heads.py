"""Answerers by kind of head: each turns the scores of a head into answers."""

from __future__ import annotations

from heedful.tasks.answering import Answerer
from heedful.tasks.fill_mask import FILL
from heedful.tasks.next_sentence import FOLLOWING
from heedful.tasks.specs import SPECS

PRETRAINED: dict[str, tuple[Answerer, ...]] = {  # heads that no task of fine-tuning has, unless one is registered
    "masked_lm": (FILL,),
    "next_sentence": (FOLLOWING,),
    "pretraining": (FILL, FOLLOWING),
}


def answerers_of(kind: str) -> tuple[Answerer, ...]:
    """Return what answers with a head of this kind; the first that knows an input's form answers it; (): nothing."""
    tasks = (spec.task for spec in SPECS.values())
    return next((task.answerers for task in tasks if task.head == kind), PRETRAINED.get(kind, ()))
