"""Bag of words against attention against a Transformer, where order and negation decide the class."""

from __future__ import annotations

from pathlib import Path

from heedful.checkpoint import Loaded
from heedful.data import DataSettings, Labelled, read
from heedful.errors import HeedfulError
from heedful.model.classic_config import Attention, Bag, Recurrent
from heedful.model.config import Learned
from heedful.study import charts
from heedful.study.build import (
    accuracy_by_part,
    classic_classifier,
    classification_task,
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
PAIRS = ((TRANSFORMER, BAG), (TRANSFORMER, NO_POSITIONS), (TRANSFORMER, GRU_ATTENTION))
LONGEST = 64
TURNING_WORDS = ("but", "not", "n't", "never", "no", "nothing", "hardly")  # words by which real texts are parted
SST2 = ("tasks", "glue", "SST-2")  # where it is in a folder of data sets


def build_model(arm: str, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> Loaded:
    """One arm; all have vectors of one width."""
    match arm:
        case "bag of words":
            return classic_classifier(tokenizer, labels, seed, Bag())
        case "attention, a trained query":
            return classic_classifier(tokenizer, labels, seed, Attention(keys="tanh"))
        case "the same over a GRU":
            return classic_classifier(
                tokenizer, labels, seed, Attention(keys="tanh", over=Recurrent(cell="gru", width=32))
            )
        case "Transformer, no positions":
            return transformer_classifier(tokenizer, labels, seed)
    return transformer_classifier(tokenizer, labels, seed, positions=Learned(count=LONGEST))


def run(plan: StudyConfig) -> StudyResult:
    """Each arm learns from the same texts in the same order; each part of the test set is measured apart."""
    return _real(plan, plan.real_data) if plan.real_data else _toy(plan)


def _toy(plan: StudyConfig) -> StudyResult:
    sizes = Sizes(train=plan.by_scale(4000, 64), dev=0, test=plan.by_scale(1600, 32))
    steps = plan.by_scale(500, 3)
    bench = Recorder(plan)
    for seed in plan.seeds:
        data = texts(sizes, seed)
        train = [Labelled(text=each.text, label=each.label) for each in data["train"]]
        tokenizer = word_level_tokenizer(each.text for each in train)
        parts = {each.text: each.part for each in data["test"]}
        test = [Labelled(text=each.text, label=each.label) for each in data["test"]]
        for arm in bench.missing_arms(ARMS, seed):
            loaded = build_model(arm, tokenizer, LABELS, seed)
            task = classification_task(tokenizer, LABELS, loaded)
            train_classifier(loaded, task, task.read(train).samples, steps=steps, seed=seed)
            found = accuracy_by_part(loaded, task, test, lambda example, parts=parts: parts[example.text])  # type: ignore[misc]
            bench.record(arm, seed, {name: found[name] for name in PARTS})
    measures = tuple(bench.measure(name, chance=0.5, tests=sizes.test // len(PARTS)) for name in PARTS)
    verdicts = compare_arms([each for each in measures if each.name in HARD], PAIRS)
    about = (
        f"The toy texts: {sizes.train:,} to learn from, {sizes.test:,} to be tested on, a fourth of each part. Twins "
        f"have the same words and opposite classes, so a bag of words is at 50 % on all parts but the first by "
        f"construction. {steps} steps of 32 texts; accuracy on each part."
    )
    figure = charts.dot_plot(measures, ARMS, "What a bag of words cannot tell: order and negation", "accuracy")
    return StudyResult(measures=measures, verdicts=verdicts, figure=figure, about=about)


# -- real texts ------------------------------------------------------------------------------------------------------


def _real(plan: StudyConfig, data: Path) -> StudyResult:
    place = data.joinpath(*SST2)
    place = place if place.is_dir() else data
    source = read(place, Labelled, DataSettings())
    if source.made_dev and "test" in source.splits:
        source = read(place, Labelled, DataSettings(dev_fraction=0.0))
    measured = "dev" if "dev" in source.splits else "test"
    if not {"train", measured} <= set(source.splits):
        raise HeedfulError(f"{data} has the splits {', '.join(source.splits)}; train, and dev or test, are needed")
    train, dev = (list(source.examples(split)) for split in ("train", measured))
    tokenizer, labels = word_level_tokenizer(each.text for each in train), source.labels
    limit = max(len(ids) for ids in tokenizer.ids([each.text for each in (*train, *dev)]))
    bench, steps = Recorder(plan), max(1, 2 * len(train) // 64)
    for seed in plan.seeds:
        for arm in bench.missing_arms(ARMS, seed):
            loaded = build_model(arm, tokenizer, labels, seed)
            if arm == TRANSFORMER:
                loaded = transformer_classifier(tokenizer, labels, seed, positions=Learned(count=limit))
            task = classification_task(tokenizer, labels, loaded)
            train_classifier(loaded, task, task.read(train).samples, steps=steps, seed=seed, lr=1e-3, batch_size=64)
            found = accuracy_by_part(loaded, task, dev, negation_part)
            bench.record(arm, seed, found)
    count = sum(negation_part(each) == "turned" for each in dev)
    parts = {"all": len(dev), "turned": count, "plain": len(dev) - count}
    tests = {name: number for name, number in parts.items() if number}
    measures = tuple(bench.measure(name, tests=number) for name, number in tests.items())
    verdicts = compare_arms([each for each in measures if each.name != "plain"], PAIRS)
    about = (
        f"{len(train):,} labelled texts, twice; accuracy on {len(dev):,} others, of which {count:,} are turned: they "
        f"have one of the words {', '.join(TURNING_WORDS)}."
    )
    figure = charts.dot_plot(measures, ARMS, "Real texts: with and without a word that turns them", "accuracy")
    return StudyResult(measures=measures, verdicts=verdicts, figure=figure, about=about)


def negation_part(example: Labelled) -> str:
    """Whether a text has one of those words, whatever stands right before or behind it."""
    text = example.text.lower().replace("’", "'")
    return "turned" if "n't" in text or not count_words([text]).keys().isdisjoint(TURNING_WORDS) else "plain"
