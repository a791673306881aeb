"""Task: the base class of all tasks, and `evaluate_task`, which evaluates a model's answers on examples.

A task is an objective for training that can also answer inputs. Runs train and evaluate models through this class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count, islice, zip_longest
from math import log
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, Self

import numpy as np
from jaxtyping import Float64
from torch import Tensor
from typing_extensions import TypeVar

from heedful.checkpoint import ModelBundle
from heedful.checkpoint.new_head import with_head
from heedful.data import Example
from heedful.data.labelled.statistics import DatasetStats
from heedful.errors import HeedfulError, InputError
from heedful.model.config import Classes, ProblemType, TokenClasses
from heedful.model.pooling import PooledClassesHead
from heedful.objectives import Batch, Loss, Objective, Sample
from heedful.objectives.base import upcast, weighted_loss
from heedful.tasks.answering import Answer, AnswerHead, AnswerInputs, require_tokenizer, split_windows
from heedful.tasks.metrics import Bootstrap, HasIntervals, Result
from heedful.tasks.metrics.base import Values
from heedful.tasks.metrics.bootstrap import Formula
from heedful.tasks.settings import TaskSettings
from heedful.tasks.specs import SPECS
from heedful.tokenizer import Encoding, Tokenizer, TokenizerInput

if TYPE_CHECKING:
    from heedful.tasks.generation import GenerationConfig

LongInputs = Literal["stride", "truncate"]  # stride: split into windows that overlap by half; truncate: cut at the end
CHUNK_EXAMPLES = 512  # examples per call of the tokenizer or the engine
TaskFields = dict[str, Any]  # keyword arguments of a task's class
BOOTSTRAP_SEED = 0  # seed of bootstrap intervals
MIN_PROBABILITY = 1e-12  # lower bound of probabilities in a loss
T = TypeVar("T")
AnyExample = TypeVar("AnyExample", bound=Example, default=Any)


class ScoredAnswer(NamedTuple):
    """A prediction with the gold label and a loss, in plain data."""

    label: Any  # gold label
    prediction: Any  # predicted label
    correct: bool | None  # None: the label is a number, or `ranks` decides after all examples
    loss: float  # larger is worse; for rankings, the rank of the correct answer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BootstrapStat:
    """A bootstrap of one statistic: sums over the examples of each replicate, and the formula of the statistic."""

    sums: Bootstrap
    formula: Formula

    def update(self, ids: Sequence[int], statistics: Values) -> BootstrapStat:
        """Return the bootstrap with examples added.

        Args:
            ids: Index of each example in the data set.
            statistics: The summands of each example, [examples, statistics].
        """
        return replace(self, sums=self.sums.update(ids, np.asarray(statistics, dtype=np.float64)))

    def merge_state(self, incoming: BootstrapStat) -> BootstrapStat:
        """Return the bootstrap over the examples of both bootstraps."""
        return replace(self, sums=self.sums.merge_state(incoming.sums))

    def interval(self) -> Result:
        """Return the interval of the statistic, from the quantiles of the replicates."""
        return self.sums.interval(self.formula)

    def values(self) -> Float64[np.ndarray, " replicates"]:
        """Return the statistic in each replicate."""
        return self.sums.values(self.formula)


def bootstrap_stat(statistics: int, formula: Formula) -> BootstrapStat:
    """Return an empty bootstrap.

    Args:
        statistics: How many summands each example has.
        formula: Computes the statistic from the sums of the summands.
    """
    return BootstrapStat(sums=Bootstrap(seed=BOOTSTRAP_SEED, statistics=statistics), formula=formula)


@dataclass(frozen=True, kw_only=True, slots=True)
class TruncationStats:
    """Counts of examples that were truncated to the model's maximum length, and of their dropped tokens."""

    examples: int = 0  # truncated examples
    tokens: int = 0  # dropped tokens

    def update(self, dropped_tokens: Sequence[int]) -> TruncationStats:
        """Add examples by how many tokens of each were dropped."""
        truncated = sum(count > 0 for count in dropped_tokens)
        return self.merge_state(TruncationStats(examples=truncated, tokens=sum(dropped_tokens)))

    def merge_state(self, incoming: TruncationStats) -> TruncationStats:
        """Return the counts over the examples of both metrics."""
        return TruncationStats(examples=self.examples + incoming.examples, tokens=self.tokens + incoming.tokens)

    def notes(self) -> list[str]:
        """Return a sentence for the report, or nothing if no example was truncated."""
        if not self.examples:
            return []
        return [f"examples longer than the model reads, which were cut: {self.examples:,} ({self.tokens:,} tokens)"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCounts:
    """Counts of the examples that each stage of a cascade answered."""

    counts: tuple[int, ...] = ()  # examples by stage; (): a single model

    def update(self, stages: Sequence[int]) -> StageCounts:
        """Add examples by the stages (from 1) that answered them."""
        return self.merge_state(StageCounts(counts=tuple(np.bincount(stages)[1:].tolist()) if stages else ()))

    def merge_state(self, incoming: StageCounts) -> StageCounts:
        """Return the counts over the examples of both metrics."""
        pairs = zip_longest(self.counts, incoming.counts, fillvalue=0)
        return StageCounts(counts=tuple(map(sum, pairs)))

    def notes(self) -> list[str]:
        """Return a sentence for the report, or nothing for a single model."""
        total = sum(self.counts)
        shares = [f"{100 * count / total:.1f} % by stage {stage}" for stage, count in enumerate(self.counts, start=1)]
        return [f"examples that the stages of the cascade answered: {', '.join(shares)}"] if total else []


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EvalMetrics:
    """Metrics by name, and bootstraps of some of their numbers. Merging is exact and does not depend on the order."""

    metrics: Mapping[str, Any]
    bootstraps: Mapping[str, Any] = field(default_factory=dict)
    truncation: TruncationStats = TruncationStats()  # filled by `evaluate_task`
    stages: StageCounts = StageCounts()  # filled by `evaluate_task`

    def merge_state(self, incoming: EvalMetrics) -> EvalMetrics:
        """Return the metrics over the examples of both."""
        return EvalMetrics(
            metrics={name: metric.merge_state(incoming.metrics[name]) for name, metric in self.metrics.items()},
            bootstraps={
                name: bootstrap.merge_state(incoming.bootstraps[name]) for name, bootstrap in self.bootstraps.items()
            },
            truncation=self.truncation.merge_state(incoming.truncation),
            stages=self.stages.merge_state(incoming.stages),
        )

    def intervals(self) -> dict[str, Result]:
        """Return intervals by metric name: "low" to "high" contains 95 % of the replicates (Efron 1979)."""
        intervals = {name: bootstrap.interval() for name, bootstrap in self.bootstraps.items()}
        for metric in self.metrics.values():
            if isinstance(metric, HasIntervals):
                intervals |= metric.intervals(BOOTSTRAP_SEED)
        return intervals


@dataclass(frozen=True, kw_only=True)
class EncodedSplit:
    """The encoded examples of a split: samples for training, with counts for the report."""

    samples: Sequence[Sample]
    examples: int  # how many examples were encoded
    tokens: int  # tokens of all samples; a token in two windows is counted twice
    windowed: int  # how many examples were split into windows
    truncated: int  # how many examples were truncated
    truncated_tokens: int  # tokens dropped by truncation
    skipped: int  # how many examples have no sample
    skipped_because: str = ""  # reason for skipping, for the report
    example_indices: list[int]  # index of the example that each sample comes from
    remarks: Counter[str]  # how many examples have each remark


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSetup:
    """Everything from which a task is created for training: settings, model, labels and statistics of the data."""

    settings: TaskSettings
    loaded: ModelBundle  # the model to start from
    labels: tuple[str, ...]  # names of the labels
    stats: DatasetStats  # statistics of the data
    seed: int = 0  # seed of the initial weights of a new head
    reinit_layers: int = 0  # how many of the last layers get new random weights
    max_length: int | None = None  # maximum tokens in a sequence; None: the model's maximum
    long_inputs: LongInputs = "stride"


@dataclass(frozen=True, kw_only=True)
class Task(Objective, ABC, Generic[AnyExample]):
    """Base class of tasks: samples and loss for training, answers and metrics for evaluation."""

    example: ClassVar[type[Example]]  # class of the examples
    answerers: ClassVar[tuple[AnswerHead, ...]]  # the first one that accepts the form of an input answers the input
    problem_type: ClassVar[ProblemType] = "single_label_classification"
    skipped_because: ClassVar[str] = "none of their tokens has a target"  # reason if there is no sample
    takes_pairs: ClassVar[bool] = False  # whether an example may be a pair of texts

    tokenizer: Tokenizer
    limit: int | None  # maximum tokens in a sequence; None: no limit
    labels: tuple[str, ...] = ()
    metric: str  # name of the metric by which models are compared; larger is better
    group_size: int = 1  # samples that the loss compares with each other
    long_inputs: LongInputs = "stride"  # treatment of inputs longer than `limit`, in training and evaluation

    @classmethod
    def create(cls, setup: TaskSetup) -> tuple[Task, ModelBundle]:
        """Return the task for training, and the model with the task's head."""
        return cls.with_new_head(setup)

    @classmethod
    def with_new_head(cls, setup: TaskSetup, **fields: Any) -> tuple[Self, ModelBundle]:
        """Return a task of this class, and the model with the task's head.

        Args:
            setup: Settings and model. Inputs of the model are limited to `max_length` tokens.
            fields: Other fields of the task.

        Raises:
            HeedfulError: If the model reads fewer than `max_length` tokens.
        """
        loaded, tokenizer = setup.loaded, require_tokenizer(setup.loaded)
        bundle = with_head(
            loaded,
            SPECS[setup.settings.kind].head,
            labels=fields.get("labels", ()),
            problem_type=cls.problem_type,
            seed=setup.seed,
            reinit_layers=setup.reinit_layers,
        )
        if setup.max_length is not None:
            if bundle.max_length is not None and setup.max_length > bundle.max_length:
                raise HeedfulError(
                    f"max_length is {setup.max_length}, but {loaded.source} reads {bundle.max_length} tokens"
                )
            tokenizer = bundle.tokenizer = tokenizer.limited(setup.max_length)
        defaults: TaskFields = {
            "tokenizer": tokenizer,
            "limit": bundle.max_length,
            "long_inputs": setup.long_inputs,
        }
        return cls(**(defaults | fields)), bundle

    @classmethod
    def evaluation_fields(
        cls, loaded: ModelBundle, read_stats: Callable[[], DatasetStats], settings: TaskSettings | None
    ) -> TaskFields:
        """Return the fields of the task for evaluating a trained model, except the tokenizer and the limits.

        Args:
            loaded: The model.
            read_stats: Reads the split and returns its statistics.
            settings: Settings of the model's training. If None, defaults apply.
        """
        return {"labels": loaded.config.head.labels} if isinstance(loaded.config.head, Classes | TokenClasses) else {}

    def for_split(
        self, loaded: ModelBundle, read_stats: Callable[[], DatasetStats], split: str
    ) -> tuple[Task, ModelBundle]:
        """Return the task and the model for evaluating a split; `loaded` itself is not changed."""
        return self, loaded

    def for_unlabelled(self) -> Task:
        """Return the task for examples without labels."""
        return self

    def tune_thresholds(self, engine: AnswerInputs, examples: Iterable[AnyExample]) -> dict[str, float]:
        """Return the thresholds that are best on examples.

        Called only if `TaskSettings.tunes_thresholds` is true; other tasks need not define this method.
        """
        raise NotImplementedError

    def fit_temperature(self, engine: AnswerInputs, examples: Iterable[AnyExample]) -> float | None:
        """Return the temperature by which scores are divided to calibrate the probabilities of examples.

        The result is None if there are too few examples or too few wrong answers. Called only if
        `TaskSettings.fits_temperature` is true; other tasks need not define this method.
        """
        raise NotImplementedError

    def calibration(self, engine: AnswerInputs, examples: Iterable[AnyExample]) -> tuple[float, ...]:
        """Return the probabilities of the gold labels of held-out examples, ascending, for prediction sets.

        The result is empty if the task has no prediction sets, or if there are too few examples.
        """
        return ()

    @property
    def generation(self) -> GenerationConfig | None:
        """The settings of text generation in evaluations, or None if the task generates no text."""
        return None

    @abstractmethod
    def tokenizer_inputs(self, example: AnyExample) -> list[TokenizerInput]:
        """Return the inputs of the tokenizer for an example."""

    @abstractmethod
    def make_samples(self, example: AnyExample, item_windows: list[list[Encoding]]) -> list[Sample]:
        """Return the samples of an example; an example without samples is skipped.

        Args:
            example: The example.
            item_windows: The windows of each tokenizer input of the example.
        """

    def remarks(self, example: AnyExample, item_windows: list[list[Encoding]]) -> list[str]:
        """Return remarks on a training example, such as "have an empty text". The report counts examples by remark."""
        return [] if all(text.strip() for text in example.texts) else ["have an empty text"]

    @abstractmethod
    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Collate samples into a batch."""

    def for_training(self, loaded: ModelBundle) -> ModelBundle:
        """Convert a model for inference to the form in which it is trained."""
        return loaded

    def for_inference(self, loaded: ModelBundle) -> ModelBundle:
        """Convert a model from the form in which it is trained to the form for inference."""
        return loaded

    def scores(self, loaded: ModelBundle, batch: Batch, hidden_states: Tensor | None = None) -> Tensor:
        """Return the head's outputs in float32, for the tokens `batch.rows` or, without these, for each sequence.

        Args:
            loaded: The model.
            batch: The batch.
            hidden_states: Hidden states of all tokens of the batch. If None, the model computes those that the head
                needs.
        """
        if hidden_states is None:
            outputs = loaded.head_outputs(batch.packed, batch.decoder_input, output_rows=batch.rows)
            assert isinstance(outputs, Tensor)
            return upcast(outputs)
        assert loaded.head is not None
        head_input = hidden_states if batch.rows is None else hidden_states[batch.rows]
        return upcast(loaded.head(head_input, batch.packed))

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        """Return the loss of each target. A task whose loss needs more than scores overrides `loss`."""
        raise NotImplementedError

    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        """Return the weighted sum of the losses of the batch, and the total weight."""
        if not isinstance(loaded.head, PooledClassesHead):
            return weighted_loss(self.target_losses(self.scores(loaded, batch), batch), batch)
        hidden_states = loaded.hidden_states(batch.packed)
        losses = self.target_losses(self.scores(loaded, batch, hidden_states), batch)
        return weighted_loss(losses + loaded.head.penalty(hidden_states, batch.packed), batch)

    @abstractmethod
    def engine_input(self, example: AnyExample) -> object:
        """Return the input of the engine for an example."""

    @abstractmethod
    def new_metrics(self) -> EvalMetrics:
        """Return empty metrics."""

    @abstractmethod
    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[AnyExample], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        """Return the metrics with examples added.

        Args:
            metrics: Metrics over earlier examples.
            examples: Examples with labels.
            answers: The engine's answers, in the order of the examples.
            ids: Index of each example in the data set.
        """

    @abstractmethod
    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        """Return the results by name. One of the names is `self.metric`."""

    def report(self, metrics: EvalMetrics) -> Result:
        """Return the results, with notes on truncated examples and on the stages of a cascade."""
        results = self.compute_metrics(metrics)
        return results | {"notes": [*results.get("notes", []), *metrics.truncation.notes(), *metrics.stages.notes()]}

    @abstractmethod
    def score_answer(self, example: AnyExample, answer: Answer) -> ScoredAnswer:
        """Compare an answer with the example's label."""

    def ranks(self, metrics: EvalMetrics) -> Sequence[int]:
        """Return the rank (from 1) of each example's correct answer, or () if `score_answer` sets `correct`."""
        return ()

    def check(self, examples: Iterable[AnyExample]) -> None:
        """Raise HeedfulError for an example that the model cannot process. Called before training."""

    def windows(self, inputs: list[TokenizerInput], encodings: list[Encoding]) -> list[list[Encoding]]:
        """Return the windows of each tokenizer input."""
        return [split_windows(item, encoding, self.limit) for item, encoding in zip(inputs, encodings, strict=True)]

    def encode_split(self, examples: Iterable[AnyExample]) -> EncodedSplit:
        """Encode examples into samples, in order.

        Raises:
            HeedfulError: If an example cannot be split into windows. The message names its file and line.
        """
        samples: list[Sample] = []
        example_indices: list[int] = []
        remarks: Counter[str] = Counter()
        example_count = windowed = truncated = truncated_tokens = skipped = 0
        for chunk in batched(examples, CHUNK_EXAMPLES):
            inputs = [self.tokenizer_inputs(example) for example in chunk]
            encodings = iter(self._encode(list(chain.from_iterable(inputs))))
            for example, own_inputs in zip(chunk, inputs, strict=True):
                encoded = [next(encodings) for _ in own_inputs]
                dropped = sum(encoding.dropped for encoding in encoded)
                try:
                    item_windows = self.windows(own_inputs, encoded)
                except HeedfulError as error:
                    raise HeedfulError(f"{example.file}:{example.line}: {error}") from None
                new_samples = self.make_samples(example, item_windows)
                samples += new_samples
                example_indices += [example_count] * len(new_samples)
                example_count += 1
                truncated += dropped > 0
                truncated_tokens += dropped
                windowed += any(len(windows) > 1 for windows in item_windows)
                skipped += not new_samples
                remarks.update(self.remarks(example, item_windows))
        return EncodedSplit(
            samples=samples,
            examples=example_count,
            tokens=sum(map(len, samples)),
            windowed=windowed,
            truncated=truncated,
            truncated_tokens=truncated_tokens,
            skipped=skipped,
            skipped_because=self.skipped_because,
            example_indices=example_indices,
            remarks=remarks,
        )

    @property
    def truncation_length(self) -> int | None:
        """The maximum tokens of an input, above which it is truncated, or None if inputs are not truncated."""
        return self.limit if self.long_inputs == "truncate" else None

    def _encode(self, items: list[TokenizerInput]) -> list[Encoding]:
        """Encode tokenizer inputs, truncated if `truncation_length` is set."""
        if self.truncation_length is None:
            return self.tokenizer.encode_batch(items)
        return self.tokenizer.encode_batch(items, max_length=self.truncation_length, truncate="longest_first")


def batched(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield the values in lists of at most `size`.

    >>> list(batched("abcde", 2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    rest = iter(values)
    while chunk := list(islice(rest, size)):
        yield chunk


def evaluate_task(
    task: Task[AnyExample],
    engine: AnswerInputs,
    examples: Iterable[AnyExample],
    *,
    first: int = 0,
    step: int = 1,
    on_answer: Callable[[int, AnyExample, Answer, ScoredAnswer], None] | None = None,
) -> EvalMetrics:
    """Evaluate every `step`-th example, beginning at index `first`. Examples are streamed, in bounded memory.

    Merged over all ranks, the metrics equal those of a single process, to the last bit if the answers are equal.

    Args:
        task: The task.
        engine: Function that answers inputs.
        examples: Examples with labels.
        first: Index of the first example, such as the rank of this process.
        step: Distance between examples, such as the world size.
        on_answer: Called for each answer with the example's index, the example, the answer and its score.

    Raises:
        HeedfulError: If the engine refuses an example. The message names its file and line.
    """
    metrics = task.new_metrics()
    indexed_examples = zip(count(first, step), islice(iter(examples), first, None, step), strict=False)
    for chunk in batched(indexed_examples, CHUNK_EXAMPLES):
        ids = [index for index, _ in chunk]
        batch = [example for _, example in chunk]
        try:
            answers = engine([task.engine_input(example) for example in batch])
        except InputError as error:
            refused = batch[error.index]
            raise HeedfulError(f"{refused.file}:{refused.line}: {error.reason}") from None
        except HeedfulError as error:
            raise HeedfulError(f"the {len(batch)} examples from {batch[0].file}:{batch[0].line} on: {error}") from None
        truncation = metrics.truncation.update([answer.get("truncated_tokens", 0) for answer in answers])
        stages = metrics.stages.update([answer["stage"] for answer in answers if "stage" in answer])
        metrics = replace(task.update_metrics(metrics, batch, answers, ids), truncation=truncation, stages=stages)
        if on_answer is not None:
            for index, example, answer in zip(ids, batch, answers, strict=True):
                on_answer(index, example, answer, task.score_answer(example, answer))
    return metrics


def log_loss(probability: float) -> float:
    """Return the loss of a label with this probability: -log p, at most about 27.6."""
    return -log(max(probability, MIN_PROBABILITY))
