"""What becomes of a chosen token: 80 % hidden, 10 % replaced, 10 % kept, and what else it could be.

Hidden tokens never occur afterwards, so some are to look like text (Devlin et al. 2019, section 3.1 and appendix C.2);
it should matter most where the encoder stays as it is, and a classifier reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np

from heedful.errors import HeedfulError
from heedful.objectives import Sample, SelfSupervised
from heedful.objectives.masked_lm import MaskedLM
from heedful.study import charts
from heedful.study.pretraining_common import (
    finetuned_accuracy,
    frozen_accuracy,
    pretrain_encoder,
    pretraining_components,
    pretraining_data,
)
from heedful.study.runner import Recorder, StudyConfig, StudyResult, compare_arms

USUAL = "80 / 10 / 10"
ARMS = {  # shares of hidden, replaced, kept
    USUAL: (0.8, 0.1, 0.1),
    "100 / 0 / 0": (1.0, 0.0, 0.0),
    "80 / 0 / 20": (0.8, 0.0, 0.2),
    "80 / 20 / 0": (0.8, 0.2, 0.0),
    "0 / 100 / 0": (0.0, 1.0, 0.0),
}
MEASURES = {"fine tuned": finetuned_accuracy, "as it is": frozen_accuracy}


@dataclass(frozen=True, kw_only=True)
class MaskedWithShares(MaskedLM):
    """Masked tokens with other shares."""

    hidden: float = 0.8
    replaced: float = 0.1

    def _draw(self, sample: Sample, key: int) -> Any:
        """The same places; the number that decides how each is treated is moved to where the usual shares do it."""
        places, how, other = super()._draw(sample, key)
        return places, np.select([how < self.hidden, how < self.hidden + self.replaced], [0.0, 0.85], 0.95), other


def with_shares(objective: SelfSupervised, hidden: float, replaced: float) -> MaskedWithShares:
    """The same objective with those shares."""
    if not isinstance(objective, MaskedLM):
        raise HeedfulError("shares of hidden and replaced tokens are for masked language modelling")
    same = {each.name: getattr(objective, each.name) for each in fields(MaskedLM) if each.init}
    return MaskedWithShares(**same, hidden=hidden, replaced=replaced)


def run(plan: StudyConfig) -> StudyResult:
    """Each arm starts from the same draw and chooses the same tokens."""
    few, steps, tuned = plan.by_scale(300, 16, 1000), plan.by_scale(1000, 2, 4000), plan.by_scale(200, 2, 300)
    bench, told, tests = Recorder(plan), "", {}
    for seed in plan.seeds:
        with pretraining_data(plan, seed, few) as given:
            told, tests = given.about, {name: len(each) for name, each in given.tests.items()}
            last = list(tests)[-1]  # words that reading alone knows
            for arm in bench.missing_arms(ARMS, seed):
                hidden, replaced, _ = ARMS[arm]
                made = pretraining_components(given, "mlm", seed, steps=steps, full=plan.real_data is not None)
                remade = partial(with_shares, hidden=hidden, replaced=replaced)
                loaded, _losses = pretrain_encoder(made, pretrain=True, transform=remade)
                found = {name: measured(loaded, given, seed, steps=tuned)[last] for name, measured in MEASURES.items()}
                bench.record(arm, seed, found)
    count = list(tests.values())[-1]
    measures = tuple(bench.measure(name, chance=0.5, tests=count) for name in MEASURES)
    about = (
        f"{told}. Shares of the chosen 15 % that are hidden, replaced by any token, kept; {steps:,} steps of reading, "
        f"then {tuned} on the labelled texts, of all weights, or of a trained query that reads the encoder as it is. "
        f"Accuracy on {list(tests)[-1]}."
    )
    verdicts = compare_arms(measures, [(arm, USUAL) for arm in ARMS if arm != USUAL])
    figure = charts.dot_plot(
        measures, tuple(ARMS), "Hidden / replaced / kept: what reading is worth afterwards", "accuracy"
    )
    return StudyResult(measures=measures, verdicts=verdicts, figure=figure, about=about)
