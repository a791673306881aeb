"""The teacher of a pre-training run, its caches on disk, and the samples and objectives that use them.

A window is a part of a document: several whole sentences that fit into a sequence. `DistillationBuilder` in
`runs.pretrain.builders` calls this module.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from heedful.atomic_io import atomic_path, make_folder
from heedful.checkpoint import RUN_MODEL, ModelBundle
from heedful.data.corpus.shards import Corpus
from heedful.data.sampler import derive_seed
from heedful.device import resolve_device
from heedful.objectives import Sample
from heedful.objectives.distillation.encoder import EncoderDistillation, new_modules
from heedful.objectives.distillation.encoder_teacher import EncoderTeacher
from heedful.objectives.distillation.vector_cache import VectorCache, nearest_texts
from heedful.objectives.packing import FixedShape, PackedSequences, Ranges
from heedful.objectives.random_numbers import is_text_token
from heedful.objectives.sentence_windows import Neighbours, WindowSettings, plan_windows, sample_texts
from heedful.objectives.special_tokens import SpecialTokenTemplate
from heedful.random_streams import Stream
from heedful.runs.pretrain.specs.distillation import DistillationSettings
from heedful.tokenizer import Tokenizer
from heedful.train.ranks import Ranks
from heedful.train.settings import TrainSettings

FOLDER = "teacher"  # folder in a run folder, with statistics and cached vectors of the teacher
STATISTICS = "statistics.safetensors"  # file in this folder with statistics of the teacher's outputs
STATISTICS_ROWS = 128  # packed rows from which the statistics are estimated
CHUNKS_PER_MESSAGE = 50  # chunks of a cache between two progress messages


class WindowRows(PackedSequences):
    """Packed rows of windows of sentences, and of pairs of windows."""

    windows: Ranges  # range of tokens in the corpus of each window; the targets of a row are indices of windows


@dataclass(frozen=True, kw_only=True)
class TeacherRun:
    """The teacher of a run, with its cached vectors and statistics in the run folder."""

    settings: DistillationSettings
    train: TrainSettings
    loaded: ModelBundle  # the teacher
    tokenizer: Tokenizer  # the student's tokenizer
    folder: Path  # run folder
    init_from: str  # folder of the model or run that training continues from, or "" if weights are random
    shortest: int  # minimum of max_seq_length over all phases, in tokens
    ranks: Ranks
    on_message: Callable[[str], None]  # receives progress messages

    @cached_property
    def teacher(self) -> EncoderTeacher:
        """The teacher in the precision of the training."""
        _ = self._digest  # computes and caches the digest of the weights, which `to` is about to change
        dtype = torch.bfloat16 if self.train.precision == "bfloat16" else torch.float32
        return EncoderTeacher(self.loaded.to(resolve_device(self.train.device), dtype), self.tokenizer)

    @property
    def reads_cached(self) -> bool:
        """Whether the loss reads cached sentence vectors: it needs these, but no hidden states of the teacher."""
        weights = self.settings.term_weights
        return not weights.hidden_states and bool(weights.sentence_embedding or weights.pair_similarity)

    # -- rows -------------------------------------------------------------------------------------------------------

    def rows(
        self,
        corpus: Corpus,
        documents: NDArray[np.int64],
        size: int,
        length: int,
        seed: int,
        shape: FixedShape | None,
        *,
        held_out: bool,
    ) -> WindowRows:
        """Return packed rows of windows, and of pairs of windows, of documents.

        Args:
            corpus: The corpus.
            documents: Indices of documents in the corpus.
            size: Maximum tokens of a packed row.
            length: Maximum tokens of a sequence.
            seed: Random seed of windows and packing.
            shape: The fixed shape of all rows. If None, a row has all sequences that fit.
            held_out: Whether the documents are in the validation split, which has no pairs of nearest neighbours.
        """
        settings = self.settings
        single = SpecialTokenTemplate.of(self.tokenizer, pair=False)
        pair = SpecialTokenTemplate.of(self.tokenizer, pair=True)
        plan = plan_windows(
            corpus,
            documents,
            WindowSettings(
                short_window_prob=settings.short_window_prob,
                max_sentences=settings.max_sentences,
                pair_prob=settings.pair_prob,
            ),
            single=single,
            pair=pair,
            length=length,
            seed=seed,
            neighbours=None if held_out else self._neighbours(corpus, documents, pair.room(self.shortest) // 2),
        )
        rows = WindowRows(corpus, single, plan.ranges, size, seed, plan.targets, shape, pair=pair)
        rows.windows = plan.texts
        return rows

    def _neighbours(self, corpus: Corpus, documents: NDArray[np.int64], max_tokens: int) -> Neighbours | None:
        """Sample texts of at most `max_tokens` tokens, and find for each its nearest neighbour among them.

        Neighbours are near by their sentence vectors of the teacher. The result is cached in the run folder, and is the
        same for all phases. It is None if the settings need no neighbours.
        """
        settings = self.settings
        if not (settings.neighbour_texts and settings.term_weights.pair_similarity):
            return None
        folder = self.folder / FOLDER / "neighbours"
        windows = WindowSettings(max_sentences=settings.max_sentences)
        texts = sample_texts(corpus, documents, settings.neighbour_texts, max_tokens, windows, self.train.seed)
        if len(texts) < 2:
            return None
        cache = self._vector_cache(folder, corpus, texts, "candidate texts for pairs of nearest neighbours")
        path = folder / "nearest.npy"
        if self.ranks.is_main and not path.exists():
            vectors = cache[np.arange(len(texts))].numpy()
            with atomic_path(path) as temporary, temporary.open("wb") as file:
                np.save(file, nearest_texts(vectors, device=resolve_device(self.train.device)))
        self.ranks.barrier()
        return Neighbours(texts=texts, nearest=np.load(path, allow_pickle=False))

    def _vector_cache(self, folder: Path, corpus: Corpus, texts: Ranges, name: str) -> VectorCache:
        """Return a cache with the teacher's vectors of all texts, which the ranks fill together.

        Args:
            folder: The folder of the cache.
            corpus: The corpus.
            texts: Ranges of tokens in the corpus.
            name: A description of the texts for progress messages.
        """
        cache = VectorCache(folder, self.teacher, self._digest, corpus, texts)
        chunks_done = 0

        def report(texts_done: int, count: int) -> None:
            nonlocal chunks_done
            chunks_done += 1
            if chunks_done % CHUNKS_PER_MESSAGE == 0:
                self.on_message(f"the teacher encodes {name}: {texts_done:,} of {count:,}")

        cache.fill(self._is_text_token, rank=self.ranks.rank, size=self.ranks.size, on_progress=report)
        self.ranks.barrier()
        return cache

    @cached_property
    def _digest(self) -> str:
        """Digest of the teacher's weights as they were loaded."""
        return self.loaded.weights_digest()

    @cached_property
    def _is_text_token(self) -> NDArray[np.bool_]:
        """Whether each token of the vocabulary is a token of text and not a special token, [vocabulary]."""
        return is_text_token(np.arange(self.tokenizer.size, dtype=np.int32), self.tokenizer)

    # -- objectives -------------------------------------------------------------------------------------------------

    def objectives(
        self, phases: Sequence[DistillationSettings], samples: Sequence[WindowRows], width: int, count: int | None
    ) -> list[EncoderDistillation]:
        """Return the objective of each phase. All share the teacher and the modules that are trained with the student.

        Args:
            phases: The objective settings of each phase.
            samples: The packed rows of each phase.
            width: Hidden size of the student.
            count: Number of targets to which each row is filled up with targets of weight 0. If None, rows are not
                filled up.
        """
        self._load_statistics(samples[0])
        modules = new_modules(width, self.teacher.hidden_size, derive_seed(self.train.seed, Stream.EXTRA_MODULES))
        return [
            self._objective(phase, rows, modules, count, f"phase-{index}")
            for index, (phase, rows) in enumerate(zip(phases, samples, strict=True))
        ]

    def _objective(
        self, phase: DistillationSettings, rows: WindowRows, modules: torch.nn.ModuleDict, count: int | None, name: str
    ) -> EncoderDistillation:
        """Return the objective of a phase. See `objectives`; `name` is that of the folder of the phase's cache."""
        weights = phase.term_weights
        vectors = None
        if replace(self, settings=phase).reads_cached:
            vectors = self._vector_cache(self.folder / FOLDER / name, rows.corpus, rows.windows, f"windows ({name})")
        return EncoderDistillation(
            tokenizer=self.tokenizer,
            teacher=self.teacher,
            modules=modules,
            weight_by_term={term: getattr(weights, term) for term in weights.names},
            masked_sequence_prob=phase.masked_sequence_prob,
            vectors=vectors,
            mask_prob=phase.mask_prob,
            mask_unit=phase.mask_unit,
            target_count=count,
        )

    def _load_statistics(self, rows: Sequence[Sample]) -> None:
        """Load statistics of the teacher's outputs, such as their mean and their principal components.

        If they are missing, the first rank estimates them from the first packed rows, and saves them in the run folder,
        so that a resumed run has the same statistics. A run that continues from another run with the same teacher
        copies the statistics of that run, since its model has learned vectors in the basis of those principal
        components.
        """
        path = self.folder / FOLDER / STATISTICS
        owner = {"teacher": self._digest}  # identifies the teacher in the metadata of the file
        if self.ranks.is_main and not path.exists():
            make_folder(path.parent)
            init_from = Path(self.init_from)
            earlier_run = init_from.parent if init_from.name == RUN_MODEL else init_from
            earlier_path = earlier_run / FOLDER / STATISTICS
            if self.init_from and earlier_path.is_file() and _statistics_owner(earlier_path) == owner:
                self.teacher.load_statistics(load_file(earlier_path))
            else:
                first_rows = [rows[index] for index in range(min(STATISTICS_ROWS, len(rows)))]
                self.teacher.estimate_statistics(first_rows, self._is_text_token)
            with atomic_path(path) as temporary:
                save_file(self.teacher.statistics(), temporary, metadata={"about": json.dumps(owner)})
        self.ranks.barrier()
        self.teacher.load_statistics(load_file(path))


def _statistics_owner(path: Path) -> object:
    """Return the entry of a file of statistics that identifies the teacher, or None if it has none."""
    with safe_open(path, framework="pt") as file:
        return json.loads((file.metadata() or {}).get("about", "null"))
