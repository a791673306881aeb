"""Tokenizer, corpus and models of a pre-training run, loaded, or made from its text."""

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

SENTINELS = 100  # sentinel tokens of a tokenizer for span corruption; fewer if its vocabulary is small
PROGRESS_SECONDS = 10.0  # between two reports while a corpus is made


def load_components(
    settings: PretrainSettings, run: Run, on_bad_row: OnBadRow, corpus_folder: Path | None = None
) -> Components:
    """Return what a run trains with. The first rank makes what is missing, and the others then read it.

    Args:
        settings: Of the run.
        run: The run folder, reporter and ranks.
        on_bad_row: "raise", or "skip" to set rows aside that cannot be read.
        corpus_folder: A corpus that another run has made from the same text; None: one in the run folder.

    Raises:
        HeedfulError: If the models, the tokenizer or the text do not fit the settings or each other.
    """
    init_model = load(settings.model.init_from) if settings.model.init_from else None
    builder = builder_of(settings)
    teacher = builder.load_teacher()
    check_model(settings, init_model)
    tokenizer = _tokenizer(settings, run, init_model)
    if init_model is not None and init_model.tokenizer is None:
        if tokenizer.size > (size := init_model.config.model.embedding.vocabulary):
            raise TokenizerError(
                f"the tokenizer has {tokenizer.size} tokens, but {init_model.source} has embeddings for {size}: give "
                "the tokenizer of that model"
            )
        init_model.tokenizer = tokenizer.limited(max(settings.lengths))
    builder.check_tokenizer(tokenizer)
    probes = tuple(ProbeSet(probe, tokenizer) for probe in settings.probes)
    corpus = _corpus(settings, run, tokenizer, on_bad_row, corpus_folder)
    teacher_run = None if teacher is None else builder.teacher_run(teacher, tokenizer, run)
    return Components(
        settings=settings, tokenizer=tokenizer, corpus=corpus, init_model=init_model, teacher=teacher_run, probes=probes
    )


def _finished_corpus(settings: PretrainSettings) -> Corpus | None:
    """The corpus that the data of the settings is; None if they name files of text."""
    paths = [Path(path) for path in settings.data]
    return Corpus.open(paths[0]) if len(paths) == 1 and contains_corpus(paths[0]) else None


def _tokenizer(settings: PretrainSettings, run: Run, init_model: ModelBundle | None) -> Tokenizer:
    """The tokenizer of the settings, the model or the corpus; if none has one, it is trained on the text."""
    if settings.tokenizer.path:
        tokenizer = Tokenizer.load(settings.tokenizer.path)
        known = init_model.tokenizer if init_model is not None else None
        if init_model is not None and known and known.fingerprint != tokenizer.fingerprint:
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
    if run.ranks.is_main and not (folder / "tokenizer.json").exists():  # which is written last
        _train_tokenizer(settings, run).save(folder)
    run.ranks.barrier()
    return Tokenizer.load(folder)


def _train_tokenizer(settings: PretrainSettings, run: Run) -> Tokenizer:
    options = replace(settings.tokenizer, max_length=max(settings.lengths))
    if settings.spec.sentinels and not options.num_sentinels:
        options = replace(options, num_sentinels=max(1, min(SENTINELS, options.vocab_size // 20)))
    run.reporter.message(
        f"training a tokenizer on the text ({options.algorithm}, up to {options.vocab_size:,} tokens); "
        "--tokenizer takes one that is there"
    )
    files = [path for path, _ in list_files([Path(path) for path in settings.data], run.folder)[0]]
    chunks = DocumentReader(files, settings.corpus, RowErrors(Skip()), []).chunks()
    documents = (document for chunk in chunks for document in chunk or ())
    return train_tokenizer(sample_documents(documents, options.train_chars), options)


def _corpus(
    settings: PretrainSettings, run: Run, tokenizer: Tokenizer, on_bad_row: OnBadRow, corpus_folder: Path | None
) -> Corpus:
    """The corpus of the settings, of another run, or of this run, which is made if it is missing."""
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
    """Refuse a corpus other than the one that the run in a folder began with; write down which one it is."""
    about = {"stated": list(corpus.about.get("stated", ())), "files": {corpus.folder.name: corpus.digest}}
    if not (folder / DATA).exists():
        write_file(folder / DATA, about)
    elif read_run_json(folder / DATA) != about:
        raise RunError(
            f"{corpus.folder} holds another corpus than the one with which {folder} began: put that one back, "
            "or give another folder with --output"
        )


def _corpus_progress(run: Run) -> Callable[[CorpusProgress], None]:
    last = time.monotonic()

    def report(progress: CorpusProgress) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            speed = progress.characters / max(progress.seconds, 1e-9) / 1e6
            run.reporter.message(
                f"reading text: {100 * progress.share:.0f} %, {progress.documents:,} documents, "
                f"{progress.tokens:,} tokens, {speed:.1f} MB/s"
            )

    return report


def sample_documents(documents: Iterable[tuple[str, bool]], max_chars: int) -> list[str]:
    """Clean documents of up to `max_chars` characters, at least one, from all over the text, which may be sorted.

    A document stays if a hash of its number is a multiple of a power of two that is doubled whenever the documents are
    too many: each one has the same chance, their number need not be known, and equal texts give an equal sample.

    Args:
        documents: Texts, and whether their line breaks mean something.
        max_chars: Characters of the sample, at most.
    """
    sample: list[tuple[int, str, bool]] = []
    size, every = 0, 1
    for number, (text, lines) in enumerate(documents):
        if (key := derive_seed(Stream.TOKENIZER_DOCUMENTS, number)) % every:
            continue
        sample.append((key, text, lines))
        size += len(text)
        while size > max_chars and (fewer := [document for document in sample if document[0] % (2 * every) == 0]):
            sample, every, size = fewer, 2 * every, sum(len(text) for _, text, _ in fewer)
    return [text for _, raw, lines in sample if (text := clean_text(raw, lines=lines))]
