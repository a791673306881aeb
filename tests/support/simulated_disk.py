"""A simulated disk, which lists what a power cut may leave of files that heedful/atomic_io.py writes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from heedful import atomic_io

# functions of atomic_io that change the disk
OPERATIONS = ("_open", "_write", "_fsync", "_mkdir", "_rename", "_remove")
Edit = tuple[str | None, str | None, Any]  # of a folder: old name, new name and node, see Folder


class File:
    """A file of a simulated disk: its current contents, and those of the last fsync."""

    def __init__(self) -> None:
        self.current = self.synced = b""


class Folder:
    """A folder of a simulated disk: its current entries, those of the last fsync, and the edits between the two.

    An entry maps a name to a File or a Folder (a node). An edit is (old name, new name, node): creating a node has no
    old name, removing it no new one, and renaming has both.
    """

    def __init__(self) -> None:
        self.current: dict[str, Any] = {}
        self.synced: dict[str, Any] = {}
        self.edits: list[Edit] = []

    def edit(self, old: str | None, new: str | None, node: Any) -> None:
        """Add, remove or rename a node."""
        self.edits.append((old, new, node))
        self.current = apply_edits(self.current, [self.edits[-1]])


def apply_edits(entries: dict[str, Any], edits: list[Edit]) -> dict[str, Any]:
    """Return the entries of a folder after some edits."""
    entries = dict(entries)
    for old, new, node in edits:
        if old is not None and entries.get(old) is node:
            del entries[old]
        if new is not None:
            entries[new] = node
    return entries


class Disk:
    """A simulated disk. After a power cut, it has only what was synced, by an fsync of a file or of a folder.

    Of what was not synced, any part may be kept: of a folder any subset of its edits; of a file's new contents nothing,
    the first half, zeros of the full length, or all.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = Folder()
        self.handles: dict[int, Path] = {}

    def node(self, path: Path) -> Any:
        """Return the file or folder that is now at a path."""
        node: Any = self.top
        for name in path.relative_to(self.root).parts:
            node = node.current[name]
        return node

    def watch(self, patch: pytest.MonkeyPatch, after: Callable[[], None]) -> None:
        """Follow all operations of atomic_io, and call `after` after each of their smallest steps."""
        self.after = after
        for name in OPERATIONS:
            original = getattr(atomic_io, name)

            def operation(*arguments: Any, name: str = name, original: Any = original) -> Any:
                result = original(*arguments)
                # the method of the same name, with the arguments and the result of the operation
                getattr(self, name)(*arguments, *([] if result is None else [result]))
                after()
                return result

            patch.setattr(atomic_io, name, operation)

    def _open(self, path: Path, flags: int, handle: int) -> None:
        self.handles[handle] = path
        if flags & os.O_CREAT:
            self.node(path.parent).edit(None, path.name, File())

    def _write(self, handle: int, data: memoryview) -> None:
        self.node(self.handles[handle]).current += bytes(data)

    def _fsync(self, handle: int) -> None:
        node = self.node(self.handles[handle])
        node.synced = node.current
        if isinstance(node, Folder):
            node.edits = []

    def _mkdir(self, path: Path) -> None:
        self.node(path.parent).edit(None, path.name, Folder())

    def _rename(self, path: Path, target: Path) -> None:
        assert path.parent == target.parent
        self.node(path.parent).edit(path.name, target.name, self.node(path))

    def _remove(self, path: Path) -> None:
        node = self.node(path)
        for name, inner in list(node.current.items()) if isinstance(node, Folder) else ():
            node.edit(name, None, inner)
            self.after()
        self.node(path.parent).edit(path.name, None, node)

    def states_after_a_power_cut(self) -> Iterator[dict[str, bytes | None]]:
        """Yield what may be on the disk after a power cut now: the contents of each path, None for a folder."""
        folders: list[Folder] = []
        to_visit: list[Any] = [self.top]
        while to_visit:
            if isinstance(node := to_visit.pop(), Folder) and node not in folders:
                folders.append(node)
                to_visit += [*node.synced.values(), *(edited for _, _, edited in node.edits)]
        for kept_edits in itertools.product(*(subsets(folder.edits) for folder in folders)):
            entries = {
                id(folder): apply_edits(folder.synced, edits) for folder, edits in zip(folders, kept_edits, strict=True)
            }
            for contents_of in (
                lambda file: file.synced,
                lambda file: file.current[: (len(file.synced) + len(file.current)) // 2],
                lambda file: file.synced + bytes(len(file.current) - len(file.synced)),
                lambda file: file.current,
            ):
                yield dict(list_paths(self.top, entries, contents_of, ""))


def subsets(edits: list[Any]) -> list[list[Any]]:
    """Return all sublists of a list."""
    return [list(itertools.compress(edits, keep)) for keep in itertools.product((0, 1), repeat=len(edits))]


def list_paths(
    folder: Folder, entries: dict[int, dict[str, Any]], contents_of: Callable[[File], bytes], prefix: str
) -> Iterator[tuple[str, bytes | None]]:
    """Yield the path and the contents of each file below a folder, and None for folders.

    Args:
        folder: The folder.
        entries: The entries of each folder, by the `id` of the folder.
        contents_of: Function from a file to its contents.
        prefix: The path of the folder, with a slash at its end.
    """
    for name, node in entries[id(folder)].items():
        if isinstance(node, Folder):
            yield prefix + name, None
            yield from list_paths(node, entries, contents_of, prefix + name + "/")
        else:
            yield prefix + name, contents_of(node)


def write_disk(root: Path, files: dict[str, bytes | None]) -> None:
    """Write files and folders, as `states_after_a_power_cut` yields them, below a new folder."""
    root.mkdir()
    for name, data in files.items():
        if data is None:
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)
