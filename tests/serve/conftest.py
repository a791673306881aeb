"""Tiny models, engines for them, and servers in this process or in a process of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from heedful.checkpoint import load, save
from heedful.checkpoint.new_head import with_head
from heedful.infer.engine import Engine
from heedful.serve.run import RunningServer, background
from tests.support.http_client import ServerProcess
from tests.support.model_folders import HEADS, make_decoder, make_model_dir


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the folder of a model with each head, of an embedding model and of a decoder."""
    folders_by_name = {name: make_model_dir(tmp_path_factory.mktemp(name), name) for name in HEADS if name != "bare"}
    bare = make_model_dir(tmp_path_factory.mktemp("bare"), "bare")
    folders_by_name["embed"] = tmp_path_factory.mktemp("embed") / "model"
    save(with_head(load(bare), "embedding"), folders_by_name["embed"])
    folders_by_name["write"] = make_decoder(tmp_path_factory.mktemp("write"))
    return {name: str(path) for name, path in folders_by_name.items()}


@pytest.fixture(scope="session")
def engines(folders: dict[str, str]) -> dict[str, Engine]:
    """Return an engine for each model, by its name."""
    return {name: Engine(Path(folder)) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def served(folders: dict[str, str]) -> Iterator[RunningServer]:
    """A server in this process with all models."""
    with background(folders) as running:
        yield running


@pytest.fixture(scope="session")
def started(folders: dict[str, str]) -> Iterator[ServerProcess]:
    """A server in another process with all models; it has to exit with status 0."""
    server = ServerProcess(*(f"{name}={folder}" for name, folder in folders.items()))
    yield server
    assert server.process.poll() is None
    assert server.stop() == 0
