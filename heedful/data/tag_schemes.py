"""Tagging schemes of named entities (IOB1, IOB2, IOBES, BILOU, BMES, IO): detection and conversion."""

from __future__ import annotations

from collections.abc import Collection, Sequence

OUTSIDE = "O"
SAME = {"U": "S", "L": "E", "M": "I"}  # marks of BILOU and BMES to those of IOBES
SAID = {
    ("B", True): "SUBI",
    ("B", False): "BI",
    ("I", True): "ELI",
    ("I", False): "MI",
}  # (mark in IOB2, whether its entity ends) to marks of other schemes


def parse_tag(tag: str) -> tuple[str, str]:
    """Split a tag into its mark and its type.

    >>> parse_tag("B-PER"), parse_tag("L-a-b"), parse_tag("O"), parse_tag("I")
    (('B', 'PER'), ('E', 'a-b'), ('O', ''), ('I', ''))
    """
    mark, _, kind = tag.partition("-")
    return SAME.get(mark, mark), kind


def to_iob2(tags: Sequence[str], *, strict: bool = False) -> tuple[str, ...]:
    """Convert tags of any scheme to IOB2 as conlleval reads them: I-x that does not continue an x begins an entity.

    Args:
        tags: tags of one sentence.
        strict: let I-x begin an entity only right after an x that ended; leave other stray I-x unchanged.

    >>> tags = ["I-PER", "B-PER", "O", "S-LOC", "B-LOC", "E-LOC", "I-LOC"]
    >>> to_iob2(tags)
    ('B-PER', 'B-PER', 'O', 'B-LOC', 'B-LOC', 'I-LOC', 'B-LOC')
    >>> to_iob2(tags, strict=True)
    ('I-PER', 'B-PER', 'O', 'B-LOC', 'B-LOC', 'I-LOC', 'B-LOC')
    """
    converted: list[str] = []
    open_: str | None = None  # type of the entity that may continue
    ended: str | None = None  # type of the entity that the last tag ended
    for tag in tags:
        mark, kind = parse_tag(tag)
        if mark not in ("B", "I", "E", "S"):
            converted.append(tag)
            open_ = ended = None
            continue
        begins = mark in "BS" or (kind == ended if strict else kind != open_)
        converted.append(("B" if begins else "I") + tag[1:])
        open_, ended = (kind, None) if mark in "BI" else (None, kind)
    return tuple(converted)


def to_scheme(tags: Sequence[str], labels: Collection[str]) -> tuple[str, ...]:
    """Convert tags of IOB2 to the scheme of a set of labels; a tag without a counterpart is unchanged.

    >>> to_scheme(["B-LOC", "B-PER", "I-PER"], ["O", "S-LOC", "B-LOC", "B-PER", "E-PER"])
    ('S-LOC', 'B-PER', 'E-PER')
    >>> to_scheme(["B-LOC", "O", "B-PER"], ["O", "I-LOC", "B-PER", "I-PER"])
    ('I-LOC', 'O', 'B-PER')
    """
    converted: list[str] = []
    for tag, after in zip(tags, [*tags[1:], OUTSIDE], strict=False):
        ends = after != "I" + tag[1:]
        same = (mark + tag[1:] for mark in SAID.get((tag[:1], ends), ""))
        converted.append(next((candidate for candidate in same if candidate in labels), tag))
    return tuple(converted)


def unknown_labels(labels: Sequence[str], known: Collection[str], *, tags: bool) -> list[str]:
    """Labels of the data that a model with the known labels cannot predict; tags are compared across schemes."""
    return [label for label in labels if (to_scheme([label], known)[0] if tags else label) not in known]
