"""A task that only this file defines can be used like every other task, once it is registered."""

from __future__ import annotations

import csv
import http.client
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pyarrow.parquet
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from heedful.cli import main
from heedful.data.examples import Example
from heedful.infer.engine import Engine
from heedful.objectives import Batch, Sample
from heedful.objectives.base import pack_samples, weights_of_samples
from heedful.runs.distil.run import distil
from heedful.runs.evaluate import evaluate
from heedful.runs.finetune.run import finetune
from heedful.runs.finetune.settings import check_task
from heedful.runs.recipe_template import recipe_template
from heedful.serve.requests import NextSentenceBody
from heedful.serve.routes import Endpoint
from heedful.serve.run import background
from heedful.tasks.answering import Answer, AnswerContext, AnswerHead, Window, read_pair
from heedful.tasks.metrics import Accuracy, Result, TokenLoss, mean_of
from heedful.tasks.predictions import Prediction
from heedful.tasks.settings import TaskSettings
from heedful.tasks.spec import Card, TaskSpec
from heedful.tasks.specs import register, unregister
from heedful.tasks.task import EvalMetrics, ScoredAnswer, Task, bootstrap_stat, log_loss
from heedful.tokenizer import Encoding, TokenizerInput
from tests.support.model_folders import make_model_dir

pytestmark = pytest.mark.usefixtures("quick", "registered")


# -- the task -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderSettings(TaskSettings):
    """Whether two texts are in the right order."""

    kind: Literal["order"] = "order"
    label_smoothing: float = 0.0  # share of the target spread over both answers


@dataclass(frozen=True, kw_only=True, slots=True)
class Ordered(Example):
    """Two texts, and whether they are in the right order."""

    about: ClassVar[str] = "two texts, and whether they are in the right order"
    needed: ClassVar[tuple[str, ...]] = ("text", "text_pair", "label")
    text: str
    text_pair: str
    right: bool  # whether the order is right

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text, self.text_pair)

    @property
    def target(self) -> str:
        return str(self.right)

    @classmethod
    def from_cells(cls, reader: Any, cells: Any) -> Iterator[dict[str, Any]]:
        right = reader.text(cells, "label") == "yes"
        yield {"text": reader.text(cells, "text"), "text_pair": reader.text(cells, "text_pair"), "right": right}

    @classmethod
    def from_input(cls, pair: Any, label: str) -> Ordered:
        return cls(text=pair[0], text_pair=pair[1], right=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class InOrder(Prediction):
    """Whether two texts are in the right order."""

    right: bool  # whether the order is right
    probability: float  # probability that it is


def answer(text: Any, windows: list[Window], setting: AnswerContext) -> Answer:
    """Return whether the order is right as "right", and the probability of that as "in_order"."""
    (window,) = windows
    probability = float(window.scores.softmax(-1)[0])
    return {"right": probability >= 0.5, "in_order": probability}


ORDERS = AnswerHead(
    expects='pairs of texts, like [("first text", "second text")]',
    tokenizer_inputs=read_pair,
    answer=answer,
    long_inputs="refuse",
    prediction=lambda answer: InOrder(right=answer["right"], probability=answer["in_order"]),
    columns=lambda loaded, writing: {"right": bool, "in_order": float},
)


@dataclass(frozen=True, kw_only=True)
class Order(Task):
    """The task, with the cross-entropy over the two scores of a head for next sentence prediction as its loss."""

    example: ClassVar[type[Example]] = Ordered
    answerers: ClassVar[tuple[AnswerHead, ...]] = (ORDERS,)
    metric: str = "accuracy"

    def tokenizer_inputs(self, example: Any) -> list[TokenizerInput]:
        return [(example.text, example.text_pair)]

    def engine_input(self, example: Any) -> Any:
        return (example.text, example.text_pair)

    def make_samples(self, example: Any, item_windows: list[list[Encoding]]) -> list[Sample]:
        ((encoding,),) = item_windows  # one window of the only input
        return [Sample.of([encoding.ids], [encoding.types], target=int(not example.right))]

    def batch(self, samples: Sequence[Sample], keys: Sequence[int]) -> Batch:
        targets = torch.tensor([sample.target for sample in samples])
        return Batch(packed=pack_samples(samples), targets=targets, weights=weights_of_samples(samples))

    def target_losses(self, scores: Tensor, batch: Batch) -> Tensor:
        return F.cross_entropy(scores, batch.targets, reduction="none")

    def new_metrics(self) -> EvalMetrics:
        return EvalMetrics(
            metrics={"accuracy": Accuracy(), "loss": TokenLoss()}, bootstraps={"accuracy": bootstrap_stat(2, mean_of)}
        )

    def update_metrics(
        self, metrics: EvalMetrics, examples: Sequence[Any], answers: Sequence[Answer], ids: Sequence[int]
    ) -> EvalMetrics:
        scored = [self.score_answer(example, answer) for example, answer in zip(examples, answers, strict=True)]
        predictions = [score.prediction for score in scored]
        labels = [score.label for score in scored]
        losses = [score.loss for score in scored]
        correct = [(score.correct, 1) for score in scored]
        return EvalMetrics(
            metrics={
                "accuracy": metrics.metrics["accuracy"].update(predictions, labels),
                "loss": metrics.metrics["loss"].update(losses, [1] * len(scored)),
            },
            bootstraps={"accuracy": metrics.bootstraps["accuracy"].update(ids, correct)},
        )

    def compute_metrics(self, metrics: EvalMetrics) -> Result:
        result: Result = metrics.metrics["accuracy"].compute()
        return result | {"loss": metrics.metrics["loss"].compute()["loss"]}

    def score_answer(self, example: Any, answer: Answer) -> ScoredAnswer:
        label = "yes" if example.right else "no"
        prediction = "yes" if answer["right"] else "no"
        label_probability = answer["in_order"] if example.right else 1 - answer["in_order"]
        return ScoredAnswer(label, prediction, label == prediction, log_loss(label_probability))


async def in_order(call: Any, body: NextSentenceBody) -> Any:
    """Handle a request for the order of pairs of texts."""
    _, model_queue = call.select_model(body.model, ("next_sentence",))
    call.set_texts(*(text for pair in body.inputs for text in pair))
    return await call.predict(model_queue, [tuple(pair) for pair in body.inputs])


ROUTE = Endpoint(
    path="/in-order", handler=in_order, body=NextSentenceBody, answer=list[dict[str, float]], kinds=("next_sentence",)
)
SPEC = TaskSpec(
    name="order",
    aliases=("sentence-order",),
    help="whether two texts are in order",
    settings=OrderSettings,
    example_ref=f"{__name__}:Ordered",
    task_ref=f"{__name__}:Order",
    head="next_sentence",
    recognizes=lambda head: head.kind == "next_sentence",
    card=Card(
        name="Order of two texts",
        description="Says whether two texts are in the right order",
        pipeline="text-classification",
        python_input='("a text", "another")',
        cli_arguments='"a text" --pair "another"',
        code="# code of another library",
    ),
    distillation="classes",
    routes=(f"{__name__}:ROUTE",),
)


# -- its use --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def registered() -> Iterator[None]:
    register(SPEC)
    yield
    unregister(SPEC.name)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three splits. The label is "yes" if the second text is "she lives here"."""
    folder = tmp_path_factory.mktemp("data")
    for split, count in (("train", 24), ("dev", 8), ("test", 8)):
        with (folder / f"{split}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["text", "text_pair", "label"])
            for index in range(count):
                text = f"the cat {'sat ' * (index % 5)}"
                writer.writerow([text, "she lives here", "yes"] if index % 2 else [text, "he ran", "no"])
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("bare"), "bare")


@pytest.fixture(scope="module")
def run(registered: None, bare: Path, labelled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    folder = tmp_path_factory.mktemp("run") / "run"
    overrides = {"epochs": 2, "lr": 1e-3, "precision": "float32", "task.label_smoothing": 0.0}
    assert finetune("sentence-order", labelled, folder, model=bare, overrides=overrides).status == "completed"
    return folder


def test_it_is_fine_tuned_and_evaluated(run: Path, labelled: Path) -> None:
    results = json.loads((run / "results.json").read_text())
    assert results["task"] == "order"
    assert results["settings"]["task"] == {"kind": "order", "label_smoothing": 0.0}
    evaluation = evaluate(run, labelled, split="test")
    assert evaluation.numbers["count"] == 8
    assert evaluation.numbers["accuracy"] == results["splits"]["test"]["numbers"]["accuracy"]


def run_command(*arguments: Any) -> None:
    """Run a command of heedful, and check that it succeeds."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert ended.value.code == 0


def test_it_predicts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(run)
    (prediction,) = engine.predict([("the cat", "he ran")], InOrder)
    (answer,) = engine([("the cat", "he ran")])
    assert answer == {"right": prediction.right, "in_order": prediction.probability}
    run_command("predict", run, "the cat", "--pair", "he ran")
    assert f"{prediction.probability:.4f}" in capsys.readouterr().out


def test_it_predicts_a_file(run: Path, labelled: Path, tmp_path: Path) -> None:
    run_command("predict", run, "--file", labelled / "test.csv", "--output", tmp_path / "out")
    (output_file,) = (tmp_path / "out").glob("*.parquet")
    first_row = pyarrow.parquet.read_table(output_file).to_pylist()[0]
    (answer,) = Engine(run)([("the cat ", "he ran")])
    assert first_row["in_order"] == pytest.approx(answer["in_order"], abs=1e-6)


def test_the_server_has_its_route(run: Path) -> None:
    with background({"order": str(run)}) as served:
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        body = json.dumps({"inputs": [["the cat", "he ran"]]})
        connection.request("POST", "/in-order", body, {"Content-Type": "application/json"})
        assert json.loads(connection.getresponse().read()) == Engine(run)([("the cat", "he ran")])
        connection.request("GET", "/info")
        assert "/in-order" in json.loads(connection.getresponse().read())["routes"]
        connection.close()


def test_it_has_a_model_card(run: Path) -> None:
    card = (run / "model" / "README.md").read_text()
    assert "# Order of two texts\n" in card
    assert '--pair "another"' in card
    assert "# code of another library" in card


def test_it_has_a_name_and_a_template() -> None:
    assert check_task("sentence-order") == "order"
    assert "#label_smoothing = 0.0  # share of the target spread over both answers" in recipe_template("order")


def test_it_is_distilled(run: Path, labelled: Path, tmp_path: Path) -> None:
    (tmp_path / "more.csv").write_text("text,text_pair\nthe dog ran,she lives here\nada wrote it,he ran\n")
    result = distil(
        run,
        labelled,
        tmp_path / "student",
        student="layers=1",
        unlabelled=[tmp_path / "more.csv"],
        overrides=None,
        assignments=("train.epochs=1", "train.precision=float32", "verdict.texts=4"),
    )
    assert set(result.results["verdict"]["models"]) >= {"teacher", "student"}
