"""A teacher's sentence vectors on disk: computed once, chunk by chunk, resumable, and shared by all epochs."""

from __future__ import annotations

import json
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from heedful.atomic_io import atomic_path, make_folder
from heedful.data.corpus.shards import Corpus
from heedful.errors import HeedfulError
from heedful.objectives.base import Sample, pack_samples
from heedful.objectives.distillation.encoder_teacher import EncoderTeacher
from heedful.objectives.packing import Ranges
from heedful.objectives.special_tokens import SpecialTokenTemplate

CHUNK = 4096  # windows of a file
BATCH_TOKENS = 8192  # tokens that the teacher reads at once
ABOUT = "cache.json"


class VectorCache:
    """The teacher's vectors of windows of a corpus, float16 on disk: 2 * width bytes for each window.

    `fill` computes what is missing. A chunk's file appears whole or not at all, and its values do not depend on where
    an earlier `fill` was stopped.
    """

    def __init__(self, folder: Path, teacher: EncoderTeacher, digest: str, corpus: Corpus, windows: Ranges) -> None:
        """`digest` identifies the teacher's weights; vectors of another teacher, corpus or plan are refused."""
        self.folder, self.teacher, self.corpus, self.windows = folder, teacher, corpus, windows
        self._about = {
            "teacher": digest,
            "corpus": corpus.digest,
            "windows": sha256(windows.tobytes()).hexdigest(),
            "count": len(windows),
            "width": teacher.width,
            "chunk": CHUNK,
        }
        self._frame = SpecialTokenTemplate.of(teacher.tokenizer, pair=False)
        self._open: dict[int, NDArray[np.float16]] = {}

    def __len__(self) -> int:
        """The number of windows."""
        return len(self.windows)

    def fill(
        self,
        free: NDArray[np.bool_],
        *,
        rank: int = 0,
        size: int = 1,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compute the missing chunks whose number is `rank` modulo `size`; `free` marks ordinary tokens by id.

        `on_progress` receives the numbers of windows done and in all.
        """
        self._check()
        for start in range(rank * CHUNK, len(self), size * CHUNK):
            path = self._path(start // CHUNK)
            stop = min(start + CHUNK, len(self))
            if not path.exists():
                vectors = self._encode(self.windows[start:stop, 0], free)
                with atomic_path(path) as part, part.open("wb") as file:
                    np.save(file, vectors)
            if on_progress is not None:
                on_progress(stop, len(self))

    def __getitem__(self, numbers: NDArray[np.int64]) -> Float[Tensor, "windows width"]:
        """Return the vectors of these windows, in float32."""
        vectors = np.empty((len(numbers), self.teacher.width), dtype=np.float32)
        chunks = numbers // CHUNK
        for chunk in np.unique(chunks).tolist():
            here = chunks == chunk
            vectors[here] = self._chunk(chunk)[numbers[here] - chunk * CHUNK]
        return torch.from_numpy(vectors)

    def _chunk(self, number: int) -> NDArray[np.float16]:
        if number not in self._open:
            self._open[number] = np.load(self._path(number), mmap_mode="r", allow_pickle=False)
        return self._open[number]

    def _encode(self, ranges: NDArray[np.int64], free: NDArray[np.bool_]) -> NDArray[np.float16]:
        """Encode texts in batches of similar length."""
        vectors = np.empty((len(ranges), self.teacher.width), dtype=np.float16)
        lengths = ranges[:, 1] - ranges[:, 0]
        batch: list[int] = []
        tokens = 0
        by_length = np.argsort(lengths, kind="stable").tolist()
        for place, number in enumerate(by_length):
            batch.append(number)
            tokens += int(lengths[number]) + self._frame.width
            if tokens >= BATCH_TOKENS or place + 1 == len(by_length):
                vectors[batch] = self._vectors(ranges[batch], free).cpu().numpy().astype(np.float16)
                batch, tokens = [], 0
        return vectors

    def _vectors(self, ranges: NDArray[np.int64], free: NDArray[np.bool_]) -> Tensor:
        filled = [self._frame.fill(self.corpus.tokens(int(start), int(stop))) for start, stop in ranges]
        packed = pack_samples([Sample(tokens=ids, types=types, bounds=(0, len(ids))) for ids, types in filled])
        words = self.teacher.words(packed, packed.tokens.numpy(), free)
        return self.teacher.pooled(self.teacher.rows(words), words.taught)

    def _path(self, chunk: int) -> Path:
        return self.folder / f"vectors-{chunk:05d}.npy"

    def _check(self) -> None:
        """Record the teacher, corpus and windows of the cache; refuse a folder with others."""
        make_folder(self.folder)
        path = self.folder / ABOUT
        if path.exists():
            if json.loads(path.read_text(encoding="utf-8")) != self._about:
                raise HeedfulError(
                    f"{self.folder} holds vectors of another teacher, corpus or plan of windows: remove that folder, "
                    "or use another run folder"
                )
            return
        with atomic_path(path) as part:
            part.write_text(json.dumps(self._about, indent=2) + "\n", encoding="utf-8")


def nearest_texts(
    vectors: NDArray[np.float32], rows: int = 1024, device: torch.device | str = "cpu"
) -> NDArray[np.int64]:
    """Return the number of the most similar other vector, for unit vectors [texts, width]; `rows` at a time."""
    every = torch.from_numpy(vectors).to(device)
    nearest = []
    for start in range(0, len(every), rows):
        scores = every[start : start + rows] @ every.T
        own = torch.arange(len(scores), device=device)
        scores[own, start + own] = -2.0
        nearest.append(scores.argmax(-1))
    return torch.cat(nearest).cpu().numpy() if nearest else np.zeros(0, dtype=np.int64)
