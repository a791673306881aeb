"""Choose among candidates: each is scored beside the prompt."""

from __future__ import annotations

from typing import Any

import torch

from heedful.tasks.base import Answer, Answerer, Setting, Window, named_texts, read_pair
from heedful.tokenizer import Item


def items(given: Any) -> list[Item] | None:
    """{"prompt": ..., "choices": [...]}."""
    prompt, choices = named_texts(given, "prompt", "choices") or (None, None)
    if not isinstance(choices, list | tuple) or not choices:
        return None
    pairs = [read_pair((prompt, choice)) for choice in choices]
    return [pair[0] for pair in pairs if pair] if all(pairs) else None


def answer(given: Any, windows: list[Window], setting: Setting) -> Answer:
    """{"choice", "number", "probability", "probabilities"}: softmax over the scores of this prompt's candidates."""
    probabilities = torch.stack([window.scores for window in windows]).softmax(0).tolist()
    number = max(range(len(probabilities)), key=probabilities.__getitem__)
    return {
        "choice": given["choices"][number],
        "number": number,
        "probability": probabilities[number],
        "probabilities": probabilities,
    }


CHOOSE = Answerer(
    expects='prompts with their candidates, like [{"prompt": "It rains.", "choices": ["Take a hat.", "Sleep."]}]',
    items=items,
    answer=answer,
    long="refuse",
)
