"""A checkpoint in parts: each rank writes what it has, and any number of ranks reads what it needs.

torch.distributed.checkpoint plans who writes and who reads which rows of which tensor; how that lies in files is said
here. A part is a safetensors file of some rows of some tensors, and `layout.json` says which rows lie where. Nothing is
pickled.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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
from heedful.errors import HeedfulError
from heedful.train.checkpoint import LAYOUT, safetensors_chunks
from heedful.train.ranks import Ranks

FileDigests = dict[str, dict[str, int | str]]


class TensorChunk(NamedTuple):
    """Where some rows of a tensor lie."""

    offsets: tuple[int, ...]  # of the first number in the whole tensor
    shape: tuple[int, ...]
    file: str
    begin: int  # the first byte in the file


class TensorLayout(NamedTuple):
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: tuple[TensorChunk, ...]


# -- what is written ----------------------------------------------------------------------------------------------


def write_shards(folder: Path, tensors: Mapping[str, Tensor], ranks: Ranks) -> FileDigests:
    """Write the parts of all ranks, and the layout; the measures of all files, on every rank."""
    writer = _Writer(folder)
    try:
        with ranks.told():
            save(dict(tensors), storage_writer=writer, process_group=ranks.channel)
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        if isinstance(first, OSError):
            raise OSError(first.errno, f"{os.strerror(first.errno or 0)} (rank {rank})") from None
        raise HeedfulError(f"rank {rank} could not save its part: {first}") from None
    measures: FileDigests = {}
    for found in ranks.gather(writer.measures):
        measures |= found
    return dict(sorted(measures.items()))


class _Writer(StorageWriter):
    """One file for each rank, and the layout by the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.measures: FileDigests = {}  # of what this rank wrote

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        names = [f"part-{number:05d}-of-{len(plans):05d}.safetensors" for number in range(1, len(plans) + 1)]
        return [replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Any] = {item.index.fqn: planner.resolve_data(item) for item in plan.items}
        assert len(tensors) == len(plan.items), "a rank has one piece of a tensor"
        head, *rest = safetensors_chunks(tensors)
        assert isinstance(head, bytes)
        if tensors:
            self.measures[plan.storage_data] = write_synced(self.folder / plan.storage_data, [head, *rest])
        places = json.loads(head[8:])
        written = []
        for item in plan.items:
            about = places[item.index.fqn]
            begin, end = (len(head) + each for each in about["data_offsets"])
            told = {"file": plan.storage_data, "begin": begin, "shape": about["shape"], "dtype": about["dtype"]}
            written.append(WriteResult(index=item.index, size_in_bytes=end - begin, storage_data=told))
        done: Future[list[WriteResult]] = Future()
        done.set_result(written)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        layout: dict[str, dict[str, Any]] = {}
        for each in (each for found in results for each in found):
            shape = list(metadata.state_dict_metadata[each.index.fqn].size)  # type: ignore[union-attr]
            about = layout.setdefault(each.index.fqn, {"dtype": each.storage_data["dtype"], "shape": shape, "rows": []})
            offsets = list(each.index.offset or [0] * len(shape))
            rows = {"offsets": offsets} | {name: each.storage_data[name] for name in ("shape", "file", "begin")}
            about["rows"].append(rows)
        text = json.dumps(dict(sorted(layout.items())), indent=1).encode() + b"\n"
        self.measures[LAYOUT] = write_synced(self.folder / LAYOUT, [text])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


# -- what is read -------------------------------------------------------------------------------------------------


def read_shards(folder: Path, slots: Mapping[str, TensorLayout], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a checkpoint whose files are sound: whole ones, or of those that are parted in `like` this rank's."""
    state: dict[str, Tensor] = {}
    for name, slot in slots.items():
        given = like.get(name)
        if isinstance(given, DTensor) and tuple(given.shape) == slot.shape and given.dtype == slot.dtype:
            state[name] = torch.empty_like(given, device="cpu")
        else:
            state[name] = torch.empty(slot.shape, dtype=slot.dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each rank reads by itself
        load(state, storage_reader=_Reader(folder, slots), no_dist=True)
    return {name: each.to_local() if isinstance(each, DTensor) else each for name, each in state.items()}


class _Reader(StorageReader):
    """Rows out of safetensors files."""

    def __init__(self, folder: Path, slots: Mapping[str, TensorLayout]) -> None:
        self.folder, self.slots = folder, slots

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing is kept."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(state_dict_metadata={name: _metadata(slot) for name, slot in self.slots.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is needed."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            index = item.storage_index
            rows = next(each for each in self.slots[index.fqn].rows if each.offsets == tuple(index.offset or ()))
            found = _rows(self.folder, self.slots[index.fqn].dtype, rows, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item)
            target.detach().copy_(found)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return False


def _metadata(slot: TensorLayout) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.shape)) for each in slot.rows]
    return TensorStorageMetadata(TensorProperties(slot.dtype), torch.Size(slot.shape), chunks)


def _rows(folder: Path, dtype: torch.dtype, rows: TensorChunk, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
    assert tuple(shape[1:]) == rows.shape[1:], "tensors are parted by their first dimension alone"
    found = torch.empty(tuple(shape), dtype=dtype)
    row = torch.empty(rows.shape[1:], dtype=dtype, device="meta").nbytes
    with (folder / rows.file).open("rb") as file:
        file.seek(rows.begin + (offsets[0] * row if offsets else 0))
        if file.readinto(as_bytes(found)) != found.nbytes:
            raise HeedfulError(f"{folder / rows.file} ended while it was read")
    return found
