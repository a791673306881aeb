"""A small search: at most six shapes of students, the fastest that keeps the quality that is asked for."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

from heedful.atomic_io import put_folder
from heedful.checkpoint import Loaded, load, save
from heedful.checkpoint.new_head import attach
from heedful.data.bad_rows import OnBadRow
from heedful.errors import HeedfulError
from heedful.infer.precision import Precision
from heedful.infer.tuning.precision_gate import Measurement
from heedful.model.config import Classes
from heedful.runs.card.verdict import VERDICT
from heedful.runs.distil.plan import DistilPlan, check_classic_student, plan_distil
from heedful.runs.distil.run import distil_task
from heedful.runs.distil.settings import DistilSettings, distil_overrides, parse_student
from heedful.runs.distil.students import build_student as make_student
from heedful.runs.distil.students import single_stack
from heedful.runs.distil.unlabelled import teacher_task
from heedful.runs.distil.verdict import ServingSpeed, compare_speeds, plot_verdict
from heedful.runs.evaluate import build_eval_task as evaluating
from heedful.runs.overrides import Overrides
from heedful.runs.plots.style import save_png as write_figure
from heedful.runs.results import RunResult
from heedful.runs.run_folder import read_json, visible_names, write_file
from heedful.tasks.specs import SPECS
from heedful.train.checkpoint import LOCK, lock_run
from heedful.train.fit import Reporter
from heedful.train.ranks import SINGLE_PROCESS, Ranks

MOST = 6
MEASURED = ("parameters", *(each.name for each in fields(ServingSpeed)))
SEARCH_FILE, BEST_FOLDER = "search.json", "best"
FLATTERED = "chosen on test, for want of dev: its quality there flatters it (data.dev_fraction sets examples aside)"


def search(
    teacher: str | Path,
    data: Any,
    output_dir: str | Path,
    *,
    max_latency: float | None = None,
    min_quality: float | None = None,
    shapes: Sequence[str] = (),
    loss: str = "",
    unlabelled: Sequence[str | Path] = (),
    recipe: str | Path | None = None,
    assignments: Sequence[str] = (),
    overrides: Mapping[str, Any] | Overrides | None = None,
    on_bad_row: OnBadRow = "raise",
    reporter: Reporter | None = None,
    ranks: Ranks = SINGLE_PROCESS,
) -> RunResult:
    """Try shapes from the fastest on, each with one seed, until one keeps that share of the teacher's quality on dev.

    `max_latency` is the median time of one text in milliseconds: a student that is slower in every precision is not
    trained, and one that proves slower once it is trained is not chosen. Without `min_quality` all others are trained,
    and the best one is chosen. What was chosen is then distilled whole, in out/best, and measured on test; its results
    have the frontier under "search". A search that was interrupted resumes, also with other limits, and keeps what was
    tried.
    """
    folder, reporter = Path(output_dir), reporter or Reporter()
    given = distil_overrides(
        str(teacher), loss=loss, recipe=recipe, assignments=assignments, unlabelled=unlabelled, overrides=overrides
    )
    if given.mentions("student"):
        raise HeedfulError("a setting of the student was given, but a search makes its own students: leave it out")
    _refuse_other(folder)
    known = load(teacher)
    if teacher_task(known) == "masked":
        raise HeedfulError("a search compares students on a task: give a teacher that was fine-tuned for one")
    usual_settings = DistilSettings(task=SPECS[teacher_task(known)].settings(), teacher="?")
    if given.resolve(usual_settings).has("student"):
        raise HeedfulError("a setting of the student was given, but a search makes its own students: leave it out")
    chosen = list(shapes) or default_shapes(known)
    if not 1 <= len(chosen) <= MOST:
        raise HeedfulError(f"{len(chosen)} shapes were given; a search tries 1 to {MOST}")

    def distilled(student: str, place: str, values: Mapping[str, Any]) -> RunResult:
        mine = given.with_values({"student": parse_student(student), **values})
        taught = load(teacher)
        return distil_task(
            taught, mine, data, folder / place, on_bad_row, reporter=reporter, ranks=ranks, parent_dir=folder
        )

    facts = {"teacher": str(teacher), "shapes": chosen}
    planned: DistilPlan | None = None
    if (
        ranks.first and not (folder / SEARCH_FILE).exists()
    ):  # what is wrong with the data is told before anything is written
        planned = plan_distil(known, given, data, on_bad_row=on_bad_row, exclude=folder)
    with lock_run(folder) if ranks.first else nullcontext():
        found = ranks.gather(_begun(folder, facts))[0] | {"max_latency": max_latency, "min_quality": min_quality}
        if planned is not None and "tried" not in found:
            found["tried"] = _timed(planned, chosen, reporter)
            write_file(folder / SEARCH_FILE, found)
        found = ranks.gather(found)[0]  # as the first has timed them
        quick = {"seeds": 1, "verdict.baseline": "none", "verdict.split": "dev"}
        seen: list[dict[str, Any]] = []
        while (shape := next_shape(found["tried"], seen, max_latency, min_quality)) is not None:
            seen.append(shape)
            if "quality" not in shape:
                reporter.message(f"trying {shape['name']}, which may answer one text in {shape['p50']:.2f} ms")
            done = distilled(shape["name"], shape["folder"], quick)  # a finished one: the same settings, or refused
            if done.status == "interrupted":
                return done
            verdict = ranks.gather(done.results.get("verdict"))[0]
            told = verdict["models"]["student"]  # with its own words and weights, which decide how it can be served
            shape |= {"quality": told["quality"]["mean"], "quality_ratio": verdict["quality_ratio"]}
            shape |= {each: told[each] for each in MEASURED}
            found |= {"metric": verdict["metric"], "split": verdict["split"]}
            if ranks.first:
                write_file(folder / SEARCH_FILE, found)
        best = choose_student(found["tried"], max_latency, min_quality)
        if best is None:
            raise HeedfulError(no_student_message(found["tried"], max_latency, min_quality))
        reporter.message(f"{best['name']} is taken" + ("" if found["split"] == "dev" else f", {FLATTERED}"))
        if ranks.first:
            _set_aside(folder, found.get("taken"), best["name"])
            found["taken"] = best["name"]
            write_file(folder / SEARCH_FILE, found)
        ranks.wait()
        done = distilled(best["name"], BEST_FOLDER, {})
        if done.status == "completed" and ranks.first:
            put_folder(folder / "plots")
            trained = [each for each in found["tried"] if "quality" in each]
            chosen_on = read_json(folder / best["folder"] / VERDICT)
            write_figure(folder / "plots" / "frontier.png", plot_verdict(chosen_on, trained))
            done = replace(done, results=done.results | {"search": found})
        return done


def fastest_precision(trials: Sequence[Measurement]) -> Precision:
    """The precision that is the fastest, whether it is refused or not."""
    return max(trials, key=lambda each: each.speed).precision


def default_shapes(teacher: Loaded) -> list[str]:
    """The shapes that are tried unless others are named."""
    stack = single_stack(teacher.config.model)
    layers = 0 if stack is None else stack.layers
    counts = sorted({n for n in (1, round(layers / 3), round(layers / 2)) if 1 <= n < layers})
    return [*SPECS[teacher_task(teacher)].classic_students, "tiny", *(f"layers={n}" for n in counts)][:MOST]


def next_shape(
    tried: Sequence[dict[str, Any]], seen: Sequence[dict[str, Any]], under: float | None, keep: float | None
) -> dict[str, Any] | None:
    """The fastest that was not seen yet, may be in time, and may be faster than what was seen to keep enough.

    >>> tried = [{"p50": 1, "quality": 0.8, "quality_ratio": 0.8}, {"p50": 2}, {"p50": 3}]
    >>> [following(tried, tried[:1], under, keep) for under, keep in ((None, 0.9), (1.5, 0.9), (None, 0.7))]
    [{'p50': 2}, None, None]
    """
    best = None if keep is None else choose_student(seen, under, keep)
    limits = [under] if best is None else [under, best["p50"]]
    left = [each for each in tried if each not in seen and all(one is None or each["p50"] <= one for one in limits)]
    return min(left, key=lambda each: float(each["p50"]), default=None)


def choose_student(tried: Sequence[dict[str, Any]], under: float | None, keep: float | None) -> dict[str, Any] | None:
    """Of those that were trained and are in time the fastest that keeps so much, or the best; none, where no one does.

    >>> tried = [{"p50": 1, "quality": 0.8, "quality_ratio": 0.8}, {"p50": 2, "quality": 0.95, "quality_ratio": 0.95}]
    >>> tried.append({"p50": 3})
    >>> chosen_of(tried, None, 0.9)["p50"], chosen_of(tried, 1.5, None)["p50"], chosen_of(tried, None, 0.99)
    (2, 1, None)
    """
    trained = [each for each in tried if "quality" in each and (under is None or each["p50"] <= under)]
    if keep is None:
        return max(trained, key=lambda each: float(each["quality"]), default=None)
    good = [each for each in trained if each["quality_ratio"] is not None and each["quality_ratio"] >= keep]
    return min(good, key=lambda each: float(each["p50"]), default=None)


def no_student_message(tried: Sequence[dict[str, Any]], under: float | None, keep: float | None) -> str:
    """Why none was taken."""
    lines = [
        f"  {each['name']}: {each['p50']:.2f} ms"
        + (f", keeps {100 * each['quality_ratio']:.1f} %" if each.get("quality_ratio") is not None else ", not trained")
        for each in sorted(tried, key=lambda each: float(each["p50"]))
    ]
    asked = [f"answers in {under:g} ms"] if under is not None else []
    asked += [f"keeps {100 * keep:g} % of the quality"] if keep is not None else []
    return f"no student {' and '.join(asked)}:\n" + "\n".join(lines) + "\nAsk for less: what was tried stays"


def _refuse_other(folder: Path) -> None:
    """A folder that holds no search and is not free is an error; hidden files do not count."""
    names = sorted(visible_names(folder) - {LOCK})
    if names and SEARCH_FILE not in names:
        more = " and more" if names[3:] else ""
        raise HeedfulError(
            f"{folder} is no search: it holds {', '.join(names[:3])}{more}, but no {SEARCH_FILE}; give another folder "
            "with --output"
        )


def _begun(folder: Path, facts: dict[str, Any]) -> dict[str, Any]:
    path = folder / SEARCH_FILE
    if not path.exists():
        return dict(facts)
    found = read_json(path)
    if other := [name for name in facts if found.get(name) != facts[name]]:
        raise HeedfulError(
            f"{folder} holds a search with another {' and '.join(other)}: give another folder with --output, or the "
            "same to resume it"
        )
    return found


def _set_aside(folder: Path, before: str | None, now: str) -> None:
    """What other wishes took lies under its name, and comes back when it is taken again."""
    if before in (None, now):
        return
    for old, new in ((BEST_FOLDER, f"{BEST_FOLDER}-{before}"), (f"{BEST_FOLDER}-{now}", BEST_FOLDER)):
        if (folder / old).exists():
            (folder / old).rename(folder / new)


def _timed(planned: DistilPlan, shapes: Sequence[str], reporter: Reporter) -> list[dict[str, Any]]:
    """How fast each may be, untrained, in the fastest precision: whether its weights allow that is known afterwards."""
    reporter.message(f"timing {len(shapes)} shapes")
    settings, head = planned.settings, planned.teacher.config.head
    examples = [*planned.source.examples("train"), *planned.unlabelled.examples]
    texts = [text for example in examples for text in example.texts]
    assert head is not None
    labels: tuple[str, ...] = planned.labels or tuple(getattr(head, "labels", ()))
    with tempfile.TemporaryDirectory(prefix="heedful-") as scratch:
        places, counts = {}, {}
        for number, name in enumerate(shapes):
            student = parse_student(name)
            check_classic_student(planned.task, student, settings.verdict.precision)
            made = make_student(
                student, planned.teacher, texts, longest=settings.max_length, seed=1, log=lambda text: None
            )
            problem_type = head.problem_type if isinstance(head, Classes) else "single_label_classification"
            made = attach(made, head.kind, labels=labels, problem_type=problem_type)
            place = Path(scratch) / str(number)
            save(made, place)
            places[name], counts[name] = str(place), made.count()
        split = next(name for name in planned.survey.splits if name != "train")
        task, _ = evaluating(planned.teacher, planned.source, split)
        inputs = [task.ask(each) for each in islice(planned.source.examples(split), settings.verdict.texts)]
        speeds = compare_speeds(places, settings.verdict, inputs=inputs, choose=fastest_precision)
    return [
        {"name": name, "folder": f"shape-{number}", "parameters": counts[name]} | asdict(speeds[name])
        for number, name in enumerate(shapes)
    ]
