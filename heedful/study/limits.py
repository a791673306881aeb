"""The study `limits`: which models learn texts whose class depends on word order and negation?

A bag of words, attention pooling, and a Transformer are compared, on toy texts or on SST-2.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from heedful.checkpoint import ModelBundle
from heedful.data import DataSettings, LabelledExample, read
from heedful.errors import DataError
from heedful.model.classic_config import AttentionPooling, BagPooling, Recurrent
from heedful.model.config import Learned
from heedful.study import charts
from heedful.study.build import (
    accuracy_by_part,
    classic_classifier,
    classification_task,
    labelled_examples,
    train_classifier,
    transformer_classifier,
    word_level_tokenizer,
)
from heedful.study.runner import Recorder, StudyConfig, StudyResult, compare_arms
from heedful.study.toy.order import HARD, LABELS, PARTS, texts
from heedful.study.toy.split import Sizes
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.words import count_words

BAG = "bag of words"
ATTENTION = "attention, a trained query"
GRU_ATTENTION = "the same over a GRU"
NO_POSITIONS = "Transformer, no positions"
TRANSFORMER = "Transformer"
ARMS = (BAG, ATTENTION, GRU_ATTENTION, NO_POSITIONS, TRANSFORMER)
PAIRS = ((TRANSFORMER, BAG), (TRANSFORMER, NO_POSITIONS), (TRANSFORMER, GRU_ATTENTION))  # arms that are compared
MAX_LENGTH = 64  # maximum words of a toy text
# words that often turn the opinion of a text: a text with one of them is in the part "turned", others are in "plain"
TURNING_WORDS = ("but", "not", "n't", "never", "no", "nothing", "hardly")
SST2 = ("tasks", "glue", "SST-2")  # path of SST-2 in a folder of data sets


def build_model(
    arm: str, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int, max_length: int = MAX_LENGTH
) -> ModelBundle:
    """Return the model of an arm. All models have the same hidden size.

    Args:
        arm: One of `ARMS`.
        tokenizer: The tokenizer.
        labels: Names of the classes.
        seed: Random seed of the weights.
        max_length: Number of positions of the Transformer.
    """
    match arm:
        case "bag of words":
            return classic_classifier(tokenizer, labels, seed, BagPooling())
        case "attention, a trained query":
            return classic_classifier(tokenizer, labels, seed, AttentionPooling(keys="tanh"))
        case "the same over a GRU":
            reader = AttentionPooling(keys="tanh", over=Recurrent(cell="gru", width=32))
            return classic_classifier(tokenizer, labels, seed, reader)
        case "Transformer, no positions":
            return transformer_classifier(tokenizer, labels, seed)
    return transformer_classifier(tokenizer, labels, seed, positions=Learned(count=max_length))


def run(config: StudyConfig) -> StudyResult:
    """Train each arm on the same texts in the same order, and evaluate each part of the test set."""
    return _run_real(config, config.real_data) if config.real_data else _run_toy(config)


def _run_toy(config: StudyConfig) -> StudyResult:
    """Run the study on toy texts."""
    sizes = Sizes(train=config.by_scale(4000, 64), dev=0, test=config.by_scale(1600, 32))
    steps = config.by_scale(500, 3)
    recorder = Recorder(config)
    for seed in config.seeds:
        data = texts(sizes, seed)
        train = labelled_examples((row.text, row.label) for row in data["train"])
        test = labelled_examples((row.text, row.label) for row in data["test"])
        tokenizer = word_level_tokenizer(example.text for example in train)
        part_of_text = {row.text: row.part for row in data["test"]}
        for arm in recorder.missing_arms(ARMS, seed):
            loaded = build_model(arm, tokenizer, LABELS, seed)
            task = classification_task(tokenizer, LABELS, loaded)
            train_classifier(loaded, task, task.encode_split(train).samples, steps=steps, seed=seed)
            accuracies = accuracy_by_part(loaded, task, test, partial(_toy_part, part_of_text))
            recorder.record(arm, seed, {name: accuracies[name] for name in PARTS})
    measures = tuple(recorder.measure(name, chance=0.5, tests=sizes.test // len(PARTS)) for name in PARTS)
    verdicts = compare_arms([measure for measure in measures if measure.name in HARD], PAIRS)
    about = (
        f"The toy texts: {sizes.train:,} for training, {sizes.test:,} for testing, a fourth of each part. Twins have "
        f"the same words and opposite classes, so a bag of words is at 50 % on all parts but the first by "
        f"construction. {steps} steps of 32 texts; accuracy on each part."
    )
    figure = charts.dot_plot(measures, ARMS, "What a bag of words misses: order and negation", "accuracy")
    return StudyResult(measures=measures, verdicts=verdicts, figure=figure, about=about)


def _toy_part(part_of_text: Mapping[str, str], example: LabelledExample) -> str:
    """Return the part of the toy texts to which an example belongs."""
    return part_of_text[example.text]


# -- real texts ------------------------------------------------------------------------------------------------------


def _run_real(config: StudyConfig, data: Path) -> StudyResult:
    """Run the study on real texts.

    Args:
        config: How the study is run.
        data: A folder of data sets that has SST-2, or a folder with the files of one data set.

    Raises:
        DataError: If the data has no training split, or neither a dev nor a test split.
    """
    folder = data.joinpath(*SST2)
    folder = folder if folder.is_dir() else data
    dataset = read(folder, LabelledExample, DataSettings())
    if dataset.has_generated_dev and "test" in dataset.splits:
        dataset = read(folder, LabelledExample, DataSettings(dev_fraction=0.0))
    test_split = "dev" if "dev" in dataset.splits else "test"
    if not {"train", test_split} <= set(dataset.splits):
        raise DataError(f"{data} has the splits {', '.join(dataset.splits)}: give train, and dev or test")
    train = list(dataset.examples("train"))
    test = list(dataset.examples(test_split))
    labels = dataset.labels
    tokenizer = word_level_tokenizer(example.text for example in train)
    max_length = max(len(ids) for ids in tokenizer.ids([example.text for example in (*train, *test)]))
    steps = max(1, 2 * len(train) // 64)  # two epochs
    recorder = Recorder(config)
    for seed in config.seeds:
        for arm in recorder.missing_arms(ARMS, seed):
            loaded = build_model(arm, tokenizer, labels, seed, max_length)
            task = classification_task(tokenizer, labels, loaded)
            samples = task.encode_split(train).samples
            train_classifier(loaded, task, samples, steps=steps, seed=seed, lr=1e-3, batch_size=64)
            recorder.record(arm, seed, accuracy_by_part(loaded, task, test, negation_part))
    num_turned = sum(negation_part(example) == "turned" for example in test)
    part_sizes = {"all": len(test), "turned": num_turned, "plain": len(test) - num_turned}
    measures = tuple(recorder.measure(part, tests=size) for part, size in part_sizes.items() if size)
    verdicts = compare_arms([measure for measure in measures if measure.name != "plain"], PAIRS)
    about = (
        f"{len(train):,} labelled texts, two epochs; accuracy on {len(test):,} others; {num_turned:,} are turned: "
        f"they have one of the words {', '.join(TURNING_WORDS)}."
    )
    figure = charts.dot_plot(measures, ARMS, "Real texts: with and without a word that turns them", "accuracy")
    return StudyResult(measures=measures, verdicts=verdicts, figure=figure, about=about)


def negation_part(example: LabelledExample) -> str:
    """Return "turned" if a text has one of `TURNING_WORDS`, with or without punctuation around it, else "plain"."""
    text = example.text.lower().replace("’", "'")
    words = count_words([text]).keys()
    return "turned" if "n't" in text or not words.isdisjoint(TURNING_WORDS) else "plain"
