"""ObjectiveSpec: everything about a pre-training objective that the other parts of the library ask for, in one value.

Imports nothing heavy, so that a wrong setting is refused at once.
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
    """Base class of the settings of an objective; `kind` tells them apart."""

    __slots__ = ()
    MEMBERS: ClassVar[list[type[ObjectiveSettings]]] = []  # the settings class of each registered objective
    kind: str

    @property
    def name(self) -> str:
        """The objective's name in results and model cards."""
        return self.kind

    @property
    def pooling(self) -> Pooling | None:
        """How rows become the sentence vectors that the model learns; None: it learns none."""
        return None

    @classmethod
    def defaults(cls: type[SettingsT]) -> SettingsT:
        """Return the default settings; those without a default have a placeholder."""
        return cls()

    @classmethod
    def of_terms(cls, terms: Sequence[str]) -> dict[str, object]:
        """Return the settings, by path, of an objective whose loss is the sum of these terms of its spec."""
        raise NotImplementedError

    def with_values(self: SettingsT, values: Mapping[str, object]) -> SettingsT:
        """Return the settings with other values of some fields."""
        return replace(self, **values)  # type: ignore[type-var]


class MaskingSettings(ObjectiveSettings):
    """Base class of settings with a share of masked tokens; checks that share."""

    __slots__ = ()
    mask_prob: float

    def __post_init__(self) -> None:
        if not 0 < self.mask_prob < 1:
            raise HeedfulError(f"mask_prob is {self.mask_prob}; expected a share between 0 and 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSpec:
    """A pre-training objective: its settings, its usual model, and the class that builds its samples and its loss."""

    name: str  # `kind` of its settings
    settings: type[ObjectiveSettings]
    builder_ref: str  # the class of its builder as "module:name", imported when it is needed
    head: str  # kind of the head that is trained
    family: str = ""  # of a model with random weights; "": that of families.DEFAULT_FAMILIES
    terms: tuple[str, ...] = ()  # of its loss; users may choose the objective by some of them, joined by +
    phase_settings: tuple[str, ...] = ()  # settings that a phase may change, beside its lengths and batch size
    fixed_shape: bool = False  # whether sequences_per_pack applies: padding has no targets
    algorithm: Algorithm | None = None  # of a tokenizer that is trained; None: the default
    sentinels: bool = False  # whether a tokenizer that is trained has sentinel tokens
