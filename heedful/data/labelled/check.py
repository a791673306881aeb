"""Report on a dataset before training: counts, duplicates, leaks, contradictions, lengths, odd characters."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
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

ODD: dict[str, re.Pattern[str]] = {
    "control characters": re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]"),
    "replacement characters (U+FFFD)": re.compile("\ufffd"),
    "byte order marks inside": re.compile("\ufeff"),
    "text that was decoded twice, like Ã© or â€™": re.compile("Ã[\x80-\xbf]|Â[\x80-\xbf]|â€"),
    "Windows-1252 read as Latin-1 (U+0080 to U+009F)": re.compile("[\x80-\x9f]"),
    "markup like <br /> or &amp;": re.compile(r"</?[a-zA-Z]{1,10}(?: [^<>]{0,100})?/?>|&(?:[a-z]{2,6}|#\d{2,5});"),
}
UNEVEN = 10  # ratio of the most frequent label to the rarest from which labels are called uneven
EXAMPLES = 3  # places that a line lists
FEWEST_DOUBTED = 20  # labels from which the label column is doubted; small data may have as many
PERCENTILES = (50, 90, 99, 100)
MAX_LABELS = 20  # rows of labels in the table
NOUNS = {  # of each kind of problem: one, several; the worst first
    "leak": ("leak", "leaks"),
    "label-column": ("doubtful label column", "doubtful label columns"),
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
    """Findings of one split."""

    examples: int
    labels: Mapping[str, int]  # in the dataset's order; entities by type, answers by index
    repeated: int  # examples whose texts occurred before, exactly
    alike: int  # as `repeated`, ignoring case and punctuation
    contradicting: int  # texts with different targets, ignoring case and punctuation
    empty: int  # examples with an empty text
    lengths: tuple[int, ...]  # at the percentiles 50, 90, 99, 100
    too_long: int
    odd: Mapping[str, int]  # number of examples by kind of odd characters
    places: Mapping[str, tuple[str, ...]]  # first places of each finding


@dataclass(frozen=True, kw_only=True, slots=True)
class Leak:
    """Texts that two splits share."""

    splits: tuple[str, str]
    texts: int  # equal texts
    alike: int  # as `texts`, ignoring case and punctuation
    groups: int  # shared contexts, prompts or sources
    places: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A kind of finding in one split, file or pair of splits that should be looked at before training."""

    kind: str  # a key of `NOUNS`
    count: int  # examples, texts or rows with the problem
    message: str  # with its place

    def line(self) -> str:
        """The marked line of the report."""
        return f"! {NOUNS[self.kind][self.count != 1]}: {self.message}"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataReport:
    """Result of `check`."""

    stated: tuple[str, ...]
    splits: Mapping[str, SplitReport]
    leaks: tuple[Leak, ...]
    bad: Mapping[str, int]  # skipped rows by file
    bad_rows: tuple[BadRow, ...]  # the first of them
    repairs: Mapping[str, int]
    unit: str
    limit: int
    doubt: str = ""  # why the label column may be wrong; "": it seems right
    problems: tuple[Problem, ...] = ()  # in the order of `NOUNS`

    def verdict(self) -> str:
        """Return the number of kinds of problems, and how often each was found."""
        counts: Counter[str] = Counter()
        for problem in self.problems:
            counts[problem.kind] += problem.count
        if not counts:
            return "no problems found"
        some = ", ".join(f"{count:,} {NOUNS[kind][count != 1]}" for kind, count in counts.items())
        return f"{len(counts)} problem{'s' if len(counts) > 1 else ''}: {some}"

    def lines(self) -> list[str]:
        """Text of the report: problems, counts of the splits as a table, how the data was read, and the verdict."""
        lines = [problem.line() for problem in self.problems]
        lines += [""] if lines else []
        lines += _table_lines(self.splits, self.unit)
        lines += ["", *self.stated]
        for name, split in self.splits.items():
            least, most = min(split.labels.values(), default=0), max(split.labels.values(), default=0)
            if 0 < UNEVEN * least < most:
                ratio = most / least
                lines.append(f"{name}: the most frequent label is {ratio:.0f} times as frequent as the rarest")
        lines += [f"{count:,} {what}" for what, count in self.repairs.items()]
        return [*lines, "", self.verdict()]


@dataclass(slots=True)
class _Tally:
    """Numbers kept of each example of a split, about 50 bytes."""

    lines: array[int] = field(default_factory=lambda: array("Q"))
    files: array[int] = field(default_factory=lambda: array("L"))
    exact: array[int] = field(default_factory=lambda: array("Q"))
    alike: array[int] = field(default_factory=lambda: array("Q"))
    groups: array[int] = field(default_factory=lambda: array("Q"))
    targets: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("Q"))
    labels: Counter[str] = field(default_factory=Counter)
    odd: Counter[str] = field(default_factory=Counter)
    empty: int = 0
    several: bool = False  # whether a line may hold several examples
    whole: bool = False  # whether each file is one example, shown with its folder
    places: dict[str, list[str]] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)

    def add(self, example: Example, length: int) -> None:
        self.lines.append(example.line)
        self.files.append(self.names.setdefault(example.file, len(self.names)))
        texts = example.texts
        self.exact.append(hash_text("\x1f".join(texts)))
        self.alike.append(hash_text("\x1f".join(map(normalise_text, texts))))
        if isinstance(example, QuestionExample | ChoiceExample | Seq2SeqExample | RankExample):
            self.several = isinstance(example, QuestionExample | ChoiceExample)
            self.groups.append(hash_text(normalise_text(example.group)))
        self.targets.append(hash_text(example.target))
        self.lengths.append(length)
        self.labels.update(counted(example))
        if not all(text.strip() for text in texts):
            self.empty += 1
            self.note("empty", example)
        for what, pattern in ODD.items():
            if any(pattern.search(text) for text in texts):
                self.odd[what] += 1
                self.note(what, example)

    def note(self, what: str, example: Example) -> None:
        places = self.places.setdefault(what, [])
        if len(places) < EXAMPLES:
            places.append(self.place(len(self.lines) - 1))

    def place(self, index: int) -> str:
        path = Path(list(self.names)[self.files[index]])
        if self.whole:
            return f"{path.parent.name}/{path.name}"
        name = path.name
        return f"{name}:{self.lines[index]}" + (f" (example {index + 1})" if self.several else "")


def words(example: Example) -> int:
    """Count the words of an example; of candidates or documents only the longest counts."""
    if isinstance(example, ChoiceExample | RankExample):
        first, *others = example.texts
        return len(first.split()) + max(len(text.split()) for text in others)
    return sum(len(text.split()) for text in example.texts)


def counted(example: Example) -> Sequence[str]:
    """The labels that an example adds to the counts."""
    match example:
        case LabelledExample():
            return (example.label,)
        case MultiLabelExample():
            return example.labels
        case TaggedExample():
            begun = [tag[2:] for tag in example.tags if tag[:2] == "B-"]
            return begun if begun or all(tag == "O" or tag[:2] == "I-" for tag in example.tags) else example.tags
        case QuestionExample():
            return ("impossible" if example.impossible else "answerable",)
        case ChoiceExample():
            return (f"candidate {example.answer}",)
    return ()


def label_column_warning(labels: Mapping[str, int], examples: int) -> str:
    """Message if the labels of train look like ids or texts, else "".

    Args:
        labels: the number of examples of each label in train.
        examples: the number of examples in all splits.
    """
    count = sum(count_of_label > 0 for count_of_label in labels.values())
    if count < FEWEST_DOUBTED or 2 * count <= max(examples, sum(labels.values())):
        return ""
    some = ", ".join(shown(label) for label, _ in zip(labels, range(3), strict=False))
    return (
        f"{count:,} different labels for {examples:,} examples, like {some}: the label column looks like an id or a "
        "text. Name the right column: --data.columns.label=NAME"
    )


def check(
    source: Dataset[Example], *, limit: int = 384, length: Callable[[Example], int] = words, unit: str = "words"
) -> DataReport:
    """Check a dataset in one pass over each split.

    Args:
        source: the dataset.
        limit: maximum length; longer examples are reported as long.
        length: length of an example.
        unit: unit of `length`, for the report.
    """
    tallies: dict[str, _Tally] = {}
    for split in source.splits:
        tally = tallies[split] = _Tally(whole=source.layout == "class-folders")
        for example in source.examples(split):
            count = length(example)
            tally.add(example, count)
            if count > limit:
                tally.note("too long", example)
    labelled = source.kind in (LabelledExample, MultiLabelExample)
    order = [*source.labels] if labelled else []
    splits = {split: _split_report(tally, source.kind, order, limit) for split, tally in tallies.items()}
    total = sum(split.examples for split in splits.values())
    doubt = label_column_warning(next(iter(splits.values())).labels, total) if labelled else ""
    leaks, errors = tuple(_leaks(tallies)), source.row_errors
    problems = [Problem(kind="label-column", count=1, message=doubt)] if doubt else []
    problems += [Problem(kind="leak", count=max(leak.alike, leak.groups), message=_leak_text(leak)) for leak in leaks]
    for file, number in errors.bad.items():
        first = next((f", like {bad}" for bad in errors.first if bad.file == file), "")
        problems.append(Problem(kind="bad-row", count=number, message=f"{file}: {number:,} left out{first}"))
    for name, counted_split in splits.items():
        problems += _split_problems(name, counted_split, unit, limit)
    kinds = [*NOUNS]
    return DataReport(
        stated=source.stated,
        splits=splits,
        leaks=leaks,
        bad=dict(errors.bad),
        bad_rows=tuple(errors.first),
        repairs=dict(errors.repairs),
        unit=unit,
        limit=limit,
        doubt=doubt,
        problems=tuple(sorted(problems, key=lambda problem: kinds.index(problem.kind))),
    )


def _numbers(values: array[int]) -> NDArray[np.uint64]:
    return np.frombuffer(values, dtype=np.uint64) if values else np.zeros(0, np.uint64)


def _split_report(tally: _Tally, kind: type[Example], order: Sequence[str], limit: int) -> SplitReport:
    count = len(tally.lines)
    lengths, alike, targets = _numbers(tally.lengths), _numbers(tally.alike), _numbers(tally.targets)
    distinct, where = np.unique(alike, return_index=True)
    asked = _numbers(tally.groups) if kind is Seq2SeqExample else alike  # source texts only
    by = np.lexsort((targets, asked))
    pairs = (np.diff(asked[by]) == 0) & (np.diff(targets[by]) != 0)
    at_odds = np.unique(asked[by][1:][pairs])
    places = dict(tally.places)
    if len(at_odds):
        _, first = np.unique(asked[np.isin(asked, at_odds)], return_index=True)
        rows = np.flatnonzero(np.isin(asked, at_odds))[np.sort(first)[:EXAMPLES]]
        places["contradicting"] = [tally.place(int(index)) for index in rows]
    if len(distinct) < count:
        again = np.setdiff1d(np.arange(count), where)[:EXAMPLES]
        places["alike"] = [tally.place(int(index)) for index in again]
    names = [*order, *sorted(set(tally.labels) - set(order))]
    return SplitReport(
        examples=count,
        labels={name: tally.labels[name] for name in names},
        repeated=count - len(np.unique(_numbers(tally.exact))),
        alike=count - len(distinct),
        contradicting=len(at_odds),
        empty=tally.empty,
        lengths=tuple(int(np.percentile(lengths, share, method="higher")) for share in PERCENTILES) if count else (),
        too_long=int((lengths > limit).sum()),
        odd=dict(tally.odd),
        places={what: tuple(some) for what, some in places.items()},
    )


def _leaks(tallies: Mapping[str, _Tally]) -> Iterator[Leak]:
    for first, second in combinations(tallies, 2):
        left, right = tallies[first], tallies[second]
        alike, in_one, in_two = np.intersect1d(_numbers(left.alike), _numbers(right.alike), return_indices=True)
        groups = np.intersect1d(_numbers(left.groups), _numbers(right.groups))
        if len(alike) or len(groups):
            some = np.argsort(in_one)[:EXAMPLES]
            yield Leak(
                splits=(first, second),
                texts=len(np.intersect1d(_numbers(left.exact), _numbers(right.exact))),
                alike=len(alike),
                groups=len(groups),
                places=tuple((left.place(int(in_one[i])), right.place(int(in_two[i]))) for i in some),
            )


# ---------------------------------------------------------------------------------------------------- for people


def _split_problems(name: str, split: SplitReport, unit: str, limit: int) -> Iterator[Problem]:
    lacking = [label for label, count in split.labels.items() if not count]
    if lacking and split.examples:
        some = ", ".join(map(shown, lacking[:10])) + (", ..." if len(lacking) > 10 else "")
        yield Problem(kind="missing-label", count=len(lacking), message=f"{name}: no example of {some}")
    texts = "text" if split.contradicting == 1 else "texts"
    for kind, count, what, key in (
        ("contradiction", split.contradicting, f"{texts} with different targets", "contradicting"),
        (
            "repeat",
            split.alike,
            f"repeat earlier ones but for case and punctuation ({split.repeated:,} exactly)",
            "alike",
        ),
        ("empty", split.empty, "with an empty text", "empty"),
        ("long", split.too_long, f"longer than {limit:,} {unit}", "too long"),
        *(("odd", number, f"with {what}", what) for what, number in split.odd.items()),
    ):
        if count:
            places = f": {', '.join(split.places[key])}" if split.places.get(key) else ""
            more = ", ..." if places and count > len(split.places[key]) else ""
            yield Problem(kind=kind, count=count, message=f"{name}: {count:,} {what}{places}{more}")


def _table_lines(splits: Mapping[str, SplitReport], unit: str) -> Iterator[str]:
    """Yield the rows of a table with a column for each split: examples, lengths, labels."""
    rows = [["", *splits], ["examples", *(f"{split.examples:,}" for split in splits.values())]]
    for number, what in enumerate(("half up to", "90 % up to", "99 % up to", "the longest")):
        cells = [f"{split.lengths[number]:,}" if split.lengths else "" for split in splits.values()]
        rows.append([f"{unit}: {what}", *cells])
    labels = list(dict.fromkeys(label for split in splits.values() for label in split.labels))
    for label in labels[:MAX_LABELS]:
        rows.append([f"label {shown(label)}", *(f"{split.labels.get(label, 0):,}" for split in splits.values())])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for title, *cells in rows:
        numbers = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        yield "  ".join([title.ljust(widths[0]), *numbers])
    if len(labels) > MAX_LABELS:
        yield f"and {len(labels) - MAX_LABELS:,} more labels"


def _leak_text(leak: Leak) -> str:
    shared = []
    if leak.alike:
        shared.append(f"{leak.alike:,} texts but for case and punctuation ({leak.texts:,} exactly)")
    if leak.groups:
        shared.append(f"{leak.groups:,} contexts, prompts or sources")
    text = f"{leak.splits[0]} and {leak.splits[1]} share {' and '.join(shared)}"
    some = ", ".join(f"{first_place} = {second_place}" for first_place, second_place in leak.places)
    more = ", ..." if leak.alike > len(leak.places) else ""
    return text + (f": {some}{more}" if some else "")
