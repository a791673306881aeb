"""Checks of an engine's model and options."""

from __future__ import annotations

import torch

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.families import FAMILIES
from heedful.model.config import Classes, Head
from heedful.tasks.answer_heads import answer_heads_of, answer_heads_of_head
from heedful.tasks.answering import AnswerHead
from heedful.tasks.metrics.conformal import MIN_SET_EXAMPLES

TOKEN_BUDGET = 4096  # tokens of a batch; compared with 2048 in benchmarks/results/forward-minilm-batches-2026-11-21.md
GPU_TOKEN_BUDGET = 32_768  # on a GPU, whose products are slow for fewer rows
FREE_SHARE = 0.25  # share of a GPU's free memory that a batch may take
ACTIVATIONS = 32  # numbers in memory at once for each token and each element of its row, roughly


def usable_answer_heads(bundle: ModelBundle) -> tuple[Head, tuple[AnswerHead, ...]]:
    """Return the head of a model and its answer heads; raises HeedfulError if it has none."""
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
    """Return how many tokens a batch of a model may have: TOKEN_BUDGET on a CPU, as many as the memory of a GPU allows.

    Activations, and the KV cache of a decoder, may take FREE_SHARE of the memory that is free now.
    """
    parameter = next(bundle.parameters())
    if parameter.device.type != "cuda":
        return TOKEN_BUDGET
    free, _ = torch.cuda.mem_get_info(parameter.device)
    decoder = bundle.config.model.decoder
    numbers = ACTIVATIONS * bundle.model.config.width + (2 * decoder.layers * decoder.width if decoder else 0)
    affordable = int(FREE_SHARE * free) // (numbers * parameter.element_size())
    return max(TOKEN_BUDGET, min(GPU_TOKEN_BUDGET, affordable))


def check_token_budget(token_budget: int) -> None:
    """Raise a HeedfulError if the token budget is below 1."""
    if token_budget < 1:
        raise HeedfulError(f"token_budget is {token_budget}: give how many tokens a batch may have, from 1")


def check_min_confidence(min_confidence: float, head: Head | None) -> None:
    """Raise a HeedfulError if it is no probability, or the head does not choose one label."""
    if not 0 <= min_confidence <= 1:
        raise HeedfulError(f"min_confidence is {min_confidence}; expected a probability from 0 to 1")
    if min_confidence and not (isinstance(head, Classes) and head.problem_type == "single_label_classification"):
        kind = head.problem_type if isinstance(head, Classes) else head and head.kind
        has = f"has a head for {kind}" if kind else "has no head"
        raise HeedfulError(f"min_confidence is for models that choose one label, and this one {has}: leave it out")


def check_prediction_set(coverage: float | None, bundle: ModelBundle) -> None:
    """Raise a HeedfulError if `coverage` is not between 0 and 1, or the model has no calibration for prediction sets.

    Args:
        coverage: Probability with which a prediction set contains the right label; None: no sets are asked for.
        bundle: The model.
    """
    if coverage is None:
        return
    if not 0 < coverage < 1:
        raise HeedfulError(f"prediction_set is {coverage}; expected a probability between 0 and 1")
    if not bundle.calibration:
        raise HeedfulError(
            f"{bundle.source} has no calibration for prediction sets: `heedful finetune classify` makes one if the "
            f"data has one label for each text and a dev split of {MIN_SET_EXAMPLES} examples or more"
        )
