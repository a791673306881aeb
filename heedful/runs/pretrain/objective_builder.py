"""`ObjectiveBuilder`, which builds the samples and losses of a pre-training objective, and `Components`, its inputs.

`runs.pretrain.builders` has a subclass for each objective, and `runs.pretrain.build` calls its methods.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from heedful.checkpoint import BundleConfig, ModelBundle
from heedful.data.corpus.shards import Corpus
from heedful.objectives import Sample, SelfSupervised
from heedful.objectives.packing import FixedShape, PackedSequences, segment_windows
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
    """Settings, tokenizer, corpus and models of a pre-training run, loaded by `load_components`."""

    settings: PretrainSettings
    tokenizer: Tokenizer
    corpus: Corpus
    init_model: ModelBundle | None  # the trained model that training continues from; None: weights are random
    teacher: TeacherRun | None = None  # the teacher, if the objective has one
    probes: Sequence[ProbeSet] = ()  # labelled texts on which frozen vectors are scored at each evaluation

    @property
    def builder(self) -> ObjectiveBuilder[ObjectiveSettings]:
        """Builder of the samples and the objectives."""
        return builder_of(self.settings)


class ObjectiveBuilder(Generic[SettingsT]):
    """Builds the samples and the objectives of a run.

    Each kind of objective has a subclass, which defines `objective` or `objectives` and may override other methods.

    Args:
        settings: The settings of the run.
    """

    def __init__(self, settings: PretrainSettings) -> None:
        self.settings = settings
        self.phases = cast("tuple[SettingsT, ...]", settings.objectives())  # objective settings of each phase

    # -- checks ---------------------------------------------------------------------------------------------------

    def check_model(self, config: BundleConfig, name: str) -> None:
        """Raise a HeedfulError if a model does not fit the objective. The message contains `name`, the model's name."""

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise a HeedfulError if the objective cannot use the tokenizer, or a length leaves no tokens for text."""
        for length in self.settings.lengths:
            self.template(tokenizer).room(length)

    def check_documents(self, train: int, validation: int) -> None:
        """Raise a HeedfulError if `train` or `validation`, numbers of documents, are too small."""

    # -- the teacher ------------------------------------------------------------------------------------------------

    def load_teacher(self) -> ModelBundle | None:
        """Load the teacher, whose outputs the model learns, or return None if the objective has no teacher."""
        return None

    def teacher_run(self, teacher: ModelBundle, tokenizer: Tokenizer, run: Run) -> TeacherRun | None:
        """Return the loaded teacher with its caches in the run folder, or None if the objective has no teacher."""
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
        """Return the samples of some documents of the corpus: packed rows, each with several sequences end to end.

        Args:
            components: The components of the run.
            documents: Indices of documents in the corpus, [documents].
            length: Maximum tokens of a sequence.
            seed: Random seed of the order in which sequences are packed.
            shape: The fixed shape of all rows. If None, a row has all sequences that fit.
            validation: Whether the rows are for evaluation.
        """
        template = self.template(components.tokenizer)
        corpus = components.corpus
        windows = segment_windows(corpus, documents, template.room(length))
        continued = self.continued_template(components.tokenizer)
        return PackedSequences(corpus, template, windows, self.row_size(length), seed, shape=shape, continued=continued)

    def continued_template(self, tokenizer: Tokenizer) -> SpecialTokenTemplate | None:
        """Return the special tokens around a sequence that ends before its document ends, or None for `template`."""
        return None

    def row_size(self, length: int) -> int:
        """Return the maximum tokens of a packed row."""
        return max(self.settings.pack_length, length)

    # -- objectives ---------------------------------------------------------------------------------------------------

    def objective(self, components: Components, loaded: ModelBundle, phase: SettingsT) -> SelfSupervised:
        """Return the objective of a phase for a model with the objective's head."""
        raise NotImplementedError(f"{type(self).__name__} has to define objective or objectives")

    def objectives(
        self, components: Components, loaded: ModelBundle, samples: Sequence[Sequence[Sample]]
    ) -> list[SelfSupervised]:
        """Return the objective of each phase.

        Args:
            components: The components of the run.
            loaded: The model, with the objective's head.
            samples: The samples of each phase.
        """
        first_phase, *later_phases = self.phases
        first = self.objective(components, loaded, first_phase)
        later = (first if phase == first_phase else self.objective(components, loaded, phase) for phase in later_phases)
        return [first, *later]

    def for_validation(self, objective: SelfSupervised) -> SelfSupervised:
        """Return the objective for validation samples that corresponds to an objective of training."""
        return objective

    def notes(self, components: Components) -> Iterable[str]:
        """Yield sentences about the objective for the log."""
        return ()


def builder_of(settings: PretrainSettings) -> ObjectiveBuilder[ObjectiveSettings]:
    """Return the builder of the objective that the settings name."""
    builder: type[ObjectiveBuilder[ObjectiveSettings]] = resolve(settings.spec.builder_ref)
    return builder(settings)
