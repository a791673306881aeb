"""The family table: parameters, objective, sharing, positions, published results, and what was measured here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import heedful
from heedful.checkpoint import read_config
from heedful.checkpoint.published_sizes import count_parameters
from heedful.cli.output import note, print_table, write_json
from heedful.families import FAMILIES
from heedful.families.family_facts import PORTRAITS, Portrait
from heedful.model.config import ModelConfig

RECORDS = Path(heedful.__file__).parent.parent / "benchmarks" / "results"  # in a checkout; a package has none


def print_family_table(as_json: bool, records: Path = RECORDS) -> None:
    """Print it; parameters, sharing and positions are read off the configurations."""
    found = [family_facts(each, records) for each in PORTRAITS]
    if as_json:
        return write_json(found)
    head = ["", "parameters", "objective", "shares", "positions"]
    rows = []
    for each in found:
        counts = "  ".join(f"{count / 1e6:,.1f} M" for count in each["parameters"].values())
        rows.append([each["name"], counts, each["objective"], each["shares"], each["positions"]])
    print_table(rows, head=head)
    print("")
    rows = [[each["name"], each["of"], each["published"], each["source"]] for each in found]
    print_table(rows, head=["", "of", "published", "source"])
    print("")
    print_table([[each["name"], each["measured"]] for each in found], head=["", "measured by Heedful"])
    note("Parameters are of bare models, counted on them, in the order of the sizes that `heedful models` lists.")
    if not records.is_dir():
        note(f"There are no recorded results in {records}.")


def family_facts(portrait: Portrait, records: Path) -> dict[str, Any]:
    """One row."""
    kind, published = portrait.kind, FAMILIES[portrait.kind].sizes
    first = dict(published[portrait.sizes[0]]) | {"model_type": kind}
    model = read_config(first, kind).model
    return {
        "name": portrait.name,
        "paper": portrait.paper,
        "parameters": {name: count_parameters(kind, published[name]) for name in portrait.sizes},
        "objective": portrait.objective,
        "shares": describe_sharing(model, tied=ties_embeddings(kind, first)),
        "positions": describe_positions(model),
        "of": portrait.best or "–",
        "published": portrait.results or "–",
        "source": portrait.source or "–",
        "measured": "; ".join(each for name in portrait.records for each in newest_record(name, records)) or "–",
    }


def ties_embeddings(kind: str, config: dict[str, Any]) -> bool:
    """Whether the head that scores the vocabulary does so with the embedding that it reads."""
    names = (name for name, entry in FAMILIES[kind].heads.items() if hasattr(entry.head, "tied"))
    heads = (read_config(config | {"architectures": [name]}, kind).head for name in names)
    return any(getattr(head, "tied", False) for head in heads)


def describe_sharing(model: ModelConfig, *, tied: bool) -> str:
    """What several parts of the model share."""
    stack = model.encoder or model.decoder
    assert stack is not None
    told = []
    if stack.blocks is not None and stack.blocks < stack.layers:
        told.append(f"{stack.blocks} block for all layers" if stack.blocks == 1 else f"{stack.blocks} blocks")
    if model.embedding.width != stack.width or model.embedding.always_project:
        told.append(f"vectors {model.embedding.width} wide, projected")
    if model.encoder is not None and model.decoder is not None and model.decoder_embedding is None:
        told.append("one embedding for both sides")
    if tied:
        told.append("input and output embeddings")
    return ", ".join(told) or "–"


def describe_positions(model: ModelConfig) -> str:
    """How the model knows where words stand."""
    stack = model.encoder or model.decoder
    place = model.embedding.positions or (stack.relation if stack is not None else None)
    kinds = {
        "learned": "learned",
        "sinusoidal": "sines",
        "rotary": "rotary",
        "buckets": "buckets of distances, in attention",
        "shaw": "relative vectors, in attention",
        "transformer_xl": "sines of distances, in attention",
    }
    return "none" if place is None else kinds[place.kind]


def newest_record(name: str, records: Path) -> Iterator[str]:
    """What the newest record of that name says, with its date."""
    found = sorted(path for path in records.glob(f"{name}-2*.json"))
    if not found:
        return
    match json.loads(found[-1].read_bytes()):
        case {"tables": list(tables), "machine": {"date": str(date)}}:
            best = [
                max(row["to_best_peer"]["median"] for row in each["rows"] if row["ours"] and "to_best_peer" in row)
                for each in tables
            ]
            yield f"{name}: {min(best):.2f} to {max(best):.2f} times the fastest peer's speed ({date})"
        case {"tables": {"plan": list(rows)}, "machine": {"date": str(date)}}:
            told = {task: f"{task} {what} {number}" for task, what, number, *_ in reversed(rows)}
            yield f"{name}: all-MiniLM-L6-v2 with a fresh head, {', '.join(reversed(told.values()))} ({date})"
