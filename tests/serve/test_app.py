"""Every route, compared with the answers of the engine and with the types in /openapi.json."""

from __future__ import annotations

import base64
import json
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import tokenizers
from tokenizers import processors

from heedful.checkpoint import load, save
from heedful.families.head_maps import SCORE_ACTIVATIONS
from heedful.infer.engine import Engine
from heedful.model.config import Classes
from heedful.model.decode import BeamSearch, Greedy, Sampling
from heedful.search.rerank import rerank_scores
from heedful.serve.attention import attention_response
from heedful.serve.openapi import VIEWS
from heedful.serve.routes import ENDPOINTS, labels_of
from heedful.serve.run import RunningServer, background
from heedful.serve.settings import name_models
from heedful.tasks.generation import GenerationConfig
from heedful.tokenizer import Tokenizer
from tests.support.http_client import Reply, ask
from tests.support.model_folders import long_text, make_decoder, make_model_dir

QUESTION = {"question": "who wrote it ?", "context": "In Paris, Ada wrote the first program ."}
CHOICE = {"prompt": "the cat", "choices": ["sat on the mat", "ran"]}
TWO_TEXTS = ["the cat", "she ran"]
REQUESTS: list[tuple[str, Any]] = [  # paths and bodies, with the name of a model where several could answer
    ("/embed", {"inputs": ["the cat", "", long_text(100)]}),
    ("/embed", {"inputs": "the cat", "normalize": False, "dimensions": 5}),
    ("/v1/embeddings", {"input": ["the cat", "a dog"], "model": "embed"}),
    ("/v1/embeddings", {"input": "the cat", "encoding_format": "base64", "user": "somebody"}),
    ("/similarity", {"inputs": {"source_sentence": "the cat", "sentences": ["the cat", "she ran"]}}),
    ("/rerank", {"query": "a cat", "texts": ["she", "the cat"], "model": "embed", "return_text": True}),
    ("/rerank", {"query": "a cat", "texts": ["she", "the cat"], "model": "regression"}),
    ("/predict", {"inputs": "the cat sat", "model": "single"}),
    ("/predict", {"inputs": [["the cat"], ["a", "b"]], "model": "multiple"}),
    ("/predict", {"inputs": [], "model": "regression"}),
    ("/zero-shot-classification", {"inputs": "a cat", "parameters": {"candidate_labels": ["the cat", "she"]}}),
    (
        "/zero-shot-classification",
        {
            "inputs": ["a cat", long_text(100)],
            "parameters": {"candidate_labels": ["cat"], "multi_label": True, "hypothesis_template": "{} ."},
            "model": "regression",
        },
    ),
    ("/token-classification", {"inputs": "Ada lives in Paris ."}),
    ("/token-classification", {"inputs": ["Ada", ["Ada", "\u200b", "ran"], long_text(200)]}),
    ("/question-answering", {"inputs": QUESTION}),
    ("/question-answering", {"inputs": [QUESTION, {"question": "", "context": ""}]}),
    ("/multiple-choice", {"inputs": [CHOICE]}),
    ("/next-sentence", {"inputs": [["the cat", "ran"]], "model": "pretraining"}),
    ("/fill-mask", {"inputs": ["the [MASK] sat", "no mask"], "top_k": 3}),
    ("/generate", {"inputs": "a b", "max_new_tokens": 4}),
    ("/generate", {"inputs": ["a b", "c"], "max_new_tokens": 4, "num_beams": 2}),
    ("/generate", {"inputs": ["a b", "c"], "max_new_tokens": 4, "temperature": 1.5, "seed": 3}),
    ("/attention", {"inputs": "a b c", "model": "write"}),
    ("/attention", {"inputs": "the cat", "layers": [1], "model": "tag"}),
    ("/attention", {"inputs": ["the cat", "a dog"], "heads": [0, 3], "model": "next"}),
    ("/tokenize", {"inputs": ["the cat", ""], "add_special_tokens": False}),
    ("/tokenize", {"inputs": "the cats"}),
]


@pytest.fixture(scope="module")
def document(served: RunningServer) -> Any:
    """The server's OpenAPI document."""
    return ask(served.port, "/openapi.json").json


def decode(path: str, reply: Reply) -> Any:
    """Decode a response body strictly by the type of the route's responses."""
    answer_type = {endpoint.path: endpoint.answer for endpoint in ENDPOINTS}[path]
    return msgspec.json.decode(reply.body, type=answer_type, strict=True)


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_responses_have_the_documented_types(served: RunningServer, document: Any, path: str, body: Any) -> None:
    reply = ask(served.port, path, body)
    assert reply.status == 200, reply.body
    decode(path, reply)
    assert document["paths"][path]["post"]["responses"]["200"]


@pytest.mark.parametrize(
    ("route", "model", "inputs"),
    [
        ("/token-classification", "tag", ["Ada lives in Paris .", ["Ada", "ran"], long_text(100)]),
        ("/question-answering", "span", [QUESTION]),
        ("/multiple-choice", "choice", [CHOICE]),
        ("/fill-mask", "masked", ["the [MASK] sat"]),
    ],
)
def test_answers_equal_those_of_the_engine(
    served: RunningServer, engines: dict[str, Engine], route: str, model: str, inputs: list[Any]
) -> None:
    assert ask(served.port, route, {"inputs": inputs, "model": model}).json == engines[model](inputs)


def test_probabilities_of_labels_equal_those_of_the_engine(served: RunningServer, engines: dict[str, Engine]) -> None:
    labels = ask(served.port, "/predict", {"inputs": "the cat sat", "model": "single"}).json
    (answer,) = engines["single"](["the cat sat"])
    assert {label["label"]: label["score"] for label in labels} == answer["probabilities"]
    assert labels[0] == {"label": answer["label"], "score": answer["probability"]}


def test_several_labels_are_predicted_as_by_the_engine(served: RunningServer, engines: dict[str, Engine]) -> None:
    labels = ask(served.port, "/predict", {"inputs": "the cat sat", "model": "multiple"}).json
    (answer,) = engines["multiple"](["the cat sat"])
    assert {label["label"] for label in labels if label["predicted"]} == set(answer["labels"])


def test_no_label_is_predicted_below_min_confidence(served: RunningServer) -> None:
    body = {"inputs": "the cat sat", "model": "single"}
    best_score = ask(served.port, "/predict", body).json[0]["score"]
    for min_confidence, predicted in ((best_score, [True, False, False]), (1.0, [False, False, False])):
        labels = ask(served.port, "/predict", body | {"min_confidence": min_confidence}).json
        assert [label["predicted"] for label in labels] == predicted
        assert labels[0]["score"] == best_score
    refused = ask(served.port, "/predict", body | {"model": "multiple", "min_confidence": best_score})
    assert refused.status == 422 and b"models that choose one label" in refused.body


def test_a_prediction_set_has_at_least_one_label(served: RunningServer, engines: dict[str, Engine]) -> None:
    """The server refuses prediction_set for a model without calibration, so `labels_of` is called directly."""
    refused = ask(served.port, "/predict", {"inputs": "the cat sat", "model": "single", "prediction_set": 0.9})
    assert refused.status == 422 and b"no calibration for prediction sets" in refused.body
    (answer,) = engines["single"](["the cat sat"])
    for min_probability, predicted in ((0.0, [True, True, True]), (1.0, [True, False, False])):
        labels = labels_of(answer, min_probability, as_set=True)
        assert [label["predicted"] for label in labels] == predicted


def unit_vectors_of(engine: Engine, texts: list[str]) -> np.ndarray:
    """Return the embeddings of the texts, each divided by its length."""
    embeddings = np.array([answer["vector"] for answer in engine(texts)])
    return embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)


def test_embeddings_equal_those_of_the_engine(served: RunningServer, engines: dict[str, Engine]) -> None:
    texts = ["the cat", "she ran", long_text(100)]
    normalized = ask(served.port, "/embed", {"inputs": texts}).json
    assert np.abs(np.array(normalized) - unit_vectors_of(engines["embed"], texts)).max() < 1e-6
    plain = ask(served.port, "/embed", {"inputs": texts, "normalize": False, "dimensions": 7}).json
    embeddings = np.array([answer["vector"] for answer in engines["embed"](texts)])
    assert np.abs(np.array(plain) - embeddings[:, :7]).max() < 1e-6


def test_base64_embeddings_are_float32_vectors(served: RunningServer, engines: dict[str, Engine]) -> None:
    result = ask(served.port, "/v1/embeddings", {"input": "the cat", "encoding_format": "base64"}).json
    vector = np.frombuffer(base64.b64decode(result["data"][0]["embedding"]), dtype="<f4")
    assert np.abs(vector - unit_vectors_of(engines["embed"], ["the cat"])[0]).max() < 1e-6
    assert result["usage"]["total_tokens"] == 4 and result["model"] == "embed"


def test_similarities_are_cosines_of_embeddings(served: RunningServer, engines: dict[str, Engine]) -> None:
    """They are the answers of /similarity, and the scores of /rerank with an embedding model."""
    texts = ["the cat", "she ran", long_text(100)]
    unit_vectors = unit_vectors_of(engines["embed"], texts)
    cosines = (unit_vectors @ unit_vectors[0]).tolist()
    body = {"inputs": {"source_sentence": texts[0], "sentences": texts}}
    assert ask(served.port, "/similarity", body).json == pytest.approx(cosines, abs=1e-6)
    ranked = ask(served.port, "/rerank", {"query": texts[0], "texts": texts, "model": "embed"}).json
    assert [entry["score"] for entry in ranked] == pytest.approx(sorted(cosines, reverse=True), abs=1e-6)
    assert ranked[0]["index"] == 0


def test_texts_are_ranked_by_a_model_that_scores_pairs(served: RunningServer, engines: dict[str, Engine]) -> None:
    texts = ["the cat", "she ran", "a"]
    logits = [answer["values"]["stars"] for answer in engines["regression"]([("a dog", text) for text in texts])]
    body = {"query": "a dog", "texts": texts, "model": "regression", "return_text": True}
    raw = ask(served.port, "/rerank", body | {"raw_scores": True}).json
    raw_scores = [entry["score"] for entry in raw]
    assert raw_scores == pytest.approx(sorted(logits, reverse=True), abs=1e-6)
    assert [texts[entry["index"]] for entry in raw] == [entry["text"] for entry in raw]
    ranked = ask(served.port, "/rerank", body).json
    sigmoids = [1 / (1 + math.exp(-score)) for score in raw_scores]
    assert [entry["score"] for entry in ranked] == pytest.approx(sigmoids)


def test_a_model_with_three_labels_cannot_rank(served: RunningServer, engines: dict[str, Engine]) -> None:
    body = {"query": "a dog", "texts": ["the cat", "she ran"]}
    assert ask(served.port, "/rerank", body | {"model": "single"}).status == 422
    assert ask(served.port, "/rerank", body).status == 200  # the first model that can rank is selected
    rankers = {name for name in engines if "/rerank" in ask(served.port, f"/info?model={name}").json["routes"]}
    assert rankers == {"regression", "embed"}


def test_scores_of_a_cross_encoder_are_sigmoids_unless_raw(tmp_path: Path) -> None:
    """A model whose scores are sigmoids already refuses raw_scores."""
    texts = ["the cat", "she ran", "a"]
    scores_by_activation = {}
    for activation in SCORE_ACTIVATIONS.values():
        model = load(make_model_dir(tmp_path / activation, "regression"))
        assert isinstance(model.config.head, Classes)
        model.config = replace(model.config, head=replace(model.config.head, score_activation=activation))
        saved_folder = tmp_path / f"{activation}-saved"
        save(model, saved_folder)
        with background({"ranker": str(saved_folder)}) as server:
            body = {"query": "a dog", "texts": texts}
            ranked = ask(server.port, "/rerank", body).json
            raw = ask(server.port, "/rerank", body | {"raw_scores": True})
        scores = {entry["index"]: entry["score"] for entry in ranked}
        scores_by_activation[activation] = [scores[index] for index in range(len(texts))]
        expected = rerank_scores(Engine(saved_folder), "a dog", texts)
        assert scores_by_activation[activation] == pytest.approx(expected, abs=1e-6)
        assert raw.status == (200 if activation == "identity" else 422)
    assert scores_by_activation["identity"] == pytest.approx(scores_by_activation["sigmoid"], abs=1e-6)


# Clients of other servers send fields that heedful does not need: they are accepted where they apply, and refused with
# a reason elsewhere.
TRUNCATION = {"truncate": True, "truncation_direction": "Right"}


def test_fields_of_other_servers_in_classification_requests(served: RunningServer) -> None:
    port, pair = served.port, ["the cat", "she ran"]
    expected = ask(port, "/predict", {"inputs": [pair], "model": "single"}).json
    pair_object = {"inputs": {"text": pair[0], "text_pair": pair[1]}}
    response = ask(port, "/predict", pair_object | {"raw_scores": False, "model": "single"} | TRUNCATION)
    assert [response.json] == expected
    assert len(ask(port, "/predict", {"inputs": ["a", "b", "c"], "model": "single"}).json) == 3
    assert ask(port, "/predict", {"inputs": ["a", ["b"]]}).status == 422
    assert "probabilities" in ask(port, "/predict", {"inputs": "a", "raw_scores": True}).json["error"]


def test_fields_of_other_servers_in_embedding_requests(served: RunningServer) -> None:
    port, texts = served.port, ["the cat", "she ran"]
    assert ask(port, "/rerank", {"query": "a", "texts": texts, "model": "embed"} | TRUNCATION).status == 200
    assert ask(port, "/embed", {"inputs": texts, "prompt_name": None} | TRUNCATION).status == 200
    assert "has no prompts" in ask(port, "/embed", {"inputs": texts, "prompt_name": "query"}).json["error"]
    assert ask(port, "/embed", {"inputs": "a", "truncation_direction": "Left"}).status == 422
    assert ask(port, "/tokenize", {"inputs": "a", "prompt_name": None}).status == 200
    body = {"inputs": {"source_sentence": long_text(100), "sentences": texts}}
    assert ask(port, "/similarity", body | {"parameters": TRUNCATION}).status == 200
    assert ask(port, "/similarity", body | {"parameters": {"truncate": False}}).status == 413


def test_fields_of_openai_requests(served: RunningServer) -> None:
    port = served.port
    assert ask(port, "/v1/embeddings", {"input": "a", "encoding_format": None}).status == 200
    for ids in ([101, 7], [[101, 7]]):
        refused = ask(port, "/v1/embeddings", {"input": ids})
        assert refused.status == 422 and "send texts: token ids" in refused.json["error"]["message"]
    models = ask(port, "/v1/models").json["data"]
    assert [model["id"] for model in models] == ask(port, "/info").json["models"]


def test_unused_fields_of_the_open_inference_protocol(served: RunningServer) -> None:
    text = {"name": "text", "shape": [2, 1], "datatype": "BYTES", "data": ["the cat", "she ran"], "parameters": {}}
    body = {
        "inputs": [text],
        "outputs": [{"name": "label", "parameters": {"binary_data": False}}],
        "parameters": {"binary_data_output": True, "priority": 1},
    }
    reply = ask(served.port, "/v2/models/single/infer", body)
    assert reply.status == 200 and reply.json["outputs"][0]["shape"] == [2]


@pytest.mark.parametrize("trained_on_pairs", [None, False, True])
def test_a_list_of_two_texts_is_a_pair_for_models_of_pairs(
    served: RunningServer, engines: dict[str, Engine], trained_on_pairs: bool | None
) -> None:
    """Whether a model classifies pairs is None if its folder does not say so: two texts are then ambiguous."""

    def predict(inputs: Any) -> Any:
        """Return labels, or the status and the message of an error."""
        reply = ask(served.port, "/predict", {"inputs": inputs, "model": "single"})
        return reply.json if reply.status == 200 else (reply.status, reply.json["error"])

    cat_labels, ran_labels = map(labels_of, engines["single"](TWO_TEXTS))
    (pair_labels,) = map(labels_of, engines["single"]([("the cat", "she ran")]))
    pair_object = {"text": "the cat", "text_pair": "she ran"}
    loaded = served.service.select_model("single", None)[1].engine.loaded
    old_pairs, loaded.pairs = loaded.pairs, trained_on_pairs
    try:
        assert close(predict("the cat"), cat_labels)
        assert close(predict({"text": "the cat"}), cat_labels)
        assert close(predict(pair_object), pair_labels)
        assert close(predict([pair_object, "the cat"]), [pair_labels, cat_labels])
        assert close(predict([["the cat"], ["she ran"]]), [cat_labels, ran_labels])
        assert predict(["the cat", ["she ran"]])[0] == 422
        assert predict([["a", "b", "c"]])[0] == 422
        flat, nested = predict(TWO_TEXTS), predict([TWO_TEXTS])
        if trained_on_pairs:
            assert close(flat, pair_labels)
            assert close(nested, [pair_labels])
            assert predict([*TWO_TEXTS, "x"])[0] == 422
            return
        assert close(predict(["the cat"]), [cat_labels])
        if trained_on_pairs is None:
            assert flat[0] == 422 and "two texts or a pair" in flat[1]
            assert close(nested, [pair_labels])
        else:
            assert close(flat, [cat_labels, ran_labels])
            assert nested[0] == 422 and '"text_pair"' in nested[1]
    finally:
        loaded.pairs = old_pairs


def close(actual: Any, expected: Any) -> bool:
    """Return whether labels are equal, and scores equal up to rounding errors."""
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(close, actual, expected))
    return actual["label"] == expected["label"] and actual["score"] == pytest.approx(expected["score"], abs=1e-5)


def test_masks_are_filled_as_by_the_engine(served: RunningServer, engines: dict[str, Engine]) -> None:
    def without_scores(answers: list[Any]) -> list[Any]:
        """Return, for each mask of each text, its position in the text and its candidate tokens."""
        return [
            [(mask["start"], [token["token"] for token in mask["candidates"]]) for mask in answer["masks"]]
            for answer in answers
        ]

    texts = ["the [MASK] sat", "[MASK] " * 30]
    replies = ask(served.port, "/fill-mask", {"inputs": texts, "top_k": 7, "model": "masked"}).json
    assert without_scores(replies) == without_scores(engines["masked"](texts, top_k=7))
    assert all(len(mask["candidates"]) == 7 for reply in replies for mask in reply["masks"])


@pytest.mark.parametrize(
    ("how", "options"),
    [
        (Greedy(), {}),
        (BeamSearch(num_beams=2, num_return_sequences=2), {"num_beams": 2}),
        (Sampling(temperature=1.5), {"temperature": 1.5, "seed": 3}),
    ],
)
def test_texts_are_generated_as_by_the_engine(
    served: RunningServer, engines: dict[str, Engine], how: Any, options: dict[str, Any]
) -> None:
    texts = ["a b", "c d e", "h"]
    engine = Engine(engines["write"].loaded, writing=GenerationConfig(how=how, max_new_tokens=5, seed=3))
    replies = ask(served.port, "/generate", {"inputs": texts, "max_new_tokens": 5} | options).json
    assert [reply["text"] for reply in replies] == [answer["text"] for answer in engine(texts)]


def test_temperatures_that_overflow_are_refused(served: RunningServer, engines: dict[str, Engine]) -> None:
    """The lowest accepted temperature samples the text that greedy search finds."""
    for temperature in (0, 1e-7, 1e-320):
        refused = ask(served.port, "/generate", {"inputs": "a", "temperature": temperature})
        assert refused.status == 422 and "temperature" in refused.json["error"]
    (greedy_answer,) = Engine(engines["write"].loaded, writing=GenerationConfig(max_new_tokens=3))(["a"])
    sampled = ask(served.port, "/generate", {"inputs": "a", "max_new_tokens": 3, "temperature": 1e-6}).json
    assert sampled["text"] == greedy_answer["text"]


def test_generation_that_is_impossible_or_too_long_is_refused(served: RunningServer) -> None:
    port = served.port
    assert ask(port, "/generate", {"inputs": "a", "num_beams": 2, "temperature": 1.0}).status == 422
    assert ask(port, "/generate", {"inputs": "a", "max_new_tokens": 10_000}).status == 413
    assert ask(port, "/generate", {"inputs": "a " * 60}).status == 422  # the source cannot be split into windows
    refused = ask(port, "/generate", {"inputs": ["a"] * 100, "max_new_tokens": 100, "num_beams": 16})
    assert refused.status == 413 and "with the tokens that may be generated" in refused.json["error"]


def test_generation_stops_after_the_deadline(served: RunningServer) -> None:
    body = {"inputs": ["a b c"] * 10, "max_new_tokens": 512, "num_beams": 3}  # takes far more than 50 ms
    retries = served.service.scheduler.counts.retries
    assert ask(served.port, "/generate", body, **{"x-request-timeout-ms": "50"}).status == 504
    start = time.monotonic()
    assert ask(served.port, "/predict", {"inputs": "the cat", "model": "single"}).status == 200
    assert time.monotonic() - start < 5 and served.service.scheduler.counts.retries == retries


def test_attention_rows_sum_to_one(served: RunningServer) -> None:
    result = ask(served.port, "/attention", {"inputs": "the cat sat", "model": "single"}).json
    assert [token["text"] for token in result["tokens"]] == ["[CLS]", "the", "cat", "sat", "[SEP]"]
    assert [layer["layer"] for layer in result["layers"]] == [0, 1]
    weights = np.array([layer["weights"] for layer in result["layers"]])
    assert weights.shape == (2, 4, 5, 5)  # layers, heads, queries, keys
    assert np.abs(weights.sum(-1) - 1).max() < 1e-4


@pytest.mark.parametrize(
    ("changed_fields", "status"),
    [
        ({"layers": [2]}, 422),
        ({"heads": [9]}, 422),
        ({"layers": [-1]}, 422),
        ({"layers": []}, 422),
        ({"heads": []}, 422),
        ({"inputs": long_text(100)}, 413),
    ],
)
def test_attention_of_unknown_heads_or_long_texts_is_refused(
    served: RunningServer, changed_fields: dict[str, Any], status: int
) -> None:
    reply = ask(served.port, "/attention", {"inputs": "the cat", "model": "single"} | changed_fields)
    assert reply.status == status, reply.body


def test_attention_of_a_decoder_only_model(tmp_path: Path) -> None:
    """The tokens are those of the prompt; with a text suffix, including the token that ends a text."""
    model = load(make_decoder(tmp_path / "writer"))
    assert model.tokenizer is not None
    backend = tokenizers.Tokenizer.from_str(model.tokenizer._backend.to_str())
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    model.tokenizer = Tokenizer(backend, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"})
    for suffix, tokens in (("", ["a", "b", "c"]), (" d", ["a", "b", "c", "d", "</s>"])):
        model.text_suffix = suffix
        result = attention_response(Engine(model), "a b c", layers=[0], heads=[1], max_weights=1000)
        assert [token["text"] for token in result["tokens"]] == tokens
        assert np.array(result["layers"][0]["weights"]).shape == (1, len(tokens), len(tokens))


# -- the Open Inference Protocol --------------------------------------------------------------------------------------


def tensor(name: str, data: list[str]) -> dict[str, Any]:
    """Return texts as an input of the Open Inference Protocol."""
    return {"name": name, "shape": [len(data)], "datatype": "BYTES", "data": data}


def test_states_and_metadata_in_the_open_inference_protocol(served: RunningServer) -> None:
    assert ask(served.port, "/v2/health/live").json == {"live": True}
    assert ask(served.port, "/v2/health/ready").json == {"ready": True}
    assert ask(served.port, "/v2/models/embed/ready").json == {"ready": True}
    metadata = ask(served.port, "/v2/models/single").json
    assert metadata["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
    assert [output["name"] for output in metadata["outputs"]] == ["scores", "label"]
    assert "versions" not in metadata  # the server has no versions, and no paths with them


@pytest.mark.parametrize(
    ("model", "columns"),
    [
        ("embed", ["text"]),
        ("single", ["text"]),
        ("single", ["text", "text_pair"]),
        ("span", ["question", "context"]),
        ("next", ["text", "text_pair"]),
        ("tag", ["text"]),
    ],
)
def test_outputs_of_the_open_inference_protocol_have_their_shapes(
    served: RunningServer, model: str, columns: list[str]
) -> None:
    body = {"id": "7", "inputs": [tensor(column, TWO_TEXTS) for column in columns]}
    reply = ask(served.port, f"/v2/models/{model}/infer", body).json
    assert reply["id"] == "7" and reply["model_name"] == model
    for output in reply["outputs"]:
        assert len(output["data"]) == math.prod(output["shape"]), output


def test_answers_of_the_open_inference_protocol_equal_those_of_the_engine(
    served: RunningServer, engines: dict[str, Engine]
) -> None:
    reply = ask(served.port, "/v2/models/tag/infer", {"inputs": [tensor("text", TWO_TEXTS)]}).json
    answers = [json.loads(answer) for answer in reply["outputs"][0]["data"]]
    assert answers == engines["tag"](TWO_TEXTS)
    nested = tensor("text", TWO_TEXTS) | {"shape": [2, 1], "data": [[text] for text in TWO_TEXTS]}
    scores_and_labels = ask(served.port, "/v2/models/single/infer", {"inputs": [nested]}).json["outputs"]
    labels = [answer["label"] for answer in engines["single"](TWO_TEXTS)]
    assert scores_and_labels[1]["data"] == labels


def test_the_open_inference_protocol_returns_the_outputs_asked_for(served: RunningServer) -> None:
    body = {"inputs": [tensor("text", TWO_TEXTS)], "outputs": [{"name": "label"}]}
    reply = ask(served.port, "/v2/models/single/infer", body).json
    assert [output["name"] for output in reply["outputs"]] == ["label"]


@pytest.mark.parametrize(
    ("model", "body"),
    [
        ("single", {"inputs": [tensor("txt", TWO_TEXTS)]}),
        ("single", {"inputs": [tensor("text", TWO_TEXTS), tensor("text", TWO_TEXTS)]}),
        ("single", {"inputs": [tensor("text", TWO_TEXTS) | {"shape": [3]}]}),
        ("single", {"inputs": [tensor("text", TWO_TEXTS) | {"shape": [2, 1], "data": [TWO_TEXTS]}]}),
        ("single", {"inputs": [tensor("text", TWO_TEXTS), tensor("text_pair", ["x"])]}),
        ("single", {"inputs": [tensor("text", TWO_TEXTS)], "outputs": [{"name": "nothing"}]}),
        ("single", {"inputs": []}),
        ("choice", {"inputs": [tensor("text", TWO_TEXTS)]}),
    ],
)
def test_wrong_tensors_of_the_open_inference_protocol_are_refused(
    served: RunningServer, model: str, body: dict[str, Any]
) -> None:
    assert ask(served.port, f"/v2/models/{model}/infer", body).status == 422


# -- models, documents, metrics, pages --------------------------------------------------------------------------------


def test_models_are_selected_by_name_or_kind(served: RunningServer, folders: dict[str, str]) -> None:
    port = served.port
    info = ask(port, "/info").json
    assert info["models"] == list(folders) and info["model_id"] == info["models"][0]
    assert ask(port, "/info?model=tag").json["routes"] == ["/token-classification", "/attention", "/tokenize"]
    assert ask(port, "/info?model=single").json["labels"] == ["bad", "fair", "good"]
    for name, problem_type in (("single", "single_label_classification"), ("multiple", "multi_label_classification")):
        assert ask(port, f"/info?model={name}").json["model_type"]["classifier"]["problem_type"] == problem_type
    assert not re.search(r"/tmp|pytest|\.py", json.dumps(info))  # no paths of this machine


def test_a_model_that_cannot_answer_is_refused(served: RunningServer) -> None:
    port = served.port
    assert ask(port, "/token-classification", {"inputs": "a", "model": "span"}).status == 422
    assert ask(port, "/generate", {"inputs": "a", "model": "tag"}).status == 422
    for name in ("../../etc", "%2e%2e", "C:\\", "\0", "x" * 150, ""):
        assert ask(port, "/token-classification", {"inputs": "a", "model": name}).status == 404
    assert ask(port, "/token-classification", {"inputs": "a", "model": "x" * 4096}).status == 422


def test_models_are_named_by_their_folders() -> None:
    assert name_models(["a/b", "c=d/e", "org/name@main"]) == {"b": "a/b", "c": "d/e", "name": "org/name@main"}
    assert name_models(["a/b c/"]) == {"b-c": "a/b c/"}
    with pytest.raises(ValueError, match="two models are called 'b'"):
        name_models(["a/b", "c/b"])


def test_the_openapi_document_has_every_route(served: RunningServer, document: Any) -> None:
    paths = {endpoint.path for endpoint in ENDPOINTS} | {path for path, _, _ in VIEWS}
    assert set(document["paths"]) == paths | {"/metrics", "/v2/models/{name}/infer"}
    referenced_schemas = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert referenced_schemas == set(document["components"]["schemas"])


def test_examples_and_responses_of_the_openapi_document_have_their_types(served: RunningServer, document: Any) -> None:
    for endpoint in ENDPOINTS:
        operation = document["paths"][endpoint.path]["post"]
        assert operation["summary"].endswith(".")
        example = operation["requestBody"]["content"]["application/json"]["example"]
        msgspec.convert(example, endpoint.body, strict=True)
    for path, answer_type, _ in VIEWS:
        reply = ask(served.port, path.replace("{name}", "tag"))
        assert reply.status == 200
        msgspec.json.decode(reply.body, type=answer_type, strict=True)


def metric_sum(prefix: str, metrics: str) -> float:
    """Return the sum of the metrics whose lines start with this prefix."""
    return sum(float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(prefix))


def test_metrics_count_requests_and_tokens(served: RunningServer) -> None:
    before = ask(served.port, "/metrics").body.decode()
    ask(served.port, "/token-classification", {"inputs": ["Ada", "ran"]})
    ask(served.port, "/nothing")
    ask(served.port, "/attention", {"inputs": "Ada", "layers": [9]})  # refused, which is no failure of the model
    after = ask(served.port, "/metrics").body.decode()
    for prefix, increase in (
        ('heedful_requests_total{method="POST",route="/token-classification",status="200"}', 1),
        ('heedful_requests_total{method="GET",route="none",status="404"}', 1),
        ('heedful_request_duration_seconds_count{route="/token-classification"}', 1),
        ("heedful_batch_sequences_sum", 3),
        ("heedful_tokens_total", 6),
        ("heedful_failed_inputs_total", 0),
    ):
        assert metric_sum(prefix, after) - metric_sum(prefix, before) == increase, prefix
    assert metric_sum("heedful_queued_tokens ", after) == 0
    assert metric_sum("heedful_requests_in_flight ", after) == 0
    assert metric_sum("heedful_queued_tokens_limit", after) > 0


def test_metrics_count_unknown_tokens_and_labels(served: RunningServer, engines: dict[str, Engine]) -> None:
    texts = ["the cat sat", "the \N{SNOWMAN} sat"]
    labels = [answer["label"] for answer in engines["single"](texts)]
    increases = {
        'heedful_input_tokens_count{model="single"}': 2,
        'heedful_unknown_tokens_total{model="single"}': 1,
        'heedful_label_probability_count{model="single"}': 2,
        f'heedful_predicted_labels_total{{label="{labels[0]}",model="single"}}': labels.count(labels[0]),
    }
    before = ask(served.port, "/metrics").body.decode()
    ask(served.port, "/predict", {"inputs": [[text] for text in texts], "model": "single"})
    after = ask(served.port, "/metrics").body.decode()
    assert {prefix: metric_sum(prefix, after) - metric_sum(prefix, before) for prefix in increases} == increases


def test_the_page_loads_nothing_from_other_servers(served: RunningServer) -> None:
    page = ask(served.port, "/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    script = ask(served.port, "/web/page.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert ask(served.port, "/web/page.css").headers["content-type"].startswith("text/css")
    forbidden = r"https?://|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|style=|onclick"
    assert not re.search(forbidden, page.body.decode() + script.body.decode())
    for file in re.findall(r'(?:src|href)="(/[^"]*)"', page.body.decode()):
        assert ask(served.port, file).status == 200
