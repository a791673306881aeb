"""`ObjectiveSpec`: the facts about a pre-training objective that commands, settings and the training need.

`pretrain.specs` has an `ObjectiveSpec` for each objective. This module imports nothing heavy, so that a wrong setting
is refused immediately.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, TypeVar

from heedful.errors import HeedfulError
from heedful.tokenizer.settings import Algorithm

if TYPE_CHECKING:
    from heedful.model.config import Pooling

SettingsT = TypeVar("SettingsT", bound="ObjectiveSettings")


class ObjectiveSettings:
    """Base class of the settings of a pre-training objective. The field `kind` is the name of the objective."""

    __slots__ = ()
    MEMBERS: ClassVar[list[type[ObjectiveSettings]]] = []  # the settings class of each registered objective
    kind: str

    @property
    def name(self) -> str:
        """The objective's name in results and model cards."""
        return self.kind

    @property
    def pooling(self) -> Pooling | None:
        """How hidden states are pooled to the sentence vectors that the model learns, or None if it learns none."""
        return None

    @classmethod
    def defaults(cls: type[SettingsT]) -> SettingsT:
        """Return the default settings. A setting without a default gets a placeholder."""
        return cls()

    @classmethod
    def of_terms(cls, terms: Sequence[str]) -> dict[str, object]:
        """Return settings, by path, that choose the objective with some of `ObjectiveSpec.terms` as its loss terms."""
        raise NotImplementedError

    def with_values(self: SettingsT, values: Mapping[str, object]) -> SettingsT:
        """Return a copy of the settings with the values of some fields replaced."""
        return replace(self, **values)  # type: ignore[type-var]


class MaskingSettings(ObjectiveSettings):
    """Base class of settings with a share of masked tokens, which it checks."""

    __slots__ = ()
    mask_prob: float

    def __post_init__(self) -> None:
        if not 0 < self.mask_prob < 1:
            raise HeedfulError(f"mask_prob is {self.mask_prob}; expected a share between 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSpec:
    """A pre-training objective: settings, default model, and the class that builds its samples and its loss."""

    name: str  # `kind` of its settings
    settings: type[ObjectiveSettings]
    builder_ref: str  # class of its builder as "module:name", which is imported when it is needed
    head: str  # kind of the head that is trained
    family: str = ""  # family of a model with random weights; "": the family in families.DEFAULT_FAMILIES
    terms: tuple[str, ...] = ()  # loss terms; users may choose the objective by some of them, joined by +
    phase_settings: tuple[str, ...] = ()  # settings that a phase may change, besides its lengths and batch size
    fixed_shape: bool = False  # whether sequences_per_pack is allowed, for which padding must have no targets
    algorithm: Algorithm | None = None  # algorithm of a tokenizer that is trained; None: the default
    sentinels: bool = False  # whether a tokenizer that is trained has sentinel tokens
