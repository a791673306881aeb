"""Fill in the masks of a text: the most likely tokens of each."""

from __future__ import annotations

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
    """Return the position of each mask, in the window where it has the most context."""
    mask = tokenizer.special.mask
    return [
        (number, position)
        for number, position in best_context_positions(windows)
        if windows[number].ids[position] == mask
    ]


def mask_answer(engine_input: object, windows: list[Window], context: AnswerContext) -> Answer:
    """Answer with {"masks": [{"start", "end", "candidates": [{"token", "text", "probability"}]}]}, the best first."""
    masks = [
        {"start": start, "end": stop, "candidates": tokens}
        for window in windows
        for position, tokens in zip(window.positions, window.scores, strict=True)
        for start, stop in [window.encoded.offsets[position]]
    ]
    answer: Answer = {"masks": sorted(masks, key=lambda mask: mask["start"]), "windows": len(windows)}
    if not masks:
        answer["note"] = f"nothing to fill in: write {mask_name(context.tokenizer)} where a token is wanted"
    return answer


def likely_tokens(scores: Tensor, tokenizer: Tokenizer, count: int) -> list[Answer]:
    """Return the tokens with the largest softmax(scores) over the whole vocabulary; ids without a token are skipped."""
    probabilities, listed = scores.softmax(-1), count
    while True:
        listed = min(listed, len(scores))
        (best,) = top_candidates(probabilities[None], listed)
        candidates: list[Answer] = []
        for probability, id in best:
            try:
                token = tokenizer.name(id)
            except HeedfulError:  # the embedding may have more rows than there are tokens
                continue
            text = tokenizer.decode([id], skip_special=False).strip()
            candidates.append({"token": token, "text": text, "probability": probability})
        if len(candidates) >= count or listed == len(scores):
            return candidates[:count]
        listed *= 2


def top_tokens(scores: Tensor, context: AnswerContext) -> list[list[Answer]]:
    """Return the most likely tokens of each position; its scores would have the size of the vocabulary."""
    return [likely_tokens(position_scores, context.tokenizer, context.top_k) for position_scores in scores]


def mask_name(tokenizer: Tokenizer) -> str:
    """Return the mask token as it is written in a text."""
    if tokenizer.special.mask is None:
        raise HeedfulError("this tokenizer has no mask token: name it as mask_token in tokenizer_config.json")
    return tokenizer.name(tokenizer.special.mask)


def _prediction(answer: Answer) -> FillMask:
    masks = [
        Mask(
            start=mask["start"],
            end=mask["end"],
            candidates=tuple(TokenCandidate(**candidate) for candidate in mask["candidates"]),
        )
        for mask in answer["masks"]
    ]
    return FillMask.from_answer({**answer, "masks": tuple(masks)})


MASK = {"start": int, "end": int, "candidates": [{"token": str, "text": str, "probability": float}]}
FILL_MASK_HEAD = AnswerHead(
    expects='texts with the mask written out, like ["the cat [MASK] on the mat"]',
    tokenizer_inputs=read_text,
    positions=mask_positions,
    answer=mask_answer,
    summarize=top_tokens,
    prediction=_prediction,
    columns=lambda loaded, generation: {"masks": [MASK], "windows": int, "note": str},
)
