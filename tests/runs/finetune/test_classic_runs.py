"""Runs of classic models: new word embeddings, vectors from files and from skip-gram, and frozen encoders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import heedful
from heedful.bundled import BUNDLED_ENCODER
from heedful.checkpoint import ModelBundle, load
from heedful.checkpoint.new_head import with_head
from heedful.errors import HeedfulError
from heedful.model.classic import sentence_bounds
from heedful.model.classic_config import BagPooling, ClassicConfig, HierarchicalPooling
from heedful.packed import Packed
from heedful.runs.finetune import classic as classic_module
from heedful.runs.finetune.classic import classic_model, skipgram_samples, with_sentence_ends
from heedful.runs.finetune.init_settings import ClassicInit, WordSettings
from heedful.runs.finetune.plan import plan_finetune
from heedful.runs.results import read_predictions
from heedful.serve.attention import attention_response
from heedful.tokenizer import Tokenizer, TokenizerSettings, train_tokenizer
from heedful.tokenizer.words import word_tokenizer
from tests.support.generated_data import classification_rows, finetune_tiny, write_splits
from tests.support.model_folders import make_model_dir
from tests.support.reporters import Messages

CLASSIC = {"init.kind": "classic", "init.reader.kind": "attention", "init.words.width": 8}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave out the measurement of latency, and compute with one thread, so that equal runs are equal."""
    latency = {"latency": {"16": {"p50": 1.0, "p99": 1.0}}, "throughput": 1}
    monkeypatch.setattr("heedful.runs.run.measure_latency", lambda loaded: latency)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def ignore(message: str) -> None:
    """Receive a message of `classic_model`, and do nothing."""


def tokenizer_of(bundle: ModelBundle) -> Tokenizer:
    assert bundle.tokenizer is not None
    return bundle.tokenizer


def embedding_of(bundle: ModelBundle, word: str) -> list[float]:
    """Return the embedding of a word of the vocabulary."""
    id = tokenizer_of(bundle).id(word)
    assert id is not None, word
    vector: list[float] = bundle.model.embedding.tokens.weight[id].tolist()
    return vector


def test_a_run_with_new_word_embeddings_is_complete(tmp_path: Path) -> None:
    data, run = write_splits("single", tmp_path / "data"), tmp_path / "run"
    results = finetune_tiny("classify", data, run, CLASSIC).results
    assert results["base"] == "a classic model"
    assert results["splits"].keys() == {"dev", "test"}
    loaded = load(run)
    model = loaded.config.model
    assert isinstance(model, ClassicConfig)
    assert model.reader.kind == "attention"
    assert model.embedding.width == 8
    assert "The model's architecture is Heedful's own" in (run / "model/README.md").read_text("utf-8")
    engine = heedful.Engine(loaded)
    for prediction in read_predictions(run, "test"):
        (answer,) = engine([prediction["input"]])
        assert answer["probabilities"] == pytest.approx(prediction["answer"]["probabilities"], abs=1e-6)
    with pytest.raises(HeedfulError, match="no layers of self-attention"):
        attention_response(engine, "the cat sat", None, None, 1000)


def test_a_resumed_run_has_the_same_weights(tmp_path: Path) -> None:
    data, uninterrupted, resumed = write_splits("single", tmp_path / "data"), tmp_path / "one", tmp_path / "two"
    finetune_tiny("classify", data, uninterrupted, CLASSIC)
    stop = Messages(stop_after=2)
    assert finetune_tiny("classify", data, resumed, CLASSIC, reporter=stop).status == "interrupted"
    assert finetune_tiny("classify", data, resumed, CLASSIC).status == "completed"
    weights, expected = (run / "model/model.safetensors" for run in (resumed, uninterrupted))
    assert weights.read_bytes() == expected.read_bytes()


def test_vectors_come_from_a_file(tmp_path: Path) -> None:
    texts = [row["text"] for row in classification_rows(24)]
    (tmp_path / "vectors.txt").write_text("cat 1 2\nzebra 3 4\nlove 5 6\nyak 7 8\n")
    messages: list[str] = []
    words = WordSettings(vectors=str(tmp_path / "vectors.txt"), vocab_size=60, frozen=True)
    init = ClassicInit(reader=BagPooling(), words=words)
    model = classic_model(init, texts, 0, messages.append)
    assert not model.model.embedding.tokens.weight.requires_grad
    for word, vector in (("cat", [1, 2]), ("zebra", [3, 4]), ("love", [5, 6]), ("yak", [7, 8])):
        assert embedding_of(model, word) == vector
    sentence = "1 of 26 words of the texts have a vector from the file, the others random ones; 3 more words"
    assert any(sentence in message for message in messages)
    (tmp_path / "vectors.txt").write_text("zebra 3 4\n")
    with pytest.raises(HeedfulError, match=r"has a vector for none of the \d+ words of the training texts"):
        classic_model(init, texts, 0, messages.append)


def test_vectors_come_from_skip_gram(tmp_path: Path) -> None:
    texts = [row["text"] for row in classification_rows(24)]
    messages: list[str] = []
    init = ClassicInit(reader=BagPooling(), words=WordSettings(width=8), skipgram_steps=3)
    tensors = classic_model(init, texts, 0, messages.append).named_tensors()
    assert "vectors learned by skip-gram" in messages[-1]
    repeated = classic_model(init, texts, 0, messages.append).named_tensors()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, repeated[name]), name


def test_words_of_a_file_are_normalised_as_those_of_texts(tmp_path: Path) -> None:
    vectors = "für 1 1\nDie 2 2\ndie 3 3\nKatze 4 4\nNew_York 5 5\nU.S. 6 6\nRöße 7 7\n"
    (tmp_path / "vectors.txt").write_text(vectors, "utf-8")
    words = WordSettings(vectors=str(tmp_path / "vectors.txt"))
    messages: list[str] = []
    model = classic_model(ClassicInit(reader=BagPooling(), words=words), ["für die Katze", "schön"], 0, messages.append)
    tokenizer = tokenizer_of(model)
    (ids,) = tokenizer.ids(["für die Katze"])
    table = model.model.embedding.tokens.weight.detach()
    assert table[torch.from_numpy(ids)].tolist() == [[1, 1], [3, 3], [4, 4]], '"die" has precedence over "Die"'
    assert messages[-1].startswith("3 of 4 words of the texts have a vector from the file")
    assert {tokenizer.name(id) for id in range(tokenizer.size)} >= {"roße", "katze"}
    assert tokenizer.size == 6, "New_York and U.S. are no single words of texts"
    cased = ClassicInit(reader=BagPooling(), words=replace(words, lower_case=False))
    classic_model(cased, ["für die Katze"], 0, messages.append)
    assert messages[-1].startswith("3 of 3 words")


def test_the_vocabulary_of_words_is_built_from_all_texts() -> None:
    all_texts = iter(["one two", "three"])
    model = classic_model(ClassicInit(reader=BagPooling()), ["one two"], 0, ignore, all_texts=all_texts)
    assert tokenizer_of(model).id("three") is not None


@pytest.mark.parametrize(
    "words", [WordSettings(), WordSettings(tokens="subwords", vocab_size=60)], ids=["words", "subwords"]
)
def test_the_vector_of_unknown_words_is_zero(words: WordSettings) -> None:
    """No training text has unknown words, so that a random vector would remain and decide answers."""
    model = classic_model(ClassicInit(reader=BagPooling(), words=words), ["one two three"] * 9, 0, ignore)
    unknown = tokenizer_of(model).special.unknown
    assert unknown is not None
    assert not model.model.embedding.tokens.weight[unknown].any()


def test_a_text_of_unknown_words_is_answered_as_an_empty_text() -> None:
    model = classic_model(ClassicInit(reader=BagPooling()), ["one two"], 0, ignore)
    engine = heedful.Engine(with_head(model, "sequence_classification", labels=("a", "b")))
    known, unknown, empty = (answer["probabilities"] for answer in engine(["one", "zebra yak", ""]))
    assert unknown == empty
    assert unknown != known


def test_random_weights_depend_on_the_seed(tmp_path: Path) -> None:
    data = write_splits("single", tmp_path / "data")
    settings = CLASSIC | {"init.reader.over.kind": "recurrent", "init.reader.over.width": 4, "train.epochs": 1}
    finetune_tiny("classify", data, tmp_path / "two seeds", settings | {"seeds": 2, "train.seed": 1})
    finetune_tiny("classify", data, tmp_path / "second seed", settings | {"train.seed": 2})
    of_first, of_second = (load(tmp_path / "two seeds" / name).named_tensors() for name in ("start", "start-2"))
    for name, tensor in of_first.items():
        if "bias" not in name:
            assert not torch.equal(tensor, of_second[name]), name
    weights = tmp_path / "two seeds/seed-2/model/model.safetensors"
    assert weights.read_bytes() == (tmp_path / "second seed/model/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("task", "reader", "message"),
    [
        (
            "embed",
            {"kind": "structured"},
            'init.reader.kind is "structured".* embed needs the hidden state of each token',
        ),
        (
            "tag",
            {"kind": "bag", "how": "sum"},
            "init.reader has more settings than over: tag needs the hidden state of each token",
        ),
        ("qa", {"kind": "bag"}, "classic models have no head for qa"),
        ("regress", {"kind": "bag", "binary": "sigmoid"}, 'binary is "sigmoid", which is only for one label'),
    ],
)
def test_poolings_that_a_task_cannot_use_are_refused(
    tmp_path: Path, task: str, reader: dict[str, str], message: str
) -> None:
    data = write_splits(task, tmp_path / "data")
    settings = {"init.kind": "classic"} | {f"init.reader.{name}": value for name, value in reader.items()}
    with pytest.raises(HeedfulError, match=message):
        finetune_tiny(task, data, tmp_path / "run", settings)


def test_a_single_score_for_three_labels_is_refused_by_the_plan(tmp_path: Path) -> None:
    rows = "".join(f"a cat {number},{number % 3}\n" for number in range(30))
    (tmp_path / "data.csv").write_text(f"text,label\n{rows}")
    assignments = ["init.kind=classic", "init.reader.binary=sigmoid"]
    with pytest.raises(HeedfulError, match=r'init\.reader\.binary is "sigmoid", which is for two labels, .* are 3:'):
        plan_finetune("classify", tmp_path / "data.csv", assignments=assignments)


# -- the ends of sentences for hierarchical pooling ---------------------------------------------------------------


def test_the_token_that_ends_a_text_belongs_to_the_last_sentence() -> None:
    texts = ["one two three. four five!", "six seven."] * 9
    words = WordSettings(tokens="subwords", vocab_size=60)
    bundle = classic_model(ClassicInit(reader=HierarchicalPooling(), words=words), texts, 0, ignore)
    assert isinstance(bundle.config.model, ClassicConfig)
    reader = bundle.config.model.reader
    assert isinstance(reader, HierarchicalPooling)
    batch = Packed.of([ids.tolist() for ids in tokenizer_of(bundle).ids(texts[:2])])
    _, sentences_of_texts = sentence_bounds(batch, reader.ends)
    assert sentences_of_texts == (0, 2, 3), "two sentences and one sentence"


def test_a_vocabulary_without_ends_of_sentences_is_refused() -> None:
    with pytest.raises(HeedfulError, match=r"no token ends a sentence: the vocabulary has none of \. ! \?"):
        classic_model(ClassicInit(reader=HierarchicalPooling()), ["one two", "three"], 0, ignore)


def test_ids_of_ends_that_are_no_tokens_are_refused() -> None:
    tokenizer = word_tokenizer(["one", "."])
    with_ends = HierarchicalPooling(ends=(0, 2))
    assert with_sentence_ends(with_ends, tokenizer) == with_ends
    for id in (-1, 3):
        with pytest.raises(HeedfulError, match=rf"init\.reader\.ends has {id}, which is no token: ids .* 0 to 2;"):
            with_sentence_ends(HierarchicalPooling(ends=(2, id)), tokenizer)


@pytest.mark.parametrize(("algorithm", "vocab_size"), [("bpe", 330), ("unigram", 80), ("wordpiece", 80)])
def test_the_tokens_that_end_a_sentence_are_found_in_each_kind_of_vocabulary(algorithm: Any, vocab_size: int) -> None:
    """Some are several marks, and some have a quotation mark after them."""
    texts = ['It is good . Bad ! He said "go." And … then ?! Stop... 2 of 3', "你好。 再见！"] * 9
    tokenizer = train_tokenizer(texts, TokenizerSettings(algorithm=algorithm, vocab_size=vocab_size))
    reader = with_sentence_ends(HierarchicalPooling(), tokenizer)
    assert isinstance(reader, HierarchicalPooling)
    end_tokens = {tokenizer.decode([id]).strip() for id in reader.ends if id != tokenizer.special.eos_or_sep}
    assert {".", "!"} <= end_tokens
    assert set("".join(end_tokens)) <= set('.!?…。！"')
    for text in ("good . bad", "good! bad", "good. bad"):
        batch = Packed.of([ids.tolist() for ids in tokenizer.ids([text])])
        bounds, _ = sentence_bounds(batch, reader.ends)
        assert len(bounds) == 3, f"{text}: two sentences"


# -- other cases --------------------------------------------------------------------------------------------------


def test_skip_gram_splits_long_texts_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classic_module, "MAX_SKIPGRAM_TOKENS", 4)
    tokenizer = word_tokenizer(["a", "b", "c"])
    samples = skipgram_samples(tokenizer, ["a b c a b c a b c", "a b", "c"])
    chunks = [tokenizer.decode(sample.tokens.tolist()) for sample in samples]
    assert chunks == ["a b c a", "b c a b", "a b"], "without the single tokens at the ends"


def test_the_vector_of_an_empty_text_is_zero(tmp_path: Path) -> None:
    """Training and evaluation accept an empty text too."""
    rows = "".join(f"a cat {number},one cat {number}\n" for number in range(12)) + ",foo\n"
    data, run = tmp_path / "data", tmp_path / "run"
    data.mkdir()
    for split in ("train", "dev"):
        (data / f"{split}.csv").write_text("a,b\n" + rows)
    results = finetune_tiny("embed", data, run, CLASSIC | {"init.reader.kind": "bag"}).results
    assert results["splits"]["dev"]["numbers"]["count"] == 13
    answer, empty_answer = heedful.Engine(run)(["a cat", ""])
    assert any(answer["vector"])
    assert not any(empty_answer["vector"])


def test_a_frozen_encoder_below_a_classic_model_is_not_trained(tmp_path: Path) -> None:
    encoder, run = make_model_dir(tmp_path / "encoder", "bare"), tmp_path / "run"
    settings = {
        "init.kind": "classic",
        "init.reader.kind": "structured",
        "init.reader.hops": 2,
        "init.reader.inner": 5,
        "init.reader.over.kind": "recurrent",
        "init.reader.over.width": 4,
        "train.epochs": 1,
    }
    results = finetune_tiny("classify", write_splits("single", tmp_path / "data"), run, settings, model=encoder).results
    assert str(encoder) in results["base"]
    tensors, encoder_tensors = load(run).named_tensors(), load(encoder).named_tensors()
    names = [name for name in encoder_tensors if name.startswith(("embedding.", "encoder."))]
    assert names
    for name in names:
        assert torch.equal(tensors[name], encoder_tensors[name]), name
    assert load(run).max_length == load(encoder).max_length


@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        ({"init.words.width": 8}, "", 'init.words is for init.kind = "classic"'),
        (CLASSIC | {"init.reader.kind": "bags"}, "", 'init.reader.kind is "bags", expected one of "bag", "attention"'),
        (CLASSIC | {"init.words.dropout": 1}, "", "dropout is 1"),
        (CLASSIC, BUNDLED_ENCODER, "init.words would change nothing: hidden states of"),
        (
            {"init.kind": "classic", "init.skipgram_steps": 3},
            BUNDLED_ENCODER,
            "init.skipgram_steps would change nothing: hidden states of",
        ),
    ],
)
def test_unusable_settings_are_refused(settings: dict[str, Any], model: str, message: str, tmp_path: Path) -> None:
    data = write_splits("single", tmp_path / "data")
    with pytest.raises(HeedfulError, match=message):
        finetune_tiny("classify", data, tmp_path / "run", settings, model=model)
