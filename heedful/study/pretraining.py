"""Random weights against weights that read text first, by three objectives on the same number of steps and tokens.

Masked tokens alone (Liu et al. 2019 leave the second term out), with the next sentence (Devlin et al. 2019), or with
the order of two (Lan et al. 2020). What counts is the accuracy on a small labelled task afterwards.
"""

from __future__ import annotations

from heedful.study import charts
from heedful.study.frame import Bench, Outcome, Plan, compared
from heedful.study.reading import fine_tuned, pieces, started, world

RANDOM = "random weights"
ARMS = {
    RANDOM: "mlm",
    "masked tokens": "mlm",
    "masked + next sentence": "mlm+nsp",
    "masked + sentence order": "mlm+sop",
}


def run(plan: Plan) -> Outcome:
    """Each arm starts from the same draw, reads the same stories, and learns from the same labelled texts."""
    few, steps, tuned = plan.pick(300, 16, 1000), plan.pick(1200, 2, 4000), plan.pick(200, 2, 300)
    bench, told, tests = Bench(plan), "", {}
    for seed in plan.seeds:
        with world(plan, seed, few) as given:
            told, tests = given.about, {name: len(each) for name, each in given.tests.items()}
            for arm in bench.left(ARMS, seed):
                made = pieces(given, ARMS[arm], seed, steps=steps, full=plan.real is not None)
                loaded, _ = started(made, reads=arm != RANDOM)
                found = fine_tuned(loaded, given, seed, steps=tuned)
                bench.note(arm, seed, found)
    measures = tuple(bench.measure(name, chance=0.5, tests=count) for name, count in tests.items())
    read = [arm for arm in ARMS if arm != RANDOM]
    pairs = [*((arm, RANDOM) for arm in read), *((arm, read[0]) for arm in read[1:])]
    about = (
        f"{told}. Reading takes {steps:,} steps of the same number of tokens for each objective, fine-tuning {tuned}; "
        "the shape, the draw of the weights and the labelled texts are the same."
    )
    figure = charts.dots(measures, tuple(ARMS), "Reading first, and by which objective", "accuracy")
    return Outcome(measures=measures, verdicts=compared(measures[-1:], pairs), figure=figure, about=about)
