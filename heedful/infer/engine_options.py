"""Checks of an engine's options."""

from __future__ import annotations

from heedful.checkpoint import ModelBundle
from heedful.errors import HeedfulError
from heedful.model.config import Classes, Head
from heedful.tasks.metrics.conformal import MIN_SET_EXAMPLES


def check_token_budget(token_budget: int) -> None:
    """Raise a HeedfulError for a budget below 1."""
    if token_budget < 1:
        raise HeedfulError(f"token_budget is {token_budget}: give how many tokens a batch may have, from 1")


def check_min_confidence(min_confidence: float, head: Head | None) -> None:
    """Raise a HeedfulError for a probability outside 0 to 1, and where the head does not choose one label."""
    if not 0 <= min_confidence <= 1:
        raise HeedfulError(f"min_confidence is {min_confidence}; expected a probability from 0 to 1")
    if min_confidence and not (isinstance(head, Classes) and head.problem_type == "single_label_classification"):
        kind = head.problem_type if isinstance(head, Classes) else head and head.kind
        has = f"has a head for {kind}" if kind else "has no head"
        raise HeedfulError(f"min_confidence is for models that choose one label, and this one {has}: leave it out")


def check_prediction_set(coverage: float | None, loaded: ModelBundle) -> None:
    """Raise a HeedfulError for a probability that is not between 0 and 1, and for a model without calibration."""
    if coverage is None:
        return
    if not 0 < coverage < 1:
        raise HeedfulError(f"prediction_set is {coverage}; expected a probability between 0 and 1")
    if not loaded.calibration:
        raise HeedfulError(
            f"{loaded.source} has no calibration for prediction sets: `heedful finetune classify` makes one if the "
            f"data has one label for each text and a dev split of {MIN_SET_EXAMPLES} examples or more"
        )
