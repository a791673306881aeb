"""Fill-mask: the answer head of masked language models, which finds the most likely tokens for each mask of a text."""

from __future__ import annotations

from torch import Tensor

from heedful.errors import HeedfulError
from heedful.model.decode_step import top_candidates
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
        (window_index, position)
        for window_index, position in best_context_positions(windows)
        if windows[window_index].ids[position] == mask
    ]


def mask_answer(engine_input: object, windows: list[Window], context: AnswerContext) -> Answer:
    """Return {"masks": [{"start", "end", "candidates": [{"token", "text", "probability"}]}], "windows"}.

    Start and end are in characters of the input. The most likely candidate comes first. If the text has no mask, the
    answer has a "note".
    """
    masks = []
    for window in windows:
        for position, candidates in zip(window.positions, window.scores, strict=True):
            start, stop = window.encoded.offsets[position]
            masks.append({"start": start, "end": stop, "candidates": candidates})
    answer: Answer = {"masks": sorted(masks, key=lambda mask: mask["start"]), "windows": len(windows)}
    if not masks:
        answer["note"] = f"nothing to fill in: write {mask_name(context.tokenizer)} where a token is wanted"
    return answer


def likely_tokens(scores: Tensor, tokenizer: Tokenizer, count: int) -> list[Answer]:
    """Return the `count` tokens with the largest softmax(scores), best first. Ids without a token are skipped."""
    probabilities = scores.softmax(-1)
    candidate_count = count
    while True:
        candidate_count = min(candidate_count, len(scores))
        (best,) = top_candidates(probabilities[None], candidate_count)
        candidates: list[Answer] = []
        for probability, id in best:
            try:
                token = tokenizer.name(id)
            except HeedfulError:  # the embedding may have more rows than the tokenizer has tokens
                continue
            text = tokenizer.decode([id], skip_special=False).strip()
            candidates.append({"token": token, "text": text, "probability": probability})
        if len(candidates) >= count or candidate_count == len(scores):
            return candidates[:count]
        candidate_count *= 2


def top_tokens(scores: Tensor, context: AnswerContext) -> list[list[Answer]]:
    """Return the most likely tokens of each position, which need less memory than scores over the vocabulary."""
    return [likely_tokens(position_scores, context.tokenizer, context.top_k) for position_scores in scores]


def mask_name(tokenizer: Tokenizer) -> str:
    """Return the mask token as it is written in a text; raise HeedfulError if the tokenizer has none."""
    if tokenizer.special.mask is None:
        raise HeedfulError("this tokenizer has no mask token: name it as mask_token in tokenizer_config.json")
    return tokenizer.name(tokenizer.special.mask)


def _prediction(answer: Answer) -> FillMask:
    """Convert an answer to its dataclass."""
    masks = [
        Mask(
            start=mask["start"],
            end=mask["end"],
            candidates=tuple(TokenCandidate(**candidate) for candidate in mask["candidates"]),
        )
        for mask in answer["masks"]
    ]
    return FillMask.from_answer({**answer, "masks": tuple(masks)})


MASK_COLUMNS = {"start": int, "end": int, "candidates": [{"token": str, "text": str, "probability": float}]}
FILL_MASK_HEAD = AnswerHead(
    expects='texts with the mask written out, like ["the cat [MASK] on the mat"]',
    tokenizer_inputs=read_text,
    positions=mask_positions,
    answer=mask_answer,
    summarize=top_tokens,
    prediction=_prediction,
    columns=lambda loaded, generation: {"masks": [MASK_COLUMNS], "windows": int, "note": str},
)
