"""The scripts of a page answer as the engine does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import heedful
from heedful.checkpoint import ModelBundle
from heedful.checkpoint.new_head import with_head
from heedful.errors import HeedfulError
from heedful.infer.bundle_engine import BundleEngine
from heedful.page.serialize import serialize_model
from tests.support.classic_models import READERS, make_classic
from tests.support.model_folders import LIMIT, long_text, make_model_dir
from tests.support.page_scripts import page_answers
from tests.support.page_tokenizers import random_texts, trained
from tests.support.tiny_models import save_tiny

UNTRAINED = ("dot products", "cosines")  # names of readers
LONG = long_text(2 * LIMIT)  # several windows
TEXTS = [
    "the cat sat on the mat",
    "Ada lives in Paris, and (she) wrote it!",
    "",
    " \u3000 ",
    "naïve 北京 \u200b 👍🏽 x",
    LONG,
]
PAIRS = [("a cat", "the dog"), ("", "a"), ("who?", LONG), (LONG, "a dog"), (LONG, long_text(70))]


def field_values(engine_input: Any) -> dict[str, Any]:
    """Return an input of the engine as the fields of the form hold it."""
    match engine_input:
        case str():
            return {"text": engine_input}
        case (text, second):
            return {"text": text, "second": second}
    return dict(engine_input)


INPUTS: dict[str, list[Any]] = {
    "single": [*TEXTS, *PAIRS],
    "multiple": [*TEXTS, *PAIRS],
    "regression": [*TEXTS, *PAIRS],
    "tag": TEXTS,
    "span": [{"question": "who wrote it?", "context": text} for text in TEXTS] + [{"question": LONG, "context": LONG}],
    "choice": [{"prompt": text, "choices": ["sat", "ran to the mat", long_text(30)]} for text in TEXTS],
    "masked": ["the [MASK] on [MASK]", "a cat", f"{LONG} [MASK] {LONG}"],
}


def assert_close(got: Any, expected: Any, tolerance: float) -> None:
    """Compare nested answers; numbers within the tolerance, of 1 or of their size."""
    if isinstance(expected, dict):
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(got[key], value, tolerance)
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for value, other in zip(got, expected, strict=True):
            assert_close(value, other, tolerance)
    elif isinstance(expected, float):
        assert got == pytest.approx(expected, rel=tolerance, abs=tolerance)
    else:
        assert got == expected


@pytest.mark.parametrize("name", INPUTS)
def test_answers_equal_those_of_the_engine(tmp_path: Path, name: str) -> None:
    bundle = heedful.load(make_model_dir(tmp_path / "model", name))
    expected = BundleEngine(bundle)(INPUTS[name])
    assert_close(page_answers(tmp_path, bundle, list(map(field_values, INPUTS[name]))), expected, 1e-5)


@pytest.mark.parametrize(
    ("name", "thresholds"), [("multiple", {"bad": 0.999, "good": 0.0}), ("span", {"no_answer": -9.0})]
)
def test_tuned_thresholds(tmp_path: Path, name: str, thresholds: dict[str, float]) -> None:
    bundle = heedful.load(make_model_dir(tmp_path / "model", name))
    bundle.thresholds = thresholds
    inputs = INPUTS[name][:2]
    expected = BundleEngine(bundle)(inputs)
    assert_close(page_answers(tmp_path, bundle, list(map(field_values, inputs))), expected, 1e-5)
    if name == "span":
        assert expected[0]["answer"] == "" != expected[0]["best_answer"]


@pytest.fixture
def encoder(tmp_path: Path) -> ModelBundle:
    return with_head(heedful.load(make_model_dir(tmp_path / "model", "bare")), "embedding")


def test_similarities(tmp_path: Path, encoder: ModelBundle) -> None:
    """Long texts are cut, as the engine does."""
    engine, (query, *others) = BundleEngine(encoder), ["a cat", "the dog sat", LONG, "a cat"]
    expected = [answer["similarity"] for answer in engine([(query, other) for other in others])]
    (answer,) = page_answers(tmp_path, encoder, [{"text": query, "lines": others}])
    assert answer["similarities"] == pytest.approx(expected, abs=1e-6)


FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {  # architecture, tokenizer, what the config says
    "roberta": ("RobertaForTokenClassification", "bpe", {"max_position_embeddings": LIMIT + 2}),
    "modernbert": ("ModernBertForSequenceClassification", "bpe", {}),
    "mpnet": ("MPNetForQuestionAnswering", "wordpiece", {"max_position_embeddings": LIMIT + 2}),
    "distilbert": ("DistilBertForMaskedLM", "wordpiece", {"max_position_embeddings": LIMIT}),
    "electra": ("ElectraForMultipleChoice", "unigram", {"max_position_embeddings": LIMIT}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_tokenizers_of_other_kinds(tmp_path: Path, family: str) -> None:
    architecture, algorithm, changed = FAMILIES[family]
    tokenizer = trained(algorithm=algorithm, max_length=LIMIT)(tmp_path)
    save_tiny(tmp_path / "model", family, architecture, vocab_size=tokenizer.size, **changed)
    tokenizer.save(tmp_path / "model")
    bundle = heedful.load(tmp_path / "model")
    texts = [text for text in random_texts(40, seed=2) if isinstance(text, str)]
    inputs: list[Any] = texts
    match architecture.partition("For")[2]:
        case "QuestionAnswering":
            inputs = [{"question": "the cat?", "context": text} for text in texts]
        case "MultipleChoice":
            inputs = [{"prompt": text, "choices": ["a cat", "don't", "(naïve)"]} for text in texts]
        case "MaskedLM":
            inputs = [text.replace("a", "[MASK]") for text in texts]
    expected = BundleEngine(bundle)(inputs)
    assert_close(page_answers(tmp_path, bundle, list(map(field_values, inputs))), expected, 1e-4)


CLASSIC_TEXTS = ["the film was not good.", "", "Bad, very bad! and then", "zebra", "good " * 50]


@pytest.mark.parametrize("name", [name for name in READERS if "hierarchical" not in name and name not in UNTRAINED])
def test_classic_models(tmp_path: Path, name: str) -> None:
    bundle = make_classic(name).float()
    expected = BundleEngine(bundle)(CLASSIC_TEXTS)
    assert_close(page_answers(tmp_path, bundle, list(map(field_values, CLASSIC_TEXTS))), expected, 1e-5)


@pytest.mark.parametrize(
    ("name", "message"),
    [("hierarchical", "hierarchical attention"), ("cosines", "self-attention without weights")],
)
def test_classic_models_that_are_refused(name: str, message: str) -> None:
    with pytest.raises(HeedfulError, match=f"has {message}: HTML export supports encoders"):
        serialize_model(make_classic(name))


def test_the_encoder_that_ships(tmp_path: Path) -> None:
    """The five likeliest tokens, in int8: the same where the next one is not as likely."""
    bundle = heedful.load("heedful-mini-en", head="masked_lm")
    texts = ["The ship sailed into the [MASK].", "Rain fell on the [MASK] and the [MASK]."]
    for precision, tolerance in (("float32", 1e-5), ("int8", 0.02)):
        got = page_answers(tmp_path, bundle, [{"text": text} for text in texts], precision)
        for answer, expected in zip(got, BundleEngine(bundle)(texts), strict=True):
            for mask, reference in zip(answer["masks"], expected["masks"], strict=True):
                best = [{one["token"]: one["probability"] for one in side["candidates"]} for side in (mask, reference)]
                for token in best[0].keys() & best[1].keys():
                    assert best[0][token] == pytest.approx(best[1][token], abs=tolerance)
                assert len(best[0].keys() & best[1].keys()) >= (5 if precision == "float32" else 4)
