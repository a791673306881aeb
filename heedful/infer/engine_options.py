"""Checks and defaults of an engine's options."""

from __future__ import annotations

import torch

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.families import FAMILIES
from heedful.model.config import Classes, Head
from heedful.tasks.answer_heads import answer_heads_of, answer_heads_of_head
from heedful.tasks.answering import AnswerHead
from heedful.tasks.metrics.conformal import MIN_SET_EXAMPLES

# tokens of a batch on a CPU; compared with 2048 in benchmarks/results/forward-minilm-batches-2026-11-21.md
TOKEN_BUDGET = 4096
GPU_TOKEN_BUDGET = 32_768  # maximum tokens of a batch on a GPU, which multiplies large matrices faster
FREE_MEMORY_SHARE = 0.25  # share of a GPU's free memory that a batch may use, from 0 to 1
ACTIVATIONS_PER_VALUE = 32  # estimated numbers in memory at once per element of the hidden states


def usable_answer_heads(bundle: ModelBundle) -> tuple[Head, tuple[AnswerHead, ...]]:
    """Return the head of a model and its answer heads; raises a HeedfulError if it has no answer heads."""
    head = bundle.config.head
    if head is not None and (answer_heads := answer_heads_of_head(head)):
        return head, answer_heads
    possible_kinds = [kind for kind in FAMILIES[bundle.config.family].kinds() if answer_heads_of(kind)]
    has = "no head" if head is None else f'a "{head.kind}" head, which answers nothing by itself'
    raise HeedfulError(
        f"{bundle.source} has {has}: load it with head= (--head-kind on the command line), one of "
        f"{', '.join(possible_kinds)}, whose weights must be in the folder"
    )


def default_token_budget(bundle: ModelBundle) -> int:
    """Return the maximum tokens of a batch: TOKEN_BUDGET on a CPU; on a GPU, up to GPU_TOKEN_BUDGET.

    On a GPU, activations and the KV cache of a decoder may use FREE_MEMORY_SHARE of the memory that is free now.
    """
    parameter = next(bundle.parameters())
    if parameter.device.type != "cuda":
        return TOKEN_BUDGET
    free, _ = torch.cuda.mem_get_info(parameter.device)
    decoder = bundle.config.model.decoder
    cached = 2 * decoder.layers * decoder.width if decoder else 0  # numbers in the KV cache per token
    numbers = ACTIVATIONS_PER_VALUE * bundle.model.config.width + cached  # numbers in memory per token
    affordable = int(FREE_MEMORY_SHARE * free) // (numbers * parameter.element_size())
    return max(TOKEN_BUDGET, min(GPU_TOKEN_BUDGET, affordable))


def check_token_budget(token_budget: int) -> None:
    """Raise a HeedfulError if the token budget is below 1."""
    if token_budget < 1:
        raise HeedfulError(f"token_budget is {token_budget}: give how many tokens a batch may have, from 1")


def check_confidence_range(min_confidence: float) -> None:
    """Raise a HeedfulError if `min_confidence` is no probability."""
    if not 0 <= min_confidence <= 1:
        raise HeedfulError(f"min_confidence is {min_confidence}; expected a probability from 0 to 1")


def check_min_confidence(min_confidence: float, head: Head | None) -> None:
    """Raise a HeedfulError if `min_confidence` is no probability, or positive for a head that is no classifier."""
    check_confidence_range(min_confidence)
    if min_confidence and not (isinstance(head, Classes) and head.problem_type == "single_label_classification"):
        kind = head.problem_type if isinstance(head, Classes) else head and head.kind
        has = f"has a head for {kind}" if kind else "has no head"
        raise HeedfulError(f"min_confidence is for models that choose one label, and this one {has}: leave it out")


def check_prediction_set(coverage: float | None, bundle: ModelBundle) -> None:
    """Raise a HeedfulError if `coverage` is not between 0 and 1, or the model has no calibration for prediction sets.

    Args:
        coverage: Probability with which a prediction set contains the right label. If None, answers have no sets.
        bundle: The model with its calibration.
    """
    if coverage is None:
        return
    if not 0 < coverage < 1:
        raise HeedfulError(f"prediction_set is {coverage}; expected a probability between 0 and 1")
    if not bundle.calibration:
        raise HeedfulError(
            f"{bundle.source} has no calibration for prediction sets: `heedful finetune classify` makes one if the "
            f"data has one label for each text and a dev split of {MIN_SET_EXAMPLES} examples or more, or with --folds"
        )
