"""A family of models that a user registers: a reader of its config.json and a table of names are all it needs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import heedful
from heedful.errors import HeedfulError
from heedful.families import FAMILIES, head_maps, register, unregister
from heedful.families.config_reader import ConfigReader, activation_name, read_activation
from heedful.families.family import Family
from heedful.families.names import CONCAT, NameRow, NameTable, name_rows
from heedful.model.config import EmbeddingConfig, ModelConfig, Sinusoidal, StackConfig
from tests.support.model_folders import VOCABULARY

MODEL_TYPE = "toy"
WIDTH, INNER, LAYERS = 32, 48, 2

# -- the family "toy" -------------------------------------------------------------------------------------------------


def read(reader: ConfigReader) -> ModelConfig:
    """Describe an encoder with sinusoidal positions and with norms before its sublayers."""
    width, heads = reader.integer("dim"), reader.integer("heads")
    reader.divides("heads", heads, "dim", width)
    return ModelConfig(
        embedding=EmbeddingConfig(vocabulary=reader.integer("vocab"), width=width, positions=Sinusoidal()),
        encoder=StackConfig(
            width=width,
            layers=reader.integer("depth"),
            heads=heads,
            head_width=width // heads,
            inner_width=reader.integer("inner"),
            activation=read_activation(reader, "act"),
            norm_at="pre",
            final_norm=True,
        ),
    )


def write(model: ModelConfig) -> dict[str, Any]:
    encoder = model.encoder
    assert encoder is not None
    sizes = {"dim": encoder.width, "heads": encoder.heads, "depth": encoder.layers, "inner": encoder.inner_width}
    return {"vocab": model.embedding.vocabulary, "act": activation_name(encoder.activation), **sizes}


LAYER, BLOCK = "net.layer{}.", "encoder.blocks.{}."
BODY = NameTable(
    rows=(
        NameRow((f"{LAYER}q", f"{LAYER}k", f"{LAYER}v"), f"{BLOCK}attention.qkv", CONCAT),
        *name_rows(
            ("net.words", "embedding.tokens"),
            (f"{LAYER}norm1", f"{BLOCK}attention_norm"),
            (f"{LAYER}o", f"{BLOCK}attention.out"),
            (f"{LAYER}norm2", f"{BLOCK}mlp_norm"),
            (f"{LAYER}up", f"{BLOCK}mlp.up"),
            (f"{LAYER}down", f"{BLOCK}mlp.down"),
            ("net.norm", "encoder.norm"),
        ),
    )
)
FAMILY = Family(
    prefix="net.",
    read=read,
    write=write,
    body=lambda model: BODY,
    heads={
        "ToyModel": head_maps.bare(),
        "ToyClassifier": head_maps.classes(("dense", "head.first.dense"), ("out", "head.out")),
    },
)

# -- its models are loaded, saved and trained -------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    register(MODEL_TYPE, FAMILY)
    yield
    unregister(MODEL_TYPE)


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of the bare model's tensors by their names in a folder."""
    linears = dict.fromkeys("qkvo", (WIDTH, WIDTH)) | {"up": (INNER, WIDTH), "down": (WIDTH, INNER)}
    norms = ["norm", *(f"layer{layer}.norm{index}" for layer in range(LAYERS) for index in (1, 2))]
    shapes: dict[str, tuple[int, ...]] = {"words.weight": (len(VOCABULARY), WIDTH)}
    for norm in norms:
        shapes |= {f"{norm}.weight": (WIDTH,), f"{norm}.bias": (WIDTH,)}
    for layer in range(LAYERS):
        for name, (outputs, inputs) in linears.items():
            shapes |= {f"layer{layer}.{name}.weight": (outputs, inputs), f"layer{layer}.{name}.bias": (outputs,)}
    return shapes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy")
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) / 8 for name, shape in shapes().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = {"model_type": MODEL_TYPE, "architectures": ["ToyModel"], "vocab": len(VOCABULARY), "dim": WIDTH}
    config |= {"heads": 4, "depth": LAYERS, "inner": INNER, "act": "gelu", "dtype": "float32"}
    (path / "config.json").write_text(json.dumps(config))
    (path / "vocab.txt").write_text("".join(f"{token}\n" for token in VOCABULARY))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 48})
    )
    return path


def test_its_folder_is_loaded_and_saved_bitwise(folder: Path, tmp_path: Path) -> None:
    loaded = heedful.load(folder)
    assert loaded.config.family == MODEL_TYPE
    heedful.save(loaded, tmp_path / "again")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "again/config.json").read_text()) == json.loads((folder / "config.json").read_text())


def test_it_is_fine_tuned_and_predicts(folder: Path, tmp_path: Path) -> None:
    lines = "".join(f"the cat {'sat' if row % 2 else 'ran'},{('no', 'yes')[row % 2]}\n" for row in range(16))
    (tmp_path / "data.csv").write_text("text,label\n" + lines)
    overrides = {"max_steps": 2, "batch_size": 8, "precision": "float32"}
    result = heedful.finetune("classify", tmp_path / "data.csv", tmp_path / "run", model=folder, overrides=overrides)
    assert result.status == "completed"
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert (config["model_type"], config["architectures"]) == (MODEL_TYPE, ["ToyClassifier"])
    (answer,) = heedful.Engine(tmp_path / "run").predict(["the cat sat"], heedful.Classification)
    assert answer.label in ("no", "yes")


def test_a_model_type_is_registered_once() -> None:
    with pytest.raises(HeedfulError, match='a family with the model_type "bert" is registered already'):
        register("bert", FAMILY)
    assert FAMILIES[MODEL_TYPE] is FAMILY
