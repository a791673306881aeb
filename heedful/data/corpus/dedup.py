"""Deduplication of documents: exact by 64-bit hashes, near by LSH of MinHash signatures of 5-shingles (Broder 1997).

The first document of each group of duplicates is kept. Since this depends on the order of documents, one process
decides for all of them.

The library datasketch is not used: on documents of 300 words its MinHash (2.0) took 2.3 ms each and this one 1.7 ms,
and its LSH stores buckets in Python dicts. Its signatures differ, so an unfinished corpus could not resume.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

KEEP, EXACT, NEAR = 0, 1, 2  # verdicts
SHINGLE_WORDS = 5  # consecutive words in a shingle
PERMUTATIONS = 128  # hash values in a signature
MIN_RECALL = 0.95  # minimum probability that two documents with exactly the threshold similarity are compared
MAX_BUCKET_DOCUMENTS = 8  # maximum documents in an LSH bucket; larger buckets are mostly boilerplate
BATCH_DOCUMENTS = 16_384  # documents per comparison, to bound memory
_BLOCK_SHINGLES = 2048  # shingles per permutation, which takes 2 MB
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio
_WORD = re.compile(r"\w+")


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of 64-bit values (the finaliser of splitmix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


_FACTORS = (_mix(np.arange(1, PERMUTATIONS + 1, dtype=np.uint64) * _GOLDEN) | np.uint64(1))[:, None]
_TERMS = _mix(np.arange(1001, PERMUTATIONS + 1001, dtype=np.uint64) * _GOLDEN)[:, None]
_POWERS = _mix(np.arange(1, SHINGLE_WORDS + 1, dtype=np.uint64)) | np.uint64(1)


class _WordHashes(dict[str, int]):
    """The 64-bit hash of each word, computed when it is first looked up."""

    def __missing__(self, word: str) -> int:
        data = word.encode()
        word_hash = self[word] = crc32(data) | crc32(data, 0x5BD1E995) << 32
        return word_hash


def minhash_signatures(texts: Iterable[str]) -> NDArray[np.uint32]:
    """Return MinHash signatures, [documents, 128]: the smallest permuted hashes of a text's 5-shingles, ignoring case.

    The expected share of equal values in two signatures is the Jaccard similarity of both sets of shingles. A text of
    fewer than five words has a single shingle.
    """
    word_hashes = _WordHashes()
    signatures = [_signature(_WORD.findall(text.casefold()) or [text], word_hashes) for text in texts]
    return np.array(signatures, np.uint32).reshape(-1, PERMUTATIONS)


def _signature(words: list[str], word_hashes: _WordHashes) -> NDArray[np.uint32]:
    """Return the signature of a text with these words, [128]."""
    hashes = np.fromiter(map(word_hashes.__getitem__, words), np.uint64, len(words))
    num_shingles = max(len(words) - SHINGLE_WORDS + 1, 1)
    shingles = np.zeros(num_shingles, np.uint64)  # hash of each shingle: a weighted sum of the hashes of its words
    for position, power in enumerate(_POWERS):
        hashes_at_position = hashes[position : position + num_shingles]
        shingles[: len(hashes_at_position)] += hashes_at_position * power
    shingles = np.unique(_mix(shingles))
    signature = np.full(PERMUTATIONS, 2**32 - 1, np.uint32)
    for start in range(0, len(shingles), _BLOCK_SHINGLES):
        values = (shingles[start : start + _BLOCK_SHINGLES] * _FACTORS + _TERMS) >> np.uint64(32)
        np.minimum(signature, values.min(axis=1).astype(np.uint32), out=signature)
    return signature


def lsh_bands(similarity: float) -> tuple[int, int]:
    """Return (bands, rows per band) of LSH: the fewest bands that reach MIN_RECALL for documents of a similarity.

    Two documents of similarity s agree in a band of r rows with probability s^r, and in at least one of b bands with
    probability 1 - (1 - s^r)^b.

    >>> lsh_bands(0.8), lsh_bands(0.5)
    ((18, 7), (42, 3))
    """
    for rows in range(PERMUTATIONS, 1, -1):
        if 1 - (1 - similarity**rows) ** (PERMUTATIONS // rows) >= MIN_RECALL:
            return PERMUTATIONS // rows, rows
    return PERMUTATIONS, 1


def near_duplicate_groups(signatures: NDArray[np.uint32], similarity: float) -> NDArray[np.int64]:
    """Group texts that are near duplicates, directly or through other texts. Return the group id of each text, [texts].

    Each text is compared with the first text of its LSH bucket in every band.

    Args:
        signatures: signatures from `minhash_signatures`.
        similarity: minimum Jaccard similarity of near duplicates, as estimated from signatures.

    >>> texts = ["The cat sat on the mat today", "the cat sat on the mat, today!", "A dog"]
    >>> near_duplicate_groups(minhash_signatures(texts), 0.8).tolist()
    [0, 0, 1]
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    count = len(signatures)
    bands, rows = lsh_bands(similarity)
    candidates = [np.zeros((0, 2), np.int64)]  # [pairs, 2] for each band: first text of a bucket, another text in it
    for keys in _band_keys(signatures, bands, rows).T:
        _, first_in_bucket, bucket = np.unique(keys, return_index=True, return_inverse=True)
        pairs = np.stack([first_in_bucket[bucket.reshape(-1)], np.arange(count)], axis=1)
        candidates.append(pairs[pairs[:, 0] != pairs[:, 1]])
    pairs = np.unique(np.concatenate(candidates), axis=0)
    are_near = np.zeros(len(pairs), bool)
    for start in range(0, len(pairs), BATCH_DOCUMENTS):
        batch = pairs[start : start + BATCH_DOCUMENTS]
        num_equal = (signatures[batch[:, 0]] == signatures[batch[:, 1]]).sum(axis=1)
        are_near[start : start + BATCH_DOCUMENTS] = num_equal >= similarity * PERMUTATIONS
    pairs = pairs[are_near]
    graph = coo_array((np.ones(len(pairs), bool), (pairs[:, 0], pairs[:, 1])), shape=(count, count))
    return np.asarray(connected_components(graph, directed=False)[1], np.int64)


def _band_keys(signatures: NDArray[np.uint32], bands: int, rows: int) -> NDArray[np.uint64]:
    """Return the hash of each band of signatures, which is not 0, [documents, bands]."""
    values = signatures[:, : bands * rows].reshape(-1, bands, rows).astype(np.uint64)
    keys = np.broadcast_to(np.arange(1, bands + 1, dtype=np.uint64) * _GOLDEN, values.shape[:2])
    for row in range(rows):
        keys = _mix(keys + values[:, :, row] * _GOLDEN)
    return np.maximum(keys, np.uint64(1))


class _HashTable:
    """Hash table of int32 values by nonzero 64-bit keys, with linear probing. It is at most half full.

    Args:
        values: whether keys have values. A table without values is a set.
    """

    def __init__(self, values: bool) -> None:
        self._keys = np.zeros(1 << 12, np.uint64)  # 0: the slot is free
        self._values = np.zeros(len(self._keys) if values else 0, np.int32)
        self._used = 0  # used slots

    def find(self, keys: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the indices of the keys that are stored, and their slots. A key may be stored several times."""
        mask = len(self._keys) - 1
        pending = np.arange(len(keys))  # indices of keys that are still probed
        slots = (keys & np.uint64(mask)).astype(np.int64)  # next slot of each pending key
        found_indices, found_slots = [pending[:0]], [slots[:0]]
        while len(pending):
            stored = self._keys[slots]
            is_equal = stored == keys[pending]
            found_indices.append(pending[is_equal])
            found_slots.append(slots[is_equal])
            is_used = stored != 0  # a free slot ends the probing of its key
            pending, slots = pending[is_used], (slots[is_used] + 1) & mask
        return np.concatenate(found_indices), np.concatenate(found_slots)

    def value(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the values in slots."""
        return self._values[slots].astype(np.int64)

    def put(self, keys: NDArray[np.uint64], values: NDArray[np.signedinteger[Any]] | None = None) -> None:
        """Insert keys, including keys that are stored already."""
        while 2 * (self._used + len(keys)) > len(self._keys):
            self._grow()
        self._used += len(keys)
        mask = len(self._keys) - 1
        pending = np.arange(len(keys))  # indices of keys without a slot
        slots = (keys & np.uint64(mask)).astype(np.int64)  # next slot of each pending key
        while len(pending):
            free = np.flatnonzero(self._keys[slots] == 0)
            _, first = np.unique(slots[free], return_index=True)  # of several keys, the first one gets the slot
            free = free[first]
            self._keys[slots[free]] = keys[pending[free]]
            if values is not None:
                self._values[slots[free]] = values[pending[free]]
            is_pending = np.ones(len(pending), bool)
            is_pending[free] = False
            pending, slots = pending[is_pending], (slots[is_pending] + 1) & mask

    def _grow(self) -> None:
        """Double the size of the table. Entries are inserted again in blocks, to bound memory."""
        keys, values = self._keys, self._values
        self._keys, self._used = np.zeros(2 * len(keys), np.uint64), 0
        self._values = np.zeros(2 * len(values), np.int32)
        for start in range(0, len(keys), 1 << 20):
            used_slots = start + np.flatnonzero(keys[start : start + (1 << 20)])
            self.put(keys[used_slots], values[used_slots] if len(values) else None)


class Deduplicator:
    """Decides which documents are kept, in the order of the input: the first of each group of duplicates.

    Exact deduplication takes 16 to 32 bytes of memory per document. Near deduplication takes another 24 to 48 bytes per
    kept document and band, and 512 bytes in a file per kept document.

    Args:
        near: whether near duplicates are removed too.
        similarity: minimum Jaccard similarity of near duplicates.
        file: file for signatures. It is only created if `near` is true.
    """

    def __init__(self, *, near: bool, similarity: float, file: Path) -> None:
        self._seen_hashes = _HashTable(values=False)
        self._near_index = _NearIndex(similarity, file) if near else None

    def check(self, hashes: NDArray[np.uint64], signatures: NDArray[np.uint32]) -> NDArray[np.uint8]:
        """Return the verdict KEEP, EXACT or NEAR for each of the next documents, [documents].

        Args:
            hashes: hash of each document, [documents].
            signatures: MinHash signature of each document, [documents, 128]. Unused without near deduplication.
        """
        verdicts = np.full(len(hashes), EXACT, np.uint8)
        keys, first_indices = np.unique(np.maximum(hashes, np.uint64(1)), return_index=True)
        seen, _ = self._seen_hashes.find(keys)
        is_new = np.ones(len(keys), bool)
        is_new[seen] = False
        self._seen_hashes.put(keys[is_new])
        verdicts[first_indices[is_new]] = KEEP
        if self._near_index is not None:
            distinct = np.flatnonzero(verdicts == KEEP)
            for start in range(0, len(distinct), BATCH_DOCUMENTS):
                batch = distinct[start : start + BATCH_DOCUMENTS]
                verdicts[batch[self._near_index.check(signatures[batch])]] = NEAR
        return verdicts

    def close(self) -> None:
        """Close the file of signatures."""
        if self._near_index is not None:
            self._near_index.close()


class _NearIndex:
    """Index of kept documents: their signatures in a file, and LSH buckets of documents that agree in a band."""

    def __init__(self, similarity: float, file: Path) -> None:
        self._min_equal = similarity * PERMUTATIONS  # minimum equal values in the signatures of near duplicates
        self._bands, self._rows = lsh_bands(similarity)
        self._table = _HashTable(values=True)  # indices of kept documents by the keys of their bands
        self._file = file.open("w+b")
        self._count = 0  # kept documents

    def close(self) -> None:
        self._file.close()

    def check(self, signatures: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return whether each document of a batch is a near duplicate of an earlier kept one, [documents]."""
        keys = _band_keys(signatures, self._bands, self._rows)
        is_near = np.zeros(len(signatures), bool)
        indices, slots = self._table.find(keys.ravel())
        # (document of the batch, kept document with an equal band)
        pairs = np.unique(np.stack([indices // self._bands, self._table.value(slots)], axis=1), axis=0)
        for some_pairs in np.array_split(pairs, max(len(pairs) // 10_000, 1)):
            documents, kept_documents = some_pairs[:, 0], some_pairs[:, 1]
            are_near = self._are_near(signatures[documents], self._signatures(kept_documents))
            is_near[documents[are_near]] = True
        self._mark_batch_duplicates(signatures, keys, is_near)
        distinct = np.flatnonzero(~is_near)
        self._put(keys[distinct], signatures[distinct])
        return is_near

    def _mark_batch_duplicates(
        self, signatures: NDArray[np.uint32], keys: NDArray[np.uint64], is_near: NDArray[np.bool_]
    ) -> None:
        """Set `is_near` for documents that are near duplicates of an earlier document of the batch."""
        _, buckets, counts = np.unique(keys, return_inverse=True, return_counts=True)
        buckets = buckets.reshape(keys.shape)  # bucket of each document and band
        is_shared = counts[buckets] > 1
        members: dict[int, list[int]] = {}  # kept documents of each bucket
        for document in np.flatnonzero(is_shared.any(axis=1) & ~is_near).tolist():
            shared_buckets = buckets[document][is_shared[document]].tolist()
            candidates = sorted({member for bucket in shared_buckets for member in members.get(bucket, ())})
            if candidates and self._are_near(signatures[candidates], signatures[document]).any():
                is_near[document] = True
                continue
            for bucket in shared_buckets:
                if len(bucket_members := members.setdefault(bucket, [])) < MAX_BUCKET_DOCUMENTS:
                    bucket_members.append(document)

    def _are_near(self, first: NDArray[np.uint32], second: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """Return whether pairs of signatures belong to near duplicates. `second` may be a single signature."""
        return np.asarray((first == second).sum(axis=-1) >= self._min_equal)

    def _signatures(self, documents: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Read the signatures of kept documents, by their indices, from the file."""
        if not len(documents):
            return np.zeros((0, PERMUTATIONS), np.uint32)
        shape = (self._count, PERMUTATIONS)
        return np.asarray(np.memmap(self._file, np.uint32, mode="r", shape=shape)[documents])

    def _put(self, keys: NDArray[np.uint64], signatures: NDArray[np.uint32]) -> None:
        """Add documents that are kept: write their signatures, and add them to the buckets that are not full."""
        self._file.seek(0, 2)
        self._file.write(np.ascontiguousarray(signatures).data)
        self._file.flush()
        documents = np.repeat(np.arange(self._count, self._count + len(keys)), self._bands)
        self._count += len(keys)
        flat_keys = keys.ravel()
        indices, _ = self._table.find(flat_keys)
        has_room = np.bincount(indices, minlength=len(flat_keys)) < MAX_BUCKET_DOCUMENTS
        self._table.put(flat_keys[has_room], documents[has_room])
