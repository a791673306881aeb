"""Data and training that the studies `pretraining` and `masking` share: a corpus, an encoder, and a small task."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from heedful.checkpoint import ModelBundle, save
from heedful.checkpoint.new_head import with_head
from heedful.data import DataSettings, LabelledExample, read
from heedful.data.bad_rows import RowErrors, Skip
from heedful.data.corpus.build import Corpus, CorpusSettings, build_corpus
from heedful.data.corpus.documents import DocumentReader, list_files
from heedful.errors import DataError
from heedful.families import DEFAULT_FAMILIES
from heedful.model.classic_config import AttentionPooling
from heedful.objectives import SelfSupervised
from heedful.runs.finetune.classic import classic_model
from heedful.runs.finetune.init_settings import ClassicInit
from heedful.runs.pretrain.build import build_model, build_samples, model_to_save
from heedful.runs.pretrain.objective_builder import Components
from heedful.runs.pretrain.settings import PretrainSettings, resolve_pretrain
from heedful.study.build import accuracy_by_part, classification_task, train_classifier
from heedful.study.limits import SST2
from heedful.study.runner import StudyConfig, no_log
from heedful.study.toy.order import LABELS, NEGATIVE, POSITIVE, OrderText, texts
from heedful.study.toy.split import Sizes
from heedful.study.toy.stories import stories
from heedful.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer
from heedful.train.trainer import Trainer

ObjectiveTransform = Callable[[SelfSupervised], SelfSupervised]
CORPUS = ("corpus", "wikipedia-2021.jsonl.xz")  # path of the text for pre-training in a folder of data sets


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PretrainingData:
    """A corpus for pre-training, few labelled texts for fine-tuning, and many labelled texts for evaluation."""

    corpus: Corpus
    tokenizer: Tokenizer
    labels: tuple[str, ...]
    train: Sequence[LabelledExample]  # labelled texts for fine-tuning
    tests: Mapping[str, Sequence[LabelledExample]]  # labelled texts for evaluation: test sets by name
    about: str  # description of the data, without a period at the end


@contextmanager
def pretraining_data(config: StudyConfig, seed: int, train_count: int) -> Iterator[PretrainingData]:
    """Provide toy or real data within a `with` block. The corpus is in a temporary folder, which is removed at its end.

    Args:
        config: How the study is run.
        seed: Random seed of the toy data, or of the choice of real labelled texts.
        train_count: Number of labelled texts for fine-tuning.
    """
    with TemporaryDirectory(prefix="heedful-study-") as temporary:
        folder = Path(temporary)
        if config.real_data:
            yield _real_data(config.real_data, folder, seed, train_count)
        else:
            yield _toy_data(config, folder, seed, train_count)


def _toy_data(config: StudyConfig, folder: Path, seed: int, train_count: int) -> PretrainingData:
    """Return toy stories as corpus, and labelled toy texts.

    The opinion words are divided into two halves. Labelled texts for training have only words of the first half ("known
    words"). One test set has known words too, and the other one has words of the second half ("new words").
    """
    documents = stories(config.by_scale(6000, 120), seed)
    (folder / "stories.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")
    tokenizer = train_tokenizer(documents, TokenizerSettings(vocab_size=400, max_length=64))
    # sample more texts than needed, since only 5 of 16 texts have opinion words of one half only
    num_sampled, test_size = config.by_scale((2400, 600), (320, 40))  # of test texts
    data = texts(Sizes(train=8 * train_count, dev=0, test=num_sampled), seed)
    known = {*POSITIVE[:5], *NEGATIVE[:5]}
    new = {*POSITIVE[5:], *NEGATIVE[5:]}
    tests = {
        "known words": _select(data["test"], known, new)[:test_size],
        "new words": _select(data["test"], new, known)[:test_size],
    }
    train = _select(data["train"], known, new)[:train_count]
    settings = CorpusSettings(sample_by="paragraph")
    corpus = build_corpus([folder / "stories.txt"], tokenizer, folder / "corpus", settings, processes=1)
    known_count, new_count = len(tests["known words"]), len(tests["new words"])
    about = (
        f"Pre-training on {len(documents):,} toy stories; then {len(train)} labelled toy texts, which have half of the "
        f"opinion words; evaluated on {known_count:,} other texts with those words, and on {new_count:,} texts with "
        "the other half, which no labelled text has: without pre-training they can only be guessed"
    )
    return PretrainingData(corpus=corpus, tokenizer=tokenizer, labels=LABELS, train=train, tests=tests, about=about)


def _select(rows: Sequence[OrderText], include: set[str], exclude: set[str]) -> list[LabelledExample]:
    """Return, as examples, the texts that have a word of `include` and no word of `exclude`."""
    examples = []
    for row in rows:
        words = set(row.text.split())
        if include & words and not exclude & words:
            examples.append(LabelledExample(text=row.text, label=row.label))
    return examples


def _real_data(data: Path, folder: Path, seed: int, train_count: int) -> PretrainingData:
    """Return Wikipedia as corpus, and labelled sentences of SST-2.

    The training set has `train_count` consecutive sentences, which begin at an index that depends on the seed.

    Raises:
        DataError: If Wikipedia or SST-2 is missing.
    """
    corpus_file = data.joinpath(*CORPUS)
    task_folder = data.joinpath(*SST2)
    if not corpus_file.is_file() or not task_folder.is_dir():
        raise DataError(f"{data} lacks {'/'.join(CORPUS)} or {'/'.join(SST2)}: give --data a folder that has both")
    dataset = read(task_folder, LabelledExample, DataSettings())
    train = list(dataset.examples("train"))
    dev = list(dataset.examples("dev"))
    start = seed * train_count % max(1, len(train) - train_count)
    reader = DocumentReader([path for path, _ in list_files([corpus_file])[0]], CorpusSettings(), RowErrors(Skip()), [])
    documents = (document for chunk in reader.chunks() for document, _ in chunk or ())
    tokenizer_settings = TokenizerSettings(vocab_size=8000, max_length=128)
    tokenizer = train_tokenizer(list(islice(documents, 4000)), tokenizer_settings)
    corpus = build_corpus([corpus_file], tokenizer, folder / "corpus", CorpusSettings(), processes=1)
    about = (
        f"Pre-training on {len(corpus):,} real documents; then {train_count:,} labelled sentences; evaluated on "
        f"{len(dev):,} others"
    )
    return PretrainingData(
        corpus=corpus,
        tokenizer=tokenizer,
        labels=dataset.labels,
        train=train[start : start + train_count],
        tests={"real sentences": dev},
        about=about,
    )


# -- pre-training ----------------------------------------------------------------------------------------------------


def pretraining_components(data: PretrainingData, objective: str, seed: int, *, steps: int, real: bool) -> Components:
    """Return the components of a pre-training run: settings, tokenizer and corpus.

    The shape of the model and the number of tokens in a step do not depend on the objective.

    Args:
        data: The corpus and its tokenizer.
        objective: Name of the objective.
        seed: Random seed.
        steps: Number of optimizer steps.
        real: Whether the data is real, so that a larger model is trained.
    """
    layers, width, heads, length = (4, 256, 4, 128) if real else (2, 128, 4, 64)
    settings: PretrainSettings = resolve_pretrain(
        ["text"],
        objective=objective,
        assignments=[
            f"model.family={DEFAULT_FAMILIES['mlm']}",
            f"model.layers={layers}",
            f"model.width={width}",
            f"model.heads={heads}",
            f"max_seq_length={length}",
            f"pack_length={8 * length}",
            "eval_fraction=0.1",
        ],
    )
    train = replace(settings.train.with_duration(max_steps=steps), batch_size=2, precision="float32", seed=seed)
    settings = replace(settings, train=train)
    return Components(settings=settings, tokenizer=data.tokenizer, corpus=data.corpus, init_model=None)


def pretrain_encoder(
    components: Components, *, pretrain: bool, transform: ObjectiveTransform = lambda objective: objective
) -> tuple[ModelBundle, list[float]]:
    """Return an encoder, and the loss of each step of its pre-training.

    Args:
        components: Settings, tokenizer and corpus.
        pretrain: Whether to pre-train the encoder. If False, its weights are random.
        transform: Converts the objective of the settings to the objective of the training.
    """
    loaded = build_model(components)
    losses = []
    if pretrain:
        phases = build_samples(components)[0]
        objective = transform(components.builder.objectives(components, loaded, phases)[0])
        losses = [step.loss for step in Trainer(loaded, objective, phases[0], components.settings.train)]
    return model_to_save(loaded, components), losses


def finetuned_accuracy(
    loaded: ModelBundle, data: PretrainingData, seed: int, *, steps: int, lr: float = 1e-3
) -> dict[str, float]:
    """Fine-tune all weights on the labelled texts, and return the accuracy on each test set, by name."""
    return _train_head(loaded, data, seed, steps, lr)


def frozen_accuracy(
    loaded: ModelBundle, data: PretrainingData, seed: int, *, steps: int, lr: float = 5e-3
) -> dict[str, float]:
    """Train attention pooling over the frozen encoder, and return the accuracy on each test set, by name."""
    with TemporaryDirectory(prefix="heedful-study-") as folder:
        save(loaded, Path(folder) / "model")
        settings = ClassicInit(model=str(Path(folder) / "model"), reader=AttentionPooling(keys="tanh"))
        frozen = classic_model(settings, [], seed, no_log)
    return _train_head(frozen, data, seed, steps, lr)


def _train_head(bare: ModelBundle, data: PretrainingData, seed: int, steps: int, lr: float) -> dict[str, float]:
    """Train a model with a new classification head, and return the accuracy on each test set, by name."""
    loaded = with_head(bare, "sequence_classification", labels=data.labels, seed=seed)
    task = classification_task(data.tokenizer, data.labels, loaded)
    train_classifier(loaded, task, task.encode_split(data.train).samples, steps=steps, seed=seed, lr=lr)
    return {name: accuracy_by_part(loaded, task, examples)["all"] for name, examples in data.tests.items()}
