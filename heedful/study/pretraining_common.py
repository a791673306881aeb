"""What studies of pre-training share: a corpus of stories, an encoder that reads it for so many steps, a small task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from heedful.checkpoint import Loaded, save
from heedful.checkpoint.new_head import attach
from heedful.data import DataSettings, Labelled, read
from heedful.data.bad_rows import LeaveOut, Sieve
from heedful.data.corpus.build import Corpus, CorpusSettings, build
from heedful.data.corpus.documents import Reading, expand
from heedful.errors import HeedfulError
from heedful.families import USUAL
from heedful.model.classic_config import Attention
from heedful.objectives import SelfSupervised
from heedful.runs.finetune.classic import classic_model
from heedful.runs.finetune.init_settings import Classic
from heedful.runs.pretrain.build import Components, build_model, build_objectives, build_samples, model_to_save
from heedful.runs.pretrain.settings import PretrainSettings, resolve_pretrain
from heedful.study.build import accuracy_by_part, classification_task, train_classifier
from heedful.study.limits import SST2
from heedful.study.runner import StudyConfig, no_log
from heedful.study.toy.order import LABELS, NEGATIVE, POSITIVE, Text, texts
from heedful.study.toy.split import Sizes
from heedful.study.toy.stories import stories
from heedful.tokenizer import Tokenizer, TokenizerSettings
from heedful.tokenizer import train as train_tokenizer
from heedful.train.trainer import Trainer

ObjectiveTransform = Callable[[SelfSupervised], SelfSupervised]
CORPUS = ("corpus", "wikipedia-2021.jsonl.xz")  # where text is in a folder of data sets


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PretrainingData:
    """Text to read, and texts with labels: few to learn from, many to be measured on."""

    corpus: Corpus
    tokenizer: Tokenizer
    labels: tuple[str, ...]
    train: Sequence[Labelled]
    tests: Mapping[str, Sequence[Labelled]]
    about: str


@contextmanager
def pretraining_data(plan: StudyConfig, seed: int, few: int) -> Any:
    """The toy world, or a real one; its corpus is on disk as long as it is used."""
    with TemporaryDirectory(prefix="heedful-study-") as temporary:
        yield (
            _real(plan.real_data, Path(temporary), seed, few)
            if plan.real_data
            else _toy(plan, Path(temporary), seed, few)
        )


def _toy(plan: StudyConfig, folder: Path, seed: int, few: int) -> PretrainingData:
    documents = stories(plan.by_scale(6000, 120), seed)
    (folder / "stories.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    tokenizer = train_tokenizer(documents, TokenizerSettings(vocab_size=400, max_length=64))
    drawn, many = plan.by_scale((2400, 600), (320, 40))  # about 5 texts of 16 judge by words of one half alone
    data = texts(Sizes(train=8 * few, dev=0, test=drawn), seed)
    old, new = ({*POSITIVE[half], *NEGATIVE[half]} for half in (slice(0, 5), slice(5, 10)))
    train = _of(data["train"], old, new)[:few]
    known, unknown = _of(data["test"], old, new)[:many], _of(data["test"], new, old)[:many]
    settings = CorpusSettings(sample_by="paragraph")
    corpus = build([folder / "stories.txt"], tokenizer, folder / "corpus", settings, processes=1)
    about = (
        f"{len(documents):,} toy stories are read; then {len(train)} labelled toy texts, which have half of the words "
        f"that judge; measured on {len(known):,} others of those words, and on {len(unknown):,} texts with the other "
        "half, which no labelled text has: without reading they are guessed"
    )
    tests = {"known words": known, "new words": unknown}
    return PretrainingData(corpus=corpus, tokenizer=tokenizer, labels=LABELS, train=train, tests=tests, about=about)


def _of(given: Sequence[Text], some: set[str], others: set[str]) -> list[Labelled]:
    """The texts that have some of those words, and none of the others."""
    found = (each for each in given if some & set(each.text.split()) and not others & set(each.text.split()))
    return [Labelled(text=each.text, label=each.label) for each in found]


def _real(data: Path, folder: Path, seed: int, few: int) -> PretrainingData:
    text, task = data.joinpath(*CORPUS), data.joinpath(*SST2)
    if not text.is_file() or not task.is_dir():
        raise HeedfulError(f"{data} lacks {'/'.join(CORPUS)} or {'/'.join(SST2)}: give --data a folder that has both")
    source = read(task, Labelled, DataSettings())
    train, dev = (list(source.examples(split)) for split in ("train", "dev"))
    start = seed * few % max(1, len(train) - few)
    reading = Reading([path for path, _ in expand([text])[0]], CorpusSettings(), Sieve(LeaveOut()), [])
    some = [each for each, _ in islice((one for chunk in reading.chunks() for one in chunk or ()), 4000)]
    tokenizer = train_tokenizer(some, TokenizerSettings(vocab_size=8000, max_length=128))
    corpus = build([text], tokenizer, folder / "corpus", CorpusSettings(), processes=1)
    about = f"{len(corpus):,} real documents are read; then {few:,} labelled sentences, {len(dev):,} to measure"
    tests = {"real sentences": dev}
    return PretrainingData(
        corpus=corpus,
        tokenizer=tokenizer,
        labels=source.labels,
        train=train[start : start + few],
        tests=tests,
        about=about,
    )


# -- reading ---------------------------------------------------------------------------------------------------------


def pretraining_components(given: PretrainingData, objective: str, seed: int, *, steps: int, full: bool) -> Components:
    """What `heedful pretrain` would be made of: one shape of one family for all objectives, one number of tokens."""
    layers, width, heads, length = (4, 256, 4, 128) if full else (2, 128, 4, 64)
    settings: PretrainSettings = resolve_pretrain(
        ["text"],
        objective=objective,
        assignments=[
            f"model.family={USUAL['mlm']}", f"model.layers={layers}", f"model.width={width}",
            f"model.heads={heads}", f"max_seq_length={length}", f"pack_length={8 * length}",
            "eval_fraction=0.1",
        ],
    )  # fmt: skip
    how = replace(settings.train.lasting(max_steps=steps), batch_size=2, precision="float32", seed=seed)
    settings = replace(settings, train=how)
    return Components(settings=settings, tokenizer=given.tokenizer, corpus=given.corpus, init_model=None)


def pretrain_encoder(
    made: Components, *, pretrain: bool, transform: ObjectiveTransform = lambda objective: objective
) -> tuple[Loaded, list[float]]:
    """The model, after it has read where it does; the loss of each step."""
    loaded, losses = build_model(made), []
    if pretrain:
        rows = build_samples(made)[0]
        samples, objective = rows[0], transform(build_objectives(made, loaded, rows)[0])
        losses = [step.loss for step in Trainer(loaded, objective, samples, made.settings.train)]
    return model_to_save(loaded, made), losses


def finetuned_accuracy(
    loaded: Loaded, given: PretrainingData, seed: int, *, steps: int, rate: float = 1e-3
) -> dict[str, float]:
    """Accuracy on each test after so many steps on the labelled texts."""
    return _learned(attach(loaded, "sequence_classification", labels=given.labels, seed=seed), given, seed, steps, rate)


def frozen_accuracy(
    loaded: Loaded, given: PretrainingData, seed: int, *, steps: int, rate: float = 5e-3
) -> dict[str, float]:
    """The same of an encoder that stays as it is, its rows read by attention with a trained query."""
    with TemporaryDirectory(prefix="heedful-study-") as folder:
        save(loaded, Path(folder) / "model")
        asked = Classic(model=str(Path(folder) / "model"), reader=Attention(keys="tanh"))
        made = classic_model(asked, [], seed, no_log)
    return _learned(attach(made, "sequence_classification", labels=given.labels, seed=seed), given, seed, steps, rate)


def _learned(made: Loaded, given: PretrainingData, seed: int, steps: int, rate: float) -> dict[str, float]:
    task = classification_task(given.tokenizer, given.labels, made)
    train_classifier(made, task, task.read(given.train).samples, steps=steps, seed=seed, lr=rate)
    return {name: accuracy_by_part(made, task, each)["all"] for name, each in given.tests.items()}
