"""Layer 7: tasks answer, learn and are measured: inputs to windows of tokens, a head's scores to plain data."""

from __future__ import annotations

from heedful.tasks.base import Answer, Answerer, Setting, Window
from heedful.tasks.choose import CHOOSE
from heedful.tasks.classify import CLASSIFY
from heedful.tasks.embed import COMPARE, EMBED
from heedful.tasks.extract import EXTRACT
from heedful.tasks.fill import FILL
from heedful.tasks.following import FOLLOWING
from heedful.tasks.rewrite import REWRITE, Writing
from heedful.tasks.tag import TAG

ANSWERERS: dict[str, tuple[Answerer, ...]] = {  # by the kind of head; the first that knows an input's form answers it
    "masked_lm": (FILL,),
    "next_sentence": (FOLLOWING,),
    "pretraining": (FILL, FOLLOWING),
    "sequence_classification": (CLASSIFY,),
    "token_classification": (TAG,),
    "question_answering": (EXTRACT,),
    "multiple_choice": (CHOOSE,),
    "embedding": (EMBED, COMPARE),
    "language_model": (REWRITE,),
}


__all__ = ["ANSWERERS", "Answer", "Answerer", "Setting", "Window", "Writing"]
