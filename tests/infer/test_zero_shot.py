"""Zero-shot classification: compared with transformers' logits of text pairs, and with sentence vectors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import heedful
from heedful.errors import HeedfulError
from heedful.infer.engine import Engine
from heedful.infer.zero_shot import CandidateLabels, can_classify_zero_shot, zero_shot_engine
from tests.support.model_folders import long_text, make_model_dir, reference_logits

TEXTS = ["the cat sat on the mat .", "she lives in paris", ""]
LABELS = ["cat", "capital", "program"]
NLI = {"0": "contradiction", "1": "neutral", "2": "entailment"}


@pytest.fixture(scope="module")
def nli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose labels are those of natural-language inference."""
    folder = make_model_dir(tmp_path_factory.mktemp("nli"), "single")
    config = json.loads((folder / "config.json").read_text())
    config |= {"id2label": NLI, "label2id": {name: int(number) for number, name in NLI.items()}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def label_logits(folder: Path, text: str, template: str) -> torch.Tensor:
    """Return transformers' logits of pairs of a text and each label, [labels, classes]."""
    return torch.stack([reference_logits(folder, text, template.format(label)).logits[0] for label in LABELS])


@pytest.mark.parametrize("template", [None, "it is {} ."])
def test_entailment_probabilities_equal_those_of_transformers(nli: Path, template: str | None) -> None:
    answers = heedful.predict(nli, TEXTS, heedful.Classification, candidate_labels=LABELS, template=template)
    for text, answer in zip(TEXTS, answers, strict=True):
        expected = label_logits(nli, text, template or "This example is {}.")[:, 2].softmax(0)
        assert list(answer.probabilities.values()) == pytest.approx(expected.tolist(), abs=1e-6)
        assert answer.label == LABELS[int(expected.argmax())] and list(answer.probabilities) == LABELS
    multi_label_answers = heedful.predict(
        nli, TEXTS, heedful.MultiLabelClassification, candidate_labels=LABELS, template=template, multi_label=True
    )
    for text, answer in zip(TEXTS, multi_label_answers, strict=True):
        expected = label_logits(nli, text, template or "This example is {}.")[:, [0, 2]].softmax(1)[:, 1]
        assert list(answer.probabilities.values()) == pytest.approx(expected.tolist(), abs=1e-6)
        assert list(answer.labels) == [label for label, p in zip(LABELS, expected, strict=True) if p >= 0.5]


def test_cross_encoder_probabilities_equal_those_of_transformers(tmp_path: Path) -> None:
    folder = make_model_dir(tmp_path, "regression")
    (answer,) = heedful.predict(folder, TEXTS[:1], heedful.Classification, candidate_labels=LABELS, template="{}")
    expected = label_logits(folder, TEXTS[0], "{}")[:, 0].softmax(0)
    assert list(answer.probabilities.values()) == pytest.approx(expected.tolist(), abs=1e-6)


def test_an_embedding_model_compares_vectors_of_descriptions() -> None:
    engine = Engine("heedful-mini-en")
    descriptions = {"pet": "a cat or a dog", "place": "a town in France"}
    answers = heedful.predict(engine, TEXTS, heedful.Classification, candidate_labels=descriptions)
    assert [answer.label for answer in answers[:2]] == ["pet", "place"]
    vectors = engine.encode([*descriptions.values(), TEXTS[0]]).astype(np.float64)
    unit_vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = unit_vectors[:2] @ unit_vectors[2]
    expected = np.exp(20 * cosines) / np.exp(20 * cosines).sum()
    np.testing.assert_allclose(list(answers[0].probabilities.values()), expected, atol=1e-5)
    (answer,) = heedful.predict(
        engine, TEXTS[:1], heedful.MultiLabelClassification, candidate_labels=descriptions, multi_label=True
    )
    np.testing.assert_allclose(list(answer.probabilities.values()), cosines.clip(0, 1), atol=1e-5)
    assert isinstance(engine.predict(TEXTS[:1])[0], heedful.Embedding), "the original engine is unchanged"


def test_answers_do_not_depend_on_windows_or_batches(nli: Path) -> None:
    engine = zero_shot_engine(Engine(nli), CandidateLabels.of(LABELS))
    texts = [*TEXTS, long_text(120)]
    batched, single = engine(texts), [answer for text in texts for answer in engine([text])]
    assert batched[-1]["windows"] > 1 and batched[0]["windows"] == 1
    for answer, expected in zip(batched, single, strict=True):
        assert list(answer["probabilities"].values()) == pytest.approx(
            list(expected["probabilities"].values()), abs=1e-6
        )


def test_an_unsure_model_abstains(nli: Path) -> None:
    answers = heedful.predict(nli, TEXTS, heedful.Classification, candidate_labels=LABELS, min_confidence=1.0)
    assert [answer.label for answer in answers] == ["", "", ""]
    with pytest.raises(HeedfulError, match="min_confidence is 5; expected a probability"):
        heedful.predict(nli, TEXTS, candidate_labels=LABELS, min_confidence=5)
    with pytest.raises(HeedfulError, match="min_confidence and multi_label exclude each other"):
        heedful.predict(nli, TEXTS, candidate_labels=LABELS, min_confidence=0.9, multi_label=True)


def test_a_model_of_single_texts_is_rejected(tmp_path: Path) -> None:
    """A regression of single texts has one score, like a cross-encoder, but it would score the labels at random."""
    folder = make_model_dir(tmp_path, "regression")
    engine = Engine(folder)
    assert can_classify_zero_shot(engine.loaded.config.head, engine.loaded.pairs), "it may be a cross-encoder"
    engine.loaded.pairs = False
    assert not can_classify_zero_shot(engine.loaded.config.head, engine.loaded.pairs)
    with pytest.raises(HeedfulError, match="was trained on single texts"):
        heedful.predict(engine, TEXTS, candidate_labels=LABELS)


def test_invalid_labels_templates_and_models_are_rejected(nli: Path, tmp_path: Path) -> None:
    for labels, message in (
        (["cat"], "has 1 label; expected 2 or more"),
        ([], "has 0 labels; expected 2 or more"),
        (["cat", "cat"], "different labels"),
        (["cat", " "], "not empty"),
    ):
        with pytest.raises(HeedfulError, match=message):
            CandidateLabels.of(labels)
    with pytest.raises(HeedfulError, match="has 0 labels; expected 1 or more"):
        CandidateLabels.of([], multi_label=True)
    with pytest.raises(HeedfulError, match="the description of the candidate label 'cat' is empty"):
        CandidateLabels.of({"cat": " ", "dog": "a dog"})
    with pytest.raises(HeedfulError, match=r"with \{\} once"):
        CandidateLabels.of(LABELS, "it is so")
    with pytest.raises(HeedfulError, match=r"has the labels bad, fair, good; expected a label entailment"):
        heedful.predict(make_model_dir(tmp_path, "single"), TEXTS, candidate_labels=LABELS)
    with pytest.raises(HeedfulError, match="prediction_set is for the labels that a model was trained on"):
        heedful.predict(nli, TEXTS, candidate_labels=LABELS, prediction_set=0.9)
    with pytest.raises(HeedfulError, match="without candidate_labels"):
        heedful.predict(nli, TEXTS, template="it is {}")
