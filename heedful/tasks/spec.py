"""TaskSpec: the description of a task that the rest of the library reads.

This module does not import torch, so that the command line and errors of settings can use it quickly.
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

# default number of epochs: (smallest number of training examples, epochs)
EPOCHS = ((500_000, 1.0), (50_000, 2.0), (2_000, 4.0), (500, 8.0), (0, 15.0))


LinearModel = Literal["logistic", "logistic_per_label", "ridge"]


JsonObject = dict[str, Any]  # a line of predictions.jsonl, or results.json
FormatNumber = Callable[[object], str]  # formats a number as text


def _input_text(engine_input: object) -> str:
    """Return an input on one line, the texts of a pair separated by slashes."""
    if isinstance(engine_input, str):
        return engine_input
    assert isinstance(engine_input, Iterable)
    return " / ".join(map(str, engine_input.values() if isinstance(engine_input, dict) else engine_input))


def _describe_mistake(line: JsonObject, results: JsonObject, format_number: FormatNumber) -> tuple[object, object]:
    """Return the label and the prediction of a line."""
    return line["label"], line["prediction"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """The parts of a model card that are the same for every model of a task."""

    name: str  # title of the card
    description: str  # a sentence without its subject and full stop: "Gives a text ... one label"
    pipeline: str  # name of the task on the Hugging Face hub
    library: str = "transformers"  # library that loads the folder too
    cli_arguments: str = '"a text"'  # example arguments of `heedful predict FOLDER`
    python_input: str = '"a text"'  # example input of the engine in Python
    code: str  # example code of `library`
    decoder_code: str = ""  # example code for a decoder-only model; "": `code`
    has_windows: bool = True  # texts longer than the model's limit are read in windows
    takes_pairs: bool = True  # an input that is a list is a pair of texts
    latency_input: str = "one text"  # input of the latency measurement, as the card words it
    input_text: Callable[[Any], str] = _input_text  # formats an input as text
    describe_mistake: Callable[[JsonObject, JsonObject, FormatNumber], tuple[object, object]] = _describe_mistake


def accept_any_pooling(pooling: PoolingConfigs, name: str, labels: int) -> None:
    """Accept every pooling of a classic model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpec:
    """The description of a task: its names, settings, training defaults, server routes and model card."""

    name: str  # `kind` of its settings, and "task" in results
    command: str = ""  # name for users; "": `name`
    aliases: tuple[str, ...] = ()  # names in other libraries, such as pipelines of Hugging Face
    help: str = ""  # explanation, if the name does not explain itself
    settings: type[TaskSettings]
    example_ref: str  # class of its examples as "module:name", imported when it is needed
    task_ref: str  # class of the task as "module:name", imported when it is needed
    head: str  # kind of the head that it trains
    recognizes: Callable[[Head], bool]  # whether a model with this head does the task
    # raises HeedfulError if a classic model's pooling does not suit the task; arguments: pooling, its setting, labels
    check_pooling: Callable[[PoolingConfigs, str, int], None] = accept_any_pooling
    epochs: tuple[tuple[int, float], ...] = EPOCHS  # default number of epochs, by the number of training examples
    predict_arguments: str = '"Your text."'  # example arguments of `heedful predict FOLDER` after a training
    card: Card
    distillation: ScoreKind | None = None  # kind of soft labels; None: the task cannot be distilled
    replaceable: bool = True  # the answer usually stays correct if words of the input are replaced
    truncates: bool = False  # long texts are always truncated, never read in windows
    zero_shot: bool = False  # an untrained model may do the task, which is then the baseline
    linear_model: LinearModel | None = None  # baseline over bags of words; None: no baseline
    plots_alignments: bool = False  # plots show the decoder's attention to the source text
    predicts_cosines: bool = False  # predictions for pairs are cosines, which `label_scaling` maps to scores
    routes: tuple[str, ...] = ()  # more routes of the server than serve/routes.py has, as "module:name"
    classic_students: tuple[str, ...] = ()  # kinds of small classic models that a search for students tries

    @property
    def public_name(self) -> str:
        """The name for users."""
        return self.command or self.name

    @property
    def example(self) -> type[Example]:
        """The class of its examples."""
        example: type[Example] = resolve(self.example_ref)
        return example

    @property
    def task(self) -> type[Task]:
        """The class of the task."""
        task: type[Task] = resolve(self.task_ref)
        return task


@cache
def resolve(reference: str) -> Any:
    """Import the object that "module:name" refers to."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)
