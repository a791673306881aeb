"""A cache of a teacher's sentence vectors on disk. It is computed once, can be resumed, and serves all epochs."""

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

CHUNK_WINDOWS = 4096  # windows in a file
BATCH_TOKENS = 8192  # tokens in a batch of the teacher
METADATA_FILE = "cache.json"  # teacher, corpus and windows of the cache


class VectorCache:
    """The teacher's vectors of the windows of a corpus, in float16 on disk: 2 * width bytes for each window.

    `fill` computes missing vectors. The file of a chunk appears complete or not at all, and its values do not depend on
    where an earlier `fill` was stopped.

    Args:
        folder: Folder of the cache.
        teacher: The teacher.
        digest: Identifies the teacher's weights. A folder of a different teacher, corpus or plan is refused.
        corpus: The corpus.
        windows: Ranges of the windows in the corpus, [windows, 1, 2].
    """

    def __init__(self, folder: Path, teacher: EncoderTeacher, digest: str, corpus: Corpus, windows: Ranges) -> None:
        self.folder, self.teacher, self.corpus, self.windows = folder, teacher, corpus, windows
        self._metadata = {
            "teacher": digest,
            "corpus": corpus.digest,
            "windows": sha256(windows.tobytes()).hexdigest(),
            "count": len(windows),
            "width": teacher.width,
            "chunk": CHUNK_WINDOWS,
        }
        self._template = SpecialTokenTemplate.of(teacher.student_tokenizer, pair=False)
        self._open_chunks: dict[int, NDArray[np.float16]] = {}

    def __len__(self) -> int:
        """Number of windows."""
        return len(self.windows)

    def fill(
        self,
        is_text_id: NDArray[np.bool_],
        *,
        rank: int = 0,
        size: int = 1,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compute the missing chunks of this rank: those whose number is `rank` modulo `size`.

        Args:
            is_text_id: Marks the ids of the student's vocabulary that are text tokens.
            rank: This process.
            size: Number of processes that fill the cache together.
            on_progress: Called after each chunk with the number of windows up to its end, and of all windows.
        """
        self._check_folder()
        for start in range(rank * CHUNK_WINDOWS, len(self), size * CHUNK_WINDOWS):
            path = self._chunk_path(start // CHUNK_WINDOWS)
            stop = min(start + CHUNK_WINDOWS, len(self))
            if not path.exists():
                vectors = self._encode_windows(self.windows[start:stop, 0], is_text_id)
                with atomic_path(path) as part, part.open("wb") as file:
                    np.save(file, vectors)
            if on_progress is not None:
                on_progress(stop, len(self))

    def __getitem__(self, numbers: NDArray[np.int64]) -> Float[Tensor, "windows width"]:
        """Return the vectors of windows by their numbers, in float32."""
        vectors = np.empty((len(numbers), self.teacher.width), dtype=np.float32)
        chunks = numbers // CHUNK_WINDOWS
        for chunk in np.unique(chunks).tolist():
            is_in_chunk = chunks == chunk
            vectors[is_in_chunk] = self._read_chunk(chunk)[numbers[is_in_chunk] - chunk * CHUNK_WINDOWS]
        return torch.from_numpy(vectors)

    def _read_chunk(self, number: int) -> NDArray[np.float16]:
        """Map the file of a chunk into memory."""
        if number not in self._open_chunks:
            self._open_chunks[number] = np.load(self._chunk_path(number), mmap_mode="r", allow_pickle=False)
        return self._open_chunks[number]

    def _encode_windows(self, ranges: NDArray[np.int64], is_text_id: NDArray[np.bool_]) -> NDArray[np.float16]:
        """Encode texts in batches of similar lengths; return their vectors in the order of `ranges`."""
        vectors = np.empty((len(ranges), self.teacher.width), dtype=np.float16)
        lengths = ranges[:, 1] - ranges[:, 0]
        batch: list[int] = []
        tokens = 0
        by_length = np.argsort(lengths, kind="stable").tolist()
        for index, number in enumerate(by_length):
            batch.append(number)
            tokens += int(lengths[number]) + self._template.width
            if tokens >= BATCH_TOKENS or index + 1 == len(by_length):
                vectors[batch] = self._encode_batch(ranges[batch], is_text_id).cpu().numpy().astype(np.float16)
                batch, tokens = [], 0
        return vectors

    def _encode_batch(self, ranges: NDArray[np.int64], is_text_id: NDArray[np.bool_]) -> Tensor:
        """Return the teacher's vectors of texts, [texts, width]."""
        sequences = [self._template.fill(self.corpus.tokens(int(start), int(stop))) for start, stop in ranges]
        packed = pack_samples([Sample(tokens=ids, types=types, bounds=(0, len(ids))) for ids, types in sequences])
        words = self.teacher.align_words(packed, packed.tokens.numpy(), is_text_id)
        return self.teacher.sentence_vectors(self.teacher.hidden_states(words), words.teacher_input)

    def _chunk_path(self, chunk: int) -> Path:
        return self.folder / f"vectors-{chunk:05d}.npy"

    def _check_folder(self) -> None:
        """Record the teacher, corpus and windows in a new folder; refuse a folder of different ones."""
        make_folder(self.folder)
        path = self.folder / METADATA_FILE
        if path.exists():
            if json.loads(path.read_text(encoding="utf-8")) != self._metadata:
                raise HeedfulError(
                    f"{self.folder} has vectors of a different teacher, corpus or plan of windows: remove that folder, "
                    "or use another run folder"
                )
            return
        with atomic_path(path) as part:
            part.write_text(json.dumps(self._metadata, indent=2) + "\n", encoding="utf-8")


def nearest_texts(
    vectors: NDArray[np.float32], rows: int = 1024, device: torch.device | str = "cpu"
) -> NDArray[np.int64]:
    """Return the number of the most similar other vector for each vector, [texts].

    Args:
        vectors: Unit vectors, [texts, width].
        rows: Vectors that are compared with all others at a time.
        device: Where the cosines are computed.
    """
    all_vectors = torch.from_numpy(vectors).to(device)
    nearest = []
    for start in range(0, len(all_vectors), rows):
        cosines = all_vectors[start : start + rows] @ all_vectors.T
        indices = torch.arange(len(cosines), device=device)
        cosines[indices, start + indices] = -2.0  # a vector is not its own neighbour
        nearest.append(cosines.argmax(-1))
    return torch.cat(nearest).cpu().numpy() if nearest else np.zeros(0, dtype=np.int64)
