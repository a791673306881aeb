"""Write a text for a text: translate, summarise, correct; learned with the right beginning given (teacher forcing)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from heedful.checkpoint import ModelBundle
from heedful.data import Example, Seq2SeqExample
from heedful.data.labelled.statistics import DatasetStats
from heedful.errors import HeedfulError
from heedful.model.decode import BeamSearch, GeneratedTokens, Greedy
from heedful.objectives import Batch, Loss, Sample
from heedful.objectives.base import pack_samples, weighted_loss
from heedful.tasks.answering import Answer, AnswerContext, AnswerHead, Window, read_text, require_tokenizer
from heedful.tasks.generation import GenerationConfig, SequenceEnds, encode_truncated, sequence_ends, start_generation
from heedful.tasks.metrics import Bleu, Result, TextScore, text_scores
from heedful.tasks.metrics.bleu import INSTALL_HINT, ORDER, STATISTICS, bleu_of
from heedful.tasks.metrics.bootstrap import mean_of
from heedful.tasks.predictions import Generated, GeneratedText
from heedful.tasks.settings import TaskSettings
from heedful.tasks.specs.seq2seq import BleuTokenizer, Seq2SeqSettings, has_bleu
from heedful.tasks.task import CHUNK, EvalMetrics, ScoredAnswer, Task, TaskSetup, batched, bootstrap_stat
from heedful.tokenizer import Encoding, Tokenizer, TokenizerInput

TEXT_SUFFIX = "\n"  # text and rewriting, where one decoder learns both


def generated_answer(given: Any, windows: list[Window], setting: AnswerContext) -> Answer:
    """{"text", "log_probability", "tokens", "complete"}, and "others" where several beams were asked for."""
    (window,) = windows
    first, *others = (_said(written, setting.tokenizer) for written in window.scores)
    return first | ({"others": others} if others else {})


def _said(written: GeneratedTokens, tokenizer: Tokenizer) -> Answer:
    return {
        "text": tokenizer.decode(written.tokens).strip(),
        "log_probability": written.log_probability,
        "tokens": len(written.tokens),
        "complete": written.complete,
    }


def _prediction(answer: Answer) -> GeneratedText:
    others = tuple(Generated(**each) for each in answer.get("others", ()))
    written = {name: answer[name] for name in TEXT}
    return GeneratedText(**written, alternatives=others, truncated_tokens=answer.get("cut", 0))


def _columns(loaded: ModelBundle, writing: GenerationConfig) -> dict[str, Any]:
    return TEXT | ({"others": [TEXT]} if isinstance(writing.how, BeamSearch) else {})


TEXT: dict[str, Any] = {"text": str, "log_probability": float, "tokens": int, "complete": bool}
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
class Seq2Seq(Task):
    """The mean of -log p of each token of the rewriting and of its end, given the text and all tokens before it.

    With label smoothing s a token's loss is (1 - s) (-log p) + s times the mean of -log p over the vocabulary. A
    model with encoder and decoder reads the text with the encoder; a decoder-only model reads the text, a line end and
    the target, and learns the target.
    """

    example: ClassVar[type[Example]] = Seq2SeqExample
    head: ClassVar[str] = "language_model"
    answerers: ClassVar[tuple[AnswerHead, ...]] = (SEQ2SEQ_HEAD,)
    metric: str = "f1"
    mark: SequenceEnds
    text_suffix: str = ""  # after the text, where the decoder goes on from it
    limit_written: int | None = None  # tokens that a rewriting may have; None: any number
    max_new_tokens: int = 128  # per text in evaluations
    num_beams: int = 1  # in evaluations; 1: greedy
    bleu: BleuTokenizer = "13a"  # that it counts
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.metric == "bleu" and not has_bleu():
            raise HeedfulError(f"{INSTALL_HINT}; or let models be compared by F1 of words: task.metric=f1")

    @classmethod
    def create(cls, setup: TaskSetup) -> tuple[Task, ModelBundle]:
        settings, loaded = setup.settings, setup.loaded
        assert isinstance(settings, Seq2SeqSettings)
        mark = sequence_ends(loaded.config.model, require_tokenizer(loaded))
        suffix = "" if mark.start is not None else TEXT_SUFFIX
        fields = _fields(settings) | {"label_smoothing": settings.label_smoothing}
        task, made = cls.with_new_head(setup, mark=mark, text_suffix=suffix, **fields)
        made.text_suffix = suffix
        return replace(task, limit_written=made.max_target_length), made

    @classmethod
    def evaluation_fields(
        cls, loaded: ModelBundle, survey: Callable[[], DatasetStats], settings: TaskSettings | None
    ) -> dict[str, Any]:
        """Return the fields for evaluation: the generation settings, and how the model begins and ends a text."""
        settings = settings or Seq2SeqSettings()
        assert isinstance(settings, Seq2SeqSettings)
        mark = sequence_ends(loaded.config.model, require_tokenizer(loaded))
        return {"mark": mark, "text_suffix": loaded.text_suffix, "limit_written": loaded.max_target_length} | _fields(
            settings
        )

    @property
    def generation(self) -> GenerationConfig:
        """How an evaluation writes."""
        return GenerationConfig(
            how=BeamSearch(num_beams=self.num_beams) if self.num_beams > 1 else Greedy(),
            max_new_tokens=self.max_new_tokens,
        )

    def tokenizer_inputs(self, example: Any) -> list[TokenizerInput]:
        return [example.text + self.text_suffix, example.rewritten]

    def engine_input(self, example: Any) -> Any:
        return example.text

    def windows(self, items: list[TokenizerInput], seen: list[Encoding]) -> list[list[Encoding]]:
        """Never cut apart: what is written depends on all of the text."""
        text, said = len(seen[0]), len(self._said(seen[1]))
        read = text if self.mark.start is not None else text + said - 1  # the end is not read
        for length, limit in ((read, self.limit), (said, self.limit_written)):
            if limit is not None and length > limit:
                raise HeedfulError(
                    f"text and rewriting have {text} and {said} tokens, the end among them, but this model reads "
                    f'{limit} at once: leave the example out, or cut its end: long_inputs = "truncate"'
                )
        return [[each] for each in seen]

    def _said(self, rewritten: Encoding) -> list[int]:
        """What is learned to be written: the tokens of the text itself, and the end."""
        around = {self.mark.stop, self.tokenizer.special.first}
        inner = [id for id, segment in zip(rewritten.ids, rewritten.segments, strict=True) if segment is not None]
        return [*(id for id in inner if id not in around), self.mark.stop]

    def check(self, examples: Iterable[Any]) -> None:
        if self.limit is None or self.cut is not None:
            return
        for chunk in batched(examples, CHUNK):
            texts = self.tokenizer.encode_batch([self.tokenizer_inputs(example)[0] for example in chunk])
            if wrong := next((pair for pair in zip(chunk, texts, strict=True) if len(pair[1]) > self.limit), None):
                raise HeedfulError(
                    f"{wrong[0].file}:{wrong[0].line}: the text has {len(wrong[1])} tokens, but this model reads "
                    f'{self.limit} at once: leave the example out, or cut its end: long_inputs = "truncate"'
                )

    @property
    def cut(self) -> int | None:
        return self._cut_at(super().cut)

    def _cut_at(self, most: int | None) -> int | None:
        """The same, less an end that the tokenizer does not put; half, where the decoder goes on from the text."""
        if most is None or self.mark.start is None:
            return most and most // 2
        return most - (self.mark.stop not in self.tokenizer.encode("").ids)

    def _encode(self, items: list[TokenizerInput]) -> list[Encoding]:
        """Texts and rewritings, by turns."""
        most = self.cut, self._cut_at(self.limit_written if self.long_inputs == "truncate" else None)
        sides = (encode_truncated(self.tokenizer, items[at::2], self.text_suffix, each) for at, each in enumerate(most))
        return [each for both in zip(*sides, strict=True) for each in both]

    def make_samples(self, example: Seq2SeqExample, seen: list[list[Encoding]]) -> list[Sample]:
        (text,), (rewritten,) = seen
        said = self._said(rewritten)
        if self.mark.start is not None:
            read = [self.mark.start, *said[:-1]]
            return [Sample.of([text.ids, read], [text.types, [0] * len(read)], target=said)]
        ids = [*text.ids, *said[:-1]]
        return [Sample.of([ids], [[0] * len(ids)], target=said)]

    def remarks(self, example: Seq2SeqExample, seen: list[list[Encoding]]) -> list[str]:
        (rewritten,) = seen[1]
        said, found = self._said(rewritten), Task.remarks(self, example, seen)
        if len(said) > self.max_new_tokens:
            found.append(
                f"have rewritings that are longer than evaluations write (task.max_new_tokens={self.max_new_tokens})"
            )
        if not rewritten.dropped and self.tokenizer.decode(said[:-1]).strip() != example.rewritten.strip():
            found.append(
                "have rewritings that the tokenizer does not give back as they were: what is written differs in case, "
                "signs or spaces"
            )
        return found

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        said = [torch.tensor(sample.target) for sample in samples]
        weights = torch.cat(
            [torch.full((len(each),), sample.weight) for each, sample in zip(said, samples, strict=True)]
        )
        targets = torch.cat(said)
        if self.mark.start is not None:
            texts, read = ([_part(sample, number) for sample in samples] for number in (0, 1))
            return Batch(packed=pack_samples(texts), target=pack_samples(read), targets=targets, weights=weights)
        packed = pack_samples(samples)
        rows = [
            torch.arange(stop - len(each), stop) for (_, stop), each in zip(pairwise(packed.bounds), said, strict=True)
        ]
        return Batch(packed=packed, targets=targets, weights=weights, rows=torch.cat(rows))

    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        return weighted_loss(self.target_losses(self.scores(loaded, batch), batch), batch.weights)

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
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
        each = [text_scores(*pair) for pair in pairs]
        unfinished = sum(not answer.get("complete", True) for answer in answers)
        updated = {"texts": metrics.metrics["texts"].added(each, unfinished)}
        bootstraps = {
            name: metrics.bootstraps[name].update(ids, [(scores[place], 1) for scores in each])
            for place, name in enumerate(("exact", "f1"))
        }
        if bleu := metrics.metrics.get("bleu"):
            rows = [bleu.statistics(*pair) for pair in pairs]
            updated["bleu"] = bleu.added(rows)
            bootstraps["bleu"] = metrics.bootstraps["bleu"].update(ids, rows)
        return EvalMetrics(metrics=updated, bootstraps=bootstraps)

    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        """Exact match and F1 of words, by each letter and sign of the texts, and BLEU.

        BLEU is there where sacrebleu is installed, with its signature; in lower case where the tokenizer lower-cases.
        """
        texts, notes = metrics.metrics["texts"], []
        shown: Result = texts.compute()
        if bleu := metrics.metrics.get("bleu"):
            found = bleu.compute()
            shown |= {name: found[name] for name in ("bleu", "signature")}
            notes.append(f"BLEU is sacrebleu's, {found['signature']}")
            if bleu.blunt:
                notes.append(f"BLEU says little here: most right texts have fewer than {ORDER} words as it counts them")
        if texts.unfinished:
            notes.append(
                f"texts cut off before their end: {texts.unfinished:,} (task.max_new_tokens={self.max_new_tokens})"
            )
        return shown | {"notes": notes}

    def score_answer(self, example: Seq2SeqExample, answer: Answer) -> ScoredAnswer:
        exact, f1 = text_scores(answer["text"], example.rewritten)
        return ScoredAnswer(example.rewritten, answer["text"], bool(exact), 1 - f1)


def _fields(settings: Seq2SeqSettings) -> dict[str, Any]:
    """Return the settings of evaluations."""
    return {name: getattr(settings, name) for name in ("max_new_tokens", "num_beams", "metric", "bleu")}


def _part(sample: Sample, number: int) -> Sample:
    """One sequence of a sample, as a sample."""
    start, stop = sample.bounds[number : number + 2]
    return Sample(tokens=sample.tokens[start:stop], types=sample.types[start:stop], bounds=(0, stop - start))
