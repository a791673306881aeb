"""Task: an objective that also answers. What it learns from, what it is asked, and how its answers are measured."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from math import log
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypeVar

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from heedful.checkpoint import ModelBundle
from heedful.checkpoint.new_head import with_head
from heedful.data import Example
from heedful.data.labelled.statistics import DatasetStats
from heedful.errors import HeedfulError, InputError
from heedful.model.config import Classes, ProblemType, TokenClasses
from heedful.model.pooling import PooledClassesHead
from heedful.objectives import Batch, Loss, Objective, Sample
from heedful.objectives.base import upcast, weighted_loss
from heedful.tasks.answering import Answer, AnswerHead, require_tokenizer, split_windows
from heedful.tasks.metrics import Bootstrap, HasIntervals, Result
from heedful.tasks.settings import TaskSettings
from heedful.tokenizer import Encoding, Tokenizer, TokenizerInput

if TYPE_CHECKING:
    from heedful.tasks.generation import GenerationConfig

LongInputs = Literal["stride", "truncate"]  # longer than the model reads: windows that overlap by half, or no end
CHUNK = 512  # examples that are tokenized, or asked, together
SEED = 0  # of bootstrap intervals
MIN_PROBABILITY = 1e-12  # a probability below it counts as that much in a loss
T = TypeVar("T")


class ScoredAnswer(NamedTuple):
    """One answer beside what is right, in plain data."""

    label: Any  # of the data
    prediction: Any
    correct: bool | None  # None: there is no right and wrong, only more and less; or all `ranks` are needed to know it
    loss: float  # larger is worse; a rank where answers are ranked


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BootstrapStat:
    """Sums of a bootstrap, and the formula that makes a number of them."""

    sums: Bootstrap
    formula: Callable[[Any], Any]

    def update(self, ids: Sequence[int], statistics: Any) -> BootstrapStat:
        """With a row of statistics for each of more examples."""
        return replace(self, sums=self.sums.update(ids, np.asarray(statistics, dtype=np.float64)))

    def merge_state(self, other: BootstrapStat) -> BootstrapStat:
        """Both as one."""
        return replace(self, sums=self.sums.merge_state(other.sums))

    def interval(self) -> Result:
        """Where the middle of the replicates lies."""
        return self.sums.interval(self.formula)

    def values(self) -> Float64[np.ndarray, " replicates"]:
        """The number in each replicate."""
        return self.sums.values(self.formula)


def bootstrap_stat(statistics: int, formula: Callable[[Any], Any]) -> BootstrapStat:
    """A bootstrap that has seen nothing yet."""
    return BootstrapStat(sums=Bootstrap(seed=SEED, statistics=statistics), formula=formula)


@dataclass(frozen=True, kw_only=True, slots=True)
class TruncationStats:
    """How many examples were longer than the model reads and lost their end, and how many tokens that were."""

    examples: int = 0
    tokens: int = 0

    def update(self, tokens: Sequence[int]) -> TruncationStats:
        """With more examples: the tokens that each lost."""
        return self.merge_state(TruncationStats(examples=sum(each > 0 for each in tokens), tokens=sum(tokens)))

    def merge_state(self, other: TruncationStats) -> TruncationStats:
        """Both as one."""
        return TruncationStats(examples=self.examples + other.examples, tokens=self.tokens + other.tokens)

    def notes(self) -> list[str]:
        """In a sentence, where there are any."""
        if not self.examples:
            return []
        return [f"examples longer than the model reads, which were cut: {self.examples:,} ({self.tokens:,} tokens)"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EvalMetrics:
    """Metrics by name and intervals of some of their numbers; merging is exact, in any order."""

    metrics: Mapping[str, Any]
    bootstraps: Mapping[str, Any] = field(default_factory=dict)  # Spread, or what has its `merged` and `interval`
    cut: TruncationStats = TruncationStats()  # noted by `evaluate`, below, for all tasks

    def merge_state(self, other: EvalMetrics) -> EvalMetrics:
        """Both as one."""
        return EvalMetrics(
            metrics={name: metric.merge_state(other.metrics[name]) for name, metric in self.metrics.items()},
            bootstraps={name: spread.merge_state(other.bootstraps[name]) for name, spread in self.bootstraps.items()},
            cut=self.cut.merge_state(other.cut),
        )

    def intervals(self) -> dict[str, Result]:
        """95 % of the replicates lie from "low" to "high" (Efron 1979)."""
        found = {name: spread.interval() for name, spread in self.bootstraps.items()}
        for metric in self.metrics.values():
            if isinstance(metric, HasIntervals):
                found |= metric.intervals(SEED)
        return found


@dataclass(frozen=True, kw_only=True)
class EncodedSplit:
    """Samples to learn from, and what reading the examples cost."""

    samples: list[Sample]
    examples: int
    tokens: int  # of all samples; what windows share counts in each
    windowed: int  # examples that are longer than the limit and are seen in windows
    cut: int  # examples of which the end was cut off
    cut_tokens: int
    left_out: int  # examples of which nothing can be learned (see the task)
    owners: list[int]  # of each sample, the number of its example
    remarks: Counter[str]  # and of how many examples each is true


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSetup:
    """Settings, model, labels and data statistics from which a task is created for training."""

    settings: TaskSettings
    loaded: ModelBundle  # the model to start from
    labels: tuple[str, ...]
    survey: DatasetStats
    seed: int = 0  # of what is drawn of a new head
    reinit_layers: int = 0
    max_length: int | None = None  # tokens of a sequence; None: as many as the model reads
    long_inputs: LongInputs = "stride"


@dataclass(frozen=True, kw_only=True)
class Task(Objective, ABC):
    """What is shared by all tasks."""

    example: ClassVar[type[Example]]
    head: ClassVar[str]
    answerers: ClassVar[tuple[AnswerHead, ...]]  # the first that knows an input's form answers it
    problem_type: ClassVar[ProblemType] = "single_label_classification"
    takes_pairs: ClassVar[bool] = False  # texts may come in pairs, and a model remembers whether they did

    tokenizer: Tokenizer
    limit: int | None  # tokens of a sequence
    labels: tuple[str, ...] = ()
    metric: str  # the number of `result` by which models are compared, the larger the better
    together: int = 1
    long_inputs: LongInputs = "stride"  # in training and evaluation

    @classmethod
    def create(cls, setup: TaskSetup) -> tuple[Task, ModelBundle]:
        """Make the task for training, and the model with its head."""
        return cls.with_new_head(setup)

    @classmethod
    def with_new_head(cls, setup: TaskSetup, **more: Any) -> tuple[Self, ModelBundle]:
        """Make the task from more fields, and the model with its head, which reads `max_length` tokens from now on."""
        loaded, tokenizer = setup.loaded, require_tokenizer(setup.loaded)
        made = with_head(
            loaded,
            cls.head,
            labels=more.get("labels", ()),
            problem_type=cls.problem_type,
            seed=setup.seed,
            reinit_layers=setup.reinit_layers,
        )
        if setup.max_length is not None:
            if made.max_length is not None and setup.max_length > made.max_length:
                raise HeedfulError(
                    f"max_length is {setup.max_length}, but {loaded.source} reads {made.max_length} tokens"
                )
            tokenizer = made.tokenizer = tokenizer.limited(setup.max_length)
        return cls(**{"tokenizer": tokenizer, "limit": made.max_length, "long_inputs": setup.long_inputs, **more}), made

    @classmethod
    def evaluation_fields(
        cls, loaded: ModelBundle, survey: Callable[[], DatasetStats], settings: TaskSettings | None
    ) -> dict[str, Any]:
        """Return the fields, beside the tokenizer and limits, of the task by which a trained model is evaluated.

        Args:
            loaded: The model.
            survey: Reads the split and surveys it.
            settings: Settings of the run; None: defaults.
        """
        return {"labels": loaded.config.head.labels} if isinstance(loaded.config.head, Classes | TokenClasses) else {}

    def for_split(
        self, loaded: ModelBundle, survey: Callable[[], DatasetStats], split: str
    ) -> tuple[Task, ModelBundle]:
        """Return task and model as they are evaluated on a split; the given ones stay as they are."""
        return self, loaded

    def for_unlabelled(self) -> Task:
        """Return the task as it reads examples without labels."""
        return self

    def calibrate(self, ask: Callable[[list[Any]], list[Answer]], examples: Iterable[Any]) -> dict[str, float]:
        """Return thresholds fitted on examples, for a task whose settings may ask for it."""
        raise NotImplementedError

    @property
    def generation(self) -> GenerationConfig | None:
        """How an evaluation generates text; None: the task does not."""
        return None

    @abstractmethod
    def tokenizer_inputs(self, example: Any) -> list[TokenizerInput]:
        """What the tokenizer reads of an example."""

    @abstractmethod
    def make_samples(self, example: Any, seen: list[list[Encoding]]) -> list[Sample]:
        """Samples of an example, from the windows of each of its items; none: nothing can be learned of it."""

    def remarks(self, example: Any, seen: list[list[Encoding]]) -> list[str]:
        """What should be told of an example that is learned from; how many it is true of is counted."""
        return [] if all(text.strip() for text in example.texts) else ["have an empty text"]

    @abstractmethod
    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        """Samples as a batch."""

    def for_training(self, loaded: ModelBundle) -> ModelBundle:
        """A model that answers, as one that learns by this task's loss."""
        return loaded

    def for_inference(self, loaded: ModelBundle) -> ModelBundle:
        """A model that learns, as it answers."""
        return loaded

    def scores(self, loaded: ModelBundle, batch: Batch, rows: Tensor | None = None) -> Tensor:
        """What the head says of the model's rows, in float32: of the places that are scored, or of whole sequences.

        `rows` are all rows, where they are known; otherwise the model is asked for those that the head reads.
        """
        if rows is None:
            return upcast(loaded.head_outputs(batch.packed, batch.target, output_rows=batch.rows))
        assert loaded.head is not None
        return upcast(loaded.head(rows if batch.rows is None else rows[batch.rows], batch.packed))

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        """A loss for each target, of those scores; a task that learns by more than scores has a `loss` of its own."""
        raise NotImplementedError

    def loss(self, loaded: ModelBundle, batch: Batch) -> Loss:
        """The sum of the batch's losses and their weight."""
        if not isinstance(loaded.head, PooledClassesHead):
            return weighted_loss(self.target_losses(self.scores(loaded, batch), batch), batch.weights)
        rows = loaded.hidden_states(batch.packed)
        losses = self.target_losses(self.scores(loaded, batch, rows), batch)
        return weighted_loss(losses + loaded.head.penalty(rows, batch.packed), batch.weights)

    @abstractmethod
    def engine_input(self, example: Any) -> Any:
        """The engine's input for an example."""

    @abstractmethod
    def new_metrics(self) -> EvalMetrics:
        """What has seen nothing yet."""

    @abstractmethod
    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[Any], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        """With more examples, the engine's answers to them, and their numbers in the data set."""

    @abstractmethod
    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        """The numbers, `metric` among them; what is no number is detail."""

    def report(self, metrics: EvalMetrics) -> Result:
        """The numbers, and in their notes what was cut."""
        found = self.compute_metrics(metrics)
        return found | {"notes": [*found.get("notes", []), *metrics.cut.notes()]}

    @abstractmethod
    def score_answer(self, example: Any, answer: Answer) -> ScoredAnswer:
        """One answer beside what is right."""

    def ranks(self, metrics: EvalMetrics) -> Sequence[int]:
        """Where each example's own was found among those of all, from 1; none: `judge` says already what is right."""
        return ()

    def check(self, examples: Iterable[Any]) -> None:
        """An example that could not be answered is an error, before anything is learned; windows take all of them."""

    def windows(self, items: list[TokenizerInput], seen: list[Encoding]) -> list[list[Encoding]]:
        """The windows of each item."""
        return [split_windows(item, each, self.limit) for item, each in zip(items, seen, strict=True)]

    def encode_split(self, examples: Iterable[Any]) -> EncodedSplit:
        """All samples of the examples, in their order."""
        samples: list[Sample] = []
        owners: list[int] = []
        remarks: Counter[str] = Counter()
        read = windowed = cut = cut_tokens = left_out = 0
        for chunk in batched(examples, CHUNK):
            items = [self.tokenizer_inputs(example) for example in chunk]
            flat = iter(self._encode([item for each in items for item in each]))
            for example, mine in zip(chunk, items, strict=True):
                encoded = [next(flat) for _ in mine]
                dropped = sum(each.dropped for each in encoded)
                try:
                    seen = self.windows(mine, encoded)
                except HeedfulError as error:
                    raise HeedfulError(f"{example.file}:{example.line}: {error}") from None
                learned = self.make_samples(example, seen)
                samples += learned
                owners += [read] * len(learned)
                read += 1
                cut, cut_tokens = cut + (dropped > 0), cut_tokens + dropped
                windowed += any(len(each) > 1 for each in seen)
                left_out += not learned
                remarks.update(self.remarks(example, seen))
        return EncodedSplit(
            samples=samples,
            examples=read,
            tokens=sum(map(len, samples)),
            windowed=windowed,
            cut=cut,
            cut_tokens=cut_tokens,
            left_out=left_out,
            owners=owners,
            remarks=remarks,
        )

    @property
    def cut(self) -> int | None:
        """The tokens after which an input is cut off; None: it is not."""
        return self.limit if self.long_inputs == "truncate" else None

    def _encode(self, items: list[TokenizerInput]) -> list[Encoding]:
        if self.cut is None:
            return self.tokenizer.encode_batch(items)
        return self.tokenizer.encode_batch(items, max_length=self.cut, truncate="longest_first")


def batched(values: Iterable[T], size: int) -> Iterator[list[T]]:
    """The values in lists of at most that size.

    >>> list(batched("abcde", 2))
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    rest = iter(values)
    while chunk := list(islice(rest, size)):
        yield chunk


def evaluate_task(
    task: Task,
    ask: Callable[[list[Any]], list[Answer]],
    examples: Iterable[Any],
    *,
    first: int = 0,
    step: int = 1,
    judged: Callable[[int, Any, Answer, ScoredAnswer], None] | None = None,
) -> EvalMetrics:
    """Ask for each step-th example from the first on, and measure the answers; memory does not grow with the examples.

    The measures of all ranks merge to what one alone would have found, to the last bit where the answers are the same.
    `judged` is told of each answer.
    """
    metrics = task.new_metrics()
    numbered = zip(count(first, step), islice(iter(examples), first, None, step), strict=False)
    for chunk in batched(numbered, CHUNK):
        ids, given = [number for number, _ in chunk], [example for _, example in chunk]
        try:
            answers = ask([task.engine_input(example) for example in given])
        except InputError as error:
            wrong = given[error.number]
            raise HeedfulError(f"{wrong.file}:{wrong.line}: {error.reason}") from None
        except HeedfulError as error:
            raise HeedfulError(f"the {len(given)} examples from {given[0].file}:{given[0].line} on: {error}") from None
        cut = metrics.cut.update([answer.get("cut", 0) for answer in answers])
        metrics = replace(task.update_metrics(metrics, given, answers, ids), cut=cut)
        if judged is not None:
            for number, example, answer in zip(ids, given, answers, strict=True):
                judged(number, example, answer, task.score_answer(example, answer))
    return metrics


def log_loss(probability: float) -> float:
    """-log p: the loss of what was given that probability."""
    return -log(max(probability, MIN_PROBABILITY))
