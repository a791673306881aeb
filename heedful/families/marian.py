"""Marian (Junczys-Dowmunt et al. 2018, arXiv:1804.00344), translation models of OPUS-MT: BART with sinusoids.

There is no norm after the embedding. The decoder starts with the padding token.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from heedful.families import bart, head_maps
from heedful.families.config_reader import ConfigReader
from heedful.families.family import Family
from heedful.families.names import NameTable
from heedful.model.config import ModelConfig, Sinusoidal
from heedful.nn.positions import sinusoid


def read(reader: ConfigReader) -> ModelConfig:
    """Read config.json."""
    separate = "separate token vectors of encoder and decoder are not supported"
    reader.only("share_encoder_decoder_embeddings", True, why=separate)
    vocabulary = reader.integer("vocab_size")
    reader.only("decoder_vocab_size", vocabulary, None, why=separate)
    return bart.read_parts(
        reader,
        positions=Sinusoidal(layout="halves", limit=reader.integer("max_position_embeddings", 1024)),
        default_start=reader.integer("pad_token_id", minimum=0, maximum=vocabulary - 1),
    )


def body(model: ModelConfig) -> NameTable:
    """Return the names of embeddings, encoder and decoder; the sinusoids are computed."""
    positions = model.embedding.positions
    assert isinstance(positions, Sinusoidal) and positions.limit is not None
    sinusoids = sinusoid(torch.arange(positions.limit), model.embedding.width, positions.layout, positions.base)
    table = bart.body(model)
    rows = tuple(row for row in table.rows if "embed_positions" not in row.hf[0])
    constants = {f"model.{part}.embed_positions.weight": sinusoids for part in bart.PARTS}
    return replace(table, rows=rows, constants=constants)


def size(vocabulary: int, layers: int, width: int) -> dict[str, object]:
    """Return a published configuration; the last token is the padding."""
    return bart.size(vocabulary, layers, width) | {
        "max_position_embeddings": 512,
        "activation_function": "swish",
        "scale_embedding": True,
        "pad_token_id": vocabulary - 1,
    }


FAMILY = Family(
    prefix="model.",
    read=read,
    write=bart.write,
    body=body,
    needs_decoder=True,
    ignored_keys=bart.IGNORED_KEYS,
    generation_defaults={"eos_token_id": 0, "forced_eos_token_id": 0},
    special_token_ids=bart.BART.special_token_ids,
    tokenizer_defaults={"tokenizer_class": "MarianTokenizer"},
    heads={"MarianModel": head_maps.bare(), "MarianMTModel": bart.language_model()},
    sizes={"opus-mt-en-de": size(58_101, 6, 512)},
)
