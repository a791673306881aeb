"""Next-sentence prediction: whether the second text follows the first."""

from __future__ import annotations

from heedful.tasks.answering import Answer, AnswerContext, AnswerHead, Window, read_pair
from heedful.tasks.predictions import NextSentence


def next_sentence_answer(engine_input: object, windows: list[Window], context: AnswerContext) -> Answer:
    """Answer with {"is_next_probability"}; score 0 of 2 means that it follows (Devlin et al. 2019, section 3.1)."""
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
