"""TaskSpec: everything about a task that the other parts of the library ask for, in one value.

Imports nothing heavy: the command line, errors of settings and templates read specifications without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from heedful.tasks.settings import TaskSettings

if TYPE_CHECKING:
    from heedful.data.examples import Example
    from heedful.model.classic_config import PoolingConfigs
    from heedful.model.config import Head
    from heedful.objectives.distillation.teacher import ScoreKind
    from heedful.tasks.task import Task

EPOCHS = ((500_000, 1.0), (50_000, 2.0), (2_000, 4.0), (500, 8.0), (0, 15.0))  # (smallest number of examples, epochs)


LinearModel = Literal["logistic", "logistic_per_label", "ridge"]


JsonObject = dict[str, Any]  # a line of predictions, or results, as json reads it
Shown = Callable[[object], str]  # a number as text


def _input_text(engine_input: object) -> str:
    if isinstance(engine_input, str):
        return engine_input
    assert isinstance(engine_input, Iterable)
    return " / ".join(map(str, engine_input.values() if isinstance(engine_input, dict) else engine_input))


def _mistake(line: JsonObject, results: JsonObject, shown: Shown) -> tuple[object, object]:
    return line["label"], line["prediction"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """The parts of a model card that are the same for every model of a task."""

    name: str
    does: str
    pipeline: str  # the hub's name of the task
    library: str = "transformers"  # that loads the folder
    words: str = '"a text"'  # arguments of `heedful predict FOLDER`
    python_input: str = '"a text"'  # an input in Python
    code: str  # for that library
    decoder_code: str = ""  # the same for a model without an encoder; "": as `code`
    has_windows: bool = True  # texts that are longer than the model are read in windows
    takes_pairs: bool = True  # an input that is a list is a pair of texts
    measured: str = "one text"  # what a latency is that of
    input_text: Callable[[Any], str] = _input_text  # an input as it is shown
    mistake: Callable[[JsonObject, JsonObject, Shown], tuple[object, object]] = _mistake  # label and prediction


def any_reader(reader: PoolingConfigs, name: str, labels: int) -> None:
    """Accept every kind of reader of a classic model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpec:
    """A task: how users name it, what it learns from, how it trains, answers and is described."""

    name: str  # `kind` of its settings, and "task" of results
    command: str = ""  # the name that users give, where it is another one
    aliases: tuple[str, ...] = ()  # names in other libraries, pipelines of Hugging Face among them
    help: str = ""  # what it does, where the name does not say it
    settings: type[TaskSettings]
    example_ref: str  # the class of its examples as "module:name", imported when it is needed
    task_ref: str  # the task's class, likewise
    head: str  # kind of the head that it trains
    recognizes: Callable[[Head], bool]  # whether a model with this head does the task
    check_reader: Callable[[PoolingConfigs, str, int], None] = (
        any_reader  # refuses a reader: its setting, number of labels
    )
    epochs: tuple[tuple[int, float], ...] = EPOCHS  # the default for the number of examples
    predict_arguments: str = '"Your text."'  # of `heedful predict FOLDER`
    card: Card
    distillation: ScoreKind | None = None  # kind of soft labels; None: no student learns it
    replaceable: bool = True  # an answer stays right where a word of the input is replaced
    truncates: bool = False  # every text is cut where the model ends, none is read in windows
    zero_shot: bool = False  # a model may do it before it is trained, and that is the baseline
    linear_model: LinearModel | None = None  # over a bag of words, as the baseline of a run; None: it has none
    plots_alignments: bool = False  # plots show the attention of a decoder to the source text
    predicts_cosines: bool = False  # a prediction for a pair is a cosine, which `label_scaling` relates to its score
    routes: tuple[str, ...] = ()  # of the server, beside those in serve/routes.py, as "module:name"
    classic_students: tuple[str, ...] = ()  # small students that a search tries

    @property
    def public_name(self) -> str:
        """The name that users give."""
        return self.command or self.name

    @property
    def example(self) -> type[Example]:
        """The class of its examples."""
        example: type[Example] = resolve(self.example_ref)
        return example

    @property
    def task(self) -> type[Task]:
        """The task's class."""
        task: type[Task] = resolve(self.task_ref)
        return task


@cache
def resolve(reference: str) -> Any:
    """Import what "module:name" refers to."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)
