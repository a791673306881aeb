"""Bag of words against attention against a Transformer, where order and negation decide the class."""

from __future__ import annotations

from pathlib import Path

from heedful.checkpoint import Loaded
from heedful.data import DataSettings, Labelled, read
from heedful.errors import HeedfulError
from heedful.model.classic_config import Attention, Bag, Recurrent
from heedful.model.config import Learned
from heedful.study import charts
from heedful.study.frame import Bench, Outcome, Plan, compared
from heedful.study.making import accuracy, classic, classify, encoder, learn, words
from heedful.study.toy.order import HARD, LABELS, PARTS, texts
from heedful.study.toy.split import Sizes
from heedful.tokenizer import Tokenizer
from heedful.tokenizer.words import count_words

BAG, QUERY, READ = "bag of words", "attention, a trained query", "the same over a GRU"
LOST, WHOLE = "Transformer, no positions", "Transformer"
ARMS = (BAG, QUERY, READ, LOST, WHOLE)
PAIRS = ((WHOLE, BAG), (WHOLE, LOST), (WHOLE, READ))
LONGEST = 64
TURNS = ("but", "not", "n't", "never", "no", "nothing", "hardly")  # words by which real texts are parted
SST2 = ("tasks", "glue", "SST-2")  # where it is in a folder of data sets


def model(arm: str, tokenizer: Tokenizer, labels: tuple[str, ...], seed: int) -> Loaded:
    """One arm; all have vectors of one width."""
    match arm:
        case "bag of words":
            return classic(tokenizer, labels, seed, Bag())
        case "attention, a trained query":
            return classic(tokenizer, labels, seed, Attention(keys="tanh"))
        case "the same over a GRU":
            return classic(tokenizer, labels, seed, Attention(keys="tanh", over=Recurrent(cell="gru", width=32)))
        case "Transformer, no positions":
            return encoder(tokenizer, labels, seed)
    return encoder(tokenizer, labels, seed, positions=Learned(count=LONGEST))


def run(plan: Plan) -> Outcome:
    """Each arm learns from the same texts in the same order; each part of the test set is measured apart."""
    return _real(plan, plan.real) if plan.real else _toy(plan)


def _toy(plan: Plan) -> Outcome:
    sizes = Sizes(train=plan.pick(4000, 64), dev=0, test=plan.pick(1600, 32))
    steps = plan.pick(500, 3)
    bench = Bench(plan)
    for seed in plan.seeds:
        data = texts(sizes, seed)
        train = [Labelled(text=each.text, label=each.label) for each in data["train"]]
        tokenizer = words(each.text for each in train)
        parts = {each.text: each.part for each in data["test"]}
        test = [Labelled(text=each.text, label=each.label) for each in data["test"]]
        for arm in bench.left(ARMS, seed):
            loaded = model(arm, tokenizer, LABELS, seed)
            task = classify(tokenizer, LABELS, loaded)
            learn(loaded, task, task.read(train).samples, steps=steps, seed=seed)
            found = accuracy(loaded, task, test, lambda example, parts=parts: parts[example.text])  # type: ignore[misc]
            bench.note(arm, seed, {name: found[name] for name in PARTS})
    measures = tuple(bench.measure(name, chance=0.5, tests=sizes.test // len(PARTS)) for name in PARTS)
    verdicts = compared([each for each in measures if each.name in HARD], PAIRS)
    about = (
        f"The toy texts: {sizes.train:,} to learn from, {sizes.test:,} to be tested on, a fourth of each part. Twins "
        f"have the same words and opposite classes, so a bag of words is at 50 % on all parts but the first by "
        f"construction. {steps} steps of 32 texts; accuracy on each part."
    )
    figure = charts.dots(measures, ARMS, "What a bag of words cannot tell: order and negation", "accuracy")
    return Outcome(measures=measures, verdicts=verdicts, figure=figure, about=about)


# -- real texts ------------------------------------------------------------------------------------------------------


def _real(plan: Plan, data: Path) -> Outcome:
    place = data.joinpath(*SST2)
    place = place if place.is_dir() else data
    source = read(place, Labelled, DataSettings())
    if source.made_dev and "test" in source.splits:
        source = read(place, Labelled, DataSettings(dev_fraction=0.0))
    measured = "dev" if "dev" in source.splits else "test"
    if not {"train", measured} <= set(source.splits):
        raise HeedfulError(f"{data} has the splits {', '.join(source.splits)}; train, and dev or test, are needed")
    train, dev = (list(source.examples(split)) for split in ("train", measured))
    tokenizer, labels = words(each.text for each in train), source.labels
    limit = max(len(ids) for ids in tokenizer.ids([each.text for each in (*train, *dev)]))
    bench, steps = Bench(plan), max(1, 2 * len(train) // 64)
    for seed in plan.seeds:
        for arm in bench.left(ARMS, seed):
            loaded = model(arm, tokenizer, labels, seed)
            if arm == WHOLE:
                loaded = encoder(tokenizer, labels, seed, positions=Learned(count=limit))
            task = classify(tokenizer, labels, loaded)
            learn(loaded, task, task.read(train).samples, steps=steps, seed=seed, rate=1e-3, batch=64)
            found = accuracy(loaded, task, dev, turned)
            bench.note(arm, seed, found)
    count = sum(turned(each) == "turned" for each in dev)
    parts = {"all": len(dev), "turned": count, "plain": len(dev) - count}
    tests = {name: number for name, number in parts.items() if number}
    measures = tuple(bench.measure(name, tests=number) for name, number in tests.items())
    verdicts = compared([each for each in measures if each.name != "plain"], PAIRS)
    about = (
        f"{len(train):,} labelled texts, twice; accuracy on {len(dev):,} others, of which {count:,} are turned: they "
        f"have one of the words {', '.join(TURNS)}."
    )
    figure = charts.dots(measures, ARMS, "Real texts: with and without a word that turns them", "accuracy")
    return Outcome(measures=measures, verdicts=verdicts, figure=figure, about=about)


def turned(example: Labelled) -> str:
    """Whether a text has one of those words, whatever stands right before or behind it."""
    text = example.text.lower().replace("’", "'")
    return "turned" if "n't" in text or not count_words([text]).keys().isdisjoint(TURNS) else "plain"
