"""`VectorDrift`: how far the vectors of a model's last texts are from those of its training texts, for /metrics."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from heedful.checkpoint.notes import VECTOR_SAMPLE, TrainingVectors
from heedful.infer.bundle_engine import BundleEngine
from heedful.infer.scores import window_vectors


class VectorDrift:
    """The vectors of the last VECTOR_SAMPLE windows of texts that a model read, compared with its training texts.

    They come from the hidden states of the answers, so no text is read twice.
    """

    def __init__(self, training: TrainingVectors) -> None:
        self.training = training
        self._vectors = np.zeros((VECTOR_SAMPLE, len(training.mean)), np.float32)
        self._count = 0  # vectors so far
        self._lock = threading.Lock()  # the engine thread adds vectors, and the event loop reads them

    @classmethod
    def of(cls, engine: BundleEngine) -> VectorDrift | None:
        """Observe an engine, for a cascade its first stage; returns None if the model has no summary of vectors."""
        first_stage, _ = engine.stages[0]
        training = first_stage.loaded.training_vectors
        if training is None:
            return None
        drift = cls(training)
        first_stage.on_rows = drift.add
        return drift

    def add(self, rows: Tensor, counts: Sequence[int]) -> None:
        """Add the windows of a batch; see `BundleEngine.on_rows`. Vectors that are not finite are left out."""
        vectors = window_vectors(rows, counts)[-VECTOR_SAMPLE:]
        vectors = vectors[np.isfinite(vectors).all(axis=1)]
        with self._lock:
            self._vectors[np.arange(self._count, self._count + len(vectors)) % VECTOR_SAMPLE] = vectors
            self._count += len(vectors)

    @property
    def distance(self) -> float | None:
        """`TrainingVectors.distance` of the last vectors, or None before there are VECTOR_SAMPLE of them."""
        with self._lock:
            return self.training.distance(self._vectors) if self._count >= VECTOR_SAMPLE else None
