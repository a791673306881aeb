"""The clock of a model: how it knows where a token stands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heedful.checkpoint import Loaded
from heedful.model.classic_config import ClassicConfig, Recurrent, Writer
from heedful.model.config import Buckets, Learned, Rotary, Shaw, Sinusoidal, StackConfig, TransformerXl
from heedful.model.stack import Stack
from heedful.nn.positions import BucketRelation, ShawRelation, buckets, sinusoid

ORDER = (
    "A recurrent net reads one token after another, so each state knows what came before; it needs no clock, and has "
    "no two places at once."
)
PLACES = 128  # that are shown
FAR = 64  # distances in each direction


def positions_view(loaded: Loaded, places: int = PLACES) -> list[dict[str, Any]]:
    """What a model has for positions, each as {"name", "about", "rows"...}; tensors stay tensors."""
    found = []
    with torch.no_grad():
        table = loaded.model.embedding.config.positions
        match table:
            case Learned(count=count, offset=offset):
                weight = loaded.model.embedding.positions.weight[offset : offset + min(places, count - offset)]
                about = f"A trained vector for each of {count - offset} places, added to the token's vector."
                found.append({"name": "Learned table", "about": about, **_bands(weight)})
            case Sinusoidal(layout=layout, base=base, offset=offset, width=width):
                size = width or loaded.model.embedding.config.width
                waves = sinusoid(torch.arange(offset, offset + places), size, layout, base)
                about = "Sines and cosines of growing wavelength, added to the token's vector: no place needs training."
                found.append({"name": "Sinusoids", "about": about, **_bands(waves)})
        for stack in (loaded.model.encoder, loaded.model.decoder):
            if stack is not None and stack.config.relation is not None:
                found.append(_relation(stack, places))
    if isinstance(config := loaded.config.model, ClassicConfig):
        nets = isinstance(config.reader, Writer) or isinstance(config.reader.over, Recurrent)
        found += [{"name": "Order itself", "about": ORDER}] if nets else []
    return found


def _bands(table: Tensor) -> dict[str, Any]:
    """The table, its dot products, and the mean dot product (of unit vectors) at each distance."""
    unit = torch.nn.functional.normalize(table.double() - table.double().mean(0), dim=-1)
    dots = unit @ unit.T
    distance = torch.stack([dots.diagonal(gap).mean() for gap in range(min(FAR, len(table)))])
    return {"bands": table, "dots": dots, "distance": distance}


def _relation(stack: Stack, places: int) -> dict[str, Any]:
    config: StackConfig = stack.config
    where = stack.part.capitalize()
    gaps = torch.arange(-FAR, 1 if config.causal else FAR + 1)
    match config.relation:
        case Rotary(base=base):
            waves = sinusoid(torch.arange(places), config.head_width, "halves", base)
            about = (
                "Queries and keys are turned by angles that grow with the place, each pair of numbers at its own pace; "
                "a score then depends on the distance alone. The curve is the product of two equal vectors so turned."
            )
            return {"name": f"{where}: rotary", "about": about, "bands": waves, "distance": _turned(config, base)}
        case Buckets(count=count, reach=reach):
            (relation,) = stack.relations
            assert isinstance(relation, BucketRelation)
            numbers = buckets(gaps, count, reach, config.causal)
            about = (
                f"Distances fall into {count} buckets, near ones exact and far ones coarse, up to {reach}; each head "
                "has a trained number for each bucket, which is added to its scores."
            )
            bias = relation.table(numbers).T
            return {"name": f"{where}: buckets", "about": about, "buckets": numbers, "bias": bias, "gaps": gaps}
        case Shaw(reach=reach):
            relation = stack.relations[0]
            assert isinstance(relation, ShawRelation)
            about = f"A trained vector for each distance up to {reach}, added to keys (here the first layer's)."
            found = _bands(relation.keys.weight)
            del found["distance"]  # these are distances themselves
            near = torch.arange(-reach, reach + 1)
            return {"name": f"{where}: relative vectors", "about": about, **found, "gaps": near}
        case TransformerXl():
            waves = sinusoid(gaps.flip(0), config.width, "halves")
            about = "Sinusoids of the distance, projected in each layer and multiplied with the query."
            return {"name": f"{where}: relative sinusoids", "about": about, "bands": waves, "gaps": gaps.flip(0)}
    raise AssertionError(config.relation)


def _turned(config: StackConfig, base: float) -> Tensor:
    """The mean over pairs of numbers of cos(angle) at each distance."""
    width = config.head_width
    pace = base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    return (torch.arange(FAR)[:, None] * pace).cos().mean(1)
