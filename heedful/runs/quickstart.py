"""A first look: a tiny model on a few sentences, packed into one batch and one sentence at a time."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import torch

from heedful.checkpoint import Config, create, load, save
from heedful.errors import HeedfulError
from heedful.model.config import EmbeddingConfig, Learned, MaskedTokens, ModelConfig, StackConfig
from heedful.tokenizer import Tokenizer, TokenizerSettings, train

SHOWN = (0, 2, 4, 15, 27, 39, 40)  # sentences that are run: long ones and a very short one
MARK = ".gitignore"
MARKED = "# made by heedful quickstart, which may replace this folder\n*\n"
LONGEST = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Sentence:
    """One sentence, and how far its states in the packed batch are from its states alone."""

    text: str
    tokens: int
    difference: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Quickstart:
    """What was made and measured."""

    folder: Path
    vocabulary: int
    parameters: int
    sentences: tuple[Sentence, ...]

    @property
    def padding(self) -> float:
        """How many more rows padding to the longest sentence would have cost, as a share of the rows."""
        lengths = [sentence.tokens for sentence in self.sentences]
        return max(lengths) * len(lengths) / sum(lengths) - 1


def corpus() -> list[str]:
    """The sentences that ship with Heedful."""
    text = (files("heedful") / "assets" / "sentences.txt").read_text(encoding="utf-8")
    return text.splitlines()


def quickstart(folder: Path) -> Quickstart:
    """Train a tokenizer, make a model with random weights, save and load it, and run it both ways."""
    texts = corpus()
    tokenizer = train(texts, TokenizerSettings(vocabulary=400, max_length=LONGEST))
    made = create(Config(family="heedful", model=tiny(tokenizer), head=MaskedTokens()), tokenizer)
    mark = folder / MARK
    ours = mark.is_file() and mark.read_bytes() == MARKED.encode()
    if folder.exists() and not ours and (not folder.is_dir() or any(folder.iterdir())):
        raise HeedfulError(f"{folder} exists, and no quickstart made it: give another folder with --out")
    save(made, folder, overwrite=ours)
    mark.write_text(MARKED, encoding="utf-8")
    loaded = load(folder)
    assert loaded.tokenizer is not None
    chosen = [texts[number] for number in SHOWN]
    with torch.inference_mode():
        batch = loaded.tokenizer.pack(chosen)
        together = batch.unpack(loaded.model(batch))
        alone = [loaded.model(loaded.tokenizer.pack([text])) for text in chosen]
    return Quickstart(
        folder=folder,
        vocabulary=tokenizer.size,
        parameters=loaded.count(),
        sentences=tuple(
            Sentence(text=text, tokens=len(one), difference=float((one - other).abs().max()))
            for text, one, other in zip(chosen, alone, together, strict=True)
        ),
    )


def tiny(tokenizer: Tokenizer) -> ModelConfig:
    """Two layers of width 64."""
    return ModelConfig(
        embedding=EmbeddingConfig(
            vocabulary=tokenizer.size,
            width=64,
            positions=Learned(count=LONGEST),
            types=2,
            padding=tokenizer.special.pad,
            norm="layer",
        ),
        encoder=StackConfig(width=64, layers=2, heads=4, head_width=16, inner_width=256),
    )
