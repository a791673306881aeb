"""The original Transformer (Vaswani et al. 2017): its published sizes, and its configuration at any size.

`families/heedful.py` publishes these sizes, and seq2seq models are trained from scratch in them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from heedful.model.config import EmbeddingConfig, ModelConfig, Sinusoidal, StackConfig, Xavier


@dataclass(frozen=True, kw_only=True, slots=True)
class VaswaniSize:
    """The common size of encoder and decoder."""

    layers: int
    width: int
    heads: int
    inner: int
    dropout: float


PUBLISHED_SIZES = {  # table 3 of the paper
    "base": VaswaniSize(layers=6, width=512, heads=8, inner=2048, dropout=0.1),
    "big": VaswaniSize(layers=6, width=1024, heads=16, inner=4096, dropout=0.3),
}


def vaswani_config(size: VaswaniSize, vocabulary: int) -> ModelConfig:
    """Return the configuration of the original Transformer (section 3).

    It has post-norm, sinusoidal positions, and one embedding for source, target and output.
    """
    encoder = StackConfig(
        width=size.width,
        layers=size.layers,
        heads=size.heads,
        head_width=size.width // size.heads,
        inner_width=size.inner,
        activation="relu",
        norm_eps=1e-6,
        dropout=size.dropout,
    )
    embedding = EmbeddingConfig(
        vocabulary=vocabulary,
        width=size.width,
        positions=Sinusoidal(),
        scale=size.width**0.5,
        dropout=size.dropout,
    )
    decoder = replace(encoder, causal=True, cross=True)
    return ModelConfig(embedding=embedding, encoder=encoder, decoder=decoder, initialisation=Xavier())
