"""Rotary positions as config.json describes them: rope_parameters (transformers 5), rope_theta and rope_scaling (4)."""

from __future__ import annotations

from heedful.families.config_reader import ConfigReader
from heedful.model.config import Rotary

_WHY = "other ways to stretch rotary positions are not built"
_MAX_BASE = 1e9


def read_rotary(reader: ConfigReader, default_base: float, head_width: int, key: str = "rope_theta") -> Rotary:
    """Read the base of the rotary positions, and how they are stretched: linearly, by an NTK factor, or not at all.

    linear: positions are divided by the factor (Chen et al. 2023, arXiv:2306.15595). ntk: the base is multiplied by the
    factor s and positions are divided by s^(2/d), as the published code of GTE computes it.

    Args:
        default_base: Base if config.json names none.
        head_width: d, numbers of a head.
        key: Key of the base outside of rope_parameters.

    Raises:
        ModelError: If positions are stretched in another way.
    """
    base = reader.number(key, default_base, least=1.0, most=_MAX_BASE)
    for name in ("rope_parameters", "rope_scaling"):
        reader.only(name, None, *([reader.values[name]] if isinstance(reader.values.get(name), dict) else []), why=_WHY)
    described = reader.values.get("rope_parameters") or reader.values.get("rope_scaling") or {}
    assert isinstance(described, dict)
    part = ConfigReader(described, f"{reader.source}: rope_parameters or rope_scaling")
    words = {"default": "default", "linear": "linear", "ntk": "ntk"}
    kinds = [part.choice(name, words, None) for name in ("rope_type", "type")]
    kind = next(
        (word for word in kinds if word is not None), "default" if not described or "rope_theta" in described else None
    )
    part.only("partial_rotary_factor", 1.0, 1, None, why="all numbers of a head are rotated here")
    base = part.number("rope_theta", base, least=1.0, most=_MAX_BASE)
    stretch = 1.0
    if kind in ("linear", "ntk"):
        factor = part.number("factor", least=1.0, most=1e6)
        base, stretch = (base, factor) if kind == "linear" else (base * factor, factor ** (2 / head_width))
        part.only("mixed_b", None, why=_WHY)
    else:
        part.only("rope_type", kind, why=_WHY)
        part.only("factor", 1.0, None, why=_WHY)
    part.check_all_read(frozenset({"rope_type", "type"} if kind else ()))
    return Rotary(base=base, stretch=stretch)


def write_rotary(relation: Rotary) -> dict[str, object]:
    """Write rope_parameters."""
    values: dict[str, object] = {"rope_theta": relation.base, "rope_type": "default"}
    if relation.stretch != 1.0:
        values |= {"rope_type": "linear", "factor": relation.stretch}
    return {"rope_parameters": values}
