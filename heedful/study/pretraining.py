"""The study `pretraining`: random weights against pre-training by three objectives, with equal steps and tokens.

The objectives are masked language modelling alone (Liu et al. 2019), with next sentence prediction (Devlin et al. 2019)
and with sentence order prediction (Lan et al. 2020). The measure is the accuracy after fine-tuning on a small labelled
task.
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
ARMS = {  # objective of each arm; RANDOM needs one only to build the same model
    RANDOM: "mlm",
    "masked tokens": "mlm",
    "masked + next sentence": "mlm+nsp",
    "masked + sentence order": "mlm+sop",
}


def run(config: StudyConfig) -> StudyResult:
    """Pre-train each arm from the same random weights on the same stories, and fine-tune on the same texts."""
    train_count, steps, finetuning_steps = config.by_scale((300, 1200, 200), (16, 2, 2), (1000, 4000, 300))
    recorder = Recorder(config)
    about = ""
    test_sizes: dict[str, int] = {}  # number of examples of each test set
    for seed in config.seeds:
        with pretraining_data(config, seed, train_count) as data:
            about = data.about
            test_sizes = {name: len(examples) for name, examples in data.tests.items()}
            for arm in recorder.missing_arms(ARMS, seed):
                is_real = config.real_data is not None
                components = pretraining_components(data, ARMS[arm], seed, steps=steps, real=is_real)
                loaded, _ = pretrain_encoder(components, pretrain=arm != RANDOM)
                recorder.record(arm, seed, finetuned_accuracy(loaded, data, seed, steps=finetuning_steps))
    measures = tuple(recorder.measure(name, chance=0.5, tests=size) for name, size in test_sizes.items())
    first_pretrained, *others = (arm for arm in ARMS if arm != RANDOM)
    pairs = [(arm, RANDOM) for arm in (first_pretrained, *others)]
    pairs += [(arm, first_pretrained) for arm in others]
    about = (
        f"{about}. Pre-training takes {steps:,} steps with the same number of tokens for each objective, fine-tuning "
        f"{finetuning_steps}; the model, its initial weights and the labelled texts are the same."
    )
    figure = charts.dot_plot(measures, tuple(ARMS), "Pre-training, by objective", "accuracy")
    return StudyResult(measures=measures, verdicts=compare_arms(measures[-1:], pairs), figure=figure, about=about)
