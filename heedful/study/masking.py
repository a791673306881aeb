"""The study `masking`: does it matter which selected tokens are masked, replaced or kept in masked language modelling?

BERT selects 15 % of the tokens as targets. It masks 80 % of these, replaces 10 % by random tokens and keeps 10 %
unchanged, since the mask token never occurs after pre-training (Devlin et al. 2019, section 3.1 and appendix C.2). This
should matter most if the encoder is frozen afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

import numpy as np
from numpy.typing import NDArray

from heedful.errors import SettingError
from heedful.objectives import Sample, SelfSupervised
from heedful.objectives.masked_lm import MaskedLM, Positions
from heedful.study import charts
from heedful.study.pretraining_common import (
    finetuned_accuracy,
    frozen_accuracy,
    pretrain_encoder,
    pretraining_components,
    pretraining_data,
)
from heedful.study.runner import Recorder, StudyConfig, StudyResult, compare_arms

BASELINE = "80 / 10 / 10"
ARMS = {  # shares of masked, replaced and kept tokens among the targets
    BASELINE: (0.8, 0.1, 0.1),
    "100 / 0 / 0": (1.0, 0.0, 0.0),
    "80 / 0 / 20": (0.8, 0.0, 0.2),
    "80 / 20 / 0": (0.8, 0.2, 0.0),
    "0 / 100 / 0": (0.0, 1.0, 0.0),
}
MEASURES = {"fine tuned": finetuned_accuracy, "as it is": frozen_accuracy}  # function that computes each measure


@dataclass(frozen=True, kw_only=True)
class MaskedWithShares(MaskedLM):
    """Masked language modelling with other shares of masked and replaced tokens."""

    masked_share: float = 0.8  # share of the targets that are replaced by the mask token
    replaced_share: float = 0.1  # share of the targets that are replaced by a random token

    def _draw(self, sample: Sample, key: int) -> tuple[Positions, NDArray[np.float64], NDArray[np.float64]]:
        """Choose positions as the base class does, and change the random number that decides between the actions.

        The base class masks a token if its random number is below 0.8, replaces it if the number is below 0.9, and
        keeps it otherwise.
        """
        positions, action, replacement = super()._draw(sample, key)
        is_masked = action < self.masked_share
        is_replaced = action < self.masked_share + self.replaced_share  # unless it is masked
        mask, replace, keep = 0.0, 0.85, 0.95  # numbers for which the base class takes these actions
        return positions, np.select([is_masked, is_replaced], [mask, replace], keep), replacement


def with_shares(objective: SelfSupervised, masked_share: float, replaced_share: float) -> MaskedWithShares:
    """Return a masked language modelling objective with other shares of masked and replaced tokens.

    Raises:
        SettingError: If the objective is not masked language modelling.
    """
    if not isinstance(objective, MaskedLM):
        raise SettingError("shares of masked and replaced tokens are for masked language modelling")
    values = {field.name: getattr(objective, field.name) for field in fields(MaskedLM) if field.init}
    return MaskedWithShares(**values, masked_share=masked_share, replaced_share=replaced_share)


def run(config: StudyConfig) -> StudyResult:
    """Pre-train each arm from the same random weights with the same positions of masked tokens."""
    train_count, steps, finetuning_steps = config.by_scale((300, 1000, 200), (16, 2, 2), (1000, 4000, 300))
    recorder = Recorder(config)
    about = ""
    test_sizes: dict[str, int] = {}  # number of examples of each test set
    for seed in config.seeds:
        with pretraining_data(config, seed, train_count) as data:
            about = data.about
            test_sizes = {name: len(examples) for name, examples in data.tests.items()}
            for arm in recorder.missing_arms(ARMS, seed):
                masked_share, replaced_share, _ = ARMS[arm]
                is_real = config.real_data is not None
                components = pretraining_components(data, "mlm", seed, steps=steps, real=is_real)
                transform = partial(with_shares, masked_share=masked_share, replaced_share=replaced_share)
                loaded, _losses = pretrain_encoder(components, pretrain=True, transform=transform)
                test_name = list(test_sizes)[-1]  # of toy data, the set whose opinion words are only in the corpus
                accuracies = {
                    name: accuracy(loaded, data, seed, steps=finetuning_steps)[test_name]
                    for name, accuracy in MEASURES.items()
                }
                recorder.record(arm, seed, accuracies)
    test_name, test_size = list(test_sizes.items())[-1]
    measures = tuple(recorder.measure(name, chance=0.5, tests=test_size) for name in MEASURES)
    about = (
        f"{about}. Shares of the selected 15 % of tokens that are masked, replaced by a random token, or kept; "
        f"{steps:,} steps of pre-training, then {finetuning_steps} on the labelled texts, of all weights or of "
        f"attention pooling over the frozen encoder. Accuracy on {test_name}."
    )
    return StudyResult(
        measures=measures,
        verdicts=compare_arms(measures, [(arm, BASELINE) for arm in ARMS if arm != BASELINE]),
        figure=charts.dot_plot(
            measures, tuple(ARMS), "Masked / replaced / kept: the value of pre-training", "accuracy"
        ),
        about=about,
    )
