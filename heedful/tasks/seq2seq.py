"""Sequence to sequence: the task of generating a text from a text, such as translation, and its answers.

Encoder-decoder models and decoder-only models are both trained with teacher forcing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.data import Example, Seq2SeqExample
from heedful.data.labelled.statistics import DatasetStats
from heedful.errors import HeedfulError
from heedful.model.decode import BeamSearch, GeneratedTokens
from heedful.objectives import Batch, Loss, Sample
from heedful.objectives.base import pack_samples, weighted_loss
from heedful.tasks.answering import Answer, AnswerContext, AnswerHead, Window, read_text, require_tokenizer
from heedful.tasks.generation import (
    GenerationConfig,
    SequenceEnds,
    encode_truncated,
    folder_generation,
    start_generation,
    trained_ends,
    with_languages,
)
from heedful.tasks.metrics import Bleu, Result, TextScore, text_scores
from heedful.tasks.metrics.bleu import INSTALL_HINT, ORDER, STATISTICS, bleu_of
from heedful.tasks.metrics.bootstrap import mean_of
from heedful.tasks.predictions import Generated, GeneratedText
from heedful.tasks.settings import TaskSettings
from heedful.tasks.specs.seq2seq import BleuTokenizer, Seq2SeqSettings, has_bleu
from heedful.tasks.task import (
    CHUNK_EXAMPLES,
    EvalMetrics,
    ScoredAnswer,
    Task,
    TaskFields,
    TaskSetup,
    batched,
    bootstrap_stat,
)
from heedful.tokenizer import Encoding, Tokenizer, TokenizerInput

TEXT_SUFFIX = "\n"  # separator of text and target for a decoder-only model


def generated_answer(engine_input: object, windows: list[Window], context: AnswerContext) -> Answer:
    """Return {"text", "log_probability", "tokens", "complete"}, and "alternatives" if beam search returns several."""
    (window,) = windows
    best, *alternatives = (_generated(generated, context.tokenizer) for generated in window.scores)
    return best | ({"alternatives": alternatives} if alternatives else {})


def _generated(generated: GeneratedTokens, tokenizer: Tokenizer) -> Answer:
    """Return the answer for one generated text."""
    return {
        "text": tokenizer.decode(generated.tokens).strip(),
        "log_probability": generated.log_probability,
        "tokens": len(generated.tokens),
        "complete": generated.complete,
    }


def _prediction(answer: Answer) -> GeneratedText:
    """Convert an answer to its dataclass."""
    alternatives = tuple(Generated(**fields) for fields in answer.get("alternatives", ()))
    return GeneratedText.from_answer({**answer, "alternatives": alternatives})


def _columns(loaded: ModelBundle, generation: GenerationConfig) -> dict[str, object]:
    """Return the type of each field of an answer."""
    return TEXT_COLUMNS | ({"alternatives": [TEXT_COLUMNS]} if isinstance(generation.how, BeamSearch) else {})


TEXT_COLUMNS: dict[str, object] = {"text": str, "log_probability": float, "tokens": int, "complete": bool}
SEQ2SEQ_HEAD = AnswerHead(
    expects='texts, like ["a text"]',
    tokenizer_inputs=read_text,
    answer=generated_answer,
    long_inputs="refuse",
    generate=start_generation,
    prediction=_prediction,
    columns=_columns,
)


@dataclass(frozen=True, kw_only=True)
class Seq2Seq(Task[Seq2SeqExample]):
    """Sequence to sequence. The loss is the mean of -log p(token | text, earlier tokens) over the target and its end.

    With label smoothing s, the loss of a token is (1 - s) (-log p) + s times the mean of -log p over the vocabulary.
    In an encoder-decoder model the encoder encodes the text. A decoder-only model gets the text, a line end and the
    target as one sequence; its loss is over the target only.
    """

    example: ClassVar[type[Example]] = Seq2SeqExample
    answerers: ClassVar[tuple[AnswerHead, ...]] = (SEQ2SEQ_HEAD,)
    metric: str = "f1"
    ends: SequenceEnds  # start and end tokens of generation
    text_suffix: str = ""  # separator between text and target, for a decoder-only model
    max_target_length: int | None = None  # maximum tokens in a target; None: no limit
    max_new_tokens: int = 128  # maximum tokens generated per text in evaluations
    num_beams: int = 1  # beam size in evaluations; 1: greedy decoding
    beam_search: BeamSearch = field(default_factory=BeamSearch)  # other settings of beam search in evaluations
    bleu: BleuTokenizer = "13a"  # tokenizer of BLEU
    label_smoothing: float = 0.0  # share of the target that is spread over the vocabulary

    def __post_init__(self) -> None:
        if self.metric == "bleu" and not has_bleu():
            raise HeedfulError(f"{INSTALL_HINT}; or compare models by F1 of words: task.metric=f1")

    @classmethod
    def create(cls, setup: TaskSetup) -> tuple[Task, ModelBundle]:
        settings = setup.settings
        assert isinstance(settings, Seq2SeqSettings)
        if settings.src_lang is not None or settings.tgt_lang is not None:
            setup = replace(setup, loaded=with_languages(setup.loaded, settings.src_lang, settings.tgt_lang))
        loaded = setup.loaded
        ends = trained_ends(loaded, require_tokenizer(loaded))
        suffix = "" if ends.start is not None else TEXT_SUFFIX
        beam_search = folder_generation(loaded).defaults.beam_search
        task, bundle = cls.with_new_head(
            setup,
            ends=ends,
            text_suffix=suffix,
            label_smoothing=settings.label_smoothing,
            beam_search=beam_search,
            **_evaluation_settings(settings),
        )
        bundle.text_suffix = suffix
        return replace(task, max_target_length=bundle.max_target_length), bundle

    @classmethod
    def evaluation_fields(
        cls, loaded: ModelBundle, read_stats: Callable[[], DatasetStats], settings: TaskSettings | None
    ) -> TaskFields:
        """Return the fields for evaluation: settings of generation, and the tokens that begin and end a text."""
        settings = settings or Seq2SeqSettings()
        assert isinstance(settings, Seq2SeqSettings)
        ends = trained_ends(loaded, require_tokenizer(loaded))
        return {
            "ends": ends,
            "text_suffix": loaded.text_suffix,
            "max_target_length": loaded.max_target_length,
            "beam_search": folder_generation(loaded).defaults.beam_search,
        } | _evaluation_settings(settings)

    @property
    def generation(self) -> GenerationConfig:
        """The settings of text generation in evaluations."""
        config = GenerationConfig(beam_search=self.beam_search, max_new_tokens=self.max_new_tokens)
        return config.with_choices(num_beams=self.num_beams) if self.num_beams > 1 else config

    def tokenizer_inputs(self, example: Seq2SeqExample) -> list[TokenizerInput]:
        return [example.text + self.text_suffix, example.rewritten]

    def engine_input(self, example: Seq2SeqExample) -> object:
        return example.text

    def windows(self, inputs: list[TokenizerInput], encodings: list[Encoding]) -> list[list[Encoding]]:
        """Return one window for each tokenizer input, since the output depends on the whole text.

        Raises:
            HeedfulError: If text or target are longer than the model's limits.
        """
        text_length = len(encodings[0])
        target_length = len(self._target_tokens(encodings[1]))
        # the input of a decoder-only model is text and target without the end token
        input_length = text_length if self.ends.start is not None else text_length + target_length - 1
        for length, limit in ((input_length, self.limit), (target_length, self.max_target_length)):
            if limit is not None and length > limit:
                raise HeedfulError(
                    f"text and target have {text_length} and {target_length} tokens with the end token, but this model "
                    f'reads {limit} at once: leave the example out, or set long_inputs = "truncate"'
                )
        return [[encoding] for encoding in encodings]

    def _target_tokens(self, encoded: Encoding) -> list[int]:
        """Return the tokens to generate: the forced first token, if any, the tokens of the target, the end token."""
        special_ids = {self.ends.stop, self.tokenizer.special.bos_or_cls}
        text_ids = [id for id, segment in zip(encoded.ids, encoded.segments, strict=True) if segment is not None]
        forced = [] if self.ends.forced_bos is None else [self.ends.forced_bos]
        return [*forced, *(id for id in text_ids if id not in special_ids), self.ends.stop]

    def check(self, examples: Iterable[Seq2SeqExample]) -> None:
        """Raise HeedfulError for a text that is longer than the model's limit, unless texts are truncated."""
        if self.limit is None or self.truncation_length is not None:
            return
        for chunk in batched(examples, CHUNK_EXAMPLES):
            texts = self.tokenizer.encode_batch([self.tokenizer_inputs(example)[0] for example in chunk])
            for example, encoding in zip(chunk, texts, strict=True):
                if len(encoding) > self.limit:
                    raise HeedfulError(
                        f"{example.file}:{example.line}: the text has {len(encoding)} tokens, but this model reads "
                        f'{self.limit} at once: leave the example out, or set long_inputs = "truncate"'
                    )

    @property
    def truncation_length(self) -> int | None:
        return self._max_length_for(super().truncation_length)

    def _max_length_for(self, limit: int | None) -> int | None:
        """Return the maximum tokens of an encoded text or target, from the limit of the model.

        One token is reserved for the end token if the tokenizer does not add it. In a decoder-only model, half of the
        limit is for the text and half for the target.
        """
        if limit is None:
            return None
        if self.ends.start is None:
            return limit // 2
        return limit - (self.ends.stop not in self.tokenizer.encode("").ids)

    def _encode(self, inputs: list[TokenizerInput]) -> list[Encoding]:
        """Encode tokenizer inputs, in which texts and targets alternate."""
        target_limit = self._max_length_for(self.max_target_length if self.long_inputs == "truncate" else None)
        texts = encode_truncated(self.tokenizer, inputs[0::2], self.text_suffix, self.truncation_length)
        targets = encode_truncated(self.tokenizer.for_targets, inputs[1::2], self.text_suffix, target_limit)
        return [encoding for pair in zip(texts, targets, strict=True) for encoding in pair]

    def make_samples(self, example: Seq2SeqExample, item_windows: list[list[Encoding]]) -> list[Sample]:
        """Return one sample: the text and the decoder's input, in one sequence for a decoder-only model."""
        (text,), (encoded_target,) = item_windows
        target = self._target_tokens(encoded_target)
        if self.ends.start is not None:
            decoder_input = [self.ends.start, *target[:-1]]
            return [Sample.of([text.ids, decoder_input], [text.types, [0] * len(decoder_input)], target=target)]
        ids = [*text.ids, *target[:-1]]
        return [Sample.of([ids], [[0] * len(ids)], target=target)]

    def remarks(self, example: Seq2SeqExample, item_windows: list[list[Encoding]]) -> list[str]:
        (encoded_target,) = item_windows[1]
        target = self._target_tokens(encoded_target)
        remarks = Task.remarks(self, example, item_windows)
        if len(target) > self.max_new_tokens:
            remarks.append(
                f"have targets that are longer than evaluations generate (task.max_new_tokens={self.max_new_tokens})"
            )
        if not encoded_target.dropped and self.tokenizer.decode(target[:-1]).strip() != example.rewritten.strip():
            remarks.append(
                "have targets that the tokenizer does not decode exactly: generated texts differ in case, "
                "punctuation or spaces"
            )
        return remarks

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Return the batch. Its targets are the tokens that the model learns to generate."""
        sample_targets = [torch.tensor(sample.target) for sample in samples]
        weights = torch.cat(
            [torch.full((len(target),), sample.weight) for target, sample in zip(sample_targets, samples, strict=True)]
        )
        targets = torch.cat(sample_targets)
        if self.ends.start is not None:
            return Batch(
                packed=pack_samples([_sequence(sample, 0) for sample in samples]),
                decoder_input=pack_samples([_sequence(sample, 1) for sample in samples]),
                targets=targets,
                weights=weights,
            )
        packed = pack_samples(samples)
        rows = [
            torch.arange(stop - len(target), stop)
            for (_, stop), target in zip(pairwise(packed.bounds), sample_targets, strict=True)
        ]
        return Batch(packed=packed, targets=targets, weights=weights, rows=torch.cat(rows))

    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        return weighted_loss(self.target_losses(self.scores(loaded, batch), batch), batch)

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the cross-entropy of each target token."""
        return F.cross_entropy(scores, batch.targets, reduction="none", label_smoothing=self.label_smoothing)

    def new_metrics(self) -> EvalMetrics:
        bootstraps = {"exact": bootstrap_stat(2, mean_of), "f1": bootstrap_stat(2, mean_of)}
        if not has_bleu():
            return EvalMetrics(metrics={"texts": TextScore()}, bootstraps=bootstraps)
        bleu = Bleu(words=self.bleu, lower_case=bool(self.tokenizer.lowercases))
        metrics = {"texts": TextScore(), "bleu": bleu}
        return EvalMetrics(metrics=metrics, bootstraps=bootstraps | {"bleu": bootstrap_stat(STATISTICS, bleu_of)})

    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[Seq2SeqExample], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        pairs = [(answer["text"], example.rewritten) for answer, example in zip(answers, examples, strict=True)]
        scores = [text_scores(*pair) for pair in pairs]
        unfinished = sum(not answer.get("complete", True) for answer in answers)
        updated = {"texts": metrics.metrics["texts"].update_scores(scores, unfinished)}
        bootstraps = {
            name: metrics.bootstraps[name].update(ids, [(pair_scores[index], 1) for pair_scores in scores])
            for index, name in enumerate(("exact", "f1"))
        }
        if bleu := metrics.metrics.get("bleu"):
            rows = [bleu.statistics(*pair) for pair in pairs]
            updated["bleu"] = bleu.update_statistics(rows)
            bootstraps["bleu"] = metrics.bootstraps["bleu"].update(ids, rows)
        return EvalMetrics(metrics=updated, bootstraps=bootstraps)

    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        """Return exact match and F1 of words, without normalization, and BLEU if sacrebleu is installed.

        The results include sacrebleu's signature. BLEU compares texts in lower case if the tokenizer lower-cases.
        """
        notes = []
        texts = metrics.metrics["texts"]
        results: Result = texts.compute()
        if bleu := metrics.metrics.get("bleu"):
            bleu_results = bleu.compute()
            results |= {name: bleu_results[name] for name in ("bleu", "signature")}
            notes.append(f"BLEU is sacrebleu's, {bleu_results['signature']}")
            if bleu.has_short_texts:
                notes.append(f"BLEU says little here: most gold texts have fewer than {ORDER} words as it counts them")
        if texts.unfinished:
            notes.append(
                f"texts cut off before their end: {texts.unfinished:,} (task.max_new_tokens={self.max_new_tokens})"
            )
        return results | {"notes": notes}

    def score_answer(self, example: Seq2SeqExample, answer: Answer) -> ScoredAnswer:
        """Compare an answer with the gold text. It is correct if both are equal; the loss is 1 - F1 of words."""
        exact, f1 = text_scores(answer["text"], example.rewritten)
        return ScoredAnswer(example.rewritten, answer["text"], bool(exact), 1 - f1)


def _evaluation_settings(settings: Seq2SeqSettings) -> TaskFields:
    """Return the settings of evaluations, which are fields of the task too."""
    return {name: getattr(settings, name) for name in ("max_new_tokens", "num_beams", "metric", "bleu")}


def _sequence(sample: Sample, index: int) -> Sample:
    """Return one sequence of a sample, as a sample of its own."""
    start, stop = sample.bounds[index : index + 2]
    return Sample(tokens=sample.tokens[start:stop], types=sample.types[start:stop], bounds=(0, stop - start))
