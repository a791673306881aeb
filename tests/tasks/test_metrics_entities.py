"""Entity scores: equal to those of seqeval, on random tag sequences, most of them not well-formed."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest

from heedful.data.tag_schemes import to_iob2
from heedful.errors import HeedfulError
from heedful.tasks.metrics import EntityScores, entity_counts, entity_spans

pytest.importorskip("seqeval", reason="the oracle of entity scores is not installed")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from seqeval.metrics import accuracy_score, classification_report
    from seqeval.metrics.sequence_labeling import get_entities
    from seqeval.scheme import IOB2, IOBES
    from seqeval.scheme import Entities as Oracle

MARKS = {"conlleval": "BIES", "strict-iob2": "BI", "strict-iobes": "BIES"}
SCHEMES = {"strict-iob2": IOB2, "strict-iobes": IOBES}


def sentences(seed: int, marks: str, count: int, max_length: int = 9) -> list[list[str]]:
    """Random tags of these marks for `count` sentences."""
    rng = random.Random(seed)
    tags = ["O", *(f"{mark}-{kind}" for mark in marks for kind in ("PER", "LOC", "a-b"))]
    return [rng.choices(tags, k=rng.randint(1, max_length)) for _ in range(count)]


def with_errors(gold: list[list[str]], seed: int, marks: str) -> list[list[str]]:
    """The gold tags with a fifth of them replaced at random."""
    rng = random.Random(seed)
    tags = ["O", *(f"{mark}-{kind}" for mark in marks for kind in ("PER", "LOC", "a-b"))]
    return [[tag if rng.random() < 0.8 else rng.choice(tags) for tag in sentence] for sentence in gold]


@pytest.mark.parametrize("scheme", MARKS)
def test_spans(scheme: Any) -> None:
    for sentence in sentences(1, MARKS[scheme], 4000):
        spans = [(kind, start, stop - 1) for kind, start, stop in entity_spans(sentence, scheme)]
        if scheme == "conlleval":
            expected = get_entities(sentence)
        else:
            (entities,) = Oracle([sentence], SCHEMES[scheme]).entities
            expected = [(entity.tag, entity.start, entity.end - 1) for entity in entities]
        assert spans == expected, sentence


@pytest.mark.parametrize("scheme", MARKS)
@pytest.mark.parametrize("seed", range(3))
def test_scores(scheme: Any, seed: int) -> None:
    gold = sentences(seed, MARKS[scheme], 1000)
    predicted = with_errors(gold, seed + 100, MARKS[scheme])
    metrics = EntityScores(scheme=scheme).update(predicted, gold).compute()
    options = {"mode": "strict", "scheme": SCHEMES[scheme]} if scheme in SCHEMES else {}
    expected = classification_report(gold, predicted, output_dict=True, zero_division=0, **options)
    for name, scores in [("micro avg", metrics), *metrics["types"].items()]:
        assert scores["precision"] == pytest.approx(expected[name]["precision"], abs=1e-12), name
        assert scores["recall"] == pytest.approx(expected[name]["recall"], abs=1e-12), name
        assert scores["f1"] == pytest.approx(expected[name]["f1-score"], abs=1e-12), name
        assert scores["gold"] == expected[name]["support"], name
    assert set(metrics["types"]) == {name for name in expected if not name.endswith(" avg")}
    assert metrics["token_accuracy"] == pytest.approx(accuracy_score(gold, predicted))
    assert metrics["scheme"] == scheme and metrics["count"] == 1000
    sums = entity_counts(predicted, gold, scheme).sum(0).tolist()
    assert sums == [metrics["correct"], metrics["gold"], metrics["predicted"]]


def test_lenient_and_strict_differ() -> None:
    gold, predicted = [["B-PER", "I-PER"]], [["I-PER", "I-PER"]]
    lenient = EntityScores(scheme="conlleval").update(predicted, gold).compute()
    strict = EntityScores(scheme="strict-iob2").update(predicted, gold).compute()
    assert (lenient["f1"], strict["f1"]) == (1.0, 0.0)
    assert lenient["token_accuracy"] == strict["token_accuracy"] == 0.5


def test_iobes_and_bilou_have_the_entities_of_iob2() -> None:
    iobes = ["S-PER", "O", "B-LOC", "I-LOC", "E-LOC", "B-LOC", "E-LOC"]
    bilou = ["U-PER", "O", "B-LOC", "I-LOC", "L-LOC", "B-LOC", "L-LOC"]
    iob2 = ["B-PER", "O", "B-LOC", "I-LOC", "I-LOC", "B-LOC", "I-LOC"]
    assert {to_iob2(tags, strict=True) for tags in (iobes, bilou, iob2)} == {tuple(iob2)}
    expected = entity_spans(iob2, "strict-iob2")
    assert len(expected) == 3
    assert entity_spans(iobes, "strict-iobes") == entity_spans(bilou, "strict-iobes") == expected
    for tags in (iobes, bilou, iob2):
        assert entity_spans(tags, "conlleval") == expected


def test_to_iob2_preserves_entities() -> None:
    for sentence in sentences(2, "BIES", 4000):
        for strict in (False, True):
            converted = to_iob2(sentence, strict=strict)
            assert {tag[0] for tag in converted} <= set("BIO")
            assert entity_spans(converted, "conlleval") == entity_spans(sentence, "conlleval"), sentence
        assert entity_spans(to_iob2(sentence), "strict-iob2") == entity_spans(sentence, "conlleval")
    for sentence in sentences(3, "BI", 200):
        assert to_iob2(sentence, strict=True) == tuple(sentence)
    odd = ["B-a", "M-a", "E-a", "S", "I", "X-a", ""]
    assert to_iob2(odd, strict=True) == ("B-a", "I-a", "I-a", "B", "B", "X-a", "")


def test_degenerate_sentences() -> None:
    outside = EntityScores(scheme="conlleval").update([["O", "O"], []], [["O", "O"], []]).compute()
    assert (outside["f1"], outside["token_accuracy"], outside["types"]) == (0.0, 1.0, {})
    assert outside["notes"] == ["no gold sentence has an entity: recall and F1 are 0 by convention"]
    assert EntityScores(scheme="conlleval").update([[]], [[]]).compute()["token_accuracy"] == 0.0
    assert entity_spans(["B", "I", "O"], "strict-iob2") == [("", 0, 2)]  # tags without the name of a type
    assert entity_counts([], [], "conlleval").shape == (0, 3)


@pytest.mark.parametrize(
    ("predicted", "gold", "message"),
    [
        ([["O"]], [["O", "O"]], 'example "s1" has 1 predicted tags for 2 words: every word needs a tag, also where a'),
        ([["X-PER"]], [["O"]], 'example "s1": "X-PER" is not a tag of strict-iob2, which has B-type, I-type and O'),
        (
            [["E-PER"]],
            [["O"]],
            'score with "strict-iobes", or turn both sides into IOB2 with heedful.data.tag_schemes.to_iob2',
        ),
        ([["O"]], [], "there are 1 predicted sentences for 0 gold sentences"),
    ],
)
def test_what_is_refused(predicted: Any, gold: Any, message: str) -> None:
    with pytest.raises(HeedfulError, match=message):
        EntityScores(scheme="strict-iob2").update(predicted, gold, ids=["s1"])


def test_an_unknown_scheme() -> None:
    metric = EntityScores(scheme="conlleval")
    object.__setattr__(
        metric, "scheme", "strict"
    )  # set afterwards, since the type checker of the tests rejects it in the constructor
    with pytest.raises(HeedfulError, match='should be one of conlleval, strict-iob2, strict-iobes, got "strict"'):
        metric.__post_init__()
