"""The report of `heedful check` on a dataset: counts, duplicates, leaks, contradictions, lengths, odd characters."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from heedful.data.bad_rows import BadRow, shown
from heedful.data.examples import (
    ChoiceExample,
    Example,
    LabelledExample,
    MultiLabelExample,
    QuestionExample,
    RankExample,
    Seq2SeqExample,
    TaggedExample,
    hash_text,
    normalise_text,
)
from heedful.data.labelled.dataset import Dataset

ODD_PATTERNS: dict[str, re.Pattern[str]] = {  # kinds of characters that are probably mistakes
    "control characters": re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"),
    "replacement characters (U+FFFD)": re.compile("\ufffd"),
    "byte order marks inside": re.compile("\ufeff"),
    "text that was decoded twice, like Ã© or â€™": re.compile("Ã[\x80-\xbf]|Â[\x80-\xbf]|â€"),
    "Windows-1252 read as Latin-1 (U+0080 to U+009F)": re.compile("[\x80-\x9f]"),
    "markup like <br /> or &amp;": re.compile(r"</?[a-zA-Z]{1,10}(?: [^<>]{0,100})?/?>|&(?:[a-z]{2,6}|#\d{2,5});"),
}
UNEVEN_RATIO = 10  # the report mentions a larger ratio of the most frequent label to the rarest
MAX_PLACES = 3  # maximum positions on a line of the report
MIN_DOUBTED_LABELS = 20  # minimum labels for doubts about the label column, since small data may have no repeated label
PERCENTILES = (50, 90, 99, 100)  # percentiles of lengths
MAX_LABELS = 20  # maximum labels in the table
NOUNS = {  # singular and plural of each kind of problem, the worst kind first
    "leak": ("leak", "leaks"),
    "label-column": ("doubtful label column", "doubtful label columns"),
    "one-label": ("single label", "single labels"),
    "label-spelling": ("label in several spellings", "labels in several spellings"),
    "bad-row": ("bad row", "bad rows"),
    "missing-label": ("label without examples", "labels without examples"),
    "contradiction": ("contradiction", "contradictions"),
    "repeat": ("repeat", "repeats"),
    "empty": ("empty", "empty"),
    "long": ("long", "long"),
    "odd": ("odd text", "odd texts"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitReport:
    """Findings in one split."""

    examples: int  # count of examples
    labels: Mapping[str, int]  # counts by label, in the dataset's order; for tags by entity type
    label_shares: Mapping[str, float]  # `labels` divided by `examples`; for tags, by the count of all entities
    repeated: int  # examples with exactly the texts of an earlier example
    alike: int  # examples with the texts of an earlier example, ignoring case and punctuation
    contradicting: int  # texts with different targets, ignoring case and punctuation
    empty: int  # examples with an empty text
    lengths: tuple[int, ...]  # lengths at the percentiles 50, 90, 99, 100; (): no examples
    too_long: int  # examples above the maximum length
    odd: Mapping[str, int]  # examples by kind of odd characters
    places: Mapping[str, tuple[str, ...]]  # first positions (FILE:LINE) by kind of finding


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """Texts that two splits share."""

    splits: tuple[str, str]
    texts: int  # exactly equal texts
    alike: int  # equal texts, ignoring case and punctuation
    groups: int  # shared contexts, prompts, queries or sources
    places: tuple[tuple[str, str], ...]  # first positions (FILE:LINE) in both splits


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A problem in a split, a file or a pair of splits that a person should see before training."""

    kind: str  # a key of NOUNS
    count: int  # examples, texts or rows with the problem
    message: str  # description with positions

    def line(self) -> str:
        """Return the problem as a line of the report."""
        return f"! {NOUNS[self.kind][self.count != 1]}: {self.message}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReport:
    """The result of `check`."""

    stated: tuple[str, ...]  # sentences about how the data was read
    splits: Mapping[str, SplitReport]
    leaks: tuple[Leak, ...]
    bad: Mapping[str, int]  # skipped rows by file
    bad_rows: tuple[BadRow, ...]  # the first skipped rows
    repairs: Mapping[str, int]  # repaired cells by kind of repair
    unit: str  # unit of lengths
    limit: int  # maximum length
    doubt: str = ""  # reason why the label column may be wrong; "": no doubt
    problems: tuple[Problem, ...] = ()  # in the order of NOUNS

    def verdict(self) -> str:
        """Return a summary: how many kinds of problems there are, and the count of each."""
        counts: Counter[str] = Counter()
        for problem in self.problems:
            counts[problem.kind] += problem.count
        if not counts:
            return "no problems found"
        counts_of_kinds = ", ".join(f"{count:,} {NOUNS[kind][count != 1]}" for kind, count in counts.items())
        return f"{len(counts)} problem{'s' if len(counts) > 1 else ''}: {counts_of_kinds}"

    def lines(self) -> list[str]:
        """Return the report as text: problems, a table of counts, how the data was read, repairs, and the verdict."""
        lines = [problem.line() for problem in self.problems]
        lines += [""] if lines else []
        lines += _table_lines(self.splits, self.unit)
        lines += ["", *self.stated]
        for name, split in self.splits.items():
            fewest, most = min(split.labels.values(), default=0), max(split.labels.values(), default=0)
            if 0 < UNEVEN_RATIO * fewest < most:
                ratio = most / fewest
                lines.append(f"{name}: the most frequent label is {ratio:.0f} times as frequent as the rarest")
        lines += [f"{count:,} {kind}" for kind, count in self.repairs.items()]
        return [*lines, "", self.verdict()]


@dataclass(slots=True)
class _Tally:
    """Hashes, lengths and positions of the examples of a split, in about 50 bytes per example."""

    lines: array[int] = field(default_factory=lambda: array("Q"))
    files: array[int] = field(default_factory=lambda: array("L"))  # indices of files, the values of `names`
    exact: array[int] = field(default_factory=lambda: array("Q"))  # hashes of the texts
    alike: array[int] = field(default_factory=lambda: array("Q"))  # hashes of the normalised texts
    groups: array[int] = field(default_factory=lambda: array("Q"))  # hashes of contexts, prompts, queries or sources
    targets: array[int] = field(default_factory=lambda: array("Q"))  # hashes of the targets
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    labels: Counter[str] = field(default_factory=Counter)
    odd: Counter[str] = field(default_factory=Counter)
    empty: int = 0
    are_lines_shared: bool = False  # whether a line may have several examples
    are_files_examples: bool = False  # whether each file is one example; positions then have the folder
    places: dict[str, list[str]] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)  # index of each file

    def add(self, example: Example, length: int) -> None:
        self.lines.append(example.line)
        self.files.append(self.names.setdefault(example.file, len(self.names)))
        texts = example.texts
        self.exact.append(hash_text("\x1f".join(texts)))
        self.alike.append(hash_text("\x1f".join(map(normalise_text, texts))))
        if isinstance(example, QuestionExample | ChoiceExample | Seq2SeqExample | RankExample):
            self.are_lines_shared = isinstance(example, QuestionExample | ChoiceExample)
            self.groups.append(hash_text(normalise_text(example.group)))
        self.targets.append(hash_text(example.target))
        self.lengths.append(length)
        self.labels.update(labels_of_example(example))
        if not all(text.strip() for text in texts):
            self.empty += 1
            self.note_last("empty")
        for kind, pattern in ODD_PATTERNS.items():
            if any(pattern.search(text) for text in texts):
                self.odd[kind] += 1
                self.note_last(kind)

    def note_last(self, kind: str) -> None:
        """Add the position of the last example to the positions of a kind of finding."""
        places = self.places.setdefault(kind, [])
        if len(places) < MAX_PLACES:
            places.append(self.place(len(self.lines) - 1))

    def place(self, index: int) -> str:
        """Return the position of an example, for the report."""
        path = Path(list(self.names)[self.files[index]])
        if self.are_files_examples:
            return f"{path.parent.name}/{path.name}"
        position = f"{path.name}:{self.lines[index]}"
        return f"{position} (example {index + 1})" if self.are_lines_shared else position


def count_example_words(example: Example) -> int:
    """Count the words of the longest model input for an example: with the longest candidate or document only."""
    if isinstance(example, ChoiceExample | RankExample):
        prompt, *candidates = example.texts
        return len(prompt.split()) + max(len(text.split()) for text in candidates)
    return sum(len(text.split()) for text in example.texts)


def labels_of_example(example: Example) -> Sequence[str]:
    """Return the labels that an example adds to the counts. For tags they are the types of the entities."""
    match example:
        case LabelledExample():
            return (example.label,)
        case MultiLabelExample():
            return example.labels
        case TaggedExample():
            entities = [tag[2:] for tag in example.tags if tag[:2] == "B-"]
            are_schemed = bool(entities) or all(tag == "O" or tag[:2] == "I-" for tag in example.tags)
            return entities if are_schemed else example.tags
        case QuestionExample():
            return ("impossible" if example.impossible else "answerable",)
        case ChoiceExample():
            return (f"candidate {example.answer}",)
    return ()


def label_column_warning(labels: Mapping[str, int], examples: int) -> str:
    """Return a warning if the labels of train look like ids or texts, else "".

    Args:
        labels: counts of examples in train by label.
        examples: count of examples in all splits.
    """
    num_labels = sum(count > 0 for count in labels.values())
    if num_labels < MIN_DOUBTED_LABELS or 2 * num_labels <= max(examples, sum(labels.values())):
        return ""
    first_labels = ", ".join(map(shown, islice(labels, 3)))
    return (
        f"{num_labels:,} different labels for {examples:,} examples, like {first_labels}: the label column looks like "
        "an id or a text. Name the right column: --data.columns.label=NAME"
    )


def check(
    source: Dataset[Example],
    *,
    limit: int = 384,
    length: Callable[[Example], int] = count_example_words,
    unit: str = "words",
) -> DataReport:
    """Check a dataset in one pass over each split.

    Args:
        source: the dataset.
        limit: maximum length, above which examples are reported as long.
        length: function that returns the length of an example.
        unit: unit of `length`, for the report.
    """
    tallies: dict[str, _Tally] = {}
    for split in source.splits:
        tally = tallies[split] = _Tally(are_files_examples=source.layout == "class-folders")
        for example in source.examples(split):
            example_length = length(example)
            tally.add(example, example_length)
            if example_length > limit:
                tally.note_last("too long")
    has_labels = source.kind in (LabelledExample, MultiLabelExample)
    label_order = [*source.labels] if has_labels else []
    splits = {split: _split_report(tally, source.kind, label_order, limit) for split, tally in tallies.items()}
    num_examples = sum(split.examples for split in splits.values())
    doubt = label_column_warning(next(iter(splits.values())).labels, num_examples) if has_labels else ""
    leaks = tuple(_leaks(tallies))
    row_errors = source.row_errors
    problems = [Problem(kind="label-column", count=1, message=doubt)] if doubt else []
    if has_labels:
        problems += _label_problems(source.kind, splits)
    problems += [Problem(kind="leak", count=max(leak.alike, leak.groups), message=_leak_text(leak)) for leak in leaks]
    for file, count in row_errors.bad.items():
        first = next((f", like {bad}" for bad in row_errors.first if bad.file == file), "")
        problems.append(Problem(kind="bad-row", count=count, message=f"{file}: {count:,} left out{first}"))
    for name, split_report in splits.items():
        problems += _split_problems(name, split_report, unit, limit)
    kinds = [*NOUNS]
    return DataReport(
        stated=source.stated,
        splits=splits,
        leaks=leaks,
        bad=dict(row_errors.bad),
        bad_rows=tuple(row_errors.first),
        repairs=dict(row_errors.repairs),
        unit=unit,
        limit=limit,
        doubt=doubt,
        problems=tuple(sorted(problems, key=lambda problem: kinds.index(problem.kind))),
    )


def _label_problems(kind: type[Example], splits: Mapping[str, SplitReport]) -> Iterator[Problem]:
    """Yield problems of the labels: one for all examples of the first split, or one that has several spellings."""
    first, split = next(iter(splits.items()))
    used = [label for label, count in split.labels.items() if count]
    if kind is LabelledExample and len(used) == 1:
        message = f"all examples of {first} have the label {shown(used[0])}: there is nothing to distinguish"
        yield Problem(kind="one-label", count=1, message=message)
    spellings: dict[str, list[str]] = {}
    for label in dict.fromkeys(label for report in splits.values() for label in report.labels):
        spellings.setdefault(" ".join(label.casefold().split()), []).append(label)
    several = [labels for labels in spellings.values() if len(labels) > 1]
    if several:
        listed = "; ".join(", ".join(map(shown, labels)) for labels in several[:MAX_PLACES])
        more = f"; and {len(several) - MAX_PLACES:,} more" if len(several) > MAX_PLACES else ""
        message = f"{listed}{more} differ only in case or white space, and count as different labels"
        yield Problem(kind="label-spelling", count=len(several), message=message)


def _as_array(values: array[int]) -> NDArray[np.uint64]:
    return np.frombuffer(values, dtype=np.uint64) if values else np.zeros(0, np.uint64)


def _split_report(tally: _Tally, kind: type[Example], label_order: Sequence[str], limit: int) -> SplitReport:
    """Find duplicates and contradictions in a split, and summarise it."""
    count = len(tally.lines)
    lengths, alike = _as_array(tally.lengths), _as_array(tally.alike)
    _, first_indices = np.unique(alike, return_index=True)
    places = dict(tally.places)
    # the target of a Seq2SeqExample is among its texts, so only sources are compared
    texts = _as_array(tally.groups) if kind is Seq2SeqExample else alike
    num_contradicting, contradicting = _find_contradictions(texts, _as_array(tally.targets))
    if num_contradicting:
        places["contradicting"] = [tally.place(int(index)) for index in contradicting]
    if len(first_indices) < count:
        duplicates = np.setdiff1d(np.arange(count), first_indices)[:MAX_PLACES]
        places["alike"] = [tally.place(int(index)) for index in duplicates]
    names = [*label_order, *sorted(set(tally.labels) - set(label_order))]
    total = tally.labels.total() if kind is TaggedExample else count
    return SplitReport(
        examples=count,
        labels={name: tally.labels[name] for name in names},
        label_shares={name: tally.labels[name] / max(1, total) for name in names},
        repeated=count - len(np.unique(_as_array(tally.exact))),
        alike=count - len(first_indices),
        contradicting=num_contradicting,
        empty=tally.empty,
        lengths=tuple(int(np.percentile(lengths, share, method="higher")) for share in PERCENTILES) if count else (),
        too_long=int((lengths > limit).sum()),
        odd=dict(tally.odd),
        places={finding: tuple(positions) for finding, positions in places.items()},
    )


def _find_contradictions(texts: NDArray[np.uint64], targets: NDArray[np.uint64]) -> tuple[int, NDArray[np.int64]]:
    """Find texts that occur with different targets.

    Args:
        texts: hash of each example's text, [examples].
        targets: hash of each example's target, [examples].

    Returns:
        The count of such texts, and the index of the first example of each of the first MAX_PLACES texts.
    """
    order = np.lexsort((targets, texts))
    differ = (np.diff(texts[order]) == 0) & (np.diff(targets[order]) != 0)
    contradicting = np.unique(texts[order][1:][differ])
    examples = np.flatnonzero(np.isin(texts, contradicting))
    _, first = np.unique(texts[examples], return_index=True)
    return len(contradicting), examples[np.sort(first)[:MAX_PLACES]]


def _leaks(tallies: Mapping[str, _Tally]) -> Iterator[Leak]:
    """Yield a leak for every two splits that share texts."""
    for first, second in combinations(tallies, 2):
        left, right = tallies[first], tallies[second]
        alike, in_left, in_right = np.intersect1d(_as_array(left.alike), _as_array(right.alike), return_indices=True)
        groups = np.intersect1d(_as_array(left.groups), _as_array(right.groups))
        if len(alike) or len(groups):
            first_shared = np.argsort(in_left)[:MAX_PLACES]
            yield Leak(
                splits=(first, second),
                texts=len(np.intersect1d(_as_array(left.exact), _as_array(right.exact))),
                alike=len(alike),
                groups=len(groups),
                places=tuple((left.place(int(in_left[i])), right.place(int(in_right[i]))) for i in first_shared),
            )


# ---------------------------------------------------------------------------------------------------- text


def _split_problems(name: str, split: SplitReport, unit: str, limit: int) -> Iterator[Problem]:
    """Yield the problems of a split."""
    missing = [label for label, count in split.labels.items() if not count]
    if missing and split.examples:
        listed = ", ".join(map(shown, missing[:10])) + (", ..." if len(missing) > 10 else "")
        yield Problem(kind="missing-label", count=len(missing), message=f"{name}: no example of {listed}")
    texts = "text" if split.contradicting == 1 else "texts"
    repeats = f"repeat earlier ones but for case and punctuation ({split.repeated:,} exactly)"
    findings = [  # (kind of problem, count, description, key of split.places)
        ("contradiction", split.contradicting, f"{texts} with different targets", "contradicting"),
        ("repeat", split.alike, repeats, "alike"),
        ("empty", split.empty, "with an empty text", "empty"),
        ("long", split.too_long, f"longer than {limit:,} {unit}", "too long"),
    ]
    findings += [("odd", count, f"with {characters}", characters) for characters, count in split.odd.items()]
    for kind, count, description, key in findings:
        if not count:
            continue
        places = split.places.get(key, ())
        message = f"{name}: {count:,} {description}"
        if places:
            message += f": {', '.join(places)}"
            message += ", ..." if count > len(places) else ""
        yield Problem(kind=kind, count=count, message=message)


def _table_lines(splits: Mapping[str, SplitReport], unit: str) -> Iterator[str]:
    """Yield the lines of a table with a column for each split: count of examples, lengths, labels."""
    rows = [["", *splits], ["examples", *(f"{split.examples:,}" for split in splits.values())]]
    for index, percentile in enumerate(("half up to", "90 % up to", "99 % up to", "the longest")):
        cells = [f"{split.lengths[index]:,}" if split.lengths else "" for split in splits.values()]
        rows.append([f"{unit}: {percentile}", *cells])
    labels = list(dict.fromkeys(label for split in splits.values() for label in split.labels))
    for label in labels[:MAX_LABELS]:
        rows.append([f"label {shown(label)}", *(_label_cell(split, label) for split in splits.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for title, *cells in rows:
        aligned_cells = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join([title.ljust(widths[0]), *aligned_cells])
    if len(labels) > MAX_LABELS:
        yield f"and {len(labels) - MAX_LABELS:,} more labels"


def _label_cell(split: SplitReport, label: str) -> str:
    """Return the count of a label in a split with its share, such as "12 (30.0 %)", or "0"."""
    count = split.labels.get(label, 0)
    return f"{count:,} ({100 * split.label_shares[label]:.1f} %)" if count else "0"


def _leak_text(leak: Leak) -> str:
    """Describe a leak, with the positions of the first shared texts."""
    shared = []
    if leak.alike:
        shared.append(f"{leak.alike:,} texts but for case and punctuation ({leak.texts:,} exactly)")
    if leak.groups:
        shared.append(f"{leak.groups:,} contexts, prompts or sources")
    text = f"{leak.splits[0]} and {leak.splits[1]} share {' and '.join(shared)}"
    if not leak.places:
        return text
    places = ", ".join(f"{first} = {second}" for first, second in leak.places)
    more = ", ..." if leak.alike > len(leak.places) else ""
    return f"{text}: {places}{more}"
