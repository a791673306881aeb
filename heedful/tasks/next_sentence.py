"""Next sentence prediction: whether the second text of a pair follows the first."""

from __future__ import annotations

from heedful.tasks.answering import Answer, AnswerContext, AnswerHead, Window, read_pair
from heedful.tasks.predictions import NextSentence


def next_sentence_answer(engine_input: object, windows: list[Window], context: AnswerContext) -> Answer:
    """Return {"is_next_probability"}: the first value of the softmax over both scores (Devlin et al. 2019, 3.1)."""
    (window,) = windows
    return {"is_next_probability": float(window.scores.softmax(-1)[0])}


NEXT_SENTENCE_HEAD = AnswerHead(
    expects='pairs of texts, like [("first text", "second text")]',
    tokenizer_inputs=read_pair,
    answer=next_sentence_answer,
    long_inputs="refuse",
    prediction=NextSentence.from_answer,
    columns=lambda loaded, generation: {"is_next_probability": float},
)
