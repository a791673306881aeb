"""Conversion between tagging schemes of entities (IOB1, IOB2, IOBES, BILOU, BMES, IO), for data and for tagging."""

from __future__ import annotations

from collections.abc import Collection, Sequence

OUTSIDE = "O"
IOBES_MARKS = {"U": "S", "L": "E", "M": "I"}  # marks of BILOU and BMES to marks of IOBES
EQUIVALENT_MARKS = {  # (mark in IOB2, whether the tag is the last of the entity) to marks of all schemes, best first
    ("B", True): "SUBI",
    ("B", False): "BI",
    ("I", True): "ELI",
    ("I", False): "MI",
}


def parse_tag(tag: str) -> tuple[str, str]:
    """Split a tag into its mark, converted to IOBES, and the type of its entity.

    >>> parse_tag("B-PER"), parse_tag("L-a-b"), parse_tag("O"), parse_tag("I")
    (('B', 'PER'), ('E', 'a-b'), ('O', ''), ('I', ''))
    """
    mark, _, kind = tag.partition("-")
    return IOBES_MARKS.get(mark, mark), kind


def to_iob2(tags: Sequence[str], *, strict: bool = False) -> tuple[str, ...]:
    """Convert the tags of a sentence from any scheme to IOB2.

    As in conlleval, a tag I-x that does not continue an entity of type x begins one.

    Args:
        tags: tags of one sentence.
        strict: whether I-x begins an entity only directly after another entity of type x. Other stray I-x are then
            returned unchanged.

    >>> tags = ["I-PER", "B-PER", "O", "S-LOC", "B-LOC", "E-LOC", "I-LOC"]
    >>> to_iob2(tags)
    ('B-PER', 'B-PER', 'O', 'B-LOC', 'B-LOC', 'I-LOC', 'B-LOC')
    >>> to_iob2(tags, strict=True)
    ('I-PER', 'B-PER', 'O', 'B-LOC', 'B-LOC', 'I-LOC', 'B-LOC')
    """
    converted: list[str] = []
    open_type: str | None = None  # type of the entity that the next tag may continue
    ended_type: str | None = None  # type of the entity that ended with the last tag
    for tag in tags:
        mark, kind = parse_tag(tag)
        if mark not in ("B", "I", "E", "S"):
            converted.append(tag)
            open_type = ended_type = None
            continue
        begins = mark in "BS" or (kind == ended_type if strict else kind != open_type)
        converted.append(("B" if begins else "I") + tag[1:])
        open_type, ended_type = (kind, None) if mark in "BI" else (None, kind)
    return tuple(converted)


def to_scheme(tags: Sequence[str], labels: Collection[str]) -> tuple[str, ...]:
    """Convert tags from IOB2 to the scheme of a set of labels. A tag without an equivalent label stays unchanged.

    >>> to_scheme(["B-LOC", "B-PER", "I-PER"], ["O", "S-LOC", "B-LOC", "B-PER", "E-PER"])
    ('S-LOC', 'B-PER', 'E-PER')
    >>> to_scheme(["B-LOC", "O", "B-PER"], ["O", "I-LOC", "B-PER", "I-PER"])
    ('I-LOC', 'O', 'B-PER')
    """
    converted: list[str] = []
    for tag, next_tag in zip(tags, [*tags[1:], OUTSIDE], strict=False):
        entity_ends = next_tag != "I" + tag[1:]
        candidates = (mark + tag[1:] for mark in EQUIVALENT_MARKS.get((tag[:1], entity_ends), ""))
        converted.append(next((candidate for candidate in candidates if candidate in labels), tag))
    return tuple(converted)


def unknown_labels(labels: Sequence[str], known: Collection[str], *, tags: bool) -> list[str]:
    """Return the labels that a model cannot predict.

    Args:
        labels: labels of the data.
        known: labels of the model.
        tags: whether labels are tags, which are then compared across schemes.
    """
    return [label for label in labels if (to_scheme([label], known)[0] if tags else label) not in known]
