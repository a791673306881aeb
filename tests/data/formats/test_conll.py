"""Words in columns: schemes found and read as IOB2, bad lines, borders of documents."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies

from heedful.data import DataSettings, Skip, TaggedExample, dataset_for_task, read
from heedful.data.formats.conll import detect_scheme
from heedful.data.tag_schemes import to_iob2, to_scheme, unknown_labels
from heedful.errors import HeedfulError

IOB2 = ["B-PER", "I-PER", "O", "B-PER", "B-PER", "I-PER", "B-LOC", "O", "B-LOC"]
WRITTEN = {
    "IOB2": IOB2,
    "IOB1": ["I-PER", "I-PER", "O", "I-PER", "B-PER", "I-PER", "I-LOC", "O", "I-LOC"],
    "IOBES": ["B-PER", "E-PER", "O", "S-PER", "B-PER", "E-PER", "S-LOC", "O", "S-LOC"],
    "BILOU": ["B-PER", "L-PER", "O", "U-PER", "B-PER", "L-PER", "U-LOC", "O", "U-LOC"],
}


def tagged(*tags: str) -> TaggedExample:
    return TaggedExample(words=tuple("x" for _ in tags), tags=tags, file="a.conll", line=1)


@pytest.mark.parametrize("name", WRITTEN)
def test_schemes(tmp_path: Path, name: str) -> None:
    lines = [f"word{n} NN {tag}" for n, tag in enumerate(WRITTEN[name])]
    (tmp_path / "train.txt").write_text(
        "-DOCSTART- -X- O\n\n" + "\r\n".join(lines) + "\n\n\n-DOCSTART- -X- O\n\nend NN O"
    )
    source = read(tmp_path / "train.txt", settings=DataSettings(dev_fraction=0.0))
    read_examples = list(source.examples("train"))
    assert [(each.line, each.words[0], each.tags) for each in read_examples] == [
        (3, "word0", tuple(IOB2)),
        (16, "end", ("O",)),
    ]
    assert f"tags are {name}" + ("" if name == "IOB2" else ", read as IOB2") in source.stated
    assert source.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


def spans(tags: list[str], ends: str, begins: str) -> set[tuple[int, int, str]]:
    """Entities by a plain reading of well-formed tags: one begins with B, S or U (IOB1: also with a change of type)."""
    entities, start = set(), None
    for place, tag in enumerate([*tags, "O"]):
        before = tags[place - 1] if place else "O"
        breaks = tag == "O" or tag[0] in begins or tag[2:] != before[2:] or before[0] in ends
        if start is not None and breaks:
            entities.add((start, place, before[2:]))
            start = None
        if tag != "O" and start is None:
            start = place
    return entities


@hypothesis.given(strategies.lists(strategies.tuples(strategies.sampled_from("OXY"), strategies.integers(1, 3))))
def test_every_scheme_keeps_the_entities(parts: list[tuple[str, int]]) -> None:
    one, two, many, bilou, before = [], [], [], [], ""
    bmes: list[str] = []
    for kind, length in parts:
        if kind == "O":
            for tags in (one, two, many, bilou, bmes):
                tags += ["O"] * length
        else:
            one += [("B-" if before == kind else "I-") + kind, *["I-" + kind] * (length - 1)]
            two += ["B-" + kind, *["I-" + kind] * (length - 1)]
            inner = ["I-" + kind] * (length - 2)
            many += ["S-" + kind] if length == 1 else ["B-" + kind, *inner, "E-" + kind]
            bilou += ["U-" + kind] if length == 1 else ["B-" + kind, *inner, "L-" + kind]
            bmes += [tag.replace("I-", "M-") for tag in many[len(bmes) :]]
        before = kind
    assert {to_iob2(tags) for tags in (one, two, many, bilou, bmes)} == {tuple(two)}
    for marks, tags in (("BI", two), ("BIES", many), ("BILU", bilou), ("BMES", bmes)):
        labels = ["O", *(f"{mark}-{kind}" for mark in marks for kind in "XY")]
        assert to_scheme(two, labels) == tuple(tags)
        assert unknown_labels(["O", "B-X", "I-X", "B-Z"], labels, tags=True) == ["B-Z"]
    inside = [tag.replace("B-", "I-") for tag in two]
    assert to_scheme(two, ["O", "I-X", "I-Y"]) == tuple(inside)
    assert unknown_labels(["B-X"], ["I-X"], tags=False) == ["B-X"]
    assert spans(two, "", "B") == spans(many, "ES", "BS") == spans(one, "", "B")


def test_what_tags_say() -> None:
    assert detect_scheme([tagged("NN", "VB", "O")]).note == "tags are plain labels: 3 of them"
    assert detect_scheme([tagged("PER", "O")]).labels == ("O", "PER")
    assert detect_scheme([tagged("I-X", "O")]).note == "tags are IO or IOB1, read as IOB2"
    noisy = detect_scheme([tagged("B-X", "O", "I-X"), tagged("B-X", "I-Y")])
    assert noisy.note == "tags are IOB2; 2 entities do not begin as they should and are read as in conlleval"
    assert detect_scheme([tagged("B-X", "M-X", "E-X")]).name == "IOBES"
    with pytest.raises(
        HeedfulError, match=r'a\.conll:1: the tag "PER" is neither O nor of a form like B-x, but others'
    ):
        detect_scheme([tagged("B-PER", "PER")])
    with pytest.raises(HeedfulError, match="tags with the marks L, S: neither IOBES nor BILOU"):
        detect_scheme([tagged("S-X", "L-X")])
    with pytest.raises(HeedfulError, match="more than 10,000 different tags: is this the column of tags"):
        detect_scheme(tagged(f"word{n}") for n in range(10_001))


def test_bad_lines_spoil_their_sentence(tmp_path: Path) -> None:
    good = "a B-X\nb O\n\n"
    data = good + "a B-X\nb\nc d e\n\n" + good + "a B-X\nb \xff O\n\n" + "a B-X\n\0 O\n\n" + good + "a\tB-X\n\tO\n"
    path = tmp_path / "a.conll"
    path.write_bytes(data.encode("latin-1"))
    source = read(path, settings=DataSettings(dev_fraction=0.0), on_bad_row=Skip())
    assert [each.line for each in source.examples("train")] == [1, 8, 17]
    assert [str(bad).removeprefix(f"{path}:")[:40] for bad in source.row_errors.first] == [
        "5: has one column, expected a word and i",
        "12:3: byte 0xff is not valid utf-8: inva",
        "15:1: holds a NUL character: the file is",
        "21: has one column, expected a word and ",
    ]
    with pytest.raises(HeedfulError, match=r"a\.conll:5: has one column, expected a word and its tag \(correct it"):
        list(read(path).examples("train"))


@pytest.mark.parametrize("first", [b"\xff a O", b"Title", b"a \0 O"])
def test_a_bad_first_line_says_nothing_of_the_others(tmp_path: Path, first: bytes) -> None:
    (tmp_path / "a.conll").write_bytes(first + b"\n\na x B-X\nb y O\n\nc z O\n")
    source = read(tmp_path / "a.conll", settings=DataSettings(dev_fraction=0.0), on_bad_row=Skip())
    assert [each.words for each in source.examples("train")] == [("a", "b"), ("c",)]


@pytest.mark.parametrize("kind", [None, TaggedExample])
@pytest.mark.parametrize("suffix", ["tsv", "conll", "txt"])
@pytest.mark.parametrize("header", ["word\tpos", "Token\tLabel", "words\ttags", "-DOCSTART-\t-X-\n\nFORM\tUPOS"])
@pytest.mark.parametrize("tags", ["DT NN", "O B-X"])
def test_a_first_line_that_names_the_columns(
    tmp_path: Path, kind: type[TaggedExample] | None, suffix: str, header: str, tags: str
) -> None:
    path, (one, two) = tmp_path / f"a.{suffix}", tags.split()
    path.write_text(f"{header}\nThe\t{one}\ndog\t{two}\n\nA\t{one}\n")
    source = read(path, kind, DataSettings(dev_fraction=0.0))
    assert [each.words for each in source.examples("train")] == [("The", "dog"), ("A",)]  # type: ignore[attr-defined]
    assert f"{path.name}: its first line names the columns, unless header=false is set" in source.stated
    if tags == "DT NN":
        kept = dataset_for_task(TaggedExample, path, DataSettings(dev_fraction=0.0, header=False), Skip())
        assert next(kept.examples("train")).words == (header.split()[-2], "The", "dog")


@pytest.mark.parametrize(
    "text",
    [
        "word\tpos\nThe\tneg\ndog\tpos\n",  # pos is positive
        "Word\tNN\nThe\tDT\n\ndog\tNN\n",
        "The\tpos\nword\tneg\n",
        "token\ttag\n",  # all there is
    ],
)
def test_a_first_line_that_only_looks_as_if_it_named_columns(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.tsv").write_text(text)
    source = read(tmp_path / "a.tsv", TaggedExample, DataSettings(dev_fraction=0.0))
    assert next(source.examples("train")).words[0] == text.split("\t")[0]
    with_header = read(tmp_path / "a.tsv", TaggedExample, DataSettings(dev_fraction=0.0, header=True))
    assert text.split("\t")[0] not in [word for each in with_header.examples("train") for word in each.words]


def test_a_table_of_sentences_stays_one(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("words\ttags\n\nThe dog\tDT NN\n\nhi\tUH\n")
    source = read(tmp_path / "a.tsv", TaggedExample, DataSettings(dev_fraction=0.0))
    assert [each.words for each in source.examples("train")] == [("The", "dog"), ("hi",)]


def test_white_space_inside_words(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text("5\u00a0000 B-X\nthe end\u2009x\tO\n")
    source = read(tmp_path / "a.conll", settings=DataSettings(dev_fraction=0.0))
    assert next(source.examples("train")).words == ("5\u00a0000", "the end\u2009x")
    (tmp_path / "b.conll").write_text("New York\tB-X\nis\tO\n")
    assert next(read(tmp_path / "b.conll", settings=DataSettings(dev_fraction=0.0)).examples("train")).words == (
        "New York",
        "is",
    )


def test_no_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text("word B-X\n" * 200)
    source = read(tmp_path / "a.conll", settings=DataSettings(max_row_bytes=2000), on_bad_row=Skip())
    assert not list(source.examples("train"))
    assert "a sentence of more than 200 characters: is a blank line missing" in source.row_errors.first[0].reason


def test_a_type_that_train_lacks(tmp_path: Path) -> None:
    (tmp_path / "train.conll").write_text("a B-X\nb O\n")
    (tmp_path / "dev.conll").write_text("a I-X\nb O\n\nc B-Y\n")
    with pytest.raises(
        HeedfulError, match=r'dev\.conll:4: the label "B-Y" is not in train, which has "O", "B-X", "I-X"'
    ):
        list(read(tmp_path).examples("dev"))
