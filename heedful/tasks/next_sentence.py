"""Next-sentence prediction: whether the second text follows the first."""

from __future__ import annotations

from heedful.tasks.answering import Answer, AnswerContext, AnswerHead, Window, read_pair
from heedful.tasks.predictions import NextSentence


def next_sentence_answer(engine_input: object, windows: list[Window], context: AnswerContext) -> Answer:
    """Answer with {"follows": probability}; score 0 of 2 means that it follows (Devlin et al. 2019, section 3.1)."""
    (window,) = windows
    return {"follows": float(window.scores.softmax(-1)[0])}


NEXT_SENTENCE_HEAD = AnswerHead(
    expects='pairs of texts, like [("first text", "second text")]',
    tokenizer_inputs=read_pair,
    answer=next_sentence_answer,
    long_inputs="refuse",
    prediction=lambda answer: NextSentence(probability=answer["follows"], truncated_tokens=answer.get("cut", 0)),
    columns=lambda loaded, generation: {"follows": float},
)
