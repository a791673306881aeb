"""distil with a reranker: what the student learns of the teacher's scores, the verdict, and what is refused."""

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


def reranker(folder: Path, seed: int, scale: float) -> ModelBundle:
    """Return a tiny cross-encoder with random weights, whose scores differ by about `scale`."""
    torch.manual_seed(seed)
    loaded = load(make_model_dir(folder / f"encoder-{seed}", "regression"))
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    bundle = Rank.create(TaskSetup(settings=RankSettings(), loaded=loaded, labels=(), stats=STATS))[1]
    assert bundle.head is not None
    with torch.no_grad():
        for parameter in bundle.head.parameters():
            parameter.mul_(scale)
    save(bundle, folder / f"reranker-{seed}")
    return load(folder / f"reranker-{seed}")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    reranker(folder, 1, 2)
    return folder / "reranker-1"


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_splits("rank", tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("limits", [(48, 48), (48, 40)])
@pytest.mark.parametrize("ranking", ["listwise", "margin_mse"])
def test_the_student_learns_the_scores_of_each_query(ranking: str, limits: tuple[int, int], tmp_path: Path) -> None:
    """Against the scores of the engine; with other windows for the teacher too."""
    models = [reranker(tmp_path, seed, 30) for seed in (1, 2)]
    for model, limit in zip(models, limits, strict=True):
        assert model.tokenizer is not None
        model.tokenizer = model.tokenizer.limited(limit)
        assert model.max_length == limit
    student, taught = models
    own, other = (Rank(tokenizer=model.tokenizer, limit=limit) for model, limit in zip(models, limits, strict=True))
    inputs = [task.encode_split(EXAMPLES).samples for task in (own, other)]
    assert max(inputs[0][0].target.windows) > 1
    losses = DistillationLosses(kd=1.0, temperature=2.0, ranking=ranking, label=1.0)
    objective = Distillation(
        base_objective=own,
        kind="ranking",
        losses=losses,
        run_teacher=online_teacher(Teacher(taught, other, "ranking", CaptureSpec()), inputs[1]),
        alignment=align_samples(
            *(OwnedSamples(samples=samples, example_indices=[0, 1]) for samples in inputs), "ranking"
        ),
        projections=torch.nn.ModuleDict(),
    )
    batch = objective.batch(objective.add_teacher_targets(inputs[0], [0, 1], [True, False]), [1, 2])
    kd, label = objective.terms(student, batch)
    assert (kd.count, label.count) == (2.0, 1.0), "two queries, one of them with labels"
    expected = 0.0
    for example in EXAMPLES:
        s, t = (
            torch.tensor(Engine(model)([{"query": example.query, "texts": list(example.documents)}])[0]["scores"])
            for model in models
        )
        if ranking == "margin_mse":
            expected += float(((s[0] - s[1:]) - (t[0] - t[1:])).square().mean())
        else:
            p, q = (t / 2).softmax(0), (s / 2).softmax(0)
            expected += 4 * float((p * (p / q).log()).sum())
    assert float(kd.sum.detach()) == pytest.approx(expected, rel=1e-4)


def test_a_verdict_on_rankings(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    recorder, folder = RecordingReporter(), tmp_path / "run"
    done = distil(teacher, labelled, folder, student="layers=1", assignments=QUICK, reporter=recorder)
    verdict = done.results["verdict"]
    assert json.loads((folder / "verdict.json").read_text()) == verdict
    assert (verdict["metric"], verdict["split"]) == ("ndcg@10", "test")
    for name, place in (("teacher", teacher), ("student", folder), ("baseline", folder / "baseline")):
        scores = evaluate(place, labelled, split="test").numbers
        quality = verdict["models"][name]["quality"]
        assert quality["mean"] == pytest.approx(scores["ndcg@10"], abs=1e-9), name
        for metric in ("map", "mrr"):
            assert quality["metrics"][metric]["mean"] == pytest.approx(scores[metric], abs=1e-9), name
    card = (folder / "model" / "README.md").read_text()
    assert verdict["sentence"] in card and "| map | mrr |" in card
    scored = Engine(folder)([{"query": "who is ada ?", "texts": ["ada wrote it", "a dog"]}])[0]["scores"]
    assert len(scored) == 2


def test_a_student_learns_the_margins_of_its_teacher(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    wishes = [*WITHOUT_DURATION, "verdict.baseline=none", "loss.ranking=margin_mse", "loss.label_weight=0"]
    wishes += ["task.list_size=3", "train.epochs=40", "train.optimizer.lr=1e-3", "train.batch_size=24"]
    recorder = RecordingReporter()
    distil(teacher, labelled, tmp_path / "run", student="layers=1", assignments=wishes, reporter=recorder)
    assert any("training examples have more than 3 texts; 3 of them are sampled" in text for text in recorder.messages)
    losses = [json.loads(line).get("loss") for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert len(losses) == 40 and fmean(losses[20:]) < 0.75 * fmean(losses[:10])


def test_a_search_times_students_on_queries(tmp_path: Path, teacher: Path, labelled: Path) -> None:
    overrides = distil_overrides(str(teacher), assignments=("verdict.precision=float32", "verdict.rounds=1"))
    plan = plan_distil(load(teacher), overrides, labelled, exclude=tmp_path)
    (shape,) = time_shapes(plan, ["layers=1"], RecordingReporter())
    assert shape["p50"] > 0 and 0 < shape["parameters"] < plan.teacher.count()


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        (["task.loss=margin_mse"], "to learn the margins of this teacher set loss.ranking=margin_mse"),
        (["unlabelled=['texts.txt']"], "a reranker learns queries with texts to rank"),
        (["augment.copies=1"], "augment cannot be used for rank"),
        (["task.list_size=1"], "list_size is 1"),
    ],
)
def test_refusals(wishes: list[str], message: str, tmp_path: Path, teacher: Path, labelled: Path) -> None:
    with pytest.raises(HeedfulError, match=message):
        distil(teacher, labelled, tmp_path / "run", student="layers=1", assignments=[*QUICK, *wishes])
    assert not (tmp_path / "run").exists()


def test_the_columns_of_the_data_decide_between_ranking_and_regression(
    tmp_path: Path, teacher: Path, labelled: Path
) -> None:
    pairs = write_splits("regress", tmp_path / "pairs")
    for files, task in ((labelled, "rank"), (pairs, "regress")):
        plan = plan_distil(load(teacher), distil_overrides(str(teacher)), files, exclude=tmp_path / "run")
        assert plan.task == task
    with pytest.raises(HeedfulError, match="ranking would change nothing: it is for a reranker"):
        distil(teacher, pairs, tmp_path / "run", assignments=[*QUICK, "loss.ranking=margin_mse"])
