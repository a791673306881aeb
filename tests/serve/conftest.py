"""Tiny models, each behind a server of its own or all behind one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
import torch
import transformers
from asking import Started
from folders import HEADS, make
from tiny import randomise
from tokenizers import decoders, models, pre_tokenizers

from heedful.checkpoint import load, save
from heedful.checkpoint.attach import attach
from heedful.infer.engine import Engine
from heedful.serve.run import Running, background
from heedful.tokenizer import Tokenizer


def make_writer(folder: Path) -> Path:
    """A tiny decoder with letters for tokens."""
    letters = tokenizers.Tokenizer(
        models.WordLevel(
            {token: n for n, token in enumerate(["<pad>", "</s>", "<unk>", *"abcdefgh"])}, unk_token="<unk>"
        )
    )
    letters.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    letters.decoder = decoders.Fuse()
    letters.add_special_tokens(["<pad>", "</s>", "<unk>"])
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=48, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1
    )
    model = transformers.GPT2LMHeadModel(config)
    randomise(model)
    model.save_pretrained(folder)
    Tokenizer(letters, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}).save(folder)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder for each head, and one that embeds."""
    made = {name: make(tmp_path_factory.mktemp(name), name) for name in HEADS if name != "bare"}
    bare = make(tmp_path_factory.mktemp("bare"), "bare")
    made["embed"] = tmp_path_factory.mktemp("embed") / "model"
    save(attach(load(bare), "embedding"), made["embed"])
    made["write"] = make_writer(tmp_path_factory.mktemp("write"))
    return {name: str(path) for name, path in made.items()}


@pytest.fixture(scope="session")
def engines(folders: dict[str, str]) -> dict[str, Engine]:
    """The same models, alone."""
    return {name: Engine(Path(folder)) for name, folder in folders.items()}


@pytest.fixture(scope="session")
def served(folders: dict[str, str]) -> Iterator[Running]:
    """All of them behind one server."""
    with background(folders) as running:
        yield running


@pytest.fixture(scope="session")
def started(folders: dict[str, str]) -> Iterator[Started]:
    """The same as a process, which has to end well."""
    server = Started(*(f"{name}={folder}" for name, folder in folders.items()))
    yield server
    assert server.process.poll() is None
    assert server.stop() == 0
