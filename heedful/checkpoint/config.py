"""config.json of a model folder, read strictly and written back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from heedful.errors import HeedfulError, did_you_mean, quoted
from heedful.families import FAMILIES
from heedful.families.config_reader import ConfigReader
from heedful.families.family import Family
from heedful.model.config import Head, ModelConfig, SentenceEmbedding


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleConfig:
    """What a folder says: its model_type, our model and head, and config.json as it was read."""

    family: str
    model: ModelConfig
    head: Head | None = None
    hf_config: Mapping[str, Any] = field(default_factory=dict)


def read_config(
    values: Mapping[str, Any], source: str, *, head: str | None = None, ignore: Iterable[str] = ()
) -> BundleConfig:
    """Their config.json as ours; every key is read, known not to matter, or refused."""
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        close = did_you_mean(kind, list(FAMILIES)) if isinstance(kind, str) else ""
        raise HeedfulError(f"{source}: model_type is {quoted(kind)}{close}; Heedful reads {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    keys = ConfigReader(values, source)
    whole = family.read(keys)
    entry = family.heads[_architecture(family, values, source, head)]
    model = entry.used_config(whole)
    return BundleConfig(
        family=kind, model=model, head=entry.read(keys, model), hf_config=keys.done(family.ignored_keys, ignore)
    )


def _architecture(family: Family, values: Mapping[str, Any], source: str, head: str | None) -> str:
    if head is not None:
        if head not in family.kinds():
            raise HeedfulError(
                f"{source}: there is no head {head!r}{did_you_mean(head, list(family.kinds()))}; "
                f"this family has {', '.join(family.kinds())}"
            )
        chosen: str = family.kinds()[head]
        return chosen
    given = values.get("architectures") or [family.bare]
    if not isinstance(given, list) or len(given) != 1 or given[0] not in list(family.heads):
        raise HeedfulError(f"{source}: architectures is {quoted(given)}; expected one of {', '.join(family.heads)}")
    return str(given[0])


def write_config(config: BundleConfig) -> dict[str, Any]:
    """Our config as their config.json; one that was only read comes out as it went in."""
    family = FAMILIES[config.family]
    origin = {name: value for name, value in config.hf_config.items() if name != "torch_dtype"}
    architecture = family.architecture(config.model, config.head)
    entry = family.heads[architecture]
    if origin and (origin.get("architectures") or [family.bare]) == [architecture]:
        keys = ConfigReader(origin, "")
        same_model = entry.used_config(family.read(keys)) == config.model
        no_change = isinstance(config.head, SentenceEmbedding | None) or entry.read(keys, config.model) == config.head
        if same_model and no_change:
            return origin
    written = family.write(config.model)
    if config.head is not None and not isinstance(config.head, SentenceEmbedding):
        written |= entry.write(config.head)
    stale = {"id2label", "label2id", "num_labels", "problem_type", "head"}  # of the head that was read
    kept = {name: value for name, value in origin.items() if name not in stale}
    return kept | written | {"model_type": config.family, "architectures": [architecture]}
