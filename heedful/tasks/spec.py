"""TaskSpec: names, settings, defaults and model card of a task, for the command line, runs and the server.

This module does not import torch, so that the command line starts quickly.
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

# default epochs by size of the training data: (minimum examples, epochs)
EPOCHS = ((500_000, 1.0), (50_000, 2.0), (2_000, 4.0), (500, 8.0), (0, 15.0))


LinearModel = Literal["logistic", "logistic_per_label", "ridge"]


JsonObject = dict[str, Any]  # a line of predictions.jsonl, or results.json
FormatNumber = Callable[[object], str]  # formats a number as text


def _input_text(engine_input: object) -> str:
    """Return an input on one line; the texts of a pair are separated by slashes."""
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
    description: str  # a sentence without subject and full stop, such as "Gives a text one label"
    pipeline: str  # name of the task on the Hugging Face hub
    library: str = "transformers"  # another library that loads the model folder
    cli_arguments: str = '"a text"'  # example arguments of `heedful predict FOLDER`
    python_input: str = '"a text"'  # example input of the engine in Python
    code: str  # example code of `library`
    decoder_code: str = ""  # example code for a decoder-only model; "": same as `code`
    has_windows: bool = True  # whether texts longer than the model's limit are split into windows
    takes_pairs: bool = True  # whether a list as input is a pair of texts
    latency_input: str = "one text"  # description of the input whose latency is measured
    input_text: Callable[[Any], str] = _input_text  # formats an input as text
    describe_mistake: Callable[[JsonObject, JsonObject, FormatNumber], tuple[object, object]] = _describe_mistake


def accept_any_pooling(pooling: PoolingConfigs, name: str, labels: int) -> None:
    """Accept every pooling of a classic model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSpec:
    """A task: its names, settings, training defaults, server routes and model card."""

    name: str  # `kind` of its settings, and "task" in results
    command: str = ""  # name for users; "": same as `name`
    aliases: tuple[str, ...] = ()  # names in other libraries, such as pipelines of Hugging Face
    help: str = ""  # explanation of the name, for lists of tasks
    settings: type[TaskSettings]
    example_ref: str  # class of its examples as "module:name", imported when it is needed
    task_ref: str  # class of the task as "module:name", imported when it is needed
    head: str  # kind of the trained head
    recognizes: Callable[[Head], bool]  # whether a model with this head can do the task
    # raises HeedfulError if a classic model's pooling is unsuitable; arguments: pooling, its setting, label count
    check_pooling: Callable[[PoolingConfigs, str, int], None] = accept_any_pooling
    epochs: tuple[tuple[int, float], ...] = EPOCHS  # default epochs, (minimum training examples, epochs)
    predict_arguments: str = '"Your text."'  # example arguments of `heedful predict FOLDER` after a training
    card: Card
    distillation: ScoreKind | None = None  # kind of soft labels; None: the task cannot be distilled
    replaceable: bool = True  # whether labels usually stay correct if words of the input are replaced
    truncates: bool = False  # whether long texts are always truncated, never split into windows
    zero_shot: bool = False  # whether the initial model may do the task already, and is evaluated as a baseline
    linear_model: LinearModel | None = None  # baseline over bags of words; None: no baseline
    plots_alignments: bool = False  # whether plots show the decoder's attention to the source text
    predicts_cosines: bool = False  # whether predictions are cosines, which `label_scaling` maps to scores
    routes: tuple[str, ...] = ()  # routes of the server in addition to those in serve/routes.py, as "module:name"
    classic_students: tuple[str, ...] = ()  # kinds of small classic models for the search for students

    @property
    def public_name(self) -> str:
        """The name for users."""
        return self.command or self.name

    @property
    def example(self) -> type[Example]:
        """The class of the examples."""
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
