"""One vector for each text."""

from __future__ import annotations

from typing import Any

from heedful.tasks.base import Answer, Answerer, Setting, Window, read_text


def answer(given: Any, windows: list[Window], setting: Setting) -> Answer:
    """{"vector", "tokens", "cut"}: how many tokens were read, and how many at the end were cut off."""
    (window,) = windows
    return {"vector": window.scores.tolist(), "tokens": len(window.encoded), "cut": window.encoded.dropped}


EMBED = Answerer(expects='texts, like ["a text"]', items=read_text, answer=answer, long="cut")
