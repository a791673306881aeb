"""The base class of what builds an objective's samples and loss, and the components that it builds them from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from heedful.checkpoint import BundleConfig, ModelBundle
from heedful.data.corpus.shards import Corpus
from heedful.objectives import Sample, SelfSupervised
from heedful.objectives.packing import FixedShape, PackedRows, segment_windows
from heedful.objectives.special_tokens import SpecialTokenTemplate
from heedful.runs.pretrain.probes import ProbeSet
from heedful.runs.pretrain.settings import PretrainSettings
from heedful.runs.pretrain.spec import ObjectiveSettings
from heedful.runs.pretrain.teacher import TeacherRun
from heedful.runs.run import Run
from heedful.tasks.spec import resolve
from heedful.tokenizer import Tokenizer

SettingsT = TypeVar("SettingsT", bound=ObjectiveSettings)


@dataclass(frozen=True, kw_only=True, slots=True)
class Components:
    """Settings, tokenizer, corpus and models of a run."""

    settings: PretrainSettings
    tokenizer: Tokenizer
    corpus: Corpus
    init_model: ModelBundle | None  # the trained model to continue from
    teacher: TeacherRun | None = None
    probes: Sequence[ProbeSet] = ()

    @property
    def builder(self) -> ObjectiveBuilder[ObjectiveSettings]:
        """The builder of the samples and the objectives."""
        return builder_of(self.settings)


class ObjectiveBuilder(Generic[SettingsT]):
    """Builds the samples and the objectives of a run; a subclass for each kind of objective overrides what differs."""

    def __init__(self, settings: PretrainSettings) -> None:
        """`settings` are those of the run."""
        self.settings = settings
        self.phases = cast("tuple[SettingsT, ...]", settings.objectives())  # the objective of each phase

    # -- checks ---------------------------------------------------------------------------------------------------

    def check_model(self, config: BundleConfig, name: str) -> None:
        """Refuse a model that does not fit the objective; `name` is for messages."""

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer or lengths that the objective cannot use."""
        for length in self.settings.lengths:
            self.template(tokenizer).room(length)

    def check_documents(self, train: int, validation: int) -> None:
        """Refuse a number of documents that is too small for the objective."""

    # -- the teacher ------------------------------------------------------------------------------------------------

    def load_teacher(self) -> ModelBundle | None:
        """Load the trained model whose outputs are learned; None for objectives without a teacher."""
        return None

    def teacher_run(self, teacher: ModelBundle, tokenizer: Tokenizer, run: Run) -> TeacherRun | None:
        """Return the teacher with its caches in the run folder."""
        return None

    # -- samples ----------------------------------------------------------------------------------------------------

    def template(self, tokenizer: Tokenizer) -> SpecialTokenTemplate:
        """Return the special tokens around a sequence."""
        return SpecialTokenTemplate.of(tokenizer, pair=False)

    def rows(
        self,
        components: Components,
        documents: NDArray[np.int64],
        length: int,
        seed: int,
        shape: FixedShape | None = None,
        *,
        validation: bool = False,
    ) -> Sequence[Sample]:
        """Return packed rows of documents of the corpus.

        Args:
            components: Of the run.
            documents: Their numbers.
            length: Tokens of a sequence, at most.
            seed: Of the order in which sequences are packed.
            shape: The shape of all rows; None: as many sequences as fit.
            validation: Whether the rows are for evaluation.
        """
        template, corpus = self.template(components.tokenizer), components.corpus
        windows = segment_windows(corpus, documents, template.room(length))
        continued = self.continued_template(components.tokenizer)
        return PackedRows(corpus, template, windows, self.row_size(length), seed, shape=shape, continued=continued)

    def continued_template(self, tokenizer: Tokenizer) -> SpecialTokenTemplate | None:
        """Return the special tokens around a sequence whose document continues after it; None: `template`."""
        return None

    def row_size(self, length: int) -> int:
        """Return the tokens of a packed row, at most."""
        return max(self.settings.pack_length, length)

    # -- objectives ---------------------------------------------------------------------------------------------------

    def objective(self, components: Components, loaded: ModelBundle, phase: SettingsT) -> SelfSupervised:
        """Return the objective of a phase for a model with the objective's head."""
        raise NotImplementedError(f"{type(self).__name__} has to define objective or objectives")

    def objectives(
        self, components: Components, loaded: ModelBundle, samples: Sequence[Sequence[Sample]]
    ) -> list[SelfSupervised]:
        """Return the objective of each phase, the first one's in front; `samples` are those of each phase."""
        first = self.objective(components, loaded, self.phases[0])
        later = (
            first if phase == self.phases[0] else self.objective(components, loaded, phase) for phase in self.phases[1:]
        )
        return [first, *later]

    def for_validation(self, objective: SelfSupervised) -> SelfSupervised:
        """Return the objective that validation samples are evaluated with."""
        return objective

    def notes(self, components: Components) -> Iterable[str]:
        """Yield sentences about the objective for the user."""
        return ()


def builder_of(settings: PretrainSettings) -> ObjectiveBuilder[ObjectiveSettings]:
    """Return the builder of the objective that the settings name."""
    builder: type[ObjectiveBuilder[ObjectiveSettings]] = resolve(settings.spec.builder_ref)
    return builder(settings)
