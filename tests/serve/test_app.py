"""Every route, compared with the answers of the engine and with the types in /openapi.json."""

from __future__ import annotations

import base64
import json
import math
import re
import struct
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


def test_answers_equal_those_of_the_engine(served: RunningServer, engines: dict[str, Engine]) -> None:
    port = served.port
    for route, name, inputs in (
        ("/token-classification", "tag", ["Ada lives in Paris .", ["Ada", "ran"], long_text(100)]),
        ("/question-answering", "span", [QUESTION]),
        ("/multiple-choice", "choice", [CHOICE]),
        ("/fill-mask", "masked", ["the [MASK] sat"]),
    ):
        assert ask(port, route, {"inputs": inputs, "model": name}).json == engines[name](inputs)
    (single_answer,) = engines["single"](["the cat sat"])
    labels = ask(port, "/predict", {"inputs": "the cat sat", "model": "single"}).json
    assert {label["label"]: label["score"] for label in labels} == single_answer["probabilities"]
    assert labels[0] == {"label": single_answer["label"], "score": single_answer["probability"]}
    (multiple_answer,) = engines["multiple"](["the cat sat"])
    body = {"inputs": "the cat sat", "model": "single", "min_confidence": labels[0]["score"]}
    assert [label["predicted"] for label in ask(port, "/predict", body).json] == [True, False, False]
    below_confidence = ask(port, "/predict", body | {"min_confidence": 1.0}).json
    assert (
        not any(label["predicted"] for label in below_confidence) and below_confidence[0]["score"] == labels[0]["score"]
    )
    refused = ask(port, "/predict", body | {"model": "multiple"})
    assert refused.status == 422 and b"models that choose one label" in refused.body
    refused = ask(port, "/predict", {"inputs": "the cat sat", "model": "single", "prediction_set": 0.9})
    assert refused.status == 422 and b"no calibration for prediction sets" in refused.body
    assert [label["predicted"] for label in labels_of(single_answer, 0.0, as_set=True)] == [True, True, True]
    assert [label["predicted"] for label in labels_of(single_answer, 1.0, as_set=True)] == [True, False, False]
    labels = ask(port, "/predict", {"inputs": "the cat sat", "model": "multiple"}).json
    assert [
        label["label"] for label in sorted(labels, key=lambda entry: entry["label"]) if label["predicted"]
    ] == sorted(multiple_answer["labels"])


def test_embeddings_equal_those_of_the_engine(served: RunningServer, engines: dict[str, Engine]) -> None:
    texts = ["the cat", "she ran", long_text(100)]
    embeddings = np.array([answer["vector"] for answer in engines["embed"](texts)])
    unit_vectors = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    assert np.abs(np.array(ask(served.port, "/embed", {"inputs": texts}).json) - unit_vectors).max() < 1e-6
    plain = ask(served.port, "/embed", {"inputs": texts, "normalize": False, "dimensions": 7}).json
    assert np.abs(np.array(plain) - embeddings[:, :7]).max() < 1e-6
    result = ask(served.port, "/v1/embeddings", {"input": texts[0], "encoding_format": "base64"}).json
    vector_bytes = base64.b64decode(result["data"][0]["embedding"])
    assert np.abs(np.array(struct.unpack(f"<{len(vector_bytes) // 4}f", vector_bytes)) - unit_vectors[0]).max() < 1e-6
    assert result["usage"]["total_tokens"] == 4 and result["model"] == "embed"
    body = {"inputs": {"source_sentence": texts[0], "sentences": texts}}
    assert ask(served.port, "/similarity", body).json == pytest.approx(
        (unit_vectors @ unit_vectors[0]).tolist(), abs=1e-6
    )
    ranked = ask(served.port, "/rerank", {"query": texts[0], "texts": texts, "model": "embed"}).json
    assert [entry["score"] for entry in ranked] == pytest.approx(
        sorted(unit_vectors @ unit_vectors[0], reverse=True), abs=1e-6
    )
    assert ranked[0]["index"] == 0


def test_texts_are_ranked_by_a_model_that_scores_pairs(served: RunningServer, engines: dict[str, Engine]) -> None:
    texts = ["the cat", "she ran", "a"]
    expected = [answer["values"]["stars"] for answer in engines["regression"]([("a dog", text) for text in texts])]
    body = {"query": "a dog", "texts": texts, "model": "regression", "return_text": True}
    raw = ask(served.port, "/rerank", body | {"raw_scores": True}).json
    assert [entry["score"] for entry in raw] == pytest.approx(sorted(expected, reverse=True), abs=1e-6)
    assert [texts[entry["index"]] for entry in raw] == [entry["text"] for entry in raw]
    probabilities = ask(served.port, "/rerank", body).json
    assert [entry["score"] for entry in probabilities] == pytest.approx(
        [1 / (1 + math.exp(-entry["score"])) for entry in raw]
    )
    assert ask(served.port, "/rerank", body | {"model": "single"}).status == 422
    del body["model"]
    # "single", the first classifier, is not selected: it has three labels and cannot rank
    assert ask(served.port, "/rerank", body).status == 200
    ranks = {name: "/rerank" in ask(served.port, f"/info?model={name}").json["routes"] for name in engines}
    assert {name for name in ranks if ranks[name]} == {"regression", "embed"}


def test_scores_of_a_cross_encoder_are_sigmoids_unless_raw(tmp_path: Path) -> None:
    """A model whose scores are sigmoids already refuses raw_scores."""
    texts, answers = ["the cat", "she ran", "a"], {}
    for activation in SCORE_ACTIVATIONS.values():
        model = load(make_model_dir(tmp_path / activation, "regression"))
        assert isinstance(model.config.head, Classes)
        model.config = replace(model.config, head=replace(model.config.head, score_activation=activation))
        save(model, tmp_path / f"{activation}-saved")
        with background({"ranker": str(tmp_path / f"{activation}-saved")}) as server:
            body = {"query": "a dog", "texts": texts}
            answers[activation] = ask(server.port, "/rerank", body).json
            raw = ask(server.port, "/rerank", body | {"raw_scores": True})
        scores = rerank_scores(Engine(tmp_path / f"{activation}-saved"), "a dog", texts)
        served = sorted(answers[activation], key=lambda entry: entry["index"])
        assert [entry["score"] for entry in served] == pytest.approx(scores, abs=1e-6)
        assert raw.status == (200 if activation == "identity" else 422)
    assert [entry["score"] for entry in answers["identity"]] == pytest.approx(
        [entry["score"] for entry in answers["sigmoid"]], abs=1e-6
    )


def test_fields_of_clients_of_other_servers(served: RunningServer) -> None:
    """Fields that clients of other servers send are accepted where they apply, and refused with a reason elsewhere."""
    port, pair = served.port, ["the cat", "she ran"]
    truncation = {"truncate": True, "truncation_direction": "Right"}
    expected = ask(port, "/predict", {"inputs": [pair], "model": "single"}).json
    as_object = {"inputs": {"text": pair[0], "text_pair": pair[1]}}
    response = ask(port, "/predict", as_object | {"raw_scores": False, "model": "single"} | truncation)
    assert [response.json] == expected
    assert len(ask(port, "/predict", {"inputs": ["a", "b", "c"], "model": "single"}).json) == 3
    assert ask(port, "/predict", {"inputs": ["a", ["b"]]}).status == 422
    assert "probabilities" in ask(port, "/predict", {"inputs": "a", "raw_scores": True}).json["error"]
    assert ask(port, "/rerank", {"query": "a", "texts": pair, "model": "embed"} | truncation).status == 200
    assert ask(port, "/embed", {"inputs": pair, "prompt_name": None} | truncation).status == 200
    assert "has no prompts" in ask(port, "/embed", {"inputs": pair, "prompt_name": "query"}).json["error"]
    assert ask(port, "/embed", {"inputs": "a", "truncation_direction": "Left"}).status == 422
    assert ask(port, "/tokenize", {"inputs": "a", "prompt_name": None}).status == 200
    body = {"inputs": {"source_sentence": long_text(100), "sentences": pair}}
    assert ask(port, "/similarity", body | {"parameters": truncation}).status == 200
    assert ask(port, "/similarity", body | {"parameters": {"truncate": False}}).status == 413
    assert ask(port, "/v1/embeddings", {"input": "a", "encoding_format": None}).status == 200
    for ids in ([101, 7], [[101, 7]]):
        refused = ask(port, "/v1/embeddings", {"input": ids})
        assert refused.status == 422 and "send texts: token ids" in refused.json["error"]["message"]
    assert [entry["id"] for entry in ask(port, "/v1/models").json["data"]] == ask(port, "/info").json["models"]
    text = {"name": "text", "shape": [2, 1], "datatype": "BYTES", "data": pair, "parameters": {}}
    body = {"inputs": [text], "parameters": {"binary_data_output": True, "priority": 1}}
    body["outputs"] = [{"name": "label", "parameters": {"binary_data": False}}]
    reply = ask(port, "/v2/models/single/infer", body)
    assert reply.status == 200 and reply.json["outputs"][0]["shape"] == [2]


@pytest.mark.parametrize("learned", [None, False, True])
def test_a_list_of_two_texts_is_a_pair_for_models_of_pairs(
    served: RunningServer, engines: dict[str, Engine], learned: bool | None
) -> None:
    model_queue = served.service.select_model("single", None)[1]
    old_pairs, model_queue.engine.loaded.pairs = model_queue.engine.loaded.pairs, learned
    try:
        texts = {text: labels_of(engines["single"]([text])[0]) for text in ("the cat", "she ran")}
        pair = labels_of(engines["single"]([("the cat", "she ran")])[0])

        def predict(inputs: Any) -> Any:
            reply = ask(served.port, "/predict", {"inputs": inputs, "model": "single"})
            return reply.json if reply.status == 200 else (reply.status, reply.json["error"])

        two_texts, pair_object = ["the cat", "she ran"], {"text": "the cat", "text_pair": "she ran"}
        assert close(predict("the cat"), texts["the cat"]) and close(predict(pair_object), pair)
        assert close(predict({"text": "the cat"}), texts["the cat"])
        assert close(predict([pair_object, "the cat"]), [pair, texts["the cat"]])
        assert close(predict([["the cat"], ["she ran"]]), list(texts.values()))
        flat, nested = predict(two_texts), predict([two_texts])
        match learned:
            case True:
                assert close(flat, pair) and close(nested, [pair])
                assert predict([*two_texts, "x"])[0] == 422
            case False:
                assert close(flat, list(texts.values())) and nested[0] == 422 and '"text_pair"' in nested[1]
                assert close(predict(["the cat"]), [texts["the cat"]])
            case None:
                assert flat[0] == 422 and "two texts or a pair" in flat[1] and close(nested, [pair])
                assert close(predict(["the cat"]), [texts["the cat"]])
        assert predict(["the cat", ["she ran"]])[0] == 422 and predict([["a", "b", "c"]])[0] == 422
    finally:
        model_queue.engine.loaded.pairs = old_pairs


def close(actual: Any, expected: Any) -> bool:
    """Return whether labels are equal, and scores equal up to rounding errors."""
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(close, actual, expected))
    return actual["label"] == expected["label"] and actual["score"] == pytest.approx(expected["score"], abs=1e-5)


def test_masks_are_filled_as_by_the_engine(served: RunningServer, engines: dict[str, Engine]) -> None:
    texts = ["the [MASK] sat", "[MASK] " * 30]
    replies = ask(served.port, "/fill-mask", {"inputs": texts, "top_k": 7, "model": "masked"}).json
    for answer, expected_answer in zip(replies, engines["masked"](texts, top_k=7), strict=True):
        assert [mask["start"] for mask in answer["masks"]] == [mask["start"] for mask in expected_answer["masks"]]
        for mask, expected in zip(answer["masks"], expected_answer["masks"], strict=True):
            assert [token["token"] for token in mask["candidates"]] == [
                token["token"] for token in expected["candidates"]
            ]
            assert len(mask["candidates"]) == 7


def test_texts_are_generated_as_by_the_engine(served: RunningServer, engines: dict[str, Engine]) -> None:
    port, texts = served.port, ["a b", "c d e", "h"]
    greedy_text = Engine(engines["write"].loaded, writing=GenerationConfig(max_new_tokens=3))(["a"])[0]["text"]
    for how, options in (
        (Greedy(), {}),
        (BeamSearch(num_beams=2, num_return_sequences=2), {"num_beams": 2}),
        (Sampling(temperature=1.5), {"temperature": 1.5, "seed": 3}),
    ):
        expected = Engine(engines["write"].loaded, writing=GenerationConfig(how=how, max_new_tokens=5, seed=3))(texts)
        replies = ask(port, "/generate", {"inputs": texts, "max_new_tokens": 5} | options).json
        assert [reply["text"] for reply in replies] == [reply["text"] for reply in expected]
    assert ask(port, "/generate", {"inputs": "a", "num_beams": 2, "temperature": 1.0}).status == 422
    assert ask(port, "/generate", {"inputs": "a", "max_new_tokens": 10_000}).status == 413
    for temperature in (0, 1e-7, 1e-320):
        refused = ask(port, "/generate", {"inputs": "a", "temperature": temperature})
        assert refused.status == 422 and "temperature" in refused.json["error"]
    assert ask(port, "/generate", {"inputs": "a", "max_new_tokens": 3, "temperature": 1e-6}).json["text"] == greedy_text
    assert ask(port, "/generate", {"inputs": "a " * 60}).status == 422  # the source cannot be split into windows
    reply = ask(port, "/generate", {"inputs": ["a"] * 100, "max_new_tokens": 100, "num_beams": 16})
    assert reply.status == 413 and "with the tokens that may be generated" in reply.json["error"]


def test_generation_stops_after_the_deadline(served: RunningServer) -> None:
    body = {"inputs": ["a b c"] * 10, "max_new_tokens": 512, "num_beams": 3}  # thousands of steps
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
    assert weights.shape == (2, 4, 5, 5) and np.abs(weights.sum(-1) - 1).max() < 1e-4
    for change, status in (
        ({"layers": [2]}, 422),
        ({"heads": [9]}, 422),
        ({"layers": [-1]}, 422),
        ({"layers": []}, 422),
        ({"heads": []}, 422),
        ({"inputs": long_text(100)}, 413),
    ):
        reply = ask(served.port, "/attention", {"inputs": "the cat", "model": "single"} | change)
        assert reply.status == status, reply.body


def test_attention_of_a_decoder_only_model(tmp_path: Path) -> None:
    """The tokens are those of the prompt; with a text suffix, including the token that ends a text."""
    model = load(make_decoder(tmp_path / "writer"))
    assert model.tokenizer is not None
    backend = tokenizers.Tokenizer.from_str(model.tokenizer._backend.to_str())
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    model.tokenizer = Tokenizer(backend, {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"})
    for suffix, names in (("", ["a", "b", "c"]), (" d", ["a", "b", "c", "d", "</s>"])):
        model.text_suffix = suffix
        result = attention_response(Engine(model), "a b c", [0], [1], 1000)
        assert [token["text"] for token in result["tokens"]] == names
        assert np.array(result["layers"][0]["weights"]).shape == (1, len(names), len(names))


def test_open_inference_protocol(served: RunningServer, engines: dict[str, Engine]) -> None:
    def tensor(name: str, data: list[str]) -> Any:
        return {"name": name, "shape": [len(data)], "datatype": "BYTES", "data": data}

    port, texts = served.port, ["the cat", "she ran"]
    assert ask(port, "/v2/health/live").json == {"live": True}
    assert ask(port, "/v2/health/ready").json == ask(port, "/v2/models/embed/ready").json == {"ready": True}
    facts = ask(port, "/v2/models/single").json
    assert facts["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
    assert [fact["name"] for fact in facts["outputs"]] == ["scores", "label"]
    for name, columns in (
        ("embed", {"text": texts}),
        ("single", {"text": texts}),
        ("single", {"text": texts, "text_pair": texts}),
        ("span", {"question": texts, "context": texts}),
        ("next", {"text": texts, "text_pair": texts}),
        ("tag", {"text": texts}),
    ):
        body = {"id": "7", "inputs": [tensor(key, data) for key, data in columns.items()]}
        reply = ask(port, f"/v2/models/{name}/infer", body).json
        assert reply["id"] == "7" and reply["model_name"] == name
        for output in reply["outputs"]:
            assert len(output["data"]) == math.prod(output["shape"]), output
    (expected,) = engines["tag"](["the cat"])
    reply = ask(port, "/v2/models/tag/infer", {"inputs": [tensor("text", ["the cat"])]}).json
    assert json.loads(reply["outputs"][0]["data"][0]) == expected
    reply = ask(port, "/v2/models/single/infer", {"inputs": [tensor("text", texts)], "outputs": [{"name": "label"}]})
    assert [output["name"] for output in reply.json["outputs"]] == ["label"]
    for invalid_body in (
        {"inputs": [tensor("txt", texts)]},
        {"inputs": [tensor("text", texts), tensor("text", texts)]},
        {"inputs": [tensor("text", texts) | {"shape": [3]}]},
        {"inputs": [tensor("text", texts), tensor("text_pair", ["x"])]},
        {"inputs": [tensor("text", texts)], "outputs": [{"name": "nothing"}]},
        {"inputs": []},
    ):
        assert ask(port, "/v2/models/single/infer", invalid_body).status == 422
    nested = tensor("text", texts) | {"shape": [2, 1], "data": [[text] for text in texts]}
    assert ask(port, "/v2/models/single/infer", {"inputs": [nested]}).json["outputs"][1]["data"] == [
        labels["label"] for labels in engines["single"](texts)
    ]
    assert ask(port, "/v2/models/single/infer", {"inputs": [nested | {"data": [texts]}]}).status == 422
    assert "versions" not in facts  # the server has no versions, and no paths with them
    assert ask(port, "/v2/models/choice/infer", {"inputs": [tensor("text", texts)]}).status == 422


def test_models_are_selected_by_name_or_kind(served: RunningServer, folders: dict[str, str]) -> None:
    port = served.port
    info = ask(port, "/info").json
    assert info["models"] == list(folders) and info["model_id"] == info["models"][0]
    assert ask(port, "/info?model=tag").json["routes"] == ["/token-classification", "/attention", "/tokenize"]
    assert ask(port, "/info?model=single").json["labels"] == ["bad", "fair", "good"]
    for name, problem_type in (("single", "single_label_classification"), ("multiple", "multi_label_classification")):
        assert ask(port, f"/info?model={name}").json["model_type"]["classifier"]["problem_type"] == problem_type
    assert ask(port, "/token-classification", {"inputs": "a", "model": "span"}).status == 422
    assert ask(port, "/generate", {"inputs": "a", "model": "tag"}).status == 422
    for name in ("../../etc", "%2e%2e", "C:\\", "\0", "x" * 150, ""):
        assert ask(port, "/token-classification", {"inputs": "a", "model": name}).status == 404
    assert ask(port, "/token-classification", {"inputs": "a", "model": "x" * 4096}).status == 422
    assert not re.search(r"/tmp|pytest|\.py", json.dumps(info))


def test_models_are_named_by_their_folders() -> None:
    assert name_models(["a/b", "c=d/e", "org/name@main"]) == {"b": "a/b", "c": "d/e", "name": "org/name@main"}
    assert name_models(["a/b c/"]) == {"b-c": "a/b c/"}
    with pytest.raises(ValueError, match="two models are called 'b'"):
        name_models(["a/b", "c/b"])


def test_the_openapi_document_has_every_route(served: RunningServer, document: Any) -> None:
    paths = {endpoint.path for endpoint in ENDPOINTS} | {path for path, _, _ in VIEWS}
    assert set(document["paths"]) == paths | {"/metrics", "/v2/models/{name}/infer"}
    names = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document)))
    assert names == set(document["components"]["schemas"])
    for endpoint in ENDPOINTS:
        operation = document["paths"][endpoint.path]["post"]
        assert operation["summary"].endswith(".")
        example = operation["requestBody"]["content"]["application/json"]["example"]
        msgspec.convert(example, endpoint.body, strict=True)
    for path, answer_type, _ in VIEWS:
        reply = ask(served.port, path.replace("{name}", "tag"))
        assert reply.status == 200
        msgspec.json.decode(reply.body, type=answer_type, strict=True)


def test_metrics_count_requests_and_tokens(served: RunningServer) -> None:
    def total(name: str, text: str) -> float:
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    before = ask(served.port, "/metrics").body.decode()
    ask(served.port, "/token-classification", {"inputs": ["Ada", "ran"]})
    ask(served.port, "/nothing")
    ask(served.port, "/attention", {"inputs": "Ada", "layers": [9]})  # refused, which is no failure of the model
    after = ask(served.port, "/metrics").body.decode()
    for name, increase in (
        ('heedful_requests_total{method="POST",route="/token-classification",status="200"}', 1),
        ('heedful_requests_total{method="GET",route="none",status="404"}', 1),
        ('heedful_request_duration_seconds_count{route="/token-classification"}', 1),
        ("heedful_batch_sequences_sum", 3),
        ("heedful_tokens_total", 6),
        ("heedful_failed_inputs_total", 0),
    ):
        assert total(name, after) - total(name, before) == increase, name
    assert total("heedful_queued_tokens ", after) == 0 and total("heedful_requests_in_flight ", after) == 0
    assert total("heedful_queued_tokens_limit", after) > 0


def test_metrics_count_unknown_tokens_and_labels(served: RunningServer, engines: dict[str, Engine]) -> None:
    def value(name: str) -> float:
        text = ask(served.port, "/metrics").body.decode()
        return next((float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name)), 0.0)

    texts = ["the cat sat", "the \N{SNOWMAN} sat"]
    labels = [answer["label"] for answer in engines["single"](texts)]
    increases = {
        'heedful_input_tokens_count{model="single"}': 2,
        'heedful_unknown_tokens_total{model="single"}': 1,
        'heedful_label_probability_count{model="single"}': 2,
        f'heedful_predicted_labels_total{{label="{labels[0]}",model="single"}}': labels.count(labels[0]),
    }
    before = {name: value(name) for name in increases}
    ask(served.port, "/predict", {"inputs": [[text] for text in texts], "model": "single"})
    assert {name: value(name) - before[name] for name in increases} == increases


def test_the_page_loads_nothing_from_other_servers(served: RunningServer) -> None:
    page = ask(served.port, "/")
    assert page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    script = ask(served.port, "/web/page.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert ask(served.port, "/web/page.css").headers["content-type"].startswith("text/css")
    sources = page.body.decode() + script.body.decode()
    assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|style=|onclick", sources)
    for file in re.findall(r'(?:src|href)="(/[^"]*)"', page.body.decode()):
        assert ask(served.port, file).status == 200
