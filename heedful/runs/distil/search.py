"""`heedful distil` with a limit: distil students of several shapes, and choose the fastest or the best one within it.

A shape is a student by its name in `heedful distil`, such as "layers=3", "tiny" or "bag".
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from itertools import islice
from math import inf
from pathlib import Path

from heedful.atomic_io import make_folder
from heedful.checkpoint import ModelBundle, load, save
from heedful.checkpoint.new_head import with_head
from heedful.data.bad_rows import OnBadRow
from heedful.errors import HeedfulError, ModelError, RunError, SettingError
from heedful.infer.precision import Precision
from heedful.infer.tuning.precision_gate import Measurement
from heedful.model.config import Classes
from heedful.runs.card.verdict import VERDICT
from heedful.runs.distil.plan import DistilPlan, check_classic_student, plan_distil
from heedful.runs.distil.run import distil_task
from heedful.runs.distil.settings import DistilSettings, distil_overrides, parse_student
from heedful.runs.distil.students import build_student, single_stack
from heedful.runs.distil.unlabelled import teacher_task
from heedful.runs.distil.verdict import ServingSpeed, compare_speeds, plot_verdict
from heedful.runs.evaluate import build_eval_task
from heedful.runs.overrides import Overrides
from heedful.runs.plots.style import save_plot
from heedful.runs.results import JsonObject, RunResult
from heedful.runs.run_folder import read_run_json, visible_names, write_file
from heedful.tasks.specs import SPECS
from heedful.train.fit import Reporter
from heedful.train.ranks import SINGLE_PROCESS, Ranks
from heedful.train.run_lock import LOCK, lock_run

MAX_SHAPES = 6  # maximum shapes of a search
MEASURED = ("parameters", *(field.name for field in fields(ServingSpeed)))  # measurements of a shape in search.json
SEARCH_FILE = "search.json"
BEST_FOLDER = "best"
OWN_STUDENTS = "a setting of the student was given, but a search makes its own students: leave it out"
NO_CASCADE = (
    "a cascade was asked for, and a search tries several students: search first, then give --cascade with the student "
    "that was chosen"
)
CHOSEN_ON_TEST = (
    "chosen on test, since there is no dev split: its quality there is optimistic (data.dev_fraction makes a dev split)"
)


def search(
    teacher: str | Path,
    data: object,
    output_dir: str | Path,
    *,
    max_latency: float | None = None,
    min_quality: float | None = None,
    shapes: Sequence[str] = (),
    loss: str = "",
    unlabelled: Sequence[str | Path] = (),
    recipe: str | Path | Mapping[str, object] | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, object] | Overrides | None = None,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> RunResult:
    """Distil students of several shapes, and choose the fastest one with enough quality, or the best one.

    First, untrained shapes are timed. Then they are distilled with one seed, the fastest first, until one reaches
    `min_quality` on dev. Without `min_quality`, all are distilled, and the best one is chosen. The chosen shape is
    distilled again in output_dir/best with all seeds, and evaluated on test. A search can be resumed, even with other
    limits.

    Args:
        teacher: The teacher, as in `distil`. Arguments without a line here are also as in `distil`.
        data: Labelled data.
        output_dir: The folder of the search.
        max_latency: Maximum of the median latency of one text, in milliseconds. A shape that is slower in every
            precision is not distilled; a student that is slower after distillation is not chosen. If None, latency is
            not limited.
        min_quality: Minimum share of the teacher's quality, 0 to 1. If None, the best student is chosen.
        shapes: Students by their names in `distil`. If empty, `default_shapes`.

    Returns:
        The result of the final run. Its results describe all shapes under "search".

    Raises:
        HeedfulError: If no student is within the limits, or if a setting of the student is set.
    """
    folder, reporter = Path(output_dir), reporter or Reporter()
    overrides = distil_overrides(
        str(teacher), loss=loss, recipe=recipe, assignments=assignments, unlabelled=unlabelled, overrides=overrides
    )
    if overrides.mentions("student"):
        raise SettingError(OWN_STUDENTS, path="student")
    _check_search_folder(folder)
    model = load(teacher)
    _check_overrides(overrides, model)
    shape_names = list(shapes) or default_shapes(model)
    if not 1 <= len(shape_names) <= MAX_SHAPES:
        raise SettingError(f"{len(shape_names)} shapes were given; a search tries 1 to {MAX_SHAPES}")

    def distil_shape(name: str, subfolder: str, values: Mapping[str, object]) -> RunResult:
        return distil_task(
            load(teacher),
            overrides.with_values({"student": parse_student(name), **values}),
            data,
            folder / subfolder,
            on_bad_row,
            reporter=reporter,
            ranks=ranks,
            parent_dir=folder,
        )

    plan: DistilPlan | None = None
    if ranks.is_main and not (folder / SEARCH_FILE).exists():  # errors in the data come before anything is written
        plan = plan_distil(model, overrides, data, on_bad_row=on_bad_row, exclude=folder)
    with lock_run(folder) if ranks.is_main else nullcontext():
        state = ranks.all_gather_object(_read_state(folder, {"teacher": str(teacher), "shapes": shape_names}))[0]
        state |= {"max_latency": max_latency, "min_quality": min_quality}
        if plan is not None and "tried" not in state:
            state["tried"] = _time_shapes(plan, shape_names, reporter)
            write_file(folder / SEARCH_FILE, state)
        state = ranks.all_gather_object(state)[0]  # all ranks use the times of the first one
        interrupted = _try_shapes(state, distil_shape, folder, reporter, ranks)
        if interrupted is not None:
            return interrupted
        best = choose_student(state["tried"], max_latency, min_quality)
        if best is None:
            raise HeedfulError(no_student_message(state["tried"], max_latency, min_quality))
        reporter.message(f"{best['name']} is chosen" + ("" if state["split"] == "dev" else f", {CHOSEN_ON_TEST}"))
        if ranks.is_main:
            _swap_best(folder, state.get("taken"), best["name"])
            state["taken"] = best["name"]
            write_file(folder / SEARCH_FILE, state)
        ranks.barrier()
        result = distil_shape(best["name"], BEST_FOLDER, {})
        if result.status == "completed" and ranks.is_main:
            _plot_shapes(folder, state["tried"], best)
            result = replace(result, results=result.results | {"search": state})
        return result


def _check_overrides(overrides: Overrides, teacher: ModelBundle) -> None:
    """Raise an error if the teacher is a masked language model, or settings of a student or a cascade are given."""
    task = teacher_task(teacher)
    if task == "masked":
        raise ModelError("a search compares students on a task: give a teacher that was fine-tuned for one")
    resolved = overrides.resolve(DistilSettings(task=SPECS[task].settings(), teacher="?"))
    if resolved.has("student"):
        raise SettingError(OWN_STUDENTS, path="student")
    if resolved.has("cascade"):
        raise SettingError(NO_CASCADE, path="cascade")


def _plot_shapes(folder: Path, shapes: Sequence[JsonObject], best: JsonObject) -> None:
    """Plot quality over latency of all distilled shapes, with the teacher and the chosen shape marked."""
    make_folder(folder / "plots")
    distilled = [shape for shape in shapes if "quality" in shape]
    verdict_of_choice = read_run_json(folder / best["folder"] / VERDICT)
    save_plot(folder / "plots" / "frontier.png", plot_verdict(verdict_of_choice, distilled))


def _try_shapes(
    state: JsonObject,
    distil_shape: Callable[[str, str, Mapping[str, object]], RunResult],
    folder: Path,
    reporter: Reporter,
    ranks: Ranks,
) -> RunResult | None:
    """Distil one shape after the other until the search is over, and add their measurements to the state.

    Args:
        state: The content of search.json, which is changed in place and written after each shape.
        distil_shape: Distils a shape, by its name, its subfolder and further settings. A finished run is not repeated.
        folder: The folder of the search.
        reporter: Receives progress.
        ranks: The processes that train together.

    Returns:
        The result of a run that was interrupted, else None.
    """
    single_seed = {"seeds": 1, "verdict.baseline": "none", "verdict.split": "dev"}
    seen: list[JsonObject] = []
    while (shape := next_shape(state["tried"], seen, state["max_latency"], state["min_quality"])) is not None:
        seen.append(shape)
        if "quality" not in shape:
            reporter.message(f"trying {shape['name']}, which may answer one text in {shape['p50']:.2f} ms")
        result = distil_shape(shape["name"], shape["folder"], single_seed)
        if result.status == "interrupted":
            return result
        verdict = ranks.all_gather_object(result.results.get("verdict"))[0]
        assert verdict is not None, "the main rank has results"
        # trained weights may need another precision than random ones, so the measurements replace earlier ones
        student = verdict["models"]["student"]
        shape |= {"quality": student["quality"]["mean"], "quality_ratio": verdict["quality_ratio"]}
        shape |= {name: student[name] for name in MEASURED}
        state |= {"metric": verdict["metric"], "split": verdict["split"]}
        if ranks.is_main:
            write_file(folder / SEARCH_FILE, state)
    return None


def choose_fastest(measurements: Sequence[Measurement]) -> Precision:
    """Return the fastest precision, however much it changes the answers."""
    return max(measurements, key=lambda measurement: measurement.speed).precision


def default_shapes(teacher: ModelBundle) -> list[str]:
    """Return shapes to try for a teacher: classic students of its task, "tiny", and a few with fewer layers."""
    stack = single_stack(teacher.config.model)
    layers = 0 if stack is None else stack.layers
    counts = sorted({count for count in (1, round(layers / 3), round(layers / 2)) if 1 <= count < layers})
    classic = SPECS[teacher_task(teacher)].classic_students
    return [*classic, "tiny", *(f"layers={count}" for count in counts)][:MAX_SHAPES]


def next_shape(
    shapes: Sequence[JsonObject], seen: Sequence[JsonObject], max_latency: float | None, min_quality: float | None
) -> JsonObject | None:
    """Return the fastest shape to distil next, or None if the search is over.

    Shapes are left out that were seen, are slower than `max_latency`, or are slower than a student that has reached
    `min_quality`.

    >>> shapes = [{"p50": 1, "quality": 0.8, "quality_ratio": 0.8}, {"p50": 2}, {"p50": 3}]
    >>> next_shape(shapes, shapes[:1], None, 0.9), next_shape(shapes, shapes[:1], 1.5, 0.9)
    ({'p50': 2}, None)
    >>> next_shape(shapes, shapes[:1], None, 0.7) is None
    True
    """
    latency_limit = inf if max_latency is None else max_latency
    if min_quality is not None:
        best = choose_student(seen, max_latency, min_quality)
        if best is not None:
            latency_limit = min(latency_limit, best["p50"])
    remaining = [shape for shape in shapes if shape not in seen and shape["p50"] <= latency_limit]
    return min(remaining, key=lambda shape: float(shape["p50"]), default=None)


def choose_student(
    shapes: Sequence[JsonObject], max_latency: float | None, min_quality: float | None
) -> JsonObject | None:
    """Return the fastest distilled shape within both limits, or None.

    Without `min_quality`, it is the best distilled shape within `max_latency`.

    >>> shapes = [{"p50": 1, "quality": 0.8, "quality_ratio": 0.8}, {"p50": 2, "quality": 0.95, "quality_ratio": 0.95}]
    >>> shapes.append({"p50": 3})
    >>> choose_student(shapes, None, 0.9)["p50"], choose_student(shapes, 1.5, None)["p50"]
    (2, 1)
    >>> choose_student(shapes, 2, None)["p50"], choose_student(shapes, 2, 0.5)["p50"]
    (2, 1)
    >>> choose_student(shapes, None, 0.99) is None
    True
    """
    distilled = [shape for shape in shapes if "quality" in shape]
    in_time = [shape for shape in distilled if max_latency is None or shape["p50"] <= max_latency]
    if min_quality is None:
        return max(in_time, key=lambda shape: float(shape["quality"]), default=None)
    good_enough = [
        shape for shape in in_time if shape["quality_ratio"] is not None and shape["quality_ratio"] >= min_quality
    ]
    return min(good_enough, key=lambda shape: float(shape["p50"]), default=None)


def no_student_message(shapes: Sequence[JsonObject], max_latency: float | None, min_quality: float | None) -> str:
    """Say that no student is within the limits, and list latency and quality of each student."""
    lines = []
    for shape in sorted(shapes, key=lambda shape: float(shape["p50"])):
        ratio = shape.get("quality_ratio")
        quality = "not trained" if ratio is None else f"keeps {100 * ratio:.1f} %"
        lines.append(f"  {shape['name']}: {shape['p50']:.2f} ms, {quality}")
    limits = [f"answers in {max_latency:g} ms"] if max_latency is not None else []
    limits += [f"keeps {100 * min_quality:g} % of the quality"] if min_quality is not None else []
    return f"no student {' and '.join(limits)}:\n" + "\n".join(lines) + "\nLower the limits: trained students are kept"


def _check_search_folder(folder: Path) -> None:
    """Refuse a folder that is neither a search nor empty; hidden files are ignored."""
    names = sorted(visible_names(folder) - {LOCK})
    if names and SEARCH_FILE not in names:
        more = " and more" if names[3:] else ""
        raise RunError(
            f"{folder} is no search: it holds {', '.join(names[:3])}{more}, but no {SEARCH_FILE}; give another folder "
            "with --output"
        )


def _read_state(folder: Path, teacher_and_shapes: JsonObject) -> JsonObject:
    """Return the content of search.json, or the state of a new search, which has only teacher and shapes.

    Args:
        folder: The folder of the search.
        teacher_and_shapes: The keys "teacher", a name, and "shapes", a list of names.

    Raises:
        RunError: If the search in the folder has another teacher or other shapes.
    """
    path = folder / SEARCH_FILE
    if not path.exists():
        return dict(teacher_and_shapes)
    state = read_run_json(path)
    if changed := [name for name, value in teacher_and_shapes.items() if state.get(name) != value]:
        raise RunError(
            f"{folder} holds a search with another {' and '.join(changed)}: give another folder with --output, or the "
            "same to resume it"
        )
    return state


def _swap_best(folder: Path, previous: str | None, current: str) -> None:
    """Rename the run of the previously chosen shape, and bring back an earlier run of the shape that is chosen now.

    Args:
        folder: The folder of the search.
        previous: The shape whose run is in the subfolder `best`. If None, no shape was chosen before.
        current: The shape that is chosen now.
    """
    if previous in (None, current):
        return
    best = folder / BEST_FOLDER
    previous_run = folder / f"{BEST_FOLDER}-{previous}"
    current_run = folder / f"{BEST_FOLDER}-{current}"
    if best.exists():
        best.rename(previous_run)
    if current_run.exists():
        current_run.rename(best)


def _time_shapes(plan: DistilPlan, shapes: Sequence[str], reporter: Reporter) -> list[JsonObject]:
    """Time untrained students, each in its fastest precision.

    A trained student may need another precision, so it is timed again after distillation.

    Args:
        plan: The plan of the distillation, with the teacher and the data.
        shapes: The names of the shapes.
        reporter: Receives progress.

    Returns:
        Name, subfolder and count of parameters of each shape, and the measurements of `ServingSpeed`.
    """
    reporter.message(f"timing {len(shapes)} shapes")
    settings, head = plan.settings, plan.teacher.config.head
    examples = [*plan.source.examples("train"), *plan.unlabelled.examples]
    texts = [text for example in examples for text in example.texts]
    assert head is not None
    labels: tuple[str, ...] = plan.labels or tuple(getattr(head, "labels", ()))
    problem_type = head.problem_type if isinstance(head, Classes) else "single_label_classification"
    with tempfile.TemporaryDirectory(prefix="heedful-") as scratch:
        paths, counts = {}, {}
        for index, name in enumerate(shapes):
            student_settings = parse_student(name)
            check_classic_student(plan.task, student_settings, settings.verdict.precision)
            student = build_student(
                student_settings, plan.teacher, texts, max_length=settings.max_length, seed=1, log=lambda text: None
            )
            student = with_head(student, head.kind, labels=labels, problem_type=problem_type)
            student_head = student.config.head
            if isinstance(head, Classes) and isinstance(student_head, Classes):
                # a reranker is served by the activation of its scores
                student_head = replace(student_head, score_activation=head.score_activation)
                student.config = replace(student.config, head=student_head)
            path = Path(scratch) / str(index)
            save(student, path)
            paths[name], counts[name] = str(path), student.count()
        split = next(name for name in plan.stats.non_empty_splits if name != "train")
        task, _ = build_eval_task(plan.teacher, plan.source, split)
        inputs = [task.engine_input(example) for example in islice(plan.source.examples(split), settings.verdict.texts)]
        speeds = compare_speeds(paths, settings.verdict, inputs=inputs, choose=choose_fastest)
    return [
        {"name": name, "folder": f"shape-{index}", "parameters": counts[name]} | asdict(speeds[name])
        for index, name in enumerate(shapes)
    ]
