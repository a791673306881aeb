"""Dense modules, prompts, truncated vectors and cross-encoders, compared with sentence-transformers on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

import heedful
from heedful.checkpoint.sentence_transformers import MODULES, PROMPTS
from heedful.checkpoint.unpickle import convert_pickles
from heedful.errors import HeedfulError
from heedful.model.config import Classes, DenseLayer, SentenceEmbedding
from tests.support.tiny_models import randomise

WORDS = ["the", "ferry", "leaves", "at", "noon", "a", "longer", "sentence", "about", "nothing", "bird", "sings", ":"]
WORDS += ["query", "passage"]
TEXTS = ["the ferry leaves at noon", "", "a longer sentence about nothing " * 3, "bird", "a bird sings at noon"]
PROMPTS_BY_NAME = {"query": "query : ", "passage": "passage : ", "document": "", "other": "about the bird "}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A word tokenizer of transformers."""
    path = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    path.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    return transformers.BertTokenizerFast(vocab_file=str(path), model_max_length=30)


def save_bert(folder: Path, tokenizer: Any, kind: type, **settings: Any) -> Path:
    """Save a tiny BERT with its tokenizer."""
    config = transformers.BertConfig(
        vocab_size=len(WORDS) + 5,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=30,
        **settings,
    )
    torch.manual_seed(1)
    model = kind(config)
    randomise(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def body(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """Folder of a tiny BERT without a head."""
    return save_bert(tmp_path_factory.mktemp("body"), tokenizer, transformers.BertModel)


def make_encoder(body: Path, *modules: torch.nn.Module, pooling: Any = "mean", **settings: Any) -> SentenceTransformer:
    """Return a model of sentence-transformers with these modules after its pooling."""
    pools_prompt = settings.pop("include_prompt", True)
    parts = [Transformer(str(body)), Pooling(32, pooling_mode=pooling, include_prompt=pools_prompt), *modules]
    return SentenceTransformer(modules=parts, device="cpu", **settings)


def make_dense(inputs: int, outputs: int, **settings: Any) -> Dense:
    """Return a dense module with weights that depend on its sizes."""
    torch.manual_seed(inputs + outputs)
    return Dense(inputs, outputs, **settings)


def close(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether two arrays have the same shape and close values."""
    return actual.shape == expected.shape and bool(
        np.abs(actual - expected).max() <= 2e-6 * max(1, np.abs(expected).max())
    )


DENSE_MODULES: dict[str, list[torch.nn.Module]] = {
    "one, as in LaBSE": [make_dense(32, 24), Normalize()],
    "without normalisation, as in distiluse": [make_dense(32, 16)],
    "without bias and activation, as in sentence-t5": [
        make_dense(32, 24, bias=False, activation_function=torch.nn.Identity()),
        Normalize(),
    ],
    "two": [
        make_dense(32, 48, bias=False, activation_function=torch.nn.Identity()),
        make_dense(48, 32, activation_function=torch.nn.GELU()),
        Normalize(),
    ],
    "other activations": [
        make_dense(32, 8, activation_function=torch.nn.ReLU()),
        make_dense(8, 8, activation_function=torch.nn.SiLU()),
    ],
}


@pytest.mark.parametrize("name", DENSE_MODULES)
def test_dense_modules_compute_and_are_saved_as_in_sentence_transformers(body: Path, tmp_path: Path, name: str) -> None:
    reference = make_encoder(body, *DENSE_MODULES[name])
    reference.save(str(tmp_path / "theirs"))
    expected = reference.encode(TEXTS)
    loaded = heedful.load(tmp_path / "theirs")
    assert loaded.tokenizer is not None
    with torch.no_grad():
        assert close(loaded(loaded.tokenizer.pack(TEXTS)).numpy(), expected)
    heedful.save(loaded, tmp_path / "ours")
    reloaded = heedful.load(tmp_path / "ours")
    assert reloaded.config.head == loaded.config.head and reloaded.weights_digest() == loaded.weights_digest()
    assert (SentenceTransformer(str(tmp_path / "ours"), device="cpu").encode(TEXTS) == expected).all()
    assert heedful.Engine(tmp_path / "ours").encode([]).shape == (0, expected.shape[1])


def test_dense_weights_of_version_two_are_converted_from_their_pickle(body: Path, tmp_path: Path) -> None:
    reference = make_encoder(body, *DENSE_MODULES["one, as in LaBSE"])
    reference.save(str(tmp_path / "theirs"))
    modules = (tmp_path / "theirs" / MODULES).read_text()
    for module in ("base.modules.dense", "base.modules.normalize", "base.modules.transformer"):
        modules = modules.replace(f"sentence_transformers.{module}.", "sentence_transformers.models.")
    (tmp_path / "theirs" / MODULES).write_text(modules)
    config = {"in_features": 32, "out_features": 24, "bias": True}
    config["activation_function"] = "torch.nn.modules.activation.Tanh"  # type: ignore[assignment]
    (tmp_path / "theirs/2_Dense/config.json").write_text(json.dumps(config))
    (tmp_path / "theirs/2_Dense/model.safetensors").unlink()
    torch.save(reference[2].state_dict(), tmp_path / "theirs/2_Dense/pytorch_model.bin")
    with pytest.raises(HeedfulError, match=r"2_Dense has its weights in pytorch_model.bin"):
        heedful.load(tmp_path / "theirs")
    convert_pickles(tmp_path / "theirs", tmp_path / "safe")
    assert close(heedful.Engine(tmp_path / "safe").encode(TEXTS), reference.encode(TEXTS))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"use_residual": True}, "use_residual is True; only False can be loaded"),
        ({"module_input_name": "token_embeddings"}, "only 'sentence_embedding' can be loaded"),
        (
            {"activation_function": "torch.nn.modules.activation.Mish"},
            "activation_function is '.*Mish'; expected one of",
        ),
        ({"rank": 4}, "does not know the key 'rank'"),
        ({"out_features": 23}, r"head.dense.0.weight has the shape \[24, 32\], but config.json implies \[23, 32\]"),
    ],
)
def test_other_dense_modules_are_refused(body: Path, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    make_encoder(body, *DENSE_MODULES["one, as in LaBSE"]).save(str(tmp_path / "model"))
    path = tmp_path / "model/2_Dense/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(HeedfulError, match=message):
        heedful.load(tmp_path / "model")


@pytest.mark.parametrize("dimensions", [5, 32, 100])
def test_vectors_are_truncated_after_they_are_normalised(body: Path, tmp_path: Path, dimensions: int) -> None:
    reference = make_encoder(body, Normalize(), truncate_dim=dimensions)
    reference.save(str(tmp_path / "theirs"))
    expected = reference.encode(TEXTS)
    engine = heedful.Engine(tmp_path / "theirs")
    assert close(engine.encode(TEXTS), expected) and engine.encode([]).shape == (0, expected.shape[1])
    heedful.save(heedful.load(tmp_path / "theirs"), tmp_path / "ours")
    assert (SentenceTransformer(str(tmp_path / "ours"), device="cpu").encode(TEXTS) == expected).all()


@pytest.mark.parametrize(
    ("pooling", "include_prompt", "default"),
    [
        ("mean", True, None),
        ("mean", True, "other"),
        ("mean", False, None),
        *((pooling, False, "other") for pooling in ("mean", "cls", "max", "lasttoken", ("cls", "mean"))),
    ],
)
def test_prompts_are_used_as_in_sentence_transformers(
    body: Path, tmp_path: Path, pooling: Any, include_prompt: bool, default: str | None
) -> None:
    settings = {"prompts": PROMPTS_BY_NAME, "default_prompt_name": default, "include_prompt": include_prompt}
    reference = make_encoder(body, Normalize(), pooling=pooling, **settings)
    reference.save(str(tmp_path / "theirs"))
    texts = [text for text in TEXTS if text]
    engine = heedful.Engine(tmp_path / "theirs")
    assert close(engine.encode(texts), reference.encode(texts))
    assert close(engine.encode(texts, prompt="bird : "), reference.encode(texts, prompt="bird : "))
    assert close(engine.encode(texts, prompt=""), reference.encode(texts, prompt=""))
    assert close(engine.encode_query(texts), reference.encode_query(texts))
    assert close(engine.encode_document(texts), reference.encode_document(texts))
    (answer,) = engine([(texts[0], texts[1])])
    assert close(np.array(answer["vectors"]), reference.encode(texts[:2]))
    if default and include_prompt:
        assert np.abs(engine.encode(texts) - engine.encode(texts, prompt="")).max() > 0.01
    heedful.save(heedful.load(tmp_path / "theirs"), tmp_path / "ours")
    reloaded = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    assert reloaded.default_prompt_name == default and reloaded.prompts == PROMPTS_BY_NAME
    assert (reloaded.encode(texts) == reference.encode(texts)).all()
    assert heedful.load(tmp_path / "ours").config.head == engine.loaded.config.head


def test_exported_vectors_pass_the_dense_layers(body: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    from heedful.infer.export.onnx_export import export

    reference = make_encoder(body, *DENSE_MODULES["two"], truncate_dim=20)
    reference.save(str(tmp_path / "theirs"))
    loaded = heedful.load(tmp_path / "theirs")
    assert loaded.tokenizer is not None
    export(loaded, tmp_path / "onnx")
    encoded = loaded.tokenizer.encode(TEXTS[0])
    feeds = {"input_ids": [encoded.ids], "attention_mask": [[1] * len(encoded)], "token_type_ids": [encoded.types]}
    session = onnxruntime.InferenceSession(str(tmp_path / "onnx/model.onnx"))
    session_inputs = {item.name: np.array(feeds[item.name], np.int64) for item in session.get_inputs()}
    (vectors,) = session.run(["sentence_embedding"], session_inputs)
    assert close(vectors, reference.encode(TEXTS[:1]))
    assert (tmp_path / "onnx/2_Dense/model.safetensors").exists()


def test_documents_use_the_prompt_of_passages_by_default(body: Path, tmp_path: Path) -> None:
    reference = make_encoder(body, prompts={"query": "query : ", "passage": "passage : "}, default_prompt_name="query")
    reference.save(str(tmp_path / "theirs"))
    path = tmp_path / "theirs" / PROMPTS
    values = json.loads(path.read_text())
    del values["prompts"]["document"]  # version 6 adds this prompt
    path.write_text(json.dumps(values))
    engine = heedful.Engine(tmp_path / "theirs")
    assert engine.prompt("document", "passage", "corpus") == "passage : " and engine.prompt("none") == "query : "
    assert close(engine.encode_document(TEXTS), reference.encode(TEXTS, prompt="passage : "))


def write_pairs(folder: Path) -> Path:
    """Write training pairs to a file; returns the path."""
    path = folder / "pairs.jsonl"
    texts = [text for text in TEXTS if text]
    rows = [{"anchor": first, "positive": second} for first in texts for second in texts if first != second]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_training_reads_the_default_prompt_and_trains_dense_layers(body: Path, tmp_path: Path) -> None:
    reference = make_encoder(
        body, make_dense(32, 16), Normalize(), prompts={"task": "query : "}, default_prompt_name="task", truncate_dim=12
    )
    reference.save(str(tmp_path / "theirs"))
    data = write_pairs(tmp_path)
    heedful.finetune(
        "embed", data, output_dir=tmp_path / "run", model=tmp_path / "theirs", epochs=1, batch_size=4, group_size=4
    )
    trained = heedful.load(tmp_path / "run")
    assert isinstance(trained.config.head, SentenceEmbedding)
    assert trained.config.head.default_prompt == "task" and trained.config.head.dimensions == 12
    before, after = (
        loaded.named_tensors()["head.dense.0.weight"] for loaded in (heedful.load(tmp_path / "theirs"), trained)
    )
    assert not torch.equal(before, after)
    reloaded = SentenceTransformer(str(tmp_path / "run/model"), device="cpu")
    assert close(heedful.Engine(tmp_path / "run").encode(TEXTS), reloaded.encode(TEXTS))


def test_training_with_a_prompt_that_is_not_pooled_is_refused(body: Path, tmp_path: Path) -> None:
    settings = {"prompts": {"task": "query : "}, "default_prompt_name": "task", "include_prompt": False}
    make_encoder(body, **settings).save(str(tmp_path / "theirs"))
    with pytest.raises(HeedfulError, match="before each text and does not pool its tokens"):
        heedful.finetune(
            "embed", write_pairs(tmp_path), output_dir=tmp_path / "run", model=tmp_path / "theirs", epochs=1
        )


def test_a_head_with_dense_layers_describes_itself() -> None:
    head = SentenceEmbedding(dense=(DenseLayer(width=12),), dimensions=8, prompts=(("a", "b"),), default_prompt="a")
    assert head.prompt() == "b" and head.prompt("c") == "b" and SentenceEmbedding().prompt("a") == ""


# -- cross-encoders -------------------------------------------------------------------------------------------

PAIRS = [("bird", "a bird sings"), ("the ferry leaves", "at noon"), ("query", "a longer sentence about nothing")]
SIGMOID, IDENTITY = "torch.nn.modules.activation.Sigmoid", "torch.nn.modules.linear.Identity"
OLD_KEY, NEW_KEY = "sbert_ce_default_activation_function", "sentence_transformers"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """Folder of a tiny BERT with a classifier of one label."""
    folder = tmp_path_factory.mktemp("classifier")
    return save_bert(folder, tokenizer, transformers.BertForSequenceClassification, num_labels=1)


def write_cross_encoder(version: int, classifier: Path, folder: Path, activation: str) -> Path:
    """Write a cross-encoder as a version of sentence-transformers does; returns the folder."""
    if version == 6:
        kind = torch.nn.Sigmoid() if activation == SIGMOID else torch.nn.Identity()
        CrossEncoder(str(classifier), device="cpu", activation_fn=kind).save_pretrained(str(folder))
        return folder
    heedful.save(heedful.load(classifier), folder)
    values = json.loads((folder / "config.json").read_text())
    values |= {OLD_KEY: activation} if version == 3 else {NEW_KEY: {"activation_fn": activation, "version": "4.1.0"}}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("version", [3, 4, 6])
@pytest.mark.parametrize("activation", [SIGMOID, IDENTITY])
def test_cross_encoders_score_as_in_sentence_transformers(
    classifier: Path, tmp_path: Path, version: int, activation: str
) -> None:
    folder = write_cross_encoder(version, classifier, tmp_path / "theirs", activation)
    expected = CrossEncoder(str(folder), device="cpu").predict(PAIRS)
    engine = heedful.Engine(folder)
    actual = [answer["values"]["LABEL_0"] for answer in engine(PAIRS)]
    assert close(np.array(actual), expected)
    heedful.save(heedful.load(folder), tmp_path / "ours")
    assert heedful.load(tmp_path / "ours").config.head == engine.loaded.config.head
    assert (CrossEncoder(str(tmp_path / "ours"), device="cpu").predict(PAIRS) == expected).all()


def test_a_new_head_has_no_activation_of_scores(classifier: Path, tmp_path: Path) -> None:
    from heedful.checkpoint.new_head import with_head

    loaded = heedful.load(write_cross_encoder(3, classifier, tmp_path / "theirs", SIGMOID))
    assert isinstance(loaded.config.head, Classes) and loaded.config.head.score_activation == "sigmoid"
    new = with_head(loaded, "sequence_classification", labels=["a", "b"])
    assert isinstance(new.config.head, Classes) and new.config.head.score_activation is None
    heedful.save(new, tmp_path / "ours")
    assert OLD_KEY not in json.loads((tmp_path / "ours/config.json").read_text())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({OLD_KEY: "torch.nn.modules.activation.Softmax"}, f"{OLD_KEY} is '.*Softmax'; expected one of"),
        ({OLD_KEY: SIGMOID, "id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}}, "softmax of 2 labels"),
    ],
)
def test_other_activations_of_scores_are_refused(
    classifier: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    heedful.save(heedful.load(classifier), tmp_path / "model")
    values = json.loads((tmp_path / "model/config.json").read_text())
    values.pop("problem_type", None)
    (tmp_path / "model/config.json").write_text(json.dumps(values | changed))
    with pytest.raises(HeedfulError, match=message):
        heedful.load(tmp_path / "model")
