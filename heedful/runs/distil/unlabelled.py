"""Texts without labels, for which the teacher predicts targets; as examples with a label that means nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from heedful.checkpoint import ModelBundle
from heedful.data import DataSettings, Example, PairExample, QuestionExample, TaggedExample
from heedful.data import read as read_data
from heedful.data.bad_rows import Skip
from heedful.data.corpus.documents import list_files
from heedful.data.examples import hash_text, normalise_text
from heedful.data.formats.conll import is_conll
from heedful.data.formats.text_files import detect_encoding, read_head
from heedful.data.inputs.inherited_settings import inherit_settings
from heedful.data.inputs.input_files import INPUT_SPECS, open_inputs, without_split_settings
from heedful.data.labelled.columns import COLUMN_NAMES, MissingColumnError
from heedful.data.labelled.data_file import FORMAT_BY_SUFFIX, stem_and_suffix
from heedful.errors import HeedfulError
from heedful.model.config import Classes, MaskedTokens, Pretraining
from heedful.tasks.specs import specs_of_head
from heedful.tasks.task import EncodedSplit, Task

LABELLED = (".conll", ".iob", ".iob2", ".bio")  # formats whose labels are ignored


def teacher_task(teacher: ModelBundle) -> str:
    """The first task of a teacher's head; "masked" for a masked language model.

    Raises:
        ModelError: If no student can learn its answers.
    """
    return teacher_tasks(teacher)[0]


def teacher_tasks(teacher: ModelBundle) -> tuple[str, ...]:
    """The tasks of a teacher's head, the most special one first; "masked" for a masked language model.

    Raises:
        ModelError: If no student can learn its answers.
    """
    specs = specs_of_head(teacher.config.head)
    if names := tuple(spec.name for spec in specs if spec.distillation is not None):
        return names
    match teacher.config.head:
        case MaskedTokens() | Pretraining():
            return ("masked",)
        case Classes(labels=labels):
            what = f"gives {len(labels)} numbers, and data has one"
        case head:
            what = f"has {'no head' if head is None else f'a {head.kind} head'}, whose answers no student learns here"
    raise HeedfulError(f"{teacher.source} ({teacher.config.family}) {what}: fine-tune it for a task first")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlabelled:
    """Examples without labels, and what was left out of them."""

    examples: tuple[Example, ...]
    bad: int  # rows that cannot be read
    known: int  # examples that are in dev or test
    notes: tuple[str, ...] = ()  # sentences about the files


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
    texts: list[object] = []
    notes: list[str] = []
    bad = 0
    for path, _ in list_files([Path(name) for name in files], exclude)[0]:
        holds = inherit_settings(settings, names, [path])
        if _labelled(path, kind, replace(settings, encoding=holds.encoding)):
            by_number = {role: key for role, key in (settings.columns or {}).items() if str(key).isdigit()}
            how = replace(settings, dev_fraction=0.0, columns=by_number or None, encoding=holds.encoding)
            source = read_data(path, kind, how, on_bad_row=Skip())
            texts += [example.to_input() for split in source.splits for example in source.examples(split)]
            bad += sum(source.row_errors.bad.values())
            notes += source.stated
            continue
        roles = {role for ask in INPUT_SPECS[head] for role in (*ask.needed, *ask.optional)}
        columns = {role: name for role, name in (holds.columns or {}).items() if role in roles}
        own = settings.format if stem_and_suffix(path)[1] not in FORMAT_BY_SUFFIX else None
        plain = (own or FORMAT_BY_SUFFIX.get(stem_and_suffix(path)[1])) == "text"
        how = without_split_settings(replace(holds, columns=None if plain else columns or None, format=own))
        try:
            several = open_inputs([path], head, how, exclude=exclude)
        except HeedfulError as refused:
            try:
                several = open_inputs([path], head, replace(how, columns=None), exclude=exclude)
            except MissingColumnError as lacking:
                raise HeedfulError(
                    f"{path}: which column is the {lacking.role}? "
                    f'Call it "{COLUMN_NAMES[lacking.role][0]}" in its first row: '
                    "data.columns names columns of the labelled data, and counts here where a file has all of them"
                ) from None
            except HeedfulError:
                raise refused from None
        for inputs in several:
            notes += inputs.notes
            for row in inputs.rows():
                text, wrong = inputs.engine_input(row)
                bad += wrong is not None
                texts += [text] if wrong is None else []
    if not texts and not bad:
        raise HeedfulError(f"{', '.join(files)}: no text to learn from, expected texts without labels: give others")
    known = len(texts)
    if kind is PairExample:
        seen = {hash_text(normalise_text(text)) for example in measured for text in example.texts}
        texts = [
            pair
            for pair in texts
            if not any(
                hash_text(normalise_text(text)) in seen
                for text in (pair if isinstance(pair, list | tuple) else [str(pair)])
            )
        ]
    examples = tuple(kind.from_inputs(texts, next(iter(labels), "")))
    return Unlabelled(examples=examples, bad=bad, known=known - len(texts), notes=tuple(notes))


def _labelled(path: Path, kind: type[Example], settings: DataSettings) -> bool:
    """Whether a file is in a format of labelled data without a header: tags in columns, or SQuAD's JSON."""
    suffix = stem_and_suffix(path)[1]
    if kind is TaggedExample and FORMAT_BY_SUFFIX.get(suffix) in (None, "text"):
        file, _ = detect_encoding(path, encoding=settings.encoding, max_row_bytes=settings.max_row_bytes)
        return suffix in LABELLED or settings.format == "conll" or is_conll(read_head(file))
    return suffix in LABELLED or (kind is QuestionExample and suffix == ".json")


def without_evaluated(unlabelled: Unlabelled, measured: Iterable[Example]) -> Unlabelled:
    """Leave out examples whose text is in dev or test, up to case, punctuation and spaces."""
    seen = {_letters(example) for example in measured}
    remaining = tuple(example for example in unlabelled.examples if _letters(example) not in seen)
    return replace(unlabelled, examples=remaining, known=unlabelled.known + len(unlabelled.examples) - len(remaining))


def _letters(example: Example) -> int:
    """Hash of a text, however it is split into words: "do n't" is "don't"."""
    return hash_text(normalise_text(example.group).replace(" ", ""))


def read_both(
    task: Task, labelled: Iterable[Example], unlabelled: Iterable[Example]
) -> tuple[EncodedSplit, EncodedSplit]:
    """Encode labelled and unlabelled examples."""
    return task.encode_split(labelled), task.for_unlabelled().encode_split(unlabelled)
