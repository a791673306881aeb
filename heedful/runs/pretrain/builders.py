"""Builders of the pre-training objectives: subclasses of `ObjectiveBuilder`, named in `ObjectiveSpec.builder_ref`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Literal, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from heedful.checkpoint import RUN_MODEL, BundleConfig, ModelBundle, load
from heedful.errors import HeedfulError
from heedful.objectives import Sample, SelfSupervised
from heedful.objectives.causal_lm import CausalLM
from heedful.objectives.distillation.encoder import EncoderDistillation
from heedful.objectives.masked_lm import MaskedLM, MaskedLMWithPairs
from heedful.objectives.packing import FixedShape, SegmentPairs
from heedful.objectives.permutation_lm import PermutationLM
from heedful.objectives.replaced_token_detection import ReplacedTokenDetection, tied_generator
from heedful.objectives.span_corruption import SpanCorruption
from heedful.objectives.special_tokens import SpecialTokenTemplate, special_run
from heedful.runs.pretrain.objective_builder import Components, ObjectiveBuilder
from heedful.runs.pretrain.settings import PretrainSettings
from heedful.runs.pretrain.specs.clm import ClmSettings
from heedful.runs.pretrain.specs.distillation import DistillationSettings
from heedful.runs.pretrain.specs.mlm import MlmSettings, SentencePairSettings
from heedful.runs.pretrain.specs.plm import PlmSettings
from heedful.runs.pretrain.specs.rtd import RtdSettings
from heedful.runs.pretrain.specs.span_corruption import SpanCorruptionSettings
from heedful.runs.pretrain.teacher import TeacherRun, WindowRows
from heedful.runs.run import Run
from heedful.tokenizer import Tokenizer

GENERATOR = "generator"  # folder of the generator in a run folder (ELECTRA)


def masked_count(settings: PretrainSettings, mask_prob: float, template: SpecialTokenTemplate) -> int | None:
    """Return the number of targets of each packed row if rows have a fixed shape, else None.

    It is the number for the row with the most text that is possible. Rows with fewer masked tokens are filled up with
    targets of weight 0.

    Args:
        settings: The settings of the run.
        mask_prob: Share of the text tokens that are masked.
        template: The special tokens around a sequence.
    """
    if settings.sequences_per_pack is None:
        return None
    row_length = max(settings.pack_length, *settings.lengths)
    # `FixedShape.room` reserves a token of padding for each sequence; one sequence may have all the text
    text_tokens = row_length - settings.sequences_per_pack - template.width
    return max(1, round(mask_prob * text_tokens))


MaskingT = TypeVar("MaskingT", MlmSettings, SentencePairSettings, DistillationSettings)


class MaskingBuilder(ObjectiveBuilder[MaskingT]):
    """Base class of builders for objectives that mask tokens."""

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer without a mask token, or without marks of words if whole words are masked."""
        super().check_tokenizer(tokenizer)
        MaskedLM(tokenizer=tokenizer, mask_unit=self.phases[0].mask_unit)


class MlmBuilder(MaskingBuilder[MlmSettings]):
    """Builder for masked language modelling."""

    def objective(self, components: Components, loaded: ModelBundle, phase: MlmSettings) -> MaskedLM:
        """Return the objective of a phase."""
        return MaskedLM(
            tokenizer=components.tokenizer,
            num_static_masks=phase.num_static_masks,
            mask_prob=phase.mask_prob,
            mask_unit=phase.mask_unit,
            target_count=masked_count(self.settings, self.phases[0].mask_prob, self.template(components.tokenizer)),
        )


class SentencePairBuilder(MaskingBuilder[SentencePairSettings]):
    """Base class of builders for masked language modelling on pairs of segments with a label."""

    label: ClassVar[Literal["nsp", "sop"]]

    def template(self, tokenizer: Tokenizer) -> SpecialTokenTemplate:
        """Return the special tokens around a pair."""
        return SpecialTokenTemplate.of(tokenizer, pair=True)

    def rows(
        self,
        components: Components,
        documents: NDArray[np.int64],
        length: int,
        seed: int,
        shape: FixedShape | None = None,
        *,
        validation: bool = False,
    ) -> SegmentPairs:
        """Return packed rows of segment pairs, which are sampled anew in each epoch. See `ObjectiveBuilder.rows`."""
        return SegmentPairs(
            corpus=components.corpus,
            documents=documents,
            template=self.template(components.tokenizer),
            length=length,
            size=self.row_size(length),
            seed=seed,
            swapped=self.label == "sop",
            short_seq_prob=self.phases[0].short_seq_prob,
            shape=shape,
        )

    def objective(self, components: Components, loaded: ModelBundle, phase: SentencePairSettings) -> MaskedLMWithPairs:
        """Return the objective of a phase."""
        return MaskedLMWithPairs(
            tokenizer=components.tokenizer,
            num_static_masks=phase.num_static_masks,
            name=self.label,
            mask_prob=phase.mask_prob,
            mask_unit=phase.mask_unit,
            target_count=masked_count(self.settings, self.phases[0].mask_prob, self.template(components.tokenizer)),
        )


class NspBuilder(SentencePairBuilder):
    """Builder for masked language modelling with next sentence prediction."""

    label = "nsp"

    def check_documents(self, train: int, validation: int) -> None:
        """Refuse fewer than two documents, as the second segment of a negative pair is from another document."""
        if min(train, validation) < 2:
            raise HeedfulError(
                f"a second segment of another document needs two documents at least, but of {train + validation:,} "
                f"there are {train:,} to learn from and {validation:,} held out: give more documents, or change "
                "eval_fraction"
            )


class SopBuilder(SentencePairBuilder):
    """Builder for masked language modelling with sentence order prediction."""

    label = "sop"


class PlmBuilder(ObjectiveBuilder[PlmSettings]):
    """Builder for permutation language modelling."""

    def objective(self, components: Components, loaded: ModelBundle, phase: PlmSettings) -> PermutationLM:
        """Return the objective."""
        return PermutationLM(tokenizer=components.tokenizer)


class SpanCorruptionBuilder(ObjectiveBuilder[SpanCorruptionSettings]):
    """Builder for span corruption."""

    def check_model(self, config: BundleConfig, name: str) -> None:
        """Refuse a model that is not an encoder-decoder."""
        if not (config.model.has_encoder and config.model.has_decoder):
            raise HeedfulError(
                f"{name} is not an encoder-decoder, as span corruption needs: take --objective clm, or another model"
            )

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer without sentinel tokens."""
        super().check_tokenizer(tokenizer)
        self._corruption(tokenizer, self.phases[0], start=0)

    def objective(self, components: Components, loaded: ModelBundle, phase: SpanCorruptionSettings) -> SpanCorruption:
        """Return the objective."""
        start = loaded.config.model.start
        if start is None:
            raise HeedfulError("this model has no decoder start token, which span corruption needs: take another model")
        return self._corruption(components.tokenizer, phase, start)

    def _corruption(self, tokenizer: Tokenizer, phase: SpanCorruptionSettings, start: int) -> SpanCorruption:
        return SpanCorruption(
            tokenizer=tokenizer,
            mask_prob=phase.mask_prob,
            mean_noise_span_length=phase.mean_noise_span_length,
            start=start,
        )


class ClmBuilder(ObjectiveBuilder[ClmSettings]):
    """Builder for causal language modelling."""

    def check_model(self, config: BundleConfig, name: str) -> None:
        """Refuse a model that has both an encoder and a decoder."""
        if config.model.has_encoder and config.model.has_decoder:
            raise HeedfulError(
                f"{name} has an encoder, and causal language modelling needs a decoder alone: take --objective "
                "span_corruption, or another model"
            )

    def template(self, tokenizer: Tokenizer) -> SpecialTokenTemplate:
        """Return the special tokens around a document: one at its beginning, and one at its end."""
        template = super().template(tokenizer)
        end_id = tokenizer.special.eos_or_sep
        prefix, suffix = template.runs
        if len(suffix[0]):
            return template
        if end_id is None:
            raise HeedfulError(
                "this tokenizer has no token for the end of a text, which the model has to predict: give another one"
            )
        end = special_run([(end_id, 0)])
        return replace(template, runs=(prefix if len(prefix[0]) else end, end))

    def continued_template(self, tokenizer: Tokenizer) -> SpecialTokenTemplate:
        """Return the special tokens around a sequence that ends before its document ends: no token at its end."""
        return self.template(tokenizer).without_end

    def objective(self, components: Components, loaded: ModelBundle, phase: ClmSettings) -> CausalLM:
        """Return the objective."""
        return CausalLM(tokenizer=components.tokenizer)


class RtdBuilder(ObjectiveBuilder[RtdSettings]):
    """Builder for replaced token detection. The model is trained together with a generator."""

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a tokenizer without a mask token."""
        super().check_tokenizer(tokenizer)
        MaskedLM(tokenizer=tokenizer)

    def objective(self, components: Components, loaded: ModelBundle, phase: RtdSettings) -> ReplacedTokenDetection:
        """Return the objective with its generator."""
        return ReplacedTokenDetection(
            tokenizer=components.tokenizer,
            generator=self._generator(loaded, phase.generator_size),
            mask_prob=phase.mask_prob,
            disc_weight=phase.disc_weight,
        )

    def notes(self, components: Components) -> Iterable[str]:
        """Yield a sentence about the initial weights of the generator, if the model is trained further."""
        if components.init_model is None:
            return
        folder = self.generator_folder()
        if folder is not None:
            yield f"the generator in {folder} is trained further, too"
        else:
            yield f"{components.init_model.source} has no generator beside it: a new one is trained"

    def generator_folder(self) -> Path | None:
        """Return the folder of the generator that belongs to the model to continue from, or None if it is missing."""
        init_from = Path(self.settings.model.init_from)
        folder = (init_from.parent if init_from.name == RUN_MODEL else init_from) / GENERATOR
        return folder if self.settings.model.init_from and folder.is_dir() else None

    def _generator(self, loaded: ModelBundle, size: float) -> ModelBundle:
        """Return a generator that shares the model's embeddings.

        If the model is trained further and has a saved generator, the other weights are those of that generator. They
        are random otherwise.

        Args:
            loaded: The model.
            size: Hidden size, heads and feed-forward size of the generator as a share of the model's.

        Raises:
            HeedfulError: If the saved generator has another shape.
        """
        generator = tied_generator(loaded, generator_size=size, seed=self.settings.train.seed)
        if (folder := self.generator_folder()) is None:
            return generator
        shared = {id(parameter) for parameter in loaded.parameters()}
        own = {name: tensor for name, tensor in generator.named_tensors().items() if id(tensor) not in shared}
        saved = load(folder, head="masked_lm").named_tensors()
        different = [name for name, tensor in own.items() if name not in saved or saved[name].shape != tensor.shape]
        if different:
            raise HeedfulError(
                f"{folder} is of another shape than a generator with objective.generator_size = {size:g} ("
                f"{different[0]} differs): set it to the value of that run, or move the folder away to train a new one"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved[name])
        return generator


class DistillationBuilder(MaskingBuilder[DistillationSettings]):
    """Builder for distillation of a trained encoder."""

    def load_teacher(self) -> ModelBundle:
        """Load the teacher.

        Raises:
            HeedfulError: If it has both an encoder and a decoder.
        """
        teacher = load(self.phases[0].teacher)
        if teacher.config.model.has_encoder and teacher.config.model.has_decoder:
            raise HeedfulError(
                f"{teacher.source} has an encoder and a decoder, but a teacher must be an encoder: write its encoder "
                "to a folder with heedful convert --head-kind encoder"
            )
        return teacher

    def teacher_run(self, teacher: ModelBundle, tokenizer: Tokenizer, run: Run) -> TeacherRun:
        """Return the teacher with its caches in the run folder."""
        return TeacherRun(
            settings=self.phases[0],
            train=self.settings.train,
            loaded=teacher,
            tokenizer=tokenizer,
            folder=run.folder,
            ranks=run.ranks,
            on_message=run.reporter.message,
            shortest=min(self.settings.lengths),
            init_from=self.settings.model.init_from,
        )

    def rows(
        self,
        components: Components,
        documents: NDArray[np.int64],
        length: int,
        seed: int,
        shape: FixedShape | None = None,
        *,
        validation: bool = False,
    ) -> WindowRows:
        """Return packed rows of windows of sentences, and of pairs of windows. See `ObjectiveBuilder.rows`."""
        assert components.teacher is not None
        return components.teacher.rows(
            components.corpus, documents, self.row_size(length), length, seed, shape, held_out=validation
        )

    def objectives(
        self, components: Components, loaded: ModelBundle, samples: Sequence[Sequence[Sample]]
    ) -> list[SelfSupervised]:
        """Return the objective of each phase. All share the teacher and the modules that are trained with the model."""
        assert components.teacher is not None
        rows_by_phase = [cast(WindowRows, rows) for rows in samples]
        target_count = masked_count(self.settings, self.phases[0].mask_prob, self.template(components.tokenizer))
        return list(components.teacher.objectives(self.phases, rows_by_phase, loaded.config.model.width, target_count))

    def for_validation(self, objective: SelfSupervised) -> SelfSupervised:
        """Return the objective without cached vectors of the teacher, since only training texts have cached vectors."""
        assert isinstance(objective, EncoderDistillation)
        return replace(objective, vectors=None)
