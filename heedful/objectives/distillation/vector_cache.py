"""`VectorCache`: a teacher's sentence embeddings on disk, computed once and used in all epochs.

`nearest_texts` finds the nearest neighbour of each embedding.
"""

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
METADATA_FILE = "cache.json"  # identifies the teacher, corpus and windows of the cache


class VectorCache:
    """The teacher's embeddings of the windows of a corpus, in float16: 2 * hidden size bytes for each window.

    `fill` computes missing embeddings, one file for each chunk of windows. The file of a chunk appears complete or not
    at all. Its values are the same if `fill` was interrupted and called again.

    Args:
        folder: Folder of the cache.
        teacher: The teacher.
        digest: Identifies the teacher's weights. A folder of a different teacher, corpus or plan is refused.
        corpus: The corpus.
        windows: Token ranges of the windows in the corpus, [windows, 1, 2].
    """

    def __init__(self, folder: Path, teacher: EncoderTeacher, digest: str, corpus: Corpus, windows: Ranges) -> None:
        self.folder = folder
        self.teacher = teacher
        self.corpus = corpus
        self.windows = windows
        self._metadata = {
            "teacher": digest,
            "corpus": corpus.digest,
            "windows": sha256(windows.tobytes()).hexdigest(),
            "count": len(windows),
            "width": teacher.vector_size,
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
        """Compute the missing chunks of this rank: those whose index is `rank` modulo `size`.

        Args:
            is_text_id: Marks the ids of the student's vocabulary that are text tokens.
            rank: Rank of this process.
            size: Number of processes that fill the cache together.
            on_progress: Called after each chunk with the number of windows up to its end and the number of all windows.
        """
        self._check_folder()
        for start in range(rank * CHUNK_WINDOWS, len(self), size * CHUNK_WINDOWS):
            path = self._chunk_path(start // CHUNK_WINDOWS)
            stop = min(start + CHUNK_WINDOWS, len(self))
            if not path.exists():
                vectors = self._encode_windows(self.windows[start:stop, 0], is_text_id)
                with atomic_path(path) as temporary, temporary.open("wb") as file:
                    np.save(file, vectors)
            if on_progress is not None:
                on_progress(stop, len(self))

    def __getitem__(self, indices: NDArray[np.int64]) -> Float[Tensor, "windows dim"]:
        """Return the embeddings of the windows with these indices, in float32."""
        vectors = np.empty((len(indices), self.teacher.vector_size), dtype=np.float32)
        chunks = indices // CHUNK_WINDOWS
        for chunk in np.unique(chunks).tolist():
            is_in_chunk = chunks == chunk
            vectors[is_in_chunk] = self._read_chunk(chunk)[indices[is_in_chunk] - chunk * CHUNK_WINDOWS]
        return torch.from_numpy(vectors)

    def _read_chunk(self, chunk: int) -> NDArray[np.float16]:
        """Memory-map the file of a chunk."""
        if chunk not in self._open_chunks:
            self._open_chunks[chunk] = np.load(self._chunk_path(chunk), mmap_mode="r", allow_pickle=False)
        return self._open_chunks[chunk]

    def _encode_windows(self, ranges: NDArray[np.int64], is_text_id: NDArray[np.bool_]) -> NDArray[np.float16]:
        """Encode windows in batches of similar lengths; return their embeddings in the order of `ranges`."""
        vectors = np.empty((len(ranges), self.teacher.vector_size), dtype=np.float16)
        lengths = ranges[:, 1] - ranges[:, 0]
        batch: list[int] = []
        tokens = 0
        by_length = np.argsort(lengths, kind="stable").tolist()
        for rank, window in enumerate(by_length):
            batch.append(window)
            tokens += int(lengths[window]) + self._template.width
            if tokens >= BATCH_TOKENS or rank + 1 == len(by_length):
                vectors[batch] = self._encode_batch(ranges[batch], is_text_id).cpu().numpy().astype(np.float16)
                batch = []
                tokens = 0
        return vectors

    def _encode_batch(self, ranges: NDArray[np.int64], is_text_id: NDArray[np.bool_]) -> Tensor:
        """Return the teacher's embeddings of windows, [windows, dimension]."""
        sequences = [self._template.fill(self.corpus.tokens(int(start), int(stop))) for start, stop in ranges]
        packed = pack_samples([Sample(tokens=ids, types=types, bounds=(0, len(ids))) for ids, types in sequences])
        words = self.teacher.align_words(packed, packed.tokens.numpy(), is_text_id)
        return self.teacher.sentence_vectors(self.teacher.token_states(words), words.teacher_input)

    def _chunk_path(self, chunk: int) -> Path:
        return self.folder / f"vectors-{chunk:05d}.npy"

    def _check_folder(self) -> None:
        """Record the teacher, corpus and windows in a new folder, or compare them with those recorded in it.

        Raises:
            HeedfulError: If the folder has embeddings of a different teacher, corpus or plan of windows.
        """
        make_folder(self.folder)
        path = self.folder / METADATA_FILE
        if path.exists():
            if json.loads(path.read_text(encoding="utf-8")) != self._metadata:
                raise HeedfulError(
                    f"{self.folder} has vectors of a different teacher, corpus or plan of windows: remove that folder, "
                    "or use another run folder"
                )
            return
        with atomic_path(path) as temporary:
            temporary.write_text(json.dumps(self._metadata, indent=2) + "\n", encoding="utf-8")


def nearest_texts(
    vectors: NDArray[np.float32], rows: int = 1024, device: torch.device | str = "cpu"
) -> NDArray[np.int64]:
    """Return, for each vector, the index of its nearest neighbour by cosine, [texts].

    Args:
        vectors: Unit vectors, [texts, hidden size].
        rows: Number of vectors that are compared with all others at a time.
        device: Device that computes the cosines.
    """
    all_vectors = torch.from_numpy(vectors).to(device)
    nearest = []
    for start in range(0, len(all_vectors), rows):
        cosines = all_vectors[start : start + rows] @ all_vectors.T
        indices = torch.arange(len(cosines), device=device)
        cosines[indices, start + indices] = -2.0  # a vector is not its own neighbour
        nearest.append(cosines.argmax(-1))
    return torch.cat(nearest).cpu().numpy() if nearest else np.zeros(0, dtype=np.int64)
