"""Texts without labels, for which the teacher predicts targets; as examples with a label that means nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heedful.checkpoint import Loaded
from heedful.data import DataSettings, Example, Pair, Question, Tagged
from heedful.data import read as read_data
from heedful.data.bad_rows import LeaveOut
from heedful.data.corpus.documents import expand
from heedful.data.examples import hashed, normalised
from heedful.data.formats.conll import looks_like
from heedful.data.formats.text_files import find, head_of
from heedful.data.inputs.inherited_settings import carried
from heedful.data.inputs.input_files import ASKS, as_given, open_inputs
from heedful.data.labelled.columns import NAMES, MissingColumnError
from heedful.data.labelled.data_file import SUFFIXES, bare_name
from heedful.errors import HeedfulError
from heedful.model.config import Classes, MaskedTokens, Pretraining
from heedful.tasks.specs import spec_of_head
from heedful.tasks.task import EncodedSplit, Task

LABELLED = (".conll", ".iob", ".iob2", ".bio")  # formats whose labels are ignored


def teacher_task(teacher: Loaded) -> str:
    """The task of a teacher's head; "masked" for a masked language model.

    Raises:
        ModelError: If no student can learn its answers.
    """
    spec = spec_of_head(teacher.config.head)
    if spec is not None and spec.distillation is not None:
        return spec.name
    match teacher.config.head:
        case MaskedTokens() | Pretraining():
            return "masked"
        case Classes(labels=labels):
            what = f"gives {len(labels)} numbers, and data has one"
        case head:
            what = f"has {'no head' if head is None else f'a {head.kind} head'}, whose answers no student learns here"
    raise HeedfulError(f"{teacher.source} {what}: fine-tune it for a task first")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlabelled:
    """Examples without labels, and what was left out of them."""

    examples: tuple[Example, ...]
    bad: int  # rows that cannot be read
    known: int  # examples that are in dev or test
    said: tuple[str, ...] = ()  # sentences about the files


def read_unlabelled(
    files: Sequence[str],
    kind: type[Example],
    head: str,
    labels: Sequence[str],
    settings: DataSettings,
    measured: Sequence[Example] = (),
    *,
    names: Sequence[str] = (),
    exclude: Path,
) -> Unlabelled:
    """Read files and folders: plain texts, rows whose labels are ignored, or data of the task.

    Columns of the labelled data are used for a file that has all of them; otherwise columns are found by their usual
    names. For pairs, examples with a text that is evaluated on are left out, before single texts become pairs.

    Args:
        files: Paths.
        kind: The class of the task's examples.
        head: The kind of the teacher's head.
        labels: Of the teacher; the first one becomes the label of all examples.
        settings: Data settings of the labelled data.
        measured: Examples of dev and test.
        names: File names of the labelled data.
        exclude: A folder whose files are not read.

    Raises:
        HeedfulError: If a file cannot be read, or there is no text.
    """
    given: list[Any] = []
    said: list[str] = []
    bad = 0
    for path, _ in expand([Path(each) for each in files], exclude)[0]:
        holds = carried(settings, names, [path])
        if _labelled(path, kind, replace(settings, encoding=holds.encoding)):
            by_number = {role: key for role, key in (settings.columns or {}).items() if str(key).isdigit()}
            how = replace(settings, dev_fraction=0.0, columns=by_number or None, encoding=holds.encoding)
            source = read_data(path, kind, how, on_bad_row=LeaveOut())
            given += [each.as_input() for split in source.splits for each in source.examples(split)]
            bad += sum(source.sieve.bad.values())
            said += source.stated
            continue
        roles = {role for ask in ASKS[head] for role in (*ask.needed, *ask.more)}
        columns = {role: name for role, name in (holds.columns or {}).items() if role in roles}
        own = settings.format if bare_name(path)[1] not in SUFFIXES else None
        plain = (own or SUFFIXES.get(bare_name(path)[1])) == "text"
        how = as_given(replace(holds, columns=None if plain else columns or None, format=own))
        try:
            several = open_inputs([path], head, how, exclude=exclude)
        except HeedfulError as refused:
            try:
                several = open_inputs([path], head, replace(how, columns=None), exclude=exclude)
            except MissingColumnError as lacking:
                raise HeedfulError(
                    f'{path}: which column is the {lacking.role}? Call it "{NAMES[lacking.role][0]}" in its first row: '
                    "data.columns names columns of the labelled data, and counts here where a file has all of them"
                ) from None
            except HeedfulError:
                raise refused from None
        for inputs in several:
            said += inputs.said
            for row in inputs.rows():
                found, wrong = inputs.ask(row)
                bad += wrong is not None
                given += [found] if wrong is None else []
    if not given and not bad:
        raise HeedfulError(f"{', '.join(files)}: no text to learn from, expected texts without labels: give others")
    known = len(given)
    if kind is Pair:
        seen = {hashed(normalised(text)) for each in measured for text in each.texts}
        given = [
            each
            for each in given
            if not any(hashed(normalised(text)) in seen for text in ([each] if isinstance(each, str) else each))
        ]
    examples = tuple(kind.of_inputs(given, next(iter(labels), "")))
    return Unlabelled(examples=examples, bad=bad, known=known - len(given), said=tuple(said))


def _labelled(path: Path, kind: type[Example], settings: DataSettings) -> bool:
    """Whether a file is in a format of labelled data without a header: tags in columns, or SQuAD's JSON."""
    suffix = bare_name(path)[1]
    if kind is Tagged and SUFFIXES.get(suffix) in (None, "text"):
        file, _ = find(path, encoding=settings.encoding, longest=settings.max_row_bytes)
        return suffix in LABELLED or settings.format == "conll" or looks_like(head_of(file))
    return suffix in LABELLED or (kind is Question and suffix == ".json")


def without_evaluated(found: Unlabelled, measured: Iterable[Example]) -> Unlabelled:
    """Leave out examples whose text is in dev or test, up to case, punctuation and spaces."""
    seen = {_letters(each) for each in measured}
    kept = tuple(each for each in found.examples if _letters(each) not in seen)
    return replace(found, examples=kept, known=found.known + len(found.examples) - len(kept))


def _letters(example: Example) -> int:
    """Hash of a text, however it is split into words: "do n't" is "don't"."""
    return hashed(normalised(example.group).replace(" ", ""))


def read_both(task: Task, labelled: Iterable[Any], unlabelled: Iterable[Any]) -> tuple[EncodedSplit, EncodedSplit]:
    """Encode labelled and unlabelled examples."""
    return task.read(labelled), task.for_unlabelled().read(unlabelled)
