"""Random weights against weights that read text first, by three objectives on the same number of steps and tokens.

Masked tokens alone (Liu et al. 2019 leave the second term out), with the next sentence (Devlin et al. 2019), or with
the order of two (Lan et al. 2020). What counts is the accuracy on a small labelled task afterwards.
"""

from __future__ import annotations

from heedful.study import charts
from heedful.study.pretraining_common import (
    finetuned_accuracy,
    pretrain_encoder,
    pretraining_components,
    pretraining_data,
)
from heedful.study.runner import Recorder, StudyConfig, StudyResult, compare_arms

RANDOM = "random weights"
ARMS = {
    RANDOM: "mlm",
    "masked tokens": "mlm",
    "masked + next sentence": "mlm+nsp",
    "masked + sentence order": "mlm+sop",
}


def run(plan: StudyConfig) -> StudyResult:
    """Each arm starts from the same draw, reads the same stories, and learns from the same labelled texts."""
    few, steps, tuned = plan.by_scale(300, 16, 1000), plan.by_scale(1200, 2, 4000), plan.by_scale(200, 2, 300)
    bench, told, tests = Recorder(plan), "", {}
    for seed in plan.seeds:
        with pretraining_data(plan, seed, few) as given:
            told, tests = given.about, {name: len(each) for name, each in given.tests.items()}
            for arm in bench.missing_arms(ARMS, seed):
                made = pretraining_components(given, ARMS[arm], seed, steps=steps, full=plan.real_data is not None)
                loaded, _ = pretrain_encoder(made, pretrain=arm != RANDOM)
                found = finetuned_accuracy(loaded, given, seed, steps=tuned)
                bench.record(arm, seed, found)
    measures = tuple(bench.measure(name, chance=0.5, tests=count) for name, count in tests.items())
    read = [arm for arm in ARMS if arm != RANDOM]
    pairs = [*((arm, RANDOM) for arm in read), *((arm, read[0]) for arm in read[1:])]
    about = (
        f"{told}. Reading takes {steps:,} steps of the same number of tokens for each objective, fine-tuning {tuned}; "
        "the shape, the draw of the weights and the labelled texts are the same."
    )
    figure = charts.dot_plot(measures, tuple(ARMS), "Reading first, and by which objective", "accuracy")
    return StudyResult(measures=measures, verdicts=compare_arms(measures[-1:], pairs), figure=figure, about=about)
