"""Fill in the masks of a text: the tokens that the head thinks most likely."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from heedful.errors import HeedfulError
from heedful.model.decode import top_candidates
from heedful.tasks.answering import (
    Answer,
    AnswerContext,
    AnswerHead,
    TokenPosition,
    Window,
    best_context_positions,
    read_text,
)
from heedful.tasks.predictions import FillMask, Mask, TokenCandidate
from heedful.tokenizer import Encoding, Tokenizer


def mask_positions(windows: list[Encoding], tokenizer: Tokenizer) -> list[TokenPosition]:
    """Each mask, in the window where it sees most around it."""
    mask = tokenizer.special.mask
    return [(number, place) for number, place in best_context_positions(windows) if windows[number].ids[place] == mask]


def mask_answer(given: Any, windows: list[Window], setting: AnswerContext) -> Answer:
    """{"masks": [{"start", "end", "tokens": [{"token", "text", "probability"}]}]}, most likely token first."""
    masks = [
        {"start": start, "end": stop, "tokens": tokens}
        for window in windows
        for place, tokens in zip(window.positions, window.scores, strict=True)
        for start, stop in [window.encoded.offsets[place]]
    ]
    found: Answer = {"masks": sorted(masks, key=lambda mask: mask["start"]), "windows": len(windows)}
    if not masks:
        found["note"] = f"nothing to fill in: write {mask_name(setting.tokenizer)} where a token is wanted"
    return found


def likely_tokens(scores: Tensor, tokenizer: Tokenizer, count: int) -> list[Answer]:
    """The tokens with the largest softmax(scores) over the whole vocabulary; ids without a token are passed over."""
    probabilities, listed = scores.softmax(-1), count
    while True:
        listed = min(listed, len(scores))
        (best,) = top_candidates(probabilities[None], listed)
        found: list[Answer] = []
        for probability, id in best:
            try:
                token = tokenizer.name(id)
            except HeedfulError:  # the embedding may have more rows than there are tokens
                continue
            text = tokenizer.decode([id], skip_special=False).strip()
            found.append({"token": token, "text": text, "probability": probability})
        if len(found) >= count or listed == len(scores):
            return found[:count]
        listed *= 2


def top_tokens(scores: Tensor, setting: AnswerContext) -> list[list[Answer]]:
    """The likeliest tokens of each place: scores of many places would be a vocabulary each."""
    return [likely_tokens(each, setting.tokenizer, setting.top_k) for each in scores]


def mask_name(tokenizer: Tokenizer) -> str:
    """How the mask is written in a text."""
    if tokenizer.special.mask is None:
        raise HeedfulError("this tokenizer has no mask token: name it as mask_token in tokenizer_config.json")
    return tokenizer.name(tokenizer.special.mask)


def _prediction(answer: Answer) -> FillMask:
    masks = [
        Mask(start=each["start"], end=each["end"], candidates=tuple(TokenCandidate(**one) for one in each["tokens"]))
        for each in answer["masks"]
    ]
    return FillMask(masks=tuple(masks), truncated_tokens=answer.get("cut", 0))


MASK = {"start": int, "end": int, "tokens": [{"token": str, "text": str, "probability": float}]}
FILL_MASK_HEAD = AnswerHead(
    expects='texts with the mask written out, like ["the cat [MASK] on the mat"]',
    tokenizer_inputs=read_text,
    positions=mask_positions,
    answer=mask_answer,
    summarize=top_tokens,
    prediction=_prediction,
    columns=lambda loaded, writing: {"masks": [MASK], "windows": int, "note": str},
)
