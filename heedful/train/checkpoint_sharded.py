"""Sharded checkpoints: each rank writes its shards, and each of any number of ranks reads the rows it needs.

torch.distributed.checkpoint plans the rows that each rank writes and reads; this module stores them. The shards of one
rank are a safetensors file, and `layout.json` lists the file and the position of all rows. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from heedful.atomic_io import as_bytes, write_synced
from heedful.errors import RunError
from heedful.train.checkpoint_format import LAYOUT, FileDigests, TensorChunk, TensorLayout, safetensors_chunks
from heedful.train.ranks import Ranks

# -- writing ------------------------------------------------------------------------------------------------------


def write_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> FileDigests:
    """Write the shards of all ranks and the layout; returns the digests of all files on every rank.

    Raises:
        OSError: If a rank could not write its file.
        RunError: If a rank failed for another reason.
    """
    writer = _Writer(folder)
    try:
        with ranks.translate_errors():
            save(dict(tensors), storage_writer=writer, process_group=ranks.process_group)
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        if isinstance(first, OSError):
            raise OSError(first.errno, f"{os.strerror(first.errno or 0)} (rank {rank})") from None
        raise RunError(f"rank {rank} could not save its shards: {first}") from None
    digests: FileDigests = {}
    for rank_digests in ranks.all_gather_object(writer.digests):
        digests |= rank_digests
    return dict(sorted(digests.items()))


class _Writer(StorageWriter):
    """Writes one file for each rank; rank 0 writes the layout too."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.digests: FileDigests = {}  # digests of the files that this rank wrote

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Do nothing: files need no preparation."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        names = [f"part-{number:05d}-of-{len(plans):05d}.safetensors" for number in range(1, len(plans) + 1)]
        return [replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Any] = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        assert len(tensors) == len(plan.items), "a rank has one shard of a tensor"
        head, *rest = safetensors_chunks(tensors)
        assert isinstance(head, bytes)
        if tensors:
            self.digests[plan.storage_data] = write_synced(self.folder / plan.storage_data, [head, *rest])
        header = json.loads(head[8:])
        results = []
        for item in plan.items:
            entry = header[item.index.fqn]
            begin, end = (len(head) + offset for offset in entry["data_offsets"])
            location = {"file": plan.storage_data, "begin": begin, "shape": entry["shape"], "dtype": entry["dtype"]}
            results.append(WriteResult(index=item.index, size_in_bytes=end - begin, storage_data=location))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        layout: dict[str, dict[str, Any]] = {}
        for result in (result for rank_results in results for result in rank_results):
            shape = list(metadata.state_dict_metadata[result.index.fqn].size)  # type: ignore[union-attr]
            entry = {"dtype": result.storage_data["dtype"], "shape": shape, "rows": []}
            entry = layout.setdefault(result.index.fqn, entry)
            offsets = list(result.index.offset or [0] * len(shape))
            rows = {"offsets": offsets} | {name: result.storage_data[name] for name in ("shape", "file", "begin")}
            entry["rows"].append(rows)
        text = json.dumps(dict(sorted(layout.items())), indent=1).encode() + b"\n"
        self.digests[LAYOUT] = write_synced(self.folder / LAYOUT, [text])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


# -- reading ------------------------------------------------------------------------------------------------------


def read_shards(folder: Path, layouts: Mapping[str, TensorLayout], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the tensors of a valid checkpoint; of tensors that are DTensors in `like`, only this rank's shard."""
    state: dict[str, Tensor] = {}
    for name, layout in layouts.items():
        target = like.get(name)
        if isinstance(target, DTensor) and tuple(target.shape) == layout.shape and target.dtype == layout.dtype:
            state[name] = torch.empty_like(target, device="cpu")
        else:
            state[name] = torch.empty(layout.shape, dtype=layout.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each rank reads by itself
        load(state, storage_reader=_Reader(folder, layouts), no_dist=True)
    return {name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in state.items()}


class _Reader(StorageReader):
    """Reads rows from safetensors files."""

    def __init__(self, folder: Path, layouts: Mapping[str, TensorLayout]) -> None:
        self.folder, self.layouts = folder, layouts

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader is used once."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return Metadata(state_dict_metadata={name: _metadata(layout) for name, layout in self.layouts.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Do nothing: files need no preparation."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            index = item.storage_index
            layout = self.layouts[index.fqn]
            chunk = next(chunk for chunk in layout.chunks if chunk.offsets == tuple(index.offset or ()))
            target = planner.resolve_tensor(item)
            target.detach().copy_(_read_rows(self.folder, layout.dtype, chunk, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _metadata(layout: TensorLayout) -> TensorStorageMetadata:
    """Return the metadata of a tensor for torch.distributed.checkpoint."""
    chunks = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape)) for chunk in layout.chunks]
    return TensorStorageMetadata(TensorProperties(layout.dtype), torch.Size(layout.shape), chunks)


def _read_rows(
    folder: Path, dtype: torch.dtype, chunk: TensorChunk, offsets: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """Read `shape` numbers of a chunk, from index `offsets` in it."""
    assert tuple(shape[1:]) == chunk.shape[1:], "tensors are sharded by their first dimension alone"
    rows = torch.empty(tuple(shape), dtype=dtype)
    row_bytes = torch.empty(chunk.shape[1:], dtype=dtype, device="meta").nbytes
    with (folder / chunk.file).open("rb") as file:
        file.seek(chunk.begin + (offsets[0] * row_bytes if offsets else 0))
        if file.readinto(as_bytes(rows)) != rows.nbytes:
            raise RunError(f"{folder / chunk.file} ended while it was read")
    return rows
