"""The study `norm`: pre-norm against post-norm, and layer norm against batch norm, with and without warmup.

Post-norm is known to need warmup, pre-norm not (Xiong et al. 2020). Batch norm is known to be worse than layer norm for
text, since batches of text differ more from each other (Shen et al. 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from heedful.checkpoint import ModelBundle
from heedful.model.config import Learned
from heedful.runs.statistics import seed_count
from heedful.study import charts
from heedful.study.build import (
    accuracy_by_part,
    classification_task,
    labelled_examples,
    train_classifier,
    transformer_classifier,
    word_level_tokenizer,
)
from heedful.study.layers import replace_layer_norms
from heedful.study.limits import MAX_LENGTH
from heedful.study.runner import Recorder, StudyConfig, StudyResult, compare_arms
from heedful.study.toy.order import LABELS, texts
from heedful.study.toy.split import Sizes
from heedful.tokenizer import Tokenizer
from heedful.train.settings import Constant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PRE, POST, PRE_BATCH, POST_BATCH = "pre, layer", "post, layer", "pre, batch", "post, batch"
ARMS = (PRE, POST, PRE_BATCH, POST_BATCH)
HEADING = "Pre-norm and post-norm, layer norm and batch norm"  # title of the plots
WARMUPS = {"with warm-up": 0.2, "without": 0.0}  # warmup as a share of the steps, by name of the measure
SMOOTHING = 10  # number of steps whose losses are averaged to a point of a learning curve


def build_model(arm: str, tokenizer: Tokenizer, seed: int, layers: int) -> ModelBundle:
    """Return a Transformer classifier with the kind and the place of norms of an arm."""
    loaded = transformer_classifier(
        tokenizer,
        LABELS,
        seed,
        positions=Learned(count=MAX_LENGTH),
        layers=layers,
        pre_norm=arm in (PRE, PRE_BATCH),
    )
    if arm in (PRE_BATCH, POST_BATCH):
        replace_layer_norms(loaded.model)
    return loaded


def run(config: StudyConfig) -> StudyResult:
    """Train each arm on the toy texts, with and without warmup."""
    sizes = Sizes(train=config.by_scale(4000, 64), dev=0, test=config.by_scale(800, 32))
    steps, layers, lr = config.by_scale(250, 2), config.by_scale(6, 2), 2e-3
    recorder = Recorder(config)
    for seed in config.seeds:
        data = texts(sizes, seed)
        train = labelled_examples((row.text, row.label) for row in data["train"])
        test = labelled_examples((row.text, row.label) for row in data["test"])
        tokenizer = word_level_tokenizer(example.text for example in train)
        for arm in recorder.missing_arms(ARMS, seed):
            accuracies: dict[str, float] = {}  # by measure: with and without warmup
            losses: dict[str, list[float]] = {}  # loss of each step, by measure
            for name, warmup_ratio in WARMUPS.items():
                loaded = build_model(arm, tokenizer, seed, layers)
                task = classification_task(tokenizer, LABELS, loaded)
                losses[name] = train_classifier(
                    loaded,
                    task,
                    task.encode_split(train).samples,
                    steps=steps,
                    seed=seed,
                    lr=lr,
                    schedule=Constant(warmup_ratio=warmup_ratio),
                )
                accuracies[name] = accuracy_by_part(loaded, task, test)["all"]
            recorder.record(arm, seed, accuracies, losses)
    measures = tuple(recorder.measure(name, chance=0.5, tests=sizes.test) for name in WARMUPS)
    about = (
        f"The toy texts, {sizes.train:,} of them, in a Transformer of {layers} layers and width 64; {steps} steps of "
        f"32 texts with learning rate {lr:g}, reached after a warmup of the first fifth of the steps or at once, and "
        f"constant. Accuracy on {sizes.test:,} other texts, all four parts."
    )
    curves = {name: recorder.mean_curves(name) for name in WARMUPS}  # loss of each step, by measure and arm
    losses_by_arm = {
        f"{arm}, {name}": [round(loss, 4) for loss in curve]
        for name, by_arm in curves.items()
        for arm, curve in by_arm.items()
    }
    return StudyResult(
        measures=measures,
        verdicts=compare_arms(measures, [(PRE, POST), (PRE, PRE_BATCH), (POST, POST_BATCH)]),
        figure=charts.dot_plot(measures, ARMS, HEADING, "accuracy"),
        about=about,
        facts={"loss": losses_by_arm},
        extra_figures={"curves": _plot_curves(curves, len(config.seeds))},
    )


def _plot_curves(curves: Mapping[str, Mapping[str, Sequence[float]]], num_seeds: int) -> Figure:
    """Plot the training losses with a panel for each measure.

    Args:
        curves: Loss of each step, averaged over seeds, by measure and arm.
        num_seeds: Number of seeds.
    """
    panels = [
        charts.Panel(
            x_label=f"steps, {name}",
            y_label="loss",
            lines=tuple(charts.Line(name=arm, points=charts.smooth(by_arm[arm], SMOOTHING)) for arm in ARMS),
        )
        for name, by_arm in curves.items()
    ]
    subtitle = f"training loss, mean of {seed_count(num_seeds)} and of {SMOOTHING} steps; 0.69 is a guess"
    return charts.line_plot(panels, HEADING, subtitle)
