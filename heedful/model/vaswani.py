"""The original Transformer (Vaswani et al. 2017): its published sizes, and one of any size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from heedful.model.config import EmbeddingConfig, ModelConfig, Sinusoidal, StackConfig, Xavier


@dataclass(frozen=True, kw_only=True, slots=True)
class VaswaniSize:
    """What its sizes differ in; encoder and decoder are alike."""

    layers: int
    width: int
    heads: int
    inner: int
    dropout: float


PUBLISHED_SIZES = {  # table 3
    "base": VaswaniSize(layers=6, width=512, heads=8, inner=2048, dropout=0.1),
    "big": VaswaniSize(layers=6, width=1024, heads=16, inner=4096, dropout=0.3),
}


def vaswani_config(shape: VaswaniSize, vocabulary: int) -> ModelConfig:
    """Norms after each residual sum, sines and cosines, one embedding for source, target and output (section 3.4)."""
    encoder = StackConfig(
        width=shape.width,
        layers=shape.layers,
        heads=shape.heads,
        head_width=shape.width // shape.heads,
        inner_width=shape.inner,
        activation="relu",
        norm_eps=1e-6,
        dropout=shape.dropout,
    )
    embedding = EmbeddingConfig(
        vocabulary=vocabulary,
        width=shape.width,
        positions=Sinusoidal(),
        scale=shape.width**0.5,
        dropout=shape.dropout,
    )
    decoder = replace(encoder, causal=True, cross=True)
    return ModelConfig(embedding=embedding, encoder=encoder, decoder=decoder, initialisation=Xavier())
