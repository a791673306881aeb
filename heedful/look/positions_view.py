"""How a model represents positions: its tables, sinusoids, rotations or distance biases, as tensors to plot."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from heedful.checkpoint import ModelBundle
from heedful.model.classic_config import ClassicConfig, Recurrent, RecurrentSeq2Seq
from heedful.model.config import Buckets, Disentangled, Learned, Rotary, Shaw, Sinusoidal, StackConfig, TransformerXl
from heedful.model.stack import Stack
from heedful.nn.positions import (
    BucketedPosition,
    DisentangledPosition,
    RotaryPosition,
    ShawPosition,
    distance_buckets,
    sinusoid,
)

RECURRENT = (
    "A recurrent network reads one token after another, so that each state depends on the order of the tokens before "
    "it; it needs no positions, and cannot read two of them in parallel."
)
MAX_POSITIONS = 128  # positions that are shown
MAX_DISTANCE = 64  # distances that are shown in each direction


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PositionsView:
    """One way in which a model represents positions.

    Tensors by name: "bands" [positions, width], the vectors; "dots" [positions, positions], their dot products;
    "distance" [distances], the mean product at each distance; "gaps" [distances], the distances of "buckets" and
    "bias"; "buckets" [distances], bucket numbers; "bias" [heads, distances], what is added to scores.
    """

    name: str
    about: str
    tensors: dict[str, Tensor] = field(default_factory=dict)


def positions_view(loaded: ModelBundle, max_positions: int = MAX_POSITIONS) -> list[PositionsView]:
    """Return the ways in which a model represents positions; empty if it does not."""
    views = []
    with torch.no_grad():
        match loaded.model.embedding.config.positions:
            case Learned(count=count, offset=offset):
                shown = min(max_positions, count - offset)
                weight = loaded.model.embedding.positions.weight[offset : offset + shown]
                about = f"A trained vector for each of {count - offset} positions, added to the token's vector."
                views.append(PositionsView(name="Learned table", about=about, tensors=_table_tensors(weight)))
            case Sinusoidal(layout=layout, base=base, offset=offset, width=width):
                size = width or loaded.model.embedding.config.width
                waves = sinusoid(torch.arange(offset, offset + max_positions), size, layout, base)
                about = "Sines and cosines of growing wavelength, added to the token's vector; they are not trained."
                views.append(PositionsView(name="Sinusoids", about=about, tensors=_table_tensors(waves)))
        for stack in (loaded.model.encoder, loaded.model.decoder):
            if stack is not None and stack.config.relation is not None:
                views.append(_relation_view(stack, max_positions))
    if isinstance(config := loaded.config.model, ClassicConfig):
        is_recurrent = isinstance(config.reader, RecurrentSeq2Seq) or isinstance(config.reader.over, Recurrent)
        views += [PositionsView(name="Order itself", about=RECURRENT)] if is_recurrent else []
    return views


def _table_tensors(table: Tensor) -> dict[str, Tensor]:
    """Return a table of vectors, their dot products (of centred unit vectors) and their mean at each distance."""
    unit = torch.nn.functional.normalize(table.double() - table.double().mean(0), dim=-1)
    dots = unit @ unit.T
    distance = torch.stack([dots.diagonal(gap).mean() for gap in range(min(MAX_DISTANCE, len(table)))])
    return {"bands": table, "dots": dots, "distance": distance}


def _relation_view(stack: Stack, max_positions: int) -> PositionsView:
    config: StackConfig = stack.config
    part = stack.part.capitalize()
    gaps = torch.arange(-MAX_DISTANCE, 1 if config.causal else MAX_DISTANCE + 1)
    match config.relation:
        case Rotary():
            rotary = stack.relations[0]
            assert isinstance(rotary, RotaryPosition)
            angles = torch.arange(max_positions)[:, None] * rotary.frequencies()
            waves = torch.cat([angles.sin(), angles.cos()], -1)
            about = (
                "Queries and keys are rotated by angles proportional to the position, each pair of numbers at its own "
                "speed, so that a score depends on the distance alone. The curve is the product of two equal vectors "
                "after rotation."
            )
            tensors = {"bands": waves, "distance": angles[:MAX_DISTANCE].cos().mean(1)}
            return PositionsView(name=f"{part}: rotary", about=about, tensors=tensors)
        case Buckets(count=count, reach=reach):
            (relation,) = stack.relations
            assert isinstance(relation, BucketedPosition)
            numbers = distance_buckets(gaps, count, reach, config.causal)
            about = (
                f"Distances fall into {count} buckets, exact for near ones and coarse for far ones, up to {reach}; "
                "each head has a trained bias for each bucket, which is added to its scores."
            )
            tensors = {"buckets": numbers, "bias": relation.table(numbers).T, "gaps": gaps}
            return PositionsView(name=f"{part}: buckets", about=about, tensors=tensors)
        case Shaw(reach=reach):
            relation = stack.relations[0]
            assert isinstance(relation, ShawPosition)
            about = f"A trained vector for each distance up to {reach}, added to keys (those of the first layer)."
            tensors = _table_tensors(relation.keys.weight)
            del tensors["distance"]  # rows of the table are distances already
            tensors["gaps"] = torch.arange(-reach, reach + 1)
            return PositionsView(name=f"{part}: relative vectors", about=about, tensors=tensors)
        case TransformerXl():
            waves = sinusoid(gaps.flip(0), config.width, "halves")
            about = "Sinusoids of the distance, projected in each layer and multiplied with the query."
            tensors = {"bands": waves, "gaps": gaps.flip(0)}
            return PositionsView(name=f"{part}: relative sinusoids", about=about, tensors=tensors)
        case Disentangled(buckets=count, reach=reach):
            (relation,) = stack.relations
            assert isinstance(relation, DisentangledPosition)
            about = (
                f"A trained vector for each of {count} buckets of distances on each side, exact for near ones and "
                f"coarse for far ones, up to {reach}. Each layer projects them by its own query and key matrices, and "
                "adds their products with keys and queries to the scores."
            )
            tensors = _table_tensors(relation.norm(relation.table.weight[relation.rows(-gaps)]))
            del tensors["distance"]  # rows are distances already
            tensors["gaps"] = gaps
            return PositionsView(name=f"{part}: vectors of distances", about=about, tensors=tensors)
    raise AssertionError(config.relation)
