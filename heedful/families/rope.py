"""Rotary positions in config.json: rope_parameters (transformers 5), or rope_theta and rope_scaling (before).

The families with rotary positions call `read_rotary` or `read_scaling`. In this module, `reader` reads config.json, and
`rope_reader` the object under rope_parameters or rope_scaling.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from heedful.errors import ModelError
from heedful.families.config_reader import ConfigReader
from heedful.model.config import DynamicNtk, LinearScaling, Llama3Scaling, LongRope, Rotary, Scaling, Yarn

_WHY = "other scalings of rotary positions are not supported"
_KINDS = {kind: kind for kind in ("default", "linear", "ntk", "dynamic", "yarn", "llama3", "longrope")}
_MAX_BASE = 1e9


def read_rotary(reader: ConfigReader, default_base: float, head_width: int, key: str = "rope_theta") -> Rotary:
    """Read the base and the scaling of rotary positions.

    Args:
        default_base: Base if config.json has none.
        head_width: d, the dimension of a head.
        key: Key of the base outside of rope_parameters.

    Raises:
        ModelError: If the scaling is not supported.
    """
    base = reader.number(key, default_base, minimum=1.0, maximum=_MAX_BASE)
    base, scaling = read_scaling(reader, _rope_values(reader), base, head_width)
    return Rotary(base=base, scaling=scaling)


def _rope_values(reader: ConfigReader) -> Mapping[str, object]:
    """Read rope_parameters, otherwise rope_scaling; returns an empty object if both are missing."""
    for name in ("rope_parameters", "rope_scaling"):
        value = reader.values.get(name)
        accepted = [None, value] if isinstance(value, dict) else [None]  # null or any object
        reader.only(name, *accepted, why=_WHY)
    values = reader.values.get("rope_parameters") or reader.values.get("rope_scaling") or {}
    assert isinstance(values, dict)
    return values


def read_scaling(
    reader: ConfigReader, values: Mapping[str, object], base: float, head_width: int
) -> tuple[float, Scaling | None]:
    """Read the base and the scaling of rotary positions from rope_parameters or rope_scaling.

    "ntk" multiplies the base by the factor s and divides positions by s^(2/d), as the published code of GTE does. Other
    scalings are those of transformers.

    Args:
        reader: Reader of config.json, for max_position_embeddings.
        values: Value of rope_parameters or rope_scaling.
        base: Base if `values` has none.
        head_width: d, the dimension of a head.
    """
    rope_reader = ConfigReader(values, f"{reader.source}: rope_parameters or rope_scaling")
    kinds = [rope_reader.choice(name, _KINDS, None) for name in ("rope_type", "type")]
    default = "default" if not values or "rope_theta" in values else None
    kind = next((word for word in kinds if word is not None), default)
    rope_reader.only("partial_rotary_factor", 1.0, 1, None, why="all dimensions of a head are rotated here")
    base = rope_reader.number("rope_theta", base, minimum=1.0, maximum=_MAX_BASE)
    scaling: Scaling | None = None
    match kind:
        case "linear":
            scaling = LinearScaling(factor=rope_reader.number("factor", minimum=1.0, maximum=1e6))
        case "ntk":
            factor = rope_reader.number("factor", minimum=1.0, maximum=1e6)
            base, scaling = base * factor, LinearScaling(factor=factor ** (2 / head_width))
            rope_reader.only("mixed_b", None, why=_WHY)
        case "dynamic":
            rope_reader.only("original_max_position_embeddings", None, why=_WHY)
            if head_width < 4:
                rope_reader.only("rope_type", None, why="a head needs 4 dimensions for it")
            trained = reader.integer("max_position_embeddings")
            scaling = DynamicNtk(factor=rope_reader.number("factor", minimum=1.0, maximum=1e6), trained=trained)
        case "yarn":
            scaling = _read_yarn(reader, rope_reader)
        case "llama3":
            scaling = _read_llama3(reader, rope_reader)
        case "longrope":
            scaling = _read_longrope(reader, rope_reader, head_width)
        case _:
            rope_reader.only("rope_type", kind, why=_WHY)
            rope_reader.only("factor", 1.0, None, why=_WHY)
    rope_reader.check_all_read(frozenset({"rope_type", "type"} if kind else ()))
    return base, scaling


def _read_yarn(reader: ConfigReader, rope_reader: ConfigReader) -> Yarn:
    """Read the settings of YaRN."""
    trained = _read_trained(reader, rope_reader)
    factor = _read_factor(reader, rope_reader, trained)
    magnitude = rope_reader.number("attention_factor", None, maximum=1e3)
    mscale, mscale_all = (rope_reader.number(name, None, maximum=1e3) for name in ("mscale", "mscale_all_dim"))
    if magnitude is None and mscale and mscale_all:
        magnitude = _mscale(factor, mscale) / _mscale(factor, mscale_all)
    elif magnitude is None:
        magnitude = _mscale(factor, 1.0)
    fast, slow = (rope_reader.number(name, None, maximum=1e6) for name in ("beta_fast", "beta_slow"))
    return Yarn(
        factor=factor,
        trained=trained,
        magnitude=magnitude,
        fast=fast or 32.0,
        slow=slow or 1.0,
        truncate=rope_reader.flag("truncate", True),
    )


def _read_llama3(reader: ConfigReader, rope_reader: ConfigReader) -> Llama3Scaling:
    """Read the settings of Llama 3.1's scaling."""
    low = rope_reader.number("low_freq_factor", maximum=1e6)
    high = rope_reader.number("high_freq_factor", maximum=1e6)
    if low >= high:
        raise ModelError(
            f"{rope_reader.source}: low_freq_factor is {low:g}; expected less than high_freq_factor, {high:g}"
        )
    factor = rope_reader.number("factor", minimum=1.0, maximum=1e6)
    return Llama3Scaling(factor=factor, trained=_read_trained(reader, rope_reader), low=low, high=high)


def _read_longrope(reader: ConfigReader, rope_reader: ConfigReader, head_width: int) -> LongRope:
    """Read the settings of LongRoPE."""
    trained = _read_trained(reader, rope_reader)
    factor = _read_factor(reader, rope_reader, trained)
    magnitude = rope_reader.number("attention_factor", None, maximum=1e3)
    if magnitude is None:
        magnitude = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    short, long = (rope_reader.numbers(f"{name}_factor", head_width // 2, maximum=1e6) for name in ("short", "long"))
    return LongRope(short=short, long=long, trained=trained, magnitude=magnitude)


def _read_trained(reader: ConfigReader, rope_reader: ConfigReader) -> int:
    """Read the number of positions with which the model was trained before its positions were scaled."""
    original: int | None = rope_reader.integer("original_max_position_embeddings", None, minimum=2)
    return reader.integer("max_position_embeddings", minimum=2) if original is None else original


def _read_factor(reader: ConfigReader, rope_reader: ConfigReader, trained: int) -> float:
    """Read the factor, whose default is max_position_embeddings / trained."""
    positions: int | None = reader.integer("max_position_embeddings", None)
    factor: float | None = rope_reader.number("factor", None, minimum=1.0, maximum=1e6)
    return (positions or trained) / trained if factor is None else factor


def _mscale(factor: float, scale: float) -> float:
    """Return YaRN's factor of queries and keys (Peng et al. 2023, section 3.4); `scale` is DeepSeek-V2's addition."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def write_rotary(relation: Rotary) -> dict[str, object]:
    """Write rope_parameters, and max_position_embeddings if the scaling depends on it."""
    values: dict[str, object] = {"rope_parameters": write_scaling(relation.base, relation.scaling)}
    if isinstance(relation.scaling, DynamicNtk):
        values["max_position_embeddings"] = relation.scaling.trained
    return values


def write_scaling(base: float, scaling: Scaling | None) -> dict[str, object]:
    """Write the value of rope_parameters."""
    values: dict[str, object] = {"rope_theta": base, "rope_type": "default"}
    match scaling:
        case LinearScaling(factor=factor):
            values |= {"rope_type": "linear", "factor": factor}
        case DynamicNtk(factor=factor):
            values |= {"rope_type": "dynamic", "factor": factor}
        case Yarn():
            values |= {
                "rope_type": "yarn",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.trained,
                "attention_factor": scaling.magnitude,
                "beta_fast": scaling.fast,
                "beta_slow": scaling.slow,
                "truncate": scaling.truncate,
            }
        case Llama3Scaling():
            values |= {
                "rope_type": "llama3",
                "factor": scaling.factor,
                "original_max_position_embeddings": scaling.trained,
                "low_freq_factor": scaling.low,
                "high_freq_factor": scaling.high,
            }
        case LongRope():
            values |= {
                "rope_type": "longrope",
                "short_factor": list(scaling.short),
                "long_factor": list(scaling.long),
                "original_max_position_embeddings": scaling.trained,
                "attention_factor": scaling.magnitude,
            }
    return values
