"""The teacher of a pre-training run: its caches on disk, samples of windows and pairs, and objectives."""

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
from heedful.objectives.packing import FixedShape, PackedRows, Ranges
from heedful.objectives.random_numbers import is_text_token
from heedful.objectives.sentence_windows import Neighbours, WindowSettings, plan_windows, sample_texts
from heedful.objectives.special_tokens import SpecialTokenTemplate
from heedful.random_streams import Stream
from heedful.runs.pretrain.specs.distillation import DistillationSettings
from heedful.tokenizer import Tokenizer
from heedful.train.ranks import Ranks
from heedful.train.settings import TrainSettings

STATISTICS = "statistics.safetensors"
FOLDER = "teacher"  # in a run's folder: statistics and cached vectors of the teacher
STATISTICS_ROWS = 128  # rows from which the teacher's statistics are estimated
EVERY = 50  # chunks of a cache between two messages


class WindowRows(PackedRows):
    """Rows of windows and pairs; `windows` are all texts that their targets number."""

    windows: Ranges


@dataclass(frozen=True, kw_only=True)
class TeacherRun:
    """The teacher of a run, with its cached vectors and statistics on disk."""

    settings: DistillationSettings
    train: TrainSettings
    loaded: ModelBundle
    tokenizer: Tokenizer
    folder: Path  # of the run
    init_from: str  # the folder of the model or run that training continues from, "" if from random weights
    shortest: int  # the least length of all phases, in tokens
    ranks: Ranks
    on_message: Callable[[str], None]

    @cached_property
    def teacher(self) -> EncoderTeacher:
        """The teacher, in the precision of the training."""
        _ = self._digest  # of the weights as they were loaded
        dtype = torch.bfloat16 if self.train.precision == "bfloat16" else torch.float32
        return EncoderTeacher(self.loaded.to(resolve_device(self.train.device), dtype), self.tokenizer)

    @property
    def reads_cached(self) -> bool:
        """Whether all targets are sentence vectors, which are computed once instead of in each step."""
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
        """Rows of windows and pairs of these documents; held-out ones have no pairs with nearest texts."""
        asked = self.settings
        single, pair = (
            SpecialTokenTemplate.of(self.tokenizer, pair=False),
            SpecialTokenTemplate.of(self.tokenizer, pair=True),
        )
        planned = plan_windows(
            corpus,
            documents,
            WindowSettings(
                short_window_prob=asked.short_window_prob, max_sentences=asked.max_sentences, pair_prob=asked.pair_prob
            ),
            single=single,
            pair=pair,
            length=length,
            seed=seed,
            neighbours=None if held_out else self._neighbours(corpus, documents, pair.room(self.shortest) // 2),
        )
        rows = WindowRows(corpus, single, planned.ranges, size, seed, planned.targets, shape, pair=pair)
        rows.windows = planned.texts
        return rows

    def _neighbours(self, corpus: Corpus, documents: NDArray[np.int64], room: int) -> Neighbours | None:
        """Texts of at most `room` tokens and the nearest of each by the teacher's vectors; the same for all phases."""
        asked = self.settings
        if not (asked.neighbour_texts and asked.term_weights.pair_similarity):
            return None
        place = self.folder / FOLDER / "neighbours"
        windows = WindowSettings(max_sentences=asked.max_sentences)
        texts = sample_texts(corpus, documents, asked.neighbour_texts, room, windows, self.train.seed)
        if len(texts) < 2:
            return None
        cache = self._filled(place, corpus, texts, "candidate texts for pairs of nearest neighbours")
        path = place / "nearest.npy"
        if self.ranks.is_main and not path.exists():
            vectors = cache[np.arange(len(texts))].numpy()
            with atomic_path(path) as part, part.open("wb") as file:
                np.save(file, nearest_texts(vectors, device=resolve_device(self.train.device)))
        self.ranks.barrier()
        return Neighbours(texts=texts, nearest=np.load(path, allow_pickle=False))

    def _filled(self, place: Path, corpus: Corpus, windows: Ranges, what: str) -> VectorCache:
        """A cache in that folder with all vectors in it."""
        cache = VectorCache(place, self.teacher, self._digest, corpus, windows)
        known = 0

        def report(done: int, count: int) -> None:
            nonlocal known
            known += 1
            if known % EVERY == 0:
                self.on_message(f"the teacher encodes {what}: {done:,} of {count:,}")

        cache.fill(self._ordinary, rank=self.ranks.rank, size=self.ranks.size, on_progress=report)
        self.ranks.barrier()
        return cache

    @cached_property
    def _digest(self) -> str:
        return self.loaded.weights_digest()

    @cached_property
    def _ordinary(self) -> NDArray[np.bool_]:
        return is_text_token(np.arange(self.tokenizer.size, dtype=np.int32), self.tokenizer)

    # -- objectives -------------------------------------------------------------------------------------------------

    def objectives(
        self, phases: Sequence[DistillationSettings], samples: Sequence[WindowRows], width: int, count: int | None
    ) -> list[EncoderDistillation]:
        """Return the objective of each phase; they share the teacher and the modules beside the student.

        Args:
            phases: The settings of each phase.
            samples: The rows of each phase.
            width: Of the student.
            count: Masked tokens of each row; None: as `mask_prob` gives.
        """
        self._estimate(samples[0])
        modules = new_modules(width, self.teacher.width, derive_seed(self.train.seed, Stream.EXTRA_MODULES))
        return [
            self._objective(asked, rows, modules, count, f"phase-{number}")
            for number, (asked, rows) in enumerate(zip(phases, samples, strict=True))
        ]

    def _objective(
        self, asked: DistillationSettings, rows: WindowRows, modules: torch.nn.ModuleDict, count: int | None, name: str
    ) -> EncoderDistillation:
        weights = asked.term_weights
        return EncoderDistillation(
            tokenizer=self.tokenizer,
            teacher=self.teacher,
            modules=modules,
            weight_by_term={term: getattr(weights, term) for term in weights.names},
            masked_sequence_prob=asked.masked_sequence_prob,
            vectors=self._cache(name, rows) if replace(self, settings=asked).reads_cached else None,
            mask_prob=asked.mask_prob,
            mask_unit=asked.mask_unit,
            target_count=count,
        )

    def _cache(self, name: str, rows: WindowRows) -> VectorCache:
        return self._filled(self.folder / FOLDER / name, rows.corpus, rows.windows, f"windows ({name})")

    def _estimate(self, rows: Sequence[Sample]) -> None:
        """Statistics of the teacher's outputs: estimated once, then read, so that a resumed run has the same ones.

        A run that continues from one with the same teacher takes over its statistics: its model learned vectors in the
        basis of those principal components.
        """
        path, about = self.folder / FOLDER / STATISTICS, {"teacher": self._digest}
        if self.ranks.is_main and not path.exists():
            make_folder(path.parent)
            start = Path(self.init_from)
            earlier = (start.parent if start.name == RUN_MODEL else start) / FOLDER / STATISTICS
            if self.init_from and earlier.is_file() and _about(earlier) == about:
                self.teacher.load_statistics(load_file(earlier))
            else:
                some = range(min(STATISTICS_ROWS, len(rows)))
                self.teacher.estimate_statistics([rows[number] for number in some], self._ordinary)
            with atomic_path(path) as part:
                save_file(self.teacher.statistics(), part, metadata={"about": json.dumps(about)})
        self.ranks.barrier()
        self.teacher.load_statistics(load_file(path))


def _about(path: Path) -> object:
    """Read which teacher a file of statistics belongs to; None if it does not say."""
    with safe_open(path, framework="pt") as file:
        return json.loads((file.metadata() or {}).get("about", "null"))
