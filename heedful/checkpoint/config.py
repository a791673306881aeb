"""config.json of a model folder: `read_config` and `write_config`, which ask the family of its model_type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from heedful.errors import ModelError, did_you_mean, quoted
from heedful.families import FAMILIES
from heedful.families.config_reader import ConfigReader
from heedful.families.family import Family
from heedful.families.head_maps import CROSS_ENCODER_KEYS
from heedful.model.config import Head, ModelConfig, SentenceEmbedding

GENERATION = "generation_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class BundleConfig:
    """The configuration of a model folder: our configurations of model and head, and the files that were read."""

    family: str  # model_type
    model: ModelConfig
    head: Head | None = None
    hf_config: Mapping[str, object] = field(default_factory=dict)  # values of config.json; empty for a new model
    generation: Mapping[str, object] | None = None  # values of generation_config.json, if the folder has this file


def read_config(
    values: Mapping[str, object], source: str, *, head: str | None = None, ignore: Iterable[str] = ()
) -> BundleConfig:
    """Read the values of a config.json; every key is read, known not to matter, or an error.

    Args:
        values: Values of the file.
        source: Name of the file, for error messages.
        head: Kind of head to read. If None, the one that `architectures` names.
        ignore: Unknown keys to ignore.

    Raises:
        ModelError: If the model_type, a key or a value is unknown.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        close = did_you_mean(model_type, list(FAMILIES)) if isinstance(model_type, str) else ""
        raise ModelError(f"{source}: model_type is {quoted(model_type)}{close}; Heedful reads {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    reader = ConfigReader(values, source)
    head_map = family.heads[_architecture(family, values, source, head)]
    model = head_map.used_config(family.read(reader))
    head_config = head_map.read(reader, model)
    hf_config = reader.check_all_read(family.ignored_keys, ignore)
    return BundleConfig(family=model_type, model=model, head=head_config, hf_config=hf_config)


def _architecture(family: Family, values: Mapping[str, object], source: str, head: str | None) -> str:
    """Return the HF architecture that config.json names, or that of a kind of head."""
    if head is not None:
        kinds = family.kinds()
        if head not in kinds:
            known = ", ".join(kinds)
            raise ModelError(f"{source}: {head!r} is no head{did_you_mean(head, list(kinds))}; this family has {known}")
        return kinds[head]
    named = values.get("architectures") or [family.bare]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in list(family.heads):
        raise ModelError(f"{source}: architectures is {quoted(named)}; expected one of {', '.join(family.heads)}")
    return str(named[0])


def write_config(config: BundleConfig) -> dict[str, object]:
    """Return the values of a config.json. If nothing changed since reading, they are the values that were read."""
    family = FAMILIES[config.family]
    dropped = ("torch_dtype", "auto_map")  # the old name of dtype; names of code that is not saved
    read_values = {name: value for name, value in config.hf_config.items() if name not in dropped}
    architecture = family.architecture(config.model, config.head)
    head_map = family.heads[architecture]
    if read_values and _describe_same_model(read_values, config, architecture):
        return read_values
    values = family.write(config.model)
    if config.head is not None and not isinstance(config.head, SentenceEmbedding):
        values |= head_map.write(config.head)
    head_keys = {"id2label", "label2id", "num_labels", "problem_type", "head", *CROSS_ENCODER_KEYS}
    unchanged = {name: value for name, value in read_values.items() if name not in head_keys}
    return unchanged | values | {"model_type": config.family, "architectures": [architecture]}


def _describe_same_model(values: Mapping[str, object], config: BundleConfig, architecture: str) -> bool:
    """Return whether values of a config.json describe the model and the head of a config, with its HF architecture."""
    family = FAMILIES[config.family]
    head_map = family.heads[architecture]
    if (values.get("architectures") or [family.bare]) != [architecture]:
        return False
    reader = ConfigReader(values, "")
    if head_map.used_config(family.read(reader)) != config.model:
        return False
    has_no_hf_head = isinstance(config.head, SentenceEmbedding | None)
    return has_no_hf_head or head_map.read(reader, config.model) == config.head
