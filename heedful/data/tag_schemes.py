"""Tags of entities (IOB2, IOBES, BILOU, BMES, IO) and the way from one scheme to another."""

from __future__ import annotations

from collections.abc import Collection, Sequence

OUTSIDE = "O"
SAME = {"U": "S", "L": "E", "M": "I"}  # BILOU's and BMES's names for what IOBES calls S, E and I
SAID = {("B", True): "SUBI", ("B", False): "BI", ("I", True): "ELI", ("I", False): "MI"}  # (mark, its entity ends here)


def parse_tag(tag: str) -> tuple[str, str]:
    """The mark and the type.

    >>> read_tag("B-PER"), read_tag("L-a-b"), read_tag("O"), read_tag("I")
    (('B', 'PER'), ('E', 'a-b'), ('O', ''), ('I', ''))
    """
    mark, _, kind = tag.partition("-")
    return SAME.get(mark, mark), kind


def to_iob2(tags: Sequence[str], *, strict: bool = False) -> tuple[str, ...]:
    """Tags of any scheme as IOB2, as conlleval reads them: I-x after anything but an open x begins an entity.

    `strict`: I-x begins one only right after an x that ended; a stray I-x stays what it is.

    >>> tags = ["I-PER", "B-PER", "O", "S-LOC", "B-LOC", "E-LOC", "I-LOC"]
    >>> to_iob2(tags)
    ('B-PER', 'B-PER', 'O', 'B-LOC', 'B-LOC', 'I-LOC', 'B-LOC')
    >>> to_iob2(tags, strict=True)
    ('I-PER', 'B-PER', 'O', 'B-LOC', 'B-LOC', 'I-LOC', 'B-LOC')
    """
    found: list[str] = []
    open_: str | None = None  # the type of the entity that may go on
    ended: str | None = None  # the type of the one that the last tag ended
    for tag in tags:
        mark, kind = parse_tag(tag)
        if mark not in ("B", "I", "E", "S"):
            found.append(tag)
            open_ = ended = None
            continue
        begins = mark in "BS" or (kind == ended if strict else kind != open_)
        found.append(("B" if begins else "I") + tag[1:])
        open_, ended = (kind, None) if mark in "BI" else (None, kind)
    return tuple(found)


def to_scheme(tags: Sequence[str], labels: Collection[str]) -> tuple[str, ...]:
    """Tags of IOB2 by the marks that these labels have; one that they cannot say stays what it is.

    >>> in_scheme(["B-LOC", "B-PER", "I-PER"], ["O", "S-LOC", "B-LOC", "B-PER", "E-PER"])
    ('S-LOC', 'B-PER', 'E-PER')
    >>> in_scheme(["B-LOC", "O", "B-PER"], ["O", "I-LOC", "B-PER", "I-PER"])
    ('I-LOC', 'O', 'B-PER')
    """
    found: list[str] = []
    for tag, after in zip(tags, [*tags[1:], OUTSIDE], strict=False):
        ends = after != "I" + tag[1:]
        same = (mark + tag[1:] for mark in SAID.get((tag[:1], ends), ""))
        found.append(next((each for each in same if each in labels), tag))
    return tuple(found)


def unknown_labels(labels: Sequence[str], known: Collection[str], *, tags: bool) -> list[str]:
    """The labels of the data that a model with the known ones never says, tags in whatever scheme it has."""
    return [each for each in labels if (to_scheme([each], known)[0] if tags else each) not in known]
