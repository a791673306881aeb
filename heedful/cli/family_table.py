"""The table of `heedful models --family`: parameters, objective, shared parameters, positions, results of families."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from heedful.checkpoint import read_config
from heedful.checkpoint.published_sizes import count_parameters
from heedful.cli.output import note, print_json, print_table
from heedful.families import FAMILIES
from heedful.families.family_facts import FAMILY_FACTS, FamilyFacts
from heedful.model.config import ModelConfig

if TYPE_CHECKING:
    from heedful.runs.results import JsonObject

RECORDS = Path(__file__).parents[2] / "benchmarks" / "results"  # exists in a checkout, but not in an installed package


class FamilyRow(TypedDict):
    """A row of the table. Values that are not known are "–"."""

    name: str
    paper: str
    parameters: dict[str, int]  # number of parameters of each size
    objective: str  # objective of pre-training
    shares: str  # parameters that parts of the model share
    positions: str  # representation of positions
    of: str  # size of the model with the published results
    published: str  # published results
    source: str  # source of the published results
    measured: str  # results of this project's benchmarks


def print_family_table(as_json: bool, records: Path = RECORDS) -> None:
    """Print the table of families.

    Args:
        as_json: Print JSON instead.
        records: Folder of recorded benchmark results.
    """
    families = [family_row(facts, records) for facts in FAMILY_FACTS]
    if as_json:
        return print_json(families)
    architectures = []
    for family in families:
        counts = "  ".join(f"{count / 1e6:,.1f} M" for count in family["parameters"].values())
        architectures.append([family["name"], counts, family["objective"], family["shares"], family["positions"]])
    print_table(architectures, head=["", "parameters", "objective", "shares", "positions"])
    print("")
    results = [[family["name"], family["of"], family["published"], family["source"]] for family in families]
    print_table(results, head=["", "of", "published", "source"])
    print("")
    print_table([[family["name"], family["measured"]] for family in families], head=["", "measured by Heedful"])
    note("Parameters of the bare models, in the order of the sizes that `heedful models` lists.")
    if not records.is_dir():
        note(f"There are no recorded results in {records}.")


def family_row(facts: FamilyFacts, records: Path) -> FamilyRow:
    """Return the row of a family. Parameters, sharing and positions come from its published configurations.

    Args:
        facts: Facts about the family that its configurations do not have.
        records: Folder of recorded benchmark results.
    """
    kind = facts.kind
    configs = FAMILIES[kind].sizes
    config = dict(configs[facts.sizes[0]]) | {"model_type": kind}
    model = read_config(config, kind).model
    return {
        "name": facts.name,
        "paper": facts.paper,
        "parameters": {size: count_parameters(kind, configs[size]) for size in facts.sizes},
        "objective": facts.objective,
        "shares": describe_sharing(model, tied=ties_embeddings(kind, config)),
        "positions": describe_positions(model),
        "of": facts.best or "–",
        "published": facts.results or "–",
        "source": facts.source or "–",
        "measured": "; ".join(line for name in facts.records for line in newest_record(name, records)) or "–",
    }


def ties_embeddings(kind: str, config: JsonObject) -> bool:
    """Return whether a language modelling head of the family is tied to the input embedding.

    Args:
        kind: Name of the family.
        config: A config.json of the family.
    """
    architectures = (name for name, entry in FAMILIES[kind].heads.items() if hasattr(entry.head, "tied"))
    heads = (read_config(config | {"architectures": [name]}, kind).head for name in architectures)
    return any(getattr(head, "tied", False) for head in heads)


def describe_sharing(model: ModelConfig, *, tied: bool) -> str:
    """Describe which parameters are shared between parts of the model."""
    stack = model.encoder or model.decoder
    assert stack is not None
    shared = []
    if stack.blocks is not None and stack.blocks < stack.layers:
        shared.append(f"{stack.blocks} block for all layers" if stack.blocks == 1 else f"{stack.blocks} blocks")
    if model.embedding.width != stack.width or model.embedding.always_project:
        shared.append(f"vectors {model.embedding.width} wide, projected")
    if model.encoder is not None and model.decoder is not None and model.decoder_embedding is None:
        shared.append("one embedding for both sides")
    if tied:
        shared.append("input and output embeddings")
    return ", ".join(shared) or "–"


def describe_positions(model: ModelConfig) -> str:
    """Describe how the model represents positions."""
    stack = model.encoder or model.decoder
    positions = model.embedding.positions or (stack.relation if stack is not None else None)
    descriptions = {
        "learned": "learned",
        "sinusoidal": "sinusoidal",
        "rotary": "rotary",
        "buckets": "distance buckets, in attention",
        "shaw": "relative vectors, in attention",
        "transformer_xl": "relative sinusoids, in attention",
    }
    return "none" if positions is None else descriptions[positions.kind]


def newest_record(name: str, records: Path) -> Iterator[str]:
    """Yield a summary of the newest recorded result of a benchmark, with its date, if there is one.

    Args:
        name: Name of the benchmark; its records are the files NAME-YEAR-....json.
        records: Folder of recorded results.
    """
    paths = sorted(records.glob(f"{name}-2*.json"))
    if not paths:
        return
    match json.loads(paths[-1].read_bytes()):
        case {"tables": list(tables), "machine": {"date": str(date)}}:  # a benchmark of speed
            speeds = [
                max(row["to_best_peer"]["median"] for row in table["rows"] if row["ours"] and "to_best_peer" in row)
                for table in tables
            ]
            yield f"{name}: {min(speeds):.2f} to {max(speeds):.2f} times the fastest peer's speed ({date})"
        case {"tables": {"plan": list(rows)}, "machine": {"date": str(date)}}:  # a benchmark of quality
            # in reverse order, so that the first row of each task remains
            by_task = {task: f"{task} {metric} {value}" for task, metric, value, *_ in reversed(rows)}
            yield f"{name}: all-MiniLM-L6-v2 with a fresh head, {', '.join(reversed(by_task.values()))} ({date})"
