"""Representations of positions in a model: tables, sinusoids, rotations or distance biases, as tensors to plot.

The page and `heedful look --positions` show them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from heedful.checkpoint import ModelBundle
from heedful.model.classic_config import ClassicConfig, Recurrent, RecurrentSeq2Seq
from heedful.model.config import Learned, ModelConfig, Sinusoidal
from heedful.model.embedding import EmbeddingLayer
from heedful.model.stack import Stack, Transformer
from heedful.nn.positions import (
    BucketedPosition,
    DisentangledPosition,
    RotaryPosition,
    ShawPosition,
    TransformerXlPosition,
    distance_buckets,
    sinusoid,
)

RECURRENT_DESCRIPTION = (
    "A recurrent network reads one token after another, so that each state depends on the order of the tokens before "
    "it; it needs no positions, and cannot process tokens in parallel."
)
MAX_POSITIONS = 128  # maximum positions in a view
MAX_DISTANCE = 64  # maximum distance in a view, in each direction


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PositionsView:
    """One way in which a model represents positions, or distances: key position - query position.

    Tensors by name:
        "vectors" [n, width]: the vectors of positions 0 to n - 1, or of "distances" if these are present.
        "similarity" [n, n]: cosine similarities of these vectors after their mean is subtracted.
        "similarity_by_distance" [m]: mean similarity of two positions that are 0 to m - 1 tokens apart.
        "distances" [n]: the distances that "vectors", "buckets" and "bias" describe.
        "buckets" [n]: the bucket of each distance.
        "bias" [heads, n]: what is added to the attention scores at each distance.
    """

    name: str
    description: str
    tensors: dict[str, Tensor] = field(default_factory=dict)


def positions_view(loaded: ModelBundle, max_positions: int = MAX_POSITIONS) -> list[PositionsView]:
    """Return the ways in which a model represents positions; the list may be empty."""
    model = loaded.model
    with torch.no_grad():
        views = _embedding_views(model, max_positions)
        for stack in (model.encoder, model.decoder):
            if stack is not None and stack.config.relation is not None:
                views.append(_relation_view(stack, max_positions))
    if _is_recurrent(loaded.config.model):
        views.append(PositionsView(name="Order itself", description=RECURRENT_DESCRIPTION))
    return views


def _is_recurrent(config: ModelConfig) -> bool:
    """Return whether a recurrent network reads the tokens."""
    if not isinstance(config, ClassicConfig):
        return False
    return isinstance(config.reader, RecurrentSeq2Seq) or isinstance(config.reader.over, Recurrent)


def _embedding_views(model: Transformer, max_positions: int) -> list[PositionsView]:
    """Return how the embedding layers represent positions; encoder and decoder apart if their positions differ."""
    encoder, decoder = model.embedding, model.output_embedding
    same_sinusoids = (
        isinstance(encoder.config.positions, Sinusoidal) and encoder.config.positions == decoder.config.positions
    )
    embeddings = {"": encoder} if decoder is encoder or same_sinusoids else {"Encoder": encoder, "Decoder": decoder}
    views = (_embedding_view(embedding, part, max_positions) for part, embedding in embeddings.items())
    return [view for view in views if view is not None]


def _embedding_view(embedding: EmbeddingLayer, part: str, max_positions: int) -> PositionsView | None:
    """Return how an embedding layer represents positions, or None if it does not.

    Args:
        embedding: The embedding layer.
        part: "Encoder" or "Decoder", the first word of the name, or "" if the layer belongs to both.
        max_positions: Maximum number of positions.
    """
    positions = embedding.config.positions
    if positions is None:
        return None
    num_positions = min(max_positions, positions.limit or max_positions)
    rows = torch.arange(positions.offset, positions.offset + num_positions)
    use = "added to" if positions.join == "add" else "concatenated with"
    match positions:
        case Learned(limit=limit):
            name = "learned table"
            vectors = embedding.positions.weight[rows]
            description = f"A trained vector for each of {limit} positions, {use} the token's vector."
        case Sinusoidal(layout=layout, base=base, width=width):
            name = "sinusoids"
            vectors = sinusoid(rows, width or embedding.config.width, layout, base)
            description = f"Sines and cosines of growing wavelength, {use} the token's vector; they are not trained."
    similarity = _similarity(vectors)
    by_distance = [similarity.diagonal(distance).mean() for distance in range(min(MAX_DISTANCE, num_positions))]
    tensors = {"vectors": vectors, "similarity": similarity, "similarity_by_distance": torch.stack(by_distance)}
    name = f"{part}: {name}" if part else name.capitalize()
    return PositionsView(name=name, description=description, tensors=tensors)


def _similarity(vectors: Tensor) -> Tensor:
    """Return the cosine similarities of vectors after their mean is subtracted, in float64."""
    unit = torch.nn.functional.normalize(vectors.double() - vectors.double().mean(0), dim=-1)
    return unit @ unit.T


def _relation_view(stack: Stack, max_positions: int) -> PositionsView:
    """Return how attention represents positions, in layer 0 if layers differ."""
    config = stack.config
    relation = stack.relations[0]
    distances = torch.arange(-MAX_DISTANCE, 1 if config.causal else MAX_DISTANCE + 1)
    match relation:
        case RotaryPosition():
            name = "rotary"
            angles = torch.arange(max_positions)[:, None] * relation.frequencies()
            description = (
                "Queries and keys are rotated by angles proportional to the position, each pair of dimensions at its "
                "own frequency, so that a score depends on the distance alone. The curve is the cosine similarity of "
                "two equal vectors after rotation, if all their pairs of dimensions have the same length."
            )
            vectors = torch.cat([angles.sin(), angles.cos()], -1)
            tensors = {"vectors": vectors, "similarity_by_distance": angles[:MAX_DISTANCE].cos().mean(1)}
        case BucketedPosition(count=count, reach=reach):
            name = "buckets"
            description = (
                f"Distances fall into {count} buckets, exact for near ones and coarse for far ones, up to {reach}; "
                "each head has a trained bias for each bucket, which is added to its scores."
            )
            buckets = distance_buckets(distances, count, reach, config.causal)
            tensors = {"distances": distances, "buckets": buckets, "bias": relation.table(buckets).T}
        case ShawPosition(reach=reach):
            name = "relative vectors"
            description = f"A trained vector for each distance up to {reach}, added to the keys; layer 0 is shown."
            vectors = relation.keys.weight
            tensors = {"distances": torch.arange(-reach, reach + 1), "vectors": vectors}
            tensors["similarity"] = _similarity(vectors)
        case TransformerXlPosition(reach=max_distance):
            name = "relative sinusoids"
            description = (
                "Sinusoids of the query position minus the key position. Each layer projects them, and adds their "
                "products with the queries to the scores."
            )
            steps = -distances if max_distance is None else -distances.clamp(-max_distance, max_distance)
            vectors = sinusoid(steps, config.width, "halves")
            tensors = {"distances": distances, "vectors": vectors}
        case DisentangledPosition(buckets=count, reach=reach):
            name = "vectors of distances"
            description = (
                f"A trained vector for each of {count} buckets of distances on each side, exact for near ones and "
                f"coarse for far ones, up to {reach}. Each layer projects them by its own query and key matrices, and "
                "adds their products with keys and queries to the scores."
            )
            vectors = relation.norm(relation.table.weight[relation.rows(-distances)])
            tensors = {"distances": distances, "vectors": vectors, "similarity": _similarity(vectors)}
        case _:
            raise AssertionError(relation)
    return PositionsView(name=f"{stack.part.capitalize()}: {name}", description=description, tensors=tensors)
