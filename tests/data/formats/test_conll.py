"""CoNLL files (a word and its tag on each line): tag schemes are detected and converted to IOB2, bad lines reported."""

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
SAME_TAGS_BY_SCHEME = {
    "IOB2": IOB2,
    "IOB1": ["I-PER", "I-PER", "O", "I-PER", "B-PER", "I-PER", "I-LOC", "O", "I-LOC"],
    "IOBES": ["B-PER", "E-PER", "O", "S-PER", "B-PER", "E-PER", "S-LOC", "O", "S-LOC"],
    "BILOU": ["B-PER", "L-PER", "O", "U-PER", "B-PER", "L-PER", "U-LOC", "O", "U-LOC"],
}


def tagged_example(*tags: str) -> TaggedExample:
    return TaggedExample(words=tuple("x" for _ in tags), tags=tags, file="a.conll", line=1)


@pytest.mark.parametrize("name", SAME_TAGS_BY_SCHEME)
def test_schemes(tmp_path: Path, name: str) -> None:
    lines = [f"word{index} NN {tag}" for index, tag in enumerate(SAME_TAGS_BY_SCHEME[name])]
    (tmp_path / "train.txt").write_text(
        "-DOCSTART- -X- O\n\n" + "\r\n".join(lines) + "\n\n\n-DOCSTART- -X- O\n\nend NN O"
    )
    dataset = read(tmp_path / "train.txt", settings=DataSettings(dev_fraction=0.0))
    read_examples = list(dataset.examples("train"))
    assert [(example.line, example.words[0], example.tags) for example in read_examples] == [
        (3, "word0", tuple(IOB2)),
        (16, "end", ("O",)),
    ]
    assert f"tags are {name}" + ("" if name == "IOB2" else ", read as IOB2") in dataset.stated
    assert dataset.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


def spans(tags: list[str], end_marks: str, begin_marks: str) -> set[tuple[int, int, str]]:
    """The entities of well-formed tags, as (start, stop, type), found independently of the code under test.

    An entity ends before a tag that is O, begins with one of `begin_marks` or has another type, and after a tag that
    begins with one of `end_marks`.
    """
    entities, start = set(), None
    for index, tag in enumerate([*tags, "O"]):
        previous = tags[index - 1] if index else "O"
        ends_here = tag == "O" or tag[0] in begin_marks or tag[2:] != previous[2:] or previous[0] in end_marks
        if start is not None and ends_here:
            entities.add((start, index, previous[2:]))
            start = None
        if tag != "O" and start is None:
            start = index
    return entities


@hypothesis.given(strategies.lists(strategies.tuples(strategies.sampled_from("OXY"), strategies.integers(1, 3))))
def test_every_scheme_keeps_the_entities(parts: list[tuple[str, int]]) -> None:
    iob1, iob2, iobes, bilou, previous_kind = [], [], [], [], ""
    bmes: list[str] = []
    for kind, length in parts:
        if kind == "O":
            for tags in (iob1, iob2, iobes, bilou, bmes):
                tags += ["O"] * length
        else:
            iob1 += [("B-" if previous_kind == kind else "I-") + kind, *["I-" + kind] * (length - 1)]
            iob2 += ["B-" + kind, *["I-" + kind] * (length - 1)]
            inner = ["I-" + kind] * (length - 2)
            iobes += ["S-" + kind] if length == 1 else ["B-" + kind, *inner, "E-" + kind]
            bilou += ["U-" + kind] if length == 1 else ["B-" + kind, *inner, "L-" + kind]
            bmes += [tag.replace("I-", "M-") for tag in iobes[len(bmes) :]]
        previous_kind = kind
    assert {to_iob2(tags) for tags in (iob1, iob2, iobes, bilou, bmes)} == {tuple(iob2)}
    for marks, tags in (("BI", iob2), ("BIES", iobes), ("BILU", bilou), ("BMES", bmes)):
        labels = ["O", *(f"{mark}-{kind}" for mark in marks for kind in "XY")]
        assert to_scheme(iob2, labels) == tuple(tags)
        assert unknown_labels(["O", "B-X", "I-X", "B-Z"], labels, tags=True) == ["B-Z"]
    inside = [tag.replace("B-", "I-") for tag in iob2]
    assert to_scheme(iob2, ["O", "I-X", "I-Y"]) == tuple(inside)
    assert unknown_labels(["B-X"], ["I-X"], tags=False) == ["B-X"]
    expected = spans(iob2, end_marks="", begin_marks="B")
    assert spans(iobes, end_marks="ES", begin_marks="BS") == expected
    assert spans(iob1, end_marks="", begin_marks="B") == expected


def test_detect_scheme() -> None:
    assert detect_scheme([tagged_example("NN", "VB", "O")]).note == "tags are plain labels: 3 of them"
    assert detect_scheme([tagged_example("PER", "O")]).labels == ("O", "PER")
    assert detect_scheme([tagged_example("I-X", "O")]).note == "tags are IO or IOB1, read as IOB2"
    detected = detect_scheme([tagged_example("B-X", "O", "I-X"), tagged_example("B-X", "I-Y")])
    assert detected.note == "tags are IOB2; 2 entities do not begin as they should and are read as in conlleval"
    assert detect_scheme([tagged_example("B-X", "M-X", "E-X")]).name == "IOBES"
    with pytest.raises(
        HeedfulError, match=r'a\.conll:1: the tag "PER" is neither O nor of a form like B-x, but others'
    ):
        detect_scheme([tagged_example("B-PER", "PER")])
    with pytest.raises(HeedfulError, match="tags with the marks L, S: neither IOBES nor BILOU"):
        detect_scheme([tagged_example("S-X", "L-X")])
    with pytest.raises(HeedfulError, match="more than 10,000 different tags: is this the column of tags"):
        detect_scheme(tagged_example(f"word{n}") for n in range(10_001))


def test_a_bad_line_makes_its_sentence_a_bad_row(tmp_path: Path) -> None:
    good = "a B-X\nb O\n\n"
    missing_tag = "a B-X\nb\nc d e\n\n"
    bad_byte = "a B-X\nb \xff O\n\n"
    nul_character = "a B-X\n\0 O\n\n"
    missing_word = "a\tB-X\n\tO\n"
    data = good + missing_tag + good + bad_byte + nul_character + good + missing_word
    path = tmp_path / "a.conll"
    path.write_bytes(data.encode("latin-1"))
    dataset = read(path, settings=DataSettings(dev_fraction=0.0), on_bad_row=Skip())
    assert [example.line for example in dataset.examples("train")] == [1, 8, 17]
    assert [str(bad_row).removeprefix(f"{path}:")[:40] for bad_row in dataset.row_errors.first] == [
        "5: has one column, expected a word and i",
        "12:3: byte 0xff is not valid utf-8: inva",
        "15:1: holds a NUL character: the file is",
        "21: has one column, expected a word and ",
    ]
    with pytest.raises(HeedfulError, match=r"a\.conll:5: has one column, expected a word and its tag \(correct it"):
        list(read(path).examples("train"))


@pytest.mark.parametrize("first", [b"\xff a O", b"Title", b"a \0 O"])
def test_the_scheme_is_detected_without_a_bad_first_line(tmp_path: Path, first: bytes) -> None:
    (tmp_path / "a.conll").write_bytes(first + b"\n\na x B-X\nb y O\n\nc z O\n")
    dataset = read(tmp_path / "a.conll", settings=DataSettings(dev_fraction=0.0), on_bad_row=Skip())
    assert [example.words for example in dataset.examples("train")] == [("a", "b"), ("c",)]


@pytest.mark.parametrize("kind", [None, TaggedExample])
@pytest.mark.parametrize("suffix", ["tsv", "conll", "txt"])
@pytest.mark.parametrize("header", ["word\tpos", "Token\tLabel", "words\ttags", "-DOCSTART-\t-X-\n\nFORM\tUPOS"])
@pytest.mark.parametrize("tags", ["DT NN", "O B-X"])
def test_a_header_line_is_skipped(
    tmp_path: Path, kind: type[TaggedExample] | None, suffix: str, header: str, tags: str
) -> None:
    path, (tag_of_the, tag_of_dog) = tmp_path / f"a.{suffix}", tags.split()
    path.write_text(f"{header}\nThe\t{tag_of_the}\ndog\t{tag_of_dog}\n\nA\t{tag_of_the}\n")
    dataset = read(path, kind, DataSettings(dev_fraction=0.0))
    assert [example.words for example in dataset.examples("train")] == [("The", "dog"), ("A",)]  # type: ignore[attr-defined]
    assert f"{path.name}: its first line names the columns, unless header=false is set" in dataset.stated
    if tags == "DT NN":
        without_header = dataset_for_task(TaggedExample, path, DataSettings(dev_fraction=0.0, header=False), Skip())
        assert next(without_header.examples("train")).words == (header.split()[-2], "The", "dog")


@pytest.mark.parametrize(
    "text",
    [
        "word\tpos\nThe\tneg\ndog\tpos\n",  # "pos" means positive
        "Word\tNN\nThe\tDT\n\ndog\tNN\n",
        "The\tpos\nword\tneg\n",
        "token\ttag\n",  # a header and nothing else would be an empty file
    ],
)
def test_a_first_sentence_is_not_taken_for_a_header_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.tsv").write_text(text)
    dataset = read(tmp_path / "a.tsv", TaggedExample, DataSettings(dev_fraction=0.0))
    assert next(dataset.examples("train")).words[0] == text.split("\t")[0]
    with_header = read(tmp_path / "a.tsv", TaggedExample, DataSettings(dev_fraction=0.0, header=True))
    words = [word for example in with_header.examples("train") for word in example.words]
    assert text.split("\t")[0] not in words


def test_a_table_with_a_sentence_in_each_row_is_not_conll(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("words\ttags\n\nThe dog\tDT NN\n\nhi\tUH\n")
    dataset = read(tmp_path / "a.tsv", TaggedExample, DataSettings(dev_fraction=0.0))
    assert [example.words for example in dataset.examples("train")] == [("The", "dog"), ("hi",)]


def test_white_space_inside_words(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text("5\u00a0000 B-X\nthe end\u2009x\tO\n")
    dataset = read(tmp_path / "a.conll", settings=DataSettings(dev_fraction=0.0))
    assert next(dataset.examples("train")).words == ("5\u00a0000", "the end\u2009x")
    (tmp_path / "b.conll").write_text("New York\tB-X\nis\tO\n")
    dataset = read(tmp_path / "b.conll", settings=DataSettings(dev_fraction=0.0))
    assert next(dataset.examples("train")).words == ("New York", "is")


def test_no_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text("word B-X\n" * 200)
    dataset = read(tmp_path / "a.conll", settings=DataSettings(max_row_bytes=2000), on_bad_row=Skip())
    assert not list(dataset.examples("train"))
    assert "a sentence of more than 200 characters: is a blank line missing" in dataset.row_errors.first[0].reason


def test_an_entity_type_that_train_lacks(tmp_path: Path) -> None:
    (tmp_path / "train.conll").write_text("a B-X\nb O\n")
    (tmp_path / "dev.conll").write_text("a I-X\nb O\n\nc B-Y\n")
    with pytest.raises(
        HeedfulError, match=r'dev\.conll:4: the label "B-Y" is not in train, which has "O", "B-X", "I-X"'
    ):
        list(read(tmp_path).examples("dev"))
