"""Read unlabelled texts for a distillation. They become examples with a placeholder label, which no loss uses.

`runs.distil.plan` reads them, and `runs.distil.run` encodes them.
"""

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

TAG_SUFFIXES = (".conll", ".iob", ".iob2", ".bio")  # files of tagged words, whose tags are ignored


def teacher_task(teacher: ModelBundle) -> str:
    """Return the first task of a teacher's head, or "masked" for a masked language model.

    Raises:
        HeedfulError: If the model has no head whose predictions a student can learn.
    """
    return teacher_tasks(teacher)[0]


def teacher_tasks(teacher: ModelBundle) -> tuple[str, ...]:
    """Return the tasks of a teacher's head, the most special one first, or ("masked",) for a masked language model.

    Raises:
        HeedfulError: If the model has no head whose predictions a student can learn.
    """
    specs = specs_of_head(teacher.config.head)
    if names := tuple(spec.name for spec in specs if spec.distillation is not None):
        return names
    match teacher.config.head:
        case MaskedTokens() | Pretraining():
            return ("masked",)
        case Classes(labels=labels):
            reason = f"gives {len(labels)} numbers, and data has one"
        case head:
            reason = f"has {'no head' if head is None else f'a {head.kind} head'}, whose answers no student learns here"
    raise HeedfulError(f"{teacher.source} ({teacher.config.family}) {reason}: fine-tune it for a task first")


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlabelled:
    """Examples without labels, and counts of the rows and examples that were left out."""

    examples: tuple[Example, ...]  # examples with a placeholder label
    bad_rows: int  # rows that cannot be read
    in_evaluation: int  # examples that were left out, because their text is in dev or test
    notes: tuple[str, ...] = ()  # sentences about the files


def read_unlabelled(
    files: Sequence[str],
    example_type: type[Example],
    head_kind: str,
    labels: Sequence[str],
    settings: DataSettings,
    evaluated: Sequence[Example] = (),
    *,
    names: Sequence[str] = (),
    exclude: Path,
) -> Unlabelled:
    """Read texts without labels from files and folders of plain text, of tables, or of labelled data of the task.

    Labels in the files are ignored. The columns of the labelled data are used for a file that has all of them;
    otherwise columns are found by their usual names. For pairs, inputs with a text of dev or test are left out here,
    before single texts become pairs.

    Args:
        files: Paths.
        example_type: The class of the task's examples.
        head_kind: The kind of the teacher's head.
        labels: The teacher's labels; the first one is the placeholder label of all examples.
        settings: Data settings of the labelled data.
        evaluated: Examples of dev and test.
        names: File names of the labelled data.
        exclude: A folder whose files are not read.

    Raises:
        HeedfulError: If a file cannot be read, or there is no text.
    """
    inputs: list[object] = []  # texts, lists of texts for pairs, or lists of words for tagged examples
    notes: list[str] = []
    bad_rows = 0
    paths_and_names, _ = list_files([Path(name) for name in files], exclude)
    for path, _ in paths_and_names:
        inherited = inherit_settings(settings, names, [path])
        if _has_labelled_format(path, example_type, replace(settings, encoding=inherited.encoding)):
            file_inputs, file_bad_rows, file_notes = _read_labelled(path, example_type, settings, inherited)
        else:
            file_inputs, file_bad_rows, file_notes = _read_inputs(path, head_kind, settings, inherited, exclude)
        inputs += file_inputs
        bad_rows += file_bad_rows
        notes += file_notes
    if not inputs and not bad_rows:
        raise HeedfulError(f"{', '.join(files)}: no text to learn from, expected texts without labels: give others")
    num_read = len(inputs)
    if example_type is PairExample:
        inputs = _without_evaluated_texts(inputs, evaluated)
    examples = tuple(example_type.from_inputs(inputs, next(iter(labels), "")))
    return Unlabelled(examples=examples, bad_rows=bad_rows, in_evaluation=num_read - len(inputs), notes=tuple(notes))


def _without_evaluated_texts(inputs: Sequence[object], evaluated: Iterable[Example]) -> list[object]:
    """Leave out inputs, texts or pairs of texts, that have a text of the evaluated examples."""
    evaluated_hashes = {hash_text(normalise_text(text)) for example in evaluated for text in example.texts}

    def is_evaluated(text_or_pair: object) -> bool:
        texts = text_or_pair if isinstance(text_or_pair, list | tuple) else [str(text_or_pair)]
        return any(hash_text(normalise_text(text)) in evaluated_hashes for text in texts)

    return [text_or_pair for text_or_pair in inputs if not is_evaluated(text_or_pair)]


def _has_labelled_format(path: Path, example_type: type[Example], settings: DataSettings) -> bool:
    """Tell whether a file is in a format of labelled data without a header: tags in columns, or SQuAD's JSON."""
    suffix = stem_and_suffix(path)[1]
    if example_type is TaggedExample and FORMAT_BY_SUFFIX.get(suffix) in (None, "text"):
        file, _ = detect_encoding(path, encoding=settings.encoding, max_row_bytes=settings.max_row_bytes)
        return suffix in TAG_SUFFIXES or settings.format == "conll" or is_conll(read_head(file))
    return suffix in TAG_SUFFIXES or (example_type is QuestionExample and suffix == ".json")


def _read_labelled(
    path: Path, example_type: type[Example], settings: DataSettings, inherited: DataSettings
) -> tuple[list[object], int, list[str]]:
    """Read a file of labelled data without its labels.

    Returns:
        Inputs of the task, the count of bad rows, and sentences about the file.
    """
    column_positions = {role: key for role, key in (settings.columns or {}).items() if str(key).isdigit()}
    file_settings = replace(settings, dev_fraction=0.0, columns=column_positions or None, encoding=inherited.encoding)
    dataset = read_data(path, example_type, file_settings, on_bad_row=Skip())
    inputs: list[object] = [example.to_input() for split in dataset.splits for example in dataset.examples(split)]
    return inputs, sum(dataset.row_errors.bad.values()), list(dataset.stated)


def _read_inputs(
    path: Path, head_kind: str, settings: DataSettings, inherited: DataSettings, exclude: Path
) -> tuple[list[object], int, list[str]]:
    """Read a file of plain texts, or a table.

    The columns that `inherited` names are used if the file has all of them, else columns with the usual names.

    Args:
        path: The file.
        head_kind: The kind of the teacher's head, which determines the roles of columns.
        settings: Data settings of the labelled data.
        inherited: Those of `settings` that apply to this file.
        exclude: A folder whose files are not read.

    Returns:
        Inputs of the head, the count of bad rows, and sentences about the file.

    Raises:
        HeedfulError: If the file cannot be read, or a column is missing.
    """
    roles = {role for spec in INPUT_SPECS[head_kind] for role in spec.roles}
    columns = {role: name for role, name in (inherited.columns or {}).items() if role in roles}
    suffix = stem_and_suffix(path)[1]
    chosen_format = settings.format if suffix not in FORMAT_BY_SUFFIX else None
    is_plain_text = (chosen_format or FORMAT_BY_SUFFIX.get(suffix)) == "text"
    file_settings = without_split_settings(
        replace(inherited, columns=None if is_plain_text else columns or None, format=chosen_format)
    )
    try:
        input_files = open_inputs([path], head_kind, file_settings, exclude=exclude)
    except HeedfulError as error_with_columns:
        try:
            input_files = open_inputs([path], head_kind, replace(file_settings, columns=None), exclude=exclude)
        except MissingColumnError as missing:
            raise HeedfulError(
                f"{path}: which column is the {missing.role}? "
                f'Call it "{COLUMN_NAMES[missing.role][0]}" in its first row: '
                "data.columns names columns of the labelled data, and counts here where a file has all of them"
            ) from None
        except HeedfulError:
            raise error_with_columns from None
    inputs: list[object] = []
    notes: list[str] = []
    bad_rows = 0
    for input_file in input_files:
        notes += input_file.notes
        for row in input_file.rows():
            engine_input, error = input_file.engine_input(row)
            if error is None:
                inputs.append(engine_input)
            else:
                bad_rows += 1
    return inputs, bad_rows, notes


def without_evaluated(unlabelled: Unlabelled, evaluated: Iterable[Example]) -> Unlabelled:
    """Leave out examples whose text is in dev or test; case, punctuation and spaces are ignored."""
    evaluated_hashes = {_text_hash(example) for example in evaluated}
    remaining = tuple(example for example in unlabelled.examples if _text_hash(example) not in evaluated_hashes)
    left_out = len(unlabelled.examples) - len(remaining)
    return replace(unlabelled, examples=remaining, in_evaluation=unlabelled.in_evaluation + left_out)


def _text_hash(example: Example) -> int:
    """Return a hash of an example's text without spaces, so that "do n't" and "don't" are equal."""
    return hash_text(normalise_text(example.group).replace(" ", ""))


def encode_both(
    task: Task, labelled: Iterable[Example], unlabelled: Iterable[Example]
) -> tuple[EncodedSplit, EncodedSplit]:
    """Encode labelled examples and unlabelled ones. Return the two encoded splits in this order."""
    return task.encode_split(labelled), task.for_unlabelled().encode_split(unlabelled)
