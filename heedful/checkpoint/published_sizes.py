"""How many parameters a configuration has, without allocating any."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from heedful.checkpoint.bundle import ModelBundle
from heedful.checkpoint.config import BundleConfig, read_config
from heedful.families import FAMILIES
from heedful.model.initialise import skip_init


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedSize:
    """A published configuration and the parameters of its bare model."""

    family: str
    name: str
    config: BundleConfig
    parameters: int


def published() -> Iterator[PublishedSize]:
    """Every published size of every family."""
    for kind, family in FAMILIES.items():
        for name, values in family.sizes.items():
            config = _config(kind, values, None)
            yield PublishedSize(family=kind, name=name, config=config, parameters=_count(config))


def count_parameters(model_type: str, values: Mapping[str, Any], head: str | None = None) -> int:
    """The exact count for a config.json with that head, or of the bare model; what is shared counts once."""
    return _count(_config(model_type, values, head))


def _config(model_type: str, values: Mapping[str, Any], head: str | None) -> BundleConfig:
    bare = {key: value for key, value in values.items() if key != "architectures"}
    return read_config(bare | {"model_type": model_type}, model_type, head=head)


def _count(config: BundleConfig) -> int:
    with skip_init():
        return ModelBundle(config).count()
