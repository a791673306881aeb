"""Published sizes of families, for `heedful models`, and parameter counts, computed without memory for weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from heedful.checkpoint.bundle import ModelBundle
from heedful.checkpoint.config import BundleConfig, read_config
from heedful.families import FAMILIES
from heedful.model.initialise import skip_init


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedSize:
    """A published configuration and the parameter count of its bare model."""

    family: str
    name: str
    config: BundleConfig
    parameters: int


def published() -> Iterator[PublishedSize]:
    """Yield every published size of every family."""
    for model_type, family in FAMILIES.items():
        for name, values in family.sizes.items():
            config = _config(model_type, values, None)
            yield PublishedSize(family=model_type, name=name, config=config, parameters=_count(config))


def count_parameters(model_type: str, values: Mapping[str, object], head: str | None = None) -> int:
    """Return how many parameters the model of a config.json has; shared parameters are counted once.

    Args:
        model_type: The model_type of the family.
        values: Values of config.json.
        head: Kind of head. If None, the bare model is counted.
    """
    return _count(_config(model_type, values, head))


def _config(model_type: str, values: Mapping[str, object], head: str | None) -> BundleConfig:
    """Read a published configuration."""
    bare = {key: value for key, value in values.items() if key != "architectures"}
    return read_config(bare | {"model_type": model_type}, model_type, head=head)


def _count(config: BundleConfig) -> int:
    """Return the parameter count of a configuration."""
    with skip_init():
        return ModelBundle(config).count()
