"""Distillation of a reranker: the loss on the teacher's scores, the verdict, and refused settings."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
import torch

from heedful import save
from heedful.checkpoint import ModelBundle, load
from heedful.data import RankExample
from heedful.data.labelled.statistics import DatasetStats
from heedful.errors import HeedfulError
from heedful.infer.engine import Engine
from heedful.objectives.distillation.objective import Distillation, DistillationLosses
from heedful.objectives.distillation.teacher import CaptureSpec, OwnedSamples, Teacher, align_samples
from heedful.runs.distil.plan import plan_distil
from heedful.runs.distil.run import distil
from heedful.runs.distil.search import _time_shapes as time_shapes
from heedful.runs.distil.settings import distil_overrides
from heedful.runs.distil.teacher_cache import online_teacher
from heedful.runs.evaluate import evaluate
from heedful.tasks.rank import Rank
from heedful.tasks.specs.rank import RankSettings
from heedful.tasks.task import Counter, TaskSetup
from tests.support.distillation import QUICK, WITHOUT_DURATION, RecordingReporter
from tests.support.generated_data import write_splits
from tests.support.model_folders import long_text, make_model_dir

pytestmark = pytest.mark.usefixtures("quick")
STATS = DatasetStats(counts={"train": 3}, labels=Counter())
EXAMPLES = [
    RankExample(query="the cat", documents=("sat on the mat", long_text(60), "ran"), relevance=(1.0, 0.0, 0.0)),
    RankExample(query="who ?", documents=("ada", "the dog"), relevance=(1.0, 0.0)),
]


def make_reranker(folder: Path, seed: int, scale: float) -> ModelBundle:
    """Save a tiny cross-encoder with random weights, whose scores differ by about `scale`, in folder/reranker-SEED."""
    torch.manual_seed(seed)
    encoder = load(make_model_dir(folder / f"encoder-{seed}", "regression"))
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    _, reranker = Rank.create(TaskSetup(settings=RankSettings(), loaded=encoder, labels=(), stats=STATS))
    assert reranker.head is not None
    with torch.no_grad():
        for parameter in reranker.head.parameters():
            parameter.mul_(scale)
    save(reranker, folder / f"reranker-{seed}")
    return load(folder / f"reranker-{seed}")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    make_reranker(folder, seed=1, scale=2)
    return folder / "reranker-1"


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splits("rank", tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("teacher_limit", [48, 40])  # with 40 tokens, the teacher reads other windows than the student
@pytest.mark.parametrize("ranking", ["listwise", "margin_mse"])
def test_the_loss_compares_the_scores_of_each_query(ranking: str, teacher_limit: int, tmp_path: Path) -> None:
    """The loss is computed from windows, and is equal to the loss on the scores of engines."""
    student, teacher = (make_reranker(tmp_path, seed, scale=30) for seed in (1, 2))
    for model, limit in ((student, 48), (teacher, teacher_limit)):
        assert model.tokenizer is not None
        model.tokenizer = model.tokenizer.limited(limit)
        assert model.max_length == limit
    student_task = Rank(tokenizer=student.tokenizer, limit=48)
    teacher_task = Rank(tokenizer=teacher.tokenizer, limit=teacher_limit)
    student_samples, teacher_samples = (task.encode_split(EXAMPLES).samples for task in (student_task, teacher_task))
    assert max(student_samples[0].target.windows) > 1
    objective = Distillation(
        base_objective=student_task,
        kind="ranking",
        losses=DistillationLosses(kd=1.0, temperature=2.0, ranking=ranking, label=1.0),
        run_teacher=online_teacher(Teacher(teacher, teacher_task, "ranking", CaptureSpec()), teacher_samples),
        alignment=align_samples(
            OwnedSamples(samples=student_samples, example_indices=[0, 1]),
            OwnedSamples(samples=teacher_samples, example_indices=[0, 1]),
            "ranking",
        ),
        projections=torch.nn.ModuleDict(),
    )
    is_labelled = [True, False]
    samples = objective.add_teacher_targets(student_samples, [0, 1], is_labelled)
    kd, label = objective.terms(student, objective.batch(samples, [1, 2]))
    assert kd.count == 2.0, "queries"
    assert label.count == 1.0, "queries with labels"
    expected = 0.0
    for example in EXAMPLES:
        engine_input = {"query": example.query, "texts": list(example.documents)}
        s, t = (torch.tensor(Engine(model)([engine_input])[0]["scores"]) for model in (student, teacher))
        if ranking == "margin_mse":
            expected += float(((s[0] - s[1:]) - (t[0] - t[1:])).square().mean())
        else:
            p, q = (t / 2).softmax(0), (s / 2).softmax(0)
            expected += 4 * float((p * (p / q).log()).sum())  # 4 is the square of the temperature
    assert float(kd.sum.detach()) == pytest.approx(expected, rel=1e-4)


def test_a_verdict_on_rankings(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    run = tmp_path / "run"
    verdict = distil(teacher, labelled, run, student="layers=1", assignments=QUICK).results["verdict"]
    assert json.loads((run / "verdict.json").read_text()) == verdict
    assert verdict["metric"] == "ndcg@10"
    assert verdict["split"] == "test"
    for role, folder in (("teacher", teacher), ("student", run), ("baseline", run / "baseline")):
        numbers = evaluate(folder, labelled, split="test").numbers
        quality = verdict["models"][role]["quality"]
        assert quality["mean"] == pytest.approx(numbers["ndcg@10"], abs=1e-9), role
        for metric in ("map", "mrr"):
            assert quality["metrics"][metric]["mean"] == pytest.approx(numbers[metric], abs=1e-9), role
    card = (run / "model" / "README.md").read_text()
    assert verdict["sentence"] in card
    assert "| map | mrr |" in card
    (answer,) = Engine(run)([{"query": "who is ada ?", "texts": ["ada wrote it", "a dog"]}])
    assert len(answer["scores"]) == 2


def test_a_student_learns_the_margins_of_its_teacher(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    assignments = [
        *WITHOUT_DURATION,
        "verdict.baseline=none",
        "loss.ranking=margin_mse",
        "loss.label_weight=0",
        "task.list_size=3",
        "train.epochs=40",
        "train.optimizer.lr=1e-3",
        "train.batch_size=24",
    ]
    recorder = RecordingReporter()
    distil(teacher, labelled, tmp_path / "run", student="layers=1", assignments=assignments, reporter=recorder)
    assert any("training examples have more than 3 texts; 3 of them are sampled" in text for text in recorder.messages)
    records = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if record.get("loss") is not None]
    assert len(losses) == 40
    assert fmean(losses[20:]) < 0.75 * fmean(losses[:10])


def test_a_search_times_students_on_queries(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    overrides = distil_overrides(str(teacher), assignments=("verdict.precision=float32", "verdict.rounds=1"))
    plan = plan_distil(load(teacher), overrides, labelled, exclude=tmp_path)
    (shape,) = time_shapes(plan, ["layers=1"], RecordingReporter())
    assert shape["p50"] > 0
    assert 0 < shape["parameters"] < plan.teacher.count()


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (["task.loss=margin_mse"], "to learn the margins of this teacher set loss.ranking=margin_mse"),
        (["unlabelled=['texts.txt']"], "a reranker learns queries with texts to rank"),
        (["augment.copies=1"], "augment cannot be used for rank"),
        (["task.list_size=1"], "list_size is 1"),
    ],
)
def test_unusable_settings_are_refused(
    assignments: list[str], message: str, tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    with pytest.raises(HeedfulError, match=message):
        distil(teacher, labelled, tmp_path / "run", student="layers=1", assignments=[*QUICK, *assignments])
    assert not (tmp_path / "run").exists()


def test_the_columns_of_the_data_decide_between_ranking_and_regression(
    tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    pairs = write_splits("regress", tmp_path / "pairs")
    for data, task in ((labelled, "rank"), (pairs, "regress")):
        plan = plan_distil(load(teacher), distil_overrides(str(teacher)), data, exclude=tmp_path / "run")
        assert plan.task == task
    with pytest.raises(HeedfulError, match="ranking would change nothing: it is for a reranker"):
        distil(teacher, pairs, tmp_path / "run", assignments=[*QUICK, "loss.ranking=margin_mse"])
