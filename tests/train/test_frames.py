"""The path from the training loop to the attention kernel is short enough to step through."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import heedful
from heedful.csrc import Kernels, library
from heedful.train.trainer import Trainer
from tests.support.tiny_runs import classify, make_settings

PACKAGE = str(Path(heedful.__file__).parent)
MAX_FRAMES = 14  # 6 of them in train and tasks, 8 in checkpoint, model and nn


def heedful_frames() -> list[str]:
    """Return the functions of heedful on the stack, outermost first."""
    names, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            names.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return names[::-1]


def test_a_training_step_reaches_the_attention_kernel_in_few_frames(
    native: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks: list[list[str]] = []

    def attention(*arguments: Any) -> None:
        stacks.append(heedful_frames())
        native.attention(*arguments)

    counting = replace(native, attention=attention)
    monkeypatch.setattr(library, "_library_or_reason", lambda: counting)
    model, task, samples = classify(width=64)  # wide enough for the attention kernel of any processor
    for step in Trainer(model, task, samples, make_settings({"max_steps": 1}, {})[0]):
        assert step.loss > 0
    assert stacks, "the kernel did not compute attention"
    assert max(map(len, stacks)) <= MAX_FRAMES, max(stacks, key=len)
