"""Pre- against post-norm, and layer against batch norm, with and without a warm-up of the rate.

Post-norm is said to need the warm-up and pre-norm not (Xiong et al. 2020); batch norm to be worse for text, whose
batches differ more from each other (Shen et al. 2020).
"""

from __future__ import annotations

from heedful.checkpoint import Loaded
from heedful.data import Labelled
from heedful.model.config import Learned
from heedful.runs.statistics import seed_count
from heedful.study import charts
from heedful.study.build import (
    accuracy_by_part,
    classification_task,
    train_classifier,
    transformer_classifier,
    word_level_tokenizer,
)
from heedful.study.layers import replace_layer_norms
from heedful.study.limits import LONGEST
from heedful.study.runner import Recorder, StudyConfig, StudyResult, compare_arms
from heedful.study.toy.order import LABELS, texts
from heedful.study.toy.split import Sizes
from heedful.tokenizer import Tokenizer
from heedful.train.settings import Constant

PRE, POST, PRE_BATCH, POST_BATCH = "pre, layer", "post, layer", "pre, batch", "post, batch"
ARMS = (PRE, POST, PRE_BATCH, POST_BATCH)
WARMUPS = {"with warm-up": 0.2, "without": 0.0}
SMOOTH = 10  # steps that a point of the curve is the mean of


def build_model(arm: str, tokenizer: Tokenizer, seed: int, layers: int) -> Loaded:
    """A Transformer with norms of that kind."""
    loaded = transformer_classifier(
        tokenizer, LABELS, seed, positions=Learned(count=LONGEST), layers=layers, pre_norm=arm in (PRE, PRE_BATCH)
    )
    if arm in (PRE_BATCH, POST_BATCH):
        replace_layer_norms(loaded.model)
    return loaded


def run(plan: StudyConfig) -> StudyResult:
    """Each arm learns the toy texts, with two schedules."""
    sizes = Sizes(train=plan.by_scale(4000, 64), dev=0, test=plan.by_scale(800, 32))
    steps, layers, rate = plan.by_scale(250, 2), plan.by_scale(6, 2), 2e-3
    bench = Recorder(plan)
    for seed in plan.seeds:
        data = texts(sizes, seed)
        train, test = ([Labelled(text=x.text, label=x.label) for x in data[split]] for split in ("train", "test"))
        tokenizer = word_level_tokenizer(each.text for each in train)
        for arm in bench.missing_arms(ARMS, seed):
            found, losses = dict[str, float](), dict[str, list[float]]()
            for name, warmup in WARMUPS.items():
                loaded = build_model(arm, tokenizer, seed, layers)
                task = classification_task(tokenizer, LABELS, loaded)
                losses[name] = train_classifier(
                    loaded, task, task.read(train).samples, steps=steps, seed=seed, lr=rate,
                    schedule=Constant(warmup_ratio=warmup),
                )  # fmt: skip
                found[name] = accuracy_by_part(loaded, task, test)["all"]
            bench.record(arm, seed, found, losses)
    measures = tuple(bench.measure(name, chance=0.5, tests=sizes.test) for name in WARMUPS)
    pairs = [(PRE, POST), (PRE, PRE_BATCH), (POST, POST_BATCH)]
    verdicts = compare_arms(measures, pairs)
    about = (
        f"The toy texts, {sizes.train:,} of them, in a Transformer of {layers} layers, 64 wide; {steps} steps of 32 "
        f"texts at a rate of {rate:g}, reached over the first fifth of them or from the first step on, and kept. "
        f"Accuracy on {sizes.test:,} other texts, all four parts."
    )
    curves = {name: bench.mean_curves(name) for name in WARMUPS}
    panels = [
        charts.Panel(
            x_label=f"steps, {name}",
            y_label="loss",
            lines=tuple(charts.Line(name=arm, points=charts.smooth(curves[name][arm], SMOOTH)) for arm in ARMS),
        )
        for name in WARMUPS
    ]
    curve = charts.line_plot(
        panels,
        "Where norms stand, and over what they go",
        f"training loss, mean of {seed_count(len(plan.seeds))} and of {SMOOTH} steps; 0.69 is a guess",
    )
    figure = charts.dot_plot(measures, ARMS, "Where norms stand, and over what they go", "accuracy")
    facts = {
        "loss": {
            f"{arm}, {name}": [round(x, 4) for x in curve]
            for name, each in curves.items()
            for arm, curve in each.items()
        }
    }
    return StudyResult(
        measures=measures, verdicts=verdicts, figure=figure, about=about, facts=facts, extra_figures={"curves": curve}
    )
