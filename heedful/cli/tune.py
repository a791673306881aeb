"""The command `heedful tune`: search settings of fine-tuning within a time budget."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.cli.finetune import InitialModel, LabelledData, TaskName
from heedful.cli.options import (
    AsJson,
    DataFiles,
    OnBadRow,
    OutputDir,
    Recipe,
    check_on_bad_row,
    first_file,
    note_aliases,
)
from heedful.cli.output import escape, note, print_json, print_table, print_text
from heedful.cli.results import show_results
from heedful.cli.settings_command import context_assignments
from heedful.errors import HeedfulError
from heedful.tasks.specs import specs_named

if TYPE_CHECKING:
    from heedful.runs.results import JsonObject
    from heedful.toml_json import Json


def tune(
    context: typer.Context,
    task: TaskName,
    data: LabelledData,
    time_budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time of the whole search with the final training, as 20m or 1h30m.")
    ] = "20m",
    values_to_try: Annotated[
        list[str] | None,
        typer.Option(
            "--try",
            metavar="SETTING=VALUE,VALUE",
            help="Values of a setting to try, such as lr=1e-4,3e-4; repeat it for further settings. A text with a "
            "comma is quoted. By default the learning rate is tried.",
        ),
    ] = None,
    model: InitialModel = "",
    out: OutputDir = None,
    recipe: Recipe = None,
    on_bad_row: OnBadRow = "raise",
    as_json: AsJson = False,
) -> None:
    """Search settings of fine-tuning within a time budget.

    Many configurations train for a short time. The best third of them is trained again for three times as long, and so
    on. They are compared on dev. The final model is trained with the best settings, in the folder best. Ctrl-C stops
    the search; the same command resumes it.
    """
    from heedful.data.labelled.split_files import parse_data_arguments
    from heedful.runs.finetune.settings import check_task, finetune_overrides, preview_settings

    overrides = finetune_overrides(model=model, recipe=recipe, assignments=context_assignments(context))
    alias = task  # the name of another library for the task, or the task itself
    task = check_task(alias)
    preview_settings(task, overrides)  # check settings before torch is imported
    space = _parse_space(values_to_try or [])
    note_aliases(overrides, {alias: f"the task {task}"} if alias != task else {})
    files: DataFiles = parse_data_arguments(data)
    folder = out or Path(f"tune-{task}-{first_file(files).absolute().stem}")
    bad_rows = check_on_bad_row(on_bad_row)
    from heedful.train.memory import disable_malloc_trim

    disable_malloc_trim()
    from heedful.cli.progress import Progress
    from heedful.runs.tune import BEST_FOLDER
    from heedful.runs.tune import tune as search

    with Progress(quiet=as_json) as progress:
        result = search(
            task,
            files,
            folder,
            time_budget=time_budget,
            space=space or None,
            overrides=overrides,
            on_bad_row=bad_rows,
            reporter=progress,
        )
    if result.status == "interrupted":
        note(f"stopped; all trials are saved in {folder}. The same command resumes the search.")
        raise SystemExit(130)
    if as_json:
        return print_json({"folder": str(folder)} | result.results)
    _show_trials(result.results["tune"])
    show_results(result.results)
    trial_files = "trials.csv, plots/trials.png, and " if result.results["tune"]["trials"] else ""
    best = quote(str(folder / BEST_FOLDER))
    print_text(f"\nThe search is in {folder}: {trial_files}the final run in {BEST_FOLDER}.\nNext:")
    print(f"  heedful predict {best} {specs_named(task)[0].predict_arguments}")
    print(f"  heedful evaluate {best} --data YOUR-DATA")


def _parse_space(options: list[str]) -> dict[str, list[Json]]:
    """Return the values of each setting from strings such as "lr=1e-4,3e-4". A value that is not TOML is a string.

    Raises:
        HeedfulError: If a string has another form, or names a setting for the second time.
    """
    space: dict[str, list[Json]] = {}
    for option in options:
        name, equals, values = option.partition("=")
        if not equals or not name.strip() or not values.strip():
            raise HeedfulError(f'--try is "{option}"; expected SETTING=VALUE,VALUE, as in lr=1e-4,3e-4')
        if name.strip() in space:
            raise HeedfulError(f"--try names {name.strip()} twice: give all its values at once")
        space[name.strip()] = _split_values(values, option)
    return space


def _split_values(text: str, option: str) -> list[Json]:
    """Return the values in a text with commas between them; lists and quoted texts may have commas, too.

    Args:
        text: The text.
        option: The whole option, for the error.

    Raises:
        HeedfulError: If a value begins like a list or a quoted text, but is none.

    >>> _split_values('1e-4, [1, 2], "a, b", cosine', "")
    [0.0001, [1, 2], 'a, b', 'cosine']
    """
    from heedful.runs.overrides import toml_value

    values: list[Json] = []
    pieces = text.split(",")
    while pieces:
        part = pieces.pop(0)
        if part.strip().startswith(("[", "{", '"', "'")):
            while (value := toml_value(part.strip())) == part.strip():  # not TOML: its end comes after a comma
                if not pieces:
                    raise HeedfulError(
                        f"--try is {option}, where {part.strip()} is no value: close its brackets and quotation "
                        "marks, and quote the texts in lists"
                    )
                part += "," + pieces.pop(0)
        else:
            value = toml_value(part.strip())
        values.append(value)
    return values


def _show_trials(record: JsonObject) -> None:
    """Print the trials of a search, sorted by the duration of their training and then by their score.

    Args:
        record: The entry "tune" of the results.
    """
    from heedful.runs.trials import SearchState, metric_name, ranked_trials
    from heedful.tasks.metrics import format_metric

    state = SearchState.from_json(record)
    if not state.trials:
        print_text("no configurations were compared: the final model has the first value of each setting to try")
        return
    rows = []
    for trial in ranked_trials(state.trials):
        score, bounds = "diverged", ""
        if trial.metric_value is not None:
            score = format_metric(trial.metric, trial.metric_value)
        if interval := trial.interval:
            bounds = " to ".join(format_metric(trial.metric, interval[end]) for end in ("low", "high"))
        values = [escape(str(trial.settings[name])) for name in state.space]
        rows.append([*values, f"{100 * trial.share:.0f} %", score, bounds, f"{trial.seconds:.0f}"])
    names = list(state.space)
    head = [*names, "of the training", f"dev {metric_name(state.trials)}", "95 % interval", "seconds"]
    print_table(rows, head=head, right={len(names), len(names) + 1, len(names) + 3})
