"""Load tokenizer, corpus and models of a pre-training run, for `runs.pretrain.run`.

A missing tokenizer is trained on the text, and a missing corpus is built from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from heedful.checkpoint import ModelBundle, load
from heedful.data.bad_rows import OnBadRow, Quarantine, Raise, RowErrors, Skip
from heedful.data.corpus.build import CorpusProgress, build_corpus, contains_corpus
from heedful.data.corpus.documents import DocumentReader, list_files
from heedful.data.corpus.sentence_split import clean_text
from heedful.data.corpus.shards import Corpus
from heedful.data.sampler import derive_seed
from heedful.errors import DataError, ModelError, RunError, TokenizerError
from heedful.random_streams import Stream
from heedful.runs.pretrain.build import check_model
from heedful.runs.pretrain.objective_builder import Components, builder_of
from heedful.runs.pretrain.probes import ProbeSet
from heedful.runs.pretrain.settings import PretrainSettings
from heedful.runs.run import Run
from heedful.runs.run_folder import BAD_ROWS, CORPUS, DATA, TOKENIZER, read_run_json, write_file
from heedful.tokenizer import Tokenizer, train_tokenizer

MAX_SENTINELS = 100  # maximum sentinel tokens of a tokenizer that is trained for span corruption
PROGRESS_SECONDS = 10.0  # seconds between two progress messages while a corpus is built


def load_components(
    settings: PretrainSettings, run: Run, on_bad_row: OnBadRow, corpus_folder: Path | None = None
) -> Components:
    """Load the components of a run. The first rank creates tokenizer and corpus if they are missing.

    Args:
        settings: The settings of the run.
        run: The run folder, reporter and ranks.
        on_bad_row: "raise", or "skip" to write rows that cannot be read to a file instead.
        corpus_folder: A corpus that another run has built from the same text. If None, the corpus of the run folder.

    Raises:
        HeedfulError: If the models, the tokenizer or the text do not fit the settings or each other.
    """
    init_model = load(settings.model.init_from) if settings.model.init_from else None
    builder = builder_of(settings)
    teacher = builder.load_teacher()
    check_model(settings, init_model)
    tokenizer = _load_tokenizer(settings, run, init_model)
    if init_model is not None and init_model.tokenizer is None:
        vocab_size = init_model.config.model.embedding.vocabulary
        if tokenizer.size > vocab_size:
            raise TokenizerError(
                f"the tokenizer has {tokenizer.size} tokens, but {init_model.source} has embeddings for {vocab_size}: "
                "give the tokenizer of that model"
            )
        init_model.tokenizer = tokenizer.limited(max(settings.lengths))
    builder.check_tokenizer(tokenizer)
    probes = tuple(ProbeSet(probe, tokenizer) for probe in settings.probes)
    corpus = _load_corpus(settings, run, tokenizer, on_bad_row, corpus_folder)
    teacher_run = None if teacher is None else builder.teacher_run(teacher, tokenizer, run)
    return Components(
        settings=settings,
        tokenizer=tokenizer,
        corpus=corpus,
        init_model=init_model,
        teacher=teacher_run,
        probes=probes,
    )


def _finished_corpus(settings: PretrainSettings) -> Corpus | None:
    """Open the corpus that the setting `data` names, or return None if it names files of text."""
    paths = [Path(path) for path in settings.data]
    return Corpus.open(paths[0]) if len(paths) == 1 and contains_corpus(paths[0]) else None


def _load_tokenizer(settings: PretrainSettings, run: Run, init_model: ModelBundle | None) -> Tokenizer:
    """Load the tokenizer of the run.

    It is the first of these that exists: the one that the settings name, that of the model to continue from, that of
    the corpus, and one that is trained on the text.

    Raises:
        TokenizerError: If the settings name another tokenizer than the model's.
        ModelError: If neither the model nor the settings have a tokenizer.
    """
    if settings.tokenizer.path:
        tokenizer = Tokenizer.load(settings.tokenizer.path)
        model_tokenizer = init_model.tokenizer if init_model is not None else None
        if init_model is not None and model_tokenizer and model_tokenizer.fingerprint != tokenizer.fingerprint:
            raise TokenizerError(
                f"--tokenizer is {settings.tokenizer.path}, but {init_model.source} was trained with another "
                "tokenizer, whose ids mean other tokens: leave --tokenizer out"
            )
        return tokenizer
    if init_model is not None:
        if init_model.tokenizer is None:
            raise ModelError(f"{init_model.source} has no tokenizer: give its folder with --tokenizer")
        return init_model.tokenizer
    corpus = _finished_corpus(settings)
    if corpus is not None and (corpus.folder / TOKENIZER).is_dir():
        return Tokenizer.load(corpus.folder / TOKENIZER)
    folder = run.folder / TOKENIZER
    if run.ranks.is_main and not (folder / "tokenizer.json").exists():  # the file that is written last
        _train_tokenizer(settings, run).save(folder)
    run.ranks.barrier()
    return Tokenizer.load(folder)


def _train_tokenizer(settings: PretrainSettings, run: Run) -> Tokenizer:
    """Train a tokenizer on a sample of the run's text."""
    options = replace(settings.tokenizer, max_length=max(settings.lengths))
    if settings.spec.sentinels and not options.num_sentinels:
        options = replace(options, num_sentinels=max(1, min(MAX_SENTINELS, options.vocab_size // 20)))
    run.reporter.message(
        f"training a tokenizer on the text ({options.algorithm}, up to {options.vocab_size:,} tokens); "
        "--tokenizer takes one that exists already"
    )
    files = [path for path, _ in list_files([Path(path) for path in settings.data], run.folder)[0]]
    chunks = DocumentReader(files, settings.corpus, RowErrors(Skip()), []).chunks()
    documents = (document for chunk in chunks for document in chunk or ())
    return train_tokenizer(sample_documents(documents, options.train_chars), options)


def _load_corpus(
    settings: PretrainSettings, run: Run, tokenizer: Tokenizer, on_bad_row: OnBadRow, corpus_folder: Path | None
) -> Corpus:
    """Open the corpus of the run.

    It is the one that the settings name, else that in `corpus_folder`, else one that is built in the run folder.

    Raises:
        DataError: If the corpus was made with another tokenizer.
    """
    corpus = _finished_corpus(settings)
    if corpus is not None:
        if corpus.fingerprint != tokenizer.fingerprint:
            raise DataError(
                f"{corpus.folder} was made with another tokenizer: give that one with --tokenizer, or the files "
                "themselves"
            )
        if run.ranks.is_main:
            _check_same_corpus(corpus, run.folder)
        return corpus
    if corpus_folder is not None:
        return Corpus.open(corpus_folder)
    if run.ranks.is_main:
        build_corpus(
            [Path(path) for path in settings.data],
            tokenizer,
            run.folder / CORPUS,
            settings.corpus,
            on_progress=_corpus_progress(run),
            on_bad_row=Quarantine(file=run.folder / BAD_ROWS) if on_bad_row == "skip" else Raise(),
            exclude=run.folder,
        )
    run.ranks.barrier()
    return Corpus.open(run.folder / CORPUS)


def _check_same_corpus(corpus: Corpus, folder: Path) -> None:
    """Record the digest of the corpus in the folder of a new run, or check that a resumed run has the same corpus.

    Raises:
        RunError: If the run began with another corpus.
    """
    facts = {"stated": list(corpus.about.get("stated", ())), "files": {corpus.folder.name: corpus.digest}}
    if not (folder / DATA).exists():
        write_file(folder / DATA, facts)
    elif read_run_json(folder / DATA) != facts:
        raise RunError(
            f"{corpus.folder} holds another corpus than the one with which {folder} began: put that one back, "
            "or give another folder with --output"
        )


def _corpus_progress(run: Run) -> Callable[[CorpusProgress], None]:
    """Return a callback for `build_corpus` that reports progress, at most once in PROGRESS_SECONDS."""
    last_report = time.monotonic()

    def report(progress: CorpusProgress) -> None:
        nonlocal last_report
        if time.monotonic() - last_report >= PROGRESS_SECONDS:
            last_report = time.monotonic()
            speed = progress.characters / max(progress.seconds, 1e-9) / 1e6
            run.reporter.message(
                f"reading text: {100 * progress.share:.0f} %, {progress.documents:,} documents, "
                f"{progress.tokens:,} tokens, {speed:.1f} MB/s"
            )

    return report


def sample_documents(documents: Iterable[tuple[str, bool]], max_chars: int) -> list[str]:
    """Return a random sample of documents, cleaned, with at most `max_chars` characters but at least one document.

    A document is in the sample if the hash of its index is a multiple of a divisor, which is a power of two. The
    divisor is doubled whenever the sample is too large. So all documents have the same chance, even if they are sorted;
    their number need not be known; and the same documents give the same sample.

    Args:
        documents: (text, whether each of its lines is a sentence) for each document.
        max_chars: Maximum characters of the sample, before cleaning.
    """
    sample: list[tuple[int, str, bool]] = []  # hash of the index, text, whether lines are sentences
    sample_chars = 0
    divisor = 1
    for index, (text, lines_are_sentences) in enumerate(documents):
        key = derive_seed(Stream.TOKENIZER_DOCUMENTS, index)
        if key % divisor:
            continue
        sample.append((key, text, lines_are_sentences))
        sample_chars += len(text)
        while sample_chars > max_chars:
            smaller_sample = [document for document in sample if document[0] % (2 * divisor) == 0]
            if not smaller_sample:
                break
            sample, divisor = smaller_sample, 2 * divisor
            sample_chars = sum(len(text) for _, text, _ in sample)
    cleaned = (clean_text(text, lines=lines_are_sentences) for _, text, lines_are_sentences in sample)
    return [text for text in cleaned if text]
